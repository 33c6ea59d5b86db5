"""Exact arithmetic on sets of disjoint intervals: their length, and the time that they cover in each window."""

import polars as pl

from stepscope.traces.nesting import union


def pieces(work: pl.DataFrame) -> pl.DataFrame:
    """The union of the work's intervals, sorted and disjoint: start_ns, end_ns. Empty intervals cover nothing."""
    return union(work.filter(pl.col("duration_ns") > 0), []).select("start_ns", "end_ns")


def length_ns(disjoint: pl.DataFrame) -> int:
    """The total time that disjoint intervals (start_ns, end_ns) cover."""
    return int((disjoint["end_ns"] - disjoint["start_ns"]).sum())


def covered_ns(disjoint: pl.DataFrame, start_ns: pl.Series, end_ns: pl.Series) -> pl.Series:
    """The time that sorted disjoint intervals cover in each window."""
    if not disjoint.height:
        return pl.Series("covered_ns", [0], dtype=pl.Int64).new_from_index(0, len(start_ns))
    covered = _covered_before(disjoint, end_ns) - _covered_before(disjoint, start_ns)
    return covered.clip(lower_bound=0).alias("covered_ns")


def _covered_before(disjoint: pl.DataFrame, moment_ns: pl.Series) -> pl.Series:
    """The time that the intervals cover before each moment."""
    begun = disjoint["start_ns"].search_sorted(moment_ns, side="right").cast(pl.Int64)
    last = (begun - 1).clip(lower_bound=0)
    whole = (disjoint["end_ns"] - disjoint["start_ns"]).cum_sum()
    # All intervals that have begun, minus the part of the last one that is still to come.
    rest = (disjoint["end_ns"].gather(last) - moment_ns).clip(lower_bound=0)
    return (begun > 0).cast(pl.Int64) * (whole.gather(last) - rest)
