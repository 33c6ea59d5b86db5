"""The request to measure a step, and the progress that it reports. Neither needs torch."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, get_args

import msgspec

from stepscope.core.errors import InputError, choose
from stepscope.core.evidence import TRACE_TOOLS, ProcessStart, TraceTool
from stepscope.core.ranks import RankPlace
from stepscope.core.run import Repeat, Run, Settings, Status
from stepscope.core.workloads import Workload

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
