"""RMSNorm and LayerNorm with the residual sum before them, forward and backward in Triton.

    rms_norm(x, None, weight, epsilon)      -> x, y
    rms_norm(x, branch, weight, epsilon)    -> s, y          s = x + branch, and y of s
    layer_norm(x, weight, bias, epsilon)    -> y

For a row x of M numbers, r = 1 / sqrt(mean(x^2) + epsilon), n = x r and y = n w. With g = dy w:

    dx = r (g - n mean(g n))        from y; the gradient of s itself is added to it
    dw = sum over rows of dy n

r does not depend on w, and dn/dx = r (1 - n n^T / M), which gives dx. All of it is computed in fp32 (in fp64 for fp64).
The sum s has the dtype that PyTorch gives x + branch, and is rounded to it before it is normalised; y has autocast's
dtype, where autocast is on: the products after it would cast it.

Autograd keeps s (or x) and r. Forward reads x and branch once and writes s and y. Backward runs a fixed number of
programs, each over rows a fixed distance apart. Each sums its own share of dw, and the shares are added afterwards, so
that the same input gives the same bits.

LayerNorm takes the mean m of a row from it first: with n = (x - m) r and r of x - m, y = n w + b, and

    dx = r (g - mean(g) - n mean(g n))        db = sum over rows of dy

Its kernels take several short rows at a time, since the sums of a row wait for all its threads. A compiler that finds
the residual sum before it, its gradient behind it, or dy as a sum of two hands them to the operators (operators.py).

    fill_sums(x, out)       out = the sum of x (R, N) over its rows

is the gradient of biases (projections.py), added up in chunks of rows and then over these.
"""

import functools
import itertools
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._ops import OpOverload

from stepscope.core.errors import InputError
from stepscope.core.parts import PARTS, norm_programs
from stepscope.kernels import native
from stepscope.kernels.launching import check_place, interpreted, launch_at, power_of_two, tiles_of, warps_for, wide
from stepscope.kernels.operators import (
    CASTS,
    OF_RESULTS,
    PASSES,
    VIEWS,
    autocast_dtype,
    check_part,
    define,
    give,
    refuse_second_derivative,
    watched,
)

_NAME = "norm fused"
_LAST = 128, 32
"""Rows and columns of a program's tiles of what is left to be added up at once: narrow, which gives few rows to more
programs."""
_CHUNK, _CHUNK_BYTES, _CHUNK_COLUMNS = 64, 16384, 1024
"""The fewest rows of a chunk, and the bytes and the most columns of a program's tiles. On an H200 these took 6 to 38 %
less time than tiles of 32 x 128 with chunks of 64 rows: 2,048 to 16,384 rows of 1,152 and 2,304 numbers in bf16
(results/h200/own-step/kernels.txt)."""
FEW_ROWS = 256
"""Rows up to which one launch adds them up: two take longer than it does."""
_PROGRAMS = 132 * 6
"""About how many programs add up chunks at most, of many rows."""


@triton.jit
def rms_norm_forward(
    x, branch, total, weight, y, roots, x_stride, branch_stride, width,
    EPSILON: tl.constexpr, ADDS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """EPSILON is a constant, since an argument would have fp32: in fp64 a norm was off by 1e-13."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(WIDE)
    if ADDS:
        values += tl.load(branch + row * branch_stride + column, mask=inside, other=0.0).to(WIDE)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * width + column, rounded, mask=inside)
        values = rounded.to(WIDE)
    root = tl.rsqrt(tl.sum(values * values, 0) / width + EPSILON)
    tl.store(roots + row, root)
    by = tl.load(weight + column, mask=inside, other=0.0).to(WIDE)
    tl.store(y + row * width + column, (values * root * by).to(y.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward(
    dy, dtotal, x, weight, roots, dx, dbranch, shares, dy_stride, dtotal_stride, x_stride, rows, width, steps,
    HAS_TOTAL: tl.constexpr, HAS_BRANCH: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    by = tl.load(weight + column, mask=inside, other=0.0).to(WIDE)
    share = tl.zeros((BLOCK,), WIDE)
    for step in range(0, steps):
        row = program + step * tl.num_programs(0)
        here = inside & (row < rows)
        root = tl.load(roots + row, mask=row < rows, other=0.0)
        normal = tl.load(x + row * x_stride + column, mask=here, other=0.0).to(WIDE) * root
        gradient = tl.load(dy + row * dy_stride + column, mask=here, other=0.0).to(WIDE)
        share += gradient * normal
        gradient *= by
        gradient = root * (gradient - normal * (tl.sum(gradient * normal, 0) / width))
        if HAS_TOTAL:
            gradient += tl.load(dtotal + row * dtotal_stride + column, mask=here, other=0.0).to(WIDE)
        tl.store(dx + row * width + column, gradient.to(dx.dtype.element_ty), mask=here)
        if HAS_BRANCH:
            tl.store(dbranch + row * width + column, gradient.to(dbranch.dtype.element_ty), mask=here)
    tl.store(shares + program * width + column, share, mask=inside)


@triton.jit
def rms_norm_shares(shares, out, programs, width, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros((COLUMNS,), WIDE)
    for first in range(0, programs, ROWS):
        row = first + tl.arange(0, ROWS)
        tile = tl.load(
            shares + row[:, None] * width + column[None, :], mask=(row < programs)[:, None] & inside[None, :], other=0.0
        )
        total += tl.sum(tile, 0)
    tl.store(out + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_rows(
    x, out, x_stride, rows, width, share, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """out[i] = the sum of the i-th `share` rows of x, a multiple of ROWS unless it is all of them"""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    chunk = tl.program_id(1).to(tl.int64)
    total = _total_of_rows(x, chunk * share, share, x_stride, rows, width, column, WIDE, ROWS, COLUMNS)
    tl.store(out + chunk * width + column, total.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def sum_shares(
    shares, out, narrow, SIZES: tl.constexpr, NARROW: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sums over rows of several tensors, one behind the other, each from a multiple of COLUMNS on; if NARROW, also
    rounded. SIZES: of each its rows, its width and its first program. ALIGNED: whether all widths are multiples of 4.
    """
    program = tl.program_id(0)
    address = shares[0].to(tl.int64)
    rows = tl.full((), SIZES[0][0], tl.int32)
    width = tl.full((), SIZES[0][1], tl.int32)
    first = tl.full((), 0, tl.int32)
    for i in tl.static_range(1, len(SIZES)):  # pyright: ignore[reportGeneralTypeIssues, reportArgumentType]
        reached = program >= SIZES[i][2]
        address = tl.where(reached, shares[i].to(tl.int64), address)
        rows = tl.where(reached, SIZES[i][0], rows)
        width = tl.where(reached, SIZES[i][1], width)
        first = tl.where(reached, SIZES[i][2], first)
    x = tl.multiple_of(address.to(tl.pointer_type(WIDE)), 16)  # pyright: ignore[reportArgumentType]
    if ALIGNED:
        width = tl.multiple_of(width, 4)
    column = (program - first) * COLUMNS + tl.arange(0, COLUMNS)
    total = _total_of_rows(x, 0, rows, width, rows, width, column, WIDE, ROWS, COLUMNS)
    place = program * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(out + place, total, mask=column < width)
    if NARROW:
        tl.store(narrow + place, total.to(narrow.dtype.element_ty), mask=column < width)


@triton.jit
def _total_of_rows(
    x, start, count, stride, rows, width, column, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The sum of some columns of so many rows from `start` on, of which there are `rows`."""
    total = tl.zeros((ROWS, COLUMNS), WIDE)
    for first in tl.range(0, count, ROWS, num_stages=3):  # loads ahead, as a sum waits for nothing else
        row = start + first + tl.arange(0, ROWS)
        here = (row < rows)[:, None] & (column < width)[None, :]
        total += tl.load(x + row[:, None] * stride + column[None, :], mask=here, other=0.0).to(WIDE)
    return tl.sum(total, 0)


@triton.jit
def layer_norm_forward(
    x, branch, total, weight, bias, y, means, roots, x_stride, branch_stride, rows, width,
    EPSILON: tl.constexpr, ADDS: tl.constexpr, BIASED: tl.constexpr, REFINED: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """REFINED: whether what the mean's own rounding leaves is taken off, too: of equal numbers in 32 bits it would be
    all that there is."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    within = column < width
    inside = (row < rows)[:, None] & within
    values = tl.load(x + row[:, None] * x_stride + column, mask=inside, other=0.0).to(WIDE)
    if ADDS:
        values += tl.load(branch + row[:, None] * branch_stride + column, mask=inside, other=0.0).to(WIDE)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row[:, None] * width + column, rounded, mask=inside)
        values = rounded.to(WIDE)
    mean = tl.sum(values, 1) / width
    values = tl.where(within, values - mean[:, None], 0.0)
    if REFINED:
        rest = tl.sum(values, 1) / width
        mean += rest
        values = tl.where(within, values - rest[:, None], 0.0)
    root = tl.rsqrt(tl.sum(values * values, 1) / width + EPSILON)
    tl.store(means + row, mean, mask=row < rows)
    tl.store(roots + row, root, mask=row < rows)
    values *= root[:, None] * tl.load(weight + column, mask=within, other=0.0).to(WIDE)
    if BIASED:
        values += tl.load(bias + column, mask=within, other=0.0).to(WIDE)
    tl.store(y + row[:, None] * width + column, values.to(y.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm_backward(
    dy, more, dtotal, x, weight, means, roots, dx, shares, dy_stride, more_stride, dtotal_stride, x_stride, rows, width,
    steps, HAS_MORE: tl.constexpr, HAS_TOTAL: tl.constexpr, BIASED: tl.constexpr, SUMMED: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program's shares are a row: of dw, of db behind it, and if SUMMED of dx over its rows behind that. HAS_MORE:
    whether the gradient is dy + more, which is rounded to dy's dtype, as it was where it lay in memory."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    within = column < width
    by = tl.load(weight + column, mask=within, other=0.0).to(WIDE)[None, :]
    of_weight = tl.zeros((ROWS, BLOCK), WIDE)
    of_bias = tl.zeros((ROWS, BLOCK), WIDE)
    of_rows = tl.zeros((ROWS, BLOCK), WIDE)
    for step in tl.range(0, steps, num_stages=STAGES):
        row = (program + step * tl.num_programs(0)) * ROWS + tl.arange(0, ROWS)
        here = (row < rows)[:, None] & within[None, :]
        mean = tl.load(means + row, mask=row < rows, other=0.0)[:, None]
        root = tl.load(roots + row, mask=row < rows, other=0.0)[:, None]
        normal = tl.load(x + row[:, None] * x_stride + column[None, :], mask=here, other=0.0).to(WIDE)
        normal = tl.where(here, normal - mean, 0.0) * root
        gradient = tl.load(dy + row[:, None] * dy_stride + column[None, :], mask=here, other=0.0).to(WIDE)
        if HAS_MORE:
            gradient += tl.load(more + row[:, None] * more_stride + column[None, :], mask=here, other=0.0).to(WIDE)
            gradient = gradient.to(dy.dtype.element_ty).to(WIDE)
        of_weight += gradient * normal
        if BIASED:
            of_bias += gradient
        gradient *= by
        along = tl.sum(gradient * normal, 1)[:, None] / width
        gradient = root * (gradient - tl.sum(gradient, 1)[:, None] / width - normal * along)
        if HAS_TOTAL:
            gradient += tl.load(dtotal + row[:, None] * dtotal_stride + column[None, :], mask=here, other=0.0).to(WIDE)
        rounded = gradient.to(dx.dtype.element_ty)
        tl.store(dx + row[:, None] * width + column[None, :], rounded, mask=here)
        if SUMMED:
            of_rows += rounded.to(WIDE)
    share = shares + program * width * (1 + BIASED + SUMMED) + column
    tl.store(share, tl.sum(of_weight, 0), mask=within)
    if BIASED:
        tl.store(share + width, tl.sum(of_bias, 0), mask=within)
    if SUMMED:
        tl.store(share + width * (1 + BIASED), tl.sum(of_rows, 0), mask=within)


def _rows(tensor: Tensor) -> Tensor:
    """(..., M) as rows whose numbers lie side by side: a view, or a copy of what cannot be one."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _forward(
    x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    check_place(_NAME, x)
    y, total, roots = _fake_forward(x, branch, weight, epsilon, dtype)
    if x.numel():
        rows = _rows(x)
        added = rows if branch is None else _rows(branch)
        block = power_of_two(rows.shape[1])
        launch_at(
            x, rms_norm_forward, (rows.shape[0],),
            rows, added, total, weight.contiguous(), y, roots, rows.stride(0), added.stride(0), rows.shape[1],
            EPSILON=epsilon, ADDS=branch is not None, WIDE=wide(x.dtype), BLOCK=block, num_warps=warps_for(block),
        )  # fmt: skip
    return y, total, roots


def _fake_forward(
    x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    total_dtype = x.dtype if branch is None else torch.promote_types(x.dtype, branch.dtype)
    roots = torch.empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    total = torch.empty(x.shape if branch is not None else (0,), dtype=total_dtype, device=x.device)
    return torch.empty(x.shape, dtype=dtype, device=x.device), total, roots


def _backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    roots: Tensor,
    dtype: torch.dtype,
    branch_dtype: torch.dtype | None,
    apart: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, of the branch, and of the weight, or its shares."""
    dx, dbranch, dweight = _gradients_of(x, weight, dtype, branch_dtype, apart)
    if not x.numel():
        return dx, dbranch, dweight.zero_()
    values, gradients = _rows(x), _rows(dy)
    totals = gradients if dtotal is None else _rows(dtotal)
    count, width = values.shape
    programs = norm_programs(count, x.device.type)
    shares = dweight if apart else _shares_of(x, programs, width)
    block = power_of_two(width)
    launch_at(
        x, rms_norm_backward, (programs,),
        gradients, totals, values, weight.contiguous(), roots, dx, dbranch, shares, gradients.stride(0),
        totals.stride(0), values.stride(0), count, width, tiles_of(count, programs),
        HAS_TOTAL=dtotal is not None, HAS_BRANCH=dbranch.numel() > 0, WIDE=wide(x.dtype), BLOCK=block,
        num_warps=warps_for(block),
    )  # fmt: skip
    if apart:
        return dx, dbranch, shares
    # PyTorch's sum over a few hundred rows takes longer than the kernel that made them.
    rows, columns = (256, 16) if not interpreted() else (power_of_two(programs), power_of_two(width))
    launch_at(
        x, rms_norm_shares, (tiles_of(width, columns),),
        shares, dweight, programs, width, WIDE=wide(shares.dtype), ROWS=rows, COLUMNS=columns, num_warps=8,
    )  # fmt: skip
    return dx, dbranch, dweight


def _gradients_of(
    x: Tensor, weight: Tensor, dtype: torch.dtype, branch_dtype: torch.dtype | None, apart: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """What backward fills: the gradients of x in its dtype, of the branch where that has another one, of the weight."""
    other = branch_dtype is not None and branch_dtype != dtype
    dbranch = torch.empty(x.shape if other else (0,), dtype=branch_dtype or dtype, device=x.device)
    of_weight = _shares_of(x, norm_programs(_count(x), x.device.type), len(weight)) if apart else weight
    return torch.empty(x.shape, dtype=dtype, device=x.device), dbranch, torch.empty_like(of_weight)


def _count(x: Tensor) -> int:
    """The number of rows of x (..., M)."""
    return math.prod(x.shape[:-1])


def _shares_of(x: Tensor, programs: int, width: int) -> Tensor:
    """What so many programs, which read x, leave to be added up: a row each."""
    return torch.empty((programs, width), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def fill_sums(x: Tensor, out: Tensor) -> None:
    """out (N) = the sum of x (R, N) over its rows, whose numbers lie side by side."""
    if not x.numel():
        out.zero_()
        return
    if x.shape[0] > FEW_ROWS:
        x = chunk_sums(x)
    _fill_sums(x, out, x.shape[0], *_LAST)


def chunk_sums(x: Tensor) -> Tensor:
    """Shares (C, N) of the sum of x (R, N) over its rows: of each chunk of rows its own."""
    sums, share = shares_of_chunks(x, x.shape[1])
    _fill_sums(x, sums, share, *_chunk_tile(x, x.shape[1]))
    return sums


def _chunk_tile(x: Tensor, width: int) -> tuple[int, int]:
    """Rows and columns of a program's tiles of a chunk."""
    columns = min(_CHUNK_COLUMNS, power_of_two(width))
    return max(1, _CHUNK_BYTES // x.element_size() // columns), columns


def shares_of_chunks(x: Tensor, width: int) -> tuple[Tensor, int]:
    """Room for the shares of the rows that x has, of so many columns, and how many rows a chunk has."""
    rows, columns = _chunk_tile(x, width)
    chunks = max(1, _PROGRAMS // tiles_of(width, columns))
    share = tiles_of(max(_CHUNK, tiles_of(x.shape[0], chunks)), rows) * rows
    return _shares_of(x, tiles_of(x.shape[0], share), width), share


def _fill_sums(x: Tensor, out: Tensor, share: int, rows: int, columns: int) -> None:
    grid = tiles_of(x.shape[1], columns), tiles_of(x.shape[0], share)
    launch_at(
        x, sum_rows, grid, x, out, x.stride(0), *x.shape, share,
        WIDE=wide(x.dtype), ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip


define(
    "rms_norm_forward(Tensor x, Tensor? branch, Tensor weight, float epsilon, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
)
define(
    "rms_norm_backward(Tensor dy, Tensor? dtotal, Tensor x, Tensor weight, Tensor roots, ScalarType dtype,"
    " ScalarType? branch_dtype, bool apart=False) -> (Tensor, Tensor, Tensor)",
    _backward,
    lambda _dy, _dtotal, x, weight, _roots, *dtypes: _gradients_of(x, weight, *dtypes),
)


_NORM, _ADD_NORM = native.Operation("RmsNormBackward0"), native.Operation("AddRmsNormBackward0")


def _options(epsilon: float, dtype: torch.dtype) -> tuple[int, int]:
    return native.bits(epsilon), native.DTYPE_NUMBERS[dtype]


def _gradients(
    dtypes: tuple[torch.dtype, torch.dtype], dtotal: Tensor, dy: Tensor, total: Tensor, weight: Tensor, roots: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    refuse_second_derivative(_NAME)
    run = torch.ops.stepscope.rms_norm_backward if watched(dy, total, weight) else _backward
    dx, dbranch, dweight = run(dy, dtotal, total, weight, roots, *dtypes)
    return dx, dx if dtypes[0] == dtypes[1] else dbranch, dweight


def _gradients_without_branch(dy: Tensor, x: Tensor, weight: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
    refuse_second_derivative(_NAME)
    run = torch.ops.stepscope.rms_norm_backward if watched(dy, x, weight) else _backward
    dx, _, dweight = run(dy, None, x, weight, roots, x.dtype, None)
    return dx, dweight


class _Norm(torch.autograd.Function):
    """(norm(x),) or, of x and a branch, s = x + branch and norm(s)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        operation, inputs, gradients = _NORM, (x, weight), _gradients_without_branch
        if branch is not None:
            operation, inputs = _ADD_NORM, (x, branch, weight)
            gradients = functools.partial(_gradients, (x.dtype, branch.dtype))

        def run() -> native.Ran:
            run = torch.ops.stepscope.rms_norm_forward if watched(*inputs) else _forward
            y, total, roots = run(x, branch, weight, epsilon, dtype)
            return ((y,), (x, weight, roots)) if branch is None else ((total, y), (total, weight, roots))

        return native.forward(ctx, operation, inputs, _options(epsilon, dtype), run, gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dx, *dbranch, dweight = native.backward(ctx, gradients)
        return dx, *(dbranch or [None]), dweight, None, None


def rms_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """x + branch, or x where there is no branch, and its RMSNorm: x / sqrt(mean(x^2) + epsilon) * weight.

    dtype: that of the norm; autocast's, or that of x, where it is left out.
    """
    check_part("norm", x, weight, *([] if branch is None else [branch]))
    width, largest = x.shape[-1] if x.dim() else 0, PARTS["norm"]["fused"].largest_width
    assert largest is not None
    if weight.shape != (width,) or not 1 <= width <= largest or (branch is not None and branch.shape != x.shape):
        raise InputError(
            f"{_NAME} takes x (..., M), a branch of its shape and a weight (M) with M from 1 to {largest}, not "
            f"{tuple(x.shape)}, {None if branch is None else tuple(branch.shape)}, {tuple(weight.shape)}"
        )
    dtype = dtype or autocast_dtype(x)
    inputs, operation = ((x, weight), _NORM) if branch is None else ((x, branch, weight), _ADD_NORM)
    known = None if watched(*inputs) else operation.call(inputs, _options(epsilon, dtype))
    outputs = _Norm.apply(x, branch, weight, epsilon, dtype) if known is None else known
    return (x, outputs[0]) if branch is None else (outputs[0], outputs[1])


# LayerNorm.

_TILE, _FORWARD_TILE = 2048, 1024
"""The numbers of rows that a program of LayerNorm has at a time, where they are short: in backward each program adds up
many rows, and with more of them at a time fewer shares are left."""
_AHEAD_BYTES = 96 << 10
"""The most memory of a multiprocessor in which a program of backward has the next rows."""


def _tile(x: Tensor, numbers: int) -> dict[str, Any]:
    """The tile of a program, about so many numbers, with the options of its launch."""
    block = power_of_two(x.shape[-1])
    rows = max(1, min(8, numbers // block))
    return {"WIDE": wide(x.dtype), "ROWS": rows, "BLOCK": block, "num_warps": max(4, min(16, rows * block // 1024))}


def _stages(tile: Mapping[str, Any], itemsize: int, tensors: int) -> int:
    """How many tiles of so many tensors a program of backward loads at a time."""
    return 3 if 2 * tensors * tile["ROWS"] * tile["BLOCK"] * itemsize <= _AHEAD_BYTES else 1


def _layer_forward(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_place(_NAME, x)
    y, total, means, roots = _fake_layer_forward(x, branch, weight, bias, epsilon, dtype)
    if x.numel():
        rows, tile = _rows(x), _tile(x, _FORWARD_TILE)
        added = rows if branch is None else _rows(branch)
        weight = weight.contiguous()
        launch_at(
            x, layer_norm_forward, (tiles_of(rows.shape[0], tile["ROWS"]),),
            rows, added, total, weight, weight if bias is None else bias.contiguous(), y, means, roots, rows.stride(0),
            added.stride(0), *rows.shape, EPSILON=epsilon, ADDS=branch is not None, BIASED=bias is not None,
            REFINED=x.element_size() > 2 or added.element_size() > 2, **tile,
        )  # fmt: skip
    return y, total, means, roots


def _fake_layer_forward(
    x: Tensor, branch: Tensor | None, weight: Tensor, _bias: Tensor | None, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, total, roots = _fake_forward(x, branch, weight, epsilon, dtype)
    return y, total, torch.empty_like(roots), roots


def _layer_backward(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, means: Tensor, roots: Tensor, dtype: torch.dtype,
    of_bias: bool, more: Tensor | None = None, of_rows: bool = False, apart: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of x and of the weight, and behind the latter that of the bias and the sum of the former over its
    rows, if they are asked for; of all that is behind dx the shares, if they are left apart. more: what is added to dy,
    in dy's dtype."""
    dx, sums = _layer_gradients(dy, dtotal, x, weight, means, roots, dtype, of_bias, more, of_rows, apart)
    if not x.numel():
        return dx, sums.zero_()
    values, gradients, tile = _rows(x), _rows(dy), _tile(x, _TILE)
    totals, others = (gradients if each is None else _rows(each) for each in (dtotal, more))
    stages = _stages(tile, x.element_size(), 2 + (dtotal is not None) + (more is not None))
    count, width = values.shape
    programs = _layer_programs(x)
    shares = sums if apart else _shares_of(x, programs, len(sums))
    launch_at(
        x, layer_norm_backward, (programs,),
        gradients, others, totals, values, weight.contiguous(), means, roots, dx, shares, gradients.stride(0),
        others.stride(0), totals.stride(0), values.stride(0), count, width, tiles_of(count, programs * tile["ROWS"]),
        HAS_MORE=more is not None, HAS_TOTAL=dtotal is not None, BIASED=of_bias, SUMMED=of_rows, STAGES=stages, **tile,
    )  # fmt: skip
    if not apart:
        _fill_sums(shares, sums, programs, *_LAST)
    return dx, sums


def _layer_programs(x: Tensor) -> int:
    """How many programs share the rows of x: each has at least four tiles, since with fewer the shares would outweigh
    the rows."""
    rows = _tile(x, _TILE)["ROWS"]
    return min(norm_programs(_count(x), x.device.type), tiles_of(_count(x), 4 * rows))


def _layer_gradients(
    _dy: Tensor, _dtotal: Tensor | None, x: Tensor, weight: Tensor, _means: Tensor, _roots: Tensor, dtype: torch.dtype,
    of_bias: bool, _more: Tensor | None = None, of_rows: bool = False, apart: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What backward fills."""
    dx, width = torch.empty(x.shape, dtype=dtype, device=x.device), len(weight) * (1 + of_bias + of_rows)
    if apart:
        return dx, _shares_of(x, _layer_programs(x), width)
    return dx, torch.empty(width, dtype=weight.dtype, device=x.device)


define(
    "layer_norm_forward(Tensor x, Tensor? branch, Tensor weight, Tensor? bias, float epsilon, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _layer_forward,
    _fake_layer_forward,
)
define(
    "layer_norm_backward(Tensor dy, Tensor? dtotal, Tensor x, Tensor weight, Tensor means, Tensor roots,"
    " ScalarType dtype, bool of_bias, Tensor? more=None, bool of_rows=False, bool apart=False) -> (Tensor, Tensor)",
    _layer_backward,
    _layer_gradients,
)


_LAYER_NORM = native.Operation("LayerNormBackward0")


def _of_layer(
    dtypes: tuple[torch.dtype, torch.dtype | None], dy: Tensor, x: Tensor, weight: Tensor, means: Tensor, roots: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of x, in the first dtype, of the weight, and of the bias in the second, where it has one."""
    refuse_second_derivative(_NAME)
    run = torch.ops.stepscope.layer_norm_backward if watched(dy, x, weight) else _layer_backward
    dx, sums = run(dy, None, x, weight, means, roots, dtypes[0], dtypes[1] is not None)
    if dtypes[1] is None:
        return dx, sums
    dweight, dbias = sums.split(len(weight))
    return dx, dweight, dbias if dbias.dtype == dtypes[1] else dbias.to(dtypes[1])


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, dtype: torch.dtype) -> Tensor:
        inputs = (x, weight) if bias is None else (x, weight, bias)

        def run() -> native.Ran:
            run = torch.ops.stepscope.layer_norm_forward if watched(*inputs) else _layer_forward
            y, _, means, roots = run(x, None, weight, bias, epsilon, dtype)
            return (y,), (x, weight, means, roots)

        gradients = functools.partial(_of_layer, (x.dtype, None if bias is None else bias.dtype))
        (y,) = native.forward(ctx, _LAYER_NORM, inputs, _options(epsilon, dtype), run, gradients)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, *dbias = native.backward(ctx, gradients)
        return dx, dweight, *(dbias or [None]), None, None


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, dtype: torch.dtype | None = None
) -> Tensor:
    """LayerNorm of x (..., M): (x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias, in this dtype or in x's."""
    check_part("norm", x, weight, *([] if bias is None else [bias]))
    width, largest = x.shape[-1] if x.dim() else 0, PARTS["norm"]["fused"].largest_width
    assert largest is not None
    if not 1 <= width <= largest or any(each is not None and each.shape != (width,) for each in (weight, bias)):
        raise InputError(
            f"{_NAME} takes x (..., M), a weight (M) and a bias (M) with M from 1 to {largest}, not {tuple(x.shape)}, "
            f"{tuple(weight.shape)}, {None if bias is None else tuple(bias.shape)}"
        )
    dtype, inputs = dtype or x.dtype, (x, weight) if bias is None else (x, weight, bias)
    known = None if watched(*inputs) else _LAYER_NORM.call(inputs, _options(epsilon, dtype))
    return _LayerNorm.apply(x, weight, bias, epsilon, dtype) if known is None else known[0]


# ---- sums of a whole backward in one launch
#
# What programs leave of a weight's or a bias's gradient is added up by a launch that takes longer to start than to run.
# Where only the optimizer reads the gradient, the operators leave their shares apart, and one launch at the end of the
# graph adds up all of them:
#
#     dx, sums = norm_backward(dy, ...)                      dx, shares = norm_backward(dy, ..., apart=True)
#                                                            ...
#                                                            sums = sums_of_shares([shares, ...])[place:]
#
# Sums over many rows that lie in memory get theirs, too, where a compiler would make each by two kernels.
#
#     sums = x.sum(0)                                        shares = row_shares(x)

_SHARES = 64, 32
"""Rows and columns of a tile of `sum_shares`: with so few rows more of many programs run at once."""
_MOST_SHARES = 64
"""How many tensors one launch adds up: each program looks for its own among all of them."""


def sums_of_shares(shares: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The sums over rows of contiguous tensors (R_i, N_i), in fp32 or fp64, one behind the other, at the places that
    `places_of` tells; and the same rounded to a dtype, or nothing where it is the first one's."""
    widths = [each.shape[1] for each in shares]
    places = places_of(widths)
    out, narrow = _fake_sums(shares, dtype)
    for first in range(0, len(shares), _MOST_SHARES):
        some = slice(first, first + _MOST_SHARES)
        tiles = [(place - places[first]) // _SHARES[1] for place in places[some]]
        sizes = tuple((*each.shape, tile) for each, tile in zip(shares[some], tiles, strict=False))
        programs = tiles[len(sizes) - 1] + tiles_of(sizes[-1][1], _SHARES[1])
        launch_at(
            out, sum_shares, (programs,), tuple(shares[some]), out[places[first] :], narrow[places[first] :],
            SIZES=sizes, NARROW=len(narrow) > 0, ALIGNED=all(width % 4 == 0 for width in widths[some]),
            WIDE=wide(out.dtype), ROWS=_SHARES[0], COLUMNS=_SHARES[1], num_warps=4,
        )  # fmt: skip
    return out, narrow


def _fake_sums(shares: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    count = places_of([each.shape[1] for each in shares])[-1]
    out = shares[0].new_empty(count)
    return out, shares[0].new_empty(count if dtype != out.dtype else 0, dtype=dtype)


def places_of(widths: Sequence[int]) -> list[int]:
    """Where each of these sums begins, and behind the last where another would."""
    return [*itertools.accumulate((tiles_of(width, _SHARES[1]) * _SHARES[1] for width in widths), initial=0)]


define("sums_of_shares(Tensor[] shares, ScalarType dtype) -> (Tensor, Tensor)", sums_of_shares, _fake_sums)

define("row_shares(Tensor x) -> Tensor", chunk_sums, lambda x: shares_of_chunks(x, x.shape[1])[0])

_LEAVES = {"rms_norm_backward": 2, "layer_norm_backward": 1, "biased_gelu_backward": 1, "joint_projections_backward": 2}
"""Operators that can leave shares apart, and which of their results these are."""
_PARTS_OF_SUMS = {
    operator.getitem,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.slice.Tensor,
    *VIEWS,
    *CASTS,
}
"""What may be done to sums before the optimizer reads them."""
_VIEW = torch.ops.aten.view.default
_MAKES_ROWS = {operator.getitem, torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
"""What, but for views, a compiler finds in memory. What it makes by itself, it adds up as it makes it."""


def shares_together(graph: torch.fx.Graph) -> None:
    """Add up by one launch, at the end of a graph, what is left to be added of sums that only its output reads."""
    output = next(iter(graph.find_nodes(op="output")))
    alike: dict[tuple[torch.dtype, torch.device], dict[torch.fx.Node, set[torch.fx.Node]]] = {}
    narrow: dict[tuple[torch.dtype, torch.device], torch.dtype] = {}
    for node in _of_backward(graph):
        sums, parts = _sums_left_by(node), set[torch.fx.Node]()
        if sums is None or not _ends_in(output, sums, parts):
            continue
        value, x = sums.meta["val"], node.all_input_nodes[0].meta["val"]
        of = torch.promote_types(x.dtype, torch.float32), x.device
        dtypes = [value.dtype, *(part.meta["val"].dtype for part in parts if part.target in CASTS)]
        # One launch has sums in the dtype of the shares, and in one other, which is no wider.
        others = [dtype for dtype in dtypes if dtype.itemsize < of[0].itemsize and dtype.is_floating_point]
        if value.dtype == of[0] or (others and narrow.get(of, value.dtype) == value.dtype == others[0]):
            alike.setdefault(of, {})[sums] = parts
            narrow.update({of: others[0]} if others and of not in narrow else {})
    together = {of: sums for of, sums in alike.items() if any(_is_ours(each) for each in sums) and len(sums) > 1}
    behind = {part for sums in together.values() for parts in sums.values() for part in parts}
    later = [node for node in graph.nodes if node in behind]
    for of, sums in together.items():
        _add_up(output, narrow.get(of, of[0]), sums)
    for node in reversed(later):
        if not node.users:
            graph.erase_node(node)
    for node in later:
        if node.users:
            output.prepend(node)


def _of_backward(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The operators that a gradient reaches: a partitioner gives what forward returns no part of backward."""
    reached: dict[torch.fx.Node, bool] = {}
    for node in graph.nodes:
        given = node.op == "placeholder" and "tangents" in str(node.target)
        reached[node] = given or any(reached[source] for source in node.all_input_nodes)
    return [node for node in graph.nodes if reached[node] and isinstance(node.target, OpOverload)]


def _sums_left_by(node: torch.fx.Node) -> torch.fx.Node | None:
    """The sums that a node makes of shares; None where it makes none, or its shapes or its device are others."""
    values = [each.meta["val"] for each in node.all_input_nodes]
    if node.kwargs.keys() - {"dtype"} or not values or not all(isinstance(value, Tensor) for value in values):
        return None
    fixed = all(isinstance(size, int) for value in values for size in value.shape)
    whole = len({value.dtype == torch.float64 for value in values}) == 1 and all(value.numel() for value in values)
    if not fixed or not whole or not (values[0].is_cuda or interpreted()):
        return None
    if node.target is torch.ops.aten.sum.dim_IntList:
        return node if _adds_rows(node) else None
    assert isinstance(node.target, OpOverload)
    name = node.target._opname
    results = [result for result in node.users if result.args[1] == _LEAVES[name]] if _is_ours(node) else []
    # Joint projections add up few rows in one launch, and then have no shares to leave.
    few = name == "joint_projections_backward" and values[0].shape[0] <= FEW_ROWS
    return None if few or not results or not results[0].meta["val"].numel() else _one_of(results)


def _is_ours(node: torch.fx.Node) -> bool:
    """Whether a node, or what it is a result of, is an operator that leaves shares."""
    of = node.all_input_nodes[0] if node.target is operator.getitem else node
    return isinstance(of.target, OpOverload) and of.target.namespace == "stepscope" and of.target._opname in _LEAVES


def _adds_rows(node: torch.fx.Node) -> bool:
    """Whether a node adds up many rows that lie in memory."""
    source = node.all_input_nodes[0]
    x = source.meta["val"]
    while source.target in VIEWS:
        source = source.all_input_nodes[0]
    lies = source.op == "placeholder" or source.target in _MAKES_ROWS
    rows = x.dim() == 2 and x.stride(1) == 1 and x.shape[0] > FEW_ROWS
    floating = x.is_floating_point() and node.meta["val"].is_floating_point()
    return lies and rows and floating and node.args[1] == [0]


def _one_of(results: Sequence[torch.fx.Node]) -> torch.fx.Node:
    """The node that takes a result of an operator, in the place of all that do."""
    (node,) = results[0].all_input_nodes
    with node.graph.inserting_after(node):
        one = node.graph.node_copy(results[0], lambda _: node)
    for result in results:
        result.replace_all_uses_with(one)
        node.graph.erase_node(result)
    return one


def _ends_in(output: torch.fx.Node, value: torch.fx.Node, parts: set[torch.fx.Node]) -> bool:
    """Whether only a graph's output reads a value, or parts of it, which are added to those found."""
    for user in value.users:
        if user is not output:
            if user.target not in _PARTS_OF_SUMS or not _ends_in(output, user, parts):
                return False
            parts.add(user)
    return True


def _add_up(output: torch.fx.Node, dtype: torch.dtype, sums: Mapping[torch.fx.Node, Collection[torch.fx.Node]]) -> None:
    """Leave shares of these sums, and add them up before a graph's output, which reads the given parts."""
    graph, values = output.graph, [each.meta["val"] for each in sums]
    *places, _ = places_of([value.numel() for value in values])
    shares = [_leave(each) for each in sums]
    meta = {key: value for key, value in next(iter(sums)).meta.items() if key not in OF_RESULTS}

    def view(of: torch.fx.Node, target: Any, *arguments: Any) -> torch.fx.Node:
        with graph.inserting_before(output):
            made = graph.call_function(target, (of, *arguments))
        made.meta = {**meta, "val": target(of.meta["val"], *arguments)}
        return made

    def of_other(part: Any, whole: torch.fx.Node, other: torch.fx.Node) -> torch.fx.Node:
        """The part of another tensor that this one is of the whole."""
        if part is whole:
            return other
        source = of_other(part.args[0], whole, other)
        return source if part.target in CASTS else view(source, part.target, *part.args[1:])

    with graph.inserting_before(output):
        both = graph.call_function(torch.ops.stepscope.sums_of_shares.default, (shares, dtype))
    both.meta = {**meta, "val": torch.ops.stepscope.sums_of_shares([one.meta["val"] for one in shares], dtype)}
    rounded, exact = view(both, operator.getitem, 1), view(both, operator.getitem, 0)
    for (result, parts), place, value in zip(sums.items(), places, values, strict=True):
        of_both = [
            view(view(of, torch.ops.aten.slice.Tensor, 0, place, place + value.numel()), _VIEW, [*value.shape])
            for of in (exact, rounded) if of.meta["val"].numel()
        ]  # fmt: skip
        whole = of_both[0] if value.dtype == exact.meta["val"].dtype else of_both[1]
        result.replace_all_uses_with(whole, lambda user: user is not both)
        # What is cast to the other dtype is there in it.
        for cast in parts if whole is of_both[0] and len(of_both) > 1 else ():
            if cast.target in CASTS and cast.meta["val"].dtype == dtype and not _changed(cast.args[0], whole):
                cast.replace_all_uses_with(of_other(cast.args[0], whole, of_both[1]))


def _changed(part: Any, whole: torch.fx.Node) -> bool:
    """Whether a part of the whole was cast to another dtype, before it was taken or after."""
    if part is whole:
        return False
    casts = part.target in CASTS and part.meta["val"].dtype != part.args[0].meta["val"].dtype
    return casts or _changed(part.args[0], whole)


def _leave(result: torch.fx.Node) -> torch.fx.Node:
    """The shares of these sums, which nothing adds up then."""
    source: Any = result.all_input_nodes[0]
    if _is_ours(result):
        give(source, "apart", True)
        return result
    with result.graph.inserting_before(result):
        made = result.graph.call_function(torch.ops.stepscope.row_shares.default, (source,))
    made.meta = {key: each for key, each in result.meta.items() if key not in OF_RESULTS}
    made.meta["val"] = torch.ops.stepscope.row_shares(source.meta["val"])
    return made


PASSES.append(shares_together)
