"""The mistakes that published measurements carry, looked for in a run's evidence. One check a function.

A check reads a Run and returns a Finding or None. It judges stored evidence only, so a run can be judged again from
disk, by later checks too.
"""

from collections.abc import Callable

from stepscope.core.answer import SEVERITIES, Finding
from stepscope.core.run import Run
from stepscope.runs.checks import computation, loops, measurement

Check = Callable[[Run], Finding | None]

CHECKS: tuple[Check, ...] = (
    measurement.timer_stopped_early,
    measurement.impossible_rate,
    measurement.compiled_while_measured,
    computation.precision_mismatch,
    computation.attention_in_fp32,
    computation.compile_not_used,
    computation.compile_mode_mismatch,
    computation.compile_fallback,
    computation.attention_mismatch,
    computation.part_mismatch,
    computation.part_left,
    computation.optimizer_mismatch,
    computation.clip_mismatch,
    computation.optimizer_skipped,
    computation.parameters_not_finite,
    computation.accumulation_mismatch,
    computation.checkpointing_mismatch,
    computation.phase_includes_forward,
    computation.autocast_scope,
    computation.graph_kept_alive,
    loops.graphs_pile_up,
    loops.memory_grows,
    loops.no_gradient,
    loops.parameters_unchanged,
    loops.eval_while_training,
    loops.waiting_for_data,
    loops.rest_is_large,
    loops.host_reads,
    loops.fp32_beside_half,
    loops.synchronises_micro_batches,
    measurement.unvaried_input,
    measurement.beyond_the_ceiling,
    measurement.not_steady,
    measurement.few_samples,
    measurement.correlated_samples,
    measurement.warm_up_unsettled,
    measurement.wide_spread,
    measurement.cache_given_back,
    measurement.clocks_held_down,
    measurement.gpu_shared,
    measurement.host_busy,
    measurement.preset_changed,
    measurement.config_not_followed,
    computation.update_after_backward,
    measurement.launch_bound,
    measurement.profiler_overhead,
    loops.unpinned_batch,
    loops.gradients_zeroed,
    loops.optimizer_loops,
    loops.shapes_change,
    measurement.cache_resident,
    measurement.peak_unknown,
)


def check_run(run: Run) -> tuple[Finding, ...]:
    """Every finding on this run, the gravest first."""
    found = [finding for check in CHECKS if (finding := check(run)) is not None]
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))
