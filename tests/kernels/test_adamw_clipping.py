"""AdamW in one launch with clipped gradients, against PyTorch's clip_grad_norm_ and AdamW in float64: on a GPU, or
without one in Triton's interpreter (conftest.py)."""

import copy
import math
from collections.abc import Sequence

import pytest
import torch
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from stepscope.kernels import adamw
from stepscope.kernels.adamw import CHUNK
from stepscope.training.one_launch import AdamWOneLaunch, AdamWUnderBackward
from tests.kernels.test_adamw import DEVICE, OPTIONS, gradients, held, is_rounding, parameters, stepped

pytestmark = pytest.mark.slow

HALF, FULL = torch.bfloat16, torch.float32


def norm_of(ours: Sequence[Tensor], seed: int) -> float:
    return math.hypot(*(float(gradient.double().norm()) for gradient in gradients(ours, seed)))


def clipped_in_float64(ours: Sequence[Tensor], steps: int, max_norm: float) -> list[Tensor]:
    """The parameters after so many steps of PyTorch's clipping and AdamW in float64, of the same gradients."""
    exact = [nn.Parameter(each.detach().double()) for each in ours]
    optimizer = torch.optim.AdamW(exact, **OPTIONS, foreach=False)
    for step in range(steps):
        for parameter, gradient in zip(exact, gradients(ours, step), strict=True):
            parameter.grad = gradient.double()
        torch.nn.utils.clip_grad_norm_(exact, max_norm)
        optimizer.step()
    return [each.detach() for each in exact]


@pytest.mark.parametrize(
    ("optimizer_class", "dtypes", "share"),
    [
        (AdamWOneLaunch, (FULL,), 1.0), (AdamWOneLaunch, (HALF,), 1.0), (AdamWOneLaunch, (HALF, FULL), 0.01),
        (AdamWOneLaunch, (HALF, FULL), 100.0), (AdamWUnderBackward, (HALF, FULL), 1.0),
    ],
)  # fmt: skip
def test_masters_are_those_of_float64(
    optimizer_class: type[AdamWOneLaunch], dtypes: Sequence[torch.dtype], share: float
):  # fmt: skip
    """With a bound far below the norms of the gradients, between those of the steps, and far above."""
    ours = parameters(dtypes)
    norms = [norm_of(ours, step) for step in range(3)]
    max_norm = share * sum(norms) / 3
    exact = clipped_in_float64(ours, 3, max_norm)
    optimizer = optimizer_class(ours, **OPTIONS, max_norm=max_norm)
    stepped(optimizer, ours, 0, 1, 2)
    for parameter, wanted in zip(ours, exact, strict=True):
        master = held(optimizer, parameter)
        torch.testing.assert_close(master.double(), wanted, rtol=3e-6, atol=3e-7)
        assert parameter.dtype == torch.float32 or is_rounding(parameter, master)
    assert optimizer.gradient_norm is not None
    assert float(optimizer.gradient_norm) == pytest.approx(norms[2], rel=1e-6)


def test_moments_are_those_of_the_clipped_gradients_and_gradients_stay():
    """The first update of AdamW is the same for c g as for g; its moments are not."""
    ours = parameters((HALF, FULL))
    optimizer = AdamWOneLaunch(ours, **OPTIONS, max_norm=0.5)
    coefficient = 0.5 / (norm_of(ours, 0) + 1e-6)
    for parameter, gradient in zip(ours, gradients(ours, 0), strict=True):
        parameter.grad = gradient
    optimizer.step()
    for parameter, gradient in zip(ours, gradients(ours, 0), strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, gradient)
        state, clipped = optimizer.state[parameter], coefficient * gradient.double()
        torch.testing.assert_close(state["exp_avg"].double(), 0.1 * clipped, rtol=2e-6, atol=1e-12)
        torch.testing.assert_close(state["exp_avg_sq"].double(), 1e-3 * clipped**2, rtol=4e-6, atol=1e-12)


def test_the_norm_is_that_of_all_groups():
    ours = parameters((FULL,))
    groups = [{"params": ours[:3], "lr": 1e-1}, {"params": ours[3:6]}, {"params": ours[6:]}]
    optimizer = AdamWOneLaunch(groups, **OPTIONS, max_norm=1.0)
    stepped(optimizer, ours, 0)
    assert optimizer.gradient_norm is not None
    assert float(optimizer.gradient_norm) == pytest.approx(norm_of(ours, 0), rel=1e-6)


def test_a_bound_that_no_norm_reaches_changes_no_bit():
    ours = parameters((HALF, FULL))
    twins = copy.deepcopy(ours)
    stepped(AdamWOneLaunch(ours, **OPTIONS), ours, 0, 1)
    stepped(AdamWOneLaunch(twins, **OPTIONS, max_norm=1e6), twins, 0, 1)
    assert all(torch.equal(one, other) for one, other in zip(ours, twins, strict=True))


def test_the_bits_are_the_same_again():
    norms: list[Tensor] = []
    for _ in range(2):
        ours = parameters((HALF, FULL))
        optimizer = AdamWOneLaunch(ours, **OPTIONS, max_norm=0.5)
        stepped(optimizer, ours, 0)
        assert optimizer.gradient_norm is not None
        norms.append(optimizer.gradient_norm.clone())
    assert torch.equal(*norms)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_no_finite_number_is_as_pytorch_has_it(value: float):
    """An infinite norm makes gradients zero, but for the infinite ones; a norm that is no number makes all none."""
    ours = parameters((FULL,))
    twins = copy.deepcopy(ours)
    for some in (ours, twins):
        for parameter, gradient in zip(some, gradients(some, 0), strict=True):
            parameter.grad = gradient
        first = some[0].grad
        assert first is not None
        first[1, 1] = value
    optimizer, plain = AdamWOneLaunch(ours, **OPTIONS, max_norm=1.0), torch.optim.AdamW(twins, **OPTIONS, foreach=False)
    torch.nn.utils.clip_grad_norm_(twins, 1.0)
    optimizer.step()
    plain.step()
    for parameter, twin in zip(ours, twins, strict=True):
        torch.testing.assert_close(parameter, twin, rtol=1e-6, atol=1e-7, equal_nan=True)
    assert bool(ours[0].isnan().any()) and bool(ours[2].isnan().all()) == math.isnan(value)


@pytest.mark.parametrize("shapes", [[], [(0,)], [(0, 4), (0,)]], ids=len)
def test_nothing_to_clip_is_no_fault(shapes: list[tuple[int, ...]]):
    ours = [nn.Parameter(torch.ones(shape, device=DEVICE)) for shape in shapes]
    without = nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer = AdamWOneLaunch([*ours, without], **OPTIONS, max_norm=1.0)
    stepped(optimizer, ours, 0)
    assert torch.equal(without, torch.ones_like(without))


def test_more_chunks_than_programs_are_all_counted(monkeypatch: pytest.MonkeyPatch):
    """Three programs for seven chunks, of which the last is a part of one."""
    monkeypatch.setattr(adamw, "SUMS", tl.constexpr(3))
    weight = nn.Parameter(torch.zeros(CHUNK.value * 6 + 5, device=DEVICE, dtype=HALF))
    weight.grad = torch.zeros_like(weight)
    weight.grad[0], weight.grad[CHUNK.value * 3], weight.grad[-1] = 2.0, 3.0, 6.0
    optimizer = AdamWOneLaunch([weight], **OPTIONS, max_norm=1.0)
    optimizer.step()
    assert optimizer.gradient_norm is not None and float(optimizer.gradient_norm) == 7.0


@given(
    st.lists(st.lists(st.integers(0, 20), max_size=3), min_size=1, max_size=4),
    st.integers(0, 2**31),
    st.sampled_from([HALF, FULL]),
    st.integers(0, 1),
    st.floats(1e-6, 1e6),
)
def test_the_norm_is_that_of_float64(
    shapes: list[list[int]], seed: int, dtype: torch.dtype, offset: int, scale: float
):  # fmt: skip
    """The norm is right for any shapes, aligned or not, and any size of gradients."""
    generator = torch.Generator().manual_seed(seed)
    ours: list[nn.Parameter] = []
    for shape in shapes:
        parameter = nn.Parameter(torch.zeros(shape, device=DEVICE, dtype=dtype))
        drawn = scale * torch.randn(parameter.numel() + offset, generator=generator)
        parameter.grad = drawn.to(DEVICE, dtype)[offset:].view(shape)
        ours.append(parameter)
    wanted = torch.nn.utils.get_total_norm([each.grad.double() for each in ours if each.grad is not None])
    optimizer = AdamWOneLaunch(ours, **OPTIONS, max_norm=1.0)
    optimizer.step()
    assert optimizer.gradient_norm is not None
    torch.testing.assert_close(optimizer.gradient_norm.double(), wanted, rtol=1e-6, atol=0.0)
