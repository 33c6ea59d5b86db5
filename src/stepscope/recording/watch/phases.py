"""Knows which part of a watched step is open, from what the loop enters and leaves, and tells recorders."""

import contextlib
import functools
import os
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.amp.grad_scaler import GradScaler
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerAction
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stepscope.core.range_names import BACKWARD, DATA, EVALUATION, FORWARD, OPTIMIZER, REST
from stepscope.recording.habits import users_line
from stepscope.recording.ranges import OwnRange
from stepscope.recording.step import Recorder
from stepscope.recording.watch.loop import bare_optimizer, class_name

_OPENS_INSIDE: dict[str, frozenset[str]] = {
    REST: frozenset((DATA, FORWARD, BACKWARD, OPTIMIZER, EVALUATION)),
    OPTIMIZER: frozenset((REST,)),
    FORWARD: frozenset((BACKWARD,)),
    BACKWARD: frozenset[str](),
    DATA: frozenset[str](),
    EVALUATION: frozenset[str](),
}
"""The parts that may open inside each part. An optimizer's step may call a closure, which is the rest of the step but
for what opens in it. The forward that checkpointing runs again inside backward is backward."""


class Phases:
    """The parts of one thread's steps. At any moment exactly one is open, so together they make up the step."""

    def __init__(self) -> None:
        self.recorders: tuple[Recorder, ...] = ()
        self.thread = 0
        """The thread whose calls count; 0 while none do."""
        self.failed: str | None = None
        """The part through which the last exception passed, until the step ends."""
        self.keeps_roots = False
        """Whether `roots` is wanted: it keeps the graph alive while backward runs."""
        self.roots: Any = None
        """The tensors that the open backward began at."""
        self.adds = True
        """Whether the open backward adds to gradients, as that of `torch.autograd.grad` does not."""
        self.keeps_inputs = False
        """Whether `inputs` is wanted."""
        self.inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """What the open forward was called with."""
        self.heard: Callable[[Any], None] | None = None
        """Is called with what a forward returned, where inputs are wanted."""
        self.evaluated: dict[type, tuple[str, str]] = {}
        """The class of each module that was called with gradients off, and the user's line of its first such call."""
        self.before_the_next: Callable[[], None] | None = None
        """A call that waits until the loop enters something again."""
        self._open: list[str] = [REST]

    def listen(self) -> None:
        """Count the calls of this thread from now on."""
        self.thread = threading.get_ident()
        self._open = [REST]

    def pause(self) -> None:
        """Stop counting calls."""
        self.thread = 0

    @property
    def depth(self) -> int:
        """The depth of what the loop entered last; 0 where it has left everything that it entered."""
        return len(self._open) - 1

    @property
    def part(self) -> str:
        """The part that is open now."""
        return self._open[-1]

    def inside(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a call while a part of the step is open. Afterwards the part is left, with all that the call left open
        inside."""
        depth = self.enter(name)
        try:
            return call(*args, **kwargs)
        except BaseException:
            self.fail()
            raise
        finally:
            self.leave_to(depth)

    def enter(self, name: str) -> int:
        """Note that the loop enters this part. Returns the depth, for `leave_to`."""
        if self.before_the_next is not None:
            waiting, self.before_the_next = self.before_the_next, None
            waiting()
        parts = self._open
        outside = parts[-1]
        inside = name if name in _OPENS_INSIDE[outside] else outside
        parts.append(inside)
        if inside is not outside:
            self._change(outside, inside)
        return len(parts) - 1

    def leave_to(self, depth: int) -> None:
        """Leave what was entered at this depth, and what was left open inside it."""
        parts = self._open
        while len(parts) > depth:
            inside = parts.pop()
            outside = parts[-1]
            if inside is not outside:
                self._change(inside, outside)

    def fail(self) -> None:
        """Note that an exception passes through what was entered last."""
        if self.failed is None:
            self.failed = self._open[-1]
            for recorder in self.recorders:
                recorder.phase_failed(self.failed)

    def step_begins(self) -> None:
        self.failed = None
        for recorder in self.recorders:
            recorder.step_begins()

    def step_ends(self) -> None:
        for recorder in self.recorders:
            recorder.step_ends()

    def _change(self, before: str, after: str) -> None:
        for recorder in self.recorders:
            if before is EVALUATION:
                recorder.evaluation_ends()
            elif before is not REST:
                recorder.phase_ends(before)
            if after is EVALUATION:
                recorder.evaluation_begins()
            elif after is not REST:
                recorder.phase_begins(after)


# ---- the places where a loop enters a part of its step, watched from outside: each function returns what undoes it
#
# Nothing is registered on a module, and nothing is hooked inside one. A hook on the instance would be copied and
# pickled with the model, and would run inside what `model.compile()` compiled. `torch.compile` warns of global hooks.
# The `__call__` of the instance's class is watched instead: no copy, no pickle and no compiled region holds it.


Undo = Callable[[], object]
_MISSING = object()


def replace(owner: Any, name: str, call: Callable[..., Any]) -> Undo:
    """Replace a function by a wrapper that hands it to `call` with its arguments, if there is such an attribute.
    Returns what puts the original back.

    If somebody else has wrapped it again since then, that wrapper stays, and ours below it does nothing more. Two of
    ours on one attribute are undone in reverse order, or the first would stay.
    """
    original = getattr(owner, name, None)
    if original is None:
        return lambda: None
    instance_attribute = vars(owner).get(name, _MISSING)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    setattr(owner, name, wrapper)

    def undo() -> None:
        if vars(owner).get(name) is not wrapper:
            return
        if instance_attribute is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, instance_attribute)

    return undo


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """A context in which Dynamo compiles nothing, though a compiled function of the loop may have called."""
    before = set_eval_frame(None)
    try:
        yield
    finally:
        set_eval_frame(before)


def watch_forward(module: nn.Module, phases: Phases, *, training: bool | None) -> Undo:
    """Open forward while this module is called with gradients on, in the mode in which it trains, and evaluation while
    it is called with gradients off. training: that mode; None for a module that does not train."""
    watched = weakref.ref(module)

    def call(original: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is not watched() or get_ident() != phases.thread:
            return original(self, *args, **kwargs)
        if not torch.is_grad_enabled():
            if type(self) not in phases.evaluated:
                line = users_line()
                phases.evaluated[type(self)] = class_name(self), line.where if line is not None else ""
            return phases.inside(EVALUATION, original, self, *args, **kwargs)
        if self.training is not training:
            return original(self, *args, **kwargs)
        if not phases.keeps_inputs:
            return phases.inside(FORWARD, original, self, *args, **kwargs)
        phases.inputs = args, kwargs
        try:
            output = phases.inside(FORWARD, original, self, *args, **kwargs)
        finally:
            phases.inputs = None
        if phases.heard is not None:
            phases.heard(output)
        return output

    return replace(type(module), "__call__", call)


def watch_backward(phases: Phases) -> Undo:
    """Open backward while autograd's engine runs, which `torch.autograd.backward` and `grad` call."""

    def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if get_ident() != phases.thread:
            return original(*args, **kwargs)
        if phases.keeps_roots and args:
            phases.roots = args[0]
        phases.adds = kwargs.get("accumulate_grad", True)
        try:
            return phases.inside(BACKWARD, original, *args, **kwargs)
        finally:
            phases.roots = None

    return replace(torch.autograd, "_engine_run_backward", run)


def end_with_backward(ended: Callable[[], None]) -> Undo:
    """Call this whenever autograd's engine has run."""

    def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        ended()
        return result

    return replace(torch.autograd, "_engine_run_backward", run)


def watch_data(phases: Phases) -> Undo:
    """Open data while a DataLoader is asked for its next batch."""

    def next_batch(original: Callable[..., Any], self: Any) -> Any:
        return phases.inside(DATA, original, self) if get_ident() == phases.thread else original(self)

    return replace(_BaseDataLoaderIter, "__next__", next_batch)


class OptimizerWatch:
    """Opens optimizer while one of these optimizers steps, or a GradScaler decides whether it steps.

    `ended` is called when a step of the first optimizer ends, also where the scaler has left the update out. PyTorch's
    range round the step may then still be open.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], phases: Phases, ended: Callable[[], None]) -> None:
        self._optimizers = [weakref.ref(each) for each in optimizers]
        self._phases, self._ended = phases, ended
        self._around = 0
        """The number of our wrappers, round a step or a scaler's step, that are entered."""

    def install(self) -> Undo:
        undo: list[Undo] = [replace(GradScaler, "step", self._around_scaler)]
        for optimizer in filter(None, (each() for each in self._optimizers)):
            # The hooks see every step, however it is called. Only the wrapper ends outside of PyTorch's range. A
            # learning rate's scheduler may wrap the step too, and Accelerate may throw the wrapper away.
            undo.append(optimizer.register_step_pre_hook(self._begin_hook()).remove)
            undo.append(optimizer.register_step_post_hook(self._end_hook()).remove)
            undo.append(self._wrap_step(optimizer))

        return lambda: [each() for each in reversed(undo)]

    # Plain functions: a copy of a bound method would copy this object with it. A wrapper that is entered knows already.
    def _begin_hook(self) -> Callable[..., None]:
        def begins(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            phases = self._phases
            if self._around:
                return _with_watched_closure(phases, args, kwargs) if kwargs or len(args) > 1 else None
            if get_ident() != phases.thread:
                return None
            phases.leave_to(1)  # after an exception that the loop caught, an optimizer's step has no end
            phases.enter(OPTIMIZER)
            return _with_watched_closure(phases, args, kwargs)

        return begins

    def _end_hook(self) -> Callable[..., None]:
        def ends(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            phases = self._phases
            if self._around or get_ident() != phases.thread or not phases.depth:
                return
            phases.leave_to(phases.depth)
            if optimizer is self._optimizers[0]():
                self._ended()

        return ends

    def _wrap_step(self, optimizer: torch.optim.Optimizer) -> Undo:
        """Wrap the step of this optimizer, by a method of it, as a scheduler that is made meanwhile expects. Nothing
        here keeps the optimizer alive, not even a circle."""
        watched, phases, instance_step = weakref.ref(optimizer), self._phases, vars(optimizer).get("step", _MISSING)
        step_of: Any = optimizer.step
        bound = getattr(step_of, "__self__", None) is optimizer
        original: Any = step_of.__func__ if bound else step_of

        def step(_: Any, *args: Any, **kwargs: Any) -> Any:
            this = watched()
            assert this is not None  # it is the one that is called
            run = original.__get__(this) if bound else original
            if get_ident() != phases.thread:
                return run(*args, **kwargs)
            return self._call(this, run, *args, **kwargs)

        wrapper: Any = types.MethodType(functools.update_wrapper(step, original), weakref.proxy(optimizer))
        optimizer.step = wrapper

        def undo() -> None:
            this = watched()
            if this is None or vars(this).get("step") is not wrapper:
                return
            if instance_step is _MISSING:
                del this.step
            else:
                this.step = instance_step

        return undo

    def _around_scaler(
        self, original: Any, scaler: GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        ours = any(bare_optimizer(optimizer) is each() for each in self._optimizers)
        if not ours or get_ident() != self._phases.thread:
            return original(scaler, optimizer, *args, **kwargs)
        return self._call(bare_optimizer(optimizer), original, scaler, optimizer, *args, **kwargs)

    def _call(self, optimizer: torch.optim.Optimizer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._around and self._phases.depth:
            self._phases.leave_to(1)
        self._around += 1
        try:
            result = self._phases.inside(OPTIMIZER, original, *args, **kwargs)
        finally:
            self._around -= 1
        if not self._around and optimizer is self._optimizers[0]():
            self._ended()
        return result


def _with_watched_closure(phases: Phases, args: Any, kwargs: dict[str, Any]) -> Any:
    """The arguments of an optimizer's step, in whose closure the rest of the step is open; None without a closure."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None

    @functools.wraps(closure)
    def watched(*arguments: Any, **named: Any) -> Any:
        return phases.inside(REST, closure, *arguments, **named)

    if "closure" in kwargs:
        return args, {**kwargs, "closure": watched}
    return (args[0], watched, *args[2:]), kwargs


# Knows what of PyTorch's profiler the script itself uses, beside which a profiler of ours must not run.
#
# PyTorch has one profiler a thread. Who starts a second one ends the first, and keeps nothing of it. A range that
# begins under a profiler and ends after it writes into memory that the profiler has freed.


_AHEAD = 32
"""Steps of a script's profiler, by its schedule, in which it must do nothing for ours to begin."""
_SCHEDULE = torch.profiler.schedule(wait=1, warmup=1, active=1).__code__
_LOG_LEVEL, _SILENT = "KINETO_LOG_LEVEL", "99"

Range = torch.profiler.record_function


class ScriptProfilers:
    """The script's open ranges and its profilers, from `start` to `stop`."""

    def __init__(self) -> None:
        self._ranges: dict[int, tuple[int, weakref.ref[Range]]] = {}
        """The ranges that are open: the thread and the range, by its id."""
        self._profilers: weakref.WeakSet[Any] = weakref.WeakSet()
        """The script's profilers between start and stop."""
        self._ours = False
        self._give_way: Callable[[], None] | None = None
        """Ends what of ours is running, since the script starts its own."""
        self.when_closed: Callable[[], None] | None = None
        """A call that waits until no range is open on its thread."""
        self._undo: list[Undo] = []

    def start(self) -> None:
        kineto = torch.profiler.profile
        self._undo += [
            replace(Range, "__enter__", self._noting_enter),
            replace(Range, "__exit__", self._noting_exit),
            replace(kineto, "start", self._noting_start),
            replace(kineto, "stop", self._noting_stop),
            *(replace(autograd_profiler, name, self._giving_way) for name in ("_prepare_profiler", "_enable_profiler")),
            replace(torch.cuda.memory, "_record_memory_history", self._giving_way),
        ]

    def stop(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._ranges.clear()
        self.when_closed = self._give_way = None

    def open_range(self) -> str | None:
        """The name of the script's outermost range that is open on this thread."""
        here = get_ident()
        known = (each() for thread, each in list(self._ranges.values()) if thread == here)
        return next((each.name for each in known if each is not None and not isinstance(each, OwnRange)), None)

    def profiling(self) -> str | None:
        """Why no profiler of ours may begin now; None if one may."""
        if autograd_profiler._is_profiler_enabled or any(map(_will_record, list(self._profilers))):
            return "the script's own profiler is on: leave it out to record"
        if (name := self.open_range()) is not None:
            return f"the script's range {name!r} is open where its steps end: close it once a step"
        return None

    def recording_memory(self) -> str | None:
        """Why no history of allocations on a GPU may begin now; None if one may."""
        enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
        return "the script records the history of allocations itself" if enabled is not None and enabled() else None

    @contextlib.contextmanager
    def ours(self, give_way: Callable[[], None] | None) -> Iterator[None]:
        """A context in which a profiler of ours starts or stops. From then on `give_way` is called if the script starts
        its own; None when ours has stopped."""
        quiet = _LOG_LEVEL not in os.environ
        if quiet:
            os.environ[_LOG_LEVEL] = _SILENT  # PyTorch says on stderr that a profiler starts
        outside, self._ours = self._ours, True
        if give_way is None:
            self._end_ranges()
        try:
            yield
        finally:
            self._ours, self._give_way = outside, give_way
            if quiet:
                os.environ.pop(_LOG_LEVEL, None)

    def _end_ranges(self) -> None:
        """End the open ranges for the profiler. What the script does at their end has then no effect."""
        here = get_ident()
        for thread, reference in reversed(list(self._ranges.values())):
            known = reference()
            record = getattr(known, "record", None)
            if thread == here and record is not None:
                with torch._C.DisableTorchFunctionSubclass():
                    torch.ops.profiler._record_function_exit._RecordFunction(record)

    def _noting_enter(self, original: Callable[..., Any], of: Range) -> Any:
        entered, key = original(of), id(of)
        self._ranges[key] = (get_ident(), weakref.ref(of, lambda _: self._ranges.pop(key, None)))
        return entered

    def _noting_exit(self, original: Callable[..., Any], of: Range, *error: Any) -> Any:
        self._ranges.pop(id(of), None)
        left = original(of, *error)
        if self.when_closed is not None and self.open_range() is None:
            waiting, self.when_closed = self.when_closed, None
            waiting()
        return left

    def _noting_start(self, original: Callable[..., Any], of: Any) -> Any:
        if not self._ours:
            self._profilers.add(of)
        return original(of)

    def _noting_stop(self, original: Callable[..., Any], of: Any) -> Any:
        try:
            return original(of)
        finally:
            self._profilers.discard(of)

    def _giving_way(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._ours and self._give_way is not None:
            give_way, self._give_way = self._give_way, None
            with self.ours(None):
                give_way()
        return original(*args, **kwargs)


def _will_record(profiler: Any) -> bool:
    """Whether a profiler of the script records, or may do so within the next steps. One by PyTorch's own schedule may
    be idle, or at its end."""
    if getattr(profiler.schedule, "__code__", None) is not _SCHEDULE:
        return True
    ahead = range(profiler.step_num, profiler.step_num + _AHEAD)
    return any(profiler.schedule(step) is not ProfilerAction.NONE for step in ahead)
