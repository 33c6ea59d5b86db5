"""Attention in autocast and in torch.func: what PyTorch's own does there, ours does, or it says that it does not."""

import importlib.util
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import stepscope.kernels
from stepscope.core.errors import InputError
from stepscope.core.parts import Attention
from stepscope.kernels import FlashAttention, FlashAttentionTiled
from stepscope.kernels.flash import attention as flash_attention
from stepscope.kernels.flash import tiled as flash_tiled
from stepscope.training.attention import AttentionFunction, implementation

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RUNS = importlib.util.find_spec("triton") is not None and (
    DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
)
needs_kernels = pytest.mark.skipif(not RUNS, reason="needs Triton, and a GPU or TRITON_INTERPRET=1")
FLASH = pytest.param("flash", marks=needs_kernels)


def drawn(heads: int = 1, length: int = 33) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 16, device=DEVICE) for _ in range(3))
    return q, k, v


# ---- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["sdpa", "reference", "flash-tiled", FLASH])
def test_autocast_lowers_each_as_it_lowers_pytorchs(name: Attention, dtype: torch.dtype):
    """The output in autocast's dtype, as if the inputs had been cast before; the gradients in the inputs'."""
    attend = implementation(name)
    q, k, v = (tensor.requires_grad_() for tensor in drawn())
    with torch.autocast(DEVICE, dtype):
        out = attend(q, k, v, causal=True)
    assert out.dtype == dtype
    out.float().square().sum().backward()
    lower = [tensor.detach().to(dtype).requires_grad_() for tensor in (q, k, v)]
    by_hand = attend(*lower, causal=True)
    by_hand.float().square().sum().backward()
    for wide, low in zip((q, k, v), lower, strict=True):
        assert wide.grad is not None and low.grad is not None and wide.grad.dtype == torch.float32
        if name != "reference":  # autocast has its exponentials in fp32
            assert torch.equal(out, by_hand) and torch.equal(wide.grad, low.grad.float())


@pytest.mark.parametrize("name", ["flash-tiled", FLASH])
def test_autocast_makes_one_dtype_of_several_and_leaves_fp64(name: Attention):
    attend = implementation(name)
    q, k, v = drawn()
    with torch.autocast(DEVICE, torch.bfloat16):
        assert attend(q, k.bfloat16(), v.half(), causal=False).dtype == torch.bfloat16
        if name == "flash-tiled":
            assert attend(q.double(), k.double(), v.double(), causal=False).dtype == torch.float64
    with pytest.raises(InputError, match="one"):
        attend(q, k.bfloat16(), v, causal=False)


@needs_kernels
@pytest.mark.parametrize("function", [FlashAttention, FlashAttentionTiled])
def test_functions_follow_autocast_too(function: type[torch.autograd.Function]):
    q, k, v = (tensor.requires_grad_() for tensor in drawn())
    with torch.autocast(DEVICE, torch.bfloat16):
        out = function.apply(q, k, v, True)
    assert isinstance(out, Tensor) and out.dtype == torch.bfloat16
    out.sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32


def test_both_functions_are_to_be_had_in_one_place():
    for place in (flash_attention, stepscope.kernels):
        assert (place.FlashAttention, place.FlashAttentionTiled) == (FlashAttention, flash_tiled.FlashAttentionTiled)


@needs_kernels
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_both_functions_take_and_give_and_save_the_same(leading: tuple[int, ...], causal: bool):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*leading, 40, 16, generator=generator).to(DEVICE) for _ in range(4)]
    found: list[list[torch.Tensor]] = []
    for function in (FlashAttention, FlashAttentionTiled):
        q, k, v = (tensor.clone().requires_grad_() for tensor in inputs[:3])
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=saved: to.append(t) or t, lambda t: t):
            out = function.apply(q, k, v, causal)
        assert isinstance(out, torch.Tensor)
        found.append([out, *torch.autograd.grad(out, (q, k, v), inputs[3]), *saved])
    for ours, tiled in zip(*found, strict=True):
        assert ours.shape == tiled.shape and ours.dtype == tiled.dtype
        assert torch.allclose(ours, tiled, atol=2e-5, rtol=2e-5)


# ---- torch.func

Transformed = Callable[[AttentionFunction], Tensor | tuple[Tensor, ...]]


def gradients(attend: AttentionFunction) -> tuple[Tensor, ...]:
    return torch.func.grad(lambda q, k, v: attend(q, k, v, causal=True).square().sum(), argnums=(0, 1, 2))(*drawn())


def of_each_sample(attend: AttentionFunction) -> tuple[Tensor, ...]:
    """Grouped heads: k and v have one where q has two."""
    q, k, v = drawn(heads=2)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q[None], k[None], v[None], causal=True).square().sum()

    return torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k[:, :1], v[:, :1])


def mapped_over_one(attend: AttentionFunction) -> Tensor:
    """Queries by their last dimension but one, keys and values the same for all."""
    q, k, v = drawn()
    many = torch.stack([q, 2 * q, -q], dim=2)
    return torch.func.vmap(lambda x: attend(x, k, v, causal=False), in_dims=2)(many)


def jacobian(attend: AttentionFunction) -> Tensor:
    q, k, v = (tensor[:1] for tensor in drawn(heads=1, length=3))
    found = torch.func.jacrev(lambda x: attend(x, k, v, causal=True))(q)
    assert isinstance(found, Tensor)
    return found


@needs_kernels
@pytest.mark.parametrize(
    "transformed", [gradients, of_each_sample, mapped_over_one, pytest.param(jacobian, marks=pytest.mark.long)]
)
def test_flash_is_transformed_as_attention_written_out_is(transformed: Transformed):
    torch.testing.assert_close(
        transformed(implementation("flash")), transformed(implementation("reference")), atol=1e-4, rtol=1e-4
    )


@needs_kernels
def test_what_flash_does_not_support_of_torch_func_is_said_in_a_line():
    q, k, v = drawn()

    def attend(x: Tensor) -> Tensor:
        return implementation("flash")(x, k, v, causal=True)

    with pytest.raises(InputError, match=r"grad, vjp, vmap and jacrev, not forward mode .*: take attention reference"):
        torch.func.jvp(attend, (q,), (q,))
    twice = torch.func.grad(lambda x: torch.func.grad(lambda y: attend(y).sum())(x).sum())
    with pytest.raises(InputError, match="has no second derivative: take attention reference"):
        twice(q)
    with pytest.raises(InputError, match=r"FlashAttention.apply cannot be transformed .*: take flash_attention"):
        torch.func.grad(lambda x: FlashAttention.apply(x, k, v, True).sum())(q)


def test_tiled_is_not_transformed_and_says_so():
    q, k, v = drawn()
    for transform in (
        lambda: torch.func.grad(lambda x: implementation("flash-tiled")(x, k, v, causal=True).sum())(q),
        lambda: torch.func.vmap(lambda x: FlashAttentionTiled.apply(x, k, v, True))(q[None]),
    ):
        with pytest.raises(
            InputError, match=r"flash-tiled cannot be transformed by torch.func .*: take attention flash"
        ):
            transform()
