"""What rich lays out as plain text, in which nothing moves a cursor."""

import io
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from stepscope.core.shown_text import visible
from stepscope.report.layout import natural_width

WIDTH = 120
"""Where text folds that no screen shows; a table is as wide as it is."""


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
    # Without colours even where FORCE_COLOR asks for them, as the kernels of notebooks do: this text is not a screen's.
    console = CleanConsole(width=WIDTH, file=io.StringIO(), force_terminal=False, color_system=None)
    if isinstance(part, Table):
        console.width = max(WIDTH, natural_width(part, console))
    console.print(part)
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    return visible("\n".join(lines).strip("\n") + "\n")


def plain_text(renderable: RenderableType) -> str:
    """The text of what rich lays out, as a pipe gets it."""
    return "".join(map(plain_part, parts_of(renderable)))
