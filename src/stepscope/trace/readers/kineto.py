"""Reads a trace of torch.profiler (Kineto): Chrome-trace JSON, plain or gzip, of any version and vendor.

Device events do not say their process, and name their device as `pid` and stream as `tid`; `args` repeats both.
How its times are written is told in event_times.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import polars as pl

from stepscope.core.errors import InputError, one_line, printable
from stepscope.trace.assemble import assemble
from stepscope.trace.readers.event_times import EXACT_BELOW_US, UNREADABLE, is_readable, nanoseconds
from stepscope.trace.readers.json_events import read_events
from stepscope.trace.table import (
    CALL_SCHEMA,
    DETAIL_SCHEMA,
    KIND,
    LINK_SCHEMA,
    OPERATOR_SCHEMA,
    RANGE_SCHEMA,
    WORK_SCHEMA,
    TraceTable,
    empty,
)

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

_ANNOTATIONS = ("ProfilerStep#", "Optimizer.step#", "Optimizer.zero_grad#", "DistributedDataParallel.forward")
"""Names of ranges that older versions list among the operators."""


class _Arguments(msgspec.Struct, frozen=True, gc=False):
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
    bytes: int | None = None
    grid: msgspec.Raw = msgspec.Raw(b"")
    block: msgspec.Raw = msgspec.Raw(b"")
    registers: int | None = msgspec.field(default=None, name="registers per thread")
    occupancy: int | float | None = msgspec.field(default=None, name="est. achieved occupancy %")
    name: msgspec.Raw = msgspec.Raw(b"")
    """Of a thread, in an event that names one."""


_Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str | int | float | None = ""
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    ts: int | float | None = None
    dur: int | float | None = None
    id: int | str | None = None
    args: _Arguments | None = None


class _ExactEvent(_Event, gc=False):
    ts: Decimal | None = None  # type: ignore[assignment]
    dur: Decimal | None = None  # type: ignore[assignment]


class _LooseEvent(_Event, gc=False):
    """An event with arguments of unexpected types: those that fit are taken, the rest of the event as it is."""

    id: Any = None
    args: Any = None


class _ExactLooseEvent(_LooseEvent, gc=False):
    ts: Decimal | None = None  # type: ignore[assignment]
    dur: Decimal | None = None  # type: ignore[assignment]


_NO_ARGUMENTS = _Arguments()
_decode = msgspec.json.Decoder(list[_Event], strict=False).decode
_decode_exact = msgspec.json.Decoder(list[_ExactEvent], strict=False).decode
_decode_loose = msgspec.json.Decoder(list[_LooseEvent], strict=False).decode
_decode_exact_loose = msgspec.json.Decoder(list[_ExactLooseEvent], strict=False).decode


def read_kineto(path: Path) -> TraceTable:
    """The TraceTable of a Kineto trace. Raises InputError where it is broken or holds no events of a profiler."""
    reader = _Reader(path)
    for block in read_events(path, _decode_block):
        if isinstance(block, dict):
            reader.note_fields(block)
        else:
            reader.take(block)
    return reader.table()


def _decode_block(text: bytes) -> list[_Event]:
    try:
        events = _decode(text)
    except msgspec.ValidationError:
        events = [_tightened(event) for event in _decode_loose(text)]
    if not any(isinstance(event.ts, float) and abs(event.ts) >= EXACT_BELOW_US for event in events[:1000]):
        return events
    try:
        return _decode_exact(text)  # type: ignore[return-value]
    except msgspec.ValidationError:
        return [_tightened(event) for event in _decode_exact_loose(text)]


def _tightened(event: _LooseEvent) -> _Event:
    arguments: dict[str, float | msgspec.Raw] = {}
    given = event.args
    loose = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    for field in msgspec.structs.fields(_Arguments):
        value = loose.get(field.encode_name)
        if field.type is msgspec.Raw and value is not None:
            arguments[field.name] = msgspec.Raw(msgspec.json.encode(value))
        elif isinstance(value, float) and field.name == "occupancy":
            arguments[field.name] = value
        elif isinstance(value, int | str) and not isinstance(value, bool):
            with suppress(msgspec.ValidationError):
                arguments[field.name] = msgspec.convert(value, _Number, strict=False)
    return _Event(
        ph=event.ph,
        cat=event.cat,
        name=event.name,
        pid=event.pid,
        tid=event.tid,
        ts=event.ts,
        dur=event.dur,
        id=event.id if isinstance(event.id, int | str) else None,
        args=_Arguments(**arguments),  # type: ignore[arg-type]
    )


class _Reader:
    """Collects frames block by block; text is stored once for each distinct value."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: dict[str, list[pl.DataFrame]] = defaultdict(list)
        self._texts: dict[str, int] = {}
        self._other: dict[str, int] = defaultdict(int)
        self._names: dict[str, int] = {}
        self._fields: dict[str, Any] = {}
        self._threads: dict[tuple[int, int], str] = {}
        self._events = 0

    def note_fields(self, fields: dict[str, Any]) -> None:
        self._fields.update(fields)

    def take(self, events: list[_Event]) -> None:
        self._events += len(events)
        sorted_events: dict[tuple[str, str | None], list[_Event]] = defaultdict(list)
        for event in events:
            sorted_events[event.ph, event.cat].append(event)
        for (ph, cat), group in sorted_events.items():
            place = _CATEGORIES.get((cat or "").lower(), "other")
            if ph == "X" and place in ("kernel", "memcpy", "memset"):
                self._take_work(place, group)
            elif ph == "X" and place == "call":
                self._take_calls(group)
            elif ph == "X" and place == "operator":
                old = [event for event in group if str(event.name).startswith(_ANNOTATIONS)]
                if old:
                    self._take_ranges(old)
                self._take_operators([event for event in group if not str(event.name).startswith(_ANNOTATIONS)])
            elif ph == "X" and place == "range":
                self._take_ranges(group)
            elif place == "link" and ph in ("s", "f"):
                self._take_links(group, begins=ph == "s")
            elif ph:
                self._other[cat or f"phase {ph}"] += len(group)
                if ph == "M":
                    self._name_threads(group)

    def _name_threads(self, group: list[_Event]) -> None:
        """Keep the names of threads. One may have several: of the process, then its own; all are kept in one text."""
        for event in group:
            if event.name == "thread_name" and event.args is not None and event.args.name:
                thread = self._identity(event.pid), self._identity(event.tid)
                name = _readable(bytes(event.args.name))
                self._threads[thread] = f"{before}, {name}" if (before := self._threads.get(thread)) else name

    def _take_work(self, kind: str, group: list[_Event]) -> None:
        arguments = [event.args or _NO_ARGUMENTS for event in group]
        self._parts["work"].append(
            pl.DataFrame(
                [
                    *self._times(group),
                    _integers("device", (given.device for given in arguments), group, "pid"),
                    _integers("stream", (given.stream for given in arguments), group, "tid"),
                    pl.Series("kind", [kind], dtype=KIND).new_from_index(0, len(group)),
                    self._text("name", (event.name for event in group)),
                    pl.Series("process", [None], dtype=pl.Int64).new_from_index(0, len(group)),
                    self._column("correlation", [given.correlation for given in arguments]),
                    self._column("external", [_first(given.external, given.external_old) for given in arguments]),
                    self._column("graph_node", [given.graph_node for given in arguments]),
                    *self._details(kind, arguments),
                ]
            )
        )

    def _details(self, kind: str, arguments: list[_Arguments]) -> Iterator[pl.Series]:
        """The columns of DETAIL_SCHEMA: a kernel has no bytes, and a copy nothing else."""
        kernel, nothing = kind == "kernel", [None] * len(arguments)
        untold = self._text("memory", [b""]).new_from_index(0, len(arguments))
        yield pl.Series(
            "bytes", nothing if kernel else [_within(given.bytes, 2**62) for given in arguments], dtype=pl.Int64
        )
        yield untold
        yield self._text("grid", (bytes(given.grid) for given in arguments)) if kernel else untold.alias("grid")
        yield self._text("block", (bytes(given.block) for given in arguments)) if kernel else untold.alias("block")
        registers = [_within(given.registers, 2**31) for given in arguments] if kernel else nothing
        yield pl.Series("registers", registers, dtype=pl.Int32)
        occupancy = [_within(given.occupancy, 2**31) for given in arguments] if kernel else nothing
        yield pl.Series("occupancy", occupancy, dtype=pl.Float32, strict=False)

    def _take_calls(self, group: list[_Event]) -> None:
        arguments = [event.args or _NO_ARGUMENTS for event in group]
        self._parts["calls"].append(
            pl.DataFrame(
                [
                    *self._times(group),
                    *self._host(group),
                    self._text("name", (event.name for event in group)),
                    self._column("correlation", [given.correlation for given in arguments]),
                    self._column("external", [_first(given.external, given.external_old) for given in arguments]),
                ]
            )
        )

    def _take_operators(self, group: list[_Event]) -> None:
        arguments = [event.args or _NO_ARGUMENTS for event in group]
        self._parts["operators"].append(
            pl.DataFrame(
                [
                    *self._times(group),
                    *self._host(group),
                    self._text("name", (event.name for event in group)),
                    self._column("external", [_first(given.external, given.external_old) for given in arguments]),
                    self._column("sequence", [given.sequence for given in arguments]),
                    self._column(
                        "forward_thread",
                        [_first(given.forward_thread, given.forward_thread_old) for given in arguments],
                    ),
                    self._text("shapes", (bytes(given.shapes) or bytes(given.shapes_old) for given in arguments)),
                    self._text("dtypes", (bytes(given.dtypes) for given in arguments)),
                ]
            )
        )

    def _take_ranges(self, group: list[_Event]) -> None:
        self._parts["ranges"].append(
            pl.DataFrame(
                [
                    *self._times(group),
                    *self._host(group),
                    self._text("name", (event.name for event in group)),
                    pl.Series("nested", [True], dtype=pl.Boolean).new_from_index(0, len(group)),
                ]
            )
        )

    def _take_links(self, group: list[_Event], *, begins: bool) -> None:
        start, _ = self._times(group)
        identity = [event.id if isinstance(event.id, int) else self._number(str(event.id)) for event in group]
        self._parts["links"].append(
            pl.DataFrame(
                [
                    self._column("id", identity),
                    start,
                    *self._host(group),
                    pl.Series("begins", [begins], dtype=pl.Boolean).new_from_index(0, len(group)),
                ]
            )
        )

    def _times(self, group: list[_Event]) -> tuple[pl.Series, pl.Series]:
        try:
            start, duration = nanoseconds([event.ts for event in group], [event.dur or 0 for event in group])
        except UNREADABLE:
            bad = next((event for event in group if not is_readable(event.ts, event.dur or 0)), group[0])
            raise InputError(
                f"{self._path}: the time of event {_name(bad)} is not a number that can be read "
                f"(ts {str(bad.ts)[:40]}, dur {str(bad.dur)[:40]})"
            ) from None
        if group and _int(duration.min()) < 0:
            bad = group[duration.arg_min() or 0]
            raise InputError(f"{self._path}: the event {_name(bad)} has a negative duration ({bad.dur})")
        return start, duration

    def _host(self, group: list[_Event]) -> tuple[pl.Series, pl.Series]:
        return (
            self._column("process", [self._identity(event.pid) for event in group]),
            self._column("thread", [self._identity(event.tid) for event in group]),
        )

    def _identity(self, value: object) -> int:
        """The number of a process or thread; those that are words get negative numbers of their own."""
        if type(value) is int:
            return value
        return -2 - self._number(str(value))

    def _number(self, text: str) -> int:
        return self._names.setdefault(text, len(self._names))

    def _column(self, name: str, values: list[Any]) -> pl.Series:
        try:
            return pl.Series(name, values, dtype=pl.Int64)
        except (TypeError, OverflowError, pl.exceptions.PolarsError) as error:
            raise InputError(f"{self._path}: the {name} of an event cannot be read: {one_line(error)}") from None

    def _text(self, name: str, values: Iterable[object]) -> pl.Series:
        """Numbers that stand for texts until `table` looks each text up once, so that it is stored once."""
        texts = self._texts
        return pl.Series(name, [texts.setdefault(value, len(texts)) for value in values], dtype=pl.UInt32)  # type: ignore[arg-type]

    def table(self) -> TraceTable:
        if not self._parts.keys() & {"work", "operators", "calls"}:
            raise InputError(
                f"{self._path}: {self._events} events, but none of kernels or operators: "
                "capture it with torch.profiler (activities CPU and CUDA) or nsys"
            )
        texts = pl.Series([_readable(text) for text in self._texts], dtype=pl.String)
        return assemble(
            path=self._path,
            profiler="Kineto",
            work=self._frame("work", pl.Schema({**WORK_SCHEMA, **DETAIL_SCHEMA}), texts),
            calls=self._frame("calls", CALL_SCHEMA, texts),
            ranges=self._frame("ranges", RANGE_SCHEMA, texts),
            operators=self._frame("operators", OPERATOR_SCHEMA, texts),
            links=self._frame("links", LINK_SCHEMA, texts),
            devices={
                device["id"]: str(device.get("name", ""))
                for device in _dicts(self._fields.get("deviceProperties"))
                if isinstance(device.get("id"), int)
            },
            other=dict(self._other),
            recorder=_recorder(self._fields),
            threads=self._threads,
        )

    def _frame(self, name: str, schema: pl.Schema, texts: pl.Series) -> pl.DataFrame:
        parts = self._parts.pop(name, None)
        if not parts:
            return empty(schema)
        frame = pl.concat(parts, rechunk=True)
        named = [column for column, dtype in schema.items() if dtype in (pl.String, pl.Categorical())]
        looked_up = [texts.cast(schema[column]).gather(frame[column]).alias(column) for column in named]
        optional = [column for column in named if column != "name"]
        return (
            frame.with_columns(looked_up)
            .with_columns(pl.when(pl.col(optional) != pl.lit("", pl.Categorical())).then(pl.col(optional)))
            .select(list(schema))
        )


def _dicts(value: list[Any] | str | float | None) -> list[dict[str, Any]]:
    """The dicts among a list's items; an empty list where the value is no list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _integers(name: str, values: Iterable[int | None], group: list[_Event], otherwise: str) -> pl.Series:
    """A number from the arguments, or from where the event itself holds it; -1 where neither does."""
    found: list[int] = []
    for value, event in zip(values, group, strict=True):
        given = getattr(event, otherwise) if value is None else value
        found.append(given if type(given) is int and abs(given) < 2**63 else -1)
    return pl.Series(name, found, dtype=pl.Int64)


def _within(value: float | None, limit: int) -> float | None:
    """A count from the arguments; null where it is damaged: no time depends on it."""
    return value if value is not None and 0 <= value < limit else None


def _first(value: int | None, otherwise: int | None) -> int | None:
    return otherwise if value is None else value


def _readable(text: object) -> str:
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return str(text).encode("utf-8", "replace").decode()


def _name(event: _Event) -> str:
    return repr(str(event.name)[:80])


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value


def _recorder(fields: dict[str, Any]) -> str | None:
    for key in ("pytorch_version", "torch_version", "cupti_version"):
        if key in fields:
            return printable(f"{key.removesuffix('_version')} {fields[key]}"[:80])
    return None
