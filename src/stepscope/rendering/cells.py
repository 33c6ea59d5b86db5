"""What every renderer needs of an answer: the text of a cell, its bare figure, and its sentences."""

import math
from collections import defaultdict
from collections.abc import Sequence

from stepscope.core.answer import PROSE, TEXT, Answer, Cell, Doubted, Line, Node, Severity, Table, Tone
from stepscope.core.errors import LONGEST_MESSAGE, LONGEST_NAME, printable
from stepscope.core.units import UNITS, figure_text

NOT_FINITE = ("nan", "inf", "-inf")
"""What a document holds for figures that JSON has no words for: they are figures when it is read back."""

COLOURS: dict[str, str] = {
    "forward": "#0072B2", "backward": "#D55E00", "optimizer": "#009E73", "data": "#E69F00", "rest": "#CC79A7",
    "step": "#000000", "outside": "#8C8C8C", "gradient sync": "#F0E442", "forward-backward": "#56B4E9",
    "forward + backward": "#56B4E9",
    "matrix multiplication": "#4C86B8", "attention (fused)": "#8A73B5", "activation/elementwise": "#D08A3E",
    "copy/cast": "#C07FAE", "normalisation": "#5AA7B0", "softmax": "#A39A3F", "reduction": "#B5656A",
    "communication": "#4F9D78", "embedding/gather": "#7D8896", "memcpy/memset": "#A8917A", "quantisation": "#6F9FD8",
    "convolution": "#69A84F", "Triton/compiled fusion": "#C9A227",
}  # fmt: skip
"""Phases and families of kernels have one colour, whichever chart of whichever page shows them. Phases have those that
people of every colour vision tell apart; families are more, and their names stand in their tiles."""

_TONES: dict[Severity, Tone] = {"error": "bad", "warning": "care", "note": ""}


def unit_of(table: Table, column: int) -> str:
    """The unit of a column; empty where its figures read as they are."""
    return table.units[column] if column < len(table.units) else ""


def is_figures(table: Table, column: int) -> bool:
    """Whether a column holds figures. A cell of nothing says nothing against it."""
    if table.units:
        return unit_of(table, column) not in ("", PROSE)
    cells = (row[column] for row in table.rows)
    values = [cell.value if isinstance(cell, Doubted) else cell for cell in cells]
    return all(
        value is None or value in NOT_FINITE or (isinstance(value, (int, float)) and not isinstance(value, bool))
        for value in values
    )


def row_texts(table: Table) -> list[list[str]]:
    """Each row's cells as people read them. Different names that look the same, once cleaned and cut, are numbered."""
    texts: list[list[str]] = []
    for row in table.rows:
        plain = [_text(cell, unit_of(table, column)) for column, cell in enumerate(row)]
        marks = [cell.mark if isinstance(cell, Doubted) else "" for cell in row]
        texts.append([f"{text} {mark}" if text and mark else text for text, mark in zip(plain, marks, strict=True)])
    for column in range(len(table.columns)):
        looks: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for row, shown in zip(table.rows, texts, strict=True):
            if isinstance(name := row[column], str):
                number = looks[shown[column]].setdefault(name, len(looks[shown[column]]) + 1)
                shown[column] += f" ({number})" if number > 1 else ""
    return texts


def _text(cell: Cell, unit: str) -> str:
    """A figure in its unit, without the mark of a doubted one; without a unit as exact as it is: floats by the shortest
    text that reads back the same, cut to eight digits."""
    if isinstance(cell, Doubted):
        cell = cell.value
    if cell is None:
        return ""
    if isinstance(cell, str):
        return printable(cell, LONGEST_MESSAGE if unit == PROSE else LONGEST_NAME)
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if unit not in ("", TEXT, PROSE):
        return figure_text(cell, unit)
    if isinstance(cell, int):
        return f"{cell:,}"
    return repr(cell) if math.isfinite(cell) and len(repr(cell)) <= 9 else f"{cell:.8g}"


def bare_heads(table: Table) -> list[str]:
    """The heads of a table of bare numbers, each with the unit that its numbers stand in. Programs tell columns apart
    by them: of columns of one name the second is `name 2`. A column with doubted figures has its marks beside it."""
    marks = _columns_with_marks(table)
    heads: list[str] = []
    for i, column in enumerate(table.columns):
        unit = unit_of(table, i)
        name = UNITS[unit][0] if unit in UNITS else ""
        head = f"{column} ({name})" if name and name not in column.split() else column
        heads += [head, f"{head} doubt"] if i in marks else [head]
    earlier = [heads[:i].count(head) for i, head in enumerate(heads)]
    return [f"{head} {count + 1}" if count else head for head, count in zip(heads, earlier, strict=True)]


def bare_row(table: Table, row: tuple[Cell, ...]) -> list[str | float | bool | None]:
    """A row's cells as bare numbers, in the units that the heads name; what is no number stays."""
    marks = _columns_with_marks(table)
    cells: list[str | float | bool | None] = []
    for i, cell in enumerate(row):
        value = cell.value if isinstance(cell, Doubted) else cell
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            unit = unit_of(table, i)
            factor = UNITS[unit][1] if unit in UNITS else 1
            if factor != 1:  # without the last bits that scaling invents: 5.119494, not 5.1194939999999995
                value = float(f"{value * factor:.12g}")
        cells.append(value)
        if i in marks:
            cells.append(cell.mark if isinstance(cell, Doubted) else None)
    return cells


def _columns_with_marks(table: Table) -> set[int]:
    return {i for row in table.rows for i, cell in enumerate(row) if isinstance(cell, Doubted) and cell.mark}


def where_of(answer: Answer) -> str:
    """Device, date, versions and settings, on one line."""
    versions = ", ".join(f"{name} {version}" for name, version in answer.versions.items())
    settings = ", ".join(f"{name} {_text(value, '')}" for name, value in answer.settings.items())
    return "; ".join(part for part in (answer.device, answer.date, versions, settings) if part)


def sentences_of(answer: Answer) -> list[Line]:
    """The findings as sentences; those of checks with kind and remedy, and a word where there is none."""
    if not answer.checked:
        return [Line(printable(finding.sentence)) for finding in answer.findings]
    sentences = [
        Line(
            printable(f"{finding.severity} {finding.kind}: {finding.sentence}")
            + (printable(f" Remedy: {finding.remedy}.") if finding.remedy else ""),
            _TONES[finding.severity],
        )
        for finding in answer.findings
    ]
    return sentences or [Line("No finding: every check passed.", "good")]


def icicle_places(nodes: Sequence[Node]) -> list[tuple[float, int]]:
    """Where each node of an icicle begins, and how deep it lies: children stand side by side under their parent."""
    places: list[tuple[float, int]] = []
    filled: defaultdict[int, float] = defaultdict(float)
    for node in nodes:
        left, depth = places[node.parent] if node.parent >= 0 else (0.0, -1)
        places.append((left + filled[node.parent], depth + 1))
        filled[node.parent] += node.value
    return places
