"""Options that verbs share which measure a step: how long it is measured, and what is kept of some more steps."""

from dataclasses import dataclass, field
from typing import Annotated, cast

from stepscope.core.errors import InputError, choose
from stepscope.core.evidence import TRACE_TOOLS, TraceTool
from stepscope.core.options import MEASURING, RECORDING, Option, completed, is_given, words
from stepscope.core.run import Settings, settings_from
from stepscope.engine.request import MEMORY_STACKS, MemoryRequest, MemoryStacks, TraceRequest

RECORDED = ("memory", *TRACE_TOOLS)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long a step is measured."""

    warmup: int | None = None
    steps: int | None = None
    seconds: float = 5.0
    no_profile: Annotated[bool, Option("Leave out the profiled step after the timed ones.", MEASURING)] = False

    @property
    def settings(self) -> Settings:
        """The record of these options that a run keeps."""
        return settings_from(self.warmup, self.steps, self.seconds, self.no_profile)


Record = Annotated[
    tuple[str, ...],
    Option(
        "What to keep of some more steps: every allocation with its stack (memory), a trace of torch.profiler "
        "(kineto) or of Nsight Systems (nsys). Several by commas.",
        RECORDING,
        metavar="|".join(RECORDED),
        repeated=True,
        complete=completed(*RECORDED),
    ),
]
TraceSteps = Annotated[int, Option("How many steps a trace holds.", RECORDING)]
TraceStacks = Annotated[bool, Option("With Python stacks in the trace (slow). Needs --record kineto.", RECORDING)]
MemoryStacksOf = Annotated[
    str | None,
    Option(
        "Whose stacks allocations keep: python (default), or all: C++ too, which takes minutes. Needs --record memory.",
        RECORDING,
        complete=completed(*MEMORY_STACKS),
    ),
]
MemorySteps = Annotated[
    int,
    Option(
        "How many steps are recorded: 3 or more show what grows from step to step. Needs --record memory.", RECORDING
    ),
]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What is kept of some more steps, after the timed ones."""

    record: Record = ()
    trace_steps: TraceSteps = 2
    trace_stacks: TraceStacks = False
    memory_stacks: MemoryStacksOf = None
    memory_steps: MemorySteps = 1
    trace: TraceRequest = field(init=False)
    memory: MemoryRequest | None = field(init=False)

    def __post_init__(self) -> None:
        named = tuple(dict.fromkeys(word for text in self.record for word in words(text, "--record")))
        for name in named:
            choose(name, RECORDED, "record")
        needs = (
            ("--trace-stacks", self.trace_stacks, ("kineto",), "stacks"),
            ("--memory-stacks", self.memory_stacks is not None, ("memory",), "stacks"),
            ("--memory-steps", is_given("--memory-steps"), ("memory",), "steps"),
            ("--trace-steps", is_given("--trace-steps"), TRACE_TOOLS, "steps"),
        )
        for flag, given, records, what in needs:
            if given and not set(records) & set(named):
                add = "add it" if len(records) == 1 else "add one of them"
                raise InputError(f"{flag} belongs to --record {' or '.join(records)}: {add}, or leave the {what} out")
        tools = cast("tuple[TraceTool, ...]", tuple(name for name in named if name in TRACE_TOOLS))
        stacks = cast("MemoryStacks", self.memory_stacks or "python")  # MemoryRequest refuses others
        memory = MemoryRequest(stacks=stacks, steps=self.memory_steps) if "memory" in named else None
        object.__setattr__(self, "trace", TraceRequest(tools=tools, steps=self.trace_steps, stacks=self.trace_stacks))
        object.__setattr__(self, "memory", memory)
