"""A large Nsight Systems export from a small one: its rows again and again, later in time and with ids of their own.

The capture is of few, long NVTX ranges; a model annotated op by op (`emit_nvtx`, module hooks) has several a launch.
So ranges named like a transformer's modules and ops are first nested round the capture's own kernel launches.
"""

import bisect
import contextlib
import gzip
import shutil
import sqlite3
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import msgspec

GAP_NS = 10_000
"""Between the last end of a tile and the first start of the next."""

PUSH_POP = 59
NOT_EVENTS = (33, 75, 76)
"""Types of NVTX rows that happen once: a category, a domain's creation and destruction."""

BLOCKS = tuple(f"blocks.{i}" for i in range(12))
MODULES = ("ln_1", "attention", "ln_2", "mlp")
_SIZES = ", sizes = [[4, 512, 768], [768, 768], [768]]"
OPS = tuple(
    tuple(f"{name}{_SIZES}" for name in names)
    for names in (
        ("aten::linear", "aten::matmul", "aten::addmm", "gemm"),
        ("aten::layer_norm", "aten::native_layer_norm", "aten::var_mean", "norm"),
        ("aten::softmax", "aten::_softmax", "aten::exp", "reduce"),
    )
)
"""As `emit_nvtx(record_shapes=True)` writes them, shapes and all: the length of names is part of a file's weight."""

LAUNCHES_IN_A_MODULE = 2
MODULES_IN_A_BLOCK = 2
"""Four ops a launch, a module every two launches, a block every four: 4.75 ranges a launch."""

PADDING_NS = 5
"""How much sooner a range starts, and later it ends, than what it encloses."""
_LEVELS = len(OPS[0]) + 2
_MARGIN_NS = _LEVELS * PADDING_NS

_TIMES = {"start", "end", "timestamp"}
_IDS = {"correlationId", "gridId", "rangeId"}

Range = tuple[int, int, str]


class NsysTiles(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a tiled export holds."""

    tiles: int
    bytes: int
    kernels: int
    runtime_calls: int
    ranges: int


def nested_ranges(launches: Iterable[tuple[int, int]], boundaries: list[int]) -> Iterator[Range]:
    """Ranges round the launches of one thread, which are in order. None crosses a boundary (sorted) of those there."""
    last_end = -1
    free: list[tuple[int, int, int]] = []
    for start, end in launches:
        segment = bisect.bisect(boundaries, start - _MARGIN_NS)
        if start - _MARGIN_NS <= last_end or segment != bisect.bisect(boundaries, end + _MARGIN_NS):
            continue
        last_end = end + _MARGIN_NS
        free.append((segment, start, end))
    number = 0
    for _, members in groupby(free, key=lambda launch: launch[0]):
        spans = [(start, end) for _, start, end in members]
        in_a_block = LAUNCHES_IN_A_MODULE * MODULES_IN_A_BLOCK
        for i in range(0, len(spans), in_a_block):
            yield from _block(spans[i : i + in_a_block], number)
            number += 1


def _block(spans: list[tuple[int, int]], number: int) -> Iterator[Range]:
    """A block of modules of ops round these launches."""
    block = BLOCKS[number % len(BLOCKS)]
    yield spans[0][0] - _MARGIN_NS, spans[-1][1] + _MARGIN_NS, block
    margin = _MARGIN_NS - PADDING_NS
    for i in range(0, len(spans), LAUNCHES_IN_A_MODULE):
        inside = spans[i : i + LAUNCHES_IN_A_MODULE]
        module = MODULES[(number * MODULES_IN_A_BLOCK + i // LAUNCHES_IN_A_MODULE) % len(MODULES)]
        yield inside[0][0] - margin, inside[-1][1] + margin, f"{block}.{module}"
        for j, (start, end) in enumerate(inside):
            for level, op in enumerate(OPS[(i + j) % len(OPS)]):
                padding = margin - PADDING_NS * (level + 1)
                yield start - padding, end + padding, op


def add_ranges(db: sqlite3.Connection) -> None:
    """Nest ranges round every launch of the capture."""
    launches = db.execute(
        "SELECT DISTINCT r.globalTid, r.start, r.end FROM CUPTI_ACTIVITY_KIND_KERNEL k"
        " JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId"
        " AND r.globalTid >> 24 = k.globalPid >> 24 ORDER BY 1, 2"
    ).fetchall()
    for thread, rows in groupby(launches, key=lambda row: row[0]):
        there = db.execute(
            "SELECT start, end FROM NVTX_EVENTS WHERE eventType = ? AND globalTid = ?", (PUSH_POP, thread)
        )
        boundaries = sorted(time for times in there for time in times if time is not None)
        ranges = nested_ranges(((start, end) for _, start, end in rows), boundaries)
        db.executemany(
            "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid, domainId) VALUES (?, ?, ?, ?, ?, 0)",
            ((start, end, PUSH_POP, name, thread) for start, end, name in ranges),
        )


def _columns(db: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in db.execute(f'PRAGMA table_info("{table}")')]


def _timed_tables(db: sqlite3.Connection) -> dict[str, str]:
    """Tables whose rows happen at a time, and which of their rows do."""
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    condition = f"eventType NOT IN {NOT_EVENTS}"
    return {
        table: condition if table == "NVTX_EVENTS" else "TRUE"
        for table in tables
        if _TIMES & set(_columns(db, table)) and not table.startswith(("TARGET_INFO", "META_DATA", "ENUM"))
    }


def _extent(db: sqlite3.Connection, tables: dict[str, str], columns: set[str], aggregate: str) -> int:
    """The least or the greatest value of such columns in all tables."""
    values = [
        db.execute(f'SELECT {aggregate}("{column}") FROM "{table}" WHERE {condition}').fetchone()[0]
        for table, condition in tables.items()
        for column in columns & set(_columns(db, table))
    ]
    known = [value for value in values if value is not None]
    return min(known) if aggregate == "min" else max(known, default=0)


def _add_tiles(db: sqlite3.Connection, tiles: int) -> None:
    """Repeat every timed row for the tiles from the second on. Steps (`step_0`) are numbered on."""
    tables = _timed_tables(db)
    span = _extent(db, tables, _TIMES, "max") - _extent(db, tables, _TIMES, "min") + GAP_NS
    stride = {column: _extent(db, tables, {column}, "max") + 1 for column in _IDS}
    steps = "SELECT count(DISTINCT text) FROM NVTX_EVENTS WHERE text GLOB 'step_[0-9]*'"
    (step_count,) = db.execute(steps).fetchone()
    db.execute("CREATE TEMP TABLE tile (k INTEGER PRIMARY KEY)")
    db.executemany("INSERT INTO tile VALUES (?)", ((k,) for k in range(1, tiles)))
    for table, condition in tables.items():
        values = []
        for column in _columns(db, table):
            if column in _TIMES:
                values.append(f'"{column}" + k * {span}')
            elif column in _IDS:  # 0 and NULL mean none
                values.append(f'"{column}" + iif("{column}" > 0, k * {stride[column]}, 0)')
            elif (table, column) == ("NVTX_EVENTS", "text"):
                number = f"CAST(substr(text, 6) AS INTEGER) + k * {step_count}"
                values.append(f"iif(text GLOB 'step_[0-9]*', 'step_' || ({number}), text)")
            else:
                values.append(f'"{column}"')
        db.execute(f'CREATE TEMP TABLE once AS SELECT * FROM main."{table}" WHERE {condition}')
        # CROSS JOIN keeps the order written: whole tiles one after the other, as time goes.
        db.execute(f'INSERT INTO main."{table}" SELECT {", ".join(values)} FROM tile CROSS JOIN once')
        db.execute("DROP TABLE once")


def tile_nsys(capture: Path, target: Path, size_bytes: int, *, ranges: bool = True) -> NsysTiles:
    """Write `target`: as many whole tiles of the capture (at least one) as come nearest to the size."""
    part = target.with_suffix(".part")
    part.unlink(missing_ok=True)
    opened = gzip.open if capture.suffix == ".gz" else open
    with opened(capture, "rb") as source, part.open("wb") as copy:
        shutil.copyfileobj(source, copy)
    with contextlib.closing(sqlite3.connect(part, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = OFF")
        db.execute("PRAGMA synchronous = OFF")
        if ranges:
            db.execute("BEGIN")
            add_ranges(db)
            db.execute("COMMIT")
        db.execute("VACUUM")
        tiles = max(1, round(size_bytes / part.stat().st_size))
        db.execute("BEGIN")
        _add_tiles(db, tiles)
        db.execute("COMMIT")
        counts = [
            db.execute(f"SELECT count(*) FROM {rows}").fetchone()[0]
            for rows in (
                "CUPTI_ACTIVITY_KIND_KERNEL",
                "CUPTI_ACTIVITY_KIND_RUNTIME",
                f"NVTX_EVENTS WHERE eventType = {PUSH_POP}",
            )
        ]
    part.replace(target)
    kernels, runtime_calls, range_count = counts
    return NsysTiles(
        tiles=tiles, bytes=target.stat().st_size, kernels=kernels, runtime_calls=runtime_calls, ranges=range_count
    )
