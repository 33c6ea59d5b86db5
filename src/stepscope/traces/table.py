"""The TraceTable: checked polars frames that every reader gives, whatever the profiler.

Times are integer nanoseconds on the trace's own clock. Nothing is dropped: device work without a launch record and
launches without device work stay in, and what has no row (flow arrows, metadata, counters) is counted in `other`.
"""

from dataclasses import dataclass, field
from typing import Literal

import polars as pl

# Counters of a capture: figures that a profiler recorded over time, beside what ran.


COPY_SCHEMA = pl.Schema({"start_ns": pl.Int64, "duration_ns": pl.Int64, "device": pl.Int64, "bytes": pl.Int64})
"""Columns of the copies of which `copy_bandwidth` is made."""
COUNTER_SCHEMA = pl.Schema(
    {"start_ns": pl.Int64, "process": pl.Int64, "device": pl.Int64, "name": pl.Categorical(), "value": pl.Int64}
)
"""Columns of counters: `value` holds from `start_ns` on. `device` is -1 for the host's; `process` null for a device."""

ALLOCATED, RESERVED, COPYING = "bytes allocated", "bytes reserved", "copy bandwidth, bytes/s"


def copies_of(work: pl.DataFrame, moved: list[int | None]) -> pl.DataFrame:
    """The rows of `work`, which are copies, with the bytes that each moved. A figure beyond 64 bits is none."""
    return work.select("start_ns", "duration_ns", "device", pl.Series("bytes", _fitting(moved), dtype=pl.Int64))


def memory_counters(
    start_ns: pl.Series, process: pl.Series, said: list[tuple[int | None, int | None, int | None]]
) -> pl.DataFrame:
    """What the allocator held after each of its events, which say device, bytes allocated and bytes reserved."""
    devices = [-1 if device is None else device for device in _fitting([device for device, _, _ in said])]
    of_each = pl.DataFrame(
        {"start_ns": start_ns, "process": process, "device": pl.Series(devices, dtype=pl.Int64)}
        | {ALLOCATED: pl.Series(_fitting([allocated for _, allocated, _ in said]), dtype=pl.Int64)}
        | {RESERVED: pl.Series(_fitting([reserved for _, _, reserved in said]), dtype=pl.Int64)}
    )
    return (
        of_each.unpivot(index=["start_ns", "process", "device"], variable_name="name", value_name="value")
        .drop_nulls("value")
        .with_columns(pl.col("name").cast(pl.Categorical()))
        .select(COUNTER_SCHEMA.names())
    )


def _fitting(values: list[int | None]) -> list[int | None]:
    return [None if value is None or abs(value) >= 2**62 else value for value in values]


def copy_bandwidth(copies: pl.DataFrame) -> pl.DataFrame:
    """The counter of bytes a second that copies move."""
    known = copies.filter((pl.col("bytes") > 0) & (pl.col("bytes") < 2**53) & (pl.col("duration_ns") > 0))
    rate = (pl.col("bytes") / pl.col("duration_ns") * 1e9).round().cast(pl.Int64, strict=False).fill_null(0)
    begins = known.select("device", "start_ns", rate.alias("change"))
    ends = known.select("device", pl.col("start_ns") + pl.col("duration_ns"), -rate.alias("change"))
    return stepwise(pl.concat([begins, ends]), COPYING)


def stepwise(changes: pl.DataFrame, name: str) -> pl.DataFrame:
    """A device's counter that is the sum of its changes (device, start_ns, change) so far."""
    summed = changes.group_by("device", "start_ns").agg(pl.col("change").sum()).sort("device", "start_ns")
    return summed.select(
        "start_ns",
        pl.lit(None, pl.Int64).alias("process"),
        "device",
        pl.lit(name, pl.Categorical()).alias("name"),
        pl.col("change").cum_sum().over("device").alias("value"),
    )


KINDS = ("kernel", "memcpy", "memset", "graph", "operator")
"""`graph`: a CUDA graph recorded as a whole. `operator`: a CPU operator, in traces that hold no device work."""

KIND = pl.Enum(KINDS)
COPIES = ("memcpy", "memset")
"""The kinds of work that are not computation."""

WORK_SCHEMA = pl.Schema(
    {
        "start_ns": pl.Int64,
        "duration_ns": pl.Int64,
        "device": pl.Int64,
        "stream": pl.Int64,
        "kind": KIND,
        "name": pl.Categorical(),
        "process": pl.Int64,
        "correlation": pl.Int64,
        "external": pl.Int64,
        "graph_node": pl.Int64,
    }
)
"""Columns of device work as recorded: one row per kernel, copy, fill or whole graph."""

DETAIL_SCHEMA = pl.Schema(
    {
        "bytes": pl.Int64,
        "memory": pl.Categorical(),
        "grid": pl.Categorical(),
        "block": pl.Categorical(),
        "registers": pl.Int32,
        "occupancy": pl.Float32,
    }
)
"""Columns of device work that some profilers record; null elsewhere. `bytes`, of a copy or fill. `memory`: where a copy
comes from and goes to, as in `Pageable -> Device`, where the name does not say it. `grid` and `block`: blocks and
threads of a kernel, as JSON lists. `registers`: of a thread. `occupancy`: the profiler's estimate, from 0 to 100."""

CALL_SCHEMA = pl.Schema(
    {
        "start_ns": pl.Int64,
        "duration_ns": pl.Int64,
        "process": pl.Int64,
        "thread": pl.Int64,
        "name": pl.Categorical(),
        "correlation": pl.Int64,
        "external": pl.Int64,
    }
)
"""Columns of calls to the CUDA (or HIP) runtime and driver on the host."""

RANGE_SCHEMA = pl.Schema(
    {
        "start_ns": pl.Int64,
        "duration_ns": pl.Int64,
        "process": pl.Int64,
        "thread": pl.Int64,
        "name": pl.Categorical(),
        "nested": pl.Boolean,
    }
)
"""Columns of named ranges. `nested`: pushed and popped on one thread; other ranges may cross threads."""

OPERATOR_SCHEMA = pl.Schema(
    {
        "start_ns": pl.Int64,
        "duration_ns": pl.Int64,
        "process": pl.Int64,
        "thread": pl.Int64,
        "name": pl.Categorical(),
        "external": pl.Int64,
        "sequence": pl.Int64,
        "forward_thread": pl.Int64,
        "shapes": pl.Categorical(),
        "dtypes": pl.Categorical(),
        "values": pl.Categorical(),
    }
)
"""Columns of operators. `shapes`, `dtypes` and `values`, of arguments that are numbers: JSON text; `values` only of
operators whose work depends on them. `sequence` and `forward_thread` (PyTorch's own count of threads) tie backward to
forward."""

LINK_SCHEMA = pl.Schema(
    {"id": pl.Int64, "start_ns": pl.Int64, "process": pl.Int64, "thread": pl.Int64, "begins": pl.Boolean}
)
"""Columns of the profiler's arrows from a forward operator (`begins`) to its backward operator: one row an end."""

COLLECTIVE_SCHEMA = pl.Schema(
    {
        "start_ns": pl.Int64,
        "process": pl.Int64,
        "thread": pl.Int64,
        "correlation": pl.Int64,
        "collective": pl.String,
        "group": pl.String,
        "group_size": pl.Int64,
        "elements_in": pl.Int64,
        "elements_out": pl.Int64,
        "dtype": pl.String,
        "sequence": pl.Int64,
    }
)
"""Columns of what the profiler says of collectives: of a kernel (`correlation` is known) or of the operator round its
launch (`thread` is known). `sequence` counts the collectives of a process group, and is equal on all its ranks."""


WORK, CALLS, OPERATORS, RANGES = "kernels, copies and fills", "calls", "operators", "ranges"
"""What rows are, where damaged ones are counted."""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """Rows that cannot be as they stand, counted by what they are.

    `backwards`: they end before they begin, and count as 0 ns. `nameless`: their name is not in the file. `untimed`:
    their start is no time, zero where nothing else is, or a year from all others: work stands at its launch instead,
    other rows are left out. `endless`: their duration is no time, and counts as 0 ns. `overlong`: work that outlasted
    later work of its stream, and was cut where the next begins, by `cut_ns` in all. `mended`: texts that the profiler
    wrote as no JSON, by what was wrong with them.
    """

    backwards: dict[str, int] = field(default_factory=dict[str, int])
    nameless: dict[str, int] = field(default_factory=dict[str, int])
    untimed: dict[str, int] = field(default_factory=dict[str, int])
    endless: dict[str, int] = field(default_factory=dict[str, int])
    mended: dict[str, int] = field(default_factory=dict[str, int])
    overlong: int = 0
    cut_ns: int = 0


def add_count(counts: dict[str, int], what: str, rows: int) -> None:
    """Add to the count of rows of one sort."""
    if rows:
        counts[what] = counts.get(what, 0) + rows


Profiler = Literal["Kineto", "Nsight Systems"]


def empty(schema: pl.Schema) -> pl.DataFrame:
    """A frame of that schema without rows."""
    return pl.DataFrame(schema=schema)


def with_details(work: pl.DataFrame) -> pl.DataFrame:
    """Device work with the columns of DETAIL_SCHEMA that its reader did not give, as null."""
    return work.with_columns(
        pl.lit(None, dtype).alias(name) for name, dtype in DETAIL_SCHEMA.items() if name not in work.columns
    )


@dataclass(frozen=True, kw_only=True)
class TraceTable:
    """One capture. `work` carries, beside WORK_SCHEMA and DETAIL_SCHEMA, its launch: `launch_row` in `calls`,
    `launch_ns` and `launch_thread`; copies and fills come last in it.

    `devices`: names by index where the trace says them. `other`: rows of the file without a place here, by category.
    `recorder`: the profiler's version, where the trace says it. `lost`: events the profiler itself says it lost.
    `threads`: the names of threads by (process, thread), where the trace says them. `rank`: which rank of `ranks` the
    process was; None where it was alone, or the trace does not say. `remarks`: the profiler's own warnings. `traced`:
    what it was asked to trace (`cuda`, `nvtx`), where the trace says it.
    """

    profiler: Profiler
    work: pl.DataFrame
    calls: pl.DataFrame
    ranges: pl.DataFrame
    operators: pl.DataFrame = field(default_factory=lambda: empty(OPERATOR_SCHEMA))
    links: pl.DataFrame = field(default_factory=lambda: empty(LINK_SCHEMA))
    devices: dict[int, str] = field(default_factory=dict[int, str])
    other: dict[str, int] = field(default_factory=dict[str, int])
    recorder: str | None = None
    lost: int = 0
    threads: dict[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])
    collectives: pl.DataFrame = field(default_factory=lambda: empty(COLLECTIVE_SCHEMA))
    rank: int | None = None
    ranks: int | None = None
    damage: Damage = field(default_factory=Damage)
    counters: pl.DataFrame = field(default_factory=lambda: empty(COUNTER_SCHEMA))
    remarks: tuple[str, ...] = ()
    traced: frozenset[str] = frozenset()

    @property
    def on_cpu(self) -> bool:
        """Whether the rows of `work` are CPU operators by their own time, since no device took part."""
        return bool(self.work.height) and (self.work.item(0, "kind") == "operator")
