"""One step whose every allocation is recorded with its stack: a snapshot in PyTorch's own form, with our notes.

On a GPU the allocator itself keeps the history, and every event carries the open ranges
(`forward|blocks.3.attention|softmax`). On a CPU the same file is written from the profiler's allocator events. Nothing
here allocates on the device, so the peak of the recorded step is that of any other.
"""

import contextlib
import gc
import gzip
import os
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from stepscope.core.evidence import PhaseMemory
from stepscope.core.memory_notes import NOTES_KEY, MemoryNotes, PhaseSpan
from stepscope.core.workload import Workload
from stepscope.measure import ranges
from stepscope.measure.backward_ranges import BackwardRanges, SequenceNotes
from stepscope.measure.memory_allocator import AllocatorRecording
from stepscope.measure.memory_events import ProfilerRecording
from stepscope.measure.observe import ObservableStep
from stepscope.measure.tensor_notes import TensorNotes, now_us
from stepscope.measure.timer import Phase

MEMORY_FILE = "memory.pickle.gz"
_COMPRESSION = 2  # of level 6 it has nine tenths of the effect in a third of the time
_PICKLE_PROTOCOL = 4


@dataclass(frozen=True, kw_only=True)
class MemoryCapture:
    """What a recorded step left."""

    measured: PhaseMemory
    failure: BaseException | None = None
    """The error that ended the step early when memory ran out; the file holds what was allocated at that moment."""


class Recording(Protocol):
    """A device's way to record the allocations of a step."""

    @property
    def emitters(self) -> tuple[ranges.Emitter, ...]:
        """What takes the names of the step's ranges to the recorded events."""
        ...

    @property
    def node_emitters(self) -> tuple[ranges.Emitter, ...]:
        """What takes backward's ranges to its events, by hooks on the graph's nodes; empty if events name the node."""
        ...

    def running(self) -> AbstractContextManager[object]:
        """Inside, allocations are recorded."""
        ...

    def run(self, phase: Phase) -> None: ...

    def snapshot(self, notes: TensorNotes) -> tuple[dict[str, Any], PhaseMemory]:
        """What was recorded, in PyTorch's form, and the figures of its phases."""
        ...


def capture_memory(
    step: ObservableStep, device: torch.device, directory: Path, *, workload: Workload, device_name: str = "",
    stacks: str = "python", held_before_bytes: int = 0, is_out_of_memory: Callable[[BaseException], bool] | None = None,
) -> MemoryCapture:  # fmt: skip
    """Record one step into `memory.pickle.gz`.

    stacks: `python`, or `all` for those of C++ too, which take minutes to name. held_before_bytes: what the process
    had allocated before the step was made. With `is_out_of_memory`, a step that fails so is kept as far as it went.
    """
    step.prepare()
    gc.collect()
    sequence = SequenceNotes(path for path, _ in step.model.named_modules() if path)
    notes = TensorNotes(step, device)
    notes.resident()
    spans: list[PhaseSpan] = []
    failure = None
    recording: Recording
    if device.type == "cuda":
        recording = AllocatorRecording(step, device, stacks, held_before_bytes)
    else:
        recording = ProfilerRecording(step, sequence)
    with recording.running():
        try:
            _run_step(step, recording, sequence, notes, spans)
        except Exception as error:
            if is_out_of_memory is None or not is_out_of_memory(error):
                raise
            failure = error
    snapshot, measured = recording.snapshot(notes)
    told = MemoryNotes(
        workload=workload, device_name=device_name, measured=measured, phases=tuple(spans), tensors=notes.notes
    )
    _write({**snapshot, NOTES_KEY: msgspec.to_builtins(told)}, directory / MEMORY_FILE)
    return MemoryCapture(measured=measured, failure=failure)


def _run_step(
    step: ObservableStep, recording: Recording, sequence: SequenceNotes, notes: TensorNotes, spans: list[PhaseSpan]
) -> None:
    backward = BackwardRanges(recording.node_emitters, operators=True)
    last_backward = max((i for i, phase in enumerate(step.phases) if phase.name == "backward"), default=None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ranges.emitted_to(sequence, *recording.emitters))
        stack.callback(backward.release)
        if not step.compiled:  # a hook on a module inside the compiled one would make it compile anew
            stack.enter_context(ranges.detailed(step.model))
            stack.enter_context(notes.watch_cast_copies())
        for i, phase in enumerate(step.phases):
            if phase.name == "forward":
                notes.start_forward()
            elif phase.name == "backward":
                sequence.closed = True  # what checkpointing runs again during backward made none of these nodes
                if recording.node_emitters and step.loss is not None and step.loss.grad_fn is not None:
                    backward.attach(step.loss.grad_fn, sequence)
            start_us = now_us()
            try:
                with ranges.named_range(phase.name):
                    recording.run(phase)
            finally:
                spans.append(PhaseSpan(name=phase.name, start_us=start_us, end_us=now_us()))
                backward.close()
                backward.release()
                sequence.closed = False
            if phase.name == "forward":
                notes.saved(sequence)
            elif i == last_backward:
                notes.gradients()


def _write(snapshot: dict[str, Any], target: Path) -> None:
    """Pickle and compress; the name appears when the file is whole."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with gzip.open(temporary, "wb", compresslevel=_COMPRESSION) as file:
            pickle.dump(snapshot, file, protocol=_PICKLE_PROTOCOL)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
