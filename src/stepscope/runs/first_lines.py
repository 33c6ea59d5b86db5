"""Three lines that a watched script is told first: what its step takes, what holds it back, what to change first."""

from collections.abc import Callable
from pathlib import Path

from stepscope.core.answer import Finding
from stepscope.core.range_names import DATA, OPTIMIZER, REST, STEP
from stepscope.core.run import Run
from stepscope.core.units import format_count, format_rate, format_seconds, format_share
from stepscope.runs import metrics
from stepscope.runs.advice import advice_on

_WRONG = (
    "parameters-not-finite", "parameters-unchanged", "no-gradient", "update-after-backward", "eval-while-training",
    "graph-kept-alive", "memory-grows",
)  # fmt: skip
"""Findings that say the loop trains something else than is meant, or ends early: they come before any speed."""

_COSTS: dict[str, Callable[[Run, Finding], float | None]] = {
    "waiting-for-data": lambda run, finding: _share(finding),
    "rest-is-large": lambda run, finding: _share(finding),
    "optimizer-loops": lambda run, _: _part(run, OPTIMIZER),
    "host-waits": lambda run, _: None,
    "micro-batches-synchronised": lambda run, _: None,
    "fp32-beside-half": lambda run, _: None,
    "batch-not-pinned": lambda run, _: _part(run, DATA),
    "gradients-zeroed": lambda run, _: _part(run, REST),
}
"""Findings on what costs time, and the largest share of a step that mending them can save; None where that is not
known from times."""


def rate_words(run: Run) -> str:
    """What a step takes, and how many samples or tokens a second that is."""
    step_s = metrics.median_s(run, STEP)
    if not step_s:
        return ""
    samples, tokens = metrics.samples_per_s(run), metrics.tokens_per_s(run)
    rate, of = (tokens, "tokens") if tokens else (samples, "samples")
    words = f", {format_count(round(rate)) if rate >= 1000 else format(rate, '.4g')} {of}/s" if rate else ""
    return f"a step takes {format_seconds(step_s)}{words}"


def first_lines(run: Run, directory: Path | None = None) -> tuple[str, ...]:
    """Three sentences on a measured run, which lies in this directory; none where no step was timed."""
    words = rate_words(run)
    return (f"A{words[1:]}: {_ceiling(run)}.", _most(run), _change_first(run, directory)) if words else ()


def _ceiling(run: Run) -> str:
    """How far the step is from what the device can do."""
    rate, dtype = metrics.model_flops_per_s(run), run.workload.dtype
    measured, datasheet = metrics.mfu_measured(run), metrics.mfu_datasheet(run)
    if rate is None:
        return "its FLOPs are not known, and so not how far it is from this device's ceiling"
    share = measured or datasheet
    if share is None:
        unknown = f"this device's ceiling in {dtype} is not known (`stepscope device` measures it)"
        return f"{format_rate(rate, 'FLOP/s')}; {unknown}"
    of = "the best product measured here" if measured else "the datasheet's peak"
    return f"{format_rate(rate, 'FLOP/s')}, {format_share(share)} of {of} in {dtype}"


def _most(run: Run) -> str:
    """The part that takes most of a step."""
    shares = {part: share for part in metrics.parts_of(run) if (share := _part(run, part))}
    if not shares:
        return "Its parts were not timed."
    part = max(shares, key=lambda name: shares[name])
    names = {DATA: "Waiting for data", REST: "What is neither data, forward, backward nor optimizer"}
    took = format_seconds(metrics.median_s(run, part) or 0.0)
    return f"{names.get(part, part.capitalize())} takes most of it: {took}, {format_share(shares[part])}."


def _change_first(run: Run, directory: Path | None) -> str:
    """The advice on the script, or the remedy of the finding, that should give most, and how much that can be."""
    doubted = [finding for finding in run.findings if finding.severity != "note"]
    wrong = next((finding for kind in _WRONG for finding in doubted if finding.kind == kind), None)
    if wrong is not None:
        return f"Change first: {wrong.remedy}. {wrong.sentence}"
    costs = {
        finding.kind: (finding, _COSTS[finding.kind](run, finding))
        for finding in run.findings
        if finding.kind in _COSTS and (metrics.on_gpu(run) or finding.kind != "host-waits")
    }
    advice = advice_on(run, directory)[0] if run.evidence.loop is not None else []
    beside = [share or 0.0 for kind, (_, share) in costs.items() if kind not in {one.kind for one in advice}]
    if advice and advice[0].expected >= max(beside, default=0.0) / 3:  # what a finding gives begins at nothing
        first = advice[0]
        where = f" at {first.where}" if first.where else ""
        finding = run.finding(first.kind)
        why = f" {finding.sentence}" if finding is not None else ""
        diff = "`stepscope advise last` says more" if first.no_patch else "`stepscope advise last --patch` writes it"
        return f"Change first: {first.put}{where} ({first.saves} of a step; {diff}).{why}"
    if not costs:
        return "None of the habits that were looked for costs this loop time."
    finding, share = max(costs.values(), key=lambda each: each[1] or 0.0)
    gives = f"up to {format_share(share)} of a step" if share else "how much that gives is not known from times alone"
    return f"Change first: {finding.remedy} ({gives}). {finding.sentence}"


def _share(finding: Finding) -> float | None:
    share = finding.evidence.get("share")
    return share if isinstance(share, float) else None


def _part(run: Run, part: str) -> float | None:
    """The part's share of the median step."""
    part_s, step_s = metrics.median_s(run, part), metrics.median_s(run, STEP)
    return part_s / step_s if part_s and step_s else None
