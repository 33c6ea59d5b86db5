"""What each allocation was there for: as stepscope noted it, or by the evidence that any snapshot carries."""

from typing import get_args

import polars as pl

from stepscope.core.memory_notes import MemoryCategory, MemoryNotes, TensorNote
from stepscope.memory.allocator import BEFORE, Allocation
from stepscope.memory.snapshot import Snapshot
from stepscope.memory.stacks import Sign

CATEGORIES: tuple[MemoryCategory, ...] = get_args(MemoryCategory)
ROUNDING: MemoryCategory = "rounding"
OF_TENSORS = tuple(category for category in CATEGORIES if category != ROUNDING)
"""What an allocation can be; its block's rounding is counted beside it."""

_STATES_PER_PARAMETER = 2
"""Adam and AdamW keep two tensors of the parameter's size."""


def notes_by_allocation(
    snapshot: Snapshot, notes: MemoryNotes, allocations: list[Allocation]
) -> tuple[dict[int, TensorNote], int]:
    """The note of each allocation that has one, and how many notes found no allocation.

    A note is of what is live at its address at its moment. Of two notes of one allocation the one first in the order
    of the categories counts: a parameter that an operator saves is a parameter.
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
    """The allocation that a note is of. Several events share a microsecond: any of its moments will do."""
    first = snapshot.last_event_until(note.at_us - 1)
    last = snapshot.last_event_until(note.at_us)
    fitting = [
        i for i, a in candidates if a.alloc <= last and (a.free is None or a.free > first) and a.requested >= note.bytes
    ]
    return fitting[-1] if fitting else None


def by_evidence(table: pl.DataFrame) -> pl.DataFrame:
    """`category` for each allocation of a snapshot without notes. Rules in order; the first that fits decides.

    Reads alloc_event, free_event (null: before the history, never), phase, free_phase, signs, free_signs.
    """
    before, never = pl.col("alloc_event").is_null(), pl.col("free_event").is_null()
    phase, freed_in = pl.col("phase"), pl.col("free_phase")
    zeroed = _has("free_signs", Sign.ZERO_GRAD)
    in_optimizer = phase == "optimizer"
    return table.with_columns(
        category=pl.when(_has("signs", Sign.WORKSPACE))
        .then(pl.lit("workspaces"))
        .when(before & never)
        .then(pl.lit("parameters"))
        .when(before & (freed_in == "backward"))
        .then(pl.lit("saved for backward"))
        .when(before & zeroed)
        .then(pl.lit("gradients"))
        .when(before & (freed_in == "optimizer"))
        .then(pl.lit("optimizer state"))
        .when(in_optimizer & never)
        .then(pl.lit("optimizer state"))
        .when((phase == "backward") & (zeroed | never | (freed_in == "optimizer")))
        .then(pl.lit("gradients"))
        .when(_has("free_signs", Sign.AUTOCAST_EXIT))
        .then(pl.lit("cast copies"))
        .when((phase == "forward") & (freed_in == "backward"))
        .then(pl.lit("saved for backward"))
        .otherwise(pl.lit("temporaries"))
    )


def _has(column: str, sign: Sign) -> pl.Expr:
    return (pl.col(column) & int(sign)) != 0


def split_states(table: pl.DataFrame) -> tuple[pl.DataFrame, str]:
    """Tell optimizer state from parameters where sizes do: Adam keeps two tensors of each parameter's size.

    Only where nothing else was found to be optimizer state, and every size of tensors above 1 KiB comes in threes;
    which of three equal tensors is the parameter makes no difference to the sums. The note says what was done.
    """
    kept = table.filter(pl.col("category") == "parameters")
    if not kept.height:
        return table, ""
    if (table["category"] == "optimizer state").any():
        return table, "Parameters are what was there before the history and after it; nothing tells buffers from them."
    counts = kept.filter(pl.col("requested") > 1024).group_by("requested").len()
    each = _STATES_PER_PARAMETER + 1
    if not counts.height or (counts["len"] % each != 0).any():
        return table, (
            "Parameters are what was there before the history and after it: optimizer state cannot be told from them."
        )
    place = pl.int_range(pl.len()).over("category", "requested", order_by="address")
    state = (
        (pl.col("category") == "parameters")
        & (pl.col("requested") > 1024)
        & (place >= pl.len().over("category", "requested") // each)
    )
    table = table.with_columns(category=pl.when(state).then(pl.lit("optimizer state")).otherwise(pl.col("category")))
    return table, (
        "Every size that was there throughout comes in threes, as parameters do with the two tensors that Adam keeps: "
        "two thirds count as optimizer state."
    )


def before_history(allocation: Allocation) -> bool:
    """Whether it was there when the history began."""
    return allocation.alloc == BEFORE
