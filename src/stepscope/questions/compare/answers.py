"""What the answers of all comparisons have: cells without a result, figures over sizes of models, words for nothing."""

from collections.abc import Iterable
from typing import Any

from stepscope.core.answer import Cell, Panel, Point, Table
from stepscope.core.doubts import doubt_mark
from stepscope.core.figures import digits
from stepscope.questions.compare.comparison import ComparedRun, Comparison
from stepscope.runs.answer import bar
from stepscope.runs.words import status_word


def missing_cells(
    title: str, field: str, unmeasured: Iterable[ComparedRun], more: Iterable[tuple[Cell, ...]] = ()
) -> Table:
    """A row for each cell without a result, and why; and `more` rows."""
    rows = [(cell.name, cell.value, cell.why_missing) for cell in unmeasured]
    return Table(title=title, columns=("cell", field, "why"), rows=(*rows, *more))


def nothing_to_compare(study: Comparison[Any, Any], *, verb: str, asked: str, sides: str) -> str:
    """Why there is no pair. `asked`: what a run must be or have; `sides`: what a cell must be measured in."""
    if study.unmeasured:
        cell = study.unmeasured[0]
        return f"nothing to compare: {cell.label} {cell.why_missing}"
    if not study.cells:
        return f"no run here (of those asked for) {asked}: measure with `stepscope study {verb}`"
    there = ", ".join(dict.fromkeys(cell.value for cell in study.cells))
    return (
        f"nothing to compare: no cell here was measured both {sides} (there is {there}); "
        "give the folder of the others too, by a second --from"
    )


def bars_of(study: Comparison[Any, Any], part: str) -> tuple[Panel, ...]:
    """The medians of a part of the step, a bar for each value of the field beside the others of its cell; a cell
    without a result is marked with what became of it."""
    measured = [bar(c.value, c.name, c.samples(part), doubted=bool(doubt_mark(c.run))) for c in study.cells]
    lost = [bar(cell.value, cell.name, None, missing=status_word(cell.run)) for cell in study.unmeasured]
    panel = Panel(x_title="", y_title=f"{part}, ms", points=(*measured, *lost), kind="bars")
    return (panel,) if measured else ()


def over_sizes(
    y_title: str, figures: Iterable[tuple[ComparedRun, float, bool]], *, several_shapes: bool, y_log: bool = False
) -> tuple[Panel, ...]:
    """A panel of figures over the models' sizes, a line for each value of the field; none without figures.

    figures: (run, figure, whether a finding doubts it). With several shapes each is a line of its own.
    """
    points = tuple(
        Point(
            line=f"{cell.value}, {cell.shape}" if several_shapes else cell.value,
            x=digits(cell.parameters / 1e6) or 0.0,
            y=y,
            doubted=doubted,
        )
        for cell, y, doubted in figures
    )
    panel = Panel(x_title="million parameters", y_title=y_title, points=points, x_log=True, y_log=y_log)
    return (panel,) if points else ()
