"""An answer as its reader sees it, on a screen of any width, and as it was kept."""

import io
import os
import re
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


def screen_of(written: bytes) -> str:
    """What a terminal shows in the end of what was written to it: the lines that were not written over."""
    lines, row, column = [""], 0, 0
    for escape, sign in re.findall(r"\x1b\[([?\d;]*[A-Za-z])|(.)", written.decode(), re.DOTALL):
        if escape.endswith("A"):
            row = max(0, row - int(escape[:-1] or 1))
        elif escape.endswith("K"):
            lines[row] = "" if escape == "2K" else lines[row][:column]
        elif sign == "\r":
            column = 0
        elif sign == "\n":
            row += 1
            lines += [""] * (row - len(lines) + 1)
        elif sign:
            lines[row] = lines[row][:column].ljust(column) + sign + lines[row][column + 1 :]
            column += 1
    return "\n".join(line.rstrip() for line in lines)
