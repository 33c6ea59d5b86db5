"""Is each implementation of attention right? Every dtype and shape, judged by float64, nothing timed."""

import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from stepscope.core import interrupts
from stepscope.core.answer import TEXT, Answer, Cell, Line, Table, as_lines, table_of
from stepscope.core.attention_call import AttentionShape, AttentionVerdict, GateReport
from stepscope.core.errors import EXIT_CHECK_FAILED, EXIT_DONE, EXIT_INTERRUPTED, InputError, choose
from stepscope.core.files import decode_document, json_document, read_named
from stepscope.core.options import CALLS, MEASURING, STORED, WORKLOAD, Option, refuse_beside
from stepscope.core.parts import ATTENTIONS, Attention, TensorDtype, choose_name, is_users
from stepscope.core.run_directory import write_atomically
from stepscope.questions.attention_workers import WorkerAnswer, WorkerTask, lost, work_through
from stepscope.questions.question import Question, Result

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
    """Implementations x dtypes x shapes, and one of gradcheck for each function of a user's."""
    interrupted: bool = False

    @property
    def reached(self) -> int:
        return sum(len(report.verdicts) for report in self.reports)


def decode_matrix(data: bytes, source: str) -> GateMatrix:
    """A matrix of its document. Raises InputError that names the source."""
    return decode_document(
        data, GateMatrix, source, holds="verdicts of the gate", newest=GATE_VERSION, again="with --figures"
    )


def implementations_of(names: Sequence[str]) -> tuple[Attention, ...]:
    """Checked names, each once. Raises InputError for one that there is not."""
    return tuple(dict.fromkeys(choose_name(name, ATTENTIONS, "attention") for name in names))


def gate_dtypes_of(names: Sequence[str]) -> tuple[TensorDtype, ...]:
    """Checked dtypes, each once. Raises InputError for one that the gate cannot judge."""
    if "fp64" in names:
        raise InputError("the gate judges by float64, and cannot judge fp64: choose among fp32, bf16, fp16")
    return tuple(dict.fromkeys(choose(name, GATE_DTYPES, "dtype") for name in names))


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
    """Every implementation in every dtype on every shape, and PyTorch's own check of the gradients of a user's; what is
    not reached within the time is counted.

    on_answer gets what there is, as it grows. Ctrl-C ends it with what there is.
    """
    # Each compiled implementation alone, first, as they take longest; then all others together.
    rest = tuple(name for name in names if ATTENTIONS[name].compiler is None)
    groups = [*((name,) for name in names if name not in rest), *([rest] if rest else [])]
    tasks = [
        WorkerTask(kind="judge", names=together, dtype=dtype, shape=shape, device=device, repeat=True)
        for together in groups
        for shape in shapes
        for dtype in dtypes
    ]
    users = tuple(name for name in names if is_users(name))
    tasks += [WorkerTask(kind="gradcheck", names=users, dtype="fp64", shape=shapes[0], device=device)] if users else []
    verdicts: dict[Attention, list[AttentionVerdict]] = {name: [] for name in names}
    calls = len(names) * len(dtypes) * len(shapes) + len(users)
    matrix = GateMatrix(device=device, device_name=device_name, versions=versions or {}, calls=calls)
    places = {(dtype, shape): i for i, (dtype, shape) in enumerate(itertools.product(dtypes, shapes))}

    def take_answer(task: WorkerTask, answer: WorkerAnswer) -> None:
        nonlocal matrix
        for report in answer.reports or lost(task, answer.error):
            verdicts[report.implementation].extend(report.verdicts)
        reports = tuple(
            GateReport(
                implementation=name,
                device=device,
                seed=matrix.seed,
                verdicts=tuple(sorted(kept, key=lambda verdict: places.get((verdict.dtype, verdict.shape), calls))),
            )
            for name, kept in verdicts.items()
        )
        matrix = msgspec.structs.replace(matrix, reports=reports)
        on_answer(matrix)

    try:
        work_through(tasks, workers=workers, deadline_s=time.monotonic() + seconds, on_answer=take_answer)
    except KeyboardInterrupt:
        return msgspec.structs.replace(matrix, interrupted=True)
    return matrix


# The gate's verdicts as an answer: how close each implementation comes, what is wrong where, what was allowed.


_TENSORS = ("out", "dq", "dk", "dv")
_FAILURES = 12
"""Shown of one implementation."""


def answer_gate(reports: Sequence[GateReport], *lead: str, origin: str = "") -> Answer:
    """A line for each implementation and dtype, then every failure, who was allowed more than others and why, and what
    was not asked of whom and why.
    """
    places = dict.fromkeys(f"{report.device}, seed {report.seed}" for report in reports)
    where = f" ({', '.join(places)})" if places else ""
    notes: list[str] = []
    for report in reports:
        shown = report.failures[:_FAILURES]
        notes += [f"{report.implementation} fails {each.sentence}" for each in shown]
        if len(report.failures) > len(shown):
            notes.append(f"{report.implementation} fails {len(report.failures) - len(shown)} more.")
    notes += _allowances(reports)
    # What is allowed where that is not twice sdpa's error.
    yardsticks = dict.fromkeys(line for report in reports for each in report.verdicts for line in each.yardsticks)
    notes += [f"Allowed {yardstick}." for yardstick in yardsticks]
    asides: list[str] = []
    for report in reports:
        reasons = Counter(each.reason for each in report.verdicts if each.outcome != "failed" and each.reason)
        asides += [
            f"{report.implementation} {reason}: {count} of {len(report.verdicts)} calls"
            for reason, count in reasons.items()
        ]
    headline = f"Attention beside float64{where}: the worst error, as a share of what is allowed"
    return Answer(
        study="attention-gate",
        question="Is each implementation of attention right?",
        lead=as_lines(*lead, Line(headline, "strong")),
        tables=(_table(reports, notes),),
        asides=tuple(asides),
        origin=(origin,) if origin else (),
    )


def _table(reports: Sequence[GateReport], notes: Sequence[str]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    outcomes = ("passed", "failed", "not supported")
    for report in reports:
        for dtype in dict.fromkeys(verdict.dtype for verdict in report.verdicts):
            verdicts = [verdict for verdict in report.verdicts if verdict.dtype == dtype]
            counts = Counter(verdict.outcome for verdict in verdicts)
            word = "WRONG" if counts["failed"] else "right" if counts["passed"] else "not run"
            same = [verdict.repeats for verdict in verdicts if verdict.repeats is not None]
            again = f"no, in {same.count(False)} of {len(same)}" if False in same else "yes" if same else ""
            rows.append((
                report.implementation, dtype, word, again, *(counts[outcome] for outcome in outcomes),
                *(_worst(verdicts, tensor) for tensor in _TENSORS),
            ))  # fmt: skip
    figures = (*outcomes, *_TENSORS)
    return table_of(
        "implementation", "dtype", "verdict", "same bits again", *((name, TEXT) for name in figures),
        rows=rows, notes=as_lines(*notes),
    )  # fmt: skip


def _worst(verdicts: Sequence[AttentionVerdict], tensor: str) -> str:
    """The largest error of this tensor, as a share of what is allowed, over whole tensors and worst rows."""
    shares = [error.share for verdict in verdicts for error in verdict.errors if error.tensor == tensor]
    if any(map(math.isinf, shares)):
        return "not finite"
    return f"{max(shares):.2f}" if shares else ""


def _allowances(reports: Sequence[GateReport]) -> list[str]:
    """Which implementations may be further off than others, in which dtypes, and why."""
    by_allowance: dict[str, dict[str, list[str]]] = {}
    for report in reports:
        for verdict in report.verdicts:
            if verdict.allowance:
                dtypes = by_allowance.setdefault(verdict.allowance, {}).setdefault(report.implementation, [])
                if verdict.dtype not in dtypes:
                    dtypes.append(verdict.dtype)
    lines: list[str] = []
    for allowance, of_whom in by_allowance.items():
        for dtypes in dict.fromkeys(tuple(each) for each in of_whom.values()):
            names = ", ".join(name for name, each in of_whom.items() if tuple(each) == dtypes)
            lines.append(f"{names} may be off {allowance} ({', '.join(dtypes)}).")
    return lines


Attentions = Annotated[
    tuple[str, ...] | None, Option("Also path/file.py:function.", WORKLOAD, choices=tuple(ATTENTIONS))
]
Dtypes = Annotated[tuple[str, ...] | None, Option("", WORKLOAD, choices=("fp32", "bf16", "fp16"))]
FIGURES = Option("A file that --figures or --json wrote: nothing is measured.", STORED, metavar="FILE")
EveryShape = Annotated[bool, Option("Every length with every head_dim: 58 shapes, not 16; on a GPU 64, not 22.", CALLS)]
Seconds = Annotated[float | None, Option("Seconds for the whole matrix; the rest is not reached.", MEASURING, least=0)]


def judge_attentions(
    *,
    attention: Attentions,
    dtype: Dtypes,
    every_shape: EveryShape = False,
    device: str,
    seconds: Seconds,
    workers: int | None,
    from_: Annotated[Path | None, FIGURES],
    figures: Path | None,
) -> Result:
    """Whether each implementation of attention is right: every dtype and shape, judged by float64.

    Exit code 0 where all that was judged is right, 1 where one is wrong, 2 where nothing was judged.
    """
    if from_ is not None:
        refuse_beside("--from")
        return result_of(decode_matrix(read_named(from_), str(from_)))
    from stepscope.recording.environment import read_environment, resolve_device
    from stepscope.training.attention import implementation

    names = implementations_of(attention or list(ATTENTIONS))
    wanted = gate_dtypes_of(dtype or GATE_DTYPES)
    on = resolve_device(device)
    environment = read_environment(on)
    for name in filter(is_users, names):
        implementation(name)  # before the workers start, so that one that cannot be loaded is said once

    def keep(matrix: GateMatrix) -> None:
        if figures is not None:
            write_atomically(json_document(matrix).encode(), figures)

    check_place(figures)
    with interrupts.keeping():
        matrix = judge_matrix(
            names,
            dtypes=wanted,
            shapes=shapes_of(every_shape, on.type),
            device=str(on),
            workers=usual_workers(on.type) if workers is None else workers,
            seconds=120.0 if seconds is None else seconds,
            device_name=environment.device_name,
            versions=environment.versions,
            on_answer=keep,
        )
    keep(matrix)
    left = matrix.calls - matrix.reached
    hint = f"{left} of {matrix.calls} calls were not reached: give it more --seconds" if matrix.reached and left else ""
    fault, exit_code = "", EXIT_DONE
    if matrix.interrupted:
        exit_code = EXIT_INTERRUPTED
    elif any(report.failures for report in matrix.reports):
        exit_code = EXIT_CHECK_FAILED
    elif not any(report.passed for report in matrix.reports):
        fault = f"the gate judged nothing: {why_nothing(matrix)}"
    return replace(result_of(matrix), hint=hint, fault=fault, exit_code=exit_code)


def why_nothing(matrix: GateMatrix) -> str:
    """Why no call of the matrix was judged, in one line."""
    if not matrix.reached:
        return f"none of {matrix.calls} calls was reached: give it more --seconds, or --workers"
    verdicts = ((report.implementation, verdict) for report in matrix.reports for verdict in report.verdicts)
    first, *others = dict.fromkeys(f"attention {name} {verdict.reason}" for name, verdict in verdicts)
    more = ", the others as said above" if others else ""
    return f"{first}{more}: choose another --attention, --dtype or --device"


def result_of(matrix: GateMatrix) -> Result:
    """The matrix of verdicts as an answer, and as the document that it is with --json."""
    versions = ", ".join(f"{name} {version}" for name, version in matrix.versions.items())
    verdicts = [verdict for report in matrix.reports for verdict in report.verdicts]
    unsupported = sum(verdict.outcome == "not supported" for verdict in verdicts)
    besides = f", and {unsupported} are not supported" if unsupported else ""
    judged = f"{matrix.reached - unsupported} of {matrix.calls} calls were judged{besides}"
    answer = answer_gate(matrix.reports, f"{matrix.device_name}; {versions}", origin=judged)
    return Result(answer=answer, document=lambda: json_document(matrix))


def usual_workers(device_type: str) -> int:
    """Processes that compile side by side: on a GPU all cores but two; on a CPU one for each two."""
    cores = os.cpu_count() or 1
    return max(1, cores - 2 if device_type == "cuda" else cores // 2)


def check_place(place: Path | None) -> None:
    """Raise InputError where a file that is named cannot be written, before anything is measured."""
    try:
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("ab"):
                pass
    except OSError as error:
        raise InputError(f"cannot write {place}: {error.strerror or error}; choose another --figures") from error


QUESTION = Question(
    "attention-gate",
    judge_attentions,
    examples=("--attention sdpa,flash --dtype bf16 --figures gate.json", "--from results/h200/attention/gate.json"),
    shared=("shown",),
)
