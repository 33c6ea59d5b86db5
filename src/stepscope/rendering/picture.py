"""The panels of an answer as one picture, and those of a page as a file each."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepscope.core.answer import Answer, Page, Panel
from stepscope.core.errors import InputError
from stepscope.rendering.cells import where_of

if TYPE_CHECKING:
    import altair as alt


def draw_svg(answer: Answer) -> str:
    """Its panels as SVG; empty where they cannot be drawn, since too much would have to be told apart."""
    from stepscope.rendering.plots.save import plot_spec, plot_svg  # noqa: PLC0415

    try:
        return plot_svg(plot_spec(draw_answer(answer)))
    except InputError:
        return ""


def draw_answer(answer: Answer, *, interactive: bool = False) -> "alt.TopLevelMixin":
    """Its panels, one below the other; curves over one axis stand side by side and share their colours.

    The picture says what was asked, on which device, when, and with which versions. interactive: areas answer to the
    pointer. Raises InputError where the answer has no panels.
    """
    import altair as alt  # noqa: PLC0415

    from stepscope.rendering.plots.areas import draw_areas  # noqa: PLC0415
    from stepscope.rendering.plots.charts import (  # noqa: PLC0415  # noqa: PLC0415
        HOLLOW,
        draw_bars,
        draw_heat,
        draw_icicle,
        draw_points,
        draw_series,
        draw_timeline,
    )

    if not answer.panels:
        raise InputError(f"{answer.study} has no curves: leave out --save")
    doubted = any(point.doubted for panel in answer.panels for point in panel.points)
    notes = dict.fromkeys(panel.frame.note for panel in answer.panels)
    subtitle = "; ".join(part for part in (where_of(answer), *notes, HOLLOW if doubted else "") if part)
    over: dict[tuple[object, ...], list[Panel]] = {}
    for i, panel in enumerate(answer.panels):
        over.setdefault(_row_of(panel, i), []).append(panel)
    # Where nothing was measured there is no row to draw, unless nothing was measured anywhere.
    drawn = [panels for panels in over.values() if any(map(_has_figures, panels))] or list(over.values())
    rows: list[alt.Chart | alt.ConcatChart | alt.VConcatChart | alt.LayerChart | alt.FacetChart] = []
    for panels in drawn:
        first = panels[0]
        title, said = ("", "") if rows else (first.frame.heading or answer.question, subtitle)
        match first.kind:
            case "curves":
                rows.append(draw_series(panels, title=title, subtitle=said))
            case "points":
                rows.append(draw_points(panels, title=title, subtitle=said))
            case "icicle":
                rows.append(draw_icicle(first, title=title, subtitle=said))
            case "timeline":
                rows.append(draw_timeline(first, title=title, subtitle=said))
            case "heat":
                rows.append(draw_heat(first, title=title, subtitle=said))
            case "areas":
                rows.append(draw_areas(first, title=title, subtitle=said, interactive=interactive))
            case _:
                rows.append(draw_bars(first, title=title, subtitle=said))
    if len(rows) == 1:
        return rows[0]
    return alt.vconcat(*rows).resolve_scale(color="independent", fill="independent")


def draw_panels(page: Page, folder: Path, suffix: str) -> int:
    """Write each plot of a page into a file of its own, named by its section; their number. One that cannot be drawn,
    since it holds more than can be told apart, is left out."""
    from stepscope.rendering.plots.save import save_plot  # noqa: PLC0415

    written = 0
    for section in page.sections:
        for panel in section.answer.panels:
            answer = msgspec.structs.replace(section.answer, question=section.title, panels=(panel,))
            name = re.sub("[^a-z0-9]+", "-", (panel.frame.heading or section.title).casefold()).strip("-")
            try:
                chart = draw_answer(answer)
            except InputError:
                continue
            written += 1
            save_plot(chart, folder / f"{written:02}-{name or panel.kind}.{suffix}")
    return written


def _has_figures(panel: Panel) -> bool:
    return bool(panel.points or panel.nodes or panel.slices)


def _row_of(panel: Panel, place: int) -> tuple[object, ...]:
    """Panels of one key share a row: curves over the same axes, points over the same x. Bars and areas stand alone."""
    match panel.kind:
        case "curves":
            return panel.kind, panel.x_title, panel.x_log, panel.y_log
        case "points":
            return panel.kind, panel.x_title, panel.x_log
        case _:
            return panel.kind, place
