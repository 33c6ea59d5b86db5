"""The history of allocations of some steps, with stacks and notes, on a CPU and on a GPU."""

import contextlib
import functools
import gc
import gzip
import itertools
import os
import pickle
import re
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
from torch import Tensor
from torch._C._profiler import _ExtraFields_Allocation, _ExtraFields_TorchOp, _ProfilerEvent
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.core.errors import portable_path
from stepscope.core.evidence import (
    NOTES_KEY,
    SEGMENTS_BEFORE_KEY,
    KeptTensor,
    MemoryCategory,
    MemoryNotes,
    PhaseMemory,
    PhaseSpan,
    TensorNote,
)
from stepscope.core.range_names import BACKWARD, FORWARD, FORWARD_BACKWARD, GRADIENT_ACCUMULATION, OPTIMIZER
from stepscope.core.run_directory import MEMORY_FILE
from stepscope.core.workloads import Workload
from stepscope.recording import ranges
from stepscope.recording.backward_ranges import BackwardRanges, SequenceNotes
from stepscope.recording.held_tensors import local_part, model_tensors, optimizer_tensors, plain_parts
from stepscope.recording.keepers import Keepers, saved_tensors
from stepscope.recording.observe import PhasePeaks, gradient_bytes, parameter_bytes
from stepscope.recording.step import Recorder, Step, drive, optimizers_of

# Which tensor lies at which address, noted while a step runs: what a snapshot of the allocator cannot know.
#
# To note a tensor is to read its address and size. Nothing here allocates on the device, and nothing is kept alive.


def now_us() -> int:
    """Microseconds since the epoch, by the clock that PyTorch's allocator and profiler use for their events."""
    return time.time_ns() // 1000


class TensorNotes:
    """The notes of one step. Its methods are called in the order of the step, `resident` first."""

    def __init__(self, step: Step, device: torch.device) -> None:
        self._step, self._device = step, device
        self._names = {id(parameter): name for name, parameter in step.model.named_parameters()}
        self.notes: list[TensorNote] = []
        self.resident_sizes: dict[int, int] | None = None
        """Address and bytes of every storage that was noted before the first step began."""
        self.casts: set[int] = set()
        """The addresses of autocast's copies. Clear it before a forward: those of an earlier one may be anything."""

    def resident(self) -> None:
        """Note everything that exists before a step: parameters, buffers, gradients, optimizer state, batches."""
        for tensor, category, name in self._residents():
            self._note(tensor, category, name)
        if self.resident_sizes is None:
            self.resident_sizes = {note.address: note.bytes for note in self.notes}

    def _residents(self) -> Iterator[tuple[object, MemoryCategory, str]]:
        """What outlives a phase, each with its category and name."""
        model = self._step.model
        for category, name, tensor in model_tensors(model):
            yield tensor, category, name
        for name, parameter in model.named_parameters():
            yield parameter.grad, "gradients", name
        for optimizer in optimizers_of(self._step):
            for name, tensor in optimizer_tensors(optimizer, model, self._names):
                yield tensor, "optimizer state", name
        for i, batch in enumerate(self._step.batches):
            for what, tensor in self._step.named_tensors(batch):
                yield tensor, "inputs", f"batch {i} {what}"

    def resident_parts(self) -> Iterator[torch.Tensor]:
        """The tensors with memory on the device that exist now and outlive a phase."""
        for tensor, _, _ in self._residents():
            if isinstance(tensor, torch.Tensor) and tensor.device == self._device:
                yield from plain_parts(tensor)

    def gradients(self) -> None:
        """Note the gradients that backward left on the parameters."""
        for name, parameter in self._step.model.named_parameters():
            self._note(parameter.grad, "gradients", name)

    def left(self, tensors: Iterable[torch.Tensor], saved: Iterable[torch.Tensor]) -> None:
        """Note what steps left behind, and of it what graphs keep. What was noted as something else stays that."""
        for tensor in tensors:
            self._note(tensor, "temporaries", "")
        for tensor in saved:
            self._note(tensor, "saved for backward", "")

    def saved(self, owners: SequenceNotes) -> None:
        """Note the loss and the tensors that its graph keeps for backward: a storage once, by its first node."""
        loss = self._step.loss
        self._note(loss, "temporaries", "loss")
        if loss is None or loss.grad_fn is None:
            return
        # Read anew: an activation may lie where a gradient lay that the loop freed since.
        addresses = self.casts | {part.untyped_storage().data_ptr() for part in self.resident_parts()}
        for saved in saved_tensors(loss.grad_fn):
            address = local_part(saved.tensor).untyped_storage().data_ptr()
            if address not in addresses:
                addresses.add(address)
                module = next(iter(owners.owner(saved.sequence_nr)), "")
                self._note(saved.tensor, "saved for backward", saved.name, operator=saved.operator, module=module)

    @contextlib.contextmanager
    def watch_cast_copies(self) -> Iterator[None]:
        """A context in which each module, as its forward ends, notes autocast's 16-bit copies of its parameters.

        A forward that runs again for backward (activation checkpointing) makes copies of its own, which are noted too.
        """
        handles = [
            module.register_forward_hook(lambda module, _args, _output, path=path: self._note_casts(module, path))
            for path, module in self._step.model.named_modules()
            if any(True for _ in module.parameters(recurse=False))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note_casts(self, module: torch.nn.Module, path: str) -> None:
        for parameter in module.parameters(recurse=False):
            copy = cast_copy(parameter)
            if copy is not None:
                self.casts.add(local_part(copy).untyped_storage().data_ptr())
                self._note(copy, "cast copies", self._names.get(id(parameter), "?"), module=path)

    def _note(
        self, tensor: object, category: MemoryCategory, name: str, *, operator: str = "", module: str = ""
    ) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.device != self._device:
            return
        parts = plain_parts(tensor)
        for part in parts:
            storage = part.untyped_storage()
            if storage.nbytes() == 0:
                continue
            # A tensor made of others has their bytes; any other has its own shape, of which a rank holds a part.
            described = tensor if len(parts) == 1 else part
            self.notes.append(
                TensorNote(
                    address=storage.data_ptr(),
                    at_us=now_us(),
                    bytes=storage.nbytes(),
                    category=category,
                    name=name,
                    shape=tuple(described.shape),
                    dtype=str(described.dtype).removeprefix("torch."),
                    operator=operator,
                    module=module,
                )
            )


# Stacks and ranges as an event of a snapshot carries them: in PyTorch's form, and the same on any machine.


Frame = tuple[str, str, int]
"""A frame as (function, file, line); for an operator (its name, "", 0)."""

_OUR_FILES = ("stepscope/recording/", "stepscope/engine/")
_WATCHING = "stepscope/recording/watch/"
"""Where a watched loop's own calls pass through ours."""


def joined_ranges(names: Sequence[str]) -> str:
    """Open ranges as one text, outermost first. A module is left out if one inside it follows, whose path names it."""
    pairs = itertools.zip_longest(names, names[1:], fillvalue="")
    return "|".join(name for name, inner in pairs if not inner.startswith(f"{name}."))


_portable_path = functools.cache(portable_path)


class StackTable:
    """Makes equal stacks and frames the same object, since pickle writes an object only once."""

    def __init__(self) -> None:
        self._frames: dict[Frame, dict[str, Any]] = {}
        self._stacks: dict[tuple[Frame, ...], list[dict[str, Any]]] = {}

    def stack(self, frames: Iterable[Frame]) -> list[dict[str, Any]]:
        """The frames (function, file, line), innermost first, as PyTorch writes them: up to our own, which ran the
        step, and with files named from their package on."""
        portable = ((name, _portable_path(file), line) for name, file, line in frames)
        named = (frame for frame in portable if not frame[1].startswith(_WATCHING))
        key = tuple(itertools.takewhile(lambda frame: not frame[1].startswith(_OUR_FILES), named))
        if key not in self._stacks:
            for frame in key:
                self._frames.setdefault(frame, dict(zip(("name", "filename", "line"), frame, strict=True)))
            self._stacks[key] = [self._frames[frame] for frame in key]
        return self._stacks[key]


# The history of allocations on a CPU, from the allocator events of torch.profiler, in the form that a GPU's has.
#
# The profiler's tree says in which operator and which range an allocation lies. In backward it names the node, by the
# number that forward gave it, and with the number the module. Python's stack is taken by a mode that sees every call of
# PyTorch's functions: the profiler's own knows the line of a call, but not that of `q @ k`.


_CALL = "stepscope call "
"""Name of the range of one call from Python, followed by the number of its stack."""
_NODE = "autograd::engine::evaluate_function: "
_LEAF = "torch::autograd::AccumulateGrad"
_DISPATCHING = "torch/overrides.py"


@dataclass(frozen=True)
class _Place:
    """The phase, ranges, operators and call that enclose an event of the profiler's tree."""

    phase: int | None = None
    """The start of the phase, which tells two forwards of a step apart."""
    ranges: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    """The operators around the event, innermost first."""
    call: int | None = None
    """The number of the Python stack."""


@dataclass(frozen=True)
class _Change:
    """An allocation (bytes above 0) or a release (below 0)."""

    time_ns: int
    address: int
    bytes: int
    place: _Place


class Releases:
    """When storages from before a recording were released: the profiler tells nothing of what it did not see made."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.time_ns: dict[int, int] = {}
        """By address. Known once `look` was called."""
        self._there: dict[int, StorageWeakRef] = {}
        self._ended: dict[int, int] = {}
        self._watches: list[weakref.finalize[..., Tensor]] = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if storage.nbytes() and address not in self._there:
                self._there[address] = StorageWeakRef(storage)
                self._watches.append(weakref.finalize(tensor, self._tensor_ends, address))

    def _tensor_ends(self, address: int) -> None:
        self._ended[address] = time.time_ns()

    def look(self) -> None:
        """Find the storages that are gone. One whose tensor is not, as after `parameter.data = ...`, went just now."""
        now = time.time_ns()
        for address in [address for address, storage in self._there.items() if storage.expired()]:
            self.time_ns[address] = self._ended.get(address, now)
            del self._there[address]
        self._ended.clear()

    def close(self) -> None:
        """Look for the last time, and leave nothing on the tensors."""
        self.look()
        for watch in self._watches:
            watch.detach()


class ProfilerRecording(Recorder):
    """A recording on a CPU, of the allocations that the profiler sees. residents: the tensors that are there before."""

    node_emitters: tuple[ranges.Emitter, ...] = ()
    """Emitters that put backward's ranges on its events, by hooks on nodes. The profiler's events name the node."""

    def __init__(self, step: Step, sequence: SequenceNotes, residents: Iterable[Tensor]) -> None:
        self._step, self._sequence = step, sequence
        # Released here, the last step's loss does not end inside this one. The profiler warns of a release whose
        # allocation it did not see.
        step.loss = None
        self._releases = Releases(residents)
        self._emitter = _NamedEmitter()
        self.emitters: tuple[ranges.Emitter, ...] = (self._emitter,)
        """Emitters that put the names of the step's ranges on the recorded events."""
        self._calls = _Calls()
        self._tree: list[_ProfilerEvent] = []
        self._phases: set[str] = set()
        self._gradients: int | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        # A mode round a compiled region would make it compile anew.
        calls = self._calls if not self._step.compiled else contextlib.nullcontext()
        with profiler, calls, contextlib.closing(self._releases):
            yield self
        results = profiler.profiler.kineto_results if profiler.profiler is not None else None
        if results is None:
            raise RuntimeError("the profiler kept no events")
        self._tree = results.experimental_event_tree()

    def phase_begins(self, name: str) -> None:
        self._releases.look()
        self._phases.add(name)

    def phase_ends(self, name: str) -> None:
        self._releases.look()
        if name in (BACKWARD, FORWARD_BACKWARD):
            self._gradients = gradient_bytes(self._step)

    def snapshot(self, notes: TensorNotes) -> tuple[dict[str, Any], PhaseMemory]:
        """The recorded history in PyTorch's form, and the memory of each phase."""
        resident = notes.resident_sizes or {}
        changes: list[_Change] = []
        live = dict(resident)
        for change in self._with_releases(self._changes(), resident):
            if change.bytes > 0:
                live[change.address] = change.bytes
            elif live.pop(change.address, None) is None:
                continue  # the release of memory whose allocation was not recorded
            changes.append(change)
        stacks = StackTable()
        events = [event for change in changes for event in self._events_of(change, stacks)]
        snapshot = {"segments": [], "device_traces": [events], SEGMENTS_BEFORE_KEY: []}
        return snapshot, self._measured(changes, sum(resident.values()))

    def _changes(self) -> list[_Change]:
        """Every allocator event of the tree, in the order of time."""
        changes: list[_Change] = []
        waiting = [(event, _Place()) for event in self._tree]
        while waiting:
            event, place = waiting.pop()
            fields = event.extra_fields
            if isinstance(fields, _ExtraFields_Allocation):
                if fields.device.type == "cpu":
                    changes.append(_Change(event.start_time_ns, fields.ptr, fields.alloc_size, place))
            elif isinstance(fields, _ExtraFields_TorchOp):
                place = self._inside(event, fields.sequence_number, place)
            waiting += ((child, place) for child in event.children)
        return sorted(changes, key=lambda change: change.time_ns)

    def _inside(self, event: _ProfilerEvent, sequence_nr: int, place: _Place) -> _Place:
        name = event.name
        if name.startswith(_CALL):
            return replace(place, call=int(name.removeprefix(_CALL)))
        if name.startswith(_NODE):
            owner = (GRADIENT_ACCUMULATION,) if name.endswith(_LEAF) else self._sequence.owner(sequence_nr)
            return replace(place, ranges=place.ranges + owner)
        if name in self._emitter.names:
            phase = place.phase if place.phase is not None else event.start_time_ns
            return replace(place, phase=phase, ranges=(*place.ranges, name))
        return replace(place, operators=(name, *place.operators))

    def _with_releases(self, changes: list[_Change], resident: dict[int, int]) -> list[_Change]:
        """The changes, and the releases of memory that was there before. What takes such an address comes after."""
        allocated = {change.address: change.time_ns for change in reversed(changes) if change.bytes > 0}
        released = [
            _Change(min(at, allocated.get(address, at)), address, -resident[address], _Place())
            for address, at in self._releases.time_ns.items()
            if address in resident
        ]
        return sorted([*released, *changes], key=lambda change: change.time_ns)

    def _events_of(self, change: _Change, stacks: StackTable) -> Iterator[dict[str, Any]]:
        place = change.place
        python = self._calls.stacks[place.call] if place.call is not None else ()
        event = {
            "addr": change.address,
            "size": abs(change.bytes),
            "stream": 0,
            "time_us": change.time_ns // 1000,
            "frames": stacks.stack([*((name, "", 0) for name in place.operators), *python]),
            "user_metadata": joined_ranges(place.ranges),
        }
        for action in ("alloc",) if change.bytes > 0 else ("free_requested", "free_completed"):
            yield {"action": action, **event}

    def _measured(self, changes: list[_Change], before: int) -> PhaseMemory:
        """The memory of each phase, summed from the changes."""
        live = before
        peaks: dict[str, int] = {}
        at_start: dict[int, int] = {}
        held: dict[int, int] = {}
        for change in changes:
            phase = change.place.phase
            if phase is not None:
                at_start.setdefault(phase, live)
            live += change.bytes
            if phase is not None:
                name = change.place.ranges[0]
                peaks[name] = max(peaks.get(name, 0), at_start[phase], live)
                if name == FORWARD:
                    held[phase] = live - at_start[phase]
        peaks = dict.fromkeys(self._phases, before) | peaks
        return PhaseMemory(
            parameter_bytes=parameter_bytes(self._step),
            after_parameters=before,
            forward_peak=peaks.get(FORWARD),
            turns_peak=peaks.get(FORWARD_BACKWARD),
            saved_for_backward=max(held.values(), default=0) if BACKWARD in peaks else None,
            backward_peak=peaks.get(BACKWARD),
            gradient_bytes=self._gradients,
            optimizer_peak=peaks.get(OPTIMIZER),
        )


class _NamedEmitter(ranges.ProfilerEmitter):
    """An emitter of ranges to torch.profiler that remembers their names."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def push(self, name: str) -> None:
        self.names.add(name)
        super().push(name)


class _Calls(TorchFunctionMode):
    """A mode that gives every call of a PyTorch function a range, whose name tells the Python stack."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks: list[tuple[Frame, ...]] = []
        self._numbers: dict[tuple[Frame, ...], int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        attribute = getattr(func, "__name__", "") == "__get__"  # as .shape: it allocates nothing, and there are many
        # A range around the call that opens a range would end before that range.
        if attribute or getattr(func, "__module__", "") == "torch._ops.profiler":
            return func(*args, **(kwargs or {}))
        stack = tuple(
            (frame.f_code.co_name, frame.f_code.co_filename, line)
            for frame, line in traceback.walk_stack(sys._getframe(1))
            if not frame.f_code.co_filename.endswith(_DISPATCHING)
        )
        number = self._numbers.setdefault(stack, len(self.stacks))
        if number == len(self.stacks):
            self.stacks.append(stack)
        with ranges.OwnRange(f"{_CALL}{number}"):
            return func(*args, **(kwargs or {}))


# The history of allocations that the caching allocator of a GPU keeps itself.


MOST_EVENTS = 2_000_000
"""Events that a history may hold; each takes a few KB of host memory, and a step of 32 blocks has about 20,000."""
_ALLOCATOR_NODE = re.compile(r"Backward\d*$")
"""Matches the name of a node of backward, as autograd writes it."""


class AllocatorRecording:
    """A recording by the caching allocator of a GPU, which keeps the history itself."""

    def __init__(self, step: Step, device: torch.device, stacks: str, held_before_bytes: int) -> None:
        self._step, self._device, self._stacks, self._held = step, device, stacks, held_before_bytes
        self.emitters: tuple[ranges.Emitter, ...] = ()
        if hasattr(torch._C, "_cuda_setMemoryMetadata") and not step.compiled:
            self.emitters = (MetadataEmitter(torch._C._cuda_setMemoryMetadata),)
        self.node_emitters = self.emitters
        self._before: list[dict[str, Any]] = []
        self._after: dict[str, Any] = {}
        self._measured: PhaseMemory | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[PhasePeaks]:
        peaks = PhasePeaks(self._step, self._device, self._held)
        self._before = torch.cuda.memory._snapshot(self._device)["segments"]
        torch.cuda.memory._record_memory_history(
            "all", context="all", stacks=self._stacks, max_entries=MOST_EVENTS, clear_history=True
        )
        try:
            yield peaks
            self._measured = peaks.memory()
            self._after = dict(torch.cuda.memory._snapshot(self._device))
        finally:
            torch.cuda.memory._record_memory_history(None)

    def snapshot(self, notes: TensorNotes) -> tuple[dict[str, Any], PhaseMemory]:
        assert self._measured is not None
        stacks = StackTable()
        index = self._device.index
        traces = [
            [_portable_event(event, stacks) for event in trace] if i == index else []
            for i, trace in enumerate(self._after["device_traces"])
        ]
        whole = {
            **self._after,
            "segments": _portable_segments(self._after["segments"], index, stacks),
            "device_traces": traces,
            SEGMENTS_BEFORE_KEY: _portable_segments(self._before, index, stacks),
        }
        return whole, self._measured


class MetadataEmitter:
    """An emitter that puts the open ranges on every event of the allocator: `forward|blocks.3.attention|softmax`.

    Each thread has a text of its own for its events. Backward runs on a thread of autograd, inside the ranges that are
    open on the thread that waits for it; its own ranges stand behind those.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._main = threading.get_ident()
        self._open: list[str] = []
        self._elsewhere = ranges.Stacks()

    def push(self, name: str | None) -> None:
        """Begin a range on this thread, or end the last one that has begun, and put those that are open on events."""
        on_main = threading.get_ident() == self._main
        stack = self._open if on_main else self._elsewhere.stack
        if name is None:
            stack.pop()
        else:
            stack.append(name)
        self._tell(joined_ranges(stack if on_main else [*self._open, *stack]))

    def pop(self) -> None:
        self.push(None)


def _of(frames: Iterable[Mapping[str, Any]]) -> Iterator[Frame]:
    return ((frame["name"], frame["filename"], frame["line"]) for frame in frames)


def _portable_event(event: dict[str, Any], stacks: StackTable) -> dict[str, Any]:
    """The event with its stack portable. A node of backward among its ranges becomes its innermost frame: the thread
    that runs backward has no stack of Python's."""
    parts = event.get("user_metadata", "").split("|")
    nodes = [(part, "", 0) for part in parts[-1:] if _ALLOCATOR_NODE.search(part)]
    changed = {**event, "frames": stacks.stack([*nodes, *_of(event.get("frames", ()))])}
    if "user_metadata" in event:
        changed["user_metadata"] = "|".join(part for part in parts if not _ALLOCATOR_NODE.search(part))
    return changed


def _portable_segments(segments: list[dict[str, Any]], index: int | None, stacks: StackTable) -> list[dict[str, Any]]:
    def portable(owner: dict[str, Any]) -> dict[str, Any]:
        return {**owner, "frames": stacks.stack(_of(owner["frames"]))} if "frames" in owner else owner

    return [
        {**portable(segment), "blocks": [portable(block) for block in segment["blocks"]]}
        for segment in segments
        if segment.get("device", index) == index
    ]


# Steps whose every allocation is recorded with its stack: a snapshot in PyTorch's own form, with our notes.
#
# On a GPU the allocator itself keeps the history, and every event carries the open ranges
# (`forward|blocks.3.attention|softmax`). On a CPU the same file is written from the profiler's allocator events.
# Nothing here allocates on the device, so the peak of the recorded step is that of any other.

_COMPRESSION = 2  # nine tenths of what level 6 saves, in a third of the time
_PICKLE_PROTOCOL = 4


class MemoryRecorder(Recorder):
    """Records every allocation of the next step, or steps. Make it just before the first begins.

    stacks: `python`, or `all` for those of C++ too, which take minutes to name. held_before_bytes: what the process
    had allocated before the step was made. several: whether more than one step is recorded, to see what they leave.
    """

    def __init__(
        self,
        step: Step,
        device: torch.device,
        *,
        stacks: str = "python",
        held_before_bytes: int = 0,
        several: bool = False,
    ) -> None:
        gc.collect()
        self._keepers = Keepers(step.model, step.optimizer, device) if several else None
        self._ends_us: list[int] = []
        self._kept: tuple[KeptTensor, ...] = ()
        self._step = step
        self._sequence = SequenceNotes(path for path, _ in step.model.named_modules() if path)
        self._notes = TensorNotes(step, device)
        self._notes.resident()
        self._history: AllocatorRecording | ProfilerRecording = (
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
            self._notes.casts.clear()
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

    def save(self, directory: Path, *, workload: Workload, device_name: str = "") -> PhaseMemory:
        """Write `memory.pickle.gz`; returns the figures of the phases."""
        snapshot, measured = self._history.snapshot(self._notes)
        notes = MemoryNotes(
            workload=workload,
            device_name=device_name,
            measured=measured,
            phases=tuple(self._spans),
            tensors=tuple(self._notes.notes),
            step_ends_us=tuple(self._ends_us),
            kept=self._kept,
        )
        whole = {**snapshot, NOTES_KEY: msgspec.to_builtins(notes)}
        temporary = directory / f".{MEMORY_FILE}.{os.getpid()}.tmp"  # the name appears when the file is whole
        try:
            with gzip.open(temporary, "wb", compresslevel=_COMPRESSION) as file:
                pickle.dump(whole, file, protocol=_PICKLE_PROTOCOL)
            temporary.replace(directory / MEMORY_FILE)
        finally:
            temporary.unlink(missing_ok=True)
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


@dataclass(frozen=True, kw_only=True)
class MemoryCapture:
    """The file and figures of a step whose allocations were recorded."""

    measured: PhaseMemory
    failure: BaseException | None = None
    """The error that ended the step early when memory ran out; the file holds what was allocated at that moment."""


def capture_memory(
    step: Step,
    device: torch.device,
    directory: Path,
    *,
    workload: Workload,
    device_name: str = "",
    stacks: str = "python",
    steps: int = 1,
    held_before_bytes: int = 0,
    is_out_of_memory: Callable[[BaseException], bool] | None = None,
) -> MemoryCapture:
    """Record one step, or several, into `memory.pickle.gz`, with stacks as MemoryRecorder takes them.

    `is_out_of_memory` tells the exceptions of a step that ran out of memory; that step is kept as far as it went.
    """
    step.prepare()
    failure = None
    recorder = MemoryRecorder(step, device, stacks=stacks, held_before_bytes=held_before_bytes, several=steps > 1)
    with recorder.running():
        try:
            for i in range(steps):
                if i:
                    step.prepare()
                drive(step, recorder)
            recorder.steps_over()
        except Exception as error:
            if is_out_of_memory is None or not is_out_of_memory(error):
                raise
            failure = error
    return MemoryCapture(measured=recorder.save(directory, workload=workload, device_name=device_name), failure=failure)


# Where autocast keeps its 16-bit copies of parameters.
#
# Autocast casts a parameter when a product first asks for it, and keeps the copy until its region ends. The cache has
# no reader. But a product under autocast is called with the copy, so a product that is caught below autocast, before it
# runs, shows the copy that the cache holds; nothing is computed and nothing allocated.


class _NotCached(Exception):
    """Raised when autocast asks for a new copy, since its cache holds none."""


class _Caught(TorchDispatchMode):
    """Ends every operator before it runs, and keeps what the product was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.operand: torch.Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name != "aten::mm":
            # This cast would be cached: autocast would keep any tensor that it returned as the parameter's copy.
            raise _NotCached
        self.operand = args[0]
        return args[0]


def cast_copy(parameter: torch.Tensor) -> torch.Tensor | None:
    """The copy of this parameter that autocast holds now, on this thread; None where it holds none."""
    if not torch.is_autocast_enabled(parameter.device.type) or not torch.is_autocast_cache_enabled():
        return None
    try:
        # Modes that see functions of PyTorch must not see this one: their own operators would be caught.
        with torch.no_grad(), torch._C.DisableTorchFunction(), _Caught() as caught:
            torch.mm(parameter, parameter)
    except _NotCached:
        return None
    return caught.operand if caught.operand is not parameter else None
