"""The action and the template that compare a pull request with its base: their own shell, run here as written."""

import os
import re
import shlex
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs

import pytest
import yaml

ROOT = Path(__file__).parents[3]
ACTION, GITLAB = ROOT / "ci" / "action.yml", ROOT / "ci" / "gitlab.yml"
WORKFLOW = ROOT / "docs" / "examples" / "compare-commits.yml"
TRAIN = """
import sys
import time
import torch

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(int(sys.argv[1])):
    loss = model(torch.ones(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LARGER = TRAIN.replace(
    "    loss.backward()", "    kept = torch.ones(64, 1024)\n    loss.backward()\n    time.sleep(0.05)"
)


def read(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text())


def git(where: Path, *words: str) -> str:
    who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.com")
    done = subprocess.run(["git", *who, *words], cwd=where, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def two_commits(place: Path, second: str) -> tuple[str, str]:
    """A repository whose second commit trains otherwise."""
    git(place, "init", "-q")
    (place / "train.py").write_text(TRAIN)
    git(place, "add", ".")
    git(place, "commit", "-qm", "Train")
    (place / "train.py").write_text(second)
    git(place, "commit", "-qam", "Train otherwise")
    return git(place, "rev-parse", "HEAD~1"), git(place, "rev-parse", "HEAD")


def run_shell(place: Path, script: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a step as a runner does: a script of bash that ends at the first command that fails."""
    commands = place.parent / "bin"  # the tool that is tested, where it is not installed, too
    commands.mkdir(exist_ok=True)
    (commands / "stepscope").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m stepscope "$@"\n')
    (commands / "stepscope").chmod(0o755)
    file = place.parent / "step.sh"
    file.write_text(script)
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", **variables,
    }  # fmt: skip
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", file], cwd=place, env=environment, text=True,
        capture_output=True, check=False, timeout=500,
    )  # fmt: skip


def run_action(place: Path, **given: str) -> "subprocess.CompletedProcess[str]":
    """The action's first step, with the inputs that a workflow gives it and the defaults of the others."""
    action = read(ACTION)
    inputs = {name: each.get("default", "") for name, each in action["inputs"].items()}
    inputs |= {name.replace("_", "-"): value for name, value in given.items()}
    step = action["runs"]["steps"][0]
    names = {key: re.fullmatch(r"\$\{\{ inputs\.([a-z-]+) \}\}", value) for key, value in step["env"].items()}
    variables = {key: inputs[name[1]] for key, name in names.items() if name is not None}
    assert len(variables) == len(step["env"])
    return run_shell(place, step["run"], **variables, GITHUB_STEP_SUMMARY=str(place.parent / "summary.md"))


@pytest.mark.slow
def test_the_action_fails_by_the_memory_and_says_so_in_its_comment(tmp_path: Path):
    place = tmp_path / "project"
    place.mkdir()
    base, head = two_commits(place, LARGER)
    done = run_action(place, base=base, head=head, script="train.py 150", processes="1")
    assert done.returncode == 1, done.stderr
    comment = (place / "comparison.md").read_text()
    assert "| step of" in comment and "code differs" in comment
    assert "- larger than 1.0 % allows: " in comment and "cannot be decided" in comment
    assert (tmp_path / "summary.md").read_text() == comment


@pytest.mark.long
@pytest.mark.slow
def test_the_action_fails_by_the_time_and_passes_what_is_no_slower(tmp_path: Path):
    for name, second, code in (("slower", LARGER.replace("1024", "1"), 1), ("same", f"{TRAIN}# a commit later\n", 0)):
        place = tmp_path / name / "project"
        place.mkdir(parents=True)
        base, head = two_commits(place, second)
        done = run_action(place, base=base, head=head, script="train.py 150", processes="5", fail_if_slower="100%")
        assert done.returncode == code, done.stderr
        assert code == 0 or "slower than 100.0 % allows" in (place / "comparison.md").read_text()


def test_what_cannot_be_measured_is_the_comment(tmp_path: Path):
    place = tmp_path / "project"
    place.mkdir()
    base, _ = two_commits(place, LARGER)
    done = run_action(place, base=base, head="nowhere", script="train.py 150")
    assert done.returncode == 2
    assert (place / "comparison.md").read_text().startswith("stepscope: 'nowhere' names no commit")


class Notes(BaseHTTPRequestHandler):
    """GitLab's API, as far as the template asks it."""

    received: ClassVar[list[tuple[str, str, str]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.received.append((self.path, self.headers["PRIVATE-TOKEN"], parse_qs(body)["body"][0]))
        self.send_response(201)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_the_template_for_gitlab_posts_what_it_found(tmp_path: Path):
    place = tmp_path / "project"
    place.mkdir()
    base, _ = two_commits(place, LARGER)
    job = read(GITLAB)[".stepscope"]
    server = HTTPServer(("127.0.0.1", 0), Notes)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        done = run_shell(
            place, job["script"][0], **job["variables"], CI_MERGE_REQUEST_DIFF_BASE_SHA=base, CI_COMMIT_SHA="nowhere",
            STEPSCOPE_TOKEN="a-token", CI_API_V4_URL=f"http://127.0.0.1:{server.server_port}/api/v4",
            CI_PROJECT_ID="7", CI_MERGE_REQUEST_IID="3", no_proxy="127.0.0.1",
        )  # fmt: skip
    finally:
        server.shutdown()
        thread.join()
    assert done.returncode == 2, done.stderr
    ((path, token, body),) = Notes.received
    assert (path, token) == ("/api/v4/projects/7/merge_requests/3/notes", "a-token")
    assert body == (place / "comparison.md").read_text() and "'nowhere' names no commit" in body


def test_the_workflow_gives_the_action_what_it_has():
    job = read(WORKFLOW)["jobs"]["compare"]
    uses = {step["name"]: step for step in job["steps"]}
    assert uses["Get all commits"]["with"]["fetch-depth"] == 0
    assert set(uses["Compare"]["with"]) <= set(read(ACTION)["inputs"])
    comment = read(ACTION)["runs"]["steps"][1]
    assert comment["if"].startswith("always()") and "comparison.md" in comment["run"]
