"""Checks of the measurement: do the times mean what they say, and were the conditions right?

The numbers in brackets are the rows of docs/measuring.md, where each mistake is described as seen in the wild.
"""

import statistics
from collections.abc import Iterator

from stepscope.core.answer import Finding, error, note, warning
from stepscope.core.environment import Environment, GpuReading
from stepscope.core.formulas.transformer import parameter_count
from stepscope.core.model_config import PRESETS
from stepscope.core.range_names import PHASES, STEP
from stepscope.core.run import Run
from stepscope.core.samples import MINIMUM_FOR_INTERVAL, Samples
from stepscope.core.units import counted, format_bytes, format_rate, format_seconds, format_share
from stepscope.core.workloads import TextbookWorkload, by_sizes
from stepscope.runs import metrics

_FEW = 5
"""Below so many steps, the first is a large part of any median."""


def impossible_times(run: Run) -> Iterator[Finding]:
    """[1] The device's own time of a step's phases cannot exceed the synchronised time of that step; [17] no phase can
    run faster than the peak of the devices that share it."""
    step = run.samples.get(STEP)
    phases = [run.samples[name].values_s for name in PHASES if name in run.samples]
    if step is not None and step.count and phases:
        sums = [sum(values) for values in zip(*phases, strict=False)]
        # 5 % and 50 us: the resolution of two clocks. Half of the steps must be over, so that no hiccup is a verdict.
        over = [total > 1.05 * whole + 50e-6 for total, whole in zip(sums, step.values_s, strict=False)]
        if sum(over) > len(over) / 2:
            step_s, phases_s = statistics.median(step.values_s), statistics.median(sums)
            yield error(
                "timer-stopped-early",
                f"The step's timer stopped after {format_seconds(step_s)}, but its phases kept the device busy for "
                f"{format_seconds(phases_s)}: it did not wait for the device.",
                remedy="synchronise the device before reading the host's clock",
                evidence={"step_s": step_s, "phases_s": phases_s},
            )
    peak, devices = metrics.peak_flops_per_s(run), metrics.devices(run)
    for name, work in run.work.items():
        phase_s = metrics.median_s(run, name)
        if peak and run.device_spec and phase_s and work.flops / phase_s > 1.02 * peak:
            rate = work.flops / phase_s
            whose = f"the {devices} devices' peak" if devices > 1 else "the peak"
            yield error(
                "impossible-rate",
                f"{name} at {format_seconds(phase_s)} would be {format_rate(rate, 'FLOP/s')}, above {whose} "
                f"of {format_rate(peak, 'FLOP/s')} ({run.device_spec.source}).",
                remedy="the time, the FLOP convention or the stated peak is wrong",
                evidence={"phase": name, "flops_per_s": rate, "peak_flops_per_s": peak},
            )
            return


def beyond_the_ceiling(run: Run) -> Iterator[Finding]:
    """[17] A utilisation above one says that the denominator is wrong."""
    utilisation = metrics.mfu_measured(run)
    ceiling = run.ceilings.matmul_for(run.workload.dtype) if run.ceilings else None
    if utilisation is not None and ceiling is not None and utilisation > 1.05:
        yield warning(
            "beyond-the-ceiling",
            f"The step runs at {utilisation:.1f} times the best matrix product measured on this device "
            f"({format_rate(ceiling.rate, 'FLOP/s')}, {ceiling.operation}): that ceiling is too low.",
            remedy="measure it again on a quiet machine: stepscope device --again",
            evidence={"utilisation": utilisation, "ceiling_flops_per_s": ceiling.rate},
        )


def not_steady(run: Run) -> Iterator[Finding]:
    """[2] Samples that drift, or first ones far from the rest, are no sample of one quantity."""
    samples = run.samples.get(STEP)
    if samples is None or not samples.median_s:
        return
    slow = _slow_steps(samples)
    trend = samples.trend()
    if slow is not None:
        which, slow_s, rest, rest_s = slow
        yield warning(
            "not-steady",
            f"{which} took {format_seconds(slow_s)}, {slow_s / rest_s:,.1f} times {rest} of "
            f"{format_seconds(rest_s)}, after {counted(len(samples.warmup_s), 'warm-up step')}.",
            remedy=_warm_up_more(run),
            evidence={"first_s": slow_s, "median_s": rest_s, "warmup_steps": len(samples.warmup_s)},
        )
    elif trend and trend.p_value < 0.01 and abs(trend.relative_change) > 0.05:
        direction = "slower" if trend.relative_change > 0 else "faster"
        yield warning(
            "not-steady",
            f"The steps became {direction}, by {format_share(abs(trend.relative_change))} over "
            f"{samples.count} steps (Mann-Kendall p = {trend.p_value:.2g}, autocorrelation allowed for).",
            remedy="warm up longer, and look at clocks and temperature",
            evidence={"relative_change": trend.relative_change, "p_value": trend.p_value},
        )


def _slow_steps(samples: Samples) -> tuple[str, float, str, float] | None:
    """Steps that take far longer than the rest, their time, what they are compared with, and its time: the first ones,
    or any of so few that there is no telling which. None where there are none."""
    values, median_s = samples.values_s, samples.median_s or 0.0
    if samples.count >= _FEW:
        if values[0] > 1.5 * median_s:
            return "The first step", values[0], "the median", median_s
        head_s = statistics.median(values[:3])
        if head_s > 1.2 * median_s:
            return "The first three steps, by their median,", head_s, "the median", median_s
        return None
    if samples.count < 2:
        return None
    # Noise does not double a step. The slowest is left out of the median, of which it would be a large part.
    at = values.index(max(values))
    slow_s, rest_s = values[at], statistics.median(values[:at] + values[at + 1 :])
    if not slow_s > 2 * rest_s > 0:
        return None
    which = "The first step" if at == 0 else f"Step {at + 1} of {samples.count}"
    return which, slow_s, "the median of the others" if samples.count > 2 else "the other", rest_s


def _warm_up_more(run: Run) -> str:
    """How steps are measured later: a watched loop has no option for its warm-up."""
    if run.evidence.loop is not None:
        return "measure later steps: --steps FIRST:END"
    return "warm up more: leave --warmup out, or raise it"


def compiled_while_measured(run: Run) -> Iterator[Finding]:
    """[26] What is compiled during a measured step is in its time."""
    compiled, step = run.evidence.compiled_while_measured, run.samples.get(STEP)
    if compiled is None or step is None or not step.count:
        return
    kinds = {
        "frame": compiled.frames,
        "graph": compiled.graphs,
        "CUDA graph recording": compiled.recordings,
        "Triton kernel": compiled.kernels,
        "kernel tuning": compiled.tunings,
    }
    what = [f"{count} {name}{'s' if count > 1 else ''}" for name, count in kinds.items() if count]
    if not what:
        return
    spent = f" (dynamo: {format_seconds(compiled.compile_s)})" if compiled.compile_s else ""
    figures = ("frames", "graphs", "recordings", "kernels", "tunings", "compile_s")
    yield error(
        "compiled-while-measured",
        f"While the {step.count} measured steps ran, this was compiled: {', '.join(what)}{spent}. It is in "
        f"their times; the longest took {format_seconds(max(step.values_s))}.",
        remedy=_warm_up_more(run),
        evidence={name: getattr(compiled, name) for name in figures},
    )


def sample_of_steps(run: Run) -> Iterator[Finding]:
    """[2] With few samples, neither drift nor spread can be judged; warm-up that reached its cap before two windows of
    steps agreed. [25] Steps so much like their neighbours that few of them are worth an independent one. [20] Samples
    that scatter: the middle half of a few is one or two of them. On a quiet host that is no doubt where the median is
    known all the same."""
    samples, loop = run.samples.get(STEP), run.evidence.loop
    if samples is None or not samples.count:
        return
    if samples.count < 8:
        yield note(
            "few-samples",
            f"{counted(samples.count, 'step')} {'is' if samples.count == 1 else 'are'} too few to test for drift.",
            remedy=f"measure at least 8: {'--steps FIRST:END' if loop is not None else 'raise --steps'}",
            evidence={"samples": samples.count},
        )
    enough = samples.count >= MINIMUM_FOR_INTERVAL
    if enough and samples.why_no_interval is not None:
        # A watched loop goes on for as long as its script does.
        how = "--steps FIRST:END" if loop is not None else "raise --steps, or leave it out and raise --seconds"
        yield note(
            "correlated-samples",
            f"How exact the median is cannot be told: {samples.why_no_interval}.",
            remedy=f"measure more steps: {how}",
            evidence={
                "samples": samples.count,
                "effective_samples": samples.effective_count,
                "autocorrelation": samples.autocorrelation,
            },
        )
    # Where so many warm-up steps were asked for, they were run whatever they showed.
    if run.warmup_steady is False and run.settings.warmup_floor != run.settings.warmup_cap:
        yield note(
            "warm-up-unsettled",
            f"Warm-up ended after {counted(len(samples.warmup_s), 'step')}, at its cap, "
            "before two windows of steps had the same median within 3 %.",
            remedy="the interval of the median says how much it matters",
            evidence={"warmup_steps": len(samples.warmup_s)},
        )
    if enough and samples.spread is not None and samples.spread > 0.1:
        host = run.environment.host if run.environment is not None else None
        others = host.other_cores if host is not None else None
        quiet = others is not None and run.environment is not None and others < 0.1 * run.environment.cpu_cores
        interval = samples.interval()
        remedy = "measure more steps (--steps), on a quieter machine"
        if quiet:  # What else ran is not the cause.
            remedy = "measure more steps (--steps): no other process took part, the steps themselves differ"
        fewest, most = (loop and loop.backwards_between) or (0, 0)
        # The last micro-batches of an epoch are fewer. How often a closure is evaluated is the optimizer's choice.
        if loop and fewest != most and not loop.evaluations:
            ran = f"they ran {fewest} to {most} backwards"
            remedy = f"time steps of one length: {ran}; drop_last, or --steps FIRST:END, helps"
        elif quiet and interval is not None and interval.half_width <= 0.05 * (samples.median_s or 0.0):
            return
        yield warning(
            "wide-spread",
            f"The middle half of the steps spreads over {format_share(samples.spread)} of the median, "
            f"{samples.outliers} of {samples.count} are outliers.",
            remedy=remedy,
            evidence={"spread": samples.spread, "outliers": samples.outliers, "samples": samples.count},
        )


def profiled_step(run: Run) -> Iterator[Finding]:
    """[20] A step that waits for the host is a measurement of the host. [22] A profiled step is not the step."""
    profile, step = run.evidence.profile, format_seconds(metrics.median_s(run, STEP) or 0)
    share, slowdown = metrics.launch_bound_share(run), metrics.profiler_slowdown(run)
    if profile is not None and share is not None and share >= 0.2:
        yield note(
            "launch-bound",
            f"The GPU had nothing to run for {format_share(share)} of the step: {profile.kernel_launches} kernels in "
            f"{step}, so the host's speed sets the time.",
            remedy="fewer, larger launches: --compile reduce-overhead, --optimizer adamw-fused, a larger batch",
            evidence={"share": share, "kernel_launches": profile.kernel_launches},
        )
    if profile is not None and slowdown is not None and slowdown >= 1.2:
        yield note(
            "profiler-overhead",
            f"Under the profiler the step takes {format_seconds(profile.step_s)}, {slowdown:.1f} times the unprofiled "
            f"{step}.",
            remedy="take times from the unprofiled samples, shares from the profile",
            evidence={"slowdown": slowdown, "profiled_s": profile.step_s},
        )


# Checks of the conditions: input, machine, company, and names.


def unvaried_input(run: Run) -> Iterator[Finding]:
    """[19] Zeros or one repeated token run faster than data, and one batch over and over measures the cache."""
    observation = run.evidence.observation
    if observation is None or observation.distinct_tokens is None or observation.distinct_batches is None:
        return

    def distinct_if_random(workload: TextbookWorkload) -> float:
        vocabulary = workload.model.vocabulary
        return vocabulary * (1 - (1 - 1 / vocabulary) ** (workload.tokens // workload.token_parts))

    expected = by_sizes(run.workload, distinct_if_random) or 0.0
    if observation.distinct_tokens < 0.5 * expected:
        yield error(
            "unvaried-input",
            f"The batch holds {observation.distinct_tokens} distinct tokens where {expected:.0f} are expected "
            "of random ones: constant input runs faster than data.",
            remedy="feed random tokens",
            evidence={"distinct_tokens": observation.distinct_tokens, "expected": round(expected)},
        )
    elif observation.distinct_batches < 2:
        of_factory = bool(run.workload.factory)  # which may well have one batch
        rotate = "let the factory give a list of batches, which the steps then rotate through"
        yield (note if of_factory else warning)(
            "unvaried-input",
            "Every step ran on the same batch.",
            remedy=rotate if of_factory else "rotate through several batches",
            evidence={"distinct_batches": observation.distinct_batches},
        )


def machine(run: Run) -> Iterator[Finding]:
    """[20] Power cap and heat lower the clocks; another process on the same GPU; other work on the host, which slows a
    CPU step, and a GPU step that waits for launches."""
    environment = run.environment
    if environment is None:
        return
    if environment.before is not None and environment.after is not None:
        yield from _clocks_held_down(environment, environment.before, environment.after)
    readings = [reading for reading in (environment.before, environment.after) if reading is not None]
    if others := max((reading.other_processes or 0 for reading in readings), default=0):
        yield warning(
            "gpu-shared",
            f"{others} other compute process{'es' if others > 1 else ''} held this GPU during the run.",
            remedy="measure on a GPU of your own, or stop them",
            evidence={"other_processes": others},
        )
    if environment.host is None or environment.host.other_cores is None:
        return
    cores = environment.host.other_cores
    if run.shared is not None:  # the other ranks of this host are no others
        here = sum(figures.host == run.shared.ranks[0].host for figures in run.shared.ranks)
        cores -= (here - 1) * (environment.host.own_cores or 0.0)
    if cores >= 0.25 * environment.cpu_cores:
        yield warning(
            "host-busy",
            f"Other processes kept {cores:.1f} of {environment.cpu_cores} cores busy during the run.",
            remedy="stop them and measure again",
            evidence={"other_cores": cores, "cpu_cores": environment.cpu_cores},
        )


def _clocks_held_down(environment: Environment, before: GpuReading, after: GpuReading) -> Iterator[Finding]:
    """Clocks that a cap, heat or a setting kept low. Readings while the steps ran count before the one after them."""
    between_s = after.read_at_s - before.read_at_s if before.read_at_s and after.read_at_s else 0.0
    shares = {}
    for reason, start, end in (
        ("the power cap", before.power_limited_s, after.power_limited_s),
        ("heat", before.thermal_limited_s, after.thermal_limited_s),
    ):
        if start is not None and end is not None and between_s > 0:
            shares[reason] = (end - start) / between_s
    reason, share = max(shares.items(), key=lambda item: item[1], default=("", 0.0))
    reasons = ", ".join(after.slowdown_reasons)
    running = environment.during.sm_clock_mhz if environment.during else None
    clock_mhz = running.median if running else after.sm_clock_mhz
    low = bool(clock_mhz and after.sm_clock_max_mhz and clock_mhz < 0.9 * after.sm_clock_max_mhz)
    if share < 0.05 and not reasons and not low:
        return
    when = f"while the steps ran ({running.lowest:.0f} to {running.highest:.0f})" if running else "at the end"
    clock = f" SM clock {clock_mhz:.0f} of {after.sm_clock_max_mhz} MHz {when}." if clock_mhz else ""
    cause = f"{reason} for {format_share(share)} of the measured time" if share >= 0.05 else reasons
    say = warning if "slowdown" in reasons or (reason == "heat" and share >= 0.05) else note
    yield say(
        "clocks-held-down",
        f"Clocks were held down by {cause or 'a lower setting (no cap and no heat is reported)'}.{clock}",
        remedy="compare only with runs at the same limit",
        evidence={
            "share": share,
            "reasons": reasons,
            "sm_clock_mhz": clock_mhz,
            "power_limit_w": after.power_limit_w,
        },
    )


_SETTLED_STEPS = 4
"""Steps after which a step like them needs nothing new of the device: each of four batches was seen."""


def cache_given_back(run: Run) -> Iterator[Finding]:
    """[20] Where a step hardly fits, PyTorch's allocator gives its cache back to the device, and takes it again."""
    memory, steps = run.evidence.memory, run.samples.get(STEP)
    if memory is None or steps is None or not run.workload.may_run:
        return  # a user's loop may have batches of any shape
    before, peak = memory.reserved_before or 0, memory.reserved_peak or 0
    growth = peak - before
    if before and growth * 100 >= peak and len(steps.warmup_s) + steps.count >= _SETTLED_STEPS:
        yield warning(
            "cache-given-back",
            f"PyTorch's allocator took {format_bytes(growth)} from the device in a step like those before it: it gives "
            "its cache back within each step and takes it again, and the GPU waits.",
            remedy="leave it room: more checkpointing, smaller micro-batches, fewer blocks of selective-K",
            evidence={"taken_bytes": growth, "reserved_bytes": memory.reserved_peak},
        )


def model_changed(run: Run) -> Iterator[Finding]:
    """[23] A preset's name on other sizes; [27] what the config.json of a model asks for, and its step does not do."""
    model, preset = run.workload.sizes, PRESETS.get(run.workload.name)
    if preset is not None and model is not None and preset != model:
        changed = {name: (getattr(preset, name), size) for name, size in model.sizes.items()}
        differences = [f"{name} {size} (preset: {was})" for name, (was, size) in changed.items() if was != size]
        yield warning(
            "preset-changed",
            f"'{model.name}' here has {parameter_count(model):,} parameters, "
            f"the preset of that name {parameter_count(preset):,}: {', '.join(differences)}.",
            remedy="give the changed model a name of its own",
            evidence={"parameters": parameter_count(model), "preset_parameters": parameter_count(preset)},
        )
    if unmet := run.evidence.unmet:
        yield warning(
            "config-not-followed",
            f"Of the model's config.json, {'. '.join(unmet)}.",
            remedy="say the option that it names, or take the figures for what was made",
            evidence={"sentences": len(unmet)},
        )


def device_limits(run: Run) -> Iterator[Finding]:
    """[19] A step whose whole data fits the L2 cache measures the cache. [17] Without a known peak there is no
    utilisation."""
    environment, memory, dtype = run.environment, run.evidence.memory, run.workload.dtype
    if environment is None:
        return
    touched, cache = memory.allocated_peak if memory is not None else None, environment.l2_bytes
    if touched is not None and cache is not None and touched < cache:
        yield note(
            "cache-resident",
            f"All that the step holds at its peak ({format_bytes(touched)}) fits the L2 cache "
            f"({format_bytes(cache)}): memory traffic is the cache's.",
            remedy="a larger model or batch shows the memory's own speed",
            evidence={"touched_bytes": touched, "l2_bytes": cache},
        )
    has_peak = run.device_spec is not None and run.device_spec.peak_for(dtype)
    if run.samples and metrics.on_gpu(run) and not has_peak:
        yield note(
            "peak-unknown",
            f"No datasheet peak is known for {environment.device_name} in {dtype}, so no MFU against it is given.",
            remedy="state it with --peak-flops" if run.evidence.loop is None else "measure it: stepscope device",
            evidence={"device": environment.device_name},
        )
