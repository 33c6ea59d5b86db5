"""Reads a pickle that holds plain data, and refuses every other before anything of it runs.

A pickle is a program. The few of its instructions that reach out of it (GLOBAL, STACK_GLOBAL, INST, EXT, persistent
ids) all ask the unpickler to find a name; here that is refused, with the name. Without a callable from outside, the
instructions that call (REDUCE, OBJ, NEWOBJ, BUILD) find only numbers, texts and containers to call, and fail.

What is left is work without end: 434 bytes of tuples that hold each other twice, as a key, have the unpickler hash for
years, and nothing in this process could stop it. So a process of its own reads the file first, within limits of time
and memory; only what it has read to the end is read here. The loading takes a third of what explaining it takes.
"""

import contextlib
import gc
import gzip
import io
import os
import pickle
import signal
import subprocess
import sys
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

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
    try:
        check_regular(path)
        size = path.stat().st_size
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or one_line(error)}") from None
    seconds = _LEAST_SECONDS + _most_bytes(path, size) // _BYTES_PER_SECOND
    # First in a process that is ended after so many seconds of work, and says what is wrong.
    command = [sys.executable, "-P", "-m", __name__, str(path.absolute()), str(path), str(seconds)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode == EXIT_WRONG_INPUT:
        raise InputError(done.stdout.decode(errors="replace"))
    if done.returncode == -signal.SIGXCPU:
        raise InputError(f"{path}: refused: reading it takes longer than a snapshot of its size can ({seconds} s)")
    if done.returncode != EXIT_DONE:
        raise InputError(f"{path}: refused: reading it ends the process that tries (code {done.returncode})")
    return _load(path)


def main() -> int:
    """Read the pickle in argv[1] within the limits, for `read_plain_pickle`. What is wrong with it goes to stdout."""
    import resource  # noqa: PLC0415 - not on every system

    path, named, seconds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with _bounded_memory(_ROOM_BYTES + _ROOM_PER_BYTE * _most_bytes(path, path.stat().st_size)):
            _load(path, named)
    except InputError as error:
        sys.stdout.buffer.write(str(error).encode(errors="replace"))
        code = EXIT_WRONG_INPUT
    else:
        code = EXIT_DONE
    sys.stdout.flush()
    os._exit(code)  # what was read is not taken apart object by object


def _most_bytes(path: Path, size: int) -> int:
    """Bytes that a pickle of this size on disk may unpack to."""
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP
    return min(LARGEST_BYTES, _GZIP_LEAST + size * _GZIP_MOST) if packed else min(LARGEST_BYTES, size)


def _load(path: Path, named: str | None = None) -> object:
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
                    return _PlainUnpickler(reader).load()
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
