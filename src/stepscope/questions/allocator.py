"""What a setting of PyTorch's caching allocator gives: cells and answer."""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

from stepscope.core.answer import TEXT, Answer, Cell, Finding, note, table_of, warning
from stepscope.core.errors import InputError
from stepscope.core.figures import figure
from stepscope.core.options import Option
from stepscope.core.range_names import STEP
from stepscope.core.run import Run
from stepscope.core.units import format_bytes, format_share
from stepscope.engine.request import type_of_device
from stepscope.engine.sweep_plan import Cell as SweepCell
from stepscope.engine.sweep_plan import SweepPlan
from stepscope.engine.workload_options import OneWorkload, Timing
from stepscope.questions.comparison import child_environment, times_as_fast
from stepscope.questions.question import Cells, Question, Result
from stepscope.runs.answer import heading, status_word
from stepscope.runs.metrics import memory_of, peak_bytes


def answer_allocator(runs: Sequence[Run], setting: str) -> Answer:
    """What was reserved and in use at the peak, and the step's time. runs: without the setting, and with it."""
    table = table_of(
        ("setting", TEXT),
        ("reserved at the peak", "B"),
        ("allocated at the peak", "B"),
        ("unused", "B"),
        ("step (ms)", "ms of s"),
        title="What the allocator's setting gives",
        rows=[_row(name, run) for name, run in zip(("as it is", setting), runs, strict=True)],
    )
    return Answer(
        study="allocator",
        question=f"What would {setting} give?",
        lead=heading(runs[0]),
        tables=(table,),
        findings=tuple(_findings(runs[0], runs[1], setting)),
    )


def _row(name: str, run: Run) -> tuple[Cell, ...]:
    reserved, allocated = memory_of(run, "reserved_peak"), peak_bytes(run)
    if run.status != "done" or reserved is None or allocated is None:
        return (name, None, None, None, status_word(run))
    return (name, reserved, allocated, reserved - allocated, figure(run.samples[STEP].median_s, run))


def _findings(base: Run, other: Run, setting: str) -> Iterator[Finding]:
    before, after = memory_of(base, "reserved_peak"), memory_of(other, "reserved_peak")
    if base.status != "done" or other.status != "done" or before is None or after is None:
        lost = base if base.status != "done" else other
        yield warning("not-compared", f"Nothing can be said of {setting}: a run ended as {status_word(lost)}.")
        return
    change = (after - before) / before
    reserves = f"reserves {format_bytes(after)} at the peak, without it {format_bytes(before)}"
    ratio = other.samples[STEP].speedup_over(base.samples[STEP])
    time = "whether its time changes cannot be told"
    if ratio is not None and not ratio.undecided:
        time = f"it runs {times_as_fast(ratio, '.3f', '[]')}"
    sentence = f"With {setting} the step {reserves} ({change * 100:+.1f} %); {time}."
    evidence = {"before": before, "after": after, "speed_up": ratio.value if ratio else None}
    unused = before - (peak_bytes(base) or before)
    remedy = f"export PYTORCH_ALLOC_CONF={setting}" if after < before else ""
    yield note("allocator-setting", sentence, evidence, remedy)
    if after >= before:
        yield note(
            "no-gain",
            f"The setting gives nothing here: {format_bytes(unused)} of what is reserved at the peak, "
            f"{format_share(unused / before)}, is unused without it.",
            {"unused": unused},
        )


# What would a setting of PyTorch's caching allocator give? The same step without it and with it, each in a process of
# its own: the allocator reads its settings once, when a process first uses the GPU.


VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The environment variable of the settings, and its name before PyTorch 2.9, which later ones still read."""
EXPANDABLE = "expandable_segments:True"


def allocator_setting(setting: str) -> AbstractContextManager[None]:
    """A context in which processes start with this setting beside those of the environment."""
    there = next(filter(None, map(os.environ.get, VARIABLES)), "")
    return child_environment(dict.fromkeys(VARIABLES, ",".join(filter(None, [there, setting]))))


Setting = Annotated[
    str, Option("The setting of PyTorch's caching allocator that is added, as name:value.", metavar="NAME:VALUE")
]


def compare_allocators(
    *, workload: OneWorkload, setting: Setting = EXPANDABLE, device: str, timing: Timing, tag: str | None, runs: Path
) -> Cells:
    """Measure a step without a setting of the GPU's caching allocator and with it, each in a process of its own."""
    name, colon, value = setting.partition(":")
    if not (name.strip() and colon and value.strip()) or not setting.isprintable():
        raise InputError(f"cannot read --setting {setting[:40]!r}: write name:value, as in {EXPANDABLE}")
    settings = ",".join(os.environ.get(variable, "") for variable in VARIABLES).split(",")
    if name in [setting.partition(":")[0].strip() for setting in settings]:
        raise InputError(f"{name} is set in this environment already: unset {' and '.join(VARIABLES)} to compare")
    step = workload.any_workload(model="small", seq_len=512)
    if type_of_device(device) != "cuda":
        raise InputError("a CPU has no caching allocator whose settings could be compared: this study needs a GPU")
    cell = SweepCell(workload=step, settings=timing.settings)
    return Cells(
        plan=SweepPlan(cells=(cell,), devices=(device,), out=str(runs), tag=tag),
        answer=lambda measured: Result(answer=answer_allocator(measured, setting)),
        around=(nullcontext(), allocator_setting(setting)),
    )


QUESTION = Question(
    "allocator",
    compare_allocators,
    examples=(
        "--module train.py:make --dtype bf16",
        "--model large --seq-len 1024 --setting garbage_collection_threshold:0.8",
    ),
    shared=("shown",),
    defaults={"model": "small", "seq_len": "512"},
)
