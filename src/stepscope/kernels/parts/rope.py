"""Rotary embedding of queries and keys in one launch, in Triton.

    rotated(q, k, cos, sin) -> q', k'         q (B, H, S, D), k (B, H', S, D), cos and sin (S or more, D)

Each pair (a, b) = (x[i], x[i + D/2]) at position s turns by the angle t = s * base^(-2i/D):

    a' = a cos t - b sin t        b' = b cos t + a sin t

The tables hold cos and sin of each angle twice, once for each half; the kernel reads the first half. A rotation's
transpose is its inverse, so backward turns the gradients by -t: the same kernel with the other sign, and autograd keeps
nothing but the tables. It is computed in fp32 (in fp64 for fp64) and rounded once. Tensors are read as they lie, with
any strides, so heads that are a view of a projection's output are not copied; results get the layout of what they are
made from.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.core.errors import InputError
from stepscope.core.parts import PARTS
from stepscope.kernels import native
from stepscope.kernels.launching import check_place, launch_at, power_of_two, tiles_of, wide
from stepscope.kernels.operators import check_part, define, refuse_second_derivative, watched

_NAME = "rope fused"
_NUMBERS = 2048
"""Numbers of a half that one program turns: as many heads of a position as that makes."""


@triton.jit
def _turn(
    x, out, batch, position, head, heads, x_b, x_h, x_s, x_d, out_b, out_h, out_s, out_d, cosine, sine, half,
    WIDE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, HALF)[None, :]
    inside = (head < heads)[:, None] & (column < half)
    head = head.to(tl.int64)[:, None]
    x += batch * x_b + position * x_s + head * x_h
    out += batch * out_b + position * out_s + head * out_h
    first = tl.load(x + column * x_d, mask=inside, other=0.0).to(WIDE)
    second = tl.load(x + (column + half) * x_d, mask=inside, other=0.0).to(WIDE)
    tl.store(out + column * out_d, (first * cosine - second * sine).to(out.dtype.element_ty), mask=inside)
    tl.store(out + (column + half) * out_d, (second * cosine + first * sine).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_halves(
    q, k, q_out, k_out, cos, sin, positions, q_heads, k_heads, q_tiles, half, cos_s, sin_s,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d,
    q_out_b, q_out_h, q_out_s, q_out_d, k_out_b, k_out_h, k_out_s, k_out_d,
    INVERSE: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    batch, position = token // positions, token % positions
    column = tl.arange(0, HALF)
    cosine = tl.load(cos + position * cos_s + column, mask=column < half, other=0.0).to(WIDE)[None, :]
    sine = tl.load(sin + position * sin_s + column, mask=column < half, other=0.0).to(WIDE)[None, :]
    if INVERSE:
        sine = -sine
    if tile < q_tiles:
        _turn(
            q, q_out, batch, position, tile * HEADS + tl.arange(0, HEADS), q_heads, q_b, q_h, q_s, q_d,
            q_out_b, q_out_h, q_out_s, q_out_d, cosine, sine, half, WIDE, HALF,
        )  # fmt: skip
    else:
        _turn(
            k, k_out, batch, position, (tile - q_tiles) * HEADS + tl.arange(0, HEADS), k_heads, k_b, k_h, k_s, k_d,
            k_out_b, k_out_h, k_out_s, k_out_d, cosine, sine, half, WIDE, HALF,
        )  # fmt: skip


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    check_place(_NAME, q)
    assert cos.stride(1) == sin.stride(1) == 1
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    batches, q_heads, positions, head_dim = q.shape
    if not q.numel() + k.numel():
        return q_out, k_out
    half = head_dim // 2
    block = power_of_two(half)
    heads = min(power_of_two(max(q_heads, k.shape[1])), max(1, _NUMBERS // block))
    q_tiles, k_tiles = tiles_of(q_heads, heads), tiles_of(k.shape[1], heads)
    launch_at(
        q, rotate_halves, (batches * positions, q_tiles + k_tiles),
        q, k, q_out, k_out, cos, sin, positions, q_heads, k.shape[1], q_tiles, half, cos.stride(0),
        sin.stride(0), *q.stride(), *k.stride(), *q_out.stride(), *k_out.stride(),
        INVERSE=inverse, WIDE=wide(q.dtype), HEADS=heads, HALF=block, num_warps=4,
    )  # fmt: skip
    return q_out, k_out


define(
    "rotate_halves(Tensor q, Tensor k, Tensor cos, Tensor sin, bool inverse) -> (Tensor, Tensor)",
    _rotate,
    lambda q, k, *_: (torch.empty_like(q), torch.empty_like(k)),
)


def _run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    run = torch.ops.stepscope.rotate_halves if watched(q, k, cos, sin) else _rotate
    return run(q, k, cos, sin, inverse)


_ROTATION = native.Operation("RotatedBackward0")


def _gradients(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_derivative(_NAME)
    return *_run(dq, dk, cos, sin, True), None, None


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        inputs = q, k, cos, sin
        q_out, k_out = native.forward(
            ctx, _ROTATION, inputs, (), lambda: (_run(*inputs, False), (cos, sin)), _gradients
        )
        return q_out, k_out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(native.backward(ctx, gradients))


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with each pair of halves turned by its position's angle."""
    check_part("rope", q, k, cos, sin)
    largest = PARTS["rope"]["fused"].largest_width
    assert largest is not None
    same = q.dim() == k.dim() == 4 and (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:]) and q.dtype == k.dtype
    if not same or q.shape[3] % 2 or not 2 <= q.shape[3] <= largest:
        raise InputError(
            f"{_NAME} takes q (B, H, S, D) and k (B, H', S, D) of one dtype, with an even D up to {largest}, not "
            f"{tuple(q.shape)} and {tuple(k.shape)}"
        )
    if cos.shape != sin.shape or cos.dim() != 2 or cos.shape[0] < q.shape[2] or cos.shape[1] != q.shape[3]:
        raise InputError(f"{_NAME} takes tables (S or more, D), not {tuple(cos.shape)} for q {tuple(q.shape)}")
    known = None if watched(q, k, cos, sin) else _ROTATION.call((q, k, cos, sin), ())
    return _Rotation.apply(q, k, cos, sin) if known is None else (known[0], known[1])
