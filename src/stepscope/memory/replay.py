"""What PyTorch's caching allocator did, replayed from a snapshot's events: which block each allocation got.

The events say what was requested. What counts as allocated (`torch.cuda.max_memory_allocated`) is the block given for
it: the request rounded up, and the rest of the free block where that is too small to be a block of its own. The rules
are those of c10/cuda/CUDACachingAllocator.cpp:

- a request is rounded up to 512 bytes, or as `roundup_power2_divisions` says (round_size);
- up to 1 MiB it belongs to the small pool, else to the large one (get_pool);
- it takes the start of a free block. The rest becomes a free block if it has 512 bytes (small pool, and with
  expandable segments) or more than 1 MiB (large pool, requests under max_split_size); else the block is given whole
  (should_split);
- a freed block merges with free neighbours of its segment (free_block).

Which free block is taken is a matter of best fit; the events give its address, so nothing of that is replayed.
"""

from bisect import bisect_right
from dataclasses import dataclass, field

import msgspec

from stepscope.memory.snapshot import Segment, Settings, Snapshot

SMALLEST_BLOCK = 512
SMALL_REQUEST = 1 << 20
"""Largest request, rounded, of the small pool; the large pool splits off only more than this."""

GIVES = frozenset({"segment_alloc", "segment_map"})
TAKES = frozenset({"segment_free", "segment_unmap"})

BEFORE = -1
"""Index of an event that precedes the history."""


@dataclass(kw_only=True)
class Allocation:
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
    open_ended: bool = False
    """Nothing shows where the block ended: it is taken as long as its request, and may have been up to 1 MiB longer."""


@dataclass(kw_only=True)
class Replay:
    """Every allocation, those before the history first, and how far the replay can be trusted."""

    allocations: list[Allocation]
    reserved: list[tuple[int, int]]
    """Bytes held from the driver after each event that changed them; the first is before all events."""
    segments: list[Segment] = field(default_factory=list)
    """When the history began; their blocks are not told."""
    start_known: bool
    """Whether the layout at the start was written down; else it was worked out from what the events show."""
    faults: list[str] = field(default_factory=list)
    """Where the events contradict the rules, or their outcome the segments at the end."""

    @property
    def exact(self) -> bool:
        return not self.faults and not any(allocation.open_ended for allocation in self.allocations)


class Contradiction(Exception):
    """An event that cannot happen in the layout at hand."""


def rounded(size: int, settings: Settings) -> int:
    """Bytes that a request is rounded up to (round_size, roundup_power2_next_division)."""
    if size < SMALLEST_BLOCK:
        return SMALLEST_BLOCK
    if settings.roundup_power2_divisions:
        divisions = _divisions(size, settings.roundup_power2_divisions)
        if divisions > 1 and size > SMALLEST_BLOCK * divisions and size & (size - 1):
            step = (1 << (size.bit_length() - 1)) >> (divisions.bit_length() - 1)
            return -(-size // step) * step if step else 1 << size.bit_length()
    return -(-size // SMALLEST_BLOCK) * SMALLEST_BLOCK


def _divisions(size: int, by_mib: dict[str, int]) -> int:
    """Divisions of the power of two below a size. There is one number for each power from 1 MiB to 32 GiB."""
    power = min(max(size.bit_length() - 1 - 20, 0), 15)
    return by_mib.get(str(1 << power), 0)


class Layout:
    """Blocks by address. Free blocks are known by both ends, so that neighbours are found without a search."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.always_splits = settings.expandable_segments
        self.split_below = settings.max_split_size if settings.max_split_size > 0 else 1 << 63
        self.simple_rounding = not any(divisions > 1 for divisions in settings.roundup_power2_divisions.values())
        self.free_from: dict[int, int] = {}
        """Start of each free block -> its end."""
        self.free_to: dict[int, int] = {}
        self.walls: dict[int, int] = {}
        """Addresses at which segments of the driver meet the rest: no block spans them."""

    def add_free(self, start: int, end: int) -> None:
        """A block comes free and merges with free neighbours."""
        if end not in self.walls and end in self.free_from:
            after = self.free_from.pop(end)
            del self.free_to[after]
            end = after
        if start not in self.walls and start in self.free_to:
            before = self.free_to.pop(start)
            del self.free_from[before]
            start = before
        self.free_from[start] = end
        self.free_to[end] = start

    def take(self, address: int, size: int) -> int:
        """Bytes of the block that a request gets at an address. Raises Contradiction where no free block starts."""
        end = self.free_from.get(address)
        if end is None:
            raise Contradiction(f"nothing free starts at {address:#x}")
        need = rounded(size, self.settings) if not self.simple_rounding else max((size + 511) & ~511, SMALLEST_BLOCK)
        rest = end - address - need
        if rest < 0:
            raise Contradiction(f"{need} bytes are taken at {address:#x} where {end - address} are free")
        del self.free_from[address]
        if self.always_splits or need <= SMALL_REQUEST:
            splits = rest >= SMALLEST_BLOCK
        else:
            splits = rest > SMALL_REQUEST and need < self.split_below
        if not splits:
            del self.free_to[end]
            return end - address
        self.free_from[address + need] = end
        self.free_to[end] = address + need
        return need

    def give(self, start: int, end: int, expandable: bool) -> None:
        """The driver gives memory. Pages of an expandable segment continue what lies before and after them."""
        if not expandable:
            for wall in (start, end):
                self.walls[wall] = self.walls.get(wall, 0) + 1
        self.add_free(start, end)

    def drop(self, start: int, end: int, expandable: bool) -> None:
        """The driver takes back memory that is free: a whole segment, or pages out of a free block."""
        found = self.free_block_round(start)
        if found is None or found[1] < end:
            raise Contradiction(f"{end - start} bytes go back to the driver at {start:#x} that are not free")
        free_start, free_end = found
        del self.free_from[free_start]
        del self.free_to[free_end]
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


def replay(snapshot: Snapshot) -> Replay:
    """Follow the events from the layout at the start, known or worked out, to the segments at the end."""
    if not snapshot.segments and not snapshot.segments_before:
        return _without_blocks(snapshot)
    faults = []
    if snapshot.segments_before is not None:
        known = Replay(allocations=_blocks_of(snapshot.segments_before), reserved=[], start_known=True)
        try:
            return _run(snapshot, known, snapshot.segments_before, {})
        except Contradiction as fault:
            faults = [f"the layout written down for the start does not fit the events: {fault}"]
    try:
        worked_out, segments, open_ended = work_out_start(snapshot)
        worked_out.faults = faults
        return _run(snapshot, worked_out, segments, open_ended)
    except Contradiction as fault:
        return without_layout(snapshot, [*faults, str(fault)])


def _blocks_of(segments: list[Segment]) -> list[Allocation]:
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


def _run(  # noqa: PLR0912 - a branch for each kind of event, in the loop that all events pass
    snapshot: Snapshot, start: Replay, segments: list[Segment], open_ended: dict[int, int]
) -> Replay:
    """Replay from a layout. `open_ended` has the address of each block of the start whose remainder is not known, by
    where the block ends without one."""
    layout = Layout(snapshot.settings)
    allocations = start.allocations
    live = {a.address: i for i, a in enumerate(allocations) if a.free is None}
    awaiting = {a.address: i for i, a in enumerate(allocations) if a.free is not None}
    layout.fill(segments, allocations)
    reserved = sum(segment.total_size for segment in segments)
    start.reserved, start.segments = [(BEFORE, reserved)], segments
    free_from, free_to = layout.free_from, layout.free_to
    for i, event in enumerate(snapshot.events):
        action, address, size = event.action, event.addr, event.size
        if action == "alloc":
            if open_ended and address not in free_from:
                _close(layout, allocations, live | awaiting, open_ended, address)
            if address in live:
                raise Contradiction(f"event {i} allocates {address:#x}, where something is allocated")
            live[address] = len(allocations)
            block = layout.take(address, size)
            allocations.append(Allocation(address=address, requested=size, block=block, alloc=i, stream=event.stream))
        elif action == "free_requested":
            index = live.pop(address, None)
            if index is None:
                raise Contradiction(f"event {i} frees {address:#x}, where nothing is allocated")
            allocations[index].free = i
            awaiting[address] = index
        elif action == "free_completed":
            index = awaiting.pop(address, None)
            if index is None:
                raise Contradiction(f"event {i} ends a free of {address:#x} that was not asked for")
            allocations[index].completed = i
            end = address + allocations[index].block
            if open_ended and open_ended.pop(end, None) is not None:
                allocations[index].open_ended = True
            if address in free_to or end in free_from:
                layout.add_free(address, end)
            else:
                free_from[address], free_to[end] = end, address
        elif action in GIVES:
            layout.give(address, address + size, action == "segment_map")
            reserved += size
            start.reserved.append((i, reserved))
        elif action in TAKES:
            layout.drop(address, address + size, action == "segment_unmap")
            reserved -= size
            start.reserved.append((i, reserved))
    for address in open_ended.values():
        allocations[(live | awaiting)[address]].open_ended = True
    start.faults += _differences(snapshot, allocations, reserved)
    return start


def _close(
    layout: Layout, allocations: list[Allocation], held: dict[int, int], open_ended: dict[int, int], address: int
) -> None:
    """An allocation begins inside a free block: the block before it was longer than its request, up to here."""
    inside = layout.free_block_round(address)
    if inside is None or inside[0] not in open_ended or address - inside[0] > SMALL_REQUEST:
        return
    start, end = inside
    allocations[held[open_ended.pop(start)]].block += address - start
    del layout.free_from[start]
    layout.free_from[address], layout.free_to[end] = end, address


def _differences(snapshot: Snapshot, allocations: list[Allocation], reserved: int) -> list[str]:
    """Where the outcome is not what the segments of the end say: the replay's proof."""
    there = {a.address: a.block for a in _blocks_of(snapshot.segments) if a.free is None}
    here = {a.address: a.block for a in allocations if a.free is None}
    held = sum(segment.total_size for segment in snapshot.segments)
    faults = []
    if here != there:
        differing = sum(here.get(address) != there.get(address) for address in here.keys() | there.keys())
        faults.append(
            f"replayed, {sum(here.values())} bytes are allocated at the end; the segments say {sum(there.values())} "
            f"({differing} blocks differ)"
        )
    if reserved != held:
        faults.append(f"replayed, {reserved} bytes are reserved at the end; the segments say {held}")
    return faults


def work_out_start(snapshot: Snapshot) -> tuple[Replay, list[Segment], dict[int, int]]:
    """The layout when the history began, from what it shows: (its blocks, its segments, blocks of open end).

    Blocks of the start are those that the history frees without having allocated them, and those that are there at the
    end without an event. All else was free. A block is as long as its request asks; in the large pool, where every
    block is longer than 1 MiB, a gap after it of up to 1 MiB is its own too. After a longer gap its end is open.

    Raises Contradiction when the history cannot have been whole.
    """
    segments = _segments_at_start(snapshot)
    blocks, is_given = _blocks_at_start(snapshot)
    blocks.sort(key=lambda allocation: allocation.address)
    starts = [segment.address for segment in segments]
    settings, open_ended = snapshot.settings, {}
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
    return Replay(allocations=blocks, reserved=[], start_known=False), segments, open_ended


def _blocks_at_start(snapshot: Snapshot) -> tuple[list[Allocation], set[int]]:
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
    given = [a for a in _blocks_of(snapshot.segments) if a.address not in (live if a.free is None else awaiting)]
    return [*blocks, *given], {a.address for a in given}


def _segments_at_start(snapshot: Snapshot) -> list[Segment]:
    """The segments of the end with every event on them undone, last first."""
    held = {segment.address: segment for segment in snapshot.segments}
    for event in reversed(snapshot.events):
        start, end = event.addr, event.addr + event.size
        expandable = event.action in {"segment_map", "segment_unmap"}
        if event.action in GIVES:
            around = [s for s in held.values() if s.address <= start and end <= s.end]
            if not around:
                raise Contradiction(f"a segment came at {start:#x} that is gone at the end without an event")
            del held[around[0].address]
            pieces = ((around[0].address, start), (end, around[0].end))
        elif event.action in TAKES:
            pieces = ((start, end),)
        else:
            continue
        _add_pieces(held, pieces, event.stream, expandable)
    return _joined(held)


def segments_after(replayed: Replay, snapshot: Snapshot, event: int) -> list[Segment]:
    """The segments after an event, by address; their blocks are not told."""
    held = {segment.address: segment for segment in replayed.segments}
    for entry in snapshot.events[: event + 1]:
        start, end = entry.addr, entry.addr + entry.size
        expandable = entry.action in {"segment_map", "segment_unmap"}
        if entry.action in GIVES:
            pieces = ((start, end),)
        elif entry.action in TAKES:
            around = next(s for s in held.values() if s.address <= start and end <= s.end)
            del held[around.address]
            pieces = ((around.address, start), (end, around.end))
        else:
            continue
        _add_pieces(held, pieces, entry.stream, expandable)
        if expandable:
            held = {segment.address: segment for segment in _joined(held)}
    return _joined(held)


def _add_pieces(held: dict[int, Segment], pieces: tuple[tuple[int, int], ...], stream: int, expandable: bool) -> None:
    for left, right in pieces:
        if left < right:
            held[left] = Segment(
                address=left, total_size=right - left, blocks=[], stream=stream, is_expandable=expandable
            )


def _joined(held: dict[int, Segment]) -> list[Segment]:
    """Segments by address; neighbouring pages of expandable ones are one. Raises Contradiction where two overlap."""
    joined: list[Segment] = []
    for segment in sorted(held.values(), key=lambda s: s.address):
        last = joined[-1] if joined else None
        if last and last.end > segment.address:
            raise Contradiction(f"two segments overlap at {segment.address:#x}")
        if last and last.end == segment.address and last.is_expandable and segment.is_expandable:
            joined[-1] = msgspec.structs.replace(last, total_size=last.total_size + segment.total_size)
        else:
            joined.append(segment)
    return joined


def _without_blocks(snapshot: Snapshot) -> Replay:
    """A history without a caching allocator, as stepscope writes it of a CPU: what is allocated is what is asked for.

    What was there before is what its notes tell.
    """
    notes = snapshot.notes.tensors if snapshot.notes else ()
    before = [note for note in notes if note.at_us < snapshot.start_us]
    allocations = [
        Allocation(address=note.address, requested=note.bytes, block=note.bytes)
        for note in {note.address: note for note in reversed(before)}.values()
    ]
    start = Replay(allocations=allocations, reserved=[(BEFORE, 0)], start_known=bool(notes))
    live = {a.address: a for a in allocations}
    for i, event in enumerate(snapshot.events):
        if event.action == "alloc":
            if event.addr in live:
                start.faults.append(f"event {i} allocates {event.addr:#x}, where something is allocated")
                live[event.addr].free = live[event.addr].completed = i
            live[event.addr] = Allocation(
                address=event.addr, requested=event.size, block=event.size, alloc=i, stream=event.stream
            )
            allocations.append(live[event.addr])
        elif event.action == "free_requested":
            freed = live.pop(event.addr, None)
            if freed is None:
                freed = Allocation(address=event.addr, requested=event.size, block=event.size, stream=event.stream)
                allocations.append(freed)
            freed.free = freed.completed = i
    return start


def without_layout(snapshot: Snapshot, faults: list[str]) -> Replay:
    """Allocations of a history that contradicts itself: each block is its request, rounded."""
    settings = snapshot.settings
    given = {a.address: a for a in _blocks_of(snapshot.segments) if a.free is None}
    allocations, _ = _blocks_at_start(snapshot)
    allocations = list({a.address: a for a in allocations}.values())
    live = {a.address: a for a in allocations if a.free is None}
    reserved = sum(segment.total_size for segment in snapshot.segments)
    changes = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    steps = [(i, e.size * changes[e.action]) for i, e in enumerate(snapshot.events) if e.action in changes]
    reserved = max(0, reserved - sum(change for _, change in steps))
    history = [(BEFORE, reserved)]
    for i, change in steps:
        history.append((i, max(0, history[-1][1] + change)))
    for i, event in enumerate(snapshot.events):
        if event.action == "alloc":
            lost = live.pop(event.addr, None)
            if lost is not None:  # its free is missing from the history
                lost.free = lost.completed = i
            block = rounded(event.size, settings)
            live[event.addr] = Allocation(
                address=event.addr, requested=event.size, block=block, alloc=i, stream=event.stream
            )
            allocations.append(live[event.addr])
        elif event.action == "free_requested" and event.addr in live:
            freed = live.pop(event.addr)
            freed.free = freed.completed = i
    for address, allocation in live.items():
        if address in given and allocation.requested <= given[address].block:
            allocation.block = given[address].block
    return Replay(allocations=allocations, reserved=history, start_known=False, faults=faults)
