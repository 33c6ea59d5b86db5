"""The page of any answer: a comparison, a snapshot, a prediction, the ranks of a job, or a study that was stored."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from stepscope.core.answer import (
    SEVERITIES,
    Answer,
    Figure,
    Finding,
    Page,
    Panel,
    Section,
    Table,
    decode_answer,
    name_of,
)
from stepscope.core.errors import InputError
from stepscope.core.units import format_bytes

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
            name = name_of(table) or "Table"
            sections.append(section(name[:1].upper() + name[1:], answer, tables=waiting))
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


def gravest(findings: tuple[Finding, ...], note: str = "") -> Figure:
    """The figure that says what is to be doubted or mended first."""
    first = min(findings, key=lambda one: SEVERITIES.index(one.severity), default=None)
    if first is None:
        return Figure(name="gravest finding", value="none", note=note or "every check passed")
    return Figure(name="gravest finding", value=first.kind, note=first.severity)


# The page of a prediction of memory, from what `stepscope fit --json` wrote.


_KEYS = frozenset({"peak_bytes", "estimate", "answer"})


def is_prediction(document: object) -> bool:
    """Whether a JSON document is a prediction, or several."""
    first = document[0] if isinstance(document, list) and document else document
    return isinstance(first, dict) and first.keys() >= _KEYS


def page_of_prediction(document: Any, source: str) -> Page:
    """The page of one prediction. Raises InputError for several, and for one that is no prediction inside."""
    if isinstance(document, list):
        raise InputError(
            f"{source} holds {len(document)} predictions: predict for one --memory, or one --device, and name that file"
        )
    answer = decode_answer(json.dumps(document["answer"]).encode(), source)
    try:
        figures = tuple(_figures(document))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{source} is no whole prediction ({error}): write it anew by stepscope fit --json") from None
    # The verdict is the first sentence under a table, where the others say how it came to be.
    sentence = next((line.text for table in answer.tables for line in table.notes), "")
    return page_of_answer(answer, "prediction", sentence=sentence, figures=figures)


def _figures(document: Mapping[str, Any]) -> list[Figure]:
    fits, margin, estimate = document["fits"], document["margin_bytes"], document["estimate"]
    figures = [
        Figure(name="peak", value=format_bytes(document["peak_bytes"]), note="predicted, by PyTorch's allocator"),
    ]
    if fits is not None:
        figures += [
            Figure(name="fits", value="yes" if fits else "no", note=str(document["budget"]["said"])),
            Figure(name="left" if margin >= 0 else "missing", value=format_bytes(abs(margin))),
        ]
    largest = max(document["categories"].items(), key=lambda one: one[1])
    figures.append(Figure(name="most of it", value=str(largest[0]), note=format_bytes(largest[1])))
    saved = estimate.get("saved_for_backward")
    if saved:
        figures.append(Figure(name="saved for backward", value=format_bytes(saved), note="when forward ends"))
    return figures
