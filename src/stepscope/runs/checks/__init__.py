"""The mistakes that published measurements carry, looked for in a run's evidence.

A check reads a Run and yields its findings on one subject. It judges stored evidence only, so a run can be judged again
from disk, by later checks too.
"""

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from stepscope.core.answer import SEVERITIES, Finding
from stepscope.core.run import Run
from stepscope.runs.checks import computation, loops, measurement

Check = Callable[[Run], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    measurement.impossible_times,
    measurement.compiled_while_measured,
    computation.precision,
    computation.compile_not_used,
    computation.compile_mode_mismatch,
    computation.compile_fallback,
    computation.attention_mismatch,
    computation.parts_mismatch,
    computation.optimizer_mismatch,
    computation.updates_made,
    computation.micro_batches_mismatch,
    computation.step_held_together,
    loops.memory_kept,
    loops.left_untrained,
    loops.time_beside_training,
    loops.more_than_needed,
    measurement.unvaried_input,
    measurement.beyond_the_ceiling,
    measurement.not_steady,
    measurement.sample_of_steps,
    measurement.cache_given_back,
    measurement.machine,
    measurement.model_changed,
    computation.update_after_backward,
    computation.moments_in_blocks,
    measurement.profiled_step,
    loops.small_habits,
    measurement.device_limits,
)


OF_HABITS = frozenset(check for check in CHECKS if check.__module__ == loops.__name__)
"""The checks of what a loop or a model does beside its step, for runs in which somebody looked."""


_SAME = (
    ("host-busy", "wide-spread"),
    ("wide-spread", "correlated-samples"),
    ("not-steady", "warm-up-unsettled"),
)
"""Pairs of findings of which the first says what to do about both."""
_OF_ANOTHER_CAUSE = "time steps of one length"
"""How the remedy of a wide spread begins where its cause is known, which no busy machine is."""


def _merged(findings: list[Finding]) -> list[Finding]:
    """The findings, with those that say the same as one of them in its sentence."""
    for keeps, goes in _SAME:
        kept = next((each for each in findings if each.kind == keeps), None)
        gone = next((each for each in findings if each.kind == goes), None)
        if kept is None or gone is None or gone.remedy.startswith(_OF_ANOTHER_CAUSE):
            continue
        both = replace(kept, sentence=f"{kept.sentence} {gone.sentence}", evidence=gone.evidence | kept.evidence)
        findings = [both if each is kept else each for each in findings if each is not gone]
    return findings


def check_run(run: Run) -> tuple[Finding, ...]:
    """Every finding on this run, the gravest first."""
    evidence = run.evidence
    looked = any(known is not None for known in (evidence.habits, evidence.loop, evidence.growth))
    findings = [finding for check in CHECKS if looked or check not in OF_HABITS for finding in check(run)]
    return tuple(sorted(_merged(findings), key=lambda finding: SEVERITIES.index(finding.severity)))
