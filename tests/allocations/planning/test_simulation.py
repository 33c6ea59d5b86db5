"""A step played through, against the formulas and by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.allocations.planning.times import StepTime, Work, schedule, simulate
from stepscope.core.formulas.planned_model import bubble_turns, chunks_in_flight
from stepscope.core.layout import Layout


def times(forward: float = 1.0, backward: float = 2.0, **more: float) -> StepTime:
    usual = {"send_s": 0.0, "last_forward_s": 0.0, "last_backward_s": 0.0, "data_s": 0.0, "optimizer_s": 0.0}
    return StepTime(step_s=0.0, parts={}, forward_s=forward, backward_s=backward, **{**usual, **more})


def played(layout: Layout, time: StepTime, spread: float = 0.0, seed: int = 1):
    found = simulate(layout, time, spread, seed)
    assert found is not None
    return found


def test_a_1f1b_schedule_by_hand():
    layout = Layout(pipeline=2, micro_batches=3)
    forward, backward = (lambda i: Work(True, i, 0)), (lambda i: Work(False, i, 0))
    assert schedule(layout, 0) == [forward(0), forward(1), backward(0), forward(2), backward(1), backward(2)]
    assert schedule(layout, 1) == [forward(0), backward(0), forward(1), backward(1), forward(2), backward(2)]


def test_an_interleaved_schedule_goes_through_a_chunk_with_p_micro_batches():
    layout = Layout(pipeline=2, chunks=2, micro_batches=4)
    forwards = [(work.micro_batch, work.chunk) for work in schedule(layout, 1) if work.forward]
    assert forwards == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    backwards = [(work.micro_batch, work.chunk) for work in schedule(layout, 1) if not work.forward]
    assert backwards == [(0, 1), (1, 1), (0, 0), (1, 0), (2, 1), (3, 1), (2, 0), (3, 0)]


@given(p=st.integers(1, 6), v=st.integers(1, 3), rounds=st.integers(1, 4))
def test_a_schedule_does_each_piece_once_and_holds_what_the_formula_says(p: int, v: int, rounds: int):
    v = v if p > 1 else 1
    layout = Layout(pipeline=p, chunks=v, micro_batches=rounds * p)
    for rank in range(p):
        work = schedule(layout, rank)
        assert len(set(work)) == len(work) == 2 * layout.micro_batches * v
        held = most = 0
        for one in work:
            held += 1 if one.forward else -1
            most = max(most, held)
        assert most == chunks_in_flight(layout, rank)


def test_a_pipeline_of_two_by_hand():
    # F0 F1 . B0 F2 B1 . B2 on the first rank: 1 + 1 + 1 idle + 2 + 1 + 2 + 2 ... the formula: (3 + 1) x 3.
    assert played(Layout(pipeline=2, micro_batches=3), times()).step_s == 12


@settings(max_examples=60)
@given(
    p=st.integers(1, 6), v=st.sampled_from([1, 2, 4]), rounds=st.integers(1, 4), forward=st.floats(0.1, 3),
    ratio=st.floats(0.5, 3),
)  # fmt: skip
def test_without_sends_and_stragglers_the_simulation_is_the_formula(
    p: int, v: int, rounds: int, forward: float, ratio: float
):
    """m turns, and (p - 1) / v idle ones (Narayanan et al. 2021)."""
    layout = Layout(pipeline=p, chunks=v if p > 1 else 1, micro_batches=rounds * p)
    one = forward / layout.chunks
    found = played(layout, times(one, one * ratio, data_s=0.5, optimizer_s=0.25))
    turn = forward * (1 + ratio)
    assert found.pipeline_s == pytest.approx((layout.micro_batches + bubble_turns(layout)) * turn)
    assert found.step_s == pytest.approx(found.pipeline_s + 0.75)
    worked = layout.micro_batches * turn
    assert found.idle_share == pytest.approx(1 - worked / found.pipeline_s, abs=1e-9)


def test_sends_add_what_the_formula_adds():
    """1F1B: to fill and drain, 2 (p - 1) sends; then (p - 1) / p of two for each further micro-batch."""
    p, m, send = 4, 32, 0.1
    quick, slow = (played(Layout(pipeline=p, micro_batches=m), times(send_s=s)).step_s for s in (0.0, send))
    expected = 2 * (p - 1) * send + 2 * send * (p - 1) / p * (m - p)
    assert slow - quick == pytest.approx(expected, rel=0.15)


def test_the_last_rank_has_the_head():
    found = played(Layout(pipeline=2, micro_batches=8), times(last_forward_s=1.0, last_backward_s=2.0))
    assert found.step_s == pytest.approx(8 * 6 + 3)  # eight turns of the slower rank, and one of the other


def test_stragglers_slow_a_step_and_a_seed_repeats_them():
    layout = Layout(pipeline=4, data=8, micro_batches=8)
    quick = played(layout, times())
    slow = played(layout, times(), 0.05)
    assert quick.step_s < slow.step_s < 1.25 * quick.step_s
    assert slow.replicas == 8
    assert played(layout, times(), 0.05).step_s == slow.step_s
    assert played(layout, times(), 0.05, 7).step_s != slow.step_s


def test_more_ranks_that_wait_for_one_another_are_slower():
    alone, many = (played(Layout(tensor=tensor, micro_batches=4), times(), 0.02).step_s for tensor in (1, 64))
    assert many > alone


def test_the_timeline_has_a_lane_for_each_pipeline_rank():
    found = played(Layout(pipeline=2, micro_batches=2), times(data_s=1.0))
    assert {one.lane for one in found.slices} == {"pipeline rank 0", "pipeline rank 1"}
    assert {one.kind for one in found.slices} == {"forward", "backward", "data parallel"}
    first = found.slices[0]
    assert (first.begin, first.end, first.name) == (0.0, 1000.0, "forward of micro-batch 0")


def test_too_long_a_step_is_not_played():
    assert simulate(Layout(pipeline=64, micro_batches=100_000), times()) is None
