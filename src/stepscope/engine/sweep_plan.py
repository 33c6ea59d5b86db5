"""Plain data of a sweep: its plan, its policy towards cells, and its state."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from stepscope.core.evidence import ProcessStart
from stepscope.core.formulas.spelled import parameters_of
from stepscope.core.formulas.transformer import known_work
from stepscope.core.run import Repeat, Run, Settings, Status
from stepscope.core.workloads import Workload
from stepscope.engine.request import MemoryRequest, TraceRequest

BROKEN: frozenset[Status] = frozenset({"failed", "killed", "timed-out"})
"""The ways in which a cell may end without a result; `Policy.retry` measures such cells again."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One workload measured one way."""

    workload: Workload
    settings: Settings = Settings()
    repeat: Repeat | None = None
    """Which of several processes that measure the same this is."""
    against: Workload | None = None
    """A workload whose steps are measured turn by turn with this one's, in the same process."""

    @property
    def identity(self) -> dict[str, object]:
        """What digests are made of."""
        later = {"repeat": self.repeat, "against": self.against and self.against.identity}
        return {
            "workload": self.workload.identity,
            "settings": self.settings.identity,
            **{name: value for name, value in later.items() if value is not None},
        }


class SweepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The cells to measure, and the devices. Equal plans are the same sweep, and resume one another."""

    cells: tuple[Cell, ...]
    devices: tuple[str, ...] = ("auto",)
    """Devices to measure on, each with one cell at a time."""
    out: str = "runs"
    tag: str | None = None
    memory_limit_bytes: int | None = None
    peak_flops_per_s: float | None = None
    trace: TraceRequest = TraceRequest()
    memory: MemoryRequest | None = None

    @property
    def key(self) -> str:
        """Digest of what is measured; which devices share the work does not change it."""
        measured = (sorted(msgspec.json.encode(cell.identity, order="sorted") for cell in self.cells), self.tag)
        limits = (self.memory_limit_bytes, self.peak_flops_per_s, self.devices[0].partition(":")[0])
        traced = (msgspec.json.encode(self.trace, order="sorted"),) if self.trace.tools else ()
        recorded = (msgspec.json.encode(self.memory, order="sorted"),) if self.memory else ()
        return hashlib.sha256(repr((measured, limits, *traced, *recorded)).encode()).hexdigest()[:12]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How the sweep treats its cells; it does not change what a cell measures."""

    timeout_s: float = 900.0
    skip: bool = True
    """Whether a cell is skipped when a smaller one ran out of memory."""
    retry: bool = False
    """Whether cells that failed, were killed or ran out of time are measured again."""
    fresh: bool = False
    """Whether every cell is measured again."""
    refuses: bool = False
    """Whether the first cell that cannot run as asked ends all, as wrong input, and leaves no run."""
    on: str | None = None
    """The Ray cluster whose nodes measure, as `ray://HOST`, or `auto`; None: the devices of this machine do."""
    side_by_side: int = 1
    """How many cells of its one device get ready at once, before they are timed one after another."""
    ceilings: bool = True
    """Whether the device's ceilings are measured where they are not known yet."""
    start: ProcessStart = "fork"
    """How cells' processes come to be. Repeated cells are a Python of their own each, whatever this says: what forked
    ones share is part of what makes processes differ."""


@dataclass
class CellState:
    """A cell as a display sees it."""

    cell: Cell
    state: str = "waiting"
    """The cell's status: waiting, measuring, or the run's status."""
    stage: str = ""
    detail: str = ""
    run: Run | None = None
    resumed: bool = False
    """Whether the cell's run was found on disk."""
    seconds: float | None = None
    losses: int = 0
    """Nodes that died while they measured it."""


@dataclass
class SweepState:
    """The whole sweep as a display sees it."""

    cells: list[CellState]
    timeout_s: float
    """Seconds that one cell may take."""
    faults: list[str] = field(default_factory=list[str])
    """One line for each cell that is measured again: its run file could not be read, or its node has died."""
    places: int = 0
    """Cells that are measured at a time."""

    @property
    def ended(self) -> int:
        return sum(1 for cell in self.cells if cell.run is not None)

    @property
    def seconds_left(self) -> float | None:
        """Forecast of the remaining time from the cells measured so far: a fixed cost each, and the rest by FLOPs."""
        measured = [(cell.seconds, _flops(cell)) for cell in self.cells if cell.seconds is not None]
        if not measured:
            return None
        fixed_s = min(seconds for seconds, _ in measured)
        per_flop_s = sum(seconds - fixed_s for seconds, _ in measured) / sum(flops for _, flops in measured)
        waiting = [cell for cell in self.cells if cell.run is None]
        return sum(min(self.timeout_s, fixed_s + per_flop_s * _flops(cell)) for cell in waiting) / max(self.places, 1)


def _flops(cell: CellState) -> int:
    """The cell's work, to share the time by; those whose work is not known beforehand count alike."""
    return sum(work.flops for work in known_work(cell.cell.workload).values()) or 1


TellSweep = Callable[[SweepState], None]


def order_cells(cells: list[Cell]) -> tuple[Cell, ...]:
    """The cells without duplicates, small ones first, so that a smaller one shows that a larger one cannot fit."""
    unique = {msgspec.json.encode(cell): cell for cell in cells}

    def order(cell: Cell) -> tuple[int, int, int, int]:
        # Cells whose sizes are not known beforehand stay in their order. Repeated cells go in rounds, all of them once
        # and then again: what drifts on the machine then meets all alike.
        workload, number = cell.workload, cell.repeat.number if cell.repeat else 0
        return number, parameters_of(workload) or 0, workload.seq_len or 0, workload.batch_size or 0

    return tuple(sorted(unique.values(), key=order))


def repeated(cells: Sequence[Cell], times: int, begun: str = "") -> list[Cell]:
    """Each cell `times` over, for as many processes. One time is the cell itself.

    begun: what tells this set from another of the same cell; without it, the same sweep finds its own processes again.
    """
    if times == 1:
        return list(cells)
    repeats: list[Cell] = []
    for cell in cells:
        identity = msgspec.json.encode((cell.identity, times, begun), order="sorted")
        name = f"{cell.workload.key}-{hashlib.sha256(identity).hexdigest()[:12]}"
        repeats += [
            msgspec.structs.replace(cell, repeat=Repeat(set=name, number=number, of=times))
            for number in range(1, times + 1)
        ]
    return repeats
