"""Which kernels of several ranks are one collective, and how far the ranks' clocks are apart.

A collective is known by its process group and sequence number. Captures of older PyTorch have no such numbers: there
the order counts, among the collectives of one kind, step, phase and module. A collective whose ranks must finish
together (an all-reduce, say) ends at one moment on all of them: so their clocks are compared, and what ends at quite
another moment is none of it.
"""

from dataclasses import dataclass

import polars as pl

from stepscope.core.work.collectives import KINDS
from stepscope.traces.ranks.rank import Rank

SHARED_NS = 100_000
"""Clocks that differ by less count as one: ranks of one host share a clock, and a collective ends within this time."""
_APART_NS = 1_000_000
"""Ends that are further apart than this, and than the collective is long, are of two collectives."""

_TOGETHER = [kind.name for kind in KINDS if kind.ends_together]


@dataclass(frozen=True, kw_only=True)
class Clock:
    """A rank's clock beside that of the first rank.

    `offset_ns` is what its times are moved by; 0 where the clocks count as shared. `measured_ns` is the median of the
    differences between the ends of `compared` collectives, and `residual_ns` the median distance from it.
    """

    rank: int
    offset_ns: int
    measured_ns: int | None
    residual_ns: int | None
    compared: int


@dataclass(frozen=True, kw_only=True)
class Matched:
    """The collectives of a job. `arrivals`: one row for each rank of each collective that several of the ranks have.

    Its columns: collective (a number), rank, device, kind, group, group_size, bytes, step, phase, module, start_ns,
    end_ns (on the first rank's clock), `last_ns` (the last rank's arrival), `late` (that rank). `unmatched`: the number
    of collectives of each rank that no other rank has. `by_sequence`: whether sequence numbers told them.
    """

    arrivals: pl.DataFrame
    unmatched: dict[int, int]
    clocks: tuple[Clock, ...]
    by_sequence: bool


def match_collectives(ranks: tuple[Rank, ...]) -> Matched:
    """Match the collectives of these ranks, and set their clocks."""
    every = pl.concat([rank.collectives.with_columns(pl.lit(rank.number, pl.Int64).alias("rank")) for rank in ranks])
    by_sequence = bool(every.height) and not every["sequence"].has_nulls()
    key = ["group", "kind", "sequence"] if by_sequence else ["group", "kind", "step", "phase", "module"]
    occurrence = pl.int_range(pl.len()).over(["rank", *key], order_by="start_ns")
    found = every.with_columns(occurrence.alias("occurrence"))
    key = [*key, "occurrence"]
    numbers = found.select(key).unique(maintain_order=True).with_row_index("collective")
    found = found.join(numbers, on=key, how="left", maintain_order="left", nulls_equal=True)
    found = found.with_columns(pl.col("collective").cast(pl.Int64))
    clocks = tuple(_clock(rank.number, found, ranks[0].number) for rank in ranks)
    offsets = {clock.rank: clock.offset_ns for clock in clocks}
    moved = pl.col("rank").replace_strict(offsets, return_dtype=pl.Int64)
    found = found.with_columns(pl.col("start_ns") - moved, pl.col("end_ns") - moved)
    found = found.filter(_of_one(found)).filter(pl.col("rank").n_unique().over("collective") > 1)
    late = pl.col("rank").sort_by("start_ns", "rank").last().over("collective")
    arrivals = found.with_columns(pl.col("start_ns").max().over("collective").alias("last_ns"), late.alias("late"))
    counts = dict(arrivals.group_by("rank").len().iter_rows())
    return Matched(
        arrivals=arrivals.drop("occurrence", "sequence", "stream").sort("last_ns", "rank"),
        unmatched={rank.number: rank.collectives.height - counts.get(rank.number, 0) for rank in ranks},
        clocks=clocks,
        by_sequence=by_sequence,
    )


def _clock(rank: int, found: pl.DataFrame, first: int) -> Clock:
    """The clock of a rank by the ends of the collectives that it shares with the first one."""
    comparable = found.filter(pl.col("kind").is_in(_TOGETHER))
    ends = comparable.filter(pl.col("rank") == rank).select("collective", "end_ns")
    of_first = comparable.filter(pl.col("rank") == first).select("collective", pl.col("end_ns").alias("first_ns"))
    apart = ends.join(of_first, on="collective").select(pl.col("end_ns") - pl.col("first_ns")).to_series()
    if rank == first or apart.is_empty():
        return Clock(rank=rank, offset_ns=0, measured_ns=None, residual_ns=None, compared=0)
    # The lower median is a difference that was seen; with two values a mean of them would not be one.
    measured = int(apart.sort().gather((len(apart) - 1) // 2).item())
    residual = (apart - measured).abs().sort().gather((len(apart) - 1) // 2).item()
    return Clock(
        rank=rank,
        offset_ns=measured if abs(measured) > SHARED_NS else 0,
        measured_ns=measured,
        residual_ns=int(residual),
        compared=len(apart),
    )


def _of_one(found: pl.DataFrame) -> pl.Series:
    """Whether a row ends when its collective does on the other ranks, for the kinds that end together."""
    length = (pl.col("end_ns") - pl.col("start_ns")).min().over("collective")
    distance = (pl.col("end_ns") - pl.col("end_ns").median().over("collective")).abs() * 2
    apart = pl.col("kind").is_in(_TOGETHER) & (distance > pl.max_horizontal(length, pl.lit(_APART_NS)))
    return found.select(~apart).to_series()
