"""Checks of the measurement: do the times mean what they say, and were the conditions right?

The numbers in brackets are the rows of docs/measuring.md, where each mistake is described as seen in the wild.
"""

import statistics

from stepscope.core.answer import Finding, error, note, warning
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


def timer_stopped_early(run: Run) -> Finding | None:
    """[1] The device's own time of a step's phases cannot exceed the synchronised time of that step."""
    step = run.samples.get(STEP)
    phases = [run.samples[name].values_s for name in PHASES if name in run.samples]
    if step is None or not step.count or not phases:
        return None
    sums = [sum(values) for values in zip(*phases, strict=False)]
    # 5 % and 50 us: the resolution of two clocks. Half of the steps must be over, so that no hiccup is a verdict.
    over = [total > 1.05 * whole + 50e-6 for total, whole in zip(sums, step.values_s, strict=False)]
    if sum(over) <= len(over) / 2:
        return None
    step_s, phases_s = statistics.median(step.values_s), statistics.median(sums)
    return error(
        "timer-stopped-early",
        f"The step's timer stopped after {format_seconds(step_s)}, but its phases kept the device busy for "
        f"{format_seconds(phases_s)}: it did not wait for the device.",
        remedy="synchronise the device before reading the host's clock",
        evidence={"step_s": step_s, "phases_s": phases_s},
    )


def impossible_rate(run: Run) -> Finding | None:
    """[1, 17] No phase can run faster than the peak of the devices that share it."""
    peak, devices = metrics.peak_flops_per_s(run), metrics.devices(run)
    for name, work in run.work.items():
        phase_s = metrics.median_s(run, name)
        if peak and run.device_spec and phase_s and work.flops / phase_s > 1.02 * peak:
            rate = work.flops / phase_s
            whose = f"the {devices} devices' peak" if devices > 1 else "the peak"
            return error(
                "impossible-rate",
                f"{name} at {format_seconds(phase_s)} would be {format_rate(rate, 'FLOP/s')}, above {whose} "
                f"of {format_rate(peak, 'FLOP/s')} ({run.device_spec.source}).",
                remedy="the time, the FLOP convention or the stated peak is wrong",
                evidence={"phase": name, "flops_per_s": rate, "peak_flops_per_s": peak},
            )
    return None


def beyond_the_ceiling(run: Run) -> Finding | None:
    """[17] A utilisation above one says that the denominator is wrong."""
    utilisation = metrics.mfu_measured(run)
    ceiling = run.ceilings.matmul_for(run.workload.dtype) if run.ceilings else None
    if utilisation is None or ceiling is None or utilisation <= 1.05:
        return None
    return warning(
        "beyond-the-ceiling",
        f"The step runs at {utilisation:.1f} times the best matrix product measured on this device "
        f"({format_rate(ceiling.rate, 'FLOP/s')}, {ceiling.operation}): that ceiling is too low.",
        remedy="measure it again on a quiet machine: stepscope device --again",
        evidence={"utilisation": utilisation, "ceiling_flops_per_s": ceiling.rate},
    )


def not_steady(run: Run) -> Finding | None:
    """[2] Samples that drift, or first ones far from the rest, are no sample of one quantity."""
    samples = run.samples.get(STEP)
    if samples is None or not samples.median_s:
        return None
    slow = _slow_step(samples, _warm_up_more(run))
    if slow is not None:
        return slow
    trend = samples.trend()
    if trend and trend.p_value < 0.01 and abs(trend.relative_change) > 0.05:
        direction = "slower" if trend.relative_change > 0 else "faster"
        return warning(
            "not-steady",
            f"The steps became {direction}, by {format_share(abs(trend.relative_change))} over "
            f"{samples.count} steps (Mann-Kendall p = {trend.p_value:.2g}, autocorrelation allowed for).",
            remedy="warm up longer, and look at clocks and temperature",
            evidence={"relative_change": trend.relative_change, "p_value": trend.p_value},
        )
    return None


def _slow_step(samples: Samples, remedy: str) -> Finding | None:
    """Steps that take far longer than the rest: the first ones, or any of so few that there is no telling which."""
    found = _slow_start(samples) if samples.count >= _FEW else _slow_among_few(samples)
    if found is None:
        return None
    which, slow_s, rest, rest_s = found
    return warning(
        "not-steady",
        f"{which} took {format_seconds(slow_s)}, {slow_s / rest_s:,.1f} times {rest} of "
        f"{format_seconds(rest_s)}, after {counted(len(samples.warmup_s), 'warm-up step')}.",
        remedy=remedy,
        evidence={"first_s": slow_s, "median_s": rest_s, "warmup_steps": len(samples.warmup_s)},
    )


def _warm_up_more(run: Run) -> str:
    """How steps are measured later: a watched loop has no option for its warm-up."""
    if run.evidence.loop is not None:
        return "measure later steps: --steps FIRST:END"
    return "warm up more: leave --warmup out, or raise it"


def _spread_less(run: Run) -> str:
    """What narrows the spread: first what the steps themselves differ in, as the last micro-batches of an epoch do."""
    loop = run.evidence.loop
    fewest, most = (loop and loop.backwards_between) or (0, 0)
    if loop and fewest != most and not loop.evaluations:  # how often a closure is evaluated is the optimizer's choice
        return (
            f"time steps of one length: they ran {fewest} to {most} backwards; drop_last, or --steps FIRST:END, helps"
        )
    return "measure more steps (--steps), on a quieter machine"


def _slow_start(samples: Samples) -> tuple[str, float, str, float] | None:
    """What was slow at the start, its time, what it is compared with, and that time; None if nothing was slow."""
    first, head_s, median_s = samples.values_s[0], statistics.median(samples.values_s[:3]), samples.median_s or 0.0
    if first > 1.5 * median_s:
        return "The first step", first, "the median", median_s
    if head_s > 1.2 * median_s:
        return "The first three steps, by their median,", head_s, "the median", median_s
    return None


def _slow_among_few(samples: Samples) -> tuple[str, float, str, float] | None:
    """The slowest of a few steps, if it took over twice the median of the others. Noise does not double a step. It is
    left out of the median, of which it would otherwise be a large part."""
    if samples.count < 2:
        return None
    at = samples.values_s.index(max(samples.values_s))
    slow_s, rest_s = samples.values_s[at], statistics.median(samples.values_s[:at] + samples.values_s[at + 1 :])
    if not slow_s > 2 * rest_s > 0:
        return None
    which = "The first step" if at == 0 else f"Step {at + 1} of {samples.count}"
    return which, slow_s, "the median of the others" if samples.count > 2 else "the other", rest_s


def compiled_while_measured(run: Run) -> Finding | None:
    """[26] What is compiled during a measured step is in its time."""
    found = run.evidence.compiled_while_measured
    step = run.samples.get(STEP)
    if found is None or not found.count or step is None or not step.count:
        return None
    what = [
        f"{count} {name}{'s' if count > 1 else ''}"
        for count, name in (
            (found.frames, "frame"),
            (found.graphs, "graph"),
            (found.recordings, "CUDA graph recording"),
            (found.kernels, "Triton kernel"),
            (found.tunings, "kernel tuning"),
        )
        if count
    ]
    spent = f" (dynamo: {format_seconds(found.compile_s)})" if found.compile_s else ""
    return error(
        "compiled-while-measured",
        f"While the {step.count} measured steps ran, this was compiled: {', '.join(what)}{spent}. It is in "
        f"their times; the longest took {format_seconds(max(step.values_s))}.",
        remedy=_warm_up_more(run),
        evidence={
            "frames": found.frames,
            "graphs": found.graphs,
            "recordings": found.recordings,
            "kernels": found.kernels,
            "tunings": found.tunings,
            "compile_s": found.compile_s,
        },
    )


def warm_up_unsettled(run: Run) -> Finding | None:
    """[2] Warm-up that reached its cap before two windows of steps agreed."""
    samples = run.samples.get(STEP)
    if run.warmup_steady is not False or samples is None or not samples.count:
        return None
    if run.settings.warmup_floor == run.settings.warmup_cap:
        return None  # so many steps were asked for, whatever they showed
    return note(
        "warm-up-unsettled",
        f"Warm-up ended after {counted(len(samples.warmup_s), 'step')}, at its cap, "
        "before two windows of steps had the same median within 3 %.",
        remedy="the interval of the median says how much it matters",
        evidence={"warmup_steps": len(samples.warmup_s)},
    )


def few_samples(run: Run) -> Finding | None:
    """[2] With so few samples, neither drift nor spread can be judged."""
    samples = run.samples.get(STEP)
    if samples is None or not samples.count or samples.count >= 8:
        return None
    return note(
        "few-samples",
        f"{counted(samples.count, 'step')} {'is' if samples.count == 1 else 'are'} too few to test for drift.",
        remedy="measure at least 8: raise --steps",
        evidence={"samples": samples.count},
    )


def correlated_samples(run: Run) -> Finding | None:
    """[25] Steps so much like their neighbours that few of them are worth an independent one."""
    samples = run.samples.get(STEP)
    if samples is None or samples.count < MINIMUM_FOR_INTERVAL or samples.why_no_interval is None:
        return None
    # A watched loop goes on for as long as its script does.
    how = "--steps FIRST:END" if run.evidence.loop is not None else "raise --steps, or leave it out and raise --seconds"
    return note(
        "correlated-samples",
        f"How exact the median is cannot be told: {samples.why_no_interval}.",
        remedy=f"measure more steps: {how}",
        evidence={
            "samples": samples.count,
            "effective_samples": samples.effective_count,
            "autocorrelation": samples.autocorrelation,
        },
    )


def wide_spread(run: Run) -> Finding | None:
    """[20] Samples that scatter. The middle half of a few is one or two of them."""
    samples = run.samples.get(STEP)
    if samples is None or samples.count < MINIMUM_FOR_INTERVAL or samples.spread is None:
        return None
    if samples.spread <= 0.1:
        return None
    return warning(
        "wide-spread",
        f"The middle half of the steps spreads over {format_share(samples.spread)} of the median, "
        f"{samples.outliers} of {samples.count} are outliers.",
        remedy=_spread_less(run),
        evidence={"spread": samples.spread, "outliers": samples.outliers, "samples": samples.count},
    )


def launch_bound(run: Run) -> Finding | None:
    """[20] A step that waits for the host is a measurement of the host."""
    share = metrics.launch_bound_share(run)
    if share is None or share < 0.2 or run.evidence.profile is None:
        return None
    return note(
        "launch-bound",
        f"The GPU had nothing to run for {format_share(share)} of the step: {run.evidence.profile.kernel_launches} "
        f"kernels in {format_seconds(metrics.median_s(run, STEP) or 0)}, so the host's speed sets the time.",
        remedy="fewer, larger launches: --compile reduce-overhead, --optimizer adamw-fused, a larger batch",
        evidence={"share": share, "kernel_launches": run.evidence.profile.kernel_launches},
    )


def profiler_overhead(run: Run) -> Finding | None:
    """[22] A profiled step is not the step."""
    slowdown, profile = metrics.profiler_slowdown(run), run.evidence.profile
    if slowdown is None or profile is None or slowdown < 1.2:
        return None
    return note(
        "profiler-overhead",
        f"Under the profiler the step takes {format_seconds(profile.step_s)}, {slowdown:.1f} times the "
        f"unprofiled {format_seconds(metrics.median_s(run, STEP) or 0)}.",
        remedy="take times from the unprofiled samples, shares from the profile",
        evidence={"slowdown": slowdown, "profiled_s": profile.step_s},
    )


# Checks of the conditions: input, machine, company, and names.
#
# The numbers in brackets are the rows of docs/measuring.md, where each mistake is described as seen in the wild.


def unvaried_input(run: Run) -> Finding | None:
    """[19] Zeros or one repeated token run faster than data, and one batch over and over measures the cache."""
    observation = run.evidence.observation
    if observation is None or observation.distinct_tokens is None or observation.distinct_batches is None:
        return None
    expected = by_sizes(run.workload, _distinct_if_random) or 0.0
    if observation.distinct_tokens < 0.5 * expected:
        return error(
            "unvaried-input",
            f"The batch holds {observation.distinct_tokens} distinct tokens where {expected:.0f} are expected "
            "of random ones: constant input runs faster than data.",
            remedy="feed random tokens",
            evidence={"distinct_tokens": observation.distinct_tokens, "expected": round(expected)},
        )
    if observation.distinct_batches < 2:
        if run.workload.factory:  # a factory may well have one batch
            return note(
                "unvaried-input",
                "Every step ran on the same batch.",
                remedy="let the factory give a list of batches, which the steps then rotate through",
                evidence={"distinct_batches": observation.distinct_batches},
            )
        return warning(
            "unvaried-input",
            "Every step ran on the same batch.",
            remedy="rotate through several batches",
            evidence={"distinct_batches": observation.distinct_batches},
        )
    return None


def _distinct_if_random(workload: TextbookWorkload) -> float:
    """The number of distinct tokens that a batch of uniformly random ones is expected to hold."""
    vocabulary = workload.model.vocabulary
    return vocabulary * (1 - (1 - 1 / vocabulary) ** (workload.tokens // workload.token_parts))


def cache_resident(run: Run) -> Finding | None:
    """[19] A step whose whole data fits the L2 cache measures the cache."""
    environment, memory = run.environment, run.evidence.memory
    if environment is None or environment.l2_bytes is None or memory is None:
        return None
    touched = memory.allocated_peak
    if touched is None or touched >= environment.l2_bytes:
        return None
    return note(
        "cache-resident",
        f"All that the step holds at its peak ({format_bytes(touched)}) fits the L2 cache "
        f"({format_bytes(environment.l2_bytes)}): memory traffic is the cache's.",
        remedy="a larger model or batch shows the memory's own speed",
        evidence={"touched_bytes": touched, "l2_bytes": environment.l2_bytes},
    )


def clocks_held_down(run: Run) -> Finding | None:
    """[20] Power cap and heat lower the clocks. Readings while the steps ran count before the one after them."""
    environment = run.environment
    if environment is None or environment.before is None or environment.after is None:
        return None
    before, after = environment.before, environment.after
    between_s = after.read_at_s - before.read_at_s if before.read_at_s and after.read_at_s else 0.0
    shares = {}
    for reason, start, end in (
        ("the power cap", before.power_limited_s, after.power_limited_s),
        ("heat", before.thermal_limited_s, after.thermal_limited_s),
    ):
        if start is not None and end is not None and between_s > 0:
            shares[reason] = (end - start) / between_s
    reason, share = max(shares.items(), key=lambda item: item[1], default=("", 0.0))
    named = ", ".join(after.slowdown_reasons)
    running = environment.during.sm_clock_mhz if environment.during else None
    clock_mhz = running.median if running else after.sm_clock_mhz
    low = bool(clock_mhz and after.sm_clock_max_mhz and clock_mhz < 0.9 * after.sm_clock_max_mhz)
    if share < 0.05 and not named and not low:
        return None
    when = f"while the steps ran ({running.lowest:.0f} to {running.highest:.0f})" if running else "at the end"
    clock = f" SM clock {clock_mhz:.0f} of {after.sm_clock_max_mhz} MHz {when}." if clock_mhz else ""
    cause = f"{reason} for {format_share(share)} of the measured time" if share >= 0.05 else named
    cause = cause or "a lower setting (no cap and no heat is reported)"
    return Finding(
        kind="clocks-held-down",
        severity="warning" if "slowdown" in named or (reason == "heat" and share >= 0.05) else "note",
        sentence=f"Clocks were held down by {cause}.{clock}",
        remedy="compare only with runs at the same limit",
        evidence={
            "share": share,
            "reasons": named,
            "sm_clock_mhz": clock_mhz,
            "power_limit_w": after.power_limit_w,
        },
    )


def gpu_shared(run: Run) -> Finding | None:
    """[20] Another process on the same GPU."""
    environment = run.environment
    if environment is None:
        return None
    readings = [r for r in (environment.before, environment.after) if r is not None]
    others = max((r.other_processes or 0 for r in readings), default=0)
    if not others:
        return None
    return warning(
        "gpu-shared",
        f"{others} other compute process{'es' if others > 1 else ''} held this GPU during the run.",
        remedy="measure on a GPU of your own, or stop them",
        evidence={"other_processes": others},
    )


def host_busy(run: Run) -> Finding | None:
    """[20] Other work on the host slows a CPU step, and a GPU step that waits for launches."""
    environment = run.environment
    if environment is None or environment.host is None or environment.host.other_cores is None:
        return None
    others = environment.host.other_cores
    if run.shared is not None:  # the other ranks of this host are no others
        here = sum(figures.host == run.shared.ranks[0].host for figures in run.shared.ranks)
        others -= (here - 1) * (environment.host.own_cores or 0.0)
    if others < 0.25 * environment.cpu_cores:
        return None
    return warning(
        "host-busy",
        f"Other processes kept {others:.1f} of {environment.cpu_cores} cores busy during the run.",
        remedy="stop them and measure again",
        evidence={"other_cores": others, "cpu_cores": environment.cpu_cores},
    )


_SETTLED_STEPS = 4
"""Steps after which a step like them needs nothing new of the device: each of four batches was seen."""


def cache_given_back(run: Run) -> Finding | None:
    """[20] Where a step hardly fits, PyTorch's allocator gives its cache back to the device, and takes it again."""
    memory, steps = run.evidence.memory, run.samples.get(STEP)
    if memory is None or steps is None or not run.workload.may_run:
        return None  # a loop of the user's own may have batches of any shape
    before, peak = memory.reserved_before, memory.reserved_peak
    taken = (peak or 0) - (before or 0)
    if not before or taken * 100 < (peak or 0) or len(steps.warmup_s) + steps.count < _SETTLED_STEPS:
        return None
    return warning(
        "cache-given-back",
        f"PyTorch's allocator took {format_bytes(taken)} from the device in a step like those before it: it gives its "
        "cache back within each step and takes it again, and the GPU waits.",
        remedy="leave it room: more checkpointing, smaller micro-batches, fewer blocks of selective-K",
        evidence={"taken_bytes": taken, "reserved_bytes": peak},
    )


def config_not_followed(run: Run) -> Finding | None:
    """[27] What the config.json of a model asks for, and its step does not do."""
    if not run.evidence.unmet:
        return None
    return warning(
        "config-not-followed",
        f"Of the model's config.json, {'. '.join(run.evidence.unmet)}.",
        remedy="say the option that it names, or take the figures for what was made",
        evidence={"sentences": len(run.evidence.unmet)},
    )


def peak_unknown(run: Run) -> Finding | None:
    """[17] Without a known peak there is no utilisation."""
    environment = run.environment
    if environment is None or not run.samples or environment.device_type == "cpu":
        return None
    if run.device_spec is not None and run.device_spec.peak_for(run.workload.dtype):
        return None
    return note(
        "peak-unknown",
        f"No datasheet peak is known for {environment.device_name} in {run.workload.dtype}, "
        "so no MFU against it is given.",
        remedy="state it with --peak-flops",
        evidence={"device": environment.device_name},
    )


def preset_changed(run: Run) -> Finding | None:
    """[23] A preset's name on other sizes."""
    model, preset = run.workload.sizes, PRESETS.get(run.workload.name)
    if preset is None or preset == model or model is None:
        return None
    changed = {f: (getattr(preset, f), size) for f, size in model.sizes.items() if getattr(preset, f) != size}
    differences = ", ".join(f"{field} {size} (preset: {known})" for field, (known, size) in changed.items())
    return warning(
        "preset-changed",
        f"'{model.name}' here has {parameter_count(model):,} parameters, "
        f"the preset of that name {parameter_count(preset):,}: {differences}.",
        remedy="give the changed model a name of its own",
        evidence={"parameters": parameter_count(model), "preset_parameters": parameter_count(preset)},
    )
