"""Reads a trace of torch.profiler (Kineto): Chrome-trace JSON, plain or gzip, of any version and vendor.

Device events do not say their process, and name their device as `pid` and stream as `tid`; `args` repeats both.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import partial, reduce
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Literal, cast

import msgspec
import polars as pl

from stepscope.core.errors import InputError, printable
from stepscope.traces import table
from stepscope.traces.readers.json_events import read_events

# Times of Chrome-trace events as exact nanoseconds.
#
# They are microseconds, as integers, with decimals, or as text; those too large to be microseconds are nanoseconds. The
# unit is that of the file: one impossible time does not change the others.


EXACT_BELOW_US = 2**43
"""Microseconds from here on lose nanoseconds in a double; such traces (time since 1970) are read as decimals."""
_NANOSECONDS_FROM = 10**17
"""Times from here on are nanoseconds: no clock in microseconds comes near, and since 1970 they are 1.7e18."""
_LARGEST_NS = 2**62
_SAMPLE = 1000

_UNREADABLE = (TypeError, ValueError, ArithmeticError, pl.exceptions.PolarsError)


def nanoseconds(name: str, times: list[Any] | pl.Series, per_unit: int) -> pl.Series:
    """A column of times or durations, from any values or a column of floats; null where one is no number, or beyond
    all clocks."""
    kinds = {float} if isinstance(times, pl.Series) else set(map(type, times))
    try:
        if kinds <= {int, float}:
            whole = float not in kinds
            values = pl.Series(name, times, dtype=pl.Int64 if whole else pl.Float64, strict=whole)
            least, largest = (Decimal(each or 0) for each in (values.min(), values.max()))  # type: ignore[arg-type]
            largest = max(-least, largest)
            # Among floats, large integers would lose nanoseconds.
            if largest * per_unit < _LARGEST_NS and (len(kinds) < 2 or largest < EXACT_BELOW_US):
                if whole:
                    return values * per_unit
                if least >= 0:  # casts cut, and no expression is planned for each block; a NaN has no cast
                    floor = values.cast(pl.Int64)
                    return floor * per_unit + ((values - floor) * per_unit + 0.5).cast(pl.Int64)
                if values.is_finite().all():
                    floor = values.floor()  # apart, since the product would round once more
                    return floor.cast(pl.Int64) * per_unit + ((values - floor) * per_unit).round().cast(pl.Int64)
        exact = [Decimal(time) * per_unit for time in times]
        if max(map(abs, exact), default=Decimal(0)) < _LARGEST_NS:
            return pl.Series(name, list(map(round, exact)), dtype=pl.Int64)
    except _UNREADABLE:
        pass
    return pl.Series(name, [_nanoseconds(time, per_unit) for time in times], dtype=pl.Int64)


def _nanoseconds(time: Any, per_unit: int) -> int | None:
    try:
        exact = Decimal(time) * per_unit
        return round(exact) if abs(exact) < _LARGEST_NS else None
    except _UNREADABLE:
        return None


# Events of a Kineto trace, decoded into typed structs that skip what no reader asks for.


_NOTHING = msgspec.Raw(b"")


class Arguments(msgspec.Struct, frozen=True, gc=False):
    """What an event of any category says beside its place and time."""

    external: int | None = msgspec.field(default=None, name="External id")
    external_old: int | None = msgspec.field(default=None, name="external id")
    sequence: int | None = msgspec.field(default=None, name="Sequence number")
    forward_thread: int | None = msgspec.field(default=None, name="Fwd thread id")
    forward_thread_old: int | None = msgspec.field(default=None, name="Fwd thread ID")
    correlation: int | None = None
    device: int | None = None
    stream: int | None = None
    graph_node: int | None = msgspec.field(default=None, name="graph node id")
    shapes: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input Dims")
    shapes_old: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input dims")
    dtypes: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input type")
    values: msgspec.Raw = msgspec.field(default=_NOTHING, name="Concrete Inputs")
    copied: int | None = msgspec.field(default=None, name="bytes")
    grid: msgspec.Raw = _NOTHING
    block: msgspec.Raw = _NOTHING
    registers: int | None = msgspec.field(default=None, name="registers per thread")
    occupancy: int | float | None = msgspec.field(default=None, name="est. achieved occupancy %")
    allocated: int | None = msgspec.field(default=None, name="Total Allocated")
    reserved: int | None = msgspec.field(default=None, name="Total Reserved")
    memory_of: int | None = msgspec.field(default=None, name="Device Id")
    name: msgspec.Raw = _NOTHING
    """Of a thread, in an event that names one."""
    collective: msgspec.Raw = msgspec.field(default=_NOTHING, name="Collective name")
    group: msgspec.Raw = msgspec.field(default=_NOTHING, name="Process Group Name")
    group_size: int | None = msgspec.field(default=None, name="Group size")
    elements_in: int | None = msgspec.field(default=None, name="In msg nelems")
    elements_out: int | None = msgspec.field(default=None, name="Out msg nelems")
    dtype: msgspec.Raw = _NOTHING
    collective_sequence: int | None = msgspec.field(default=None, name="Seq")


BY_VALUES = re.compile(r"conv|attention|flash_attn|^sgl_kernel::fwd$")
"""Operators whose work depends on values: a convolution's strides, whether attention is causal."""
_DIGITS = 20
"""Characters of the longest number of 64 bits."""
_LONGEST_NAME = 200
"""Characters of a name that is no text."""
_Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Event(msgspec.Struct, gc=False):
    """An event of any category and layout."""

    ph: str = ""
    cat: str | None = None
    name: str | int | float | None = ""
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    ts: int | float | None = None
    dur: int | float | None = None
    id: int | str | None = None
    args: Arguments | None = None


class _ExactEvent(Event, gc=False):
    ts: Decimal | None = None  # type: ignore[assignment]
    dur: Decimal | None = None  # type: ignore[assignment]


class _LooseEvent(msgspec.Struct, gc=False):
    """An event of unexpected types: what fits is taken."""

    ph: Any = ""
    cat: Any = None
    name: Any = ""
    pid: Any = None
    tid: Any = None
    ts: msgspec.Raw = msgspec.Raw(b"")
    dur: msgspec.Raw = msgspec.Raw(b"")
    id: Any = None
    args: Any = None


NO_ARGUMENTS = Arguments()
_decode = msgspec.json.Decoder(list[Event], strict=False).decode
_decode_exact = msgspec.json.Decoder(list[_ExactEvent], strict=False).decode
_decode_apart = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_loose = msgspec.json.Decoder(_LooseEvent, strict=False).decode
_NO_EVENT = Event(ph="unreadable")


def _decode_any(text: bytes) -> list[Event]:
    """The events of a block; their times as decimals where doubles so large would lose nanoseconds."""
    try:
        events = _decode(text)
        latest = pl.Series([event.ts for event in events], dtype=pl.Float64, strict=False).max() or 0
        if latest >= EXACT_BELOW_US and any(type(event.ts) is float and event.ts >= EXACT_BELOW_US for event in events):  # type: ignore[operator]
            return _decode_exact(text)  # type: ignore[return-value]
        return events
    except msgspec.ValidationError:
        return [_tightened(event) for event in _decode_apart(text)]


def _tightened(text: msgspec.Raw) -> Event:
    """What can be read of one event, its times as decimals."""
    try:
        event = _decode_loose(text)
    except msgspec.ValidationError:
        return _NO_EVENT
    arguments: dict[str, float | msgspec.Raw] = {}
    event_arguments = event.args
    loose = cast("dict[str, Any]", event_arguments) if isinstance(event_arguments, dict) else {}
    for field in msgspec.structs.fields(Arguments):
        value = loose.get(field.encode_name)
        if field.type is msgspec.Raw and value is not None:
            # With spaces, as PyTorch writes it: other events' texts are kept as they stand.
            arguments[field.name] = msgspec.Raw(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        elif isinstance(value, float) and field.name == "occupancy":
            arguments[field.name] = value
        elif isinstance(value, int | str) and not isinstance(value, bool):
            with suppress(msgspec.ValidationError):
                arguments[field.name] = msgspec.convert(value, _Number, strict=False)
    return Event(
        ph=str(event.ph),
        cat=event.cat if isinstance(event.cat, str) else None,
        name=event.name if isinstance(event.name, str | int | float) else str(event.name)[:_LONGEST_NAME],
        pid=_place(event.pid),
        tid=_place(event.tid),
        ts=_decimal(event.ts),  # type: ignore[arg-type]
        dur=_decimal(event.dur),  # type: ignore[arg-type]
        id=place if isinstance(place := _place(event.id), int | str) else None,
        args=Arguments(**arguments),  # type: ignore[arg-type]
    )


def _place(value: object) -> int | str | float | None:
    return str(value) if isinstance(value, bool) else value if isinstance(value, str | int | float) else None


def _decimal(text: msgspec.Raw) -> Decimal | None:
    """A time as written; None where nothing is, and no number where it is none."""
    written = bytes(text).strip(b'"').decode("utf-8", "replace")
    try:
        return None if written in ("", "null") else Decimal(written)
    except ArithmeticError:
        return Decimal("NaN")


def whole_number(value: object) -> int | None:
    """The number that an id is, or is written as (`7`, `"7"`, `7.0`, `"stream 7"`); None where it is another word."""
    if type(value) is int:
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    text = value.removeprefix("stream ") if isinstance(value, str) else ""
    return int(text) if len(text) < _DIGITS and text.removeprefix("-").isdecimal() else None


_CATEGORIES = {
    "kernel": "kernel",
    "concurrent_kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "memcpy": "memcpy",
    "gpu_memset": "memset",
    "memset": "memset",
    "cuda_runtime": "call",
    "cuda_driver": "call",
    "hip_runtime": "call",
    "hip_driver": "call",
    "xpu_runtime": "call",
    "xpu_driver": "call",
    "privateuse1_runtime": "call",
    "privateuse1_driver": "call",
    "runtime": "call",
    "driver": "call",
    "cpu_op": "operator",
    "operator": "operator",
    "user_annotation": "range",
    "fwdbwd": "link",
    "forward_backward": "link",
}
"""Categories of events in all versions of Kineto, in lower case."""

_ARROWS = ("ac2g", "async", "async_gpu", "async_cpu_to_gpu")
"""Categories of the arrows from calls to the work that they launched, in all versions of Kineto."""
_INSTANT, _MEMORY = "cpu_instant_event", "[memory]"
"""The allocator's events, of a capture with `profile_memory`."""

_COLLECTIVE = "record_param_comms"
"""The operator that says what its collective is."""
_ANNOTATIONS = ("ProfilerStep#", "Optimizer.step#", "Optimizer.zero_grad#", "DistributedDataParallel.forward")
"""Names of ranges that older versions list among the operators."""


# Events of the usual categories, as Kineto writes them today, have a type each.
#
# Their memory is a third of an Event's, so that those of a block stay in the processor's cache: of a large trace, this
# and smaller blocks took a third of the time from decoding and from the tables.


class _KnownEvent(msgspec.Struct, gc=False):
    ph: Literal["X"]
    name: str
    ts: float


class _KnownRow(_KnownEvent, gc=False):
    pid: int
    tid: int
    dur: float


class _KnownInstant(msgspec.Struct, gc=False):
    ph: Literal["i"]
    name: str
    ts: float
    pid: int
    tid: int


class _KnownArrow(msgspec.Struct, gc=False):
    ph: Literal["s", "t", "f"]
    name: Literal["fwdbwd", "forward_backward", "ac2g", "async", "async_gpu", "async_cpu_to_gpu"]
    ts: float
    pid: int
    tid: int
    id: int


_IDS = ("external", "external_old", "correlation")
_COLLECTIVES = ("collective", "group", "group_size", "elements_in", "elements_out", "dtype", "collective_sequence")
_TENSORS = ("shapes", "shapes_old", "dtypes", "values")
_WORK = (*_IDS, *_COLLECTIVES, "device", "stream", "graph_node")
_ARGUMENTS = {
    "kernel": (*_WORK, "grid", "block", "registers", "occupancy"),
    "memcpy": (*_WORK, "copied"),
    "memset": (*_WORK, "copied"),
    "call": _IDS,
    "operator": (*_IDS, *_COLLECTIVES, *_TENSORS, "sequence", "forward_thread", "forward_thread_old"),
    _INSTANT: ("allocated", "reserved", "memory_of"),
}
"""The arguments that are read of each."""
_UNREAD = ("gpu_user_annotation", "overhead", "python_function", "cuda_sync", "Trace")
"""Usual categories whose events are counted alone."""


def _known_type(category: str) -> type[msgspec.Struct]:
    """The type of events of a category."""
    place = _CATEGORIES.get(category, category)
    arguments: list[Any] = []
    if place in _ARGUMENTS:
        fields = [
            (field.name, field.type, msgspec.field(default=field.default, name=field.encode_name))
            for field in msgspec.structs.fields(Arguments)
            if field.name in _ARGUMENTS[place]
        ]
        kind = msgspec.defstruct("KnownArguments", fields, frozen=True, gc=False)
        arguments = [("args", kind, kind())]
    if place == "link" or place in _ARROWS:
        base = _KnownArrow
    else:
        base = _KnownEvent if place in _UNREAD else _KnownInstant if place == _INSTANT else _KnownRow
    return msgspec.defstruct("Known", arguments, bases=(base,), tag_field="cat", tag=category, gc=False)


_KNOWN = {_known_type(category): category for category in (*_CATEGORIES, *_ARROWS, *_UNREAD, _INSTANT)}
_ANY_KNOWN = reduce(lambda union, kind: union | kind, cast("Iterable[Any]", _KNOWN))
_decode_known = cast("Callable[[bytes], list[Event]]", msgspec.json.Decoder(GenericAlias(list, _ANY_KNOWN)).decode)
_MISSES = 3
"""After so many blocks in a row that hold other events, no more is tried."""


def block_decoder() -> Callable[[bytes], list[Event]]:
    """A function that decodes the events of a block: all as known types, or all as Event."""
    missed = 0

    def decode(text: bytes) -> list[Event]:
        nonlocal missed
        if missed < _MISSES:
            try:
                events = _decode_known(text)
                latest = pl.Series([event.ts for event in events], dtype=pl.Float64).max() or 0
                if cast("float", latest) < EXACT_BELOW_US:
                    missed = 0
                    return events
            except msgspec.ValidationError:
                pass
            missed += 1
        return _decode_any(text)

    return decode


def _by_category(events: list[Event]) -> dict[tuple[str, str | None], list[Event]]:
    """The events by `ph` and category, in the order of the first of each."""
    groups: dict[tuple[str, str | None], list[Event]] = defaultdict(list)
    if events and type(events[0]) in _KNOWN:
        by_type: dict[type[Event], list[Event]] = defaultdict(list)
        for event in events:
            by_type[event.__class__].append(event)
        for kind, group in by_type.items():
            marks = dict.fromkeys([event.ph for event in group]) if issubclass(kind, _KnownArrow) else {group[0].ph}
            for ph in marks:
                groups[ph, _KNOWN[kind]] = group if len(marks) == 1 else [event for event in group if event.ph == ph]
    else:
        for event in events:
            groups[event.ph, event.cat].append(event)
    return groups


# Columns of one value are made of these.
_KINDS = {kind: pl.Series("kind", [kind], dtype=table.KIND) for kind in ("kernel", "memcpy", "memset")}
_NO_PROCESS, _NESTED = pl.Series("process", [None], dtype=pl.Int64), pl.Series("nested", [True])
_BEGINS = {begins: pl.Series("begins", [begins]) for begins in (True, False)}

_TS, _DUR = "ts", "dur"
"""Columns of times as floats."""
_ROWS = {"work": table.WORK, "calls": table.CALLS, "operators": table.OPERATORS, "ranges": table.RANGES}


def read_kineto(path: Path) -> table.TraceTable:
    """The TraceTable of a Kineto trace. Raises InputError where it is broken or holds no events of a profiler."""
    reader = _Reader(path)
    for block in read_events(path, block_decoder(), reader.damage.mended):
        if isinstance(block, dict):
            reader.fields.update(block)
        else:
            reader.take(block)
    return reader.table()


def rank_in_head(path: Path) -> int | None:
    """The rank that a trace says before its events; None where it says none there. Raises InputError where the file is
    no trace."""
    reader = _Reader(path)
    head = next(read_events(path, block_decoder()))
    if isinstance(head, dict):
        reader.fields = head
    return reader.rank()[0]


class _Numbers(dict[object, int]):
    """A number for each text, in the order of their first use."""

    def __missing__(self, text: object) -> int:
        self[text] = number = len(self)
        return number


class _Reader:
    """Collects frames block by block; text is stored once for each distinct value."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: dict[str, list[pl.DataFrame]] = defaultdict(list)
        self._texts = _Numbers()
        self._other: dict[str, int] = defaultdict(int)
        self._names: dict[str, int] = {}
        self._threads: dict[tuple[int, int], str] = {}
        self._looked_at, self._annotations, self._by_values, self._communication = (set[int]() for _ in range(4))
        self._events = 0
        self._ns_per_unit: int | None = None
        self.fields: dict[str, Any] = {}
        self.damage = table.Damage()
        self._takers: dict[str, Callable[[list[Event]], None]] = {
            **{kind: partial(self._take_work, kind) for kind in ("kernel", "memcpy", "memset")},
            "call": self._take_calls,
            "operator": self._take_operators,
            "range": self._take_ranges,
        }

    def take(self, events: list[Event]) -> None:
        self._events += len(events)
        if self._ns_per_unit is None:
            self._ns_per_unit = self._unit_of([event.ts for event in events])
        sorted_events = _by_category(events)
        known = {kind: len(self._parts[kind]) for kind in ("work", "calls")}
        for (ph, cat), group in sorted_events.items():
            place = _CATEGORIES.get((cat or "").lower(), "other")
            if ph == "X" and place in self._takers:
                self._takers[place](group)
            elif ph == "i" and cat == _INSTANT:
                self._take_counters(group)
            elif place == "link" and ph in ("s", "f"):
                self._take_arrows("links", group, begins=ph == "s")
            elif ph:
                self._other[cat or f"phase {ph}"] += len(group)
                if ph == "M":
                    self._name_threads(group)
        # Whether all device work and calls of this block have a correlation id: else arrows tell the launches.
        ids = [frame["correlation"] for kind, rows in known.items() for frame in self._parts[kind][rows:]]
        if not ids or any(each.null_count() or (each == 0).any() for each in ids):
            for (ph, cat), group in sorted_events.items():
                if ph in ("s", "f") and (cat or "").lower() in _ARROWS:
                    self._take_arrows("arrows", group, begins=ph == "s")

    def _unit_of(self, times: list[Any]) -> int | None:
        """Nanoseconds of the unit that most of these times are in, by a sample; None where none can be read.

        0 is the same in both: names of processes and work whose time was not collected have it.
        """
        sample = (_nanoseconds(time, 1) for time in times[:: 1 + len(times) // _SAMPLE])
        sizes = sorted(abs(time) for time in sample if time)
        if not sizes:
            return None
        return 1 if sizes[(len(sizes) - 1) // 2] >= _NANOSECONDS_FROM else 1000

    def _take_counters(self, group: list[Event]) -> None:
        """Keep how much memory was allocated and reserved, and count the instants that say something else."""
        memory = [event for event in group if event.name == _MEMORY]
        if len(memory) < len(group):
            self._other[_INSTANT] += len(group) - len(memory)
        if not memory:
            return
        figures = {"device": "memory_of", table.ALLOCATED: "allocated", table.RESERVED: "reserved"}
        columns = [
            _within(name, [getattr(event.args, of, None) for event in memory], pl.Int64, 2**62, 1 - 2**62)
            for name, of in figures.items()
        ]
        start = nanoseconds("start_ns", [event.ts for event in memory], self._ns_per_unit or 1000)
        events = pl.DataFrame([start, self._host(memory)[0], *columns])
        self._parts["counters"].append(
            events.with_columns(pl.col("device").fill_null(-1))
            .unpivot(index=["start_ns", "process", "device"], variable_name="name", value_name="value")
            .drop_nulls("value")
            .with_columns(pl.col("name").cast(pl.Categorical()))
            .select(table.COUNTER_SCHEMA.names())
        )

    def _name_threads(self, group: list[Event]) -> None:
        """Keep the names of threads. One may have several: of the process, then its own; all are kept in one text."""
        for event in group:
            if event.name == "thread_name" and event.args is not None and event.args.name:
                thread = self._identity(event.pid), self._identity(event.tid)
                name = _readable(bytes(event.args.name))
                self._threads[thread] = f"{before}, {name}" if (before := self._threads.get(thread)) else name

    def _take_work(self, kind: str, group: list[Event]) -> None:
        arguments = [event.args or NO_ARGUMENTS for event in group]
        if kind == "kernel":
            details = [
                self._raw("grid", [each.grid for each in arguments]),
                self._raw("block", [each.block for each in arguments]),
                _within("registers", [each.registers for each in arguments], pl.Int32, 2**31),
                _within("occupancy", [each.occupancy for each in arguments], pl.Float32, 2**31),
            ]
        else:
            details = [_within("bytes", [each.copied for each in arguments], pl.Int64, 2**62)]
        frame = [
            *self._times(group, table.WORK),
            _integers("device", [each.device for each in arguments], group, "pid"),
            _integers("stream", [each.stream for each in arguments], group, "tid"),
            _KINDS[kind].new_from_index(0, len(group)),
            self._text("name", [event.name for event in group]),
            _NO_PROCESS.new_from_index(0, len(group)),
            *self._ids(arguments),
            self._column("graph_node", [each.graph_node for each in arguments]),
            *details,
        ]
        self._parts["work"].append(pl.DataFrame(frame))
        self._take_collectives(group)

    def _take_collectives(self, group: list[Event]) -> None:
        """Keep what the events say of collectives: kernels of NCCL, and the operators that launch them."""
        events = [event for event in group if event.args is not None and event.args.collective is not _NOTHING]
        if not events:
            return
        arguments = [event.args or NO_ARGUMENTS for event in events]
        per_unit = self._ns_per_unit or 1000
        start = nanoseconds("start_ns", [event.ts for event in events], per_unit)
        self._durations(nanoseconds("duration_ns", [event.dur or 0 for event in events], per_unit), "collectives")
        whole = ("group_size", "elements_in", "elements_out", "collective_sequence")
        texts = {
            name: [bytes(getattr(each, name)).decode("utf-8", "replace").strip('"') for each in arguments]
            for name in ("collective", "group", "dtype")
        }
        columns = [
            self._ids(arguments)[0],
            *(self._column(name, [getattr(each, name) for each in arguments]) for name in whole),
            *(self._text(name, values) for name, values in texts.items()),
        ]
        rows = pl.DataFrame([start, *self._host(events), *columns])
        self._parts["collectives"].append(rows.rename({"collective_sequence": "sequence"}))

    def _take_calls(self, group: list[Event]) -> None:
        arguments = [event.args or NO_ARGUMENTS for event in group]
        self._keep("calls", group, self._numbers(group), table.CALLS, *self._ids(arguments))

    def _take_operators(self, group: list[Event]) -> None:
        numbers = self._numbers(group)
        present = self._sorted_names(numbers)
        if old := present & self._annotations:
            self._take_ranges([event for event, number in zip(group, numbers, strict=True) if number in old])
            group = [event for event, number in zip(group, numbers, strict=True) if number not in old]
            numbers = [number for number in numbers if number not in old]
        arguments = [event.args or NO_ARGUMENTS for event in group]
        shapes, older = ([each.shapes for each in arguments], [each.shapes_old for each in arguments])
        if older.count(_NOTHING) < len(older):
            shapes = [new or old for new, old in zip(shapes, older, strict=True)]
        columns = [self._raw("shapes", shapes), self._raw("dtypes", [each.dtypes for each in arguments])]
        values = self._raw("values", [_NOTHING]).new_from_index(0, len(group))
        if by_values := present & self._by_values:
            # Few events are of such operators: to look at each one's values took as long as its shapes.
            places = [at for at, number in enumerate(numbers) if number in by_values and arguments[at].values]
            values = values.scatter(places, self._raw("values", [arguments[at].values for at in places]))
        external = self._external(arguments)
        sequence = self._column("sequence", [each.sequence for each in arguments])
        forward = self._column("forward_thread", [each.forward_thread for each in arguments])
        if forward.null_count():
            forward = self._or_older(forward, [each.forward_thread_old for each in arguments])
        self._keep("operators", group, numbers, table.OPERATORS, external, sequence, forward, *columns, values)
        if present & self._communication:
            self._take_collectives(group)

    def _sorted_names(self, numbers: list[int]) -> set[int]:
        """The distinct numbers, after each new name among them was put with those of its sort."""
        present = set(numbers)
        if fresh := present - self._looked_at:
            self._looked_at |= fresh
            texts = list(self._texts)
            names = {number: str(texts[number]) for number in fresh}
            self._annotations |= {number for number, name in names.items() if name.startswith(_ANNOTATIONS)}
            self._by_values |= {number for number, name in names.items() if BY_VALUES.search(name)}
            self._communication |= {number for number, name in names.items() if name == _COLLECTIVE}
        return present

    def _take_ranges(self, group: list[Event]) -> None:
        self._keep("ranges", group, self._numbers(group), table.RANGES, _NESTED.new_from_index(0, len(group)))

    def _keep(self, kind: str, group: list[Event], names: list[int], what: str, *columns: pl.Series) -> None:
        """Keep the times, places and names of events on the host, with these columns."""
        name = pl.Series("name", names, dtype=pl.UInt32)
        self._parts[kind].append(pl.DataFrame([*self._times(group, what), *self._host(group), name, *columns]))

    def _take_arrows(self, kind: str, group: list[Event], *, begins: bool) -> None:
        if type(group[0]) in _KNOWN:
            start = pl.Series(_TS, [event.ts for event in group], dtype=pl.Float64)
        else:
            start = nanoseconds("start_ns", [event.ts for event in group], self._ns_per_unit or 1000)
        end = _BEGINS[begins].new_from_index(0, len(group))
        ids = self._places("id", [event.id for event in group])
        self._parts[kind].append(pl.DataFrame([ids, start, *self._host(group), end]))

    def _times(self, group: list[Event], what: str) -> tuple[pl.Series, pl.Series]:
        """The columns start_ns and duration_ns; a start that is none is null. Of events of known types: floats, which
        `_timed` converts together."""
        if type(group[0]) in _KNOWN:
            return (
                pl.Series(_TS, [event.ts for event in group], dtype=pl.Float64),
                pl.Series(_DUR, [event.dur for event in group], dtype=pl.Float64),
            )
        per_unit = self._ns_per_unit or 1000
        start = nanoseconds("start_ns", [event.ts for event in group], per_unit)
        duration = nanoseconds("duration_ns", [event.dur or 0 for event in group], per_unit)
        return start, self._durations(duration, what)

    def _durations(self, duration: pl.Series, what: str, missing: int = 0) -> pl.Series:
        """Durations of which none is null or negative; those that were are counted, but for the `missing`."""
        if duration.null_count():
            table.add_count(self.damage.endless, what, duration.null_count() - missing)
            duration = duration.fill_null(0)
        if len(duration) and cast("int", duration.min()) < 0:
            table.add_count(self.damage.backwards, what, int((duration < 0).sum()))
            duration = duration.clip(lower_bound=0)
        return duration

    def _host(self, group: list[Event]) -> tuple[pl.Series, pl.Series]:
        return (
            self._places("process", [event.pid for event in group]),
            self._places("thread", [event.tid for event in group]),
        )

    def _places(self, name: str, values: list[Any]) -> pl.Series:
        """A column of processes, threads or arrows."""
        with suppress(*_UNREADABLE):
            places = pl.Series(name, values, dtype=pl.Int64)
            if not places.null_count():
                return places
        return self._column(name, [self._identity(value) for value in values])

    def _identity(self, value: object) -> int:
        """The number of a process, thread or arrow, as a number or as text; words get negative numbers of their own."""
        number = whole_number(value)
        return -2 - self._names.setdefault(str(value), len(self._names)) if number is None else number

    def _ids(self, arguments: list[Arguments]) -> tuple[pl.Series, pl.Series]:
        """The columns correlation and external."""
        return self._column("correlation", [each.correlation for each in arguments]), self._external(arguments)

    def _external(self, arguments: list[Arguments]) -> pl.Series:
        external = self._column("external", [each.external for each in arguments])
        if external.null_count():
            external = self._or_older(external, [each.external_old for each in arguments])
        return external

    def _or_older(self, numbers: pl.Series, older: list[int | None]) -> pl.Series:
        """The numbers, or where there are none those of an older spelling."""
        if older.count(None) == len(older):
            return numbers
        return numbers.zip_with(numbers.is_not_null(), self._column(numbers.name, older))

    def _column(self, name: str, values: list[Any]) -> pl.Series:
        """A column of ids and counts. Those of more than 63 bits wrap, so that equal ones stay equal."""
        try:
            return pl.Series(name, values, dtype=pl.Int64)
        except (TypeError, OverflowError, pl.exceptions.PolarsError):
            wrapped = [value if value is None else (value + 2**63) % 2**64 - 2**63 for value in values]
            return pl.Series(name, wrapped, dtype=pl.Int64)

    def _text(self, name: str, values: Iterable[object]) -> pl.Series:
        """Numbers that stand for texts until `table` looks each text up once, so that it is stored once."""
        return pl.Series(name, list(map(self._texts.__getitem__, values)), dtype=pl.UInt32)

    def _raw(self, name: str, values: list[msgspec.Raw]) -> pl.Series:
        """Numbers that stand for texts of JSON, as in `_text`."""
        if values.count(_NOTHING) == len(values):
            return pl.Series(name, [self._texts[b""]], dtype=pl.UInt32).new_from_index(0, len(values))
        texts = b"\0".join(values).split(b"\0")  # a third of the time that each takes alone
        return self._text(name, texts if len(texts) == len(values) else map(bytes, values))

    def _numbers(self, group: list[Event]) -> list[int]:
        """The numbers that stand for the names."""
        return list(map(self._texts.__getitem__, [event.name for event in group]))

    def table(self) -> table.TraceTable:
        if not any(self._parts[kind] for kind in ("work", "operators", "calls")):
            raise InputError(
                f"{self._path}: {self._events} events, but none of kernels or operators: "
                "capture it with torch.profiler (activities CPU and CUDA) or nsys"
            )
        texts = pl.Series([_readable(text) for text in self._texts], dtype=pl.String)
        frame = partial(self._frame, texts)
        listed = self.fields.get("deviceProperties")
        devices = cast("list[Any]", listed) if isinstance(listed, list) else []
        rank, ranks = self.rank()
        read = table.TraceTable(
            profiler="Kineto",
            work=frame("work", pl.Schema({**table.WORK_SCHEMA, **table.DETAIL_SCHEMA})),
            calls=frame("calls", table.CALL_SCHEMA),
            ranges=frame("ranges", table.RANGE_SCHEMA),
            operators=frame("operators", table.OPERATOR_SCHEMA),
            links=frame("links", table.LINK_SCHEMA),
            collectives=frame("collectives", table.COLLECTIVE_SCHEMA),
            devices={
                one["id"]: str(one.get("name", ""))
                for one in cast("list[dict[str, Any]]", [one for one in devices if isinstance(one, dict)])
                if isinstance(one.get("id"), int)
            },
            other=dict(self._other),
            recorder=self._recorder(),
            threads=self._threads,
            rank=rank,
            ranks=ranks,
            damage=self.damage,
            counters=pl.concat([table.empty(table.COUNTER_SCHEMA), *self._parts["counters"]]),
        )
        return table.assemble(read, self._path, arrows=frame("arrows", table.LINK_SCHEMA))

    def _frame(self, texts: pl.Series, name: str, schema: pl.Schema) -> pl.DataFrame:
        """All that was kept of one kind; kernels and copies have different details."""
        parts = self._parts.pop(name, None)
        if not parts:
            return table.empty(schema)
        frame = pl.concat(parts, how="diagonal", rechunk=True)
        parts.clear()  # of a large trace, what is held twice counts
        frame = self._timed(frame, name)
        present = [column for column in schema if column in frame.columns]
        named = [column for column in present if schema[column] in (pl.String, pl.Categorical())]
        looked_up = [texts.cast(schema[column]).gather(frame[column]).alias(column) for column in named]
        optional = [column for column in named if column != "name"]
        return (
            frame.with_columns(looked_up)
            .with_columns(pl.when(pl.col(optional) != pl.lit("", pl.Categorical())).then(pl.col(optional)))
            .select(present)
        )

    def _timed(self, frame: pl.DataFrame, name: str) -> pl.DataFrame:
        """The frame with the columns start_ns and duration_ns in place of times as floats."""
        for raw, column in ((_TS, "start_ns"), (_DUR, "duration_ns")):
            if raw not in frame.columns:
                continue
            floats = frame[raw]
            times = nanoseconds(column, floats, self._ns_per_unit or 1000)
            if raw == _DUR:
                times = self._durations(times, _ROWS[name], floats.null_count())
            if column in frame.columns:
                times = times.zip_with(floats.is_not_null(), frame[column])
            frame = frame.drop(raw).with_columns(times)
        return frame

    def rank(self) -> tuple[int | None, int | None]:
        """The rank of the process and the number of ranks, as PyTorch writes them where torch.distributed is in use."""
        written = self.fields.get("distributedInfo")
        job = cast("dict[str, Any]", written) if isinstance(written, dict) else {}
        rank, ranks = job.get("rank"), job.get("world_size")
        both = type(rank) is int and type(ranks) is int and 0 <= rank < ranks
        return (rank, ranks) if both else (None, None)

    def _recorder(self) -> str | None:
        for key in ("pytorch_version", "torch_version", "cupti_version"):
            if key in self.fields:
                return printable(f"{key.removesuffix('_version')} {self.fields[key]}"[:80])
        return None


def _integers(name: str, values: list[int | None], group: list[Event], otherwise: str) -> pl.Series:
    """A number from the arguments, or from where the event itself holds it; -1 where neither does."""
    with suppress(*_UNREADABLE):
        column = pl.Series(name, values, dtype=pl.Int64)
        if not column.null_count():
            return column
    numbers: list[int] = []
    for value, event in zip(values, group, strict=True):
        number = whole_number(getattr(event, otherwise)) if value is None else value
        numbers.append(number if number is not None and abs(number) < 2**63 else -1)
    return pl.Series(name, numbers, dtype=pl.Int64)


def _within(
    name: str, values: Sequence[float | None], dtype: type[pl.DataType], limit: int, least: int = 0
) -> pl.Series:
    """A column of counts from the arguments; null where one is damaged: no time depends on it."""
    kept = [value if value is not None and least <= value < limit else None for value in values]
    return pl.Series(name, kept, dtype=dtype, strict=False)


def _readable(text: object) -> str:
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return str(text).encode("utf-8", "replace").decode()
