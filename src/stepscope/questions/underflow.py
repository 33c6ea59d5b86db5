"""Gradients of one training step against the range of each format: what vanishes, and what a loss scale saves.

A number of at most half a format's smallest subnormal rounds to zero; between the smallest subnormal and the smallest
normal it keeps some of its digits. The loss times a power of two moves every gradient up by so many powers of two and
changes no digit (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2), until the largest overflows. So one
histogram of exponents, counted in fp32, answers for every format and every scale; a step under autocast then shows
what really happens, where the chain rule multiplies numbers of 16 bits. In blocks each block chooses its scale, and no
loss scale helps: there the gradients themselves are rounded.
"""

import contextlib
import dataclasses
import functools
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from stepscope.core.answer import Answer, Cell, Finding, Panel, Table, note
from stepscope.core.errors import InputError, choose
from stepscope.core.figures import digits
from stepscope.core.float_formats import BLOCK_FORMATS, FORMATS, BlockFormat, FloatFormat, float_format
from stepscope.core.model_config import ModelConfig
from stepscope.core.workloads import Workload, by_sizes
from stepscope.questions.answers import check_room, computed_answer, curves
from stepscope.questions.steps import check_loss, layers_folded, one_step_of, step_of
from stepscope.recording.environment import resolve_device
from stepscope.recording.step import drive
from stepscope.training.scaled_products import BlockLoss, round_blocks

COMPARED = ("fp16", "bf16", "fp8-e5m2", "fp8-e4m3")
SCALES = (0, 10, 16)
"""Loss scales, as powers of two: none, a small one, and the one that torch.amp.GradScaler begins with."""

_STEP_BYTES = 4 + 4 + 8
"""Bytes per parameter: the parameter, its gradient, and the gradient's magnitude in double precision."""

_LARGEST_SCALE = 100
"""The largest scale that is tried, as a power of two: the loss times the scale must stay within fp32."""

_AUTOCAST = ("fp16", "bf16")
_OF = ("parameters", "activations")
IN_BLOCKS = "Non-zero gradients in blocks along their last dimension"
"""The title of a table."""
_BLOCK_SHARES = ("becomes zero, %", "blocks that lose one, %", "error, %")
_SHARES = ("below smallest normal, %", "below smallest subnormal, %", "becomes zero, %", "overflows, %")


@dataclass(frozen=True)
class Gradients:
    """The gradients of one kind of module: of its parameters, or with respect to its outputs."""

    kind: str
    of: str
    tensors: dict[str, Tensor]
    """The gradients by the parameter's or module's name."""

    @functools.cached_property
    def magnitudes(self) -> Tensor:
        """Magnitudes of the non-zero gradients, ascending, in fp64 on the CPU: a binary search counts those below x."""
        values = torch.cat([tensor.flatten() for tensor in self.tensors.values()]).abs().cpu()
        return values[values != 0].sort().values.double()

    @property
    def total(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values())


@dataclass(frozen=True)
class Shares:
    """Shares of the non-zero gradients that a format changes, after a loss scale. Fractions of one."""

    below_normal: float
    """Below the smallest normal number, including those below the smallest subnormal."""
    below_subnormal: float
    becomes_zero: float
    """At most half the smallest subnormal, and so rounded to zero: ties go to zero, which is even."""
    overflows: float
    """Rounded beyond the largest number: to infinity, to NaN, or to the largest number by a cast that saturates."""


def study_underflow(
    *,
    model: ModelConfig | None = None,
    batch_size: int = 1,
    seq_len: int = 64,
    format_name: str = "fp16",
    device: str = "auto",
    seed: int = 0,
    factory: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Answer:
    """Hold a step's gradients in fp32 against every format; for one format also by kind of module, and as observed.

    factory: that of a model of the user's own, in place of a model and its sizes; `arguments`: what it is called
    with.
    """
    choose(format_name, (*COMPARED, *BLOCK_FORMATS), "format")
    of_blocks, on = BLOCK_FORMATS.get(format_name), resolve_device(device)
    chosen = None if of_blocks else float_format(format_name)
    workload = one_step_of(factory, arguments, model=model, batch_size=batch_size, seq_len=seq_len, seed=seed)
    by_sizes(workload, lambda sized: check_room(sized, on, bytes_per_parameter=_STEP_BYTES))
    gradients = gradients_of(workload, on)
    everything = [each.magnitudes for each in gradients if each.magnitudes.numel()]
    largest = max(float(values[-1]) for values in everything)
    best = {
        name: best_scale(largest, FORMATS[name]) if shares_of(everything, FORMATS[name]).below_normal else 0
        for name in COMPARED
    }
    scales_of = {name: tuple(dict.fromkeys((*SCALES, best[name]))) for name in COMPARED}
    shares = {
        (name, scale): shares_of(everything, FORMATS[name], scale) for name in COMPARED for scale in scales_of[name]
    }
    observed = ()
    if chosen is not None:
        observed = _observed(workload, on, gradients, format_name, scales_of[format_name])
    formats = [(name, f"2**{scale}", scale == best[name], *_cells(each)) for (name, scale), each in shares.items()]
    tables = [
        _ranges(gradients),
        Table(
            title="Non-zero gradients of parameters and activations, by format",
            columns=("format", "loss scale", "best", *_SHARES),
            rows=tuple(formats),
        ),
        _by_kind(gradients, chosen or BLOCK_FORMATS[format_name], scales_of.get(format_name, ())),
        Table(
            title=IN_BLOCKS,
            columns=("format", "gradients of", *_BLOCK_SHARES),
            rows=tuple(
                (name, of, *_in_blocks(gradients, of, form)) for name, form in BLOCK_FORMATS.items() for of in _OF
            ),
        ),
    ]
    settings: dict[str, Cell] = {**workload.named, "seed": seed, "format": format_name}
    if observed:
        columns = ("loss scale", "gradients of", "zero, but not in fp32, %", "not finite, %")
        tables.append(Table(title=f"As observed under autocast to {format_name}", columns=columns, rows=observed))
    return computed_answer(
        on,
        study="underflow",
        question="Which gradients of a training step vanish in a format, and which loss scale saves them?",
        settings=settings,
        tables=tables,
        panels=(_panel(gradients, of, chosen) for of in _OF),
        findings=[
            *_findings(everything, shares, best, observed, format_name),
            *([] if of_blocks is None else [_of_blocks(gradients, of_blocks)]),
        ],
    )


def _by_kind(gradients: list[Gradients], form: FloatFormat | BlockFormat, scales: Sequence[int]) -> Table:
    title = f"Non-zero gradients by kind of module, in {form.name}"
    if isinstance(form, BlockFormat):
        rows = [(each.kind, each.of, *_in_blocks([each], each.of, form)) for each in gradients]
        return Table(title=title, columns=("module", "gradients of", *_BLOCK_SHARES), rows=tuple(rows))
    kinds = [
        (each.kind, each.of, f"2**{scale}", *_cells(shares_of([each.magnitudes], form, scale)))
        for each in gradients
        for scale in scales
    ]
    return Table(title=title, columns=("module", "gradients of", "loss scale", *_SHARES), rows=tuple(kinds))


def _in_blocks(gradients: list[Gradients], of: str, form: BlockFormat) -> tuple[Cell, ...]:
    """Shares of the non-zero gradients and of the blocks, in percent, and the relative error of all together."""
    loss, off, size = BlockLoss(form), 0.0, 0.0
    for each in gradients:
        for tensor in each.tensors.values() if each.of == of else ():
            rows = tensor.float().reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.float().reshape(1, 1)
            rounded = round_blocks(rows, form)
            loss.seen(rows, rounded)
            off += float((rounded - rows).double().square().sum())
            size += float(rows.double().square().sum())
    return *(digits(100 * share) for share in loss.shares), digits(100 * math.sqrt(off / size) if size else 0.0)


def gradients_of(workload: Workload, device: torch.device, scale: int = 0) -> list[Gradients]:
    """Gradients of one step by kind of module, its loss multiplied by 2**scale; they are still scaled.

    Raises InputError where the loss or the gradients of an fp32 step are not finite, or the gradients all zero.
    """
    step = step_of(workload, device)
    kind_of = kind_of_module if workload.sizes is not None else layers_folded(step.model)
    # The study multiplies by a scale of its own choosing.
    step.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**scale)
    by_place: dict[tuple[str, str], Gradients] = {}

    def keep(of: str, name: str, module: str, gradient: Tensor) -> None:
        if gradient.numel() == 0:
            return
        kind = kind_of(module)
        by_place.setdefault((of, kind), Gradients(kind, of, {})).tensors[name] = gradient.detach()

    def watch(name: str, output: object) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: keep("activations", name, name, gradient))

    with contextlib.ExitStack() as hooks:
        if "torch._dynamo" in sys.modules:  # inside of a compiled module hooks that came later are not called
            hooks.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in step.model.named_modules():
            if not list(module.children()) and any(True for _ in module.parameters()):
                hook = module.register_forward_hook(lambda _module, _args, output, name=name: watch(name, output))
                hooks.callback(hook.remove)
        step.prepare()
        drive(step)
    for name, parameter in step.model.named_parameters():
        if parameter.grad is not None:
            keep("parameters", name, name.rpartition(".")[0], parameter.grad)
    kinds = sorted(by_place.values(), key=lambda each: (_OF.index(each.of), each.kind))
    if workload.dtype == "fp32":
        smaller, larger = "choose a smaller --model", "choose a larger --batch-size or --seq-len"
        if workload.factory:
            smaller = larger = "give it another batch"
        if step.loss is not None:
            check_loss(step.loss.item(), smaller)
        for each in kinds:
            for name, tensor in each.tensors.items():
                if not tensor.isfinite().all():
                    raise InputError(f"the gradient of {name} is not finite in fp32: {smaller}")
        if not any(tensor.any() for each in kinds for tensor in each.tensors.values()):
            raise InputError(f"every gradient of this step is zero: {larger}")
    return kinds


def kind_of_module(module: str) -> str:
    """The kind of a module of the transformer, by its path."""
    *above, last = module.split(".")
    if last.endswith("norm"):
        return "norm"
    return above[-1].replace("_", "-") if above else last


def exponents(magnitudes: Tensor) -> Counter[int]:
    """How many of ascending positive values lie in [2**k, 2**(k + 1)), by k."""
    if magnitudes.numel() == 0:
        return Counter()
    low, high = (math.frexp(float(magnitudes[end]))[1] - 1 for end in (0, -1))
    edges = torch.tensor([math.ldexp(1.0, k) for k in range(low, high + 2)], dtype=torch.float64)
    counts = torch.searchsorted(magnitudes, edges).diff().tolist()
    return Counter({k: count for k, count in zip(range(low, high + 1), counts, strict=True) if count})


def shares_of(magnitudes: Iterable[Tensor], number: FloatFormat, scale: int = 0) -> Shares:
    """Shares of positive values, each tensor ascending, that the format changes once they are multiplied by 2**scale.

    Thresholds are divided instead: in double precision a power of two divides them exactly.
    """
    edge = number.largest + number.spacing(number.largest) / 2
    # Halfway between the largest number and the next that there would be, ties go to the even one of the two.
    tie_is_finite = math.isfinite(number.round(edge))
    limits = torch.tensor([number.smallest_normal, number.smallest_subnormal], dtype=torch.float64) * 2.0**-scale
    zero = torch.tensor(number.smallest_subnormal / 2, dtype=torch.float64) * 2.0**-scale
    top = torch.tensor(edge, dtype=torch.float64) * 2.0**-scale
    counts, total = [0, 0, 0, 0], 0
    for values in magnitudes:
        below_normal, below_subnormal = torch.searchsorted(values, limits).tolist()
        becomes_zero = int(torch.searchsorted(values, zero, right=True))
        overflows = values.numel() - int(torch.searchsorted(values, top, right=tie_is_finite))
        classes = (below_normal, below_subnormal, becomes_zero, overflows)
        counts = [before + here for before, here in zip(counts, classes, strict=True)]
        total += values.numel()
    below_normal, below_subnormal, becomes_zero, overflows = (count / max(1, total) for count in counts)
    return Shares(below_normal, below_subnormal, becomes_zero, overflows)


def best_scale(largest: float, number: FloatFormat) -> int:
    """The exponent of the largest power of two by which the greatest gradient, `largest`, stays within the format.

    Above it the step is lost to an overflow, below it more gradients than need be lie at the format's lower end
    (NVIDIA, Training with Mixed Precision, "Choosing a scaling factor").
    """
    return min(math.frexp(number.largest / largest)[1] - 1, _LARGEST_SCALE)


def _cells(shares: Shares) -> tuple[Cell, ...]:
    return tuple(digits(100 * share) for share in dataclasses.astuple(shares))


def _ranges(gradients: list[Gradients]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for each in gradients:
        counts, total, nonzero = exponents(each.magnitudes), each.total, each.magnitudes.numel()
        ends = (min(counts), _median(counts), max(counts)) if counts else (None, None, None)
        rows.append((each.kind, each.of, total, digits(100 * (1 - nonzero / total)), *ends))
    columns = ("module", "gradients of", "values", "zero, %", "smallest, 2**", "median, 2**", "largest, 2**")
    return Table(title="Gradients in fp32, as powers of two", columns=columns, rows=tuple(rows))


def _median(counts: Counter[int]) -> int:
    passed = 0
    for exponent in sorted(counts):
        passed += counts[exponent]
        if 2 * passed >= counts.total():
            return exponent
    raise ValueError("no counts")


def _observed(
    workload: Workload, device: torch.device, exact: list[Gradients], format_name: str, scales: tuple[int, ...]
) -> tuple[tuple[Cell, ...], ...]:
    """Rows of the step run under autocast, once for each scale; none for a format that autocast does not know."""
    if format_name not in _AUTOCAST:
        return ()
    cast = msgspec.structs.replace(workload, dtype=format_name)
    rows: list[tuple[Cell, ...]] = []
    for scale in scales:
        by_place = {(each.of, each.kind): each.tensors for each in gradients_of(cast, device, scale)}
        for of in _OF:
            counts = torch.zeros(3, dtype=torch.int64)
            for each in (each for each in exact if each.of == of):
                for name, tensor in each.tensors.items():
                    here, there = by_place.get((of, each.kind), {}).get(name), tensor != 0
                    if here is None:
                        continue  # a module whose output is no tensor, or has no gradient, under autocast
                    lost, broken = there & (here == 0), there & ~here.isfinite()
                    counts += torch.stack([mask.sum().cpu() for mask in (there, lost, broken)])
            nonzero, *changed = counts.tolist()
            rows.append((f"2**{scale}", of, *(digits(100 * (count / max(1, nonzero))) for count in changed)))
    return tuple(rows)


def _panel(gradients: list[Gradients], of: str, number: FloatFormat | None) -> Panel:
    """Histograms by kind of module, with upright lines where the format ends, if it is none of blocks."""
    points: list[tuple[str, float, float]] = []
    for each in gradients:
        if each.of == of and (counts := exponents(each.magnitudes)):
            total = counts.total()
            points += [(each.kind, float(k), counts[k] / total) for k in range(min(counts), max(counts) + 1)]
    highest = max((share for _, _, share in points), default=0.0)
    ends = () if number is None else (("subnormal", number.smallest_subnormal), ("normal", number.smallest_normal))
    for end, value in ends:
        assert number is not None
        points += [(f"smallest {end} of {number.name}", math.log2(value), y) for y in (0.0, highest)]
    return curves(
        points, x_title="exponent of the gradient, base 2", y_title=f"share of the non-zero gradients of {of}"
    )


def _findings(
    everything: list[Tensor],
    shares: dict[tuple[str, int], Shares],
    best: dict[str, int],
    observed: tuple[tuple[Cell, ...], ...],
    format_name: str,
) -> Iterator[Finding]:
    counts = sum((exponents(values) for values in everything), Counter())
    low, high = min(counts), max(counts)
    reach = {
        name: number.largest_exponent - round(math.log2(number.smallest_subnormal)) + 1
        for name, number in FORMATS.items()
        if name in COMPARED
    }
    spans = ", ".join(f"{name} has {reach[name]}" for name in COMPARED)
    yield note(
        "gradient-range",
        f"The {counts.total():,} non-zero gradients of this step span {high - low + 1} powers of two, from "
        f"2**{low} to 2**{high}, half of them below 2**{_median(counts) + 1}; {spans}.",
        {"smallest_exponent": low, "largest_exponent": high, "median_exponent": _median(counts)},
    )
    for name in COMPARED:
        yield _of_format(name, {scale: each for (of, scale), each in shares.items() if of == name}, best[name])
    if observed:
        yield _zeros_finding(observed, format_name, shares)


def _of_format(name: str, by_scale: dict[int, Shares], best: int) -> Finding:
    plain, fitted = by_scale[0], by_scale[best]
    evidence: dict[str, float | int | str | None] = {
        "becomes_zero": plain.becomes_zero,
        "below_normal": plain.below_normal,
        "largest_scale_exponent": best,
        "becomes_zero_at_largest_scale": fitted.becomes_zero,
        "below_normal_at_largest_scale": fitted.below_normal,
    }
    if plain.below_normal == 0 and plain.overflows == 0:
        sentence = f"{name} holds every gradient of this step as a normal number: no loss scale is needed."
    else:
        scaled = "; ".join(
            f"with the loss times 2**{scale} {_share(each.becomes_zero)} become zero"
            + (f", and {_share(each.overflows)} overflow" if each.overflows else "")
            for scale, each in by_scale.items()
            if scale not in (0, best)
        )
        sentence = (
            f"In {name} {_share(plain.becomes_zero)} of the gradients become zero and {_share(plain.below_normal)} lie "
            f"below its smallest normal number; {scaled}. The largest power of two that lets "
            f"none overflow is 2**{best}: {_share(fitted.becomes_zero)} become zero then, and "
            f"{_share(fitted.below_normal)} lie below the smallest normal."
        )
    return note("gradient-underflow", sentence, evidence)


def _of_blocks(gradients: list[Gradients], form: BlockFormat) -> Finding:
    clauses, evidence = [], {}
    for of in _OF:
        zero, losing, off = _in_blocks(gradients, of, form)
        clauses.append(
            f"of those of {of} {zero:g} % become zero, in {losing:g} % of the blocks, and they are off by {off:g} %"
        )
        evidence |= {f"{of}_become_zero_percent": zero, f"{of}_off_percent": off}
    return note(
        "gradients-in-blocks",
        f"In {form.name}, along their last dimension, {'; '.join(clauses)}. Each block has a scale of its own: a loss "
        "scale saves none of them.",
        {"format": form.name, **evidence},
    )


def _share(share: float) -> str:
    return "none" if share == 0 else "all" if share == 1 else f"{100 * share:.3g} %"


def _zeros_finding(observed: tuple[tuple[Cell, ...], ...], name: str, shares: dict[tuple[str, int], Shares]) -> Finding:
    parts, evidence = [], {}
    for (scale, _, of_parameters, _), (_, _, of_activations, broken) in zip(observed[::2], observed[1::2], strict=True):
        lost = f"{of_parameters:g} % of those of parameters and {of_activations:g} % of those of activations"
        parts.append(f"{lost} with the loss times {scale}" + (f" ({broken:g} % not finite)" if broken else ""))
        evidence |= {f"{scale}_parameters_percent": of_parameters, f"{scale}_activations_percent": of_activations}
    return note(
        "gradients-observed",
        f"Under autocast to {name} gradients came out as zero that are not zero in fp32: {'; '.join(parts)}. "
        f"Without a scale the histogram foretells {_share(shares[name, 0].becomes_zero)} of both together.",
        evidence,
    )
