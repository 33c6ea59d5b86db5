"""RMSNorm and LayerNorm in few bits, as their input's scale and width grow.

    RMSNorm    y = x / sqrt(mean(x^2) + epsilon)                                      (Zhang and Sennrich 2019)
    LayerNorm  y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon)              (Ba, Kiros and Hinton 2016)

without weights. In a format whose largest number is L a square overflows above sqrt(L), and the mean of squares is then
infinite, its inverse root zero, and the row of outputs zero: no NaN tells of it. A square vanishes below the root of
half the smallest subnormal number. How the mean is taken decides what its width does:

    in turn          every partial sum rounded to the format: the sum stops growing (see accumulation.py)
    sum, then divide PyTorch's sum, which accumulates in fp32 and rounds once; the sum of squares overflows
    mean             PyTorch's mean, which divides in fp32 before it rounds
    upcast           the safe way: everything in fp32, the output rounded (`models/transformer.py`)
    PyTorch's own    F.rms_norm and F.layer_norm

Shape legend: R rows, W width.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stepscope.core.errors import InputError
from stepscope.core.experiment import Cell, Experiment, Panel, Point, Table
from stepscope.core.float_format import FORMATS
from stepscope.measure.device import resolve_device
from stepscope.models.transformer import NORM_EPSILON
from stepscope.numerics.accumulation import DTYPES
from stepscope.numerics.against_float64 import INPUT_OVERFLOWS, last_number_where, next_number, outcome
from stepscope.numerics.normalisation_findings import (
    BUILT_IN,
    IN_TURN,
    MEAN,
    NORMS,
    SPREAD,
    SUM,
    UPCAST,
    WAYS,
    NormCase,
    NormLimits,
    kind_of_number,
    norm_findings,
    of_norm,
)
from stepscope.numerics.setting import device_name, versions

SCALES = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4)
"""Standard deviations of the input, which is normal with mean zero."""
WIDTHS = (256, 1024, 4096, 16384)
EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12)
_ROWS = 8


def study_normalisation(
    tell: Callable[..., None] | None = None,
    *,
    device: str = "cpu",
    scales: Sequence[float] = SCALES,
    widths: Sequence[int] = WIDTHS,
    epsilon: float = NORM_EPSILON,
    seed: int = 0,
) -> Experiment:
    """Both norms in every format and way: by scale at the middle width, by width at scale 1, by epsilon where small.

    The input is normal, rounded to the format before anything is done with it; the float64 reference has the rounded
    input, so that errors are of the norm alone. Raises InputError for a device that is not there, and for an epsilon
    that is not a number above zero.
    """
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise InputError(f"epsilon is {epsilon:g}: give a finite number above zero, as in 1e-5")
    if epsilon > FORMATS["fp16"].largest:
        raise InputError(f"epsilon is {epsilon:g}, and fp16 ends at {FORMATS['fp16'].largest:g}: choose one as 1e-5")
    where = resolve_device(device)
    scales, widths = sorted(scales), sorted(widths)
    middle = widths[len(widths) // 2]
    by_scale, by_width, by_epsilon = [], [], []
    for norm in NORMS:
        for name in DTYPES:
            for way in WAYS:
                if name == "fp32" and way == UPCAST:
                    continue  # the same as its mean
                run = _Runner(norm=norm, format=name, way=way, seed=seed, device=where)
                by_scale += run.cases(scales, middle, epsilon)
                if way != BUILT_IN:
                    by_width += [case for width in widths for case in run.cases((1.0,), width, epsilon)]
                if norm == "RMSNorm" and way in (MEAN, UPCAST):
                    by_epsilon += [case for each in EPSILONS for case in run.cases((min(scales),), middle, each)]
    limits = [_limits(name, epsilon, where) for name in DTYPES]
    return Experiment(
        study="normalisation",
        question="Where do RMSNorm and LayerNorm break in few bits, and does upcasting mend it?",
        device=device_name(where),
        versions=versions(),
        settings={"epsilon": epsilon, "width": middle, "rows": _ROWS, "seed": seed},
        tables=(
            _limits_table(limits, epsilon),
            *(
                _pivot(f"{norm}: error of the output by the input's scale", of_norm(by_scale, norm), "scale")
                for norm in NORMS
            ),
            *(
                _pivot(f"{norm}: error of the {SPREAD[norm]} by the width", of_norm(by_width, norm), "width")
                for norm in NORMS
            ),
            _pivot(f"RMSNorm: error of the output at scale {scales[0]:g} by epsilon", by_epsilon, "epsilon"),
        ),
        panels=(*(_scale_panel(of_norm(by_scale, norm), norm) for norm in NORMS),
                *(_width_panel(of_norm(by_width, norm), norm) for norm in NORMS)),
        findings=tuple(norm_findings(limits, by_scale, by_width, by_epsilon)),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Runner:
    """One norm in one format, one way."""

    norm: str
    format: str
    way: str
    seed: int
    device: torch.device

    def cases(self, scales: Sequence[float], width: int, epsilon: float) -> list[NormCase]:
        """A case for each scale, in which the same random numbers are multiplied by the scale."""
        # Made on the CPU: the same numbers on every device.
        generator = torch.Generator().manual_seed(self.seed)
        x64_RW = torch.randn(_ROWS, width, generator=generator, dtype=torch.float64)
        # All scales at once, since in turn a width costs as many calls as it has numbers.
        x_SRW = torch.stack([x64_RW * scale for scale in scales]).to(self.device, DTYPES[self.format])
        spreads, outputs = normalise(x_SRW, self.norm, self.way, epsilon)
        right_spreads, right_outputs = normalise(x_SRW.double(), self.norm, MEAN, epsilon)
        found = []
        for i, scale in enumerate(scales):
            largest = x_SRW[i].abs().max().item()
            output = spread = INPUT_OVERFLOWS
            if math.isfinite(largest):
                output, spread = outcome(outputs[i], right_outputs[i]), outcome(spreads[i], right_spreads[i])
            found.append(
                NormCase(
                    norm=self.norm, format=self.format, way=self.way, scale=scale, width=width, epsilon=epsilon,
                    largest=largest, output=output, spread=spread,
                )
            )  # fmt: skip
        return found


def normalise(x_RW: Tensor, norm: str, way: str, epsilon: float) -> tuple[Tensor, Tensor]:
    """Rows (..., W) normalised in their own format by one of WAYS: what was divided by, (..., 1), and the output.

    What is divided by is the root of the mean of squares or of the variance, which is returned before epsilon and the
    root. PyTorch's own norms do not show theirs: NaN stands in its place.
    """
    if way == BUILT_IN:
        function = F.rms_norm if norm == "RMSNorm" else F.layer_norm
        return torch.full_like(x_RW[..., :1], math.nan), function(x_RW, x_RW.shape[-1:], eps=epsilon)
    if way == UPCAST:
        spread, y_RW = normalise(x_RW.float(), norm, MEAN, epsilon)
        return spread, y_RW.to(x_RW.dtype)
    if norm == "LayerNorm":
        x_RW = x_RW - _average(x_RW, way)
    spread = _average(x_RW * x_RW, way)
    # As a tensor epsilon is rounded to the format first; as a Python number PyTorch would add it in fp32.
    small = torch.tensor(epsilon, dtype=x_RW.dtype, device=x_RW.device)
    return spread, x_RW * torch.rsqrt(spread + small)


def _average(x_RW: Tensor, way: str) -> Tensor:
    if way == MEAN:
        return x_RW.mean(dim=-1, keepdim=True)
    if way == SUM:
        return x_RW.sum(dim=-1, keepdim=True) / x_RW.shape[-1]
    total_R = torch.zeros_like(x_RW[..., 0])
    for x_R in x_RW.movedim(-1, 0).contiguous().unbind():
        total_R += x_R
    return total_R.unsqueeze(-1) / x_RW.shape[-1]


def _limits(name: str, epsilon: float, device: torch.device) -> NormLimits:
    dtype = DTYPES[name]
    held = torch.tensor(epsilon, dtype=dtype, device=device)
    largest = last_number_where(lambda x: torch.isfinite(x * x), dtype, device)
    return NormLimits(
        format=name,
        largest_square_of=largest,
        overflows_at=next_number(largest, dtype),
        vanishes_up_to=last_number_where(lambda x: x * x == 0, dtype, device),
        epsilon=held.item(),
        swallowed_from=_swallowed_from(name, held.item()),
    )


def _swallowed_from(name: str, epsilon: float) -> float:
    """The power of two from which half a spacing is more than epsilon: from there on no sum takes it."""
    if epsilon == 0:
        return 0.0
    form = FORMATS[name]
    power = math.frexp(epsilon)[1] + form.significand_bits
    while form.spacing(2.0**power) / 2 > epsilon:
        power -= 1
    while form.spacing(2.0**power) / 2 <= epsilon:
        power += 1
    return 2.0**power


def _limits_table(limits: list[NormLimits], epsilon: float) -> Table:
    columns = (
        "format", "largest whose square is finite", "square overflows at", "square is zero up to",
        f"epsilon {epsilon:g} becomes", "which is", "swallowed beside a mean of squares from",
    )  # fmt: skip
    rows = tuple(
        (
            found.format, found.largest_square_of, found.overflows_at, found.vanishes_up_to, found.epsilon,
            kind_of_number(found.epsilon, found.format), found.swallowed_from,
        )
        for found in limits
    )  # fmt: skip
    return Table(title="Squares and epsilon in each format", columns=columns, rows=rows)


def _pivot(title: str, cases: list[NormCase], by: str) -> Table:
    """A row a format and way, a column a value of `by`."""
    values = list(dict.fromkeys(getattr(case, by) for case in cases))
    rows: dict[tuple[str, str], list[Cell]] = {}
    for case in cases:
        shown = case.spread if by == "width" else case.output
        rows.setdefault((case.format, case.way), []).append(shown.cell)
    return Table(
        title=title,
        columns=("format", "way", *(f"{value:g}" for value in values)),
        rows=tuple((*names, *cells) for names, cells in rows.items()),
    )


def _scale_panel(cases: list[NormCase], norm: str) -> Panel:
    """Curves of the output's error. A row of zeros has an error of 1; an error that is not finite is left out."""
    return Panel(
        x_title="standard deviation of the input",
        y_title=f"relative error of {norm}",
        points=tuple(
            Point(line=f"{case.format}, {case.way}", x=case.scale, y=case.output.error)
            for case in cases
            if case.output.error > 0 and case.way in {"fp32": (MEAN,)}.get(case.format, (SUM, MEAN, UPCAST))
        ),
        x_log=True,
        y_log=True,
    )


def _width_panel(cases: list[NormCase], norm: str) -> Panel:
    return Panel(
        x_title="width",
        y_title=f"relative error of the {SPREAD[norm]} of {norm}",
        points=tuple(
            Point(line=f"{case.format}, {case.way}", x=float(case.width), y=case.spread.error)
            for case in cases
            if case.spread.error > 0 and (case.way in (IN_TURN, MEAN))
        ),
        x_log=True,
        y_log=True,
    )
