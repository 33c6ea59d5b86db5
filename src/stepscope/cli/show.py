"""`stepscope show`: one run, as it was reported when it was measured."""

from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli import completion
from stepscope.cli.output import emit, present
from stepscope.cli.verb import verb
from stepscope.core.run_directory import encode_run, find_run


@verb("show", "stepscope show last", "stepscope show xl-b4-s1024 --runs results/h200/limit-80GiB")
def show(
    run: Annotated[
        str,
        typer.Argument(help="A run directory, a part of its name, or `last`.", autocompletion=completion.run_names),
    ],
    *,
    runs: Path,
    json: bool,
) -> None:
    """Show a run read back from disk."""
    found = find_run(run, runs)
    if json:
        emit(encode_run(found).decode())
        return
    from stepscope.analysis.runs.answer import answer_run

    present(answer_run(found))
