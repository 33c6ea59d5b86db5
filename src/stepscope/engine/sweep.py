"""Measures many workloads, each in a process of its own: a failure of one becomes its row, and the others go on.

Killed at any moment, the same sweep resumes: a cell whose run is on disk with a result is not measured again.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import itertools
import shutil
import signal
import sys
import time
from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from stepscope.analysis.runs.checks import check_run
from stepscope.analysis.runs.metrics import summarise
from stepscope.core import interrupts
from stepscope.core.errors import InputError, StepscopeError, one_line
from stepscope.core.own_workload import DrivenWorkload, OwnWorkload
from stepscope.core.run import REPEATED, Failure, Run, Status
from stepscope.core.run_directory import create_run_directory, load_run, load_runs, save_run
from stepscope.core.strategies import NOT_PARALLEL
from stepscope.core.workload import Workload
from stepscope.engine.cell_event import CellEvent
from stepscope.engine.cell_process import CellProcess, Fork, kill_marked
from stepscope.engine.forks import Forks
from stepscope.engine.plan import BROKEN, Cell, CellState, Policy, SweepPlan, SweepState, Tell
from stepscope.engine.rank_processes import RankProcesses
from stepscope.engine.request import StepRequest
from stepscope.work.transformer import known_work

INTERRUPT_GRACE_S = 2.0
"""Seconds that a cell may take to save what it has when the user stops the sweep."""
TIMEOUT_GRACE_S = 15.0
"""Seconds that a cell may take to save what it has when its time is over; more, since no user is waiting."""
EXIT_GRACE_S = 20.0
"""Seconds that a cell may take to end once its run is on disk."""
FEWEST_FORKED = 2
"""Cells for which a process that has imported everything is worth its start."""
COMPILER = "torch._inductor.compile_fx"
"""What compiled cells import beside what every cell does."""
LOG_FILE = "log.txt"
REFUSED = "refused"
"""What a failure says for a stage where a cell cannot run as asked."""


class SweepInterrupted(KeyboardInterrupt):
    """The user stopped the sweep. `runs` are the cells that have ended, interrupted ones left out."""

    def __init__(self, runs: list[Run]) -> None:
        super().__init__("interrupted")
        self.runs = runs


def run_sweep(plan: SweepPlan, policy: Policy | None = None, tell: Tell = lambda _: None) -> list[Run]:
    """Measure every cell that has no result yet; returns a run for each cell, in the plan's order.

    Ctrl-C lets the running cells save what they have, then raises SweepInterrupted.
    """
    with _locked(Path(plan.out), plan.key):
        sweep = _Sweep(plan, policy or Policy(), tell)
        runs = asyncio.run(sweep.run())
    if sweep.interrupted:
        raise SweepInterrupted(runs)
    return runs


@contextlib.contextmanager
def _locked(out: Path, key: str) -> Generator[None]:
    """A lock that lets one process at a time run this sweep in this place; it ends with the process."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / f".sweep-{key}.lock").open("w")
    except OSError as error:
        raise InputError(f"cannot write runs to {out}: {error.strerror or error}; choose another --runs") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"this very sweep is already running into {out}: wait for it, or stop it") from None
        yield


class _Sweep:
    def __init__(self, plan: SweepPlan, policy: Policy, tell: Tell) -> None:
        self._plan, self._policy, self._tell = plan, policy, tell
        self._out = Path(plan.out)
        self.interrupted = False
        self.state = SweepState(cells=[CellState(cell=cell) for cell in plan.cells], timeout_s=self._policy.timeout_s)
        self._mark = f"{plan.key}-{hashlib.sha256(bytes(self._out.resolve())).hexdigest()[:12]}."
        self._processes = itertools.count(1)
        kill_marked(self._mark)  # left by a start of this very sweep that was killed together with its cell
        self._find_results()
        self._waiting = [cell for cell in self.state.cells if cell.run is None]
        self._forks = self._servers()

    async def run(self) -> list[Run]:
        self._tell(self.state)
        loop = asyncio.get_running_loop()
        work = loop.create_task(self._measure_all())

        def stop() -> None:
            if not self.interrupted:  # asked again: the cells are saving what they have
                self.interrupted = True
                work.cancel()

        with interrupts.told(lambda: loop.call_soon_threadsafe(stop)):
            try:
                await work
            except asyncio.CancelledError:
                if not self.interrupted:
                    raise
        return [cell.run for cell in self.state.cells if cell.run is not None]

    def _servers(self) -> Forks | None:
        """What forks the cells; None where each is better a Python of its own."""
        forked = [cell.cell.workload for cell in self._waiting if cell.cell.repeat is None]
        if self._policy.start != "fork" or len(forked) < FEWEST_FORKED:
            return None
        compiled = any(workload.compile != "eager" for workload in forked)
        return Forks(self.next_mark, (COMPILER,) if compiled else ())

    def fork_for(self, cell: Cell) -> Fork | None:
        """What forks this cell's process; None where it is a Python of its own."""
        return self._forks.fork if self._forks is not None and cell.repeat is None else None

    async def _measure_all(self) -> None:
        try:
            await self._measure_each()
        finally:
            if self._forks is not None:
                self._forks.close()

    async def _measure_each(self) -> None:
        if len(self._plan.devices) > 1 and self._waiting:
            await self._check_devices()
        try:
            async with asyncio.TaskGroup() as workers:
                for device in self._plan.devices:
                    workers.create_task(self._work(device))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _check_devices(self) -> None:
        fork = self._forks.fork if self._forks is not None else None
        process = await CellProcess.start(b"", mark=self.next_mark(), devices=self._plan.devices, fork=fork)
        try:
            while (event := await process.events.get()) is not None:
                if event.error:
                    raise InputError(event.error)
        finally:
            await process.close()

    def next_mark(self) -> str:
        """The mark that the next process, and all that it starts, carry in their environment. All are equally long: a
        forked cell writes its own over that of its server."""
        return f"{self._mark}{next(self._processes):06}."

    def _find_results(self) -> None:
        """Take over the results of an earlier start of this sweep from disk."""
        if self._policy.fresh or not self._out.is_dir():
            return
        again: set[Status] = set(REPEATED)
        if self._policy.retry:
            again |= BROKEN
        if not self._policy.skip:
            again.add("skipped")
        runs, self.state.faults = load_runs([self._out])
        for run in runs:
            if run.sweep != self._plan.key or run.status in again:
                continue
            for cell in self.state.cells:
                asked = cell.cell
                same = asked.settings == run.settings and asked.repeat == run.repeat
                if same and asked.workload.identity == run.workload.identity:
                    cell.run, cell.state, cell.resumed = run, run.status, True

    async def _work(self, device: str) -> None:
        while self._waiting:
            cell = self._waiting.pop(0)
            smaller = self._smaller_that_did_not_fit(cell.cell.workload)
            if smaller is not None and self._policy.skip:
                message = f"{'-'.join(smaller.workload.words())} ran out of memory"
                run = self.record(cell.cell, None, "skipped", Failure(message=message, during="plan"))
            else:
                start = time.monotonic()
                run = await _Measured(self, cell, device).run()
                cell.seconds = time.monotonic() - start
            cell.run, cell.state, cell.stage, cell.detail = run, run.status, "", ""
            self._tell(self.state)

    def _smaller_that_did_not_fit(self, workload: DrivenWorkload) -> Run | None:
        if not isinstance(workload, Workload):
            return None
        for cell in self.state.cells:
            run = cell.run
            if run and run.status == "out-of-memory" and run.textbook and run.textbook.at_most(workload):
                return run
        return None

    def told(self) -> None:
        """Report to the display that a cell's state has changed."""
        self._tell(self.state)

    def request(self, cell: Cell, device: str) -> StepRequest:
        """The request to a cell's process."""
        return StepRequest(
            workload=cell.workload,
            settings=cell.settings,
            device=device,
            out=self._plan.out,
            tag=self._plan.tag,
            sweep=self._plan.key,
            repeat=cell.repeat,
            against=cell.against,
            memory_limit_bytes=self._plan.memory_limit_bytes,
            peak_flops_per_s=self._plan.peak_flops_per_s,
            trace=self._plan.trace,
            memory=self._plan.memory,
        )

    @property
    def timeout_s(self) -> float:
        return self._policy.timeout_s

    def record(self, cell: Cell, directory: Path | None, status: Status, failure: Failure, log: str = "") -> Run:
        """Save a run for a cell that could not write its own, in the cell's directory if it made one.

        A user's own code that was refused leaves nothing: the same command tries it again.
        """
        run = _run_in(directory)
        if directory is None or run is None:
            if directory is None or not directory.is_dir():
                directory = create_run_directory(self._out, cell.workload)
            run = Run(
                id=directory.name,
                created=datetime.now(UTC).isoformat(timespec="milliseconds"),
                tag=self._plan.tag,
                sweep=self._plan.key,
                repeat=cell.repeat,
                status=status,
                workload=cell.workload,
                settings=cell.settings,
                work=known_work(cell.workload),
            )
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
    return run.failure is not None and run.failure.during == REFUSED and isinstance(run.workload, OwnWorkload)


def _run_in(directory: Path | None) -> Run | None:
    """The run in a cell's directory, if one can be read there."""
    try:
        return load_run(directory) if directory is not None else None
    except InputError:
        return None


def _is_result(run: Run | None) -> bool:
    return run is not None and run.status not in REPEATED


class _Measured:
    """Measures one cell, from the start of its process to a run on disk."""

    def __init__(self, sweep: _Sweep, cell: CellState, device: str) -> None:
        self._sweep, self._cell, self._device = sweep, cell, device
        self._directory: Path | None = None
        self._error: CellEvent | None = None

    async def run(self) -> Run:
        """Measure the cell; again in a Python of its own, where it was forked and nobody can tell how it ended."""
        run = await self._measured(self._sweep.fork_for(self._cell.cell))
        if run is None:
            self._directory = self._error = None
            run = await self._measured(None)
        assert run is not None
        return run

    async def _measured(self, fork: Fork | None) -> Run | None:
        """The cell's run; None where nobody can tell how its process ended, and it left no result."""
        self._cell.state = "measuring"
        self._sweep.told()
        request = msgspec.json.encode(self._sweep.request(self._cell.cell, self._device))
        shared = self._cell.cell.workload.parallel != NOT_PARALLEL
        started = RankProcesses if shared else CellProcess
        process = await started.start(request, mark=self._sweep.next_mark(), fork=fork)
        in_time, stopped = True, False
        try:
            try:
                async with asyncio.timeout(self._sweep.timeout_s):
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
            self._hear_the_rest(process)
            if stopped:
                self._keep_what_was_stopped(process)
        if in_time and process.lost and self._error is None and not _is_result(_run_in(self._directory)):
            return None
        if in_time:
            run = self._result(process)
            if process.culprit is not None and run.status != "done":
                failure = Failure(message=process.culprit, during="ranks")
                run = self._sweep.record(self._cell.cell, self._directory, "killed", failure, process.log)
            return run
        return self._ended("timed-out", f"no end after {self._sweep.timeout_s:.0f} s", process.log)

    async def _follow(self, process: CellProcess | RankProcesses) -> None:
        """Listen until the cell has said how it ended, or is dead."""
        while (event := await process.events.get()) is not None:
            self._hear(event)
            if event.finished or event.error:
                return

    def _hear_the_rest(self, process: CellProcess | RankProcesses) -> None:
        while not process.events.empty():
            event = process.events.get_nowait()
            if event is not None:
                self._hear(event)

    def _hear(self, event: CellEvent) -> None:
        if event.directory:
            self._directory = Path(event.directory)
        if event.error:
            self._error = event
        if event.stage:
            self._cell.stage, self._cell.detail = event.stage, event.detail
            self._sweep.told()

    def _keep_what_was_stopped(self, process: CellProcess | RankProcesses) -> None:
        """Mark the run of a cell that the user stopped as interrupted; remove its directory if it saved nothing."""
        with contextlib.suppress(OSError, StepscopeError):
            run = _run_in(self._directory)
            if run is not None and run.status == "unfinished":
                self._ended("interrupted", "interrupted by the user", process.log)
            elif run is None and self._directory is not None:
                self._directory.rmdir()

    def _result(self, process: CellProcess | RankProcesses) -> Run:
        if self._error and self._error.error:
            if self._error.log_matters:
                sys.stderr.write(process.log)
            if self._error.error_for_all:
                raise InputError(self._error.error)
            return self._ended("failed", self._error.error, during=REFUSED)
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
        if run is not None and _is_result(run):
            return run
        during = during or " ".join(part for part in (self._cell.stage or "start", self._cell.detail) if part)
        failure = Failure(message=message, during=during)
        return self._sweep.record(self._cell.cell, self._directory, status, failure, log)
