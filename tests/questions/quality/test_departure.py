"""The rule of departure, on curves by hand and on random walks."""

import math
import random

from stepscope.questions.quality_answer import departure, not_finite_from, smoothed, starts_apart


def test_smoothing_by_hand():
    assert smoothed([4.0, 2.0, 0.0, 6.0], 2) == [4, 3, 1, 3]
    assert smoothed([4.0, math.nan, 2.0], 2) == [4, 4, 2]
    lost = smoothed([4.0, math.inf, math.nan], 2)
    assert lost[:2] == [4, 4] and math.isnan(lost[2])


def test_starts_apart_by_hand():
    runs = [[0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 2.0], [0.0, -3.0, 0.0, 0.0]]
    assert starts_apart(runs, 0) == [1, 3, 0, 2]
    assert starts_apart(runs, 1) == [3, 3, 3, 2]


REFERENCE = [3.0] * 100
APART = [0.1] * 100


def departs(losses: list[float], window: int = 1) -> int | None:
    return departure(losses, REFERENCE, APART, window=window, reach=10)


def test_curves_that_depart_and_curves_that_do_not():
    assert departs([3.05] * 100) is None
    assert departs([3.0] * 40 + [3.2] * 60) == 41
    assert departs([3.0] * 40 + [2.8] * 60) == 41  # below is a difference too
    assert departs([3.2] * 100) == 1
    assert departs([3.2] * 30 + [3.0] * 70) is None  # it came back
    assert departs([3.2] * 30 + [3.0] * 10 + [3.2] * 60) == 41
    assert departs([3.0] * 90 + [3.2] * 10) == 91
    assert departs([3.0] * 91 + [3.2] * 9) is None  # too late to tell whether it stays
    assert departs([3.0] * 40 + [3.15] * 60, window=4) == 43  # with three of the four beyond, their mean is


def test_a_loss_that_is_lost_departs_however_late():
    assert departs([3.0] * 99 + [math.nan]) == 100
    assert departs([3.0] * 50 + [math.nan] * 50, window=5) == 51
    assert departs([3.0] * 50 + [math.inf] * 10, window=5) == 51  # stopped early
    assert departs([3.0] * 20 + [3.2] * 40 + [math.nan] * 40) == 21
    assert departs([3.0] * 50 + [math.nan] + [3.0] * 49, window=5) is None  # a step that was skipped
    assert not_finite_from([1.0, math.nan, 1.0]) is None and not_finite_from([math.nan]) == 1


def test_runs_like_the_starts_seldom_depart():
    """Random walks of one kind: a fourth departs from the first of three less often than every other time."""
    generator = random.Random(0)

    def walk() -> list[float]:
        position, walked = 0.0, []
        for _ in range(100):
            position = 0.95 * position + generator.gauss(0, 1)
            walked.append(position)
        return walked

    found = 0
    for _ in range(200):
        starts = [smoothed(walk(), 5) for _ in range(3)]
        found += departure(walk(), starts[0], starts_apart(starts, 10), window=5, reach=10) is not None
    assert found < 30
