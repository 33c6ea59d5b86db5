"""Live memory of a device over time, stacked by category, with the phases and the peak."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import polars as pl

from stepscope.core.errors import InputError, printable
from stepscope.core.memory_notes import PhaseSpan
from stepscope.core.units import GIB, KIB, MIB, format_bytes
from stepscope.report.plots.theme import CATEGORY_COLOURS, FAINT, INK
from stepscope.report.plots.thinning import POINTS, TIME, thin

WIDTH, HEIGHT = 860, 400
_LINE_PX = 17
"""Height of a line of labels."""
_CHARACTER_PX = 6.2
"""Mean width of a character of a label, at 12 px."""


@dataclass(frozen=True, kw_only=True)
class _Scales:
    """What layers share: units, and how far the axes go."""

    time_unit: str
    time_size: float
    """Microseconds in the unit."""
    byte_unit: str
    byte_size: int
    end_us: int
    top: float
    """Upper end of the axis of bytes, in `byte_unit`."""

    @property
    def x(self) -> alt.X:
        scale = alt.Scale(domain=[0, self.end_us / self.time_size], nice=False)
        return alt.X("time:Q", scale=scale, title=f"time ({self.time_unit})", axis=alt.Axis(grid=False, tickCount=10))

    @property
    def y(self) -> alt.Y:
        scale = alt.Scale(domain=[0, self.top], nice=False, zero=True)
        return alt.Y("bytes:Q", scale=scale, title=f"live memory ({self.byte_unit})", axis=alt.Axis(tickCount=8))

    def time(self, at_us: int) -> float:
        return at_us / self.time_size

    def bytes(self, count: int) -> float:
        return count / self.byte_size


@dataclass(frozen=True, kw_only=True)
class _PhaseLabel:
    text: str
    middle_us: float
    line: int


def draw_memory_timeline(
    timeline: pl.DataFrame,
    phases: Sequence[PhaseSpan] = (),
    *,
    title: str,
    subtitle: str = "",
    reserved_bytes: int | None = None,
    points: int = POINTS,
    interactive: bool = False,
) -> alt.TopLevelMixin:
    """Stacked steps of live bytes.

    timeline: `time_us` (int64, ascending, from 0) and one int64 column of live bytes for each category; a row holds
    from its moment until the next row's. phases: on the same clock. reserved_bytes: the most that the allocator had
    reserved. interactive: zoom on time, and the figures of the moment under the pointer.
    Raises InputError where there is nothing to draw.
    """
    categories = stacked_categories(timeline)
    if not categories:
        raise InputError("no memory was live at any moment: there is nothing to plot")
    timeline = timeline.select(TIME, *categories)
    total = timeline.select(pl.sum_horizontal(categories)).to_series()
    peak = timeline.row(total.arg_max() or 0, named=True)
    peak_bytes = sum(peak[name] for name in categories)
    end_us = max(timeline[TIME][-1], *(phase.end_us for phase in phases), 1)
    labels = _place_phases(phases, end_us)
    lines = 1 + max((label.line for label in labels), default=-1)
    highest = max(peak_bytes, reserved_bytes or 0)
    byte_unit, byte_size = next(((u, s) for u, s in (("GiB", GIB), ("MiB", MIB)) if highest >= s / 2), ("KiB", KIB))
    time_unit, time_size = next(((u, s) for u, s in (("s", 1e6), ("ms", 1e3)) if end_us >= 5 * s), ("µs", 1.0))
    scales = _Scales(
        time_unit=time_unit, time_size=time_size, byte_unit=byte_unit, byte_size=byte_size, end_us=end_us,
        # Above the highest there is room for the phases' names, and for a line that names the peak or the reserve.
        top=highest / byte_size / (1 - (lines + 1.8) * _LINE_PX / HEIGHT),
    )  # fmt: skip
    data = _table(thin(timeline, points), categories)
    layers = [
        *_bands(phases, scales),
        *_areas(data, categories, peak, scales),
        *_phase_labels(labels, scales),
        *_reserved(reserved_bytes, scales, left=peak[TIME] > end_us / 2),
        *_peak(peak[TIME], peak_bytes, reserved_bytes, scales),
    ]
    if interactive:
        layers.append(_pointer(data, categories, scales))
    heading = alt.TitleParams(printable(title), subtitle=printable(subtitle))
    return alt.layer(*layers, width=WIDTH, height=HEIGHT, title=heading)


def stacked_categories(timeline: pl.DataFrame) -> list[str]:
    """The columns that ever hold a byte, from the ground of the stack up."""
    held = {name for name in timeline.columns if name != TIME and timeline.select((pl.col(name) > 0).any()).item()}
    known = [name for name in CATEGORY_COLOURS if name in held]
    return [*known, *(name for name in timeline.columns if name in held and name not in known)]


def _table(timeline: pl.DataFrame, categories: list[str]) -> alt.InlineData:
    """The rows as CSV inside the chart, in bytes as they were counted: a third of the same rows as JSON.

    `lowest` is the place in the stack of the lowest category that changed since the row before; the edges of those
    under it stand still.
    """
    changed = [pl.when(pl.col(name).diff().fill_null(1) != 0).then(pl.lit(i)) for i, name in enumerate(categories)]
    lowest = pl.coalesce(*changed, pl.lit(len(categories)))
    # The last row ends every edge.
    lowest = pl.when(pl.int_range(pl.len()) == pl.len() - 1).then(0).otherwise(lowest)
    text = timeline.with_columns(lowest=lowest).write_csv()
    return alt.InlineData(
        values=text,
        format=alt.CsvDataFormat(type="csv", parse=dict.fromkeys((TIME, *categories, "lowest"), "number")),
    )


def _areas(data: alt.InlineData, categories: list[str], peak: dict[str, Any], scales: _Scales) -> list[alt.Chart]:
    """One area a category; the chart adds them up."""
    sizes = {name: f"{name}: {format_bytes(peak[name])}" for name in categories}
    colours = [CATEGORY_COLOURS.get(name, FAINT) for name in categories]
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
                time=f"datum.{TIME} / {scales.time_size}",
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
            time=f"datum.{TIME} / {scales.time_size}",
            **{f"{name} shown": f"({value}) / {scales.byte_size}" for name, value in shown.items()},
        )
        .mark_rule(color=INK, strokeWidth=1)
        .encode(x=scales.x, opacity=alt.condition(moment, alt.value(0.8), alt.value(0)), tooltip=tooltip)
        .add_params(moment, zoom)
    )


def _place_phases(phases: Sequence[PhaseSpan], end_us: int) -> list[_PhaseLabel]:
    """Each name over the middle of its phase, on the first line with room; names that find none are left out."""
    taken = [0.0, 0.0, 0.0]
    """For each line of labels, the pixels from the left that are used."""
    placed = []
    for phase in sorted(phases, key=lambda phase: phase.start_us):
        text = printable(phase.name)
        width = (len(text) + 2) * _CHARACTER_PX
        middle = (phase.start_us + phase.end_us) / 2 / end_us * WIDTH
        middle = min(max(middle, width / 2), WIDTH - width / 2)
        line = next((i for i, used in enumerate(taken) if used <= middle - width / 2), None)
        if line is not None:
            taken[line] = middle + width / 2
            placed.append(_PhaseLabel(text=text, middle_us=middle / WIDTH * end_us, line=line))
    return placed


def _bands(phases: Sequence[PhaseSpan], scales: _Scales) -> list[alt.Chart]:
    """Every second phase lies on grey; a rule stands where a phase begins, and where the last ends."""
    if not phases:
        return []
    ordered = sorted(phases, key=lambda phase: phase.start_us)
    bands = [
        {"time": scales.time(phase.start_us), "until": scales.time(phase.end_us), "odd": i % 2}
        for i, phase in enumerate(ordered)
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


def _phase_labels(labels: list[_PhaseLabel], scales: _Scales) -> list[alt.Chart]:
    layers = []
    for label in labels:
        place = alt.Chart(alt.InlineData(values=[{"time": scales.time(round(label.middle_us))}])).encode(
            x=scales.x, y=alt.value((label.line + 0.7) * _LINE_PX)
        )
        layers += _haloed(place, text=label.text, clip=True, fontWeight="bold", baseline="middle")
    return layers


def _reserved(reserved_bytes: int | None, scales: _Scales, *, left: bool) -> list[alt.Chart]:
    """The line of what the allocator reserved, named at the side where the peak is not."""
    if reserved_bytes is None:
        return []
    line = alt.Chart(alt.InlineData(values=[{"bytes": scales.bytes(reserved_bytes)}])).encode(y=scales.y)
    side = {"x": 6, "align": "left"} if left else {"x": WIDTH - 6, "align": "right"}
    return [
        line.mark_rule(color=INK, strokeDash=[8, 4], strokeWidth=1.2),
        *_haloed(line, text=f"reserved {format_bytes(reserved_bytes)}", baseline="bottom", dy=-3, **side),
    ]


def _peak(at_us: int, peak_bytes: int, reserved_bytes: int | None, scales: _Scales) -> list[alt.Chart]:
    point = alt.Chart(alt.InlineData(values=[{"time": scales.time(at_us), "bytes": scales.bytes(peak_bytes)}])).encode(
        x=scales.x, y=scales.y
    )
    # Where the line of the reserve runs through the label's place, the label stands above it.
    headroom_px = ((reserved_bytes or peak_bytes) - peak_bytes) / scales.byte_size / scales.top * HEIGHT
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
