"""A snapshot explained: one row for each allocation, and what was alive at any moment, to the byte.

Columns of the table of allocations: `alloc_event`, `free_event`, `completed_event` (index into the history; null if
before it or never), `alloc_us`, `free_us` (relative to the first event), `address`, `requested` and `block` (bytes),
`stream`, `pool` (its place in Replay.by_pool), `phase` and `free_phase` (where it was allocated and freed), `module`,
`part`, `category`, `name`, `shape`, `dtype`, `operator` (as noted; '' if unknown), `stack` (a number for Stacks),
`site`. Without notes also `sure`: by what the category is known, one of evidence.CERTAINTIES.
"""

import math
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Literal, cast, get_args

import msgspec
import polars as pl

from stepscope.allocations.replay import BEFORE, NEVER, Allocations, Replay, replay
from stepscope.allocations.snapshot import AUTOGRAD, NO_STACK, ORDINARY, Annotation, Sign, Snapshot, Stacks
from stepscope.core.environment import without_collector
from stepscope.core.evidence import CATEGORIES, MemoryCategory, MemoryNotes, PhaseMemory, PhaseSpan, TensorNote
from stepscope.core.precisions import PRECISIONS
from stepscope.core.range_names import ATTENTION_PARTS, BACKWARD, FORWARD, OPTIMIZER, PHASES, RECOMPUTATION
from stepscope.core.units import format_count
from stepscope.core.workloads import TextbookWorkload, by_sizes

# Finds the phases of a history, and by the open ranges the module and part of each event.


_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")
_STEP = re.compile(r"ProfilerStep|step\b", re.IGNORECASE)


@dataclass(frozen=True)
class Place:
    """Where in the step an event happened, by the ranges that were open."""

    phase: str = ""
    module: str = ""
    part: str = ""


def place_of(metadata: str) -> Place:
    """Read the ranges that stepscope left in an event, outermost first: `forward|blocks.3.attention|softmax`."""
    phase = module = part = ""
    for name in metadata.split("|"):
        if name in PHASES or (name == RECOMPUTATION and not phase):
            phase = name
        elif name in ATTENTION_PARTS:
            part = name
        elif name != RECOMPUTATION and _MODULE.fullmatch(name) and not _STEP.match(name):
            module, part = name, ""
    return Place(phase, module, part)


def phases_of(snapshot: Snapshot) -> tuple[PhaseSpan, ...]:
    """The phases of the step, relative to the first event: as stepscope noted them; else the outermost ranges of the
    profiler, those of whole steps left out; else what the open ranges of the events span."""
    spans = list(snapshot.notes.phases) if snapshot.notes else []
    if not spans:
        ranges = [span for span in _pairs(snapshot) if not _STEP.match(span.name)]
        spans = [span for span in ranges if span.name in PHASES]
        for span in () if spans else sorted(ranges, key=lambda span: (span.start_us, -span.end_us)):
            if not spans or span.start_us >= spans[-1].end_us:
                spans.append(span)
    if not spans:
        history = snapshot.events
        phase_of = [place_of(text).phase if text else "" for text in history.range_texts]
        for ranges, time_us in zip(history.ranges if any(phase_of) else (), snapshot.times, strict=False):
            phase = phase_of[ranges]
            if phase and spans and spans[-1].name == phase:
                spans[-1] = msgspec.structs.replace(spans[-1], end_us=time_us)
            elif phase:
                spans.append(PhaseSpan(name=phase, start_us=time_us, end_us=time_us))
    start = snapshot.start_us
    spans = [
        msgspec.structs.replace(span, start_us=span.start_us - start, end_us=span.end_us - start) for span in spans
    ]
    return tuple(sorted(spans, key=lambda span: (span.start_us, span.end_us)))


def _pairs(snapshot: Snapshot) -> list[PhaseSpan]:
    """Ranges from their two ends; one that never ended, ends with the history."""
    spans: list[PhaseSpan] = []
    opened: list[Annotation] = []
    for annotation in snapshot.annotations:
        if annotation.stage == "START":
            opened.append(annotation)
        else:
            at = next((i for i in reversed(range(len(opened))) if opened[i].name == annotation.name), None)
            if at is not None:
                begun = opened.pop(at)
                spans.append(PhaseSpan(name=begun.name, start_us=begun.time_us, end_us=annotation.time_us))
    end = snapshot.times[-1]
    spans += [PhaseSpan(name=a.name, start_us=a.time_us, end_us=max(end, a.time_us)) for a in opened]
    return spans


def _events_within(snapshot: Snapshot, start_us: int, end_us: int) -> tuple[int, int]:
    """The first event at or after a start, and the first after an end, in absolute times."""
    first = snapshot.last_event_until(start_us - 1) + 1
    return first, max(first, snapshot.last_event_until(end_us) + 1)


# The category of each allocation where nobody noted it, and how it is known.
#
# `sure` says by what: the stack or range of the allocation, its lifetime across phases, its size, or nothing (a guess).


Certainty = Literal["stack", "lifetime", "size", "guess"]
"""By what a category is known, the surest first."""
CERTAINTIES: tuple[Certainty, ...] = get_args(Certainty)

THERE_BEFORE = "there before"
QUANTISED = "frozen quantised weights"
_STATES_AT_MOST = 2
"""How many tensors of a parameter's size Adam and AdamW keep for each parameter."""
_WORKSPACES = (2 * 4096 * 1024 + 8 * 16 * 1024,)
"""What cuBLAS is given to work in, by PyTorch's default before Hopper (:4096:2:16:8); no tensor's usual size."""
_TOLD_BY_SIZE = 0.97
"""The share of what was there throughout whose sizes must agree on how many tensors belong to each parameter."""


def stage_of(phase: pl.Expr) -> pl.Expr:
    """The stage of training that a phase's name tells: forward, backward, optimizer, or ''."""
    return (
        pl.when(phase == FORWARD)
        .then(pl.lit(FORWARD))
        .when(phase.is_in([BACKWARD, RECOMPUTATION]))
        .then(pl.lit(BACKWARD))
        .when((phase == OPTIMIZER) | phase.str.starts_with("Optimizer.step#"))
        .then(pl.lit(OPTIMIZER))
        .otherwise(pl.lit(""))
    )


def certainty_of(alive: pl.DataFrame) -> dict[str, dict[Certainty, int]] | None:
    """By category the bytes asked for, by how the category is known; None where the process noted what they were."""
    if "sure" not in alive.columns:
        return None
    sums = alive.group_by("category", "sure").agg(pl.col("requested").sum())
    held: dict[tuple[str, str], int] = {(category, how): count for category, how, count in sums.iter_rows()}
    known: dict[str, dict[Certainty, int]] = {
        category: {how: held[category, how] for how in CERTAINTIES if (category, how) in held}
        for category in CATEGORIES
    }
    return {category: by for category, by in known.items() if by}


def _with_turns(table: pl.DataFrame) -> pl.DataFrame:
    """The table with the place of each event in the order of stages, counted in turns: forward, backward, optimizer,
    forward, ... Columns: `turn`, `free_turn`, and how many backward passes had begun by then (`passes`, `free_passes`).
    A free whose stage nothing tells happened in the stage whose turn it was.
    """
    staged = table.filter(pl.col("alloc_event").is_not_null() & (pl.col("stage") != ""))
    events = staged.select(event="alloc_event", running="stage").sort("event")
    changes = (
        pl.concat([pl.DataFrame({"event": [BEFORE], "running": [""]}), events])
        .filter((pl.col("running") != pl.col("running").shift(1)).fill_null(True))
        .with_columns(
            turn=pl.int_range(pl.len(), dtype=pl.Int64),
            passes=(pl.col("running") == BACKWARD).cum_sum().cast(pl.Int64),
        )
    )
    allocated, freed = (
        changes[changes["event"].search_sorted(table[column].fill_null(BEFORE), side="right") - 1]
        for column in ("alloc_event", "free_event")
    )
    never, recorded = pl.col("free_event").is_null(), pl.col("free_stage") != ""
    return table.with_columns(
        turn=allocated["turn"],
        passes=allocated["passes"],
        free_turn=pl.when(never).then(changes.height).otherwise(freed["turn"]),
        free_passes=pl.when(never).then(int(changes["passes"][-1])).otherwise(freed["passes"]),
        free_stage=pl.when(never | recorded).then(pl.col("free_stage")).otherwise(freed["running"]),
    )


def _by_lifetime(table: pl.DataFrame) -> pl.DataFrame:
    """The table with a category by stack and lifetime. The first rule that fits decides."""
    before, never = pl.col("alloc_event").is_null(), pl.col("free_event").is_null()
    stage, freed_in = pl.col("stage"), pl.col("free_stage")
    zeroed = _has("free_signs", Sign.ZERO_GRAD)
    outlives = never | (pl.col("turn") != pl.col("free_turn"))
    next_span = (pl.col("span") != pl.col("free_span")) & (pl.col("span") >= 0)
    passes = pl.col("passes").max()
    kept = (pl.col("free_passes") > pl.col("passes")) & (~never | (pl.col("passes") == passes - 1))
    unfinished = never & (pl.col("passes") == passes) & (passes > 0)
    made_as_model = never & (stage != BACKWARD) & (stage != OPTIMIZER) & ~_has("signs", Sign.CALL)
    rules: list[tuple[pl.Expr, str, Certainty]] = [
        (_has("signs", Sign.WORKSPACE), "workspaces", "stack"),
        (never & pl.col("requested").is_in(_WORKSPACES), "workspaces", "size"),
        (made_as_model & _has("signs", Sign.QUANTISED), QUANTISED, "stack"),
        (made_as_model & _has("signs", Sign.MODEL), "parameters", "stack"),
        (before & never & (stage == OPTIMIZER), "optimizer state", "stack"),
        (before & never & (stage == BACKWARD), "gradients", "stack"),
        (before & never, THERE_BEFORE, "guess"),
        (before & (freed_in == BACKWARD), "saved for backward", "lifetime"),
        (before & zeroed, "gradients", "stack"),
        (before & (freed_in == OPTIMIZER), "optimizer state", "lifetime"),
        (before, THERE_BEFORE, "guess"),
        ((stage == OPTIMIZER) & (outlives | next_span), "optimizer state", "stack"),
        ((stage == BACKWARD) & zeroed, "gradients", "stack"),
        ((stage == BACKWARD) & (outlives | (freed_in == OPTIMIZER)), "gradients", "lifetime"),
        (_has("free_signs", Sign.AUTOCAST_EXIT), "cast copies", "stack"),
        ((stage == FORWARD) & (freed_in == BACKWARD), "saved for backward", "lifetime"),
        ((stage == FORWARD) & kept, "saved for backward", "lifetime"),
        ((stage == FORWARD) & unfinished, "saved for backward", "guess"),
        ((stage != "") & ~outlives, "temporaries", "lifetime"),
    ]
    category, sure = (
        pl.coalesce([pl.when(rule[0]).then(pl.lit(rule[which])) for rule in rules] + [pl.lit(otherwise)])
        for which, otherwise in ((1, "temporaries"), (2, "guess"))
    )
    return table.with_columns(category=category, sure=sure)


def _has(column: str, sign: Sign) -> pl.Expr:
    return (pl.col(column) & int(sign)) != 0


def _by_size(table: pl.DataFrame) -> tuple[pl.DataFrame, str]:
    """The table with categories by size for what stays throughout, and a remark on it.

    Where the history has gradients, as many tensors of each size are parameters as gradients of that size ever live
    together. The history may show no optimizer state, since it is updated in place: the ratio of residents to
    gradients tells how many states each parameter has. Without gradients, states that a stack tells say as much, and
    else the sizes themselves: with Adam there are three tensors of each parameter's size, or four where the gradients
    stay too. Among equal tensors the choice makes no difference to the sums; those made in a function named `step`
    are the last to be called parameters.
    """
    before, never = pl.col("alloc_event").is_null(), pl.col("free_event").is_null()
    resident = before & never & (pl.col("category") == THERE_BEFORE)
    of_forward = ~before & never & (pl.col("stage") == FORWARD) & (pl.col("passes") == 0) & (pl.col("sure") != "stack")
    if not table.select((resident | of_forward).any()).item():
        return table, ""
    is_known = never & (pl.col("category") == "parameters")
    is_told = pl.col("category") == "optimizer state"
    sizes = _gradients_together(table)
    gradients_stay, states = False, 0
    if sizes.height:
        counted = table.filter(resident | is_known).join(sizes, on="requested")
        per_gradient = int(counted["requested"].sum()) / int((sizes["requested"] * sizes["count"]).sum())
        if not table.select((is_told & ~(before & never)).any()).item():
            states = min(max(int(per_gradient + 0.1) - 1, 0), _STATES_AT_MOST)
        reason = "as much is called parameters as there are gradients of the same sizes"
    elif table.select((is_told & never).any()).item():
        # By size, the most states of it that one line of code made: one for each parameter.
        kept = table.filter(is_told & never & (pl.col("requested") > 0))
        of_line = kept.group_by("requested", "site").agg(count=pl.len().cast(pl.Int64))
        sizes = of_line.group_by("requested").agg(pl.col("count").max())
        reason = "as much is called parameters as one line of the optimizer keeps states of the same sizes"
    else:
        staged = bool((table["stage"] != "").any())
        trains = is_known | pl.any_horizontal(pl.col("stage", "free_stage").is_in([BACKWARD, OPTIMIZER]))
        if (table["stack"] != NO_STACK).any() and not table.select(trains.any()).item():
            # Stacks of inference: layers of one size would pass for a parameter and its states.
            return table, "Nothing in this history shows a training step: what was there before it is called so."
        usual = (4, 3, 2) if table.select((pl.col("passes") > 1).any()).item() else (3,) if staged else (4, 3)
        sizes, copies = _alike(table.filter(resident | is_known), usual)
        gradients_stay = len(usual) > 1 and (staged or copies == _STATES_AT_MOST + 2)
        if not copies:
            return table, "Nothing in this history tells apart what was there before it: it is called so."
        states = copies - 1 - gradients_stay
        reason = f"{copies} tensors of each size belong to a parameter"
        reason += ", its gradient among them" if gradients_stay else ""
    in_step = _has("signs", Sign.STEP)
    order = [in_step, before.not_(), "alloc_event", "address"]
    place = pl.int_range(pl.len()).over("requested", "candidate", order_by=order)
    known = is_known.sum().over("requested")
    table = table.with_columns(candidate=resident | of_forward, known=known).with_columns(place=place)
    table = table.join(sizes, on="requested", how="left", maintain_order="left")
    candidate, at = pl.col("candidate"), pl.col("place")
    of_size = pl.col("count").fill_null(0)
    count = (of_size - pl.col("known")).clip(lower_bound=0)
    is_parameter = candidate & (at < count)
    others = count + of_size * states
    is_state = resident & (at >= count) & (at < others)
    is_state |= ~before & never & in_step & ~is_parameter & pl.col("count").is_not_null() & (pl.col("sure") != "stack")
    is_gradient = resident & (at >= others) & (at < others + of_size * gradients_stay)
    was_gradient = before & ~never & (pl.col("category") == THERE_BEFORE) & (of_size > 0)
    rules: list[tuple[pl.Expr, str]] = [
        (is_parameter, "parameters"),
        (is_state, "optimizer state"),
        (is_gradient | was_gradient, "gradients"),
    ]
    table = table.with_columns(
        category=pl.coalesce([pl.when(rule).then(pl.lit(name)) for rule, name in rules] + [pl.col("category")]),
        sure=pl.when(is_parameter | is_state | is_gradient | was_gradient)
        .then(pl.lit("size"))
        .otherwise(pl.col("sure")),
    ).drop("place", "count", "candidate", "known")
    of_states = {1: ", once as much optimizer state", 2: ", twice as much optimizer state (Adam's)"}.get(states, "")
    rest = f'the rest (buffers and batches among it) is called "{THERE_BEFORE}"'
    return table, f"Of what was there throughout, {reason}{of_states}; {rest}."


def _gradients_together(table: pl.DataFrame) -> pl.DataFrame:
    """By size (`requested`), how many gradients of it ever live at one time (`count`). What has no bytes tells none."""
    gradients = table.filter((pl.col("category") == "gradients") & (pl.col("requested") > 0))
    return (
        changes_of(gradients.with_columns(change=pl.lit(1)), "change", by=("requested",))
        .sort("event", "change")
        .group_by("requested")
        .agg(count=pl.col("change").cum_sum().max().cast(pl.Int64))
        .filter(pl.col("count") > 0)
    )


def _alike(residents: pl.DataFrame, usual: tuple[int, ...]) -> tuple[pl.DataFrame, int]:
    """How many parameters of each size there are (`requested`, `count`), and how many tensors each has of its size,
    itself included: one of the usual numbers, or 0 where the sizes do not tell.

    A model with an embedding or a last norm of a size of its own has one such parameter. So the greatest number that
    divides how often each size comes is how many tensors belong to a parameter.
    """
    by_size = residents.group_by("requested").len("count").with_columns(bytes=pl.col("requested") * pl.col("count"))
    by_size = by_size.sort("bytes", "requested", descending=True)
    threshold = _TOLD_BY_SIZE * int(by_size["bytes"].sum())
    large = by_size.filter(pl.col("bytes").cum_sum() - pl.col("bytes") < threshold)
    common = reduce(math.gcd, large["count"].to_list(), 0)
    copies = next((number for number in usual if common and common % number == 0), 0)
    counts = by_size.select("requested", pl.col("count") // max(copies, 1)).filter(pl.col("count") > 0)
    return counts, copies


# The category of each allocation that stepscope's notes name.


ROUNDING: MemoryCategory = "rounding"
OF_TENSORS = tuple(category for category in CATEGORIES if category != ROUNDING)
"""The categories that an allocation can have. The rounding of its block is counted separately."""


def notes_by_allocation(
    snapshot: Snapshot, notes: MemoryNotes, allocations: Allocations
) -> tuple[dict[int, TensorNote], int]:
    """The note of each allocation that has one, and the number of notes that match no allocation.

    A note describes the allocation that is live at its address at its time. If an allocation has two notes, the note
    whose category comes first in CATEGORIES counts: a parameter that an operator saves is a parameter.
    """
    wanted = {note.address for note in notes.tensors}
    at_address: dict[int, list[int]] = {address: [] for address in wanted}
    for i, address in enumerate(allocations.columns["address"].tolist()):
        if address in wanted:
            at_address[address].append(i)
    by_allocation: dict[int, TensorNote] = {}
    lost = 0
    rank = {category: i for i, category in enumerate(CATEGORIES)}
    for note in notes.tensors:
        # Several events can share a microsecond. Of the allocations that were live in it, it is one of the note's
        # size, then one still live at the end of that microsecond, then the last.
        first, last = snapshot.last_event_until(note.at_us - 1), snapshot.last_event_until(note.at_us)
        fitting = [
            (a.requested == note.bytes, a.free is None or a.free > last, i)
            for i, a in ((i, allocations[i]) for i in at_address[note.address])
            if a.alloc <= last and (a.free is None or a.free > first) and a.requested >= note.bytes
        ]
        if not fitting:
            lost += 1
            continue
        index = max(fitting)[-1]
        if index not in by_allocation or rank[note.category] < rank[by_allocation[index].category]:
            by_allocation[index] = note
    return by_allocation, lost


# Shapes by size: the tensor that an allocation must have been, where only one of the model's has its bytes.


def shapes_by_size(workload: TextbookWorkload) -> dict[int, tuple[int, ...]]:
    """The shape of each size in bytes that only one tensor of a step has: B sequences of a micro-batch, S positions, M
    model, F feed-forward, H heads, V words.

    (B, H, S, M/H) is left out, since it has the elements of (B, S, M): the same bytes seen by head.
    """
    model = workload.model
    batch, seq = max(1, workload.batch_size // workload.accumulation), workload.seq_len
    width, hidden, heads, words = model.d_model, model.d_ff, model.heads, model.vocabulary
    floats = [
        (batch, seq, width), (batch, seq, hidden), (batch, heads, seq, seq), (batch, seq, words), (batch, seq, 1),
        (batch, heads, seq, 1), (width, width), (hidden, width), (words, width), (seq, model.head_dim // 2),
        (batch, seq, model.key_width), (model.key_width, width),
    ]  # fmt: skip
    itemsizes = (4, 2) if PRECISIONS[workload.dtype].products == 2 else (4,)
    tensors = [(shape, itemsize) for shape in floats for itemsize in itemsizes]
    by_size: dict[int, set[tuple[int, ...]]] = {}
    for shape, itemsize in [*tensors, ((batch, seq), 8), ((seq, seq), 1)]:
        by_size.setdefault(math.prod(shape) * itemsize, set()).add(shape)
    return {size: next(iter(shapes)) for size, shapes in by_size.items() if len(shapes) == 1}


_ON_THE_WAY = (
    "signs", "free_signs", "span", "free_span", "stage", "free_stage", "turn", "free_turn", "passes", "free_passes",
)  # fmt: skip
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
        return cast("int", self.curve["allocated"].max())

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
        unsure = map(self.replay.allocations.__getitem__, self.replay.allocations.open_ended)
        return sum(one.alloc <= event and (one.free is None or one.free > event) for one in unsure)

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


def changes_of(table: pl.DataFrame, *amounts: str, by: Sequence[str] = ()) -> pl.DataFrame:
    """Amounts at the event that made each allocation, and negated at the event that freed it."""
    freed = table.filter(pl.col("free_event").is_not_null())
    return pl.concat(
        [
            table.select(*by, *amounts, event=pl.col("alloc_event").fill_null(BEFORE)),
            freed.select(*by, *(-pl.col(name) for name in amounts), event="free_event"),
        ]
    )


def allocated_curve(allocations: pl.DataFrame) -> pl.DataFrame:
    """Allocated bytes after each event that changes them."""
    start = pl.DataFrame({"block": [0], "event": [BEFORE]})
    changes = pl.concat([start, changes_of(allocations, "block")]).sort("event")
    is_last = pl.col("event") != pl.col("event").shift(-1)
    return changes.select("event", allocated=pl.col("block").cum_sum()).filter(is_last.fill_null(True))


def explain(snapshot: Snapshot) -> Explained:
    """Replay a snapshot and name what every allocation was."""
    with without_collector():
        replayed = replay(snapshot)
        stacks = Stacks(snapshot.source)
        phases = phases_of(snapshot)
        table = _table(snapshot, replayed, stacks, phases)
        remarks = _remarks(snapshot, replayed, phases)
        if snapshot.notes and snapshot.notes.tensors:
            table, lost = _with_notes(snapshot, table, replayed)
            if lost:
                remarks.append(f"{format_count(lost)} noted tensors lie in no allocation of this history.")
        else:
            table = table.with_columns(
                name=pl.lit(""), shape=pl.lit(None, dtype=pl.List(pl.Int64)), dtype=pl.lit(""), operator=pl.lit("")
            )
            table = _with_free_signs(snapshot, table, stacks)
            table, reason = _by_size(_by_lifetime(_with_turns(table)))
            remarks += [
                "No notes of stepscope are in this snapshot: categories are by evidence (phases, stacks, lifetimes).",
                *([reason] if reason else []),
            ]
        table = table.drop(*_ON_THE_WAY, strict=False)
        workload = snapshot.notes.workload if snapshot.notes else None
        if (shapes := by_sizes(workload, shapes_by_size) if workload is not None else None) is not None:
            # An allocation without a note is named by its size, where the model has a tensor of it.
            known = pl.DataFrame(
                {"requested": list(shapes), "by_size": [list(shape) for shape in shapes.values()]},
                schema={"requested": pl.Int64, "by_size": pl.List(pl.Int64)},
            )
            table = table.join(known, on="requested", how="left", maintain_order="left")
            table = table.with_columns(shape=pl.coalesce("shape", "by_size")).drop("by_size")
    return Explained(
        snapshot=snapshot, replay=replayed, allocations=table, stacks=stacks, phases=phases, notes=tuple(remarks)
    )


def _table(snapshot: Snapshot, replayed: Replay, stacks: Stacks, phases: tuple[PhaseSpan, ...]) -> pl.DataFrame:
    """The table of allocations, with all columns that need no notes."""
    history, allocations = snapshot.events, replayed.allocations
    pools = {pool: i for i, pool in enumerate(replayed.by_pool)}
    ordinary = array("i", [pools.get(ORDINARY, 0)]) * len(allocations)
    rows = {name: pl.Series(name, column) for name, column in allocations.columns.items()}
    for name in ("free", "completed"):
        rows[name] = rows[name].set(rows[name] == NEVER, None)
    alloc, free = rows["alloc"], rows["free"]
    is_new = alloc >= 0
    times = pl.Series(snapshot.times, dtype=pl.Int64) - snapshot.start_us
    spans = _spans(snapshot, phases)
    names = pl.Series([*(span.name for span in phases), ""], dtype=pl.String)
    in_span, freed_in_span = (_at(spans, events).fill_null(-1) for events in (alloc, free))
    place_of_text = [place_of(text) if snapshot.notes is not None else Place() for text in history.range_texts]
    ranges = _at(pl.Series(history.ranges), alloc)
    numbers = _stack_numbers(snapshot, replayed, stacks, alloc)

    def of_ranges(field: str) -> pl.Series:
        texts = pl.Series([getattr(place, field) for place in place_of_text], dtype=pl.String)
        return texts.gather(ranges).fill_null("")

    return pl.DataFrame(
        {
            "alloc_event": alloc.set(~is_new, None),
            "free_event": free,
            "completed_event": rows["completed"],
            "alloc_us": _at(times, alloc),
            "free_us": _at(times, free),
            **{name: rows[name] for name in ("address", "requested", "block", "stream")},
            "pool": pl.Series([pools.get(pool, 0) for pool in allocations.pools] or ordinary, dtype=pl.Int32),
            "phase": of_ranges("phase"),
            "module": of_ranges("module"),
            "part": of_ranges("part"),
            "stack": numbers,
            "site": _sites(stacks, numbers, ranges, place_of_text),
            "signs": pl.Series(stacks.signs, dtype=pl.Int32).gather(numbers),
            "free_phase": names.gather(freed_in_span),
            "span": in_span,
            "free_span": freed_in_span,
        }
    ).with_columns(phase=pl.when(pl.col("phase") != "").then("phase").otherwise(names.gather(in_span)))


def _at(values: pl.Series, events: pl.Series) -> pl.Series:
    """The values of events; null where one is null, or before the history."""
    return values.gather(events.set(events < 0, None)) if len(values) else values.clear(len(events))


def _spans(snapshot: Snapshot, phases: tuple[PhaseSpan, ...]) -> pl.Series:
    """For each event the place of its phase, the last begun of several; -1 outside of all."""
    spans = array("i", [-1]) * len(snapshot.events)
    for i, span in enumerate(phases):
        first, end = _events_within(snapshot, span.start_us + snapshot.start_us, span.end_us + snapshot.start_us)
        spans[first:end] = array("i", [i]) * (end - first)
    return pl.Series(spans, dtype=pl.Int32)


def _stack_numbers(snapshot: Snapshot, replayed: Replay, stacks: Stacks, alloc: pl.Series) -> pl.Series:
    """The number of the stack of each allocation. Of those from before the history, blocks of the end may tell it."""
    older = {
        block.address: block.frames for segment in snapshot.segments for block in segment.blocks if block.is_active
    }
    before: dict[int, int] = {}
    for at in cast("list[int]", (alloc < 0).arg_true().to_list()):
        allocation = replayed.allocations[at]
        if allocation.free is None:
            before[at] = stacks.number(older.get(allocation.address, ()))
    numbers = _numbers_of(snapshot, stacks, alloc)
    return numbers.scatter([*before], [*before.values()]) if before else numbers


def _numbers_of(snapshot: Snapshot, stacks: Stacks, events: pl.Series) -> pl.Series:
    """The number of each event's stack; that of no stack where there is no event."""
    history = snapshot.events
    places = _at(pl.Series(history.stacks), events)
    numbers = [NO_STACK] * len(history.distinct_stacks)
    for place in cast("list[int]", places.drop_nulls().unique(maintain_order=True).to_list()):
        numbers[place] = stacks.number(history.distinct_stacks[place])
    return pl.Series(numbers, dtype=pl.Int32).gather(places).fill_null(NO_STACK)


def _sites(stacks: Stacks, numbers: pl.Series, ranges: pl.Series, places: list[Place]) -> pl.Series:
    """The site of each allocation, worked out once for each pair of a stack and open ranges."""
    pairs = numbers.cast(pl.Int64) * (len(places) + 1) + ranges.fill_null(-1) + 1
    distinct = pairs.unique().sort()
    sites: list[str] = []
    for pair in cast("list[int]", distinct.to_list()):
        number, place = divmod(pair, len(places) + 1)
        sites.append(_site(stacks.sites[number], places[place - 1] if place else None))
    return pl.Series(sites, dtype=pl.String).gather(distinct.search_sorted(pairs))


def _site(of_stack: str, place: Place | None) -> str:
    """The most telling line of code. Where backward has no line, the module whose operator it runs. `place`: None for
    what was there before the history."""
    if place is None:
        return of_stack or "before the history"
    if of_stack.startswith(AUTOGRAD) and place.module:
        return f"{of_stack} in {place.module}"
    if not of_stack and place.phase == BACKWARD:
        return f"{AUTOGRAD}, of {place.module}" if place.module else AUTOGRAD
    return of_stack


def _with_free_signs(snapshot: Snapshot, table: pl.DataFrame, stacks: Stacks) -> pl.DataFrame:
    """The table with the signs of each free's stack, and with phases from stacks where no range gives them."""
    zeroing = array("i", bytes(4 * len(snapshot.events)))
    for span in _pairs(snapshot):
        if "zero_grad" in span.name:
            first, end = _events_within(snapshot, span.start_us, span.end_us)
            zeroing[first:end] = array("i", [int(Sign.ZERO_GRAD)]) * (end - first)
    freed = _numbers_of(snapshot, stacks, table["free_event"])
    signs = pl.Series(stacks.signs, dtype=pl.Int32).gather(freed)
    # A history that records only allocations gives a free the stack of its allocation.
    signs = signs.set((freed == NO_STACK) | (freed == table["stack"]), 0)
    signs |= _at(pl.Series(zeroing, dtype=pl.Int32), table["free_event"]).fill_null(0)
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

    table = table.with_columns(free_signs=signs)
    table = table.with_columns(stage=stage_of(pl.col("phase")), free_stage=stage_of(pl.col("free_phase")))
    if recorded:
        has_record = pl.col("alloc_event").is_not_null() | (pl.col("stack") != NO_STACK)
        table = table.with_columns(
            stage=by_stack("stage", "signs", no_python & has_record),
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
    unfinished = bool(snapshot.events.where("oom"))

    def texts(name: str) -> pl.Series:
        return pl.Series([getattr(note, name) for note in notes], dtype=pl.String)

    modules = texts("module")
    table = table.with_columns(
        category=pl.when(there)
        .then(texts("category"))
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
        shape=pl.Series(
            [list(note.shape) if i in noted else None for i, note in enumerate(notes)], dtype=pl.List(pl.Int64)
        ),
        **{name: texts(name) for name in ("name", "dtype", "operator")},
        module=pl.when(modules != "").then(modules).otherwise(pl.col("module")),
    )
    return table, lost


def _remarks(snapshot: Snapshot, replayed: Replay, phases: tuple[PhaseSpan, ...]) -> list[str]:
    """Sentences on how far the figures can be trusted."""
    remarks: list[str] = []
    if not snapshot.has_times:
        remarks.append("This history has no times: microseconds are places in it.")
    if not replayed.start_known:
        remarks.append(
            "The snapshot does not say what the allocator held when the history began; it was worked out from the "
            "events and from the segments at the end."
        )
    remarks += [
        f"The replay of the allocator failed: {fault}. Blocks may be larger than counted." for fault in replayed.faults
    ]
    if not phases:
        remarks.append("Nothing in this snapshot tells the phases of the step.")
    for has_history in (True, False):
        others = [str(other.device) for other in snapshot.others if bool(other.events) == has_history]
        named = f"device{'s' if len(others) > 1 else ''} {', '.join(others)}"
        if others and has_history:
            remarks.append(f"This is device {snapshot.device}; the snapshot also holds {named} (--device opens it).")
        elif others:
            remarks.append(f"Of {named} the snapshot holds no history, only what was there at its end.")
    remarks += [
        f"Out of memory: {format_count(event.size)} bytes were asked for when the driver had "
        f"{format_count(event.device_free)} left; a limit set for the process is not in the snapshot."
        for event in map(snapshot.events.__getitem__, snapshot.events.where("oom"))
    ]
    return remarks
