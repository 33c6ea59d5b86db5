"""Events of a Kineto trace, decoded into typed structs that skip what no reader asks for."""

from contextlib import suppress
from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Any, cast

import msgspec

from stepscope.trace.readers.event_times import EXACT_BELOW_US


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


class _LooseEvent(Event, gc=False):
    """An event with arguments of unexpected types: those that fit are taken, the rest of the event as it is."""

    id: Any = None
    args: Any = None


class _ExactLooseEvent(_LooseEvent, gc=False):
    ts: Decimal | None = None  # type: ignore[assignment]
    dur: Decimal | None = None  # type: ignore[assignment]


NO_ARGUMENTS = Arguments()
_decode = msgspec.json.Decoder(list[Event], strict=False).decode
_decode_exact = msgspec.json.Decoder(list[_ExactEvent], strict=False).decode
_decode_loose = msgspec.json.Decoder(list[_LooseEvent], strict=False).decode
_decode_exact_loose = msgspec.json.Decoder(list[_ExactLooseEvent], strict=False).decode


def decode_block(text: bytes) -> list[Event]:
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


def _tightened(event: _LooseEvent) -> Event:
    arguments: dict[str, float | msgspec.Raw] = {}
    given = event.args
    loose = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
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
        ph=event.ph,
        cat=event.cat,
        name=event.name,
        pid=event.pid,
        tid=event.tid,
        ts=event.ts,
        dur=event.dur,
        id=event.id if isinstance(event.id, int | str) else None,
        args=Arguments(**arguments),  # type: ignore[arg-type]
    )


def operator_shapes(event: Event, given: Arguments) -> bytes:
    """The shapes as recorded. A convolution's also have its lists of numbers, without which its output is not known."""
    recorded = bytes(given.shapes) or bytes(given.shapes_old)
    return _with_lists(recorded, bytes(given.values)) if given.values and "conv" in str(event.name) else recorded


@lru_cache(4096)
def _with_lists(shapes: bytes, values: bytes) -> bytes:
    """`[[8, 3, 32, 32], [], []]` with the values `["", "[2, 2]", "1"]` as `[[8, 3, 32, 32], [2, 2], []]`."""
    try:
        read = msgspec.json.decode(shapes, type=list[list[Any]])
        found = [_numbers(value) for value in msgspec.json.decode(values, type=list[Any])]
    except (msgspec.MsgspecError, RecursionError):
        return shapes
    if len(read) != len(found):
        return shapes
    return msgspec.json.encode([shape or numbers for shape, numbers in zip(read, found, strict=True)])


def _numbers(value: object) -> list[int]:
    """The numbers of a list that is written as Python writes it, with True as 1; none where it is something else."""
    words = value[1:-1].split(",") if isinstance(value, str) and value[:1] == "[" and value[-1:] == "]" else []
    found = [{"True": "1", "False": "0"}.get(word.strip(), word.strip()) for word in words]
    return [int(word) for word in found] if all(word.isdecimal() and len(word) < 19 for word in found) else []
