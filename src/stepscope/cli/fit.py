"""`stepscope fit`: will it fit, and if not, what would make it fit. Nothing is run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from stepscope.cli import options
from stepscope.cli.output import emit, show, stdout_kept_clean, warn
from stepscope.core.errors import InputError
from stepscope.core.model_config import PRESETS
from stepscope.core.units import parse_bytes
from stepscope.core.workload import Workload

if TYPE_CHECKING:
    from stepscope.memory.prediction.accuracy import Accuracy
    from stepscope.memory.prediction.fit import Budget, Fit
    from stepscope.studies.fake_step import FakeEstimate


def fit(
    model: Annotated[
        str | None, typer.Option("--model", help="A preset; with --sweep several, or none for all.")
    ] = None,
    seq_len: Annotated[int, typer.Option("--seq-len", help="Tokens in a sequence.")] = 512,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Sequences in a step.")] = 4,
    dtype: Annotated[str, typer.Option("--dtype", help=options.DTYPE_HELP)] = "fp32",
    phase: Annotated[str, typer.Option("--phase", help=options.PHASE_HELP)] = "train",
    attention: Annotated[str, typer.Option("--attention", help=options.ATTENTION_HELP)] = "reference",
    compile_mode: Annotated[str, typer.Option("--compile", help=options.COMPILE_HELP)] = "eager",
    optimizer: Annotated[str, typer.Option("--optimizer", help=options.OPTIMIZER_HELP)] = "adamw-foreach",
    checkpointing: Annotated[str, typer.Option("--checkpointing", help=options.CHECKPOINTING_HELP)] = "none",
    accumulation: Annotated[int, typer.Option("--accumulation", help="Micro-batches that a step is split into.")] = 1,
    d_model: options.DModel = None,
    d_ff: options.DFf = None,
    layers: options.Layers = None,
    heads: options.Heads = None,
    vocabulary: options.Vocabulary = None,
    kv_heads: options.KvHeads = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="What PyTorch may allocate, as in 80GiB; as run's --memory-limit.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="A device by its name, as in H100 or 4090; the datasheet's memory.")
    ] = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List what a block keeps for backward, with the arithmetic of each size.")
    ] = False,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="The largest batch and the longest sequence that fit, by model.")
    ] = False,
    fake: Annotated[
        bool, typer.Option("--fake", help="Predict a second time, by running the step on PyTorch's fake tensors.")
    ] = False,
    against: Annotated[
        list[Path] | None, typer.Option("--against", help="Compare with the measured runs in this folder.")
    ] = None,
    apart: Annotated[
        list[Path] | None,
        typer.Option(
            "--apart", help="With --against: runs shown apart, and not counted (the model was corrected by them)."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="With --against, draw it: .svg, .png, .html or .json.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Predict the peak memory of a step, say whether it fits, and what would make it fit. Needs no GPU."""
    _check_together({"--tensors": tensors, "--sweep": sweep, "--fake": fake}, memory, device, against)
    if against:
        _compare(against, apart or [], plot, json)
        return
    for option, given in (("--plot", plot), ("--apart", apart)):
        if given:
            raise InputError(f"{option} belongs to --against: say which runs to compare with, or leave it out")

    def workload(preset: str) -> Workload:
        sizes = {"d_model": d_model, "d_ff": d_ff, "layers": layers, "heads": heads, "vocabulary": vocabulary}
        sizes["kv_heads"] = kv_heads
        choices = {
            "batch_size": batch_size, "seq_len": seq_len, "dtype": dtype, "phase": phase, "attention": attention,
            "compile": compile_mode, "optimizer": optimizer, "checkpointing": checkpointing,
            "accumulation": accumulation,
        }  # fmt: skip
        return options.workload_from(preset, sizes, choices)

    if tensors:
        _list_tensors(workload(model or "small"), json)
    elif sweep:
        names = [name.strip() for name in model.split(",")] if model else list(PRESETS)
        _print_largest([workload(name) for name in names], _budget(memory, device), json)
    else:
        _answer(workload(model or "small"), _budget(memory, device), fake, json)


def _check_together(modes: dict[str, bool], memory: str | None, device: str | None, against: list[Path] | None) -> None:
    """Raise InputError where options ask for two answers, or one of them would go unread."""
    asked = [mode for mode, given in modes.items() if given] + (["--against"] if against else [])
    if len(asked) > 1:
        raise InputError(f"{' and '.join(asked)} are different questions: ask one at a time")
    read_nowhere = [option for option, given in (("--memory", memory), ("--device", device)) if given is not None]
    if asked and asked[0] in ("--tensors", "--against") and read_nowhere:
        raise InputError(f"{asked[0]} asks for no budget: leave out {' and '.join(read_nowhere)}")


def _budget(memory: str | None, device: str | None) -> "Budget":
    from stepscope.memory.prediction.fit import budget_of_device, budget_of_memory

    if memory is not None and device is not None:
        raise InputError("--memory and --device both say how much there is: give one of them")
    if memory is not None:
        return budget_of_memory(parse_bytes(memory))
    if device is not None:
        return budget_of_device(device)
    raise InputError("how much memory is there? Say --memory, as in --memory 80GiB, or --device, as in --device H100")


def _answer(workload: Workload, budget: "Budget", fake: bool, json: bool) -> None:
    import gc

    # Steps on paper make a million objects, none of them in a cycle: looking for cycles is a tenth of the time.
    gc.disable()
    from stepscope.memory.prediction.fit import fit as predict

    answer = predict(workload, budget)
    gc.enable()
    second = _by_running(workload) if fake else None
    if json:
        fields = fit_as_json(answer, workload)
        if second is not None:
            fields["fake"] = {"peak_bytes": second.peak_bytes, **msgspec.to_builtins(second)}
        emit(msgspec.json.format(msgspec.json.encode(fields), indent=1).decode() + "\n")
        return
    from stepscope.report.fit import render_fit

    show(render_fit(answer, workload))
    if second is not None:
        from stepscope.report.fit import render_second

        emit("\n")
        show(render_second(answer.estimate, second.memory, second.peak_bytes))


def _by_running(workload: Workload) -> "FakeEstimate":
    from stepscope.studies.fake_step import estimate_by_running

    with stdout_kept_clean():
        return estimate_by_running(workload)


def fit_as_json(answer: "Fit", workload: Workload) -> dict[str, object]:
    """The contract of `stepscope fit --json`."""
    return {
        "fits": answer.fits,
        "peak_bytes": answer.estimate.peak_bytes,
        "categories": answer.categories,
        "plans": msgspec.to_builtins(answer.plans),
        "margin_bytes": answer.margin_bytes,
        "fails_in": answer.fails_in,
        "budget": msgspec.to_builtins(answer.budget),
        "estimate": msgspec.to_builtins(answer.estimate),
        "workload": msgspec.to_builtins(workload),
    }


def _list_tensors(workload: Workload, json: bool) -> None:
    if workload.phase == "forward":
        raise InputError("inference keeps nothing for backward: --tensors needs --phase train or forward-backward")
    from stepscope.memory.prediction.kept_tensors import kept_by_block

    kept = kept_by_block(workload)
    if json:
        rows = [
            {**msgspec.to_builtins(tensor), "bytes_each": tensor.bytes_each, "total_bytes": tensor.total_bytes}
            for tensor in kept
        ]
        emit(msgspec.json.format(msgspec.json.encode(rows), indent=1).decode() + "\n")
        return
    from stepscope.report.fit import render_tensors

    show(render_tensors(workload, kept))


def _print_largest(workloads: list[Workload], budget: "Budget", json: bool) -> None:
    from stepscope.memory.prediction.largest import largest_that_fits

    found = [largest_that_fits(workload, budget) for workload in workloads]
    if json:
        rows = [
            {"model": largest.workload.model.name, "batch_size": largest.batch_size, "seq_len": largest.seq_len}
            for largest in found
        ]
        emit(msgspec.json.format(msgspec.json.encode(rows), indent=1).decode() + "\n")
        return
    from stepscope.report.fit import render_largest

    show(render_largest(found, budget.said))


def _compare(folders: list[Path], apart: list[Path], plot: Path | None, json: bool) -> None:
    from stepscope.core.run_directory import load_runs
    from stepscope.memory.prediction.accuracy import compare

    if plot is not None:
        from stepscope.report.plots.save import check_target

        check_target(plot)
    runs, faults = load_runs(folders)
    others, other_faults = load_runs(apart)
    for fault in [*faults, *other_faults]:
        warn(f"left out: {fault}")
    accuracy = compare(runs, others)
    if not accuracy.comparisons:
        raise InputError(
            f"no run in {', '.join(map(str, folders))} has measured peaks: measure on a GPU, as `stepscope sweep` does"
        )
    if plot is not None:
        from stepscope.report.plots.memory_accuracy import draw_accuracy_of
        from stepscope.report.plots.save import save_plot

        save_plot(draw_accuracy_of(accuracy), plot)
        warn(f"plotted in {plot}")
    if json:
        emit(msgspec.json.format(msgspec.json.encode(_accuracy_as_json(accuracy)), indent=1).decode() + "\n")
        return
    from stepscope.report.fit import render_accuracy

    show(render_accuracy(accuracy))


def _accuracy_as_json(accuracy: "Accuracy") -> dict[str, object]:
    worst = accuracy.worst
    return {
        "median_error": accuracy.median_error,
        "worst_error": worst.error if worst else None,
        "verdicts": accuracy.verdicts,
        "verdicts_right": accuracy.right,
        "wrongly_said_to_fit": [comparison.run_id for comparison in accuracy.wrongly_said_to_fit],
        **{
            name: [{**msgspec.to_builtins(comparison), "error": comparison.error} for comparison in comparisons]
            for name, comparisons in (("comparisons", accuracy.comparisons), ("apart", accuracy.apart))
        },
    }
