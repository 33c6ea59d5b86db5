"""The workflow that compares two commits of a pull request: its own steps, run here on a commit that is slower."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
WORKFLOW = ROOT / "docs" / "examples" / "compare-commits.yml"
EXAMPLE = ROOT / "docs" / "examples" / "delayed.py"


def job() -> dict[str, Any]:
    return yaml.safe_load(WORKFLOW.read_text())["jobs"]["compare"]


def step(name: str) -> dict[str, Any]:
    return next(step for step in job()["steps"] if step.get("name") == name)


def git(where: Path, *words: str) -> None:
    who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.com")
    subprocess.run(["git", *who, *words], cwd=where, check=True, capture_output=True)


def commits(place: Path, backward_ms: float) -> None:
    """Two checkouts of one repository, `base` and `head`; the later commit's backward takes so much longer."""
    base, head = place / "base", place / "head"
    base.mkdir()
    (base / "train.py").write_text(EXAMPLE.read_text())
    git(base, "init", "-q")
    git(base, "add", ".")
    git(base, "commit", "-qm", "Train a small transformer")
    git(place, "clone", "-q", str(base), str(head))
    slower = EXAMPLE.read_text().replace("backward_ms=0.0", f"backward_ms={backward_ms}")
    (head / "train.py").write_text(f"{slower}\n# a commit later\n")
    git(head, "commit", "-qam", "Look at the gradients")


def run_steps(place: Path, *names: str, **said: str) -> subprocess.CompletedProcess[str]:
    """Run the steps as a runner does: each a script of bash that ends at the first command that fails."""
    told = yaml.safe_load(WORKFLOW.read_text())["env"]
    quick = {"STEP": "--module train.py:make --steps 8 --warmup 2 --no-profile --device cpu", "PROCESSES": "5"}
    commands = place / "bin"  # the tool that is tested, where it is not installed, too
    commands.mkdir(exist_ok=True)
    (commands / "stepscope").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m stepscope "$@"\n')
    (commands / "stepscope").chmod(0o755)
    environment = {
        **os.environ, **told, **quick, **said, "OMP_NUM_THREADS": "1", "GITHUB_STEP_SUMMARY": str(place / "summary.md"),
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    done = subprocess.CompletedProcess[str]([], 0, "", "")
    for name in names:
        script = place / "step.sh"
        script.write_text(step(name)["run"])
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", script], cwd=place, env=environment, text=True,
            capture_output=True, check=False, timeout=500,
        )  # fmt: skip
        if done.returncode:
            break
    return done


@pytest.mark.long
@pytest.mark.slow
def test_a_slow_commit_fails_by_the_name_of_the_phase(tmp_path: Path):
    commits(tmp_path, backward_ms=150)  # far more than what a machine that runs other tests adds
    done = run_steps(tmp_path, "Measure both, in turns", "Compare")
    assert done.returncode == 1, done.stderr
    assert "slower than 3.0 % allows" in done.stderr and "most of it in backward" in done.stderr
    comparison = (tmp_path / "comparison.md").read_text()
    assert "| slower |" in comparison and "backward" in comparison and "other code" in comparison
    assert (tmp_path / "summary.md").read_text() == comparison
    assert len(list((tmp_path / "runs" / "base").glob("*/run.json"))) == 5


@pytest.mark.slow
@pytest.mark.long
def test_a_commit_that_changes_nothing_passes(tmp_path: Path):
    commits(tmp_path, backward_ms=0.0)
    done = run_steps(tmp_path, "Measure both, in turns", "Compare", LIMIT="100%")
    assert done.returncode == 0, done.stderr + done.stdout


def test_the_steps_stand_in_an_order_that_works():
    names = [step.get("name") for step in job()["steps"]]
    places = [names.index(name) for name in ("Install", "Measure both, in turns", "Compare", "Comment")]
    assert places == sorted(places)
    assert step("Comment")["if"] == "always()" and "comparison.md" in step("Comment")["run"]
    checkouts = {step["with"]["path"] for step in job()["steps"] if "path" in step.get("with", {})}
    assert checkouts == {"base", "head"}
