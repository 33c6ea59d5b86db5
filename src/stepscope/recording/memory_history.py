"""Steps whose every allocation is recorded with its stack: a snapshot in PyTorch's own form, with our notes.

On a GPU the allocator itself keeps the history, and every event carries the open ranges
(`forward|blocks.3.attention|softmax`). On a CPU the same file is written from the profiler's allocator events. Nothing
here allocates on the device, so the peak of the recorded step is that of any other.
"""

import contextlib
import gc
import gzip
import os
import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec
import torch

from stepscope.core.evidence import PhaseMemory
from stepscope.core.memory_notes import NOTES_KEY, KeptTensor, MemoryNotes, PhaseSpan
from stepscope.core.own_workload import AnyWorkload
from stepscope.core.range_names import BACKWARD, FORWARD
from stepscope.core.run_files import MEMORY_FILE
from stepscope.recording import ranges
from stepscope.recording.backward_ranges import BackwardRanges, SequenceNotes
from stepscope.recording.keepers import Keepers
from stepscope.recording.memory_allocator import AllocatorRecording
from stepscope.recording.memory_events import ProfilerRecording
from stepscope.recording.step import Recorder, Step
from stepscope.recording.tensor_notes import TensorNotes, now_us

_COMPRESSION = 2  # nine tenths of what level 6 saves, in a third of the time
_PICKLE_PROTOCOL = 4


class AllocationHistory(Protocol):
    """A device's way to keep the allocations of a step."""

    @property
    def emitters(self) -> tuple[ranges.Emitter, ...]:
        """Emitters that put the names of the step's ranges on the recorded events."""
        ...

    @property
    def node_emitters(self) -> tuple[ranges.Emitter, ...]:
        """Emitters that put backward's ranges on its events, by hooks on nodes; empty if events name the node."""
        ...

    def running(self) -> AbstractContextManager[Recorder]:
        """A context in which allocations are recorded, and the Recorder to tell of the phases."""
        ...

    def snapshot(self, notes: TensorNotes) -> tuple[dict[str, Any], PhaseMemory]:
        """The recorded history in PyTorch's form, and the memory of each phase."""
        ...


class MemoryRecorder(Recorder):
    """Records every allocation of the next step, or steps. Make it just before the first begins.

    stacks: `python`, or `all` for those of C++ too, which take minutes to name. held_before_bytes: what the process
    had allocated before the step was made. several: whether more than one step is recorded, to see what they leave.
    """

    def __init__(
        self, step: Step, device: torch.device, *, stacks: str = "python", held_before_bytes: int = 0,
        several: bool = False,
    ) -> None:  # fmt: skip
        gc.collect()
        self._keepers = Keepers(step.model, step.optimizer, device) if several else None
        self._ends_us: list[int] = []
        self._kept: tuple[KeptTensor, ...] = ()
        self._step = step
        self._sequence = SequenceNotes(path for path, _ in step.model.named_modules() if path)
        self._notes = TensorNotes(step, device)
        self._notes.resident()
        self._history: AllocationHistory = (
            AllocatorRecording(step, device, stacks, held_before_bytes)
            if device.type == "cuda"
            else ProfilerRecording(step, self._sequence, self._notes.resident_parts())
        )
        self._backward = BackwardRanges(self._history.node_emitters, operators=True)
        self._counter = Recorder()
        self._spans: list[PhaseSpan] = []
        self._start_us = 0
        self._gradients_wait = False

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        """A context in which allocations are recorded."""
        with self._history.running() as self._counter, contextlib.ExitStack() as stack:
            stack.enter_context(ranges.emitted_to(self._sequence, *self._history.emitters))
            stack.callback(self._backward.release)
            if not self._step.compiled:  # a hook on a module inside the compiled one would make it compile anew
                stack.enter_context(ranges.detailed(self._step.model))
                stack.enter_context(self._notes.watch_cast_copies())
            yield self

    def phase_begins(self, name: str) -> None:
        loss = self._step.loss
        if name == FORWARD:
            self._notes.start_forward()
            self._gradients_wait = False  # the next micro-batch adds to the same gradients
        elif name == BACKWARD:
            self._sequence.closed = True  # what checkpointing runs again during backward made none of these nodes
            if self._history.node_emitters and loss is not None and loss.grad_fn is not None:
                self._backward.attach(loss.grad_fn, self._sequence)
        self._note_gradients()
        self._start_us = now_us()
        self._counter.phase_begins(name)

    def phase_ends(self, name: str) -> None:
        self._counter.phase_ends(name)
        self._end(name)
        if name == FORWARD:
            self._notes.saved(self._sequence)
        self._gradients_wait = name == BACKWARD

    def phase_failed(self, name: str) -> None:
        self._counter.phase_failed(name)
        self._end(name)

    def step_ends(self) -> None:
        self._note_gradients()
        if self._keepers is not None:
            self._ends_us.append(now_us())
        self._notes.resident()  # what a step makes anew, as a state or `parameter.data = ...`, is still what it was

    def steps_over(self) -> None:
        """The last step has ended, and allocations are still recorded: note what is left, and what holds it."""
        if self._keepers is not None:
            gc.collect()  # what only a circle of objects holds is no longer held by the loop
            tensors, saved, self._kept = self._keepers.kept()
            self._notes.left(tensors, saved)

    def save(self, directory: Path, *, workload: AnyWorkload, device_name: str = "") -> PhaseMemory:
        """Write `memory.pickle.gz`; returns the figures of the phases."""
        snapshot, measured = self._history.snapshot(self._notes)
        told = MemoryNotes(
            workload=workload, device_name=device_name, measured=measured, phases=tuple(self._spans),
            tensors=self._notes.notes, step_ends_us=tuple(self._ends_us), kept=self._kept,
        )  # fmt: skip
        _write({**snapshot, NOTES_KEY: msgspec.to_builtins(told)}, directory / MEMORY_FILE)
        return measured

    def _end(self, name: str) -> None:
        self._spans.append(PhaseSpan(name=name, start_us=self._start_us, end_us=now_us()))
        self._backward.close()
        self._backward.release()
        self._sequence.closed = False

    def _note_gradients(self) -> None:
        if self._gradients_wait:
            self._notes.gradients()
            self._gradients_wait = False


def _write(snapshot: dict[str, Any], target: Path) -> None:
    """Pickle and compress; the name appears when the file is whole."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with gzip.open(temporary, "wb", compresslevel=_COMPRESSION) as file:
            pickle.dump(snapshot, file, protocol=_PICKLE_PROTOCOL)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
