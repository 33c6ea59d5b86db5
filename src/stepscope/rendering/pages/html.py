"""A page as HTML: tables with their figures as text and as numbers to sort by, plots as inline SVG; and redacted."""

import base64
import contextlib
import getpass
import hashlib
import html
import importlib.util
import itertools
import math
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from stepscope.core.answer import SEVERITIES, Answer, Cell, Doubted, Line, Panel, Point, Table, name_of
from stepscope.core.errors import InputError, printable
from stepscope.core.units import GIB, KIB, MIB, TIB, counted, figure_text
from stepscope.rendering.cells import (
    COLOURS,
    bare_row,
    icicle_places,
    is_figures,
    row_texts,
    sentences_of,
    unit_of,
    where_of,
)
from stepscope.rendering.charts import (
    HOLLOW,
    MOST_DOTS,
    Series,
    bars_of,
    line_widths,
    name_of_bar,
    series_of,
    why_missing,
    x_ticks,
    y_scale,
    y_ticks,
)
from stepscope.rendering.pages import GENERATOR, Page, RunIndex, Section
from stepscope.rendering.picture import draw_svg, rows_of
from stepscope.rendering.plots import BLACK, DASHES, SHAPES, colours_of
from stepscope.traces.captures.answer import IDLE

# Panels as what the template places: shares of the width, places in an SVG, and colours.


HUES = 10
"""Colours that the page has for kinds of work; further kinds share the last, a grey."""
IDLE_HUES = 6
"""Further colours, for the causes of idle time, which come behind them."""
_WHOLE = 1_000
"""Figures from here on are shown without decimals."""
_NARROWEST = 0.4
"""Thousandths of the width: what is narrower is not seen."""


class Tile(NamedTuple):
    """A part of an icicle, in shares of the width."""

    name: str
    said: str
    """Its time and its share of the whole, in words."""
    left: float
    width: float
    depth: int
    hue: int


class Bar(NamedTuple):
    """A stretch of a lane, in thousandths of the width."""

    left: float
    width: float
    hue: int
    said: str


class Lane(NamedTuple):
    """A lane of a timeline. All bars of one hue that say nothing of their own are one path."""

    name: str
    bars: tuple[Bar, ...]


def tiles(panel: Panel) -> list[Tile]:
    """The nodes of an icicle, each as wide as its value, children from the left of their parent."""
    nodes = panel.nodes
    whole = nodes[0].value if nodes else 0.0
    if whole <= 0:
        return []
    hues = _hues([(node.name, node.value) for node in nodes if node.level == "family"])
    return [
        Tile(
            name=node.name,
            said=f"{figure_text(node.value * 1e-3, 's')}, {figure_text(node.value / whole, '%')}",
            left=left / whole,
            width=node.value / whole,
            depth=depth,
            hue=hues[node.name] if node.level == "family" else -1,
        )
        for node, (left, depth) in zip(nodes, icicle_places(nodes), strict=True)
    ]


def lanes(panel: Panel) -> tuple[list[Lane], dict[str, int]]:
    """The lanes of a timeline, in their order, and the hue of each kind, that of the longest first."""
    begin, end = panel.frame.x_ends or (0.0, max((one.end for one in panel.slices), default=1.0))
    span = end - begin or 1.0
    hues = _hues([(one.kind, one.end - one.begin) for one in panel.slices])
    bars: dict[str, list[Bar]] = {}
    for one in panel.slices:
        what = one.name or (f"{one.count} short pieces of work, most of them {one.kind}" if one.count > 1 else one.kind)
        kind = f", {one.kind}" if one.name else ""
        text = f"{what}{kind}: {figure_text((one.end - one.begin) * 1e-3, 's')}"
        bars.setdefault(one.lane, []).append(
            Bar(
                left=round((one.begin - begin) / span * 1000, 3),
                width=round(max((one.end - one.begin) / span * 1000, _NARROWEST), 3),
                hue=hues[one.kind],
                said=text,
            )
        )
    return [Lane(name=name, bars=tuple(of_lane)) for name, of_lane in bars.items()], hues


def _hues(kinds: Sequence[tuple[str, float]]) -> dict[str, int]:
    """A number for each kind: its own, or that of its place among the others: work, and behind it causes of idle time,
    the longest first."""
    totals: Counter[str] = Counter()
    for kind, value in kinds:
        totals[kind] += value  # type: ignore[assignment]
    known = {kind: HUES + IDLE_HUES + place for place, kind in enumerate(COLOURS) if kind in totals}
    ordered = sorted(totals.keys() - known.keys(), key=lambda kind: (-totals[kind], kind))
    work, idle = ([kind for kind in ordered if kind.startswith(IDLE) is wanted] for wanted in (False, True))
    hues = {
        **known,
        **{kind: min(place, HUES - 1) for place, kind in enumerate(work)},
        **{kind: HUES + min(place, IDLE_HUES - 1) for place, kind in enumerate(idle)},
    }
    return dict(sorted(hues.items(), key=lambda one: -totals[one[0]]))


class Heat(NamedTuple):
    """A heat map as a table: its columns, and its rows of a name and cells of text and strength from 0 to 1."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[str, float | None], ...]], ...]


def heat(panel: Panel) -> Heat:
    """The cells of a heat map. Strength is by rank on the scale of values; a missing cell has none, and its reason."""
    columns = tuple(dict.fromkeys(point.name for point in panel.points))
    with contextlib.suppress(ValueError):  # names that are all numbers stand by their size
        columns = tuple(sorted(columns, key=float))
    lines = tuple(dict.fromkeys(point.line for point in panel.points))
    at = {(point.line, point.name): point for point in panel.points}
    values = [point.y for point in panel.points if not point.missing]
    low, high = min(values, default=0.0), max(values, default=1.0)
    span = high - low or 1.0

    def cell(line: str, column: str) -> tuple[str, float | None]:
        point = at.get((line, column))
        if point is None:
            return "", None
        if point.missing:
            return point.missing, None
        return f"{point.y:,.0f}" if abs(point.y) >= _WHOLE else f"{point.y:.4g}", (point.y - low) / span

    rows = tuple((line, tuple(cell(line, column) for column in columns)) for line in lines)
    return Heat(columns=columns, rows=rows)


class Strip(NamedTuple):
    """A part of a bar, in % of the track."""

    left: float
    width: float
    colour: str
    said: str
    doubted: bool


class BarRow(NamedTuple):
    """A row of a table of bars: the name is empty where the row above has it."""

    name: str
    strips: tuple[Strip, ...]
    between: tuple[float, float] | None
    """Where the interval begins and how wide it is, in % of the track."""
    text: str


def bar_rows(panel: Panel) -> list[BarRow]:
    """A row for each bar, or for each stack of bars. Raises InputError where `charts.bars_of` does."""
    known, names, lines, log_ends = bars_of(panel)
    colours = dict(zip(lines, map(_ink, colours_of(lines)), strict=True))
    if len(lines) == 1 and all(name in COLOURS for name in names):
        colours = {name: _ink(COLOURS[name]) for name in names}
    of_name: dict[str, list[Point]] = {}
    for point in panel.points:
        of_name.setdefault(name_of_bar(point), []).append(point)
    totals = [sum(point.y for point in points if point.is_drawn) for points in of_name.values()]
    values = totals if panel.kind == "stack" else [v for p in known for v in (p.y, p.low, p.high) if v is not None]
    low, high = log_ends or (min(0.0, *values), max(0.0, *values))
    place = _scale(low, high, (0.0, 100.0), log=log_ends is not None)
    ground = place(low) if log_ends else place(0.0)

    def strip(point: Point, begin: float, end: float) -> Strip:
        line, name = printable(point.line), name_of_bar(point)
        between = f" ({point.low:.4g} to {point.high:.4g})" if point.low is not None and point.high is not None else ""
        left, right = sorted((begin, end))
        text = f"{name}, {line}: {point.y:.4g}{between}"
        return Strip(round(left, 3), round(right - left, 3), colours.get(line) or colours[name], text, point.doubted)

    rows: list[BarRow] = []
    for (name, points), total in zip(of_name.items(), totals, strict=True):
        points.sort(key=lambda point: lines.index(printable(point.line)))
        if panel.kind == "stack":
            ends = list(itertools.accumulate((point.y if point.is_drawn else 0.0 for point in points), initial=0.0))
            strips = [
                strip(point, place(begin), place(end))
                for point, begin, end in zip(points, ends, ends[1:], strict=False)
                if point.is_drawn
            ]
            rows.append(BarRow(name, tuple(strips), None, f"{total:,.4g}" if strips else why_missing(points[0])))
            continue
        for i, point in enumerate(points):
            strips = (strip(point, ground, place(point.y)),) if point.is_drawn else ()
            between = None
            if strips and point.low is not None and point.high is not None:
                between = (round(place(point.low), 3), round(place(point.high) - place(point.low), 3))
            rows.append(BarRow("" if i else name, strips, between, why_missing(point) or f"{point.y:,.4g}"))
    return rows


def _scale(low: float, high: float, to: tuple[float, float], *, log: bool) -> Callable[[float], float]:
    """From values to places; the middle where there is but one value."""
    begin, end = (math.log(low), math.log(high)) if log else (low, high)
    first, last = to
    if begin == end:
        return lambda _: (first + last) / 2
    return lambda value: first + ((math.log(value) if log else value) - begin) / (end - begin) * (last - first)


def _ink(colour: str) -> str:
    """Black is what text is written in, on a light ground and on a dark one."""
    return "var(--ink)" if colour == BLACK else colour


class Mark(NamedTuple):
    """What is drawn in the colour of a line: a path with its dashes and width, a symbol at a place, or a word there."""

    colour: str
    path: str = ""
    dash: str = ""
    width: int = 0
    x: float = 0.0
    y: float = 0.0
    said: str = ""
    hollow: bool = False


class Axes(NamedTuple):
    """Curves over two axes, in the pixels of a picture."""

    width: int
    height: int
    left: int
    """Where the axis of y stands; that of x stands at `bottom`."""
    bottom: int
    x_title: str
    y_title: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    curves: list[Mark]
    dots: list[Mark]
    words: list[Mark]


class Curves(NamedTuple):
    """Panels side by side, and what their colours and dashes stand for."""

    charts: list[Axes]
    titles: tuple[str, str]
    """What colours stand for, and what dashes or symbols do."""
    lines: list[tuple[str, str]]
    """Names and colours; empty where there is but one."""
    styles: list[tuple[str, str, str]]
    """Names, dashes and paths of symbols; empty where there is but one."""
    dashed: bool
    """Whether dashes tell styles, not symbols."""


_SYMBOL_PATHS = {
    "circle": "M-4.4,0a4.4,4.4 0 1 0 8.8,0a4.4,4.4 0 1 0 -8.8,0z",
    "square": "M-3.9,-3.9h7.8v7.8h-7.8z",
    "triangle-up": "M0,-4.8L4.8,4.2H-4.8z",
    "diamond": "M0,-5.4L4.2,0L0,5.4L-4.2,0z",
    "cross": "M-1.7,-5.1h3.4v3.4h3.4v3.4h-3.4v3.4h-3.4v-3.4h-3.4v-3.4h3.4z",
    "triangle-down": "M0,4.8L4.8,-4.2H-4.8z",
    "triangle-right": "M4.8,0L-4.2,4.8V-4.8z",
    "triangle-left": "M-4.8,0L4.2,4.8V-4.8z",
}
_LEFT_PX, _RIGHT_PX, _TOP_PX, _BELOW_PX, _PADDING_PX, _DIGIT_PX = 70, 16, 8, 46, 14, 7
_INTERVAL_PX = 1


def curves(panels: Sequence[Panel]) -> Curves:
    """Panels of curves over one axis of x. Raises InputError where `charts.series_of` or `charts.y_scale` does."""
    series = series_of(panels)
    colours = dict(zip(series.lines, map(_ink, colours_of(series.lines)), strict=True))
    dashed = len(series.styles) > 1 and series.joined
    dashes = {style: " ".join(map(str, DASHES[i])) if dashed and i else "" for i, style in enumerate(series.styles)}
    symbols = {style: _SYMBOL_PATHS[SHAPES[0 if dashed else i]] for i, style in enumerate(series.styles)}
    frame = series.panels[0].frame
    return Curves(
        charts=[_axes(panel, series, colours, dashes, symbols) for panel in series.panels],
        titles=(frame.line_title, frame.style_title),
        lines=list(colours.items()) if len(colours) > 1 else [],
        dashed=dashed,
        styles=[(name, dashes[name], symbols[name]) for name in series.styles] if len(series.styles) > 1 else [],
    )


def _axes(
    panel: Panel, series: Series, colours: dict[str, str], dashes: dict[str, str], symbols: dict[str, str]
) -> Axes:
    """One panel: its lines, the intervals of its points, its points, and words for figures that are missing."""
    width, height = (640, 400) if len(series.panels) == 1 else (430, 300)
    right, bottom = _LEFT_PX + width, _TOP_PX + height
    log, ends = y_scale(panel, series.panels)
    x = _scale(series.xs[0], series.xs[-1], (_LEFT_PX + _PADDING_PX, right - _PADDING_PX), log=series.x_log)
    y = _scale(*ends, (bottom, _TOP_PX), log=log)
    of_line: dict[tuple[str, str], list[Point]] = {}
    for point in panel.points:
        if point.is_drawn:
            of_line.setdefault((point.line, point.style), []).append(point)
    widths = line_widths([point for points in of_line.values() for point in points])
    drawn, dots = [], []
    last: dict[str, float] = {}
    for (line, style), points in of_line.items():
        colour, style_name = colours[printable(line)], printable(style)
        points.sort(key=lambda point: point.x)
        last[line] = points[-1].y
        path = "M" + "L".join(f"{x(point.x):.1f},{y(point.y):.1f}" for point in points)
        drawn.append(Mark(colour, path=path, dash=dashes[style_name], width=widths[line, style]))
        drawn += [
            Mark(colour, path=f"M{x(one.x):.1f},{y(one.low):.1f}V{y(one.high):.1f}", width=_INTERVAL_PX)
            for one in points
            if one.low is not None and one.high is not None
        ]
        for one in points if len(points) <= MOST_DOTS else ():
            text = ", ".join(part for part in (printable(line), style_name) if part)
            said = f"{text}: {one.x:,.4g}, {one.y:,.4g}"
            at_x, at_y = round(x(one.x), 1), round(y(one.y), 1)
            dots.append(Mark(colour, symbols[style_name], x=at_x, y=at_y, said=said, hollow=one.doubted))
    words: list[Mark] = []
    taken: Counter[tuple[float, float]] = Counter()
    for one in panel.points:
        if not one.is_drawn:  # at the height of its line's last point; at the top where the line has none
            at = round(x(one.x), 1), round(y(last[one.line]) if one.line in last else _TOP_PX, 1)
            taken[at] += 1
            height = at[1] + 15 * taken[at]
            words.append(Mark(colours[printable(one.line)], x=at[0], y=height, said=why_missing(one)))
    return Axes(
        width=right + _RIGHT_PX,
        height=bottom + _BELOW_PX,
        left=_LEFT_PX,
        bottom=bottom,
        x_title=panel.x_title,
        y_title=panel.y_title,
        x_ticks=_apart([(x(at), text) for at, text in x_ticks(series.xs, log=series.x_log)]),
        y_ticks=[(round(y(at), 1), text) for at, text in y_ticks(*ends, log=log)],
        curves=drawn,
        dots=dots,
        words=words,
    )


def _apart(ticks: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """The ticks whose labels, centred, do not run into the one before."""
    kept: list[tuple[float, str]] = []
    end = -math.inf
    for at, text in ticks:
        half = (len(text) + 1) * _DIGIT_PX / 2
        if at - half >= end:
            kept.append((round(at, 1), text))
            end = at + half
    return kept


OWN = ("icicle", "timeline", "heat", "bars", "stack", "curves")
"""Kinds of panel that the template draws itself, so that they can be opened, zoomed and read aloud, and Vega need not
start."""
_LONGEST_SENTENCE = 4000
_FILTERED_FROM = 8
"""Rows from which a table has a field to filter by."""
_MOST_ROWS = 5_000
"""Rows of a table that a page holds: more make it slow to open, and the verb's --json has them all."""
_HEIGHT = re.compile(r'<svg[^>]* height="([0-9.]+)')
_SUM = re.compile(r"all|together|total|the step|step|\d[\d,]* (?:more|others?)\b.*")
"""Names of rows that are no parts."""
_SHOWN_FINDINGS, _SHOWN_LINES = 3, 3
"""Findings of a page, and sentences below a table, that are not folded."""
_SCREENS_PX = 2_200
"""About three screens of 900 pixels without the head of the page: sections below are folded, a line each."""
_SYMBOLS = {"error": "✕", "warning": "!", "note": "i"}


class _Head(NamedTuple):
    text: str
    number: bool


class _Cell(NamedTuple):
    text: str
    value: str
    """The bare figure, which the page sorts by; empty where there is none."""
    number: bool


class _Row(NamedTuple):
    cells: list[_Cell]
    tone: str
    rule: bool
    last: bool
    """Whether it is no part but a sum or a rest, which stays at the end however the parts are sorted."""


class _Table(NamedTuple):
    title: str
    heads: list[_Head]
    rows: list[_Row]
    notes: list[Line]
    filtered: bool
    left_out: int
    folded: bool
    """Whether only its title is seen at first: what leads a section stays open."""

    @property
    def gist(self) -> str:
        return counted(len(self.rows) + self.left_out, "row")


def render_page(page: Page, draw: Callable[[Sequence[Answer]], list[str]] | None = None) -> str:
    """The page as HTML. Every text in it is data: markup in a name is shown as it is written.

    draw: what makes an SVG of each of several answers, where it is not this process.
    """
    import jinja2  # noqa: PLC0415  (only where a page is written)

    # What the template compiles to is kept beside compiled modules, where Python keeps those: a tenth of a second.
    compiled = str(Path(importlib.util.cache_from_source(__file__)).parent)
    kept = not sys.dont_write_bytecode and os.access(compiled, os.W_OK)
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_file),
        bytecode_cache=jinja2.FileSystemBytecodeCache(compiled, f"{jinja2.__version__}-%s.jinja") if kept else None,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["cut"] = lambda text: printable(text, _LONGEST_SENTENCE)
    to_draw = [_to_draw(one.answer) for one in page.sections]
    drawn = iter(draw(pictures_of(page)) if draw is not None else map(draw_svg, pictures_of(page)))
    pictures = ["" if one is None else next(drawn) for one in to_draw]
    findings = sorted(page.findings, key=lambda one: SEVERITIES.index(one.severity))
    shown = sum(one.severity != "note" for one in findings[:_SHOWN_FINDINGS]) or min(1, len(findings))
    script = _file("page.js") + (_file("index.js") if page.index is not None else "")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("page.html").render(
        page=page,
        generator=GENERATOR,
        index=_index(page.index) if page.index is not None else None,
        sections=_folded(
            [_section(one, place, svg) for place, (one, svg) in enumerate(zip(page.sections, pictures, strict=True))],
            110 * shown,
        ),
        findings=findings,
        shown=shown,
        most_lines=_SHOWN_LINES,
        symbols=_SYMBOLS,
        css=_file("page.css")
        + "".join(
            f".h{HUES + IDLE_HUES + place} {{ fill: {colour}; background: {colour}; }}\n"
            for place, colour in enumerate(COLOURS.values())
        ),
        script=script,
        script_digest=digest,
    )


_MOST_WITHOUT_SCRIPT = 100
"""Runs of an index that are seen where no script runs."""


def _index(runs: RunIndex) -> dict[str, Any]:
    """The runs as data for the script, and the newest of them as rows for whoever runs none."""
    figures, columns = runs.figures, ("created", "cell", "status", "step", "peak")
    newest = list(zip(*(figures[name][:_MOST_WITHOUT_SCRIPT] for name in columns), strict=True))
    data = msgspec.json.encode(runs).decode().replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return {
        "data": data,
        "count": len(figures["id"]),
        "devices": sorted(set(runs.devices)),
        "rows": [(when, runs.names[int(cell or 0)], status, step, peak) for when, cell, status, step, peak in newest],
    }


def _file(name: str) -> str:
    return (resources.files("stepscope.rendering.pages") / name).read_text(encoding="utf-8")


def _folded(sections: list[dict[str, Any]], used_px: int) -> list[dict[str, Any]]:
    """The sections; those stay open that show figures within the first three screens, with a table where it fits."""
    for section in sections:
        pictures_px = sum(int(float(height)) for svg in section["pictures"] for height in _HEIGHT.findall(svg)[:1])
        own_px = sum(
            # Two maps stand abreast.
            50 + 19 * len(one["heat"].rows)
            if "heat" in one
            else 480 * ((len(one["curves"].charts) + 1) // 2)
            if "curves" in one
            else 90 + (22 if "bars" in one else 30) * one["rows"]
            for one in section["own"]
        )
        leading = [table for table in section["tables"] if not table.folded]
        titles_px = 100 + 32 * sum(bool(table.heads) for table in section["tables"])
        tables_px = sum(40 + 31 * len(table.rows) for table in leading if table.heads)
        lines_px = 34 * sum(min(_SHOWN_LINES, len(table.notes)) for table in leading)
        room_px, drawn_px = _SCREENS_PX - used_px, titles_px + pictures_px + own_px
        whole_px = drawn_px + tables_px + lines_px
        if drawn_px > titles_px and whole_px > room_px >= drawn_px:  # its plots, and its tables by their titles
            whole_px = drawn_px
            section["tables"] = [
                table._replace(folded=True, title=table.title or "in figures") if table.heads else table
                for table in section["tables"]
            ]
        section["open"] = len(sections) == 1 or (whole_px > titles_px + lines_px and whole_px <= room_px)
        used_px += whole_px if section["open"] else 46
    return sections


def _section(section: Section, place: int, svg: str) -> dict[str, Any]:
    title, answer = section.title, section.answer
    where = where_of(answer) if answer.device or answer.versions else ""
    lead = [*answer.lead, *([Line(where)] if where and not answer.lead else [])]
    sentences = sentences_of(answer) if answer.findings else []
    drawn = bool(svg) or any(panel.kind in OWN for panel in answer.panels)
    heads = [table for table in answer.tables if table.columns]
    tables = [
        _table(table, alone=len(heads) == 1, folded=bool(table.columns) and (table is not heads[0]))
        for table in answer.tables
    ]
    contents = [
        *([counted(len(answer.panels), "plot")] if drawn else []),
        *([counted(len(heads), "table")] if len(heads) > 1 else [table.gist for table in tables if table.heads]),
    ]
    sentence = next((line.text for line in (*lead, *sentences)), "")
    return {
        "gist": ", ".join(contents) or sentence or next(iter((*answer.asides, *answer.origin)), ""),
        "id": f"s{place}-{re.sub('[^a-z0-9]+', '-', title.casefold()).strip('-')}",
        "title": title,
        "part": section.part,
        "commands": section.commands,
        "lead": lead,
        "pictures": _pictures(svg, place, title),
        "own": list(_figures(answer.panels)),
        "tables": tables,
        "sentences": sentences,
        "asides": answer.asides,
        "origin": answer.origin,
    }


def _figures(panels: Sequence[Panel]) -> Iterator[dict[str, object]]:
    """The figures that the template draws, without those that hold more than can be told apart."""
    own = [panel for panel in panels if panel.kind in OWN]
    for row in rows_of(own):
        with contextlib.suppress(InputError):
            yield _own(row)


def _own(row: Sequence[Panel]) -> dict[str, object]:
    """A panel, or curves that share an axis, for the template. Raises InputError where they cannot be told apart."""
    panel = row[0]
    doubted = any(point.doubted for one in row for point in one.points)
    notes = [*dict.fromkeys(one.frame.note for one in row), *([HOLLOW] if doubted else [])]
    about: dict[str, object] = {
        "kind": panel.kind,
        "heading": panel.frame.heading,
        "note": "; ".join(filter(None, notes)),
        "across": panel.x_title,
        "down": panel.frame.line_title,
    }
    match panel.kind:
        case "icicle":
            shown = tiles(panel)
            return {**about, "tiles": shown, "rows": max((tile.depth for tile in shown), default=0) + 1}
        case "timeline":
            found, hues = lanes(panel)
            return {**about, "lanes": found, "rows": len(found), "hues": hues, "ends": panel.frame.x_ends or (0.0, 1.0)}
        case "heat":
            return {**about, "heat": heat(panel)}
        case "curves":
            return {**about, "curves": curves(row)}
    rows, lines = bar_rows(panel), bars_of(panel).lines
    legend = zip(lines, map(_ink, colours_of(lines)), strict=True) if len(lines) > 1 else ()
    return {**about, "kind": "bars", "bars": rows, "rows": len(rows), "legend": list(legend), "figure": panel.y_title}


def _table(table: Table, *, alone: bool, folded: bool) -> _Table:
    """A table with a title over it, where the section has others or the table names itself."""
    texts = [_in_one_unit(table, row, shown) for row, shown in zip(table.rows, row_texts(table), strict=True)]
    numbers = [is_figures(table, column) for column in range(len(table.columns))]
    # Bare figures carry no mark of doubt.
    undoubted = (tuple(getattr(cell, "value", cell) for cell in row) for row in table.rows)
    plain = msgspec.structs.replace(table, rows=tuple(undoubted))
    sums = len(table.rows)  # the place of the first of the rows that end the table with sums and rests
    if len(table.rules) == 1:
        sums = table.rules[0]
    else:
        while sums and _SUM.fullmatch(str(table.rows[sums - 1][0])):
            sums -= 1
    rows = [
        _Row(
            cells=[
                _Cell(text=text, value="" if value is None or not number else str(value), number=number)
                for text, value, number in zip(shown, bare_row(plain, row), numbers, strict=True)
            ],
            tone=table.tones.get(place, ""),
            rule=place in table.rules,
            last=place >= sums,
        )
        for place, (shown, row) in enumerate(zip(texts, plain.rows, strict=True))
    ]
    return _Table(
        title=table.title if alone else name_of(table),
        heads=[_Head(text=printable(name), number=number) for name, number in zip(table.columns, numbers, strict=True)],
        rows=rows[:_MOST_ROWS],
        notes=list(table.notes),
        filtered=len(rows) >= _FILTERED_FROM,
        left_out=max(0, len(rows) - _MOST_ROWS),
        folded=folded,
    )


_SCALES: dict[str, dict[str, float]] = {
    "s": {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    "B": {"TiB": TIB, "GiB": GIB, "MiB": MIB, "KiB": KIB, "B": 1},
}
_LEAST_IN_UNIT = 0.01
"""What would be less than this in the unit of its row keeps a unit of its own."""


def _in_one_unit(table: Table, row: tuple[Cell, ...], texts: list[str]) -> list[str]:
    """The texts of a row, its times in one unit and its bytes in one: that of its intervals, else of the largest."""
    for unit, scales in _SCALES.items():
        bare = [cell.value if isinstance(cell, Doubted) else cell for cell in row]
        cells = {
            place: float(value)
            for place, value in enumerate(bare)
            if unit_of(table, place) == unit and isinstance(value, (int, float)) and value
        }
        name = "ms" if unit == "s" and any(text.endswith(" ms") and " to " in text for text in texts) else ""
        if not cells or (len(cells) == 1 and not name):
            continue
        name = name or figure_text(max(cells.values(), key=abs), unit).split()[-1]
        for place, value in cells.items():
            scaled = value / scales[name]
            if abs(scaled) >= _LEAST_IN_UNIT:
                digits = ",.0f" if abs(scaled) >= _WHOLE else ".4g"
                rescaled = f"{scaled:{digits if unit == 's' else ',.2f'}} {name}"
                texts[place] = texts[place].replace(figure_text(value, unit), rescaled, 1)
    return texts


def pictures_of(page: Page) -> list[Answer]:
    """What rendering/picture.py is to draw for a page, in order."""
    return [wanted for one in page.sections if (wanted := _to_draw(one.answer)) is not None]


def _to_draw(answer: Answer) -> Answer | None:
    """The panels that rendering/picture.py draws, and nothing else of the answer; None where there are none."""
    panels = tuple(panel for panel in answer.panels if panel.kind not in OWN)
    if not any(panel.points for panel in panels):
        return None
    return msgspec.structs.replace(answer.body(), panels=panels, tables=(), findings=())


def _pictures(svg: str, place: int, title: str) -> list[str]:
    """A picture as it stands in the page; nothing where there is none."""
    if not svg:
        return []
    # Two pictures of one page must not share the names of their clips.
    svg = re.sub(r'(\bid="|url\(#)((?:clip|gradient_)\d+)', rf"\1p{place}-\2", svg)
    # The picture is one thing with one name: the tables beside it hold its figures.
    svg = re.sub(r' (?:role|aria-[a-z]+)="[^"]*"', "", svg)
    return [svg.replace("<svg ", f'<svg role="img" aria-label="Plot: {html.escape(printable(title))[:200]}" ', 1)]


# A page without what tells who measured it where: names of hosts and users, paths, arguments, lines of source.


_QUOTED = r"\"[^\"\n]*[\\/][^\"\n]*\"|'[^'\n]*[\\/][^'\n]*'"
_PATH = (
    r"(?:file:/{2,3}|~|\b[A-Za-z]:)?(?:[\\/][\w.@+%=~-]+){2,}[\\/]?|(?<![\w/])(?:\.{1,2}/)[\w.@+%=~/-]+"
    r"|(?<![\w/\]])[\w.@+%~-]+(?:/[\w.@+%~-]+){2,}"
)
_SOURCE = r"[\w./\\-]+\.(?:py|cu|cpp|cc|h|pyx)(?::\w+)?(?::\d+)?(?:\([^)]*\))?"
_MADE_BY = r"(made by )\S+(?: with [^)]*)?"
_WATCHED_IN = r"(watched in )[^),]+"
_COMMIT = r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}\b|(?:(?<=\bat )|(?<=\bcommits ))[0-9a-f]{7,40}\b"
"""Digits and letters mixed; of a commit that is digits alone, or letters, only what stands after a word for it."""
_COMMIT_ROW = "git commit"
_TAG, _HOST = r"\b(tag )[^;,\s]+", r"\b(host(?:name)?:? )[\w.:-]+"
_PATTERN = re.compile(f"(?P<quoted>{_QUOTED})|(?P<source>{_SOURCE})|(?P<path>{_PATH})")
_COMMON = {"last", "runs", "results", "traces", "trace", "memory"}
"""Words of a path that say nothing of anybody."""


def redacted(page: Page, words: Iterable[str] = ()) -> Page:
    """The page with `[path]`, `[source]`, `[host]` and the like in their places, and without the commands that made it.

    words: what the user named, paths or names: wherever they stand, and their parts, they are left out, too.
    """
    tables = [table for section in page.sections for table in section.answer.tables]
    # A commit that a table names may be digits alone.
    commits = [str(row[1]) for table in tables for row in table.rows if row[0] == _COMMIT_ROW and len(row) > 1]
    names, named = _names(), _given([*words, *commits])

    def clean(text: str) -> str:
        text = named.sub("[path]", text) if named is not None else text
        text = re.sub(_HOST, r"\1[host]", re.sub(_TAG, r"\1[tag]", text))
        text = re.sub(_MADE_BY, r"\1[source]", re.sub(_WATCHED_IN, r"\1[source]", text))
        text = re.sub(_COMMIT, "[commit]", text)
        text = _PATTERN.sub(lambda match: "[source]" if match["source"] else "[path]", text)
        return names.sub("[host]", text) if names is not None else text

    cleaned: Page = msgspec.convert(_mapped(msgspec.to_builtins(page), clean), Page)
    figures = tuple(
        msgspec.structs.replace(one, name=old.name) for one, old in zip(cleaned.figures, page.figures, strict=True)
    )
    index = cleaned.index
    if index is not None:  # tags and commits stand alone here, without a word for them before
        without = {**index.figures, "tag": [""] * len(index.figures["id"])}
        fields = {name: values for name, values in index.fields.items() if name != "commit"}
        index = msgspec.structs.replace(index, place="", figures=without, fields=fields)
    return msgspec.structs.replace(cleaned, figures=figures, index=index, reproduce=(), shown_by=())


def _given(words: Iterable[str]) -> re.Pattern[str] | None:
    """The names that a user gave, whole and in their parts, the longest first."""
    parts_of_words: set[str] = set()
    for name in words:
        parts = [part for part in re.split(r"[\\/]", name) if len(part) > 3 and part not in _COMMON]
        parts_of_words |= {name, *parts, *(part.partition(".")[0] for part in parts)}
    kept = sorted((name for name in parts_of_words if len(name) > 3 and name not in _COMMON), key=len, reverse=True)
    # A part of a longer word is no name: `test` is none in `latest`, and `acme` is one in `acme_2`.
    return re.compile("|".join(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])" for name in kept)) if kept else None


def _names() -> re.Pattern[str] | None:
    """This machine's name and its user's, where they are long enough to be told from words."""
    names: list[str] = [socket.gethostname(), socket.gethostname().partition(".")[0]]
    with contextlib.suppress(OSError, KeyError):  # in a container a user may have no name
        names.append(getpass.getuser())
    distinct = sorted({name for name in names if len(name) > 3 and name != "localhost"}, key=len, reverse=True)
    return re.compile("|".join(rf"\b{re.escape(name)}\b" for name in distinct)) if distinct else None


_KEPT = frozenset({"kind", "study", "tone", "severity", "units", "level"})
"""Fields that hold words of stepscope's own."""


def _mapped(value: Any, clean: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {key: item if key in _KEPT else _mapped(item, clean) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(item, clean) for item in value]
    return value
