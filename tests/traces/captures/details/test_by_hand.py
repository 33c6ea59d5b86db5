"""Tables of details on captures made by hand, with figures worked out by hand."""

import gzip
import json
import shutil
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stepscope.core.errors import InputError
from stepscope.core.range_names import PHASES
from stepscope.core.units import Window, parse_window
from stepscope.rendering.chrome_trace import write_cut
from stepscope.traces.captures.attribution import Attribution, attribute
from stepscope.traces.captures.details import (
    PIECES,
    View,
    captured_graphs,
    copy_totals,
    data_loading,
    detail_tables,
    graph_replays,
    host_calls,
    nodes_of_graphs,
    operator_totals,
    operator_tree,
    queues,
    range_tree,
)
from stepscope.traces.captures.digest import read_trace
from stepscope.traces.captures.part import first_event_ns, part_of
from stepscope.traces.captures.summary import TraceSummary
from tests.captures import MAIN, Capture, nsys_tables, training_steps, write_kineto, write_sqlite
from tests.handmade_trace import ADD, GEMM, SOFTMAX, of_a_cpu, traced, work

DATA = Path(__file__).parents[3] / "data"


def summary_of(attribution: Attribution) -> TraceSummary:
    return TraceSummary(attribution=attribution, run=None)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> TraceSummary:
    """Two steps of two layers of two modules: each module addmm (400 ns) and exp (50 ns), mm in backward (300 ns)."""
    path = write_kineto(training_steps(), tmp_path_factory.mktemp("captures") / "t.json")
    return summary_of(attribute(read_trace(path)))


def test_operators(steps: TraceSummary):
    found = {row["name"]: row for row in operator_totals(steps).iter_rows(named=True)}
    addmm = found["aten::addmm"]
    assert (addmm["calls"], addmm["kernels"], addmm["busy_ns"], addmm["host_ns"]) == (8, 8, 3_200, 8 * 60)
    assert json.loads(addmm["shapes"]) == [[2, 3], [3, 4]]
    mm = found["aten::mm"]
    assert (mm["calls"], mm["kernels"], mm["busy_ns"]) == (16, 16, 16 * 300)
    assert mm["flops"] == 8 * 2 * 2 * 3 * 4  # the half of them that ran a product
    linear = found["aten::linear"]
    assert (linear["calls"], linear["kernels"], linear["busy_ns"], linear["host_ns"]) == (8, 0, 0, 8 * (80 - 60))
    of_a_step = operator_totals(part_of(steps, "it", step=0))
    assert of_a_step.filter(pl.col("name") == "aten::addmm")["busy_ns"].to_list() == [1_600]


def test_the_tree_of_operators(steps: TraceSummary):
    rows = {tuple(row["path"]): row for row in operator_tree(steps.attribution).iter_rows(named=True)}
    linear, addmm = rows["aten::linear",], rows["aten::linear", "aten::addmm"]
    assert (linear["calls"], linear["device_ns"], linear["self_device_ns"]) == (8, 3_200, 0)
    assert (linear["host_ns"], linear["self_host_ns"]) == (8 * 80, 8 * 20)
    assert (addmm["depth"], addmm["kernels"], addmm["self_device_ns"]) == (1, 8, 3_200)
    node = "autograd::engine::evaluate_function: AddmmBackward0"
    assert rows[node, "AddmmBackward0", "aten::mm"]["device_ns"] == rows[node,]["device_ns"] == 8 * 300
    cut = operator_tree(steps.attribution, 3)
    assert cut["path"].to_list() == [list(path) for path in list(rows)[:3]]


def test_the_tree_of_ranges_has_one_node_for_all_steps(steps: TraceSummary):
    rows = {tuple(row["path"]): row for row in range_tree(steps.attribution).iter_rows(named=True)}
    step = rows["ProfilerStep#*",]
    assert (step["calls"], step["kernels"]) == (2, 34)
    attention = rows["ProfilerStep#*", "forward", "layers.0", "layers.0.attention"]
    assert (attention["calls"], attention["kernels"], attention["device_ns"]) == (2, 4, 900)
    assert rows["ProfilerStep#*", "backward"]["device_ns"] == 16 * 300  # launched by a thread without ranges


def test_copies_by_direction_and_size(tmp_path: Path):
    capture = Capture()
    capture.range("forward", 0, 10_000)
    for at, size in ((100, 1_000), (200, 4_096), (300, 5_000), (400, 32 << 20)):
        capture.kernel(at, 10, name=f"Memcpy HtoD (Pinned -> Device) {size}", kind="memcpy", call="cudaMemcpyAsync")
        capture.launched[-1]["size"] = size
    trace = json.loads(write_kineto(capture, tmp_path / "t.json").read_text())
    for event in trace["traceEvents"]:
        if event.get("cat") == "gpu_memcpy":
            event["name"], _, size = event["name"].rpartition(" ")
            event["args"]["bytes"] = int(size)
    (tmp_path / "t.json").write_text(json.dumps(trace))
    found = copy_totals(attribute(read_trace(tmp_path / "t.json"))).sort("bytes").drop("busy_ns")
    assert found.rows() == [
        ("HtoD", "Pinned -> Device", "below 4 KiB", 1, 1_000, 1_000 / 10e-9),
        ("HtoD", "Pinned -> Device", "to 64 KiB", 2, 9_096, 9_096 / 20e-9),
        ("HtoD", "Pinned -> Device", "16 MiB and more", 1, 32 << 20, pytest.approx((32 << 20) / 10e-9)),
    ]
    tables = nsys_tables(capture)
    copies = tables["CUPTI_ACTIVITY_KIND_MEMCPY"]
    for row in copies:
        row |= {"bytes": 8, "srcKind": 1, "dstKind": 2}
    of_nsys = copy_totals(attribute(read_trace(write_sqlite(tables, tmp_path / "t.sqlite"))))
    assert of_nsys.drop("busy_ns", "bytes_per_s").rows() == [("HtoD", "Pinned -> Device", "below 4 KiB", 4, 32)]


def test_what_blocked_the_host():
    attribution = traced(
        [
            work(2_000, 9_000, launch=10),
            work(9_500, 9_600, launch=20, name="Memcpy DtoH (Device -> Pinned)", kind="memcpy", call="cudaMemcpyAsync"),
        ],
        calls=[("cudaDeviceSynchronize", 2_000, 9_800), ("cudaStreamSynchronize", 9_900, 9_950), ("cudaMalloc", 0, 5)],
    )
    found = {row["name"]: row for row in host_calls(attribution, attribution.table.calls).iter_rows(named=True)}
    assert (found["cudaDeviceSynchronize"]["waits"], found["cudaDeviceSynchronize"]["waited_ns"]) == (1, 7_800)
    assert found["cudaStreamSynchronize"]["waited_ns"] == 50
    assert found["cudaLaunchKernel"]["waits"] == found["cudaMalloc"]["waits"] == 0
    assert found["cudaMemcpyAsync"]["waits"] == 1


def test_data_loading():
    with gzip.open(DATA / "idle_data.json.gz") as file:
        events = [event for event in json.load(file)["traceEvents"] if "DataLoader" in str(event.get("name"))]
    summary = summary_of(attribute(read_trace(DATA / "idle_data.json.gz")))
    (row,) = data_loading(summary).iter_rows(named=True)
    assert (row["calls"], row["total_ns"]) == (len(events), sum(round(event["dur"] * 1_000) for event in events))


def test_the_queue_by_hand():
    """Launched at 0, 100 and 200, started at 50, 400 and 500: 0 to 50 one, 100 to 200 one, to 400 two, to 500 one."""
    rows = [work(50, 60, launch=0), work(400, 410, launch=100), work(500, 510, launch=200)]
    (queue,) = queues(traced(rows))
    assert (queue.span_ns, queue.longest, queue.wait_ns) == (500, 2, 300)
    assert queue.mean == (50 + 100 + 2 * 200 + 100) / 500
    assert queue.empty_share == 50 / 500
    assert queue.over_time[:10] == (1.0,) * 10
    assert queue.over_time[10:20] == (0.0,) * 10
    assert queue.over_time[50] == 2.0
    assert queues(of_a_cpu((0, 10, 1, 11, "aten::mm"))) == ()


launches = st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 5_000)), min_size=1, max_size=30)


@given(launches)
def test_the_queue_is_the_count_at_every_moment(times: list[tuple[int, int]]):
    (queue,) = queues(traced([work(at + waits, at + waits + 1, launch=at) for at, waits in times]))
    first, last = min(at for at, _ in times), max(at + waits for at, waits in times)
    lengths = [sum(at <= moment < at + waits for at, waits in times) for moment in range(first, last)]
    assert queue.span_ns == len(lengths)
    assert queue.mean == pytest.approx(sum(lengths) / len(lengths) if lengths else 0.0)
    assert queue.longest == max(lengths, default=0)
    assert queue.empty_share == pytest.approx(lengths.count(0) / len(lengths) if lengths else 0.0)
    if len(lengths) >= PIECES:
        bounds = [len(lengths) * piece // PIECES for piece in range(PIECES + 1)]
        means = [sum(lengths[a:b]) / (b - a) for a, b in pairwise(bounds)]
        assert queue.over_time == pytest.approx(means)


def test_replays_of_a_real_graph():
    attribution = attribute(read_trace(DATA / "idle_graph.json.gz"))
    (row,) = graph_replays(attribution).iter_rows(named=True)
    assert (row["replays"], row["kernels"], row["copies"]) == (4, 300, 0)


def graph_capture() -> Attribution:
    """A capture of a graph: three launches in two operators of two modules, and nothing runs."""
    launch = "cudaLaunchKernel"
    return traced(
        [],
        calls=[
            ("cudaStreamBeginCapture_v10000", 100, 110), (launch, 150, 160), (launch, 170, 180), (launch, 250, 260),
            ("cudaStreamEndCapture_v10000", 400, 410), (launch, 500, 510),
        ],
        operators=[("aten::linear", 140, 200), ("aten::mm", 145, 190), ("aten::softmax", 240, 270)],
        ranges=[("forward", 90, 420), ("layers.0", 120, 210), ("layers.1", 230, 300)],
    )  # fmt: skip


def test_kernels_of_a_replay_have_the_operators_of_the_capture():
    call = "cudaGraphLaunch_v10000"
    rows = [
        work(3_000 + at, 3_010 + at, launch=50, name=name, call=call)
        for at, name in ((20, ADD), (0, GEMM), (40, SOFTMAX))
    ]
    replays = traced(rows)
    table = replays.table
    one = {"correlation": 1, "launch_row": 0, "launch_ns": 50}  # all three by one call
    same = [pl.lit(value).cast(table.work.schema[name]).alias(name) for name, value in one.items()]
    replays = replace(replays, work=replays.work.with_columns(same))
    captures = captured_graphs(graph_capture().table)
    assert [capture.kernels for capture in captures] == [3]
    assert nodes_of_graphs(replays, captures).select("node", "name", "operator", "module", "busy_ns").rows() == [
        (0, GEMM, "aten::mm", "layers.0", 10),
        (1, ADD, "aten::mm", "layers.0", 10),
        (2, SOFTMAX, "aten::softmax", "layers.1", 10),
    ]


def test_parts_by_place_and_time(steps: TraceSummary):
    def kernels(**asked: object) -> int:
        return part_of(steps, "it", **asked).kernel_count  # type: ignore[arg-type]

    assert kernels(module="layers.0.attention") == 2 * 4
    assert kernels(module="layers.0") == 2 * 8
    assert kernels(module="layers.*.mlp") == 2 * 8
    assert kernels(device=0) == kernels(stream=7) == 34
    # The first kernel starts 1,000 ns after its launch, 130 ns after the first range begins.
    assert kernels(between=Window(0, 1_131)) == 1
    assert kernels(between=Window(0, 3_000)) + kernels(between=Window(3_000, 2**61)) == 34
    for wrong, said in (
        ({"module": "layer"}, "there is layers.0.attention"), ({"device": 3}, "there is 0"),
        ({"stream": 1}, "there is 7"),
        ({"between": Window(10**9, 2**60)}, "the capture ends at"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            kernels(**wrong)


def test_windows_are_read():
    assert parse_window("12ms:20ms") == (12_000_000, 20_000_000)
    assert parse_window("1.5us:") == (1_500, 2**61)
    assert parse_window(":1s") == (0, 10**9)
    for wrong in ("", "12", "20ms:12ms", "5ms:5ms", "1e9s:2", "9" * 40 + "s:"):
        with pytest.raises(InputError, match="write begin and end"):
            parse_window(wrong)


def test_only_short_tables_are_shown_unasked(steps: TraceSummary):
    def heads(view: View) -> list[str]:
        return [table.columns[0] for table in detail_tables(steps, view)]

    assert heads(View()) == ["host calls, a step", "copies, a step"]
    assert heads(View(only="tree")) == ["operator tree, a step", "range tree, a step"]
    (by_calls,) = detail_tables(steps, View(only="operators", sort="calls", top=2))
    assert [row[:2] for row in by_calls.rows] == [("aten::mm 2x3 3x4", 8), ("aten::addmm 2x3 3x4", 4)]
    assert by_calls.notes[0].text.endswith("more: --only 'operators'.")
    with pytest.raises(InputError, match="no such column"):
        list(detail_tables(steps, View(only="operators", sort="colour")))


def unmarked_steps(steps: int = 3, layers: int = 1) -> Capture:
    """Steps whose ranges mark modules alone: phases are those that autograd's operators tell."""
    capture = training_steps(steps=steps, layers=layers)
    capture.ranges = [row for row in capture.ranges if row["name"].startswith("layers.")]
    return capture


@pytest.mark.parametrize("phase", PHASES)
def test_a_cut_keeps_what_tells_unmarked_phases_and_steps(tmp_path: Path, phase: str):
    whole = summary_of(attribute(read_trace(write_kineto(unmarked_steps(), tmp_path / "t.json"))))
    part = part_of(whole, "it", phase=phase).attribution
    write_cut(part, tmp_path / "cut.json")
    cut = attribute(read_trace(tmp_path / "cut.json"))
    assert cut.work.height == part.work.height and set(cut.work["phase"]) == {phase}
    assert cut.steps == part.steps == 3


def test_a_cut_of_a_phase_keeps_the_last_step(tmp_path: Path):
    """Steps are the fewer of forwards and optimizers, and the last optimizer runs after the last forward."""
    capture = training_steps(steps=3, layers=1)
    capture.ranges = [row for row in capture.ranges if not row["name"].startswith("ProfilerStep")]
    whole = summary_of(attribute(read_trace(write_kineto(capture, tmp_path / "t.json"))))
    write_cut(part_of(whole, "it", phase="forward").attribution, tmp_path / "cut.json")
    assert attribute(read_trace(tmp_path / "cut.json")).steps == whole.steps == 3


def test_a_window_has_the_unmarked_steps_that_launched_its_work(tmp_path: Path):
    """Kernels run long after their launches: by the times of the kernels alone, no forward is in any window."""
    whole = summary_of(attribute(read_trace(write_kineto(unmarked_steps(), tmp_path / "t.json"))))
    starts = whole.attribution.work.sort("launch_ns")["start_ns"]
    begin = first_event_ns(whole.attribution)
    first = part_of(whole, "it", between=Window(starts[0] - begin, starts[3] - begin))
    assert (whole.steps, first.steps) == (3, 1)
    assert part_of(whole, "it", between=Window(starts[0] - begin, starts[-1] - begin)).steps == 3


@pytest.mark.slow
@given(st.integers(0, 20_000), st.integers(1, 20_000), st.integers(1, 3), st.tuples(st.booleans(), st.booleans()))
def test_a_cut_of_any_window_reads_as_the_part(
    tmp_path_factory: pytest.TempPathFactory, begin: int, length: int, layers: int, ways: tuple[bool, bool]
):
    packed, marked = ways
    folder = tmp_path_factory.mktemp("cut")
    capture = training_steps(layers=layers) if marked else unmarked_steps(2, layers)
    whole = summary_of(attribute(read_trace(write_kineto(capture, folder / "t.json"))))
    try:
        part = part_of(whole, "it", between=Window(begin, begin + length))
    except InputError:
        return  # nothing starts then
    target = folder / ("cut.json.gz" if packed else "cut.json")
    assert write_cut(part.attribution, target) == part.attribution.work.height
    cut = attribute(read_trace(target))
    cut.self_check()
    names = ["name", "phase", "family", "operator", "role", "stream"]
    # Modules of backward are those of ranges of the forward thread, which must launch some of the work.
    names += ["module"] if MAIN in part.attribution.work["launch_thread"] else []
    columns = [pl.col(name).cast(pl.String) for name in names]
    sums = [pl.len(), pl.col("duration_ns").sum()]
    both = [one.work.group_by(columns).agg(sums).sort(pl.all()).rows() for one in (cut, part.attribution)]
    assert both[0] == both[1]
    shutil.rmtree(folder)


def test_a_cut_overwrites_no_capture(tmp_path: Path):
    path = write_kineto(training_steps(), tmp_path / "t.json")
    attribution = attribute(read_trace(path))
    with pytest.raises(InputError, match="it is a capture"):
        write_cut(attribution, path, source=path)
    with pytest.raises(InputError, match=r"name a \.json"):
        write_cut(attribution, tmp_path / "t.txt", source=path)
    with pytest.raises(InputError, match="cannot write"):
        write_cut(attribution, tmp_path / "nowhere" / "t.json", source=path)
    assert attribute(read_trace(path)).busy_ns == attribution.busy_ns


def test_a_cut_of_a_cpu_has_whole_operators(tmp_path: Path):
    whole = of_a_cpu((0, 100, 1, 11, "aten::linear"), (10, 50, 1, 11, "aten::mm"), (200, 30, 1, 11, "aten::add"))
    write_cut(whole, tmp_path / "all.json")
    assert sorted(read_trace(tmp_path / "all.json").work["duration_ns"].to_list()) == [30, 50, 50]
    part = part_of(summary_of(whole), "it", between=Window(0, 5))
    with pytest.raises(InputError, match="calls one outside it"):
        write_cut(part.attribution, tmp_path / "part.json")
