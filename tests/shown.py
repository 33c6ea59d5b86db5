"""An answer as its reader sees it, on a screen of any width, and as it was kept."""

import io
import os
from pathlib import Path

from rich.console import Console, RenderableType

from stepscope.core.answer import Answer
from stepscope.rendering.terminal import render_answer


def shown(what: Answer | RenderableType, width: int = 200) -> str:
    """The text of an answer, or of what else rich can print, without styles."""
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(render_answer(what) if isinstance(what, Answer) else what)
    return capture.get()


def check_golden(text: str, file: Path) -> None:
    """The text is that of the file. STEPSCOPE_UPDATE_GOLDEN=1 writes it anew."""
    if os.environ.get("STEPSCOPE_UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()
