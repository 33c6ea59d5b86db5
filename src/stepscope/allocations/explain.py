"""A snapshot explained: one row for each allocation, and what was alive at any moment, to the byte.

Columns of the table of allocations: `alloc_event`, `free_event`, `completed_event` (index into the history; null if
before it or never), `alloc_us`, `free_us` (relative to the first event), `address`, `requested` and `block` (bytes),
`stream`, `pool` (its place in Replay.by_pool), `phase` and `free_phase` (where it was allocated and freed), `module`,
`part`, `category`, `name`, `shape`, `dtype`, `operator` (as noted; '' if unknown), `stack` (a number for Stacks),
`site`. Without notes also `sure`: by what the category is known, one of evidence.CERTAINTIES.
"""

from dataclasses import dataclass
from functools import cached_property

import polars as pl

from stepscope.allocations.block_layout import BEFORE
from stepscope.allocations.categories import ROUNDING, notes_by_allocation
from stepscope.allocations.evidence import QUANTISED, THERE_BEFORE, by_evidence, stage_of
from stepscope.allocations.moments import Place, events_in_ranges, phases_of, place_of, spans_of_events
from stepscope.allocations.plain_pickle import without_collector
from stepscope.allocations.replay import Replay, replay
from stepscope.allocations.shapes import shapes_by_size
from stepscope.allocations.snapshot import Snapshot
from stepscope.allocations.stacks import AUTOGRAD, NO_STACK, Sign, Stacks
from stepscope.core.evidence import PhaseMemory
from stepscope.core.memory_notes import CATEGORIES, MemoryCategory, PhaseSpan, TensorNote
from stepscope.core.range_names import BACKWARD, FORWARD, OPTIMIZER
from stepscope.core.units import format_count
from stepscope.core.workload import Workload

_ON_THE_WAY = ("signs", "free_signs", "span", "free_span", "stage", "free_stage")
"""Columns that are only there to find categories."""


@dataclass(frozen=True, kw_only=True)
class Explained:
    """A snapshot and everything that follows from it."""

    snapshot: Snapshot
    replay: Replay
    allocations: pl.DataFrame
    stacks: Stacks
    phases: tuple[PhaseSpan, ...]
    """The spans of the phases, with times relative to the first event."""
    notes: tuple[str, ...]
    """Remarks on how the figures were found."""

    @property
    def noted(self) -> bool:
        """Whether the process itself wrote the categories down."""
        return self.snapshot.notes is not None and bool(self.snapshot.notes.tensors)

    @property
    def measured(self) -> PhaseMemory | None:
        """The PhaseMemory from the allocator's own counters, or None if the snapshot has none."""
        return self.snapshot.notes.measured if self.snapshot.notes else None

    @cached_property
    def curve(self) -> pl.DataFrame:
        """Allocated bytes after each event that changes them (`event`, `allocated`). The first row is the start."""
        return allocated_curve(self.allocations)

    @cached_property
    def peak_event(self) -> int:
        """The first event after which the most bytes were allocated; BEFORE if the start had the most."""
        return int(self.curve["event"][self.curve["allocated"].arg_max() or 0])

    @cached_property
    def peak_bytes(self) -> int:
        return self.curve["allocated"].sort()[-1]

    def time_us(self, event: int) -> int:
        """The time of an event, relative to the first event; 0 for the start."""
        return self.snapshot.times[event] - self.snapshot.start_us if event >= 0 else 0

    def alive(self, event: int) -> pl.DataFrame:
        """The allocations that were alive after an event."""
        return self.allocations.filter(
            (pl.col("alloc_event").fill_null(BEFORE) <= event)
            & (pl.col("free_event").is_null() | (pl.col("free_event") > event))
        )

    def unsure_at(self, event: int) -> int:
        """The number of blocks alive after an event that may be up to 1 MiB longer than counted."""
        return sum(
            allocation.open_ended and allocation.alloc <= event and (allocation.free is None or allocation.free > event)
            for allocation in self.replay.allocations
        )

    def exact_at(self, event: int) -> bool:
        """Whether the allocated bytes after an event are known to the byte."""
        return not self.replay.faults and not self.unsure_at(event)

    def self_check(self) -> None:
        """Assert that at the peak the blocks and the categories each sum to the curve's value."""
        alive = self.alive(self.peak_event)
        assert alive["block"].sum() == self.peak_bytes
        assert sum(categories_of(alive).values()) == self.peak_bytes
        assert set(alive["category"].unique()) <= set(CATEGORIES)
        assert (alive["requested"] <= alive["block"]).all()


def categories_of(alive: pl.DataFrame) -> dict[MemoryCategory, int]:
    """Bytes by category, in the order of CATEGORIES, zeros included, but for those that few snapshots have: what was
    there before, and quantised weights. Rounding is what blocks hold beyond requests."""
    sums = dict(alive.group_by("category").agg(pl.col("requested").sum()).iter_rows())
    rounding = int((alive["block"] - alive["requested"]).sum())
    held: dict[MemoryCategory, int] = {c: rounding if c == ROUNDING else int(sums.get(c, 0)) for c in CATEGORIES}
    return {c: count for c, count in held.items() if count or c not in (THERE_BEFORE, QUANTISED)}


def allocated_curve(allocations: pl.DataFrame) -> pl.DataFrame:
    """Allocated bytes after each event that changes them."""
    start = pl.DataFrame({"event": [BEFORE], "change": [0]})
    changes = pl.concat(
        [
            start,
            allocations.select(event=pl.col("alloc_event").fill_null(BEFORE), change=pl.col("block")),
            allocations.filter(pl.col("free_event").is_not_null()).select(
                event=pl.col("free_event"), change=-pl.col("block")
            ),
        ]
    )
    return (
        changes.group_by("event")
        .agg(pl.col("change").sum())
        .sort("event")
        .select("event", allocated=pl.col("change").cum_sum())
    )


def explain(snapshot: Snapshot) -> Explained:
    """Replay a snapshot and name what every allocation was."""
    with without_collector():
        replayed = replay(snapshot)
        stacks = Stacks(snapshot.source)
        phases = phases_of(snapshot)
        table = _table(snapshot, replayed, stacks, phases)
        remarks = list(_remarks(snapshot, replayed, phases))
        if snapshot.notes and snapshot.notes.tensors:
            table, lost = _with_notes(snapshot, table, replayed)
            if lost:
                remarks.append(f"{format_count(lost)} noted tensors lie in no allocation of this history.")
        else:
            table = table.with_columns(
                name=pl.lit(""), shape=pl.lit(None, dtype=pl.List(pl.Int64)), dtype=pl.lit(""), operator=pl.lit("")
            )
            table = _with_free_signs(snapshot, table, replayed, stacks)
            table, said = by_evidence(table)
            remarks += [
                "No notes of stepscope are in this snapshot: categories are by evidence (phases, stacks, lifetimes).",
                *([said] if said else []),
            ]
        table = _with_shapes(snapshot, table.drop(*_ON_THE_WAY, strict=False))
    return Explained(
        snapshot=snapshot, replay=replayed, allocations=table, stacks=stacks, phases=phases, notes=tuple(remarks)
    )


def _table(snapshot: Snapshot, replayed: Replay, stacks: Stacks, phases: tuple[PhaseSpan, ...]) -> pl.DataFrame:
    """The table of allocations, with all columns that need no notes."""
    events, allocations = snapshot.events, replayed.allocations
    of_metadata: dict[str, Place] = {"": Place()}
    ours = snapshot.notes is not None
    numbers: list[int] = []
    places: list[Place] = []
    older = {
        block.address: block.frames for segment in snapshot.segments for block in segment.blocks if block.is_active
    }
    for allocation in allocations:
        if allocation.alloc == BEFORE:
            numbers.append(stacks.number(older.get(allocation.address, ()) if allocation.free is None else ()))
            places.append(of_metadata[""])
            continue
        event = events[allocation.alloc]
        numbers.append(stacks.number(event.frames))
        metadata = event.user_metadata if ours else ""
        place = of_metadata.get(metadata)
        if place is None:
            place = of_metadata[metadata] = place_of(metadata)
        places.append(place)
    start, times = snapshot.start_us, snapshot.times
    pools = {pool: i for i, pool in enumerate(replayed.by_pool)}
    table = pl.DataFrame(
        {
            "alloc_event": [a.alloc if a.alloc != BEFORE else None for a in allocations],
            "free_event": [a.free for a in allocations],
            "completed_event": [a.completed for a in allocations],
            "alloc_us": [times[a.alloc] - start if a.alloc != BEFORE else None for a in allocations],
            "free_us": [times[a.free] - start if a.free is not None and a.free >= 0 else None for a in allocations],
            "address": [a.address for a in allocations],
            "requested": [a.requested for a in allocations],
            "block": [a.block for a in allocations],
            "stream": [a.stream for a in allocations],
            "pool": [pools.get(a.pool, 0) for a in allocations],
            "phase": [place.phase for place in places],
            "module": [place.module for place in places],
            "part": [place.part for place in places],
            "stack": numbers,
            "site": [
                _site(stacks.sites[number], place, allocation.alloc)
                for number, place, allocation in zip(numbers, places, allocations, strict=True)
            ],
            "signs": [stacks.signs[number] for number in numbers],
        },
        schema={
            **dict.fromkeys(("alloc_event", "free_event", "completed_event", "alloc_us", "free_us"), pl.Int64),
            **dict.fromkeys(("address", "requested", "block", "stream"), pl.Int64),
            "pool": pl.Int32,
            **dict.fromkeys(("phase", "module", "part"), pl.String),
            "stack": pl.Int32,
            "site": pl.String,
            "signs": pl.Int32,
        },
    )
    spans = spans_of_events(snapshot, phases)
    names = {-1: "", **{i: span.name for i, span in enumerate(phases)}}
    in_span = [spans[a.alloc] if a.alloc != BEFORE else -1 for a in allocations]
    freed_in_span = [spans[a.free] if a.free is not None and a.free != BEFORE else -1 for a in allocations]
    return table.with_columns(
        phase=pl.Series(
            [place.phase or names[span] for place, span in zip(places, in_span, strict=True)], dtype=pl.String
        ),
        free_phase=pl.Series([names[span] for span in freed_in_span], dtype=pl.String),
        span=pl.Series(in_span, dtype=pl.Int32),
        free_span=pl.Series(freed_in_span, dtype=pl.Int32),
    )


def _site(of_stack: str, place: Place, alloc: int) -> str:
    """The most telling line of code. Where backward has no line, the module whose operator it runs."""
    if alloc == BEFORE:
        return of_stack or "before the history"
    if of_stack.startswith(AUTOGRAD) and place.module:
        return f"{of_stack} in {place.module}"
    if not of_stack and place.phase == BACKWARD:
        return f"{AUTOGRAD}, of {place.module}" if place.module else AUTOGRAD
    return of_stack


def _with_free_signs(snapshot: Snapshot, table: pl.DataFrame, replayed: Replay, stacks: Stacks) -> pl.DataFrame:
    """The table with the signs of each free's stack, and with phases from stacks where no range gives them."""
    events = snapshot.events
    zeroing = events_in_ranges(snapshot, "zero_grad")
    signs: list[int] = []
    for allocation, number in zip(replayed.allocations, table["stack"].to_list(), strict=True):
        if allocation.free is None or allocation.free < 0:
            signs.append(0)
            continue
        freed = stacks.number(events[allocation.free].frames)
        # A history that records only allocations gives a free the stack of its allocation.
        sign = stacks.signs[freed] if freed not in (NO_STACK, number) else 0
        if zeroing[allocation.free]:
            sign |= int(Sign.ZERO_GRAD)
        signs.append(sign)
    unknown = pl.lit("")
    no_python = (pl.col("signs") & int(Sign.PYTHON)) == 0
    recorded = bool((table["stack"] != NO_STACK).any())

    def by_stack(column: str, signs: str, without_python: pl.Expr) -> pl.Expr:
        # PyTorch's range round an optimizer's step also encloses what its closure computes.
        computes = ((pl.col(signs) & int(Sign.BACKWARD | Sign.CALL | Sign.CLOSURE)) != 0) | without_python
        computes &= (pl.col(signs) & int(Sign.OPTIMIZER | Sign.ZERO_GRAD)) == 0
        return (
            pl.when((pl.col(column) != "") & ((pl.col(column) != OPTIMIZER) | ~computes))
            .then(pl.col(column))
            .when((pl.col(signs) & int(Sign.OPTIMIZER | Sign.ZERO_GRAD)) != 0)
            .then(pl.lit(OPTIMIZER))
            .when(((pl.col(signs) & int(Sign.BACKWARD)) != 0) | without_python)
            .then(pl.lit(BACKWARD))
            .when((pl.col(signs) & int(Sign.PYTHON)) != 0)
            .then(pl.lit(FORWARD))
            .otherwise(unknown)
        )

    table = table.with_columns(free_signs=pl.Series(signs, dtype=pl.Int32))
    table = table.with_columns(stage=stage_of(pl.col("phase")), free_stage=stage_of(pl.col("free_phase")))
    if recorded:
        told = pl.col("alloc_event").is_not_null() | (pl.col("stack") != NO_STACK)
        table = table.with_columns(
            stage=by_stack("stage", "signs", no_python & told),
            free_stage=by_stack("free_stage", "free_signs", pl.lit(False)),
        )
        if table["phase"].eq("").all():
            table = table.with_columns(phase="stage", free_phase="free_stage")
    return table


def _with_notes(snapshot: Snapshot, table: pl.DataFrame, replayed: Replay) -> tuple[pl.DataFrame, int]:
    """The table with the process's notes on its tensors, and the number of notes that match no allocation."""
    assert snapshot.notes
    noted, lost = notes_by_allocation(snapshot, snapshot.notes, replayed.allocations)
    nothing = TensorNote(address=0, at_us=0, bytes=0, category="temporaries", name="", shape=(), dtype="")
    notes = [noted.get(i, nothing) for i in range(table.height)]
    there = pl.Series([i in noted for i in range(table.height)], dtype=pl.Boolean)
    crosses = (pl.col("phase") == FORWARD) & (pl.col("free_phase") == BACKWARD)
    unfinished = any(event.action == "oom" for event in snapshot.events)
    modules = pl.Series([note.module for note in notes], dtype=pl.String)
    table = table.with_columns(
        category=pl.when(there)
        .then(pl.Series([note.category for note in notes], dtype=pl.String))
        .when(crosses)
        .then(pl.lit("saved for backward"))
        .when(pl.col("free_event").is_not_null())
        .then(pl.lit("temporaries"))
        .when(pl.col("phase") == OPTIMIZER)
        .then(pl.lit("temporaries" if unfinished else "optimizer state"))
        # A step that ran out of memory never ended, so it kept what its forward made.
        .when(pl.lit(unfinished) & (pl.col("phase") == FORWARD))
        .then(pl.lit("saved for backward"))
        .when(pl.lit(unfinished) & (pl.col("phase") != ""))
        .then(pl.lit("temporaries"))
        .otherwise(pl.lit("workspaces")),
        name=pl.Series([note.name for note in notes], dtype=pl.String),
        shape=pl.Series(
            [list(note.shape) if i in noted else None for i, note in enumerate(notes)], dtype=pl.List(pl.Int64)
        ),
        dtype=pl.Series([note.dtype for note in notes], dtype=pl.String),
        operator=pl.Series([note.operator for note in notes], dtype=pl.String),
        module=pl.when(modules != "").then(modules).otherwise(pl.col("module")),
    )
    return table, lost


def _with_shapes(snapshot: Snapshot, table: pl.DataFrame) -> pl.DataFrame:
    """The table with shapes inferred from sizes, for allocations without a note."""
    workload = snapshot.notes.workload if snapshot.notes else None
    if not isinstance(workload, Workload):
        return table
    shapes = shapes_by_size(workload)
    known = pl.DataFrame(
        {"requested": list(shapes), "by_size": [list(shape) for shape in shapes.values()]},
        schema={"requested": pl.Int64, "by_size": pl.List(pl.Int64)},
    )
    return (
        table.join(known, on="requested", how="left", maintain_order="left")
        .with_columns(shape=pl.coalesce("shape", "by_size"))
        .drop("by_size")
    )


def _remarks(snapshot: Snapshot, replayed: Replay, phases: tuple[PhaseSpan, ...]) -> list[str]:
    """Sentences on how far the figures can be trusted."""
    said: list[str] = []
    if not snapshot.has_times:
        said.append("This history has no times: microseconds are places in it.")
    if not replayed.start_known:
        said.append(
            "The snapshot does not say what the allocator held when the history began; it was worked out from the "
            "events and from the segments at the end."
        )
    said += [
        f"The replay of the allocator failed: {fault}. Blocks may be larger than counted." for fault in replayed.faults
    ]
    if not phases:
        said.append("Nothing in this snapshot tells the phases of the step.")
    said += _other_devices(snapshot)
    for event in snapshot.events:
        if event.action == "oom":
            said.append(
                f"Out of memory: {format_count(event.size)} bytes were asked for when the driver had "
                f"{format_count(event.device_free)} left; a limit set for the process is not in the snapshot."
            )
    return said


def _other_devices(snapshot: Snapshot) -> list[str]:
    """Sentences on the other devices of a snapshot: those that can be opened, and those without a history."""
    said: list[str] = []
    for told in (True, False):
        found = [str(other.device) for other in snapshot.others if bool(other.events) == told]
        named = f"device{'s' if len(found) > 1 else ''} {', '.join(found)}"
        if found and told:
            said.append(f"This is device {snapshot.device}; the snapshot also holds {named} (--device opens it).")
        elif found:
            said.append(f"Of {named} the snapshot holds no history, only what was there at its end.")
    return said
