"""Runs, and what their captures say: measured just now, or found in folders. Several studies answer from both."""

import functools
import importlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.app.cli.output import warn
from stepscope.core.attentions import attention_names
from stepscope.core.errors import InputError, choose
from stepscope.core.run import Run
from stepscope.core.workload import DTYPES, PHASES

if TYPE_CHECKING:
    from stepscope.traces.captures.digest import TraceDigest


@functools.cache
def reads_captures() -> bool:
    """A machine that only measures has no polars."""
    try:
        importlib.import_module("stepscope.traces.captures.digest")
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
    from stepscope.traces.captures.beside import digest_beside

    try:
        return digest_beside(run, directory, "kineto", say=warn, keep=keep)
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


def finished_answer(places: tuple[Path, ...], wanted: Mapping[str, object]) -> Path | None:
    """The one file among stored results, an answer that is finished; None where they are folders of runs."""
    if len(places) != 1 or not places[0].is_file():
        return None
    if wanted:
        flags = ", ".join(f"--{field.replace('_', '-')}" for field in wanted)
        raise InputError(f"{places[0]} is a finished answer: {flags} would choose among the runs of a folder")
    return places[0]


def wanted_runs(given: Mapping[str, tuple[Any, ...] | None]) -> dict[str, tuple[Any, ...]]:
    """Which runs of a folder are wanted, by a field of the workload; a field that is not named keeps all."""
    choices = {"dtype": DTYPES, "phase": PHASES, "attention": attention_names()}
    wanted = {field: values for field, values in given.items() if values is not None}
    for field, values in wanted.items():
        for value in values:
            choose(value, choices.get(field, (value,)), field)
    return wanted


def is_wanted(run: Run, wanted: Mapping[str, tuple[Any, ...]]) -> bool:
    """Whether the run's workload has, in each of these fields, one of the values."""
    workload = run.workload
    return all(
        (workload.name if field == "model" else getattr(workload, field, None)) in values
        for field, values in wanted.items()
    )


def type_of_device(device: str) -> str:
    """cpu or cuda; asks torch only where the user leaves it open."""
    if device != "auto":
        return device.partition(":")[0]
    from stepscope.recording.device import resolve_device

    return resolve_device(device).type
