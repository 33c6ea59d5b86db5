"""`stepscope sweep`: many workloads, each in a process of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import click
import msgspec

from stepscope.app.cli.output import Presentation, exit_code_of, sweep_progress
from stepscope.core.answer import Answer
from stepscope.core.errors import (
    EXIT_CHECK_FAILED,
    EXIT_DEVICE_FAILED,
    EXIT_INTERRUPTED,
    EXIT_WRONG_INPUT,
    InputError,
    StepscopeError,
    warn,
)
from stepscope.core.options import MEASURING, SWEEPING, Argument, Option, completed, verb
from stepscope.core.run import Run
from stepscope.core.units import counted
from stepscope.engine.workload_options import ManyWorkloads, Recording, Timing

if TYPE_CHECKING:
    from stepscope.engine.sweep_plan import Policy, SweepPlan


class Stopped(StepscopeError):
    """Raised where the user stopped the work; the message says how it can go on."""

    exit_code = EXIT_INTERRUPTED


_UNFIT_NAMED = 6
"""Cells that are named beforehand as too large; the others are counted."""


Device = Annotated[
    tuple[str, ...],
    Option(
        "auto, cpu, cuda or cuda:N; cells are shared by several, as in cuda:0,cuda:1.",
        MEASURING,
        complete=completed("auto", "cpu", "cuda", "cuda:0", "cuda:1"),
    ),
]
On = Annotated[
    str | None,
    Option(
        "Measure the cells on the nodes of a Ray cluster: ray://HOST, or auto for the one that this machine is in.",
        SWEEPING,
        metavar="ray://HOST|auto",
        complete=completed("auto", "ray://"),
    ),
]
Timeout = Annotated[float, Option("Seconds that one cell may take.", SWEEPING, least=1)]
NoSkip = Annotated[bool, Option("Also try cells larger than one that ran out of memory.", SWEEPING)]
Retry = Annotated[bool, Option("Measure failed, killed and timed-out cells again.", SWEEPING)]
Fresh = Annotated[bool, Option("Measure every cell again.", SWEEPING)]


@verb(
    "sweep",
    "stepscope sweep --model small,medium --seq-len 128,512 --dtype fp32,bf16 --tag first",
    "stepscope sweep recipe.py --device cuda:0,cuda:1 --record kineto",
    model="tiny",
    seq_len="128",
)
def command(
    recipe: Annotated[
        Path | None,
        Argument("A Python file, run with your rights, whose sweep() returns Workloads, instead of a grid."),
    ] = None,
    *,
    workloads: ManyWorkloads,
    device: Device = ("auto",),
    timing: Timing,
    repeat: int,
    peak_flops: float | None,
    recording: Recording,
    on: On,
    timeout: Timeout = 900.0,
    no_skip: NoSkip = False,
    retry: Retry = False,
    fresh: Fresh = False,
    memory: int | None,
    tag: str | None,
    runs: Path,
    shown: Presentation,
) -> None:
    """Measure a grid of workloads. The same command resumes a sweep that was interrupted."""
    from stepscope.engine.sweep_plan import Cell, Policy, SweepPlan, order_cells, repeated
    from stepscope.engine.user_code import load_recipe

    if recipe is not None:
        if workloads.flags:
            raise InputError(f"a recipe says what to measure: leave out {', '.join(workloads.flags)}")
        measured = load_recipe(recipe)
    else:
        measured = workloads.workloads(model="tiny", seq_len=128)
    plan = SweepPlan(
        cells=order_cells(repeated([Cell(workload=each, settings=timing.settings) for each in measured], repeat)),
        devices=device,
        out=str(runs),
        tag=tag,
        memory_limit_bytes=memory,
        peak_flops_per_s=peak_flops,
        trace=recording.trace,
        memory=recording.memory,
    )
    policy = Policy(timeout_s=timeout, skip=not no_skip, retry=retry, fresh=fresh, on=on)

    def report(results: list[Run]) -> None:
        from stepscope.runs.answer import answer_cells

        report_runs(results, answer_cells(results, str(runs)), shown)
        shown.name_the_page(runs)

    measure_and_report(plan, policy, report, retries=True)


def measure_and_report(
    plan: "SweepPlan",
    policy: "Policy",
    report: Callable[[list[Run]], None],
    *,
    again: bool = True,
    retries: bool = False,
) -> NoReturn:
    """Run the sweep under a display, report its runs, and leave with the sweep's exit code.

    again: whether the same command goes on where this one stopped. retries: whether it has the option --retry.
    """
    from stepscope.engine.measured_cell import leaves_nothing
    from stepscope.engine.sweep import SweepInterrupted, run_sweep
    from stepscope.engine.sweep_plan import BROKEN

    if policy.on is None:
        _foretell(plan)
    try:
        with sweep_progress() as tell:
            runs = run_sweep(plan, policy, tell)
    except SweepInterrupted as interruption:
        if interruption.runs:
            try:
                report(interruption.runs)
            except InputError as error:  # too few of them for an answer
                warn(str(error))
        kept = f", kept in {', '.join(map(str, interruption.kept))}" if interruption.kept else ""
        raise Stopped(
            "interrupted: the same command goes on where this one stopped" if again else f"interrupted{kept}"
        ) from None
    report(runs)
    broken = [run for run in runs if run.status in BROKEN]
    if broken:
        stays, they = not all(map(leaves_nothing, broken)), "it" if len(broken) == 1 else "them"
        delete = "" if not stays or retries else f"delete {they}, and "
        how = "the same command with --retry" if stays and retries else "the same command"
        tries = f": {delete}{how} tries {they} again" if again else ""
        warn(f"{len(broken)} of {counted(len(runs), 'cell')} ended without a result{tries}")
    raise click.exceptions.Exit(sweep_exit_code(runs))


def _foretell(plan: "SweepPlan") -> None:
    """A line on the cells that are predicted to run out of memory. They are measured all the same."""
    from stepscope.core.formulas.spelled import cell_name
    from stepscope.engine.sweep import cells_that_will_not_fit, memory_of

    budget = memory_of(plan)
    unfit = cells_that_will_not_fit(plan, budget) if budget is not None else []
    if budget is not None:
        _keep(plan, budget.usable_bytes, {workload.key for workload in unfit})
    if budget is not None and unfit:
        named = ", ".join(cell_name(workload) for workload in unfit[:_UNFIT_NAMED])
        more = f" and {len(unfit) - _UNFIT_NAMED} more" if len(unfit) > _UNFIT_NAMED else ""
        warn(f"{len(unfit)} of {len(plan.cells)} cells are predicted not to fit into {budget.said}: {named}{more}")


def _keep(plan: "SweepPlan", usable_bytes: int, unfit: set[str]) -> None:
    """Keep the verdict on each cell beside the runs that will show whether it comes true."""
    from stepscope.core.run_directory import forecast_of_peak, keep_forecasts
    from stepscope.engine.sweep import is_foretold

    keys = dict.fromkeys(cell.workload.key for cell in plan.cells if is_foretold(cell.workload))
    verdicts = [forecast_of_peak("sweep", key, None, budget_bytes=usable_bytes, fits=key not in unfit) for key in keys]
    if verdicts and (fault := keep_forecasts(Path(plan.out), verdicts)):
        warn(fault)


def report_runs(runs: list[Run], answer: Answer, shown: Presentation) -> None:
    """What was found of these runs, with --json a line for each; and a word where their environments differ.

    Of nodes that differ, the answer has a finding.
    """
    environments = [run.environment for run in runs if run.environment and run.environment.node is None]
    for other in environments[1:]:
        differences = environments[0].differences(other)
        if differences:
            name, (first, second) = next(iter(differences.items()))
            warn(f"the cells were measured in different environments: {name} {first} and {second}")
            break
    shown.show(answer, document=lambda: "".join(msgspec.json.encode(run).decode() + "\n" for run in runs))


def sweep_exit_code(runs: list[Run]) -> int:
    """3 when a cell crashed, hung or was killed; 2 when the device refuses cells as asked for; 1 when a check
    failed, or a user's function is wrong.

    Out of memory is a result like others.
    """
    broken = [run.failure.during for run in runs if run.status in ("failed", "killed", "timed-out") and run.failure]
    if broken:
        if not set(broken) <= {"refused", "wrong"}:
            return EXIT_DEVICE_FAILED
        return EXIT_CHECK_FAILED if "wrong" in broken else EXIT_WRONG_INPUT
    return exit_code_of(finding for run in runs for finding in run.findings)
