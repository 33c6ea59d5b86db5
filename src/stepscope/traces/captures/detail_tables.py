"""The tables of `details.py` as parts of an answer and as plain data, each made when it is asked for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import polars as pl

from stepscope.core.answer import TEXT, Cell, Line, Table, as_lines, table_of
from stepscope.core.errors import InputError, name_shown
from stepscope.core.range_names import STEP
from stepscope.core.units import format_share, ms_text
from stepscope.traces.captures.attribution import Attribution
from stepscope.traces.captures.details import (
    Captured,
    Queue,
    copy_totals,
    data_loading,
    graph_replays,
    host_calls,
    kernel_times,
    nodes_of_graphs,
    operator_totals,
    operator_tree,
    queues,
    range_tree,
)
from stepscope.traces.captures.summary import TraceSummary
from stepscope.traces.kernels.names import kernel_label, kernel_labels
from stepscope.traces.nesting import Nest, lasting, union
from stepscope.traces.roofline_answer import shapes_label

SHOWN = 5
"""Rows of a table that nobody asked for."""
MOST_NODES = 2_000
"""Nodes of a tree that is shown whole."""


@dataclass(frozen=True, kw_only=True)
class View:
    """What is asked of the tables: `only` names one, `top` is how many rows, `sort` the column that orders them.

    `captures`: graphs as another trace captured them.
    """

    only: str | None = None
    top: int | None = None
    sort: str | None = None
    captures: tuple[Captured, ...] = ()


@dataclass(frozen=True)
class _Detail:
    """One table: the head of its first column, whether it is shown unasked, and what makes it."""

    head: str
    shown: bool
    make: Callable[[TraceSummary, View], Table]


def detail_tables(summary: TraceSummary, view: View) -> Iterator[Table]:
    """The tables that are asked for, or else those that are always shown, without empty ones."""
    for detail in _DETAILS:
        asked = view.only is not None and bool(view.only) and view.only.casefold() in detail.head
        if not asked and not (detail.shown and view.only is None):
            continue
        table = detail.make(summary, view)
        if table.rows:
            yield _arranged(table, view, None if asked else SHOWN)


def more_tables() -> str:
    """A sentence that names the tables that are shown when they are asked for."""
    heads = [
        detail.head.partition(",")[0] for detail in _DETAILS if not detail.shown and detail.make is not _graph_nodes
    ]
    return f"More tables with --only: {', '.join(heads)}."


def detail_heads() -> tuple[str, ...]:
    """The names of all tables that can be asked for."""
    return tuple(detail.head.partition(",")[0] for detail in _DETAILS)


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
        "data_loading": _loading(summary).to_dicts(),
        "copies_by_direction": copy_totals(attribution).to_dicts(),
        "queues": [{name: getattr(queue, name) for name in queue_keys} for queue in _queues(summary)],
        "graph_replays": graph_replays(attribution).drop("launch_rows").to_dicts(),
        **({"graph_nodes": nodes_of_graphs(attribution, view.captures).to_dicts()} if view.captures else {}),
        **{name: _whole(summary, tree(attribution, view.top)).to_dicts() for name, tree in trees.items()},
    }


def _arranged(table: Table, view: View, rows: int | None) -> Table:
    """The table's first rows in the order that is asked for; without one, in its own."""
    top = view.top or rows or len(table.rows)
    found = list(table.rows)
    if view.sort is not None and "tree" not in table.columns[0]:
        column = next((i for i, name in enumerate(table.columns) if view.sort.casefold() in name.casefold()), None)
        if column is None and view.only is not None:
            raise InputError(f"--sort {view.sort!r}: no such column: there is {', '.join(table.columns)}")
        if column is not None:
            known = [row for row in found if row[column] is not None]
            numbers = all(isinstance(row[column], int | float) for row in known)
            known.sort(key=lambda row: row[column] if numbers else str(row[column]), reverse=numbers)  # type: ignore[arg-type, return-value]
            found = [*known, *(row for row in found if row[column] is None)]
    left = len(found) - top
    more = [Line(f"{left} more: --only {table.columns[0].partition(',')[0]!r}.", "aside")] if left > 0 else []
    return msgspec.structs.replace(table, rows=tuple(found[:top]), notes=(*more, *table.notes))


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


def _loading(summary: TraceSummary) -> pl.DataFrame:
    table = summary.attribution.table
    return data_loading(_on_host(summary, table.ranges), _on_host(summary, table.operators))


def _queues(summary: TraceSummary) -> tuple[Queue, ...]:
    return queues(summary.attribution) if summary.has_whole_steps else ()


def _whole(summary: TraceSummary, tree: pl.DataFrame) -> pl.DataFrame:
    """The tree; of a part only what its work says, since the host's time is not told apart."""
    if summary.part is None:
        return tree
    unknown = [pl.lit(None, pl.Int64).alias(name) for name in ("calls", "host_ns", "self_host_ns")]
    return tree.filter(pl.col("kernels") > 0).with_columns(unknown)


def _operators(summary: TraceSummary, _: View) -> Table:
    steps = summary.steps
    return table_of(
        "operators, a step", ("calls", "g"), ("kernels", "g"), ("ms", "ms of ns"), ("host ms", "ms of ns"),
        ("FLOPs", "FLOP"), ("bytes", "B"), ("bound ms", "ms of ns"), ("bound", TEXT),
        rows=[
            (
                " ".join(filter(None, (name_shown(row["name"] or "?"), name_shown(shapes_label(row["shapes"]))))),
                row["calls"] / steps, row["kernels"] / steps, row["busy_ns"] / steps, _each(row["host_ns"], steps),
                _each(row["flops"], steps), _each(row["bytes"], steps), _each(row["bound_ns"], steps), row["bound"],
            )
            for row in operator_totals(summary).iter_rows(named=True)
        ],
    )  # fmt: skip


def _each(total: float | None, steps: int) -> float | None:
    return None if total is None else total / steps


def _kernel_times(summary: TraceSummary, _: View) -> Table:
    """The table of durations, without columns that the capture does not record."""
    frame = kernel_times(summary.attribution)
    told = [name for name in ("grid", "block", "registers", "occupancy") if frame[name].count()]
    labels = kernel_labels(frame["name"].to_list())
    heads = {
        "grid": ("grid", TEXT),
        "block": ("block", TEXT),
        "registers": ("registers", "d"),
        "occupancy": ("occupancy %", ".0f"),
    }
    return table_of(
        "kernel durations, us", ("calls", "d"), ("least", "us of ns"), ("median", "us of ns"), ("most", "us of ns"),
        ("deviation", "us of ns"), ("total ms", "ms of ns"), *(heads[name] for name in told),
        rows=[
            (
                labels[row["name"]], row["calls"], row["min_ns"], row["median_ns"], row["max_ns"],
                row["deviation_ns"], row["busy_ns"],
                *(_grid(row, name) if name in ("grid", "block") else row[name] for name in told),
            )
            for row in frame.iter_rows(named=True)
        ],
    )  # fmt: skip


def _grid(row: dict[str, Any], name: str) -> str | None:
    text = row[name]
    if text is None:
        return None
    sizes = "x".join("".join(text.split()).strip("[]").split(","))
    return f"{name_shown(sizes)} .." if name == "grid" and row["grids"] > 1 else name_shown(sizes)


def _host_calls(summary: TraceSummary, _: View) -> Table:
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
    return table_of(
        "host calls, a step", ("calls", "g"), ("ms", "ms of ns"), ("median us", "us of ns"), ("longest us", "us of ns"),
        ("waits", "g"), ("waited ms", "ms of ns"),
        rows=[
            (
                name_shown(row["name"] or "?"), row["calls"] / steps, row["total_ns"] / steps, row["median_ns"],
                row["max_ns"], row["waits"] / steps or None, row["waited_ns"] / steps if row["waits"] else None,
            )
            for row in frame.iter_rows(named=True)
        ],
        notes=as_lines(*words),
    )  # fmt: skip


def _data_loading(summary: TraceSummary, _: View) -> Table:
    return table_of(
        "data loading, a step", ("calls", "g"), ("ms", "ms of ns"), ("median us", "us of ns"),
        ("longest us", "us of ns"),
        rows=[
            (
                name_shown(row["name"]), row["calls"] / summary.steps, row["total_ns"] / summary.steps,
                row["median_ns"], row["max_ns"],
            )
            for row in _loading(summary).iter_rows(named=True)
        ],
    )  # fmt: skip


def _copies(summary: TraceSummary, _: View) -> Table:
    frame, steps = copy_totals(summary.attribution), summary.steps
    return table_of(
        "copies, a step", "memory", "size", ("calls", "g"), ("ms", "ms of ns"), ("bytes", "B"), ("bandwidth", "B/s"),
        rows=[
            (
                row["direction"], name_shown(row["memory"] or ""), row["size"], row["calls"] / steps,
                row["busy_ns"] / steps, _each(row["bytes"], steps), row["bytes_per_s"],
            )
            for row in frame.iter_rows(named=True)
        ],
    )  # fmt: skip


def _queue_table(summary: TraceSummary, _: View) -> Table:
    return table_of(
        "queue", ("mean", ".1f"), ("most", "d"), ("empty", "%"), ("median wait us", "us of ns"),
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


_PARTS = (0, 20, 40, 60, 80)
"""Hundredths of the span at which the table tells the queue's length."""


def _graphs(summary: TraceSummary, _: View) -> Table:
    return table_of(
        "graph replays", ("replays", "d"), ("kernels each", "d"), ("copies each", "d"), ("busy us each", "us of ns"),
        ("span us each", "us of ns"), ("call us", "us of ns"),
        rows=[
            (
                f"graph {row['graph']}", row["replays"], row["kernels"], row["copies"] or None, row["busy_ns"],
                row["span_ns"], row["host_ns"],
            )
            for row in graph_replays(summary.attribution).iter_rows(named=True)
        ],
    )  # fmt: skip


def _graph_nodes(summary: TraceSummary, view: View) -> Table:
    frame = nodes_of_graphs(summary.attribution, view.captures)
    return table_of(
        "graph nodes", "operator", "module", ("calls", "d"), ("us each", "us of ns"),
        rows=[
            (
                f"graph {row['graph']}, {row['node']}: {name_shown(kernel_label(row['name']))}",
                name_shown(row["operator"] or ""), name_shown(row["module"] or ""), row["calls"],
                row["busy_ns"] / row["calls"],
            )
            for row in frame.iter_rows(named=True)
        ],
    )  # fmt: skip


def _tree_table(
    head: str, tree: Callable[[Attribution, int | None], pl.DataFrame], summary: TraceSummary, view: View
) -> Table:
    steps = summary.steps
    nodes = tree(summary.attribution, view.top or MOST_NODES)
    rows: list[tuple[Cell, ...]] = [
        (
            f"{'. ' * row['depth']}{name_shown(row['name'])}",
            _each(row["calls"], steps),
            row["kernels"] / steps,
            row["device_ns"] / steps,
            row["self_device_ns"] / steps,
            _each(row["host_ns"], steps),
            _each(row["self_host_ns"], steps),
        )
        for row in _whole(summary, nodes).iter_rows(named=True)
    ]
    return table_of(
        head, ("calls", "g"), ("kernels", "g"), ("device ms", "ms of ns"), ("of it own", "ms of ns"),
        ("host ms", "ms of ns"), ("of it own", "ms of ns"), rows=rows,
    )  # fmt: skip


_DETAILS = (
    _Detail("host calls, a step", True, _host_calls),
    _Detail("copies, a step", True, _copies),
    _Detail("data loading, a step", True, _data_loading),
    _Detail("graph replays", True, _graphs),
    _Detail("graph nodes", False, _graph_nodes),
    _Detail("operators, a step", False, _operators),
    _Detail("kernel durations, us", False, _kernel_times),
    _Detail("queue", False, _queue_table),
    _Detail("operator tree, a step", False, partial(_tree_table, "operator tree, a step", operator_tree)),
    _Detail("range tree, a step", False, partial(_tree_table, "range tree, a step", range_tree)),
)
