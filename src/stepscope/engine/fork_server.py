"""The process that cells are forked from: it has imported what a cell needs, and has never computed or seen a device.

Started by `engine/forks.py` as `python -m stepscope.engine.fork_server SOCKET [MODULE...]`, with the number of a socket
and further modules to import. For each request it forks a child, which becomes the process that
`python -m stepscope.engine.cell` would be: it has a session, a log, a lifeline and a mark of its own. This process has
one thread, and no other child than cells. It ends when the socket closes: then the sweep's process is gone. Its cells
have lifelines of their own.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import re
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec

from stepscope.engine.cell_process import MARK, kill_marked
from stepscope.engine.forks import MESSAGE_BYTES, ForkAnswer, ForkRequest

_THREADS = Path("/proc/self/task")
_DEVICE_FILE = re.compile(r"/dev/(nvidia|dri/|kfd)")
_BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
"""Variables that say how many threads OpenBLAS has; the first that is set counts."""
_BLAS_LIBRARY = re.compile(r"/\S*openblas\S*\.so\S*")
_BLAS_SETTERS = ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads",
                 "openblas_set_num_threads64_", "openblas_set_num_threads")  # fmt: skip


def main() -> int:
    """Serve the sweep until it is gone. Returns in each child alone, with the exit code of its cell."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    with _one_thread_in_blas():
        import stepscope.engine.step  # noqa: F401, PLC0415  # pyright: ignore[reportUnusedImport]
        from stepscope.engine.cell import main as measure  # noqa: PLC0415

        for module in sys.argv[2:]:
            importlib.import_module(module)
    set_blas_threads = _blas()
    os.close(os.pidfd_open(os.getpid()))  # raises where the system has none, or forbids it
    sys.stdout.flush()
    sys.stderr.flush()
    gc.collect()
    gc.freeze()  # else each cell's first collection would copy every page that an import has made
    channel.send(msgspec.json.encode(ForkAnswer(refused=why_not_fork())))
    if not _Server(channel).serve():
        kill_marked(os.environ[MARK])  # what imports have started
        os.killpg(0, signal.SIGKILL)
    for setter in set_blas_threads:
        setter(_threads_of_blas())
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


class _Server:
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
            ready, told = os.pipe()
            pid = os.fork()
            if pid == 0:
                self._let_go(talk.detach(), ready)
                _become(request, files)
                os.write(told, b"1")
                os.close(told)
                return True
            os.close(told)
            began = os.read(ready, 1)
            os.close(ready)
            if began:
                self._follow(_Cell(pid, talk))
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

    def _follow(self, cell: _Cell) -> None:
        with contextlib.suppress(OSError):  # the sweep has gone meanwhile
            cell.talk.send(msgspec.json.encode(ForkAnswer(pid=cell.pid)))
        self._cells.append(cell)
        self._selector.register(cell.talk, selectors.EVENT_READ, cell)
        self._selector.register(cell.handle, selectors.EVENT_READ, cell)

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

    def _let_go(self, *files: int) -> None:
        """Close, in a child, what belongs to this process and to the other cells."""
        self._selector.close()
        self._channel.close()
        for cell in self._cells:
            cell.close()
        for file in files:
            os.close(file)


def _become(request: ForkRequest, files: list[int]) -> None:
    """Make this child the leader of a session, with the pipes and the mark of its cell."""
    os.setsid()
    own, (stdin, printed, events) = os.pread(1, MESSAGE_BYTES, 0), files
    for file, number in ((stdin, 0), (printed, 1), (printed, 2)):
        os.dup2(file, number)
    os.close(stdin)
    os.close(printed)
    _mark(request.mark)
    for name, value in request.variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    if own:  # what imports have printed is in the log of each cell, as where each imports for itself
        os.write(1, own)
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


@contextlib.contextmanager
def _one_thread_in_blas() -> Generator[None]:
    """Inside, NumPy's OpenBLAS, which starts its threads when it is loaded, starts none."""
    name = _BLAS_THREADS[0]
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _blas() -> list[Callable[[int], object]]:
    """For each OpenBLAS that is loaded, what gives it threads. Raises where one has nothing of that kind."""
    mapped = map(_BLAS_LIBRARY.search, Path("/proc/self/maps").read_text().splitlines())
    setters: list[Callable[[int], object]] = []
    for path in {found[0] for found in mapped if found}:
        library = ctypes.CDLL(path)
        name = next((name for name in _BLAS_SETTERS if hasattr(library, name)), None)
        if name is None:
            raise RuntimeError(f"{path} has no function that sets its threads")
        setters.append(getattr(library, name))
    return setters


def _threads_of_blas() -> int:
    """The threads that OpenBLAS would have started in a process of its own."""
    said = next((os.environ[name] for name in _BLAS_THREADS if os.environ.get(name)), "")
    return int(said) if said.isdecimal() and int(said) else len(os.sched_getaffinity(0))


if __name__ == "__main__":
    from stepscope.core import interrupts
    from stepscope.core.interrupts import leave

    leave(interrupts.exit_code(main()))
