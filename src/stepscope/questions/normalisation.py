"""RMSNorm and LayerNorm in few bits as a study: by the input's scale, by the width, and by epsilon."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from stepscope.core.answer import Answer, Cell, Finding, Panel, Table, note, warning
from stepscope.core.errors import InputError
from stepscope.core.float_formats import FORMATS
from stepscope.core.options import NUMBERS, Numbers, Option, positive_integers, positive_number
from stepscope.questions import answers
from stepscope.questions.answers import Deviation, computed_answer, deviation, quoted
from stepscope.questions.one_model import Configuration, given_ones, of_own_model, refuse_textbook
from stepscope.questions.question import Question

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# RMSNorm and LayerNorm in few bits, as their input's scale and width grow.
#
#     RMSNorm    y = x / sqrt(mean(x^2) + epsilon)                                      (Zhang and Sennrich 2019)
#     LayerNorm  y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon)              (Ba, Kiros and Hinton 2016)
#
# without weights. In a format whose largest number is L a square overflows above sqrt(L), and the mean of squares is
# then infinite, its inverse root zero, and the row of outputs zero: no NaN tells of it. A square vanishes below the
# root of half the smallest subnormal number. How the mean is taken decides what its width does:
#
#     in turn          every partial sum rounded to the format: the sum stops growing (see accumulation.py)
#     sum, then divide PyTorch's sum, which accumulates in fp32 and rounds once; the sum of squares overflows
#     mean             PyTorch's mean, which divides in fp32 before it rounds
#     upcast           the safe way: everything in fp32, the output rounded (`training/transformer.py`)
#     PyTorch's own    F.rms_norm and F.layer_norm
#
# Shape legend: R rows, W width.


NORMS = ("RMSNorm", "LayerNorm")

IN_TURN, SUM, MEAN, UPCAST, BUILT_IN = "in turn", "sum, then divide", "mean", "upcast to fp32", "PyTorch's own"
WAYS = (IN_TURN, SUM, MEAN, UPCAST, BUILT_IN)

SPREAD = {"RMSNorm": "mean of squares", "LayerNorm": "variance"}
ROWS = 8


@dataclass(frozen=True, kw_only=True)
class NormCase:
    """The result of one norm in one format, one way, on one input."""

    norm: str
    format: str
    way: str
    """One of WAYS."""
    scale: float
    """The standard deviation of the input."""
    width: int
    epsilon: float
    largest: float
    """The largest magnitude of the input's elements."""
    output: Deviation
    spread: Deviation
    """What became of the mean of squares, or of the variance; `nan` for PyTorch's own norm, which does not show it."""


@dataclass(frozen=True, kw_only=True)
class NormLimits:
    """What a format does to squares and to epsilon, found by trying on the device."""

    format: str
    largest_square_of: float
    """The largest number whose square is finite."""
    overflows_at: float
    vanishes_up_to: float
    """The largest number whose square is zero."""
    epsilon: float
    """Epsilon as the format holds it."""
    swallowed_from: float
    """A power of two: a mean of squares from here on stays the same when epsilon is added."""


def of_norm(cases: list[NormCase], norm: str) -> list[NormCase]:
    """The cases of one norm."""
    return [case for case in cases if case.norm == norm]


def kind_of_number(value: float, name: str) -> str:
    """`zero`, `subnormal` or `normal`, in the format of this name."""
    if value == 0:
        return "zero"
    return "subnormal" if value < FORMATS[name].smallest_normal else "normal"


def normalise(x_RW: "Tensor", norm: str, way: str, epsilon: float) -> "tuple[Tensor, Tensor]":
    """Rows (..., W) normalised in their own format by one of WAYS: what was divided by, (..., 1), and the output.

    What is divided by is the root of the mean of squares or of the variance, which is returned before epsilon and the
    root. PyTorch's own norms do not show theirs: NaN stands in its place.
    """
    import torch
    import torch.nn.functional as F

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


def _average(x_RW: "Tensor", way: str) -> "Tensor":
    if way == MEAN:
        return x_RW.mean(dim=-1, keepdim=True)
    if way == SUM:
        return x_RW.sum(dim=-1, keepdim=True) / x_RW.shape[-1]
    total_R = x_RW.new_zeros(x_RW.shape[:-1])
    for x_R in x_RW.movedim(-1, 0).contiguous().unbind():
        total_R += x_R
    return total_R.unsqueeze(-1) / x_RW.shape[-1]


def norm_cases(
    norm: str, name: str, way: str, *, scales: Sequence[float], width: int, epsilon: float, device: "torch.device",
    seed: int,
) -> list[NormCase]:  # fmt: skip
    """The cases of one norm in one format, one way: the same random numbers, multiplied by each scale."""
    import torch

    # Made on the CPU: the same numbers on every device.
    x64_RW = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    # All scales at once, since in turn a width costs as many calls as it has numbers.
    x_SRW = torch.stack([x64_RW * scale for scale in scales]).to(device, answers.dtype_of(name))
    spreads, outputs = normalise(x_SRW, norm, way, epsilon)
    right_spreads, right_outputs = normalise(x_SRW.double(), norm, MEAN, epsilon)
    return [
        NormCase(
            norm=norm, format=name, way=way, scale=scale, width=width, epsilon=epsilon, largest=x_RW.abs().max().item(),
            output=deviation(outputs[i], right_outputs[i], x_RW), spread=deviation(spreads[i], right_spreads[i], x_RW),
        )
        for i, (scale, x_RW) in enumerate(zip(scales, x_SRW, strict=True))
    ]  # fmt: skip


def norm_limits(name: str, epsilon: float, device: "torch.device") -> NormLimits:
    """Where squares and epsilon leave the format of this name."""
    import torch

    dtype = answers.dtype_of(name)
    held = torch.tensor(epsilon, dtype=dtype, device=device).item()
    form, swallowed_from = FORMATS[name], 0.0
    if held:
        # The first power of two at which half a spacing is more than epsilon: from there on no sum takes it.
        power = math.frexp(held)[1] + form.significand_bits
        while form.spacing(2.0**power) / 2 > held:
            power -= 1
        while form.spacing(2.0**power) / 2 <= held:
            power += 1
        swallowed_from = 2.0**power
    largest = answers.last_number_where(lambda x: torch.isfinite(x * x), dtype, device)
    return NormLimits(
        format=name,
        largest_square_of=largest,
        overflows_at=answers.next_number(largest, dtype),
        vanishes_up_to=answers.last_number_where(lambda x: x * x == 0, dtype, device),
        epsilon=held,
        swallowed_from=swallowed_from,
    )


# Findings on RMSNorm and LayerNorm in few bits, with the figures of the cases.


def norm_findings(
    limits: list[NormLimits], by_scale: list[NormCase], by_width: list[NormCase], by_epsilon: list[NormCase]
) -> Iterator[Finding]:
    """Findings on squares and epsilon in each format, where each way breaks, the width, and what upcasting mends."""
    yield from _verdict(limits, by_scale)
    for limit in limits:
        largest = FORMATS[limit.format].largest
        yield note(
            "squares-overflow",
            f"In {limit.format} a square is finite up to {limit.largest_square_of:.8g} and infinite "
            f"from {limit.overflows_at:.8g} on (the root of the largest number, {largest:.6g}, is "
            f"{math.sqrt(largest):.8g}); it is zero up to {limit.vanishes_up_to:.4g}.",
            quoted(limit, "largest_square_of", "overflows_at", "vanishes_up_to"),
        )
    for norm in NORMS:
        for name in answers.FEW_BITS:
            cases = [case for case in of_norm(by_scale, norm) if case.format == name]
            yield from _overflow(cases)
    yield from (_epsilon(limit) for limit in limits if limit.format == "fp16")
    yield from _small(by_epsilon)
    for norm in NORMS:
        for name in answers.FEW_BITS:
            yield from _growth([case for case in of_norm(by_width, norm) if case.format == name])
    yield from _safe(by_scale)


def _verdict(limits: list[NormLimits], by_scale: list[NormCase]) -> Iterator[Finding]:
    """In a sentence for each 16-bit format: is it the range, or the precision, for which LayerNorm wants fp32?"""
    wide = next((limit for limit in limits if limit.format == "fp32"), None)
    layer_norms = [case for case in of_norm(by_scale, "LayerNorm") if case.way in (MEAN, UPCAST)]
    if wide is None:
        return
    for limit in (limit for limit in limits if limit.format != "fp32"):
        sound = {
            way: [
                case.output.error
                for case in layer_norms
                if (case.format, case.way) == (limit.format, way) and not case.output.broken and not case.spread.broken
            ]
            for way in (MEAN, UPCAST)
        }
        if not sound[MEAN] or not sound[UPCAST]:
            continue
        off, upcast = max(sound[MEAN]), max(sound[UPCAST])
        range_too = limit.overflows_at < math.sqrt(wide.overflows_at)
        range_words = (
            f"range, yes: a square overflows from {limit.overflows_at:.4g} on, which activations and sums over a width "
            "reach"
            if range_too
            else f"range, no: a square is finite up to {limit.largest_square_of:.2g}, as in fp32"
        )
        loses = off > 1.5 * upcast
        precision = (
            f"precision, {'yes' if loses else 'no'}: wherever it does not break, the output is off by up to {off:.2g}, "
            f"and by {upcast:.2g} with statistics in fp32"
        )
        yield note(
            "layer-norm-verdict",
            f"Does LayerNorm in {limit.format} want fp32? For {range_words}. For {precision}.",
            {"format": limit.format, "range": int(range_too), "precision": int(loses), "error": off, "upcast": upcast},
        )


def _overflow(cases: list[NormCase]) -> Iterator[Finding]:
    """Findings on where each way of one norm in one format first breaks on large inputs."""
    for way in (MEAN, SUM, IN_TURN):
        of_way = [case for case in cases if case.way == way]
        broken = next((case for case in of_way if case.spread.word in ("inf", "nan")), None)
        if broken is None:
            continue
        held = [case.scale for case in of_way if case.scale < broken.scale and not case.spread.broken]
        last = f"; at {max(held):g} it was finite" if held else ""
        became = {"zero": "a row of zeros, without a NaN", "nan": "NaN"}.get(
            broken.output.word, f"off by {broken.output.error:.3g}"
        )
        yield warning(
            "norm-overflows",
            f"{broken.norm} in {broken.format}, {way}: at a standard deviation of {broken.scale:g} (largest "
            f"element {broken.largest:.4g}, width {broken.width:,}) the {SPREAD[broken.norm]} is "
            f"{'infinite' if broken.spread.word == 'inf' else 'NaN'} and the output {became}{last}.",
            remedy="compute the norm in fp32 and round its output",
            evidence={**quoted(broken, "scale", "largest", "width"), "output": broken.output.word},
        )


def _epsilon(limit: NormLimits) -> Finding:
    kind = kind_of_number(limit.epsilon, limit.format)
    beside = (
        f"Beside a mean of squares of {limit.swallowed_from:.4g} or more it changes nothing"
        if limit.epsilon
        else "It changes nothing anywhere"
    )
    what = "vanishes" if kind == "zero" else f"becomes {limit.epsilon:.6g}, a {kind} number"
    return Finding(
        kind="epsilon",
        severity="note" if limit.epsilon else "warning",
        sentence=f"In {limit.format} epsilon {what}. {beside}.",
        evidence={"epsilon": limit.epsilon, "swallowed_from": limit.swallowed_from},
    )


def _small(cases: list[NormCase]) -> Iterator[Finding]:
    """Findings on small inputs in fp16: the worst result of the norm, and the first epsilon with which it breaks."""
    tried = [case for case in cases if case.format == "fp16" and case.output.word != answers.INPUT_OVERFLOWS.word]
    naive = [case for case in tried if case.way == MEAN]
    safe = {case.epsilon: case for case in tried if case.way == UPCAST}
    broken = next((case for case in naive if case.output.broken), None)
    worst = max((case for case in naive if not case.output.broken), key=lambda case: case.output.error, default=None)
    if worst is not None:
        beside = safe[worst.epsilon]
        mean = "comes to zero" if worst.spread.word else f"is off by {worst.spread.error:.3g} of itself"
        yield note(
            "squares-vanish",
            f"RMSNorm in fp16 at a standard deviation of {worst.scale:g} and epsilon {worst.epsilon:g}: "
            f"the mean of squares {mean}, the output is off by {worst.output.error:.3g}; upcast to fp32 by "
            f"{beside.output.error:.3g}.",
            {
                **quoted(worst, "scale", "epsilon"),
                "spread_error": worst.spread.error,
                "output_error": worst.output.error,
                "upcast_error": beside.output.error,
            },
        )
    if broken is not None:
        beside = safe[broken.epsilon]
        held = FORMATS["fp16"].round(broken.epsilon)
        yield warning(
            "epsilon-vanishes",
            f"With epsilon {broken.epsilon:g}, which fp16 holds as {held:g}, RMSNorm in fp16 at "
            f"a standard deviation of {broken.scale:g} gives {broken.output.word}: nothing is left to divide by. "
            f"Upcast to fp32 it is off by {beside.output.error:.3g}.",
            remedy="compute the norm in fp32, or take an epsilon that fp16 holds",
            evidence={
                **quoted(broken, "scale", "epsilon"),
                "output": broken.output.word,
                "upcast_error": beside.output.error,
            },
        )


def _growth(cases: list[NormCase]) -> Iterator[Finding]:
    """A finding for one norm and format: the spread's error at the smallest and largest width, in turn and by mean."""
    ends = {}
    for way in (IN_TURN, MEAN):
        of_way = sorted((case for case in cases if case.way == way), key=lambda case: case.width)
        if len(of_way) < 2 or of_way[0].spread.broken or of_way[-1].spread.broken:
            return
        ends[way] = (of_way[0], of_way[-1])
    (first, last), (mean_first, mean_last) = ends[IN_TURN], ends[MEAN]
    half = FORMATS[first.format].spacing(float(last.width)) / 2
    accumulates = "in parts" if first.format == "fp32" else "in fp32"
    yield note(
        "width",
        f"The {SPREAD[first.norm]} of {first.norm} in {first.format}, added in turn, is off by "
        f"{first.spread.error:.2g} of itself at width {first.width:,} and by {last.spread.error:.2g} at "
        f"{last.width:,}; PyTorch's mean, which accumulates {accumulates}, by {mean_first.spread.error:.2g} and "
        f"{mean_last.spread.error:.2g}. The squares are 1 on average, and a sum that has come "
        f"to {last.width:,} takes none below {half:.2g}, half a unit in its last place.",
        {
            "narrow": first.width,
            "wide": last.width,
            "in_turn_narrow": first.spread.error,
            "in_turn_wide": last.spread.error,
            "half_unit": half,
            "mean_narrow": mean_first.spread.error,
            "mean_wide": mean_last.spread.error,
        },
    )


def _safe(cases: list[NormCase]) -> Iterator[Finding]:
    """Findings on what upcasting leaves of the error, over all scales."""
    for name in ("fp16", "bf16"):
        for norm in NORMS:
            beyond = answers.INPUT_OVERFLOWS.word
            tried = [case for case in of_norm(cases, norm) if case.format == name and case.output.word != beyond]
            safe = [case for case in tried if case.way == UPCAST]
            built_in = [case for case in tried if case.way == BUILT_IN]
            if not safe:
                continue
            broken = [case for case in safe if case.output.broken]
            worst = max((case.output.error for case in safe if not case.output.broken), default=math.nan)
            torch_worst = max((case.output.error for case in built_in if not case.output.broken), default=math.nan)
            half = FORMATS[name].epsilon / 2
            held = "breaks at none of" if not broken else f"breaks at {len(broken)} of"
            yield Finding(
                kind="upcast",
                severity="note" if not broken else "warning",
                sentence=f"{norm} upcast from {name} to fp32 {held} {len(safe)} scales; its error is at most "
                f"{worst:.3g}, {'within' if worst <= half else 'beyond'} half a spacing of {name} ({half:.3g}): "
                f"{'' if worst <= half else 'more than '}the rounding of the output. PyTorch's own: {torch_worst:.3g}.",
                evidence={"worst": worst, "half_spacing": half, "built_in_worst": torch_worst, "broken": len(broken)},
            )


SCALES = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4)
"""Standard deviations of the input, which is normal with mean zero."""
WIDTHS = (256, 1024, 4096, 16384)
EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12)


def study_normalisation(
    *,
    device: str = "cpu",
    scales: Sequence[float] = SCALES,
    widths: Sequence[int] = WIDTHS,
    epsilon: float | None = None,
    seed: int = 0,
) -> Answer:
    """Try both norms in every format and way: by scale at the middle width, by width, and by epsilon on small inputs.

    The input is normal, rounded to the format before anything is done with it; the float64 reference has the rounded
    input, so that errors are of the norm alone. Raises InputError for a device that is not there, and for an epsilon
    that is not a number above zero.
    """
    from stepscope.recording.environment import resolve_device
    from stepscope.training.transformer import NORM_EPSILON

    epsilon = NORM_EPSILON if epsilon is None else epsilon
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise InputError(f"epsilon is {epsilon:g}: give a finite number above zero, as in 1e-5")
    if epsilon > FORMATS["fp16"].largest:
        raise InputError(f"epsilon is {epsilon:g}, and fp16 ends at {FORMATS['fp16'].largest:g}: choose one as 1e-5")
    on = resolve_device(device)
    scales, widths = sorted(scales), sorted(widths)
    middle = widths[len(widths) // 2]
    by_scale, by_width, by_epsilon = [], [], []
    for norm in NORMS:
        for name in answers.FEW_BITS:
            for way in WAYS:
                if name == "fp32" and way == UPCAST:
                    continue  # the same as its mean
                cases = partial(norm_cases, norm, name, way, device=on, seed=seed)
                by_scale += cases(scales=scales, width=middle, epsilon=epsilon)
                for width in widths if way != BUILT_IN else ():
                    by_width += cases(scales=(1.0,), width=width, epsilon=epsilon)
                for each in EPSILONS if norm == "RMSNorm" and way in (MEAN, UPCAST) else ():
                    by_epsilon += cases(scales=(min(scales),), width=middle, epsilon=each)
    limits = [norm_limits(name, epsilon, on) for name in answers.FEW_BITS]
    drawn = [case for case in by_scale if case.way == MEAN or (case.format != "fp32" and case.way in (SUM, UPCAST))]
    grown = [case for case in by_width if case.way in (IN_TURN, MEAN)]
    limit_columns: dict[str, Callable[[NormLimits], Cell]] = {
        "format": lambda limit: limit.format,
        "largest whose square is finite": lambda limit: limit.largest_square_of,
        "square overflows at": lambda limit: limit.overflows_at,
        "square is zero up to": lambda limit: limit.vanishes_up_to,
        f"epsilon {epsilon:g} becomes": lambda limit: limit.epsilon,
        "which is": lambda limit: kind_of_number(limit.epsilon, limit.format),
        "swallowed beside a mean of squares from": lambda limit: limit.swallowed_from,
    }
    return computed_answer(
        on,
        study="normalisation",
        question="Where do RMSNorm and LayerNorm break in few bits, and does upcasting mend it?",
        settings={"epsilon": epsilon, "width": middle, "rows": ROWS, "seed": seed},
        tables=(
            answers.table_by("Squares and epsilon in each format", limits, limit_columns),
            *(_by(f"{norm}: error of the output by the input's scale", of_norm(by_scale, norm), "scale")
              for norm in NORMS),
            *(_by(f"{norm}: error of the {SPREAD[norm]} by the width", of_norm(by_width, norm), "width")
              for norm in NORMS),
            _by(f"RMSNorm: error of the output at scale {scales[0]:g} by epsilon", by_epsilon, "epsilon"),
        ),
        panels=(
            *(_curves(of_norm(drawn, norm), "scale", "standard deviation of the input", f"relative error of {norm}")
              for norm in NORMS),
            *(_curves(of_norm(grown, norm), "width", "width", f"relative error of the {SPREAD[norm]} of {norm}")
              for norm in NORMS),
        ),
        findings=norm_findings(limits, by_scale, by_width, by_epsilon),
    )  # fmt: skip


def _by(title: str, cases: Iterable[NormCase], field: str) -> Table:
    """A row for each format and way, a column for each value of the field."""
    cells = (((case.format, case.way), getattr(case, field), _shown(case, field).cell) for case in cases)
    return answers.pivot(title, ("format", "way"), cells)


def _curves(cases: Iterable[NormCase], field: str, x_title: str, y_title: str) -> Panel:
    """Curves of the output's error by scale, or of the spread's by width. A row of zeros has an error of 1."""
    points = (
        (f"{case.format}, {case.way}", float(getattr(case, field)), _shown(case, field).plotted) for case in cases
    )
    return answers.curves(points, x_title=x_title, y_title=y_title, x_log=True, y_log=True)


def _shown(case: NormCase, field: str) -> Deviation:
    return case.spread if field == "width" else case.output


# RMSNorm and LayerNorm in few bits on the inputs that a model's own norms get in a step.
#
# A step in fp32 runs forward, and what each norm reads is kept. Each way to `normalise` then gets those rows in each
# format, without the norm's weights, and is held against float64.


TRIED = (SUM, MEAN, UPCAST, BUILT_IN)
"""The ways that are tried. In turn is left out: a step has too many rows for one call a number."""


@dataclass(frozen=True, kw_only=True)
class _Read:
    """What norms of one kind read in a step: rows (R, W) of fp32."""

    module: str
    norm: str
    """RMSNorm or LayerNorm."""
    epsilon: float
    rows: "Tensor"
    calls: int


def study_own_normalisation(
    *, factory: str, arguments: Mapping[str, Any] | None = None, device: str = "cpu", seed: int = 0
) -> Answer:
    """Try each way on what the norms of a user's own module read, in every format.

    factory: that, or the configuration, of the module. Raises InputError for a module without RMSNorm or LayerNorm.
    """
    import torch

    from stepscope.questions.steps import factory_workload, step_of
    from stepscope.recording.environment import resolve_device

    on = resolve_device(device)
    workload = factory_workload(factory, arguments, phase="forward-backward", seed=seed)
    step = step_of(workload, on)
    with _kept(step.model) as rows_read:
        step.prepare()
        step.phases[0].run()
    reads = [
        _Read(module=module, norm=norm, epsilon=epsilon, rows=torch.cat(rows), calls=len(rows))
        for (module, norm, epsilon), rows in rows_read.items()
    ]
    if not reads:
        raise InputError(f"{factory} runs no RMSNorm and no LayerNorm in forward: there is nothing to look at")
    cases: dict[tuple[str, str, str], Deviation] = {}
    for read in reads:
        for name in answers.FEW_BITS:
            x_RW = read.rows.to(answers.dtype_of(name))
            _, right_RW = normalise(x_RW.double(), read.norm, MEAN, read.epsilon)
            for way in TRIED:
                if (name, way) != ("fp32", UPCAST):  # the same as its mean
                    _, output_RW = normalise(x_RW, read.norm, way, read.epsilon)
                    cases[read.module, name, way] = deviation(output_RW, right_RW, x_RW)
    return computed_answer(
        on,
        study="normalisation",
        question="Where do the norms of this model break in few bits, and does upcasting mend it?",
        settings={**workload.named, "seed": seed},
        tables=(_inputs(reads), *(_errors(name, reads, cases) for name in answers.FEW_BITS)),
        panels=(_panel(reads, cases),),
        findings=_findings(reads, cases),
    )


@contextlib.contextmanager
def _kept(model: "nn.Module") -> "Iterator[dict[tuple[str, str, float], list[Tensor]]]":
    """While open, keeps what each norm reads, by its folded path, kind and epsilon."""
    import torch

    from stepscope.questions.steps import layers_folded

    read: dict[tuple[str, str, float], list[Tensor]] = {}
    name_of = layers_folded(model)

    def keep(name: str, kind: str, module: "nn.Module", args: Sequence[Any]) -> None:
        if not (args and isinstance(args[0], torch.Tensor) and args[0].dim() and args[0].is_floating_point()):
            return
        x, shape = args[0], getattr(module, "normalized_shape", None)
        width = x[(0,) * (x.dim() - len(shape))].numel() if isinstance(shape, tuple) else x.shape[-1]
        epsilons = (getattr(module, field, None) for field in ("eps", "variance_epsilon", "epsilon"))
        # PyTorch's RMSNorm takes fp32's own where it has None.
        epsilon = next((value for value in epsilons if isinstance(value, float)), torch.finfo(torch.float32).eps)
        read.setdefault((name_of(name), kind, epsilon), []).append(x.detach().float().reshape(-1, width))

    # By the class's name: models bring classes of their own, as LlamaRMSNorm.
    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            for kind in (kind for kind in NORMS if type(module).__name__.endswith(kind)):
                hooks.callback(module.register_forward_pre_hook(partial(keep, name, kind)).remove)
        yield read


def _inputs(reads: Sequence[_Read]) -> Table:
    def digits(number: "Tensor") -> float:
        return float(f"{number.item():.3g}")

    columns: dict[str, Callable[[_Read], Cell]] = {
        "module": lambda read: read.module,
        "norm": lambda read: read.norm,
        "calls": lambda read: read.calls,
        "width": lambda read: read.rows.shape[1],
        "epsilon": lambda read: read.epsilon,
        "largest magnitude": lambda read: digits(read.rows.abs().max()),
        "root mean square of a row, least": lambda read: digits(read.rows.square().mean(-1).sqrt().min()),
        "root mean square of a row, most": lambda read: digits(read.rows.square().mean(-1).sqrt().max()),
    }
    return answers.table_by("What the norms read in a step", reads, columns)


_Cases = Mapping[tuple[str, str, str], Deviation]


def _errors(name: str, reads: Sequence[_Read], cases: _Cases) -> Table:
    cells = (
        ((read.module,), way, cases[read.module, name, way].cell)
        for read in reads
        for way in TRIED
        if (read.module, name, way) in cases
    )
    return answers.pivot(f"Error of the output in {name}, without weights", ("module",), cells)


def _panel(reads: Sequence[_Read], cases: _Cases) -> Panel:
    """Curves over the norms in the order in which they run."""
    points = (
        (f"{name}, {way}", float(place), cases[read.module, name, way].plotted)
        for name in ("fp16", "bf16")
        for way in (MEAN, UPCAST)
        for place, read in enumerate(reads, start=1)
    )
    return answers.curves(points, x_title="norm, in the order of the model", y_title="relative error", y_log=True)


def _findings(reads: Sequence[_Read], cases: _Cases) -> Iterator[Finding]:
    for name in ("fp16", "bf16"):
        broken = [read.module for read in reads if cases[read.module, name, MEAN].broken]
        worst = max(reads, key=lambda read: _size(cases[read.module, name, UPCAST]))
        upcast = cases[worst.module, name, UPCAST]
        if broken:
            mended = sum(not cases[module, name, UPCAST].broken for module in broken)
            yield warning(
                "norm-breaks",
                f"In {name} {len(broken)} of {len(reads)} kinds of norm break on what they read in this step, first "
                f"{broken[0]} ({cases[broken[0], name, MEAN].word}); upcasting to fp32 mends {mended} of them.",
                {"format": name, "broken": len(broken), "norms": len(reads), "first": broken[0], "mended": mended},
                remedy="compute the norm in fp32, or under autocast, which does",
            )
        else:
            plain = max(reads, key=lambda read: _size(cases[read.module, name, MEAN]))
            yield note(
                "norm-error",
                f"In {name} no norm breaks on what it reads in this step. The error is at most "
                f"{cases[plain.module, name, MEAN].error:.2g} ({plain.module}); with statistics in fp32 it is at most "
                f"{upcast.error:.2g} ({worst.module}).",
                {"format": name, "error": cases[plain.module, name, MEAN].error, "upcast": upcast.error},
            )


def _size(off: Deviation) -> float:
    return float("inf") if off.broken else off.error


Widths = Annotated[
    Numbers | None,
    Option(
        "Numbers in a row, as in 256,4096.", NUMBERS, takes=partial(positive_integers, option="--widths", limit=65_536)
    ),
]
Epsilon = Annotated[
    float | None,
    Option(
        "The number that is added under the root; 1e-5 if left out.",
        NUMBERS,
        takes=partial(positive_number, option="--epsilon"),
    ),
]


def normalisation(
    *, module: str | None, arg: tuple[str, ...] = (), model: Configuration, batch_size: int | None,
    seq_len: int | None, scales: Numbers | None, widths: Widths, epsilon: Epsilon, device: str = "cpu",
) -> Answer:  # fmt: skip
    """RMSNorm and LayerNorm in fp16, bf16 and fp32: where squares overflow and epsilon vanishes, and the safe way.

    With --module or --model CONFIG.json: on what the norms of that model read in a step.
    """
    sizes: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len}
    if answer := of_own_model("normalisation", module, model, arg, **sizes, device=device):
        return answer
    refuse_textbook(model, **sizes)
    return study_normalisation(device=device, **given_ones({"scales": scales, "widths": widths, "epsilon": epsilon}))


QUESTION = Question(
    "normalisation",
    normalisation,
    examples=(
        "--scales 0.1,10,300 --widths 256,4096",
        "--from results/cpu/precision/normalisation.json --save normalisation.svg",
    ),
    defaults={"batch_size": "4 of a config.json", "seq_len": "512 of a config.json"},
)
