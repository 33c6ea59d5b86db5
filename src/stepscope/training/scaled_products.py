"""Linear layers whose three products take operands of 8 bits: forward, and both of backward.

    y  = x w^T        x, w in e4m3
    dx = dy w         dy in e5m2 scaled by tensor, in e4m3 scaled by row; w in e4m3
    dw = dy^T x

Eight bits reach from 2^-9 to 448 (e4m3) or from 2^-16 to 57344 (e5m2), so each operand is divided by a scale that takes
its largest magnitude to the end of that range, and the product is multiplied by both (Micikevicius et al. 2022,
arXiv:2209.05433, section 3.1). By tensor one scale serves a whole operand; by row each row of the left operand and each
column of the right one has its own, so that an outlier costs its neighbours nothing. Scales are of the operand itself
and of this step: nothing is remembered. Sums are kept in more bits, and results are bf16.

On a GPU, what is scaled by tensor is cast by kernels in Triton (kernels/eight_bits.py), each operand in the two
layouts that the products take; elsewhere, and by row, PyTorch's operators cast. Both give the same bits. Kept for
backward are operands in 16 bits, and scales: an operand of 8 bits would be kept by each layer that takes it, where
query, key and value share one of 16.

Weights stay bf16 (training/optimizer.py). Embeddings, the head, norms and attention are not touched.
"""

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stepscope.core.attention_support import triton_fault
from stepscope.core.errors import InputError
from stepscope.core.precisions import check_scaled_layers, check_scaled_rows, takes_scaled
from stepscope.recording.precision import scaled_mm

By = Literal["tensor", "row"]

_SMALLEST = torch.finfo(torch.float32).tiny
"""A scale is at least this, so that an operand of zeros divides by no zero."""

_END_OF_E4M3, _END_OF_E5M2 = torch.finfo(torch.float8_e4m3fn).max, torch.finfo(torch.float8_e5m2).max

_kernels: ModuleType | None = None
"""kernels/eight_bits.py, once a layer needs it: it imports Triton, which takes its time."""


def scale_products(parts: Sequence[nn.Module], by: By, dtype: str) -> None:
    """Let the linear layers in these modules multiply in 8 bits, in place; their parameters and names stay.

    Layers whose sizes are no multiples of 16 stay as they are. Raises InputError where no layer is left.
    """
    linears = [module for part in parts for module in part.modules() if type(module) is nn.Linear]
    scaled = [one for one in linears if takes_scaled(one.in_features, one.out_features)]
    check_scaled_layers(len(scaled), dtype)
    for module in scaled:
        setattr(module, "__class__", ScaledLinear)  # noqa: B010  (types know no such change)
        setattr(module, "by", by)  # noqa: B010
        kernels = by == "tensor" and module.weight.is_cuda and triton_fault("cuda") is None
        setattr(module, "kernels", kernels and _load() is not None)  # noqa: B010


def cast_as_on_a_gpu(model: nn.Module) -> None:
    """Let scaled layers of fake tensors, which stand for those of a GPU, allocate what the kernels there do.

    Raises InputError where Triton, with which they are defined, is missing.
    """
    layers = [module for module in model.modules() if type(module) is ScaledLinear and module.by == "tensor"]
    if layers and triton_fault("cuda") is not None:
        raise InputError(
            "products of 8 bits cannot be run on fake tensors without Triton: install it, or use the formulas"
        )
    for layer in layers:
        layer.kernels = _load() is not None


def _load() -> ModuleType:
    global _kernels  # noqa: PLW0603  (a compiler follows a name of the module, and no cache)
    _kernels = importlib.import_module("stepscope.kernels.eight_bits")
    return _kernels


def plain_products(model: nn.Module) -> None:
    """Undo `scale_products`: the linear layers multiply in the dtype of what they are given again."""
    for module in model.modules():
        if type(module) is ScaledLinear:
            setattr(module, "__class__", nn.Linear)  # noqa: B010  (types know no such change)


class ScaledLinear(nn.Linear):
    """x w^T + bias with operands of 8 bits, forward and backward."""

    by: By
    kernels: bool
    """Whether the kernels cast, and not PyTorch's operators."""

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, self.in_features)
        check_scaled_rows(rows.shape[0])
        x, weight = rows.to(torch.bfloat16), self.weight.to(torch.bfloat16)
        product: Tensor = (
            _ProductsByKernels.apply(x, weight) if self.kernels else _ScaledProducts.apply(x, weight, self.by)
        )  # pyright: ignore[reportAssignmentType]
        product = product.view(*input.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias.to(product.dtype)


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


class _ProductsByKernels(torch.autograd.Function):
    """The product of a layer by kernels, with a scale for each tensor: x (R, K), weight (N, K) to (R, N) in bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        assert _kernels is not None
        scale_x, scale_w = _kernels.scale_of(x, _END_OF_E4M3), _kernels.scale_of(weight, _END_OF_E4M3)
        small_x = _kernels.cast_layouts(x, scale_x, torch.float8_e4m3fn)[0]
        small_w = _kernels.cast_layouts(weight, scale_w, torch.float8_e4m3fn)[0]
        ctx.save_for_backward(x, weight, scale_x, scale_w)
        return scaled_mm(small_x, small_w.t(), scale_x, scale_w, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        assert _kernels is not None
        x, weight, scale_x, scale_w = ctx.saved_tensors
        dy = gradients[0].contiguous()
        for_x, for_weight = ctx.needs_input_grad
        scale = _kernels.scale_of(dy, _END_OF_E5M2)
        along, across = _kernels.cast_layouts(dy, scale, torch.float8_e5m2, along=for_x, across=for_weight)
        dx = dw = None
        if for_x:
            dx = scaled_mm(along, _turned(weight, scale_w).t(), scale, scale_w)
        del along
        if for_weight:
            dw = scaled_mm(across, _turned(x, scale_x).t(), scale, scale_x)
        return dx, dw


def _turned(operand: Tensor, scale: Tensor) -> Tensor:
    """The transpose of an operand (R, K) in e4m3, row-major."""
    assert _kernels is not None
    return _kernels.cast_layouts(operand, scale, torch.float8_e4m3fn, along=False, across=True)[1]


def scaled_product(
    a: Tensor, b: Tensor, by: By, *, left: torch.dtype = torch.float8_e4m3fn, fast: bool = False
) -> Tensor:
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
    # Times the end's inverse, which is what a GPU makes of a division by a number.
    scale = (largest.float() * (1 / end)).clamp(min=_SMALLEST)
    # One copy in fp32, divided in place: rounded, the largest may be just above the end, which casts to no number.
    return tensor.to(torch.float32, copy=True).div_(scale).clamp_(-end, end).to(dtype), scale
