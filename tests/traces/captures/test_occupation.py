"""Why a device stood idle: every cause planted, and every span made up of work and gaps exactly."""

from pathlib import Path
from typing import Any

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from stepscope.traces.captures.attribution import attribute
from stepscope.traces.captures.digest import read_trace
from stepscope.traces.captures.occupation import (
    BETWEEN_PHASES,
    BETWEEN_STEPS,
    KERNEL_LATENCY_NS,
    LAUNCH_NS,
    Occupation,
    covered_ns,
    length_ns,
    occupation,
    pieces,
)
from tests.handmade_trace import AUTOGRAD, of_a_cpu, traced, work

DTOH, HTOD = "Memcpy DtoH (Device -> Pageable)", "Memcpy HtoD (Pageable -> Device)"


def occupied(rows: list[dict[str, Any]], **others: Any) -> Occupation:
    found = occupation(traced(rows, **others))
    assert found is not None
    found.self_check()
    return found


def causes(rows: list[dict[str, Any]], **others: Any) -> list[str]:
    return occupied(rows, **others).gaps["cause"].to_list()


def test_one_device_by_hand():
    found = occupied(
        [
            work(0, 10_000, launch=-20_000),
            work(5_000, 20_000, launch=-19_000, stream=8),  # overlaps: the union counts it once
            work(20_000, 30_000, launch=-18_000),  # touches: no gap
            work(31_000, 40_000, launch=-17_000),
            work(100_000, 110_000, launch=90_000),
        ],
        devices={0: "NVIDIA H200"},
    )
    (device,) = found.devices
    assert (device.span_ns, device.busy_ns, device.union_ns, device.idle_ns) == (110_000, 54_000, 49_000, 61_000)
    assert device.name == "NVIDIA H200" and device.idle_share == 61_000 / 110_000
    assert found.gaps.select("start_ns", "duration_ns", "cause").rows() == [
        (30_000, 1_000, "kernel-to-kernel latency"),
        (40_000, 60_000, "launch-bound"),
    ]


def test_a_launch_that_came_in_time_waited_for_the_device():
    early = [work(0, 50_000, launch=-10_000)]
    limit = 50_000 + KERNEL_LATENCY_NS
    assert causes([*early, work(limit, 90_000, launch=0)]) == ["kernel-to-kernel latency"]
    assert causes([*early, work(limit + 1, 90_000, launch=0)]) == ["dependency"]


def test_a_launch_under_way_when_the_device_ran_dry_came_too_late():
    early = [work(0, 50_000, launch=-10_000)]
    assert causes([*early, work(53_000, 90_000, launch=50_000 - LAUNCH_NS + 1)]) == ["launch-bound"]
    assert causes([*early, work(53_000, 90_000, launch=50_000 - LAUNCH_NS)]) == ["kernel-to-kernel latency"]


def test_a_launch_that_was_not_recorded_is_unknown():
    assert causes([work(0, 10, launch=-10_000), work(50_000, 60_000, launch=None)]) == ["unknown"]


def test_the_host_waited_for_the_device():
    rows = [work(0, 50_000, launch=-10_000), work(100_000, 110_000, launch=90_000)]
    for name in ("cudaDeviceSynchronize", "cudaStreamSynchronize_v3020", "hipEventSynchronize", "cudaMemcpy_v3020"):
        found = occupied(rows, calls=[(name, 10_000, 55_000)])
        assert found.gaps.select("cause", "wait").rows() == [("synchronisation", name)]
    # It began when the device had run dry already, it was over before that, or it was on another thread's account.
    assert causes(rows, calls=[("cudaDeviceSynchronize", 51_000, 55_000)]) == ["launch-bound"]
    assert causes(rows, calls=[("cudaDeviceSynchronize", 10_000, 50_000)]) == ["launch-bound"]
    assert causes(rows, calls=[("cudaDeviceSynchronize", 10_000, 55_000, 99)]) == ["launch-bound"]
    assert causes(rows, calls=[("cudaMemcpyAsync", 10_000, 55_000)]) == ["launch-bound"]
    assert causes(rows, operators=[("aten::item", 10_000, 55_000)]) == ["synchronisation"]


def test_a_wait_counts_on_the_thread_of_the_launch_before_too():
    """loss.item() waits on the main thread, and what comes next is launched by autograd's."""
    rows = [work(0, 50_000, launch=-10_000), work(100_000, 110_000, launch=90_000, thread=AUTOGRAD)]
    assert causes(rows, calls=[("cudaStreamSynchronize", 10_000, 55_000)]) == ["synchronisation"]
    # A wait that goes on while the other thread launches holds nobody up.
    assert causes(rows, calls=[("cudaStreamSynchronize", 10_000, 95_000)]) == ["launch-bound"]


def test_a_copy_to_pageable_memory_blocks_though_its_call_is_named_async():
    copy = work(20_000, 50_000, launch=10_000, name=DTOH, kind="memcpy", call="cudaMemcpyAsync", call_ns=45_000)
    rows = [work(0, 20_000, launch=-10_000), copy, work(100_000, 110_000, launch=90_000)]
    assert causes(rows) == ["synchronisation"]
    pinned = copy | {"call_ns": 5_000}
    assert causes([rows[0], pinned, rows[2]]) == ["launch-bound"]


def test_waiting_for_data():
    rows = [work(0, 50_000, launch=-10_000), work(200_000, 210_000, launch=190_000)]
    loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    wait = [("cudaDeviceSynchronize", 10_000, 55_000)]
    assert causes(rows, ranges=[(loader, 60_000, 140_000)], calls=wait) == ["data"]
    assert causes(rows, operators=[(loader, 60_000, 140_000)]) == ["data"]
    # Half of the 140 us until the launch is the limit, and only threads that launch work count.
    assert causes(rows, ranges=[(loader, 60_000, 130_000)], calls=wait) == ["synchronisation"]
    assert causes(rows, ranges=[(loader, 60_000, 140_000, 99)]) == ["launch-bound"]
    copy = work(200_000, 210_000, launch=190_000, name=HTOD, kind="memcpy", call="cudaMemcpyAsync")
    assert causes([rows[0], copy]) == ["data"]
    assert causes([rows[0], copy], calls=wait) == ["synchronisation"]


def test_where_gaps_lie():
    ranges = [("step", 0, 300), ("forward", 0, 100), ("backward", 100, 300), ("step", 300, 500), ("forward", 300, 400)]
    rows = [
        work(10_000, 11_000, launch=10),
        work(12_000, 13_000, launch=20),
        work(14_000, 15_000, launch=110),
        work(16_000, 17_000, launch=310),
        work(18_000, 19_000, launch=450),
        work(20_000, 21_000, launch=460),
        work(99_000, 99_100, launch=600),  # after the last step: outside the span
    ]
    found = occupied(rows, ranges=ranges)
    assert found.gaps["phase"].to_list() == ["forward", BETWEEN_PHASES, BETWEEN_STEPS, BETWEEN_PHASES, None]
    assert found.gaps["step"].to_list() == [0, 0, 1, 1, 1]
    assert (found.devices[0].start_ns, found.devices[0].end_ns) == (10_000, 21_000)
    assert found.by_cause.filter(pl.col("phase") == BETWEEN_PHASES).rows() == [
        (0, "kernel-to-kernel latency", BETWEEN_PHASES, 2, 2_000, 1_000)
    ]


RECORDED = Path(__file__).parents[2] / "data"
"""Four steps each on an H200, whose cause to stand idle was planted; recorded by torch.profiler."""


def recorded(name: str) -> tuple[Occupation, dict[str, int]]:
    found = occupation(attribute(read_trace(RECORDED / f"idle_{name}.json.gz")))
    assert found is not None
    found.self_check()
    return found, dict(found.gaps.group_by("cause").agg(pl.col("duration_ns").sum()).rows())


def test_recorded_item():
    """Three products, `.item()`, half a millisecond of sleep, three products: each step waits once."""
    found, idle = recorded("item")
    waits = found.gaps.filter(pl.col("cause") == "synchronisation")
    assert waits["step"].to_list() == [0, 1, 2, 3]
    assert waits["wait"].to_list() == ["cudaStreamSynchronize"] * 4
    assert (
        waits["after"].cast(pl.String).str.contains("gemm").all()
        and waits["before"].cast(pl.String).str.contains("DtoH").all()
    )
    assert idle["synchronisation"] > 0.95 * found.idle_ns
    assert set(idle) == {"synchronisation", "kernel-to-kernel latency"}


def test_recorded_data():
    """A data set that takes 6 ms for a batch, then a pageable copy which waits, then 5 ms of products."""
    found, idle = recorded("data")
    data = found.gaps.filter(pl.col("cause") == "data")
    assert data["phase"].to_list() == [BETWEEN_STEPS] * 3
    assert idle["data"] > 0.9 * found.idle_ns
    after_copies = found.gaps.filter(pl.col("cause") == "synchronisation")
    assert after_copies["before"].cast(pl.String).str.contains("HtoD").all() and after_copies.height == 4


def test_recorded_streams_and_graph():
    """Two streams that wait for one another by events, and CUDA graphs: nothing waits for the host."""
    assert set(recorded("streams")[1]) == {"kernel-to-kernel latency"}
    found, idle = recorded("graph")
    assert set(idle) == {"kernel-to-kernel latency", "dependency"}
    assert found.gaps.filter(pl.col("cause") == "dependency")["phase"].to_list() == [BETWEEN_STEPS] * 3


def test_devices_are_apart():
    found = occupied([work(0, 10, launch=-9_000), work(5, 20, launch=-9_000, device=1), work(50, 60, launch=-8_000)])
    assert [(d.device, d.span_ns, d.idle_ns) for d in found.devices] == [(0, 60, 40), (1, 15, 0)]
    assert found.gaps["device"].to_list() == [0]


def test_a_cpu_trace_and_an_empty_one_have_no_gaps():
    assert occupation(traced([])) is None
    on_cpu = of_a_cpu((0, 10, 1, 11, "aten::mm"))
    assert on_cpu.table.on_cpu and occupation(on_cpu) is None


ROWS = st.lists(
    st.builds(
        lambda start, length, launch, stream, device: work(
            start, start + length, launch=None if launch is None else start - launch, stream=stream, device=device
        ),
        st.integers(0, 200),
        st.integers(0, 30),
        st.none() | st.integers(-3, 20_000),
        st.integers(7, 9),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=25,
)


@given(ROWS)
def test_work_and_gaps_are_the_span_whatever_the_work(rows: list[dict[str, Any]]):
    found = occupied(rows)
    for device in found.devices:
        own = [row for row in rows if row["device"] == device.device]
        covered = {t for row in own for t in range(row["start_ns"], row["end_ns"])}
        assert device.union_ns == len(covered)
        assert device.span_ns == max(row["end_ns"] for row in own) - min(row["start_ns"] for row in own)
        gaps = found.gaps.filter(pl.col("device") == device.device)
        idle = [
            t
            for start, length in gaps.select("start_ns", "duration_ns").iter_rows()
            for t in range(start, start + length)
        ]
        assert len(set(idle)) == len(idle) == device.idle_ns and not covered & set(idle)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=12),
    st.lists(st.tuples(st.integers(-5, 80), st.integers(0, 40)), min_size=1, max_size=8),
)
def test_cover_is_counted_nanosecond_by_nanosecond(intervals: list[tuple[int, int]], windows: list[tuple[int, int]]):
    frame = pl.DataFrame(intervals, schema={"start_ns": pl.Int64, "duration_ns": pl.Int64}, orient="row")
    inside = {t for start, length in intervals for t in range(start, start + length)}
    disjoint = pieces(frame)
    assert length_ns(disjoint) == len(inside)
    starts = pl.Series([start for start, _ in windows])
    ends = pl.Series([start + length for start, length in windows])
    expected = [len(inside & set(range(start, start + length))) for start, length in windows]
    assert covered_ns(disjoint, starts, ends).to_list() == expected
