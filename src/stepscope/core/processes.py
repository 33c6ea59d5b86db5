"""What several processes of one experiment say together: one figure a process, and how sure they are of it.

Two processes that run the same step differ by more than their steps do: where their code and data lie in memory, which
pages the system gave them, which clocks the device had. The steps of one process share all of that, however many they
are. So a process counts as one sample here, its median step, and intervals come from how far processes differ.

Times are compared by their logarithms: a change is a ratio, and the same ratio up and down then has the same size. The
typical time is the geometric mean of the processes' medians.

A machine drifts: processes that ran one after another resemble each other. Two sets that ran one after the other then
differ though their steps do not, and neither set shows it. Where the times are known at which processes began, what the
two sides would differ by is reckoned for noise whose power is that of 1 / frequency, and compared with what Welch's
formula makes of such noise (`_Drift`). Of sets that took turns it is less than the formula says, and nothing changes.
Of others the interval is widened. An assumption it must be: five processes do not tell how much neighbours correlate.

The sources:

- Kalibera and Jones (2013), "Rigorous benchmarking in reasonable time": repetition belongs to the level that varies.
- Student (1908): the interval of a mean of n samples, from their own deviation.
- Welch (1947), Satterthwaite (1946): that of a difference of two means whose deviations differ.
- Matheron (1963): the variance of a difference of means from the variogram; Cressie (1993), "Statistics for Spatial
  Data", section 2.4: that of 1 / f noise has no finite variance, and grows with the logarithm of the distance.
- Box (1954), "Some theorems on quadratic forms": degrees of freedom of a variance whose samples are correlated.
- Holm (1979): which of several comparisons stand, when all are asked at once.
- Abramowitz and Stegun (1964), 26.5.8 and 26.7.1: the incomplete beta function, and Student's law by it.

benchmarks/coverage.py simulates how often the intervals hold what they should, for laws that are not the normal one.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from stepscope.core.samples import CONFIDENCE, Interval

FEWEST_PROCESSES = 5
"""The fewest processes for an interval or a verdict. With fewer, how much processes differ is hardly known itself."""

SEEN_IN = 0.9
"""`Change.detectable` is the change that this share of such comparisons would have seen."""

_MOST = 700.0
"""The largest logarithm of a ratio: no float holds exp(710)."""
_OF_SPACING = 5.6
"""exp(Euler's constant) * pi: with it, the variogram has the logarithm of the integral that it stands for."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """How many times as long one side took as the other: above 1, it is slower. With less than two processes a side,
    or pairs, there is no more than the ratio."""

    ratio: float
    processes: tuple[int, int]
    """Processes before and after."""
    interval: Interval | None = None
    """At CONFIDENCE; None with fewer than FEWEST_PROCESSES on a side."""
    p_value: float | None = None
    """Two-sided, of "the two take equally long"; None where the interval is."""
    deviation: float | None = None
    """The standard deviation between processes, as a share of the time; the larger side's, or of the pairs' ratios."""
    detectable: float | None = None
    """The smallest change, as a share, that would have been seen in nine of ten such comparisons."""
    paired: bool = False
    """Whether both sides ran turn by turn in the same processes."""
    widened: float = 1.0
    """How many times its width for independent processes the interval has, since the sides did not take turns."""
    seemed: bool = False
    """Whether the sides would differ if processes were independent: then drift may be all that is seen."""

    @property
    def decided(self) -> bool:
        """Whether the interval excludes that both take equally long."""
        return self.interval is not None and not self.interval.low <= 1 <= self.interval.high

    @property
    def may_be_drift(self) -> bool:
        """Whether the sides seem to differ, and may do so only since they were not measured in turns."""
        return self.seemed and not self.decided

    @property
    def share(self) -> float:
        """The change as a share: 0.03 is 3 % slower."""
        return self.ratio - 1


class Processes(msgspec.Struct, frozen=True):
    """The medians of the processes of one experiment, in seconds, in the order they ran."""

    medians_s: tuple[float, ...]
    begun_s: tuple[float, ...] = ()
    """When each began, in seconds on a clock that other processes share; empty where it is not known."""

    def __post_init__(self) -> None:
        if not all(1e-12 <= median < 1e9 for median in self.medians_s):
            raise ValueError("medians are seconds, from 1e-12 to below 1e9")

    @property
    def count(self) -> int:
        return len(self.medians_s)

    @property
    def typical_s(self) -> float | None:
        """The geometric mean of the medians; None without a process."""
        return statistics.geometric_mean(self.medians_s) if self.medians_s else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation between processes, as a share of their time; None below two."""
        return math.expm1(statistics.stdev(self._logarithms)) if self.count >= 2 else None

    def interval(self, confidence: float = CONFIDENCE) -> Interval | None:
        """Student's interval of the typical time; None below FEWEST_PROCESSES."""
        if self.count < FEWEST_PROCESSES:
            return None
        logarithms = self._logarithms
        error = statistics.stdev(logarithms) / math.sqrt(self.count)
        return _interval(statistics.fmean(logarithms), error, self.count - 1, confidence)

    def change_from(self, before: "Processes", confidence: float = CONFIDENCE) -> Change | None:
        """How many times as long these took as those before, by Welch's interval; None where one side has none."""
        if not self.count or not before.count:
            return None
        mine, theirs = self._logarithms, before._logarithms
        difference = statistics.fmean(mine) - statistics.fmean(theirs)
        processes = (before.count, self.count)
        known = [deviation for deviation in (self.deviation, before.deviation) if deviation is not None]
        plain = Change(ratio=math.exp(difference), processes=processes, deviation=max(known, default=None))
        if min(processes) < FEWEST_PROCESSES:
            return plain
        parts = [statistics.variance(side) / len(side) for side in (mine, theirs)]
        error = math.sqrt(sum(parts))
        freedom = _freedom(parts, (len(mine) - 1, len(theirs) - 1))
        plain_interval = _with_interval(plain, difference, error, freedom, confidence)
        drift = _drift(self.begun_s, before.begun_s)
        if drift is None or drift.factor <= 1:
            return plain_interval
        fewer, share = _freedom(parts, drift.freedoms), (1 + confidence) / 2
        return msgspec.structs.replace(
            _with_interval(plain, difference, error * drift.factor, fewer, confidence),
            widened=drift.factor * student_quantile(share, fewer) / student_quantile(share, freedom),
            seemed=plain_interval.decided,
        )

    @property
    def _logarithms(self) -> list[float]:
        return [math.log(median) for median in self.medians_s]


def change_of_pairs(ratios: Sequence[float], confidence: float = CONFIDENCE) -> Change | None:
    """How many times as long one step took as another that ran turn by turn with it, from a ratio a process."""
    if not ratios:
        return None
    logarithms = [math.log(ratio) for ratio in ratios]
    difference, count = statistics.fmean(logarithms), len(ratios)
    deviation = math.expm1(statistics.stdev(logarithms)) if count >= 2 else None
    plain = Change(ratio=math.exp(difference), processes=(count, count), deviation=deviation, paired=True)
    if count < FEWEST_PROCESSES:
        return plain
    return _with_interval(plain, difference, statistics.stdev(logarithms) / math.sqrt(count), count - 1, confidence)


def standing(p_values: Iterable[float | None], level: float = 1 - CONFIDENCE) -> list[bool]:
    """Which of several comparisons stand when all are asked at once (Holm): the chance that any of them is wrong is at
    most `level`. One without a p-value does not stand."""
    values = list(p_values)
    order = sorted((value, place) for place, value in enumerate(values) if value is not None)
    stands = [False] * len(values)
    for rank, (value, place) in enumerate(order):
        if value > level / (len(order) - rank):
            break
        stands[place] = True
    return stands


def _with_interval(plain: Change, difference: float, error: float, freedom: float, confidence: float) -> Change:
    """The change with its interval, p-value and the smallest change that would have been seen."""
    interval = _interval(difference, error, freedom, confidence)
    if not error:
        return msgspec.structs.replace(plain, interval=interval, p_value=float(difference == 0), detectable=0.0)
    reach = (student_quantile((1 + confidence) / 2, freedom) + student_quantile(SEEN_IN, freedom)) * error
    return msgspec.structs.replace(
        plain,
        interval=interval,
        p_value=2 * student_tail(abs(difference) / error, freedom),
        detectable=math.expm1(min(_MOST, reach)),
    )


def _interval(middle: float, error: float, freedom: float, confidence: float) -> Interval:
    reach = student_quantile((1 + confidence) / 2, freedom) * error
    return Interval(low=math.exp(max(-_MOST, middle - reach)), high=math.exp(min(_MOST, middle + reach)))


def _freedom(parts: Sequence[float], freedoms: Sequence[float]) -> float:
    """Degrees of freedom of a sum of variances (Welch and Satterthwaite)."""
    total = sum(parts)
    if not total:
        return sum(freedoms)
    return 1 / sum((part / total) ** 2 / freedom for part, freedom in zip(parts, freedoms, strict=True))


@dataclass(frozen=True, kw_only=True)
class _Drift:
    """What noise of power 1 / frequency makes of two sets of processes that began at known times."""

    factor: float
    """The deviation of the difference of their means, over what Welch's formula expects for the same noise."""
    freedoms: tuple[float, float]
    """Degrees of freedom of each set's variance."""


@functools.lru_cache(maxsize=64)
def _drift(first: tuple[float, ...], second: tuple[float, ...]) -> _Drift | None:
    """The drift of two sets by their times in seconds; None where these are not known, or all are the same.

    Sets of which each began all at one moment do not show how processes at different moments differ: it is reckoned as
    of processes that followed one another.
    """
    moments = sorted({*first, *second})
    if len(first) < 2 or len(second) < 2 or len(moments) < 2:
        return None
    if len({*first}) == len({*second}) == 1:
        return _drift(tuple(map(float, range(len(first)))), tuple(float(len(first) + i) for i in range(len(second))))
    unit = statistics.median(b - a for a, b in itertools.pairwise(moments))

    def apart(one: Sequence[float], other: Sequence[float]) -> list[list[float]]:
        """Half the mean square of the difference of 1 / f noise at the distance of two moments, but for a factor. The
        integral of (1 - cos t) / t up to pi * distance is within a tenth of it."""
        return [[0.5 * math.log1p((_OF_SPACING * abs(a - b) / unit) ** 2) for b in other] for a in one]

    between = statistics.fmean(itertools.chain.from_iterable(apart(first, second)))
    means, parts, freedoms = list[float](), list[float](), list[float]()
    for times in (first, second):
        within, count = apart(times, times), len(times)
        rows = [statistics.fmean(row) for row in within]
        mean = statistics.fmean(rows)
        centred = [
            mean_of + other - value - mean
            for row, mean_of in zip(within, rows, strict=True)
            for value, other in zip(row, rows, strict=True)
        ]
        means.append(mean)
        parts.append(mean / (count - 1))
        squares = math.fsum(value * value for value in centred)
        freedoms.append((mean * count) ** 2 / squares if squares else count - 1.0)
    factor = math.sqrt(max(0.0, 2 * between - sum(means)) / sum(parts))
    return _Drift(factor=factor, freedoms=(freedoms[0], freedoms[1]))


def student_tail(t: float, freedom: float) -> float:
    """The chance that a figure of Student's law with these degrees of freedom is above t."""
    total = freedom + t * t
    half = 0.5 * _incomplete_beta(freedom / 2, 0.5, freedom / total, t * t / total)
    return half if t >= 0 else 1 - half


@functools.cache
def student_quantile(share: float, freedom: float) -> float:
    """The figure that this share of Student's law lies below."""
    if share < 0.5:
        return -student_quantile(1 - share, freedom)
    # Newton's method from the normal law's figure, which is too small: the tail is convex, so no step goes too far.
    density = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    quantile = statistics.NormalDist().inv_cdf(share)
    for _ in range(200):
        above = student_tail(quantile, freedom) - (1 - share)
        step = above / density * (1 + quantile * quantile / freedom) ** ((freedom + 1) / 2)
        quantile += step
        if abs(step) <= 1e-12 * quantile:
            break
    return quantile


def _incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    """The regularised incomplete beta function at x = 1 - rest, by its continued fraction (Lentz's method)."""
    if x == 0 or rest == 0:
        return float(rest == 0)
    if x > (a + 1) / (a + b + 2):  # there the fraction of the other tail converges
        return 1 - _incomplete_beta(b, a, rest, x)
    logarithm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    fraction, d, c = 1.0, 0.0, 1.0
    for step in range(400):
        m = step // 2
        if step == 0:
            numerator = 1.0
        elif step % 2 == 0:
            numerator = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            numerator = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / (1 + numerator * d or 1e-300)
        c = 1 + numerator / c or 1e-300
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return math.exp(logarithm) * (fraction - 1) / a
