"""Checks of the conditions: input, machine, company, and names.

The numbers in brackets are the rows of docs/measuring.md, where each mistake is described as seen in the wild.
"""

from stepscope.core.finding import Finding, error, note, warning
from stepscope.core.formulas.transformer import parameter_count
from stepscope.core.model_config import PRESETS
from stepscope.core.range_names import STEP
from stepscope.core.run import Run
from stepscope.core.units import format_bytes, format_share
from stepscope.core.workloads import TextbookWorkload, by_sizes


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
