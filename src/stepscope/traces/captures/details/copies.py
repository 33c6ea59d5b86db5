"""Copies and fills by direction, kind of memory and size, with the bandwidth that they reached."""

import polars as pl

from stepscope.traces.captures.attribution import Attribution
from stepscope.traces.table import COPIES, KIND

SIZES = ((4 << 10, "below 4 KiB"), (64 << 10, "to 64 KiB"), (1 << 20, "to 1 MiB"), (16 << 20, "to 16 MiB"))
LARGE, UNTOLD = "16 MiB and more", "size not recorded"
"""The classes of sizes: each up to its bound, which it leaves out."""

FILL = "fill"


def copy_totals(attribution: Attribution) -> pl.DataFrame:
    """A row for each direction, kind of memory and class of size, over the whole capture, the busiest first.

    `direction`: HtoD, DtoH, DtoD, PtoP, HtoH, fill, or other. `memory`: `Pageable -> Device`, null where it is not
    recorded. `size`: one of SIZES. `calls`, `busy_ns`, `bytes` and `bytes_per_s` (null where sizes are not recorded).
    """
    names = attribution.work["name"]
    chosen = attribution.work.filter(pl.col("kind").is_in(pl.Series(COPIES, dtype=KIND).implode()))
    distinct = chosen["name"].unique().cast(pl.String)
    said = pl.DataFrame({"name": distinct}).select(
        pl.col("name").cast(names.dtype),
        pl.when(pl.col("name").str.starts_with("Memset"))
        .then(pl.lit(FILL))
        .otherwise(pl.col("name").str.extract(r"\b([HDP]to[HDP])\b").fill_null("other"))
        .alias("direction"),
        pl.col("name").str.extract(r"\(([^()]+ -> [^()]+)\)").alias("named"),
    )
    size = pl.when(pl.col("bytes").is_null()).then(pl.lit(UNTOLD))
    for bound, label in SIZES:
        size = size.when(pl.col("bytes") < bound).then(pl.lit(label))
    moved, spent = pl.col("bytes").sum(), pl.col("busy_ns")
    known = pl.col("size") != UNTOLD
    return (
        chosen.join(said, on="name", how="left")
        .with_columns(
            pl.coalesce("named", pl.col("memory").cast(pl.String)).alias("memory"),
            size.otherwise(pl.lit(LARGE)).alias("size"),
        )
        .group_by("direction", "memory", "size")
        .agg(pl.len().cast(pl.Int64).alias("calls"), pl.col("duration_ns").sum().alias("busy_ns"), moved)
        .with_columns(pl.when(known).then("bytes").alias("bytes"))
        .with_columns(pl.when(spent > 0).then(pl.col("bytes") / spent * 1e9).alias("bytes_per_s"))
        .sort("busy_ns", "direction", "memory", "size", descending=[True, False, False, False])
    )
