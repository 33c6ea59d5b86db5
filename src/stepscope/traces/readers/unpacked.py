"""An SQLite export that gzip compressed, unpacked into a temporary file: SQLite reads pages in any order."""

import gzip
import shutil
import tempfile
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from stepscope.core.errors import InputError, one_line
from stepscope.core.units import format_bytes
from stepscope.traces.readers.json_events import is_bomb

SQLITE = b"SQLite format 3\x00"
"""How an SQLite database begins."""
_BLOCK_BYTES = 4 << 20
_KEPT_FREE_BYTES = 64 << 20
_BROKEN = (OSError, EOFError, zlib.error)


def holds_sqlite(path: Path, head: bytes) -> bool:
    """Whether a file that begins with `head` is an SQLite database in gzip."""
    if not head.startswith(b"\x1f\x8b"):
        return False
    try:
        with gzip.open(path) as file:
            return file.read(len(SQLITE)) == SQLITE
    except _BROKEN:
        return False  # the reader of JSON says what is wrong with it


@contextmanager
def unpacked(path: Path) -> Generator[Path]:
    """The unpacked file, which is deleted at the end. Raises InputError where it is damaged or takes too much room."""
    with tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
        target = Path(folder, "capture.sqlite")
        packed_bytes, written = path.stat().st_size, 0
        with gzip.open(path) as source, target.open("wb") as out:
            while block := _block(path, source, written):
                written += len(block)
                if is_bomb(packed_bytes, written):
                    raise InputError(
                        f"{path}: {packed_bytes} bytes that decompress to more than {written} are no export: "
                        "refused as a decompression bomb; if it is an export, unpack it first"
                    )
                free = shutil.disk_usage(folder).free
                if free < len(block) + _KEPT_FREE_BYTES:
                    raise InputError(
                        f"{path}: unpacked it takes more than {format_bytes(written)}, and {folder} has no room for "
                        "it: unpack it elsewhere, as with gunzip, or set TMPDIR"
                    )
                out.write(block)
        yield target


def _block(path: Path, source: gzip.GzipFile, written: int) -> bytes:
    try:
        return source.read(_BLOCK_BYTES)
    except EOFError:
        raise InputError(
            f"{path}: the gzip file is truncated after {written} bytes of content; copy or export it again"
        ) from None
    except (OSError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read: {one_line(error)}") from None
