"""Statistics over processes, against SciPy, hand-computed cases and simulated experiments."""

import math
import random
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from stepscope.core.processes import (
    FEWEST_PROCESSES,
    Change,
    Processes,
    _drift,
    change_of_pairs,
    standing,
    student_quantile,
    student_tail,
)

medians = st.lists(st.floats(1e-3, 1e3), min_size=FEWEST_PROCESSES, max_size=12).filter(
    lambda m: max(m) > 1.001 * min(m)
)


@given(st.floats(-50, 50), st.floats(1, 300))
def test_students_tail_is_scipys(t: float, freedom: float):
    assert student_tail(t, freedom) == pytest.approx(stats.t.sf(t, freedom), rel=1e-8, abs=1e-13)


@given(st.floats(0.01, 0.999), st.floats(1, 300))
def test_students_quantile_is_scipys(share: float, freedom: float):
    assert student_quantile(share, freedom) == pytest.approx(stats.t.ppf(share, freedom), rel=1e-7, abs=1e-9)


@given(medians)
def test_the_interval_is_scipys(found: list[float]):
    interval = Processes(tuple(found)).interval()
    logarithms = [math.log(median) for median in found]
    wanted = stats.ttest_1samp(logarithms, 0).confidence_interval(0.95)
    assert interval is not None
    assert (math.log(interval.low), math.log(interval.high)) == pytest.approx((wanted.low, wanted.high), abs=1e-6)


@given(medians, medians)
def test_a_change_is_that_of_welchs_test(before: list[float], after: list[float]):
    change = Processes(tuple(after)).change_from(Processes(tuple(before)))
    wanted = stats.ttest_ind(*([math.log(m) for m in side] for side in (after, before)), equal_var=False)
    limits = wanted.confidence_interval(0.95)
    assert change is not None and change.interval is not None
    assert change.p_value is not None
    assert change.p_value == pytest.approx(wanted[1], rel=1e-6, abs=1e-12)
    assert math.log(change.interval.low) == pytest.approx(limits.low, abs=1e-6)
    assert math.log(change.interval.high) == pytest.approx(limits.high, abs=1e-6)
    assert change.decided == (change.p_value < 0.05)


def test_the_ratio_is_that_of_the_typical_times():
    before, after = Processes((1.0, 2.0, 4.0)), Processes((3.0, 3.0))
    change = after.change_from(before)
    assert before.typical_s == pytest.approx(2.0) and after.typical_s == pytest.approx(3.0)
    assert change is not None and change.ratio == pytest.approx(1.5) and change.share == pytest.approx(0.5)


@pytest.mark.parametrize("few", range(1, FEWEST_PROCESSES))
def test_few_processes_give_a_ratio_and_no_verdict(few: int):
    side = Processes(tuple(1.0 + i / 100 for i in range(few)))
    change = side.change_from(Processes((2.0, 2.1, 1.9, 2.0, 2.05, 2.02)))
    paired = change_of_pairs(side.medians_s)
    for found in (change, paired):
        assert found is not None and found.interval is None and found.p_value is None and not found.decided
    assert side.interval() is None
    assert (side.deviation is None) == (few == 1)


def test_nothing_was_measured():
    none = Processes(())
    assert none.typical_s is None and none.deviation is None and none.change_from(Processes((1.0,))) is None
    assert change_of_pairs([]) is None


def test_processes_that_are_all_equal():
    same = Processes((1.0,) * 5)
    change = same.change_from(same)
    assert change is not None and not change.decided and change.p_value == 1.0
    slower = Processes((1.5,) * 5).change_from(same)
    assert slower is not None and slower.decided and slower.p_value == 0.0 and slower.ratio == pytest.approx(1.5)


def _simulated(generator: random.Random, count: int, deviation: float, factor: float = 1.0) -> Processes:
    """Processes whose times are spread by a law with a tail: some are much slower than the others."""
    tails = (
        generator.gauss(0, 1) + (generator.expovariate(1) if generator.random() < 0.2 else 0) for _ in range(count)
    )
    return Processes(tuple(factor * math.exp(deviation * tail) for tail in tails))


@pytest.mark.parametrize("count", [5, 10])
def test_equal_sides_seldom_seem_to_differ(count: int):
    generator = random.Random(count)
    trials = 1000
    changes = [
        _simulated(generator, count, 0.02).change_from(_simulated(generator, count, 0.02)) for _ in range(trials)
    ]
    assert sum(change is not None and change.decided for change in changes) <= 0.06 * trials


def test_the_change_that_is_said_to_be_seen_is_seen():
    generator = random.Random(3)
    seen, smallest = 0, []
    for _ in range(400):
        base = _simulated(generator, 10, 0.01).change_from(_simulated(generator, 10, 0.01))
        assert base is not None and base.detectable is not None
        smallest.append(base.detectable)
    size = 1 + sorted(smallest)[len(smallest) // 2]
    for _ in range(400):
        slower = _simulated(generator, 10, 0.01, size).change_from(_simulated(generator, 10, 0.01))
        seen += slower is not None and slower.decided and slower.ratio > 1
    assert seen >= 0.85 * 400


def test_pairs_see_what_processes_apart_hide():
    """Two sides that differ by 1 % in every process, and processes that differ by 20 %."""
    generator = random.Random(1)
    base = [math.exp(generator.gauss(0, 0.2)) for _ in range(6)]
    beside = [median * 1.01 * math.exp(generator.gauss(0, 0.001)) for median in base]
    apart = Processes(tuple(beside)).change_from(Processes(tuple(base)))
    paired = change_of_pairs([b / a for a, b in zip(base, beside, strict=True)])
    assert apart is not None and not apart.decided
    assert paired is not None and paired.decided and paired.paired and paired.ratio == pytest.approx(1.01, abs=2e-3)


def correlated(generator: np.random.Generator, count: int, rho: float) -> list[float]:
    """Noise of deviation 1 whose neighbours correlate by rho."""
    levels = [generator.normal()]
    for _ in range(count - 1):
        levels.append(rho * levels[-1] + math.sqrt(1 - rho * rho) * generator.normal())
    return levels


def pink(generator: np.random.Generator, count: int) -> list[float]:
    """A window of noise of power 1 / frequency, which goes on for 64 times as long."""
    length = 64 * count
    amplitudes = np.concatenate([[0.0], np.fft.rfftfreq(length)[1:] ** -0.5])
    waves = generator.normal(size=(2, len(amplitudes)))
    series = np.fft.irfft((waves[0] + 1j * waves[1]) * amplitudes, length)
    first = generator.integers(0, length - count + 1)
    return [float(level) for level in series[first : first + count] / series.std()]


NOISES = {"rho 0.5": partial(correlated, rho=0.5), "1/f": pink}


def in_order(order: str, levels: Sequence[float], effect: float = 0.0, pace_s: float = 30.0) -> Change:
    """The change from processes A to processes B that ran in this order, one every half a minute."""
    sides = [
        Processes(
            tuple(math.exp(0.02 * levels[place] + effect * (name == "B")) for place in places),
            tuple(1.7e9 + pace_s * place for place in places),
        )
        for name in "AB" if (places := [place for place, one in enumerate(order) if one == name])
    ]  # fmt: skip
    change = sides[1].change_from(sides[0])
    assert change is not None
    return change


@pytest.mark.parametrize(("name", "count"), [(name, count) for name in NOISES for count in (5, 20)])
def test_equal_sets_one_after_the_other_seldom_seem_to_differ(name: str, count: int):
    """And an effect of twice the interval's half-width is found."""
    generator, order, trials = np.random.default_rng(count), "A" * count + "B" * count, 300
    changes = [in_order(order, NOISES[name](generator, 2 * count)) for _ in range(trials)]
    assert sum(change.decided for change in changes) <= 0.07 * trials
    half_widths = [math.log(change.interval.high / change.interval.low) / 2 for change in changes if change.interval]
    effect = 2 * sum(half_widths) / trials
    found = [in_order(order, NOISES[name](generator, 2 * count), effect) for _ in range(trials)]
    assert sum(change.decided and change.ratio > 1 for change in found) >= 0.9 * trials


@pytest.mark.parametrize("order", ["AB" * 5, "ABBA" * 5, "AABB" * 3 + "AB", "BAAB" * 3])
def test_sets_that_took_turns_lose_nothing(order: str):
    """The interval is Welch's to the bit; without the times it was that, too."""
    change = in_order(order, correlated(np.random.default_rng(2), len(order), 0.0))
    apart = [[level for level, name in zip(correlated(np.random.default_rng(2), len(order), 0.0), order, strict=True)
              if name == side] for side in "AB"]  # fmt: skip
    before, after = (Processes(tuple(math.exp(0.02 * level) for level in levels)) for levels in apart)
    assert change == after.change_from(before) and change.widened == 1.0 and not change.seemed


@pytest.mark.parametrize(("order", "more"), [("AAAAABBBBB", 1.8), ("AAAAAABBABBBBB", 1.5), ("AAABBBAAABBB", 1.1)])
def test_the_less_sets_took_turns_the_wider_is_the_interval(order: str, more: float):
    change = in_order(order, correlated(np.random.default_rng(3), len(order), 0.0))
    assert more - 0.1 < change.widened < more + 0.6
    later = in_order(order, correlated(np.random.default_rng(3), len(order), 0.0), pace_s=3600.0)
    assert later.widened == pytest.approx(change.widened), "what counts is the order, and the gaps beside one another"


def test_a_set_of_the_day_before_is_further_away():
    levels = correlated(np.random.default_rng(4), 10, 0.0)
    before = Processes(tuple(map(math.exp, levels[:5])), tuple(30.0 * i for i in range(5)))
    soon, next_day = (
        Processes(tuple(map(math.exp, levels[5:])), tuple(start + 30.0 * i for i in range(5))).change_from(before)
        for start in (150.0, 86_400.0)
    )
    assert soon and next_day and 1.5 < soon.widened < 2.5 and 3.5 < next_day.widened < 6


def test_what_drift_does_to_two_sets_of_two_by_hand():
    """Half of log(1 + (5.6 d)^2) at d = 1, 2, 3 is 1.7385, 2.4199, 2.8231. Between the sets its mean is 2.3504, within
    each 0.8692, so the means differ by 2 * 2.3504 - 2 * 0.8692 = 2.9622, where Welch expects 2 * 0.8692 = 1.7385."""
    drift = _drift((0.0, 1.0), (2.0, 3.0))
    assert drift is not None and drift.factor == pytest.approx(math.sqrt(2.9622 / 1.7385), abs=1e-3)
    assert drift.freedoms == pytest.approx((1.0, 1.0))
    assert _drift((0.0, 2.0), (1.0, 3.0)).factor < 1  # pyright: ignore[reportOptionalMemberAccess]
    one_moment = _drift((0.0,) * 5, (86_400.0,) * 5)
    assert one_moment == _drift((0.0, 1.0, 2.0, 3.0, 4.0), (5.0, 6.0, 7.0, 8.0, 9.0)), "which cannot show how it drifts"
    assert one_moment is not None and one_moment.factor > 1.5
    assert _drift((), (1.0, 2.0)) is None and _drift((5.0, 5.0), (5.0, 5.0)) is None


@given(medians, medians, st.lists(st.floats(0, 1e9), min_size=24, max_size=24))
def test_no_times_break_a_comparison(before: list[float], after: list[float], times: list[float]):
    change = Processes(tuple(after), tuple(times[: len(after)])).change_from(
        Processes(tuple(before), tuple(times[12 : 12 + len(before)]))
    )
    assert change is not None and change.interval is not None and change.widened >= 0.99
    assert 0 < change.interval.low <= change.ratio <= change.interval.high < math.inf


def test_many_comparisons_at_once_are_corrected():
    """By hand: 0.01 stands among four (0.05 / 4), then 0.02 would need 0.05 / 3, so no more stand."""
    assert standing([0.02, 0.01, 0.9, None, 0.04]) == [False, True, False, False, False]
    assert standing([0.02]) == [True]
    assert standing([]) == []


@given(st.lists(st.floats(0, 1), max_size=30))
def test_what_stands_is_holms(values: list[float]):
    stands = standing(values)
    order = sorted(range(len(values)), key=lambda i: values[i])
    adjusted, highest = [0.0] * len(values), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, values[place] * (len(values) - rank))
        adjusted[place] = highest
    near = [abs(p - 0.05) < 1e-9 for p in adjusted]
    assert all(n or stand == (p <= 0.05) for stand, p, n in zip(stands, adjusted, near, strict=True))
