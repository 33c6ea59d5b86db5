"""Rotary embedding of queries and keys in one launch, in Triton.

    rotated(q, k, cos, sin) -> q', k'         q (B, H, S, D), k (B, H', S, D), cos and sin (S or more, D)

Each pair (a, b) = (x[i], x[i + D/2]) at position s turns by the angle t = s * base^(-2i/D):

    a' = a cos t - b sin t        b' = b cos t + a sin t

The tables hold cos and sin of each angle twice, once for each half, and each half is multiplied by its own, as models
write it that give any tables. Backward multiplies by the transpose: the same kernel with the sines of both halves
exchanged and of the other sign. Autograd keeps nothing but the tables. Tables (1 or B, S, R) are those of each
sequence, and where R < D the numbers from R on stay as they are.

It is computed in fp32 (in fp64 for fp64) and rounded once. Tensors are read as they lie, with any strides, so heads
that are a view of a projection's output are not copied; results get the layout of what they are made from. Where q and
k are columns of one product's rows, as of joint projections (projections.py), their gradients lie in such rows, too,
with room for those of the other columns: then the product's backward copies these alone.
"""

import functools
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
from stepscope.kernels.parts.projections import leave_room

_NAME = "rope fused"
_NUMBERS = 2048
"""Numbers of a half that one program turns: as many heads of a position as that makes."""


@triton.jit
def _turn(
    x, out, batch, position, head, heads, x_b, x_h, x_s, x_d, out_b, out_h, out_s, out_d,
    first_cosine, second_cosine, first_sine, second_sine, half, rest,
    WIDE: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, HALF)[None, :]
    inside = (head < heads)[:, None] & (column < half)
    head = head.to(tl.int64)[:, None]
    x += batch * x_b + position * x_s + head * x_h
    out += batch * out_b + position * out_s + head * out_h
    first = tl.load(x + column * x_d, mask=inside, other=0.0).to(WIDE)
    second = tl.load(x + (column + half) * x_d, mask=inside, other=0.0).to(WIDE)
    turned = (first * first_cosine - second * first_sine).to(out.dtype.element_ty)
    tl.store(out + column * out_d, turned, mask=inside)
    turned = (second * second_cosine + first * second_sine).to(out.dtype.element_ty)
    tl.store(out + (column + half) * out_d, turned, mask=inside)
    if REST:
        column = tl.arange(0, REST)[None, :]
        inside = (head < heads) & (column < rest)
        column += 2 * half
        tl.store(out + column * out_d, tl.load(x + column * x_d, mask=inside), mask=inside)


@triton.jit
def rotate_halves(
    q, k, q_out, k_out, cos, sin, positions, q_heads, k_heads, q_tiles, half, rest, cos_b, cos_s, sin_b, sin_s,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d,
    q_out_b, q_out_h, q_out_s, q_out_d, k_out_b, k_out_h, k_out_s, k_out_d,
    INVERSE: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    batch, position = token // positions, token % positions
    column = tl.arange(0, HALF)
    cos += batch * cos_b + position * cos_s + column
    sin += batch * sin_b + position * sin_s + column
    first_cosine = tl.load(cos, mask=column < half, other=0.0).to(WIDE)[None, :]
    second_cosine = tl.load(cos + half, mask=column < half, other=0.0).to(WIDE)[None, :]
    first_sine = tl.load(sin, mask=column < half, other=0.0).to(WIDE)[None, :]
    second_sine = tl.load(sin + half, mask=column < half, other=0.0).to(WIDE)[None, :]
    if INVERSE:
        first_sine, second_sine = -second_sine, -first_sine
    if tile < q_tiles:
        _turn(
            q, q_out, batch, position, tile * HEADS + tl.arange(0, HEADS), q_heads, q_b, q_h, q_s, q_d,
            q_out_b, q_out_h, q_out_s, q_out_d, first_cosine, second_cosine, first_sine, second_sine, half, rest,
            WIDE, HALF, REST,
        )  # fmt: skip
    else:
        _turn(
            k, k_out, batch, position, (tile - q_tiles) * HEADS + tl.arange(0, HEADS), k_heads, k_b, k_h, k_s, k_d,
            k_out_b, k_out_h, k_out_s, k_out_d, first_cosine, second_cosine, first_sine, second_sine, half, rest,
            WIDE, HALF, REST,
        )  # fmt: skip


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool, width: int) -> tuple[Tensor, Tensor]:
    """Both results; with a width, as the first columns of rows of so many numbers, the first result."""
    check_place(_NAME, q)
    q_out, k_out = results = _fake_rotate(q, k, cos, sin, inverse, width)
    if width:
        leave_room(q_out, (q.shape[1] + k.shape[1]) * q.shape[3])
        q_out, k_out = _columns(q_out, q, k)
    batches, q_heads, positions, head_dim = q.shape
    if not q.numel() + k.numel():
        return results
    half = cos.shape[-1] // 2
    rest = head_dim - 2 * half
    block = power_of_two(half)
    heads = min(power_of_two(max(q_heads, k.shape[1])), max(1, _NUMBERS // block))
    q_tiles, k_tiles = tiles_of(q_heads, heads), tiles_of(k.shape[1], heads)
    of_tables = (each.stride(0) if each.shape[0] > 1 else 0 for each in (cos, sin))
    cos_b, sin_b = of_tables if cos.dim() == 3 else (0, 0)
    launch_at(
        q, rotate_halves, (batches * positions, q_tiles + k_tiles),
        q, k, q_out, k_out, cos, sin, positions, q_heads, k.shape[1], q_tiles, half, rest,
        cos_b, cos.stride(-2), sin_b, sin.stride(-2), *q.stride(), *k.stride(), *q_out.stride(), *k_out.stride(),
        INVERSE=inverse, WIDE=wide(q.dtype), HEADS=heads, HALF=block, REST=power_of_two(rest) if rest else 0,
        num_warps=4,
    )  # fmt: skip
    return results


def _fake_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool, width: int) -> tuple[Tensor, Tensor]:
    if width:
        return q.new_empty(q.shape[0], q.shape[2], width), q.new_empty(0)
    return torch.empty_like(q), torch.empty_like(k)


def _columns(rows: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The first columns of rows (B, S, width) as heads like q, and those after them as heads like k."""
    heads, width = q.shape[1] + k.shape[1], q.shape[3]
    both = rows[..., : heads * width].unflatten(-1, (heads, width)).transpose(1, 2)
    return both[:, : q.shape[1]], both[:, q.shape[1] :]


def _row_width(q: Tensor, k: Tensor) -> int:
    """The numbers of the rows whose columns q and k are, as of joint projections' product; 0 where they are not."""
    width, head_dim = q.stride(2), q.shape[3]
    alike = q.stride()[1:] == k.stride()[1:] == (head_dim, width, 1)
    return width if alike and width >= (q.shape[1] + k.shape[1]) * head_dim else 0


define(
    "rotate_halves(Tensor q, Tensor k, Tensor cos, Tensor sin, bool inverse, SymInt width) -> (Tensor, Tensor)",
    _rotate,
    _fake_rotate,
)


def _run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool, width: int) -> tuple[Tensor, Tensor]:
    run = torch.ops.stepscope.rotate_halves if watched(q, k, cos, sin) else _rotate
    return run(q, k, cos, sin, inverse, width)


_ROTATION = native.Operation("RotatedBackward0")


def _gradients(width: int, dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_derivative(_NAME)
    results = _run(dq, dk, cos, sin, True, width)
    return *(_columns(results[0], dq, dk) if width else results), None, None


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        inputs = q, k, cos, sin
        gradients = functools.partial(_gradients, _row_width(q, k))
        q_out, k_out = native.forward(
            ctx, _ROTATION, inputs, (), lambda: (_run(*inputs, False, 0), (cos, sin)), gradients
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
    of_each = cos.dim() == 3 and cos.shape[0] in (1, q.shape[0])
    fits = (of_each or cos.dim() == 2) and cos.shape[-2] >= q.shape[2] and 2 <= cos.shape[-1] <= q.shape[3]
    if cos.shape != sin.shape or not fits or cos.shape[-1] % 2 or (not of_each and cos.shape[1] != q.shape[3]):
        raise InputError(
            f"{_NAME} takes tables (S or more, D), or (1 or B, S or more, R) with an even R up to D, not "
            f"{tuple(cos.shape)} and {tuple(sin.shape)} for q {tuple(q.shape)}"
        )
    if cos.stride(-1) != 1 or sin.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    known = None if watched(q, k, cos, sin) else _ROTATION.call((q, k, cos, sin), ())
    return _Rotation.apply(q, k, cos, sin) if known is None else (known[0], known[1])
