"""The first module whose output, or whose output's gradient, is not what it is in the plain step.

What goes into each module and comes out of it is compared in the order of execution, micro-batches put together along
the batch; then the gradients of the outputs, in the order of backward. How far rounding moves each of them is measured
as for the gradients.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from stepscope.core.errors import StepscopeError
from stepscope.core.range_names import FORWARD
from stepscope.questions.parity.plain import FACTOR, Plain, StepVariant
from stepscope.questions.replays import run_step
from stepscope.recording.step import Recorder
from stepscope.training.own.own_step import OwnStep

What = Literal["input", "output", "gradient"]


@dataclass(frozen=True, order=True)
class Event:
    """A place in the step where tensors are compared."""

    what: What
    """What goes into a module, what comes out of it, or the gradient of that."""
    module: str
    """The module's path; empty for the whole model."""
    call: int
    """Which call of the module in its micro-batch, from 0."""
    leaf: int
    """Which of the tensors."""


@dataclass(frozen=True, kw_only=True)
class Departure:
    """The first place where a variant departs from the plain step."""

    event: Event | None
    """None where every tensor that can be compared agrees."""
    off: float = 0.0
    rounding: float = 0.0
    """How far rounding moves it, relative as `off` is."""
    before: Event | None = None
    """The last place of the same kind that agreed."""
    compared: int
    skipped: int
    """Tensors that micro-batches do not make up along a dimension, so that they cannot be compared."""


Told = Callable[[Event, int, Tensor], None]
"""Called with a place, the number of the micro-batch, and the tensor there."""


def find_departure(plain: Plain, variant: StepVariant) -> Departure:
    """Where a variant departs first."""
    setting = plain.setting
    kept: dict[Event, Tensor] = {}

    def keep(event: Event, _micro: int, tensor: Tensor) -> None:
        # On the host, since all outputs of a step may be more than the device has left.
        kept.setdefault(event, tensor.detach().to("cpu", copy=True))

    _watch(setting.step(), setting.subject.seed, keep)
    moved: dict[Event, float] = {}
    for _, make in setting.roundings():
        with contextlib.suppress(StepscopeError):
            compared = _Compared(kept, 1)
            _watch(make(), setting.subject.seed, compared)
            for event, off in compared.off().items():
                moved[event] = max(moved.get(event, 0.0), off)
    compared = _Compared(kept, variant.accumulation)
    with setting.around(variant):
        _watch(setting.step(variant), setting.subject.seed, compared)
    return _first(compared, moved, setting.rounding)


def _first(compared: "_Compared", moved: dict[Event, float], least: float) -> Departure:
    found = compared.off()
    before: Event | None = None
    for event, off in found.items():
        rounding = max(moved.get(event, 0.0), least)
        if off > FACTOR * rounding:
            if before is not None and (before.what == "gradient") != (event.what == "gradient"):
                before = None
            return Departure(
                event=event, off=off, rounding=rounding, before=before, compared=len(found), skipped=compared.skipped
            )
        before = event
    return Departure(event=None, compared=len(found), skipped=compared.skipped)


class _Compared:
    """Holds what it is told against what was kept of the plain step, so that of a variant nothing is kept."""

    def __init__(self, kept: dict[Event, Tensor], parts: int) -> None:
        self._kept, self._parts = kept, parts
        self._sums: dict[Event, list[float]] = {}
        self._unlike: set[Event] = set()

    def __call__(self, event: Event, micro: int, tensor: Tensor) -> None:
        whole = self._kept.get(event)
        expected = None if whole is None else _part_like(whole, tensor, micro, self._parts)
        if expected is None:
            self._unlike.add(event)
            return
        wide, other = tensor.detach().double(), expected.to(tensor.device).double()
        equal = wide == other  # infinities, as masks have them
        off = torch.where(equal, torch.zeros_like(wide), wide - other)
        size = torch.where(equal & ~wide.isfinite(), torch.zeros_like(wide), other)
        sums = self._sums.setdefault(event, [0.0, 0.0])
        sums[0] += float(off.square().sum())
        sums[1] += float(size.square().sum())

    @property
    def skipped(self) -> int:
        """How many tensors could not be compared."""
        return len(self._unlike)

    def off(self) -> dict[Event, float]:
        """How far each tensor is from the plain step's, relative, in the order in which they came: forward first."""
        found = {
            event: _root(off, size) for event, (off, size) in self._sums.items() if event not in self._unlike
        }  # fmt: skip
        return {
            **{event: each for event, each in found.items() if event.what != "gradient"},
            **{event: each for event, each in found.items() if event.what == "gradient"},
        }


def _part_like(whole: Tensor, tensor: Tensor, micro: int, parts: int) -> Tensor | None:
    """The part of a tensor that a micro-batch makes; None where it does not make one along a dimension."""
    if parts == 1:
        return whole if whole.shape == tensor.shape else None
    for dim, size in enumerate(tensor.shape):
        if whole.shape == (*tensor.shape[:dim], size * parts, *tensor.shape[dim + 1 :]):
            return whole.narrow(dim, micro * size, size)
    return None


def _root(off: float, size: float) -> float:
    if math.isnan(off):
        return math.inf
    return 0.0 if off == 0 else math.sqrt(off / size) if size else math.inf


def _watch(step: OwnStep, seed: int, told: Told) -> None:
    watching = _Watching(step, told)
    with watching.running():
        run_step(step, seed, watching)


class _Watching(Recorder):
    """Hooks on every module of a step, which tell of what goes in, what comes out, and of the gradients of that."""

    def __init__(self, step: OwnStep, told: Told) -> None:
        self._step, self._told = step, told
        self._parts = step.workload.accumulation
        self._micro, self._in_forward = -1, False
        self._calls: Counter[str] = Counter()
        self._latest: dict[tuple[str, Tensor], int] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context in which the hooks are on. Compiled code leaves its graph for them."""
        outside: Any = torch.compiler.disable if self._step.compiled else lambda hook: hook
        with contextlib.ExitStack() as stack:
            for path, module in self._step.model.named_modules():
                enter, leave = outside(self._entering(path)), outside(self._leaving(path))
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(leave).remove)
            yield

    def phase_begins(self, name: str) -> None:
        if name == FORWARD:
            self._micro += 1
            self._calls.clear()
            self._in_forward = True

    def phase_ends(self, name: str) -> None:
        self._in_forward = False  # checkpointing calls modules again in backward

    def _entering(self, path: str) -> Callable[..., None]:
        def enter(_module: object, args: Any, kwargs: Any) -> None:
            if self._in_forward:
                for leaf, tensor in _floats((args, kwargs)):
                    self._told(Event("input", path, self._calls[path], leaf), self._micro, tensor)

        return enter

    def _leaving(self, path: str) -> Callable[..., None]:
        def leave(_module: object, _args: object, output: Any) -> None:
            if not self._in_forward:
                return
            call, micro = self._calls[path], self._micro
            self._calls[path] += 1
            for leaf, tensor in _floats(output):
                self._told(Event("output", path, call, leaf), micro, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(self._coming_back(Event("gradient", path, call, leaf), micro))

        return leave

    def _coming_back(self, event: Event, micro: int) -> Callable[[Tensor], None]:
        scaler = self._step.scaler

        def come(gradient: Tensor) -> None:
            self._told(event, micro, gradient / scaler.get_scale() if scaler.is_enabled() else gradient)

        return come


def _floats(value: Any) -> Iterator[tuple[int, Tensor]]:
    """The tensors of floating numbers in nested values, with their places. A single number is no part of a batch."""
    for i, leaf in enumerate(tree_leaves(value)):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim():
            yield i, leaf
