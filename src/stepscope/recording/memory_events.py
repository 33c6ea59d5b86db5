"""The history of allocations on a CPU, from the allocator events of torch.profiler, in the form that a GPU's has.

The profiler's tree says in which operator and which range an allocation lies. In backward it names the node, by the
number that forward gave it, and with the number the module. Python's stack is taken by a mode that sees every call of
PyTorch's functions: the profiler's own knows the line of a call, but not that of `q @ k`.
"""

import contextlib
import sys
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor
from torch._C._profiler import _ExtraFields_Allocation, _ExtraFields_TorchOp, _ProfilerEvent
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity

from stepscope.core.evidence import PhaseMemory
from stepscope.core.memory_notes import SEGMENTS_BEFORE_KEY
from stepscope.core.range_names import BACKWARD, FORWARD, FORWARD_BACKWARD, GRADIENT_ACCUMULATION, OPTIMIZER
from stepscope.recording import ranges
from stepscope.recording.backward_ranges import SequenceNotes
from stepscope.recording.memory_frames import Frame, StackTable, joined_ranges
from stepscope.recording.observe import gradient_bytes, parameter_bytes
from stepscope.recording.step import Recorder, Step
from stepscope.recording.tensor_notes import TensorNotes

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

    def __init__(self, step: Step, sequence: SequenceNotes, residents: Iterable[Tensor]) -> None:
        self._step, self._sequence = step, sequence
        # Released here, the last step's loss does not end inside this one. The profiler warns of a release whose
        # allocation it did not see.
        step.loss = None
        self._releases = Releases(residents)
        self._emitter = _NamedEmitter()
        self.emitters: tuple[ranges.Emitter, ...] = (self._emitter,)
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
        resident = notes.resident_sizes
        changes = list(self._known(self._with_releases(self._changes(), resident), dict(resident)))
        stacks = StackTable()
        events = [event for change in changes for event in self._events_of(change, stacks)]
        snapshot = {"segments": [], "device_traces": [events], SEGMENTS_BEFORE_KEY: []}
        return snapshot, self._measured(changes, sum(resident.values()))

    def _changes(self) -> list[_Change]:
        """Every allocator event of the tree, in the order of time."""
        found: list[_Change] = []
        waiting = [(event, _Place()) for event in self._tree]
        while waiting:
            event, place = waiting.pop()
            fields = event.extra_fields
            if isinstance(fields, _ExtraFields_Allocation):
                if fields.device.type == "cpu":
                    found.append(_Change(event.start_time_ns, fields.ptr, fields.alloc_size, place))
            elif isinstance(fields, _ExtraFields_TorchOp):
                place = self._inside(event, fields.sequence_number, place)
            waiting += ((child, place) for child in event.children)
        return sorted(found, key=lambda change: change.time_ns)

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
        taken = {change.address: change.time_ns for change in reversed(changes) if change.bytes > 0}
        released = [
            _Change(min(at, taken.get(address, at)), address, -resident[address], _Place())
            for address, at in self._releases.time_ns.items()
            if address in resident
        ]
        return sorted([*released, *changes], key=lambda change: change.time_ns)

    def _known(self, changes: list[_Change], live: dict[int, int]) -> Iterator[_Change]:
        """The changes, less the releases of memory whose allocation was not recorded."""
        for change in changes:
            if change.bytes > 0:
                live[change.address] = change.bytes
                yield change
            elif live.pop(change.address, None) is not None:
                yield change

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

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        attribute = getattr(func, "__name__", "") == "__get__"  # as .shape: it allocates nothing, and there are many
        # A range around the call that opens a range would end before that range.
        if attribute or getattr(func, "__module__", "") == "torch._ops.profiler":
            return func(*args, **(kwargs or {}))
        stack = tuple(_frames(sys._getframe(1)))
        number = self._numbers.setdefault(stack, len(self.stacks))
        if number == len(self.stacks):
            self.stacks.append(stack)
        with ranges.OwnRange(f"{_CALL}{number}"):
            return func(*args, **(kwargs or {}))


def _frames(frame: FrameType | None) -> Iterator[Frame]:
    while frame is not None:
        if not frame.f_code.co_filename.endswith(_DISPATCHING):
            yield frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
