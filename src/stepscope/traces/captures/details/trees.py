"""Trees of operators and of ranges: each path of names with its calls, its time on the host and on the device.

An interval is inside the innermost one that holds it on its thread. Intervals of one path of names are one node. Time
on the device is that of the work launched inside: by the thread of the launch or, where that thread has no interval
open, by the innermost of its process (autograd launches backward from a thread that has no ranges).
"""

import polars as pl

from stepscope.traces.captures.attribution import Attribution
from stepscope.traces.captures.places import gather
from stepscope.traces.nesting import Nest, numbered

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
    return _tree(attribution, ranges, _innermost(attribution.work, ranges), top)


def _innermost(work: pl.DataFrame, intervals: pl.DataFrame) -> pl.Series:
    """The row of the interval open at each launch, on its thread or else in its process; null without one."""
    keys = ["process", "thread"]
    threads = work.select("process", pl.col("launch_thread").alias("thread"))
    track = numbered(pl.concat([intervals.select(keys), threads]), keys)
    own = Nest(intervals.with_columns(track.head(intervals.height).alias("track")), "track")
    anywhere = Nest(intervals, "process")
    found = {
        "own": own.innermost(track.tail(work.height), work["launch_ns"]),
        "anywhere": anywhere.innermost(work["process"], work["launch_ns"]),
    }
    return pl.DataFrame(found).select(pl.coalesce("own", "anywhere").alias("row")).to_series()


def _tree(attribution: Attribution, intervals: pl.DataFrame, rows: pl.Series, top: int | None) -> pl.DataFrame:
    if not intervals.height:
        return pl.DataFrame(schema=TREE_SCHEMA)
    nest = Nest(intervals.with_columns(numbered(intervals, ["process", "thread"]).alias("track")), "track")
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
    return _ordered(_with_inner(nodes, on_device), top)


def _nodes(names: pl.Series, parent: pl.Series) -> tuple[pl.Series, pl.DataFrame]:
    """The node of each position, and the nodes (node, parent, depth, name), parents before children."""
    frame = pl.DataFrame({"name": names, "parent": parent}).with_row_index("position")
    found: list[pl.DataFrame] = []
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
        found.append(fresh.with_columns(pl.lit(depth, pl.Int64).alias("depth")))
        here = level.join(fresh, on=["above", "name"], how="left").select("position", "node")
        placed.append(here)
        below = here.rename({"position": "parent", "node": "above"}).cast({"parent": pl.Int64})
        level = frame.join(below, on="parent", how="inner").select("position", "name", "above")
    nodes = pl.concat(found).rename({"above": "parent"})
    node = frame.select("position").join(pl.concat(placed), on="position", how="left", maintain_order="left")["node"]
    return node, nodes


def _with_inner(nodes: pl.DataFrame, on_device: bool) -> pl.DataFrame:
    """The nodes with what is launched inside their children too, and `weight`: the most time of any node below."""
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
    return nodes.with_columns(pl.col("device_ns").alias("weight")) if on_device else nodes


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
