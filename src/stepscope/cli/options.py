"""Options that several verbs share, and what they make."""

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from stepscope.core.attentions import attention_names
from stepscope.core.errors import InputError
from stepscope.core.evidence import TraceTool
from stepscope.core.model_config import configure
from stepscope.core.run import Settings
from stepscope.core.workload import CHECKPOINTING_CHOICES, COMPILES, DTYPES, OPTIMIZERS, PHASES, Workload
from stepscope.studies.request import MemoryRequest, TraceRequest
from stepscope.studies.request import MemoryStacks as RecordedStacks

Out = Annotated[Path, typer.Option("--out", help="Where runs are kept.")]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else there.")]


def _tag(text: str | None) -> str | None:
    if text is not None and (not text.isprintable() or not 0 < len(text) <= 100):
        raise InputError(f"the tag is {text[:40]!a}: use 1 to 100 printable characters")
    return text


Tag = Annotated[str | None, typer.Option("--tag", callback=_tag, help="A word of your own to find the run by.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
Warmup = Annotated[
    int | None,
    typer.Option("--warmup", min=0, help="Exactly this many warm-up steps (default: until steady)."),
]
Steps = Annotated[
    int | None, typer.Option("--steps", min=1, help="Exactly this many measured steps (default: 10 to 100).")
]
Seconds = Annotated[float, typer.Option("--seconds", min=0, help="Measure for about this long.")]
NoProfile = Annotated[bool, typer.Option("--no-profile", help="Leave out the profiled step after the timed ones.")]
Trace = Annotated[
    list[str] | None,
    typer.Option("--trace", help="kineto or nsys: keep a trace of some more steps under it. May be given twice."),
]
TraceSteps = Annotated[int, typer.Option("--trace-steps", help="How many steps a trace holds.")]
TraceStacks = Annotated[bool, typer.Option("--trace-stacks", help="With Python stacks in the Kineto trace (slow).")]
Memory = Annotated[
    bool, typer.Option("--memory", help="Record every allocation of one more step, with its stack: stepscope memory.")
]
MemoryStacks = Annotated[
    str | None, typer.Option("--memory-stacks", help="python (default), or all: C++ too, which takes minutes.")
]
MemoryLimit = Annotated[
    str | None, typer.Option("--memory-limit", help="Let a GPU stand for a smaller one, as in 80GiB.")
]
PeakFlops = Annotated[
    str | None, typer.Option("--peak-flops", help="The device's peak for this dtype, as in 989T, if unknown.")
]
DModel = Annotated[int | None, typer.Option("--d-model", help="Override the preset.")]
DFf = Annotated[int | None, typer.Option("--d-ff", help="Override the preset.")]
Layers = Annotated[int | None, typer.Option("--layers", help="Override the preset.")]
Heads = Annotated[int | None, typer.Option("--heads", help="Override the preset.")]
Vocabulary = Annotated[int | None, typer.Option("--vocabulary", help="Override the preset.")]
KvHeads = Annotated[
    int | None, typer.Option("--kv-heads", help="Heads of keys and values, shared by those of queries.")
]
Seed = Annotated[int, typer.Option("--seed", help="Of parameters and data.")]

DTYPE_HELP = f"One of {', '.join(DTYPES)}."
PHASE_HELP = f"One of {', '.join(PHASES)}."
ATTENTION_HELP = f"One of {', '.join(attention_names())}."
COMPILE_HELP = f"One of {', '.join(COMPILES)}."
OPTIMIZER_HELP = f"One of {', '.join(OPTIMIZERS)}."
CHECKPOINTING_HELP = f"What backward runs again instead of keeping: {CHECKPOINTING_CHOICES}."


def settings_from(warmup: int | None, steps: int | None, seconds: float, no_profile: bool) -> Settings:
    """How to measure, from what the user fixed; a fixed number is a floor equal to its cap."""
    default = Settings()
    return Settings(
        warmup_floor=default.warmup_floor if warmup is None else warmup,
        warmup_cap=default.warmup_cap if warmup is None else warmup,
        steps_floor=default.steps_floor if steps is None else steps,
        steps_cap=default.steps_cap if steps is None else steps,
        seconds=seconds,
        profile=not no_profile,
    )


def trace_from(tools: list[str] | None, steps: int, stacks: bool) -> TraceRequest:
    """What to trace; a tool named twice is asked once."""
    if stacks and "kineto" not in (tools or ()):
        raise InputError("--trace-stacks belongs to --trace kineto: add it, or leave the stacks out")
    named = cast("tuple[TraceTool, ...]", tuple(dict.fromkeys(tools or ())))  # TraceRequest refuses others
    return TraceRequest(tools=named, steps=steps, stacks=stacks)


def memory_from(asked: bool, stacks: str | None) -> MemoryRequest | None:
    """Whether and how allocations are recorded."""
    if not asked:
        if stacks is not None:
            raise InputError("--memory-stacks belongs to --memory: add it, or leave the stacks out")
        return None
    return MemoryRequest(stacks=cast("RecordedStacks", stacks or "python"))  # MemoryRequest refuses others


def workload_from(preset: str, sizes: dict[str, int | None], choices: dict[str, Any]) -> Workload:
    """A preset, what of it is overridden, and the fields of the workload as typed; Workload refuses what is wrong."""
    return Workload(model=configure(preset, **sizes), **choices)
