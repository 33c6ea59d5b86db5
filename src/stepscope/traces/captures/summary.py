"""The summary of a capture: phases, families, kernels, modules, and softmax's cost beside attention's products.

Times are summed kernel times per traced step, without copies and fills. Shares are of that kernel time.
"""

from bisect import bisect_right
from collections import Counter
from functools import cached_property

import msgspec
import polars as pl

from stepscope.core.attention_call import product_and_softmax_flops
from stepscope.core.errors import name_shown
from stepscope.core.formulas.transformer import product_counts
from stepscope.core.parts import scores_of
from stepscope.core.range_names import (
    ATTENTION_PARTS,
    BACKWARD,
    FORWARD,
    FORWARD_AND_BACKWARD,
    GRADIENT_ACCUMULATION,
    PHASES,
    RECOMPUTATION,
    SOFTMAX,
)
from stepscope.core.run import Run
from stepscope.core.units import Window, ms_text
from stepscope.core.workloads import TextbookWorkload, by_sizes
from stepscope.traces.captures.attribution import ROOT, Attribution
from stepscope.traces.captures.occupation import (
    KERNEL_LATENCY_NS,
    LAUNCH_NS,
    Occupation,
    Overlap,
    covered_ns,
    occupation,
    overlap,
    pieces,
    waits,
)
from stepscope.traces.kernels.families import is_generated
from stepscope.traces.kernels.names import decode
from stepscope.traces.nesting import is_one_value, union, values_of
from stepscope.traces.roofline import Roofline, roofline
from stepscope.traces.table import COPIES, KIND

# The critical path of one step: the chain of device work, launches and host time that its end waited for.
#
# A step lasts from the end of the previous step's last device work (for the first step: from its first launch call) to
# the end of its own last work. So the steps tile the device's time. The walk goes back from that end. At the start of
# each work W it asks what W waited for last. On the device this is D: the work before W on its stream, if that ended at
# most `KERNEL_LATENCY_NS` before W, or else the work that ended last on any stream before W began. The launch of W was
# too late if its call began less than `LAUNCH_NS` before D's end, or after it.
#
# - In time: the path continues with D. The time between is kernel-to-kernel latency or, if longer, dependency.
# - Too late: the time from the launch call to the start of W is launch. Before the call, the host delayed the step. The
#   path follows the host back to the last wait for the device (on a thread that launches work) that the end of some
#   work released, and continues with that work. The time from that end to the return of the wait is synchronisation.
#   Without such a wait, the host's time reaches back to the start of the step.
# - Too late, though the device worked for most of the time from that wait to W: a quicker host would gain no more than
#   the gap before W. So only the gap is host and launch, and the path continues with D.
#
# The segments sum to the step exactly. On a step that is mostly launch-bound the path is the host's.


CATEGORIES = (
    "computation",
    "communication",
    "copies",
    "kernel-to-kernel latency",
    "dependency",
    "launch",
    "host",
    "synchronisation",
)

_Segment = tuple[int, int, str, int | None]
"""Begin, end, category and, for device work, its row."""


class CriticalPath(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The critical path of one step on one device. `step` is None if no step is marked and the whole capture is one.

    `segments`, by time: start_ns, duration_ns, category, and for device work family, phase, name. `beside_host_ns`: for
    how long the device worked while the path was the host's.
    """

    device: int
    step: int | None
    start_ns: int
    end_ns: int
    segments: pl.DataFrame
    beside_host_ns: int

    @property
    def duration_ns(self) -> int:
        """The duration of the step, and so of the path, in nanoseconds."""
        return self.end_ns - self.start_ns

    @cached_property
    def by_category(self) -> pl.DataFrame:
        """Time on the path by category and family: segments, duration_ns, share (of one); the longest first."""
        return (
            self.segments.group_by("category", "family")
            .agg(pl.len().alias("segments"), pl.col("duration_ns").sum())
            .with_columns((pl.col("duration_ns") / max(1, self.duration_ns)).alias("share"))
            .sort("duration_ns", "category", "family", descending=[True, False, False])
        )

    def self_check(self) -> None:
        """Raise AssertionError unless the segments cover the whole step without gap or overlap."""
        starts = self.segments["start_ns"].to_list()
        ends = (self.segments["start_ns"] + self.segments["duration_ns"]).to_list()
        assert [*starts, self.end_ns] == [self.start_ns, *ends], "the path has a hole or an overlap"


def critical_path(
    attribution: Attribution, *, device: int | None = None, step: int | None = None
) -> CriticalPath | None:
    """The critical path of one step: by default the step of median duration, on the device that finished last.

    None for a CPU trace, and if the device has no such step.
    """
    end_ns = (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns")
    lasting = pl.col("duration_ns") > 0
    work = attribution.work
    if attribution.table.on_cpu or not work.height:
        return None
    if device is None:
        last = work.select(pl.col("device").filter(lasting & (end_ns == end_ns.filter(lasting).max())).max()).item()
        if last is None:
            return None
        device = int(last)
    window = _step_window(work, (pl.col("device") == device) & lasting, end_ns, step)
    if window is None:
        return None
    chosen, begin, end = window
    places = ("device", "stream", "process", "launch_ns", "launch_thread", "name", "family", "phase", "step")
    near = (end_ns >= begin) & (pl.col("start_ns") < end) & (pl.col("device") == device) & lasting
    work = work.select("start_ns", "duration_ns", *places).filter(near).with_columns(end_ns)
    inside = work.filter((pl.col("end_ns") >= begin) & (pl.col("start_ns") < end) & (pl.col("end_ns") <= end))
    walk = _Walk(inside.sort("start_ns", "end_ns", "stream"), attribution, begin)
    segments = _described(walk.segments(), walk.work)
    host = segments.filter(pl.col("category") == "host")
    return CriticalPath(
        device=device,
        step=chosen,
        start_ns=begin,
        end_ns=end,
        segments=segments,
        beside_host_ns=int(covered_ns(walk.worked, host["start_ns"], host["start_ns"] + host["duration_ns"]).sum()),
    )


def _step_window(
    work: pl.DataFrame, counts: pl.Expr, end_ns: pl.Expr, step: int | None
) -> tuple[int | None, int, int] | None:
    """The step, begin and end of a step of the work that counts: this one, or else that of median duration.

    If no step is marked, all work is one step. The shorter of two counts as the median, without the first step if there
    are others: it is measured apart.
    """
    first_call, last_end = pl.min_horizontal("launch_ns", "start_ns").min().alias("first_ns"), end_ns.max()
    columns = ["step", "launch_ns", "start_ns", "duration_ns", "device"]
    parts = [
        some.filter(counts).group_by("step").agg(first_call, last_end)
        for some in work.select(columns).iter_slices(1 << 20)
    ]
    ends = pl.concat(parts).group_by("step").agg(pl.col("first_ns").min(), pl.col("end_ns").max())
    marked = ends.filter(pl.col("step").is_not_null())
    ends = marked if marked.height else ends
    begin = pl.coalesce(pl.col("end_ns").shift(1), "first_ns").alias("begin_ns")
    steps = ends.sort("end_ns", "step").select("step", begin, "end_ns").filter(pl.col("begin_ns") < pl.col("end_ns"))
    if step is not None:
        steps = steps.filter(pl.col("step") == step)
    if not steps.height:
        return None
    ordered = steps[1 if steps.height > 1 else 0 :].sort(pl.col("end_ns") - pl.col("begin_ns"), "begin_ns")
    return ordered.row((ordered.height - 1) // 2)


class _Walk:
    """The walk back through one device's work that ends in the step, sorted by start."""

    def __init__(self, work: pl.DataFrame, attribution: Attribution, begin: int) -> None:
        self.work = work
        self.worked = pieces(work)
        self._pieces: list[int] = self.worked["start_ns"].to_list()
        self._worked_ends: list[int] = self.worked["end_ns"].to_list()
        self._worked_ns: list[int] = (self.worked["end_ns"] - self.worked["start_ns"]).cum_sum().to_list()
        self._begin = begin
        self._starts: list[int] = work["start_ns"].to_list()
        self._ends: list[int] = work["end_ns"].to_list()
        self._launches: list[int | None] = work["launch_ns"].to_list()
        numbered = work.select("stream").with_row_index("row")
        before = numbered.select(pl.col("row").cast(pl.Int64).shift(1).over("stream")).to_series()
        self._before_on_stream: list[int | None] = before.to_list()
        families = work["family"].cast(pl.String).to_list()
        self._categories = [_CATEGORY_OF.get(family, "computation") for family in families]
        by_end = work["end_ns"].arg_sort()
        self._by_end: list[int] = by_end.to_list()
        self._sorted_ends = work["end_ns"].gather(by_end)
        self._end_list: list[int] = self._sorted_ends.to_list()
        self._waits: list[int] = self._releasing_waits(attribution)

    def _releasing_waits(self, attribution: Attribution) -> list[int]:
        """The sorted ends of the waits during which some work ended, so that the device really delayed the host."""
        threads = self.work.select("process", "launch_thread").unique()
        waiting = waits(attribution.table, self.work).join(
            threads, left_on=["process", "thread"], right_on=["process", "launch_thread"], how="semi"
        )
        end = waiting["start_ns"] + waiting["duration_ns"]
        last = self._sorted_ends.search_sorted(end, side="right").cast(pl.Int64) - 1
        released = (last >= 0) & (self._sorted_ends.gather(last.clip(lower_bound=0)) > waiting["start_ns"])
        return end.filter(released).sort().to_list()

    def segments(self) -> list[_Segment]:
        """The segments of the path, from the end of the step to its start."""
        path: list[_Segment] = []
        at = self._by_end[-1]
        until = self._ends[at]
        while True:
            start = max(self._starts[at], self._begin)
            path += _present((start, until, self._categories[at], at))
            if start == self._begin:
                return path
            before, waited = self._before(at, start)
            path += waited
            if before is None:
                return path
            at, until = before, min(self._ends[before], start)
            if until <= self._begin:
                return path

    def _before(self, at: int, start: int) -> tuple[int | None, list[_Segment]]:
        """The work that the work beginning at `start` waited for last, or None; and the segments between them."""
        stream = self._before_on_stream[at]
        before = stream if stream is not None and self._ends[stream] >= start - KERNEL_LATENCY_NS else None
        if before is None:
            before = self._last_ended(start)
        launch = self._launches[at]
        free = max(self._begin, self._ends[before]) if before is not None else self._begin
        if launch is not None and (before is None or launch > self._ends[before] - LAUNCH_NS):
            return self._through_host(max(self._begin, min(launch, start)), start, before, free)
        category = "kernel-to-kernel latency" if start - free <= KERNEL_LATENCY_NS else "dependency"
        return before, [(free, start, category, None)] if free < start else []

    def _through_host(self, launch: int, start: int, last: int | None, free: int) -> tuple[int | None, list[_Segment]]:
        """The work whose end released the host before a late launch, or None; and the segments from it to `start`.

        `last`: the work that ended last on the device, at `free`. It is taken if the device worked most of the time.
        """
        wait = bisect_right(self._waits, launch) - 1
        returned = self._waits[wait] if wait >= 0 else self._begin
        since = max(returned, self._begin)
        if last is not None and 2 * (self._worked_before(start) - self._worked_before(since)) > start - since:
            called = max(launch, free)
            return last, _present((called, start, "launch", None), (free, called, "host", None))
        if returned <= self._begin:
            return None, _present((launch, start, "launch", None), (self._begin, launch, "host", None))
        before = self._last_ended(returned)
        done = max(self._begin, self._ends[before]) if before is not None else self._begin
        return before, _present(
            (launch, start, "launch", None), (returned, launch, "host", None), (done, returned, "synchronisation", None)
        )

    def _worked_before(self, moment: int) -> int:
        """The time for which some work ran before a moment."""
        begun = bisect_right(self._pieces, moment) - 1
        return self._worked_ns[begun] - max(0, self._worked_ends[begun] - moment) if begun >= 0 else 0

    def _last_ended(self, moment: int) -> int | None:
        """The work that ended last, at the moment or before it."""
        position = bisect_right(self._end_list, moment) - 1
        return self._by_end[position] if position >= 0 else None


_CATEGORY_OF = {"communication": "communication", "memcpy/memset": "copies"}


def _present(*segments: _Segment) -> list[_Segment]:
    """The segments that are longer than zero."""
    return [segment for segment in segments if segment[0] < segment[1]]


def _described(path: list[_Segment], work: pl.DataFrame) -> pl.DataFrame:
    """The path's segments by time, with family, phase and name for device work."""
    frame = pl.DataFrame(
        path[::-1],
        schema={"start_ns": pl.Int64, "end_ns": pl.Int64, "category": pl.Enum(CATEGORIES), "row": pl.Int64},
        orient="row",
    )
    places = work.select("family", "phase", "name")[frame["row"].fill_null(0)]
    on_device = frame["row"].is_not_null()
    return frame.select("start_ns", (pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns"), "category").hstack(
        places.select(pl.when(on_device).then(pl.col(name)).alias(name) for name in places.columns)
    )


GEMM = "matrix multiplication"
OUTSIDE = "outside"
"""The phase of work launched outside the three phases, or by no recorded call."""


NO_MODULE = "?"
"""The module of work of which none is known."""


def layers_together(column: str) -> pl.Expr:
    """The names of modules with the number of a layer as `*`; "?" for null."""
    return pl.col(column).cast(pl.String).fill_null(NO_MODULE).str.replace_all(r"(^|\.)\d+(\.|$)", "${1}*${2}")


LAYERS_TOGETHER = layers_together("module")


class PhaseSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of the step. Times and counts are per step.

    `kernels` does not count graphs recorded as a whole. `range_ns` is the time that the phase's range was open on the
    host; None outside. `product_kernels` counts matrix products, without the second passes of split products; None on a
    CPU, whose operators call one another. `expected_products` follows from the model's sizes, if a run has them.
    `unprofiled_s` is the phase's median without a profiler, by the device's clock. `span_ns` is the time from the
    start of its first kernel to the end of its last on the device; None on a CPU, where kernels of other phases run
    between, and in older digests. `found_by` is how the phase of most of this time was found (attribution.FOUND_BY);
    None outside, and in older digests.
    """

    phase: str
    kernels: float
    busy_ns: float
    gemm_ns: float
    range_ns: float | None
    product_kernels: float | None
    expected_products: int | None
    unprofiled_s: float | None
    found_by: str | None = None
    span_ns: float | None = None

    @property
    def gemm_fraction(self) -> float:
        return self.gemm_ns / self.busy_ns if self.busy_ns else 0.0


class KernelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel within one phase, or within forward and backward together, per step.

    `share` is the share of the kernel time of all such rows: of the phase, of both phases, or of softmax.
    """

    phase: str
    name: str
    family: str
    calls: float
    busy_ns: float
    share: float


class AttentionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One part of attention in forward, per step: its time and its FLOPs. FLOPs are None if no run has the sizes."""

    part: str
    busy_ns: float
    flops: int | None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a summary: work launched in this step, in this phase, inside ranges of this name, in this module or
    one inside it, on this device and this stream, or that started between these nanoseconds from the first event.

    `instances`: the ranges that launched some of this work, if a range is named. `whole`: the whole capture.
    """

    step: int | None
    phase: str | None
    range: str | None
    instances: int | None
    whole: Attribution
    module: str | None = None
    device: int | None = None
    stream: int | None = None
    between: Window | None = None

    @property
    def places(self) -> dict[str, str | int | Window]:
        """The limits that are no step, phase or range, by their names."""
        named = {"module": self.module, "device": self.device, "stream": self.stream, "between_ns": self.between}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def words(self) -> str:
        """The part in words: `forward of step 1, inside range softmax`."""
        step = f"step {self.step}" if self.step is not None else ""
        inside = f"range {name_shown(self.range)}" if self.range is not None else ""
        launched = ", inside ".join(filter(None, (" of ".join(filter(None, (self.phase, step))), inside)))
        places = [f"{what} {name_shown(str(value))}" for what, value in self.places.items() if what != "between_ns"]
        times = [f"from {ms_text(self.between.begin_ns)} to {ms_text(self.between.end_ns)} ms"] if self.between else []
        return ", ".join(filter(None, (launched, *places, *times)))


class TraceSummary(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The tables of one capture, or of a part of it. `run` is the run that made the capture, if it is beside one."""

    attribution: Attribution
    run: Run | None
    part: Part | None = None

    @property
    def ranged(self) -> bool:
        """Whether the summary covers only ranges of one name."""
        return self.part is not None and self.part.range is not None

    @property
    def has_whole_steps(self) -> bool:
        """Whether the summary has all phases and ranges, so that idle time has a meaning."""
        return self.part is None or (self.part.phase is None and not self.ranged and not self.part.places)

    @cached_property
    def _kernels(self) -> pl.DataFrame:
        """The totals of kernels, whole graphs and operators, in phases or outside."""
        return self.attribution.totals.filter(
            ~pl.col("kind").is_in(pl.Series(COPIES, dtype=KIND).implode())
        ).with_columns(pl.col("phase").cast(pl.String).fill_null(OUTSIDE))

    @cached_property
    def phase_names(self) -> list[str]:
        """The phases in which some kernel ran, in the order of a step."""
        present = set(self._kernels["phase"].unique().to_list())
        return [phase for phase in (*PHASES, OUTSIDE) if phase in present]

    @property
    def steps(self) -> int:
        return self.attribution.steps

    @property
    def kernel_count(self) -> int:
        """The number of kernels (on a CPU: operators) in the capture, without whole graphs."""
        return int(self._kernels.filter(pl.col("kind") != "graph")["calls"].sum())

    @property
    def busy_ns(self) -> int:
        """The sum of the durations of all kernels and of graphs recorded as a whole."""
        return int(self._kernels["duration_ns"].sum())

    @property
    def union_ns(self) -> int:
        """The time during which at least one kernel or graph ran, summed over devices."""
        if self.attribution.table.on_cpu:  # an operator's own time is scattered over its duration, which counts here
            operators = self.attribution.table.operators
            of_part = operators if self.part is None else operators[self.attribution.work["operator_row"]]
            merged = union(of_part, ["process"])
        else:
            merged = union(self.attribution.kernels, ["process", "device"])
        return int((merged["end_ns"] - merged["start_ns"]).sum())

    @property
    def unattributed_ns(self) -> int:
        """The kernel time outside all named ranges."""
        return int(self._kernels.filter(~pl.col("ranged"))["duration_ns"].sum())

    @property
    def copies(self) -> tuple[int, int]:
        """The number of copies and fills, and their summed duration in nanoseconds."""
        rest = self.attribution.work.height - self.attribution.kernels.height
        return rest, self.attribution.busy_ns - self.busy_ns

    @cached_property
    def phases(self) -> tuple[PhaseSummary, ...]:
        """Each phase's device time beside the unprofiled time (question (a)) and its matrix products (question (d))."""
        products = self._kernels.filter(pl.col("family") == GEMM)["name"].unique()
        second = [name for name in products.to_list() if decode(name).second_pass]
        is_gemm = pl.col("family") == GEMM
        first_pass = is_gemm & ~pl.col("name").is_in(pl.Series(second, dtype=pl.Categorical()).implode())
        totals = {
            row["phase"]: row
            for row in self._kernels.group_by("phase")
            .agg(
                pl.col("calls").filter(pl.col("kind") != "graph").sum().alias("kernels"),
                pl.col("duration_ns").sum().alias("busy"),
                pl.col("duration_ns").filter(is_gemm).sum().alias("gemm"),
                pl.col("calls").filter(first_pass).sum().alias("products"),
            )
            .iter_rows(named=True)
        }
        ways = self._kernels.group_by("phase", "found_by").agg(pl.col("duration_ns").sum()).sort("duration_ns")
        found_by = dict(ways.select("phase", "found_by").iter_rows())  # of a phase, the longest comes last
        return tuple(self._phase(phase, totals[phase], found_by[phase]) for phase in self.phase_names)

    def _phase(self, phase: str, total: dict, found_by: str | None) -> PhaseSummary:
        # Ranges hold only a part of a phase, so they are not compared with figures of the whole phase.
        run = None if self.ranged else self.run
        opened = self.attribution.instances.filter(pl.lit(not self.ranged) & (pl.col("what") == phase))
        sample = run.samples.get(phase) if run else None
        on_cpu = self.attribution.table.on_cpu
        return PhaseSummary(
            phase=phase,
            kernels=total["kernels"] / self.steps,
            busy_ns=total["busy"] / self.steps,
            gemm_ns=total["gemm"] / self.steps,
            range_ns=int((opened["end_ns"] - opened["start_ns"]).sum()) / self.steps if opened.height else None,
            product_kernels=None if on_cpu else total["products"] / self.steps,
            expected_products=(
                by_sizes(run.workload, lambda sized: _expected_products(sized, phase)) if run and not on_cpu else None
            ),
            unprofiled_s=sample.median_s if sample and sample.count else None,
            found_by=found_by,
            span_ns=self._spans.get(phase),
        )

    @cached_property
    def _spans(self) -> dict[str, float]:
        """By phase, the time from its first kernel to its last on the device, per step: its range projected there."""
        attribution = self.attribution
        if attribution.table.on_cpu or self.ranged or not attribution.kernels.height:
            return {}
        ordered = attribution.kernels.select("device", "phase", "kind", "start_ns", "duration_ns")
        if not (is_one_value(values_of(ordered, "device")) and ordered["start_ns"].is_sorted()):
            ordered = ordered.sort("device", "start_ns")
        end_ns = (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns")
        times = ("device", "phase", "start_ns", end_ns)
        slices = ordered.iter_slices(1 << 18)
        parts = [_passes(some.filter(pl.col("kind") != "graph").select(times)) for some in slices]
        passes = (
            _passes(pl.concat(parts))
            .group_by("phase")
            .agg(pl.len().alias("passes"), (pl.col("end_ns") - pl.col("start_ns")).sum().alias("span"))
        )
        opened = Counter(attribution.instances["what"].to_list())
        devices = values_of(attribution.kernels, "device").n_unique()
        return {
            row["phase"]: row["span"] / self.steps / devices
            for row in passes.iter_rows(named=True)
            if row["phase"] is not None and row["passes"] <= devices * max(opened[row["phase"]], self.steps)
        }

    @property
    def gemm_fraction(self) -> float:
        """The share of matrix multiplication in all kernel time."""
        gemm = int(self._kernels.filter(pl.col("family") == GEMM)["duration_ns"].sum())
        return gemm / self.busy_ns if self.busy_ns else 0.0

    @cached_property
    def families(self) -> pl.DataFrame:
        """Calls and busy_ns per step, by family and phase (columns family, phase, calls, busy_ns)."""
        return self._by_family(self._kernels)

    @cached_property
    def generated(self) -> pl.DataFrame:
        """The part of `families` whose kernels a compiler generated, with the same columns."""
        names = [name for name in self._kernels["name"].unique().to_list() if is_generated(name)]
        named = pl.col("name").is_in(pl.Series(names, dtype=pl.Categorical()).implode())
        return self._by_family(self._kernels.filter(named))

    def _by_family(self, kernels: pl.DataFrame) -> pl.DataFrame:
        return (
            kernels.group_by("family", "phase")
            .agg(pl.col("calls").sum() / self.steps, (pl.col("duration_ns").sum() / self.steps).alias("busy_ns"))
            .with_columns(pl.col("family").cast(pl.String))
            .sort("busy_ns", "family", "phase", descending=[True, False, False])
        )

    def top_kernels(self, phase: str, top: int = 5, *, without_products: bool = False) -> list[KernelRow]:
        """The longest kernels of a phase (question (b)), optionally without matrix products (question (c))."""
        mine = self._kernels.filter(pl.col("phase") == phase)
        chosen = mine.filter(pl.col("family") != GEMM) if without_products else mine
        return self._longest(chosen, phase, int(mine["duration_ns"].sum()), top)

    def top_together(self, top: int = 5) -> list[KernelRow]:
        """The longest kernels of forward and backward together; none if the capture lacks one of the two."""
        if not {FORWARD, BACKWARD} <= set(self.phase_names):
            return []
        mine = self._kernels.filter(pl.col("phase").is_in([FORWARD, BACKWARD]))
        return self._longest(mine, FORWARD_AND_BACKWARD, int(mine["duration_ns"].sum()), top)

    def other_kernels(self, top: int = 5) -> list[KernelRow]:
        """The longest kernels of no known family; their shares are of all kernel time. A whole graph is not one."""
        mine = self._kernels.filter((pl.col("family") == "other") & (pl.col("kind") != "graph"))
        return self._longest(mine, "all", self.busy_ns, top)

    def softmax_kernels(self, top: int = 5) -> list[KernelRow]:
        """The kernels of softmax in forward; none if attention has no range for softmax."""
        inside = self._kernels.filter((pl.col("phase") == FORWARD) & (pl.col("part").cast(pl.String) == SOFTMAX))
        return self._longest(inside, FORWARD, int(inside["duration_ns"].sum()), top)

    def _longest(self, kernels: pl.DataFrame, phase: str, total: int, top: int) -> list[KernelRow]:
        """The longest kernels by name, the longest first. `total`: the nanoseconds of a share of 1."""
        rows = (
            kernels.group_by("name", "family")
            .agg(pl.col("calls").sum(), pl.col("duration_ns").sum().alias("busy_ns"))
            .with_columns(pl.col("name").cast(pl.String))
            .sort(["busy_ns", "name"], descending=[True, False])
            .head(top)
        )
        return [
            KernelRow(
                phase=phase,
                name=row["name"],
                family=row["family"],
                calls=row["calls"] / self.steps,
                busy_ns=row["busy_ns"] / self.steps,
                share=row["busy_ns"] / total if total else 0.0,
            )
            for row in rows.iter_rows(named=True)
        ]

    @cached_property
    def modules(self) -> pl.DataFrame:
        """The number of `layers` and busy_ns per step by phase, for each module (`blocks.*.attention` for all layers).

        The module is the innermost whose range was open. The rest of a phase belongs to the model itself, module "".
        """
        return (
            self._kernels.with_columns(LAYERS_TOGETHER.alias("pattern"))
            .group_by("pattern", "phase")
            .agg(
                pl.col("module").n_unique().alias("layers"),
                (pl.col("duration_ns").sum() / self.steps).alias("busy_ns"),
                (pl.col("duration_ns").filter(pl.col("family") == GEMM).sum() / self.steps).alias("gemm_ns"),
            )
            .rename({"pattern": "module"})
            .sort("busy_ns", "module", "phase", descending=[True, False, False])
        )

    @cached_property
    def places(self) -> pl.DataFrame:
        """Kernel time per step by module, named as in `modules`, and family (columns module, family, busy_ns)."""
        return (
            self._kernels.group_by(LAYERS_TOGETHER.alias("module"), pl.col("family").cast(pl.String))
            .agg((pl.col("duration_ns").sum() / self.steps).alias("busy_ns"))
            .sort("busy_ns", "module", "family", descending=[True, False, False])
        )

    @property
    def has_modules(self) -> bool:
        """Whether any kernel has a module other than the model itself."""
        return bool((self.modules["module"] != ROOT).any())

    @cached_property
    def attention(self) -> tuple[AttentionRow, ...]:
        """Softmax beside the two products of attention in forward (question (e)); empty if no part has a range.

        The scores' range also holds scaling and mask. These are separate rows, so that only the product is compared.
        """
        inside = self._kernels.filter((pl.col("phase") == FORWARD) & pl.col("part").is_not_null())
        if not inside.height:
            return ()
        is_gemm = pl.col("family") == GEMM
        part = pl.col("part").cast(pl.String)
        scores, softmax, output = ATTENTION_PARTS
        workload = self.run.workload if self.run else None
        counted = by_sizes(workload, product_and_softmax_flops) if workload else None
        product, of_softmax = counted or (None, None)
        chosen = (
            ("scores product (Q K^T)", (part == scores) & is_gemm, product),
            ("scale and mask", (part == scores) & ~is_gemm, None),
            ("softmax", part == softmax, of_softmax),
            ("output product (P V)", (part == output) & is_gemm, product),
        )
        return tuple(
            AttentionRow(part=name, busy_ns=int(inside.filter(rows)["duration_ns"].sum()) / self.steps, flops=flops)
            for name, rows, flops in chosen
        )

    @cached_property
    def roofline(self) -> Roofline | None:
        """Operators and families against the device's peaks (question (f)); None if no operators were recorded.

        Peaks are the run's measured ceilings and its datasheet, or the datasheet of the device that the trace names.
        """
        if not self.attribution.table.operators.height:
            return None
        spec, ceilings = (self.run.device_spec, self.run.ceilings) if self.run else (None, None)
        # Written-out attention computes the full square and masks it. A fused kernel skips the masked half.
        fused = (self._kernels["family"].cast(pl.String) == "attention (fused)").any()
        return roofline(self.attribution, spec, ceilings, causal="half" if fused else "full")

    @cached_property
    def occupation(self) -> Occupation | None:
        """The occupation of each device; None on a CPU, and for a phase or a range."""
        return occupation(self.attribution) if self.has_whole_steps else None

    @cached_property
    def overlaps(self) -> tuple[Overlap, ...]:
        """The communication that hides behind computation, by device."""
        return overlap(self.attribution) if self.has_whole_steps else ()

    @cached_property
    def critical_path(self) -> CriticalPath | None:
        """The critical path of one step; None on a CPU."""
        if self.part is None:
            return critical_path(self.attribution)
        return critical_path(self.part.whole, step=self.part.step) if self.has_whole_steps else None

    @cached_property
    def roles(self) -> dict[str, float]:
        """Kernel time per step for gradient accumulation, recomputation and communication."""
        totals = self._kernels.group_by("role").agg(pl.col("duration_ns").sum())
        by_role = dict(totals.iter_rows())
        wanted = (GRADIENT_ACCUMULATION, RECOMPUTATION, "communication")
        return {role: by_role[role] / self.steps for role in wanted if by_role.get(role)}


def _passes(times: pl.DataFrame) -> pl.DataFrame:
    """Times by device and start (device, phase, start_ns, end_ns), those of one phase that follow each other as one."""
    place = ("device", "phase")
    changes = pl.any_horizontal(pl.col(name).ne_missing(pl.col(name).shift(1)).fill_null(True) for name in place)
    numbered = times.with_columns(changes.cum_sum().alias("pass")).with_columns(pl.col("pass").set_sorted())
    return (
        numbered.group_by("pass", maintain_order=True)
        .agg(pl.col(place).first(), pl.col("start_ns").min(), pl.col("end_ns").max())
        .drop("pass")
    )


def _expected_products(workload: TextbookWorkload, phase: str) -> int | None:
    """The number of matrix products of a phase by the model's sizes. Each product of forward has two in backward.

    Each micro-batch runs all of them. Checkpointing runs products again in backward.
    """
    if scores_of(workload.attention) == "pieces":
        return None
    forward, again = product_counts(workload)
    counts = {FORWARD: forward, BACKWARD: 2 * forward + again}
    return counts[phase] * workload.accumulation if phase in counts else None
