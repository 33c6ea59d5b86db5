"""The parts by PyTorch's compiler: their formulas (formulas.py), each compiled by itself for each shape.

Inside a step that is compiled anyway they are part of it. Where a mode follows every operator, as in selective
recomputation, the compiler steps aside, and the formula runs as it is written.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stepscope.kernels.operators import autocast_dtype
from stepscope.training.attention.compiled import compile_for_each_shape
from stepscope.training.parts import formulas


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return compile_for_each_shape(function)


def _run(function: Callable[..., Any], *arguments: Any) -> Any:
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return function(*arguments)
    return _compiled(function)(*arguments)


def rms_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """x + branch, or x where there is no branch, and its RMSNorm, in this dtype or in autocast's."""
    total, normal = _run(formulas.rms_norm, x, branch, weight, epsilon, dtype or autocast_dtype(x))
    return x if branch is None else total, normal


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with each pair of halves turned by its position's angle."""
    return _run(formulas.rotated, q, k, cos, sin)


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return _run(formulas.silu_product, gate, up)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of softmax(x weight^T) with the targets; it makes the logits."""
    return _run(formulas.linear_cross_entropy, x, weight, targets)
