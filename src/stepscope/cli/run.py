"""`stepscope run`: measure one training step here."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli import options
from stepscope.cli.output import emit, progress, show, stdout_kept_clean, warn
from stepscope.core.errors import EXIT_CHECK_FAILED, EXIT_DEVICE_FAILED, EXIT_DONE, EXIT_INTERRUPTED, StepscopeError
from stepscope.core.finding import worst
from stepscope.core.run import Run
from stepscope.core.units import parse_bytes, parse_flops_per_s

if TYPE_CHECKING:
    from stepscope.analysis.trace_summary import TraceSummary
    from stepscope.memory.explain import Explained


def run(
    model: Annotated[
        str | None, typer.Option("--model", help="A preset (default: small on a GPU, tiny on a CPU).")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", help="Tokens in a sequence (512 on a GPU, 128 on a CPU).")
    ] = None,
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
    seed: options.Seed = 0,
    device: options.Device = "auto",
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
    tag: options.Tag = None,
    out: options.Out = Path("runs"),
    json: options.Json = False,
) -> None:
    """Measure one step: time by phase, rates, memory, and what to doubt. Saves a run directory."""
    sizes = {"d_model": d_model, "d_ff": d_ff, "layers": layers, "heads": heads, "vocabulary": vocabulary}
    sizes["kv_heads"] = kv_heads
    choices = {
        "batch_size": batch_size, "dtype": dtype, "phase": phase, "attention": attention,
        "compile": compile_mode, "optimizer": optimizer, "checkpointing": checkpointing, "accumulation": accumulation,
        "seed": seed,
    }  # fmt: skip
    # Which preset stands in for none is known with the device: any with many layers tells whether the rest is sound.
    stand_in = sizes if model is not None or layers is not None else {**sizes, "layers": 1000}
    options.workload_from(
        "tiny" if model is None else model, stand_in, {**choices, "seq_len": 1 if seq_len is None else seq_len}
    )
    settings = options.settings_from(warmup, steps, seconds, no_profile)
    traced = options.trace_from(trace, trace_steps, trace_stacks)
    recorded = options.memory_from(memory, memory_stacks)
    limit = parse_bytes(memory_limit) if memory_limit else None
    peak = parse_flops_per_s(peak_flops) if peak_flops else None

    from stepscope.measure.device import resolve_device  # torch, only now that the input is known to be sound
    from stepscope.studies.step import StepRequest, measure_step

    on_gpu = resolve_device(device).type == "cuda"
    workload = options.workload_from(
        model if model is not None else "small" if on_gpu else "tiny",
        sizes,
        {**choices, "seq_len": seq_len if seq_len is not None else (512 if on_gpu else 128)},
    )
    request = StepRequest(
        workload=workload, settings=settings, device=device, out=str(out), tag=tag,
        memory_limit_bytes=limit, peak_flops_per_s=peak, trace=traced, memory=recorded,
    )  # fmt: skip
    with stdout_kept_clean(), progress() as tell:
        measured, directory = measure_step(request, tell)
    for capture in measured.evidence.captures:
        if capture.failure:
            warn(f"no {capture.tool} trace: {capture.failure}")
    _print(measured, directory, json)
    raise typer.Exit(exit_code(measured))


def exit_code(measured: Run) -> int:
    """0 done, 1 measured but a check failed, 3 the device failed, 130 interrupted."""
    if measured.status == "interrupted" or (measured.status == "done" and measured.failure is not None):
        return EXIT_INTERRUPTED
    if measured.status != "done":
        return EXIT_DEVICE_FAILED
    return EXIT_CHECK_FAILED if worst(measured.findings) == "error" else EXIT_DONE


def _print(measured: Run, directory: Path, json: bool) -> None:
    """The run, and what its trace and its memory say, where it kept them and this machine can read them."""
    summary, explained = _summary_of_trace(measured, directory), _explained_memory(measured, directory)
    if json:
        from stepscope.core.run_directory import encode_run

        text = encode_run(measured)
        if summary is not None or explained is not None:
            import msgspec

            fields = msgspec.json.decode(text)
            if summary is not None:
                from stepscope.analysis.trace_checks import check_trace
                from stepscope.cli.trace import summary_as_json

                fields["trace"] = summary_as_json(summary, check_trace(summary))
            if explained is not None:
                from stepscope.memory.at_moment import moment_at
                from stepscope.memory.memory_json import memory_as_json

                fields["memory"] = memory_as_json(explained, moment_at(explained, None))
            text = msgspec.json.format(msgspec.json.encode(fields), indent=1) + b"\n"
        emit(text.decode())
        return
    from stepscope.report.terminal import render_run

    show(render_run(measured, str(directory)))
    if summary is not None:
        from stepscope.analysis.trace_checks import check_trace
        from stepscope.report.trace import render_trace

        emit("\n")
        show(render_trace(summary, check_trace(summary), str(directory)))
    if explained is not None:
        from stepscope.memory.at_moment import moment_at
        from stepscope.report.memory import render_memory

        emit("\n")
        show(render_memory(explained, moment_at(explained, None)))


def _summary_of_trace(measured: Run, directory: Path) -> "TraceSummary | None":
    if not any(capture.artifact in ("kineto", "nsys") for capture in measured.evidence.captures):
        return None
    try:
        from stepscope.cli.trace import load_summary

        return load_summary(directory)
    except ModuleNotFoundError as error:
        warn(f"the trace is kept, and read where {error.name} is installed: stepscope trace {directory}")
    except StepscopeError as error:
        warn(f"the trace is kept, and cannot be read: {error}")
    return None


def _explained_memory(measured: Run, directory: Path) -> "Explained | None":
    if "memory" not in measured.artifacts:
        return None
    try:
        from stepscope.memory.explain import explain
        from stepscope.memory.snapshot import read_snapshot

        return explain(read_snapshot(directory))
    except ModuleNotFoundError as error:
        warn(f"the memory snapshot is kept, and read where {error.name} is installed: stepscope memory {directory}")
    except StepscopeError as error:
        warn(f"the memory snapshot is kept, and cannot be read: {error}")
    return None
