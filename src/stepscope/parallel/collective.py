"""The few things that the lessons ask of torch.distributed, over tensors that are there already."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


@torch.no_grad()
def broadcast_from_first(module: nn.Module) -> None:
    """Give every rank the first one's parameters and buffers: ranks that begin apart stay apart."""
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.data, 0)


def average(tensor: Tensor) -> None:
    """Replace a tensor by its mean over the ranks: an all-reduce, then a division, as gloo has no mean of its own."""
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


def trained(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that get a gradient, each once."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def with_gradient(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients of these parameters, zero where a step had no use for one: another rank's may have had."""
    gradients: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    return gradients


def same_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors by their dtype: only those of one can be one message."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    return list(kinds.values())


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """A copy of the tensors' elements, one after the other."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten_into(flat_tensor: Tensor, tensors: Iterable[Tensor]) -> None:
    """Copy the elements of `flat` back."""
    begin = 0
    for tensor in tensors:
        tensor.copy_(flat_tensor[begin : begin + tensor.numel()].view_as(tensor))
        begin += tensor.numel()
