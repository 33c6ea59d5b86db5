"""Every operator of a capture with its shapes: calls, kernels, device time, FLOPs, bytes and bound."""

import polars as pl

from stepscope.traces.captures.summary import TraceSummary
from stepscope.traces.nesting import Nest, numbered
from stepscope.traces.roofline.roofs import OperatorRoof

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
        called = _called(summary.attribution.table.operators)
        totals = called.join(roofs, on=["name", "shapes"], how="left", nulls_equal=True)
    columns = ["name", "shapes", "calls", "host_ns", "kernels", "busy_ns", "flops", "bytes", "bound_ns", "bound"]
    return (
        totals.with_columns(pl.col("kernels", "busy_ns").fill_null(0), pl.col("name", "shapes").cast(pl.String))
        .select(columns)
        .sort("busy_ns", "host_ns", "name", "shapes", descending=[True, True, False, False], nulls_last=True)
    )


def _called(operators: pl.DataFrame) -> pl.DataFrame:
    """The calls of each operator and their own time on the host."""
    nest = Nest(operators.with_columns(numbered(operators, ["process", "thread"]).alias("track")), "track")
    if not nest.height:
        return pl.DataFrame(schema={**_ROOFS, "calls": pl.Int64, "host_ns": pl.Int64}).select(
            "name", "shapes", "calls", "host_ns"
        )
    placed = operators.select("name", "shapes")[nest.order]
    return (
        placed.with_columns(nest.self_ns(operators["duration_ns"]).alias("host_ns"))
        .group_by("name", "shapes")
        .agg(pl.len().cast(pl.Int64).alias("calls"), pl.col("host_ns").sum())
    )


def _roofs(summary: TraceSummary) -> pl.DataFrame:
    """What the calls that launched something did, by operator and shapes."""
    rows = [_row(roof) for roof in (summary.roofline.operators if summary.roofline else ())]
    frame = pl.DataFrame(rows, schema=_ROOFS, orient="row")
    known = [pl.when(pl.col(name).count() > 0).then(pl.col(name).sum()).alias(name) for name in _COUNTED]
    return (
        frame.sort("busy_ns", descending=True)
        .group_by("name", "shapes", maintain_order=True)
        .agg(pl.col("launching", "kernels", "busy_ns").sum(), *known, pl.col("bound").drop_nulls().first())
    )


_COUNTED = ("flops", "bytes", "bound_ns")


def _row(roof: OperatorRoof) -> tuple[object, ...]:
    counted = (None if count is None else float(count) for count in (roof.flops, roof.bytes_moved, roof.bound_ns))
    return (roof.operator, roof.shapes, roof.calls, roof.kernels, roof.device_ns, *counted, roof.verdict)
