"""A cell's process as its sweep sees it: started, listened to, and ended with all that it started itself."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from stepscope.core import interrupts
from stepscope.core.errors import EXIT_WRONG_INPUT, GateFailure, InputError, StepscopeError, one_line
from stepscope.core.evidence import ProcessStart
from stepscope.core.interrupts import end_with_stdin, leave
from stepscope.engine.request import StepRequest

# The events by which a cell's process reports to its sweep.


class CellEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line of a cell's report to its sweep."""

    stage: str | None = None
    detail: str = ""
    directory: str | None = None
    """Sent once, when the run's directory has been made."""
    finished: bool = False
    """Sent last: the run lies in its directory."""
    error: str | None = None
    """The request cannot be measured as given."""
    wrong: bool = False
    """Whether the error is that an implementation computes something else than it should."""
    error_for_all: bool = False
    """The error does not depend on the cell: no other cell can be measured either."""
    log_matters: bool = False
    """Whether the cell wrote to stderr a measurement that found no other place."""


CELL_COMMAND = (sys.executable, "-P", "-m", "stepscope.engine.cell_process")
"""The command of a cell's process. -P, since the user's current directory may hold a random.py of theirs."""
MARK = "STEPSCOPE_CELL"
"""The environment variable that marks a cell's process, and all that it starts, as belonging to that cell."""
LOG_KEPT_BYTES = 4 * 1024 * 1024
EVENT_BYTES = 64 * 1024
"""The longest line on the events' pipe; a longer one is no event and is dropped."""
_KILL_GRACE_S = 5.0
"""Seconds to wait for a killed process to be gone. One that waits in a driver may take for ever."""
_POLL_S = 0.1
_PASSES = 100


class Started(Protocol):
    """A process that has been started, and is its starter's to reap."""

    @property
    def pid(self) -> int: ...

    @property
    def code(self) -> int | None:
        """The exit code once it is reaped: negative for a signal, None if it is not known."""
        ...

    @property
    def lost(self) -> bool:
        """Whether nobody is left who could tell the exit code."""
        ...

    @property
    def kept(self) -> bool:
        """Whether its number cannot be another process': it lives, or waits to be reaped."""
        ...

    def ended(self) -> bool:
        """Whether it has ended, for systems that do not tell by themselves."""
        ...

    async def reap(self, seconds: float) -> None:
        """Take the exit code of the dead process, in this time."""
        ...


Fork = Callable[[str, Sequence[str], Sequence[int]], Awaitable[Started | None]]
"""Starts a cell with this mark, these arguments, and these files as stdin, log and events' pipe. None: it cannot."""


class CellProcess:
    """One process of `engine/cell_process.py`, within a running loop of events; `close` it whatever happens."""

    culprit: str | None = None
    """Which of several processes died first without a word; of one alone, its exit code says it."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._loop = asyncio.get_running_loop()
        self._log, self._event = bytearray(), bytearray()
        self._too_long = False
        self._process: Started | None = None
        self._events = self._printed = self._lifeline = -1
        self.events: asyncio.Queue[CellEvent | None] = asyncio.Queue()
        """Events of the cell; None when it is dead."""
        self.dead = asyncio.Event()

    @classmethod
    async def start(
        cls, request: bytes, *, mark: str, devices: Sequence[str] = (), fork: Fork | None = None
    ) -> "CellProcess":
        """Start a cell's process: by `fork`, where it is given and can, else as a Python of its own."""
        self = cls(mark)
        self._events, events = os.pipe()
        self._printed, printed = os.pipe()
        stdin, self._lifeline = os.pipe()
        for pipe, read in ((self._events, self._read_events), (self._printed, self._read_log)):
            os.set_blocking(pipe, False)
            self._loop.add_reader(pipe, read)
        try:
            files = (stdin, printed, events)
            self._process = await fork(mark, devices, files) if fork is not None else None
            if self._process is None:
                self._process = _Spawned(mark, devices, *files)
        except BaseException as error:
            kill_marked(mark)
            self._close_pipes()
            if isinstance(error, OSError):
                raise StepscopeError(f"cannot start a process: {error.strerror or error}") from error
            raise
        finally:
            for file in (stdin, printed, events):
                os.close(file)
        self._watch(self._process.pid)
        with contextlib.suppress(BrokenPipeError):  # a process that is dead already says so by its exit code
            os.write(self._lifeline, request + b"\n")
        return self

    @property
    def log(self) -> str:
        """The end of what the process, and those it started, printed to stdout and stderr."""
        return bytes(self._log).decode(errors="replace")

    @property
    def code(self) -> int | None:
        """The exit code, once the process is closed: negative for a signal, None if it could not be killed, or if it
        is `lost`."""
        return self._started.code

    @property
    def lost(self) -> bool:
        """Whether nobody can tell any more how the process ended."""
        return self._started.lost

    @property
    def _started(self) -> Started:
        assert self._process is not None
        return self._process

    async def stop(self, grace_s: float) -> None:
        """Let the process save what it has, as on Ctrl-C."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._started.pid, signal.SIGINT)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.dead.wait()

    def kill(self) -> None:
        """End the process and its group at once, if it has not ended; it is still to be closed."""
        # Dead, the process is not yet reaped: its number, and so its group's, cannot be another's.
        if self._started.kept or not self.dead.is_set():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._started.pid, signal.SIGKILL)

    async def close(self) -> None:
        """End the process, if it has not ended, and all that it started."""
        try:
            self.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KILL_GRACE_S):
                    await self.dead.wait()
            kill_marked(self._mark)
            if self.dead.is_set():
                await self._started.reap(_KILL_GRACE_S)
        finally:
            self._read_events()
            self._read_log()
            self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._events, self._printed):
            self._loop.remove_reader(pipe)
            os.close(pipe)
        os.close(self._lifeline)

    def _watch(self, pid: int) -> None:
        """Watch for the death of the process, without reaping it, and then set `dead`."""
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:  # it is dead, and whoever forked it too
            self._set_dead()
            return
        except (AttributeError, OSError):  # not Linux, an old Linux, or one that forbids it
            self._poll()
            return

        def ended() -> None:
            self._loop.remove_reader(handle)
            os.close(handle)
            self._set_dead()

        self._loop.add_reader(handle, ended)

    def _poll(self) -> None:
        if self._started.ended():
            self._set_dead()
        else:
            self._loop.call_later(_POLL_S, self._poll)

    def _set_dead(self) -> None:
        self._read_events()
        self.events.put_nowait(None)
        self.dead.set()

    def _read_log(self) -> None:
        for data in self._chunks(self._printed):
            self._log += data
            del self._log[:-LOG_KEPT_BYTES]

    def _read_events(self) -> None:
        for data in self._chunks(self._events):
            *lines, rest = data.split(b"\n")
            for line in lines:
                self._hear(bytes(self._event + line))
                self._event.clear()
                self._too_long = False
            self._event += rest
            if len(self._event) > EVENT_BYTES:
                self._event.clear()
                self._too_long = True

    def _hear(self, line: bytes) -> None:
        """Take in one line of the events' pipe. A line that is no event is dropped."""
        if self._too_long or len(line) > EVENT_BYTES:
            return
        try:
            event = msgspec.json.decode(line, type=CellEvent)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        self.events.put_nowait(event)

    def _chunks(self, pipe: int) -> Sequence[bytes]:
        """Content of a pipe, up to a bound, so that a process that prints without end does not block other pipes."""
        chunks: list[bytes] = []
        for _ in range(64):
            try:
                data = os.read(pipe, 64 * 1024)
            except BlockingIOError:
                break
            if not data:
                self._loop.remove_reader(pipe)
                break
            chunks.append(data)
        return chunks


class _Spawned:
    """A cell that is a Python of its own."""

    lost, kept = False, True

    def __init__(self, mark: str, arguments: Sequence[str], stdin: int, printed: int, events: int) -> None:
        self._process = subprocess.Popen(
            (*CELL_COMMAND, str(events), *arguments),
            stdin=stdin,
            stdout=printed,
            stderr=printed,
            pass_fds=(events,),
            start_new_session=True,  # Ctrl-C on the terminal reaches the sweep alone, which passes it on
            env=cell_environment(mark),
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        return self._process.returncode

    def ended(self) -> bool:
        return self._process.poll() is not None

    async def reap(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)


def cell_environment(mark: str) -> dict[str, str]:
    """The environment of a cell that carries this mark."""
    return {"KINETO_LOG_LEVEL": "99", **os.environ, MARK: mark}


def kill_marked(mark: str) -> None:
    """Kill every process whose mark has this prefix, whatever its group, session and parent; return when they are gone.

    A system without /proc has no way to find them: there, only a cell's group ends with it.
    """
    found_none = False
    for _ in range(_PASSES):
        pids = [pid for pid in _marked(mark) if pid != os.getpid()]
        if not pids and found_none:
            return
        found_none = not pids  # a process that was started just now has no variables yet for a moment: look again
        for pid in pids:
            with contextlib.suppress(OSError):  # it may have ended by itself
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _marked(mark: str) -> list[int]:
    wanted = f"{MARK}={mark}".encode()
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # no process, another user's, or gone
                variables = (process / "environ").read_bytes().split(b"\0")
                if process.name.isdigit() and any(variable.startswith(wanted) for variable in variables):
                    pids.append(int(process.name))
    return pids


# A cell's process: it reads one StepRequest on stdin, writes events to a pipe, and leaves a run directory.
#
# Started by `CELL_COMMAND`, as `python -m stepscope.engine.cell_process PIPE`, with the number of the pipe, or
# forked by `engine/forks.py` as if it were. stdin stays open as a lifeline: when the sweep's process dies, however it
# dies, the pipe closes and this process ends itself rather than hold the device. Whatever is printed, by libraries or
# by Python's own start, is the cell's log.


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
    mark = os.environ.get(MARK)
    # The lifeline: what carries the mark ends with this process, too.
    end_with_stdin(None if mark is None else lambda: kill_marked(mark))

    gc.disable()  # what an import makes stays: to look through it again and again is a fifth of its time
    try:
        from stepscope.engine.step import measure_in_turns, measure_step  # noqa: PLC0415  (torch, after the lifeline)
        from stepscope.recording.environment import resolve_device  # noqa: PLC0415
    except (ImportError, StepscopeError) as error:
        _send(events, CellEvent(error=f"cannot measure here: {one_line(error)}", error_for_all=True))
        return error.exit_code if isinstance(error, StepscopeError) else EXIT_WRONG_INPUT
    finally:
        gc.freeze()
        gc.enable()

    if len(sys.argv) > 2:
        return _check_devices(sys.argv[2:], events)
    request = msgspec.structs.replace(msgspec.json.decode(request_line, type=StepRequest), process_start=start)

    if request.memory is not None:
        gc.unfreeze()  # what holds the memory may be found among what is set aside

    try:
        resolve_device(request.device)
    except StepscopeError as error:
        _send(events, CellEvent(error=str(error), error_for_all=True))
        return error.exit_code
    try:
        measured = measure_step if request.against is None else measure_in_turns
        measured(
            request,
            lambda stage: _send(events, CellEvent(stage=stage.name, detail=stage.detail)),
            lambda directory: _send(events, CellEvent(directory=str(directory))),
        )
    except StepscopeError as error:
        wrong = isinstance(error, GateFailure)
        lost = not wrong and not isinstance(error, InputError)
        line = one_line(error, limit=1000)
        _send(events, CellEvent(error=line, wrong=wrong, error_for_all=lost, log_matters=lost))
        return error.exit_code
    _send(events, CellEvent(finished=True))
    return 0


def _check_devices(names: list[str], events: int) -> int:
    """Check once, before several devices share a sweep, that all of them are there and differ."""
    from stepscope.recording.environment import resolve_device  # noqa: PLC0415

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


if __name__ == "__main__":
    leave(interrupts.exit_code(main()))
