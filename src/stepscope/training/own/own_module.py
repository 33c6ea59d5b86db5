"""Understands what a user's factory returned: a module with its batches, its loss and perhaps its optimizer; or a step.

A factory returns

    (module, batch)                      forward returns the loss, alone or inside what it returns
    (module, batch, loss)                loss(output), or loss(output, batch)
    (module, batch, loss, optimizer)     the loss may be None
    module                               forward takes nothing
    an object with the attributes        module, batch or batches, loss, optimizer
    an object with the attribute phases  a step of the user's own (`driven_step.py`)

A batch is a tensor, a tuple of positional arguments or a dict of keyword arguments; a list, an iterator or a DataLoader
gives several, which the steps rotate through.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stepscope.core.errors import InputError
from stepscope.core.parts import REFERENCE, Kernels, Part, PartFound
from stepscope.training.own.batches import Call, batches_of, moved
from stepscope.training.own.user_code import said_of
from stepscope.training.parts.replaced import replace_in

FORMS = "return (module, inputs, loss), or (module, inputs) or a module whose forward returns the loss"

_TARGETS = ("target", "targets", "label", "labels", "y", "y_true")
"""Names of a loss function's second parameter. It is then given the part of the batch that forward does not take."""

_LossTakes = Literal["output", "batch", "rest"]


@dataclass(frozen=True, kw_only=True)
class OwnModule:
    """A user's module with its batches and its loss, still where the factory left them or moved to a device."""

    name: str
    """What names it in messages: `--module mine:make`."""
    module: nn.Module
    batches: list[Any]
    loss: Callable[..., Any] | None = None
    """A function from forward's output to the loss. If it is None, forward returns the loss."""
    optimizer: torch.optim.Optimizer | None = None
    found: tuple[PartFound, ...] = ()
    """Which modules other kernels compute, and which were left, where any were asked for."""

    @functools.cached_property
    def call(self) -> Call:
        """How forward is called with a batch."""
        return Call(self.module, for_loss_too=self._loss_takes != "output")

    @functools.cached_property
    def _loss_takes(self) -> _LossTakes:
        return _taken_by(self.loss)

    @property
    def loss_name(self) -> str:
        """The name of the loss function, or words that say that forward returns the loss."""
        if self.loss is None:
            return f"returned by {type(self.module).__name__}"
        return getattr(self.loss, "__name__", type(self.loss).__name__)

    def loss_of(self, output: Any, batch: Any) -> Tensor:
        """The loss of an output. Raises InputError where it is no number."""
        if self.loss is None:
            return _number(output, self.name, "forward")
        others = {"output": (), "batch": (batch,), "rest": (self.call.rest(batch),)}[self._loss_takes]
        return _number(self.loss(output, *others), self.name, "its loss function")

    def on(self, device: torch.device, dtype: torch.dtype | None = None) -> "OwnModule":
        """The module and its batches on a device. With a dtype, parameters, buffers and inputs are converted to it."""
        with said_of(f"{self.name} cannot be moved to {device}"):
            # Fake parameters cannot be moved at all, not even to the device that they are on.
            there = dtype is None and _devices(self.module) <= {device}
            module = self.module if there else self.module.to(device, dtype)
        batches = [moved(batch, device, dtype, self.name) for batch in self.batches]
        return dataclasses.replace(self, module=module, batches=batches)

    def computed_by(self, chosen: Mapping[Part, Kernels]) -> "OwnModule":
        """The module, parts of which these kernels compute, where its modules compute the same; it is changed in place.

        Raises InputError, one line, where they replace nothing.
        """
        if all(name == REFERENCE for name in chosen.values()):
            return self
        replaced = replace_in(self.module, chosen)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what the trials took is no memory of the step
        if not replaced.replaced:
            raise InputError(f"{self.name} stays as it is: {replaced}; leave out --kernels, --norm, --mlp and --loss")
        return dataclasses.replace(self, found=replaced.found)


def understand(found: Any, name: str) -> OwnModule:
    """The object that the factory returned, as a module with its batches. Raises InputError where it is none."""
    parts = _parts(found, name)
    module, batch, loss, optimizer = parts.module, parts.batch, parts.loss, parts.optimizer
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise InputError(f"{name} is compiled by torch.jit, which takes no hooks: give the module before that")
    lazy = [path for path, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise InputError(f"{name} has parameters without a shape yet, as {lazy[0]}: call it with a batch before")
    if loss is not None and not callable(loss):
        raise InputError(f"{name}: the loss is {type(loss).__name__}, which cannot be called; {FORMS}")
    if optimizer is not None:
        _check_optimizer(optimizer, module, name)
    return OwnModule(name=name, module=module, batches=batches_of(batch, name), loss=loss, optimizer=optimizer)


def check_gradient(loss: Tensor, name: str) -> None:
    """Raise InputError where no gradient can flow from the loss to a parameter."""
    if not loss.requires_grad:
        raise InputError(f"{name} has a loss without gradients: no parameter that requires one is part of it")


def _devices(module: nn.Module) -> set[torch.device]:
    return {tensor.device for tensor in (*module.parameters(), *module.buffers())}


def _parts(found: Any, name: str) -> SimpleNamespace:
    if isinstance(found, nn.Module):
        return SimpleNamespace(module=found, batch=(), loss=None, optimizer=None)
    given: dict[str, Any] = {"batch": (), "loss": None, "optimizer": None}
    if isinstance(found, tuple) and not hasattr(found, "module"):
        if 1 < len(found) < 5:
            given |= dict(zip(("module", "batch", "loss", "optimizer"), found, strict=False))
    else:
        read = found.get if isinstance(found, Mapping) else lambda key, otherwise: getattr(found, key, otherwise)
        given = {key: read(key, value) for key, value in given.items()}
        given |= {"module": read("module", read("model", None)), "batch": read("batches", given["batch"])}
    if not isinstance(given.get("module"), nn.Module):
        kinds = f"({', '.join(type(part).__name__ for part in found)})" if isinstance(found, tuple) else ""
        raise InputError(f"{name} gave {kinds or type(found).__name__}, and no nn.Module: {FORMS}")
    return SimpleNamespace(**given)


def _check_optimizer(optimizer: object, module: nn.Module, name: str) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"{name}: the optimizer is {type(optimizer).__name__}, and no torch.optim.Optimizer")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held.isdisjoint(id(parameter) for parameter in module.parameters()):
        raise InputError(f"{name}: its optimizer holds none of the module's parameters")


def _taken_by(loss: Callable[..., Any] | None) -> _LossTakes:
    """The arguments that a loss function takes beside the output, as its parameters say."""
    if loss is None:
        return "output"
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):
        return "output"
    by_place = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(by_place) < 2 or by_place[1].default is not inspect.Parameter.empty:
        return "output"
    return "rest" if by_place[1].name in _TARGETS else "batch"


def _number(value: Any, name: str, whose: str) -> Tensor:
    """The loss in a returned value: the value itself, its attribute or key `loss`, or the only number of a tuple."""
    loss: Any = value
    if isinstance(value, Mapping):
        loss = value.get("loss", value)
    elif not isinstance(value, Tensor):
        loss = getattr(value, "loss", value)
    if loss is value and isinstance(value, tuple):
        numbers = [item for item in value if _is_number(item)]
        loss = numbers[0] if len(numbers) == 1 else value
    if _is_number(loss):
        return loss
    inside = "" if loss is value else f"{type(value).__name__} whose loss is "
    shape = f"a tensor {tuple(loss.shape)} of {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
    raise InputError(
        f"{name} has no loss: {whose} returned {inside}{shape}, and no floating tensor of one number; {FORMS}"
    )


def _is_number(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
