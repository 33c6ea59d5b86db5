"""A part of a capture: the work launched in one step, in one phase, or inside the ranges of one name."""

import difflib
import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import polars as pl
from msgspec.structs import replace

from stepscope.core.errors import InputError, name_shown
from stepscope.core.range_names import PHASES, STEP
from stepscope.core.units import Window, ms_text
from stepscope.traces.captures.attribution import ROOT, Attribution
from stepscope.traces.captures.summary import OUTSIDE, Part, TraceSummary
from stepscope.traces.nesting import Nest, lasting, union
from stepscope.traces.table import TraceTable

# The totals of each named range: instances, kernels launched inside on any thread of its process, and top kernels.
#
# Kernels are ordered by launch, so a range owns a slice of that order. Binary search finds the slice, and sums over
# slices are differences of running sums. Overlapping instances of one name (nested, or on two threads) count a kernel
# once.


TOP = 10
_AT_ONCE, _SHARES = 1_000_000, 8
"""To bound the memory, more slices than _AT_ONCE are merged in _SHARES parts, each with some of the names."""
_PAIRS_LIMIT = 20_000_000
"""The most pairs of (range, kernel inside) read for the top kernels. Real captures have a few pairs per kernel."""


class KernelTotals(NamedTuple):
    """One kernel's share of a range: its name, family, calls and summed duration."""

    name: str
    family: str
    calls: int
    busy_ns: int


class RangeTotals(msgspec.Struct, frozen=True, kw_only=True):
    """The totals of one range name.

    Graphs recorded as a whole count in `busy_ns`, not in `kernels`. `gemm_fraction` is the share of matrix
    multiplication in `busy_ns`, or 0 if nothing ran. `top_kernels` is None if the file has too many nested ranges to
    list them.
    """

    name: str
    instances: int
    kernels: int
    busy_ns: int
    gemm_fraction: float
    top_kernels: tuple[KernelTotals, ...] | None


def range_totals(attribution: Attribution, top: int = TOP, *, of_a_part: bool = False) -> list[RangeTotals]:
    """Totals of all range names in a capture, the busiest first; in a part, only ranges that launched some of it."""
    ranges = named_ranges(attribution.table)
    if of_a_part:
        ranges = launching(ranges, attribution)
    if not ranges.height:
        return []
    instances = ranges.group_by("name").agg(pl.len().alias("instances"))
    kernels = _ordered(attribution)
    slices = _slices(ranges, kernels)
    busy = kernels["duration_ns"].cum_sum()
    is_kernel = (kernels["kind"] != "graph").cast(pl.Int64).cum_sum()
    is_gemm = (kernels["family"] == "matrix multiplication").cast(pl.Int64)
    gemm = (kernels["duration_ns"] * is_gemm).cum_sum()
    totals = pl.concat(
        piece.select(
            "name",
            _begun_between(is_kernel, piece).alias("kernels"),
            _begun_between(busy, piece).alias("busy_ns"),
            _begun_between(gemm, piece).alias("gemm_ns"),
        )
        .group_by("name")
        .sum()
        for piece in (slices.iter_slices(1 << 18) if slices.height else [slices])
    )
    totals = totals.group_by("name").sum()
    merged = (
        instances.join(totals, on="name", how="left")
        .fill_null(0)
        .with_columns(pl.col("name").cast(pl.String).alias("text"))
        .sort(["busy_ns", "text"], descending=[True, False])
    )
    best = _top_kernels(slices, kernels, top)
    return [
        RangeTotals(
            name=str(row["text"]),
            instances=row["instances"],
            kernels=row["kernels"],
            busy_ns=row["busy_ns"],
            gemm_fraction=row["gemm_ns"] / row["busy_ns"] if row["busy_ns"] else 0.0,
            top_kernels=best.get(str(row["text"]), ()) if best is not None else None,
        )
        for row in merged.iter_rows(named=True)
    ]


def launching(ranges: pl.DataFrame, attribution: Attribution) -> pl.DataFrame:
    """The ranges that launched some kernel of the attribution."""
    launches = {process: rows["launch_ns"] for (process,), rows in _ordered(attribution).group_by("process")}
    parts = [ranges.clear()]
    for (process,), rows in ranges.group_by("process", maintain_order=True):
        times = launches.get(process, pl.Series(dtype=pl.Int64))
        begun = times.search_sorted(rows["start_ns"], side="left")
        ended = times.search_sorted(rows["start_ns"] + rows["duration_ns"], side="left")
        parts.append(rows.filter(ended > begun))
    return pl.concat(parts)


def named_ranges(table: TraceTable) -> pl.DataFrame:
    """The capture's ranges. nsys records operators only as ranges; they count by the operator's name."""
    columns = ["start_ns", "duration_ns", "process", "name"]
    if table.profiler == "Kineto" or not table.operators.height:
        return table.ranges.select(columns)
    operators = table.operators.select(pl.col(columns[:3]), pl.col("name").cast(pl.Categorical))
    return pl.concat([table.ranges.select(columns), operators])


def _ordered(attribution: Attribution) -> pl.DataFrame:
    """The kernels with a known launch, sorted by process and launch."""
    return (
        attribution.kernels.filter(pl.col("launch_ns").is_not_null())
        .select("process", "launch_ns", "duration_ns", "name", "family", "kind")
        .sort("process", "launch_ns", maintain_order=True)
    )


def _slices(ranges: pl.DataFrame, kernels: pl.DataFrame) -> pl.DataFrame:
    """The disjoint slices [low, high) of the ordered kernels for each name, without empty slices."""
    numbered = kernels.select("process", "launch_ns").with_row_index("at")
    launches = {process: frame for (process,), frame in numbered.group_by("process", maintain_order=True)}
    parts = [pl.DataFrame(schema={"name": pl.Categorical(), "low": pl.UInt32, "high": pl.UInt32})]
    for piece in ranges.iter_slices(1 << 18):  # a million ranges are merged piece by piece
        for (process,), mine in piece.group_by("process"):
            if process in launches:
                parts.append(_merged(_held(mine, launches[process])))
    slices = pl.concat(parts)
    if slices.height < _AT_ONCE:
        return _merged(slices)
    names = slices["name"].to_physical() % _SHARES
    return pl.concat([_merged(slices.filter(names == share)) for share in range(_SHARES)])


def _held(ranges: pl.DataFrame, launches: pl.DataFrame) -> pl.DataFrame:
    """The slice of the launches inside each range."""
    first, times = launches["at"].to_list()[0], launches["launch_ns"]
    low = times.search_sorted(ranges["start_ns"], side="left")
    high = times.search_sorted(ranges["start_ns"] + ranges["duration_ns"], side="left")
    held = pl.DataFrame([ranges["name"], (low + first).alias("low"), (high + first).alias("high")])
    return held.filter(pl.col("high") > pl.col("low")).cast({"low": pl.UInt32, "high": pl.UInt32})


def _merged(slices: pl.DataFrame) -> pl.DataFrame:
    """The slices, with overlapping or touching slices of one name merged."""
    # One number holds name and place, so sorts and running maxima over millions of slices need little memory.
    number = slices["name"].to_physical().cast(pl.Int64) * 2**32
    order = (number + slices["low"]).arg_sort()
    number = number.gather(order)
    name, low = slices["name"].gather(order), slices["low"].gather(order)
    reached = (number + slices["high"].gather(order)).cum_max()
    begins = ((number + low) > reached.shift(1)).fill_null(True)
    ends = begins.shift(-1, fill_value=True)
    high = (reached - number).filter(ends).cast(pl.UInt32)
    return pl.DataFrame([name.filter(begins), low.filter(begins), high.alias("high")])


def _begun_between(running: pl.Series, slices: pl.DataFrame) -> pl.Series:
    """The sums over slices, from running sums."""
    if not len(running):
        return pl.Series([0], dtype=pl.Int64).new_from_index(0, slices.height)
    padded = pl.concat([pl.Series(running.name, [0], dtype=running.dtype), running])
    return padded.gather(slices["high"]) - padded.gather(slices["low"])


def _top_kernels(slices: pl.DataFrame, kernels: pl.DataFrame, top: int) -> dict[str, tuple[KernelTotals, ...]] | None:
    pairs = int((slices["high"].cast(pl.Int64) - slices["low"].cast(pl.Int64)).sum())
    if pairs > _PAIRS_LIMIT:
        return None
    codes = kernels.select("name", "family").unique().with_row_index("code")
    of_kernel = kernels.select("name", "family").join(codes, on=["name", "family"], how="left", maintain_order="left")
    # A few ranges (the step, its phases) hold every kernel. Working slice by slice keeps few pairs in memory.
    batches, held = [[]], 0
    for piece in slices.iter_slices(50_000):
        batches[-1].append(piece)
        held += int((piece["high"].cast(pl.Int64) - piece["low"].cast(pl.Int64)).sum())
        if held > 1_000_000:
            batches.append([])
            held = 0
    codes_of, durations = of_kernel["code"], kernels["duration_ns"]
    parts = [_counted(pl.concat(batch), codes_of, durations) for batch in batches if batch]
    if not parts:
        return {}
    totals = (
        pl.concat(parts)
        .group_by("name", "code")
        .agg(pl.col("calls", "busy_ns").sum())
        .join(codes.rename({"name": "kernel"}), on="code")
        .with_columns(pl.col("kernel").cast(pl.String))
        .sort(["busy_ns", "kernel"], descending=[True, False])
        .group_by("name", maintain_order=True)
        .head(top)
    )
    best: dict[str, tuple[KernelTotals, ...]] = {}
    columns = (pl.col("name").cast(pl.String), "kernel", "family", "calls", "busy_ns")
    for name, *row in totals.select(columns).iter_rows():
        best[name] = (*best.get(name, ()), KernelTotals(*row))
    return best


def _counted(slices: pl.DataFrame, codes: pl.Series, durations: pl.Series) -> pl.DataFrame:
    """The calls and time of each kernel in each range name."""
    pairs = slices.select("name", pl.int_ranges("low", "high", dtype=pl.UInt32).alias("at")).explode("at")
    return (
        pairs.select("name", codes.gather(pairs["at"]).alias("code"), durations.gather(pairs["at"]).alias("busy_ns"))
        .group_by("name", "code")
        .agg(pl.len().cast(pl.Int64).alias("calls"), pl.col("busy_ns").sum())
    )


_NAMED, _COMPARED = 6, 10_000
"""The most names that a message lists, and the most names that are compared with a wrong name."""


def part_of(
    summary: TraceSummary,
    source: str,
    *,
    step: int | None = None,
    phase: str | None = None,
    name: str | None = None,
    module: str | None = None,
    device: int | None = None,
    stream: int | None = None,
    between: Window | None = None,
) -> TraceSummary:
    """The summary of the work launched in this step, in this phase and inside the ranges of this name; in this module
    or one inside it; on this device and stream; and that started between these times from the first event.

    Every table covers only that part. Raises InputError, with the existing names, if a name is not in the capture.
    """
    whole = summary.attribution
    # The time when a stream was free before a row also depends on the rows of other parts.
    work, instances, opened = whole.with_free_ns, whole.instances, None
    forwards = whole.forwards
    if step is not None:
        work, instances = _of_step(work, instances, step, source)
    if phase is not None:
        names = work["phase"].cast(pl.String).fill_null(OUTSIDE)
        work = work.filter(names == phase)
        if not work.height:
            there = ", ".join(known for known in (*PHASES, OUTSIDE) if known in names.unique().to_list())
            raise InputError(f"--phase {phase!r}: nothing ran in it in {source}: there is {there or 'no work'}")
    if name is not None:
        work, opened = _inside_ranges(whole, work, name, source)
    if module is not None:
        names = work["module"].unique().cast(pl.String).drop_nulls()
        names = names.filter(names != ROOT)
        pattern = r"\d+".join(re.escape(piece) for piece in module.split("*"))
        inside = names.filter(names.str.contains(rf"^{pattern}(?:\.|$)"))
        if not len(inside):
            raise InputError(f"--module {module!r}: no work in it in {source}: {_near(module, names.sort().to_list())}")
        work = work.filter(pl.col("module").is_in(inside.cast(work["module"].dtype).implode()))
    for column, number in (("device", device), ("stream", stream)):
        if number is not None:
            present, work = work[column].unique().sort().head(_NAMED).to_list(), work.filter(pl.col(column) == number)
            if not work.height:
                there = ", ".join(map(str, present)) or "no work"
                raise InputError(f"--{column} {number}: nothing ran on it in {source}: there is {there}")
    if between is not None:
        work, instances = _between(whole, work, instances, between, source)
        # The forwards that were the last to begin before some of the work was launched.
        launches = work.select("process", pl.col("launch_ns").alias("start_ns")).drop_nulls().sort("start_ns")
        begins = forwards.select("process", "start_ns", pl.col("start_ns").alias("begin_ns")).sort("start_ns")
        last = launches.join_asof(begins, on="start_ns", by="process", strategy="backward", check_sortedness=False)
        last = last.select("process", pl.col("begin_ns").alias("start_ns"))
        forwards = forwards.join(last, on=["process", "start_ns"], how="semi")
    options = {
        "--range": name,
        "--phase": phase,
        "--step": step,
        "--module": module,
        "--device": device,
        "--stream": stream,
        "--between": None if between is None else "T0:T1",
    }
    chosen = [f"{option} {value}" for option, value in options.items() if value is not None]
    if not work.height and len(chosen) > 1:
        raise InputError(f"{' and '.join(chosen)}: nothing was launched in all of these in {source}: leave one out")
    attribution = replace(whole, work=work, instances=instances, forwards=forwards, links_checked=0, links_agree=0)
    if opened is not None:
        opened = launching(opened, attribution).height
    part = Part(
        step=step, phase=phase, range=name, instances=opened, whole=whole, module=module, device=device, stream=stream,
        between=between,
    )  # fmt: skip
    return replace(summary, attribution=attribution, part=part)


def _of_step(work: pl.DataFrame, instances: pl.DataFrame, step: int, source: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The work of a step; the instance of this step, and the instances of phases that begin in it."""
    steps = work["step"].drop_nulls().unique().sort().to_list()
    if step not in steps:
        last = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]} alone" if steps else ""
        there = f"it has {last}" if steps else "no step is marked in it"
        raise InputError(f"--step {step}: no such step in {source}: {there}")
    chosen, begins = instances.filter(pl.col("what") == STEP).sort("start_ns")[step : step + 1], pl.col("start_ns")
    first, last = chosen.select(begins.min(), pl.col("end_ns").max()).row(0)
    return work.filter(pl.col("step") == step), instances.filter((begins >= first) & (begins < last))


def first_event_ns(whole: Attribution) -> int:
    """The moment from which --between counts: when the first recorded event begins."""
    table = whole.table
    frames = (table.work, table.calls, table.ranges, table.operators)
    starts = [frame["start_ns"].min() for frame in frames if frame.height]
    return min((start for start in starts if isinstance(start, int)), default=0)


def _between(
    whole: Attribution, work: pl.DataFrame, instances: pl.DataFrame, between: Window, source: str
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The work that starts in the window, its end excluded, and the instances that overlap it."""
    first = first_event_ns(whole)
    begin, end = first + between.begin_ns, first + between.end_ns
    chosen = work.filter((pl.col("start_ns") >= begin) & (pl.col("start_ns") < end))
    if not chosen.height:
        last = whole.work.select((pl.col("start_ns") + pl.col("duration_ns")).max()).item()
        until = f"the capture ends at {ms_text((last or first) - first)}ms"
        raise InputError(f"--between: nothing started then in {source}: {until}")
    return chosen, instances.filter((pl.col("start_ns") < end) & (pl.col("end_ns") > begin))


def _inside_ranges(whole: Attribution, work: pl.DataFrame, name: str, source: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The work launched inside ranges of this name, on any thread of their process, and the ranges."""
    ranges = named_ranges(whole.table)
    named = ranges.filter(pl.col("name").cast(pl.String) == name)
    if not named.height:
        names = sorted(filter(None, ranges["name"].unique().cast(pl.String).to_list()))
        raise InputError(f"--range {name!r}: no such range in {source}: {_near(name, names)}")
    merged = lasting(union(named, ["process"]))
    inside = Nest(merged, "process").innermost(work["process"], work["launch_ns"]).is_not_null()
    return work.filter(inside), named


def _near(name: str, names: Sequence[str]) -> str:
    """Words on the names that the user may have meant."""
    if not names:
        return "it has none"
    if len(names) <= _NAMED:
        return f"there is {', '.join(map(name_shown, names))}"
    few = names[:_COMPARED]
    holding = [each for each in few if name.casefold() in each.casefold()]
    alike = difflib.get_close_matches(name, few, _NAMED, cutoff=0.5)
    near = list(dict.fromkeys([*alike, *sorted(holding, key=len)]))[:_NAMED] or few[:_NAMED]
    return f"near are {', '.join(map(name_shown, near))} ({len(names)} names in all)"
