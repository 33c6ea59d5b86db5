"""Changes of level: found where there are some, and seldom where there are none."""

import itertools
import math
import random
import statistics

import pytest

from stepscope.runs.history import _exact, _exact_with_ties, changes_of_level, smallest_change


def noise(seed: int, count: int, deviation: float = 0.01, level: float = 0.0) -> list[float]:
    chance = random.Random(seed)
    return [level + chance.gauss(0, deviation) for _ in range(count)]


def test_a_series_without_a_change_has_one_in_at_most_five_of_a_hundred():
    wrong = sum(bool(changes_of_level(noise(seed, 40), 0.05)) for seed in range(400))
    assert wrong <= 20 + 3 * math.sqrt(19)  # three deviations of a binomial law above five of a hundred


def test_two_changes_are_found_where_they_are():
    values = noise(1, 20) + noise(2, 20, level=0.1) + noise(4, 20, level=0.05)
    assert [cut.place for cut in changes_of_level(values, 0.05)] == [20, 40]


def test_a_change_in_the_last_runs_is_found():
    assert [cut.place for cut in changes_of_level(noise(1, 50) + noise(2, 3, level=0.1), 0.05)] == [50]


def test_one_slow_run_and_equal_figures_are_no_change():
    values = noise(1, 30)
    values[17] = 3.0
    assert changes_of_level(values, 0.05) == []
    assert changes_of_level([1.0] * 30, 0.05) == []
    assert changes_of_level([], 0.05) == changes_of_level([1.0], 0.05) == []


@pytest.mark.parametrize(("few", "many"), [(1, 4), (3, 4), (4, 4)])
def test_the_exact_chance_is_that_of_all_orders(few: int, many: int):
    middle = few * (few + many + 1) / 2
    sums = [sum(chosen) for chosen in itertools.combinations(range(1, few + many + 1), few)]
    for away in {abs(one - middle) for one in sums}:
        share = sum(abs(one - middle) >= away for one in sums) / len(sums)
        assert _exact(few, many, away) == pytest.approx(min(1.0, share if away else 1.0))


def test_the_smallest_change_is_found_in_about_nine_of_ten():
    found = 0
    for seed in range(200):
        before = noise(seed, 40)
        reach = smallest_change(before, 0.05)
        assert reach is not None
        truth = math.log1p(0.01 / statistics.stdev(before) * reach)
        found += bool(changes_of_level(before[:20] + [one + truth for one in before[20:]], 0.05))
    assert found >= 170


def test_too_few_runs_find_nothing():
    assert smallest_change(noise(1, 7), 0.05) is None


@pytest.mark.parametrize("values", [[1, 1, 1, 2, 2, 2], [1, 2, 2, 3, 3, 3, 4], [5, 1, 1, 1, 1, 9, 9, 2]])
@pytest.mark.parametrize("few", [2, 3])
def test_the_exact_chance_with_equal_figures_is_that_of_all_choices(values: list[float], few: int):
    ranks = [sum(other < one for other in values) + (sum(other == one for other in values) + 1) / 2 for one in values]
    middle = few * (len(values) + 1) / 2
    sums = [sum(chosen) for chosen in itertools.combinations(ranks, few)]
    for away in {abs(one - middle) for one in sums}:
        share = sum(abs(one - middle) >= away - 1e-9 for one in sums) / len(sums)
        assert _exact_with_ties(ranks, few, away) == pytest.approx(share)


def test_six_figures_of_two_values_are_no_change():
    assert changes_of_level([1.0, 1.0, 1.0, 2.0, 2.0, 2.0], 0.05) == [], "2 of 20 orders are as far apart"
