"""Phases in captures whose ranges mark none: by autograd's nodes, by threads, and by what follows what."""

import gzip
import json
import re
from bisect import bisect_right
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from stepscope.core.range_names import PHASES
from stepscope.traces.captures.attribution import (
    NODES,
    ORDER,
    RANGES,
    THREAD,
    UPDATES,
    Attribution,
    attribute,
    phase_of,
)
from stepscope.traces.captures.checks import check_trace
from stepscope.traces.captures.digest import read_trace
from stepscope.traces.captures.summary import TraceSummary
from tests.captures import AUTOGRAD, PROCESS, Capture, trace_table, training_steps
from tests.public import public_capture


def busy_by_phase(made: Attribution) -> dict[tuple[str | None, str | None], int]:
    """Nanoseconds of kernels by phase and by how it was found."""
    made.self_check()
    rows = made.kernels.group_by("phase", "found_by").agg(pl.col("duration_ns").sum())
    return {(phase, way): busy_ns for phase, way, busy_ns in rows.iter_rows()}


def without_phases(capture: Capture) -> Capture:
    capture.ranges = [row for row in capture.ranges if phase_of(row["name"]) is None]
    return capture


def summary_of(path: Path) -> TraceSummary:
    return TraceSummary(attribution=attribute(read_trace(path)), run=None)


def test_autograd_tells_backward_and_what_comes_before_it_is_forward():
    made = attribute(trace_table(without_phases(training_steps(steps=2, layers=2))))
    expected = {("forward", ORDER): 3600, ("backward", NODES): 4800, ("optimizer", UPDATES): 140}
    assert busy_by_phase(made) == expected
    assert made.steps == 2
    modules = made.rows.filter(pl.col("phase") == "backward").group_by("module").agg(pl.col("calls").sum())
    assert sorted(modules.rows()) == [(f"layers.{i}.{part}", 4) for i in range(2) for part in ("attention", "mlp")]


def test_steps_without_any_range_are_the_backward_passes():
    capture = without_phases(training_steps(steps=3, layers=1))
    capture.ranges = [row for row in capture.ranges if not row["name"].startswith("ProfilerStep")]
    assert attribute(trace_table(capture)).steps == 3


def test_a_users_range_of_a_phase_is_the_whole_of_it():
    capture = training_steps(steps=2, layers=2)
    capture.ranges = [row for row in capture.ranges if row["name"] != "forward"]
    capture.kernel(10, 77)  # before all forwards
    found = busy_by_phase(attribute(trace_table(capture)))
    assert found == {("forward", ORDER): 3600, ("backward", RANGES): 4800, ("optimizer", RANGES): 140, (None, None): 77}


def test_pytorchs_own_ranges_mark_no_phase_whole():
    capture = without_phases(training_steps(steps=1, layers=1))
    first = min(row["start"] for row in capture.operators)
    capture.range("DistributedDataParallel.forward", first, first + 100)  # the first of four operators of forward
    found = busy_by_phase(attribute(trace_table(capture)))
    assert found["forward", RANGES] + found["forward", ORDER] == 900 and found["forward", RANGES] < 900


def test_what_the_engine_launches_beside_its_nodes_is_backward():
    capture = without_phases(training_steps(steps=1, layers=1))
    last = max(row["end"] for row in capture.operators if row["thread"] == AUTOGRAD)
    capture.kernel(last + 1, 33, thread=AUTOGRAD, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)")
    found = busy_by_phase(attribute(trace_table(capture)))
    assert found["backward", THREAD] == 33
    assert found["backward", NODES] == 1200


def test_the_name_of_a_thread_tells_where_no_operator_was_recorded():
    capture = without_phases(training_steps(steps=1, layers=1))
    capture.operators, capture.links = [], []
    table = trace_table(capture)
    table.threads[PROCESS, AUTOGRAD] = "python, pt_autograd_0"
    found = busy_by_phase(attribute(table))
    assert found == {("backward", THREAD): 1200, (None, None): 970}


def test_an_evaluation_leads_to_no_backward():
    capture = without_phases(training_steps(steps=2, layers=1))
    end = max(row["end"] for row in capture.operators)
    # Without gradients an operator has no number; with gradients and no backward, it has one.
    capture.operator("aten::mm", end + 1000, end + 1100)
    capture.kernel(end + 1050, 41)
    capture.operator("aten::mm", end + 2000, end + 2100, sequence=999)
    capture.kernel(end + 2050, 43)
    found = busy_by_phase(attribute(trace_table(capture)))
    assert found[None, None] == 84
    assert found["forward", ORDER] == 1800


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("## forward ##", "forward"),
        ("##backward##", "backward"),
        ("=== Backward Pass ===", "backward"),
        ("[optimizer]", "optimizer"),
        ("<forward>", "forward"),
        ("## data_load ##", None),
        ("forward_pre_hook", None),
        ("Optimizer.step#AdamW.step", "optimizer"),
    ],
)
def test_a_frame_round_a_name_changes_nothing(name: str, phase: str | None):
    assert phase_of(name) == phase


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_real_loop_gives_what_its_ranges_give(tmp_path: Path, micro_batches: int):
    """The same capture with the ranges taken out gives each phase the same operators."""
    model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(32, 7))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x, y = torch.randn(64, 32), torch.randint(7, (64,))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            for _ in range(micro_batches):
                with record_function("forward"):
                    loss = nn.functional.cross_entropy(model(x), y)
                with record_function("backward"):
                    loss.backward()
            with torch.no_grad():
                model(x)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    marked, bare = tmp_path / "marked.json", tmp_path / "bare.json"
    profiler.export_chrome_trace(str(marked))
    trace = json.loads(marked.read_text())
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event.get("name") not in PHASES]
    bare.write_text(json.dumps(trace))
    whole, found = (attribute(read_trace(path)) for path in (marked, bare))
    assert whole.steps == found.steps == 2  # as the optimizer's own ranges say
    assert set(found.kernels["found_by"].drop_nulls().unique()) == {NODES, ORDER, RANGES, "zero_grad's ranges"}
    both = pl.DataFrame(
        {"name": whole.work["name"], "by_range": whole.work["phase"], "found": found.work["phase"]}
    ).filter(pl.col("by_range").ne_missing(pl.col("found")))
    # Only the gradient of the loss itself, which is made before the first node, is told otherwise.
    apart = {name for name, phase in both.select("name", "by_range").iter_rows() if phase is not None}
    assert apart <= {"aten::ones_like", "aten::fill_", "aten::empty_like", "aten::empty_strided", "aten::empty"}
    assert both.filter(pl.col("by_range").is_null())["found"].unique().to_list() in ([], ["optimizer"])


def _under_nodes(path: Path) -> tuple[float, float]:
    """Milliseconds of kernels launched while a node of autograd was open on the thread, and of all; in plain Python."""
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    nodes: dict[Any, list[tuple[float, float]]] = {}
    calls = {}
    for event in events:
        if event.get("cat") == "cpu_op" and event["name"].startswith("autograd::engine::evaluate_function"):
            nodes.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {}):
            calls[event["args"]["correlation"]] = event
    for spans in nodes.values():
        spans.sort()
    inside = total = 0.0
    for event in events:
        if event.get("cat") != "kernel":
            continue
        total += event["dur"]
        call = calls[event["args"]["correlation"]]
        spans = nodes.get(call["tid"], [])
        at = bisect_right(spans, (call["ts"], float("inf"))) - 1
        inside += event["dur"] if at >= 0 and call["ts"] < spans[at][1] else 0
    return inside / 1000, total / 1000


def test_a_published_capture_of_ddp_without_ranges():
    path = public_capture("tracelens_mi300_ddp_resnet18.json.gz")
    summary = summary_of(path)
    by_nodes, total = _under_nodes(path)
    found = {phase.phase: phase for phase in summary.phases}
    assert by_nodes == pytest.approx(242.676, abs=0.001)
    assert found["backward"].busy_ns * summary.steps / 1e6 == pytest.approx(by_nodes, abs=0.001)
    assert sum(phase.busy_ns for phase in found.values()) * summary.steps / 1e6 == pytest.approx(total, abs=0.001)
    assert [found[name].found_by for name in PHASES] == [ORDER, NODES, RANGES]
    assert "outside" not in found and not [f for f in check_trace(summary) if f.kind == "outside-phases"]


def test_a_published_capture_with_framed_ranges():
    summary = summary_of(public_capture("hta_v100_ddp_training.json.gz"))
    found = {phase.phase: phase for phase in summary.phases}
    assert summary.steps == 5 and found["backward"].found_by == RANGES
    assert found["backward"].busy_ns * 5 / 1e6 == pytest.approx(313.31, abs=0.005)


@pytest.mark.parametrize("name", ["tracelens_b200_inference", "tracelens_vllm_graph_execution", "tracelens_h100_qwen"])
def test_an_inference_has_no_phases_and_says_so(name: str):
    summary = summary_of(public_capture(f"{name}.json.gz"))
    (finding,) = [finding for finding in check_trace(summary) if finding.kind == "outside-phases"]
    assert re.search(r"\((100\.0|69\.9) %\) lie outside .* no phase could be told", finding.sentence)
    assert "record_function" in (finding.remedy or "")


@pytest.mark.parametrize(
    ("operator", "found"),
    [
        ("aten::_foreach_copy_", (None, None)),
        ("aten::_foreach_mul_", (None, None)),
        ("aten::_foreach_addcdiv_", ("optimizer", UPDATES)),
        ("aten::_fused_adamw_", ("optimizer", UPDATES)),
    ],
)
def test_where_nothing_trains_an_operator_over_lists_is_no_optimizer(
    operator: str, found: tuple[str | None, str | None]
):
    """A server copies its inputs so. What nothing but an update calls is one in any capture."""
    capture = Capture()
    capture.operator(operator, 100, 200)
    capture.kernel(120, 50)
    assert busy_by_phase(attribute(trace_table(capture))) == {found: 50}
