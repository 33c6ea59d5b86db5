"""A part of a capture as a smaller trace, in the format of torch.profiler that other tools open too.

It holds the part's device work, the calls that launched it, what the host did meanwhile (ranges, operators, calls that
launch nothing), and the forward operators of the backward operators in it, so that work keeps its phase and module.
Backward work keeps its module where the thread that ran forward launches some work of the part too. Times are
microseconds from the first event, exact to the nanosecond.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from stepscope.core.errors import InputError
from stepscope.core.run_directory import CAPTURE_FILES, RUN_FILE, write_atomically
from stepscope.traces.captures.attribution import Attribution, gather, is_node, tells_phase
from stepscope.traces.launches import is_launch
from stepscope.traces.nesting import Nest, numbered
from stepscope.traces.read import find_capture
from stepscope.traces.table import TraceTable

_CATEGORIES = {"kernel": "kernel", "memcpy": "gpu_memcpy", "memset": "gpu_memset", "graph": "kernel"}
_JSON = "json"
_LEAD_NS = 1_000
"""How long after 0 the first row begins: work at 0 would be taken for work whose time was not collected."""
"""Marks columns of text that is JSON already."""


def write_cut(attribution: Attribution, out: Path, *, source: Path | None = None) -> int:
    """Write the attribution's work as a trace to `out`, compressed if it is named .gz; the number of rows of work.

    `source` is the capture (or its run directory): it is never overwritten. Raises InputError where `out` cannot be
    written, or the part has CPU operators without those that they call.
    """
    if not out.name.endswith((".json", ".json.gz")):
        raise InputError(f"--cut {out}: name a .json or a .json.gz")
    in_a_run = (out.parent / RUN_FILE).exists() and out.name in CAPTURE_FILES
    if in_a_run or (source is not None and out.exists() and find_capture(source).exists() and _same(out, source)):
        raise InputError(f"cannot write {out}: it is a capture; name another file")
    text = "".join(_document(attribution)).encode()
    try:
        write_atomically(gzip.compress(text, 1, mtime=0) if out.name.endswith(".gz") else text, out)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror or error}") from None
    return attribution.work.height


def _same(out: Path, source: Path) -> bool:
    capture = find_capture(source)
    return any(file.samefile(out) for file in (capture.iterdir() if capture.is_dir() else [capture]))


def _document(attribution: Attribution) -> Iterator[str]:
    table = attribution.table
    devices = [{"id": index, "name": name} for index, name in sorted(table.devices.items())]
    parts = dict(_parts(attribution))
    starts = [frame["start_ns"].min() for frame in parts.values() if frame.height]
    origin = min((start for start in starts if isinstance(start, int)), default=0) - _LEAD_NS
    head = {"schemaVersion": 1, "deviceProperties": devices, "displayTimeUnit": "ms", "baseTimeNanoseconds": origin}
    yield json.dumps(head)[:-1] + ', "traceEvents": [\n'
    separator = ""
    for category, frame in parts.items():
        if frame.height:
            yield separator + _events(frame, category, origin)
            separator = ",\n"
    links = table.links
    if parts["cpu_op"].height and links.height:
        own = links.join(
            parts["cpu_op"].select("process", "thread", "start_ns").unique(),
            on=["process", "thread", "start_ns"],
            how="semi",
        )
        for phase, ends in (("s", own.filter("begins")), ("f", own.filter(~pl.col("begins")))):
            if ends.height:
                yield separator + _arrows(ends, phase, origin)
    yield "\n]}\n"


def _parts(attribution: Attribution) -> Iterator[tuple[str, pl.DataFrame]]:
    """The rows of each category, with process and thread as the tools number them."""
    table, work = attribution.table, attribution.work
    # Nsight Systems' numbers carry the machine's above those of the system: 24 bits each of process and thread.
    shift, mask = (24, 2**24 - 1) if table.profiler == "Nsight Systems" else (0, 2**63 - 1)

    def host(frame: pl.DataFrame) -> pl.DataFrame:
        if shift:
            process = pl.col("process") // 2**shift % (mask + 1)
            frame = frame.with_columns(process.alias("process"), (pl.col("thread") % (mask + 1)).alias("thread"))
        return frame

    if table.on_cpu:
        yield "user_annotation", host(table.ranges)
        yield "cpu_op", host(_closed(table.operators[work["operator_row"].sort()], attribution.busy_ns))
        return
    ids = _ids_of_calls(table)
    untold = pl.col("launch_row").is_not_null() & (pl.col("correlation").fill_null(0) == 0)
    if work.select(untold.any()).item():  # arrows or other ids told the launch, and the part has none of them
        told = pl.when(untold).then(ids.gather(work["launch_row"])).otherwise("correlation")
        work = work.with_columns(told.alias("correlation"))
    within = _within_steps(attribution)
    operators = _operators(attribution, within)
    times = pl.concat([operators.select("start_ns"), work.select(pl.col("launch_ns").alias("start_ns"))]).drop_nulls()
    first, last = times.select(pl.col("start_ns").min(), pl.col("start_ns").max().alias("last")).row(0)
    if first is not None:
        open_then = (pl.col("start_ns") <= last) & (pl.col("start_ns") + pl.col("duration_ns") >= first)
        yield "user_annotation", host(table.ranges.filter(open_then | within))
        yield "cpu_op", host(operators)
        yield "cuda_runtime", host(_calls(attribution, open_then, ids))
    for kind, category in _CATEGORIES.items():
        own = work.filter(pl.col("kind").cast(pl.String) == kind)
        if own.height:
            yield f"{category} {kind}", own.select(
                "start_ns", "duration_ns", "name", pl.col("device").alias("process"), pl.col("stream").alias("thread"),
                "external", "device", "stream", "correlation", "graph_node", "bytes", "registers", "occupancy",
                pl.col("grid", "block").name.prefix(_JSON),
            )  # fmt: skip


def _within_steps(attribution: Attribution) -> pl.Expr:
    """Whether an interval lies between the first and the last moment of the part's steps and phases."""
    spans = [frame.select("start_ns", "end_ns") for frame in (attribution.instances, attribution.forwards)]
    first, last = pl.concat(spans).select(pl.col("start_ns").min(), pl.col("end_ns").max()).row(0)
    if first is None:
        return pl.lit(False)
    return (pl.col("start_ns") >= first) & (pl.col("start_ns") + pl.col("duration_ns") <= last)


def _closed(operators: pl.DataFrame, busy_ns: int) -> pl.DataFrame:
    """The operators of a CPU; raises InputError where their own times are no longer those of the part."""
    nest = Nest(operators.with_columns(numbered(operators, ["process", "thread"]).alias("track")), "track")
    if not nest.height or int(nest.self_ns(operators["duration_ns"]).sum()) != busy_ns:
        raise InputError("--cut: an operator of this part calls one outside it: cut a step, a phase or all")
    return operators


def _operators(attribution: Attribution, within: pl.Expr) -> pl.DataFrame:
    """The operators open at the launches of the work, with all round them, and their forward operators.

    Where no range marks the phases, those that tell them are kept too: all within the steps, and the next backward.
    """
    table, work = attribution.table, attribution.work
    recorded = table.operators
    if not recorded.height:
        return recorded
    rows = work["operator_row"].drop_nulls().unique()
    nest = Nest(recorded.with_columns(numbered(recorded, ["process", "thread"]).alias("track")), "track")
    kept = pl.Series([False]).new_from_index(0, recorded.height).scatter(rows, True)
    if attribution.forwards.height:
        after = recorded.filter(is_node(recorded) & (pl.col("start_ns") >= (work["launch_ns"].max() or 0)))["start_ns"]
        near = within | pl.col("start_ns").is_in(after.sort().head(1).implode())
        kept = kept | (recorded.select(near).to_series() & tells_phase(recorded))
    kept = _with_ancestors(kept, nest)
    sequences = recorded.filter(kept & recorded["sequence"].is_not_null()).select("process", "sequence").unique()
    tied = recorded.with_row_index("row").join(sequences, on=["process", "sequence"], how="semi")["row"]
    return recorded.filter(_with_ancestors(kept.scatter(tied, True), nest))


def _with_ancestors(kept: pl.Series, nest: Nest) -> pl.Series:
    """The kept rows and all intervals round them."""
    frontier = kept.gather(nest.order).arg_true()
    while len(frontier):
        above = gather(nest.parent, frontier).drop_nulls().unique()
        rows = nest.rows(above)
        fresh = ~kept.gather(rows) if len(rows) else pl.Series([], dtype=pl.Boolean)
        kept = kept.scatter(rows.filter(fresh), True) if len(rows) else kept
        frontier = above.filter(fresh)
    return kept


def _ids_of_calls(table: TraceTable) -> pl.Series:
    """The correlation id of each call, with one of its own where it has none."""
    known = table.calls["correlation"].fill_null(0)
    largest = known.max()
    row = pl.int_range(1, len(known) + 1, dtype=pl.Int64, eager=True)
    return known.zip_with(known != 0, row + (largest if isinstance(largest, int) else 0))


def _calls(attribution: Attribution, open_then: pl.Expr, ids: pl.Series) -> pl.DataFrame:
    """The launches of the work, and the calls meanwhile that launch nothing."""
    calls = attribution.table.calls.with_columns(ids.alias("correlation")).with_row_index("row")
    names = calls["name"].unique().cast(pl.String)
    launching = names.filter(names.to_frame().select(is_launch(pl.col(names.name))).to_series())
    launches = pl.col("name").is_in(launching.cast(calls["name"].dtype).implode())
    own = pl.col("row").is_in(attribution.work["launch_row"].drop_nulls().unique().implode())
    return calls.filter(own | (~launches & open_then)).drop("row")


_ARGUMENTS = {
    "external": "External id", "sequence": "Sequence number", "forward_thread": "Fwd thread id",
    "correlation": "correlation", "device": "device", "stream": "stream", "graph_node": "graph node id",
    "bytes": "bytes", "registers": "registers per thread", "occupancy": "est. achieved occupancy %",
    f"{_JSON}grid": "grid", f"{_JSON}block": "block", "shapes": "Input Dims", "dtypes": "Input type",
    "values": "Concrete Inputs",
}  # fmt: skip


def _events(frame: pl.DataFrame, category: str, origin: int) -> str:
    """One complete event a line."""
    head = json.dumps({"ph": "X", "cat": category.partition(" ")[0]})[:-1]
    given = [
        pl.lit(f'"{label}": ') + pl.col(name).cast(pl.String)
        for name, label in _ARGUMENTS.items()
        if name in frame.columns
    ]
    line = pl.concat_str(
        pl.lit(f'{head}, "name": '), _encoded(frame["name"]), pl.lit(', "pid": '), pl.col("process").cast(pl.String),
        pl.lit(', "tid": '), pl.col("thread").cast(pl.String), pl.lit(', "ts": '), _us(pl.col("start_ns") - origin),
        pl.lit(', "dur": '), _us(pl.col("duration_ns")), pl.lit(', "args": {'),
        pl.concat_str(given, separator=", ", ignore_nulls=True) if given else pl.lit(""), pl.lit("}}"),
    )  # fmt: skip
    return ",\n".join(frame.select(line.alias("line"))["line"].to_list())


def _arrows(ends: pl.DataFrame, phase: str, origin: int) -> str:
    head = json.dumps({"ph": phase, "cat": "fwdbwd", "name": "fwdbwd", "bp": "e"})[:-1]
    line = pl.concat_str(
        pl.lit(f'{head}, "id": '), pl.col("id").cast(pl.String), pl.lit(', "pid": '), pl.col("process").cast(pl.String),
        pl.lit(', "tid": '), pl.col("thread").cast(pl.String), pl.lit(', "ts": '), _us(pl.col("start_ns") - origin),
        pl.lit("}"),
    )  # fmt: skip
    return ",\n".join(ends.select(line.alias("line"))["line"].to_list())


def _us(nanoseconds: pl.Expr) -> pl.Expr:
    return pl.concat_str(
        (nanoseconds // 1_000).cast(pl.String), pl.lit("."), (nanoseconds % 1_000).cast(pl.String).str.zfill(3)
    )


def _encoded(names: pl.Series) -> pl.Series:
    """Each name as JSON text; names are few, so each is encoded once."""
    texts = names.cast(pl.String).fill_null("")
    distinct = texts.unique()
    encoded = pl.Series([json.dumps(name) for name in distinct.to_list()], dtype=pl.String)
    return texts.replace_strict(distinct, encoded, return_dtype=pl.String).alias("encoded")
