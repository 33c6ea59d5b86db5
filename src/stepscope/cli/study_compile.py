"""`stepscope study compile`: the whole model, eager against compiled, measured and captured here, or before."""

import functools
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

if TYPE_CHECKING:
    from stepscope.analysis.comparisons.compiling.cells import CompileCell

STUDY = "compile"


def compiled(
    models: Annotated[
        str | None,
        typer.Option("--models", help="Presets, comma-separated (default: small,large,2.7B; tiny on a CPU)."),
    ] = None,
    seq_len: Annotated[
        str | None, typer.Option("--seq-len", help="Comma-separated (default: 512; 32 on a CPU).")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Sequences in a step (default: 4; 1 on a CPU).")
    ] = None,
    dtypes: Annotated[
        str | None,
        typer.Option("--dtypes", help=f"Several of {options.DTYPE_HELP[7:-1]} (default: bf16; fp32 on a CPU)."),
    ] = None,
    phases: Annotated[
        str | None, typer.Option("--phases", help=f"Several of {options.PHASE_HELP[7:-1]} (default: forward,train).")
    ] = None,
    modes: Annotated[
        str | None,
        typer.Option("--modes", help="Several of default, reduce-overhead, max-autotune (default: default)."),
    ] = None,
    attention: Annotated[
        str | None, typer.Option("--attention", help=f"Several of {options.ATTENTION_HELP[7:-1]} (default: reference).")
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
    """What torch.compile gives forward and the full step, what it costs, what it did, and which kernels it fused."""
    if plot is not None:
        from stepscope.report.plots.save import check_target

        check_target(plot)
    given = {
        "--models": models, "--seq-len": seq_len, "--batch-size": batch_size, "--dtypes": dtypes, "--phases": phases,
        "--modes": modes, "--attention": attention,
    }  # fmt: skip
    shown = functools.partial(answer, study=STUDY, plot=plot, json=json, only=only)
    if read:
        file = read[0] if len(read) == 1 and read[0].is_file() else None
        chosen = [option for option, value in given.items() if value is not None]
        if file is not None and chosen:
            raise InputError(
                f"{file} is a finished answer: {', '.join(chosen)} would choose among the runs of a folder"
            )
        wanted = _wanted(given)
        shown(lambda _: _experiment(_stored(read, keep, wanted)), read=file)
        return
    from stepscope.cli.sweep import measure_and_report, numbers, words
    from stepscope.core.model_config import configure
    from stepscope.studies.compile_study import check_modes, cold_caches, compile_cells, sizes_for
    from stepscope.studies.sweep_plan import Policy, SweepPlan

    device_type = _device_type(device)
    usual = sizes_for(device_type)
    on_cpu = device_type == "cpu"
    plan = SweepPlan(
        cells=compile_cells(
            models=[configure(name) for name in words(models or usual.models, "--models")],
            seq_lens=numbers(seq_len or usual.seq_len, "--seq-len"),
            batch_size=usual.batch_size if batch_size is None else batch_size,
            dtypes=words(dtypes or usual.dtypes, "--dtypes"),
            phases=words(phases or usual.phases, "--phases"),
            modes=check_modes(words(modes or "default", "--modes")),
            attentions=words(attention or "reference", "--attention"),
            settings=options.settings_from(warmup, steps, seconds, no_profile=on_cpu),
        ),
        devices=(device,),
        out=str(out),
        tag=tag,
        trace=options.trace_from(None if on_cpu else ["kineto"], 1, False),
    )

    def report(runs: list[Run]) -> None:
        cells = [_cell(run, out / run.id, keep) for run in runs]
        shown(lambda _: _experiment(cells), read=None)
        if unread(cell.run for cell in cells):
            warn(f"the captures lie in {out}: `stepscope study compile --read {out}` answers from them where polars is")

    with cold_caches():
        measure_and_report(plan, Policy(), report)


def _device_type(device: str) -> str:
    """cpu or cuda; asks torch only where the user leaves it open."""
    if device != "auto":
        return device.partition(":")[0]
    from stepscope.measure.device import resolve_device

    return resolve_device(device).type


def _experiment(cells: "list[CompileCell]") -> Experiment:
    from stepscope.analysis.comparisons.compiling.answer import answer_compile
    from stepscope.analysis.comparisons.compiling.cells import pair_up

    return answer_compile(pair_up(cells), unread=unread(cell.run for cell in cells))


def _cell(run: Run, directory: Path, keep: bool) -> "CompileCell":
    from stepscope.analysis.comparisons.compiling.cells import CompileCell

    return CompileCell(run=run, digest=captured(run, directory, keep))


def _wanted(given: dict[str, str | int | None]) -> dict[str, list[object]]:
    """Which runs of a folder are wanted, by a field of the workload; those not named are all."""
    from stepscope.cli.sweep import numbers, words
    from stepscope.core.attentions import attention_names
    from stepscope.core.errors import choose
    from stepscope.core.workload import DTYPES, PHASES
    from stepscope.studies.compile_study import BASELINE, check_modes

    wanted: dict[str, list[object]] = {}
    for option, value in given.items():
        if value is None:
            continue
        text = str(value)
        match option:
            case "--models":
                wanted["model"] = list(words(text, option))
            case "--seq-len" | "--batch-size":
                wanted[option[2:].replace("-", "_")] = list(numbers(text, option))
            case "--modes":
                wanted["compile"] = [BASELINE, *check_modes(words(text, option))]
            case _:
                field, choices = {
                    "--dtypes": ("dtype", DTYPES),
                    "--phases": ("phase", PHASES),
                    "--attention": ("attention", attention_names()),
                }[option]
                wanted[field] = [choose(word, choices, field) for word in words(text, option)]
    return wanted


def _stored(places: Iterable[Path], keep: bool, wanted: dict[str, list[object]]) -> "list[CompileCell]":
    found = []
    for run, directory in stored_runs(places):
        fields = {**run.workload.identity, "model": run.workload.model.name}
        if all(fields[field] in values for field, values in wanted.items()):
            found.append(_cell(run, directory, keep))
    return found
