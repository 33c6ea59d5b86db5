"""The occupation of each device: how long it worked, and why it was idle otherwise.

A device's span runs from the first to the last work launched in a traced step (of all its work, if no step is marked).
Other work within the span counts too. The union of all work and the gaps between make up the span exactly. Each gap
has one cause, decided by the work that ended it and by what the host was doing. The device "ran dry" where the gap
begins. A launch is *too late* if its call began after that, or so shortly before (`LAUNCH_NS`) that the launch cannot
have been ready. The first of these that holds is the cause:

- unknown: the launch of the work that ended the gap was not recorded.
- kernel-to-kernel latency: the launch was in time, and the gap is at most `KERNEL_LATENCY_NS`.
- dependency: the launch was in time, but the work waited for another stream, an event, a peer or a copy engine.
- data: too late, and for more than half of the time from running dry to the launch a host thread that launches work
  was inside a range or operator that loads data, such as `enumerate(DataLoader)`.
- synchronisation: too late, and when the device ran dry, the thread of the launch before or after was waiting for it:
  in a synchronising call, a blocking copy to the host, or `aten::item`. The wait ended before the launch.
- data: too late, and the work that ended the gap is itself a copy from host to device.
- launch-bound: too late for no such reason. The host took longer to issue the work than the device to do it.

Calls do not say for which device they wait. If one process drives several devices, a wait counts for each of them.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import cast

import msgspec
import polars as pl

from stepscope.core.range_names import PHASES
from stepscope.traces.captures.attribution import Attribution
from stepscope.traces.nesting import is_one_value, open_rows, union, values_of
from stepscope.traces.table import TraceTable, fits, named

# Exact arithmetic on sets of disjoint intervals: their length, and the time that they cover in each window.


def pieces(work: pl.DataFrame) -> pl.DataFrame:
    """The union of the work's intervals, sorted and disjoint: start_ns, end_ns. Empty intervals cover nothing."""
    work = work.select("start_ns", "duration_ns")
    some_last = work if cast("int", work["duration_ns"].min() or 0) > 0 else work.filter(pl.col("duration_ns") > 0)
    return union(some_last, []).select("start_ns", "end_ns")


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


# The communication that hides behind computation, per device, in exact nanoseconds.
#
# Communication is the union of the kernels of that family. Computation is the union of all other kernels and whole
# graphs (copies and fills are neither). Hidden is the intersection of the two, exposed is the rest. A collective's
# kernel also spins while it waits for its peers, so exposed time includes both the network and the slowest rank.


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """Communication and computation on one device.

    `by_kernel`: name, calls, busy_ns, hidden_ns of each communication kernel, the most exposed first. Its times are
    sums, in which each of several concurrent collectives counts.
    """

    device: int
    name: str | None
    communication_ns: int
    computation_ns: int
    hidden_ns: int
    by_kernel: pl.DataFrame

    @property
    def exposed_ns(self) -> int:
        """The time of communication during which no computation ran."""
        return self.communication_ns - self.hidden_ns

    @property
    def hidden_share(self) -> float | None:
        """The hidden share of the communication, from 0 to 1; None without communication."""
        return self.hidden_ns / self.communication_ns if self.communication_ns else None


def overlap(attribution: Attribution) -> tuple[Overlap, ...]:
    """The overlap on each device; empty for a CPU trace, since its operators' times are nested."""
    if attribution.table.on_cpu:
        return ()
    overlaps: list[Overlap] = []
    communicates = pl.col("family") == "communication"
    all_kernels = attribution.kernels.select("device", "family", "name", "start_ns", "duration_ns")
    for device in values_of(all_kernels, "device").unique().sort().to_list():
        alone = is_one_value(values_of(all_kernels, "device"))  # a filter copies a million rows
        kernels = all_kernels if alone else all_kernels.filter(pl.col("device") == device)
        collectives = kernels.filter(communicates)
        computation = pieces(kernels.filter(~communicates) if collectives.height else kernels)
        communication = pieces(collectives)
        ends = collectives["start_ns"] + collectives["duration_ns"]
        hidden = covered_ns(computation, communication["start_ns"], communication["end_ns"])
        by_kernel = (
            collectives.select("name", "duration_ns", covered_ns(computation, collectives["start_ns"], ends))
            .group_by(pl.col("name").cast(pl.String))
            .agg(
                pl.len().alias("calls"),
                pl.col("duration_ns").sum().alias("busy_ns"),
                pl.col("covered_ns").sum().alias("hidden_ns"),
            )
            .sort(pl.col("busy_ns") - pl.col("hidden_ns"), "name", descending=[True, False])
        )
        overlaps.append(
            Overlap(
                device=device,
                name=attribution.table.devices.get(device),
                communication_ns=length_ns(communication),
                computation_ns=length_ns(computation),
                hidden_ns=int(hidden.sum()),
                by_kernel=by_kernel,
            )
        )
    return tuple(overlaps)


# The devices that a capture is of. A trace lists all of a host's, though only some of them ran anything.


def used_devices(attribution: Attribution) -> dict[int, str]:
    """The name, by index, of each device that ran something: "" where the trace does not say it. None on a CPU.

    ROCm numbers devices among all of the host's in its events, and among the visible ones in its list. Where all that
    are listed have one name, a device that is not listed has it too.
    """
    table = attribution.table
    if table.on_cpu:
        return {}
    listed = set(table.devices.values())
    common = listed.pop() if len(listed) == 1 else ""
    return {
        index: table.devices.get(index, common)
        for index in values_of(attribution.work, "device").unique().sort().to_list()
    }


def device_names(attribution: Attribution) -> tuple[str, ...]:
    """The distinct names of those devices; none where the trace leaves one of them unnamed."""
    names = used_devices(attribution).values()
    return tuple(sorted(set(names))) if all(names) else ()


# The host's waits for a device: synchronising calls, blocking copies, operators that fetch a number.


_WAITING_OPERATOR = r"^aten::(?:item|_local_scalar_dense|is_nonzero)$"
_TO_HOST = r"\bDtoH\b"


def waits(table: TraceTable, work: pl.DataFrame) -> pl.DataFrame:
    """The host's calls and operators that wait for a device: process, thread, start_ns, duration_ns, name."""
    columns = ["process", "thread", "start_ns", "duration_ns", "name"]
    # A copy to pageable memory blocks, whatever the name of its call. A copy to pinned memory returns at once.
    copies = named(work.select("process", "launch_thread", "launch_ns", "name"), _TO_HOST)
    copying = table.copying_calls if copies.height else table.waiting_calls.clear()
    to_host = copying.join(
        copies,
        left_on=["process", "thread", "start_ns"],
        right_on=["process", "launch_thread", "launch_ns"],
        how="semi",
    )
    operators = named(table.operators, _WAITING_OPERATOR)
    return pl.concat(
        [table.waiting_calls, to_host, operators.select(pl.col(columns[:4]), pl.col("name").cast(pl.Categorical()))]
    )


def waiting_call(gaps: pl.DataFrame, waiting: pl.DataFrame) -> pl.Series:
    """For each gap, the name of a wait that was in progress when the device ran dry and had ended at the next launch.

    `gaps`: process, start_ns, launch_ns and the threads of the launches on either side, launch_thread, thread_before.
    """
    if not waiting.height:
        return pl.Series("wait", [None], dtype=pl.Categorical()).new_from_index(0, gaps.height)
    answers = []
    for thread in ("launch_thread", "thread_before"):
        rows = open_rows(waiting, gaps.select("process", pl.col(thread).alias("thread")), gaps["start_ns"])
        over = (waiting["start_ns"] + waiting["duration_ns"]).gather(rows) <= gaps["launch_ns"]
        answers.append(pl.select(pl.when(over).then(waiting["name"].gather(rows))).to_series())
    return pl.select(pl.coalesce(*answers).alias("wait")).to_series()


def _open_between(waiting: pl.DataFrame, gaps: pl.DataFrame) -> pl.DataFrame:
    """The waits that may be open at the start of one of these gaps."""
    if not gaps.height:
        return waiting.clear()
    first, last = gaps["start_ns"].min(), gaps["start_ns"].max()
    return waiting.filter(pl.col("start_ns") <= last, pl.col("start_ns") + pl.col("duration_ns") >= first)


LAUNCH_NS = 5_000
"""The least time from a launch call to its running kernel. The quickest of 14,000 on an idle H200 took 5.0 us."""

KERNEL_LATENCY_NS = 4_000
"""The longest gap between a kernel's end and the start of the next kernel, if that was already queued.

On an H200 on one stream, the median is 1.1 us and 99 % are below 2.5 us. Between streams, by an event, it is up to 3.8
us."""

_AT_ONCE = 1 << 18
"""The most rows of work whose gaps are described at once: they take several times the memory of what is kept."""

CAUSES = ("synchronisation", "data", "launch-bound", "dependency", "kernel-to-kernel latency", "unknown")
CAUSE = pl.Enum(CAUSES)

BETWEEN_STEPS, BETWEEN_PHASES = "between steps", "between phases"
PLACE = pl.Enum([*PHASES, BETWEEN_STEPS, BETWEEN_PHASES])

_TO_DEVICE = r"\bHtoD\b"
_LOADS_DATA = r"(?i)data[ _]?load|^enumerate\(|(?:get|next|load|fetch)[ _]?batch"


class DeviceOccupation(msgspec.Struct, frozen=True, kw_only=True):
    """The occupation of one device. `busy_ns` sums the work's durations; `union_ns` counts overlapping work once."""

    device: int
    name: str | None
    start_ns: int
    end_ns: int
    busy_ns: int
    union_ns: int
    idle_ns: int

    @property
    def span_ns(self) -> int:
        """The time from the start of the first work to the end of the last."""
        return self.end_ns - self.start_ns

    @property
    def idle_share(self) -> float:
        """The share of the span in which nothing ran, from 0 to 1."""
        return self.idle_ns / self.span_ns if self.span_ns else 0.0


class Occupation(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All devices of a trace, and the gaps between their work.

    `gaps`: device, start_ns, duration_ns, cause, phase, step, before, after (names of the work on either side),
    wait (the call or operator that waited, for synchronisation). `phase` is the phase of
    the work on both sides, BETWEEN_STEPS or BETWEEN_PHASES if they differ, null outside all phases. `step` is the step
    of the work after.
    """

    devices: tuple[DeviceOccupation, ...]
    by_cause: pl.DataFrame
    """Gaps by device, cause and phase (gaps, idle_ns, largest_ns), with the most idle time first."""
    describe: Callable[[], pl.DataFrame]

    @cached_property
    def gaps(self) -> pl.DataFrame:
        """All gaps. There may be one for each row of work, so they are described anew where they are asked for."""
        return self.describe()

    @property
    def span_ns(self) -> int:
        """The sum of the devices' spans."""
        return sum(device.span_ns for device in self.devices)

    @property
    def idle_ns(self) -> int:
        """The sum of the devices' idle times."""
        return sum(device.idle_ns for device in self.devices)

    def self_check(self) -> None:
        """Raise AssertionError unless work and gaps sum to each span exactly."""
        for device in self.devices:
            assert device.union_ns + device.idle_ns == device.span_ns, "work and gaps are not the span"
            assert device.union_ns <= device.busy_ns, "the union is longer than the sum"
        assert self.idle_ns == int(self.by_cause["idle_ns"].sum()), "causes do not add up to the idle time"
        assert not self.by_cause.height or int(self.by_cause["largest_ns"].to_list()[0]) > 0


def occupation(attribution: Attribution) -> Occupation | None:
    """The devices' occupation; None for a CPU trace, whose work is the host's own, and for a trace without work."""
    work = attribution.work
    if attribution.table.on_cpu or not work.height:
        return None
    table = attribution.table
    columns = ["process", "thread", "start_ns", "duration_ns"]
    loading = pl.concat(named(frame, _LOADS_DATA).select(columns) for frame in (table.ranges, table.operators))
    waiting = waits(table, work)
    numbers = values_of(work, "device").unique().sort().to_list()
    each = [_Device(attribution, device, loading, waiting) for device in numbers]
    by_cause = pl.concat(device.by_cause() for device in each).with_columns(pl.col("phase").cast(pl.String))
    by_cause = by_cause.sort("idle_ns", "device", "cause", "phase", descending=[True, False, False, False])

    def describe() -> pl.DataFrame:
        # One value is held for all gaps of a device.
        gaps = [
            pl.concat(one.gaps()).select(pl.lit(one.device, pl.Int64).alias("device"), pl.all())
            for one in (_Device(attribution, device, loading, waiting) for device in numbers)
        ]
        return gaps[0] if len(gaps) == 1 else pl.concat(gaps)

    return Occupation(devices=tuple(device.occupied for device in each), by_cause=by_cause, describe=describe)


class _Device:
    """One device's work by start, in the span of its steps, a stretch at a time: a million rows and their gaps take
    hundreds of megabytes. `occupied` is its occupation once the gaps are described."""

    def __init__(self, attribution: Attribution, device: int, loading: pl.DataFrame, waiting: pl.DataFrame) -> None:
        self.device, self._name, self._hosts = device, attribution.table.devices.get(device), (loading, waiting)
        columns = ["start_ns", "duration_ns", "process", "name", "launch_ns", "launch_thread", "phase", "step"]
        inside = attribution.work
        if not is_one_value(values_of(inside, "device")):
            inside = inside.filter(pl.col("device") == device)
        inside = inside.select(columns)
        end_ns = (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns")
        marked = pl.col("step").is_not_null() | (pl.col("step").count() == 0)
        self._first, self._last = inside.select(
            pl.col("start_ns").filter(marked).min(), end_ns.filter(marked).max()
        ).row(0)
        within = inside.select((end_ns >= self._first) & (pl.col("start_ns") <= self._last)).to_series()
        self._work = inside if within.all() else inside.filter(within)  # a filter copies a million rows

    def _stretches(self) -> Iterator[pl.DataFrame]:
        """The work by start, and by launch where some start together, clipped to the span."""
        starts, order = self._work["start_ns"].clip(lower_bound=self._first), None
        if not starts.is_sorted():
            order = starts.arg_sort()
            starts = starts.gather(order)
        if (starts == starts.shift(1)).any():
            keys = self._work.select(pl.col("start_ns").clip(lower_bound=self._first), "launch_ns")
            order = keys.select(pl.arg_sort_by("start_ns", "launch_ns", nulls_last=True)).to_series()
        del starts
        start_ns = pl.col("start_ns").clip(lower_bound=self._first)
        end_ns = (pl.col("start_ns") + pl.col("duration_ns")).clip(upper_bound=self._last)
        for first in range(0, self._work.height, _AT_ONCE):
            rows = slice(first, first + _AT_ONCE)
            some = self._work[rows] if order is None else self._work[order[rows]]
            yield some.with_columns(start_ns, (end_ns - start_ns).alias("duration_ns"))

    def gaps(self) -> Iterator[pl.DataFrame]:
        """The gaps, each with its cause."""
        busy_ns = union_ns = idle_ns = 0
        before, begin_ns, until_ns = self._work.clear(), None, 0
        for some in self._stretches():
            work = pl.concat([before, some], rechunk=True)
            ends = work["start_ns"] + work["duration_ns"]
            reached = ends.cum_max()
            gaps = _gaps(work["start_ns"], ends, reached)
            begin_ns = cast("int", some["start_ns"][0]) if begin_ns is None else begin_ns
            busy_ns += int(some["duration_ns"].sum())
            idle_ns += int(gaps["duration_ns"].sum())
            # What each adds to the time that some work ran: from its start, or where the ones before it end.
            since = pl.select(pl.max_horizontal(work["start_ns"], reached.shift(1))).to_series()
            added = (reached - since).clip(lower_bound=0)
            union_ns += int((added if before.is_empty() else added[1:]).sum())
            until_ns = cast("int", reached[-1])
            before = work[int((ends == until_ns).arg_true()[-1])]
            yield _with_causes(_between(gaps, work), *self._hosts)
        self.occupied = DeviceOccupation(
            device=self.device, name=self._name, start_ns=begin_ns or 0, end_ns=until_ns,
            busy_ns=busy_ns, union_ns=union_ns, idle_ns=idle_ns,
        )  # fmt: skip

    def by_cause(self) -> pl.DataFrame:
        """The gaps by cause and phase (device, cause, phase, gaps, idle_ns, largest_ns)."""
        count, spent = pl.len().alias("gaps"), pl.col("duration_ns")
        sums = (count, spent.sum().alias("idle_ns"), spent.max().alias("largest_ns"))
        parts = [gaps.group_by("cause", "phase").agg(*sums) for gaps in self.gaps()]
        whole = (pl.col("gaps", "idle_ns").sum(), pl.col("largest_ns").max())
        device = pl.lit(self.device, pl.Int64).alias("device")
        return pl.concat(parts).group_by("cause", "phase").agg(*whole).select(device, pl.all())


def _gaps(starts: pl.Series, ends: pl.Series, reached: pl.Series) -> pl.DataFrame:
    """The gaps between work sorted by start, with the rows of the work after each and of that which ended last before
    it."""
    row = pl.int_range(len(starts), dtype=pl.UInt32)
    furthest = pl.select(pl.when(ends == reached).then(row).forward_fill().shift(1)).to_series()
    reached = reached.shift(1)
    idle = starts > reached
    return pl.DataFrame(
        {
            "after": idle.arg_true(),
            "before": furthest.filter(idle),
            "start_ns": reached.filter(idle),
            "duration_ns": (starts - reached).filter(idle),
        }
    )


def _between(gaps: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """These gaps, with the work after each and the launching thread before it."""
    after = work.drop("start_ns", "duration_ns")[gaps["after"]]
    before = work.select("name", "launch_thread", "phase", "step")[gaps["before"]]
    return after.select(
        "process",
        gaps["start_ns"],
        gaps["duration_ns"],
        _place(before, after),
        "step",
        before["name"].alias("before"),
        pl.col("name").alias("after"),
        "launch_ns",
        "launch_thread",
        before["launch_thread"].alias("thread_before"),
    )


def _place(before: pl.DataFrame, after: pl.DataFrame) -> pl.Series:
    """The phase of the work on both sides of a gap, or whether the gap is between steps or phases."""
    phase, phase_before = after["phase"], before["phase"]
    place = (
        pl.when(after["step"].ne_missing(before["step"]))
        .then(pl.lit(BETWEEN_STEPS, PLACE))
        .when(phase.ne_missing(phase_before))
        .then(pl.lit(BETWEEN_PHASES, PLACE))
        .otherwise(phase.cast(PLACE))
    )
    return pl.select(place.alias("phase")).to_series()


def _with_causes(gaps: pl.DataFrame, loading: pl.DataFrame, waiting: pl.DataFrame) -> pl.DataFrame:
    """The gaps with their causes: of ranges that load data, of waits for a device, or of the launch."""
    gaps = gaps.with_row_index("gap")
    launch = ["gap", "process", "start_ns", "launch_ns", "launch_thread", "thread_before", "after"]
    late = gaps.select(launch).filter(pl.col("launch_ns") > pl.col("start_ns") - LAUNCH_NS)
    # The time that the launching threads spent loading data from each gap's start to its launch.
    loading = loading.join(late, left_on=["process", "thread"], right_on=["process", "launch_thread"], how="semi")
    spent = pl.Series("loading_ns", [0], dtype=pl.Int64).new_from_index(0, late.height)
    for process in loading["process"].unique().to_list():
        covered = covered_ns(pieces(loading.filter(pl.col("process") == process)), late["start_ns"], late["launch_ns"])
        spent = pl.select(pl.when(late["process"] == process).then(covered).otherwise(spent)).to_series()
    late = late.with_columns(
        waiting_call(late, _open_between(waiting, late)),
        spent.alias("loading_ns"),
        fits(late["after"], _TO_DEVICE).alias("copies_in"),
    )
    late = late.select(
        "gap",
        "wait",
        pl.when((pl.col("loading_ns") > 0) & (pl.col("loading_ns") * 2 > pl.col("launch_ns") - pl.col("start_ns")))
        .then(pl.lit("data", CAUSE))
        .when(pl.col("wait").is_not_null())
        .then(pl.lit("synchronisation", CAUSE))
        .when("copies_in")
        .then(pl.lit("data", CAUSE))
        .otherwise(pl.lit("launch-bound", CAUSE))
        .alias("cause"),
    )
    in_time = (
        pl.when(pl.col("launch_ns").is_null())
        .then(pl.lit("unknown", CAUSE))
        .when(pl.col("duration_ns") <= KERNEL_LATENCY_NS)
        .then(pl.lit("kernel-to-kernel latency", CAUSE))
        .otherwise(pl.lit("dependency", CAUSE))
    )
    found = gaps.select("gap").join(late, on="gap", how="left", maintain_order="left")
    return (
        gaps.with_columns(found["wait"], pl.coalesce(found["cause"], in_time).alias("cause"))
        .with_columns(pl.when(pl.col("cause") == "synchronisation").then("wait").alias("wait"))
        .select("start_ns", "duration_ns", "cause", "phase", "step", "before", "after", "wait")
    )
