"""The critical path of one step: the chain of device work, launches and host time that its end waited for.

A step lasts from the end of the previous step's last device work (for the first step: from its first launch call) to
the end of its own last work. So the steps tile the device's time. The walk goes back from that end. At the start of
each work W it asks what W waited for last. On the device this is D: the work before W on its stream, if that ended at
most `KERNEL_LATENCY_NS` before W, or else the work that ended last on any stream before W began. The launch of W was
too late if its call began less than `LAUNCH_NS` before D's end, or after it.

- In time: the path continues with D. The time between is kernel-to-kernel latency or, if longer, dependency.
- Too late: the time from the launch call to the start of W is launch. Before the call, the host delayed the step. The
  path follows the host back to the last wait for the device (on a thread that launches work) that the end of some work
  released, and continues with that work. The time from that end to the return of the wait is synchronisation. Without
  such a wait, the host's time reaches back to the start of the step.
- Too late, though the device worked for most of the time from that wait to W: a quicker host would gain no more than
  the gap before W. So only the gap is host and launch, and the path continues with D.

The segments sum to the step exactly. On a step that is mostly launch-bound the path is the host's.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

import polars as pl

from stepscope.traces.captures.attribution import Attribution
from stepscope.traces.captures.occupation import KERNEL_LATENCY_NS, LAUNCH_NS, covered_ns, pieces, waits

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


@dataclass(frozen=True, kw_only=True)
class CriticalPath:
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
    work = attribution.work.filter(pl.col("duration_ns") > 0)
    if attribution.table.on_cpu or not work.height:
        return None
    end_ns = pl.col("start_ns") + pl.col("duration_ns")
    if device is None:
        device = int(work.sort(end_ns, "device")["device"].to_list()[-1])
    work = work.filter(pl.col("device") == device).with_columns(end_ns.alias("end_ns"))
    steps = step_windows(work)
    if step is not None:
        steps = steps.filter(pl.col("step") == step)
    if not steps.height:
        return None
    chosen, begin, end = _median(steps)
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


def step_windows(work: pl.DataFrame) -> pl.DataFrame:
    """The steps of one device's work: step, begin_ns, end_ns. If no step is marked, all work is one step (null)."""
    marked = work.filter(pl.col("step").is_not_null())
    first_call = pl.min_horizontal("launch_ns", "start_ns").min().alias("first_ns")
    steps = (
        (marked if marked.height else work)
        .group_by("step")
        .agg(first_call, pl.col("end_ns").max())
        .sort("end_ns", "step")
    )
    begin = pl.coalesce(pl.col("end_ns").shift(1), "first_ns").alias("begin_ns")
    return steps.select("step", begin, "end_ns").filter(pl.col("begin_ns") < pl.col("end_ns"))


def _median(steps: pl.DataFrame) -> tuple[int | None, int, int]:
    """The step of median duration (the shorter of two), without the first if there are others: it is measured apart."""
    rest = steps[1:] if steps.height > 1 else steps
    ordered = rest.sort(pl.col("end_ns") - pl.col("begin_ns"), "begin_ns")
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
