"""The answer to "how much faster is lower precision, and why": tables, curves, and what follows from them."""

from collections.abc import Sequence

from stepscope.analysis.doubts import doubt_mark, doubting_kinds
from stepscope.analysis.metrics import median_s, memory_of
from stepscope.analysis.precision_speed import BASELINE, SpeedStudy, TimedCell
from stepscope.analysis.precision_speed_findings import speed_findings
from stepscope.core.errors import InputError
from stepscope.core.experiment import Cell, Experiment, Panel, Point, Table
from stepscope.core.samples import INTERVALS
from stepscope.core.units import GIB

STUDY = "speed"
QUESTION = "How much faster are forward and backward in lower precision, and which part of them is it?"
TIMES, MEMORY, PARTS, LAW, MISSING = (
    "Forward and backward: medians, with 95 % intervals",
    "Memory of the step, and its change against fp32",
    "Where the time of forward and backward lies, by a captured step",
    "Amdahl's law: fp32's time in parts, and how many times as fast each part is",
    "Not measured",
)


def answer_speed(study: SpeedStudy, *, lacking: Sequence[str] = (), unread: int = 0) -> Experiment:
    """The whole answer. `lacking`: dtypes that the device does not have; `unread`: captures that could not be read.

    Raises InputError where no cell was measured both in fp32 and in another dtype.
    """
    if not study.pairs:
        raise InputError(_nothing_to_compare(study))
    first = study.pairs[0].base.run.environment
    tables = (_times(study), _memory(study), _parts(study), _law(study), _missing(study))
    return Experiment(
        study=STUDY,
        question=QUESTION,
        device=first.device_name if first else "",
        versions=dict(first.versions) if first else {},
        settings={"intervals": INTERVALS},
        tables=tuple(table for table in tables if table.rows),
        panels=_panels(study),
        findings=tuple(speed_findings(study, lacking, unread)),
    )


def _nothing_to_compare(study: SpeedStudy) -> str:
    if not study.cells and not study.unmeasured:
        return "no run here (of those asked for) has a backward: measure with `stepscope study speed`"
    if study.unmeasured:
        cell = study.unmeasured[0]
        return f"nothing to compare: {cell.name} in {cell.dtype} {_why(cell)}"
    dtypes = ", ".join(dict.fromkeys(cell.dtype for cell in study.cells))
    return (
        f"nothing to compare: no cell here was measured both in {BASELINE} and in another dtype (there is {dtypes}); "
        "give the folder of the others too, by a second --read"
    )


def _why(cell: TimedCell) -> str:
    failure = cell.run.failure
    if failure is None:
        return f"ended {cell.run.status}"
    return f"ended {cell.run.status} ({failure.where}): {failure.message}"


def _times(study: SpeedStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for cell in study.cells:
        pair = study.pair_of(cell)
        interval = cell.both.interval() if cell.both else None
        of_ratio = pair.speed_up.interval if pair else None
        rows.append(
            (
                cell.name,
                cell.dtype,
                *(_ms(median_s(cell.run, phase)) for phase in ("forward", "backward", "forward-backward")),
                _ms(interval.low) if interval else None,
                _ms(interval.high) if interval else None,
                _digits(pair.speed_up.value) if pair else None,
                _digits(of_ratio.low) if of_ratio else None,
                _digits(of_ratio.high) if of_ratio else None,
                ", ".join(doubting_kinds(cell.run)),
            )
        )
    heads = (
        "forward ms", "backward ms", "both ms", "both from", "both to", "speed-up", "speed-up from", "speed-up to",
        "findings",
    )  # fmt: skip
    return Table(title=TIMES, columns=("cell", "dtype", *heads), rows=tuple(rows))


def _memory(study: SpeedStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for cell in study.cells:
        pair = study.pair_of(cell)
        row: list[Cell] = []
        for field in ("forward_peak", "saved_for_backward"):
            held = memory_of(cell.run, field)
            change = pair.memory_change(field) if pair else None
            row += [_digits(held / GIB) if held is not None else None, _percent(change)]
        if row[0] is not None or row[2] is not None:
            rows.append((cell.name, cell.dtype, *row))
    heads = ("forward peak GiB", "forward peak %", "saved for backward GiB", "saved for backward %")
    return Table(title=MEMORY, columns=("cell", "dtype", *heads), rows=tuple(rows))


def _parts(study: SpeedStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for cell in study.cells:
        parts = cell.parts
        if parts is None:
            continue
        rows.append(
            (
                cell.name,
                cell.dtype,
                round(parts.kernels),
                _ms(parts.products_s),
                _ms(parts.rest_s),
                _ms(parts.casts_s),
                _ms(parts.between_s),
                _percent(parts.product_share),
                _percent(parts.between_s / parts.total_s if parts.between_s is not None else None),
            )
        )
    heads = (
        "kernels", "products ms", "other kernels ms", "of them copies, casts ms", "no kernel ms",
        "products % of kernel time", "no kernel %",
    )  # fmt: skip
    return Table(title=PARTS, columns=("cell", "dtype", *heads), rows=tuple(rows))


def _law(study: SpeedStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for pair in study.pairs:
        law = pair.amdahl
        if law is None:
            continue
        rows.append(
            (
                pair.other.name,
                pair.other.dtype,
                _percent(law.product_share),
                _digits(law.products),
                _digits(law.rest),
                _ms(law.products_gain_s),
                _ms(law.rest_gain_s),
                _ms(law.between_gain_s),
                _digits(law.kernels),
                _digits(law.whole),
                _digits(pair.speed_up.value),
                _digits(law.limit),
            )
        )
    heads = (
        "fp32 in products %", "products x", "others x", "won in products ms", "in others ms", "where no kernel ran ms",
        "kernels x", "by the parts x", "measured x", "limit x",
    )  # fmt: skip
    return Table(title=LAW, columns=("cell", "dtype", *heads), rows=tuple(rows))


def _missing(study: SpeedStudy) -> Table:
    rows = tuple((cell.name, cell.dtype, _why(cell)) for cell in study.unmeasured)
    return Table(title=MISSING, columns=("cell", "dtype", "why"), rows=rows)


def _panels(study: SpeedStudy) -> tuple[Panel, ...]:
    many = len({cell.shape for cell in study.cells}) > 1
    speed_ups = tuple(
        Point(
            line=_line(pair.other, many),
            x=_millions(pair.other),
            y=pair.speed_up.value,
            doubted=bool(doubt_mark(pair.base.run, pair.other.run)),
        )
        for pair in study.pairs
    )
    shares = tuple(
        Point(line=_line(cell, many), x=_millions(cell), y=cell.parts.product_share * 100)
        for cell in study.cells
        if cell.parts is not None
    )
    panels = [("speed-up of forward and backward over fp32", speed_ups), ("products, % of kernel time", shares)]
    return tuple(
        Panel(x_title="million parameters", y_title=title, points=points, x_log=True, y_log=False)
        for title, points in panels
        if points
    )


def _line(cell: TimedCell, many: bool) -> str:
    return f"{cell.dtype}, {cell.shape}" if many else cell.dtype


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else _digits(seconds * 1e3)


def _percent(share: float | None) -> float | None:
    return None if share is None else round(share * 100, 1)


def _digits(value: float | None) -> float | None:
    """Four significant digits."""
    return None if value is None else float(f"{value:.4g}")


def _millions(cell: TimedCell) -> float:
    return float(f"{cell.parameters / 1e6:.4g}")
