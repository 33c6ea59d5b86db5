"""Reads a capture of Nsight Systems: its SQLite export, its parquetdir export, or a report through `nsys export`.

Which tables and columns exist differs between versions of nsys, so they are probed. The process of a thread is its
globalTid without the lowest 24 bits; names are ids into StringIds.
"""

import contextlib
import copy
import ctypes
import fcntl
import gzip
import itertools
import os
import shutil
import tempfile
import threading
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import quote

import adbc_driver_sqlite.dbapi
import polars as pl

from stepscope.core.errors import InputError, StepscopeError, one_line, printable
from stepscope.core.files import check_no_pointer
from stepscope.core.profilers import export_report, find_importer, find_nsys, how_to_get_nsys, import_stream
from stepscope.core.units import format_bytes
from stepscope.traces.readers.json_events import is_bomb
from stepscope.traces.table import (
    CALL_SCHEMA,
    CALLS,
    DETAIL_SCHEMA,
    KIND,
    LARGEST_NS,
    OPERATOR_SCHEMA,
    RANGE_SCHEMA,
    RANGES,
    WORK,
    WORK_SCHEMA,
    Damage,
    TraceTable,
    add_count,
    assemble,
    empty,
    fits,
)

# Where the tables of an nsys export lie: in an SQLite file or in a folder of parquet files.
#
# Which tables and columns exist differs between versions of nsys. An SQLite file is opened read-only and never locked.


NO_NUMBER = 1 - 2**63
"""Stands for null while numbers are read; no clock, thread or id comes near."""
_READERS = 2
_BATCH_ROWS = 1 << 18
"""The most raw rows of an export that are held at once: they take several times the memory of what is kept."""
_LEAST_ROW_BYTES = 16
"""A row of two times, an id and a name takes more bytes than this in an export."""
_BROKEN_PARQUET = (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError)
"""Damage that polars does not foresee makes it panic."""


_KNOWN = (
    "start", "end", "globalTid", "globalPid", "correlationId", "nameId", "deviceId", "streamId", "graphNodeId",
    "graphId", "demangledName", "shortName", "mangledName", "copyKind", "bytes", "srcKind", "dstKind", "gridX",
    "gridY", "gridZ", "blockX", "blockY", "blockZ", "registersPerThread", "eventType", "text", "textId", "id",
    "value", "name", "cuDevice", "severity",
)  # fmt: skip
_SPELLED = {name.casefold(): name for name in _KNOWN}
"""Columns that readers ask for. Tools that write exports anew spell tables and columns in other cases."""


class Tables(Protocol):
    """Where the tables of an export lie. Their names and those of their columns count whatever their case."""

    path: Path

    def columns(self, table: str) -> tuple[str, ...]: ...

    def is_text(self, table: str, column: str) -> bool:
        """Whether a column holds texts themselves, where other exports hold their ids."""
        ...

    def batches(self, table: str, numbers: list[str], texts: list[str]) -> Iterator[pl.DataFrame]: ...


class SqliteTables:
    """The tables of an SQLite export."""

    def __init__(self, path: Path, named: Path | None = None) -> None:
        """`named`: what messages name, where it is not the file itself."""
        self.path = named or path
        for ending in ("-wal", "-journal"):
            beside = path.with_name(path.name + ending)
            if beside.exists() and beside.stat().st_size:  # it holds rows that a reader who locks nothing cannot see
                raise InputError(
                    f"{path}: {beside.name} lies beside it, so it is still being written, or its writer was "
                    "interrupted: wait, or export it again"
                )
        self._check_whole(path)
        self._bytes = path.stat().st_size
        self._errors = adbc_driver_sqlite.dbapi.Error
        self._uri = f"file:{quote(os.fsencode(path.resolve()))}?mode=ro&immutable=1"
        # Its types say nothing of options and parameters.
        self._connect: Callable[[str], Any] = adbc_driver_sqlite.dbapi.connect  # pyright: ignore[reportUnknownMemberType]
        self._of_thread = threading.local()
        described = self._query(
            "SELECT CAST(m.name AS BLOB) AS t, CAST(c.name AS BLOB) AS c"
            " FROM sqlite_master m, pragma_table_info(m.name) c WHERE m.type = 'table' AND m.name NOT LIKE 'ENUM%'"
        )
        self._columns: dict[str, tuple[str, ...]] = {}
        if described.height:
            for table, column in described.iter_rows():
                self._columns[utf8(table).casefold()] = (*self.columns(utf8(table)), _spelled(utf8(column)))

    def _check_whole(self, path: Path) -> None:
        """SQLite itself misses a page only where it needs it: a table cut short can look like a small one."""
        with path.open("rb") as file:
            header = file.read(100)
        page_bytes = int.from_bytes(header[16:18]) if header[16:18] != b"\x00\x01" else 1 << 16
        stated = page_bytes * int.from_bytes(header[28:32])
        # The number of pages counts only where the last writer knew of it: it then left the counter of changes twice.
        if len(header) == 100 and header[24:28] == header[92:96] and path.stat().st_size < stated:
            raise InputError(
                f"{self.path}: {path.stat().st_size} bytes of {stated}: this database is truncated; copy or export it "
                "again"
            )

    def columns(self, table: str) -> tuple[str, ...]:
        return self._columns.get(table.casefold(), ())

    def is_text(self, table: str, column: str) -> bool:
        kind = self._query(f'SELECT typeof("{column}") AS t FROM "{table}" WHERE "{column}" IS NOT NULL LIMIT 1')
        return bool(kind.height) and kind.item() == "text"

    def batches(self, table: str, numbers: list[str], texts: list[str]) -> Iterator[pl.DataFrame]:
        """Numbers with NO_NUMBER for null; texts as bytes, empty for null, since the export promises no encoding."""
        # Each extreme alone is one step to an end of the table; both in one query are a walk through all of it.
        extremes = f'(SELECT min(rowid) FROM "{table}") AS low, (SELECT max(rowid) FROM "{table}") AS high'
        bounds = self._query(f"SELECT ifnull(low, 0) AS low, ifnull(high, -1) AS high FROM (SELECT {extremes})")
        low, high = int(bounds.item(0, "low")), int(bounds.item(0, "high"))
        # Rows are numbered without gaps; a table where they are not is read at once, or most batches could be empty.
        step = _BATCH_ROWS if high - low <= self._bytes // _LEAST_ROW_BYTES else high - low + 1
        stretches = ((first, min(first + step - 1, high)) for first in range(low, high + 1, step))

        def rows(stretch: tuple[int, int]) -> pl.DataFrame:
            return self._rows(f'FROM "{table}" WHERE rowid BETWEEN {stretch[0]} AND {stretch[1]}', numbers, texts)

        # SQLite works without Python's lock: while one batch is looked at, the next ones are read.
        with ThreadPoolExecutor(_READERS) as readers:
            ahead = deque(readers.submit(rows, stretch) for stretch in itertools.islice(stretches, _READERS))
            while ahead:
                frame = ahead.popleft().result()
                ahead.extend(readers.submit(rows, stretch) for stretch in itertools.islice(stretches, 1))
                if frame.height:
                    yield frame

    def _rows(self, where: str, numbers: list[str], texts: list[str]) -> pl.DataFrame:
        """The rows of one batch. What is a number in every row is taken as it stands: a cast of each takes longer."""
        plain = [f'"{name}" AS "{name}"' for name in numbers]
        bytes_of = [f'CAST(ifnull("{name}", \'\') AS BLOB) AS "{name}"' for name in texts]
        frame = None
        with contextlib.suppress(InputError):  # a column of several types is one to ADBC, too, unless each is cast
            frame = self._query(f"SELECT {', '.join([*plain, *bytes_of])} {where}")
        if frame is None or any(frame[name].dtype != pl.Int64 for name in numbers):
            cast_to = [f'CAST(ifnull("{name}", {NO_NUMBER}) AS INTEGER) AS "{name}"' for name in numbers]
            frame = self._query(f"SELECT {', '.join([*cast_to, *bytes_of])} {where}")
        absent = [name for name in numbers if frame[name].null_count()]
        return frame.with_columns(pl.col(absent).fill_null(NO_NUMBER)) if absent else frame

    def _query(self, query: str) -> pl.DataFrame:
        """The answer, in one chunk. Each thread keeps a connection: opening one reads the schema."""
        try:
            if not hasattr(self._of_thread, "connection"):
                self._of_thread.connection = self._connect(self._uri)
            with self._of_thread.connection.cursor() as cursor:
                cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(_BATCH_ROWS)})
                cursor.execute(query)
                return pl.DataFrame(cursor.fetch_arrow())
        except (self._errors, pl.exceptions.PolarsError) as error:  # it reads on while polars takes the rows
            reason = one_line(error)
            raise InputError(f"{self.path}: cannot be read as an SQLite database: {reason}: export it again") from None


class ParquetTables:
    """The tables of a parquetdir export."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = {file.stem.casefold(): file for file in path.glob("*.parquet")}

    def columns(self, table: str) -> tuple[str, ...]:
        if table.casefold() not in self._files:
            return ()
        try:
            return tuple(self._schema(table))
        except _BROKEN_PARQUET as error:
            with self._files[table.casefold()].open("rb") as file:
                check_no_pointer(self._files[table.casefold()], file.read(64))
            raise InputError(f"{self._files[table.casefold()]}: cannot be read as parquet: {one_line(error)}") from None

    def is_text(self, table: str, column: str) -> bool:
        dtype = self._schema(table)[column]
        return dtype == pl.String or dtype == pl.Binary  # noqa: PLR1714 - a type is equal, and not in

    def _schema(self, table: str) -> dict[str, pl.DataType]:
        with _panics_unheard():
            schema = pl.read_parquet_schema(self._files[table.casefold()])
        return {_spelled(name): dtype for name, dtype in schema.items()}

    def batches(self, table: str, numbers: list[str], texts: list[str]) -> Iterator[pl.DataFrame]:
        try:
            schema = self._schema(table)
            scan = pl.scan_parquet(self._files[table.casefold()]).rename(_spelled)
            scan = scan.select(
                *(_integers(name, schema[name]).fill_null(NO_NUMBER) for name in numbers),
                *(_bytes(name, schema[name]).fill_null(b"") for name in texts),
            )
            with _panics_unheard():
                frame = scan.collect()
            yield frame
        except _BROKEN_PARQUET as error:
            raise InputError(f"{self._files[table.casefold()]}: cannot be read: {one_line(error)}") from None


@contextmanager
def _panics_unheard() -> Generator[None]:
    """Inside, what is written to stderr is lost: where polars panics, its threads write backtraces there."""
    try:
        kept = os.dup(2)
    except OSError:  # stderr is closed
        yield
        return
    try:
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _spelled(column: str) -> str:
    """A column's name as readers ask for it."""
    return _SPELLED.get(column.casefold(), column)


def _integers(name: str, dtype: pl.DataType) -> pl.Expr:
    """The column as signed 64-bit integers, as SQLite holds them: ids of threads use all 64 bits."""
    return pl.col(name).reinterpret(signed=True) if dtype == pl.UInt64 else pl.col(name).cast(pl.Int64)


def _bytes(name: str, dtype: pl.DataType) -> pl.Expr:
    return pl.col(name) if dtype == pl.Binary else pl.col(name).cast(pl.String).cast(pl.Binary)


def utf8(value: bytes | str | None) -> str:
    """Bytes decoded as UTF-8; invalid bytes become replacement characters."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else (value or "")


# What an nsys export says of kernels and copies beside their times: sizes, kinds of memory, grids, registers.


_GRID, _BLOCK = ("gridX", "gridY", "gridZ"), ("blockX", "blockY", "blockZ")
_OF_COPIES = ("bytes", "srcKind", "dstKind")
DETAILS = (*_OF_COPIES, *_GRID, *_BLOCK, "registersPerThread")
"""Columns of the tables of work that are read where they are there."""

_MEMORY = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device Static", 6: "Managed Static"}
"""Kinds of memory by the numbers of the export, as Kineto writes them."""


def detail_columns(frame: pl.DataFrame) -> list[pl.Series]:
    """The columns of DETAIL_SCHEMA that the export says."""

    def memory(column: str) -> pl.Expr:
        return pl.col(column).replace_strict(_MEMORY, default=None, return_dtype=pl.String)

    def sizes(columns: tuple[str, ...]) -> pl.Series:
        known = pl.all_horizontal(pl.col(columns) != NO_NUMBER)
        text = pl.when(known).then(pl.format("[{}, {}, {}]", *columns)).cast(pl.Categorical()).alias("size")
        bounds = [_bounds(frame[name]) for name in columns]
        low, high = (max(1, most + 1) for _, most in bounds[1:])
        if min(least for least, _ in bounds) < 0 or bounds[0][1] * low * high >= LARGEST_NS:
            return frame.select(text).to_series()
        # There are few sizes: each is written once, and found by the one number that stands for it.
        x, y, z = (pl.col(name) for name in columns)
        key = frame.select(((x * low + y) * high + z).alias("key")).to_series()
        distinct = frame.select(*columns, key).unique("key")
        return key.replace_strict(distinct["key"], distinct.select(text).to_series(), return_dtype=pl.Categorical())

    def count(column: str) -> pl.Expr:
        return pl.when(pl.col(column) >= 0).then(pl.col(column))

    columns: dict[str, tuple[tuple[str, ...], Callable[[], pl.Expr | pl.Series]]] = {
        "bytes": (("bytes",), lambda: count("bytes")),
        "memory": (("srcKind", "dstKind"), lambda: pl.concat_str(memory("srcKind"), pl.lit(" -> "), memory("dstKind"))),
        "grid": (_GRID, lambda: sizes(_GRID)),
        "block": (_BLOCK, lambda: sizes(_BLOCK)),
        "registers": (("registersPerThread",), lambda: count("registersPerThread")),
    }
    said = {name: make() for name, (needed, make) in columns.items() if set(needed) <= set(frame.columns)}
    return (
        frame.select(value.alias(name) for name, value in said.items())
        .select(pl.col(name).cast(DETAIL_SCHEMA[name], strict=False) for name in said)
        .get_columns()
    )


# Tells operators from ranges in a capture of `torch.autograd.profiler.emit_nvtx`, which writes both as NVTX ranges.
#
# PyTorch writes `aten::mm, seq = 12, op_id = 34, sizes = [[2, 3], [3, 4]], input_op_ids = [(33,0)]`, and leaves out
# what it does not know. A user's `record_function("forward")` is written in the same way: `forward, op_id = 35`.


_LONGEST = 1 << 16
"""Characters of a name that are looked at: the sizes of a list of a thousand tensors take some 30,000."""
_WRITTEN = (
    r"(?s)^(?P<operator>.+?)(?:, seq = (?P<sequence>\d{1,18}))?(?P<op_id>, op_id = \d+)?"
    r"(?:, sizes = (?P<shapes>\[[\[\]\d, -]*\]))?(?P<inputs>, input_op_ids = \[.*)?$"
)
_OPERATOR = (
    r"^(?:_?[a-z]\w*(?:::\w+)+(?:\.\w+)?|autograd::engine::evaluate_function: .+|\w+Backward\d*"
    r"|record_param_comms|detach_?)$"
)
"""Names of operators of PyTorch, its libraries and its autograd. Of other names, a sequence number, sizes or inputs
say that it is an operator: a range of the user's has none of them."""
_BACKWARD = r"Backward\d*$|^autograd::engine::evaluate_function"


def operators_apart(ranges: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The ranges without those that are operators, and these. A user's range gets the name that the user gave it."""
    text = pl.col("name").cast(pl.String).str.slice(0, _LONGEST)
    names = ranges["name"].unique().to_frame()
    parts = names.with_columns(text.str.extract_groups(_WRITTEN).alias("parts")).unnest("parts")
    recorded = pl.any_horizontal(pl.col(part).is_not_null() for part in ("sequence", "shapes", "inputs"))
    written = parts.filter(recorded | pl.col("op_id").is_not_null()).select(
        "name",
        "operator",
        pl.col("sequence").cast(pl.Int64),
        "shapes",
        (recorded | pl.col("operator").str.contains(_OPERATOR)).alias("is_operator"),
    )
    if not written.height:
        return ranges, empty(OPERATOR_SCHEMA)
    joined = ranges.join(written, on="name", how="left", maintain_order="left")
    users = joined.filter(~pl.col("is_operator").fill_null(False))
    operators = joined.filter("is_operator")
    named = pl.coalesce(pl.col("operator").cast(pl.Categorical()), "name").alias("name")
    backward = pl.col("operator").str.contains(_BACKWARD)
    return users.with_columns(named).select(ranges.columns), operators.select(
        "start_ns",
        "duration_ns",
        "process",
        "thread",
        named,
        pl.lit(None, pl.Int64).alias("external"),
        "sequence",
        # emit_nvtx does not say the forward thread; one thread runs forward, which PyTorch numbers 1.
        pl.when(backward & pl.col("sequence").is_not_null()).then(pl.lit(1, pl.Int64)).alias("forward_thread"),
        pl.col("shapes").cast(pl.Categorical()),
        pl.lit(None, pl.Categorical()).alias("dtypes"),
        pl.lit(None, pl.Categorical()).alias("values"),
    )


# An export that is made for reading alone: unpacked, since SQLite reads pages in any order, or exported by nsys.


SQLITE = b"SQLite format 3\x00"
"""How an SQLite database begins."""
_BLOCK_BYTES = 4 << 20
_KEPT_FREE_BYTES = 64 << 20


_EXPORTS = "stepscope-export-"


@contextmanager
def _export_folder() -> Generator[Path]:
    """A temporary folder that is deleted at the end or, where this process is killed, by the next that makes one.

    The lock on a folder ends with the process that has it, however that ends.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_EXPORTS}*"):
        with contextlib.suppress(OSError), _opened(left) as folder:  # not another user's
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(folder).st_uid == os.geteuid():
                shutil.rmtree(left, ignore_errors=True)
    with contextlib.ExitStack() as at_the_end:
        while True:
            name = tempfile.mkdtemp(prefix=_EXPORTS)
            at_the_end.callback(shutil.rmtree, name, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):  # another process took it for one that was left behind
                fcntl.flock(at_the_end.enter_context(_opened(name)), fcntl.LOCK_EX)
                if Path(name).exists():
                    break
        yield Path(name)


@contextmanager
def _opened(folder: Path | str) -> Generator[int]:
    """The descriptor of a folder, and not of a link to one."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def unpacked(path: Path) -> Generator[Path]:
    """The unpacked file, which is deleted at the end. Raises InputError where it is damaged or takes too much room."""
    with _export_folder() as folder:
        target = folder / "capture.sqlite"
        packed_bytes, written = path.stat().st_size, 0

        def block_of(source: gzip.GzipFile) -> bytes:
            try:
                return source.read(_BLOCK_BYTES)
            except EOFError:
                raise InputError(
                    f"{path}: the gzip file is truncated after {written} bytes of content; copy or export it again"
                ) from None
            except (OSError, zlib.error) as error:
                raise InputError(f"{path}: cannot be read: {one_line(error)}") from None

        with gzip.open(path) as source, target.open("wb") as out:
            while block := block_of(source):
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


_PUSH_POP, _START_END = (59, 70), (60, 71)
"""Types of the events that are ranges, with plain and with extended payload."""
_UNTIMED = "rows without a time"
_OFTEN_ONE = ("device", "stream", "process", "thread")
_COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
_WORK_TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "kernel",
    _COPIES: "memcpy",
    "CUPTI_ACTIVITY_KIND_MEMSET": "memset",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "graph",
}
_NAMES = ("demangledName", "shortName", "mangledName")
"""Columns of a kernel's name, the best first. Which exist differs, and a row may lack the best."""
_GRAVE = (2, 3)
"""Severities of nsys's own remarks that are warnings and errors."""
_LONGEST_REMARK = 200
_COPY_NAMES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}


def read_nsys(path: Path, head: bytes, *, launch_sizes: bool = True) -> TraceTable | None:
    """The TraceTable of an export (SQLite, also in gzip, or a parquetdir) or of a report, which nsys exports here.

    launch_sizes: whether to read the grid, block and registers of kernels, which take a third of the time.

    None where the file, which begins with `head`, is none of these. Raises InputError where it lacks CUDA activity.
    """
    if path.is_dir():
        return _Reader(ParquetTables(path), launch_sizes).table()
    if head.startswith(SQLITE):
        return _Reader(SqliteTables(path), launch_sizes).table()
    if path.suffix in (".nsys-rep", ".qdrep", ".qdstrm") or head.startswith((b"NSYS", b"QDSTRM")):
        database = exported(path)
    elif head.startswith(b"\x1f\x8b") and _holds_sqlite(path):
        database = unpacked(path)
    else:
        return None
    with database as sqlite:
        return _Reader(SqliteTables(sqlite, named=path), launch_sizes).table()


def _holds_sqlite(path: Path) -> bool:
    try:
        with gzip.open(path) as file:
            return file.read(len(SQLITE)) == SQLITE
    except (OSError, EOFError, zlib.error):
        return False  # the reader of JSON says what is wrong with it


@contextmanager
def exported(path: Path) -> Generator[Path]:
    """The SQLite export of a report (`.nsys-rep`) or a raw capture (`.qdstrm`), in a temporary folder."""
    nsys = find_nsys()
    raw = path.suffix == ".qdstrm"
    importer = find_importer(nsys) if nsys and raw else None
    if raw and importer is None:
        raise InputError(
            f"{path}: a raw capture, of which Nsight Systems' QdstrmImporter makes a report: read it where Nsight "
            "Systems is installed whole"
        )
    if nsys is None:
        raise InputError(f"{path}: reading a report needs nsys for its export: {how_to_get_nsys()}")
    with _export_folder() as folder:
        copy, report, sqlite = (folder / f"capture{suffix}" for suffix in (".qdstrm", ".nsys-rep", ".sqlite"))
        shutil.copyfile(path, copy if raw else report)
        try:
            if importer is not None:
                import_stream(importer, copy, report)
            export_report(nsys, report, sqlite)
        except StepscopeError as error:
            raise InputError(f"{path}: nsys cannot export this {'capture' if raw else 'report'}: {error}") from None
        yield sqlite


class _Reader:
    """Reads the tables of an export, and counts the rows without a place and those that are damaged."""

    def __init__(self, tables: Tables, launch_sizes: bool) -> None:
        self._tables = tables
        self._details = DETAILS if launch_sizes else _OF_COPIES
        self._other: dict[str, int] = {}
        self._damage = Damage()
        strings = pl.DataFrame(schema={"id": pl.Int64, "value": pl.String})
        if self._has("StringIds", "id", "value"):
            frame = self._whole("StringIds", ["id"], ["value"]).unique("id", keep="first")
            strings = frame.with_columns(_decoded(frame["value"]))
        value = pl.col("value").cast(pl.Categorical())
        said = pl.when(pl.col("value") != "").then(value).alias("said")
        self._strings = strings.sort("id").with_columns(value, said)

    def table(self) -> TraceTable:
        path = self._tables.path
        if not self._tables.columns("StringIds") and not self._tables.columns("NVTX_EVENTS"):
            raise InputError(f"{path}: not an export of Nsight Systems (it has no table StringIds)")
        calls, work = self._calls(), self._work()
        metadata = self._metadata("META_DATA_CAPTURE")
        traced = frozenset(
            kind
            for kind in ("cuda", "nvtx")
            for name, value in metadata.items()
            if name.endswith(f"COLLECT_{kind.upper()}_TRACE") and value.lower() == "true"
        )
        remarks = self._remarks()
        if not work.height:
            # What nsys says of CUDA, or else of anything; without a word of it, the advice that was not followed yet.
            words = [remark for remark in remarks if "cuda" in remark.lower()] or list(remarks)
            sentences = " ".join(word if word.endswith((".", "?", "!")) else f"{word}." for word in words)
            why = "capture with `nsys profile --trace=cuda,nvtx`"
            if words:
                why = f"nsys says: {sentences}"
            elif "cuda" in traced:
                why = (
                    "nsys was asked to trace CUDA and saw none: look whether the process that it followed uses the GPU"
                )
            raise InputError(f"{path}: this export holds no CUDA activity: {why}")
        ends = [(frame["start_ns"] + frame["duration_ns"]).max() for frame in (calls, work)]
        last_ns = max(end for end in (*ends, 0) if isinstance(end, int))
        ranges, operators = (_closed(frame, last_ns) for frame in self._ranges())
        table = TraceTable(
            profiler="Nsight Systems",
            work=work,
            calls=calls,
            ranges=ranges,
            operators=operators,
            devices=self._devices(),
            other=self._other,
            damage=self._damage,
            recorder=self._recorder(),
            remarks=remarks,
            traced=traced,
            threads=self._threads(),
        )
        return assemble(table, path)

    def _has(self, table: str, *columns: str) -> bool:
        return set(columns) <= set(self._tables.columns(table))

    def _whole(self, table: str, numbers: list[str], texts: list[str]) -> pl.DataFrame:
        nothing = pl.DataFrame(schema=dict.fromkeys(numbers, pl.Int64) | dict.fromkeys(texts, pl.Binary))
        return pl.concat([nothing, *self._tables.batches(table, numbers, texts)])

    def _timed(self, table: str, numbers: list[str], texts: list[str], what: str) -> Iterator[pl.DataFrame]:
        """Batches of the rows that have a time. Rows that have none, or end before they begin, are counted."""
        needed = ("start",) if what == RANGES else ("start", "end")
        for frame in self._tables.batches(table, numbers, texts):
            if not frame.height:  # of a parquet file
                continue
            timed = frame
            bounds = [_bounds(frame[column]) for column in needed]
            if min(low for low, _ in bounds) <= -LARGEST_NS or max(high for _, high in bounds) >= LARGEST_NS:
                timed = frame.filter(*(pl.col(column) != NO_NUMBER for column in needed))
                add_count(self._other, _UNTIMED, frame.height - timed.height)
                on_a_clock = [pl.col(column).is_between(-LARGEST_NS, LARGEST_NS, closed="none") for column in needed]
                recorded, timed = timed.height, timed.filter(*on_a_clock)
                add_count(self._damage.untimed, what, recorded - timed.height)
            if (frame["end"] < frame["start"]).any():
                counted = (pl.col("end") < pl.col("start")) & (pl.col("end") != NO_NUMBER)
                if what == RANGES:  # a mark has no end
                    counted &= pl.col("eventType").is_in([*_PUSH_POP, *_START_END])
                add_count(self._damage.backwards, what, int(timed.select(counted.sum()).item()))
            if timed.height:
                yield timed

    def _threads(self) -> dict[tuple[int, int], str]:
        """The names of threads, by process and thread as other frames number them."""
        if not self._has("ThreadNames", "nameId", "globalTid"):
            return {}
        frame = self._whole("ThreadNames", ["nameId", "globalTid"], [])
        named = frame.select(_PROCESS, pl.col("globalTid").alias("thread")).with_columns(
            self._looked_up(frame, "nameId", "names of threads").cast(pl.String)
        )
        return {(process, thread): name for process, thread, name in named.drop_nulls().iter_rows()}

    def _looked_up(self, frame: pl.DataFrame, column: str, what: str, *, wanted: pl.Series | None = None) -> pl.Series:
        """The strings of ids, or the texts that stand in their place; an id without a string stays visible as its
        number, and no id is no string.

        Ids without a string are counted, as damage to `what`, where the string is `wanted`.
        """
        if frame[column].dtype == pl.Binary:
            return _decoded(frame[column]).alias("name")
        found = self._of_ids(frame[column])
        if not found.null_count():
            return found.alias("name")
        missing = found.is_null() & (frame[column] != NO_NUMBER)
        add_count(self._damage.nameless, what, int((missing if wanted is None else missing & wanted).sum()))
        number = pl.when(frame[column] != NO_NUMBER).then(frame[column])
        text = pl.coalesce(pl.format("string {}", number), pl.lit("")).cast(pl.Categorical())
        return pl.select(pl.coalesce(found, text).alias("name")).to_series()

    def _of_ids(self, ids: pl.Series, strings: str = "value") -> pl.Series:
        """The string of each id, or null; of `said`, null for an empty one, too."""
        known = self._strings["id"]
        if not len(known) or not len(ids):
            return pl.Series("name", [None], dtype=pl.Categorical()).new_from_index(0, len(ids))
        low, high = known[0], known[-1]
        if high - low + 1 == len(known):  # numbered without gaps
            at = ids if low == 0 else ids - low
            least, most = _bounds(ids)
            inside = low <= least and most <= high
            at = at if inside else at.set(~ids.is_between(low, high), None)
        else:
            at = known.search_sorted(ids, side="left").clip(upper_bound=len(known) - 1)
            at = at.set(known.gather(at) != ids, None)
        return self._strings[strings].gather(at.cast(pl.UInt32)).alias("value")

    def _calls(self) -> pl.DataFrame:
        table, numbers = "CUPTI_ACTIVITY_KIND_RUNTIME", ["start", "end", "globalTid", "correlationId"]
        if not self._has(table, *numbers, "nameId"):
            return empty(CALL_SCHEMA)
        texts = ["nameId"] if self._tables.is_text(table, "nameId") else []
        if not texts:
            numbers.append("nameId")
        parts = [
            _Part(
                frame.select(
                    _START,
                    _DURATION,
                    _PROCESS,
                    pl.col("globalTid").alias("thread"),
                    self._looked_up(frame, "nameId", CALLS).cast(pl.Categorical),
                    _number_of(frame, "correlationId").alias("correlation"),
                )
            )
            for frame in self._timed(table, numbers, texts, CALLS)
        ]
        return _together(parts, CALL_SCHEMA)

    def _work(self) -> pl.DataFrame:
        parts = [
            part
            for table, kind in _WORK_TABLES.items()
            if self._has(table, "start", "end")
            for part in self._work_of(table, kind)
        ]
        said = {name for part in parts for name in part.columns}
        details = {name: dtype for name, dtype in DETAIL_SCHEMA.items() if name in said}
        return _together(parts, pl.Schema({**WORK_SCHEMA, **details}))

    def _work_of(self, table: str, kind: str) -> "list[_Part]":
        """The work of one table. Of names the best column is read alone; the others, too, where it lacks some."""
        names = [name for name in _NAMES if name in self._tables.columns(table)]
        counts = copy.deepcopy((self._other, self._damage))
        for some in (names[:1], names):
            parts: list[_Part] = []
            for frame in self._work_batches(table, some):
                named = self._names_of_work(frame, kind, some, are_all=some == names)
                if named is None:
                    self._other, self._damage = counts
                    break
                parts.append(_Part(self._work_frame(frame, kind, named)))
            else:
                return parts
        raise AssertionError("the second reading has all names")

    def _work_frame(self, frame: pl.DataFrame, kind: str, names: pl.Series) -> pl.DataFrame:
        return frame.select(
            _START,
            _DURATION,
            _number_of(frame, "deviceId").fill_null(-1).alias("device"),
            _number_of(frame, "streamId").fill_null(-1).alias("stream"),
            pl.lit(kind, KIND).alias("kind"),
            names.cast(pl.Categorical),
            _number_of(frame, "globalPid").alias("process"),
            _number_of(frame, "correlationId").alias("correlation"),
            _number_of(frame, "graphNodeId").alias("graph_node"),
            *detail_columns(frame),
        )

    def _work_batches(self, table: str, names: list[str]) -> Iterator[pl.DataFrame]:
        present = self._tables.columns(table)
        texts = [name for name in names if self._tables.is_text(table, name)]
        optional = ("deviceId", "streamId", "correlationId", "globalPid", "graphNodeId")
        wanted = (*optional, *self._details, *names, "copyKind", "graphId")
        numbers = ["start", "end", *(name for name in wanted if name in present and name not in texts)]
        absent = [pl.lit(NO_NUMBER, pl.Int64).alias(name) for name in optional if name not in present]
        for frame in self._timed(table, numbers, texts, WORK):
            yield frame.with_columns(absent)

    def _names_of_work(self, frame: pl.DataFrame, kind: str, columns: list[str], are_all: bool) -> pl.Series | None:
        """The names of a batch; None where these columns lack some and are not all that there are."""
        if kind == "kernel" and columns:
            named = pl.Series("name", [None], dtype=pl.Categorical()).new_from_index(0, frame.height)
            for column in columns:  # the name of each kernel by the first of these columns that says it
                if frame[column].dtype == pl.Binary:
                    names = _decoded(frame[column]).cast(pl.Categorical())
                    names = names.set(fits(names, "^$"), None)
                else:
                    names = self._of_ids(frame[column], "said")
                named = pl.select(pl.coalesce(named, names).alias("name")).to_series()
                if not named.null_count():
                    return named
            if not are_all:
                return None
            rest = self._looked_up(frame, columns[0], WORK, wanted=named.is_null()).cast(pl.Categorical())
            return named.fill_null(rest)
        if kind == "memcpy" and "copyKind" in frame.columns:
            copies = pl.col("copyKind").replace_strict(_COPY_NAMES, default="other", return_dtype=pl.String)
            return frame.select(pl.format("Memcpy {}", copies).alias("name")).to_series()
        if kind == "graph" and "graphId" in frame.columns:
            return frame.select(pl.format("CUDA graph {}", "graphId").alias("name")).to_series()
        return pl.Series("name", [kind.capitalize()]).new_from_index(0, frame.height)

    def _ranges(self) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Ranges of the user's, and operators that `emit_nvtx` wrote as ranges; what is neither is counted."""
        table, numbers = "NVTX_EVENTS", ["start", "end", "eventType", "globalTid"]
        parts: tuple[list[_Part], list[_Part]] = [], []
        if not self._has(table, *numbers):
            return empty(RANGE_SCHEMA), empty(OPERATOR_SCHEMA)
        if self._has(table, "textId"):
            numbers.append("textId")
        texts = ["text"] if self._has(table, "text") else []
        for frame in self._timed(table, numbers, texts, RANGES):
            chosen = frame.filter(pl.col("eventType").is_in([*_PUSH_POP, *_START_END]))
            add_count(self._other, "NVTX marks and others", frame.height - chosen.height)
            ranges = chosen.select(
                _START,
                pl.when(pl.col("end") != NO_NUMBER).then(_DURATION).alias("duration_ns"),
                _PROCESS,
                pl.col("globalTid").alias("thread"),
                self._names_of_ranges(chosen),
                pl.col("eventType").is_in(_PUSH_POP).alias("nested"),
            )
            for part, rows in zip(parts, operators_apart(ranges), strict=True):
                if rows.height:
                    part.append(_Part(rows))
        return _together(parts[0], RANGE_SCHEMA), _together(parts[1], OPERATOR_SCHEMA)

    def _names_of_ranges(self, frame: pl.DataFrame) -> pl.Series:
        name = pl.Series("name", [""], dtype=pl.Categorical()).new_from_index(0, frame.height)
        if "text" in frame.columns:
            name = _decoded(frame["text"]).alias("name").cast(pl.Categorical())
        if "textId" not in frame.columns or not (unsaid := (name == "") & (frame["textId"] != NO_NUMBER)).any():
            return name
        registered = self._looked_up(frame, "textId", RANGES, wanted=name == "").cast(pl.Categorical())
        return pl.select(pl.when(unsaid).then(registered).otherwise(name).alias("name")).to_series()

    def _devices(self) -> dict[int, str]:
        table = "TARGET_INFO_GPU"
        if not self._has(table, "name"):
            return {}
        numbers = [name for name in ("cuDevice", "id") if self._has(table, name)][:1]
        frame = self._whole(table, numbers, ["name"])
        names = _decoded(frame["name"]).to_list()
        devices = dict(zip(frame[numbers[0]].to_list() if numbers else range(len(names)), names, strict=True))
        return {number: name for number, name in devices.items() if number != NO_NUMBER}

    def _remarks(self) -> tuple[str, ...]:
        """What nsys itself warns of in this capture, each sentence once."""
        if not self._has("DIAGNOSTIC_EVENT", "severity", "text"):
            return ()
        frame = self._whole("DIAGNOSTIC_EVENT", ["severity"], ["text"])
        grave = _decoded(frame.filter(pl.col("severity").is_in(_GRAVE))["text"]).to_list()
        return tuple(dict.fromkeys(" ".join(printable(text).split())[:_LONGEST_REMARK] for text in grave if text))

    def _metadata(self, table: str) -> dict[str, str]:
        if not self._has(table, "name", "value"):
            return {}
        frame = self._whole(table, [], ["name", "value"])
        return dict(zip(_decoded(frame["name"]).to_list(), _decoded(frame["value"]).to_list(), strict=True))

    def _recorder(self) -> str | None:
        for table in ("META_DATA_CAPTURE", "META_DATA_EXPORT"):
            facts = self._metadata(table)
            for key in ("NSYS_VERSION", "EXPORT_NSYS_VERSION", "EXPORT_VERSION", "PRODUCT_VERSION"):
                if key in facts:
                    return printable(f"nsys {facts[key]}"[:80])
        return None


def _decoded(column: pl.Series) -> pl.Series:
    """A column of bytes as text; bytes that are not UTF-8 become replacement characters. A value is decoded once."""
    with contextlib.suppress(pl.exceptions.PolarsError):  # nearly all names are UTF-8
        return column.cast(pl.String)
    distinct = column.unique()
    texts = pl.Series([utf8(value) for value in distinct.to_list()], dtype=pl.String)
    return column.replace_strict(distinct, texts, return_dtype=pl.String).alias(column.name)


class _Part:
    """Some rows of a table, column by column. A column of one value is held as that value."""

    def __init__(self, frame: pl.DataFrame) -> None:
        self.height = frame.height
        self.columns: dict[str, pl.Series] = {}
        for column in frame.get_columns():
            ends = (column.min(), column.max()) if column.name in _OFTEN_ONE and not column.has_nulls() else (0, 1)
            one = ends[0] == ends[1] or column.null_count() == frame.height
            self.columns[column.name] = column.gather([0]) if one else column


def _together(parts: list[_Part], schema: pl.Schema) -> pl.DataFrame:
    """The rows of all parts, which are emptied: a column is held twice only while it is put together.

    Columns of one value are held as that value: of a million rows, each saves 8 MB.
    """
    rows = pl.DataFrame(height=sum(part.height for part in parts))
    constants: list[pl.Expr] = []
    for name, dtype in schema.items():
        nothing = pl.Series(name, [None], dtype=dtype)
        pieces = [part.columns.pop(name, nothing) for part in parts]
        values = pl.concat([nothing.clear(), *(piece for piece in pieces if len(piece) == 1)]).unique()
        if len(values) == 1 and all(len(piece) == 1 for piece in pieces):
            constants.append(pl.lit(values.item(), dtype).alias(name))
            continue
        whole = (
            piece if len(piece) == part.height else piece.new_from_index(0, part.height)
            for part, piece in zip(parts, pieces, strict=True)
        )
        rows = rows.with_columns(pl.concat([nothing.clear(), *whole], rechunk=True))
    if give_back := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc alone, which keeps what ADBC freed
        give_back(0)
    return rows.with_columns(constants).select(schema.names())


def _closed(ranges: pl.DataFrame, last_ns: int) -> pl.DataFrame:
    """The ranges, with the last recorded moment as the end of those that were open when the capture stopped."""
    if not ranges["duration_ns"].null_count():
        return ranges
    last = pl.max_horizontal((pl.col("start_ns") + pl.col("duration_ns").fill_null(0)).max(), last_ns)
    return ranges.with_columns(pl.col("duration_ns").fill_null(last - pl.col("start_ns")).clip(lower_bound=0))


def _number_of(frame: pl.DataFrame, column: str) -> pl.Series:
    """The numbers of a column, null where there are none."""
    numbers = frame[column]
    return numbers.set(numbers == NO_NUMBER, None) if _bounds(numbers)[0] <= NO_NUMBER else numbers


def _bounds(numbers: pl.Series) -> tuple[int, int]:
    """The least and the largest of whole numbers; 0 where there are none."""
    return cast("int", numbers.min() or 0), cast("int", numbers.max() or 0)


_START = pl.col("start").alias("start_ns")
_DURATION = (pl.col("end") - pl.col("start")).clip(lower_bound=0).alias("duration_ns")
_PROCESS = (pl.col("globalTid") & -(2**24)).alias("process")
