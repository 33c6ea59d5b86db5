"""The answer to "what does torch.compile give, and what does it cost": tables, curves, and what follows from them."""

from stepscope.core.answer import Answer, Cell, Panel, Table, measured_answer
from stepscope.core.doubts import doubting_kinds
from stepscope.core.errors import InputError
from stepscope.core.figures import digits, gibibytes, median_within_ms, milliseconds, percent, times_within
from stepscope.core.range_names import STEP
from stepscope.questions.compare.answers import bars_of, missing_cells, nothing_to_compare, over_sizes
from stepscope.questions.compile.cells import (
    KINDS,
    PARTS,
    CompileCell,
    CompilePair,
    CompileStudy,
    with_kernels,
)
from stepscope.questions.compile.findings import compile_findings
from stepscope.runs.metrics import memory_of

STUDY = "compile"
QUESTION = "What does torch.compile give the whole model, and what does it cost?"
TIMES, COST, REPORT, KERNELS, MEMORY, MISSING = (
    "Eager against compiled: medians, and the speed-up, with 95 % intervals",
    "What compiling costs, and after how many steps it has paid for itself",
    "What torch.compile did",
    "Kernels of a step before and after, by kind",
    "Memory of the step, and its change against eager",
    "Not compared",
)
_HELD = (
    ("forward_peak", "forward peak"),
    ("saved_for_backward", "saved for backward"),
    ("allocated_peak", "step's peak"),
    ("reserved_peak", "reserved"),
)


def answer_compile(study: CompileStudy, *, unread: int = 0) -> Answer:
    """The whole answer. `unread`: captures that could not be read.

    Raises InputError where no cell was measured both eager and compiled.
    """
    if not study.pairs:
        raise InputError(
            nothing_to_compare(study, verb=STUDY, asked="was measured", sides=f"{CompileCell.BASELINE} and compiled")
        )
    return measured_answer(
        study.pairs[0].base.run.environment,
        study=STUDY,
        question=QUESTION,
        date=max(cell.run.day for cell in study.cells),
        intervals=study.intervals,
        tables=(_times(study), _cost(study), _report(study), _kernels(study), _memory(study), _missing(study)),
        panels=_panels(study),
        findings=compile_findings(study, unread),
    )


def _times(study: CompileStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for pair in study.pairs:
        for part in PARTS:
            base, other, ratio = pair.base.samples(part), pair.other.samples(part), pair.ratio(part)
            if base is None or other is None or ratio is None:
                continue
            rows.append(
                (
                    pair.other.name,
                    pair.other.value,
                    part,
                    *median_within_ms(base),
                    *median_within_ms(other),
                    *times_within(ratio),
                    _doubts(pair) if part == STEP else "",
                )
            )
    heads = (
        "eager ms", "eager from", "eager to", "compiled ms", "compiled from", "compiled to", "speed-up",
        "speed-up from", "speed-up to", "findings",
    )  # fmt: skip
    return Table(title=TIMES, columns=("cell", "compile", "phase", *heads), rows=tuple(rows))


def _doubts(pair: CompilePair) -> str:
    kinds = doubting_kinds(pair.base.run, pair.other.run)
    return ", ".join(dict.fromkeys([*kinds, *([pair.other.fault.kind] if pair.other.fault else [])]))


def _cost(study: CompileStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for pair in study.pairs:
        paid, report = pair.payback, pair.other.run.evidence.compilation
        spent_s = _spent_until_even(pair)
        rows.append(
            (
                pair.other.name,
                pair.other.value,
                digits(pair.base.first_step_s),
                digits(pair.other.first_step_s),
                digits(report.compile_s) if report else None,
                digits(paid.extra_s) if paid else None,
                milliseconds(paid.won_s) if paid else None,
                paid.steps if paid else None,
                paid.least if paid else None,
                paid.most if paid else None,
                digits(spent_s),
            )
        )
    heads = (
        "eager first step s", "compiled first step s", "of it dynamo's s", "costs s", "a step wins ms",
        "paid after steps", "steps from", "steps to", "of eager steps s",
    )  # fmt: skip
    return Table(title=COST, columns=("cell", "compile", *heads), rows=tuple(rows))


def _spent_until_even(pair: CompilePair) -> float | None:
    paid = pair.payback
    return paid.steps * pair.base.time_s if paid and paid.steps is not None else None


def _report(study: CompileStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for cell in (pair.other for pair in study.pairs):
        report, generated = cell.run.evidence.compilation, cell.generated if cell.on_gpu else None
        counted: tuple[Cell, ...] = (None,) * 6
        reasons: tuple[str, ...] = ()
        if report is not None:
            frames = f"{report.frames_compiled} of {report.frames_total}"
            numbers = (report.graphs, report.graph_breaks, report.recompiles)
            counted = (frames, *numbers, report.limit_hit, report.cached_graphs)
            reasons = (*report.graph_break_reasons, *report.recompile_reasons)
        rows.append(
            (
                cell.name,
                cell.value,
                cell.ran,
                *counted,
                None if generated is None else round(generated),
                "; ".join(reasons),
            )
        )
    heads = (
        "what ran", "frames compiled", "graphs", "graph breaks", "recompiles", "limit hit", "from caches",
        "generated kernels", "reasons",
    )  # fmt: skip
    return Table(title=REPORT, columns=("cell", "compile", *heads), rows=tuple(rows))


def _kernels(study: CompileStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for pair, kernels in with_kernels(study):
        named = [(kind, *kernels.of([kind])) for kind in KINDS]
        for name, before, after in [*named, ("all kernels", *kernels.of())]:
            if before.calls or after.calls:
                counts = (round(before.calls), round(after.calls))
                rows.append((pair.other.name, pair.other.value, name, *counts, *_change(before.busy_s, after.busy_s)))
        rows.append((pair.other.name, pair.other.value, "no kernel", None, None, *_change(*kernels.none_s)))
    heads = ("eager", "compiled", "eager ms", "compiled ms", "won ms")
    return Table(title=KERNELS, columns=("cell", "compile", "kernels", *heads), rows=tuple(rows))


def _change(before_s: float, after_s: float) -> tuple[Cell, Cell, Cell]:
    return milliseconds(before_s), milliseconds(after_s), milliseconds(before_s - after_s)


def _memory(study: CompileStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for pair in study.pairs:
        for field, name in _HELD:
            before, after = memory_of(pair.base.run, field), memory_of(pair.other.run, field)
            if before is not None and after is not None:
                change = percent(pair.memory_change(field))
                rows.append((pair.other.name, pair.other.value, name, gibibytes(before), gibibytes(after), change))
    heads = ("figure", "eager GiB", "compiled GiB", "%")
    return Table(title=MEMORY, columns=("cell", "compile", *heads), rows=tuple(rows))


def _missing(study: CompileStudy) -> Table:
    alone = [(cell.name, cell.value, f"no {_counterpart(cell)} run beside it") for cell in study.alone]
    return missing_cells(MISSING, CompileCell.FIELD, study.unmeasured, alone)


def _counterpart(cell: CompileCell) -> str:
    return "compiled" if cell.is_base else cell.BASELINE


def _panels(study: CompileStudy) -> tuple[Panel, ...]:
    several = len({pair.other.shape for pair in study.pairs}) > 1
    speed_ups = [(pair.other, pair.speed_up.value, pair.doubted) for pair in study.pairs]
    paid = [(pair.other, pair.payback.steps, pair.doubted) for pair in study.pairs if pair.payback]
    steps = [(cell, float(count), doubted) for cell, count, doubted in paid if count is not None]
    return (
        *over_sizes("speed-up of the step over eager", speed_ups, several_shapes=several),
        *over_sizes("steps until compiling is paid for", steps, several_shapes=several, y_log=True),
        *bars_of(study, STEP),
    )
