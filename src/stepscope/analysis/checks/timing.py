"""Checks of the times themselves: do they mean what they say?

The numbers in brackets are the rows of docs/measuring.md, where each mistake is described as seen in the wild.
"""

from stepscope.analysis import metrics
from stepscope.core.finding import Finding
from stepscope.core.run import Run
from stepscope.core.units import format_rate, format_seconds, format_share


def timer_stopped_early(run: Run) -> Finding | None:
    """[1] The device's own time of the phases cannot exceed the synchronised time of the step."""
    step_s = metrics.median_s(run, "step")
    phases = [metrics.median_s(run, name) for name in metrics.PHASE_NAMES]
    phases_s = sum(p for p in phases if p is not None)
    if not step_s or phases_s <= 1.05 * step_s + 50e-6:
        return None
    return Finding(
        kind="timer-stopped-early",
        severity="error",
        sentence=f"The step's timer stopped after {format_seconds(step_s)}, but its phases kept the device busy for "
        f"{format_seconds(phases_s)}: it did not wait for the device.",
        remedy="synchronise the device before reading the host's clock",
        evidence={"step_s": step_s, "phases_s": phases_s},
    )


def impossible_rate(run: Run) -> Finding | None:
    """[1, 17] No phase can run faster than the device's peak."""
    if run.device_spec is None:
        return None
    peak = run.device_spec.peak_for(run.workload.dtype)
    for name, work in run.work.items():
        phase_s = metrics.median_s(run, name)
        if peak and phase_s and work.flops / phase_s > 1.02 * peak:
            rate = work.flops / phase_s
            return Finding(
                kind="impossible-rate",
                severity="error",
                sentence=f"{name} at {format_seconds(phase_s)} would be {format_rate(rate, 'FLOP/s')}, above the peak "
                f"of {format_rate(peak, 'FLOP/s')} ({run.device_spec.source}).",
                remedy="the time, the FLOP convention or the stated peak is wrong",
                evidence={"phase": name, "flops_per_s": rate, "peak_flops_per_s": peak},
            )
    return None


def not_steady(run: Run) -> Finding | None:
    """[2] Samples that drift, or a first one far from the rest, are no sample of one quantity."""
    samples = run.samples.get("step")
    if samples is None or not samples.median_s:
        return None
    first = samples.values_s[0]
    if samples.count >= 3 and first > 1.5 * samples.median_s:
        return Finding(
            kind="not-steady",
            severity="warning",
            sentence=f"The first step took {format_seconds(first)}, {first / samples.median_s:.1f} times the median of "
            f"{format_seconds(samples.median_s)}, after {len(samples.warmup_s)} warm-up steps.",
            remedy="warm up more: leave --warmup out, or raise it",
            evidence={"first_s": first, "median_s": samples.median_s, "warmup_steps": len(samples.warmup_s)},
        )
    trend = samples.trend()
    if trend and trend.p_value < 0.01 and abs(trend.relative_change) > 0.05:
        direction = "slower" if trend.relative_change > 0 else "faster"
        return Finding(
            kind="not-steady",
            severity="warning",
            sentence=f"The steps grew {direction} by {format_share(abs(trend.relative_change))} over "
            f"{samples.count} steps (Mann-Kendall p = {trend.p_value:.1g}).",
            remedy="warm up longer, and look at clocks and temperature",
            evidence={"relative_change": trend.relative_change, "p_value": trend.p_value},
        )
    return None


def wide_spread(run: Run) -> Finding | None:
    """[20] Samples that scatter."""
    samples = run.samples.get("step")
    if samples is None or samples.spread is None or samples.median_s is None:
        return None
    if samples.spread <= 0.1:
        return None
    return Finding(
        kind="wide-spread",
        severity="warning",
        sentence=f"The middle half of the steps spreads over {format_share(samples.spread)} of the median, "
        f"{samples.outliers} of {samples.count} are outliers.",
        remedy="measure more steps (--steps), on a quieter machine",
        evidence={"spread": samples.spread, "outliers": samples.outliers, "samples": samples.count},
    )


def launch_bound(run: Run) -> Finding | None:
    """[20] A step that waits for the host is a measurement of the host."""
    share = metrics.launch_bound_share(run)
    if share is None or share < 0.2 or run.evidence.profile is None:
        return None
    return Finding(
        kind="launch-bound",
        severity="note",
        sentence=f"The GPU had nothing to run for {format_share(share)} of the step: "
        f"{run.evidence.profile.kernel_launches} kernels in {format_seconds(metrics.median_s(run, 'step') or 0)}, "
        "so the host's speed sets the time.",
        remedy="fewer, larger launches: --compile reduce-overhead, --optimizer adamw-fused, a larger batch",
        evidence={"share": share, "kernel_launches": run.evidence.profile.kernel_launches},
    )


def profiler_overhead(run: Run) -> Finding | None:
    """[22] A profiled step is not the step."""
    slowdown, profile = metrics.profiler_slowdown(run), run.evidence.profile
    if slowdown is None or profile is None or slowdown < 1.2:
        return None
    return Finding(
        kind="profiler-overhead",
        severity="note",
        sentence=f"Under the profiler the step takes {format_seconds(profile.step_s)}, {slowdown:.1f} times the "
        f"unprofiled {format_seconds(metrics.median_s(run, 'step') or 0)}.",
        remedy="take times from the unprofiled samples, shares from the profile",
        evidence={"slowdown": slowdown, "profiled_s": profile.step_s},
    )
