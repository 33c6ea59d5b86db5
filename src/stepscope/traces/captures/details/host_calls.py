"""Time of the host in calls to the CUDA (or HIP) runtime and driver, and how long it waited in them; data loading."""

import polars as pl

from stepscope.traces.captures.attribution import Attribution
from stepscope.traces.captures.host_waits import named, waits

_LOADS = r"DataLoader"
_VERSION = r"_v\d{4,}$"
"""What Nsight Systems adds to a call's name: the version of CUDA in which it last changed."""


def host_calls(attribution: Attribution, calls: pl.DataFrame) -> pl.DataFrame:
    """A row for each name among `calls`, the longest first: calls, total_ns, median_ns, max_ns, and of those that wait
    for the device `waits` and `waited_ns`."""
    columns = ["process", "thread", "start_ns", "name"]
    waiting = waits(attribution.table, attribution.work).with_columns(pl.lit(True).alias("waits"))
    marked = calls.join(waiting.select(*columns, "waits").unique(), on=columns, how="left", maintain_order="left")
    spent = pl.col("duration_ns")
    return (
        marked.group_by("name")
        .agg(
            pl.len().cast(pl.Int64).alias("calls"),
            spent.sum().alias("total_ns"),
            spent.median().alias("median_ns"),
            spent.max().alias("max_ns"),
            pl.col("waits").fill_null(False).sum().cast(pl.Int64),
            spent.filter("waits").sum().alias("waited_ns"),
        )
        .with_columns(pl.col("name").cast(pl.String).str.replace(_VERSION, ""))
        .sort("total_ns", "name", descending=[True, False])
    )


def data_loading(*recorded: pl.DataFrame) -> pl.DataFrame:
    """A row for each of the recorded ranges and operators of PyTorch's DataLoader: name, calls, total_ns, median_ns,
    max_ns."""
    loading = pl.concat(
        named(frame.select("name", "duration_ns"), _LOADS).with_columns(pl.col("name").cast(pl.String))
        for frame in recorded
    )
    spent = pl.col("duration_ns")
    return (
        loading.group_by("name")
        .agg(
            pl.len().cast(pl.Int64).alias("calls"),
            spent.sum().alias("total_ns"),
            spent.median().alias("median_ns"),
            spent.max().alias("max_ns"),
        )
        .sort("total_ns", "name", descending=[True, False])
    )
