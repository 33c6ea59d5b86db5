"""A step run eager and compiled: how much faster it gets, when compiling has paid for itself, which kernels are gone.

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

from stepscope.core.finding import Finding, error
from stepscope.core.range_names import OPTIMIZER, PHASES, STEP
from stepscope.core.run import Run
from stepscope.core.samples import Samples
from stepscope.core.workload import COMPILES
from stepscope.questions.compare.comparison import ComparedRun, Comparison, Pair, compare_runs
from stepscope.runs.checks.computation import compile_fallback, compile_not_used
from stepscope.traces.kernels.families import classify, is_generated

if TYPE_CHECKING:
    from stepscope.traces.captures.digest import FamilyRow, TraceDigest

PARTS = (*PHASES, STEP)
"""What is timed; `step` by the host's clock round a synchronised region."""

PRODUCTS, ATTENTION, GENERATED = "products", "fused attention", "generated fusions"
ELEMENTWISE, COPIES, REDUCTIONS = "elementwise", "copies, casts", "softmax, norms, reductions"
OPTIMIZER_KERNELS, OTHER = "optimizer", "other"
KINDS = (PRODUCTS, ATTENTION, ELEMENTWISE, COPIES, REDUCTIONS, OTHER, GENERATED, OPTIMIZER_KERNELS)
FUSABLE = (ELEMENTWISE, COPIES, REDUCTIONS, OTHER)
"""What a compiler may put into kernels of its own."""

_KIND_OF: dict[str, str] = {
    "matrix multiplication": PRODUCTS,
    "convolution": PRODUCTS,
    "attention (fused)": ATTENTION,
    "Triton/compiled fusion": GENERATED,
    "activation/elementwise": ELEMENTWISE,
    "copy/cast": COPIES,
    "softmax": REDUCTIONS,
    "normalisation": REDUCTIONS,
    "reduction": REDUCTIONS,
    "optimizer": OPTIMIZER_KERNELS,
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
    """Calls and time of a captured step's kernels by kind; all that ran in the optimizer's phase is of its kind."""
    rows = [row for row in digest.families if row.family != _NO_KERNEL]
    found = [(_kind(row), row.calls, row.busy_ns * 1e-9) for row in rows]
    # A generated kernel has the family of the heaviest operator in it; here it is one of the generated.
    for row in digest.generated:
        found.append((_kind(row), -row.calls, -row.busy_ns * 1e-9))
        found.append((OPTIMIZER_KERNELS if row.phase == OPTIMIZER else GENERATED, row.calls, row.busy_ns * 1e-9))
    return {kind: total for kind, total in _totals(found).items() if total.calls > 0}


def _kind(row: "FamilyRow") -> str:
    return OPTIMIZER_KERNELS if row.phase == OPTIMIZER else _KIND_OF.get(row.family, OTHER)


def kernels_of_profile(run: Run) -> dict[str, Total]:
    """Calls and time of a profiled step's kernels by kind, told by their names alone; empty without such a step."""
    found = []
    for kernel in run.evidence.profile.kernels if run.evidence.profile else ():
        family = classify(kernel.name)
        kind = GENERATED if is_generated(kernel.name) else _KIND_OF.get(family, OTHER)
        kind = OPTIMIZER_KERNELS if _FOREACH in kernel.name else kind
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
class CompileCell(ComparedRun):
    """A step, eager or in one mode of torch.compile."""

    FIELD = "compile"
    BASELINE = "eager"

    @property
    def first_step_s(self) -> float | None:
        """The process' first step: compilation is in it. None where warm-up steps were not kept."""
        samples = self.samples(STEP)
        return samples.warmup_s[0] if samples and samples.warmup_s else None

    @cached_property
    def fault(self) -> Finding | None:
        """What speaks against this being a compiled step: rows 4 and 5 of docs/measuring.md, and a third witness.

        Judged anew from the evidence. The third: a GPU's compiled step has kernels that the compiler generated.
        """
        found = compile_not_used(self.run) or compile_fallback(self.run)
        if found is not None or self.is_base or self.run.status != "done":
            return found
        if self.on_gpu and self.generated == 0:
            return error(
                "no-generated-kernel",
                "No kernel of its step was generated by torch.compile: what was timed ran eagerly.",
                {"generated": 0},
            )
        return None

    @property
    def errors(self) -> list[str]:
        """Kinds of the run's errors, without `fault`, which the study explains in more detail."""
        return [kind for kind in super().errors if self.fault is None or kind != self.fault.kind]

    @property
    def ran(self) -> str:
        """What was timed: eager, compiled, in part, or not known where dynamo's counters were not kept."""
        if self.is_base or (self.fault and self.fault.severity == "error"):
            return self.BASELINE
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
class CompilePair(Pair[CompileCell]):
    """A compiled step, and the same eager."""

    @cached_property
    def payback(self) -> Payback | None:
        base, other = self.base.samples(STEP), self.other.samples(STEP)
        return payback(base, other) if base and other else None

    @cached_property
    def kernels(self) -> Kernels | None:
        """None on a CPU, where compiled code calls no operators that could be counted, and without a record of both."""
        if not (self.base.on_gpu and self.other.on_gpu):
            return None
        if self.base.digest and self.other.digest:
            before, after = kernels_of_capture(self.base.digest), kernels_of_capture(self.other.digest)
        else:
            before, after = kernels_of_profile(self.base.run), kernels_of_profile(self.other.run)
        if not before or not after:
            return None
        busy = [sum(total.busy_s for total in side.values()) for side in (before, after)]
        none_s = (max(0.0, self.base.time_s - busy[0]), max(0.0, self.other.time_s - busy[1]))
        return Kernels(before=before, after=after, none_s=none_s)


CompileStudy = Comparison[CompileCell, CompilePair]


def pair_up(found: Iterable[CompileCell]) -> CompileStudy:
    """Cells in the order of their size, and each compiled one beside the eager one."""
    return compare_runs(found, CompilePair, order=_order)


def with_kernels(study: CompileStudy) -> list[tuple[CompilePair, Kernels]]:
    """Pairs of which a step's kernels are known on both sides."""
    return [(pair, pair.kernels) for pair in study.pairs if pair.kernels is not None]


def _order(cell: CompileCell) -> tuple[object, ...]:
    workload = cell.run.workload
    size = (workload.phase, workload.dtype, workload.seq_len or 0, workload.batch_size or 0, cell.parameters)
    return (*size, cell.name, COMPILES.index(workload.compile))
