"""`stepscope study kernels`: which kernels a step runs, over models and sequence lengths, captured here or before."""

from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.cli.options import recording_from, settings_from
from stepscope.cli.output import emit_json, show, warn
from stepscope.cli.verb import verb
from stepscope.core.errors import InputError
from stepscope.core.run import Run
from stepscope.core.run_directory import find_run_files, load_run

if TYPE_CHECKING:
    from stepscope.analysis.trace_digest import TraceDigest
    from stepscope.report.kernel_study import StudiedCell


@verb(
    "study kernels",
    "stepscope study kernels --model small --seq-len 128,512",
    "stepscope study kernels --from results/h200/kernels --where model=large --only d,h",
)
def kernels(
    *,
    model: tuple[str, ...] = ("tiny",),
    seq_len: tuple[int, ...] = (64, 128),
    batch_size: int = 4,
    dtype: tuple[str, ...] = ("fp32",),
    phase: tuple[str, ...] = ("forward", "train"),
    attention: str = "reference",
    compile: str = "eager",
    device: str,
    warmup: int | None,
    steps: int | None,
    seconds: float = 2.0,
    record: tuple[str, ...] = (),
    trace_steps: int,
    keep_digests: bool,
    tool: str,
    runs: Path,
    from_: Path | None,
    where: tuple[str, ...] = (),
    tag: str | None,
    only: tuple[str, ...],
    json: bool,
) -> None:
    """Kernels by phase, their share, softmax and the rest, over models and sequence lengths."""
    from stepscope.core.errors import choose
    from stepscope.core.evidence import TRACE_TOOLS
    from stepscope.report.kernel_study import QUESTIONS

    choose(tool, TRACE_TOOLS, "tool")
    for letter in only:
        choose(letter, list(QUESTIONS), "question")
    asked = "".join(only)
    if from_ is not None:
        _report(_stored(from_, where, tool, keep_digests), asked, json)
        return
    from stepscope.cli.sweep import measure_and_report
    from stepscope.core.model_config import configure
    from stepscope.studies.grid import grid
    from stepscope.studies.sweep_plan import Cell, Policy, SweepPlan, order_cells

    workloads = grid(
        model=[configure(name) for name in model],
        seq_len=seq_len,
        batch_size=batch_size,
        dtype=dtype,
        phase=phase,
        attention=attention,
        compile=compile,
    )
    settings = settings_from(warmup, steps, seconds)
    recording = recording_from(record or (tool,), trace_steps)
    plan = SweepPlan(
        cells=order_cells([Cell(workload=workload, settings=settings) for workload in workloads]),
        devices=(device,),
        out=str(runs),
        tag=tag,
        trace=recording.trace,
        memory=recording.memory,
    )
    measure_and_report(plan, Policy(), lambda found: _report(_of_runs(found, runs, tool, keep_digests), asked, json))


def _report(cells: "list[StudiedCell]", questions: str, json: bool) -> None:
    if not cells:
        raise InputError("no run here (with these conditions) holds a capture: measure with --record kineto")
    if json:
        for cell in cells:
            row = {"run": cell.run.id, "workload": cell.run.workload, "trace": cell.digest}
            emit_json(row)
        return
    from stepscope.report.kernel_study import render_kernel_study

    show(render_kernel_study(cells, questions))


def _stored(place: Path, where: tuple[str, ...], tool: str, keep: bool) -> "list[StudiedCell]":
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


def _of_runs(runs: list[Run], place: Path, tool: str, keep: bool) -> "list[StudiedCell]":
    return [cell for run in runs for cell in _cell(run, place / run.id, tool, keep)]


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
    """The digest of a run's capture, made anew if the capture is there, else the kept one, or None."""
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
