"""Charts: bars, lines, points, and rectangles over two axes."""

import itertools
import math
import operator
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stepscope.core.answer import Guide, Panel, Point, Span
from stepscope.core.errors import InputError, printable
from stepscope.core.units import GIB, KIB, MIB, format_bytes
from stepscope.rendering.cells import COLOURS, icicle_places
from stepscope.rendering.plots import (
    CATEGORY_COLOURS,
    DASHES,
    FAINT,
    INK,
    PALETTE,
    SHAPES,
    Spec,
    colours_of,
    told_apart,
)

# Charts are dictionaries in the words of Vega-Lite: a library of chart objects copies each part of a chart for every
# layer that has it, and takes longer than to draw them.


_KINDS = {"Q": "quantitative", "N": "nominal"}


def _field(column: str, **options: Any) -> Spec:
    """A channel that shows a column of the rows, as `ms:Q` for a quantity or `name:N` for a name."""
    name, _, kind = column.rpartition(":")
    return {"field": name, "type": _KINDS[kind], **options}


def _either(test: str, then: object, otherwise: Spec) -> Spec:
    """A channel of one value in rows for which the test holds, and of another in the others."""
    return {"condition": {"test": test, "value": then}, **otherwise}


def _value(value: object) -> Spec:
    return {"value": value}


def _marks_of(rows: Sequence[Any], mark: str, encoding: Spec, **look: Any) -> Spec:
    """A layer: a mark for each row. encoding: channels, one that shows a column as it is by the column alone."""
    channels = {name: _field(channel) if isinstance(channel, str) else channel for name, channel in encoding.items()}
    if "tooltip" in channels:
        channels["tooltip"] = [_field(one) if isinstance(one, str) else one for one in channels["tooltip"]]
    return {"data": {"values": rows}, "mark": {"type": mark, **look}, "encoding": channels}


# Axes that plots share: logarithmic ones with few, round ticks.


NUMBER = ",.10~r"
"""d3's format: plain decimals, thousands separated, no trailing zeros."""


_PLAIN_DECADES = 4.5
_POWERS = (
    f"abs(log(datum.value) / LN10) < {_PLAIN_DECADES} ? format(datum.value, '{NUMBER}') : format(datum.value, '~e')"
)
"""Vega's expression for a tick's label: beyond 10,000 and below 0.0001 a power of ten, as in 1e-7."""


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two positive ends, with their twofold and fivefold where that stays readable."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if math.log10(high / low) <= 3.2 else (1,)
    # Powers of ten by text: 10.0**-3 * 5 is not 0.005.
    return [tick for decade in decades for step in steps if low <= (tick := float(f"{step}e{decade}")) <= high]


def ticks(low: float, high: float, count: int) -> list[float]:
    """About so many round values between two ends, at steps of 1, 2 or 5 times a power of ten, as d3-array chooses."""
    if not high > low:
        return [low]
    wanted = (high - low) / count
    power = 10.0 ** math.floor(math.log10(wanted))
    error = wanted / power
    step = power * (10 if error >= 50**0.5 else 5 if error >= 10**0.5 else 2 if error >= 2**0.5 else 1)
    return [float(f"{n * step:.12g}") for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def y_ticks(low: float, high: float, *, log: bool) -> list[tuple[float, str]]:
    """Where labels stand on an axis between two ends, and what they say."""
    on_log = log_ticks(low, high) if log else []
    return [(at, _tick_text(at, log=log)) for at in (on_log if len(on_log) > 2 else ticks(low, high, 6))]


def x_ticks(xs: list[float], *, log: bool) -> list[tuple[float, str]]:
    """The same for ascending values: at the values themselves where these are few and round."""
    places = xs if _are_chosen(xs) else log_ticks(xs[0], xs[-1]) if log else ticks(xs[0], xs[-1], 10)
    return [(at, _tick_text(at, log=log)) for at in places]


def _tick_text(value: float, *, log: bool) -> str:
    plain = not log or not value or abs(math.log10(abs(value))) < _PLAIN_DECADES
    return f"{value:,.10g}" if plain else f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e+")


def log_axis(low: float, high: float, *, grid: bool = True) -> Spec:
    """For a logarithmic scale whose domain this is."""
    ticks = log_ticks(low, high)
    # Less than one interval of them: leave the choice to Vega.
    values: dict[str, Any] = {"values": ticks} if len(ticks) > 2 else {"tickCount": 4}
    return {"format": NUMBER, "labelOverlap": "greedy", "labelExpr": _POWERS, "grid": grid, **values}


MOST_BARS = 80
LONGEST_NAME = 48
"""Characters of a bar's name: kernels' names are longer, and differ at both ends."""
_ROW_PX = 18


def draw_bars(panel: Panel, *, title: str = "", subtitle: str = "") -> Spec:
    """The panel's bars, lying, a row for each name, or for each name and colour where they stand side by side.

    Raises InputError where there is nothing to draw, or more than can be told apart.
    """
    known, names, lines, ends = bars_of(panel)
    stacked = panel.kind == "stack"
    axis = log_axis(*ends) if ends else {"format": NUMBER, "tickCount": 6}
    scale = {"type": "log", "domain": list(ends), "nice": False} if ends else {"zero": True}
    rows = _field("name:N", sort=names, title=panel.x_title or None, axis={"labelLimit": 420, "grid": False})
    colour = _field(
        "line:N",
        scale={"domain": lines, "range": colours_of(lines)},
        legend={"title": None, "symbolType": "square"} if len(lines) > 1 else None,
    )
    if len(lines) == 1 and all(name in COLOURS for name in names):  # phases, in the colours that other charts give them
        colour = _field("name:N", scale={"domain": names, "range": colours_of(names)}, legend=None)
    beside = {} if stacked or len(lines) == 1 else {"yOffset": _field("line:N", sort=lines)}
    length = _field("y:Q", title=panel.y_title, scale=scale, axis=axis, stack="zero" if stacked else None)
    bars = {
        "x": length, "y": rows, "color": colour, "opacity": _either("datum.doubted", 0.35, _value(1.0)),
        "tooltip": ["name:N", "line:N", _field("y:Q", format=",.4~g")], **beside,
        **({"order": _field("place:Q")} if stacked else {}),
    }  # fmt: skip
    layers = [_marks_of(_bar_rows(known, lines), "bar", bars)]
    between = [point for point in known if point.low is not None and point.high is not None]
    if between and not stacked:
        low = _field("low:Q", title=panel.y_title, scale=scale, axis=axis)
        ends_of = {"x": low, "x2": {"field": "high"}, "y": rows, **beside}
        layers.append(_marks_of(_bar_rows(between, lines), "rule", ends_of, color=INK, strokeWidth=1.4))
    missing = [point for point in panel.points if not point.is_drawn]
    if missing:
        words = {"x": _value(0), "y": rows, "text": "missing:N", **beside}
        look = {"align": "left", "dx": 4, "fontStyle": "italic", "color": INK}
        layers.append(_marks_of(_bar_rows(missing, lines), "text", words, **look))
    height = max(120, _ROW_PX * len(names) * (len(lines) if beside else 1))
    return {"layer": layers, "width": 640, "height": height, "title": _titled(title, subtitle)}


class Bars(NamedTuple):
    """What is told apart in a panel of bars."""

    known: list[Point]
    names: list[str]
    lines: list[str]
    log_ends: tuple[float, float] | None
    """The ends of a logarithmic axis; None for one from zero."""


def bars_of(panel: Panel) -> Bars:
    """The bars of a panel. Raises InputError where there is nothing to draw, or more than can be told apart."""
    known = [point for point in panel.points if point.is_drawn]
    if not known:
        raise InputError("there is nothing to plot: no figure in any cell")
    names = list(dict.fromkeys(name_of_bar(point) for point in panel.points))
    lines = list(dict.fromkeys(printable(point.line) for point in panel.points))
    if len(names) > MOST_BARS or len(lines) > len(PALETTE):
        raise InputError(f"{len(names)} bars of {len(lines)} colours are more than a plot can tell apart")
    log = bool(panel.y_log) and panel.kind != "stack"
    values = [value for p in known for value in (p.y, p.low, p.high) if value is not None]
    if log and min(values) <= 0:
        raise InputError(f"{panel.y_title} has a value of zero or less: no logarithmic axis can show it")
    return Bars(known, names, lines, (min(values) / 1.5, max(values) * 1.2) if log else None)


def name_of_bar(point: Point) -> str:
    return printable(point.name, LONGEST_NAME)


def why_missing(point: Point) -> str:
    """What stands in the place of a figure that is none; empty for one that is."""
    return "" if point.is_drawn else printable(point.missing or str(point.y))


def _bar_rows(points: Sequence[Point], lines: Sequence[str]) -> list[Spec]:
    return [
        {"name": name_of_bar(p), "line": printable(p.line), "y": p.y, "low": p.low, "high": p.high,
         "doubted": p.doubted, "missing": why_missing(p), "place": lines.index(printable(p.line))}
        for p in points
    ]  # fmt: skip


# Points that no line joins, held against lines and ribbons; one panel below the other, over one axis.


WIDTH, HEIGHT, LOWER_HEIGHT = 620, 460, 190
"""The first panel is nearly square, so that a diagonal is one; the others are low."""


def draw_points(panels: Sequence[Panel], *, title: str = "", subtitle: str = "") -> Spec:
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
    hollow = any(point.apart or point.doubted for point in points)
    marks = _marks(lines, styles, frame.line_title, frame.style_title, hollow=hollow)
    charts = []
    for i, panel in enumerate(panels):
        rows = [
            {"x": p.x, "y": p.y, "line": printable(p.line), "style": printable(p.style), "name": printable(p.name),
             "hollow": p.apart or p.doubted}
            for p in panel.points
        ]  # fmt: skip
        tooltip = [
            "name:N",
            _field("line:N", title=panel.frame.line_title or "line"),
            _field("style:N", title=panel.frame.style_title or "style"),
            _field("x:Q", title=panel.x_title, format=",.4~g"),
            _field("y:Q", title=panel.y_title, format=",.4~g"),
        ]
        x = _field("x:Q", title=panel.x_title, **_axis([p.x for p in panel.points], panel.frame.x_ends, panel.x_log))
        y = _field("y:Q", title=panel.y_title, **_axis([p.y for p in panel.points], panel.frame.y_ends, panel.y_log))
        layers = [layer for guide in panel.frame.guides for layer in _guide(guide, x, y)]
        look = {"size": 70, "strokeWidth": 1.4, "opacity": 1, "fillOpacity": 0.75}
        layers.append(_marks_of(rows, "point", {**marks, "tooltip": tooltip, "x": x, "y": y}, **look))
        charts.append({"layer": layers, "width": WIDTH, "height": LOWER_HEIGHT if i else HEIGHT})
    return {"vconcat": charts, "spacing": 26, "title": _titled(title, subtitle)}


def _axis(values: Sequence[float], ends: tuple[float, float] | None, log: bool | None) -> dict[str, Any]:
    """The scale and the axis of x or y."""
    if log:
        low, high = ends or (min(values) / 1.25, max(values) * 1.25)
        if low <= 0:
            raise InputError("a value of zero or less: no logarithmic axis can show it")
        return {"scale": {"type": "log", "domain": [low, high], "nice": False}, "axis": log_axis(low, high)}
    return {"scale": {"domain": list(ends), "nice": False} if ends else {}, "axis": {"format": NUMBER}}


def _marks(lines: list[str], styles: list[str], line_title: str, style_title: str, *, hollow: bool) -> dict[str, Any]:
    """How a point looks: colour by line, shape by style, filled where it counts."""
    line_scale = {"domain": lines, "range": colours_of(lines)}
    style_scale = {"domain": styles, "range": list(SHAPES[: len(styles)])}
    by_shape = {"title": style_title or None} if len(styles) > 1 else None
    return {
        "color": _field("line:N", scale=line_scale, legend={"title": line_title or None, "symbolType": "circle"}),
        "fill": _field("line:N", scale=line_scale, legend=None),
        "shape": _field("style:N", scale=style_scale, legend=by_shape),
        **({"fillOpacity": _either("datum.hollow", 0.0, _value(0.75))} if hollow else {}),
    }


def _guide(guide: Guide, x: Spec, y: Spec) -> list[Spec]:
    """A line, or a ribbon with its name at its upper right end."""
    if not guide.x:
        level = _marks_of([{"y": guide.y[0]}], "rule", {"y": y}, color=INK, strokeWidth=1)
        return [level, *_named(guide, guide.y[0], y)]
    if not guide.to:
        rows = [{"x": at, "y": edge} for at, edge in zip(guide.x, guide.y, strict=True)]
        line = _marks_of(rows, "line", {"x": x, "y": y}, color=INK, strokeWidth=1)
        return [line, *_named(guide, guide.y[-1], y)]
    rows = [{"x": at, "y": edge, "to": to} for at, edge, to in zip(guide.x, guide.y, guide.to, strict=True)]
    edges = {"x": x, "y": y, "y2": {"field": "to"}}
    ribbon = _marks_of(rows, "area", edges, clip=True, color=FAINT, opacity=0.18)
    return [ribbon, *_named(guide, guide.to[-1], y)]


def _named(guide: Guide, height: float, y: Spec) -> list[Spec]:
    if not guide.name:
        return []
    rows = [{"y": height, "name": printable(guide.name)}]
    return [_marks_of(rows, "text", {"y": y, "text": "name:N"}, align="left", color=FAINT, x=WIDTH + 6)]


# Lines of one quantity against another: a panel a quantity, a colour a line, bars where an interval is known.


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


def draw_series(panels: Sequence[Panel], *, title: str = "", subtitle: str = "") -> Spec:
    """Panels over one axis of x, which is the first one's, at most two abreast.

    A scale of None is logarithmic for values that span decades.
    Raises InputError where there is nothing to draw, or more lines than can be told apart.
    """
    panels, xs, x_log, lines, styles, joined = series_of(panels)
    x_title, frame = panels[0].x_title, panels[0].frame
    x = _x_axis(xs, x_title, log=x_log)
    # A style is told by dashes, or by shapes where nothing joins the points. Not by both: Vega-Lite would draw them in
    # one legend, of dashed shapes that read badly.
    colours = {"domain": lines, "range": colours_of(lines)}
    by_colour = {"title": frame.line_title or None, "symbolType": "circle"} if len(lines) > 1 else None
    by_dash = {"title": frame.style_title or None, "symbolType": "stroke", "symbolSize": 500, "symbolStrokeColor": INK}
    by_shape = {"title": frame.style_title or None, "symbolFillColor": INK}
    dash, shape = _value(DASHES[0]), _value(SHAPES[0])
    if len(styles) > 1 and joined:
        dash = _field("style:N", scale={"domain": styles, "range": list(DASHES)}, legend=by_dash)
    elif len(styles) > 1:
        shape = _field("style:N", scale={"domain": styles, "range": list(SHAPES)}, legend=by_shape)
    channels = {
        "color": _field("line:N", scale=colours, legend=by_colour),
        "fill": _either("datum.doubted", "white", _field("line:N", scale=colours, legend=None)),
        "strokeDash": dash,
        "shape": shape,
    }
    width, height = (640, 400) if len(panels) == 1 else (430, 300)
    charts = []
    for panel in panels:
        log, ends = y_scale(panel, panels)
        scale = {"type": "log" if log else "linear", "domain": list(ends), "nice": False}
        axis = log_axis(*ends) if log else {"format": NUMBER, "tickCount": 6}
        y, low = (_field(name, title=panel.y_title, scale=scale, axis=axis) for name in ("y:Q", "low:Q"))
        charts.append({"layer": _layers(panel, x, y, low, channels), "width": width, "height": height})
    return {"concat": charts, "columns": 2, "title": _titled(title, subtitle)}


class Series(NamedTuple):
    """What panels of curves share."""

    panels: list[Panel]
    """Those with a figure."""
    xs: list[float]
    x_log: bool
    lines: list[str]
    styles: list[str]
    joined: bool
    """Whether some line has two points: a legend of dashes would explain nothing otherwise."""


def series_of(panels: Sequence[Panel]) -> Series:
    """Raises InputError where there is nothing to draw, or more lines than can be told apart."""
    kept = [panel for panel in panels if any(point.is_drawn for point in panel.points)]
    if not kept:
        raise InputError("there is nothing to plot: no figure in any cell")
    points = [point for panel in kept for point in panel.points]
    lines, styles = told_apart(
        (point.line for point in points), (point.style for point in points), "keep fewer runs with --where"
    )
    xs = sorted({point.x for point in points})
    log = spans(xs, LOG_FROM_X) if kept[0].x_log is None else kept[0].x_log
    if log and xs[0] <= 0:
        raise InputError(f"{kept[0].x_title} has a value of zero or less: no logarithmic axis can show it")
    joined = len({(point.line, point.style) for point in points}) < len({(p.line, p.style, p.x) for p in points})
    return Series(kept, xs, log, lines, styles, joined)


def y_scale(panel: Panel, panels: Sequence[Panel]) -> tuple[bool, tuple[float, float]]:
    """Whether y is logarithmic, and its ends. Panels that show one quantity of several things, over ranges that meet,
    share a scale. Raises InputError where a logarithmic axis cannot show the values."""
    quantity, measured = panel.y_title.partition(" of ")[0], _values(panel)
    values = list(measured)
    for other in panels:
        others = _values(other)
        if other is not panel and other.y_title.partition(" of ")[0] == quantity:
            values += others if min(measured) <= max(others) and min(others) <= max(measured) else []
    log = spans(values, LOG_FROM_Y) if panels[0].y_log is None else panels[0].y_log
    if not log:
        return False, (min(0.0, *values), max(values) * 1.08 or 1.0)
    if min(values) <= 0:
        raise InputError(f"{panel.y_title} has a value of zero or less: no logarithmic axis can show it")
    return True, (min(values) / 1.2, max(values) * 1.2)


def line_widths(placed: Sequence[Point]) -> dict[tuple[str, str], int]:
    """Pixels of each line: for each line that lies on it and is drawn later, it is wider, and seen on both sides."""
    lines: dict[tuple[str, str], dict[float, float]] = {}
    for point in placed:
        lines.setdefault((point.line, point.style), {})[point.x] = point.y
    widths = dict.fromkeys(lines, _WIDTH)
    for (name, one), (_, other) in itertools.combinations(lines.items(), 2):
        shared = sorted(one.keys() & other.keys())
        meets = [math.isclose(one[x], other[x], rel_tol=_AS_ONE) for x in shared]
        widths[name] += _WIDER * any(itertools.starmap(operator.and_, itertools.pairwise(meets)))
    return widths


def _values(panel: Panel) -> list[float]:
    """What the axis of y must hold."""
    return [v for p in panel.points if p.is_drawn for v in (p.y, p.low, p.high) if v is not None]


def spans(values: Sequence[float], factor: float) -> bool:
    """Whether positive values go over so many times the smallest."""
    return min(values) > 0 and max(values) >= factor * min(values)


def _x_axis(xs: list[float], title: str, *, log: bool) -> Spec:
    """Ticks stand at the values themselves where these are few and round: lengths are powers of two, or chosen."""
    kind = {"type": "log", "base": 2} if log else {"zero": False}
    scale = {**kind, "nice": False, "padding": 14}
    chosen = _are_chosen(xs)
    if log and not chosen and len(xs) <= 12:
        return _field("x:Q", title=title, scale=scale, axis=log_axis(xs[0], xs[-1], grid=False))
    ticks = {"values": xs} if chosen else {}
    axis = {"format": NUMBER, "labelOverlap": "greedy", "grid": False, **ticks}
    return _field("x:Q", title=title, scale=scale, axis=axis)


def _are_chosen(xs: list[float]) -> bool:
    """Whether values are few and round, as lengths are that somebody chose."""
    return len(xs) <= 12 and all(x == float(f"{x:.3g}") or float(x).is_integer() for x in xs)


def _layers(panel: Panel, x: Spec, y: Spec, low: Spec, channels: dict[str, Spec]) -> list[Spec]:
    placed = [point for point in panel.points if point.is_drawn]
    wide = line_widths(placed)
    rows = [
        {"x": p.x, "y": p.y, "line": printable(p.line), "style": printable(p.style), "low": p.low, "high": p.high,
         "doubted": p.doubted, "wide": wide[p.line, p.style]}
        for p in placed
    ]  # fmt: skip
    counts = Counter((point.line, point.style) for point in placed)
    dotted = [row for row, p in zip(rows, placed, strict=True) if counts[p.line, p.style] <= MOST_DOTS]
    bars = [row for row in rows if row["low"] is not None and row["high"] is not None]
    colour, dash, shape = channels["color"], channels["strokeDash"], channels["shape"]
    width = {"strokeWidth": _field("wide:Q", scale=None, legend=None)} if max(wide.values()) > _WIDTH else {}
    line = {"x": x, "y": y, "color": colour, "strokeDash": dash, "detail": "style:N", **width}
    dot = {"x": x, "y": y, "color": colour, "shape": shape, "fill": channels["fill"],
           "tooltip": ["line:N", "style:N", "x:Q", _field("y:Q", format=",.4~g")]}  # fmt: skip
    return [
        _marks_of(rows, "line", line, strokeWidth=_WIDTH),
        _marks_of(bars, "rule", {"x": x, "y": low, "y2": {"field": "high"}, "color": colour}, strokeWidth=1.6),
        *_lost(panel, placed, x, y, colour),
        _marks_of(dotted, "point", dot, size=60, strokeWidth=1.8, opacity=1),
    ]


def _lost(panel: Panel, placed: Sequence[Point], x: Spec, y: Spec, colour: Spec) -> list[Spec]:
    """A word for each point that has no place, in its line's colour at the height of that line's last point; at the top
    where the line has none."""
    last = {point.line: point.y for point in sorted(placed, key=lambda point: point.x)}
    words_at: Counter[tuple[float, float | None]] = Counter()
    marks: list[Spec] = []
    for point in panel.points:
        if point.is_drawn:
            continue
        height = last.get(point.line)
        row = {
            "x": point.x,
            "y": height,
            "line": printable(point.line),
            "why": why_missing(point),
        }
        place = y if height is not None else _value(0)
        look = {"baseline": "top", "fontWeight": "bold", "dy": 2 + _LABEL_PX * words_at[point.x, height]}
        marks.append(_marks_of([row], "text", {"x": x, "y": place, "text": "why:N", "color": colour}, **look))
        words_at[point.x, height] += 1
    return marks


# Icicles, timelines and heat maps as charts: rectangles over two axes.


_TILE_ROW_PX = 26
_WIDTH_PX = 760
_LEAST_LABELLED = 0.07
"""The share of the width from which a part's name is written into it."""
_LONGEST = 40
_MORE = "other"


def draw_icicle(panel: Panel, *, title: str = "", subtitle: str = "") -> Spec:
    """The nodes by depth from the top, each as wide as its value; the innermost are coloured by name.

    Raises InputError where there is nothing to draw.
    """
    whole = panel.nodes[0].value if panel.nodes else 0.0
    if whole <= 0:
        raise InputError("there is nothing to plot: no time in any part")
    rows: list[dict[str, object]] = []
    kinds = _largest((node.name, node.value) for node in panel.nodes if node.level == "family")
    places = icicle_places(panel.nodes)
    depths = [depth for _, depth in places]
    for node, (left, depth) in zip(panel.nodes, places, strict=True):
        kind = (node.name if node.name in kinds else _MORE) if node.level == "family" else "phases and modules"
        name = printable(node.name, _LONGEST) if node.value / whole >= _LEAST_LABELLED else ""
        rows.append({"left": left, "right": left + node.value, "depth": depth, "kind": printable(kind), "name": name,
                     "part": printable(node.name), "below": depth + 0.96})  # fmt: skip
    shades = ["phases and modules", *map(printable, kinds), _MORE]
    colours = ["#D9DBDF", *colours_of(kinds), "#ADADAD"]
    depth = {"scale": {"reverse": True, "domain": [0, max(depths) + 1], "nice": False}, "axis": None}
    x = _field("left:Q", title=panel.x_title, scale={"domain": [0, whole], "nice": False})
    colour = _field("kind:N", scale={"domain": shades, "range": colours}, legend={"title": None})
    tile = {"x": x, "x2": {"field": "right"}, "y": _field("depth:Q", **depth), "y2": {"field": "below"},
            "color": colour, "tooltip": ["part:N"]}  # fmt: skip
    word = {"x": x, "y": _field("middle:Q", **depth), "text": "name:N"}
    look = {"align": "left", "baseline": "middle", "dx": 4, "fontSize": 10, "color": "#000000"}
    words = _marks_of(rows, "text", word, **look)
    words["transform"] = [{"calculate": "datum.depth + 0.48", "as": "middle"}]
    return {
        "layer": [_marks_of(rows, "rect", tile, stroke="white", strokeWidth=0.6), words],
        "width": _WIDTH_PX,
        "height": _TILE_ROW_PX * (max(depths) + 1),
        "title": _titled(title, subtitle),
    }


def draw_timeline(panel: Panel, *, title: str = "", subtitle: str = "") -> Spec:
    """The slices of each lane over time. Raises InputError where there is nothing to draw."""
    if not panel.slices:
        raise InputError("there is nothing to plot: nothing ran")
    kinds = _largest((one.kind, one.end - one.begin) for one in panel.slices)
    rows = [
        {
            "lane": printable(one.lane),
            "begin": one.begin,
            "end": one.end,
            "kind": printable(one.kind) if one.kind in kinds else _MORE,
        }
        for one in panel.slices
    ]
    lanes = list(dict.fromkeys(str(row["lane"]) for row in rows))
    domain, ends = [*map(printable, kinds), _MORE], panel.frame.x_ends
    scale = {"domain": list(ends), "nice": False} if ends else {"nice": False}
    colours = {"domain": domain, "range": [*colours_of(kinds), "#ADADAD"]}
    slices = {
        "x": _field("begin:Q", title=panel.x_title, scale=scale),
        "x2": {"field": "end"},
        "y": _field("lane:N", sort=lanes, title=None, axis={"labelLimit": 220}),
        "color": _field("kind:N", scale=colours, legend={"title": None, "symbolType": "square"}),
    }
    chart = _marks_of(rows, "bar", slices, height=_TILE_ROW_PX - 6)
    return {**chart, "width": _WIDTH_PX, "height": {"step": _TILE_ROW_PX}, "title": _titled(title, subtitle)}


def draw_heat(panel: Panel, *, title: str = "", subtitle: str = "") -> Spec:
    """A cell for each row and column, darker where the figure is larger, with the figure or why there is none.

    Raises InputError where no cell has a figure.
    """
    known = [point for point in panel.points if not point.missing]
    if not known:
        raise InputError("there is nothing to plot: no figure in any cell")
    rows = [
        {
            "down": printable(point.line),
            "across": printable(point.name),
            "y": None if point.missing else point.y,
            "said": printable(point.missing) if point.missing else f"{point.y:.4g}",
        }
        for point in panel.points
    ]
    across, down = (list(dict.fromkeys(str(row[key]) for row in rows)) for key in ("across", "down"))
    middle = (max(point.y for point in known) + min(point.y for point in known)) / 2
    places = {
        "x": _field("across:N", sort=across, title=panel.x_title, axis={"labelAngle": 0}),
        "y": _field("down:N", sort=down, title=panel.frame.line_title or None),
    }
    shade = _field("y:Q", scale={"scheme": "blues"}, legend=None)
    dark = _either(f"isValid(datum.y) && datum.y > {middle!r}", "white", _value(INK))
    layers = [
        _marks_of(rows, "rect", {**places, "color": shade}, stroke="white"),
        _marks_of(rows, "text", {**places, "text": "said:N", "color": dark}, fontSize=11),
    ]
    size = {"width": {"step": 64}, "height": {"step": 28}}
    return {"layer": layers, **size, "title": _titled(title or panel.frame.heading, subtitle)}


def _largest(parts: Iterable[tuple[str, float]]) -> list[str]:
    """The kinds with most in all, as many as have a colour of their own beside that of the others."""
    totals: defaultdict[str, float] = defaultdict(float)
    for kind, value in parts:
        totals[kind] += value
    return sorted(totals, key=lambda kind: -totals[kind])[: len(PALETTE) - 1]


def _titled(title: str, subtitle: str) -> Spec:
    lines = textwrap.wrap(printable(subtitle), _SUBTITLE_LETTERS)
    return {"text": printable(title), "subtitle": lines if len(lines) > 1 else "".join(lines)}


_SUBTITLE_LETTERS = 104
"""The letters of a subtitle's line: what 640 pixels, the narrowest charts, have room for."""


# Bytes over time as stacked areas, with what ran meanwhile, the peak, and what they are held against.


AREAS_WIDTH, AREAS_HEIGHT = 860, 400
_LINE_PX = 17
"""Height of a line of labels."""
_CHARACTER_PX = 6.2
"""Mean width of a character of a label, at 12 px."""
_TIME = "time_us"


@dataclass(frozen=True, kw_only=True)
class _Scales:
    """What layers share: units, and how far the axes go."""

    x_title: str
    y_title: str
    time_unit: str
    time_size: float
    """Microseconds in the unit."""
    byte_unit: str
    byte_size: int
    end_us: float
    top: float
    """Upper end of the axis of bytes, in `byte_unit`."""

    @property
    def x(self) -> Spec:
        scale = {"domain": [0, self.end_us / self.time_size], "nice": False}
        title = f"{self.x_title} ({self.time_unit})"
        return _field("time:Q", scale=scale, title=title, axis={"grid": False, "tickCount": 10})

    @property
    def y(self) -> Spec:
        scale = {"domain": [0, self.top], "nice": False, "zero": True}
        return _field("bytes:Q", scale=scale, title=f"{self.y_title} ({self.byte_unit})", axis={"tickCount": 8})

    def time(self, at_us: float) -> float:
        return at_us / self.time_size

    def bytes(self, count: float) -> float:
        return count / self.byte_size


class _SpanLabel(NamedTuple):
    text: str
    middle_us: float
    line: int


class _Moments(NamedTuple):
    """What every area is made of: the bytes of each, from the ground of the stack up, moment after moment."""

    times: tuple[float, ...]
    held: dict[str, tuple[float, ...]]


def draw_areas(panel: Panel, *, title: str = "", subtitle: str = "", interactive: bool = False) -> Spec:
    """The panel's areas: stacked steps of bytes over microseconds, in the units that read best.

    interactive: zoom on time, and the figures of the moment under the pointer.
    Raises InputError where there is nothing to draw.
    """
    # The lines that ever hold a byte: categories of memory from the ground up, then others as they come.
    lines_held: dict[str, list[float]] = {}
    for point in panel.points:
        lines_held.setdefault(point.line, []).append(point.y)
    held = {name: tuple(figures) for name, figures in lines_held.items() if any(figures)}
    if not held:
        raise InputError("no memory was live at any moment: there is nothing to plot")
    order = [*(name for name in CATEGORY_COLOURS if name in held), *(n for n in held if n not in CATEGORY_COLOURS)]
    times = tuple(point.x for point in panel.points if point.line == panel.points[0].line)
    moments = _Moments(times=times, held={name: held[name] for name in order})
    totals = [sum(figures) for figures in zip(*moments.held.values(), strict=True)]
    at = totals.index(max(totals))
    peak = {name: figures[at] for name, figures in moments.held.items()}
    peak_us, peak_bytes = moments.times[at], sum(peak.values())
    spans, guides = panel.frame.spans, panel.frame.guides
    end_us = max(moments.times[-1], *(span.end for span in spans), 1)
    used_px = [0.0, 0.0, 0.0]
    """For each line of labels, the pixels from the left that are used."""
    # Each name over the middle of its span, on the first line with room; names that find none are left out.
    labels = []
    for span in sorted(spans, key=lambda span: span.begin):
        text = printable(span.name)
        width = (len(text) + 2) * _CHARACTER_PX
        middle = (span.begin + span.end) / 2 / end_us * AREAS_WIDTH
        middle = min(max(middle, width / 2), AREAS_WIDTH - width / 2)
        line = next((i for i, used in enumerate(used_px) if used <= middle - width / 2), None)
        if line is not None:
            used_px[line] = middle + width / 2
            labels.append(_SpanLabel(text=text, middle_us=middle / AREAS_WIDTH * end_us, line=line))
    lines = 1 + max((label.line for label in labels), default=-1)
    highest = max(peak_bytes, *(guide.y[0] for guide in guides), 0)
    byte_unit, byte_size = next(((u, s) for u, s in (("GiB", GIB), ("MiB", MIB)) if highest >= s / 2), ("KiB", KIB))
    time_unit, time_size = next(((u, s) for u, s in (("s", 1e6), ("ms", 1e3)) if end_us >= 5 * s), ("µs", 1.0))
    scales = _Scales(
        x_title=panel.x_title, y_title=panel.y_title,
        time_unit=time_unit, time_size=time_size, byte_unit=byte_unit, byte_size=byte_size, end_us=end_us,
        # Above the highest there is room for the names of spans, and for a line that names the peak or a guide.
        top=highest / byte_size / (1 - (lines + 1.8) * _LINE_PX / AREAS_HEIGHT),
    )  # fmt: skip
    data = _table(moments)
    named_spans: list[Spec] = []
    for label in labels:
        rows = [{"time": scales.time(round(label.middle_us))}]
        place = {"x": scales.x, "y": _value((label.line + 0.7) * _LINE_PX)}
        named_spans += _haloed(rows, place, text=label.text, clip=True, fontWeight="bold", baseline="middle")
    layers = [
        *_bands(spans, scales),
        *_areas(data, peak, scales),
        *named_spans,
        *(layer for guide in guides for layer in _level(guide, scales, left=peak_us > end_us / 2)),
        *_peak(peak_us, peak_bytes, [guide.y[0] for guide in guides], scales),
    ]
    chart: Spec = {"width": AREAS_WIDTH, "height": AREAS_HEIGHT, "title": _titled(title, subtitle)}
    if interactive:
        layers.append(_pointer(data, list(moments.held), scales))
        chart["params"] = _PARAMS
    return {"layer": layers, **chart}


def _table(moments: _Moments) -> Spec:
    """The rows as CSV inside the chart, in bytes as they were counted: a third of the same rows as JSON.

    `lowest` is the place in the stack of the lowest area that changed since the row before; the edges of those under it
    stand still.
    """
    rows = list(zip(*moments.held.values(), strict=True))
    doubled = {name: name.replace('"', '""') for name in moments.held}
    heads = [f'"{text}"' if text != name or "," in name else name for name, text in doubled.items()]
    lines = [",".join((_TIME, *heads, "lowest"))]
    for i, row in enumerate(rows):
        changed = (place for place, held in enumerate(row) if held != rows[i - 1][place])
        # The first row begins every edge, and the last ends every edge.
        lowest = next(changed, len(row)) if 0 < i < len(rows) - 1 else 0
        lines.append(",".join(f"{figure:.16g}" for figure in (moments.times[i], *row, lowest)))
    parse = dict.fromkeys((_TIME, *moments.held, "lowest"), "number")
    return {"values": "\n".join([*lines, ""]), "format": {"type": "csv", "parse": parse}}


def _areas(data: Spec, peak: dict[str, float], scales: _Scales) -> list[Spec]:
    """One area a line; the chart adds them up."""
    categories = list(peak)
    sizes = {name: f"{name}: {format_bytes(peak[name])}" for name in categories}
    colours = [CATEGORY_COLOURS.get(name, PALETTE[i % len(PALETTE)]) for i, name in enumerate(categories)]
    legend = {"title": "live at the peak", "values": categories[::-1], "labelExpr": f"({sizes})[datum.label]",
              "symbolType": "square"}  # fmt: skip
    colour = _field("category:N", scale={"domain": categories, "range": colours}, legend=legend)
    areas: list[Spec] = []
    for i, name in enumerate(categories):
        below = " + ".join(f"datum[{other!r}]" for other in categories[:i]) or "0"
        # Vega-Lite's own stack would add up rows of the same microsecond.
        worked_out = {
            "time": f"datum.{_TIME} / {scales.time_size}",
            "below": f"({below}) / {scales.byte_size}",
            "bytes": f"({below} + datum[{name!r}]) / {scales.byte_size}",
            "category": repr(name),
        }
        edges = {"x": scales.x, "y": scales.y, "y2": {"field": "below"}, "color": colour}
        # In the order recorded: sorting by time could swap what happened within a microsecond.
        area = _marks_of([], "area", edges, interpolate="step-after", clip=True, order=False)
        areas.append(
            {**area, "data": data, "transform": [{"filter": f"datum.lowest <= {i}"}, *_worked_out(worked_out)]}
        )
    return areas


def _worked_out(formulas: dict[str, str]) -> list[Spec]:
    """Columns that the chart computes from others."""
    return [{"calculate": formula, "as": name} for name, formula in formulas.items()]


_PARAMS: list[Spec] = [
    {
        "name": "moment",
        "select": {"type": "point", "clear": "pointerout", "encodings": ["x"], "nearest": True, "on": "pointermove"},
        "views": ["pointer"],
    },
    {"name": "zoom", "select": {"type": "interval", "encodings": ["x"]}, "bind": "scales", "views": ["pointer"]},
]
"""What answers to the pointer: the moment that it is nearest to, and zoom on time by wheel and drag."""


def _pointer(data: Spec, categories: list[str], scales: _Scales) -> Spec:
    """A rule at the moment nearest to the pointer that shows its figures."""
    total = " + ".join(f"datum[{name!r}]" for name in categories)
    shown = {"total": total, **{name: f"datum[{name!r}]" for name in reversed(categories)}}
    worked_out = {f"{name} shown": f"({value}) / {scales.byte_size}" for name, value in shown.items()}
    tooltip = [_field("time:Q", title=f"time ({scales.time_unit})", format=",.4~f")]
    tooltip += [_field(f"{name} shown:Q", title=f"{name} ({scales.byte_unit})", format=",.4f") for name in shown]
    opacity = {"condition": {"param": "moment", "value": 0.8, "empty": False}, "value": 0}
    rule = _marks_of([], "rule", {"x": scales.x, "opacity": opacity, "tooltip": tooltip}, color=INK, strokeWidth=1)
    transform = _worked_out({"time": f"datum.{_TIME} / {scales.time_size}", **worked_out})
    return {**rule, "data": data, "name": "pointer", "transform": transform}


def _bands(spans: Sequence[Span], scales: _Scales) -> list[Spec]:
    """Every second span lies on grey; a rule stands where a span begins, and where the last ends."""
    if not spans:
        return []
    ordered = sorted(spans, key=lambda span: span.begin)
    bands = [
        {"time": scales.time(span.begin), "until": scales.time(span.end), "odd": i % 2}
        for i, span in enumerate(ordered)
    ]
    edges = sorted({band["time"] for band in bands} | {bands[-1]["until"]})
    grey = {"x": scales.x, "x2": {"field": "until"}, "opacity": _either("datum.odd", 0.05, _value(0.015))}
    rule = {"clip": True, "color": FAINT, "strokeDash": [3, 3], "strokeWidth": 1, "opacity": 0.7}
    return [
        _marks_of(bands, "rect", grey, clip=True, color=INK),
        _marks_of([{"time": edge} for edge in edges], "rule", {"x": scales.x}, **rule),
    ]


def _level(guide: Guide, scales: _Scales, *, left: bool) -> list[Spec]:
    """A line over the whole width, named at the side where the peak is not."""
    rows, place = [{"bytes": scales.bytes(guide.y[0])}], {"y": scales.y}
    side = {"x": 6, "align": "left"} if left else {"x": AREAS_WIDTH - 6, "align": "right"}
    text = f"{printable(guide.name)} {format_bytes(guide.y[0])}"
    return [
        _marks_of(rows, "rule", place, color=INK, strokeDash=[8, 4], strokeWidth=1.2),
        *_haloed(rows, place, text=text, baseline="bottom", dy=-3, **side),
    ]


def _peak(at_us: float, peak_bytes: float, levels: Sequence[float], scales: _Scales) -> list[Spec]:
    rows = [{"time": scales.time(at_us), "bytes": scales.bytes(peak_bytes)}]
    place = {"x": scales.x, "y": scales.y}
    dot = {"filled": True, "size": 60, "color": INK, "stroke": "white", "strokeWidth": 1.5, "opacity": 1, "clip": True}
    # Where a guide's line runs through the label's place, the label stands above it.
    headroom_px = (max(levels, default=peak_bytes) - peak_bytes) / scales.byte_size / scales.top * AREAS_HEIGHT
    lift = -headroom_px if 0 < headroom_px < 1.5 * _LINE_PX else 0
    on_the_left = at_us < scales.end_us * 0.75
    text = f"peak {format_bytes(peak_bytes)} at {scales.time(at_us):,.4g} {scales.time_unit}"
    side = {"align": "left", "dx": 9} if on_the_left else {"align": "right", "dx": -9}
    return [
        _marks_of(rows, "point", place, **dot),
        *_haloed(rows, place, text=text, baseline="bottom", dy=lift - 4, fontWeight="bold", clip=True, **side),
    ]


def _haloed(rows: list[Spec], place: Spec, **text: Any) -> list[Spec]:
    """Text that stays readable over whatever it lies on."""
    halo = {"stroke": "white", "strokeWidth": 4, "strokeJoin": "round", "color": "white", "opacity": 0.85}
    return [_marks_of(rows, "text", place, **halo, **text), _marks_of(rows, "text", place, color=INK, **text)]
