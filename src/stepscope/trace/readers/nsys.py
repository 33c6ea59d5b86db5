"""Reads a capture of Nsight Systems: its SQLite export, its parquetdir export, or a report through `nsys export`.

Which tables and columns exist differs between versions of nsys, so they are probed. The process of a thread is its
globalTid without the lowest 24 bits; names are ids into StringIds. The export is opened read-only and never locked.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import adbc_driver_sqlite.dbapi
import polars as pl

from stepscope.core.errors import InputError, one_line
from stepscope.core.nsight import find_nsys, how_to_get_nsys
from stepscope.trace.assemble import assemble
from stepscope.trace.table import (
    CALL_SCHEMA,
    KIND,
    OPERATOR_SCHEMA,
    RANGE_SCHEMA,
    WORK_SCHEMA,
    TraceTable,
    empty,
)

_PUSH_POP, _START_END = (59, 70), (60, 71)
"""Event types of ranges, with plain and with extended payload."""
_NO_NUMBER = -1
_BATCH_ROWS = 1 << 18
"""Raw rows of an export held at once: they take several times the room of what is kept of them."""
_WORK_TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "kernel",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "memcpy",
    "CUPTI_ACTIVITY_KIND_MEMSET": "memset",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "graph",
}
_COPY_NAMES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
_OPERATOR = re.compile(r"^(?P<name>[^,]+?), (?:seq = (?P<sequence>\d+)|op_id = \d+)")
"""How `torch.autograd.profiler.emit_nvtx` writes an operator: `aten::mm, seq = 12, op_id = 34`."""


class _Tables(Protocol):
    """Where the tables of an export lie."""

    path: Path

    def columns(self, table: str) -> tuple[str, ...]: ...

    def batches(self, table: str, numbers: list[str], texts: list[str]) -> Iterator[pl.DataFrame]: ...


def read_nsys_sqlite(path: Path, *, without_ranges: bool = False) -> TraceTable:
    """The TraceTable of an SQLite export. Raises InputError where it is none, or lacks CUDA activity or ranges."""
    return _read(_Sqlite(path), without_ranges=without_ranges)


def read_nsys_parquet(path: Path, *, without_ranges: bool = False) -> TraceTable:
    """The TraceTable of a folder made by `nsys export --type parquetdir`."""
    return _read(_Parquet(path), without_ranges=without_ranges)


def read_nsys_report(path: Path, *, without_ranges: bool = False) -> TraceTable:
    """The TraceTable of a `.nsys-rep`, exported by the nsys of this machine into a temporary file."""
    with _exported(path) as sqlite:
        return read_nsys_sqlite(sqlite, without_ranges=without_ranges)


def is_nsys_report(path: Path, head: bytes) -> bool:
    """Whether a file is a report (`.nsys-rep`) or a raw capture (`.qdstrm`) that nsys must export first."""
    return path.suffix in (".nsys-rep", ".qdrep", ".qdstrm") or head.startswith((b"NSYS", b"QDSTRM"))


@contextmanager
def _exported(path: Path) -> Iterator[Path]:
    nsys = find_nsys()
    if nsys is None:
        raise InputError(f"{path}: reading a report needs nsys for its export: {how_to_get_nsys()}")
    with tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
        report, sqlite = Path(folder) / "report.nsys-rep", Path(folder) / "report.sqlite"
        shutil.copyfile(path, report)  # some versions write beside the report they read
        command = [str(nsys), "export", "--type", "sqlite", "--force-overwrite", "true", "-o", str(sqlite), str(report)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode or not sqlite.exists():
            reason = one_line(Exception(done.stderr or done.stdout or f"exit code {done.returncode}"))
            raise InputError(f"{path}: nsys cannot export this report: {reason}")
        yield sqlite


class _Sqlite:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._errors = adbc_driver_sqlite.dbapi.Error
        self._uri = f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1"
        self._connect = adbc_driver_sqlite.dbapi.connect
        described = self._query(
            "SELECT m.name AS t, CAST(c.name AS BLOB) AS c FROM sqlite_master m, pragma_table_info(m.name) c"
            " WHERE m.type = 'table' AND m.name NOT LIKE 'ENUM%'"
        )
        self._columns: dict[str, tuple[str, ...]] = {}
        if described.height:
            for (table,), rows in described.group_by("t", maintain_order=True):
                names = [_utf8(name) for name in rows["c"].to_list()]
                self._columns[str(table)] = tuple(names)

    def columns(self, table: str) -> tuple[str, ...]:
        return self._columns.get(table, ())

    def batches(self, table: str, numbers: list[str], texts: list[str]) -> Iterator[pl.DataFrame]:
        """Numbers as integers, -1 for null; texts as bytes, empty for null, since the export promises no encoding."""
        wanted = [f'CAST(ifnull("{name}", {_NO_NUMBER}) AS INTEGER) AS "{name}"' for name in numbers]
        wanted += [f'CAST(ifnull("{name}", \'\') AS BLOB) AS "{name}"' for name in texts]
        bounds = self._query(f'SELECT ifnull(min(rowid), 0) AS low, ifnull(max(rowid), -1) AS high FROM "{table}"')
        low, high = int(bounds.item(0, "low")), int(bounds.item(0, "high"))
        count = self._query(f'SELECT count(*) AS n FROM "{table}"').item()
        # Rows are numbered without gaps; a file where they are not is read at once.
        step = _BATCH_ROWS if high - low <= 4 * count else high - low + 1
        for first in range(low, high + 1, step):
            where = f"WHERE rowid BETWEEN {first} AND {min(first + step - 1, high)}"
            frame = self._query(f'SELECT {", ".join(wanted)} FROM "{table}" {where}')
            if frame.height:
                yield frame

    def _query(self, query: str) -> pl.DataFrame:
        try:
            with self._connect(self._uri) as connection, connection.cursor() as cursor:
                cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": "65536"})
                cursor.execute(query)
                return pl.DataFrame(cursor.fetch_arrow())  # pyright: ignore[reportArgumentType]: the Arrow interface
        except self._errors as error:
            raise InputError(f"{self.path}: cannot be read as an SQLite database: {one_line(error)}") from None


class _Parquet:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = {file.stem: file for file in path.glob("*.parquet")}

    def columns(self, table: str) -> tuple[str, ...]:
        if table not in self._files:
            return ()
        try:
            return tuple(pl.read_parquet_schema(self._files[table]))
        except (pl.exceptions.PolarsError, OSError) as error:
            raise InputError(f"{self._files[table]}: cannot be read as parquet: {one_line(error)}") from None

    def batches(self, table: str, numbers: list[str], texts: list[str]) -> Iterator[pl.DataFrame]:
        try:
            scan = pl.scan_parquet(self._files[table]).select(
                *(pl.col(name).cast(pl.Int64).fill_null(_NO_NUMBER) for name in numbers),
                *(pl.col(name).cast(pl.Binary).fill_null(b"") for name in texts),
            )
            yield scan.collect()
        except (pl.exceptions.PolarsError, OSError) as error:
            raise InputError(f"{self._files[table]}: cannot be read: {one_line(error)}") from None


def _read(tables: _Tables, *, without_ranges: bool) -> TraceTable:
    if not tables.columns("StringIds") and not tables.columns("NVTX_EVENTS"):
        raise InputError(f"{tables.path}: not an export of Nsight Systems (it has no table StringIds)")
    strings = _strings(tables)
    calls = _calls(tables, strings)
    work = _work(tables, strings, calls)
    if not work.height:
        raise InputError(
            f"{tables.path}: this export holds no CUDA activity: capture with `nsys profile --trace=cuda,nvtx`"
        )
    ranges, operators, other = _ranges(tables, strings)
    if not ranges.height and not without_ranges:
        raise InputError(
            f"{tables.path}: this export holds no NVTX ranges, so no phase or module can be told: capture with "
            "`nsys profile --trace=cuda,nvtx` (or `--no-ranges` reads the kernels alone)"
        )
    return assemble(
        profiler="Nsight Systems",
        work=work,
        calls=calls,
        ranges=ranges,
        operators=operators,
        devices=_devices(tables),
        other=other,
        recorder=_recorder(tables),
    )


def _strings(tables: _Tables) -> pl.DataFrame:
    if not {"id", "value"} <= set(tables.columns("StringIds")):
        return pl.DataFrame(schema={"id": pl.Int64, "value": pl.String})
    frame = _whole(tables, "StringIds", ["id"], ["value"]).unique("id", keep="first")
    return frame.with_columns(_decoded(frame["value"]))


def _whole(tables: _Tables, table: str, numbers: list[str], texts: list[str]) -> pl.DataFrame:
    nothing = pl.DataFrame(schema=dict.fromkeys(numbers, pl.Int64) | dict.fromkeys(texts, pl.Binary))
    return pl.concat([nothing, *tables.batches(table, numbers, texts)])


def _decoded(column: pl.Series) -> pl.Series:
    """Bytes as text; what is no UTF-8 gets replacement characters. Each distinct value is decoded once."""
    distinct = column.unique()
    texts = pl.Series([_utf8(value) for value in distinct.to_list()], dtype=pl.String)
    return column.replace_strict(distinct, texts, return_dtype=pl.String).alias(column.name)


def _utf8(value: bytes | str | None) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else (value or "")


def _looked_up(frame: pl.DataFrame, column: str, strings: pl.DataFrame) -> pl.Series:
    """The strings of ids; an id without a string stays visible as its number."""
    joined = frame.select(pl.col(column)).join(
        strings, left_on=column, right_on="id", how="left", maintain_order="left"
    )
    return joined.select(
        pl.coalesce("value", pl.format("string {}", pl.col(column)), pl.lit("")).alias("name")
    ).to_series()


def _process(thread: str) -> pl.Expr:
    return (pl.col(thread) // 2**24) * 2**24


def _calls(tables: _Tables, strings: pl.DataFrame) -> pl.DataFrame:
    table = "CUPTI_ACTIVITY_KIND_RUNTIME"
    wanted = ["start", "end", "globalTid", "correlationId", "nameId"]
    if not _has(tables, table, wanted):
        return empty(CALL_SCHEMA)
    parts = [
        frame.select(
            pl.col("start").alias("start_ns"),
            _duration(),
            _process("globalTid").alias("process"),
            pl.col("globalTid").alias("thread"),
            _looked_up(frame, "nameId", strings).cast(pl.Categorical),
            _number("correlationId").alias("correlation"),
            pl.lit(None, pl.Int64).alias("external"),
        )
        for frame in tables.batches(table, wanted, [])
    ]
    return pl.concat([empty(CALL_SCHEMA), *parts])


def _work(tables: _Tables, strings: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    only = calls["process"].unique()
    process = only.item() if len(only) == 1 else 0
    parts = [
        _work_of(frame, kind, strings, process)
        for table, kind in _WORK_TABLES.items()
        for frame in _work_batches(tables, table)
    ]
    return pl.concat([empty(WORK_SCHEMA), *parts])


def _work_batches(tables: _Tables, table: str) -> Iterator[pl.DataFrame]:
    if not _has(tables, table, ["start", "end"]):
        return
    present = set(tables.columns(table))
    names = [name for name in ("demangledName", "shortName", "copyKind", "graphId") if name in present][:1]
    optional = ["deviceId", "streamId", "correlationId", "globalPid", "graphNodeId"]
    wanted = ["start", "end", *(name for name in optional if name in present), *names]
    absent = [pl.lit(_NO_NUMBER, pl.Int64).alias(name) for name in optional if name not in present]
    for frame in tables.batches(table, wanted, []):
        yield frame.with_columns(absent)


def _work_of(frame: pl.DataFrame, kind: str, strings: pl.DataFrame, process: int) -> pl.DataFrame:
    """`process` is that of work which does not say its own."""
    names = [name for name in ("demangledName", "shortName", "copyKind", "graphId") if name in frame.columns]
    if kind == "kernel" and names:
        name = _looked_up(frame, names[0], strings)
    elif kind == "memcpy" and "copyKind" in names:
        copies = pl.col("copyKind").replace_strict(_COPY_NAMES, default="other", return_dtype=pl.String)
        name = frame.select(pl.format("Memcpy {}", copies).alias("name")).to_series()
    elif kind == "graph" and "graphId" in names:
        name = frame.select(pl.format("CUDA graph {}", "graphId").alias("name")).to_series()
    else:
        name = pl.Series("name", [kind.capitalize()]).new_from_index(0, frame.height)
    return frame.select(
        pl.col("start").alias("start_ns"),
        _duration(),
        pl.col("deviceId").alias("device"),
        pl.col("streamId").alias("stream"),
        pl.lit(kind, KIND).alias("kind"),
        name.cast(pl.Categorical),
        _number("globalPid").fill_null(process).alias("process"),
        _number("correlationId").alias("correlation"),
        pl.lit(None, pl.Int64).alias("external"),
        _number("graphNodeId").alias("graph_node"),
    )


def _ranges(tables: _Tables, strings: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame, dict[str, int]]:
    """Ranges of the user's; operators that `emit_nvtx` wrote as ranges; and what was neither, counted."""
    table = "NVTX_EVENTS"
    if not _has(tables, table, ["start", "end", "eventType", "globalTid"]):
        return empty(RANGE_SCHEMA), empty(OPERATOR_SCHEMA), {}
    present = set(tables.columns(table))
    numbers = [name for name in ("start", "end", "eventType", "globalTid", "textId") if name in present]
    parts, operators, others = [], [], 0
    for frame in tables.batches(table, numbers, ["text"] if "text" in present else []):
        chosen = frame.filter(pl.col("eventType").is_in([*_PUSH_POP, *_START_END]))
        others += frame.height - chosen.height
        ranges, written = _operators_apart(_ranges_of(chosen, strings))
        parts.append(ranges)
        operators.append(written)
    other = {"NVTX marks and others": others} if others else {}
    return (
        _closed(pl.concat([empty(RANGE_SCHEMA), *parts])),
        _closed(pl.concat([empty(OPERATOR_SCHEMA), *operators])),
        other,
    )


def _ranges_of(frame: pl.DataFrame, strings: pl.DataFrame) -> pl.DataFrame:
    name = pl.Series("name", [""]).new_from_index(0, frame.height)
    if "text" in frame.columns:
        name = _decoded(frame["text"]).alias("name")
    if "textId" in frame.columns:
        both = pl.DataFrame({"name": name, "registered": _looked_up(frame, "textId", strings), "id": frame["textId"]})
        registered = pl.when((pl.col("name") == "") & (pl.col("id") >= 0)).then("registered").otherwise("name")
        name = both.select(registered.alias("name")).to_series()
    return frame.select(
        pl.col("start").alias("start_ns"),
        pl.when(pl.col("end") >= 0).then(pl.col("end") - pl.col("start")).alias("duration_ns"),
        _process("globalTid").alias("process"),
        pl.col("globalTid").alias("thread"),
        name.cast(pl.Categorical),
        pl.col("eventType").is_in(_PUSH_POP).alias("nested"),
    )


def _closed(ranges: pl.DataFrame) -> pl.DataFrame:
    """A range that was still open when the capture stopped has no end: it lasts to the last moment recorded."""
    if not ranges["duration_ns"].null_count():
        return ranges
    last = (pl.col("start_ns") + pl.col("duration_ns").fill_null(0)).max()
    return ranges.with_columns(pl.col("duration_ns").fill_null(last - pl.col("start_ns")).clip(lower_bound=0))


def _operators_apart(ranges: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    names = ranges["name"].unique()
    found = {name: match for name in names.to_list() if (match := _OPERATOR.match(name[:4096]))}
    if not found:
        return ranges, empty(OPERATOR_SCHEMA)
    parsed = pl.DataFrame(
        {
            "name": list(found),
            "operator": [match["name"] for match in found.values()],
            "sequence": [int(match["sequence"][:18]) if match["sequence"] else None for match in found.values()],
        },
        schema={"name": pl.Categorical, "operator": pl.String, "sequence": pl.Int64},
    )
    operators = ranges.join(parsed, on="name", how="inner", maintain_order="left")
    backward = pl.col("operator").str.contains(r"Backward\d*$|^autograd::engine::evaluate_function")
    nothing = pl.lit(None)
    return ranges.join(parsed, on="name", how="anti", maintain_order="left"), operators.select(
        "start_ns",
        "duration_ns",
        "process",
        "thread",
        pl.col("operator").alias("name"),
        nothing.cast(pl.Int64).alias("external"),
        "sequence",
        # emit_nvtx does not say the forward thread; one thread runs forward, which PyTorch numbers 1.
        pl.when(backward & pl.col("sequence").is_not_null()).then(pl.lit(1, pl.Int64)).alias("forward_thread"),
        nothing.cast(pl.String).alias("shapes"),
        nothing.cast(pl.String).alias("dtypes"),
    )


def _devices(tables: _Tables) -> dict[int, str]:
    table = "TARGET_INFO_GPU"
    if not _has(tables, table, ["name"]):
        return {}
    numbers = [name for name in ("cuDevice", "id") if name in tables.columns(table)][:1]
    frame = _whole(tables, table, numbers, ["name"])
    names = _decoded(frame["name"]).to_list()
    return dict(zip(frame[numbers[0]].to_list() if numbers else range(len(names)), names, strict=True))


def _recorder(tables: _Tables) -> str | None:
    for table in ("META_DATA_CAPTURE", "META_DATA_EXPORT"):
        if _has(tables, table, ["name", "value"]):
            frame = _whole(tables, table, [], ["name", "value"])
            facts = dict(zip(_decoded(frame["name"]).to_list(), _decoded(frame["value"]).to_list(), strict=True))
            for key in ("NSYS_VERSION", "EXPORT_NSYS_VERSION", "EXPORT_VERSION", "PRODUCT_VERSION"):
                if key in facts:
                    return f"nsys {facts[key]}"[:80]
    return None


def _has(tables: _Tables, table: str, columns: list[str]) -> bool:
    return set(columns) <= set(tables.columns(table))


def _duration() -> pl.Expr:
    return (pl.col("end") - pl.col("start")).clip(lower_bound=0).alias("duration_ns")


def _number(column: str) -> pl.Expr:
    return pl.when(pl.col(column) != _NO_NUMBER).then(pl.col(column))
