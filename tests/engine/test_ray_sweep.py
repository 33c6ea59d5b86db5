"""Sweeps on a cluster of several nodes of Ray's, all on this machine: cells come home, and nodes die. Captures are read
where they lie."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.core.errors import InputError, StepscopeError
from stepscope.core.run import Run, Settings
from stepscope.core.run_directory import load_runs
from stepscope.engine.cell_process import MARK
from stepscope.engine.cluster import ranks_on
from stepscope.engine.sweep import run_sweep
from stepscope.engine.sweep_plan import Cell, Policy, SweepPlan, SweepState
from stepscope.traces.ranks import job_of, load_job
from stepscope.traces.ranks_answer import check_job, job_as_json
from tests.command import stepscope
from tests.conftest import at_length, mini
from tests.engine.test_forks import made, own  # noqa: F401  (a fixture)
from tests.engine.test_sweep import ENDLESS, QUICK, statuses, wait_for
from tests.traces.ranks.jobs import Made

pytest.importorskip("ray", reason="the extra `ray` is not installed")

pytestmark = pytest.mark.slow

SOME_TIME = Settings(warmup_floor=1, warmup_cap=1, steps_floor=3, steps_cap=10**7, seconds=0.5, profile=False)
STORE_BYTES = 80 * 2**20


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Nodes:
    """A head that measures nothing, and nodes that do."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

        self.client_port = free_port()
        head = {"num_cpus": 0, "include_dashboard": False, "ray_client_server_port": self.client_port}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args={**head, "object_store_memory": STORE_BYTES})
        self._nodes: list[Any] = []
        self.address: str = self._cluster.address

    def add(self, **resources: object) -> None:
        self._nodes.append(self._cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, **resources))

    def kill_one(self) -> None:
        """End the node that joined last, as hard as there is."""
        self._cluster.remove_node(self._nodes.pop(), allow_graceful=False)

    def have(self, number: int, **resources: object) -> None:
        """Let there be so many nodes that measure."""
        while len(self._nodes) > number:
            self.kill_one()
        while len(self._nodes) < number:
            self.add(**resources)

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def _nodes() -> Iterator[Nodes]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    nodes = Nodes()
    yield nodes
    nodes.close()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def nodes(_nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """The cluster that `auto` finds, with two nodes that measure."""
    monkeypatch.setenv("RAY_ADDRESS", _nodes.address)
    _nodes.have(2)
    return _nodes


def plan(out: Path, *lengths: int, settings: Settings = QUICK, device: str = "cpu") -> SweepPlan:
    cells = tuple(Cell(workload=mini(seq_len=n), settings=settings) for n in lengths)
    return SweepPlan(cells=cells, devices=(device,), out=str(out))


def measured_on(runs: list[Run]) -> set[str | None]:
    return {run.environment.node for run in runs if run.environment is not None}


def starting_with(place: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let the process that talks with Ray begin with this code."""
    place.mkdir()
    text = f"import sys\nif 'stepscope.engine.courier' in sys.orig_argv:\n    {code}\n"
    (place / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(place), prepend=os.pathsep)


def test_each_node_reads_the_ranks_that_it_holds(_nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each node has a home of its own, with other ranks in it; of what both see, each reads some."""
    nodes = _nodes  # to begin and to end a node takes seconds: those of this test stay for the next
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    paths = Made(ranks=4, later_ns={1: 5_000_000}).write(tmp_path / "all")
    nodes.have(0)
    for home, held in (("a", paths[::2]), ("b", paths[1::2])):
        folder = tmp_path / home / "job"
        folder.mkdir(parents=True)
        for path in held:
            (folder / path.name).write_bytes(path.read_bytes())
        nodes.add(env_vars={"HOME": str(tmp_path / home)})
    (tmp_path / "b" / "job" / "job_7.json").write_text('{"traceEvents": [{"ph": "X", ')
    apart = stepscope("trace", "~/job", "--on", "auto", "--json")
    with ranks_on("auto", str(tmp_path / "all")) as (count, replies):
        shared = [rank for _, rank in replies]
    said = r"left out: \S+/b/job/job_7.json: the JSON ends .* \(on node \S+\)"
    assert apart.returncode == 2 and re.search(said, apart.stderr), apart.stderr
    document, here = json.loads(apart.stdout), load_job(paths, say=lambda _: None)
    names = [row["source"].partition(":") for row in document["ranks"]]
    assert [name for *_, name in names] == [f"{tmp_path}/{'ab'[n % 2]}/job/job_{n}.json" for n in range(4)]
    for row, path in zip(document["ranks"], paths, strict=True):
        row["source"] = str(path)
    assert document == json.loads(json.dumps(job_as_json(here, check_job(here))))
    assert count == 4 == len(job_of(shared).ranks)
    assert len({node for node, *_ in names}) == 2 == len({rank.source.partition(":")[0] for rank in shared})


WAITS = """
import time, torch
from pathlib import Path

def make(file, number):
    while not Path(file).exists():
        time.sleep(0.05)
    return torch.nn.Linear(8, 4), torch.ones(2, 8), lambda y: y.square().mean()
"""


def test_a_node_that_is_killed_costs_its_cell_one_repetition(out: Path, nodes: Nodes, tmp_path: Path):
    """No cell can end before the sweep knows that the node died: each waits for a file that is written then."""
    (tmp_path / "waits.py").write_text(WAITS)
    died = tmp_path / "died"
    cells = tuple(made(tmp_path / "waits.py", "make", file=str(died), number=n) for n in range(4))
    asked = SweepPlan(cells=cells, devices=("cpu",), out=str(out))
    told: list[SweepState] = []
    killed: list[bool] = []

    def kill_one(state: SweepState) -> None:
        told[:] = [state]
        if not killed and sum(bool(cell.stage) for cell in state.cells) == 2:
            nodes.kill_one()
            killed.append(True)
        elif any(cell.losses for cell in state.cells):
            # Not before: a worker whose node was killed lives on for a moment, in which its cell would come home.
            died.touch()

    runs = run_sweep(asked, Policy(on="auto"), kill_one)
    (state,) = told
    assert died.exists() and statuses(runs) == ["done"] * 4
    assert [cell.losses for cell in state.cells].count(1) == 1 and sum(cell.losses for cell in state.cells) == 1
    assert len(state.faults) == 1 and "died" in state.faults[0]
    assert [msgspec.to_builtins(run.workload)["arguments"]["number"] for run in runs] == [0, 1, 2, 3]
    assert {run.id for run in load_runs([out])[0]} == {run.id for run in runs}
    assert len(measured_on(runs)) <= 2 and None not in measured_on(runs)
    assert {run.evidence.process_start for run in runs} == {"fork"}
    # The same sweep without a cluster: its results are there.
    assert [run.id for run in run_sweep(asked)] == [run.id for run in runs]


@pytest.mark.parametrize(
    ("on", "device", "says"),
    [
        ("host", "cpu", "write ray://HOST"),
        ("ray://", "cpu", "write ray://HOST"),
        ("ray://host:port", "cpu", "write ray://HOST"),
        ("auto", "cuda:0,cuda:1", "with --on write auto, cpu or cuda"),
        ("ray://127.0.0.1:1", "cpu", "no Ray cluster answers at ray://127.0.0.1:1: .*refused"),
        ("auto", "cuda", "no node of the Ray cluster .* has a GPU: none of [3-9] .*--num-gpus N"),
    ],
)
def test_a_cluster_that_cannot_be_meant_is_one_line(out: Path, nodes: Nodes, on: str, device: str, says: str):
    asked = SweepPlan(cells=plan(out, 8).cells, devices=tuple(device.split(",")), out=str(out))
    with pytest.raises(InputError, match=says) as caught:
        run_sweep(asked, Policy(on=on))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import ray; ray.__version__ = '2.40.0'", r"has another Python or Ray than this command: .*2\.40\.0"),
        ("sys.modules['ray'] = None", r"--on needs Ray, which is not there .*: pip install 'stepscope\[ray\]'"),
        *at_length(("import os; os.abort()", "the connection to the Ray cluster .* was lost")),
        *at_length(("import time; time.sleep(600)", "does not answer within 3 s")),
    ],
    ids=["version", "none", "aborts", "hangs"],
)
def test_what_cannot_connect_is_one_line(
    out: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch, code: str, says: str
):
    monkeypatch.setattr("stepscope.engine.cluster._START_S", 3.0 if "sleep" in code else 60.0)
    starting_with(out.with_name("site"), monkeypatch, code)
    with pytest.raises(StepscopeError, match=says) as caught:
        run_sweep(plan(out, 8), Policy(on="auto"))
    assert "\n" not in str(caught.value) and not load_runs([out])[0]


@pytest.mark.long
def test_a_node_without_stepscope_is_named(out: Path, nodes: Nodes, tmp_path: Path):
    (tmp_path / "stepscope").mkdir()
    (tmp_path / "stepscope" / "__init__.py").write_text("raise ImportError('not here')\n")
    nodes.add(env_vars={"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"})
    try:
        with pytest.raises(InputError, match=r"node \S+ has no stepscope in .*: ImportError: not here; install"):
            run_sweep(plan(out, 8), Policy(on="auto"))
    finally:
        nodes.kill_one()


SEES = """
import os, time, torch
from pathlib import Path

def make(number):
    Path(__file__).with_name(f"seen-{number}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    return torch.nn.Linear(8, 4), torch.ones(2, 8), lambda y: y.square().mean()
"""


@pytest.mark.long
def test_each_gpu_of_a_node_measures_one_cell_at_a_time(out: Path, nodes: Nodes, tmp_path: Path):
    """Ray takes a node's word that it has GPUs; a cell there sees the one that is its own."""
    nodes.add(num_gpus=2)
    (tmp_path / "mine.py").write_text(SEES)
    seen: set[int] = set()

    def count(state: SweepState) -> None:
        seen.add(sum(cell.state == "measuring" for cell in state.cells))

    try:
        cells = tuple(made(tmp_path / "mine.py", "make", SOME_TIME, number=n) for n in range(3))
        runs = run_sweep(SweepPlan(cells=cells, out=str(out)), Policy(on="auto"), count)
    finally:
        nodes.kill_one()
    assert statuses(runs) == ["done"] * 3 and len(measured_on(runs)) == 1 and max(seen) == 2
    assert {file.read_text() for file in tmp_path.glob("seen-*")} == {"0", "1"}


@pytest.mark.long
def test_a_cluster_is_reached_from_outside(out: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS")
    runs = run_sweep(plan(out, 8, 10, 12), Policy(on=f"ray://127.0.0.1:{nodes.client_port}"))
    assert statuses(runs) == ["done"] * 3 and None not in measured_on(runs)


@pytest.mark.long
def test_time_limits_and_the_ends_of_cells_are_those_of_a_local_sweep(out: Path, nodes: Nodes, own: Path):  # noqa: F811
    cells = (Cell(workload=mini(), settings=ENDLESS), Cell(workload=mini(dtype="tf32"), settings=QUICK),
             made(own, "plain"), made(own, "crashes"))  # fmt: skip
    asked = SweepPlan(cells=cells, devices=("cpu",), out=str(out))
    runs = run_sweep(asked, Policy(on="auto", timeout_s=12.0))
    assert statuses(runs) == ["timed-out", "failed", "done", "killed"]
    told = [run.failure.message for run in runs if run.failure is not None]
    assert told[0] == "no end after 12 s" and "tf32 needs an NVIDIA GPU" in told[1] and "SIGSEGV" in told[2]
    assert runs[0].environment is not None and runs[0].environment.node is not None


@pytest.mark.long
def test_a_worker_that_dies_costs_its_cell_one_repetition_too(out: Path, nodes: Nodes):
    killed: list[int] = []

    def kill_worker(state: SweepState) -> None:
        states[:] = [state]
        if not killed and any(cell.stage == "measure" for cell in state.cells):
            killed.extend(int(Path(f"/proc/{pid}/stat").read_text().split()[3]) for pid in cells_of(asked)[:1])
            os.kill(killed[0], signal.SIGKILL)

    nodes.have(1)
    asked = plan(out, 8, 10, settings=SOME_TIME)
    states: list[SweepState] = []
    runs = run_sweep(asked, Policy(on="auto", start="exec"), kill_worker)
    assert statuses(runs) == ["done"] * 2 and killed and sum(cell.losses for cell in states[-1].cells) == 1


def cells_of(asked: SweepPlan) -> list[int]:
    """The processes of this sweep's cells on all nodes, and what forks them."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"\0{MARK}={asked.key}-".encode() in b"\0" + (process / "environ").read_bytes():
                found.append(int(process.name))
    return [pid for pid in found if b"engine.courier" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


SWEEP = """
import sys
from pathlib import Path
import msgspec
from stepscope.core import interrupts
from stepscope.engine.sweep_plan import Policy, SweepPlan
from stepscope.engine.sweep import run_sweep
interrupts.install(even_if_ignored=True)
run_sweep(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=SweepPlan), Policy(on="auto"))
"""


def started(asked: SweepPlan, place: Path) -> subprocess.Popen[str]:
    """A sweep of this plan in a process of its own."""
    (place / "plan.json").write_bytes(msgspec.json.encode(asked))
    return subprocess.Popen([sys.executable, "-c", SWEEP, str(place / "plan.json")], text=True)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_that_is_ended_leaves_nothing_running(out: Path, nodes: Nodes, tmp_path: Path, number: int):
    endless = msgspec.structs.replace(ENDLESS, seconds=0.0)  # JSON makes a float of it, which another key is made of
    asked = plan(out, 8, 10, 12, settings=endless)
    sweep = started(asked, tmp_path)
    try:
        wait_for(lambda: len(cells_of(asked)) == 4)  # two cells, and what forks each
        time.sleep(8.0)  # nothing tells from outside that they are measuring; the assertion below does
    finally:
        sweep.send_signal(number)
        code = sweep.wait(timeout=30)
    wait_for(lambda: not cells_of(asked), seconds=20)
    runs = load_runs([out])[0]
    if number == signal.SIGINT:
        assert code == 1 and statuses(runs) == ["interrupted"] * 2
        assert all("step" in run.samples and run.samples["step"].count for run in runs)
    else:
        assert code == -signal.SIGKILL and not runs
