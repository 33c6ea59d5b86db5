"""Statistics over processes, against SciPy, hand-computed cases and simulated experiments."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from stepscope.core.processes import (
    FEWEST_PROCESSES,
    Processes,
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
