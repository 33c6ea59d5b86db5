"""The phases of work that no range of the user's marks.

Backward is what autograd's nodes launch, and what its engine's thread launches beside them (DDP's collectives). Forward
is what runs from the first operator that makes a node to the backward that follows. The optimizer is what its fused and
foreach operators launch outside both. PyTorch's own ranges (`Optimizer.step#`) are ranges, and count before all this.
"""

import polars as pl

from stepscope.core.range_names import BACKWARD, FORWARD, OPTIMIZER, PHASES
from stepscope.traces.captures.range_names import is_of_pytorch, phase_of
from stepscope.traces.nesting import Nest, numbered
from stepscope.traces.table import TraceTable

RANGES, NODES, THREAD, ORDER, UPDATES, ZEROED = FOUND_BY = (
    "ranges",
    "autograd's nodes",
    "autograd's thread",
    "order before backward",
    "optimizer's operators",
    "zero_grad's ranges",
)
"""The ways in which the phase of a kernel is found."""

_NODE = r"^autograd::engine::evaluate_function|Backward\d*$|^torch::autograd::AccumulateGrad"
_UPDATE = r"^aten::_(?:fused_(?:adam|adamw|sgd|adagrad)|foreach_(?:addcdiv|addcmul|lerp)|amp_(?:foreach|update))"
_OVER_LISTS, _OF_ANY_USE = r"^aten::_foreach_", r"^aten::_foreach_(?:copy_|mm)"
"""Operators over lists are an update's where something trains, but for those that serve anything: a server copies its
inputs so, and sharded training its shards."""
_ENGINE = "pt_autograd"
"""PyTorch names the threads of its engine `pt_autograd_0`, `pt_autograd_1`, ..."""
_FOLLOWED = (pl.col("sequence") >= 0) & ~(pl.col("forward_thread").fill_null(0) > 0)
_PHASE = pl.Enum(PHASES)
_WAY = pl.Enum(FOUND_BY)
_NO_FORWARDS = pl.DataFrame(schema={"process": pl.Int64, "start_ns": pl.Int64, "end_ns": pl.Int64})


def with_found_phases(
    work: pl.DataFrame, operators: pl.DataFrame, table: TraceTable, threads: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The work with `phase` filled in and its `found_by`, and the forwards that were found (process, start_ns, end_ns).

    `work` has track, process, launch_ns and the `phase` that its ranges give; `operators` have their track. A phase
    that the user's ranges mark anywhere is not sought: what they leave out is outside of it.
    """
    by_range = pl.when(pl.col("phase").is_not_null()).then(pl.lit(RANGES, _WAY)).alias("found_by")
    work = work.with_columns(by_range)
    marked = {phase_of(name) for name in table.ranges["name"].unique().to_list() if not is_of_pytorch(name)}
    wanted = [phase for phase in PHASES if phase not in marked]
    if not wanted or not work["phase"].has_nulls():
        return work, _NO_FORWARDS
    operators = _with_other_threads(operators, table.operators)
    nodes = operators.filter(is_node(operators))
    in_node = _inside(nodes, work)
    makers = _makers(operators, nodes)
    engine = _engine_tracks(threads, table, nodes, makers)
    forward = _forward_spans(makers.filter(~pl.col("track").is_in(engine.implode())), nodes)
    before_backward = Nest(forward, "process").innermost(work["process"], work["launch_ns"]).is_not_null()
    zeroing = table.ranges.filter(_named(table.ranges, r"^Optimizer\.zero_grad#"))
    zeroed = Nest(zeroing, "process").innermost(work["process"], work["launch_ns"]).is_not_null()
    update = _named(operators, _UPDATE)
    if nodes.height:
        update |= _named(operators, _OVER_LISTS) & ~_named(operators, _OF_ANY_USE)
    updates = _inside(operators.filter(update), work)
    ways = (
        (in_node, BACKWARD, NODES),
        (work["track"].is_in(engine.implode()), BACKWARD, THREAD),
        (zeroed, OPTIMIZER, ZEROED),
        (before_backward, FORWARD, ORDER),
        (updates, OPTIMIZER, UPDATES),
    )
    for holds, phase, way in ways:
        if phase in wanted:
            fits = pl.col("phase").is_null() & holds
            work = work.with_columns(
                pl.when(fits).then(pl.lit(way, _WAY)).otherwise("found_by").alias("found_by"),
                pl.when(fits).then(pl.lit(phase, _PHASE)).otherwise("phase").alias("phase"),
            )
    ends = (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns")
    return work, forward.select("process", "start_ns", ends)


def is_node(operators: pl.DataFrame) -> pl.Series:
    """Whether each operator is a node of autograd's."""
    return _named(operators, _NODE)


def tells_phase(operators: pl.DataFrame) -> pl.Series:
    """Whether each operator tells a phase that no range marks: a node of autograd's, or one that it may follow."""
    return is_node(operators) | operators.select(_FOLLOWED).to_series().fill_null(False)


def _with_other_threads(operators: pl.DataFrame, every: pl.DataFrame) -> pl.DataFrame:
    """These operators and those of threads that launch nothing, on tracks of their own.

    In the cut of a phase, the other phases' threads launch nothing, and still tell where a forward begins and ends.
    """
    thread = ["process", "thread"]
    others = every.join(operators.select(thread).unique(), on=thread, how="anti", nulls_equal=True)
    highest = operators["track"].max()
    track = (numbered(others, thread) + (highest if isinstance(highest, int) else 0) + 1).cast(pl.Int64)
    columns = ["track", *thread, "name", "start_ns", "duration_ns", "sequence", "forward_thread"]
    own = operators.with_columns(pl.col("track").cast(pl.Int64)).select(columns)
    return pl.concat([own, others.with_columns(track.alias("track")).select(columns)])


def _named(frame: pl.DataFrame, pattern: str) -> pl.Series:
    """Whether each row's name fits. Each distinct name is looked at once."""
    names = frame["name"].unique()
    chosen = names.filter(names.cast(pl.String).str.contains(pattern))
    return frame["name"].is_in(chosen.implode())


def _inside(operators: pl.DataFrame, work: pl.DataFrame) -> pl.Series:
    """Whether each row of work was launched while one of these operators was open on its thread."""
    return Nest(operators, "track").innermost(work["track"], work["launch_ns"]).is_not_null()


def _makers(operators: pl.DataFrame, nodes: pl.DataFrame) -> pl.DataFrame:
    """The operators that autograd follows, outside its nodes: a forward's, and no recomputation's.

    Operators have a sequence number where gradients are enabled: an evaluation and an update have none.
    """
    makers = operators.filter(_FOLLOWED & ~is_node(operators))
    return makers.filter(Nest(nodes, "track").innermost(makers["track"], makers["start_ns"]).is_null())


def _engine_tracks(threads: pl.DataFrame, table: TraceTable, nodes: pl.DataFrame, makers: pl.DataFrame) -> pl.Series:
    """The tracks of the threads of autograd's engine: those of that name, or with nodes and no forward of their own."""
    by_name = [
        track
        for track, process, thread in threads.select("track", "process", "thread").iter_rows()
        if _ENGINE in table.threads.get((process, thread), "")
    ]
    own = nodes["track"].unique()
    alone = own.filter(~own.is_in(makers["track"].unique().implode()))
    return pl.concat([pl.Series(by_name, dtype=pl.Int64), alone.cast(pl.Int64)]).unique()


def _forward_spans(makers: pl.DataFrame, nodes: pl.DataFrame) -> pl.DataFrame:
    """The forwards that lead to a backward: process, start_ns (the first operator's), duration_ns (to the backward)."""
    begins = nodes.select("process", pl.col("start_ns").alias("backward_ns")).sort("backward_ns")
    return (
        makers.select("process", "start_ns")
        .sort("start_ns")
        .join_asof(
            begins,
            left_on="start_ns",
            right_on="backward_ns",
            by="process",
            strategy="forward",
            check_sortedness=False,
        )
        .drop_nulls("backward_ns")
        .group_by("process", "backward_ns")
        .agg(pl.col("start_ns").min())
        .select("process", "start_ns", (pl.col("backward_ns") - pl.col("start_ns")).alias("duration_ns"))
    )
