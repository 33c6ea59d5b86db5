"""A replay of PyTorch's caching allocator from a snapshot's events: which block each allocation got.

The events say how many bytes were requested. The block counts as allocated (`torch.cuda.max_memory_allocated`): the
request rounded up, plus the rest of the free block where the rest is too small to be a block. The allocator chooses a
free block by best fit. The events give its address, so the choice is not replayed.

Blocks are cut and merged by the rules of c10/cuda/CUDACachingAllocator.cpp:

- A request is rounded up to 512 bytes, or as `roundup_power2_divisions` says (round_size).
- Up to 1 MiB it belongs to the small pool, else to the large one (get_pool).
- It takes the start of a free block. The rest becomes a free block if it has 512 bytes (small pool, and with
  expandable segments) or more than 1 MiB (large pool, requests under max_split_size); else the block is given whole
  (should_split).
- A freed block merges with free neighbours of its segment (free_block).

What holds under the default settings is stated once, where it is predicted (prediction/caching_allocator.py).
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from stepscope.allocations.prediction.caching_allocator import SMALL_REQUEST, SMALLEST, least_rest
from stepscope.allocations.prediction.caching_allocator import rounded as rounded_by_default
from stepscope.allocations.snapshot import GIVES, ORDINARY, TAKES, Event, PoolId, Segment, Settings, Snapshot

BEFORE = -1
"""Index of an event that precedes the history."""
NEVER = -2
"""Index of an event that does not come, in a column of them."""


class Allocation(msgspec.Struct, kw_only=True, gc=False):
    """One allocation and the block it got. Events are indices into the history."""

    address: int
    requested: int
    block: int
    """Bytes of the block: what counts as allocated."""
    alloc: int = BEFORE
    free: int | None = None
    """The event at which its owner gave it back (free_requested); None if never. Before the history for a block that
    still awaited another stream when it began."""
    completed: int | None = None
    """The event at which the allocator could use it again."""
    stream: int = 0
    pool: PoolId = ORDINARY
    open_ended: bool = False
    """Whether the block's end is unknown: it counts as long as its request, and may have been up to 1 MiB longer."""


class Allocations(Sequence[Allocation]):
    """Allocations by column, as 64-bit integers: an Allocation is made where one is asked for."""

    COLUMNS = ("address", "requested", "block", "alloc", "free", "completed", "stream")

    def __init__(self, columns: dict[str, np.ndarray[Any, Any]], open_ended: set[int]) -> None:
        self.columns, self.open_ended = columns, open_ended
        self.pools: list[PoolId] = []
        """The pool of each; empty where all are ordinary."""

    @classmethod
    def of(cls, made: list[Allocation]) -> "Allocations":
        rows = [[getattr(one, name) for one in made] for name in cls.COLUMNS]
        whole = [[NEVER if value is None else value for value in row] for row in rows]
        columns = {name: np.array(row, dtype=np.int64) for name, row in zip(cls.COLUMNS, whole, strict=True)}
        return cls(columns, {at for at, one in enumerate(made) if one.open_ended})

    def __len__(self) -> int:
        return len(self.columns["alloc"])

    def __getitem__(self, at: Any) -> Any:
        """The allocation at a place, or a list of those of a slice."""
        if isinstance(at, slice):
            return [self[i] for i in range(len(self))[at]]
        figures: dict[str, Any] = {name: int(column[at]) for name, column in self.columns.items()}
        figures |= {name: None for name in ("free", "completed") if figures[name] == NEVER}
        pools: list[PoolId] = self.pools or [ORDINARY]
        return Allocation(**figures, pool=pools[at if self.pools else 0], open_ended=at % len(self) in self.open_ended)

    def live_at_end(self) -> dict[int, int]:
        """The block of each that nothing frees, by its address."""
        live = self.columns["free"] == NEVER
        return dict(zip(self.columns["address"][live].tolist(), self.columns["block"][live].tolist(), strict=True))


class Contradiction(Exception):
    """An event that cannot happen in the layout at hand."""


def rounded(size: int, settings: Settings) -> int:
    """Bytes that a request is rounded up to (round_size, roundup_power2_next_division)."""
    if size >= SMALLEST and settings.roundup_power2_divisions:
        # There is one number of divisions for each power of two from 1 MiB to 32 GiB.
        power = min(max(size.bit_length() - 1 - 20, 0), 15)
        divisions = settings.roundup_power2_divisions.get(str(1 << power), 0)
        if divisions > 1 and size > SMALLEST * divisions and size & (size - 1):
            step = (1 << (size.bit_length() - 1)) >> (divisions.bit_length() - 1)
            return -(-size // step) * step if step else 1 << size.bit_length()
    return rounded_by_default(size)


class Layout:
    """Blocks by address. Free blocks are known by both ends, so that neighbours are found without a search."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.always_splits = settings.expandable_segments
        self.split_below = settings.max_split_size if settings.max_split_size > 0 else 1 << 63
        self._needs: dict[int, tuple[int, int]] = {}
        """`_need` of requests that came before, of which there are few sizes."""
        self.free_from: dict[int, int] = {}
        """Start of each free block -> its end."""
        self.free_to: dict[int, int] = {}
        self.walls: dict[int, int] = {}
        """Addresses at which segments of the driver meet the rest: no block spans them."""

    def add_free(self, start: int, end: int) -> None:
        """Free a block, which merges with free neighbours."""
        if end not in self.walls and end in self.free_from:
            after = self.free_from.pop(end)
            if self.free_to.pop(after, None) is None:
                raise Contradiction(f"the free memory at {end:#x} came from the driver twice")
            end = after
        if start not in self.walls and start in self.free_to:
            before = self.free_to.pop(start)
            if self.free_from.pop(before, None) is None:
                raise Contradiction(f"the free memory before {start:#x} came from the driver twice")
            start = before
        self.free_from[start] = end
        self.free_to[end] = start

    def take(self, address: int, size: int) -> int:
        """Bytes of the block that a request gets at an address. Raises Contradiction where no free block starts."""
        end = self.free_from.pop(address, None)
        if end is None:
            raise Contradiction(f"nothing free starts at {address:#x}")
        need, least_rest = self._needs.get(size) or self._need(size)
        rest = end - address - need
        if rest >= least_rest:
            self.free_from[address + need] = end
            self.free_to[end] = address + need
            return need
        if rest < 0:
            raise Contradiction(f"{need} bytes are taken at {address:#x} where {end - address} are free")
        if self.free_to.pop(end, None) is None:
            raise Contradiction(f"the free memory at {address:#x} came from the driver twice")
        return end - address

    def _need(self, size: int) -> tuple[int, int]:
        """Bytes that a request is rounded up to, and the least rest of a block that is split off."""
        need = rounded(size, self.settings)
        small = self.always_splits or need <= SMALL_REQUEST
        self._needs[size] = need, least_rest(small) if small or need < self.split_below else 1 << 63
        return self._needs[size]

    def give(self, start: int, end: int, expandable: bool) -> None:
        """Add memory from the driver. Pages of an expandable segment continue what lies before and after them."""
        if not expandable:
            for wall in (start, end):
                self.walls[wall] = self.walls.get(wall, 0) + 1
        self.add_free(start, end)

    def drop(self, start: int, end: int, expandable: bool) -> None:
        """Return free memory to the driver: a whole segment, or pages out of a free block."""
        block = self.free_block_round(start)
        if block is None or block[1] < end:
            raise Contradiction(f"{end - start} bytes go back to the driver at {start:#x} that are not free")
        free_start, free_end = block
        if not expandable and not (block == (start, end) and start in self.walls and end in self.walls):
            raise Contradiction(f"a segment goes back to the driver at {start:#x} that never came from it")
        del self.free_from[free_start]
        if self.free_to.pop(free_end, None) is None:
            raise Contradiction(f"the free memory at {free_start:#x} came from the driver twice")
        for left, right in ((free_start, start), (end, free_end)):
            if left < right:
                self.free_from[left], self.free_to[right] = right, left
        if not expandable:
            for wall in (start, end):
                self.walls[wall] -= 1
                if not self.walls[wall]:
                    del self.walls[wall]

    def free_block_round(self, address: int) -> tuple[int, int] | None:
        """The free block that holds an address. A search, for events that are rare."""
        if address in self.free_from:
            return address, self.free_from[address]
        return next(((start, end) for start, end in self.free_from.items() if start < address < end), None)

    def fill(self, segments: list[Segment], allocations: list[Allocation]) -> None:
        """Lay out segments, free wherever no allocation lies. Raises Contradiction for one outside of them."""
        blocks = sorted((a.address, a.address + a.block) for a in allocations)
        at = 0
        for segment in segments:
            here = segment.address
            if not segment.is_expandable:
                for wall in (here, segment.end):
                    self.walls[wall] = self.walls.get(wall, 0) + 1
            while at < len(blocks) and blocks[at][0] < segment.end:
                start, end = blocks[at]
                if start < here or end > segment.end:
                    raise Contradiction(f"the block at {start:#x} lies across others")
                if here < start:
                    self.free_from[here], self.free_to[start] = start, here
                here = end
                at += 1
            if here < segment.end:
                self.free_from[here], self.free_to[segment.end] = segment.end, here
        if at < len(blocks):
            raise Contradiction(f"the block at {blocks[at][0]:#x} lies outside of every segment")


# What the allocator held when a history began, where nobody wrote it down: worked out from what the history shows.


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
    for action, address, size, stream in snapshot.events.steps():
        if action == "alloc":
            live.add(address)
        elif action == "free_requested" or (action == "free_completed" and address not in awaiting):
            if address in live:
                live.remove(address)
            else:
                block = Allocation(address=address, requested=size, block=rounded(size, settings), stream=stream)
                block.free = None if action == "free_requested" else BEFORE
                blocks.append(block)
            if action == "free_requested":
                awaiting.add(address)
        elif action == "free_completed":
            awaiting.remove(address)
    unexplained = [a for a in blocks_of(snapshot.segments) if a.address not in (live if a.free is None else awaiting)]
    return [*blocks, *unexplained], {a.address for a in unexplained}


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
            address=event.addr,
            total_size=event.size,
            blocks=[],
            stream=event.stream,
            is_expandable=expandable,
            segment_pool_id=pool,
        )


def without_extent(held: dict[int, Segment], start: int, end: int) -> tuple[dict[int, Segment], PoolId | None]:
    """The segments without a piece of one, and its pool. Raises Contradiction where it is no piece of any."""
    around = held.get(start)
    if around is None or around.end < end:
        around = next((s for s in held.values() if s.address <= start and end <= s.end), None)
    if around is None:  # pages of an expandable segment may have come one by one
        held = {segment.address: segment for segment in joined_segments(held)}
        around = next((s for s in held.values() if s.address <= start and end <= s.end), None)
    if around is None:
        raise Contradiction(f"{end - start} bytes of the driver's come or go at {start:#x}, outside of every segment")
    del held[around.address]
    for left, right in ((around.address, start), (end, around.end)):
        if left < right:
            held[left] = msgspec.structs.replace(around, address=left, total_size=right - left, blocks=[])
    return held, around.segment_pool_id


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


@dataclass(kw_only=True)
class Replay:
    """Every allocation, and how far the replay can be trusted. Allocations from before the history come first."""

    allocations: Allocations
    reserved: list[tuple[int, int]]
    """Bytes held from the driver after each event that changed them. The first entry is before all events."""
    segments: list[Segment] | None = None
    """The segments when the history began, without their blocks; None for a history without any, or where the history
    contradicts those of its end."""
    pools: dict[int, PoolId] = field(default_factory=dict[int, PoolId])
    """The pool of each event that brought memory of the driver's, by the event."""
    by_pool: dict[PoolId, list[tuple[int, int]]] = field(default_factory=dict[PoolId, list[tuple[int, int]]])
    """`reserved` of each pool. Empty where `segments` is None."""
    start_known: bool
    """Whether the snapshot has the layout at the start. Otherwise it was worked out from the events."""
    faults: list[str] = field(default_factory=list[str])
    """Sentences on where events contradict the allocator's rules, or their outcome the segments at the end."""

    @property
    def exact(self) -> bool:
        return not self.faults and not self.allocations.open_ended

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated after any event, or at the start."""
        columns = self.allocations.columns
        freed = columns["free"] != NEVER
        events = np.concatenate([[BEFORE], columns["alloc"], columns["free"][freed]])
        changes = np.concatenate([[0], columns["block"], -columns["block"][freed]])
        order = np.argsort(events, kind="stable")
        is_last = np.append(np.diff(events[order]) != 0, True)
        return int(np.cumsum(changes[order])[is_last].max())


def replay(snapshot: Snapshot) -> Replay:
    """Follow the events from the layout at the start, known or worked out, to the segments at the end."""
    if not snapshot.has_segments:
        return _without_blocks(snapshot)
    replayed, faults = None, list[str]()
    if snapshot.segments_before is not None:
        try:
            replayed = _run(snapshot, blocks_of(snapshot.segments_before), snapshot.segments_before, {})
            faults = replayed.faults
        except Contradiction as fault:
            faults = [str(fault)]
        replayed = None if faults else replayed
        faults = [f"the layout written down for the start does not fit the events ({fault})" for fault in faults[:1]]
    if replayed is None:
        try:
            replayed = _run(snapshot, *work_out_start(snapshot))
            replayed.start_known, replayed.faults = False, [*faults, *replayed.faults]
        except Contradiction as fault:
            replayed = without_layout(snapshot, [*faults, str(fault)])
    if replayed.segments is not None:
        _follow_pools(snapshot, replayed, replayed.segments)
    return replayed


_ALLOC, _FREED, _ASKED, _ENDED, _OTHER = range(5)
"""Kinds of events in a replay. The second is both of the next: most frees end with the event after their request."""


def _kinds(snapshot: Snapshot) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The events that change blocks, and of which kind each is."""
    history = snapshot.events
    number = {"alloc": _ALLOC, "free_requested": _ASKED, "free_completed": _ENDED}
    numbers = [number.get(action, _OTHER if action in GIVES | TAKES else -1) for action in history.actions]
    kinds = np.array(numbers, dtype=np.int64)[np.frombuffer(history.kinds, dtype=np.int32)]
    addresses = np.frombuffer(history.addresses, dtype=np.int64)
    at_once = (kinds[:-1] == _ASKED) & (kinds[1:] == _ENDED) & (addresses[:-1] == addresses[1:])
    kinds[:-1][at_once] = _FREED
    kinds[1:][at_once] = -1
    kept = np.flatnonzero(kinds >= 0)
    return kept, kinds[kept]


def _run(snapshot: Snapshot, before: list[Allocation], segments: list[Segment], open_ended: dict[int, int]) -> Replay:
    """Replay the events from a layout: what was allocated then, and the segments.

    `open_ended` holds the blocks at the start whose remainder is unknown: their addresses, by the block's end without
    a remainder.
    """
    history, layout = snapshot.events, Layout(snapshot.settings)
    layout.fill(segments, before)
    addresses, sizes = (np.frombuffer(column, dtype=np.int64) for column in (history.addresses, history.sizes))
    made = history.at("alloc")
    start = Allocations.of(before)
    columns = {
        "address": np.concatenate([start.columns["address"], addresses[made]]),
        "requested": np.concatenate([start.columns["requested"], sizes[made]]),
        "alloc": np.concatenate([start.columns["alloc"], made]),
        "stream": np.concatenate([start.columns["stream"], np.frombuffer(history.streams, dtype=np.int64)[made]]),
    }
    walk = _Walk(layout, before, open_ended, len(made))
    reserved = walk.follow(snapshot, sum(segment.total_size for segment in segments))
    for name, values in (("block", walk.blocks), ("free", walk.frees), ("completed", walk.completed)):
        columns[name] = np.array(values, dtype=np.int64)
    allocations = Allocations(columns, walk.unsure | {walk.places[address] for address in open_ended.values()})
    faults = [*_differences(snapshot, allocations, reserved[-1][1])]
    return Replay(allocations=allocations, reserved=reserved, segments=segments, start_known=True, faults=faults)


class _Walk:
    """What the events do to a layout, by the number of the allocation: those from before, then those of the history."""

    def __init__(self, layout: Layout, before: list[Allocation], open_ended: dict[int, int], made: int) -> None:
        self.layout, self.open_ended = layout, open_ended
        self.places = {allocation.address: at for at, allocation in enumerate(before)}
        self.live = {a.address: at for at, a in enumerate(before) if a.free is None}
        self.awaiting = {a.address: at for at, a in enumerate(before) if a.free is not None}
        self.blocks = [allocation.block for allocation in before]
        self.frees = [NEVER if allocation.free is None else allocation.free for allocation in before] + [NEVER] * made
        self.completed = [NEVER] * len(self.frees)
        self.unsure: set[int] = set()

    def follow(self, snapshot: Snapshot, held: int) -> list[tuple[int, int]]:
        """Follow all events. Returns what was reserved after each that changed it, from `held` bytes on."""
        live, blocks, frees, take, open_ended = self.live, self.blocks, self.frees, self.layout.take, self.open_ended
        free_from, free_to = self.layout.free_from, self.layout.free_to
        completed, awaiting = self.completed, self.awaiting
        reserved = [(BEFORE, held)]
        kept, kinds = _kinds(snapshot)
        columns = [np.frombuffer(c, dtype=np.int64)[kept] for c in (snapshot.events.addresses, snapshot.events.sizes)]
        for i, kind, address, size in zip(*(c.tolist() for c in (kept, kinds, *columns)), strict=True):
            if kind == _ALLOC:
                if open_ended and address not in free_from:
                    self._close(address)
                if address in live:
                    raise Contradiction(f"event {i} allocates {address:#x}, where something is allocated")
                live[address] = len(blocks)
                blocks.append(take(address, size))
            elif kind == _OTHER:
                reserved.append((i, self._of_driver(snapshot.events[i], reserved[-1][1])))
            else:
                at = live.pop(address, None) if kind != _ENDED else awaiting.pop(address, None)
                if at is None:
                    what = "ends a free of {} that was not asked for" if kind == _ENDED else _NOT_THERE
                    raise Contradiction(f"event {i} {what.format(hex(address))}")
                if kind == _ASKED:
                    frees[at], awaiting[address] = i, at
                    continue
                if kind == _FREED:
                    frees[at] = i
                    i += 1  # noqa: PLW2901 - the event that ends it
                completed[at], end = i, address + blocks[at]
                if open_ended and open_ended.pop(end, None) is not None:
                    self.unsure.add(at)
                if address in free_to or end in free_from:
                    self.layout.add_free(address, end)
                else:
                    free_from[address], free_to[end] = end, address
        return reserved

    def _of_driver(self, event: Event, reserved: int) -> int:
        """Memory comes from the driver or goes back; returns what is reserved then."""
        end, is_given = event.addr + event.size, event.action in GIVES
        change = self.layout.give if is_given else self.layout.drop
        change(event.addr, end, event.action in {"segment_map", "segment_unmap"})
        return reserved + event.size if is_given else reserved - event.size

    def _close(self, address: int) -> None:
        """Lengthen the block before an allocation that begins inside a free block. It was longer than its request."""
        inside = self.layout.free_block_round(address)
        if inside is None or inside[0] not in self.open_ended or address - inside[0] > SMALL_REQUEST:
            return
        start, end = inside
        self.blocks[self.places[self.open_ended.pop(start)]] += address - start
        del self.layout.free_from[start]
        self.layout.free_from[address], self.layout.free_to[end] = end, address


_NOT_THERE = "frees {}, where nothing is allocated"


def _differences(snapshot: Snapshot, allocations: Allocations, reserved: int) -> Iterator[str]:
    """Sentences on where the outcome differs from the segments at the end. No difference proves the replay."""
    there = {a.address: a.block for a in blocks_of(snapshot.segments) if a.free is None}
    here = allocations.live_at_end()
    held = sum(segment.total_size for segment in snapshot.segments)
    if here != there:
        differing = sum(here.get(address) != there.get(address) for address in here.keys() | there.keys())
        yield (
            f"replayed, {sum(here.values())} bytes are allocated at the end; the segments say {sum(there.values())} "
            f"({differing} blocks differ)"
        )
    if reserved != held:
        yield f"replayed, {reserved} bytes are reserved at the end; the segments say {held}"


def segments_after(replayed: Replay, snapshot: Snapshot, event: int) -> list[Segment]:
    """The segments after an event, by address, without their blocks. Raises Contradiction where segments overlap."""
    held = {segment.address: segment for segment in replayed.segments or ()}
    for i in snapshot.segment_events[: bisect_right(snapshot.segment_events, event)]:
        entry = snapshot.events[i]
        if entry.action in GIVES:
            add_extent(held, entry, replayed.pools.get(i))
        else:
            held, _ = without_extent(held, entry.addr, entry.addr + entry.size)
    return joined_segments(held)


def _follow_pools(snapshot: Snapshot, replayed: Replay, segments: list[Segment]) -> None:
    """Find the pool of every allocation, by the segment that holds it, and what each pool held from the driver."""
    try:
        _, replayed.pools = segments_at_start(snapshot)
    except Contradiction:
        events = [(i, snapshot.events[i]) for i in snapshot.segment_events]
        replayed.pools = {i: event.pool_id or ORDINARY for i, event in events if event.action in GIVES}
    pools = {segment.segment_pool_id or ORDINARY for segment in segments} | set(replayed.pools.values())
    if pools <= {ORDINARY}:
        replayed.by_pool = {ORDINARY: replayed.reserved}
        return
    held = _Extents(segments)
    history = replayed.by_pool = {pool: [(BEFORE, held.bytes(pool))] for pool in sorted(pools | {ORDINARY})}
    columns, of_each = replayed.allocations.columns, list[PoolId]()
    addresses, made = columns["address"].tolist(), columns["alloc"].tolist()
    for i in (*snapshot.segment_events, len(snapshot.events)):
        while len(of_each) < len(made) and made[len(of_each)] < i:
            of_each.append(held.pool_at(addresses[len(of_each)]))
        if i == len(snapshot.events):
            break
        start, end = snapshot.events[i].addr, snapshot.events[i].addr + snapshot.events[i].size
        changes = held.give(start, end, replayed.pools[i]) if i in replayed.pools else held.take(start, end)
        for pool, change in changes:
            history[pool].append((i, history[pool][-1][1] + change))
    replayed.allocations.pools = of_each


class _Extents:
    """Which pool holds an address: stretches of memory by their start."""

    def __init__(self, segments: list[Segment]) -> None:
        self._of = {s.address: (s.end, s.segment_pool_id or ORDINARY) for s in segments}
        self._starts = sorted(self._of)

    def bytes(self, pool: PoolId) -> int:
        return sum(end - start for start, (end, of) in self._of.items() if of == pool)

    def pool_at(self, address: int) -> PoolId:
        at = bisect_right(self._starts, address) - 1
        return self._of[self._starts[at]][1] if at >= 0 else ORDINARY

    def give(self, start: int, end: int, pool: PoolId) -> list[tuple[PoolId, int]]:
        """Add a stretch; returns the change of its pool."""
        if start < end:
            insort(self._starts, start)
            self._of[start] = (end, pool)
        return [(pool, end - start)]

    def take(self, start: int, end: int) -> list[tuple[PoolId, int]]:
        """Remove a piece, of several stretches or of one; returns the change of each pool."""
        first = max(bisect_right(self._starts, start) - 1, 0)
        changed: list[tuple[PoolId, int]] = []
        for left in self._starts[first : bisect_left(self._starts, end)]:
            right, pool = self._of[left]
            if right > start:
                self._starts.remove(left)
                del self._of[left]
                self.give(left, start, pool)
                self.give(end, right, pool)
                changed.append((pool, max(left, start) - min(right, end)))
        return changed


def _without_blocks(snapshot: Snapshot) -> Replay:
    """The replay of a history without a caching allocator, as stepscope writes for a CPU: each block is its request.

    Allocations from before the history come from the notes.
    """
    notes = snapshot.notes.tensors if snapshot.notes else ()
    before = [note for note in notes if note.at_us < snapshot.start_us]
    allocations = [
        Allocation(address=note.address, requested=note.bytes, block=note.bytes)
        for note in {note.address: note for note in reversed(before)}.values()
    ]
    live, faults = {a.address: a for a in allocations}, list[str]()
    for i, (action, address, size, stream) in enumerate(snapshot.events.steps()):
        if action == "alloc":
            if address in live:
                faults.append(f"event {i} allocates {address:#x}, where something is allocated")
                live[address].free = live[address].completed = i
            live[address] = Allocation(address=address, requested=size, block=size, alloc=i, stream=stream)
            allocations.append(live[address])
        elif action == "free_requested":
            freed = live.pop(address, None)
            if freed is None:
                freed = Allocation(address=address, requested=size, block=size, stream=stream)
                allocations.append(freed)
            freed.free = freed.completed = i
    whole = Allocations.of(allocations)
    return Replay(allocations=whole, reserved=[(BEFORE, 0)], start_known=bool(notes), faults=faults)


def without_layout(snapshot: Snapshot, faults: list[str]) -> Replay:
    """The replay of a history that contradicts itself: each block is its request, rounded."""
    settings = snapshot.settings
    by_address = {a.address: a for a in blocks_of(snapshot.segments) if a.free is None}
    allocations, _ = blocks_at_start(snapshot)
    allocations = list({a.address: a for a in allocations}.values())
    live = {a.address: a for a in allocations if a.free is None}
    reserved = sum(segment.total_size for segment in snapshot.segments)
    steps = [(i, snapshot.events[i]) for i in snapshot.segment_events]
    steps = [(i, event.size if event.action in GIVES else -event.size) for i, event in steps]
    reserved = max(0, reserved - sum(change for _, change in steps))
    history = [(BEFORE, reserved)]
    for i, change in steps:
        history.append((i, max(0, history[-1][1] + change)))
    for i, (action, address, size, stream) in enumerate(snapshot.events.steps()):
        if action == "alloc":
            lost = live.pop(address, None)
            if lost is not None:  # its free is missing from the history
                lost.free = lost.completed = i
            block = rounded(size, settings)
            live[address] = Allocation(address=address, requested=size, block=block, alloc=i, stream=stream)
            allocations.append(live[address])
        elif action == "free_requested" and address in live:
            freed = live.pop(address)
            freed.free = freed.completed = i
    for address, allocation in live.items():
        if address in by_address and allocation.requested <= by_address[address].block:
            allocation.block = by_address[address].block
    try:
        segments, _ = segments_at_start(snapshot)
    except Contradiction:
        segments = None
    whole = Allocations.of(allocations)
    return Replay(allocations=whole, reserved=history, segments=segments, start_known=False, faults=faults)
