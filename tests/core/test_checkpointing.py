"""What a choice of checkpointing makes of a model's blocks."""

import pytest

from stepscope.core.checkpointing import Span, group_of, of_fewer_layers, spans_of


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


def test_a_part_of_a_model_has_no_group_that_is_larger():
    assert [of_fewer_layers("every-4", layers) for layers in (2, 4, 6)] == ["every-2", "every-4", "every-4"]
    assert of_fewer_layers("attention", 1) == "attention"
