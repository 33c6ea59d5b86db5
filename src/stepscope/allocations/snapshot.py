"""A CUDA memory snapshot of PyTorch (`torch.cuda.memory._dump_snapshot`), checked and typed: dicts end here.

Versions differ in what they write. Up to PyTorch 1.13 the snapshot is the list of segments alone; 2.0 has no times of
events, 2.3 no user metadata, 2.5 no annotations. What is missing has a default here; what has the wrong type is an
error that names the field.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import msgspec

from stepscope.allocations.plain_pickle import read_plain_pickle, without_collector
from stepscope.core.errors import InputError, one_line, printable
from stepscope.core.memory_notes import NOTES_KEY, NOTES_VERSION, SEGMENTS_BEFORE_KEY, MemoryNotes
from stepscope.core.run_files import MEMORY_FILE, RUN_FILE

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
"""Events that a history may have; a large model's step makes some ten thousand. Each takes about 5 us and 1 KB."""


class Event(msgspec.Struct, frozen=True, gc=False):
    """One entry of the history. `size`: bytes requested; for a segment, the bytes that the driver gave or took back."""

    action: str
    addr: _Bytes = 0
    size: _Bytes = 0
    stream: _Word = 0
    time_us: _Bytes = 0
    user_metadata: str = ""
    compile_context: str = ""
    device_free: _Bytes = 0
    """Bytes that the driver had left; only an `oom` event has it, in place of an address."""
    pool_id: PoolId | None = None
    """The allocator's pool; None where PyTorch did not write it."""
    frames: Any = ()
    """The stack, checked only when read (stacks.py): stacks are most of a snapshot, and a copy would double it."""


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
    events: list[Event]
    times: list[int]
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
        return [i for i, event in enumerate(self.events) if event.action in _OF_SEGMENTS]

    def last_event_until(self, time_us: int) -> int:
        """Index of the last event at or before an absolute time; -1 before all of them."""
        return bisect_right(self.times, time_us) - 1


def read_snapshot(path: Path, *, device: int | None = None) -> Snapshot:
    """The snapshot in a file, or in a run directory.

    Without `device` the one that held most at one time, of those with a history. Raises InputError, in one line with
    the file and the remedy, for a pickle that is none, holds no history, or has no such device.
    """
    file = find_snapshot(path)
    with without_collector():
        return snapshot_from(read_plain_pickle(file), str(path), device=device)


def find_snapshot(path: Path) -> Path:
    """The file itself, or the snapshot that a run directory holds."""
    try:
        if not path.is_dir():
            return path
        if (path / MEMORY_FILE).is_file():
            return path / MEMORY_FILE
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    remedy = " (measure it again with --record memory)" if (path / RUN_FILE).exists() else ""
    raise InputError(f"{path}: this directory holds no memory snapshot, {MEMORY_FILE}{remedy}")


def snapshot_from(content: object, source: str, *, device: int | None = None) -> Snapshot:
    """A snapshot from the object in its pickle."""
    fields, kind = _dict(content), type(content).__name__
    if isinstance(content, list):  # up to PyTorch 1.13
        fields["segments"] = content
    if not {"segments", "device_traces"} & fields.keys():
        what = "a dict without segments" if isinstance(content, dict) else f"a {kind}"
        raise InputError(f"{source}: no memory snapshot: it holds {what}, not what _dump_snapshot() writes")
    segments = _convert(fields.get("segments", []), list[Segment], source, "segments")
    traces = _convert(fields.get("device_traces", []), list[Any], source, "device_traces")
    notes = _notes(fields.get(NOTES_KEY), source)
    lengths = {i: len(_convert(trace, list[Any], source, f"device_traces[{i}]")) for i, trace in enumerate(traces)}
    devices = tuple(sorted({i for i, length in lengths.items() if length} | {s.device for s in segments}))
    _check_device(device, lengths, devices, source)
    before = fields.get(SEGMENTS_BEFORE_KEY)
    if before is not None:
        before = _convert(before, list[Segment], source, SEGMENTS_BEFORE_KEY)
    settings = _convert(fields.get("allocator_settings") or {}, Settings, source, "allocator_settings")
    annotations = _convert(fields.get("external_annotations") or [], list[Annotation], source, "external_annotations")
    # A pickle's text may hold what UTF-8 cannot, and so no frame.
    annotations = [msgspec.structs.replace(each, name=printable(each.name)) for each in annotations]

    def of_device(index: int) -> Snapshot:
        events = _events(traces[index] if index < len(traces) else [], f"device_traces[{index}]", source)
        return Snapshot(
            source=source,
            device=index,
            devices=devices,
            events=events,
            times=_rising(events),
            segments=_of_device(segments, index, source),
            segments_before=None if before is None else _of_device(before, index, source),
            settings=settings,
            annotations=[each for each in annotations if each.device in (index, -1)],
            notes=notes,
            has_times=bool(events and events[-1].time_us),
        )

    found = [of_device(index) for index in devices]
    recorded = [one for one in found if one.events and device in (None, one.device)]
    chosen = max(recorded, key=lambda one: (_most_held(one) if len(recorded) > 1 else 0, -one.device))
    return replace(chosen, others=tuple(one for one in found if one is not chosen))


def _events(trace: list[Any], where: str, source: str) -> list[Event]:
    """The history of one device."""
    if len(trace) > MOST_EVENTS:
        raise InputError(
            f"{source}: a history of {len(trace):,} events is more than the {MOST_EVENTS:,} that are read: "
            "record fewer steps, or pass max_entries to _record_memory_history"
        )
    events = _convert(trace, list[Event], source, where)
    if sum(event.size for event in events) > _MOST_BYTES:
        raise InputError(f"{source}: no memory snapshot that can be read: its sizes add up to more than any memory")
    return events


def _most_held(snapshot: Snapshot) -> int:
    """The most bytes that were asked for and not yet freed at one time, from the end of the history backwards."""
    held = sum(block.size for segment in snapshot.segments for block in segment.blocks if block.is_active)
    most = held
    for event in reversed(snapshot.events):
        if event.action == "alloc":
            held -= event.size
        elif event.action == "free_requested":
            held += event.size
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
        said = version if isinstance(version, int) else type(version).__name__  # the text of a container has no bound
        raise InputError(
            f"{source}: its notes of stepscope have version {said}; this stepscope reads version {NOTES_VERSION}: "
            "upgrade stepscope, or take the snapshot again"
        )
    try:
        return _convert(_with_kind(_dict(value)), MemoryNotes, source, NOTES_KEY)
    except InputError as fault:
        raise InputError(one_line(fault)) from None


def _with_kind(notes: dict[Any, Any]) -> dict[Any, Any]:
    """Notes whose workload says its kind, which those written before there were several do not."""
    workload = notes.get("workload")
    return {**notes, "workload": {"kind": "textbook", **workload}} if isinstance(workload, dict) else notes


def _check_device(asked: int | None, lengths: dict[int, int], devices: tuple[int, ...], source: str) -> None:
    """Raise InputError where no device has a history, or the one that was asked for has none."""
    recorded = [i for i, length in lengths.items() if length]
    listed = ", ".join(map(str, recorded))
    if asked is not None and asked not in devices:
        there = f"those with a history are {listed}" if recorded else "no device has a history"
        raise InputError(f"{source}: nothing of device {asked} is in this snapshot: {there}")
    if not recorded or (asked is not None and asked not in recorded):
        of = f" of device {asked}" if recorded else ""
        others = f" (there is one of {listed})" if recorded else ""
        raise InputError(f"{source}: this snapshot holds no history{of}{others}: {NO_HISTORY_REMEDY}")


def _of_device(segments: list[Segment], device: int, source: str) -> list[Segment]:
    """Segments of one device by address, every block with its address and inside its segment."""
    found: list[Segment] = []
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
        found.append(msgspec.structs.replace(segment, blocks=blocks))
    return found


def _rising(events: list[Event]) -> list[int]:
    """Times of the events. Their order is the allocator's; clocks of two cores may differ by a little.

    Histories of PyTorch 2.0 have no times: places in the history stand for them.
    """
    if not events or not events[-1].time_us:
        return list(range(len(events)))
    return list(accumulate((event.time_us for event in events), max))
