"""An answer as its reader sees it, on a screen of any width."""

import io

from rich.console import Console, RenderableType

from stepscope.core.answer import Answer
from stepscope.report.terminal import render_answer


def shown(what: Answer | RenderableType, width: int = 200) -> str:
    """The text of an answer, or of what else rich can print, without styles."""
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(render_answer(what) if isinstance(what, Answer) else what)
    return capture.get()
