"""benchmarks/step.py: every way is a workload, a process for each, the table of what is kept."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.step import RIVAL, SIZES, WAYS, main, rendered

from stepscope.core.model_config import configure
from stepscope.core.workloads import TextbookWorkload


def line(way: str, step_s: float, peak_bytes: int) -> dict[str, Any]:
    figure = {"median": step_s, "least": step_s, "p95": step_s, "low": 0.9 * step_s, "high": 1.1 * step_s}
    return {
        "model": "large", "way": way, "device": "NVIDIA H200", "torch": "2.11", "peak_bytes": peak_bytes,
        "reserved_bytes": peak_bytes * 5 // 4, "choices": WAYS[way],
        "seconds": {"step": figure, "forward": {**figure, "median": step_s / 4, "low": None}},
    }  # fmt: skip


def test_every_way_is_a_workload_that_may_be():
    for size in SIZES:
        keys = [TextbookWorkload(model=configure(size), **choices).key for choices in WAYS.values()]  # pyright: ignore[reportArgumentType]
        # Only the rivals have a workload in common with others: their model is another.
        assert len(keys) == len(set(keys)) + sum(way.startswith(RIVAL) for way in WAYS)


def test_the_table_by_hand():
    failed = {"model": "large", "way": "graph", "fault": "took more than 5 s"}
    first, *rows = rendered(
        [line("today", 0.9, 1), line("today", 0.040, 2**31), failed, line("fused", 0.030, 2**30)]
    ).splitlines()
    assert first == "## large, NVIDIA H200, torch 2.11"
    assert rows[3] == "| today | 40.00 | 36.00 to 44.00 |  |  | 10.00 |  |  | 2.00 | 2.50 | 1.000 |"
    assert rows[4] == "| graph | took more than 5 s | | | | | | | | | |"
    assert rows[5] == "| fused | 30.00 | 27.00 to 33.00 |  |  | 7.50 |  |  |  | 1.25 | 0.750 |"


@pytest.mark.slow
@pytest.mark.long
def test_each_way_is_measured_in_a_process_and_one_that_fails_spoils_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "lines.jsonl"
    common = ["--models", "tiny", "--device", "cpu", "--batch", "2", "--sequence", "16", "--seconds", "0.1"]
    assert main([*common, "--only", "eager-fused-graph", "eager", "--out", str(out)]) == 0
    broken, sound = map(json.loads, out.read_text().splitlines())
    assert "fault" in broken and "fault" not in sound and sound["seconds"]["step"]["median"] > 0
    assert len(sound["losses"]) == 8
    assert main([*common, "--only", "eager", "--budget", "0"]) == 0
    assert "not measured: the seconds were over" in capsys.readouterr().out
