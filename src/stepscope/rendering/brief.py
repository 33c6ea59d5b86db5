"""An answer in at most ten lines, for scripts and chat tools: the gravest findings, the first figures."""

import re
from typing import Any

import msgspec

from stepscope.core.answer import SEVERITIES, Answer, Finding, Table
from stepscope.core.errors import printable
from stepscope.core.files import json_document
from stepscope.core.range_names import STEP
from stepscope.rendering.cells import row_texts, unit_of, where_of

MOST_LINES = 10
_MOST_FINDINGS = 5
"""Findings do not take the room of the figures that they are about."""
_MOST_ROWS = 4
"""Rows of a table before its sentences, where no row is the sum of others."""
_FINDINGS_BESIDE_KEY = 3
"""Findings of a run before its tokens per second, its MFU and its peak memory."""
_MOST_CAUTIONS = 3
_KEY = re.compile(r"tokens/s|^MFU ")
"""Sentences of a run that matter most."""
_KEY_OF_TRACE = re.compile(r"^Device \S+ had work|^The critical path ")
"""Sentences of a capture that matter most, beside its families."""
_FAMILIES, _MOST_FAMILIES = "family, ms a step", 3
_LONGEST = 400
"""Characters of a line."""
BRIEF_VERSION = 1


def render_brief(answer: Answer, *, as_json: bool = False) -> str:
    """The ten lines as text, or as JSON: each with what it is, and a finding's with its kind, severity, figures and
    remedy."""
    lines = _brief_lines(answer)
    if as_json:
        head = {"version": BRIEF_VERSION, "study": answer.study, "device": answer.device}
        return json_document({**head, "lines": lines})
    return "".join(f"{line['text']}\n" for line in lines)


def _brief_lines(answer: Answer) -> list[dict[str, Any]]:
    """At most ten lines, each with its `text`: head, findings by severity, figures, sentences. The last says how
    much is left out.
    """
    head = [_line("head", text) for text in _head(answer)]
    by_severity = sorted(answer.findings, key=lambda finding: SEVERITIES.index(finding.severity))
    findings = [_finding(finding, named=answer.checked) for finding in by_severity]
    if answer.checked and not findings:
        findings = [_line("finding", "No finding: every check passed.")]
    tables = answer.tables
    if answer.study == "ls":  # the last row is the newest
        tables = [msgspec.structs.replace(table, rows=table.rows[::-1], rules=(), tones={}) for table in tables]
    rows = [[_line("figures", text) for text in _rows(table)] for table in tables]
    place, first = next(((i, one) for i, one in enumerate(rows) if one), (0, []))
    chief: list[dict[str, Any]] = []
    if first:  # the rows that stand for a table: the whole step, or those below a rule, which are sums; else the first
        steps = [i for i, row in enumerate(tables[place].rows) if row[0] == STEP]
        sums = [i for i in tables[place].rules if i < len(first)]
        chief = [first[i] for i in steps or sums or range(min(_MOST_ROWS, len(first)))]
    others = [line for one in rows for line in one if line not in chief and line["text"]]
    notes = [_line("sentence", line.text) for table in tables for line in table.notes]
    key = [line for line in notes if _KEY.search(line["text"])] if answer.study == "run" else []
    key += [line for line in others if line["text"] == _peak(answer)]
    where = _where_time_went(answer) if answer.study == "trace" else []
    key += [line for line in notes if _KEY_OF_TRACE.search(line["text"])] if where else []
    most = _FINDINGS_BESIDE_KEY if key or where else _MOST_FINDINGS
    wanted = [*findings[:most], *where, *chief, *key, *findings[most:_MOST_FINDINGS]]
    wanted += [line for line in (*notes, *others) if line not in (*key, *where)]
    wanted += findings[_MOST_FINDINGS:]
    if len(head) + len(wanted) <= MOST_LINES:
        return [*head, *wanted]
    room = MOST_LINES - len(head) - 1
    return [*head, *wanted[:room], _line("left out", f"and {len(wanted) - room:,} more lines without --brief")]


def _head(answer: Answer) -> list[str]:
    """What was asked or measured, in two lines; where the lead holds cautions and a verdict, those too."""
    if not answer.lead:
        return [text for text in (answer.question, where_of(answer)) if text][:2]
    first, *others = answer.lead
    toned = [line.text for line in others if line.tone]
    if toned:
        return [first.text, *toned[:-1][:_MOST_CAUTIONS], toned[-1]]
    return [line.text for line in answer.lead if line.text][:2]


def _where_time_went(answer: Answer) -> list[dict[str, Any]]:
    """The longest families of a capture, and its copies: before them where they are a share of the device's span."""
    families = next((table for table in answer.tables if table.columns and table.columns[0] == _FAMILIES), None)
    if families is None:
        return []
    longest = [_line("figures", text) for text in _rows(families)[:_MOST_FAMILIES]]
    copies = [_line("sentence", line.text) for line in answer.lead if line.text.startswith("Beside them")]
    return [*copies, *longest] if copies and "of the span" in copies[0]["text"] else [*longest, *copies]


def _peak(answer: Answer) -> str:
    """The line of a run's largest peak of memory; empty where none was counted."""
    if answer.study != "run":
        return ""
    peaks = [
        (row[1], text)
        for table in answer.tables
        for row, text in zip(table.rows, _rows(table), strict=True)
        if str(row[0]).startswith("peak during") and isinstance(row[1], int)
    ]
    return _line("figures", max(peaks)[1])["text"] if peaks else ""


def _line(what: str, text: str) -> dict[str, Any]:
    return {"what": what, "text": printable(text, _LONGEST)}


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


def _rows(table: Table) -> list[str]:
    """Each row as `name: head figure, head figure`, without the empty cells."""
    lines: list[str] = []
    subject = next(iter(table.columns), "").partition(",")[0]
    heads = [_with_unit(head, unit_of(table, place)) for place, head in enumerate(table.columns)]
    for texts in row_texts(table) if table.columns else []:
        name = texts[0]
        if re.fullmatch(r"[\d.,]+", name):  # a bare number says nothing of what it is
            name = f"{subject} {name}".strip()
        cells = [one.format(text).strip() for one, text in zip(heads[1:], texts[1:], strict=True) if text]
        bare = "" if len(table.columns) > 1 else name
        lines.append(f"{name}: {', '.join(cells)}" if cells else bare)
    return lines


def _with_unit(head: str, unit: str) -> str:
    """How a figure reads behind its head: with its unit, where neither names it."""
    escaped = head.replace("{", "{{").replace("}", "}}")
    short = re.match(r"\+?(ms|us) of ", unit)
    return f"{escaped} {{}} {short[1]}" if short and short[1] not in head.split() else f"{escaped} {{}}"
