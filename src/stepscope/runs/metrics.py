"""Figures derived from a run: rates, utilisation, shares. Each is None where the run does not support it."""

from stepscope.core.range_names import BACKWARD, FORWARD, FORWARD_BACKWARD, STEP, TIMED
from stepscope.core.run import Run
from stepscope.core.samples import FEWEST_FOR_PERCENTILE, Samples
from stepscope.runs.communication import figures_of

WHILE_MEASURED = ("sm_clock_mhz", "power_w", "temperature_c")
"""The quantities of GpuSamples."""


def samples_of(run: Run, name: str) -> Samples | None:
    """Samples by name; `forward-backward` is the sum of the two phases, step by step."""
    if name == FORWARD_BACKWARD and name not in run.samples:
        forward, backward = run.samples.get(FORWARD), run.samples.get(BACKWARD)
        return forward.plus(backward) if forward and backward else None
    return run.samples.get(name)


def parts_of(run: Run) -> list[str]:
    """The names of the timed parts of the run's step: those that stepscope knows in their order, then a user's own."""
    known = [name for name in TIMED if name in run.samples]
    if FORWARD not in known and FORWARD_BACKWARD in run.samples:  # they take turns, as in a pipeline
        known = [FORWARD_BACKWARD, *known]
    return known + [name for name in run.samples if name not in (*TIMED, STEP, "host", FORWARD_BACKWARD)]


def memory_of(run: Run, field: str) -> int | None:
    """A figure of PhaseMemory, None where nobody counted."""
    return getattr(run.evidence.memory, field) if run.evidence.memory else None


def median_s(run: Run, name: str) -> float | None:
    """Median of the named samples."""
    samples = samples_of(run, name)
    return samples.median_s if samples else None


def tokens_per_s(run: Run) -> float | None:
    """Tokens of one step over the step's median time; None where its batch holds no tokens."""
    return _per_s(run, _tokens(run))


def _tokens(run: Run) -> int | None:
    """Tokens of one step: those that a watched loop's forwards took, where they differ in length."""
    loop = run.evidence.loop
    return loop.tokens if loop is not None and loop.tokens is not None else run.workload.tokens


def samples_per_s(run: Run) -> float | None:
    """Samples of one step over the step's median time; None where its batch is not known."""
    return _per_s(run, run.workload.batch_size)


def _per_s(run: Run, of_a_step: int | None) -> float | None:
    """So many of a step over its median time. Where steps run different numbers of forwards, those of all over the time
    of all."""
    loop, samples = run.evidence.loop, run.samples.get(STEP)
    if samples is None or not samples.median_s or not of_a_step:
        return None
    if loop is None or loop.forwards_mean is None or not loop.forwards:
        return of_a_step / samples.median_s
    return of_a_step * loop.forwards_mean / loop.forwards / (samples.mean_s or samples.median_s)


def model_flops(run: Run) -> int | None:
    """Model FLOPs of one step, by the convention stored with the run's work."""
    return sum(work.flops for work in run.work.values()) or None


def model_flops_per_s(run: Run) -> float | None:
    """Model FLOPs of a step over its median time."""
    step_s, flops = median_s(run, STEP), model_flops(run)
    return flops / step_s if step_s and flops else None


def mfu_datasheet(run: Run) -> float | None:
    """Model FLOPs utilisation against the datasheet's dense peak for the dtype of the matrix products."""
    rate, peak = model_flops_per_s(run), peak_flops_per_s(run)
    return rate / peak if rate and peak else None


def peak_flops_per_s(run: Run) -> float | None:
    """The datasheet's dense peak for the dtype of the matrix products, of all devices that share the step."""
    peak = run.device_spec.peak_for(run.workload.dtype) if run.device_spec else None
    return peak * devices(run) if peak else None


def mfu_measured(run: Run) -> float | None:
    """Model FLOPs utilisation against the best matrix product measured on this device."""
    rate = model_flops_per_s(run)
    ceiling = run.ceilings.matmul_for(run.workload.dtype) if run.ceilings else None
    return rate / (ceiling.rate * devices(run)) if rate and ceiling and ceiling.rate > 0 else None


def devices(run: Run) -> int:
    """How many devices like this one share the step: ranks on a CPU share that CPU."""
    return run.workload.ranks if _on_gpu(run) else 1


def host_share(run: Run) -> float | None:
    """Time the host needs to issue a step's work, over the step. Near 1, the host never gets ahead of the device."""
    host_s, step_s = median_s(run, "host"), median_s(run, STEP)
    return host_s / step_s if host_s and step_s and _on_gpu(run) else None


def launch_bound_share(run: Run) -> float | None:
    """Share of the step in which the device had no kernel to run: 1 - busy / step.

    Busy is the union of kernel times in the profiled step (kernels themselves do not slow down under the profiler),
    the step is the unprofiled median.
    """
    step_s = median_s(run, STEP)
    if not step_s or run.evidence.profile is None or not _on_gpu(run):
        return None
    return max(0.0, 1 - run.evidence.profile.busy_s / step_s)


def profiler_slowdown(run: Run) -> float | None:
    """Profiled step over the unprofiled median."""
    step_s = median_s(run, STEP)
    return run.evidence.profile.step_s / step_s if step_s and run.evidence.profile else None


def peak_bytes(run: Run) -> int | None:
    """Largest allocated peak of any phase."""
    return run.evidence.memory.allocated_peak if run.evidence.memory else None


def joules_per_step(run: Run) -> float | None:
    """Energy of one step; None where no counter was read, or where its steps took turns with another run's."""
    energy = run.evidence.energy
    return None if energy is None or run.beside is not None else energy.energy_j / energy.steps


def joules_per_token(run: Run) -> float | None:
    """Energy of one step over its tokens; None also where its batch holds no tokens."""
    joules, tokens = joules_per_step(run), _tokens(run)
    return joules / tokens if joules is not None and tokens else None


def while_measured(run: Run, quantity: str) -> float | None:
    """The median of a quantity of GpuSamples while the measured steps ran; None where nobody read it."""
    during = run.environment.during if run.environment else None
    extent = getattr(during, quantity) if during else None
    return extent.median if extent else None


def summarise(run: Run) -> dict[str, float | None]:
    """The figures that readers of the JSON look for first; seconds, bytes, per second, shares of one."""
    summary: dict[str, float | None] = {}
    for name in (STEP, *parts_of(run), "host"):
        samples = run.samples.get(name)
        if samples is None or not samples.count:
            continue
        interval = samples.interval()
        summary[f"{name}_median_s"] = samples.median_s
        summary[f"{name}_low_s"] = interval.low if interval else None
        summary[f"{name}_high_s"] = interval.high if interval else None
        summary[f"{name}_effective_samples"] = samples.effective_count
        summary[f"{name}_mean_s"] = samples.mean_s
        summary[f"{name}_stdev_s"] = samples.stdev_s
        summary |= {f"{name}_{percentile}_s": samples.percentile_s(percentile) for percentile in FEWEST_FOR_PERCENTILE}
    figures = {
        "tokens_per_s": tokens_per_s(run),
        "samples_per_s": samples_per_s(run),
        "model_flops": model_flops(run),
        "model_flops_per_s": model_flops_per_s(run),
        "mfu_datasheet": mfu_datasheet(run),
        "mfu_measured": mfu_measured(run),
        "host_share": host_share(run),
        "launch_bound_share": launch_bound_share(run),
        "profiler_slowdown": profiler_slowdown(run),
        "peak_bytes": peak_bytes(run),
        "joules_per_step": joules_per_step(run),
        "joules_per_token": joules_per_token(run),
        **{quantity: while_measured(run, quantity) for quantity in WHILE_MEASURED},
        **figures_of(run),
    }
    return {**summary, **figures}


def _on_gpu(run: Run) -> bool:
    return run.environment is not None and run.environment.device_type != "cpu"
