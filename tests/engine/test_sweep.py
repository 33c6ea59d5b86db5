"""Sweeps with real processes: out of memory, crashes, hangs, kills, Ctrl-C; each a row, and the sweep goes on."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.core.errors import InputError
from stepscope.core.run import Run, Settings
from stepscope.core.run_directory import create_run_directory, load_runs, save_run
from stepscope.core.workloads import TextbookWorkload
from stepscope.engine.request import WAITS
from stepscope.engine.sweep import Series, run_sweep
from stepscope.engine.sweep_plan import Cell, CellState, Policy, SweepPlan, SweepState, order_cells
from stepscope.engine.user_code import load_recipe
from stepscope.questions.warmup import warmup_cells
from tests.command import stepscope
from tests.conftest import at_length, make_run, mini, workload
from tests.hostile import kills
from tests.hostile.campaign import processes_with, wait_until_it_answers

pytestmark = pytest.mark.slow

QUICK = Settings(warmup_floor=1, warmup_cap=1, steps_floor=3, steps_cap=3, seconds=0, profile=False)
ENDLESS = Settings(warmup_floor=1, warmup_cap=1, steps_floor=10**7, steps_cap=10**7, seconds=0, profile=False)
IMPOSSIBLE, LONGER = 6_200_000, 8_800_000
"""Sequences whose attention scores no machine holds. They are beyond the 128 TiB that a process can address: of less,
some systems give what they do not have, and end the process when it is used."""


def impossible(seq_len: int = IMPOSSIBLE, **changes: object) -> TextbookWorkload:
    return mini(**{"d_model": 2, "heads": 1, "layers": 1, "batch_size": 1, "seq_len": seq_len, **changes})


def plan(out: Path, *cells: Cell, **changes: object) -> SweepPlan:
    return SweepPlan(cells=cells, devices=("cpu",), out=str(out), **changes)  # pyright: ignore[reportArgumentType]


def cell(settings: Settings = QUICK, **changes: object) -> Cell:
    return Cell(workload=mini(**changes), settings=settings)


def statuses(runs: list[Run]) -> list[str]:
    return [run.status for run in runs]


Sweep = Callable[..., list[Run]]


@pytest.fixture(scope="module")
def series() -> Iterator[Series]:
    """One process that forks the cells of tests to which it does not matter how a cell starts."""
    with Series("cpu") as one:
        yield one


@pytest.fixture
def sweep(series: Series, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """`run_sweep` whose cells are forked, in some milliseconds."""

    def run(*arguments: Any, **named: Any) -> list[Run]:
        # In another environment, as each test has by this name, there would be another process that forks.
        monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
        return run_sweep(*arguments, **named, series=series)

    return run


def test_out_of_memory_is_a_row_with_its_place_and_larger_cells_are_skipped(out: Path, sweep: Sweep):
    cells = order_cells(
        [
            Cell(workload=impossible(LONGER), settings=QUICK),
            cell(seq_len=8),
            Cell(workload=impossible(), settings=QUICK),
            Cell(workload=impossible(LONGER, dtype="bf16", phase="forward"), settings=QUICK),
        ]
    )
    runs = sweep(plan(out, *cells))
    by_key = {(r.workload.seq_len, r.workload.dtype): r for r in runs}
    assert by_key[8, "fp32"].status == "done"
    oom = by_key[IMPOSSIBLE, "fp32"]
    assert oom.status == "out-of-memory" and oom.failure is not None
    assert (oom.failure.during, oom.failure.phase, oom.failure.module) == ("warm-up", "forward", "blocks.0.attention")
    skipped = by_key[LONGER, "fp32"]
    assert skipped.status == "skipped" and skipped.failure is not None
    assert skipped.failure.message.endswith("ran out of memory") and f"s{IMPOSSIBLE}" in skipped.failure.message
    assert by_key[LONGER, "bf16"].status == "out-of-memory"  # another dtype: tried

    (tried,) = sweep(plan(out, Cell(workload=impossible(LONGER), settings=QUICK)), Policy(skip=False))
    assert tried.status == "out-of-memory"


def test_a_crash_is_a_row_and_its_last_words_are_kept(out: Path, monkeypatch: pytest.MonkeyPatch):
    # An allocator that does not exist kills the process in its start, before Python could catch anything.
    monkeypatch.setenv("PYTHONMALLOC", "no-such-allocator")
    runs = run_sweep(plan(out, cell()))
    assert statuses(runs) == ["failed"]
    assert runs[0].failure is not None and "PYTHONMALLOC" in runs[0].failure.message
    monkeypatch.delenv("PYTHONMALLOC")
    assert statuses(run_sweep(plan(out, cell()))) == ["failed"]
    assert statuses(run_sweep(plan(out, cell()), Policy(retry=True))) == ["done"]


def test_a_hang_ends_at_its_time_limit(out: Path, sweep: Sweep):
    assert statuses(sweep(plan(out, cell(seq_len=24)))) == ["done"]
    begun = time.monotonic()
    assert statuses(sweep(plan(out, cell(seq_len=32)))) == ["done"]
    limit_s = 2 + math.ceil(2 * (time.monotonic() - begun))  # enough to come to its steps here
    runs = sweep(plan(out, cell(ENDLESS), cell(seq_len=24)), Policy(timeout_s=limit_s))
    assert statuses(runs) == ["timed-out", "done"]
    failure = runs[0].failure
    assert failure is not None and failure.message == f"no end after {limit_s} s"
    assert failure.during.startswith("measure step")
    assert len(load_runs([out])[0]) == 4


def test_a_cell_that_is_killed_is_a_row_and_the_sweep_goes_on(out: Path, sweep: Sweep):
    killed: list[int] = []

    def kill_first(state: SweepState) -> None:
        if not killed and state.cells[0].stage == "measure":
            (pid,) = children_of(os.getpid())
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    runs = sweep(plan(out, cell(ENDLESS), cell(seq_len=24)), tell=kill_first)
    assert statuses(runs) == ["killed", "done"]
    assert runs[0].failure is not None and "SIGKILL" in runs[0].failure.message
    assert runs[0].environment is not None


@pytest.mark.long
def test_a_cell_killed_while_it_observes_keeps_its_times(out: Path):
    settings = Settings(warmup_floor=1, warmup_cap=1, steps_floor=5, steps_cap=5, seconds=0)

    def kill_when_observing(state: SweepState) -> None:
        if state.cells[0].stage in ("observe", "profile", "ceiling"):
            for pid in children_of(os.getpid()):
                os.kill(pid, signal.SIGKILL)

    (run,) = run_sweep(plan(out, cell(settings)), tell=kill_when_observing)
    assert run.status == "killed" and run.samples["step"].count == 5


def test_a_cell_whose_process_does_not_end_is_a_result_all_the_same(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import atexit, time\natexit.register(time.sleep, 300)\n")
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    monkeypatch.setattr("stepscope.engine.measured_cell.EXIT_GRACE_S", 1.0)
    assert statuses(run_sweep(plan(out, cell()))) == ["done"]


@pytest.mark.long
def test_cells_of_one_workload_do_not_fall_over_each_other(out: Path):
    """The warm-up study of a workload that does not fit: three rows of one key within one millisecond."""
    runs = run_sweep(plan(out, *warmup_cells(impossible(), steps=2)))
    assert statuses(runs) == ["out-of-memory", "skipped", "skipped", "skipped"]
    assert len({run.id for run in runs}) == 4


def test_a_full_disk_ends_the_sweep_in_one_line_and_the_measurement_is_not_lost(tmp_path: Path, out: Path):
    limited = "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limited += (
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\nfrom stepscope.app.cli.app import main\nmain()\n"
    )
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE)
    result = subprocess.run(
        [sys.executable, "-c", limited, "sweep", str(recipe), "--runs", str(out), "--device", "cpu", "--steps", "200",
         "--seconds", "0", "--no-profile"],
        capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},  # it would be cut, too
    )  # fmt: skip
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "cannot write" in result.stderr.strip().splitlines()[-1]
    assert '"status": "done"' in result.stderr  # the run itself, where no file had room for it
    assert not list(out.rglob("*.tmp"))


def test_the_same_sweep_twice_at_once_is_refused(out: Path, sweep: Sweep):
    same = plan(out, cell())
    refused: list[str] = []

    def start_again(_: SweepState) -> None:
        if not refused:
            with pytest.raises(InputError, match="already running") as caught:
                sweep(same)
            refused.append(str(caught.value))

    assert statuses(sweep(same, tell=start_again)) == ["done"]
    assert refused


def test_a_device_named_twice_is_refused(out: Path, sweep: Sweep):
    import torch  # a sweep of tests/engine/test_forks.py imports this file, and no torch

    chosen = "cuda" if torch.cuda.is_available() else "cpu"
    with pytest.raises(InputError, match="names a device twice"):
        sweep(SweepPlan(cells=(cell(), cell(seq_len=24)), devices=(chosen, "auto"), out=str(out)))


def test_a_cell_the_device_cannot_run_is_a_row_but_a_missing_device_ends_the_sweep(out: Path, sweep: Sweep):
    runs = sweep(plan(out, cell(dtype="tf32"), cell()))
    assert statuses(runs) == ["failed", "done"]
    assert runs[0].failure is not None and "tf32 needs an NVIDIA GPU" in runs[0].failure.message
    with pytest.raises(InputError, match="no GPU for --device cuda:7"):
        sweep(SweepPlan(cells=(cell(), cell(seq_len=24)), devices=("cuda:7",), out=str(out)))


RECIPE = """
from stepscope.core.model_config import configure
from stepscope.core.workloads import TextbookWorkload

def sweep():
    model = configure("tiny", d_model=32, d_ff=64, layers=2, heads=2, vocabulary=101)
    return [TextbookWorkload(model=model, seq_len=n, batch_size=2) for n in (8, 16)]
"""


def of_recipe(tmp_path: Path, out: Path) -> list[str]:
    """The words of a sweep that takes two seconds and a start."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE)
    return ["sweep", str(recipe), "--runs", str(out), "--device", "cpu", "--seconds", "1", "--no-profile"]


def start_sweep(tmp_path: Path, out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "stepscope", *of_recipe(tmp_path, out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def freeze(pid: int) -> None:
    """Stop a process, with each of its threads: they stop one after another, and only when they are next to run."""

    def states() -> set[str]:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        return {stat.rpartition(") ")[2][0] for stat in stats}

    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: states() == {"T"})


def ended(out: Path) -> dict[str, str]:
    runs, _ = load_runs([out]) if out.is_dir() else ([], [])
    return {run.id: run.status for run in runs}


def test_killed_in_the_middle_the_same_command_finishes_and_repeats_only_that_cell(tmp_path: Path, out: Path):
    first = start_sweep(tmp_path, out)
    # One cell done, the next has begun: kill the sweep as hard as there is.
    wait_for(lambda: sorted(ended(out).values()) == ["done", "unfinished"])
    (cell_pid,) = children_of(first.pid)
    first.kill()
    first.wait()
    wait_for(lambda: not alive(cell_pid), seconds=10)  # its cell must not go on holding the device
    before = ended(out)
    assert sorted(before.values()) == ["done", "unfinished"]

    again = stepscope(*of_recipe(tmp_path, out))
    assert again.stderr.count("(already measured)") == 1
    done = {name for name, status in ended(out).items() if status == "done"}
    assert len(done) == 2 and {name for name, status in before.items() if status == "done"} < done
    assert again.stdout.count("tiny+") == 2

    assert stepscope(*of_recipe(tmp_path, out)).stderr.count("(already measured)") == 2
    assert len(ended(out)) == 3  # the unfinished one stays to be seen


@pytest.mark.long
def test_ctrl_c_keeps_what_the_running_cell_has(tmp_path: Path, out: Path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE)
    command = [sys.executable, "-m", "stepscope", "sweep", str(recipe), "--runs", str(out), "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--warmup", "1", "--steps", "10000000", "--no-profile"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: "unfinished" in ended(out).values())
    time.sleep(4.0)  # nothing tells from outside how many steps were measured; the assertion below does
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in stderr and "the same command goes on where this one stopped" in stderr
    runs, _ = load_runs([out])
    assert statuses(runs) == ["interrupted"]
    assert runs[0].samples["step"].count >= 1 and runs[0].summary["step_median_s"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import sys\n\nsys.exit(0)\n", r"recipe.py line 3: SystemExit"),
        ("import itertools\n\ndef sweep():\n    return itertools.repeat('x')\n", "returned str"),
        ("import os\n\nos.chdir('/')\n", r"defines no function sweep\(\)"),
        ("from beside import broken\n", r"beside.py line 1: "),
        (
            "from stepscope.core.model_config import ModelConfig\n\ndef sweep():\n"
            "    return [ModelConfig(name='../up', d_model=4, d_ff=4, layers=1, heads=1)]\n",
            r"recipe.py line 4: the model's name is '../up'",
        ),
        (
            "from stepscope.core.model_config import ModelConfig\n\ndef sweep():\n"
            "    return [ModelConfig(name='x', d_model=4.0, d_ff=4, layers=1, heads=1)]\n",
            r"recipe.py line 4: d_model is 4.0",
        ),
        ("def sweep(:\n", r"recipe.py line 1: "),
        ("def sweep():\n    return [configur('small')]\n", r"recipe.py line 2: NameError: name 'configur'"),
        ("cells = []\n", r"defines no function sweep\(\)"),
        ("def sweep():\n    return []\n", "returned no workloads"),
        ("def sweep():\n    return ['small']\n", "returned str among its workloads"),
        ("def sweep():\n    return None\n", "recipe.py: TypeError"),
        (
            "from stepscope.core.model_config import configure\n\ndef sweep():\n    return [configure('smal')]\n",
            "recipe.py line 4: unknown model 'smal'",
        ),
        (
            "from stepscope.core.workloads import TextbookWorkload as W\n\ndef sweep():\n    return [W(modle=1)]\n",
            "recipe.py line 4: TypeError.*modle",
        ),
    ],
)
def test_a_recipe_with_a_fault_is_one_line(tmp_path: Path, text: str, says: str):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(text)
    (tmp_path / "beside.py").write_text("def broken(:\n")
    here = Path.cwd()
    with pytest.raises(InputError, match=says) as caught:
        load_recipe(recipe)
    assert "\n" not in str(caught.value) and Path.cwd() == here


def test_a_recipe_that_is_not_there(tmp_path: Path):
    with pytest.raises(InputError, match="no recipe at"):
        load_recipe(tmp_path / "missing.py")


def test_equal_plans_are_one_sweep_and_others_are_not(out: Path):
    a, b = cell(), cell(seq_len=24)
    assert plan(out, a, b).key == plan(out, b, a).key == plan(out / "elsewhere", a, b).key
    others = [
        plan(out, a), plan(out, a, b, tag="x"), plan(out, a, b, memory_limit_bytes=1), plan(out, a, cell(ENDLESS)),
        SweepPlan(cells=(a, b), devices=("cuda:0",), out=str(out)),
    ]  # fmt: skip
    assert len({p.key for p in [plan(out, a, b), *others]}) == 6
    two, one = (SweepPlan(cells=(a, b), devices=d, out=str(out)) for d in (("cuda:0", "cuda:1"), ("cuda:1",)))
    assert two.key == one.key


def test_the_run_of_another_sweep_is_no_result_of_this_one(out: Path, sweep: Sweep):
    """The same workload and settings, but under another memory limit, say."""
    this, other = plan(out, cell()), plan(out, cell(), memory_limit_bytes=2**30)
    stored = make_run(mini(), settings=QUICK, sweep=other.key, step=[0.1] * 3)
    save_run(stored, create_run_directory(out, stored.workload))
    assert [run.id for run in sweep(other)] == [stored.id]
    (measured,) = sweep(this)
    assert measured.id != stored.id and measured.sweep == this.key


def test_settings_are_part_of_a_cell_that_is_taken_over(out: Path, sweep: Sweep):
    """One workload measured in two ways is two cells: the run of one is no result of the other."""
    longer = Settings(warmup_floor=1, warmup_cap=1, steps_floor=4, steps_cap=4, seconds=0, profile=False)
    both = plan(out, cell(), cell(longer))
    stored = make_run(mini(), settings=QUICK, sweep=both.key, step=[0.1] * 3)
    save_run(stored, create_run_directory(out, stored.workload))
    taken, measured = sweep(both)
    assert taken.id == stored.id
    assert measured.settings == longer and measured.samples["step"].count == 4


def test_the_forecast_goes_by_flops_and_never_beyond_the_time_limit():
    cells = [CellState(cell=cell(seq_len=n)) for n in (16, 32, 64, 10_000_000)]
    state = SweepState(cells=cells, timeout_s=100.0, places=1)
    assert state.seconds_left is None
    for measured, seconds in zip(cells, (5.0, 5.2), strict=False):
        measured.run, measured.seconds = make_run(), seconds
    left = state.seconds_left
    assert left is not None and 105.0 < left < 107.0
    state.places = 2
    assert state.seconds_left == left / 2


def test_cells_run_from_small_to_large_and_once():
    cells = [Cell(workload=workload(model=m, seq_len=s)) for m in ("small", "tiny") for s in (64, 16, 64)]
    ordered = [(c.workload.model.name, c.workload.seq_len) for c in order_cells(cells)]
    assert ordered == [("tiny", 16), ("tiny", 64), ("small", 16), ("small", 64)]


def children_of(pid: int) -> list[int]:
    """The cells of the sweep that runs in process `pid`, forked or not."""
    forked = [cell for server in servers_of(pid) for cell in processes_under(server, "stepscope.engine.forks")]
    return processes_under(pid, "stepscope.engine.cell_process") + forked


def servers_of(pid: int) -> list[int]:
    """The processes that fork cells for the sweep that runs in process `pid`."""
    return processes_under(pid, "stepscope.engine.forks")


def processes_under(pid: int, module: str) -> list[int]:
    """Processes that run this module and whose parent is `pid`."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [child for child in map(int, listed.stdout.split()) if alive(child) and module in command_of(child)]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def with_a_start_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Code that every cell's Python runs before anything of ours, as a sitecustomize or a .pth does."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)


PRINTS = r"""
import os, sys
print("a banner")
print("x" * 200_000)
print('{"stage": 7}')
print('{"directory": "/nowhere", "finished": true}', flush=True)
os.write(1, bytes(range(256)) * 300)
lines = [b"no event", b"[1, 2]", b'{"stage": 7}', b"\xff\xfe", b"\n" * 5000, b"[" * 40_000, b"x" * 10**6]
if len(sys.orig_argv) > 4 and sys.orig_argv[3] == "stepscope.engine.cell_process":
    for line in lines:
        os.write(int(sys.orig_argv[4]), line + b"\n")
"""


def test_what_a_cell_prints_and_the_users_own_files_change_nothing(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What it prints is no event, what is no event is passed over, and a module of the user's is not Python's."""
    with_a_start_of_its_own(tmp_path, monkeypatch, PRINTS)
    (tmp_path / "random.py").write_text("raise SystemExit('my own script')\n")
    monkeypatch.chdir(tmp_path)
    assert statuses(run_sweep(plan(out, cell()))) == ["done"]


def test_what_a_cell_that_fails_has_printed_is_its_log(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code = "import os, sys\nprint('on stdout', flush=True)\nprint('an error on stderr', file=sys.stderr)\n"
    with_a_start_of_its_own(tmp_path, monkeypatch, code + "'cell' in sys.orig_argv[3] and os._exit(7)\n")
    (run,) = run_sweep(plan(out, cell()))
    assert run.status == "failed" and run.failure is not None
    assert run.failure.message == "the process ended with code 7: an error on stderr"
    assert (out / run.id / run.artifacts["log"]).read_text() == "on stdout\nan error on stderr\n"


STARTS_OTHERS = """
import subprocess, sys
if {"stepscope.engine.cell_process", "stepscope.engine.forks"} & set(sys.orig_argv):
    for session in (False, True):
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=session)
"""


@pytest.mark.parametrize("killed", [False, *at_length(True)], ids=["done", "killed"])
def test_nothing_that_a_cell_started_lives_on(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool, capfd: pytest.CaptureFixture[str]
):
    """Compilers' helpers, in the cell's group and out of it, while the next cell is measured. For forked cells
    tests/engine/test_forks.py has the same."""
    monkeypatch.setenv("HOSTILE", str(tmp_path))
    with_a_start_of_its_own(tmp_path, monkeypatch, STARTS_OTHERS)
    beside: list[int] = []

    def look(state: SweepState) -> None:
        if killed and state.cells[0].stage == "measure":
            for pid in children_of(os.getpid()):
                os.kill(pid, signal.SIGKILL)
        if state.cells[0].run is not None and not beside:
            beside.append(len(processes_with(f"HOSTILE={tmp_path}")))

    both = plan(out, cell(ENDLESS if killed else QUICK), cell(seq_len=24))
    runs = run_sweep(both, Policy(start="exec"), look)
    assert statuses(runs) == ["killed" if killed else "done", "done"]
    assert beside == [0] and not processes_with(f"HOSTILE={tmp_path}")
    assert capfd.readouterr().err == ""


@pytest.mark.long
def test_what_a_killed_sweep_and_its_cell_left_behind_ends_when_it_starts_again(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
):
    with_a_start_of_its_own(tmp_path, monkeypatch, STARTS_OTHERS)
    monkeypatch.setenv("HOSTILE", str(tmp_path))
    first = start_sweep(tmp_path, out)
    wait_for(lambda: len(processes_with(f"HOSTILE={tmp_path}")) == 5)  # with the server, and what it started
    (cell_pid,) = children_of(first.pid)
    freeze(cell_pid)  # its lifeline cannot end it
    first.kill()
    first.communicate()
    wait_for(lambda: processes_with(f"HOSTILE={tmp_path}") == [cell_pid])
    _, stderr = start_sweep(tmp_path, out).communicate(timeout=200)
    assert not processes_with(f"HOSTILE={tmp_path}") and "Traceback" not in stderr
    assert sorted(ended(out).values()).count("done") == 2


@pytest.mark.long
def test_a_cell_killed_while_the_clock_jumps_back_is_the_row_of_its_directory(out: Path):
    def jump(state: SweepState) -> None:
        if state.cells[0].stage == "observe":
            (directory,) = out.glob("2*")
            os.utime(directory, (1e9, 1e9))  # as if the directory had been made long before the sweep began
            for pid in children_of(os.getpid()):
                os.kill(pid, signal.SIGKILL)

    (run,) = run_sweep(plan(out, cell()), tell=jump)
    assert run.status == "killed" and run.samples["step"].count == 3
    assert ended(out) == {run.id: "killed"}


@pytest.mark.long
def test_a_cell_that_somebody_stops_is_killed_with_what_it_had(out: Path):
    def stop(state: SweepState) -> None:
        if state.cells[0].stage == "measure" and "step 3" in state.cells[0].detail:
            for pid in children_of(os.getpid()):
                os.kill(pid, signal.SIGTERM)

    (run,) = run_sweep(plan(out, cell(ENDLESS)), tell=stop)
    assert run.status == "killed" and run.failure is not None and "SIGTERM" in run.failure.message
    assert run.samples["step"].count >= 3 and ended(out) == {run.id: "killed"}


@pytest.mark.parametrize(
    ("sent", "delay_s"),
    [(signal.SIGTERM, 1.5), *at_length((signal.SIGINT, 0.2), (signal.SIGHUP, 2.5))],
    ids=str,
)
def test_a_sweep_stops_with_the_code_of_its_signal(tmp_path: Path, out: Path, sent: signal.Signals, delay_s: float):
    process = start_sweep(tmp_path, out)
    assert wait_until_it_answers(process.pid)
    time.sleep(delay_s)
    for _ in range(2):
        process.send_signal(sent)
        time.sleep(0.05)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 128 + sent
    said = [line for line in stderr.splitlines() if not line.startswith("stepscope: [")]
    assert len(said) == 1 and said[0].startswith("stepscope: interrupted")


@pytest.mark.long
def test_cells_killed_at_random_moments_have_one_result_each():
    assert kills.main(["--kills", "3", "--cells", "2", "--span", "5"]) == 0


def test_cells_get_ready_side_by_side_and_are_timed_one_after_another(tmp_path: Path):
    """In two waves. One that fails while it gets ready keeps no other waiting, and none but those that wait is alive
    while steps are timed."""
    cells = (cell(seq_len=8), Cell(workload=impossible(), settings=QUICK), cell(seq_len=16), cell(seq_len=32))
    waited: list[str] = []

    def look(state: SweepState) -> None:
        stages = {each.cell.workload.seq_len: each.stage for each in state.cells if each.run is None and each.stage}
        timed = [length for length, stage in stages.items() if stage in ("warm-up", "measure", "observe")]
        assert len(timed) <= 1, stages
        if timed:
            assert {stage for length, stage in stages.items() if length not in timed} <= {WAITS}, stages
        waited.extend(stage for stage in stages.values() if stage == WAITS)

    runs = run_sweep(plan(tmp_path, *cells), Policy(side_by_side=3, start="exec"), look)
    assert statuses(runs) == ["done", "out-of-memory", "done", "done"] and waited
    assert all("get ready" in run.evidence.stages_s for run in runs if run.status == "done")
    first, _, second, third = (run.instant for run in runs)
    assert first < second < third, "each began with its turn: drift is reckoned from that"
    assert statuses(run_sweep(plan(tmp_path, *cells), Policy(side_by_side=3))) == statuses(runs), "found again"
