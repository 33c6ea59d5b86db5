"""Times of Chrome-trace events as exact nanoseconds.

They are microseconds, as integers, with decimals, or as text; those too large to be microseconds are nanoseconds. The
unit is that of the file: one impossible time does not change the others.
"""

from decimal import Decimal
from typing import Any

import polars as pl

EXACT_BELOW_US = 2**43
"""Microseconds from here on lose nanoseconds in a double; such traces (time since 1970) are read as decimals."""
_NANOSECONDS_FROM = 10**17
"""Times from here on are nanoseconds: no clock in microseconds comes near, and since 1970 they are 1.7e18."""
_LARGEST_NS = 2**62
_SAMPLE = 1000

_UNREADABLE = (TypeError, ValueError, ArithmeticError, pl.exceptions.PolarsError)


def needs_decimals(times: list[Any]) -> bool:
    """Whether some of the times are doubles so large that they have lost nanoseconds."""
    try:
        if max(times) < EXACT_BELOW_US:
            return False
    except (TypeError, ValueError):  # there are none, or some are no numbers
        pass
    return any(type(time) is float and time >= EXACT_BELOW_US for time in times)


def ns_per_unit(times: list[Any]) -> int | None:
    """Nanoseconds of the unit that most of these times are in, by a sample; None where none can be read.

    0 is the same in both: names of processes and work whose time was not collected have it.
    """
    sample = (_nanoseconds(time, 1) for time in times[:: 1 + len(times) // _SAMPLE])
    found = sorted(abs(time) for time in sample if time)
    if not found:
        return None
    return 1 if found[(len(found) - 1) // 2] >= _NANOSECONDS_FROM else 1000


def nanoseconds(name: str, times: list[Any], per_unit: int) -> pl.Series:
    """A column of times or durations; null where one is no number, or beyond all clocks."""
    try:
        return _scaled(name, _numbers(times), per_unit)
    except _UNREADABLE:
        return pl.Series(name, [_nanoseconds(time, per_unit) for time in times], dtype=pl.Int64)


def _nanoseconds(time: Any, per_unit: int) -> int | None:
    try:
        exact = Decimal(time) * per_unit
        return round(exact) if abs(exact) < _LARGEST_NS else None
    except _UNREADABLE:
        return None


def _numbers(values: list[Any]) -> pl.Series | list[Decimal]:
    kinds = set(map(type, values))
    if kinds <= {int}:
        return pl.Series(values, dtype=pl.Int64)
    if kinds <= {int, float}:
        series = pl.Series(values, dtype=pl.Float64, strict=False)
        if kinds == {float} or _largest(series) < EXACT_BELOW_US:
            return series
    return [Decimal(value) for value in values]


def _largest(values: pl.Series | list[Decimal]) -> Decimal:
    """The largest magnitude of the times."""
    if isinstance(values, list):
        return max(map(abs, values), default=Decimal(0))
    return max(abs(Decimal(values.min() or 0)), abs(Decimal(values.max() or 0)))  # type: ignore[arg-type]


def _scaled(name: str, values: pl.Series | list[Decimal], per_unit: int) -> pl.Series:
    if not _largest(values) * per_unit < _LARGEST_NS:
        raise OverflowError("a time beyond all clocks")
    if isinstance(values, list):
        return pl.Series(name, [round(value * per_unit) for value in values], dtype=pl.Int64)
    if values.dtype == pl.Int64:
        return (values * per_unit).alias(name)
    if not values.is_finite().all():
        raise ValueError("not a finite time")
    whole = values.floor()  # apart, since the product would round once more
    return (whole.cast(pl.Int64) * per_unit + ((values - whole) * per_unit).round().cast(pl.Int64)).alias(name)
