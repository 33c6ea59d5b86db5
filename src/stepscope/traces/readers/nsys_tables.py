"""The tables of an nsys export: an SQLite file, or a folder of parquet files, read piece by piece into columns.

Which tables and columns exist differs between versions of nsys. An SQLite file is opened read-only and never locked.
The pages of its large tables are decoded here, in a quarter of the time that SQLite takes:
https://www.sqlite.org/fileformat.html says what a page holds. Only what nearly all rows are is decoded: numbers and
short texts in a table without a key of its own. SQLite reads the rest.
"""

import contextlib
import ctypes
import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import adbc_driver_sqlite.dbapi
import msgspec
import numpy as np
import polars as pl

from stepscope.core.errors import InputError, StepscopeError, one_line

Array = np.ndarray[Any, Any]
Column = Array | int

NO_NUMBER = 1 - 2**63
"""Stands for null while numbers are read; no clock, thread or id comes near."""
BATCH_ROWS = 1 << 18
"""The most raw rows of an export that are held at once: they take several times the memory of what is kept."""
_LEAST_ROW_BYTES = 16
"""A row of two times, an id and a name takes more bytes than this in an export."""


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

    def pieces(self, table: str, numbers: list[str], texts: list[str], names: "Names") -> "Iterator[Piece]":
        """All rows. Numbers with NO_NUMBER for null, texts by their number among `names`."""
        ...

    def frames(
        self, table: str, numbers: list[str], texts: list[str], after: int | None = None
    ) -> Iterator[pl.DataFrame]:
        """All rows, or those of an SQLite file after this rowid. Numbers with NO_NUMBER for null; texts as categories,
        empty for null."""
        ...


class Piece(msgspec.Struct):
    """Some rows of a table. A column of one value is held as that value."""

    height: int
    columns: dict[str, Column]

    def array(self, column: str) -> Array:
        return np.broadcast_to(self.columns[column], self.height)

    def filter(self, mask: Array) -> "Piece":
        """The rows for which this holds."""
        columns = {name: one if isinstance(one, int) else one[mask] for name, one in self.columns.items()}
        return Piece(int(mask.sum()), columns)


class Names:
    """Names, numbered as they come. A name may have several numbers."""

    def __init__(self) -> None:
        self._all = pl.Series("name", dtype=pl.Categorical())
        self.empty = self.add(pl.Series([""], dtype=pl.Categorical()))

    def add(self, names: pl.Series) -> int:
        """The number of the first of these; the others follow it."""
        self._all = pl.concat([self._all, names.alias("name")], rechunk=True)  # else each look-up is slower
        return len(self._all) - len(names)

    def made(self, ids: Array, name: Callable[[int], str]) -> Array:
        """The number of each id's name."""
        different, at = np.unique(ids, return_inverse=True)
        return self.add(pl.Series([name(one) for one in different.tolist()], dtype=pl.Categorical())) + at

    def of(self, names: pl.Series) -> Array:
        """The number of each of these."""
        _, first, at = np.unique(names.to_physical().to_numpy(), return_index=True, return_inverse=True)
        return self.add(names.gather(first)) + at

    def are_empty(self, numbers: Array) -> Array:
        """Whether each is the number of a name without characters."""
        return (self._all == "").fill_null(True).to_numpy()[numbers]

    def named(self, numbers: Array) -> pl.Series:
        """The names with these numbers."""
        return self._all[pl.Series(numbers)]


def piece_of(frame: pl.DataFrame, names: Names) -> Piece:
    """The rows of a frame of numbers and names."""
    columns: dict[str, Column] = {
        column.name: names.of(column) if column.dtype == pl.Categorical else column.to_numpy()
        for column in frame.get_columns()
    }
    return Piece(frame.height, columns)


_PIECE = 1 << 15
"""The most rows that are held narrow together: the times of more lie too far apart for 32 bits."""
_ROOM_BYTES = 1 << 18
_STRETCH = 1 << 20
"""The most rows that are looked at at once where they are held narrow."""
_OFFSETS = (np.uint8, np.uint16, np.uint32)
_Held = tuple[int, Array | None]
"""The least number of a column, and how far each lies above it: None where all are the least."""
_Piece = tuple[int, dict[str, _Held]]
"""How many rows, and their columns."""


class _Room:
    """Memory of its own for what is kept of a column: among what is soon given back, it would keep that from the
    system, which more than doubles what a process takes."""

    def __init__(self) -> None:
        self._block, self._used = np.empty(0, np.uint8), 0

    def array(self, length: int, dtype: Any) -> Array:
        size = length * np.dtype(dtype).itemsize
        if self._used + size > len(self._block):
            self._block, self._used = np.frombuffer(mmap.mmap(-1, max(size, _ROOM_BYTES)), np.uint8), 0
        array = self._block[self._used : self._used + size].view(dtype)
        self._used += -(-size // 8) * 8
        return array


def _narrow(column: Column, room: _Room) -> _Held:
    """The column in as few bytes as its numbers need."""
    if isinstance(column, int):
        return column, None
    low, high = int(column.min()), int(column.max())
    if low == high:
        return low, None
    dtype = next((dtype for dtype in _OFFSETS if high - low <= np.iinfo(dtype).max), None)
    offsets = room.array(len(column), dtype or np.int64)
    low = low if dtype else 0
    np.subtract(column, low, out=offsets, casting="unsafe")
    return low, offsets


def _different(numbers: Array) -> Array:
    """The different ones among these, which are zero or more."""
    return np.flatnonzero(np.bincount(numbers)) if numbers.dtype.itemsize < 4 else np.unique(numbers).astype(np.int64)


class Rows:
    """Rows that come piece by piece, and take a third of a frame's memory: each piece's columns are held narrow.

    Once all are there it answers as the frame of these rows: a stretch at a time where a reader asks for some columns,
    some rows, or slices; else the whole is made.
    """

    def __init__(self, schema: pl.Schema, series: Callable[[Array, str, pl.DataType], pl.Series]) -> None:
        """`series` makes a column of the schema of numbers that are held."""
        self.schema, self.columns, self.height = schema, schema.names(), 0
        self.series = series
        self.pieces: list[_Piece] = []
        self._rooms = defaultdict[str, _Room](_Room)
        self._distinct = dict[str, pl.Series]()

    def add(self, height: int, columns: dict[str, Column]) -> None:
        """Add rows, with the same columns each time."""
        for first in range(0, height, _PIECE):
            last = min(first + _PIECE, height)
            some = {name: one if isinstance(one, int) else one[first:last] for name, one in columns.items()}
            held = {name: _narrow(one, self._rooms[name]) for name, one in some.items()}
            self.pieces.append((last - first, held))
        self.height += height

    def cut(self, height: int) -> None:
        """Forget all pieces after the first so many rows."""
        while self.height > height:
            self.height -= self.pieces.pop()[0]

    def has(self, name: str) -> bool:
        return any(name in columns for _, columns in self.pieces[:1])

    def numbers(self, name: str, pieces: list[_Piece] | None = None) -> Column:
        """A column, of some pieces or all; one value where it has no other. NO_NUMBER where there is none."""
        held = [(height, *columns.get(name, (NO_NUMBER, None))) for height, columns in pieces or self.pieces]
        if all(above is None and least == held[0][1] for _, least, above in held):
            return held[0][1] if held else NO_NUMBER
        few = isinstance(self.schema.get(name), pl.Categorical | pl.Enum)  # numbers that stand for texts
        column, at = np.empty(sum(height for height, _, _ in held), np.uint32 if few else np.int64), 0
        for height, least, above in held:
            part = column[at : at + height]
            if above is None:
                part[:] = least
            else:
                np.add(above, np.uint32(least) if few else np.int64(least), out=part)
            at += height
        return column

    def frame(self, made: dict[str, pl.Series] | None = None) -> pl.DataFrame:
        """All rows, which are held no more. `made`: columns that are there already."""
        frame = pl.DataFrame(made or {}) if made else pl.DataFrame(height=self.height)
        for name in self.schema:
            if name not in frame.columns:
                frame = frame.with_columns(self._column(name, self.pieces))
                for _, columns in self.pieces:
                    columns.pop(name, None)
        self.pieces = []
        return frame.select(*self.columns, *(made or {})) if self.height else pl.DataFrame(schema=self.schema)

    def _column(self, name: str, pieces: list[_Piece]) -> pl.Series | pl.Expr:
        column, dtype = self.numbers(name, pieces), self.schema[name]
        if not isinstance(column, int):
            return self.series(column, name, dtype).alias(name)
        # Held as one value: of a million rows, each such column saves 8 MB.
        one = None if column == NO_NUMBER else self.series(np.array([column]), name, dtype).item()
        return pl.lit(one, dtype).alias(name)

    def _made(self, names: list[str], pieces: list[_Piece]) -> pl.DataFrame:
        if not pieces:
            return self.clear().select(names)
        columns = [self._column(name, pieces) for name in names]
        if all(isinstance(column, pl.Series) for column in columns):
            return pl.DataFrame(columns)
        return pl.DataFrame(height=sum(height for height, _ in pieces)).with_columns(columns)

    # What a frame answers.

    def stretched(self, columns: list[str], make: Callable[[pl.DataFrame, int], pl.DataFrame]) -> "Rows":
        """The rows with the columns that are made of these columns of each stretch and the number of its first row."""
        made, first = Narrowed(), 0
        for some in self.select(columns).iter_slices(_STRETCH):
            made.add(make(some, first), self.heights(first, first + some.height))
            first += some.height
        return made.beside(self)

    def heights(self, first: int, last: int) -> list[int]:
        """The heights of the pieces of these rows."""
        return [height for height, _ in self._between(first, last)]

    def head(self, n: int) -> "Rows":
        """The first so many rows."""
        return self._view(self.schema, self._between(0, n))

    def _view(self, schema: pl.Schema, pieces: list[_Piece]) -> "Rows":
        some = Rows(schema, self.series)
        some.height, some.pieces = sum(height for height, _ in pieces), pieces
        return some

    def _between(self, first: int, last: int) -> list[_Piece]:
        """The rows from the first until before the last."""
        pieces, begin = list[_Piece](), 0
        for height, columns in self.pieces:
            low, high = max(first - begin, 0), min(last - begin, height)
            if low == 0 and high == height:
                pieces.append((height, columns))
            elif low < high:
                part = {name: (least, None if on is None else on[low:high]) for name, (least, on) in columns.items()}
                pieces.append((high - low, part))
            begin += height
        return pieces

    def iter_slices(self, n_rows: int = BATCH_ROWS) -> Iterator[pl.DataFrame]:
        """The rows in frames of about so many."""
        return (self._made(self.columns, pieces) for pieces in self._stretches(n_rows))

    def _stretches(self, rows: int) -> Iterator[list[_Piece]]:
        pieces, height = list[_Piece](), 0
        for piece in self.pieces:
            if pieces and height + piece[0] > rows:
                yield pieces
                pieces, height = [], 0
            pieces.append(piece)
            height += piece[0]
        if pieces:
            yield pieces

    def __getitem__(self, key: Any) -> Any:
        if not self.height:
            return self.clear()[key]
        if isinstance(key, str):
            return self._made([key], self.pieces).to_series()
        if isinstance(key, slice):
            first, last, _ = key.indices(self.height)
            return self._made(self.columns, self._between(first, last))
        # Only the pieces that hold one of these rows are made.
        rows, heights = pl.Series(key, dtype=pl.Int64).to_numpy(), np.array([height for height, _ in self.pieces])
        ends = np.cumsum(heights)
        piece = np.searchsorted(ends, rows, side="right")
        needed = np.flatnonzero(np.bincount(piece, minlength=len(ends)))
        moved = np.zeros(len(ends), np.int64)
        moved[needed] = np.cumsum(heights[needed]) - ends[needed]
        made = self._made(self.columns, [self.pieces[number] for number in needed.tolist()])
        return made[pl.Series(rows + moved[piece])]

    def distinct(self, name: str) -> pl.Series:
        """The different values of a column of texts."""
        if name not in self._distinct:
            held = [columns[name] for _, columns in self.pieces]
            numbers = [np.array([least]) if above is None else _different(above) + least for least, above in held]
            different = np.unique(np.concatenate([np.zeros(0, np.int64), *numbers]))
            self._distinct[name] = self.series(different, name, self.schema[name]).unique()
        return self._distinct[name]

    def item(self, row: int, column: str) -> Any:
        return self.select(column)[row : row + 1].item()

    def clear(self) -> pl.DataFrame:
        return pl.DataFrame(schema=self.schema)

    def select(self, *columns: Any, **more: Any) -> Any:
        """These columns, which are made when they are asked for in their turn."""
        asked: list[Any] = list(columns)
        if len(asked) == 1 and not isinstance(asked[0], str | pl.Expr | pl.Series):
            asked = list(asked[0])
        if not more and all(isinstance(name, str) for name in asked):
            return self._view(pl.Schema({name: self.schema[name] for name in asked}), self.pieces)
        needed = self._needed([*asked, *more.values()])
        return self._made(needed, self.pieces).select(*asked, **more)

    def _needed(self, asked: list[Any]) -> list[str]:
        """The columns of which these are made; all, where they do not say."""
        made = [one for one in asked if not isinstance(one, pl.Series)]
        roots = [[one] if isinstance(one, str) else one.meta.root_names() for one in made]
        return list(dict.fromkeys(chain(*roots))) if all(roots) else self.columns

    def filter(self, *predicates: Any) -> pl.DataFrame:
        """The rows for which these hold. Of a stretch without such rows, no other columns are made."""
        if not all(isinstance(one, pl.Expr) for one in predicates):
            return self._whole().filter(*predicates)
        holds, asked = pl.all_horizontal(*predicates).alias("holds"), self._needed(list(predicates))
        chosen = [self.clear()]
        for pieces in self._stretches(_STRETCH):
            mask = self._made(asked, pieces).select(holds).to_series().fill_null(False)
            if mask.any():
                chosen.append(self._made(self.columns, list(_chosen(pieces, mask.to_numpy()))))
        return pl.concat(chosen)

    def _whole(self) -> pl.DataFrame:
        return self._made(self.columns, self.pieces)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._whole(), name)


def _chosen(pieces: list[_Piece], mask: Array) -> Iterator[_Piece]:
    """The rows for which this holds: of what is held narrow, so that the others are never made."""
    first = 0
    for height, columns in pieces:
        here = mask[first : first + height]
        first += height
        if count := int(np.count_nonzero(here)):
            yield count, {name: (least, None if on is None else on[here]) for name, (least, on) in columns.items()}


class _Texts:
    """The different texts of a column of categories, numbered as they come; null is the first."""

    def __init__(self, dtype: pl.DataType) -> None:
        self.known = pl.Series([None], dtype=dtype)
        self._numbers = np.zeros(1, np.int64)
        """By the number that polars has for a text, and one more: its number here, or -1."""

    def numbers(self, column: pl.Series) -> Array:
        at = column.to_physical().cast(pl.Int64).fill_null(-1).to_numpy() + 1
        if (more := int(at.max()) + 1 - len(self._numbers)) > 0:
            self._numbers = np.append(self._numbers, np.full(more, -1))
        if (numbers := self._numbers[at]).min() >= 0:
            return numbers
        texts = column.unique().drop_nulls()
        places = texts.to_physical().cast(pl.Int64).to_numpy() + 1
        fresh = np.flatnonzero(self._numbers[places] < 0)
        self._numbers[places[fresh]] = np.arange(len(self.known), len(self.known) + len(fresh))
        self.known = pl.concat([self.known, texts[pl.Series(fresh)]], rechunk=True)
        return self._numbers[at]


class Narrowed:
    """Makes rows that are held narrow of frames of one schema, whose numbers are whole, or null."""

    def __init__(self) -> None:
        self._texts = dict[str, _Texts]()
        self.rows: Rows | None = None

    def add(self, frame: pl.DataFrame, heights: list[int] | None = None) -> None:
        """Add a frame, whose pieces have these heights."""
        if self.rows is None:
            self.rows = Rows(frame.schema, self._series)
            texts = {name: one for name, one in frame.schema.items() if isinstance(one, pl.Categorical | pl.Enum)}
            self._texts = {name: _Texts(dtype) for name, dtype in texts.items()}
        columns = {name: self._numbers(frame, name) for name in frame.columns}
        first = 0
        for height in heights or [frame.height]:
            some = {n: one if isinstance(one, int) else one[first : first + height] for n, one in columns.items()}
            self.rows.add(height, some)
            first += height
        if give_back := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc alone, which keeps what is freed
            give_back(0)

    def _numbers(self, frame: pl.DataFrame, name: str) -> Column:
        column = frame.select(name)
        if frame.schema[name] != pl.Boolean and column.estimated_size() < frame.height:  # one value
            column = column.head(1)
        if name in self._texts:
            numbers = self._texts[name].numbers(column.to_series())
        else:
            numbers = column.to_series().cast(pl.Int64).fill_null(NO_NUMBER).to_numpy()
        return numbers if len(numbers) == frame.height else int(numbers[0])

    def _series(self, column: Array, name: str, dtype: pl.DataType) -> pl.Series:
        if name in self._texts:
            return self._texts[name].known[pl.Series(column, dtype=pl.UInt32)]
        numbers = pl.Series(column)
        return (numbers.set(numbers == NO_NUMBER, None) if column.min() == NO_NUMBER else numbers).cast(dtype)

    def beside(self, rows: Rows) -> Rows:
        """These columns beside those of rows of the same pieces, in whose place they stand."""
        made = self.rows
        assert made is not None

        def series(column: Array, name: str, dtype: pl.DataType) -> pl.Series:
            return (made.series if name in made.schema else rows.series)(column, name, dtype)

        both = Rows(pl.Schema({**rows.schema, **made.schema}), series)
        pieces = zip(rows.pieces, made.pieces, strict=True)
        both.height, both.pieces = rows.height, [(height, {**old, **new}) for (height, old), (_, new) in pieces]
        return both


class SqliteTables:
    """The tables of an SQLite export."""

    def __init__(self, path: Path, named: Path | None = None) -> None:
        """`named`: what messages name, where it is not the file itself."""
        self.path, self._path = named or path, path
        self._bytes = path.stat().st_size
        self._errors = adbc_driver_sqlite.dbapi.Error
        self._uri = f"file:{quote(os.fsencode(path.resolve()))}?mode=ro&immutable=1"
        # Its types say nothing of options and parameters.
        self._connect: Callable[[str], Any] = adbc_driver_sqlite.dbapi.connect  # pyright: ignore[reportUnknownMemberType]
        self._connection: Any = None
        described = self._query(
            "SELECT CAST(m.name AS BLOB) AS t, CAST(c.name AS BLOB) AS c, m.rootpage AS root, c.pk, c.hidden"
            " FROM sqlite_master m, pragma_table_xinfo(m.name) c WHERE m.type = 'table' AND m.name NOT LIKE 'ENUM%'"
        )
        self._columns: dict[str, tuple[str, ...]] = {}
        self._roots: dict[str, int] = {}
        special = set[str]()
        if described.height:
            for table, column, root, key, hidden in described.iter_rows():
                name = utf8(table).casefold()
                self._roots[name] = root
                if key or hidden:  # a key may stand for the rowid, and what is generated has no place in a row
                    special.add(name)
                if not hidden:
                    self._columns[name] = (*self.columns(name), spelled(utf8(column)))
        self._roots = {name: root for name, root in self._roots.items() if name not in special}

    def columns(self, table: str) -> tuple[str, ...]:
        return self._columns.get(table.casefold(), ())

    def is_text(self, table: str, column: str) -> bool:
        kind = self._query(f'SELECT typeof("{column}") AS t FROM "{table}" WHERE "{column}" IS NOT NULL LIMIT 1')
        return bool(kind.height) and kind.item() == "text"

    def pieces(self, table: str, numbers: list[str], texts: list[str], names: Names) -> Iterator[Piece]:
        after = None
        if root := self._roots.get(table.casefold()):
            of_numbers, of_texts = ([self.columns(table).index(name) for name in some] for some in (numbers, texts))
            try:
                for piece, last in PlainTable(self._path, root, of_numbers, of_texts, names).pieces():
                    named = {self.columns(table)[int(place)]: column for place, column in piece.columns.items()}
                    yield Piece(piece.height, named)
                    after = last
            except NotPlainError:
                pass
            else:
                return
        for frame in self.frames(table, numbers, texts, after):
            yield piece_of(frame, names)

    def frames(
        self, table: str, numbers: list[str], texts: list[str], after: int | None = None
    ) -> Iterator[pl.DataFrame]:
        # Each extreme alone is one step to an end of the table; both in one query are a walk through all of it.
        extremes = f'(SELECT min(rowid) FROM "{table}") AS low, (SELECT max(rowid) FROM "{table}") AS high'
        bounds = self._query(f"SELECT ifnull(low, 0) AS low, ifnull(high, -1) AS high FROM (SELECT {extremes})")
        low, high = int(bounds.item(0, "low")), int(bounds.item(0, "high"))
        low = low if after is None else after + 1
        # Rows are numbered without gaps; a table where they are not is read at once, or most batches could be empty.
        step = BATCH_ROWS if high - low <= self._bytes // _LEAST_ROW_BYTES else high - low + 1
        for first in range(low, high + 1, step):
            stretch = f"{first} AND {min(first + step - 1, high)}"
            frame = self._rows(f'FROM "{table}" WHERE rowid BETWEEN {stretch}', numbers, texts)
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
        return frame.with_columns(pl.col(absent).fill_null(NO_NUMBER), *(decoded(frame[name]) for name in texts))

    def _query(self, query: str) -> pl.DataFrame:
        """The answer, in one chunk."""
        try:
            self._connection = self._connection or self._connect(self._uri)
            with self._connection.cursor() as cursor:
                cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(BATCH_ROWS)})
                cursor.execute(query)
                return pl.DataFrame(cursor.fetch_arrow())
        except (self._errors, pl.exceptions.PolarsError) as error:  # it reads on while polars takes the rows
            reason = one_line(error)
            raise InputError(f"{self.path}: cannot be read as an SQLite database: {reason}: export it again") from None


def spelled(column: str) -> str:
    """A column's name as readers ask for it."""
    return _SPELLED.get(column.casefold(), column)


def utf8(value: bytes | str | None) -> str:
    """Bytes decoded as UTF-8; invalid bytes become replacement characters."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else (value or "")


# The pages of an SQLite file.


_PAGES = 256
"""Pages that are decoded at once: what is made of them fits into a processor's second cache."""
_INTERIOR, _LEAF = 5, 13
_DEEPEST, _VARINT_BYTES = 20, 9
_SIZES = (0, 1, 2, 3, 4, 6, 8, 8, 0, 0)
"""Bytes of a number by its serial type. 8 and 9 are 0 and 1."""
_READ = NO_NUMBER - 1
"""Stands for a number that a row holds, where its type alone tells others."""
_WIDEST, _FEW_PLACES = 256, 6
"""The most bytes of a row that are held beside those of others; and the most places of a column that are read one after
the other."""
_SLOT_BITS, _MOST_LAYOUTS = 14, 1 << 12
_TO_SLOT = np.uint64(64 - _SLOT_BITS)
_NULL, _ZERO, _ONE, _FIRST_TEXT = 0, 8, 9, 12
_MASKS = np.array([(1 << 8 * size) - 1 for size in range(9)], np.uint64)
_MIX, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)


class NotPlainError(StepscopeError):
    """These rows are not all numbers and short texts, or the file is damaged."""


def _need(holds: object) -> None:
    if not holds:
        raise NotPlainError


class PlainTable:
    """A table of an SQLite file."""

    def __init__(self, path: Path, root: int, numbers: list[int], texts: list[int], names: Names) -> None:
        """`numbers`, `texts`: the places of the columns that are wanted."""
        self._path, self._root, self._numbers = path, root, numbers
        self._layouts = _Layouts(numbers, texts)
        self._texts = {place: _PageTexts(names) for place in texts}

    def pieces(self) -> Iterator[tuple[Piece, int]]:
        """All rows, the columns in the order of the table, and each piece's last rowid."""
        with self._path.open("rb", buffering=0) as file:
            head = file.read(100)
            self._page = int.from_bytes(head[16:18]) if head[16:18] != b"\x00\x01" else 1 << 16
            self._usable = self._page - head[20]
            _need(head[56:60] == b"\x00\x00\x00\x01" or not self._texts)  # texts in UTF-8
            leaves = self._leaves(file.fileno(), os.fstat(file.fileno()).st_size // self._page)
            # Behind the pages is room to look beyond the last.
            buffer = np.zeros((_PAGES + 1) * self._page + 8 * _VARINT_BYTES, np.uint8)
            for first in range(0, len(leaves), _PAGES):
                some = leaves[first : first + _PAGES]
                self._read(file.fileno(), some, buffer)
                try:
                    piece, rowid = self._decoded(buffer, len(some))
                except IndexError:  # a place outside of all pages
                    raise NotPlainError from None
                yield piece, rowid

    def _leaves(self, file: int, pages: int) -> Array:
        """The numbers of the table's leaves, in the order of rows."""
        level = np.array([self._root], np.int64)
        for _ in range(_DEEPEST):
            _need(level.min() > 0 and level.max() <= pages and len(level) <= pages)
            if os.pread(file, 1, (int(level[0]) - 1) * self._page) == bytes([_LEAF]):
                return level
            below: list[Array] = []
            for number in level.tolist():
                page = np.frombuffer(os.pread(file, self._page, (number - 1) * self._page), np.uint8)
                _need(number > 1 and len(page) == self._page and page[0] == _INTERIOR)
                cells = int(page[3]) << 8 | int(page[4])
                _need(12 + 2 * cells <= self._usable)
                at = page[12 : 12 + 2 * cells].view(">u2").astype(np.int64)
                _need(not cells or at.max() + 4 <= self._usable)
                at = np.append(at, 8)  # the last child stands in the page's head
                below.append(page[at[:, None] + np.arange(4)].view(">u4")[:, 0].astype(np.int64))
            level = np.concatenate(below)
        raise NotPlainError

    def _read(self, file: int, pages: Array, buffer: Array) -> None:
        """Put these pages into the buffer, one after the other."""
        bounds = [0, *(np.flatnonzero(np.diff(pages) != 1) + 1).tolist(), len(pages)]
        for first, last in pairwise(bounds):
            wanted = memoryview(buffer.data)[first * self._page : last * self._page]
            _need(os.preadv(file, [wanted], (int(pages[first]) - 1) * self._page) == len(wanted))

    def _decoded(self, buffer: Array, pages: int) -> tuple[Piece, int]:
        """The rows of these leaves, and the last rowid."""
        base = np.arange(pages, dtype=np.int64) * self._page
        _need((buffer[base] == _LEAF).all())
        cells = buffer[base + 3].astype(np.int64) << 8 | buffer[base + 4]
        _need(8 + 2 * int(cells.max()) <= self._usable and cells.min() > 0)
        height = int(cells.sum())
        page = np.repeat(base, cells)
        pointer = page + 8 + 2 * (np.arange(height, dtype=np.int64) - np.repeat(np.cumsum(cells) - cells, cells))
        row = page + (buffer[pointer].astype(np.int64) << 8 | buffer[pointer + 1])
        end = page + self._usable
        _need((row < end).all())
        rows, size, last = self._rows(buffer, row)
        _need(size.max() <= self._usable - 35)  # more overflows to other pages
        _need((rows.at + rows.first + size <= end).all())
        return Piece(height, self._columns(rows, size)), last

    def _rows(self, buffer: Array, row: Array) -> tuple["_RowBytes", Array, int]:
        """The bytes of rows from their heads on, their sizes, and the last rowid. Most rowids take as many bytes."""
        rows = _RowBytes(buffer, row, self._layouts.width)
        first = rows.read(0, "<u8", np.uint64)
        data = buffer[int(row[-1]) + 1 : int(row[-1]) + 1 + _VARINT_BYTES].tolist()
        rowid_bytes = next((place for place, byte in enumerate(data, 1) if byte < 128), _VARINT_BYTES)
        if rowid_bytes < 8:
            goes_on = int.from_bytes(b"\x80" * (rowid_bytes - 1), "little") << 8
            ends = np.uint64(0x80 << 8 * rowid_bytes | goes_on | 0x80)
            if ((first & ends) == np.uint64(goes_on)).all():
                rows.first = 1 + rowid_bytes
                return rows, (first & np.uint64(0x7F)).view(np.int64), _rowid(data)
        size, row = _varints(buffer, row)
        data = buffer[int(row[-1]) : int(row[-1]) + _VARINT_BYTES].tolist()
        return _RowBytes(buffer, _varints(buffer, row)[1], self._layouts.width), size, _rowid(data)

    def _columns(self, rows: "_RowBytes", size: Array) -> dict[str, Column]:
        """The wanted columns of rows of these sizes."""
        layouts, columns = self._layouts, dict[str, Column]()
        layout = layouts.of_rows(rows, size)
        for place in sorted({*self._numbers, *self._texts}):
            at = layouts.said("at", place, layout)
            if place in self._texts:
                columns[str(place)] = self._texts[place].codes(rows, at, layouts.said("size", place, layout))
                continue
            known = layouts.said("known", place, layout)
            if isinstance(known, int) and known != _READ:
                columns[str(place)] = known
                continue
            values = rows.numbers(at)
            values >>= layouts.said("shift", place, layout)
            columns[str(place)] = values if isinstance(known, int) else np.where(known == _READ, values, known)
        return columns


class _RowBytes:
    """The first bytes of rows side by side: columns are then read at equal distances, ten times as fast as each from
    its place."""

    def __init__(self, buffer: Array, at: Array, width: int) -> None:
        """`at`: where rows begin."""
        self.buffer, self.at, self.first = buffer, at, 0
        self.widen(width)

    def widen(self, width: int) -> None:
        """Hold so many bytes of each row."""
        places = np.ndarray((len(self.buffer) - width + 1,), f"V{width}", self.buffer.data, strides=(1,))
        self.width, self._bytes = width, places[self.at].view(np.uint8)

    def read(self, offset: int, dtype: str, to: type) -> Array:
        """What stands there in each row."""
        return np.ndarray(self.at.shape, dtype, self._bytes.data, offset, (self.width,)).astype(to)

    def numbers(self, at: Array | int, dtype: str = ">i8", to: type = np.int64) -> Array:
        """The eight bytes that stand there behind the first byte of each row's head, as a number."""
        different = [at] if isinstance(at, int) else np.flatnonzero(np.bincount(at)).tolist()
        if max(different) + self.first + 8 > self.width or len(different) > _FEW_PLACES:
            eight = np.ndarray((len(self.buffer) - 7,), dtype, self.buffer.data, strides=(1,))
            return eight[self.at + (self.first + at)].astype(to)
        values = self.read(self.first + different[0], dtype, to)
        for one in different[1:]:
            np.copyto(values, self.read(self.first + one, dtype, to), where=at == one)
        return values


class _Layouts:
    """How rows of a table are laid out: where each wanted column stands, by the types of its columns in a row's head.

    A table's rows have few layouts, which 64 bits made of the types tell apart.
    """

    def __init__(self, numbers: list[int], texts: list[int]) -> None:
        self._numbers, self._texts, self._last = numbers, texts, max([*numbers, *texts])
        self._most = self._last + 1 + 2 * len(texts)
        """Bytes of a head that are looked at: a long text's type takes two or three."""
        self.width = 8 * (4 + self._most // 8)
        self._known = _Numbered()
        self._said = defaultdict[tuple[str, int], list[int]](list)
        self._present: list[int] = []

    def of_rows(self, rows: _RowBytes, size: Array) -> Array:
        """The number of each row's layout."""
        head = rows.read(rows.first, "u1", np.uint8)
        _need(head.max() < 128 and head.min() > 0 and (head <= size).all())
        layout = self._known.of(self._key(rows, head), lambda at: self._add(rows, head, at))
        self._present = np.flatnonzero(np.bincount(layout)).tolist()
        _need((self.said("end", 0, layout) <= size).all())
        needed = rows.first + max(self._said["end", 0][one] for one in self._present) + 8
        if rows.width < needed <= _WIDEST:
            self.width = 8 * -(-needed // 8)
            rows.widen(self.width)
        return layout

    def _key(self, rows: _RowBytes, head: Array) -> Array:
        """64 bits made of each row's head: its size, behind which the values stand, and its types."""
        looked_at = np.minimum(head - np.uint8(1), self._most)
        key, least = head.astype(np.uint64) * _MIX, int(looked_at.min())
        for first in range(0, int(looked_at.max()), 8):
            word = rows.read(rows.first + 1 + first, "<u8", np.uint64)
            if least - first < 8:
                word &= _MASKS[np.clip(looked_at.astype(np.int64) - first, 0, 8)]
            key ^= word
            key *= _MIX
            key ^= key >> _HALF
        key *= _MIX
        return key

    def said(self, what: str, place: int, layout: Array) -> Array | int:
        """What each row's layout says; one number where all say the same."""
        column = self._said[what, place]
        different = {column[one] for one in self._present}
        return different.pop() if len(different) == 1 else np.array(column).take(layout)

    def _add(self, rows: _RowBytes, heads: Array, fresh: Array) -> Array:
        """Note the layouts of these rows, and give their numbers."""
        first = len(self._said["end", 0])
        _need(first + len(fresh) < _MOST_LAYOUTS)
        for row in fresh.tolist():
            at = int(rows.at[row]) + rows.first
            self._note(rows.buffer[at : at + int(heads[row])].tolist())
        return np.arange(first, first + len(fresh))

    def _note(self, head: list[int]) -> None:
        """Note the layout of rows with this head."""
        at, body = 1, head[0]
        for place in range(self._last + 1):
            kind, goes_on = 0, True
            while goes_on:
                _need(at < len(head) and at <= self._most)
                kind, goes_on, at = kind << 7 | head[at] & 127, head[at] >= 128, at + 1
            _need(kind not in {10, 11})
            size = (kind - 12) >> 1 if kind >= _FIRST_TEXT else _SIZES[kind]
            if place in self._texts:
                _need(kind == _NULL or kind >= _FIRST_TEXT)
                self._said["size", place].append(size)
            elif place in self._numbers:
                _need(kind < 10 and kind != 7)
                self._said["known", place].append({_NULL: NO_NUMBER, _ZERO: 0, _ONE: 1}.get(kind, _READ))
                self._said["shift", place].append(64 - 8 * (size or 8))
            self._said["at", place].append(body)
            body += size
        self._said["end", 0].append(body)


class _PageTexts:
    """The different texts of a column, with their numbers. They are told apart by 64 bits made of all their bytes."""

    def __init__(self, names: Names) -> None:
        self._names, self._known = names, _Numbered()

    def codes(self, rows: _RowBytes, at: Array | int, size: Array | int) -> Array:
        """The number of each text, which stands there in its row."""
        size = np.broadcast_to(size, rows.at.shape)
        keys = size.astype(np.uint64) * _MIX
        for done in range(0, int(size.max()), 8):
            word = rows.numbers(at + done, "<u8", np.uint64)
            word &= _MASKS[np.clip(size - done, 0, 8)]
            word ^= keys
            word *= _MIX
            word ^= word >> _HALF
            keys = np.where(size > done, word, keys)

        def add(fresh: Array) -> Array:
            begin = rows.at[fresh] + rows.first + (at if isinstance(at, int) else at[fresh])
            bounds = zip(begin.tolist(), (begin + size[fresh]).tolist(), strict=True)
            data = rows.buffer.data
            texts = decoded(pl.Series([bytes(data[low:high]) for low, high in bounds], dtype=pl.Binary))
            return self._names.add(texts) + np.arange(len(fresh))

        return self._known.of(keys, add)


class _Numbered:
    """Numbers of 64-bit keys."""

    def __init__(self) -> None:
        self._keys, self._numbers = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        self._slots = np.zeros(1 << _SLOT_BITS, np.int64)
        """By a key's highest bits where it stands, or another with these bits: a search takes several times as long."""

    def of(self, keys: Array, add: Callable[[Array], Array]) -> Array:
        """The number of each key. `add` gives those of new keys, by the places where they stand first."""
        place, known = self._places(keys)
        if not known.all():
            new = np.flatnonzero(~known)
            fresh, first = np.unique(keys[new], return_index=True)
            all_keys, numbers = np.append(self._keys, fresh), np.append(self._numbers, add(new[first]))
            order = np.argsort(all_keys)
            self._keys, self._numbers = all_keys[order], numbers[order]
            self._slots[self._keys >> _TO_SLOT] = np.arange(len(order))
            place, _ = self._places(keys)
        return self._numbers[place]

    def _places(self, keys: Array) -> tuple[Array, Array]:
        """Where each key stands, and whether it is known."""
        if not len(self._keys):
            return np.zeros(len(keys), np.int64), np.zeros(len(keys), bool)
        place = self._slots[keys >> _TO_SLOT]
        known = self._keys[place] == keys
        if not known.all():
            some = np.flatnonzero(~known)
            place[some] = np.minimum(np.searchsorted(self._keys, keys[some]), len(self._keys) - 1)
            known[some] = self._keys[place[some]] == keys[some]
        return place, known


def _varints(buffer: Array, at: Array) -> tuple[Array, Array]:
    """The numbers of variable length that begin there, and where each ends."""
    byte = buffer[at]
    value, at = byte.astype(np.int64) & 127, at + 1
    goes_on = byte >= 128
    for _ in range(_VARINT_BYTES - 1):
        if not goes_on.any():
            return value, at
        byte = buffer[at]
        value = np.where(goes_on, value << 7 | byte & 127, value)
        at = at + goes_on
        goes_on &= byte >= 128
    raise NotPlainError


def _rowid(data: list[int]) -> int:
    value = 0
    for byte in data[:-1]:
        value = value << 7 | byte & 127
        if byte < 128:
            return value
    raise NotPlainError  # a negative one, as the last of a table


def decoded(column: pl.Series) -> pl.Series:
    """A column of bytes as categories; bytes that are not UTF-8 become replacement characters."""
    try:
        return column.cast(pl.String).cast(pl.Categorical())
    except pl.exceptions.PolarsError:
        texts = [value.decode("utf-8", "replace") for value in column.to_list()]
        return pl.Series(column.name, texts, dtype=pl.Categorical())
