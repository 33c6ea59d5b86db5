"""The parts by Liger-Kernel (github.com/linkedin/Liger-Kernel), where it is installed.

Its norm has no residual sum: the sum is a kernel of PyTorch's before it. Its cross-entropy keeps the weight's gradient
in the weight's dtype, and is told autocast's dtype by its input. It makes that gradient only where its input needs one,
too (0.8.5), and reads beside its logits where a target is no token.
"""

from typing import Any

import torch
from torch import Tensor

from stepscope.kernels.operators import autocast_dtype, check_targets


def _functional() -> Any:
    # Not by importlib, whose functions PyTorch's compiler does not follow.
    from liger_kernel.transformers import functional  # noqa: PLC0415  # pyright: ignore

    return functional


def rms_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """x + branch, or x where there is no branch, and its RMSNorm, in this dtype where one is given."""
    x = x if branch is None else x + branch
    # In place it would write its gradient over the one that the residual stream still needs.
    y = _functional().liger_rms_norm(x, weight, epsilon, in_place=False)
    return x, y if dtype is None else y.to(dtype)


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with each pair of halves turned by its position's angle."""
    length = q.shape[2]
    return _functional().liger_rope(q, k, cos[None, :length].to(q.dtype), sin[None, :length].to(q.dtype))


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return _functional().liger_swiglu(gate, up)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of softmax(x weight^T) with the targets."""
    check_targets(targets, len(weight))
    dtype = autocast_dtype(x)
    x = x.to(dtype).flatten(0, -2)
    if weight.requires_grad and torch.is_grad_enabled() and not x.requires_grad:
        x = x.detach().requires_grad_()  # as below a frozen body; what comes of it goes nowhere
    return _functional().liger_fused_linear_cross_entropy(x, weight.to(dtype), targets.flatten())
