"""Statistics of samples: by hand, by property, and against SciPy."""

import math
import random
import statistics
from pathlib import Path

import msgspec
import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from stepscope.core.run_directory import load_run
from stepscope.core.samples import Interval, Samples
from stepscope.runs.checks.measurement import not_steady
from stepscope.runs.index import known
from stepscope.runs.metrics import samples_of
from tests.conftest import make_run

TIMES = st.lists(st.floats(min_value=1e-6, max_value=10.0), min_size=5, max_size=40)


def of(*values: float) -> Samples:
    return Samples(values_s=values, clock="fake")


def autocorrelated(
    generator: random.Random, n: int, rho: float, *, deviation: float = 0.05, drift: float = 0.0
) -> Samples:
    """An AR(1) process of mean 1 as it has long been running, and a line that rises by `drift` deviations."""
    level = generator.gauss()
    values: list[float] = []
    for i in range(n):
        values.append(1 + deviation * (level + drift * i / (n - 1)))
        level = rho * level + math.sqrt(1 - rho * rho) * generator.gauss()
    return of(*values)


def width_of_bootstrap(values: tuple[float, ...], generator: random.Random) -> float:
    """Of the percentile bootstrap's interval, which takes samples to be independent."""
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(400))
    return medians[-11] - medians[10]


def test_by_hand():
    samples = of(1.0, 2.0, 3.0, 4.0, 10.0)
    assert samples.median_s == 3.0
    assert samples.mean_s == 4.0
    assert samples.stdev_s == pytest.approx(math.sqrt((9 + 4 + 1 + 0 + 36) / 4))
    # Quartiles 2 and 4: fences at -1 and 7, so 10 is outside.
    assert samples.outliers == 1
    assert samples.spread == pytest.approx(2 / 3)


def test_the_median_of_an_even_number_lies_between_the_middle_two():
    assert of(1.0, 10.0, 2.0, 4.0).median_s == 3.0


@pytest.mark.parametrize("count", [20, 40])
def test_the_interval_of_an_even_number_of_samples_mirrors_with_them(count: int):
    """An interval round the upper or the lower of the middle two would move by a whole spacing, one way."""
    values = np.random.default_rng(0).permutation(count) + 10.0
    ours, mirrored = of(*values).interval(), of(*(100.0 - values)).interval()
    assert ours is not None and mirrored is not None
    assert abs(ours.low + mirrored.high - 100.0) <= 0.5
    assert abs(ours.high + mirrored.low - 100.0) <= 0.5


def test_a_statistic_without_support_is_absent():
    assert of().median_s is None
    assert of().mean_s is None
    assert of(1.0).stdev_s is None
    assert of(1.0, 2.0, 3.0).spread is None
    assert of(1.0, 2.0, 3.0).outliers is None
    assert of(1.0, 2.0, 3.0, 4.0).interval() is None
    assert of(*[1.0] * 7).trend() is None


@given(TIMES)
def test_interval_holds_the_median_and_is_of_times(values: list[float]):
    samples = of(*values)
    interval, median = samples.interval(), samples.median_s
    assert (interval is None) == (samples.why_no_interval is not None)
    assert interval is None or (median is not None and 0 < interval.low <= median <= interval.high < math.inf)
    assert interval == of(*values).interval()


def test_interval_of_independent_samples_is_that_of_order_statistics():
    # ScriptProfilers are unlike each other, so 100 samples are 100: ranks 50.5 +- 1.96 * sqrt(100) / 2.
    values = [(37 * i) % 101 for i in range(1, 101)]
    samples = of(*map(float, values))
    assert samples.autocorrelation == 0.0 and samples.effective_count == 100
    interval = samples.interval()
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx((50.5 - 9.7998, 50.5 + 9.7998), abs=1e-3)


def test_interval_of_samples_that_are_alike_or_none():
    assert of(*[2.0] * 5).interval() == of(*[2.0] * 40).interval() == Interval(low=2.0, high=2.0)
    assert of(*[0.0] * 9).interval() == Interval(low=0.0, high=0.0)
    assert of(*[1.0, 2.0] * 20).interval() == Interval(low=1.0, high=2.0)


def test_an_outlier_neither_widens_nor_hides_autocorrelation():
    steps = [1 + 0.001 * ((37 * i) % 101) for i in range(1, 41)]
    calm, hit = of(*steps), of(*steps[:20], 50.0, *steps[21:])
    widths = [interval.high - interval.low for s in (calm, hit) if (interval := s.interval())]
    assert widths[1] == pytest.approx(widths[0], rel=0.15)
    slow = [1 + 0.01 * math.sin(i / 8) for i in range(60)]
    assert (of(*slow[:20], 50.0, *slow[21:]).autocorrelation or 0) > 0.8


def test_autocorrelation_by_hand_with_its_bias_taken_off():
    # Ranks 1 4 3 2 5 6 about 3.5: products -1.25 - 0.25 + 0.75 - 2.25 + 3.75 = 0.75, squares 17.5.
    assert of(1.0, 4.0, 3.0, 2.0, 5.0, 60.0).autocorrelation == pytest.approx((6 * 0.75 / 17.5 + 1) / 3)
    assert of(1.0, 2.0, 3.0, 4.0).autocorrelation is None
    # Equal values share their mean rank: 5.5 1.5 1.5 3.5 5.5 3.5, products -4 + 4 + 0 + 0 + 0, squares 16.
    assert of(3.0, 1.0, 1.0, 2.0, 3.0, 2.0).autocorrelation == pytest.approx(1 / 3)


def test_fewer_than_five_effective_samples_have_no_interval_and_say_so():
    wandering = of(*(1 + 0.01 * math.sin(i / 8) for i in range(60)))
    assert wandering.effective_count is not None and wandering.effective_count < 5
    assert wandering.interval() is None and "independent" in (wandering.why_no_interval or "")
    ratio = wandering.speedup_over(of(*[1.0] * 9))
    assert ratio is not None and ratio.interval is None and ratio.undecided and ratio.why_undecided
    assert "4 samples are too few" in (of(1.0, 2.0, 3.0, 4.0).why_no_interval or "")


@pytest.mark.parametrize(("rho", "least"), [(0.0, 0.93), (0.5, 0.90), (0.9, 0.85)])
@pytest.mark.parametrize("n", [30, 100])
def test_intervals_cover_the_true_median_as_often_as_required(n: int, rho: float, least: float):
    """Of the intervals that are given, also where most samples are too much alike for one."""
    generator = random.Random(f"cover {n} {rho}")
    count = {(30, 0.9): 2000}.get((n, rho), 300)
    intervals = [autocorrelated(generator, n, rho).interval() for _ in range(count)]
    given_ = [interval for interval in intervals if interval]
    assert len(given_) > (0.95 if rho == 0 else 0.8 if rho == 0.5 else 0.15) * count
    assert sum(interval.low <= 1 <= interval.high for interval in given_) >= least * len(given_)


def test_intervals_of_independent_samples_are_little_wider_than_the_bootstraps():
    generator = random.Random(3)
    drawn = [autocorrelated(generator, 30, 0.0) for _ in range(200)]
    ours = statistics.fmean(interval.high - interval.low for s in drawn if (interval := s.interval()))
    assert ours <= 1.3 * statistics.fmean(width_of_bootstrap(s.values_s, generator) for s in drawn)


def test_a_ratio_covers_the_true_one_though_both_sides_are_autocorrelated():
    generator = random.Random(4)
    ratios = [autocorrelated(generator, 50, 0.5).speedup_over(autocorrelated(generator, 50, 0.5)) for _ in range(300)]
    intervals = [ratio.interval for ratio in ratios if ratio and ratio.interval]
    assert sum(interval.low <= 1 <= interval.high for interval in intervals) >= 0.93 * len(intervals) > 250


@pytest.mark.parametrize("n", [30, 100, 300])
def test_equal_processes_of_noise_with_a_long_memory_seldom_seem_to_differ(n: int):
    """Power 1 / frequency, for 64 times as long as a process lasts: each process meets another part of it."""
    generator = np.random.default_rng(n)
    length = 64 * n
    amplitudes = np.concatenate([[0.0], np.fft.rfftfreq(length)[1:] ** -0.5])

    def process() -> Samples:
        waves = generator.normal(size=(2, len(amplitudes)))
        series = np.fft.irfft((waves[0] + 1j * waves[1]) * amplitudes, length)
        first = generator.integers(0, length - n)
        return of(*np.exp(0.02 * series[first : first + n] / series.std()).tolist())

    ratios = [process().speedup_over(process()) for _ in range(300)]
    assert sum(ratio is not None and not ratio.undecided for ratio in ratios) <= 0.07 * len(ratios)


def test_slow_waves_widen_a_ratio_and_independent_steps_do_not():
    # ScriptProfilers are unlike each other: nothing is widened.
    unlike = of(*(1 + 0.001 * ((37 * i) % 101) for i in range(1, 101)))
    assert unlike.wandering == 1.0 and of(*[1.0] * 40).wandering == 1.0 and of(1.0, 2.0).wandering == 1.0
    generator = random.Random(7)
    independent = [autocorrelated(generator, 100, 0.0).wandering for _ in range(200)]
    assert statistics.median(independent) == 1.0 and statistics.fmean(independent) < 1.3
    waves = of(*(1 + 0.01 * (math.sin(i / 30) + generator.gauss(0, 0.5)) for i in range(200)))
    assert waves.wandering > 3
    ratio, plain = waves.speedup_over(unlike), waves.interval()
    assert ratio and ratio.interval and plain
    assert ratio.interval.high / ratio.interval.low > (plain.high / plain.low) ** 3
    assert known(waves).wandering == waves.wandering


def test_a_median_wanders_no_further_than_single_samples_lie():
    """Steps that are all slower than all others are slower, however they wander: at most 1.02, and at least 1.09."""
    generator = random.Random(11)
    noise = [0.01 * math.sin(i / 20) + generator.uniform(-0.01, 0.01) for i in range(100)]
    short, long = of(*(1 + x for x in noise)), of(*(1.11 + x for x in noise))
    inner, outer = short.interval(), long.interval()
    assert short.wandering > 2 and long.wandering > 2 and inner and outer
    ratio = long.speedup_over(short)
    assert ratio and ratio.interval and not ratio.undecided
    up = max(inner.high, *short.values_s) / statistics.median(short.values_s)
    down = statistics.median(long.values_s) / min(outer.low, *long.values_s)
    assert ratio.interval.high <= ratio.value * math.exp(math.hypot(math.log(up), math.log(down))) * (1 + 1e-12)


def test_halves_of_stored_runs_agree():
    """First half against second half of every stored run on a GPU with at least 20 steps: A against A."""
    excluded = compared = 0
    for path in sorted((Path(__file__).parents[2] / "results" / "h200").rglob("run.json")):
        step = load_run(path).samples.get("step")
        if step is None or step.count < 20:
            continue
        half = step.count // 2
        ratio = of(*step.values_s[half : 2 * half]).speedup_over(of(*step.values_s[:half]))
        assert ratio is not None
        compared += 1
        excluded += not ratio.undecided
    assert compared == 102 and excluded / compared <= 4 / 59


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("n", [30, 100])
def test_a_steady_run_seldom_seems_to_drift(n: int, rho: float):
    count = 2000 if (n, rho) == (30, 0.9) else 200  # where it is the most, one must look closely
    generator = random.Random(f"steady {n} {rho}")
    # Close to what is allowed: benchmarks/coverage.py simulates the rates to a tenth of this error.
    drifting = [drifts(autocorrelated(generator, n, rho)) for _ in range(count)]
    assert sum(drifting) <= 0.05 * count


@pytest.mark.parametrize(("rho", "least", "count"), [(0.0, 0.95, 200), (0.5, 0.70, 2000)])
def test_a_drift_of_five_deviations_is_found(rho: float, least: float, count: int):
    generator = random.Random(f"drift of five {rho}")
    found = [drifts(autocorrelated(generator, 30, rho, drift=5.0)) for _ in range(count)]
    assert sum(found) >= least * len(found)


def drifts(samples: Samples) -> bool:
    finding = next(not_steady(make_run(step=list(samples.values_s))), None)
    return finding is not None and "p_value" in finding.evidence


@given(st.lists(st.integers(1, 6).map(float), min_size=12, max_size=30))
def test_trend_has_scipys_slope(values: list[float]):
    trend = of(*values).trend()
    assert trend is not None
    slope, *_ = np.asarray(scipy.stats.theilslopes(values))
    assert trend.relative_change == pytest.approx(slope * len(values) / statistics.median(values), abs=1e-9)


def test_p_value_of_the_trend_agrees_with_scipys_asymptotic_test():
    # About the line neighbours are unlike each other: there is nothing to correct.
    values = [10 + 0.02 * i + math.sin(2.2 * i) for i in range(60)]
    trend = of(*values).trend()
    assert trend is not None
    _, theirs = np.asarray(scipy.stats.kendalltau(range(60), values, method="asymptotic"))
    # Ours corrects for continuity, theirs does not: a little larger, and close.
    assert theirs <= trend.p_value <= theirs * 1.1


def test_many_samples():
    long = of(*(1 + 1e-6 * i for i in range(100_000)))
    trend = long.trend()
    assert trend is not None and trend.p_value < 1e-9
    assert trend.relative_change == pytest.approx(0.1 / 1.05, rel=0.01)
    assert long.effective_count is not None and long.effective_count < 1000


@pytest.mark.parametrize("value", [5e-324, 1e-200, 9e-13])
def test_what_no_clock_tells_apart_is_no_sample(value: float):
    with pytest.raises(ValueError, match="1e-12"):
        Samples(values_s=(1.0, value), clock="c")


def test_an_interval_ends_near_its_samples():
    """Two levels, fiftyfold apart, in runs: the upper limit exceeds the largest sample by its distance to the median.

    As a ratio, which was how limits were drawn apart without a bound, it came to several times the largest sample.
    """
    generator = random.Random(2)
    high, values = False, list[float]()
    for _ in range(30):
        if generator.random() < 0.3:
            high = not high and generator.random() < 0.6
        values.append(498.0 if high else 9.95)
    samples = of(*values)
    interval = samples.interval()
    assert samples.median_s == 9.95 and interval == Interval(low=9.95, high=498.0 + (498.0 - 9.95))


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


def test_without_an_interval_only_sides_far_apart_are_told_apart():
    wandering = [1 + 0.01 * math.sin(i / 8) for i in range(60)]
    alike, twice = of(*(value * 1.01 for value in wandering)), of(*(value * 2 for value in wandering))
    near, far = alike.speedup_over(of(*wandering)), of(*wandering).speedup_over(twice)
    assert near and near.undecided and near.why_undecided
    assert far and far.interval is None and not far.undecided and not far.why_undecided and far.surely_above(near)
    slower = twice.speedup_over(of(*wandering))
    assert slower and not slower.undecided and slower.value == 0.5
    few = of(1.0, 1.0).speedup_over(of(2.0, 2.0))
    assert few and few.undecided


def test_phases_of_the_same_steps_add_up():
    forward = Samples(values_s=(1.0, 2.0), warmup_s=(5.0,), clock="fake")
    backward = Samples(values_s=(3.0, 4.0), warmup_s=(6.0,), clock="fake")
    assert forward.plus(backward) == Samples(values_s=(4.0, 6.0), warmup_s=(11.0,), clock="fake")
    with pytest.raises(ValueError, match="same steps"):
        forward.plus(of(1.0))
    damaged = Samples(values_s=(3.0, 4.0), clock="fake")
    assert forward.adds_to(backward) and not forward.adds_to(damaged), "without the warm-up's steps"
    run = msgspec.structs.replace(make_run(), samples={"forward": forward, "backward": damaged})
    assert samples_of(run, "forward-backward") is None


MANY_TIMES = st.lists(st.floats(min_value=1e-6, max_value=10.0), min_size=300, max_size=400)


@given(MANY_TIMES)
def test_percentiles_are_numpys_and_scipys(values: list[float]):
    samples = of(*values)
    for name, percent in (("p95", 95), ("p99", 99)):
        ours = samples.percentile_s(name)
        assert ours == pytest.approx(float(np.percentile(values, percent)), rel=1e-12)
        definition_7 = scipy.stats.mstats.mquantiles(values, [percent / 100], alphap=1, betap=1)
        assert ours == pytest.approx(float(definition_7[0]), rel=1e-12)


@given(MANY_TIMES)
def test_percentiles_lie_in_order_below_the_largest(values: list[float]):
    samples = of(*values)
    median_s, p95_s, p99_s = samples.median_s, samples.percentile_s("p95"), samples.percentile_s("p99")
    assert median_s is not None and p95_s is not None and p99_s is not None
    assert median_s <= p95_s <= p99_s <= max(values)
    assert samples.percentile_s("p95") == of(*reversed(values)).percentile_s("p95")


def test_a_percentile_has_three_samples_above_it_or_is_absent():
    """Of 60 samples, the 95th percentile lies at 1 + 59 x 0.95 = 57.05; of 300, the 99th at 1 + 299 x 0.99 = 297.01."""
    assert of(*map(float, range(1, 60))).percentile_s("p95") is None
    assert of(*map(float, range(1, 61))).percentile_s("p95") == pytest.approx(57.05)
    assert of(*map(float, range(1, 300))).percentile_s("p99") is None
    assert of(*map(float, range(1, 301))).percentile_s("p99") == pytest.approx(297.01)


@given(st.lists(st.floats(min_value=1e-12, max_value=1e8) | st.just(0.0), min_size=2, max_size=20))
def test_the_deviation_is_pythons_to_the_last_digit(values: list[float]):
    assert of(*values).stdev_s == statistics.stdev(values)
