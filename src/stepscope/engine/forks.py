"""Cells' processes that are forked, as their sweep sees them, and the servers that fork them."""

import asyncio
import contextlib
import ctypes
import gc
import importlib
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from stepscope.engine.cell_process import MARK, cell_environment, kill_marked

_SERVER_COMMAND = (sys.executable, "-P", "-m", "stepscope.engine.forks")
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
                self._hear(_decoded(self._talk.recv(MESSAGE_BYTES)))
        return not self.lost

    def ended(self) -> bool:
        """Whether it has ended, as far as the server says."""
        return not self.kept or self.code is not None

    async def reap(self, seconds: float) -> None:
        """Take the exit code of the dead process, and let its number go."""
        if self.code is None and not self.lost:
            self._hear(await _received(self._talk, seconds))
        self._talk.close()

    def _hear(self, answer: ForkAnswer | None) -> None:
        self.code = answer.code if answer is not None else None
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

    async def begin(self) -> "_Server | None":
        """The server for this environment, started where none is; None where the system has none."""
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
        return server

    async def fork(self, mark: str, arguments: Sequence[str], files: Sequence[int]) -> Forked | None:
        """A new cell with these arguments and stdin, log and events; None where it must be started without a server."""
        server = await self.begin()
        if server is None:
            return None
        from_environment = {name: os.environ.get(name) for name in _GIVEN}
        return await server.fork(ForkRequest(mark=mark, arguments=tuple(arguments), variables=from_environment), files)

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
                answer = await _received(talk, _ANSWER_S)
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
        answer = await _received(self._channel, _START_S)
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


async def _received(source: socket.socket, seconds: float) -> ForkAnswer | None:
    """The next answer; None where the other side has gone, or says nothing in this time."""
    with contextlib.suppress(OSError):  # TimeoutError is one
        async with asyncio.timeout(seconds):
            return _decoded(await asyncio.get_running_loop().sock_recv(source, MESSAGE_BYTES))
    return None


def _decoded(data: bytes) -> ForkAnswer | None:
    return msgspec.json.decode(data, type=ForkAnswer) if data else None


# The process that cells are forked from: it has imported what a cell needs, and has never computed or seen a device.
#
# Started as `python -m stepscope.engine.forks SOCKET [MODULE...]`, with the number of a socket and
# further modules to import. For each request it forks a child, which becomes the process that `python -m
# stepscope.engine.cell_process` would be: it has a session, a log, a lifeline and a mark of its own. This process has
# one thread, and no other child than cells. It ends when the socket closes: then the sweep's process is gone. Its cells
# have lifelines of their own.


_THREADS = Path("/proc/self/task")
_DEVICE_FILE = re.compile(r"/dev/(nvidia|dri/|kfd)")
_BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
"""Variables that say how many threads OpenBLAS has; the first that is set counts."""
_BLAS_LIBRARY = re.compile(r"/\S*openblas\S*\.so\S*")
_BLAS_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


def main() -> int:
    """Serve the sweep until it is gone. Returns in each child alone, with the exit code of its cell."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    # NumPy's OpenBLAS, which starts its threads when it is loaded, starts none.
    blas_threads = os.environ.get(_BLAS_THREADS[0])
    os.environ[_BLAS_THREADS[0]] = "1"
    gc.disable()  # what an import makes stays: to look through it again and again is a fifth of its time
    import stepscope.engine.step  # noqa: F401, PLC0415  # pyright: ignore[reportUnusedImport]
    from stepscope.engine.cell_process import main as measure  # noqa: PLC0415

    for module in sys.argv[2:]:
        importlib.import_module(module)
    del os.environ[_BLAS_THREADS[0]]
    if blas_threads is not None:
        os.environ[_BLAS_THREADS[0]] = blas_threads
    set_blas_threads = _blas()
    os.close(os.pidfd_open(os.getpid()))  # raises where the system has none, or forbids it
    sys.stdout.flush()
    sys.stderr.flush()
    gc.collect()
    gc.freeze()  # else each cell's first collection would copy every page that an import has made
    gc.enable()
    channel.send(msgspec.json.encode(ForkAnswer(refused=why_not_fork())))
    if not _ForkServer(channel).serve():
        kill_marked(os.environ[MARK])  # what imports have started
        os.killpg(0, signal.SIGKILL)
    # As many threads as OpenBLAS would have started in a process of its own.
    stated = next((os.environ[name] for name in _BLAS_THREADS if os.environ.get(name)), "")
    threads = int(stated) if stated.isdecimal() and int(stated) else len(os.sched_getaffinity(0))
    for setter in set_blas_threads:
        setter(threads)
    return measure("fork")


def why_not_fork() -> str | None:
    """The reason why a child of this process would not be like a process of its own; None if it would."""
    threads = len(list(_THREADS.iterdir()))
    if threads != 1:
        return f"the process has {threads} threads"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "torch has initialised CUDA"
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one by which the directory is read is gone by now
            if _DEVICE_FILE.match(str(file.readlink())):
                return f"the process has opened {file.readlink()}"
    return None


class _Cell:
    """A child, from its birth until the sweep has asked for no more of it."""

    def __init__(self, pid: int, talk: socket.socket) -> None:
        self.pid, self.talk, self.handle = pid, talk, os.pidfd_open(pid)
        self.listening, self.dead = True, False

    def close(self) -> None:
        os.close(self.handle)
        self.talk.close()


class _ForkServer:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._cells: list[_Cell] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ, None)

    def serve(self) -> bool:
        """Fork for each request. Returns True in a child that is ready to begin, False here when the sweep is gone."""
        while True:
            for key, _ in self._selector.select():
                cell: _Cell | None = key.data
                if cell is not None:
                    self._attend(cell, key.fd)
                    continue
                data, files, _, _ = socket.recv_fds(self._channel, MESSAGE_BYTES, 4)
                if not data:
                    return False
                if self._fork(msgspec.json.decode(data, type=ForkRequest), files):
                    return True

    def _fork(self, request: ForkRequest, files: list[int]) -> bool:
        """Fork a cell, and tell the sweep; returns True in the child."""
        talk = socket.socket(fileno=files.pop())
        refused = why_not_fork()
        if refused is None:
            ready, write_end = os.pipe()
            pid = os.fork()
            if pid == 0:
                # What belongs to this process and to the other cells is not the child's.
                self._selector.close()
                self._channel.close()
                for cell in self._cells:
                    cell.close()
                for file in (talk.detach(), ready):
                    os.close(file)
                _become(request, files)
                os.write(write_end, b"1")
                os.close(write_end)
                return True
            os.close(write_end)
            began = os.read(ready, 1)
            os.close(ready)
            if began:
                cell = _Cell(pid, talk)
                with contextlib.suppress(OSError):  # the sweep has gone meanwhile
                    talk.send(msgspec.json.encode(ForkAnswer(pid=pid)))
                self._cells.append(cell)
                self._selector.register(cell.talk, selectors.EVENT_READ, cell)
                self._selector.register(cell.handle, selectors.EVENT_READ, cell)
            else:
                os.waitpid(pid, 0)
                refused = "the child could not become a cell"
        for file in files:
            os.close(file)
        if refused is not None:
            with contextlib.suppress(OSError):
                talk.send(msgspec.json.encode(ForkAnswer(refused=refused)))
            talk.close()
        return False

    def _attend(self, cell: _Cell, file: int) -> None:
        """Tell the sweep that a cell is dead. It is reaped when the sweep has closed its end: until then its number,
        and its group's, cannot be another's."""
        if file == cell.handle and not cell.dead:
            ended = os.waitid(os.P_PIDFD, cell.handle, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            self._selector.unregister(cell.handle)
            cell.dead = True
            with contextlib.suppress(OSError):
                cell.talk.send(msgspec.json.encode(ForkAnswer(code=code)))
        elif file != cell.handle and cell.listening:
            self._selector.unregister(cell.talk)
            cell.listening = False
        if cell.dead and not cell.listening:
            os.waitpid(cell.pid, 0)
            self._cells.remove(cell)
            cell.close()


def _become(request: ForkRequest, files: list[int]) -> None:
    """Make this child the leader of a session, with the pipes and the mark of its cell."""
    os.setsid()
    output, (stdin, printed, events) = os.pread(1, MESSAGE_BYTES, 0), files
    for file, number in ((stdin, 0), (printed, 1), (printed, 2)):
        os.dup2(file, number)
    os.close(stdin)
    os.close(printed)
    _mark(request.mark)
    for name, value in request.variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    if output:  # what imports have printed is in the log of each cell, as where each imports for itself
        os.write(1, output)
    sys.argv = ["-m", str(events), *request.arguments]


def _mark(mark: str) -> None:
    """Carry this mark: in what this process starts, and in its own environment as the system shows it.

    The system shows the strings that the process was started with, so the mark is written over the one among them.
    """
    read = ctypes.CDLL(None).getenv
    read.restype = ctypes.c_void_p
    place, before = read(MARK.encode()), os.environ[MARK]
    if len(before) != len(mark):
        raise ValueError(f"{mark!r} is not as long as {before!r}")
    ctypes.memmove(place, mark.encode(), len(mark))
    os.environ[MARK] = mark
    if f"{MARK}={mark}".encode() not in Path("/proc/self/environ").read_bytes().split(b"\0"):
        raise OSError("the system does not show the mark")


def _blas() -> list[Callable[[int], object]]:
    """For each OpenBLAS that is loaded, what gives it threads. Raises where one has nothing of that kind."""
    mapped = map(_BLAS_LIBRARY.search, Path("/proc/self/maps").read_text().splitlines())
    setters: list[Callable[[int], object]] = []
    for path in {match[0] for match in mapped if match}:
        library = ctypes.CDLL(path)
        name = next((name for name in _BLAS_SETTERS if hasattr(library, name)), None)
        if name is None:
            raise RuntimeError(f"{path} has no function that sets its threads")
        setters.append(getattr(library, name))
    return setters


if __name__ == "__main__":
    from stepscope.core import interrupts
    from stepscope.core.interrupts import leave

    leave(interrupts.exit_code(main()))
