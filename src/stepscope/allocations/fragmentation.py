"""Fragmentation of a caching allocator's memory: what is free and yet of no use, and what had to be asked for beside.

Only blocks of one pool (CUDA graphs have private ones), of one kind of segment (small requests have their own) and of
one stream can serve a request, and only a piece that is long enough. Where the free pieces together would have been, a
new segment is the price of fragmentation.
"""

from bisect import bisect_right
from typing import NamedTuple

import polars as pl

from stepscope.allocations.block_layout import BEFORE, Contradiction
from stepscope.allocations.explain import Explained
from stepscope.allocations.prediction.caching_allocator import SMALL_SEGMENT
from stepscope.allocations.replay import segments_after
from stepscope.allocations.snapshot import ORDINARY, PoolId, Segment

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


class NewSegment(NamedTuple):
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
    filled = filled_segments(explained, event) or []
    return [piece for segment, blocks in filled for piece in _between(segment, blocks)]


def _between(segment: Segment, blocks: list[Held]) -> list[FreePiece]:
    ends = [segment.address, *(block.end for block in blocks)]
    starts = [*(block.start for block in blocks), segment.end]
    small = segment.total_size <= SMALL_SEGMENT if not segment.segment_type else segment.segment_type == "small"
    pool = segment.segment_pool_id or ORDINARY
    return [
        FreePiece(bytes=start - end, small=small, stream=segment.stream, pool=pool, whole=not blocks)
        for end, start in zip(ends, starts, strict=True)
        if start > end
    ]


def pieces_between(explained: Explained, event: int) -> list[int]:
    """Lengths of what is free between live blocks of the ordinary pool."""
    return [piece.bytes for piece in free_pieces(explained, event) if not piece.whole and piece.pool == ORDINARY]


def new_segments(explained: Explained) -> list[NewSegment]:
    """Segments that a request needed though free pieces of its pool and stream together were as long; largest first."""
    events = explained.snapshot.events
    asked = [i for i in explained.snapshot.segment_events if events[i].action == "segment_alloc"]
    asked.sort(key=lambda i: -events[i].size)
    found: list[NewSegment] = []
    for i in asked[:_MOST_LOOKED_AT]:
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
            if piece.small == small and piece.stream == segment.stream and piece.pool == explained.replay.given.get(i)
        ]
        if sum(pieces) >= first["requested"]:
            new = NewSegment(
                time_us=explained.time_us(i), requested_bytes=first["requested"], segment_bytes=segment.size,
                largest_free_bytes=max(pieces), free_bytes=sum(pieces), site=first["site"],
            )  # fmt: skip
            found.append(new)
    return found
