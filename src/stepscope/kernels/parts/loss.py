"""The output head and the cross-entropy without the logits of the whole batch: cuBLAS's products and Triton's rows.

    linear_cross_entropy(x, weight, targets, ignore_index=-100, z_loss=0) -> mean loss        x (..., M), weight (V, M)

For a row of logits z = W x with target t, and L = log(sum(exp z)):

    loss = L - z_t + c L^2        dz = p (1 + 2 c L) - onehot(t)        p = exp(z - L)

with c the coefficient of the z-loss, which keeps L near zero (PaLM, Chowdhery et al. 2022). The mean is over rows whose
target is not `ignore_index`. With dz, dx = dz W and dW = dz^T x.

Rows are taken in chunks (`loss_chunk_rows` of core/parts.py). Of each chunk the logits are made in the dtype of the
products, as in the reference, and a kernel, one program for a row, turns them in place into dz, while it has the row's
loss. The same pass then makes dx and adds to dW, in fp32. So forward does backward's work, where gradients are needed,
and backward only multiplies by the gradient of the loss over the number of rows: in fp32, on the device, and without
waiting for either number. dz is not divided by that number before, so that fp16 does not lose it; in fp16 it is also
multiplied by 256 until the end, since GradScaler's factor comes too late for it.

A target that is neither a token nor `ignore_index` is an error, as it is to PyTorch: on a CPU an IndexError, on a GPU
an assertion in the kernel that reads it, for which no step waits. If all targets are ignored, the loss is NaN, as
PyTorch's is, and the gradients are zero.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from stepscope.core.errors import InputError
from stepscope.core.parts import loss_chunk_rows
from stepscope.kernels import operators
from stepscope.kernels.launching import check_place, interpreted, launch_at, power_of_two, tiles_of, warps_for, wide

_NAME = "loss fused"
_LARGEST_BLOCK = 8192
_SCALED_BLOCK = 2048
_ASSERTING: dict[str, Any] = {} if interpreted() else {"debug": True, "sanitize_overflow": False}
"""Options with which Triton compiles a kernel's own assertions, and none of its checks of integers."""
_FP16_FACTOR = 256.0
"""What gradients of logits are multiplied by in fp16: |dz| is at most 1, and p is often below fp16's least number."""


@triton.jit
def cross_entropy_rows(
    logits, targets, losses, stride, width, ignored, factor, z_loss,
    GRADIENT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    logits += row * stride
    known = (target >= 0) & (target < width)
    counts = target != ignored
    tl.device_assert(known | (target == ignored), "Target is out of bounds: it is neither a token nor ignore_index")
    # Read before any thread writes a gradient: the sums below have barriers.
    of_target = tl.load(logits + target, mask=known, other=float("nan")).to(WIDE)
    highest = tl.full([], float("-inf"), WIDE)
    total = tl.full([], 0.0, WIDE)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        values = tl.load(logits + column, mask=column < width, other=float("-inf")).to(WIDE)
        higher = tl.maximum(highest, tl.max(values, 0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(values - higher), 0)
        highest = higher
    # Near the highest logit differences are exact, where a sum with it would be rounded.
    rest = tl.log(total)
    logsumexp = highest + rest
    loss = (highest - of_target) + rest + z_loss * logsumexp * logsumexp
    tl.store(losses + row, tl.where(counts, loss, 0.0))
    if GRADIENT:
        of_all = tl.where(known, factor * (1.0 + 2.0 * z_loss * logsumexp), float("nan"))
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < width
            values = tl.load(logits + column, mask=inside, other=float("-inf")).to(WIDE)
            gradient = tl.exp(values - highest - rest) * of_all - tl.where(column == target, factor, 0.0)
            gradient = tl.where(counts, gradient, 0.0)
            tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def scaled_by(x, out, gradient, count, divisor, numbers, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """out = x * gradient / (max(count, 1) * divisor)"""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    factor = tl.load(gradient).to(WIDE) / (tl.maximum(tl.load(count), 1).to(WIDE) * divisor)
    values = tl.load(x + at, mask=inside, other=0.0).to(WIDE) * factor
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


def _forward(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, z_loss: float, of_x: bool, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The mean loss, the number of rows in it, and the sums' gradients of x and of the weight, where they are asked."""
    check_place(_NAME, x)
    rows, vocabulary = x.shape[0], weight.shape[0]
    summed = torch.promote_types(x.dtype, torch.float32)
    if not targets.is_cuda:
        operators.check_targets(targets, vocabulary, ignore_index)
    targets = targets.contiguous()
    losses = torch.zeros(rows, dtype=summed, device=x.device)
    dx = torch.empty(x.shape if of_x else (0,), dtype=x.dtype, device=x.device)
    dweight = torch.zeros(weight.shape if of_weight else (0,), dtype=summed, device=x.device)
    count = (targets != ignore_index).sum()
    if not rows:
        return losses.sum() / count, count, dx, dweight
    kernel = weight.to(x.dtype)
    chunk = loss_chunk_rows(rows, vocabulary, x.element_size())
    buffer = torch.empty(chunk, vocabulary, dtype=x.dtype, device=x.device)
    block, factor = min(power_of_two(vocabulary), _LARGEST_BLOCK), _FP16_FACTOR if x.dtype == torch.float16 else 1.0
    # Products write where they are told to: autocast leaves such calls alone.
    for first in range(0, rows, chunk):
        part, logits = x[first : first + chunk], buffer[: min(chunk, rows - first)]
        torch.mm(part, kernel.t(), out=logits)
        launch_at(
            x, cross_entropy_rows, (logits.shape[0],),
            logits, targets[first:], losses[first:], logits.stride(0), vocabulary, ignore_index, factor,
            z_loss, GRADIENT=of_x or of_weight, WIDE=wide(x.dtype), BLOCK=block, num_warps=warps_for(block),
            **_ASSERTING,
        )  # fmt: skip
        if of_x:
            torch.mm(logits, kernel, out=dx[first : first + chunk])
        if of_weight:
            _add_product(dweight, logits.t(), part)
    return losses.sum() / count, count, dx, dweight


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in the dtype of the total, whatever the factors'."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _fake_forward(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, z_loss: float, of_x: bool, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    summed = torch.promote_types(x.dtype, torch.float32)
    return (
        torch.empty((), dtype=summed, device=x.device),
        torch.empty((), dtype=torch.int64, device=x.device),
        torch.empty(x.shape if of_x else (0,), dtype=x.dtype, device=x.device),
        torch.empty(weight.shape if of_weight else (0,), dtype=summed, device=x.device),
    )


def _backward(gradient: Tensor, count: Tensor, summed: Tensor, divisor: float, dtype: torch.dtype) -> Tensor:
    """The gradient of the mean, from that of the sum over all rows times the divisor."""
    out = _fake_backward(gradient, count, summed, divisor, dtype)
    if summed.numel():
        numbers = summed.numel()
        launch_at(
            summed, scaled_by, (tiles_of(numbers, _SCALED_BLOCK),),
            summed, out, gradient, count, divisor, numbers,
            WIDE=wide(summed.dtype), BLOCK=_SCALED_BLOCK, num_warps=8,
        )  # fmt: skip
    return out


def _fake_backward(gradient: Tensor, count: Tensor, summed: Tensor, divisor: float, dtype: torch.dtype) -> Tensor:
    return torch.empty(summed.shape, dtype=dtype, device=summed.device)


operators.define(
    "linear_cross_entropy_forward(Tensor x, Tensor weight, Tensor targets, int ignore_index, float z_loss, bool of_x,"
    " bool of_weight) -> (Tensor, Tensor, Tensor, Tensor)",
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
    *_: Any, out_shape: Any = None, **__: Any,
) -> int:  # fmt: skip
    """FLOPs of the products: the logits, and each gradient that is asked for."""
    return 2 * x_shape[0] * weight_shape[0] * weight_shape[1] * (1 + of_x + of_weight)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, options: tuple[int, float], needs: tuple[bool, bool]
    ) -> Tensor:
        run = torch.ops.stepscope.linear_cross_entropy_forward if operators.watched(x, weight, targets) else _forward
        loss, count, dx, dweight = run(x, weight, targets, *options, *needs)
        ctx.save_for_backward(count, dx, dweight)
        ctx.needs, ctx.dtype = needs, weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        operators.refuse_second_derivative(_NAME)
        count, dx, dweight = ctx.saved_tensors
        run = torch.ops.stepscope.linear_cross_entropy_backward if operators.watched(gradients[0], dx) else _backward
        of_x, of_weight = ctx.needs
        divisor = _FP16_FACTOR if dx.dtype == torch.float16 else 1.0
        return (
            run(gradients[0], count, dx, divisor, dx.dtype) if of_x else None,
            run(gradients[0], count, dweight, divisor, ctx.dtype) if of_weight else None,
            None,
            None,
            None,
        )


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100, z_loss: float = 0.0
) -> Tensor:
    """The mean cross-entropy of softmax(x weight^T) with the targets, those of `ignore_index` left out."""
    operators.check_part("loss", x, weight)
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1] or targets.shape != x.shape[:-1]:
        raise InputError(
            f"{_NAME} takes x (..., M), a weight (V, M) and targets (...), not {tuple(x.shape)}, "
            f"{tuple(weight.shape)}, {tuple(targets.shape)}"
        )
    if targets.dtype not in (torch.int64, torch.int32) or weight.shape[0] == 0:
        raise InputError(f"{_NAME} takes targets of int64 or int32 and a vocabulary, not {targets.dtype}")
    x = x.to(operators.autocast_dtype(x))
    rows = x.reshape(-1, x.shape[-1])
    # Whether gradients are needed is decided here: inside the Function nothing is recorded.
    recorded = torch.is_grad_enabled()
    needs = recorded and rows.requires_grad, recorded and weight.requires_grad
    return _Loss.apply(rows, weight, targets.reshape(-1), (ignore_index, z_loss), needs)
