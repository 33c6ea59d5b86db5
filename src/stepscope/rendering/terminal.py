"""An answer for the terminal: lines, tables and findings, in one look."""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from stepscope.core.answer import PROSE, Answer, Finding, Line
from stepscope.core.answer import Table as Figures
from stepscope.core.errors import middle_cut, printable, visible
from stepscope.rendering.cells import (
    LONGEST_SENTENCE,
    WIDEST_PROSE,
    blocks_of,
    is_figures,
    parts_of_finding,
    row_texts,
    unit_of,
)
from stepscope.rendering.renderers.bars import step_by_step

# A table at the width of a screen: no cell breaks inside a word.
#
# What is too wide gives way in this order: text folds between words; names are shortened in the middle; the columns on
# the right go on in a second table below, each row of it under the same labels. Figures are never folded or cut.


NARROWEST, NARROWEST_LABEL = 16, 24
"""A name is not shortened below this; in the first column, which tells rows apart, nor below a third of the screen."""


def fitted(table: Table, console: Console) -> list[Table]:
    """The table as it is where there is room for it, or the tables that take its place."""
    if not table.columns or natural_width(table, console) <= console.width:
        return [table]
    label = max(NARROWEST_LABEL, console.width // 3)
    columns = [_Measured.of(column, console, NARROWEST if i else label) for i, column in enumerate(table.columns)]
    if len(columns) > 1 and all(column.no_wrap for column in table.columns):
        return [_on_one_line(table, console, columns)]
    whole = _part(table, console, columns)
    return [whole] if whole is not None else _stacked(table, console, columns) or [table]


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


def _part(table: Table, console: Console, columns: Sequence[_Measured]) -> Table | None:
    """The table with these columns alone, no wider than the screen; None where not even shortened names fit.

    First text gives way down to its words, then names down to the least.
    """
    widths = [column.most for column in columns]
    room = console.width - (natural_width(_of_widths(table, columns, widths), console) - sum(widths))
    for least in ([column.whole for column in columns], [column.least for column in columns]):
        if sum(least) > room:
            widths = least
            continue
        while sum(widths) > room:  # the widest gives way, one by one
            shrinkable = (i for i, width in enumerate(widths) if width > least[i])
            widths[max(shrinkable, key=widths.__getitem__)] -= 1
        return _of_widths(table, columns, widths)
    return None


def _of_widths(table: Table, columns: Sequence[_Measured], widths: Sequence[int]) -> Table:
    part = copy.copy(table)
    part.columns = [
        dataclasses.replace(
            measured.column, width=width, min_width=None, max_width=None, ratio=None, no_wrap=False,
            overflow="fold", _index=i, _cells=_told_apart(measured.column._cells, width),
        )
        for i, (measured, width) in enumerate(zip(columns, widths, strict=True))
    ]  # fmt: skip
    return part


def _stacked(table: Table, console: Console, columns: Sequence[_Measured]) -> list[Table]:
    """The columns in several tables, each with the labels; none where a label leaves no room for a figure.

    The labels are as many columns, from the left, as it takes to tell rows apart; at least all before the first figure.
    """
    rows = list(zip(*(map(str, measured.column._cells) for measured in columns), strict=True))
    figures = (i for i, measured in enumerate(columns) if measured.column.justify == "right")
    before = max(1, next(figures, 1))
    apart = (count for count in range(before, len(columns)) if len({row[:count] for row in rows}) == len(rows))
    for count in range(next(apart, before), 0, -1):
        parts = _under(table, console, columns[:count], columns[count:])
        if parts:
            return parts
    return []


def _under(table: Table, console: Console, labels: Sequence[_Measured], rest: Sequence[_Measured]) -> list[Table]:
    parts: list[Table] = []
    begun: list[_Measured] = []
    widest: Table | None = None
    for column in rest:
        wider = _part(table, console, [*labels, *begun, column])
        if wider is None:
            alone = _part(table, console, [*labels, column])
            if widest is None or alone is None:
                return []
            parts.append(widest)
            begun, wider = [], alone
        begun.append(column)
        widest = wider
    return parts if widest is None else [*parts, widest]


def _on_one_line(table: Table, console: Console, columns: Sequence[_Measured]) -> Table:
    """The table with as many columns from the left as there is room for, each row on one line. Only the first column is
    never shortened."""
    for least in (max(NARROWEST_LABEL, console.width // 3), 1):
        in_one = [dataclasses.replace(c, whole=c.most, least=min(c.most, least)) for c in columns]
        in_one[0] = dataclasses.replace(in_one[0], least=in_one[0].most)
        for count in range(len(in_one), 1, -1):
            part = _part(table, console, in_one[:count])
            if part is not None:
                return part
    return table


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
        # What stands before the difference is left out, but for a beginning that says what it is of.
        differing = (i for i, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1)
        at = next(differing, min(map(len, texts)))
        begin = min(at, max(1, width // 3))
        cut = f"{text[:begin]}…{middle_cut(text[at:], max(1, width - begin - 1))}"
        if cut in cuts.values():
            mark = f"…{texts.index(text) + 1}…"
            cut = middle_cut(text, max(1, width - len(mark) + 1)).replace("…", mark, 1)
        cuts[text] = cut
    return [
        _like(cell, cuts[str(cell)]) if str(cell) in cuts else short
        for cell, short in zip(cells, shortened, strict=True)
    ]


def _like(cell: RenderableType, text: str) -> RenderableType:
    return Text(text, style=cell.style) if isinstance(cell, Text) else text


def _shortened(cell: RenderableType, width: int) -> RenderableType:
    """A cell whose words are no longer than its column is wide; what is no text shortens itself."""
    text = cell.plain if isinstance(cell, Text) else cell
    if not isinstance(text, str) or all(cell_len(word) <= width for word in text.split()):
        return cell
    cut = " ".join(middle_cut(word, width) for word in text.split(" "))
    return _like(cell, cut)


_STYLES = {"": "", "strong": "bold", "good": "bold green", "bad": "bold red", "care": "yellow", "aside": "dim"}
_SEVERITY_STYLE = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def render_answer(answer: Answer, *, drawn: bool = False) -> RenderableType:
    """The blocks of an answer, with empty lines between them.

    drawn: also the measured steps one by one, as sparklines, behind the table of their phases.
    """
    blocks: list[list[RenderableType]] = [[*map(_renderable, block)] for block in blocks_of(answer)]
    if drawn and (lines := step_by_step(answer)):
        blocks.insert(min(2, len(blocks)), [Text(line) for line in lines])
    return Group(*(one for i, block in enumerate(blocks) for one in ([Text()] if i else []) + block))


def _renderable(part: Line | Finding | Figures) -> RenderableType:
    if isinstance(part, Figures):
        return make_table(part)
    if isinstance(part, Line):
        return Text(printable(part.text, LONGEST_SENTENCE), style=_STYLES[part.tone])
    kind, sentence, remedy = parts_of_finding(part)
    return Text.assemble((kind, _SEVERITY_STYLE[part.severity]), sentence, (remedy, "dim"))


def make_table(figures: Figures) -> Table:
    """The house's table: a rule below the head, figures to the right, folded and never cut on a narrow screen."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, head in enumerate(figures.columns):
        table.add_column(
            printable(head),
            justify="right" if is_figures(figures, i) else "left",
            no_wrap=i == 0 or figures.one_line,
            overflow="fold",
            max_width=WIDEST_PROSE if unit_of(figures, i) == PROSE else None,
        )
    for i, texts in enumerate(row_texts(figures)):
        if i in figures.rules:
            table.add_section()
        table.add_row(*texts, style=_STYLES[figures.tones.get(i, "")])
    return table


class CleanConsole(Console):
    """A console whose every text shows control characters as escapes, whatever file it was read from.

    Rich asks `render_str` for text that is a str and `render` for text that is a Text, both before it measures widths.
    """

    def __init__(self, **options: Any) -> None:
        # In a notebook rich would show what it prints there, whichever file it was given.
        super().__init__(highlight=False, markup=False, emoji=False, force_jupyter=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        if isinstance(renderable, Text) and (clean := visible(renderable.plain)) != renderable.plain:
            renderable = renderable.blank_copy(clean)
        return super().render(renderable, options)


def parts_of(renderable: RenderableType) -> Iterator[RenderableType]:
    """What a group holds, and the groups in it."""
    if not isinstance(renderable, Group):
        yield renderable
        return
    for inner in renderable.renderables:
        yield from parts_of(inner)
