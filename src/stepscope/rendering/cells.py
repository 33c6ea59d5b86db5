"""What every renderer needs of an answer: the text of a cell, its bare figure, its sentences; and its plain text."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence

from stepscope.core.answer import PROSE, TEXT, Answer, Cell, Doubted, Finding, Line, Node, Severity, Table, Tone
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
    return [*map(list, zip(*(_column_texts(table, i) for i in range(len(table.columns))), strict=True))]


def _column_texts(table: Table, column: int) -> list[str]:
    unit, cells = unit_of(table, column), [row[column] for row in table.rows]
    texts: list[str] = []
    looks: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for cell in cells:
        text = "" if cell is None else _text(cell, unit)
        if isinstance(cell, str):
            number = looks[text].setdefault(cell, len(looks[text]) + 1)
            text = f"{text} ({number})" if number > 1 else text
        elif isinstance(cell, Doubted) and text and cell.mark:
            text = f"{text} {cell.mark}"
        texts.append(text)
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


# An answer as plain text, for a pipe or a file: what rich would lay out. To import rich takes longer than to write it.


WIDTH = 120
"""Where text folds that no screen shows; a table is as wide as it is."""
WIDEST_PROSE = 100
LONGEST_SENTENCE = 4000
"""Characters: a finding from a foreign file may be of any length."""
_WORD = re.compile(r" *[^ ]+ *")


def blocks_of(answer: Answer) -> list[list[Line | Finding | Table]]:
    """What was asked or measured, every table with its sentences, what follows, and which run or file this is: an empty
    line stands between two blocks. A table that comes has columns, and its sentences follow it."""
    heading = (Line(answer.question, "strong"), Line(where_of(answer)))
    blocks: list[list[Line | Finding | Table]] = [[*(answer.lead or (line for line in heading if line.text))]]
    for table in answer.tables:
        title = [Line(table.title, "strong")] if table.title else []
        blocks.append([*title, *([table] if table.columns else []), *table.notes])
    findings = answer.findings if answer.checked and answer.findings else sentences_of(answer)
    blocks.append([*findings, *(Line(aside, "aside") for aside in answer.asides)])
    blocks.append([Line(line) for line in answer.origin])
    return [block for block in blocks if block]


def parts_of_finding(finding: Finding) -> tuple[str, str, str]:
    """Severity and kind, the sentence, and the remedy."""
    remedy = printable(f" Remedy: {finding.remedy}.", LONGEST_SENTENCE) if finding.remedy else ""
    return f"{printable(f'{finding.severity} {finding.kind}')}: ", printable(finding.sentence, LONGEST_SENTENCE), remedy


def plain_text(answer: Answer) -> str:
    """The answer as a pipe gets it."""
    return "\n".join("".join(map(_plain, block)) for block in blocks_of(answer))


def _plain(part: Line | Finding | Table) -> str:
    if isinstance(part, Table):
        return _plain_table(part)
    text = printable(part.text, LONGEST_SENTENCE) if isinstance(part, Line) else "".join(parts_of_finding(part))
    return "\n".join(line.rstrip() for line in _folded(text, WIDTH)) + "\n"


def _plain_table(table: Table) -> str:
    """A rule below the head, figures to the right; of a column of sentences each is folded."""
    columns: list[list[str]] = []
    widths: list[int] = []
    folds = False
    for i, head in enumerate(table.columns):
        texts = [printable(head), *_column_texts(table, i)]
        sizes = [*map(len if "".join(texts).isascii() else _cells, texts)]
        width = max(sizes)
        if unit_of(table, i) == PROSE and width > WIDEST_PROSE:
            width, folds = WIDEST_PROSE, True
        elif is_figures(table, i):
            texts = [" " * (width - size) + text for text, size in zip(texts, sizes, strict=True)]
        else:
            texts = [text + " " * (width - size) for text, size in zip(texts, sizes, strict=True)]
        columns.append(texts)
        widths.append(width)
    rows = zip(*columns, strict=True)
    lines = [*map(_row_line, rows)] if not folds else [_folded_row(row, widths) for row in rows]
    for rule in sorted(table.rules, reverse=True):
        if 0 < rule < len(table.rows):
            lines.insert(rule + 1, "")
    lines.insert(1, " " + "─" * (sum(widths) + 3 * (len(widths) - 1)))
    return "\n".join(lines).strip("\n") + "\n"


def _row_line(row: Sequence[str]) -> str:
    return (" " + "   ".join(row)).rstrip()


def _folded_row(row: Sequence[str], widths: Sequence[int]) -> str:
    """The lines of a row of which some cells are folded."""
    cells = [_folded(text, width) for text, width in zip(row, widths, strict=True)]
    lines = [[cell[i].rstrip() if i < len(cell) else "" for cell in cells] for i in range(max(map(len, cells)))]
    return "\n".join(
        _row_line([text + " " * (width - _cells(text)) for text, width in zip(line, widths, strict=True)])
        for line in lines
    )


def _cells(text: str) -> int:
    """How wide a text is on a screen."""
    if text.isascii() or max(text) < "\u0300":
        return len(text)
    from rich.cells import cell_len  # noqa: PLC0415  (takes longer than all else here)

    return cell_len(text)


def _folded(text: str, width: int) -> list[str]:
    """The lines of a text of one line, folded between words as rich folds them; a word that is too long is cut."""
    if _cells(text) <= width:
        return [text]
    breaks, filled = [0], 0
    for match in _WORD.finditer(text):
        start, word = match.start(), match[0]
        size = _cells(word.rstrip())
        if size <= width - filled:
            filled += _cells(word)
        elif size <= width:
            breaks.append(start)
            filled = _cells(word)
        else:
            for piece in _pieces(word, width):
                breaks.append(start)
                start += len(piece)
                filled = _cells(piece)
    return [text[start:end] for start, end in zip(breaks, [*breaks[1:], len(text)], strict=True) if start < end]


def _pieces(word: str, width: int) -> list[str]:
    pieces = [""]
    for character in word:
        if _cells(pieces[-1] + character) > width:
            pieces.append("")
        pieces[-1] += character
    return pieces
