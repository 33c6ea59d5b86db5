"""Products of 8 bits: held against the same product in float64, and against what eight bits can hold."""

import importlib.util
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from stepscope.core.errors import InputError
from stepscope.training.scaled_products import (
    By,
    ScaledLinear,
    cast_as_on_a_gpu,
    plain_products,
    scale_products,
    scaled_product,
)
from stepscope.training.training_step import TrainingStep
from tests.conftest import mini

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BITS = {E4M3: 2.0**-4, E5M2: 2.0**-3}
"""Half a unit in the last place of a number of each format."""

needs_kernels = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or (DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="needs Triton, and a GPU or its interpreter",
)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def distance(made: Tensor, exact: Tensor) -> float:
    return float((made.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("by", ["tensor", "row"])
@pytest.mark.parametrize("left", [E4M3, E5M2])
@pytest.mark.parametrize("sizes", [(16, 16, 16), (32, 64, 48), (80, 16, 256)])
def test_a_product_is_as_exact_as_its_operands(sizes: tuple[int, int, int], left: torch.dtype, by: By):
    """Roundings of single operands are independent, so a sum of K products is about as exact as one of them."""
    if DEVICE.type == "cuda" and by == "row" and left is E5M2:
        pytest.skip("scaled by row, all operands are e4m3")
    m, k, n = sizes
    a, b = random(m, k), random(k, n, seed=1)
    made = scaled_product(a, b, by, left=left)
    assert made.dtype == torch.bfloat16 and made.shape == (m, n)
    assert distance(made, a.double() @ b.double()) < BITS[left] + BITS[E4M3]


@given(st.integers(0, 5), st.sampled_from([1e-30, 1e-6, 1.0, 1e6, 1e30]), st.sampled_from(["tensor", "row"]))
def test_the_scale_of_an_operand_does_not_matter(seed: int, scale: float, by: By):
    """An operand times any number is the same product times that number: eight bits alone reach from 2^-9 to 448."""
    a, b = random(16, 32, seed=seed), random(32, 16, seed=seed + 1)
    plain = scaled_product(a, b, by).double()
    assert distance(scaled_product(a * scale, b, by).double() / scale, plain) < 0.02


def test_an_outlier_costs_its_neighbours_nothing_by_row():
    """By tensor, one number of a million takes all others' bits."""
    a, b = random(32, 32), random(32, 16, seed=1)
    a[0, 0] = 1e6
    exact = a.double() @ b.double()
    assert distance(scaled_product(a, b, "row")[1:], exact[1:]) < 0.1
    assert distance(scaled_product(a, b, "tensor")[1:], exact[1:]) > 0.3


@pytest.mark.parametrize("by", ["tensor", "row"])
def test_zeros_stay_zeros_and_what_is_not_finite_stays_so(by: By):
    zeros, ones = torch.zeros(16, 16, device=DEVICE), torch.ones(16, 16, device=DEVICE)
    assert not scaled_product(zeros, ones, by).any()
    broken = ones.clone()
    broken[0, 0] = float("nan")
    assert scaled_product(broken, ones, by)[0].isnan().all(), "a step that overflows says so"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("by", ["tensor", "row"])
def test_a_layer_s_gradients_are_those_of_a_linear_layer(by: By, bias: bool):
    torch.manual_seed(0)
    plain = nn.Linear(64, 32, bias=bias).to(DEVICE)
    x, gradient = random(4, 8, 64).requires_grad_(), random(4, 8, 32, seed=1)
    plain(x).backward(gradient)
    exact = [x.grad, *(parameter.grad for parameter in plain.parameters())]
    x.grad = None
    plain.zero_grad()
    names = [name for name, _ in plain.named_parameters()]
    scale_products([plain], by, "fp8")
    assert isinstance(plain, ScaledLinear) and [name for name, _ in plain.named_parameters()] == names
    made = plain(x)
    made.backward(gradient.to(made.dtype))
    for ours, theirs in zip([x.grad, *(p.grad for p in plain.parameters())], exact, strict=True):
        assert ours is not None and theirs is not None
        assert ours.dtype == torch.float32 and distance(ours, theirs.double()) < 0.15
    plain_products(plain)
    assert type(plain) is nn.Linear


def results_of(layer: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor]:
    made: Tensor = layer(x)
    made.backward(gradient.to(made.dtype))
    found = [made.detach(), *(one.grad for one in (x, *layer.parameters()) if one.grad is not None)]
    x.grad = None
    layer.zero_grad()
    return found


def two_ways(by: By = "tensor") -> tuple[nn.Linear, nn.Linear]:
    """Two linear layers with the same weights: the first casts by PyTorch's operators, the second by kernels."""
    torch.manual_seed(0)
    ways = nn.Linear(64, 48, device=DEVICE), nn.Linear(64, 48, device=DEVICE)
    ways[1].load_state_dict(ways[0].state_dict())
    scale_products(ways, by, "fp8")
    cast_as_on_a_gpu(ways[1])
    setattr(ways[0], "kernels", False)  # noqa: B010  (types know no such change)
    return ways


@needs_kernels
@pytest.mark.parametrize("asked", [(True, True), (False, True), (True, False)])
def test_kernels_and_operators_give_a_layer_the_same_bits(asked: tuple[bool, bool]):
    """Whether or not backward wants the gradient of the input, or that of the weight."""
    plain, fused = two_ways()
    x, gradient = random(4, 8, 64).requires_grad_(asked[0]), random(4, 8, 48, seed=1)
    for layer in (plain, fused):
        layer.weight.requires_grad_(asked[1])
    expected, found = results_of(plain, x, gradient), results_of(fused, x, gradient)
    assert len(found) == len(expected) == 2 + sum(asked)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@needs_kernels
def test_kernels_in_a_compiled_layer_give_the_same_bits():
    _, fused = two_ways()
    x, gradient = random(4, 8, 64).requires_grad_(), random(4, 8, 48, seed=1)
    expected = results_of(fused, x, gradient)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    assert isinstance(compiled, nn.Module)
    assert all(torch.equal(a, b) for a, b in zip(results_of(compiled, x, gradient), expected, strict=True))


@needs_kernels
def test_by_row_no_kernel_casts():
    assert not any(getattr(layer, "kernels") for layer in two_ways("row"))  # noqa: B009


def test_layers_that_cannot_are_left_and_a_model_of_them_is_refused():
    odd, even = nn.Linear(10, 16), nn.Linear(16, 16)
    scale_products([nn.Sequential(odd, even)], "tensor", "fp8")
    assert type(odd) is nn.Linear and isinstance(even, ScaledLinear)
    with pytest.raises(InputError, match="dtype fp8 needs linear layers whose sizes are multiples of 16"):
        scale_products([odd], "tensor", "fp8")
    with pytest.raises(InputError, match="products of 8 bits take rows in multiples of 16"):
        even(torch.ones(3, 16))


@pytest.mark.parametrize("dtype", ["fp8", "fp8-row"])
def test_a_step_in_8_bits_learns_as_one_in_16(dtype: str):
    ends: list[float] = []
    for name in ("bf16-master", dtype):
        step = TrainingStep(mini(dtype=name, optimizer="adamw-fused", layers=1, d_model=32, d_ff=64), DEVICE)
        losses: list[float] = []
        for _ in range(6):
            step.prepare()
            for phase in step.phases:
                phase.run()
            assert step.loss is not None
            losses.append(float(step.loss))
        assert losses[-2] < losses[0]
        ends.append(losses[-1])
    assert ends[1] == pytest.approx(ends[0], abs=0.02)
    assert any(isinstance(module, ScaledLinear) for module in step.model.modules())
    assert type(step.model.head) is nn.Linear
