"""The processes of one cell whose step several ranks share, as if they were one: each is a cell's process of its own.

Why not torchrun's agent: a cell's process brings what is needed here already. It ends with its sweep however that dies,
takes with it all that it started, says what it does and how it ended, and lets a run survive it. An agent would add the
meeting place of the ranks, which is a file here, and restarts, which no measurement wants. A job that torchrun or srun
started is joined instead (core/ranks.py).
"""

import asyncio
import contextlib
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from stepscope.core.ranks import RankPlace, check_processes
from stepscope.engine.cell_process import CellEvent, CellProcess, Fork
from stepscope.engine.request import StepRequest

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
        asked = msgspec.json.decode(request, type=StepRequest)
        ranks = asked.workload.ranks
        check_processes(ranks)
        meeting = Path(tempfile.mkdtemp(prefix="stepscope-ranks-"))
        processes: list[CellProcess] = []
        try:
            for rank in range(ranks):
                place = RankPlace(
                    rank=rank, ranks=ranks, local_rank=rank, local_ranks=ranks, meeting=f"file://{meeting}/meeting",
                    began_s=time.time(),
                )  # fmt: skip
                own = msgspec.structs.replace(asked, place=place)
                processes.append(await CellProcess.start(msgspec.json.encode(own), mark=next_mark(), fork=fork))
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
