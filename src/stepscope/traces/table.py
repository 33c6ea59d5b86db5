"""The TraceTable: checked polars frames that every reader gives, whatever the profiler.

Times are integer nanoseconds on the trace's own clock. Nothing is dropped: device work without a launch record and
launches without device work stay in, and what has no row (flow arrows, metadata, counters) is counted in `other`.
"""

from collections.abc import Callable
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import polars as pl
from msgspec.structs import replace

from stepscope.core.errors import InputError
from stepscope.traces.nesting import by_stretches, by_thread, column_of, is_one_value, order_of, values_of

# Counters of a capture: figures that a profiler recorded over time, beside what ran.


COUNTER_SCHEMA = pl.Schema(
    {"start_ns": pl.Int64, "process": pl.Int64, "device": pl.Int64, "name": pl.Categorical(), "value": pl.Int64}
)
"""Columns of counters: `value` holds from `start_ns` on. `device` is -1 for the host's; `process` null for a device."""

ALLOCATED, RESERVED, COPYING = "bytes allocated", "bytes reserved", "copy bandwidth, bytes/s"


def stepwise(changes: pl.DataFrame, name: str) -> pl.DataFrame:
    """A device's counter that is the sum of its changes (device, start_ns, change) so far."""
    summed = changes.group_by("device", "start_ns").agg(pl.col("change").sum()).sort("device", "start_ns")
    return summed.select(
        "start_ns",
        pl.lit(None, pl.Int64).alias("process"),
        "device",
        pl.lit(name, pl.Categorical()).alias("name"),
        pl.col("change").cum_sum().over("device").alias("value"),
    )


KINDS = ("kernel", "memcpy", "memset", "graph", "operator")
"""`graph`: a CUDA graph recorded as a whole. `operator`: a CPU operator, in traces that hold no device work."""

KIND = pl.Enum(KINDS)
COPIES = ("memcpy", "memset")
"""The kinds of work that are not computation."""

WORK_SCHEMA = pl.Schema(
    {
        "start_ns": pl.Int64,
        "duration_ns": pl.Int64,
        "device": pl.Int64,
        "stream": pl.Int64,
        "kind": KIND,
        "name": pl.Categorical(),
        "process": pl.Int64,
        "correlation": pl.Int64,
        "external": pl.Int64,
        "graph_node": pl.Int64,
    }
)
"""Columns of device work as recorded: one row per kernel, copy, fill or whole graph."""

DETAIL_SCHEMA = pl.Schema(
    {
        "bytes": pl.Int64,
        "memory": pl.Categorical(),
        "grid": pl.Categorical(),
        "block": pl.Categorical(),
        "registers": pl.Int32,
        "occupancy": pl.Float32,
    }
)
"""Columns of device work that some profilers record; null elsewhere. `bytes`, of a copy or fill. `memory`: where a copy
comes from and goes to, as in `Pageable -> Device`, where the name does not say it. `grid` and `block`: blocks and
threads of a kernel, as JSON lists. `registers`: of a thread. `occupancy`: the profiler's estimate, from 0 to 100."""

CALL_SCHEMA = pl.Schema(
    {
        "start_ns": pl.Int64,
        "duration_ns": pl.Int64,
        "process": pl.Int64,
        "thread": pl.Int64,
        "name": pl.Categorical(),
        "correlation": pl.Int64,
        "external": pl.Int64,
    }
)
"""Columns of calls to the CUDA (or HIP) runtime and driver on the host."""

RANGE_SCHEMA = pl.Schema(
    {
        "start_ns": pl.Int64,
        "duration_ns": pl.Int64,
        "process": pl.Int64,
        "thread": pl.Int64,
        "name": pl.Categorical(),
        "nested": pl.Boolean,
    }
)
"""Columns of named ranges. `nested`: pushed and popped on one thread; other ranges may cross threads."""

OPERATOR_SCHEMA = pl.Schema(
    {
        "start_ns": pl.Int64,
        "duration_ns": pl.Int64,
        "process": pl.Int64,
        "thread": pl.Int64,
        "name": pl.Categorical(),
        "external": pl.Int64,
        "sequence": pl.Int64,
        "forward_thread": pl.Int64,
        "shapes": pl.Categorical(),
        "dtypes": pl.Categorical(),
        "values": pl.Categorical(),
    }
)
"""Columns of operators. `shapes`, `dtypes` and `values`, of arguments that are numbers: JSON text; `values` only of
operators whose work depends on them. `sequence` and `forward_thread` (PyTorch's own count of threads) tie backward to
forward."""

LINK_SCHEMA = pl.Schema(
    {"id": pl.Int64, "start_ns": pl.Int64, "process": pl.Int64, "thread": pl.Int64, "begins": pl.Boolean}
)
"""Columns of the profiler's arrows from a forward operator (`begins`) to its backward operator: one row an end."""

COLLECTIVE_SCHEMA = pl.Schema(
    {
        "start_ns": pl.Int64,
        "process": pl.Int64,
        "thread": pl.Int64,
        "correlation": pl.Int64,
        "collective": pl.String,
        "group": pl.String,
        "group_size": pl.Int64,
        "elements_in": pl.Int64,
        "elements_out": pl.Int64,
        "dtype": pl.String,
        "sequence": pl.Int64,
    }
)
"""Columns of what the profiler says of collectives: of a kernel (`correlation` is known) or of the operator round its
launch (`thread` is known). `sequence` counts the collectives of a process group, and is equal on all its ranks."""


WORK, CALLS, OPERATORS, RANGES = "kernels, copies and fills", "calls", "operators", "ranges"
"""What rows are, where damaged ones are counted."""


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that cannot be as they stand, counted by what they are.

    `backwards`: they end before they begin, and count as 0 ns. `nameless`: their name is not in the file. `untimed`:
    their start is no time, zero where nothing else is, or a year from all others: work stands at its launch instead,
    other rows are left out. `endless`: their duration is no time, and counts as 0 ns. `overlong`: work that outlasted
    later work of its stream, and was cut where the next begins, by `cut_ns` in all. `mended`: texts that the profiler
    wrote as no JSON, by what was wrong with them.
    """

    backwards: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    nameless: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    untimed: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    endless: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    mended: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    overlong: int = 0
    cut_ns: int = 0


def add_count(counts: dict[str, int], what: str, rows: int) -> None:
    """Add to the count of rows of one sort."""
    if rows:
        counts[what] = counts.get(what, 0) + rows


WAITING = ("process", "thread", "start_ns", "duration_ns", "name")
_WAITS = (r"^(?:cuda|cu|hip)\w*Synchronize|^(?:cuda|cu|hip)Memcpy|^(?:cuda|hip)Free(?:_|$)|^cuMemFree(?:_|$)", r"Async")
"""A pattern of the calls that wait for the device, and of those that do not. Freeing device memory waits too."""

Profiler = Literal["Kineto", "Nsight Systems"]


def empty(schema: pl.Schema) -> pl.DataFrame:
    """A frame of that schema without rows."""
    return pl.DataFrame(schema=schema)


def with_details(work: pl.DataFrame) -> pl.DataFrame:
    """Device work with all columns of DETAIL_SCHEMA, null where its reader did not give them."""
    rest = [name for name in work.columns if name not in DETAIL_SCHEMA]
    if len(work.columns) == len(rest) + len(DETAIL_SCHEMA):
        return work.select(*rest, *DETAIL_SCHEMA)
    details = (
        pl.col(name) if name in work.columns else pl.lit(None, dtype).alias(name)
        for name, dtype in DETAIL_SCHEMA.items()
    )
    return work.select(*rest, *details)


class TraceTable(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One capture. `work` carries, beside WORK_SCHEMA and DETAIL_SCHEMA, its launch: `launch_row` in `calls`,
    `launch_ns` and `launch_thread`; copies and fills come last in it.

    `devices`: names by index where the trace says them. `other`: rows of the file without a place here, by category.
    `recorder`: the profiler's version, where the trace says it. `threads`: the names of threads by (process, thread),
    where the trace says them. `rank`: which rank of `ranks` the process was; None where it was alone, or the trace does
    not say. `remarks`: the profiler's own warnings. `traced`: what it was asked to trace (`cuda`, `nvtx`), where the
    trace says it.
    """

    profiler: Profiler
    work: pl.DataFrame
    calls: pl.DataFrame
    ranges: pl.DataFrame
    operators: pl.DataFrame = msgspec.field(default_factory=lambda: empty(OPERATOR_SCHEMA))
    links: pl.DataFrame = msgspec.field(default_factory=lambda: empty(LINK_SCHEMA))
    devices: dict[int, str] = msgspec.field(default_factory=dict[int, str])
    other: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    recorder: str | None = None
    threads: dict[tuple[int, int], str] = msgspec.field(default_factory=dict[tuple[int, int], str])
    collectives: pl.DataFrame = msgspec.field(default_factory=lambda: empty(COLLECTIVE_SCHEMA))
    rank: int | None = None
    ranks: int | None = None
    damage: Damage = msgspec.field(default_factory=Damage)
    counters: pl.DataFrame = msgspec.field(default_factory=lambda: empty(COUNTER_SCHEMA))
    remarks: tuple[str, ...] = ()
    traced: frozenset[str] = frozenset()

    @cached_property
    def waiting_calls(self) -> pl.DataFrame:
        """The calls whose name says that they wait for a device: columns WAITING."""
        return named(self.calls.select(WAITING), *_WAITS)

    @cached_property
    def copying_calls(self) -> pl.DataFrame:
        """The calls that copy and need not wait: columns WAITING."""
        return named(self.calls.select(WAITING), r"Memcpy\w*Async")

    @property
    def on_cpu(self) -> bool:
        """Whether the rows of `work` are CPU operators by their own time, since no device took part."""
        return bool(self.work.height) and (self.work.item(0, "kind") == "operator")


# Ties device work to the host call that launched it, by (process, correlation id).
#
# Some captures do not say the id in their rows. The profiler's arrows then lead from a call to its work, or an id that
# calls, operators and work share (External id) does.


LAUNCHES = (r"^(cuda|cu|hip)\w*(Launch|Memcpy|Memset)", r"HostFunc|GraphAdd|Graph\w*Node|GetLaunch|CallConfiguration")
"""A pattern of the calls that put work on a device: launches of kernels and graphs, copies and fills; and what none of
these matches."""


_DENSE = 12
"""Ids lie close together where they span at most so many times their number."""
_AT_ONCE = 1 << 18
"""The most rows of which what is made on the way is held at once."""
_MANY = 1 << 21
"""Calls from which on no place is made for each id: ids of millions span hundreds of megabytes."""
_FEW_RUNS = 64
"""Runs of work in which ids count up, as of kernels, copies and fills, that are walked one after the other."""
_FEW_IDS = 2**44
"""Correlation ids below this, which is usual, share 64 bits with a number for their process."""


def fits(names: pl.Series, pattern: str, but_not: str | None = None) -> pl.Series:
    """Whether each name matches a pattern, and not the other. Names are few, so each distinct one is looked at once."""
    distinct = names.unique().drop_nulls()
    text = distinct.cast(pl.String)
    chosen = text.str.contains(pattern)
    if but_not is not None:
        chosen &= ~text.str.contains(but_not)
    if distinct.dtype != pl.Categorical:
        return names.is_in(distinct.filter(chosen).implode())
    return _among(names, distinct.filter(chosen))


def _among(names: pl.Series, few: pl.Series) -> pl.Series:
    """Whether each name, a category, is one of these, which differ. Categories are numbered: a number is looked up."""
    numbers = few.to_physical()
    highest = max(cast("int", one.max() or 0) for one in (numbers, names.to_physical()))
    chosen = pl.Series([False]).new_from_index(0, highest + 1)
    chosen.scatter(numbers, values=True)
    return chosen.gather(names.to_physical()).alias(names.name)


def names_of(frame: pl.DataFrame) -> pl.Series:
    """The different names of the rows: of a frame that is held narrow without making them."""
    distinct = getattr(frame, "distinct", None)
    return (distinct("name") if distinct else frame["name"].unique()).drop_nulls()


def are_named(frame: pl.DataFrame, *patterns: tuple[str, str | None]) -> pl.Series:
    """Whether each row's name, a category, fits all these patterns, each with one that it must not match."""
    few = names_of(frame)
    for pattern, but_not in patterns:
        few = few.filter(fits(few, pattern, but_not))
    return _among(frame["name"], few) if len(few) else pl.Series([False]).new_from_index(0, frame.height)


def named(frame: pl.DataFrame, pattern: str, but_not: str | None = None) -> pl.DataFrame:
    """The rows whose name matches a pattern, and not the other."""
    names = names_of(frame)
    few = names.filter(fits(names, pattern, but_not))
    return frame.filter(pl.col("name").is_in(few.implode())) if len(few) else frame.clear()


def launches(names: pl.Series) -> pl.Series:
    """Whether a call of each name puts work on a device: launches of kernels and graphs, copies and fills."""
    return fits(names, *LAUNCHES)


def with_launches(
    work: pl.DataFrame,
    calls: pl.DataFrame,
    *,
    arrows: pl.DataFrame | None = None,
    operators: pl.DataFrame | None = None,
) -> pl.DataFrame:
    """Add launch_row, launch_ns and launch_thread (null without a record); the rows and their number are unchanged.

    The key is (process, correlation id): ids are counted per process, so the id alone ties kernels to strangers'
    launches. Where several calls carry one id, the launch among them counts. Where a trace does not say the process of
    device work (Kineto), the process is taken from the calls: the only one, or the one whose launch fits.

    Work without such a call is of the one that an arrow (LINK_SCHEMA, ending at device and stream) leads from; or of
    one with its external id: the first work of the first launch, and so on. Without such a call either, `launch_row` is
    null, and it was launched when its arrow or the operator of its external id began.
    """
    keyed = pl.col("correlation").is_not_null() & (pl.col("correlation") != 0)
    if values_of(work, "process").null_count():
        hosts = [frame for frame in (calls.filter(keyed), calls, operators) if frame is not None and frame.height]
        work = _with_process(work, calls.filter(keyed), hosts[0]["process"].unique() if hosts else None)
    call = _call_of(work, calls, keyed)
    for column, name in (("start_ns", "launch_ns"), ("thread", "launch_thread")):  # of a million calls, each for itself
        values = column_of(calls, column).alias(name)

        def launched(some: pl.DataFrame, first: int, values: pl.Series = values) -> pl.DataFrame:
            row = call[first : first + some.height]
            return pl.DataFrame([row.alias("launch_row"), values.gather(row)])

        work = by_stretches(work, ["start_ns"], launched)
    if arrows is not None and arrows.height:
        work = _filled(work, lambda rows: _from_arrows(rows, calls, arrows))
    if work.select((pl.col("external").is_not_null() & pl.col("launch_ns").is_null()).any()).item():
        launch_rows = work["launch_row"]
        work = _filled(work, lambda rows: _by_external_ids(rows, calls, launch_rows))
        if operators is not None:  # as the operators of their external ids began
            by = ["process", "external"]
            began = operators.select(*by, launch_ns="start_ns", launch_thread="thread").drop_nulls()
            began = began.unique(by, keep="first").with_columns(pl.lit(None, pl.UInt32).alias("launch_row"))
            work = _filled(work, lambda rows: rows.select("at", *by).join(began, on=by, how="inner"))
    return work


def _filled(work: pl.DataFrame, find: Callable[[pl.DataFrame], pl.DataFrame]) -> pl.DataFrame:
    """Work with what `find` tells of rows without a launch, by their place `at`: process, and the launch's columns."""
    launch = ("launch_row", "launch_ns", "launch_thread")
    rows = work.select("process", "device", "stream", "start_ns", "duration_ns", "external", "launch_ns")
    places_found = find(rows.with_row_index("at").filter(pl.col("launch_ns").is_null()).drop("launch_ns"))
    if not places_found.height:
        return work
    places = pl.int_range(work.height, dtype=pl.UInt32, eager=True).alias("at").to_frame()
    places_found = places.join(places_found, on="at", how="left", maintain_order="left")
    return work.with_columns(
        pl.coalesce(places_found["process"], "process").alias("process"),
        *(pl.coalesce(column, places_found[column]).alias(column) for column in launch),
    )


def _from_arrows(rows: pl.DataFrame, calls: pl.DataFrame, arrows: pl.DataFrame) -> pl.DataFrame:
    """The launches of these rows of work by the arrows that end where they begin, or within them."""
    columns = {"launch_thread": "thread", "launch_ns": "start_ns"}
    launching = calls.filter(launches(calls["name"]))
    begins = _at_the_start(arrows.filter("begins"), launching, ["process", "thread"]).select("id", "process", **columns)
    begins = pl.concat(
        [begins, calls.select("process", id="correlation", **columns).drop_nulls("id").select(begins.columns)]
    )
    ends = arrows.filter(~pl.col("begins")).select("id", "start_ns", device="process", stream="thread")
    ends = _at_the_start(ends, rows, ["device", "stream"])
    pairs = ends.join(begins, on="id", how="inner").unique(
        ["device", "stream", "start_ns"], keep="first", maintain_order=True
    )
    place = ["process", "launch_thread", "launch_ns"]
    called = calls.select("process", launch_thread="thread", launch_ns="start_ns", launches=launches(calls["name"]))
    called = called.with_row_index("launch_row").sort("launches").unique(place, keep="last")
    rows = rows.drop("process").join(pairs, on=["device", "stream", "start_ns"], how="inner")
    return rows.join(called, on=place, how="left").select("at", "process", "launch_row", "launch_ns", "launch_thread")


def _at_the_start(ends: pl.DataFrame, slices: pl.DataFrame, track: list[str]) -> pl.DataFrame:
    """Ends of arrows, each at the start of the slice of its track that it lies in: it is bound to the whole slice."""
    ends = ends.sort("start_ns", nulls_last=True, maintain_order=True)
    begun = slices.select(*track, begun_ns="start_ns", end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    around = ends.join_asof(
        begun.drop_nulls("begun_ns").sort("begun_ns", "end_ns"),
        left_on="start_ns",
        right_on="begun_ns",
        by=track,
        strategy="backward",
        check_sortedness=False,
    )
    inside = pl.col("start_ns") <= pl.col("end_ns")
    return around.with_columns(pl.when(inside).then("begun_ns").otherwise("start_ns").alias("start_ns")).select(
        ends.columns
    )


def _by_external_ids(rows: pl.DataFrame, calls: pl.DataFrame, launch_rows: pl.Series) -> pl.DataFrame:
    """The launches of these rows of work by the external ids of calls, turn by turn."""
    by = ["process", "external"]
    turn = pl.int_range(pl.len()).over(by).alias("turn")
    free = calls.with_row_index("launch_row").filter(launches(calls["name"])).drop_nulls("external")
    free = free.filter(~pl.col("launch_row").is_in(launch_rows.drop_nulls().implode())).sort("start_ns")
    free = free.select("launch_row", *by, turn, launch_ns="start_ns", launch_thread="thread")
    waiting = rows.drop_nulls("external").sort("start_ns", nulls_last=True).select("at", *by, turn)
    return waiting.join(free, on=[*by, "turn"], how="inner")


def _call_of(work: pl.DataFrame, calls: pl.DataFrame, keyed: pl.Expr) -> pl.Series:
    """Row of the call behind each row of work, or null: by place or a binary search, for the memory's sake."""
    processes = {value: number for number, value in enumerate(values_of(calls, "process").unique().to_list())}
    every = calls["correlation"]
    low, high = every.min(), every.max()
    small = low is None or (cast("int", low) >= 0 and cast("int", high) < _FEW_IDS)
    ids = None if small else every.unique().sort()  # else their ranks stand for them

    def key(frame: pl.DataFrame) -> pl.Series:
        one = frame["correlation"]
        if one.null_count() or cast("int", one.min() or 0) <= 0:
            one = frame.select(pl.when(keyed).then(pl.col("correlation"))).to_series()
        if ids is not None:
            rank = ids.search_sorted(one.fill_null(0), side="left").cast(pl.Int64)
            known = ids.gather(rank.clip(upper_bound=len(ids) - 1)) == one
            one = pl.select(pl.when(known).then(rank)).to_series()
        if cast("int", one.min() or 0) < 0 or cast("int", one.max() or 0) >= _FEW_IDS:
            one = pl.select(pl.when(one.is_between(0, _FEW_IDS - 1)).then(one)).to_series()
        process = values_of(frame, "process")
        if frame.height and is_one_value(process) and processes.get(process[0]) == 0:
            return one
        return (
            column_of(frame, "process").replace_strict(processes, default=None, return_dtype=pl.Int64) * _FEW_IDS + one
        )

    del every
    ways = (_call_by_stretches,) if calls.height >= _MANY else (_call_in_order, _call_in_place)
    for find in ways if small else ():
        if (found := find(work, calls, key)) is not None:
            return found
    keys, rows = key(calls), pl.int_range(calls.height, dtype=pl.UInt32, eager=True)
    if keys.null_count():
        rows = rows.filter(keys.is_not_null())
        keys = keys.drop_nulls()
    if not len(keys):
        return pl.Series("call", [None], dtype=pl.UInt32).new_from_index(0, work.height)
    if not keys.is_sorted():
        order = keys.arg_sort()
        keys, rows = keys.gather(order), rows.gather(order)
    if (keys == keys.shift(1)).any():
        is_launch, start_ns = launches(calls["name"]).gather(rows), calls["start_ns"].gather(rows)
        records = pl.DataFrame({"key": keys, "call": rows, "launch": is_launch, "start_ns": start_ns})
        records = records.sort("key", "launch", "start_ns").unique("key", keep="last", maintain_order=True)
        keys, rows = records["key"], records["call"]
    wanted = key(work)
    at = keys.search_sorted(wanted.fill_null(-1), side="left").clip(upper_bound=len(keys) - 1)
    return pl.select(pl.when(keys.gather(at) == wanted).then(rows.gather(at))).to_series()


def _call_in_order(
    work: pl.DataFrame, calls: pl.DataFrame, key: Callable[[pl.DataFrame], pl.Series]
) -> pl.Series | None:
    """As `_call_of`, where ids count up from call to call, and in a few runs of work: one walk along both takes a fifth
    of the time of a place for each id."""
    keys = key(calls).alias("key")
    if not calls.height or keys.null_count() or (keys[1:] <= keys[:-1]).any():
        return None
    wanted = key(work).fill_null(-1).alias("key")
    begins = (wanted < wanted.shift(1)).arg_true().to_list()
    if len(begins) > _FEW_RUNS:
        return None
    records = pl.DataFrame([keys, pl.int_range(calls.height, dtype=pl.UInt32, eager=True).alias("call")])
    runs = (wanted[first:last].to_frame() for first, last in pairwise([0, *begins, len(wanted)]))
    found = [run.join_asof(records, on="key", tolerance=0, check_sortedness=False)["call"] for run in runs]
    return pl.concat(found, rechunk=True)


def _call_in_place(
    work: pl.DataFrame, calls: pl.DataFrame, key: Callable[[pl.DataFrame], pl.Series]
) -> pl.Series | None:
    """As `_call_of`, where each call has an id of its own and they lie close together: a place for each id is found
    sooner than the id among the others. A stretch at a time, since a million of anything takes megabytes."""
    of_key = ["process", "correlation"]
    known, first, last = 0, _FEW_IDS**2, -1
    for keys in (key(part) for part in calls.select(of_key).iter_slices(_AT_ONCE)):
        known += len(keys) - keys.null_count()
        first = min(first, cast("int", first if (least := keys.min()) is None else least))
        last = max(last, cast("int", keys.max() or -1))
    if not 0 <= last - first < _DENSE * known:
        return None
    places = pl.Series("call", [None], dtype=pl.UInt32).new_from_index(0, last - first + 1)
    begin = 0
    for part in calls.select(of_key).iter_slices(_AT_ONCE):
        keys, rows = key(part), pl.int_range(begin, begin + part.height, dtype=pl.UInt32, eager=True)
        begin += part.height
        if keys.null_count():
            rows, keys = rows.filter(keys.is_not_null()), keys.drop_nulls()
        places.scatter(keys - first, rows)
    if len(places) - places.null_count() < known:  # some id is of several calls
        return None
    found: list[pl.Series] = []
    for wanted in (key(part) for part in work.select(of_key).iter_slices(_AT_ONCE)):
        inside = cast("int", wanted.min() or first) >= first and cast("int", wanted.max() or first) <= last
        found.append(places.gather((wanted if inside else wanted.set(~wanted.is_between(first, last), None)) - first))
    return pl.concat(found, rechunk=True)


def _call_by_stretches(
    work: pl.DataFrame, calls: pl.DataFrame, key: Callable[[pl.DataFrame], pl.Series]
) -> pl.Series | None:
    """As `_call_in_place`, by a search in stretches of calls: ids count up, so that those of a stretch of work are in
    a few of them. Of millions it takes less memory."""
    import numpy as np  # noqa: PLC0415  (it takes a while)

    of_key = ["process", "correlation"]

    @lru_cache(maxsize=16)
    def ordered(begin: int) -> tuple[Any, Any]:
        """The keys of a stretch of calls in order, and their rows."""
        keys = key(calls.select(of_key)[begin : begin + _AT_ONCE]).fill_null(-1).to_numpy()
        rows = np.argsort(keys, kind="stable").astype(np.uint32)
        return keys[rows], rows + np.uint32(begin)

    begins = range(0, calls.height, _AT_ONCE)
    bounds = [(begin, keys[0], keys[-1]) for begin in begins for keys, _ in (ordered(begin),)]
    found: list[pl.Series] = []
    for begin in range(0, work.height, _AT_ONCE):
        wanted = key(work.select(of_key)[begin : begin + _AT_ONCE]).fill_null(-2).to_numpy()
        call = np.full(len(wanted), -1)
        for first, low, high in bounds:
            here = np.flatnonzero((wanted >= low) & (wanted <= high))
            if not len(here):
                continue
            keys, rows = ordered(first)
            at = np.searchsorted(keys, wanted[here])
            known = keys[at] == wanted[here]
            here, at = here[known], at[known]
            if (call[here] >= 0).any() or (keys[np.minimum(at + 1, len(keys) - 1)] == keys[at])[
                at + 1 < len(keys)
            ].any():
                return None  # some id is of several calls
            call[here] = rows[at]
        found.append(pl.Series("call", call).cast(pl.UInt32, strict=False))
    return pl.concat(found, rechunk=True)


def _with_process(work: pl.DataFrame, records: pl.DataFrame, processes: pl.Series | None) -> pl.DataFrame:
    """Fill the process of device work from the calls that launched it, which are of these processes."""
    if processes is None or len(processes) == 1:
        only = processes.item() if processes is not None else 0
        return work.with_columns(pl.col("process").fill_null(only))
    # Several processes in one file (merged traces of several ranks): a device's work belongs to the process most of
    # whose launches carry its (correlation, external) ids and precede it. Ranks in step with each other may all fit:
    # they are then taken in their order, each for a device of its own.
    candidates = work.filter(pl.col("process").is_null() & pl.col("correlation").is_not_null()).join(
        records.select("process", "correlation", "external", "start_ns").rename({"start_ns": "called_ns"}),
        on="correlation",
        how="inner",
        suffix="_call",
    )
    votes = (
        candidates.filter(
            (pl.col("called_ns") <= pl.col("start_ns"))
            & (pl.col("external").eq_missing(pl.col("external_call")) | pl.col("external").is_null())
        )
        .group_by("device", "process_call")
        .agg(pl.len().alias("votes"))
        .filter(pl.col("votes") >= 0.99 * pl.col("votes").max().over("device"))
        .sort("device", pl.col("process_call").abs())  # words for processes are numbered -2, -3, ... as they come
    )
    chosen: dict[int, int] = {}
    for (device,), fitting in votes.group_by("device", maintain_order=True):
        fits = fitting["process_call"].to_list()
        chosen[cast("int", device)] = next((one for one in fits if one not in chosen.values()), fits[0])
    by_device = pl.col("device").replace_strict(chosen, default=0, return_dtype=pl.Int64)
    return work.with_columns(pl.coalesce("process", by_device).alias("process"))


def operators_as_work(operators: pl.DataFrame) -> pl.DataFrame:
    """A trace without device work: every operator by its own time, that of operators it calls excluded.

    The rows are in the order of a nest by thread.
    """
    nest = by_thread(operators)
    return with_details(
        operators[nest.order].select(
            "start_ns",
            nest.self_ns(operators["duration_ns"]).alias("duration_ns"),
            pl.lit(-1, pl.Int64).alias("device"),
            pl.col("thread").alias("stream"),
            pl.lit("operator", KIND).alias("kind"),
            pl.col("name").cast(pl.Categorical),
            "process",
            pl.lit(None, pl.Int64).alias("correlation"),
            "external",
            pl.lit(None, pl.Int64).alias("graph_node"),
            pl.lit(None, pl.UInt32).alias("launch_row"),
            pl.col("start_ns").alias("launch_ns"),
            pl.col("thread").alias("launch_thread"),
        )
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
        if "duration_ns" in frame.columns and cast("int", frame["duration_ns"].max() or 0) >= FAR_NS:
            endless = pl.col("duration_ns") >= FAR_NS
            add_count(damage.endless, what, int(frame.select(endless.sum()).item()))
            frames[what] = frame.with_columns(pl.when(~endless).then("duration_ns").otherwise(0).alias("duration_ns"))
    work = frames.pop(WORK)
    starts = [
        (cast("int", one.min() or 0), cast("int", one.max() or 0), one.null_count())
        for one in (frame["start_ns"] for frame in (work, *frames.values()) if frame.height)
    ]
    low, high = min((one[0] for one in starts), default=0), max((one[1] for one in starts), default=0)
    zero = (pl.col("start_ns") == 0) & (pl.col("duration_ns") == 0)
    if high - low < FAR_NS and not any(one[2] for one in starts) and not work.select(zero.any()).item():
        return work, frames

    def is_near(time_ns: object) -> pl.Expr:
        return (pl.col("start_ns") - int(cast("float", time_ns or 0))).abs() < FAR_NS

    host = pl.concat([frames[what]["start_ns"] for what in (CALLS, OPERATORS, RANGES)]).drop_nulls()
    device = work.filter(~zero)["start_ns"].drop_nulls()
    near = is_near(pl.concat([host, device] if not host.len() else [host]).median())
    for what, frame in frames.items():
        frames[what] = frame.filter(near)
        add_count(damage.untimed, what, frame.height - frames[what].height)
    if device.len() and not work.filter(~zero).select(near.any()).item():
        near = is_near(device.median())  # the device has a clock of its own
    known = ~zero & near.fill_null(False)
    return work.with_columns(pl.when(known).then("start_ns").alias("start_ns")), frames


_NO_START = pl.col("start_ns").is_null() | ((pl.col("start_ns") == 0) & (pl.col("launch_ns") > 0)).fill_null(False)
"""Whether a row of work, joined to its launch, has no start. A start of 0 is none where the launch is later."""


_TIMED = (pl.col("stream") >= 0) & (pl.col("duration_ns") > 0) & ~_NO_START
_END_NS = (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns")


def _may_overlap(work: pl.DataFrame, places: list[str]) -> bool:
    """Whether some row begins well before the end of the one before it in its place, where none need be sorted."""
    alone = all(is_one_value(values_of(work, place)) for place in places)
    kept = [*(places if not alone else ()), "start_ns", _END_NS]
    slices = work.select(*places, "start_ns", "duration_ns", "launch_ns").iter_slices(_AT_ONCE)
    rows = pl.concat(some.filter(_TIMED).select(kept) for some in slices)
    for one in [rows] if alone else rows.partition_by(places):
        start_ns, end_ns = one["start_ns"], one["end_ns"]
        order = None if start_ns.is_sorted() else order_of(start_ns)
        for first in range(0, one.height, _AT_ONCE):
            some = slice(first, first + _AT_ONCE + 1)
            starts, ends = (side[some] if order is None else side.gather(order[some]) for side in (start_ns, end_ns))
            if (starts.shift(-1) < ends - _SHORT_NS).any():
                return True
    return False


def cut_at_the_next(work: pl.DataFrame, calls: pl.DataFrame, damage: Damage) -> tuple[pl.DataFrame, Damage]:
    """Work of which no row outlasts later work of its stream: such a row is cut where the next begins.

    A row may overlap the next where that was launched to begin early (programmatic dependent launch), and kernels of
    one graph run side by side. So a row is cut only if work of another launch begins and ends within it, and either
    more begins in it too, or the call of that work cannot begin it early.
    """
    places = ["process", "device", "stream"]
    if not _may_overlap(work, places):
        return work, damage
    rows = work.select(*places, "start_ns", _END_NS, "launch_ns", "duration_ns", "launch_row").with_row_index("row")
    rows = rows.filter(_TIMED)
    rows = rows.sort(*places, "start_ns", "end_ns")
    begins_within = pl.col("start_ns").shift(-1) < pl.col("end_ns") - _SHORT_NS
    on_one_stream = pl.all_horizontal(pl.col(column) == pl.col(column).shift(-1) for column in places)
    if not rows.select((begins_within & on_one_stream).any()).item():
        return work, damage
    # What the rows of one launch have in common: their correlation id, that of a graph where no id is recorded, or the
    # row itself.
    known = pl.col("correlation").is_not_null() & (pl.col("correlation") != 0)
    of_graph = pl.when(pl.col("graph_node").is_not_null()).then(pl.lit(-1, pl.Int64))
    launch = pl.when(known).then("correlation").otherwise(of_graph.otherwise(-2 - pl.col("row").cast(pl.Int64)))
    rows = rows.with_columns(work.with_row_index("row").select(launch.alias("launch"))["launch"].gather(rows["row"]))
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


LARGEST_NS = 2**62
"""Since 1970 the clock says less until 2116. Within it sums and differences of times fit their 64 bits."""


def assemble(table: TraceTable, path: Path, *, arrows: pl.DataFrame | None = None) -> TraceTable:
    """What a reader gives, checked: launches joined, times that cannot be put right; where no device worked, operators.

    `arrows` lead from calls to their work, as LINK_SCHEMA, where the rows themselves do not say it.

    Raises InputError, naming `path`, where no row has a time, or durations add up to more than a clock can say.
    """
    work, calls, operators, damage = with_details(table.work), table.calls, table.operators, table.damage
    for frame, schema in (
        (work, pl.Schema({**WORK_SCHEMA, **DETAIL_SCHEMA})),
        (calls, CALL_SCHEMA),
        (table.ranges, RANGE_SCHEMA),
        (operators, OPERATOR_SCHEMA),
        (table.links, LINK_SCHEMA),
        (table.collectives, COLLECTIVE_SCHEMA),
        (table.counters, COUNTER_SCHEMA),
    ):
        assert frame.schema == schema, f"{frame.schema} is not {schema}"
    if (work.height or operators.height) and not any(frame["start_ns"].count() for frame in (work, calls, operators)):
        raise InputError(f"{path}: none of its events has a time that can be read: this capture is damaged")
    others = {CALLS: calls, OPERATORS: operators, RANGES: table.ranges, "arrows": table.links}
    known = work.filter(
        pl.col("kind") == "memcpy", pl.col("bytes") > 0, pl.col("bytes") < 2**53, pl.col("duration_ns") > 0
    )
    rate = (pl.col("bytes") / pl.col("duration_ns") * 1e9).round().cast(pl.Int64, strict=False).fill_null(0)
    begins = known.select("device", "start_ns", rate.alias("change"))
    ends = known.select("device", pl.col("start_ns") + pl.col("duration_ns"), -rate.alias("change"))
    copying = stepwise(pl.concat([begins, ends]), COPYING)
    others |= {"collectives": table.collectives, "counters": pl.concat([table.counters, copying])}
    work, others = without_impossible_times(work, others, damage)
    calls, operators, ranges, links, collectives, counters = others.values()
    for frame in (work, calls, ranges, operators):
        parts = frame.select("duration_ns").iter_slices(_AT_ONCE)
        if sum(float(part["duration_ns"].cast(pl.Float64).sum()) for part in parts) >= LARGEST_NS:
            raise InputError(f"{path}: durations add up to more than any clock can say: this capture is damaged")
    copies = work["kind"].is_in(pl.Series(COPIES, dtype=KIND).implode())
    if not copies.is_sorted():
        work = work[copies.arg_sort()]  # stable: the order is the file's but for that
    if work.height:
        work, damage = cut_at_the_next(with_launches(work, calls, arrows=arrows, operators=operators), calls, damage)
        missing = work.select(_NO_START.alias("missing")).to_series()
        if missing.any():
            # They stand at their launch, or else at 0 or, where that is far from all others, at the first start.
            add_count(damage.untimed, WORK, int(missing.sum()))
            first = cast("int", work["start_ns"].filter(~missing).min() or 0)
            instead = pl.coalesce("launch_ns", pl.lit(first if abs(first) >= FAR_NS else 0, pl.Int64))
            work = work.with_columns(pl.when(missing).then(instead).otherwise("start_ns").alias("start_ns"))
    else:
        work = operators_as_work(operators)
    return replace(
        table,
        work=work,
        calls=calls,
        ranges=ranges,
        operators=operators,
        links=links,
        collectives=collectives,
        damage=damage,
        counters=counters,
    )
