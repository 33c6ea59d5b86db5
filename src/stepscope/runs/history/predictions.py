"""Forecasts beside what was measured afterwards: how far off they were, and which verdicts came true."""

import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stepscope.allocations.prediction.fit import OUTSIDE_BYTES
from stepscope.core.answer import Answer, Cell, Table, as_lines, table_of
from stepscope.core.errors import InputError
from stepscope.core.forecasts import Forecast, read_forecasts
from stepscope.core.run import Run, instant_of
from stepscope.core.run_directory import load_run
from stepscope.core.units import counted
from stepscope.runs.metrics import peak_bytes

MOST_LOADED = 300
"""The most runs that are read to say how far forecasts were off, the newest."""

_SAME_BUDGET = 0.01
"""The share by which the memory of a run may differ from that of a verdict which is judged by it."""


@dataclass(frozen=True, kw_only=True)
class JudgedForecast:
    """A forecast, and the first run of its workload that was measured after it was made."""

    forecast: Forecast
    run: Run | None

    @property
    def measured(self) -> int | None:
        """What the run measured of the quantity; None where it ended before."""
        return peak_bytes(self.run) if self.run is not None and self.run.status == "done" else None

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one."""
        value, measured = self.forecast.value, self.measured
        return value / measured - 1 if value is not None and measured else None

    @property
    def came_true(self) -> bool | None:
        """Whether the verdict was right; None where there is none, or the run had other memory than it is about."""
        run, fits, budget = self.run, self.forecast.fits, self.forecast.budget_bytes
        if run is None or fits is None or budget is None or run.status not in ("done", "out-of-memory"):
            return None
        had = _usable_bytes(run)
        if had is None or abs(had / budget - 1) > _SAME_BUDGET:
            return None
        return fits == (run.status == "done")


def _usable_bytes(run: Run) -> int | None:
    """What PyTorch's allocator might take in this run."""
    environment = run.environment
    if environment is None:
        return None
    if environment.memory_limit_bytes is not None:
        return environment.memory_limit_bytes
    return environment.memory_bytes - OUTSIDE_BYTES if environment.memory_bytes else None


def judge(forecasts: Iterable[Forecast], runs: Iterable[Run]) -> list[JudgedForecast]:
    """Each forecast with what was measured after it, of its workload on its type of device."""
    by_key: dict[tuple[str, str], list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.instant, run.id)):
        if run.environment is not None:
            by_key.setdefault((run.workload.key, run.environment.device_type), []).append(run)
    return [
        JudgedForecast(
            forecast=forecast,
            run=next(
                (
                    run
                    for run in by_key.get((forecast.workload, forecast.device_type), [])
                    if run.instant > instant_of(forecast.made) and run.status in ("done", "out-of-memory")
                ),
                None,
            ),
        )
        for forecast in forecasts
    ]


def judged_in(folder: Path) -> tuple[list[JudgedForecast], list[str]]:
    """The forecasts that a folder of runs keeps, each with its run, and a line on what could not be read.

    Only runs of workloads that were foretold are read: their directories are named by the workload's key.
    """
    forecasts, faults = read_forecasts(folder)
    keys = {forecast.workload for forecast in forecasts}
    found: list[str] = []
    if keys:
        with os.scandir(folder) as entries:
            found = sorted(entry.name for entry in entries if entry.name.partition("-")[2] in keys)
    runs: list[Run] = []
    for name in found[-MOST_LOADED:]:
        try:
            runs.append(load_run(folder / name))
        except InputError as error:
            faults.append(str(error))
    return judge(forecasts, runs), faults


def error_bars(judged: Sequence[JudgedForecast]) -> str:
    """How far the forecasts of peaks were off, in a sentence; empty where none was measured since."""
    errors = sorted(one.error for one in judged if one.error is not None and not one.forecast.is_bound)
    if not errors:
        return ""
    if len(errors) == 1:
        return f"1 forecast of a peak kept here was measured since: off by {errors[0] * 100:+.2f} %."
    return (
        f"{len(errors)} forecasts of a peak kept here were measured since: off by {errors[0] * 100:+.2f} % to "
        f"{errors[-1] * 100:+.2f} %, {statistics.median(errors) * 100:+.2f} % in the middle."
    )


def answer_predictions(judged: Sequence[JudgedForecast]) -> Answer:
    """The Answer with every forecast beside what was measured, the newest last."""
    return Answer(study="history", question="How good were the forecasts?", tables=(_table(judged),))


def _table(judged: Sequence[JudgedForecast]) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            one.forecast.made[:16].replace("T", " "), one.forecast.by, one.forecast.workload,
            one.forecast.value, one.measured or ("OOM" if one.run and one.run.status == "out-of-memory" else None),
            one.error * 100 if one.error is not None else None, _verdict(one),
            one.run.id.partition("-")[0] if one.run else None,
        )
        for one in judged
    ]  # fmt: skip
    return table_of(
        "made", "by", "workload", ("predicted", "B"), ("measured", "B"), ("error", "{:+.2f} %"), "verdict", "run",
        rows=rows, notes=as_lines(*_sentences(judged)),
    )  # fmt: skip


def _verdict(one: JudgedForecast) -> str:
    if one.forecast.fits is None:
        return ""
    said = "fits" if one.forecast.fits else "does not fit"
    return {None: f"{said} (not tried)", True: said, False: f"{said}, wrongly"}[one.came_true]


def _sentences(judged: Sequence[JudgedForecast]) -> list[str]:
    verdicts = [one.came_true for one in judged if one.came_true is not None]
    waiting = sum(one.run is None for one in judged)
    said = [error_bars(judged)]
    if verdicts:
        said.append(f"{sum(verdicts)} of {counted(len(verdicts), 'verdict')} came true.")
    if waiting:
        said.append(f"{waiting} of {counted(len(judged), 'forecast')}: nothing was measured of it since.")
    return [sentence for sentence in said if sentence]


def predictions_as_json(judged: Sequence[JudgedForecast]) -> dict[str, Any]:
    """Plain data: each forecast, its run, and the errors as shares."""
    rows = [
        {
            **msgspec.to_builtins(one.forecast), "run": one.run.id if one.run else None, "measured": one.measured,
            "error": one.error, "came_true": one.came_true,
        }
        for one in judged
    ]  # fmt: skip
    errors = [one.error for one in judged if one.error is not None and not one.forecast.is_bound]
    return {
        "forecasts": rows, "judged": len(errors), "median_error": statistics.median(errors) if errors else None,
        "least_error": min(errors, default=None), "largest_error": max(errors, default=None),
    }  # fmt: skip
