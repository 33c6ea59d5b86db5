"""Knows which part of a watched step is open, from what the loop enters and leaves, and tells recorders."""

import threading
from collections.abc import Callable
from typing import Any

from stepscope.core.range_names import BACKWARD, DATA, EVALUATION, FORWARD, OPTIMIZER, REST
from stepscope.recording.step import Recorder

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
    def at_rest(self) -> bool:
        """Whether the loop has left everything that it entered."""
        return len(self._open) == 1

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

    def leave(self) -> None:
        """Note that the loop leaves what it entered last."""
        self.leave_to(len(self._open) - 1)

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

    def forget_what_is_open(self) -> None:
        """Consider everything as left: after an exception that the loop caught, an optimizer's step has no end."""
        self.leave_to(1)

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
