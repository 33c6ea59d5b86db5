"""The answer to "what does each attention cost": tables by sequence and implementation, curves, and what follows."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

from stepscope.core.answer import (
    Answer,
    Cell,
    Finding,
    Panel,
    Point,
    Table,
    error,
    known_columns,
    measured_answer,
    note,
    warning,
)
from stepscope.core.attention_call import (
    BYTES,
    CONVENTION,
    PRODUCTS,
    AttentionCell,
    AttentionTiming,
    AttentionTimings,
    call_flops,
    saved_by_formula,
)
from stepscope.core.errors import InputError
from stepscope.core.figures import digits, gibibytes, mebibytes, median_ms, milliseconds, percent, tera
from stepscope.core.parts import ATTENTIONS
from stepscope.core.samples import Interval, Ratio
from stepscope.core.units import MIB, counted, format_bytes, format_rate, format_share
from stepscope.questions.comparison import table_of_rows, times_as_fast, within

# Timings of attention, ordered and set beside one another: powers of the sequence, ratios, crossovers.


FITTED = 3
"""Points of a slope: the longest sequences, where what grows slower no longer shows."""
WIDE = 1.25
"""The ends of a wide interval are further apart than this factor."""
_LOOSE = 0.5
"""A power that may be off by so much does not tell linear growth from quadratic: it is not shown."""
BASELINE = "reference"


@dataclass(frozen=True, kw_only=True)
class Slope:
    """The p of y = c * sequence**p, nearest in logarithms (least squares), over the longest sequences."""

    power: float
    sequences: tuple[int, ...]
    reach: float = 0.0
    """How far the power may lie to each side, by the intervals of its points; infinite where one has none."""


def fit_slope(points: Sequence[tuple[int, float]], ends: Sequence[Interval | None] | None = None) -> Slope | None:
    """The slope over the FITTED longest of (sequence, y); None for fewer than two, or if a y is not above zero.

    ends: the interval of each y, None where it has none; without them every y is exact. The reach of the power is that
    of a least-squares slope with independent errors: the root of the sum of (weight * reach of log y) squared.
    """
    order = sorted(range(len(points)), key=points.__getitem__)[-FITTED:]
    last = [points[i] for i in order]
    if len({x for x, _ in last}) < 2 or any(y <= 0 for _, y in last):
        return None
    logs = [math.log(x) for x, _ in last]
    power = statistics.linear_regression(logs, [math.log(y) for _, y in last]).slope
    reach = 0.0
    if ends is not None:
        middle = statistics.fmean(logs)
        total = math.fsum((x - middle) ** 2 for x in logs)
        reaches = [_log_reach(y, ends[i]) for i, (_, y) in zip(order, last, strict=True)]
        # A weight of nothing times an unknown reach is nothing: the middle one of three is no part of the slope.
        reach = math.hypot(*((x - middle) / total * far for x, far in zip(logs, reaches, strict=True) if x != middle))
    return Slope(power=power, sequences=tuple(x for x, _ in last), reach=reach)


def _log_reach(y: float, ends: Interval | None) -> float:
    if ends is None or ends.low <= 0:
        return math.inf
    return max(math.log(y / ends.low), math.log(ends.high / y))


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
        """The fitted powers of the sequence of three figures: time, bytes held before backward, and peak bytes.

        A power of time that the noise leaves open is None.
        """
        times = [(row.cell.shape.queries, both_s(row) or 0.0) for row in self.measured]
        time = fit_slope(times, [time_ends(row) for row in self.measured])
        return {
            "time": time if time and time.reach < _LOOSE else None,
            "before backward": self._slope(lambda row: row.memory.before_backward_bytes if row.memory else None),
            "peak": self._slope(lambda row: row.memory.peak_bytes if row.memory else None),
        }

    def _slope(self, figure: Callable[[AttentionTiming], float | None]) -> Slope | None:
        points = [(row.cell.shape.queries, figure(row)) for row in self.measured]
        return fit_slope([(length, value) for length, value in points if value is not None])

    @property
    def loose(self) -> bool:
        """Whether there are times enough for a power, and too much noise in them."""
        return len(self.measured) > 1 and self.slopes["time"] is None

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
        ratios: dict[int, Ratio] = {}
        for row in self.other.measured:
            length = row.cell.shape.queries
            base = self.base.at(length)
            ratio = row.both.speedup_over(base.both) if base and base.both and row.both else None
            if ratio is not None:
                ratios[length] = ratio
        return ratios

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

    @cached_property
    def unsure(self) -> frozenset[AttentionCell]:
        """Cells whose time says nothing: its interval is wide, and wider than the factor between the time and that of
        the next shorter or longer sequence, or that of attention written out at the same one.
        """
        cells: set[AttentionCell] = set()
        for curve in self.curves:
            base = self.same(curve, BASELINE)
            for i, row in enumerate(curve.measured):
                beside = [*curve.measured[max(0, i - 1) : i], *curve.measured[i + 1 : i + 2]]
                if base is not None and base is not curve and (same := base.at(row.cell.shape.queries)):
                    beside.append(same)
                ends, time_s = time_ends(row), both_s(row) or 0.0
                factors = [max(time_s / other, other / time_s) for each in beside if (other := both_s(each))]
                if factors and (ends is None or (ends.high > WIDE * ends.low and ends.high > ends.low * min(factors))):
                    cells.add(row.cell)
        return frozenset(cells)

    def sure(self, curve: Curve) -> Curve:
        """The curve without its unsure times."""
        return replace(curve, rows=tuple(row for row in curve.rows if row.cell not in self.unsure))

    def contests(self) -> list[Contest]:
        """Each implementation against attention written out; none where the two have no time for a common sequence."""
        kept = []
        for curve in self.curves:
            base = self.same(curve, BASELINE)
            if base is not None and curve is not base:
                contest = Contest(base=base, other=curve)
                if contest.ratios:
                    kept.append(contest)
        return kept

    def grouped(self, field: str) -> list[tuple[str, Any, list[Curve]]]:
        """Curves of one dtype and one `line` or `head_dim`."""
        groups: dict[tuple[str, Any], list[Curve]] = {}
        for curve in self.curves:
            groups.setdefault((curve.dtype, getattr(curve, field)), []).append(curve)
        return [(*key, curves) for key, curves in groups.items()]

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
    for rows in groups.values():
        rows.sort(key=lambda row: row.cell.shape.queries)
    curves = (
        Curve(line=line, dtype=dtype, head_dim=head_dim, rows=tuple(rows))
        for (dtype, head_dim, line), rows in groups.items()
    )
    return AttentionStudy(timings=timings, curves=tuple(curves))


def both_s(row: AttentionTiming) -> float | None:
    """The median of forward and backward together, in seconds; None where there is no time."""
    return (row.both.median_s or None) if row.both else None


def time_ends(row: AttentionTiming) -> Interval | None:
    """The interval of forward and backward together; the extremes where it has none; None below three passes."""
    if row.both is None or row.both.count < 3:
        return None
    return row.both.interval() or Interval(low=row.both.smallest_s or 0.0, high=row.both.largest_s or 0.0)


def flops_per_s(row: AttentionTiming) -> float | None:
    """FLOP/s of forward and backward together, by the convention of `work.attention_call`."""
    seconds = both_s(row)
    return (call_flops(row.cell.shape) + call_flops(row.cell.shape, backward=True)) / seconds if seconds else None


# What follows from timings of attention, in sentences made of the figures.


CLOSE = 0.02
"""A formula that is off by less says the same as the allocator, which rounds to blocks."""


def attention_findings(study: AttentionStudy) -> Iterator[Finding]:
    """The gate first, since without it no figure means anything."""
    yield from _gate(study)
    if not study.mixed:
        noise = _noise(study)
        yield from chain(_memory_runs_out(study), noise, _contests(study), _compiled_findings(study), _powers(study))
    yield from chain(_formula(study), _largest_matrix(study), _best(study), _unfinished(study))


def _gate(study: AttentionStudy) -> Iterator[Finding]:
    rows = [row for curve in study.curves for row in curve.rows]
    right = [row for row in rows if both_s(row) is not None]
    wrong = [row for row in rows if row.outcome == "wrong"]
    if right:
        least = min(row.checked for row in right)
        lines = dict.fromkeys(row.cell.line for row in right)
        yield note(
            "gate",
            f"Before it was timed, each of {len(lines)} implementations was right beside float64 attention "
            f"in its dtype and head_dim, output and gradients, on {least} call{'s' if least > 1 else ''} or more.",
            {"implementations": len(lines), "calls": least},
        )
    for line in dict.fromkeys(row.cell.line for row in wrong):
        of_line = [row for row in wrong if row.cell.line == line]
        yield error(
            "refused",
            f"No time of {line} is shown in {counted(len(of_line), 'cell')}: {of_line[0].reason}.",
            {"cells": len(of_line)},
        )
    names = study.timings.interpreted
    if names:
        yield warning(
            "interpreted",
            f"Triton's interpreter ran {', '.join(names)} on this CPU, in Python: whether it is right is the "
            "kernel's, its times are not.",
            {"implementations": len(names)},
        )


def _memory_runs_out(study: AttentionStudy) -> Iterator[Finding]:
    """For each line the shortest sequence that did not fit, and the longest that did with the same head_dim."""
    for dtype, line, curves in study.grouped("line"):
        fell = [(at, curve) for curve in curves if (at := curve.out_of_memory_at) is not None]
        if not fell:
            continue
        shortest, first = min(fell, key=lambda each: (each[0], each[1].head_dim))
        held = ""
        last = max(
            (row for row in first.measured if row.memory is not None and row.cell.shape.queries < shortest),
            key=lambda row: row.cell.shape.queries,
            default=None,
        )
        if last is not None and last.memory is not None:
            held = f"; at {last.cell.shape.queries:,} it still fits, with " + (
                f"{format_bytes(last.memory.before_backward_bytes)} held before backward (no allocator counts the peak)"
                if last.memory.peak_bytes is None
                else f"{format_bytes(last.memory.peak_bytes)} at its peak"
            )
        memory = study.timings.environment.memory_bytes
        of = f" of {format_bytes(memory)}" if memory else ""
        where = f"{dtype}, head_dim {first.head_dim}" if len(curves) > 1 else dtype
        yield note(
            "out of memory",
            f"{line} runs out of memory{of} at sequence {shortest:,} ({where}){held}.",
            {"sequence": shortest, "memory": memory},
        )


def _noise(study: AttentionStudy) -> Iterator[Finding]:
    """Times that say nothing, and the powers that are left out for it."""
    unsure = [row for curve in study.curves for row in curve.measured if row.cell in study.unsure]
    loose = [curve for curve in study.curves if curve.loose]
    if not unsure and not loose:
        return
    sentences = []
    if unsure:
        first = unsure[0]
        ends = time_ends(first)
        which = (
            f"{milliseconds(ends.low):.3g} to {milliseconds(ends.high):.3g} ms" if ends else "fewer than three passes"
        )
        sentences.append(
            f"In {counted(len(unsure), 'cell')} the interval of the time is wider than what the time is compared by "
            f"({first.cell}: {which}): the tables name them as unsure, and no sentence here rests on them."
        )
    if loose:
        lines = ", ".join(dict.fromkeys(curve.line for curve in loose))
        sentences.append(f"The times of {lines} vary too much for a power of the sequence.")
    yield warning(
        "noise",
        f"{' '.join(sentences)} Give each cell more --seconds, or a quieter machine.",
        {"cells": len(unsure), "powers left out": len(loose)},
    )


def _contests(study: AttentionStudy) -> Iterator[Finding]:
    """How many times as fast as written out, at the longest sequence that both have; and where the order changes."""
    contests = [contest for contest in study.contests() if not contest.other.line.endswith("compiled")]
    for dtype, line in dict.fromkeys((contest.other.dtype, contest.other.line) for contest in contests):
        of_line = [c for c in contests if (c.other.dtype, c.other.line) == (dtype, line)]
        longest = max(max(contest.ratios) for contest in of_line)
        at = {c.other.head_dim: c.ratios[longest] for c in of_line if longest in c.ratios}
        low, high = min(at, key=lambda d: at[d].value), max(at, key=lambda d: at[d].value)
        factor = times_as_fast(at[low])
        if low != high:
            ends = [
                f"; {r.low:.3g} to {r.high:.3g}" if (r := at[d].interval) and r.high > WIDE * r.low else ""
                for d in (low, high)
            ]
            factor = (
                f"{at[low].value:.3g} (head_dim {low}{ends[0]}) to {at[high].value:.3g} ({high}{ends[1]}) times as fast"
            )
        # As fast, by their intervals: another head_dim may differ.
        alike = [d for d, ratio in at.items() if ratio.undecided]
        which = f" with head_dim {', '.join(map(str, alike))}" if 0 < len(alike) < len(at) else ""
        doubt = f", which is not distinguishable from as fast{which}" if alike else ""
        kind = "faster" if at[low].value > 1 else "slower"
        several = len({contest.other.head_dim for contest in of_line}) > 1
        crossings = [
            f"slower up to {contest.crossover[0]:,} and faster from {contest.crossover[1]:,} on"
            + (f" with head_dim {contest.other.head_dim}" if several else "")
            for contest in of_line
            if contest.crossover
        ]
        crossing = f"; it is {', '.join(crossings)}" if crossings else ""
        yield note(
            "not distinguishable" if len(alike) == len(at) else kind,
            f"{line} is {factor} as {BASELINE} at sequence {longest:,} ({dtype}){doubt}{crossing}.",
            {"sequence": longest, "least": at[low].value, "most": at[high].value},
        )


def _compiled_findings(study: AttentionStudy) -> Iterator[Finding]:
    """Compiled beside eager of the same implementation, at the longest sequence of both."""
    contests = []
    for curve in study.curves:
        compiled = study.same(curve, f"{curve.line}, compiled")
        contest = Contest(base=study.sure(curve), other=study.sure(compiled)) if compiled else None
        if contest is not None and contest.ratios:
            contests.append(contest)
    for dtype, line in dict.fromkeys((c.base.dtype, c.base.line) for c in contests):
        of_line = [c for c in contests if (c.base.dtype, c.base.line) == (dtype, line)]
        longest = max(max(c.ratios) for c in of_line)
        values = [c.ratios[longest].value for c in of_line if longest in c.ratios]
        held = [
            row.memory.before_backward_bytes / base.memory.before_backward_bytes
            for c in of_line
            if (row := c.other.at(longest)) and (base := c.base.at(longest)) and row.memory and base.memory
        ]
        memory = f", holding {_span(held)} times the memory before backward" if held else ""
        yield note(
            "compiled",
            f"Compiled, {line} is {_span(values)} times as fast at sequence {longest:,} ({dtype}){memory}.",
            {"sequence": longest, "least": min(values), "most": max(values)},
        )


def _powers(study: AttentionStudy) -> Iterator[Finding]:
    """One sentence for each dtype: how memory and time grow."""
    for dtype in dict.fromkeys(curve.dtype for curve in study.curves):
        for what, figure in (("Memory before backward", "before backward"), ("Time", "time")):
            parts: list[str] = []
            evidence: dict[str, float | int | str | None] = {}
            for of_dtype, line, curves in study.grouped("line"):
                powers = [slope.power for curve in curves if (slope := curve.slopes[figure])]
                if of_dtype == dtype and powers:
                    parts.append(f"{_span(powers)} ({line})")
                    evidence[line] = round(sum(powers) / len(powers), 3)
            if parts:
                yield note(
                    "grows",
                    f"{what} grows with the sequence to the power {', '.join(parts)} in {dtype}, fitted over "
                    "the longest sequences of each.",
                    evidence,
                )


def _span(powers: Sequence[float]) -> str:
    low, high = f"{min(powers):.2f}", f"{max(powers):.2f}"
    return low if low == high else f"{low} to {high}"


def _formula(study: AttentionStudy) -> Iterator[Finding]:
    off: list[tuple[float, AttentionTiming]] = []
    for curve in study.curves:
        for row in curve.rows:
            formula = saved_by_formula(row.cell, study.timings.environment.device_type)
            if row.memory is not None and formula is not None:
                difference = abs(row.memory.saved_bytes - formula.bytes)
                off.append((difference / formula.bytes if formula.bytes else float(difference > 0), row))
    if not off:
        return
    close = sum(share < CLOSE for share, _ in off)
    worst, row = max(off, key=lambda entry: entry[0])
    most = f"; {row.cell} is furthest off, by {format_share(worst)}" if worst >= CLOSE else ""
    exact = sum(share == 0 for share, _ in off)
    yield note(
        "saved bytes",
        f"What autograd saves is what the formula says, to {format_share(CLOSE)}, in {close} of {len(off)} "
        f"cells, in {exact} of them to the byte{most}.",
        {"cells": len(off), "close": close, "exact": exact, "worst": worst},
    )


def _matrices(row: AttentionTiming) -> int:
    """How many matrices of scores a call keeps whole; 0 where it keeps none, nobody knows, or nothing was measured."""
    if row.memory is None or not row.memory.saved_bytes:
        return 0
    known = row.cell.compile == "none" and row.cell.shape.window is None
    memory = ATTENTIONS[row.cell.implementation].memory if known and row.cell.implementation in ATTENTIONS else None
    return _KEPT_MATRICES.get(memory or "", 0)


_KEPT_MATRICES = {"scores": 2, "math": 1}
"""Matrices of scores that are kept, by an attention's memory: written out, the exponentials and the softmax."""


def _matrix_bytes(cell: AttentionCell) -> tuple[int, str]:
    """The bytes of one matrix of scores, and how they are worked out. PyTorch's math computes 16 bits in fp32."""
    shape, size = cell.shape, BYTES[cell.dtype]
    each = max(size, 4) if ATTENTIONS[cell.implementation].memory == "math" else size
    total = shape.batch * shape.heads * shape.queries * shape.keys * each
    numbers = f"{shape.batch} x {shape.heads} x {shape.queries} x {shape.keys} x {each} B"
    return total, f"B x H x S x T = {numbers} = {format_bytes(total)}"


def _scores(study: AttentionStudy) -> Table:
    """The matrix of scores of each call that keeps it, multiplied out, beside what autograd was measured to save."""
    rows: dict[object, dict[str, Cell]] = {}
    for curve in study.curves:
        for row in curve.rows:
            if row.memory is not None and (count := _matrices(row)):
                each, arithmetic = _matrix_bytes(row.cell)
                whose = {"implementation": curve.line, "dtype": curve.dtype, "one matrix": arithmetic}
                rows.setdefault(  # it is as large with any head_dim
                    (*whose.values(),),
                    {
                        **whose,
                        "kept": count,
                        "with head_dim": curve.head_dim,
                        "measured MiB": mebibytes(row.memory.saved_bytes),
                        "of it %": percent(count * each / row.memory.saved_bytes),
                    },
                )
    return table_of_rows(SCORES, [*rows.values()])


def _largest_matrix(study: AttentionStudy) -> Iterator[Finding]:
    """The arithmetic of the largest saved matrix of scores, beside what was measured."""
    kept = [row for curve in study.curves for row in curve.rows if row.memory is not None and _matrices(row)]
    row = max(kept, key=lambda row: _matrix_bytes(row.cell)[0], default=None)
    if row is None or row.memory is None:
        return
    (each, arithmetic), count, saved = _matrix_bytes(row.cell), _matrices(row), row.memory.saved_bytes
    matrices = "matrix of scores is" if count == 1 else f"{count} matrices of scores are each"
    yield note(
        "saved scores",
        f"At sequence {row.cell.shape.queries:,} in {row.cell.dtype} {row.cell.line} keeps its scores: the {matrices} "
        f"{arithmetic}, {format_share(count * each / saved)} of the {format_bytes(saved)} that autograd was measured "
        "to save. They grow with the square of the sequence.",
        {"matrix": each, "kept": count, "measured": saved},
    )


def _best(study: AttentionStudy) -> Iterator[Finding]:
    """For each dtype who reaches most of the device."""
    for dtype in dict.fromkeys(curve.dtype for curve in study.curves):
        rows = [row for curve in study.curves if curve.dtype == dtype for row in study.sure(curve).measured]
        best = max(rows, key=lambda row: flops_per_s(row) or 0.0, default=None)
        rate = flops_per_s(best) if best else None
        if best is None or rate is None:
            continue
        share = study.share(best)
        of = f", {format_share(share)} of the best matrix product measured here" if share is not None else ""
        yield note(
            "rate",
            f"The highest rate in {dtype} is {format_rate(rate, 'FLOP/s')}, of {best.cell.line} at sequence "
            f"{best.cell.shape.queries:,} with head_dim {best.cell.shape.head_dim}{of}.",
            {"rate": rate, "share": share},
        )
    if any(curve.measured for curve in study.curves):
        yield note("convention", f"FLOPs are counted as {CONVENTION}.")


def _unfinished(study: AttentionStudy) -> Iterator[Finding]:
    """Launches that show where they should not, and cells without a time."""
    shown = [row for curve in study.curves for row in curve.measured if row.launches == "shown"]
    if shown and study.timings.launches == "hidden":
        yield warning(
            "launches",
            f"In {counted(len(shown), 'cell')} the host was slower than the lead it was given, so that launches may be "
            f"in the times: {shown[0].cell} first.",
            {"cells": len(shown)},
        )
    rows = [row for curve in study.curves for row in curve.rows]
    late = [row for row in rows if row.outcome in ("not reached", "interrupted")]
    if late:
        yield warning(
            "unfinished",
            f"Of {len(rows)} cells {len(late)} had not been measured at the end: {late[0].cell} first.",
            {"cells": len(late)},
        )
    failed = [row for row in rows if row.outcome == "failed"]
    if failed:
        yield error(
            "failed",
            f"In {counted(len(failed), 'cell')} it failed: {failed[0].cell} {failed[0].reason}.",
            {"cells": len(failed)},
        )


BOTH, FORWARD, BACKWARD, HELD, PEAK, RATES, SLOPES, SAVED, SCORES, CELLS, COMPILED, COMPILED_2025, MISSING = (
    "Forward and backward, ms",
    "Forward, ms",
    "Backward, ms",
    "Memory before backward, MiB",
    "Peak memory, MiB",
    "TFLOP/s of forward and backward",
    "Powers of the sequence, fitted over the longest",
    "Saved for backward: by formula, and measured",
    "The saved matrix of scores, multiplied out",
    "Every cell",
    "Eager beside compiled",
    "Eager beside compiled: the grid of cs336-2025",
    "Without a time",
)
TITLES = (BOTH, FORWARD, BACKWARD, HELD, PEAK, RATES, SLOPES, SAVED, SCORES, CELLS, COMPILED, COMPILED_2025, MISSING)
"""Titles of all tables that an answer may have."""
PHASES = ("forward", "backward")
UNSURE = "unsure"
_NOTHING = ("not supported", "not reached", "interrupted")
_MOST_LINES = 8
"""The most lines that a plot can tell apart."""
_WORDS = {"out of memory": "OOM", "wrong": "WRONG"}


def answer_attention(timings: AttentionTimings) -> Answer:
    """The whole answer. Raises InputError where not one cell was asked for."""
    if not timings.timings:
        raise InputError("no call of attention was measured: give it more time")
    study = arrange(timings)
    by_sequence = (
        ()
        if study.mixed
        else (
            _compiled(study),
            _by_sequence(study, BOTH, lambda row: median_ms(row.both), timed=True),
            _by_sequence(study, FORWARD, lambda row: median_ms(row.forward), timed=True),
            _by_sequence(study, BACKWARD, lambda row: median_ms(row.backward), timed=True),
            _by_sequence(study, HELD, lambda row: mebibytes(row.memory.before_backward_bytes) if row.memory else None),
            _by_sequence(study, PEAK, lambda row: mebibytes(row.memory.peak_bytes) if row.memory else None),
            _by_sequence(study, RATES, lambda row: tera(flops_per_s(row)), timed=True),
            _slopes(study),
        )
    )
    tables = (*by_sequence, _saved(study), _scores(study), _cells(study), _missing(study))
    return measured_answer(
        timings.environment,
        study="attention",
        question="What does each attention cost as the sequence grows: time, memory, and the share of the device it "
        "reaches?",
        settings=_settings(study),
        tables=tables,
        panels=() if study.mixed else _panels(study),
        findings=attention_findings(study),
    )


def _settings(study: AttentionStudy) -> dict[str, Cell]:
    timings = study.timings
    shape = timings.timings[0].cell.shape
    settings: dict[str, Cell] = {}
    if not study.mixed:
        settings |= {"batch": shape.batch, "heads": shape.heads}
        if shape.key_heads != shape.heads:
            settings["key and value heads"] = shape.key_heads
        settings["mask"] = "causal" if shape.causal else "full"
    settings["seconds a cell"] = timings.seconds
    hidden = timings.launches == "hidden"
    settings["L2 cache"] = "overwritten before each pass" if hidden else "as the pass before left it"
    if timings.environment.l2_bytes:
        settings["L2 MiB"] = digits(timings.environment.l2_bytes / MIB)
    settings["launches"] = timings.launches
    settings["data"] = "random"
    return settings


def _by_sequence(
    study: AttentionStudy, title: str, figure: Callable[[AttentionTiming], float | None], *, timed: bool = False
) -> Table:
    """A row for each dtype, head_dim and sequence, a column for each implementation; without those of which there is
    no more to say than "not supported" or "not reached", which is said once, in the last table.

    timed: whether the last column names the implementations whose time is unsure.
    """
    lines_with_rows = {curve.line for curve in study.curves for row in curve.rows if row.outcome not in _NOTHING}
    lines = [line for line in dict.fromkeys(curve.line for curve in study.curves) if line in lines_with_rows]
    rows: list[tuple[Cell, ...]] = []
    for dtype, head_dim, curves in study.grouped("head_dim"):
        for length in sorted({row.cell.shape.queries for curve in curves for row in curve.rows}):
            figures: list[Cell] = []
            unsure: list[str] = []
            for line in lines:
                curve = next((c for c in curves if c.line == line), None)
                row = next((r for r in curve.rows if r.cell.shape.queries == length), None) if curve else None
                figures.append(_figure_or_word(row, figure))
                if timed and row is not None and row.cell in study.unsure:
                    unsure.append(line)
            if any(cell is not None and cell not in _NOTHING for cell in figures):
                rows.append((dtype, head_dim, length, *figures, ", ".join(unsure) or None))
    # A figure that nobody has is no table: a CPU counts no peak.
    if not any(isinstance(cell, float) for row in rows for cell in row[3:]):
        rows = []
    columns = ("dtype", "head_dim", "seq", *lines)
    if any(row[-1] for row in rows):
        return Table(title=title, columns=(*columns, UNSURE), rows=tuple(rows))
    return Table(title=title, columns=columns, rows=tuple(row[:-1] for row in rows))


def _figure_or_word(row: AttentionTiming | None, figure: Callable[[AttentionTiming], float | None]) -> Cell:
    if row is None:
        return None
    return figure(row) if both_s(row) is not None else _WORDS.get(row.outcome, row.outcome)


def _compiled(study: AttentionStudy) -> Table:
    """The table of eager beside compiled calls; with the preset `cs336-2025`, once `seeds`, head_dim is d_model."""
    rows: list[tuple[Cell, ...]] = []
    for eager in study.curves:
        compiled = study.same(eager, f"{eager.line}, compiled")
        if compiled is None:
            continue
        for row in eager.rows:
            length = row.cell.shape.queries
            other = next((r for r in compiled.rows if r.cell.shape.queries == length), None)
            pair = (row, other)
            if all(r is None or r.outcome in _NOTHING for r in pair):
                continue
            times = [_figure_or_word(r, lambda r, p=p: median_ms(getattr(r, p))) for r in pair for p in PHASES]
            held = [gibibytes(r.memory.before_backward_bytes) if r and r.memory else None for r in pair]
            ratio = other.both.speedup_over(row.both) if other and other.both and row.both else None
            speed_up = digits(ratio.value) if ratio else None
            rows.append((eager.line, eager.dtype, length, eager.head_dim, *times, speed_up, *held))
    heads = (
        "eager forward ms", "eager backward ms", "compiled forward ms", "compiled backward ms", "speed-up",
        "eager GiB before backward", "compiled GiB",
    )  # fmt: skip
    of_2025 = study.timings.preset in ("cs336-2025", "seeds") and all(
        row.cell.shape.heads == 1 for row in study.timings.timings
    )
    columns = ("implementation", "dtype", "seq_len", "d_model" if of_2025 else "head_dim", *heads)
    return Table(title=COMPILED_2025 if of_2025 else COMPILED, columns=columns, rows=tuple(rows))


def _slopes(study: AttentionStudy) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for curve in study.curves:
        slopes = curve.slopes
        some = next((slope for slope in slopes.values() if slope), None)
        if some is not None:
            powers = [round(slope.power, 2) if slope else None for slope in slopes.values()]
            rows.append((curve.dtype, curve.head_dim, curve.line, *powers, ", ".join(f"{s:,}" for s in some.sequences)))
    heads = ("dtype", "head_dim", "implementation", "time", "memory before backward", "peak memory", "over sequences")
    return known_columns(SLOPES, heads, rows)


def _saved(study: AttentionStudy) -> Table:
    rows: list[dict[str, Cell]] = []
    for curve in study.curves:
        for row in curve.rows:
            if row.memory is None:
                continue
            formula = saved_by_formula(row.cell, study.timings.environment.device_type)
            measured = row.memory.saved_bytes
            off = (measured / formula.bytes - 1) * 100 if formula and formula.bytes else None
            rows.append(
                {
                    "dtype": curve.dtype,
                    "head_dim": curve.head_dim,
                    "seq": row.cell.shape.queries,
                    "implementation": curve.line,
                    "formula": formula.terms if formula else "",
                    "by formula MiB": mebibytes(formula.bytes) if formula else None,
                    "measured MiB": mebibytes(measured),
                    "off %": round(off, 2) if off is not None else None,
                }
            )
    return table_of_rows(SAVED, rows)


def _cells(study: AttentionStudy) -> Table:
    rows: list[dict[str, Cell]] = []
    l2_bytes = study.timings.environment.l2_bytes
    for curve in study.curves:
        for row in curve.measured:
            forward, both, shape = row.forward, row.both, row.cell.shape
            forward_s = forward.median_s if forward else None
            rows.append(
                {
                    "batch, heads, seq, head_dim": str(shape),
                    "dtype": curve.dtype,
                    "implementation": curve.line,
                    "passes": both.count if both else None,
                    "gate's calls": row.checked,
                    **within("forward ms", "forward", forward),
                    **within("backward ms", "backward", row.backward),
                    **within("both ms", "both", both),
                    "TFLOP/s forward": tera(call_flops(shape) / forward_s if forward_s else None),
                    "TFLOP/s both": tera(flops_per_s(row)),
                    "of the ceiling %": percent(study.share(row)),
                    # What a fused kernel reads and writes: inputs, output and three gradients.
                    "working set / L2": digits(2 * row.cell.input_bytes / l2_bytes) if l2_bytes else None,
                    "launches": row.launches,
                    UNSURE: "yes" if row.cell in study.unsure else None,
                }
            )
    return table_of_rows(CELLS, rows, known=True)


def _missing(study: AttentionStudy) -> Table:
    """Cells of one reason together."""
    by_reason: dict[tuple[str, str, str], list[str]] = {}
    for curve in study.curves:
        for row in curve.rows:
            if both_s(row) is None:
                place = f"{row.cell.dtype} d{row.cell.shape.head_dim} s{row.cell.shape.queries}"
                by_reason.setdefault((curve.line, row.outcome, row.reason), []).append(place)
    rows = tuple(
        (line, outcome, len(places), ", ".join(dict.fromkeys(places)), reason)
        for (line, outcome, reason), places in by_reason.items()
    )
    return Table(title=MISSING, columns=("implementation", "what", "cells", "where", "why"), rows=rows)


def _panels(study: AttentionStudy) -> tuple[Panel, ...]:
    """Time and memory over the sequence, for each dtype and head_dim; a line's name carries its powers."""
    panels: list[Panel] = []
    for dtype, head_dim, curves in study.grouped("head_dim"):
        sets = _told_apart([curve for curve in curves if curve.measured])
        for i, together in enumerate(sets):
            part = f", {i + 1} of {len(sets)}" if len(sets) > 1 else ""
            times: list[Point] = []
            bytes_: list[Point] = []
            for curve in together:
                slopes = (("time", curve.slopes["time"]), ("memory", curve.slopes["before backward"]))
                powers = ", ".join(f"{what} S^{slope.power:.1f}" for what, slope in slopes if slope)
                line = f"{curve.line}: {powers}" if powers else curve.line
                for row in curve.measured:
                    x, seconds = float(row.cell.shape.queries), both_s(row)
                    if seconds is not None:
                        doubted = row.cell in study.unsure
                        times.append(Point(line=line, x=x, y=milliseconds(seconds) or 0.0, doubted=doubted))
                    if row.memory is not None:
                        bytes_.append(Point(line=line, x=x, y=mebibytes(row.memory.before_backward_bytes) or 0.0))
            x_title = f"sequence length ({dtype}, head_dim {head_dim}{part})"
            panels += [
                Panel(x_title=x_title, y_title=title, points=tuple(points), x_log=True, y_log=True)
                for title, points in (("forward and backward, ms", times), ("memory before backward, MiB", bytes_))
                if points
            ]
    return tuple(panels)


def _told_apart(curves: list[Curve]) -> list[list[Curve]]:
    """All in one panel, or, where these are too many, eager ones apart from compiled ones, and each cut to so many."""
    if len(curves) <= _MOST_LINES:
        return [curves]
    eager = [curve for curve in curves if not curve.line.endswith("compiled")]
    compiled = [curve for curve in curves if curve.line.endswith("compiled")]
    return [
        kind[first : first + _MOST_LINES] for kind in (eager, compiled) for first in range(0, len(kind), _MOST_LINES)
    ]
