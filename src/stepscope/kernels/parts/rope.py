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
_NUMBERS = 1024
"""The numbers of a half that a program turns of one head: those of as many tokens as have so many."""
_TOGETHER = 4
"""The heads that a program turns. A thread has the same numbers of each of them, and loads cos and sin once."""
_WARPS = 4
"""So many that a thread has 8 numbers of a half of each head: of 16 bits, they are one load."""


@triton.jit
def _turn(
    x, out, batch, position, group, inside, x_b, x_h, x_s, x_d, out_b, out_h, out_s, out_d,
    first_cosine, second_cosine, first_sine, second_sine,
    WIDE: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    head = group * TOGETHER + tl.arange(0, min(TOGETHER, triton.next_power_of_2(max(1, HEADS))))[None, :, None]
    inside &= head < HEADS
    head = head.to(tl.int64)
    x += batch * x_b + position * x_s + head * x_h
    out += batch * out_b + position * out_s + head * out_h
    column = tl.arange(0, triton.next_power_of_2(HALF))[None, None, :]
    turns = inside & (column < HALF)
    first = tl.load(x + column * x_d, mask=turns, other=0.0).to(WIDE)
    second = tl.load(x + (column + HALF) * x_d, mask=turns, other=0.0).to(WIDE)
    turned = (first * first_cosine - second * first_sine).to(out.dtype.element_ty)
    tl.store(out + column * out_d, turned, mask=turns)
    turned = (second * second_cosine + first * second_sine).to(out.dtype.element_ty)
    tl.store(out + (column + HALF) * out_d, turned, mask=turns)
    if REST:
        column = 2 * HALF + tl.arange(0, triton.next_power_of_2(REST))[None, None, :]
        stays = inside & (column < 2 * HALF + REST)
        tl.store(out + column * out_d, tl.load(x + column * x_d, mask=stays), mask=stays)


@triton.jit
def rotate_halves(
    q, k, q_out, k_out, cos, sin, tokens, positions, cos_b, cos_s, sin_b, sin_s,
    q_b, q_h, q_s, q_d, k_b, k_h, k_s, k_d,
    q_out_b, q_out_h, q_out_s, q_out_d, k_out_b, k_out_h, k_out_s, k_out_d,
    INVERSE: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, TOKENS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    # Tiles are (tokens, heads, numbers of a half). In this order Triton deals tokens and numbers out to threads, and
    # no heads: so tables (tokens, 1, numbers) lie in threads as heads do, and none has to exchange numbers.
    q_groups: tl.constexpr = tl.cdiv(Q_HEADS, TOGETHER)
    groups: tl.constexpr = q_groups + tl.cdiv(K_HEADS, TOGETHER)
    group = tl.program_id(0) % groups
    token = tl.program_id(0) // groups * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    batch, position = (token // positions).to(tl.int64), (token % positions).to(tl.int64)
    column = tl.arange(0, triton.next_power_of_2(HALF))[None, None, :]
    inside = token < tokens
    turns = inside & (column < HALF)
    cos += batch * cos_b + position * cos_s + column
    sin += batch * sin_b + position * sin_s + column
    first_cosine = tl.load(cos, mask=turns, other=0.0).to(WIDE)
    second_cosine = tl.load(cos + HALF, mask=turns, other=0.0).to(WIDE)
    first_sine = tl.load(sin, mask=turns, other=0.0).to(WIDE)
    second_sine = tl.load(sin + HALF, mask=turns, other=0.0).to(WIDE)
    if INVERSE:
        first_sine, second_sine = -second_sine, -first_sine
    if group < q_groups:
        _turn(
            q, q_out, batch, position, group, inside, q_b, q_h, q_s, q_d,
            q_out_b, q_out_h, q_out_s, q_out_d, first_cosine, second_cosine, first_sine, second_sine,
            WIDE, HALF, REST, Q_HEADS, TOGETHER,
        )  # fmt: skip
    else:
        _turn(
            k, k_out, batch, position, group - q_groups, inside, k_b, k_h, k_s, k_d,
            k_out_b, k_out_h, k_out_s, k_out_d, first_cosine, second_cosine, first_sine, second_sine,
            WIDE, HALF, REST, K_HEADS, TOGETHER,
        )  # fmt: skip


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool, width: int) -> tuple[Tensor, Tensor]:
    """Both results; with a width, as the first columns of rows of so many numbers, the first result."""
    check_place(_NAME, q)
    q_out, k_out = results = _fake_rotate(q, k, cos, sin, inverse, width)
    if width:
        leave_room(q_out, (q.shape[1] + k.shape[1]) * q.shape[3])
        q_out, k_out = _columns(q_out, q, k)
    if not q.numel() + k.numel():
        return results
    batches, q_heads, positions, head_dim = q.shape
    k_heads, half = k.shape[1], cos.shape[-1] // 2
    rest = head_dim - 2 * half
    tokens = max(1, _NUMBERS // power_of_two(max(half, rest // 2)))
    groups = tiles_of(q_heads, _TOGETHER) + tiles_of(k_heads, _TOGETHER)
    of_tables = (each.stride(0) if each.shape[0] > 1 else 0 for each in (cos, sin))
    cos_b, sin_b = of_tables if cos.dim() == 3 else (0, 0)
    launch_at(
        q, rotate_halves, (tiles_of(batches * positions, tokens) * groups,),
        q, k, q_out, k_out, cos, sin, batches * positions, positions,
        cos_b, cos.stride(-2), sin_b, sin.stride(-2), *q.stride(), *k.stride(), *q_out.stride(), *k_out.stride(),
        INVERSE=inverse, WIDE=wide(q.dtype), HALF=half, REST=rest,
        Q_HEADS=q_heads, K_HEADS=k_heads, TOKENS=tokens, TOGETHER=_TOGETHER, num_warps=_WARPS,
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
