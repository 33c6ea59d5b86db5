"""A cell's process: one StepRequest in on stdin, events out on stdout, a run directory behind.

Started by `studies/sweep.py` as `python -m stepscope.studies.cell`. stdin stays open as a lifeline: when the sweep's
process dies, however it dies, the pipe closes and this process ends itself rather than hold the device.
"""

import contextlib
import os
import signal
import sys
import threading
from typing import TextIO

import msgspec

from stepscope.core.errors import EXIT_WRONG_INPUT, InputError, StepscopeError, one_line
from stepscope.studies.request import Stage, StepRequest


class CellEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line of a cell's report to its sweep."""

    stage: str | None = None
    detail: str = ""
    run_directory: str | None = None
    """Sent last: where the finished run lies."""
    error: str | None = None
    """The request cannot be measured as given."""
    error_for_all: bool = False
    """The error does not depend on the cell: no other cell can be measured either."""
    stderr_matters: bool = False
    """What the cell wrote to stderr is a measurement that found no other place."""


def main() -> int:
    """Measure the request on stdin. Exit code 0 when a run was saved, 2 when the request was refused."""
    events = _claim_stdout()
    request_line = sys.stdin.readline()
    die_with_parent()
    # What was measured is kept, whichever asks. SIGINT too: a sweep in the background of a script inherits it ignored.
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)

    try:
        from stepscope.measure.device import resolve_device  # noqa: PLC0415  (torch, after the lifeline)
        from stepscope.studies.step import measure_step  # noqa: PLC0415
    except ImportError as error:
        _send(events, CellEvent(error=f"cannot measure here: {one_line(error)}", error_for_all=True))
        return EXIT_WRONG_INPUT

    if len(sys.argv) > 1:
        return _check_devices(sys.argv[1:], events)
    request = msgspec.json.decode(request_line, type=StepRequest)

    def tell(stage: Stage) -> None:
        _send(events, CellEvent(stage=stage.name, detail=stage.detail))

    try:
        resolve_device(request.device)
    except StepscopeError as error:
        _send(events, CellEvent(error=str(error), error_for_all=True))
        return error.exit_code
    try:
        _, directory = measure_step(request, tell)
    except StepscopeError as error:
        lost = not isinstance(error, InputError)
        _send(events, CellEvent(error=one_line(error, limit=1000), error_for_all=lost, stderr_matters=lost))
        return error.exit_code
    _send(events, CellEvent(run_directory=str(directory)))
    return 0


def _check_devices(names: list[str], events: TextIO) -> int:
    """Whether all the named devices are there and differ: asked once, before several share a sweep."""
    from stepscope.measure.device import resolve_device  # noqa: PLC0415

    try:
        devices = [resolve_device(name) for name in names]
        if len(set(devices)) < len(devices):
            raise InputError(f"--devices {','.join(names)} names a device twice: each measures one cell at a time")
    except StepscopeError as error:
        _send(events, CellEvent(error=str(error), error_for_all=True))
        return error.exit_code
    return 0


def _send(events: TextIO, event: CellEvent) -> None:
    # A sweep that no longer listens will close the lifeline; until then the measurement goes on.
    with contextlib.suppress(BrokenPipeError):
        events.write(msgspec.json.encode(event).decode() + "\n")
        events.flush()


def _claim_stdout() -> TextIO:
    """The real stdout for events alone; what libraries print goes to stderr."""
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return events


def die_with_parent() -> None:
    """End this process, and its group if it leads one, when stdin closes."""

    def wait_for_the_end() -> None:
        while os.read(0, 4096):
            pass
        # The sweep made this process the leader of its own group: compilers' helpers end with it.
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_for_the_end, daemon=True, name="lifeline").start()


if __name__ == "__main__":
    sys.exit(main())
