"""A memory snapshot as an answer: the peak and what it is made of, by category, tensor, line of code and block."""

from pathlib import PurePath
from typing import Any

from stepscope.allocations.at_moment import Moment, phase_peaks
from stepscope.allocations.blocks import Contributor, SavedByBlock, alike, saved_by_block
from stepscope.allocations.devices import device_table
from stepscope.allocations.evidence import Certainty, certainty_of
from stepscope.allocations.explain import Explained
from stepscope.allocations.fragmentation import new_segments, pieces_between
from stepscope.allocations.growth import growth_of
from stepscope.allocations.left_behind import growth_tables
from stepscope.allocations.memory_json import memory_findings, sites, tensor_of
from stepscope.allocations.pools import pool_table
from stepscope.allocations.timeline import timeline_panel
from stepscope.core.answer import TEXT, Answer, Cell, Line, Table, as_lines, table_of, text
from stepscope.core.errors import printable
from stepscope.core.units import counted, format_bytes, format_count, format_share, ms_text
from stepscope.core.work.described import describe_model, describe_workload

_LARGEST_SHOWN = 10
_SITES_SHOWN = 10


def answer_memory(explained: Explained, moment: Moment, stacks: int = 0) -> Answer:
    """The Answer on what was alive at a moment and where it came from, with stacks of so many of the largest blocks."""
    notes = explained.snapshot.notes
    growth = growth_of(explained)
    findings = memory_findings(explained, growth)
    tables = [text(*_moment_words(explained, moment)), _category_table(explained, moment), *growth_tables(growth)]
    tables += [*pool_table(moment.pools), *device_table(explained)]
    tables += [*_phase_table(explained), *_new_segment_table(explained)]
    if moment.alive.height:
        tables += [_largest_table(moment), *_stack_tables(explained, moment, stacks), _site_table(moment)]
    tables += _block_tables([block for block in saved_by_block(explained) if block.saved_bytes])
    return Answer(
        study="memory",
        question=f"What takes the memory at {moment.name}?",
        device=notes.device_name if notes else "",
        # The name alone: a picture may be kept with results, and says nothing of the machine it was drawn on.
        settings={"snapshot": PurePath(explained.snapshot.source).name},
        lead=_heading(explained),
        tables=tuple(tables),
        panels=(timeline_panel(explained),),
        findings=findings,
        checked=growth is not None or bool(findings),
        asides=tuple(f"Note: {note}" for note in explained.notes),
    )


def _heading(explained: Explained) -> tuple[Line, ...]:
    snapshot = explained.snapshot
    name = snapshot.notes.device_name if snapshot.notes else ""
    device = f"device {snapshot.device}{f', {name}' if name else ''}" if snapshot.has_segments else name
    lines = [Line(printable(f"{snapshot.source}: {device}".removesuffix(": ")), "strong")]
    if snapshot.notes and snapshot.notes.workload:
        workload = snapshot.notes.workload
        lines += as_lines(describe_model(workload), describe_workload(workload))
    made = explained.allocations["alloc_event"].count()
    before = explained.allocations.height - made
    last = explained.time_us(len(snapshot.events) - 1)
    lines.append(
        Line(
            f"{format_count(len(snapshot.events))} events in {ms_text(last * 1e3)} ms: {counted(made, 'allocation')}, "
            f"and {format_count(before)} that were there before."
        )
    )
    return tuple(lines)


def _moment_words(explained: Explained, moment: Moment) -> list[str]:
    allocated = f"{format_bytes(moment.allocated_bytes)} ({format_count(moment.allocated_bytes)} bytes)"
    alive = counted(moment.alive.height, "allocation")
    phase = next((s.name for s in explained.phases if s.start_us <= moment.time_us <= s.end_us), None)
    during = f" in {phase}," if phase else ""
    when = f"{ms_text(moment.time_us * 1e3)} ms after the first event"
    if moment.event == explained.peak_event and moment.name == "the peak":
        lines = [f"The peak:{during} {when}, {allocated} are allocated in {alive}."]
    else:
        of_peak = moment.allocated_bytes / explained.peak_bytes if explained.peak_bytes else 0.0
        lines = [
            f"At {moment.name}:{during} {when}, {allocated} are allocated in {alive}, "
            f"{format_share(of_peak)} of the peak of {format_bytes(explained.peak_bytes)}."
        ]
    measured = explained.measured.allocated_peak if explained.measured else None
    if measured is not None and explained.snapshot.has_segments:
        difference = explained.peak_bytes - measured
        same = "the same to the byte" if not difference else f"{format_count(abs(difference))} bytes "
        same += "" if not difference else "less" if difference > 0 else "more"
        lines.append(f"The allocator's own counters say {format_count(measured)} bytes for the peak: {same}.")
    unsure = explained.unsure_at(moment.event)
    if unsure:
        lines.append(
            f"{counted(unsure, 'block')} of those from before the history may each be up to 1 MiB longer than counted."
        )
    return lines


def _category_table(explained: Explained, moment: Moment) -> Table:
    counts = dict(moment.alive.group_by("category").len().iter_rows())
    certainty = certainty_of(moment.alive)
    rows: list[tuple[Cell, ...]] = [
        (category, held, _share(held, moment.allocated_bytes), counts.get(category), *_known_by(certainty, category))
        for category, held in moment.categories.items()
        if held
    ]
    rows.append(("all", moment.allocated_bytes, None, moment.alive.height, *([] if certainty is None else [""])))
    columns = ("category", ("allocated", "B"), ("share", "%"), ("allocations", ","))
    return table_of(
        *columns, *([] if certainty is None else ["known by"]), rows=rows,
        rules=(len(rows) - 1,), tones={len(rows) - 1: "strong"},
        notes=as_lines(*_reserved_words(explained, moment), *_free_words(explained, moment)),
    )  # fmt: skip


def _known_by(certainty: dict[str, dict[Certainty, int]] | None, category: str) -> list[str]:
    """By what a category is known, with the share of its bytes where it is by several; nothing for noted ones."""
    if certainty is None:
        return []
    by = certainty.get(category, {})
    together = sum(by.values())
    if len(by) < 2:
        return ["".join(by)]
    return [", ".join(f"{how} {format_share(count / together)}" for how, count in by.items())]


def _reserved_words(explained: Explained, moment: Moment) -> list[str]:
    held = moment.reserved
    if held is None:
        return []
    others = (
        (held.awaiting_free_bytes, "awaiting another stream"),
        (held.private_free_bytes, "free in private pools"),
    )
    beside = "".join(f", {format_bytes(count)} {what}" for count, what in others if count)
    most = max(reserved for _, reserved in explained.replay.reserved)
    at_most = f" At most {format_bytes(most)} were." if most > held.reserved_bytes else ""
    return [
        f"{format_bytes(held.reserved_bytes)} are reserved from the driver: {format_bytes(held.allocated_bytes)} "
        f"allocated, {format_bytes(held.cached_bytes)} cached in segments that hold nothing, "
        f"{format_bytes(held.fragmented_bytes)} free between live blocks (fragmentation){beside}.{at_most}"
    ]


def _free_words(explained: Explained, moment: Moment) -> list[str]:
    """How the free memory between live blocks is cut up, which decides whether it can serve anything."""
    pieces = pieces_between(explained, moment.event)
    if not pieces:
        return []
    together = f"What is free between live blocks lies in {counted(len(pieces), 'piece')}"
    return [f"{together}, the longest of {format_bytes(max(pieces))}."]


def _new_segment_table(explained: Explained) -> list[Table]:
    """Segments that the driver was asked for while as much was free in pieces."""
    found = new_segments(explained)
    table = table_of(
        "fragmentation: new segment for", ("requested", "B"), ("segment", "B"), ("longest free", "B"),
        ("free together", "B"), ("at ms", "ms of ns"),
        rows=[
            (new.site, new.requested_bytes, new.segment_bytes, new.largest_free_bytes, new.free_bytes,
             new.time_us * 1e3)
            for new in found
        ],
    )  # fmt: skip
    return [table] if found else []


def _phase_table(explained: Explained) -> list[Table]:
    rows = [
        (peak.phase, peak.peak_bytes, _share(peak.peak_bytes, explained.peak_bytes), peak.time_us * 1e3)
        for peak in phase_peaks(explained)
    ]
    columns = ("phase", ("peak", "B"), ("of the peak", "%"), ("at ms", "ms of ns"))
    return [table_of(*columns, rows=rows)] if explained.phases else []


def _largest_table(moment: Moment) -> Table:
    keys = ("block", "category", "name", "shape", "dtype", "operator", "site")
    alike_rows = moment.alive.group_by(keys, maintain_order=True).len().head(_LARGEST_SHOWN)
    return table_of(
        "largest alive, allocated at", "tensor", "category", ("times", TEXT), ("each", "B"),
        rows=[
            (row["site"], _tensor(row), row["category"], row["len"], row["block"])
            for row in alike_rows.iter_rows(named=True)
        ],
    )  # fmt: skip


def _stack_tables(explained: Explained, moment: Moment, count: int) -> list[Table]:
    """The call stacks of the largest allocations, the innermost call first."""
    return [
        table_of(
            f"{format_bytes(row['block'])}, {row['category']}: called from",
            rows=[(frame,) for frame in explained.stacks.frames(row["stack"])] or [("(no stack was recorded)",)],
            title=f"Stack {i}: {_tensor(row) or row['site']}",
        )
        for i, row in enumerate(moment.alive.head(count).iter_rows(named=True), start=1)
    ]


def _site_table(moment: Moment) -> Table:
    by_site = sites(moment.alive)
    rows: list[tuple[Cell, ...]] = [
        (
            row["site"] or "(unknown)", row["bytes"], _share(row["bytes"], moment.allocated_bytes),
            row["allocations"], row["category"],
        )
        for row in by_site.head(_SITES_SHOWN).iter_rows(named=True)
    ]  # fmt: skip
    rest = by_site.tail(max(0, by_site.height - _SITES_SHOWN))
    if rest.height:
        held = int(rest["bytes"].sum())
        share = _share(held, moment.allocated_bytes)
        rows.append((f"{rest.height} more", held, share, int(rest["allocations"].sum()), ""))
    return table_of(
        "all alive, by line", ("bytes", "B"), ("share", "%"), ("allocations", ","), "mostly",
        rows=rows, rules=(_SITES_SHOWN,) if rest.height else (),
    )  # fmt: skip


def _block_tables(blocks: list[SavedByBlock]) -> list[Table]:
    """Tables of what blocks save, alike ones on one line, and of the largest contributors to the one with most."""
    if not blocks:
        return []
    merged = alike(blocks)
    saved = table_of(
        "saved for backward by", ("each", "B"), ("tensors", TEXT), ("gradients left", "B"), ("together", "B"),
        rows=[
            (
                f"{one.block} and {len(one.alike)} alike" if one.alike else one.block or "outside of blocks",
                one.saved_bytes, one.saved_tensors, one.gradient_bytes, one.saved_bytes * (1 + len(one.alike)),
            )
            for one in merged
        ],
    )  # fmt: skip
    first = max((one for one in merged if one.block), key=lambda one: one.saved_bytes, default=None)
    if first is None:
        return [saved]
    largest = table_of(
        f"largest saved by {first.block}", "tensor", ("saved", "B"), ("share", "%"),
        rows=[
            (_place(contributor), _contributed(contributor), contributor.bytes,
             _share(contributor.bytes, first.saved_bytes))
            for contributor in first.largest
        ],
    )  # fmt: skip
    return [saved, largest]


def _place(contributor: Contributor) -> str:
    return f"{contributor.module or '(the block itself)'}, {contributor.site}".removesuffix(", ")


def _contributed(contributor: Contributor) -> str:
    shape = "" if contributor.shape is None else " x ".join(map(str, contributor.shape))
    what = f"{contributor.name} of {contributor.operator}" if contributor.operator else contributor.name
    return " ".join(part for part in (what, shape, contributor.dtype) if part)


def _tensor(row: dict[str, Any]) -> str:
    known = tensor_of(row)
    if known is None:
        return ""
    what = f"{known['name']} of {known['operator']}" if known["operator"] else known["name"]
    shape = "" if known["shape"] is None else " x ".join(map(str, known["shape"]))
    return " ".join(part for part in (what, shape, known["dtype"]) if part)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
