"""Sides of a comparison as an answer: is it faster, by how much, how sure, and which part of the step made it so."""

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.core.answer import TEXT, Answer, Cell, Frame, Guide, Line, Panel, Point, Table, Tone, as_lines, table_of
from stepscope.core.processes import FEWEST_PROCESSES, Change
from stepscope.core.range_names import STEP
from stepscope.core.samples import CONFIDENCE
from stepscope.core.units import counted, format_joules, format_milliseconds, format_share
from stepscope.questions.compare.sides import SideComparison, SidePair
from stepscope.questions.compare.sides_findings import sides_findings
from stepscope.runs.communication import compared_ranks
from stepscope.runs.metrics import joules_per_step, samples_of

if TYPE_CHECKING:
    from stepscope.traces.captures.digest import TraceDigest

DETAILED = 3
"""Pairs whose buckets are shown, those that changed most. `--json` holds those of all."""
_ROWS = 10
_MEMORY = (
    ("before the step", "after_parameters"), ("forward peak", "forward_peak"),
    ("saved for backward", "saved_for_backward"), ("backward peak", "backward_peak"),
    ("peak of forward and backward that take turns", "turns_peak"),
    ("optimizer peak", "optimizer_peak"), ("reserved", "reserved_peak"),
)  # fmt: skip

_BEFORE_ALL = ("different-workloads", "different-environments", "different-clocks", "mixed-side", "shared-runs")
"""Findings that say what the two sides differ in beside what is compared: they stand before the verdict."""

COMPARISON_VERSION = 1
"""The form of `comparison_as_json`. It grows with a field that changes what another means."""

DigestOf = Callable[[SidePair], "tuple[TraceDigest | None, TraceDigest | None]"]
"""What the captures of a pair say, before and after."""


def answer_comparison(found: SideComparison, digests: DigestOf) -> Answer:
    """The Answer on two sides: a row for each pair, where the largest changes lie, and what to doubt."""
    order = sorted(range(len(found.pairs)), key=lambda i: -abs(_share(found.changes[i])))[:DETAILED]
    detailed = [found.pairs[i] for i in sorted(order)]
    tables = [_verdicts(found)]
    several, names = len(found.pairs) > 1, dict(zip(map(id, found.pairs), short_names(found), strict=True))
    for pair in detailed:
        tables += _details(pair, digests, f" of {names[id(pair)]}" if several else "")
    first, findings = found.pairs[0].after.representative.environment, tuple(sides_findings(found))
    return Answer(
        study="compare",
        question=f"Is {found.after.name} faster than {found.before.name}?",
        device=first.device_name if first else "",
        lead=_lead(found),
        date=max(run.day for pair in found.pairs for run in pair.after.runs),
        tables=tuple(table for table in tables if table.rows),
        panels=_panel(found),
        findings=tuple(finding for finding in findings if finding.kind not in _BEFORE_ALL),
        checked=any(finding.kind not in _BEFORE_ALL for finding in findings),
    )


def _share(change: Change | None) -> float:
    return change.share if change else 0.0


def _lead(found: SideComparison) -> tuple[Line, ...]:
    sides = f"{found.after.name} ({found.after.kind}) against {found.before.name} ({found.before.kind})"
    said = [Line(sides, "strong")]
    if len(found.pairs) == 1:
        said.append(Line(conclusion(found), _tone(found, 0)))
    else:
        said.append(Line(conclusion(found), "strong"))
    apart = [finding for finding in sides_findings(found) if finding.kind in _BEFORE_ALL]
    cautions = [Line(f"Take care: {finding.sentence}", "care") for finding in apart]
    return (said[0], *cautions, *said[1:])


def conclusion(found: SideComparison) -> str:
    """The verdict on one pair, or on all of them together, in a sentence or two."""
    return f"{found.pairs[0].label}: {sentence(found, 0)}" if len(found.pairs) == 1 else _together(found)


def _together(found: SideComparison) -> str:
    """How many of the pairs became faster or slower, and the geometric mean of their ratios."""
    stands = [(change, stand) for change, stand in zip(found.changes, found.stands, strict=True) if change]
    slower = sum(stand and change.ratio > 1 for change, stand in stands)
    faster = sum(stand and change.ratio < 1 for change, stand in stands)
    untold = sum(change.interval is None for change, _ in stands)
    no_verdict = f"without a verdict, since a side has fewer than {FEWEST_PROCESSES} processes"
    drift = sum(change.may_be_drift and not stand for change, stand in stands)
    same = len(stands) - slower - faster - untold - drift
    no_turns = "that cannot be told, since the sides were not measured in turns"
    words = [(slower, "slower"), (faster, "faster"), (same, "without a difference that was seen"), (drift, no_turns),
             (untold, no_verdict)]  # fmt: skip
    told = ", ".join(f"{count} {word}" for count, word in words if count)
    return f"Of {counted(len(found.pairs), 'pair')}: {told}.{''.join(_means(found))}"


def _means(found: SideComparison) -> Iterator[str]:
    """The geometric mean of the ratios over the cells that were changed in the same way, where there are several."""
    groups: dict[str, list[float]] = {}
    for pair, change in zip(found.pairs, found.changes, strict=True):
        if change is not None:
            groups.setdefault(pair.step_to, []).append(change.ratio)
    for what, ratios in groups.items():
        if len(ratios) > 1:
            mean = statistics.geometric_mean(ratios)
            named = f" from {what}" if what else ""
            yield f" The geometric mean of {len(ratios)} ratios{named} is {mean:.3f} ({_signed(mean - 1)})."


def sentence(found: SideComparison, place: int) -> str:
    """The verdict on one pair, in a sentence."""
    change, pair = found.changes[place], found.pairs[place]
    what = "the step" if found.value == STEP else found.value
    if change is None:
        return f"{what} was not measured on both sides."
    before, after = (_processes(count) for count in change.processes)
    turns = f"{before} in which both took turns" if change.paired else f"{before} against {after}"
    if change.interval is None:
        return (
            f"{what} takes {change.ratio:.3f} times as long ({_signed(change.share)}), by {turns}"
            f"{_of_steps(found, pair)}: no verdict, since processes differ; {FEWEST_PROCESSES} a side "
            f"(--repeat {FEWEST_PROCESSES}) tell by how much."
        )
    within = f"{_signed(change.interval.low - 1)} to {_signed(change.interval.high - 1)}"
    if found.stands[place]:
        made_by = found.most_in(pair)
        most = f", most of it in {made_by[0]} ({_ms(made_by[1])})" if made_by else ""
        word = "slower" if change.ratio > 1 else "faster"
        return f"{what} is {format_share(abs(change.share))} {word} ({within}; {turns}){most}."
    if change.may_be_drift:
        return (
            f"it cannot be told whether {what} changed: it takes {change.ratio:.3f} times as long ({within}; {turns}), "
            "but the sides were not measured in turns, so drift may be all that differs."
        )
    would = f", and one above {format_share(change.detectable)} would have been" if change.detectable else ""
    return f"no difference seen in {what}{would} ({within}; {turns})."


def _of_steps(found: SideComparison, pair: SidePair) -> str:
    """What the steps of one process a side say; nothing of more processes, or where they are too few."""
    before, after = ([samples_of(run, found.value) for run in side.measured] for side in (pair.before, pair.after))
    if len(before) != 1 or len(after) != 1 or before[0] is None or after[0] is None:
        return ""
    ratio = before[0].speedup_over(after[0])
    if ratio is None or ratio.interval is None:
        return ""
    return f" (their steps say {_signed(ratio.interval.low - 1)} to {_signed(ratio.interval.high - 1)})"


def _processes(count: int) -> str:
    return counted(count, "process")


def _signed(share: float) -> str:
    return f"{share * 100:+.1f} %"


def _ms(seconds: float) -> str:
    return f"{'+' if seconds > 0 else ''}{format_milliseconds(seconds)} ms"


def _tone(found: SideComparison, place: int) -> Tone:
    change = found.changes[place]
    if change is None or not found.stands[place]:
        return "strong"
    return "bad" if change.ratio > 1 else "good"


def _verdicts(found: SideComparison) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for pair, change, stands in zip(found.pairs, found.changes, found.stands, strict=True):
        before, after = pair.before.processes(found.value), pair.after.processes(found.value)
        interval = change.interval if change else None
        most = found.most_in(pair) if change and (stands or interval is None) else None
        counts = change.processes if change else (before.count, after.count)
        rows.append((
            pair.label, before.typical_s, after.typical_s, change.share if change else None,
            f"{_signed(interval.low - 1)} to {_signed(interval.high - 1)}" if interval else "",
            f"{counts[0]} / {counts[1]}", verdict(change, stands), f"{most[0]} ({_ms(most[1])})" if most else "",
        ))  # fmt: skip
    tones = {i: tone for i in range(len(rows)) if (tone := _tone(found, i)) != "strong"}
    notes = [
        f"Typical times over the processes of each side, and their ratio with its {CONFIDENCE * 100:.0f} % interval.",
        *_unseen(found),
        *([f"On one side alone: {', '.join(found.alone)}."] if found.alone else []),
        *([f"Not measured to the end on one side: {', '.join(found.lost)}."] if found.lost else []),
    ]
    if found.asked > 1:
        notes.append("A verdict stands where it holds for all pairs asked at once (Holm).")
    if len(found.pairs) > DETAILED:
        notes.append(f"Where the step changed is shown for the {DETAILED} pairs that changed most.")
    return table_of(
        f"{found.value} of", ("before", "s"), ("after", "s"), ("change", "+%"), ("interval", TEXT),
        ("processes", TEXT), "verdict", "most of it in", rows=rows, tones=tones, notes=as_lines(*notes),
    )  # fmt: skip


def verdict(change: Change | None, stands: bool) -> str:
    """The verdict in a word or two."""
    if change is None:
        return "not measured"
    if change.interval is None:
        return f"none, fewer than {FEWEST_PROCESSES}"
    if not stands:
        return "cannot be told" if change.may_be_drift else "no difference seen"
    return "slower" if change.ratio > 1 else "faster"


def _unseen(found: SideComparison) -> Iterator[str]:
    """Which changes would have been seen where none was."""
    limits = [
        change.detectable
        for change, stands in zip(found.changes, found.stands, strict=True)
        if change and verdict(change, stands) == "no difference seen" and change.detectable
    ]
    if limits:
        upto = format_share(max(limits))
        least = f"{format_share(min(limits))} to {upto}" if min(limits) < max(limits) else upto
        yield f"Where no difference was seen, one above {least} would have been, in nine of ten such comparisons."


def _details(pair: SidePair, digests: DigestOf, of: str) -> list[Table]:
    steps = pair.steps_s
    tables = [_bucket_table(f"where the step{of} changed", pair.buckets, steps)]
    before, after = digests(pair)
    if before is not None and after is not None:
        tables.append(_bucket_table(f"captured work{of}", work_buckets(before, after, _device_steps(pair)), None))
        tables.append(_bucket_table(f"modules{of}", module_buckets(before, after), None))
    ranks = compared_ranks(pair.before.representative, pair.after.representative, f"ranks{of}")
    tables += [_memory(pair, of), ranks, _energy(pair, of)]
    return tables


def work_buckets(
    before: "TraceDigest", after: "TraceDigest", steps_s: tuple[float, float] | None = None
) -> list[tuple[str, float, float]]:
    """Device work by family and phase, in seconds a step.

    steps_s: what the step takes before and after, where a device beside the host does the work. Then the time that it
    stood idle is there too, less what ran at the same time as other work, so that all together are the step.
    """
    rows: dict[str, list[float]] = {}
    for side, digest in enumerate((before, after)):
        for row in digest.families:
            rows.setdefault(f"{row.family}, {row.phase}", [0.0, 0.0])[side] += row.busy_ns * 1e-9
    ordered = sorted(rows.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    attributed = [sum(values[side] for values in rows.values()) for side in (0, 1)]
    busy = [digest.busy_ns * 1e-9 / digest.steps for digest in (before, after)]
    rest = [whole - part for whole, part in zip(busy, attributed, strict=True)]
    found = [*((name, was, now) for name, (was, now) in ordered), ("in no phase", rest[0], rest[1])]
    if steps_s is None:
        return found
    union = [digest.union_ns * 1e-9 / digest.steps for digest in (before, after)]
    idle = [step - once for step, once in zip(steps_s, union, strict=True)]
    twice = [once - all_ for once, all_ in zip(union, busy, strict=True)]
    more = [("device idle", idle[0], idle[1]), ("at the same time as other work", twice[0], twice[1])]
    return [*more[: 2 if any(twice) else 1], *found]


def _device_steps(pair: SidePair) -> tuple[float, float] | None:
    """What the step takes, where a device does its work; None on a CPU, whose operators the host runs itself."""
    devices = [side.representative.environment for side in (pair.before, pair.after)]
    return pair.steps_s if all(one is not None and one.device_type != "cpu" for one in devices) else None


def module_buckets(before: "TraceDigest", after: "TraceDigest") -> list[tuple[str, float, float]]:
    """Device work by module, all layers together, in seconds a step; empty where no work has a module."""
    if not before.places or not after.places:
        return []
    rows: dict[str, list[float]] = {}
    for side, digest in enumerate((before, after)):
        for row in digest.places:
            rows.setdefault(row.module, [0.0, 0.0])[side] += row.busy_ns * 1e-9
    ordered = sorted(rows.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    busy = [digest.busy_ns * 1e-9 / digest.steps for digest in (before, after)]
    rest = [busy[side] - sum(values[side] for values in rows.values()) for side in (0, 1)]
    return [*((name, was, now) for name, (was, now) in ordered), ("in no module", rest[0], rest[1])]


def _bucket_table(head: str, buckets: Sequence[tuple[str, float, float]], whole: tuple[float, float] | None) -> Table:
    total = whole or (sum(row[1] for row in buckets), sum(row[2] for row in buckets))
    difference = total[1] - total[0]
    shown, rest = list(buckets[:_ROWS]), buckets[_ROWS:]
    if rest:
        shown.append((f"{len(rest)} more", sum(row[1] for row in rest), sum(row[2] for row in rest)))
    rows: list[tuple[Cell, ...]] = [
        (name, *map(_clean, (was, now, now - was)), _part(now - was, difference)) for name, was, now in shown
    ]
    if not rows:
        return Table(title="", columns=(head,), rows=())
    rows.append(("together", *total, difference, None))
    return table_of(
        head, ("before ms", "ms of s"), ("after ms", "ms of s"), ("change ms", "+ms of s"), ("of the change", "%"),
        rows=rows,
        rules=(len(rows) - 1,),
    )  # fmt: skip


def _clean(seconds: float) -> float:
    """Seconds to the picosecond: what a difference leaves of nothing is nothing."""
    return round(seconds, 12) + 0.0


def _part(change: float, whole: float) -> float | None:
    """The share of the whole change, without the sign of a zero."""
    share = change / whole if whole else None
    return 0.0 if share is not None and abs(share) < 5e-4 else share


def _memory(pair: SidePair, of: str) -> Table:
    before, after = pair.before.representative, pair.after.representative
    rows: list[tuple[Cell, ...]] = []
    for name, field in _MEMORY:
        was, now = (getattr(run.evidence.memory, field, None) for run in (before, after))
        if was is not None and now is not None:
            rows.append((name, was, now, now / was - 1 if was else None))
    return table_of(f"memory{of}", ("before", "B"), ("after", "B"), ("change", "+%"), rows=rows)


def _energy(pair: SidePair, of: str) -> Table:
    """The energy of a step, the mean over the processes; empty where one side has none."""
    before, after = ([found for run in side.measured if (found := joules_per_step(run)) is not None]
                     for side in (pair.before, pair.after))  # fmt: skip
    if not before or not after:
        return Table(title="", columns=(f"energy{of}",), rows=())
    was, now = statistics.fmean(before), statistics.fmean(after)
    row = ("a step, of the whole device", format_joules(was), format_joules(now), now / was - 1 if was else None)
    return table_of(f"energy{of}", ("before", TEXT), ("after", TEXT), ("change", "+%"), rows=[row])


def short_names(found: SideComparison) -> list[str]:
    """The labels of the pairs without what all have in common, each once: a plot cuts a long name, and a title is one
    line."""
    parts = [re.split(r"[:,] ", pair.label) for pair in found.pairs]
    common = set(parts[0]).intersection(*parts[1:]) if len(parts) > 1 else set[str]()
    names = [", ".join(part for part in own if part not in common) or pair.label
             for own, pair in zip(parts, found.pairs, strict=True)]  # fmt: skip
    seen: Counter[str] = Counter()
    for place, name in enumerate(names):
        seen[name] += 1
        names[place] = f"{name} ({seen[name]})" if seen[name] > 1 else name
    return names


def _panel(found: SideComparison) -> tuple[Panel, ...]:
    """A bar for each pair: the change in percent, with its interval."""
    points: list[Point] = []
    for name, change in zip(short_names(found), found.changes, strict=True):
        if change is not None:
            low, high = (
                ((change.interval.low - 1) * 100, (change.interval.high - 1) * 100) if change.interval else (None, None)
            )
            points.append(Point(line="change", name=name, y=change.share * 100, low=low, high=high))
    frame = Frame(guides=(Guide(y=(0.0,)),), note="bars without an interval have fewer than five processes a side")
    return (Panel(x_title="", y_title="change, %", points=tuple(points), kind="bars", frame=frame),) if points else ()


def pictured(answers: Sequence[Answer]) -> Answer:
    """One answer whose picture holds the bars of all these comparisons, each named by its question."""
    if len(answers) == 1:
        return answers[0]
    points = [
        msgspec.structs.replace(point, line=answer.question)
        for answer in answers
        for panel in answer.panels
        for point in panel.points
    ]
    panels = tuple(msgspec.structs.replace(panel, points=tuple(points)) for panel in answers[0].panels[:1])
    return msgspec.structs.replace(answers[0], panels=panels)


def comparison_as_json(found: SideComparison, digests: DigestOf) -> Mapping[str, Any]:
    """Plain data: each pair with its change, buckets in seconds before and after, and the findings."""
    pairs: list[dict[str, Any]] = []
    for pair, change, stands in zip(found.pairs, found.changes, found.stands, strict=True):
        before, after = digests(pair)
        captured = (before, after) if before is not None and after is not None else None
        pairs.append({
            "cell": pair.label, "across": pair.across, "change": msgspec.to_builtins(change), "stands": stands,
            "verdict": verdict(change, stands), "buckets": pair.buckets,
            "work": work_buckets(*captured, _device_steps(pair)) if captured else [],
            "modules": module_buckets(*captured) if captured else [],
            "parts": {
                name: msgspec.to_builtins(pair.change(name))
                for name in dict.fromkeys((*pair.before.parts, *pair.after.parts, STEP))
            },
            "runs": [[run.id for run in side.runs] for side in (pair.before, pair.after)],
        })  # fmt: skip
    return {
        "version": COMPARISON_VERSION, "before": found.before.name, "after": found.after.name, "value": found.value,
        "pairs": pairs, "alone": found.alone, "lost": found.lost,
        "findings": msgspec.to_builtins(tuple(sides_findings(found))),
    }  # fmt: skip
