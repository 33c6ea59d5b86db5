"""Several projections of one input as one product, forward and backward.

    joint_projections(x, (W1, W2, ...), (b1, b2, ...))  ->  x W1^T + b1, x W2^T + b2, ...

With W the rows of all weights, one weight below the other, b all biases, if there are any, and dy the gradients of the
results side by side:

    y = x W^T + b        dx = dy W        dW = dy^T x        db = the sum of dy over rows

Apart, each projection is a product of its own, and backward adds up as many gradients of x, each rounded. Joint, small
products fill a GPU better, the sum over projections is made inside one product, and nothing is added afterwards.

W is no copy where the weights lie one behind the other in memory (`lie_together`); elsewhere they are put together
first. The gradients dy are no copy either where they lie side by side, as the fused SwiGLU leaves them; elsewhere they
are copied when they are there. A compiler is kept from doing this while it makes them: for each number of dy it would
compute all projections' gradients and choose one (RoPE's took it 15 times as long as its bytes need). The results are
views of y, so as long as one is kept, all are. Under autocast W is cast in forward and again in backward.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from stepscope.core.errors import InputError
from stepscope.kernels.operators import autocast_dtype, define, refuse_second_derivative, watched

_NAME = "projections joint"
OPERATOR = "stepscope::joint_projections"
"""The operator of forward's product."""


@torch.no_grad()
def lie_together(weights: Sequence[Tensor]) -> None:
    """Move parameters (N_i, M) of one dtype into one block of memory, in their order. They stay the same parameters."""
    block = torch.cat([weight.detach() for weight in weights])
    for weight, place in zip(weights, block.split([weight.shape[0] for weight in weights]), strict=True):
        weight.data = place


def _joined(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The rows of all weights, (sum N_i, M): a view where they lie together, else a copy."""
    first = weights[0]
    place, memory = first.data_ptr(), first.untyped_storage().data_ptr()
    for weight in weights:
        if weight.data_ptr() != place or weight.untyped_storage().data_ptr() != memory or not weight.is_contiguous():
            return torch.cat([weight.to(dtype) for weight in weights])
        place += weight.nbytes
    return first.as_strided((_rows_of(weights), first.shape[1]), (first.shape[1], 1)).to(dtype)


def _beside(gradients: Sequence[Tensor]) -> Tensor:
    """Gradients (R, N_i) as (R, sum N_i): a view where they are parts of the same rows, else a copy."""
    first = gradients[0]
    width = sum(gradient.shape[1] for gradient in gradients)
    place, memory = first.data_ptr(), first.untyped_storage().data_ptr()
    for gradient in gradients:
        alike = gradient.data_ptr() == place and gradient.untyped_storage().data_ptr() == memory
        if not alike or gradient.stride() != (width, 1):
            return torch.cat(list(gradients), dim=1)
        place += gradient.shape[1] * gradient.element_size()
    return first.as_strided((first.shape[0], width), (width, 1))


def _product(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    bias = torch.cat([bias.to(x.dtype) for bias in biases]) if biases else None
    return F.linear(x, _joined(weights, x.dtype), bias)


def _gradients(dys: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The gradients of x and of W, from rows."""
    dy = _beside(dys)
    return dy @ _joined(weights, dy.dtype), dy.t() @ x


def _rows_of(weights: Sequence[Tensor]) -> int:
    return sum(weight.shape[0] for weight in weights)


define(
    "joint_projections(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor",
    _product,
    lambda x, weights, _biases: x.new_empty(*x.shape[:-1], _rows_of(weights)),
)
define(
    "joint_projections_backward(Tensor[] dys, Tensor x, Tensor[] weights) -> (Tensor, Tensor)",
    _gradients,
    lambda _dys, x, weights: (x.new_empty(x.shape), x.new_empty(_rows_of(weights), x.shape[1])),
)


@register_flop_formula(torch.ops.stepscope.joint_projections)
def _flops(x_shape: Any, weight_shapes: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """FLOPs of the product."""
    rows = 1
    for size in x_shape[:-1]:
        rows *= size
    return 2 * rows * x_shape[-1] * sum(shape[0] for shape in weight_shapes)


@register_flop_formula(torch.ops.stepscope.joint_projections_backward)
def _backward_flops(_dys: Any, x_shape: Any, weight_shapes: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """FLOPs of both products of backward."""
    return 2 * _flops(x_shape, weight_shapes)


class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        run = torch.ops.stepscope.joint_projections if watched(x, *parameters) else _product
        ctx.save_for_backward(x, *weights)
        ctx.bias_dtypes = [bias.dtype for bias in biases]
        return run(x, list(weights), list(biases)).split([weight.shape[0] for weight in weights], dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(_NAME)
        x, *weights = ctx.saved_tensors
        dys = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        biases = [dy.sum(0).to(dtype) for dy, dtype in zip(dys, ctx.bias_dtypes, strict=False)]
        rows = x.reshape(-1, x.shape[-1])
        run = torch.ops.stepscope.joint_projections_backward if watched(x, *dys, *weights) else _gradients
        dx, dweight = run(dys, rows, weights)
        parts = dweight.to(weights[0].dtype).split([weight.shape[0] for weight in weights])
        return dx.view(x.shape), None, *parts, *biases


def joint_projections(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
    """x W_i^T + b_i for weights W_i (N_i, M) of one dtype and biases (N_i), none or one of each, as views of one tensor
    (..., sum N_i)."""
    weights = list(weights)
    if not weights or any(w.dim() != 2 or w.shape[1] != x.shape[-1] or w.dtype != weights[0].dtype for w in weights):
        shapes = ", ".join(f"{tuple(w.shape)} in {w.dtype}" for w in weights) or "none"
        raise InputError(f"{_NAME} takes x (..., M) and weights (N, M) of one dtype, not {tuple(x.shape)} and {shapes}")
    return _Joint.apply(x.to(autocast_dtype(x)), len(weights), *weights, *biases)
