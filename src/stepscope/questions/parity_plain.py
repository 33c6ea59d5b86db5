"""The plain step, against which other ways to run it are held, and how far rounding alone moves its result.

Rounding is measured in four ways: the step again, which shows what is not repeatable; the step in float64, which shows
how far all its roundings carry it; and the step with every weight moved by a rounding, three times.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from stepscope.core.errors import InputError, StepscopeError
from stepscope.core.precisions import PRECISIONS, Dtype
from stepscope.questions.replays import Distance, StepResult, Subject, distance, run_step, without_dropout
from stepscope.training.attention.pytorch import BACKENDS
from stepscope.training.user_module.module_step import ModuleStep
from stepscope.training.user_module.user_code import named_tensors, split

FACTOR = 8.0
"""How many times as far as rounding moves the plain step another may be. What moves a step by rounding differs from
variant to variant, in the order of sums above all; a mistake is off by thousands."""
FACTOR_OF_ONE = 64.0
"""How many times its own rounding a single parameter may be off. With many small ones, one is far off by chance."""
MOVED = 3
"""How often the weights are moved by a rounding."""

_COMPUTED_IN: dict[Dtype, torch.dtype] = {
    name: torch.float8_e4m3fn if precision.scaled else torch.bfloat16 if precision.tensors == "bf16" else torch.float16
    for name, precision in PRECISIONS.items()
    if precision.products == 2
}
_TF32_ROUNDING = 2.0**-11
_SMALLEST = 1e-30
"""What rounding does to a gradient that is exactly zero, so that anything else is far from it."""


@dataclass(frozen=True, kw_only=True)
class StepVariant:
    """Another way to run the step."""

    name: str
    accumulation: int = 1
    compile: str = "eager"
    checkpointing: str = "none"
    attention: str | None = None


PLAIN = StepVariant(name="plain step")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all runs that are compared have in common."""

    subject: Subject
    dtype: Dtype
    quiet: bool = False
    """Whether dropout is off."""

    def step(self, variant: StepVariant = PLAIN, *, double: bool = False) -> ModuleStep:
        """The step of a variant, made anew from the same state."""
        step = self.subject.step(
            dtype=self.dtype,
            accumulation=variant.accumulation,
            compile=variant.compile,
            checkpointing=variant.checkpointing,
            # A user's module has a backend of PyTorch's, which a context sets.
            attention=variant.attention if self.subject.takes_attention else None,
            double=double,
        )
        if self.quiet:
            without_dropout(step.model)
        return step

    @contextlib.contextmanager
    def around(self, variant: StepVariant) -> Iterator[None]:
        """The context in which a variant's step runs: its attention, and in compiled code PyTorch's random numbers."""
        with contextlib.ExitStack() as stack:
            if variant.attention and not self.subject.takes_attention:
                stack.enter_context(sdpa_kernel(BACKENDS[variant.attention]))
            if variant.compile != "eager":
                from torch._inductor import config

                torch.compiler.reset()
                stack.enter_context(config.patch(fallback_random=True))
            yield

    def run(self, variant: StepVariant, weights: tuple[float, ...] = ()) -> StepResult:
        """What a variant gives."""
        with self.around(variant):
            return run_step(self.step(variant), self.subject.seed, weights=weights)

    @property
    def rounding(self) -> float:
        """The unit roundoff of the arithmetic, relative."""
        if self.dtype == "tf32":
            return _TF32_ROUNDING
        return torch.finfo(_COMPUTED_IN.get(self.dtype, torch.float32)).eps / 2

    def roundings(self) -> "Iterator[tuple[str, Callable[[], ModuleStep]]]":
        """What moves the plain step's result as rounding does: the name of each, and what makes its step."""
        yield "the step again", self.step
        yield "in float64", lambda: self.step(double=True)
        for i in range(MOVED):
            yield f"weights moved by a rounding, {i + 1}", lambda i=i: self._moved(i)

    def _moved(self, number: int) -> ModuleStep:
        step = self.step()
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in step.model.parameters():
                if parameter.is_floating_point():
                    signs = torch.randint(2, parameter.shape, generator=generator).to(parameter.device) * 2 - 1
                    rounding = max(self.rounding, torch.finfo(parameter.dtype).eps / 2)
                    parameter.add_(parameter.abs() * signs.to(parameter.dtype), alpha=rounding)
        return step


class Plain:
    """What the plain step gives, and how far rounding moves it."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.result = setting.run(PLAIN)
        if not self.result.is_finite:
            raise InputError(
                f"{self.result.not_finite} of the plain step of {setting.subject.name} in {setting.dtype} is not "
                "finite: there is nothing to compare with; choose another --dtype, or a batch"
            )
        self.moved: dict[str, Distance] = {}
        self.refused: dict[str, str] = {}
        """Why a way to measure rounding does not run, by its name."""
        for name, make in setting.roundings():
            try:
                result = run_step(make(), setting.subject.seed)
            except StepscopeError as error:
                self.refused[name] = str(error)
                continue
            if result.is_finite:
                self.moved[name] = distance(result, self.result)
            else:
                self.refused[name] = "its result is not finite"
        # A step in another random state: where it differs from the step again, forward draws random numbers.
        other = distance(run_step(setting.step(), setting.subject.seed + 1), self.result)
        self.draws = other.gradients > FACTOR * max(self.moved["the step again"].gradients, 2.0**-23)

    @functools.cached_property
    def loss(self) -> float:
        """How far rounding moves the loss, relative."""
        return max(self.result.loss_rounding, *(each.loss for each in self.moved.values()))

    @functools.cached_property
    def gradients(self) -> float:
        """How far rounding moves the gradients, relative to their norm."""
        return max(self.setting.rounding, *(each.gradients for each in self.moved.values()))

    def of_parameter(self, name: str) -> float:
        """How far rounding moves one parameter's gradient, relative to the norm of all."""
        size = self.norms.get(name, 0.0) / (math.hypot(*self.norms.values()) or 1.0)
        return max(self.setting.rounding * size, *(each.parameters.get(name, 0.0) for each in self.moved.values()))

    @functools.cached_property
    def norms(self) -> dict[str, float]:
        """The norm of each parameter's gradient."""
        return {name: float(each.double().norm()) for name, each in self.result.gradients.items()}

    def times(self, off: Distance) -> float:
        """How many times as far as rounding the loss or the gradients are, whichever is farther."""
        return max(off.loss / self.loss, off.gradients / self.gradients)

    def alone(self, off: Distance) -> tuple[str, float]:
        """The parameter that is farthest for its own rounding, and how many times; ("", 0.0) where none differs."""
        ratios = {name: each / (self.of_parameter(name) or _SMALLEST) for name, each in off.parameters.items() if each}
        worst = max(ratios, key=ratios.__getitem__, default="")
        return worst, ratios.get(worst, 0.0)

    def agrees(self, off: Distance) -> bool:
        """Whether a result so far away is within rounding."""
        return self.times(off) <= FACTOR and self.alone(off)[1] <= FACTOR_OF_ONE


# Why micro-batches do not add up to the batch: the weight that each of their losses should have had.
#
# A loss that is a mean over tokens weighs each token by one over their number. Where the tokens that count are counted
# in each micro-batch, and the means averaged, a token in a micro-batch with few of them weighs more than another.


IGNORED = -100
"""The target that PyTorch's cross-entropy leaves out, unless told otherwise."""


@dataclass(frozen=True, kw_only=True)
class Explained:
    """Weights of the micro-batches with which the step gives what the plain step gives."""

    counted: str
    """What each micro-batch has another number of; empty where the losses only have to be added up."""
    counts: tuple[int, ...] = ()
    off: Distance
    """How far the step with these weights is from the plain step."""

    @property
    def ratio(self) -> float:
        """How many times as much a token counts in the micro-batch with the fewest as in the one with the most."""
        return max(self.counts) / min(self.counts)


def explain(plain: Plain, variant: StepVariant, result: StepResult) -> Explained | None:
    """The weights with which the variant's loss, and then its gradients, are those of the plain step; None if none."""
    parts = variant.accumulation
    # What micro-batches may have different numbers of, and its number in each.
    differ = (each for each in _counted(plain, parts) if all(each[1]) and len(set(each[1])) > 1)
    for counted, counts in chain([("", (1,) * parts)], differ):
        whole = 1 if not counted else sum(counts)
        weights = tuple(each / whole for each in counts)
        loss = sum(weight * each for weight, each in zip(weights, result.losses, strict=True))
        if abs(loss - plain.result.loss) > FACTOR * plain.loss * abs(plain.result.loss):
            continue
        off = distance(plain.setting.run(variant, weights), plain.result)
        if plain.agrees(off):
            return Explained(counted=counted, counts=counts if counted else (), off=off)
    return None


def empty_micro_batches(plain: Plain, parts: int) -> list[int]:
    """The micro-batches, by number from 1, in which every target is left out: a mean over them is 0/0."""
    for counted, counts in _counted(plain, parts):
        if not all(counts) and str(IGNORED) in counted:
            return [number for number, count in enumerate(counts, 1) if not count]
    return []


def _counted(plain: Plain, parts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    user_module = plain.setting.step().user_module
    batch = user_module.batches[0]
    micro = [dict(named_tensors(each)) for each in split(batch, parts, user_module.name)]
    for name, whole in named_tensors(batch):
        tensors = [each[name] for each in micro]
        if not whole.dim() or tensors[0].shape == whole.shape:
            continue  # not cut
        label = f"item {name} of the batch" if name.isdigit() else f"`{name}`"
        # A model of language often shifts its targets by one: then the first of each sequence is not looked at.
        for shift, without in ((0, ""), (1, ", but for the first of each sequence")):
            if shift and whole.dim() < 2:
                continue
            kept = [each[:, shift:] if shift else each for each in tensors]
            if not whole.is_floating_point() and bool((whole == IGNORED).any()):
                yield f"targets in {label} that are not {IGNORED}{without}", _number(each != IGNORED for each in kept)
            if not whole.is_floating_point() or bool(((whole == 0) | (whole == 1)).all()):  # numbers, or a mask
                yield f"numbers in {label} that are not 0{without}", _number(each != 0 for each in kept)


def _number(masks: Iterator[Tensor]) -> tuple[int, ...]:
    return tuple(int(torch.count_nonzero(mask)) for mask in masks)
