"""Fragmentation of a caching allocator's memory: what is free and yet of no use, and what had to be asked for beside.

Only blocks of one pool (small requests have their own) and of one stream can serve a request, and only a piece that is
long enough. Where the free pieces together would have been, a new segment is the price of fragmentation.
"""

from bisect import bisect_right
from typing import NamedTuple

import polars as pl

from stepscope.memory.block_layout import BEFORE, Contradiction
from stepscope.memory.explain import Explained
from stepscope.memory.prediction.caching_allocator import SMALL_SEGMENT
from stepscope.memory.replay import segments_after
from stepscope.memory.snapshot import Segment

_MOST_LOOKED_AT = 20
"""How many new segments are listed, the largest first. For each, the place of the free memory has to be worked out."""


class FreePiece(NamedTuple):
    """A stretch of free memory inside a segment."""

    bytes: int
    small: bool
    """Whether it is in a segment for small requests."""
    stream: int
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


def free_pieces(explained: Explained, event: int) -> list[FreePiece]:
    """The free memory after an event; empty for a history without segments, or one that contradicts them."""
    if not explained.replay.segments:
        return []
    try:
        segments = segments_after(explained.replay, explained.snapshot, event)
    except Contradiction:
        return []
    held = explained.allocations.filter(
        (pl.col("alloc_event").fill_null(BEFORE) <= event)
        & (pl.col("completed_event").is_null() | (pl.col("completed_event") > event))
    ).sort("address")
    starts = [segment.address for segment in segments]
    taken: list[list[tuple[int, int]]] = [[] for _ in segments]
    for address, block in held.select("address", "block").iter_rows():
        taken[bisect_right(starts, address) - 1].append((address, address + block))
    return [piece for segment, blocks in zip(segments, taken, strict=True) for piece in _between(segment, blocks)]


def _between(segment: Segment, blocks: list[tuple[int, int]]) -> list[FreePiece]:
    ends = [segment.address, *(end for _, end in blocks)]
    starts = [*(start for start, _ in blocks), segment.end]
    small = segment.total_size <= SMALL_SEGMENT if not segment.segment_type else segment.segment_type == "small"
    return [
        FreePiece(bytes=start - end, small=small, stream=segment.stream, whole=not blocks)
        for end, start in zip(ends, starts, strict=True)
        if start > end
    ]


def new_segments(explained: Explained) -> list[NewSegment]:
    """Segments that a request needed though free pieces of its pool and stream together were as long; largest first."""
    events = explained.snapshot.events
    asked = [i for i, event in enumerate(events) if event.action == "segment_alloc"]
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
            if piece.small == small and piece.stream == segment.stream
        ]
        if sum(pieces) >= first["requested"]:
            new = NewSegment(
                time_us=explained.time_us(i), requested_bytes=first["requested"], segment_bytes=segment.size,
                largest_free_bytes=max(pieces), free_bytes=sum(pieces), site=first["site"],
            )  # fmt: skip
            found.append(new)
    return found
