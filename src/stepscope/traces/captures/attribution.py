"""The attribution of every nanosecond of device work to a phase, module and family. Unattributed time stays visible.

Phase: the phase range open at the launch, on the launching thread or else on any thread of that process (autograd
launches backward from its own thread). Module: the innermost module range open on the launching thread. In backward,
only the forward thread has ranges, so it is the module of the forward operator with the same (forward thread, sequence
number).
"""

import re
from collections.abc import Callable
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, Literal, cast, get_args

import msgspec
import polars as pl

from stepscope.core.range_names import (
    ATTENTION_PARTS,
    BACKWARD,
    FORWARD,
    GRADIENT_ACCUMULATION,
    MARKING,
    OPTIMIZER,
    PHASES,
    RECOMPUTATION,
    STEP,
)
from stepscope.traces.kernels.families import FAMILIES, classify
from stepscope.traces.nesting import (
    Nest,
    by_stretches,
    by_thread,
    column_of,
    lasting,
    numbered,
    one_key,
    open_rows,
    renumbered,
    union,
)
from stepscope.traces.table import COPIES, KIND, TraceTable, fits, named, names_of

# A lookup of the innermost named range open on a thread at a moment, among up to a million ranges.


_STRETCH = 1 << 19
_AT_ONCE = 1 << 18
"""The most rows of which what is made on the way is held at once."""
_LONG_AGO = -(2**63)


class Places:
    """Named intervals on threads that launch work.

    A million intervals are nested in stretches, to save memory. The cuts are where no thread has an open interval.
    Fewer intervals are nested at once, only once.
    """

    def __init__(self, intervals: pl.DataFrame) -> None:
        """Hold the `intervals` (start_ns, duration_ns, name, track), nested if they are few."""
        if intervals.height > 2 * _STRETCH and not intervals["start_ns"].is_sorted():
            intervals = intervals.sort("start_ns", maintain_order=True)
        self._intervals = intervals
        self._cuts = _cuts(intervals)
        self._whole = Nest(intervals, "track") if len(self._cuts) == 1 else None

    def name_at(self, track: pl.Series, time_ns: pl.Series, alias: str) -> pl.Series:
        """The name of the innermost interval open at each moment on its thread, or null."""
        names = self._intervals["name"]
        if self._whole is not None:
            return gather(names, self._whole.innermost(track, time_ns)).alias(alias)
        begins = self._intervals["start_ns"].gather(self._cuts)
        moments = pl.DataFrame([track.alias("track"), time_ns.alias("time_ns")]).with_row_index("query")
        moments = moments.with_columns(begins.search_sorted(time_ns.fill_null(-1), side="right").alias("stretch"))
        answers = []
        for stretch, (first, last) in enumerate(pairwise([*self._cuts, self._intervals.height]), 1):
            queries = moments.filter(pl.col("stretch") == stretch)
            if not queries.height:
                continue
            part = self._intervals[first:last]
            rows = Nest(part, "track").innermost(queries["track"], queries["time_ns"])
            answers.append(queries.select("query", gather(part["name"], rows).alias(alias)).drop_nulls())
        answered = pl.concat([pl.DataFrame(schema={"query": pl.UInt32, alias: names.dtype}), *answers])
        return moments.select("query").join(answered, on="query", how="left", maintain_order="left")[alias]


def _cuts(intervals: pl.DataFrame) -> list[int]:
    """The first rows of stretches of at least `_STRETCH` intervals, by start. No interval is in two stretches."""
    if intervals.height <= 2 * _STRETCH:
        return [0]
    free, until = list[pl.Series](), _LONG_AGO
    for first in range(0, intervals.height, _AT_ONCE):
        some = intervals[first : first + _AT_ONCE]
        reached = (some["start_ns"] + some["duration_ns"].clip(lower_bound=1)).cum_max().clip(lower_bound=until)
        free.append((some["start_ns"] >= reached.shift(1, fill_value=until)).arg_true() + first)
        until = reached[-1]
    return (
        pl.concat(free)
        .to_frame("row")
        .group_by((pl.col("row") // _STRETCH).alias("stretch"))
        .min()["row"]
        .sort()
        .to_list()
    )


def gather(values: pl.Series, rows: pl.Series) -> pl.Series:
    """The values at rows; null for a null row."""
    if not len(values):
        return pl.Series(values.name, [None], dtype=values.dtype).new_from_index(0, len(rows))
    return values.gather(rows)


# The kind of a named range of a capture: a step, a phase, a part of attention, or else a module.


RangeKind = Literal["step", "phase", "part", "module", "aside"]

_STEP = re.compile(
    r"(?:train(?:ing)?[ _]?)?(?:step|iteration|iter|batch)[ _#:]*\d*|ProfilerStep[#*]?\d*", re.IGNORECASE
)
_PHASES: tuple[tuple[str, re.Pattern[str]], ...] = (
    (FORWARD, re.compile(r"(?:model[ _.]?)?(?:forward|fwd)(?:[ _](?:pass|step|loss|and loss))?", re.IGNORECASE)),
    (FORWARD, re.compile(r"(?:Fully\w+|Distributed)DataParallel\.forward|inference", re.IGNORECASE)),
    (BACKWARD, re.compile(r"(?:loss[ _.]?)?(?:backward|bwd)(?:[ _](?:pass|step))?", re.IGNORECASE)),
    (OPTIMIZER, re.compile(r"opt(?:imi[sz]er)?(?:[ _.]?(?:step|update|pass))?|Optimizer\.step#.*", re.IGNORECASE)),
)
_FRAMED = re.compile(r"[#=*\-<\[(|]+\s*([^#=*\-<>\[\]()|]*[^#=*\-<>\[\]()|\s])\s*[#=*\->\])|]+")
_ASIDE = re.compile(
    rf"Optimizer\.zero_grad#|zero[ _]?grad|{MARKING}|PyTorch Profiler|nccl|cub::|CUB|thrust::|cudnn|cublas|"
    r"DataLoader|enumerate\(|(?:## )?Call CompiledFxGraph|Torch-Compiled Region|"
    r"(?:aten|autograd|torch|c10d|FSDP)::|[^,]+, sizes = \[",
    re.IGNORECASE,
)
"""A pattern of ranges that are not modules: of libraries, and of work outside the model."""

_OF_PYTORCH = re.compile(r"Optimizer\.|ProfilerStep|(?:Fully\w+|Distributed)DataParallel\.forward")

RANGE_KINDS: tuple[RangeKind, ...] = get_args(RangeKind)


def _undecorated(name: str) -> str:
    """The name without what frames it: `## forward ##` is forward."""
    name = name[:200].strip()
    framed = _FRAMED.fullmatch(name)
    return framed[1] if framed else name


def range_kind(name: str) -> RangeKind:
    """The kind of a range, by its name only."""
    name = _undecorated(name)
    if _STEP.fullmatch(name):
        return "step"
    if phase_of(name):
        return "phase"
    if name in ATTENTION_PARTS:
        return "part"
    return "aside" if _ASIDE.match(name) else "module"


def phase_of(name: str) -> str | None:
    """The phase that a range's name means, in any of the usual spellings, or None."""
    name = _undecorated(name)
    return next((phase for phase, pattern in _PHASES if pattern.fullmatch(name)), None)


# The phases of work that no range of the user's marks.
#
# Backward is what autograd's nodes launch, and what its engine's thread launches beside them (DDP's collectives).
# Forward is what runs from the first operator that makes a node to the backward that follows. The optimizer is what its
# fused and foreach operators launch outside both. PyTorch's own ranges (`Optimizer.step#`) are ranges, and count before
# all this.


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
    marked = {phase_of(name) for name in names_of(table.ranges).to_list() if not _OF_PYTORCH.match(name)}
    wanted = [phase for phase in PHASES if phase not in marked]
    if not wanted or not work["phase"].has_nulls():
        return work, _NO_FORWARDS
    # In the cut of a phase, the other phases' threads launch nothing, and still tell where a forward begins and ends.
    thread = ["process", "thread"]
    others = table.operators.join(operators.select(thread).unique(), on=thread, how="anti", nulls_equal=True)
    highest = operators["track"].max()
    tracks = (numbered(others, thread) + (highest if isinstance(highest, int) else 0) + 1).cast(pl.Int64)
    columns = ["track", *thread, "name", "start_ns", "duration_ns", "sequence", "forward_thread"]
    own_operators = operators.with_columns(pl.col("track").cast(pl.Int64)).select(columns)
    operators = pl.concat([own_operators, others.with_columns(tracks.alias("track")).select(columns)])
    nodes = operators.filter(is_node(operators))
    in_node = _inside_range(nodes, work)
    # A forward's operators, and no recomputation's: those that autograd follows, outside its nodes. Where gradients are
    # disabled, in an evaluation or an update, operators have no sequence number.
    makers = operators.filter(_FOLLOWED & ~is_node(operators))
    makers = makers.filter(Nest(nodes, "track").innermost(makers["track"], makers["start_ns"]).is_null())
    # The threads of autograd's engine: those of that name, or with nodes and no forward of their own.
    by_name = [
        track
        for track, process, thread in threads.select("track", "process", "thread").iter_rows()
        if _ENGINE in table.threads.get((process, thread), "")
    ]
    with_nodes = nodes["track"].unique()
    alone = with_nodes.filter(~with_nodes.is_in(makers["track"].unique().implode()))
    engine = pl.concat([pl.Series(by_name, dtype=pl.Int64), alone.cast(pl.Int64)]).unique()
    # A forward that leads to a backward lasts from its first operator to there.
    begins = nodes.select("process", pl.col("start_ns").alias("backward_ns")).sort("backward_ns")
    forward = (
        makers.filter(~pl.col("track").is_in(engine.implode()))
        .select("process", "start_ns")
        .sort("start_ns")
        .join_asof(
            begins, left_on="start_ns", right_on="backward_ns", by="process", strategy="forward", check_sortedness=False
        )
        .drop_nulls("backward_ns")
        .group_by("process", "backward_ns")
        .agg(pl.col("start_ns").min())
        .select("process", "start_ns", (pl.col("backward_ns") - pl.col("start_ns")).alias("duration_ns"))
    )
    before_backward = Nest(forward, "process").innermost(column_of(work, "process"), work["launch_ns"]).is_not_null()
    zeroing = named(table.ranges, r"^Optimizer\.zero_grad#")
    zeroed = Nest(zeroing, "process").innermost(column_of(work, "process"), work["launch_ns"]).is_not_null()
    update = fits(operators["name"], _UPDATE)
    if nodes.height:
        update |= fits(operators["name"], _OVER_LISTS, _OF_ANY_USE)
    updates = _inside_range(operators.filter(update), work)
    ways = (
        (in_node, BACKWARD, NODES),
        (work["track"].is_in(engine.implode()), BACKWARD, THREAD),
        (zeroed, OPTIMIZER, ZEROED),
        (before_backward, FORWARD, ORDER),
        (updates, OPTIMIZER, UPDATES),
    )
    for holds, phase, way in ways:
        if phase in wanted:
            fresh = pl.col("phase").is_null() & holds
            work = work.with_columns(
                pl.when(fresh).then(pl.lit(way, _WAY)).otherwise("found_by").alias("found_by"),
                pl.when(fresh).then(pl.lit(phase, _PHASE)).otherwise("phase").alias("phase"),
            )
    ends = (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns")
    return work, forward.select("process", "start_ns", ends)


def is_node(operators: pl.DataFrame) -> pl.Series:
    """Whether each operator is a node of autograd's."""
    return fits(operators["name"], _NODE)


def tells_phase(operators: pl.DataFrame) -> pl.Series:
    """Whether each operator tells a phase that no range marks: a node of autograd's, or one that it may follow."""
    return is_node(operators) | operators.select(_FOLLOWED).to_series().fill_null(False)


def _inside_range(operators: pl.DataFrame, work: pl.DataFrame) -> pl.Series:
    """Whether each row of work was launched while one of these operators was open on its thread."""
    return Nest(operators, "track").innermost(work["track"], work["launch_ns"]).is_not_null()


_ACCUMULATE = "torch::autograd::AccumulateGrad"
ROOT = ""
"""The module path of work in a phase but in no module's range: the model itself, the loss, a compiled graph."""


class Attribution(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A TraceTable with each row's place.

    `work` is the table's `work` with columns step, phase, found_by, module, part, role, operator, operator_row, family,
    ranged. `operator_row`: the row in `table.operators` of the call that `operator` names. `ranged`: inside any named
    range, or in a phase. `found_by`: how the phase of a row was found (FOUND_BY).
    `forwards`: those that were found without ranges, of all processes; a backward follows each.
    `links_checked`: backward operators whose forward operator was found both by sequence number and by the profiler's
    own arrow. `links_agree`: those where both are the same operator.
    `instances`: the steps and phases of the first process that has any (what, start_ns, end_ns, again). Overlapping
    ranges of one phase (a user's range around PyTorch's own) are one instance. `again`: the run of a second optimizer
    in the same step.
    """

    table: TraceTable
    work: pl.DataFrame
    instances: pl.DataFrame
    links_checked: int
    links_agree: int
    forwards: pl.DataFrame

    @cached_property
    def kernels(self) -> pl.DataFrame:
        """The rows that are computation: kernels, whole graphs, or CPU operators; no copies or fills."""
        computes = ~self.work["kind"].is_in(pl.Series(COPIES, dtype=KIND).implode())
        first = computes.head(int(computes.sum()))
        # Readers put these rows first. A slice then avoids a second copy of a million rows.
        return self.work.head(len(first)) if first.all() else self.work.filter(computes)

    @cached_property
    def with_free_ns(self) -> pl.DataFrame:
        """`work` with `free_ns`: the time when all earlier work on its stream had ended; null for the first row."""
        if "free_ns" in self.work.columns:
            return self.work
        stream = ["process", "device", "stream"]
        ended = (pl.col("start_ns") + pl.col("duration_ns")).cum_max().shift(1)
        return self.work.with_columns(ended.over(stream, order_by="start_ns").alias("free_ns"))

    @cached_property
    def totals(self) -> pl.DataFrame:
        """Device time by kind, name and all places of work: calls and duration_ns.

        A million rows have a thousand of them, of which every sum is made.
        """
        slices = self.work.select(*_TOTALLED, "duration_ns").iter_slices(_STRETCH)
        parts = [_totals(part) for part in (slices if self.work.height else [self.work])]
        return pl.concat(parts).group_by(_TOTALLED).agg(pl.col("calls", "duration_ns").sum())

    @cached_property
    def rows(self) -> pl.DataFrame:
        """Device time by (phase, role, module, family): calls and busy_ns. Rows in no range have `ranged` false."""
        return (
            self.totals.group_by("ranged", "phase", "role", "module", "family")
            .agg(pl.col("calls").sum(), pl.col("duration_ns").sum().alias("busy_ns"))
            .sort("busy_ns", descending=True)
        )

    @property
    def busy_ns(self) -> int:
        """Sum of the durations of all device work."""
        return int(self.work["duration_ns"].sum())

    @property
    def attributed_ns(self) -> int:
        """Busy time of the work launched inside some named range."""
        return int(self.rows.filter("ranged")["busy_ns"].sum())

    @property
    def unattributed_ns(self) -> int:
        """Busy time of the work launched outside all ranges, or by no recorded call."""
        return int(self.rows.filter(~pl.col("ranged"))["busy_ns"].sum())

    @property
    def passes(self) -> int:
        """The number of backward passes that were found without ranges, of the first process."""
        return self.forwards.filter(pl.col("process") == pl.col("process").min()).height

    @cached_property
    def steps(self) -> int:
        """The number of traced steps, at least 1.

        It is the number of step ranges or, without any, the smaller of the numbers of forwards and of runs of the
        optimizer that runs most often. A step may have several forwards (micro-batches) for one optimizer, or several
        optimizers for one forward. Forwards that no range marks are counted by their backward passes.
        """
        once = self.instances.filter(~pl.col("again"))
        counts = {what: once.filter(pl.col("what") == what).height for what in (STEP, *PHASES)}
        forwards = counts[FORWARD] or self.passes
        return counts[STEP] or min((n for n in (forwards, counts[OPTIMIZER]) if n), default=1)

    def self_check(self) -> None:
        """Raise AssertionError unless the parts sum to the whole exactly and no row was lost or doubled."""
        assert self.work.height == self.table.work.height, "rows were lost or doubled"
        assert self.attributed_ns + self.unattributed_ns == self.busy_ns, "attributed + unattributed is not busy"
        assert self.busy_ns == int(self.table.work["duration_ns"].sum()), "busy time changed on the way"


_TOTALLED = ["kind", "name", "family", "phase", "found_by", "role", "module", "part", "ranged"]


def _totals(work: pl.DataFrame) -> pl.DataFrame:
    """Calls and duration_ns of each kind, name and place: grouped by one integer in half of the time."""
    sums = pl.len().cast(pl.Int64).alias("calls"), pl.col("duration_ns").sum()
    key = one_key(work, _TOTALLED)
    if key is None:
        return work.group_by(_TOTALLED).agg(*sums)
    keyed = pl.DataFrame([key.alias("key"), work["duration_ns"]]).with_row_index("row")
    summed = keyed.group_by("key").agg(pl.col("row").first(), *sums)
    return work.select(_TOTALLED)[summed["row"]].with_columns(summed["calls"], summed["duration_ns"])


def _instances(few: pl.DataFrame) -> pl.DataFrame:
    chosen = few.with_columns(pl.coalesce(pl.col("phase").cast(pl.String), "what").alias("what"))
    first = chosen.filter(pl.col("process") == pl.col("process").min())
    merged = union(first, ["what"], touching=False)  # a step may begin in the nanosecond in which the last one ends
    names = first.filter(pl.col("what") == OPTIMIZER).group_by("name").agg(pl.len(), pl.col("start_ns").sort())
    if not names.height:
        return merged.with_columns(pl.lit(False).alias("again"))
    most = names.sort(pl.col("len"), pl.col("start_ns").list.first(), descending=[True, False])["start_ns"][0]
    before = most.search_sorted(merged["start_ns"], side="left")
    within = most.search_sorted(merged["end_ns"], side="right")
    return merged.with_columns(((pl.col("what") == OPTIMIZER) & (within <= before)).alias("again"))


def attribute(table: TraceTable) -> Attribution:
    """Attribute every row of the table's work."""
    track = numbered(table.work, ["process", "launch_thread"]).alias("track")
    threads = _threads(table.work, track)
    kinds: dict[RangeKind, list[str]] = {kind: [] for kind in RANGE_KINDS}
    for name in names_of(table.ranges).to_list():
        kinds[range_kind(name)].append(name)
    names = [*kinds["step"], *kinds["phase"]]
    known = pl.DataFrame(
        {
            "name": pl.Series(names, dtype=pl.Categorical()),
            "what": ["step"] * len(kinds["step"]) + ["phase"] * len(kinds["phase"]),
            "phase": pl.Series([phase_of(name) for name in names], dtype=pl.Enum(PHASES)),
        },
        schema_overrides={"what": pl.String},
    )
    few = table.ranges.filter(_is_named(names)).join(known, on="name", how="left", maintain_order="left")
    few = few.filter(~_recomputed(few))
    modules = _modules(_named(table.ranges, kinds["module"], threads), few, threads)
    parts = Places(_named(table.ranges, kinds["part"], threads))
    recomputed = Places(_named(table.ranges, [RECOMPUTATION], threads)) if RECOMPUTATION in kinds["module"] else None
    operators = _on_threads(table.operators.with_row_index("row"), threads)
    forwards, links = _NO_FORWARDS, (0, 0)
    anywhere = cache(lambda: Nest(lasting(union(table.ranges, ["process"])), "process"))

    def placed(some: pl.DataFrame, first: int) -> pl.DataFrame:
        nonlocal forwards, links
        work = some.with_columns(track[first : first + some.height])
        work = work.with_columns(
            modules.name_at(work["track"], work["launch_ns"], "module"),
            parts.name_at(work["track"], work["launch_ns"], "part"),
            _phase(work, few, threads),
            _step(work, few),
        )
        work, found = with_found_phases(work, operators, table, threads)
        forwards = found if found.height else forwards
        work = _with_operators(work, operators, table, anywhere)
        work, *links = _through_forward(work, operators, table, (modules, parts), threads)
        if recomputed is not None:  # an NVTX tool records no operators: such work is known by the range around it
            again = recomputed.name_at(work["track"], work["launch_ns"], RECOMPUTATION).is_not_null()
            work = work.with_columns(pl.col("_recomputes") | again)
        work = work.with_columns(_families(work)).with_columns(_ROLE)
        in_phase = pl.col("phase").is_not_null() & pl.col("module").is_null()
        root = pl.lit(ROOT, pl.Categorical())
        work = work.with_columns(pl.when(in_phase).then(root).otherwise("module").alias("module"))
        work = work.select(_PLACES)
        absent = [name for name in ("part", "operator", "operator_row") if work[name].null_count() == work.height]
        return work.with_columns(pl.lit(None, work.schema[name]).alias(name) for name in absent)  # held as one value

    # Operators are nested anew for each stretch of work, so beside them there is one.
    whole = table.work if not operators.height else table.work.select(pl.all())
    work = by_stretches(whole, ["process", "launch_thread", "launch_ns", "name", "device", "kind"], placed)
    checked, agree = links
    return Attribution(
        table=table,
        work=work,
        instances=_instances(few),
        links_checked=checked,
        links_agree=agree,
        forwards=forwards,
    )


_PLACES = (
    "module", "part", "phase", "step", "found_by", "ranged", "operator_row", "operator", "family", "role"
)  # fmt: skip


def _threads(work: pl.DataFrame, track: pl.Series) -> pl.DataFrame:
    """The threads that launch work: track, process, thread."""
    parts, first = [], 0
    for some in work.select("process", pl.col("launch_thread").alias("thread")).iter_slices(_AT_ONCE):
        parts.append(some.select(track[first : first + some.height], "process", "thread").unique("track"))
        first += some.height
    nothing = {"track": track.dtype, "process": pl.Int64, "thread": pl.Int64}
    return pl.concat([pl.DataFrame(schema=nothing), *parts]).unique("track")


def _with_operators(
    work: pl.DataFrame, operators: pl.DataFrame, table: TraceTable, anywhere: Callable[[], Nest]
) -> pl.DataFrame:
    """The work with the operator that launched each row, and whether a range was open at its launch: `anywhere` nests
    the stretches of a process in which some is."""
    if table.on_cpu:
        operator_row = by_thread(table.operators).order  # the row is the operator itself
    else:
        operator_row = gather(operators["row"], Nest(operators, "track").innermost(work["track"], work["launch_ns"]))
    # Whether each launch lies in any range of its process, or has a place without one.
    ranged = work.select(pl.any_horizontal(pl.col("phase", "module", "step").is_not_null())).to_series()
    if not ranged.all():
        ranged |= anywhere().innermost(column_of(work, "process"), work["launch_ns"]).is_not_null()
    return work.with_columns(
        ranged.alias("ranged"),
        operator_row.alias("operator_row"),
        gather(table.operators["name"], operator_row).alias("operator"),
    )


def _families(work: pl.DataFrame) -> pl.Series:
    """The family of each row of work."""
    keys = ["name", "operator", "part", "phase"]
    found, families = dict[tuple[Any, ...], str](), [pl.Series("family", dtype=pl.Enum(FAMILIES))]
    for some in work.select(keys).iter_slices(_AT_ONCE):
        places = some.with_columns(pl.col("name", "operator", "part").cast(pl.Categorical))
        number = numbered(places, keys)
        first = number.to_frame().with_row_index("row").group_by("number").agg(pl.col("row").first()).sort("number")
        for place in (rows := places[first["row"]].rows()):
            if place not in found:
                name, operator, part, phase = place
                found[place] = classify(name, operator=operator, part=part, phase=phase)
        families.append(pl.Series("family", [found[place] for place in rows], dtype=pl.Enum(FAMILIES)).gather(number))
    return pl.concat(families, rechunk=True)


def _recomputed(few: pl.DataFrame) -> pl.Series:
    """Whether each range is a forward inside a backward: a checkpointed model that runs again, as part of backward.

    The backward range is on the same thread. If that thread has none (autograd's thread), it is on any thread of the
    process. A thread with its own backward may run forward at any time.
    """
    forward = few["phase"].cast(pl.String).eq_missing(FORWARD)
    backward = few.filter(pl.col("phase") == BACKWARD)
    trains = numbered(few, ["process", "thread"])
    return forward & (
        _inside(few, backward, ["process", "thread"])
        | (_inside(few, backward, ["process"]) & ~trains.is_in(trains.filter(few["phase"] == BACKWARD).implode()))
    )


def _inside(ranges: pl.DataFrame, around: pl.DataFrame, by: list[str]) -> pl.Series:
    """Whether each range lies inside a range of `around` with equal `by`, or inside several that overlap or touch."""
    merged = lasting(union(around, by))
    row = open_rows(merged, ranges.select(by), ranges["start_ns"])
    return (gather(merged["end_ns"], row) >= ranges["start_ns"] + ranges["duration_ns"]).fill_null(False)


def _is_named(names: list[str]) -> pl.Expr:
    return pl.col("name").is_in(pl.Series(names, dtype=pl.Categorical()).implode())


def _named(ranges: pl.DataFrame, names: list[str], threads: pl.DataFrame) -> pl.DataFrame:
    """The nested ranges of these names on threads that launch work: start_ns, duration_ns, name, track."""
    parts = []
    for part in (
        ranges.iter_slices(1 << 18) if names else ()
    ):  # a million ranges are filtered piece by piece, to save memory
        chosen = part.filter(pl.col("nested") & _is_named(names))
        parts.append(_on_threads(chosen, threads).select("start_ns", "duration_ns", "name", "track"))
    nothing = {"start_ns": pl.Int64, "duration_ns": pl.Int64, "name": pl.Categorical(), "track": pl.Int64}
    return pl.concat([pl.DataFrame(schema=nothing), *parts])


def _modules(candidates: pl.DataFrame, few: pl.DataFrame, threads: pl.DataFrame) -> Places:
    """The module ranges: those that enclose no step or phase, unlike "epoch" and "train"."""
    outer: set[str] = set()
    for (track, _, _), inner in _on_threads(few, threads).group_by("track", "what", "phase"):
        shortest_ns = cast("int", inner["duration_ns"].min())
        may_hold = candidates.filter((pl.col("track") == track) & (pl.col("duration_ns") >= shortest_ns))
        outer |= _enclosing(may_hold, inner.sort("start_ns", "duration_ns"))
    if not outer:
        return Places(candidates)
    return Places(candidates.filter(~_is_named(sorted(outer))))


def _enclosing(candidates: pl.DataFrame, inner: pl.DataFrame) -> set[str]:
    """The names of the candidates that enclose a range of `inner` and are longer than it.

    `inner` has ranges of one kind, sorted by start and length. On a clock of microseconds a phase's first module may
    begin together with the phase, and does not enclose it.
    """
    start_ns, end_ns = candidates["start_ns"], candidates["start_ns"] + candidates["duration_ns"]
    begins, ends = inner["start_ns"], inner["start_ns"] + inner["duration_ns"]
    # Ranges that begin with the candidate: the first is the shortest. Later ranges: the one that ends first counts.
    together = begins.search_sorted(start_ns, side="left")
    later = begins.search_sorted(start_ns, side="right")
    last = inner.height - 1
    shortest = ends.gather(together.clip(upper_bound=last))
    soonest = ends.reverse().cum_min().reverse().gather(later.clip(upper_bound=last))
    holds = ((together < later) & (shortest < end_ns)) | ((later <= last) & (soonest <= end_ns))
    return set(candidates["name"].filter(holds).unique().to_list())


def _on_threads(frame: pl.DataFrame, threads: pl.DataFrame) -> pl.DataFrame:
    """The rows on threads that launch work, with the thread's `track`."""
    if threads["thread"].is_duplicated().any():  # the same thread number in two processes
        return frame.join(threads, on=["process", "thread"], how="inner", maintain_order="left")
    tracks = dict(zip(threads["thread"].to_list(), threads["track"].to_list(), strict=True))
    processes = dict(zip(threads["thread"].to_list(), threads["process"].to_list(), strict=True))
    tracks.pop(None, None)
    processes.pop(None, None)
    track, process = renumbered(frame["thread"], tracks), renumbered(frame["thread"], processes)
    return frame.with_columns(track.alias("track")).filter(track.is_not_null() & (frame["process"] == process))


def _phase(work: pl.DataFrame, few: pl.DataFrame, threads: pl.DataFrame) -> pl.Series:
    """The phase open on the launching thread or, if none is, the phase open on any thread of its process."""
    phases = few.filter(pl.col("what") == "phase")
    own_phases = _on_threads(phases.filter("nested"), threads)
    of_thread = gather(own_phases["phase"], Nest(own_phases, "track").innermost(work["track"], work["launch_ns"]))
    merged = lasting(union(phases, ["process", "phase"]))
    anywhere = gather(merged["phase"], Nest(merged, "process").innermost(column_of(work, "process"), work["launch_ns"]))
    both = pl.DataFrame({"own": of_thread, "anywhere": anywhere})
    return both.select(pl.coalesce("own", "anywhere").alias("phase")).to_series()


def _step(work: pl.DataFrame, few: pl.DataFrame) -> pl.Series:
    """The number, from 0, of the step open at each launch in its process, or null.

    Overlapping ranges of steps, such as a user's inside the profiler's own, are one step.
    """
    steps = lasting(union(few.filter(pl.col("what") == "step"), ["process"], touching=False)).sort("start_ns")
    steps = steps.with_columns(pl.int_range(pl.len()).over("process").alias("step"))
    rows = Nest(steps, "process").innermost(column_of(work, "process"), work["launch_ns"])
    return gather(steps["step"], rows).cast(pl.Int64).alias("step")


def _through_forward(
    work: pl.DataFrame,
    operators: pl.DataFrame,
    table: TraceTable,
    places: "tuple[Places, Places]",
    threads: pl.DataFrame,
) -> tuple[pl.DataFrame, int, int]:
    """Fill in module and part of backward from the forward operator of the same (forward thread, sequence number)."""
    if not operators.height:
        return work.with_columns(pl.lit(False).alias("_accumulates"), pl.lit(False).alias("_recomputes")), 0, 0
    has_sequence = pl.col("sequence").is_not_null() & (pl.col("sequence") >= 0)
    in_backward = has_sequence & (pl.col("forward_thread").fill_null(0) > 0)
    names = operators["name"].unique().cast(pl.String).drop_nulls()
    accumulates = _is_named(names.filter(names.str.starts_with(_ACCUMULATE)).to_list())
    backward = operators.filter(in_backward | accumulates)
    nest = Nest(backward, "track")
    row = nest.innermost(work["track"], work["launch_ns"])
    work = work.with_columns(
        gather(backward["process"], row).alias("_process"),
        gather(backward["forward_thread"], row).alias("_forward_thread"),
        gather(backward["sequence"], row).alias("_sequence"),
        gather(backward["start_ns"], row).alias("_node_ns"),
        gather(backward.select(accumulates).to_series(), row).fill_null(False).alias("_accumulates"),
    )
    forward = table.operators.filter(has_sequence & ~(pl.col("forward_thread").fill_null(0) > 0))
    created = _forward_operators(backward.filter(in_backward), forward)
    # How many nodes have an arrow of the profiler, and how many of these lead to our operator.
    links = table.links
    begin = links.filter("begins").select("id", pl.col("start_ns").alias("from_ns"), "process")
    finish = links.filter(~pl.col("begins")).select("id", pl.col("start_ns").alias("to_ns"), "process")
    both = created.explode("backward_ns").join(
        begin.join(finish, on=["process", "id"], how="inner"),
        left_on=["process", "backward_ns"],
        right_on=["process", "to_ns"],
        how="inner",
    )
    checked, agree = both.height, int((both["forward_ns"] == both["from_ns"]).sum()) if both.height else 0
    placed = _placed(created, places, threads)
    work = work.join(
        placed,
        left_on=["_process", "_forward_thread", "_sequence"],
        right_on=["process", "forward_thread", "sequence"],
        how="left",
        maintain_order="left",
    )
    # A forward operator recomputed inside a backward node has its own sequence number and no forward thread.
    anew = operators.filter(has_sequence & ~(pl.col("forward_thread").fill_null(0) > 0))
    inner = gather(anew["start_ns"], Nest(anew, "track").innermost(work["track"], work["launch_ns"]))
    recomputes = (inner > work["_node_ns"]).fill_null(False)
    has_module = pl.col("module").is_not_null()
    return (
        work.with_columns(
            pl.when(has_module).then("module").otherwise(pl.col("_module")).alias("module"),
            pl.when(has_module).then("part").otherwise(pl.coalesce("part", "_part")).alias("part"),
            recomputes.alias("_recomputes"),
        ).drop("_process", "_forward_thread", "_sequence", "_module", "_part", "_node_ns"),
        checked,
        agree,
    )


def _forward_operators(backward: pl.DataFrame, forward: pl.DataFrame) -> pl.DataFrame:
    """The operator that made the node of each backward (process, forward_thread, sequence), and the backward's start.

    Several operators have the same number, which counts the nodes made so far: a composite operator, then the operators
    inside it. The last of them to begin makes the node. PyTorch's number of the forward thread is not the system's. The
    forward thread is the one whose operators match most of the sequence numbers.
    """
    latest = (
        forward.select("process", "thread", "sequence", pl.col("start_ns").alias("forward_ns"))
        .group_by("process", "thread", "sequence")
        .agg(pl.col("forward_ns").max())
    )
    wanted = backward.group_by("process", "forward_thread", "sequence").agg(
        pl.col("start_ns").unique().alias("backward_ns"), pl.col("thread").first().alias("backward_thread")
    )
    matched = wanted.join(latest, on=["process", "sequence"], how="inner")
    threads = (
        matched.group_by("process", "forward_thread", "thread")
        .len("matches")
        .sort("matches", "thread", descending=[True, False])
        .unique(["process", "forward_thread"], keep="first", maintain_order=True)
        .drop("matches")
    )
    return matched.join(threads, on=["process", "forward_thread", "thread"], how="semi")


def _placed(created: pl.DataFrame, places: tuple[Places, Places], threads: pl.DataFrame) -> pl.DataFrame:
    """The module and part whose ranges were open when each forward operator began."""
    modules, parts = places
    created = created.join(threads, on=["process", "thread"], how="left", maintain_order="left")
    return created.select(
        "process",
        "forward_thread",
        "sequence",
        modules.name_at(created["track"], created["forward_ns"], "_module"),
        parts.name_at(created["track"], created["forward_ns"], "_part"),
    ).unique(["process", "forward_thread", "sequence"])


_ROLES = pl.Enum([*PHASES, "communication", GRADIENT_ACCUMULATION, RECOMPUTATION])
_ROLE = (
    pl.when(pl.col("family") == "communication")
    .then(pl.lit("communication", _ROLES))
    .when(pl.col("_accumulates") | (pl.col("module") == GRADIENT_ACCUMULATION))
    .then(pl.lit(GRADIENT_ACCUMULATION, _ROLES))
    .when((pl.col("phase") == BACKWARD) & (pl.col("_recomputes") | (pl.col("module") == RECOMPUTATION)))
    .then(pl.lit(RECOMPUTATION, _ROLES))
    .otherwise(pl.col("phase").cast(_ROLES))
    .alias("role")
)
"""The purpose of the work: communication, gradient accumulation, recomputation, or its phase."""
