"""Sums of many small numbers: a sum in few bits stops growing long before its addends are used up.

A sum s in a format takes an addend a only if s + a rounds to another number: a must be more than half a unit in the
last place of s (at exactly half, ties go to the even neighbour). A sum of equal addends so stops at the first s whose
unit in the last place is twice the addend or more. Kahan 1965 carries what was lost along in a second number; pairwise
summation (Higham 1993) adds numbers of equal size, so that few meet a much larger one.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from stepscope.core.experiment import Cell, Experiment, Panel, Point, Table
from stepscope.core.finding import Finding
from stepscope.core.float_format import FORMATS
from stepscope.numerics.setting import device_name, versions

SUMS = ((1_000, 0.01), (10_000, 0.001))
"""How many addends, and which."""

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ADDENDS = (*DTYPES, "tf32", "fp8-e4m3", "fp8-e5m2")
"""TF32 and the formats of 8 bits exist as what a matrix unit reads, not as what it adds in: they are addends, and no
accumulators. PyTorch has no arithmetic in them; their number is rounded from its bits, and held in fp32, exactly."""

_CURVE_POINTS = 200


@dataclass(frozen=True)
class _Sum:
    """One sum, addend by addend."""

    accumulator: str
    addend: str
    method: str
    count: int
    each: float
    result: float
    stopped_after: int | None
    """Addends after which the sum did not change any more; None if the last still changed it."""
    curve: tuple[tuple[int, float], ...]

    @property
    def exact(self) -> float:
        return self.count * self.each


def study_accumulation(tell: Callable[..., None] | None = None) -> Experiment:
    """Every pair of accumulator and addend, for each of SUMS; the remedies in each accumulator."""
    sums: list[_Sum] = []
    for count, each in SUMS:
        for accumulator, addend in itertools.product(DTYPES, ADDENDS):
            sums.append(_in_turn(accumulator, addend, count, each))
        for dtype in DTYPES:
            sums += [_kahan(dtype, count, each), _pairwise(dtype, count, each)]
    columns = ("accumulator", "addend", "method", "result", "error", "stopped after", "unit in the last place there")
    tables = tuple(
        Table(
            title=f"{count:,} x {each}",
            columns=columns,
            rows=tuple(_row(found) for found in sums if found.count == count),
        )
        for count, each in SUMS
    )
    panels = tuple(
        Panel(
            x_title="addends",
            y_title=f"sum of {count:,} x {each}",
            points=tuple(
                Point(line=f"{found.accumulator} + {found.addend}", x=float(x), y=y)
                for found in sums
                if found.count == count and found.method == "in turn" and found.addend == found.accumulator
                for x, y in found.curve
            ),
            x_log=False,
            y_log=False,
        )
        for count, each in SUMS
    )
    return Experiment(
        study="accumulation",
        question="Where does a sum of many small numbers stop growing?",
        device=device_name(torch.device("cpu")),
        versions=versions(),
        tables=tables,
        panels=panels,
        findings=tuple(_findings(sums)),
    )


def _in_turn(accumulator: str, addend: str, count: int, each: float) -> _Sum:
    total = torch.tensor(0.0, dtype=DTYPES[accumulator])
    small = torch.tensor(FORMATS[addend].round(each), dtype=DTYPES.get(addend, torch.float32))
    curve, last, stopped = [], 0.0, 0
    every = max(1, count // _CURVE_POINTS)
    for i in range(1, count + 1):
        # In place: PyTorch adds at the higher precision of the two, and rounds once to the accumulator's.
        total += small
        value = total.item()
        if value != last:
            last, stopped = value, i
        if i % every == 0:
            curve.append((i, value))
    return _Sum(
        accumulator, addend, "in turn", count, each, last, stopped if stopped < count else None, tuple(curve)
    )  # fmt: skip


def _kahan(dtype: str, count: int, each: float) -> _Sum:
    """s and c together hold the sum: c is what s lost."""
    small = torch.tensor(each, dtype=DTYPES[dtype])
    total, lost = torch.zeros_like(small), torch.zeros_like(small)
    for _ in range(count):
        corrected = small - lost
        longer = total + corrected
        lost = (longer - total) - corrected
        total = longer
    return _Sum(dtype, dtype, "Kahan", count, each, total.item(), None, ())


def _pairwise(dtype: str, count: int, each: float) -> _Sum:
    """Neighbours are added, then the sums of neighbours, until one is left."""
    values = torch.full((count,), each, dtype=DTYPES[dtype])
    while len(values) > 1:
        odd = values[-1:] if len(values) % 2 else values[:0]
        values = torch.cat([values[0 : len(values) - len(odd) : 2] + values[1::2], odd])
    return _Sum(dtype, dtype, "pairwise", count, each, values.item(), None, ())


def _row(found: _Sum) -> tuple[Cell, ...]:
    unit = FORMATS[found.accumulator].spacing(found.result) if found.stopped_after is not None else None
    error = found.result - found.exact
    return (found.accumulator, found.addend, found.method, found.result, error, found.stopped_after, unit)


def _findings(sums: list[_Sum]) -> list[Finding]:
    return [_stop(found) for found in sums if found.stopped_after and found.accumulator == found.addend] + [
        finding for count, each in SUMS for finding in _remedies([s for s in sums if s.count == count], each)
    ]


def _stop(found: _Sum) -> Finding:
    half = FORMATS[found.accumulator].spacing(found.result) / 2
    small = FORMATS[found.addend].round(found.each)
    return Finding(
        kind="sum-stops",
        severity="note",
        sentence=f"In {found.accumulator} the sum of {found.count:,} x {found.each} stops at {found.result!r} after "
        f"{found.stopped_after:,} addends: half a unit in the last place there is {half:.6g}, and the addend, "
        f"{small:.6g} in {found.addend}, is {'exactly that' if small == half else 'less'}.",
        evidence={"result": found.result, "stopped_after": found.stopped_after, "half_unit": half, "addend": small},
    )


def _remedies(sums: list[_Sum], each: float) -> Iterator[Finding]:
    """A finding for each 16-bit accumulator: the sums that the methods give."""
    for dtype in ("fp16", "bf16"):
        of = {found.method: found for found in sums if found.accumulator == dtype and found.addend == dtype}
        wide = next(s for s in sums if s.accumulator == "fp32" and s.addend == dtype)
        plain, kahan, pairwise = of["in turn"], of["Kahan"], of["pairwise"]
        yield Finding(
            kind="sum-remedies",
            severity="note",
            sentence=f"{plain.count:,} x {each} is {plain.exact:g}. In {dtype}, in turn, it comes to {plain.result!r}; "
            f"pairwise to {pairwise.result!r}, with Kahan's correction to {kahan.result!r}; with an fp32 accumulator "
            f"to {wide.result!r}, what is left of the error being the addend's own rounding to {dtype}.",
            evidence={
                "in_turn": plain.result, "pairwise": pairwise.result, "kahan": kahan.result, "fp32": wide.result,
            },
        )  # fmt: skip
