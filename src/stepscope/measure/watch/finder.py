"""Looks at the first whole step of a loop, to find out what its step is.

Until an optimizer has stepped once, the finder listens for that alone, so code that is compiled or imported before then
never meets a watched function. During the next step it notes every module that the loop itself calls. While such a call
runs, the class's own `__call__` is back in place, so nothing inside the call is touched, compiled or not.
"""

from collections.abc import Callable, Iterator, Mapping
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stepscope.core.range_names import BACKWARD
from stepscope.measure.step import Recorder
from stepscope.measure.watch.entry_points import Undo, replace, watch_backward
from stepscope.measure.watch.found import (
    Found,
    LoopSeen,
    ModuleSeen,
    TensorSeen,
    Unclear,
    UpdateSeen,
    bare_optimizer,
    decide,
    is_compiled,
)
from stepscope.measure.watch.phases import Phases
from stepscope.measure.weakly import weakly

_ORIGINAL_CALL = nn.Module.__call__


class Finder(Recorder):
    """Listens to a loop until it can tell what a step is; `ended` is called at the end of each step until then.

    If an optimizer is given, its first step is looked at; if not, the step between the first two updates of any.
    """

    _model: nn.Module | None = weakly(or_none=True)
    _optimizer: torch.optim.Optimizer | None = weakly(or_none=True)
    _first: torch.optim.Optimizer | None = weakly(or_none=True)
    last_to_end: torch.optim.Optimizer | None = weakly(or_none=True)
    """The optimizer whose step ended last."""

    def __init__(
        self,
        phases: Phases,
        ended: Callable[[Found | Unclear | None], None],
        *,
        step_of: str | None = None,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._phases, self._ended = phases, ended
        self._step_of, self._model = step_of, model
        self._optimizer = bare_optimizer(optimizer) if optimizer is not None else None
        self._seen: LoopSeen | None = None
        self.counts_this_end = 0
        """1 if the last end was the end of a step; 0 if another optimizer stepped within a step."""
        self.last_to_end = self._first = None
        self.stepped = False
        """Whether any optimizer has stepped."""
        self._scaling: torch.optim.Optimizer | None = None
        self._stepping = False
        """Whether an optimizer's step runs, which may call a closure."""
        self._outermost: ModuleSeen | None = None
        """The module whose forward runs, until it calls another."""
        self._undo: list[Undo] = []

    def start(self) -> None:
        self._undo.append(register_optimizer_step_pre_hook(self._begin_hook()).remove)
        self._undo.append(register_optimizer_step_post_hook(self._hook()).remove)
        self._undo.append(replace(GradScaler, "step", self._around_scaler))
        if self._model is not None or self._optimizer is not None:
            self._look()

    def stop(self) -> None:
        """Take everything off."""
        self._seen = None
        self._phases.recorders = ()
        _let_modules_call(_ORIGINAL_CALL)
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def step(self) -> None:
        """The loop says itself that a step has ended."""
        self._stepped(None)

    def phase_begins(self, name: str) -> None:
        if self._seen is not None and name == BACKWARD:
            self._seen.backwards += 1
            update = self._seen.updates[-1]
            if self._stepping:
                update.closure_backwards += 1
            else:
                update.backwards += 1

    def _look(self) -> None:
        self._seen = LoopSeen(modules=[], optimizers=[])
        self._phases.listen()
        self._phases.recorders = (self,)
        self._undo.append(watch_backward(self._phases))
        self._call = self._noting_call()
        _let_modules_call(self._call)

    def _stepped(self, optimizer: torch.optim.Optimizer | None) -> None:
        seen, self.last_to_end = self._seen, optimizer
        self.stepped = self.stepped or optimizer is not None
        if self._first is None:
            self._first = optimizer
        self.counts_this_end = int(optimizer is None or optimizer is (self._optimizer or self._first))
        if seen is None:
            self._look()
            self._ended(None)
            return
        if optimizer is not None:
            seen.optimizers = [*(each for each in seen.optimizers if each is not optimizer), optimizer]
        seen.updates[-1].optimizer = optimizer
        seen.updates.append(UpdateSeen())
        if self.counts_this_end:
            given = self._optimizer
            self._ended(decide(seen, step_of=self._step_of, model=self._model, optimizer=given, said=optimizer is None))
        else:
            self._ended(None)

    def _begin_hook(self) -> Callable[..., None]:
        def begins(*_: Any) -> None:
            if self._is_the_loops_thread():
                self._stepping = True

        return begins

    def _hook(self) -> Callable[..., None]:
        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if self._is_the_loops_thread():
                self._stepping = False
            if optimizer is not self._scaling and self._is_the_loops_thread():
                self._stepped(optimizer)

        return stepped

    def _around_scaler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            really = bare_optimizer(optimizer)
            self._scaling, before = really, self._scaling
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            finally:
                self._scaling = before
            if before is None and self._is_the_loops_thread():
                self._stepped(really)
            return result

        return step

    def _is_the_loops_thread(self) -> bool:
        return self._phases.thread in (0, get_ident())

    def _noting_call(self) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if get_ident() != self._phases.thread or self._seen is None:
                return _ORIGINAL_CALL(module, *args, **kwargs)
            outermost, self._outermost = self._outermost, None
            _let_modules_call(_ORIGINAL_CALL)
            if outermost is not None:
                # A module may turn autocast on for its parts alone, so the first module that it calls is looked at too.
                outermost.autocast = outermost.autocast or _autocast(outermost.module)
                return _ORIGINAL_CALL(module, *args, **kwargs)
            if torch.is_grad_enabled() and self._phases.part != BACKWARD:
                seen = self._note(module, args, kwargs)
                if not is_compiled(module):
                    self._outermost = seen
                    _let_modules_call(self._call)
            try:
                return _ORIGINAL_CALL(module, *args, **kwargs)
            finally:
                self._outermost = None
                if self._seen is not None:
                    _let_modules_call(self._call)

        return call

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModuleSeen:
        assert self._seen is not None
        seen = next((each for each in self._seen.modules if each.module is module), None)
        if seen is None:
            seen = ModuleSeen(module=module, training=module.training)
            self._seen.modules.append(seen)
        seen.calls += 1
        update = self._seen.updates[-1]
        (update.closure_forwards if self._stepping else update.forwards)[id(module)] += 1
        seen.autocast = seen.autocast or _autocast(module)
        for name, value in (*enumerate(args), *kwargs.items()):
            for inner, tensor in _tensors(str(name), value):
                shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
                seen.inputs.setdefault(inner, set()).add(TensorSeen(shape, dtype))
        return seen


def _let_modules_call(call: Callable[..., Any]) -> None:
    """Make this function the `__call__` of every module's class that has none of its own."""
    nn.Module.__call__ = call  # type: ignore[method-assign]  # Replacing the method is what this function is for.


def _tensors(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an argument: itself, or those that a mapping or a sequence holds."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        yield from ((str(key), each) for key, each in value.items() if isinstance(each, torch.Tensor))
    elif isinstance(value, (list, tuple)):
        yield from ((f"{name}.{i}", each) for i, each in enumerate(value) if isinstance(each, torch.Tensor))


def _autocast(module: nn.Module) -> str | None:
    """The dtype of autocast now, on the device of this module's parameters; None where it is off."""
    parameter = next(module.parameters(), None)
    device = parameter.device.type if parameter is not None else "cpu"
    if not torch.is_autocast_enabled(device):
        return None
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
