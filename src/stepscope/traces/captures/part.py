"""A part of a capture: the work launched in one step, in one phase, or inside the ranges of one name."""

import dataclasses
import difflib
import re
from collections.abc import Sequence

import polars as pl

from stepscope.core.errors import InputError, name_shown
from stepscope.core.range_names import PHASES, STEP
from stepscope.core.units import Window, ms_text
from stepscope.traces.captures.attribution import ROOT, Attribution, lasting
from stepscope.traces.captures.range_totals import launching, named_ranges
from stepscope.traces.captures.summary import OUTSIDE, Part, TraceSummary
from stepscope.traces.nesting import Nest, union

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
        work = _of_step(work, step, source)
        instances = _inside_step(instances, step)
    if phase is not None:
        work = _of_phase(work, phase, source)
    if name is not None:
        work, opened = _inside_ranges(whole, work, name, source)
    if module is not None:
        work = _of_module(work, module, source)
    for column, number in (("device", device), ("stream", stream)):
        if number is not None:
            work = _of_number(work, column, number, source)
    if between is not None:
        work, instances = _between(whole, work, instances, between, source)
        forwards = _leading_to(work, forwards)
    asked = {
        "--range": name, "--phase": phase, "--step": step, "--module": module, "--device": device, "--stream": stream,
        "--between": None if between is None else "T0:T1",
    }  # fmt: skip
    given = [f"{option} {value}" for option, value in asked.items() if value is not None]
    if not work.height and len(given) > 1:
        raise InputError(f"{' and '.join(given)}: nothing was launched in all of these in {source}: leave one out")
    attribution = dataclasses.replace(
        whole, work=work, instances=instances, forwards=forwards, links_checked=0, links_agree=0
    )
    if opened is not None:
        opened = launching(opened, attribution).height
    part = Part(
        step=step, phase=phase, range=name, instances=opened, whole=whole, module=module, device=device, stream=stream,
        between=between,
    )  # fmt: skip
    return dataclasses.replace(summary, attribution=attribution, part=part)


def _of_step(work: pl.DataFrame, step: int, source: str) -> pl.DataFrame:
    steps = work["step"].drop_nulls().unique().sort().to_list()
    if step in steps:
        return work.filter(pl.col("step") == step)
    last = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]} alone" if steps else ""
    there = f"it has {last}" if steps else "no step is marked in it"
    raise InputError(f"--step {step}: no such step in {source}: {there}")


def _inside_step(instances: pl.DataFrame, step: int) -> pl.DataFrame:
    """The instance of this step, and the instances of phases that begin in it."""
    own = instances.filter(pl.col("what") == STEP).sort("start_ns")[step : step + 1]
    begins = pl.col("start_ns")
    bounds = own.select(begins.min().alias("first"), pl.col("end_ns").max().alias("last")).row(0)
    return instances.filter((begins >= bounds[0]) & (begins < bounds[1]))


def _of_phase(work: pl.DataFrame, phase: str, source: str) -> pl.DataFrame:
    names = work["phase"].cast(pl.String).fill_null(OUTSIDE)
    chosen = work.filter(names == phase)
    if chosen.height:
        return chosen
    present = set(names.unique().to_list())
    there = [known for known in (*PHASES, OUTSIDE) if known in present]
    raise InputError(f"--phase {phase!r}: nothing ran in it in {source}: there is {', '.join(there) or 'no work'}")


def _of_module(work: pl.DataFrame, module: str, source: str) -> pl.DataFrame:
    """The work of a module and of those inside it; of all layers where `module` has `*` for their number."""
    names = work["module"].unique().cast(pl.String).drop_nulls()
    names = names.filter(names != ROOT)
    pattern = r"\d+".join(re.escape(piece) for piece in module.split("*"))
    inside = names.filter(names.str.contains(rf"^{pattern}(?:\.|$)"))
    if not len(inside):
        raise InputError(f"--module {module!r}: no work in it in {source}: {_near(module, names.sort().to_list())}")
    return work.filter(pl.col("module").is_in(inside.cast(work["module"].dtype).implode()))


def _of_number(work: pl.DataFrame, column: str, number: int, source: str) -> pl.DataFrame:
    chosen = work.filter(pl.col(column) == number)
    if chosen.height:
        return chosen
    present = ", ".join(map(str, work[column].unique().sort().head(_NAMED).to_list()))
    raise InputError(f"--{column} {number}: nothing ran on it in {source}: there is {present or 'no work'}")


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


def _leading_to(work: pl.DataFrame, forwards: pl.DataFrame) -> pl.DataFrame:
    """The forwards that were the last to begin before some of the work was launched."""
    launches = work.select("process", pl.col("launch_ns").alias("start_ns")).drop_nulls().sort("start_ns")
    begins = forwards.select("process", "start_ns", pl.col("start_ns").alias("begin_ns")).sort("start_ns")
    last = launches.join_asof(begins, on="start_ns", by="process", strategy="backward", check_sortedness=False)
    return forwards.join(
        last.select("process", pl.col("begin_ns").alias("start_ns")), on=["process", "start_ns"], how="semi"
    )


def _inside_ranges(whole: Attribution, work: pl.DataFrame, name: str, source: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The work launched inside ranges of this name, on any thread of their process, and the ranges."""
    ranges = named_ranges(whole.table)
    own = ranges.filter(pl.col("name").cast(pl.String) == name)
    if not own.height:
        names = sorted(filter(None, ranges["name"].unique().cast(pl.String).to_list()))
        raise InputError(f"--range {name!r}: no such range in {source}: {_near(name, names)}")
    merged = lasting(union(own, ["process"]))
    inside = Nest(merged, "process").innermost(work["process"], work["launch_ns"]).is_not_null()
    return work.filter(inside), own


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
