"""A table at the width of a screen: no cell breaks inside a word.

What is too wide gives way in this order: text folds between words; names are shortened in the middle; the columns on
the right go on in a second table below, each row of it under the same labels. Figures are never folded or cut.
"""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from stepscope.core.shown_text import middle_cut

NARROWEST, NARROWEST_LABEL = 16, 24
"""A name is not shortened below this; in the first column, which tells rows apart, nor below a third of the screen."""


class OneLine(Table):
    """A table whose rows are one line each: columns on the right are left out where there is no room for them, and
    only the first column is never shortened."""


def fitted(table: Table, console: Console) -> list[Table]:
    """The table as it is where there is room for it, or the tables that take its place."""
    if not table.columns or natural_width(table, console) <= console.width:
        return [table]
    label = max(NARROWEST_LABEL, console.width // 3)
    columns = [_Measured.of(column, console, NARROWEST if i else label) for i, column in enumerate(table.columns)]
    layout = _Layout(table, console)
    if isinstance(table, OneLine):
        return [layout.one_line(columns)]
    whole = layout.part(columns)
    return [whole] if whole is not None else layout.stacked(columns) or [table]


def natural_width(table: Table, console: Console) -> int:
    """What the table takes where nothing is folded."""
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum


@dataclasses.dataclass(frozen=True)
class _Measured:
    """A column, and how wide it is at most, with words whole, and at least."""

    column: Column
    most: int
    whole: int
    least: int

    @classmethod
    def of(cls, column: Column, console: Console, narrowest: int) -> "_Measured":
        wide = console.options.update(max_width=10_000)
        sizes = [Measurement.get(console, wide, cell) for cell in column._cells]
        head = Measurement.get(console, wide, column.header)
        most = max([head.maximum, *(size.maximum for size in sizes)])
        if column.justify == "right":
            whole = least = max([head.minimum, *(size.maximum for size in sizes)])
        else:
            word = max((size.minimum for size in sizes), default=0)
            whole, least = max(head.minimum, word), max(head.minimum, min(word, narrowest))
        return cls(column, most, whole, least)

    @property
    def is_figure(self) -> bool:
        return self.column.justify == "right"


class _Layout:
    """Parts of one table, each no wider than the screen."""

    def __init__(self, table: Table, console: Console) -> None:
        self._table, self._console = table, console

    def part(self, columns: Sequence[_Measured]) -> Table | None:
        """The table with these columns alone; None where not even shortened names fit."""
        widths = self._widths(columns)
        return None if widths is None else self._of(columns, widths)

    def stacked(self, columns: Sequence[_Measured]) -> list[Table]:
        """The columns in several tables, each with the labels; none where a label leaves no room for a figure."""
        for count in range(_telling_apart(columns), 0, -1):
            parts = self._under(columns[:count], columns[count:])
            if parts:
                return parts
        return []

    def one_line(self, columns: Sequence[_Measured]) -> Table:
        """The table with as many columns from the left as there is room for, each row on one line."""
        for least in (max(NARROWEST_LABEL, self._console.width // 3), 1):
            in_one = [dataclasses.replace(c, whole=c.most, least=min(c.most, least)) for c in columns]
            in_one[0] = dataclasses.replace(in_one[0], least=in_one[0].most)
            for count in range(len(in_one), 1, -1):
                found = self.part(in_one[:count])
                if found is not None:
                    return found
        return self._table

    def _under(self, labels: Sequence[_Measured], rest: Sequence[_Measured]) -> list[Table]:
        parts: list[Table] = []
        begun: list[_Measured] = []
        for column in rest:
            if self._widths([*labels, *begun, column]) is not None:
                begun.append(column)
            elif not begun or self._widths([*labels, column]) is None:
                return []
            else:
                parts.append(self._of([*labels, *begun], self._widths([*labels, *begun]) or []))
                begun = [column]
        if begun:
            parts.append(self._of([*labels, *begun], self._widths([*labels, *begun]) or []))
        return parts

    def _widths(self, columns: Sequence[_Measured]) -> list[int] | None:
        """A width for each column: first text gives way down to its words, then names down to the least."""
        most = [column.most for column in columns]
        room = self._console.width - (natural_width(self._of(columns, most), self._console) - sum(most))
        for least in ([column.whole for column in columns], [column.least for column in columns]):
            if sum(least) <= room:
                return _shrunk(most, least, room)
            most = least
        return None

    def _of(self, columns: Sequence[_Measured], widths: Sequence[int]) -> Table:
        part = copy.copy(self._table)
        part.columns = [
            dataclasses.replace(
                measured.column, width=width, min_width=None, max_width=None, ratio=None, no_wrap=False,
                overflow="fold", _index=i, _cells=_told_apart(measured.column._cells, width),
            )
            for i, (measured, width) in enumerate(zip(columns, widths, strict=True))
        ]  # fmt: skip
        return part


def _telling_apart(columns: Sequence[_Measured]) -> int:
    """How many columns, from the left, it takes to tell rows apart; at least all before the first figure."""
    rows = list(zip(*(map(str, measured.column._cells) for measured in columns), strict=True))
    before = next((i for i, column in enumerate(columns) if column.is_figure), 1)
    apart = (count for count in range(max(1, before), len(columns)) if len({row[:count] for row in rows}) == len(rows))
    return next(apart, max(1, before))


def _shrunk(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """The widths with the widest made smaller, one by one, until all fit into the room."""
    shrunk = list(widths)
    while sum(shrunk) > room:
        widest = max((i for i in range(len(shrunk)) if shrunk[i] > least[i]), key=lambda i: shrunk[i])
        shrunk[widest] -= 1
    return shrunk


def _told_apart(cells: Sequence[RenderableType], width: int) -> list[RenderableType]:
    """The cells shortened. Different ones that would look the same are cut where they differ, or else numbered."""
    shortened = [_shortened(cell, width) for cell in cells]
    by_look: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for cell, short in zip(cells, shortened, strict=True):
        if short is not cell:
            by_look[str(short)][str(cell)] = None
    alike = {text: list(texts) for texts in by_look.values() if len(texts) > 1 for text in texts}
    if not alike:
        return shortened
    cuts: dict[str, str] = {}
    for text, texts in alike.items():
        cut = _cut_before(text, _shared(texts), width)
        cuts[text] = cut if cut not in cuts.values() else _numbered(text, texts.index(text) + 1, width)
    return [
        _like(cell, cuts[str(cell)]) if str(cell) in cuts else short
        for cell, short in zip(cells, shortened, strict=True)
    ]


def _cut_before(text: str, at: int, width: int) -> str:
    """The text with what stands before `at` left out, but for a beginning that says what it is of."""
    begin = min(at, max(1, width // 3))
    return f"{text[:begin]}…{middle_cut(text[at:], max(1, width - begin - 1))}"


def _numbered(text: str, number: int, width: int) -> str:
    """The text with a number in the place of what is left out of its middle."""
    mark = f"…{number}…"
    return middle_cut(text, max(1, width - len(mark) + 1)).replace("…", mark, 1)


def _shared(texts: Sequence[str]) -> int:
    """How many characters all of these begin with."""
    apart = (i for i, characters in enumerate(zip(*texts, strict=False)) if len(set(characters)) > 1)
    return next(apart, min(map(len, texts)))


def _like(cell: RenderableType, text: str) -> RenderableType:
    return Text(text, style=cell.style) if isinstance(cell, Text) else text


def _shortened(cell: RenderableType, width: int) -> RenderableType:
    """A cell whose words are no longer than its column is wide; what is no text shortens itself."""
    text = cell.plain if isinstance(cell, Text) else cell
    if not isinstance(text, str) or all(cell_len(word) <= width for word in text.split()):
        return cell
    cut = " ".join(middle_cut(word, width) for word in text.split(" "))
    return _like(cell, cut)
