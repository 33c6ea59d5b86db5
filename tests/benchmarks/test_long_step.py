"""benchmarks/long_step.py: ranks on a CPU measure a tiny model, faults are kept, the table of what is kept."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.long_step import KIND, main, rendered, rows_of, workload_of

from stepscope.core.formulas.transformer import step_flops

ROOT = Path(__file__).parents[2]
TINY = ["--layers", "2", "--d-model", "64", "--d-ff", "128", "--heads", "2", "--vocabulary", "512", "--seq-len", "64"]


def kept(samples_s: list[float], **others: Any) -> dict[str, Any]:
    settings = {"batch_size": 2, "seq_len": 32_768, "liger": True, "attention": "cudnn"}
    return {
        "kind": KIND, "settings": settings, "devices": ["NVIDIA H200"] * 2, "samples_s": samples_s,
        "tflops_a_gpu": 395.39, "peak_bytes": [2**36, 2**36 + 2**30], **others,
    }  # fmt: skip


def test_the_table_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    whole, failed = tmp_path / "whole.json", tmp_path / "failed.json"
    whole.write_text(json.dumps(kept([6.1, 6.0, 5.9])))
    failed.write_text(json.dumps({"kind": KIND, "status": "failed", "fault": "rank 1: OutOfMemoryError: 3 GiB"}))
    assert main(["--show", str(whole), str(failed)]) == 0
    _, _, first, second = capsys.readouterr().out.splitlines()
    assert first == (
        "| Hugging Face Llama, Liger, SDPA cudnn, FSDP2 | 2 x NVIDIA H200 | 2 x 32768 | 3 | 6.000 | 5.900 to 6.100 | "
        "395.4 | 64.00, 65.00 |"
    )
    assert second == "| failed.json (rank 1: OutOfMemoryError: 3 GiB) |  |  |  |  |  |  |  |"


def test_runs_of_stepscope_stand_in_the_same_table():
    rows = rows_of(ROOT / "results" / "cpu" / "parallel")
    assert len(rows) > 2
    table = rendered(rows)
    assert "| stepscope, tiny fp32 train fsdp2-x2 | 2 x " in table and "| 4 x 64 |" in table


def test_flops_by_hand():
    asked = argparse.Namespace(
        layers=34, d_model=4096, d_ff=11008, heads=32, vocabulary=151_936, seq_len=32_768, batch_size=2, dtype="bf16"
    )

    matrices = 34 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 151_936
    attention = 2 * 34 * 3 * 2 * 32_768**2 * 4096
    assert step_flops(workload_of(asked)) == 6 * matrices * 2 * 32_768 + attention


def torchrun(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "benchmarks/long_step.py", *TINY, "--device", "cpu", "--steps", "2", "--warmup", "1",
        "--out", str(out), *options,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, ["src", os.environ.get("PYTHONPATH")]))}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=200, cwd=ROOT, env=environment
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.long
def test_two_ranks_measure_a_step_on_a_cpu(tmp_path: Path):
    pytest.importorskip("transformers")
    out = tmp_path / "rival.json"
    done = torchrun(out, "--no-liger", "--losses", "2")
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["status"] == "done" and "fault" not in result
    assert len(result["warmup_s"]) == 1 and len(result["samples_s"]) == 2
    assert min(result["samples_s"]) <= result["median_s"] <= max(result["samples_s"])
    # A random model knows nothing: about log 512.
    assert len(result["losses"]) == 2 and all(6.0 < loss < 6.5 for loss in result["losses"])
    [row] = rows_of(out)
    assert row["fault"] is None and row["devices"] == ["cpu", "cpu"] and row["shape"] == "2 x 64"


@pytest.mark.slow
@pytest.mark.long
def test_a_fault_is_kept_and_the_exit_says_so(tmp_path: Path):
    out = tmp_path / "rival.json"
    out.write_text(json.dumps(kept([1.0])))
    done = torchrun(out, "--no-liger", "--batch-size", "3")
    assert done.returncode != 0
    result = json.loads(out.read_text())
    assert "2 ranks cannot share 3 sequences evenly" in result["fault"] and "samples_s" not in result


@pytest.mark.slow
@pytest.mark.long
def test_ours_has_the_losses_of_the_rival(tmp_path: Path):
    pytest.importorskip("transformers")
    losses: list[list[float]] = []
    for name, options in (("rival", ["--no-liger"]), ("ours", ["--ours", "selective-1"])):
        done = torchrun(tmp_path / f"{name}.json", "--dtype", "fp32", *options)
        assert done.returncode == 0, done.stderr
        losses.append(json.loads((tmp_path / f"{name}.json").read_text())["losses"])
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert rows_of(tmp_path / "ours.json")[0]["step"].startswith("stepscope, ")
