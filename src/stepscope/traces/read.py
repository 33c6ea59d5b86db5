"""Reads any capture that stepscope knows, told apart by its content rather than its name."""

from pathlib import Path

from stepscope.core.errors import InputError
from stepscope.core.files import check_no_pointer
from stepscope.core.run_directory import CAPTURE_FILES, EXPORT_FILE, RUN_FILE, STREAM_FILE
from stepscope.traces.readers.kineto import read_kineto
from stepscope.traces.readers.nsys import (
    SQLITE,
    holds_sqlite,
    is_nsys_report,
    read_nsys_parquet,
    read_nsys_report,
    read_nsys_sqlite,
    read_packed_sqlite,
)
from stepscope.traces.table import TraceTable


def read_trace(path: Path) -> TraceTable:
    """The TraceTable of a Kineto trace, an nsys export or report, or of the capture in a run directory.

    Raises InputError, naming the file and the remedy, for everything that is no whole capture.
    """
    try:
        found = find_capture(path)
        if found.is_dir():
            return read_nsys_parquet(found)
        with found.open("rb") as file:
            head = file.read(64)
        check_no_pointer(found, head)
        if head.startswith(SQLITE):
            return read_nsys_sqlite(found)
        if is_nsys_report(found, head):
            return read_nsys_report(found)
        if holds_sqlite(found, head):
            return read_packed_sqlite(found)
        return read_kineto(found)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def find_capture(path: Path) -> Path:
    """The capture at a path: the file itself, a parquetdir, or the one that a run directory holds."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path}: no such file") from None
    if not path.is_dir():
        if not path.is_file():  # a capture is read from its start more than once
            raise InputError(f"{path}: a pipe or device, not a file: write the capture to a file first")
        exported = path.with_name(EXPORT_FILE)
        return exported if path.name == STREAM_FILE and exported.is_file() else path
    if any(path.glob("*.parquet")):
        return path
    for name in CAPTURE_FILES:
        if (path / name).exists():
            return path / name
    remedy = " (measure it again with --record kineto)" if (path / RUN_FILE).exists() else ""
    raise InputError(f"{path}: this directory holds no trace{remedy}")
