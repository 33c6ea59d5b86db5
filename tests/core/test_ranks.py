"""The steps of several ranks, taken together by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.core.evidence import Span, steps_together

MS = 1_000_000


def test_on_one_host_a_step_lasts_from_the_earliest_start_to_the_latest_end():
    first: list[Span] = [(0, 10 * MS), (20 * MS, 31 * MS)]
    second: list[Span] = [(2 * MS, 13 * MS), (20 * MS, 30 * MS)]
    assert steps_together([first, second], one_clock=True) == pytest.approx((0.013, 0.011))


def test_on_hosts_whose_clocks_differ_it_lasts_as_long_as_its_longest_rank():
    assert steps_together([[(0, 10 * MS)], [(7_000 * MS, 7_012 * MS)]], one_clock=False) == pytest.approx((0.012,))


def test_steps_that_a_rank_did_not_end_do_not_count():
    assert len(steps_together([[(0, 1), (2, 3)], [(0, 1)]], one_clock=True)) == 1
    with pytest.raises(ValueError, match="at least one rank"):
        steps_together([], one_clock=True)


_spans = st.lists(st.tuples(st.integers(0, 10**12), st.integers(1, 10**9)), min_size=1, max_size=4)


@given(st.lists(_spans, min_size=1, max_size=4))
def test_a_step_is_never_shorter_than_on_any_of_its_ranks(ranks: list[list[tuple[int, int]]]):
    spans = [[(begin, begin + lasts) for begin, lasts in rank] for rank in ranks]
    for one_clock in (True, False):
        together = steps_together(spans, one_clock=one_clock)
        for own in spans:
            assert all(step >= (end - begin) * 1e-9 for step, (begin, end) in zip(together, own, strict=False))
