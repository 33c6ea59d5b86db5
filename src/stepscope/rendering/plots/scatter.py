"""Points that no line joins, held against lines and ribbons; one panel below the other, over one axis."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from stepscope.core.answer import Guide, Panel, Point
from stepscope.core.errors import InputError, printable
from stepscope.rendering.plots.axes import NUMBER, log_axis
from stepscope.rendering.plots.theme import FAINT, INK, PALETTE, SHAPES, told_apart

WIDTH, HEIGHT, LOWER_HEIGHT = 620, 460, 190
"""The first panel is nearly square, so that a diagonal is one; the others are low."""


def draw_points(panels: Sequence[Panel], *, title: str = "", subtitle: str = "") -> alt.VConcatChart:
    """The panels' points: colour by line, shape by style, hollow where a point stands apart.

    Raises InputError where there is nothing to draw, or more colours or shapes than can be told apart.
    """
    points = [point for panel in panels for point in panel.points]
    if not points:
        raise InputError("there is nothing to plot: no figure in any cell")
    lines, styles = told_apart(
        (point.line for point in points), (point.style for point in points), "give a folder of fewer runs"
    )
    frame = panels[0].frame
    marks = _marks(lines, styles, frame.line_title, frame.style_title, hollow=any(map(_is_hollow, points)))
    charts = []
    for i, panel in enumerate(panels):
        x = alt.X("x:Q", title=panel.x_title, **_axis([p.x for p in panel.points], panel.frame.x_ends, panel.x_log))
        y = alt.Y("y:Q", title=panel.y_title, **_axis([p.y for p in panel.points], panel.frame.y_ends, panel.y_log))
        layers = [layer for guide in panel.frame.guides for layer in _guide(guide, x, y)]
        chart = alt.layer(*layers, _points(panel, marks).encode(x=x, y=y))
        charts.append(chart.properties(width=WIDTH, height=LOWER_HEIGHT if i else HEIGHT))
    heading = alt.TitleParams(printable(title), subtitle=printable(subtitle))
    return alt.vconcat(*charts, spacing=26).properties(title=heading)


def _is_hollow(point: Point) -> bool:
    return point.apart or point.doubted


def _axis(values: Sequence[float], ends: tuple[float, float] | None, log: bool | None) -> dict[str, Any]:
    """The scale and the axis of x or y."""
    if log:
        low, high = ends or (min(values) / 1.25, max(values) * 1.25)
        if low <= 0:
            raise InputError("a value of zero or less: no logarithmic axis can show it")
        return {"scale": alt.Scale(type="log", domain=[low, high], nice=False), "axis": log_axis(low, high)}
    domain: dict[str, Any] = {"domain": list(ends), "nice": False} if ends else {}
    return {"scale": alt.Scale(**domain), "axis": alt.Axis(format=NUMBER)}


def _marks(lines: list[str], styles: list[str], line_title: str, style_title: str, *, hollow: bool) -> dict[str, Any]:
    """How a point looks: colour by line, shape by style, filled where it counts."""
    line_scale = alt.Scale(domain=lines, range=list(PALETTE[: len(lines)]))
    style_scale = alt.Scale(domain=styles, range=list(SHAPES[: len(styles)]))
    by_shape = alt.Legend(title=style_title or None) if len(styles) > 1 else None
    filled = alt.condition("datum.hollow", alt.value(0.0), alt.value(0.75))
    return {
        "color": alt.Color(
            "line:N", scale=line_scale, legend=alt.Legend(title=line_title or None, symbolType="circle")
        ),
        "fill": alt.Fill("line:N", scale=line_scale, legend=None),
        "shape": alt.Shape("style:N", scale=style_scale, legend=by_shape),
        **({"fillOpacity": filled} if hollow else {}),
    }


def _points(panel: Panel, marks: dict[str, Any]) -> alt.Chart:
    rows = [
        {"x": p.x, "y": p.y, "line": printable(p.line), "style": printable(p.style), "name": printable(p.name),
         "hollow": _is_hollow(p)}
        for p in panel.points
    ]  # fmt: skip
    tooltip = [
        alt.Tooltip("name:N"),
        alt.Tooltip("line:N", title=panel.frame.line_title or "line"),
        alt.Tooltip("style:N", title=panel.frame.style_title or "style"),
        alt.Tooltip("x:Q", title=panel.x_title, format=",.4~g"),
        alt.Tooltip("y:Q", title=panel.y_title, format=",.4~g"),
    ]
    return (
        alt.Chart(alt.InlineData(values=rows))
        .mark_point(size=70, strokeWidth=1.4, opacity=1, fillOpacity=0.75)
        .encode(**marks, tooltip=tooltip)
    )


def _guide(guide: Guide, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """A line, or a ribbon with its name at its upper right end."""
    if not guide.x:
        level = alt.Chart(alt.InlineData(values=[{"y": guide.y[0]}]))
        return [level.mark_rule(color=INK, strokeWidth=1).encode(y=y), *_named(guide, guide.y[0], y)]
    if not guide.to:
        rows = [{"x": at, "y": edge} for at, edge in zip(guide.x, guide.y, strict=True)]
        line = alt.Chart(alt.InlineData(values=rows)).mark_line(color=INK, strokeWidth=1).encode(x=x, y=y)
        return [line, *_named(guide, guide.y[-1], y)]
    rows = [{"x": at, "y": edge, "to": to} for at, edge, to in zip(guide.x, guide.y, guide.to, strict=True)]
    ribbon = alt.Chart(alt.InlineData(values=rows)).mark_area(clip=True, color=FAINT, opacity=0.18)
    return [ribbon.encode(x=x, y=y, y2="to:Q"), *_named(guide, guide.to[-1], y)]


def _named(guide: Guide, height: float, y: alt.Y) -> list[alt.Chart]:
    if not guide.name:
        return []
    name = alt.Chart(alt.InlineData(values=[{"y": height, "name": printable(guide.name)}]))
    return [name.mark_text(align="left", color=FAINT, x=WIDTH + 6).encode(y=y, text="name:N")]
