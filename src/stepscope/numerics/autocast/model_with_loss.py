"""The model that an experiment looks at, with a batch and a loss: the toy network, a transformer, or a user's own.

A user's own is named `package.module:factory`. `factory` is called without arguments and returns

    (module, inputs, loss)    loss(output) is a scalar tensor
    (module, inputs)          where forward returns the loss itself
    module                    where forward returns the loss itself and takes nothing

inputs: one tensor, a tuple of positional arguments, or a dict of keyword arguments.

Shape legend: B batch, S positions, V vocabulary, I features in, O features out.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepscope.core.errors import DeviceError, InputError, choose, one_line
from stepscope.core.model_config import PRESETS, configure
from stepscope.core.workload import Workload
from stepscope.models.training_step import build_model
from stepscope.numerics.setting import check_room

TOY = "toy"
TOY_BATCH, TOY_IN, TOY_HIDDEN, TOY_OUT = 8, 20, 10, 5
SEQUENCES, TOKENS = 2, 8
"""The size of a transformer's batch. Dtypes do not depend on it."""

_STEP_BYTES = 4 + 4 + 2
"""Bytes per parameter that forward and backward hold at least: the parameter, its gradient and a 16-bit copy."""

_FORMS = "return (module, inputs, loss), or (module, inputs) or a module whose forward returns the loss"


@dataclass(frozen=True, kw_only=True)
class ModelWithLoss:
    """A module on its device, with inputs and a loss."""

    name: str
    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Any] | None = None
    """A function from forward's output to the loss. None: forward returns the loss."""

    @property
    def loss_name(self) -> str:
        """The name of the loss function, or that forward returns the loss."""
        if self.loss is None:
            return f"returned by {type(self.module).__name__}"
        return getattr(self.loss, "__name__", type(self.loss).__name__)

    def forward(self) -> tuple[Any, Tensor]:
        """The module's output, and the loss. Raises InputError where either fails, or the loss is none."""
        with _said_of(f"{self.name} fails in forward"):
            output = self.module(*self.args, **self.kwargs)
        if self.loss is None:
            return output, self._scalar(output, "forward")
        with _said_of(f"the loss of {self.name} fails"):
            loss = self.loss(output)
        return output, self._scalar(loss, "its loss function")

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients anew. Raises InputError where backward fails."""
        self.module.zero_grad(set_to_none=True)
        with _said_of(f"{self.name} fails in backward"):
            loss.backward()

    def _scalar(self, loss: object, whose: str) -> Tensor:
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            shape = f"a tensor {tuple(loss.shape)} of {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"{self.name} has no loss: {whose} returned {shape}, and no number; {_FORMS}")
        if not loss.requires_grad:
            raise InputError(f"{self.name} has a loss without gradients: no parameter that requires one is part of it")
        return loss


class ToyModel(nn.Module):
    """fc2(ln(relu(fc1(x)))): the smallest network with a product, a ReLU, a normalisation and a product.

    It takes (B, I) and gives logits (B, O).
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(TOY_IN, TOY_HIDDEN, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(TOY_HIDDEN)
        self.fc2 = nn.Linear(TOY_HIDDEN, TOY_OUT, bias=False)

    def forward(self, x_BI: Tensor) -> Tensor:
        return self.fc2(self.ln(self.relu(self.fc1(x_BI))))


def model_with_loss(model: str, own: str | None, device: torch.device, seed: int = 0) -> ModelWithLoss:
    """The toy network or a preset by name; or, where `own` names one, the user's."""
    torch.manual_seed(seed)
    if own is not None:
        return _own(own, device)
    if choose(model, (TOY, *PRESETS), "model") == TOY:
        targets_B = torch.randint(TOY_OUT, (TOY_BATCH,)).to(device)

        def cross_entropy(logits_BO: Tensor) -> Tensor:
            return F.cross_entropy(logits_BO, targets_B)

        toy = ToyModel().to(device)
        return ModelWithLoss(
            name=TOY, module=toy, args=(torch.randn(TOY_BATCH, TOY_IN).to(device),), loss=cross_entropy
        )
    return _transformer(model, device, seed)


def _transformer(preset: str, device: torch.device, seed: int) -> ModelWithLoss:
    workload = Workload(model=configure(preset), batch_size=SEQUENCES, seq_len=TOKENS, seed=seed)
    check_room(workload, device, bytes_per_parameter=_STEP_BYTES)
    tokens_BS, targets_BS = torch.randint(workload.model.vocabulary, (2, SEQUENCES, TOKENS)).to(device)

    def cross_entropy(logits_BSV: Tensor) -> Tensor:
        # Without the cast that the training step's loss has: here autocast chooses the dtype.
        return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())

    return ModelWithLoss(name=preset, module=build_model(workload, device), args=(tokens_BS,), loss=cross_entropy)


def _own(spelled: str, device: torch.device) -> ModelWithLoss:
    place, colon, attribute = spelled.partition(":")
    if not (place and colon and attribute):
        raise InputError(f"--module {spelled!r}: write package.module:factory")
    with _importing_from_here(), _said_of(f"--module {spelled} cannot be imported"):
        found: Any = importlib.import_module(place)
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise InputError(f"--module {spelled}: {place} has no {attribute!r}")
        found = getattr(found, name)
    if callable(found) and not isinstance(found, nn.Module):
        with _said_of(f"--module {spelled} fails"):
            found = found()
    module, inputs, loss = _parts(found, spelled)
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise InputError(
            f"--module {spelled} is compiled by torch.jit, which takes no hooks: give the module before that"
        )
    args, kwargs = _arguments(inputs)
    with _said_of(f"--module {spelled} cannot be moved to {device}"):
        module = module.to(device)
        return ModelWithLoss(
            name=spelled, module=module, args=_moved(args, device), kwargs=_moved(kwargs, device), loss=loss
        )


def _parts(found: object, spelled: str) -> tuple[nn.Module, Any, Callable[[Any], Any] | None]:
    parts = found if isinstance(found, tuple) else (found, ())
    if not (1 < len(parts) < 4 and isinstance(parts[0], nn.Module)):
        kinds = f"({', '.join(type(part).__name__ for part in parts)})" if parts is found else type(found).__name__
        raise InputError(f"--module {spelled} gave {kinds}, and no nn.Module: {_FORMS}")
    loss = parts[2] if len(parts) == 3 else None
    if loss is not None and not callable(loss):
        raise InputError(f"--module {spelled}: the loss is {type(loss).__name__}, which cannot be called; {_FORMS}")
    return parts[0], parts[1], loss


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, dict):
        return (), inputs
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}


def _moved(value: Any, device: torch.device) -> Any:
    """The value with every tensor in it on the device; containers stay what they are."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return type(value)(_moved(item, device) for item in value) if type(value) in (tuple, list) else value


@contextlib.contextmanager
def _importing_from_here() -> Iterator[None]:
    """While open, modules are also found in the current directory, as for `python -m`."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)


@contextlib.contextmanager
def _said_of(what: str) -> Iterator[None]:
    """While open, whatever a user's own code raises becomes an error of one line that begins with `what`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceError(f"{what}: {one_line(error)}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # not ours: it may raise anything
        raise InputError(f"{what}: {type(error).__name__}: {one_line(error)}") from error
