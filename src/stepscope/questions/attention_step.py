"""What a whole step gains by another attention: cells, answer and findings."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

from stepscope.core.answer import Answer, Cell, Finding, Table, known_columns, note, warning
from stepscope.core.errors import InputError
from stepscope.core.figures import doubting_kinds, gibibytes, median_within_ms, milliseconds, times_within
from stepscope.core.options import refuse_beside
from stepscope.core.parts import attention_names, choose_name
from stepscope.core.range_names import OPTIMIZER, PHASES, STEP
from stepscope.core.units import format_bytes, format_milliseconds, format_share
from stepscope.engine.request import TraceRequest
from stepscope.questions import comparison
from stepscope.questions.question import Cells, Question, Result, read_answer
from stepscope.runs.metrics import median_s, memory_of, peak_bytes

# A model's steps with different attentions, side by side: groups, what moved, and what can be told apart.
#
# Each step is measured in a process of its own, and two processes differ even if they do the same. So a change is set
# beside the changes of what attention cannot affect: the optimizer's phase, and the kernels of other modules. A
# difference that is no larger than those is not called a gain.


LEAST = 0.005
"""Share of the step: a change that is smaller is not named."""
OUTSIDE_PHASE = OPTIMIZER
"""The phase that no attention runs in."""
OUTSIDE_FAMILIES = ("optimizer", "normalisation", "embedding/gather", "random", "communication")
"""Kernels that no attention launches."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepCell(comparison.ComparedRun):
    """A training step with one attention."""

    FIELD = "attention"
    BASELINE = "reference"
    WITH_BACKWARD = True

    @property
    def name(self) -> str:
        """Model, batch, sequence and dtype, and what else is not as usual: two groups have two names."""
        usual = ["phase"] if self.run.workload.phase == "train" else []
        return " ".join(self.run.workload.words("attention", *usual))

    @property
    def label(self) -> str:
        return f"{self.name} with {self.value}"

    @cached_property
    def families(self) -> dict[str, float]:
        """Seconds of kernel time a step, by family; empty without a capture."""
        seconds: dict[str, float] = {}
        for row in self.digest.families if self.digest else ():
            seconds[row.family] = seconds.get(row.family, 0.0) + row.busy_ns * 1e-9
        return seconds

    @cached_property
    def inside(self) -> dict[str, float]:
        """The part of it launched by the attention itself, not by its projections; empty where the capture does not
        say (no modules in it, or a compiled step).
        """
        seconds: dict[str, float] = {}
        for row in self.digest.places if self.digest else ():
            if row.module.rpartition(".")[2] == "attention":
                seconds[row.family] = seconds.get(row.family, 0.0) + row.busy_ns * 1e-9
        return seconds

    @property
    def outside_s(self) -> float:
        """Kernel time a step of everything else, which is the same whatever the attention."""
        return sum(self.families.values()) - sum(self.inside.values())


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPair(comparison.Pair[StepCell]):
    """Two steps that differ in their attention alone."""

    @property
    def moves(self) -> list[tuple[str, float]]:
        """(family, seconds a step more than the base's), the largest changes first; empty without both captures."""
        return _changes(self.base.families, self.other.families)

    @property
    def moves_inside(self) -> list[tuple[str, float]]:
        """(family, seconds per step more than the base's) of the kernels that attention launched; empty unless both
        captures say which those are."""
        return _changes(self.base.inside, self.other.inside)


def _changes(before: Mapping[str, float], after: Mapping[str, float]) -> list[tuple[str, float]]:
    if not before or not after:
        return []
    changes = [(name, after.get(name, 0.0) - before.get(name, 0.0)) for name in {**before, **after}]
    return sorted(changes, key=lambda change: -abs(change[1]))


@dataclass(frozen=True, kw_only=True)
class StepGroup:
    """Cells that differ in their attention alone; the first is what the others are set beside."""

    cells: tuple[StepCell, ...]

    @property
    def base(self) -> StepCell:
        return self.cells[0]

    @cached_property
    def pairs(self) -> tuple[StepPair, ...]:
        """Each of the others beside the base."""
        return tuple(StepPair(base=self.base, other=cell) for cell in self.cells[1:])

    @cached_property
    def noise(self) -> float | None:
        """By what share of the base's the optimizer's phase differs at most, though no attention runs in it; None
        where there is no such phase.
        """
        times = [median_s(cell.run, OUTSIDE_PHASE) for cell in self.cells]
        base, *others = times
        shares = [abs(other / base - 1) for other in others if other and base]
        return max(shares, default=None)

    def why_alike(self, pair: StepPair) -> str:
        """Why nothing can be said of which is faster of two cells of the group; empty where it can."""
        ratio = pair.speed_up
        if ratio.undecided:
            return ratio.why_undecided
        change = abs(1 / ratio.value - 1)
        if self.noise is not None and change <= self.noise:
            return (
                f"the steps differ by {format_share(change)}, and the optimizer, which runs no attention, by up to "
                f"{format_share(self.noise)} between these runs"
            )
        return ""


StepStudy = comparison.Comparison[StepCell, StepPair]


def compare_steps(cells: Iterable[StepCell]) -> tuple[StepStudy, list[StepGroup]]:
    """The steps in the order of measuring, and the groups of those with a time, `reference` first in each."""
    study = comparison.compare_runs(cells, StepPair, order=lambda cell: (cell.run.instant, cell.run.id))
    return study, [StepGroup(cells=group) for group in study.groups]


# What follows from a model's steps with each attention, in sentences made of the figures.


_MOVES = 4
"""Named in a sentence."""
_FILLED = 0.9
"""The share of the step that kernels fill: below it, the device waits for the host."""


def steps_findings(study: StepStudy, groups: Sequence[StepGroup], unread: int) -> Iterator[Finding]:
    """Cell by cell beside the first of its group, then of each group, then of what is missing."""
    for group in groups:
        for pair in group.pairs:
            yield from chain(_step(group, pair), _kernels(pair), _saved(pair))
        yield from chain(_fastest(group), _waits(group))
    # What `auto` stood for.
    picks: dict[str, list[str]] = {}
    for cell in (cell for group in groups for cell in group.cells):
        if cell.run.evidence.attention:
            picks.setdefault(cell.run.evidence.attention, []).append(cell.name)
    for picked, names in picks.items():
        yield note("picked", f"auto is {picked} in {', '.join(names)}.", {"cells": len(names)})
    yield from chain(_alone(groups), _doubts(groups))
    yield from comparison.unlike_environments([pair for group in groups for pair in group.pairs])
    yield from comparison.replaced_runs(study)
    for cell in study.unmeasured:
        if cell.run.status == "out-of-memory":
            yield note("out of memory", f"{cell.label} ran out of memory.")
    if unread:
        yield warning(
            "unread",
            f"{unread} captures were not read, since polars is not installed here: the families are missing.",
            {"captures": unread},
        )


def _step(group: StepGroup, pair: StepPair) -> Iterator[Finding]:
    """How many times as fast, or why that cannot be said."""
    ratio, base, cell = pair.speed_up, pair.base, pair.other
    step_s, base_s = cell.time_s, base.time_s
    evidence = {"speed-up": ratio.value, "step_s": step_s, "base_s": base_s, "noise": group.noise}
    alike = group.why_alike(pair)
    if alike:
        yield note(
            "not distinguishable",
            f"{cell.name}: with {cell.value} a step takes {format_milliseconds(step_s)} ms and with {base.value} "
            f"{format_milliseconds(base_s)}, which is not distinguishable: {alike}.",
            evidence,
        )
        return
    phases = [
        f"{phase} {_signed(after - before)}"
        for phase in PHASES
        if (before := median_s(base.run, phase))
        and (after := median_s(cell.run, phase))
        and abs(after - before) >= LEAST * base_s
    ]
    named = f": {', '.join(phases)}" if phases else ""
    if any(phase.startswith(OUTSIDE_PHASE) for phase in phases):
        named += f"; no attention runs in the {OUTSIDE_PHASE}, so that much is noise"
    yield note(
        "faster" if ratio.value > 1 else "slower",
        f"{cell.name}: with {cell.value} the step is {comparison.times_as_fast(ratio)} as with {base.value}, "
        f"{format_milliseconds(base_s)} to {format_milliseconds(step_s)} ms{named}.",
        evidence,
    )


def _kernels(pair: StepPair) -> Iterator[Finding]:
    """What moved in attention, and beside it what moved where attention is not."""
    base, cell = pair.base, pair.other
    least_s = LEAST * base.time_s
    all_moves, moves = pair.moves, pair.moves_inside
    if not all_moves:
        return
    if moves:
        outside_s, inside, rest = cell.outside_s - base.outside_s, "in attention itself", "in all else"
    else:  # a capture that does not say which kernels are attention's own
        moves = [move for move in all_moves if move[0] not in OUTSIDE_FAMILIES]
        outside_s = sum(s for family, s in all_moves if family in OUTSIDE_FAMILIES)
        inside, rest = "in families that attention has a part in", "in the other families"
    named = [(family, s) for family, s in moves if abs(s) >= least_s][:_MOVES]
    change_s = sum(s for _, s in moves)
    start = f"{cell.name}, from {base.value} to {cell.value}, kernel time of a step moves by"
    evidence = {**dict(named), "attention": change_s, "elsewhere": outside_s}
    if not named and abs(outside_s) < least_s:
        return
    largest = max((abs(s) for _, s in named), default=0.0)
    if max(largest, abs(change_s)) <= abs(outside_s):
        yield note(
            "not distinguishable",
            f"{start} {_signed(change_s)} {inside}, and by {_signed(outside_s)} {rest}, "
            "where both do the same: what attention moves is not distinguishable from noise.",
            evidence,
        )
        return
    families = ", ".join(f"{family} {_signed(s)}" for family, s in named)
    yield note(
        "moved",
        f"{start} {_signed(change_s)} {inside}: {families}; {rest}, where both do the same, by {_signed(outside_s)}.",
        evidence,
    )


def _saved(pair: StepPair) -> Iterator[Finding]:
    base, cell = pair.base, pair.other
    saved, of_base = memory_of(cell.run, "saved_for_backward"), memory_of(base.run, "saved_for_backward")
    if saved is None or not of_base:
        return
    peaks = (peak_bytes(base.run), peak_bytes(cell.run))
    peak = ""
    if peaks[0] is not None and peaks[1] is not None:
        peak = f"; the peak goes from {format_bytes(peaks[0])} to {format_bytes(peaks[1])}"
    yield note(
        "memory",
        f"{cell.name}: with {cell.value} {format_bytes(abs(of_base - saved))} {'less' if saved <= of_base else 'more'} "
        f"is saved for backward than with {base.value}, {format_bytes(saved)}{peak}.",
        {"saved": saved, "saved of the first": of_base},
    )


def _fastest(group: StepGroup) -> Iterator[Finding]:
    """The shortest of three or more steps, and the steps that cannot be told apart from it."""
    if len(group.cells) < 3:
        return
    best = min(group.cells, key=lambda cell: cell.time_s)
    others = [StepPair(base=cell, other=best) for cell in group.cells if cell is not best]
    alike = [pair.base.value for pair in others if group.why_alike(pair)]
    rest = f", not distinguishable from {', '.join(alike)}" if alike else ""
    yield note(
        "fastest",
        f"{best.name}: the shortest of {len(group.cells)} steps is that with {best.value}, "
        f"{format_milliseconds(best.time_s)} ms{rest}.",
        {"step_s": best.time_s, "alike": len(alike)},
    )


def _waits(group: StepGroup) -> Iterator[Finding]:
    """On a GPU: steps that kernels do not fill are as long as the host takes, whatever the attention."""
    waiting: list[str] = []
    least = 1.0
    for cell in group.cells:
        if not cell.on_gpu or not cell.families:
            continue
        busy_s = sum(cell.families.values())
        if busy_s < _FILLED * cell.time_s:
            waiting.append(f"{format_milliseconds(busy_s)} of {format_milliseconds(cell.time_s)} ms with {cell.value}")
            least = min(least, busy_s / cell.time_s)
    if waiting:
        yield note(
            "launch-bound",
            f"{group.base.name}: kernels fill {', '.join(waiting)}; for the rest the device waits for the host, which "
            "no attention shortens: compare their kernel time.",
            {"least share": least},
        )


def _alone(groups: Sequence[StepGroup]) -> Iterator[Finding]:
    """Where there is one attention, there is nothing to set it beside."""
    alone = [group.base for group in groups if len(group.cells) == 1]
    if alone:
        names = ", ".join(dict.fromkeys(cell.value for cell in alone))
        first = f"{alone[0].name} first" if len(alone) > 1 else alone[0].name
        yield note(
            "nothing to compare",
            f"There is nothing to compare in {len(alone)} of {len(groups)} cells, {first}: one attention alone was "
            f"measured there ({names}). Others: --attention.",
            {"cells": len(alone)},
        )


def _doubts(groups: Sequence[StepGroup]) -> Iterator[Finding]:
    """What the runs' own checks warn of: such times are no attention's doing."""
    cells = [cell for group in groups if len(group.cells) > 1 for cell in group.cells]
    kinds = Counter(kind for cell in cells for kind in sorted(doubting_kinds(cell.run)))
    if kinds:
        named = ", ".join(f"{kind} ({count})" for kind, count in kinds.items())
        doubted = sum(bool(doubting_kinds(cell.run)) for cell in cells)
        yield warning(
            "doubtful-runs",
            f"{doubted} of the {len(cells)} steps compared are doubted by their own checks: {named}. What `stepscope "
            "show` says of these runs holds for their comparisons too.",
            kinds,
        )


def _signed(seconds: float) -> str:
    """A change in ms."""
    return f"{'+' if seconds > 0 else ''}{format_milliseconds(seconds)} ms"


TIMES, MEMORY, FAMILIES, MOVED, MISSING = (
    "The step: medians by phase, ms",
    "Memory of the step, GiB",
    "Kernel time by family, ms a step",
    "What moved, by family, ms a step",
    "Not measured",
)
TITLES = (TIMES, MEMORY, FAMILIES, MOVED, MISSING)


def answer_steps(cells: Iterable[StepCell], *, unread: int = 0) -> Answer:
    """The whole answer. `unread`: captures that nothing here reads. Raises InputError where nothing was measured."""
    study, groups = compare_steps(cells)
    if not groups:
        why = "".join(f": {cell.label} {cell.why_missing}" for cell in study.unmeasured[:1])
        raise InputError(f"no step was measured{why}")
    left_out = comparison.missing_cells(MISSING, StepCell.FIELD, study.unmeasured)
    return comparison.compared_answer(
        study,
        groups[0].base,
        study="attention",
        question="What does a whole training step gain by another attention, and where: phases, kernels, memory?",
        tables=(_times(groups), _memory(groups), _families(groups), _moved(groups), left_out),
        panels=comparison.bars_of(study, STEP),
        findings=steps_findings(study, groups, unread),
    )


def _times(groups: Sequence[StepGroup]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for group in groups:
        ratios = {pair.other: pair.speed_up for pair in group.pairs}
        for cell in group.cells:
            rows.append(
                (
                    cell.name,
                    cell.value,
                    *(milliseconds(median_s(cell.run, p)) for p in (*PHASES, STEP)),
                    *median_within_ms(cell.samples(STEP))[1:],
                    *times_within(ratios.get(cell)),
                    ", ".join(doubting_kinds(cell.run)),
                )
            )
    heads = (*PHASES, STEP, "step from", "step to", "speed-up", "from", "to", "findings")
    columns = ("cell", "attention", *heads)
    if not any(row[-1] for row in rows):  # no run is doubted
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Table(title=TIMES, columns=columns, rows=tuple(rows))


def _memory(groups: Sequence[StepGroup]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for group in groups:
        for cell in group.cells:
            memory = cell.run.evidence.memory
            if memory is None:
                continue
            base = group.base.run.evidence.memory
            saved, of_base = memory.saved_for_backward, base.saved_for_backward if base else None
            change = saved - of_base if saved is not None and of_base and cell is not group.base else None
            held = (peak_bytes(cell.run), memory.forward_peak, saved, change)
            rows.append((cell.name, cell.value, *map(gibibytes, held)))
    heads = ("cell", "attention", "peak", "forward peak", "saved for backward", "saved, against the first")
    return known_columns(MEMORY, heads, rows)  # a CPU counts no peak


def _families(groups: Sequence[StepGroup]) -> Table:
    attentions = list(dict.fromkeys(cell.value for group in groups for cell in group.cells))
    rows: list[tuple[Cell, ...]] = []
    for group in groups:
        by_name = {cell.value: cell for cell in group.cells if cell.families}
        cells = [by_name.get(name) for name in attentions]
        totals = {family: 0.0 for cell in by_name.values() for family in cell.families}
        for family in totals:
            totals[family] = max(cell.families.get(family, 0.0) for cell in by_name.values())
        for family in sorted(totals, key=lambda f: -totals[f]):
            times = [milliseconds(cell.families.get(family, 0.0)) if cell else None for cell in cells]
            rows.append((group.base.name, family, *times))
        sums: dict[str, Callable[[StepCell], float | None]] = {
            "in attention itself": lambda cell: sum(cell.inside.values()) if cell.inside else None,
            "in all else": lambda cell: cell.outside_s if cell.inside else None,
            "all kernels": lambda cell: sum(cell.families.values()),
        }
        for what, figure in sums.items():
            figures = [milliseconds(figure(cell)) if cell else None for cell in cells]
            if any(value is not None for value in figures):
                rows.append((group.base.name, what, *figures))
    return Table(title=FAMILIES, columns=("cell", "family", *attentions), rows=tuple(rows))


def _moved(groups: Sequence[StepGroup]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for pair in (pair for group in groups for pair in group.pairs):
        inside = dict(pair.moves_inside)
        for family, change in pair.moves:
            in_attention = inside.get(family, 0.0) if inside else None
            if max(abs(change), abs(in_attention or 0.0)) >= LEAST * pair.base.time_s:
                name = f"{pair.base.value} to {pair.other.value}"
                # To a picosecond: sums of the same kernels in another order differ by 1e-17 ms.
                rest = None if in_attention is None else round(change - in_attention, 12)
                rows.append((pair.other.name, name, family, *map(milliseconds, (change, in_attention, rest))))
    heads = ("cell", "from, to", "family", "change", "in attention itself", "in all else")
    return known_columns(MOVED, heads, rows)


# A whole training step of a model with each attention: which sizes, and which attentions.


ON_GPU = comparison.Sizes(models=("tiny",), dtypes=("bf16",), seq_len=1024, batch_size=4)
ON_CPU = comparison.Sizes(models=("tiny",), dtypes=("fp32",), seq_len=64, batch_size=1)


def usual_attentions(device_type: str) -> tuple[str, ...]:
    """The attentions to compare on a `cpu`, or on anything else."""
    return ("reference", "sdpa") if device_type == "cpu" else ("reference", "sdpa-cudnn", "flash")


def compare_attentions(*, options: comparison.StepOptions, attention: tuple[str, ...] | None) -> Result | Cells:
    """A whole training step with each attention in it: time, memory, and where the difference comes from."""
    if options.from_:
        refuse_beside("--from", "--keep-digests")
        if file := comparison.finished_answer(options.from_):
            refuse_beside("--from")
            return Result(answer=read_answer(file, "attention"))
        return Result(answer=answer_stored(options.from_, options.keep_digests))
    compared = comparison.Compared(study="attention-step", cell=StepCell, answer=answer_steps, options=options)
    attentions = attention or usual_attentions(options.device_type)
    cells = comparison.compared_cells(
        attention=[choose_name(name, attention_names(), "attention") for name in attentions],
        **options.sizes(options.usual(ON_CPU, ON_GPU)),
    )
    # Operators of a CPU take now this long and now that; kernels do not.
    return compared.measured(cells, TraceRequest(tools=("kineto",), steps=5 if options.device_type == "cpu" else 1))


def answer_stored(places: Sequence[Path], keep_digests: bool) -> Answer:
    """The answer from folders of runs. keep_digests: whether what their captures say is written beside them."""
    runs = [(run, directory) for run, directory in comparison.stored_runs(places) if run.workload.phase != "forward"]
    if not runs:
        files = [file for place in places for file in sorted(place.glob("*.json"))]
        remedy = f"give one of its files, as in {files[0]}" if files else "give one that this study filled"
        raise InputError(f"no run of a training step in {', '.join(map(str, places))}: {remedy}")
    cells, unread = comparison.cells_of(StepCell, runs, keep_digests)
    return answer_steps(cells, unread=unread)


QUESTION = Question(
    "attention-step",
    compare_attentions,
    examples=(
        "--model small,medium --seq-len 1024 --attention reference,flash",
        "--from results/h200/attention-steps --only findings",
    ),
    shared=("save", "shown"),
    defaults={
        **ON_GPU.in_words(ON_CPU),
        "attention": "reference,sdpa-cudnn,flash; reference,sdpa on a CPU",
    },
    titles=lambda: TITLES,
)
