"""Which parameters change, by digests."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.recording import updates as changes
from stepscope.recording.updates import digest

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_numbers_have_equal_digests_and_a_changed_bit_another(dtype: torch.dtype):
    numbers = torch.linspace(-2, 2, 15).to(dtype).reshape(3, 5)
    assert digest(numbers).tolist() == digest(numbers.clone()).tolist() == digest(numbers.t()).tolist()
    changed = numbers.clone()
    changed.view(torch.uint8)[1, 3] += 1
    assert digest(numbers).tolist() != digest(changed).tolist()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=2, max_size=6).filter(any))
def test_changes_that_cancel_are_seen(steps: list[int]):
    """Updates whose sum is zero, as those of a softmax's biases are."""
    before = torch.ones(2 * len(steps), dtype=torch.bfloat16)
    moves = torch.tensor([*steps, *(-step for step in steps)], dtype=torch.int16)
    after = (before.view(torch.int16) + moves).view(torch.bfloat16)
    assert digest(before).tolist() != digest(after).tolist()


def test_a_large_parameter_is_summed_in_parts(monkeypatch: pytest.MonkeyPatch):
    numbers = torch.randn(1000)
    whole = digest(numbers).tolist()
    monkeypatch.setattr(changes, "_AT_ONCE", 7)
    assert digest(numbers).tolist() == whole
