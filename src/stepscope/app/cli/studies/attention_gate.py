"""`stepscope study attention-gate`: is each implementation of attention right? The whole matrix, nothing timed."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from stepscope.app.cli.given_options import refuse_beside
from stepscope.app.cli.output import stdout_kept_clean, warn
from stepscope.app.cli.presentation import Presentation
from stepscope.app.cli.verb import verb
from stepscope.core import interrupts
from stepscope.core.bounded_file import read_named
from stepscope.core.errors import EXIT_CHECK_FAILED, EXIT_INTERRUPTED, InputError

if TYPE_CHECKING:
    from stepscope.questions.attention.matrix import GateMatrix

_GATE_SECONDS = 120.0


@verb(
    "study attention-gate",
    "stepscope study attention-gate --attention sdpa,flash --dtype bf16 --figures gate.json",
    "stepscope study attention-gate --from results/h200/attention/gate.json",
)
def attention_gate(
    *,
    attention: tuple[str, ...] | None,
    dtype: tuple[str, ...] | None,
    every_shape: bool,
    device: str,
    seconds: float | None,
    workers: int | None,
    from_: Path | None,
    figures: Path | None,
    shown: Presentation,
) -> None:
    """Whether each implementation of attention is right: every dtype and shape, judged by float64.

    Exit code 0 where all that was judged is right, 1 where one is wrong, 2 where nothing was judged.
    """
    if from_ is not None:
        refuse_beside("--from")
        show_matrix(read_matrix(from_), shown)
        return
    from stepscope.core.attentions import ATTENTIONS
    from stepscope.core.run_directory import write_atomically
    from stepscope.questions.attention.matrix import (
        GATE_DTYPES,
        GateMatrix,
        encode_matrix,
        gate_dtypes_of,
        implementations_of,
        judge_matrix,
        shapes_of,
    )
    from stepscope.recording.device import resolve_device
    from stepscope.recording.environment import read_environment

    names = implementations_of(attention or list(ATTENTIONS))
    wanted = gate_dtypes_of(dtype or GATE_DTYPES)
    found = resolve_device(device)
    environment = read_environment(found)

    def keep(matrix: GateMatrix) -> None:
        if figures is not None:
            write_atomically(encode_matrix(matrix), figures)

    if figures is not None:
        check_place(figures)
    with stdout_kept_clean(), interrupts.keeping():
        matrix = judge_matrix(
            names,
            dtypes=wanted,
            shapes=shapes_of(every_shape, found.type),
            device=str(found),
            workers=usual_workers(found.type) if workers is None else workers,
            seconds=_GATE_SECONDS if seconds is None else seconds,
            device_name=environment.device_name,
            versions=environment.versions,
            on_answer=keep,
        )
    keep(matrix)
    show_matrix(matrix, shown)
    if 0 < matrix.reached < matrix.calls:
        warn(f"{matrix.calls - matrix.reached} of {matrix.calls} calls were not reached: give it more --seconds")
    if matrix.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if any(report.failures for report in matrix.reports):
        raise typer.Exit(EXIT_CHECK_FAILED)
    if not any(report.passed for report in matrix.reports):
        raise InputError(f"the gate judged nothing: {why_nothing(matrix)}")


def why_nothing(matrix: "GateMatrix") -> str:
    """Why no call of the matrix was judged, in one line."""
    if not matrix.reached:
        return f"none of {matrix.calls} calls was reached: give it more --seconds, or --workers"
    reasons: dict[str, None] = {}
    for report in matrix.reports:
        for verdict in report.verdicts:
            reasons.setdefault(f"attention {report.implementation} {verdict.reason}")
    first, *others = reasons
    more = ", the others as said above" if others else ""
    return f"{first}{more}: choose another --attention, --dtype or --device"


def show_matrix(matrix: "GateMatrix", shown: Presentation) -> None:
    """Show the matrix of verdicts."""
    from stepscope.questions.attention.gate_answer import answer_gate
    from stepscope.questions.attention.matrix import encode_matrix

    versions = ", ".join(f"{name} {version}" for name, version in matrix.versions.items())
    verdicts = [verdict for report in matrix.reports for verdict in report.verdicts]
    unsupported = sum(verdict.outcome == "not supported" for verdict in verdicts)
    besides = f", and {unsupported} are not supported" if unsupported else ""
    judged = f"{matrix.reached - unsupported} of {matrix.calls} calls were judged{besides}"
    answer = answer_gate(matrix.reports, f"{matrix.device_name}; {versions}", origin=judged)
    shown.show(answer, document=lambda: encode_matrix(matrix).decode())


def usual_workers(device_type: str) -> int:
    """Processes that compile side by side: on a GPU all cores but two; on a CPU one for each two."""
    cores = os.cpu_count() or 1
    return max(1, cores - 2 if device_type == "cuda" else cores // 2)


def check_place(place: Path) -> None:
    """Raises InputError where the file cannot be written, before anything is measured."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("ab"):
            pass
    except OSError as error:
        raise InputError(f"cannot write {place}: {error.strerror or error}; choose another --figures") from error


def read_matrix(place: Path) -> "GateMatrix":
    """The matrix that `--figures` or `--json` wrote."""
    from stepscope.questions.attention.matrix import decode_matrix

    return decode_matrix(read_named(place), str(place))


def kind_of(data: bytes) -> str:
    """What a file says of itself; empty where it says nothing, or is no JSON."""
    import msgspec

    class Kind(msgspec.Struct):
        kind: str = ""

    try:
        return msgspec.json.decode(data, type=Kind).kind
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
