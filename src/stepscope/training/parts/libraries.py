"""The parts by the kernels of other libraries, where they are installed.

Each function imports what it calls, since no other may be needed: not by importlib, whose functions PyTorch's compiler
does not follow.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from stepscope.core.errors import InputError
from stepscope.core.parts import PARTS, Part
from stepscope.kernels.operators import autocast_dtype, check_targets
from stepscope.training.attention.inputs import DTYPES

# Liger-Kernel (github.com/linkedin/Liger-Kernel).
#
# Its norm has no residual sum: the sum is a kernel of PyTorch's before it. Its cross-entropy keeps the weight's
# gradient in the weight's dtype, and is told autocast's dtype by its input. It makes that gradient only where its input
# needs one, too (0.8.5), and reads beside its logits where a target is no token.


def _liger() -> Any:
    from liger_kernel.transformers import functional  # noqa: PLC0415  # pyright: ignore

    return functional


def liger_rms_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """x + branch, or x where there is no branch, and its RMSNorm, in this dtype where one is given."""
    x = x if branch is None else x + branch
    # In place it would write its gradient over the one that the residual stream still needs.
    y = _liger().liger_rms_norm(x, weight, epsilon, in_place=False)
    return x, y if dtype is None else y.to(dtype)


def liger_rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with each pair of halves turned by its position's angle."""
    length = q.shape[2]
    return _liger().liger_rope(q, k, cos[None, :length].to(q.dtype), sin[None, :length].to(q.dtype))


def liger_silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return _liger().liger_swiglu(gate, up)


def liger_linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of softmax(x weight^T) with the targets."""
    check_targets(targets, len(weight))
    dtype = autocast_dtype(x)
    x = x.to(dtype).flatten(0, -2)
    if weight.requires_grad and torch.is_grad_enabled() and not x.requires_grad:
        x = x.detach().requires_grad_()  # as below a frozen body; what comes of it goes nowhere
    return _liger().liger_fused_linear_cross_entropy(x, weight.to(dtype), targets.flatten())


# QuACK (github.com/Dao-AILab/quack), whose kernels are written in CuTe.
#
# It has no product of silu(gate) and up by itself, only inside its own matrix products. Its loss multiplies by its own
# products, where all sizes divide by 8: it tries several of them at the first call of a shape, which takes its time,
# and elsewhere it makes the logits.

_DIVISOR = 8
"""What the rows, d_model and the vocabulary of its own products divide by."""


def _check_quack(part: Part, x: Tensor, dtype: torch.dtype, width: int) -> None:
    """Raise InputError for a row of x in this dtype that its compiler would refuse, in many lines."""
    fault = None if torch.compiler.is_compiling() else _quack_fault(part, x.device.type, dtype, width)
    if fault is not None:
        raise InputError(f"{part} quack {fault}")


@functools.cache
def _quack_fault(part: Part, device_type: str, dtype: torch.dtype, width: int) -> str | None:
    return PARTS[part]["quack"].fault(device_type, DTYPES[dtype], width)


def quack_rms_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """x + branch, or x where there is no branch, and its RMSNorm, in this dtype where one is given."""
    dtype = dtype or autocast_dtype(x)
    _check_quack("norm", x, dtype, x.shape[-1])
    from quack.rmsnorm import rmsnorm  # noqa: PLC0415  # pyright: ignore

    if branch is None:
        return x, rmsnorm(x, weight, out_dtype=dtype, eps=epsilon)
    _check_quack("norm", x, branch.dtype, x.shape[-1])
    if x.requires_grad and not (branch.requires_grad or weight.requires_grad):
        # It keeps 1 / rms for backward only where one of the other two is trained (0.6).
        total = x + branch
        return total, rmsnorm(total, weight, out_dtype=dtype, eps=epsilon)
    y, total = rmsnorm(
        branch, weight, residual=x, out_dtype=dtype, residual_dtype=torch.promote_types(x.dtype, branch.dtype),
        eps=epsilon, prenorm=True,
    )  # fmt: skip
    return total, y


def quack_rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys (B, H, S, D) with each pair of halves turned by its position's angle."""
    _check_quack("rope", q, q.dtype, q.shape[-1])
    from quack.rotary import apply_rotary_emb  # noqa: PLC0415  # pyright: ignore

    tables = [table[: q.shape[2], : q.shape[3] // 2] for table in (cos, sin)]
    q, k = (apply_rotary_emb(each.transpose(1, 2), *tables).transpose(1, 2) for each in (q, k))
    return q, k


def quack_linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of softmax(x weight^T) with the targets."""
    _check_quack("loss", x, autocast_dtype(x), len(weight))
    check_targets(targets, len(weight))
    x, targets = x.flatten(0, -2), targets.flatten()
    from quack import linear_cross_entropy as losses  # noqa: PLC0415  # pyright: ignore

    if any(size % _DIVISOR for size in (*x.shape, len(weight))):
        return losses.linear_cross_entropy_func(x, weight, None, targets)
    return losses.chunked_linear_cross_entropy(x, weight, targets)
