"""Events of a Kineto trace, decoded into typed structs that skip what no reader asks for."""

import operator
import re
from contextlib import suppress
from decimal import Decimal
from typing import Annotated, Any, cast

import msgspec

from stepscope.traces.readers.event_times import needs_decimals


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


_BY_VALUES = re.compile(r"conv|attention|flash_attn|^sgl_kernel::fwd$")
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
    try:
        events = _decode(text)
        return _decode_exact(text) if needs_decimals([event.ts for event in events]) else events  # type: ignore[return-value]
    except msgspec.ValidationError:
        return [_tightened(event) for event in _decode_apart(text)]


def _tightened(text: msgspec.Raw) -> Event:
    """What can be read of one event, its times as decimals."""
    try:
        event = _decode_loose(text)
    except msgspec.ValidationError:
        return _NO_EVENT
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
        ph=str(event.ph),
        cat=event.cat if isinstance(event.cat, str) else None,
        name=event.name if isinstance(event.name, str | int | float) else str(event.name)[:_LONGEST_NAME],
        pid=event.pid if isinstance(event.pid, str | int | float) else None,
        tid=event.tid if isinstance(event.tid, str | int | float) else None,
        ts=_decimal(event.ts),  # type: ignore[arg-type]
        dur=_decimal(event.dur),  # type: ignore[arg-type]
        id=event.id if isinstance(event.id, int | str) else None,
        args=Arguments(**arguments),  # type: ignore[arg-type]
    )


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


def either(arguments: list[Arguments], name: str) -> list[int | None]:
    """The numbers of this name or, where there are none, of its older spelling."""
    values: list[int | None] = list(map(operator.attrgetter(name), arguments))
    if None not in values:
        return values
    older = map(operator.attrgetter(f"{name}_old"), arguments)
    return [otherwise if value is None else value for value, otherwise in zip(values, older, strict=True)]


def operator_shapes(given: Arguments) -> bytes:
    """The shapes as recorded."""
    return bytes(given.shapes) or bytes(given.shapes_old)


def needs_values(name: object) -> bool:
    """Whether an operator's work depends on values: a convolution's strides, whether attention is causal."""
    return isinstance(name, str) and _BY_VALUES.search(name) is not None
