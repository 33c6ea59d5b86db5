"""Finds the category of each allocation: as stepscope noted it, or by the evidence that any snapshot carries."""

import polars as pl

from stepscope.core.memory_notes import CATEGORIES, MemoryCategory, MemoryNotes, TensorNote
from stepscope.memory.block_layout import Allocation
from stepscope.memory.snapshot import Snapshot
from stepscope.memory.stacks import Sign

ROUNDING: MemoryCategory = "rounding"
OF_TENSORS = tuple(category for category in CATEGORIES if category != ROUNDING)
"""The categories that an allocation can have; its block's rounding is counted beside it."""

_STATES_PER_PARAMETER = 2
"""Tensors of the parameter's size that Adam and AdamW keep for it."""


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
    """The allocation that a note is of. Several events share a microsecond: of those that were live in the note's, the
    one of the same size, still live at its end, and last."""
    first = snapshot.last_event_until(note.at_us - 1)
    last = snapshot.last_event_until(note.at_us)
    fitting = [
        (a.requested == note.bytes, a.free is None or a.free > last, i)
        for i, a in candidates
        if a.alloc <= last and (a.free is None or a.free > first) and a.requested >= note.bytes
    ]
    return max(fitting)[-1] if fitting else None


def by_evidence(table: pl.DataFrame) -> pl.DataFrame:
    """`category` for each allocation of a snapshot without notes. Rules in order; the first that fits decides.

    Reads alloc_event, free_event (null: before the history, never), phase, free_phase, span, free_span (which of the
    phases, where several have a name), signs, free_signs.
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
        .when(in_optimizer & (never | (pl.col("span") != pl.col("free_span"))))
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


def settle_residents(table: pl.DataFrame) -> tuple[pl.DataFrame, str]:
    """The table with categories, by sizes, for what was there from before the history to its end; and a remark on them.

    Where the history has gradients, as many residents of each size are parameters. Where it shows no optimizer state
    (it is updated in place), and there are three residents for each gradient, two of three are that: Adam keeps two
    tensors of each parameter's size. Which of equal tensors is which makes no difference to the sums. The rest are
    the libraries', or inputs. Without gradients all are called parameters.
    """
    resident = pl.col("alloc_event").is_null() & pl.col("free_event").is_null() & (pl.col("category") == "parameters")
    if not table.select(resident.any()).item():
        return table, ""
    sizes = table.filter(pl.col("category") == "gradients").group_by("requested").agg(gradients=pl.len())
    if not sizes.height:
        return table, "What was there throughout counts as parameters: nothing in this history tells it apart."
    place = pl.int_range(pl.len()).over("requested", "category", order_by="address")
    table = table.join(sizes, on="requested", how="left", maintain_order="left").with_columns(place=place)
    counted = table.filter(resident & pl.col("gradients").is_not_null())
    per_gradient = counted.height / sizes["gradients"].sum()
    has_state = (table["category"] == "optimizer state").any()
    states = _STATES_PER_PARAMETER if not has_state and per_gradient >= _STATES_PER_PARAMETER + 1 else 0
    known = pl.col("gradients").fill_null(0)
    table = table.with_columns(
        category=pl.when(resident & (pl.col("place") >= known * (1 + states)))
        .then(pl.lit("workspaces"))
        .when(resident & (pl.col("place") >= known))
        .then(pl.lit("optimizer state"))
        .otherwise(pl.col("category"))
    ).drop("place", "gradients")
    said = "Of what was there throughout, as much is called parameters as there are gradients of the same sizes"
    said += ", twice as much optimizer state (Adam's)" if states else ""
    return table, f"{said}; the rest (buffers and batches among it) is called workspaces."
