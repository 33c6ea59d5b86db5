"""Makes a TraceTable of a reader's frames."""

from dataclasses import replace
from pathlib import Path

import polars as pl

from stepscope.core.errors import InputError
from stepscope.traces.launches import operators_as_work, with_launches
from stepscope.traces.table import (
    CALL_SCHEMA,
    CALLS,
    COLLECTIVE_SCHEMA,
    COPIES,
    COUNTER_SCHEMA,
    DETAIL_SCHEMA,
    KIND,
    LINK_SCHEMA,
    OPERATOR_SCHEMA,
    OPERATORS,
    RANGE_SCHEMA,
    RANGES,
    WORK,
    WORK_SCHEMA,
    Damage,
    Profiler,
    TraceTable,
    add_count,
    empty,
    with_details,
)

# Puts right the times of a capture that cannot be true, each where it does least harm, and counts them.
#
# The CUDA profiler's library (CUPTI) writes start and end as 0 where it could not collect them; a time a year from all
# others is of no clock; and on one stream a kernel cannot outlast those that were launched after it.


FAR_NS = 2**55
"""Times that are this far apart (417 days) are not of one capture, and nothing lasts so long."""
_EARLY_LAUNCH = r"Ex|Cooperative|Graph"
"""Calls that may let a kernel begin before the one before it has ended: those with attributes of the launch."""

_SHORT_NS = 10_000
"""An overlap up to this is never cut: on a B200, kernels begin up to 3.7 us before the one before them has ended."""
_LEAST_NS = 500
"""No kernel is shorter. Where the next row begins sooner, it is the starts that cannot be, and nothing is cut."""

Frames = dict[str, pl.DataFrame]


def without_impossible_times(work: pl.DataFrame, others: Frames, damage: Damage) -> tuple[pl.DataFrame, Frames]:
    """The frames without rows that have no time. Work without one stays, and its `start_ns` is null.

    others: the frames of host rows by what they are, each with `start_ns`, some with `duration_ns`.
    """
    frames = {WORK: work, **others}
    for what, frame in frames.items():
        if "duration_ns" in frame.columns and _integer(frame["duration_ns"].max()) >= FAR_NS:
            endless = pl.col("duration_ns") >= FAR_NS
            add_count(damage.endless, what, int(frame.select(endless.sum()).item()))
            frames[what] = frame.with_columns(pl.when(~endless).then("duration_ns").otherwise(0).alias("duration_ns"))
    work = frames.pop(WORK)
    starts = [frame["start_ns"] for frame in (work, *frames.values()) if frame.height]
    low = min((_integer(one.min()) for one in starts), default=0)
    high = max((_integer(one.max()) for one in starts), default=0)
    zero = (pl.col("start_ns") == 0) & (pl.col("duration_ns") == 0)
    if high - low < FAR_NS and not any(one.null_count() for one in starts) and not work.select(zero.any()).item():
        return work, frames
    host = pl.concat([frames[what]["start_ns"] for what in (CALLS, OPERATORS, RANGES)]).drop_nulls()
    own = work.filter(~zero)["start_ns"].drop_nulls()
    near = pl.concat([host, own] if not host.len() else [host]).median() or 0
    for what, frame in frames.items():
        timed = frame.filter(_is_near(near))
        add_count(damage.untimed, what, frame.height - timed.height)
        frames[what] = timed
    if own.len() and not work.filter(~zero).select(_is_near(near).any()).item():
        near = own.median() or 0  # the device has a clock of its own
    known = ~zero & _is_near(near).fill_null(False)
    return work.with_columns(pl.when(known).then("start_ns").alias("start_ns")), frames


def _is_near(time_ns: object) -> pl.Expr:
    return (pl.col("start_ns") - int(time_ns)).abs() < FAR_NS  # type: ignore[call-overload]


def _integer(value: object) -> int:
    return value if isinstance(value, int) else 0


_NO_START = pl.col("start_ns").is_null() | ((pl.col("start_ns") == 0) & (pl.col("launch_ns") > 0)).fill_null(False)
"""Whether a row of work, joined to its launch, has no start. A start of 0 is none where the launch is later."""


def at_their_launch(work: pl.DataFrame, damage: Damage) -> pl.DataFrame:
    """Work with its launches, of which the rows without a start stand at their launch, or else at 0 or, where that is
    far from all others, at the first start."""
    missing = work.select(_NO_START.alias("missing")).to_series()
    if not missing.any():
        return work
    add_count(damage.untimed, WORK, int(missing.sum()))
    first = _integer(work["start_ns"].filter(~missing).min())
    instead = pl.coalesce("launch_ns", pl.lit(first if abs(first) >= FAR_NS else 0, pl.Int64))
    return work.with_columns(pl.when(missing).then(instead).otherwise("start_ns").alias("start_ns"))


def cut_at_the_next(work: pl.DataFrame, calls: pl.DataFrame, damage: Damage) -> tuple[pl.DataFrame, Damage]:
    """Work of which no row outlasts later work of its stream: such a row is cut where the next begins.

    A row may overlap the next where that was launched to begin early (programmatic dependent launch), and kernels of
    one graph run side by side. So a row is cut only if work of another launch begins and ends within it, and either
    more begins in it too, or the call of that work cannot begin it early.
    """
    places = ["process", "device", "stream"]
    timed = (pl.col("stream") >= 0) & (pl.col("duration_ns") > 0) & ~_NO_START
    end_ns = (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns")
    rows = work.select(*places, "start_ns", end_ns, "launch_ns", "duration_ns", "launch_row").with_row_index("row")
    rows = rows.filter(timed).sort(*places, "start_ns", "end_ns")
    begins_within = pl.col("start_ns").shift(-1) < pl.col("end_ns") - _SHORT_NS
    if not rows.select((begins_within & _same(places)).any()).item():
        return work, damage
    launch = work.with_row_index("row").select(_launch())[rows["row"]].to_series()
    rows = rows.with_columns(launch.alias("launch"))
    runs = rows.select(pl.struct(*places, "launch").rle_id().alias("run"), pl.struct(places).rle_id().alias("stream"))
    first = runs["run"].search_sorted(runs["run"], side="right").clip(upper_bound=max(0, rows.height - 1))
    next_ns = rows["start_ns"].gather(first)
    outlasts = (
        (rows["end_ns"].gather(first) < rows["end_ns"])
        & (rows["end_ns"] - next_ns > _SHORT_NS)
        & (next_ns - rows["start_ns"] >= _LEAST_NS)
        & (runs["stream"].gather(first) == runs["stream"])
    )
    cut: dict[int, int] = {}
    for at in outlasts.arg_true().to_list():
        row, after = rows.row(at, named=True), first[at]
        on_stream = rows[after:].filter(runs["stream"][after:] == runs["stream"][at])
        inside = on_stream.filter(pl.col("start_ns") < row["end_ns"])
        within = inside["launch_row"].filter(inside["end_ns"] < row["end_ns"])
        early = calls["name"].gather(within).cast(pl.String).str.contains(_EARLY_LAUNCH).fill_null(True)
        if inside.height > 1 or not early.all():
            cut[row["row"]] = inside["start_ns"][0] - row["start_ns"]
    if not cut:
        return work, damage
    index = pl.int_range(pl.len(), dtype=pl.UInt32)
    duration = index.replace_strict(cut, default=pl.col("duration_ns"), return_dtype=pl.Int64).alias("duration_ns")
    shorter = work.with_columns(duration)
    cut_ns = int(work["duration_ns"].sum()) - int(shorter["duration_ns"].sum())
    return shorter, replace(damage, overlong=len(cut), cut_ns=cut_ns)


def _same(columns: list[str]) -> pl.Expr:
    """Whether these columns are equal in the next row."""
    return pl.all_horizontal(pl.col(column) == pl.col(column).shift(-1) for column in columns)


def _launch() -> pl.Expr:
    """What the rows of one launch have in common: their correlation id, that of a graph where no id is recorded, or
    the row itself."""
    known = pl.col("correlation").is_not_null() & (pl.col("correlation") != 0)
    alone = -2 - pl.col("row").cast(pl.Int64)
    graph = pl.when(pl.col("graph_node").is_not_null()).then(pl.lit(-1, pl.Int64)).otherwise(alone)
    return pl.when(known).then("correlation").otherwise(graph)


LARGEST_NS = 2**62
"""Since 1970 the clock says less until 2116. Within it sums and differences of times fit their 64 bits."""


def assemble(
    *,
    path: Path,
    profiler: Profiler,
    work: pl.DataFrame,
    calls: pl.DataFrame,
    ranges: pl.DataFrame,
    operators: pl.DataFrame | None = None,
    links: pl.DataFrame | None = None,
    arrows: pl.DataFrame | None = None,
    devices: dict[int, str] | None = None,
    other: dict[str, int] | None = None,
    recorder: str | None = None,
    lost: int = 0,
    threads: dict[tuple[int, int], str] | None = None,
    collectives: pl.DataFrame | None = None,
    rank: int | None = None,
    ranks: int | None = None,
    damage: Damage | None = None,
    counters: pl.DataFrame | None = None,
    remarks: tuple[str, ...] = (),
    traced: frozenset[str] = frozenset(),
) -> TraceTable:
    """Check the schemas, join the launches, put right times that cannot be; without device work operators stand in.

    `arrows` lead from calls to their work, as LINK_SCHEMA, where the rows themselves do not say it.

    Raises InputError, naming `path`, where no row has a time, or durations add up to more than a clock can say.
    """
    operators = empty(OPERATOR_SCHEMA) if operators is None else operators
    links = empty(LINK_SCHEMA) if links is None else links
    collectives = empty(COLLECTIVE_SCHEMA) if collectives is None else collectives
    counters = empty(COUNTER_SCHEMA) if counters is None else counters
    damage = damage or Damage()
    told = {name: dtype for name, dtype in DETAIL_SCHEMA.items() if name in work.columns}
    for frame, schema in (
        (work, pl.Schema({**WORK_SCHEMA, **told})),
        (calls, CALL_SCHEMA),
        (ranges, RANGE_SCHEMA),
        (operators, OPERATOR_SCHEMA),
        (links, LINK_SCHEMA),
        (collectives, COLLECTIVE_SCHEMA),
        (counters, COUNTER_SCHEMA),
    ):
        assert frame.schema == schema, f"{frame.schema} is not {schema}"
    if (work.height or operators.height) and not any(frame["start_ns"].count() for frame in (work, calls, operators)):
        raise InputError(f"{path}: none of its events has a time that can be read: this capture is damaged")
    work, hosts = without_impossible_times(
        work,
        {CALLS: calls, OPERATORS: operators, RANGES: ranges, "arrows": links, "collectives": collectives}
        | {"counters": counters},
        damage,
    )
    calls, operators, ranges, links, collectives, counters = hosts.values()
    for frame in (work, calls, ranges, operators):
        if frame["duration_ns"].cast(pl.Float64).sum() >= LARGEST_NS:
            raise InputError(f"{path}: durations add up to more than any clock can say: this capture is damaged")
    copies = work["kind"].is_in(pl.Series(COPIES, dtype=KIND).implode())
    if not copies.is_sorted():
        work = work[copies.arg_sort()]  # stable: the order is the file's but for that
    if work.height:
        work, damage = cut_at_the_next(with_launches(work, calls, arrows=arrows, operators=operators), calls, damage)
        work = at_their_launch(work, damage)
    else:
        work = operators_as_work(operators)
    return TraceTable(
        profiler=profiler,
        work=with_details(work),
        calls=calls,
        ranges=ranges,
        operators=operators,
        links=links,
        devices=devices or {},
        other=other or {},
        recorder=recorder,
        lost=lost,
        threads=threads or {},
        collectives=collectives,
        rank=rank,
        ranks=ranks,
        damage=damage,
        counters=counters,
        remarks=remarks,
        traced=traced,
    )
