"""Which chunks of a sequence a rank takes, and how the parts make it up again."""

import pytest
import torch

from stepscope.core.errors import InputError
from stepscope.core.model_config import configure
from stepscope.core.workloads import TextbookWorkload
from stepscope.training.parallel.step import by_rank, in_order, part_of_sequence


def test_a_rank_takes_a_chunk_from_the_head_and_one_from_the_tail():
    positions = torch.arange(8)
    assert [part_of_sequence(positions, 0, rank, 2).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_have_equal_work_under_a_causal_mask(ranks: int):
    seen = torch.arange(12) + 1  # keys that each query sees
    work = {int(part_of_sequence(seen, 0, rank, ranks).sum()) for rank in range(ranks)}
    assert len(work) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parts_of_all_ranks_are_the_sequence(ranks: int):
    whole = torch.randn(2, 12, 3)
    parts = by_rank(whole, 1, ranks)
    assert parts.shape == (ranks, 2, 12 // ranks, 3)
    assert torch.equal(in_order(parts, 1), whole)


def test_a_sequence_that_chunks_do_not_divide_is_refused():
    tiny = TextbookWorkload(model=configure("tiny"), seq_len=10)
    with pytest.raises(InputError, match="seq_len 10 cannot be divided by 4: choose a multiple"):
        TextbookWorkload(model=tiny.model, seq_len=10, parallel="context-textbook", ranks=2)
    with pytest.raises(InputError, match="does not spread attention flash: choose --attention reference or sdpa"):
        TextbookWorkload(model=tiny.model, attention="flash", parallel="context-textbook", ranks=2)


def test_each_rank_has_its_part_of_the_tokens():
    of = TextbookWorkload(model=configure("tiny"), seq_len=16, parallel="context-textbook", ranks=2)
    assert (of.batch_parts, of.token_parts) == (1, 2)
