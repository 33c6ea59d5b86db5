"""Forecasts beside what was measured afterwards, by hand-made runs."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.allocations.prediction.fit import OUTSIDE_BYTES
from stepscope.core.evidence import Evidence, PhaseMemory
from stepscope.core.run import Run
from stepscope.core.run_directory import Forecast, create_run_directory, keep_forecasts, save_run
from stepscope.core.workloads import TextbookWorkload
from stepscope.runs.history import (
    Forecasts,
    answer_predictions,
    error_bars,
    judge,
    judged_in,
)
from tests.conftest import make_run, mini
from tests.shown import check_golden, shown

GOLDEN = Path(__file__).parents[2] / "golden"
GIB = 2**30


def foretold(of: TextbookWorkload, value: int | None, day: int = 1, **more: Any) -> Forecast:
    return Forecast(made=f"2026-01-0{day}T00:00:00.000+00:00", by="fit", workload=of.key, value=value, **more)


def measured(of: TextbookWorkload, peak: int | None, day: int = 2, *, limit: int | None = None, **more: Any) -> Run:
    run = make_run(of, step=[1.0], **more)
    assert run.environment is not None
    environment = msgspec.structs.replace(
        run.environment, device_type="cuda", device_name="NVIDIA H200", memory_bytes=140 * GIB, memory_limit_bytes=limit
    )
    memory = PhaseMemory(parameter_bytes=1, backward_peak=peak) if peak else None
    return msgspec.structs.replace(
        run, environment=environment, evidence=Evidence(memory=memory), created=f"2026-01-0{day}T12:00:00.000+00:00",
        id=f"2026010{day}T120000.000-{of.key}",
    )  # fmt: skip


def test_a_forecast_is_judged_by_the_first_run_after_it():
    of = mini()
    runs = [measured(of, 500, day=1), measured(of, 1000, day=3), measured(of, 2000, day=4)]
    early, late = judge([foretold(of, 1100, day=1), foretold(of, 1100, day=4)], runs)
    assert early.measured == 500 and early.error == pytest.approx(1.2), "at noon of the same day"
    assert late.measured == 2000 and late.error == pytest.approx(-0.45)


def test_other_workloads_and_other_devices_judge_nothing():
    of = mini()
    on_cpu = msgspec.structs.replace(make_run(of, step=[1.0]), created="2026-02-01T00:00:00.000+00:00")
    (one,) = judge([foretold(of, 1000)], [measured(mini(seq_len=32), 1000), on_cpu])
    assert one.run is None and one.error is None and one.came_true is None


@pytest.mark.parametrize(
    ("fits", "status", "right"),
    [(True, "done", True), (True, "out-of-memory", False), (False, "out-of-memory", True), (False, "done", False)],
)
def test_a_verdict_is_judged_by_what_became_of_the_run(fits: bool, status: str, right: bool):
    of = mini()
    run = measured(of, 1000 if status == "done" else None, status=status)
    (one,) = judge([foretold(of, 1000, fits=fits, budget_bytes=140 * GIB - OUTSIDE_BYTES)], [run])
    assert one.came_true is right


def test_a_verdict_on_other_memory_is_not_judged():
    of = mini()
    (one,) = judge([foretold(of, 1000, fits=True, budget_bytes=80 * GIB)], [measured(of, 1000)])
    assert one.came_true is None
    (same,) = judge([foretold(of, 1000, fits=True, budget_bytes=80 * GIB)], [measured(of, 1000, limit=80 * GIB)])
    assert same.came_true is True


def test_error_bars_leave_bounds_out():
    of, bound = mini(), mini(seq_len=32)
    runs = [measured(of, 1000), measured(bound, 1000)]
    judged = judge([foretold(of, 1010), foretold(of, 990), foretold(bound, 5000, is_bound=True)], runs)
    assert error_bars(judged).startswith("2 forecasts of a peak kept here were measured since: off by -1.00 % to +1.00")
    assert Forecasts.of(judged).judged == 2
    assert error_bars([]) == ""


def test_the_answer_as_it_is_shown():
    of, other, never = mini(), mini(seq_len=32), mini(seq_len=64)
    budget = 140 * GIB - OUTSIDE_BYTES
    forecasts = [
        foretold(of, 3 * GIB, fits=True, budget_bytes=budget),
        foretold(other, 200 * GIB, fits=False, budget_bytes=budget),
        foretold(never, None, fits=True, budget_bytes=budget),
    ]
    runs = [measured(of, 3 * GIB - 3 * 2**20), measured(other, None, status="out-of-memory")]
    check_golden(shown(answer_predictions(judge(forecasts, runs)), width=180), GOLDEN / "predictions.txt")


def test_forecasts_and_runs_of_a_folder_find_one_another(tmp_path: Path):
    of = mini()
    keep_forecasts(tmp_path, [foretold(of, 1100)])
    directory = create_run_directory(tmp_path, of)
    save_run(measured(of, 1000), directory)
    save_run(measured(mini(seq_len=32), 1000), create_run_directory(tmp_path, mini(seq_len=32)))
    broken = create_run_directory(tmp_path, of)
    (broken / "run.json").write_text("{")
    (one,), (fault,) = judged_in(tmp_path)
    assert one.error == pytest.approx(0.1) and str(broken) in fault
