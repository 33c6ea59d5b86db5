"""scripts/measure-eight-gpus: what it would run on GPUs; it runs on gloo ranks, and ends in time and when told."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.core.model_config import configure
from stepscope.core.parts import named_kernels
from stepscope.core.run import Settings
from stepscope.core.workloads import TextbookWorkload
from stepscope.engine.request import grid
from stepscope.questions.parallel import parallel_cells

SCRIPT = [sys.executable, str(Path(__file__).parents[2] / "scripts" / "measure-eight-gpus")]


def script(*arguments: object, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SCRIPT, *map(str, arguments)], env={**os.environ, **environment}, capture_output=True, text=True,
        check=False, timeout=timeout,
    )  # fmt: skip


def steps_of(folder: Path) -> dict[str, dict[str, str | float | None]]:
    return {step["step"]: step for step in json.loads((folder / "summary.json").read_text())["steps"]}


def workloads_of(words: list[str]) -> list[TextbookWorkload]:
    """The workloads of a line of --list that measures; those of a study without what it refuses, of which there is
    none. Raises InputError for a workload that cannot be."""
    verb = 3 if words[1] == "study" else 2
    asked = dict(zip(words[verb::2], words[verb + 1 :: 2], strict=True))
    choices: dict[str, Any] = {
        "attention": asked["--attention"], "optimizer": asked["--optimizer"], "graph": asked.get("--graph", "none"),
        "checkpointing": asked.get("--checkpointing", "none"), "accumulation": int(asked.get("--accumulation", 1)),
        **named_kernels(asked["--kernels"]),
    }  # fmt: skip
    model, sizes = [configure(asked["--model"])], {"dtype": "bf16", "seq_len": int(asked["--seq-len"])}
    strategies, ranks = asked["--parallel"].split(","), [int(number) for number in asked["--ranks"].split(",")]
    batch = int(asked["--batch-size"])
    if words[1] != "study":
        return grid(model=model, **sizes, batch_size=batch, parallel=strategies, ranks=ranks, **choices)
    cells, refused = parallel_cells(
        strategies=strategies, ranks=ranks, models=model, seq_lens=[int(asked["--seq-len"])], batch_size=batch,
        dtypes=["bf16"], settings=Settings(), scaling=asked["--scaling"], **choices,
    )  # fmt: skip
    assert refused == []
    return [cell.workload for cell in cells if isinstance(cell.workload, TextbookWorkload)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_step_on_gpus_may_be_and_is_measured_once_beside_its_one_process(ranks: int):
    lines = [shlex.split(line) for line in script("--list", "--ranks", ranks).stdout.splitlines()]
    lines = [words for words in lines if "--parallel" in words and words[1] != "run"]
    found = [workload for words in lines for workload in workloads_of(words)]
    assert len(found) == len(set(found))
    assert {one.model.name for one in found} == {"large", "xl", "2.7B"} | ({"8B"} if ranks > 2 else set())
    assert {one.ranks for one in found} == {1, *(number for number in (2, 4, 8) if number <= ranks)}
    assert all(one.graph == "step" for one in found if one.parallel.startswith(("ddp", "zero1")))
    # A step of few tokens a rank waits for its hosts, and says nothing of ranks. Strong scaling asks for just that.
    weak = [one for one in found if one.batch_size != 24]
    assert all(one.tokens >= 4096 * one.ranks for one in weak)
    alone = {one.key for one in found if one.ranks == 1}
    for one in found:
        if one.parallel in ("ddp-bucketed", "fsdp2") and one.model.name != "8B":
            assert {key_of(one, 1), key_of(one, one.ranks)} & alone, one.key


def key_of(workload: TextbookWorkload, ranks: int) -> str:
    """The key of the one process that has a share of so many of its batch."""
    return msgspec.structs.replace(
        workload, parallel="none", ranks=1, batch_size=workload.batch_size // ranks
    ).key  # fmt: skip


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
    done = script("--device", "cpu", "--ranks", 2, "--budget", 120, "--out", tmp_path)
    steps = steps_of(tmp_path)
    outcomes = {name: str(step["outcome"]) for name, step in steps.items()}
    assert done.returncode == any(outcome.startswith("failed") for outcome in outcomes.values()), done.stdout
    assert outcomes["collectives"] == "done" and outcomes["traces of all ranks"].startswith("done")
    assert outcomes["tiny, weak: ddp-bucketed,fsdp2 x 2"].startswith(
        ("done", "cut after")
    )  # by how busy the machine is
    assert all((step["exit_code"] == 0) == (step["outcome"] == "done") for step in steps.values())
    assert all("doubted" in str(step["outcome"]) for step in steps.values() if step["exit_code"] == 1)
    late = [step for step in steps.values() if str(step["outcome"]).startswith("not begun")]
    assert late and all("s left" in str(step["outcome"]) and step["seconds"] == 0 for step in late)
    assert "Weak scaling" in (tmp_path / "tiny.txt").read_text()
    assert "2 ranks" in (tmp_path / "traces.txt").read_text()
    assert "Latency and bandwidth" in (tmp_path / "collectives.txt").read_text()
    assert "Published figures" in (tmp_path / "plans.txt").read_text()
    assert "fsdp2" in (tmp_path / "steps.txt").read_text()
    # Started again, the script measures no step a second time that was done.
    again = script("--device", "cpu", "--ranks", 2, "--budget", 20, "--out", tmp_path)
    assert "collectives: before: done" in again.stdout and "traces of all ranks: before: done" in again.stdout
    assert steps_of(tmp_path)["collectives"] == steps["collectives"]


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
    assert str(steps["tiny, weak: ddp-bucketed,fsdp2 x 2"]["outcome"]).startswith("cut by SIGTERM")
    assert steps["long sequences: context-textbook x 2"]["outcome"] == "not begun: stopped by SIGTERM"
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
