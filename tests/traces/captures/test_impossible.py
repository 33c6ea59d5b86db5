"""Captures that cannot be true: each is planted in three steps of ten products of 100 us, found, counted and said."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stepscope.core.answer import Finding
from stepscope.rendering.chrome_trace import write_cut
from stepscope.traces.captures.attribution import attribute
from stepscope.traces.captures.checks import check_trace
from stepscope.traces.captures.digest import read_trace
from stepscope.traces.captures.summary import TraceSummary

STEPS, PRODUCTS, LONG_US = 3, 10, 100.0
GEMM = "ampere_bf16_s16816gemm_bf16_128x128"
SAID = {"times-missing", "durations-cut", "clocks-disagree", "incomplete-trace", "ends-before-begin", "texts-mended"}
Event = dict[str, Any]


def capture(*, graph: bool = False, base_us: float = 1e6, call: str = "cudaLaunchKernel") -> list[Event]:
    """Kernels of 100 us, a launch every 110 us, on stream 7; or the kernels of three replays of a graph."""
    events: list[Event] = []
    for n in range(STEPS * PRODUCTS):
        step, place = divmod(n, PRODUCTS)
        at = base_us + step * 2000 + 10 + place * 110
        one = step + 1 if graph else n + 1
        if not graph or not place:
            name = "cudaGraphLaunch" if graph else call
            row = {"cat": "cuda_runtime", "name": name, "pid": 1, "tid": 1, "ts": at, "dur": 6.0}
            events.append({"ph": "X", **row, "args": {"correlation": one}})
        arguments = {"device": 0, "stream": 7, "correlation": one} | ({"graph node id": place + 1} if graph else {})
        row = {"cat": "kernel", "name": GEMM, "pid": 0, "tid": 7, "ts": at + 10, "dur": LONG_US}
        events.append({"ph": "X", **row, "args": arguments})
    return events


def kernels(events: list[Event]) -> list[Event]:
    return [event for event in events if event["cat"] == "kernel"]


def summary_of(events: list[Event], folder: Path) -> TraceSummary:
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return summary_at(path)


def summary_at(path: Path) -> TraceSummary:
    attribution = attribute(read_trace(path))
    attribution.self_check()
    return TraceSummary(attribution=attribution, run=None)


def said(summary: TraceSummary) -> dict[str, Finding]:
    """The findings on what cannot be true."""
    return {finding.kind: finding for finding in check_trace(summary) if finding.kind in SAID}


@pytest.mark.parametrize("base_us", [0.0, 1e6, 1.79e15])
@pytest.mark.parametrize("graph", [False, True])
def test_a_clean_capture_is_silent(tmp_path: Path, graph: bool, base_us: float):
    summary = summary_of(capture(graph=graph, base_us=base_us), tmp_path)
    assert (said(summary), summary.busy_ns) == ({}, 3_000_000)


def test_kernels_of_a_graph_may_run_much_later(tmp_path: Path):
    events = capture(graph=True)
    for n, kernel in enumerate(kernels(events)):
        kernel["ts"] = 1e6 + 3 * 2000 + n * 110
    assert said(summary_of(events, tmp_path)) == {}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    ("place", "long_us", "left_us"), [(12, 1_600_000.0, 110), (12, 900.0, 110), (0, 5_000.0, 110), (9, 1e9, 1010)]
)
def test_a_kernel_that_outlasts_its_successors_is_cut(
    tmp_path: Path, place: int, long_us: float, left_us: int, graph: bool
):
    """At the next start on its stream; within a graph, whose branches run side by side, at the next launch's."""
    events = capture(graph=graph)
    kernels(events)[place]["dur"] = long_us
    summary = summary_of(events, tmp_path)
    if graph:
        left_us = 2000 - place % 10 * 110
    if graph and long_us < left_us:
        assert said(summary) == {}
        return
    found = said(summary)["durations-cut"]
    assert summary.busy_ns == (29 * 100 + left_us) * 1000
    assert found.evidence == {
        "kernels": 1,
        "cut_ns": round((long_us - left_us) * 1000),
        "recorded_ns": round((29 * 100 + long_us) * 1000),
    }


def test_the_last_but_one_is_cut_where_its_successor_cannot_begin_early(tmp_path: Path):
    for call, cut in (("cudaLaunchKernel", True), ("cudaLaunchKernelExC", False), ("cuLaunchKernelEx", False)):
        events = capture(call=call)
        kernels(events)[28]["dur"] = 400.0
        assert ("durations-cut" in said(summary_of(events, tmp_path))) is cut


@pytest.mark.parametrize("early_us", [1.0, 4.0, 60.0])
def test_kernels_that_begin_early_overlap_and_count_once(tmp_path: Path, early_us: float):
    """Programmatic dependent launch: each begins before the one before it ends, and ends after it."""
    events = capture(call="cudaLaunchKernelExC")
    for n, kernel in enumerate(kernels(events)):
        kernel["ts"] = 1e6 + 5000 + n * (LONG_US - early_us)
    summary = summary_of(events, tmp_path)
    assert (said(summary), summary.busy_ns) == ({}, 3_000_000)
    assert summary.union_ns == round((29 * (LONG_US - early_us) + LONG_US) * 1000)


def test_long_work_of_another_stream_is_not_cut(tmp_path: Path):
    events = capture()
    for changes in ({"stream": 20}, {"device": 1}):
        other = kernels(events)[12]
        other["dur"], other["args"] = 9_000.0, other["args"] | changes
        assert said(summary_of(events, tmp_path)) == {}


@pytest.mark.parametrize("base_us", [1e6, 1.79e15])
@pytest.mark.parametrize("no_time", [0, -1.79e15, 9.2e15, None])
def test_kernels_whose_times_were_not_collected(tmp_path: Path, base_us: float, no_time: float | None):
    """CUPTI writes 0, which a profiler that subtracts its origin makes the origin's negative."""
    events = capture(base_us=base_us)
    for kernel in kernels(events)[:12]:
        kernel["ts"], kernel["dur"] = no_time, 0
    summary = summary_of(events, tmp_path)
    found = said(summary)["times-missing"]
    assert (found.severity, found.evidence) == (
        "error", {"no_start": 12, "no_duration": 12, "rows": 30, "share": 0.4}
    )  # fmt: skip
    assert summary.kernel_count == 30 and summary.busy_ns == 1_800_000
    assert summary.occupation is not None and summary.occupation.span_ns < 6_000_000, "they stand at their launch"


def test_a_start_or_a_duration_alone_is_missing(tmp_path: Path):
    events = capture()
    for kernel in kernels(events)[3:5]:
        kernel["ts"] = 0
    for kernel in kernels(events)[20:25]:
        kernel["dur"] = 0
    summary = summary_of(events, tmp_path)
    found = said(summary)
    assert set(found) == {"times-missing"} and summary.busy_ns == 2_500_000
    assert found["times-missing"].evidence == {"no_start": 2, "no_duration": 5, "rows": 30, "share": 5 / 30}
    assert "2 of 30 kernels, copies and fills have no start" in found["times-missing"].sentence
    assert "5 of 30 kernels, copies and fills have a duration of 0" in found["times-missing"].sentence


def test_fills_shorter_than_the_clock_counts_are_none(tmp_path: Path):
    """Older versions write whole microseconds: a small fill takes 0. Beside exact times, 0 is none."""
    events = capture()
    fill = {"cat": "gpu_memset", "name": "Memset (Device)", "dur": 0}
    fills = [kernel | fill | {"ts": kernel["ts"] + 105} for kernel in kernels(events)[:20]]
    assert said(summary_of([*events, *fills], tmp_path)) == {}
    kernels(events)[3]["dur"] = 100.5
    found = said(summary_of([*events, *fills], tmp_path))["times-missing"]
    assert (found.evidence["no_start"], found.evidence["no_duration"]) == (0, 20)


@pytest.mark.parametrize(("by_us", "count"), [(30.0, 30), (12.0, 30), (9.5, 0)])
def test_kernels_before_their_launch(tmp_path: Path, by_us: float, count: int):
    events = capture()
    for kernel in kernels(events):
        kernel["ts"] -= by_us
    summary = summary_of(events, tmp_path)
    assert summary.busy_ns == 3_000_000
    if not count:
        assert said(summary) == {}
        return
    found = said(summary)["clocks-disagree"]
    assert (found.evidence["rows"], found.evidence["of"]) == (count, 30)
    assert found.evidence["most_ns"] == round((by_us - 10) * 1000)


@pytest.mark.parametrize("factor", [1000.0, 0.001])
def test_a_device_clock_in_another_unit(tmp_path: Path, factor: float):
    events = capture()
    for kernel in kernels(events):
        kernel["ts"] *= factor
    assert said(summary_of(events, tmp_path))["clocks-disagree"].evidence["rows"] == 30


@pytest.mark.parametrize("lost", [range(10), range(20, 30), range(4, 7), range(12, 16)])
def test_launches_without_a_kernel(tmp_path: Path, lost: range):
    events = capture()
    gone = [kernels(events)[n] for n in lost]
    found = said(summary_of([event for event in events if event not in gone], tmp_path))["incomplete-trace"]
    assert found.evidence == {"launches": 30, "without_kernel": len(lost), "kernels": 30 - len(lost)}


@pytest.mark.parametrize("thread", [1, 2])
def test_launches_into_a_graph_that_is_captured_leave_no_kernel(tmp_path: Path, thread: int):
    """The launching thread is the one that captures, or autograd's, which launches into the same stream."""
    events = capture()
    for number, (name, at) in enumerate([("cudaStreamBeginCapture", 9e5), ("cudaStreamEndCapture", 9.9e5)]):
        events.append({**events[0], "name": name, "ts": at, "args": {"correlation": 900 + number}})
    for n in range(40):
        events.append({**events[0], "ts": 9e5 + 100 + n * 20, "tid": thread, "args": {"correlation": 1000 + n}})
    assert said(summary_of(events, tmp_path)) == {}
    later = [{**events[0], "ts": 9.95e5 + n * 10, "tid": 1, "args": {"correlation": 2000 + n}} for n in range(12)]
    assert said(summary_of([*events, *later], tmp_path))["incomplete-trace"].evidence["without_kernel"] == 12


@pytest.mark.parametrize("maker", ["cuda", "hip"])
def test_a_stream_whose_capture_began_before_the_trace_did(tmp_path: Path, maker: str):
    events = capture(call=f"{maker}LaunchKernel")
    for n in range(40):
        events.append({**events[0], "ts": 9e5 + n * 20, "args": {"correlation": 1000 + n}})
    assert said(summary_of(events, tmp_path))["incomplete-trace"].evidence["without_kernel"] == 40
    events.append({**events[0], "name": f"{maker}StreamEndCapture", "ts": 9.1e5, "args": {"correlation": 900}})
    assert said(summary_of(events, tmp_path)) == {}


@pytest.mark.parametrize("cats", [("kernel",), ("cuda_runtime",), ("kernel", "cuda_runtime")])
def test_what_no_id_ties_is_not_called_lost(tmp_path: Path, cats: tuple[str, ...]):
    """Launches are said to be unknown then. That kernels are missing is said only of those that are."""
    events = capture()
    for event in events:
        if event["cat"] in cats:
            del event["args"]["correlation"]
    summary = summary_of(events, tmp_path)
    assert said(summary) == {}
    assert "launches-unknown" in {finding.kind for finding in check_trace(summary)}
    gone = kernels(events)[10:20]
    found = said(summary_of([event for event in events if event not in gone], tmp_path))
    assert found["incomplete-trace"].evidence == {"launches": 30, "without_kernel": 10, "kernels": 20}


def nsys(events: list[Event], folder: Path) -> Path:
    """The events as an export of Nsight Systems."""
    path = folder / "t.sqlite"
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        names = {name: n for n, name in enumerate(sorted({event["name"] for event in events}))}
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(n, name) for name, n in names.items()])
        database.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, "
            "correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, graphNodeId INTEGER)"
        )
        database.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, "
            "correlationId INTEGER, nameId INTEGER)"
        )
        for event in events:
            start, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
            one, name = event["args"]["correlation"], names[event["name"]]
            if event["cat"] == "kernel":
                node = event["args"].get("graph node id")
                row: tuple[Any, ...] = (start, end, 0, event["args"]["stream"], one, 1 << 24, name, node)
                database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            else:
                row = (start, end, (1 << 24) + event["tid"], one, name)
                database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", row)
    return path


@pytest.mark.parametrize(
    ("kind", "changes", "busy_ns"),
    [
        (None, {}, 3_000_000),
        ("durations-cut", {"dur": 1_600_000.0}, 3_010_000),
        ("times-missing", {"ts": 0, "dur": 0}, 2_900_000),
        ("clocks-disagree", {"ts": 1e6 + 2000}, 3_000_000),
    ],
)
def test_the_same_of_an_export_of_nsight(tmp_path: Path, kind: str | None, changes: dict[str, float], busy_ns: int):
    events = capture()
    kernels(events)[12] |= changes
    summary = summary_at(nsys(events, tmp_path))
    assert set(said(summary)) == ({kind} if kind else set())
    assert summary.busy_ns == busy_ns


def cut_again(events: list[Event], folder: Path) -> TraceSummary:
    write_cut(summary_of(events, folder).attribution, folder / "cut.json")
    return summary_at(folder / "cut.json")


@pytest.mark.parametrize("by_us", [30.0, 0.0])
def test_a_cut_invents_no_fault(tmp_path: Path, by_us: float):
    """Its first kernel, which skewed clocks put before its launch, does not stand at 0, as if it had no time."""
    events = capture()
    for kernel in kernels(events):
        kernel["ts"] -= by_us
    assert set(said(cut_again(events, tmp_path))) == ({"clocks-disagree"} if by_us else set())


def test_a_cut_of_kernels_whose_launches_nobody_recorded(tmp_path: Path):
    """As a window of an export of Nsight Systems may hold them: no call and no operator begins in it."""
    events = kernels(capture())
    again = cut_again(events, tmp_path)
    assert again.busy_ns == summary_of(events, tmp_path).busy_ns == STEPS * PRODUCTS * LONG_US * 1000


@pytest.mark.parametrize("of_calls", [False, True])
def test_a_cut_keeps_launches_that_arrows_told(tmp_path: Path, of_calls: bool):
    events = capture()
    for event in capture():
        on_device = event["cat"] == "kernel"
        arrow = {"cat": "ac2g", "name": "ac2g", "id": event["args"]["correlation"], "ph": "f" if on_device else "s"}
        events.append({**{name: event[name] for name in ("pid", "tid", "ts")}, **arrow})
    for event in events[:60]:
        if not of_calls or event["cat"] == "kernel":
            del event["args"]["correlation"]
    before = summary_of(events, tmp_path).attribution.work
    after = cut_again(events, tmp_path).attribution.work
    assert after["launch_row"].null_count() == 0
    for work in (before, after):
        assert (work["start_ns"] - work["launch_ns"]).unique().to_list() == [10_000]
