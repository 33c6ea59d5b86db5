"""The panels of an answer as one picture."""

from typing import TYPE_CHECKING

from stepscope.core.answer import Answer, Panel
from stepscope.core.errors import InputError
from stepscope.report.cells import where_of

if TYPE_CHECKING:
    import altair as alt


def draw_answer(answer: Answer) -> "alt.TopLevelMixin":
    """Its panels, one below the other; curves over one axis stand side by side and share their colours.

    The picture says what was asked, on which device, when, and with which versions. Raises InputError where the answer
    has no panels.
    """
    import altair as alt  # noqa: PLC0415

    from stepscope.report.plots.bars import draw_bars  # noqa: PLC0415
    from stepscope.report.plots.series import HOLLOW, draw_series  # noqa: PLC0415

    if not answer.panels:
        raise InputError(f"{answer.study} has no curves: leave out --save")
    doubted = any(point.doubted for panel in answer.panels for point in panel.points)
    subtitle = "; ".join(part for part in (where_of(answer), HOLLOW if doubted else "") if part)
    over: dict[tuple[str, str, bool | None, bool | None], list[Panel]] = {}
    for i, panel in enumerate(answer.panels):
        # Bars stand alone, each panel under a key of its own.
        key = panel.x_title if panel.kind == "curves" else f"{i} {panel.x_title}"
        over.setdefault((panel.kind, key, panel.x_log, panel.y_log), []).append(panel)
    # Where nothing was measured there is no row to draw, unless nothing was measured anywhere.
    drawn = {axes: panels for axes, panels in over.items() if any(panel.points for panel in panels)} or over
    rows: list[alt.ConcatChart | alt.LayerChart | alt.FacetChart] = []
    for (kind, x_title, x_log, y_log), panels in drawn.items():
        title, said = ("", "") if rows else (answer.question, subtitle)
        if kind == "curves":
            rows.append(draw_series(panels, x_title=x_title, x_log=x_log, y_log=y_log, title=title, subtitle=said))
        else:
            rows += [draw_bars(panel, title=title, subtitle=said) for panel in panels]
    if len(rows) == 1:
        return rows[0]
    return alt.vconcat(*rows).resolve_scale(color="independent", fill="independent")
