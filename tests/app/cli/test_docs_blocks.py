"""Every block of code in the documents is executed by a test, or marked as measured.

A block is one of:

- `console`, a command with its output, and `pycon`: `test_docs.py` runs both again and compares.
- `python`: run here, after the lines that give it what it speaks of.
- `sh measured=PATH`: what it measured is kept at PATH, which the site shows as its caption.
- `sh`: run here, line by line, in a folder that holds the files that the documents speak of. What measures takes a
  smaller model and a few steps.
- `yaml`, `text` or nothing: no commands.
"""

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from stepscope.core.profilers import find_nsys
from tests.app.cli.test_docs import DOCUMENTS, ROOT, SITE, command_for, name_of
from tests.command import python, stepscope

WRITTEN = ROOT / "docs" / "results" / "writeup-h200.md"
"""Written by stepscope, with commands for what is missing; tests/writeup/ holds it to its data."""
PAGES = [page for page in DOCUMENTS if page != WRITTEN]
PAGES += [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(SITE.rglob("*.md"))]
FENCE = re.compile(r"^```(?P<kind>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
KINDS = {"console", "pycon", "python", "sh", "text", "yaml", ""}
COMMAND = re.compile(r"^(?:\w+=\S+ )*(?:\$ )?(?:stepscope|python|torchrun|make|pip|nsys) ", re.MULTILINE)
NOT_HERE = {
    "make run": "its output is compared with the run that it left",
    "make test": "it runs these tests",
    "pip install": "`make` installs so",
    "stepscope compare main HEAD": "it measures a script at two commits: tests/engine/test_commits.py does",
    "stepscope writeup --run": "it measures for a quarter of an hour: tests/rendering/writeup does, with little",
    "python benchmarks/flash_tune.py": "" if torch.cuda.is_available() else "it needs a GPU",
    "stepscope study allocator": "" if torch.cuda.is_available() else "it needs a GPU",
}
"""Beginnings of commands that no test of this file runs, and why."""
STEP = "x = torch.randn(4, 64); loss = model(x).square().mean(); loss.backward(); optimizer.step()"
OWN = """
import torch
from torch import nn


def make(width=64):
    net = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 1))
    return net, torch.randn(4, width), lambda y: y.square().mean()


my_factory = make


def main():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(60):
        STEP
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
""".replace("STEP", STEP)
"""A user's file: a factory, and a loop for those who run it."""
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GIVEN = "import torch, stepscope; from torch import nn; model = nn.Linear(64, 64)\n"
OF_A_LOOP = GIVEN + "optimizer = torch.optim.SGD(model.parameters(), 1e-3); loader = range(40); max_iters = 40\n"
STARTS = {
    "docs/attention.md": [
        "import torch; q, k, v = torch.randn(3, 1, 2, 32, 16)\n",
        "import torch; q, k, v = torch.randn(3, 2, 1, 64, 16)\n",
    ],
    "docs/experiments/own-kernel.md": [""],
    "docs/experiments/parity.md": [""],
    "docs/experiments/shadow.md": [""],
    "docs/experiments/watched-scripts.md": [OF_A_LOOP],
    "docs/tuning.md": [
        "import sys; sys.path.insert(0, 'docs/examples')\nfrom trainer import *\n"
        "arguments = TrainingArguments(output_dir='trainer-output', report_to=[], use_cpu=True)\n",
    ],
    "docs/your-own.md": [
        OF_A_LOOP + "outputs = []\n",
        OF_A_LOOP,
        "",
        GIVEN + "net = model; batch = torch.randn(4, 64); batches = [batch]; loss = lambda y: y.square().mean()\n"
        "forward = backward = lambda: None\n",
    ],
}
"""What stands before each `python` block of a page: the names that its text speaks of."""
ENDS = {
    "docs/experiments/parity.md": "model, (tokens, targets), loss = make(); loss(model(tokens), targets).backward()\n",
    "docs/experiments/shadow.md": "model, (tokens, targets), loss = make(); loss(model(tokens), targets).backward()\n",
}


class Block(NamedTuple):
    page: Path
    kind: str
    body: str
    number: int
    """Which of its kind on its page."""

    @property
    def lines(self) -> list[str]:
        """The commands, without what continues over lines."""
        return [line for line in self.body.replace("\\\n", " ").splitlines() if line.strip()]

    @property
    def measures(self) -> bool:
        """Whether a line of it measures a step, which takes seconds."""
        return any(measures(shlex.split(line, comments=True)) for line in self.lines)


def measures(words: list[str]) -> bool:
    if "stepscope" not in words:
        return False
    verb = words[words.index("stepscope") + 1]
    quick = verb == "study" and (len(words) == 2 or "--from" in words or words[2] in {"formats", "accumulation"})
    return verb in {"run", "sweep", "tune", "watch", "device", "study"} and not quick


def blocks() -> list[Block]:
    found: list[Block] = []
    for page in PAGES:
        for fence in FENCE.finditer(page.read_text()):
            number = sum(each.page == page and each.kind == fence["kind"] for each in found)
            found.append(Block(page, fence["kind"], fence["body"], number))
    return found


BLOCKS = blocks()


def named(block: Block) -> str:
    return f"{name_of(block.page)}-{block.number}"


def of_kind(kind: str) -> list[Block]:
    return [block for block in BLOCKS if block.kind == kind]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_run_or_marked_as_measured(page: Path):
    for block in (each for each in BLOCKS if each.page == page):
        kind, _, mark = block.kind.partition(" ")
        here = f"{name_of(page)}: {block.kind!r} {block.body.splitlines()[:1]}"
        if kind.startswith("{"):
            assert page.is_relative_to(SITE) or page.name == "index.md", f"{here}: only the site knows it"
            continue
        assert kind in KINDS, here
        if kind == "console":
            shown = block.body.splitlines()[0].removeprefix("$ ").split(" | ")[0]
            assert command_for(shown) is not None, f"{here} is not run again: show what is kept in results/"
        elif mark:
            assert kind == "sh", here
            assert mark.startswith("measured=results/"), here
            assert (ROOT / mark.removeprefix("measured=")).exists(), here
        elif kind == "python":
            assert block.number < len(STARTS.get(name_of(page), [])), f"{here}: say in STARTS what it speaks of"
        elif kind == "":
            assert not COMMAND.search(block.body), f"{here} has commands: it is `sh`, or `sh measured=PATH`"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the documents speak of."""
    place = tmp_path_factory.mktemp("documented")
    for name in ("train.py", "own.py", "my_package.py", "mypackage/model.py", "package/train.py"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(OWN)
    (place / "config.json").write_text(json.dumps(LLAMA))
    for name in ("results", "benchmarks", "tests", "README.md"):
        (place / name).symlink_to(ROOT / name)
    (place / "docs").mkdir()
    (place / "docs" / "examples").symlink_to(ROOT / "docs" / "examples")
    for name in ("trace.json.gz", "before.json.gz", "after.json.gz"):
        (place / name).symlink_to(ROOT / "tests" / "data" / "kineto_train.json.gz")
    snapshot = gzip.decompress((ROOT / "tests" / "data" / "snapshot_train.pickle.gz").read_bytes())
    (place / "snapshot.pickle").write_bytes(snapshot)
    kept = next((ROOT / "results" / "h200" / "memory-recorded").glob("*-tiny-*"))
    shutil.copytree(kept, place / "runs" / kept.name)
    return place


def why_not(line: str) -> str:
    """Why this machine, or this test, does not run a line; empty where it does."""
    if "nsys" in shlex.split(line, comments=True)[-1].split(",") and find_nsys() is None:
        return "there is no Nsight Systems"
    return next((why for start, why in NOT_HERE.items() if line.startswith(start)), "")


def smaller(words: list[str]) -> list[str]:
    """The command with a small model, a short sequence and few steps."""
    changed = list(words)
    for option, value in (("--model", "tiny"), ("--seq-len", "16"), ("--steps", "4")):
        if option in changed:
            at = changed.index(option) + 1
            changed[at] = changed[at] if changed[at].endswith(".json") or ":" in changed[at] else value
    if words[0] == "run":
        changed += ["--steps", "5", "--warmup", "2"]
    elif words[0] == "sweep":
        changed += ["--seconds", "0.2"]
    elif words[0] == "tune":
        changed += ["--budget", "0.001s"]
    return changed


def run(line: str, where: Path) -> None:
    words = shlex.split(line, comments=True)
    newest = max((each.name for each in (where / "runs").iterdir()), default="")
    words = [word.replace("THE_RUN", newest) for word in words]
    if words[0] == "stepscope":
        arguments = smaller(words[1:]) if measures(words) else words[1:]
        done = stepscope(*arguments, cwd=where)
    elif words[0] == "python":
        done = python(*words[1:], cwd=where)
    else:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = {**os.environ, "PATH": path}
        done = subprocess.run(
            words, cwd=where, env=environment, capture_output=True, text=True, check=False, timeout=240
        )
    found = (0, 1) if measures(words) else (0,)  # 1: a check doubts the few steps
    assert done.returncode in found, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


SHOWN = ("docs/experiments/memory-prediction.md-0",)
"""Blocks whose command a page shows with its output, too, but for the plot: `test_docs.py` runs it."""
LONG = [
    pytest.param(block, marks=pytest.mark.long) if block.measures or named(block) in SHOWN else block
    for block in of_kind("sh")
]


@pytest.mark.slow
@pytest.mark.parametrize("block", LONG, ids=named)
def test_commands_without_an_output_run(block: Block, files: Path, tmp_path: Path):
    where = tmp_path / "here"
    shutil.copytree(files, where, symlinks=True)
    skipped = [why_not(line) for line in block.lines]
    for line, why in zip(block.lines, skipped, strict=True):
        if not why:
            run(line, where)
    if all(skipped):
        pytest.skip("; ".join(dict.fromkeys(skipped)))


OF_TRAINERS = ("docs/your-own.md-2", "docs/your-own.md-3")
"""Blocks that import a trainer and train with it, most of a minute each; tests/callbacks/ trains with them, too."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    [pytest.param(one, marks=[pytest.mark.long] if named(one) in OF_TRAINERS else []) for one in of_kind("python")],
    ids=named,
)
def test_blocks_of_python_run(block: Block, files: Path, tmp_path: Path):
    where = tmp_path / "here"
    shutil.copytree(files, where, symlinks=True)
    page = name_of(block.page)
    for library in re.findall(r"callbacks\.(\w+)", block.body):
        pytest.importorskip("transformers" if library == "huggingface" else library)
    if "Trainer(" in block.body:
        pytest.importorskip("transformers")
    body = re.sub(r"^( *)\.\.\.$", rf"\1{STEP}", block.body, flags=re.MULTILINE)
    code = STARTS[page][block.number] + body + ENDS.get(page, "")
    done = python("-c", code, cwd=where)
    assert done.returncode == 0, done.stderr
