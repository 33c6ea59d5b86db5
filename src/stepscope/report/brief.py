"""An answer in at most ten lines, for scripts and chat tools: the gravest findings, the first figures."""

from typing import Any

from stepscope.core.answer import Answer, Table
from stepscope.core.document import json_document
from stepscope.core.finding import SEVERITIES, Finding
from stepscope.core.range_names import STEP
from stepscope.core.shown_text import middle_cut, printable
from stepscope.report.cells import row_texts, where_of

MOST_LINES = 10
_MOST_FINDINGS = 5
"""Findings do not take the room of the figures that they are about."""
_MOST_ROWS = 4
"""Rows of a table before its sentences, where no row is the sum of others."""
_LONGEST = 400
"""Characters of a line."""
BRIEF_VERSION = 1


def brief_text(answer: Answer) -> str:
    """The ten lines as text."""
    return "".join(f"{line['text']}\n" for line in brief_lines(answer))


def brief_document(answer: Answer) -> str:
    """The ten lines as JSON: each with what it is, and a finding's with its kind, severity, figures and remedy."""
    document = {"version": BRIEF_VERSION, "study": answer.study, "device": answer.device, "lines": brief_lines(answer)}
    return json_document(document)


def brief_lines(answer: Answer) -> list[dict[str, Any]]:
    """At most ten lines, each with its `text`: head, findings by severity, figures, sentences. The last says how
    much is left out.
    """
    asked = [line.text for line in answer.lead] or [answer.question, where_of(answer)]
    head = [_line("head", text) for text in asked if text][:2]
    by_severity = sorted(answer.findings, key=lambda finding: SEVERITIES.index(finding.severity))
    findings = [_finding(finding, named=answer.checked) for finding in by_severity]
    if answer.checked and not findings:
        findings = [_line("finding", "No finding: every check passed.")]
    rows = [[_line("figures", text) for text in _rows(table)] for table in answer.tables]
    place, first = next(((i, one) for i, one in enumerate(rows) if one), (0, []))
    chief = [first[i] for i in _chief(answer.tables[place])] if first else []
    others = [line for one in rows for line in one if line not in chief]
    notes = [_line("sentence", line.text) for table in answer.tables for line in table.notes]
    wanted = [
        *findings[:_MOST_FINDINGS], *chief, *notes, *others, *findings[_MOST_FINDINGS:],
    ]  # fmt: skip
    if len(head) + len(wanted) <= MOST_LINES:
        return [*head, *wanted]
    room = MOST_LINES - len(head) - 1
    return [*head, *wanted[:room], _line("left out", f"and {len(wanted) - room:,} more lines without --brief")]


def _line(what: str, text: str) -> dict[str, Any]:
    return {"what": what, "text": middle_cut(printable(text), _LONGEST)}


def _finding(finding: Finding, *, named: bool) -> dict[str, Any]:
    name = f"{finding.severity} {finding.kind}: " if named else ""
    remedy = f" Remedy: {finding.remedy}." if finding.remedy else ""
    return {
        **_line("finding", f"{name}{finding.sentence}{remedy}"),
        "kind": finding.kind,
        "severity": finding.severity,
        "figures": finding.evidence,
        "remedy": finding.remedy,
    }


def _chief(table: Table) -> list[int]:
    """The rows of a table that stand for it: the whole step, or those below a rule, which are sums; else the first."""
    steps = [i for i, row in enumerate(table.rows) if row[0] == STEP]
    return steps or [i for i in table.rules if i < len(table.rows)] or list(range(min(_MOST_ROWS, len(table.rows))))


def _rows(table: Table) -> list[str]:
    """Each row as `name: head figure, head figure`, without the empty cells."""
    found: list[str] = []
    for texts in row_texts(table) if table.columns else []:
        cells = [f"{head} {text}".strip() for head, text in zip(table.columns[1:], texts[1:], strict=True) if text]
        found.append(f"{texts[0]}: {', '.join(cells)}" if cells else texts[0])
    return found
