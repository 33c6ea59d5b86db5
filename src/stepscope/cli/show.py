"""`stepscope show`: one run, as it was reported when it was measured."""

from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli import options
from stepscope.cli.output import emit
from stepscope.cli.output import show as show_on_stdout
from stepscope.core.run_directory import encode_run, find_run


def show(
    run: Annotated[str, typer.Argument(help="A run directory, a part of its name, or `last`.")],
    out: options.Out = Path("runs"),
    json: options.Json = False,
) -> None:
    """Show a run read back from disk."""
    found = find_run(run, out)
    if json:
        emit(encode_run(found).decode())
        return
    from stepscope.report.terminal import render_run

    show_on_stdout(render_run(found))
