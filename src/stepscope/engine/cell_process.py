"""A cell's process as its sweep sees it: started, listened to, and ended with all that it started itself."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stepscope.core.errors import StepscopeError
from stepscope.engine.cell_event import CellEvent

CELL_COMMAND = (sys.executable, "-P", "-m", "stepscope.engine.cell")
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


class CellProcess:
    """One process of `engine/cell.py`, within a running loop of events; `close` it whatever happens."""

    def __init__(self, request: bytes, *, mark: str, devices: Sequence[str] = ()) -> None:
        self._mark = mark
        self._loop = asyncio.get_running_loop()
        self._log, self._event = bytearray(), bytearray()
        self._too_long = False
        self.events: asyncio.Queue[CellEvent | None] = asyncio.Queue()
        """Events of the cell; None when it is dead."""
        self.dead = asyncio.Event()
        self._events, events = os.pipe()
        self._printed, printed = os.pipe()
        try:
            self._process = subprocess.Popen(
                (*CELL_COMMAND, str(events), *devices),
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=printed,
                pass_fds=(events,),
                start_new_session=True,  # Ctrl-C on the terminal reaches the sweep alone, which passes it on
                env={"KINETO_LOG_LEVEL": "99", **os.environ, MARK: mark},
            )
        except OSError as error:
            os.close(self._events)
            os.close(self._printed)
            raise StepscopeError(f"cannot start a process: {error.strerror or error}") from error
        finally:
            os.close(events)
            os.close(printed)
        for pipe, read in ((self._events, self._read_events), (self._printed, self._read_log)):
            os.set_blocking(pipe, False)
            self._loop.add_reader(pipe, read)
        self._watch()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a process that is dead already says so by its exit code
            self._process.stdin.write(request + b"\n")
            self._process.stdin.flush()

    @property
    def log(self) -> str:
        """The end of what the process, and those it started, printed to stdout and stderr."""
        return bytes(self._log).decode(errors="replace")

    @property
    def code(self) -> int | None:
        """The exit code, once the process is closed: negative for a signal, None if it could not be killed."""
        return self._process.returncode

    async def stop(self, grace_s: float) -> None:
        """Let the process save what it has, as on Ctrl-C."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGINT)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.dead.wait()

    async def close(self) -> None:
        """End the process, if it has not ended, and all that it started."""
        try:
            # Dead, the process is not yet reaped: its number, and so its group's, cannot be another's.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KILL_GRACE_S):
                    await self.dead.wait()
            kill_marked(self._mark)
        finally:
            self._process.poll()
            self._read_events()
            self._read_log()
            for pipe in (self._events, self._printed):
                self._loop.remove_reader(pipe)
                os.close(pipe)
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def _watch(self) -> None:
        """Watch for the death of the process, without reaping it, and then set `dead`."""
        try:
            handle = os.pidfd_open(self._process.pid)
        except (AttributeError, OSError):  # not Linux, an old Linux, or one that forbids it
            self._poll()
            return

        def ended() -> None:
            self._loop.remove_reader(handle)
            os.close(handle)
            self._set_dead()

        self._loop.add_reader(handle, ended)

    def _poll(self) -> None:
        if self._process.poll() is None:
            self._loop.call_later(_POLL_S, self._poll)
        else:
            self._set_dead()

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


def kill_marked(mark: str) -> None:
    """Kill every process whose mark has this prefix, whatever its group, session and parent; return when they are gone.

    A system without /proc has no way to find them: there, only a cell's group ends with it.
    """
    for _ in range(_PASSES):
        found = [pid for pid in _marked(mark) if pid != os.getpid()]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(OSError):  # it may have ended by itself
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _marked(mark: str) -> list[int]:
    wanted = f"{MARK}={mark}".encode()
    found: list[int] = []
    with contextlib.suppress(OSError):
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # no process, another user's, or gone
                variables = (process / "environ").read_bytes().split(b"\0")
                if process.name.isdigit() and any(variable.startswith(wanted) for variable in variables):
                    found.append(int(process.name))
    return found
