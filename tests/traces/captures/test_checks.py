"""The mistakes that published traces carry, each planted in a capture, and each found."""

import json
from pathlib import Path

import pytest

from stepscope.core.answer import Finding
from stepscope.core.run import Run
from stepscope.core.samples import Samples
from stepscope.traces.captures.attribution import attribute
from stepscope.traces.captures.checks import check_trace
from stepscope.traces.captures.digest import read_trace
from stepscope.traces.captures.part import range_totals
from stepscope.traces.captures.summary import TraceSummary
from tests.captures import AUTOGRAD, ELEMENTWISE, GEMM, Capture, nsys_tables, training_steps, write_kineto, write_sqlite
from tests.conftest import make_run
from tests.textbook import textbook

TF32 = "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8x8_kernel"
BF16 = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNN"


def summarise(path: Path, run: Run | None = None) -> TraceSummary:
    attribution = attribute(read_trace(path))
    attribution.self_check()
    return TraceSummary(attribution=attribution, run=run)


def findings(path: Path, run: Run | None = None) -> dict[str, Finding]:
    return {finding.kind: finding for finding in check_trace(summarise(path, run))}


def one_phase(count: int, *, name: str = GEMM, call: str | None = "cudaLaunchKernel") -> Capture:
    made = Capture()
    made.range("forward", 0, 1000 * count + 1000)
    for number in range(count):
        made.kernel(10 + 1000 * number, 500, name=name, call=call, delay=100)
    return made


@pytest.mark.parametrize("spelling", ["kineto", "nsys"])
def test_a_sound_capture_has_no_finding_that_doubts_it(tmp_path: Path, spelling: str):
    capture = training_steps()
    path = (
        write_kineto(capture, tmp_path / "t.json")
        if spelling == "kineto"
        else write_sqlite(nsys_tables(capture), tmp_path / "t.sqlite")
    )
    assert {finding.severity for finding in findings(path).values()} <= {"note"}


def test_row_3_tf32_called_fp32(tmp_path: Path):
    path = write_kineto(one_phase(10, name=TF32), tmp_path / "t.json")
    run = make_run()
    assert run.workload.dtype == "fp32"
    found = findings(path, run)["tf32-products"]
    assert found.severity == "error"
    assert found.evidence == {"tf32_ns": 5000, "products_ns": 5000}
    assert findings(path)["tf32-products"].severity == "warning"
    assert "tf32-products" not in findings(write_kineto(one_phase(10, name=GEMM), tmp_path / "u.json"), run)


def test_row_11_backward_launched_from_another_thread(tmp_path: Path):
    """By the thread of its range backward would hold nothing."""
    capture = training_steps(steps=1)
    path = write_sqlite(nsys_tables(capture), tmp_path / "t.sqlite")
    summary = summarise(path)
    backward = next(phase for phase in summary.phases if phase.phase == "backward")
    assert (backward.kernels, backward.busy_ns) == (8, 8 * 300)
    found = findings(path)["phases-span-threads"]
    assert found.evidence == {"backward_ns": 8 * 300, "same_thread_ns": 0}
    same = training_steps(steps=1)
    for call in same.calls:
        call["thread"] = 4242
    assert "phases-span-threads" not in findings(write_sqlite(nsys_tables(same), tmp_path / "u.sqlite"))
    assert AUTOGRAD not in {call["thread"] for call in same.calls}


def test_row_12_correlation_ids_without_the_process(tmp_path: Path):
    """Two processes count their launches from 1: joined by the id alone, each kernel would count twice."""
    capture = Capture()
    for process in (101, 202):
        capture.range("forward", 0, 10_000, process=process, thread=process)
        for number in range(1, 6):
            capture.kernel(
                number * 100, 50, process=process, thread=process, correlation=number, delay=20, device=process % 2
            )
    path = write_sqlite(nsys_tables(capture), tmp_path / "t.sqlite")
    summary = summarise(path)
    assert (summary.kernel_count, summary.busy_ns, summary.unattributed_ns) == (10, 500, 0)
    assert findings(path)["correlation-shared"].evidence == {"kernels": 10, "by_id_ns": 1000, "busy_ns": 500}


def test_row_13_kernels_without_a_launch_record(tmp_path: Path):
    capture = one_phase(7)
    for number in range(3):
        capture.kernel(100 + 1000 * number, 1000, call=None)
    path = write_kineto(capture, tmp_path / "t.json")
    summary = summarise(path)
    assert (summary.busy_ns, summary.unattributed_ns) == (7 * 500 + 3000, 3000)
    found = findings(path)["launches-unknown"]
    assert found.severity == "warning"
    assert found.evidence["kernels"] == 3 and found.evidence["busy_ns"] == 3000


def test_row_14_graphs_recorded_as_a_whole(tmp_path: Path):
    tables = nsys_tables(one_phase(3))
    launch = next(row for row in tables["CUPTI_ACTIVITY_KIND_RUNTIME"] if row["correlationId"] == 2)
    tables["CUPTI_ACTIVITY_KIND_GRAPH_TRACE"] = [
        {
            "start": 5000, "end": 12_000, "deviceId": 0, "streamId": 7, "correlationId": 2, "graphId": 9,
            "globalPid": launch["globalTid"] & ~((1 << 24) - 1),
        }
    ]  # fmt: skip
    summary = summarise(write_sqlite(tables, tmp_path / "t.sqlite"))
    assert summary.kernel_count == 3  # a graph is no kernel, and yet its time is busy time
    assert summary.busy_ns == 3 * 500 + 7000
    (forward,) = summary.phases
    assert (forward.kernels, forward.busy_ns) == (3, 3 * 500 + 7000)
    (within,) = range_totals(summary.attribution)
    assert (within.kernels, within.busy_ns) == (3, 3 * 500 + 7000)
    found = findings(tmp_path / "t.sqlite")["graphs-unseen"]
    assert found.evidence == {"graph_launches": 1, "busy_ns": 7000}
    assert "--cuda-graph-trace=node" in found.remedy


def test_row_14_graphs_that_left_nothing(tmp_path: Path):
    """As seen under Nsight Systems 2023.4 with CUDA 13: launches of graphs, and neither kernels nor graphs."""
    capture = one_phase(3)
    for number in range(4):
        capture.calls.append(
            {
                "name": "cudaGraphLaunch_v10000", "start": 4000 + number, "end": 4001 + number, "thread": 4242,
                "process": 4242, "correlation": 900 + number,
            }
        )  # fmt: skip
    found = findings(write_sqlite(nsys_tables(capture), tmp_path / "t.sqlite"))["graphs-unseen"]
    assert (found.severity, found.evidence["graph_launches"]) == ("error", 4)


def test_row_15_a_capture_that_ended_early(tmp_path: Path):
    """12 kernels of 11,109 launches arrived, as seen in the wild."""
    capture = one_phase(11_109)
    del capture.launched[12:]
    path = write_sqlite(nsys_tables(capture), tmp_path / "t.sqlite")
    found = findings(path)["incomplete-trace"]
    assert found.severity == "error"
    assert found.evidence == {"launches": 11_109, "without_kernel": 11_097, "kernels": 12}
    assert "--cuda-flush-interval=100" in found.remedy


def test_launches_into_a_graph_that_is_being_captured_are_not_lost(tmp_path: Path):
    capture = one_phase(20)
    del capture.launched[5:]
    capture.calls.append(
        {
            "name": "cudaStreamBeginCapture",
            "start": 4500,
            "end": 4600,
            "thread": 4242,
            "process": 4242,
            "correlation": 900,
        }
    )
    path = write_kineto(capture, tmp_path / "t.json")
    assert "incomplete-trace" not in findings(path)


def test_row_16_a_cuda_core_product_is_no_tensor_core_one(tmp_path: Path):
    found = findings(write_kineto(one_phase(4), tmp_path / "t.json"))["products-on-cuda-cores"]
    assert found.evidence == {"cuda_core_ns": 2000, "products_ns": 2000}
    assert "products-on-cuda-cores" not in findings(write_kineto(one_phase(4, name=BF16), tmp_path / "u.json"))


def test_row_22_the_profiler_taken_for_the_step(tmp_path: Path):
    capture = Capture()
    for step in range(3):
        capture.range("step", 10_000_000 * step, 10_000_000 * step + 8_000_000)
        capture.kernel(10_000_000 * step + 10, 500)
    path = write_kineto(capture, tmp_path / "t.json")
    slow = make_run(samples={"step": Samples(clock="host", values_s=(0.002, 0.002, 0.002))})
    assert findings(path, slow)["profiler-slows"].evidence["ratio"] == pytest.approx(4.0)
    same = make_run(samples={"step": Samples(clock="host", values_s=(0.0079, 0.008, 0.0081))})
    assert "profiler-slows" not in findings(path, same)


def test_products_that_do_not_match_the_model(tmp_path: Path):
    run = make_run()
    expected = textbook(run).model.layers * 9 + 1
    right = write_kineto(one_phase(expected), tmp_path / "t.json")
    assert "products-miscounted" not in findings(right, run)
    fewer = findings(write_kineto(one_phase(expected - 1), tmp_path / "u.json"), run)["products-miscounted"]
    assert fewer.evidence == {"phase": "forward", "products": expected - 1, "expected": expected}
    # The second pass of a split product is no product of its own.
    split = one_phase(expected)
    split.kernel(500, 30, name="void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float>(int)")
    assert "products-miscounted" not in findings(write_kineto(split, tmp_path / "v.json"), run)


def test_arrows_that_lead_elsewhere(tmp_path: Path):
    capture = training_steps()
    assert findings(write_kineto(capture, tmp_path / "t.json")).get("arrows-disagree") is None
    for link in capture.links:
        link["from"] += 1
    assert findings(write_kineto(capture, tmp_path / "u.json"))["arrows-disagree"].severity == "warning"


def test_a_step_of_a_gpu_without_kernels_is_no_step_of_a_cpu(tmp_path: Path):
    """What remains are operators by the host's time: shown without a word, they would pass for the device's."""
    path = write_kineto(training_steps(), tmp_path / "t.json")
    trace = json.loads(path.read_text())
    of_device = {"kernel", "gpu_memcpy", "gpu_memset"}
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event.get("cat") not in of_device]
    path.write_text(json.dumps(trace))
    found = findings(path)["incomplete-trace"]
    assert found.severity == "error"
    assert found.evidence["kernels"] == 0
    assert "not the device's" in found.sentence


def test_a_profile_without_launches_has_no_incomplete_finding(tmp_path: Path):
    path = write_kineto(one_phase(3, name=ELEMENTWISE, call=None), tmp_path / "t.json")
    assert set(findings(path)) == {"launches-unknown"}


def test_steps_that_touch_are_steps_of_their_own(tmp_path: Path):
    capture = Capture()
    for step in range(3):
        capture.range("step", 1000 * step, 1000 * step + 1000)
        capture.kernel(1000 * step + 10, 50)
    assert summarise(write_kineto(capture, tmp_path / "t.json")).steps == 3


def test_an_evaluation_between_steps(tmp_path: Path):
    made = Capture()
    for begin in (0, 4000):
        made.range(f"step {begin}", begin, begin + 1000)
        made.range("forward", begin + 10, begin + 900)
        made.kernel(begin + 20, 300)
    assert "outside-steps" not in findings(write_kineto(made, tmp_path / "steps.json"))
    made.range("evaluate", 2000, 3000)
    made.range("forward", 2010, 2900)
    made.kernel(2020, 400)
    found = findings(write_kineto(made, tmp_path / "evaluated.json"))["outside-steps"]
    assert found.evidence == {"outside_ns": 400, "kernels": 1, "steps": 2}
