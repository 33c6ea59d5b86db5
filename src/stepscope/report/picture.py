"""The panels of an answer as one picture."""

import math
from typing import TYPE_CHECKING

from stepscope.core.answer import Answer
from stepscope.core.errors import InputError

if TYPE_CHECKING:
    import altair as alt


def draw_answer(answer: Answer) -> "alt.TopLevelMixin":
    """Its curves, a panel each; panels over one axis stand side by side and share their colours.

    Raises InputError where there are none.
    """
    import altair as alt  # noqa: PLC0415

    from stepscope.report.plots.series import HOLLOW, SeriesPanel, SeriesPoint, draw_series  # noqa: PLC0415

    if not answer.panels:
        raise InputError(f"{answer.study} has no curves: leave out --save")
    over: dict[tuple[str, bool | None, bool | None], list[SeriesPanel]] = {}
    for panel in answer.panels:
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
            title="" if i else answer.question,
            x_log=x_log,
            y_log=y_log,
            subtitle=HOLLOW if any(point.doubted for panel in panels for point in panel.points) else "",
        )
        for i, ((x_title, x_log, y_log), panels) in enumerate(drawn.items())
    ]
    if len(rows) == 1:
        return rows[0]
    return alt.vconcat(*rows).resolve_scale(color="independent", fill="independent")
