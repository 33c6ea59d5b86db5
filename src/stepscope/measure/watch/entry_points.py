"""Watches, from outside, the places where a loop enters a part of its step. Each function returns what undoes it.

Nothing is registered on a module, and nothing is hooked inside one. A hook on the instance would be copied and pickled
with the model, and would run inside what `model.compile()` compiled. `torch.compile` warns of global hooks. The
`__call__` of the instance's class is watched instead: no copy, no pickle and no compiled region holds it.
"""

import functools
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stepscope.core.range_names import BACKWARD, DATA, EVALUATION, FORWARD, OPTIMIZER, REST
from stepscope.measure.habits.code_lines import users_line
from stepscope.measure.watch.found import bare_optimizer, class_name
from stepscope.measure.watch.phases import Phases

Undo = Callable[[], None]
_MISSING = object()


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Undo:
    """Replace an attribute by a wrapper, if the attribute exists. Returns what puts the original back.

    If somebody else has wrapped it again since then, that wrapper stays, and ours below it does nothing more. Two of
    ours on one attribute are undone in reverse order, or the first would stay.
    """
    original = getattr(owner, name, None)
    if original is None:
        return lambda: None
    own = vars(owner).get(name, _MISSING)
    wrapper = make(original)
    setattr(owner, name, wrapper)

    def undo() -> None:
        if vars(owner).get(name) is not wrapper:
            return
        if own is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, own)

    return undo


def watch_forward(module: nn.Module, phases: Phases, *, training: bool) -> Undo:
    """Open forward while this module is called with gradients on, in the mode in which it trains, and evaluation while
    it is called with gradients off."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self is not module or get_ident() != phases.thread:
                return original(self, *args, **kwargs)
            if not torch.is_grad_enabled():
                return _evaluated(phases, original, self, *args, **kwargs)
            if self.training is not training:
                return original(self, *args, **kwargs)
            if not phases.keeps_inputs:
                return _inside(FORWARD, phases, original, self, *args, **kwargs)
            phases.inputs = args, kwargs
            try:
                return _inside(FORWARD, phases, original, self, *args, **kwargs)
            finally:
                phases.inputs = None

        return call

    return replace(type(module), "__call__", make)


def watch_quiet(module: nn.Module, phases: Phases) -> Undo:
    """Open evaluation while this module, which does not train, is called with gradients off."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self is not module or get_ident() != phases.thread or torch.is_grad_enabled():
                return original(self, *args, **kwargs)
            return _evaluated(phases, original, self, *args, **kwargs)

        return call

    return replace(type(module), "__call__", make)


def watch_backward(phases: Phases) -> Undo:
    """Open backward while autograd's engine runs, which `torch.autograd.backward` and `grad` call."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != phases.thread:
                return original(*args, **kwargs)
            if phases.keeps_roots and args:
                phases.roots = args[0]
            try:
                return _inside(BACKWARD, phases, original, *args, **kwargs)
            finally:
                phases.roots = None

        return run

    return replace(torch.autograd, "_engine_run_backward", make)


def end_with_backward(ended: Callable[[], None]) -> Undo:
    """Call this whenever autograd's engine has run."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            ended()
            return result

        return run

    return replace(torch.autograd, "_engine_run_backward", make)


def watch_data(phases: Phases) -> Undo:
    """Open data while a DataLoader is asked for its next batch."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def next_batch(self: Any) -> Any:
            if get_ident() != phases.thread:
                return original(self)
            return _inside(DATA, phases, original, self)

        return next_batch

    return replace(_BaseDataLoaderIter, "__next__", make)


class OptimizerWatch:
    """Opens optimizer while one of these optimizers steps, or a GradScaler decides whether it steps.

    `ended` is called when a step of the first optimizer ends, also where the scaler has left the update out. Its
    argument says whether PyTorch's range round the step is still open. No profiler may then start or stop: the range,
    which ends afterwards, would write into memory that the profiler has freed.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], phases: Phases, ended: Callable[[bool], None]
    ) -> None:
        self._optimizers, self._phases, self._ended = optimizers, phases, ended
        self._around = 0
        """The number of our wrappers, round a step or a scaler's step, that are entered."""

    def install(self) -> Undo:
        undo: list[Undo] = [replace(GradScaler, "step", self._around_scaler)]
        for optimizer in self._optimizers:
            # The hooks see every step, however it is called. Only the wrapper ends outside of PyTorch's range. A
            # learning rate's scheduler may wrap the step too, and Accelerate may throw the wrapper away.
            undo.append(optimizer.register_step_pre_hook(self._begin_hook()).remove)
            undo.append(optimizer.register_step_post_hook(self._end_hook()).remove)
            undo.append(replace(optimizer, "step", lambda original, of=optimizer: self._around_step(of, original)))

        def take_off() -> None:
            for each in reversed(undo):
                each()

        return take_off

    # Plain functions: a copy of a bound method would copy this object with it.
    def _begin_hook(self) -> Callable[..., None]:
        def begins(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            phases = self._phases
            if get_ident() != phases.thread:
                return None
            if not self._around:
                phases.forget_what_is_open()
            phases.enter(OPTIMIZER)
            return _with_watched_closure(phases, args, kwargs)

        return begins

    def _end_hook(self) -> Callable[..., None]:
        def ends(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            phases = self._phases
            if get_ident() != phases.thread or phases.at_rest:
                return
            phases.leave()
            if optimizer is self._optimizers[0] and not self._around:
                self._ended(True)

        return ends

    def _around_step(self, optimizer: torch.optim.Optimizer, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != self._phases.thread:
                return original(*args, **kwargs)
            return self._call(optimizer, original, *args, **kwargs)

        return step

    def _around_scaler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scaler: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            ours = any(bare_optimizer(optimizer) is each for each in self._optimizers)
            if not ours or get_ident() != self._phases.thread:
                return original(scaler, optimizer, *args, **kwargs)
            return self._call(bare_optimizer(optimizer), original, scaler, optimizer, *args, **kwargs)

        return step

    def _call(self, optimizer: torch.optim.Optimizer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._around:
            self._phases.forget_what_is_open()
        self._around += 1
        try:
            result = _inside(OPTIMIZER, self._phases, original, *args, **kwargs)
        finally:
            self._around -= 1
        if optimizer is self._optimizers[0] and not self._around:
            self._ended(False)
        return result


def _with_watched_closure(phases: Phases, args: Any, kwargs: dict[str, Any]) -> Any:
    """The arguments of an optimizer's step, in whose closure the rest of the step is open; None without a closure."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None

    @functools.wraps(closure)
    def watched(*given: Any, **named: Any) -> Any:
        return _inside(REST, phases, closure, *given, **named)

    if "closure" in kwargs:
        return args, {**kwargs, "closure": watched}
    return (args[0], watched, *args[2:]), kwargs


def _evaluated(phases: Phases, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if type(module) not in phases.evaluated:
        line = users_line()
        phases.evaluated[type(module)] = class_name(module), line.where if line is not None else ""
    return _inside(EVALUATION, phases, original, module, *args, **kwargs)


def _inside(name: str, phases: Phases, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a call while a part of the step is open. Afterwards the part is left, with all that the call left open
    inside."""
    depth = phases.enter(name)
    try:
        return call(*args, **kwargs)
    except BaseException:
        phases.fail()
        raise
    finally:
        phases.leave_to(depth)
