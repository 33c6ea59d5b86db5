"""An Answer: what a verb or a study found, as tables, curves, sentences and findings; and a Page of several."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
from msgspec.structs import replace

from stepscope.core.errors import InputError
from stepscope.core.files import decode_document, json_document
from stepscope.core.units import UNIT_FORMAT, UNITS

if TYPE_CHECKING:
    from stepscope.core.environment import Environment

# A Finding: what the tool concludes, in one sentence with its figures.


Severity = Literal["error", "warning", "note"]
"""error: the number cannot be trusted (exit code 1). warning: it can, with care. note: good to know."""

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


FORMER_KINDS = {"not compiling's": "process-noise"}
"""Kinds of findings in answers stored by earlier versions, and the kinds that they have now."""


Quoted = Mapping[str, float | int | str | None]
"""The figures that a sentence quotes, by name."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One conclusion. `evidence` holds the figures that the sentence quotes."""

    kind: str
    severity: Severity
    sentence: str
    remedy: str = ""
    evidence: dict[str, float | int | str | None] = {}


def _finding(severity: Severity, kind: str, sentence: str, evidence: Quoted | None = None, remedy: str = "") -> Finding:
    return Finding(kind=kind, severity=severity, sentence=sentence, remedy=remedy, evidence={**(evidence or {})})


note = partial(_finding, "note")
"""Makes a finding that is good to know."""
warning = partial(_finding, "warning")
"""Makes a finding that says to take care."""
error = partial(_finding, "error")
"""Makes a finding that says that the number cannot be trusted."""


def worst(findings: Iterable[Finding]) -> Severity | None:
    """The gravest severity present, or None."""
    present = {finding.severity for finding in findings}
    return next((severity for severity in SEVERITIES if severity in present), None)


# 1  2026-11  first
ANSWER_VERSION = 1

Tone = Literal["", "strong", "good", "bad", "care", "aside"]
"""The tone of a line or a row, where a renderer can show it: bold, good or bad news, a warning, or quiet."""


MEASURED_STEP = "measured step"
"""The axis of a curve that has a point for every step that was measured."""


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sentence and its tone."""

    text: str
    tone: Tone = ""


class Doubted(msgspec.Struct, frozen=True):
    """A figure that the findings of its own run doubt: `!` for an error, `*` for a warning."""

    value: str | float
    mark: str


Cell = str | int | float | bool | Doubted | None

TEXT = "text"
"""The unit of a column whose figures are text already: it is aligned to the right, and shown as it is."""
PROSE = "prose"
"""The unit of a column of sentences: it folds between words, however much room there is."""


class Table(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rows of one kind, and the sentences below them. Without columns it is the sentences alone."""

    title: str
    columns: tuple[str, ...]
    """Names of the columns, with the unit where the figures stand in one."""
    rows: tuple[tuple[Cell, ...], ...]
    units: tuple[str, ...] = ()
    """The unit of each column, for `core.units.figure_text`; empty where figures are shown as they are."""
    notes: tuple[Line, ...] = ()
    rules: tuple[int, ...] = ()
    """Indices of rows with a rule above them."""
    tones: dict[int, Tone] = {}
    """Tones of the rows that are not plain."""
    one_line: bool = False
    """Whether each row stays on one line: on a narrow screen columns on the right are left out."""


class Point(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A figure y at x, on a line; in a panel of bars, the bar of this name and colour."""

    line: str
    x: float = 0.0
    y: float
    doubted: bool = False
    """Whether the findings of one of its runs doubt the figure."""
    name: str = ""
    """The name of the bar, or of a single point; empty on a curve."""
    style: str = ""
    """A second property, across the lines, told by dashes."""
    low: float | None = None
    high: float | None = None
    """The ends of y's confidence interval."""
    missing: str = ""
    """Why there is no such figure, as in `OOM` or `nan`: its place is marked with it, and y means nothing."""
    apart: bool = False
    """Whether the figure is shown, and not counted with the others: its point is hollow."""

    @property
    def is_drawn(self) -> bool:
        """Whether it has a place on the axis y."""
        return not self.missing and math.isfinite(self.y)


class Span(msgspec.Struct, frozen=True):
    """A named stretch of the axis x, such as a phase of the step."""

    name: str
    begin: float
    end: float


class Guide(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What figures are held against: a line through these places, or a ribbon where `to` has its other edge."""

    y: tuple[float, ...]
    x: tuple[float, ...] = ()
    """Empty for one y over the whole width."""
    to: tuple[float, ...] = ()
    name: str = ""


class Frame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What stands round the figures of a panel. Whatever is empty is left out, or chosen by the values."""

    heading: str = ""
    """The panel's title, where the question says too little."""
    note: str = ""
    """What points and bars are, and what is not shown: a picture travels without its tables."""
    line_title: str = ""
    style_title: str = ""
    x_ends: tuple[float, float] | None = None
    y_ends: tuple[float, float] | None = None
    spans: tuple[Span, ...] = ()
    guides: tuple[Guide, ...] = ()


class Node(msgspec.Struct, frozen=True):
    """A part of a whole, in a panel of kind icicle. A node stands behind its parent; the first is the whole."""

    name: str
    value: float
    """Its children's values add up to it or to less."""
    parent: int = -1
    """The place of its parent among the nodes; -1 for the whole."""
    level: str = ""
    """What kind of part it is, such as phase, module or family: it chooses the colour."""


class Slice(msgspec.Struct, frozen=True):
    """A stretch of a lane, in a panel of kind timeline."""

    lane: str
    begin: float
    end: float
    kind: str
    """What ran there, such as a kernel's family; it chooses the colour."""
    name: str = ""
    count: int = 1
    """How many pieces of work stand in its place, where they are too many to be drawn."""


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """Figures over one axis. None for a scale lets the values choose.

    An icicle has nodes, and a timeline slices; both have no points. A heat map has a point a cell: `line` is its row
    and `name` its column.

    Curves; bars side by side, or stacked by colour; points that no line joins; or areas: bytes over microseconds,
    stacked by line, each until the line's next point. The lines of areas have the same moments, in one order.
    """

    x_title: str
    y_title: str
    points: tuple[Point, ...]
    x_log: bool | None = None
    y_log: bool | None = None
    kind: Literal["curves", "bars", "stack", "points", "areas", "icicle", "timeline", "heat"] = "curves"
    frame: Frame = Frame()
    nodes: tuple[Node, ...] = ()
    slices: tuple[Slice, ...] = ()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer of one verb or one study."""

    version: int = ANSWER_VERSION
    study: str
    """The name of the verb or the study that answers."""
    question: str
    device: str = ""
    date: str = ""
    """When it was measured, as in 2026-11-22; of several runs the last."""
    versions: dict[str, str] = {}
    settings: dict[str, Cell] = {}
    lead: tuple[Line, ...] = ()
    """Lines that are shown first, in place of question, device, versions and settings: what was measured, where, and
    the answer in a sentence."""
    tables: tuple[Table, ...] = ()
    panels: tuple[Panel, ...] = ()
    findings: tuple[Finding, ...] = ()
    """Conclusions from the figures; each carries the figures that it quotes."""
    checked: bool = False
    """Whether the findings come from checks: they show kind and remedy, and a line says if there are none."""
    asides: tuple[str, ...] = ()
    """Sentences on what was not examined, and why."""
    origin: tuple[str, ...] = ()
    """Lines that say which run or file this is, and where."""

    def table(self, title: str) -> Table:
        """The table of this title."""
        return next(table for table in self.tables if table.title == title)

    def has(self, only: str) -> bool:
        """Whether `only` names a table, or the findings."""
        return only.casefold() == "findings" or any(_is_named(table, only) for table in self.tables)

    def part(self, only: str) -> "Answer":
        """The tables whose title contains `only`, or the findings alone for `findings`.

        Raises InputError, with the titles, where it names no table.
        """
        if only.casefold() == "findings":
            return replace(self.body(), tables=())
        chosen = tuple(table for table in self.tables if _is_named(table, only))
        if not chosen:
            titles = ", ".join(repr(name_of(table)) for table in self.tables if name_of(table))
            raise InputError(f"--only {only!r} names no table: there are {titles}, and findings")
        return replace(self.body(), tables=chosen, findings=(), checked=False)

    def body(self) -> "Answer":
        """The tables and the findings, without what was asked, where, and of which run."""
        return replace(self, question="", device="", date="", versions={}, settings={}, lead=(), asides=(), origin=())


def name_of(table: Table) -> str:
    """The title of a table; the head of its first column where it has none."""
    return table.title or next(iter(table.columns), "")


def _is_named(table: Table, only: str) -> bool:
    return bool(only) and only.casefold() in name_of(table).casefold()


def text(*lines: str | Line) -> Table:
    """A Table of sentences alone."""
    return Table(title="", columns=(), rows=(), notes=as_lines(*lines))


def as_lines(*lines: str | Line) -> tuple[Line, ...]:
    """The sentences as Lines."""
    return tuple(line if isinstance(line, Line) else Line(line) for line in lines)


def table_of(*columns: tuple[str, str] | str, rows: Iterable[tuple[Cell, ...]], **more: Any) -> Table:
    """A table whose columns are each a name, or a name and a unit; the first column's head says what it is of.

    Raises ValueError for a unit in which no figure can be read: where a column has figures on some devices alone, it
    would show nowhere else.
    """
    pairs = [(column, "") if isinstance(column, str) else column for column in columns]
    if unknown := _unknown_units(unit for _, unit in pairs):
        raise ValueError(f"no unit {unknown[0]!r}")
    return Table(
        title=more.pop("title", ""),
        columns=tuple(name for name, _ in pairs),
        units=tuple(unit for _, unit in pairs),
        rows=tuple(rows),
        **more,
    )


def _unknown_units(units: Iterable[str]) -> list[str]:
    return [unit for unit in units if unit not in (TEXT, PROSE, *UNITS) and not UNIT_FORMAT.fullmatch(unit)]


def measured_answer(
    where: "Environment | None",
    *,
    study: str,
    question: str,
    tables: Iterable[Table],
    findings: Iterable[Finding],
    panels: Sequence[Panel] = (),
    settings: Mapping[str, Cell] | None = None,
    intervals: str = "",
    date: str = "",
) -> Answer:
    """The Answer to a question about measured runs. A table without rows is left out."""
    from stepscope.core.samples import INTERVALS  # noqa: PLC0415  (arithmetic on formats has no samples)

    return Answer(
        study=study,
        question=question,
        device=where.limited_device if where else "",
        date=date,
        versions=dict(where.versions) if where else {},
        settings={**(settings or {}), "intervals": intervals or INTERVALS},
        tables=tuple(table for table in tables if table.rows),
        panels=tuple(panels),
        findings=tuple(findings),
    )


def known_columns(title: str, columns: Sequence[str], rows: Sequence[tuple[Cell, ...]]) -> Table:
    """The table without the columns in which no row has a figure."""
    kept = [i for i in range(len(columns)) if any(row[i] is not None for row in rows)]
    return Table(
        title=title, columns=tuple(columns[i] for i in kept), rows=tuple(tuple(row[i] for i in kept) for row in rows)
    )


def decode_answer(data: bytes, source: str) -> Answer:
    """The answer that `--json` wrote, with the present kinds of findings. Raises InputError that names the source."""
    answer = decode_document(data, Answer, source, holds="answer of `stepscope study --json`", newest=ANSWER_VERSION)
    for table in answer.tables:
        if any(len(row) != len(table.columns) for row in table.rows):
            raise InputError(
                f"{source} is damaged: the table {table.title!r} has a row that is not of its "
                f"{len(table.columns)} columns; write it again with --json"
            )
        unknown = _unknown_units(table.units)
        if unknown or len(table.units) not in (0, len(table.columns)):
            what = f"a unit that does not exist, {unknown[0][:40]!r}" if unknown else "not a unit for each column"
            raise InputError(f"{source} is damaged: the table {table.title!r} has {what}; write it again with --json")
        for row in table.rows:
            for cell, unit in zip(row, table.units, strict=False):
                if isinstance(cell, float) and unit.endswith("d"):
                    raise InputError(
                        f"{source} is damaged: the table {table.title!r} has {cell:g} where it counts; write it again "
                        "with --json"
                    )
    findings = (replace(each, kind=FORMER_KINDS.get(each.kind, each.kind)) for each in answer.findings)
    return replace(answer, findings=tuple(findings))


_LATER: dict[str, object] = {
    "lead": (),
    "checked": False,
    "date": "",
    "asides": (),
    "origin": (),
    "kind": "curves",
    "frame": {},
    "nodes": (),
    "slices": (),
}
"""Fields that version 1 did not have at first: left out of a document where they say nothing."""


def encode_answer(answer: Answer) -> str:
    """The answer as one JSON document, in which NaN and infinities are words, since JSON has none."""
    return json_document(_with_words(msgspec.to_builtins(answer)))


def _with_words(value: Any) -> Any:
    """The value without later fields that say nothing, and every NaN and infinity in it as the text `nan`, `inf` or
    `-inf`."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value)
        return {key: _with_words(item) for key, item in items.items() if key not in _LATER or item != _LATER[key]}
    if isinstance(value, (list, tuple)):
        values = cast("Sequence[Any]", value)
        return [_with_words(item) for item in values]
    return value
