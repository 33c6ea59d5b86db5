"""Matrix products of the FlashAttention kernels, and the form of their operands.

An operand is a tile. In the precision "bf16x6" it is three tiles of bf16 whose sum is a tile of fp32,

    x = high + middle + low        high = bf16(x), middle = bf16(x - high), low = bf16(x - high - middle),

with 8 bits each, together fp32's 24. A product is six products of bf16 (Henry, Tang, Heinecke 2019, arXiv:1904.06376);
the products left out are 2^-24 of the largest. `flash_split_operands` splits operands from memory before the loops: a
row has high, middle and low side by side, (B, H, rows, 3 BLOCK_D), with zeros beyond the head dimension. Compared with
three products of TF32 ("tf32x3", which Triton splits in every iteration), operands have half the width, and the tensor
cores read them transposed at no cost. A number that is infinite, or above 3.39e38, makes its results NaN.
"""

import triton
import triton.language as tl

from stepscope.kernels.flash.tiles import head_and_row, load_tile, long

PARTS = 3
"""The number of parts of a split operand."""


def splits(precision: str) -> bool:
    """Whether this precision splits an operand into parts. Kernels call `is_split`, which costs the host more."""
    return "bf16x6" in precision


is_split = triton.constexpr_function(splits)


@triton.constexpr_function
def _is_upcast(precision):
    return precision.startswith("upcast")


@triton.jit
def _split(tile):
    high = tile.to(tl.bfloat16)
    rest = tile - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return high, middle, low


@triton.jit
def _dot(left, right, accumulator, PRECISION: tl.constexpr):
    if _is_upcast(PRECISION):
        return tl.dot(left.to(tl.float32), right.to(tl.float32), accumulator, input_precision="ieee")
    elif is_split(PRECISION):
        return tl.dot(left, right, accumulator)
    else:
        return tl.dot(left, right, accumulator, input_precision=PRECISION)


@triton.jit
def product(left, right, accumulator, PRECISION: tl.constexpr):
    """left @ right + accumulator in fp32.

    PRECISION is Triton's input_precision, or "bf16x6". "upcast", alone or as a prefix, is for Triton's interpreter,
    which treats the bits of bf16 as integers. Products of bf16 are exact in fp32.
    """
    if is_split(PRECISION):
        # Small products come first, and the tile's sum is separate from the accumulator, since tensor cores truncate
        # sums and do not round. Summed in place, the errors of dK and dV on an H200 were 6 and 21 times the efficient
        # kernel's, not 0.5 and 1.
        total = _dot(left[1], right[1], None, PRECISION)
        total = _dot(left[2], right[0], total, PRECISION)
        total = _dot(left[0], right[2], total, PRECISION)
        total = _dot(left[1], right[0], total, PRECISION)
        total = _dot(left[0], right[1], total, PRECISION)
        total = _dot(left[0], right[0], total, PRECISION)
        if accumulator is None:
            return total
        else:
            return accumulator + total
    else:
        return _dot(left, right, accumulator, PRECISION)


@triton.jit
def load_operand(
    source, offset, batch, head, first, limit, stride,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Load a tile as an operand, with all its parts if it is split."""
    if is_split(PRECISION):
        high = load_tile(source, offset, batch, head, first, limit, stride, ROWS, BLOCK_D, BLOCK_D, EVEN, TMA)
        middle = load_tile(
            source, offset, batch, head, first, limit, stride, ROWS, BLOCK_D, BLOCK_D, EVEN, TMA, BLOCK_D
        )
        low = load_tile(
            source, offset, batch, head, first, limit, stride, ROWS, BLOCK_D, BLOCK_D, EVEN, TMA, 2 * BLOCK_D
        )
        return high, middle, low
    else:
        return load_tile(source, offset, batch, head, first, limit, stride, ROWS, HEAD_DIM, BLOCK_D, EVEN, TMA)


@triton.jit
def as_operand(tile, other, PRECISION: tl.constexpr):
    """A tile of fp32 as an operand of the precision, or of the dtype of `other`."""
    if is_split(PRECISION):
        return _split(tile)
    else:
        return tile.to(other.dtype)


@triton.jit
def joined(operand, PRECISION: tl.constexpr):
    """The tile whose parts make up an operand."""
    if is_split(PRECISION):
        return operand[0].to(tl.float32) + (operand[1].to(tl.float32) + operand[2].to(tl.float32))
    else:
        return operand


@triton.jit
def transposed(operand, PRECISION: tl.constexpr):
    """An operand's transpose."""
    if is_split(PRECISION):
        return tl.trans(operand[0]), tl.trans(operand[1]), tl.trans(operand[2])
    else:
        return tl.trans(operand)


@triton.jit
def _negated(tile):
    # Negated in fp32, since Triton's interpreter treats the bits of bf16 as integers. Nothing is rounded.
    return (-tile.to(tl.float32)).to(tile.dtype)


@triton.jit
def negated(operand, PRECISION: tl.constexpr):
    """An operand times -1."""
    if is_split(PRECISION):
        return _negated(operand[0]), _negated(operand[1]), _negated(operand[2])
    else:
        return _negated(operand)


@triton.jit
def flash_split_operands(
    FIRST, SECOND, FIRST_PARTS, SECOND_PARTS,
    first_batch, first_head, first_row, second_batch, second_head, second_row, heads, rows,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Split (B, H, rows, D) fp32 into (B, H, rows, 3 BLOCK_D) bf16, contiguous; program_id(1) chooses one of two."""
    batch_head, first = head_and_row(tl.program_id(0), rows, BLOCK_ROWS)  # pyright: ignore[reportGeneralTypeIssues]
    batch = long(batch_head // heads)
    head = batch_head % heads
    if tl.program_id(1) == 0:
        source = FIRST + (batch * first_batch + long(head) * first_head)
        stride = first_row
        parts = FIRST_PARTS
    else:
        source = SECOND + (batch * second_batch + long(head) * second_head)
        stride = second_row
        parts = SECOND_PARTS
    tile = load_tile(source, 0, 0, 0, first, rows, stride, BLOCK_ROWS, HEAD_DIM, BLOCK_D, False, False)
    high, middle, low = _split(tile)
    row = first + tl.arange(0, BLOCK_ROWS)
    pointers = parts + (long(batch_head) * rows + first) * (3 * BLOCK_D)
    pointers = pointers + tl.arange(0, BLOCK_ROWS)[:, None] * (3 * BLOCK_D) + tl.arange(0, BLOCK_D)[None, :]
    inside = (row < rows)[:, None]
    tl.store(pointers, high, mask=inside)
    tl.store(pointers + BLOCK_D, middle, mask=inside)
    tl.store(pointers + 2 * BLOCK_D, low, mask=inside)
