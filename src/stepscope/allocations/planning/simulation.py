"""Pipeline schedules, and a step played through piece by piece."""

import random
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from stepscope.allocations.planning.times import StepTime
from stepscope.core.answer import Slice
from stepscope.core.layout import Layout

# Pipeline schedules as the work of each rank, in order.
#
# 1F1B and its interleaved form as Narayanan et al. 2021 draw them (figures 3 and 4) and Megatron runs them: some
# forwards to warm up, then a forward and a backward in turn, then the backwards that are left.


class Work(NamedTuple):
    """A forward or a backward of a micro-batch through one chunk of a rank."""

    forward: bool
    micro_batch: int
    chunk: int


def schedule(layout: Layout, rank: int) -> list[Work]:
    """The work of a pipeline rank in its order."""
    p, m, v = layout.pipeline, layout.micro_batches, layout.chunks
    every = m * v
    warm_up = min(every, p - rank - 1 if v == 1 else 2 * (p - rank - 1) + (v - 1) * p)
    forwards = [_work(layout, number, forward=True) for number in range(every)]
    backwards = [_work(layout, number, forward=False) for number in range(every)]
    found = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        found += [forward, backward]
    return found + backwards[every - warm_up :]


def _work(layout: Layout, number: int, *, forward: bool) -> Work:
    """The so-manieth forward or backward of any rank: p micro-batches through a chunk, then through the next."""
    p, v = layout.pipeline, layout.chunks
    if v == 1:
        return Work(forward, number, 0)
    chunk = number % (p * v) // p
    micro_batch = number // (p * v) * p + number % p
    return Work(forward, micro_batch, chunk if forward else v - 1 - chunk)


# A step played through, piece by piece: each pipeline rank works off its schedule, and waits for what it needs.
#
# The formulas add up what a step must take; the simulation lets ranks wait for one another. A piece of work begins when
# its rank is free and its input is there; a send takes its link for its time, beside computation. A slow rank
# (`Stragglers`) slows whoever waits for it: within a tensor and context group everybody at once, along the pipeline by
# what is late, over data-parallel replicas at the end of the step.

MOST_REPLICAS = 16
"""Data-parallel replicas that are played; of more, the slowest of these many stands for them."""
MOST_WORK = 400_000
"""Pieces of work that are played at most."""
LANES, SLICES = 16, 4_000
"""Ranks and pieces of work that are drawn: of more ranks some, of more pieces the first."""
_SEED = 20_210_409


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """How far the speed of ranks differs: the relative standard deviation of one rank's step."""

    spread: float = 0.0
    seed: int = _SEED


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """What a played step took, and when each rank of the first replica worked."""

    step_s: float
    pipeline_s: float
    """Until the last backward of the slowest replica has ended."""
    idle_share: float
    """Share of the pipeline's time in which its ranks wait, of the first replica."""
    replicas: int
    slices: tuple[Slice, ...] = ()


def simulate(layout: Layout, time: StepTime, stragglers: Stragglers | None = None) -> Simulated | None:
    """Play a step. None where it has too many pieces of work."""
    spread = stragglers or Stragglers()
    pieces = 2 * layout.micro_batches * layout.stages
    if pieces > MOST_WORK:
        return None
    draws = random.Random(spread.seed)
    replicas = min(layout.data, MOST_REPLICAS, max(1, MOST_WORK // pieces)) if spread.spread else 1
    played = [_Replica(layout, time, _slownesses(layout, spread.spread, draws)) for _ in range(replicas)]
    for replica in played:
        replica.play()
    longest = max(replica.end_s for replica in played)
    first = played[0]
    return Simulated(
        step_s=longest + time.data_s + time.optimizer_s,
        pipeline_s=longest,
        idle_share=1 - sum(first.busy_s) / (layout.pipeline * first.end_s),
        replicas=replicas,
        slices=_slices(layout, first, time),
    )


def _slownesses(layout: Layout, spread: float, draws: random.Random) -> list[float]:
    """How much longer each pipeline rank takes: as the slowest of the ranks that share its matrices and sequence."""
    if not spread:
        return [1.0] * layout.pipeline
    together = layout.tensor * layout.context
    return [max(max(0.5, draws.gauss(1.0, spread)) for _ in range(together)) for _ in range(layout.pipeline)]


class _Replica:
    """One data-parallel replica: the ranks of a pipeline."""

    def __init__(self, layout: Layout, time: StepTime, slownesses: list[float]) -> None:
        self._layout, self._time, self._slow = layout, time, slownesses
        self._waiting = [deque(schedule(layout, rank)) for rank in range(layout.pipeline)]
        self._free = [0.0] * layout.pipeline
        self._link_free: dict[tuple[int, bool], float] = {}
        self._there: dict[tuple[bool, int, int], float] = {}
        """When the input of a micro-batch's forward or backward is there, by stage."""
        self.busy_s = [0.0] * layout.pipeline
        self.done: list[tuple[int, Work, float, float]] = []

    @property
    def end_s(self) -> float:
        return max(self._free)

    def play(self) -> None:
        """Let each rank work until nobody can go on."""
        turn = deque(range(self._layout.pipeline))
        stuck = 0
        while turn and stuck <= len(turn):
            rank = turn.popleft()
            went_on = False
            while self._waiting[rank] and self._work(rank, self._waiting[rank][0]):
                self._waiting[rank].popleft()
                went_on = True
            stuck = 0 if went_on else stuck + 1
            if self._waiting[rank]:
                turn.append(rank)
        assert not turn, "the schedule waits for itself"

    def _work(self, rank: int, work: Work) -> bool:
        """Do a piece of work if its input is there; returns whether it was."""
        p, last = self._layout.pipeline, self._layout.stages - 1
        stage = work.chunk * p + rank
        begins = 0.0
        if not (work.forward and stage == 0):
            key = (work.forward, work.micro_batch, stage)
            if key not in self._there:
                return False
            begins = self._there[key]
        begins = max(begins, self._free[rank])
        time = self._time
        seconds = time.forward_s if work.forward else time.backward_s
        if stage == last:
            seconds += time.last_forward_s if work.forward else time.last_backward_s
        seconds *= self._slow[rank]
        ends = begins + seconds
        self._free[rank] = ends
        self.busy_s[rank] += seconds
        self.done.append((rank, work, begins, ends))
        if work.forward:
            if stage == last:
                self._there[False, work.micro_batch, stage] = ends
            else:
                self._there[True, work.micro_batch, stage + 1] = self._sent(rank, True, ends)
        elif stage > 0:
            self._there[False, work.micro_batch, stage - 1] = self._sent(rank, False, ends)
        return True

    def _sent(self, rank: int, forward: bool, ready: float) -> float:
        """When what is ready now has arrived at the next stage, or the one before."""
        if self._layout.pipeline == 1:
            return ready
        begins = max(ready, self._link_free.get((rank, forward), 0.0))
        self._link_free[rank, forward] = begins + self._time.send_s
        return begins + self._time.send_s


def _slices(layout: Layout, replica: _Replica, time: StepTime) -> tuple[Slice, ...]:
    """When each rank worked, in milliseconds, as far as it can be drawn."""
    lanes = sorted({round(i * (layout.pipeline - 1) / max(1, LANES - 1)) for i in range(LANES)})
    lanes = [rank for rank in lanes if rank < layout.pipeline]
    done = sorted((one for one in replica.done if one[0] in lanes), key=lambda one: one[2])
    found: list[Slice] = []
    for rank, work, begins, ends in done[:SLICES]:
        kind = "forward" if work.forward else "backward"
        chunk = f", chunk {work.chunk}" if layout.chunks > 1 else ""
        name = f"{kind} of micro-batch {work.micro_batch}{chunk}"
        found.append(Slice(_lane(rank), begins * 1e3, ends * 1e3, kind, name))
    found.sort(key=lambda one: (lanes.index(int(one.lane.rpartition(" ")[2])), one.begin))
    if len(done) > SLICES:
        return tuple(found)
    end = replica.end_s
    for rank in lanes:
        if time.data_s:
            found.append(Slice(_lane(rank), end * 1e3, (end + time.data_s) * 1e3, "data parallel", "what is left"))
        if time.optimizer_s:
            begins = end + time.data_s
            found.append(Slice(_lane(rank), begins * 1e3, (begins + time.optimizer_s) * 1e3, "optimizer"))
    return tuple(found)


def _lane(rank: int) -> str:
    return f"pipeline rank {rank}"
