"""The judge of any function: writes are seen and undone, memory that runs out is nobody's fault, errors by hand."""

import math

import pytest
import torch
from torch import Tensor

from stepscope.training.judging import (
    Call,
    Watched,
    WrongKind,
    allowed_errors,
    attempt,
    compare,
    nan_around,
    relative_errors,
    run_call,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.complex128])
def test_a_write_is_seen_and_undone(dtype: torch.dtype):
    memory = torch.ones(4, 6).to(dtype).T
    before, watched = memory.clone(), Watched.of(memory)
    assert not watched.mend()
    memory[2, 1] = 0
    assert watched.mend() and torch.equal(memory, before) and not watched.mend()


def test_a_view_is_watched_with_what_lies_around_it():
    memory, view = nan_around((2, 3), torch.float32, CPU, beside=1)
    view.fill_(1)
    watched = Watched.around(view)
    assert int((~memory.isnan()).sum()) == 6 and not watched.mend()  # NaN is no write
    memory[0] = 0
    assert watched.mend() and bool(memory[0].isnan())


def test_memory_that_ran_out_is_raised_and_what_was_written_is_undone():
    x = torch.zeros(3)

    def run() -> dict[str, Tensor]:
        x.add_(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        attempt(run, {"x": Watched.of(x)}, twice=False)
    assert not x.any()


def test_what_a_function_raises_writes_and_repeats_is_told():
    x, calls = torch.zeros(3), list[int]()

    def run() -> dict[str, Tensor]:
        calls.append(1)
        x.add_(1)
        return {"output": torch.full((2,), float(len(calls)))}

    done = attempt(run, {"x": Watched.of(x)}, twice=True)
    assert done.written == ("x",) and done.repeats is False and done.raised is None and not x.any()
    assert attempt(run, {}, twice=False).repeats is None
    call, like = Call((x,)), {"output": torch.zeros(2)}
    wrong = attempt(lambda: run_call(lambda x: x, call, ["x"], None, backward=False, like=like), {}, twice=True)
    assert isinstance(wrong.raised, WrongKind) and "the output is (3,), not (2,)" in str(wrong.raised)


def test_errors_by_hand():
    exact = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    found = exact.float() + torch.tensor([[0.0, 0.0], [0.0, 0.5]])
    # An error of 0.5 is divided by the tensor's norm, 5; in the worst row by the usual row's, 5 over the root of two.
    assert relative_errors(found, exact) == pytest.approx((0.1, 0.1 * math.sqrt(2)))
    assert relative_errors(found, exact, 50.0) == pytest.approx((0.01, 0.01 * math.sqrt(2)))
    found[0, 0] = math.nan
    assert all(map(math.isnan, relative_errors(found, exact)))
    assert allowed_errors((0.1, 0.2), 0.001, slack=2.0) == (0.4, 1.6)
    assert allowed_errors((0.0, 0.0), 0.5, slack=1.0, sums=0.25, blur=3.0) == (3.0, 12.0)


@pytest.mark.parametrize(("others", "allowed"), [((), 0.02), ((0.03,), 0.06), ((0.005, 0.03, 0.02), 0.06)])
def test_the_largest_error_of_several_yardsticks_counts(others: tuple[float, ...], allowed: float):
    """The output is one row, whose bound as the worst row is wider, so that the bound of the whole decides."""

    def off(by: float) -> dict[str, Tensor]:
        return {"output": torch.tensor([3.0, 4.0 + 5 * by], dtype=torch.float64)}

    for by, wrong in ((allowed * 0.99, False), (allowed * 1.01, True)):
        yardsticks = [*map(off, others)]
        errors, reason = compare(off(0), off(0.01), off(by), {"output": 1e-3}, 1.0, others=yardsticks)
        assert errors["output"] == pytest.approx((by, allowed)) and bool(reason) == wrong
