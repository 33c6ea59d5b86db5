"""A sweep while it runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from stepscope.core.answer import Tone, table_of
from stepscope.core.figures import marked
from stepscope.core.range_names import STEP
from stepscope.core.run import Run
from stepscope.core.units import format_seconds
from stepscope.rendering.terminal import make_table
from stepscope.runs import metrics
from stepscope.runs.answer import status_sentence, status_word


@dataclass(frozen=True, kw_only=True)
class ProgressRow:
    """One cell as it stands."""

    name: str
    state: str
    stage: str
    run: Run | None
    resumed: bool


def render_progress(
    rows: Sequence[ProgressRow], seconds_left: float | None, height: int | None = None
) -> RenderableType:
    """How much is done, and the cells with their states: on a low screen those round the one being measured."""
    ended = sum(1 for row in rows if row.run is not None)
    fit = len(rows) if height is None else max(3, height - 5)  # summary, head, rule, two blank lines
    current = next((i for i, row in enumerate(rows) if row.state == "measuring"), ended)
    first = max(0, min(current - fit // 2, len(rows) - fit))
    shown = rows[first : first + fit]
    cells = [(row.name, _state(row), _step(row.run)) for row in shown]
    table = make_table(table_of("cell", "state", "step", rows=cells, tones=dict(enumerate(map(_tone, shown)))))
    return Group(Text(f"{ended} of {len(rows)} cells{_left(seconds_left)}"), table)


def sentence_of(rows: Sequence[ProgressRow], index: int, seconds_left: float | None) -> str:
    """One line for a cell that has ended."""
    row = rows[index]
    assert row.run is not None
    result = _step(row.run) if row.run.status == "done" else status_sentence(row.run)
    found = " (already measured)" if row.resumed else _left(seconds_left)
    return f"[{index + 1}/{len(rows)}] {row.name}: {result}{found}"


def _state(row: ProgressRow) -> str:
    if row.run is None:
        return row.stage or row.state
    return f"{status_word(row.run)}{', found on disk' if row.resumed else ''}"


def _step(run: Run | None) -> str:
    step_s = metrics.median_s(run, STEP) if run else None
    return marked(f"step {format_seconds(step_s)}", run) if step_s else ""


def _tone(row: ProgressRow) -> Tone:
    if row.run is None:
        return "strong" if row.state == "measuring" else "aside"
    return "" if row.run.status == "done" else "bad"


def _left(seconds: float | None) -> str:
    if not seconds:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f", about {f'{minutes} min ' if minutes else ''}{rest} s left"
