"""Live bytes by category over a history: exact after every event, and thinned to what a plot can show."""

from collections.abc import Sequence

import polars as pl

from stepscope.allocations.block_layout import BEFORE
from stepscope.allocations.categories import OF_TENSORS, ROUNDING
from stepscope.allocations.explain import Explained
from stepscope.core.answer import Frame, Guide, Panel, Point, Span
from stepscope.core.memory_notes import CATEGORIES, PhaseSpan
from stepscope.core.work.described import describe_workload

_TIME = "time_us"
POINTS = 2000
"""At most so many moments are kept for a plot, about two for each pixel of the width: more could not be told apart."""


def timeline_panel(explained: Explained) -> Panel:
    """The live memory over the history, with the phases, and the most that the allocator had reserved."""
    notes = explained.snapshot.notes
    reserved = max(bytes_held for _, bytes_held in explained.replay.reserved)
    workload = notes.workload if notes else None
    heading = f"{workload.model.name}: {describe_workload(workload)}" if workload else "Live memory by category"
    return panel_of(category_timeline(explained), explained.phases, heading=heading, reserved_bytes=reserved)


def panel_of(
    timeline: pl.DataFrame, phases: Sequence[PhaseSpan] = (), *, heading: str = "", reserved_bytes: int = 0
) -> Panel:
    """A timeline as areas, thinned. timeline: `time_us`, ascending from 0, and a column of live bytes a category, each
    row until the next one's moment; phases on the same clock."""
    thinned = thin(timeline)
    names = [name for name in thinned.columns if name != _TIME]
    times = thinned[_TIME].to_list()
    points = [
        Point(line=name, x=float(at), y=float(held))
        for name in names
        for at, held in zip(times, thinned[name].to_list(), strict=True)
    ]
    return Panel(
        x_title="time", y_title="live memory", kind="areas", points=tuple(points),
        frame=Frame(
            heading=heading,
            spans=tuple(Span(phase.name, float(phase.start_us), float(phase.end_us)) for phase in phases),
            guides=(Guide(name="reserved", y=(float(reserved_bytes),)),) if reserved_bytes else (),
        ),
    )  # fmt: skip


def thin(timeline: pl.DataFrame, points: int = POINTS) -> pl.DataFrame:
    """At most so many rows of the timeline (at least four), unchanged and in order.

    timeline: `time_us` ascending, and columns of bytes whose sum is the total. Time is cut into equal buckets; of each
    the rows of the highest and of the lowest total stay, and the last, which the next bucket begins from. The first
    row stays too. So the maximum of every bucket, and with it the peak, is that of the whole.
    """
    if timeline.height <= points:
        return timeline
    buckets = max((points - 1) // 3, 1)
    since = pl.col(_TIME) - pl.col(_TIME).first()
    kept = (
        timeline.lazy()
        .select(
            row=pl.int_range(pl.len(), dtype=pl.Int64),
            bucket=since * buckets // (since.last() + 1),
            total=pl.sum_horizontal(pl.exclude(_TIME)),
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
    after = times.gather(live["event"].clip(lower_bound=0)).alias(_TIME)
    return live.select(after, *CATEGORIES)
