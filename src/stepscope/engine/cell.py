"""A cell's process: it reads one StepRequest on stdin, writes events to a pipe, and leaves a run directory.

Started by `engine/cell_process.py` as `python -m stepscope.engine.cell PIPE`, with the number of the pipe, or forked by
`engine/fork_server.py` as if it were. stdin stays open as a lifeline: when the sweep's process dies, however it dies,
the pipe closes and this process ends itself rather than hold the device. Whatever is printed, by libraries or by
Python's own start, is the cell's log.
"""

import contextlib
import gc
import os
import signal
import sys
from pathlib import Path

import msgspec

from stepscope.core import interrupts
from stepscope.core.errors import EXIT_WRONG_INPUT, InputError, StepscopeError, one_line
from stepscope.core.evidence import ProcessStart
from stepscope.core.interrupts import end_with_stdin, leave
from stepscope.engine.cell_process import MARK, CellEvent, kill_marked
from stepscope.engine.request import Stage, StepRequest


def main(start: ProcessStart = "exec") -> int:
    """Measure the request on stdin. Exit code 0 when a run was saved, 2 when the request was refused.

    start: how this process came to be.
    """
    # What was measured is kept whichever signal comes. A sweep in a script's background inherits an ignored SIGINT, and
    # a cell on a node of a cluster one that the worker of Ray's blocks.
    interrupts.install(even_if_ignored=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, interrupts.SIGNALS)
    events = int(sys.argv[1])
    os.set_inheritable(events, False)  # the processes that this one starts must not write to the sweep
    request_line = sys.stdin.readline()
    die_with_parent(os.environ.get(MARK))

    try:
        from stepscope.engine.step import measure_step  # noqa: PLC0415
        from stepscope.engine.turns import measure_in_turns  # noqa: PLC0415  (torch, after the lifeline)
        from stepscope.recording.device import resolve_device  # noqa: PLC0415
    except (ImportError, StepscopeError) as error:
        _send(events, CellEvent(error=f"cannot measure here: {one_line(error)}", error_for_all=True))
        return error.exit_code if isinstance(error, StepscopeError) else EXIT_WRONG_INPUT

    if len(sys.argv) > 2:
        return _check_devices(sys.argv[2:], events)
    request = msgspec.structs.replace(msgspec.json.decode(request_line, type=StepRequest), process_start=start)

    if request.memory is not None:
        gc.unfreeze()  # what holds the memory may be found among what a fork server has set aside

    def tell(stage: Stage) -> None:
        _send(events, CellEvent(stage=stage.name, detail=stage.detail))

    def began(directory: Path) -> None:
        _send(events, CellEvent(directory=str(directory)))

    try:
        resolve_device(request.device)
    except StepscopeError as error:
        _send(events, CellEvent(error=str(error), error_for_all=True))
        return error.exit_code
    try:
        measured = measure_step if request.against is None else measure_in_turns
        measured(request, tell, began)
    except StepscopeError as error:
        lost = not isinstance(error, InputError)
        _send(events, CellEvent(error=one_line(error, limit=1000), error_for_all=lost, log_matters=lost))
        return error.exit_code
    _send(events, CellEvent(finished=True))
    return 0


def _check_devices(names: list[str], events: int) -> int:
    """Check once, before several devices share a sweep, that all of them are there and differ."""
    from stepscope.recording.device import resolve_device  # noqa: PLC0415

    try:
        devices = [resolve_device(name) for name in names]
        if len(set(devices)) < len(devices):
            raise InputError(f"--device {','.join(names)} names a device twice: each measures one cell at a time")
    except StepscopeError as error:
        _send(events, CellEvent(error=str(error), error_for_all=True))
        return error.exit_code
    return 0


def _send(events: int, event: CellEvent) -> None:
    data = msgspec.json.encode(event) + b"\n"
    # A sweep that no longer listens will close the lifeline; until then the measurement goes on.
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(events, data) :]


def die_with_parent(mark: str | None = None) -> None:
    """End this process when stdin closes; its group, if it leads one; and all that carry `mark`, if it is given."""

    end_with_stdin(None if mark is None else lambda: kill_marked(mark))


if __name__ == "__main__":
    leave(interrupts.exit_code(main()))
