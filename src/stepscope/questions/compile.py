"""The answer to "what does torch.compile give, and what does it cost": tables, curves, and what follows from them."""

import contextlib
import math
import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from typing import TYPE_CHECKING, Annotated

from stepscope.core.answer import Answer, Cell, Finding, Panel, Table, error, note, warning
from stepscope.core.errors import InputError, choose
from stepscope.core.figures import digits, doubting_kinds, gibibytes, milliseconds, percent
from stepscope.core.options import WORKLOAD, Option
from stepscope.core.range_names import BACKWARD, FORWARD, OPTIMIZER, PHASES, STEP
from stepscope.core.run import Run
from stepscope.core.samples import Samples
from stepscope.core.units import format_bytes, format_seconds, format_share
from stepscope.core.workloads import COMPILES
from stepscope.engine.request import TraceRequest
from stepscope.questions import comparison
from stepscope.questions.comparison import Compared, ComparedRun, Comparison, Pair, Sizes, StepOptions, listed, within
from stepscope.questions.question import Cells, Question, Result
from stepscope.runs.metrics import median_s, memory_of

if TYPE_CHECKING:
    from stepscope.traces.captures.digest import FamilyRow, TraceDigest

# A step run eager and compiled: how much faster it gets, when compiling has paid for itself, which kernels are gone.
#
# A step's time is that of its kernels, by kind, and the time in which none runs. Kernels are those of a captured step,
# or of the profiled one where there is no capture: durations that a profiler leaves alone. What remains of the
# unprofiled median is the second; copies and fills that are no kernels are in it.
#
# Compiling costs what the warm-up took beyond as many steady steps: with W warm-up steps w and the median m,
# E = sum(w) - W m. After n steps, n >= W, a process has spent E + n m on steps, so that a compiled one, E' and m', is
# even with an eager one after n = (E' - E) / (m - m').


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

    def kind(row: "FamilyRow") -> str:
        return OPTIMIZER_KERNELS if row.phase == OPTIMIZER else _KIND_OF.get(row.family, OTHER)

    figures = [(kind(row), row.calls, row.busy_ns * 1e-9) for row in rows]
    # A generated kernel has the family of the heaviest operator in it; here it is one of the generated.
    for row in digest.generated:
        figures.append((kind(row), -row.calls, -row.busy_ns * 1e-9))
        figures.append((OPTIMIZER_KERNELS if row.phase == OPTIMIZER else GENERATED, row.calls, row.busy_ns * 1e-9))
    return {kind: total for kind, total in _totals(figures).items() if total.calls > 0}


def kernels_of_profile(run: Run) -> dict[str, Total]:
    """Calls and time of a profiled step's kernels by kind, told by their names alone; empty without such a step."""
    from stepscope.traces.kernels.families import classify, is_generated

    figures = []
    for kernel in run.evidence.profile.kernels if run.evidence.profile else ():
        family = classify(kernel.name)
        kind = GENERATED if is_generated(kernel.name) else _KIND_OF.get(family, OTHER)
        kind = OPTIMIZER_KERNELS if _FOREACH in kernel.name else kind
        if family != _NO_KERNEL:
            figures.append((kind, float(kernel.calls), kernel.total_s))
    return _totals(figures)


def _totals(rows: Iterable[tuple[str, float, float]]) -> dict[str, Total]:
    totals: dict[str, Total] = {}
    for kind, calls, busy_s in rows:
        before = totals.get(kind, Total())
        totals[kind] = Total(calls=before.calls + calls, busy_s=before.busy_s + busy_s)
    return totals


@dataclass(frozen=True, kw_only=True, eq=False)
class CompileCell(ComparedRun):
    """A step, eager or in one mode of torch.compile."""

    FIELD = "compile"
    BASELINE = "eager"

    @cached_property
    def fault(self) -> Finding | None:
        """What speaks against this being a compiled step: rows 4 and 5 of docs/measuring.md, and a third witness.

        Judged anew from the evidence. The third: a GPU's compiled step has kernels that the compiler generated.
        """
        from stepscope.runs.checks.computation import compile_fallback, compile_not_used

        fault = next(chain(compile_not_used(self.run), compile_fallback(self.run)), None)
        if fault is not None or self.is_base or self.run.status != "done":
            return fault
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
        totals = [[side[kind] for kind in kinds if kind in side] for side in (self.before, self.after)]
        before, after = (Total(calls=sum(t.calls for t in s), busy_s=sum(t.busy_s for t in s)) for s in totals)
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
    base_s, other_s = (sum(s.warmup_s) - len(s.warmup_s) * (s.median_s or 0.0) for s in (base, other))
    extra_s = other_s - base_s
    won_s = base.median_s - other.median_s
    steps = None
    if won_s > 0:
        warm = max(len(base.warmup_s), len(other.warmup_s))
        steps = max(warm, math.ceil(extra_s / won_s - _ROUNDING))
        # Within the warm-up the steps are not equal: back from its end as long as the compiled process is ahead.
        while 1 < steps <= warm and _spent_s(other, steps - 1) <= _spent_s(base, steps - 1):
            steps -= 1
    least = most = None
    if ratio.interval and steps is not None:
        ends = [base.median_s * (1 - 1 / end) if end else 0.0 for end in (ratio.interval.high, ratio.interval.low)]
        least, most = (max(1, math.ceil(extra_s / end - _ROUNDING)) if end > 0 else None for end in ends)
        least, most = min(least or steps, steps), None if most is None else max(most, steps)
    return Payback(extra_s=extra_s, won_s=won_s, steps=steps, least=least, most=most)


_ROUNDING = 1e-9


def _spent_s(samples: Samples, steps: int) -> float:
    """What a process has spent on this many steps, steady ones after its warm-up."""
    assert samples.median_s
    return sum(samples.warmup_s[:steps]) + max(0, steps - len(samples.warmup_s)) * samples.median_s


@dataclass(frozen=True, kw_only=True, eq=False)
class CompilePair(Pair[CompileCell]):
    """A compiled step, and the same eager."""

    @property
    def is_noise(self) -> bool:
        """Whether the step changes by no more than its optimizer does, which is the same code in both."""
        optimizer_s, step_s = self.won_s(OPTIMIZER), self.won_s(STEP)
        return optimizer_s is not None and step_s is not None and 0 < abs(step_s) <= abs(optimizer_s)

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


def pair_up(cells: Iterable[CompileCell]) -> CompileStudy:
    """Cells in the order of their size, and each compiled one beside the eager one."""

    def order(cell: CompileCell) -> tuple[object, ...]:
        workload = cell.run.workload
        size = (workload.phase, workload.dtype, workload.seq_len or 0, workload.batch_size or 0, cell.parameters)
        return (*size, cell.name, COMPILES.index(workload.compile))

    return comparison.compare_runs(cells, CompilePair, order=order)


def with_kernels(study: CompileStudy) -> list[tuple[CompilePair, Kernels]]:
    """Pairs of which a step's kernels are known on both sides."""
    return [(pair, pair.kernels) for pair in study.pairs if pair.kernels is not None]


# What follows from a step run eager and compiled: sentences made from its figures.


_LAUNCH_BOUND = 0.2
"""Share of a step in which no kernel runs; from this on the host sets the pace, as in the finding `launch-bound`."""
_SAME = 0.05
"""Products whose time changes by less are the same products."""
_MUCH = 0.1
"""Share of the step's change: if the optimizer, which is not compiled, changes by as much, a finding says so."""


def _what_ran(study: CompileStudy) -> Iterator[Finding]:
    """Rows 4 and 5 of docs/measuring.md: fallen back to eager, and another object called than was compiled."""
    for pair in study.pairs:
        if (fault := pair.other.fault) is None:
            continue
        report = pair.other.run.evidence.compilation
        why = (report.graph_break_reasons or report.recompile_reasons) if report else ()
        more = f" Reason: {why[0]}." if why and why[0] not in fault.sentence else ""
        eager = " Its speed-up compares eager with eager." if fault.severity == "error" else ""
        priced = " --prices says what each costs." if pair.other.run.workload.factory else ""
        sentence = f"{pair.label}: {fault.sentence}{more}{eager}{priced}"
        yield Finding(kind=fault.kind, severity=fault.severity, sentence=sentence, evidence=fault.evidence)
    reports = [(pair, pair.other.run.evidence.compilation) for pair in study.pairs if not pair.other.fault]
    reported = [(pair, report) for pair, report in reports if report]
    if reported:
        frames = sum(report.frames_compiled for _, report in reported)
        yield note(
            "no-fallback",
            f"No fallback to eager in {len(reported)} of {len(study.pairs)} compiled cells: each of the {frames} "
            "frames that dynamo saw was compiled, with no graph break, recompilation or limit, in its own process.",
            {"cells": len(reported), "frames": frames},
        )
    counts = [pair.other.generated for pair, _ in reported if pair.other.on_gpu and pair.other.generated]
    strangers = [pair.base.name for pair in study.pairs if pair.base.on_gpu and pair.base.generated]
    if counts:
        eager = f"an eager step has them too: {listed(strangers)}" if strangers else "no eager step has one"
        span = f"{min(counts):,.0f}" if min(counts) == max(counts) else f"{min(counts):,.0f} to {max(counts):,.0f}"
        say = warning if strangers else note
        yield say(
            "compiled-object-ran",
            f"What was timed is what torch.compile returned: in {len(counts)} of {len(study.pairs)} compiled cells a "
            f"step launches {span} kernels that the compiler generated; {eager}.",
            {"least": min(counts), "most": max(counts), "eager_with_generated": len(strangers)},
        )
    if unknown := [pair.label for pair in study.pairs if pair.other.ran == "not known"]:
        yield warning(
            "no-report", f"What torch.compile did is not known of {listed(unknown)}: dynamo's counters were not kept."
        )


def _speed_ups(study: CompileStudy) -> Iterator[Finding]:
    """The speed-up over the models, for each shape and mode, by phase, and where there is none."""
    for (mode, shape), pairs in study.lines.items():
        named = [(pair.other.run.workload.name, pair) for pair in pairs]
        speed_ups = "; ".join(f"{name} {pair.speed_up.value:.2f}{_by_phase(pair)}" for name, pair in named)
        yield note(
            "speed-up",
            f"compile {mode} against eager ({shape}), speed-up of the step: {speed_ups}.",
            {name: pair.speed_up.value for name, pair in named},
        )
    shares = {pair: (median_s(pair.other.run, OPTIMIZER) or 0.0) / pair.other.time_s for pair in study.pairs}
    most = max(shares, key=lambda pair: shares[pair])
    if shares[most]:
        share, before = shares[most], (median_s(most.base.run, OPTIMIZER) or 0.0)
        yield note(
            "optimizer-eager",
            f"The optimizer is not compiled: in {most.label} it takes {format_share(share)} of the step, eagerly "
            f"{format_share(before / most.base.time_s)}.",
            {"share": share},
        )
    yield from _process_noise(study)
    for pair in study.pairs:
        if pair.verdict == "slower" and not pair.is_noise:
            yield warning(
                "slower",
                f"Compiling does not pay for {pair.label}: a step takes {format_seconds(pair.other.time_s)}, "
                f"eagerly {format_seconds(pair.base.time_s)}.",
                {"speed_up": pair.speed_up.value},
            )
    if noise := [pair.label for pair in study.pairs if pair.is_noise]:
        yield warning(
            "no-more-than-noise",
            f"Whether compiling pays cannot be told for {listed(noise)}: the step changes by no more than its "
            "optimizer, which is the same code in both.",
            {"cells": len(noise)},
        )
    if untold := [pair for pair in study.pairs if pair.verdict == "untold"]:
        which, why = listed(pair.label for pair in untold), untold[0].speed_up.why_undecided
        sentence = f"Whether compiling pays cannot be told for {which}: {why}."
        yield note("cannot-be-told", sentence, {pair.label: pair.speed_up.value for pair in untold})
    if level := [pair for pair in study.pairs if pair.verdict == "level"]:
        which = listed(pair.label for pair in level)
        sentence = f"Compiling does not pay for {which}: the interval of the step's speed-up holds 1."
        yield warning("no-difference", sentence, {pair.label: pair.speed_up.value for pair in level})


def _by_phase(pair: CompilePair) -> str:
    ratios = {part: pair.ratio(part) for part in (FORWARD, BACKWARD, OPTIMIZER)}
    if ratios[BACKWARD] is None:
        return ""
    words = ", ".join(f"{part} {ratio.value:.2f}" for part, ratio in ratios.items() if ratio is not None)
    return f" ({words})"


def _process_noise(study: CompileStudy) -> Iterator[Finding]:
    """A warning where the optimizer, the same code in both runs, changed by a large share of what the step changed."""
    noisy: dict[str, tuple[float, float]] = {}
    for pair in study.pairs:
        optimizer_s, step_s = pair.won_s(OPTIMIZER), pair.won_s(STEP)
        if optimizer_s is not None and step_s is not None and abs(optimizer_s) >= _MUCH * abs(step_s):
            noisy[pair.label] = optimizer_s, step_s
    if noisy:
        label = max(noisy, key=lambda name: abs(noisy[name][0] / (noisy[name][1] or math.inf)))
        optimizer_s, step_s = noisy[label]
        others = f" (and in {len(noisy) - 1} more comparisons)" if len(noisy) > 1 else ""
        yield warning(
            "process-noise",
            f"The optimizer is the same code in both, and yet takes {format_seconds(abs(optimizer_s))} "
            f"{'less' if optimizer_s >= 0 else 'more'} in {label}, where the step "
            f"{'wins' if step_s >= 0 else 'loses'} {format_seconds(abs(step_s))}: that much is noise between two "
            f"processes{others}.",
            {"optimizer_s": optimizer_s, "step_s": step_s},
        )


def _cost_findings(study: CompileStudy) -> Iterator[Finding]:
    priced = [(pair, pair.payback) for pair in study.pairs if pair.payback and not pair.is_noise]
    paid = sorted((each for each in priced if each[1].steps is not None), key=lambda each: each[1].steps or 0)
    for pair, payback in dict.fromkeys([*paid[:1], *paid[-1:]]):
        most = "no end known" if payback.most is None else f"{payback.most:,}"
        bounds = "" if payback.least is None else f" ({payback.least:,} to {most})"
        yield note(
            "paid-after",
            f"{pair.label}: compiling costs {format_seconds(payback.extra_s)} and wins "
            f"{format_seconds(payback.won_s)} a step, so it is paid for after {payback.steps:,} steps"
            f"{bounds}, {format_seconds((payback.steps or 0) * pair.base.time_s)} of eager ones.",
            {"extra_s": payback.extra_s, "won_s": payback.won_s, "steps": payback.steps},
        )
    if never := [pair.label for pair, payback in priced if payback.steps is None]:
        yield warning("never-paid", f"Compiling is never paid for in {listed(never)}: no step is faster.")
    reports = [(pair, report) for pair in study.pairs if (report := pair.other.run.evidence.compilation)]
    if cached := [pair.label for pair, report in reports if report.cached_graphs]:
        yield warning(
            "from-caches",
            f"Code of {listed(cached)} came from torch's caches on disk: its first step did not compile all of it.",
            {"cells": len(cached)},
        )
    if uncounted := sum(report.cached_graphs is None for _, report in reports):
        yield note(
            "caches-unknown",
            f"Whether code came from torch's caches on disk was not counted in {uncounted} of {len(reports)} compiled "
            "runs: their cost is that of a first start only if the caches were cold.",
            {"cells": uncounted},
        )


def _kernel_findings(study: CompileStudy) -> Iterator[Finding]:
    """What fused and where the gain lies, in each mode's least and greatest speed-up; products, in all."""
    known = [(pair, kernels) for pair, kernels in with_kernels(study) if pair.other.ran != "eager"]
    for mode in dict.fromkeys(pair.other.value for pair, _ in known):
        of_mode = [(pair, kernels) for pair, kernels in known if pair.other.value == mode]
        of_mode.sort(key=lambda both: both[0].speed_up.value)
        for pair, kernels in dict([*of_mode[:1], *of_mode[-1:]]).items():
            yield _fused(pair, kernels)
            yield _gains(pair, kernels)
    yield from _products(known)


def _fused(pair: CompilePair, kernels: Kernels) -> Finding:
    all_before, all_after = kernels.of()
    loose_before, loose_after = kernels.of(FUSABLE)
    fused, fused_s = loose_before.calls - loose_after.calls, loose_before.busy_s - loose_after.busy_s
    _, generated = kernels.of([GENERATED])
    kinds = [(kind, *kernels.of([kind])) for kind in FUSABLE]
    gone = [f"{kind} {b.calls:,.0f} to {a.calls:,.0f}" for kind, b, a in kinds if b.calls and a.calls != b.calls]
    kinds_gone = f" ({'; '.join(gone)})" if gone else ""
    return note(
        "fused",
        f"{pair.label}: {all_before.calls:,.0f} kernels a step become {all_after.calls:,.0f}. "
        f"{generated.calls:,.0f} generated ones, {format_seconds(generated.busy_s)}, stand for "
        f"{fused:,.0f} others, {format_seconds(fused_s)}{kinds_gone}.",
        {
            "kernels_before": all_before.calls,
            "kernels_after": all_after.calls,
            "generated": generated.calls,
            "generated_s": generated.busy_s,
            "fused": fused,
            "fused_s": fused_s,
        },
    )


def _gains(pair: CompilePair, kernels: Kernels) -> Finding:
    parts = [
        (kernels.won_s((*FUSABLE, GENERATED)), "by fusion"),
        (kernels.won_s([PRODUCTS]), "in products"),
        (kernels.won_s([ATTENTION]), "in fused attention"),
        (kernels.won_s([OPTIMIZER_KERNELS]), "in the optimizer"),
        (kernels.none_s[0] - kernels.none_s[1], "where no kernel ran"),
    ]
    total_s = sum(won_s for won_s, _ in parts)
    named = [(won_s, where) for won_s, where in parts if abs(won_s) >= 0.01 * abs(total_s)]
    words = ", ".join(f"{'' if won_s >= 0 else '-'}{format_seconds(abs(won_s))} {where}" for won_s, where in named)
    return note(
        "gain",
        f"{pair.label}: a step {'wins' if total_s > 0 else 'loses'} {format_seconds(abs(total_s))}: {words}.",
        {f"won_{where.replace(' ', '_')}_s": won_s for won_s, where in parts},
    )


def _products(known: Sequence[tuple[CompilePair, Kernels]]) -> Iterator[Finding]:
    """Compiling leaves matrix products to the libraries: are they the same?"""
    products = {pair.label: kernels.of([PRODUCTS]) for pair, kernels in known}
    timed = {label: (b, a) for label, (b, a) in products.items() if b.busy_s and a.busy_s}
    same = {label: a.busy_s / b.busy_s for label, (b, a) in timed.items() if abs(a.busy_s / b.busy_s - 1) <= _SAME}
    if same:
        calls = sum(timed[label][0].calls == timed[label][1].calls for label in same)
        yield note(
            "products-same",
            f"Products did not change in {len(same)} of {len(timed)} cells: they take {min(same.values()):.3f} to "
            f"{max(same.values()):.3f} times as long as before, in {calls} of these by as many kernels.",
            dict(same),
        )
    for label, (before, after) in timed.items():
        if label in same:
            continue
        yield note(
            "products-changed",
            f"{label}: matrix products take {format_seconds(after.busy_s)} by {after.calls:,.0f} kernels, eagerly "
            f"{format_seconds(before.busy_s)} by {before.calls:,.0f}.",
            {"before_s": before.busy_s, "after_s": after.busy_s},
        )


def _launches(study: CompileStudy) -> Iterator[Finding]:
    """Where the host set the pace, before and after."""
    for pair, kernels in with_kernels(study):
        idle = (kernels.none_s[0] / pair.base.time_s, kernels.none_s[1] / pair.other.time_s)
        if max(idle) < _LAUNCH_BOUND:
            continue
        calls = [total.calls for total in kernels.of(KINDS)]
        host = [median_s(cell.run, "host") for cell in (pair.base, pair.other)]
        sentence = (
            f"Launches set the pace of {pair.other.name}: no kernel runs for {format_share(idle[0])} of the eager step "
            f"({calls[0]:,.0f} kernels) and {format_share(idle[1])} of the compiled one ({pair.other.value}, "
            f"{calls[1]:,.0f})."
        )
        if host[0] and host[1]:
            sentence += f" The host takes {format_seconds(host[1])} to issue it, eagerly {format_seconds(host[0])}."
        if idle[1] >= _LAUNCH_BOUND and pair.other.value == "default":
            sentence += " CUDA graphs would issue them at once: --compile reduce-overhead."
        yield note("launch-bound", sentence, {"before": idle[0], "after": idle[1]})


def _memory_findings(study: CompileStudy) -> Iterator[Finding]:
    for field, kind, name in (
        ("allocated_peak", "peak", "the step's peak"),
        ("saved_for_backward", "saved", "what is kept for backward"),
    ):
        changes = {pair: change for pair in study.pairs if (change := pair.memory_change(field)) is not None}
        if not changes:
            continue
        best, worst = min(changes, key=lambda p: changes[p]), max(changes, key=lambda p: changes[p])
        least = f"{changes[best] * 100:+.1f} %"
        sizes = " to ".join(format_bytes(memory_of(cell.run, field) or 0) for cell in (best.base, best.other))
        if best is worst:
            sentence = f"Compiling changes {name} of {best.label} by {least}, {sizes}."
        else:
            most = f"{changes[worst] * 100:+.1f} % ({worst.label})"
            sentence = f"Compiling changes {name} by {least} ({best.label}, {sizes}) to {most}."
        yield note(f"memory-{kind}", sentence, {pair.label: change for pair, change in changes.items()})


def _doubt_findings(study: CompileStudy, unread: int) -> Iterator[Finding]:
    """What is missing, and what makes a comparison doubtful."""
    if any(not pair.other.on_gpu for pair in study.pairs):
        yield note(
            "on-cpu",
            "On a CPU compiled code calls no operators, so that there are no kernels to compare; and most of its first "
            "step is a C++ compiler's.",
        )
    if bare := [pair.label for pair in study.pairs if pair.other.on_gpu and pair.kernels is None]:
        yield note("no-kernels", f"Neither a capture nor a profiled step of both is there for {listed(bare)}.")
    if named := sum(not (pair.base.digest and pair.other.digest) for pair, _ in with_kernels(study)):
        reason = "polars, which reads captures, is not installed" if unread else "there is no capture of both"
        yield note(
            "kinds-by-name",
            f"Kernels of {named} pairs are sorted by their names alone, as the profiled step has them ({reason}).",
        )
    yield from comparison.doubtful_runs(study)
    yield from comparison.unlike_environments(study.pairs)
    yield from comparison.replaced_runs(study)


TIMES, COST, REPORT, KERNELS, MEMORY, MISSING = (
    "Eager against compiled: medians, and the speed-up, with 95 % intervals",
    "What compiling costs, and after how many steps it has paid for itself",
    "What torch.compile did",
    "Kernels of a step before and after, by kind",
    "Memory of the step, and its change against eager",
    "Not compared",
)
_HELD = (
    ("forward_peak", "forward peak"),
    ("saved_for_backward", "saved for backward"),
    ("allocated_peak", "step's peak"),
    ("reserved_peak", "reserved"),
)


def answer_compile(study: CompileStudy, *, unread: int = 0) -> Answer:
    """The whole answer. `unread`: captures that could not be read.

    Raises InputError where no cell was measured both eager and compiled.
    """
    if not study.pairs:
        measured = f"{BASELINE} and compiled"
        raise InputError(comparison.nothing_to_compare(study, verb="compile", needs="was measured", measured=measured))
    return comparison.compared_answer(
        study,
        study.pairs[0].base,
        study="compile",
        question="What does torch.compile give the whole model, and what does it cost?",
        tables=(_times(study), _cost(study), _report(study), _kernels(study), _memory(study), _missing(study)),
        panels=_panels(study),
        findings=chain(
            _what_ran(study),
            _speed_ups(study),
            _cost_findings(study),
            _kernel_findings(study),
            _launches(study),
            _memory_findings(study),
            _doubt_findings(study, unread),
        ),
    )


def _times(study: CompileStudy) -> Table:
    def kinds(pair: CompilePair) -> str:
        fault = (pair.other.fault.kind,) if pair.other.fault else ()
        return ", ".join(dict.fromkeys((*doubting_kinds(pair.base.run, pair.other.run), *fault)))

    rows: list[dict[str, Cell]] = [
        {
            "cell": pair.other.name,
            "compile": pair.other.value,
            "phase": part,
            **within("eager ms", "eager", pair.base.samples(part)),
            **within("compiled ms", "compiled", pair.other.samples(part)),
            **within("speed-up", "speed-up", ratio),
            "findings": kinds(pair) if part == STEP else "",
        }
        for pair in study.pairs
        for part in PARTS
        if (ratio := pair.ratio(part)) is not None
    ]
    return comparison.table_of_rows(TIMES, rows)


def _cost(study: CompileStudy) -> Table:
    rows: list[dict[str, Cell]] = []
    for pair in study.pairs:
        paid, report = pair.payback, pair.other.run.evidence.compilation
        # The first step has the compilation in it; warm-up steps are not kept of every run.
        steps = [cell.samples(STEP) for cell in (pair.base, pair.other)]
        first = [step.warmup_s[0] if step and step.warmup_s else None for step in steps]
        rows.append(
            {
                "cell": pair.other.name,
                "compile": pair.other.value,
                "eager first step s": digits(first[0]),
                "compiled first step s": digits(first[1]),
                "of it dynamo's s": digits(report.compile_s) if report else None,
                "costs s": digits(paid.extra_s) if paid else None,
                "a step wins ms": milliseconds(paid.won_s) if paid else None,
                "paid after steps": paid.steps if paid else None,
                "steps from": paid.least if paid else None,
                "steps to": paid.most if paid else None,
                "of eager steps s": digits(paid.steps * pair.base.time_s) if paid and paid.steps is not None else None,
            }
        )
    return comparison.table_of_rows(COST, rows)


def _report(study: CompileStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for cell in (pair.other for pair in study.pairs):
        report, generated = cell.run.evidence.compilation, cell.generated if cell.on_gpu else None
        did: tuple[Cell, ...] = (None,) * 6
        if report:
            frames = f"{report.frames_compiled} of {report.frames_total}"
            broken = report.graph_breaks, report.recompiles, report.limit_hit
            did = (frames, report.graphs, *broken, report.cached_graphs)
        reasons = (*report.graph_break_reasons, *report.recompile_reasons) if report else ()
        kernels = None if generated is None else round(generated)
        rows.append((cell.name, cell.value, cell.ran, *did, kernels, "; ".join(reasons)))
    counted = ("frames compiled", "graphs", "graph breaks", "recompiles", "limit hit", "from caches")
    heads = ("cell", "compile", "what ran", *counted, "generated kernels", "reasons")
    return Table(title=REPORT, columns=heads, rows=tuple(rows))


def _kernels(study: CompileStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for pair, kernels in with_kernels(study):
        named = [*((kind, *kernels.of([kind])) for kind in KINDS), ("all kernels", *kernels.of())]
        known = [(name, before, after) for name, before, after in named if before.calls or after.calls]
        figures = [(name, round(b.calls), round(a.calls), b.busy_s, a.busy_s) for name, b, a in known]
        for name, calls, left, before_s, after_s in [*figures, ("no kernel", None, None, *kernels.none_s)]:
            times = map(milliseconds, (before_s, after_s, before_s - after_s))
            rows.append((pair.other.name, pair.other.value, name, calls, left, *times))
    heads = ("eager", "compiled", "eager ms", "compiled ms", "won ms")
    return Table(title=KERNELS, columns=("cell", "compile", "kernels", *heads), rows=tuple(rows))


def _memory(study: CompileStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for pair, (field, name) in product(study.pairs, _HELD):
        if (change := pair.memory_change(field)) is not None:
            held = [gibibytes(memory_of(cell.run, field)) for cell in (pair.base, pair.other)]
            rows.append((pair.other.name, pair.other.value, name, *held, percent(change)))
    heads = ("figure", "eager GiB", "compiled GiB", "%")
    return Table(title=MEMORY, columns=("cell", "compile", *heads), rows=tuple(rows))


def _missing(study: CompileStudy) -> Table:
    lacking = {cell: "compiled" if cell.is_base else BASELINE for cell in study.alone}
    alone = [(cell.name, cell.value, f"no {counterpart} run beside it") for cell, counterpart in lacking.items()]
    return comparison.missing_cells(MISSING, CompileCell.FIELD, study.unmeasured, alone)


def _panels(study: CompileStudy) -> tuple[Panel, ...]:
    several = len({pair.other.shape for pair in study.pairs}) > 1
    speed_ups = [(pair.other, pair.speed_up.value, pair.doubted) for pair in study.pairs]
    paid = [(pair.other, pair.payback.steps, pair.doubted) for pair in study.pairs if pair.payback]
    steps = [(cell, float(count), doubted) for cell, count, doubted in paid if count is not None]
    return (
        *comparison.over_sizes("speed-up of the step over eager", speed_ups, several_shapes=several),
        *comparison.over_sizes("steps until compiling is paid for", steps, several_shapes=several, y_log=True),
        *comparison.bars_of(study, STEP),
    )


# What does torch.compile give? Forward and the full step of some models, eager and in modes of torch.compile.


BASELINE = CompileCell.BASELINE


ON_GPU = Sizes(models=("small", "large", "2.7B"), seq_len=512, batch_size=4, dtypes=("bf16",))
ON_CPU = Sizes(models=("tiny",), seq_len=32, batch_size=1, dtypes=("fp32",))
"""Two minutes on two cores, nearly all of it a C++ compiler's."""


def check_modes(modes: Sequence[str]) -> tuple[str, ...]:
    """The modes to set beside eager. Raises InputError for one that there is not."""
    if BASELINE in modes:
        raise InputError(f"--compile names what is set beside {BASELINE}, which is always measured: leave it out")
    for mode in modes:
        choose(mode, [known for known in COMPILES if known != BASELINE], "compile mode")
    return tuple(modes)


@contextlib.contextmanager
def cold_caches() -> Generator[None]:
    """Processes started in here compile from nothing, and what they leave on disk goes at the end.

    torch.compile finds code that an earlier process generated, on disk: the time of compiling would be that of reading.
    """
    with tempfile.TemporaryDirectory(prefix="stepscope-inductor-", ignore_cleanup_errors=True) as folder:
        wanted = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_CACHE_DIR": folder}
        with comparison.child_environment(wanted):
            yield


Modes = Annotated[tuple[str, ...] | None, Option("", WORKLOAD, choices=COMPILES[1:4])]
Prices = Annotated[bool, Option("What each graph break and recompilation costs a step of your own module (--module).")]


def compare_modes(
    *,
    options: StepOptions,
    module: str | None,
    arg: tuple[str, ...] = (),
    phase: tuple[str, ...] | None,
    attention: tuple[str, ...] | None,
    compile: Modes,
    warmup: int | None,
    prices: Prices = False,
) -> Answer | Result | Cells:
    """What torch.compile gives forward and the full step, what it costs, what it did, and which kernels it fused."""
    usual = options.usual(ON_CPU, ON_GPU)
    dtypes = options.dtype or usual.dtypes
    if prices:
        from stepscope.questions.compile_prices import price_of_breaks

        if not options.names_user_model(module):
            raise InputError("--prices is for a module of your own: add --module FILE:FACTORY")
        if options.from_ or phase or attention or compile:
            raise InputError(
                "--prices compiles the whole step in the default mode: leave out --from, --phase and --compile"
            )
        return price_of_breaks(options.user_cells(module, arg, warmup, dtype=dtypes), options.device)

    compared = Compared(
        study="compile",
        cell=CompileCell,
        answer=lambda cells, unread: answer_compile(pair_up(cells), unread=unread),
        options=options,
    )
    if options.from_:
        modes = None if compile is None else (BASELINE, *check_modes(compile))
        return compared.stored({**options.fields, "phase": phase, "attention": attention, "compile": modes})
    phases, modes = phase or ("forward", "train"), (BASELINE, *check_modes(compile or ("default",)))
    cells = options.user_cells(module, arg, warmup, dtype=dtypes, phase=phases, attention=attention, compile=modes)
    if not cells:
        choices = {"phase": phases, "attention": attention or ("reference",), "compile": modes}
        cells = comparison.compared_cells(**choices, **options.sizes(usual, warmup))
    trace = TraceRequest(tools=() if options.device_type == "cpu" else ("kineto",), steps=1)
    return compared.measured(cells, trace, cold_caches())


QUESTION = Question(
    "compile",
    compare_modes,
    examples=("--model small --compile default,max-autotune", "--module train.py:make --prices"),
    shared=("save", "shown"),
    defaults={**ON_GPU.in_words(ON_CPU), "phase": "forward,train", "attention": "reference", "compile": "default"},
)
