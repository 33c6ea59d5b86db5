"""The answer to "how much faster is lower precision, and why": tables, curves, and what follows from them."""

from collections.abc import Sequence

from stepscope.core.answer import Answer, Cell, Panel, Table, measured_answer
from stepscope.core.doubts import doubting_kinds
from stepscope.core.errors import InputError
from stepscope.core.figures import digits, gibibytes, milliseconds, percent, times_within, within_ms
from stepscope.core.range_names import BACKWARD, FORWARD
from stepscope.questions.compare.answers import missing_cells, nothing_to_compare, over_sizes
from stepscope.questions.speed.cells import SpeedStudy, TimedCell
from stepscope.questions.speed.findings import speed_findings
from stepscope.runs.metrics import median_s, memory_of

STUDY = "speed"
QUESTION = "How much faster are forward and backward in lower precision, and which part of them is it?"
TIMES, MEMORY, PARTS, LAW, MISSING = (
    "Forward and backward: medians, with 95 % intervals",
    "Memory of the step, and its change against fp32",
    "Where the time of forward and backward lies, by a captured step",
    "Amdahl's law: fp32's time in parts, and how many times as fast each part is",
    "Not measured",
)


def answer_speed(study: SpeedStudy, *, lacking: Sequence[str] = (), unread: int = 0) -> Answer:
    """The whole answer. `lacking`: dtypes that the device does not have; `unread`: captures that could not be read.

    Raises InputError where no cell was measured both in fp32 and in another dtype.
    """
    if not study.pairs:
        sides = f"in {TimedCell.BASELINE} and in another dtype"
        raise InputError(nothing_to_compare(study, verb=STUDY, asked="has a backward", sides=sides))
    missing = missing_cells(MISSING, TimedCell.FIELD, study.unmeasured)
    return measured_answer(
        study.pairs[0].base.run.environment,
        study=STUDY,
        question=QUESTION,
        date=max(cell.run.day for cell in study.cells),
        intervals=study.intervals,
        tables=(_times(study), _memory(study), _parts(study), _law(study), missing),
        panels=_panels(study),
        findings=speed_findings(study, lacking, unread),
    )


def _times(study: SpeedStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for cell in study.cells:
        pair = study.pair_of(cell)
        medians = (milliseconds(median_s(cell.run, phase)) for phase in (FORWARD, BACKWARD, "forward-backward"))
        speed_up = times_within(pair.speed_up if pair else None)
        doubts = ", ".join(doubting_kinds(cell.run))
        rows.append((cell.name, cell.value, *medians, *within_ms(cell.samples(cell.PART)), *speed_up, doubts))
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
            row += [gibibytes(held), percent(change)]
        if row[0] is not None or row[2] is not None:
            rows.append((cell.name, cell.value, *row))
    heads = ("forward peak GiB", "forward peak %", "saved for backward GiB", "saved for backward %")
    return Table(title=MEMORY, columns=("cell", "dtype", *heads), rows=tuple(rows))


def _parts(study: SpeedStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for cell in study.cells:
        parts = cell.parts
        if parts is None:
            continue
        times = map(milliseconds, (parts.products_s, parts.rest_s, parts.casts_s, parts.between_s))
        between = parts.between_s / parts.total_s if parts.between_s is not None else None
        shares = (percent(parts.product_share), percent(between))
        rows.append((cell.name, cell.value, round(parts.kernels), *times, *shares))
    heads = (
        "kernels", "products ms", "other kernels ms", "of them copies, casts ms", "no kernel ms",
        "products % of kernel time", "no kernel %",
    )  # fmt: skip
    return Table(title=PARTS, columns=("cell", "dtype", *heads), rows=tuple(rows))


def _law(study: SpeedStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for pair in study.pairs:
        if (law := pair.amdahl) is not None:
            faster = (percent(law.product_share), digits(law.products), digits(law.rest))
            won = map(milliseconds, (law.products_gain_s, law.rest_gain_s, law.between_gain_s))
            whole = map(digits, (law.kernels, law.whole, pair.speed_up.value, law.limit))
            rows.append((pair.other.name, pair.other.value, *faster, *won, *whole))
    heads = (
        "fp32 in products %", "products x", "others x", "won in products ms", "in others ms", "where no kernel ran ms",
        "kernels x", "by the parts x", "measured x", "limit x",
    )  # fmt: skip
    return Table(title=LAW, columns=("cell", "dtype", *heads), rows=tuple(rows))


def _panels(study: SpeedStudy) -> tuple[Panel, ...]:
    several = len({cell.shape for cell in study.cells}) > 1
    speed_ups = [(pair.other, pair.speed_up.value, pair.doubted) for pair in study.pairs]
    shares = [(cell, cell.parts.product_share * 100, False) for cell in study.cells if cell.parts is not None]
    return (
        *over_sizes("speed-up of forward and backward over fp32", speed_ups, several_shapes=several),
        *over_sizes("products, % of kernel time", shares, several_shapes=several),
    )
