"""Counters of a capture: figures that a profiler recorded over time, beside what ran."""

import polars as pl

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
