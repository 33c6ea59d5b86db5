"""Events of a Kineto trace, decoded into typed structs that skip what no reader asks for."""

import re
from contextlib import suppress
from decimal import Decimal
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


_BY_VALUES = re.compile(r"conv|attention|flash_attn|^sgl_kernel::fwd$")
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


def operator_shapes(given: Arguments) -> bytes:
    """The shapes as recorded."""
    return bytes(given.shapes) or bytes(given.shapes_old)


def needs_values(operator: object) -> bool:
    """Whether an operator's work depends on values: a convolution's strides, whether attention is causal."""
    return isinstance(operator, str) and _BY_VALUES.search(operator) is not None
