"""`stepscope history`, as its user runs it: stored runs, runs of a checkout of one's own, and wrong input."""

import json
import subprocess
from pathlib import Path

import msgspec
import pytest

from stepscope.core.run_directory import load_runs, save_run
from tests.command import stepscope
from tests.conftest import make_run

STORED = Path(__file__).parents[3] / "results" / "h200" / "plain"


def keep(folder: Path, count: int, *, seconds: float, first: int = 0, tag: str | None = None) -> None:
    """Write so many runs, a day apart."""
    for i in range(first, first + count):
        run = make_run(step=[seconds * (1 + 0.001 * (i * 7 % 5))] * 6)
        created = f"2026-01-{1 + i:02d}T00:00:00+00:00"
        directory = folder / f"202601{1 + i:02d}T000000.000-r"
        directory.mkdir(parents=True)
        save_run(msgspec.structs.replace(run, id=directory.name, created=created, tag=tag), directory)


@pytest.fixture
def slower(tmp_path: Path) -> Path:
    """Ten runs, and ten that are 5 % slower."""
    folder = tmp_path / "runs"
    keep(folder, 10, seconds=0.1, tag="spring")
    keep(folder, 10, seconds=0.105, first=10, tag="summer")
    return folder


def test_a_change_of_level_in_words_json_and_a_picture(slower: Path, tmp_path: Path):
    shown = stepscope("history", slower)
    assert shown.returncode == 0 and "slower by 2026-01-11" in " ".join(shown.stdout.split())
    told = json.loads(stepscope("history", slower, "--json").stdout)
    [trend] = told["trends"]
    [change] = trend["changes"]
    assert len(trend["points"]) == 20
    assert change["before"].startswith("20260110") and change["after"].startswith("20260111")
    assert change["change"] == pytest.approx(0.05, abs=0.003)
    picture = tmp_path / "trend.svg"
    one = stepscope("history", slower, "--workload", trend["workload"][:12], "--save", picture)
    assert one.returncode == 0 and one.stdout.count("new level") == 1
    assert "<svg" in picture.read_text()
    assert (
        len(json.loads(stepscope("history", slower, "--tag", "spring", "--json").stdout)["trends"][0]["points"]) == 10
    )
    assert stepscope("history", slower, "--style", "csv").stdout.count("\n") >= 2


def test_stored_runs_are_a_trend_each():
    told = json.loads(stepscope("history", STORED, "--where", "dtype=bf16", "--json").stdout)
    assert {len(trend["points"]) for trend in told["trends"]} == {1}
    assert all("-bf16-" in trend["workload"] for trend in told["trends"]) and len(told["trends"]) > 5


def test_a_damaged_run_is_named_and_the_rest_is_shown(slower: Path):
    damaged = sorted(slower.iterdir())[4] / "run.json"
    damaged.write_text(damaged.read_text()[:100])
    done = stepscope("history", slower)
    assert done.returncode == 0 and "trends" in done.stdout
    assert f"left out: {damaged}" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("{runs}/none",), "does not exist"),
        (("{runs}", "--workload", "xl"), "no workload here has 'xl' in its key"),
        (("{runs}", "--save", "trend.svg"), "name it with --workload"),
        (("{runs}", "--tag", "autumn"), "with tag=autumn"),
        (("{runs}", "--where", "colour=red"), "colour"),
        (("{runs}", "--predictions"), "no forecasts in"),
        (("{runs}", "--predictions", "--tag", "spring"), "leave out the other choices"),
        (("{runs}", "--style", "csv", "--json"), "ask for one"),
    ],
)
def test_wrong_input_is_one_line(slower: Path, arguments: tuple[str, ...], said: str):
    done = stepscope("history", *(word.format(runs=slower) for word in arguments))
    assert done.returncode == 2 and said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


FACTORY = """
import torch
def make(width: int = 8):
    model = torch.nn.Linear(width, width)
    return model, (torch.randn(4, width),), lambda y: y.square().mean()
"""


def git(folder: Path, *words: str) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *settings, *words], cwd=folder, capture_output=True, text=True, check=True).stdout


def test_runs_of_a_model_of_ones_own_are_dated_by_its_commits(tmp_path: Path):
    """The commit is that of the checkout that the command was started in; what measuring leaves there is no change."""
    model = tmp_path / "model.py"
    git(tmp_path, "init", "-q")
    commits: list[str] = []
    for words in ("", "# a word more\n"):
        model.write_text(FACTORY + words)
        git(tmp_path, "add", "model.py")
        git(tmp_path, "commit", "-qm", "a step")
        commits.append(git(tmp_path, "rev-parse", "HEAD").strip())
        run = ("run", "--module", "model.py:make", "--device", "cpu", "--steps", "3", "--warmup", "0", "--no-profile")
        done = stepscope(*run, cwd=tmp_path)
        assert done.returncode in (0, 1), done.stderr
    model.write_text(FACTORY + "# uncommitted\n")
    assert stepscope(*run, cwd=tmp_path).returncode in (0, 1)
    runs, _ = load_runs([tmp_path / "runs"])
    found = [run.environment.code for run in runs if run.environment]
    assert found == [(commits[0], False), (commits[1], False), (commits[1], True)]
    [trend] = json.loads(stepscope("history", "--json", cwd=tmp_path).stdout)["trends"]
    assert [point["commit"] for point in trend["points"]] == [commits[0], commits[1], commits[1]]
    compared = stepscope("compare", commits[0][:8], f"commit:{commits[1][:8]}", cwd=tmp_path)
    assert "measured at the commits" in " ".join(compared.stdout.split()), compared.stderr
