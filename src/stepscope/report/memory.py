"""A memory snapshot for the terminal: the peak and what it is made of, by category, tensor, line of code and block."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.core.errors import printable
from stepscope.core.shown_text import name_shown
from stepscope.core.units import format_bytes, format_count, format_share, ms_text
from stepscope.memory.at_moment import Moment, phase_peaks
from stepscope.memory.blocks import Contributor, SavedByBlock, alike, saved_by_block
from stepscope.memory.explain import Explained
from stepscope.memory.memory_json import sites, tensor_of
from stepscope.report.former import make_table
from stepscope.work.described import describe_model, describe_workload

_LARGEST_SHOWN = 10
_SITES_SHOWN = 10


def render_memory(explained: Explained, moment: Moment) -> RenderableType:
    """What was alive at a moment and where it came from."""
    parts: list[RenderableType] = [*_heading(explained), Text(), *_moment_words(explained, moment), Text()]
    parts += [_category_table(moment), *_reserved_words(moment)]
    if explained.phases:
        parts += [Text(), _phase_table(explained)]
    if moment.alive.height:
        parts += [Text(), _largest_table(moment), Text(), _site_table(moment)]
    blocks = [block for block in saved_by_block(explained) if block.saved_bytes]
    if blocks:
        parts += [Text(), *_block_tables(blocks)]
    if explained.notes:
        parts += [Text(), *(Text(printable(f"Note: {note}"), style="dim") for note in explained.notes)]
    return Group(*parts)


def _heading(explained: Explained) -> list[Text]:
    snapshot = explained.snapshot
    name = snapshot.notes.device_name if snapshot.notes else ""
    device = f"device {snapshot.device}{f', {name}' if name else ''}" if explained.replay.segments else name
    lines = [Text(printable(f"{snapshot.source}: {device}".removesuffix(": ")), style="bold")]
    if snapshot.notes and snapshot.notes.workload:
        lines += [Text(describe_model(snapshot.notes.workload)), Text(describe_workload(snapshot.notes.workload))]
    made = explained.allocations["alloc_event"].count()
    before = explained.allocations.height - made
    last = explained.time_us(len(snapshot.events) - 1)
    lines.append(
        Text(
            f"{format_count(len(snapshot.events))} events in {ms_text(last * 1e3)} ms: {_count(made, 'allocation')}, "
            f"and {format_count(before)} that were there before."
        )
    )
    return lines


def _moment_words(explained: Explained, moment: Moment) -> list[Text]:
    allocated = f"{format_bytes(moment.allocated_bytes)} ({format_count(moment.allocated_bytes)} bytes)"
    alive = _count(moment.alive.height, "allocation")
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
    if measured is not None and explained.replay.segments:
        difference = explained.peak_bytes - measured
        same = "the same to the byte" if not difference else f"{format_count(abs(difference))} bytes "
        same += "" if not difference else "less" if difference > 0 else "more"
        lines.append(f"The allocator's own counters say {format_count(measured)} bytes for the peak: {same}.")
    unsure = explained.unsure_at(moment.event)
    if unsure:
        lines.append(
            f"{_count(unsure, 'block')} of those from before the history may each be up to 1 MiB longer than counted."
        )
    return [Text(line) for line in lines]


def _category_table(moment: Moment) -> Table:
    table = make_table("category", "allocated", "share", "allocations", right_from=1)
    counts = dict(moment.alive.group_by("category").len().iter_rows())
    for category, held in moment.categories.items():
        if held:
            count = format_count(counts[category]) if category in counts else ""
            table.add_row(category, format_bytes(held), _share(held, moment.allocated_bytes), count)
    table.add_section()
    table.add_row("all", format_bytes(moment.allocated_bytes), "", format_count(moment.alive.height), style="bold")
    return table


def _reserved_words(moment: Moment) -> list[Text]:
    held = moment.reserved
    if held is None:
        return []
    awaiting = f", {format_bytes(held.awaiting_free_bytes)} awaiting another stream" if held.awaiting_free_bytes else ""
    return [
        Text(
            f"{format_bytes(held.reserved_bytes)} are reserved from the driver: {format_bytes(held.allocated_bytes)} "
            f"allocated, {format_bytes(held.cached_bytes)} cached in segments that hold nothing, "
            f"{format_bytes(held.fragmented_bytes)} free between live blocks (fragmentation){awaiting}."
        )
    ]


def _phase_table(explained: Explained) -> Table:
    table = make_table("phase", "peak", "of the peak", "at ms", right_from=1)
    for peak in phase_peaks(explained):
        share = _share(peak.peak_bytes, explained.peak_bytes)
        table.add_row(name_shown(peak.phase), format_bytes(peak.peak_bytes), share, ms_text(peak.time_us * 1e3))
    return table


def _largest_table(moment: Moment) -> Table:
    table = make_table("largest alive, allocated at", "tensor", "category", "times", "each", right_from=3)
    keys = ("block", "category", "name", "shape", "dtype", "operator", "site")
    alike_rows = moment.alive.group_by(keys, maintain_order=True).len().head(_LARGEST_SHOWN)
    for row in alike_rows.iter_rows(named=True):
        size = format_bytes(row["block"])
        table.add_row(name_shown(row["site"]), _tensor(row), row["category"], str(row["len"]), size)
    return table


def _site_table(moment: Moment) -> Table:
    table = make_table("all alive, by line", "bytes", "share", "allocations", "mostly", right_from=1)
    by_site = sites(moment.alive)
    for row in by_site.head(_SITES_SHOWN).iter_rows(named=True):
        table.add_row(
            name_shown(row["site"]) or "(unknown)",
            format_bytes(row["bytes"]),
            _share(row["bytes"], moment.allocated_bytes),
            format_count(row["allocations"]),
            row["category"],
        )
    rest = by_site.tail(max(0, by_site.height - _SITES_SHOWN))
    if rest.height:
        held = int(rest["bytes"].sum())
        table.add_section()
        table.add_row(
            f"{rest.height} more", format_bytes(held), _share(held, moment.allocated_bytes),
            format_count(int(rest["allocations"].sum())), "",
        )  # fmt: skip
    return table


def _block_tables(blocks: list[SavedByBlock]) -> list[RenderableType]:
    """What blocks save, those alike on one line, and the largest contributors of the one that saves most."""
    table = make_table("saved for backward by", "each", "tensors", "gradients left", "together", right_from=1)
    merged = alike(blocks)
    for one in merged:
        times = 1 + len(one.alike)
        table.add_row(
            name_shown(f"{one.block} and {len(one.alike)} alike" if one.alike else one.block or "outside of blocks"),
            format_bytes(one.saved_bytes), str(one.saved_tensors), format_bytes(one.gradient_bytes),
            format_bytes(one.saved_bytes * times),
        )  # fmt: skip
    first = max((one for one in merged if one.block), key=lambda one: one.saved_bytes, default=None)
    if first is None:
        return [table]
    largest = make_table(f"largest saved by {name_shown(first.block)}", "tensor", "saved", "share", right_from=2)
    for contributor in first.largest:
        share = _share(contributor.bytes, first.saved_bytes)
        largest.add_row(
            name_shown(_place(contributor)), _contributed(contributor), format_bytes(contributor.bytes), share
        )
    return [table, Text(), largest]


def _place(contributor: Contributor) -> str:
    return f"{contributor.module or '(the block itself)'}, {contributor.site}".removesuffix(", ")


def _contributed(contributor: Contributor) -> str:
    shape = "" if contributor.shape is None else " x ".join(map(str, contributor.shape))
    what = f"{contributor.name} of {contributor.operator}" if contributor.operator else contributor.name
    return name_shown(" ".join(part for part in (what, shape, contributor.dtype) if part))


def _tensor(row: dict) -> str:
    known = tensor_of(row)
    if known is None:
        return ""
    what = f"{known['name']} of {known['operator']}" if known["operator"] else known["name"]
    shape = "" if known["shape"] is None else " x ".join(map(str, known["shape"]))
    return name_shown(" ".join(part for part in (what, shape, known["dtype"]) if part))


def _share(part: int, whole: int) -> str:
    return format_share(part / whole) if whole else ""


def _count(count: int, noun: str) -> str:
    return f"{format_count(count)} {noun}{'s' if count != 1 else ''}"
