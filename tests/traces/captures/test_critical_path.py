"""The chain that a step's end waited for: by hand, and against a walk that scans all work at every turn."""

from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.traces.captures.occupation import KERNEL_LATENCY_NS, LAUNCH_NS
from stepscope.traces.captures.summary import CriticalPath, critical_path
from tests.handmade_trace import GEMM, REDUCE, SOFTMAX, traced, work

pytestmark = pytest.mark.slow


def path_of(rows: list[dict[str, Any]], **others: Any) -> CriticalPath:
    found = critical_path(traced(rows, **others))
    assert found is not None
    found.self_check()
    return found


def told(path: CriticalPath) -> list[tuple[str, int]]:
    return path.segments.select("category", "duration_ns").rows()


def test_a_busy_device_is_its_own_path():
    path = path_of([work(10_000, 50_000, launch=0), work(51_000, 90_000, launch=5_000, name=SOFTMAX)])
    assert told(path) == [
        ("launch", 10_000),
        ("computation", 40_000),
        ("kernel-to-kernel latency", 1_000),
        ("computation", 39_000),
    ]
    assert (path.step, path.duration_ns) == (None, 90_000)
    assert path.segments["family"].to_list() == [None, "matrix multiplication", None, "softmax"]
    assert path.by_category.row(0) == (
        "computation",
        "matrix multiplication",
        1,
        40_000,
        pytest.approx(40 / 90),
    )
    durations = dict(path.by_category.group_by("category").agg(pl.col("duration_ns").sum()).rows())
    assert durations["computation"] + durations["launch"] == 89_000


def test_a_late_launch_leads_to_the_host():
    path = path_of([work(10_000, 20_000, launch=0), work(70_000, 80_000, launch=60_000)])
    assert told(path) == [("host", 60_000), ("launch", 10_000), ("computation", 10_000)]


def test_from_the_host_back_to_the_work_it_waited_for():
    rows = [work(10_000, 50_000, launch=0), work(90_000, 95_000, launch=80_000)]
    path = path_of(rows, calls=[("cudaDeviceSynchronize", 20_000, 53_000)])
    assert told(path) == [
        ("launch", 10_000),
        ("computation", 40_000),
        ("synchronisation", 3_000),
        ("host", 27_000),
        ("launch", 10_000),
        ("computation", 5_000),
    ]
    # A wait that found the device idle held nobody up; nor did one on a thread that launches nothing.
    assert told(path_of(rows, calls=[("cudaDeviceSynchronize", 60_000, 63_000)]))[0] == ("host", 80_000)
    assert told(path_of(rows, calls=[("cudaDeviceSynchronize", 20_000, 53_000, 99)]))[0] == ("host", 80_000)


@pytest.mark.parametrize(("gap_us", "idle"), [(10, 0.01), (400, 0.28), (900, 0.47)])
def test_a_device_that_works_most_of_the_time_is_not_the_hosts_fault(gap_us: int, idle: float):
    """Each launch is late, by the gap alone: the path is host and launch for as long as the device idles."""
    rows = [work(at, at + 1_000_000, launch=at - 3_000) for at in range(0, 100_000_000, 1_000_000 + gap_us * 1_000)]
    path = path_of(rows)
    shares = dict(path.by_category.group_by("category").agg(pl.col("share").sum()).rows())
    assert shares["computation"] == pytest.approx(1 - idle, abs=0.01)
    assert shares["host"] + shares["launch"] == pytest.approx(idle, abs=0.01)
    assert path.beside_host_ns == 0


def test_a_device_that_idles_most_of_the_time_waits_for_the_host():
    rows = [work(at, at + 1_000_000, launch=at - 3_000) for at in range(0, 100_000_000, 2_500_000)]
    path = path_of(rows)
    assert [category for category, _ in told(path)] == ["host", "launch", "computation"]
    assert path.beside_host_ns == (len(rows) - 1) * 1_000_000


def test_across_streams():
    path = path_of(
        [
            work(10_000, 60_000, launch=0),
            work(12_000, 30_000, launch=2_000, name=REDUCE, stream=20),
            work(61_000, 99_000, launch=3_000, name=REDUCE, stream=20),  # waited for stream 7
            work(100_000, 120_000, launch=4_000),  # its own stream ended long ago: waited for stream 20
            work(150_000, 160_000, launch=5_000, name="Memcpy DtoD (Device -> Device)", kind="memcpy"),
        ]
    )
    assert told(path) == [
        ("launch", 10_000),
        ("computation", 50_000),
        ("kernel-to-kernel latency", 1_000),
        ("communication", 38_000),
        ("kernel-to-kernel latency", 1_000),
        ("computation", 20_000),
        ("dependency", 30_000),
        ("copies", 10_000),
    ]


def test_the_median_step_is_taken_and_the_first_left_out():
    ranges = [("step", 0, 100), ("step", 100, 200), ("step", 200, 300), ("step", 300, 400)]
    rows = [
        work(10_000, 200_000, launch=10),
        work(201_000, 290_000, launch=110),
        work(291_000, 450_000, launch=210),
        work(451_000, 560_000, launch=310),
    ]
    path = path_of(rows, ranges=ranges)
    assert (path.step, path.start_ns, path.end_ns) == (3, 450_000, 560_000)
    assert told(path) == [("kernel-to-kernel latency", 1_000), ("computation", 109_000)]
    first = critical_path(traced(rows, ranges=ranges), step=0)
    assert first is not None and (first.start_ns, first.end_ns) == (10, 200_000)
    assert critical_path(traced(rows, ranges=ranges), step=9) is None


def test_the_device_that_was_done_last():
    rows = [work(10, 100, launch=0), work(10, 110, launch=0, device=1)]
    assert path_of(rows).device == 1
    own = critical_path(traced(rows), device=0)
    assert own is not None and own.end_ns == 100
    assert critical_path(traced(rows), device=5) is None


def test_nothing_to_walk():
    assert critical_path(traced([])) is None
    assert critical_path(traced([work(5, 5, launch=0)])) is None


def naive(rows: list[dict[str, Any]], waits: list[tuple[str, int, int]]) -> list[tuple[str, int]]:
    """The module's definition, word by word, with a scan of everything at every turn."""
    rows = [row for row in rows if row["end_ns"] > row["start_ns"]]
    begin = min(min(row["start_ns"], row["launch"]) for row in rows)
    order = sorted(rows, key=lambda row: (row["start_ns"], row["end_ns"], row["stream"]))
    by_end = sorted(order, key=lambda row: row["end_ns"])

    def last_ended(moment: int) -> dict[str, Any] | None:
        return next((row for row in reversed(by_end) if row["end_ns"] <= moment), None)

    released = [
        end for _, start, end in waits if (last := last_ended(end)) is not None and last["end_ns"] > start
    ]  # fmt: skip
    path: list[tuple[str, int]] = []
    now, until = by_end[-1], by_end[-1]["end_ns"]
    while True:
        path.append(("communication" if now["name"] == REDUCE else "computation", until - now["start_ns"]))
        start, launch = now["start_ns"], min(now["launch"], now["start_ns"])
        earlier = [row for row in order[: order.index(now)] if row["stream"] == now["stream"]]
        before = earlier[-1] if earlier and earlier[-1]["end_ns"] >= start - KERNEL_LATENCY_NS else last_ended(start)
        returned = max([end for end in released if end <= launch], default=begin)
        since = max(returned, begin)
        worked = {at for row in rows for at in range(max(row["start_ns"], since), min(row["end_ns"], start))}
        if before is not None and launch <= before["end_ns"] - LAUNCH_NS:
            gap = start - before["end_ns"]
            path.append(("kernel-to-kernel latency" if gap <= KERNEL_LATENCY_NS else "dependency", gap))
        elif before is not None and 2 * len(worked) > start - since:
            called = max(launch, before["end_ns"])
            path += [("launch", start - called), ("host", called - before["end_ns"])]
        else:
            before = last_ended(returned) if returned > begin else None
            path += [("launch", start - launch), ("host", launch - max(returned, begin))]
            if before is None:
                break
            path.append(("synchronisation", returned - max(begin, before["end_ns"])))
        now, until = before, min(before["end_ns"], start)
    return [(category, length) for category, length in reversed(path) if length > 0]


@st.composite
def schedules(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Work on three streams, each in order and without overlap, at distinct ends so that the path is unique."""
    rows: list[dict[str, Any]] = []
    ends: set[int] = set()
    for stream, name in ((7, GEMM), (8, GEMM), (20, REDUCE)):
        now = 0
        for gap, length, delay in draw(
            st.lists(
                st.tuples(
                    st.sampled_from([0, 1_000, 4_000, 4_001, 9_000]), st.integers(1, 30_000), st.integers(0, 25_000)
                ),
                max_size=6,
            )
        ):
            start = now + gap
            now = start + length
            while now in ends:
                now += 1
            ends.add(now)
            rows.append(work(start, now, launch=start - delay, stream=stream, name=name))
    return rows


@given(schedules(), st.lists(st.tuples(st.integers(-5_000, 90_000), st.integers(0, 30_000)), max_size=4))
def test_against_the_naive_walk(rows: list[dict[str, Any]], intervals: list[tuple[int, int]]):
    waits = [("cudaStreamSynchronize", start, start + length) for start, length in intervals]
    path = critical_path(traced(rows, calls=waits))
    if not rows:
        assert path is None
        return
    assert path is not None
    path.self_check()
    assert told(path) == naive(rows, waits)


@given(
    st.lists(
        st.builds(
            lambda start, length, launch, stream: work(start, start + length, launch=launch, stream=stream),
            st.integers(0, 20_000),
            st.integers(0, 9_000),
            st.none() | st.integers(-9_000, 25_000),
            st.integers(7, 9),
        ),
        max_size=15,
    )
)
def test_whatever_the_work_the_path_fills_the_step(rows: list[dict[str, Any]]):
    """Work that overlaps on its stream, launches after their work, none recorded: still one chain."""
    path = critical_path(traced(rows))
    if path is not None:
        path.self_check()
        assert (path.segments["duration_ns"] > 0).all()
