"""The host's waits for a device: synchronising calls, blocking copies, operators that fetch a number."""

import polars as pl

from stepscope.traces.nesting import Nest
from stepscope.traces.table import TraceTable

_WAIT = r"^(?:cuda|cu|hip)\w*Synchronize|^(?:cuda|cu|hip)Memcpy|^(?:cuda|hip)Free(?:_|$)|^cuMemFree(?:_|$)"
"""A pattern of the calls that wait for the device. Freeing device memory waits too."""
_NO_WAIT = r"Async"
_WAITING_OPERATOR = r"^aten::(?:item|_local_scalar_dense|is_nonzero)$"
_TO_HOST = r"\bDtoH\b"


def matching(names: pl.Series, pattern: str, but_not: str | None = None) -> pl.Series:
    """The distinct names that match a pattern. Each distinct name is tested once."""
    distinct = names.unique().cast(pl.String).alias("name").drop_nulls()
    match = pl.col("name").str.contains(pattern)
    if but_not:
        match = match & ~pl.col("name").str.contains(but_not)
    return distinct.to_frame().filter(match).to_series().cast(names.dtype)


def named(frame: pl.DataFrame, pattern: str, but_not: str | None = None) -> pl.DataFrame:
    """The rows whose name matches a pattern."""
    return frame.filter(pl.col("name").is_in(matching(frame["name"], pattern, but_not).implode()))


def waits(table: TraceTable, work: pl.DataFrame) -> pl.DataFrame:
    """The host's calls and operators that wait for a device: process, thread, start_ns, duration_ns, name."""
    columns = ["process", "thread", "start_ns", "duration_ns", "name"]
    calls = named(table.calls, _WAIT, _NO_WAIT).select(columns)
    # A copy to pageable memory blocks, whatever the name of its call. A copy to pinned memory returns at once.
    copies = named(work.select("process", "launch_thread", "launch_ns", "name"), _TO_HOST)
    to_host = named(table.calls, r"Memcpy\w*Async").join(
        copies,
        left_on=["process", "thread", "start_ns"],
        right_on=["process", "launch_thread", "launch_ns"],
        how="semi",
    )
    operators = named(table.operators, _WAITING_OPERATOR)
    return pl.concat(
        [calls, to_host.select(columns), operators.select(pl.col(columns[:4]), pl.col("name").cast(pl.Categorical()))]
    )


def waiting_call(gaps: pl.DataFrame, waiting: pl.DataFrame) -> pl.Series:
    """For each gap, the name of a wait that was in progress when the device ran dry and had ended at the next launch.

    `gaps`: process, start_ns, launch_ns and the threads of the launches on either side, launch_thread, thread_before.
    """
    if not waiting.height:
        return pl.Series("wait", [None], dtype=pl.Categorical()).new_from_index(0, gaps.height)
    threads = waiting.select("process", "thread").unique(maintain_order=True)
    threads = threads.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias("track"))
    waiting = waiting.join(threads, on=["process", "thread"], how="left", maintain_order="left")
    nest = Nest(waiting, "track")
    answers = []
    for thread in ("launch_thread", "thread_before"):
        asked = gaps.join(
            threads, left_on=["process", thread], right_on=["process", "thread"], how="left", maintain_order="left"
        )
        rows = nest.innermost(asked["track"], gaps["start_ns"])
        over = (waiting["start_ns"] + waiting["duration_ns"]).gather(rows) <= gaps["launch_ns"]
        answers.append(pl.select(pl.when(over).then(waiting["name"].gather(rows))).to_series())
    return pl.select(pl.coalesce(*answers).alias("wait")).to_series()
