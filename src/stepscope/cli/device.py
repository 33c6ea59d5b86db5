"""`stepscope device`: what this device promises, and what it reaches."""

import sys
from typing import Annotated

import typer

from stepscope.cli import options
from stepscope.cli.output import progress, show, stdout_kept_clean


def device(
    device: options.Device = "auto",
    again: Annotated[bool, typer.Option("--again", help="Measure anew even if ceilings are stored.")] = False,
    json: options.Json = False,
) -> None:
    """Name the device, its datasheet peaks, and the ceilings measured on it (stored for later runs)."""
    import msgspec

    from stepscope.report.device import render_device
    from stepscope.studies.device import study_device

    with stdout_kept_clean(), progress() as tell:
        report = study_device(device, again, tell)
    if json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
        return
    show(render_device(report))
