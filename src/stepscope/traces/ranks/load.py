"""Reads the captures of a job's ranks, one after the other: what is kept of each is small."""

import gzip
import re
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from stepscope.core.errors import InputError
from stepscope.core.run_files import CAPTURE_FILES, RANK_FOLDER, RUN_FILE
from stepscope.traces.captures.load import load_capture
from stepscope.traces.ranks.job import Job, job_of
from stepscope.traces.ranks.rank import Rank, rank_of

_CAPTURES = (".json", ".json.gz", ".sqlite", ".nsys-rep")
_RANK = re.compile(r"rank[-_ .]?(\d{1,6})", re.IGNORECASE)
_SETTINGS_BYTES = 2**22
"""A larger JSON file beside captures is taken for a capture without a look inside."""
_NUMBERS = re.compile(r"(\d+)")


def captures_in(folder: Path) -> list[Path]:
    """The captures that a folder holds, or that lie in its run directories, in the order of the numbers in their names.

    Those of a run directory whose step ranks shared, too. Empty for a file, for any other run directory, and for the
    parquet files of one export. Whole JSON documents that hold no events, such as settings, are left out; whatever is
    damaged is not, so that no rank is lost unseen.
    """
    if (folder / RUN_FILE).exists():
        return _of_ranks(folder)
    if not folder.is_dir() or any(folder.glob("*.parquet")):
        return []
    try:
        entries = list(folder.iterdir())
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror or error}") from None
    if any((folder / name).exists() for name in CAPTURE_FILES):
        return []
    found = [
        entry
        for entry in entries
        if (entry.is_file() and entry.name.endswith(_CAPTURES) and not _holds_no_events(entry))
        or (entry.is_dir() and any((entry / name).exists() for name in CAPTURE_FILES))
    ]
    return sorted(found, key=lambda path: [int(part) if part.isdigit() else part for part in _NUMBERS.split(path.name)])


def _of_ranks(folder: Path) -> list[Path]:
    """The captures of the ranks that shared a run's step, its own first; empty where there are no others."""
    own = [folder / name for name in CAPTURE_FILES if (folder / name).exists()]
    others = [
        one for one in folder.glob(RANK_FOLDER.format(rank="*")) if any((one / n).exists() for n in CAPTURE_FILES)
    ]
    others.sort(key=lambda one: (len(one.name), one.name))
    return [own[0], *others] if own and others else []


def _holds_no_events(path: Path) -> bool:
    """Whether the file is a whole JSON document that is no trace."""
    try:
        with (gzip.open if path.name.endswith(".gz") else open)(path, "rb") as file:
            text = file.read(_SETTINGS_BYTES + 1)
        if len(text) > _SETTINGS_BYTES:
            return False
        held = msgspec.json.decode(text)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError):
        return False
    events = held.get("traceEvents") if isinstance(held, dict) else held
    return not isinstance(events, list) or not any(isinstance(event, dict) and "ph" in event for event in events)


def load_job(captures: list[Path], *, say: Callable[[str], None]) -> Job:
    """Read the captures of a job's ranks. Raises InputError where one cannot be read, or they are not of one job.

    A rank is the one that the capture says, or the number after "rank" in its name, or else its place in the list.
    `say` is told which rank is read.
    """
    ranks: list[Rank] = []
    for place, path in enumerate(captures):
        say(f"reading rank {place + 1} of {len(captures)}: {path.name}")
        summary = load_capture(path, say=say)
        told, named = summary.attribution.table.rank, _RANK.search(path.name)
        number = told if told is not None else int(named[1]) if named else place
        ranks.append(rank_of(summary, number, str(path)))
    return job_of(ranks)
