"""One step run again and again from one state: the model, what a run gives, and how far two are apart."""

import contextlib
import dataclasses
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepscope.core.precisions import Dtype
from stepscope.core.range_names import FORWARD
from stepscope.core.workloads import FactoryWorkload, TextbookWorkload, UserModel, Workload, by_sizes
from stepscope.questions.answers import check_room
from stepscope.recording.step import Recorder, drive
from stepscope.training.training_step import TrainingStep
from stepscope.training.user_module.loading import Loaded, copy_of, load_module
from stepscope.training.user_module.module_step import ModuleStep, UserModule

PATIENCE_S = 2.0
"""Seconds of work that need no word about how far it is."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The loss and the gradients of one step."""

    losses: tuple[float, ...]
    """The loss of each micro-batch."""
    loss: float
    loss_rounding: float
    """The distance from 1 to the next number of the loss's dtype."""
    gradients: Mapping[str, Tensor]
    """By the parameter's name. A parameter that got none is not there."""

    @property
    def is_finite(self) -> bool:
        """Whether the loss and every gradient are finite."""
        return self.not_finite is None

    @property
    def not_finite(self) -> str | None:
        """What is not finite, in words: the loss, or else the first such gradient; None where all is finite."""
        if not math.isfinite(self.loss):
            return "the loss"
        broken = (name for name, each in self.gradients.items() if not bool(each.isfinite().all()))
        return next((f"the gradient of {name}" for name in broken), None)


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far one step's result is from another's."""

    loss: float
    """Relative to the other's loss."""
    gradients: float
    """The norm of the difference over all parameters, relative to the norm of the other's gradients."""
    parameters: Mapping[str, float]
    """The norm of the difference by parameter, relative to the norm of all the other's gradients."""

    @property
    def worst(self) -> str:
        """The parameter with the largest difference; empty where there is none."""
        return max(self.parameters, key=self.parameters.__getitem__, default="")


def run_step(step: ModuleStep, seed: int, *recorders: Recorder, weights: Sequence[float] = ()) -> StepResult:
    """What the step gives from this random state. weights: what each micro-batch's loss is multiplied by; all alike,
    which makes the mean of them, where there are none."""
    step.prepare()
    losses = _Losses(step, weights)
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    drive(step, losses, *recorders)
    scale = step.scaler.get_scale() if step.scaler.is_enabled() else 1.0
    gradients = {
        name: parameter.grad.detach() / scale if scale != 1.0 else parameter.grad.detach().clone()
        for name, parameter in step.model.named_parameters()
        if parameter.grad is not None
    }
    each_loss = losses.values
    factors = weights or [1 / len(each_loss)] * len(each_loss)
    loss = sum(factor * each for factor, each in zip(factors, each_loss, strict=True))
    rounding = torch.finfo(step.loss.dtype if step.loss is not None else torch.float32).eps
    return StepResult(losses=tuple(each_loss), loss=loss, loss_rounding=rounding, gradients=gradients)


@contextlib.contextmanager
def hooked(model: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    """While open, each module's calls are told: to `enter` by its path, the module, args and kwargs; to `leave` by its
    path, the module, args and the output."""
    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(partial(enter, path), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(partial(leave, path)).remove)
        yield


def distance(result: StepResult, reference: StepResult) -> Distance:
    """How far `result` is from `reference`: a missing gradient counts as zero, one that is not finite as infinitely
    far."""
    off, size = {}, []
    for name in dict.fromkeys((*reference.gradients, *result.gradients)):
        size.append(_norm(reference.gradients[name]) if name in reference.gradients else 0.0)
        both = [in_double(step.gradients[name]) for step in (result, reference) if name in step.gradients]
        off[name] = _norm(both[0] - both[1] if len(both) > 1 else both[0])
    whole = math.hypot(*size)
    return Distance(
        loss=_relative(abs(result.loss - reference.loss), abs(reference.loss)),
        gradients=_relative(math.hypot(*off.values()), whole),
        parameters={name: _relative(each, whole) for name, each in off.items()},
    )


def patient(tell: Callable[[str, float], None] | None) -> Callable[[str, float], None]:
    """A function that passes on what it is told, a name and a share that is done, once the work has taken a while."""
    begun = time.monotonic()

    def report(name: str, share: float) -> None:
        if tell is not None and time.monotonic() - begun > PATIENCE_S:
            tell(name, share)

    return report


@dataclass(eq=False)
class _Losses(Recorder):
    """Keeps the loss of each micro-batch, and weighs it before backward."""

    step: ModuleStep
    weights: Sequence[float]
    values: list[float] = field(init=False, default_factory=list[float])

    def phase_ends(self, name: str) -> None:
        loss = self.step.loss
        if name == FORWARD and loss is not None:
            if self.weights:
                # The step divides by the number of micro-batches.
                self.step.loss = loss * (self.weights[len(self.values)] * len(self.weights))
            self.values.append(loss.item())


def in_double(tensor: Tensor) -> Tensor:
    """The tensor in double precision; complex numbers stay complex."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _norm(tensor: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(in_double(tensor)))
    return norm if math.isfinite(norm) else math.inf


def _relative(off: float, size: float) -> float:
    if math.isnan(off):
        return math.inf
    return 0.0 if off == 0 else off / size if size else math.inf


# The model that a study runs again and again: its step is made anew each time, from one state.


_STEP_BYTES = 4 * 4 + 2 * 8
"""Bytes per parameter: the parameter, its gradient, a gradient that is kept, a copy; and both in double precision."""


class Subject:
    """The textbook's model or one of the user's own, with the first of its batches and its loss."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        """workload: the model, its batch and the seed; what else it asks for is not looked at."""
        self.device, self.seed = device, workload.seed
        self.name = workload.factory or workload.name
        self.takes_attention = workload.attention is not None
        """Whether its step takes an attention by name. Another's attention is a backend of PyTorch's."""
        self._make = by_sizes(workload, lambda sized: _textbook_module(sized, device)) or _user_module(workload)

    def step(
        self, *, dtype: Dtype = "fp32", accumulation: int = 1, compile: str = "eager", checkpointing: str = "none",
        attention: str | None = None, double: bool = False, adapt: Callable[[UserModule], UserModule] | None = None,
    ) -> ModuleStep:  # fmt: skip
        """A step of forward and backward, with weights of its own that are always the same.

        attention: of the textbook's model, and None for the workload's. double: parameters, buffers and the batch are
        in float64, and no autocast is on. adapt: changes the module, or its loss, before the step is made of it.
        """
        module = self._make(attention, checkpointing)
        module = adapt(module) if adapt is not None else module
        choices = FactoryWorkload(
            factory=self.name, model=UserModel(name=""), phase="forward-backward", seed=self.seed,
            dtype="fp32" if double else dtype, accumulation=accumulation, compile=compile,  # type: ignore[arg-type]
            checkpointing="none" if self.takes_attention else checkpointing,
        )  # fmt: skip
        return ModuleStep(module.on(self.device, torch.float64) if double else module, choices, self.device)


_MakeModule = Callable[[str | None, str], UserModule]
"""Makes a module with its batch and its loss, with an attention and with checkpointing."""


def _textbook_module(workload: TextbookWorkload, device: torch.device) -> _MakeModule:
    check_room(workload, device, bytes_per_parameter=_STEP_BYTES)
    plain = msgspec.structs.replace(workload, phase="forward-backward", dtype="fp32")

    def make(attention: str | None, checkpointing: str) -> UserModule:
        changes = {"checkpointing": checkpointing, **({"attention": attention} if attention else {})}
        step = TrainingStep(msgspec.structs.replace(plain, **changes), device)
        return UserModule(name=workload.name, module=step.model, batches=[tuple(step.batch)], loss=cross_entropy)

    return make


def _user_module(workload: Workload) -> _MakeModule:
    """The step that is made of it does its checkpointing."""
    module = load_module(workload.factory, workload.arguments, seed=workload.seed)
    module = dataclasses.replace(module, batches=module.batches[:1], optimizer=None)
    loaded = Loaded(name=module.name, user_module=module)

    def make(_attention: str | None, _checkpointing: str) -> UserModule:
        copied = copy_of(loaded).user_module
        assert copied is not None
        return copied

    return make


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
        name
        for name, value in vars(part).items()
        if isinstance(value, float) and 0 < value <= 1 and ((is_dropout and name == "p") or "drop" in name)
    ]


def cross_entropy(logits_BSV: Tensor, targets: Tensor) -> Tensor:
    # At least in fp32, as the training step has it; in float64 it stays there.
    wide = torch.promote_types(logits_BSV.dtype, torch.float32)
    return F.cross_entropy(logits_BSV.flatten(0, 1).to(wide), targets.flatten())


# Shares and lists of names, as sentences have them.


MOST_NAMED = 4
"""Names that a sentence lists; it counts the others."""


def share(value: float) -> str:
    """A relative difference: in percent where it is large, as a power of ten where it is rounding."""
    if value == 0:
        return "nothing"
    return f"{100 * value:.3g} %" if 1e-4 <= value < float("inf") else f"{value:.2g}"


def listed(names: Sequence[str]) -> str:
    """Names as a list in words; of many the first ones, and how many more there are."""
    if len(names) > MOST_NAMED:
        return f"{', '.join(names[:MOST_NAMED])} and {len(names) - MOST_NAMED} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
