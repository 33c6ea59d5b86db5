"""`stepscope sweep`: many workloads, each in a process of its own."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from stepscope.cli import options
from stepscope.cli.output import show, sweep_progress, warn
from stepscope.core.errors import EXIT_CHECK_FAILED, EXIT_DEVICE_FAILED, EXIT_DONE, EXIT_INTERRUPTED, InputError
from stepscope.core.finding import worst
from stepscope.core.run import Run
from stepscope.core.units import parse_bytes, parse_flops_per_s

if TYPE_CHECKING:
    from stepscope.studies.sweep import Policy, SweepPlan


def sweep(
    recipe: Annotated[
        Path | None, typer.Argument(help="A Python file whose sweep() returns Workloads, instead of a grid.")
    ] = None,
    model: Annotated[str, typer.Option("--model", help="Presets, comma-separated.")] = "tiny",
    seq_len: Annotated[str, typer.Option("--seq-len", help="Comma-separated.")] = "128",
    batch_size: Annotated[str, typer.Option("--batch-size", help="Comma-separated.")] = "4",
    dtype: Annotated[str, typer.Option("--dtype", help=f"Several of {options.DTYPE_HELP[7:]}")] = "fp32",
    phase: Annotated[str, typer.Option("--phase", help=f"Several of {options.PHASE_HELP[7:]}")] = "train",
    attention: Annotated[
        str, typer.Option("--attention", help=f"Several of {options.ATTENTION_HELP[7:]}")
    ] = "reference",
    compile_mode: Annotated[str, typer.Option("--compile", help=f"Several of {options.COMPILE_HELP[7:]}")] = "eager",
    optimizer: Annotated[
        str, typer.Option("--optimizer", help=f"Several of {options.OPTIMIZER_HELP[7:]}")
    ] = "adamw-foreach",
    d_model: options.DModel = None,
    d_ff: options.DFf = None,
    layers: options.Layers = None,
    heads: options.Heads = None,
    vocabulary: options.Vocabulary = None,
    seed: options.Seed = 0,
    devices: Annotated[
        str, typer.Option("--devices", help="Devices to share the cells, as in cuda:0,cuda:1.")
    ] = "auto",
    warmup: options.Warmup = None,
    steps: options.Steps = None,
    seconds: options.Seconds = 5.0,
    no_profile: options.NoProfile = False,
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
    from stepscope.studies.sweep import Cell, Policy, SweepPlan, order_cells

    settings = options.settings_from(warmup, steps, seconds, no_profile)
    if recipe is not None:
        workloads = load_recipe(recipe)
    else:
        sizes = {"d_model": d_model, "d_ff": d_ff, "layers": layers, "heads": heads, "vocabulary": vocabulary}
        workloads = grid(
            model=[configure(name, **sizes) for name in _words(model, "--model")],
            seq_len=numbers(seq_len, "--seq-len"),
            batch_size=numbers(batch_size, "--batch-size"),
            dtype=_words(dtype, "--dtype"),
            phase=_words(phase, "--phase"),
            attention=_words(attention, "--attention"),
            compile=_words(compile_mode, "--compile"),
            optimizer=_words(optimizer, "--optimizer"),
            seed=seed,
        )
    plan = SweepPlan(
        cells=order_cells([Cell(workload=workload, settings=settings) for workload in workloads]),
        devices=tuple(_words(devices, "--devices")),
        out=str(out),
        tag=tag,
        memory_limit_bytes=parse_bytes(memory_limit) if memory_limit else None,
        peak_flops_per_s=parse_flops_per_s(peak_flops) if peak_flops else None,
    )
    policy = Policy(timeout_s=timeout, skip=not no_skip, retry=retry, fresh=fresh)
    measure_and_report(plan, policy, lambda runs: report_sweep(runs, json))


def measure_and_report(plan: "SweepPlan", policy: "Policy", report: Callable[[list[Run]], None]) -> NoReturn:
    """Run the sweep under a display, report its runs, and leave with the sweep's exit code."""
    from stepscope.studies.sweep import run_sweep

    try:
        with sweep_progress(len(plan.devices)) as tell:
            runs = run_sweep(plan, policy, tell)
    except KeyboardInterrupt:
        warn("interrupted; the same command goes on where this one stopped")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    report(runs)
    raise typer.Exit(sweep_exit_code(runs))


def report_sweep(runs: list[Run], json: bool) -> None:
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
            sys.stdout.write(msgspec.json.encode(run).decode() + "\n")
        return
    from stepscope.report.terminal import render_cells

    show(render_cells(runs))


def sweep_exit_code(runs: list[Run]) -> int:
    """3 when a cell crashed, hung or was killed; 1 when a check failed; out of memory is a result like others."""
    if any(run.status in ("failed", "killed", "timed-out") for run in runs):
        return EXIT_DEVICE_FAILED
    findings = [finding for run in runs for finding in run.findings]
    return EXIT_CHECK_FAILED if worst(findings) == "error" else EXIT_DONE


def _words(text: str, option: str) -> list[str]:
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise InputError(f"{option} is empty: name at least one")
    return words


def numbers(text: str, option: str) -> list[int]:
    """A comma-separated list of whole numbers."""
    try:
        return [int(word) for word in _words(text, option)]
    except ValueError:
        raise InputError(f"cannot read {option} {text!r}: write whole numbers, as in 128,256") from None
