"""The parts that answers of the precision lab have in common: where they ran, tables by two keys, and curves."""

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

import torch

from stepscope.core.answer import Answer, Cell, Panel, Point, Table
from stepscope.core.finding import Finding
from stepscope.questions.setting import processor_name, versions


def computed_answer(
    on: torch.device,
    *,
    study: str,
    question: str,
    device: str = "",
    settings: Mapping[str, Cell] | None = None,
    tables: Iterable[Table],
    panels: Iterable[Panel] = (),
    findings: Iterable[Finding],
) -> Answer:
    """The answer of a study that computed on a device. `device` says where in other words than its name."""
    return Answer(
        study=study,
        question=question,
        device=device or processor_name(on),
        date=datetime.now(UTC).date().isoformat(),
        versions=versions(),
        settings=dict(settings or {}),
        tables=tuple(tables),
        panels=tuple(panels),
        findings=tuple(findings),
    )


def pivot(title: str, names: tuple[str, ...], cells: Iterable[tuple[tuple[Cell, ...], str | float, Cell]]) -> Table:
    """A table: a row for each tuple of names, a column for each key, both in the order in which they first come."""
    rows: dict[tuple[Cell, ...], dict[str, Cell]] = {}
    columns: dict[str, None] = {}
    for row, key, cell in cells:
        column = key if isinstance(key, str) else f"{key:g}"
        columns[column] = None
        rows.setdefault(row, {})[column] = cell
    return Table(
        title=title,
        columns=(*names, *columns),
        rows=tuple((*row, *(by_column.get(column) for column in columns)) for row, by_column in rows.items()),
    )


def curves(
    points: Iterable[tuple[str, float, float | str]],
    *,
    x_title: str,
    y_title: str,
    x_log: bool = False,
    y_log: bool = False,
) -> Panel:
    """A panel of curves from points (line, x, y). A line whose last values are not finite is marked where they begin.

    y may be a word for a value that is not finite. On a logarithmic scale values of zero are left out.
    """
    shown: list[Point] = []
    lost: dict[str, Point] = {}
    for line, x, y in points:
        if isinstance(y, str) or not math.isfinite(y):
            lost.setdefault(line, Point(line=line, x=x, y=0.0, missing=str(y)))
            continue
        lost.pop(line, None)
        if y > 0 or not y_log:
            shown.append(Point(line=line, x=x, y=y))
    return Panel(x_title=x_title, y_title=y_title, points=(*shown, *lost.values()), x_log=x_log, y_log=y_log)
