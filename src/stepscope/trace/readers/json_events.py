"""A stream of events out of a Chrome-trace JSON file: block by block, never the whole file in memory.

A block is cut where one event ends and the next begins. The cut is guessed from the text and proved by parsing: if
`[` + block + `]` is valid JSON, the block consists of whole events. A guess that fails is followed by another, then by
a scan that counts brackets outside strings, so any layout is read. Text that profilers are known to write wrongly
(invalid escapes, NaN in arguments, stray bytes) is mended, in the blocks that need it only.
"""

import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from stepscope.core.errors import InputError, one_line

T = TypeVar("T")

BLOCK_BYTES = 8 << 20
EVENT_LIMIT_BYTES = 64 << 20
"""No event of a profiler comes near: what is larger is broken or hostile."""
_SUSPICIOUS_BYTES, _SUSPICIOUS_RATIO = 1 << 30, 300
"""Traces compress to a tenth or a thirtieth; a bomb compresses a thousandfold."""

_BETWEEN_EVENTS = re.compile(rb"\}\s*+,\s*+\{")
_TOKENS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)
_ARRAY_KEY = re.compile(rb'"traceEvents"\s*+:\s*+\[')
_MENDABLE = re.compile(rb'"(?:[^"\\]++|\\.)*+"|-?\b(?:NaN|nan|Infinity|inf)\b', re.DOTALL)
_BAD_ESCAPE = re.compile(rb'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|)')
_CONTROL = re.compile(rb"[\x00-\x1f]")
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_GUESSES = 3
_TAIL_BYTES = 1 << 18


def is_gzip(path: Path) -> bool:
    """Whether the file begins as gzip does."""
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def read_events(path: Path, decode: Callable[[bytes], list[T]]) -> Iterator[list[T] | dict]:
    """Blocks of events, each as `decode` makes it of a JSON array; and the top-level fields around them, as dicts.

    Raises InputError, with the place in the (decompressed) text, where the file is no trace or ends too early.
    """
    with path.open("rb") as file:
        stream = _Stream(path, file)
        yield from _read(stream, decode)


class _Stream:
    """The text of the file, decompressed as it is read; knows how far it has come."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._size = path.stat().st_size
        self._source = gzip.GzipFile(fileobj=file) if is_gzip(path) else file
        self.position = 0
        self.ended = False

    def read(self) -> bytes:
        try:
            text = self._source.read(BLOCK_BYTES)
        except EOFError:
            raise InputError(
                f"{self.path}: the gzip file is truncated after {self.position} bytes of text; copy or capture it again"
            ) from None
        except (gzip.BadGzipFile, zlib.error, OSError) as error:
            raise InputError(f"{self.path}: cannot be read: {one_line(error)}") from None
        self.position += len(text)
        self.ended = not text
        if self.position > _SUSPICIOUS_BYTES and self.position > _SUSPICIOUS_RATIO * self._size:
            raise InputError(
                f"{self.path}: {self._size} bytes that decompress to more than {self.position} are no trace: "
                "refused as a decompression bomb"
            )
        return text


def _read(stream: _Stream, decode: Callable[[bytes], list[T]]) -> Iterator[list[T] | dict]:
    buffer, before, closing = _open_array(stream)
    yield before
    while True:
        while len(buffer) < BLOCK_BYTES and not stream.ended:
            buffer += stream.read()
        if stream.ended:
            break
        cut = None
        for end in _guesses(buffer):
            try:
                events = decode(b"[" + buffer[:end] + b"]")
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue
            yield events
            cut = end
            break
        if cut is None:
            cut, closed = _scan(buffer)
            if closed:
                break
            if cut:
                yield _decode_carefully(stream, buffer[:cut], decode, start=stream.position - len(buffer))
        if cut:
            buffer = buffer[cut:].lstrip().removeprefix(b",")
        elif len(buffer) > EVENT_LIMIT_BYTES:
            raise InputError(
                f"{stream.path}: no event ends within {EVENT_LIMIT_BYTES >> 20} MiB after byte "
                f"{stream.position - len(buffer)}: this is no trace of a profiler"
            )
        else:
            buffer += stream.read()
    yield from _finish(stream, buffer, closing, decode)


def _open_array(stream: _Stream) -> tuple[bytes, dict, bytes]:
    """Read up to the array of events: the text after its bracket, the fields before it, what must close it."""
    buffer = stream.read()
    text = buffer.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text:
        raise InputError(f"{stream.path}: the file is empty")
    if text.startswith(b"["):
        return text[1:], {}, b""
    if not text.startswith(b"{"):
        raise InputError(f"{stream.path}: neither a JSON trace nor another capture that stepscope knows")
    searched = 0
    while True:
        for found in _ARRAY_KEY.finditer(text, searched):
            try:
                fields = msgspec.json.decode(_mend(text[: found.end()]) + b"]}")
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue  # the words stood inside a string or deeper
            if fields.get("traceEvents") == []:
                return text[found.end() :], fields, b"}"
        if stream.ended:
            raise InputError(f'{stream.path}: no "traceEvents" in this JSON: it is no trace of a profiler')
        if len(text) > EVENT_LIMIT_BYTES:
            raise InputError(f'{stream.path}: no "traceEvents" within {EVENT_LIMIT_BYTES >> 20} MiB: this is no trace')
        searched = max(0, len(text) - 64)
        text += stream.read()


def _guesses(buffer: bytes) -> Iterator[int]:
    """Ends of whole events near the end of the buffer, as the text suggests, the last first."""
    tail = max(0, len(buffer) - _TAIL_BYTES)
    found = [match.start() + 1 for match in _BETWEEN_EVENTS.finditer(buffer, tail)]
    yield from found[: -_GUESSES - 1 : -1]


def _scan(buffer: bytes) -> tuple[int, bool]:
    """Where the last whole event in the buffer ends, by counting brackets outside strings; whether the array does."""
    depth, end = 0, 0
    for token in _TOKENS.finditer(buffer):
        mark = token.group()
        if mark in (b"{", b"["):
            depth += 1
        elif mark in (b"}", b"]"):
            depth -= 1
            if depth < 0:
                return end, True
            if depth == 0:
                end = token.end()
    return end, False


def _finish(
    stream: _Stream, buffer: bytes, closing: bytes, decode: Callable[[bytes], list[T]]
) -> Iterator[list[T] | dict]:
    """The last events, the end of the array, and the fields after it."""
    while not stream.ended and len(buffer) <= 2 * EVENT_LIMIT_BYTES:
        buffer += stream.read()
    start = stream.position - len(buffer)
    end = _array_end(buffer)
    if end is None or not stream.ended:
        raise InputError(
            f"{stream.path}: the JSON ends in the middle, after byte {stream.position}: "
            "the file is truncated; copy or capture it again"
        )
    events = buffer[:end].rstrip().removesuffix(b",")  # a comma too many is a known slip of writers
    yield _decode_carefully(stream, events, decode, start=start)
    rest = buffer[end + 1 :].strip()
    if not closing:
        if rest:
            raise InputError(f"{stream.path}: text follows the end of the trace, at byte {start + end + 1}")
        return
    try:
        yield msgspec.json.decode(_mend(b'{"traceEvents":[]' + rest))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(
            f"{stream.path}: the JSON is broken after its events, at byte {start + end + 1}: {one_line(error)}"
        ) from None


def _array_end(buffer: bytes) -> int | None:
    depth = 0
    for token in _TOKENS.finditer(buffer):
        mark = token.group()
        if mark in (b"{", b"["):
            depth += 1
        elif mark in (b"}", b"]"):
            if depth == 0:
                return token.start() if mark == b"]" else None
            depth -= 1
    return None


def _decode_carefully(stream: _Stream, text: bytes, decode: Callable[[bytes], list[T]], *, start: int) -> list[T]:
    """Decode whole events, mended if they must be; otherwise say what is wrong and where."""
    try:
        return decode(b"[" + text + b"]")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return decode(b"[" + _mend(text) + b"]")
    except RecursionError:
        reason = "brackets nest too deeply"
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        reason = one_line(error)
    raise InputError(f"{stream.path}: the events after byte {start} are broken: {reason}")


def _mend(text: bytes) -> bytes:
    """The text with what profilers write wrongly put right; everything else is left as it is."""
    return _MENDABLE.sub(_mended, text.decode("utf-8", "replace").encode())


def _mended(match: re.Match[bytes]) -> bytes:
    token = match.group()
    if not token.startswith(b'"'):
        return b"null"
    token = _BAD_ESCAPE.sub(lambda escape: escape.group() if escape.group(1) else b"\\\\", token)
    token = _CONTROL.sub(lambda control: b"\\u%04x" % ord(control.group()), token)
    return _LONE_SURROGATE.sub(rb"\\ufffd", token)
