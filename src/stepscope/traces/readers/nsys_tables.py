"""Where the tables of an nsys export lie: in an SQLite file or in a folder of parquet files.

Which tables and columns exist differs between versions of nsys. An SQLite file is opened read-only and never locked.
"""

import itertools
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import adbc_driver_sqlite.dbapi
import polars as pl

from stepscope.core.bounded_file import check_no_pointer
from stepscope.core.errors import InputError, one_line

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
