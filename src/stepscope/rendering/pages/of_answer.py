"""The page of any answer: a comparison, a snapshot, a prediction, the ranks of a job, or a study that was stored."""

import re
from collections.abc import Iterable

import msgspec

from stepscope.core.answer import Answer, Panel, Table, name_of
from stepscope.core.finding import Finding
from stepscope.core.page import Figure, Page, Section

PLOTS = "Plots"
_OF_A_TERMINAL = re.compile(r"(?:More tables with --only: .*|\d[\d,]* more: --only .*)")
"""Lines that say how a terminal shows more: they name no whole command, and a page has no options."""


def page_of_answer(
    answer: Answer, kind: str, *, title: str = "", sentence: str = "", figures: tuple[Figure, ...] = (),
    panels: tuple[Panel, ...] = (), shown_by: tuple[str, ...] = (),
) -> Page:  # fmt: skip
    """The page of one answer: its sentences as findings, then plots, then each table. `panels` are further plots."""
    drawn = msgspec.structs.replace(answer, panels=(*panels, *answer.panels))
    return Page(
        title=title or answer.question or answer.study,
        kind=kind,
        sentence=sentence or first_sentence(answer),
        figures=figures,
        findings=answer.findings,
        checked=answer.checked,
        sections=(*heading_of(answer), *sections_of(drawn), *ending_of(answer)),
        shown_by=shown_by,
    )


def first_sentence(answer: Answer) -> str:
    """The sentence that says the most: the gravest finding, the first sentence of a table, or the first line."""
    notes = [line.text for table in answer.tables if not table.columns for line in table.notes]
    said = [*(finding.sentence for finding in answer.findings), *notes, *(line.text for line in answer.lead)]
    return next(iter(said), answer.question)


def heading_of(answer: Answer) -> tuple[Section, ...]:
    """What was measured, and where, in lines."""
    body = msgspec.structs.replace(answer, tables=(), panels=(), findings=(), checked=False, asides=(), origin=())
    return (Section(title="What was measured", answer=body),) if answer.lead or answer.device else ()


def ending_of(answer: Answer) -> tuple[Section, ...]:
    """What was not examined, and where the run lies."""
    body = msgspec.structs.replace(answer.body(), tables=(), panels=(), findings=(), checked=False)
    asides = tuple(aside for aside in answer.asides if not _OF_A_TERMINAL.fullmatch(aside))
    notes = msgspec.structs.replace(body, asides=asides, origin=answer.origin)
    return (Section(title="Notes", answer=notes),) if notes.asides or notes.origin else ()


def sections_of(answer: Answer) -> tuple[Section, ...]:
    """The plots in one section, and each table in one of its own; sentences between tables go with the next table."""
    sections: list[Section] = []
    if answer.panels:
        sections.append(section(PLOTS, answer, tables=(), panels=answer.panels))
    waiting: list[Table] = []
    for table in answer.tables:
        waiting.append(table)
        if table.columns:
            sections.append(section(titled(table), answer, tables=waiting))
            waiting = []
    if waiting:
        sections.append(section("In words", answer, tables=waiting))
    return tuple(sections)


def section(title: str, answer: Answer, *, tables: Iterable[Table], panels: Iterable[Panel] = ()) -> Section:
    """These tables and plots of an answer under a title."""
    body = msgspec.structs.replace(answer.body(), findings=(), checked=False)
    kept = tuple(map(_for_a_page, tables))
    return Section(title=title, answer=msgspec.structs.replace(body, tables=kept, panels=tuple(panels)))


def _for_a_page(table: Table) -> Table:
    """The table, whose note says how many rows are left out, and not which option of a terminal shows them."""
    said = [
        msgspec.structs.replace(line, text=f"{line.text.partition(':')[0]} are left out here.")
        if _OF_A_TERMINAL.fullmatch(line.text)
        else line
        for line in table.notes
    ]
    return msgspec.structs.replace(table, notes=tuple(said))


def titled(table: Table) -> str:
    """The name of a table as a title."""
    name = name_of(table) or "Table"
    return name[:1].upper() + name[1:]


def gravest(findings: tuple[Finding, ...], note: str = "") -> Figure:
    """The figure that says what is to be doubted or mended first."""
    first = next(iter(sorted(findings, key=lambda one: ("error", "warning", "note").index(one.severity))), None)
    if first is None:
        return Figure(name="gravest finding", value="none", note=note or "every check passed")
    return Figure(name="gravest finding", value=first.kind, note=first.severity)
