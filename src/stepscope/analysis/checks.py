"""The mistakes that published measurements carry, looked for in a run's evidence. One check a function.

A check reads a Run and returns a Finding or None. It judges stored evidence only, so a run can be judged again from
disk. The numbers in brackets are the rows of docs/measuring.md, where each mistake is described as seen in the wild.
"""

from collections.abc import Callable

from stepscope.analysis import metrics
from stepscope.core.finding import SEVERITIES, Finding
from stepscope.core.model_config import PRESETS
from stepscope.core.run import Run
from stepscope.core.units import format_bytes, format_rate, format_seconds, format_share
from stepscope.work.transformer import parameter_count

Check = Callable[[Run], Finding | None]

TF32_ERROR = 1e-5
"""Relative error of the fp32 probe above which TF32 ran: true fp32 is near 2e-7, TF32 near 3e-4."""


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


def precision_mismatch(run: Run) -> Finding | None:
    """[3] The precision that ran, against the precision asked for."""
    precision, observation = run.evidence.precision, run.evidence.observation
    dtype = run.workload.dtype
    fault = ""
    if precision is not None:
        probe = precision.probe_relative_error
        if dtype == "fp32" and precision.tf32_kernels:
            fault = f"fp32 was asked for, but {precision.tf32_kernels[0]} ran: products were rounded to TF32's 10 bits"
        elif dtype == "fp32" and probe > TF32_ERROR:
            fault = f"fp32 was asked for, but a product's error of {probe:.1e} is TF32's (true fp32: 2e-7)"
        elif dtype == "tf32" and probe < TF32_ERROR:
            fault = f"tf32 was asked for, but a product's error of {probe:.1e} is true fp32's (TF32: 3e-4)"
    expected = {"bf16": "bfloat16", "bf16-pure": "bfloat16", "fp16": "float16"}.get(dtype, "float32")
    if not fault and observation and observation.product_dtypes:
        strangers = [found for found in observation.product_dtypes if found != expected]
        if strangers:
            fault = f"{dtype} was asked for, but matrix products took {', '.join(strangers)} operands"
    if not fault:
        return None
    return Finding(
        kind="precision-mismatch",
        severity="error",
        sentence=fault[0].upper() + fault[1:] + ".",
        remedy="compare it as what it is; torch.set_float32_matmul_precision decides between fp32 and TF32",
        evidence={
            "asked": dtype,
            "probe_relative_error": precision.probe_relative_error if precision else None,
            "tf32_kernels": len(precision.tf32_kernels) if precision else None,
        },
    )


def compile_fallback(run: Run) -> Finding | None:
    """[4] torch.compile that gave up and ran eagerly, or compiled only pieces."""
    report = run.evidence.compilation
    if report is None:
        return None
    evidence: dict[str, float | int | str | None] = {
        "graphs": report.graphs,
        "graph_breaks": report.graph_breaks,
        "recompiles": report.recompiles,
        "limit_hit": int(report.limit_hit),
    }
    if report.limit_hit:
        return Finding(
            kind="compile-fallback",
            severity="error",
            sentence=f"torch.compile hit its recompile limit after {report.recompiles} recompilations and ran eagerly.",
            remedy="keep shapes fixed in one process, or measure each cell in a process of its own (stepscope sweep)",
            evidence=evidence,
        )
    if report.graph_breaks:
        reason = f" ({report.graph_break_reasons[0]})" if report.graph_break_reasons else ""
        return Finding(
            kind="compile-fallback",
            severity="warning",
            sentence=f"torch.compile broke the graph {report.graph_breaks} times{reason}; "
            f"the pieces between run eagerly.",
            remedy="TORCH_LOGS=graph_breaks shows where",
            evidence=evidence,
        )
    if report.recompiles:
        return Finding(
            kind="compile-fallback",
            severity="warning",
            sentence=f"torch.compile recompiled {report.recompiles} times while this workload's shapes were fixed.",
            remedy="TORCH_LOGS=recompiles shows why",
            evidence=evidence,
        )
    return None


def compile_not_used(run: Run) -> Finding | None:
    """[5] A compiled object was made, but the one that was timed was not it."""
    report = run.evidence.compilation
    if run.workload.compile == "eager" or report is None or report.frames_compiled:
        return None
    return Finding(
        kind="compile-not-used",
        severity="error",
        sentence=f"The workload says compile {run.workload.compile}, but no frame was compiled "
        f"({report.frames_total} seen): what was timed ran eagerly.",
        remedy="call the object that torch.compile returned",
        evidence={"frames_total": report.frames_total, "frames_compiled": 0},
    )


def phase_includes_forward(run: Run) -> Finding | None:
    """[6] A 'backward' that runs the forward again, or two forwards in one step."""
    observation = run.evidence.observation
    if observation is None:
        return None
    for phase, count in observation.model_forwards.items():
        allowed = 1 if phase == "forward" else 0
        if count > allowed:
            return Finding(
                kind="phase-includes-forward",
                severity="error",
                sentence=f"The model's forward ran {count} times in the phase '{phase}', where {allowed} belong: "
                f"its time is not {phase} alone.",
                remedy="time each phase of the same step between its own marks",
                evidence={"phase": phase, "forwards": count},
            )
    return None


def autocast_scope(run: Run) -> Finding | None:
    """[7] Autocast belongs round forward and loss of one step, nothing else."""
    observation = run.evidence.observation
    if observation is None:
        return None
    wrapped = [
        place
        for place, on in (
            ("the whole step", observation.autocast_outside),
            ("backward", observation.autocast_in_backward),
            ("the optimizer", observation.autocast_in_optimizer),
        )
        if on
    ]
    if not wrapped:
        return None
    return Finding(
        kind="autocast-scope",
        severity="error",
        sentence=f"Autocast was on round {' and '.join(wrapped)}: its cache of cast weights outlives the update.",
        remedy="open autocast anew in each step, round forward and loss only",
        evidence={"wrapped": ", ".join(wrapped)},
    )


def graph_kept_alive(run: Run) -> Finding | None:
    """[8] An earlier step's graph still held when a step begins makes its memory figures those of two."""
    observation, memory = run.evidence.observation, run.evidence.memory
    extra = None
    if memory and memory.after_parameters is not None and memory.resident_expected is not None:
        surplus = memory.after_parameters - memory.resident_expected
        # Allocation sizes round up, and libraries keep workspaces; a graph is as large as what backward needs.
        if memory.saved_for_backward and surplus > max(0.5 * memory.saved_for_backward, 64 * 2**20):
            extra = surplus
    if not extra and not (observation and observation.graphs_alive_before):
        return None
    size = f" ({format_bytes(extra)} beyond parameters, optimizer state and batches)" if extra else ""
    return Finding(
        kind="graph-kept-alive",
        severity="error",
        sentence=f"Tensors that an earlier step saved for backward were still alive when the step began{size}: "
        "its memory is that of two graphs.",
        remedy="drop the loss and outputs of a step, or detach them, before the next begins",
        evidence={"surplus_bytes": extra},
    )


def peak_unknown(run: Run) -> Finding | None:
    """[17] Without a known peak there is no utilisation."""
    environment = run.environment
    if environment is None or not run.samples or environment.device_type == "cpu":
        return None
    if run.device_spec is not None and run.device_spec.peak_for(run.workload.dtype):
        return None
    return Finding(
        kind="peak-unknown",
        severity="note",
        sentence=f"No datasheet peak is known for {environment.device_name} in {run.workload.dtype}, "
        "so no MFU against it is given.",
        remedy="state it with --peak-flops",
        evidence={"device": environment.device_name},
    )


def unvaried_input(run: Run) -> Finding | None:
    """[19] Zeros or one repeated token run faster than data, and one batch over and over measures the cache."""
    observation = run.evidence.observation
    if observation is None:
        return None
    vocabulary, tokens = run.workload.model.vocabulary, run.workload.tokens
    expected = vocabulary * (1 - (1 - 1 / vocabulary) ** tokens)
    if observation.distinct_tokens < 0.5 * expected:
        return Finding(
            kind="unvaried-input",
            severity="error",
            sentence=f"The batch holds {observation.distinct_tokens} distinct tokens where {expected:.0f} are expected "
            "of random ones: constant input runs faster than data.",
            remedy="feed random tokens",
            evidence={"distinct_tokens": observation.distinct_tokens, "expected": round(expected)},
        )
    if observation.distinct_batches < 2:
        return Finding(
            kind="unvaried-input",
            severity="warning",
            sentence="Every step ran on the same batch.",
            remedy="rotate through several batches",
            evidence={"distinct_batches": observation.distinct_batches},
        )
    return None


def cache_resident(run: Run) -> Finding | None:
    """[19] A step whose whole data fits the L2 cache measures the cache."""
    environment, memory = run.environment, run.evidence.memory
    if environment is None or environment.l2_bytes is None or memory is None:
        return None
    touched = memory.parameter_bytes + (memory.saved_for_backward or 0)
    if touched >= environment.l2_bytes:
        return None
    return Finding(
        kind="cache-resident",
        severity="note",
        sentence=f"Parameters and saved tensors ({format_bytes(touched)}) fit the L2 cache "
        f"({format_bytes(environment.l2_bytes)}): memory traffic is the cache's.",
        remedy="a larger model or batch shows the memory's own speed",
        evidence={"touched_bytes": touched, "l2_bytes": environment.l2_bytes},
    )


def clocks_held_down(run: Run) -> Finding | None:
    """[20] Power cap and heat lower the clocks."""
    environment = run.environment
    if environment is None or environment.before is None or environment.after is None:
        return None
    before, after = environment.before, environment.after
    samples = run.samples.get("step")
    if samples is None or not samples.count:
        return None
    measured_s = sum(samples.values_s) + sum(samples.warmup_s)
    shares = {}
    for reason, start, end in (
        ("the power cap", before.power_limited_s, after.power_limited_s),
        ("heat", before.thermal_limited_s, after.thermal_limited_s),
    ):
        if start is not None and end is not None and measured_s > 0:
            shares[reason] = min(1.0, (end - start) / measured_s)
    reason, share = max(shares.items(), key=lambda item: item[1], default=("", 0.0))
    named = ", ".join(after.slowdown_reasons)
    if share < 0.05 and not named:
        return None
    clock = f" SM clock {after.sm_clock_mhz} of {after.sm_clock_max_mhz} MHz at the end." if after.sm_clock_mhz else ""
    cause = f"{reason} for {format_share(share)} of the run" if share >= 0.05 else named
    return Finding(
        kind="clocks-held-down",
        severity="warning" if "slowdown" in named or (reason == "heat" and share >= 0.05) else "note",
        sentence=f"Clocks were held down by {cause}.{clock}",
        remedy="compare only with runs at the same limit",
        evidence={
            "share": share,
            "reasons": named,
            "sm_clock_mhz": after.sm_clock_mhz,
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
    return Finding(
        kind="gpu-shared",
        severity="warning",
        sentence=f"{others} other compute process{'es' if others > 1 else ''} held this GPU during the run.",
        remedy="measure on a GPU of your own, or stop them",
        evidence={"other_processes": others},
    )


def host_busy(run: Run) -> Finding | None:
    """[20] Other work on the host slows a CPU step, and a GPU step that waits for launches."""
    environment = run.environment
    if environment is None or environment.host is None or environment.host.other_cores is None:
        return None
    others = environment.host.other_cores
    if others < 0.25 * environment.cpu_cores:
        return None
    return Finding(
        kind="host-busy",
        severity="warning",
        sentence=f"Other processes kept {others:.1f} of {environment.cpu_cores} cores busy during the run.",
        remedy="stop them and measure again",
        evidence={"other_cores": others, "cpu_cores": environment.cpu_cores},
    )


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


def preset_changed(run: Run) -> Finding | None:
    """[23] A preset's name on other sizes."""
    model = run.workload.model
    preset = PRESETS.get(model.name)
    if preset is None or preset == model:
        return None
    changed = {f: (getattr(preset, f), size) for f, size in model.sizes.items() if getattr(preset, f) != size}
    differences = ", ".join(f"{field} {size} (preset: {known})" for field, (known, size) in changed.items())
    return Finding(
        kind="preset-changed",
        severity="warning",
        sentence=f"'{model.name}' here has {parameter_count(model):,} parameters, "
        f"the preset of that name {parameter_count(preset):,}: {differences}.",
        remedy="give the changed model a name of its own",
        evidence={"parameters": parameter_count(model), "preset_parameters": parameter_count(preset)},
    )


CHECKS: tuple[Check, ...] = (
    timer_stopped_early,
    impossible_rate,
    precision_mismatch,
    compile_not_used,
    compile_fallback,
    phase_includes_forward,
    autocast_scope,
    graph_kept_alive,
    unvaried_input,
    not_steady,
    wide_spread,
    clocks_held_down,
    gpu_shared,
    host_busy,
    preset_changed,
    launch_bound,
    profiler_overhead,
    cache_resident,
    peak_unknown,
)


def check_run(run: Run) -> tuple[Finding, ...]:
    """Every finding on this run, the gravest first."""
    found = [finding for check in CHECKS if (finding := check(run)) is not None]
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))
