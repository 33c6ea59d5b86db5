"""A CUDA memory snapshot of PyTorch (`torch.cuda.memory._dump_snapshot`), checked and typed: dicts end here.

Versions differ in what they write. Up to PyTorch 1.13 the snapshot is the list of segments alone; 2.0 has no times of
events, 2.3 no user metadata, 2.5 no annotations. What is missing has a default here; what has the wrong type is an
error that names the field.
"""

import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntFlag
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import msgspec
import numpy as np

from stepscope.allocations.plain_pickle import Columns, StackPlaces, read_with_columns
from stepscope.core.environment import without_collector
from stepscope.core.errors import InputError, one_line, printable
from stepscope.core.evidence import NOTES_KEY, NOTES_VERSION, SEGMENTS_BEFORE_KEY, MemoryNotes
from stepscope.core.run_directory import MEMORY_FILE, RUN_FILE

"""The artifact of kind `memory` in a run directory."""
NO_HISTORY_REMEDY = (
    "record one with torch.cuda.memory._record_memory_history() before the step, or take it with "
    "stepscope run --record memory"
)

_T = TypeVar("_T")
_MOST_BYTES = 2**61
"""Sums of sizes are 64-bit integers."""
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Word = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Index = Annotated[int, msgspec.Meta(ge=0, le=2**16)]


PoolId = tuple[_Word, _Word]
ORDINARY: PoolId = (0, 0)
"""The id of the pool that serves whatever is not directed to another: to that of a CUDA graph, or a MemPool."""
GIVES = frozenset({"segment_alloc", "segment_map"})
"""Actions by which the driver's memory comes to the allocator."""
TAKES = frozenset({"segment_free", "segment_unmap"})
_OF_SEGMENTS = GIVES | TAKES

MOST_EVENTS = 5_000_000
"""Events that a history may have; a large model's step makes some ten thousand. Each takes about 3 us and 400 bytes."""


class Event(msgspec.Struct, frozen=True, gc=False):
    """One entry of the history. `size`: bytes requested; for a segment, the bytes that the driver gave or took back."""

    action: str
    addr: _Bytes = 0
    size: _Bytes = 0
    stream: _Word = 0
    time_us: _Bytes = 0
    user_metadata: str = ""
    device_free: _Bytes = 0
    """Bytes that the driver had left; only an `oom` event has it, in place of an address."""
    pool_id: PoolId | None = None
    """The allocator's pool; None where PyTorch did not write it."""
    frames: Any = ()
    """The stack, checked only when read: stacks are most of a snapshot, and a copy would double it."""


class History(Sequence[Event]):
    """The events of one device, kept by column: an Event is made where one is asked for."""

    def __init__(self, columns: Columns) -> None:
        words, places = columns.words, columns.places
        self.columns = columns
        self.addresses, self.sizes, self.streams, self.times = (words[name] for name in Columns.WORDS)
        self.kinds, self.ranges, self._pools, self.stacks = (
            places[name] for name in (*Columns.TEXTS, "pool_id", "frames")
        )
        self.actions, self.range_texts = ([*texts] for texts in columns.texts.values())
        """Texts by the numbers in `kinds`, and in `ranges` (the open ranges, user_metadata)."""
        self.distinct_stacks = columns.stacks.stacks
        self._pool_ids: list[PoolId | None] = [*columns.pools]

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, at: Any) -> Any:
        """The event at a place, or a list of those of a slice."""
        if isinstance(at, slice):
            return [self[i] for i in range(len(self))[at]]
        place = cast("int", at)
        return Event(
            action=self.actions[self.kinds[place]],
            addr=self.addresses[place],
            size=self.sizes[place],
            stream=self.streams[place],
            time_us=self.times[place],
            user_metadata=self.range_texts[self.ranges[place]],
            device_free=self.columns.device_free.get(place % len(self), 0),
            pool_id=self._pool_ids[self._pools[place]],
            frames=self.distinct_stacks[self.stacks[place]],
        )

    def steps(self) -> Iterator[tuple[str, int, int, int]]:
        """The action, address, size and stream of each event: what a replay needs."""
        return zip(map(self.actions.__getitem__, self.kinds), self.addresses, self.sizes, self.streams, strict=True)

    def at(self, *actions: str) -> np.ndarray[Any, Any]:
        """The places of the events of these actions, ascending."""
        wanted = np.array([action in actions for action in self.actions], dtype=bool)
        return np.flatnonzero(wanted[np.frombuffer(self.kinds, dtype=np.int32)])

    def where(self, *actions: str) -> list[int]:
        """The events of these actions."""
        return self.at(*actions).tolist()


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a segment."""

    size: _Bytes
    state: str
    address: _Bytes | None = None
    requested_size: _Bytes | None = None
    frames: Any = ()

    @property
    def is_active(self) -> bool:
        return self.state == "active_allocated"

    @property
    def awaits_free(self) -> bool:
        """Whether its owner freed it while another stream still uses it (PyTorch 2.0 calls that pending)."""
        return self.state in {"active_awaiting_free", "active_pending_free"}


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that the driver gave in one piece; in an expandable segment, a run of mapped pages."""

    address: _Bytes
    total_size: _Bytes
    blocks: list[Block]
    device: _Index = 0
    stream: _Word = 0
    segment_type: str = ""
    is_expandable: bool = False
    segment_pool_id: PoolId | None = None
    """The allocator's pool; None where PyTorch did not write it."""

    @property
    def end(self) -> int:
        return self.address + self.total_size


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the allocator that change the sizes of blocks."""

    max_split_size: _Word = -1
    expandable_segments: bool = False
    roundup_power2_divisions: dict[str, _Index] = {}


class Annotation(msgspec.Struct, frozen=True, kw_only=True):
    """A range of torch.profiler.record_function that began or ended while the history was recorded."""

    stage: str = ""
    name: str = ""
    device: _Word = 0
    time_us: _Bytes = 0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The history of one device, and the allocator's segments when it ended."""

    source: str
    device: int
    devices: tuple[int, ...]
    """Indices of all devices that have a history or segments."""
    others: tuple["Snapshot", ...] = ()
    """The other devices of the same file. One without a history has no events."""
    events: History
    times: Sequence[int]
    """Time of each event, in microseconds since 1970, never falling."""
    segments: list[Segment]
    segments_before: list[Segment] | None
    """The segments when the history began; None where the snapshot does not hold them."""
    settings: Settings
    annotations: list[Annotation]
    notes: MemoryNotes | None
    has_times: bool

    @property
    def start_us(self) -> int:
        return self.times[0]

    @cached_property
    def has_segments(self) -> bool:
        """Whether the history is that of an allocator that holds segments, as on a GPU; on a CPU there is none."""
        return bool(self.segments or self.segments_before or self.segment_events)

    @cached_property
    def segment_events(self) -> list[int]:
        """Indices of the events by which memory comes from the driver or goes back."""
        return self.events.where(*_OF_SEGMENTS)

    def last_event_until(self, time_us: int) -> int:
        """Index of the last event at or before an absolute time; -1 before all of them."""
        return bisect_right(self.times, time_us) - 1


def read_snapshot(path: Path, *, device: int | None = None) -> Snapshot:
    """The snapshot in a file, or in a run directory.

    Without `device` the one that held most at one time, of those with a history. Raises InputError, in one line with
    the file and the remedy, for a pickle that is none, holds no history, or has no such device.
    """
    try:
        file = path / MEMORY_FILE if path.is_dir() else path
        is_empty = path.is_dir() and not file.is_file()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    if is_empty:
        remedy = " (measure it again with --record memory)" if (path / RUN_FILE).exists() else ""
        raise InputError(f"{path}: this directory holds no memory snapshot, {MEMORY_FILE}{remedy}")
    with without_collector():
        return snapshot_from(read_with_columns(file), str(path), device=device)


def snapshot_from(content: object, source: str, *, device: int | None = None) -> Snapshot:
    """A snapshot from the object in its pickle, where Columns may stand for the lists of events."""
    fields, kind = _dict(content), type(content).__name__
    if isinstance(content, list):  # up to PyTorch 1.13
        fields["segments"] = content
    if not {"segments", "device_traces"} & fields.keys():
        what = "a dict without segments" if isinstance(content, dict) else f"a {kind}"
        raise InputError(f"{source}: no memory snapshot: it holds {what}, not what _dump_snapshot() writes")
    segments = _convert(fields.get("segments", []), list[Segment], source, "segments")
    traces = _convert(fields.get("device_traces", []), list[Any], source, "device_traces")
    notes = _notes(fields.get(NOTES_KEY), source)
    for i, trace in enumerate(traces):
        if not isinstance(trace, Columns):
            _convert(trace, list[Any], source, f"device_traces[{i}]")
    lengths = {i: len(trace) for i, trace in enumerate(traces)}
    devices = tuple(sorted({i for i, length in lengths.items() if length} | {s.device for s in segments}))
    with_history = [i for i, length in lengths.items() if length]
    listed = ", ".join(map(str, with_history))
    if device is not None and device not in devices:
        there = f"those with a history are {listed}" if with_history else "no device has a history"
        raise InputError(f"{source}: nothing of device {device} is in this snapshot: {there}")
    if not with_history or (device is not None and device not in with_history):
        of = f" of device {device}" if with_history else ""
        others = f" (there is one of {listed})" if with_history else ""
        raise InputError(f"{source}: this snapshot holds no history{of}{others}: {NO_HISTORY_REMEDY}")
    before = fields.get(SEGMENTS_BEFORE_KEY)
    if before is not None:
        before = _convert(before, list[Segment], source, SEGMENTS_BEFORE_KEY)
    settings = _convert(fields.get("allocator_settings") or {}, Settings, source, "allocator_settings")
    annotations = _convert(fields.get("external_annotations") or [], list[Annotation], source, "external_annotations")
    # A pickle's text may hold what UTF-8 cannot, and so no frame.
    annotations = [msgspec.structs.replace(each, name=printable(each.name)) for each in annotations]

    def of_device(index: int) -> Snapshot:
        events = _history(traces[index] if index < len(traces) else [], f"device_traces[{index}]", source)
        # Times never fall: the events' order is the allocator's, and clocks of two cores may differ by a little.
        # Histories of PyTorch 2.0 have no times: places in the history stand for them.
        has_times = bool(events and events.times[-1])
        rising = np.maximum.accumulate(np.frombuffer(events.times, dtype=np.int64))
        times = array("q", rising.tobytes()) if has_times else array("q", range(len(events)))
        return Snapshot(
            source=source,
            device=index,
            devices=devices,
            events=events,
            times=times,
            segments=_of_device(segments, index, source),
            segments_before=None if before is None else _of_device(before, index, source),
            settings=settings,
            annotations=[each for each in annotations if each.device in (index, -1)],
            notes=notes,
            has_times=has_times,
        )

    snapshots = [of_device(index) for index in devices]
    recorded = [one for one in snapshots if one.events and device in (None, one.device)]
    chosen = max(recorded, key=lambda one: (_most_held(one) if len(recorded) > 1 else 0, -one.device))
    return replace(chosen, others=tuple(one for one in snapshots if one is not chosen))


def _history(trace: Columns | list[Any], where: str, source: str) -> History:
    """The history of one device."""
    if len(trace) > MOST_EVENTS:
        raise InputError(
            f"{source}: a history of {len(trace):,} events is more than the {MOST_EVENTS:,} that are read: "
            "record fewer steps, or pass max_entries to _record_memory_history"
        )
    if isinstance(trace, Columns):
        columns = trace
    else:
        columns = Columns(StackPlaces())
        columns.take(_convert(trace, list[Event], source, where), attrgetter)
    history = History(columns)
    if np.frombuffer(history.sizes, dtype=np.int64).sum(dtype=float) > _MOST_BYTES:
        raise InputError(f"{source}: no memory snapshot that can be read: its sizes add up to more than any memory")
    return history


def _most_held(snapshot: Snapshot) -> int:
    """The most bytes that were asked for and not yet freed at one time, from the end of the history backwards."""
    held = sum(block.size for segment in snapshot.segments for block in segment.blocks if block.is_active)
    most = held
    for action, _, size, _ in reversed([*snapshot.events.steps()]):
        if action == "alloc":
            held -= size
        elif action == "free_requested":
            held += size
            most = max(most, held)
    return most


def _dict(value: object) -> dict[Any, Any]:
    """The value where it is a dict, else an empty one."""
    return cast("dict[Any, Any]", value) if isinstance(value, dict) else {}


def _convert(value: object, type: type[_T], source: str, where: str) -> _T:
    """Plain data as a type; InputError names the field that does not fit."""
    try:
        return msgspec.convert(value, type)
    except (msgspec.ValidationError, RecursionError, OverflowError, UnicodeEncodeError) as fault:
        message = one_line(fault).replace("`$", f"`{where}")
        at = "" if where in message else f" - at `{where}`"
        raise InputError(f"{source}: no memory snapshot that can be read: {message}{at}") from None


def _notes(value: object, source: str) -> MemoryNotes | None:
    if value is None:
        return None
    version = _dict(value).get("version", NOTES_VERSION)
    if version != NOTES_VERSION:
        shown = version if isinstance(version, int) else type(version).__name__  # the text of a container has no bound
        raise InputError(
            f"{source}: its notes of stepscope have version {shown}; this stepscope reads version {NOTES_VERSION}: "
            "upgrade stepscope, or take the snapshot again"
        )
    notes = {**_dict(value)}
    if isinstance(workload := notes.get("workload"), dict):
        # Notes from before there were several kinds of workload have no kind.
        notes["workload"] = {"kind": "textbook", **workload}
    try:
        return _convert(notes, MemoryNotes, source, NOTES_KEY)
    except InputError as fault:
        raise InputError(one_line(fault)) from None


def _of_device(segments: list[Segment], device: int, source: str) -> list[Segment]:
    """Segments of one device by address, every block with its address and inside its segment."""
    complete: list[Segment] = []
    end = 0
    for segment in sorted((s for s in segments if s.device == device), key=lambda s: s.address):
        at = segment.address
        blocks: list[Block] = []
        for block in segment.blocks:
            if block.address not in (None, at):
                raise InputError(f"{source}: a block at {block.address:#x} where its segment has come to {at:#x}")
            blocks.append(msgspec.structs.replace(block, address=at))
            at += block.size
        if at != segment.end or segment.address < end:
            raise InputError(f"{source}: the segment at {segment.address:#x} overlaps, or its blocks do not fill it")
        end = segment.end
        complete.append(msgspec.structs.replace(segment, blocks=blocks))
    return complete


# Stacks of a snapshot: each kept once, with the line that tells most and what its frames give away.
#
# PyTorch writes a frame once and refers to it, so that stacks are told apart by the identity of their frames.


NO_STACK = 0
_LONGEST_NAME = 80
AUTOGRAD = "autograd"
"""How the site begins for an allocation whose stack has no Python, since autograd's own thread made it."""


DEEPEST = 2000
"""The most frames of a stack that are read, innermost first; Python stops at a thousand calls by default."""


class Sign(IntFlag):
    """Signs that a frame gives of the allocation above it."""

    PYTHON = 1
    LIBRARY = 2
    """Installed code, or the standard library's."""
    TORCH = 4
    OPTIMIZER = 8
    ZERO_GRAD = 16
    BACKWARD = 32
    AUTOCAST_EXIT = 64
    WORKSPACE = 128
    CALL = 256
    """A module's forward."""
    CLOSURE = 512
    """What an optimizer calls to have the loss computed."""
    STEP = 1024
    """A function named `step`, or as an update is, that nothing tells to be an optimizer's: it may be a trainer's."""
    MODEL = 2048
    """A module's own making, moving or loading."""
    QUANTISED = 4096
    """A library of quantised weights."""


class Frame(msgspec.Struct, frozen=True):
    """A line of code on a stack."""

    name: str
    filename: str = ""
    line: int = 0

    def __str__(self) -> str:
        return printable(f"{self.filename}:{self.line} {self.name}" if self.filename else self.name)


# As plain numbers, since flags of an enum would take most of the time of putting stacks together.
_PYTHON, _LESS_TELLING = int(Sign.PYTHON), (int(Sign.LIBRARY), int(Sign.TORCH), 0)
_OPTIMIZER, _STEP = int(Sign.OPTIMIZER), int(Sign.STEP)
_INNER = int(Sign.CALL | Sign.CLOSURE | Sign.BACKWARD | Sign.MODEL)
_OUTSIDE = ~int(Sign.OPTIMIZER | Sign.STEP)
_INSTALLED = re.compile(r"(?:^|/)(?:(?:site|dist)-packages|lib/python3[^/]*)/|^<frozen")
_TORCH = re.compile(
    r"^torch/|(?:(?:site|dist)-packages|(?:^|/)pytorch)/torch/"
    r"|/torch/(?:nn/modules|nn/functional\.py|optim|autograd|utils|amp|_\w+|functional\.py)(?:/|$|\.py)"
)
_OWN = re.compile(r"(?:^|/)stepscope/(models/)?")
_NATIVE = re.compile(r"^$|^\?\?$|\.(?:c|cc|cpp|cxx|cu|cuh|h|hpp|so|inl|o)$|\.so\.")
_BACKWARD = re.compile(r"autograd::Engine::|Backward\d*(?:::apply|$)|autograd::(?:Node::operator|AccumulateGrad)")
_NODE = re.compile(r"(?:^|::)(\w+?)Backward\d*(?:::apply|$)")
_OPERATOR = re.compile(r"^(?:at::_ops::(?=\w+::call)|aten::)(\w+)")
_OPTIMIZER_FOLDER = re.compile(r"(?:^|/)optim(?:s|i[sz]ers?)?/[^/]*$", re.IGNORECASE)
_OPTIMIZER_FILE = re.compile(
    r"(?:^|[/_\W])[a-z0-9]*optim(?:s|i[sz]ers?|i[sz]ation)?(?![a-z])[^/]*$"
    r"|(?:^|[/_])(?:adam|adamw|adam8bit|adafactor|adagrad|adan|came|galore|lamb|lars|lion|muon|nadam|prodigy|radam|rmsprop"
    r"|sgd|shampoo|soap|sophia)(?:_[^/]*)?\.py$"
    r"|(?:^|/)deepspeed/runtime/zero/stage[^/]*$",
    re.IGNORECASE,
)
"""Files of optimizers that need not derive from torch.optim.Optimizer: by name, or by their algorithm."""
_OPTIMIZER_CALL = re.compile(r"_?step|_?update\w*|apply_grad\w*|\w*(?:state|master|moment|fp32)\w*")
_OPTIMIZER_MADE = re.compile(r"__init__|_?init_\w+")
"""Functions that only tell in such a file: a folder of optimizers may also hold a model."""
_STEP_CALL = re.compile(
    r"step|apply_grad\w*|update_(?:param|weight)\w*|(?:optim\w*|adam\w*|sgd|lion|muon|momentum|rmsprop)_(?:step|update)"
)
_QUANTISED = re.compile(
    r"(?:^|/)(?:bitsandbytes/(?!optim/)|hqq/|torchao/(?:quantization|dtypes)/|quanto/|gptqmodel/|auto_gptq/|awq/)"
)
_MODEL = re.compile(r"(?:^|/)torch/nn/(?:modules/\w+|parameter)\.py$")
_MODEL_CALL = re.compile(r"_apply|__init__|reset_parameters|__deepcopy__|to_empty|materialize|load_state_dict")
_MODEL_LOAD = re.compile(r"(?:^|/)(?:transformers|accelerate|diffusers|safetensors)/.*\.py$")
_MODEL_LOAD_CALL = re.compile(r"from_pretrained|_?load_\w+|set_module_tensor_to_device|_materialize_copy")
_WORKSPACE = re.compile(r"CUDABlas(?:Lt)?(?:Workspace|Handle)|[cC]ublas\w*[wW]orkspace")


def signs_of(frame: Frame) -> Sign:
    """The signs that one frame gives."""
    path, name = frame.filename.replace("\\", "/"), frame.name
    signs = Sign(0)
    if _NATIVE.search(path):
        signs |= Sign.BACKWARD if _BACKWARD.search(name) else Sign(0)
        signs |= Sign.AUTOCAST_EXIT if "autocast::clear_cache" in name else Sign(0)
        return signs | (Sign.WORKSPACE if _WORKSPACE.search(name) else Sign(0))
    signs |= Sign.PYTHON
    match = _OWN.search(path)
    if _TORCH.search(path):
        signs |= Sign.TORCH | Sign.LIBRARY
    elif (match and not match[1]) or (not match and _INSTALLED.search(path)):
        signs |= Sign.LIBRARY
    if (
        "torch/optim/" in path
        or (_OPTIMIZER_CALL.fullmatch(name) and (_OPTIMIZER_FILE.search(path) or _OPTIMIZER_FOLDER.search(path)))
        or (_OPTIMIZER_MADE.fullmatch(name) and _OPTIMIZER_FILE.search(path))
    ):
        signs |= Sign.OPTIMIZER
    elif _STEP_CALL.fullmatch(name) and not signs & Sign.LIBRARY:
        signs |= Sign.STEP
    elif "closure" in name:
        signs |= Sign.CLOSURE
    signs |= Sign.QUANTISED if _QUANTISED.search(path) else Sign(0)
    if _MODEL.search(path) and name in {"_call_impl", "_wrapped_call_impl", "inner"}:
        signs |= Sign.CALL
    elif (_MODEL.search(path) and _MODEL_CALL.fullmatch(name)) or (
        _MODEL_LOAD.search(path) and _MODEL_LOAD_CALL.fullmatch(name)
    ):
        signs |= Sign.MODEL
    if name == "zero_grad":
        signs |= Sign.ZERO_GRAD
    if signs & Sign.TORCH and name in {"backward", "_engine_run_backward"}:
        signs |= Sign.BACKWARD
    if path.endswith("amp/autocast_mode.py") and name == "__exit__":
        signs |= Sign.AUTOCAST_EXIT
    return signs


class Stacks:
    """Every stack of a snapshot, each with a number; number 0 is the empty stack."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._numbers: dict[tuple[int, ...], int] = {(): NO_STACK}
        self._by_frames: dict[tuple[int, ...], int] = {(): NO_STACK}
        self._frame_of_id: dict[int, int] = {}
        self._frame_of: dict[Frame, int] = {}
        self._frames: list[Frame] = []
        self._frame_signs: list[int] = []
        self._stacks: list[tuple[int, ...]] = [()]
        self.signs: list[int] = [0]
        """By number of the stack, the signs of all its frames together, as bits of Sign."""
        self.sites: list[str] = [""]
        """By number of the stack, the line of code or the operator that tells most about it."""

    def number(self, frames: Sequence[Any] | float | None) -> int:
        """The number of a stack, as the snapshot has it. Raises InputError for what is no list of frames."""
        if not isinstance(frames, (list, tuple)):
            raise InputError(f"{self._source}: no memory snapshot that can be read: `frames` holds no list")
        frames = frames[:DEEPEST]
        # The frames' own objects live as long as the snapshot, so that an id stays theirs.
        key = tuple(map(id, frames))
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._new(tuple(map(self._frame, frames)))
        return number

    def _new(self, frames: tuple[int, ...]) -> int:
        number = self._by_frames.get(frames)
        if number is not None:
            return number
        number = self._by_frames[frames] = len(self._stacks)
        signs, of_frame = 0, self._frame_signs
        for frame in frames:
            of_this = of_frame[frame]
            if of_this & _OPTIMIZER:
                last, others = self._frames[frame], (self._frames[other] for other in frames)
                if any(other.name == "<module>" and other.filename == last.filename for other in others):
                    # The script that the process runs. Named after the optimizer that it uses, as train_adamw.py, it
                    # has its model and its trainer, too.
                    of_this = of_this & ~_OPTIMIZER | (_STEP if _STEP_CALL.fullmatch(last.name) else 0)
            # What an optimizer calls to have the loss computed is none of its own; an optimizer that a hook of backward
            # calls is.
            signs |= of_this & _OUTSIDE if signs & _INNER else of_this
        self._stacks.append(frames)
        self.signs.append(signs)
        self.sites.append(self._site(frames))
        return number

    def _frame(self, raw: Any) -> int:
        number = self._frame_of_id.get(id(raw))
        if number is not None:
            return number
        frame = _convert(raw, Frame, self._source, "frames[...]")
        number = self._frame_of.get(frame)
        if number is None:
            number = self._frame_of[frame] = len(self._frames)
            self._frames.append(frame)
            self._frame_signs.append(int(signs_of(frame)))
        self._frame_of_id[id(raw)] = number
        return number

    def frames(self, number: int) -> Sequence[str]:
        """The frames of a stack, innermost first: file:line function."""
        return [str(self._frames[frame]) for frame in self._stacks[number]]

    def _site(self, frames: tuple[int, ...]) -> str:
        """The line that tells most: the innermost of the user's own code, else of a library, else of PyTorch. Where
        autograd runs below all Python, or on a thread without, the operator whose backward it is."""
        first = next((i for i, number in enumerate(frames) if self._frame_signs[number] & _PYTHON), len(frames))
        for number in frames[:first]:
            if node := _NODE.search(self._frames[number].name):
                return f"{AUTOGRAD}, of {node[1]}"
        for unwanted in _LESS_TELLING:
            for number in frames:
                signs = self._frame_signs[number]
                if signs & _PYTHON and not signs & unwanted:
                    frame = self._frames[number]
                    last_two = "/".join(frame.filename.replace("\\", "/").split("/")[-2:])
                    return printable(f"{last_two}:{frame.line} {frame.name}")
        # A stack without Python frames has the name of the outermost operator, else of the outermost frame.
        names = [self._frames[number].name for number in frames]
        operator = next((match[1] for name in reversed(names) if (match := _OPERATOR.search(name))), None)
        if any(self._frame_signs[number] & Sign.BACKWARD for number in frames):
            return f"{AUTOGRAD}, {operator}" if operator else AUTOGRAD
        return printable((operator or names[-1])[:_LONGEST_NAME]) if names else ""
