"""The queue of each device: work that is launched and has not started. An empty queue leaves the device to the host.

The kernels of a graph's replay are all launched by one call, so all wait from there. Work without a recorded launch
does not count.
"""

from dataclasses import dataclass

import polars as pl

from stepscope.traces.captures.attribution import Attribution

PIECES = 100
"""Equal parts of the span in which the mean length is told."""


@dataclass(frozen=True, kw_only=True)
class Queue:
    """The queue of one device, from the first launch to the start of the last work.

    `mean`: over time. `empty_share`: the share of the span in which nothing waited. `wait_ns`: median time from launch
    to start. `over_time`: the mean length in each of PIECES equal parts of the span.
    """

    device: int
    span_ns: int
    mean: float
    longest: int
    empty_share: float
    wait_ns: int
    over_time: tuple[float, ...]


def queues(attribution: Attribution) -> tuple[Queue, ...]:
    """The queue of each device; none for a CPU, and where no launch is recorded."""
    if attribution.table.on_cpu:
        return ()
    launched = attribution.work.filter(pl.col("launch_ns").is_not_null()).select(
        "device",
        "launch_ns",
        pl.max_horizontal("start_ns", "launch_ns").alias("start_ns"),  # clocks of host and device may differ a little
    )
    return tuple(
        _queue(device, launched.filter(pl.col("device") == device))
        for device in launched["device"].unique().sort().to_list()
    )


def _queue(device: int, work: pl.DataFrame) -> Queue:
    changes = (
        pl.concat(
            [
                work.select(pl.col("launch_ns").alias("at_ns"), pl.lit(1, pl.Int64).alias("change")),
                work.select(pl.col("start_ns").alias("at_ns"), pl.lit(-1, pl.Int64).alias("change")),
            ]
        )
        .group_by("at_ns")
        .agg(pl.col("change").sum())
        .sort("at_ns")
        .with_columns(pl.col("change").cum_sum().alias("length"))
        .with_columns((pl.col("at_ns").shift(-1) - pl.col("at_ns")).fill_null(0).alias("lasts_ns"))
    )
    area = (changes["length"] * changes["lasts_ns"]).cum_sum()
    moments = changes["at_ns"].to_list()
    first, last = moments[0], moments[-1]
    span_ns, waited_ns = last - first, int((work["start_ns"] - work["launch_ns"]).sum())
    empty_ns = int(changes.filter(pl.col("length") == 0)["lasts_ns"].sum())
    longest, median = changes["length"].max(), (work["start_ns"] - work["launch_ns"]).median()
    return Queue(
        device=device,
        span_ns=span_ns,
        mean=waited_ns / span_ns if span_ns else 0.0,
        longest=longest if isinstance(longest, int) else 0,
        empty_share=empty_ns / span_ns if span_ns else 0.0,
        wait_ns=round(median) if isinstance(median, int | float) else 0,
        over_time=_means(changes, area, first, span_ns) if span_ns >= PIECES else (),
    )


def _means(changes: pl.DataFrame, area: pl.Series, first: int, span_ns: int) -> tuple[float, ...]:
    """The mean length in each part of the span, from the area below the curve up to each bound."""
    bounds = pl.Series([first + span_ns * piece // PIECES for piece in range(PIECES + 1)], dtype=pl.Int64)
    at = (changes["at_ns"].search_sorted(bounds, side="right").cast(pl.Int64) - 1).clip(lower_bound=0)
    whole = (area - changes["length"] * changes["lasts_ns"]).gather(at)
    below = whole + changes["length"].gather(at) * (bounds - changes["at_ns"].gather(at))
    return tuple((below.diff().drop_nulls() / bounds.diff().drop_nulls()).to_list())
