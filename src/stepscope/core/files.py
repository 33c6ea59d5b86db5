"""Files and directories that a user names or that caches lie in, read within bounds."""

import ast
import contextlib
import importlib.util
import itertools
import os
import re
import stat
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from stepscope.core.errors import InputError, install_places, one_line
from stepscope.core.units import MIB, format_bytes

T = TypeVar("T", bound=msgspec.Struct)

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
        wanted = min(os.fstat(file.fileno()).st_size, most) + 1
        data = file.read(wanted)  # to ask for the most would take as much memory each time
        if len(data) == wanted <= most:  # it grew, or has no size, as those of /proc
            data += file.read(most + 1 - wanted)
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


def cache_file(kind: str, device_name: str, build: str) -> Path | None:
    """The file of caches for what was measured of a device under one build of a package; None without a home."""
    caches = cache_directory()
    return caches / f"{kind}-{re.sub('[^A-Za-z0-9.+-]+', '_', f'{device_name}-{build}')}.json" if caches else None


def read_cached(path: Path | None, what: type[T]) -> T | None:
    """What a file of caches holds; None where there is nothing that can be read: then it is measured again."""
    try:
        return msgspec.json.decode(read_document(path), type=what) if path else None
    except (InputError, OSError, ValueError, RecursionError):
        return None


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


# JSON documents that stepscope writes and reads again: one codec, which checks them and names where they came from.


def json_document(value: object) -> str:
    """A value as one JSON document, indented for people."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n"


def decode_document(
    data: bytes, what: type[T], source: str, *, holds: str, newest: int | None = None, again: str = "with --json"
) -> T:
    """The value in a document. Raises InputError that names the source: it is empty, it does not hold what it should
    (`holds` says what), or its `version` is above the newest that this stepscope reads. `again`: how it is written.
    """
    if not data:
        raise InputError(
            f"{source} is empty: the command that was writing it ended before it was done; write it again {again}"
        )
    try:
        document = msgspec.json.decode(data, type=what)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InputError) as error:
        raise InputError(f"{source} holds no {holds}: {one_line(error)}") from error
    version = getattr(document, "version", 1)
    if version < 1:
        raise InputError(f"{source} is of version {version}, which does not exist: it holds no {holds}")
    if newest is not None and version > newest:
        raise InputError(f"{source} is of version {version}: this stepscope reads up to {newest}")
    return document


# What the digests of an experiment are made of: a field that comes later must not change the key of a stored one.


def identity_of(record: msgspec.Struct, first_fields: Collection[str]) -> dict[str, object]:
    """The fields of a record by name, records inside it left as they are.

    first_fields: those that stood when the first results were stored. They always count. A field that came later
    counts where it differs from its default.
    """
    return {
        field.name: value
        for field in msgspec.structs.fields(record)
        if (value := getattr(record, field.name)) != field.default or field.name in first_fields
    }


# A user's code, found and told apart by its content without running it.


def sha256_of(content: bytes) -> str:
    """The SHA-256 of the content, in hexadecimal digits."""
    import hashlib  # noqa: PLC0415  (it loads OpenSSL)

    return hashlib.sha256(content).hexdigest()


def code_digest(file: Path) -> str:
    """A digest of a file of code; empty where it cannot be read."""
    try:
        return sha256_of(file.read_bytes())[:16]
    except OSError:
        return ""


def digest_with_imports(file: Path) -> str:
    """A digest of a file of code and of the user's files that it imports; that of the file where it imports none."""
    files = files_imported(file)
    if not files:
        return code_digest(file)
    return sha256_of("".join(sorted(map(code_digest, (file, *files)))).encode())[:16]


def files_imported(file: Path) -> list[Path]:
    """The files of the user's that a file imports, and those that these import. They are found by its text, beside it,
    in the current directory or in its package, and nothing runs."""
    found, waiting = dict[Path, None](), [file.absolute()]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found[one] = None
            waiting += _imported(one)
    return [*found][1:]


def _imported(file: Path) -> Iterator[Path]:
    """The files of the user's that a file imports, as its text says."""
    if str(file).startswith(install_places()):
        return
    try:
        statements = [*ast.walk(ast.parse(file.read_bytes()))]
    except (OSError, SyntaxError, ValueError, RecursionError):  # who runs it says so
        return
    top = next(folder for folder in file.parents if not (folder / "__init__.py").exists())
    for one in statements:
        if isinstance(one, ast.Import):
            names, places = [each.name for each in one.names], [file.parent, top, Path.cwd()]
        elif isinstance(one, ast.ImportFrom):
            module = one.module or ""
            names = [module, *(f"{module}.{each.name}".strip(".") for each in one.names)]
            places = [file.parents[one.level - 1]] if 0 < one.level <= len(file.parents) else []
            places = [file.parent, top, Path.cwd()] if one.level == 0 else places
        else:
            continue
        for place, name in itertools.product(places, filter(None, names)):
            beside = place.joinpath(*name.split("."))
            yield from (each for each in (beside.with_suffix(".py"), beside / "__init__.py") if each.is_file())


def code_file(place: str) -> Path | None:
    """The file of `path/file.py` or `package.module`; None where it cannot be found without importing it."""
    if place.endswith((".py", ".json")):
        return Path(place)
    # Only the top of a package is looked up: finding what is inside would import it.
    top, _, inside = place.partition(".")
    if not top:
        return None
    sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    finally:
        sys.path.pop(0)
    if spec is None or spec.origin is None:
        return None
    home = Path(spec.origin)
    parts = inside.split(".") if inside else []
    beside = home.parent.joinpath(*parts) if parts else None
    candidates = [beside.with_suffix(".py"), beside / "__init__.py"] if beside else [home]
    return next((file for file in candidates if file.is_file()), None)
