"""What recorded steps left behind: the bytes at the end of each, and whose are more after every one of them.

A group of allocations grows where its bytes are more at the end of each recorded step than at the end of the step
before. A cache that fills once, a gradient that the first step makes, a tensor that is replaced: none of these does.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import polars as pl

from stepscope.allocations.block_layout import BEFORE
from stepscope.allocations.explain import Explained
from stepscope.core.evidence import LeftBehind, MemoryGrowth
from stepscope.core.memory_notes import KeptTensor


def growth_of(explained: Explained) -> MemoryGrowth | None:
    """What the recorded steps left behind; None for a history of one step, or of another tool."""
    notes, snapshot = explained.snapshot.notes, explained.snapshot
    if notes is None or len(notes.step_ends_us) < 2:
        return None
    ends = [BEFORE, *(snapshot.last_event_until(end_us) for end_us in notes.step_ends_us)]
    last = len(snapshot.events) - 1
    alive = [explained.alive(event) for event in (*ends, last)]
    if not explained.snapshot.has_segments:
        # On a CPU nobody sees the release of what was there before. It shows when its place is given away, steps later,
        # and would hide as much growth then; so it counts as released in the first step.
        gone = pl.col("alloc_event").is_null() & pl.col("free_event").is_not_null()
        alive[1:] = [rows.filter(~gone) for rows in alive[1:]]
    held = [int(rows["block"].sum()) for rows in alive]
    left = _groups_that_grow(explained, alive, {kept.address: kept for kept in notes.kept})
    return MemoryGrowth(
        ends=tuple(held[:-1]),
        left=tuple(sorted(left, key=lambda group: (-group.bytes_a_step, group.site))),
        collected_bytes=max(0, held[-2] - held[-1]),
    )


def _groups_that_grow(
    explained: Explained, alive: list[pl.DataFrame], kept: dict[int, KeptTensor]
) -> Iterator[LeftBehind]:
    """Lines whose bytes are more at each end; what the collector then freed was nobody's."""
    steps = len(alive) - 2
    sums = [rows.group_by("site").agg(pl.col("block").sum(), count=pl.len()) for rows in alive]
    figures = [{site: (size, count) for site, size, count in rows.iter_rows()} for rows in sums]
    for site in figures[-1]:
        of_ends = [of_end.get(site, (0, 0)) for of_end in figures[1:]]
        *at_ends, after = [size for size, _ in of_ends]
        if not all(earlier < later for earlier, later in pairwise(at_ends)) or after <= at_ends[-2]:
            continue
        new = alive[-1].filter((pl.col("site") == site) & pl.col("alloc_event").is_not_null())
        held = Counter[str]()
        for address, block in new.select("address", "block").iter_rows():
            held[kept[address].kept_by if address in kept else ""] += block
        new = new.sort("block", "alloc_event", descending=True)
        largest = new.row(0, named=True)
        categories = dict.fromkeys(new["category"])
        yield LeftBehind(
            site=site or "(unknown)",
            category=largest["category"],
            # What a step keeps from the step before is once more at the first ends, and grows no further.
            bytes_a_step=min(later - earlier for earlier, later in pairwise([*at_ends[:-1], min(at_ends[-1], after)])),
            tensors_a_step=(of_ends[-1][1] - of_ends[0][1]) / (steps - 1),
            shape=None if largest["shape"] is None else tuple(largest["shape"]),
            **{name: largest[name] for name in ("dtype", "name", "module")},
            other_kinds=new.select("category", "shape", "dtype").n_unique() - 1,
            other_categories=tuple(name for name in categories if name != largest["category"]),
            kept_by=held.most_common(1)[0][0],
        )
