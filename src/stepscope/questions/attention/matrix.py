"""The whole matrix implementation x dtype x shape through the gate, by several processes, within a time."""

import time
from collections.abc import Callable, Sequence

import msgspec

from stepscope.core.attention_verdict import AttentionShape, AttentionVerdict, GateReport
from stepscope.core.attentions import ATTENTIONS, Attention, TensorDtype
from stepscope.core.document import decode_document, json_document
from stepscope.core.errors import InputError, choose
from stepscope.questions.attention.workers import WorkerAnswer, WorkerTask, lost, work_through

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
    from stepscope.training.attention.cases import few_shapes, gate_shapes, long_shapes  # noqa: PLC0415

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
                verdicts=tuple(sorted(found, key=lambda verdict: places[verdict.dtype, verdict.shape])),
            )
            for name, found in verdicts.items()
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
