"""The category of each allocation that stepscope's notes name."""

from stepscope.allocations.block_layout import Allocation
from stepscope.allocations.snapshot import Snapshot
from stepscope.core.memory_notes import CATEGORIES, MemoryCategory, MemoryNotes, TensorNote

ROUNDING: MemoryCategory = "rounding"
OF_TENSORS = tuple(category for category in CATEGORIES if category != ROUNDING)
"""The categories that an allocation can have. The rounding of its block is counted separately."""


def notes_by_allocation(
    snapshot: Snapshot, notes: MemoryNotes, allocations: list[Allocation]
) -> tuple[dict[int, TensorNote], int]:
    """The note of each allocation that has one, and the number of notes that match no allocation.

    A note describes the allocation that is live at its address at its time. If an allocation has two notes, the note
    whose category comes first in CATEGORIES counts: a parameter that an operator saves is a parameter.
    """
    wanted = {note.address for note in notes.tensors}
    at_address: dict[int, list[int]] = {address: [] for address in wanted}
    for i, allocation in enumerate(allocations):
        if allocation.address in wanted:
            at_address[allocation.address].append(i)
    found: dict[int, TensorNote] = {}
    lost = 0
    rank = {category: i for i, category in enumerate(CATEGORIES)}
    for note in notes.tensors:
        index = _live_at(snapshot, note, [(i, allocations[i]) for i in at_address[note.address]])
        if index is None:
            lost += 1
        elif index not in found or rank[note.category] < rank[found[index].category]:
            found[index] = note
    return found, lost


def _live_at(snapshot: Snapshot, note: TensorNote, candidates: list[tuple[int, Allocation]]) -> int | None:
    """The allocation that a note describes.

    Several events can share a microsecond. Among allocations that were live in the note's microsecond, it prefers one
    of the note's size, then one still live at the end of that microsecond, then the last.
    """
    first = snapshot.last_event_until(note.at_us - 1)
    last = snapshot.last_event_until(note.at_us)
    fitting = [
        (a.requested == note.bytes, a.free is None or a.free > last, i)
        for i, a in candidates
        if a.alloc <= last and (a.free is None or a.free > first) and a.requested >= note.bytes
    ]
    return max(fitting)[-1] if fitting else None
