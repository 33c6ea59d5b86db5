"""Reads a capture of Nsight Systems: its SQLite export, its parquetdir export, or a report through `nsys export`.

Which tables and columns exist differs between versions of nsys, so they are probed. The process of a thread is its
globalTid without the lowest 24 bits; names are ids into StringIds.
"""

import shutil
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from stepscope.core.errors import InputError, StepscopeError, printable
from stepscope.core.nsight import export_report, find_importer, find_nsys, how_to_get_nsys, import_stream
from stepscope.traces.assemble import LARGEST_NS, assemble
from stepscope.traces.counters import copy_bandwidth
from stepscope.traces.readers.nsys_details import DETAILS, detail_columns
from stepscope.traces.readers.nsys_tables import NO_NUMBER, ParquetTables, SqliteTables, Tables, utf8
from stepscope.traces.readers.nvtx_operators import operators_apart
from stepscope.traces.readers.unpacked import unpacked
from stepscope.traces.table import (
    CALL_SCHEMA,
    CALLS,
    DETAIL_SCHEMA,
    KIND,
    OPERATOR_SCHEMA,
    RANGE_SCHEMA,
    RANGES,
    WORK,
    WORK_SCHEMA,
    Damage,
    TraceTable,
    add_count,
    empty,
)

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
        counters=copy_bandwidth(pl.concat(counts.copies)) if counts.copies else None,
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
        kind for kind in ("cuda", "nvtx") if any(
            name.endswith(f"COLLECT_{kind.upper()}_TRACE") and value.lower() == "true"
            for name, value in _metadata(tables, "META_DATA_CAPTURE").items()
        )
    )  # fmt: skip


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
