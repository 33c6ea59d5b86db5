"""Sums of many small numbers: a sum in few bits stops growing long before its addends are used up.

A sum s in a format takes an addend a only if s + a rounds to another number: a must be more than half a unit in the
last place of s (at exactly half, ties go to the even neighbour). A sum of equal addends so stops at the first s whose
unit in the last place is twice the addend or more. Kahan 1965 carries what was lost along in a second number; pairwise
summation (Higham 1993) adds numbers of equal size, so that few meet a much larger one.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from stepscope.core.answer import Answer, Cell, Finding, Panel, Table, note
from stepscope.core.errors import InputError
from stepscope.core.float_formats import FORMATS
from stepscope.core.model_config import whole_number
from stepscope.core.options import NUMBERS, Option
from stepscope.core.units import counted
from stepscope.questions.question import Question

SUMS = ((1_000, 0.01), (10_000, 0.001))
"""How many addends, and which one, in each sum that is made when no other is asked for."""
LARGEST_COUNT = 100_000
ACCUMULATORS = ("fp32", "fp16", "bf16")
ADDENDS = (*ACCUMULATORS, "tf32", "fp8-e4m3", "fp8-e5m2")
"""TF32 and the formats of 8 bits exist as what a matrix unit reads, not as what it adds in: they are addends, and no
accumulators. PyTorch has no arithmetic in them; their number is rounded from its bits, and held in fp32, exactly."""

_CURVE_POINTS = 200

Addend = Annotated[
    float | None, Option("The number that is added again and again; 0.01 if only --count is given.", NUMBERS)
]
Count = Annotated[int | None, Option("How many addends; 1000 if only --addend is given.", NUMBERS)]


@dataclass(frozen=True)
class _Sum:
    """How one sum came out."""

    accumulator: str
    addend: str
    method: str
    count: int
    each: float
    """The addend, before the format rounds it."""
    result: float
    stopped_after: int | None = None
    """Addends after which the sum did not change any more; None if the last still changed it."""
    running: tuple[float, ...] = ()
    """The sum after each addend, where they are added in turn."""

    @property
    def exact(self) -> float:
        return self.count * self.each

    @property
    def plain(self) -> bool:
        """Whether addends of the accumulator's own format are added in turn."""
        return self.method == "in turn" and self.addend == self.accumulator


def study_accumulation(*, addend: Addend = None, count: Count = None) -> Answer:
    """Sums of many small numbers in every pair of accumulator and addend: where they stop growing, and why."""
    import torch

    from stepscope.questions.answers import computed_answer

    requested = SUMS
    if addend is not None or count is not None:
        requested = ((SUMS[0][0] if count is None else count, SUMS[0][1] if addend is None else addend),)
    for number, each in requested:
        whole_number(number, "--count", 1, LARGEST_COUNT)
        if not (math.isfinite(each) and each > 0):
            raise InputError(f"--addend is {each:g}: give a finite number above zero, as in 0.01")
    sums = {(number, each): _sums(number, each) for number, each in requested}
    plain = [case for case in itertools.chain(*sums.values()) if case.plain]
    return computed_answer(
        torch.device("cpu"),
        study="accumulation",
        question="Where does a sum of many small numbers stop growing?",
        settings={} if requested is SUMS else {"addend": requested[0][1], "count": requested[0][0]},
        tables=(
            *(_results(f"{number:,} x {each}", cases) for (number, each), cases in sums.items()),
            *(_running(each, cases) for (_, each), cases in sums.items()),
        ),
        panels=tuple(_panel(f"sum of {number:,} x {each}", cases) for (number, each), cases in sums.items()),
        findings=(
            *(_stop(case) for case in plain if case.stopped_after is not None or not math.isfinite(case.result)),
            *(finding for cases in sums.values() for finding in _remedies(cases)),
        ),
    )


def _sums(count: int, each: float) -> list[_Sum]:
    """The sum in turn in every accumulator and of every addend, and each accumulator's sums by other methods."""
    import torch

    from stepscope.questions.answers import FEW_BITS, dtype_of

    cases: list[_Sum] = []
    for accumulator, addend in itertools.product(ACCUMULATORS, ADDENDS):
        total = torch.tensor(0.0, dtype=dtype_of(accumulator))
        dtype = dtype_of(addend) if addend in FEW_BITS else torch.float32
        small = torch.tensor(FORMATS[addend].round(each), dtype=dtype)
        running, stopped = [0.0], 0
        for i in range(1, count + 1):
            # In place: PyTorch adds at the higher precision of the two, and rounds once to the accumulator's.
            total += small
            running.append(total.item())
            if running[-1] != running[-2]:
                stopped = i
        end = stopped if stopped < count else None
        cases.append(_Sum(accumulator, addend, "in turn", count, each, running[-1], end, tuple(running[1:])))
    for name in ACCUMULATORS:
        small = torch.tensor(each, dtype=dtype_of(name))
        # Kahan's correction: a second number carries what the sum lost.
        total, lost = torch.zeros_like(small), torch.zeros_like(small)
        for _ in range(count):
            corrected = small - lost
            longer = total + corrected
            lost = (longer - total) - corrected
            total = longer
        cases.append(_Sum(name, name, "Kahan", count, each, total.item()))
        # Neighbours are added, then the sums of neighbours, until one is left.
        values = small.repeat(count)
        while len(values) > 1:
            odd = values[-1:] if len(values) % 2 else values[:0]
            values = torch.cat([values[0 : len(values) - len(odd) : 2] + values[1::2], odd])
        cases.append(_Sum(name, name, "pairwise", count, each, values.item()))
    return cases


def _results(title: str, sums: list[_Sum]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for case in sums:
        stops = case.stopped_after is not None and math.isfinite(case.result)
        unit = FORMATS[case.accumulator].spacing(case.result) if stops else None
        error = case.result - case.exact
        rows.append((case.accumulator, case.addend, case.method, case.result, error, case.stopped_after, unit))
    columns = ("accumulator", "addend", "method", "result", "error", "stopped after", "unit in the last place there")
    return Table(title=title, columns=columns, rows=tuple(rows))


def _running(each: float, sums: list[_Sum]) -> Table:
    """The sums in turn after each of the first addends, then after 10, 20, 50, 100 ..., and how far each is off."""
    shown = {case.accumulator: case for case in sums if case.plain}
    mixed = next(case for case in sums if (case.accumulator, case.addend, case.method) == ("fp32", "fp16", "in turn"))
    shown["fp32 of fp16"] = mixed  # as a matrix unit adds
    count = mixed.count
    powers = (10**power for power in range(1, len(str(count))))
    places = [number for power in powers for number in (power, 2 * power, 5 * power) if number < count]
    rows: list[tuple[Cell, ...]] = []
    for number in (*range(1, min(10, count)), *places, count):
        exact = number * each
        reached = [case.running[number - 1] for case in shown.values()]
        rows.append((number, exact, *reached, *(float(f"{100 * (value / exact - 1):.3g}") for value in reached)))
    columns = ("addends", "exact sum", *(f"in {name}" for name in shown), *(f"{name} off by, %" for name in shown))
    return Table(title=f"Running sum, addend {each}", columns=columns, rows=tuple(rows))


def _panel(y_title: str, sums: list[_Sum]) -> Panel:
    from stepscope.questions.answers import curves

    points = (
        (f"{case.accumulator} + {case.addend}", float(i), case.running[i - 1])
        for case in sums
        if case.plain
        for every in [max(1, case.count // _CURVE_POINTS)]
        for i in range(every, case.count + 1, every)
    )
    return curves(points, x_title="addends", y_title=y_title)


def _stop(case: _Sum) -> Finding:
    """A finding that says why a sum does not reach its end: it stops, overflows, or never begins."""
    small = FORMATS[case.addend].round(case.each)
    evidence = {"result": case.result, "stopped_after": case.stopped_after, "addend": small}
    what = f"In {case.accumulator} the sum of {case.count:,} x {case.each}"
    if small == 0:
        return note("addend-vanishes", f"{what} stays 0: the addend is zero in {case.addend}.", evidence)
    if not math.isfinite(case.result):
        after = next(i for i, value in enumerate(case.running, start=1) if not math.isfinite(value))
        return note("sum-overflows", f"{what} overflows after {counted(after, 'addend')}.", evidence)
    half = FORMATS[case.accumulator].spacing(case.result) / 2
    return note(
        "sum-stops",
        f"{what} stops at {case.result!r} after {case.stopped_after:,} addends: half a unit in the last place "
        f"there is {half:.6g}, and the addend, {small:.6g} in {case.addend}, is "
        f"{'exactly that' if small == half else 'less'}.",
        {**evidence, "half_unit": half},
    )


def _remedies(sums: list[_Sum]) -> Iterator[Finding]:
    """A finding for each 16-bit accumulator: what each method of adding comes to."""
    for dtype in ("fp16", "bf16"):
        of = {case.method: case for case in sums if case.accumulator == dtype and case.addend == dtype}
        wide = next(s for s in sums if s.accumulator == "fp32" and s.addend == dtype)
        plain, kahan, pairwise = of["in turn"], of["Kahan"], of["pairwise"]
        left = f", what is left of the error being the addend's own rounding to {dtype}"
        yield note(
            "sum-remedies",
            f"{plain.count:,} x {plain.each} is {plain.exact:g}. In {dtype}, in turn, it comes to {plain.result!r}; "
            f"pairwise to {pairwise.result!r}, with Kahan's correction to {kahan.result!r}; with an fp32 accumulator "
            f"to {wide.result!r}{'' if wide.result == plain.exact else left}.",
            {"in_turn": plain.result, "pairwise": pairwise.result, "kahan": kahan.result, "fp32": wide.result},
        )


QUESTION = Question(
    "accumulation",
    study_accumulation,
    examples=("--only findings", "--addend 0.1 --count 5000"),
)
