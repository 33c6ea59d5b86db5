"""Totals by range, against counting one by one."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from stepscope.traces.captures.attribution import attribute
from stepscope.traces.captures.digest import read_trace
from stepscope.traces.captures.part import range_totals
from tests.captures import ELEMENTWISE, GEMM, Capture, nsys_tables, write_sqlite

NAMES = ("forward", "a", "a.b", "step")


@st.composite
def captures(draw: st.DrawFn) -> Capture:
    made = Capture()
    for _ in range(draw(st.integers(1, 8))):
        start = draw(st.integers(0, 60))
        thread, process = draw(st.sampled_from([(1, 1), (2, 1), (1, 2)]))
        made.range(
            draw(st.sampled_from(NAMES)), start, start + draw(st.integers(0, 40)), thread=thread, process=process
        )
    for _ in range(draw(st.integers(1, 12))):
        thread, process = draw(st.sampled_from([(1, 1), (2, 1), (1, 2)]))
        made.kernel(
            draw(st.integers(0, 100)), draw(st.integers(0, 9)), thread=thread, process=process,
            name=draw(st.sampled_from([GEMM, ELEMENTWISE])), call=draw(st.sampled_from(["cudaLaunchKernel", None])),
        )  # fmt: skip
    return made


@pytest.mark.slow
@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(capture=captures())
def test_totals_are_those_of_counting_one_by_one(capture: Capture, tmp_path_factory):
    path = Path(tmp_path_factory.mktemp("t")) / "t.sqlite"
    totals = {row.name: row for row in range_totals(attribute(read_trace(write_sqlite(nsys_tables(capture), path))))}
    launches = {(call["process"], call["correlation"]): call["start"] for call in capture.calls}
    assert set(totals) == {row["name"] for row in capture.ranges}
    for name, found in totals.items():
        ranges = [row for row in capture.ranges if row["name"] == name]
        inside = [
            kernel
            for kernel in capture.launched
            if (at := launches.get((kernel["process"], kernel["correlation"]))) is not None
            and any(row["process"] == kernel["process"] and row["start"] <= at < row["end"] for row in ranges)
        ]
        busy = sum(kernel["end"] - kernel["start"] for kernel in inside)
        gemm = sum(kernel["end"] - kernel["start"] for kernel in inside if kernel["name"] == GEMM)
        assert (found.instances, found.kernels, found.busy_ns) == (len(ranges), len(inside), busy)
        assert found.gemm_fraction == (gemm / busy if busy else 0.0)
        assert sum(kernel.calls for kernel in found.top_kernels or ()) == len(inside)
        assert sum(kernel.busy_ns for kernel in found.top_kernels or ()) == busy
