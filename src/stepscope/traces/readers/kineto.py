"""Reads a trace of torch.profiler (Kineto): Chrome-trace JSON, plain or gzip, of any version and vendor.

Device events do not say their process, and name their device as `pid` and stream as `tid`; `args` repeats both.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

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


def nanoseconds(name: str, times: list[Any], per_unit: int) -> pl.Series:
    """A column of times or durations; null where one is no number, or beyond all clocks."""
    kinds = set(map(type, times))
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


class Arguments(msgspec.Struct, frozen=True, gc=False):
    external: int | None = msgspec.field(default=None, name="External id")
    external_old: int | None = msgspec.field(default=None, name="external id")
    sequence: int | None = msgspec.field(default=None, name="Sequence number")
    forward_thread: int | None = msgspec.field(default=None, name="Fwd thread id")
    forward_thread_old: int | None = msgspec.field(default=None, name="Fwd thread ID")
    correlation: int | None = None
    device: int | None = None
    stream: int | None = None
    graph_node: int | None = msgspec.field(default=None, name="graph node id")
    shapes: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input Dims")
    shapes_old: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input dims")
    dtypes: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input type")
    values: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Concrete Inputs")
    copied: int | None = msgspec.field(default=None, name="bytes")
    grid: msgspec.Raw = msgspec.Raw(b"")
    block: msgspec.Raw = msgspec.Raw(b"")
    registers: int | None = msgspec.field(default=None, name="registers per thread")
    occupancy: int | float | None = msgspec.field(default=None, name="est. achieved occupancy %")
    allocated: int | None = msgspec.field(default=None, name="Total Allocated")
    reserved: int | None = msgspec.field(default=None, name="Total Reserved")
    memory_of: int | None = msgspec.field(default=None, name="Device Id")
    name: msgspec.Raw = msgspec.Raw(b"")
    """Of a thread, in an event that names one."""
    collective: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Collective name")
    group: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Process Group Name")
    group_size: int | None = msgspec.field(default=None, name="Group size")
    elements_in: int | None = msgspec.field(default=None, name="In msg nelems")
    elements_out: int | None = msgspec.field(default=None, name="Out msg nelems")
    dtype: msgspec.Raw = msgspec.Raw(b"")
    collective_sequence: int | None = msgspec.field(default=None, name="Seq")


BY_VALUES = re.compile(r"conv|attention|flash_attn|^sgl_kernel::fwd$")
"""Operators whose work depends on values: a convolution's strides, whether attention is causal."""
_DIGITS = 20
"""Characters of the longest number of 64 bits."""
_LONGEST_NAME = 200
"""Characters of a name that is no text."""
_Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Event(msgspec.Struct, gc=False):
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


def decode_block(text: bytes) -> list[Event]:
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
            arguments[field.name] = msgspec.Raw(msgspec.json.encode(value))
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


def read_kineto(path: Path) -> table.TraceTable:
    """The TraceTable of a Kineto trace. Raises InputError where it is broken or holds no events of a profiler."""
    reader = _Reader(path)
    for block in read_events(path, decode_block, reader.damage.mended):
        if isinstance(block, dict):
            reader.fields.update(block)
        else:
            reader.take(block)
    return reader.table()


def rank_in_head(path: Path) -> int | None:
    """The rank that a trace says before its events; None where it says none there. Raises InputError where the file is
    no trace."""
    reader = _Reader(path)
    head = next(read_events(path, decode_block))
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
        sorted_events: dict[tuple[str, str | None], list[Event]] = defaultdict(list)
        for event in events:
            sorted_events[event.ph, event.cat].append(event)
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
        events = pl.DataFrame([self._times(memory, "memory events")[0], self._host(memory)[0], *columns])
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
                self._text("grid", [bytes(each.grid) for each in arguments]),
                self._text("block", [bytes(each.block) for each in arguments]),
                _within("registers", [each.registers for each in arguments], pl.Int32, 2**31),
                _within("occupancy", [each.occupancy for each in arguments], pl.Float32, 2**31),
            ]
        else:
            details = [_within("bytes", [each.copied for each in arguments], pl.Int64, 2**62)]
        frame = [
            *self._times(group, table.WORK),
            _integers("device", [each.device for each in arguments], group, "pid"),
            _integers("stream", [each.stream for each in arguments], group, "tid"),
            pl.Series("kind", [kind], dtype=table.KIND).new_from_index(0, len(group)),
            self._text("name", [event.name for event in group]),
            pl.Series("process", [None], dtype=pl.Int64).new_from_index(0, len(group)),
            *self._ids(arguments),
            self._column("graph_node", [each.graph_node for each in arguments]),
            *details,
        ]
        self._parts["work"].append(pl.DataFrame(frame))
        self._take_collectives(group)

    def _take_collectives(self, group: list[Event]) -> None:
        """Keep what the events say of collectives: kernels of NCCL, and the operators that launch them."""
        events = [event for event in group if event.args is not None and event.args.collective]
        if not events:
            return
        arguments = [event.args or NO_ARGUMENTS for event in events]
        start, _ = self._times(events, "collectives")
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
        texts = list(self._texts)
        names = {number: str(texts[number]) for number in set(numbers)}
        old = {number for number, name in names.items() if name.startswith(_ANNOTATIONS)}
        if old:
            self._take_ranges([event for event, number in zip(group, numbers, strict=True) if number in old])
            group = [event for event, number in zip(group, numbers, strict=True) if number not in old]
            numbers = [number for number in numbers if number not in old]
        arguments = [event.args or NO_ARGUMENTS for event in group]
        untold = self._text("", [b""]).new_from_index(0, len(group))
        shapes, dtypes, values = (untold.alias(name) for name in ("shapes", "dtypes", "values"))
        if any(each.shapes or each.shapes_old or each.dtypes for each in arguments):
            shapes = self._text("shapes", [bytes(each.shapes) or bytes(each.shapes_old) for each in arguments])
            dtypes = self._text("dtypes", [bytes(each.dtypes) for each in arguments])
        by_values = {number for number, name in names.items() if BY_VALUES.search(name)}
        if by_values:
            # Few events are of such operators: to look at each one's values took as long as its shapes.
            places = [at for at, number in enumerate(numbers) if number in by_values and arguments[at].values]
            values = values.scatter(places, self._text("values", [bytes(arguments[at].values) for at in places]))
        external = self._external(arguments)
        sequence = self._column("sequence", [each.sequence for each in arguments])
        forward = self._column("forward_thread", [each.forward_thread for each in arguments])
        if forward.null_count():
            forward = self._or_older(forward, [each.forward_thread_old for each in arguments])
        columns = [external, sequence, forward, shapes, dtypes, values]
        self._keep("operators", group, numbers, table.OPERATORS, *columns)
        if _COLLECTIVE in names.values():
            self._take_collectives(group)

    def _take_ranges(self, group: list[Event]) -> None:
        nested = pl.Series("nested", [True]).new_from_index(0, len(group))
        self._keep("ranges", group, self._numbers(group), table.RANGES, nested)

    def _keep(self, kind: str, group: list[Event], names: list[int], what: str, *columns: pl.Series) -> None:
        """Keep the times, places and names of events on the host, with these columns."""
        name = pl.Series("name", names, dtype=pl.UInt32)
        self._parts[kind].append(pl.DataFrame([*self._times(group, what), *self._host(group), name, *columns]))

    def _take_arrows(self, kind: str, group: list[Event], *, begins: bool) -> None:
        start, _ = self._times(group, "arrows")
        end = pl.Series("begins", [begins]).new_from_index(0, len(group))
        ids = self._places("id", [event.id for event in group])
        self._parts[kind].append(pl.DataFrame([ids, start, *self._host(group), end]))

    def _times(self, group: list[Event], what: str) -> tuple[pl.Series, pl.Series]:
        """The columns start_ns and duration_ns; a start that is none is null."""
        per_unit = self._ns_per_unit or 1000
        start = nanoseconds("start_ns", [event.ts for event in group], per_unit)
        duration = nanoseconds("duration_ns", [event.dur or 0 for event in group], per_unit)
        if duration.null_count():
            table.add_count(self.damage.endless, what, duration.null_count())
            duration = duration.fill_null(0)
        if group and cast("int", duration.min()) < 0:
            table.add_count(self.damage.backwards, what, int((duration < 0).sum()))
            duration = duration.clip(lower_bound=0)
        return start, duration

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
        column = self._column(numbers.name, older)
        return numbers if column.null_count() == len(column) else numbers.zip_with(numbers.is_not_null(), column)

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
        present = [column for column in schema if column in frame.columns]
        named = [column for column in present if schema[column] in (pl.String, pl.Categorical())]
        looked_up = [texts.cast(schema[column]).gather(frame[column]).alias(column) for column in named]
        optional = [column for column in named if column != "name"]
        return (
            frame.with_columns(looked_up)
            .with_columns(pl.when(pl.col(optional) != pl.lit("", pl.Categorical())).then(pl.col(optional)))
            .select(present)
        )

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
