"""Runs, and what their captures say: measured just now, or found in folders. Several studies answer from both."""

import functools
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.cli.output import warn
from stepscope.core.errors import InputError
from stepscope.core.run import Run

if TYPE_CHECKING:
    from stepscope.analysis.trace_digest import TraceDigest


@functools.cache
def reads_captures() -> bool:
    """A machine that only measures has no polars."""
    try:
        importlib.import_module("stepscope.analysis.trace_digest")
    except ModuleNotFoundError as error:
        if error.name != "polars":
            raise
        return False
    return True


def unread(runs: Iterable[Run]) -> int:
    """Captures that nothing here can read."""
    return 0 if reads_captures() else sum("kineto" in run.artifacts for run in runs)


def captured(run: Run, directory: Path, keep: bool) -> "TraceDigest | None":
    """What the run's capture says; None where polars is not installed, or the capture cannot be read, which is said."""
    if run.status != "done" or not reads_captures():
        return None
    from stepscope.cli.study_kernels import digest_beside

    try:
        return digest_beside(run, directory, "kineto", keep)
    except InputError as error:
        warn(f"its capture is left out: {error}")
        return None


def stored_runs(places: Iterable[Path]) -> Iterator[tuple[Run, Path]]:
    """Every run under these folders, once, with its own folder. One that cannot be read is left out, which is said.

    Raises InputError for what is no folder.
    """
    from stepscope.core.run_directory import find_run_files, load_run

    files: dict[Path, None] = {}
    for place in places:
        if not place.is_dir():
            raise InputError(f"no runs at {place}: it is no folder")
        files.update(dict.fromkeys(file.resolve() for file in find_run_files(place)))
    for file in files:
        try:
            yield load_run(file), file.parent
        except InputError as error:
            warn(f"left out: {error}")
