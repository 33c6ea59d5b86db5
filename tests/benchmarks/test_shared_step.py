"""benchmarks/shared_step.py: two ranks on a CPU, both ways train the same model, and what is kept is shown."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARK = "benchmarks/shared_step.py"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("parallel", ["fsdp2", "ddp"])
def test_two_ranks_take_turns(tmp_path: Path, parallel: str):
    kept = tmp_path / "kept.json"
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    choices = ["--device", "cpu", "--dtype", "fp32", "--seq-len", "16", "--parallel", parallel]
    done = python(*ranks, BENCHMARK, *choices, "--pairs", "2", "--block", "1", "--json", str(kept))
    assert done.returncode == 0, done.stderr
    result = json.loads(kept.read_bytes())
    assert result["ranks"] == 2
    assert all(len(result[way]["values_s"]) == 2 for way in ("plain_s", "stepscope_s"))
    shown = python(BENCHMARK, "--show", str(kept))
    assert f"| {parallel} x 2 |" in shown.stdout, shown.stderr


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, ["src", os.environ.get("PYTHONPATH")]))}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=200, cwd=ROOT,
        env=environment,
    )  # fmt: skip


def test_without_torchrun_it_says_how_to_start():
    done = python(BENCHMARK)
    assert done.returncode == 2 and "torchrun --standalone" in done.stderr
