"""A kernel's name explained, for the terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.analysis.kernels.explanation import KernelExplanation
from stepscope.core.errors import printable

SHOWN = 200
"""Characters of a function's name on show: the longest real ones fit, a hostile one ends."""


def render_kernel(explanation: KernelExplanation) -> RenderableType:
    """The function's name, and a line for each thing its name says."""
    function = printable(explanation.kernel.function)
    if len(function) > SHOWN:
        function = function[: SHOWN - 1] + "…"
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(max_width=100)
    for heading, sentence in explanation.lines:
        grid.add_row(heading, printable(sentence))
    return Group(Text(function, style="bold"), grid)
