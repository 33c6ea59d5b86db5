"""Files and directories that a user names or that caches lie in, read within bounds."""

import contextlib
import os
import stat
from pathlib import Path

from stepscope.core.errors import InputError
from stepscope.core.units import MIB, format_bytes

LARGEST_DOCUMENT_BYTES = 64 * MIB
"""The largest file that is loaded whole: a run, an answer, a report. Those that stepscope writes have a few MiB.

Captures and snapshots are read as streams and have bounds of their own.
"""


def read_document(path: Path, most: int = LARGEST_DOCUMENT_BYTES) -> bytes:
    """The bytes of a regular file of at most `most` bytes.

    Raises InputError for a pipe, a device, a directory or a larger file, and OSError where it cannot be opened or read.
    """
    check_regular(path)
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise InputError(
            f"{path} is larger than {format_bytes(most)}, and stepscope writes no such file: check which file you meant"
        )
    return data


def check_regular(path: Path) -> None:
    """Raises InputError unless the path is a regular file or a link to one, and OSError where there is nothing."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        is_directory = stat.S_ISDIR(mode)
        what = "a directory, not a file" if is_directory else "a pipe or device, not a file: write it to a file first"
        raise InputError(f"cannot read {path}: it is {what}")


_POINTER = b"version https://git-lfs.github.com/spec/"


def check_no_pointer(path: Path, head: bytes) -> None:
    """Raises InputError where a file that begins with `head` is what Git LFS left in the place of a file."""
    if head.startswith(_POINTER):
        raise InputError(f"{path}: this is a Git LFS pointer, not the file: git lfs pull")


def read_named(path: Path) -> bytes:
    """A file that the user named. Raises InputError where it cannot be read."""
    try:
        return read_document(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


# The directory of caches, which keeps what was measured of this machine for later runs.


def home_directory() -> Path | None:
    """The user's home; None where there is no HOME and the user id has no account, as in many containers."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def cache_directory() -> Path | None:
    """$STEPSCOPE_CACHE, or stepscope/ in the user's directory of caches. It need not exist; None without a home."""
    if named := os.environ.get("STEPSCOPE_CACHE"):
        return Path(named)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches, "stepscope")
    home = home_directory()
    return home / ".cache/stepscope" if home else None


def replace_file(path: Path | None, content: bytes) -> bool:
    """Write the file in one step, so that nobody reads half of it. False where there is no place to keep it."""
    if path is None:
        return False
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        return False
    return True
