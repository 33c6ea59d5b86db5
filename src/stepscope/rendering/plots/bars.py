"""Figures of named things as bars, side by side by colour or stacked. What is missing is marked where it would be."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from stepscope.core.answer import Panel, Point
from stepscope.core.errors import InputError, printable
from stepscope.core.shown_text import middle_cut
from stepscope.rendering.plots.axes import NUMBER, log_axis
from stepscope.rendering.plots.theme import INK, PALETTE

MOST_BARS = 80
LONGEST_NAME = 48
"""Characters of a bar's name: kernels' names are longer, and differ at both ends."""
_ROW_PX = 18


def draw_bars(panel: Panel, *, title: str = "", subtitle: str = "") -> alt.LayerChart | alt.FacetChart:
    """The panel's bars, lying, a row for each name, or for each name and colour where they stand side by side.

    Raises InputError where there is nothing to draw, or more than can be told apart.
    """
    known = [point for point in panel.points if not point.missing]
    if not known:
        raise InputError("there is nothing to plot: no figure in any cell")
    names = list(dict.fromkeys(_name(point) for point in panel.points))
    lines = list(dict.fromkeys(printable(point.line) for point in panel.points))
    if len(names) > MOST_BARS or len(lines) > len(PALETTE):
        raise InputError(f"{len(names)} bars of {len(lines)} colours are more than a plot can tell apart")
    stacked = panel.kind == "stack"
    log = bool(panel.y_log) and not stacked
    values = [value for p in known for value in (p.y, p.low, p.high) if value is not None]
    if log and min(values) <= 0:
        raise InputError(f"{panel.y_title} has a value of zero or less: no logarithmic axis can show it")
    ends = (min(values) / 1.5, max(values) * 1.2) if log else None
    axis = log_axis(*ends) if ends else alt.Axis(format=NUMBER, tickCount=6)
    scale = alt.Scale(type="log", domain=list(ends), nice=False) if ends else alt.Scale(zero=True)
    rows = alt.Y("name:N", sort=names, title=panel.x_title or None, axis=alt.Axis(labelLimit=420, grid=False))
    colour = alt.Color(
        "line:N",
        scale=alt.Scale(domain=lines, range=list(PALETTE[: len(lines)])),
        legend=alt.Legend(title=None, symbolType="square") if len(lines) > 1 else None,
    )
    beside: dict[str, Any] = {} if stacked or len(lines) == 1 else {"yOffset": alt.YOffset("line:N", sort=lines)}
    length = alt.X("y:Q", title=panel.y_title, scale=scale, axis=axis, stack="zero" if stacked else None)
    order: dict[str, Any] = {"order": alt.Order("place:Q")} if stacked else {}
    tooltip = ["name:N", "line:N", alt.Tooltip("y:Q", format=",.4~g")]
    opacity = alt.condition("datum.doubted", alt.value(0.35), alt.value(1.0))
    layers: list[alt.Chart] = [
        _chart(known, lines).mark_bar().encode(
            x=length, y=rows, color=colour, opacity=opacity, tooltip=tooltip, **beside, **order
        )
    ]  # fmt: skip
    between = [point for point in known if point.low is not None and point.high is not None]
    if between and not stacked:
        low = alt.X("low:Q", title=panel.y_title, scale=scale, axis=axis)
        layers.append(
            _chart(between, lines).mark_rule(color=INK, strokeWidth=1.4).encode(x=low, x2="high:Q", y=rows, **beside)
        )
    missing = [point for point in panel.points if point.missing]
    if missing:
        layers.append(
            _chart(missing, lines).mark_text(align="left", dx=4, fontStyle="italic", color=INK)
            .encode(x=alt.value(0), y=rows, text="missing:N", **beside)
        )  # fmt: skip
    height = max(120, _ROW_PX * len(names) * (len(lines) if beside else 1))
    heading = alt.TitleParams(printable(title), subtitle=printable(subtitle))
    return alt.layer(*layers).properties(width=640, height=height, title=heading)


def _name(point: Point) -> str:
    return middle_cut(printable(point.name), LONGEST_NAME)


def _chart(points: Sequence[Point], lines: Sequence[str]) -> alt.Chart:
    rows = [
        {"name": _name(p), "line": printable(p.line), "y": p.y, "low": p.low, "high": p.high, "doubted": p.doubted,
         "missing": printable(p.missing), "place": lines.index(printable(p.line))}
        for p in points
    ]  # fmt: skip
    return alt.Chart(alt.InlineData(values=rows))
