"""Traces of a step: the files are what their readers expect, and watching changes nothing but the time."""

import gzip
import json
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.core.evidence import Capture
from stepscope.core.range_names import ATTENTION_PARTS
from stepscope.core.run import Run
from stepscope.core.run_directory import load_runs
from stepscope.engine.request import StepRequest, TraceRequest
from stepscope.engine.step import measure_step
from stepscope.recording import driven, ranges
from stepscope.recording.device import HostDevice
from stepscope.recording.timer import Peers
from stepscope.training.training_step import TrainingStep
from tests.app.cli.test_cli import QUICK, run_until, stepscope
from tests.conftest import mini

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LAYERS = 2
BLOCK = ("attention_norm", "attention", "feed_forward_norm", "feed_forward")
LINEARS = ("attention.query", "attention.key", "attention.value", "attention.output")
LINEARS += ("feed_forward.gate", "feed_forward.up", "feed_forward.down")


class Recorder:
    """An emitter that keeps what it was given, with the depth of each range."""

    def __init__(self) -> None:
        self.pushed: list[tuple[str, ...]] = []
        self.open: list[str] = []

    def push(self, name: str) -> None:
        self.open.append(name)
        self.pushed.append(tuple(self.open))

    def pop(self) -> None:
        self.open.pop()


def ranges_of_forward() -> Counter[str]:
    """How often each range inside the model opens in one forward pass."""
    expected: Counter[str] = Counter(ATTENTION_PARTS * LAYERS)
    expected += Counter(["embedding", "norm", "head"])
    expected += Counter(
        f"blocks.{i}{part}" for i in range(LAYERS) for part in ("", *(f".{p}" for p in BLOCK + LINEARS))
    )
    expected["rotary"] = 2 * LAYERS  # one module for queries and keys of every layer
    return expected


def events(directory: Path) -> list[dict[str, Any]]:
    with gzip.open(directory / "trace.kineto.json.gz", "rt") as file:
        return json.load(file)["traceEvents"]


def named(found: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return sorted((event for event in found if event.get("name") == name), key=lambda event: event["ts"])


def within(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


class Others(Peers):
    """Counts how often a process waits for the others."""

    def __init__(self) -> None:
        self.met = 0

    def barrier(self) -> None:
        self.met += 1


def test_ranks_begin_each_recorded_step_together(tmp_path: Path):
    """A profiler starts at its own time in each process: the first step would begin with waiting for the last one."""
    step, others = TrainingStep(mini(), CPU), Others()
    driven.capture_kineto(step, CPU, HostDevice(), tmp_path, steps=3, peers=others)
    assert others.met == 1 + 3, "the one that pays for the profiler's start, too"
    driven.profile_step(step, CPU, HostDevice(), others)
    assert others.met == 4 + 2
    driven.trace_nvtx(step, CPU, HostDevice(), 2, others)
    assert others.met == 6 + 2


def test_a_kineto_trace_holds_ranges_shapes_and_sequence_numbers(tmp_path: Path):
    step = TrainingStep(mini(), CPU)
    taken = driven.capture_kineto(step, CPU, HostDevice(), tmp_path, steps=3)
    assert (taken.tool, taken.steps, taken.artifact, taken.failure) == ("kineto", 3, "kineto", None)
    assert taken.step_s and set(taken.samples) == {"step", "host", "forward", "backward", "optimizer"}
    assert [path.name for path in tmp_path.iterdir()] == ["trace.kineto.json.gz"]
    found = events(tmp_path)
    annotations = Counter(event["name"] for event in found if event.get("cat") == "user_annotation")
    for name, count in {**ranges_of_forward(), "step": 1, "forward": 1, "backward": 1, "optimizer": 1}.items():
        assert annotations[name] == 3 * count, name
    # Phases lie inside their step, one after the other; the parts of attention inside their module.
    for i, whole in enumerate(named(found, "step")):
        phases = [named(found, phase)[i] for phase in ("forward", "backward", "optimizer")]
        assert all(within(phase, whole) for phase in phases)
        assert phases[0]["ts"] + phases[0]["dur"] <= phases[1]["ts"]
    assert all(
        any(within(part, module) for i in range(LAYERS) for module in named(found, f"blocks.{i}.attention"))
        for part in named(found, "softmax")
    )
    # Forward's products have shapes, and each has a sequence number that a node of backward has too.
    backward = {
        event["args"]["Sequence number"] for event in named(found, "autograd::engine::evaluate_function: MmBackward0")
    }
    products = [event for event in named(found, "aten::mm") if event["args"].get("Sequence number", -1) in backward]
    assert len(products) == 3 * (7 * LAYERS + 1)
    assert all(len(event["args"]["Input Dims"]) == 2 for event in products)
    with gzip.open(tmp_path / "trace.kineto.json.gz", "rt") as file:
        whole = json.load(file)
    # Not every version of PyTorch writes the host's name.
    assert (whole.get("host_name", ""), whole["traceName"]) == ("", "trace.kineto.json.gz")


def test_tracing_leaves_nothing_behind():
    step = TrainingStep(mini(), CPU)
    with ranges.detailed(step.model), ranges.emitted_to(Recorder()):
        pass
    assert ranges.detail_range("softmax") is ranges.named_range("step")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in step.model.modules())


def test_ranges_of_the_timed_steps_are_step_and_phases_alone():
    step, recorder = TrainingStep(mini(), CPU), Recorder()
    with ranges.emitted_to(recorder):
        driven.timed_steps(step, HostDevice(), 2)
    assert recorder.pushed == 2 * [("step",), ("step", "forward"), ("step", "backward"), ("step", "optimizer")]
    assert not recorder.open


@pytest.mark.usefixtures("quickly_compiled")
def test_a_compiled_step_is_traced_as_it_was_compiled(tmp_path: Path):
    step = TrainingStep(mini(compile="default", layers=1), CPU)
    driven.timed_steps(step, HostDevice(), 2)
    before = dict(torch._dynamo.utils.counters["stats"])
    driven.capture_kineto(step, CPU, HostDevice(), tmp_path, steps=1)
    assert dict(torch._dynamo.utils.counters["stats"]) == before
    names = Counter(event["name"] for event in events(tmp_path))
    assert (names["step"], names["forward"], names["backward"], names["blocks.0"]) == (1, 1, 1, 0)
    assert any("CompiledFunction" in name for name in names)


def test_a_trace_on_a_full_disk_is_not_kept_and_the_run_is(out: Path, monkeypatch: pytest.MonkeyPatch):
    def cut_short(self: object, path: str) -> None:
        Path(path).write_text('{"traceEvents": [{"ph": "X", "na')

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", cut_short)
    run = traced_run(out, "kineto")
    (taken,) = run.evidence.captures
    assert taken.failure and "cut short after 32 bytes" in taken.failure and taken.artifact is None
    assert run.status == "done" and run.failure is None and "kineto" not in run.artifacts
    assert [path.name for path in (out / run.id).iterdir()] == ["run.json"]


def traced_run(out: Path, *tools: Any, **changes: Any) -> Run:
    from stepscope.core.run import Settings

    settings = Settings(warmup_floor=1, warmup_cap=1, steps_floor=3, steps_cap=3, profile=False)
    trace = TraceRequest(tools=tools, **changes)
    run, _ = measure_step(StepRequest(workload=mini(), settings=settings, device="cpu", out=str(out), trace=trace))
    return run


def test_the_run_lists_the_trace_and_its_steps(tmp_path: Path):
    result = stepscope("run", *QUICK, "--no-profile", "--record", "kineto", "--trace-steps", "1", "--trace-stacks",
                       "--runs", str(tmp_path))  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "in the kineto trace of 1 step " in result.stdout and "trace.kineto.json.gz" in result.stdout
    (run,), _ = load_runs([tmp_path])
    (taken,) = run.evidence.captures
    assert isinstance(taken, Capture) and taken.steps == 1 and run.artifacts["kineto"] == "trace.kineto.json.gz"
    assert any(event.get("cat") == "python_function" for event in events(tmp_path / run.id))


@pytest.mark.long
def test_ctrl_c_while_tracing_keeps_the_times(tmp_path: Path):
    process = run_until(
        ("trace kineto",),
        *QUICK,
        "--no-profile",
        "--record",
        "kineto",
        "--trace-steps",
        "1000",
        "--runs",
        str(tmp_path),
    )
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in stderr
    (run,), _ = load_runs([tmp_path])
    assert run.status == "done" and run.samples["step"].count == 60
    assert run.failure and run.failure.during == "trace kineto"
    assert [path.name for path in (tmp_path / run.id).iterdir()] == ["run.json"]
