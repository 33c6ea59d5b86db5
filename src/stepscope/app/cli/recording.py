"""What `--record` and the options beside it fill: what is kept of some more steps."""

from typing import cast

import msgspec

from stepscope.app.cli.given_options import is_given
from stepscope.app.cli.given_words import words
from stepscope.core.errors import InputError, choose
from stepscope.core.evidence import TRACE_TOOLS, TraceTool
from stepscope.engine.request import MemoryRequest, MemoryStacks, TraceRequest

RECORDED = ("memory", *TRACE_TOOLS)


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of some more steps, after the timed ones."""

    trace: TraceRequest = TraceRequest()
    memory: MemoryRequest | None = None


def recording_from(
    record: tuple[str, ...],
    trace_steps: int,
    trace_stacks: bool = False,
    memory_stacks: str | None = None,
    memory_steps: int = 1,
) -> Recording:
    """What to keep; what is named twice is kept once."""
    named = dict.fromkeys(word for text in record for word in words(text, "--record"))
    for name in named:
        choose(name, RECORDED, "record")
    if trace_stacks and "kineto" not in named:
        raise InputError("--trace-stacks belongs to --record kineto: add it, or leave the stacks out")
    if memory_stacks is not None and "memory" not in named:
        raise InputError("--memory-stacks belongs to --record memory: add it, or leave the stacks out")
    if is_given("--memory-steps") and "memory" not in named:
        raise InputError("--memory-steps belongs to --record memory: add it, or leave the steps out")
    if is_given("--trace-steps") and not named.keys() & set(TRACE_TOOLS):
        raise InputError("--trace-steps belongs to --record kineto or nsys: add one of them, or leave the steps out")
    tools = cast("tuple[TraceTool, ...]", tuple(name for name in named if name in TRACE_TOOLS))
    stacks = cast("MemoryStacks", memory_stacks or "python")  # MemoryRequest refuses others
    return Recording(
        trace=TraceRequest(tools=tools, steps=trace_steps, stacks=trace_stacks),
        memory=MemoryRequest(stacks=stacks, steps=memory_steps) if "memory" in named else None,
    )
