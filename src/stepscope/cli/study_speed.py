"""`stepscope study speed`: forward and backward in fp32, TF32 and bf16, measured and captured here, or before."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli import options
from stepscope.cli.captured_runs import captured, stored_runs, unread
from stepscope.cli.output import warn
from stepscope.cli.study_precision import Only, Plot, answer
from stepscope.core.errors import InputError
from stepscope.core.experiment import Experiment
from stepscope.core.run import Run
from stepscope.studies.request import Tell

if TYPE_CHECKING:
    from stepscope.analysis.comparisons.precision.cells import TimedCell

STUDY = "speed"


def speed(
    models: Annotated[
        str | None,
        typer.Option("--models", help="Presets, comma-separated (default: small to 2.7B; tiny,small on a CPU)."),
    ] = None,
    seq_len: Annotated[
        str | None, typer.Option("--seq-len", help="Comma-separated (default: 512; 32 on a CPU).")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Sequences in a step (default: 4; 1 on a CPU).")
    ] = None,
    dtypes: Annotated[
        str | None,
        typer.Option("--dtypes", help=f"fp32 and others of {options.DTYPE_HELP[7:-1]} (default: fp32,tf32,bf16)."),
    ] = None,
    warmup: options.Warmup = None,
    steps: options.Steps = None,
    seconds: options.Seconds = 1.0,
    device: options.Device = "auto",
    tag: options.Tag = None,
    out: options.Out = Path("runs"),
    read: Annotated[
        list[Path] | None,
        typer.Option(
            "--read", help="A folder of runs, or an answer that --json wrote: nothing is measured. May be repeated."
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep-digests", help="Write each capture's tables beside its run, as trace-kineto.json.")
    ] = False,
    only: Only = None,
    plot: Plot = None,
    json: options.Json = False,
) -> None:
    """How much faster lower precision is by the model's size, and which part of the step makes the gain."""
    if plot is not None:
        from stepscope.report.plots.save import check_target

        check_target(plot)
    given = {"--models": models, "--seq-len": seq_len, "--batch-size": batch_size, "--dtypes": dtypes}
    if read:
        file = read[0] if len(read) == 1 and read[0].is_file() else None
        chosen = [option for option, value in given.items() if value is not None]
        if file is not None and chosen:
            raise InputError(
                f"{file} is a finished answer: {', '.join(chosen)} would choose among the runs of a folder"
            )
        wanted = _wanted(models, seq_len, batch_size, dtypes)

        def stored(_: Tell) -> Experiment:
            return _experiment(_stored(read, keep, wanted), dtypes)

        answer(stored, study=STUDY, read=file, plot=plot, json=json, only=only)
        return
    from stepscope.cli.sweep import measure_and_report, numbers, words
    from stepscope.core.model_config import configure
    from stepscope.studies.precision_speed import dtypes_here, sizes_for, speed_cells
    from stepscope.studies.sweep_plan import Policy, SweepPlan

    device_type = _device_type(device)
    usual = sizes_for(device_type)
    here, lacking = dtypes_here(words(dtypes or usual.dtypes, "--dtypes"), device_type)
    plan = SweepPlan(
        cells=speed_cells(
            models=[configure(name) for name in words(models or usual.models, "--models")],
            seq_lens=numbers(seq_len or usual.seq_len, "--seq-len"),
            batch_size=usual.batch_size if batch_size is None else batch_size,
            dtypes=here,
            settings=options.settings_from(warmup, steps, seconds, no_profile=device_type == "cpu"),
        ),
        devices=(device,),
        out=str(out),
        tag=tag,
        trace=options.trace_from(["kineto"], 1, False),
    )

    def report(runs: list[Run]) -> None:
        cells = [_cell(run, out / run.id, keep) for run in runs]
        answer(lambda _: _experiment(cells, dtypes, lacking), study=STUDY, read=None, plot=plot, json=json, only=only)
        if unread(cell.run for cell in cells):
            warn(f"the captures lie in {out}: `stepscope study speed --read {out}` answers from them where polars is")

    measure_and_report(plan, Policy(), report)


def _device_type(device: str) -> str:
    """cpu or cuda; asks torch only where the user leaves it open."""
    if device != "auto":
        return device.partition(":")[0]
    from stepscope.measure.device import resolve_device

    return resolve_device(device).type


def _experiment(cells: "list[TimedCell]", dtypes: str | None, lacking: tuple[str, ...] = ()) -> Experiment:
    from stepscope.analysis.comparisons.precision.answer import answer_speed
    from stepscope.analysis.comparisons.precision.cells import pair_up
    from stepscope.cli.sweep import words
    from stepscope.core.workload import DTYPES

    order = words(dtypes, "--dtypes") if dtypes else DTYPES
    return answer_speed(pair_up(cells, order), lacking=lacking, unread=unread(cell.run for cell in cells))


def _cell(run: Run, directory: Path, keep: bool) -> "TimedCell":
    from stepscope.analysis.comparisons.precision.cells import TimedCell

    return TimedCell(run=run, digest=captured(run, directory, keep))


def _wanted(
    models: str | None, seq_len: str | None, batch_size: int | None, dtypes: str | None
) -> dict[str, list[object]]:
    """Which runs of a folder are wanted, by a field of the workload; those not named are all."""
    from stepscope.cli.sweep import numbers, words
    from stepscope.core.errors import choose
    from stepscope.core.workload import DTYPES

    wanted: dict[str, list[object]] = {}
    if models is not None:
        wanted["model"] = list(words(models, "--models"))
    if seq_len is not None:
        wanted["seq_len"] = list(numbers(seq_len, "--seq-len"))
    if batch_size is not None:
        wanted["batch_size"] = [batch_size]
    if dtypes is not None:
        wanted["dtype"] = [choose(dtype, DTYPES, "dtype") for dtype in words(dtypes, "--dtypes")]
    return wanted


def _stored(places: Iterable[Path], keep: bool, wanted: dict[str, list[object]]) -> "list[TimedCell]":
    found = []
    for run, directory in stored_runs(places):
        workload = run.workload
        fields = {
            "model": workload.model.name,
            "seq_len": workload.seq_len,
            "batch_size": workload.batch_size,
            "dtype": workload.dtype,
        }
        if workload.phase != "forward" and all(fields[field] in values for field, values in wanted.items()):
            found.append(_cell(run, directory, keep))
    return found
