"""Gradients scaled down to a bound on their global norm, where the optimizer does not do it itself.

    n = sqrt(sum g^2) over all gradients, in fp32;  g <- g min(1, max_norm / (n + 1e-6))

(Pascanu, Mikolov and Bengio 2013, arXiv:1211.5063, algorithm 1.) It is torch.nn.utils.clip_grad_norm_, but for
gradients of 16 bits: there PyTorch rounds each tensor's norm to 16 bits, and here it is fp32. The host reads nothing,
so nothing waits for the device, and a CUDA graph can hold it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class NormOf(Protocol):
    """What finds the global norm of the gradients of these parameters: a number of this dtype, on their device."""

    def __call__(self, parameters: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Tensor: ...


@torch.no_grad()
def global_norm(parameters: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """The L2 norm of the gradients of these parameters. Of DTensors it is that of all ranks, which must call it."""
    norms: list[Tensor] = []
    for gradients in same_kind(gradients_of(parameters)):
        of_each = torch._foreach_norm(  # pyright: ignore[reportPrivateImportUsage]
            gradients, 2.0, dtype=dtype
        )
        norm: Any = torch.linalg.vector_norm(torch.stack(list(of_each)))
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if not norms:
        return torch.zeros((), dtype=dtype, device=parameters[0].device if parameters else None)
    return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]


@torch.no_grad()
def clip_gradients(
    parameters: Sequence[Tensor], max_norm: float, norm_of: NormOf = global_norm, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Scale the gradients of these parameters down to this norm; returns the norm that they had, on the device, in this
    dtype."""
    norm = norm_of(parameters, dtype)
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradients in same_kind(gradients_of(parameters)):
        # A factor of another dtype would be a launch for each tensor.
        torch._foreach_mul_(  # pyright: ignore[reportPrivateImportUsage]
            gradients, coefficient.to(gradients[0].dtype)
        )
    return norm


def updated_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters that an optimizer updates: those whose gradients count."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of those of the parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def same_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors in lists that one operator, or one message, can take: of one dtype, and of one mesh if DTensors."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        # Importing DTensor takes half a second, so its mesh tells one.
        kinds.setdefault((tensor.dtype, getattr(tensor, "device_mesh", None)), []).append(tensor)
    return list(kinds.values())
