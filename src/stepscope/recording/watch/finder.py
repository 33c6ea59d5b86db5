"""Looks at the first whole steps of a loop, to find out what its step is.

Until an optimizer has stepped once, the finder listens for that alone, so code that is compiled or imported before then
never meets a watched function. During the next step it notes every module that the loop itself calls. While such a call
runs, the class's own `__call__` is back in place, so nothing inside the call is touched, compiled or not.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from stepscope.core.range_names import BACKWARD
from stepscope.recording.step import Recorder
from stepscope.recording.watch.loop import (
    BackwardSeen,
    CallSeen,
    LoopSeen,
    LoopStep,
    TensorSeen,
    Unclear,
    UpdateSeen,
    bare_optimizer,
    decide,
    is_compiled,
    others_to_come,
    weakly,
    whole_round,
)
from stepscope.recording.watch.phases import Phases, Undo, end_with_backward, replace, uncompiled, watch_backward

_ORIGINAL_CALL = nn.Module.__call__
_MOST_OF_ONE = 12
"""Updates of one optimizer after which one that has not stepped yet is waited for no longer."""
_MOST_UPDATES = 64
"""Updates of several optimizers after which no round is looked for."""
_MOST_NODES = 50_000
_NO_BACKWARD = -1
"""What autograd gives as the number of the backward that runs, where none does."""


class Finder(Recorder):
    """Listens to a loop until it can tell what a step is; `ended` is called at the end of each update until then.

    If an optimizer is given, its first step is looked at; if not, the step between the first two updates of any. Where
    several step, two rounds of them are looked at.
    """

    _model: nn.Module | None = weakly(or_none=True)
    _optimizer: torch.optim.Optimizer | None = weakly(or_none=True)

    def __init__(
        self,
        phases: Phases,
        ended: Callable[[LoopStep | Unclear | None], None],
        *,
        step_of: str | None = None,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._phases, self._ended = phases, ended
        self._step_of, self._model = step_of, model
        self._optimizer = bare_optimizer(optimizer) if optimizer is not None else None
        self._seen: LoopSeen | None = None
        self.stepped = False
        """Whether any optimizer has stepped."""
        self._turns: list[weakref.ref[torch.optim.Optimizer]] = []
        """The optimizer of each update so far; the same reference for each update of one."""
        self._marked = 0
        """Steps that the loop has said to have ended. From the first one on, updates end nothing."""
        self._in_backward: set[int] = set()
        """The ids of optimizers that step inside backward, as hooks on gradients make them."""
        self._scaling: torch.optim.Optimizer | None = None
        self._stepping = False
        """Whether an optimizer's step runs, which may call a closure."""
        self._outermost: CallSeen | None = None
        """The call that runs, until it calls another module."""
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
        self._turns.clear()
        self._phases.recorders = ()
        self._phases.keeps_roots = False
        _let_modules_call(_ORIGINAL_CALL)
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def step(self) -> None:
        """The loop says itself that a step has ended."""
        self._marked += 1
        loop = self._seen
        if loop is None:
            self._look()
        if loop is None or not (loop.backwards or loop.modules):
            self._ended(None)
            return
        loop.updates.append(UpdateSeen())
        self._ended(decide(loop, model=self._model, marked=True, in_backward=len(self._in_backward)))

    def steps(self, step: LoopStep | None) -> int:
        """Steps that have ended so far. Until it is known what a step is, the updates of the first optimizer."""
        if self._marked:
            return self._marked
        ends = step.optimizer if step is not None else next((each() for each in self._turns), None)
        return sum(each() is ends for each in self._turns if ends is not None)

    def phase_begins(self, name: str) -> None:
        if self._seen is None or name != BACKWARD:
            return
        update = self._seen.updates[-1]
        update.begins_backward(BackwardSeen(self._stepping, self._phases.adds))
        if not update.calls:
            with uncompiled():
                self._seen.leaves |= {id(leaf): leaf for leaf in _leaves(self._phases.roots)}

    def _look(self) -> None:
        self._seen = LoopSeen()
        self._phases.listen()
        self._phases.keeps_roots = True
        self._phases.recorders = (self,)
        self._undo.append(watch_backward(self._phases))
        self._call = self._noting_call()
        _let_modules_call(self._call)

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._marked:
            return
        loop, self.stepped = self._seen, True
        anew = bool(self._turns) and all(each() is None for each in self._turns)
        if anew:  # The loop is over, and another has begun.
            self._turns.clear()
        known = next((each for each in self._turns if each() is optimizer), None)
        self._turns.append(known or weakref.ref(optimizer))
        if loop is None:
            self._look()
        elif anew:
            self._seen = LoopSeen()
        if loop is None or anew:
            self._ended(None)
            return
        loop.updates[-1].optimizer = optimizer
        loop.updates.append(UpdateSeen())
        with uncompiled():
            self._ended(self._answer(loop, optimizer))

    def _answer(self, loop: LoopSeen, optimizer: torch.optim.Optimizer) -> LoopStep | Unclear | None:
        """What a step is, now that this optimizer has stepped; None while that does not show."""
        known, turns = {"step_of": self._step_of, "model": self._model}, self._turns
        if self._optimizer is not None:
            ends = optimizer is self._optimizer
            return decide(self._since_its_last(loop, optimizer), optimizer=optimizer, **known) if ends else None
        alone = len({id(each) for each in turns}) == 1
        patient = len(turns) < (_MOST_OF_ONE if alone else _MOST_UPDATES)
        if self._step_of is not None:
            if sum(each is turns[0] for each in turns) < 2:
                return None
            step = decide(loop, **known)
            if isinstance(step, Unclear):
                return None if patient and others_to_come(loop) else step
            whole = optimizer is step.optimizer and sum(each() is optimizer for each in turns) > 1
            return decide(self._since_its_last(loop, optimizer), **known) if whole else None
        updates = whole_round(turns, at_once=len(loop.updates) > len(turns))
        if updates is not None and not (alone and patient and others_to_come(loop)):
            return decide(loop.last(updates), **known)
        each = [reference() for reference in {id(reference): reference for reference in turns}.values()]
        names = dict.fromkeys(type(one).__name__ for one in each if one is not None)
        reason = f"{len(each)} optimizers step ({', '.join(names)}), in no order that comes again"
        return None if patient else Unclear(reason)

    def _since_its_last(self, loop: LoopSeen, optimizer: torch.optim.Optimizer) -> LoopSeen:
        """What was called since this optimizer's step before its last one."""
        before = [i for i, each in enumerate(self._turns[:-1]) if each() is optimizer]
        return loop.last(len(self._turns) - 1 - before[-1]) if before else loop

    def _begin_hook(self) -> Callable[..., None]:
        def begins(*_: Any) -> None:
            if self._is_the_loops_thread() and torch._C._current_graph_task_id() == _NO_BACKWARD:
                self._stepping = True

        return begins

    def _hook(self) -> Callable[..., None]:
        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if torch._C._current_graph_task_id() != _NO_BACKWARD:
                # From the next one on, each backward ends a step. This may run in a thread of autograd's.
                if not self._in_backward:
                    self._undo.append(end_with_backward(self.step))
                self._in_backward.add(id(optimizer))
                self.stepped = True
                return
            if self._is_the_loops_thread():
                self._stepping = False
            if optimizer is not self._scaling and self._is_the_loops_thread():
                self._stepped(optimizer)

        return stepped

    def _around_scaler(
        self, original: Any, scaler: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        really = bare_optimizer(optimizer)
        self._scaling, before = really, self._scaling
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        finally:
            self._scaling = before
        if before is None and self._is_the_loops_thread():
            self._stepped(really)
        return result

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
            noted = None
            if torch.is_grad_enabled() and self._phases.part != BACKWARD:
                noted = self._note(self._seen, module, args, kwargs)
                if not is_compiled(module):
                    self._outermost = noted
                    _let_modules_call(self._call)
            elif not torch.is_grad_enabled():
                self._seen.called_quietly[id(module)] = module
            try:
                result = _ORIGINAL_CALL(module, *args, **kwargs)
            finally:
                self._outermost = None
                if self._seen is not None:
                    _let_modules_call(self._call)
            if noted is not None:
                _follow(noted, result)
            return result

        return call

    def _note(self, loop: LoopSeen, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallSeen:
        call = CallSeen(module=module, training=module.training, in_closure=self._stepping, autocast=_autocast(module))
        for name, value in (*enumerate(args), *kwargs.items()):
            for inner, tensor in _tensors(str(name), value):
                call.inputs[inner] = TensorSeen(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        loop.updates[-1].calls.append(call)
        return call


def _follow(call: CallSeen, result: Any) -> None:
    """Let the call know when a backward comes to what it returned."""

    for leaf in tree_leaves(result):
        # What a module returns may also be an object that has tensors as attributes.
        values = (leaf,) if isinstance(leaf, torch.Tensor) else getattr(leaf, "__dict__", {}).values()
        for tensor in values:
            if isinstance(tensor, torch.Tensor) and tensor.dim():
                call.sizes.add(tensor.shape[0])
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_hook(lambda *_: setattr(call, "reached", True))


def _leaves(roots: Any) -> Iterator[torch.Tensor]:
    """The tensors whose gradients a backward from these tensors makes."""
    waiting: list[Any] = [root.grad_fn for root in tree_leaves(roots) if isinstance(root, torch.Tensor)]
    visited: set[Any] = set()
    while waiting and len(visited) < _MOST_NODES:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [following for following, _ in node.next_functions]


def next_backward() -> int:
    """The number of a backward that this runs on a CPU. Autograd numbers all of this process, from 0."""
    numbers: list[int] = []
    with torch.inference_mode(False), torch.enable_grad():
        probe = torch.zeros((), device="cpu", requires_grad=True).clone()
        probe.register_hook(lambda _: numbers.append(torch._C._current_graph_task_id()))
        # The engine itself: what a script may have put in place of `backward` is left alone.
        Variable._execution_engine.run_backward(
            (probe,), (torch.ones((), device="cpu"),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    return numbers[0]


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


def _autocast(module: nn.Module | None) -> str | None:
    """The dtype of autocast now, on the device of this module's parameters; None where it is off."""
    parameter = next(module.parameters(), None) if module is not None else None
    device = parameter.device.type if parameter is not None else "cpu"
    if not torch.is_autocast_enabled(device):
        return None
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
