"""What an experiment of the precision lab found: tables, curves, and sentences made from its own figures."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from stepscope.core.environment import Environment
from stepscope.core.errors import InputError, one_line
from stepscope.core.finding import Finding, with_present_kind
from stepscope.core.samples import INTERVALS

# 1  2026-11  first
EXPERIMENT_VERSION = 1

Cell = str | int | float | bool | None


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one kind."""

    title: str
    columns: tuple[str, ...]
    """Names of the columns, with the unit where there is one."""
    rows: tuple[tuple[Cell, ...], ...]


class Point(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A figure y at x, on a line."""

    line: str
    x: float
    y: float
    doubted: bool = False
    """Whether the findings of a run that it was made of doubt it."""


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """Curves over one axis. None for a scale lets the values choose."""

    x_title: str
    y_title: str
    points: tuple[Point, ...]
    x_log: bool | None = None
    y_log: bool | None = None


class Experiment(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer of one study."""

    version: int = EXPERIMENT_VERSION
    study: str
    question: str
    device: str
    versions: dict[str, str] = {}
    settings: dict[str, Cell] = {}
    tables: tuple[Table, ...] = ()
    panels: tuple[Panel, ...] = ()
    findings: tuple[Finding, ...] = ()
    """What follows from the figures; each carries those that it quotes."""

    def table(self, title: str) -> Table:
        """The table of this title."""
        return next(table for table in self.tables if table.title == title)


def measured_answer(
    where: Environment | None,
    *,
    study: str,
    question: str,
    tables: Iterable[Table],
    findings: Iterable[Finding],
    panels: Sequence[Panel] = (),
    settings: Mapping[str, Cell] | None = None,
) -> Experiment:
    """The answer to a question about what was measured there. A table without rows is left out."""
    return Experiment(
        study=study,
        question=question,
        device=where.device_name if where else "",
        versions=dict(where.versions) if where else {},
        settings={**(settings or {}), "intervals": INTERVALS},
        tables=tuple(table for table in tables if table.rows),
        panels=tuple(panels),
        findings=tuple(findings),
    )


def known_columns(title: str, columns: Sequence[str], rows: Sequence[tuple[Cell, ...]]) -> Table:
    """A table without the columns that no row has a figure of."""
    kept = [i for i in range(len(columns)) if any(row[i] is not None for row in rows)]
    return Table(
        title=title, columns=tuple(columns[i] for i in kept), rows=tuple(tuple(row[i] for i in kept) for row in rows)
    )


def decode_experiment(data: bytes, source: str) -> Experiment:
    """The answer that `--json` wrote, with the present kinds of findings. Raises InputError that names the source."""
    if not data:
        raise InputError(
            f"{source} is empty: the command that was writing it ended before it was done; write it again with --json"
        )
    try:
        found = msgspec.json.decode(data, type=Experiment)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{source} holds no answer of `stepscope study --json`: {one_line(error)}") from error
    if found.version < 1:
        raise InputError(f"{source} is of version {found.version}, which does not exist: it holds no answer of a study")
    if found.version > EXPERIMENT_VERSION:
        raise InputError(f"{source} is of version {found.version}: this stepscope reads up to {EXPERIMENT_VERSION}")
    for table in found.tables:
        if any(len(row) != len(table.columns) for row in table.rows):
            raise InputError(
                f"{source} is damaged: the table {table.title!r} has a row that is not of its "
                f"{len(table.columns)} columns; write it again with --json"
            )
    return msgspec.structs.replace(found, findings=tuple(map(with_present_kind, found.findings)))


def encode_experiment(experiment: Experiment) -> str:
    """JSON, one document. It has no NaN and no infinity: where a figure is one, its cell says so in a word."""
    return (
        msgspec.json.format(msgspec.json.encode(_with_words(msgspec.to_builtins(experiment))), indent=1).decode() + "\n"
    )


def _with_words(value: dict[Any, Any] | list[Any] | tuple[Any, ...] | Cell) -> Any:
    """The value with every NaN and infinity in it replaced by the text `nan`, `inf` or `-inf`."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _with_words(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_words(item) for item in value]
    return value
