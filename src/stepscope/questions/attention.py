"""The grid of `stepscope study attention`, sequence x head_dim x implementation x dtype: its defaults, and its way."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from stepscope.core.attention_call import (
    CALL_COMPILES,
    PRODUCTS,
    AttentionCell,
    AttentionShape,
    AttentionTimings,
    AttentionVerdict,
    CallCompile,
    GateReport,
    Launches,
)
from stepscope.core.errors import InputError, choose, one_line
from stepscope.core.files import decode_document, json_document
from stepscope.core.parts import ATTENTIONS, Attention, TensorDtype
from stepscope.engine.request import Stage, Tell
from stepscope.questions.attention_workers import WorkerAnswer, WorkerTask, lost, work_through

# The whole matrix implementation x dtype x shape through the gate, by several processes, within a time.


GATE_DTYPES: tuple[TensorDtype, ...] = ("fp32", "bf16", "fp16")

# 1  2026-11  first
# 2  2026-11  calls with a scale, numbers, layouts and gradients of their own; what is allowed to whom
GATE_VERSION = 2


class GateMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """What the gate said, and how much it did not get to."""

    kind: str = "attention-gate"
    version: int = GATE_VERSION
    device: str
    device_name: str = ""
    versions: dict[str, str] = {}
    seed: int = 0
    reports: tuple[GateReport, ...] = ()
    calls: int
    """Implementations x dtypes x shapes."""
    interrupted: bool = False

    @property
    def reached(self) -> int:
        return sum(len(report.verdicts) for report in self.reports)


def encode_matrix(matrix: GateMatrix) -> bytes:
    """JSON, one document."""
    return json_document(matrix).encode()


def decode_matrix(data: bytes, source: str) -> GateMatrix:
    """What `encode_matrix` wrote. Raises InputError that names the source."""
    return decode_document(
        data, GateMatrix, source, holds="verdicts of the gate", newest=GATE_VERSION, again="with --figures"
    )


def implementations_of(names: Sequence[str]) -> tuple[Attention, ...]:
    """Checked names, each once. Raises InputError for one that there is not."""
    return tuple(dict.fromkeys(choose(name, list(ATTENTIONS), "attention") for name in names))


def gate_dtypes_of(names: Sequence[str]) -> tuple[TensorDtype, ...]:
    """Checked dtypes, each once. Raises InputError for one that the gate cannot judge."""
    known: dict[str, TensorDtype] = {name: name for name in GATE_DTYPES}
    for name in names:
        if name == "fp64":
            raise InputError("the gate judges by float64, and cannot judge fp64: choose among fp32, bf16, fp16")
    return tuple(dict.fromkeys(known[choose(name, GATE_DTYPES, "dtype")] for name in names))


def shapes_of(every: bool, device_type: str) -> tuple[AttentionShape, ...]:
    """The gate's shapes: every length with every head_dim, or each of them once; on a GPU long ones too."""
    from stepscope.training.attention.gate import few_shapes, gate_shapes, long_shapes

    shapes = gate_shapes() if every else few_shapes()
    return shapes if device_type == "cpu" else (*shapes, *long_shapes())


def judge_matrix(
    names: Sequence[Attention],
    *,
    dtypes: Sequence[TensorDtype],
    shapes: Sequence[AttentionShape],
    device: str,
    workers: int,
    seconds: float,
    device_name: str = "",
    versions: dict[str, str] | None = None,
    on_answer: Callable[[GateMatrix], None] = lambda _: None,
) -> GateMatrix:
    """Every implementation in every dtype on every shape; what is not reached within the time is counted.

    on_answer gets what there is, as it grows. Ctrl-C ends it with what there is.
    """
    tasks = [
        WorkerTask(kind="judge", names=together, dtype=dtype, shape=shape, device=device, repeat=True)
        for together in _together(names)
        for shape in shapes
        for dtype in dtypes
    ]
    verdicts: dict[Attention, list[AttentionVerdict]] = {name: [] for name in names}
    calls = len(names) * len(dtypes) * len(shapes)
    matrix = GateMatrix(
        device=device,
        device_name=device_name,
        versions=versions or {},
        calls=calls,
    )

    def told(task: WorkerTask, answer: WorkerAnswer) -> None:
        nonlocal matrix
        for report in answer.reports or lost(task, answer.error):
            verdicts[report.implementation].extend(report.verdicts)
        places = {(dtype, shape): i for i, (dtype, shape) in enumerate((d, s) for d in dtypes for s in shapes)}
        reports = tuple(
            GateReport(
                implementation=name,
                device=device,
                seed=matrix.seed,
                verdicts=tuple(sorted(kept, key=lambda verdict: places[verdict.dtype, verdict.shape])),
            )
            for name, kept in verdicts.items()
        )
        matrix = msgspec.structs.replace(matrix, reports=reports)
        on_answer(matrix)

    try:
        work_through(tasks, workers=workers, deadline_s=time.monotonic() + seconds, told=told)
    except KeyboardInterrupt:
        return msgspec.structs.replace(matrix, interrupted=True)
    return matrix


def _together(names: Sequence[Attention]) -> list[tuple[Attention, ...]]:
    """Groups to judge together: each compiled implementation alone, first, as they take longest; then all others."""
    rest = tuple(name for name in names if ATTENTIONS[name].compiler is None)
    alone = [(name,) for name in names if ATTENTIONS[name].compiler is not None]
    return [*alone, rest] if rest else alone


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
    compiles: tuple[CallCompile, ...] = ("none",)
    launches: Launches = "hidden"
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
    "seeds": GridSizes(
        seq_lens=(256, 1024, 4096, 8192, 16384), head_dims=(16, 32, 64, 128), implementations=("reference",),
        dtypes=("fp32",), batch_size=8, heads=1, causal=False, compiles=("none", "default"), launches="shown",
        seconds=0.5,
    ),
}  # fmt: skip
"""seeds: attention written out, batch 8, no heads, fp32, eager beside compiled, each pass on a device that waits."""


def sizes_for(device_type: str, preset: str | None) -> GridSizes:
    """The defaults of a preset, of a `cpu`, or of anything else."""
    if preset is not None:
        return PRESETS[choose(preset, tuple(PRESETS), "preset")]
    return ON_CPU if device_type == "cpu" else ON_GPU


def compiles_of(names: Sequence[str]) -> tuple[CallCompile, ...]:
    """Checked names of `--compile`."""
    known: dict[str, CallCompile] = {name: name for name in CALL_COMPILES}
    return tuple(dict.fromkeys(known[choose(name, CALL_COMPILES, "compile")] for name in names))


def launches_of(name: str) -> Launches:
    """A checked name of `--launches`."""
    known: dict[str, Launches] = {"hidden": "hidden", "shown": "shown"}
    return known[choose(name, list(known), "launches")]


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
    compiles: Sequence[CallCompile],
) -> list[list[AttentionCell]]:
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
            raise InputError(f"{option} is {value}{empty}: it must be 1 to {most:,}")
    if heads % key_heads:
        raise InputError(f"--kv-heads {key_heads} does not divide --heads {heads}: each serves as many query heads")
    names, wanted = implementations_of(implementations), gate_dtypes_of(dtypes)
    return [
        [
            AttentionCell(
                implementation=name,
                dtype=dtype,
                compile=mode,
                shape=AttentionShape(
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


def check_runnable(groups: Sequence[Sequence[AttentionCell]], device_type: str) -> None:
    """Raises InputError where none of the cells runs here, as the first of them says."""
    from stepscope.core.attention_support import find_fault, runnable
    from stepscope.training.attention import fault_of_device

    cells = [cell for group in groups for cell in group]
    calls = {cell: cell.shape.call(device_type, cell.dtype) for cell in cells}
    faults = {cell: find_fault(cell.implementation, call, here=fault_of_device) for cell, call in calls.items()}
    if all(faults.values()):
        cell = cells[0]
        others = runnable(calls[cell], here=fault_of_device)
        raise InputError(f"attention {cell.implementation} {faults[cell]}: choose one of {', '.join(others)}")


def measure_grid(
    groups: Sequence[Sequence[AttentionCell]],
    *,
    device: str,
    seconds: float,
    steps: int | None,
    launches: Launches,
    budget_s: float | None,
    workers: int,
    preset: str = "",
    ceilings: bool = True,
    functions: dict[Attention, Any] | None = None,
    tell: Tell = lambda _: None,
    on_rows: Callable[[AttentionTimings], None] = lambda _: None,
) -> tuple[AttentionTimings, bool]:
    """Timings of every group, measured in one process, and whether Ctrl-C ended it; on_rows gets them after each group.

    functions: measured in place of the implementations of these names. workers: processes that compile ahead, 0 none.
    """
    from stepscope.questions.attention_calls import (
        AttentionCalls,
        judged_shape,
        odd_shapes,
        start_timings,
        with_timing,
    )
    from stepscope.recording.ceilings import ceilings_for
    from stepscope.recording.device import resolve_device
    from stepscope.recording.timer import StepFailed

    began_s = time.monotonic()
    on = resolve_device(device)
    timings = start_timings(on, seconds=seconds, launches=launches, preset=preset)
    deadline_s = began_s + (float("inf") if budget_s is None else budget_s)
    smallest: dict[tuple[int, str], AttentionShape] = {}
    for group in groups:
        smallest.setdefault((group[0].shape.head_dim, group[0].dtype), group[0].shape)

    def gate_shapes(cell: AttentionCell) -> tuple[AttentionShape, ...]:
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
            timings = with_timing(timings, calls.measure_group(group, gate_shapes))
            on_rows(timings)
    except KeyboardInterrupt:
        return timings, True
    dtypes = list(dict.fromkeys(row.cell.dtype for row in timings.timings if row.both))
    ended = calls.interrupted or bool(calls.broken)
    # The last group may have used part of the reserved time, since it began before.
    needed_s = kept_s / 2 or _CEILING_S * len(dtypes)
    if ceilings and dtypes and not ended and deadline_s - time.monotonic() > needed_s:
        try:
            rates = ceilings_for(
                on, [PRODUCTS[dtype] for dtype in dtypes], lambda what: tell(Stage(name="ceiling", detail=what))
            )
        except KeyboardInterrupt:
            return timings, True
        except (StepFailed, RuntimeError) as error:  # the rows are whole all the same
            tell(Stage(name="ceiling", detail=f"not measured: {one_line(error)}"))
            return timings, False
        timings = msgspec.structs.replace(timings, ceilings={d: c.rate for d, c in rates.matmul.items()})
        on_rows(timings)
    return timings, calls.interrupted


def _compile_ahead(
    groups: Sequence[Sequence[AttentionCell]],
    gate_shapes: Callable[[AttentionCell], tuple[AttentionShape, ...]],
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

    def told(_task: WorkerTask, _answer: WorkerAnswer) -> None:
        pass

    work_through(list(dict.fromkeys(tasks)), workers=workers, deadline_s=deadline_s, told=told)
