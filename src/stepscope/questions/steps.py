"""The steps that a study of training runs: the textbook's, or those of a module of the user's own."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.core.errors import InputError
from stepscope.core.model_config import ModelConfig, configure
from stepscope.core.workloads import FactoryWorkload, TextbookWorkload, UserModel, Workload
from stepscope.training.making import make_step
from stepscope.training.training_step import AssembledStep
from stepscope.training.user_module.user_code import moved


def factory_workload(factory: str, arguments: Mapping[str, Any] | None, **choices: Any) -> FactoryWorkload:
    """The workload of a module that a factory, or a configuration, makes of these arguments."""
    return FactoryWorkload(factory=factory, arguments=dict(arguments or {}), model=UserModel(name=""), **choices)


def one_step_of(
    factory: str | None, arguments: Mapping[str, Any] | None, *,
    model: ModelConfig | None, batch_size: int, seq_len: int, seed: int,
) -> Workload:  # fmt: skip
    """The workload of one forward and backward: of a module of the user's own, or of the textbook's in these sizes."""
    if factory is not None:
        return factory_workload(factory, arguments, phase="forward-backward", seed=seed)
    sizes = model or configure("tiny")
    return TextbookWorkload(model=sizes, batch_size=batch_size, seq_len=seq_len, phase="forward-backward", seed=seed)


def step_of(workload: Workload, device: torch.device) -> AssembledStep:
    """The workload's step. Raises InputError for a factory that gives a step in place of a module."""
    step, _ = make_step(workload, device)
    if not isinstance(step, AssembledStep):
        raise InputError(f"--module {workload.factory} gave a step of its own: give its module and a batch")
    return step


def in_fp32(step: AssembledStep) -> None:
    """Turn a step of bf16 into fp32. Parameters and inputs keep the values to which bf16 has rounded them."""
    step.model.float()
    step.batches = [moved(batch, step.device, torch.float32, "the step") for batch in step.batches]


def check_loss(loss: float, remedy: str = "give another batch") -> None:
    """Raise InputError where the loss of a step is not finite, since its gradients then mean nothing."""
    if not math.isfinite(loss):
        raise InputError(f"the loss of this step is {loss}, which is not finite: {remedy}")


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that require a gradient, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def folded(module: str) -> str:
    """The path of a module of the user's own, with one name for those that differ in a number alone."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module) or "the model itself"


def layers_folded(model: nn.Module) -> Callable[[str], str]:
    """A function from a module's path to one name for it and its like: modules of one class whose paths differ in a
    number alone. Of a Sequential, whose modules are of several classes, each keeps its number."""
    alike: dict[str, list[nn.Module]] = {}
    for path, module in model.named_modules():
        alike.setdefault(folded(path), []).append(module)

    def name(path: str) -> str:
        like = alike.get(folded(path), [])
        if not path or _are_layers(like):
            return folded(path)
        parts = path.split(".")
        for i, part in enumerate(parts):
            if part.isdigit() and _are_layers([*model.get_submodule(".".join(path.split(".")[:i])).children()]):
                parts[i] = "*"
        return ".".join(parts)

    return name


def _are_layers(modules: Sequence[nn.Module]) -> bool:
    return len(modules) > 1 and len({type(module) for module in modules}) == 1


def elements_of(step: AssembledStep) -> tuple[int, int]:
    """How many parameters the model has, and how many elements the input that it reads first."""
    tensors = [tensor for _, tensor in step.named_tensors(step.batch)]
    return sum(each.numel() for each in step.model.parameters()), sum(each.numel() for each in tensors[:1])
