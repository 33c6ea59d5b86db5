"""A step that was measured in several processes, as an answer: its typical time, and how far processes differ."""

import statistics
from collections.abc import Mapping
from typing import Any

import msgspec

from stepscope.core.answer import TEXT, Answer, Cell, Line, Panel, Point, Table, as_lines, table_of
from stepscope.core.doubts import figure
from stepscope.core.processes import FEWEST_PROCESSES
from stepscope.core.range_names import STEP
from stepscope.core.samples import CONFIDENCE
from stepscope.core.units import counted, format_joules, format_milliseconds, format_share
from stepscope.core.work.described import cell_name
from stepscope.runs.answer import heading
from stepscope.runs.metrics import joules_per_step, median_s
from stepscope.runs.run_sets import RunSet
from stepscope.runs.words import doubts, status_sentence, status_word


def answer_set(found: RunSet, folder: str | None = None) -> Answer:
    """The step by its parts over all processes, and the processes themselves."""
    shown = found.representative
    lost = [Line(f"{run.id}: {status_sentence(run)}", "bad") for run in found.runs if run.status != "done"]
    tables = (_parts_table(found, lost), _process_table(found)) if found.measured else (_process_table(found),)
    return Answer(
        study="run",
        question=f"What does a step of {cell_name(shown.workload)} take?",
        device=shown.environment.device_name if shown.environment else "",
        versions=shown.environment.versions if shown.environment else {},
        lead=heading(shown),
        date=shown.day,
        tables=tables,
        panels=_panel(found),
        findings=tuple(
            msgspec.structs.replace(finding, sentence=_in_how_many(finding.sentence, count, found))
            for finding, count in found.findings
        ),
        checked=bool(found.measured),
        origin=(f"Set {found.name}", *([f"Runs in {folder}"] if folder else [])),
    )


def _in_how_many(sentence: str, count: int, found: RunSet) -> str:
    return sentence if count == len(found.runs) else f"{sentence} (In {count} of {len(found.runs)} processes.)"


def _parts_table(found: RunSet, lost: list[Line]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    whole = found.processes(STEP).typical_s
    for name in (*found.parts, STEP):
        part = found.processes(name)
        if part.typical_s is None:
            continue
        interval = part.interval()
        rows.append((
            name, part.typical_s,
            f"{format_milliseconds(interval.low)} to {format_milliseconds(interval.high)} ms" if interval else "",
            part.deviation, min(part.medians_s), max(part.medians_s), part.typical_s / whole if whole else None,
        ))  # fmt: skip
    return table_of(
        "phase", ("typical", "s"), (f"{CONFIDENCE * 100:.0f} % interval", TEXT), ("between processes ±", "%"),
        ("fastest", "s"), ("slowest", "s"), ("share", "%"), rows=rows, tones={len(rows) - 1: "strong"},
        notes=(*lost, *as_lines(*_about(found))),
    )  # fmt: skip


def _about(found: RunSet) -> list[str]:
    """How many processes there are, and what their intervals say."""
    count, step = len(found.measured), found.processes(STEP)
    steps = [run.samples[STEP].count for run in found.measured]
    each = f"{steps[0]}" if min(steps) == max(steps) else f"{min(steps)} to {max(steps)}"
    missing = f" of {found.asked} asked for" if count < found.asked else ""
    lines = [f"{counted(count, 'process')}{missing}, each started afresh and measured over {each} steps."]
    lines += _energy(found)
    if step.interval() is None:
        lines.append(
            f"No interval: {counted(count, 'process')} {'does' if count == 1 else 'do'} not tell how much processes "
            f"differ. Repeat at least {FEWEST_PROCESSES} times: --repeat {FEWEST_PROCESSES}."
        )
        return lines
    within = [interval.half_width / (run.samples[STEP].median_s or 1.0)
              for run in found.measured if (interval := run.samples[STEP].interval())]  # fmt: skip
    beside = f"; the steps of one process tell its median to ± {format_share(max(within))}" if within else ""
    lines.append(
        f"The typical time is the geometric mean of the processes' medians, and its interval carries what differs "
        f"between processes: ± {format_share(step.deviation or 0.0)} in the step{beside}."
    )
    return lines


def _energy(found: RunSet) -> list[str]:
    """What a step costs, the mean over the processes whose energy was read."""
    joules = [one for run in found.measured if (one := joules_per_step(run)) is not None]
    if not joules:
        return []
    spread = f" ({format_joules(min(joules))} to {format_joules(max(joules))})" if len(joules) > 1 else ""
    return [f"{format_joules(statistics.fmean(joules))} a step, the mean of {counted(len(joules), 'process')}{spread}."]


def _process_table(found: RunSet) -> Table:
    rows: list[tuple[Cell, ...]] = []
    typical = found.processes(STEP).typical_s
    for run in found.runs:
        median = median_s(run, STEP) if run in found.measured else None
        rows.append((
            run.repeat.number if run.repeat else 1, run.id.partition("-")[0], status_word(run), figure(median, run),
            median / typical - 1 if median and typical else None, doubts(run),
        ))  # fmt: skip
    return table_of(
        "process", "run", "status", ("step", "s"), ("from typical", "+%"), "findings", rows=rows, title="processes",
        tones={i: "bad" for i, run in enumerate(found.runs) if run.status != "done"},
    )  # fmt: skip


def _panel(found: RunSet) -> tuple[Panel, ...]:
    """A bar for each part, with the interval over the processes."""
    points: list[Point] = []
    for name in (*found.parts, STEP):
        part = found.processes(name)
        if part.typical_s is not None:
            interval = part.interval()
            low, high = (interval.low * 1e3, interval.high * 1e3) if interval else (None, None)
            points.append(Point(line="typical", name=name, y=part.typical_s * 1e3, low=low, high=high))
    return (Panel(x_title="", y_title="typical, ms", points=tuple(points), kind="bars"),) if points else ()


def set_as_json(found: RunSet) -> Mapping[str, Any]:
    """Plain data: the statistics over the processes in seconds, and the runs as they are stored."""
    parts: dict[str, Any] = {}
    for name in (*found.parts, STEP):
        part = found.processes(name)
        interval = part.interval()
        parts[name] = {
            "typical_s": part.typical_s, "low_s": interval.low if interval else None,
            "high_s": interval.high if interval else None, "deviation": part.deviation, "medians_s": part.medians_s,
        }  # fmt: skip
    return {"set": found.name, "asked": found.asked, "measured": len(found.measured), "parts": parts,
            "joules_per_step": [joules_per_step(run) for run in found.measured], "runs": found.runs}  # fmt: skip
