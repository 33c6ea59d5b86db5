"""`stepscope study allocator`: what a setting of PyTorch's caching allocator would give, measured."""

from pathlib import Path

import typer

from stepscope.app.cli.captured_runs import type_of_device
from stepscope.app.cli.presentation import Presentation
from stepscope.app.cli.verb import verb
from stepscope.app.cli.workloads import OneWorkload
from stepscope.core.errors import InputError
from stepscope.core.run import Run, Settings


@verb(
    "study allocator",
    "stepscope study allocator --module train.py:make --dtype bf16",
    "stepscope study allocator --model large --seq-len 1024 --setting garbage_collection_threshold:0.8",
    model="small",
    seq_len="512",
)
def allocator(
    *,
    said: OneWorkload,
    setting: str = "expandable_segments:True",
    device: str,
    settings: Settings,
    tag: str | None,
    runs: Path,
    shown: Presentation,
) -> None:
    """Measure a step without a setting of the GPU's caching allocator and with it, each in a process of its own."""
    from stepscope.questions.allocator.study import allocator_setting, check_setting

    check_setting(setting)
    workload = said.own or said.workload(model="small", seq_len=512)
    if type_of_device(device) != "cuda":
        raise InputError("a CPU has no caching allocator whose settings could be compared: this study needs a GPU")

    from stepscope.app.cli.output import sweep_progress
    from stepscope.app.cli.sweep import sweep_exit_code
    from stepscope.engine.plan import Cell, Policy, SweepPlan
    from stepscope.engine.sweep import run_sweep
    from stepscope.questions.allocator.answer import answer_allocator

    plan = SweepPlan(cells=(Cell(workload=workload, settings=settings),), devices=(device,), out=str(runs), tag=tag)
    found: list[Run] = []
    with sweep_progress() as tell:
        found += run_sweep(plan, Policy(fresh=True), tell)
        with allocator_setting(setting):
            found += run_sweep(plan, Policy(fresh=True), tell)
    shown.show(answer_allocator(found, setting))
    raise typer.Exit(sweep_exit_code(found))
