"""A job of several ranks: who waits for whom at its collectives, how fast these are, and what makes a rank late."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import polars as pl

from stepscope.core.errors import InputError
from stepscope.core.units import counted
from stepscope.core.work.collectives import named_kind
from stepscope.traces.captures.intervals import covered_ns
from stepscope.traces.captures.summary import layers_together
from stepscope.traces.ranks.matching import Matched, match_collectives
from stepscope.traces.ranks.rank import COMPUTATION, Rank


@dataclass(frozen=True, kw_only=True)
class Excess:
    """Time that a rank spends beyond the mean of the others, over the job's steps: computing in a module, or idle."""

    rank: int
    what: str
    phase: str | None
    place: str | None
    excess_ns: float


@dataclass(frozen=True, kw_only=True)
class Job:
    """The ranks of a job, by their number, and their collectives."""

    ranks: tuple[Rank, ...]
    matched: Matched

    @property
    def size(self) -> int:
        """The number of ranks of the job, as the traces say, or else of those that are here."""
        return max((rank.ranks or 0 for rank in self.ranks), default=0) or len(self.ranks)

    @property
    def steps(self) -> int:
        """The steps that every rank has."""
        return min(rank.steps for rank in self.ranks)

    @property
    def step_ns(self) -> float:
        """The shortest mean step of any rank."""
        return min((rank.end_ns - rank.start_ns) / rank.steps for rank in self.ranks)

    @cached_property
    def meetings(self) -> pl.DataFrame:
        """Each rank's wait at each collective: rank, late, step, waiting_ns, stalled_ns; the late rank's own is zero.

        A rank waits from its arrival to the last rank's. It is stalled in the part in which its device computes
        nothing, and that is what a late rank costs: a wait behind computation costs little.
        """
        parts: list[pl.DataFrame] = []
        offsets = {clock.rank: clock.offset_ns for clock in self.matched.clocks}
        for rank in self.ranks:
            mine = self.matched.arrivals.filter(pl.col("rank") == rank.number)
            for device in mine["device"].unique().to_list():
                here = mine.filter(pl.col("device") == device)
                computing = rank.computing.filter(pl.col("device") == device)
                begin, end = here["start_ns"] + offsets[rank.number], here["last_ns"] + offsets[rank.number]
                waiting, covered = (end - begin).alias("waiting_ns"), covered_ns(computing, begin, end)
                parts.append(here.select("rank", "late", "step", waiting, (waiting - covered).alias("stalled_ns")))
        columns = ("rank", "late", "step", "waiting_ns", "stalled_ns")
        nothing = pl.DataFrame(schema=pl.Schema(dict.fromkeys(columns, pl.Int64())))
        return pl.concat([nothing, *parts])

    @cached_property
    def waits(self) -> pl.DataFrame:
        """Who waited for whom: rank, late, waits, waiting_ns, stalled_ns."""
        return (
            self.meetings.filter(pl.col("rank") != pl.col("late"))
            .group_by("rank", "late")
            .agg(pl.len().alias("waits"), pl.col("waiting_ns", "stalled_ns").sum())
            .sort("waiting_ns", "rank", "late", descending=[True, False, False])
        )

    def waiting_ns(self, rank: int) -> int:
        """The time that a rank waited for others at its collectives."""
        return int(self.waits.filter(pl.col("rank") == rank)["waiting_ns"].sum())

    def stalled_ns(self, rank: int) -> int:
        """The time that a rank waited for others while it computed nothing."""
        return int(self.waits.filter(pl.col("rank") == rank)["stalled_ns"].sum())

    def waited_for_ns(self, rank: int) -> int:
        """The time that all others together waited for this rank."""
        return int(self.waits.filter(pl.col("late") == rank)["waiting_ns"].sum())

    def in_a_step(self, rank: int) -> tuple[float, float]:
        """The time that a rank waits, and is stalled, in the median step.

        The ranks' captures begin at different moments, which the first step shows as waiting: a mean would hold it.
        """
        steps = (
            self.meetings.filter(pl.col("rank") == rank).group_by("step").agg(pl.col("waiting_ns", "stalled_ns").sum())
        )
        medians = steps.select(pl.col("waiting_ns", "stalled_ns").median()).row(0)
        return medians[0] or 0.0, medians[1] or 0.0

    @cached_property
    def lateness(self) -> pl.DataFrame:
        """The rank that comes last in most collectives of a step, by how much at most: step, late, latest_ns.

        The first of several steps is left out, in which the captures begin.
        """
        largest = pl.col("waiting_ns").max()
        steps = self.meetings.group_by("step").agg(pl.col("late").mode().min(), largest.alias("latest_ns")).sort("step")
        return steps[1:] if steps.height > 1 else steps

    def last_arrivals(self, rank: int) -> int:
        """The number of collectives at which this rank arrived last."""
        chosen = self.matched.arrivals.filter((pl.col("late") == rank) & (pl.col("rank") == rank))
        return chosen.height

    @cached_property
    def collectives(self) -> pl.DataFrame:
        """Collectives by kind and size: kind, bytes, group_size, calls, bus_bytes_per_s, skew_ns, largest_skew_ns.

        A transfer lasts from the last arrival to the last end. `skew_ns` is the mean time from the first arrival to the
        last. The rate is null where the size is unknown.
        """
        each = self.matched.arrivals.group_by("collective").agg(
            pl.col("kind", "bytes").first(),
            pl.coalesce(pl.col("group_size").max(), pl.len()).alias("group_size"),
            (pl.col("end_ns").max() - pl.col("last_ns").first()).clip(lower_bound=1).alias("transfer_ns"),
            (pl.col("last_ns").first() - pl.col("start_ns").min()).alias("skew_ns"),
        )
        sums = (
            each.group_by("kind", "bytes", "group_size")
            .agg(
                pl.len().alias("calls"),
                pl.col("transfer_ns").sum(),
                pl.col("skew_ns").mean(),
                pl.col("skew_ns").max().alias("largest_skew_ns"),
            )
            .sort("transfer_ns", "kind", "bytes", descending=[True, False, False])
        )
        factors = [
            named_kind(kind).factor(max(1, ranks)) for kind, ranks in sums.select("kind", "group_size").iter_rows()
        ]
        carried = pl.col("bytes") * pl.col("calls") * pl.Series("factor", factors, dtype=pl.Float64)
        return sums.with_columns((carried / (pl.col("transfer_ns") * 1e-9)).alias("bus_bytes_per_s"))

    @cached_property
    def times(self) -> pl.DataFrame:
        """Computation by phase and module, and idle time by phase and cause, of all layers together.

        Its columns: what, phase, place, mean_ns over the ranks, most_ns, and rank (who has the most). The times are
        of the job's steps: those of a rank with more steps are scaled down.
        """
        numbers = [rank.number for rank in self.ranks]
        wide = self._by_rank(folded=True)
        columns = [str(number) for number in numbers]
        ranked = pl.concat_list(columns).list
        return wide.select(
            "what",
            "phase",
            "place",
            pl.mean_horizontal(columns).alias("mean_ns"),
            pl.max_horizontal(columns).alias("most_ns"),
            ranked.arg_max().replace_strict(dict(enumerate(numbers)), return_dtype=pl.Int64).alias("rank"),
        ).sort(pl.col("most_ns") - pl.col("mean_ns"), "place", descending=[True, False])

    def excesses(self, rank: int) -> list[Excess]:
        """What a rank spends more time on than the others do, the largest first."""
        others = [str(one.number) for one in self.ranks if one.number != rank]
        if not others:
            return []
        rows = self._by_rank(folded=False).select(
            "what", "phase", "place", (pl.col(str(rank)) - pl.mean_horizontal(others)).alias("excess_ns")
        )
        rows = rows.sort("excess_ns", "what", "place", descending=[True, False, False])
        return [Excess(rank=rank, **row) for row in rows.iter_rows(named=True) if row["excess_ns"] > 0]

    def _by_rank(self, *, folded: bool) -> pl.DataFrame:
        """The times of the job's steps side by side: what, phase, place, and a column of nanoseconds for each rank."""
        place = layers_together("place") if folded else pl.col("place")
        every = pl.concat(
            [
                rank.times.with_columns(
                    pl.when(pl.col("what") == COMPUTATION).then(place).otherwise("place").alias("place"),
                    (pl.col("duration_ns") * self.steps / rank.steps).round().cast(pl.Int64).alias("duration_ns"),
                    pl.lit(str(rank.number)).alias("rank"),
                )
                for rank in self.ranks
            ]
        )
        wide = every.pivot(on="rank", index=["what", "phase", "place"], values="duration_ns", aggregate_function="sum")
        missing = [str(rank.number) for rank in self.ranks if str(rank.number) not in wide.columns]
        return wide.with_columns(pl.lit(0).alias(name) for name in missing).with_columns(
            pl.col(str(rank.number)).fill_null(0) for rank in self.ranks
        )


def job_of(ranks: list[Rank]) -> Job:
    """The job that these ranks are of. Raises InputError where they cannot be of one job."""
    ordered = tuple(sorted(ranks, key=lambda rank: rank.number))
    for before, after in pairwise(ordered):
        if before.number == after.number:
            raise InputError(
                f"rank {before.number} is here twice: {before.source} and {after.source}: give one of them"
            )
    _check_distinct(ordered)
    sizes = {rank.ranks: rank for rank in ordered if rank.ranks is not None}
    if len(sizes) > 1:
        one, other, *_ = sizes.values()
        raise InputError(
            f"these captures are of different jobs: {one.source} is of {one.ranks} ranks and {other.source} of "
            f"{other.ranks}: give the captures of one job"
        )
    beyond = next((rank for rank in ordered for size in sizes if rank.number >= (size or 0)), None)
    if beyond is not None:
        size = next(iter(sizes))
        raise InputError(
            f"{beyond.source} would be rank {beyond.number}, but the job has {counted(size or 0, 'rank')}, from 0: "
            "leave it out, or name it by its rank, as in rank0.json"
        )
    return Job(ranks=ordered, matched=match_collectives(ordered))


def _check_distinct(ranks: tuple[Rank, ...]) -> None:
    """Raise InputError where one capture has two names: no two processes run alike to the nanosecond.

    Captures that say which rank of how many they are need no such guess.
    """
    seen: dict[tuple[int, ...], Rank] = {}
    for rank in (rank for rank in ranks if rank.ranks is None):
        same = seen.setdefault((rank.start_ns, rank.end_ns, rank.kernels, rank.computation_ns), rank)
        if same is not rank and same.kernels > 1:
            raise InputError(f"{same.source} and {rank.source} hold the same work at the same time: give one of them")
