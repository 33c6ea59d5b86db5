"""The page of a folder of all runs: a row each, each workload's history, and what a browser needs to compare them."""

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from stepscope.core.answer import Answer, table_of
from stepscope.core.errors import InputError, printable
from stepscope.core.figures import doubting_kinds
from stepscope.core.formulas.spelled import cell_name
from stepscope.core.range_names import STEP
from stepscope.core.run import Run
from stepscope.core.units import GIB, counted
from stepscope.rendering.pages import Figure, Page, RunIndex, Section
from stepscope.runs import metrics
from stepscope.runs.answer import status_word
from stepscope.runs.fields import FIELDS, IDENTIFYING
from stepscope.runs.history import Trend, trends_of
from stepscope.runs.index import Listing, list_runs

_DIGITS = 5
"""Figures keep so many significant digits: the page shows four, and sorts by all."""


def is_index(names: Sequence[str], runs: Path) -> bool:
    """Whether these names mean the folder of all runs itself."""
    if len(names) != 1:
        return False
    place = Path(names[0])
    return place.samefile(runs) if place.is_dir() and runs.is_dir() else place == runs and not place.exists()


def page_of_index(place: Path) -> Page:
    """The index of the runs in this folder. Raises InputError where there is none that can be read."""
    listing = list_runs([place])
    runs = listing.runs
    if not runs:
        faults = f": {listing.faults[0]}" if listing.faults else ": `stepscope run` leaves one"
        raise InputError(f"no runs at {place}{faults}")
    trends = trends_of(runs)
    devices = Counter(run.environment.limited_device if run.environment else "not known" for run in runs)
    changed = [trend for trend in trends if trend.changes]
    measured = sum(bool(metrics.median_s(run, STEP)) for run in runs)
    days = f"from {runs[0].day} to {runs[-1].day}" if runs[0].day != runs[-1].day else f"on {runs[0].day}"
    on = " and ".join(list(devices)[:3]) + (f" and {len(devices) - 3} others" if len(devices) > 3 else "")
    moved = f" The step of {counted(len(changed), 'workload')} changed its level." if changed else ""
    largest = max((change.share for trend in changed for change in trend.changes), key=abs, default=None)
    return Page(
        title=f"{counted(len(runs), 'run')} in {place}",
        kind="index",
        sentence=f"{counted(len(trends), 'workload')} on {on}, {days}.{moved}",
        figures=(
            Figure(name="measured", value=f"{measured:,} of {len(runs):,}"),
            Figure(name="workloads", value=f"{len(trends):,}", note=counted(len(devices), "device")),
            Figure(name="newest", value=runs[-1].day, note=cell_name(runs[-1].workload, runs[-1].settings)),
            Figure(
                name="largest change of level",
                value=f"{largest * 100:+.1f} %" if largest is not None else "none",
                note="in a workload's history" if changed else "in any workload's history",
            ),
        ),
        index=_rows(runs, trends, place),
        sections=tuple(_sections(listing)),
        shown_by=(
            f"stepscope ls {shlex.quote(str(place))}",
            f"stepscope history {shlex.quote(str(place))}",
        ),
    )


def _rows(runs: list[Run], trends: list[Trend], place_of_all: Path) -> RunIndex:
    """Every run as columns of figures, newest first; what recurs stands once."""
    columns: dict[str, list[float | int | str | None]] = {name: [] for name in RunIndex.columns_of_figures}
    cells: dict[tuple[int, ...], int] = {}
    runs_shown: list[Run] = []
    places = {
        run.id: (number, place)
        for number, trend in enumerate(trends)
        for place, moment in enumerate(trend.moments)
        for run in moment.runs.runs
    }
    for run in reversed(runs):
        # The index of runs holds each workload and environment once, so that the same object is the same cell.
        key = (id(run.workload), id(run.settings), id(run.environment))
        if key not in cells:
            cells[key] = len(runs_shown)
            runs_shown.append(run)
        samples = run.samples.get(STEP)
        within = samples.interval() if samples is not None and samples.count else None
        number, place = places.get(run.id, (None, None))
        peak = metrics.peak_bytes(run)
        utilisation = metrics.mfu_datasheet(run) or metrics.mfu_measured(run)
        row = {
            "id": printable(run.id),
            "cell": cells[key],
            "created": run.created[:16].replace("T", " "),
            "instant": run.instant,
            "status": status_word(run),
            "step": _short(metrics.median_s(run, STEP), 1e3),
            "low": _short(within.low if within else None, 1e3),
            "high": _short(within.high if within else None, 1e3),
            "tokens": _short(metrics.tokens_per_s(run)),
            "samples": _short(metrics.samples_per_s(run)),
            "mfu": _short(utilisation, 100),
            "peak": _short(peak, 1 / GIB),
            "doubts": printable(", ".join(doubting_kinds(run))),
            "tag": printable(run.tag or ""),
            "trend": number,
            "place": place,
        }
        for name, value in row.items():
            columns[name].append(value)
    fields = {name: [FIELDS[name].read(run) for run in runs_shown] for name in IDENTIFYING if name != "tag"}
    commits = [(run.environment.code[0] or "")[:10] if run.environment else "" for run in runs_shown]
    varying = {name: values for name, values in {**fields, "commit": commits}.items() if len(set(values)) > 1}
    return RunIndex(
        place=shlex.quote(str(place_of_all)),
        figures=columns,
        names=[printable(cell_name(run.workload, run.settings)) for run in runs_shown],
        devices=[printable(run.environment.limited_device) if run.environment else "" for run in runs_shown],
        fields=varying,
        histories=[[_short(moment.step_s, 1e3) or 0.0 for moment in trend.moments] for trend in trends],
        changes=[[change.place for change in trend.changes] for trend in trends],
        since=[_short(_since(trend), 100) for trend in trends],
    )


def _since(trend: Trend) -> float | None:
    return trend.changes[-1].after_s / trend.changes[0].before_s - 1 if trend.changes else None


def _short(value: float | None, scale: float = 1.0) -> float | None:
    return float(f"{value * scale:.{_DIGITS}g}") if value is not None and math.isfinite(value) else None


def _sections(listing: Listing) -> list[Section]:
    machines = Counter(run.environment.described if run.environment else "not known" for run in listing.runs)
    tables = [("Devices and versions", table_of("device and versions", ("runs", ","), rows=machines.most_common()))]
    if listing.faults:
        rows = [(fault,) for fault in listing.faults]
        tables.append(("Runs that cannot be read", table_of("which, and why", rows=rows)))
    sections = [
        Section(title=title, answer=Answer(study="ls", question="", tables=(table,))) for title, table in tables
    ]
    asides = (
        "Left out here: single steps, traces, memory by phase, findings' sentences. `stepscope report RUN` shows them.",
        "A history is a workload's median steps on one device, oldest first; a set of repeated runs is one point.",
        *listing.notes,
    )
    return [*sections, Section(title="Notes", answer=Answer(study="ls", question="", tables=(), asides=asides))]
