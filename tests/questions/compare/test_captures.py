"""What changed between two captures: per step, exactly, and told in sentences that hold."""

import io
from collections import defaultdict
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.app.cli.output import present
from stepscope.core.errors import InputError
from stepscope.questions.compare_captures import (
    CaptureComparison,
    answer_captures,
    compare_captures,
    comparison_as_json,
)
from stepscope.traces.captures.attribution import Attribution, attribute
from stepscope.traces.kernels.families import one_spelling
from stepscope.traces.table import TraceTable
from tests.handmade_trace import ADD, GEMM, SOFTMAX, of_a_cpu, traced, work

pytestmark = pytest.mark.slow

MS = 1_000_000
PHASES = [("step", 0, 900), ("forward", 0, 300), ("backward", 300, 900)]


def before() -> Attribution:
    """Two steps of 10 ms: 6 of products in backward, 3 of softmax and 1 of adds in forward."""
    rows = [
        work(1 * MS, 4 * MS, launch=10, name=SOFTMAX),
        work(4 * MS, 5 * MS, launch=20, name=ADD),
        work(5 * MS, 8 * MS, launch=310),
        work(8 * MS, 11 * MS, launch=320),
        work(21 * MS, 24 * MS, launch=1_010, name=SOFTMAX),
        work(24 * MS, 25 * MS, launch=1_020, name=ADD),
        work(25 * MS, 31 * MS, launch=1_310),
    ]
    again = [(name, start + 1_000, end + 1_000) for name, start, end in PHASES]
    return traced(rows, ranges=[*PHASES, *again], devices={0: "NVIDIA H200"})


def after() -> Attribution:
    """One step of 5 ms: products twice as fast, softmax gone, adds the same, a copy in forward is new."""
    rows = [
        work(1 * MS, 2 * MS, launch=20, name=ADD),
        work(2 * MS, 3 * MS, launch=30, name="Memcpy DtoD (Device -> Device)", kind="memcpy"),
        work(5 * MS, 8 * MS, launch=310),
    ]
    return traced(rows, ranges=PHASES, devices={0: "NVIDIA H200"})


def test_by_hand():
    comparison = compare_captures(before(), after())
    comparison.self_check()
    assert (comparison.before_ns, comparison.after_ns, comparison.difference_ns) == (10 * MS, 5 * MS, -5 * MS)
    assert (comparison.before_steps, comparison.after_steps) == (2, 1)
    assert comparison.places.rows() == [
        ("backward", "matrix multiplication", 6 * MS, 3 * MS, 1.5, 1.0, -3 * MS, 3 / 7),
        ("forward", "softmax", 3 * MS, 0.0, 1.0, 0.0, -3 * MS, 3 / 7),
        ("forward", "memcpy/memset", 0.0, 1 * MS, 0.0, 1.0, 1 * MS, 1 / 7),
        ("forward", "activation/elementwise", 1 * MS, 1 * MS, 1.0, 1.0, 0.0, 0.0),
    ]
    changes = {row["name"]: row["change"] for row in comparison.kernels.iter_rows(named=True)}
    assert changes == {
        GEMM: "both", SOFTMAX: "disappeared", "Memcpy DtoD (Device -> Device)": "appeared", ADD: "both",
    }  # fmt: skip
    assert comparison.caveats == ()


def test_the_sentence_has_its_figures():
    assert compare_captures(before(), after()).summary == (
        "The step's device time went from 10 ms to 5 ms (-50.0 %): matrix multiplication -3 ms in backward, softmax "
        "-3 ms in forward, memcpy/memset +1 ms in forward."
    )
    assert compare_captures(before(), before()).summary == (
        "The step's device time went from 10 ms to 10 ms (less than 0.05 %), and no family changed."
    )
    nothing = traced([])
    assert compare_captures(nothing, after()).summary == (
        "The step's device time went from 0 ns to 5 ms: matrix multiplication +3 ms in backward, "
        "activation/elementwise +1 ms in forward, memcpy/memset +1 ms in forward."
    )
    compare_captures(nothing, nothing).self_check()
    outside = traced([work(0, 5 * MS, launch=0)])
    assert "matrix multiplication +5 ms outside the phases" in compare_captures(nothing, outside).summary


def test_small_changes_are_not_named():
    small = traced([work(0, 100 * MS, launch=0), work(100 * MS, 101 * MS, launch=0, name=ADD)])
    large = traced([work(0, 200 * MS, launch=0), work(200 * MS, 202 * MS, launch=0, name=ADD)])
    assert compare_captures(small, large).summary.endswith(
        "(+100.0 %): matrix multiplication +100 ms outside the phases."
    )


def test_what_sets_the_captures_apart_is_said():
    other = traced([work(0, 5, launch=0), work(0, 5, launch=0, device=1)], devices={0: "NVIDIA A100", 1: "NVIDIA A100"})
    assert compare_captures(before(), other).caveats == (
        "the captures are of different devices: NVIDIA H200, and NVIDIA A100",
        "device time is summed over 1 devices before and 2 after",
        "no step or phase is marked in the capture after: all of it counts as one step",
    )


def test_a_cpu_and_a_device_cannot_be_compared():
    on_cpu = of_a_cpu((0, 10, 1, 11, "aten::mm"))
    with pytest.raises(InputError, match="CPU operators only"):
        compare_captures(on_cpu, after())
    assert "operator time" in compare_captures(on_cpu, on_cpu).summary


SPELLINGS = [
    (
        "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::pow_impl<float>"
        "(at::TensorIteratorBase&, float)::{lambda(float)#1}, std::array<char*, 2ul> >(int, float)",
        "void at::native::vectorized_elementwise_kernel<(int)4, void at::native::<unnamed>::pow_impl<float>"
        "(at::TensorIteratorBase &, T2)::[lambda(float) (instance 1)], std::array<char *, (unsigned long)2>>(int, T2)",
    ),
    (
        "void softmax_warp_forward<float, float, 10, false, true>(float*, int)",
        "void softmax_warp_forward<float, float, (int)10, (bool)0, (bool)1>(T1 *, int)",
    ),
    ("void Copy<OpaqueType<4u>, -1>(Params)", "void Copy<OpaqueType<(unsigned int)4>, (int)-1>(T1::Params)"),
    ("sm80_xmma_gemm_f32f32_tilesize128x128x8", "sm80_xmma_gemm_f32f32_tilesize128x128x8"),
]


@pytest.mark.parametrize(("kineto", "nsys"), SPELLINGS)
def test_profilers_spell_one_kernel_in_two_ways(kineto: str, nsys: str):
    assert one_spelling(kineto) == one_spelling(nsys)


def test_what_differs_stays_apart():
    names = [
        "void k<4, f()::{lambda(float)#1}>(int)",
        "void k<4, f()::{lambda(float)#2}>(int)",
        "void k<4, f()::{lambda(double)#1}>(int)",
        "void k<8, f()::{lambda(float)#1}>(int)",
        "void k<true, f()::{lambda(float)#1}>(int)",
        "void other<4, f()::{lambda(float)#1}>(int)",
    ]
    assert len({one_spelling(name) for name in names}) == len(names)


def test_between_profilers_kernels_go_by_one_spelling():
    kineto, nsys = SPELLINGS[1]
    one, other = traced([work(0, 5, launch=0, name=kineto)]), traced([work(0, 7, launch=0, name=nsys)])
    assert compare_captures(one, other).kernels["change"].to_list() == ["appeared", "disappeared"]
    relabelled = TraceTable(
        profiler="Nsight Systems", work=other.table.work, calls=other.table.calls, ranges=other.table.ranges
    )
    comparison = compare_captures(one, attribute(relabelled))
    assert comparison.kernels.select("name", "change", "difference_ns").rows() == [(nsys, "both", 2.0)]
    assert comparison.caveats[0] == "the captures were made by Kineto and Nsight Systems, whose own cost differs"


class Screen(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


def rendered(comparison: CaptureComparison, width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    screen = Screen()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", screen)
        for name, value in {"COLUMNS": str(width), "LINES": "40", "TERM": "dumb", "NO_COLOR": "1"}.items():
            patch.setenv(name, value)
        present(answer_captures(comparison, "old.json", "new\x1b[31m.json"))
    return screen.getvalue()


@pytest.mark.parametrize("width", [80, 120, 200])
def test_on_the_screen(width: int, monkeypatch: pytest.MonkeyPatch):
    long = "ker\x1bnel" + "a" * 300 + "tail"
    many = traced([work(0, 5 * MS, launch=0, name=long), *(work(0, n, launch=0, name=f"k{n}") for n in range(1, 30))])
    text = rendered(compare_captures(before(), many), width, monkeypatch)
    assert "new\\u001b[31m.json against old.json" in text and "\x1b" not in text
    assert "ker\\u001bnelaa" in text and "…" in text
    assert all(len(line) <= width for line in text.splitlines())
    assert "more kernels" in text and "-3.00" in text


def test_eighty_columns_break_no_cell(monkeypatch: pytest.MonkeyPatch):
    many = [work(0, 100 * MS, launch=310, name=ADD)] + [work(0, 1, launch=310, name=ADD)] * 2_000
    crowded = traced(many, ranges=PHASES)
    text = rendered(compare_captures(crowded, traced([], ranges=PHASES)), 80, monkeypatch)
    rows = [line.split() for line in text.splitlines()]
    assert ["activation/elementwise", "backward", "100.0", "-100.0", "100.0", "%", "2001"] in rows
    rows = [line.split() for line in rendered(compare_captures(before(), after()), 80, monkeypatch).splitlines()]
    assert ["softmax", "forward", "3.00", "-3.00", "42.9", "%", "1"] in rows
    assert ["matrix", "multiplication", "backward", "6.00", "3.00", "-3.00", "42.9", "%", "1.5"] in rows
    assert ["matrix", "multiplication", "backward", "1"] in rows
    assert any(row[0].startswith("softmax_warp_forward") and row[1] == "gone" for row in rows if row[1:])


def test_plain_data_is_json():
    data = msgspec.json.decode(msgspec.json.encode(comparison_as_json(compare_captures(before(), after()))))
    assert data["difference_ns"] == -5 * MS and data["places"][0]["family"] == "matrix multiplication"
    assert {"phase", "family", "before_ns", "after_ns", "difference_ns", "share"} <= set(data["places"][0])
    same = comparison_as_json(compare_captures(before(), before()))
    assert all(row["share"] is None for row in same["kernels"])


CAPTURES = st.lists(
    st.builds(
        lambda start, length, launch, name: work(start, start + length, launch=launch, name=name),
        st.integers(0, 5_000),
        st.integers(0, 5_000),
        st.none() | st.integers(0, 2_000),
        st.sampled_from([GEMM, SOFTMAX, ADD, "k1", "k2"]),
    ),
    max_size=12,
)


@settings(deadline=None)
@given(CAPTURES, CAPTURES)
def test_against_sums_by_hand(one: list[dict[str, Any]], other: list[dict[str, Any]]):
    again = [(name, start + 1_000, end + 1_000) for name, start, end in PHASES]
    comparison = compare_captures(traced(one, ranges=PHASES), traced(other, ranges=[*PHASES, *again]))
    comparison.self_check()
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    for side, rows, steps in ((0, one, 1), (1, other, 2)):
        for row in rows:
            sums[row["name"]][side] += (row["end_ns"] - row["start_ns"]) / steps
            sums[row["name"]][2 + side] += 1 / steps
    columns = ["before_ns", "after_ns", "before_calls", "after_calls"]
    found = {row["name"]: [row[name] for name in columns] for row in comparison.kernels.iter_rows(named=True)}
    assert found == {name: pytest.approx(values) for name, values in sums.items()}
    sizes = comparison.kernels["difference_ns"].abs().to_list()
    assert sizes == sorted(sizes, reverse=True)
    swapped = compare_captures(traced(other, ranges=[*PHASES, *again]), traced(one, ranges=PHASES))
    assert swapped.difference_ns == pytest.approx(-comparison.difference_ns)
