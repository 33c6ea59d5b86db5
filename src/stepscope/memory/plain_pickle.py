"""Reads a pickle that holds plain data, and refuses every other before anything of it runs.

A pickle is a program. The few of its instructions that reach out of it (GLOBAL, STACK_GLOBAL, INST, EXT, persistent
ids) all ask the unpickler to find a name; here that is refused, with the name. Without a callable from outside, the
instructions that call (REDUCE, OBJ, NEWOBJ, BUILD) find only numbers, texts and containers to call, and fail.
"""

import contextlib
import gc
import gzip
import io
import pickle
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from stepscope.core.errors import InputError, one_line
from stepscope.core.units import GIB, format_bytes

LARGEST_BYTES = 16 * GIB
"""Most that is read of one pickle, unpacked: some thirty million events with deep stacks."""
_GZIP = b"\x1f\x8b"
_GZIP_USUAL = 100
"""Bytes that gzip makes of one: of snapshots some 45, and up to 1032 of what is made for it."""
_ROOM_BYTES = 4 * GIB
_ROOM_PER_BYTE = 24
"""Memory that reading may take: plain data in Python takes at most some ten times its pickle."""
_BUFFER_BYTES = 1 << 20
_LONGEST_NAME = 100

_FAULTS = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, KeyError, IndexError, OverflowError,
    RecursionError, SystemError, zlib.error,
)  # fmt: skip
"""What the standard library's unpickler raises for instructions that make no sense, as its documentation warns."""


class _Refused(Exception):
    """The pickle asked for something outside itself."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise _Refused(f"{module_name}.{global_name}")

    def persistent_load(self, pid: object, /) -> NoReturn:
        raise _Refused(f"the persistent object {pid!r}")


class _TooLong(Exception):
    """More bytes than a snapshot has."""


class _Bounded(io.RawIOBase):
    """A stream that ends in an exception after so many bytes: a gzip bomb is told from a file."""

    def __init__(self, stream: BinaryIO | gzip.GzipFile, most: int) -> None:
        self._stream, self._left = stream, most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """`buffer` is writable memory, for which Python 3.11 has no type."""
        view = memoryview(buffer)
        data = self._stream.read(len(view))
        self._left -= len(data)
        if self._left < 0:
            raise _TooLong
        view[: len(data)] = data
        return len(data)


def read_plain_pickle(path: Path) -> object:
    """The object that a pickle holds, gzipped or not, made of dicts, lists, tuples, texts and numbers alone.

    Raises InputError, in one line with the file, for a pickle that asks for anything else (nothing of it has run
    then), that is cut short or broken, or that is larger than LARGEST_BYTES.
    """
    try:
        if not path.is_file():
            raise InputError(f"{path}: {'a pipe or device, not a file' if path.exists() else 'no such file'}")
        with path.open("rb") as file:
            head = file.read(2)
            file.seek(0)
            packed = head == _GZIP
            if not head:
                raise InputError(f"{path}: the file is empty")
            size = path.stat().st_size
            most = min(LARGEST_BYTES, size * _GZIP_USUAL if packed else size)
            with gzip.GzipFile(fileobj=file) if packed else contextlib.nullcontext(file) as stream:
                reader = io.BufferedReader(_Bounded(stream, LARGEST_BYTES), _BUFFER_BYTES)
                with without_collector(), _bounded_memory(_ROOM_BYTES + _ROOM_PER_BYTE * most):
                    return _PlainUnpickler(reader).load()
    except _Refused as refused:
        name = one_line(refused, _LONGEST_NAME)
        raise InputError(
            f"{path}: refused, for it is no plain data: it asks for {name}; nothing of it was run. "
            "A snapshot of torch.cuda.memory._dump_snapshot() asks for nothing"
        ) from None
    except _TooLong:
        raise InputError(
            f"{path}: unpacks to more than {format_bytes(LARGEST_BYTES)}, which no snapshot that can be read does"
        ) from None
    except MemoryError:
        raise InputError(f"{path}: reading it takes more memory than a snapshot of its size can need") from None
    except gzip.BadGzipFile as fault:
        raise InputError(f"{path}: broken gzip: {one_line(fault)}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or one_line(error)}") from None
    except _FAULTS as fault:
        raise InputError(f"{path}: no memory snapshot: broken, cut short or no pickle ({one_line(fault)})") from None


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """A million new containers would have the collector search them again and again: half of the time of reading."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def _bounded_memory(growth: int) -> Iterator[None]:
    """Inside, this process may grow by so many bytes, where the system can say so: a few bytes of a hostile pickle
    can ask for a table of 64 GiB."""
    try:
        import resource  # noqa: PLC0415 - not on every system

        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
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
