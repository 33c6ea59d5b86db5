"""Live bytes by category over a history, for plots."""

import polars as pl

from stepscope.core.memory_notes import CATEGORIES
from stepscope.memory.block_layout import BEFORE
from stepscope.memory.categories import OF_TENSORS, ROUNDING
from stepscope.memory.explain import Explained


def category_timeline(explained: Explained) -> pl.DataFrame:
    """`time_us` (int64, relative to the first event), and the live bytes of each category, after every event that
    changed any; the first row is the state at the start. The categories of a row sum to what is allocated.

    `explained.phases` has the phases on the same clock.
    """
    table = explained.allocations.select(
        pl.col("alloc_event").fill_null(BEFORE), "free_event", "category", "requested", rounding="block"
    ).with_columns(rounding=pl.col("rounding") - pl.col("requested"))
    freed = table.filter(pl.col("free_event").is_not_null()).select(
        event="free_event", category="category", requested=-pl.col("requested"), rounding=-pl.col("rounding")
    )
    start = pl.DataFrame({"event": [BEFORE], "category": [""], "requested": [0], "rounding": [0]})
    changes = pl.concat(
        [start, table.select("category", "requested", "rounding", event="alloc_event").select(start.columns), freed]
    )
    of_category = [
        pl.col("requested").filter(pl.col("category") == category).sum().alias(category) for category in OF_TENSORS
    ]
    live = (
        changes.group_by("event")
        .agg(*of_category, pl.col("rounding").sum().alias(ROUNDING))
        .sort("event")
        .with_columns(pl.col(CATEGORIES).cum_sum())
    )
    snapshot = explained.snapshot
    times = pl.Series(snapshot.times, dtype=pl.Int64) - snapshot.start_us
    after = times.gather(live["event"].clip(lower_bound=0)).alias("time_us")
    return live.select(after, *CATEGORIES)
