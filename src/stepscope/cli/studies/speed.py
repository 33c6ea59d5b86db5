"""`stepscope study speed`: forward and backward in fp32, TF32 and bf16, measured and captured here, or before."""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.cli.captured_runs import (
    captured,
    finished_answer,
    is_wanted,
    stored_runs,
    type_of_device,
    unread,
    wanted_runs,
)
from stepscope.cli.options import settings_from
from stepscope.cli.output import warn
from stepscope.cli.studies.precision import answer
from stepscope.cli.verb import verb
from stepscope.core.experiment import Experiment
from stepscope.core.run import Run
from stepscope.core.workload import DTYPES
from stepscope.engine.request import TraceRequest

if TYPE_CHECKING:
    from stepscope.analysis.comparisons.precision.cells import TimedCell

STUDY = "speed"


@verb(
    "study speed",
    "stepscope study speed --model small,medium --dtype fp32,bf16",
    "stepscope study speed --from results/h200/precision-speed --only amdahl",
    model="small to 2.7B; tiny,small on a CPU",
    seq_len="512; 32 on a CPU",
    batch_size="4; 1 on a CPU",
    dtype="fp32,tf32,bf16",
)
def speed(
    *,
    model: tuple[str, ...] | None,
    seq_len: tuple[int, ...] | None,
    batch_size: int | None,
    dtype: tuple[str, ...] | None,
    device: str,
    warmup: int | None,
    steps: int | None,
    seconds: float = 1.0,
    keep_digests: bool,
    runs: Path,
    from_: tuple[Path, ...] = (),
    tag: str | None,
    only: str | None,
    save: Path | None,
    json: bool,
) -> None:
    """How much faster lower precision is by the model's size, and which part of the step makes the gain."""
    if save is not None:
        from stepscope.report.plots.save import check_target

        check_target(save)
    given = {
        "model": model, "seq_len": seq_len, "batch_size": None if batch_size is None else (batch_size,), "dtype": dtype,
    }  # fmt: skip
    shown = functools.partial(answer, study=STUDY, save=save, json=json, only=only)
    if from_:
        wanted = wanted_runs(given)
        file = finished_answer(from_, wanted)
        shown(lambda _: _experiment(_stored(from_, keep_digests, wanted), dtype), read=file)
        return
    from stepscope.cli.sweep import measure_and_report
    from stepscope.core.model_config import configure
    from stepscope.engine.plan import Policy, SweepPlan
    from stepscope.studies.precision_speed import dtypes_here, sizes_for, speed_cells

    device_type = type_of_device(device)
    usual = sizes_for(device_type)
    here, lacking = dtypes_here(dtype or usual.dtypes.split(","), device_type)
    plan = SweepPlan(
        cells=speed_cells(
            models=[configure(name) for name in model or usual.models.split(",")],
            seq_lens=seq_len or tuple(map(int, usual.seq_len.split(","))),
            batch_size=usual.batch_size if batch_size is None else batch_size,
            dtypes=here,
            settings=settings_from(warmup, steps, seconds, no_profile=device_type == "cpu"),
        ),
        devices=(device,),
        out=str(runs),
        tag=tag,
        trace=TraceRequest(tools=("kineto",), steps=1),
    )

    def report(found: list[Run]) -> None:
        cells = [_cell(run, runs / run.id, keep_digests) for run in found]
        shown(lambda _: _experiment(cells, dtype, lacking), read=None)
        if unread(cell.run for cell in cells):
            warn(f"the captures lie in {runs}: `stepscope study speed --from {runs}` answers from them where polars is")

    measure_and_report(plan, Policy(), report)


def _experiment(cells: "list[TimedCell]", dtypes: tuple[str, ...] | None, lacking: tuple[str, ...] = ()) -> Experiment:
    from stepscope.analysis.comparisons.precision.answer import answer_speed
    from stepscope.analysis.comparisons.precision.cells import pair_up

    return answer_speed(pair_up(cells, dtypes or DTYPES), lacking=lacking, unread=unread(cell.run for cell in cells))


def _cell(run: Run, directory: Path, keep: bool) -> "TimedCell":
    from stepscope.analysis.comparisons.precision.cells import TimedCell

    return TimedCell(run=run, digest=captured(run, directory, keep))


def _stored(places: Iterable[Path], keep: bool, wanted: dict[str, tuple[Any, ...]]) -> "list[TimedCell]":
    return [
        _cell(run, directory, keep)
        for run, directory in stored_runs(places)
        if run.workload.phase != "forward" and is_wanted(run, wanted)
    ]
