"""Forecasts that are kept beside the runs: what is written comes back, whatever else lies in the file."""

import multiprocessing
import os
from pathlib import Path

import pytest

from stepscope.core.run_directory import FORECASTS_FILE, Forecast, forecast_of_peak, keep_forecasts, read_forecasts
from tests.command import stepscope


def peak(key: str, value: int = 1000) -> Forecast:
    return forecast_of_peak("fit", key, value, budget_bytes=2000, fits=True)


def test_what_is_kept_comes_back_in_its_order(tmp_path: Path):
    first, second = peak("a"), peak("b", 7)
    assert keep_forecasts(tmp_path / "runs", [first]) is None
    assert keep_forecasts(tmp_path / "runs", [second, first]) is None
    assert read_forecasts(tmp_path / "runs") == ([first, second, first], [])


def test_no_forecasts_are_no_fault(tmp_path: Path):
    assert read_forecasts(tmp_path) == ([], [])


def test_damaged_lines_are_counted_and_the_others_read(tmp_path: Path):
    keep_forecasts(tmp_path, [peak("a"), peak("b")])
    file = tmp_path / FORECASTS_FILE
    file.write_bytes(b'{"version": 1}\n\xff\xfe\n' + file.read_bytes() + b'{"made": "2026')
    found, (fault,) = read_forecasts(tmp_path)
    assert [forecast.workload for forecast in found] == ["a", "b"] and "3 of its lines" in fault


def _keep_many(folder: Path, name: str) -> None:
    for i in range(200):
        keep_forecasts(folder, [peak(f"{name}-{i}"), peak(f"{name}-{i}")])


def test_processes_that_foretell_at_once_lose_nothing(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_keep_many, args=(tmp_path, name)) for name in "abc"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found, faults = read_forecasts(tmp_path)
    assert len(found) == 1200 and not faults


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path):
    tmp_path.chmod(0o500)
    assert "not kept" in (keep_forecasts(tmp_path, [peak("a")]) or "")


def test_fit_keeps_what_it_foretells_and_answers_where_it_cannot(tmp_path: Path):
    done = stepscope("fit", "--model", "tiny", "--device", "H100", "--runs", tmp_path / "runs")
    (forecast,), faults = read_forecasts(tmp_path / "runs")
    assert done.returncode == 0 and not faults
    assert (forecast.by, forecast.fits) == ("fit", True) and forecast.value and forecast.workload.startswith("tiny-")
    (tmp_path / "a-file").write_text("")
    other = stepscope("fit", "--model", "tiny", "--device", "H100", "--runs", tmp_path / "a-file")
    assert other.returncode == 0 and other.stdout == done.stdout
    assert "the forecast is not kept" in other.stderr and other.stderr.count("\n") == 1
