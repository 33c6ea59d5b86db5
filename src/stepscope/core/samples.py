"""Repeated measurements of one quantity, and the statistics that may be said of them.

Every raw sample is kept; warm-ups are kept apart. A statistic that the samples do not support is None,
never a stand-in. Only the standard library is used: this module runs on machines that have no SciPy, and
its tests compare it with SciPy where that is installed.
"""

import math
import random
import statistics

import msgspec

CONFIDENCE = 0.95
BOOTSTRAP_RESAMPLES = 2000
MINIMUM_FOR_INTERVAL = 5
"""Fewer samples than this give no interval: the bootstrap would only echo their range."""


MANY = 400
"""Beyond so many samples the bootstrap draws ranks instead of samples, and the trend is that of block medians."""


class Interval(msgspec.Struct, frozen=True):
    """A confidence interval at level CONFIDENCE."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


class Trend(msgspec.Struct, frozen=True):
    """A monotone trend along the samples.

    relative_change: Theil-Sen slope times the number of samples, over the median.
    p_value: two-sided Mann-Kendall test of "no trend".
    """

    relative_change: float
    p_value: float


class Ratio(msgspec.Struct, frozen=True):
    """A quotient of two medians with its bootstrap interval (None when either side has too few samples)."""

    value: float
    interval: Interval | None


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """Raw samples in seconds, in the order they were taken, and the clock that took them."""

    values_s: tuple[float, ...]
    warmup_s: tuple[float, ...] = ()
    clock: str

    def __post_init__(self) -> None:
        if not all(0 <= value < 1e9 for value in (*self.values_s, *self.warmup_s)):  # NaN is none of these
            raise ValueError("samples are seconds, from 0 to below 1e9")

    @property
    def count(self) -> int:
        return len(self.values_s)

    @property
    def median_s(self) -> float | None:
        return statistics.median(self.values_s) if self.values_s else None

    @property
    def mean_s(self) -> float | None:
        return statistics.fmean(self.values_s) if self.values_s else None

    @property
    def stdev_s(self) -> float | None:
        """Sample standard deviation (n - 1); None below two samples."""
        return statistics.stdev(self.values_s) if self.count >= 2 else None

    @property
    def spread(self) -> float | None:
        """Interquartile range over the median; None below four samples."""
        quartiles = self._quartiles()
        if quartiles is None or not self.median_s:
            return None
        return (quartiles[1] - quartiles[0]) / self.median_s

    @property
    def outliers(self) -> int | None:
        """Samples outside Tukey's fences (1.5 interquartile ranges beyond the quartiles)."""
        quartiles = self._quartiles()
        if quartiles is None:
            return None
        low, high = quartiles
        reach = 1.5 * (high - low)
        return sum(1 for value in self.values_s if value < low - reach or value > high + reach)

    def interval(self) -> Interval | None:
        """Percentile-bootstrap confidence interval of the median (Efron 1979), seeded: same samples, same interval."""
        if self.count < MINIMUM_FOR_INTERVAL:
            return None
        return _percentile_interval(_bootstrap_medians(self.values_s, seed=0))

    def trend(self) -> Trend | None:
        """Mann-Kendall test and Theil-Sen slope (Mann 1945, Kendall 1975, Sen 1968); None below eight samples.

        The normal approximation of the test, which needs about eight samples, is corrected for continuity and ties.
        """
        median = self.median_s
        if self.count < 8 or not median:
            return None
        values = _thinned(self.values_s)
        n = len(values)
        slopes: list[float] = []
        score = 0
        for i in range(n):
            for j in range(i + 1, n):
                difference = values[j] - values[i]
                slopes.append(difference / (j - i))
                score += (difference > 0) - (difference < 0)
        ties: dict[float, int] = {}
        for value in values:
            ties[value] = ties.get(value, 0) + 1
        variance = (n * (n - 1) * (2 * n + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties.values())) / 18
        if variance <= 0:
            return Trend(relative_change=0.0, p_value=1.0)
        z = (score - math.copysign(1, score)) / math.sqrt(variance) if score else 0.0
        p_value = 2 * (1 - statistics.NormalDist().cdf(abs(z)))
        return Trend(relative_change=statistics.median(slopes) * n / median, p_value=p_value)

    def speedup_over(self, baseline: "Samples") -> Ratio | None:
        """median(baseline) / median(self): above 1, self is faster."""
        if not self.median_s or baseline.median_s is None:
            return None
        value = baseline.median_s / self.median_s
        if min(self.count, baseline.count) < MINIMUM_FOR_INTERVAL:
            return Ratio(value=value, interval=None)
        mine = _bootstrap_medians(self.values_s, seed=1)
        theirs = _bootstrap_medians(baseline.values_s, seed=2)
        return Ratio(
            value=value,
            interval=_percentile_interval([b / a for a, b in zip(mine, theirs, strict=True) if a > 0]),
        )

    def plus(self, other: "Samples") -> "Samples":
        """Sample-by-sample sum of two phases of the same steps."""
        if self.count != other.count or self.clock != other.clock:
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


def _thinned(values: tuple[float, ...]) -> tuple[float, ...]:
    """Medians of consecutive blocks, at most MANY of them: the test looks at every pair."""
    size = -(-len(values) // MANY)
    return values if size == 1 else tuple(statistics.median(values[i : i + size]) for i in range(0, len(values), size))


def _bootstrap_medians(values: tuple[float, ...], seed: int) -> list[float]:
    generator = random.Random(seed)
    n = len(values)
    ordered = sorted(values)
    # The median of a resample is that of its ordered indices, so integers are sorted instead of floats.
    medians: list[float] = []
    if n > MANY:
        # The rank of a resample's median is binomial: normal with this mean and deviation, to within a rank.
        ranks = (generator.gauss((n - 1) / 2, math.sqrt(n) / 2) for _ in range(BOOTSTRAP_RESAMPLES))
        return [ordered[min(n - 1, max(0, round(rank)))] for rank in ranks]
    for _ in range(BOOTSTRAP_RESAMPLES):
        picks = sorted(generator.choices(range(n), k=n))
        middle = ordered[picks[n // 2]]
        medians.append(middle if n % 2 else (ordered[picks[n // 2 - 1]] + middle) / 2)
    return medians


def _percentile_interval(resampled: list[float]) -> Interval:
    # Order statistics, not interpolated: interpolation may round to a value beyond every sample.
    ordered = sorted(resampled)
    tail = int((1 - CONFIDENCE) / 2 * len(ordered))
    return Interval(low=ordered[tail], high=ordered[-1 - tail])
