"""`stepscope study attention`: calls of each implementation, the gate's whole matrix, or a model's step with each."""

import os
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli import options
from stepscope.cli.output import emit, show, stdout_kept_clean, warn
from stepscope.cli.study_precision import Only, Plot
from stepscope.core.errors import EXIT_CHECK_FAILED, EXIT_INTERRUPTED, InputError

STUDY = "attention"
_GATE_SECONDS = 120.0


def judge(
    *, implementations: str | None, dtypes: str | None, device: str, seconds: float | None, workers: int | None,
    every_shape: bool, out: Path | None, json: bool,
) -> None:  # fmt: skip
    """`--gate`: the matrix, printed or as JSON, and kept as it grows."""
    import msgspec

    from stepscope.cli.sweep import words
    from stepscope.core.attention_support import SUPPORT
    from stepscope.core.run_directory import write_atomically
    from stepscope.measure.device import resolve_device
    from stepscope.measure.environment import read_environment
    from stepscope.report.attention_gate import render_gate
    from stepscope.studies.attention_matrix import (
        GATE_DTYPES,
        GateMatrix,
        gate_dtypes_of,
        implementations_of,
        judge_matrix,
        shapes_of,
    )

    names = implementations_of(words(implementations, "--implementations") if implementations else list(SUPPORT))
    wanted = gate_dtypes_of(words(dtypes, "--dtypes") if dtypes else GATE_DTYPES)
    found = resolve_device(device)
    environment = read_environment(found)

    def keep(matrix: GateMatrix) -> None:
        if out is not None:
            write_atomically(msgspec.json.format(msgspec.json.encode(matrix), indent=1) + b"\n", out)

    if out is not None:
        check_place(out)
    with stdout_kept_clean():
        matrix = judge_matrix(
            names,
            dtypes=wanted,
            shapes=shapes_of(every_shape),
            device=str(found),
            workers=usual_workers(found.type) if workers is None else workers,
            seconds=_GATE_SECONDS if seconds is None else seconds,
            versions=environment.versions,
            on_answer=keep,
        )
    keep(matrix)
    if json:
        emit(msgspec.json.format(msgspec.json.encode(matrix), indent=1).decode() + "\n")
    else:
        show(render_gate(matrix.reports))
        show(f"{matrix.reached} of {matrix.calls} calls on {environment.device_name}")
    if matrix.reached < matrix.calls:
        warn(f"{matrix.calls - matrix.reached} of {matrix.calls} calls were not reached: give it more --seconds")
    if matrix.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if any(report.failures for report in matrix.reports):
        raise typer.Exit(EXIT_CHECK_FAILED)


def usual_workers(device_type: str) -> int:
    """Processes that compile side by side: on a GPU all cores but two; on a CPU one for each two."""
    cores = os.cpu_count() or 1
    return max(1, cores - 2 if device_type == "cuda" else cores // 2)


def check_place(out: Path) -> None:
    """Raises InputError where the file cannot be written, before anything is measured."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("ab"):
            pass
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror or error}; choose another --out") from error


def attention(
    implementations: Annotated[str | None, typer.Option("--implementations", help="Names, comma-separated.")] = None,
    dtypes: Annotated[str | None, typer.Option("--dtypes", help="Several of fp32, bf16, fp16.")] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=0, help="For each cell; with --gate, for all.")
    ] = None,
    gate: Annotated[bool, typer.Option("--gate", help="Only judge: every implementation, dtype and shape.")] = False,
    every_shape: Annotated[
        bool, typer.Option("--every-shape", help="With --gate: 49 shapes, every length with every head_dim, not 7.")
    ] = False,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Processes that compile or judge.")] = None,
    device: options.Device = "auto",
    out: Annotated[Path | None, typer.Option("--out", help="Keep the figures in this file, as they come.")] = None,
    only: Only = None,
    plot: Plot = None,
    json: options.Json = False,
) -> None:
    """Attention by each implementation: right or wrong, time, memory and TFLOP/s by sequence length and head_dim."""
    if gate:
        judge(
            implementations=implementations, dtypes=dtypes, device=device, seconds=seconds, workers=workers,
            every_shape=every_shape, out=out, json=json,
        )  # fmt: skip
