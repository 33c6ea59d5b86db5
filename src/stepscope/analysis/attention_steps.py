"""A model's step with each attention beside the same with another: phases, kernel families, memory, what moved."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from stepscope.analysis.metrics import PHASE_NAMES, median_s, peak_bytes, samples_of
from stepscope.core.errors import InputError
from stepscope.core.experiment import Cell, Experiment, Table
from stepscope.core.finding import Finding
from stepscope.core.run import Run
from stepscope.core.samples import Ratio
from stepscope.core.units import GIB, format_bytes, format_milliseconds

if TYPE_CHECKING:
    from stepscope.analysis.trace_digest import TraceDigest  # a module that needs polars

STUDY = "attention"
QUESTION = "What does a whole training step gain by another attention, and where: phases, kernels, memory?"
TIMES, MEMORY, FAMILIES, MOVED, MISSING = (
    "The step: medians by phase, ms",
    "Memory of the step, GiB",
    "Kernel time by family, ms a step",
    "What moved, by family, ms a step",
    "Not measured",
)
BASELINE = "reference"
_MOVES = 4
"""Named in a sentence."""
_LEAST = 0.005
"""Of the step: what moved less is not named."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepCell:
    """A run, and what is kept of its captured step, if it has one."""

    run: Run
    digest: "TraceDigest | None" = None

    @property
    def attention(self) -> str:
        return self.run.workload.attention

    @property
    def group(self) -> tuple[object, ...]:
        """Equal where nothing but the attention differs, and the device is the same."""
        fields = {field: value for field, value in self.run.workload.identity.items() if field != "attention"}
        environment = self.run.environment
        return (repr(fields), environment.device_name if environment else None)

    @property
    def name(self) -> str:
        """Model, batch, sequence and dtype."""
        of = self.run.workload
        return f"{of.model.name} b{of.batch_size} s{of.seq_len} {of.dtype}"

    @property
    def measured(self) -> bool:
        return self.run.status == "done" and bool(median_s(self.run, "step"))

    @cached_property
    def families(self) -> dict[str, float]:
        """Seconds of kernel time a step, by family; empty without a capture."""
        found: dict[str, float] = {}
        for row in self.digest.families if self.digest else ():
            found[row.family] = found.get(row.family, 0.0) + row.busy_ns * 1e-9
        return found


@dataclass(frozen=True, kw_only=True)
class StepGroup:
    """Cells that differ in their attention alone; the first is what the others are set beside."""

    cells: tuple[StepCell, ...]

    @property
    def base(self) -> StepCell:
        return self.cells[0]

    def speed_up(self, cell: StepCell) -> Ratio | None:
        """Of the whole step over the base's."""
        own, base = samples_of(cell.run, "step"), samples_of(self.base.run, "step")
        return own.speedup_over(base) if own and base and cell is not self.base else None

    def moves(self, cell: StepCell) -> list[tuple[str, float]]:
        """(family, seconds a step more than the base's), the largest changes first; empty without both captures."""
        if not cell.families or not self.base.families:
            return []
        families = {**self.base.families, **cell.families}
        changes = [(f, cell.families.get(f, 0.0) - self.base.families.get(f, 0.0)) for f in families]
        return sorted(changes, key=lambda change: -abs(change[1]))


def group_cells(found: Iterable[StepCell]) -> tuple[list[StepGroup], list[StepCell]]:
    """Groups with a time, `reference` first in each, and the cells without. Of several runs of one cell, one with a
    capture goes before one without, then the newest.
    """
    best: dict[tuple[object, ...], StepCell] = {}
    for cell in sorted(found, key=lambda c: (c.measured, c.digest is not None, c.run.created, c.run.id)):
        best[*cell.group, cell.attention] = cell
    groups: dict[tuple[object, ...], list[StepCell]] = {}
    for cell in sorted(best.values(), key=lambda c: (c.run.created, c.run.id)):
        if cell.measured:
            groups.setdefault(cell.group, []).append(cell)
    ordered = [
        StepGroup(cells=tuple(sorted(cells, key=lambda cell: cell.attention != BASELINE))) for cells in groups.values()
    ]
    return ordered, [cell for cell in best.values() if not cell.measured]


def answer_steps(found: Iterable[StepCell], *, unread: int = 0) -> Experiment:
    """The whole answer. `unread`: captures that nothing here reads. Raises InputError where nothing was measured."""
    groups, missing = group_cells(found)
    if not groups:
        why = f": {missing[0].name} with {missing[0].attention} {_why(missing[0])}" if missing else ""
        raise InputError(f"no step was measured{why}")
    first = groups[0].base.run.environment
    tables = (_times(groups), _memory(groups), _families(groups), _moved(groups), _missing(missing))
    return Experiment(
        study=STUDY,
        question=QUESTION,
        device=first.device_name if first else "",
        versions=dict(first.versions) if first else {},
        tables=tuple(table for table in tables if table.rows),
        findings=tuple(_findings(groups, missing, unread)),
    )


def _times(groups: Sequence[StepGroup]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for group in groups:
        for cell in group.cells:
            step = samples_of(cell.run, "step")
            interval = step.interval() if step else None
            ratio = group.speed_up(cell)
            rows.append(
                (
                    cell.name, cell.attention, *(_ms(median_s(cell.run, phase)) for phase in (*PHASE_NAMES, "step")),
                    _ms(interval.low) if interval else None, _ms(interval.high) if interval else None,
                    _digits(ratio.value) if ratio else None,
                    _digits(ratio.interval.low) if ratio and ratio.interval else None,
                    _digits(ratio.interval.high) if ratio and ratio.interval else None,
                )
            )  # fmt: skip
    heads = (*PHASE_NAMES, "step", "step from", "step to", "speed-up", "from", "to")
    return Table(title=TIMES, columns=("cell", "attention", *heads), rows=tuple(rows))


def _memory(groups: Sequence[StepGroup]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for group in groups:
        for cell in group.cells:
            memory = cell.run.evidence.memory
            if memory is None:
                continue
            base = group.base.run.evidence.memory
            saved, of_base = memory.saved_for_backward, base.saved_for_backward if base else None
            rows.append(
                (
                    cell.name, cell.attention, _gib(peak_bytes(cell.run)), _gib(memory.forward_peak), _gib(saved),
                    _gib(saved - of_base) if saved is not None and of_base and cell is not group.base else None,
                )
            )  # fmt: skip
    heads = ("peak", "forward peak", "saved for backward", "saved, against the first")
    return Table(title=MEMORY, columns=("cell", "attention", *heads), rows=tuple(rows))


def _families(groups: Sequence[StepGroup]) -> Table:
    attentions = list(dict.fromkeys(cell.attention for group in groups for cell in group.cells))
    rows: list[tuple[Cell, ...]] = []
    for group in groups:
        by_name = {cell.attention: cell for cell in group.cells if cell.families}
        totals = {family: 0.0 for cell in by_name.values() for family in cell.families}
        for family in totals:
            totals[family] = max(cell.families.get(family, 0.0) for cell in by_name.values())
        for family in sorted(totals, key=lambda f: -totals[f]):
            times = [_ms(by_name[name].families.get(family, 0.0)) if name in by_name else None for name in attentions]
            rows.append((group.base.name, family, *times))
        if by_name:
            sums = [_ms(sum(by_name[name].families.values())) if name in by_name else None for name in attentions]
            rows.append((group.base.name, "all kernels", *sums))
    return Table(title=FAMILIES, columns=("cell", "family", *attentions), rows=tuple(rows))


def _moved(groups: Sequence[StepGroup]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for group in groups:
        for cell in group.cells[1:]:
            rows += [
                (cell.name, f"{group.base.attention} to {cell.attention}", family, _ms(change))
                for family, change in group.moves(cell)
                if abs(change) >= _LEAST * (median_s(group.base.run, "step") or 0.0)
            ]
    return Table(title=MOVED, columns=("cell", "from, to", "family", "change"), rows=tuple(rows))


def _missing(missing: Sequence[StepCell]) -> Table:
    rows = tuple((cell.name, cell.attention, _why(cell)) for cell in missing)
    return Table(title=MISSING, columns=("cell", "attention", "why"), rows=rows)


def _why(cell: StepCell) -> str:
    failure = cell.run.failure
    return f"ended {cell.run.status}" + (f" ({failure.where}): {failure.message}" if failure else "")


def _findings(groups: Sequence[StepGroup], missing: Sequence[StepCell], unread: int) -> Iterator[Finding]:
    for group in groups:
        for cell in group.cells[1:]:
            yield from _pair(group, cell)
    for cell in missing:
        if cell.run.status == "out-of-memory":
            yield Finding(
                kind="out of memory",
                severity="note",
                sentence=f"{cell.name} with {cell.attention} ran out of memory.",
            )
    if unread:
        yield Finding(
            kind="unread",
            severity="warning",
            sentence=f"{unread} captures were not read, since polars is not installed here: the families are missing.",
            evidence={"captures": unread},
        )


def _pair(group: StepGroup, cell: StepCell) -> Iterator[Finding]:
    ratio, base = group.speed_up(cell), group.base
    step_s, base_s = median_s(cell.run, "step"), median_s(base.run, "step")
    if ratio is None or not step_s or not base_s:
        return
    bounds = f" ({ratio.interval.low:.3g} to {ratio.interval.high:.3g})" if ratio.interval else ""
    phases = [
        f"{phase} {'+' if after > before else ''}{format_milliseconds(after - before)} ms"
        for phase in PHASE_NAMES
        if (before := median_s(base.run, phase)) and (after := median_s(cell.run, phase))
        and abs(after - before) >= _LEAST * base_s
    ]  # fmt: skip
    named = f": {', '.join(phases)}" if phases else ""
    yield Finding(
        kind="faster" if ratio.value > 1 else "slower",
        severity="note",
        sentence=f"{cell.name}: with {cell.attention} the step is {ratio.value:.3g}{bounds} times as fast as with "
        f"{base.attention}, {format_milliseconds(base_s)} to {format_milliseconds(step_s)} ms{named}.",
        evidence={"speed-up": ratio.value, "step_s": step_s, "base_s": base_s},
    )
    moves = [(f, change) for f, change in group.moves(cell)[:_MOVES] if abs(change) >= _LEAST * base_s]
    if moves:
        named = ", ".join(f"{family} {'+' if s > 0 else ''}{format_milliseconds(s)} ms" for family, s in moves)
        yield Finding(
            kind="moved",
            severity="note",
            sentence=f"{cell.name}, from {base.attention} to {cell.attention}, kernel time of a step moved by {named}.",
            evidence=dict(moves),
        )
    memory, of_base = cell.run.evidence.memory, base.run.evidence.memory
    if memory and of_base and memory.saved_for_backward is not None and of_base.saved_for_backward:
        change = of_base.saved_for_backward - memory.saved_for_backward
        peaks = (peak_bytes(base.run), peak_bytes(cell.run))
        peak = ""
        if peaks[0] is not None and peaks[1] is not None:
            peak = f"; the peak goes from {format_bytes(peaks[0])} to {format_bytes(peaks[1])}"
        yield Finding(
            kind="memory",
            severity="note",
            sentence=f"{cell.name}: with {cell.attention} {format_bytes(abs(change))} "
            f"{'less' if change >= 0 else 'more'} is saved for backward than with {base.attention}, "
            f"{format_bytes(memory.saved_for_backward)}{peak}.",
            evidence={"saved": memory.saved_for_backward, "saved of the first": of_base.saved_for_backward},
        )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else _digits(seconds * 1e3)


def _gib(count: float | None) -> float | None:
    return None if count is None else _digits(count / GIB)


def _digits(value: float | None) -> float | None:
    """Four significant digits."""
    return None if value is None else float(f"{value:.4g}")
