"""`stepscope show`: one run, as it was reported when it was measured."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.app.cli import completion
from stepscope.app.cli.output import draw
from stepscope.app.cli.presentation import Presentation
from stepscope.app.cli.verb import verb
from stepscope.core.document import json_document
from stepscope.core.errors import InputError
from stepscope.core.run_directory import encode_run, find_run, load_runs

if TYPE_CHECKING:
    from stepscope.runs.run_sets import RunSet


@verb("show", "stepscope show last", "stepscope show xl-b4-s1024 --runs results/h200/limit-80GiB")
def show(
    run: Annotated[
        str,
        typer.Argument(
            help="A run directory, a part of its name, `last`, or the name of a set.",
            autocompletion=completion.run_names,
        ),
    ],
    *,
    runs: Path,
    save: Path | None,
    shown: Presentation,
) -> None:
    """Show a run read back from disk, or the runs of one set together."""
    try:
        found = find_run(run, runs)
    except InputError as error:
        together = _set_named(run, runs)
        if together is None:
            raise error from None
        from stepscope.runs.set_answer import answer_set, set_as_json

        answer = answer_set(together, str(runs))
        shown.show(answer, document=lambda: json_document(set_as_json(together)))
    else:
        from stepscope.runs.answer import answer_run

        answer = answer_run(found)
        shown.show(answer, document=lambda: encode_run(found).decode())
    draw(answer, save)


def _set_named(name: str, runs: Path) -> "RunSet | None":
    """The one set of repeated runs whose name holds this."""
    from stepscope.runs.run_sets import sets_of

    if not runs.is_dir():
        return None
    found = [one for one in sets_of(load_runs([runs])[0]) if one.runs[0].repeat is not None and name in one.name]
    return found[0] if len(found) == 1 else None
