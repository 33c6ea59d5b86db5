"""Reads a capture, with the run that left it."""

from collections.abc import Callable
from pathlib import Path

from stepscope.core.errors import InputError
from stepscope.core.run import Run
from stepscope.core.run_directory import load_run
from stepscope.core.run_files import RUN_FILE
from stepscope.traces.captures.attribution import attribute
from stepscope.traces.captures.summary import TraceSummary
from stepscope.traces.read import find_capture, read_trace


def load_capture(path: Path, *, say: Callable[[str], None]) -> TraceSummary:
    """Read and attribute a capture, with the run it belongs to where one lies beside it.

    `say` is told in one line why a run beside it is left out.
    """
    attribution = attribute(read_trace(path))
    attribution.self_check()
    return TraceSummary(attribution=attribution, run=_run_beside(find_capture(path), say))


def _run_beside(capture: Path, say: Callable[[str], None]) -> Run | None:
    if not (capture.parent / RUN_FILE).is_file():
        return None
    try:
        return load_run(capture.parent)
    except InputError as error:
        say(f"the run beside the capture is left out: {error}")
        return None
