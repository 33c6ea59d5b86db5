"""Finds the phases of a history, and by the open ranges the module and part of each event."""

import re
from dataclasses import dataclass

import msgspec

from stepscope.allocations.snapshot import Annotation, Snapshot
from stepscope.core.memory_notes import PhaseSpan
from stepscope.core.range_names import ATTENTION_PARTS, PHASES, RECOMPUTATION

_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")
_STEP = re.compile(r"ProfilerStep|step\b", re.IGNORECASE)


@dataclass(frozen=True)
class Place:
    """Where in the step an event happened, by the ranges that were open."""

    phase: str = ""
    module: str = ""
    part: str = ""


def place_of(metadata: str) -> Place:
    """Read the ranges that stepscope left in an event, outermost first: `forward|blocks.3.attention|softmax`."""
    phase = module = part = ""
    for name in metadata.split("|"):
        if name in PHASES or (name == RECOMPUTATION and not phase):
            phase = name
        elif name in ATTENTION_PARTS:
            part = name
        elif name != RECOMPUTATION and _MODULE.fullmatch(name) and not _STEP.match(name):
            module, part = name, ""
    return Place(phase, module, part)


def phases_of(snapshot: Snapshot) -> tuple[PhaseSpan, ...]:
    """The phases of the step, relative to the first event: as stepscope noted them; else the outermost ranges of the
    profiler, those of whole steps left out; else what the open ranges of the events span."""
    notes = snapshot.notes
    noted = list(notes.phases) if notes else []
    spans = noted or _annotated(snapshot) or _spanned(snapshot)
    start = snapshot.start_us
    spans = [
        msgspec.structs.replace(span, start_us=span.start_us - start, end_us=span.end_us - start) for span in spans
    ]
    return tuple(sorted(spans, key=lambda span: (span.start_us, span.end_us)))


def _pairs(snapshot: Snapshot) -> list[PhaseSpan]:
    """Ranges from their two ends; one that never ended, ends with the history."""
    spans: list[PhaseSpan] = []
    opened: list[Annotation] = []
    for annotation in snapshot.annotations:
        if annotation.stage == "START":
            opened.append(annotation)
        else:
            at = next((i for i in reversed(range(len(opened))) if opened[i].name == annotation.name), None)
            if at is not None:
                begun = opened.pop(at)
                spans.append(PhaseSpan(name=begun.name, start_us=begun.time_us, end_us=annotation.time_us))
    end = snapshot.times[-1]
    spans += [PhaseSpan(name=a.name, start_us=a.time_us, end_us=max(end, a.time_us)) for a in opened]
    return spans


def _annotated(snapshot: Snapshot) -> list[PhaseSpan]:
    spans = [span for span in _pairs(snapshot) if not _STEP.match(span.name)]
    known = [span for span in spans if span.name in PHASES]
    if known:
        return known
    outermost: list[PhaseSpan] = []
    for span in sorted(spans, key=lambda span: (span.start_us, -span.end_us)):
        if not outermost or span.start_us >= outermost[-1].end_us:
            outermost.append(span)
    return outermost


def _spanned(snapshot: Snapshot) -> list[PhaseSpan]:
    spans: list[PhaseSpan] = []
    for event, time_us in zip(snapshot.events, snapshot.times, strict=True):
        phase = place_of(event.user_metadata).phase if event.user_metadata else ""
        if not phase:
            continue
        if spans and spans[-1].name == phase:
            spans[-1] = msgspec.structs.replace(spans[-1], end_us=time_us)
        else:
            spans.append(PhaseSpan(name=phase, start_us=time_us, end_us=time_us))
    return spans


def spans_of_events(snapshot: Snapshot, phases: tuple[PhaseSpan, ...]) -> list[int]:
    """For each event the place of its phase among `phases`, the last begun of several; -1 outside of all."""
    found = [-1] * len(snapshot.events)
    for i, span in enumerate(phases):
        first, end = _events_within(snapshot, span.start_us + snapshot.start_us, span.end_us + snapshot.start_us)
        found[first:end] = [i] * (end - first)
    return found


def events_in_ranges(snapshot: Snapshot, part_of_name: str) -> bytearray:
    """For each event whether it happened in a range with this in its name."""
    found = bytearray(len(snapshot.events))
    for span in _pairs(snapshot):
        if part_of_name in span.name:
            first, end = _events_within(snapshot, span.start_us, span.end_us)
            found[first:end] = bytes([1]) * (end - first)
    return found


def _events_within(snapshot: Snapshot, start_us: int, end_us: int) -> tuple[int, int]:
    """The first event at or after a start, and the first after an end, in absolute times."""
    first = snapshot.last_event_until(start_us - 1) + 1
    return first, max(first, snapshot.last_event_until(end_us) + 1)
