"""What rich lays out as plain text, in which nothing moves a cursor."""

import io
from collections.abc import Iterable, Iterator
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from stepscope.core.shown_text import visible
from stepscope.rendering.layout import natural_width

WIDTH = 120
"""Where text folds that no screen shows; a table is as wide as it is."""
MANY_ROWS = 200
"""Rows from which a table is laid out without rich, which takes a millisecond for each."""
_BREAKS = frozenset("\n\r\t")


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


def plain_part(part: RenderableType) -> str:
    """The text of one table or paragraph: a table as wide as it is, text folded at 120."""
    if isinstance(part, Table) and (text := _many_rows(part)) is not None:
        return text
    # Without colours even where FORCE_COLOR asks for them, as the kernels of notebooks do: this text is not a screen's.
    console = CleanConsole(width=WIDTH, file=io.StringIO(), force_terminal=False, color_system=None)
    if isinstance(part, Table):
        console.width = max(WIDTH, natural_width(part, console))
    console.print(part)
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    return visible("\n".join(lines).strip("\n") + "\n")


def _many_rows(table: Table) -> str | None:
    """The text of a long table as rich would write it, in a hundredth of the time; None for any other table.

    Of rows without folds and cuts, of which a table of figures has thousands, only the widths have to be found.
    """
    if table.row_count < MANY_ROWS or table.box is not box.SIMPLE_HEAD or table.pad_edge or table.title:
        return None
    columns: list[list[str]] = []
    for column in table.columns:
        cells = [column.header, *column._cells]
        texts = [
            visible(cell.plain if isinstance(cell, Text) else cell) for cell in cells if isinstance(cell, (str, Text))
        ]
        widths = [cell_len(text) for text in texts]
        limited = column.max_width is not None and max(widths) > column.max_width
        if len(texts) < len(cells) or limited or column.width or any(_BREAKS & set(text) for text in texts):
            return None
        most, right = max(widths), column.justify == "right"
        columns.append([
            " " * (most - width) + text if right else text + " " * (most - width)
            for text, width in zip(texts, widths, strict=True)
        ])  # fmt: skip
    head, *rows = ((" " + "   ".join(row)).rstrip() for row in zip(*columns, strict=True))
    rule = " " + "─" * (sum(cell_len(column[0]) for column in columns) + 3 * (len(columns) - 1))
    ends = [row.end_section for row in table.rows]
    lines = [line for row, ends_here in zip(rows, ends, strict=True) for line in ([row, ""] if ends_here else [row])]
    return "\n".join([head, rule, *lines]).strip("\n") + "\n"


def plain_text(renderable: RenderableType) -> str:
    """The text of what rich lays out, as a pipe gets it."""
    return "".join(map(plain_part, parts_of(renderable)))
