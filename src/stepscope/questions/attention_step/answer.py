"""The answer to "what does a whole step gain by another attention": tables by cell, and what follows from them."""

from collections.abc import Callable, Iterable, Sequence

from stepscope.core.answer import Answer, Cell, Table, known_columns, measured_answer
from stepscope.core.doubts import doubting_kinds
from stepscope.core.errors import InputError
from stepscope.core.figures import gibibytes, milliseconds, times_within, within_ms
from stepscope.core.range_names import PHASES, STEP
from stepscope.questions.attention_step.cells import LEAST, StepCell, StepGroup, compare_steps, step_groups
from stepscope.questions.attention_step.findings import steps_findings
from stepscope.questions.compare.answers import bars_of, missing_cells
from stepscope.runs.metrics import median_s, peak_bytes

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


def answer_steps(found: Iterable[StepCell], *, unread: int = 0) -> Answer:
    """The whole answer. `unread`: captures that nothing here reads. Raises InputError where nothing was measured."""
    study = compare_steps(found)
    groups = step_groups(study)
    if not groups:
        why = "".join(f": {cell.label} {cell.why_missing}" for cell in study.unmeasured[:1])
        raise InputError(f"no step was measured{why}")
    left_out = missing_cells(MISSING, StepCell.FIELD, study.unmeasured)
    return measured_answer(
        groups[0].base.run.environment,
        study=STUDY,
        question=QUESTION,
        tables=(_times(groups), _memory(groups), _families(groups), _moved(groups), left_out),
        panels=bars_of(study, STEP),
        date=max(cell.run.day for cell in study.cells),
        intervals=study.intervals,
        findings=steps_findings(study, groups, unread),
    )


def _times(groups: Sequence[StepGroup]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for group in groups:
        ratios = {pair.other: pair.speed_up for pair in group.pairs}
        for cell in group.cells:
            rows.append(
                (
                    cell.name, cell.value, *(milliseconds(median_s(cell.run, p)) for p in (*PHASES, STEP)),
                    *within_ms(cell.samples(STEP)), *times_within(ratios.get(cell)),
                    ", ".join(doubting_kinds(cell.run)),
                )
            )  # fmt: skip
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
            own = inside.get(family, 0.0) if inside else None
            if max(abs(change), abs(own or 0.0)) >= LEAST * pair.base.time_s:
                name = f"{pair.base.value} to {pair.other.value}"
                # To a picosecond: sums of the same kernels in another order differ by 1e-17 ms.
                rest = None if own is None else round(change - own, 12)
                rows.append((pair.other.name, name, family, *map(milliseconds, (change, own, rest))))
    heads = ("cell", "from, to", "family", "change", "in attention itself", "in all else")
    return known_columns(MOVED, heads, rows)
