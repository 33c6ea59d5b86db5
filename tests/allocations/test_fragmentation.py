"""Free memory in pieces, by an allocator whose every block is known, and segments that it had to ask for beside."""

from benchmarks.recording_allocator import MIB, RecordingAllocator

from stepscope.allocations.answer import answer_memory, memory_document
from stepscope.allocations.at_moment import free_pieces, moment_at, new_segments
from stepscope.allocations.explain import Explained, explain
from stepscope.allocations.snapshot import snapshot_from
from stepscope.core.answer import name_of


def explained(allocator: RecordingAllocator) -> Explained:
    found = explain(snapshot_from(allocator.snapshot(), "s"))
    found.self_check()
    return found


def filled(count: int, *, expandable: bool = False) -> tuple[RecordingAllocator, list[int]]:
    """An allocator with so many blocks of 5 MiB, whose history begins then."""
    allocator = RecordingAllocator(recording=False, expandable=expandable)
    blocks = [allocator.malloc(5 * MIB) for _ in range(count)]
    allocator.start()
    return allocator, blocks


def checkered(kept: int) -> Explained:
    """Eight blocks of 5 MiB in two segments of 20 MiB; every second one, or all but the first so many, are freed."""
    allocator, blocks = filled(8)
    for i, block in enumerate(blocks):
        if i % 2 if kept == 0 else i >= kept:
            allocator.free(block)
    allocator.malloc(11 * MIB)
    return explained(allocator)


def test_a_segment_for_what_is_free_in_pieces():
    found = checkered(0)
    (new,) = new_segments(found)
    assert (new.requested_bytes, new.segment_bytes) == (11 * MIB, 12 * MIB)
    assert (new.largest_free_bytes, new.free_bytes) == (5 * MIB, 20 * MIB)
    pieces = free_pieces(found, len(found.snapshot.events) - 1)
    assert sorted(piece.bytes for piece in pieces) == [5 * MIB] * 4 and not any(piece.whole for piece in pieces)
    answer = answer_memory(found, moment_at(found, "end"))
    (table,) = [table for table in answer.tables if name_of(table).startswith("fragmentation")]
    assert table.rows[0][1:5] == (11 * MIB, 12 * MIB, 5 * MIB, 20 * MIB)
    said = [note.text for table in answer.tables for note in table.notes]
    assert "What is free between live blocks lies in 4 pieces, the longest of 5.00 MiB." in said
    assert memory_document(found, moment_at(found, "end"))["free_pieces"] == {"count": 4, "longest_bytes": 5 * MIB}


def test_none_where_the_free_memory_is_in_one_piece():
    """The second segment holds nothing: its 20 MiB serve the request."""
    found = checkered(4)
    assert new_segments(found) == []
    assert sorted((p.bytes, p.whole) for p in free_pieces(found, len(found.snapshot.events) - 1)) == [(9 * MIB, False)]


def test_small_requests_have_segments_of_their_own():
    """Free pieces of the large pool do not serve a small request, so its segment is no price of theirs."""
    allocator, blocks = filled(4)
    allocator.free(blocks[1])
    allocator.malloc(1000)
    assert new_segments(explained(allocator)) == []


def test_expandable_segments_need_no_new_ones():
    allocator, blocks = filled(8, expandable=True)
    for block in blocks[::2]:
        allocator.free(block)
    allocator.malloc(11 * MIB)
    assert new_segments(explained(allocator)) == []
