"""Repeated measurements of one quantity, and the statistics that they support.

Every raw sample is kept; warm-ups are kept apart. A statistic that the samples do not support is None, never a
stand-in. This module uses only the standard library, since it runs on machines without SciPy. Its tests compare it
with SciPy where that is installed.

The steps of one process are autocorrelated: they resemble their neighbours. So n steps say less about the median than
n independent samples. Intervals and the test for drift therefore count effective samples. benchmarks/coverage.py
simulates how well they hold, and docs/measuring.md shows the result. The sources:

- Bayley and Hammersley (1946), "The 'effective' number of independent observations in an autocorrelated time series":
  n effective samples of n (1 - r) / (1 + r), where neighbours correlate by r and others as in an AR(1) process.
- Marriott and Pope (1954), and Kendall (1954), "Bias in the estimation of autocorrelations": an estimate of r from n
  samples is too low by (1 + 3 r) / n.
- Thompson (1936), and David and Nagaraja (2003), section 7.1: order statistics as the limits of a median.
- Zou and Donner (2008): the interval of a difference from the intervals of its two sides (MOVER); here for logarithms.
- Mann (1945), Kendall (1975) and Sen (1968): the test for a monotone trend, and its slope.
- Hamed and Rao (1998), Yue and Wang (2004): that test's variance divided by the effective share of the samples.
- Hyndman and Fan (1996), "Sample quantiles in statistical packages", definition 7: percentiles and quartiles. It is
  what NumPy, pandas and torch.quantile give where nothing else is asked for.
- Von Neumann (1941): the ratio of the mean square successive difference to the variance, 2 (1 - r).
- Müller and Watson (2008), "Testing models of low-frequency variability": slow variation seen by the lowest cosines.
"""

import functools
import itertools
import math
import operator
import statistics
from collections import Counter
from collections.abc import Sequence

import msgspec

from stepscope.core.units import counted

CONFIDENCE = 0.95
MINIMUM_FOR_INTERVAL = 5
"""The fewest effective samples for an interval. With fewer, autocorrelation cannot be told from a drift."""
OF_ONE_PROCESS = "of one process"
"""The scope of every interval and ratio here. Two processes of one workload differ by more than their steps do."""

INTERVALS = f"{CONFIDENCE * 100:.0f} %, {OF_ONE_PROCESS} each (none: it cannot be told)"
"""How a study's settings describe its intervals."""

INTERVALS_OF_SETS = (
    f"{CONFIDENCE * 100:.0f} %: those of ratios over all processes (five or more a side), those of medians of the "
    "process in the middle"
)
"""How a study's settings describe them where cells were measured in several processes."""

MANY = 400
"""The most samples on which the trend is tested. With more, it is tested on medians of blocks, since the test looks at
every pair."""
FEWEST_FOR_PERCENTILE = {"p95": 60, "p99": 300}
"""The percentiles that are given, and the fewest samples for each: three samples then lie above it. With fewer, one or
two slow samples would decide it alone."""
_PERCENTS = {"p95": 95, "p99": 99}
_FEWEST_FOR_EXTREMES = 3
_LARGEST = 0.99
"""The largest autocorrelation that is assumed. At 1, the samples would say nothing."""
_OUTLIER = 3.0
"""The most deviations (by the median absolute deviation) at which a residual is cut in an autocorrelation."""
_ROUNDING = 1e-9
"""The largest distance from a line, as a share of the largest sample, at which samples count as on the line."""
_COSINES = 3
"""The slowest waves, from half a period along the samples to one and a half, that show whether samples wander."""
_WANDER, _CERTAIN = 2.0, 1.25
"""How much of what the slowest waves exceed widens a ratio, and the standard errors from 0 at which an autocorrelation
is taken to be there. Both were simulated, for noise whose power is that of 1 / frequency."""
_DEVIATIONS = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_PER_MEDIAN_DEVIATION = 1 / statistics.NormalDist().inv_cdf(0.75)


class Interval(msgspec.Struct, frozen=True):
    """A confidence interval at level CONFIDENCE."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the distance between its ends."""
        return (self.high - self.low) / 2


class Trend(msgspec.Struct, frozen=True):
    """A monotone trend along the samples.

    relative_change: Theil-Sen slope times the number of samples, over the median.
    p_value: two-sided Mann-Kendall test of "no trend", corrected for autocorrelation.
    """

    relative_change: float
    p_value: float


class Ratio(msgspec.Struct, frozen=True):
    """A quotient of two medians, each of one process. Its interval is None if either side has none."""

    value: float
    interval: Interval | None
    extremes: Interval | None = None
    """The smallest and the largest quotient of any two samples; None if either side has fewer than three samples."""

    @property
    def undecided(self) -> bool:
        """Whether the samples leave open which of the two is larger.

        The interval decides. Without an interval the extremes decide, if the two sides are further apart than the
        spread of both together.
        """
        if self.interval:
            return self.interval.low <= 1 <= self.interval.high
        within = self.extremes
        return within is None or not (within.low**2 > within.high or within.high**2 < within.low)

    def surely_above(self, other: "Ratio") -> bool:
        """Whether this ratio is larger than the other, by the intervals, or by the extremes where there is none."""
        mine, theirs = self.interval or self.extremes, other.interval or other.extremes
        return mine is not None and theirs is not None and mine.low > theirs.high

    @property
    def why_undecided(self) -> str:
        """The reason why the ratio is undecided, in words; empty if it is decided."""
        if self.undecided and self.interval is None:
            return "the samples are too few, or too much like their neighbours, for an interval"
        if self.undecided and self.interval:
            return f"the interval of their ratio, {self.interval.low:.3g} to {self.interval.high:.3g}, holds 1"
        return ""


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """Raw samples in seconds, in the order they were taken, and the clock that took them."""

    values_s: tuple[float, ...]
    warmup_s: tuple[float, ...] = ()
    clock: str

    def __post_init__(self) -> None:
        values = (*self.values_s, *self.warmup_s)
        if values and min(values) >= 1e-12 and max(values) < 1e9 and not math.isnan(math.fsum(values)):
            return  # as nearly all are, which this finds in a third of the time
        # The comparison refuses NaN too. No clock resolves less than a picosecond, and quotients would overflow.
        if not all(value == 0 or 1e-12 <= value < 1e9 for value in values):
            raise ValueError("samples are seconds, 0 or from 1e-12 to below 1e9")

    @property
    def count(self) -> int:
        """The number of samples, without warm-ups."""
        return len(self.values_s)

    @property
    def median_s(self) -> float | None:
        """The median, in seconds; None without samples."""
        return _middle(_ordered(self.values_s)) if self.values_s else None

    @property
    def first_s(self) -> float | None:
        """The first sample, in seconds; None without samples."""
        return self.values_s[0] if self.values_s else None

    @property
    def smallest_s(self) -> float | None:
        """The smallest sample, in seconds; None without samples."""
        return _ordered(self.values_s)[0] if self.values_s else None

    @property
    def largest_s(self) -> float | None:
        """The largest sample, in seconds; None without samples."""
        return _ordered(self.values_s)[-1] if self.values_s else None

    @property
    def mean_s(self) -> float | None:
        """The arithmetic mean, in seconds; None without samples."""
        return statistics.fmean(self.values_s) if self.values_s else None

    @property
    def stdev_s(self) -> float | None:
        """Sample standard deviation (n - 1); None below two samples."""
        return _stdev(self.values_s) if self.count >= 2 else None

    def percentile_s(self, name: str) -> float | None:
        """The percentile of this name (p95, p99); None with fewer samples than FEWEST_FOR_PERCENTILE."""
        if self.count < FEWEST_FOR_PERCENTILE[name]:
            return None
        return statistics.quantiles(self.values_s, n=100, method="inclusive")[_PERCENTS[name] - 1]

    @property
    def spread(self) -> float | None:
        """Interquartile range over the median; None below four samples."""
        quartiles = self._quartiles()
        return (quartiles[1] - quartiles[0]) / self.median_s if quartiles and self.median_s else None

    @property
    def outliers(self) -> int | None:
        """Samples outside Tukey's fences (1.5 interquartile ranges beyond the quartiles)."""
        quartiles = self._quartiles()
        if quartiles is None:
            return None
        low, high = quartiles
        reach = 1.5 * (high - low)
        return sum(1 for value in self.values_s if value < low - reach or value > high + reach)

    @property
    def autocorrelation(self) -> float | None:
        """Lag-1 autocorrelation of the samples' ranks, corrected for bias, at least 0; None below five samples.

        It uses ranks, since one outlier would hide how alike the others are. A value below 0 would claim more than n
        samples.
        """
        return _autocorrelation(*_ranked(self.values_s))

    @property
    def effective_count(self) -> float | None:
        """The number of independent samples that these are worth; None below five samples."""
        autocorrelation = self.autocorrelation
        return None if autocorrelation is None else _effective(autocorrelation, self.count)

    def interval(self) -> Interval | None:
        """Confidence interval of the median; None below five effective samples (`why_no_interval`).

        The limits are the order statistics that the binomial law gives for the number of effective samples.
        Autocorrelated samples understate their own spread, so the limits are moved apart in proportion to the median.
        """
        return _interval(_ordered(self.values_s), self.autocorrelation)

    @property
    def why_no_interval(self) -> str | None:
        """The reason why there is no interval, in words; None if there is one."""
        return _why_no_interval(self.count, self.effective_count)

    @property
    def wandering(self) -> float:
        """How many times wider a ratio with another process makes the interval of these samples; at least 1.

        Noise with a long memory, as that of power 1 / frequency, moves the median from process to process by more than
        an AR(1) process would that has the same neighbours. It shows in the slowest waves along the samples. Some
        thirty samples hardly show it below as much independent noise: then it cannot be told, and several processes
        must. Two steps that took turns met the same noise, so the interval of ratios within one process is not widened.
        """
        autocorrelation = self.autocorrelation
        return 1.0 if autocorrelation is None else _wandering(*_ranked(self.values_s), autocorrelation)

    def trend(self) -> Trend | None:
        """Mann-Kendall test and Theil-Sen slope; None below eight samples.

        The normal approximation of the test needs about eight samples. It is corrected for continuity, for ties and for
        the autocorrelation of the residuals.
        """
        median = self.median_s
        if self.count < 8 or not median:
            return None
        size = -(-self.count // MANY)
        blocks = (self.values_s[i : i + size] for i in range(0, self.count, size))
        values = self.values_s if size == 1 else tuple(map(statistics.median, blocks))
        n = len(values)
        slopes = [(values[j] - values[i]) / (j - i) for i in range(n) for j in range(i + 1, n)]
        score = sum(slope > 0 for slope in slopes) - sum(slope < 0 for slope in slopes)
        ties = Counter(values).values()
        variance = (n * (n - 1) * (2 * n + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
        if variance <= 0:
            return Trend(relative_change=0.0, p_value=1.0)
        slope = statistics.median(slopes)
        variance *= n / _effective(_autocorrelation_about(values, slope), n)
        z = (score - math.copysign(1, score)) / math.sqrt(variance) if score else 0.0
        return Trend(relative_change=slope * n / median, p_value=math.erfc(abs(z) / math.sqrt(2)))

    def speedup_over(self, baseline: "Samples") -> Ratio | None:
        """median(baseline) / median(self). Above 1, self is faster. The two are assumed to be independent processes."""
        if not self.median_s or baseline.median_s is None:
            return None
        value = baseline.median_s / self.median_s
        extremes = None
        enough = min(self.count, baseline.count) >= _FEWEST_FOR_EXTREMES
        if enough and self.smallest_s and self.largest_s and baseline.smallest_s is not None and baseline.largest_s:
            extremes = Interval(low=baseline.smallest_s / self.largest_s, high=baseline.largest_s / self.smallest_s)
        mine, theirs = self.interval(), baseline.interval()
        if mine is None or theirs is None or not mine.low or not theirs.low:
            return Ratio(value=value, interval=None, extremes=extremes)
        (down, up), (other_down, other_up) = baseline._reaches(theirs), self._reaches(mine)
        below, above = math.hypot(down, other_up), math.hypot(up, other_down)
        interval = Interval(low=value * math.exp(-below), high=value * math.exp(above))
        return Ratio(value=value, interval=interval, extremes=extremes)

    def _reaches(self, interval: Interval) -> tuple[float, float]:
        """How far the median of another process may lie below and above, as logarithms: the interval's reach times
        `wandering`, but for that no further than any sample does."""
        assert self.median_s and self.smallest_s is not None and self.largest_s
        down, up = math.log(self.median_s / interval.low), math.log(interval.high / self.median_s)
        lowest = math.log(self.median_s / self.smallest_s) if self.smallest_s else math.inf
        highest = math.log(self.largest_s / self.median_s)
        return min(down * self.wandering, max(down, lowest)), min(up * self.wandering, max(up, highest))

    def adds_to(self, other: "Samples") -> bool:
        """Whether two phases are of the same steps, by the same clock: of a stopped or damaged run they may not be."""
        ours, theirs = ((each.count, len(each.warmup_s), each.clock) for each in (self, other))
        return ours == theirs

    def plus(self, other: "Samples") -> "Samples":
        """The sample-by-sample sum of two phases of the same steps."""
        if not self.adds_to(other):
            raise ValueError("only phases of the same steps, by the same clock, add up")
        return Samples(
            values_s=tuple(a + b for a, b in zip(self.values_s, other.values_s, strict=True)),
            warmup_s=tuple(a + b for a, b in zip(self.warmup_s, other.warmup_s, strict=True)),
            clock=self.clock,
        )

    def _quartiles(self) -> tuple[float, float] | None:
        if self.count < 4:
            return None
        low, _, high = statistics.quantiles(self.values_s, n=4, method="inclusive")
        return low, high


class Figures(msgspec.Struct, frozen=True, array_like=True):
    """The statistics of some samples, in seconds; None as in Samples."""

    count: int
    median_s: float | None
    mean_s: float | None
    stdev_s: float | None
    effective_count: float | None
    why_no_interval: str | None
    wandering: float
    first_s: float | None
    smallest_s: float | None
    largest_s: float | None
    interval: Interval | None
    percentiles_s: tuple[float | None, ...]
    """Seconds at each percentile that FEWEST_FOR_PERCENTILE names, in its order; None where samples are too few."""


def figures_of(samples: Samples) -> Figures:
    """All statistics at once: what several begin with is found once."""
    values, count = samples.values_s, samples.count
    if not count:
        return Figures(0, None, None, None, None, samples.why_no_interval, 1.0, None, None, None, None, (None, None))
    ordered = sorted(values)
    ranked = _ranked_of(values, ordered)
    estimate = _autocorrelation(*ranked)
    effective = None if estimate is None else _effective(estimate, count)
    return Figures(
        count, _middle(ordered), samples.mean_s, samples.stdev_s, effective, _why_no_interval(count, effective),
        1.0 if estimate is None else _wandering(*ranked, estimate), values[0], ordered[0], ordered[-1],
        _interval(ordered, estimate), tuple(map(samples.percentile_s, FEWEST_FOR_PERCENTILE)),
    )  # fmt: skip


@functools.lru_cache(maxsize=8)  # most statistics begin with it
def _ordered(values: tuple[float, ...]) -> list[float]:
    return sorted(values)


def _middle(ordered: Sequence[float]) -> float:
    """The median of values in their order."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _interval(ordered: Sequence[float], estimate: float | None) -> Interval | None:
    """The interval of values in their order, whose autocorrelation is estimated so."""
    if estimate is None or _effective(estimate, len(ordered)) < MINIMUM_FOR_INTERVAL:
        return None
    # An interval that trusts the estimate fails where the estimate is too low. So the autocorrelation is taken to
    # be larger by its square, which hardly changes samples that look independent, but at most by two standard
    # errors. These limits were simulated.
    n = len(ordered)
    error = math.sqrt((1 - estimate**2) / n)
    prudent = min(_LARGEST, estimate + min(estimate**2, 2 * error))
    effective = max(2.0, _effective(prudent, n))
    half_width = _DEVIATIONS / (2 * math.sqrt(effective))
    median = _middle(ordered)
    ends: list[float] = []
    for share in (0.5 - half_width, 0.5 + half_width):  # between order statistics: the i-th is at (i - 1/2) / n
        place = min(n - 1.0, max(0.0, share * n - 0.5))
        below = min(int(place), n - 2)
        ends.append(ordered[below] + (place - below) * (ordered[below + 1] - ordered[below]))
    low, high = ends
    if not median:
        return Interval(low=0.0, high=max(median, high))
    # The variance about the samples' median is the variance about the true median times 1 - 1 / effective.
    apart = math.sqrt((1 - 1 / n) / (1 - 1 / effective))
    # If two samples differ tenfold, this power has no bound. So the limit is at most twice as far as the largest.
    farthest = 2 * ordered[-1] - median
    return Interval(
        low=median * min(1, low / median) ** apart, high=min(farthest, median * max(1, high / median) ** apart)
    )


def _why_no_interval(count: int, effective: float | None) -> str | None:
    if effective is None:
        return f"{counted(count, 'sample')} {'is' if count == 1 else 'are'} too few for an interval"
    if effective < MINIMUM_FOR_INTERVAL:
        return (
            f"each sample is so much like the one before that the {count} are worth "
            f"{effective:.1f} independent ones: too few for an interval"
        )
    return None


def _stdev(values: Sequence[float]) -> float:
    """What statistics.stdev gives, to the last digit, in a twentieth of its time: samples are whole numbers of the last
    bit of the smallest among them, and integers are summed exactly."""
    unit = 2.0 ** (53 - math.frexp(min(filter(None, values), default=1.0))[1])
    whole = [int(value * unit) for value in values]
    least = min(whole)
    whole, unit = [value - least for value in whole], int(unit)
    n, total = len(whole), sum(whole)
    squares, over = n * sum(map(operator.mul, whole, whole)) - total * total, n * (n - 1) * unit * unit
    # The root to 55 bits, the last of them 1 where more would follow: rounded once, to a float.
    shift = (squares.bit_length() - over.bit_length() - 109) // 2
    above, below = (squares, over << 2 * shift) if shift >= 0 else (squares << -2 * shift, over)
    root = math.isqrt(above // below)
    root |= root * root * below != above
    return float(root << shift) if shift >= 0 else root / (1 << -shift)


@functools.lru_cache(maxsize=8)
def _ranked(values: tuple[float, ...]) -> tuple[list[float], float]:
    return _ranked_of(values, _ordered(values))


def _ranked_of(values: Sequence[float], ordered: Sequence[float]) -> tuple[list[float], float]:
    """The ranks, and the squares of their deviations from their mean summed: multiples of a half, so exactly."""
    ranks, n = _ranks(values, ordered), len(values)
    return ranks, sum(map(operator.mul, ranks, ranks)) - n * (n + 1) ** 2 / 4


def _autocorrelation(ranks: Sequence[float], total: float) -> float | None:
    count, middle = len(ranks), (len(ranks) + 1) / 2
    if count < MINIMUM_FOR_INTERVAL:
        return None
    if not total:
        return 0.0
    products = sum(map(operator.mul, ranks, itertools.islice(ranks, 1, None)))
    products += middle * (ranks[0] + ranks[-1] - (count + 1) * middle)  # about the mean
    return _without_bias(products / total, count)


def _wandering(ranks: Sequence[float], total: float, autocorrelation: float) -> float:
    """The power of the slowest waves of the ranks over that of an AR(1) process, as a factor on widths.

    Samples that seem independent are left alone: their slowest waves differ by chance.
    """
    n = len(ranks)
    if not total:
        return 1.0
    waves = [sum(map(operator.mul, ranks, wave)) ** 2 for wave in _cosines(n)]
    slow = 2 / n * math.fsum(waves) / len(waves) / (total / n)
    above = _WANDER * slow * (1 - autocorrelation) / (1 + autocorrelation)
    return max(1.0, above) ** min(1.0, autocorrelation * math.sqrt(n) / _CERTAIN)


@functools.lru_cache(maxsize=8)
def _cosines(n: int) -> tuple[tuple[float, ...], ...]:
    """The slowest waves at n places; each sums to 0."""
    return tuple(
        tuple(math.cos(math.pi * wave * (place + 0.5) / n) for place in range(n)) for wave in range(1, _COSINES + 1)
    )


def ranks_of(values: Sequence[float]) -> list[float]:
    """The ranks of the values from 1; equal values get their mean rank."""
    return _ranks(values, sorted(values))


def _ranks(values: Sequence[float], ordered: Sequence[float]) -> list[float]:
    ranks = dict(zip(ordered, itertools.count(1.0)))
    if len(ranks) < len(values):  # of equal values this is the last
        firsts = dict(zip(reversed(ordered), range(len(values), 0, -1), strict=True))
        ranks = {value: (firsts[value] + last) / 2 for value, last in ranks.items()}
    return [*map(ranks.__getitem__, values)]


def _without_bias(estimate: float, n: int) -> float:
    """The autocorrelation r whose estimate is expected to be r - (1 + 3 r) / n."""
    return min(_LARGEST, max(0.0, (n * estimate + 1) / (n - 3)))


def _effective(autocorrelation: float, n: int) -> float:
    return n * (1 - autocorrelation) / (1 + autocorrelation)


def _autocorrelation_about(values: Sequence[float], slope: float) -> float:
    """Lag-1 autocorrelation about a line of this slope, by von Neumann's ratio, corrected for bias, at least 0.

    The ends of a detrended sum of products would bias it; they do not bias the ratio. Cutting the residuals' outliers
    makes the slope slightly wrong. Differences are taken about their mean, so this error adds nothing.
    """
    n = len(values)
    residuals = [value - slope * i for i, value in enumerate(values)]
    middle = statistics.median(residuals)
    reach = _OUTLIER * _PER_MEDIAN_DEVIATION * statistics.median(abs(residual - middle) for residual in residuals)
    if reach:
        residuals = [min(middle + reach, max(middle - reach, residual)) for residual in residuals]
    variance = statistics.variance(residuals)
    if math.sqrt(variance) <= _ROUNDING * max(values):
        return 0.0
    differences = [b - a for a, b in itertools.pairwise(residuals)]
    return _without_bias(1 - statistics.pvariance(differences) / variance / 2, n)


def least_squares(rows: Sequence[tuple[Sequence[float], float]]) -> tuple[float, ...]:
    """Factors, none below zero, with which the sums of each row's terms are nearest to its target. A few terms: every
    choice of those that are not zero is tried."""
    terms = len(rows[0][0])
    best = sum(target**2 for _, target in rows), (0.0,) * terms
    for count in range(1, min(terms, len(rows)) + 1):
        for chosen in itertools.combinations(range(terms), count):
            factors = _solved(
                [[sum(row[i] * row[j] for row, _ in rows) for j in chosen] for i in chosen],
                [sum(row[i] * target for row, target in rows) for i in chosen],
            )
            if factors is None or min(factors) < 0:
                continue
            whole = tuple(dict(zip(chosen, factors, strict=True)).get(i, 0.0) for i in range(terms))
            missed = sum((sum(map(operator.mul, row, whole)) - target) ** 2 for row, target in rows)
            if missed < best[0] * (1 - 1e-9):
                best = missed, whole
    return best[1]


def _solved(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """The solution of a few linear equations by elimination; None where they have no single one."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for i in range(size):
        pivot = max(range(i, size), key=lambda row: abs(rows[row][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) <= 1e-12 * max((abs(row[i]) for row in matrix), default=0.0):
            return None
        for other in (row for row in rows if row is not rows[i]):
            factor = other[i] / rows[i][i]
            other[i:] = [a - factor * b for a, b in zip(other[i:], rows[i][i:], strict=True)]
    return [row[-1] / row[i] for i, row in enumerate(rows)]
