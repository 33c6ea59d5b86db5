"""The panels of an answer as one picture."""

from typing import TYPE_CHECKING

from stepscope.core.answer import Answer, Panel
from stepscope.core.errors import InputError
from stepscope.report.cells import where_of

if TYPE_CHECKING:
    import altair as alt


def draw_answer(answer: Answer, *, interactive: bool = False) -> "alt.TopLevelMixin":
    """Its panels, one below the other; curves over one axis stand side by side and share their colours.

    The picture says what was asked, on which device, when, and with which versions. interactive: areas answer to the
    pointer. Raises InputError where the answer has no panels.
    """
    import altair as alt  # noqa: PLC0415

    from stepscope.report.plots.areas import draw_areas  # noqa: PLC0415
    from stepscope.report.plots.bars import draw_bars  # noqa: PLC0415
    from stepscope.report.plots.scatter import draw_points  # noqa: PLC0415
    from stepscope.report.plots.series import HOLLOW, draw_series  # noqa: PLC0415

    if not answer.panels:
        raise InputError(f"{answer.study} has no curves: leave out --save")
    doubted = any(point.doubted for panel in answer.panels for point in panel.points)
    notes = dict.fromkeys(panel.frame.note for panel in answer.panels)
    subtitle = "; ".join(part for part in (where_of(answer), *notes, HOLLOW if doubted else "") if part)
    over: dict[tuple[object, ...], list[Panel]] = {}
    for i, panel in enumerate(answer.panels):
        over.setdefault(_row_of(panel, i), []).append(panel)
    # Where nothing was measured there is no row to draw, unless nothing was measured anywhere.
    drawn = [panels for panels in over.values() if any(panel.points for panel in panels)] or list(over.values())
    rows: list[alt.ConcatChart | alt.VConcatChart | alt.LayerChart | alt.FacetChart] = []
    for panels in drawn:
        first = panels[0]
        title, said = ("", "") if rows else (first.frame.heading or answer.question, subtitle)
        match first.kind:
            case "curves":
                rows.append(draw_series(panels, title=title, subtitle=said))
            case "points":
                rows.append(draw_points(panels, title=title, subtitle=said))
            case "areas":
                rows.append(draw_areas(first, title=title, subtitle=said, interactive=interactive))
            case _:
                rows.append(draw_bars(first, title=title, subtitle=said))
    if len(rows) == 1:
        return rows[0]
    return alt.vconcat(*rows).resolve_scale(color="independent", fill="independent")


def _row_of(panel: Panel, place: int) -> tuple[object, ...]:
    """Panels of one key share a row: curves over the same axes, points over the same x. Bars and areas stand alone."""
    match panel.kind:
        case "curves":
            return panel.kind, panel.x_title, panel.x_log, panel.y_log
        case "points":
            return panel.kind, panel.x_title, panel.x_log
        case _:
            return panel.kind, place
