"""`stepscope show`: one run, as it was reported when it was measured."""

from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli import completion
from stepscope.cli.output import draw
from stepscope.cli.presentation import Presentation
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
    save: Path | None,
    shown: Presentation,
) -> None:
    """Show a run read back from disk."""
    found = find_run(run, runs)
    from stepscope.analysis.runs.answer import answer_run

    answer = answer_run(found)
    shown.show(answer, document=lambda: encode_run(found).decode())
    draw(answer, save)
