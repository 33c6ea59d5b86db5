"""The nodes of a Ray cluster as a sweep sees them: places, which come and go. Ray itself is in a process of its own."""

import asyncio
import contextlib
import os
import pickle
import re
import sys
import tempfile
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import IO, Any

import msgspec

from stepscope.core import run_directory
from stepscope.core.environment import give_pages_back
from stepscope.core.errors import EXIT_WRONG_INPUT, DeviceError, InputError, StepscopeError, one_line
from stepscope.core.run import Failure, Run
from stepscope.engine.cell_process import cell_environment
from stepscope.engine.forks import Forks
from stepscope.engine.measured_cell import INTERRUPT_GRACE_S, REFUSED, MeasuredCell, PlaceLost, record
from stepscope.engine.request import Stage, StepRequest, Tell
from stepscope.engine.sweep_plan import Policy, SweepPlan

# What runs on a node: one cell, measured as a local sweep would, whose files go home.
#
# A worker of Ray's calls `measure` for one cell after the other. The cell's process is forked, or a Python of its own;
# it ends with the worker, whichever way that ends. Ray itself is not imported here.


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
    ranks: str = ""
    """A folder, whose captures the nodes read; they measure nothing then."""


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
    ranks: int | None = None
    """How many captures the folder holds, on all nodes."""
    reply: bytes | None = None
    """What became of one of them, as a pickle."""
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
        if directory.is_dir() and (directory / run_directory.RUN_FILE).is_file()
    }


def land(carried: Carried, out: Path) -> list[Path]:
    """Write the run directories into `out`, each run.json last. A name that is taken makes way by a millisecond.

    Raises StepscopeError, which names where the run was saved, if the disk refuses.
    """
    directories: list[Path] = []
    for _, files in sorted(carried.items()):
        data = files[run_directory.RUN_FILE]
        run = msgspec.json.decode(data, type=Run)
        began = datetime.strptime(run.id.partition("-")[0], "%Y%m%dT%H%M%S.%f").replace(tzinfo=UTC)
        try:
            directory = run_directory.create_run_directory(out, run.workload, began)
        except InputError:
            run_directory.save_run(run, out / run.id)  # it finds another place, and says where
            raise
        if directory.name != run.id:
            run = msgspec.structs.replace(run, id=directory.name)
            data = run_directory.encode_run(run)
        try:
            for name, content in files.items():
                if name != run_directory.RUN_FILE:
                    (directory / name).parent.mkdir(parents=True, exist_ok=True)
                    (directory / name).write_bytes(content)
            run_directory.write_atomically(data, directory / run_directory.RUN_FILE)
        except OSError:
            # The files beside it have no room; the run finds another place, and says where.
            run_directory.save_run(run, directory)
            message = f"cannot write the files of {run.id} to {directory}: only its run.json is there"
            raise StepscopeError(message) from None
        directories.append(directory)
    return directories


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


DeskHandle = Any
"""A Desk as a worker calls it, over the network: by `tell.remote(...)`."""


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
    stopped: "asyncio.Future[None] | None" = None
    processes: "count[int]" = field(default_factory=lambda: count(1))


_worker = _Worker()


def measure(order: Order, terms: Terms, name: str, desk: DeskHandle) -> Outcome:
    """Measure a cell on this node, whose name is given."""
    with contextlib.suppress(OSError):  # a node may lack the folder
        os.chdir(terms.folder)
    # The variables that a cell would have on this node without Ray, and those of the sweep that count.
    if sys.platform == "linux":
        began_with = Path("/proc/self/environ").read_bytes().split(b"\0")
        if not any(variable.startswith(f"{_SET_BY_RAY}=".encode()) for variable in began_with):
            os.environ.pop(_SET_BY_RAY, None)
    os.environ.update(terms.variables)
    return _worker.runner.run(_measured(_worker, order, terms, name, desk))


async def _measured(worker: _Worker, order: Order, terms: Terms, name: str, desk: DeskHandle) -> Outcome:
    assert order.request is not None
    stopped = worker.stopped = worker.stopped or asyncio.ensure_future(desk.stopped.remote())

    def next_mark() -> str:
        return f"{terms.key}-{os.getpid():08}.{next(worker.processes):06}."

    telling = _Telling(order.number, desk)
    with tempfile.TemporaryDirectory(prefix="stepscope-cell-", ignore_cleanup_errors=True) as out:
        request, fork = msgspec.structs.replace(order.request, out=out, node=name), None
        if order.modules is not None:
            if order.modules not in worker.forks:
                worker.forks[order.modules] = Forks(next_mark, order.modules)
            fork = worker.forks[order.modules].fork
        measured = MeasuredCell(request, terms.timeout_s, next_mark, fork, telling.tell)
        cell = asyncio.get_running_loop().create_task(measured.run())
        try:
            await asyncio.wait({cell, stopped}, return_when=asyncio.FIRST_COMPLETED)
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


# What else runs on a node: the reading of captures that lie there. polars is imported for that alone.


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A capture on a node. Nodes that share a file system see the same."""

    path: str
    size: int
    changed_ns: int
    need_bytes: int
    """Memory that its reading takes, by an estimate."""


def captures_here(folder: str) -> list[Seen]:
    """The captures that a folder holds on this node, whose own home `~` is. Raises InputError."""
    from stepscope.traces.captures.digest import find_capture  # noqa: PLC0415
    from stepscope.traces.ranks import captures_in, needed_bytes  # noqa: PLC0415

    captures = captures_in(Path(folder).expanduser())
    files = [(path, find_capture(path).stat()) for path in captures]
    return [
        Seen(path=str(path), size=file.st_size, changed_ns=file.st_mtime_ns, need_bytes=needed_bytes(path))
        for path, file in files
    ]


def read_here(path: str, place: int, node: str, threads: int) -> Any:
    """What became of the capture of a rank on this node, whose name is given: a Reply of `traces/ranks.py`."""
    os.environ["POLARS_MAX_THREADS"] = str(threads)
    give_pages_back()
    from stepscope.traces.ranks import reply_of  # noqa: PLC0415

    lines, rank = reply_of(Path(path), place)
    if isinstance(rank, StepscopeError):
        return lines, type(rank)(f"{rank} (on node {node})")
    return lines, replace(rank, source=f"{node}:{rank.source}")


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


_COMMAND = (sys.executable, "-P", "-m", "stepscope.engine.courier")
_START_S = 120.0
"""Seconds until the cluster has named its nodes."""
_NO_NODE_S = 60.0
"""Seconds for which a sweep without a node waits for another one."""
_LOOK_EVERY_S = 2.0
_STOP_S = INTERRUPT_GRACE_S + 8.0
"""Seconds for stopped cells to come home."""
_END_S = 10.0
_ADDRESS, _PORT = re.compile(r"ray://(?:[^:\[\]/]+|\[[0-9a-fA-F:]+\])(:\d{1,5})?"), 10001
"""What `--on` may name beside `auto`, and the port that Ray has for its clients."""
_LINE_BYTES = 2**28
_COMPUTING = (
    "OMP_", "MKL_", "KMP_", "OPENBLAS_", "TORCH", "PYTORCH_", "CUBLAS_", "CUDNN_", "NVIDIA_TF32", "ONEDNN_", "TRITON_",
)  # fmt: skip
"""Beginnings of the variables that say how libraries compute: a cell has those of the sweep on any node."""
_PLACES = ("_DIR", "_HOME", "_PATH", "_FILE")
"""Endings of variables that name places, which are each node's own."""


def _address_of(on: str) -> str:
    """What Ray connects to. Raises InputError where it cannot be meant."""
    named = _ADDRESS.fullmatch(on)
    if on != "auto" and named is None:
        raise InputError(f"--on {on}: write ray://HOST or ray://HOST:PORT, or auto for the cluster of this machine")
    return f"{on}:{_PORT}" if named is not None and named[1] is None else on


def terms_of(on: str, plan: SweepPlan, policy: Policy) -> Terms:
    """What holds for a sweep on this cluster. Raises InputError where the address or the device cannot be meant."""
    address = _address_of(on)
    device, *others = plan.devices
    if others or device not in ("auto", "cpu", "cuda"):
        raise InputError(
            f"--device {','.join(plan.devices)} names devices of one machine: with --on write auto, cpu or cuda, and "
            "each GPU of each node measures"
        )
    counts = {
        name: value for name, value in os.environ.items() if name.startswith(_COMPUTING) and not name.endswith(_PLACES)
    }
    return Terms(
        address=address, device=device, out=str(Path(plan.out).resolve()), timeout_s=policy.timeout_s,
        folder=str(Path.cwd()), variables=counts, key=plan.key,
    )  # fmt: skip


class Cluster:
    """The connection to a cluster; `close` it whatever happens."""

    def __init__(self, terms: Terms, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self._terms, self._process, self._log = terms, process, log
        self._joined: asyncio.Queue[Node | None] = asyncio.Queue()
        self._cells: dict[int, _Measured] = {}
        self._of_ranks: asyncio.Queue[Word | None] = asyncio.Queue()
        self._ready = asyncio.get_running_loop().create_future()
        self._failure: StepscopeError | None = None
        self._stopped = False
        self.place_count = 0
        """Cells that the nodes measure at a time, as far as is known."""
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def start(cls, terms: Terms, mark: str) -> "Cluster":
        """Connect. Raises StepscopeError where there is no such cluster, or it cannot measure."""
        log = tempfile.TemporaryFile()  # noqa: SIM115  (`close` closes it)
        process = await asyncio.create_subprocess_exec(
            *_COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, limit=_LINE_BYTES,
            start_new_session=True, env=cell_environment(mark), cwd="/",
        )  # fmt: skip
        self = cls(terms, process, log)
        try:
            self._write(terms)
            async with asyncio.timeout(_START_S):
                await self._ready
        except TimeoutError:
            process.kill()
            await self.close()
            raise InputError(
                f"the Ray cluster (--on {terms.address}) does not answer within {_START_S:.0f} s"
            ) from None
        except BaseException:
            await self.close()
            raise
        return self

    async def places(self, all_ended: asyncio.Event) -> AsyncGenerator["NodePlace"]:
        """A place for each cell that a node measures at a time, as nodes join, until all cells have ended.

        Raises StepscopeError where the cluster is lost, or has had no node for long.
        """
        ended = asyncio.get_running_loop().create_task(all_ended.wait())
        try:
            while not ended.done():
                node = await self._next_node(ended)
                if node is None:
                    return
                self.place_count += node.slots
                for _ in range(node.slots):
                    yield NodePlace(self, node, self._terms.device)
        finally:
            ended.cancel()

    async def _next_node(self, ended: asyncio.Task[bool]) -> Node | None:
        """The next node that joins; None when the cells have ended."""
        joined = asyncio.get_running_loop().create_task(self._joined.get())
        alone_s = 0.0
        while True:
            await asyncio.wait({ended, joined}, timeout=_LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            if joined.done() and (node := joined.result()) is not None:
                return node
            if self._failure is not None:
                raise self._failure
            if ended.done():
                joined.cancel()
                return None
            alone_s = 0.0 if self.place_count else alone_s + _LOOK_EVERY_S
            if alone_s > _NO_NODE_S:
                joined.cancel()
                raise DeviceError(
                    f"the Ray cluster (--on {self._terms.address}) has lost all nodes that measured, and no other "
                    f"joined within {_NO_NODE_S:.0f} s: the same command goes on where this one stopped"
                )

    async def measured(self, node: str, request: StepRequest, modules: Sequence[str] | None, tell: Tell) -> Word:
        """What became of a cell on this node; where it is cancelled, the cell comes home first."""
        number = len(self._cells) + 1
        cell = self._cells[number] = _Measured(tell)
        if self._failure is not None:
            raise self._failure
        self._write(
            Order(number=number, node=node, request=request, modules=None if modules is None else tuple(modules))
        )
        try:
            return await asyncio.shield(cell.ended)
        except asyncio.CancelledError:
            if not self._stopped:
                self._stopped = True
                self._write(Order(stop=True))
            with contextlib.suppress(TimeoutError, StepscopeError):
                async with asyncio.timeout(_STOP_S):
                    await asyncio.shield(cell.ended)
            raise

    async def word_of_ranks(self) -> Word:
        """The next word of the captures that the nodes read. Raises StepscopeError where the cluster is lost."""
        word = await self._of_ranks.get()
        if word is None:
            assert self._failure is not None
            raise self._failure
        return word

    async def close(self) -> None:
        """End the connection, and every cell that still runs."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        finally:
            self._reading.cancel()
            self._log.close()

    def _write(self, message: Terms | Order) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self._hear(msgspec.json.decode(line, type=Word))
        self._log.seek(0)
        last = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
        reason = f": {one_line(Exception(last[0]))}" if last else ""
        self._fail(DeviceError(f"the connection to the Ray cluster (--on {self._terms.address}) was lost{reason}"))

    def _hear(self, word: Word) -> None:
        if word.error is not None:
            kinds = {kind.exit_code: kind for kind in (InputError, DeviceError)}
            self._fail(kinds.get(word.exit_code, StepscopeError)(word.error))
        elif word.number is not None:
            self._cells[word.number].hear(word)
        elif word.node is not None:
            self._joined.put_nowait(word.node)
        elif word.ranks is not None or word.reply is not None:
            self._of_ranks.put_nowait(word)
        elif word.ready and not self._ready.done():
            self._ready.set_result(None)

    def _fail(self, failure: StepscopeError) -> None:
        if self._failure is not None:
            return
        self._failure = failure
        if not self._ready.done():
            self._ready.set_exception(failure)
        for cell in self._cells.values():
            cell.fail(failure)
        self._joined.put_nowait(None)
        self._of_ranks.put_nowait(None)


@contextlib.contextmanager
def ranks_on(on: str, folder: str) -> Generator[tuple[int, Iterator[Any]]]:
    """Read the captures of a folder on the nodes of a cluster, where they lie: how many there are, and what became of
    each (a Reply of `traces/ranks.py`), as they are read. Raises StepscopeError."""
    place = folder if folder.startswith("~") else os.path.abspath(folder)  # noqa: PTH100  (of another machine)
    terms = Terms(
        address=_address_of(on), device="cpu", out="", timeout_s=0, folder=str(Path.cwd()), key="", ranks=place
    )
    with asyncio.Runner() as runner:
        cluster = runner.run(Cluster.start(terms, f"ranks-{os.getpid():08}"))
        try:
            count = runner.run(cluster.word_of_ranks()).ranks or 0
            yield count, (pickle.loads(runner.run(cluster.word_of_ranks()).reply or b"") for _ in range(count))
        finally:
            runner.run(cluster.close())


class _Measured:
    """A cell that a node measures."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self.began = tell, False
        self.ended: asyncio.Future[Word] = asyncio.get_running_loop().create_future()

    def hear(self, word: Word) -> None:
        if self.ended.done():
            return
        if word.stage:
            self.began = True
            self._tell(Stage(name=word.stage, detail=word.detail))
        else:
            self.ended.set_result(msgspec.structs.replace(word, stage="start" if self.began else ""))

    def fail(self, failure: StepscopeError) -> None:
        if not self.ended.done():
            self.ended.set_exception(failure)
            self.ended.exception()  # it may be that nobody waits


@dataclass(eq=False)
class NodePlace:
    """One of the cells that a node measures at a time."""

    unlike = True

    cluster: Cluster
    node: Node
    device: str

    async def measure(self, request: StepRequest, modules: Sequence[str] | None, tell: Tell) -> Run:
        """The run of a cell, which has come home. Raises PlaceLost where the node has died."""
        ranks, gpus = request.workload.ranks, self.node.gpus
        if 0 < gpus < ranks:
            message = f"{ranks} ranks need a GPU each, and node {self.node.name} has {gpus}"
            return record(request, None, "failed", Failure(message=message, during=REFUSED))
        word = await self.cluster.measured(self.node.id, request, modules, tell)
        if word.lost is not None:
            self.cluster.place_count -= 1
            raise PlaceLost(word.lost, began=bool(word.stage))
        if word.killed is not None:
            return record(request, None, "killed", Failure(message=word.killed, during="start"))
        if word.directory is not None:
            return run_directory.load_run(Path(word.directory))
        assert word.run is not None
        return word.run
