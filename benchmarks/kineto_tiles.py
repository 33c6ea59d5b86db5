"""A large Kineto trace from a small one: its events again and again, each tile later in time and with ids of its own.

The layout of the text stays Kineto's, because readers' speed depends on it. What happens once in a trace stays once:
metadata, the profiler's own span and its end mark, both lengthened to hold all tiles.
"""

import gzip
import json
import re
from pathlib import Path

import msgspec

GAP_US = 10
"""Between the last end of a tile and the first start of the next."""

_EVENT_BREAK = re.compile(r",\n  (?=\{\n)")
_NUMBER = re.compile(
    r'("ts": '
    r'|"External id": |"correlation": |"wait_on_cuda_event_record_corr_id": |"ph": "[stf]", "id": '
    r'|"Sequence number": '
    r'|"Ev Idx": '
    r'|"Python id": |"Python parent id": '
    r'|"name": "ProfilerStep#)(\d+)'
)
"""Every number that tells one tile from another. Only the whole microseconds of a `ts`: shifts are whole."""

_KINDS = ("time", "id", "sequence", "index", "python", "step")
_KIND_OF = {
    '"ts": ': "time",
    '"Sequence number": ': "sequence",
    '"Ev Idx": ': "index",
    '"Python id": ': "python",
    '"Python parent id": ': "python",
    '"name": "ProfilerStep#': "step",
}
"""The rest are ids of one family: an External id joins ops to launches, a correlation launches to kernels, and a flow
from launch to kernel repeats the correlation. They share one offset, so that they stay consistent."""

_SHAPES = ("Concrete Inputs", "Input type", "Input Strides", "Input Dims")
_RECORD_SHAPES = re.compile(r'"(?:Concrete Inputs|Input type|Input Strides|Input Dims)": ')
_OCCUPANCY = re.compile(
    r' *"(?:queued|registers per thread|shared memory|blocks per SM|warps per SM|est\. achieved occupancy %)"'
    r": -?[\d.e+-]+,?"
)


class KinetoTiles(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a tiled trace holds."""

    tiles: int
    bytes: int
    events: int
    kernels: int


class _Template(msgspec.Struct, kw_only=True):
    """A tile as text with holes for its numbers."""

    pieces: list[str]
    numbers: list[int]
    kinds: list[int]
    strides: dict[str, int]
    tail: str

    def tile(self, k: int) -> str:
        """The k-th tile."""
        offsets = [k * self.strides[kind] for kind in _KINDS]
        parts: list[str] = []
        for piece, number, kind in zip(self.pieces, self.numbers, self.kinds, strict=False):
            parts += (piece, str(number + offsets[kind]))
        parts.append(self.tail)
        return "".join(parts)


def read_text(path: Path) -> str:
    """A capture's text, gzipped or not."""
    data = path.read_bytes()
    return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()


def split_events(text: str) -> tuple[str, list[str], str]:
    """The text before the events, each event's text, and the text after."""
    head, mark, rest = text.partition('"traceEvents": [')
    end = rest.rfind("\n  ]")
    if not mark or end < 0:
        raise ValueError("not laid out as Kineto writes it")
    return head + mark, _EVENT_BREAK.split(rest[:end].strip()), rest[end:]


def lean(event: str) -> str:
    """An event without its input shapes (as with record_shapes=False) and without a kernel's occupancy figures."""
    if '"cat": "kernel"' in event:
        return re.sub(r",(\s*\n\s*\})", r"\1", _OCCUPANCY.sub("", event))
    if not _RECORD_SHAPES.search(event):
        return event
    before, mark, rest = event.partition('"args": {\n')
    line, newline, after = rest.partition("\n")
    arguments = {key: value for key, value in json.loads(f"{{{line}}}").items() if key not in _SHAPES}
    return f"{before}{mark}      {json.dumps(arguments, ensure_ascii=False)[1:-1]}{newline}{after}"


def _is_once(event: dict) -> bool:
    return event["ph"] in {"M", "i", "I"} or event.get("cat") == "Trace"


def _template(texts: list[str], span_us: int) -> _Template:
    pieces, numbers, kinds = [], [], []
    largest: dict[str, int] = dict.fromkeys(_KINDS, -1)
    *found, tail = _NUMBER.split(",\n  ".join(texts))
    constant = ""
    for before, key, digits in zip(found[0::3], found[1::3], found[2::3], strict=True):
        kind, number = _KIND_OF.get(key, "id"), int(digits)
        constant += before + key
        if kind == "id" and number == 0:  # Kineto's "none"
            constant += digits
            continue
        pieces.append(constant)
        numbers.append(number)
        kinds.append(_KINDS.index(kind))
        largest[kind] = max(largest[kind], number)
        constant = ""
    strides = {kind: largest[kind] + 1 for kind in _KINDS} | {"time": span_us}
    return _Template(pieces=pieces, numbers=numbers, kinds=kinds, strides=strides, tail=constant + tail)


def _lengthened(event: str, by_us: int) -> str:
    """The once-only events that mark the trace's end, moved by the length of all further tiles."""

    def later(match: re.Match[str]) -> str:
        return match[1] + str(int(match[2]) + by_us)

    if '"cat": "Trace"' in event:
        return re.sub(r'("dur": )(\d+)', later, event)
    return re.sub(r'("ts": )(\d+)', later, event) if '"Record Window End"' in event else event


def tile_kineto(capture: Path, target: Path, size_bytes: int, *, drop_arguments: bool = False) -> KinetoTiles:
    """Write `target`: as many whole tiles of the capture (at least one) as come nearest to the size."""
    head, texts, foot = split_events(read_text(capture))
    if drop_arguments:
        texts = [lean(text) for text in texts]
    events = [json.loads(text) for text in texts]
    tiled = [(text, event) for text, event in zip(texts, events, strict=True) if not _is_once(event)]
    once = [text for text, event in zip(texts, events, strict=True) if _is_once(event)]
    start = min(event["ts"] for _, event in tiled)
    span_us = int(max(event["ts"] + event.get("dur", 0) for _, event in tiled) - start) + 1 + GAP_US
    template = _template([text for text, _ in tiled], span_us)
    tile_bytes = len(template.tile(0).encode())
    tiles = max(1, round(size_bytes / tile_bytes))

    part = target.with_suffix(".part")
    with part.open("w", encoding="utf-8") as out:
        out.write(head + "\n  ")
        for k in range(tiles):
            out.write(template.tile(k) + ",\n  ")
        out.write(",\n  ".join(_lengthened(text, (tiles - 1) * span_us) for text in once) + foot)
    part.replace(target)
    kernels = sum(event.get("cat") == "kernel" for _, event in tiled)
    return KinetoTiles(
        tiles=tiles,
        bytes=target.stat().st_size,
        events=tiles * len(tiled) + len(once),
        kernels=tiles * kernels,
    )
