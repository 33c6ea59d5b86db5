"""Predicted against measured on an H200: every stored run whose memory was read, phase by phase.

None of these runs gave a constant to the prediction. The bounds are about twice what they are off today.
"""

import statistics
from functools import cache
from pathlib import Path

import pytest

from stepscope.allocations.prediction.estimate import estimate
from stepscope.allocations.prediction.fit import budget_of_memory, fit, will_fit
from stepscope.core.run import Run
from stepscope.core.run_directory import load_runs
from stepscope.core.units import GIB
from tests.textbook import textbook

pytestmark = pytest.mark.slow

RESULTS = Path(__file__).parents[3] / "results" / "h200"
MEASURED = ("plain", "tf32", "optimizer", "compile", "best", "kernels")
LIMIT = 80 * GIB

BOUNDS = {
    # Op by op: the cache's remainders, up to 1 MiB each, fall otherwise than predicted.
    "eager": {
        "after_parameters": 0.003,
        "forward_peak": 0.003,
        "saved_for_backward": 0.01,
        "backward_peak": 0.003,
        "optimizer_peak": 0.004,
    },
    # torch.compile's own choice of what to keep is followed by hand.
    "compiled": {
        "after_parameters": 0.006,
        "forward_peak": 0.009,
        "saved_for_backward": 0.011,
        "backward_peak": 0.011,
        "optimizer_peak": 0.006,
    },
}


def runs_in(*folders: str) -> list[Run]:
    runs, faults = load_runs([RESULTS / folder for folder in folders])
    assert not faults
    return runs


predict = cache(estimate)


def cell(run: Run) -> str:
    return run.workload.key


FINISHED = {run.workload.key: run for run in runs_in(*MEASURED, "limit-80GiB") if run.evidence.memory is not None}
WITH_PEAKS = [run for run in FINISHED.values() if run.evidence.memory and run.evidence.memory.allocated_peak]
"""All but the step in CUDA graphs, whose tensors nobody counts."""


def test_there_is_something_to_compare():
    assert len(WITH_PEAKS) >= 60 and len(FINISHED) - len(WITH_PEAKS) <= 1
    assert {run.workload.phase for run in WITH_PEAKS} == {"forward", "train"}
    assert {run.workload.dtype for run in WITH_PEAKS} == {"fp32", "tf32", "bf16"}


@pytest.mark.parametrize("run", WITH_PEAKS, ids=cell)
def test_every_peak_is_as_measured(run: Run):
    measured, predicted = run.evidence.memory, predict(run.workload)
    assert measured is not None and measured.allocated_peak is not None and measured.reserved_peak is not None
    assert predicted.peak_bytes == pytest.approx(measured.allocated_peak, rel=0.01)
    for name, bound in BOUNDS["eager" if run.workload.compile == "eager" else "compiled"].items():
        truth, ours = getattr(measured, name), getattr(predicted, name)
        assert (truth is None) == (ours is None), name
        if truth is not None:
            assert ours == pytest.approx(truth, rel=bound), name
    # Inference reserves little; one segment more or less is a large share of it.
    assert predicted.reserved_peak == pytest.approx(measured.reserved_peak, rel=0.03, abs=64 * 2**20)


def test_most_are_as_measured_to_a_thousandth():
    errors = [
        abs(predict(run.workload).peak_bytes / run.evidence.memory.allocated_peak - 1)
        for run in WITH_PEAKS
        if run.evidence.memory and run.evidence.memory.allocated_peak
    ]
    assert statistics.median(errors) <= 0.0002
    assert sorted(errors)[len(errors) * 9 // 10] <= 0.002


def test_every_choice_that_a_step_has():
    """A wider sweep of choices: every attention and dtype, compiled inference, checkpointing, micro-batches. (The
    recorded steps are left out: one process ran them all, and kept the workspaces of those before.)"""
    errors: dict[str, list[float]] = {"eager": [], "compiled": []}
    for run in runs_in(*(folder.name for folder in RESULTS.glob("memory*") if folder.name != "memory-recorded")):
        measured = run.evidence.memory
        if run.status != "done" or measured is None or measured.allocated_peak is None:
            continue
        error = predict(run.workload).peak_bytes / measured.allocated_peak - 1
        errors["eager" if run.workload.compile == "eager" else "compiled"].append(abs(error))
    assert len(errors["eager"]) >= 60 and len(errors["compiled"]) >= 20
    assert statistics.median(errors["eager"]) <= 0.0005 and max(errors["eager"]) <= 0.02
    assert statistics.median(errors["compiled"]) <= 0.005 and max(errors["compiled"]) <= 0.05


def test_inference_op_by_op_is_mostly_exact_to_the_byte():
    runs = [run for run in WITH_PEAKS if run.workload.phase == "forward" and run.workload.compile == "eager"]
    same = [
        run
        for run in runs
        if run.evidence.memory and predict(run.workload).forward_peak == run.evidence.memory.forward_peak
    ]
    assert len(same) >= 0.8 * len(runs) > 0


@pytest.mark.parametrize("run", runs_in("limit-80GiB"), ids=cell)
def test_the_verdict_under_80_gib_is_what_happened(run: Run):
    """And where it ran out of memory, in which phase."""
    assert run.environment is not None and run.environment.memory_limit_bytes == LIMIT
    assert run.status in ("done", "out-of-memory")
    answer = fit(textbook(run), budget_of_memory(LIMIT))
    assert answer.fits == (run.status == "done") == will_fit(textbook(run), budget_of_memory(LIMIT))
    assert answer.fails_in == (run.failure.phase if run.failure else None)


def test_under_80_gib_two_cells_of_twenty_run_out_of_memory():
    runs = runs_in("limit-80GiB")
    failed = {(run.workload.model.name, run.workload.seq_len) for run in runs if run.status == "out-of-memory"}
    assert len(runs) == 20 and failed == {("xl", 1024), ("2.7B", 1024)}
