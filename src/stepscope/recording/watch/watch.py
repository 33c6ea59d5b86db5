"""The Watch finds out what a step of a loop is, tells recorders of the steps, stage by stage, and takes itself off."""

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from statistics import median
from threading import get_ident
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stepscope.core.evidence import Saved
from stepscope.recording.habits import users_line
from stepscope.recording.step import Recorder
from stepscope.recording.watch.finder import Finder, next_backward
from stepscope.recording.watch.loop import LoopStep, Unclear
from stepscope.recording.watch.phases import (
    OptimizerWatch,
    Phases,
    ScriptProfilers,
    Undo,
    end_with_backward,
    replace,
    uncompiled,
    watch_backward,
    watch_data,
    watch_forward,
)

# Notes what a watched loop saves, so that a step which writes a checkpoint has a name.


class Saves:
    """The calls of `torch.save` in the loop's thread, by steps. A library that writes files in another way, as
    safetensors does, is not seen."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        """Seconds of each step that saves, by its number."""
        self._where = ""

    def watch(self, phases: Phases, step: Callable[[], int]) -> Undo:
        """Note the calls from now on. step: returns the number of the step that is under way."""

        def save(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if get_ident() != phases.thread:
                return original(*args, **kwargs)
            began_s, number = time.perf_counter(), step()
            try:
                return original(*args, **kwargs)
            finally:
                took_s = time.perf_counter() - began_s
                self._seconds[number] = self._seconds.get(number, 0.0) + took_s
                if not self._where and (line := users_line()) is not None:
                    self._where = line.where

        return replace(torch, "save", save)

    def of(self, spans: Sequence[tuple[int, int]]) -> Saved | None:
        """What the steps with these numbers saved, the first and the last of each span; None where they saved
        nothing."""
        took = [took_s for step, took_s in self._seconds.items() if any(first <= step <= last for first, last in spans)]
        if not took:
            return None
        of = sum(last - first + 1 for first, last in spans)
        return Saved(where=self._where, steps=len(took), of=of, median_s=median(took))


_MOST_HELD = 16
"""Steps that are recorded beyond those wanted while a range of the script stays open."""


class Stage(Protocol):
    """A stage does something with some of a loop's steps. Its methods run between two steps, and are no part of
    either."""

    name: str
    recorders: tuple[Recorder, ...]
    """The recorders that are told of the stage's steps."""

    def begins(self, step: int) -> None:
        """Begin the stage, whose first step has this number."""
        ...

    def is_over(self, step: int) -> bool:
        """Whether the step of this number, which has just ended, was its last."""
        ...

    def ends(self) -> None:
        """Keep what was recorded. This is called once, also if the loop has ended in the middle."""
        ...


class Recording(Stage, Protocol):
    """A stage in which a profiler or the allocator records. It begins and stops only where the script has no range
    open, and gives way to what the script itself starts."""

    gave_way: bool
    """Whether it has kept nothing, since the script started a profiler of its own: it may begin again."""

    def blocked(self) -> str | None:
        """Why it cannot begin now; None if it can."""
        ...

    def give_way(self) -> None:
        """Stop at once, and keep nothing."""
        ...


class WatchOwner(Protocol):
    """The owner of a Watch, who is told what becomes of it."""

    def stages_for(self, loop: LoopStep, first_step: int) -> Sequence[Stage]:
        """Take note of what a step is. Returns the stages for the steps from this number on."""
        ...

    def unclear_step(self, reason: str) -> None:
        """Take note that it cannot be told what a step is, and that the Watch has ended."""
        ...

    def finish(self) -> None:
        """Take note that every stage is over. The loop goes on without the Watch."""
        ...

    def stage_failed(self, stage: str, error: Exception) -> None:
        """Take note that a stage has raised this error. The next stage follows."""
        ...

    def loop_gone(self) -> None:
        """Take note that the model or the optimizer is no more, so that the loop has ended."""
        ...


class Watch:
    """Watches the loop of the thread in which an optimizer steps first, from `start` until its stages are over.

    An error of the watch itself never reaches the loop.
    """

    def __init__(
        self,
        owner: WatchOwner,
        *,
        step_of: str | None = None,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        profilers: ScriptProfilers | None = None,
    ) -> None:
        """profilers: what the script itself profiles; needed where a stage records."""
        self.phases = Phases()
        self.saves = Saves()
        self.steps = 0
        """Steps that have ended."""
        self.ended_s = 0.0
        """When the last one ended, by the monotonic clock."""
        self.step_is_compiled = False
        """Whether the step ends inside of what the loop has compiled."""
        self.left_out: dict[str, str | None] = {}
        """The names of the stages that are not over, and why they could not begin; None where the loop had ended."""
        self._owner, self._profilers = owner, profilers
        self._finder = Finder(self.phases, self._looked, step_of=step_of, model=model, optimizer=optimizer)
        self._stages: list[Stage] = []
        self._stage: Stage | None = None
        self._records = False
        """Whether the stage that is under way records."""
        self._blocked: dict[str, str] = {}
        """Why stages could not begin when that was looked at last, by their names."""
        self._held = 0
        """Steps by which the stage has outlasted its own, since a range was open."""
        self._lives: list[weakref.ref[Any]] = []
        self._undo: list[Undo] = []
        self._knows = self.marked = False
        self.running = False

    @property
    def stage(self) -> str:
        """The stage that is under way."""
        return self._stage.name if self._stage is not None else "start"

    @property
    def optimizer_stepped(self) -> bool:
        """Whether any optimizer has stepped yet."""
        return self._finder.stepped

    def start(self) -> None:
        self.running = True
        _watches.add(self)
        if self._profilers is not None:
            self._profilers.start()
        self._finder.start()

    def stop(self) -> None:
        """Take everything off. The stage that is under way keeps what it has."""
        if not self.running:
            return
        self.running = False
        stage, self._stage = self._stage, None
        self.left_out = {each.name: self._blocked.get(each.name) for each in (stage, *self._stages) if each is not None}
        self._stages.clear()
        self._take_off()
        if stage is not None:
            self._guarded(stage.name, stage.ends)

    def step(self) -> None:
        """Note that the loop itself says that a step has ended. From then on no other end counts."""
        if not self.running:
            return
        self.marked = True
        if self._knows:
            self._step_ended()
        else:
            self._finder.step()

    def leave_alone(self) -> None:
        """Stop counting, as in a child that was forked."""
        self.running = False
        self.phases.pause()
        self._stages.clear()
        self._stage = None
        if self._profilers is not None:
            self._profilers.stop()

    def _take_off(self) -> None:
        self.phases.recorders = ()
        self.phases.pause()
        self._finder.stop()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        if self._profilers is not None:
            self._profilers.stop()

    def _looked(self, answer: LoopStep | Unclear | None) -> None:
        """Take the finder's answer at the end of a step that it looked at."""
        if not self.running:
            return
        self.steps = self._finder.steps(answer if isinstance(answer, LoopStep) else None)
        if isinstance(answer, Unclear):
            self.running = False
            self._take_off()
            self._owner.unclear_step(answer.reason)
        elif answer is not None:
            self._guarded("start", lambda: self._begin(answer))

    def _begin(self, step: LoopStep) -> None:
        """Begin the stages. From here on nothing of the loop is kept alive."""
        self._finder.stop()
        self._knows, self.ended_s = True, time.monotonic()
        self._stages = list(self._owner.stages_for(step, self.steps))
        phases = self.phases
        for root in step.roots:
            self._undo.append(watch_forward(root.module, phases, training=root.training))
        self._undo += [watch_forward(module, phases, training=None) for module in step.quiet]
        self._undo += [watch_backward(phases), watch_data(phases), self.saves.watch(phases, lambda: self.steps)]
        if step.in_backward:
            self._undo.append(end_with_backward(self._backward_ended))
        if step.optimizers:
            self._undo.append(OptimizerWatch(step.optimizers, phases, self._optimizer_ended).install())
        vital = (step.forward_module, *step.optimizers[:1])
        self._lives = [weakref.ref(each, self._died) for each in vital]
        phases.listen()
        self._next_stage()

    def _backward_ended(self) -> None:
        if threading.get_ident() == self.phases.thread and not self.marked:
            self._step_ended()

    def _died(self, _: object) -> None:
        # This may run anywhere, in any thread. A profiler stops only where the loop enters something.
        if self.running:
            self.phases.before_the_next = self._loop_is_gone

    def _loop_is_gone(self) -> None:
        if self.running:
            self._guarded("finish", self._owner.loop_gone)
            self.stop()

    def _optimizer_ended(self) -> None:
        if not self.marked:
            self._step_ended()

    def _step_ended(self) -> None:
        phases, stage = self.phases, self._stage
        if phases.depth:
            return
        if stage is None:
            if self._stages:
                self.steps += 1
                self._next_stage()
        elif not (self._records and self._once_closed(self._step_ended, self._step_is_held)):
            self._end_step(stage)

    def _once_closed(self, call: Callable[[], None], otherwise: Callable[[], None]) -> bool:
        """Make a call as soon as the script has no range open, or the other where the loop enters something before.
        Returns whether a range is open."""
        profilers, phases = self._profilers, self.phases
        if profilers is None or profilers.open_range() is None:
            return False

        def closed() -> None:
            phases.before_the_next = None
            call()

        def entered() -> None:
            profilers.when_closed = None
            otherwise()

        profilers.when_closed, phases.before_the_next = closed, entered
        return True

    def _step_is_held(self) -> None:
        """A step has ended inside a range of the script, so what records goes on recording."""
        stage = self._stage
        if stage is None:
            return
        self._held += 1
        if _records(stage) and self._held > _MOST_HELD:
            stage.give_way()
            self._end_step(stage)
            return
        self.phases.step_ends()
        self.steps += 1
        self.phases.step_begins()

    def _end_step(self, stage: Stage) -> None:
        phases = self.phases
        before = set_eval_frame(None)  # As `uncompiled` does, which takes longer: this runs once a step.
        try:
            phases.step_ends()
            self.steps += 1
            self.ended_s = time.monotonic()
            self.step_is_compiled = self.step_is_compiled or before is not None
            over = stage.is_over(self.steps - 1)
        except Exception as error:  # An error of the watch must not end the loop that is watched.
            self._owner.stage_failed(stage.name, error)
            over = True
        finally:
            set_eval_frame(before)
        if over:
            self._blocked.pop(stage.name, None)
            self._guarded(stage.name, stage.ends)
            if _records(stage) and stage.gave_way:
                self._stages.insert(0, stage)
            self._next_stage()
        else:
            phases.step_begins()
            if self._stages and not self._records and all(map(_records, self._stages)):
                self._offer_turn()

    def _offer_turn(self) -> None:
        """Pause the stage, if another one can begin now, or once the script has closed its range."""
        stage = self._stage
        if stage is None:
            return
        if all(self._is_blocked(each) for each in self._stages):
            self._once_closed(self._offer_turn, lambda: None)
            return
        self._guarded(stage.name, stage.ends)
        self._stages.append(stage)
        self._next_stage()

    def _is_blocked(self, stage: Stage) -> bool:
        reason = stage.blocked() if _records(stage) else None
        if reason is not None:
            self._blocked[stage.name] = reason
        return reason is not None

    def _next_stage(self) -> None:
        """Begin the first stage that can begin."""
        self._stage = None
        self.phases.recorders = ()
        for stage in tuple(self._stages):
            if self._is_blocked(stage):
                continue
            self._stages.remove(stage)
            self._stage, self._records, self._held = stage, _records(stage), 0
            if self._guarded(stage.name, lambda stage=stage: stage.begins(self.steps)):
                self.phases.recorders = stage.recorders
                self.phases.step_begins()
                return
        self._stage = None
        if self._stages:
            self._once_closed(self._next_stage, lambda: None)
            return
        self.stop()
        self._guarded("finish", self._owner.finish)

    def _guarded(self, stage: str, call: Callable[[], None]) -> bool:
        try:
            with uncompiled():
                call()
        except Exception as error:  # An error of the watch must not end the loop that is watched.
            self._owner.stage_failed(stage, error)
            if stage == "start":
                self._take_off()
                self.running = False
            return False
        return True


def _records(stage: Stage) -> TypeGuard[Recording]:
    return hasattr(stage, "give_way")


class StepCount:
    """The steps of a loop and its waiting for data: as its Watch counts them, then by itself until it is stopped.

    What stays of a watch is a hook after the optimizer's step and a wrapper round a DataLoader's next. A step that is
    compiled, which a hook would break in two, and one that ends inside backward have no hook: autograd numbers its
    backwards, and one of our own now and then tells how many there were.
    """

    def __init__(self, watch: Watch, step: LoopStep) -> None:
        self._watch: Watch | None = watch
        self._optimizer = weakref.ref(step.optimizer) if step.optimizer is not None else None
        self._in_backward, self._backwards = step.in_backward > 0, max(1, step.backwards)
        self._ended = (0, 0.0, 0.0)
        self._waited_s, self._waits = 0.0, False
        self._first_step = self._first_backward = self._own_backwards = 0
        self._by_backwards = False
        self._undo: list[Undo] = []

    @property
    def waits(self) -> bool | None:
        """Whether a DataLoader was asked for a batch; None while the Watch counts."""
        return self._waits if self._watch is None else None

    def go_on(self) -> None:
        """Count without the Watch, which has ended with a step of this thread."""
        watch, optimizer = self._watch, self._optimizer() if self._optimizer is not None else None
        if watch is None:
            return
        self._watch, steps = None, watch.steps
        self._ended = (steps, time.monotonic(), 0.0)
        if not watch.marked and (optimizer is None or self._in_backward or watch.step_is_compiled):
            self._by_backwards, self._first_step, self._first_backward = True, steps, next_backward()
        elif optimizer is not None and not watch.marked:
            self._undo.append(optimizer.register_step_post_hook(self._after_step()).remove)
        self._undo.append(replace(_BaseDataLoaderIter, "__next__", self._next_batch(get_ident())))

    def mark(self) -> None:
        """Note that the loop itself says that a step has ended."""
        if self._watch is None:
            self._ended = (self._ended[0] + 1, time.monotonic(), self._waited_s)

    def read(self) -> tuple[int, float, float]:
        """Steps that have ended, when the last one did by the monotonic clock, and seconds waited for data by then."""
        watch = self._watch
        if watch is not None:
            return watch.steps, watch.ended_s, 0.0
        if self._by_backwards:
            self._own_backwards += 1
            backwards = next_backward() - self._first_backward - self._own_backwards
            steps = self._first_step + backwards // self._backwards
            if steps > self._ended[0]:
                self._ended = (steps, time.monotonic(), self._waited_s)
        return self._ended

    def stop(self) -> None:
        """Take off what is left."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    # Plain functions: a copy of a bound method would copy this object with it.
    def _after_step(self) -> Callable[..., None]:
        def stepped(*_: Any) -> None:
            self._ended = (self._ended[0] + 1, time.monotonic(), self._waited_s)

        return stepped

    def _next_batch(self, thread: int) -> Callable[..., Any]:
        def next_batch(original: Callable[..., Any], loader: Any) -> Any:
            if get_ident() != thread:
                return original(loader)
            began_s = time.monotonic()
            try:
                return original(loader)
            finally:
                self._waited_s, self._waits = self._waited_s + time.monotonic() - began_s, True

        return next_batch


_watches: "weakref.WeakSet[Watch]" = weakref.WeakSet()


def watching() -> bool:
    """Whether a loop of this process is watched now."""
    return any(watch.running for watch in _watches)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [watch.leave_alone() for watch in list(_watches)])
