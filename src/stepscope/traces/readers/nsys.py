"""Reads a capture of Nsight Systems: its SQLite export, its parquetdir export, or a report through `nsys export`.

Which tables and columns exist differs between versions of nsys, so they are probed. The process of a thread is its
globalTid without the lowest 24 bits; names are ids into StringIds.
"""

import contextlib
import copy
import ctypes
import fcntl
import gzip
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np
import polars as pl

from stepscope.core.errors import InputError, StepscopeError, one_line, printable
from stepscope.core.files import check_no_pointer
from stepscope.core.profilers import export_report, find_importer, find_nsys, how_to_get_nsys, import_stream
from stepscope.core.units import format_bytes
from stepscope.traces.readers.json_events import is_bomb
from stepscope.traces.readers.nsys_tables import (
    BATCH_ROWS,
    NO_NUMBER,
    Array,
    Column,
    Names,
    Narrowed,
    Piece,
    Rows,
    SqliteTables,
    Tables,
    decoded,
    piece_of,
    spelled,
)
from stepscope.traces.table import (
    CALL_SCHEMA,
    CALLS,
    DETAIL_SCHEMA,
    KIND,
    KINDS,
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
    parts = [_apart(some, written) for some in ranges.iter_slices(BATCH_ROWS)]  # a join takes twice the memory
    return pl.concat(part for part, _ in parts), pl.concat(part for _, part in parts)


def _apart(ranges: pl.DataFrame, written: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
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


# A parquetdir export: a folder with a file for each table.


_BROKEN_PARQUET = (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError)
"""Damage that polars does not foresee makes it panic."""


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
        return {spelled(name): dtype for name, dtype in schema.items()}

    def pieces(self, table: str, numbers: list[str], texts: list[str], names: Names) -> Iterator[Piece]:
        return (piece_of(frame, names) for frame in self.frames(table, numbers, texts) if frame.height)

    def frames(
        self, table: str, numbers: list[str], texts: list[str], after: int | None = None
    ) -> Iterator[pl.DataFrame]:
        try:
            schema = self._schema(table)
            scan = pl.scan_parquet(self._files[table.casefold()]).rename(spelled)
            scan = scan.select(
                *(_integers(name, schema[name]).fill_null(NO_NUMBER) for name in numbers),
                *(_bytes(name, schema[name]).fill_null(b"") for name in texts),
            )
            with _panics_unheard():
                frame = scan.collect()
            yield frame.with_columns(decoded(frame[name]) for name in texts)
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


def _integers(name: str, dtype: pl.DataType) -> pl.Expr:
    """The column as signed 64-bit integers, as SQLite holds them: ids of threads use all 64 bits."""
    return pl.col(name).reinterpret(signed=True) if dtype == pl.UInt64 else pl.col(name).cast(pl.Int64)


def _bytes(name: str, dtype: pl.DataType) -> pl.Expr:
    return pl.col(name) if dtype == pl.Binary else pl.col(name).cast(pl.String).cast(pl.Binary)


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


def read_nsys(path: Path, head: bytes, *, launch_sizes: bool = True) -> TraceTable | None:
    """The TraceTable of an export (SQLite, also in gzip, or a parquetdir) or of a report, which nsys exports here.

    launch_sizes: whether to read the grid, block and registers of kernels, which take a third of the time.

    None where the file, which begins with `head`, is none of these. Raises InputError where it lacks CUDA activity.
    """
    if path.is_dir():
        return _Reader(ParquetTables(path), launch_sizes).table()
    if head.startswith(SQLITE):
        return _Reader(_sqlite(path), launch_sizes).table()
    if path.suffix in (".nsys-rep", ".qdrep", ".qdstrm") or head.startswith((b"NSYS", b"QDSTRM")):
        database = exported(path)
    elif head.startswith(b"\x1f\x8b") and _holds_sqlite(path):
        database = unpacked(path)
    else:
        return None
    with database as sqlite:
        return _Reader(_sqlite(sqlite, named=path), launch_sizes).table()


def _sqlite(path: Path, named: Path | None = None) -> SqliteTables:
    """The tables of an SQLite file. Raises InputError, naming `named`, where it is not whole."""
    for ending in ("-wal", "-journal"):
        beside = path.with_name(path.name + ending)
        if beside.exists() and beside.stat().st_size:  # it holds rows that a reader who locks nothing cannot see
            raise InputError(
                f"{path}: {beside.name} lies beside it, so it is still being written, or its writer was "
                "interrupted: wait, or export it again"
            )
    # SQLite itself misses a page only where it needs it: a table cut short can look like a small one.
    with path.open("rb") as file:
        header = file.read(100)
    page_bytes = int.from_bytes(header[16:18]) if header[16:18] != b"\x00\x01" else 1 << 16
    stated = page_bytes * int.from_bytes(header[28:32])
    # The number of pages counts only where the last writer knew of it: it then left the counter of changes twice.
    if len(header) == 100 and header[24:28] == header[92:96] and path.stat().st_size < stated:
        raise InputError(
            f"{named or path}: {path.stat().st_size} bytes of {stated}: this database is truncated; copy or export it "
            "again"
        )
    return SqliteTables(path, named)


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
        self._details, self._all = DETAILS if launch_sizes else _OF_COPIES, launch_sizes
        self._other: dict[str, int] = {}
        self._damage = Damage()
        self._names = Names()
        strings = pl.DataFrame(schema={"id": pl.Int64, "value": pl.Categorical()})
        if self._has("StringIds", "id", "value"):
            strings = self._whole("StringIds", ["id"], ["value"]).unique("id", keep="first").sort("id")
        self._ids: Array = strings["id"].to_numpy()
        first = self._names.add(strings["value"])
        self._strings = np.append(np.arange(first, first + len(self._ids)), _NONE)
        """The number of each id's string, and last that of none."""
        self._said = np.where(self._names.are_empty(self._strings[:-1]), _NONE, self._strings[:-1])
        self._said = np.append(self._said, _NONE)

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
        nothing = pl.DataFrame(schema=dict.fromkeys(numbers, pl.Int64) | dict.fromkeys(texts, pl.Categorical()))
        return pl.concat([nothing, *self._tables.frames(table, numbers, texts)])

    def _timed(self, table: str, numbers: list[str], texts: list[str], what: str) -> Iterator[tuple[Piece, Array]]:
        """The rows that have a time, and how long they last. Rows that have none, or end before they begin, are
        counted."""
        for recorded in self._tables.pieces(table, numbers, texts, self._names):
            piece, start, end = recorded, recorded.array("start"), recorded.array("end")
            needed = (start,) if what == RANGES else (start, end)
            if any(one.min() <= -LARGEST_NS or one.max() >= LARGEST_NS for one in needed):
                known = np.logical_and.reduce([one != NO_NUMBER for one in needed])
                on_a_clock = np.logical_and.reduce([(one > -LARGEST_NS) & (one < LARGEST_NS) for one in needed])
                piece = recorded.filter(on_a_clock)
                add_count(self._other, _UNTIMED, recorded.height - int(known.sum()))
                add_count(self._damage.untimed, what, int(known.sum()) - piece.height)
                start, end = piece.array("start"), piece.array("end")
            backwards = end < start
            if any_backwards := backwards.any():
                counted = backwards & (end != NO_NUMBER)
                if what == RANGES:  # a mark has no end
                    counted &= np.isin(piece.array("eventType"), [*_PUSH_POP, *_START_END])
                add_count(self._damage.backwards, what, int(counted.sum()))
            if piece.height:
                lasts = end - start
                yield piece, np.maximum(lasts, 0) if any_backwards else lasts

    def _threads(self) -> dict[tuple[int, int], str]:
        """The names of threads, by process and thread as other frames number them."""
        if not self._has("ThreadNames", "nameId", "globalTid"):
            return {}
        frame = self._whole("ThreadNames", ["nameId", "globalTid"], [])
        names = self._names.named(self._looked_up(frame["nameId"].to_numpy(), "names of threads"))
        named = frame.select((pl.col("globalTid") & _OF_PROCESS).alias("process"), "globalTid", names.alias("name"))
        return {(process, thread): name for process, thread, name in named.rows()}

    def _looked_up(self, ids: Array, what: str, *, wanted: Array | None = None) -> Array:
        """The names of ids; an id without a string stays visible as its number, and no id is no string.

        Ids without a string are counted, as damage to `what`, where the string is `wanted`.
        """
        found = self._of_ids(ids, self._strings)
        if found.min() == _NONE:
            missing = found == _NONE
            found[missing] = self._names.made(ids[missing], lambda one: "" if one == NO_NUMBER else f"string {one}")
            missing &= ids != NO_NUMBER
            add_count(self._damage.nameless, what, int((missing if wanted is None else missing & wanted).sum()))
        return found

    def _of_ids(self, ids: Array, strings: Array) -> Array:
        """The string of each id, or _NONE."""
        known = self._ids
        if not len(known):
            return np.full(len(ids), _NONE)
        low, high = int(known[0]), int(known[-1])
        if high - low + 1 == len(known):  # numbered without gaps
            at = (
                ids - low
                if low <= ids.min() and ids.max() <= high
                else np.where((ids < low) | (ids > high), len(known), ids - low)
            )
        else:
            at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
            at = np.where(known[at] == ids, at, len(known))
        return strings[at]

    def _calls(self) -> pl.DataFrame:
        table, numbers = "CUPTI_ACTIVITY_KIND_RUNTIME", ["start", "end", "globalTid", "correlationId"]
        if not self._has(table, *numbers, "nameId"):
            return empty(CALL_SCHEMA)
        texts = ["nameId"] if self._tables.is_text(table, "nameId") else []
        if not texts:
            numbers.append("nameId")
        rows = Rows(CALL_SCHEMA, self._series)
        for piece, lasts in self._timed(table, numbers, texts, CALLS):
            named = piece.array("nameId")
            rows.add(
                piece.height,
                {
                    "start_ns": piece.columns["start"],
                    "duration_ns": lasts,
                    "process": piece.columns["globalTid"] & _OF_PROCESS,
                    "thread": piece.columns["globalTid"],
                    "name": named if texts else self._looked_up(named, CALLS),
                    "correlation": piece.columns["correlationId"],
                },
            )
        return self._kept(rows)

    def _kept(self, rows: Rows) -> pl.DataFrame:
        """The rows as a frame, or as what answers like one and takes less."""
        if give_back := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc alone, which keeps what is freed
            give_back(0)
        return rows.frame() if self._all else cast("pl.DataFrame", rows)

    def _series(self, column: Array, name: str, dtype: pl.DataType) -> pl.Series:
        if dtype == pl.Categorical:
            return self._names.named(column)
        if dtype == KIND:
            return pl.Series(KINDS, dtype=KIND).gather(pl.Series(column))
        series = pl.Series(column)
        return series.set(series == NO_NUMBER, None) if name != "thread" and column.min() == NO_NUMBER else series

    def _work(self) -> pl.DataFrame:
        rows, details = Rows(WORK_SCHEMA, self._series), list[tuple[int, pl.DataFrame]]()
        for table, kind in _WORK_TABLES.items():
            if self._has(table, "start", "end"):
                details += self._read_work(table, kind, rows)
        if rows.height > _MANY and not self._all:
            return cast("pl.DataFrame", _with_details(rows, details))
        made: dict[str, pl.Series] = {}
        for name in DETAIL_SCHEMA:
            if any(name in part.columns for _, part in details):
                made[name] = pl.concat([_detail(part, name, height) for height, part in details], rechunk=True)
        return rows.frame(made)

    def _read_work(self, table: str, kind: str, rows: Rows) -> list[tuple[int, pl.DataFrame]]:
        """Add the work of one table. Of names the best column is read alone; the others, too, where it lacks some.

        Returns what is said beside, a stretch of rows at a time: raw, it takes several times the memory.
        """
        names = [name for name in _NAMES if name in self._tables.columns(table)]
        before, counts = rows.height, copy.deepcopy((self._other, self._damage))
        for some in (names[:1], names):
            raw, details = Rows(pl.Schema(), self._series), list[tuple[int, pl.DataFrame]]()
            for piece, lasts in self._work_pieces(table, some):
                named = self._names_of_work(piece, kind, some, are_all=some == names)
                if named is None:
                    self._other, self._damage = copy.deepcopy(counts)
                    rows.cut(before)
                    break
                get = piece.columns.get
                rows.add(
                    piece.height,
                    {
                        "start_ns": piece.columns["start"],
                        "duration_ns": lasts,
                        "device": _number_or(get("deviceId", NO_NUMBER), -1),
                        "stream": _number_or(get("streamId", NO_NUMBER), -1),
                        "kind": KINDS.index(kind),
                        "name": named,
                        "process": get("globalPid", NO_NUMBER),
                        "correlation": get("correlationId", NO_NUMBER),
                        "graph_node": get("graphNodeId", NO_NUMBER),
                    },
                )
                raw.add(piece.height, {name: column for name, column in piece.columns.items() if name in self._details})
                if raw.height >= BATCH_ROWS:
                    details.append(_details_of(raw))
                    raw = Rows(pl.Schema(), self._series)
            else:
                return [*details, _details_of(raw)]
        raise AssertionError("the second reading has all names")

    def _work_pieces(self, table: str, names: list[str]) -> Iterator[tuple[Piece, Array]]:
        present = self._tables.columns(table)
        texts = [name for name in names if self._tables.is_text(table, name)]
        optional = ("deviceId", "streamId", "correlationId", "globalPid", "graphNodeId")
        wanted = (*optional, *self._details, *names, "copyKind", "graphId")
        numbers = ["start", "end", *(name for name in wanted if name in present and name not in texts)]
        self._as_texts = texts
        return self._timed(table, numbers, texts, WORK)

    def _names_of_work(self, piece: Piece, kind: str, columns: list[str], are_all: bool) -> Column | None:
        """The names of these rows; None where these columns lack some and are not all that there are."""
        if kind == "kernel" and columns:
            named = np.full(piece.height, _NONE)
            for column in columns:  # the name of each kernel by the first of these columns that says it
                names = piece.array(column)
                if column in self._as_texts:
                    names = np.where(self._names.are_empty(names), _NONE, names)
                else:
                    names = self._of_ids(names, self._said)
                named = np.where(named == _NONE, names, named) if column != columns[0] else names
                if named.min() != _NONE:
                    return named
            if not are_all:
                return None
            first, unnamed = piece.array(columns[0]), named == _NONE
            rest = first if columns[0] in self._as_texts else self._looked_up(first, WORK, wanted=unnamed)
            return np.where(unnamed, rest, named)
        if kind == "memcpy" and "copyKind" in piece.columns:
            return self._names.made(piece.array("copyKind"), lambda one: f"Memcpy {_COPY_NAMES.get(one, 'other')}")
        if kind == "graph" and "graphId" in piece.columns:
            return self._names.made(piece.array("graphId"), lambda one: f"CUDA graph {one}")
        return int(self._names.made(np.zeros(1, np.int64), lambda _: kind.capitalize())[0])

    def _ranges(self) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Ranges of the user's, and operators that `emit_nvtx` wrote as ranges; what is neither is counted."""
        table, numbers = "NVTX_EVENTS", ["start", "end", "eventType", "globalTid"]
        if not self._has(table, *numbers):
            return empty(RANGE_SCHEMA), empty(OPERATOR_SCHEMA)
        if self._has(table, "textId"):
            numbers.append("textId")
        texts = ["text"] if self._has(table, "text") else []
        rows = Rows(RANGE_SCHEMA, self._series)
        for recorded, lasted in self._timed(table, numbers, texts, RANGES):
            piece, lasts = recorded, lasted
            chosen = np.isin(piece.array("eventType"), [*_PUSH_POP, *_START_END])
            if not chosen.all():
                add_count(self._other, "NVTX marks and others", int((~chosen).sum()))
                piece, lasts = piece.filter(chosen), lasts[chosen]
            if not piece.height:
                continue
            end, kinds = piece.array("end"), piece.array("eventType")
            rows.add(
                piece.height,
                {
                    "start_ns": piece.columns["start"],
                    "duration_ns": np.where(end == NO_NUMBER, NO_NUMBER, lasts) if end.min() == NO_NUMBER else lasts,
                    "process": piece.columns["globalTid"] & _OF_PROCESS,
                    "thread": piece.columns["globalTid"],
                    "name": self._names_of_ranges(piece),
                    "nested": np.isin(kinds, _PUSH_POP),
                },
            )
        return operators_apart(self._kept(rows))

    def _names_of_ranges(self, piece: Piece) -> Array:
        empty_name = self._names.empty
        name = piece.array("text") if "text" in piece.columns else np.full(piece.height, empty_name)
        if "textId" not in piece.columns:
            return name
        ids = piece.array("textId")
        unsaid = self._names.are_empty(name) & (ids != NO_NUMBER) if ids.max() != NO_NUMBER else np.zeros(1, bool)
        if not unsaid.any():
            return name
        return np.where(unsaid, self._looked_up(ids, RANGES, wanted=unsaid), name)

    def _devices(self) -> dict[int, str]:
        table = "TARGET_INFO_GPU"
        if not self._has(table, "name"):
            return {}
        numbers = [name for name in ("cuDevice", "id") if self._has(table, name)][:1]
        frame = self._whole(table, numbers, ["name"])
        names = frame["name"].to_list()
        devices = dict(zip(frame[numbers[0]].to_list() if numbers else range(len(names)), names, strict=True))
        return {number: name for number, name in devices.items() if number != NO_NUMBER}

    def _remarks(self) -> tuple[str, ...]:
        """What nsys itself warns of in this capture, each sentence once."""
        if not self._has("DIAGNOSTIC_EVENT", "severity", "text"):
            return ()
        frame = self._whole("DIAGNOSTIC_EVENT", ["severity"], ["text"])
        grave = frame.filter(pl.col("severity").is_in(_GRAVE))["text"].to_list()
        return tuple(dict.fromkeys(" ".join(printable(text).split())[:_LONGEST_REMARK] for text in grave if text))

    def _metadata(self, table: str) -> dict[str, str]:
        if not self._has(table, "name", "value"):
            return {}
        frame = self._whole(table, [], ["name", "value"])
        return dict(zip(frame["name"].to_list(), frame["value"].to_list(), strict=True))

    def _recorder(self) -> str | None:
        for table in ("META_DATA_CAPTURE", "META_DATA_EXPORT"):
            facts = self._metadata(table)
            for key in ("NSYS_VERSION", "EXPORT_NSYS_VERSION", "EXPORT_VERSION", "PRODUCT_VERSION"):
                if key in facts:
                    return printable(f"nsys {facts[key]}"[:80])
        return None


def _details_of(rows: Rows) -> tuple[int, pl.DataFrame]:
    """How many rows these are, and the columns of DETAIL_SCHEMA that the export says of them."""
    columns = {name: pl.Series(np.broadcast_to(rows.numbers(name), rows.height)) for name in DETAILS if rows.has(name)}
    return rows.height, pl.DataFrame(detail_columns(pl.DataFrame(columns)))


def _detail(part: pl.DataFrame, name: str, height: int) -> pl.Series:
    """A column of DETAIL_SCHEMA; null where the part has none."""
    return (
        part[name] if name in part.columns else pl.Series(name, [None], DETAIL_SCHEMA[name]).new_from_index(0, height)
    )


def _with_details(rows: Rows, details: list[tuple[int, pl.DataFrame]]) -> Rows:
    """The rows of work with what is said beside, which a stretch at a time is held narrow, too."""
    narrow, first = Narrowed(), 0
    for height, part in details:
        if height:
            heights = rows.heights(first, first + height)
            narrow.add(pl.DataFrame([_detail(part, name, height) for name in DETAIL_SCHEMA]), heights)
        first += height
    return narrow.beside(rows)


def _closed(ranges: pl.DataFrame, last_ns: int) -> pl.DataFrame:
    """The ranges, with the last recorded moment as the end of those that were open when the capture stopped."""
    if not ranges["duration_ns"].null_count():
        return ranges
    last = pl.max_horizontal((pl.col("start_ns") + pl.col("duration_ns").fill_null(0)).max(), last_ns)
    return ranges.with_columns(pl.col("duration_ns").fill_null(last - pl.col("start_ns")).clip(lower_bound=0))


def _number_or(numbers: Column, default: int) -> Column:
    """The numbers of a column, the default where there are none."""
    if isinstance(numbers, int):
        return default if numbers == NO_NUMBER else numbers
    return np.where(numbers == NO_NUMBER, default, numbers) if numbers.min() == NO_NUMBER else numbers


def _bounds(numbers: pl.Series) -> tuple[int, int]:
    """The least and the largest of whole numbers; 0 where there are none."""
    return cast("int", numbers.min() or 0), cast("int", numbers.max() or 0)


_MANY = 1 << 20
"""Rows of work from which on they, too, are held narrow: it costs time, and spares 50 MB a million."""
_NONE = -1
"""The number of no name."""
_OF_PROCESS = -(2**24)
"""The bits of a thread's number that are its process's."""
