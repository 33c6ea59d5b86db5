"""Holds a module against its replacement, forward and backward, on random numbers, by the bounds of the gate."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stepscope.core.errors import InputError, named_line
from stepscope.training.parts.gate import compare, interpreter_slack

SEED = 20

CALL_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, InputError)
"""What a module raises that cannot be called as a trial calls it."""


Frozen = Literal["input", "weights"] | None
"""What of a call takes no gradients, as in a model that is trained in part."""


class Unlike(Exception):
    """A replacement that computes something else, with the largest difference, where there is a number."""

    def __init__(self, why: str, error: float = float("inf")) -> None:
        super().__init__(why)
        self.why, self.error = why, error


class Trial(Protocol):
    """One call of a module."""

    @property
    def device(self) -> torch.device: ...
    @property
    def lowest(self) -> torch.dtype:
        """The dtype of fewest bits that the call computes in."""
        ...

    @property
    def of_input(self) -> str:
        """The name of the input's gradient."""
        ...

    def run(self, dtype: torch.dtype | None = None, frozen: Frozen = None) -> dict[str, Tensor]:
        """The result and the gradients by name, those of a frozen tensor and those that the module forgets left out.
        With a dtype, of the same numbers in it, without autocast. Raises Unlike where the module cannot be called
        so."""
        ...


def hold(module: nn.Module, replacement: type[nn.Module], trials: Iterable[Trial]) -> None:
    """Raise Unlike where the replacement computes something else than the module. Random states stay as they were."""
    original, modes = type(module), {each: each.training for each in module.modules()}
    device = next(module.parameters()).device
    devices = [device] if device.type == "cuda" else []
    # What is compiled is held by its formula: to compile it for the shapes of a trial would take minutes.
    uncompiled = torch.compiler.set_stance("force_eager")
    with uncompiled, torch.random.fork_rng(devices), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a module says of a trial's dtypes is no fault of the user's step
        module.train()  # where a dropout would show
        try:
            for trial in trials:
                exact, plain, again = trial.run(torch.float64), trial.run(), trial.run()
                _check_not_random(plain, again)
                module.__class__ = replacement
                found: dict[Frozen, dict[str, Tensor]] = {
                    frozen: trial.run(frozen=frozen) for frozen in (None, "input", "weights")
                }
                module.__class__ = original
                for frozen, numbers in found.items():
                    _judge(exact, plain, numbers, trial, frozen)
        finally:
            module.__class__ = original
            for each, trains in modes.items():
                each.training = trains


def _check_not_random(plain: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> None:
    """Raise Unlike for a module, as one with dropout, whose numbers change: any difference from float64 would
    pass for its rounding."""
    if not all(torch.allclose(again[result], each, rtol=0.05, atol=0.05) for result, each in plain.items()):
        raise Unlike("their forward gives other numbers when it is called again")


def _judge(
    exact: Mapping[str, Tensor], plain: Mapping[str, Tensor], found: Mapping[str, Tensor], trial: Trial, frozen: Frozen
) -> None:  # fmt: skip
    """Raise Unlike where results, or the gradients that are due with this frozen, are missing or too far off."""
    gradients = {result for result in plain if result.startswith("gradient")}
    spared = {None: set[str](), "input": {trial.of_input}, "weights": gradients - {trial.of_input}}[frozen]
    where = f"where their {frozen} {'is' if frozen == 'input' else 'are'} frozen, " if frozen else ""
    due = {result: right for result, right in plain.items() if result not in spared}
    for result, right in due.items():
        if result not in found:
            raise Unlike(f"{where}{result} is missing")
        if found[result].dtype != right.dtype:
            raise Unlike(f"{where}{result} is {found[result].dtype}, not {right.dtype}")
    units = {result: torch.finfo(right.dtype).eps / 2 for result, right in due.items()}
    slack = interpreter_slack(trial.lowest, trial.device.type)
    errors, reason = compare({result: exact[result] for result in due}, due, found, units, slack)
    if reason:
        largest = max(error for error, _ in errors.values())
        raise Unlike(f"they compute something else: {where}{reason}; the largest difference is {largest:.2g}", largest)


def gradients_of(out: Tensor, leaves: Mapping[str, Tensor], upstream: Tensor | None = None) -> dict[str, Tensor]:
    """The gradients of a result by name, without those of frozen leaves and those that it does not depend on."""
    trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    if not out.requires_grad or not trained:
        return {}
    found = torch.autograd.grad(out, [*trained.values()], upstream, allow_unused=True)
    return {name: each for name, each in zip(trained, found, strict=True) if each is not None}


def autocast_or_not(asked: bool, device: torch.device) -> AbstractContextManager[object]:
    """Autocast to bf16 on the device, where it is asked for."""
    return torch.autocast(device.type, torch.bfloat16) if asked else nullcontext()


def ways_of(dtype: torch.dtype) -> tuple[tuple[torch.dtype, bool], ...]:
    """The dtypes of inputs, and whether autocast is on, with which weights of this dtype are tried."""
    return ((dtype, False), (dtype, True), (torch.bfloat16, True)) if dtype == torch.float32 else ((dtype, False),)


@dataclass(frozen=True)
class _OneTensor:
    """A call of a module with one tensor and random weights, and the gradient of its result."""

    module: nn.Module
    weights: Mapping[str, Tensor]
    x: Tensor
    gradient: Tensor
    autocast: bool

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def lowest(self) -> torch.dtype:
        return torch.bfloat16 if self.autocast else self.x.dtype

    @property
    def of_input(self) -> str:
        return "gradient of input"

    def run(self, dtype: torch.dtype | None = None, frozen: Frozen = None) -> dict[str, Tensor]:
        leaves = {
            name: tensor.to(dtype or tensor.dtype).detach().requires_grad_(frozen != kind)
            for kind, tensors in (("input", {"input": self.x}), ("weights", self.weights))
            for name, tensor in tensors.items()
        }
        x = leaves["input"]
        weights = {name: tensor for name, tensor in leaves.items() if name != "input"}
        try:
            with autocast_or_not(self.autocast and dtype is None, x.device):
                out = functional_call(self.module, weights, (x,))
            if not isinstance(out, Tensor) or out.shape != self.gradient.shape:
                raise Unlike("their forward does not give one tensor of its input's shape")
            gradients = gradients_of(out, leaves, self.gradient.to(out.dtype))
        except CALL_ERRORS as error:
            raise Unlike(f"they cannot be called with one tensor: {named_line(error)}") from error
        return {"result": out.detach()} | {f"gradient of {name}": each for name, each in gradients.items()}


def trials_of_one_tensor(module: nn.Module, epsilon: float) -> Iterator[Trial]:
    """Calls of a module with one tensor: odd shapes and layouts in its dtype, and under autocast where its weights are
    fp32. Some rows are so small that another epsilon would show."""
    first = next(module.parameters())
    generator = torch.Generator(device=first.device).manual_seed(SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=first.device)

    weights: dict[str, Tensor] = {}
    for name, value in module.named_parameters():
        moved = value.detach() + 0.1 * normal(*value.shape) if value.dim() < 2 else (
            normal(*value.shape) / value.shape[-1] ** 0.5
        )  # fmt: skip
        weights[name] = moved.to(value.dtype)
    width = first.shape[-1]
    for dtype, autocast in ways_of(first.dtype):
        for shape in ((2, 3, width), (5, width)):
            x = normal(*shape[:-1], width + 3)[..., 2:-1] if len(shape) == 2 else normal(*shape)
            x[-1] *= epsilon**0.5 or 1.0
            yield _OneTensor(module, weights, x.to(dtype), normal(*shape), autocast)
