"""The category of each allocation: from stepscope's notes, or from evidence that any snapshot carries."""

import polars as pl

from stepscope.core.memory_notes import CATEGORIES, MemoryCategory, MemoryNotes, TensorNote
from stepscope.core.range_names import BACKWARD, FORWARD, OPTIMIZER
from stepscope.memory.block_layout import Allocation
from stepscope.memory.snapshot import Snapshot
from stepscope.memory.stacks import Sign

ROUNDING: MemoryCategory = "rounding"
OF_TENSORS = tuple(category for category in CATEGORIES if category != ROUNDING)
"""The categories that an allocation can have. The rounding of its block is counted separately."""

_STATES_PER_PARAMETER = 2
"""How many tensors of a parameter's size Adam and AdamW keep for each parameter."""


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


def by_evidence(table: pl.DataFrame) -> pl.DataFrame:
    """The table of a snapshot without notes, with the column `category`. The first rule that fits decides.

    Reads alloc_event (null: before the history), free_event (null: never), phase, free_phase, span, free_span (the
    index of the phase, since several phases may have one name), signs, free_signs.
    """
    before, never = pl.col("alloc_event").is_null(), pl.col("free_event").is_null()
    phase, freed_in = pl.col("phase"), pl.col("free_phase")
    zeroed = _has("free_signs", Sign.ZERO_GRAD)
    in_optimizer, freed_in_optimizer = _of_optimizer(phase), _of_optimizer(freed_in)
    return table.with_columns(
        category=pl.when(_has("signs", Sign.WORKSPACE))
        .then(pl.lit("workspaces"))
        .when(before & never)
        .then(pl.lit("parameters"))
        .when(before & (freed_in == BACKWARD))
        .then(pl.lit("saved for backward"))
        .when(before & zeroed)
        .then(pl.lit("gradients"))
        .when(before & freed_in_optimizer)
        .then(pl.lit("optimizer state"))
        .when(in_optimizer & (never | (pl.col("span") != pl.col("free_span"))))
        .then(pl.lit("optimizer state"))
        .when((phase == BACKWARD) & (zeroed | never | freed_in_optimizer))
        .then(pl.lit("gradients"))
        .when(_has("free_signs", Sign.AUTOCAST_EXIT))
        .then(pl.lit("cast copies"))
        .when((phase == FORWARD) & (freed_in == BACKWARD))
        .then(pl.lit("saved for backward"))
        .otherwise(pl.lit("temporaries"))
    )


def _of_optimizer(phase: pl.Expr) -> pl.Expr:
    """Whether a phase is the optimizer's, by stepscope's name or by the range that PyTorch puts round each step."""
    return (phase == OPTIMIZER) | phase.str.starts_with("Optimizer.step#")


def _has(column: str, sign: Sign) -> pl.Expr:
    return (pl.col(column) & int(sign)) != 0


def settle_residents(table: pl.DataFrame) -> tuple[pl.DataFrame, str]:
    """The table with categories by size for residents, and a remark on them.

    A resident is alive from before the history to its end. Where the history has gradients, as many residents of each
    size are parameters. The history may show no optimizer state, since it is updated in place. If there are then three
    residents for each gradient, two of the three are optimizer state: Adam keeps two tensors of each parameter's size.
    Among equal tensors, the choice makes no difference to the sums. The rest belong to libraries, or are inputs.
    Without gradients all residents are called parameters.
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
