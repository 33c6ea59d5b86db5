"""A script measured at two commits: a real repository, its worktrees, and a process for each."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepscope.core.errors import InputError
from stepscope.core.run_directory import find_run_files, load_run
from stepscope.engine.commits import Repository, checkouts, refresh

COMMAND = [sys.executable, "-m", "stepscope", "compare"]
MODEL = "WIDTH = 64\n"
TRAIN = """
import sys
from pathlib import Path
import torch
from model import WIDTH

data = torch.tensor(list(Path("data.bin").read_bytes()), dtype=torch.float32).reshape(1, -1)
model = torch.nn.Sequential(torch.nn.Linear(64, WIDTH), torch.nn.Linear(WIDTH, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(int(sys.argv[1])):
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def git(place: Path, *words: str) -> str:
    who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.com")
    done = subprocess.run(["git", *who, *words], cwd=place, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose second commit has a wider model; the data is not tracked."""
    place = tmp_path / "project"
    place.mkdir()
    for name, text in (("model.py", MODEL), ("train.py", TRAIN), (".gitignore", "data.bin\nruns\n__pycache__\n")):
        (place / name).write_text(text)
    (place / "data.bin").write_bytes(bytes(range(64)))
    git(place, "init", "-q", "-b", "trunk")
    git(place, "add", ".")
    git(place, "commit", "-qm", "Train two layers")
    (place / "model.py").write_text(MODEL.replace("64", "96"))
    (place / "later.py").write_text("")
    git(place, "add", ".")
    git(place, "commit", "-qam", "Widen the model")
    return place


def compare(place: Path, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [*COMMAND, *words], cwd=place, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def is_left_clean(place: Path) -> bool:
    return git(place, "worktree", "list").count("\n") == 0 and git(place, "status", "--porcelain") == ""


@pytest.mark.slow
def test_two_commits_are_measured_and_held_against_limits(repository: Path):
    """The second commit's model is wider: more memory, more FLOPs, said exactly; its runs can be read again."""
    limits = ("--fail-if-larger", "1%", "--fail-if-flops-grow", "--fail-if-slower", "10%")
    done = compare(repository, "HEAD~1", "HEAD", *limits, "--processes", "1", "--share", "data.bin", "--json",
                   "--", "python", "train.py", "200")  # fmt: skip
    assert done.returncode == 1, done.stderr
    (pair,) = json.loads(done.stdout)["pairs"]
    assert "code differs" in pair["cell"] or "model" in pair["cell"]
    assert pair["flops"][1] == pair["flops"][0] * 96 // 64
    assert pair["memory_bytes"][1] > pair["memory_bytes"][0] > 0
    assert "larger than 1.0 % allows" in done.stderr and "more FLOPs" in done.stderr
    assert "1 limit cannot be decided" in done.stderr and "too few processes" in done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "its runs are kept" in line)
    folders = line.partition("compare ")[2].split()[:2]
    commits = [git(repository, "rev-parse", name) for name in ("HEAD~1", "HEAD")]
    for folder, commit in zip(folders, commits, strict=True):
        (file,) = find_run_files(repository / folder)
        environment = load_run(file).environment
        assert environment is not None and environment.own_commit == commit
    assert is_left_clean(repository)


def test_what_cannot_be_measured_is_one_line(repository: Path):
    (repository / "model.py").write_text("WIDTH = 128\n")
    for words, fault in (
        (("HEAD", "nowhere", "--", "train.py"), "'nowhere' names no commit"),
        (("HEAD", "trunk", "--", "train.py"), "the same code"),
        (("HEAD", "--share", "none", "--", "train.py"), "--share none: it is not there"),
        (("HEAD", "--share", "model.py", "--", "train.py"), "git tracks it"),
        (("HEAD", "--"), "no script behind --"),
        (("--", "train.py"), "no commit before --"),
        (("HEAD~1", "HEAD", "--", "python", "later.py"), "later.py is not there at HEAD~1"),
        (("HEAD", "--", "stepscope", "show", "last"), "stores no run of a step"),
        (("HEAD", "--across", "dtype", "--", "train.py"), "--across says nothing with a script"),
        (("HEAD", "--processes", "3"), "name a script behind --"),
        (("HEAD", "trunk", "--strict"), "belongs to a limit"),
    ):
        done = compare(repository, *words)
        assert (done.returncode, done.stdout) == (2, "") and fault in done.stderr.splitlines()[-1], done.stderr
        assert "Traceback" not in done.stderr
    git(repository, "checkout", "-q", ".")
    assert is_left_clean(repository)


@pytest.mark.parametrize(
    ("first", "fault"),
    [
        ("open('data.bin')", "git does not track data.bin: --share data.bin gives it to each commit"),
        ("import fast", "--share fast.cpython-311.so gives this build to each commit"),
        ("import editable.code", "which is not of that commit: its package is installed from there"),
        ("raise SystemExit(3)", "ended with code 3, and no step was measured to the end"),
    ],
)
def test_a_script_that_ends_early_says_why_and_what_to_do(repository: Path, first: str, fault: str):
    (repository / "train.py").write_text(f"{first}\n")
    git(repository, "commit", "-qam", "Break the script")
    (repository / "train.py").write_text("raise SystemExit(4)\n")
    (repository / "fast.cpython-311.so").write_bytes(b"")
    (repository / ".git" / "info" / "exclude").write_text("*.so\neditable\n")
    (repository / "editable").mkdir()
    (repository / "editable" / "code.py").write_text("")
    hook = repository.parent / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(f"import sys\nsys.path.append({str(repository)!r})\n")
    places = [str(hook), *filter(None, [os.environ.get("PYTHONPATH")])] if "editable" in first else []
    variables = {"PYTHONPATH": os.pathsep.join(places)} if places else {}
    # An absolute path is that of the worktree, whatever lies in the folder; a hook's variables say nothing.
    script = str(repository / "train.py")
    done = compare(repository, "HEAD", "HEAD~1", "--", "python", script, GIT_DIR="nowhere", **variables)
    assert done.returncode == 2 and fault in done.stderr.splitlines()[-1], done.stderr
    git(repository, "checkout", "-q", ".")
    assert is_left_clean(repository)


def test_a_changed_folder_is_a_side_of_its_own(repository: Path, monkeypatch: pytest.MonkeyPatch):
    (repository / "model.py").write_text("WIDTH = 128\n")
    monkeypatch.chdir(repository)
    hook = repository / ".git" / "hooks" / "post-checkout"
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    with checkouts(Repository.here(), ["HEAD", "."], [Path("data.bin")]) as (head, folder):
        assert folder.root == repository.resolve() != head.root
        assert (head.root / "model.py").read_text() == MODEL.replace("64", "96")
        (head.root / "checkpoint.pt").touch()
        (head.root / "model.py").unlink()
        refresh(Repository.here(), head)
        assert sorted(file.name for file in head.root.iterdir() if not file.name.startswith(".")) == [
            "data.bin", "later.py", "model.py", "train.py",
        ]  # fmt: skip
        commit = head.commit[:10]
        assert (head.folder, folder.folder) == (f"HEAD-{commit}", f"working-tree-{commit}")
    assert (repository / "data.bin").read_bytes() == bytes(range(64))
    with pytest.raises(InputError, match="no git repository"):
        Repository.here(repository.parent)


def test_a_clone_without_its_history_says_how_to_get_it(repository: Path):
    for options, name, remedy in (
        (("--depth", "1"), "HEAD~1", "the clone is shallow: git fetch --unshallow"),
        (("--no-checkout",), "trunk", "origin/trunk names one"),
    ):
        place = repository.parent / options[0]
        git(repository.parent, "clone", "-q", *options, f"file://{repository}", str(place))
        git(place, "checkout", "-q", "--detach")
        git(place, "branch", "-qD", "trunk")
        with pytest.raises(InputError, match=remedy):
            Repository.here(place).commit(name)


@pytest.mark.slow
def test_an_interrupt_leaves_no_worktree_and_no_process(repository: Path):
    (repository / "train.py").write_text("import time\nopen(f'{__file__}.began', 'w').close()\ntime.sleep(600)\n")
    git(repository, "commit", "-qam", "Sleep")
    process = subprocess.Popen([*COMMAND, "HEAD", "HEAD~1", "--", "train.py"], cwd=repository, stderr=subprocess.PIPE,
                               text=True)  # fmt: skip
    end = time.monotonic() + 60
    worktree = ""
    while time.monotonic() < end and not worktree:
        lines = git(repository, "worktree", "list").splitlines()
        began = [line.split()[0] for line in lines[1:] if Path(line.split()[0], "train.py.began").exists()]
        worktree = began[0] if began else ""
        time.sleep(0.05)
    assert worktree, "the script never began"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors.splitlines()[-1] == "stepscope: interrupted"
    assert not Path(worktree).exists() and is_left_clean(repository)
    running = subprocess.run(["pgrep", "-f", worktree], capture_output=True, text=True, check=False).stdout
    assert running == ""
