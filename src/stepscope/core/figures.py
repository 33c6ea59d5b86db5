"""Figures for the cells of a table, in the unit that the column's head names. A figure that is not known stays None."""

from stepscope.core.samples import Ratio, Samples
from stepscope.core.units import GIB, MIB

Figure = float | None


def digits(value: float | None) -> Figure:
    """A figure to four significant digits."""
    return None if value is None else float(f"{value:.4g}")


def count(value: float | None) -> Figure:
    """A count: whole numbers exactly, a mean of counts to four significant digits."""
    return int(value) if value is not None and float(value).is_integer() else digits(value)


def milliseconds(seconds: float | None) -> Figure:
    return None if seconds is None else digits(seconds * 1e3)


def mebibytes(count: float | None) -> Figure:
    return None if count is None else digits(count / MIB)


def gibibytes(count: float | None) -> Figure:
    return None if count is None else digits(count / GIB)


def tera(rate: float | None) -> Figure:
    return None if rate is None else digits(rate / 1e12)


def percent(share: float | None) -> Figure:
    """A share of one in percent, to a tenth."""
    return None if share is None else round(share * 100, 1)


def median_ms(samples: Samples | None) -> Figure:
    return milliseconds(samples.median_s) if samples else None


def within_ms(samples: Samples | None) -> tuple[Figure, Figure]:
    """The ends of the interval of a median."""
    interval = samples.interval() if samples else None
    return (milliseconds(interval.low), milliseconds(interval.high)) if interval else (None, None)


def median_within_ms(samples: Samples | None) -> tuple[Figure, Figure, Figure]:
    """A median and the ends of its interval."""
    return (median_ms(samples), *within_ms(samples))


def times_within(ratio: Ratio | None) -> tuple[Figure, Figure, Figure]:
    """A ratio and the ends of its interval."""
    interval = ratio.interval if ratio else None
    low, high = (interval.low, interval.high) if interval else (None, None)
    return (digits(ratio.value if ratio else None), digits(low), digits(high))
