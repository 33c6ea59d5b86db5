"""A watched script lives as it would alone: what it prints, how it ends, and what is still in memory afterwards.

Each script runs twice. Its output without the watch is what is right.
"""

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.command import python, stepscope
from tests.conftest import at_length

HEAD = """
import gc, sys, weakref
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.a, self.b = nn.Linear(8, width), nn.Linear(width, 1)
    def forward(self, x):
        return self.b(self.a(x).relu())

def made(width=16):
    net = Net(width)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)

def train(net, optimizer, steps=60):
    for _ in range(steps):
        loss = net(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss

torch.manual_seed(0)
"""

FORKED = {
    "a model is freed by del": """
        net, optimizer = made()
        print(train(net, optimizer).item())
        alive = [weakref.ref(each) for each in (net, optimizer, net.a.weight)]
        gc.disable()
        del net, optimizer
        print([each() is None for each in alive], gc.collect() >= 0, [each() is None for each in alive])
    """,
    "a model whose loop has just begun is freed": """
        for steps in (1, 2, 3, 7):
            net, optimizer = made()
            train(net, optimizer, steps)
            nn.CrossEntropyLoss()(net(torch.randn(4, 8)), torch.ones(4, 1))
            with torch.no_grad():
                net(torch.randn(4, 8))
            alive = [weakref.ref(each) for each in (net, optimizer, net.a.weight)]
            del net, optimizer
            gc.collect()
            print(steps, [each() is None for each in alive])
    """,
    "ten models, one after the other": """
        most = 0
        for width in range(10, 20):
            net, optimizer = made(width)
            train(net, optimizer, 25)
            gc.collect()
            most = max(most, sum(type(each) is Net for each in gc.get_objects()))
        print(most)
    """,
    "a scheduler is made while the loop runs": """
        net, optimizer = made()
        for epoch in range(8):
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
            for _ in range(4):
                train(net, optimizer, 1)
                scheduler.step()
        print(scheduler.get_last_lr(), net.b.bias.item())
    """,
    "copies, pickles and checkpoints": """
        import copy, io, pickle
        net, optimizer = made()
        for i in range(30):
            train(net, optimizer, 1)
            twin = pickle.loads(pickle.dumps(copy.deepcopy(net)))
            file = io.BytesIO()
            torch.save((net, optimizer), file)
            file.seek(0)
            again, other = torch.load(file, weights_only=False)
            train(again, other, 1)
        print(type(twin).__module__, sorted(vars(other)), sum(p.sum().item() for p in again.parameters()))
    """,
    "a scaler, accumulation and clipping": """
        net, optimizer = made()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for i in range(40):
            for _ in range(2):
                scaler.scale(net(torch.randn(4, 8)).square().mean() * (float("inf") if i == 12 else 1)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        print(scaler.get_scale(), net.b.bias.item())
    """,
    "a closure": """
        net = Net()
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
        def closure():
            optimizer.zero_grad()
            loss = net(torch.ones(4, 8)).square().mean()
            loss.backward()
            return loss
        for _ in range(20):
            print(optimizer.step(closure).item())
    """,
    "a whole step is compiled": """
        import logging
        from torch._dynamo.utils import counters
        logging.disable()  # Dynamo's warnings say when
        net, optimizer = made()
        step = torch.compile(lambda: train(net, optimizer, 1), backend="eager")
        for _ in range(30):
            loss = step()
        print(loss.item(), counters["stats"]["unique_graphs"])
    """,
    "a step of the optimizer is compiled, between steps of the model that are not": """
        import logging
        logging.disable()
        net, optimizer = made()
        update = torch.compile(lambda: optimizer.step(), backend="eager")
        for _ in range(60):
            net(torch.randn(4, 8)).square().mean().backward()
            update()
            optimizer.zero_grad()
        print(net.b.bias.item(), torch._C._len_torch_dispatch_stack())
    """,
    "a step of the optimizer that was taken before": """
        net, optimizer = made()
        update = optimizer.step
        for _ in range(60):
            net(torch.randn(4, 8)).square().mean().backward()
            update()
            optimizer.zero_grad()
        print(net.b.bias.item())
    """,
    "a scripted model": """
        net = torch.jit.script(Net())
        print(train(net, torch.optim.AdamW(net.parameters(), lr=1e-2)).item())
    """,
    "an exception that the loop catches": """
        net, optimizer = made()
        for i in range(30):
            try:
                if i % 5 == 2:
                    raise RuntimeError("skipped")
                train(net, optimizer, 1)
            except RuntimeError as error:
                print(error)
        print(net.b.bias.item())
    """,
    "exit with a message": "train(*made())\nsys.exit('no more')\n",
    "exit with a number": "train(*made())\nsys.exit(3)\n",
    "exit with nothing": "train(*made())\nsys.exit(None)\n",
    "an exception in a model": """
        class Failing(Net):
            def forward(self, x):
                if len(calls) > 20:
                    raise ValueError("full")
                calls.append(1)
                return super().forward(x)
        calls, net = [], Failing()
        train(net, torch.optim.SGD(net.parameters(), lr=0.1))
    """,
    "the end by os._exit": "train(*made())\nimport os\nprint('here', flush=True)\nos._exit(5)\n",
    "what runs at exit": """
        import atexit
        for word in "ab":
            atexit.register(print, "at exit", word)
        class Late:
            def __del__(self): print("freed")
        late = Late()
        train(*made())
    """,
    "the loop in a thread that is no daemon": """
        import threading
        threading.Thread(target=lambda: print(train(*made()).item())).start()
    """,
    "stderr closed": "train(*made())\nsys.stderr.close()\nprint('here')\n",
    "stderr taken away": "sys.stderr = None\ntrain(*made())\nprint('here')\n",
    "stderr lent to a file": """
        import contextlib, io
        with contextlib.redirect_stderr(io.StringIO()) as file:
            train(*made())
            other = torch.optim.SGD(Net().parameters())
        sys.stderr = file
        print(repr(file.getvalue()))
    """,
    "ranges of its own": """
        from torch.profiler import record_function
        net, optimizer = made()
        with record_function("epoch"):
            for i in range(40):
                with record_function(f"step {i}"):
                    train(net, optimizer, 1)
        print(net.b.bias.item())
    """,
    "a profiler of its own": """
        from torch.profiler import ProfilerActivity, profile, schedule
        net, optimizer, counts = *made(), []
        ready = lambda p: counts.append(sum(e.name == "aten::linear" for e in p.events()))
        often = schedule(wait=6, warmup=1, active=2)
        with profile(activities=[ProfilerActivity.CPU], schedule=often, on_trace_ready=ready, acc_events=True) as p:
            for _ in range(45):
                train(net, optimizer, 1)
                p.step()
        print(counts)
    """,
}
"""Scripts behind HEAD, which find torch imported."""

OF_THEIR_OWN = {
    "torch is looked for before it is imported": """
        import importlib.util
        print([importlib.util.find_spec("torch").loader.__class__.__name__ for _ in range(2)])
    """
    + HEAD
    + "print(train(*made()).item())\n",
    "what a script knows of itself": """
        import inspect, signal, atexit
        class Own: pass
        print(inspect.getsource(Own), __name__, __spec__, type(__builtins__), __file__, sys.argv, sys.path[0])
        print(sys.excepthook is sys.__excepthook__, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        print([key for key in vars() if key.startswith("__")], sys.modules["__main__"].Own is Own, sys.orig_argv[1:])
        print(sys.stdin.read(), open("/dev/null").fileno(), sorted(os.environ))
    """,
    "children of every kind": """
        import multiprocessing, subprocess
        from torch.utils.data import DataLoader, TensorDataset
        def doubled(x): return 2 * x
        if __name__ == "__main__":
            data = TensorDataset(torch.arange(80.).reshape(10, 8))
            loader = DataLoader(data, num_workers=1, multiprocessing_context="spawn")
            print(sum(x.sum().item() for (x,) in loader))
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(doubled, [1, 2]))
            print(subprocess.run([sys.executable, "-c", "import torch"]).returncode)
            train(*made())
    """,
    "a script with an error in its text": "print('never'\n",
}
"""Scripts that need a new interpreter."""


ALONE: dict[str, subprocess.CompletedProcess[str]] = {}
"""What became of each script of FORKED without the watch: it runs once, however often it is watched."""


def both(tmp_path: Path, text: str, *, forks: bool, options: tuple[str, ...] = (), stdin: str = "") -> None:
    """Run a script alone and watched, and compare."""
    script = tmp_path / "train.py"
    script.write_text(text)
    watch = ["watch", "--runs", tmp_path / "runs", *options, "--", script.name, "--lr", "3"]
    if forks:
        if text not in ALONE:
            ALONE[text] = python(script, "--lr", "3", cwd=tmp_path)
        alone, watched = ALONE[text], stepscope(*watch, cwd=tmp_path)
    else:
        alone, watched = (
            subprocess.run(
                [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False, input=stdin
            )
            for words in ((script.name, "--lr", "3"), ("-m", "stepscope", *watch))
        )
    assert watched.stdout == alone.stdout, watched.stderr
    assert watched.returncode == alone.returncode, watched.stderr
    said, beside = (
        [line for line in each.stderr.splitlines() if not line.startswith("USDT:")]  # PyTorch's profiler, and when
        for each in (alone, watched)
    )
    assert beside[: len(said)] == said if not forks else said[-1:] == [] or said[-1] in beside


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "record"),
    [
        *((name, None) for name in FORKED),
        ("ten models, one after the other", "kineto"),
        ("a profiler of its own", "kineto,memory"),
        *at_length(*((name, "kineto,memory") for name in FORKED)),
    ],
)
def test_a_script_prints_ends_and_frees_as_it_does_alone(tmp_path: Path, name: str, record: str | None):
    text = HEAD + textwrap.dedent(FORKED[name])
    both(tmp_path, text, forks=True, options=("--record", record) if record else ())


@pytest.mark.slow
@pytest.mark.parametrize("name", [*list(OF_THEIR_OWN)[:2], *at_length(*list(OF_THEIR_OWN)[2:])])
def test_a_new_process_is_as_python_makes_it(tmp_path: Path, name: str):
    text = OF_THEIR_OWN[name]
    heading = "" if HEAD in text or "never" in text else "import os" + HEAD
    both(tmp_path, heading + textwrap.dedent(text), forks=False, stdin="given\n")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["module", *at_length("folder", "archive")])
def test_modules_folders_and_archives_run_as_python_runs_them(tmp_path: Path, kind: str):
    package = tmp_path / "package"
    package.mkdir()
    text = (
        HEAD
        + "print(__name__, __spec__.name, type(__builtins__), sys.argv, sys.path[0])\nprint(train(*made()).item())\n"
    )
    (package / "__main__.py").write_text(text)
    program = {"module": ["-m", "package"], "folder": ["package"], "archive": ["package.zip"]}[kind]
    if kind == "archive":
        shutil.make_archive(str(package), "zip", package)
    alone = subprocess.run(
        [sys.executable, *program, "1"], cwd=tmp_path, capture_output=True, text=True, check=False
    )  # by Python itself, and not as these tests' process that forks has it
    watched = stepscope("watch", "--runs", tmp_path / "runs", "--", *program, "1", cwd=tmp_path)
    assert (watched.returncode, watched.stdout) == (alone.returncode, alone.stdout), watched.stderr
    assert "Saved in" in watched.stderr


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["2>&-", *at_length(">&- 2>&-", "2>/dev/full")])
def test_streams_that_are_closed_or_full_change_nothing(tmp_path: Path, closed: str):
    script = tmp_path / "train.py"
    script.write_text(
        HEAD + "train(*made())\nopen('out', 'w').write(f'{sys.stderr is None} {sys.stdout is None}')\nsys.exit(4)\n"
    )
    command = f"{sys.executable} -m stepscope watch --runs runs -- train.py {closed}"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (4, "", "")
    assert (tmp_path / "out").read_text() == f"{'2>&-' in closed} {'>&- 2' in closed}", (
        "as Python has it without a watch"
    )
