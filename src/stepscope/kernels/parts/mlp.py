"""SwiGLU's product silu(gate) * up, and GELU of a linear layer, forward and backward in Triton.

    silu_product(gate, up) -> silu(gate) * up
    biased_gelu(h, bias, tanh=False) -> gelu(h + bias)

With s = 1 / (1 + exp(-gate)) and silu(gate) = gate s:

    dup = dout gate s        dgate = dout up s (1 + gate (1 - s))

since d silu / d gate = s + gate s (1 - s). Autograd keeps gate and up alone, and backward makes s again: the third
tensor of the written-out product, silu(gate), is never stored. Forward reads two tensors and writes one; backward reads
three and writes two. It is computed in fp32 (in fp64 for fp64) and rounded once.

Backward writes into new memory. Writing over gate and up would save it, and would be wrong where backward runs again
(`retain_graph`) or somebody else holds them, which a kernel cannot see.

GELU takes the product of a linear layer before its bias b: with x = h + b,

    gelu(x) = x c        dh = dout (c + x d)        db = the sum of dh over rows

    c = (1 + erf(x / sqrt 2)) / 2        d = exp(-x^2 / 2) / sqrt(2 pi)
    with tanh:  c = 1 / (1 + exp(-v))    d = c (1 - c) v'    v = sqrt(8 / pi) (x + 0.044715 x^3)

The pass that makes dh has the bias's gradient, too: each program adds up the columns of a chunk of rows, and
`fill_sums` the chunks. PyTorch's compiler reads dh, or what it is made of, once more for that, in two kernels. In 16
bits c is exp(-x^2 / 2) times a polynomial of t = 1 / (1 + 0.31 |x|), within 5e-6 of itself (`_TAIL`), in the form of
Abramowitz and Stegun 7.1.26: libdevice's erf takes longer than the memory at 16,384 rows. In 32 bits it is erf.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepscope.core.errors import InputError
from stepscope.kernels import native
from stepscope.kernels.launching import check_place, launch_at, tiles_of, wide
from stepscope.kernels.operators import check_part, define, refuse_second_derivative, watched
from stepscope.kernels.parts.norm import fill_sums

_NAME = "mlp fused"
_BLOCK = 2048
_GELU_ROWS, _GELU_BLOCK = 8, 256
"""The rows and columns of a tile of GELU's forward: 16 bytes for a thread at a time, four rows in a pass."""
_GELU_CHUNK, _GELU_STAGES = 2, 4
"""The rows of a tile of GELU's backward, and how many of its tiles are loaded at a time. Loaded one after another, the
tiles took 1.4 times as long with the sums as without: ptxas puts loads behind the arithmetic of others."""
_GELU_PROGRAMS = 16 * 132
"""About how many programs backward of GELU has: each adds up some rows before it writes their sums."""


@triton.jit
def silu_product_forward(gate, up, out, gate_stride, up_stride, width, tiles, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles
    column = program % tiles * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    through = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(WIDE)
    values = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(WIDE)
    values = through / (1.0 + tl.exp(-through)) * values
    tl.store(out + row * width + column, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_product_backward(
    dout, gate, up, dgate, dup, dout_stride, gate_stride, up_stride, made_stride, width, tiles,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row = program // tiles
    column = program % tiles * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gradient = tl.load(dout + row * dout_stride + column, mask=inside, other=0.0).to(WIDE)
    through = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(WIDE)
    values = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(WIDE)
    sigmoid = 1.0 / (1.0 + tl.exp(-through))
    of_gate = gradient * values * sigmoid * (1.0 + through * (1.0 - sigmoid))
    tl.store(dgate + row * made_stride + column, of_gate.to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + row * made_stride + column, (gradient * through * sigmoid).to(dup.dtype.element_ty), mask=inside)


def _rows(*tensors: Tensor, flat: bool = True) -> list[Tensor]:
    """Tensors (..., F) of one shape as rows; flat: as one row where all are contiguous, so that blocks are full."""
    if flat and all(tensor.is_contiguous() for tensor in tensors):
        return [tensor.reshape(1, -1) for tensor in tensors]
    rows = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
    return [each if each.stride(1) == 1 else each.contiguous() for each in rows]


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    check_place(_NAME, gate)
    out = _fake_forward(gate, up)
    if gate.numel():
        gates, ups = _rows(gate, up)
        rows, width = gates.shape
        tiles = tiles_of(width, _BLOCK)
        launch_at(
            gate, silu_product_forward, (rows * tiles,),
            gates, ups, out, gates.stride(0), ups.stride(0), width, tiles, WIDE=wide(gate.dtype), BLOCK=_BLOCK,
            num_warps=8,
        )  # fmt: skip
    return out


def _fake_forward(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


def _backward(dout: Tensor, gate: Tensor, up: Tensor, halves: bool) -> tuple[Tensor, Tensor]:
    """Both gradients; with `halves`, as halves of the rows of the first result."""
    dgate, dup = results = _fake_backward(dout, gate, up, halves)
    if gate.numel():
        gradients, gates, ups = _rows(dout, gate, up, flat=not halves)
        rows, width = gates.shape
        if halves:
            dgate, dup = dgate.tensor_split(2, dim=-1)
        tiles = tiles_of(width, _BLOCK)
        launch_at(
            gate, silu_product_backward, (rows * tiles,),
            gradients, gates, ups, dgate, dup, gradients.stride(0), gates.stride(0), ups.stride(0),
            dgate.stride(-2) if halves else width, width, tiles,
            WIDE=wide(gate.dtype), BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    return results


def _fake_backward(dout: Tensor, gate: Tensor, up: Tensor, halves: bool) -> tuple[Tensor, Tensor]:
    if halves:
        both = torch.empty((*gate.shape[:-1], 2 * gate.shape[-1]), dtype=gate.dtype, device=gate.device)
        return both, gate.new_empty(0)
    return _fake_forward(gate, up), _fake_forward(gate, up)


define("silu_product_forward(Tensor gate, Tensor up) -> Tensor", _forward, _fake_forward)
define(
    "silu_product_backward(Tensor dout, Tensor gate, Tensor up, bool halves) -> (Tensor, Tensor)",
    _backward,
    _fake_backward,
)


_PRODUCT = native.Operation("SiluProductBackward0")


def _gradients(halves: bool, dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    refuse_second_derivative(_NAME)
    run = torch.ops.stepscope.silu_product_backward if watched(dout, gate, up) else _backward
    gradients = run(dout, gate, up, halves)
    return gradients[0].tensor_split(2, dim=-1) if halves else gradients


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        def run() -> native.Ran:
            run = torch.ops.stepscope.silu_product_forward if watched(gate, up) else _forward
            return (run(gate, up),), (gate, up)

        # Where gate and up lie as halves of one tensor's rows do, which one product made, their gradients are such
        # halves, too, and the product's backward takes them as they lie.
        together = gate.dim() > 1 and not gate.is_contiguous() and gate.stride() == up.stride()
        halves = together and gate.stride()[-2:] == (2 * gate.shape[-1], 1)
        gradients = functools.partial(_gradients, halves)
        (out,) = native.forward(ctx, _PRODUCT, (gate, up), (), run, gradients)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(native.backward(ctx, gradients))


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    check_part("mlp", gate, up)
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.dim() < 1:
        raise InputError(
            f"{_NAME} takes gate and up (..., F) of one shape and dtype, not {tuple(gate.shape)} in {gate.dtype} and "
            f"{tuple(up.shape)} in {up.dtype}"
        )
    known = None if watched(gate, up) else _PRODUCT.call((gate, up), ())
    return _Product.apply(gate, up) if known is None else known[0]


# GELU of a linear layer, whose bias is added here.

_TAIL = tl.constexpr((0.12386062, 0.12044135, 0.13343170, 0.01573787, 0.18045865, -0.07393254))
"""c(-|x|) exp(x^2 / 2) as a polynomial of t without a constant, fitted for the least relative error up to |x| = 14."""


@triton.jit
def gelu_factors(x, TANH: tl.constexpr, EXACT: tl.constexpr):
    """c and d of each x. In 16 bits powers of 2, and 1 / y as the square of 1 / sqrt(y): both are one instruction that
    takes numbers below 2^-126 for zero, where exp and a quotient look for them first."""
    if TANH:
        v = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        if EXACT:
            e = tl.exp(-tl.abs(v))
            of_positive = 1.0 / (1.0 + e)
        else:
            e = tl.exp2(-1.4426950408889634 * tl.abs(v))
            of_positive = tl.rsqrt(1.0 + e)
            of_positive *= of_positive
        c = tl.where(v < 0.0, e * of_positive, of_positive)  # no difference of numbers near 1
        d = e * of_positive * of_positive * (1.5957691216057308 + 0.21406444881780076 * x * x)
    elif EXACT:
        c = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        d = tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:
        d = tl.exp2(-0.7213475204444817 * x * x)
        t = tl.rsqrt(1.0 + 0.31 * tl.abs(x))
        t *= t
        tail = _TAIL[4] + t * _TAIL[5]
        tail = _TAIL[2] + t * (_TAIL[3] + t * tail)
        tail = d * t * (_TAIL[0] + t * (_TAIL[1] + t * tail))
        c = tl.where(x < 0.0, tail, 1.0 - tail)
        d = d * 0.3989422804014327
    return c, d


@triton.jit
def biased_gelu_forward(
    h, bias, out, rows, width, stride, across, BIASED: tl.constexpr, TANH: tl.constexpr, EXACT: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = program % across * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows) & (column < width)[None, :]
    x = tl.load(h + row * stride + column[None, :], mask=inside, other=0.0).to(WIDE)
    if BIASED:
        x += tl.load(bias + column, mask=column < width, other=0.0).to(WIDE)[None, :]
    c, _d = gelu_factors(x, TANH, EXACT)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(out + row * width + column[None, :], (x * c).to(out.dtype.element_ty), mask=inside)


@triton.jit
def biased_gelu_backward(
    dout, h, bias, dh, sums, rows, width, chunk, dout_stride, stride, BIASED: tl.constexpr, TANH: tl.constexpr,
    EXACT: tl.constexpr, SUMMED: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program makes dh of a chunk of rows. SUMMED: whether it adds up the chunk's columns, too."""
    first = tl.program_id(1) * chunk
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = column < width
    total = tl.zeros([ROWS, BLOCK], WIDE)
    added = tl.zeros([BLOCK], WIDE)
    if BIASED:
        added = tl.load(bias + column, mask=within, other=0.0).to(WIDE)
    for start in tl.range(first, min(first + chunk, rows), ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = (row < rows) & within[None, :]
        gradient = tl.load(dout + row * dout_stride + column[None, :], mask=inside, other=0.0).to(WIDE)
        x = tl.load(h + row * stride + column[None, :], mask=inside, other=0.0).to(WIDE) + added[None, :]
        c, d = gelu_factors(x, TANH, EXACT)  # pyright: ignore[reportGeneralTypeIssues]
        gradient *= c + x * d
        tl.store(dh + row * width + column[None, :], gradient.to(dh.dtype.element_ty), mask=inside)
        total += gradient
    if SUMMED:
        tl.store(sums + tl.program_id(1).to(tl.int64) * width + column, tl.sum(total, 0), mask=within)


def _gelu(h: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    check_place(_NAME, h)
    out = _fake_forward(h, h)
    if h.numel():
        (rows,) = _rows(h, flat=False)
        count, width = rows.shape
        across = tiles_of(width, _GELU_BLOCK)
        # In one dimension: another has at most 65,535 programs, which are half a million rows.
        launch_at(
            h, biased_gelu_forward, (across * tiles_of(count, _GELU_ROWS),),
            rows, rows if bias is None else bias, out, count, width, rows.stride(0), across,
            BIASED=bias is not None, ROWS=_GELU_ROWS, num_warps=4, **_options(h, tanh),
        )  # fmt: skip
    return out


def _options(h: Tensor, tanh: bool) -> dict[str, Any]:
    exact = h.dtype in (torch.float32, torch.float64)
    return {"TANH": tanh, "EXACT": exact, "WIDE": wide(h.dtype), "BLOCK": _GELU_BLOCK}


def _gelu_backward(
    dout: Tensor, h: Tensor, bias: Tensor | None, tanh: bool, of_bias: bool, apart: bool = False
) -> tuple[Tensor, Tensor]:
    """The gradients of h and of the bias, or its shares; the second is empty unless it is asked for."""
    dh, dbias = _fake_gelu_backward(dout, h, bias, tanh, of_bias, apart)
    if not h.numel():
        return dh, dbias.zero_()
    gradients, rows = _rows(dout, h, flat=False)
    count, width = rows.shape
    across, chunk = _chunk(count, width)
    sums = dbias if apart or not of_bias else _sums_of_chunks(h)
    launch_at(
        h, biased_gelu_backward, (across, tiles_of(count, chunk)),
        gradients, rows, rows if bias is None else bias, dh, sums, count, width, chunk, gradients.stride(0),
        rows.stride(0), BIASED=bias is not None, SUMMED=of_bias, ROWS=_GELU_CHUNK, STAGES=_GELU_STAGES, num_warps=4,
        **_options(h, tanh),
    )  # fmt: skip
    if of_bias and not apart:
        fill_sums(sums, dbias)
    return dh, dbias


def _chunk(count: int, width: int) -> tuple[int, int]:
    """How many programs lie side by side in backward, and how many rows each has."""
    across, tiles = tiles_of(width, _GELU_BLOCK), tiles_of(count, _GELU_CHUNK)
    return across, tiles_of(tiles, min(tiles, tiles_of(_GELU_PROGRAMS, across))) * _GELU_CHUNK


def _sums_of_chunks(h: Tensor) -> Tensor:
    """What programs of backward leave: a sum of their rows for each column."""
    width = h.shape[-1]
    count = h.numel() // max(1, width)
    chunks = tiles_of(count, _chunk(count, width)[1]) if count else 0
    return torch.empty((chunks, width), dtype=torch.promote_types(h.dtype, torch.float32), device=h.device)


def _fake_gelu_backward(
    dout: Tensor, h: Tensor, bias: Tensor | None, _tanh: bool, of_bias: bool, apart: bool = False
) -> tuple[Tensor, Tensor]:
    dtype = h.dtype if bias is None else bias.dtype
    if of_bias and apart:
        return _fake_forward(h, dout), _sums_of_chunks(h)
    return _fake_forward(h, dout), torch.empty(h.shape[-1] if of_bias else 0, dtype=dtype, device=h.device)


define("biased_gelu_forward(Tensor h, Tensor? bias, bool tanh) -> Tensor", _gelu, lambda h, *_: _fake_forward(h, h))
define(
    "biased_gelu_backward(Tensor dout, Tensor h, Tensor? bias, bool tanh, bool of_bias, bool apart=False)"
    " -> (Tensor, Tensor)",
    _gelu_backward,
    _fake_gelu_backward,
)


_GELU = native.Operation("BiasedGeluBackward0")


def _gelu_gradients(tanh: bool, of_bias: bool, dout: Tensor, h: Tensor, *rest: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_derivative(_NAME)
    run = torch.ops.stepscope.biased_gelu_backward if watched(dout, h, *rest) else _gelu_backward
    dh, dbias = run(dout, h, rest[0] if rest else None, tanh, of_bias)
    return (dh, dbias if of_bias else None) if rest else (dh,)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, bias: Tensor | None, tanh: bool, of_bias: bool) -> Tensor:
        inputs = (h,) if bias is None else (h, bias)

        def run() -> native.Ran:
            run = torch.ops.stepscope.biased_gelu_forward if watched(*inputs) else _gelu
            return (run(h, bias, tanh),), inputs

        gradients = functools.partial(_gelu_gradients, tanh, of_bias)
        (out,) = native.forward(ctx, _GELU, inputs, (tanh, of_bias), run, gradients)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dh, *dbias = native.backward(ctx, gradients)
        return dh, *(dbias or [None]), None, None


def biased_gelu(h: Tensor, bias: Tensor | None = None, *, tanh: bool = False) -> Tensor:
    """gelu(h + bias) of h (..., F) and a bias (F); tanh: by the approximation with tanh, as GPT-2 has it."""
    tensors = (h,) if bias is None else (h, bias)
    check_part("mlp", *tensors)
    if h.dim() < 1 or (bias is not None and (bias.shape != h.shape[-1:] or bias.device != h.device)):
        raise InputError(
            f"{_NAME} takes h (..., F) and a bias (F), not {' and '.join(str(tuple(t.shape)) for t in tensors)}"
        )
    of_bias = bias is not None and bias.requires_grad
    known = None if watched(*tensors) else _GELU.call(tensors, (tanh, of_bias))
    return _Gelu.apply(h, bias, tanh, of_bias) if known is None else known[0]
