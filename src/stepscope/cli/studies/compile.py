"""`stepscope study compile`: the whole model, eager against compiled, measured and captured here, or before."""

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
from stepscope.engine.request import TraceRequest

if TYPE_CHECKING:
    from stepscope.analysis.comparisons.compiling.cells import CompileCell

STUDY = "compile"


@verb(
    "study compile",
    "stepscope study compile --model small --compile default,max-autotune",
    "stepscope study compile --from results/h200/compile --only findings",
    model="small,large,2.7B; tiny on a CPU",
    seq_len="512; 32 on a CPU",
    batch_size="4; 1 on a CPU",
    dtype="bf16; fp32 on a CPU",
    phase="forward,train",
    attention="reference",
    compile="default",
)
def compiled(
    *,
    model: tuple[str, ...] | None,
    seq_len: tuple[int, ...] | None,
    batch_size: int | None,
    dtype: tuple[str, ...] | None,
    phase: tuple[str, ...] | None,
    attention: tuple[str, ...] | None,
    compile: tuple[str, ...] | None,
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
    """What torch.compile gives forward and the full step, what it costs, what it did, and which kernels it fused."""
    if save is not None:
        from stepscope.report.plots.save import check_target

        check_target(save)
    given = {
        "model": model, "seq_len": seq_len, "batch_size": None if batch_size is None else (batch_size,),
        "dtype": dtype, "phase": phase, "attention": attention, "compile": compile,
    }  # fmt: skip
    shown = functools.partial(answer, study=STUDY, save=save, json=json, only=only)
    if from_:
        wanted = wanted_runs(given)
        file = finished_answer(from_, wanted)
        shown(lambda _: _experiment(_stored(from_, keep_digests, wanted)), read=file)
        return
    from stepscope.cli.sweep import measure_and_report
    from stepscope.core.model_config import configure
    from stepscope.engine.plan import Policy, SweepPlan
    from stepscope.studies.compile_study import check_modes, cold_caches, compile_cells, sizes_for

    device_type = type_of_device(device)
    usual = sizes_for(device_type)
    on_cpu = device_type == "cpu"
    plan = SweepPlan(
        cells=compile_cells(
            models=[configure(name) for name in model or usual.models.split(",")],
            seq_lens=seq_len or tuple(map(int, usual.seq_len.split(","))),
            batch_size=usual.batch_size if batch_size is None else batch_size,
            dtypes=dtype or usual.dtypes.split(","),
            phases=phase or usual.phases.split(","),
            modes=check_modes(compile or ("default",)),
            attentions=attention or ("reference",),
            settings=settings_from(warmup, steps, seconds, no_profile=on_cpu),
        ),
        devices=(device,),
        out=str(runs),
        tag=tag,
        trace=TraceRequest(tools=() if on_cpu else ("kineto",), steps=1),
    )

    def report(found: list[Run]) -> None:
        cells = [_cell(run, runs / run.id, keep_digests) for run in found]
        shown(lambda _: _experiment(cells), read=None)
        if unread(cell.run for cell in cells):
            warn(
                f"the captures lie in {runs}: `stepscope study compile --from {runs}` answers from them where polars is"
            )

    with cold_caches():
        measure_and_report(plan, Policy(), report)


def _experiment(cells: "list[CompileCell]") -> Experiment:
    from stepscope.analysis.comparisons.compiling.answer import answer_compile
    from stepscope.analysis.comparisons.compiling.cells import pair_up

    return answer_compile(pair_up(cells), unread=unread(cell.run for cell in cells))


def _cell(run: Run, directory: Path, keep: bool) -> "CompileCell":
    from stepscope.analysis.comparisons.compiling.cells import CompileCell

    return CompileCell(run=run, digest=captured(run, directory, keep))


def _stored(places: Iterable[Path], keep: bool, wanted: dict[str, tuple[Any, ...]]) -> "list[CompileCell]":
    from stepscope.studies.compile_study import BASELINE, check_modes

    if "compile" in wanted:
        wanted = {**wanted, "compile": (BASELINE, *check_modes(wanted["compile"]))}
    return [_cell(run, directory, keep) for run, directory in stored_runs(places) if is_wanted(run, wanted)]
