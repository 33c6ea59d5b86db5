"""The parts in PyTorch's operators, whatever the dtype: what a compiler is given, and what the gate judges by."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """x + branch, or x without a branch, and x / sqrt(mean(x^2) + epsilon) * weight of it, in this dtype or in x's."""
    x = x if branch is None else x + branch
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normal = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    return x, (normal * weight).to(dtype or x.dtype)


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys (B, H, S, D) with each pair of halves turned by its position's angle."""
    cos, sin = cos[: q.shape[2]].to(q.dtype), sin[: q.shape[2]].to(q.dtype)
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of softmax(x weight^T) with the targets, of which -100 counts for nothing."""
    logits = F.linear(x, weight).flatten(0, -2)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten())
