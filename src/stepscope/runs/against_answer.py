"""Two steps beside one another, as an answer: how many times as long the second takes, by the parts of the step."""

from collections.abc import Mapping
from typing import Any

import msgspec

from stepscope.core.answer import TEXT, Answer, Cell, Line, as_lines, table_of
from stepscope.core.formulas.spelled import cell_name
from stepscope.core.processes import FEWEST_PROCESSES, SEEN_IN, Change
from stepscope.core.range_names import STEP
from stepscope.core.samples import CONFIDENCE, Interval
from stepscope.core.units import counted, format_share
from stepscope.runs.answer import heading
from stepscope.runs.run_sets import RunSet, change_of, paired_ratios


def answer_against(before: RunSet, after: RunSet, folder: str | None = None) -> Answer:
    """The second step against the first: the verdict, and the ratio of each part with its interval."""
    first, second = before.representative, after.representative
    rows: list[tuple[Cell, ...]] = []
    for part in (*dict.fromkeys((*before.parts, *after.parts)), STEP):
        change = change_of(before, after, part)
        rows.append((
            part, before.processes(part).typical_s, after.processes(part).typical_s,
            change.ratio if change else None, interval_text(change.interval) if change else "",
        ))  # fmt: skip
    change = change_of(before, after)
    table = table_of(
        "phase", ("first", "s"), ("second", "s"), ("second over first", "{:.3f} x"),
        (f"{CONFIDENCE * 100:.0f} % interval", TEXT), rows=rows, tones={len(rows) - 1: "strong"},
        notes=as_lines(*_about(before, after, change)),
    )  # fmt: skip
    findings = [finding for side in (before, after) for finding, _ in side.findings if finding.severity != "note"]
    return Answer(
        study="run",
        question=f"How does {cell_name(second.workload)} compare with {cell_name(first.workload)}?",
        device=first.environment.device_name if first.environment else "",
        versions=first.environment.versions if first.environment else {},
        lead=(
            *(Line(f"First: {line.text}", line.tone) for line in heading(first)[:2]),
            *(Line(f"Second: {line.text}", line.tone) for line in heading(second)[:2]),
            *heading(first)[2:], Line(verdict(change), "strong"),
        ),
        date=first.day,
        tables=(table,),
        findings=tuple({finding.kind: finding for finding in findings}.values()),
        checked=bool(before.measured and after.measured),
        origin=(f"Sets {before.name} and {after.name}", *([f"Runs in {folder}"] if folder else [])),
    )  # fmt: skip


def verdict(change: Change | None) -> str:
    """Whether the second step is slower or faster, by how much, and how sure that is."""
    if change is None:
        return "One of the two was not measured: there is nothing to compare."
    if change.interval is None:
        return (
            f"The second takes {change.ratio:.3f} times as long in {counted(change.processes[0], 'process')}: no "
            f"verdict, since processes differ; --repeat {FEWEST_PROCESSES} or more tells by how much."
        )
    low, high = change.interval.low - 1, change.interval.high - 1
    if change.decided:
        word = "slower" if change.share > 0 else "faster"
        within = f"interval {low * 100:+.1f} to {high * 100:+.1f} %"
        return f"The second is {format_share(abs(change.share))} {word} ({within})."
    seen = f", and one above {format_share(change.detectable)} would have been" if change.detectable else ""
    often = f" (in {SEEN_IN * 10:.0f} of 10 such comparisons)" if seen else ""
    return f"No difference seen{seen}{often}."


def interval_text(interval: Interval | None) -> str:
    """An interval of a ratio in words; empty for none."""
    return f"{interval.low:.3f} to {interval.high:.3f}" if interval else ""


def _about(before: RunSet, after: RunSet, change: Change | None) -> list[str]:
    if change is None:
        return []
    count = counted(change.processes[1], "process")
    if not change.paired:
        return [
            f"{counted(change.processes[0], 'process')} against {count}, by turns: settings that hold for a whole "
            "process differ, so each step had processes of its own."
        ]
    lines = [f"{count}, in each of which the two steps took turns; the ratio is that of neighbouring steps."]
    if change.interval is None:
        pairs = ((b, a) for b in before.measured for a in after.measured if a.beside == b.id)
        within = [found.interval() for b, a in pairs if (found := paired_ratios(b, a, STEP)) is not None]
        lines += [f"Within the process: {interval_text(one)}." for one in within[:1] if one is not None]
    return lines


def against_as_json(before: RunSet, after: RunSet) -> Mapping[str, Any]:
    """Plain data: the change of each part, and the runs of both sides as they are stored."""
    parts = (*dict.fromkeys((*before.parts, *after.parts)), STEP)
    changes = {part: change_of(before, after, part) for part in parts}
    return {
        "sets": [before.name, after.name],
        "changes": {part: msgspec.to_builtins(change) for part, change in changes.items()},
        "runs": [before.runs, after.runs],
    }
