"""What engineers look up in a capture: trees, operators, copies, host calls, the queue, replays of graphs."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import msgspec
import polars as pl

from stepscope.core.answer import TEXT, Cell, Line, Table, as_lines, table_of
from stepscope.core.errors import InputError, name_shown
from stepscope.core.range_names import STEP
from stepscope.core.units import format_share, ms_text
from stepscope.traces.captures.attribution import Attribution, gather, range_kind
from stepscope.traces.captures.occupation import waits
from stepscope.traces.captures.summary import TraceSummary
from stepscope.traces.kernels.names import kernel_label, kernel_labels
from stepscope.traces.nesting import Nest, by_thread, in_order, lasting, open_rows, place_in, union
from stepscope.traces.roofline import shapes_label
from stepscope.traces.table import COPIES, KIND, TraceTable, fits, launches, named

# Trees of operators and of ranges: each path of names with its calls, its time on the host and on the device.
#
# An interval is inside the innermost one that holds it on its thread. Intervals of one path of names are one node. Time
# on the device is that of the work launched inside: by the thread of the launch or, where that thread has no interval
# open, by the innermost of its process (autograd launches backward from a thread that has no ranges).


DEEPEST = 200
"""Intervals that nest deeper are left out, with the work launched in them."""

TREE_SCHEMA = pl.Schema(
    {
        "depth": pl.Int64,
        "name": pl.String,
        "path": pl.List(pl.String),
        "calls": pl.Int64,
        "host_ns": pl.Int64,
        "self_host_ns": pl.Int64,
        "kernels": pl.Int64,
        "device_ns": pl.Int64,
        "self_device_ns": pl.Int64,
    }
)
"""Columns of a tree, parents before children. `calls`: intervals. `kernels`: work launched inside, copies included.
`self_*`: without what the children take."""

_NUMBERED = r"(?i)^(.*#|.*\bstep[ _]?)\d+$"
"""Names that count steps: `ProfilerStep#7`. Steps are one node."""


def operator_tree(attribution: Attribution, top: int | None = None) -> pl.DataFrame:
    """The tree of a capture's operators, of the schema TREE_SCHEMA; `top`: the nodes with most time, and their
    parents."""
    operators = attribution.table.operators
    return _tree(attribution, operators, attribution.work["operator_row"], top)


def range_tree(attribution: Attribution, top: int | None = None) -> pl.DataFrame:
    """The tree of a capture's ranges that nest; steps are one node, whatever their numbers."""
    ranges = attribution.table.ranges.filter("nested")
    names = ranges["name"].unique().cast(pl.String)
    plain = names.str.replace(_NUMBERED, "${1}*")
    ranges = ranges.with_columns(
        ranges["name"].cast(pl.String).replace_strict(names, plain, return_dtype=pl.String).cast(pl.Categorical)
    )
    # The range open at each launch, on its thread or else in its process.
    work = attribution.work
    threads = work.select("process", pl.col("launch_thread").alias("thread"))
    of_thread = open_rows(ranges, threads, work["launch_ns"])
    anywhere = Nest(ranges, "process").innermost(work["process"], work["launch_ns"])
    return _tree(attribution, ranges, pl.select(pl.coalesce(of_thread, anywhere)).to_series(), top)


def _tree(attribution: Attribution, intervals: pl.DataFrame, rows: pl.Series, top: int | None) -> pl.DataFrame:
    if not intervals.height:
        return pl.DataFrame(schema=TREE_SCHEMA)
    nest = by_thread(intervals)
    node, nodes = _nodes(gather(intervals["name"], nest.order), nest.parent)
    places = pl.DataFrame(
        {
            "node": node,
            "host_ns": intervals["duration_ns"].gather(nest.order),
            "self_host_ns": nest.self_ns(intervals["duration_ns"]),
        }
    )
    held = places.group_by("node").agg(pl.len().cast(pl.Int64).alias("calls"), pl.col("host_ns", "self_host_ns").sum())
    node_of_row = pl.DataFrame({"row": nest.order, "node": node}).sort("row")["node"]
    spent = (
        pl.DataFrame({"node": gather(node_of_row, rows), "ns": attribution.work["duration_ns"]})
        .drop_nulls("node")
        .group_by("node")
        .agg(pl.len().cast(pl.Int64).alias("kernels"), pl.col("ns").sum().alias("self_device_ns"))
    )
    nodes = nodes.join(held, on="node", how="left").join(spent, on="node", how="left").fill_null(0).sort("node")
    on_device = int(nodes["self_device_ns"].sum()) > 0
    # Nodes also get what is launched inside their children, and `weight`: the most time of any node below.
    nodes = nodes.with_columns(
        pl.col("self_device_ns").alias("device_ns"),
        pl.lit(0, pl.Int64).alias("weight") if on_device else pl.col("host_ns").alias("weight"),
    )
    for depth in range(int(nodes["depth"].max() or 0), 0, -1):  # type: ignore[arg-type]
        inner = (
            nodes.filter(pl.col("depth") == depth)
            .group_by("parent")
            .agg(pl.col("kernels", "device_ns").sum().name.prefix("inner_"), pl.col("weight").max().alias("inner"))
        )
        nodes = (
            nodes.join(inner, left_on="node", right_on="parent", how="left", maintain_order="left")
            .with_columns(
                pl.col("kernels") + pl.col("inner_kernels").fill_null(0),
                pl.col("device_ns") + pl.col("inner_device_ns").fill_null(0),
                pl.max_horizontal("weight", pl.col("inner").fill_null(0)),
            )
            .drop("inner_kernels", "inner_device_ns", "inner")
        )
    return _ordered(nodes.with_columns(pl.col("device_ns").alias("weight")) if on_device else nodes, top)


def _nodes(names: pl.Series, parent: pl.Series) -> tuple[pl.Series, pl.DataFrame]:
    """The node of each position, and the nodes (node, parent, depth, name), parents before children."""
    frame = pl.DataFrame({"name": names, "parent": parent}).with_row_index("position")
    levels: list[pl.DataFrame] = []
    placed: list[pl.DataFrame] = []
    count = 0
    # One level of depth after the other: a position's node is its name inside its parent's node.
    level = frame.filter(pl.col("parent").is_null()).select("position", "name", pl.lit(-1, pl.Int64).alias("above"))
    for depth in range(DEEPEST):
        if not level.height:
            break
        fresh = level.select("above", "name").unique(maintain_order=True)
        fresh = fresh.with_columns((pl.int_range(pl.len(), dtype=pl.Int64) + count).alias("node"))
        count += fresh.height
        levels.append(fresh.with_columns(pl.lit(depth, pl.Int64).alias("depth")))
        here = level.join(fresh, on=["above", "name"], how="left").select("position", "node")
        placed.append(here)
        below = here.rename({"position": "parent", "node": "above"}).cast({"parent": pl.Int64})
        level = frame.join(below, on="parent", how="inner").select("position", "name", "above")
    nodes = pl.concat(levels).rename({"above": "parent"})
    node = frame.select("position").join(pl.concat(placed), on="position", how="left", maintain_order="left")["node"]
    return node, nodes


def _ordered(nodes: pl.DataFrame, top: int | None) -> pl.DataFrame:
    """The heaviest nodes, each below its parent, the heaviest children first."""
    # A parent weighs at least as much as its child and has a lower number, so it is among them where the child is.
    kept = nodes.sort("weight", "node", descending=[True, False]).head(top or nodes.height)
    children: dict[int, list[int]] = {}
    for node, parent in kept.select("node", "parent").iter_rows():
        children.setdefault(parent, []).append(node)
    names = dict(kept.select("node", pl.col("name").cast(pl.String).fill_null("")).iter_rows())
    order: list[int] = []
    paths: list[list[str]] = []
    waiting: list[tuple[int, list[str]]] = [(node, []) for node in reversed(children.get(-1, []))]
    while waiting:
        node, above = waiting.pop()
        order.append(node)
        paths.append([*above, names[node]])
        waiting += [(child, paths[-1]) for child in reversed(children.get(node, []))]
    placed = pl.DataFrame({"node": order, "path": paths}, schema={"node": pl.Int64, "path": pl.List(pl.String)})
    return (
        placed.join(kept, on="node", how="left", maintain_order="left")
        .with_columns(pl.col("name").cast(pl.String))
        .select(list(TREE_SCHEMA))
    )


# Copies and fills by direction, kind of memory and size, with the bandwidth that they reached.


SIZES = ((4 << 10, "below 4 KiB"), (64 << 10, "to 64 KiB"), (1 << 20, "to 1 MiB"), (16 << 20, "to 16 MiB"))
LARGE, UNTOLD = "16 MiB and more", "size not recorded"
"""The classes of sizes: each up to its bound, which it leaves out."""

FILL = "fill"


def copy_totals(attribution: Attribution) -> pl.DataFrame:
    """A row for each direction, kind of memory and class of size, over the whole capture, the busiest first.

    `direction`: HtoD, DtoH, DtoD, PtoP, HtoH, fill, or other. `memory`: `Pageable -> Device`, null where it is not
    recorded. `size`: one of SIZES. `calls`, `busy_ns`, `bytes` and `bytes_per_s` (null where sizes are not recorded).
    """
    names = attribution.work["name"]
    chosen = attribution.work.filter(pl.col("kind").is_in(pl.Series(COPIES, dtype=KIND).implode()))
    distinct = chosen["name"].unique().cast(pl.String)
    kinds = pl.DataFrame({"name": distinct}).select(
        pl.col("name").cast(names.dtype),
        pl.when(pl.col("name").str.starts_with("Memset"))
        .then(pl.lit(FILL))
        .otherwise(pl.col("name").str.extract(r"\b([HDP]to[HDP])\b").fill_null("other"))
        .alias("direction"),
        pl.col("name").str.extract(r"\(([^()]+ -> [^()]+)\)").alias("named"),
    )
    size = pl.when(pl.col("bytes").is_null()).then(pl.lit(UNTOLD))
    for bound, label in SIZES:
        size = size.when(pl.col("bytes") < bound).then(pl.lit(label))
    moved, spent = pl.col("bytes").sum(), pl.col("busy_ns")
    known = pl.col("size") != UNTOLD
    return (
        chosen.join(kinds, on="name", how="left")
        .with_columns(
            pl.coalesce("named", pl.col("memory").cast(pl.String)).alias("memory"),
            size.otherwise(pl.lit(LARGE)).alias("size"),
        )
        .group_by("direction", "memory", "size")
        .agg(pl.len().cast(pl.Int64).alias("calls"), pl.col("duration_ns").sum().alias("busy_ns"), moved)
        .with_columns(pl.when(known).then("bytes").alias("bytes"))
        .with_columns(pl.when(spent > 0).then(pl.col("bytes") / spent * 1e9).alias("bytes_per_s"))
        .sort("busy_ns", "direction", "memory", "size", descending=[True, False, False, False])
    )


# Time of the host in calls to the CUDA (or HIP) runtime and driver, and how long it waited in them; data loading.


_LOADS = r"DataLoader"
_VERSION = r"_v\d{4,}$"
"""What Nsight Systems adds to a call's name: the version of CUDA in which it last changed."""


def host_calls(attribution: Attribution, calls: pl.DataFrame) -> pl.DataFrame:
    """A row for each name among `calls`, the longest first: calls, total_ns, median_ns, max_ns, and of those that wait
    for the device `waits` and `waited_ns`."""
    columns = ["process", "thread", "start_ns", "name"]
    waiting = waits(attribution.table, attribution.work).with_columns(pl.lit(True).alias("waits"))
    may_wait = waiting["name"].unique()
    found = calls.filter(pl.col("name").is_in(may_wait.implode()))
    found = found.join(waiting.select(*columns, "waits").unique(), on=columns, how="left")
    waited = found.group_by("name").agg(
        pl.col("waits").fill_null(False).sum().cast(pl.Int64),
        pl.col("duration_ns").filter("waits").sum().alias("waited_ns"),
    )
    nothing = pl.col("waits", "waited_ns").fill_null(0)
    totals = _by_name(calls).join(waited, on="name", how="left", maintain_order="left").with_columns(nothing)
    return totals.with_columns(pl.col("name").cast(pl.String).str.replace(_VERSION, "")).sort(
        "total_ns", "name", descending=[True, False]
    )


def _by_name(frame: pl.DataFrame) -> pl.DataFrame:
    """A row for each name: calls, total_ns, median_ns, max_ns.

    Equal durations are counted together, a stretch of rows at a time: millions of calls last some thousand times.
    """
    of = ["name", "duration_ns"]
    nothing = frame.clear().select(*of, pl.lit(0, pl.Int64).alias("calls"))
    parts = [
        part.group_by(of).agg(pl.len().cast(pl.Int64).alias("calls")) for part in frame.select(of).iter_slices(1 << 18)
    ]
    counts = pl.concat([nothing, *parts]).group_by(of).agg(pl.col("calls").sum()).sort("duration_ns")
    spent, calls = pl.col("duration_ns"), pl.col("calls")
    reached = calls.cum_sum()
    middle = [spent.filter(reached > (calls.sum() - less) // 2).first() for less in (1, 0)]
    return counts.group_by("name").agg(
        calls.sum().alias("calls"),
        (spent * calls).sum().alias("total_ns"),
        ((middle[0] + middle[1]) / 2).alias("median_ns"),
        spent.max().alias("max_ns"),
    )


# How the duration of each kernel varies, and with which grid, registers and occupancy it ran.


def kernel_times(attribution: Attribution) -> pl.DataFrame:
    """A row for each kernel and family over the whole capture, the busiest first.

    `calls`, `busy_ns`, `min_ns`, `median_ns`, `max_ns`, `deviation_ns` (of a sample; null for one call). `grid` and
    `block` are those of most calls, `grids` counts different ones. `registers` is the most. `occupancy` is the mean of
    the profiler's estimate by time, from 0 to 100. What is not recorded is null.
    """
    spent = pl.col("duration_ns")
    known = pl.col("occupancy").is_not_null()
    weighted = (pl.col("occupancy").cast(pl.Float64) * spent).filter(known).sum() / spent.filter(known).sum()
    return (
        attribution.kernels.group_by("name", "family")
        .agg(
            pl.len().cast(pl.Int64).alias("calls"),
            spent.sum().alias("busy_ns"),
            spent.min().alias("min_ns"),
            spent.median().alias("median_ns"),
            spent.max().alias("max_ns"),
            spent.std().alias("deviation_ns"),
            pl.col("grid", "block").drop_nulls().mode().sort().first().cast(pl.String),
            pl.col("grid").drop_nulls().n_unique().cast(pl.Int64).alias("grids"),
            pl.col("registers").max(),
            pl.when(spent.filter(known).sum() > 0).then(weighted).alias("occupancy"),
        )
        .with_columns(pl.col("name", "family").cast(pl.String))
        .sort("busy_ns", "name", "family", descending=[True, False, False])
    )


# Every operator of a capture with its shapes: calls, kernels, device time, FLOPs, bytes and bound.


_ROOFS = pl.Schema(
    {
        "name": pl.Categorical(),
        "shapes": pl.Categorical(),
        "launching": pl.Int64,
        "kernels": pl.Int64,
        "busy_ns": pl.Int64,
        "flops": pl.Float64,
        "bytes": pl.Float64,
        "bound_ns": pl.Float64,
        "bound": pl.String,
    }
)


def operator_totals(summary: TraceSummary) -> pl.DataFrame:
    """A row for each operator and its shapes, over the whole capture, the busiest first.

    `name`, `shapes` (JSON text as recorded), `calls`, `host_ns` (without operators that it calls), `kernels` and
    `busy_ns` of the work that it launched itself, copies included, `flops`, `bytes`, `bound_ns` (null where no rule
    counts them) and `bound`: the verdict of most of its time. The operators of a part are those that launched some of
    it, and have no `host_ns`.
    """
    roofs = _roofs(summary)
    if summary.part is not None:
        totals = roofs.with_columns(pl.col("launching").alias("calls"), pl.lit(None, pl.Int64).alias("host_ns"))
    else:
        recorded = summary.attribution.table.operators
        called = by_thread(recorded).self_sums(recorded["duration_ns"], recorded.select("name", "shapes"))
        called = called.rename({"self_ns": "host_ns"})
        totals = called.join(roofs, on=["name", "shapes"], how="left", nulls_equal=True)
    columns = ["name", "shapes", "calls", "host_ns", "kernels", "busy_ns", "flops", "bytes", "bound_ns", "bound"]
    return (
        totals.with_columns(pl.col("kernels", "busy_ns").fill_null(0), pl.col("name", "shapes").cast(pl.String))
        .select(columns)
        .sort("busy_ns", "host_ns", "name", "shapes", descending=[True, True, False, False], nulls_last=True)
    )


def _roofs(summary: TraceSummary) -> pl.DataFrame:
    """What the calls that launched something did, by operator and shapes."""
    known = ("flops", "bytes", "bound_ns")
    rows: list[tuple[object, ...]] = []
    for roof in summary.roofline.operators if summary.roofline else ():
        counts = [None if count is None else float(count) for count in (roof.flops, roof.bytes_moved, roof.bound_ns)]
        rows.append((roof.operator, roof.shapes, roof.calls, roof.kernels, roof.device_ns, *counts, roof.verdict))
    return (
        pl.DataFrame(rows, schema=_ROOFS, orient="row")
        .sort("busy_ns", descending=True)
        .group_by("name", "shapes", maintain_order=True)
        .agg(
            pl.col("launching", "kernels", "busy_ns").sum(),
            *(pl.when(pl.col(name).count() > 0).then(pl.col(name).sum()).alias(name) for name in known),
            pl.col("bound").drop_nulls().first(),
        )
    )


# The queue of each device: work that is launched and has not started. An empty queue leaves the device to the host.
#
# The kernels of a graph's replay are all launched by one call, so all wait from there. Work without a recorded launch
# does not count.


PIECES = 100
"""Equal parts of the span in which the mean length is told."""


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """The queue of one device, from the first launch to the start of the last work.

    `mean`: over time. `empty_share`: the share of the span in which nothing waited. `wait_ns`: median time from launch
    to start. `over_time`: the mean length in each of PIECES equal parts of the span.
    """

    device: int
    span_ns: int
    mean: float
    longest: int
    empty_share: float
    wait_ns: int
    over_time: tuple[float, ...]


def queues(attribution: Attribution) -> tuple[Queue, ...]:
    """The queue of each device; none for a CPU, and where no launch is recorded."""
    if attribution.table.on_cpu:
        return ()
    work = attribution.work.select("device", "launch_ns", "start_ns")
    if work["launch_ns"].null_count():
        work = work.drop_nulls("launch_ns")
    devices = work["device"].unique().sort().to_list()
    return tuple(
        _queue(device, work.filter(pl.col("device") == device) if len(devices) > 1 else work) for device in devices
    )


def _queue(device: int, work: pl.DataFrame) -> Queue:
    """The queue from the sorted moments of launches and of starts.

    Its length at a moment is how many launches are no later, less how many starts are. It is empty from a start to the
    next launch where the one after so many starts is still to come.
    """
    starts = work.select(pl.max_horizontal("start_ns", "launch_ns")).to_series()  # two clocks may differ a little
    waits = starts - work["launch_ns"]
    waited, median = int(waits.sum()), waits.median()
    del waits  # of a million rows each column counts
    launched, started = in_order(work["launch_ns"]), in_order(starts)
    del starts
    span_ns = started[-1] - launched[0]
    longest = 0
    for first in range(0, len(launched), 1 << 18):
        some = launched[first : first + (1 << 18)]
        number = pl.int_range(first + 1, first + 1 + len(some), dtype=pl.Int64, eager=True)
        longest = max(longest, cast("int", (number - place_in(started, some)).max()))
    return Queue(
        device=device,
        span_ns=span_ns,
        mean=waited / span_ns if span_ns else 0.0,
        longest=longest,
        empty_share=int((launched[1:] - started[:-1]).clip(lower_bound=0).sum()) / span_ns if span_ns else 0.0,
        wait_ns=round(median) if isinstance(median, int | float) else 0,
        over_time=_means(launched, started, span_ns) if span_ns >= PIECES else (),
    )


def _means(launched: pl.Series, started: pl.Series, span_ns: int) -> tuple[float, ...]:
    """The mean length in each part of the span: the time that what is launched by its end has waited there."""
    first = launched[0]
    bounds = [first + span_ns * piece // PIECES for piece in range(PIECES + 1)]
    ends = pl.Series(bounds, dtype=pl.Int64)
    area_ns, means = [0] * (PIECES + 1), []
    for moments, sign in ((launched, 1), (started, -1)):
        at, before, elapsed_ns = [0, *moments.search_sorted(ends, side="right").to_list()], 0, 0
        for piece, bound in enumerate(bounds):
            fresh = moments[at[piece] : at[piece + 1]]
            elapsed_ns += before * (bound - bounds[max(0, piece - 1)]) + int((bound - fresh).sum())
            before += len(fresh)
            area_ns[piece] += sign * elapsed_ns
    for piece in range(PIECES):
        means.append(float(area_ns[piece + 1] - area_ns[piece]) / float(bounds[piece + 1] - bounds[piece]))
    return tuple(means)


# Replays of CUDA graphs: how many kernels each has, and which operator and module each kernel was when captured.
#
# Kernels of a replay carry the correlation of the call that launched the graph. While a graph is captured, each launch
# is called once and nothing runs; so the nth launch of a capture is the nth kernel of a replay, by its node or, where
# nodes are not recorded, by its start. Both are joined only where their numbers agree.


_GRAPH_LAUNCH = r"^(cuda|cu|hip)GraphLaunch"
_BEGINS, _ENDS = r"^(cuda|cu|hip)StreamBeginCapture", r"^(cuda|cu|hip)StreamEndCapture"


def graph_replays(attribution: Attribution) -> pl.DataFrame:
    """A row for each graph, told by the work of its replay: `graph` from 0 as they come, `replays`, `kernels` and
    `copies` of one replay, `busy_ns` and `span_ns` (from its first start to its last end; medians), `host_ns` of the
    call, and `launch_rows`, the rows of the calls.

    Replays with the same names of work in the same order are of one graph.
    """
    work = _replayed(attribution)
    calls = attribution.table.calls
    end_ns = pl.col("start_ns") + pl.col("duration_ns")
    computes = pl.col("kind").cast(pl.String) == "kernel"
    replays = (
        work.group_by("launch_row", maintain_order=True)
        .agg(
            computes.sum().cast(pl.Int64).alias("kernels"),
            (~computes).sum().cast(pl.Int64).alias("copies"),
            pl.col("duration_ns").sum().alias("busy_ns"),
            (end_ns.max() - pl.col("start_ns").min()).alias("span_ns"),
            pl.col("name").cast(pl.String).str.join("\n").hash().alias("work"),
        )
        .with_columns(
            calls["duration_ns"].gather(pl.Series(work["launch_row"].unique(maintain_order=True))).alias("host_ns")
        )
    )
    return (
        replays.group_by("work", "kernels", "copies", maintain_order=True)
        .agg(
            pl.len().cast(pl.Int64).alias("replays"),
            pl.col("busy_ns", "span_ns", "host_ns").median(),
            pl.col("launch_row").alias("launch_rows"),
        )
        .with_row_index("graph")
        .select("graph", "replays", "kernels", "copies", "busy_ns", "span_ns", "host_ns", "launch_rows")
    )


def _replayed(attribution: Attribution) -> pl.DataFrame:
    """The work of replays, in the order of calls and, within one, of nodes or starts."""
    calls, work = attribution.table.calls, attribution.work
    launching = fits(calls["name"], _GRAPH_LAUNCH)
    if not launching.any():
        work, launching = work.clear(), launching.clear()
    chosen = work.filter(
        gather(launching, work["launch_row"]).fill_null(False) & (pl.col("kind").cast(pl.String) != "graph")
    )
    return chosen.with_columns(calls["start_ns"].gather(chosen["launch_row"]).alias("_called_ns")).sort(
        "_called_ns", "launch_row", "graph_node", "start_ns", nulls_last=True
    )


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    """One capture of a graph: the `operator` and `module` (null outside) of each launch, in their order."""

    launches: pl.DataFrame

    @property
    def kernels(self) -> int:
        """The launches of the capture, copies included."""
        return self.launches.height


def captured_graphs(table: TraceTable) -> tuple[Captured, ...]:
    """The captures of graphs that a trace holds, in their order."""
    calls = table.calls
    begins, ends = named(calls, _BEGINS), named(calls, _ENDS).sort("start_ns")
    launched = calls.filter(launches(calls["name"]))
    graphs = []
    for process, begun_ns in begins.sort("start_ns").select("process", "start_ns").iter_rows():
        until = ends.filter((pl.col("process") == process) & (pl.col("start_ns") > begun_ns)).head(1)["start_ns"]
        if len(until):
            inside = (pl.col("process") == process) & pl.col("start_ns").is_between(begun_ns, until.item())
            graphs.append(Captured(launches=_placed(launched.filter(inside).sort("start_ns"), table)))
    return tuple(graphs)


def _placed(calls: pl.DataFrame, table: TraceTable) -> pl.DataFrame:
    """The innermost operator and module open at each call on its thread."""
    names = table.ranges["name"].unique().to_list()
    modules = pl.Series([name for name in names if range_kind(name) == "module"], dtype=pl.Categorical())
    ranges = table.ranges.filter(pl.col("nested") & pl.col("name").is_in(modules.implode()))
    places = calls.select("process", "thread")
    return pl.DataFrame(
        gather(frame["name"], open_rows(frame, places, calls["start_ns"])).cast(pl.String).alias(name)
        for name, frame in (("operator", table.operators), ("module", ranges))
    )


_NODES = pl.Schema(
    {
        "graph": pl.Int64,
        "node": pl.Int64,
        "name": pl.String,
        "operator": pl.String,
        "module": pl.String,
        "calls": pl.Int64,
        "busy_ns": pl.Int64,
    }
)


def nodes_of_graphs(attribution: Attribution, captures: tuple[Captured, ...]) -> pl.DataFrame:
    """A row for each kernel or copy of each graph whose capture is known: graph, node, name, operator, module, calls
    and busy_ns over all replays. Graphs take the captures with as many launches, in order."""
    work, left = _replayed(attribution), list(captures)
    parts = []
    for row in graph_replays(attribution).iter_rows(named=True):
        match = next((one for one in left if one.kernels == row["kernels"] + row["copies"]), None)
        if match is None:
            continue
        if len(left) > 1:
            left.remove(match)
        of_graph = work.filter(pl.col("launch_row").is_in(row["launch_rows"]))
        node = pl.int_range(pl.len(), dtype=pl.Int64).over("launch_row")
        totals = (
            of_graph.with_columns(node.alias("node"))
            .group_by("node")
            .agg(
                pl.col("name").first().cast(pl.String),
                pl.len().cast(pl.Int64).alias("calls"),
                pl.col("duration_ns").sum().alias("busy_ns"),
            )
        )
        places = match.launches.with_row_index("node").cast({"node": pl.Int64})
        joined = totals.join(places, on="node", how="left").sort("node")
        parts.append(
            joined.select(
                pl.lit(row["graph"], pl.Int64).alias("graph"), "node", "name", "operator", "module", "calls", "busy_ns"
            )
        )
    return pl.concat([pl.DataFrame(schema=_NODES), *parts])


# The tables of details as parts of an answer and as plain data, each made when it is asked for.


SHOWN = 5
"""Rows of a table that nobody asked for."""
MOST_NODES = 2_000
"""Nodes of a tree that is shown whole."""
_PARTS = (0, 20, 40, 60, 80)
"""Hundredths of the span at which the table tells the queue's length."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of the tables: `only` names one, `top` is how many rows, `sort` the column that orders them.

    `captures`: graphs as another trace captured them. `alone`: nothing beside the tables that `only` names is looked
    at.
    """

    only: str | None = None
    top: int | None = None
    sort: str | None = None
    captures: tuple[Captured, ...] = ()
    alone: bool = False

    def wants(self, head: str) -> bool:
        """Whether the table of that head is made: any, unless one is wanted alone."""
        return not self.alone or (self.only or "").casefold() in head.casefold()


class _Detail(msgspec.Struct, frozen=True):
    """One table: the head of its first column, whether it is shown unasked, and what makes it."""

    head: str
    shown: bool
    make: Callable[[str, TraceSummary, View], Table]


_DETAILS: list[_Detail] = []


def _detail(head: str, *, shown: bool = False) -> Callable[[Any], Any]:
    """Registers what makes the table of that head."""

    def add(make: Any) -> Any:
        _DETAILS.append(_Detail(head, shown, make))
        return make

    return add


def detail_tables(summary: TraceSummary, view: View) -> Iterator[Table]:
    """The tables that are asked for, or else those that are always shown, without empty ones."""
    for detail in _DETAILS:
        wanted = bool(view.only) and view.only.casefold() in detail.head
        if not wanted and not (detail.shown and view.only is None):
            continue
        table = detail.make(detail.head, summary, view)
        if table.rows:
            yield _arranged(table, view, None if wanted else SHOWN)


def detail_heads() -> tuple[str, ...]:
    """The names of all tables that can be asked for."""
    return tuple(detail.head.partition(",")[0] for detail in _DETAILS)


def more_tables() -> str:
    """A sentence that names the tables that are shown when they are asked for."""
    heads = [detail.head.partition(",")[0] for detail in _DETAILS if not detail.shown and detail.head != "graph nodes"]
    return f"More tables with --only: {', '.join(heads)}."


def details_as_json(summary: TraceSummary, view: View) -> dict[str, Any]:
    """The tables as plain data, over the whole capture or part, in nanoseconds and bytes.

    The trees are there where `view.top` says how many nodes: among a million ranges they cost what reading costs.
    """
    attribution = summary.attribution
    queue_keys = ("device", "span_ns", "mean", "longest", "empty_share", "wait_ns", "over_time")
    trees = {"operator_tree": operator_tree, "range_tree": range_tree} if view.top is not None else {}
    return {
        "operators": operator_totals(summary).to_dicts(),
        "kernel_times": kernel_times(attribution).to_dicts(),
        "host_calls": host_calls(attribution, _on_host(summary, attribution.table.calls)).to_dicts(),
        "data_loading": data_loading(summary).to_dicts(),
        "copies_by_direction": copy_totals(attribution).to_dicts(),
        "queues": [{name: getattr(queue, name) for name in queue_keys} for queue in _queues(summary)],
        "graph_replays": graph_replays(attribution).drop("launch_rows").to_dicts(),
        **({"graph_nodes": nodes_of_graphs(attribution, view.captures).to_dicts()} if view.captures else {}),
        **{name: _whole(summary, tree(attribution, view.top)).to_dicts() for name, tree in trees.items()},
    }


def _arranged(table: Table, view: View, rows: int | None) -> Table:
    """The table's first rows in the order that is asked for; without one, in its own."""
    top = view.top or rows or len(table.rows)
    ordered = list(table.rows)
    if view.sort is not None and "tree" not in table.columns[0]:
        column = next((i for i, name in enumerate(table.columns) if view.sort.casefold() in name.casefold()), None)
        if column is None and view.only is not None:
            raise InputError(f"--sort {view.sort!r}: no such column: there is {', '.join(table.columns)}")
        if column is not None:
            known = [row for row in ordered if row[column] is not None]
            numbers = all(isinstance(row[column], int | float) for row in known)
            known.sort(key=lambda row: row[column] if numbers else str(row[column]), reverse=numbers)  # type: ignore[arg-type, return-value]
            ordered = [*known, *(row for row in ordered if row[column] is None)]
    left = len(ordered) - top
    more = [Line(f"{left} more: --only {table.columns[0].partition(',')[0]!r}.", "aside")] if left > 0 else []
    return msgspec.structs.replace(table, rows=tuple(ordered[:top]), notes=(*more, *table.notes))


def _on_host(summary: TraceSummary, frame: pl.DataFrame) -> pl.DataFrame:
    """What the host did in the part: what began in its steps, phases or window; else the launches of its work."""
    part = summary.part
    if part is None:
        return frame
    what = part.phase or (STEP if part.step is not None else None)
    opened = summary.attribution.instances.filter(pl.col("what") == (what or ""))
    if summary.ranged or part.places or not opened.height:
        if "correlation" not in frame.columns:
            return frame.clear()
        return frame[summary.attribution.work["launch_row"].drop_nulls().unique().sort()]
    # Steps or phases that overlap are one stretch, whatever thread they are on.
    stretches = lasting(union(lasting(opened), [])).with_columns(pl.lit(0).alias("track"))
    anywhere = pl.Series("track", [0]).new_from_index(0, frame.height)
    return frame.filter(Nest(stretches, "track").innermost(anywhere, frame["start_ns"]).is_not_null())


def data_loading(summary: TraceSummary) -> pl.DataFrame:
    """A row for each of the ranges and operators of PyTorch's DataLoader: name, calls, total_ns, median_ns, max_ns."""
    table = summary.attribution.table
    frames = [named(_on_host(summary, frame), _LOADS) for frame in (table.ranges, table.operators)]
    names = pl.col("name").cast(pl.String)
    return _by_name(pl.concat(frame.select(names, "duration_ns") for frame in frames)).sort(
        "total_ns", "name", descending=[True, False]
    )


def _queues(summary: TraceSummary) -> tuple[Queue, ...]:
    return queues(summary.attribution) if summary.has_whole_steps else ()


def _whole(summary: TraceSummary, tree: pl.DataFrame) -> pl.DataFrame:
    """The tree; of a part only what its work says, since the host's time is not told apart."""
    if summary.part is None:
        return tree
    unknown = [pl.lit(None, pl.Int64).alias(name) for name in ("calls", "host_ns", "self_host_ns")]
    return tree.filter(pl.col("kernels") > 0).with_columns(unknown)


def _rows(frame: pl.DataFrame, labels: Iterable[str], *columns: pl.Expr | pl.Series | str) -> list[tuple[Cell, ...]]:
    """A row of cells for each of the frame's: its label, then these columns."""
    return frame.select(pl.Series("label", list(labels), dtype=pl.String), *columns).rows()


def each_step(frame: pl.DataFrame, steps: int, *names: str) -> list[pl.Series]:
    """These columns over the steps; polars would multiply by a rounded inverse, and lose the last digit."""
    return [
        pl.Series(name, [None if total is None else total / steps for total in frame[name]], dtype=pl.Float64)
        for name in names
    ]


@_detail("host calls, a step", shown=True)
def _host_calls(head: str, summary: TraceSummary, _: View) -> Table:
    frame = host_calls(summary.attribution, _on_host(summary, summary.attribution.table.calls))
    waited_ns, steps = int(frame["waited_ns"].sum()), summary.steps
    words = (
        [f"The host waited for the device for {ms_text(waited_ns / steps)} ms a step in calls."] if waited_ns else []
    )
    words += [
        f"Device {queue.device}'s queue holds {queue.mean:.1f} on average and {queue.longest} at most; it is empty "
        f"{format_share(queue.empty_share)} of the time."
        for queue in _queues(summary)
    ]
    waited = each_step(
        frame.with_columns(pl.when(pl.col("waits") > 0).then(pl.col("waits", "waited_ns"))), steps, "waits", "waited_ns"
    )
    labels = (name_shown(name or "?") for name in frame["name"])
    return table_of(
        head, ("calls", "g"), ("ms", "ms of ns"), ("median us", "us of ns"), ("longest us", "us of ns"),
        ("waits", "g"), ("waited ms", "ms of ns"),
        rows=_rows(frame, labels, *each_step(frame, steps, "calls", "total_ns"), "median_ns", "max_ns", *waited),
        notes=as_lines(*words),
    )  # fmt: skip


@_detail("copies, a step", shown=True)
def _copies(head: str, summary: TraceSummary, _: View) -> Table:
    frame = copy_totals(summary.attribution)
    memory = pl.Series("memory", [name_shown(memory or "") for memory in frame["memory"]], dtype=pl.String)
    a_step = each_step(frame, summary.steps, "calls", "busy_ns", "bytes")
    return table_of(
        head, "memory", "size", ("calls", "g"), ("ms", "ms of ns"), ("bytes", "B"), ("bandwidth", "B/s"),
        rows=_rows(frame, frame["direction"], memory, "size", *a_step, "bytes_per_s"),
    )  # fmt: skip


@_detail("data loading, a step", shown=True)
def _data_loading(head: str, summary: TraceSummary, _: View) -> Table:
    frame = data_loading(summary)
    a_step = each_step(frame, summary.steps, "calls", "total_ns")
    return table_of(
        head, ("calls", "g"), ("ms", "ms of ns"), ("median us", "us of ns"), ("longest us", "us of ns"),
        rows=_rows(frame, map(name_shown, frame["name"]), *a_step, "median_ns", "max_ns"),
    )  # fmt: skip


@_detail("graph replays", shown=True)
def _graphs(head: str, summary: TraceSummary, _: View) -> Table:
    frame = graph_replays(summary.attribution)
    copies = pl.when(pl.col("copies") > 0).then("copies")
    labels = (f"graph {graph}" for graph in frame["graph"])
    return table_of(
        head, ("replays", "d"), ("kernels each", "d"), ("copies each", "d"), ("busy us each", "us of ns"),
        ("span us each", "us of ns"), ("call us", "us of ns"),
        rows=_rows(frame, labels, "replays", "kernels", copies, "busy_ns", "span_ns", "host_ns"),
    )  # fmt: skip


@_detail("graph nodes")
def _graph_nodes(head: str, summary: TraceSummary, view: View) -> Table:
    frame = nodes_of_graphs(summary.attribution, view.captures)
    return table_of(
        head, "operator", "module", ("calls", "d"), ("us each", "us of ns"),
        rows=[
            (
                f"graph {row['graph']}, {row['node']}: {name_shown(kernel_label(row['name']))}",
                name_shown(row["operator"] or ""), name_shown(row["module"] or ""), row["calls"],
                row["busy_ns"] / row["calls"],
            )
            for row in frame.iter_rows(named=True)
        ],
    )  # fmt: skip


@_detail("operators, a step")
def _operators(head: str, summary: TraceSummary, _: View) -> Table:
    frame = operator_totals(summary)
    sums = ("calls", "kernels", "busy_ns", "host_ns", "flops", "bytes", "bound_ns")
    labels = (
        " ".join(filter(None, (name_shown(name or "?"), name_shown(shapes_label(shapes)))))
        for name, shapes in frame.select("name", "shapes").iter_rows()
    )
    return table_of(
        head, ("calls", "g"), ("kernels", "g"), ("ms", "ms of ns"), ("host ms", "ms of ns"),
        ("FLOPs", "FLOP"), ("bytes", "B"), ("bound ms", "ms of ns"), ("bound", TEXT),
        rows=_rows(frame, labels, *each_step(frame, summary.steps, *sums), "bound"),
    )  # fmt: skip


KERNEL_TIMES = "kernel durations, us"


@_detail(KERNEL_TIMES)
def _kernel_times(head: str, summary: TraceSummary, _: View) -> Table:
    """The table of durations, without columns that the capture does not record."""
    frame = kernel_times(summary.attribution)
    units = {"grid": TEXT, "block": TEXT, "registers": "d", "occupancy": ".0f"}
    shown = [name for name in units if frame[name].count()]
    labels = kernel_labels(frame["name"].to_list())
    for name in ("grid", "block"):
        sizes = [text and name_shown("x".join("".join(text.split()).strip("[]").split(","))) for text in frame[name]]
        frame = frame.with_columns(pl.Series(name, sizes, dtype=pl.String))
    several = pl.when(pl.col("grids") > 1).then(pl.col("grid") + " ..").otherwise("grid")
    times = ("calls", "min_ns", "median_ns", "max_ns", "deviation_ns", "busy_ns")
    return table_of(
        head, ("calls", "d"), ("least", "us of ns"), ("median", "us of ns"), ("most", "us of ns"),
        ("deviation", "us of ns"), ("total ms", "ms of ns"),
        *(("occupancy %" if name == "occupancy" else name, units[name]) for name in shown),
        rows=_rows(frame.with_columns(several.alias("grid")), (labels[name] for name in frame["name"]), *times, *shown),
    )  # fmt: skip


@_detail("queue")
def _queue_table(head: str, summary: TraceSummary, _: View) -> Table:
    return table_of(
        head, ("mean", ".1f"), ("most", "d"), ("empty", "%"), ("median wait us", "us of ns"),
        *((f"at {part} %", ".1f") for part in _PARTS),
        rows=[
            (
                f"device {queue.device}", queue.mean, queue.longest, queue.empty_share, queue.wait_ns,
                *(queue.over_time[part] if queue.over_time else None for part in _PARTS),
            )
            for queue in _queues(summary)
        ],
        notes=as_lines("Work that was launched and had not started; at moments of the span from the first launch on."),
    )  # fmt: skip


@_detail("range tree, a step")
@_detail("operator tree, a step")
def _tree_table(head: str, summary: TraceSummary, view: View) -> Table:
    tree = operator_tree if head.startswith("operator") else range_tree
    nodes = _whole(summary, tree(summary.attribution, view.top or MOST_NODES))
    sums = ("calls", "kernels", "device_ns", "self_device_ns", "host_ns", "self_host_ns")
    labels = (f"{'. ' * depth}{name_shown(name)}" for depth, name in nodes.select("depth", "name").iter_rows())
    return table_of(
        head, ("calls", "g"), ("kernels", "g"), ("device ms", "ms of ns"), ("of it own", "ms of ns"),
        ("host ms", "ms of ns"), ("of it own", "ms of ns"),
        rows=_rows(nodes, labels, *each_step(nodes, summary.steps, *sums)),
    )  # fmt: skip
