"""Ties device work to the host call that launched it, by (process, correlation id)."""

import polars as pl

from stepscope.trace.nesting import Nest, numbered
from stepscope.trace.table import KIND

_LAUNCH = r"^(cuda|cu|hip)\w*(Launch|Memcpy|Memset)"
_NO_LAUNCH = r"HostFunc|GraphAdd|Graph\w*Node|GetLaunch|CallConfiguration"


def is_launch(name: pl.Expr) -> pl.Expr:
    """Whether a call of that name puts work on a device: launches of kernels and graphs, copies and fills."""
    return name.str.contains(_LAUNCH) & ~name.str.contains(_NO_LAUNCH)


def with_launches(work: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Add launch_row, launch_ns and launch_thread (null without a record); the rows and their number are unchanged.

    The key is (process, correlation id): ids are counted per process, so the id alone ties kernels to strangers'
    launches. Where several calls carry one id, the launch among them counts. Where a trace does not say the process of
    device work (Kineto), the process is taken from the calls: the only one, or the one whose launch fits.
    """
    keyed = pl.col("correlation").is_not_null() & (pl.col("correlation") != 0)
    if work["process"].null_count():
        work = _with_process(work, calls.filter(keyed))
    call = _call_of(work, calls, keyed)
    return work.with_columns(
        call.alias("launch_row"),
        calls["start_ns"].gather(call).alias("launch_ns"),
        calls["thread"].gather(call).alias("launch_thread"),
    )


def _call_of(work: pl.DataFrame, calls: pl.DataFrame, keyed: pl.Expr) -> pl.Series:
    """Row of the call behind each row of work, or null: a binary search in the sorted keys, for the memory's sake."""
    processes = {value: number for number, value in enumerate(calls["process"].unique().to_list())}

    def key(frame: pl.DataFrame) -> pl.Series:
        number = frame["process"].replace_strict(processes, default=None, return_dtype=pl.Int64)
        return number * 2**44 + frame.select(pl.when(keyed).then(pl.col("correlation") % 2**44)).to_series()

    records = pl.DataFrame({"key": key(calls)}).with_row_index("call").drop_nulls("key").sort("key")
    if (records["key"] == records["key"].shift(1)).any():
        launching = calls["name"].is_in(_launching_names(calls["name"]).cast(pl.Categorical).implode())
        records = (
            records.with_columns(
                launching.gather(records["call"]).alias("launch"), calls["start_ns"].gather(records["call"])
            )
            .sort("key", "launch", "start_ns")
            .unique("key", keep="last", maintain_order=True)
        )
    wanted = key(work)
    if not records.height:
        return pl.Series("call", [None], dtype=pl.UInt32).new_from_index(0, work.height)
    at = records["key"].search_sorted(wanted.fill_null(-1), side="left").clip(upper_bound=records.height - 1)
    found = records["key"].gather(at) == wanted
    return pl.select(pl.when(found).then(records["call"].gather(at))).to_series()


def _launching_names(names: pl.Series) -> pl.Series:
    """The names of calls that put work on a device. Names are few, so each is looked at once."""
    distinct = names.unique().cast(pl.String)
    return distinct.filter(distinct.to_frame().select(is_launch(pl.col(names.name))).to_series())


def _with_process(work: pl.DataFrame, records: pl.DataFrame) -> pl.DataFrame:
    """Fill the process of device work from the calls that launched it."""
    processes = records["process"].unique()
    if len(processes) <= 1:
        only = processes.item() if len(processes) else 0
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
        processes = fitting["process_call"].to_list()
        chosen[_integer(device)] = next((one for one in processes if one not in chosen.values()), processes[0])
    by_device = pl.col("device").replace_strict(chosen, default=0, return_dtype=pl.Int64)
    return work.with_columns(pl.coalesce("process", by_device).alias("process"))


def _integer(value: object) -> int:
    assert isinstance(value, int)
    return value


def _nested(operators: pl.DataFrame) -> Nest:
    return Nest(operators.with_columns(numbered(operators, ["process", "thread"]).alias("track")), "track")


def operator_order(operators: pl.DataFrame) -> pl.Series:
    """The row of the operator that each row of `operators_as_work` is."""
    return _nested(operators).order


def operators_as_work(operators: pl.DataFrame) -> pl.DataFrame:
    """A trace without device work: every operator by its own time, that of operators it calls excluded."""
    nest = _nested(operators)
    own = nest.self_ns(operators["duration_ns"]) if nest.height else pl.Series([], dtype=pl.Int64)
    return operators[nest.order].select(
        "start_ns",
        own.alias("duration_ns"),
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
