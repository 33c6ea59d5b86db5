"""Casts of bf16 to 8 bits: one scale for a whole tensor, and the tensor in the layouts that products take.

    scale_of(x, end)                  s = max(max |x| / end, the least normal number of fp32), in fp32
    cast_layouts(x, s, dtype, ...)    q = round(clamp(x / s, -end, end)): x's layout, its transpose's, or both

x (R, K) is bf16, `end` the largest number of the format: 448 of e4m3, 57344 of e5m2. Tensor Cores take operands of 8
bits only where the dimension that a product sums over lies together, so a linear layer wants each in two layouts:

    y  = x w^T      x (R, K),    w (N, K)
    dx = dy w       dy (R, N),   w^T (K, N)
    dw = dy^T x     dy^T (N, R), x^T (K, R)

Since the scale is one number, it serves both. Bytes for each element: 2 to find the scale; then 2 to read, and 1 to
write for each layout. PyTorch's operators move some 26 (magnitudes, a copy in fp32, its division, its clamp, the cast),
and 2 more where a layout has to be made.

Nonnegative numbers of bf16 are ordered as their bits are, with infinity above all of them and no numbers above that: so
the largest magnitude is found among integers, and what is no number makes the scale none, and with it every result.
Each program leaves the largest of what it read, and one more takes the largest of these: no order changes a maximum, so
the bits are the same each time. Quotients are rounded as IEEE 754 has it, once in fp32 and once to 8 bits, to even: the
bits of PyTorch's division and cast. Where x is no number, the result is none, of whatever sign.

Triton's interpreter casts to 8 bits wrongly (it rounds ties away from zero, and drops the carry into the exponent):
there the kernel writes its quotients in fp32, and PyTorch rounds them. It widens the least numbers of bf16 wrongly,
too: the kernels shift their bits, which are the upper half of fp32's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.core.errors import InputError
from stepscope.kernels.launching import check_place, interpreted, launch_at, tiles_of
from stepscope.kernels.operators import define, watched

_NAME = "a cast to 8 bits"
_BLOCK = 4096
_PROGRAMS = 1024
"""The most programs that look for the largest: some eight for each multiprocessor of an H100."""
_ROWS, _COLUMNS = 128, 64
"""A tile: each of its rows is read in 128 bytes, and each row of the transpose is written in as many."""
SMALLEST = torch.finfo(torch.float32).tiny
"""A scale is at least this, so that a tensor of zeros divides by no zero."""
DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def largest_of_eight_bits(
    bits,  # int16 (elements,): of bf16
    maxima,  # int32 (programs,): what each program found
    elements,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), dtype=tl.int32)
    for block in range(program, tl.cdiv(elements, BLOCK), tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + offsets
        magnitudes = tl.load(bits + at, mask=at < elements, other=0).to(tl.int32) & 0x7FFF
        largest = tl.maximum(largest, magnitudes)
    tl.store(maxima + program, tl.max(largest, 0))


@triton.jit
def scale_to_eight_bits(
    maxima,
    scale,  # fp32 ()
    count,
    share,  # of the largest: 1 / end
    smallest,
    BLOCK: tl.constexpr,
):
    offsets = tl.arange(0, BLOCK)
    largest = tl.max(tl.load(maxima + offsets, mask=offsets < count, other=0), 0)
    candidate = (largest << 16).to(tl.float32, bitcast=True) * share
    # Where, and no maximum: that of a number and of what is none may be the number.
    tl.store(scale, tl.where(candidate < smallest, smallest, candidate))


@triton.jit
def cast_to_eight_bits(
    bits,  # int16 (rows, columns): of bf16
    along,  # 8 bits (rows, columns); written where ALONG
    across,  # 8 bits (columns, rows); written where ACROSS
    scale,  # fp32 ()
    end,
    rows,
    columns,
    tiles,  # of a row
    ALONG: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles * ROWS + tl.arange(0, ROWS)
    column = program % tiles * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(bits + row[:, None] * columns + column[None, :], mask=inside, other=0)
    # bf16 is the upper half of fp32.
    values = tl.math.div_rn((tile.to(tl.int32) << 16).to(tl.float32, bitcast=True), tl.load(scale))
    # Rounded, the largest may be just above the end. Comparisons leave what is no number as it is.
    values = tl.where(values > end, end, tl.where(values < -end, -end, values))
    small = values.to(along.dtype.element_ty)
    if ALONG:
        tl.store(along + row[:, None] * columns + column[None, :], small, mask=inside)
    if ACROSS:
        turned = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(across + column[:, None] * rows + row[None, :], tl.trans(small), mask=turned)


def _scale(x: Tensor, end: float) -> Tensor:
    check_place(_NAME, x)
    bits = x.contiguous().view(torch.int16)
    programs = max(1, min(_PROGRAMS, tiles_of(x.numel(), _BLOCK)))
    maxima = torch.empty(programs, dtype=torch.int32, device=x.device)
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    launch_at(x, largest_of_eight_bits, (programs,), bits, maxima, x.numel(), BLOCK=_BLOCK, num_warps=8)
    launch_at(x, scale_to_eight_bits, (1,), maxima, scale, programs, 1 / end, SMALLEST, BLOCK=_PROGRAMS, num_warps=4)
    return scale


def _layouts(x: Tensor, scale: Tensor, dtype: torch.dtype, along: bool, across: bool) -> tuple[Tensor, Tensor]:
    check_place(_NAME, x)
    bits = x.contiguous().view(torch.int16)
    by_pytorch = interpreted()
    layouts = _fake_layouts(x, scale, torch.float32 if by_pytorch else dtype, along, across)
    if x.numel():
        (rows, columns), tiles = x.shape, tiles_of(x.shape[1], _COLUMNS)
        launch_at(
            x, cast_to_eight_bits, (tiles_of(rows, _ROWS) * tiles,),
            bits, *layouts, scale, torch.finfo(dtype).max, rows, columns, tiles,
            ALONG=along, ACROSS=across, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8,
        )  # fmt: skip
    return (layouts[0].to(dtype), layouts[1].to(dtype)) if by_pytorch else layouts


def _fake_layouts(x: Tensor, scale: Tensor, dtype: torch.dtype, along: bool, across: bool) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    shapes = ((rows, columns) if along else (0,)), ((columns, rows) if across else (0,))
    first, second = (torch.empty(shape, dtype=dtype, device=x.device) for shape in shapes)
    return first, second


define(
    "eight_bit_scale(Tensor x, float end) -> Tensor",
    _scale,
    lambda x, _end: torch.empty((), dtype=torch.float32, device=x.device),
)
define(
    "eight_bit_layouts(Tensor x, Tensor scale, ScalarType dtype, bool along, bool across) -> (Tensor, Tensor)",
    _layouts,
    _fake_layouts,
)


def scale_of(x: Tensor, end: float) -> Tensor:
    """What x (any shape, bf16) is divided by so that its largest magnitude becomes `end`: fp32 (), on x's device."""
    if x.dtype != torch.bfloat16:
        raise InputError(f"{_NAME} takes bf16, not {str(x.dtype).removeprefix('torch.')}")
    run = torch.ops.stepscope.eight_bit_scale if watched(x) else _scale
    return run(x, end)


def cast_layouts(
    x: Tensor, scale: Tensor, dtype: torch.dtype, *, along: bool = True, across: bool = False
) -> tuple[Tensor, Tensor]:
    """x (R, K) bf16 over its scale, in 8 bits: as (R, K), and as its transpose (K, R), both row-major. What is not
    asked for is an empty tensor (0,).

    scale: fp32 (). dtype: float8_e4m3fn or float8_e5m2. Raises InputError for another shape or dtype.
    """
    if x.dtype != torch.bfloat16 or x.dim() != 2 or dtype not in DTYPES:
        raise InputError(
            f"{_NAME} takes bf16 (R, K) to e4m3 or e5m2, not {tuple(x.shape)} in "
            f"{str(x.dtype).removeprefix('torch.')} to {str(dtype).removeprefix('torch.')}"
        )
    run = torch.ops.stepscope.eight_bit_layouts if watched(x, scale) else _layouts
    return run(x, scale, dtype, along, across)
