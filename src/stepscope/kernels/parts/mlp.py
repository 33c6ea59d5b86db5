"""SwiGLU's product silu(gate) * up, forward and backward in Triton.

    silu_product(gate, up) -> silu(gate) * up

With s = 1 / (1 + exp(-gate)) and silu(gate) = gate s:

    dup = dout gate s        dgate = dout up s (1 + gate (1 - s))

since d silu / d gate = s + gate s (1 - s). Autograd keeps gate and up alone, and backward makes s again: the third
tensor of the written-out product, silu(gate), is never stored. Forward reads two tensors and writes one; backward reads
three and writes two. It is computed in fp32 (in fp64 for fp64) and rounded once.

Backward writes into new memory. Writing over gate and up would save it, and would be wrong where backward runs again
(`retain_graph`) or somebody else holds them, which a kernel cannot see.
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

_NAME = "mlp fused"
_BLOCK = 2048


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
