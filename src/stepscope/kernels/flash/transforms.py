"""FlashAttention under torch.func: `grad`, `vjp`, `vmap` and combinations (`jacrev`, per-sample gradients).

These transform a Function only if it sets its context outside its forward. They transform an operator only if it has a
rule for `vmap`, which here folds the mapped dimension into the batch. Forward mode and second derivatives have no rule
and are refused with one line. Calls without a transform do not come here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stepscope.core.errors import InputError

_SUPPORTED = "attention flash supports torch.func's grad, vjp, vmap and jacrev"

_library = torch.library.Library("stepscope", "FRAGMENT")


def transformed(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int | None, bounds: Tensor | None
) -> Tensor:
    """`flash_attention` of (B, H, S, D) under an active transformation of torch.func."""
    out, _ = _Forward.apply(q, k, v, causal, scale, window, bounds)
    return out


class _Forward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int | None, bounds: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return torch.ops.stepscope.flash_attention_forward(q, k, v, causal, scale, window, bounds)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, *options, bounds = inputs
        ctx.save_for_backward(q, k, v, *output, bounds)
        ctx.options = options
        ctx.mark_non_differentiable(output[1])  # the logsumexp is not returned to the caller

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *saved, bounds = ctx.saved_tensors
        return *_Backward.apply(gradients[0], *saved, *ctx.options, bounds), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise InputError(f"{_SUPPORTED}, not forward mode (jvp, jacfwd, hessian): take attention reference")


class _Backward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.stepscope.flash_attention_backward(gradient, None, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        raise InputError(f"{_SUPPORTED}, but has no second derivative: take attention reference")


def _folded(size: int, in_dims: Sequence[int | None], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The tensors with the mapped dimension, of length `size`, folded into the first dimension, the batch."""
    folded: list[Tensor | None] = []
    for dim, tensor in zip(in_dims, tensors, strict=True):
        if tensor is None:
            folded.append(None)
            continue
        whole = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        folded.append(whole.flatten(0, 1))
    return folded


def _bounds_of_many(size: int, dim: int | None, bounds: Tensor | None) -> Tensor | None:
    """Bounds (2, B, S) of documents for the folded batch, as in `_folded`."""
    if bounds is None:
        return None
    whole = bounds.expand(size, *bounds.shape) if dim is None else bounds.movedim(dim, 0)
    return whole.transpose(0, 1).flatten(1, 2)


def _unfolded(size: int, outputs: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    return tuple(out.unflatten(0, (size, -1)) for out in outputs), (0,) * len(outputs)


def _last(in_dims: tuple[Any, ...], inputs: tuple[Any, ...], at: int) -> tuple[Any, Any]:
    """The dimension and the value of the input at this place; None for both where the call leaves it out."""
    return (in_dims[at], inputs[at]) if len(inputs) > at else (None, None)


def _forward_of_many(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
    tensors = _folded(info.batch_size, in_dims[:3], inputs[:3])
    bounds = _bounds_of_many(info.batch_size, *_last(in_dims, inputs, 6))
    return _unfolded(info.batch_size, torch.ops.stepscope.flash_attention_forward(*tensors, *inputs[3:6], bounds))


def _backward_of_many(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> Any:
    tensors = _folded(info.batch_size, in_dims[:7], inputs[:7])
    bounds = _bounds_of_many(info.batch_size, *_last(in_dims, inputs, 10))
    return _unfolded(info.batch_size, torch.ops.stepscope.flash_attention_backward(*tensors, *inputs[7:10], bounds))


torch.library.register_vmap("stepscope::flash_attention_forward", _forward_of_many, lib=_library)
torch.library.register_vmap("stepscope::flash_attention_backward", _backward_of_many, lib=_library)
