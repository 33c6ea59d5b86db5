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
from typing import Any, BinaryIO, TypeVar

import msgspec

from stepscope.core.errors import InputError, one_line
from stepscope.core.profilers import with_texts_escaped

T = TypeVar("T")

BLOCK_BYTES = 1 << 20
"""Events of larger blocks leave the processor's cache before a table is made of them: of 4 MiB, it took 1.4 times as
long."""
EVENT_LIMIT_BYTES = 64 << 20
"""The most bytes of an event. No profiler's comes near, so a larger one is broken or hostile."""
_SUSPICIOUS_BYTES, _SUSPICIOUS_RATIO = 64 << 20, 150
"""The largest ratio of decompression: traces reach 10, with one repeated step 50, and a bomb a thousand."""

_BETWEEN_EVENTS = re.compile(rb"\}\s*+,\s*+\{")
_TOKENS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)
_ARRAY_OPENS = re.compile(rb"\s*+:\s*+\[")
_MENDABLE = re.compile(rb'"(?:[^"\\]++|\\.)*+"|-?\b(?:NaN|nan|Infinity|inf)\b', re.DOTALL)
_ESCAPE = re.compile(
    rb"""\\(?: (?P<good> u[dD][89abAB][0-9a-fA-F]{2} \\u[dD][c-fC-F][0-9a-fA-F]{2} | u(?![dD][89a-fA-F])[0-9a-fA-F]{4}
    | ["\\/bfnrt] ) | (?P<half> u[0-9a-fA-F]{4} ) | )""",
    re.VERBOSE,
)
"""Each escape of a string: a good one (a pair of surrogates is one), half a pair, or else a backslash by mistake."""
_CONTROL = re.compile(rb"[\x00-\x1f]")
UNESCAPED, CONTROL = "texts with quotes or backslashes that are not escaped", "texts with line breaks or the like"
"""What is wrong with texts that are mended."""
_DEEPEST = 500
"""The most brackets within brackets; Python's JSON gives up at a thousand."""
_GUESSES = 3
_TAIL_BYTES = 1 << 14, 1 << 18
"""How far from its end a block is searched for the end of an event: mostly the former, and else the latter."""


def is_bomb(packed_bytes: int, unpacked_bytes: int) -> bool:
    """Whether a file decompresses to more than any capture does."""
    return unpacked_bytes > _SUSPICIOUS_BYTES and unpacked_bytes > _SUSPICIOUS_RATIO * packed_bytes


class _Stream:
    """The text of the file, decompressed as it is read; knows how far it has come."""

    def __init__(self, path: Path, file: BinaryIO, mended: dict[str, int]) -> None:
        self.path = path
        self._mended = mended
        self._size = path.stat().st_size
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        self._source = gzip.GzipFile(fileobj=file) if packed else file
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
        if is_bomb(self._size, self.position):
            raise InputError(
                f"{self.path}: {self._size} bytes that decompress to more than {self.position} are no trace: "
                "refused as a decompression bomb; if it is a trace, unpack it first"
            )
        return text

    def count_mended(self, what: str, texts: int) -> None:
        if texts:
            self._mended[what] = self._mended.get(what, 0) + texts

    def read_as_much(self, text: bytes) -> bytes:
        """Further text of at least the length of `text`: a buffer that must be scanned again doubles each time."""
        more = self.read()
        while not self.ended and len(more) < len(text):
            more += self.read()
        return more

    def open_array(self) -> tuple[bytes, dict[str, Any], bytes]:
        """Read up to the array of events: the text after its bracket, the fields before it, what must close it."""
        buffer = self.read()
        text = buffer.removeprefix(b"\xef\xbb\xbf").lstrip()
        if not text:
            raise InputError(f"{self.path}: the file is empty")
        if text.startswith(b"["):
            return text[1:], {}, b""
        if not text.startswith(b"{"):
            raise InputError(f"{self.path}: neither a JSON trace nor another capture that stepscope knows")
        while True:
            for token, depth in self.brackets_and_strings(text):  # not in a string, nor in an inner object
                opened = _ARRAY_OPENS.match(text, token.end()) if token.group() == b'"traceEvents"' else None
                if opened and depth == 1:
                    start = opened.end()
                    return text[start:], self.fields(text[:start] + b"]}", "before its events"), b"}"
            if self.ended:
                raise InputError(
                    f'{self.path}: no "traceEvents" in this JSON: it is truncated, or no trace of a profiler'
                )
            if len(text) > EVENT_LIMIT_BYTES:
                raise InputError(
                    f'{self.path}: no "traceEvents" within {EVENT_LIMIT_BYTES >> 20} MiB: this is no trace'
                )
            text += self.read_as_much(text)

    def brackets_and_strings(self, text: bytes) -> Iterator[tuple[re.Match[bytes], int]]:
        """Each bracket and string, with the brackets open after it. Raises InputError where they are too many."""
        depth = 0
        for token in _TOKENS.finditer(text):
            mark = token.group()
            if mark in (b"{", b"["):
                depth += 1
                if depth > _DEEPEST:
                    raise InputError(
                        f"{self.path}: brackets nest more than {_DEEPEST} deep at byte "
                        f"{self.position - len(text) + token.start()}: this is no trace of a profiler"
                    )
            elif mark in (b"}", b"]"):
                depth -= 1
            yield token, depth

    def fields(self, text: bytes, where: str) -> dict[str, Any]:
        try:
            return msgspec.json.decode(_mend(text, {}), type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(f"{self.path}: the JSON is broken {where}: {one_line(error)}") from None

    def scan(self, buffer: bytes) -> tuple[int, bool]:
        """Where the last whole event of a buffer ends, by counting brackets outside strings; whether the array does."""
        end = 0
        for token, depth in self.brackets_and_strings(buffer):
            if depth < 0:
                return end, True
            if depth == 0 and token.group() in (b"}", b"]"):
                end = token.end()
        return end, False

    def array_end(self, buffer: bytes) -> int:
        for token, depth in self.brackets_and_strings(buffer):
            if depth < 0:
                if token.group() == b"]":
                    return token.start()
                break
        raise InputError(
            f"{self.path}: the JSON ends in the middle, after byte {self.position}: "
            "the file is truncated; copy or capture it again"
        )


def read_events(
    path: Path, decode: Callable[[bytes], list[T]], mended: dict[str, int] | None = None
) -> Iterator[list[T] | dict[str, Any]]:
    """Blocks of events, each as `decode` makes it of a JSON array; and the top-level fields around them, as dicts.

    Texts that had to be mended are counted in `mended`, by what was wrong with them.

    Raises InputError, with the place in the (decompressed) text, where the file is no trace or ends too early.
    """
    with path.open("rb") as file:
        yield from _blocks(_Stream(path, file, {} if mended is None else mended), decode)


def _blocks(stream: _Stream, decode: Callable[[bytes], list[T]]) -> Iterator[list[T] | dict[str, Any]]:
    buffer, before, closing = stream.open_array()
    yield before
    while True:
        while len(buffer) < BLOCK_BYTES and not stream.ended:
            buffer += stream.read()
        if stream.ended:
            break
        buffer, cut, events, unsure = _by_a_guess(stream, buffer, decode)
        if events is not None:
            yield events
        elif unsure:
            buffer += stream.read_as_much(buffer)
            continue
        else:
            cut, closed = stream.scan(buffer)
            if closed:
                break
            if cut:
                yield _decode_carefully(stream, buffer[:cut], decode, start=stream.position - len(buffer))
        if cut:
            buffer = buffer[cut:].lstrip()
            while not buffer and not stream.ended:
                buffer = stream.read().lstrip()
            buffer = buffer.removeprefix(b",")
        elif len(buffer) > EVENT_LIMIT_BYTES:
            raise InputError(
                f"{stream.path}: no event ends within {EVENT_LIMIT_BYTES >> 20} MiB after byte "
                f"{stream.position - len(buffer)}: this is no trace of a profiler"
            )
        else:
            buffer += stream.read_as_much(buffer)
    yield from _finish(stream, buffer, closing, decode)


def _at_a_guess(buffer: bytes, decode: Callable[[bytes], list[T]]) -> tuple[int | None, list[T] | None]:
    """Where the buffer may be cut, and the events before; None and None where all guesses fail."""
    ends: list[int] = []
    for tail in _TAIL_BYTES:
        ends = [match.start() + 1 for match in _BETWEEN_EVENTS.finditer(buffer, max(0, len(buffer) - tail))]
        if len(ends) >= _GUESSES:
            break
    for end in ends[: -_GUESSES - 1 : -1]:  # ends of whole events, as the text suggests, the last first
        try:
            return end, decode(b"".join((b"[", memoryview(buffer)[:end], b"]")))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
    return None, None


def _by_a_guess(
    stream: _Stream, buffer: bytes, decode: Callable[[bytes], list[T]]
) -> tuple[bytes, int | None, list[T] | None, bool]:
    """The buffer, where it may be cut, the events before, and whether more text may tell.

    A buffer in which texts are not escaped is mended first: its brackets could not be counted.
    """
    cut, events = _at_a_guess(buffer, decode)
    if events is not None:
        return buffer, cut, events, False
    mended, unescaped = with_texts_escaped(buffer, complete=False)
    if unescaped:
        cut, events = _at_a_guess(mended, decode)
        if events is not None:
            stream.count_mended(UNESCAPED, unescaped)
            return mended, cut, events, False
    return buffer, None, None, bool(unescaped) and len(buffer) <= EVENT_LIMIT_BYTES


def _finish(
    stream: _Stream, buffer: bytes, closing: bytes, decode: Callable[[bytes], list[T]]
) -> Iterator[list[T] | dict[str, Any]]:
    """The last events, the end of the array, and the fields after it."""
    while not stream.ended and len(buffer) <= 2 * EVENT_LIMIT_BYTES:
        buffer += stream.read()
    if not stream.ended:
        raise InputError(
            f"{stream.path}: the events do not end within {2 * EVENT_LIMIT_BYTES >> 20} MiB after byte "
            f"{stream.position - len(buffer)}: this is no trace of a profiler"
        )
    start = stream.position - len(buffer)
    try:
        end = buffer.rindex(b"]")  # a guess, proved by parsing
        events = decode(b"[" + buffer[:end] + b"]")
    except (ValueError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        mended, unescaped = (buffer, 0) if _is_closed(buffer, decode) else with_texts_escaped(buffer)
        if unescaped and _is_closed(mended, decode):
            stream.count_mended(UNESCAPED, unescaped)
            buffer = mended
        end = stream.array_end(buffer)
        # A comma too many is a known slip of writers.
        events = _decode_carefully(stream, buffer[:end].rstrip().removesuffix(b","), decode, start=start)
    yield events
    rest = buffer[end + 1 :].strip()
    if closing:
        yield stream.fields(b'{"traceEvents":[]' + rest, f"after its events, at byte {start + end + 1}")
    elif rest:
        raise InputError(f"{stream.path}: text follows the end of the trace, at byte {start + end + 1}")


def _is_closed(text: bytes, decode: Callable[[bytes], list[T]]) -> bool:
    """Whether the text up to its last bracket is events."""
    try:
        decode(b"[" + _mend(text[: text.rindex(b"]")].rstrip().removesuffix(b","), {}) + b"]")
    except (ValueError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _decode_carefully(stream: _Stream, text: bytes, decode: Callable[[bytes], list[T]], *, start: int) -> list[T]:
    """Decode whole events, mended if they must be; otherwise say what is wrong and where."""
    try:
        return decode(b"[" + text + b"]")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    mended: dict[str, int] = {}
    try:
        events = decode(b"[" + _mend(text, mended) + b"]")
    except RecursionError:
        reason = "brackets nest too deeply"
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        reason = one_line(error)
    else:
        for what, texts in mended.items():
            stream.count_mended(what, texts)
        return events
    raise InputError(f"{stream.path}: the events after byte {start} are broken: {reason}")


def _mend(text: bytes, counts: dict[str, int]) -> bytes:
    """The text with what profilers write wrongly put right; everything else is left as it is."""

    def mended(match: re.Match[bytes]) -> bytes:
        token = match.group()
        if not token.startswith(b'"'):
            return b"null"
        escaped = _ESCAPE.sub(
            lambda escape: escape[0] if escape["good"] else rb"\ufffd" if escape["half"] else rb"\\", token
        )
        whole = _CONTROL.sub(lambda control: b"\\u%04x" % ord(control.group()), escaped)
        for what, before, after in ((UNESCAPED, token, escaped), (CONTROL, escaped, whole)):
            if before != after:
                counts[what] = counts.get(what, 0) + 1
        return whole

    return _MENDABLE.sub(mended, text.decode("utf-8", "replace").encode())
