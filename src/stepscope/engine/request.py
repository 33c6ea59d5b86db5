"""The request to measure a step, and the progress that it reports. Neither needs torch."""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from stepscope.core.environment import RankPlace
from stepscope.core.errors import InputError, choose
from stepscope.core.evidence import TRACE_TOOLS, ProcessStart, TraceTool
from stepscope.core.formulas.spelled import parameters_of
from stepscope.core.formulas.transformer import known_work
from stepscope.core.model_config import ModelConfig, configure
from stepscope.core.run import Repeat, Run, Settings, Status
from stepscope.core.strategies import NOT_PARALLEL
from stepscope.core.workloads import TextbookWorkload, Workload

MemoryStacks = Literal["python", "all"]
MEMORY_STACKS: tuple[MemoryStacks, ...] = get_args(MemoryStacks)

MOST_TRACED_STEPS = 1000
"""The most steps in a trace; with more it has gigabytes, which no viewer opens."""

FEWEST_RECORDED_STEPS, MOST_RECORDED_STEPS = 3, 100
"""Recorded steps that tell growth from chance, and the most whose allocations are kept."""


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which profilers trace how many steps, after the timed ones."""

    tools: tuple[TraceTool, ...] = ()
    steps: int = 2
    stacks: bool = False
    """Whether torch.profiler records the Python stack of each operator, which slows the host several times."""

    def __post_init__(self) -> None:
        for tool in self.tools:
            choose(tool, TRACE_TOOLS, "trace")
        if not 1 <= self.steps <= MOST_TRACED_STEPS:
            raise InputError(f"trace-steps is {self.steps}: it must be 1 to {MOST_TRACED_STEPS}")


class MemoryRequest(msgspec.Struct, frozen=True, kw_only=True):
    """How the allocations of one more step, or of several, are recorded after the timed ones."""

    stacks: MemoryStacks = "python"
    """Which stacks each allocation keeps; naming the functions of C++ stacks takes minutes."""
    steps: int = 1
    """Steps that are recorded one after the other; from three on they show what grows from step to step."""

    def __post_init__(self) -> None:
        choose(self.stacks, MEMORY_STACKS, "memory-stacks")
        if self.steps != 1 and not FEWEST_RECORDED_STEPS <= self.steps <= MOST_RECORDED_STEPS:
            raise InputError(
                f"memory-steps is {self.steps}: it must be 1 for where the memory goes, or {FEWEST_RECORDED_STEPS} to "
                f"{MOST_RECORDED_STEPS} for what grows from step to step"
            )


class StepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A workload to measure, the settings, and where the run goes. It travels to a cell's process as JSON."""

    workload: Workload
    settings: Settings = Settings()
    device: str = "auto"
    out: str = "runs"
    tag: str | None = None
    sweep: str | None = None
    repeat: Repeat | None = None
    against: Workload | None = None
    """Another workload, whose steps are measured turn by turn with this one's in the same process."""
    memory_limit_bytes: int | None = None
    peak_flops_per_s: float | None = None
    trace: TraceRequest = TraceRequest()
    memory: MemoryRequest | None = None
    """How allocations are recorded; None if they are not."""
    place: RankPlace | None = None
    """Which of the ranks that share the step this process is; None where no others do."""
    process_start: ProcessStart | None = None
    """How the process that measures came to be, where it is a cell's."""
    node: str | None = None
    """The name of the cluster's node that measures; None on the machine of the command."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Progress for a display: a stage's name, details in words, and the share that is done (None if unknown)."""

    name: str
    detail: str = ""
    fraction: float | None = None


Tell = Callable[[Stage], None]


def begun_run(request: StepRequest, directory: Path, status: Status) -> Run:
    """The run of a request that begins now, or that never began, in its directory."""
    return Run(
        id=directory.name, created=datetime.now(UTC).isoformat(timespec="milliseconds"), tag=request.tag,
        sweep=request.sweep, repeat=request.repeat, status=status, workload=request.workload,
        settings=request.settings,
    )  # fmt: skip


# Plain data of a sweep: its plan, its policy towards cells, and its state.


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
    found: list[Cell] = []
    for cell in cells:
        told = msgspec.json.encode((cell.identity, times, begun), order="sorted")
        name = f"{cell.workload.key}-{hashlib.sha256(told).hexdigest()[:12]}"
        found += [
            msgspec.structs.replace(cell, repeat=Repeat(set=name, number=number, of=times))
            for number in range(1, times + 1)
        ]
    return found


# Grids of workloads: every combination of the listed choices.


def grid(*, model: Sequence[str | ModelConfig], **choices: Sequence[Any] | Any) -> list[TextbookWorkload]:
    """Workloads for every combination; a choice is any field of Workload, one value or a list of them.

    >>> [w.key.rpartition("-")[0] for w in grid(model=["small"], seq_len=[128, 256], dtype="bf16")]
    ['small-b4-s128-bf16-train', 'small-b4-s256-bf16-train']
    """
    models = [configure(m) if isinstance(m, str) else m for m in model]
    lists: dict[str, Any] = {
        name: each if isinstance(each, (list, tuple)) else [each] for name, each in choices.items()
    }
    return list(dict.fromkeys(TextbookWorkload(model=one, **each) for one in models for each in combinations(lists)))


def combinations(choices: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination of one value of each choice.

    Where a step that nobody shares is asked for beside shared ones, it is one process, whatever the numbers of ranks.

    >>> [tuple(each.values()) for each in combinations({"parallel": ["none", "ddp"], "ranks": [2, 4]})]
    [('none', 1), ('none', 1), ('ddp', 2), ('ddp', 4)]
    """
    beside = len(set(choices.get("parallel", ()))) > 1
    for combination in itertools.product(*choices.values()):
        chosen = dict(zip(choices, combination, strict=True))
        if beside and chosen["parallel"] == NOT_PARALLEL and "ranks" in chosen:
            chosen["ranks"] = 1
        yield chosen


def type_of_device(device: str) -> str:
    """cpu or cuda; asks torch only where the user leaves it open."""
    if device != "auto":
        return device.partition(":")[0]
    from stepscope.recording.device import resolve_device  # noqa: PLC0415  (torch)

    return resolve_device(device).type
