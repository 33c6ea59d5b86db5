"""Ranges of modules in the backward pass, for NVTX tools.

Autograd runs backward on threads of its own, where no module's forward is on the stack: an NVTX tool sees kernels
without a name. Yet every node of the graph carries the number of the moment that forward made it. So forward's ranges
note these numbers as they begin and end, and before backward every node is given hooks that open the range of the
module that made it: `blocks.3.attention`, and inside it the part, `softmax`.
"""

import bisect
import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Self

from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from stepscope.core.range_names import BACKWARD, GRADIENT_ACCUMULATION, MARKING
from stepscope.recording import ranges
from stepscope.recording.capture import details
from stepscope.recording.device import Device, Mark
from stepscope.recording.ranges import Emitter
from stepscope.recording.step import Recorder, Step


class SequenceNotes:
    """An emitter that notes at which of autograd's sequence numbers each range begins and ends, on one thread."""

    def __init__(self, module_paths: Iterable[str]) -> None:
        self._paths = frozenset(module_paths)
        self._thread = threading.get_ident()
        self._open: list[str] = []
        self._from: list[int] = []
        self._owners: list[tuple[str, ...]] = []
        self.closed = False

    def push(self, name: str) -> None:
        if not self.closed and threading.get_ident() == self._thread:
            self._open.append(name)
            self._note()

    def pop(self) -> None:
        if self._open and not self.closed and threading.get_ident() == self._thread:
            self._open.pop()
            self._note()

    def clear(self) -> None:
        """Forget everything, before another forward."""
        for notes in (self._open, self._from, self._owners):
            notes.clear()
        self.closed = False

    def owner(self, sequence_nr: int) -> tuple[str, ...]:
        """Path of the innermost module that ran when forward made the node of this number, and the part inside it.

        Both are empty for a node that no module made, such as those of the loss.
        """
        i = bisect.bisect_right(self._from, sequence_nr) - 1
        return self._owners[i] if i >= 0 else ()

    def _note(self) -> None:
        # A note's number is that of the next node to be made. Where several ranges begin or end at one number, the last
        # note holds, which is the one that bisect_right finds.
        self._from.append(_get_sequence_nr())
        innermost = max((i for i, name in enumerate(self._open) if name in self._paths), default=None)
        self._owners.append(tuple(self._open[innermost:]) if innermost is not None else ())


class BackwardRanges:
    """Hooks on the nodes of one graph at a time; `release` takes them off.

    With `operators`, each range holds one more inside: the node's own name, `MulBackward0`.
    """

    def __init__(self, emitters: tuple[Emitter, ...], *, operators: bool = False) -> None:
        self._emitters = emitters
        self._operators = operators
        self._local = threading.local()
        self._handles: list[RemovableHandle] = []

    def attach(self, root: Node, notes: SequenceNotes) -> int:
        """Hook every node below `root`; returns how many there are."""
        reached, waiting = {root}, [root]
        while waiting:
            node = waiting.pop()
            below = [edge for edge, _ in node.next_functions if edge is not None]
            is_leaf = node.name() == "torch::autograd::AccumulateGrad"
            names = (GRADIENT_ACCUMULATION,) if is_leaf else notes.owner(node._sequence_nr())  # type: ignore[attr-defined]
            if self._operators and not is_leaf:
                names = (*names, node.name())
            # Between two nodes the engine sums gradients that meet. This is work of the node just run, so its range
            # lasts until the next node begins on the same thread. A node that leads to no other may be the last on its
            # thread, so its range ends with it.
            self._handles.append(node.register_prehook(lambda _gradients, names=names: self._open(names)))
            if not below:
                self._handles.append(node.register_hook(lambda _inputs, _outputs: self.close()))
            fresh = set(below) - reached  # a set: a node may be reached twice from one, as x is from x * x
            waiting += fresh
            reached |= fresh
        return len(reached)

    def close(self) -> None:
        """End the ranges that are open on this thread."""
        for _ in range(getattr(self._local, "depth", 0)):
            for emitter in reversed(self._emitters):
                emitter.pop()
        self._local.depth = 0

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _open(self, names: tuple[str, ...]) -> None:
        self.close()
        for name in names:
            for emitter in self._emitters:
                emitter.push(name)
        self._local.depth = len(names)


class Unmarked:
    """A device without marks: it only synchronises.

    Reading an event calls cudaEventElapsedTime_v2, new in CUDA 12.8. An older importer of Nsight Systems does not know
    that name, and drops all kernels of a buffer that holds such a call.
    """

    clock_name = "none"

    def __init__(self, device: Device) -> None:
        self.synchronize = device.synchronize

    def mark(self) -> Mark:
        return None

    def elapsed_s(self, start: Mark, end: Mark) -> float:
        return 0.0


class BackwardMarks(Recorder):
    """Emits to a watching NVTX tool the ranges of a Kineto trace, and those of modules in backward.

    Before each backward the nodes of the graph get their ranges. This has a range of its own, so that its time counts
    neither to forward nor to backward.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._notes = SequenceNotes(path for path, _ in step.model.named_modules() if path)
        self._backward = BackwardRanges(ranges.current_emitters())

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        """A context in which steps emit every range."""
        try:
            with ranges.emitted_to(self._notes), details(self._step):
                yield self
        finally:
            self._backward.release()

    def step_begins(self) -> None:
        self._backward.release()
        self._notes.clear()

    def phase_begins(self, name: str) -> None:
        if name != BACKWARD:
            return
        with ranges.named_range(MARKING):
            self._notes.closed = True  # what checkpointing runs again during backward made none of these nodes
            loss = self._step.loss
            if loss is not None and loss.grad_fn is not None:
                self._backward.attach(loss.grad_fn, self._notes)

    def phase_ends(self, name: str) -> None:
        if name == BACKWARD:
            self._backward.close()
            # A step of several micro-batches builds a graph for each: the next forward is marked anew.
            self.step_begins()

    def phase_failed(self, name: str) -> None:
        self.phase_ends(name)
