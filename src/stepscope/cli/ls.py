"""`stepscope ls`: the runs there are."""

from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli import options
from stepscope.cli.output import emit_json, show, warn
from stepscope.core.run_directory import load_runs


def ls(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run directories, or folders of them (default: --out).")
    ] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Only runs with this tag.")] = None,
    out: options.Out = Path("runs"),
    json: options.Json = False,
) -> None:
    """List runs, oldest first."""
    found, faults = load_runs(runs or [out])
    for fault in faults:
        warn(f"left out: {fault}")
    kept = [run for run in found if tag is None or run.tag == tag]
    if json:
        listed = [
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
        emit_json(listed)
        return
    from stepscope.report.terminal import render_runs

    show(render_runs(kept) if kept else "no runs")
