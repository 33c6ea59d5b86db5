"""Measures one cell on this machine in a process of its own: whatever becomes of the process, a run is on disk."""

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from stepscope.core import interrupts
from stepscope.core.environment import RankPlace, check_processes
from stepscope.core.errors import InputError, StepscopeError, one_line
from stepscope.core.formulas.transformer import known_work
from stepscope.core.run import REPEATED, Failure, Run, Status
from stepscope.core.run_directory import create_run_directory, load_run, save_run
from stepscope.core.strategies import NOT_PARALLEL
from stepscope.engine.cell_process import CellEvent, CellProcess, Fork
from stepscope.engine.forks import Forks
from stepscope.engine.request import Stage, StepRequest, Tell, begun_run
from stepscope.runs.checks import check_run
from stepscope.runs.metrics import summarise

# The processes of one cell whose step several ranks share, as if they were one: each is a cell's process of its own.
#
# Why not torchrun's agent: a cell's process brings what is needed here already. It ends with its sweep however that
# dies, takes with it all that it started, says what it does and how it ended, and lets a run survive it. An agent would
# add the meeting place of the ranks, which is a file here, and restarts, which no measurement wants. A job that
# torchrun or srun started is joined instead (core/evidence.py).


PEERS_GRACE_S = 15.0
"""Seconds that the other ranks may take to end by themselves when one has died: long enough to save what they have."""
STOP_GRACE_S = 5.0
_ITS_OWN_WORD_S = 1.0
"""Seconds that another rank's error waits for the first rank's own, which is the one that is shown."""


class RankProcesses:
    """The ranks of one cell on this machine, with the face of a CellProcess."""

    def __init__(self, processes: Sequence[CellProcess], meeting: Path) -> None:
        self._processes, self._meeting = list(processes), meeting
        self.events: asyncio.Queue[CellEvent | None] = asyncio.Queue()
        """Events of the first rank, and errors of the others; None when all are dead."""
        self.dead = asyncio.Event()
        self._ended: set[int] = set()
        """Ranks that said how they ended, before they did."""
        self._first_to_die: int | None = None
        self._stages = ["start"] * len(self._processes)
        self._tasks = [asyncio.create_task(self._follow(rank)) for rank in range(len(self._processes))]
        self._ending: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, request: bytes, *, next_mark: Callable[[], str], fork: Fork | None = None) -> "RankProcesses":
        """Start a process for each rank of the request's workload: by `fork`, where it is given and can, else each as
        a Python of its own."""
        whole = msgspec.json.decode(request, type=StepRequest)
        ranks = whole.workload.ranks
        check_processes(ranks)
        meeting = Path(tempfile.mkdtemp(prefix="stepscope-ranks-"))
        processes: list[CellProcess] = []
        try:
            for rank in range(ranks):
                place = RankPlace(
                    rank=rank,
                    ranks=ranks,
                    local_rank=rank,
                    local_ranks=ranks,
                    meeting=f"file://{meeting}/meeting",
                    began_s=time.time(),
                )
                share = msgspec.structs.replace(whole, place=place)
                processes.append(await CellProcess.start(msgspec.json.encode(share), mark=next_mark(), fork=fork))
        except BaseException:
            for process in processes:
                await process.close()
            shutil.rmtree(meeting, ignore_errors=True)
            raise
        return cls(processes, meeting)

    @property
    def lost(self) -> bool:
        """Whether nobody can tell any more how one of the ranks ended."""
        return any(process.lost for process in self._processes)

    @property
    def culprit(self) -> str | None:
        """Which rank died first without a word, where, and of what; None where none did."""
        if self._first_to_die is None:
            return None
        rank, code = self._first_to_die, self._processes[self._first_to_die].code
        how = f"ended with code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return f"rank {rank} {how} during {self._stages[rank]}"

    @property
    def code(self) -> int | None:
        """The exit code of the rank that died first without a word; else the first rank's."""
        return self._processes[self._first_to_die or 0].code

    @property
    def log(self) -> str:
        """What the ranks printed, the first one's first."""
        logs = [process.log for process in self._processes]
        others = (f"[rank {rank}]\n{log}" for rank, log in enumerate(logs) if rank and log and log != logs[0])
        return "\n".join([logs[0], *others])

    async def stop(self, grace_s: float) -> None:
        """Let the ranks save what they have, as on Ctrl-C."""
        await asyncio.gather(*(process.stop(grace_s) for process in self._processes))

    async def close(self) -> None:
        """End the ranks, and all that they started."""
        try:
            await asyncio.gather(*(process.close() for process in self._processes))
        finally:
            if self._ending is not None:
                self._ending.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            shutil.rmtree(self._meeting, ignore_errors=True)

    async def _follow(self, rank: int) -> None:
        process = self._processes[rank]
        while (event := await process.events.get()) is not None:
            if event.finished or event.error:
                self._ended.add(rank)
            if event.stage:
                self._stages[rank] = event.stage
            if rank == 0:
                self.events.put_nowait(event)
            elif event.error:
                asyncio.get_running_loop().call_later(_ITS_OWN_WORD_S, self._tell_instead, rank, event)
        if rank not in self._ended and self._first_to_die is None:
            self._first_to_die = rank
        if len(self._ended) < len(self._processes) and self._ending is None:
            self._ending = asyncio.create_task(self._end_the_others())
        if all(one.dead.is_set() for one in self._processes):
            self.events.put_nowait(None)
            self.dead.set()

    def _tell_instead(self, rank: int, event: CellEvent) -> None:
        """Pass on the error of another rank where the first has none of its own."""
        if 0 not in self._ended and not self._processes[0].dead.is_set():
            self.events.put_nowait(msgspec.structs.replace(event, error=f"rank {rank}: {event.error}"))

    async def _end_the_others(self) -> None:
        """Wait for ranks that can no longer meet the one that died, and end those that do not end by themselves."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PEERS_GRACE_S):
                await asyncio.gather(*(process.dead.wait() for process in self._processes))
        alive = [process for process in self._processes if not process.dead.is_set()]
        await asyncio.gather(*(process.stop(STOP_GRACE_S) for process in alive))
        for process in alive:
            process.kill()


INTERRUPT_GRACE_S = 2.0
"""Seconds that a cell may take to save what it has when the user stops the sweep."""
TIMEOUT_GRACE_S = 15.0
"""Seconds that a cell may take to save what it has when its time is over; more, since no user is waiting."""
EXIT_GRACE_S = 20.0
"""Seconds that a cell may take to end once its run is on disk."""
LOG_FILE = "log.txt"
REFUSED = "refused"
"""What a failure says for a stage where a cell cannot run as asked."""
WRONG = "wrong"
"""What it says where an implementation computes something else than it should."""


def record(request: StepRequest, directory: Path | None, status: Status, failure: Failure, log: str = "") -> Run:
    """Save a run for a cell that could not write its own, in the cell's directory if it made one.

    A user's own code that was refused leaves nothing: the same command tries it again.
    """
    run = _run_in(directory)
    if directory is None or run is None:
        if directory is None or not directory.is_dir():
            directory = create_run_directory(Path(request.out), request.workload)
        run = msgspec.structs.replace(begun_run(request, directory, status), work=known_work(request.workload))
    artifacts = dict(run.artifacts)
    if log:
        with contextlib.suppress(OSError):  # the run matters more than its log
            (directory / LOG_FILE).write_text(log)
            artifacts["log"] = LOG_FILE
    run = msgspec.structs.replace(run, status=status, failure=failure, artifacts=artifacts)
    run = msgspec.structs.replace(run, findings=check_run(run), summary=summarise(run))
    if leaves_nothing(run):
        shutil.rmtree(directory, ignore_errors=True)
    else:
        save_run(run, directory)
    return run


def leaves_nothing(run: Run) -> bool:
    """Whether this run is not kept: a user's own code was refused, so the same command tries it again."""
    return run.failure is not None and run.failure.during in (REFUSED, WRONG) and run.workload.factory != ""


def _run_in(directory: Path | None) -> Run | None:
    """The run in a cell's directory, if one can be read there."""
    try:
        return load_run(directory) if directory is not None else None
    except InputError:
        return None


class MeasuredCell:
    """Measures one cell, from the start of its process to a run on disk.

    next_mark: gives each process a mark of its own. fork: what forks the process; None where it is a Python of its own.
    """

    def __init__(
        self, request: StepRequest, timeout_s: float, next_mark: Callable[[], str], fork: Fork | None, tell: Tell
    ) -> None:
        self._request, self._timeout_s = request, timeout_s
        self._next_mark, self._fork, self._tell = next_mark, fork, tell
        self._stage = Stage(name="start")
        self._directory: Path | None = None
        self._error: CellEvent | None = None

    async def run(self) -> Run:
        """Measure the cell; again in a Python of its own, where it was forked and nobody can tell how it ended."""
        run = await self._measured(self._fork)
        if run is None:
            self._directory = self._error = None
            run = await self._measured(None)
        assert run is not None
        return run

    async def _measured(self, fork: Fork | None) -> Run | None:
        """The cell's run; None where nobody can tell how its process ended, and it left no result."""
        request = msgspec.json.encode(self._request)
        process: CellProcess | RankProcesses
        if self._request.workload.parallel != NOT_PARALLEL:
            process = await RankProcesses.start(request, next_mark=self._next_mark, fork=fork)
        else:
            process = await CellProcess.start(request, mark=self._next_mark(), fork=fork)
        in_time, stopped = True, False
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._follow(process)
            except TimeoutError:
                in_time = False
                await process.stop(TIMEOUT_GRACE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_GRACE_S if in_time else 0):
                    await process.dead.wait()
        except asyncio.CancelledError:
            await process.stop(INTERRUPT_GRACE_S)
            stopped = True
            raise
        finally:
            await process.close()
            while not process.events.empty():
                if (event := process.events.get_nowait()) is not None:
                    self._hear(event)
            if stopped:
                self._keep_what_was_stopped(process)
        run = _run_in(self._directory)
        if in_time and process.lost and self._error is None and (run is None or run.status in REPEATED):
            return None
        if in_time:
            run = self._result(process)
            if process.culprit is not None and run.status != "done":
                failure = Failure(message=process.culprit, during="ranks")
                run = record(self._request, self._directory, "killed", failure, process.log)
            return run
        return self._ended("timed-out", f"no end after {self._timeout_s:.0f} s", process.log)

    async def _follow(self, process: CellProcess | RankProcesses) -> None:
        """Listen until the cell has said how it ended, or is dead."""
        while (event := await process.events.get()) is not None:
            self._hear(event)
            if event.finished or event.error:
                return

    def _hear(self, event: CellEvent) -> None:
        if event.directory:
            self._directory = Path(event.directory)
        if event.error:
            self._error = event
        if event.stage:
            self._stage = Stage(name=event.stage, detail=event.detail)
            self._tell(self._stage)

    def _keep_what_was_stopped(self, process: CellProcess | RankProcesses) -> None:
        """Mark the run of a cell that was stopped as interrupted; remove its directory if it saved nothing."""
        with contextlib.suppress(OSError, StepscopeError):
            run = _run_in(self._directory)
            if run is not None and run.status == "unfinished":
                self._ended("interrupted", interrupts.interruption(), process.log)
            elif run is None and self._directory is not None:
                self._directory.rmdir()

    def _result(self, process: CellProcess | RankProcesses) -> Run:
        if self._error and self._error.error:
            if self._error.log_matters:
                sys.stderr.write(process.log)
            if self._error.error_for_all:
                raise InputError(self._error.error)
            return self._ended("failed", self._error.error, during=WRONG if self._error.wrong else REFUSED)
        code = process.code
        if code is None:
            return self._ended("killed", "the process could not be killed", process.log)
        ending = -code if code < 0 else code - 128 if code - 128 in interrupts.SIGNALS else 0
        if ending:
            name = signal.Signals(ending).name
            hint = " (the system's out-of-memory killer does this)" if ending == signal.SIGKILL else ""
            return self._ended("killed", f"the process was killed by {name}{hint}", process.log)
        lines = process.log.strip().splitlines() or ["no word"]
        telling = [line for line in lines if "error" in line.lower()] or lines
        message = f"the process ended with code {code}: {one_line(Exception(telling[-1]))}"
        return self._ended("failed", message, process.log)

    def _ended(self, status: Status, message: str, log: str = "", during: str | None = None) -> Run:
        """The run that the cell saved, if it is a result; else a run that says how the cell ended."""
        run = _run_in(self._directory)
        if run is not None and run.status not in REPEATED:
            return run
        during = during or " ".join(part for part in (self._stage.name, self._stage.detail) if part)
        failure = Failure(message=message, during=during)
        return record(self._request, self._directory, status, failure, log)


# Where a sweep's cells are measured, one at a time in each place: a device of this machine, or a node of a cluster.


class PlaceLost(StepscopeError):
    """Raised where a place has gone. `began`: whether it was measuring the cell by then."""

    def __init__(self, message: str, *, began: bool) -> None:
        super().__init__(message)
        self.began = began


class Place(Protocol):
    """Measures one cell at a time."""

    device: str
    """The device as a request names it."""
    unlike: bool
    """Whether its device may be of another kind than those of other places."""

    async def measure(self, request: StepRequest, modules: Sequence[str] | None, tell: Tell) -> Run:
        """The run of a cell, on disk. Raises PlaceLost where the cell must be measured elsewhere.

        modules: what a process that forks cells imports besides; None where the cell is a Python of its own.
        """
        ...


class DevicePlace:
    """A device of this machine."""

    unlike = False

    def __init__(self, device: str, timeout_s: float, next_mark: Callable[[], str], forks: Forks | None) -> None:
        self.device = device
        self._timeout_s, self._next_mark, self._forks = timeout_s, next_mark, forks

    async def measure(self, request: StepRequest, modules: Sequence[str] | None, tell: Tell) -> Run:
        """The run of a cell, on disk. The sweep's own server, where it has one, forks those that may be forked."""
        fork = self._forks.fork if self._forks is not None and modules is not None else None
        return await MeasuredCell(request, self._timeout_s, self._next_mark, fork, tell).run()
