"""The runs of some places for the verbs that list many, with what must be said of them on stderr."""

import gc
import time
from pathlib import Path

from stepscope.app.cli.output import warn
from stepscope.core.run import Run
from stepscope.core.run_directory import LAST, find_place
from stepscope.core.run_index import list_runs

_QUIET_S = 2.0
"""Reading runs that takes longer says how far it is."""


def listed_runs(places: list[Path] | None, runs: Path) -> list[Run]:
    """The readable runs of these places, oldest first; those left out, and why, are told on stderr.

    runs: the folder that is read where no place is named, and in which `last` is the run that began latest.
    """
    places = [find_place(LAST, runs) if str(place) == LAST else place for place in places or [runs]]
    said = time.monotonic()

    def tell(done: int, of: int) -> None:
        nonlocal said
        if time.monotonic() - said > _QUIET_S:
            said = time.monotonic()
            warn(f"reading runs: {done:,} of {of:,}")

    # Runs stay until the command ends: Python's collector would walk through thousands of them again and again.
    gc.disable()
    try:
        listing = list_runs(places, tell)
    finally:
        gc.freeze()
        gc.enable()
    for fault in listing.faults:
        warn(f"left out: {fault}")
    for note in listing.notes:
        warn(note)
    return listing.runs
