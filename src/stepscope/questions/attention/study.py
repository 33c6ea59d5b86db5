"""Timings of attention, ordered and set beside one another: powers of the sequence, ratios, crossovers."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from stepscope.core.attention_timing import PRODUCTS, AttentionTiming, AttentionTimings
from stepscope.core.samples import Ratio
from stepscope.core.work.attention_call import SavedByFormula, backward_flops, forward_flops, saved_by_formula

FITTED = 3
"""Points of a slope: the longest sequences, where what grows slower no longer shows."""
BASELINE = "reference"


@dataclass(frozen=True, kw_only=True)
class Slope:
    """The p of y = c * sequence**p, nearest in logarithms (least squares), over the longest sequences."""

    power: float
    sequences: tuple[int, ...]


def fit_slope(points: Sequence[tuple[int, float]]) -> Slope | None:
    """The slope over the FITTED longest of (sequence, y); None for fewer than two, or if a y is not above zero."""
    last = sorted(points)[-FITTED:]
    if len({x for x, _ in last}) < 2 or any(y <= 0 for _, y in last):
        return None
    power = statistics.linear_regression([math.log(x) for x, _ in last], [math.log(y) for _, y in last]).slope
    return Slope(power=power, sequences=tuple(x for x, _ in last))


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The timings of one implementation over the sequences, everything else the same."""

    line: str
    dtype: str
    head_dim: int
    rows: tuple[AttentionTiming, ...]
    """Short sequences first."""

    @cached_property
    def measured(self) -> tuple[AttentionTiming, ...]:
        return tuple(row for row in self.rows if both_s(row) is not None)

    @property
    def slopes(self) -> dict[str, Slope | None]:
        """The fitted powers of the sequence of three figures: time, bytes held before backward, and peak bytes."""
        return {
            "time": self._slope(both_s),
            "before backward": self._slope(lambda row: row.memory.before_backward_bytes if row.memory else None),
            "peak": self._slope(lambda row: row.memory.peak_bytes if row.memory else None),
        }

    def _slope(self, figure: Callable[[AttentionTiming], float | None]) -> Slope | None:
        found = [(row.cell.shape.queries, figure(row)) for row in self.measured]
        return fit_slope([(length, value) for length, value in found if value is not None])

    def at(self, length: int) -> AttentionTiming | None:
        """The row of this sequence, if it has a time."""
        return next((row for row in self.measured if row.cell.shape.queries == length), None)

    @property
    def out_of_memory_at(self) -> int | None:
        """The shortest sequence that did not fit."""
        return next((r.cell.shape.queries for r in self.rows if r.outcome == "out of memory"), None)


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Two curves of one dtype and head_dim."""

    base: Curve
    other: Curve

    @cached_property
    def ratios(self) -> dict[int, Ratio]:
        """How many times as fast the other is, forward and backward, by sequence."""
        found: dict[int, Ratio] = {}
        for row in self.other.measured:
            length = row.cell.shape.queries
            base = self.base.at(length)
            ratio = row.both.speedup_over(base.both) if base and base.both and row.both else None
            if ratio is not None:
                found[length] = ratio
        return found

    @property
    def crossover(self) -> tuple[int, int] | None:
        """(the longest sequence at which it is slower, the next, from which on it is always faster).

        By their intervals, and there is none where it is faster at a shorter one: noise is no order that changes.
        """
        slower = [length for length, ratio in self.ratios.items() if not ratio.undecided and ratio.value < 1]
        faster = [length for length, ratio in self.ratios.items() if not ratio.undecided and ratio.value > 1]
        if not slower or not faster or min(faster) < max(slower):
            return None
        undecided = [length for length in self.ratios if length not in (*slower, *faster)]
        after = [length for length in faster if length > max(undecided, default=0)]
        return (max(slower), min(after)) if after else None


@dataclass(frozen=True, kw_only=True)
class AttentionStudy:
    """All curves, in the order of measuring."""

    timings: AttentionTimings
    curves: tuple[Curve, ...]

    @property
    def device_type(self) -> str:
        return self.timings.environment.device_type

    @cached_property
    def mixed(self) -> bool:
        """Whether calls differ in batch, heads or mask too, as those of a benchmark do: then nothing is a curve."""
        shapes = [row.cell.shape for row in self.timings.timings]
        return len({(shape.batch, shape.heads, shape.key_heads, shape.causal, shape.window) for shape in shapes}) > 1

    def same(self, curve: Curve, line: str) -> Curve | None:
        """The curve of that line in the same dtype and head_dim."""
        return next(
            (c for c in self.curves if (c.line, c.dtype, c.head_dim) == (line, curve.dtype, curve.head_dim)), None
        )

    def contests(self) -> list[Contest]:
        """Each implementation against attention written out; none where the two have no time for a common sequence."""
        found = []
        for curve in self.curves:
            base = self.same(curve, BASELINE)
            if base is not None and curve is not base:
                contest = Contest(base=base, other=curve)
                if contest.ratios:
                    found.append(contest)
        return found

    def saved_by_formula(self, row: AttentionTiming) -> SavedByFormula | None:
        return saved_by_formula(row.cell, self.device_type)

    def share(self, row: AttentionTiming) -> float | None:
        """FLOP/s of forward and backward over the ceiling's."""
        ceiling, rate = self.timings.ceilings.get(PRODUCTS[row.cell.dtype]), flops_per_s(row)
        return rate / ceiling if ceiling and rate else None


def arrange(timings: AttentionTimings) -> AttentionStudy:
    """The rows as curves; of a cell that was measured twice, the later."""
    cells = {row.cell: row for row in timings.timings}
    groups: dict[tuple[str, int, str], list[AttentionTiming]] = {}
    for row in cells.values():
        groups.setdefault((row.cell.dtype, row.cell.shape.head_dim, row.cell.line), []).append(row)
    curves = [
        Curve(
            line=line, dtype=dtype, head_dim=head_dim,
            rows=tuple(sorted(rows, key=lambda row: row.cell.shape.queries)),
        )
        for (dtype, head_dim, line), rows in groups.items()
    ]  # fmt: skip
    return AttentionStudy(timings=timings, curves=tuple(curves))


def both_s(row: AttentionTiming) -> float | None:
    """The median of forward and backward together, in seconds; None where there is no time."""
    return (row.both.median_s or None) if row.both else None


def flops_per_s(row: AttentionTiming) -> float | None:
    """FLOP/s of forward and backward together, by the convention of `work.attention_call`."""
    seconds = both_s(row)
    return (forward_flops(row.cell.shape) + backward_flops(row.cell.shape)) / seconds if seconds else None
