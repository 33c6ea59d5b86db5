"""A lookup of the innermost named range open on a thread at a moment, among up to a million ranges."""

from itertools import pairwise

import polars as pl

from stepscope.traces.nesting import Nest

_STRETCH = 1 << 17


class Places:
    """Named intervals on threads that launch work.

    A million intervals are nested in stretches, to save memory. The cuts are where no thread has an open interval.
    Fewer intervals are nested at once, only once.
    """

    def __init__(self, intervals: pl.DataFrame) -> None:
        """Hold the `intervals` (start_ns, duration_ns, name, track), nested if they are few."""
        if intervals.height > 2 * _STRETCH and not intervals["start_ns"].is_sorted():
            intervals = intervals.sort("start_ns", maintain_order=True)
        self._intervals = intervals
        self._cuts = _cuts(intervals)
        self._whole = Nest(intervals, "track") if len(self._cuts) == 1 else None

    def name_at(self, track: pl.Series, time_ns: pl.Series, alias: str) -> pl.Series:
        """The name of the innermost interval open at each moment on its thread, or null."""
        names = self._intervals["name"]
        if self._whole is not None:
            return gather(names, self._whole.innermost(track, time_ns)).alias(alias)
        begins = self._intervals["start_ns"].gather(self._cuts)
        asked = pl.DataFrame([track.alias("track"), time_ns.alias("time_ns")]).with_row_index("query")
        asked = asked.with_columns(begins.search_sorted(time_ns.fill_null(-1), side="right").alias("stretch"))
        answers = []
        for stretch, (first, last) in enumerate(pairwise([*self._cuts, self._intervals.height]), 1):
            queries = asked.filter(pl.col("stretch") == stretch)
            part = self._intervals[first:last]
            rows = Nest(part, "track").innermost(queries["track"], queries["time_ns"])
            answers.append(queries.select("query", gather(part["name"], rows).alias(alias)).drop_nulls())
        found = pl.concat([pl.DataFrame(schema={"query": pl.UInt32, alias: names.dtype}), *answers])
        return asked.select("query").join(found, on="query", how="left", maintain_order="left")[alias]


def _cuts(intervals: pl.DataFrame) -> list[int]:
    """The first rows of stretches of at least `_STRETCH` intervals, by start. No interval is in two stretches."""
    if intervals.height <= 2 * _STRETCH:
        return [0]
    reached = (intervals["start_ns"] + intervals["duration_ns"].clip(lower_bound=1)).cum_max().shift(1)
    free = (intervals["start_ns"] >= reached).fill_null(True).arg_true()
    return free.to_frame("row").group_by((pl.col("row") // _STRETCH).alias("stretch")).min()["row"].sort().to_list()


def gather(values: pl.Series, rows: pl.Series) -> pl.Series:
    """The values at rows; null for a null row."""
    if not len(values):
        return pl.Series(values.name, [None], dtype=values.dtype).new_from_index(0, len(rows))
    return values.gather(rows)
