"""A memory snapshot as an answer: the peak and what it is made of, by category, tensor, line of code and block."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import PurePath
from typing import Any

import msgspec
import polars as pl

from stepscope.allocations import at_moment
from stepscope.allocations.explain import Explained, certainty_of
from stepscope.allocations.left_behind import growth_finding, growth_tables
from stepscope.allocations.replay import BEFORE
from stepscope.core.answer import TEXT, Answer, Cell, Finding, Line, Table, as_lines, table_of, text
from stepscope.core.errors import printable
from stepscope.core.evidence import KeptTensor, LeftBehind, MemoryGrowth
from stepscope.core.formulas.spelled import describe_model, describe_workload
from stepscope.core.range_names import FORWARD
from stepscope.core.units import counted, format_bytes, format_count, format_share, ms_text

# Finds what each block of the model saves for backward, and the gradients that it leaves.


_BLOCK = re.compile(r"((?:\w+\.)*?\w+\.\d+)(?:\.|$)")
CONTRIBUTORS = 5


@dataclass(frozen=True, kw_only=True)
class Contributor:
    """A tensor that a block saves."""

    operator: str
    name: str
    module: str
    """The module's path inside the block."""
    shape: tuple[int, ...] | None
    dtype: str
    bytes: int
    site: str


@dataclass(frozen=True, kw_only=True)
class SavedByBlock:
    """What one block of the model saves for backward; `alike` names blocks that save the same."""

    block: str
    saved_bytes: int
    saved_tensors: int
    gradient_bytes: int
    largest: tuple[Contributor, ...]
    alike: tuple[str, ...] = ()
    """The other blocks with the same figures."""


def block_of(path: str) -> str:
    """The block that a module or parameter belongs to: `blocks.3` of `blocks.3.attention.query`; '' outside of all."""
    match = _BLOCK.match(path)
    return match[1] if match else ""


def saved_by_block(explained: Explained) -> list[SavedByBlock]:
    """What each block saves, in the order of the model: what is alive when the last forward ends. Modules outside of
    all blocks stand under ''. Empty where modules are not known."""
    table = explained.allocations
    if not table.height or not (table["module"] != "").any():
        return []
    forwards = [span for span in explained.phases if span.name == FORWARD]
    alive = table
    if forwards:
        snapshot = explained.snapshot
        alive = explained.alive(snapshot.last_event_until(snapshot.start_us + forwards[-1].end_us))
    gradients = Counter[str]()
    of_gradients = table.filter(pl.col("category") == "gradients").select("name", "module", "requested")
    for name, module, count in of_gradients.iter_rows():
        gradients[block_of(name or module)] += count
    saved: dict[str, list[dict[str, Any]]] = {}
    for row in alive.filter(pl.col("category") == "saved for backward").sort("alloc_event").iter_rows(named=True):
        saved.setdefault(block_of(row["module"]), []).append(row)
    by_block: list[SavedByBlock] = []
    for block, rows in saved.items():
        largest = tuple(
            Contributor(
                operator=row["operator"],
                name=row["name"],
                module="|".join(
                    part for part in (row["module"].removeprefix(block).removeprefix("."), row["part"]) if part
                ),
                shape=None if row["shape"] is None else tuple(row["shape"]),
                dtype=row["dtype"],
                bytes=row["requested"],
                site=row["site"],
            )
            for row in sorted(rows, key=lambda row: -row["requested"])[:CONTRIBUTORS]
        )
        held = sum(row["requested"] for row in rows)
        one = SavedByBlock(
            block=block, saved_bytes=held, saved_tensors=len(rows), gradient_bytes=gradients[block], largest=largest
        )
        by_block.append(one)
    # Numbers in a path count as numbers: blocks.10 comes after blocks.9.
    return sorted(
        by_block,
        key=lambda one: [(int(part), "") if part.isdigit() else (-1, part) for part in one.block.split(".")],
    )


def alike(blocks: list[SavedByBlock]) -> list[SavedByBlock]:
    """The blocks with those of the same figures merged into one, in the order of the first of each."""
    merged: dict[tuple[int, int, int, bool], SavedByBlock] = {}
    for one in blocks:
        key = (one.saved_bytes, one.saved_tensors, one.gradient_bytes, bool(one.block))
        first = merged.get(key)
        merged[key] = one if first is None else replace(first, alike=(*first.alike, one.block))
    return list(merged.values())


# What recorded steps left behind: the bytes at the end of each, and whose are more after every one of them.
#
# A group of allocations grows where its bytes are more at the end of each recorded step than at the end of the step
# before. A cache that fills once, a gradient that the first step makes, a tensor that is replaced: none of these does.


def growth_of(explained: Explained) -> MemoryGrowth | None:
    """What the recorded steps left behind; None for a history of one step, or of another tool."""
    notes, snapshot = explained.snapshot.notes, explained.snapshot
    if notes is None or len(notes.step_ends_us) < 2:
        return None
    ends = [BEFORE, *(snapshot.last_event_until(end_us) for end_us in notes.step_ends_us)]
    last = len(snapshot.events) - 1
    alive = [explained.alive(event) for event in (*ends, last)]
    if not explained.snapshot.has_segments:
        # On a CPU nobody sees the release of what was there before. It shows when its place is given away, steps later,
        # and would hide as much growth then; so it counts as released in the first step.
        gone = pl.col("alloc_event").is_null() & pl.col("free_event").is_not_null()
        alive[1:] = [rows.filter(~gone) for rows in alive[1:]]
    held = [int(rows["block"].sum()) for rows in alive]
    left = _groups_that_grow(explained, alive, {kept.address: kept for kept in notes.kept})
    return MemoryGrowth(
        ends=tuple(held[:-1]),
        left=tuple(sorted(left, key=lambda group: (-group.bytes_a_step, group.site))),
        collected_bytes=max(0, held[-2] - held[-1]),
    )


def _groups_that_grow(
    explained: Explained, alive: list[pl.DataFrame], kept: dict[int, KeptTensor]
) -> Iterator[LeftBehind]:
    """Lines whose bytes are more at each end; what the collector then freed was nobody's."""
    steps = len(alive) - 2
    sums = [rows.group_by("site").agg(pl.col("block").sum(), count=pl.len()) for rows in alive]
    figures = [{site: (size, count) for site, size, count in rows.iter_rows()} for rows in sums]
    for site in figures[-1]:
        of_ends = [of_end.get(site, (0, 0)) for of_end in figures[1:]]
        *at_ends, after = [size for size, _ in of_ends]
        if not all(earlier < later for earlier, later in pairwise(at_ends)) or after <= at_ends[-2]:
            continue
        new = alive[-1].filter((pl.col("site") == site) & pl.col("alloc_event").is_not_null())
        held = Counter[str]()
        for address, block in new.select("address", "block").iter_rows():
            held[kept[address].kept_by if address in kept else ""] += block
        new = new.sort("block", "alloc_event", descending=True)
        largest = new.row(0, named=True)
        categories = dict.fromkeys(new["category"])
        yield LeftBehind(
            site=site or "(unknown)",
            category=largest["category"],
            # What a step keeps from the step before is once more at the first ends, and grows no further.
            bytes_a_step=min(later - earlier for earlier, later in pairwise([*at_ends[:-1], min(at_ends[-1], after)])),
            tensors_a_step=(of_ends[-1][1] - of_ends[0][1]) / (steps - 1),
            shape=None if largest["shape"] is None else tuple(largest["shape"]),
            **{name: largest[name] for name in ("dtype", "name", "module")},
            other_kinds=new.select("category", "shape", "dtype").n_unique() - 1,
            other_categories=tuple(name for name in categories if name != largest["category"]),
            kept_by=held.most_common(1)[0][0],
        )


# A snapshot's moment as plain data: what `stepscope memory --json` prints. The first five keys are a contract.


LARGEST = 20
SITES = 20


def memory_document(explained: Explained, moment: at_moment.Moment) -> dict[str, Any]:
    """The moment as a dict. `peak_bytes` is what was allocated then: at the peak, unless --at named another moment.

    Times are microseconds after the first event, which happened at `start_time_us`. `allocations` is how many the
    history made; `alive` how many there were at the moment. `certainty` is there without notes of stepscope: by
    category the bytes asked for, by what the category is known (evidence.CERTAINTIES).
    """
    snapshot, growth, certainty = explained.snapshot, growth_of(explained), certainty_of(moment.alive)
    pieces = at_moment.pieces_between(explained, moment.event)
    largest = [
        {
            "bytes": row["block"],
            "site": row["site"],
            "frames": explained.stacks.frames(row["stack"]),
            "requested_bytes": row["requested"],
            "category": row["category"],
            **({"certainty": row["sure"]} if "sure" in row else {}),
            "tensor": tensor_of(row),
            **{name: row[name] for name in ("phase", "module", "part", "alloc_us", "free_us")},
        }
        for row in moment.alive.head(LARGEST).iter_rows(named=True)
    ]
    document = {
        "peak_bytes": moment.allocated_bytes,
        "peak_time_us": moment.time_us,
        "allocations": explained.allocations["alloc_event"].count(),
        "largest": largest,
        "categories": moment.categories,
        "moment": moment.name,
        "alive": moment.alive.height,
        "reserved": moment.reserved,
        "pools": moment.pools,
        "reserved_peak_bytes": max(reserved for _, reserved in explained.replay.reserved),
        "free_pieces": {"count": len(pieces), "longest_bytes": max(pieces, default=0)},
        "new_segments": at_moment.new_segments(explained),
        "growth": growth and {**msgspec.to_builtins(growth), "bytes_a_step": growth.bytes_a_step},
        "findings": memory_findings(explained, growth),
        "phases": at_moment.phase_peaks(explained),
        "sites": sites(moment.alive).head(SITES).to_dicts(),
        "saved_by_block": saved_by_block(explained),
        "exact": explained.exact_at(moment.event),
        "unsure_blocks": explained.unsure_at(moment.event),
        "by_notes": explained.noted,
        **({} if certainty is None else {"certainty": certainty}),
        "notes": explained.notes,
        "measured": explained.measured,
        "device": snapshot.device,
        "devices": at_moment.devices_of(explained),
        "start_time_us": snapshot.start_us,
        "events": len(snapshot.events),
    }
    return msgspec.to_builtins(document)


def memory_findings(explained: Explained, growth: MemoryGrowth | None) -> tuple[Finding, ...]:
    """What a snapshot shows beyond its figures: memory that grows, and pools that hold what nobody else can use."""
    findings = (growth and growth_finding(growth), at_moment.pool_finding(explained))
    return tuple(finding for finding in findings if finding)


def tensor_of(row: dict[str, Any]) -> dict[str, Any] | None:
    """The known fields of the tensor in an allocation."""
    if not row["name"] and row["shape"] is None:
        return None
    shape = None if row["shape"] is None else list(row["shape"])
    return {"name": row["name"], "shape": shape, "dtype": row["dtype"], "operator": row["operator"]}


def sites(alive: pl.DataFrame) -> pl.DataFrame:
    """Lines of code by what they hold: `site`, `bytes`, `allocations`, `category` (the largest of the site's)."""
    by_category = alive.group_by("site", "category").agg(bytes=pl.col("block").sum(), allocations=pl.len())
    return (
        by_category.sort("bytes", "category", descending=[True, False])
        .group_by("site", maintain_order=True)
        .agg(pl.col("bytes").sum(), pl.col("allocations").sum(), pl.col("category").first())
        .sort("bytes", "site", descending=[True, False])
    )


_LARGEST_SHOWN = 10
_SITES_SHOWN = 10


def answer_memory(explained: Explained, moment: at_moment.Moment, stacks: int = 0) -> Answer:
    """The Answer on what was alive at a moment and where it came from, with stacks of so many of the largest blocks."""
    notes = explained.snapshot.notes
    growth = growth_of(explained)
    findings = memory_findings(explained, growth)
    tables = [text(*_moment_words(explained, moment)), _category_table(explained, moment), *growth_tables(growth)]
    tables += [*at_moment.holder_tables(explained, moment.pools), *_history_tables(explained)]
    if moment.alive.height:
        tables += _alive_tables(explained, moment, stacks)
    tables += _block_tables([block for block in saved_by_block(explained) if block.saved_bytes])
    return Answer(
        study="memory",
        question=f"What takes the memory at {moment.name}?",
        device=notes.device_name if notes else "",
        # The name alone: a picture may be kept with results, and says nothing of the machine it was drawn on.
        settings={"snapshot": PurePath(explained.snapshot.source).name},
        lead=_heading(explained),
        tables=tuple(tables),
        panels=(at_moment.timeline_panel(explained),),
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
    allocated = explained.allocations["alloc_event"].count()
    before = explained.allocations.height - allocated
    last = explained.time_us(len(snapshot.events) - 1)
    lines.append(
        Line(
            f"{format_count(len(snapshot.events))} events in {ms_text(last * 1e3)} ms: "
            f"{counted(allocated, 'allocation')}, and {format_count(before)} that were there before."
        )
    )
    return tuple(lines)


def _moment_words(explained: Explained, moment: at_moment.Moment) -> list[str]:
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


def _category_table(explained: Explained, moment: at_moment.Moment) -> Table:
    counts = dict(moment.alive.group_by("category").len().iter_rows())
    certainty = certainty_of(moment.alive)
    rows: list[tuple[Cell, ...]] = []
    for category, held in moment.categories.items():
        # By what the category is known, with the share of its bytes where it is by several.
        by = (certainty or {}).get(category, {})
        known = ", ".join(f"{how} {format_share(count / sum(by.values()))}" for how, count in by.items())
        if held:
            share = _share(held, moment.allocated_bytes)
            rows.append((category, held, share, counts.get(category), known if len(by) > 1 else "".join(by)))
    rows.append(("all", moment.allocated_bytes, None, moment.alive.height, ""))
    columns = ("category", ("allocated", "B"), ("share", "%"), ("allocations", ","), "known by")
    noted = certainty is None
    return table_of(
        *(columns[:-1] if noted else columns),
        rows=[row[:-1] for row in rows] if noted else rows,
        rules=(len(rows) - 1,),
        tones={len(rows) - 1: "strong"},
        notes=as_lines(*_reserved_words(explained, moment)),
    )


def _reserved_words(explained: Explained, moment: at_moment.Moment) -> Iterator[str]:
    """What the allocator holds beside live memory, and how what is free between live blocks is cut up, which decides
    whether it can serve anything."""
    held = moment.reserved
    if held is None:
        return
    beside = "".join(
        f", {format_bytes(count)} {what}"
        for count, what in (
            (held.awaiting_free_bytes, "awaiting another stream"),
            (held.private_free_bytes, "free in private pools"),
        )
        if count
    )
    most = max(reserved for _, reserved in explained.replay.reserved)
    at_most = f" At most {format_bytes(most)} were." if most > held.reserved_bytes else ""
    yield (
        f"{format_bytes(held.reserved_bytes)} are reserved from the driver: {format_bytes(held.allocated_bytes)} "
        f"allocated, {format_bytes(held.cached_bytes)} cached in segments that hold nothing, "
        f"{format_bytes(held.fragmented_bytes)} free between live blocks (fragmentation){beside}.{at_most}"
    )
    pieces = at_moment.pieces_between(explained, moment.event)
    if pieces:
        count, longest = counted(len(pieces), "piece"), format_bytes(max(pieces))
        yield f"What is free between live blocks lies in {count}, the longest of {longest}."


def _history_tables(explained: Explained) -> Iterator[Table]:
    """The peaks of the phases, and segments that the driver was asked for while as much was free in pieces."""
    at = ("at ms", "ms of ns")
    if explained.phases:
        rows = [
            (peak.phase, peak.peak_bytes, _share(peak.peak_bytes, explained.peak_bytes), peak.time_us * 1e3)
            for peak in at_moment.phase_peaks(explained)
        ]
        yield table_of("phase", ("peak", "B"), ("of the peak", "%"), at, rows=rows)
    segments = at_moment.new_segments(explained)
    if segments:
        yield table_of(
            "fragmentation: new segment for", ("requested", "B"), ("segment", "B"), ("longest free", "B"),
            ("free together", "B"), at,
            rows=[
                (new.site, new.requested_bytes, new.segment_bytes, new.largest_free_bytes, new.free_bytes,
                 new.time_us * 1e3)
                for new in segments
            ],
        )  # fmt: skip


def _alive_tables(explained: Explained, moment: at_moment.Moment, stacks: int) -> Iterator[Table]:
    """The largest allocations alive, the call stacks of some, the innermost call first, and all by line of code."""
    keys = ("block", "category", "name", "shape", "dtype", "operator", "site")
    alike_rows = moment.alive.group_by(keys, maintain_order=True).len().head(_LARGEST_SHOWN)
    columns = ("largest alive, allocated at", "tensor", "category", ("times", TEXT), ("each", "B"))
    largest = [
        (row["site"], _tensor(row), row["category"], row["len"], row["block"])
        for row in alike_rows.iter_rows(named=True)
    ]
    yield table_of(*columns, rows=largest)
    for i, row in enumerate(moment.alive.head(stacks).iter_rows(named=True), start=1):
        yield table_of(
            f"{format_bytes(row['block'])}, {row['category']}: called from",
            rows=[(frame,) for frame in explained.stacks.frames(row["stack"])] or [("(no stack was recorded)",)],
            title=f"Stack {i}: {_tensor(row) or row['site']}",
        )
    by_site, whole = sites(moment.alive), moment.allocated_bytes
    rows: list[tuple[Cell, ...]] = [
        (site or "(unknown)", held, _share(held, whole), count, category)
        for site, held, count, category in by_site.head(_SITES_SHOWN).iter_rows()
    ]
    rest = by_site.tail(max(0, by_site.height - _SITES_SHOWN))
    if rest.height:
        held = int(rest["bytes"].sum())
        rows.append((f"{rest.height} more", held, _share(held, whole), int(rest["allocations"].sum()), ""))
    yield table_of(
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
        f"largest saved by {first.block}",
        "tensor",
        ("saved", "B"),
        ("share", "%"),
        rows=[
            (
                f"{one.module or '(the block itself)'}, {one.site}".removesuffix(", "),
                _tensor_words(one.name, one.operator, one.shape, one.dtype),
                one.bytes,
                _share(one.bytes, first.saved_bytes),
            )
            for one in first.largest
        ],
    )
    return [saved, largest]


def _tensor(row: dict[str, Any]) -> str:
    known = tensor_of(row)
    return "" if known is None else _tensor_words(**known)


def _tensor_words(name: str, operator: str, shape: Iterable[int] | None, dtype: str) -> str:
    what = f"{name} of {operator}" if operator else name
    return " ".join(part for part in (what, " x ".join(map(str, shape or ())), dtype) if part)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
