"""The same step eager and compiled: how much faster, when compiling has paid for itself, which kernels went.

A step's time is that of its kernels, by kind, and the time in which none runs. Kernels are those of a captured step, or
of the profiled one where there is no capture: durations that a profiler leaves alone. What remains of the unprofiled
median is the second; copies and fills that are no kernels are in it.

Compiling costs what the warm-up took beyond as many steady steps: with W warm-up steps w and the median m,
E = sum(w) - W m. After n steps, n >= W, a process has spent E + n m on steps, so that a compiled one, E' and m', is
even with an eager one after n = (E' - E) / (m - m').
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from stepscope.analysis.checks.computation import compile_fallback, compile_not_used
from stepscope.analysis.families import classify
from stepscope.analysis.metrics import median_s, memory_change
from stepscope.core.finding import Finding
from stepscope.core.run import Run
from stepscope.core.samples import Ratio, Samples
from stepscope.core.workload import COMPILES
from stepscope.work.transformer import parameter_count

if TYPE_CHECKING:
    from stepscope.analysis.trace_digest import TraceDigest

BASELINE = "eager"
PARTS = ("forward", "backward", "optimizer", "step")
"""What is timed; `step` by the host's clock round a synchronised region."""

PRODUCTS, ATTENTION, GENERATED = "products", "fused attention", "generated fusions"
ELEMENTWISE, COPIES, REDUCTIONS = "elementwise", "copies, casts", "softmax, norms, reductions"
OPTIMIZER, OTHER = "optimizer", "other"
KINDS = (PRODUCTS, ATTENTION, ELEMENTWISE, COPIES, REDUCTIONS, OTHER, GENERATED, OPTIMIZER)
FUSABLE = (ELEMENTWISE, COPIES, REDUCTIONS, OTHER)
"""What a compiler may put into kernels of its own."""

_KIND_OF: dict[str, str] = {
    "matrix multiplication": PRODUCTS,
    "attention (fused)": ATTENTION,
    "Triton/compiled fusion": GENERATED,
    "activation/elementwise": ELEMENTWISE,
    "copy/cast": COPIES,
    "softmax": REDUCTIONS,
    "normalisation": REDUCTIONS,
    "reduction": REDUCTIONS,
    "optimizer": OPTIMIZER,
}
_NO_KERNEL = "memcpy/memset"
_FOREACH = "multi_tensor_apply_kernel"
"""PyTorch's kernels over lists of tensors: in these steps the optimizer's alone."""


@dataclass(frozen=True, kw_only=True)
class Total:
    """Kernels of one kind in a step."""

    calls: float = 0.0
    busy_s: float = 0.0


def kernels_of_capture(digest: "TraceDigest") -> dict[str, Total]:
    """By kind; whatever ran in the optimizer's phase is the optimizer's."""
    return _totals(
        (OPTIMIZER if row.phase == "optimizer" else _KIND_OF.get(row.family, OTHER), row.calls, row.busy_ns * 1e-9)
        for row in digest.families
        if row.family != _NO_KERNEL
    )


def kernels_of_profile(run: Run) -> dict[str, Total]:
    """By kind, by the kernels' names alone; empty without a profiled step."""
    found = []
    for kernel in run.evidence.profile.kernels if run.evidence.profile else ():
        family = classify(kernel.name)
        kind = OPTIMIZER if _FOREACH in kernel.name else _KIND_OF.get(family, OTHER)
        if family != _NO_KERNEL:
            found.append((kind, float(kernel.calls), kernel.total_s))
    return _totals(found)


def _totals(rows: Iterable[tuple[str, float, float]]) -> dict[str, Total]:
    found: dict[str, Total] = {}
    for kind, calls, busy_s in rows:
        before = found.get(kind, Total())
        found[kind] = Total(calls=before.calls + calls, busy_s=before.busy_s + busy_s)
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class CompileCell:
    """A run, and what is kept of its captured step, if it has one."""

    run: Run
    digest: "TraceDigest | None" = None

    @property
    def mode(self) -> str:
        return self.run.workload.compile

    @cached_property
    def name(self) -> str:
        """The cell as it would be called eagerly: `small-b4-s512-bf16-train`."""
        return msgspec.structs.replace(self.run.workload, compile=BASELINE).key.rpartition("-")[0]

    @property
    def label(self) -> str:
        return f"{self.name}, {self.mode}"

    @property
    def shape(self) -> str:
        """The name without its model: `b4-s512-bf16-train`."""
        return self.name.removeprefix(f"{self.run.workload.model.name}-")

    @property
    def parameters(self) -> int:
        return parameter_count(self.run.workload.model)

    @property
    def group(self) -> tuple[object, ...]:
        """Equal where nothing but the mode of compilation differs, and the device is the same."""
        fields = {field: value for field, value in self.run.workload.identity.items() if field != "compile"}
        environment = self.run.environment
        where = (environment.device_name, environment.memory_limit_bytes) if environment else None
        return (repr(fields), where)

    @property
    def on_gpu(self) -> bool:
        return self.run.environment is not None and self.run.environment.device_type != "cpu"

    def samples(self, part: str) -> Samples | None:
        """Of one part of the step; None where it has no such part, or the run did not end."""
        found = self.run.samples.get(part) if self.run.status == "done" else None
        return found if found is not None and found.median_s else None

    @property
    def step_s(self) -> float | None:
        return median_s(self.run, "step") if self.samples("step") else None

    @property
    def first_step_s(self) -> float | None:
        """The process' first step: compilation is in it. None where warm-up steps were not kept."""
        samples = self.samples("step")
        return samples.warmup_s[0] if samples and samples.warmup_s else None

    @cached_property
    def fault(self) -> Finding | None:
        """What speaks against this being a compiled step: rows 4 and 5 of docs/measuring.md, and a third witness.

        Judged anew from the evidence. The third: a GPU's compiled step has kernels that the compiler generated.
        """
        found = compile_not_used(self.run) or compile_fallback(self.run)
        if found is not None or self.mode == BASELINE or self.run.status != "done":
            return found
        if self.on_gpu and self.generated == 0:
            return Finding(
                kind="no-generated-kernel",
                severity="error",
                sentence="No kernel of its step was generated by torch.compile: what was timed ran eagerly.",
                evidence={"generated": 0},
            )
        return None

    @property
    def ran(self) -> str:
        """What was timed: eager, compiled, in part, or not known where dynamo's counters were not kept."""
        if self.mode == BASELINE or (self.fault and self.fault.severity == "error"):
            return BASELINE
        report = self.run.evidence.compilation
        if report is None:
            return "not known"
        whole = not report.graph_breaks and report.frames_compiled == report.frames_total
        return "compiled" if whole else "in part"

    @property
    def generated(self) -> float | None:
        """Generated kernels in a step; None where no kernels are known."""
        for kernels in (kernels_of_capture(self.digest) if self.digest else {}, kernels_of_profile(self.run)):
            if kernels:
                return kernels.get(GENERATED, Total()).calls
        return None


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """A step's kernels before and after, from the same kind of record.

    `none_s`: what remains of the unprofiled step, (eager, compiled).
    """

    before: Mapping[str, Total]
    after: Mapping[str, Total]
    none_s: tuple[float, float]

    def of(self, kinds: Sequence[str] = KINDS) -> tuple[Total, Total]:
        """The sums over these kinds, before and after."""
        sides = [[side[kind] for kind in kinds if kind in side] for side in (self.before, self.after)]
        before, after = (Total(calls=sum(t.calls for t in s), busy_s=sum(t.busy_s for t in s)) for s in sides)
        return before, after

    def won_s(self, kinds: Sequence[str] = KINDS) -> float:
        """Seconds of a step that these kinds win; below zero, lose."""
        before, after = self.of(kinds)
        return before.busy_s - after.busy_s


@dataclass(frozen=True, kw_only=True)
class Payback:
    """When compiling has paid for itself.

    `extra_s`: E' - E. `won_s`: m - m', of a steady step. `steps`: the first after which the compiled process is ahead
    for good, None where a compiled step is not faster; `least`, `most`: by the interval of the speed-up (`extra_s` is
    one sample and has none), `most` None where it reaches 1.
    """

    extra_s: float
    won_s: float
    steps: int | None
    least: int | None
    most: int | None


def payback(base: Samples, other: Samples) -> Payback | None:
    """Eager steps beside compiled ones; None where either has no warm-up, or no samples."""
    ratio = other.speedup_over(base)
    if not base.warmup_s or not other.warmup_s or not base.median_s or not other.median_s or ratio is None:
        return None
    extra_s = _beyond_steady_s(other) - _beyond_steady_s(base)
    won_s = base.median_s - other.median_s
    steps = _even_after(base, other, extra_s)
    least = most = None
    if ratio.interval and steps is not None:
        ends = [base.median_s * (1 - 1 / end) if end else 0.0 for end in (ratio.interval.high, ratio.interval.low)]
        least, most = (max(1, math.ceil(extra_s / end - _ROUNDING)) if end > 0 else None for end in ends)
        least, most = min(least or steps, steps), None if most is None else max(most, steps)
    return Payback(extra_s=extra_s, won_s=won_s, steps=steps, least=least, most=most)


_ROUNDING = 1e-9


def _beyond_steady_s(samples: Samples) -> float:
    return sum(samples.warmup_s) - len(samples.warmup_s) * (samples.median_s or 0.0)


def _even_after(base: Samples, other: Samples, extra_s: float) -> int | None:
    assert base.median_s and other.median_s
    won_s = base.median_s - other.median_s
    if won_s <= 0:
        return None
    warm = max(len(base.warmup_s), len(other.warmup_s))
    even = math.ceil(extra_s / won_s - _ROUNDING)
    if even > warm:
        return even
    # Within the warm-up the steps are not equal: back from its end as long as the compiled process is ahead.
    ahead = warm
    while ahead > 1 and _spent_s(other, ahead - 1) <= _spent_s(base, ahead - 1):
        ahead -= 1
    return ahead


def _spent_s(samples: Samples, steps: int) -> float:
    """What a process has spent on this many steps, steady ones after its warm-up."""
    assert samples.median_s
    return sum(samples.warmup_s[:steps]) + max(0, steps - len(samples.warmup_s)) * samples.median_s


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """A compiled cell, and the same eager."""

    base: CompileCell
    other: CompileCell

    @property
    def label(self) -> str:
        return self.other.label

    def ratio(self, part: str) -> Ratio | None:
        """How many times as fast this part is, by the medians; None where one has no such part."""
        base, other = self.base.samples(part), self.other.samples(part)
        return other.speedup_over(base) if base and other else None

    @cached_property
    def speed_up(self) -> Ratio:
        """Of the step."""
        found = self.ratio("step")
        assert found is not None, "a pair is made of measured cells"
        return found

    @cached_property
    def payback(self) -> Payback | None:
        base, other = self.base.samples("step"), self.other.samples("step")
        return payback(base, other) if base and other else None

    @cached_property
    def kernels(self) -> Kernels | None:
        """None on a CPU, where compiled code calls no operators that could be counted, and without a record of both."""
        if not (self.base.on_gpu and self.other.on_gpu) or self.base.step_s is None or self.other.step_s is None:
            return None
        if self.base.digest and self.other.digest:
            before, after = kernels_of_capture(self.base.digest), kernels_of_capture(self.other.digest)
        else:
            before, after = kernels_of_profile(self.base.run), kernels_of_profile(self.other.run)
        if not before or not after:
            return None
        busy = [sum(total.busy_s for total in side.values()) for side in (before, after)]
        none_s = (max(0.0, self.base.step_s - busy[0]), max(0.0, self.other.step_s - busy[1]))
        return Kernels(before=before, after=after, none_s=none_s)

    def memory_change(self, field: str) -> float | None:
        """By which share of the eager bytes this figure of PhaseMemory is larger; None where one is not known."""
        return memory_change(self.base.run, self.other.run, field)


@dataclass(frozen=True, kw_only=True)
class CompileStudy:
    """Every measured cell, and the pairs among them. `replaced` counts runs of a cell that has a better or newer."""

    cells: tuple[CompileCell, ...]
    pairs: tuple[Pair, ...]
    unmeasured: tuple[CompileCell, ...]
    replaced: int

    @property
    def with_kernels(self) -> list[tuple[Pair, Kernels]]:
        """Pairs of which a step's kernels are known on both sides."""
        return [(pair, pair.kernels) for pair in self.pairs if pair.kernels is not None]

    @property
    def alone(self) -> tuple[CompileCell, ...]:
        """Measured, with nothing to be set beside."""
        paired = {id(cell) for pair in self.pairs for cell in (pair.base, pair.other)}
        return tuple(cell for cell in self.cells if id(cell) not in paired)


def pair_up(found: Iterable[CompileCell]) -> CompileStudy:
    """Cells in the order of their size, and each compiled one beside the eager one.

    Of several runs of one cell, one with a capture goes before one without, then the newest.
    """
    best: dict[tuple[object, ...], CompileCell] = {}
    replaced = 0
    for cell in sorted(found, key=lambda c: (_measured(c), c.digest is not None, c.run.created, c.run.id)):
        key = (*cell.group, cell.mode)
        replaced += key in best
        best[key] = cell
    cells = sorted(best.values(), key=_order)
    measured = [cell for cell in cells if _measured(cell)]
    bases = {cell.group: cell for cell in measured if cell.mode == BASELINE}
    pairs = [
        Pair(base=bases[cell.group], other=cell)
        for cell in measured
        if cell.mode != BASELINE and cell.group in bases
    ]  # fmt: skip
    return CompileStudy(
        cells=tuple(measured),
        pairs=tuple(pairs),
        unmeasured=tuple(cell for cell in cells if not _measured(cell)),
        replaced=replaced,
    )


def _measured(cell: CompileCell) -> bool:
    return cell.samples("step") is not None


def _order(cell: CompileCell) -> tuple[object, ...]:
    workload = cell.run.workload
    size = (workload.phase, workload.dtype, workload.seq_len, workload.batch_size, cell.parameters)
    return (*size, cell.name, COMPILES.index(cell.mode))
