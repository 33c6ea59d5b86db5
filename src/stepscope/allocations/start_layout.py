"""What the allocator held when a history began, where nobody wrote it down: worked out from what the history shows."""

from bisect import bisect_right

import msgspec

from stepscope.allocations.block_layout import BEFORE, Allocation, Contradiction, rounded
from stepscope.allocations.prediction.caching_allocator import SMALL_REQUEST
from stepscope.allocations.snapshot import GIVES, ORDINARY, Event, PoolId, Segment, Snapshot


def blocks_of(segments: list[Segment]) -> list[Allocation]:
    """What was allocated in a layout."""
    return [
        Allocation(
            address=block.address or 0,
            requested=block.size if block.requested_size is None else min(block.requested_size, block.size),
            block=block.size,
            free=BEFORE if block.awaits_free else None,
            stream=segment.stream,
        )
        for segment in segments
        for block in segment.blocks
        if block.is_active or block.awaits_free
    ]


def work_out_start(snapshot: Snapshot) -> tuple[list[Allocation], list[Segment], dict[int, int]]:
    """The layout when the history began, from what it shows: (its blocks, its segments, blocks of open end).

    Blocks of the start are those that the history frees without having allocated them, and those that are there at the
    end without an event. All else was free. A block is as long as its request asks; in the large pool, where every
    block is longer than 1 MiB, a gap after it of up to 1 MiB is its own too. After a longer gap its end is open.

    Raises Contradiction when the history cannot have been whole.
    """
    segments, _ = segments_at_start(snapshot)
    blocks, is_given = blocks_at_start(snapshot)
    blocks.sort(key=lambda allocation: allocation.address)
    starts = [segment.address for segment in segments]
    settings = snapshot.settings
    open_ended: dict[int, int] = {}
    for i, allocation in enumerate(blocks):
        at = bisect_right(starts, allocation.address) - 1
        if at < 0 or segments[at].end < allocation.address + allocation.block:
            raise Contradiction(f"{allocation.address:#x} was allocated at the start, outside of every segment")
        if allocation.address in is_given:
            continue
        limit = segments[at].end
        if i + 1 < len(blocks):
            limit = min(limit, blocks[i + 1].address)
        gap = limit - allocation.address - allocation.block
        if gap < 0:
            raise Contradiction(f"two blocks of the start overlap at {limit:#x}")
        if not gap or allocation.block <= SMALL_REQUEST or settings.expandable_segments:
            continue
        if gap <= SMALL_REQUEST or 0 < settings.max_split_size <= allocation.block:
            allocation.block += gap
        else:
            open_ended[allocation.address + allocation.block] = allocation.address
    return blocks, segments, open_ended


def blocks_at_start(snapshot: Snapshot) -> tuple[list[Allocation], set[int]]:
    """What was allocated when the history began, and the addresses of those whose size the end gives."""
    settings = snapshot.settings
    blocks: list[Allocation] = []
    live: set[int] = set()
    awaiting: set[int] = set()
    for event in snapshot.events:
        if event.action == "alloc":
            live.add(event.addr)
        elif event.action == "free_requested" or (event.action == "free_completed" and event.addr not in awaiting):
            if event.addr in live:
                live.remove(event.addr)
            else:
                free = None if event.action == "free_requested" else BEFORE
                block = rounded(event.size, settings)
                blocks.append(
                    Allocation(address=event.addr, requested=event.size, block=block, free=free, stream=event.stream)
                )
            if event.action == "free_requested":
                awaiting.add(event.addr)
        elif event.action == "free_completed":
            awaiting.remove(event.addr)
    given = [a for a in blocks_of(snapshot.segments) if a.address not in (live if a.free is None else awaiting)]
    return [*blocks, *given], {a.address for a in given}


def segments_at_start(snapshot: Snapshot) -> tuple[list[Segment], dict[int, PoolId]]:
    """The segments of the end with every event on them undone, last first, and the pool of each that gave memory.

    Older events name no pool: it is that of the segment which holds their memory in the end. Where the driver has that
    memory back by then, nothing tells, and it counts as ordinary.
    """
    held = {segment.address: segment for segment in snapshot.segments}
    pools: dict[int, PoolId] = {}
    for i in reversed(snapshot.segment_events):
        event = snapshot.events[i]
        if event.action in GIVES:
            held, pool = without_extent(held, event.addr, event.addr + event.size)
            pools[i] = event.pool_id or pool or ORDINARY
        else:
            add_extent(held, event, event.pool_id)
    return joined_segments(held), pools


def add_extent(held: dict[int, Segment], event: Event, pool: PoolId | None) -> None:
    """Add an event's memory as a segment of its own."""
    expandable = event.action in {"segment_map", "segment_unmap"}
    if event.size:
        held[event.addr] = Segment(
            address=event.addr, total_size=event.size, blocks=[], stream=event.stream, is_expandable=expandable,
            segment_pool_id=pool,
        )  # fmt: skip


def without_extent(held: dict[int, Segment], start: int, end: int) -> tuple[dict[int, Segment], PoolId | None]:
    """The segments without a piece of one, and its pool. Raises Contradiction where it is no piece of any."""
    around = _segment_round(held, start, end)
    if around is None:  # pages of an expandable segment may have come one by one
        held = {segment.address: segment for segment in joined_segments(held)}
        around = _segment_round(held, start, end)
    if around is None:
        raise Contradiction(f"{end - start} bytes of the driver's come or go at {start:#x}, outside of every segment")
    del held[around.address]
    for left, right in ((around.address, start), (end, around.end)):
        if left < right:
            held[left] = msgspec.structs.replace(around, address=left, total_size=right - left, blocks=[])
    return held, around.segment_pool_id


def _segment_round(held: dict[int, Segment], start: int, end: int) -> Segment | None:
    exactly = held.get(start)
    if exactly is not None and end <= exactly.end:
        return exactly
    return next((s for s in held.values() if s.address <= start and end <= s.end), None)


def joined_segments(held: dict[int, Segment]) -> list[Segment]:
    """Segments by address; neighbouring pages of expandable ones are one. Raises Contradiction where two overlap."""
    joined: list[Segment] = []
    for segment in sorted(held.values(), key=lambda s: s.address):
        last = joined[-1] if joined else None
        if last and last.end > segment.address:
            raise Contradiction(f"two segments overlap at {segment.address:#x}")
        pages = last and last.end == segment.address and last.is_expandable and segment.is_expandable
        pool = last.segment_pool_id or segment.segment_pool_id if last else None
        if last and pages and segment.segment_pool_id in (None, pool):
            joined[-1] = msgspec.structs.replace(
                last, total_size=last.total_size + segment.total_size, segment_pool_id=pool
            )
        else:
            joined.append(segment)
    return joined
