"""The output head and the cross-entropy without the logits of the whole batch: cuBLAS's products and Triton's rows.

    linear_cross_entropy(x, weight, targets, bias=None, ignore_index=-100, z_loss=0, few_labels=False) -> mean loss

For a row x of x (..., M), its logits z = W x + b with W (V, M) and b (V), its target t, and L = log(sum(exp z)):

    loss = L - z_t + c L^2        dz = p (1 + 2 c L) - onehot(t)        p = exp(z - L)

with c the coefficient of the z-loss, which keeps L near zero (PaLM, Chowdhery et al. 2022). The mean is over rows whose
target is not `ignore_index`. With dz, dx = dz W, dW = dz^T x, and db is the sum of dz over rows. A bias costs no pass
of its own: x gets a column of ones, and W the bias as a column.

Rows are taken in chunks (`loss_chunk_rows` of core/parts.py). Of each chunk the logits are made in the dtype of the
products, as in the reference, and a kernel, one program for a row, turns them in place into dz over the number of rows,
while it has the row's loss. The same pass then makes dx and adds to dW, in fp32. So forward does backward's work, where
gradients are needed, and backward only multiplies by the gradient of the loss: on the device, without waiting for
either number. In fp16, whose least number is above such a dz, it is backward that divides, and dz is multiplied by 256
until then, since GradScaler's factor comes too late for it.

Where there is one chunk, and x and W are bf16, dz is kept, and backward makes dW of it in bf16, as the reference does.
The gradient of the loss is multiplied into x, R M numbers, where dW has V M: 4 V M bytes less are moved. Memory is at
its peak as before: forward held dz beside dW, and backward does.

A vocabulary that 16 does not divide, as GPT-2's of 50,257, gets up to 63 rows of zeros more, in a copy of W (V M
numbers), in the logits and in dW: where rows begin at no multiple of 16 bytes, products of bf16 take slow kernels.

With `few_labels`, as where a model guesses 15 % of its tokens, the rows with a target are put first, and nothing is
computed of the others. How many they are is known to the device alone: products of one group (`grouped_mm`) read it
there, and stop at its last row, so that one graph serves batches with any number of targets. Such products are for
bf16 on Hopper and later; other GPUs take all rows, and a CPU those with a target. dx has few tiles, each a sum over the
whole vocabulary: of small batches dz is copied as pieces of it, whose products fill the GPU and are then added.

A target that is neither a token nor `ignore_index` is an error, as it is to PyTorch: on a CPU an IndexError, on a GPU
an assertion in the kernel that reads it, for which no step waits. If all targets are ignored, the loss is NaN, as
PyTorch's is, and the gradients are zero.

An embedding whose weight is the head's, too, has a gradient in the rows of the batch's tokens alone. `TiedEmbedding`
adds it to dW in place, each row once, as the sum in fp32 of the head's row and of its tokens': PyTorch makes a table of
V M zeros, adds the tokens' rows to it, and then adds two tables.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from stepscope.core.errors import InputError
from stepscope.core.parts import loss_chunk_rows, loss_columns
from stepscope.kernels import operators
from stepscope.kernels.launching import (
    LOG2E,
    check_place,
    interpreted,
    launch_at,
    power_of_two,
    tiles_of,
    warps_for,
    wide,
)
from stepscope.kernels.products import product

_NAME = "loss fused"
_ROW_WARPS, _ROW_LOADS, _ROW_KEPT, _ROW_REGISTERS = 16, 2, 1, 64
"""The warps of a program of `cross_entropy_rows`, which has one row of logits; the loads of 16 bytes that a thread has
in a block of the row; the blocks that stay in registers between the two passes; and the registers of a thread, with
which programs of 32 warps in all fill a multiprocessor."""
_SCALED_BLOCK = 2048
_LENGTHENED = 4, 1024
"""Rows and columns of a tile of `lengthen`."""
_ASSERTING: dict[str, Any] = {} if interpreted() else {"debug": True, "sanitize_overflow": False}
"""Options with which Triton compiles a kernel's own assertions, and none of its checks of integers."""
_FEW_ROWS = 4096
"""Rows of a chunk up to which dx is a sum of pieces: as one product it took 290 us on an H200, of 307 rows as of 2,048,
since few tiles go through 30,528 columns."""
_BESIDE = 8
"""The columns beside a weight's with its bias: one, and as many as rows need to begin at multiples of 16 bytes."""
_FP16_FACTOR = 256.0
"""What gradients of logits are multiplied by in fp16: |dz| is at most 1, and p is often below fp16's least number."""
_OFTEN = 8
"""Tokens that are there more often than that have programs of their own for their gradients, each with few columns."""
_OFTEN_ROWS, _OFTEN_BLOCK = 64, 64
_EMBEDDED_BLOCK = 1024


@triton.jit
def cross_entropy_rows(
    logits, targets, losses, count, stride, width, filled, ignored, factor, pieces, within, piece_width,
    GRADIENT: tl.constexpr, DIVIDED: tl.constexpr, SKIPPED: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr,
    VECTOR: tl.constexpr, LOADS: tl.constexpr, ROUND: tl.constexpr, KEPT: tl.constexpr, Z_LOSS: tl.constexpr,
):  # fmt: skip
    """SKIPPED: whether rows that count for nothing have no logits, and get no gradient. SPLIT: whether gradients are
    written once more, as pieces of the vocabulary, each of `within` rows. ROUND: the numbers of one vector of each
    thread, VECTOR numbers. A block has LOADS such rounds. KEPT: the blocks that wait in registers for their gradient.
    Z_LOSS is a constant, since an argument would have fp32, in fp64, too.

    The first pass goes up the row, the second down, so that what was read last is found in the caches."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    logits += row * stride
    known = (target >= 0) & (target < width)
    tl.device_assert(known | (target == ignored), "Target is out of bounds: it is neither a token nor ignore_index")
    numbers = tl.arange(0, LOADS)[:, None] * ROUND + tl.arange(0, ROUND)[None, :]
    BLOCK: tl.constexpr = LOADS * ROUND
    if target != ignored:
        # Read before any thread writes a gradient: the sums below have barriers.
        of_target = tl.load(logits + target, mask=known, other=float("nan")).to(WIDE)
        # Whole blocks need no masks. The last of them are kept, and those before are read again.
        whole = width // BLOCK * BLOCK
        again = whole - KEPT * BLOCK
        highest, total, kept = first_pass(  # pyright: ignore[reportGeneralTypeIssues]
            logits, numbers, width, filled, whole, again, WIDE, VECTOR, BLOCK, KEPT
        )
        coming = logits
        if GRADIENT:
            coming = tl.load(logits + again - BLOCK + numbers, mask=again > 0, other=0.0)
        top = tl.max(highest, 0)
        rest = tl.log(tl.sum(total * tl.exp(highest - top), 0))
        logsumexp = top + rest
        # Near the highest logit differences are exact, where a sum with it would be rounded.
        tl.store(losses + row, (top - of_target) + rest + Z_LOSS * logsumexp * logsumexp)
        if GRADIENT:
            share = factor / tl.maximum(tl.load(count), 1).to(WIDE) if DIVIDED else factor
            of_all = tl.where(known, share * (1.0 + 2.0 * Z_LOSS * logsumexp), float("nan"))
            rows = tl.load(within) if SPLIT else 0
            second_pass(
                logits, numbers, width, filled, whole, again, kept, coming, top, rest, of_all, pieces, row, rows,
                piece_width, SPLIT, WIDE, BLOCK, KEPT,
            )  # fmt: skip
            # Written a second time, after all others: so no other number is compared with the target.
            tl.debug_barrier()
            gradient = gradient_of(of_target, top, rest, of_all) - share
            write_gradient(logits, target, gradient, known, pieces, row, rows, piece_width, SPLIT)
    else:
        tl.store(losses + row, 0.0)
        if GRADIENT and not SKIPPED:
            nothing = tl.zeros([LOADS, ROUND], logits.dtype.element_ty)
            for start in range(0, filled, BLOCK):
                tl.store(logits + start + numbers, nothing, mask=start + numbers < filled)


@triton.jit
def first_pass(
    logits, numbers, width, filled, whole, again, WIDE: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """Find the highest logit that each thread has and the sum of the exponentials of differences from it; returns both,
    and the blocks that are kept. A block is loaded while the one before it is computed."""
    highest = tl.full([numbers.shape[1] // VECTOR], float("-inf"), WIDE)
    total = tl.zeros([numbers.shape[1] // VECTOR], WIDE)
    coming = tl.load(logits + numbers, mask=again > 0, other=0.0)
    for start in range(BLOCK, again + BLOCK, BLOCK):
        values = coming
        coming = tl.load(logits + start + numbers, mask=start < again, other=0.0)
        highest, total = taken_up(values.to(WIDE), highest, total, VECTOR)
    kept = ()
    for block in tl.static_range(KEPT):  # pyright: ignore[reportGeneralTypeIssues]
        kept += (tl.load(logits + again + block * BLOCK + numbers, eviction_policy="evict_first"),)
    for start in range(whole, filled, BLOCK):
        values = last_values(logits, start + numbers, width, filled, WIDE)
        highest, total = taken_up(values, highest, total, VECTOR)
    for block in tl.static_range(KEPT):  # pyright: ignore[reportGeneralTypeIssues]
        highest, total = taken_up(kept[block].to(WIDE), highest, total, VECTOR)
    return highest, total, kept


@triton.jit
def second_pass(
    logits, numbers, width, filled, whole, again, kept, coming, top, rest, of_all, pieces, row, rows, piece_width,
    SPLIT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Write of_all * exp(logit - top - rest) in each logit's place; coming: the last block that was not kept."""
    for block in tl.static_range(KEPT):  # pyright: ignore[reportGeneralTypeIssues]
        gradient = gradient_of(kept[block].to(WIDE), top, rest, of_all)
        write_gradient(logits, again + block * BLOCK + numbers, gradient, None, pieces, row, rows, piece_width, SPLIT)
    for start in range(whole, filled, BLOCK):
        column = start + numbers
        gradient = gradient_of(last_values(logits, column, width, filled, WIDE), top, rest, of_all)
        gradient = tl.where(column < width, gradient, 0.0)
        write_gradient(logits, column, gradient, column < filled, pieces, row, rows, piece_width, SPLIT)
    for passed in range(BLOCK, again + BLOCK, BLOCK):
        values, column = coming, again - passed + numbers
        before = logits + column - BLOCK
        coming = tl.load(before, mask=passed < again, other=0.0)
        gradient = gradient_of(values.to(WIDE), top, rest, of_all)
        write_gradient(logits, column, gradient, None, pieces, row, rows, piece_width, SPLIT)


@triton.jit
def taken_up(values, highest, total, VECTOR: tl.constexpr):
    """For each thread's vectors the highest of their numbers until now, and the sum of exponentials of differences from
    it, with a block's numbers: no thread waits for another."""
    mine = tl.reshape(values, [values.shape[0], values.shape[1] // VECTOR, VECTOR])
    higher = tl.maximum(highest, tl.max(tl.max(mine, 2), 0))
    # Where all numbers are -inf, the difference from them is none.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    terms = tl.exp2((mine - base[None, :, None]) * LOG2E)
    return higher, total * tl.exp(highest - base) + tl.sum(tl.sum(terms, 2), 0)


@triton.jit
def last_values(logits, column, width, filled, WIDE: tl.constexpr):
    """The logits at a row's end. Masks end where rows do, at a multiple of 16: only so are loads wide. Columns from the
    width on count as -inf."""
    values = tl.load(logits + column, mask=column < filled, other=float("-inf")).to(WIDE)
    return tl.where(column < width, values, float("-inf"))


@triton.jit
def gradient_of(values, top, rest, of_all):
    """of_all * exp(values - top - rest)"""
    return tl.exp2((values - top) * LOG2E - rest * LOG2E) * of_all


@triton.jit
def write_gradient(
    logits, column, gradient, inside, pieces, row, rows, piece_width, SPLIT: tl.constexpr
):  # fmt: skip
    """Store a gradient in its logit's place, and with SPLIT at its place among the pieces."""
    tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=inside, cache_modifier=".cs")
    if SPLIT:
        piece = column // piece_width
        at = (piece.to(tl.int64) * rows + row) * piece_width + column - piece * piece_width
        tl.store(pieces + at, gradient.to(pieces.dtype.element_ty), mask=inside)


@triton.jit
def add_pieces(pieces, out, order, within, width, PIECES: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """out[order] = the sum of pieces of `within` rows each, one below the other; 0 in rows from there on"""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.load(within)
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], WIDE)
    for piece in range(PIECES):
        at = (piece * rows + row) * width + column
        total += tl.load(pieces + at, mask=(column < width) & (row < rows), other=0.0).to(WIDE)
    place = tl.load(order + row) * width + column
    tl.store(out + place, total.to(out.dtype.element_ty), mask=column < width)


@triton.jit
def scaled_by(x, out, gradient, count, divisor, numbers, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """out = x * gradient / (max(count, 1) * divisor), and x * gradient where the divisor is 0"""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    factor = tl.load(gradient).to(WIDE)
    if divisor > 0:
        factor /= tl.maximum(tl.load(count), 1).to(WIDE) * divisor
    values = tl.load(x + at, mask=inside, other=0.0).to(WIDE) * factor
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_rows_of_tokens(
    table, rows, tokens, order, count, width, padding, OFTEN: tl.constexpr, LESS: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """table[t] += the sum of rows[order[i]] over each i with tokens[i] = t; tokens are sorted. OFTEN: whether this
    launch takes the tokens that are there more than LESS times, by the first multiple of LESS among their places. The
    other launch takes the rest, by their first place."""
    first = tl.program_id(0)
    if OFTEN:
        place = first * LESS
        token = tl.load(tokens + place)
        before = tl.load(tokens + place - LESS, mask=place >= LESS, other=-1)
        back = place - 1 - tl.arange(0, LESS)
        alike = tl.load(tokens + back, mask=back >= 0, other=-1) == token
        first = place - tl.sum(alike.to(tl.int32), 0)
    else:
        token = tl.load(tokens + first)
        before = tl.load(tokens + first - 1, mask=first > 0, other=-1)
    more = tl.load(tokens + first + LESS, mask=first + LESS < count, other=-1) == token
    if not OFTEN:
        more = more == 0
    if (before != token) & (token != padding) & more:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        target = table + token.to(tl.int64) * width + column
        total = tl.load(target, mask=inside, other=0.0).to(WIDE)
        going = first < count
        while going:
            index = first + tl.arange(0, ROWS)
            mine = tl.load(tokens + index, mask=index < count, other=-1) == token
            source = tl.load(order + index, mask=mine, other=0)
            values = tl.load(
                rows + source[:, None] * width + column[None, :], mask=mine[:, None] & inside[None, :], other=0.0
            )
            total += tl.sum(values.to(WIDE), 0)
            first += ROWS
            going = tl.load(tokens + first, mask=first < count, other=-1) == token
        tl.store(target, total.to(table.dtype.element_ty), mask=inside)


@triton.jit
def lengthen(
    weight, bias, out, rows, width, stride, out_rows, WIDTH: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The weight with a bias as its next column, and zeros behind both and below.

    A kernel of its own, since PyTorch copies GPT-2's head by a memcpy of 81 us in a graph on an H200, where its
    elementwise kernel takes 51 (results/h200/own-step/kernels.txt), and a head with a bias row by row.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    here = (row < rows) & (column < width)
    value = tl.load(weight + row * stride + column, mask=here, other=0.0).to(out.dtype.element_ty)
    if BIASED:
        beside = tl.load(bias + row, mask=row < rows, other=0.0).to(out.dtype.element_ty)
        value = tl.where(column == width, beside, value)
    tl.store(out + row * WIDTH + column, value, mask=(row < out_rows) & (column < WIDTH))


def _forward(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, z_loss: float, of_x: bool, of_weight: bool,
    bias: Tensor | None = None, few: bool = False, late: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The mean loss, the number of rows in it, and the gradients of x and of the weight, where they are asked: of the
    mean, and in fp16 of the sum. That of a bias is a column behind the weight's. late: the gradient of the logits in
    the weight's place."""
    check_place(_NAME, x)
    (rows, width), vocabulary = x.shape, weight.shape[0]
    if not targets.is_cuda:
        operators.check_targets(targets, vocabulary, ignore_index)
    targets, counts = targets.contiguous(), targets != ignore_index
    count, grouped = counts.sum(), few and takes_groups(x)
    order = torch.argsort((~counts).to(torch.uint8), stable=True) if grouped or (few and not x.is_cuda) else None
    if order is not None:
        order = order if grouped else order[: int(count)]
        x, targets = x[order], targets[order]
    kernel = _aligned(weight, bias, x.dtype)
    x = x if bias is None else F.pad(F.pad(x, (0, 1), value=1.0), (0, kernel.shape[1] - width - 1))
    losses = torch.zeros(len(x), dtype=_summed(x), device=x.device)
    dx = torch.empty((len(x), width) if of_x else (0,), dtype=x.dtype, device=x.device)
    chunk = loss_chunk_rows(rows, vocabulary, x.element_size(), width, few=few)
    alone = 0 < len(x) <= chunk
    of_weight_here = of_weight and not late
    make = torch.empty if alone or (len(x) and not grouped) else torch.zeros
    shape = kernel.shape if of_weight_here else (0,)
    dweight = make(shape, dtype=_dweight_dtype(x, weight, rows, few), device=x.device)
    fp16 = x.dtype == torch.float16
    taken, warps = _row_blocks(vocabulary, x.element_size())
    buffer = torch.empty(0 if grouped else min(chunk, len(x)), len(kernel), dtype=x.dtype, device=x.device)
    split = _pieces_of(len(kernel), chunk) if grouped and of_x else 1
    # Products write where they are told to: autocast leaves such calls alone.
    for first in range(0, len(x), chunk):
        part = x[first : first + chunk]
        within = (count - first).clamp(0, len(part)).to(torch.int32).view(1) if grouped else None
        if within is None:
            logits = product(part, kernel.t(), buffer[: len(part)])
        else:
            logits = _grouped(part, kernel.t()[None], within)
        pieces = logits if split == 1 else torch.empty_like(logits)
        launch_at(
            x, cross_entropy_rows, (len(part),),
            logits, targets[first:], losses[first:], count, len(kernel), vocabulary, len(kernel), ignore_index,
            _FP16_FACTOR if fp16 else 1.0, pieces, count if within is None else within, len(kernel) // split,
            GRADIENT=of_x or of_weight, DIVIDED=not fp16, SKIPPED=grouped, SPLIT=split > 1, WIDE=wide(x.dtype),
            Z_LOSS=z_loss, **taken, num_warps=warps, maxnreg=_ROW_REGISTERS, **_ASSERTING,
        )  # fmt: skip
        if of_x and within is not None and order is not None:
            _input_gradient(pieces, kernel[:, :width], dx, order[first:], within, split)
        elif of_x:
            product(logits, kernel[:, :width], dx[first : first + chunk])
        if of_weight_here and within is not None:
            added = _grouped(logits.t(), part, within)[0]
            dweight = added.to(dweight.dtype) if alone else dweight.add_(added)
        elif of_weight_here:
            _add_product(dweight, logits.t(), part, first=first == 0)
    if order is not None and of_x and not grouped:
        dx = dx.new_zeros(rows, width).index_copy_(0, order, dx)
    return losses.sum() / count, count, dx, buffer if late else dweight[:vocabulary]


def _row_blocks(vocabulary: int, size: int) -> tuple[dict[str, int], int]:
    """The constants of a kernel's blocks of rows of logits, each of so many bytes, and its warps."""
    warps = min(_ROW_WARPS, warps_for(power_of_two(vocabulary)))
    vector = 16 // size
    of_round = 32 * warps * vector
    loads = _ROW_LOADS if _ROW_LOADS * of_round <= vocabulary else 1
    kept = min(_ROW_KEPT, vocabulary // (loads * of_round))
    return {"VECTOR": vector, "LOADS": loads, "ROUND": of_round, "KEPT": kept}, warps


def takes_groups(x: Tensor) -> bool:
    """Whether products of x take the number of their rows from the device, by PyTorch's own kernel for groups."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or x.shape[-1] % 8:
        return False
    return torch.cuda.get_device_capability(x.device)[0] in (9, 10)


def _grouped(left: Tensor, right: Tensor, within: Tensor) -> Tensor:
    """The products of groups: of the rows of the left factor up to each number in `within`, or where both factors have
    two dimensions, of so many terms."""
    with torch.autocast(left.device.type, enabled=False):
        return F.grouped_mm(left, right, offs=within)


def _pieces_of(columns: int, rows: int) -> int:
    """Into how many pieces the vocabulary is split for dx: so many that tiles of few rows fill a GPU."""
    if rows > _FEW_ROWS:
        return 1
    return next((pieces for pieces in range(12, 1, -1) if columns % (8 * pieces) == 0), 1)


def _input_gradient(pieces: Tensor, kernel: Tensor, dx: Tensor, order: Tensor, within: Tensor, split: int) -> None:
    """dx of the rows of a chunk, each at its place before they were put in order; zeros where they have no label."""
    columns, width = kernel.shape
    ends = within * torch.arange(1, split + 1, dtype=torch.int32, device=within.device)
    parts = kernel.unflatten(0, (split, columns // split))
    products = _grouped(pieces.view(-1, columns // split), parts, ends)
    block = power_of_two(width)
    launch_at(
        dx, add_pieces, (len(pieces),), products, dx, order, within, width, PIECES=split, WIDE=wide(dx.dtype),
        BLOCK=block, num_warps=warps_for(block),
    )  # fmt: skip


def _aligned(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight (V, M) in a dtype, with rows of zeros below it where rows of logits have more columns; a bias is its
    next column, and columns of zeros follow, so that rows still begin where fast products take them."""
    vocabulary, width = weight.shape
    columns = loss_columns(vocabulary)
    if columns == vocabulary and bias is None:
        return weight.to(dtype)
    if interpreted():  # which cuts bf16 off, where a GPU rounds
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    longer = weight.new_empty(columns, width if bias is None else width + _BESIDE, dtype=dtype)
    grid = tiles_of(columns, _LENGTHENED[0]), tiles_of(longer.shape[1], _LENGTHENED[1])
    launch_at(
        weight, lengthen, grid, weight, weight if bias is None else bias.contiguous(), longer, vocabulary, width,
        weight.stride(0), columns, WIDTH=longer.shape[1], BIASED=bias is not None, ROWS=_LENGTHENED[0],
        BLOCK=_LENGTHENED[1], num_warps=4,
    )  # fmt: skip
    return longer


def _summed(x: Tensor) -> torch.dtype:
    """The dtype in which sums over rows are made."""
    return torch.promote_types(x.dtype, torch.float32)


def _one_product(x: Tensor, weight: Tensor, rows: int, *, few: bool) -> bool:
    """Whether one product in bf16 makes the weight's gradient."""
    one = rows <= loss_chunk_rows(rows, weight.shape[0], x.element_size(), weight.shape[1], few=few)
    return one and x.dtype == weight.dtype == torch.bfloat16


def _dweight_dtype(x: Tensor, weight: Tensor, rows: int, few: bool) -> torch.dtype:
    """The dtype of the weight's gradient until backward: its own where one product in bf16 makes it."""
    return x.dtype if _one_product(x, weight, rows, few=few) else _summed(x)


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """total += left @ right, in the dtype of the total, whatever the factors'; first: the total holds nothing yet."""
    if left.dtype != total.dtype and not left.is_cuda:
        left, right = left.to(total.dtype), right.to(total.dtype)
    if left.dtype != total.dtype and first:
        torch.ops.aten.mm.dtype_out(left, right, total.dtype, out=total)
    elif left.dtype != total.dtype:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    elif first:
        product(left, right, total)
    else:
        total.addmm_(left, right)


def _fake_forward(
    x: Tensor, weight: Tensor, _targets: Tensor, _ignored: int, _z_loss: float, of_x: bool, of_weight: bool,
    bias: Tensor | None = None, few: bool = False, late: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dtype, vocabulary, width = _dweight_dtype(x, weight, x.shape[0], few), *weight.shape
    width += 0 if bias is None else _BESIDE
    kept = (x.shape[0], loss_columns(vocabulary)) if late else (vocabulary, width)
    return (
        torch.empty((), dtype=_summed(x), device=x.device),
        torch.empty((), dtype=torch.int64, device=x.device),
        torch.empty(x.shape if of_x else (0,), dtype=x.dtype, device=x.device),
        torch.empty(kept if of_weight else (0,), dtype=dtype, device=x.device),
    )


def _backward(gradient: Tensor, count: Tensor, summed: Tensor, divisor: float, dtype: torch.dtype) -> Tensor:
    """The gradient of the loss, from what forward made; divisor: 0 where that is divided already."""
    out = _fake_backward(gradient, count, summed, divisor, dtype)
    if summed.numel():
        summed, numbers = summed.contiguous(), summed.numel()
        launch_at(
            summed, scaled_by, (tiles_of(numbers, _SCALED_BLOCK),),
            summed, out, gradient, count, divisor, numbers,
            WIDE=wide(summed.dtype), BLOCK=_SCALED_BLOCK, num_warps=8,
        )  # fmt: skip
    return out


def _as_expression(gradient: Tensor, _count: Tensor, made: Tensor, _divisor: float, dtype: torch.dtype) -> Tensor:
    return (made.to(_summed(made)) * gradient).to(dtype)


def _fake_backward(gradient: Tensor, count: Tensor, summed: Tensor, divisor: float, dtype: torch.dtype) -> Tensor:
    return torch.empty(summed.shape, dtype=dtype, device=summed.device)


operators.define(
    "linear_cross_entropy_forward(Tensor x, Tensor weight, Tensor targets, int ignore_index, float z_loss, bool of_x,"
    " bool of_weight, Tensor? bias=None, bool few=False, bool late=False) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
)
operators.define(
    "linear_cross_entropy_backward(Tensor gradient, Tensor count, Tensor summed, float divisor, ScalarType dtype)"
    " -> Tensor",
    _backward,
    _fake_backward,
)


@register_flop_formula(torch.ops.stepscope.linear_cross_entropy_forward)
def _flops(
    x_shape: Any, weight_shape: Any, _targets: Any, _ignored: Any, _z_loss: Any, of_x: bool, of_weight: bool,
    _bias: Any = None, _few: bool = False, late: bool = False, *_: Any, out_shape: Any = None, **__: Any,
) -> int:  # fmt: skip
    """FLOPs of the products: the logits, and each gradient that is asked for and made here. All rows count, since no
    shape tells how many of them have a target."""
    return 2 * x_shape[0] * weight_shape[0] * weight_shape[1] * (1 + of_x + (of_weight and not late))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: tuple[int, float],
        needs: tuple[bool, bool], few: bool, late: bool,
    ) -> Tensor:  # fmt: skip
        tensors = (x, weight, targets) if bias is None else (x, weight, targets, bias)
        run = torch.ops.stepscope.linear_cross_entropy_forward if operators.watched(*tensors) else _forward
        loss, count, dx, dweight = run(x, weight, targets, *options, *needs, bias, few, late)
        ctx.save_for_backward(count, dx, dweight, *((x,) if late else ()))
        ctx.vocabulary = weight.shape[0]
        ctx.needs, ctx.dtype, ctx.bias_dtype = needs, weight.dtype, None if bias is None else bias.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        operators.refuse_second_derivative(_NAME)
        count, dx, dweight, *late = ctx.saved_tensors
        fp16, run = dx.dtype == torch.float16, _backward
        if torch.compiler.is_compiling() and not fp16:
            run = _as_expression  # which a compiler computes with what comes after it
        elif operators.watched(gradients[0], dx):
            run = torch.ops.stepscope.linear_cross_entropy_backward
        (of_x, of_weight), of_bias = ctx.needs, ctx.bias_dtype is not None
        divisor = _FP16_FACTOR if fp16 else 0.0
        width = dweight.shape[-1] - _BESIDE if of_bias else dweight.shape[-1]
        of_all = run(gradients[0], count, dx, divisor, dx.dtype) if of_x else None
        if late:
            x = run(gradients[0], count, late[0], divisor, late[0].dtype)
            made = product(dweight.t(), x)[: ctx.vocabulary]
            return of_all, made, None, None, None, None, None, None
        return (
            of_all,
            run(gradients[0], count, dweight[:, :width], divisor, ctx.dtype) if of_weight else None,
            run(gradients[0], count, dweight[:, width], divisor, ctx.bias_dtype) if of_weight and of_bias else None,
            None,
            None,
            None,
            None,
            None,
        )


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *, ignore_index: int = -100,
    z_loss: float = 0.0, few_labels: bool = False,
) -> Tensor:  # fmt: skip
    """The mean cross-entropy of softmax(x weight^T + bias) with the targets, those of `ignore_index` left out;
    few_labels: whether these are most of them."""
    operators.check_part("loss", x, weight)
    fits = x.dim() > 0 and weight.dim() == 2 and x.shape[-1] == weight.shape[1] and targets.shape == x.shape[:-1]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        raise InputError(
            f"{_NAME} takes x (..., M), a weight (V, M), targets (...) and a bias (V), not {tuple(x.shape)}, "
            f"{tuple(weight.shape)}, {tuple(targets.shape)}, {bias if bias is None else tuple(bias.shape)}"
        )
    if targets.dtype not in (torch.int64, torch.int32) or weight.shape[0] == 0:
        raise InputError(f"{_NAME} takes targets of int64 or int32 and a vocabulary, not {targets.dtype}")
    x = x.to(operators.autocast_dtype(x))
    rows = x.reshape(-1, x.shape[-1])
    # Whether gradients are needed is decided here: inside the Function nothing is recorded.
    recorded = torch.is_grad_enabled()
    needs = (
        recorded and rows.requires_grad,
        recorded and (weight.requires_grad or (bias is not None and bias.requires_grad)),
    )
    late = needs[1] and bias is None and not few_labels and len(rows) > 0
    late = late and _one_product(rows, weight, len(rows), few=False)
    return _Loss.apply(rows, weight, bias, targets.reshape(-1), (ignore_index, z_loss), needs, few_labels, late)


# ---- an embedding of the head's weight


def _add_embedded(table: Tensor, tokens: Tensor, rows: Tensor, padding: int) -> None:
    """Add to rows of the table the sums of the tokens' rows, but for those of `padding`."""
    if not tokens.numel():
        return
    numbers, order = torch.sort(tokens.reshape(-1).to(torch.int32), stable=True)
    rows, width, count = rows.reshape(len(numbers), -1).contiguous(), table.shape[1], len(numbers)
    block = min(power_of_two(width), _EMBEDDED_BLOCK)
    ways = (
        (False, (count, tiles_of(width, block)), _OFTEN, block, 4),
        (True, (tiles_of(count, _OFTEN), tiles_of(width, _OFTEN_BLOCK)), _OFTEN_ROWS, _OFTEN_BLOCK, 4),
    )
    for often, grid, at_once, columns, warps in ways[: 2 if count > _OFTEN else 1]:
        launch_at(
            table, add_rows_of_tokens, grid, table, rows, numbers, order, count, width, padding, OFTEN=often,
            LESS=_OFTEN, ROWS=at_once, WIDE=wide(table.dtype), BLOCK=columns, num_warps=warps,
        )  # fmt: skip


operators.define(
    "add_embedded(Tensor(a!) table, Tensor tokens, Tensor rows, int padding) -> ()",
    _add_embedded,
    lambda *_: None,
)


class _Tied(torch.autograd.Function):
    """Rows of a weight, and the weight once more for its head: backward runs when it has the gradients of both."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, padding: int | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(tokens)
        ctx.padding = -1 if padding is None else padding
        return F.embedding(tokens, weight), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        operators.refuse_second_derivative("a tied embedding")
        (tokens,), rows, table = ctx.saved_tensors, gradients[0], gradients[1].contiguous()
        run = torch.ops.stepscope.add_embedded if operators.watched(table, rows) else _add_embedded
        run(table, tokens, rows, ctx.padding)
        return table, None, None


class TiedEmbedding(nn.Embedding):
    """An embedding whose weight is its model's head, too. While that computes its loss, the embedding adds its gradient
    to the head's in place. So the loss must give a gradient that nobody else holds; that of this file does."""

    _stepscope_original = nn.Embedding
    _for_head: list[Tensor] | None = None
    """The weight for the head once the embedding was called. None while no loss is computed."""

    def run_for_head(self, run: Callable[[], Any]) -> tuple[Any, Tensor]:
        """The result of what calls the embedding, and the weight that the head must take."""
        self._for_head = for_head = []
        try:
            result = run()
        finally:
            self._for_head = None
        return result, for_head[0] if for_head else self.weight

    def forward(self, input: Tensor) -> Tensor:
        """The rows of the tokens."""
        plain = self.max_norm is None and not self.scale_grad_by_freq and not self.sparse
        recorded = torch.is_grad_enabled() and self.weight.requires_grad and self.weight.is_contiguous()
        if self._for_head is None or self._for_head or not plain or not recorded:
            return super().forward(input)
        rows, weight = _Tied.apply(self.weight, input, self.padding_idx)
        self._for_head.append(weight)
        return rows


TiedEmbedding.__name__ = nn.Embedding.__name__  # models are described in the words of before
