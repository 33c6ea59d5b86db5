"""Measures many workloads, each in a process of its own: a failure of one becomes its row, and the others go on.

Killed at any moment, the same sweep resumes: a cell whose run is on disk with a result is not measured again.
"""

import asyncio
import contextlib
import fcntl
import functools
import hashlib
import itertools
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path
from typing import IO, Self, TypeGuard

import msgspec

from stepscope.allocations.prediction.estimate import estimate_quickly
from stepscope.allocations.prediction.fit import Budget, budget_of_memory, budget_of_total, will_fit
from stepscope.allocations.prediction.layouts import memory_of_ranks
from stepscope.core import interrupts
from stepscope.core.attention_support import is_predicted
from stepscope.core.environment import refuse_several
from stepscope.core.errors import GateFailure, InputError
from stepscope.core.formulas.spelled import cell_name
from stepscope.core.layout import layout_of
from stepscope.core.run import REPEATED, Failure, Run, Status
from stepscope.core.run_directory import load_runs
from stepscope.core.strategies import NOT_PARALLEL
from stepscope.core.workloads import TextbookWorkload, Workload
from stepscope.engine.cell_process import CellProcess, kill_marked
from stepscope.engine.cluster import Cluster, terms_of
from stepscope.engine.forks import Forks
from stepscope.engine.measured_cell import REFUSED, WRONG, DevicePlace, Place, PlaceLost, record
from stepscope.engine.request import WAITS, Stage, StepRequest, Tell, Turn
from stepscope.engine.sweep_plan import BROKEN, Cell, CellState, Policy, SweepPlan, SweepState, TellSweep
from stepscope.recording.nvml import smallest_gpu

FEWEST_FORKED = 2
"""Cells for which a process that has imported everything is worth its start."""
COMPILER, COMPILER_ON_GPU = "torch._inductor.compile_fx", "torch._inductor.codecache"
"""What compiled cells import beside what every cell does; on a GPU only a part of it. The rest opens the GPU as it is
imported, and a process that has opened a device forks none."""
MOST_LOSSES = 3
"""Nodes that may die while they measure a cell: with that many, it is the cell that ends them."""


class SweepInterrupted(KeyboardInterrupt):
    """The user stopped the sweep. `runs` are the cells that have ended, interrupted ones left out; `kept` are the
    directories of those, with what they had measured."""

    def __init__(self, runs: list[Run], kept: list[Path]) -> None:
        super().__init__("interrupted")
        self.runs, self.kept = runs, kept


class Series:
    """Sweeps that follow one another, as those of a search do, and are not known beforehand.

    One process forks the cells of all of them, so PyTorch is imported once, and a sweep of one cell is forked, too. Use
    it as a context.
    """

    def __init__(self, device: str) -> None:
        """device: the one of all its sweeps."""
        self.modules = (_compiler_on(device),)
        self.forks = Forks(_marks(f"{secrets.token_hex(6)}-{secrets.token_hex(6)}."), self.modules)
        self.loop = asyncio.Runner()  # what forks the cells talks in one loop of events

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def begin(self) -> None:
        """Start the process that forks cells, which imports PyTorch while this one does."""
        self.loop.run(self.forks.begin())

    def close(self) -> None:
        """End the process that forks cells."""
        self.forks.close()
        self.loop.close()


def run_sweep(
    plan: SweepPlan, policy: Policy | None = None, tell: TellSweep = lambda _: None, series: Series | None = None
) -> list[Run]:
    """Measure every cell that has no result yet; returns a run for each cell, in the plan's order.

    series: the sweeps that this one is of. Ctrl-C lets the running cells save what they have, then raises
    SweepInterrupted.
    """
    refuse_several(os.environ, "measure all cells", "a sweep starts its ranks itself, so start it without torchrun")
    out = Path(plan.out)
    with locked(out / f".sweep-{plan.key}.lock", "this very sweep is already running", "choose another --runs"):
        before = set(out.iterdir())
        sweep = _Sweep(plan, policy or Policy(), tell, series)
        with interrupts.raising():  # before asyncio, which takes Ctrl-C for itself in a process that is not ours
            runs = series.loop.run(sweep.run()) if series is not None else asyncio.run(sweep.run())
    if sweep.interrupted:
        stopped, _ = load_runs([folder for folder in sorted(set(out.iterdir()) - before) if folder.is_dir()])
        # Another command may have left runs in the same place meanwhile.
        kept = [run for run in stopped if run.status == "interrupted" and run.sweep == plan.key]
        raise SweepInterrupted(runs, [out / run.id for run in kept])
    return runs


@contextlib.contextmanager
def locked(lock: Path, busy: str, remedy: str) -> Generator[None]:
    """A lock that one process at a time has; it ends with the process.

    Raises InputError where another has it (`busy` says so), and with the remedy where its folder cannot be written.
    """
    out = lock.parent
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        raise InputError(f"cannot write runs to {out}: {error.strerror or error}; {remedy}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{busy} into {out}: wait for it, or stop it") from None
        yield


def _compiler_on(device: str) -> str:
    without_gpu = device == "cpu" or (device == "auto" and smallest_gpu() is None)
    return COMPILER if without_gpu else COMPILER_ON_GPU


def _marks(beginning: str) -> Callable[[], str]:
    """Gives the mark that the next process, and all that it starts, carry in their environment. All are equally long: a
    forked cell writes its own over that of its server."""
    numbers = itertools.count(1)
    return lambda: f"{beginning}{next(numbers):06}."


class _Sweep:
    def __init__(self, plan: SweepPlan, policy: Policy, tell: TellSweep, series: Series | None) -> None:
        self._plan, self._policy, self._tell, self._series = plan, policy, tell, series
        self._out = Path(plan.out)
        self.interrupted = False
        self.state = SweepState(cells=[CellState(cell=cell) for cell in plan.cells], timeout_s=self._policy.timeout_s)
        mark = f"{plan.key}-{hashlib.sha256(bytes(self._out.resolve())).hexdigest()[:12]}."
        self._next_mark = _marks(mark)
        kill_marked(mark)  # left by a start of this very sweep that was killed together with its cell
        self._find_results()
        self._waiting = [cell for cell in self.state.cells if cell.run is None]
        self._changed, self._all_ended = asyncio.Condition(), asyncio.Event()
        self._imported: tuple[str, ...] | None = None
        """What a process that forks the cells imports besides; None where each is better a Python of its own."""
        self._forks = None
        forked = [cell.cell.workload for cell in self._waiting if cell.cell.repeat is None]
        if self._policy.start == "fork" and len(forked) >= (FEWEST_FORKED if series is None else 1):
            compiled = any(workload.compile != "eager" for workload in forked)
            compilers = tuple({_compiler_on(device) for device in plan.devices}) if compiled and series is None else ()
            self._imported = series.modules if series is not None else compilers
            self._forks = series.forks if series is not None else Forks(self._next_mark, self._imported)
        self._terms = terms_of(policy.on, plan, policy) if policy.on is not None else None
        self._cluster: Cluster | None = None

    async def run(self) -> list[Run]:
        self._tell(self.state)
        loop = asyncio.get_running_loop()
        work = loop.create_task(self._measure_all())

        def stop() -> None:
            if not self.interrupted:  # asked again: the cells are saving what they have
                self.interrupted = True
                work.cancel()

        with interrupts.notifying(lambda: loop.call_soon_threadsafe(stop)):
            try:
                await work
            except asyncio.CancelledError:
                if not self.interrupted:
                    raise
        return [cell.run for cell in self.state.cells if cell.run is not None]

    async def _measure_all(self) -> None:
        try:
            if self._waiting and self._policy.side_by_side > 1:
                await self._measure_in_waves()
            elif self._waiting:
                async with asyncio.TaskGroup() as workers:
                    async for place in self._places():
                        self.state.places += 1
                        workers.create_task(self._work(place))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            if self._forks is not None and self._series is None:
                self._forks.close()
            if self._cluster is not None:
                await self._cluster.close()

    async def _measure_in_waves(self) -> None:
        """As many cells as get ready side by side, and the next ones when these have ended: whatever gets ready keeps
        the device busy."""
        place = DevicePlace(self._plan.devices[0], self._policy.timeout_s, self._next_mark, self._forks)
        self.state.places = 1
        while self._waiting:
            wave = self._waiting[: self._policy.side_by_side]
            del self._waiting[: len(wave)]
            with _Turns(len(wave)) as turns:
                async with asyncio.TaskGroup() as cells:
                    for number, cell in enumerate(wave):
                        cells.create_task(self._measure_in_turn(cell, place, turns, number))

    async def _measure_in_turn(self, cell: CellState, place: Place, turns: "_Turns", number: int) -> None:
        request = msgspec.structs.replace(self._request(cell.cell, place.device), turn=turns.of(number))

        def tell(stage: Stage) -> None:
            if stage.name == WAITS:
                turns.ready(number)
            self._tell_stage(cell, stage)

        run = await self._measure(cell, place, request, tell)
        turns.ended(number)
        await self._end(cell, run)

    async def _places(self) -> AsyncGenerator[Place]:
        """Where cells are measured: the devices of this machine, or what the nodes of a cluster have."""
        if self._terms is not None:
            self._cluster = await Cluster.start(self._terms, self._next_mark())
            async for place in self._cluster.places(self._all_ended):
                yield place
            return
        if len(self._plan.devices) > 1:
            await self._check_devices()
        for device in self._plan.devices:
            yield DevicePlace(device, self._policy.timeout_s, self._next_mark, self._forks)

    async def _check_devices(self) -> None:
        fork = self._forks.fork if self._forks is not None else None
        process = await CellProcess.start(b"", mark=self._next_mark(), devices=self._plan.devices, fork=fork)
        try:
            while (event := await process.events.get()) is not None:
                if event.error:
                    raise InputError(event.error)
        finally:
            await process.close()

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
                planned = cell.cell
                same = planned.settings == run.settings and planned.repeat == run.repeat
                if same and planned.workload.identity == run.workload.identity:
                    cell.run, cell.state, cell.resumed = run, run.status, True

    async def _work(self, place: Place) -> None:
        memory_bytes: int | None = None
        while (cell := await self._next()) is not None:
            request = self._request(cell.cell, place.device)
            smaller = self._smaller_that_did_not_fit(cell.cell.workload, memory_bytes if place.unlike else 0)
            if smaller is not None and self._policy.skip:
                message = f"{'-'.join(smaller.workload.words())} ran out of memory"
                run = record(request, None, "skipped", Failure(message=message, during="plan"))
            else:
                try:
                    run = await self._measure(cell, place, request, functools.partial(self._tell_stage, cell))
                except PlaceLost as lost:
                    await self._measure_elsewhere(cell, request, lost)
                    return
                memory_bytes = run.environment.memory_bytes if run.environment is not None else memory_bytes
            await self._end(cell, run)

    async def _measure(self, cell: CellState, place: Place, request: StepRequest, tell: Tell) -> Run:
        """The run of a cell, measured in this place. Raises PlaceLost, and what a refusal says where one ends all."""
        start = time.monotonic()
        cell.state = "measuring"
        self._tell(self.state)
        run = await place.measure(request, self._imported if cell.cell.repeat is None else None, tell)
        if self._policy.refuses and run.failure is not None and run.failure.during in (REFUSED, WRONG):
            shutil.rmtree(self._out / run.id, ignore_errors=True)
            raise (GateFailure if run.failure.during == WRONG else InputError)(run.failure.message)
        cell.seconds = time.monotonic() - start
        return run

    async def _next(self) -> CellState | None:
        """The next cell that waits; None when all have ended: until then, a place that is lost gives its cell back."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._waiting or self._all_ended.is_set())
            return self._waiting.pop(0) if self._waiting else None

    async def _end(self, cell: CellState, run: Run) -> None:
        cell.run, cell.state, cell.stage, cell.detail = run, run.status, "", ""
        self._tell(self.state)
        if all(cell.run is not None for cell in self.state.cells):
            self._all_ended.set()
        async with self._changed:
            self._changed.notify_all()

    async def _measure_elsewhere(self, cell: CellState, request: StepRequest, lost: PlaceLost) -> None:
        """Put the cell of a lost place before those that wait, if it was not too often the last of its place."""
        self.state.places -= 1
        cell.losses += lost.began
        if cell.losses >= MOST_LOSSES:
            message = f"{lost} while it was measured, the {MOST_LOSSES}rd time that this cell lost its node"
            await self._end(
                cell, record(request, None, "killed", Failure(message=message, during=cell.stage or "start"))
            )
            return
        if lost.began:
            self.state.faults.append(f"{cell_name(cell.cell.workload, cell.cell.settings)}: {lost}")
        cell.state, cell.stage, cell.detail = "waiting", "", ""
        async with self._changed:
            self._waiting.insert(0, cell)
            self._changed.notify_all()
        self._tell(self.state)

    def _smaller_that_did_not_fit(self, workload: Workload, memory_bytes: int | None) -> Run | None:
        """A run of a smaller workload that ran out of at least so much memory; None, too, where that is not known."""
        if memory_bytes is None:
            return None
        for cell in self.state.cells:
            run = cell.run
            if run and run.status == "out-of-memory" and run.workload.at_most(workload):
                held = run.environment.memory_bytes if run.environment is not None else None
                if held is None or memory_bytes <= held:
                    return run
        return None

    def _tell_stage(self, cell: CellState, stage: Stage) -> None:
        cell.stage, cell.detail = stage.name, stage.detail
        self._tell(self.state)

    def _request(self, cell: Cell, device: str) -> StepRequest:
        """The request to a cell's process."""
        plan = self._plan
        return StepRequest(
            workload=cell.workload, settings=cell.settings, device=device, out=plan.out, tag=plan.tag, sweep=plan.key,
            repeat=cell.repeat, against=cell.against, memory_limit_bytes=plan.memory_limit_bytes,
            peak_flops_per_s=plan.peak_flops_per_s, trace=plan.trace, memory=plan.memory,
            ceilings=self._policy.ceilings,
        )  # fmt: skip


class _Turns:
    """The turns of cells that get ready side by side: each is timed when all are ready, and those before it ended."""

    def __init__(self, cells: int) -> None:
        self._cells, self._unready = cells, set(range(cells))
        self._running: int | None = None
        self._locked: dict[int, IO[str]] = {}

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="stepscope-turns-")
        for number in range(self._cells):
            self._locked[number] = Path(self._folder.name, str(number)).open("w")
            fcntl.flock(self._locked[number], fcntl.LOCK_EX)
        return self

    def __exit__(self, *raised: object) -> None:
        for file in self._locked.values():
            file.close()
        self._folder.cleanup()

    def of(self, number: int) -> Turn:
        """What the cell is told."""
        return Turn(file=str(Path(self._folder.name, str(number))), waiting=self._cells - number - 1)

    def ready(self, number: int) -> None:
        """Take in that this cell waits."""
        self._unready.discard(number)
        if not self._unready and self._running is None and self._locked:
            self._running = min(self._locked)
            self._locked.pop(self._running).close()

    def ended(self, number: int) -> None:
        """Take in that this cell has ended, with a result or without one."""
        if number in self._locked:
            self._locked.pop(number).close()
        if self._running == number:
            self._running = None
        self.ready(number)


# Predicts which cells of a sweep will run out of memory, before the first of them runs.


_FAR_BELOW = 0.6
"""A peak below this share of the memory needs no closer look."""


def memory_of(plan: SweepPlan) -> Budget | None:
    """The Budget of memory for each cell; None on a CPU, and where the memory is not known."""
    if any(device == "cpu" for device in plan.devices):
        return None
    if plan.memory_limit_bytes is not None:
        return budget_of_memory(plan.memory_limit_bytes)
    gpu = smallest_gpu()
    return None if gpu is None else budget_of_total(gpu[1], gpu[0])


def is_foretold(workload: Workload) -> TypeGuard[TextbookWorkload]:
    """Whether it can be said before that this step fits. Of ranks, only what a layout of plans stands for."""
    if not is_predicted(workload) or workload.compile == "blocks":  # which may need less than is predicted
        return False
    return workload.parallel == NOT_PARALLEL or layout_of(workload) is not None


def cells_that_will_not_fit(plan: SweepPlan, budget: Budget) -> list[TextbookWorkload]:
    """The workloads whose predicted step needs more than the budget, in the order of the plan."""
    return [cell.workload for cell in plan.cells if is_foretold(cell.workload) and not fits(cell.workload, budget)]


def needed_bytes(workload: TextbookWorkload) -> int:
    """The peak of a step that is foretold, in bytes: of one process, or of each rank."""
    layout = layout_of(workload)
    if workload.parallel == NOT_PARALLEL or layout is None:
        return estimate_quickly(workload).peak_bytes
    return memory_of_ranks(workload).needs(layout, exactly=True).peak


def fits(workload: TextbookWorkload, budget: Budget) -> bool:
    """Whether a step that is foretold fits."""
    if workload.parallel != NOT_PARALLEL:
        return needed_bytes(workload) <= budget.usable_bytes
    if workload.phase == "train" and estimate_quickly(workload).peak_bytes < _FAR_BELOW * budget.usable_bytes:
        return True
    return will_fit(workload, budget)
