"""One moment of a history: what was alive then, by category, site and tensor, and what the allocator held beside it."""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import polars as pl

from stepscope.allocations.explain import OF_TENSORS, ROUNDING, Explained, allocated_curve, categories_of, changes_of
from stepscope.allocations.prediction.caching_allocator import SMALL_SEGMENT
from stepscope.allocations.replay import BEFORE, Contradiction, replay, segments_after
from stepscope.allocations.snapshot import ORDINARY, PoolId, Segment
from stepscope.core.answer import Finding, Frame, Guide, Panel, Point, Span, Table, as_lines, note, table_of
from stepscope.core.errors import InputError
from stepscope.core.evidence import CATEGORIES, MemoryCategory, PhaseSpan
from stepscope.core.formulas.spelled import describe_workload
from stepscope.core.units import format_bytes

# Live bytes by category over a history: exact after every event, and thinned to what a plot can show.


_TIMELINE_TIME = "time_us"
POINTS = 2000
"""At most so many moments are kept for a plot, about two for each pixel of the width: more could not be told apart."""


def timeline_panel(explained: Explained) -> Panel:
    """The live memory over the history, with the phases, and the most that the allocator had reserved."""
    notes = explained.snapshot.notes
    reserved = max(bytes_held for _, bytes_held in explained.replay.reserved)
    workload = notes.workload if notes else None
    heading = f"{workload.model.name}: {describe_workload(workload)}" if workload else "Live memory by category"
    curve = explained.curve
    kept = curve["event"].gather(_kept(_times_of(explained, curve["event"]), curve["allocated"], POINTS))
    timeline = category_timeline(explained, kept)
    return panel_of(timeline, explained.phases, heading=heading, reserved_bytes=reserved)


def panel_of(
    timeline: pl.DataFrame, phases: Sequence[PhaseSpan] = (), *, heading: str = "", reserved_bytes: int = 0
) -> Panel:
    """A timeline as areas, thinned. timeline: `time_us`, ascending from 0, and a column of live bytes a category, each
    row until the next one's moment; phases on the same clock."""
    thinned = thin(timeline)
    names = [name for name in thinned.columns if name != _TIMELINE_TIME]
    times = thinned[_TIMELINE_TIME].to_list()
    points = [
        Point(line=name, x=float(at), y=float(held))
        for name in names
        for at, held in zip(times, thinned[name].to_list(), strict=True)
    ]
    return Panel(
        x_title="time",
        y_title="live memory",
        kind="areas",
        points=tuple(points),
        frame=Frame(
            heading=heading,
            spans=tuple(Span(phase.name, float(phase.start_us), float(phase.end_us)) for phase in phases),
            guides=(Guide(name="reserved", y=(float(reserved_bytes),)),) if reserved_bytes else (),
        ),
    )


def thin(timeline: pl.DataFrame, points: int = POINTS) -> pl.DataFrame:
    """At most so many rows of the timeline (at least four), unchanged and in order.

    timeline: `time_us` ascending, and columns of bytes whose sum is the total. Time is cut into equal buckets; of each
    the rows of the highest and of the lowest total stay, and the last, which the next bucket begins from. The first
    row stays too. So the maximum of every bucket, and with it the peak, is that of the whole.
    """
    total = timeline.select(pl.sum_horizontal(pl.exclude(_TIMELINE_TIME))).to_series()
    return timeline[_kept(timeline[_TIMELINE_TIME], total, points)]


def _kept(times: pl.Series, totals: pl.Series, points: int) -> pl.Series:
    """The rows that `thin` keeps."""
    if len(times) <= points:
        return pl.int_range(len(times), dtype=pl.Int64, eager=True)
    buckets = max((points - 1) // 3, 1)
    since = times - times[0]
    kept = (
        pl.LazyFrame({"total": totals, "bucket": since * buckets // (since[-1] + 1)})
        .with_columns(row=pl.int_range(pl.len(), dtype=pl.Int64))
        .group_by("bucket")
        .agg(
            pl.concat_list(
                pl.col("row").get(pl.col("total").arg_max()),
                pl.col("row").get(pl.col("total").arg_min()),
                pl.col("row").last(),
            ).alias("rows")
        )
        .select(pl.col("rows").explode().explode())
        .collect()
        .to_series()
    )
    return pl.concat([pl.Series("rows", [0], dtype=pl.Int64), kept]).unique().sort()


def category_timeline(explained: Explained, after: pl.Series | None = None) -> pl.DataFrame:
    """`time_us` (int64, relative to the first event), and the live bytes of each category, after every event that
    changed any; the first row is the state at the start. The categories of a row sum to what is allocated.

    after: only these of the events, ascending, from the start on.

    `explained.phases` has the phases on the same clock.
    """
    table = explained.allocations.select(
        "alloc_event", "free_event", "category", "requested", rounding="block"
    ).with_columns(rounding=pl.col("rounding") - pl.col("requested"))
    start = pl.DataFrame({"category": [""], "requested": [0], "rounding": [0], "event": [BEFORE]})
    changes = pl.concat([start, changes_of(table, "requested", "rounding", by=("category",))])
    if after is not None and len(after):
        # Each change shows at the first of these events that is not before it.
        changes = changes.filter(pl.col("event") <= after[-1])
        changes = changes.with_columns(event=after.gather(after.search_sorted(changes["event"])))
        changes = changes.group_by("event", "category").agg(pl.col("requested", "rounding").sum())
    of_category = [
        pl.col("requested").filter(pl.col("category") == category).sum().alias(category) for category in OF_TENSORS
    ]
    live = (
        changes.group_by("event")
        .agg(*of_category, pl.col("rounding").sum().alias(ROUNDING))
        .sort("event")
        .with_columns(pl.col(CATEGORIES).cum_sum())
    )
    return live.select(_times_of(explained, live["event"]), *CATEGORIES)


def _times_of(explained: Explained, events: pl.Series) -> pl.Series:
    """The times of events, relative to the first; the start has that of the first."""
    times = pl.Series(explained.snapshot.times, dtype=pl.Int64) - explained.snapshot.start_us
    return times.gather(events.clip(lower_bound=0)).alias(_TIMELINE_TIME)


# What each device of a snapshot held, beside the one that is open.


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """What a device held. Its peaks are None where it has no history."""

    device: int
    events: int
    peak_bytes: int | None
    reserved_peak_bytes: int | None
    allocated_bytes: int
    """What was allocated when the history ended."""
    reserved_bytes: int
    """What was reserved then."""


def devices_of(explained: Explained) -> list[DeviceUse]:
    """What every device of the snapshot held, by its index."""
    uses: list[DeviceUse] = []
    for snapshot in (explained.snapshot, *explained.snapshot.others):
        is_open = snapshot is explained.snapshot
        replayed = explained.replay if is_open else replay(snapshot) if snapshot.events else None
        blocks = [block for segment in snapshot.segments for block in segment.blocks]
        use = DeviceUse(
            device=snapshot.device,
            events=len(snapshot.events),
            peak_bytes=explained.peak_bytes if is_open else replayed and replayed.peak_bytes,
            reserved_peak_bytes=replayed and max(held for _, held in replayed.reserved),
            allocated_bytes=sum(block.size for block in blocks if block.is_active),
            reserved_bytes=sum(segment.total_size for segment in snapshot.segments),
        )
        uses.append(use)
    return sorted(uses, key=lambda use: use.device)


# Fragmentation of a caching allocator's memory: what is free and yet of no use, and what had to be asked for beside.
#
# Only blocks of one pool (CUDA graphs have private ones), of one kind of segment (small requests have their own) and of
# one stream can serve a request, and only a piece that is long enough. Where the free pieces together would have been,
# a new segment is the price of fragmentation.


_MOST_LOOKED_AT = 20
"""How many new segments are listed, the largest first. For each, the place of the free memory has to be worked out."""


class Held(NamedTuple):
    """The addresses of a block that nobody else can have."""

    start: int
    end: int
    awaits_free: bool
    """Whether its owner freed it while another stream still uses it."""


class FreePiece(NamedTuple):
    """A stretch of free memory inside a segment."""

    bytes: int
    small: bool
    """Whether it is in a segment for small requests."""
    stream: int
    pool: PoolId
    whole: bool
    """Whether it is a segment that holds nothing."""


@dataclass(frozen=True, kw_only=True)
class NewSegment:
    """A segment that was asked of the driver while as much memory was free in pieces."""

    time_us: int
    requested_bytes: int
    segment_bytes: int
    largest_free_bytes: int
    free_bytes: int
    site: str


def filled_segments(explained: Explained, event: int) -> list[tuple[Segment, list[Held]]] | None:
    """The segments after an event with the blocks that they hold, by address; None for a history without segments, or
    one whose blocks do not fit into them."""
    if explained.replay.segments is None:
        return None
    try:
        segments = segments_after(explained.replay, explained.snapshot, event)
    except Contradiction:
        return None
    held = explained.allocations.filter(
        (pl.col("alloc_event").fill_null(BEFORE) <= event)
        & (pl.col("completed_event").is_null() | (pl.col("completed_event") > event))
    )
    awaits = (pl.col("free_event") <= event).fill_null(False)
    columns = {"start": pl.col("address"), "end": pl.col("address") + pl.col("block"), "awaits": awaits}
    starts = [segment.address for segment in segments]
    filled: list[tuple[Segment, list[Held]]] = [(segment, []) for segment in segments]
    before = 0
    for start, end, awaits_free in held.select(**columns).sort("start").iter_rows():
        at = bisect_right(starts, start) - 1
        if at < 0 or start < before or end > segments[at].end:
            return None
        before = end
        filled[at][1].append(Held(start, end, awaits_free))
    return filled


def free_pieces(explained: Explained, event: int) -> list[FreePiece]:
    """The free memory after an event; empty where filled_segments is None."""
    pieces: list[FreePiece] = []
    for segment, blocks in filled_segments(explained, event) or []:
        ends = [segment.address, *(block.end for block in blocks)]
        starts = [*(block.start for block in blocks), segment.end]
        small = segment.total_size <= SMALL_SEGMENT if not segment.segment_type else segment.segment_type == "small"
        pool = segment.segment_pool_id or ORDINARY
        pieces += [
            FreePiece(bytes=start - end, small=small, stream=segment.stream, pool=pool, whole=not blocks)
            for end, start in zip(ends, starts, strict=True)
            if start > end
        ]
    return pieces


def pieces_between(explained: Explained, event: int) -> list[int]:
    """Lengths of what is free between live blocks of the ordinary pool."""
    return [piece.bytes for piece in free_pieces(explained, event) if not piece.whole and piece.pool == ORDINARY]


def new_segments(explained: Explained) -> list[NewSegment]:
    """Segments that a request needed though free pieces of its pool and stream together were as long; largest first."""
    events = explained.snapshot.events
    requests = [i for i in explained.snapshot.segment_events if events[i].action == "segment_alloc"]
    requests.sort(key=lambda i: -events[i].size)
    segments: list[NewSegment] = []
    for i in requests[:_MOST_LOOKED_AT]:
        segment = events[i]
        inside = explained.allocations.filter(
            (pl.col("alloc_event") > i)
            & (pl.col("address") >= segment.addr)
            & (pl.col("address") < segment.addr + segment.size)
        )
        if not inside.height:
            continue
        first = inside.sort("alloc_event").row(0, named=True)
        small = segment.size <= SMALL_SEGMENT
        pieces = [
            piece.bytes
            for piece in free_pieces(explained, i - 1)
            if piece.small == small and piece.stream == segment.stream and piece.pool == explained.replay.pools.get(i)
        ]
        if sum(pieces) >= first["requested"]:
            new = NewSegment(
                time_us=explained.time_us(i),
                requested_bytes=first["requested"],
                segment_bytes=segment.size,
                largest_free_bytes=max(pieces),
                free_bytes=sum(pieces),
                site=first["site"],
            )
            segments.append(new)
    return segments


# What each of the allocator's pools held: the ordinary one, and the private ones, which serve nobody else.
#
# PyTorch gives a CUDA graph a pool of its own, since a replay writes to the addresses of the capture: whatever the
# graph freed while it was captured stays the graph's. A `torch.cuda.MemPool` takes what is allocated under
# `use_mem_pool`. `torch.cuda.empty_cache()` gives nothing of either back while the graph or the MemPool lives
# (emptyCache and release_cached_blocks in c10/cuda/CUDACachingAllocator.cpp).


_WORTH_SAYING = 0.05
"""The share of what is reserved that the free memory of private pools has where a finding says it."""
_TREES = "torch/_inductor/cudagraph_trees.py"


@dataclass(frozen=True, kw_only=True)
class PoolUse:
    """What a pool held at a moment, in bytes. Allocated, awaiting, cached and fragmented make up reserved."""

    pool: PoolId
    private: bool
    reserved_bytes: int
    allocated_bytes: int
    awaiting_free_bytes: int
    cached_bytes: int
    """Bytes of segments that hold nothing."""
    fragmented_bytes: int
    """Free bytes between live blocks of a segment."""
    peak_allocated_bytes: int
    """The most that was allocated in it at one time of the history."""
    peak_reserved_bytes: int

    @property
    def free_bytes(self) -> int:
        return self.cached_bytes + self.fragmented_bytes


def pools_at(explained: Explained, event: int) -> tuple[PoolUse, ...]:
    """The use of each pool after an event, the ordinary one first; empty for a history without segments, or one whose
    blocks do not fit into them."""
    filled = filled_segments(explained, event)
    if filled is None:
        return ()
    history = explained.replay.by_pool
    sums = {pool: [0, 0, 0, 0] for pool in history}
    for segment, blocks in filled:
        of = sums[segment.segment_pool_id or ORDINARY]
        live = sum(block.end - block.start for block in blocks if not block.awaits_free)
        used = sum(block.end - block.start for block in blocks)
        of[0] += live
        of[1] += used - live
        of[3 if blocks else 2] += segment.total_size - used
    table, alone = explained.allocations, len(history) == 1
    peaks = [
        explained.peak_bytes
        if alone
        else int(allocated_curve(table.filter(pl.col("pool") == i))["allocated"].sort()[-1])
        for i in range(len(history))
    ]
    return tuple(
        PoolUse(
            pool=pool, private=pool != ORDINARY, reserved_bytes=sum(held), allocated_bytes=held[0],
            awaiting_free_bytes=held[1], cached_bytes=held[2], fragmented_bytes=held[3],
            peak_allocated_bytes=peaks[i],
            peak_reserved_bytes=max(reserved for _, reserved in history[pool]),
        )
        for i, (pool, held) in enumerate(sums.items())
    )  # fmt: skip


def holder_tables(explained: Explained, pools: tuple[PoolUse, ...]) -> Iterator[Table]:
    """What each of several pools held at a moment, and each of several devices at its end, with their peaks."""
    if len(pools) > 1:
        yield table_of(
            "pool", ("allocated", "B"), ("reserved", "B"), ("free", "B"), ("peak allocated", "B"),
            ("peak reserved", "B"),
            rows=[
                (f"private {use.pool}" if use.private else "ordinary", use.allocated_bytes, use.reserved_bytes,
                 use.free_bytes, use.peak_allocated_bytes, use.peak_reserved_bytes)
                for use in pools
            ],
            notes=as_lines("What is free in a private pool serves only what is allocated in that pool."),
        )  # fmt: skip
    if explained.snapshot.others:
        yield table_of(
            "device", ("peak allocated", "B"), ("peak reserved", "B"), ("allocated at the end", "B"),
            ("reserved at the end", "B"), ("events", ","),
            rows=[
                (f"{use.device}{' (this one)' if use.device == explained.snapshot.device else ''}", use.peak_bytes,
                 use.reserved_peak_bytes, use.allocated_bytes, use.reserved_bytes, use.events)
                for use in devices_of(explained)
            ],
        )  # fmt: skip


def pool_finding(explained: Explained) -> Finding | None:
    """What private pools hold at the end and do not use; None where that is little."""
    pools = pools_at(explained, len(explained.snapshot.events) - 1)
    private = sorted((use for use in pools if use.private), key=lambda use: -use.free_bytes)
    free, reserved = sum(use.free_bytes for use in private), sum(use.reserved_bytes for use in pools)
    if free < max(_WORTH_SAYING * reserved, 1):
        return None
    first = private[0]
    if len(private) == 1:
        whose, most = f"private pool {first.pool}{_owner(explained, first.pool)} holds", ""
    else:
        whose = f"{len(private)} private pools hold"
        most = f" Pool {first.pool}{_owner(explained, first.pool)} has {format_bytes(first.free_bytes)} of that."
    held = format_bytes(sum(use.reserved_bytes for use in private))
    used = sum(use.allocated_bytes for use in private)
    return note(
        "private-pool",
        f"At the end, {whose} {held} of the {format_bytes(reserved)} that are reserved: {format_bytes(used)} of it are "
        f"allocated, and {format_bytes(free)}, which replays of its graphs may use, serve nobody else.{most}",
        {
            "pools": len(private),
            "first": str(first.pool),
            "free_bytes": free,
            "allocated_bytes": used,
            "private_reserved_bytes": sum(use.reserved_bytes for use in private),
            "reserved_bytes": reserved,
        },
        "capture graphs into one pool, the largest first (torch.cuda.graph(g, pool=first.pool())); drop a graph or "
        "MemPool that is done, then call torch.cuda.empty_cache()",
    )


def _owner(explained: Explained, pool: PoolId) -> str:
    """What made a pool, as far as its id and its stacks tell. A graph that is given no pool makes one (n, 0);
    graph_pool_handle() and MemPool make (0, n) (c10/cuda/CUDACachingAllocator's MemPool)."""
    if pool[0]:
        return " (of a CUDA graph)"
    inside = explained.allocations.filter(pl.col("pool") == list(explained.replay.by_pool).index(pool))
    stacks = inside["stack"].unique().to_list()
    trees = any(_TREES in frame for stack in stacks for frame in explained.stacks.frames(stack))
    return " (of torch.compile's CUDA graphs)" if trees else " (of CUDA graphs or of a torch.cuda.MemPool)"


_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(us|µs|ms|s)")
_MICROSECONDS = {"us": 1, "µs": 1, "ms": 1_000, "s": 1_000_000}


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """Bytes that the allocator held from the driver. The other five make up the first."""

    reserved_bytes: int
    allocated_bytes: int
    awaiting_free_bytes: int
    """Bytes that their owner freed while another stream still used them."""
    cached_bytes: int
    """Bytes of segments that hold nothing, which torch.cuda.empty_cache() would give back."""
    fragmented_bytes: int
    """Free bytes between live blocks of a segment."""
    private_free_bytes: int
    """Free bytes of private pools, which serve nothing but what is directed to them, and which empty_cache() keeps."""


@dataclass(frozen=True, kw_only=True)
class PhasePeak:
    """The most that was allocated while a phase ran, what was allocated when it began included."""

    phase: str
    peak_bytes: int
    event: int
    time_us: int


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What was alive after an event."""

    name: str
    """The moment in words: the peak, the peak of backward, at 12 ms, the end."""
    event: int
    time_us: int
    alive: pl.DataFrame
    """Rows of the table of allocations, largest first."""
    categories: dict[MemoryCategory, int]
    reserved: Reserved | None
    """Bytes that the allocator holds beside live memory; None for a history without segments."""
    pools: tuple[PoolUse, ...]
    """Reserved bytes by pool, the ordinary one first; empty where `reserved` is None."""

    @property
    def allocated_bytes(self) -> int:
        return sum(self.categories.values())

    def self_check(self) -> None:
        """Assert that the parts make up the wholes."""
        assert sum(self.categories.values()) == self.alive["block"].sum()
        held = self.reserved
        if held is not None:
            parts = held.awaiting_free_bytes + held.cached_bytes + held.fragmented_bytes + held.private_free_bytes
            assert held.allocated_bytes == self.allocated_bytes <= held.reserved_bytes
            assert held.allocated_bytes + parts == held.reserved_bytes


def moment_at(explained: Explained, at: str | None = None) -> Moment:
    """The Moment of the peak, or the one that `at` names: `12ms`, `12000us`, `1.5s` after the first event, `start`,
    `end`, or a phase for its own peak. Raises InputError for any other text, and for a time outside of the history.
    """
    if at is None or at == "peak":
        return _moment(explained, "the peak", explained.peak_event)
    last = len(explained.snapshot.events) - 1
    if at in {"start", "end"}:
        return _moment(explained, f"the {at}", BEFORE if at == "start" else last)
    of_phase = next((peak for peak in phase_peaks(explained) if peak.phase == at), None)
    if of_phase is not None:
        return _moment(explained, f"the peak of {at}", of_phase.event)
    match = _TIME.fullmatch(at.strip())
    if match is None:
        phases = "".join(f", {name}" for name in dict.fromkeys(span.name for span in explained.phases))
        raise InputError(
            f"cannot tell which moment {at[:40]!r} is: write a time, as in 12ms, or one of start, end{phases}"
        )
    time_us = float(match[1]) * _MICROSECONDS[match[2]]
    if time_us > explained.time_us(last):
        raise InputError(f"{at} is after the history, which ends at {explained.time_us(last) / 1000:g}ms")
    return _moment(
        explained, f"{at.strip()}", explained.snapshot.last_event_until(explained.snapshot.start_us + int(time_us))
    )


def _moment(explained: Explained, name: str, event: int) -> Moment:
    alive = explained.alive(event).sort("block", "address", descending=[True, False])
    pools = pools_at(explained, event)
    moment = Moment(
        name=name,
        event=event,
        time_us=explained.time_us(event),
        alive=alive,
        categories=categories_of(alive),
        reserved=_together(pools),
        pools=pools,
    )
    moment.self_check()
    return moment


def phase_peaks(explained: Explained) -> list[PhasePeak]:
    """The peak of every phase, in the order they began; of a phase that ran several times, the largest."""
    events, allocated = explained.curve["event"].to_list(), explained.curve["allocated"]
    snapshot = explained.snapshot
    peaks: dict[str, PhasePeak] = {}
    for span in explained.phases:
        first = bisect_right(events, snapshot.last_event_until(snapshot.start_us + span.start_us - 1)) - 1
        last = bisect_right(events, snapshot.last_event_until(snapshot.start_us + span.end_us)) - 1
        first, last = max(first, 0), max(last, 0)
        at = first + (allocated[first : last + 1].arg_max() or 0)
        known = peaks.get(span.name)
        if known is None or allocated[at] > known.peak_bytes:
            peaks[span.name] = PhasePeak(
                phase=span.name, peak_bytes=allocated[at], event=events[at], time_us=explained.time_us(events[at])
            )
    return list(peaks.values())


def _together(pools: tuple[PoolUse, ...]) -> Reserved | None:
    """What all pools held; None where that is not known."""
    if not pools:
        return None
    return Reserved(
        reserved_bytes=sum(use.reserved_bytes for use in pools),
        allocated_bytes=sum(use.allocated_bytes for use in pools),
        awaiting_free_bytes=sum(use.awaiting_free_bytes for use in pools),
        cached_bytes=sum(use.cached_bytes for use in pools if not use.private),
        fragmented_bytes=sum(use.fragmented_bytes for use in pools if not use.private),
        private_free_bytes=sum(use.free_bytes for use in pools if use.private),
    )
