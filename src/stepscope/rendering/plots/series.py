"""Lines of one quantity against another: a panel a quantity, a colour a line, bars where an interval is known."""

import itertools
import math
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import altair as alt

from stepscope.core.answer import Panel, Point
from stepscope.core.errors import InputError, printable
from stepscope.rendering.plots.axes import NUMBER, log_axis
from stepscope.rendering.plots.theme import DASHES, INK, PALETTE, SHAPES, told_apart

LOG_FROM_X, LOG_FROM_Y = 8, 50
"""Axes are logarithmic where the largest value is so many times the smallest."""
_LABEL_PX = 15
MOST_DOTS = 60
"""A line of more points is drawn without a dot for each."""
_WIDTH, _WIDER = 2, 4
"""Pixels of a line, and of each line that another covers in addition."""
_AS_ONE = 0.03
"""Two lines that are so near each other at two neighbouring points look like one."""


HOLLOW = "hollow or pale: doubted by the run's own findings"
"""What the subtitle says of points that are doubted."""


def draw_series(
    panels: Sequence[Panel],
    *,
    title: str = "",
    subtitle: str = "",
) -> alt.ConcatChart:
    """Panels over one axis of x, which is the first one's, at most two abreast.

    A scale of None is logarithmic for values that span decades.
    Raises InputError where there is nothing to draw, or more lines than can be told apart.
    """
    panels = [panel for panel in panels if any(map(_has_place, panel.points))]
    if not panels:
        raise InputError("there is nothing to plot: no figure in any cell")
    x_title, x_log, y_log, frame = panels[0].x_title, panels[0].x_log, panels[0].y_log, panels[0].frame
    points = [point for panel in panels for point in panel.points]
    lines, styles = told_apart(
        (point.line for point in points), (point.style for point in points), "keep fewer runs with --where"
    )
    xs = sorted({point.x for point in points})
    if x_log is None:
        x_log = spans(xs, LOG_FROM_X)
    x = _x_axis(xs, x_title, log=x_log)
    # A legend of dashes would explain nothing where no line has two points.
    joined = len({(point.line, point.style) for point in points}) < len({(p.line, p.style, p.x) for p in points})
    channels = _channels(lines, styles, frame.line_title, frame.style_title, dashes=joined)
    width, height = (640, 400) if len(panels) == 1 else (430, 300)
    charts = []
    for panel in panels:
        values = [v for each in panels if _compares(each, panel) for v in _values(each)]
        log = spans(values, LOG_FROM_Y) if y_log is None else y_log
        if (log and min(values) <= 0) or (x_log and xs[0] <= 0):
            raise InputError(
                f"{panel.y_title} against {x_title} has a value of zero or less: no logarithmic axis can show it"
            )
        ends = (min(values) / 1.2, max(values) * 1.2) if log else (min(0.0, *values), max(values) * 1.08 or 1.0)
        y, low = _y_axes(panel.y_title, ends, log=log)
        charts.append(alt.layer(*_layers(panel, x, y, low, channels)).properties(width=width, height=height))
    heading = alt.TitleParams(printable(title), subtitle=printable(subtitle))
    return alt.concat(*charts, columns=2).properties(title=heading)


def _has_place(point: Point) -> bool:
    return not point.missing and math.isfinite(point.y)


def _values(panel: Panel) -> list[float]:
    """What the axis of y must hold."""
    return [v for p in panel.points if _has_place(p) for v in (p.y, p.low, p.high) if v is not None]


def _compares(one: Panel, other: Panel) -> bool:
    """Whether two panels show one quantity of several things, over ranges that meet: then they share a scale."""
    quantity, second = (panel.y_title.partition(" of ")[0] for panel in (one, other))
    values, others = _values(one), _values(other)
    return one is other or (quantity == second and min(values) <= max(others) and min(others) <= max(values))


def spans(values: Sequence[float], factor: float) -> bool:
    """Whether positive values go over so many times the smallest."""
    return min(values) > 0 and max(values) >= factor * min(values)


def _x_axis(xs: list[float], title: str, *, log: bool) -> alt.X:
    """Ticks stand at the values themselves where these are few and round: lengths are powers of two, or chosen."""
    kind: dict[str, Any] = {"type": "log", "base": 2} if log else {"zero": False}
    scale = alt.Scale(**kind, nice=False, padding=14)
    chosen = len(xs) <= 12 and all(x == float(f"{x:.3g}") or float(x).is_integer() for x in xs)
    if log and not chosen and len(xs) <= 12:
        return alt.X("x:Q", title=title, scale=scale, axis=log_axis(xs[0], xs[-1], grid=False))
    ticks: dict[str, Any] = {"values": xs} if chosen else {}
    axis = alt.Axis(format=NUMBER, labelOverlap="greedy", grid=False, **ticks)
    return alt.X("x:Q", title=title, scale=scale, axis=axis)


def _y_axes(title: str, ends: tuple[float, float], *, log: bool) -> tuple[alt.Y, alt.Y]:
    """For the figures, and for the lower ends of their bars."""
    scale = alt.Scale(type="log" if log else "linear", domain=list(ends), nice=False)
    axis = log_axis(*ends) if log else alt.Axis(format=NUMBER, tickCount=6)
    return alt.Y("y:Q", title=title, scale=scale, axis=axis), alt.Y("low:Q", title=title, scale=scale, axis=axis)


def _channels(
    lines: list[str], styles: list[str], line_title: str, style_title: str, *, dashes: bool
) -> dict[str, Any]:
    """How lines and points look. A style is told by dashes, or by shapes where nothing joins the points.

    Not by both: Vega-Lite would draw them in one legend, of dashed shapes that read badly.
    """
    colours = alt.Scale(domain=lines, range=list(PALETTE[: len(lines)]))
    by_colour = alt.Legend(title=line_title or None, symbolType="circle") if len(lines) > 1 else None
    by_dash = alt.Legend(title=style_title or None, symbolType="stroke", symbolSize=500, symbolStrokeColor=INK)
    by_shape = alt.Legend(title=style_title or None, symbolFillColor=INK)
    dash, shape = alt.value(DASHES[0]), alt.value(SHAPES[0])
    if len(styles) > 1 and dashes:
        dash = alt.StrokeDash("style:N", scale=alt.Scale(domain=styles, range=list(DASHES)), legend=by_dash)
    elif len(styles) > 1:
        shape = alt.Shape("style:N", scale=alt.Scale(domain=styles, range=list(SHAPES)), legend=by_shape)
    return {
        "color": alt.Color("line:N", scale=colours, legend=by_colour),
        "fill": alt.condition("datum.doubted", alt.value("white"), alt.Fill("line:N", scale=colours, legend=None)),
        "strokeDash": dash,
        "shape": shape,
    }


def _layers(panel: Panel, x: alt.X, y: alt.Y, low: alt.Y, channels: dict[str, Any]) -> list[alt.Chart]:
    placed = [point for point in panel.points if _has_place(point)]
    wide = _covered(placed)
    rows = [
        {"x": p.x, "y": p.y, "line": printable(p.line), "style": printable(p.style), "low": p.low, "high": p.high,
         "doubted": p.doubted, "wide": _WIDTH + _WIDER * wide[p.line, p.style]}
        for p in placed
    ]  # fmt: skip
    counts = Counter((point.line, point.style) for point in placed)
    dotted = [row for row, p in zip(rows, placed, strict=True) if counts[p.line, p.style] <= MOST_DOTS]
    chart, dots = alt.Chart(alt.InlineData(values=rows)), alt.Chart(alt.InlineData(values=dotted))
    bars = alt.Chart(alt.InlineData(values=[row for row in rows if row["low"] is not None and row["high"] is not None]))
    colour, dash, shape = channels["color"], channels["strokeDash"], channels["shape"]
    tooltip = ["line:N", "style:N", "x:Q", alt.Tooltip("y:Q", format=",.4~g")]
    width: dict[str, Any] = (
        {"strokeWidth": alt.StrokeWidth("wide:Q", scale=None, legend=None)} if any(wide.values()) else {}
    )
    return [
        chart.mark_line(strokeWidth=_WIDTH).encode(x=x, y=y, color=colour, strokeDash=dash, detail="style:N", **width),
        bars.mark_rule(strokeWidth=1.6).encode(x=x, y=low, y2="high:Q", color=colour),
        *_lost(panel, placed, x, y, colour),
        dots.mark_point(size=60, strokeWidth=1.8, opacity=1).encode(
            x=x, y=y, color=colour, shape=shape, fill=channels["fill"], tooltip=tooltip
        ),
    ]


def _lost(panel: Panel, placed: Sequence[Point], x: alt.X, y: alt.Y, colour: alt.Color) -> list[alt.Chart]:
    """A word for each point that has no place, in its line's colour at the height of that line's last point; at the top
    where the line has none."""
    last = {point.line: point.y for point in sorted(placed, key=lambda point: point.x)}
    taken: Counter[tuple[float, float | None]] = Counter()
    marks: list[alt.Chart] = []
    for point in panel.points:
        if _has_place(point):
            continue
        height = last.get(point.line)
        row = {
            "x": point.x,
            "y": height,
            "line": printable(point.line),
            "why": printable(point.missing or str(point.y)),
        }
        place = y if height is not None else alt.value(0)
        mark = alt.Chart(alt.InlineData(values=[row])).mark_text(
            baseline="top", fontWeight="bold", dy=2 + _LABEL_PX * taken[point.x, height]
        )
        marks.append(mark.encode(x=x, y=place, text="why:N", color=colour))
        taken[point.x, height] += 1
    return marks


def _covered(points: Sequence[Point]) -> dict[tuple[str, str], int]:
    """How many lines that are drawn later lie on each line: it is drawn so much wider, and seen on both sides."""
    lines: dict[tuple[str, str], dict[float, float]] = {}
    for point in points:
        lines.setdefault((point.line, point.style), {})[point.x] = point.y
    covered = dict.fromkeys(lines, 0)
    for (name, one), (_, other) in itertools.combinations(lines.items(), 2):
        shared = sorted(one.keys() & other.keys())
        meets = [math.isclose(one[x], other[x], rel_tol=_AS_ONE) for x in shared]
        covered[name] += any(itertools.starmap(operator.and_, itertools.pairwise(meets)))
    return covered
