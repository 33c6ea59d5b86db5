"""Many workloads, each in a process of its own: whatever happens to one is its row, and the others go on.

Killed at any moment, the same sweep resumes: a cell whose run is on disk with a result is not measured again.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from stepscope.analysis.checks import check_run
from stepscope.analysis.metrics import summarise
from stepscope.core.errors import InputError, one_line
from stepscope.core.run import REPEATED, Failure, Run, Status
from stepscope.core.run_directory import create_run_directory, load_run, load_runs, save_run
from stepscope.core.workload import Workload
from stepscope.studies.cell import CellEvent
from stepscope.studies.request import StepRequest
from stepscope.studies.sweep_plan import BROKEN, Cell, CellState, Policy, SweepPlan, SweepState, Tell
from stepscope.work.transformer import phase_work

INTERRUPT_GRACE_S = 15.0
"""How long an interrupted cell may take to save what it has."""
STDERR_KEPT_BYTES = 4 * 1024 * 1024
EXIT_GRACE_S = 20.0
"""How long a cell may take to end once its run is on disk."""
STDERR_FILE = "stderr.txt"


CELL_COMMAND = (sys.executable, "-P", "-m", "stepscope.studies.cell")
"""-P: the current directory is the user's, and may hold a random.py of theirs."""


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
def _locked(out: Path, key: str) -> Iterator[None]:
    """One process at a time for one sweep in one place; the lock goes with the process, however it ends."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / f".sweep-{key}.lock").open("w")
    except OSError as error:
        raise InputError(f"cannot write runs to {out}: {error.strerror or error}; choose another --out") from error
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
        self._find_results()
        self._waiting = [cell for cell in self.state.cells if cell.run is None]

    async def run(self) -> list[Run]:
        self._tell(self.state)
        if len(self._plan.devices) > 1 and self._waiting:
            await self._check_devices()
        workers = [asyncio.create_task(self._work(device)) for device in self._plan.devices]

        def stop() -> None:
            for worker in workers:
                worker.cancel()

        def interrupt() -> None:
            self.interrupted = True
            stop()

        def stop_all_if_failed(worker: asyncio.Task[None]) -> None:
            if not worker.cancelled() and worker.exception() is not None:
                stop()

        for worker in workers:
            worker.add_done_callback(stop_all_if_failed)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
        ends = await asyncio.gather(*workers, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end
        return [cell.run for cell in self.state.cells if cell.run is not None]

    async def _check_devices(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *CELL_COMMAND, *self._plan.devices,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"\n")
        answer = await process.stdout.readline()
        process.stdin.close()
        await process.wait()
        if answer and (error := msgspec.json.decode(answer, type=CellEvent).error):
            raise InputError(error)

    def _find_results(self) -> None:
        """Take over the results that an earlier start of this sweep left on disk."""
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
                if cell.cell.workload == run.workload and cell.cell.settings == run.settings:
                    cell.run, cell.state, cell.resumed = run, run.status, True

    async def _work(self, device: str) -> None:
        while self._waiting:
            cell = self._waiting.pop(0)
            smaller = self._smaller_that_did_not_fit(cell.cell.workload)
            if smaller is not None and self._policy.skip:
                message = f"{smaller.workload.key.rpartition('-')[0]} ran out of memory"
                run = self.record(cell.cell, None, "skipped", Failure(message=message, during="plan"))
            else:
                start = time.monotonic()
                run = await _CellProcess(self, cell, device).run()
                cell.seconds = time.monotonic() - start
            cell.run, cell.state, cell.stage, cell.detail = run, run.status, "", ""
            self._tell(self.state)

    def _smaller_that_did_not_fit(self, workload: Workload) -> Run | None:
        for cell in self.state.cells:
            run = cell.run
            if run and run.status == "out-of-memory" and run.workload.at_most(workload):
                return run
        return None

    def told(self) -> None:
        """A cell's state has changed."""
        self._tell(self.state)

    def request(self, cell: Cell, device: str) -> StepRequest:
        """What a cell's process is asked."""
        return StepRequest(
            workload=cell.workload,
            settings=cell.settings,
            device=device,
            out=self._plan.out,
            tag=self._plan.tag,
            sweep=self._plan.key,
            memory_limit_bytes=self._plan.memory_limit_bytes,
            peak_flops_per_s=self._plan.peak_flops_per_s,
            trace=self._plan.trace,
            memory=self._plan.memory,
        )

    @property
    def timeout_s(self) -> float:
        return self._policy.timeout_s

    def unfinished_directory(self, cell: Cell, since: float) -> Path | None:
        """The directory that a dead cell's process left, if it got so far."""
        for directory in self._out.glob(f"*-{cell.workload.key}"):
            if directory.stat().st_mtime >= since - 1.0:
                try:
                    run = load_run(directory)
                except InputError:
                    continue
                if run.status in REPEATED and run.sweep == self._plan.key and run.settings == cell.settings:
                    return directory
        return None

    def record(self, cell: Cell, directory: Path | None, status: Status, failure: Failure, stderr: bytes = b"") -> Run:
        """Save a row for a cell that could not write its own."""
        if directory is None:
            directory = create_run_directory(self._out, cell.workload)
            run = Run(
                id=directory.name,
                created=datetime.now(UTC).isoformat(timespec="milliseconds"),
                tag=self._plan.tag,
                sweep=self._plan.key,
                status=status,
                workload=cell.workload,
                settings=cell.settings,
                work=phase_work(cell.workload),
            )
        else:
            run = load_run(directory)
        artifacts = dict(run.artifacts)
        if stderr:
            with contextlib.suppress(OSError):  # the row matters more than its last words
                (directory / STDERR_FILE).write_bytes(stderr)
                artifacts["stderr"] = STDERR_FILE
        run = msgspec.structs.replace(run, status=status, failure=failure, artifacts=artifacts)
        run = msgspec.structs.replace(run, findings=check_run(run), summary=summarise(run))
        save_run(run, directory)
        return run


class _CellProcess:
    """One cell's process, from its start to a run on disk."""

    def __init__(self, sweep: _Sweep, cell: CellState, device: str) -> None:
        self._sweep, self._cell, self._device = sweep, cell, device
        self._stderr = bytearray()
        self._last: CellEvent | None = None
        self._since = time.time()

    async def run(self) -> Run:
        self._cell.state = "measuring"
        self._sweep.told()
        process = await asyncio.create_subprocess_exec(
            *CELL_COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C on the terminal reaches the sweep alone, which passes it on
            env={**os.environ, "KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "99")},
        )  # fmt: skip
        assert process.stdin is not None
        try:
            request = self._sweep.request(self._cell.cell, self._device)
            process.stdin.write(msgspec.json.encode(request) + b"\n")
            async with asyncio.timeout(self._sweep.timeout_s):
                stderr = asyncio.create_task(self._keep_stderr(process))
                await self._follow(process)
            async with asyncio.timeout(EXIT_GRACE_S):
                await stderr
                await process.wait()
        except TimeoutError:
            if self._last and self._last.run_directory:  # all was done, only the process does not end
                return load_run(Path(self._last.run_directory))
            await self._interrupt(process)
            return self._ended("timed-out", f"no end after {self._sweep.timeout_s:.0f} s")
        except asyncio.CancelledError:
            await self._interrupt(process)
            raise
        except (BrokenPipeError, ConnectionResetError):
            await process.wait()
        finally:
            if process.returncode is None:
                await self._kill(process)
        return self._result(process.returncode or 0)

    async def _interrupt(self, process: asyncio.subprocess.Process) -> None:
        """Let the cell save what it has, as on Ctrl-C; then end it."""
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(INTERRUPT_GRACE_S):
                await process.wait()
        except TimeoutError:
            await self._kill(process)

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self._last = msgspec.json.decode(line, type=CellEvent)
            if self._last.stage:
                self._cell.stage, self._cell.detail = self._last.stage, self._last.detail
                self._sweep.told()

    async def _keep_stderr(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while chunk := await process.stderr.read(8192):
            self._stderr += chunk
            del self._stderr[:-STDERR_KEPT_BYTES]

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    def _result(self, code: int) -> Run:
        last = self._last
        if last and last.run_directory:
            return load_run(Path(last.run_directory))
        if last and last.error:
            if last.stderr_matters:
                sys.stderr.write(bytes(self._stderr).decode(errors="replace"))
            if last.error_for_all:
                raise InputError(last.error)
            return self._sweep.record(self._cell.cell, None, "failed", Failure(message=last.error, during="refused"))
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (the system's out-of-memory killer does this)" if -code == signal.SIGKILL else ""
            return self._ended("killed", f"the process was killed by {name}{hint}")
        lines = bytes(self._stderr).decode(errors="replace").strip().splitlines() or ["no word"]
        telling = [line for line in lines if "error" in line.lower()] or lines
        return self._ended("failed", f"the process ended with code {code}: {one_line(Exception(telling[-1]))}")

    def _ended(self, status: Status, message: str) -> Run:
        during = " ".join(part for part in (self._cell.stage or "start", self._cell.detail) if part)
        return self._sweep.record(
            self._cell.cell,
            self._sweep.unfinished_directory(self._cell.cell, self._since),
            status,
            Failure(message=message, during=during),
            bytes(self._stderr),
        )
