"""What each of the allocator's pools held: the ordinary one, and the private ones, which serve nobody else.

PyTorch gives a CUDA graph a pool of its own, since a replay writes to the addresses of the capture: whatever the graph
freed while it was captured stays the graph's. A `torch.cuda.MemPool` takes what is allocated under `use_mem_pool`.
`torch.cuda.empty_cache()` gives nothing of either back while the graph or the MemPool lives (emptyCache and
release_cached_blocks in c10/cuda/CUDACachingAllocator.cpp).
"""

from dataclasses import dataclass

import polars as pl

from stepscope.allocations.explain import Explained, allocated_curve
from stepscope.allocations.fragmentation import filled_segments
from stepscope.allocations.snapshot import ORDINARY, PoolId
from stepscope.core.answer import Table, as_lines, table_of
from stepscope.core.finding import Finding, note
from stepscope.core.units import format_bytes

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
    table = explained.allocations
    return tuple(
        PoolUse(
            pool=pool, private=pool != ORDINARY, reserved_bytes=sum(held), allocated_bytes=held[0],
            awaiting_free_bytes=held[1], cached_bytes=held[2], fragmented_bytes=held[3],
            peak_allocated_bytes=int(allocated_curve(table.filter(pl.col("pool") == i))["allocated"].sort()[-1]),
            peak_reserved_bytes=max(reserved for _, reserved in history[pool]),
        )
        for i, (pool, held) in enumerate(sums.items())
    )  # fmt: skip


def pool_table(pools: tuple[PoolUse, ...]) -> list[Table]:
    """What each pool held at a moment, and its peaks; none where all memory is of the ordinary pool."""
    if len(pools) < 2:
        return []
    table = table_of(
        "pool", ("allocated", "B"), ("reserved", "B"), ("free", "B"), ("peak allocated", "B"), ("peak reserved", "B"),
        rows=[
            (f"private {use.pool}" if use.private else "ordinary", use.allocated_bytes, use.reserved_bytes,
             use.free_bytes, use.peak_allocated_bytes, use.peak_reserved_bytes)
            for use in pools
        ],
        notes=as_lines("What is free in a private pool serves only what is allocated in that pool."),
    )  # fmt: skip
    return [table]


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
            "pools": len(private), "first": str(first.pool), "free_bytes": free, "allocated_bytes": used,
            "private_reserved_bytes": sum(use.reserved_bytes for use in private), "reserved_bytes": reserved,
        },
        "capture graphs into one pool, the largest first (torch.cuda.graph(g, pool=first.pool())); drop a graph or "
        "MemPool that is done, then call torch.cuda.empty_cache()",
    )  # fmt: skip


def _owner(explained: Explained, pool: PoolId) -> str:
    """What made a pool, as far as its id and its stacks tell. A graph that is given no pool makes one (n, 0);
    graph_pool_handle() and MemPool make (0, n) (c10/cuda/CUDACachingAllocator's MemPool)."""
    if pool[0]:
        return " (of a CUDA graph)"
    inside = explained.allocations.filter(pl.col("pool") == list(explained.replay.by_pool).index(pool))
    stacks = inside["stack"].unique().to_list()
    trees = any(_TREES in frame for stack in stacks for frame in explained.stacks.frames(stack))
    return " (of torch.compile's CUDA graphs)" if trees else " (of CUDA graphs or of a torch.cuda.MemPool)"
