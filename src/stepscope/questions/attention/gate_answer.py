"""The gate's verdicts as an answer: how close each implementation comes, what is wrong where, what was allowed."""

import math
from collections.abc import Sequence

from stepscope.core.answer import TEXT, Answer, Cell, Line, Table, as_lines, table_of
from stepscope.core.attention_timing import AttentionVerdict, GateReport

_TENSORS = ("out", "dq", "dk", "dv")
_FAILURES = 12
"""Shown of one implementation."""


def answer_gate(reports: Sequence[GateReport], *lead: str, origin: str = "") -> Answer:
    """A line for each implementation and dtype, then every failure, who was allowed more than others and why, and what
    was not asked of whom and why.
    """
    places = dict.fromkeys(f"{report.device}, seed {report.seed}" for report in reports)
    where = f" ({', '.join(places)})" if places else ""
    notes: list[str] = []
    for report in reports:
        shown = report.failures[:_FAILURES]
        notes += [f"{report.implementation} fails {each.sentence}" for each in shown]
        if len(report.failures) > len(shown):
            notes.append(f"{report.implementation} fails {len(report.failures) - len(shown)} more.")
    notes += [*_allowances(reports), *_yardsticks(reports)]
    headline = f"Attention beside float64{where}: the worst error, as a share of what is allowed"
    return Answer(
        study="attention-gate",
        question="Is each implementation of attention right?",
        lead=as_lines(*lead, Line(headline, "strong")),
        tables=(_table(reports, notes),),
        asides=tuple(line for report in reports for line in _not_supported(report)),
        origin=(origin,) if origin else (),
    )


def _table(reports: Sequence[GateReport], notes: Sequence[str]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for report in reports:
        for dtype in dict.fromkeys(verdict.dtype for verdict in report.verdicts):
            verdicts = [verdict for verdict in report.verdicts if verdict.dtype == dtype]
            outcomes = [verdict.outcome for verdict in verdicts]
            counts = [outcomes.count(outcome) for outcome in ("passed", "failed", "not supported")]
            rows.append((
                report.implementation, dtype, _verdict(*counts[:2]), _repeats(verdicts), *counts,
                *(_worst(verdicts, tensor) for tensor in _TENSORS),
            ))  # fmt: skip
    figures = ("passed", "failed", "not supported", *_TENSORS)
    return table_of(
        "implementation", "dtype", "verdict", "same bits again", *((name, TEXT) for name in figures),
        rows=rows, notes=as_lines(*notes),
    )  # fmt: skip


def _verdict(passed: int, failed: int) -> str:
    if failed:
        return "WRONG"
    return "right" if passed else "not run"


def _repeats(verdicts: Sequence[AttentionVerdict]) -> str:
    """Whether calls that were run twice gave the same bits; empty if none was run twice."""
    seen = [verdict.repeats for verdict in verdicts if verdict.repeats is not None]
    if not seen:
        return ""
    return "yes" if all(seen) else f"no, in {seen.count(False)} of {len(seen)}"


def _worst(verdicts: Sequence[AttentionVerdict], tensor: str) -> str:
    """The largest error of this tensor, as a share of what is allowed, over whole tensors and worst rows."""
    shares = [error.share for verdict in verdicts for error in verdict.errors if error.tensor == tensor]
    if any(map(math.isinf, shares)):
        return "not finite"
    return f"{max(shares):.2f}" if shares else ""


def _allowances(reports: Sequence[GateReport]) -> list[str]:
    """Which implementations may be further off than others, in which dtypes, and why."""
    found: dict[str, dict[str, list[str]]] = {}
    for report in reports:
        for verdict in report.verdicts:
            if verdict.allowance:
                dtypes = found.setdefault(verdict.allowance, {}).setdefault(report.implementation, [])
                if verdict.dtype not in dtypes:
                    dtypes.append(verdict.dtype)
    lines: list[str] = []
    for allowance, of_whom in found.items():
        for dtypes in dict.fromkeys(tuple(each) for each in of_whom.values()):
            names = ", ".join(name for name, each in of_whom.items() if tuple(each) == dtypes)
            lines.append(f"{names} may be off {allowance} ({', '.join(dtypes)}).")
    return lines


def _yardsticks(reports: Sequence[GateReport]) -> list[str]:
    """What is allowed where that is not twice sdpa's error."""
    found = dict.fromkeys(line for report in reports for v in report.verdicts for line in v.yardsticks)
    return [f"Allowed {yardstick}." for yardstick in found]


def _not_supported(report: GateReport) -> list[str]:
    reasons: dict[str, int] = {}
    for verdict in report.verdicts:
        if verdict.outcome == "not supported":
            reasons[verdict.reason] = reasons.get(verdict.reason, 0) + 1
    return [
        f"{report.implementation} {reason}: {count} of {len(report.verdicts)} calls"
        for reason, count in reasons.items()
    ]
