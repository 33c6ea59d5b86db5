"""The parts in PyTorch's operators, whatever the dtype: what the gate judges by; and compiled, each by itself.

Each is compiled for each shape. Inside a step that is compiled anyway a formula is part of it. Where a mode follows
every operator, as in selective recomputation, the compiler steps aside, and the formula runs as it is written.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stepscope.kernels.operators import autocast_dtype, compile_for_each_shape


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

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    return turned(q), turned(k)


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of softmax(x weight^T) with the targets, of which -100 counts for nothing."""
    logits = F.linear(x, weight).flatten(0, -2)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten())


_compiled = functools.cache(compile_for_each_shape)


def _run(formula: Callable[..., Any], *arguments: Any) -> Any:
    as_written = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    return formula(*arguments) if as_written else _compiled(formula)(*arguments)


def compiled_rms_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """x + branch, or x where there is no branch, and its RMSNorm, in this dtype or in autocast's."""
    total, normal = _run(rms_norm, x, branch, weight, epsilon, dtype or autocast_dtype(x))
    return x if branch is None else total, normal


compiled_rotated = functools.partial(_run, rotated)
compiled_silu_product = functools.partial(_run, silu_product)
compiled_linear_cross_entropy = functools.partial(_run, linear_cross_entropy)
