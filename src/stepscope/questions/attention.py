"""The grid of `stepscope study attention`, sequence x head_dim x implementation x dtype: its defaults, and its way."""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec

from stepscope.core import attention_call, errors, interrupts
from stepscope.core.answer import Answer
from stepscope.core.files import json_document, read_named
from stepscope.core.options import CALLS, GIVEN, MEASURING, WORKLOAD, Option, completed, refuse_beside
from stepscope.core.parts import ATTENTIONS, Attention, TensorDtype, is_users
from stepscope.core.precisions import Dtype
from stepscope.core.run_directory import write_atomically
from stepscope.engine.request import Stage, Tell
from stepscope.questions import attention_gate
from stepscope.questions.attention_workers import WorkerTask, work_through
from stepscope.questions.question import Question, Result, read_answer

LAUNCHES: tuple[attention_call.Launches, ...] = ("hidden", "shown")
LONGEST = 1 << 24
WIDEST = 1 << 12
"""The largest head_dim that is accepted; a larger one is a typing error."""
_COMPILING = 0.5
"""The largest share of the time budget that compiling ahead may take."""
_COMPILING_S = 300.0
"""Seconds that compiling ahead may take where there is no time budget."""
_CEILING_S = 6.0
"""Seconds of the budget reserved per dtype to measure its ceiling: the best matrix product, to set rates beside."""
_CEILINGS = 0.25
"""The largest share of the budget reserved for ceilings. If they need more, they are measured only if time is left."""


class GridSizes(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured where the command line does not say it."""

    seq_lens: tuple[int, ...]
    head_dims: tuple[int, ...]
    implementations: tuple[Attention, ...]
    dtypes: tuple[TensorDtype, ...]
    batch_size: int
    heads: int
    causal: bool
    compiles: tuple[attention_call.CallCompile, ...] = ("none",)
    launches: attention_call.Launches = "hidden"
    seconds: float


ON_GPU = GridSizes(
    seq_lens=(256, 1024, 4096, 16384, 32768, 65536), head_dims=(64, 128),
    implementations=(
        "reference", "chunked", "sdpa-math", "sdpa-efficient", "sdpa-flash", "sdpa-cudnn", "flex", "flash",
    ),
    dtypes=("bf16",), batch_size=1, heads=16, causal=True, seconds=0.3,
)  # fmt: skip
ON_CPU = GridSizes(
    seq_lens=(64, 128, 256, 512), head_dims=(32,), implementations=("reference", "chunked", "sdpa", "flash-tiled"),
    dtypes=("fp32",), batch_size=1, heads=2, causal=True, seconds=0.05,
)  # fmt: skip
PRESETS = {
    "cs336-2025": GridSizes(
        seq_lens=(256, 1024, 4096, 8192, 16384), head_dims=(16, 32, 64, 128), implementations=("reference",),
        dtypes=("fp32",), batch_size=8, heads=1, causal=False, compiles=("none", "default"), launches="shown",
        seconds=0.5,
    ),
    "cs336-2026": GridSizes(
        seq_lens=tuple(2**power for power in range(7, 17)), head_dims=(16, 32, 64, 128),
        implementations=("reference", "flash"), dtypes=("bf16", "fp32"), batch_size=1, heads=1, causal=True,
        seconds=0.3,
    ),
}  # fmt: skip
"""cs336-2025: attention written out, batch 8, no heads, fp32, eager beside compiled, each pass on a device that waits.
cs336-2026: the grid of `flash_benchmarking` in the handout 26.1.1."""


def sizes_for(device_type: str, preset: str | None) -> GridSizes:
    """The defaults of a preset, of a `cpu`, or of anything else."""
    if preset is not None:
        return PRESETS[errors.choose(preset, tuple(PRESETS), "preset")]
    return ON_CPU if device_type == "cpu" else ON_GPU


def grid_groups(
    *,
    seq_lens: Sequence[int],
    head_dims: Sequence[int],
    implementations: Sequence[str],
    dtypes: Sequence[str],
    batch_size: int,
    heads: int,
    key_heads: int | None,
    causal: bool,
    compiles: Sequence[attention_call.CallCompile],
) -> list[list[attention_call.AttentionCell]]:
    """Cells of one shape and dtype together, short sequences first. Raises InputError for what no call can be."""
    key_heads = heads if key_heads is None else key_heads
    for option, value, most in (
        *(("--seq-len", length, LONGEST) for length in seq_lens),
        *(("--head-dim", width, WIDEST) for width in head_dims),
        ("--batch-size", batch_size, LONGEST),
        ("--heads", heads, LONGEST),
        ("--kv-heads", key_heads, LONGEST),
    ):
        if not 1 <= value <= most:
            empty = ", which is an empty tensor" if value == 0 else ""
            raise errors.InputError(f"{option} is {value}{empty}: it must be 1 to {most:,}")
    if heads % key_heads:
        raise errors.InputError(
            f"--kv-heads {key_heads} does not divide --heads {heads}: each serves as many query heads"
        )
    names, wanted = attention_gate.implementations_of(implementations), attention_gate.gate_dtypes_of(dtypes)
    return [
        [
            attention_call.AttentionCell(
                implementation=name,
                dtype=dtype,
                compile=mode,
                shape=attention_call.AttentionShape(
                    batch=batch_size, heads=heads, key_heads=key_heads, queries=length, keys=length,
                    head_dim=head_dim, causal=causal,
                ),
            )
            for name in names
            for mode in compiles
        ]
        for dtype in wanted
        for head_dim in dict.fromkeys(head_dims)
        for length in sorted(dict.fromkeys(seq_lens))
    ]  # fmt: skip


def check_runnable(groups: Sequence[Sequence[attention_call.AttentionCell]], device_type: str) -> None:
    """Raises InputError where none of the cells runs here, as the first of them says."""
    from stepscope.core.attention_support import find_fault, runnable
    from stepscope.training.attention import fault_of_device, implementation

    cells = [cell for group in groups for cell in group]
    for name in dict.fromkeys(cell.implementation for cell in cells if is_users(cell.implementation)):
        implementation(name)  # one that cannot be loaded is no row
    calls = {cell: cell.shape.call(device_type, cell.dtype) for cell in cells}
    faults = {cell: find_fault(cell.implementation, call, here=fault_of_device) for cell, call in calls.items()}
    if all(faults.values()):
        cell = cells[0]
        others = runnable(calls[cell], here=fault_of_device)
        raise errors.InputError(f"attention {cell.implementation} {faults[cell]}: choose one of {', '.join(others)}")


def measure_grid(
    groups: Sequence[Sequence[attention_call.AttentionCell]],
    *,
    device: str,
    seconds: float,
    steps: int | None,
    launches: attention_call.Launches,
    budget_s: float | None,
    workers: int,
    preset: str = "",
    ceilings: bool = True,
    functions: dict[Attention, Any] | None = None,
    every_shape: bool = False,
    memory_limit_bytes: int | None = None,
    tell: Tell = lambda _: None,
    on_rows: Callable[[attention_call.AttentionTimings], None] = lambda _: None,
) -> tuple[attention_call.AttentionTimings, bool]:
    """Timings of every group, measured in one process, and whether Ctrl-C ended it; on_rows gets them after each group.

    functions: measured in place of the implementations of these names. workers: processes that compile ahead, 0 none.
    every_shape: whether the gate judges each timed shape, and not only the smallest of a head_dim and dtype.
    """
    from stepscope.questions.attention_answer import flops_per_s
    from stepscope.questions.attention_calls import AttentionCalls, judged_shape, odd_shapes
    from stepscope.recording.ceilings import ceilings_for
    from stepscope.recording.device import limit_memory
    from stepscope.recording.environment import read_environment, resolve_device
    from stepscope.recording.timer import StepFailed

    began_s = time.monotonic()
    on = resolve_device(device)
    limit_memory(on, memory_limit_bytes)
    timings = attention_call.AttentionTimings(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=read_environment(on, memory_limit_bytes),
        seconds=seconds,
        launches=launches if on.type == "cuda" else "shown",
        preset=preset,
    )
    deadline_s = began_s + (float("inf") if budget_s is None else budget_s)
    smallest: dict[tuple[int, str], attention_call.AttentionShape] = {}
    for group in groups:
        smallest.setdefault((group[0].shape.head_dim, group[0].dtype), group[0].shape)

    def gate_shapes(cell: attention_call.AttentionCell) -> tuple[attention_call.AttentionShape, ...]:
        if every_shape:
            return (*odd_shapes(cell), *judged_shape(cell.shape, on))
        judged = judged_shape(smallest[cell.shape.head_dim, cell.dtype], on)
        # Every shape is compiled anew, so compiled cells are not judged on the odd shapes too.
        compiled = cell.compile != "none" or ATTENTIONS[cell.implementation].compiler == "inductor"
        return judged if compiled and judged else (*odd_shapes(cell), *judged)

    kept_s = _CEILING_S * len({group[0].dtype for group in groups}) if ceilings else 0.0
    kept_s = kept_s if budget_s is not None and kept_s <= _CEILINGS * budget_s else 0.0
    calls = AttentionCalls(
        on, seconds=seconds, steps=steps, launches=launches, deadline_s=deadline_s - kept_s, functions=functions
    )
    try:
        if workers > 0 and on.type == "cuda":
            tell(Stage(name="compile", detail=f"ahead, {workers} processes"))
            latest_s = _COMPILING_S if budget_s is None else _COMPILING * budget_s
            _compile_ahead(groups, gate_shapes, str(on), workers, began_s + latest_s)
        for i, group in enumerate(groups):
            tell(Stage(name="measure", detail=f"{group[0].shape}, {group[0].dtype}", fraction=i / len(groups)))
            rows = calls.measure_group(group, gate_shapes)
            timings = msgspec.structs.replace(timings, timings=(*timings.timings, *rows))
            on_rows(timings)
    except KeyboardInterrupt:
        return timings, True
    dtypes = list(dict.fromkeys(row.cell.dtype for row in timings.timings if row.both))
    ended = calls.interrupted or bool(calls.broken)
    # The last group may have used part of the reserved time, since it began before.
    needed_s = kept_s / 2 or _CEILING_S * len(dtypes)
    if ceilings and dtypes and not ended and deadline_s - time.monotonic() > needed_s:
        try:
            reached: dict[Dtype, float] = {attention_call.PRODUCTS[dtype]: 0.0 for dtype in dtypes}
            for row in timings.timings:
                if row.both:
                    product = attention_call.PRODUCTS[row.cell.dtype]
                    reached[product] = max(reached[product], flops_per_s(row) or 0.0)
            rates = ceilings_for(
                on, list(reached), lambda what: tell(Stage(name="ceiling", detail=what)), reached=reached
            )
        except KeyboardInterrupt:
            return timings, True
        except (StepFailed, RuntimeError) as error:  # the rows are whole all the same
            tell(Stage(name="ceiling", detail=f"not measured: {errors.one_line(error)}"))
            return timings, False
        timings = msgspec.structs.replace(timings, ceilings={d: c.rate for d, c in rates.matmul.items()})
        on_rows(timings)
    return timings, calls.interrupted


def _compile_ahead(
    groups: Sequence[Sequence[attention_call.AttentionCell]],
    gate_shapes: Callable[[attention_call.AttentionCell], tuple[attention_call.AttentionShape, ...]],
    device: str,
    workers: int,
    deadline_s: float,
) -> None:
    """Kernels into the caches on disk, several at once. One that cannot be compiled says so when it is measured."""
    tasks = [
        WorkerTask(
            kind="compile",
            names=(cell.implementation,),
            dtype=cell.dtype,
            device=device,
            compile=cell.compile,
            shape=msgspec.structs.replace(shape, numbers="normal"),
        )
        for group in groups
        for cell in group
        if cell.compile != "none" or ATTENTIONS[cell.implementation].compiler is not None
        for shape in (cell.shape, *gate_shapes(cell))
    ]
    work_through(
        list(dict.fromkeys(tasks)), workers=workers, deadline_s=deadline_s, on_answer=lambda _task, _answer: None
    )


Compile = Annotated[tuple[str, ...] | None, Option("", WORKLOAD, choices=("none", "default"))]
BatchSize = Annotated[int | None, Option("Sequences.", WORKLOAD)]
Heads = Annotated[int | None, Option("Heads of the queries.", CALLS)]
KvHeads = Annotated[int | None, Option("Heads of keys and values, where they have fewer: a divisor of --heads.", CALLS)]
HeadDim = Annotated[tuple[int, ...] | None, Option("Numbers in a head.", CALLS)]
Causal = Annotated[
    bool | None,
    Option("Whether a query sees only keys up to its own position, or all.", CALLS, spelled="--causal/--full"),
]
Launching = Annotated[
    str | None,
    Option("hidden (the device's own time) or shown (as on an idle device).", CALLS, complete=completed(*LAUNCHES)),
]
Preset = Annotated[
    str | None,
    Option(
        "cs336-2025: the assignment's grid, batch 8, no heads, fp32, naive. cs336-2026: flash beside it, 128 to 65536 "
        "tokens, bf16 and fp32.",
        CALLS,
        complete=completed(*PRESETS),
    ),
]
Steps = Annotated[int | None, Option("Exactly this many passes of each cell.", MEASURING, least=1)]
Seconds = Annotated[float | None, Option("Seconds for each cell.", MEASURING, least=0)]
Budget = Annotated[float | None, Option("Seconds for the whole grid; the rest is not reached.", MEASURING, least=0)]


def time_attentions(
    tell: Tell,
    *,
    seq_len: tuple[int, ...] | None,
    batch_size: BatchSize,
    dtype: attention_gate.Dtypes,
    attention: attention_gate.Attentions,
    compile: Compile,
    head_dim: HeadDim,
    heads: Heads,
    kv_heads: KvHeads,
    causal: Causal,
    launches: Launching,
    preset: Preset,
    device: str,
    steps: Steps,
    seconds: Seconds,
    budget: Budget,
    memory: int | None,
    workers: int | None,
    keep_digests: bool,
    from_: Annotated[tuple[Path, ...], attention_gate.FIGURES] = (),
    figures: Path | None,
) -> Answer | Result:
    """Attention by each implementation: right or wrong, time, memory and TFLOP/s by sequence length and head_dim."""
    if from_:
        refuse_beside("--from", "--keep-digests")
        return _stored(from_, keep_digests)
    if keep_digests:
        raise errors.InputError("--keep-digests says nothing without --from and a folder of runs: leave it out")
    from stepscope.questions.attention_answer import answer_attention
    from stepscope.recording.environment import resolve_device

    on = resolve_device(device)
    usual = sizes_for(on.type, preset)
    groups = grid_groups(
        seq_lens=seq_len or usual.seq_lens,
        head_dims=head_dim or usual.head_dims,
        implementations=attention or usual.implementations,
        dtypes=dtype or usual.dtypes,
        batch_size=usual.batch_size if batch_size is None else batch_size,
        heads=usual.heads if heads is None else heads,
        key_heads=kv_heads,
        causal=usual.causal if causal is None else causal,
        compiles=[
            errors.choose(name, attention_call.CALL_COMPILES, "compile")
            for name in dict.fromkeys(compile or usual.compiles)
        ],
    )
    check_runnable(groups, on.type)
    hidden = usual.launches if launches is None else errors.choose(launches, LAUNCHES, "launches")
    attention_gate.check_place(figures)

    def keep(timings: attention_call.AttentionTimings) -> None:
        if figures is not None:
            write_atomically(json_document(timings).encode(), figures)

    with interrupts.keeping():
        timings, interrupted = measure_grid(
            groups,
            device=device,
            seconds=usual.seconds if seconds is None else seconds,
            steps=steps,
            launches=hidden,
            budget_s=budget,
            workers=attention_gate.usual_workers(on.type) if workers is None else workers,
            preset=preset or "",
            memory_limit_bytes=memory,
            tell=tell,
            on_rows=keep,
        )
    rows = timings.timings
    if not rows:
        raise KeyboardInterrupt  # before the first row
    answer = answer_attention(timings)
    outcomes = {row.outcome for row in rows}
    if budget is not None and outcomes == {"not reached"}:
        fault = f"none of the {len(rows)} cells was reached in --budget {budget:g}: give it more seconds"
        return Result(answer=answer, fault=fault)
    exit_code = errors.EXIT_CHECK_FAILED if "wrong" in outcomes else errors.EXIT_DONE
    if "failed" in outcomes:
        exit_code = errors.EXIT_DEVICE_FAILED
    return Result(
        answer=answer,
        hint=f"the figures are in {figures}: --from shows them again" if figures is not None else "",
        exit_code=errors.EXIT_INTERRUPTED if interrupted else exit_code,
    )


def _stored(places: tuple[Path, ...], keep_digests: bool) -> Answer | Result:
    """Whatever a study of attention wrote: timings, an answer; runs or the gate's matrix, which have a verb too."""
    if any(place.is_dir() for place in places):
        from stepscope.questions.attention_step import answer_stored

        for place in places:
            if not place.is_dir():
                raise errors.InputError(f"no runs at {place}: it is no folder")
        return answer_stored(places, keep_digests)
    if keep_digests:
        raise errors.InputError("--keep-digests says nothing with a file: leave it out")
    place, *others = places
    if others:
        raise errors.InputError("--from shows one file at a time: give one, or folders of runs")
    data = read_named(place)
    match kind_of(data):
        case "attention-timings":
            from stepscope.questions.attention_answer import answer_attention

            return answer_attention(attention_call.decode_timings(data, str(place)))
        case "attention-gate":
            if useless := [flag for flag in ("--save", "--only") if flag in GIVEN.get()]:
                raise errors.InputError(f"{', '.join(useless)} says nothing with the gate's matrix: leave it out")
            return attention_gate.result_of(attention_gate.decode_matrix(data, str(place)))
        case _:
            return read_answer(place, "attention")


def kind_of(data: bytes) -> str:
    """What a file says of itself; empty where it says nothing, or is no JSON."""

    class Kind(msgspec.Struct):
        kind: str = ""

    try:
        return msgspec.json.decode(data, type=Kind).kind
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def _titles() -> Sequence[str]:
    from stepscope.questions.attention_answer import TITLES

    return TITLES


QUESTION = Question(
    "attention",
    time_attentions,
    examples=(
        "--seq-len 1024,4096 --attention reference,sdpa,flash --figures calls.json",
        "--from calls.json --only 'Peak memory' --save calls.svg",
    ),
    shared=("save", "shown"),
    titles=_titles,
)
