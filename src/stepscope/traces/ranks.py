"""A job of several ranks: who waits for whom at its collectives, how fast these are, and what makes a rank late."""

import contextlib
import gzip
import os
import re
import signal
import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec
import polars as pl

from stepscope.core.answer import Finding
from stepscope.core.errors import InputError, StepscopeError
from stepscope.core.formulas.communication import KINDS, kind_of, message_bytes, named_kind
from stepscope.core.interrupts import end_with_stdin
from stepscope.core.range_names import STEP
from stepscope.core.run_directory import CAPTURE_FILES, RANK_FOLDER, RUN_FILE
from stepscope.core.units import counted
from stepscope.traces.captures.attribution import Attribution, gather, range_kind
from stepscope.traces.captures.checks import DOUBTS, check_trace
from stepscope.traces.captures.digest import find_capture, load_capture, read_trace
from stepscope.traces.captures.occupation import covered_ns
from stepscope.traces.captures.summary import TraceSummary, layers_together
from stepscope.traces.nesting import open_rows, union
from stepscope.traces.readers.kineto import rank_in_head
from stepscope.traces.table import TraceTable

# One rank of a job: its times in short, and its collectives. The capture itself is let go, so that many fit.


COLLECTIVES = pl.Schema(
    {
        "device": pl.Int64,
        "stream": pl.Int64,
        "kind": pl.String,
        "group": pl.String,
        "group_size": pl.Int64,
        "bytes": pl.Int64,
        "sequence": pl.Int64,
        "step": pl.Int64,
        "phase": pl.String,
        "module": pl.String,
        "start_ns": pl.Int64,
        "end_ns": pl.Int64,
    }
)
"""Columns of a rank's collectives, by start: kernels of communication. What the trace does not say is null."""

COMPUTATION, IDLE = "computation", "idle"
_COMPUTES = pl.col("family") != "communication"
_LAST_NUMBER = re.compile(r"(\d+)\W*$")


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank's capture. Times are over the whole capture and all of its devices; its clock is the capture's own.

    `number` is the rank, of `ranks` in the job (None where the trace does not say). `busy_ns` sums kernels, `union_ns`
    counts overlapping ones once. Communication that no computation hides is exposed. `times`: where the time went that
    is not communication (what, phase, place, duration_ns), for computation by module, for idle time by its cause.
    `computing`: when any kernel but communication's ran, by device (device, start_ns, end_ns; sorted, disjoint).
    `doubts`: the findings on what this capture lacks, or what in it cannot be true.
    """

    number: int
    ranks: int | None
    source: str
    device: str
    steps: int
    step_numbers: tuple[int, ...]
    kernels: int
    busy_ns: int
    union_ns: int
    idle_ns: int
    communication_ns: int
    exposed_ns: int
    computation_ns: int
    start_ns: int
    end_ns: int
    times: pl.DataFrame
    collectives: pl.DataFrame
    computing: pl.DataFrame
    doubts: tuple[Finding, ...] = ()


def rank_of(summary: TraceSummary, number: int, source: str) -> Rank:
    """The rank that a capture is of, in short."""
    attribution, table = summary.attribution, summary.attribution.table
    work, occupied = attribution.work, summary.occupation
    steps = _step_numbers(attribution)
    # The own times of a CPU's operators do not overlap: what is no communication is computation, and hides none of it.
    on_cpu = int(attribution.kernels.filter(~_COMPUTES)["duration_ns"].sum()) if table.on_cpu else 0
    used = [table.devices[device] for device in work["device"].unique().sort().to_list() if device in table.devices]
    start, end = work["start_ns"].min(), (work["start_ns"] + work["duration_ns"]).max()
    return Rank(
        number=number,
        ranks=table.ranks,
        source=source,
        device=", ".join(dict.fromkeys(used)),
        steps=summary.steps,
        step_numbers=tuple(steps.values()),
        kernels=summary.kernel_count,
        busy_ns=summary.busy_ns,
        union_ns=summary.union_ns,
        idle_ns=sum(device.idle_ns for device in occupied.devices) if occupied else 0,
        communication_ns=on_cpu + sum(one.communication_ns for one in summary.overlaps),
        exposed_ns=on_cpu + sum(one.exposed_ns for one in summary.overlaps),
        computation_ns=summary.busy_ns - on_cpu
        if table.on_cpu
        else sum(one.computation_ns for one in summary.overlaps),
        start_ns=start if isinstance(start, int) else 0,
        end_ns=end if isinstance(end, int) else 0,
        times=_times(summary),
        collectives=collectives_of(attribution, steps),
        computing=union(attribution.kernels.filter(_COMPUTES & (pl.col("duration_ns") > 0)), ["device"]).drop("merged"),
        doubts=check_trace(summary, DOUBTS),
    )


def _step_numbers(attribution: Attribution) -> dict[int, int]:
    """The number in the name of each step's range (`ProfilerStep#552`) by the step's place; the place without one."""
    instances = attribution.instances.filter(pl.col("what") == STEP).sort("start_ns")
    ranges = attribution.table.ranges
    names = [name for name in ranges["name"].unique().to_list() if range_kind(name) == "step"]
    named = ranges.filter(pl.col("name").cast(pl.String).is_in(names)).select(
        "start_ns", pl.col("name").cast(pl.String)
    )
    named_at = dict(named.sort("start_ns", descending=True).iter_rows())
    numbers = [_LAST_NUMBER.search(named_at.get(start_ns, "")) for start_ns in instances["start_ns"].to_list()]
    if not all(numbers):
        return dict(enumerate(range(len(numbers))))
    return {place: int(match[1][-9:]) for place, match in enumerate(numbers) if match}


def _times(summary: TraceSummary) -> pl.DataFrame:
    kernels = summary.attribution.kernels.filter(_COMPUTES)
    computation = kernels.group_by(
        pl.col("phase").cast(pl.String), pl.col("module").cast(pl.String).alias("place")
    ).agg(pl.col("duration_ns").sum())
    parts = [computation.select(pl.lit(COMPUTATION).alias("what"), "phase", "place", "duration_ns")]
    if summary.occupation is not None:
        idle = summary.occupation.by_cause.group_by(
            pl.col("phase").cast(pl.String), pl.col("cause").cast(pl.String).alias("place")
        ).agg(pl.col("idle_ns").sum().alias("duration_ns"))
        parts.append(idle.select(pl.lit(IDLE).alias("what"), "phase", "place", "duration_ns"))
    return pl.concat(parts)


def collectives_of(attribution: Attribution, steps: dict[int, int]) -> pl.DataFrame:
    """The kernels of communication with what the trace says of them."""
    kernels = attribution.kernels.filter(pl.col("family") == "communication").sort("start_ns", "stream")
    if not kernels.height or attribution.table.on_cpu:
        return pl.DataFrame(schema=COLLECTIVES)
    sized = _with_sizes(kernels, attribution.table)
    names = pl.coalesce(pl.col("collective"), pl.col("range"), pl.col("name").cast(pl.String))
    kinds = {name: kind_of(name).name for name in sized.select(names.alias("n"))["n"].unique().to_list()}
    elements = pl.max_horizontal("elements_in", "elements_out")
    sizes = {
        (count, dtype): message_bytes(count, dtype)
        for count, dtype in sized.select(elements, "dtype").unique().iter_rows()
    }
    size = pl.col("group_size")
    bytes_ = [sizes[row] for row in sized.select(elements, "dtype").iter_rows()]
    return sized.select(
        "device",
        "stream",
        names.replace_strict(kinds, return_dtype=pl.String).alias("kind"),
        "group",
        pl.when(size > 0).then(size).alias("group_size"),
        pl.Series("bytes", bytes_, dtype=pl.Int64),
        "sequence",
        pl.col("step").replace_strict(steps, default=pl.col("step"), return_dtype=pl.Int64),
        pl.col("phase").cast(pl.String),
        pl.col("module").cast(pl.String),
        "start_ns",
        (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns"),
    )


_SAID = ("collective", "group", "group_size", "elements_in", "elements_out", "dtype", "sequence")


def _with_sizes(kernels: pl.DataFrame, table: TraceTable) -> pl.DataFrame:
    """The kernels with what their own arguments say, or else the operator that launched them, and the name of the range
    round their launch (`nccl:all_to_all`: its kernels are called SendRecv)."""
    rows = table.collectives.drop_nulls("correlation").unique(["correlation", "start_ns"], keep="first")
    kernels = kernels.join(
        rows.select("correlation", "start_ns", *_SAID),
        on=["correlation", "start_ns"],
        how="left",
        maintain_order="left",
    )
    calls = table.operators.join(
        table.collectives.filter(pl.col("correlation").is_null()).unique(
            ["process", "thread", "start_ns"], keep="last"
        ),
        on=["process", "thread", "start_ns"],
        how="inner",
    )
    launched = _open_at(kernels, calls).select(pl.col(name).alias(f"_{name}") for name in _SAID)
    ranges = table.ranges.filter(pl.col("name").cast(pl.String).str.contains(r"^(?:nccl|gloo|rccl):"))
    around = _open_at(kernels, ranges).select(pl.col("name").cast(pl.String).alias("range"))
    return (
        kernels.hstack(launched)
        .hstack(around)
        .with_columns(pl.coalesce(name, f"_{name}").alias(name) for name in _SAID)
        .drop(f"_{name}" for name in _SAID)
    )


def _open_at(kernels: pl.DataFrame, intervals: pl.DataFrame) -> pl.DataFrame:
    """The interval that was open on each kernel's thread at its launch; a row of nulls where none was."""
    places = kernels.select("process", pl.col("launch_thread").alias("thread"))
    row = open_rows(intervals, places, kernels["launch_ns"])
    return pl.DataFrame([gather(column, row) for column in intervals])


# Which kernels of several ranks are one collective, and how far the ranks' clocks are apart.
#
# A collective is known by its process group and sequence number. Captures of older PyTorch have no such numbers: there
# the order counts, among the collectives of one kind, step, phase and module. A collective whose ranks must finish
# together (an all-reduce, say) ends at one moment on all of them: so their clocks are compared, and what ends at quite
# another moment is none of it.


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
    rows = every.with_columns(occurrence.alias("occurrence"))
    key = [*key, "occurrence"]
    numbers = rows.select(key).unique(maintain_order=True).with_row_index("collective")
    rows = rows.join(numbers, on=key, how="left", maintain_order="left", nulls_equal=True)
    rows = rows.with_columns(pl.col("collective").cast(pl.Int64))
    ends = rows.filter(pl.col("kind").is_in(_TOGETHER)).select("rank", "collective", "end_ns")
    by_rank, nothing = ends.partition_by("rank", as_dict=True), ends.clear()
    of_first = by_rank.get((ranks[0].number,), nothing).rename({"end_ns": "first_ns"})
    clocks = tuple(
        _clock(rank.number, by_rank.get((rank.number,), nothing), of_first, ranks[0].number) for rank in ranks
    )
    offsets = {clock.rank: clock.offset_ns for clock in clocks}
    moved = pl.col("rank").replace_strict(offsets, return_dtype=pl.Int64)
    rows = rows.with_columns(pl.col("start_ns") - moved, pl.col("end_ns") - moved)
    # A row of a kind that ends together, and ends at another moment than on the other ranks, is of another collective.
    length = (pl.col("end_ns") - pl.col("start_ns")).min().over("collective")
    distance = (pl.col("end_ns") - pl.col("end_ns").median().over("collective")).abs() * 2
    apart = pl.col("kind").is_in(_TOGETHER) & (distance > pl.max_horizontal(length, pl.lit(_APART_NS)))
    rows = rows.filter(~apart).filter(pl.col("rank").n_unique().over("collective") > 1)
    late = pl.col("rank").sort_by("start_ns", "rank").last().over("collective")
    arrivals = rows.with_columns(pl.col("start_ns").max().over("collective").alias("last_ns"), late.alias("late"))
    counts = dict(arrivals.group_by("rank").len().iter_rows())
    return Matched(
        arrivals=arrivals.drop("occurrence", "sequence", "stream").sort("last_ns", "rank"),
        unmatched={rank.number: rank.collectives.height - counts.get(rank.number, 0) for rank in ranks},
        clocks=clocks,
        by_sequence=by_sequence,
    )


def _clock(rank: int, ends: pl.DataFrame, of_first: pl.DataFrame, first: int) -> Clock:
    """The clock of a rank by the ends of the collectives that it shares with the first one."""
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
        by_rank = self.matched.arrivals.partition_by("rank", as_dict=True)
        for rank in (rank for rank in self.ranks if (rank.number,) in by_rank):
            mine = by_rank[rank.number,]
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
        return self._waited.get(rank, (0, 0))[0]

    def stalled_ns(self, rank: int) -> int:
        """The time that a rank waited for others while it computed nothing."""
        return self._waited.get(rank, (0, 0))[1]

    @cached_property
    def _waited(self) -> dict[int, tuple[int, int]]:
        """The times of `waiting_ns` and `stalled_ns`, for all ranks at once: one by one they grew as their square."""
        sums = self.waits.group_by("rank").agg(pl.col("waiting_ns", "stalled_ns").sum())
        return {rank: (waiting, stalled) for rank, waiting, stalled in sums.iter_rows()}

    def waited_for_ns(self, rank: int) -> int:
        """The time that all others together waited for this rank."""
        return self._late.get(rank, 0)

    @cached_property
    def _late(self) -> dict[int, int]:
        return dict(self.waits.group_by("late").agg(pl.col("waiting_ns").sum()).iter_rows())

    def in_a_step(self, rank: int) -> tuple[float, float]:
        """The time that a rank waits, and is stalled, in the median step.

        The ranks' captures begin at different moments, which the first step shows as waiting: a mean would hold it.
        """
        return self._in_a_step.get(rank, (0.0, 0.0))

    @cached_property
    def _in_a_step(self) -> dict[int, tuple[float, float]]:
        times = pl.col("waiting_ns", "stalled_ns")
        medians = self.meetings.group_by("rank", "step").agg(times.sum()).group_by("rank").agg(times.median())
        return {rank: (waiting or 0.0, stalled or 0.0) for rank, waiting, stalled in medians.iter_rows()}

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
        return self._last_arrivals.get(rank, 0)

    @cached_property
    def _last_arrivals(self) -> dict[int, int]:
        return dict(self.matched.arrivals.filter(pl.col("late") == pl.col("rank")).group_by("rank").len().iter_rows())

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
        there = set(wide.columns)
        missing = [str(rank.number) for rank in self.ranks if str(rank.number) not in there]
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
    # No two processes run alike to the nanosecond; captures that say their rank need no such guess.
    first_of: dict[tuple[int, ...], Rank] = {}
    for rank in (rank for rank in ordered if rank.ranks is None):
        same = first_of.setdefault((rank.start_ns, rank.end_ns, rank.kernels, rank.computation_ns), rank)
        if same is not rank and same.kernels > 1:
            raise InputError(f"{same.source} and {rank.source} hold the same work at the same time: give one of them")
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


# Which captures are a job's.


_CAPTURES = (".json", ".json.gz", ".sqlite", ".nsys-rep")
_RANK = re.compile(r"rank[-_ .]?(\d{1,6})", re.IGNORECASE)
_SETTINGS_BYTES = 2**22
"""A larger JSON file beside captures is taken for a capture without a look inside."""
_NUMBERS = re.compile(r"(\d+)")


def captures_in(folder: Path) -> list[Path]:
    """The captures that a folder holds, or that lie in its run directories, in the order of the numbers in their names.

    Those of a run directory whose step ranks shared, too. Empty for a file, for any other run directory, and for the
    parquet files of one export. Whole JSON documents that hold no events, such as settings, are left out; whatever is
    damaged is not, so that no rank is lost unseen.
    """
    if (folder / RUN_FILE).exists():
        return _of_ranks(folder)
    if not folder.is_dir() or any(folder.glob("*.parquet")):
        return []
    try:
        entries = list(folder.iterdir())
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror or error}") from None
    if any((folder / name).exists() for name in CAPTURE_FILES):
        return []
    paths = [
        entry
        for entry in entries
        if (entry.is_file() and entry.name.endswith(_CAPTURES) and not _holds_no_events(entry))
        or (entry.is_dir() and any((entry / name).exists() for name in CAPTURE_FILES))
    ]
    return sorted(paths, key=lambda path: in_order(path.name))


def in_order(name: str) -> list[int | str]:
    """What sorts names by the numbers in them."""
    return [int(part) if part.isdigit() else part for part in _NUMBERS.split(name)]


def _of_ranks(folder: Path) -> list[Path]:
    """The captures of the ranks that shared a run's step, its own first; empty where there are no others."""
    captures = [folder / name for name in CAPTURE_FILES if (folder / name).exists()]
    others = [
        one for one in folder.glob(RANK_FOLDER.format(rank="*")) if any((one / n).exists() for n in CAPTURE_FILES)
    ]
    others.sort(key=lambda one: (len(one.name), one.name))
    return [captures[0], *others] if captures and others else []


def _holds_no_events(path: Path) -> bool:
    """Whether the file is a whole JSON document that is no trace."""
    try:
        with (gzip.open if path.name.endswith(".gz") else open)(path, "rb") as file:
            text = file.read(_SETTINGS_BYTES + 1)
        if len(text) > _SETTINGS_BYTES:
            return False
        held = msgspec.json.decode(text)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError):
        return False
    events: Any = cast("dict[str, Any]", held).get("traceEvents") if isinstance(held, dict) else held
    if not isinstance(events, list):
        return True
    return not any(isinstance(event, dict) and "ph" in event for event in cast("list[Any]", events))


# Reads the captures of a job's ranks. What is kept of each is small.


MOST_BYTES = 4 * 10**9
"""Memory that all processes together may take; one alone may take more, since its capture cannot be read in parts."""
_FEW_BYTES = 128 * 10**6
"""Captures that take less together are read here: a process needs as long to start."""
_PROCESS_BYTES = 100 * 10**6
"""Memory of a process before it reads."""
_OF_FILE, _OF_PACKED = {".json": 2, ".sqlite": 4}, 32
"""Memory that a capture takes, in sizes of its file: 1.3 for JSON and 2.8 for SQLite were measured."""
_LONG_S = 10.0**7
"""Once polars is imported, Ctrl-C does not interrupt a wait without a time limit: its handler has waits go on."""

Reply = tuple[list[str], Rank | StepscopeError]
"""The lines to say of a capture, and its rank, or why it cannot be read."""


def read_rank(path: Path, place: int, *, say: Callable[[str], None]) -> Rank:
    """Read the capture of one rank of a job. Raises InputError where it cannot be read.

    The rank is the one that the capture says, or the number after "rank" in its name, or else its place in the list.
    """
    summary = load_capture(path, say=say)
    recorded = summary.attribution.table.rank
    return rank_of(summary, recorded if recorded is not None else likely_rank(path, place), str(path))


def likely_rank(path: Path, place: int) -> int:
    """The rank of a capture that says none."""
    named = _RANK.search(path.name)
    return int(named[1]) if named else place


def is_of_rank(path: Path, rank: int) -> bool:
    """Whether a capture that is likely of a rank says no other, by its first lines where they tell."""
    told = None
    with contextlib.suppress(InputError, OSError):
        told = rank_in_head(find_capture(path))
    recorded = read_trace(path).rank if told is None else told
    return recorded is None or recorded == rank


def reply_of(path: Path, place: int) -> Reply:
    """What became of the capture of the rank at this place of the list."""
    lines: list[str] = []
    try:
        return lines, read_rank(path, place, say=lines.append)
    except StepscopeError as error:
        return lines, error


def load_job(captures: list[Path], *, say: Callable[[str], None]) -> Job:
    """Read the captures of a job's ranks, one after the other. Raises InputError where one cannot be read, or they are
    not of one job. `say` is told which rank is read."""
    ranks: list[Rank] = []
    for place, path in enumerate(captures):
        say(f"reading rank {place + 1} of {len(captures)}: {path.name}")
        ranks.append(read_rank(path, place, say=say))
    return job_of(ranks)


def needed_bytes(path: Path) -> int:
    """An estimate of the memory that the reading of a capture takes. Raises InputError where there is none."""
    capture = find_capture(path)
    files = capture.glob("*.parquet") if capture.is_dir() else [capture]
    return _OF_FILE.get(capture.suffix, _OF_PACKED) * sum(file.stat().st_size for file in files)


def processes_for(needs: list[int], cores: int) -> int:
    """How many processes read captures that need so much memory each: no more than cores, captures and MOST_BYTES."""
    return max(1, min(cores, len(needs), MOST_BYTES // (_PROCESS_BYTES + max(needs))))


def read_ranks(captures: list[Path]) -> Generator[Reply]:
    """What became of each capture of a job, as they are read: small ones in turn, else in processes, the largest first.

    Processes import the program again, which must be ours. They end where this is closed.
    """
    needs = [needed_bytes(path) for path in captures]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = processes_for(needs, cores)
    if processes == 1 or sum(needs) < _FEW_BYTES:
        yield from map(reply_of, captures, range(len(captures)))
        return
    import multiprocessing  # noqa: PLC0415  (one capture needs no process)
    from concurrent.futures import ProcessPoolExecutor, as_completed  # noqa: PLC0415
    from concurrent.futures.process import BrokenProcessPool  # noqa: PLC0415

    context, others = multiprocessing.get_context("spawn"), multiprocessing.active_children()
    with ProcessPoolExecutor(processes, context, _begin_to_read, (max(1, cores // processes),)) as pool:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a process that starts would print a traceback
            try:
                largest_first = sorted(range(len(captures)), key=lambda place: -needs[place])
                reading = [pool.submit(reply_of, captures[place], place) for place in largest_first]
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            for done in as_completed(reading, _LONG_S):
                yield done.result()
        except BrokenProcessPool:
            raise StepscopeError(
                "a process that read captures was ended from outside, as where memory runs out: read fewer of them"
            ) from None
        finally:
            for process in set(multiprocessing.active_children()) - set(others):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid or 0, signal.SIGKILL)  # with the exporter that it may have started
                process.kill()


def _begin_to_read(threads: int) -> None:
    """Leave Ctrl-C, which is blocked here, to the process that asked, and end with it, however it ends."""
    os.environ["POLARS_MAX_THREADS"] = str(threads)
    os.setsid()
    import multiprocessing  # noqa: PLC0415

    parent = multiprocessing.parent_process()
    assert parent is not None
    os.dup2(parent.sentinel, 0)  # closes when the parent dies
    end_with_stdin()
