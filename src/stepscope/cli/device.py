"""`stepscope device`: what this device promises, and what it reaches."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from stepscope.cli import options
from stepscope.cli.output import emit, progress, show, stdout_kept_clean
from stepscope.core.bounded_file import read_document
from stepscope.core.device_spec import DeviceReport
from stepscope.core.errors import InputError, one_line


def device(
    device: options.Device = "auto",
    again: Annotated[bool, typer.Option("--again", help="Measure anew even if ceilings are stored.")] = False,
    read: Annotated[Path | None, typer.Option("--read", help="Show a report that --json wrote.")] = None,
    json: options.Json = False,
) -> None:
    """Name the device, its datasheet peaks, and the ceilings measured on it (stored for later runs)."""
    report = _measure(device, again) if read is None else _load(read)
    if json:
        emit(msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
        return
    from stepscope.report.device import render_device

    show(render_device(report))


def _measure(device: str, again: bool) -> DeviceReport:
    from stepscope.studies.device import study_device

    with stdout_kept_clean(), progress() as tell:
        return study_device(device, again, tell)


def _load(path: Path) -> DeviceReport:
    try:
        return msgspec.json.decode(read_document(path), type=DeviceReport)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path} holds no report of `stepscope device --json`: {one_line(error)}") from error
