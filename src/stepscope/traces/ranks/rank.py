"""One rank of a job: its times in short, and its collectives. The capture itself is let go, so that many fit."""

import re
from dataclasses import dataclass

import polars as pl

from stepscope.core.finding import Finding
from stepscope.core.range_names import STEP
from stepscope.core.work.collectives import kind_of, message_bytes
from stepscope.traces.captures.attribution import Attribution
from stepscope.traces.captures.checks import doubts_of
from stepscope.traces.captures.range_names import range_kind
from stepscope.traces.captures.summary import TraceSummary
from stepscope.traces.nesting import Nest, union
from stepscope.traces.table import TraceTable

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
        doubts=doubts_of(summary),
    )


def _step_numbers(attribution: Attribution) -> dict[int, int]:
    """The number in the name of each step's range (`ProfilerStep#552`) by the step's place; the place without one."""
    instances = attribution.instances.filter(pl.col("what") == STEP).sort("start_ns")
    ranges = attribution.table.ranges
    names = [name for name in ranges["name"].unique().to_list() if range_kind(name) == "step"]
    named = ranges.filter(pl.col("name").cast(pl.String).is_in(names)).select(
        "start_ns", pl.col("name").cast(pl.String)
    )
    found = dict(named.sort("start_ns", descending=True).iter_rows())
    numbers = [_LAST_NUMBER.search(found.get(start_ns, "")) for start_ns in instances["start_ns"].to_list()]
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
    told = _told(kernels, attribution.table)
    names = pl.coalesce(pl.col("collective"), pl.col("range"), pl.col("name").cast(pl.String))
    kinds = {name: kind_of(name).name for name in told.select(names.alias("n"))["n"].unique().to_list()}
    elements = pl.max_horizontal("elements_in", "elements_out")
    sizes = {
        (count, dtype): message_bytes(count, dtype)
        for count, dtype in told.select(elements, "dtype").unique().iter_rows()
    }
    size = pl.col("group_size")
    bytes_ = [sizes[row] for row in told.select(elements, "dtype").iter_rows()]
    return told.select(
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


def _told(kernels: pl.DataFrame, table: TraceTable) -> pl.DataFrame:
    """The kernels with what their own arguments say, or else the operator that launched them, and the name of the range
    round their launch (`nccl:all_to_all`: its kernels are called SendRecv)."""
    own = table.collectives.drop_nulls("correlation").unique(["correlation", "start_ns"], keep="first")
    kernels = kernels.join(
        own.select("correlation", "start_ns", *_SAID), on=["correlation", "start_ns"], how="left", maintain_order="left"
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
    keys = pl.concat(
        [
            kernels.select("process", pl.col("launch_thread").alias("thread")),
            intervals.select("process", "thread"),
        ]
    )
    distinct = keys.unique().with_row_index("track")
    track = keys.join(distinct, on=["process", "thread"], how="left", maintain_order="left", nulls_equal=True)["track"]
    track = track.cast(pl.Int64)
    nest = Nest(intervals.with_columns(track.tail(intervals.height).alias("track")), "track")
    row = nest.innermost(track.head(kernels.height), kernels["launch_ns"])
    nothing = pl.DataFrame(schema=intervals.schema)
    if not intervals.height:
        return pl.concat([nothing, pl.DataFrame({name: [None] * kernels.height for name in nothing.columns},
                                                schema=nothing.schema)])  # fmt: skip
    return intervals.select(pl.all().gather(row))
