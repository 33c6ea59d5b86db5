"""Statistics of samples: by hand, by property, and against SciPy."""

import math
import statistics

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from stepscope.core.samples import Samples

TIMES = st.lists(st.floats(min_value=1e-6, max_value=10.0), min_size=5, max_size=40)


def of(*values: float) -> Samples:
    return Samples(values_s=values, clock="fake")


def test_by_hand():
    samples = of(1.0, 2.0, 3.0, 4.0, 10.0)
    assert samples.median_s == 3.0
    assert samples.mean_s == 4.0
    assert samples.stdev_s == pytest.approx(math.sqrt((9 + 4 + 1 + 0 + 36) / 4))
    # Quartiles 2 and 4: fences at -1 and 7, so 10 is outside.
    assert samples.outliers == 1
    assert samples.spread == pytest.approx(2 / 3)


def test_a_statistic_without_support_is_absent():
    assert of().median_s is None
    assert of().mean_s is None
    assert of(1.0).stdev_s is None
    assert of(1.0, 2.0, 3.0).spread is None
    assert of(1.0, 2.0, 3.0).outliers is None
    assert of(1.0, 2.0, 3.0, 4.0).interval() is None
    assert of(*[1.0] * 7).trend() is None


@given(TIMES)
def test_interval_holds_the_median_and_stays_within_the_samples(values: list[float]):
    samples = of(*values)
    interval = samples.interval()
    assert interval is not None and samples.median_s is not None
    assert min(values) <= interval.low <= samples.median_s <= interval.high <= max(values)


def test_interval_agrees_with_scipy():
    values = tuple(statistics.NormalDist(10.0, 1.0).samples(60, seed=3))
    ours = of(*values).interval()
    theirs = scipy.stats.bootstrap(
        (values,), statistics.median, vectorized=False, method="percentile", n_resamples=4000, rng=0
    ).confidence_interval
    assert ours is not None
    assert ours.low == pytest.approx(theirs.low, abs=0.1)
    assert ours.high == pytest.approx(theirs.high, abs=0.1)


def test_interval_covers_the_true_median_about_as_often_as_it_says():
    covered = 0
    for seed in range(100):
        interval = of(*statistics.NormalDist(1.0, 0.1).samples(25, seed=seed)).interval()
        assert interval is not None
        covered += interval.low <= 1.0 <= interval.high
    assert 88 <= covered <= 100


@given(st.lists(st.integers(1, 6).map(float), min_size=12, max_size=30))
def test_trend_has_scipys_slope(values: list[float]):
    trend = of(*values).trend()
    assert trend is not None
    slope, *_ = np.asarray(scipy.stats.theilslopes(values))
    assert trend.relative_change == pytest.approx(slope * len(values) / statistics.median(values), abs=1e-9)


def test_p_value_of_the_trend_agrees_with_scipys_asymptotic_test():
    values = [10 + 0.05 * i + math.sin(7.3 * i) for i in range(60)]
    trend = of(*values).trend()
    assert trend is not None
    _, theirs = np.asarray(scipy.stats.kendalltau(range(60), values, method="asymptotic"))
    # Ours corrects for continuity, theirs does not: a little larger, and close.
    assert theirs <= trend.p_value <= theirs * 1.1


def test_many_samples_are_as_few_by_another_way():
    values = statistics.NormalDist(10.0, 1.0).samples(401, seed=5)
    by_rank, by_draw = of(*values).interval(), of(*values[:400]).interval()
    assert by_rank is not None and by_draw is not None
    assert by_rank.low == pytest.approx(by_draw.low, abs=0.05)
    assert by_rank.high == pytest.approx(by_draw.high, abs=0.05)
    long = of(*(1 + 1e-6 * i for i in range(100_000)))
    trend = long.trend()
    assert trend is not None and trend.p_value < 1e-9
    assert trend.relative_change == pytest.approx(0.1 / 1.05, rel=0.01)
    assert long.interval() is not None


def test_samples_that_are_no_times_are_refused():
    for value in (-1.0, float("nan"), float("inf"), 1e308):
        with pytest.raises(ValueError, match="samples are seconds"):
            of(1.0, value)


def test_a_rising_series_has_a_trend_and_a_shuffled_one_has_none():
    rising = of(*(1 + 0.01 * i for i in range(20))).trend()
    assert rising is not None and rising.p_value < 1e-6
    assert rising.relative_change == pytest.approx(20 * 0.01 / 1.095)
    noise = of(*statistics.NormalDist(1.0, 0.01).samples(30, seed=1)).trend()
    assert noise is not None and noise.p_value > 0.05


def test_speedup_over_a_baseline():
    fast, slow = of(*[1.0, 1.1, 0.9, 1.0, 1.0, 1.05]), of(*[2.0, 2.2, 1.8, 2.0, 2.0, 2.1])
    ratio = fast.speedup_over(slow)
    assert ratio is not None and ratio.value == 2.0
    assert ratio.interval is not None and ratio.interval.low <= 2.0 <= ratio.interval.high
    assert of(1.0).speedup_over(of(3.0)).interval is None  # pyright: ignore[reportOptionalMemberAccess]


def test_phases_of_the_same_steps_add_up():
    forward = Samples(values_s=(1.0, 2.0), warmup_s=(5.0,), clock="fake")
    backward = Samples(values_s=(3.0, 4.0), warmup_s=(6.0,), clock="fake")
    assert forward.plus(backward) == Samples(values_s=(4.0, 6.0), warmup_s=(11.0,), clock="fake")
    with pytest.raises(ValueError, match="same steps"):
        forward.plus(of(1.0))
