"""Renderers of an Answer as text, a file each: `render(answer) -> str`. The name of the file is that of the style.

To add one, add its file: `--style` offers what lies here. The terminal's is rendering/terminal.py, which knows how wide
the screen is; pictures are drawn by rendering/picture.py.
"""

import importlib
import pkgutil

from stepscope.core.answer import Answer

STYLES = ("terminal", *sorted(module.name for module in pkgutil.iter_modules(__path__)))

BARE = ("csv", "jsonl")
"""Styles for programs: bare figures."""


def render(answer: Answer, style: str) -> str:
    """The answer in this style, one of STYLES but for the terminal's."""
    return importlib.import_module(f"{__name__}.{style}").render(answer)
