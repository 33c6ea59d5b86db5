"""An experiment of the precision lab for the terminal, and its curves."""

import math
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.core.errors import InputError, printable
from stepscope.core.experiment import Cell, Experiment
from stepscope.core.experiment import Table as Figures
from stepscope.report.layout import name_shown
from stepscope.report.terminal import make_table

if TYPE_CHECKING:
    import altair as alt


def render_experiment(experiment: Experiment) -> RenderableType:
    """The question, every table, and what follows."""
    versions = ", ".join(f"{name} {version}" for name, version in experiment.versions.items())
    settings = ", ".join(f"{name} {_text(value)}" for name, value in experiment.settings.items())
    where = "; ".join(part for part in (experiment.device, versions, settings) if part)
    heading = (Text(printable(experiment.question), style="bold"), Text(printable(where)))
    return Group(*heading, *([Text()] if experiment.tables else []), render_body(experiment))


def render_body(experiment: Experiment) -> RenderableType:
    """Every table, and what follows."""
    parts: list[RenderableType] = []
    for figures in experiment.tables:
        parts += [*([Text()] if parts else []), *_titled(figures)]
    if experiment.findings:
        parts.append(Text())
    return Group(*parts, *_sentences(experiment))


def render_part(experiment: Experiment, only: str) -> RenderableType:
    """The tables whose title contains `only`, or the sentences for `findings`.

    Raises InputError, with the titles, where it names no table.
    """
    if only.casefold() == "findings":
        return Group(*_sentences(experiment))
    chosen = [figures for figures in experiment.tables if only and only.casefold() in figures.title.casefold()]
    if not chosen:
        titles = ", ".join(repr(figures.title) for figures in experiment.tables)
        raise InputError(f"--only {only!r} names no table: there are {titles}, and findings")
    parts: list[RenderableType] = []
    for figures in chosen:
        parts += [*([Text()] if parts else []), *_titled(figures)]
    return Group(*parts)


def _titled(figures: Figures) -> tuple[RenderableType, RenderableType]:
    return Text(printable(figures.title), style="bold"), _table(figures)


def _sentences(experiment: Experiment) -> list[Text]:
    return [Text(printable(finding.sentence)) for finding in experiment.findings]


def _table(figures: Figures) -> Table:
    numbers = [all(_is_number(row[i]) for row in figures.rows) for i in range(len(figures.columns))]
    table = make_table(*figures.columns)
    for column, right in zip(table.columns, numbers, strict=True):
        column.justify = "right" if right else "left"
    for row in figures.rows:
        table.add_row(*(_text(cell) for cell in row))
    return table


def _is_number(cell: Cell) -> bool:
    """Or nothing at all, which says nothing against a column of numbers."""
    return cell is None or (isinstance(cell, (int, float)) and not isinstance(cell, bool))


def _text(cell: Cell) -> str:
    """A figure as exact as it is: floats by the shortest text that reads back the same, cut to eight digits."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        return repr(cell) if math.isfinite(cell) and len(repr(cell)) <= 9 else f"{cell:.8g}"
    return name_shown(cell)


def draw_experiment(experiment: Experiment) -> "alt.TopLevelMixin":
    """Its curves, a panel each; panels over one axis stand side by side and share their colours.

    Raises InputError where there are none.
    """
    import altair as alt  # noqa: PLC0415

    from stepscope.report.plots.series import HOLLOW, SeriesPanel, SeriesPoint, draw_series  # noqa: PLC0415

    if not experiment.panels:
        raise InputError(f"study {experiment.study} has no curves: leave out --save")
    over: dict[tuple[str, bool | None, bool | None], list[SeriesPanel]] = {}
    for panel in experiment.panels:
        points = tuple(
            SeriesPoint(x=p.x, y=p.y, line=p.line, doubted=p.doubted) for p in panel.points if math.isfinite(p.y)
        )
        over.setdefault((panel.x_title, panel.x_log, panel.y_log), []).append(
            SeriesPanel(y_title=panel.y_title, points=points)
        )
    # Where nothing was finite there is no row to draw, unless nothing was finite anywhere.
    drawn = {axes: panels for axes, panels in over.items() if any(panel.points for panel in panels)} or over
    rows = [
        draw_series(
            panels,
            x_title=x_title,
            title="" if i else experiment.question,
            x_log=x_log,
            y_log=y_log,
            subtitle=HOLLOW if any(point.doubted for panel in panels for point in panel.points) else "",
        )
        for i, ((x_title, x_log, y_log), panels) in enumerate(drawn.items())
    ]
    if len(rows) == 1:
        return rows[0]
    return alt.vconcat(*rows).resolve_scale(color="independent", fill="independent")
