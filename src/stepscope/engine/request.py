"""The request to measure a step, and the progress that it reports. Neither needs torch."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from stepscope.core.environment import RankPlace
from stepscope.core.errors import InputError, choose
from stepscope.core.evidence import TRACE_TOOLS, ProcessStart, TraceTool
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


WAITS = "wait for its turn"
"""The stage in which a process is ready, and waits for others that are timed before it."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a process among several of one device that get ready side by side, and are timed one by one."""

    file: str
    """A file whose lock the sweep holds until this process may time its steps."""
    waiting: int = 0
    """Processes that still wait by then: they hold memory of the device, and leave it alone."""


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
    turn: Turn | None = None
    """Where it is timed among processes that get ready beside it; None where none do."""
    ceilings: bool = True
    """Whether the device's ceilings are measured where they are not known yet."""
    in_seconds: bool = False
    """Whether the settings' seconds bound the whole run, and not its measured steps alone."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Progress for a display: a stage's name, details in words, and the share that is done (None if unknown)."""

    name: str
    detail: str = ""
    fraction: float | None = None
    lasts: bool = False
    """Whether the name is something found, which stays on the screen, and no stage."""


Tell = Callable[[Stage], None]


def begun_now() -> str:
    """This moment, as runs keep the one in which they began."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def begun_run(request: StepRequest, directory: Path, status: Status) -> Run:
    """The run of a request that begins now, or that never began, in its directory."""
    return Run(
        id=directory.name, created=begun_now(), tag=request.tag,
        sweep=request.sweep, repeat=request.repeat, status=status, workload=request.workload,
        settings=request.settings,
    )  # fmt: skip


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
    from stepscope.recording.environment import resolve_device  # noqa: PLC0415  (torch)

    return resolve_device(device).type
