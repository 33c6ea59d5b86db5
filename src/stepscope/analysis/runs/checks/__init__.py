"""The mistakes that published measurements carry, looked for in a run's evidence. One check a function.

A check reads a Run and returns a Finding or None. It judges stored evidence only, so a run can be judged again from
disk, by later checks too.
"""

from collections.abc import Callable

from stepscope.analysis.runs.checks.computation import (
    attention_in_fp32,
    autocast_scope,
    compile_fallback,
    compile_not_used,
    graph_kept_alive,
    phase_includes_forward,
    precision_mismatch,
)
from stepscope.analysis.runs.checks.conditions import (
    cache_resident,
    clocks_held_down,
    gpu_shared,
    host_busy,
    peak_unknown,
    preset_changed,
    unvaried_input,
)
from stepscope.analysis.runs.checks.execution import (
    accumulation_mismatch,
    attention_mismatch,
    checkpointing_mismatch,
    compile_mode_mismatch,
    optimizer_mismatch,
    optimizer_skipped,
    parameters_not_finite,
)
from stepscope.analysis.runs.checks.timing import (
    beyond_the_ceiling,
    compiled_while_measured,
    correlated_samples,
    few_samples,
    impossible_rate,
    launch_bound,
    not_steady,
    profiler_overhead,
    timer_stopped_early,
    warm_up_unsettled,
    wide_spread,
)
from stepscope.core.finding import SEVERITIES, Finding
from stepscope.core.run import Run

Check = Callable[[Run], Finding | None]

CHECKS: tuple[Check, ...] = (
    timer_stopped_early,
    impossible_rate,
    compiled_while_measured,
    precision_mismatch,
    attention_in_fp32,
    compile_not_used,
    compile_mode_mismatch,
    compile_fallback,
    attention_mismatch,
    optimizer_mismatch,
    optimizer_skipped,
    parameters_not_finite,
    accumulation_mismatch,
    checkpointing_mismatch,
    phase_includes_forward,
    autocast_scope,
    graph_kept_alive,
    unvaried_input,
    beyond_the_ceiling,
    not_steady,
    few_samples,
    correlated_samples,
    warm_up_unsettled,
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
