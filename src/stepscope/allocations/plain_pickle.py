"""Reads a pickle that holds plain data, and refuses every other before anything of it runs.

A pickle is a program. The few of its instructions that reach out of it (GLOBAL, STACK_GLOBAL, INST, EXT, persistent
ids) all ask the unpickler to find a name; here that is refused, with the name. Without a callable from outside, the
instructions that call (REDUCE, OBJ, NEWOBJ, BUILD) find only numbers, texts and containers to call, and fail.

What is left is work without end: 434 bytes of tuples that hold each other twice, as a key, have the unpickler hash for
years, and nothing in this process could stop it. So a process of its own reads the file, within limits of time and
memory. Of a snapshot it hands on the events as columns, and keeps no event longer than its figures take to copy: the
lists of events are Columns to the unpickler. What fits into no columns is read here again, as it is.
"""

import contextlib
import gc
import gzip
import io
import os
import pickle
import re
import signal
import subprocess
import sys
import zlib
from array import array
from collections.abc import Callable, Generator, Iterator
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, BinaryIO, NoReturn, cast

from stepscope.core.errors import EXIT_DONE, EXIT_WRONG_INPUT, InputError, one_line
from stepscope.core.files import check_regular
from stepscope.core.units import GIB, MIB, format_bytes

LARGEST_BYTES = 16 * GIB
"""The most bytes that are read of one pickle, unpacked: some thirty million events with deep stacks."""
_GZIP = b"\x1f\x8b"
_GZIP_MOST = 150
_GZIP_LEAST = 16 * MIB
"""The most bytes that a packed byte may unpack to, beyond small files: snapshots reach some 45, a bomb 1032."""
_ROOM_BYTES = 256 * MIB
_ROOM_PER_BYTE = 16
"""The most memory that reading may take, as a base and a multiple of the bytes read so far: plain data in Python takes
up to ten times its pickle, empty lists and texts of one byte seventy times."""
_LEAST_SECONDS, _BYTES_PER_SECOND = 5, 2 * MIB
"""Processor time that reading may take: a least, and a second for so many bytes. Some 50 MiB take a second."""
_BUFFER_BYTES = 1 << 20
_STATM = Path("/proc/self/statm")
_LONGEST_NAME = 100
_DEVICES = re.compile(rb"(?<=\x8c\x0ddevice_traces\x94\]\x94)\(?(?:\]\x94){1,64}")
"""The lists of events where PyTorch's pickles begin them, from protocol 4 on: those up to the first that has events."""
_ENOUGH_BYTES = 256
"""More than such lists and what is before them take."""
_BATCH = 1000
_SHORT = 8
"""Frames of a stack that is not worth emptying."""
_BELOW_2_TO_62 = bytes(range(0x40))

_FAULTS = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, KeyError, IndexError, OverflowError,
    RecursionError, SystemError, zlib.error,
)  # fmt: skip
"""What the standard library's unpickler raises for instructions that make no sense, as its documentation warns."""


class _Refused(Exception):
    """Raised where a pickle asks for something outside itself."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise _Refused(f"{module_name}.{global_name}")

    def persistent_load(self, pid: object, /) -> NoReturn:
        raise _Refused(f"the persistent object {pid!r}" if isinstance(pid, str) else "a persistent object")


class Odd(Exception):
    """Raised where events are not as PyTorch writes them, so that columns cannot hold them."""


class _Places(dict[Any, int]):
    """The place of each distinct value, in the order of asking. A type that is none of these is Odd."""

    def __init__(self, *types: type) -> None:
        super().__init__()
        self._types = types

    def __missing__(self, value: Any) -> int:
        if type(value) not in self._types:
            raise Odd
        return self.setdefault(value, len(self))


_NO_FRAMES: tuple[Any, int] = [], 0


class StackPlaces:
    """Distinct stacks, each a list of frames. PyTorch writes a frame once and refers to it, so that a stack is known by
    the identity of its frames."""

    def __init__(self) -> None:
        self.stacks: list[Any] = [()]
        self._place_of: dict[tuple[int, ...], int] = {(): 0}
        self._last_of: dict[int, tuple[list[Any], int]] = {}
        """By its innermost frame, the stack that was seen last: to compare with that one is thrice as fast."""
        self._stand_ins: list[list[int]] = [[]]

    def places(self, lists: list[Any], *, empties: bool) -> list[int]:
        """The place of each stack. `empties`: whether long lists of frames give way to a stand-in, which tells the same
        where the list comes again. What is no list has a place of its own."""
        if not {*map(type, lists)} <= {list, tuple}:
            if empties:
                raise Odd
            return [self._of_any(frames) for frames in lists]
        places: list[int] = []
        before, place, last_of = None, 0, self._last_of
        for frames in lists:
            if frames is not before:  # the two events of a free share theirs
                before = frames
                last = last_of.get(id(frames[0])) if frames else _NO_FRAMES
                place = last[1] if last and (last[0] == frames or not frames) else self._place(frames)
                if empties and len(frames) > _SHORT:
                    frames[:] = self._stand_ins[place]
            places.append(place)
        return places

    def _of_any(self, frames: Any) -> int:
        if isinstance(frames, list | tuple):
            return self.places([cast("list[Any]", frames)], empties=False)[0]
        self.stacks.append(frames)
        self._stand_ins.append([])
        return len(self.stacks) - 1

    def _place(self, frames: list[Any] | tuple[Any, ...]) -> int:
        """The place of a stack that has frames."""
        key, new = tuple(map(id, frames)), len(self.stacks)
        place = self._place_of.setdefault(key, new)
        if place == new:
            stand_in = [-(1 << 40) - place]  # its number is an object of its own, and no frame
            self.stacks.append([*frames])
            self._stand_ins.append(stand_in)
            self._last_of[id(stand_in[0])] = stand_in, place
        self._last_of[key[0]] = self.stacks[place], place
        return place

    def put_back(self, frames: Any) -> None:
        """Fill a list that may have been emptied, for it can also belong to a block."""
        if type(frames) is not list:
            return
        emptied = cast("list[Any]", frames)
        if len(emptied) == 1 and type(emptied[0]) is int:
            emptied[:] = self.stacks[self._last_of.get(id(emptied[0]), _NO_FRAMES)[1]] or emptied


class Columns:
    """Events of one device by column: numbers as they are; texts, pools and stacks as places among those that differ.

    To an unpickler it is the list that it appends dicts to.
    """

    WORDS, TEXTS = ("addr", "size", "stream", "time_us"), ("action", "user_metadata")
    __slots__ = ("device_free", "places", "pools", "stacks", "texts", "words")

    def __init__(self, stacks: StackPlaces) -> None:
        self.words: dict[str, array[int]] = {name: array("q") for name in self.WORDS}
        self.places: dict[str, array[int]] = {name: array("i") for name in (*self.TEXTS, "pool_id", "frames")}
        self.texts = {name: _Places(str) for name in self.TEXTS}
        self.pools = _Places(tuple)
        self.pools[None] = 0
        self.device_free: dict[int, int] = {}
        """What the driver had left, by the events that say so, from the first batch with one of the kind `oom` on."""
        self.stacks = stacks

    def __len__(self) -> int:
        return len(self.words["addr"])

    def __setstate__(self, state: object) -> NoReturn:
        raise Odd

    def append(self, event: Any) -> None:
        self.extend([event])

    def extend(self, events: list[Any]) -> None:
        """Keep the figures of dicts, and empty them. Raises Odd, or what Python does, for others."""
        self.take(events, itemgetter, empties=True)
        for event in events:
            event.clear()

    def take(self, events: list[Any], getter: Callable[[str], Callable[[Any], Any]], *, empties: bool = False) -> None:
        """Keep the figures of events, whose fields such getters read."""

        def values(name: str, default: object) -> list[Any]:
            try:
                return list(map(getter(name), events))
            except KeyError:  # versions differ in what they write
                return [event.get(name, default) for event in events]

        before = len(self)
        for name, column in self.words.items():
            column.extend(array("q", values(name, 0)))
        for name, distinct in self.texts.items():
            texts = values(name, None if name == "action" else "")
            self.places[name].extend(array("i", list(map(distinct.__getitem__, texts))))
        pools = values("pool_id", None)
        places = list(map(self.pools.__getitem__, pools)) if any(pools) else [0] * len(pools)
        self.places["pool_id"].extend(array("i", places))
        self.places["frames"].extend(array("i", self.stacks.places(values("frames", ()), empties=empties)))
        if "oom" in self.texts["action"]:
            told = {at: free for at, free in enumerate(values("device_free", 0), start=before) if free}
            if {*map(type, told.values())} - {int}:
                raise Odd
            self.device_free.update(told)

    def check(self) -> None:
        """Raise Odd where a figure is negative or so large that only a full check tells whether it may be."""
        unsigned = [self.words[name].tobytes()[7::8] for name in ("addr", "size", "time_us")]
        fits = all(not highest.translate(None, _BELOW_2_TO_62) for highest in unsigned)
        pools = [pool for pool in self.pools if pool is not None]
        fits &= all(len(pool) == 2 and {*map(type, pool)} == {int} and array("q", pool) for pool in pools)
        if not fits or any(not 0 <= free < 1 << 62 for free in self.device_free.values()):
            raise Odd

    def distinct(self) -> dict[str, Any]:
        """All but the columns, as plain data."""
        texts = {name: [*values] for name, values in self.texts.items()}
        return {"texts": texts, "pools": [*self.pools], "device_free": self.device_free, "events": len(self)}

    @property
    def arrays(self) -> "list[array[int]]":
        return [*self.words.values(), *self.places.values()]

    @classmethod
    def read(cls, distinct: dict[str, Any], stacks: StackPlaces, stream: IO[bytes]) -> "Columns":
        """What `distinct` said, and the columns from a stream."""
        columns = cls(stacks)
        for name, values in distinct["texts"].items():
            columns.texts[name].update({value: i for i, value in enumerate(values)})
        columns.pools.update({pool: i for i, pool in enumerate(distinct["pools"])})
        columns.device_free = distinct["device_free"]
        for column in columns.arrays:
            column.frombytes(stream.read(distinct["events"] * column.itemsize))
        return columns


class _ColumnsUnpickler(_PlainUnpickler):
    """Where a secret word stands for a list, it makes Columns; whatever else a pickle asks for is refused as ever."""

    def __init__(self, stream: BinaryIO) -> None:
        self._word, self._stacks = os.urandom(16).hex(), StackPlaces()
        planted = io.BufferedReader(_Chunks(self._planted(stream)), _BUFFER_BYTES)
        super().__init__(planted)

    def persistent_load(self, pid: object, /) -> Any:
        return Columns(self._stacks) if type(pid) is str and pid == self._word else super().persistent_load(pid)

    def _planted(self, stream: BinaryIO) -> Iterator[bytes]:
        """The pickle with the word in place of the instructions that make the lists of events."""
        held = b""
        while chunk := stream.read(_BUFFER_BYTES):
            held += chunk
            found = _DEVICES.search(held)
            if found and len(held) - found.start() >= _ENOUGH_BYTES:
                instruction = b"\x8c" + bytes([len(self._word)]) + self._word.encode() + b"Q"
                yield held[: found.start()] + found[0].replace(b"]", instruction) + held[found.end() :]
                yield from iter(lambda: stream.read(_BUFFER_BYTES), b"")
                return
            at = max(0, len(held) - _ENOUGH_BYTES) if not found else 0
            yield held[:at]
            held = held[at:]
        yield held

    def content(self) -> dict[str, Any]:
        """What a snapshot holds, with Columns for all its events. Raises Odd where it is none."""
        content = self.load()
        fields = cast("dict[str, Any]", content) if type(content) is dict else {}
        traces = fields.get("device_traces")
        if type(traces) is not list:
            raise Odd
        traces = cast("list[Any]", traces)
        for i, trace in enumerate(traces):
            if type(trace) is not Columns:
                traces[i] = Columns(self._stacks)
                for at in range(0, len(trace), _BATCH):
                    traces[i].extend(trace[at : at + _BATCH])
            traces[i].check()
        for segments in (fields.get("segments", []), fields.get("segments_before", [])):
            for segment in segments:
                for holder in (segment, *segment.get("blocks", [])):
                    self._stacks.put_back(holder.get("frames"))
        return {**fields, "device_traces": traces, "stacks": self._stacks.stacks}


class _Chunks(io.RawIOBase):
    """A stream of the bytes of an iterator."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._left = chunks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._left:
            try:
                self._left = next(self._chunks)
            except StopIteration:
                return 0
        view = memoryview(buffer)
        count = min(len(view), len(self._left))
        view[:count], self._left = self._left[:count], self._left[count:]
        return count


class _TooLong(Exception):
    """Raised where a pickle has more bytes than any snapshot."""


class _Bounded(io.RawIOBase):
    """A stream that ends in an exception after so many bytes, or where what was made of them takes too much memory."""

    def __init__(self, stream: BinaryIO | gzip.GzipFile, most: int) -> None:
        self._stream, self._most, self._read = stream, most, 0
        self._memory_before = _memory_held()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """`buffer` is writable memory, for which Python 3.11 has no type."""
        view = memoryview(buffer)
        data = self._stream.read(len(view))
        self._read += len(data)
        if self._read > self._most:
            raise _TooLong
        if _memory_held() - self._memory_before > _ROOM_BYTES + _ROOM_PER_BYTE * self._read:
            raise MemoryError
        view[: len(data)] = data
        return len(data)


def read_plain_pickle(path: Path) -> object:
    """The object that a pickle holds, gzipped or not, made of dicts, lists, tuples, texts and numbers alone.

    Raises InputError, in one line with the file, for a pickle that asks for anything else (nothing of it has run
    then), that is cut short or broken, or that takes more bytes, memory or time than a snapshot of its size can.
    """
    _read_apart(path, "check")
    return _load(path)


def read_with_columns(path: Path) -> object:
    """What a snapshot's file holds; where it can be, with Columns in place of the lists of events (`device_traces`)."""
    content = _read_apart(path, "columns")
    return _load(path) if content is None else content


def _read_apart(path: Path, what: str) -> object:
    """What a process of its own makes of the file, which is ended after so many seconds of work; None where it has only
    read it to the end."""
    try:
        check_regular(path)
        size = path.stat().st_size
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or one_line(error)}") from None
    seconds = _LEAST_SECONDS + _most_bytes(path, size) // _BYTES_PER_SECOND
    command = [sys.executable, "-P", "-m", __name__, str(path.absolute()), str(path), str(seconds), what]
    null = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=null, stdout=subprocess.PIPE, stderr=null) as process:
        assert process.stdout
        try:
            said = _handed_over(process.stdout)
        except BaseException:
            process.kill()
            raise
    if process.returncode == EXIT_WRONG_INPUT:
        raise InputError(str(said))
    if process.returncode == -signal.SIGXCPU:
        raise InputError(f"{path}: refused: reading it takes longer than a snapshot of its size can ({seconds} s)")
    if process.returncode != EXIT_DONE:
        raise InputError(f"{path}: refused: reading it ends the process that tries (code {process.returncode})")
    return said


def _handed_over(stream: IO[bytes]) -> object:
    """What `_hand_over` wrote: what a snapshot holds, a message, or None."""
    try:
        with without_collector():
            said = _PlainUnpickler(stream).load()
            if type(said) is not dict:
                return said
            content, stacks = cast("dict[str, Any]", said), StackPlaces()
            stacks.stacks = content.pop("stacks")
            content["device_traces"] = [Columns.read(each, stacks, stream) for each in content["device_traces"]]
    except (*_FAULTS, _Refused):  # its exit code says what happened
        return None
    return content


def _hand_over(content: dict[str, Any] | str | None) -> None:
    """Write it for `_handed_over`. Raises RecursionError, having written nothing, where it nests too deeply."""
    traces: list[Columns] = content["device_traces"] if isinstance(content, dict) else []
    plain = {**content, "device_traces": [each.distinct() for each in traces]} if isinstance(content, dict) else content
    text, stream = pickle.dumps(plain, protocol=5), sys.stdout.buffer
    stream.write(text)
    for columns in traces:
        for column in columns.arrays:
            column.tofile(stream)


def main() -> int:
    """Read the pickle in argv[1] within the limits, for `_read_apart`, and hand over what is in it, or wrong."""
    import resource  # noqa: PLC0415 - not on every system

    path, named, seconds, what = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    code = EXIT_DONE
    try:
        with _bounded_memory(_ROOM_BYTES + _ROOM_PER_BYTE * _most_bytes(path, path.stat().st_size)):
            _read_and_hand_over(path, named, what)
    except InputError as error:
        _hand_over(str(error).encode(errors="replace").decode())
        code = EXIT_WRONG_INPUT
    sys.stdout.flush()
    os._exit(code)  # what was read is not taken apart object by object


def _read_and_hand_over(path: Path, named: str, what: str) -> None:
    if what == "columns":
        # What goes wrong on the way with columns is told as the plain way tells it.
        with contextlib.suppress(Odd, InputError, *_FAULTS, MemoryError):
            return _hand_over(
                cast("dict[str, Any]", _load(path, named, lambda stream: _ColumnsUnpickler(stream).content()))
            )
    _load(path, named)
    return _hand_over(None)


def _most_bytes(path: Path, size: int) -> int:
    """Bytes that a pickle of this size on disk may unpack to."""
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP
    return min(LARGEST_BYTES, _GZIP_LEAST + size * _GZIP_MOST) if packed else min(LARGEST_BYTES, size)


def _plainly(stream: BinaryIO) -> object:
    return _PlainUnpickler(stream).load()


def _load(path: Path, named: str | None = None, load: Callable[[BinaryIO], object] = _plainly) -> object:
    """The object, read in this process. `named`: what messages name, where it is not the path."""
    name = named or str(path)
    most = LARGEST_BYTES
    try:
        most = _most_bytes(path, path.stat().st_size)
        with path.open("rb") as file:
            head = file.read(2)
            file.seek(0)
            packed = head == _GZIP
            if not head:
                raise InputError(f"{name}: the file is empty")
            with gzip.GzipFile(fileobj=file) if packed else contextlib.nullcontext(file) as stream:
                reader = io.BufferedReader(_Bounded(stream, most), _BUFFER_BYTES)
                with without_collector():
                    return load(reader)
    except _Refused as refused:
        refused_name = one_line(refused, _LONGEST_NAME)
        raise InputError(
            f"{name}: refused, for it is no plain data: it asks for {refused_name}; nothing of it was run. "
            "A snapshot of torch.cuda.memory._dump_snapshot() asks for nothing"
        ) from None
    except _TooLong:
        raise InputError(
            f"{name}: unpacks to more than {format_bytes(most)}, which no snapshot of its size that can be read does"
        ) from None
    except MemoryError:
        raise InputError(f"{name}: reading it takes more memory than a snapshot of its size can need") from None
    except gzip.BadGzipFile as fault:
        raise InputError(f"{name}: broken gzip: {one_line(fault)}") from None
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or one_line(error)}") from None
    except _FAULTS as fault:
        raise InputError(f"{name}: no memory snapshot: broken, cut short or no pickle ({one_line(fault)})") from None


@contextlib.contextmanager
def without_collector() -> Generator[None]:
    """A million new containers would have the collector search them again and again: half of the time of reading."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _memory_held() -> int:
    """Bytes of memory that this process has now; 0 where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@contextlib.contextmanager
def _bounded_memory(growth: int) -> Generator[None]:
    """Inside, this process may grow by so many bytes, where the system can say so: a few bytes of a hostile pickle
    can ask for a table of 64 GiB."""
    try:
        import resource  # noqa: PLC0415 - not on every system

        held = int(_STATM.read_text().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    except (ImportError, OSError):
        yield
        return
    limits = [limit for limit in (soft, hard, held + growth) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


if __name__ == "__main__":
    sys.exit(main())
