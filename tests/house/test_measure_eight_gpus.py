"""scripts/measure-eight-gpus: what it would run on GPUs; it runs on gloo ranks, and ends in time and when told."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepscope.core.model_config import configure
from stepscope.core.run import Settings
from stepscope.studies.parallel import parallel_cells

SCRIPT = [sys.executable, str(Path(__file__).parents[2] / "scripts" / "measure-eight-gpus")]


def script(*arguments: object, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SCRIPT, *map(str, arguments)], env={**os.environ, **environment}, capture_output=True, text=True,
        check=False, timeout=timeout,
    )  # fmt: skip


def steps_of(folder: Path) -> dict[str, dict[str, str | float | None]]:
    return {step["step"]: step for step in json.loads((folder / "summary.json").read_text())["steps"]}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_study_on_gpus_is_of_cells_that_may_be(ranks: int):
    lines = [shlex.split(line) for line in script("--list", "--ranks", ranks).stdout.splitlines()]
    studies = [words for words in lines if words[1:3] == ["study", "parallel"] and "--from" not in words]
    asked = [dict(zip(words[3::2], words[4::2], strict=True)) for words in studies]
    assert {one["--model"] for one in asked} == {"xl", "2.7B", "8B"}
    assert {number for one in asked for number in one["--ranks"].split(",")} == {"2", "4", "8"} - {
        str(number) for number in (4, 8) if number > ranks
    }
    for one in asked:
        _, refused = parallel_cells(
            strategies=one["--parallel"].split(","), ranks=[int(number) for number in one["--ranks"].split(",")],
            models=[configure(one["--model"])], seq_lens=[512], batch_size=int(one["--batch-size"]), dtypes=["bf16"],
            settings=Settings(),
        )  # fmt: skip
        assert refused == []


def test_without_gpus_a_line_says_the_remedy():
    done = script(CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (2, "")
    assert "sees no GPU" in done.stderr and "--device cpu --ranks 4" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--budget", "nan"), "--budget is nan: give seconds, 25 or more"),
        (("--budget", "-1"), "--budget is -1"),
        (("--out", "FILE"), "cannot write to FILE: Not a directory; choose another --out"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: tuple[str, ...], said: str, tmp_path: Path):
    (tmp_path / "file").write_text("")
    place = str(tmp_path / "file")
    done = script("--device", "cpu", "--ranks", 2, *(one.replace("FILE", place) for one in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert said.replace("FILE", place) in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.long
def test_two_gloo_ranks_leave_answers_and_what_no_time_is_left_for_is_named(tmp_path: Path):
    done = script("--device", "cpu", "--ranks", 2, "--budget", 150, "--out", tmp_path)
    steps = steps_of(tmp_path)
    outcomes = {name: str(step["outcome"]) for name, step in steps.items()}
    assert done.returncode == any(outcome.startswith("failed") for outcome in outcomes.values()), done.stdout
    assert (outcomes["collectives"], outcomes["traces of all ranks"]) == ("done", "done")
    assert outcomes["tiny: fsdp2,ddp x 2"].startswith(("done", "cut after"))  # by how busy the machine is
    assert all((step["exit_code"] == 0) == (step["outcome"] == "done") for step in steps.values())
    late = [step for step in steps.values() if str(step["outcome"]).startswith("not begun")]
    assert late and all("s left" in str(step["outcome"]) and step["seconds"] == 0 for step in late)
    assert "Strong scaling" in (tmp_path / "tiny.txt").read_text()
    assert "2 ranks" in (tmp_path / "traces.txt").read_text()
    assert "Latency and bandwidth" in (tmp_path / "collectives.txt").read_text()
    assert "Published figures" in (tmp_path / "plans.txt").read_text()


@pytest.mark.slow
@pytest.mark.long
def test_sigterm_leaves_what_was_measured(tmp_path: Path):
    process = subprocess.Popen([*SCRIPT, "--device", "cpu", "--ranks", "2", "--out", str(tmp_path)])
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("runs/*/run.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    steps = steps_of(tmp_path)
    assert steps["collectives"]["outcome"] == "done"
    assert str(steps["tiny: fsdp2,ddp x 2"]["outcome"]).startswith("cut by SIGTERM")
    assert steps["context parallel"]["outcome"] == "not begun: stopped by SIGTERM"
    assert (tmp_path / "collectives.json").exists() and list(tmp_path.glob("runs/*/run.json"))


@pytest.mark.slow
@pytest.mark.long
def test_without_polars_the_command_to_read_traces_is_named(tmp_path: Path):
    (tmp_path / "polars.py").write_text("raise ModuleNotFoundError(\"No module named 'polars'\", name='polars')")
    out = tmp_path / "out"
    traced = out / "traced" / "20260101T000000.000-tiny"
    traced.mkdir(parents=True)
    (traced / "run.json").write_text("{}")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    script("--device", "cpu", "--ranks", 2, "--budget", 5, "--out", out, PYTHONPATH=path)
    read = steps_of(out)["traces, read together"]
    assert read["outcome"] == "not begun: no polars here; run the command where it is"
    assert str(read["command"]).startswith("stepscope trace last --runs")
