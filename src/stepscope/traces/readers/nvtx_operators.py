"""Tells operators from ranges in a capture of `torch.autograd.profiler.emit_nvtx`, which writes both as NVTX ranges.

PyTorch writes `aten::mm, seq = 12, op_id = 34, sizes = [[2, 3], [3, 4]], input_op_ids = [(33,0)]`, and leaves out what
it does not know. A user's `record_function("forward")` is written in the same way: `forward, op_id = 35`.
"""

import polars as pl

from stepscope.traces.table import OPERATOR_SCHEMA, empty

_LONGEST = 1 << 16
"""Characters of a name that are looked at: the sizes of a list of a thousand tensors take some 30,000."""
_WRITTEN = (
    r"(?s)^(?P<operator>.+?)(?:, seq = (?P<sequence>\d{1,18}))?(?P<op_id>, op_id = \d+)?"
    r"(?:, sizes = (?P<shapes>\[[\[\]\d, -]*\]))?(?P<inputs>, input_op_ids = \[.*)?$"
)
_OPERATOR = (
    r"^(?:_?[a-z]\w*(?:::\w+)+(?:\.\w+)?|autograd::engine::evaluate_function: .+|\w+Backward\d*"
    r"|record_param_comms|detach_?)$"
)
"""Names of operators of PyTorch, its libraries and its autograd. Of other names, a sequence number, sizes or inputs
say that it is an operator: a range of the user's has none of them."""
_BACKWARD = r"Backward\d*$|^autograd::engine::evaluate_function"


def operators_apart(ranges: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The ranges without those that are operators, and these. A user's range gets the name that the user gave it."""
    written = _parsed(ranges["name"].unique())
    if not written.height:
        return ranges, empty(OPERATOR_SCHEMA)
    joined = ranges.join(written, on="name", how="left", maintain_order="left")
    users = joined.filter(~pl.col("is_operator").fill_null(False))
    operators = joined.filter("is_operator")
    named = pl.coalesce(pl.col("operator").cast(pl.Categorical()), "name").alias("name")
    backward = pl.col("operator").str.contains(_BACKWARD)
    return users.with_columns(named).select(ranges.columns), operators.select(
        "start_ns",
        "duration_ns",
        "process",
        "thread",
        named,
        pl.lit(None, pl.Int64).alias("external"),
        "sequence",
        # emit_nvtx does not say the forward thread; one thread runs forward, which PyTorch numbers 1.
        pl.when(backward & pl.col("sequence").is_not_null()).then(pl.lit(1, pl.Int64)).alias("forward_thread"),
        pl.col("shapes").cast(pl.Categorical()),
        pl.lit(None, pl.Categorical()).alias("dtypes"),
        pl.lit(None, pl.Categorical()).alias("values"),
    )


def _parsed(names: pl.Series) -> pl.DataFrame:
    """The names that emit_nvtx wrote: name, operator, sequence, shapes (JSON text), is_operator."""
    parts = (
        names.to_frame()
        .with_columns(pl.col("name").cast(pl.String).str.slice(0, _LONGEST).str.extract_groups(_WRITTEN).alias("parts"))
        .unnest("parts")
    )
    said = [pl.col(part).is_not_null() for part in ("sequence", "shapes", "inputs")]
    return parts.filter(pl.any_horizontal(*said, pl.col("op_id").is_not_null())).select(
        "name",
        "operator",
        pl.col("sequence").cast(pl.Int64),
        "shapes",
        (pl.any_horizontal(*said) | pl.col("operator").str.contains(_OPERATOR)).alias("is_operator"),
    )
