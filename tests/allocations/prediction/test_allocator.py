"""The simulated caching allocator: its rules by hand, and random programs against two others of the same rules."""

from itertools import pairwise
from typing import Any

import pytest
from benchmarks.recording_allocator import RecordingAllocator
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.allocations.prediction.caching_allocator import (
    CachingAllocator,
    OutOfMemory,
    least_rest,
    rounded,
    segment_size,
)
from stepscope.allocations.replay import replay
from stepscope.allocations.snapshot import snapshot_from
from stepscope.core.units import MIB

# ---- the rules, by hand


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, 512), (511, 512), (512, 512), (513, 1024), (1024, 1024), (MIB - 1, MIB), (MIB, MIB), (MIB + 1, MIB + 512)],
)
def test_requests_are_rounded_to_512_bytes(size: int, expected: int):
    assert rounded(size) == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (12 * MIB, 12 * MIB),
        (400 * MIB, 400 * MIB),
    ],
)
def test_segments_are_of_2_of_20_or_of_a_multiple_of_2_mib(size: int, expected: int):
    assert segment_size(size) == expected


def test_a_rest_is_split_off_from_512_bytes_in_a_small_block_and_beyond_1_mib_in_a_large_one():
    assert least_rest(small=True) == 512 and MIB < least_rest(small=False) <= MIB + 512


def test_nothing_is_taken_for_nothing():
    """A tensor without elements has no memory."""
    allocator = CachingAllocator()
    blocks = [allocator.allocate(0) for _ in range(2)]
    assert [size for _, size in blocks] == [0, 0]
    assert allocator.reserved == 0
    for block, _ in blocks:
        allocator.free(block)


def test_small_requests_share_a_segment_of_2_mib():
    allocator = CachingAllocator()
    assert [allocator.allocate(size) for size in (1, 513, MIB)] == [(0, 512), (512, 1024), (1536, MIB)]
    assert allocator.reserved == 2 * MIB
    assert allocator.allocate(MIB) == (2 * MIB, MIB)  # the first segment has 1 MiB - 1536 bytes left
    assert allocator.reserved == 4 * MIB


def test_large_requests_do_not_look_among_small_blocks_nor_small_among_large():
    allocator = CachingAllocator()
    assert allocator.allocate(512) == (0, 512)
    assert allocator.allocate(MIB + 1) == (2 * MIB, MIB + 512)
    assert allocator.allocate(512) == (512, 512)
    assert allocator.reserved == 22 * MIB


def test_a_large_block_is_given_whole_when_at_most_1_mib_would_be_left():
    allocator = CachingAllocator()
    assert allocator.allocate(11 * MIB) == (0, 12 * MIB)  # 1 MiB of the segment stays with it
    assert allocator.allocate(11 * MIB - 512) == (12 * MIB, 11 * MIB - 512)  # here 1 MiB and 512 bytes are left
    assert allocator.allocate(MIB + 512) == (23 * MIB - 512, MIB + 512)
    assert allocator.reserved == 24 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken_and_of_equals_the_first():
    allocator = CachingAllocator()
    blocks = {size: allocator.allocate(size * MIB)[0] for size in (14, 12, 30, 16)}
    again = allocator.allocate(12 * MIB)[0]
    for block in (*blocks.values(), again):
        allocator.free(block)
    assert allocator.allocate(11 * MIB) == (blocks[12], 12 * MIB)
    assert allocator.allocate(12 * MIB) == (again, 12 * MIB)
    assert allocator.allocate(12 * MIB) == (blocks[14], 12 * MIB)  # 2 MiB are split off
    assert allocator.allocate(2 * MIB) == (blocks[14] + 12 * MIB, 2 * MIB)
    assert allocator.reserved == (14 + 12 + 30 + 16 + 12) * MIB


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_free_neighbours_merge_in_whichever_order_they_come_free(order: tuple[int, ...]):
    allocator = CachingAllocator()
    blocks = [allocator.allocate(6 * MIB)[0] for _ in range(3)]
    assert blocks == [0, 6 * MIB, 12 * MIB] and allocator.reserved == 20 * MIB
    for i in order:
        allocator.free(blocks[i])
    assert allocator.allocate(20 * MIB) == (0, 20 * MIB)
    assert allocator.reserved == 20 * MIB


def test_segments_do_not_merge():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(20 * MIB)[0] for _ in range(2)]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(40 * MIB) == (40 * MIB, 40 * MIB)
    assert allocator.reserved == allocator.reserved_peak == 80 * MIB


def test_at_the_limit_segments_that_hold_nothing_are_given_back():
    allocator = CachingAllocator(limit_bytes=60 * MIB)
    empty, used = allocator.allocate(20 * MIB)[0], allocator.allocate(20 * MIB)[0]
    part = allocator.allocate(8 * MIB)[0]  # in a segment of 20
    allocator.free(empty)
    assert allocator.reserved == 60 * MIB
    assert allocator.allocate(14 * MIB) == (empty, 14 * MIB)  # the cache has it
    allocator.free(empty)
    assert allocator.allocate(15 * MIB)[1] == 15 * MIB
    allocator.free(empty)
    allocator.free(used)
    assert allocator.allocate(30 * MIB) == (60 * MIB, 30 * MIB)  # both empty segments go back, the one in use stays
    assert allocator.reserved == 50 * MIB and allocator.reserved_peak == 60 * MIB
    allocator.free(part)


def test_out_of_memory_is_when_giving_back_is_not_enough():
    allocator = CachingAllocator(limit_bytes=60 * MIB)
    kept = [allocator.allocate(20 * MIB)[0], allocator.allocate(8 * MIB)[0]]
    with pytest.raises(OutOfMemory):
        allocator.allocate(22 * MIB)
    assert allocator.allocate(20 * MIB)[1] == 20 * MIB  # exactly the limit
    with pytest.raises(OutOfMemory):
        allocator.allocate(14 * MIB)
    assert allocator.allocate(12 * MIB) == (kept[1] + 8 * MIB, 12 * MIB)  # what a segment has left is no new segment
    assert allocator.reserved == allocator.reserved_peak == 60 * MIB


# ---- random programs

SIZES = st.one_of(
    st.integers(1, 4096),
    st.integers(MIB - 1024, MIB + 1024),
    st.integers(1, 40).map(lambda count: count * MIB // 2),
    st.integers(MIB, 30 * MIB),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), SIZES),
        st.tuples(st.just("free"), st.integers(0, 1 << 16)),
        st.tuples(st.just("release"), st.just(0)),
    ),
    min_size=4,
    max_size=80,
)


class Program:
    """Plays steps on an allocator, and keeps what it answered. Which block a step means is modulo those there are."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.allocator = CachingAllocator(limit_bytes)
        self.live: dict[int, tuple[int, int]] = {}
        """Address -> bytes asked for, and of the block."""
        self.segments: dict[int, int] = {}
        """Address -> bytes, as what is reserved grew."""
        self.events: list[dict[str, Any]] = []
        """The same as PyTorch would have written it down."""

    def play(self, steps: list[tuple[str, int]]) -> None:
        for what, number in steps:
            if what == "allocate":
                self.allocate(number)
            elif what == "release":
                self.release()
            elif self.live:
                self.free(list(self.live)[number % len(self.live)])

    def allocate(self, size: int) -> None:
        before = self.allocator.reserved
        address, block = self.allocator.allocate(size)
        if self.allocator.reserved != before:  # a block of a new segment is its beginning
            self.segments[address] = self.allocator.reserved - before
            self._record("segment_alloc", address, self.segments[address])
        self.live[address] = (size, block)
        self._record("alloc", address, size)

    def free(self, address: int) -> None:
        self.allocator.free(address)
        size, _ = self.live.pop(address)
        self._record("free_requested", address, size)
        self._record("free_completed", address, size)

    def free_all(self) -> None:
        for address in list(self.live):
            self.free(address)

    def release(self) -> None:
        self.allocator.release_cached()
        for start, size in list(self.segments.items()):
            if not any(start <= address < start + size for address in self.live):
                del self.segments[start]
                self._record("segment_free", start, size)

    def snapshot(self) -> dict[str, Any]:
        """As torch.cuda.memory._snapshot(), of an allocator that had nothing when the history began."""
        return {"segments": [self._told(*s) for s in self.segments.items()], "device_traces": [self.events]}

    def _told(self, start: int, size: int) -> dict[str, Any]:
        inside = sorted((at, block) for at, (_, block) in self.live.items() if start <= at < start + size)
        blocks, here = [], start
        for address, block in [*inside, (start + size, 0)]:
            if here < address:
                blocks.append({"address": here, "size": address - here, "state": "inactive"})
            if block:
                blocks.append({"address": address, "size": block, "state": "active_allocated"})
            here = address + block
        return {"device": 0, "address": start, "total_size": size, "blocks": blocks}

    def _record(self, action: str, address: int, size: int) -> None:
        self.events.append({"action": action, "addr": address, "size": size, "time_us": len(self.events) + 1})


@settings(deadline=None, max_examples=200)
@given(STEPS)
def test_blocks_never_overlap_and_lie_in_segments(steps: list[tuple[str, int]]):
    program = Program()
    program.play(steps)
    blocks = sorted((address, address + block) for address, (_, block) in program.live.items())
    assert all(end <= start for (_, end), (start, _) in pairwise(blocks))
    assert all(block >= size for size, block in program.live.values())
    for start, end in blocks:
        assert any(s <= start and end <= s + size for s, size in program.segments.items())
    assert program.allocator.reserved == sum(program.segments.values())


@settings(deadline=None, max_examples=200)
@given(STEPS)
def test_when_all_is_freed_each_segment_is_one_free_block(steps: list[tuple[str, int]]):
    """So all segments can be had again whole, the largest first, and then nothing is reserved anew."""
    program = Program()
    program.play(steps)
    program.free_all()
    held = dict(program.segments)
    for size in sorted(held.values(), reverse=True):
        small = size == 2 * MIB
        for _ in range(2 if small else 1):
            program.allocate(MIB if small else size)
    assert program.segments == held
    assert sum(block for _, block in program.live.values()) == program.allocator.reserved
    program.free_all()
    program.release()
    assert program.allocator.reserved == 0 and not program.segments


@settings(deadline=None, max_examples=300)
@given(STEPS)
def test_every_block_is_that_of_an_allocator_written_beside_pytorchs(steps: list[tuple[str, int]]):
    """One with lists of blocks, searched through. Both lay out segments one after another."""
    program, other = Program(), RecordingAllocator()
    base: int | None = None
    for what, number in steps:
        if what == "allocate":
            program.allocate(number)
            address = other.malloc(number)
            base = address if base is None else base
            assert list(program.live)[-1] == address - base
        elif what == "release":
            program.release()
            other.empty_cache()
        elif program.live:
            address = list(program.live)[number % len(program.live)]
            program.free(address)
            other.free(address + (base or 0))
        assert sum(block for _, block in program.live.values()) == other.allocated
        assert program.allocator.reserved == other.reserved


@settings(deadline=None, max_examples=200)
@given(STEPS)
def test_the_replay_of_its_history_finds_the_same_blocks(steps: list[tuple[str, int]]):
    """Reading a snapshot and predicting one follow the same rules."""
    program = Program()
    program.play([*steps, ("allocate", 512)])
    replayed = replay(snapshot_from(program.snapshot(), "a program"))
    assert replayed.exact, replayed.faults
    live = {a.address: (a.requested, a.block) for a in replayed.allocations if a.free is None}
    assert live == program.live
    assert replayed.reserved[-1][1] == program.allocator.reserved
    assert max(reserved for _, reserved in replayed.reserved) == program.allocator.reserved_peak


@settings(deadline=None, max_examples=200)
@given(STEPS, st.integers(1, 100).map(lambda count: count * MIB))
def test_a_limit_is_never_passed_and_refuses_only_what_it_must(steps: list[tuple[str, int]], limit: int):
    allocator = CachingAllocator(limit)
    live: list[tuple[int, int]] = []
    for what, number in steps:
        if what == "allocate":
            try:
                live.append(allocator.allocate(number))
            except OutOfMemory:
                assert allocator.reserved + segment_size(rounded(number)) > limit
                before = allocator.reserved
                allocator.release_cached()
                assert allocator.reserved == before  # there was nothing more to give back
        elif live:
            allocator.free(live.pop(number % len(live))[0])
        assert sum(block for _, block in live) <= allocator.reserved <= allocator.reserved_peak <= limit
