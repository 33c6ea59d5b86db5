"""What one run of a step gives, its loss and its gradients, and how far two runs are apart."""

import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stepscope.core.range_names import FORWARD
from stepscope.recording.step import Recorder, drive
from stepscope.training.own.own_step import OwnStep

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


def run_step(step: OwnStep, seed: int, *recorders: Recorder, weights: Sequence[float] = ()) -> StepResult:
    """What the step gives from this random state. weights: what each micro-batch's loss is multiplied by; all alike,
    which makes the mean of them, where there are none."""
    step.prepare()
    losses = _Losses(step, weights)
    _set_random_state(seed)
    drive(step, losses, *recorders)
    scale = step.scaler.get_scale() if step.scaler.is_enabled() else 1.0
    gradients = {
        name: parameter.grad.detach() / scale if scale != 1.0 else parameter.grad.detach().clone()
        for name, parameter in step.model.named_parameters()
        if parameter.grad is not None
    }
    found = losses.found
    factors = weights or [1 / len(found)] * len(found)
    loss = sum(factor * each for factor, each in zip(factors, found, strict=True))
    rounding = torch.finfo(step.loss.dtype if step.loss is not None else torch.float32).eps
    return StepResult(losses=tuple(found), loss=loss, loss_rounding=rounding, gradients=gradients)


def distance(found: StepResult, reference: StepResult) -> Distance:
    """How far `found` is from `reference`: a missing gradient counts as zero, one that is not finite as infinitely
    far."""
    off, size = {}, []
    for name in dict.fromkeys((*reference.gradients, *found.gradients)):
        one, other = found.gradients.get(name), reference.gradients.get(name)
        size.append(_norm(other) if other is not None else 0.0)
        if one is None or other is None:
            rest = one if one is not None else other
            off[name] = _norm(rest) if rest is not None else 0.0
        else:
            off[name] = _norm(one.double() - other.double())
    whole = math.hypot(*size)
    return Distance(
        loss=_relative(abs(found.loss - reference.loss), abs(reference.loss)),
        gradients=_relative(math.hypot(*off.values()), whole),
        parameters={name: _relative(each, whole) for name, each in off.items()},
    )


def patient(tell: Callable[[str, float], None] | None) -> Callable[[str, float], None]:
    """A function that passes on what it is told, a name and a share that is done, once the work has taken a while."""
    begun = time.monotonic()

    def told(name: str, share: float) -> None:
        if tell is not None and time.monotonic() - begun > PATIENCE_S:
            tell(name, share)

    return told


class _Losses(Recorder):
    """Keeps the loss of each micro-batch, and weighs it before backward."""

    def __init__(self, step: OwnStep, weights: Sequence[float]) -> None:
        self._step, self._weights = step, weights
        self.found: list[float] = []

    def phase_ends(self, name: str) -> None:
        loss = self._step.loss
        if name == FORWARD and loss is not None:
            if self._weights:
                # The step divides by the number of micro-batches.
                self._step.loss = loss * (self._weights[len(self.found)] * len(self._weights))
            self.found.append(loss.item())


def _set_random_state(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _norm(tensor: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(tensor.double()))
    return norm if math.isfinite(norm) else math.inf


def _relative(off: float, size: float) -> float:
    if math.isnan(off):
        return math.inf
    return 0.0 if off == 0 else off / size if size else math.inf
