"""The Watch finds out what a step of a loop is, tells recorders of the steps, stage by stage, and takes itself off."""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from stepscope.measure.step import Recorder
from stepscope.measure.watch.entry_points import (
    OptimizerWatch,
    Undo,
    end_with_backward,
    watch_backward,
    watch_data,
    watch_forward,
    watch_quiet,
)
from stepscope.measure.watch.finder import Finder
from stepscope.measure.watch.found import Found, Unclear
from stepscope.measure.watch.phases import Phases


class Stage(Protocol):
    """A stage does something with some of a loop's steps. Its methods run between two steps, and are no part of
    either."""

    name: str
    has_a_profiler: bool
    """Whether a profiler starts or stops between the stage's steps."""

    @property
    def recorders(self) -> tuple[Recorder, ...]:
        """The recorders that are told of the stage's steps."""
        ...

    def begins(self, step: int) -> None:
        """Begin the stage, whose first step has this number."""
        ...

    def is_over(self, step: int) -> bool:
        """Whether the step of this number, which has just ended, was its last."""
        ...

    def ends(self) -> None:
        """Keep what was recorded. This is called once, also if the loop has ended in the middle."""
        ...


class Told(Protocol):
    """The owner of a Watch, who is told what becomes of it."""

    def found(self, found: Found, first_step: int) -> Sequence[Stage]:
        """Take note of what a step is. Returns the stages for the steps from this number on."""
        ...

    def unclear_step(self, reason: str) -> None:
        """Take note that it cannot be told what a step is, and that the Watch has ended."""
        ...

    def stages_over(self) -> None:
        """Take note that every stage is over. The loop goes on without the Watch."""
        ...

    def stage_failed(self, stage: str, error: Exception) -> None:
        """Take note that a stage has raised this error. The next stage follows."""
        ...


class Watch:
    """Watches the loop of the thread in which an optimizer steps first, from `start` until its stages are over.

    An error of the watch itself never reaches the loop.
    """

    def __init__(
        self,
        told: Told,
        *,
        step_of: str | None = None,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.phases = Phases()
        self.steps = 0
        """Steps that have ended."""
        self.found: Found | None = None
        self.left_out: tuple[str, ...] = ()
        """Names of the stages that got no steps, since the loop had ended."""
        self._told = told
        self._finder = Finder(self.phases, self._looked, step_of=step_of, model=model, optimizer=optimizer)
        self._stages: list[Stage] = []
        self._stage: Stage | None = None
        self._undo: list[Undo] = []
        self._said = False
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
        self._finder.start()

    def stop(self) -> None:
        """Take everything off. The stage that is under way keeps what it has."""
        if not self.running:
            return
        self.running = False
        stage, self._stage = self._stage, None
        self.left_out = tuple(each.name for each in self._stages)
        self._stages.clear()
        self._take_off()
        if stage is not None:
            self._guarded(stage.name, stage.ends)

    def step(self) -> None:
        """Note that the loop itself says that a step has ended. From then on no other end counts."""
        if not self.running:
            return
        if self.found is None:
            self._said = True
            self._finder.step()
            return
        self._said = True
        self._step_ended()

    def leave_alone(self) -> None:
        """Stop counting, as in a child that was forked."""
        self.running = False
        self.phases.pause()
        self._stages.clear()
        self._stage = None

    def _take_off(self) -> None:
        self.phases.recorders = ()
        self.phases.pause()
        self._finder.stop()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _looked(self, answer: Found | Unclear | None) -> None:
        """Take the finder's answer at the end of a step that it looked at."""
        if not self.running:
            return
        self.steps = self._finder.steps(answer if isinstance(answer, Found) else None)
        if isinstance(answer, Unclear):
            self._give_up(answer.reason)
        elif answer is not None:
            self._guarded("start", lambda: self._begin(answer))

    def _give_up(self, reason: str) -> None:
        self.running = False
        self._take_off()
        self._told.unclear_step(reason)

    def _begin(self, found: Found) -> None:
        self._finder.stop()
        self.found = found
        self._stages = list(self._told.found(found, self.steps))
        phases = self.phases
        for root in found.roots:
            self._undo.append(watch_forward(root.module, phases, training=root.training))
        self._undo += [watch_quiet(module, phases) for module in found.quiet]
        self._undo += [watch_backward(phases), watch_data(phases)]
        if found.in_backward:
            self._undo.append(end_with_backward(self._backward_ended))
        if found.optimizers:
            self._undo.append(OptimizerWatch(found.optimizers, phases, self._optimizer_ended).install())
        phases.listen()
        self._next_stage()

    def _backward_ended(self) -> None:
        if threading.get_ident() == self.phases.thread and not self._said:
            self._step_ended()

    def _optimizer_ended(self, in_a_range: bool) -> None:
        if not self._said:
            self._step_ended(in_a_range)

    def _step_ended(self, in_a_range: bool = False) -> None:
        phases, stage = self.phases, self._stage
        if stage is None or not phases.at_rest:
            return
        if in_a_range and any(each.has_a_profiler for each in (stage, *self._stages[:1])):
            # No part of the loop that is measured runs before the loop enters something again.
            phases.before_the_next = self._step_ended
            return
        try:
            phases.step_ends()
            self.steps += 1
            over = stage.is_over(self.steps - 1)
        except Exception as error:  # An error of the watch must not end the loop that is watched.
            self._told.stage_failed(stage.name, error)
            over = True
        if over:
            self._guarded(stage.name, stage.ends)
            self._next_stage()
        else:
            phases.step_begins()

    def _next_stage(self) -> None:
        while self._stages:
            stage = self._stages.pop(0)
            self._stage = stage
            if self._guarded(stage.name, lambda stage=stage: stage.begins(self.steps)):
                self.phases.recorders = stage.recorders
                self.phases.step_begins()
                return
        self._stage = None
        self.stop()
        self._guarded("finish", self._told.stages_over)

    def _guarded(self, stage: str, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:  # An error of the watch must not end the loop that is watched.
            self._told.stage_failed(stage, error)
            if stage == "start":
                self._take_off()
                self.running = False
            return False
        return True


_watches: "weakref.WeakSet[Watch]" = weakref.WeakSet()


def watching() -> bool:
    """Whether a loop of this process is watched now."""
    return any(watch.running for watch in _watches)


def _leave_alone_in_a_child() -> None:
    for watch in list(_watches):
        watch.leave_alone()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_alone_in_a_child)
