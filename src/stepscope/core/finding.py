"""A Finding: what the tool concludes, in one sentence with its figures."""

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

Severity = Literal["error", "warning", "note"]
"""error: the number cannot be trusted (exit code 1). warning: it can, with care. note: good to know."""

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


FORMER_KINDS = {"not compiling's": "process-noise"}
"""Kinds of findings in answers stored by earlier versions, and the kinds that they have now."""


Quoted = Mapping[str, float | int | str | None]
"""The figures that a sentence quotes, by name."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One conclusion. `evidence` holds the figures that the sentence quotes."""

    kind: str
    severity: Severity
    sentence: str
    remedy: str = ""
    evidence: dict[str, float | int | str | None] = {}


def note(kind: str, sentence: str, evidence: Quoted | None = None, remedy: str = "") -> Finding:
    """A finding that is good to know."""
    return Finding(kind=kind, severity="note", sentence=sentence, remedy=remedy, evidence={**(evidence or {})})


def warning(kind: str, sentence: str, evidence: Quoted | None = None, remedy: str = "") -> Finding:
    """A finding that says to take care."""
    return Finding(kind=kind, severity="warning", sentence=sentence, remedy=remedy, evidence={**(evidence or {})})


def error(kind: str, sentence: str, evidence: Quoted | None = None, remedy: str = "") -> Finding:
    """A finding that says that the number cannot be trusted."""
    return Finding(kind=kind, severity="error", sentence=sentence, remedy=remedy, evidence={**(evidence or {})})


def with_present_kind(finding: Finding) -> Finding:
    """The finding, under the kind that is used now if it was stored under a former one."""
    kind = FORMER_KINDS.get(finding.kind, finding.kind)
    return finding if kind == finding.kind else msgspec.structs.replace(finding, kind=kind)


def worst(findings: Iterable[Finding]) -> Severity | None:
    """The gravest severity present, or None."""
    present = {finding.severity for finding in findings}
    return next((severity for severity in SEVERITIES if severity in present), None)
