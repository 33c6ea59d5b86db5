"""Advice on a watched script: lines of it, a diff that patch takes, and a gain within what was foretold."""

import ast
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stepscope.app.verbs.stored_runs import show
from stepscope.core.errors import InputError
from stepscope.core.run import Run
from stepscope.runs import advice as made
from stepscope.runs.advice import Edit, Source, Unsure
from stepscope.runs.live import first_lines
from tests.command import stepscope

SLOW = """import time

import torch
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, i):
        time.sleep(0.01)
        return torch.randn(32), i % 8


loader = DataLoader(
    Slow(),
    batch_size=2,
)
model = torch.nn.Linear(32, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, (x, y) in enumerate(loader):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 40:
        break
"""
LOOPS = """import torch
from torch import nn

model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(80)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
total = 0.0
for step in range(60):
    loss = model(torch.randn(8, 32)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    total += loss.item()
"""


NOISE = {"host-busy", "wide-spread", "not-steady"}
"""Findings by which a run says that other processes took part in its times."""


def watched(folder: Path, script: str) -> tuple[float, bool]:
    """Watch the script in this folder; the seconds of its mean step, and whether the run doubts them."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    done = stepscope("watch", "--steps", "12:36", "--", "train.py", cwd=folder, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    run = json.loads(stepscope("show", "last", "--json", cwd=folder).stdout)
    values = run["samples"]["step"]["values_s"]
    return sum(values) / len(values), not NOISE.isdisjoint(finding["kind"] for finding in run["findings"])


def advised(folder: Path) -> dict[str, dict[str, Any]]:
    done = stepscope("advise", "last", "--json", cwd=folder)
    return {one["kind"]: one for one in json.loads(done.stdout)["advice"]}


def scattered(run: Run) -> Run:
    """The run with steps so far apart that the advice's interval begins below nothing, as on a busy machine."""
    step = run.samples["step"]
    values = tuple(value * (8 if i % 2 else 0.125) for i, value in enumerate(step.values_s))
    return replace(run, samples={**run.samples, "step": replace(step, values_s=values)})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "kind", "where", "applies"),
    [
        (SLOW, "waiting-for-data", (":16", "DataLoader(num_workers=2, persistent_workers=True)"), ["git", "apply"]),
        (LOOPS, "optimizer-loops", (":5", "AdamW(fused=True)"), ["patch", "-p1"]),
    ],
)
def test_a_diff_is_applied_and_gains_what_was_foretold(
    tmp_path: Path, script: str, kind: str, where: tuple[str, str], applies: list[str]
):
    before_s, doubted = watched(tmp_path, script)
    advice = advised(tmp_path)[kind]
    assert (advice["where"], advice["put"], advice["no_patch"]) == (f"train.py{where[0]}", where[1], "")
    assert 0.1 < advice["high"] < 1
    stored = show("last", runs=tmp_path / "runs")
    change = first_lines(stored.run, stored.directory)[2]
    assert f"Change first: {where[1]} at " in change and f"train.py{where[0]} (" in change
    assert f"Change first: {where[1]} at " in first_lines(scattered(stored.run), stored.directory)[2]
    done = stepscope("advise", "last", "--patch", "--kind", kind, cwd=tmp_path)
    subprocess.run(applies, input=done.stdout, text=True, cwd=tmp_path, check=True, capture_output=True)
    new = (tmp_path / "train.py").read_text()
    assert new != script
    again = stepscope("advise", "last", "--patch", cwd=tmp_path)
    assert again.returncode == 2
    assert "train.py has changed since the run" in again.stderr
    after_s, busy = watched(tmp_path / "after", new)
    gain = 1 - after_s / before_s
    if not advice["low"] <= gain <= advice["high"] and (doubted or busy):
        pytest.skip(f"the host is busy, by the runs' own findings: the gain of {gain:.2f} says nothing")
    assert advice["low"] <= gain <= advice["high"], advice


TRAINER = """import torch
from transformers import Trainer, TrainingArguments


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(64, 8)

    def forward(self, x, labels=None):
        return {"loss": torch.nn.functional.cross_entropy(self.body(x), labels)}


data = [{"x": torch.randn(64), "labels": i % 8} for i in range(500)]


def collate(rows):
    import time
    time.sleep(0.01)
    return {"x": torch.stack([row["x"] for row in rows]), "labels": torch.tensor([row["labels"] for row in rows])}


arguments = TrainingArguments("out", max_steps=40, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True)
Trainer(model=Net(), args=arguments, train_dataset=data, data_collator=collate).train()
"""


@pytest.mark.slow
def test_advice_is_in_the_words_of_the_trainer(tmp_path: Path):
    pytest.importorskip("transformers", reason="needs transformers: pip install 'stepscope[frameworks]'")
    watched(tmp_path, TRAINER)
    advice = advised(tmp_path)["waiting-for-data"]
    put = "TrainingArguments(dataloader_num_workers=2, dataloader_persistent_workers=True)"
    assert (advice["put"], advice["where"]) == (put, "train.py:23")
    shown = stepscope("show", "last", cwd=tmp_path).stdout
    assert "dataloader_num_workers" in shown
    assert "keep loss.detach()" not in shown


def edited(tmp_path: Path, text: str, find: str, new: str, keyword: str = "") -> str:
    """The text with one edit of its call whose function ends in this name."""
    path = tmp_path / "script.py"
    path.write_bytes(text.encode())
    source = Source(path)
    call = next(
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == find
    )
    source.apply(Edit(path, call, new, keyword))
    return source.edited()


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("f()", "f(a=1)"),
        ("f(x, b=2)", "f(x, b=2, a=1)"),
        ("f(x, a=7)  # seven", "f(x, a=1)  # seven"),
        ("f(\n    x,\n)", "f(\n    x,\n    a=1,\n)"),
        ("f(\r\n\tx,\r\n)\r\n", "f(\r\n\tx,\r\n\ta=1,\r\n)\r\n"),
        ("'äö', f(x)", "'äö', f(x, a=1)"),
        ("f(x,)", "f(x, a=1,)"),
    ],
)
def test_a_keyword_is_put_into_a_call(tmp_path: Path, text: str, becomes: str):
    assert edited(tmp_path, text, "f", "1", "a") == becomes


@pytest.mark.parametrize("text", ["f(**options)", "f(i for i in x)", "f((x))"])
def test_a_call_that_cannot_be_changed_for_sure_is_left(tmp_path: Path, text: str):
    with pytest.raises(Unsure):
        edited(tmp_path, text, "f", "1", "a")


def test_statements_move_below_autocast(tmp_path: Path):
    path = tmp_path / "script.py"

    def below(text: str) -> str:
        path.write_text(text)
        source = Source(path)
        first = source.tree.body[0].body[0]  # type: ignore[attr-defined]
        source.apply(Edit(path, first, "with c():", last=source.tree.body[0].body[1]))  # type: ignore[attr-defined]
        return source.edited()

    assert below("while 1:\n  y = m(\n    x)\n\n  z = 1\n  b()\n") == (
        "while 1:\n  with c():\n      y = m(\n        x)\n\n      z = 1\n  b()\n"
    )
    with pytest.raises(Unsure):  # whose text would change
        below('while 1:\n  y = """a\n  b"""\n  z = 1\n')


def test_a_run_of_no_script_has_no_advice():
    with pytest.raises(InputError, match="no run of a script"):
        from tests.conftest import make_run

        made.advice_on(make_run(), None)
