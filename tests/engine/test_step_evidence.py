"""What a run reads beside its times, and when: round the measured steps, and not among those that warm up."""

import time
from pathlib import Path

import pytest
import torch

from stepscope.app.verbs.run import exit_code
from stepscope.core.environment import GpuReading
from stepscope.core.errors import EXIT_CHECK_FAILED, EXIT_DONE
from stepscope.core.evidence import MeasuredCompilation
from stepscope.core.run import Run, Settings
from stepscope.core.run_directory import load_run
from stepscope.engine import stages as timed
from stepscope.engine.request import StepRequest
from stepscope.engine.step import measure_step
from stepscope.recording.device import HostLoad
from stepscope.training import training_step
from stepscope.training.training_step import TrainingStep
from tests.conftest import at_length, mini
from tests.textbook import textbook

pytestmark = pytest.mark.slow

QUICK = Settings(warmup_floor=2, warmup_cap=2, steps_floor=3, steps_cap=3, seconds=0, profile=False)


def measured(out: Path, settings: Settings = QUICK, **changes: object) -> Run:
    return measure_step(StepRequest(workload=mini(**changes), settings=settings, device="cpu", out=str(out)))[0]


@pytest.mark.parametrize("warmup", [(0, 0), (3, 3), (1, 9)])
def test_readings_lie_round_the_measured_steps_alone(
    out: Path, monkeypatch: pytest.MonkeyPatch, warmup: tuple[int, int]
):
    """Clocks and load are read before warm-up, when it has ended, and after the last step: never between its steps."""
    happened: list[str] = []
    prepare = TrainingStep.prepare

    def prepared(step: TrainingStep) -> None:
        happened.append("step")
        prepare(step)

    def read_gpu(_: torch.device) -> GpuReading | None:
        happened.append("reading")
        return None

    class Load(HostLoad):
        def __init__(self) -> None:
            happened.append("load")
            super().__init__()

    monkeypatch.setattr(TrainingStep, "prepare", prepared)
    monkeypatch.setattr(timed, "read_gpu", read_gpu)
    monkeypatch.setattr(timed, "HostLoad", Load)
    floor, cap = warmup
    settings = Settings(warmup_floor=floor, warmup_cap=cap, steps_floor=3, steps_cap=3, seconds=0, profile=False)
    run = measured(out, settings)
    warmups = len(run.samples["step"].warmup_s)
    before, after = ["reading", "load"], ["reading"]
    expected = [*before, *["step"] * warmups, "reading", "load", *["step"] * 3, *after]
    assert floor <= warmups <= cap and happened[: len(expected)] == expected
    assert {"build", "warm-up", "measure", "observe"} <= run.evidence.stages_s.keys()
    assert run.evidence.stages_s["measure"] > sum(run.samples["step"].values_s) * 0.99


def compiled_without_a_backend(parts: training_step.StepParts, _mode: str) -> torch.nn.Module:
    """Compiled by dynamo and autograd for real, without the minutes of a C++ compiler."""
    compiled = torch.compile(parts.forward, backend="aot_eager")
    assert isinstance(compiled, torch.nn.Module)
    return compiled


@pytest.mark.parametrize(("warmup", "wrong"), [(0, True), (1, False)])
@pytest.mark.parametrize("steps", [1, *at_length(4)])
def test_a_compilation_in_a_measured_step_is_an_error_whatever_the_count(
    out: Path, monkeypatch: pytest.MonkeyPatch, warmup: int, wrong: bool, steps: int
):
    monkeypatch.setattr(training_step, "_compiled", compiled_without_a_backend)
    settings = Settings(
        warmup_floor=warmup, warmup_cap=warmup, steps_floor=steps, steps_cap=steps, seconds=0, profile=False
    )
    run = measured(out, settings, compile="default")
    found = run.evidence.compiled_while_measured
    assert found is not None and (found.frames > 0) is wrong
    assert (run.finding("compiled-while-measured") is not None) is wrong
    assert exit_code(run) == (EXIT_CHECK_FAILED if wrong else EXIT_DONE)


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("fp16", marks=pytest.mark.long)])
def test_a_run_has_the_evidence_of_what_ran_and_reads_back_with_it(out: Path, dtype: str):
    run = measured(out, dtype=dtype, accumulation=2, checkpointing="every-1", attention="sdpa")
    evidence = run.evidence
    assert evidence.compiled_while_measured == MeasuredCompilation()
    assert evidence.updates is not None and evidence.updates.steps == evidence.updates.applied == 3
    assert (evidence.updates.loss_scale is not None) is (dtype == "fp16")
    assert evidence.operators is not None and set(evidence.operators.calls) == {"forward", "backward", "optimizer"}
    assert evidence.observation is not None and evidence.observation.blocks_again == 2 * textbook(run).model.layers
    assert not [f for f in run.findings if f.kind.endswith("mismatch") or f.severity == "error"]
    assert load_run(out / run.id / "run.json").evidence == evidence


def test_inference_has_no_updates(out: Path):
    run = measured(out, phase="forward")
    assert run.evidence.updates is None and run.evidence.observation is not None
    assert run.evidence.observation.backward_passes == 0


def test_seconds_that_bound_the_whole_run_leave_out_what_they_have_no_time_for(
    out: Path, monkeypatch: pytest.MonkeyPatch
):
    """Steps are slow here: one is timed, nothing more is looked at, and it is said. Stored ceilings cost nothing."""
    prepare = TrainingStep.prepare

    def prepared(step: TrainingStep) -> None:
        time.sleep(1.2)
        prepare(step)

    monkeypatch.setattr(TrainingStep, "prepare", prepared)
    request = StepRequest(workload=mini(), settings=Settings(seconds=0.1), device="cpu", out=str(out), in_seconds=True)
    began_s = time.monotonic()
    run, _ = measure_step(request)
    assert time.monotonic() - began_s < 30  # ten steps after three of warm-up take more than the steps of this one
    assert run.status == "done" and run.samples["step"].count < 10 and run.evidence.profile is None
    assert any("--seconds 0.1 bounds the whole run" in note for note in run.evidence.notes)
    assert run.evidence.observation is None or run.samples["step"].count == 1
