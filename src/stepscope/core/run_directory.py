"""Runs on disk: `<out>/<time>-<key>/run.json`, written so that a reader never sees half a file."""

import contextlib
import errno
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import msgspec

from stepscope import __version__
from stepscope.core.errors import InputError, StepscopeError, one_line
from stepscope.core.files import read_document
from stepscope.core.run import SCHEMA_VERSION, Run, instant_of
from stepscope.core.workloads import Workload, with_kind

# The names of the files in a run directory, and of those beside it.


RUN_FILE = "run.json"
FORECASTS_FILE = "forecasts.jsonl"
"""Beside run directories: what was foretold of workloads, a line each."""
INDEX_FILE = ".stepscope-index"
"""Beside run directories, where they are many: what is known of them (runs/index.py). It may be deleted."""
FAILURE_FILE = "failure.txt"
"""The traceback of what ended the run."""
MEMORY_FILE = "memory.pickle.gz"
KINETO_FILE = "trace.kineto.json.gz"
REPORT_FILE, STREAM_FILE, EXPORT_FILE = "trace.nsys-rep", "trace.qdstrm", "trace.nsys.sqlite"
"""Files of a trace by nsys: its report, the stream that awaits its import, and the export that is read."""
CAPTURE_FILES = (KINETO_FILE, EXPORT_FILE, REPORT_FILE, STREAM_FILE)
"""Files that hold a trace, the quickest to read first."""
RANK_FOLDER = "rank-{rank}"
"""What a rank that does not write the run recorded by itself."""
DIGEST_FILE = "trace-{tool}.json"
"""The file of a trace's digest, by the tool that took the trace."""
SEARCH_FOLDER = "tune-{key}"
"""Beside run directories, by the key of the workload that `tune` began with: the runs of its search. They are found
where this folder is named."""
SEARCH_FOLDERS = re.compile(r"tune-.*[0-9a-f]{8}")
"""The names of such folders."""


_DECODER = msgspec.json.Decoder(Run)
"""Reads a run as it is written today; those stored earlier, and what is none, are looked at more closely."""


def create_run_directory(out: Path, workload: Workload, now: datetime | None = None) -> Path:
    """Make `<out>/<time>-<key>` before anything is measured, so that an unwritable place is known at once."""
    moment = now or datetime.now(UTC)
    try:
        out.mkdir(parents=True, exist_ok=True)
        while True:
            directory = out / f"{moment.strftime('%Y%m%dT%H%M%S.%f')[:-3]}-{workload.key}"
            try:
                directory.mkdir()
                return directory
            except FileExistsError:  # another run of this workload began in the same millisecond
                moment += timedelta(milliseconds=1)
    except OSError as error:
        raise InputError(
            f"cannot write runs to {out}: {error.strerror or error}; choose another place with --runs"
        ) from error


def encode_run(run: Run) -> bytes:
    """The JSON of a run, indented for people."""
    return msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n"


class RescuedRun(StepscopeError):
    """A run that could not be written where it belongs. directory: the one that holds it; None where it was printed."""

    def __init__(self, message: str, directory: Path | None = None) -> None:
        super().__init__(message)
        self.directory = directory


def save_run(run: Run, directory: Path, *, rescue: bool = True) -> Path:
    """Write run.json atomically. If the disk refuses, the run goes to a private temporary folder, or at last to stderr.

    Raises RescuedRun (exit 2) that names where the measurement went; nothing measured is lost. Without `rescue`,
    for a run that holds no measurement yet, raises InputError.
    """
    data = encode_run(run)
    target = directory / RUN_FILE
    try:
        write_atomically(data, target)
        return target
    except OSError as error:
        reason = f"cannot write {target}: {error.strerror or error}"
    if not rescue:
        raise InputError(f"{reason}; choose another place with --runs")
    try:
        refuge = _write_in_a_private_folder(data)
    except OSError:
        sys.stderr.write(data.decode())
        raise RescuedRun(f"{reason}; no temporary file could be written either, so the run stands above") from None
    raise RescuedRun(f"{reason}; the run was saved as {refuge}", refuge.parent)


def _write_in_a_private_folder(data: bytes) -> Path:
    """Write run.json where only this user reads and no name was known beforehand: others write to /tmp too."""
    folder = Path(tempfile.mkdtemp(prefix="stepscope-"))
    try:
        write_atomically(data, folder / RUN_FILE)
    except OSError:
        folder.rmdir()
        raise
    return folder / RUN_FILE


_ABSURD = re.compile(rb"[:\[,\s]-?(\d{30,})(?=[\s,\]}])")
"""An integer that counts nothing in a run, and that no float holds from 309 digits on."""
_LONG, _DIGITS = b"0" * 30, bytes(ord("0") if chr(byte).isdigit() and byte < 128 else ord(" ") for byte in range(256))
"""So many digits, and what makes each digit a 0 and all else a space: looked for so, it takes a tenth as long."""


def load_run(path: Path) -> Run:
    """Read a run from its directory or its run.json. Raises InputError naming the file and the fault."""
    file = path / RUN_FILE if path.is_dir() else path
    try:
        data = read_document(file)
    except FileNotFoundError:
        raise InputError(f"no run at {path}: expected a directory with {RUN_FILE}, or such a file") from None
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}") from error
    if _LONG in data.translate(_DIGITS) and (absurd := _ABSURD.search(data)):
        raise InputError(f"{file} is damaged: it holds a number of {len(absurd[1])} digits")
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError, InputError):
        run = _DECODER.decode(data)
        if run.schema_version == SCHEMA_VERSION:
            return run
    try:
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        version = msgspec.json.decode(fields.get("schema_version", b"null"), type=int)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{file} is no run, or was cut short ({len(data)} bytes): {one_line(error)}") from error
    if version != SCHEMA_VERSION:
        raise InputError(
            f"{file} has schema version {version}; this stepscope reads version {SCHEMA_VERSION}: "
            f"{'upgrade stepscope' if version > SCHEMA_VERSION else 'measure it again'}"
        )
    try:
        if "workload" in fields:
            fields["workload"] = msgspec.Raw(with_kind(bytes(fields["workload"])))
        return msgspec.json.decode(msgspec.json.encode(fields), type=Run)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InputError) as error:
        raise InputError(f"{file} does not hold a run: {one_line(error)}") from error


def find_run_files(place: Path) -> Iterator[Path]:
    """run.json files of a run directory, of a directory of runs, or of a tree of them, oldest first by name.

    Sweeps make and remove directories meanwhile: what vanishes under way is left out, and so are folders of searches.
    """
    if place.is_file():
        yield place
    elif (place / RUN_FILE).is_file():
        yield place / RUN_FILE
    else:
        run_files: list[Path] = []
        for folder, inside, files in os.walk(place):
            if RUN_FILE in {*inside, *files}:
                run_files.append(Path(folder, RUN_FILE))
            inside[:] = [name for name in inside if not SEARCH_FOLDERS.fullmatch(name)]
        yield from sorted(run_files, key=lambda file: (file.parent.name, str(file)))


def load_runs(places: list[Path]) -> tuple[list[Run], list[str]]:
    """Every readable run under the given places, oldest first, and one line for each that is not readable.

    Raises InputError when a place does not exist.
    """
    runs: list[Run] = []
    faults: list[str] = []
    loaded: set[Path] = set()
    for place in places:
        if not exists(place):
            raise InputError(f"no runs at {place}: it does not exist")
        for file in find_run_files(place):
            if file.resolve() in loaded:
                continue
            loaded.add(file.resolve())
            try:
                runs.append(load_run(file))
            except InputError as error:
                if os.path.lexists(file):  # else it has vanished since it was found
                    faults.append(str(error))
    runs.sort(key=lambda run: (run.instant, run.id))
    return runs, faults


LAST = "last"
"""The name of the run that began latest."""

_CREATED = re.compile(rb'"created"\s*:\s*"([^"\\]*)"')


def last_run(out: Path) -> Path | None:
    """The run.json of the run under `out` that began latest, whatever its directory is called; None without runs.

    Every verb that takes `last` asks here. A file that does not say when its run began is older than any that does.
    """
    files = list(find_run_files(out)) if exists(out) else []
    return max(files, key=lambda file: (_begun(file), file.parent.name), default=None)


def _begun(file: Path) -> float:
    """When a stored run began, in seconds since 1970, from the head of its file; 0 where that does not say."""
    try:
        with file.open("rb") as stream:
            head = stream.read(_HEAD)
            match = _CREATED.search(head) or _CREATED.search(stream.read(_LARGEST_HEAD))
    except OSError:
        return 0.0
    return instant_of(match[1].decode(errors="replace")) if match else 0.0


def find_run(name: str, out: Path) -> Run:
    """A run by its path, or that of a folder which holds just one; or by a part of its directory's name under `out`
    that is unique there; or `last`, the one under `out` that began latest."""
    return load_run(find_run_path(name, out))


def find_run_path(name: str, out: Path) -> Path:
    """Where `find_run` reads the run of this name: its run.json, or its directory."""
    files = list(find_run_files(out)) if exists(out) else []
    path = Path(name)
    if exists(path) and (path.is_file() or not files or any(find_run_files(path))):
        inside = list(find_run_files(path))
        return inside[0] if len(inside) == 1 else path
    none = f"no run named {name!r} in {out}: `stepscope ls --runs {out}` lists those there are"
    return _only_run(name, out, files, none)


def _only_run(name: str, out: Path, files: Iterable[Path], none: str) -> Path:
    """The one of these run.json files whose directory's name holds `name`; for `last`, that of the run that began
    latest. Raises InputError where it is not one; `none` says so where there is none."""
    if name == LAST and (latest := last_run(out)) is not None:
        return latest
    matches = [file for file in files if name in file.parent.name]
    if len(matches) != 1:
        raise InputError(f"{len(matches)} runs in {out} match {name!r}: write more of the name" if matches else none)
    return matches[0]


def find_place(name: str, out: Path) -> Path:
    """The file or directory of this name; else the run directory under `out` of which it is a part of the name, or of
    the run that began latest for `last`."""
    path = Path(name)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise InputError(f"{name[:100]}: cannot be read: {error.strerror or error}") from None
    else:
        return path
    try:
        none = f"{name}: no such file, nor a run of that name in {out}"
        return _only_run(name, out, find_run_files(out), none).parent
    except OSError as error:
        raise InputError(f"{out}: cannot be read: {error.strerror or error}") from None


def exists(path: Path) -> bool:
    """Whether the path leads to something.

    Raises InputError for links that lead round in a circle: they are there, and lead nowhere.
    """
    try:
        path.stat()
    except OSError as error:  # a name too long for any file, say
        if error.errno == errno.ELOOP:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
        return False
    return True


_HEAD = 4096
"""Bytes of a document within which its mark stands, and in a run the time at which it began."""
_LARGEST_HEAD = 1 << 20
"""Bytes more in which a run that another wrote may say when it began."""


def check_is_ours(file: Path, mark: str) -> None:
    """Raise InputError where a file is there and has not our mark at its head: it is somebody's own."""
    try:
        with file.open("rb") as stream:
            head = stream.read(_HEAD)
    except OSError:
        return  # there is none; or it cannot be read, which writing will say
    if head and mark.encode() not in head:
        raise InputError(f"{file} is there and was not written by this command: name another file, or remove it first")


def write_atomically(data: bytes, target: Path) -> None:
    """Write a file whole or not at all: what stood there before stays until then. Raises OSError."""
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


# Forecasts, kept in the folder of the runs that will show whether they came true.
#
# `<runs>/forecasts.jsonl` has a line for each, appended by whatever foretold something. A forecast is never changed:
# what was measured afterwards is found among the runs by the key of the workload, when somebody asks.


PEAK_BYTES: Literal["peak_bytes"] = "peak_bytes"
"""The most bytes that PyTorch's allocator hands out in a steady step on a GPU."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What was foretold of one workload, before it was measured."""

    version: int = 1
    made: str
    """UTC, ISO 8601."""
    by: str
    """The verb that foretold it."""
    stepscope: str = __version__
    workload: str
    """The key of the workload."""
    device_type: str = "cuda"
    quantity: str = PEAK_BYTES
    value: float | None = None
    """None where only a verdict was given."""
    budget_bytes: int | None = None
    """The memory that the verdict is about, as PyTorch's allocator may use it; None where no memory was named."""
    fits: bool | None = None
    """Whether it was said to fit into the budget."""
    is_bound: bool = False
    """Whether the truth was said to lie at or below the value."""


def forecast_of_peak(
    by: str,
    workload: str,
    peak_bytes: int | None,
    *,
    budget_bytes: int | None,
    fits: bool | None,
    is_bound: bool = False,
) -> Forecast:
    """A forecast of the peak of a step's memory, or of a verdict on it, made now."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return Forecast(
        made=now, by=by, workload=workload, value=peak_bytes, budget_bytes=budget_bytes, fits=fits, is_bound=is_bound
    )


def keep_forecasts(folder: Path, forecasts: Sequence[Forecast]) -> str | None:
    """Append forecasts to those of a folder of runs. Returns why it could not be done, or None.

    All lines go in one write to a file that is opened for appending: processes that foretell at once do not mix them.
    """
    lines = b"".join(msgspec.json.encode(forecast) + b"\n" for forecast in forecasts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / FORECASTS_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, lines)
        finally:
            os.close(file)
    except OSError as error:
        return f"the forecast is not kept: cannot write {folder / FORECASTS_FILE}: {error.strerror or error}"
    return None


def read_forecasts(folder: Path) -> tuple[list[Forecast], list[str]]:
    """The forecasts that a folder of runs keeps, in the order they were made, and a line on those that are no use."""
    file = folder / FORECASTS_FILE
    try:
        data = read_document(file)
    except FileNotFoundError:
        return [], []
    except (OSError, InputError) as error:
        return [], [f"{file}: its forecasts cannot be read: {one_line(error)}"]
    forecasts: list[Forecast] = []
    damaged = 0
    for line in data.splitlines():
        try:
            forecasts.append(msgspec.json.decode(line, type=Forecast))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            damaged += bool(line.strip())
    return forecasts, [f"{file}: {damaged} of its lines are no forecast"] if damaged else []
