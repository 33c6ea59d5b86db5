"""Replays of CUDA graphs: how many kernels each has, and which operator and module each kernel was when captured.

Kernels of a replay carry the correlation of the call that launched the graph. While a graph is captured, each launch
is called once and nothing runs; so the nth launch of a capture is the nth kernel of a replay, by its node or, where
nodes are not recorded, by its start. Both are joined only where their numbers agree.
"""

from dataclasses import dataclass

import polars as pl

from stepscope.traces.captures.attribution import Attribution
from stepscope.traces.captures.host_waits import matching
from stepscope.traces.captures.places import gather
from stepscope.traces.captures.range_names import range_kind
from stepscope.traces.launches import is_launch
from stepscope.traces.nesting import Nest, numbered
from stepscope.traces.table import TraceTable

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
    launching = calls["name"].is_in(matching(calls["name"], _GRAPH_LAUNCH).implode())
    chosen = work.filter(
        gather(launching, work["launch_row"]).fill_null(False) & (pl.col("kind").cast(pl.String) != "graph")
    )
    return chosen.with_columns(calls["start_ns"].gather(chosen["launch_row"]).alias("_called_ns")).sort(
        "_called_ns", "launch_row", "graph_node", "start_ns", nulls_last=True
    )


@dataclass(frozen=True, kw_only=True)
class Captured:
    """One capture of a graph: the `operator` and `module` (null outside) of each launch, in their order."""

    launches: pl.DataFrame

    @property
    def kernels(self) -> int:
        """The launches of the capture, copies included."""
        return self.launches.height


def captured_graphs(table: TraceTable) -> tuple[Captured, ...]:
    """The captures of graphs that a trace holds, in their order."""
    calls = table.calls
    begins = calls.filter(pl.col("name").is_in(matching(calls["name"], _BEGINS).implode()))
    ends = calls.filter(pl.col("name").is_in(matching(calls["name"], _ENDS).implode())).sort("start_ns")
    names = calls["name"].unique().cast(pl.String)
    launching = names.filter(names.to_frame().select(is_launch(pl.col(names.name))).to_series())
    launches = calls.filter(pl.col("name").is_in(launching.cast(calls["name"].dtype).implode()))
    found = []
    for process, begun_ns in begins.sort("start_ns").select("process", "start_ns").iter_rows():
        until = ends.filter((pl.col("process") == process) & (pl.col("start_ns") > begun_ns)).head(1)["start_ns"]
        if len(until):
            inside = (pl.col("process") == process) & pl.col("start_ns").is_between(begun_ns, until.item())
            found.append(Captured(launches=_placed(launches.filter(inside).sort("start_ns"), table)))
    return tuple(found)


def _placed(launches: pl.DataFrame, table: TraceTable) -> pl.DataFrame:
    """The innermost operator and module open at each launch on its thread."""
    names = table.ranges["name"].unique().to_list()
    modules = pl.Series([name for name in names if range_kind(name) == "module"], dtype=pl.Categorical())
    ranges = table.ranges.filter(pl.col("nested") & pl.col("name").is_in(modules.implode()))
    found = []
    for name, frame in (("operator", table.operators), ("module", ranges)):
        keys = ["process", "thread"]
        track = numbered(pl.concat([frame.select(keys), launches.select(keys)]), keys)
        nest = Nest(frame.with_columns(track.head(frame.height).alias("track")), "track")
        rows = nest.innermost(track.tail(launches.height), launches["start_ns"])
        found.append(gather(frame["name"], rows).cast(pl.String).alias(name))
    return pl.DataFrame(found)


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
        own = work.filter(pl.col("launch_row").is_in(row["launch_rows"]))
        node = pl.int_range(pl.len(), dtype=pl.Int64).over("launch_row")
        totals = (
            own.with_columns(node.alias("node"))
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
    nothing = {
        "graph": pl.Int64, "node": pl.Int64, "name": pl.String, "operator": pl.String, "module": pl.String,
        "calls": pl.Int64, "busy_ns": pl.Int64,
    }  # fmt: skip
    return pl.concat([pl.DataFrame(schema=nothing), *parts])
