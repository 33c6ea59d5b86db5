"""Bytes over time as stacked areas, with what ran meanwhile, the peak, and what they are held against."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from stepscope.core.answer import Guide, Panel, Span
from stepscope.core.errors import InputError, printable
from stepscope.core.units import GIB, KIB, MIB, format_bytes
from stepscope.rendering.plots.save import CATEGORY_COLOURS, FAINT, INK, PALETTE

WIDTH, HEIGHT = 860, 400
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
    def x(self) -> alt.X:
        scale = alt.Scale(domain=[0, self.end_us / self.time_size], nice=False)
        title = f"{self.x_title} ({self.time_unit})"
        return alt.X("time:Q", scale=scale, title=title, axis=alt.Axis(grid=False, tickCount=10))

    @property
    def y(self) -> alt.Y:
        scale = alt.Scale(domain=[0, self.top], nice=False, zero=True)
        return alt.Y("bytes:Q", scale=scale, title=f"{self.y_title} ({self.byte_unit})", axis=alt.Axis(tickCount=8))

    def time(self, at_us: float) -> float:
        return at_us / self.time_size

    def bytes(self, count: float) -> float:
        return count / self.byte_size


@dataclass(frozen=True, kw_only=True)
class _SpanLabel:
    text: str
    middle_us: float
    line: int


@dataclass(frozen=True, kw_only=True)
class _Moments:
    """What every area is made of: the bytes of each, from the ground of the stack up, moment after moment."""

    times: tuple[float, ...]
    held: dict[str, tuple[float, ...]]

    @property
    def peak(self) -> int:
        """The first moment at which the most was held."""
        totals = [sum(figures) for figures in zip(*self.held.values(), strict=True)]
        return totals.index(max(totals))


def draw_areas(
    panel: Panel, *, title: str = "", subtitle: str = "", interactive: bool = False
) -> alt.LayerChart | alt.FacetChart:
    """The panel's areas: stacked steps of bytes over microseconds, in the units that read best.

    interactive: zoom on time, and the figures of the moment under the pointer.
    Raises InputError where there is nothing to draw.
    """
    moments = _moments(panel)
    if not moments.held:
        raise InputError("no memory was live at any moment: there is nothing to plot")
    at = moments.peak
    peak = {name: figures[at] for name, figures in moments.held.items()}
    peak_us, peak_bytes = moments.times[at], sum(peak.values())
    spans, guides = panel.frame.spans, panel.frame.guides
    end_us = max(moments.times[-1], *(span.end for span in spans), 1)
    labels = _place_spans(spans, end_us)
    lines = 1 + max((label.line for label in labels), default=-1)
    highest = max(peak_bytes, *(guide.y[0] for guide in guides), 0)
    byte_unit, byte_size = next(((u, s) for u, s in (("GiB", GIB), ("MiB", MIB)) if highest >= s / 2), ("KiB", KIB))
    time_unit, time_size = next(((u, s) for u, s in (("s", 1e6), ("ms", 1e3)) if end_us >= 5 * s), ("µs", 1.0))
    scales = _Scales(
        x_title=panel.x_title, y_title=panel.y_title,
        time_unit=time_unit, time_size=time_size, byte_unit=byte_unit, byte_size=byte_size, end_us=end_us,
        # Above the highest there is room for the names of spans, and for a line that names the peak or a guide.
        top=highest / byte_size / (1 - (lines + 1.8) * _LINE_PX / HEIGHT),
    )  # fmt: skip
    data = _table(moments)
    layers = [
        *_bands(spans, scales),
        *_areas(data, peak, scales),
        *_span_labels(labels, scales),
        *(layer for guide in guides for layer in _level(guide, scales, left=peak_us > end_us / 2)),
        *_peak(peak_us, peak_bytes, [guide.y[0] for guide in guides], scales),
    ]
    if interactive:
        layers.append(_pointer(data, list(moments.held), scales))
    heading = alt.TitleParams(printable(title), subtitle=printable(subtitle))
    return alt.layer(*layers, width=WIDTH, height=HEIGHT, title=heading)


def _moments(panel: Panel) -> _Moments:
    """The lines that ever hold a byte: categories of memory from the ground up, then others as they come."""
    lines: dict[str, list[float]] = {}
    for point in panel.points:
        lines.setdefault(point.line, []).append(point.y)
    times = tuple(point.x for point in panel.points if point.line == panel.points[0].line)
    held = {name: tuple(figures) for name, figures in lines.items() if any(figures)}
    order = [*(name for name in CATEGORY_COLOURS if name in held), *(n for n in held if n not in CATEGORY_COLOURS)]
    return _Moments(times=times, held={name: held[name] for name in order})


def _table(moments: _Moments) -> alt.InlineData:
    """The rows as CSV inside the chart, in bytes as they were counted: a third of the same rows as JSON.

    `lowest` is the place in the stack of the lowest area that changed since the row before; the edges of those under it
    stand still.
    """
    rows = list(zip(*moments.held.values(), strict=True))
    lines = [",".join((_TIME, *map(_quoted, moments.held), "lowest"))]
    for i, row in enumerate(rows):
        changed = (place for place, held in enumerate(row) if held != rows[i - 1][place])
        # The first row begins every edge, and the last ends every edge.
        lowest = next(changed, len(row)) if 0 < i < len(rows) - 1 else 0
        lines.append(",".join(f"{figure:.16g}" for figure in (moments.times[i], *row, lowest)))
    return alt.InlineData(
        values="\n".join([*lines, ""]),
        format=alt.CsvDataFormat(type="csv", parse=dict.fromkeys((_TIME, *moments.held, "lowest"), "number")),
    )


def _quoted(name: str) -> str:
    doubled = name.replace('"', '""')
    return f'"{doubled}"' if doubled != name or "," in name else name


def _areas(data: alt.InlineData, peak: dict[str, float], scales: _Scales) -> list[alt.Chart]:
    """One area a line; the chart adds them up."""
    categories = list(peak)
    sizes = {name: f"{name}: {format_bytes(peak[name])}" for name in categories}
    colours = [CATEGORY_COLOURS.get(name, PALETTE[i % len(PALETTE)]) for i, name in enumerate(categories)]
    legend = alt.Legend(
        title="live at the peak", values=categories[::-1], labelExpr=f"({sizes})[datum.label]", symbolType="square"
    )
    colour = alt.Color("category:N", scale=alt.Scale(domain=categories, range=colours), legend=legend)
    areas = []
    for i, name in enumerate(categories):
        below = " + ".join(f"datum[{other!r}]" for other in categories[:i]) or "0"
        areas.append(
            alt.Chart(data)
            .transform_filter(f"datum.lowest <= {i}")
            # Vega-Lite's own stack would add up rows of the same microsecond.
            .transform_calculate(
                time=f"datum.{_TIME} / {scales.time_size}",
                below=f"({below}) / {scales.byte_size}",
                bytes=f"({below} + datum[{name!r}]) / {scales.byte_size}",
                category=repr(name),
            )
            # In the order recorded: sorting by time could swap what happened within a microsecond.
            .mark_area(interpolate="step-after", clip=True, order=False)
            .encode(x=scales.x, y=scales.y, y2="below:Q", color=colour)
        )
    return areas


def _pointer(data: alt.InlineData, categories: list[str], scales: _Scales) -> alt.Chart:
    """A rule at the moment nearest to the pointer that shows its figures, and zoom on time by wheel and drag."""
    total = " + ".join(f"datum[{name!r}]" for name in categories)
    shown = {"total": total, **{name: f"datum[{name!r}]" for name in reversed(categories)}}
    moment = alt.selection_point(
        name="moment", encodings=["x"], nearest=True, on="pointermove", clear="pointerout", empty=False
    )
    zoom = alt.selection_interval(name="zoom", encodings=["x"], bind="scales")
    tooltip = [alt.Tooltip("time:Q", title=f"time ({scales.time_unit})", format=",.4~f")]
    tooltip += [alt.Tooltip(f"{name} shown:Q", title=f"{name} ({scales.byte_unit})", format=",.4f") for name in shown]
    return (
        alt.Chart(data, name="pointer")
        .transform_calculate(
            time=f"datum.{_TIME} / {scales.time_size}",
            **{f"{name} shown": f"({value}) / {scales.byte_size}" for name, value in shown.items()},
        )
        .mark_rule(color=INK, strokeWidth=1)
        .encode(x=scales.x, opacity=alt.condition(moment, alt.value(0.8), alt.value(0)), tooltip=tooltip)
        .add_params(moment, zoom)
    )


def _place_spans(spans: Sequence[Span], end_us: float) -> list[_SpanLabel]:
    """Each name over the middle of its span, on the first line with room; names that find none are left out."""
    taken = [0.0, 0.0, 0.0]
    """For each line of labels, the pixels from the left that are used."""
    placed = []
    for span in sorted(spans, key=lambda span: span.begin):
        text = printable(span.name)
        width = (len(text) + 2) * _CHARACTER_PX
        middle = (span.begin + span.end) / 2 / end_us * WIDTH
        middle = min(max(middle, width / 2), WIDTH - width / 2)
        line = next((i for i, used in enumerate(taken) if used <= middle - width / 2), None)
        if line is not None:
            taken[line] = middle + width / 2
            placed.append(_SpanLabel(text=text, middle_us=middle / WIDTH * end_us, line=line))
    return placed


def _bands(spans: Sequence[Span], scales: _Scales) -> list[alt.Chart]:
    """Every second span lies on grey; a rule stands where a span begins, and where the last ends."""
    if not spans:
        return []
    ordered = sorted(spans, key=lambda span: span.begin)
    bands = [
        {"time": scales.time(span.begin), "until": scales.time(span.end), "odd": i % 2}
        for i, span in enumerate(ordered)
    ]
    edges = sorted({band["time"] for band in bands} | {bands[-1]["until"]})
    return [
        alt.Chart(alt.InlineData(values=bands))
        .mark_rect(clip=True, color=INK)
        .encode(x=scales.x, x2="until:Q", opacity=alt.condition("datum.odd", alt.value(0.05), alt.value(0.015))),
        alt.Chart(alt.InlineData(values=[{"time": edge} for edge in edges]))
        .mark_rule(clip=True, color=FAINT, strokeDash=[3, 3], strokeWidth=1, opacity=0.7)
        .encode(x=scales.x),
    ]


def _span_labels(labels: list[_SpanLabel], scales: _Scales) -> list[alt.Chart]:
    layers = []
    for label in labels:
        place = alt.Chart(alt.InlineData(values=[{"time": scales.time(round(label.middle_us))}])).encode(
            x=scales.x, y=alt.value((label.line + 0.7) * _LINE_PX)
        )
        layers += _haloed(place, text=label.text, clip=True, fontWeight="bold", baseline="middle")
    return layers


def _level(guide: Guide, scales: _Scales, *, left: bool) -> list[alt.Chart]:
    """A line over the whole width, named at the side where the peak is not."""
    line = alt.Chart(alt.InlineData(values=[{"bytes": scales.bytes(guide.y[0])}])).encode(y=scales.y)
    side = {"x": 6, "align": "left"} if left else {"x": WIDTH - 6, "align": "right"}
    text = f"{printable(guide.name)} {format_bytes(guide.y[0])}"
    return [
        line.mark_rule(color=INK, strokeDash=[8, 4], strokeWidth=1.2),
        *_haloed(line, text=text, baseline="bottom", dy=-3, **side),
    ]


def _peak(at_us: float, peak_bytes: float, levels: Sequence[float], scales: _Scales) -> list[alt.Chart]:
    point = alt.Chart(alt.InlineData(values=[{"time": scales.time(at_us), "bytes": scales.bytes(peak_bytes)}])).encode(
        x=scales.x, y=scales.y
    )
    # Where a guide's line runs through the label's place, the label stands above it.
    headroom_px = (max(levels, default=peak_bytes) - peak_bytes) / scales.byte_size / scales.top * HEIGHT
    lift = -headroom_px if 0 < headroom_px < 1.5 * _LINE_PX else 0
    on_the_left = at_us < scales.end_us * 0.75
    text = f"peak {format_bytes(peak_bytes)} at {scales.time(at_us):,.4g} {scales.time_unit}"
    side = {"align": "left", "dx": 9} if on_the_left else {"align": "right", "dx": -9}
    return [
        point.mark_point(filled=True, size=60, color=INK, stroke="white", strokeWidth=1.5, opacity=1, clip=True),
        *_haloed(point, text=text, baseline="bottom", dy=lift - 4, fontWeight="bold", clip=True, **side),
    ]


def _haloed(chart: alt.Chart, **text: Any) -> list[alt.Chart]:
    """Text that stays readable over whatever it lies on."""
    return [
        chart.mark_text(stroke="white", strokeWidth=4, strokeJoin="round", color="white", opacity=0.85, **text),
        chart.mark_text(color=INK, **text),
    ]
