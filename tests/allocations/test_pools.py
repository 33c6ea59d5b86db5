"""What the allocator holds, by pool and by device: cases worked out by hand, and invariants of every history."""

from pathlib import Path
from typing import Any

import pytest
from benchmarks.recording_allocator import MIB, RecordingAllocator
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.allocations.answer import answer_memory, memory_document, memory_findings
from stepscope.allocations.at_moment import Moment, devices_of, moment_at
from stepscope.allocations.explain import Explained, explain
from stepscope.allocations.plain_pickle import read_plain_pickle
from stepscope.allocations.snapshot import ORDINARY, read_snapshot, snapshot_from
from stepscope.core.errors import InputError
from tests.public import public_capture

DATA = Path(__file__).parents[1] / "data"
GRAPH = (0, 1)
A, B, C = 0x7F00_0000_0000, 0x7F10_0000_0000, 0x7F20_0000_0000


def event(action: str, address: int, mib: int, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": mib * MIB, "stream": 0, "time_us": 1, "frames": [], **more}


def freed(address: int, mib: int) -> list[dict[str, Any]]:
    return [event(action, address, mib) for action in ("free_requested", "free_completed")]


def segment(address: int, *blocks: int, **more: Any) -> dict[str, Any]:
    """A segment of blocks of so many MiB; a negative one is free."""
    at, told = address, []
    for mib in blocks:
        state = "active_allocated" if mib > 0 else "inactive"
        told.append({"address": at, "size": abs(mib) * MIB, "state": state, "frames": []})
        at += abs(mib) * MIB
    return {"address": address, "total_size": at - address, "segment_type": "large", "blocks": told, **more}


def explained(segments: list[dict[str, Any]], *traces: list[dict[str, Any]], device: int | None = None) -> Explained:
    content = {"segments": segments, "device_traces": list(traces)}
    found = explain(snapshot_from(content, "s", device=device))
    found.self_check()
    return found


def reserved(moment: Moment) -> tuple[int, ...]:
    """MiB: reserved, allocated, cached, fragmented, free in private pools."""
    held = moment.reserved
    assert held is not None
    parts = (held.reserved_bytes, held.allocated_bytes, held.cached_bytes, held.fragmented_bytes)
    return tuple(count // MIB for count in (*parts, held.private_free_bytes))


def test_a_history_that_began_on_an_empty_device():
    found = explained([segment(A, 40, -24)], [event("segment_alloc", A, 64), event("alloc", A, 40)])
    assert reserved(moment_at(found)) == reserved(moment_at(found, "end")) == (64, 40, 0, 24, 0)
    assert reserved(moment_at(found, "start")) == (0, 0, 0, 0, 0)
    assert memory_document(found, moment_at(found))["free_pieces"] == {"count": 1, "longest_bytes": 24 * MIB}


def test_a_history_that_began_and_ended_empty_is_no_history_of_a_cpu():
    found = explained(
        [], [event("segment_alloc", A, 20), event("alloc", A, 3), *freed(A, 3), event("segment_free", A, 20)]
    )
    assert reserved(moment_at(found)) == (20, 3, 0, 17, 0) and reserved(moment_at(found, "end")) == (0, 0, 0, 0, 0)
    assert found.snapshot.has_segments and not explained([], [event("alloc", A, 3)]).snapshot.has_segments


def test_pages_of_an_expandable_segment_come_and_go():
    """Five times 20 MiB for blocks of 18 MiB; three blocks are freed and 60 MiB go back."""
    events = []
    for n in range(5):
        events += [event("segment_map", A + 20 * n * MIB, 20), event("alloc", A + 18 * n * MIB, 18)]
    events += [entry for n in (4, 3, 2) for entry in freed(A + 18 * n * MIB, 18)]
    events.append(event("segment_unmap", A + 40 * MIB, 60))
    found = explained([segment(A, 18, 18, -4, is_expandable=True)], events)
    assert reserved(moment_at(found)) == (100, 90, 0, 10, 0) and reserved(moment_at(found, "end")) == (40, 36, 0, 4, 0)
    assert memory_document(found, moment_at(found))["reserved_peak_bytes"] == 100 * MIB


def test_a_ring_that_lost_its_first_events():
    """What is freed without having been allocated was there, and so was what lies there in the end without an event."""
    events = [*freed(A, 64), event("alloc", A, 32), *freed(B, 100), event("alloc", B, 80)]
    found = explained([segment(A, 32, -32), segment(B, 80, -20), segment(C, 50)], events)
    assert found.peak_bytes == 214 * MIB and moment_at(found).name == "the peak"
    assert reserved(moment_at(found, "start")) == (214, 214, 0, 0, 0)
    assert reserved(moment_at(found, "end")) == (214, 162, 0, 52, 0)


def private_pool(late: bool, **pools: Any) -> Explained:
    """180 of 200 MiB were allocated in the pool of a graph, and freed. late: the pool was there before the history."""
    segments = [segment(A, 40, -24), segment(B, -200, segment_pool_id=GRAPH)]
    given = [] if late else [event("segment_alloc", A, 64), event("segment_alloc", B, 200, **pools)]
    return explained(segments, [*given, event("alloc", A, 40), event("alloc", B, 180, **pools), *freed(B, 180)])


@pytest.mark.parametrize("late", [True, False])
def test_what_a_private_pool_holds_serves_nobody_else(late: bool):
    found = private_pool(late)
    end = moment_at(found, "end")
    assert reserved(moment_at(found)) == (264, 220, 0, 24, 20) and reserved(end) == (264, 40, 0, 24, 200)
    ordinary, graph = end.pools
    assert (ordinary.pool, ordinary.peak_allocated_bytes, ordinary.peak_reserved_bytes) == ((0, 0), 40 * MIB, 64 * MIB)
    assert (graph.pool, graph.peak_allocated_bytes, graph.peak_reserved_bytes) == (GRAPH, 180 * MIB, 200 * MIB)
    assert graph.private and not ordinary.private and graph.cached_bytes == 200 * MIB
    (finding,) = answer_memory(found, end).findings
    assert finding.kind == "private-pool" and finding.severity == "note"
    assert finding.sentence.startswith("At the end, private pool (0, 1)")
    assert "200.00 MiB of the 264.00 MiB" in finding.sentence
    assert "200.00 MiB, which replays of its graphs may use, serve nobody else." in finding.sentence
    told = memory_document(found, end)
    assert [pool["pool"] for pool in told["pools"]] == [(0, 0), GRAPH]
    assert told["free_pieces"] == {"count": 1, "longest_bytes": 24 * MIB}
    assert [finding["kind"] for finding in told["findings"]] == ["private-pool"]


@pytest.mark.parametrize(("pool", "frames", "said"), [
    (GRAPH, [], "(of CUDA graphs or of a torch.cuda.MemPool)"),
    ((3, 0), [], "(of a CUDA graph)"),
    (GRAPH, [{"name": "run", "filename": "/x/torch/_inductor/cudagraph_trees.py", "line": 1}],
     "(of torch.compile's CUDA graphs)"),
])  # fmt: skip
def test_whose_a_pool_is(pool: tuple[int, int], frames: list[dict[str, Any]], said: str):
    events = [event("segment_alloc", B, 20), event("alloc", B, 11, frames=frames), *freed(B, 11)]
    found = explained([segment(B, -20, segment_pool_id=pool)], events)
    (finding,) = answer_memory(found, moment_at(found)).findings
    assert said in finding.sentence


def test_the_pool_of_a_segment_that_the_driver_has_back():
    """Only its event still says whose it was."""
    events = [event("segment_alloc", B, 20), event("alloc", B, 11), *freed(B, 11), event("segment_free", B, 20)]
    (of_old,) = moment_at(explained([segment(A, 1)], events)).pools
    assert (of_old.pool, of_old.peak_reserved_bytes) == (ORDINARY, 21 * MIB)
    told = [entry | {"pool_id": GRAPH} for entry in events]
    ordinary, graph = moment_at(explained([segment(A, 1)], told)).pools
    assert (ordinary.peak_reserved_bytes, graph.peak_reserved_bytes) == (MIB, 20 * MIB)


def test_the_finding_on_several_pools_names_the_one_with_most_free():
    """A pool that holds most of the bytes may use them all."""
    pools = ((A, (2, 0), (300, -10)), (B, (0, 3), (5, -20)), (C, (0, 0), (40,)))
    segments = [segment(address, *blocks, segment_pool_id=pool) for address, pool, blocks in pools]
    found = explained(segments, [*freed(C, 40), event("alloc", C, 40)])
    (finding,) = memory_findings(found, None)
    assert finding.sentence == (
        "At the end, 2 private pools hold 335.00 MiB of the 375.00 MiB that are reserved: 305.00 MiB of it are "
        "allocated, and 30.00 MiB, which replays of its graphs may use, serve nobody else. Pool (0, 3) (of CUDA graphs "
        "or of a torch.cuda.MemPool) has 20.00 MiB of that."
    )


def test_the_free_memory_of_a_private_pool_does_not_make_a_new_segment_needless():
    events = [event("segment_alloc", A, 20), event("alloc", A, 12)]
    shared = [segment(A, 12, -8), segment(B, 1, -12, 1)]
    private = [shared[0], shared[1] | {"segment_pool_id": GRAPH}]
    assert len(memory_document(explained(shared, events), moment_at(explained(shared, events)))["new_segments"]) == 1
    assert memory_document(explained(private, events), moment_at(explained(private, events)))["new_segments"] == []


def two_devices(device: int | None = None) -> Explained:
    busy = [entry for _ in range(50) for entry in (event("alloc", A, 2), *freed(A, 2))]
    large = [event("segment_alloc", B, 512), event("alloc", B, 500)]
    return explained([segment(A, -20), segment(B, 500, -12, device=1), segment(C, 3, device=2)], busy, large,
                     device=device)  # fmt: skip


def test_the_device_with_most_bytes_opens_and_all_are_listed():
    found = two_devices()
    assert (found.snapshot.device, found.peak_bytes) == (1, 500 * MIB)
    other = two_devices(0)
    assert (other.snapshot.device, other.peak_bytes) == (0, 2 * MIB)
    assert devices_of(found) == devices_of(other)
    assert [(use.device, use.peak_bytes, use.reserved_peak_bytes, use.reserved_bytes) for use in devices_of(found)] == [
        (0, 2 * MIB, 20 * MIB, 20 * MIB), (1, 500 * MIB, 512 * MIB, 512 * MIB), (2, None, None, 3 * MIB),
    ]  # fmt: skip
    told = memory_document(found, moment_at(found))
    assert told["device"] == 1 and [use["device"] for use in told["devices"]] == [0, 1, 2]
    assert "This is device 1; the snapshot also holds device 0 (--device opens it)." in found.notes
    assert "Of device 2 the snapshot holds no history, only what was there at its end." in found.notes
    with pytest.raises(InputError, match="nothing of device 7 is in this snapshot: those with a history are 0, 1"):
        two_devices(7)
    with pytest.raises(InputError, match=r"no history of device 2 \(there is one of 0, 1\)"):
        two_devices(2)


def holds(found: Explained, events: list[int]) -> None:
    """What is reserved is at least what is allocated, the pools make up the whole, and the end is that of the file."""
    last = len(found.snapshot.events) - 1
    for at in {*events, -1, found.peak_event, last}:
        held = found.replay.by_pool
        whole = [count for event, count in found.replay.reserved if event <= at][-1]
        parts = [[count for event, count in history if event <= at][-1] for history in held.values()]
        assert sum(parts) == whole >= found.alive(at)["block"].sum() and min(parts) >= 0
        name = "start" if at == -1 else "end" if at == last else None
        if name is not None:
            moment = moment_at(found, name)
            assert sum(use.reserved_bytes for use in moment.pools) == whole
            assert [use.reserved_bytes for use in moment.pools] == parts
            assert all(use.peak_reserved_bytes >= use.peak_allocated_bytes for use in moment.pools)
    ends = dict.fromkeys(found.replay.by_pool, 0)
    for one in found.snapshot.segments:
        ends[one.segment_pool_id or ORDINARY] += one.total_size
    assert {pool: history[-1][1] for pool, history in found.replay.by_pool.items()} == ends


@settings(deadline=None, max_examples=100)
@given(
    st.booleans(), st.booleans(), st.integers(0, 30),
    st.lists(st.tuples(st.sampled_from(["malloc", "malloc", "free", "empty"]), st.integers(1, 25 * MIB),
                       st.sampled_from([ORDINARY, GRAPH, (2, 0)])), min_size=5, max_size=60),
)  # fmt: skip
def test_invariants_of_pools(expandable: bool, tells_pools: bool, begun: int, steps: list):
    allocator = RecordingAllocator(expandable=expandable, tells_pools=tells_pools, recording=False)
    live: list[int] = []
    for i, (what, number, pool) in enumerate(steps):
        if i == min(begun, len(steps) - 1):
            allocator.start()
        if what == "malloc" or i == len(steps) - 1:
            live.append(allocator.malloc(number, pool=pool))
        elif what == "free" and live:
            allocator.free(live.pop(number % len(live)))
        elif what == "empty":
            allocator.empty_cache(done=pool)
    found = explain(snapshot_from(allocator.snapshot(), "s"))
    assert not found.replay.faults
    holds(found, list(range(len(found.snapshot.events))))


@pytest.mark.parametrize("file", sorted(path.name for path in DATA.glob("snapshot_*.pickle.gz")))
def test_invariants_of_recorded_snapshots(file: str):
    for known in (True, False):
        content: Any = read_plain_pickle(DATA / file)
        if not known:
            content.pop("segments_before", None)
        found = explain(snapshot_from(content, file))
        holds(found, list(range(0, len(found.snapshot.events), 97)))


def test_invariants_of_a_published_snapshot():
    found = explain(read_snapshot(public_capture("cs336_memory_ctx128_training.pickle.gz")))
    holds(found, list(range(0, len(found.snapshot.events), 1009)))
