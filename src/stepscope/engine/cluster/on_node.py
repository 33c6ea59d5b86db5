"""What runs on a node: one cell, measured as a local sweep would, whose files go home.

A worker of Ray's calls `measure` for one cell after the other. The cell's process is forked, or a Python of its own; it
ends with the worker, whichever way that ends. Ray itself is not imported here.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Protocol

import msgspec

from stepscope.core.errors import EXIT_WRONG_INPUT, InputError, StepscopeError
from stepscope.core.run import Run
from stepscope.core.run_directory import RUN_FILE, create_run_directory, encode_run, save_run, write_atomically
from stepscope.engine.forks import Forks
from stepscope.engine.measured_cell import MeasuredCell
from stepscope.engine.request import Stage, StepRequest

# What a sweep and the process that talks with Ray say to each other, a line of JSON each.


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for the whole sweep: the first line to the courier."""

    address: str
    """`auto`, or `ray://HOST:PORT`."""
    device: str
    """auto, cpu or cuda: whether a cell needs a GPU of its node."""
    out: str
    """Where runs land."""
    timeout_s: float
    """Seconds that one cell may take."""
    folder: str
    """The sweep's current directory: a cell's too, on nodes that have it."""
    variables: dict[str, str] = {}
    """Environment variables of the sweep that say how libraries compute."""
    key: str
    """The sweep's key."""


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A cell to measure, or the order to stop."""

    number: int = 0
    node: str = ""
    """The node's id."""
    request: StepRequest | None = None
    modules: tuple[str, ...] | None = None
    """What a process that forks cells imports besides; None where the cell is a Python of its own."""
    stop: bool = False
    """The cells that run save what they have, and come home."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node that measures cells."""

    id: str
    name: str
    slots: int
    """Cells that it measures at a time: one on each GPU, or one."""
    gpus: int = 0
    """GPUs that it has for cells; none where cells are measured on its CPUs."""


class Word(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the courier says: of a cell where `number` is given, else of nodes or of the whole cluster."""

    node: Node | None = None
    """A node that has joined."""
    ready: bool = False
    """All nodes that were there at the start have been named."""
    number: int | None = None
    stage: str = ""
    """The cell has begun, and is at this stage."""
    detail: str = ""
    directory: str | None = None
    """The cell's run lies in this directory."""
    run: Run | None = None
    """The cell's run, where it left no directory."""
    stopped: bool = False
    """The cell was stopped, and has saved what it had."""
    lost: str | None = None
    """The cell's node, or the process on it, has died: in words."""
    killed: str | None = None
    """The cell was ended from outside, and would be again."""
    error: str | None = None
    """What ends the whole sweep."""
    exit_code: int = EXIT_WRONG_INPUT


# The files that a cell leaves on its node, on their way to the sweep's run directory.


Carried = dict[str, dict[str, bytes]]
"""By a run directory's name, its files by their path in it."""


def pack(out: Path) -> Carried:
    """All files of the run directories in `out`."""
    return {
        directory.name: {
            str(file.relative_to(directory)): file.read_bytes()
            for file in sorted(directory.rglob("*"))
            if file.is_file() and not file.is_symlink()
        }
        for directory in sorted(out.iterdir())
        if directory.is_dir() and (directory / RUN_FILE).is_file()
    }


def land(carried: Carried, out: Path) -> list[Path]:
    """Write the run directories into `out`, each run.json last. A name that is taken makes way by a millisecond.

    Raises StepscopeError, which names where the run was saved, if the disk refuses.
    """
    return [_land(files, out) for _, files in sorted(carried.items())]


def _land(files: dict[str, bytes], out: Path) -> Path:
    data = files[RUN_FILE]
    run = msgspec.json.decode(data, type=Run)
    began = datetime.strptime(run.id.partition("-")[0], "%Y%m%dT%H%M%S.%f").replace(tzinfo=UTC)
    try:
        directory = create_run_directory(out, run.workload, began)
    except InputError:
        save_run(run, out / run.id)  # it finds another place, and says where
        raise
    if directory.name != run.id:
        run = msgspec.structs.replace(run, id=directory.name)
        data = encode_run(run)
    try:
        for name, content in files.items():
            if name != RUN_FILE:
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                (directory / name).write_bytes(content)
        write_atomically(data, directory / RUN_FILE)
    except OSError:
        save_run(run, directory)  # the files beside it have no room; the run finds another place, and says where
        raise StepscopeError(f"cannot write the files of {run.id} to {directory}: only its run.json is there") from None
    return directory


TELL_EVERY_S = 0.25
"""The shortest time between two words of one cell: each costs the node a little of the time that it measures."""
_SET_BY_RAY = "OMP_NUM_THREADS"
"""Ray sets it to the CPUs that a task asks for, where it is not set: no cell has it by itself."""


class Desk:
    """Where cells on all nodes report, and learn that they are to stop: an actor on the head of the cluster."""

    def __init__(self) -> None:
        self._words: dict[int, tuple[str, str]] = {}
        self._heard, self._stopped = asyncio.Event(), asyncio.Event()

    async def tell(self, number: int, stage: str, detail: str) -> None:
        """Take in where a cell is."""
        self._words[number] = (stage, detail)
        self._heard.set()

    async def heard(self) -> dict[int, tuple[str, str]]:
        """By the cell's number, where it is: those that have said something since this was asked last."""
        await self._heard.wait()
        self._heard.clear()
        words, self._words = self._words, {}
        return words

    async def stop(self) -> None:
        """Let all cells stop."""
        self._stopped.set()

    async def stopped(self) -> None:
        """Return when the cells are to stop."""
        await self._stopped.wait()


class _Call(Protocol):
    def remote(self, *arguments: object) -> Awaitable[object]: ...


class DeskHandle(Protocol):
    """A Desk as a worker calls it, over the network."""

    @property
    def tell(self) -> _Call: ...
    @property
    def stopped(self) -> _Call: ...


class Outcome(msgspec.Struct, kw_only=True):
    """What became of a cell."""

    files: Carried = {}
    run: Run | None = None
    """The cell's run, where it left no files."""
    stopped: bool = False
    """Whether it was stopped, and saved what it had."""
    error: str | None = None
    """What ends the whole sweep."""
    exit_code: int = 0


@dataclass
class _Worker:
    """What a worker keeps from one cell to the next."""

    runner: asyncio.Runner = field(default_factory=asyncio.Runner)
    forks: dict[tuple[str, ...], Forks] = field(default_factory=dict[tuple[str, ...], Forks])
    stopped: "asyncio.Task[None] | None" = None
    processes: "count[int]" = field(default_factory=lambda: count(1))


_worker: list[_Worker] = []


def measure(order: Order, terms: Terms, name: str, desk: DeskHandle) -> Outcome:
    """Measure a cell on this node, whose name is given."""
    if not _worker:
        _worker.append(_Worker())
    with contextlib.suppress(OSError):  # a node may lack the folder
        os.chdir(terms.folder)
    _set_environment(terms)
    return _worker[0].runner.run(_measured(_worker[0], order, terms, name, desk))


async def _measured(worker: _Worker, order: Order, terms: Terms, name: str, desk: DeskHandle) -> Outcome:
    assert order.request is not None
    if worker.stopped is None:
        worker.stopped = asyncio.get_running_loop().create_task(_wait(desk.stopped.remote()))

    def next_mark() -> str:
        return f"{terms.key}-{os.getpid():08}.{next(worker.processes):06}."

    telling = _Telling(order.number, desk)
    with tempfile.TemporaryDirectory(prefix="stepscope-cell-", ignore_cleanup_errors=True) as out:
        request = msgspec.structs.replace(order.request, out=out, node=name)
        forks = _forks(worker, order.modules, next_mark)
        fork = forks.fork if forks is not None else None
        measured = MeasuredCell(request, terms.timeout_s, next_mark, fork, telling.tell)
        cell = asyncio.get_running_loop().create_task(measured.run())
        try:
            await asyncio.wait({cell, worker.stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            telling.close()
            if not cell.done():
                cell.cancel()
        run = None
        try:
            run = await cell
        except asyncio.CancelledError:
            pass
        except StepscopeError as error:
            return Outcome(error=f"{error} (on node {name})", exit_code=error.exit_code)
        files = pack(Path(out))
        return Outcome(stopped=run is None, run=None if files else run, files=files)


async def _wait(answer: Awaitable[object]) -> None:
    await answer


def _forks(worker: _Worker, modules: Sequence[str] | None, next_mark: Callable[[], str]) -> Forks | None:
    if modules is None:
        return None
    key = tuple(modules)
    if key not in worker.forks:
        worker.forks[key] = Forks(next_mark, key)
    return worker.forks[key]


class _Telling:
    """Tells the desk where the cell is, not too often: the last word counts."""

    def __init__(self, number: int, desk: DeskHandle) -> None:
        self._number, self._desk = number, desk
        self._stage: Stage | None = None
        self._later: asyncio.TimerHandle | None = None
        self.tell(Stage(name="start"))

    def tell(self, stage: Stage) -> None:
        self._stage = stage
        if self._later is None:
            self._send()

    def _send(self) -> None:
        self._later = None
        if self._stage is not None:
            self._desk.tell.remote(self._number, self._stage.name, self._stage.detail)
            self._stage = None
            self._later = asyncio.get_running_loop().call_later(TELL_EVERY_S, self._send)

    def close(self) -> None:
        if self._later is not None:
            self._later.cancel()


def _set_environment(terms: Terms) -> None:
    """Set the variables that a cell would have on this node without Ray, and those of the sweep that count."""
    if sys.platform == "linux":
        began_with = Path("/proc/self/environ").read_bytes().split(b"\0")
        if not any(variable.startswith(f"{_SET_BY_RAY}=".encode()) for variable in began_with):
            os.environ.pop(_SET_BY_RAY, None)
    os.environ.update(terms.variables)
