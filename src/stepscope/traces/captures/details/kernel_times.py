"""How the duration of each kernel varies, and with which grid, registers and occupancy it ran."""

import polars as pl

from stepscope.traces.captures.attribution import Attribution


def kernel_times(attribution: Attribution) -> pl.DataFrame:
    """A row for each kernel and family over the whole capture, the busiest first.

    `calls`, `busy_ns`, `min_ns`, `median_ns`, `max_ns`, `deviation_ns` (of a sample; null for one call). `grid` and
    `block` are those of most calls, `grids` counts different ones. `registers` is the most. `occupancy` is the mean of
    the profiler's estimate by time, from 0 to 100. What is not recorded is null.
    """
    spent = pl.col("duration_ns")
    told = pl.col("occupancy").is_not_null()
    weighted = (pl.col("occupancy").cast(pl.Float64) * spent).filter(told).sum() / spent.filter(told).sum()
    return (
        attribution.kernels.group_by("name", "family")
        .agg(
            pl.len().cast(pl.Int64).alias("calls"),
            spent.sum().alias("busy_ns"),
            spent.min().alias("min_ns"),
            spent.median().alias("median_ns"),
            spent.max().alias("max_ns"),
            spent.std().alias("deviation_ns"),
            pl.col("grid", "block").drop_nulls().mode().sort().first().cast(pl.String),
            pl.col("grid").drop_nulls().n_unique().cast(pl.Int64).alias("grids"),
            pl.col("registers").max(),
            pl.when(spent.filter(told).sum() > 0).then(weighted).alias("occupancy"),
        )
        .with_columns(pl.col("name", "family").cast(pl.String))
        .sort("busy_ns", "name", "family", descending=[True, False, False])
    )
