"""`stepscope study attention`: calls of each implementation, the gate's whole matrix, or a model's step with each."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli import options
from stepscope.cli.output import emit, show, stdout_kept_clean, warn
from stepscope.cli.study_precision import Only, Plot, answer
from stepscope.core import interrupts
from stepscope.core.attentions import ATTENTIONS
from stepscope.core.bounded_file import read_document
from stepscope.core.errors import EXIT_CHECK_FAILED, EXIT_DEVICE_FAILED, EXIT_INTERRUPTED, InputError
from stepscope.core.experiment import Experiment
from stepscope.studies.request import Tell

if TYPE_CHECKING:
    from stepscope.studies.attention_matrix import GateMatrix

STUDY = "attention"
_GATE_SECONDS = 120.0


def judge(
    *, implementations: str | None, dtypes: str | None, device: str, seconds: float | None, workers: int | None,
    every_shape: bool, out: Path | None, json: bool,
) -> None:  # fmt: skip
    """`--gate`: the matrix, printed or as JSON, and kept as it grows.

    Exits with 1 where an implementation is wrong. Raises InputError where nothing was judged.
    """
    from stepscope.cli.sweep import words
    from stepscope.core.run_directory import write_atomically
    from stepscope.measure.device import resolve_device
    from stepscope.measure.environment import read_environment
    from stepscope.studies.attention_matrix import (
        GATE_DTYPES,
        GateMatrix,
        encode_matrix,
        gate_dtypes_of,
        implementations_of,
        judge_matrix,
        shapes_of,
    )

    names = implementations_of(words(implementations, "--implementations") if implementations else list(ATTENTIONS))
    wanted = gate_dtypes_of(words(dtypes, "--dtypes") if dtypes else GATE_DTYPES)
    found = resolve_device(device)
    environment = read_environment(found)

    def keep(matrix: GateMatrix) -> None:
        if out is not None:
            write_atomically(encode_matrix(matrix), out)

    if out is not None:
        check_place(out)
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
    show_matrix(matrix, json)
    if 0 < matrix.reached < matrix.calls:
        warn(f"{matrix.calls - matrix.reached} of {matrix.calls} calls were not reached: give it more --seconds")
    if matrix.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if any(report.failures for report in matrix.reports):
        raise typer.Exit(EXIT_CHECK_FAILED)
    if not any(report.passed for report in matrix.reports):
        raise InputError(f"the gate judged nothing: {why_nothing(matrix)}")


def why_nothing(matrix: "GateMatrix") -> str:
    """Of a matrix without a call that was judged, in one line."""
    if not matrix.reached:
        return f"none of {matrix.calls} calls was reached: give it more --seconds, or --workers"
    reasons: dict[str, None] = {}
    for report in matrix.reports:
        for verdict in report.verdicts:
            reasons.setdefault(f"attention {report.implementation} {verdict.reason}")
    first, *others = reasons
    more = ", the others as said above" if others else ""
    return f"{first}{more}: choose other --implementations, --dtypes or --device"


def show_matrix(matrix: "GateMatrix", json: bool) -> None:
    """As a table, or as JSON."""
    if json:
        from stepscope.studies.attention_matrix import encode_matrix

        emit(encode_matrix(matrix).decode())
        return
    from stepscope.report.attention_gate import render_gate

    versions = ", ".join(f"{name} {version}" for name, version in matrix.versions.items())
    show(f"{matrix.device_name}; {versions}")
    show(render_gate(matrix.reports))
    verdicts = [verdict for report in matrix.reports for verdict in report.verdicts]
    unsupported = sum(verdict.outcome == "not supported" for verdict in verdicts)
    besides = f", and {unsupported} are not supported" if unsupported else ""
    show(f"{matrix.reached - unsupported} of {matrix.calls} calls were judged{besides}")


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
    model: Annotated[
        str | None,
        typer.Option("--model", help="Presets: a whole training step of each, with each implementation in it."),
    ] = None,
    seq_len: Annotated[str | None, typer.Option("--seq-len", help="Comma-separated.")] = None,
    head_dim: Annotated[str | None, typer.Option("--head-dim", help="Comma-separated.")] = None,
    implementations: Annotated[
        str | None, typer.Option("--implementations", help=f"Several of {', '.join(ATTENTIONS)}.")
    ] = None,
    dtypes: Annotated[
        str | None, typer.Option("--dtypes", help="Several of fp32, bf16, fp16; with --model of its dtypes.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", help="Sequences.")] = None,
    heads: Annotated[int | None, typer.Option("--heads", help="Of the queries.")] = None,
    kv_heads: Annotated[
        int | None, typer.Option("--kv-heads", help="Of keys and values, where they have fewer: a divisor of --heads.")
    ] = None,
    causal: Annotated[bool | None, typer.Option("--causal/--full", help="What a query sees.")] = None,
    compiles: Annotated[str | None, typer.Option("--compile", help="none, default (torch.compile), or both.")] = None,
    launches: Annotated[
        str | None, typer.Option("--launches", help="hidden (the device's own time) or shown (as on an idle device).")
    ] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", help="seeds: the write-ups' grid, batch 8, no heads, fp32, naive.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=0, help="For each cell; with --gate, for all of it.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Exactly this many passes of each cell, or steps of a model.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option("--budget", min=0, help="Seconds for the whole grid; the rest is not reached.")
    ] = None,
    gate: Annotated[
        bool,
        typer.Option(
            "--gate",
            help="Only judge: every implementation, dtype and shape. Exit code 0 where all that was judged is right, "
            "1 where one is wrong, 2 where nothing was judged.",
        ),
    ] = False,
    every_shape: Annotated[
        bool, typer.Option("--every-shape", help="With --gate: 58 shapes, every length with every head_dim, not 16.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option("--workers", min=0, help="Processes that judge, or compile ahead (on a GPU).")
    ] = None,
    device: options.Device = "auto",
    tag: options.Tag = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Keep the figures in this file as they come; with --model, the folder of runs."),
    ] = None,
    read: Annotated[
        list[Path] | None,
        typer.Option(
            "--read", help="A file that --out or --json wrote, or a folder of runs of --model: nothing is measured."
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep-digests", help="Write each capture's tables beside its run, as trace-kineto.json.")
    ] = False,
    only: Only = None,
    plot: Plot = None,
    json: options.Json = False,
) -> None:
    """Attention by each implementation: right or wrong, time, memory and TFLOP/s by sequence length and head_dim.

    With --model, a whole training step with each of them in it; with --gate, only whether they are right.
    """
    if plot is not None:
        from stepscope.report.plots.save import check_target

        check_target(plot)
    shown = functools.partial(answer, study=STUDY, read=None, plot=plot, json=json, only=only)
    of_calls = {
        "--head-dim": head_dim, "--heads": heads, "--kv-heads": kv_heads, "--causal/--full": causal,
        "--compile": compiles, "--launches": launches, "--preset": preset, "--budget": budget,
    }  # fmt: skip
    of_steps = {"--tag": tag, "--keep-digests": keep or None}
    of_gate = {"--every-shape": every_shape or None}
    sizes = {"--seq-len": seq_len, "--batch-size": batch_size, "--steps": steps}
    if read:
        measuring = {"--implementations": implementations, "--dtypes": dtypes, "--seconds": seconds, "--out": out}
        rest = {"--model": model, "--gate": gate or None, "--workers": workers, "--tag": tag}
        _refuse("--read", {**sizes, **measuring, **of_calls, **of_gate, **rest})
        _read(read, keep, plot=plot, json=json, only=only)
        return
    if gate:
        _refuse("--gate", {**of_calls, "--model": model, **sizes, **of_steps, "--plot": plot, "--only": only})
        judge(
            implementations=implementations, dtypes=dtypes, device=device, seconds=seconds, workers=workers,
            every_shape=every_shape, out=out, json=json,
        )  # fmt: skip
        return
    if model is not None:
        _refuse("--model", {**of_calls, **of_gate, "--workers": workers, "--plot": plot})
        from stepscope.cli.study_attention_steps import measure_steps

        if only is not None:
            from stepscope.analysis.comparisons.attention.answer import TITLES

            check_only(only, TITLES)
        measure_steps(
            models=model, seq_len=seq_len, batch_size=batch_size, dtypes=dtypes, implementations=implementations,
            seconds=seconds, steps=steps, device=device, tag=tag, out=out or Path("runs"), keep=keep, shown=shown,
        )  # fmt: skip
        return
    _refuse_without("--model", of_steps)
    _refuse_without("--gate", of_gate)
    if only is not None:
        from stepscope.analysis.attention_answer import TITLES

        check_only(only, TITLES)
    _measure_calls(
        shown, seq_len=seq_len, head_dim=head_dim, implementations=implementations, dtypes=dtypes,
        batch_size=batch_size, heads=heads, kv_heads=kv_heads, causal=causal, compiles=compiles, launches=launches,
        preset=preset, seconds=seconds, steps=steps, budget=budget, workers=workers, device=device, out=out,
    )  # fmt: skip


def _measure_calls(
    shown: Callable[..., None], *, seq_len: str | None, head_dim: str | None, implementations: str | None,
    dtypes: str | None, batch_size: int | None, heads: int | None, kv_heads: int | None, causal: bool | None,
    compiles: str | None, launches: str | None, preset: str | None, seconds: float | None, steps: int | None,
    budget: float | None, workers: int | None, device: str, out: Path | None,
) -> None:  # fmt: skip
    from stepscope.cli.sweep import numbers, words
    from stepscope.core.attention_timing import AttentionTimings, encode_timings
    from stepscope.core.run_directory import write_atomically
    from stepscope.measure.device import resolve_device
    from stepscope.studies.attention_grid import (
        check_runnable,
        compiles_of,
        grid_groups,
        launches_of,
        measure_grid,
        sizes_for,
    )

    found = resolve_device(device)
    usual = sizes_for(found.type, preset)
    groups = grid_groups(
        seq_lens=numbers(usual.seq_len if seq_len is None else seq_len, "--seq-len"),
        head_dims=numbers(usual.head_dim if head_dim is None else head_dim, "--head-dim"),
        implementations=words(
            usual.implementations if implementations is None else implementations, "--implementations"
        ),
        dtypes=words(usual.dtypes if dtypes is None else dtypes, "--dtypes"),
        batch_size=usual.batch_size if batch_size is None else batch_size,
        heads=usual.heads if heads is None else heads,
        key_heads=kv_heads,
        causal=usual.causal if causal is None else causal,
        compiles=compiles_of(words(usual.compile if compiles is None else compiles, "--compile")),
    )
    check_runnable(groups, found.type)
    hidden = launches_of(usual.launches if launches is None else launches)
    if out is not None:
        check_place(out)
    ended: list[int] = []
    unreached: list[int] = []

    def keep(timings: AttentionTimings) -> None:
        if out is not None:
            write_atomically(encode_timings(timings), out)

    def run(tell: Tell) -> Experiment:
        from stepscope.analysis.attention_answer import answer_attention

        with interrupts.keeping():
            timings, interrupted = measure_grid(
                groups,
                device=device,
                seconds=usual.seconds if seconds is None else seconds,
                steps=steps,
                launches=hidden,
                budget_s=budget,
                workers=usual_workers(found.type) if workers is None else workers,
                preset=preset or "",
                tell=tell,
                on_rows=keep,
            )
        if interrupted:
            ended.append(EXIT_INTERRUPTED)
        elif any(row.outcome == "failed" for row in timings.timings):
            ended.append(EXIT_DEVICE_FAILED)
        elif any(row.outcome == "wrong" for row in timings.timings):
            ended.append(EXIT_CHECK_FAILED)
        if all(row.outcome == "not reached" and budget is not None for row in timings.timings):
            unreached.append(len(timings.timings))
        if not timings.timings:
            raise KeyboardInterrupt  # before the first row
        return answer_attention(timings)

    shown(run)
    if unreached:
        raise InputError(f"none of the {unreached[0]} cells was reached in --budget {budget:g}: give it more seconds")
    if out is not None:
        warn(f"the figures are in {out}: --read shows them again")
    if ended:
        raise typer.Exit(ended[0])


def _refuse(mode: str, given: Mapping[str, object]) -> None:
    """Options that say nothing in this mode."""
    useless = [option for option, value in given.items() if value is not None]
    if useless:
        raise InputError(f"{', '.join(useless)} says nothing with {mode}: leave it out")


def _refuse_without(mode: str, given: Mapping[str, object]) -> None:
    """Options that say nothing but in this mode."""
    useless = [option for option, value in given.items() if value is not None]
    if useless:
        raise InputError(f"{', '.join(useless)} says nothing without {mode}: leave it out")


def check_only(only: str, titles: Sequence[str]) -> None:
    """Raises InputError, before anything is measured, for what is in no title that the answer may have."""
    if not only or not any(only.casefold() in title.casefold() for title in (*titles, "findings")):
        raise InputError(f"--only {only!r} names no table: there are {', '.join(map(repr, titles))}, and findings")


def _read(places: list[Path], keep: bool, *, plot: Path | None, json: bool, only: str | None) -> None:
    """Whatever was written: runs of a model's step, timings, the gate's matrix, an answer."""
    shown = functools.partial(answer, study=STUDY, plot=plot, json=json, only=only)
    if any(place.is_dir() for place in places):
        from stepscope.cli.study_attention_steps import read_steps

        for place in places:
            if not place.is_dir():
                raise InputError(f"no runs at {place}: it is no folder")
        _refuse("a folder of runs", {"--plot": plot})
        read_steps(places, keep, functools.partial(shown, read=None))
        return
    _refuse_without("a folder of runs", {"--keep-digests": keep or None})
    if len(places) > 1:
        raise InputError("--read shows one file at a time: give one, or folders of runs")
    (place,) = places
    try:
        data = read_document(place)
    except OSError as error:
        raise InputError(f"cannot read {place}: {error.strerror or error}") from error
    if not data:
        raise InputError(f"{place} is empty: what was to write it ended before its first row; measure again with --out")
    match kind_of(data):
        case "attention-timings":
            from stepscope.analysis.attention_answer import answer_attention
            from stepscope.core.attention_timing import decode_timings

            shown(lambda _: answer_attention(decode_timings(data, str(place))), read=None)
        case "attention-gate":
            from stepscope.studies.attention_matrix import decode_matrix

            _refuse("the gate's matrix", {"--plot": plot, "--only": only})
            show_matrix(decode_matrix(data, str(place)), json)
        case _:
            shown(lambda _: _never(), read=place)


def _never() -> Experiment:
    raise AssertionError("an answer is read, not made")


def kind_of(data: bytes) -> str:
    """What a file says of itself; empty where it says nothing, or is no JSON."""
    import msgspec

    class Kind(msgspec.Struct):
        kind: str = ""

    try:
        return msgspec.json.decode(data, type=Kind).kind
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
