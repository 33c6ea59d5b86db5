"""`stepscope ls`: the runs there are."""

from pathlib import Path
from typing import Annotated

import typer

from stepscope.app.cli.listed import listed_runs
from stepscope.app.cli.output import emit, json_line
from stepscope.app.cli.presentation import Presentation
from stepscope.app.cli.verb import verb


@verb("ls", "stepscope ls", "stepscope ls results/h200/plain --tag plain")
def ls(
    places: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUNS]...", help="Run directories, folders of them, or `last` (default: --runs)."),
    ] = None,
    *,
    tag: str | None,
    runs: Path,
    shown: Presentation,
) -> None:
    """List runs, oldest first."""
    found = listed_runs(places, runs)
    kept = [run for run in found if tag is None or run.tag == tag]
    if not kept and shown == Presentation():
        emit("no runs\n")
        return

    def listed() -> str:
        fields = [
            {
                "id": r.id,
                "created": r.created,
                "tag": r.tag,
                "status": r.status,
                "summary": r.summary,
                "findings": [{"kind": f.kind, "severity": f.severity} for f in r.findings],
            }
            for r in kept
        ]
        return json_line(fields)

    from stepscope.runs.answer import answer_list

    shown.show(answer_list(kept), document=listed)
