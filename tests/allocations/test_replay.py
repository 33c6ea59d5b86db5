"""The replay of the caching allocator: every block's size, from events alone, against an allocator that knows them."""

from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from benchmarks.recording_allocator import MIB, RecordingAllocator
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.allocations.plain_pickle import read_plain_pickle
from stepscope.allocations.replay import Replay, replay, segments_after
from stepscope.allocations.snapshot import snapshot_from
from tests.allocations.prediction.test_allocator import SIZES

DATA = Path(__file__).parents[1] / "data"
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.integers(0, 1)),
        st.tuples(st.just("free"), st.integers(0, 1 << 16), st.booleans()),
        st.tuples(st.just("complete"), st.integers(0, 1 << 16), st.just(0)),
        st.tuples(st.just("empty"), st.just(0), st.just(0)),
    ),
    min_size=8,
    max_size=60,
)
CONFIGURATIONS = st.sampled_from(
    [{}, {"expandable": True}, {"max_split_size": 20 * MIB}, {"roundup": {"1": 4, "2": 4, "4": 8, "8": 2, "16": 4}}]
)


class Program:
    """Runs steps on an allocator; which block a step means is taken modulo those there are."""

    def __init__(self, configuration: dict[str, Any]) -> None:
        self.allocator = RecordingAllocator(**configuration)
        self.live: list[int] = []
        self.awaiting: list[int] = []

    def run(self, steps: list[tuple[str, int, int]]) -> None:
        for what, number, more in steps:
            self.allocator.time_us += 1
            if what == "malloc":
                self.live.append(self.allocator.malloc(number, stream=more * 7))
            elif what == "free" and self.live:
                address = self.live.pop(number % len(self.live))
                self.allocator.free(address, in_use_elsewhere=bool(more))
                self.awaiting += [address] if more else []
            elif what == "complete" and self.awaiting:
                self.allocator.complete(self.awaiting.pop(number % len(self.awaiting)))
            elif what == "empty":
                self.allocator.empty_cache()


def recorded(configuration: dict[str, Any], before: list, steps: list) -> tuple[RecordingAllocator, list]:
    program = Program(configuration)
    program.run(before)
    layout = program.allocator.start()
    program.run([*steps, ("malloc", 512, 0)])
    return program.allocator, layout


def peak_of(replayed: Replay) -> int:
    """Allocated at most, summed event by event."""
    changes: Counter[int] = Counter()
    for allocation in replayed.allocations:
        changes[allocation.alloc] += allocation.block
        if allocation.free is not None:
            changes[allocation.free] -= allocation.block
    return max(accumulate(changes[event] for event in sorted(changes)))


@settings(deadline=None, max_examples=150)
@given(CONFIGURATIONS, STEPS, STEPS)
def test_with_the_layout_of_the_start_every_byte_is_known(configuration: dict, before: list, steps: list):
    allocator, layout = recorded(configuration, before, steps)
    snapshot = snapshot_from(allocator.snapshot(segments_before=layout), "s")
    replayed = replay(snapshot)
    assert replayed.exact and replayed.start_known, replayed.faults
    assert peak_of(replayed) == allocator.peak
    assert replayed.reserved[-1][1] == allocator.reserved
    held = segments_after(replayed, snapshot, len(snapshot.events) - 1)
    assert [(s.address, s.end) for s in held] == [(s.address, s.end) for s in snapshot.segments]


@settings(deadline=None, max_examples=150)
@given(CONFIGURATIONS, STEPS, STEPS)
def test_without_it_the_start_is_worked_out(configuration: dict, before: list, steps: list):
    """Short of remainders that nothing shows, which are named and at most 1 MiB each."""
    allocator, _ = recorded(configuration, before, steps)
    replayed = replay(snapshot_from(allocator.snapshot(), "s"))
    assert not replayed.start_known and not replayed.faults
    unsure = sum(allocation.open_ended for allocation in replayed.allocations)
    assert 0 <= allocator.peak - peak_of(replayed) <= unsure * MIB


@settings(deadline=None, max_examples=100)
@given(CONFIGURATIONS, STEPS, st.integers(0, 50))
def test_a_history_that_lost_its_beginning(configuration: dict, steps: list, lost: int):
    """A ring buffer keeps the last events. What is left is a history of its own."""
    allocator, layout = recorded(configuration, [], steps)
    allocator.events = allocator.events[min(lost, len(allocator.events) - 1) :]
    whole = lost == 0
    replayed = replay(snapshot_from(allocator.snapshot(segments_before=layout), "s"))
    live = {a.address: a.block for a in replayed.allocations if a.free is None}
    there = {
        b["address"]: b["size"] for s in allocator.segments() for b in s["blocks"] if b["state"] == "active_allocated"
    }
    assert live == there
    assert not whole or replayed.exact


@pytest.mark.parametrize("setting", ["default", "expandable", "roundup", "max_split"])
@pytest.mark.parametrize("start_known", [True, False])
def test_the_counters_of_a_gpu(setting: str, start_known: bool):
    """Histories of PyTorch 2.11 on an H200 (test_on_gpu.py), each with its max_memory_allocated and _reserved."""
    content: Any = read_plain_pickle(DATA / f"snapshot_{setting}.pickle.gz")
    allocated, reserved = content["counted"]
    if not start_known:
        del content["segments_before"]
    replayed = replay(snapshot_from(content, setting))
    assert replayed.faults == [] and replayed.start_known == start_known
    assert peak_of(replayed) == allocated
    assert max(count for _, count in replayed.reserved) == reserved
    assert replayed.exact or not start_known
