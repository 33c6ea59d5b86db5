"""What follows from a model's steps with each attention, in sentences made of the figures."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from stepscope.core.doubts import doubting_kinds
from stepscope.core.finding import Finding, note, warning
from stepscope.core.range_names import PHASES
from stepscope.core.units import format_bytes, format_milliseconds
from stepscope.questions.attention_step.cells import (
    LEAST,
    OUTSIDE_FAMILIES,
    OUTSIDE_PHASE,
    StepGroup,
    StepPair,
    StepStudy,
)
from stepscope.questions.compare.doubts import replaced_runs, unlike_environments
from stepscope.runs.metrics import median_s, memory_of, peak_bytes

_MOVES = 4
"""Named in a sentence."""
_FILLED = 0.9
"""The share of the step that kernels fill: below it, the device waits for the host."""


def steps_findings(study: StepStudy, groups: Sequence[StepGroup], unread: int) -> Iterator[Finding]:
    """Cell by cell beside the first of its group, then of each group, then of what is missing."""
    for group in groups:
        for pair in group.pairs:
            yield from chain(_step(group, pair), _kernels(pair), _saved(pair))
        yield from chain(_fastest(group), _waits(group))
    yield from chain(_picked(groups), _alone(groups), _doubts(groups))
    yield from unlike_environments([pair for group in groups for pair in group.pairs])
    yield from replaced_runs(study)
    for cell in study.unmeasured:
        if cell.run.status == "out-of-memory":
            yield note("out of memory", f"{cell.label} ran out of memory.")
    if unread:
        yield warning(
            "unread",
            f"{unread} captures were not read, since polars is not installed here: the families are missing.",
            {"captures": unread},
        )


def _step(group: StepGroup, pair: StepPair) -> Iterator[Finding]:
    """How many times as fast, or why that cannot be said."""
    ratio, base, cell = pair.speed_up, pair.base, pair.other
    step_s, base_s = cell.time_s, base.time_s
    evidence = {"speed-up": ratio.value, "step_s": step_s, "base_s": base_s, "noise": group.noise}
    alike = group.why_alike(pair)
    if alike:
        yield note(
            "not distinguishable",
            f"{cell.name}: with {cell.value} a step takes {format_milliseconds(step_s)} ms and with {base.value} "
            f"{format_milliseconds(base_s)}, which is not distinguishable: {alike}.",
            evidence,
        )
        return
    bounds = f" ({ratio.interval.low:.3g} to {ratio.interval.high:.3g})" if ratio.interval else ""
    phases = [
        f"{phase} {_signed(after - before)}"
        for phase in PHASES
        if (before := median_s(base.run, phase)) and (after := median_s(cell.run, phase))
        and abs(after - before) >= LEAST * base_s
    ]  # fmt: skip
    named = f": {', '.join(phases)}" if phases else ""
    if any(phase.startswith(OUTSIDE_PHASE) for phase in phases):
        named += f"; no attention runs in the {OUTSIDE_PHASE}, so that much is noise"
    yield note(
        "faster" if ratio.value > 1 else "slower",
        f"{cell.name}: with {cell.value} the step is {ratio.value:.3g}{bounds} times as fast as with {base.value}, "
        f"{format_milliseconds(base_s)} to {format_milliseconds(step_s)} ms{named}.",
        evidence,
    )


def _kernels(pair: StepPair) -> Iterator[Finding]:
    """What moved in attention, and beside it what moved where attention is not."""
    base, cell = pair.base, pair.other
    least_s = LEAST * base.time_s
    all_moves, moves = pair.moves, pair.moves_inside
    if not all_moves:
        return
    if moves:
        outside_s, own, rest = cell.outside_s - base.outside_s, "in attention itself", "in all else"
    else:  # a capture that does not say which kernels are attention's own
        moves = [move for move in all_moves if move[0] not in OUTSIDE_FAMILIES]
        outside_s = sum(s for family, s in all_moves if family in OUTSIDE_FAMILIES)
        own, rest = "in families that attention has a part in", "in the other families"
    named = [(family, s) for family, s in moves if abs(s) >= least_s][:_MOVES]
    change_s = sum(s for _, s in moves)
    start = f"{cell.name}, from {base.value} to {cell.value}, kernel time of a step moves by"
    evidence = {**dict(named), "attention": change_s, "elsewhere": outside_s}
    if not named and abs(outside_s) < least_s:
        return
    largest = max((abs(s) for _, s in named), default=0.0)
    if max(largest, abs(change_s)) <= abs(outside_s):
        yield note(
            "not distinguishable",
            f"{start} {_signed(change_s)} {own}, and by {_signed(outside_s)} {rest}, "
            "where both do the same: what attention moves is not distinguishable from noise.",
            evidence,
        )
        return
    families = ", ".join(f"{family} {_signed(s)}" for family, s in named)
    yield note(
        "moved",
        f"{start} {_signed(change_s)} {own}: {families}; {rest}, where both do the same, by {_signed(outside_s)}.",
        evidence,
    )


def _saved(pair: StepPair) -> Iterator[Finding]:
    base, cell = pair.base, pair.other
    saved, of_base = memory_of(cell.run, "saved_for_backward"), memory_of(base.run, "saved_for_backward")
    if saved is None or not of_base:
        return
    peaks = (peak_bytes(base.run), peak_bytes(cell.run))
    peak = ""
    if peaks[0] is not None and peaks[1] is not None:
        peak = f"; the peak goes from {format_bytes(peaks[0])} to {format_bytes(peaks[1])}"
    yield note(
        "memory",
        f"{cell.name}: with {cell.value} {format_bytes(abs(of_base - saved))} {'less' if saved <= of_base else 'more'} "
        f"is saved for backward than with {base.value}, {format_bytes(saved)}{peak}.",
        {"saved": saved, "saved of the first": of_base},
    )


def _fastest(group: StepGroup) -> Iterator[Finding]:
    """The shortest of three or more steps, and the steps that cannot be told apart from it."""
    if len(group.cells) < 3:
        return
    best = min(group.cells, key=lambda cell: cell.time_s)
    others = [StepPair(base=cell, other=best) for cell in group.cells if cell is not best]
    alike = [pair.base.value for pair in others if group.why_alike(pair)]
    rest = f", not distinguishable from {', '.join(alike)}" if alike else ""
    yield note(
        "fastest",
        f"{best.name}: the shortest of {len(group.cells)} steps is that with {best.value}, "
        f"{format_milliseconds(best.time_s)} ms{rest}.",
        {"step_s": best.time_s, "alike": len(alike)},
    )


def _waits(group: StepGroup) -> Iterator[Finding]:
    """On a GPU: steps that kernels do not fill are as long as the host takes, whatever the attention."""
    waiting: list[str] = []
    least = 1.0
    for cell in group.cells:
        if not cell.on_gpu or not cell.families:
            continue
        busy_s = sum(cell.families.values())
        if busy_s < _FILLED * cell.time_s:
            waiting.append(f"{format_milliseconds(busy_s)} of {format_milliseconds(cell.time_s)} ms with {cell.value}")
            least = min(least, busy_s / cell.time_s)
    if waiting:
        yield note(
            "launch-bound",
            f"{group.base.name}: kernels fill {', '.join(waiting)}; for the rest the device waits for the host, which "
            "no attention shortens: compare their kernel time.",
            {"least share": least},
        )


def _picked(groups: Sequence[StepGroup]) -> Iterator[Finding]:
    """What `auto` stood for."""
    picks: dict[str, list[str]] = {}
    for group in groups:
        for cell in group.cells:
            if cell.run.evidence.attention:
                picks.setdefault(cell.run.evidence.attention, []).append(cell.name)
    for picked, cells in picks.items():
        yield note("picked", f"auto is {picked} in {', '.join(cells)}.", {"cells": len(cells)})


def _alone(groups: Sequence[StepGroup]) -> Iterator[Finding]:
    """Where there is one attention, there is nothing to set it beside."""
    alone = [group.base for group in groups if len(group.cells) == 1]
    if alone:
        names = ", ".join(dict.fromkeys(cell.value for cell in alone))
        first = f"{alone[0].name} first" if len(alone) > 1 else alone[0].name
        yield note(
            "nothing to compare",
            f"There is nothing to compare in {len(alone)} of {len(groups)} cells, {first}: one attention alone was "
            f"measured there ({names}). Others: --attention.",
            {"cells": len(alone)},
        )


def _doubts(groups: Sequence[StepGroup]) -> Iterator[Finding]:
    """What the runs' own checks warn of: such times are no attention's doing."""
    cells = [cell for group in groups if len(group.cells) > 1 for cell in group.cells]
    kinds = Counter(kind for cell in cells for kind in sorted(doubting_kinds(cell.run)))
    if kinds:
        named = ", ".join(f"{kind} ({count})" for kind, count in kinds.items())
        doubted = sum(bool(doubting_kinds(cell.run)) for cell in cells)
        yield warning(
            "doubtful-runs",
            f"{doubted} of the {len(cells)} steps compared are doubted by their own checks: {named}. What `stepscope "
            "show` says of these runs holds for their comparisons too.",
            kinds,
        )


def _signed(seconds: float) -> str:
    """A change in ms."""
    return f"{'+' if seconds > 0 else ''}{format_milliseconds(seconds)} ms"
