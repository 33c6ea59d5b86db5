"""Cells' processes that are forked, as their sweep sees them, and the servers that fork them."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from stepscope.engine.cell_process import cell_environment, kill_marked

_SERVER_COMMAND = (sys.executable, "-P", "-m", "stepscope.engine.fork_server")
MESSAGE_BYTES = 64 * 1024
_START_S = 120.0
"""Seconds that a server may take to import everything. Then its cells are started without it."""
_ANSWER_S = 10.0
"""Seconds that a server may take to fork."""

_GIVEN = ("CUDA_VISIBLE_DEVICES",)
"""Variables that no import reads: one server forks cells that differ in them, each with its own."""

_Environment = tuple[str, frozenset[tuple[str, str]]]
"""A current directory, and the variables: what imports may depend on."""


class ForkRequest(msgspec.Struct, kw_only=True):
    """What a server is asked for: a cell. The numbers of its stdin, its log, its events' pipe and of a socket on which
    the server speaks of it travel beside."""

    mark: str
    arguments: tuple[str, ...] = ()
    variables: dict[str, str | None] = {}
    """Environment variables that the cell has otherwise than the server; None: it lacks them."""


class ForkAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a server says: that it is ready, that a cell has begun, that it is dead; or why it forks none."""

    pid: int | None = None
    code: int | None = None
    """The exit code of a dead cell; negative for a signal."""
    refused: str | None = None


class Forked:
    """A cell's process that a server has forked, and keeps until `reap`."""

    def __init__(self, pid: int, talk: socket.socket) -> None:
        self.pid, self._talk = pid, talk
        self.code: int | None = None
        self.lost = False
        """Whether the server has gone, so that nobody can tell the exit code."""

    @property
    def kept(self) -> bool:
        """Whether the process' number cannot be another's: it lives, or waits to be reaped."""
        if self.code is None and not self.lost:
            with contextlib.suppress(BlockingIOError):
                self._hear(self._talk.recv(MESSAGE_BYTES))
        return not self.lost

    def ended(self) -> bool:
        """Whether it has ended, as far as the server says."""
        return not self.kept or self.code is not None

    async def reap(self, seconds: float) -> None:
        """Take the exit code of the dead process, and let its number go."""
        if self.code is None and not self.lost:
            data = await _received(self._talk, seconds)
            self._hear(data or b"")
        self._talk.close()

    def _hear(self, data: bytes) -> None:
        if data:
            self.code = msgspec.json.decode(data, type=ForkAnswer).code
        self.lost = self.code is None


class Forks:
    """The servers of a sweep: one for each environment in which cells are asked for, since imports depend on it."""

    def __init__(self, next_mark: Callable[[], str], modules: Sequence[str] = ()) -> None:
        self._next_mark, self._modules = next_mark, modules
        self._servers: dict[_Environment, _Server] = {}

    @property
    def import_s(self) -> float:
        """Seconds that a server took to import everything, which a process that is not forked takes, too; 0 where none
        is ready. Of several the shortest: the first read it from a cold disk."""
        return min((server.import_s for server in self._servers.values() if server.import_s), default=0.0)

    async def fork(self, mark: str, arguments: Sequence[str], files: Sequence[int]) -> Forked | None:
        """A new cell with these arguments and stdin, log and events; None where it must be started without a server."""
        if not (hasattr(os, "pidfd_open") and Path("/proc/self/task").is_dir()):
            return None
        try:
            variables = {name: value for name, value in os.environ.items() if name not in _GIVEN}
            environment = (str(Path.cwd()), frozenset(variables.items()))
            server = self._servers.get(environment)
            if server is None or server.has_died:
                server = self._servers[environment] = _Server(self._next_mark(), self._modules)
        except OSError:
            return None
        given = {name: os.environ.get(name) for name in _GIVEN}
        return await server.fork(ForkRequest(mark=mark, arguments=tuple(arguments), variables=given), files)

    def close(self) -> None:
        """End the servers."""
        for server in self._servers.values():
            server.close()


class _Server:
    def __init__(self, mark: str, modules: Sequence[str]) -> None:
        self._mark = mark
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        with theirs, tempfile.TemporaryFile() as printed:
            self._process = subprocess.Popen(
                (*_SERVER_COMMAND, str(theirs.fileno()), *modules),
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=cell_environment(mark),
            )
        self._began, self.import_s = time.monotonic(), 0.0
        self._was_ready = self._closed = False
        self._starting = asyncio.get_running_loop().create_task(self._start())

    @property
    def has_died(self) -> bool:
        """Whether it was ready once and has ended, so that another may do. One that fails in its start fails again."""
        if not self._closed and os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self.close()
        return self._was_ready and self._closed

    async def fork(self, request: ForkRequest, files: Sequence[int]) -> Forked | None:
        """Have a cell forked; None where the server refuses, or is gone."""
        if not await asyncio.shield(self._starting) or self._closed:
            return None
        talk, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        talk.setblocking(False)
        answer = None
        try:
            with theirs, contextlib.suppress(OSError):  # it is gone, or has stopped reading
                socket.send_fds(self._channel, [msgspec.json.encode(request)], [*files, theirs.fileno()])
                theirs.close()
                answer = _answer(await _received(talk, _ANSWER_S))
            if answer is not None and answer.pid is not None:
                return Forked(answer.pid, talk)
        except BaseException:
            talk.close()
            raise
        talk.close()
        if answer is None:
            self.close()
            kill_marked(request.mark)
        return None

    async def _start(self) -> bool:
        answer = _answer(await _received(self._channel, _START_S))
        self._was_ready = answer is not None and answer.refused is None
        if self._was_ready:
            self.import_s = time.monotonic() - self._began
        else:
            self.close()
        return self._was_ready

    def close(self) -> None:
        """End the server, and all that its imports have started. Cells are none of that."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ANSWER_S)
        kill_marked(self._mark)


async def _received(source: socket.socket, seconds: float) -> bytes | None:
    """The next message; nothing where the other side has gone, None where it says nothing in this time."""
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.get_running_loop().sock_recv(source, MESSAGE_BYTES)
    except TimeoutError:
        return None
    except OSError:
        return b""


def _answer(data: bytes | None) -> ForkAnswer | None:
    return msgspec.json.decode(data, type=ForkAnswer) if data else None
