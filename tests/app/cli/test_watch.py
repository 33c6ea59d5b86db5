"""`stepscope watch`: a script runs as it would without, and leaves a run."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from stepscope.core.range_names import TIMED
from stepscope.core.run import Run
from stepscope.core.run_directory import load_runs
from stepscope.core.workloads import WatchedWorkload
from tests.command import python, stepscope
from tests.conftest import at_length

HEAD = """
import sys
import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
optimizer = torch.optim.AdamW(model.parameters())

def step():
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

NANOGPT = """
# A GPT as small scripts train it: its own get_batch, accumulation, clipping, evaluation now and then.
import math, sys, time
import torch
import torch.nn as nn
from torch.nn import functional as F

torch.manual_seed(1337)
block_size, vocab_size, n_embd, batch_size, gradient_accumulation_steps = 16, 32, 16, 4, 2
data = torch.randint(vocab_size, (1000,))

def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln, self.attn = nn.LayerNorm(n_embd), nn.MultiheadAttention(n_embd, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))
    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.ln(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(x)

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.h = nn.Embedding(vocab_size, n_embd), nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(n_embd, vocab_size)
    def forward(self, idx, targets=None):
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)
        loss = None if targets is None else F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))
        return logits, loss

model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.stack([model(*get_batch())[1] for _ in range(3)])
    model.train()
    return losses.mean()

for iter_num in range(int(sys.argv[1])):
    if iter_num % 10 == 0:
        print(f"step {iter_num}: val loss {estimate_loss():.4f}")
    for micro_step in range(gradient_accumulation_steps):
        X, Y = get_batch()
        logits, loss = model(X, Y)
        (loss / gradient_accumulation_steps).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
print("done", __name__, sys.argv, __file__.endswith("train.py"))
"""


def written(folder: Path, *parts: str, name: str = "train.py") -> Path:
    """A script of these parts."""
    script = folder / name
    script.write_text("".join(textwrap.dedent(part) for part in parts))
    return script


def runs_in(folder: Path) -> list[Run]:
    found, faults = load_runs([folder])
    assert not faults
    return found


def only_run(folder: Path) -> Run:
    (run,) = runs_in(folder)
    return run


def test_a_script_prints_what_it_prints_and_leaves_a_run(tmp_path: Path):
    script = written(tmp_path, NANOGPT)
    alone = python(script, "24")
    done = stepscope("watch", "--steps", "6:20", "--runs", tmp_path / "runs", "--", script, "24")
    assert alone.returncode == done.returncode == 0
    assert done.stdout == alone.stdout
    run = only_run(tmp_path / "runs")
    assert run.status == "done" and not run.evidence.notes
    assert list(run.samples) == ["step", *TIMED]
    assert {samples.count for samples in run.samples.values()} == {14}
    loop, workload = run.evidence.loop, run.workload
    assert loop is not None and (loop.forwards, loop.backwards, loop.first_step) == (2, 2, 6)
    assert isinstance(workload, WatchedWorkload)
    assert (workload.program, workload.optimizer, workload.accumulation) == ("train.py 24", "AdamW", 2)
    assert workload.model.name == "GPT" and workload.tokens == 2 * 4 * 16
    assert "A step ends with a step of AdamW (the only one that steps): 2 forwards of GPT" in done.stderr
    assert "14 steps of one process measured" in done.stderr and "numbers 6 to 19" in done.stderr


@pytest.mark.slow
def test_what_is_shown_at_the_end_is_three_lines_and_what_show_shows(tmp_path: Path):
    script = written(tmp_path, HEAD, "for _ in range(20): step()\n")
    done = stepscope("watch", "--steps", "4:14", "--runs", tmp_path / "runs", script)
    shown = stepscope("show", "last", "--runs", tmp_path / "runs")
    soon, end = done.stderr.index("stepscope: measured: a step takes "), done.stderr.index("A step takes ")
    answer, saved = done.stderr.index(shown.stdout.splitlines()[0]), done.stderr.index("Saved in")
    assert 0 == soon < end < answer and done.stderr[answer:saved] == shown.stdout
    lines = " ".join(done.stderr[end:answer].split())
    assert re.search(r"takes most of it: .* (None of the habits that were looked for|Change first: )", lines)
    assert stepscope("table", tmp_path / "runs", "--value", "data,forward,rest,step").returncode == 0
    assert "AdamW" in stepscope("ls", tmp_path / "runs").stdout


def ended(tmp_path: Path, ending: str, *options: str) -> tuple[subprocess.CompletedProcess[str], list[Run]]:
    """A script that takes ten steps and then ends like this."""
    script = written(tmp_path, HEAD, "for _ in range(10): step()\n", ending)
    done = stepscope("watch", "--runs", tmp_path / "runs", *options, "--", script, cwd=tmp_path)
    return done, runs_in(tmp_path / "runs")


@pytest.mark.slow
def test_an_exception_is_the_scripts_own_and_what_was_measured_is_kept(tmp_path: Path):
    done, (run,) = ended(tmp_path, "raise ValueError('no more')\n", "--steps", "3:100")
    script = tmp_path / "train.py"
    line = script.read_text().splitlines().index("raise ValueError('no more')") + 1
    of_python = f"""Traceback (most recent call last):
  File "{script}", line {line}, in <module>
    raise ValueError('no more')
ValueError: no more
"""
    assert done.returncode == 1
    assert done.stderr.startswith(of_python), "the traceback is the script's own, and comes first"
    assert run.status == "failed" and run.failure is not None
    assert re.fullmatch(r"ValueError: no more \(train.py:\d+\)", run.failure.message)
    assert run.failure.during == "measure"
    assert run.samples["step"].count == 7


@pytest.mark.slow
def test_an_exception_in_a_watched_forward_shows_no_frame_of_ours(tmp_path: Path):
    ending = """
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model
        def forward(self, x):
            if len(seen) > 3: raise torch.OutOfMemoryError("full")
            seen.append(x)
            return self.inner(x)
    seen, failing = [], Failing()
    for _ in range(10):
        failing(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    """
    script = written(tmp_path, HEAD, ending)
    alone = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    done = stepscope("watch", "--runs", tmp_path / "runs", "--steps", "2:5", "--", script)
    assert done.returncode == 1 and done.stderr.startswith(alone.stderr)
    run = only_run(tmp_path / "runs")
    assert run.status == "out-of-memory" and run.failure is not None and run.failure.phase == "forward"


@pytest.mark.slow
@pytest.mark.parametrize(("call", "code", "said"), [("3", 3, ""), *at_length(("None", 0, ""), ("'gone'", 1, "gone\n"))])
def test_sys_exit_is_the_scripts_own(tmp_path: Path, call: str, code: int, said: str):
    done, (run,) = ended(tmp_path, f"sys.exit({call})\n", "--steps", "3:100")
    assert done.returncode == code and done.stderr.endswith(said)
    assert run.status == "done" and run.samples["step"].count == 7
    assert run.evidence.notes[0] == "90 of the 97 steps that were asked for, since the loop ended before"
    assert run.evidence.notes[1].endswith(
        "what the loop does, since the loop ended before; --steps 2:5 leaves steps for that"
    )


@pytest.mark.long
def test_what_runs_at_exit_still_runs(tmp_path: Path):
    ending = """
    import atexit
    atexit.register(print, "at exit")
    class Late:
        def __del__(self): print("freed")
    late, log = Late(), open("log.txt", "w")
    log.write("kept")
    """
    done, _ = ended(tmp_path, ending)
    assert done.stdout == "at exit\nfreed\n"
    assert (tmp_path / "log.txt").read_text() == "kept"


@pytest.mark.slow
def test_a_script_that_ends_before_a_step_is_timed_leaves_nothing(tmp_path: Path):
    script = written(tmp_path, HEAD, "step(); step()\n")
    done = stepscope("watch", "--runs", tmp_path / "runs", "--", script)
    assert done.returncode == 0 and not runs_in(tmp_path / "runs")
    assert done.stderr == "stepscope: nothing was measured: the loop ended after 2 steps, before any was timed\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD, "nothing was measured: no optimizer of PyTorch stepped in this process"),
        (
            HEAD + "other = nn.Linear(8, 8)\noptimizer.add_param_group({'params': other.parameters()})\n"
            "for _ in range(4): other(model(torch.randn(4, 8))).sum().backward(); optimizer.step()\n",
            "nothing is measured, since it cannot be told what a step is: 2 modules with parameters of AdamW are "
            "called (Sequential, Linear); --step-of CLASS, of a model or an optimizer, says whose step counts",
        ),
        (
            HEAD + "for _ in range(4):\n    model(torch.randn(4, 8)).sum().backward()\n    with torch.no_grad():\n"
            "        for p in model.parameters(): p -= 0.1 * p.grad\n",
            "nothing was measured: no optimizer of PyTorch stepped in this process; if the loop changes its weights by "
            "hand, put `with stepscope.watch() as watched:` round the loop, and call watched.step() where a step ends",
        ),
    ],
)
def test_a_script_without_a_step_that_can_be_told_is_left_alone(tmp_path: Path, text: str, said: str):
    done = stepscope("watch", "--runs", tmp_path / "runs", "--", written(tmp_path, text))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f"stepscope: {said}\n")
    assert not runs_in(tmp_path / "runs")


def test_a_script_that_never_imports_torch(tmp_path: Path):
    script = written(tmp_path, "print('hello')\nraise SystemExit(5)\n")
    command = [sys.executable, "-m", "stepscope", "watch", "--runs", tmp_path / "runs", "--", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (5, "hello\n")
    assert "the script never imported torch" in done.stderr


@pytest.mark.slow
def test_torch_is_imported_by_the_script_and_no_sooner(tmp_path: Path):
    text = "import sys\nassert 'torch' not in sys.modules\nimport torch\nprint(torch.__spec__.loader)\n"
    script = written(tmp_path, text)
    command = [sys.executable, "-m", "stepscope", "watch", "--runs", tmp_path / "runs", "--", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "SourceFileLoader" in done.stdout


@pytest.mark.slow
def test_a_module_runs_as_python_runs_it(tmp_path: Path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("WORD = 'from the package'\n")
    written(package, HEAD, "from package.helper import WORD\nprint(WORD, __spec__.name, sys.argv[1:])\n"
            "for _ in range(12): step()\n", name="train.py")  # fmt: skip
    done = stepscope("watch", "--runs", tmp_path / "runs", "--", "-m", "package.train", "--lr", "3", cwd=tmp_path)
    assert done.stdout == "from the package package.train ['--lr', '3']\n"
    workload = only_run(tmp_path / "runs").workload
    assert isinstance(workload, WatchedWorkload) and workload.program == "package.train --lr 3"


@pytest.mark.slow
def test_workers_of_a_loader_and_forked_children_leave_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # an optimizer asks CUDA, which no forked child can
    ending = """
    import os
    from torch.utils.data import DataLoader, TensorDataset
    loader = DataLoader(TensorDataset(torch.randn(80, 8)), batch_size=4, num_workers=2, multiprocessing_context="fork")
    for (x,) in loader:
        model(x).sum().backward()
        optimizer.step()
    child = os.fork()
    if child == 0:
        # Backward does not run in a child of a process in which it ran, where PyTorch is built for CUDA.
        for _ in range(5): optimizer.step()
        print("child", flush=True)
        sys.exit(4)
    print("parent", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    script = written(tmp_path, HEAD, ending)
    done = stepscope("watch", "--steps", "4:1000", "--runs", tmp_path / "runs", "--", script)
    assert done.stdout == "child\nparent 4\n", done.stderr
    run = only_run(tmp_path / "runs")
    assert run.samples["step"].count == 16 and min(run.samples["data"].values_s) > 0
    assert done.stderr.count("Saved in") == 1


@pytest.mark.slow
def test_ctrl_c_is_the_scripts_own_and_what_was_measured_is_kept(tmp_path: Path):
    script = written(tmp_path, HEAD, "import time\nfor i in range(100000):\n    step()\n    time.sleep(0.01)\n"
                     "    if i == 20: print('going', flush=True)\n")  # fmt: skip
    command = [sys.executable, "-m", "stepscope", "watch", "--steps", "4:99999", "--runs", tmp_path / "runs", script]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "going\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert (
        said.startswith("Traceback") and "\nKeyboardInterrupt\n" in said and "stepscope/" not in said.split("Saved")[0]
    )
    run = only_run(tmp_path / "runs")
    assert run.status == "interrupted" and run.samples["step"].count > 10


@pytest.mark.slow
def test_ctrl_c_leaves_out_a_trace_that_takes_long_and_nothing_else(tmp_path: Path):
    """The model of its loop does not come to an end on fake tensors."""
    ending = """
    import time
    class Slow(nn.Linear):
        def forward(self, x):
            time.sleep(60 if type(x).__name__ == "FakeTensor" else 0)
            return super().forward(x).square().mean()
    model = Slow(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(8):
        model(torch.randn(4, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    sys.exit(3)
    """
    script = written(tmp_path, HEAD, ending)
    command = [sys.executable, "-m", "stepscope", "watch", "--steps", "3:6", "--runs", tmp_path / "runs", script]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said: list[str] = []
        for line in process.stderr:
            said.append(line)
            if "Ctrl-C leaves it out" in line:
                process.send_signal(signal.SIGINT)
    assert process.returncode == 3 and only_run(tmp_path / "runs").status == "done"
    assert any(line.startswith("Saved in") for line in said[:-2])
    tracing, not_traced = said[-2:]
    assert tracing.startswith("stepscope: tracing the loop") and not_traced.startswith("stepscope: not traced, since")


@pytest.mark.long
def test_the_scripts_own_handlers_stand(tmp_path: Path):
    ending = """
    import os, signal
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(signal.SIGTERM).name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    os.kill(os.getpid(), signal.SIGTERM)
    """
    done, _ = ended(tmp_path, ending)
    assert (done.returncode, done.stdout) == (7, "True SIG_DFL\n")


@pytest.mark.slow
def test_a_trace_and_a_memory_snapshot_of_some_more_steps(tmp_path: Path):
    script = written(tmp_path, NANOGPT)
    done = stepscope(
        "watch", "--steps", "4:8", "--record", "kineto,memory", "--runs", tmp_path / "runs", "--", script, "20"
    )
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path / "runs")
    assert run.evidence.notes == ()
    assert set(run.artifacts) == {"kineto", "memory"}
    assert run.evidence.captures[0].steps == 2
    assert run.evidence.memory is not None and (run.evidence.memory.backward_peak or 0) > 0
    trace = stepscope("trace", tmp_path / "runs" / run.id, "--json")
    assert trace.returncode == 0, trace.stderr
    modules = {row["module"] for row in json.loads(trace.stdout)["modules"]}
    assert {"h.*", "h.*.attn", "h.*.mlp.*"} <= modules
    memory = stepscope("memory", tmp_path / "runs" / run.id)
    assert memory.returncode == 0, memory.stderr
    assert "saved for backward" in memory.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["watch"], "no script to watch: write stepscope watch -- train.py, or -- -m package"),
        (["watch", "--", "nowhere.py"], "no script at nowhere.py"),
        (["watch", "--steps", "0:5", "--", "x.py"], "steps 0:5 begin too early"),
        (["watch", "--steps", "9:5", "--", "x.py"], "steps 9:5 hold no step"),
        (["watch", "--steps", "20", "--", "x.py"], "cannot read --steps '20': write FIRST:END, as in 20:40"),
        (["watch", "--record", "nsys", "--", "x.py"], "nsys watches a process from its start"),
        (["watch", "--", "python", "-u", "x.py"], "leave out python and its options"),
        (["watch", "--", "accelerate", "launch", "x.py"], "--no_python stepscope watch -- train.py"),
        (["watch", "--", "-m"], "no module behind -m"),
        (["watch", "--", "."], ". is a folder"),
        (["watch", "--", "ls"], "ls is no Python program"),
        (["watch", "--metrics", "no/such/m.prom", "--", __file__], "there is no folder no/such, make it first"),
        (["watch", "--metrics", ".", "--", __file__], "it is a folder"),
    ],
)
def test_wrong_input_is_one_line(tmp_path: Path, words: list[str], said: str):
    done = stepscope(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_place_that_cannot_be_written_is_said_before_the_script_runs(tmp_path: Path):
    (tmp_path / "file").write_text("")
    script = written(tmp_path, "print('ran')\n")
    done = stepscope("watch", "--runs", tmp_path / "file", "--", script)
    assert (done.returncode, done.stdout) == (2, "")
    assert "choose another place with --runs" in done.stderr


DISTRIBUTED = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(12):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
def test_each_rank_under_torchrun_leaves_its_run(tmp_path: Path, inside: bool):
    script = written(tmp_path, DISTRIBUTED)
    launch = ["--standalone", "--nproc-per-node", "2"]
    watched = ["watch", "--steps", "3:9", "--runs", str(tmp_path / "runs"), "--"]
    if inside:
        ours = [sys.executable, "-m", "stepscope", *watched, str(script), "0"]
        command = [sys.executable, "-m", "torch.distributed.run", *launch, "--no-python", *ours]
    else:
        command = [sys.executable, "-m", "stepscope", *watched, "torchrun", *launch, str(script), "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    runs = runs_in(tmp_path / "runs")
    workloads = [run.workload for run in runs if isinstance(run.workload, WatchedWorkload)]
    assert sorted((workload.rank, workload.world_size) for workload in workloads) == [(0, 2), (1, 2)]
    assert {workload.model.name for workload in workloads} == {"Sequential"}
    assert {run.samples["step"].count for run in runs} == {6}
    assert sorted(run.id.partition("-rank")[2][:1] for run in runs) == ["0", "1"]


def test_a_name_whose_bytes_are_no_text_is_escaped(tmp_path: Path):
    script = written(tmp_path, NANOGPT, name=os.fsdecode(b"tr\xe9.py"))
    done = stepscope("watch", "--steps", "6:9", "--runs", tmp_path / "runs", "--", script, "24", os.fsdecode(b"\xff"))
    assert done.returncode == 0 and r"watched in tr\udce9.py 24 \udcff" in done.stderr
