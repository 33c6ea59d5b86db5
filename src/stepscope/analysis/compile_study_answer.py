"""The answer to "what does torch.compile give, and what does it cost": tables, curves, and what follows from them."""

from stepscope.analysis.compile_study import (
    BASELINE,
    KINDS,
    PARTS,
    CompileCell,
    CompileStudy,
    Pair,
)
from stepscope.analysis.compile_study_findings import compile_findings
from stepscope.analysis.doubts import doubt_mark, doubting_kinds
from stepscope.analysis.metrics import memory_of
from stepscope.core.errors import InputError
from stepscope.core.experiment import Cell, Experiment, Panel, Point, Table
from stepscope.core.samples import INTERVALS, Samples
from stepscope.core.units import GIB

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


def answer_compile(study: CompileStudy, *, unread: int = 0) -> Experiment:
    """The whole answer. `unread`: captures that could not be read.

    Raises InputError where no cell was measured both eager and compiled.
    """
    if not study.pairs:
        raise InputError(_nothing_to_compare(study))
    first = study.pairs[0].base.run.environment
    tables = (_times(study), _cost(study), _report(study), _kernels(study), _memory(study), _missing(study))
    return Experiment(
        study=STUDY,
        question=QUESTION,
        device=first.device_name if first else "",
        versions=dict(first.versions) if first else {},
        settings={"intervals": INTERVALS},
        tables=tuple(table for table in tables if table.rows),
        panels=_panels(study),
        findings=tuple(compile_findings(study, unread)),
    )


def _nothing_to_compare(study: CompileStudy) -> str:
    if study.unmeasured:
        cell = study.unmeasured[0]
        return f"nothing to compare: {cell.label} {why(cell)}"
    if not study.cells:
        return "no run here (of those asked for) was measured: measure with `stepscope study compile`"
    modes = ", ".join(dict.fromkeys(cell.mode for cell in study.cells))
    return (
        f"nothing to compare: no cell here was measured both {BASELINE} and compiled (there is {modes}); "
        "give the folder of the others too, by a second --read"
    )


def why(cell: CompileCell) -> str:
    """Why there is no result of this cell."""
    failure = cell.run.failure
    if failure is None:
        return f"ended {cell.run.status}"
    return f"ended {cell.run.status} ({failure.where}): {failure.message}"


def _times(study: CompileStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for pair in study.pairs:
        for part in PARTS:
            base, other, ratio = pair.base.samples(part), pair.other.samples(part), pair.ratio(part)
            if base is None or other is None or ratio is None:
                continue
            within = ratio.interval
            rows.append(
                (
                    pair.other.name,
                    pair.other.mode,
                    part,
                    *_median_within(base),
                    *_median_within(other),
                    _digits(ratio.value),
                    _digits(within.low) if within else None,
                    _digits(within.high) if within else None,
                    _doubts(pair) if part == "step" else "",
                )
            )
    heads = (
        "eager ms", "eager from", "eager to", "compiled ms", "compiled from", "compiled to", "speed-up",
        "speed-up from", "speed-up to", "findings",
    )  # fmt: skip
    return Table(title=TIMES, columns=("cell", "compile", "phase", *heads), rows=tuple(rows))


def _median_within(samples: Samples) -> tuple[Cell, Cell, Cell]:
    within = samples.interval()
    low, high = (within.low, within.high) if within else (None, None)
    return _ms(samples.median_s), _ms(low), _ms(high)


def _doubts(pair: Pair) -> str:
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
                pair.other.mode,
                _digits(pair.base.first_step_s),
                _digits(pair.other.first_step_s),
                _digits(report.compile_s) if report else None,
                _digits(paid.extra_s) if paid else None,
                _ms(paid.won_s) if paid else None,
                paid.steps if paid else None,
                paid.least if paid else None,
                paid.most if paid else None,
                _digits(spent_s),
            )
        )
    heads = (
        "eager first step s", "compiled first step s", "of it dynamo's s", "costs s", "a step wins ms",
        "paid after steps", "steps from", "steps to", "of eager steps s",
    )  # fmt: skip
    return Table(title=COST, columns=("cell", "compile", *heads), rows=tuple(rows))


def _spent_until_even(pair: Pair) -> float | None:
    paid, step_s = pair.payback, pair.base.step_s
    return paid.steps * step_s if paid and paid.steps is not None and step_s else None


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
                cell.mode,
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
    for pair, kernels in study.with_kernels:
        named = [(kind, *kernels.of([kind])) for kind in KINDS]
        for name, before, after in [*named, ("all kernels", *kernels.of())]:
            if before.calls or after.calls:
                counts = (round(before.calls), round(after.calls))
                rows.append((pair.other.name, pair.other.mode, name, *counts, *_change(before.busy_s, after.busy_s)))
        rows.append((pair.other.name, pair.other.mode, "no kernel", None, None, *_change(*kernels.none_s)))
    heads = ("eager", "compiled", "eager ms", "compiled ms", "won ms")
    return Table(title=KERNELS, columns=("cell", "compile", "kernels", *heads), rows=tuple(rows))


def _change(before_s: float, after_s: float) -> tuple[Cell, Cell, Cell]:
    return _ms(before_s), _ms(after_s), _ms(before_s - after_s)


def _memory(study: CompileStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for pair in study.pairs:
        for field, name in _HELD:
            before, after = memory_of(pair.base.run, field), memory_of(pair.other.run, field)
            if before is not None and after is not None:
                change = _percent(pair.memory_change(field))
                rows.append((pair.other.name, pair.other.mode, name, _gib(before), _gib(after), change))
    heads = ("figure", "eager GiB", "compiled GiB", "%")
    return Table(title=MEMORY, columns=("cell", "compile", *heads), rows=tuple(rows))


def _missing(study: CompileStudy) -> Table:
    rows = [(cell.name, cell.mode, why(cell)) for cell in study.unmeasured]
    rows += [(cell.name, cell.mode, f"no {_counterpart(cell)} run beside it") for cell in study.alone]
    return Table(title=MISSING, columns=("cell", "compile", "why"), rows=tuple(rows))


def _counterpart(cell: CompileCell) -> str:
    return "compiled" if cell.mode == BASELINE else BASELINE


def _panels(study: CompileStudy) -> tuple[Panel, ...]:
    many = len({pair.other.shape for pair in study.pairs}) > 1
    speed_ups = tuple(
        Point(line=_line(pair.other, many), x=_millions(pair.other), y=pair.speed_up.value, doubted=_is_doubted(pair))
        for pair in study.pairs
    )
    paid = tuple(
        Point(
            line=_line(pair.other, many),
            x=_millions(pair.other),
            y=float(pair.payback.steps),
            doubted=_is_doubted(pair),
        )
        for pair in study.pairs
        if pair.payback and pair.payback.steps is not None
    )
    panels = (("speed-up of the step over eager", speed_ups, False), ("steps until compiling is paid for", paid, True))
    return tuple(
        Panel(x_title="million parameters", y_title=title, points=points, x_log=True, y_log=log)
        for title, points, log in panels
        if points
    )


def _is_doubted(pair: Pair) -> bool:
    return bool(doubt_mark(pair.base.run, pair.other.run))


def _line(cell: CompileCell, many: bool) -> str:
    return f"{cell.mode}, {cell.shape}" if many else cell.mode


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else _digits(seconds * 1e3)


def _gib(count: int | None) -> float | None:
    return None if count is None else _digits(count / GIB)


def _percent(share: float | None) -> float | None:
    return None if share is None else round(share * 100, 1)


def _digits(value: float | None) -> float | None:
    """Four significant digits."""
    return None if value is None else float(f"{value:.4g}")


def _millions(cell: CompileCell) -> float:
    return float(f"{cell.parameters / 1e6:.4g}")
