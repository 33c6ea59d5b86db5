"""A long memory snapshot out of a real one: its step again and again, on an allocator that writes what PyTorch writes.

Requests, their order, lifetimes, stacks and ranges are the capture's; addresses and blocks are those of
RecordingAllocator. Frames are shared among all stacks and a free's stack by its two events, as PyTorch shares them.
"""

import gzip
import pickle
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import msgspec

from recording_allocator import RecordingAllocator
from stepscope.allocations.replay import BEFORE, replay
from stepscope.allocations.snapshot import Snapshot, read_snapshot

_GAP_US = 100


class SnapshotTiles(msgspec.Struct, frozen=True, kw_only=True):
    """What a tiled snapshot holds."""

    steps: int
    bytes: int
    events: int
    allocations: int
    frames: int
    """On all stacks together."""
    peak_bytes: int
    """Allocated at most, as the allocator itself counted."""


class _Stacks:
    """Frames once each; a list of them for each event, as PyTorch makes it."""

    def __init__(self) -> None:
        self._frames: dict[tuple[str, str, int], dict[str, Any]] = {}

    def shared(self, frames: Any) -> list[dict[str, Any]]:
        return [self._frames.setdefault((f["name"], f["filename"], f["line"]), f) for f in frames]


def tile_snapshot(capture: Path, target: Path, events: int) -> SnapshotTiles:
    """Write a snapshot of at least so many events."""
    snapshot = read_snapshot(capture)
    stacks = _Stacks()
    frames = [stacks.shared(event.frames) for event in snapshot.events]
    allocator = RecordingAllocator(recording=False)
    resident = _Residents(snapshot, allocator)
    layout = allocator.start()
    moments = [*snapshot.times, *(annotation.time_us for annotation in snapshot.annotations)]
    length_us = max(moments) - min(moments) + _GAP_US
    annotations: list[dict[str, Any]] = []
    steps = 0
    while len(allocator.events) < events:
        later_us = steps * length_us
        _step(snapshot, allocator, resident, frames, later_us)
        annotations += [{**msgspec.to_builtins(a), "time_us": a.time_us + later_us} for a in snapshot.annotations]
        steps += 1
    whole = allocator.snapshot(segments_before=layout, external_annotations=annotations)
    with gzip.open(target, "wb") if target.suffix == ".gz" else target.open("wb") as file:
        pickle.dump(whole, file, protocol=4)
    return SnapshotTiles(
        steps=steps,
        bytes=target.stat().st_size,
        events=len(allocator.events),
        allocations=sum(event["action"] == "alloc" for event in allocator.events),
        frames=sum(len(event["frames"]) for event in allocator.events),
        peak_bytes=allocator.peak,
    )


class _Residents:
    """What a step finds when it begins: blocks by the place in the capture's list of allocations, and by size."""

    def __init__(self, snapshot: Snapshot, allocator: RecordingAllocator) -> None:
        self.allocations = replay(snapshot).allocations
        self.addresses: dict[int, int] = {}
        for i, allocation in enumerate(self.allocations):
            if allocation.alloc == BEFORE and allocation.free != BEFORE:
                self.addresses[i] = allocator.malloc(allocation.requested)

    def hand_over(self, left: dict[int, int]) -> list[int]:
        """After a step: what it left takes the place of what it freed, size by size; the rest is to be freed."""
        waiting: dict[int, deque[int]] = defaultdict(deque)
        for i in left:
            waiting[self.allocations[i].requested].append(i)
        for i, allocation in enumerate(self.allocations):
            if allocation.alloc == BEFORE and allocation.free not in (None, BEFORE):
                same = waiting[allocation.requested]
                assert same, f"the step frees {allocation.requested} bytes and leaves none: it cannot be repeated"
                self.addresses[i] = left[same.popleft()]
        return [left[i] for rest in waiting.values() for i in rest]


def _step(
    snapshot: Snapshot, allocator: RecordingAllocator, resident: _Residents, frames: list[Any], later_us: int
) -> None:
    """The capture's events once more."""
    made = {a.alloc: i for i, a in enumerate(resident.allocations) if a.alloc != BEFORE}
    freed = {a.free: i for i, a in enumerate(resident.allocations) if a.free not in (None, BEFORE)}
    left: dict[int, int] = {}
    for k, event in enumerate(snapshot.events):
        allocator.time_us = snapshot.times[k] + later_us
        allocator.about = {"frames": frames[k][:], "user_metadata": event.user_metadata}
        if k in made:
            left[made[k]] = allocator.malloc(event.size)
        elif k in freed:
            i = freed[k]
            allocator.free(left.pop(i) if i in left else resident.addresses.pop(i))
    for address in resident.hand_over(left):
        allocator.free(address)
