"""Changes of level in a series of figures, found by binary segmentation.

A series is cut where the figures before and after differ most, by the Mann-Whitney test, and each part is looked at
again (Scott and Knott 1974; Pettitt 1979 for the test at the place that is worst). It knows ranks alone: no law of the
noise is assumed, and one slow run is no change. Its p-value is multiplied by the number of places that a cut could
have been at (Bonferroni), and `level` is divided by the number of series that are looked at together, by the caller.

Figures are assumed to be independent but for the level. Where one run's noise resembles the next's, as on a machine
that is busy for a day, a change of the machine is found as one of the level: it is true, and no commit made it.
"""

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST_BESIDE = 3
"""The fewest figures on each side of a cut."""
_EXACT = 12
"""Up to so many figures on the smaller side the test is exact; above, the normal law is near enough."""
_EXACT_WITH_TIES = 24
"""Up to so many figures the test is exact where some are equal, too."""
_PER_DEVIATION = 0.955
"""The efficiency of the Mann-Whitney test beside Student's for normal noise, 3 / pi (Lehmann 1975)."""
_NORMAL = statistics.NormalDist()


@dataclass(frozen=True)
class Cut:
    """A change of level: the place of the first figure after it, and the chance of such a one where nothing changed."""

    place: int
    p_value: float


def changes_of_level(values: Sequence[float], level: float) -> list[Cut]:
    """The changes of level in this series, in their order; `level` is the chance of one where there is
    none. Each part between two changes is a series of its own, with the same chance."""
    found: list[Cut] = []
    waiting = [(0, len(values))]
    while waiting:
        begin, end = waiting.pop()
        cut = _worst(values[begin:end])
        if cut is not None and cut.p_value <= level:
            place = begin + cut.place
            found.append(Cut(place, cut.p_value))
            waiting += [(begin, place), (place, end)]
    return sorted(found, key=lambda cut: cut.place)


def smallest_change(values: Sequence[float], level: float) -> float | None:
    """The change in the middle of this one level, as a share, that would be found in nine of ten; None where none would
    be, however large. `values` are logarithms."""
    count = len(values)
    places, half = count - 2 * FEWEST_BESIDE + 1, count // 2
    if places < 1 or 2 / math.comb(count, half) * places > level:
        return None
    reach = _NORMAL.inv_cdf(1 - level / places / 2) + _NORMAL.inv_cdf(0.9)
    error = statistics.stdev(values) * math.sqrt((1 / half + 1 / (count - half)) / _PER_DEVIATION)
    return math.expm1(reach * error)


def _worst(values: Sequence[float]) -> Cut | None:
    """The place at which the two sides differ most, with its p-value for all places; None where there is no place."""
    count = len(values)
    if count < 2 * FEWEST_BESIDE:
        return None
    ranks, ties = _ranks(values)
    spread = (count + 1 - ties / (count * (count - 1))) / 12
    if spread <= 0:  # all are the same
        return None
    best, place, sum_of_ranks, rank_sum = 0.0, 0, sum(ranks[: FEWEST_BESIDE - 1]), 0.0
    for before in range(FEWEST_BESIDE, count - FEWEST_BESIDE + 1):
        sum_of_ranks += ranks[before - 1]
        away = abs(sum_of_ranks - before * (count + 1) / 2)
        score = away / math.sqrt(before * (count - before) * spread)
        if score > best:
            best, place, rank_sum = score, before, away
    if not place:
        return None
    after = count - place
    if min(place, after) <= _EXACT and not ties:
        p_value = _exact(min(place, after), max(place, after), rank_sum)
    elif ties and count <= _EXACT_WITH_TIES:
        p_value = _exact_with_ties(ranks, min(place, after), rank_sum)
    else:
        p_value = math.erfc(max(0.0, best - 0.5 / math.sqrt(place * after * spread)) / math.sqrt(2))
    return Cut(place, min(1.0, p_value * (count - 2 * FEWEST_BESIDE + 1)))


def _ranks(values: Sequence[float]) -> tuple[list[float], int]:
    """The ranks from 1, equal values their mean, and the sum of t^3 - t over ties of t values."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks, ties, first = [0.0] * len(values), 0, 0
    while first < len(order):
        last = first
        while last + 1 < len(order) and values[order[last + 1]] == values[order[first]]:
            last += 1
        for position in order[first : last + 1]:
            ranks[position] = (first + last) / 2 + 1
        ties += (last - first + 1) ** 3 - (last - first + 1)
        first = last + 1
    return ranks, ties


def _exact(few: int, many: int, away: float) -> float:
    """The two-sided chance that the rank sum of `few` among all is so far from its mean, where all orders are alike."""
    counts = _counts(few, many)
    reach = math.floor(few * many / 2 - away + 1e-9)
    return min(1.0, 2 * sum(counts[: reach + 1]) / math.comb(few + many, few))


@functools.cache
def _counts(few: int, many: int) -> list[int]:
    """How many orders give each value of Mann and Whitney's U: the coefficients of the Gaussian binomial."""
    counts = [1] + [0] * (few * many)
    for i in range(1, few + 1):
        for u in range(len(counts) - 1, many + i - 1, -1):
            counts[u] -= counts[u - many - i]
        for u in range(i, len(counts)):
            counts[u] += counts[u - i]
    return counts


def _exact_with_ties(ranks: Sequence[float], few: int, away: float) -> float:
    """The same chance where some figures are equal: over all choices of `few` of these ranks, counted by their sum."""
    doubled = [round(2 * rank) for rank in ranks]  # the mean of equal ranks may end in a half
    ways: list[dict[int, int]] = [{0: 1}, *({} for _ in range(few))]
    for rank in doubled:
        for chosen in range(few, 0, -1):
            for total, count in ways[chosen - 1].items():
                ways[chosen][total + rank] = ways[chosen].get(total + rank, 0) + count
    mean = few * (len(ranks) + 1)
    far = sum(count for total, count in ways[few].items() if abs(total - mean) >= 2 * away - 1e-9)
    return far / math.comb(len(ranks), few)
