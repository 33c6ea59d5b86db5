"""What a choice of checkpointing makes of a model's blocks."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.core.checkpointing import (
    Span,
    every_choice,
    group_of,
    grouped,
    keeping,
    mixtures,
    nested_parts,
    of_fewer_layers,
    offload_of,
    selective_of,
    spans_of,
)


@pytest.mark.parametrize(
    ("checkpointing", "group"),
    [("none", None), ("selective", None), ("every-1", 1), ("every-4", 4), ("every-0", None), ("every-04", None)],
)
def test_the_group_of_a_checkpointing(checkpointing: str, group: int | None):
    assert group_of(checkpointing) == group


@pytest.mark.parametrize(
    ("checkpointing", "groups", "multiplies", "attends"),
    [
        ("none", 7, False, False),
        ("selective", 7, False, False),
        ("attention", 7, True, False),
        ("every-1", 7, True, True),
        ("every-3", 3, True, True),
        ("every-7", 1, True, True),
    ],
)
def test_what_runs_again_in_seven_blocks_that_keep_alike(
    checkpointing: str, groups: int, multiplies: bool, attends: bool
):
    (span,) = spans_of(checkpointing, 7)
    assert span == Span(checkpointing, 7)
    assert (span.groups, span.multiplies_again, span.attends_again) == (groups, multiplies, attends)


def test_the_last_blocks_of_a_mixture_keep_more():
    assert spans_of("selective-2", 7) == (Span("attention", 5), Span("selective", 2))
    assert [selective_of(one) for one in ("selective-12", "selective-0", "selective", "every-2", None)] == [
        12, None, None, None, None,
    ]  # fmt: skip


def test_calls_that_hold_calls_by_hand():
    """Halves of 8 blocks: 2 calls of 4, of 2, of 1 run 2 x (2 + 2 x 1 + 4) blocks again; a chain of N runs 1, and for
    each of the others all before it and itself."""
    assert [*map(list, nested_parts(range(7), 3))] == [[0, 1, 2], [3, 4], [5, 6]]
    assert nested_parts("abc", 1) == ["ab", "c"] and nested_parts("a", 1) == nested_parts("a", 2) == ["a"]
    assert Span("nested-2", 8).runs_again == (2 * (2 + 2 * 1 + 4), 8)
    assert Span("nested-1", 5).runs_again == (1 + sum(range(1, 5)), 5)
    assert Span("nested-4", 4).runs_again == Span("every-1", 4).runs_again == (4, 4)
    (span,) = spans_of("nested-2", 8)
    assert (span.group, span.groups, span.attends_again) == (8, 1, True)


def test_all_choices_have_each_number_of_groups_once():
    assert every_choice(6, kept=False) == (
        "none", "selective", "every-1", "every-2", "every-3", "every-6", "nested-1", "nested-2", "nested-3",
    )  # fmt: skip
    assert every_choice(1, kept=True) == ("none", "selective", "attention", "every-1", "nested-1")


def test_blocks_that_offload_lie_evenly_between_the_others():
    assert spans_of("offload-2", 4) == tuple(Span(kept, 1) for kept in ("offload", "selective") * 2)
    assert spans_of("offload-3", 4) == (Span("offload", 3), Span("selective", 1))
    assert spans_of("offload-1", 4) == (Span("offload", 1), Span("selective", 3))
    assert spans_of("offload-4", 4) == (Span("offload", 4),)
    assert [offload_of(one) for one in ("offload-12", "offload-0", "offload", "selective-2")] == [12, None, None, None]


@given(layers=st.integers(1, 60), data=st.data())
def test_any_number_of_blocks_offloads(layers: int, data: st.DataObject):
    """As many as asked for, the first among them, and so evenly that no run of blocks has two more of them than
    another as long. The last offloads only where all do: its copies have no block beside them."""
    offloaded = data.draw(st.integers(1, layers))
    spans = spans_of(f"offload-{offloaded}", layers)
    each = [span.on_host for span in spans for _ in range(span.blocks)]
    assert (len(each), sum(each), each[0], each[-1]) == (layers, offloaded, True, offloaded == layers)
    assert all(a.checkpointing != b.checkpointing for a, b in itertools.pairwise(spans))
    assert not any(span.multiplies_again or span.attends_again for span in spans)
    length = data.draw(st.integers(1, layers))
    counts = {sum(each[start : start + length]) for start in range(layers - length + 1)}
    assert max(counts) - min(counts) <= 1


@given(layers=st.integers(1, 50), share=st.floats(0, 1))
def test_the_choice_of_so_many_blocks_that_keep_more(layers: int, share: float):
    """None of them is `attention`, all are `selective`, and what lies between has its spans."""
    last = round(share * layers)
    spans = [span for span in (Span("attention", layers - last), Span("selective", last)) if span.blocks]
    assert list(spans_of(keeping(last, layers), layers)) == spans


def test_blocks_in_the_groups_of_their_spans():
    (mixed, last), (alike,) = grouped("abcd", spans_of("selective-1", 4)), grouped("abcde", spans_of("every-2", 5))
    assert mixed == (Span("attention", 3), ["a", "b", "c"])
    assert last == (Span("selective", 1), ["d"])
    assert alike == (Span("every-2", 5), ["ab", "cd", "e"])


def test_mixtures_that_a_search_tries_are_those_of_quarters():
    assert mixtures(34) == ("selective-25", "selective-17", "selective-8")
    assert mixtures(4) == ("selective-3", "selective-2", "selective-1")
    assert (mixtures(2), mixtures(1)) == (("selective-1",), ())


def test_the_last_blocks_of_a_model_have_no_group_that_is_larger():
    assert [of_fewer_layers("every-4", layers) for layers in (2, 4, 6)] == ["every-2", "every-4", "every-4"]
    assert [of_fewer_layers("selective-4", layers) for layers in (2, 4, 6)] == ["selective", "selective", "selective-4"]
    assert [of_fewer_layers("offload-4", layers) for layers in (2, 4, 6)] == ["offload-2", "offload-4", "offload-4"]
    assert of_fewer_layers("attention", 1) == "attention"
