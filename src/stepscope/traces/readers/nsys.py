"""Reads a capture of Nsight Systems: its SQLite export, its parquetdir export, or a report through `nsys export`.

Which tables and columns exist differs between versions of nsys, so they are probed. The process of a thread is its
globalTid without the lowest 24 bits; names are ids into StringIds.
"""

import gzip
import itertools
import os
import shutil
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
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
)

# Where the tables of an nsys export lie: in an SQLite file or in a folder of parquet files.
#
# Which tables and columns exist differs between versions of nsys. An SQLite file is opened read-only and never locked.


NO_NUMBER = 1 - 2**63
"""Stands for null while numbers are read; no clock, thread or id comes near."""
_READERS = 2
_BATCH_ROWS = 1 << 16
"""The most raw rows of an export that are held at once: they take several times the memory of what is kept."""
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
        _check_whole(path, self.path)
        self._errors = adbc_driver_sqlite.dbapi.Error
        self._uri = f"file:{quote(os.fsencode(path.resolve()))}?mode=ro&immutable=1"
        # Its types say nothing of options and parameters.
        self._connect: Callable[[str], Any] = adbc_driver_sqlite.dbapi.connect  # pyright: ignore[reportUnknownMemberType]
        described = self._query(
            "SELECT CAST(m.name AS BLOB) AS t, CAST(c.name AS BLOB) AS c"
            " FROM sqlite_master m, pragma_table_info(m.name) c WHERE m.type = 'table' AND m.name NOT LIKE 'ENUM%'"
        )
        self._columns: dict[str, tuple[str, ...]] = {}
        if described.height:
            for table, column in described.iter_rows():
                self._columns[utf8(table).casefold()] = (*self.columns(utf8(table)), _spelled(utf8(column)))

    def columns(self, table: str) -> tuple[str, ...]:
        return self._columns.get(table.casefold(), ())

    def is_text(self, table: str, column: str) -> bool:
        kind = self._query(f'SELECT typeof("{column}") AS t FROM "{table}" WHERE "{column}" IS NOT NULL LIMIT 1')
        return bool(kind.height) and kind.item() == "text"

    def batches(self, table: str, numbers: list[str], texts: list[str]) -> Iterator[pl.DataFrame]:
        """Numbers with NO_NUMBER for null; texts as bytes, empty for null, since the export promises no encoding."""
        wanted = [f'CAST(ifnull("{name}", {NO_NUMBER}) AS INTEGER) AS "{name}"' for name in numbers]
        wanted += [f'CAST(ifnull("{name}", \'\') AS BLOB) AS "{name}"' for name in texts]
        bounds = self._query(f'SELECT ifnull(min(rowid), 0) AS low, ifnull(max(rowid), -1) AS high FROM "{table}"')
        low, high = int(bounds.item(0, "low")), int(bounds.item(0, "high"))
        count = self._query(f'SELECT count(*) AS n FROM "{table}"').item()
        # Rows are numbered without gaps; a file where they are not is read at once.
        step = _BATCH_ROWS if high - low <= 4 * count else high - low + 1
        columns = ", ".join(wanted)
        queries = (
            f'SELECT {columns} FROM "{table}" WHERE rowid BETWEEN {first} AND {min(first + step - 1, high)}'
            for first in range(low, high + 1, step)
        )
        # SQLite works without Python's lock: while one batch is looked at, the next ones are read.
        with ThreadPoolExecutor(_READERS) as readers:
            ahead = deque(readers.submit(self._query, query) for query in itertools.islice(queries, _READERS))
            while ahead:
                frame = ahead.popleft().result()
                ahead.extend(readers.submit(self._query, query) for query in itertools.islice(queries, 1))
                if frame.height:
                    yield frame

    def _query(self, query: str) -> pl.DataFrame:
        try:
            with self._connect(self._uri) as connection, connection.cursor() as cursor:
                cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(max(1, _BATCH_ROWS // 8))})
                cursor.execute(query)
                frame = pl.DataFrame(cursor.fetch_arrow())
                # As Arrow hands it over, one column that is kept keeps all columns of its batch alive. Rechunking
                # copies, since there are several batches: a capture of 1 GB takes a third less memory.
                return frame.rechunk()
        except (self._errors, pl.exceptions.PolarsError) as error:  # it reads on while polars takes the rows
            reason = one_line(error)
            raise InputError(f"{self.path}: cannot be read as an SQLite database: {reason}: export it again") from None


def _check_whole(path: Path, named: Path) -> None:
    """SQLite itself misses a page only where it needs it: a table cut short can look like a small one."""
    with path.open("rb") as file:
        header = file.read(100)
    page_bytes = int.from_bytes(header[16:18]) if header[16:18] != b"\x00\x01" else 1 << 16
    said = page_bytes * int.from_bytes(header[28:32])
    # The number of pages counts only where the last writer knew of it: it then left the counter of changes twice.
    if len(header) == 100 and header[24:28] == header[92:96] and path.stat().st_size < said:
        raise InputError(
            f"{named}: {path.stat().st_size} bytes of {said}: this database is truncated; copy or export it again"
        )


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
DETAILS = ("bytes", "srcKind", "dstKind", *_GRID, *_BLOCK, "registersPerThread")
"""Columns of the tables of work that are read where they are there."""

_MEMORY = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device Static", 6: "Managed Static"}
"""Kinds of memory by the numbers of the export, as Kineto writes them."""


def detail_columns(frame: pl.DataFrame) -> list[pl.Expr]:
    """The columns of DETAIL_SCHEMA; null where the export does not say them."""
    found = {
        "bytes": _detail_number("bytes"),
        "memory": pl.concat_str(_memory("srcKind"), pl.lit(" -> "), _memory("dstKind")),
        "grid": _list(_GRID),
        "block": _list(_BLOCK),
        "registers": _detail_number("registersPerThread"),
    }
    needed = {
        "bytes": ("bytes",),
        "memory": ("srcKind", "dstKind"),
        "grid": _GRID,
        "block": _BLOCK,
        "registers": ("registersPerThread",),
    }
    return [
        (found[name] if name in found and set(needed[name]) <= set(frame.columns) else pl.lit(None))
        .cast(dtype, strict=False)
        .alias(name)
        for name, dtype in DETAIL_SCHEMA.items()
    ]


def _detail_number(column: str) -> pl.Expr:
    return pl.when(pl.col(column) >= 0).then(pl.col(column))


def _memory(column: str) -> pl.Expr:
    return pl.col(column).replace_strict(_MEMORY, default=None, return_dtype=pl.String)


def _list(columns: tuple[str, ...]) -> pl.Expr:
    told = pl.all_horizontal(pl.col(columns) != NO_NUMBER)
    return pl.when(told).then(pl.format("[{}, {}, {}]", *columns))


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
    written = _parsed(ranges["name"].unique())
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


def _parsed(names: pl.Series) -> pl.DataFrame:
    """The names that emit_nvtx wrote: name, operator, sequence, shapes (JSON text), is_operator."""
    parts = (
        names.to_frame()
        .with_columns(pl.col("name").cast(pl.String).str.slice(0, _LONGEST).str.extract_groups(_WRITTEN).alias("parts"))
        .unnest("parts")
    )
    said = [pl.col(part).is_not_null() for part in ("sequence", "shapes", "inputs")]
    return parts.filter(pl.any_horizontal(*said, pl.col("op_id").is_not_null())).select(
        "name",
        "operator",
        pl.col("sequence").cast(pl.Int64),
        "shapes",
        (pl.any_horizontal(*said) | pl.col("operator").str.contains(_OPERATOR)).alias("is_operator"),
    )


# An SQLite export that gzip compressed, unpacked into a temporary file: SQLite reads pages in any order.


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


_PUSH_POP, _START_END = (59, 70), (60, 71)
"""Types of the events that are ranges, with plain and with extended payload."""
_UNTIMED = "rows without a time"
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


def read_nsys_sqlite(path: Path) -> TraceTable:
    """The TraceTable of an SQLite export. Raises InputError where it is none, or lacks CUDA activity."""
    return _read(SqliteTables(path))


def read_packed_sqlite(path: Path) -> TraceTable:
    """The TraceTable of an SQLite export that gzip compressed, through a temporary file."""
    with unpacked(path) as sqlite:
        return _read(SqliteTables(sqlite, named=path))


def read_nsys_parquet(path: Path) -> TraceTable:
    """The TraceTable of a folder made by `nsys export --type parquetdir`."""
    return _read(ParquetTables(path))


def read_nsys_report(path: Path) -> TraceTable:
    """The TraceTable of a report or a raw capture, which Nsight Systems on this machine exports."""
    with exported(path) as sqlite:
        return _read(SqliteTables(sqlite, named=path))


def is_nsys_report(path: Path, head: bytes) -> bool:
    """Whether a file is a report (`.nsys-rep`) or a raw capture (`.qdstrm`) that nsys must export first."""
    return path.suffix in (".nsys-rep", ".qdrep", ".qdstrm") or head.startswith((b"NSYS", b"QDSTRM"))


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
    with tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
        copy, report, sqlite = (Path(folder, f"capture{suffix}") for suffix in (".qdstrm", ".nsys-rep", ".sqlite"))
        shutil.copyfile(path, copy if raw else report)
        try:
            if importer is not None:
                import_stream(importer, copy, report)
            export_report(nsys, report, sqlite)
        except StepscopeError as error:
            raise InputError(f"{path}: nsys cannot export this {'capture' if raw else 'report'}: {error}") from None
        yield sqlite


def _read(tables: Tables) -> TraceTable:
    if not tables.columns("StringIds") and not tables.columns("NVTX_EVENTS"):
        raise InputError(f"{tables.path}: not an export of Nsight Systems (it has no table StringIds)")
    strings = _strings(tables)
    counts = _Counts()
    calls = _calls(tables, strings, counts)
    work = _work(tables, strings, counts)
    remarks, traced = _remarks(tables), _traced(tables)
    if not work.height:
        raise InputError(f"{tables.path}: this export holds no CUDA activity: {_why_no_cuda(remarks, traced)}")
    last_ns = max(_end_ns(calls), _end_ns(work))
    ranges, operators = (_closed(frame, last_ns) for frame in _ranges(tables, strings, counts))
    return assemble(
        path=tables.path,
        profiler="Nsight Systems",
        work=work,
        calls=calls,
        ranges=ranges,
        operators=operators,
        devices=_devices(tables),
        other=counts.other,
        damage=counts.damage,
        recorder=_recorder(tables),
        remarks=remarks,
        traced=traced,
        threads=_threads(tables, strings, counts),
    )


@dataclass(frozen=True)
class _Counts:
    """Rows without a place, and rows that are damaged, as they are come upon."""

    other: dict[str, int] = field(default_factory=dict[str, int])
    copies: list[pl.DataFrame] = field(default_factory=list[pl.DataFrame])
    damage: Damage = field(default_factory=Damage)


def _threads(tables: Tables, strings: pl.DataFrame, counts: _Counts) -> dict[tuple[int, int], str]:
    """The names of threads, by process and thread as other frames number them."""
    if not _has(tables, "ThreadNames", ["nameId", "globalTid"]):
        return {}
    frame = _whole(tables, "ThreadNames", ["nameId", "globalTid"], [])
    named = frame.select(_process("globalTid").alias("process"), pl.col("globalTid").alias("thread")).with_columns(
        _looked_up(frame, "nameId", strings, "names of threads", counts).cast(pl.String).alias("name")
    )
    return {(process, thread): name for process, thread, name in named.drop_nulls().iter_rows()}


def _strings(tables: Tables) -> pl.DataFrame:
    if not {"id", "value"} <= set(tables.columns("StringIds")):
        return pl.DataFrame(schema={"id": pl.Int64, "value": pl.String})
    frame = _whole(tables, "StringIds", ["id"], ["value"]).unique("id", keep="first")
    return frame.with_columns(_decoded(frame["value"]))


def _whole(tables: Tables, table: str, numbers: list[str], texts: list[str]) -> pl.DataFrame:
    nothing = pl.DataFrame(schema=dict.fromkeys(numbers, pl.Int64) | dict.fromkeys(texts, pl.Binary))
    return pl.concat([nothing, *tables.batches(table, numbers, texts)])


def _decoded(column: pl.Series) -> pl.Series:
    """A column of bytes as text; bytes that are not UTF-8 become replacement characters. A value is decoded once."""
    if column.is_empty():  # of which `replace_strict` keeps the type
        return pl.Series(column.name, [], dtype=pl.String)
    distinct = column.unique()
    texts = pl.Series([utf8(value) for value in distinct.to_list()], dtype=pl.String)
    return column.replace_strict(distinct, texts, return_dtype=pl.String).alias(column.name)


def _looked_up(
    frame: pl.DataFrame,
    column: str,
    strings: pl.DataFrame,
    what: str,
    counts: _Counts,
    *,
    wanted: pl.Series | None = None,
) -> pl.Series:
    """The strings of ids, or the texts that stand in their place; an id without a string stays visible as its number,
    and no id is no string.

    Ids without a string are counted, as damage to `what`, where the string is `wanted`.
    """
    if frame[column].dtype == pl.Binary:
        return _decoded(frame[column]).alias("name")
    joined = frame.select(pl.col(column)).join(
        strings, left_on=column, right_on="id", how="left", maintain_order="left"
    )
    missing = joined.select(pl.col("value").is_null() & (pl.col(column) != NO_NUMBER)).to_series()
    add_count(counts.damage.nameless, what, int((missing if wanted is None else missing & wanted).sum()))
    return joined.select(
        pl.coalesce("value", pl.format("string {}", _number(column)), pl.lit("")).alias("name")
    ).to_series()


def _best_name(frame: pl.DataFrame, columns: list[str], strings: pl.DataFrame, counts: _Counts) -> pl.Series:
    """The name of each kernel by the first of these columns, of ids or of texts, that says it."""
    named = pl.Series("name", [None], dtype=pl.String).new_from_index(0, frame.height)
    for column in columns:
        if frame[column].dtype == pl.Binary:
            found = _decoded(frame[column])
        else:
            ids = frame.select(column)
            found = ids.join(strings, left_on=column, right_on="id", how="left", maintain_order="left")["value"]
        named = pl.select(pl.coalesce(named, found.replace("", None)).alias("name")).to_series()
        if not named.null_count():
            return named
    return named.fill_null(_looked_up(frame, columns[0], strings, WORK, counts, wanted=named.is_null()))


def _process(thread: str) -> pl.Expr:
    return (pl.col(thread) // 2**24) * 2**24


def _timed(
    tables: Tables, table: str, numbers: list[str], texts: list[str], *, what: str, counts: _Counts
) -> Iterator[pl.DataFrame]:
    """Batches of the rows that have a time. Rows that have none, or end before they begin, are counted."""
    may_be_open = what == RANGES
    needed = ("start",) if may_be_open else ("start", "end")
    for frame in tables.batches(table, numbers, texts):
        timed = frame
        if any(frame[column].min() == NO_NUMBER for column in needed):
            timed = frame.filter(*(pl.col(column) != NO_NUMBER for column in needed))
            add_count(counts.other, _UNTIMED, frame.height - timed.height)
        on_a_clock = [pl.col(column).is_between(-LARGEST_NS, LARGEST_NS, closed="none") for column in needed]
        recorded, timed = timed.height, timed.filter(*on_a_clock)
        add_count(counts.damage.untimed, what, recorded - timed.height)
        backwards = (pl.col("end") < pl.col("start")) & (pl.col("end") != NO_NUMBER)
        if may_be_open:  # a mark has no end
            backwards &= pl.col("eventType").is_in([*_PUSH_POP, *_START_END])
        add_count(counts.damage.backwards, what, int(timed.select(backwards.sum()).item()))
        yield timed


def _end_ns(frame: pl.DataFrame) -> int:
    end = (frame["start_ns"] + frame["duration_ns"]).max()
    return end if isinstance(end, int) else 0


def _calls(tables: Tables, strings: pl.DataFrame, counts: _Counts) -> pl.DataFrame:
    table = "CUPTI_ACTIVITY_KIND_RUNTIME"
    wanted = ["start", "end", "globalTid", "correlationId", "nameId"]
    if not _has(tables, table, wanted):
        return empty(CALL_SCHEMA)
    texts = [name for name in wanted if name == "nameId" and tables.is_text(table, name)]
    wanted = [name for name in wanted if name not in texts]
    parts = [
        frame.select(
            pl.col("start").alias("start_ns"),
            _duration(),
            _process("globalTid").alias("process"),
            pl.col("globalTid").alias("thread"),
            _looked_up(frame, "nameId", strings, CALLS, counts).cast(pl.Categorical),
            _number("correlationId").alias("correlation"),
            pl.lit(None, pl.Int64).alias("external"),
        )
        for frame in _timed(tables, table, wanted, texts, what=CALLS, counts=counts)
    ]
    return pl.concat([empty(CALL_SCHEMA), *parts])


def _work(tables: Tables, strings: pl.DataFrame, counts: _Counts) -> pl.DataFrame:
    parts = [
        _work_of(frame, kind, strings, counts)
        for table, kind in _WORK_TABLES.items()
        for frame in _work_batches(tables, table, counts)
    ]
    return pl.concat([empty(pl.Schema({**WORK_SCHEMA, **DETAIL_SCHEMA})), *parts])


def _work_batches(tables: Tables, table: str, counts: _Counts) -> Iterator[pl.DataFrame]:
    if not _has(tables, table, ["start", "end"]):
        return
    present = set(tables.columns(table))
    names = [name for name in (*_NAMES, "copyKind", "graphId") if name in present]
    texts = [name for name in names if name in _NAMES and tables.is_text(table, name)]
    optional = ["deviceId", "streamId", "correlationId", "globalPid", "graphNodeId"]
    wanted = ["start", "end", *(name for name in (*optional, *DETAILS) if name in present)]
    wanted += [name for name in names if name not in texts]
    absent = [pl.lit(NO_NUMBER, pl.Int64).alias(name) for name in optional if name not in present]
    for frame in _timed(tables, table, wanted, texts, what=WORK, counts=counts):
        if table == _COPIES and "bytes" in present:
            device = _number("deviceId").fill_null(-1) if "deviceId" in present else pl.lit(-1, pl.Int64)
            counts.copies.append(
                frame.select(pl.col("start").alias("start_ns"), _duration(), device.alias("device"), "bytes")
            )
        yield frame.with_columns(absent)


def _work_of(frame: pl.DataFrame, kind: str, strings: pl.DataFrame, counts: _Counts) -> pl.DataFrame:
    names = [name for name in _NAMES if name in frame.columns]
    if kind == "kernel" and names:
        name = _best_name(frame, names, strings, counts)
    elif kind == "memcpy" and "copyKind" in frame.columns:
        copies = pl.col("copyKind").replace_strict(_COPY_NAMES, default="other", return_dtype=pl.String)
        name = frame.select(pl.format("Memcpy {}", copies).alias("name")).to_series()
    elif kind == "graph" and "graphId" in frame.columns:
        name = frame.select(pl.format("CUDA graph {}", "graphId").alias("name")).to_series()
    else:
        name = pl.Series("name", [kind.capitalize()]).new_from_index(0, frame.height)
    return frame.select(
        pl.col("start").alias("start_ns"),
        _duration(),
        _number("deviceId").fill_null(-1).alias("device"),
        _number("streamId").fill_null(-1).alias("stream"),
        pl.lit(kind, KIND).alias("kind"),
        name.cast(pl.Categorical),
        _number("globalPid").alias("process"),
        _number("correlationId").alias("correlation"),
        pl.lit(None, pl.Int64).alias("external"),
        _number("graphNodeId").alias("graph_node"),
        *detail_columns(frame),
    )


def _ranges(tables: Tables, strings: pl.DataFrame, counts: _Counts) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Ranges of the user's, and operators that `emit_nvtx` wrote as ranges; what is neither is counted in `other`."""
    table = "NVTX_EVENTS"
    if not _has(tables, table, ["start", "end", "eventType", "globalTid"]):
        return empty(RANGE_SCHEMA), empty(OPERATOR_SCHEMA)
    present = set(tables.columns(table))
    numbers = [name for name in ("start", "end", "eventType", "globalTid", "textId") if name in present]
    parts: list[pl.DataFrame] = []
    operators: list[pl.DataFrame] = []
    others = 0
    texts = ["text"] if "text" in present else []
    for frame in _timed(tables, table, numbers, texts, what=RANGES, counts=counts):
        chosen = frame.filter(pl.col("eventType").is_in([*_PUSH_POP, *_START_END]))
        others += frame.height - chosen.height
        ranges, written = operators_apart(_ranges_of(chosen, strings, counts))
        parts.append(ranges)
        operators.append(written)
    add_count(counts.other, "NVTX marks and others", others)
    return pl.concat([empty(RANGE_SCHEMA), *parts]), pl.concat([empty(OPERATOR_SCHEMA), *operators])


def _ranges_of(frame: pl.DataFrame, strings: pl.DataFrame, counts: _Counts) -> pl.DataFrame:
    name = pl.Series("name", [""]).new_from_index(0, frame.height)
    if "text" in frame.columns:
        name = _decoded(frame["text"]).alias("name")
    if "textId" in frame.columns:
        looked_up = _looked_up(frame, "textId", strings, RANGES, counts, wanted=name == "")
        both = pl.DataFrame({"name": name, "registered": looked_up, "id": frame["textId"]})
        registered = pl.when((pl.col("name") == "") & (pl.col("id") != NO_NUMBER)).then("registered").otherwise("name")
        name = both.select(registered.alias("name")).to_series()
    return frame.select(
        pl.col("start").alias("start_ns"),
        pl.when(pl.col("end") != NO_NUMBER).then(_duration()).alias("duration_ns"),
        _process("globalTid").alias("process"),
        pl.col("globalTid").alias("thread"),
        name.cast(pl.Categorical),
        pl.col("eventType").is_in(_PUSH_POP).alias("nested"),
    )


def _closed(ranges: pl.DataFrame, last_ns: int) -> pl.DataFrame:
    """The ranges, with the last recorded moment as the end of those that were open when the capture stopped."""
    if not ranges["duration_ns"].null_count():
        return ranges
    last = pl.max_horizontal((pl.col("start_ns") + pl.col("duration_ns").fill_null(0)).max(), last_ns)
    return ranges.with_columns(pl.col("duration_ns").fill_null(last - pl.col("start_ns")).clip(lower_bound=0))


def _devices(tables: Tables) -> dict[int, str]:
    table = "TARGET_INFO_GPU"
    if not _has(tables, table, ["name"]):
        return {}
    numbers = [name for name in ("cuDevice", "id") if name in tables.columns(table)][:1]
    frame = _whole(tables, table, numbers, ["name"])
    names = _decoded(frame["name"]).to_list()
    found = dict(zip(frame[numbers[0]].to_list() if numbers else range(len(names)), names, strict=True))
    return {number: name for number, name in found.items() if number != NO_NUMBER}


def _remarks(tables: Tables) -> tuple[str, ...]:
    """What nsys itself warns of in this capture, each sentence once."""
    table = "DIAGNOSTIC_EVENT"
    if not _has(tables, table, ["severity", "text"]):
        return ()
    frame = _whole(tables, table, ["severity"], ["text"])
    grave = _decoded(frame.filter(pl.col("severity").is_in(_GRAVE))["text"])
    return tuple(dict.fromkeys(" ".join(printable(text).split())[:_LONGEST_REMARK] for text in grave.to_list() if text))


def _traced(tables: Tables) -> frozenset[str]:
    """What nsys was asked to trace (`cuda`, `nvtx`), where the capture says it."""
    return frozenset(
        kind
        for kind in ("cuda", "nvtx")
        if any(
            name.endswith(f"COLLECT_{kind.upper()}_TRACE") and value.lower() == "true"
            for name, value in _metadata(tables, "META_DATA_CAPTURE").items()
        )
    )


def _why_no_cuda(remarks: tuple[str, ...], traced: frozenset[str]) -> str:
    """What nsys says of CUDA, or else of anything; without a word of it, the advice that was not followed yet."""
    said = [remark for remark in remarks if "cuda" in remark.lower()] or list(remarks)
    if said:
        return "nsys says: " + " ".join(remark if remark.endswith((".", "?", "!")) else f"{remark}." for remark in said)
    if "cuda" in traced:
        return "nsys was asked to trace CUDA and saw none: look whether the process that it followed uses the GPU"
    return "capture with `nsys profile --trace=cuda,nvtx`"


def _metadata(tables: Tables, table: str) -> dict[str, str]:
    if not _has(tables, table, ["name", "value"]):
        return {}
    frame = _whole(tables, table, [], ["name", "value"])
    return dict(zip(_decoded(frame["name"]).to_list(), _decoded(frame["value"]).to_list(), strict=True))


def _recorder(tables: Tables) -> str | None:
    for table in ("META_DATA_CAPTURE", "META_DATA_EXPORT"):
        facts = _metadata(tables, table)
        for key in ("NSYS_VERSION", "EXPORT_NSYS_VERSION", "EXPORT_VERSION", "PRODUCT_VERSION"):
            if key in facts:
                return printable(f"nsys {facts[key]}"[:80])
    return None


def _has(tables: Tables, table: str, columns: list[str]) -> bool:
    return set(columns) <= set(tables.columns(table))


def _duration() -> pl.Expr:
    return (pl.col("end") - pl.col("start")).clip(lower_bound=0).alias("duration_ns")


def _number(column: str) -> pl.Expr:
    return pl.when(pl.col(column) != NO_NUMBER).then(pl.col(column))
