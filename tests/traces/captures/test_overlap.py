"""Communication behind computation: by hand, and nanosecond by nanosecond."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stepscope.traces.captures.occupation import overlap
from tests.handmade_trace import GEMM, REDUCE, traced, work


def test_by_hand():
    rows = [
        work(0, 100, launch=-10),
        work(50, 120, launch=-9, stream=8),  # two kernels at once hide no more than one
        work(80, 200, launch=-8, name=REDUCE, stream=20),
        work(150, 160, launch=-7),
        work(170, 180, launch=-6, name="Memcpy DtoD (Device -> Device)", kind="memcpy"),  # hides nothing
        work(300, 310, launch=-5, name=REDUCE, stream=20),
    ]
    (found,) = overlap(traced(rows, devices={0: "NVIDIA H200"}))
    assert (found.communication_ns, found.computation_ns) == (130, 130)
    assert (found.hidden_ns, found.exposed_ns) == (50, 80)
    assert found.hidden_share == 50 / 130 and found.name == "NVIDIA H200"
    assert found.by_kernel.rows() == [(REDUCE, 2, 130, 50)]


def test_without_communication():
    (found,) = overlap(traced([work(0, 100, launch=-10)]))
    assert (found.communication_ns, found.hidden_share, found.by_kernel.height) == (0, None, 0)
    assert overlap(traced([])) == ()


@given(
    st.lists(
        st.builds(
            lambda start, length, name, device: work(start, start + length, launch=start, name=name, device=device),
            st.integers(0, 100),
            st.integers(0, 30),
            st.sampled_from([GEMM, REDUCE]),
            st.integers(0, 1),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_hidden_is_the_intersection_of_the_unions(rows: list[dict[str, Any]]):
    for found in overlap(traced(rows)):
        moments = {
            name: {
                t
                for row in rows
                if row["name"] == name and row["device"] == found.device
                for t in range(row["start_ns"], row["end_ns"])
            }
            for name in (GEMM, REDUCE)
        }
        assert found.communication_ns == len(moments[REDUCE])
        assert found.computation_ns == len(moments[GEMM])
        assert found.hidden_ns == len(moments[REDUCE] & moments[GEMM])
        sums = found.by_kernel.select("busy_ns", "hidden_ns").sum().row(0)
        assert sums[1] >= found.hidden_ns and sums[0] - sums[1] >= found.exposed_ns
