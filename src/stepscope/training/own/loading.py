"""Makes a user's own step, ready to be measured, from the name of its factory or of its model's configuration."""

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from stepscope.core.errors import InputError
from stepscope.core.own_arguments import is_configuration
from stepscope.core.own_workload import OwnModel, OwnWorkload
from stepscope.training.own.batches import input_names, named_tensors
from stepscope.training.own.factory import call_factory, find_factory
from stepscope.training.own.hugging_face import make_from_config
from stepscope.training.own.identity import describe_own
from stepscope.training.own.own_module import OwnModule, understand
from stepscope.training.own.own_step import DrivenStep, OwnStep, check_trained, parts_of, placed
from stepscope.training.own.user_code import said_of
from stepscope.training.training_step import Batch, Choices, Share, Shared, StepParts


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a factory returned, and the file that defines the factory."""

    name: str
    """What names it in messages: `--module mine:make`."""
    made: OwnModule | None
    """The module; None where the factory returned a step of its own."""
    step: Any = None
    """The step that the factory returned, if it did."""
    file: Path | None = None
    """The file that defines it."""


def load_own(
    spelled: str, arguments: Mapping[str, Any] | None = None, *, seed: int = 0, device: torch.device | None = None
) -> Loaded:  # fmt: skip
    """Load what a factory returns, or a Hugging Face model by its configuration (`.json`).

    device: where a configuration's parameters are made; a factory decides for itself, and None is the CPU.
    """
    torch.manual_seed(seed)
    if is_configuration(spelled):
        own = make_from_config(spelled, arguments or {}, device)
        return Loaded(name=own.name, made=own, file=Path(spelled))
    factory = find_factory(spelled)
    found, name = call_factory(factory, arguments or {}), f"--module {spelled}"
    if isinstance(found, torch.nn.Module) or not hasattr(found, "phases"):
        return Loaded(name=name, made=understand(found, name), file=factory.file)
    return Loaded(name=name, made=None, step=found, file=factory.file)


def load_module(spelled: str, arguments: Mapping[str, Any] | None = None, *, seed: int = 0) -> OwnModule:
    """A user's module with its batches. Raises InputError where the factory returns a step instead."""
    loaded = load_own(spelled, arguments, seed=seed)
    if loaded.made is None:
        raise InputError(f"{loaded.name} gave a step of its own: give its module and a batch")
    return loaded.made


def take_own(given: Any, name: str) -> Loaded:
    """Take an object that exists already, in any form that a factory may return. Raises InputError for any other."""
    if isinstance(given, torch.nn.Module) or not hasattr(given, "phases"):
        return Loaded(name=name, made=understand(given, name))
    return Loaded(name=name, made=None, step=given)


def copy_of(loaded: Loaded) -> Loaded:
    """A copy of the module with its batches, so that the steps do not train the original. A user's own step is not
    copied."""
    made = loaded.made
    if made is None:
        return loaded
    with said_of(
        f"{loaded.name} cannot be copied, and measuring would train it: give a factory, module='FILE:FACTORY'"
    ):
        module, optimizer, loss = copy.deepcopy((made.module, made.optimizer, made.loss))
    return dataclasses.replace(loaded, made=dataclasses.replace(made, module=module, optimizer=optimizer, loss=loss))


def code_of(loaded: Loaded) -> str:
    """A digest of a module that came from no factory's file: of its structure, its source and its batch."""
    made = loaded.made
    if made is None:
        return ""
    found = describe_own(made.module, named_tensors(made.batches[0], input_names(made.module)), [])
    return hashlib.sha256(msgspec.json.encode(found, order="sorted")).hexdigest()[:16]


def make_own_step(
    workload: OwnWorkload,
    device: torch.device,
    given: Callable[[], Loaded] | None = None,
    share: Share | None = None,
) -> tuple[OwnStep | DrivenStep, OwnWorkload]:
    """The step on its device, and the workload with the model as it was found and the factory's own choices.

    given: an object that exists already, in place of what the workload's factory would return. share: spreads the step
    over several processes. Raises InputError for a step of the user's own that others should share.
    """
    loaded = given() if given else load_own(workload.factory, workload.arguments, seed=workload.seed, device=device)
    if loaded.made is None:
        if share is not None:
            raise InputError(f"{loaded.name} gave a step of its own, which ranks cannot share: give a module, a batch")
        return _driven(loaded, workload, device)
    whole: list[Batch] = []  # of all ranks together, of which the step has a part

    def share_and_note(parts: StepParts, choices: Choices) -> Shared:
        assert share is not None
        whole.append(parts.batches[0])
        return share(parts, choices)

    step = OwnStep(loaded.made, workload, device, share_and_note if share is not None else None)
    optimizer, by_factory = workload.optimizer, ()
    if loaded.made.optimizer is not None and step.optimizer is not None:
        optimizer, by_factory = type(step.optimizer).__name__, ("optimizer",)
    batch = whole[0] if whole else step.batches[0]
    model = describe_own(step.model, step.named_tensors(batch), [loaded.file])
    return step, msgspec.structs.replace(workload, model=model, optimizer=optimizer, by_factory=by_factory)


def own_parts(
    workload: OwnWorkload, device: torch.device, given: Callable[[], Loaded] | None = None
) -> StepParts:  # fmt: skip
    """What the step of a user's module is assembled of, made anew. Raises InputError for a step of the user's own."""
    loaded = given() if given else load_own(workload.factory, workload.arguments, seed=workload.seed, device=device)
    if loaded.made is None:
        raise InputError(f"{loaded.name} gave a step of its own, which ranks cannot share: give a module, a batch")
    check_trained(loaded.made, workload)
    return parts_of(placed(loaded.made, workload, device), workload)


def _driven(loaded: Loaded, workload: OwnWorkload, device: torch.device) -> tuple[DrivenStep, OwnWorkload]:
    usual = OwnWorkload(model=workload.model, factory=workload.factory)
    for field in ("dtype", "phase", "compile", "clip", "checkpointing", "accumulation", "norm", "mlp"):
        if getattr(workload, field) != getattr(usual, field):
            raise InputError(
                f"{loaded.name} gave a step of its own, on which {field} {getattr(workload, field)} has no effect: "
                "leave it out, or give a module and a batch"
            )
    step = DrivenStep(loaded.step, loaded.name, device)
    tensors = step.named_tensors(step.batches[0]) if step.batches else []
    model: OwnModel = describe_own(step.model, tensors, [loaded.file])
    if not step.model.state_dict() and type(step.model) is torch.nn.Module:
        model = msgspec.structs.replace(model, name=type(loaded.step).__name__)
    optimizer = type(step.optimizer).__name__ if step.optimizer is not None else None
    return step, msgspec.structs.replace(workload, model=model, optimizer=optimizer, by_factory=("optimizer", "phases"))
