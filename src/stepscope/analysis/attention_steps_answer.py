"""The answer to "what does a whole step gain by another attention": tables by cell, and what follows from them."""

from collections.abc import Callable, Iterable, Sequence

from stepscope.analysis.attention_steps import LEAST, StepCell, StepGroup, group_cells
from stepscope.analysis.attention_steps_findings import steps_findings
from stepscope.analysis.doubts import doubting_kinds
from stepscope.analysis.metrics import PHASE_NAMES, median_s, peak_bytes, samples_of
from stepscope.core.errors import InputError
from stepscope.core.experiment import Cell, Experiment, Table
from stepscope.core.samples import INTERVALS
from stepscope.core.units import GIB

STUDY = "attention"
QUESTION = "What does a whole training step gain by another attention, and where: phases, kernels, memory?"
TIMES, MEMORY, FAMILIES, MOVED, MISSING = (
    "The step: medians by phase, ms",
    "Memory of the step, GiB",
    "Kernel time by family, ms a step",
    "What moved, by family, ms a step",
    "Not measured",
)
TITLES = (TIMES, MEMORY, FAMILIES, MOVED, MISSING)


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
        settings={"intervals": INTERVALS},
        tables=tuple(table for table in tables if table.rows),
        findings=tuple(steps_findings(groups, missing, unread)),
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
                    ", ".join(doubting_kinds(cell.run)),
                )
            )  # fmt: skip
    heads = (*PHASE_NAMES, "step", "step from", "step to", "speed-up", "from", "to", "findings")
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
            rows.append(
                (
                    cell.name, cell.attention, _gib(peak_bytes(cell.run)), _gib(memory.forward_peak), _gib(saved),
                    _gib(saved - of_base) if saved is not None and of_base and cell is not group.base else None,
                )
            )  # fmt: skip
    heads = ("cell", "attention", "peak", "forward peak", "saved for backward", "saved, against the first")
    # A CPU counts no peak.
    known = [i for i in range(len(heads)) if i < 2 or any(row[i] is not None for row in rows)]
    return Table(
        title=MEMORY,
        columns=tuple(heads[i] for i in known),
        rows=tuple(tuple(row[i] for i in known) for row in rows),
    )


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
        sums: dict[str, Callable[[StepCell], float | None]] = {
            "in attention itself": lambda cell: sum(cell.inside.values()) if cell.inside else None,
            "in all else": lambda cell: cell.outside_s if cell.inside else None,
            "all kernels": lambda cell: sum(cell.families.values()),
        }
        for what, figure in sums.items():
            figures = [_ms(figure(by_name[name])) if name in by_name else None for name in attentions]
            if any(value is not None for value in figures):
                rows.append((group.base.name, what, *figures))
    return Table(title=FAMILIES, columns=("cell", "family", *attentions), rows=tuple(rows))


def _moved(groups: Sequence[StepGroup]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for group in groups:
        for cell in group.cells[1:]:
            inside = dict(group.moves_inside(cell))
            for family, change in group.moves(cell):
                own = inside.get(family, 0.0) if inside else None
                if max(abs(change), abs(own or 0.0)) >= LEAST * (median_s(group.base.run, "step") or 0.0):
                    name = f"{group.base.attention} to {cell.attention}"
                    # To a picosecond: sums of the same kernels in another order differ by 1e-17 ms.
                    rest = None if own is None else round(change - own, 12)
                    rows.append((cell.name, name, family, _ms(change), _ms(own), _ms(rest)))
    heads = ("cell", "from, to", "family", "change", "in attention itself", "in all else")
    known = len(heads) if any(row[4] is not None for row in rows) else 4
    return Table(title=MOVED, columns=heads[:known], rows=tuple(row[:known] for row in rows))


def _missing(missing: Sequence[StepCell]) -> Table:
    rows = tuple((cell.name, cell.attention, _why(cell)) for cell in missing)
    return Table(title=MISSING, columns=("cell", "attention", "why"), rows=rows)


def _why(cell: StepCell) -> str:
    failure = cell.run.failure
    return f"ended {cell.run.status}" + (f" ({failure.where}): {failure.message}" if failure else "")


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else _digits(seconds * 1e3)


def _gib(count: float | None) -> float | None:
    return None if count is None else _digits(count / GIB)


def _digits(value: float | None) -> float | None:
    """Four significant digits."""
    return None if value is None else float(f"{value:.4g}")
