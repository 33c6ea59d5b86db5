"""Times of Chrome-trace events as exact nanoseconds.

They are microseconds, as integers, with decimals, or as text; those too large to be microseconds are nanoseconds.
"""

from decimal import Decimal
from typing import Any

import polars as pl

EXACT_BELOW_US = 2**43
"""Microseconds from here on lose nanoseconds in a double; such traces (time since 1970) are read as decimals."""
_NANOSECONDS_FROM = 10**17
"""Times from here on are nanoseconds: no clock in microseconds comes near, and since 1970 they are 1.7e18."""
_LARGEST_NS = 2**62

UNREADABLE = (TypeError, ValueError, ArithmeticError, pl.exceptions.PolarsError)
"""Errors that `nanoseconds` raises where a time is no number, or beyond all clocks."""


def nanoseconds(starts: list[Any], durations: list[Any]) -> tuple[pl.Series, pl.Series]:
    """The columns start_ns and duration_ns; both are written in the unit that the starts are in."""
    start, duration = _numbers(starts), _numbers(durations)
    per_unit = 1 if _largest(start) >= _NANOSECONDS_FROM else 1000
    return _scaled("start_ns", start, per_unit), _scaled("duration_ns", duration, per_unit)


def is_readable(start: object, duration: object) -> bool:
    """Whether these are times."""
    try:
        nanoseconds([start], [duration])
    except UNREADABLE:
        return False
    return True


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
