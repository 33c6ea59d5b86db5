"""`stepscope study kernels`: which kernels a step runs, over models and sequence lengths, captured here or before."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli import options
from stepscope.cli.output import emit_json, show, warn
from stepscope.core.errors import InputError
from stepscope.core.run import Run
from stepscope.core.run_directory import find_run_files, load_run

if TYPE_CHECKING:
    from stepscope.analysis.trace_digest import TraceDigest
    from stepscope.report.kernel_study import StudiedCell


def kernels(
    model: Annotated[str, typer.Option("--model", help="Presets, comma-separated.")] = "tiny",
    seq_len: Annotated[str, typer.Option("--seq-len", help="Comma-separated.")] = "64,128",
    batch_size: Annotated[int, typer.Option("--batch-size", help="Sequences in a step.")] = 4,
    dtype: Annotated[str, typer.Option("--dtype", help=f"Several of {options.DTYPE_HELP[7:]}")] = "fp32",
    phase: Annotated[str, typer.Option("--phase", help=f"Several of {options.PHASE_HELP[7:]}")] = "forward,train",
    attention: Annotated[str, typer.Option("--attention", help=options.ATTENTION_HELP)] = "reference",
    compile_mode: Annotated[str, typer.Option("--compile", help=options.COMPILE_HELP)] = "eager",
    trace: options.Trace = None,
    trace_steps: options.TraceSteps = 2,
    warmup: options.Warmup = None,
    steps: options.Steps = None,
    seconds: options.Seconds = 2.0,
    device: options.Device = "auto",
    tag: options.Tag = None,
    out: options.Out = Path("runs"),
    stored: Annotated[
        Path | None, typer.Option("--from", help="A folder of runs measured before: nothing is measured.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option("--where", help="With --from: keep runs with field=value[,value]; may be repeated."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep-digests", help="Write each capture's tables beside its run, as trace-TOOL.json.")
    ] = False,
    tool: Annotated[str, typer.Option("--tool", help="Whose captures to read: kineto or nsys.")] = "kineto",
    question: Annotated[
        str, typer.Option("--question", help="Only these tables, by their letters, as in d or b,e (default: all).")
    ] = "",
    json: options.Json = False,
) -> None:
    """Kernels by phase, their share, softmax and the rest, over models and sequence lengths."""
    from stepscope.core.errors import choose
    from stepscope.core.evidence import TRACE_TOOLS

    choose(tool, TRACE_TOOLS, "tool")
    from stepscope.report.kernel_study import QUESTIONS

    letters = [letter.strip() for letter in question.split(",") if letter.strip()]
    for letter in letters:
        choose(letter, list(QUESTIONS), "question")
    asked = "".join(letters)
    if stored is not None:
        _report(_stored(stored, where or [], tool, keep), asked, json)
        return
    from stepscope.cli.sweep import measure_and_report, numbers, words
    from stepscope.core.model_config import configure
    from stepscope.studies.grid import grid
    from stepscope.studies.sweep_plan import Cell, Policy, SweepPlan, order_cells

    workloads = grid(
        model=[configure(name) for name in words(model, "--model")],
        seq_len=numbers(seq_len, "--seq-len"),
        batch_size=[batch_size],
        dtype=words(dtype, "--dtype"),
        phase=words(phase, "--phase"),
        attention=[attention],
        compile=[compile_mode],
        optimizer=["adamw-foreach"],
        seed=0,
    )
    settings = options.settings_from(warmup, steps, seconds, False)
    plan = SweepPlan(
        cells=order_cells([Cell(workload=workload, settings=settings) for workload in workloads]),
        devices=(device,),
        out=str(out),
        tag=tag,
        trace=options.trace_from(trace or [tool], trace_steps, False),
    )
    measure_and_report(plan, Policy(), lambda runs: _report(_of_runs(runs, out, tool, keep), asked, json))


def _report(cells: "list[StudiedCell]", questions: str, json: bool) -> None:
    if not cells:
        raise InputError("no run here (with these conditions) holds a capture: measure with --trace kineto")
    if json:
        for cell in cells:
            row = {"run": cell.run.id, "workload": cell.run.workload, "trace": cell.digest}
            emit_json(row)
        return
    from stepscope.report.kernel_study import render_kernel_study

    show(render_kernel_study(cells, questions))


def _stored(place: Path, where: list[str], tool: str, keep: bool) -> "list[StudiedCell]":
    from stepscope.cli.table import condition
    from stepscope.report.tables import matches

    conditions = [condition(text) for text in where]
    if not place.is_dir():
        raise InputError(f"no runs at {place}: it is no folder")
    found = []
    for file in find_run_files(place):
        try:
            run = load_run(file)
        except InputError as error:
            warn(f"left out: {error}")
            continue
        if all(matches(run, *wanted) for wanted in conditions):
            found += _cell(run, file.parent, tool, keep)
    return found


def _of_runs(runs: list[Run], out: Path, tool: str, keep: bool) -> "list[StudiedCell]":
    return [cell for run in runs for cell in _cell(run, out / run.id, tool, keep)]


def _cell(run: Run, directory: Path, tool: str, keep: bool) -> "list[StudiedCell]":
    """The run's captures as digests: of the tool asked for, and of the other, if the run has one."""
    from stepscope.core.evidence import TRACE_TOOLS
    from stepscope.report.kernel_study import StudiedCell

    try:
        digests: dict[str, TraceDigest | None] = {
            name: digest_beside(run, directory, name, keep) for name in TRACE_TOOLS
        }
    except InputError as error:
        warn(f"left out: {error}")
        return []
    wanted = digests.pop(tool)
    return [StudiedCell(run=run, digest=wanted, other=next(iter(digests.values())))] if wanted else []


def digest_beside(run: Run, directory: Path, tool: str, keep: bool) -> "TraceDigest | None":
    """Of the capture if it is there, or what was kept of it."""
    from stepscope.analysis.trace_checks import check_trace
    from stepscope.analysis.trace_digest import digest_of, load_digest, save_digest
    from stepscope.cli.trace import load_summary

    capture = directory / run.artifacts.get(tool, "-")
    if not capture.is_file():
        return load_digest(directory, tool)
    if tool == "nsys" and (run.environment is None or run.environment.device_type == "cpu"):
        return None  # on a CPU Nsight Systems records ranges alone
    summary = load_summary(capture)
    digest = digest_of(summary, check_trace(summary))
    if keep:
        save_digest(digest, directory)
    return digest
