"""Linear layers whose three products take operands of 8 bits: forward, and both of backward.

    y  = x w^T        x, w in e4m3
    dx = dy w         dy in e5m2 scaled by tensor, in e4m3 scaled by row; w in e4m3
    dw = dy^T x

Eight bits reach from 2^-9 to 448 (e4m3) or from 2^-16 to 57344 (e5m2), so each operand is divided by a scale that takes
its largest magnitude to the end of that range, and the product is multiplied by both (Micikevicius et al. 2022,
arXiv:2209.05433, section 3.1). By tensor one scale serves a whole operand; by row each row of the left operand and each
column of the right one has its own, so that an outlier costs its neighbours nothing. Scales are of the operand itself
and of this step: nothing is remembered. Sums are kept in more bits, and results are bf16.

Weights stay bf16 (models/master_weights.py). Embeddings, the head, norms and attention are not touched.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stepscope.core.precisions import check_scaled_layers, check_scaled_rows, takes_scaled
from stepscope.measure.scaled_mm import scaled_mm

By = Literal["tensor", "row"]

_SMALLEST = torch.finfo(torch.float32).tiny
"""A scale is at least this, so that an operand of zeros divides by no zero."""


def scale_products(parts: Sequence[nn.Module], by: By, dtype: str) -> None:
    """Let the linear layers in these modules multiply in 8 bits, in place; their parameters and names stay.

    Layers whose sizes are no multiples of 16 stay as they are. Raises InputError where no layer is left.
    """
    found = [module for part in parts for module in part.modules() if type(module) is nn.Linear]
    taken = [one for one in found if takes_scaled(one.in_features, one.out_features)]
    check_scaled_layers(len(taken), dtype)
    for module in taken:
        setattr(module, "__class__", ScaledLinear)  # noqa: B010  (types know no such change)
        setattr(module, "by", by)  # noqa: B010


def plain_products(model: nn.Module) -> None:
    """Undo `scale_products`: the linear layers multiply in the dtype of what they are given again."""
    for module in model.modules():
        if type(module) is ScaledLinear:
            setattr(module, "__class__", nn.Linear)  # noqa: B010  (types know no such change)


class ScaledLinear(nn.Linear):
    """x w^T + bias with operands of 8 bits, forward and backward."""

    by: By

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, self.in_features)
        check_scaled_rows(rows.shape[0])
        made: Tensor = _ScaledProducts.apply(rows.to(torch.bfloat16), self.weight.to(torch.bfloat16), self.by)  # pyright: ignore[reportAssignmentType]
        made = made.view(*input.shape[:-1], self.out_features)
        return made if self.bias is None else made + self.bias.to(made.dtype)


class _ScaledProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by: By) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by = by
        return scaled_product(x, weight.t(), by, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dy = gradients[0].contiguous()
        wide = torch.float8_e5m2 if ctx.by == "tensor" else torch.float8_e4m3fn
        dx = scaled_product(dy, weight, ctx.by, left=wide) if ctx.needs_input_grad[0] else None
        dw = scaled_product(dy.t(), x, ctx.by, left=wide) if ctx.needs_input_grad[1] else None
        return dx, dw, None


def scaled_product(
    a: Tensor, b: Tensor, by: By, *, left: torch.dtype = torch.float8_e4m3fn, fast: bool = False
) -> Tensor:  # fmt: skip
    """a (R, K) b (K, N) as bf16 (R, N), with operands cast to 8 bits: a to `left`, b to e4m3.

    by: `tensor`, or `row`: a scale for each row of a and each column of b. fast: whether Tensor Cores may add up in
    fewer bits than fp32 has, as suits activations and not gradients.
    """
    of_a, of_b = (1, 0) if by == "row" else (None, None)
    small_a, scale_a = _scaled(a, left, of_a)
    small_b, scale_b = _scaled(b, torch.float8_e4m3fn, of_b)
    # The product takes rows of a and columns of b that lie together.
    return scaled_mm(small_a.contiguous(), small_b.t().contiguous().t(), scale_a, scale_b, fast=fast)


def _scaled(tensor: Tensor, dtype: torch.dtype, over: int | None) -> tuple[Tensor, Tensor]:
    """The tensor in 8 bits, and what it is to be multiplied by: of all of it, or of the slices along `over`."""
    largest = tensor.abs().amax() if over is None else tensor.abs().amax(dim=over, keepdim=True)
    end = torch.finfo(dtype).max
    scale = (largest.float() / end).clamp(min=_SMALLEST)
    # One copy in fp32, divided in place: rounded, the largest may be just above the end, which casts to no number.
    return tensor.to(torch.float32, copy=True).div_(scale).clamp_(-end, end).to(dtype), scale
