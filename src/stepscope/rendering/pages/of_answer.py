"""The page of any answer: a comparison, a snapshot, a prediction, a capture, the ranks of a job, a stored study."""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import polars as pl

from stepscope.core.answer import (
    SEVERITIES,
    Answer,
    Cell,
    Finding,
    Panel,
    Table,
    as_lines,
    decode_answer,
    name_of,
    table_of,
)
from stepscope.core.errors import InputError
from stepscope.core.units import counted, format_bytes, format_count, format_share, ms_text
from stepscope.rendering.pages import Figure, Page, Section
from stepscope.traces.captures.answer import answer_trace, digest_icicles, icicle_panel, phase_heads, timeline_panel
from stepscope.traces.captures.digest import TraceDigest
from stepscope.traces.captures.summary import OUTSIDE, TraceSummary
from stepscope.traces.kernels.names import kernel_labels
from stepscope.traces.ranks import Job
from stepscope.traces.ranks_answer import answer_job
from stepscope.traces.roofline import roofline_tables

PLOTS = "Plots"
_OF_A_TERMINAL = re.compile(r"(?:More tables with --only: .*|\d[\d,]* more: --only .*)")
"""Lines that say how a terminal shows more: they name no whole command, and a page has no options."""


def page_of_answer(
    answer: Answer,
    kind: str,
    *,
    title: str = "",
    sentence: str = "",
    figures: tuple[Figure, ...] = (),
    panels: tuple[Panel, ...] = (),
    shown_by: tuple[str, ...] = (),
) -> Page:
    """The page of one answer: its sentences as findings, then plots, then each table. `panels` are further plots."""
    drawn = msgspec.structs.replace(answer, panels=(*panels, *answer.panels))
    # What says the most: the gravest finding, the first sentence that stands alone, or the first line.
    alone = [line.text for table in answer.tables if not table.columns for line in table.notes]
    sentences = [*(finding.sentence for finding in answer.findings), *alone, *(line.text for line in answer.lead)]
    return Page(
        title=title or answer.question or answer.study,
        kind=kind,
        sentence=sentence or next(iter(sentences), answer.question),
        figures=figures,
        findings=answer.findings,
        checked=answer.checked,
        sections=(*heading_of(answer), *sections_of(drawn), *ending_of(answer)),
        shown_by=shown_by,
    )


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
    kept: list[Table] = []
    for table in tables:  # its note says how many rows are left out, and not which option of a terminal shows them
        notes = [
            msgspec.structs.replace(line, text=f"{line.text.partition(':')[0]} are left out here.")
            if _OF_A_TERMINAL.fullmatch(line.text)
            else line
            for line in table.notes
        ]
        kept.append(msgspec.structs.replace(table, notes=tuple(notes)))
    return Section(title=title, answer=msgspec.structs.replace(body, tables=tuple(kept), panels=tuple(panels)))


def gravest(findings: tuple[Finding, ...], note: str = "", *, ended: str = "") -> Figure:
    """The figure that says what is to be doubted or mended first. ended: how runs ended that were not measured, which
    an error alone outweighs."""
    first = min(findings, key=lambda one: SEVERITIES.index(one.severity), default=None)
    if ended and (first is None or first.severity != "error"):
        return Figure(name="gravest finding", value=ended, note="not measured to the end")
    if first is None:
        return Figure(name="gravest finding", value="none", note=note or "every check passed")
    return Figure(name="gravest finding", value=first.kind, note=first.severity)


# The page of a prediction of memory, from what `stepscope fit --json` wrote.


PREDICTION_KEYS = frozenset({"peak_bytes", "estimate", "answer"})
"""Keys by which the JSON of a prediction is known."""


def page_of_prediction(document: Any, source: str) -> Page:
    """The page of one prediction. Raises InputError for several, and for one that is no prediction inside."""
    if isinstance(document, list):
        raise InputError(
            f"{source} holds {len(document)} predictions: predict for one --memory, or one --device, and name that file"
        )
    answer = decode_answer(json.dumps(document["answer"]).encode(), source)
    try:
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
        figures = tuple(figures)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{source} is no whole prediction ({error}): write it anew by stepscope fit --json") from None
    # The verdict is the first sentence under a table, where the others say how it came to be.
    sentence = next((line.text for table in answer.tables for line in table.notes), "")
    return page_of_answer(answer, "prediction", sentence=sentence, figures=figures)


# The page of a captured step, and of a job's ranks: where the time went, by which kernels, how near the device's
# peaks, and what ran when.


def page_of_capture(summary: TraceSummary, findings: tuple[Finding, ...], source: str) -> Page:
    """The page of one capture. Raises InputError where it holds no work."""
    answer = answer_trace(summary, findings, source)
    steps, noun = max(1, summary.steps), "operators" if summary.attribution.table.on_cpu else "kernels"
    per = counted(steps, "step")
    occupied = summary.occupation
    idle = occupied.idle_ns / occupied.span_ns if occupied is not None and occupied.span_ns else None
    covered = 1 - summary.unattributed_ns / summary.busy_ns if summary.busy_ns else 1.0
    return Page(
        title=f"Where does the time of {source} go?",
        kind="capture",
        sentence=_sentence_of_capture(summary),
        figures=(
            Figure(name=f"{noun[:-1]} time a step", value=f"{ms_text(summary.busy_ns / steps)} ms"),
            Figure(name=f"{noun} a step", value=format_count(round(summary.kernel_count / steps)), note=per),
            Figure(name="matrix products", value=format_share(summary.gemm_fraction), note="of the time in phases"),
            Figure(
                name="device idle",
                value=format_share(idle) if idle is not None else "not known",
                note="under the profiler" if idle is not None else "a CPU, or part of a capture",
            ),
            gravest(findings, note=f"{format_share(covered)} of the time has a place"),
        ),
        findings=findings,
        checked=True,
        sections=(*heading_of(answer), *sections_of_capture(summary, answer), *ending_of(answer)),
        shown_by=(f"stepscope trace {shlex.quote(source)}",),
    )


def sections_of_capture(summary: TraceSummary, answer: Answer) -> tuple[Section, ...]:
    """An icicle of the time, the kernels, the roofline, and the timeline, each with its tables."""
    roofs = {name_of(table) for table in roofline_tables(summary.roofline)} if summary.roofline is not None else set()
    places: dict[str, list[Table]] = {"time": [], "kernels": [], "roofline": [], "when": []}
    for table in answer.tables:
        name = name_of(table)
        in_kernels = name.startswith(("top of", "kernels of"))
        kind = (
            "roofline" if name in roofs else "kernels" if in_kernels else "when" if name.startswith("idle") else "time"
        )
        places[kind].append(table)
    bars = [panel for panel in answer.panels if panel.kind in ("bars", "stack")]
    roof = [panel for panel in answer.panels if panel not in bars]
    whole = summary.part is None
    icicle = icicle_panel(summary) if whole else None
    timeline = timeline_panel([("", summary.attribution, summary.occupation, 0)]) if whole else None
    contents = (
        ("Where the time went", [icicle] if icicle else [], places["time"]),
        ("The longest kernels", bars, places["kernels"]),
        ("Against the device's peaks", roof, places["roofline"]),
        ("What ran when, and what stood idle", [timeline] if timeline else [], places["when"]),
    )
    return tuple(
        section(title, answer, tables=tables, panels=panels) for title, panels, tables in contents if tables or panels
    )


def _sentence_of_capture(summary: TraceSummary) -> str:
    phases = sorted(summary.phases, key=lambda phase: -phase.busy_ns)
    noun = "operators" if summary.attribution.table.on_cpu else "kernels"
    if not phases or not summary.busy_ns:
        return f"No {noun} ran in this capture."
    steps = max(1, summary.steps)
    share = phases[0].busy_ns / (summary.busy_ns / steps)
    totals = summary.families.group_by("family").agg(pl.col("busy_ns").sum())
    family = totals.sort("busy_ns", "family", descending=[True, False])["family"][0]
    took = f"{ms_text(summary.busy_ns / steps)} ms"
    where = "outside the phases" if phases[0].phase == OUTSIDE else f"in {phases[0].phase}"
    kept = f"keeps the device busy for {took} with {noun}"
    if summary.attribution.table.on_cpu:
        kept = f"takes {took} of the host's time in {noun}"
    return f"A step {kept}, {format_share(share)} of it {where}; most of it is {family}."


def page_of_job(
    job: Job, findings: tuple[Finding, ...], places: Sequence[str], load: Callable[[str], TraceSummary]
) -> Page:
    """The page of several ranks' captures, from a folder or from files. `load` reads one of them again, by its source,
    for the timeline."""
    source = places[0] if len(places) == 1 else counted(len(places), "capture")
    offsets = {clock.rank: clock.offset_ns for clock in job.matched.clocks}
    lanes: Iterable[tuple[str, TraceSummary, int]] = (
        (f"rank {rank.number}", load(rank.source), offsets.get(rank.number, 0)) for rank in job.ranks[:_RANKS_DRAWN]
    )
    timeline = timeline_panel((name, one.attribution, one.occupation, offset) for name, one, offset in lanes)
    slowest = max(job.ranks, key=lambda rank: rank.busy_ns)
    return page_of_answer(
        answer_job(job, findings, source),
        "ranks",
        title=f"What do the ranks of {source} do?",
        sentence=f"A step takes {ms_text(job.step_ns)} ms on {counted(len(job.ranks), 'rank')}; rank {slowest.number} "
        "has most kernel time.",
        figures=(
            Figure(name="ranks", value=format_count(len(job.ranks))),
            Figure(name="a step", value=f"{ms_text(job.step_ns)} ms"),
            Figure(name="most kernel time", value=f"rank {slowest.number}"),
            gravest(findings),
        ),
        panels=(timeline,) if timeline is not None else (),
        shown_by=(f"stepscope trace {shlex.join(places)}",),
    )


_RANKS_DRAWN = 8
"""Ranks whose streams a timeline shows: more are too thin to be read."""


# What a run's page shows of a trace of which only the digest was kept: tables and icicles, and no timeline.


def sections_of_digest(digest: TraceDigest, *, on_cpu: bool) -> tuple[Section, ...]:
    """Where the time went, the longest kernels, and how near the families come to the device's peaks."""
    noun = "operator" if on_cpu else "kernel"
    contents = (
        ("Where the time went", digest_icicles(digest, noun), [_phases(digest, noun)]),
        ("The longest kernels", [], list(_longest(digest))),
        ("Against the device's peaks", [], [_roofs(digest)]),
    )
    sections: list[Section] = []
    for title, panels, tables in contents:
        with_rows = tuple(table for table in tables if table.rows)
        if panels or with_rows:
            answer = Answer(study="trace", question="", tables=with_rows, panels=tuple(panels))
            sections.append(Section(title=title, answer=answer))
    return tuple(sections)


def _phases(digest: TraceDigest, noun: str) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (phase.phase, phase.kernels, phase.busy_ns, phase.gemm_fraction) for phase in digest.phases
    ]
    steps = counted(digest.steps, "step")
    kept = f"From the digest of a trace by {digest.profiler} over {steps}; the trace itself is not kept here."
    return table_of(*phase_heads(noun), rows=rows, notes=as_lines(kept))


def _longest(digest: TraceDigest) -> Iterator[Table]:
    labels = kernel_labels(row.name for row in digest.top)
    for phase in dict.fromkeys(row.phase for row in digest.top):
        yield table_of(
            f"top of {phase}",
            "family",
            ("calls", "g"),
            ("ms a step", "ms of ns"),
            ("share", "%"),
            rows=[
                (labels[row.name], row.family, row.calls, row.busy_ns, row.share)
                for row in digest.top
                if row.phase == phase
            ],
        )


def _roofs(digest: TraceDigest) -> Table:
    return table_of(
        "family",
        ("ms a step", "ms of ns"),
        ("FLOP/B", ".3g"),
        ("bound ms", "ms of ns"),
        ("times its bound", ".2f"),
        "mostly",
        rows=[
            (row.family, row.device_ns, row.intensity, row.bound_ns, row.over_bound, row.verdict)
            for row in digest.roofs
        ],
    )
