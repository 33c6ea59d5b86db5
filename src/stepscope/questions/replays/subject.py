"""The model that a study runs again and again: its step is made anew each time, from one state."""

import dataclasses
from collections.abc import Callable

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepscope.core.own_workload import DrivenWorkload, OwnModel, OwnWorkload
from stepscope.core.precisions import Dtype
from stepscope.core.workload import Workload
from stepscope.questions.setting import check_room
from stepscope.training.own.loading import Loaded, copy_of, load_module
from stepscope.training.own.own_module import OwnModule
from stepscope.training.own.own_step import OwnStep
from stepscope.training.training_step import TrainingStep

_STEP_BYTES = 4 * 4 + 2 * 8
"""Bytes per parameter: the parameter, its gradient, a gradient that is kept, a copy; and both in double precision."""


class Subject:
    """The textbook's model or one of the user's own, with the first of its batches and its loss."""

    def __init__(self, workload: DrivenWorkload, device: torch.device) -> None:
        """workload: the model, its batch and the seed; what else it asks for is not looked at."""
        self.device, self.seed = device, workload.seed
        self._loaded: Loaded | None = None
        self._workload: Workload | None = None
        if isinstance(workload, OwnWorkload):
            made = load_module(workload.factory, workload.arguments, seed=workload.seed)
            made = dataclasses.replace(made, batches=made.batches[:1], optimizer=None)
            self._loaded = Loaded(name=made.name, made=made)
            self.name = workload.factory
        else:
            check_room(workload, device, bytes_per_parameter=_STEP_BYTES)
            self._workload = msgspec.structs.replace(workload, phase="forward-backward", dtype="fp32")
            self.name = workload.model.name

    @property
    def is_own(self) -> bool:
        """Whether the model is the user's."""
        return self._loaded is not None

    def step(
        self, *, dtype: Dtype = "fp32", accumulation: int = 1, compile: str = "eager", checkpointing: str = "none",
        attention: str | None = None, double: bool = False, adapt: Callable[[OwnModule], OwnModule] | None = None,
    ) -> OwnStep:  # fmt: skip
        """A step of forward and backward, with weights of its own that are always the same.

        attention: of the textbook's model, and None for the workload's. double: parameters, buffers and the batch are
        in float64, and no autocast is on. adapt: changes the module, or its loss, before the step is made of it.
        """
        ours = self._workload is not None
        own = self._textbook(attention, checkpointing) if ours else self._copy()
        own = adapt(own) if adapt is not None else own
        choices = OwnWorkload(
            factory=self.name, model=OwnModel(name=""), phase="forward-backward", seed=self.seed,
            dtype="fp32" if double else dtype, accumulation=accumulation, compile=compile,  # type: ignore[arg-type]
            checkpointing="none" if ours else checkpointing,
        )  # fmt: skip
        return OwnStep(own.on(self.device, torch.float64) if double else own, choices, self.device)

    def _copy(self) -> OwnModule:
        assert self._loaded is not None
        made = copy_of(self._loaded).made
        assert made is not None
        return made

    def _textbook(self, attention: str | None, checkpointing: str) -> OwnModule:
        assert self._workload is not None
        changes = {"checkpointing": checkpointing, **({"attention": attention} if attention else {})}
        step = TrainingStep(msgspec.structs.replace(self._workload, **changes), self.device)
        return OwnModule(name=self.name, module=step.model, batches=[tuple(step.batch)], loss=cross_entropy)


def drawing_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules in training mode that have a share to drop out, by path."""
    return {path: part for path, part in model.named_modules() if part.training and _dropouts(part)}


def without_dropout(model: nn.Module) -> None:
    """Set every share that a module drops out to zero."""
    for part in drawing_modules(model).values():
        for name in _dropouts(part):
            setattr(part, name, 0.0)


def _dropouts(part: nn.Module) -> list[str]:
    """The attributes that hold such a share: `p` of PyTorch's modules, and numbers that others name after dropout."""
    is_dropout = isinstance(part, nn.modules.dropout._DropoutNd)
    return [
        name for name, value in vars(part).items()
        if isinstance(value, float) and 0 < value <= 1 and ((is_dropout and name == "p") or "drop" in name)
    ]  # fmt: skip


def cross_entropy(logits_BSV: Tensor, targets: Tensor) -> Tensor:
    # At least in fp32, as the training step has it; in float64 it stays there.
    wide = torch.promote_types(logits_BSV.dtype, torch.float32)
    return F.cross_entropy(logits_BSV.flatten(0, 1).to(wide), targets.flatten())
