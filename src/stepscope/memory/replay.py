"""A replay of PyTorch's caching allocator from a snapshot's events: which block each allocation got.

The events say how many bytes were requested. The block counts as allocated (`torch.cuda.max_memory_allocated`): the
request rounded up, plus the rest of the free block where the rest is too small to be a block (block_layout.py has the
rules). The allocator chooses a free block by best fit. The events give its address, so the choice is not replayed.
"""

from dataclasses import dataclass, field

from stepscope.memory.block_layout import BEFORE, Allocation, Contradiction, Layout, rounded
from stepscope.memory.prediction.caching_allocator import SMALL_REQUEST
from stepscope.memory.snapshot import Segment, Snapshot
from stepscope.memory.start_layout import (
    GIVES,
    TAKES,
    add_extent,
    blocks_at_start,
    blocks_of,
    joined_segments,
    without_extent,
    work_out_start,
)


@dataclass(kw_only=True)
class Replay:
    """Every allocation, and how far the replay can be trusted. Allocations from before the history come first."""

    allocations: list[Allocation]
    reserved: list[tuple[int, int]]
    """Bytes held from the driver after each event that changed them. The first entry is before all events."""
    segments: list[Segment] = field(default_factory=list[Segment])
    """The segments when the history began, without their blocks."""
    start_known: bool
    """Whether the snapshot has the layout at the start. Otherwise it was worked out from the events."""
    faults: list[str] = field(default_factory=list[str])
    """Sentences on where events contradict the allocator's rules, or their outcome the segments at the end."""

    @property
    def exact(self) -> bool:
        return not self.faults and not any(allocation.open_ended for allocation in self.allocations)


def replay(snapshot: Snapshot) -> Replay:
    """Follow the events from the layout at the start, known or worked out, to the segments at the end."""
    if not snapshot.segments and not snapshot.segments_before:
        return _without_blocks(snapshot)
    faults: list[str] = []
    if snapshot.segments_before is not None:
        known = Replay(allocations=blocks_of(snapshot.segments_before), reserved=[], start_known=True)
        try:
            _run(snapshot, known, snapshot.segments_before, {})
            if not known.faults:
                return known
            faults = known.faults
        except Contradiction as fault:
            faults = [str(fault)]
        faults = [f"the layout written down for the start does not fit the events ({faults[0]})"]
    try:
        blocks, segments, open_ended = work_out_start(snapshot)
        worked_out = Replay(allocations=blocks, reserved=[], start_known=False, faults=faults)
        return _run(snapshot, worked_out, segments, open_ended)
    except Contradiction as fault:
        return without_layout(snapshot, [*faults, str(fault)])


def _run(  # noqa: PLR0912 - a branch for each kind of event, in the loop that all events pass
    snapshot: Snapshot, start: Replay, segments: list[Segment], open_ended: dict[int, int]
) -> Replay:
    """Replay the events from a layout.

    `open_ended` holds the blocks at the start whose remainder is unknown: their addresses, by the block's end without
    a remainder.
    """
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
    """Lengthen the block before an allocation that begins inside a free block. It was longer than its request."""
    inside = layout.free_block_round(address)
    if inside is None or inside[0] not in open_ended or address - inside[0] > SMALL_REQUEST:
        return
    start, end = inside
    allocations[held[open_ended.pop(start)]].block += address - start
    del layout.free_from[start]
    layout.free_from[address], layout.free_to[end] = end, address


def _differences(snapshot: Snapshot, allocations: list[Allocation], reserved: int) -> list[str]:
    """Sentences on where the outcome differs from the segments at the end. No difference proves the replay."""
    there = {a.address: a.block for a in blocks_of(snapshot.segments) if a.free is None}
    here = {a.address: a.block for a in allocations if a.free is None}
    held = sum(segment.total_size for segment in snapshot.segments)
    faults: list[str] = []
    if here != there:
        differing = sum(here.get(address) != there.get(address) for address in here.keys() | there.keys())
        faults.append(
            f"replayed, {sum(here.values())} bytes are allocated at the end; the segments say {sum(there.values())} "
            f"({differing} blocks differ)"
        )
    if reserved != held:
        faults.append(f"replayed, {reserved} bytes are reserved at the end; the segments say {held}")
    return faults


def segments_after(replayed: Replay, snapshot: Snapshot, event: int) -> list[Segment]:
    """The segments after an event, by address, without their blocks. Raises Contradiction where segments overlap."""
    held = {segment.address: segment for segment in replayed.segments}
    for entry in snapshot.events[: event + 1]:
        if entry.action in GIVES:
            add_extent(held, entry)
        elif entry.action in TAKES:
            held = without_extent(held, entry.addr, entry.addr + entry.size)
    return joined_segments(held)


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
    """The replay of a history that contradicts itself: each block is its request, rounded."""
    settings = snapshot.settings
    given = {a.address: a for a in blocks_of(snapshot.segments) if a.free is None}
    allocations, _ = blocks_at_start(snapshot)
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
