"""Forked cells fail, hang and die like those that are a Python of their own, and their server costs none."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stepscope.core.evidence import ProcessStart
from stepscope.core.run import Repeat, Run, Settings
from stepscope.core.workloads import FactoryWorkload, UserModel
from stepscope.engine.sweep import COMPILER_ON_GPU, Series, run_sweep
from stepscope.engine.sweep_plan import Cell, Policy, SweepPlan, SweepState
from tests.conftest import at_length
from tests.engine.test_sweep import (
    QUICK,
    alive,
    children_of,
    freeze,
    impossible,
    servers_of,
    statuses,
    wait_for,
    with_a_start_of_its_own,
)
from tests.hostile.campaign import processes_with

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="forks only where the system has pidfd_open"),
]

FACTORIES = """
import ctypes, gc, json, os, resource, signal, subprocess, sys, time
from pathlib import Path
import torch

def plain(number=0):
    return torch.nn.Linear(8, 4), torch.ones(2, 8), lambda y: y.square().mean()

def exits():
    os._exit(7)

def crashes():
    print("the last words", flush=True)
    ctypes.string_at(0)

def hangs(number=0):
    time.sleep(600)

def escapes(number=0, then_s=0):
    command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    subprocess.Popen(command)
    subprocess.Popen(command, start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    Path(os.environ["HOSTILE"], "escaped").touch()
    time.sleep(then_s)
    return plain()

def loses_its_server(number=0):
    os.kill(os.getppid(), signal.SIGKILL)
    return plain()

def dies_with_its_server(told):
    if not Path(told).exists():
        Path(told).touch()
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return plain()

def large(number=0):
    torch.ones(200 * 2**20, dtype=torch.uint8)
    return plain()

def told(file, number=0):
    Path(file).write_text(os.environ["TOLD"])
    return plain()

def looks_round(file):
    import numpy, random
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    files = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        files.append(target.split("[")[0].split(":")[0])
    threads = len(os.listdir("/proc/self/task"))
    numpy.ones((600, 600)) @ numpy.ones((600, 600))
    Path(file).write_text(json.dumps({
        "variables": {name: value for name, value in os.environ.items() if name != "STEPSCOPE_CELL"},
        "shown": sorted(variable.partition("=")[0] for variable in Path("/proc/self/environ").read_text().split("\\0")),
        "directory": os.getcwd(), "path": sys.path, "arguments": len(sys.argv), "umask": status["Umask"],
        "signals": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt")], "files": sorted(files),
        "leads": [os.getpid() == os.getpgrp(), os.getpid() == os.getsid(0)],
        "threads": threads, "threads of torch": torch.get_num_threads(), "first draws": torch.rand(3).tolist(),
        "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")],
        "gradients": torch.is_grad_enabled(), "collects": gc.isenabled(), "priority": os.nice(0),
        "mark": os.environ["STEPSCOPE_CELL"] in Path("/proc/self/environ").read_text(),
    }))
    return plain()
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOSTILE", str(tmp_path))
    file = tmp_path / "own.py"
    file.write_text(FACTORIES)
    return file


def made(own: Path, factory: str, settings: Settings = QUICK, **arguments: Any) -> Cell:
    workload = FactoryWorkload(factory=f"{own}:{factory}", arguments=arguments, model=UserModel(name=""))
    return Cell(workload=workload, settings=settings)


def plan(out: Path, *cells: Cell) -> SweepPlan:
    return SweepPlan(cells=cells, devices=("cpu",), out=str(out))


def starts(runs: list[Run]) -> list[str | None]:
    return [run.evidence.process_start for run in runs]


def failure(run: Run) -> str:
    assert run.failure is not None
    return run.failure.message


@pytest.mark.long
def test_cells_end_as_they_would_in_a_python_of_their_own(out: Path, own: Path, capfd: pytest.CaptureFixture[str]):
    """A result, memory that runs out, an exit, a crash: rows with the same words; and nothing of them lives on."""
    cells = [made(own, "plain"), Cell(workload=impossible(), settings=QUICK), made(own, "exits"),
             made(own, "crashes"), made(own, "escapes"), made(own, "plain", number=1)]  # fmt: skip
    beside: list[int] = []

    def look(state: SweepState) -> None:
        escaped = state.cells[4]
        if escaped.run is not None and state.cells[5].state == "waiting":
            beside.append(len(processes_with(f"HOSTILE={own.parent}")) - 1)  # the server

    forked = run_sweep(plan(out / "fork", *cells), tell=look)
    assert statuses(forked) == ["done", "out-of-memory", "failed", "killed", "done", "done"]
    assert beside == [0] and not processes_with(f"HOSTILE={own.parent}")
    assert starts([run for run in forked if run.status != "killed"]) == ["fork"] * 5
    _, memory, exited, crashed, *_ = forked
    assert memory.failure is not None and memory.failure.module == "blocks.0.attention"
    assert failure(exited).startswith("the process ended with code 7")
    assert failure(crashed) == "the process was killed by SIGSEGV"
    assert (out / "fork" / crashed.id / crashed.artifacts["log"]).read_text().startswith("the last words\n")
    assert capfd.readouterr().err == ""

    executed = run_sweep(plan(out / "exec", *cells[:4]), Policy(start="exec"))
    assert statuses(executed) == statuses(forked[:4])
    assert [run.failure for run in executed] == [run.failure for run in forked[:4]]


def test_a_forked_process_is_what_a_python_of_its_own_would_be(
    out: Path, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its environment, files, signals, limits, threads (NumPy's too) and first random numbers."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    seen: list[dict[str, Any]] = []
    for start in ("fork", "exec"):
        file = tmp_path / start
        others = [made(own, "plain")] if start == "fork" else []  # one alone would not be forked
        runs = run_sweep(plan(out / start, made(own, "looks_round", file=str(file)), *others), Policy(start=start))
        assert set(starts(runs)) == {start}
        seen.append(json.loads(file.read_text()))
    forked, executed = seen
    assert forked == executed
    assert forked["mark"] and forked["leads"] == [True, True]


@pytest.mark.long
def test_a_hang_ends_at_its_time_limit_and_the_next_is_forked_again(out: Path, own: Path):
    began = time.monotonic()
    assert statuses(run_sweep(plan(out / "first", made(own, "plain"), made(own, "plain", number=1)))) == ["done"] * 2
    limit_s = 2 * (time.monotonic() - began)
    runs = run_sweep(
        plan(out, made(own, "plain"), made(own, "hangs"), made(own, "plain", number=1)), Policy(timeout_s=limit_s)
    )
    assert statuses(runs) == ["done", "timed-out", "done"]
    assert starts([runs[0], runs[2]]) == ["fork"] * 2


@pytest.mark.long
def test_a_server_that_is_killed_costs_no_cell(out: Path, own: Path, tmp_path: Path):
    """The cell that runs goes on, one that died with it is measured again, and others get another server."""
    cells = [made(own, "plain"), made(own, "loses_its_server"), made(own, "plain", number=1),
             made(own, "dies_with_its_server", told=str(tmp_path / "told")), made(own, "plain", number=2)]  # fmt: skip
    runs = run_sweep(plan(out, *cells))
    assert statuses(runs) == ["done"] * 5
    assert starts(runs) == ["fork", "fork", "fork", "exec", "fork"]


IN_THE_SERVER = """
import sys
if "stepscope.engine.forks" in sys.orig_argv:
    {}
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "code",
    [
        "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "import os; os._exit(3)",
        *at_length("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"),
    ],
    ids=["two-threads", "ends", "hangs"],
)
def test_a_server_that_cannot_fork_costs_no_cell(
    out: Path, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
):
    monkeypatch.setattr("stepscope.engine.forks._START_S", 20.0)
    with_a_start_of_its_own(tmp_path, monkeypatch, IN_THE_SERVER.format(code))
    runs = run_sweep(plan(out, made(own, "plain"), made(own, "plain", number=1)))
    assert statuses(runs) == ["done"] * 2 and starts(runs) == ["exec"] * 2
    assert not processes_with(f"HOSTILE={own.parent}")


@pytest.mark.long
def test_a_server_that_no_longer_answers_is_replaced(out: Path, own: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("stepscope.engine.forks._ANSWER_S", 2.0)
    stopped: list[int] = []

    def stop(state: SweepState) -> None:
        if state.cells[0].run is not None and not stopped:
            stopped.extend(servers_of(os.getpid()))
            os.kill(stopped[0], signal.SIGSTOP)

    runs = run_sweep(plan(out, *(made(own, "plain", number=n) for n in range(3))), tell=stop)
    assert statuses(runs) == ["done"] * 3 and starts(runs) == ["fork", "exec", "fork"]
    assert not alive(stopped[0])


@pytest.mark.long
def test_a_changed_environment_has_a_server_of_its_own(
    out: Path, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TOLD", "first")
    counts: list[int] = []

    def change(state: SweepState) -> None:
        if state.cells[0].run is not None:
            os.environ["TOLD"] = "second"
            counts.append(len(servers_of(os.getpid())))

    files = [tmp_path / "a", tmp_path / "b"]
    runs = run_sweep(plan(out, *(made(own, "told", file=str(file)) for file in files)), tell=change)
    assert starts(runs) == ["fork"] * 2 and max(counts) == 2
    assert [file.read_text() for file in files] == ["first", "second"]


@pytest.mark.long
def test_repeated_cells_and_single_ones_are_a_python_of_their_own(out: Path, own: Path):
    plain = made(own, "plain")
    again = [Cell(workload=plain.workload, settings=QUICK, repeat=Repeat(set="s", number=n, of=2)) for n in (1, 2)]
    assert starts(run_sweep(plan(out, *again))) == ["exec"] * 2
    assert starts(run_sweep(plan(out, plain))) == ["exec"]


@pytest.mark.gpu
def test_what_compiled_cells_import_opens_no_gpu():
    """The rest of PyTorch's compiler does, and a process that has opened a device forks none."""
    check = (
        f"import stepscope.engine.cell_process, stepscope.engine.step, {COMPILER_ON_GPU}; "
        "from stepscope.engine.forks import why_not_fork; print(why_not_fork())"
    )
    alone = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    said = subprocess.run([sys.executable, "-c", check], env=alone, check=True, capture_output=True, text=True)
    assert said.stdout == "None\n"


def test_sweeps_of_a_series_are_forked_from_one_process_that_ends_with_it(out: Path, own: Path):
    """Also where one dies, and repeated cells are a Python of their own. What cells took it does not keep."""
    with Series("cpu") as series:
        assert series.forks.import_s == 0
        (first,) = run_sweep(plan(out, made(own, "plain")), series=series)
        assert 0.1 < series.forks.import_s < 100  # PyTorch is imported
        server = servers_of(os.getpid())
        (second,) = run_sweep(plan(out, made(own, "crashes")), series=series)
        (third,) = run_sweep(plan(out, made(own, "plain", number=1)), series=series)
        assert servers_of(os.getpid()) == server and len(server) == 1
        assert [run.status for run in (first, second, third)] == ["done", "killed", "done"]
        assert starts([first, third]) == ["fork"] * 2
        again = Cell(workload=made(own, "plain").workload, settings=QUICK, repeat=Repeat(set="s", number=1, of=1))
        assert starts(run_sweep(plan(out, again), series=series)) == ["exec"]
        sizes: list[int] = []
        for number in range(3):
            run_sweep(plan(out, made(own, "large", number=number)), series=series)
            pages = int(Path(f"/proc/{server[0]}/statm").read_text().split()[1])
            sizes.append(pages * os.sysconf("SC_PAGE_SIZE"))
        assert max(sizes) - min(sizes) < 20 * 2**20
    assert not servers_of(os.getpid())


SWEEP = """
import sys
from pathlib import Path
from stepscope.engine.sweep import Series, run_sweep
from tests.engine.test_forks import made, plan
from stepscope.engine.sweep_plan import Policy
own, out = map(Path, sys.argv[1:3])
run_sweep(plan(out, made(own, "plain"), made(own, "escapes", then_s=600)), Policy(start=sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("start", "with_its_cell"), [("fork", True), *at_length(("fork", False), ("exec", False), ("exec", True))]
)
def test_nothing_stays_of_a_sweep_that_is_killed(out: Path, own: Path, start: ProcessStart, with_its_cell: bool):
    """Its server, its cell, and what that has started in groups and sessions of their own."""
    here = Path(__file__).parents[2]
    sweep = subprocess.Popen([sys.executable, "-c", SWEEP, str(own), str(out), start], cwd=here)
    servers = 1 if start == "fork" else 0
    try:
        escaped = own.parent / "escaped"
        wait_for(lambda: escaped.exists() and len(processes_with(f"HOSTILE={own.parent}")) == 5 + servers)
        (cell,) = children_of(sweep.pid)
        assert len(servers_of(sweep.pid)) == servers
        if with_its_cell:
            freeze(cell)  # its lifeline cannot end it
    finally:
        sweep.kill()
        sweep.wait()
    left = 4 if with_its_cell else 0
    wait_for(lambda: len(processes_with(f"HOSTILE={own.parent}")) == left, seconds=10)
    if with_its_cell:
        again = plan(out, made(own, "plain"), made(own, "escapes", then_s=600))
        assert statuses(run_sweep(again, Policy(timeout_s=1.0))) == ["done", "timed-out"]
        assert not processes_with(f"HOSTILE={own.parent}")
