"""`stepscope sweep`: many workloads, each in a process of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from stepscope.cli import options
from stepscope.cli.output import emit, show, sweep_progress, warn
from stepscope.core.errors import (
    EXIT_CHECK_FAILED,
    EXIT_DEVICE_FAILED,
    EXIT_DONE,
    EXIT_WRONG_INPUT,
    InputError,
    Stopped,
)
from stepscope.core.finding import worst
from stepscope.core.run import Run
from stepscope.core.units import parse_bytes, parse_flops_per_s
from stepscope.core.workload import CHECKPOINTING_CHOICES

if TYPE_CHECKING:
    from stepscope.studies.sweep_plan import Policy, SweepPlan


_UNFIT_NAMED = 6
"""Cells that are named beforehand as too large; the others are counted."""

_DEFAULTS = {
    "--model": "tiny", "--seq-len": "128", "--batch-size": "4", "--dtype": "fp32", "--phase": "train",
    "--attention": "reference", "--compile": "eager", "--optimizer": "adamw-foreach",
    "--checkpointing": "none", "--accumulation": "1",
}  # fmt: skip


def sweep(
    recipe: Annotated[
        Path | None,
        typer.Argument(help="A Python file, run with your rights, whose sweep() returns Workloads, instead of a grid."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Presets, comma-separated (default: tiny).")] = None,
    seq_len: Annotated[str | None, typer.Option("--seq-len", help="Comma-separated (default: 128).")] = None,
    batch_size: Annotated[str | None, typer.Option("--batch-size", help="Comma-separated (default: 4).")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help=f"Several of {options.DTYPE_HELP[7:]}")] = None,
    phase: Annotated[str | None, typer.Option("--phase", help=f"Several of {options.PHASE_HELP[7:]}")] = None,
    attention: Annotated[
        str | None, typer.Option("--attention", help=f"Several of {options.ATTENTION_HELP[7:]}")
    ] = None,
    compile_mode: Annotated[
        str | None, typer.Option("--compile", help=f"Several of {options.COMPILE_HELP[7:]}")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option("--optimizer", help=f"Several of {options.OPTIMIZER_HELP[7:]}")
    ] = None,
    checkpointing: Annotated[
        str | None,
        typer.Option("--checkpointing", help=f"Several of {CHECKPOINTING_CHOICES} (default: none)."),
    ] = None,
    accumulation: Annotated[
        str | None, typer.Option("--accumulation", help="Micro-batches in a step, comma-separated (default: 1).")
    ] = None,
    d_model: options.DModel = None,
    d_ff: options.DFf = None,
    layers: options.Layers = None,
    heads: options.Heads = None,
    vocabulary: options.Vocabulary = None,
    kv_heads: options.KvHeads = None,
    seed: options.Seed = 0,
    devices: Annotated[
        str, typer.Option("--devices", help="Devices to share the cells, as in cuda:0,cuda:1.")
    ] = "auto",
    warmup: options.Warmup = None,
    steps: options.Steps = None,
    seconds: options.Seconds = 5.0,
    no_profile: options.NoProfile = False,
    trace: options.Trace = None,
    trace_steps: options.TraceSteps = 2,
    trace_stacks: options.TraceStacks = False,
    memory: options.Memory = False,
    memory_stacks: options.MemoryStacks = None,
    memory_limit: options.MemoryLimit = None,
    peak_flops: options.PeakFlops = None,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that one cell may take.")] = 900.0,
    no_skip: Annotated[
        bool, typer.Option("--no-skip", help="Also try cells larger than one that ran out of memory.")
    ] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Measure failed, killed and timed-out cells again.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure every cell again.")] = False,
    tag: options.Tag = None,
    out: options.Out = Path("runs"),
    json: options.Json = False,
) -> None:
    """Measure a grid of workloads. The same command resumes a sweep that was interrupted."""
    from stepscope.core.model_config import configure
    from stepscope.studies.grid import grid
    from stepscope.studies.recipe import load_recipe
    from stepscope.studies.sweep_plan import Cell, Policy, SweepPlan, order_cells

    settings = options.settings_from(warmup, steps, seconds, no_profile)
    sizes = {"d_model": d_model, "d_ff": d_ff, "layers": layers, "heads": heads, "vocabulary": vocabulary}
    sizes["kv_heads"] = kv_heads
    axes = {
        "--model": model, "--seq-len": seq_len, "--batch-size": batch_size, "--dtype": dtype, "--phase": phase,
        "--attention": attention, "--compile": compile_mode, "--optimizer": optimizer,
        "--checkpointing": checkpointing, "--accumulation": accumulation,
    }  # fmt: skip
    if recipe is not None:
        given = [option for option, value in {**axes, **sizes}.items() if value is not None]
        if given:
            raise InputError(f"a recipe says what to measure: leave out {', '.join(given)}")
        workloads = load_recipe(recipe)
    else:
        chosen = {option: value if value is not None else _DEFAULTS[option] for option, value in axes.items()}
        workloads = grid(
            model=[configure(name, **sizes) for name in words(chosen["--model"], "--model")],
            seq_len=numbers(chosen["--seq-len"], "--seq-len"),
            batch_size=numbers(chosen["--batch-size"], "--batch-size"),
            dtype=words(chosen["--dtype"], "--dtype"),
            phase=words(chosen["--phase"], "--phase"),
            attention=words(chosen["--attention"], "--attention"),
            compile=words(chosen["--compile"], "--compile"),
            optimizer=words(chosen["--optimizer"], "--optimizer"),
            checkpointing=words(chosen["--checkpointing"], "--checkpointing"),
            accumulation=numbers(chosen["--accumulation"], "--accumulation"),
            seed=seed,
        )
    plan = SweepPlan(
        cells=order_cells([Cell(workload=workload, settings=settings) for workload in workloads]),
        devices=tuple(words(devices, "--devices")),
        out=str(out),
        tag=tag,
        memory_limit_bytes=parse_bytes(memory_limit) if memory_limit else None,
        peak_flops_per_s=parse_flops_per_s(peak_flops) if peak_flops else None,
        trace=options.trace_from(trace, trace_steps, trace_stacks),
        memory=options.memory_from(memory, memory_stacks),
    )
    policy = Policy(timeout_s=timeout, skip=not no_skip, retry=retry, fresh=fresh)
    measure_and_report(plan, policy, lambda runs: report_sweep(runs, json, out))


def measure_and_report(plan: "SweepPlan", policy: "Policy", report: Callable[[list[Run]], None]) -> NoReturn:
    """Run the sweep under a display, report its runs, and leave with the sweep's exit code."""
    from stepscope.studies.sweep import SweepInterrupted, run_sweep
    from stepscope.studies.sweep_plan import BROKEN

    _foretell(plan)
    try:
        with sweep_progress(len(plan.devices)) as tell:
            runs = run_sweep(plan, policy, tell)
    except SweepInterrupted as interruption:
        if interruption.runs:
            try:
                report(interruption.runs)
            except InputError as error:  # too few of them for an answer
                warn(str(error))
        raise Stopped("interrupted: the same command goes on where this one stopped") from None
    report(runs)
    broken = sum(run.status in BROKEN for run in runs)
    if broken:
        warn(f"{broken} of {len(runs)} cells ended without a result: the same command with --retry tries them again")
    raise typer.Exit(sweep_exit_code(runs))


def _foretell(plan: "SweepPlan") -> None:
    """A line on the cells that are predicted to run out of memory. They are measured all the same."""
    from stepscope.report.terminal import cell_name
    from stepscope.studies.forecast import cells_that_will_not_fit, memory_of

    budget = memory_of(plan)
    unfit = cells_that_will_not_fit(plan, budget) if budget is not None else []
    if budget is not None and unfit:
        named = ", ".join(cell_name(workload) for workload in unfit[:_UNFIT_NAMED])
        more = f" and {len(unfit) - _UNFIT_NAMED} more" if len(unfit) > _UNFIT_NAMED else ""
        warn(f"{len(unfit)} of {len(plan.cells)} cells are predicted not to fit into {budget.said}: {named}{more}")


def report_sweep(runs: list[Run], json: bool, out: Path | None = None) -> None:
    """The cells on stdout, and a line where they were measured in different environments."""
    environments = [run.environment for run in runs if run.environment]
    for other in environments[1:]:
        differences = environments[0].differences(other)
        if differences:
            name, (first, second) = next(iter(differences.items()))
            warn(f"the cells were measured in different environments: {name} {first} and {second}")
            break
    if json:
        import msgspec

        for run in runs:
            emit(msgspec.json.encode(run).decode() + "\n")
        return
    from stepscope.report.terminal import render_cells

    show(render_cells(runs))
    if runs and out is not None:
        show(f"{len(runs)} runs in {out}")


def sweep_exit_code(runs: list[Run]) -> int:
    """3 when a cell crashed, hung or was killed; 2 when the device refuses cells as asked for; 1 when a check failed.

    Out of memory is a result like others.
    """
    broken = [run.failure.during for run in runs if run.status in ("failed", "killed", "timed-out") and run.failure]
    if broken:
        return EXIT_WRONG_INPUT if set(broken) == {"refused"} else EXIT_DEVICE_FAILED
    findings = [finding for run in runs for finding in run.findings]
    return EXIT_CHECK_FAILED if worst(findings) == "error" else EXIT_DONE


def words(text: str, option: str) -> list[str]:
    """A comma-separated list of words, each once."""
    found = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not found:
        raise InputError(f"{option} is empty: name at least one")
    return found


def numbers(text: str, option: str) -> list[int]:
    """A comma-separated list of whole numbers."""
    try:
        return [int(word) for word in words(text, option)]
    except ValueError:
        raise InputError(f"cannot read {option} {text!r}: write whole numbers, as in 128,256") from None
