"""One forward, loss and backward under autocast, as hooks saw it, and how often parameters were cast.

Hooks on modules note what goes in and comes out, hooks on their outputs what gradient comes back. Below autocast its
casts are operators like any other, and are counted there.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.questions.autocast.model_with_loss import ModelWithLoss
from stepscope.questions.autocast.operators import Casts, autocast_region, dtype_name


@dataclass
class Seen:
    """What hooks saw of one module: its calls, and dtypes in the order in which they first came."""

    calls: int = 0
    inputs: dict[str, None] = field(default_factory=dict)
    outputs: dict[str, None] = field(default_factory=dict)
    gradients: dict[str, None] = field(default_factory=dict)
    """Dtypes of the gradients of the module's outputs."""


@dataclass(frozen=True, kw_only=True)
class AutocastRecord:
    """The dtypes and casts of one forward, loss and backward under autocast."""

    seen: Mapping[int, Seen]
    """What hooks saw, by id of the module."""
    inside: Mapping[str, str]
    """The dtype of each parameter while autocast was on."""
    gradients: Mapping[str, str | None]
    output: tuple[str, ...]
    loss: str
    loss_value: float
    casts: Casts


def record(model: ModelWithLoss, device: torch.device, low: torch.dtype) -> AutocastRecord:
    """Run forward, loss and backward once with hooks on every module."""
    module = model.module
    seen = {id(part): Seen() for part in module.modules()}

    def enter(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[id(part)].inputs |= {dtype_name(tensor.dtype): None for tensor in _tensors((args, kwargs))}

    def leave(part: nn.Module, _: object, output: Any) -> None:
        of = seen[id(part)]
        of.calls += 1
        for tensor in _tensors(output):
            of.outputs[dtype_name(tensor.dtype)] = None
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: of.gradients.update({dtype_name(gradient.dtype): None}))

    handles = [part.register_forward_pre_hook(enter, with_kwargs=True) for part in module.modules()]
    handles += [part.register_forward_hook(leave) for part in module.modules()]
    try:
        with autocast_region(device.type, low), Casts(module.named_parameters()) as casts:
            output, loss = model.forward()
            inside = {name: dtype_name(parameter.dtype) for name, parameter in module.named_parameters()}
        model.backward(loss)
    finally:
        for handle in handles:
            handle.remove()
    gradients = {n: None if p.grad is None else dtype_name(p.grad.dtype) for n, p in module.named_parameters()}
    return AutocastRecord(
        seen=seen,
        inside=inside,
        gradients=gradients,
        output=tuple(dict.fromkeys(dtype_name(tensor.dtype) for tensor in _tensors(output))),
        loss=dtype_name(loss.dtype),
        loss_value=loss.item(),
        casts=casts,
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def record_repeats(model: ModelWithLoss, device: torch.device, low: torch.dtype) -> dict[str, Casts]:
    """Casts of two forwards: in one region, in one that keeps no copies, and in a region each."""
    named = list(model.module.named_parameters())
    counted = {}
    for what, cache in (("two forwards in one region", True), ("the same, cache off", False)):
        with autocast_region(device.type, low, cache=cache), Casts(named) as counted[what]:
            model.forward()
            model.forward()
    with Casts(named) as counted["two forwards, a region each"]:
        for _ in range(2):
            with autocast_region(device.type, low):
                model.forward()
    return counted
