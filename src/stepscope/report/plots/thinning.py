"""A timeline thinned to what the eye can see, its highs kept."""

import polars as pl

TIME = "time_us"
POINTS = 2000
"""At most so many moments are drawn, about two for each pixel of the width: more could not be told apart."""


def thin(timeline: pl.DataFrame, points: int = POINTS) -> pl.DataFrame:
    """At most so many rows of the timeline (at least four), unchanged and in order.

    timeline: `time_us` ascending, and columns of bytes whose sum is the total. Time is cut into equal buckets; of each
    the rows of the highest and of the lowest total stay, and the last, which the next bucket begins from. The first
    row stays too. So the maximum of every bucket, and with it the peak, is that of the whole.
    """
    if timeline.height <= points:
        return timeline
    buckets = max((points - 1) // 3, 1)
    since = pl.col(TIME) - pl.col(TIME).first()
    kept = (
        timeline.lazy()
        .select(
            row=pl.int_range(pl.len(), dtype=pl.Int64),
            bucket=since * buckets // (since.last() + 1),
            total=pl.sum_horizontal(pl.exclude(TIME)),
        )
        .group_by("bucket")
        .agg(
            pl.concat_list(
                pl.col("row").get(pl.col("total").arg_max()),
                pl.col("row").get(pl.col("total").arg_min()),
                pl.col("row").last(),
            ).alias("rows")
        )
        .select(pl.col("rows").explode().explode())
        .collect()
        .to_series()
    )
    return timeline[pl.concat([pl.Series("rows", [0], dtype=pl.Int64), kept]).unique().sort()]
