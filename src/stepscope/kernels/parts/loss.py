"""The output head and the cross-entropy without the logits of the whole batch: cuBLAS's products and Triton's rows.

    linear_cross_entropy(x, weight, targets, ignore_index=-100, z_loss=0) -> mean loss        x (..., M), weight (V, M)

For a row of logits z = W x with target t, and L = log(sum(exp z)):

    loss = L - z_t + c L^2        dz = p (1 + 2 c L) - onehot(t)        p = exp(z - L)

with c the coefficient of the z-loss, which keeps L near zero (PaLM, Chowdhery et al. 2022). The mean is over rows whose
target is not `ignore_index`. With dz, dx = dz W and dW = dz^T x.

Rows are taken in chunks (`loss_chunk_rows` of core/parts.py). Of each chunk the logits are made in the dtype of the
products, as in the reference, and a kernel, one program for a row, turns them in place into dz over the number of rows,
while it has the row's loss. The same pass then makes dx and adds to dW, in fp32; where there is one chunk, and x and W
are bf16, dW is bf16, as the reference's. So forward does backward's work, where gradients are needed, and backward only
multiplies by the gradient of the loss: on the device, without waiting for either number. In fp16, whose least number
is above such a dz, it is backward that divides, and dz is multiplied by 256 until then, since GradScaler's factor comes
too late for it.

A vocabulary that 16 does not divide, as GPT-2's of 50,257, gets up to 63 rows of zeros more, in a copy of W (V M
numbers), in the logits and in dW: where rows begin at no multiple of 16 bytes, products of bf16 take slow kernels.

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
from stepscope.core.parts import loss_chunk_rows, loss_columns
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
    logits, targets, losses, count, stride, width, filled, ignored, factor, z_loss,
    GRADIENT: tl.constexpr, DIVIDED: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
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
    # Masks end where rows do, at a multiple of 16: only so are loads and stores wide. Columns from the width on count
    # as -inf, and have no gradient.
    for start in range(0, filled, BLOCK):
        column = start + tl.arange(0, BLOCK)
        values = tl.load(logits + column, mask=column < filled, other=float("-inf")).to(WIDE)
        values = tl.where(column < width, values, float("-inf"))
        higher = tl.maximum(highest, tl.max(values, 0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(values - higher), 0)
        highest = higher
    # Near the highest logit differences are exact, where a sum with it would be rounded.
    rest = tl.log(total)
    logsumexp = highest + rest
    loss = (highest - of_target) + rest + z_loss * logsumexp * logsumexp
    tl.store(losses + row, tl.where(counts, loss, 0.0))
    if GRADIENT:
        if DIVIDED:
            factor = factor / tl.maximum(tl.load(count), 1).to(WIDE)
        of_all = tl.where(known, factor * (1.0 + 2.0 * z_loss * logsumexp), float("nan"))
        for start in range(0, filled, BLOCK):
            column = start + tl.arange(0, BLOCK)
            values = tl.load(logits + column, mask=column < filled, other=float("-inf")).to(WIDE)
            gradient = tl.exp(values - highest - rest) * of_all - tl.where(column == target, factor, 0.0)
            gradient = tl.where(counts & (column < width), gradient, 0.0)
            tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=column < filled)


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


def _forward(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, z_loss: float, of_x: bool, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The mean loss, the number of rows in it, and the gradients of x and of the weight, where they are asked: of the
    mean, and in fp16 of the sum."""
    check_place(_NAME, x)
    rows, vocabulary = x.shape[0], weight.shape[0]
    chunk = loss_chunk_rows(rows, vocabulary, x.element_size())
    loss_dtype, dweight_dtype = _summed(x), _dweight_dtype(x, weight)
    if not targets.is_cuda:
        operators.check_targets(targets, vocabulary, ignore_index)
    targets = targets.contiguous()
    losses = torch.zeros(rows, dtype=loss_dtype, device=x.device)
    dx = torch.empty(x.shape if of_x else (0,), dtype=x.dtype, device=x.device)
    count = (targets != ignore_index).sum()
    if not rows:
        dweight = torch.zeros(weight.shape if of_weight else (0,), dtype=dweight_dtype, device=x.device)
        return losses.sum() / count, count, dx, dweight
    kernel = _aligned(weight, x.dtype)
    filled = kernel.shape[0]
    make = torch.empty if chunk >= rows else torch.zeros
    dweight = make(kernel.shape if of_weight else (0,), dtype=dweight_dtype, device=x.device)
    buffer = torch.empty(chunk, filled, dtype=x.dtype, device=x.device)
    block, fp16 = min(power_of_two(filled), _LARGEST_BLOCK), x.dtype == torch.float16
    # Products write where they are told to: autocast leaves such calls alone.
    for first in range(0, rows, chunk):
        part, logits = x[first : first + chunk], buffer[: min(chunk, rows - first)]
        torch.mm(part, kernel.t(), out=logits)
        launch_at(
            x, cross_entropy_rows, (logits.shape[0],),
            logits, targets[first:], losses[first:], count, filled, vocabulary, filled, ignore_index,
            _FP16_FACTOR if fp16 else 1.0, z_loss, GRADIENT=of_x or of_weight, DIVIDED=not fp16,
            WIDE=wide(x.dtype), BLOCK=block, num_warps=warps_for(block), **_ASSERTING,
        )  # fmt: skip
        if of_x:
            torch.mm(logits, kernel, out=dx[first : first + chunk])
        if of_weight:
            _add_product(dweight, logits.t(), part, first=chunk >= rows)
    return losses.sum() / count, count, dx, dweight[:vocabulary]


def _aligned(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight (V, M) in a dtype, with rows of zeros below it where rows of logits have more columns."""
    vocabulary, width = weight.shape
    columns = loss_columns(vocabulary)
    if columns == vocabulary:
        return weight.to(dtype)
    longer = weight.new_empty(columns, width, dtype=dtype)
    longer[:vocabulary].copy_(weight)
    longer[vocabulary:].zero_()
    return longer


def _summed(x: Tensor) -> torch.dtype:
    """The dtype in which sums over rows are made."""
    return torch.promote_types(x.dtype, torch.float32)


def _dweight_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of the weight's gradient until backward: its own where one product in bf16 makes it."""
    one = x.shape[0] <= loss_chunk_rows(x.shape[0], weight.shape[0], x.element_size())
    return x.dtype if one and x.dtype == weight.dtype == torch.bfloat16 else _summed(x)


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """total += left @ right, in the dtype of the total, whatever the factors'; first: the total holds nothing yet."""
    if first and left.dtype == total.dtype:
        torch.mm(left, right, out=total)
        return
    if first:
        total.zero_()
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _fake_forward(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, z_loss: float, of_x: bool, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty((), dtype=_summed(x), device=x.device),
        torch.empty((), dtype=torch.int64, device=x.device),
        torch.empty(x.shape if of_x else (0,), dtype=x.dtype, device=x.device),
        torch.empty(weight.shape if of_weight else (0,), dtype=_dweight_dtype(x, weight), device=x.device),
    )


def _backward(gradient: Tensor, count: Tensor, summed: Tensor, divisor: float, dtype: torch.dtype) -> Tensor:
    """The gradient of the loss, from what forward made; divisor: 0 where that is divided already."""
    out = _fake_backward(gradient, count, summed, divisor, dtype)
    if summed.numel():
        numbers = summed.numel()
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
        fp16, run = dx.dtype == torch.float16, _backward
        if torch.compiler.is_compiling() and not fp16:
            run = _as_expression  # which a compiler computes with what comes after it
        elif operators.watched(gradients[0], dx):
            run = torch.ops.stepscope.linear_cross_entropy_backward
        of_x, of_weight = ctx.needs
        divisor = _FP16_FACTOR if fp16 else 0.0
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
