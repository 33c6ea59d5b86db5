"""RMSNorm and LayerNorm in few bits as a study: by the input's scale, by the width, and by epsilon."""

import functools
import math
from collections.abc import Iterable, Sequence

from stepscope.core.answer import Answer, Cell, Panel, Table
from stepscope.core.errors import InputError
from stepscope.core.float_format import FORMATS
from stepscope.questions.against_float64 import DTYPES
from stepscope.questions.answers import computed_answer, curves, pivot
from stepscope.questions.normalisation.cases import (
    BUILT_IN,
    IN_TURN,
    MEAN,
    NORMS,
    ROWS,
    SPREAD,
    SUM,
    UPCAST,
    WAYS,
    NormCase,
    NormLimits,
    kind_of_number,
    norm_cases,
    norm_limits,
    of_norm,
)
from stepscope.questions.normalisation.findings import norm_findings
from stepscope.recording.device import resolve_device
from stepscope.training.transformer import NORM_EPSILON

SCALES = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4)
"""Standard deviations of the input, which is normal with mean zero."""
WIDTHS = (256, 1024, 4096, 16384)
EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12)


def study_normalisation(
    *,
    device: str = "cpu",
    scales: Sequence[float] = SCALES,
    widths: Sequence[int] = WIDTHS,
    epsilon: float = NORM_EPSILON,
    seed: int = 0,
) -> Answer:
    """Try both norms in every format and way: by scale at the middle width, by width, and by epsilon on small inputs.

    The input is normal, rounded to the format before anything is done with it; the float64 reference has the rounded
    input, so that errors are of the norm alone. Raises InputError for a device that is not there, and for an epsilon
    that is not a number above zero.
    """
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise InputError(f"epsilon is {epsilon:g}: give a finite number above zero, as in 1e-5")
    if epsilon > FORMATS["fp16"].largest:
        raise InputError(f"epsilon is {epsilon:g}, and fp16 ends at {FORMATS['fp16'].largest:g}: choose one as 1e-5")
    on = resolve_device(device)
    scales, widths = sorted(scales), sorted(widths)
    middle = widths[len(widths) // 2]
    by_scale, by_width, by_epsilon = [], [], []
    for norm in NORMS:
        for name in DTYPES:
            for way in WAYS:
                if name == "fp32" and way == UPCAST:
                    continue  # the same as its mean
                cases = functools.partial(norm_cases, norm, name, way, device=on, seed=seed)
                by_scale += cases(scales=scales, width=middle, epsilon=epsilon)
                for width in widths if way != BUILT_IN else ():
                    by_width += cases(scales=(1.0,), width=width, epsilon=epsilon)
                for each in EPSILONS if norm == "RMSNorm" and way in (MEAN, UPCAST) else ():
                    by_epsilon += cases(scales=(min(scales),), width=middle, epsilon=each)
    limits = [norm_limits(name, epsilon, on) for name in DTYPES]
    return computed_answer(
        on,
        study="normalisation",
        question="Where do RMSNorm and LayerNorm break in few bits, and does upcasting mend it?",
        settings={"epsilon": epsilon, "width": middle, "rows": ROWS, "seed": seed},
        tables=(
            _limits(limits, epsilon),
            *(_by(f"{norm}: error of the output by the input's scale", of_norm(by_scale, norm), "scale")
              for norm in NORMS),
            *(_by(f"{norm}: error of the {SPREAD[norm]} by the width", of_norm(by_width, norm), "width")
              for norm in NORMS),
            _by(f"RMSNorm: error of the output at scale {scales[0]:g} by epsilon", by_epsilon, "epsilon"),
        ),
        panels=(*(_scale_panel(of_norm(by_scale, norm), norm) for norm in NORMS),
                *(_width_panel(of_norm(by_width, norm), norm) for norm in NORMS)),
        findings=norm_findings(limits, by_scale, by_width, by_epsilon),
    )  # fmt: skip


def _limits(limits: Iterable[NormLimits], epsilon: float) -> Table:
    columns = (
        "format", "largest whose square is finite", "square overflows at", "square is zero up to",
        f"epsilon {epsilon:g} becomes", "which is", "swallowed beside a mean of squares from",
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = [
        (
            found.format, found.largest_square_of, found.overflows_at, found.vanishes_up_to, found.epsilon,
            kind_of_number(found.epsilon, found.format), found.swallowed_from,
        )
        for found in limits
    ]  # fmt: skip
    return Table(title="Squares and epsilon in each format", columns=columns, rows=tuple(rows))


def _by(title: str, cases: Iterable[NormCase], field: str) -> Table:
    """A row for each format and way, a column for each value of the field."""
    cells = (
        ((case.format, case.way), getattr(case, field), (case.spread if field == "width" else case.output).cell)
        for case in cases
    )
    return pivot(title, ("format", "way"), cells)


def _scale_panel(cases: Iterable[NormCase], norm: str) -> Panel:
    """Curves of the output's error. A row of zeros has an error of 1."""
    shown = [case for case in cases if case.way == MEAN or (case.format != "fp32" and case.way in (SUM, UPCAST))]
    return curves(
        ((f"{case.format}, {case.way}", case.scale, case.output.plotted) for case in shown),
        x_title="standard deviation of the input", y_title=f"relative error of {norm}", x_log=True, y_log=True,
    )  # fmt: skip


def _width_panel(cases: Iterable[NormCase], norm: str) -> Panel:
    return curves(
        (
            (f"{case.format}, {case.way}", float(case.width), case.spread.plotted)
            for case in cases
            if case.way in (IN_TURN, MEAN)
        ),
        x_title="width", y_title=f"relative error of the {SPREAD[norm]} of {norm}", x_log=True, y_log=True,
    )  # fmt: skip
