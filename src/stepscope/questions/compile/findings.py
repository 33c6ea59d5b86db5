"""What follows from a step run eager and compiled: sentences made from its figures."""

import math
from collections.abc import Iterator, Sequence
from itertools import chain

from stepscope.core.finding import Finding, note, warning
from stepscope.core.range_names import BACKWARD, FORWARD, OPTIMIZER, STEP
from stepscope.core.units import format_bytes, format_seconds, format_share
from stepscope.questions.compare.doubts import (
    doubtful_runs,
    listed,
    replaced_runs,
    speed_ups_of,
    unlike_environments,
)
from stepscope.questions.compile.cells import (
    ATTENTION,
    FUSABLE,
    GENERATED,
    KINDS,
    OPTIMIZER_KERNELS,
    PRODUCTS,
    CompilePair,
    CompileStudy,
    Kernels,
    Payback,
    with_kernels,
)
from stepscope.runs.metrics import median_s, memory_of

_LAUNCH_BOUND = 0.2
"""Share of a step in which no kernel runs; from this on the host sets the pace, as in the finding `launch-bound`."""
_SAME = 0.05
"""Products whose time changes by less are the same products."""
_MUCH = 0.1
"""Share of the step's change: if the optimizer, which is not compiled, changes by as much, a finding says so."""


def compile_findings(study: CompileStudy, unread: int) -> Iterator[Finding]:
    """Every finding: did compiled code run, how fast, what it costs, what changed, and what to doubt."""
    return chain(
        _what_ran(study), _speed_ups(study), _cost(study), _kernels(study), _launches(study), _memory(study),
        _doubts(study, unread),
    )  # fmt: skip


def _what_ran(study: CompileStudy) -> Iterator[Finding]:
    """Rows 4 and 5 of docs/measuring.md: fallen back to eager, and another object called than was compiled."""
    faulty = [pair for pair in study.pairs if pair.other.fault]
    for pair in faulty:
        fault = pair.other.fault
        assert fault is not None
        report = pair.other.run.evidence.compilation
        why = (report.graph_break_reasons or report.recompile_reasons) if report else ()
        more = f" Reason: {why[0]}." if why and why[0] not in fault.sentence else ""
        eager = " Its speed-up compares eager with eager." if fault.severity == "error" else ""
        priced = " --prices says what each costs." if pair.other.run.textbook is None else ""
        sentence = f"{pair.label}: {fault.sentence}{more}{eager}{priced}"
        yield Finding(kind=fault.kind, severity=fault.severity, sentence=sentence, evidence=fault.evidence)
    reported = [
        (pair, report)
        for pair in study.pairs
        if (report := pair.other.run.evidence.compilation) and not pair.other.fault
    ]  # fmt: skip
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
    unknown = [pair.label for pair in study.pairs if pair.other.ran == "not known"]
    if unknown:
        yield warning(
            "no-report",
            f"What torch.compile did is not known of {listed(unknown)}: dynamo's counters were not kept.",
        )


def _speed_ups(study: CompileStudy) -> Iterator[Finding]:
    """The speed-up over the models, for each shape and mode, by phase, and where there is none."""
    for (mode, shape), pairs in study.lines.items():
        speed_ups = "; ".join(f"{pair.other.model} {pair.speed_up.value:.2f}{_by_phase(pair)}" for pair in pairs)
        yield note(
            "speed-up",
            f"compile {mode} against eager ({shape}), speed-up of the step: {speed_ups}.",
            {pair.other.model: pair.speed_up.value for pair in pairs},
        )
    bound = [pair for pair in study.pairs if _optimizer_share(pair)]
    if bound:
        most = max(bound, key=lambda pair: _optimizer_share(pair) or 0.0)
        share, before = _optimizer_share(most) or 0.0, (median_s(most.base.run, OPTIMIZER) or 0.0)
        yield note(
            "optimizer-eager",
            f"The optimizer is not compiled: in {most.label} it takes {format_share(share)} of the step, eagerly "
            f"{format_share(before / most.base.time_s)}.",
            {"share": share},
        )
    yield from _process_noise(study)
    for pair in study.pairs:
        if pair.slower and not _is_noise(pair):
            yield warning(
                "slower",
                f"Compiling does not pay for {pair.label}: a step takes {format_seconds(pair.other.time_s)}, "
                f"eagerly {format_seconds(pair.base.time_s)}.",
                {"speed_up": pair.speed_up.value},
            )
    noise = [pair.label for pair in study.pairs if _is_noise(pair)]
    if noise:
        yield warning(
            "no-more-than-noise",
            f"Whether compiling pays cannot be told for {listed(noise)}: the step changes by no more than its "
            "optimizer, which is the same code in both.",
            {"cells": len(noise)},
        )
    untold = [pair for pair in study.pairs if pair.untold]
    if untold:
        yield note(
            "cannot-be-told",
            f"Whether compiling pays cannot be told for {listed(pair.label for pair in untold)}: "
            f"{untold[0].speed_up.why_undecided}.",
            speed_ups_of(untold),
        )
    level = [pair for pair in study.pairs if pair.level]
    if level:
        yield warning(
            "no-difference",
            f"Compiling does not pay for {listed(pair.label for pair in level)}: the interval of the step's "
            "speed-up holds 1.",
            speed_ups_of(level),
        )


def _is_noise(pair: CompilePair) -> bool:
    """Whether the step changes by no more than its optimizer does, which is the same code in both."""
    optimizer_s, step_s = pair.won_s(OPTIMIZER), pair.won_s(STEP)
    return optimizer_s is not None and step_s is not None and 0 < abs(step_s) <= abs(optimizer_s)


def _by_phase(pair: CompilePair) -> str:
    ratios = {part: pair.ratio(part) for part in (FORWARD, BACKWARD, OPTIMIZER)}
    if ratios[BACKWARD] is None:
        return ""
    said = ", ".join(f"{part} {ratio.value:.2f}" for part, ratio in ratios.items() if ratio is not None)
    return f" ({said})"


def _process_noise(study: CompileStudy) -> Iterator[Finding]:
    """A warning where the optimizer, the same code in both runs, changed by a large share of what the step changed."""
    found: dict[str, tuple[float, float]] = {}
    for pair in study.pairs:
        optimizer_s, step_s = pair.won_s(OPTIMIZER), pair.won_s(STEP)
        if optimizer_s is not None and step_s is not None and abs(optimizer_s) >= _MUCH * abs(step_s):
            found[pair.label] = optimizer_s, step_s
    if found:
        label = max(found, key=lambda name: abs(found[name][0] / (found[name][1] or math.inf)))
        optimizer_s, step_s = found[label]
        others = f" (and in {len(found) - 1} more comparisons)" if len(found) > 1 else ""
        yield warning(
            "process-noise",
            f"The optimizer is the same code in both, and yet takes {format_seconds(abs(optimizer_s))} "
            f"{'less' if optimizer_s >= 0 else 'more'} in {label}, where the step "
            f"{'wins' if step_s >= 0 else 'loses'} {format_seconds(abs(step_s))}: that much is noise between two "
            f"processes{others}.",
            {"optimizer_s": optimizer_s, "step_s": step_s},
        )


def _optimizer_share(pair: CompilePair) -> float | None:
    optimizer_s = median_s(pair.other.run, OPTIMIZER)
    return optimizer_s / pair.other.time_s if optimizer_s else None


def _cost(study: CompileStudy) -> Iterator[Finding]:
    told = [pair for pair in study.pairs if not _is_noise(pair)]
    paid = [(pair, pair.payback) for pair in told if pair.payback and pair.payback.steps is not None]
    paid.sort(key=lambda both: both[1].steps or 0)
    for pair, payback in dict.fromkeys([*paid[:1], *paid[-1:]]):
        yield note(
            "paid-after",
            f"{pair.label}: compiling costs {format_seconds(payback.extra_s)} and wins "
            f"{format_seconds(payback.won_s)} a step, so it is paid for after {payback.steps:,} steps"
            f"{_range(payback)}, {format_seconds((payback.steps or 0) * pair.base.time_s)} of eager ones.",
            {"extra_s": payback.extra_s, "won_s": payback.won_s, "steps": payback.steps},
        )
    never = [pair.label for pair in told if pair.payback and pair.payback.steps is None]
    if never:
        yield warning(
            "never-paid",
            f"Compiling is never paid for in {listed(never)}: no step is faster.",
        )
    reports = [(pair, report) for pair in study.pairs if (report := pair.other.run.evidence.compilation)]
    cached = [pair.label for pair, report in reports if report.cached_graphs]
    if cached:
        yield warning(
            "from-caches",
            f"Code of {listed(cached)} came from torch's caches on disk: its first step did not compile all of it.",
            {"cells": len(cached)},
        )
    uncounted = sum(report.cached_graphs is None for _, report in reports)
    if uncounted:
        yield note(
            "caches-unknown",
            f"Whether code came from torch's caches on disk was not counted in {uncounted} of {len(reports)} compiled "
            "runs: their cost is that of a first start only if the caches were cold.",
            {"cells": uncounted},
        )


def _range(payback: Payback) -> str:
    if payback.least is None:
        return ""
    most = "no end known" if payback.most is None else f"{payback.most:,}"
    return f" ({payback.least:,} to {most})"


def _kernels(study: CompileStudy) -> Iterator[Finding]:
    """What fused and where the gain lies, in each mode's least and greatest speed-up; products, in all."""
    known = [(pair, kernels) for pair, kernels in with_kernels(study) if pair.other.ran != "eager"]
    for mode in dict.fromkeys(pair.other.value for pair, _ in known):
        mine = sorted(
            ((pair, kernels) for pair, kernels in known if pair.other.value == mode),
            key=lambda both: both[0].speed_up.value,
        )
        ends = {id(pair): (pair, kernels) for pair, kernels in [*mine[:1], *mine[-1:]]}
        for pair, kernels in ends.values():
            yield _fused(pair, kernels)
            yield _gains(pair, kernels)
    yield from _products(known)


def _fused(pair: CompilePair, kernels: Kernels) -> Finding:
    all_before, all_after = kernels.of()
    loose_before, loose_after = kernels.of(FUSABLE)
    _, generated = kernels.of([GENERATED])
    kinds = [(kind, *kernels.of([kind])) for kind in FUSABLE]
    gone = [f"{kind} {b.calls:,.0f} to {a.calls:,.0f}" for kind, b, a in kinds if b.calls and a.calls != b.calls]
    told = f" ({'; '.join(gone)})" if gone else ""
    return note(
        "fused",
        f"{pair.label}: {all_before.calls:,.0f} kernels a step become {all_after.calls:,.0f}. "
        f"{generated.calls:,.0f} generated ones, {format_seconds(generated.busy_s)}, stand for "
        f"{loose_before.calls - loose_after.calls:,.0f} others, "
        f"{format_seconds(loose_before.busy_s - loose_after.busy_s)}{told}.",
        {
            "kernels_before": all_before.calls,
            "kernels_after": all_after.calls,
            "generated": generated.calls,
            "generated_s": generated.busy_s,
            "fused": loose_before.calls - loose_after.calls,
            "fused_s": loose_before.busy_s - loose_after.busy_s,
        },
    )


def _gains(pair: CompilePair, kernels: Kernels) -> Finding:
    fusions_s = kernels.won_s((*FUSABLE, GENERATED))
    parts = [
        (fusions_s, "by fusion"),
        (kernels.won_s([PRODUCTS]), "in products"),
        (kernels.won_s([ATTENTION]), "in fused attention"),
        (kernels.won_s([OPTIMIZER_KERNELS]), "in the optimizer"),
        (kernels.none_s[0] - kernels.none_s[1], "where no kernel ran"),
    ]
    total_s = sum(won_s for won_s, _ in parts)
    told = [(won_s, where) for won_s, where in parts if abs(won_s) >= 0.01 * abs(total_s)]
    said = ", ".join(f"{'' if won_s >= 0 else '-'}{format_seconds(abs(won_s))} {where}" for won_s, where in told)
    return note(
        "gain",
        f"{pair.label}: a step wins {format_seconds(total_s)}: {said}."
        if total_s > 0
        else f"{pair.label}: a step loses {format_seconds(-total_s)}: {said}.",
        {f"won_{where.replace(' ', '_')}_s": won_s for won_s, where in parts},
    )


def _products(known: Sequence[tuple[CompilePair, Kernels]]) -> Iterator[Finding]:
    """Compiling leaves matrix products to the libraries: are they the same?"""
    found = {pair.label: kernels.of([PRODUCTS]) for pair, kernels in known}
    timed = {label: (b, a) for label, (b, a) in found.items() if b.busy_s and a.busy_s}
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
        issued = ""
        if host[0] and host[1]:
            issued = f" The host takes {format_seconds(host[1])} to issue it, eagerly {format_seconds(host[0])}."
        graphs = (
            " CUDA graphs would issue them at once: --compile reduce-overhead."
            if idle[1] >= _LAUNCH_BOUND and pair.other.value == "default"
            else ""
        )
        yield note(
            "launch-bound",
            f"Launches set the pace of {pair.other.name}: no kernel runs for {format_share(idle[0])} of the eager step "
            f"({calls[0]:,.0f} kernels) and {format_share(idle[1])} of the compiled one ({pair.other.value}, "
            f"{calls[1]:,.0f}).{issued}{graphs}",
            {"before": idle[0], "after": idle[1]},
        )


def _memory(study: CompileStudy) -> Iterator[Finding]:
    for field, kind, name in (
        ("allocated_peak", "peak", "the step's peak"),
        ("saved_for_backward", "saved", "what is kept for backward"),
    ):
        changes = {pair: change for pair in study.pairs if (change := pair.memory_change(field)) is not None}
        if not changes:
            continue
        best, worst = min(changes, key=lambda p: changes[p]), max(changes, key=lambda p: changes[p])
        before, after = (memory_of(cell.run, field) or 0 for cell in (best.base, best.other))
        yield note(
            f"memory-{kind}",
            f"Compiling changes {name} by {changes[best] * 100:+.1f} % ({best.label}, {format_bytes(before)} to "
            f"{format_bytes(after)}) to {changes[worst] * 100:+.1f} % ({worst.label})."
            if best is not worst
            else f"Compiling changes {name} of {best.label} by {changes[best] * 100:+.1f} %, {format_bytes(before)} to "
            f"{format_bytes(after)}.",
            {pair.label: change for pair, change in changes.items()},
        )


def _doubts(study: CompileStudy, unread: int) -> Iterator[Finding]:
    """What is missing, and what makes a comparison doubtful."""
    if any(not pair.other.on_gpu for pair in study.pairs):
        yield note(
            "on-cpu",
            "On a CPU compiled code calls no operators, so that there are no kernels to compare; and most of its first "
            "step is a C++ compiler's.",
        )
    bare = [pair.label for pair in study.pairs if pair.other.on_gpu and pair.kernels is None]
    if bare:
        yield note("no-kernels", f"Neither a capture nor a profiled step of both is there for {listed(bare)}.")
    named = sum(not (pair.base.digest and pair.other.digest) for pair, _ in with_kernels(study))
    if named:
        reason = "polars, which reads captures, is not installed" if unread else "there is no capture of both"
        yield note(
            "kinds-by-name",
            f"Kernels of {named} pairs are sorted by their names alone, as the profiled step has them ({reason}).",
        )
    yield from doubtful_runs(study)
    yield from unlike_environments(study.pairs)
    yield from replaced_runs(study)
