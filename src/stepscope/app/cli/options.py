"""Options that several verbs share, and what is kept of some more steps.

A parameter of a verb that states no Option takes the line of its name here, or in `engine/workload_options.py`, which
has those of a workload.
"""

from functools import partial
from pathlib import Path
from typing import cast

import msgspec

from stepscope.core.errors import InputError, choose
from stepscope.core.evidence import TRACE_TOOLS, TraceTool
from stepscope.core.options import (
    BUDGET,
    DEVICES,
    MEASURING,
    NUMBERS,
    OUTPUT,
    QUESTION,
    RECORDING,
    STORED,
    Option,
    completed,
    is_given,
    positive_numbers,
    words,
)
from stepscope.core.units import parse_bytes, parse_flops_per_s
from stepscope.engine.request import MEMORY_STACKS, MemoryRequest, MemoryStacks, TraceRequest
from stepscope.rendering.renderers import STYLES

# What `--record` and the options beside it fill: what is kept of some more steps.


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


def _tag(text: str) -> str:
    if not text.isprintable() or not 0 < len(text) <= 100:
        raise InputError(f"the tag is {text[:40]!a}: use 1 to 100 printable characters")
    return text


_TRACED = "Needs --record kineto."

OPTIONS = (
    Option("auto, cpu, cuda or cuda:N.", MEASURING, "device", str, "auto", complete=DEVICES),
    Option("Exactly this many warm-up steps (default: until steady).", MEASURING, "warmup", int, least=0),
    Option("Exactly this many measured steps (default: 10 to 100).", MEASURING, "steps", int, least=1),
    Option("Measure for about this long.", MEASURING, "seconds", float, 5.0, least=0),
    Option("Measure in so many processes, each started afresh: five or more tell how far processes differ.", MEASURING,
           "repeat", int, 1, least=1, metavar="N"),
    Option("Leave out the profiled step after the timed ones.", MEASURING, "no_profile", bool, False),
    Option("The device's peak for this dtype, as in 989T, if unknown.", MEASURING, "peak_flops", parse_flops_per_s,
           metavar="RATE"),
    Option("What to keep of some more steps: every allocation with its stack (memory), a trace of torch.profiler "
           "(kineto) or of Nsight Systems (nsys). Several by commas.", RECORDING, "record", str, (),
           metavar="|".join(RECORDED), repeated=True, complete=completed(*RECORDED)),
    Option("How many steps a trace holds.", RECORDING, "trace_steps", int, 2),
    Option(f"With Python stacks in the trace (slow). {_TRACED}", RECORDING, "trace_stacks", bool, False),
    Option("Whose stacks allocations keep: python (default), or all: C++ too, which takes minutes. Needs --record "
           "memory.", RECORDING, "memory_stacks", str, complete=completed(*MEMORY_STACKS)),
    Option("How many steps are recorded: 3 or more show what grows from step to step. Needs --record memory.",
           RECORDING, "memory_steps", int, 1),
    Option("Write each capture's tables beside its run, as trace-TOOL.json.", RECORDING, "keep_digests", bool, False),
    Option("Processes that judge, or compile ahead (on a GPU).", MEASURING, "workers", int, least=0),
    Option("Standard deviations of the input, as in 0.1,10,300.", NUMBERS, "scales",
           partial(positive_numbers, option="--scales")),
    Option("Fields in which the workloads may differ, as in dtype,compile: else only the same is compared.", QUESTION,
           "across", str, metavar="FIELD"),
    Option("Keep runs with field=value[,value][,field=value].", STORED, "where", str, metavar="FIELD=VALUE",
           repeated=True),
    Option("Keep the figures in this file, as they come; --from shows it.", OUTPUT, "figures", Path, metavar="FILE"),
    Option("How much PyTorch may allocate, as in 80GiB, so that a GPU stands for a smaller one.", BUDGET, "memory",
           parse_bytes, metavar="SIZE"),
    Option("Where runs lie.", STORED, "runs", Path, Path("runs"), metavar="DIR"),
    Option("Show an answer that --json wrote; nothing is run.", STORED, "from", Path, metavar="FILE"),
    Option("A word of your own to find the run by.", STORED, "tag", _tag),
    Option("Show the tables whose title contains this; `findings` for the sentences alone.", OUTPUT, "only", str),
    Option("At most ten lines: what matters, with its figures and remedies; with --json, too.", OUTPUT, "brief", bool,
           False),
    Option(f"{', '.join(STYLES)}; csv and jsonl with bare figures.", OUTPUT, "style", str, "terminal",
           complete=completed(*STYLES)),
    Option("Draw a plot into this file: .svg, .png, .html or .json.", OUTPUT, "save", Path, metavar="FILE"),
    Option("JSON on stdout, and nothing else there.", OUTPUT, "json", bool, False),
)  # fmt: skip
"""An option of a verb's own stands in its signature."""
