"""Figures of a run in the trackers of a script, each with the real library; skipped where it is not installed."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from stepscope.core.errors import InputError
from stepscope.core.run_directory import load_runs
from stepscope.engine.trackers import figures_of, trackers_named
from tests.command import Done, python, stepscope

LOOP = """
import torch
from torch import nn
{begin}
net = nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(40):
    loss = net(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    {log}
{end}
"""
pytestmark = pytest.mark.slow

STEPS = ("--steps", "4:9")


def needs(library: str, module: str = "") -> Any:
    return pytest.importorskip(module or library, reason=f"needs {library}: pip install 'stepscope[trackers]'")


def watched(log: str, folder: Path, *, begin: str = "", each: str = "pass", end: str = "", **environment: Any) -> Done:
    (folder / "train.py").write_text(LOOP.format(begin=begin, log=each, end=end))
    done = stepscope("watch", *STEPS, "--log", log, "--", "train.py", cwd=folder, **environment)
    assert done.returncode == 0, done.stderr
    return done


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = needs("tensorboard", "tensorboard.backend.event_processing.event_accumulator").EventAccumulator(
        str(folder)
    )
    events.Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_wandb_gets_them_beside_what_the_script_logs_next(tmp_path: Path):
    needs("wandb")
    done = watched(
        "wandb", tmp_path, begin="import wandb; own = wandb.init(project='p', name='mine')",
        each="own.log({'loss': loss.item()})", end="print(own.step, own.summary['stepscope/step_median_s'])",
        WANDB_MODE="offline", WANDB_SILENT="true",
    )  # fmt: skip
    ((run,), _) = load_runs([tmp_path / "runs"])
    rows, median_s = done.stdout.split()
    assert int(rows) == 40  # the script's own, and none of ours
    assert float(median_s) == run.summary["step_median_s"]
    assert "figures go to the run mine" in done.stderr
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1


def test_mlflow_gets_them_at_the_scripts_own_step(tmp_path: Path):
    mlflow = needs("mlflow")
    watched(
        "mlflow", tmp_path, begin="import mlflow; mlflow.start_run(run_name='mine')",
        MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/mlflow.db",
    )  # fmt: skip
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (kept,) = client.search_runs(["0"])
    ((run,), _) = load_runs([tmp_path / "runs"])
    assert kept.info.run_name == "mine"
    assert kept.data.metrics == pytest.approx(figures_of(run))
    first, *_ = client.get_metric_history(kept.info.run_id, "stepscope/step_median_s")
    assert 9 <= first.step <= 11  # the times are known when step 8 has ended


@pytest.mark.parametrize("has_writer", [True, False])
def test_tensorboard_gets_them_in_the_scripts_writer_or_in_the_runs_folder(has_writer: bool, tmp_path: Path):
    needs("tensorboard")
    begin = "from torch.utils.tensorboard import SummaryWriter; writer = SummaryWriter('mine')" if has_writer else ""
    watched("tensorboard", tmp_path, begin=begin, each="writer.add_scalar('loss', loss.item(), step)" * has_writer)
    ((run,), _) = load_runs([tmp_path / "runs"])
    own = tmp_path / "runs" / run.id / "tensorboard"
    assert own.exists() is not has_writer
    found = scalars(tmp_path / "mine" if has_writer else own)
    assert ("loss" in found) is has_writer
    _, median_s = found["stepscope/step_median_s"][-1]
    assert median_s == pytest.approx(run.summary["step_median_s"], rel=1e-6)


def test_a_script_without_a_run_gets_none(tmp_path: Path):
    needs("wandb")
    done = watched("wandb", tmp_path, begin="import wandb")
    assert "--log wandb: no run of Weights & Biases is active in this script, so nothing is written" in done.stderr
    assert not (tmp_path / "wandb").exists()


def test_a_run_has_one_of_its_own_or_the_active_one(tmp_path: Path):
    mlflow = needs("mlflow")
    store = f"sqlite:///{tmp_path}/mlflow.db"
    words = ("--model", "tiny", "--seq-len", "8", "--device", "cpu", "--steps", "5", "--warmup", "1", "--no-profile")
    done = stepscope("run", *words, "--log", "mlflow", "--json", cwd=tmp_path, MLFLOW_TRACKING_URI=store)
    assert done.returncode in (0, 1) and done.stdout.startswith("{"), done.stderr
    (tmp_path / "inside.py").write_text(
        "import mlflow, stepscope\nwith mlflow.start_run(run_name='mine'):\n"
        "    stepscope.run('tiny', seq_len=8, steps=5, warmup=1, profile=False, device='cpu', log='mlflow')\n"
    )
    done = python("inside.py", cwd=tmp_path, MLFLOW_TRACKING_URI=store)
    assert done.returncode == 0, done.stderr
    inside, alone = mlflow.MlflowClient(store).search_runs(["0"])
    runs, _ = load_runs([tmp_path / "runs"])
    assert [alone.info.run_name, inside.info.run_name] == [runs[0].id, "mine"]
    assert alone.info.status == "FINISHED" and alone.data.params["workload"].startswith("tiny-b4-s8")
    assert [alone.data.metrics, inside.data.metrics] == [pytest.approx(figures_of(run)) for run in runs]


def test_a_library_that_is_missing_is_said_before_the_script_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder like the one that wandb makes for its files is no library, though Python would import it."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("wandb", "mlflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        said = re.escape(f"--log {name} needs") + f".*not installed here: pip install {name}"
        with pytest.raises(InputError, match=said):
            trackers_named(name)
    (tmp_path / "train.py").write_text("print('begun')")
    done = stepscope("watch", "--log", "clearml", "--", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "stepscope: unknown log 'clearml': choose one of wandb, mlflow, tensorboard\n"
