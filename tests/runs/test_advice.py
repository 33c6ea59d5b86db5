"""Advice on a watched script: lines of it, a diff that patch takes, and a gain within what was foretold."""

import ast
import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stepscope.app.verbs.stored_runs import show
from stepscope.core.environment import HostReading
from stepscope.core.errors import InputError
from stepscope.core.evidence import Evidence, Habits, RestLine, Saved, SourceFile, WatchedLoop
from stepscope.core.formulas import Work
from stepscope.core.run import Run
from stepscope.core.samples import Samples
from stepscope.core.workloads import UserModel, WatchedWorkload
from stepscope.runs import advice as made
from stepscope.runs.checks import check_run
from stepscope.runs.live import first_lines
from stepscope.runs.script import Edit, Source, Unsure
from tests.command import stepscope
from tests.conftest import make_run

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


def scripted(
    folder: Path, text: str, habits: Habits, library: str = "", *, host: HostReading | None = None,
    saved: Saved | None = None, **shares: float | list[float],
) -> dict[str, made.Advice]:  # fmt: skip
    """The advice on a script whose step of 0.1 s has these parts, by the kinds."""
    (folder / "train.py").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    loop = WatchedLoop(why="", modules=("GPT",), optimizers=("AdamW",), library=library, saved=saved,
                       sources=(SourceFile(path="train.py", digest=digest),))  # fmt: skip
    shares.setdefault("step", 1.0)
    values = {name: share if isinstance(share, list) else [share] * 20 for name, share in shares.items()}
    run = make_run(
        workload=WatchedWorkload(model=UserModel(name="GPT"), dtype="fp32", compile="eager", program="train.py"),
        evidence=Evidence(loop=loop, habits=habits),
        samples={name: Samples(values_s=tuple(0.1 * each for each in of), clock="") for name, of in values.items()},
        work={"forward": Work(flops=100)},
    )
    assert run.environment is not None
    run = replace(run, environment=replace(run.environment, cpu_cores=2, host=host))
    run = replace(run, findings=check_run(run))
    return {one.kind: one for one in made.advice_on(run, folder)[0]}


NANO = """import torch
from model import GPT

model = GPT()
model.to("cpu")
optimizer = model.configure_optimizers(0.1)
X, Y = get_batch("train")
for step in range(9):
    logits, loss = model(X, Y)
    X, Y = get_batch("train")
    losses, flags = read()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
"""


def test_a_loop_that_makes_its_model_optimizer_and_batches_by_functions_of_its_own(tmp_path: Path):
    place = f"{tmp_path.name}/train.py"
    lines = (RestLine(where=f"{place}:10", call="get_batch", share=0.5),
             RestLine(where=f"{place}:11", call="read", share=0.5))  # fmt: skip
    habits = Habits(steps=3, products_s=0.03, operators_s=0.06, rest_lines=lines, zeroed_gradients=10,
                    zeroed_bytes=5_000_000)  # fmt: skip
    found = scripted(tmp_path, NANO, habits, forward=0.2, backward=0.4, optimizer=0.0, rest=0.4)
    compiled = found["not-compiled"]
    assert (compiled.put, compiled.no_patch, compiled.least) == ("model.compile()", "", 0.0)
    assert compiled.most == pytest.approx(0.6 - 0.3), "what the products take stays"
    diff, left = made.patch([compiled])
    assert "\n model = GPT()\n+model.compile()\n model.to" in diff
    # Neither git nor patch takes a path that leads out of the folder.
    assert diff.startswith("--- a/train.py\n") and left[0].endswith(f"apply the diff in {tmp_path}")
    batches = found["batches-made-in-the-loop"]
    assert batches.where.endswith("train.py:10") and "yields get_batch('train')" in batches.put
    assert batches.most == pytest.approx(0.2), "half of the rest, hidden behind the other 80 ms"
    assert next(iter(found)) == "batches-made-in-the-loop", "before what nobody knows to be wrong"
    zeroed = found["gradients-zeroed"]
    assert zeroed.most == pytest.approx((4 * 5e6 / 2e9 + 2 * 10 * 20e-6) / 0.1), "of the bytes, no share of backward"


@pytest.mark.parametrize(
    ("own", "others", "least", "says"),
    [
        (1.0, 0.0, 1 - 1.25 * 0.7 - 0.01, "1 of them run at once"),  # the second core is free, beside 0.3 of loading
        (0.71, 0.1, 1 - 1.25 * 0.7 - 0.01, "2 of them run at once"),  # a loader that sleeps needs no core
        (0.7, 1.3, -0.25, "no core is free"),  # nobody knows whether it sleeps or waits for a core
    ],
)
def test_what_workers_save_at_least_is_what_free_cores_give(
    tmp_path: Path, own: float, others: float, least: float, says: str
):
    text = "loader = DataLoader(rows, batch_size=4)\n"
    host = HostReading(own_cores=own, other_cores=others)
    found = scripted(tmp_path, text, Habits(steps=3), host=host, data=0.3, forward=0.7)["waiting-for-data"]
    assert found.least == pytest.approx(least) and found.most == pytest.approx(0.3)
    assert says in found.how
    assert (", or costs 25.0 %" in found.saves) is (least < 0)


@pytest.mark.parametrize(
    ("text", "library", "says", "line"),
    [
        (
            "TrainingArguments('out', save_steps=20)\n",
            "transformers",
            ("TrainingArguments(save_steps=200)", ":1"),
            "+TrainingArguments('out', save_steps=200)",
        ),
        (
            "ModelCheckpoint(every_n_train_steps=5)\n",
            "lightning",
            ("ModelCheckpoint(every_n_train_steps=50)", ":1"),
            "+ModelCheckpoint(every_n_train_steps=50)",
        ),
        ("TrainingArguments('out')\n", "transformers", ("save a tenth as often", ":1"), ""),
        ("if step % 10 == 0:\n    torch.save(x, path)\n", "", ("save a tenth as often", ":2"), ""),
    ],
)
def test_checkpoints_that_take_a_share_of_the_time_are_written_less_often(
    tmp_path: Path, text: str, library: str, says: tuple[str, str], line: str
):
    saved = Saved(where=f"{tmp_path.name}/train.py:2", steps=2, of=20, median_s=0.02)
    if library:
        saved = replace(saved, where=f"lib/save.py:7 (from {tmp_path.name}/train.py:1)")
    rest = [0.1] * 18 + [0.6] * 2
    found = scripted(
        tmp_path, text, Habits(steps=3), library, saved=saved, forward=0.9, rest=rest, step=[0.9 + r for r in rest]
    )["saves-often"]
    assert (found.put, found.where[-2:]) == says
    assert found.most == pytest.approx(0.9 * 2 * 0.05 / 2.1), "by what these steps take more"
    assert found.least == pytest.approx(0.8 * 2 * 0.02 / 2.1), "by torch.save alone"
    assert line in made.patch([found])[0].splitlines() if line else found.no_patch
    rare = replace(saved, steps=1, median_s=0.002)
    assert "saves-often" not in scripted(tmp_path, text, Habits(steps=3), library, saved=rare, forward=0.9, rest=0.1)


@pytest.mark.parametrize(
    ("text", "library", "put", "line"),
    [
        (
            "TrainingArguments('out', gradient_checkpointing=True)\n",
            "transformers",
            "TrainingArguments(gradient_checkpointing=False)",
            "+TrainingArguments('out', gradient_checkpointing=False)",
        ),
        (
            "TrainingArguments('out', activation_checkpointing=True)\n",
            "transformers",
            "TrainingArguments(activation_checkpointing=False)",
            "+TrainingArguments('out', activation_checkpointing=False)",
        ),
        (
            "net.gradient_checkpointing_enable()\n",
            "accelerate",
            "net.gradient_checkpointing_disable()",
            "+net.gradient_checkpointing_disable()",
        ),
        ("x = 1\ny = checkpoint(f, x)\n", "", "call the blocks without checkpointing", ""),
    ],
)
def test_checkpointing_that_memory_does_not_need_is_turned_off_where_it_was_turned_on(
    tmp_path: Path, text: str, library: str, put: str, line: str
):
    habits = Habits(steps=3, again_flops=80, again_bytes=1 << 20, free_bytes=1 << 30)
    found = scripted(tmp_path, text, habits, library, forward=0.3, backward=0.6)["checkpointing-not-needed"]
    assert (found.put, found.least, found.most) == (put, pytest.approx(0.12), pytest.approx(0.288))
    assert line in made.patch([found])[0].splitlines() if line else found.where.endswith("train.py:2")


def test_a_run_of_no_script_has_no_advice():
    with pytest.raises(InputError, match="no run of a script"):
        made.advice_on(make_run(), None)
