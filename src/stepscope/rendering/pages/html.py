"""A page as HTML: tables with their figures as text and as numbers to sort by, plots as inline SVG; and redacted."""

import base64
import contextlib
import getpass
import hashlib
import html
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from typing import Any, NamedTuple

import msgspec

from stepscope.core.answer import SEVERITIES, Answer, Cell, Doubted, Line, Panel, Table, name_of
from stepscope.core.errors import printable
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
from stepscope.rendering.pages import GENERATOR, Page, RunIndex, Section
from stepscope.rendering.picture import draw_svg
from stepscope.traces.captures.answer import IDLE

# Icicles, timelines and heat maps as what the template places: shares of the width, and classes for colours.


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


OWN = ("icicle", "timeline", "heat")
"""Kinds of panel that the template draws itself, so that they can be opened, zoomed and read aloud."""
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

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_file),
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
            50 + 19 * len(one["heat"].rows) if "heat" in one else 90 + 30 * (one.get("depth") or len(one["lanes"]))
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
        "own": [_own(panel) for panel in answer.panels if panel.kind in OWN],
        "tables": tables,
        "sentences": sentences,
        "asides": answer.asides,
        "origin": answer.origin,
    }


def _own(panel: Panel) -> dict[str, object]:
    about: dict[str, object] = {
        "kind": panel.kind,
        "heading": panel.frame.heading,
        "note": panel.frame.note,
        "across": panel.x_title,
        "down": panel.frame.line_title,
    }
    if panel.kind == "icicle":
        shown = tiles(panel)
        return {**about, "tiles": shown, "depth": max((tile.depth for tile in shown), default=0) + 1}
    if panel.kind == "timeline":
        found_lanes, hues = lanes(panel)
        return {**about, "lanes": found_lanes, "hues": hues, "ends": panel.frame.x_ends or (0.0, 1.0)}
    return {**about, "heat": heat(panel)}


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
