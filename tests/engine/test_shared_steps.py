"""A step that several ranks share, measured by real processes that talk over gloo."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from stepscope.core.errors import InputError
from stepscope.core.evidence import Correctness, RanksEvidence
from stepscope.core.formulas.transformer import parameter_count
from stepscope.core.model_config import configure
from stepscope.core.run import Run, Settings
from stepscope.core.run_directory import load_run
from stepscope.core.workloads import TextbookWorkload
from stepscope.engine.cell_process import MARK
from stepscope.engine.draft import Draft
from stepscope.engine.request import StepRequest
from stepscope.engine.stages import check_the_ranks
from stepscope.engine.step import directory_of
from stepscope.training.parallel import correctness
from tests.command import stepscope
from tests.training.parallel.ranks import Here, on_ranks

RUN = ("run", "--model", "tiny", "--layers", "1", "--seq-len", "16", "--device", "cpu", "--parallel", "ddp")
QUICK = ("--warmup", "1", "--steps", "3")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path, str]:
    """A run of two ranks with traces, its directory, and what the command showed."""
    out = tmp_path_factory.mktemp("shared")
    done = stepscope(*RUN, "--ranks", 2, *QUICK, "--record", "kineto", "--runs", out)
    assert done.returncode == 0, done.stderr + done.stdout
    (file,) = out.glob("*/run.json")
    return load_run(file), file.parent, done.stdout


def shared(run: Run) -> RanksEvidence:
    assert run.shared is not None
    return run.shared


def test_a_run_holds_every_rank(measured: tuple[Run, Path, str]):
    run, _, said = measured
    found = shared(run)
    assert (run.status, run.workload.ranks, found.backend, found.one_host) == ("done", 2, "gloo", True)
    assert [figures.rank for figures in found.ranks] == [0, 1]
    assert {figures.samples["step"].count for figures in found.ranks} == {3}
    for step, *own in zip(
        run.samples["step"].values_s, *(f.samples["step"].values_s for f in found.ranks), strict=True
    ):
        assert step >= max(own)
    assert found.start_s is not None and 0 < found.start_s < 60
    assert "2 ranks on 1 host share each step by ddp over gloo" in said


def test_ranks_keep_the_model_and_the_optimizer_s_state(measured: tuple[Run, Path, str]):
    run = measured[0]
    assert run.workload.sizes is not None
    parameters = 4 * parameter_count(run.workload.sizes)
    for figures in shared(run).ranks:
        assert figures.parameter_bytes == parameters
        assert figures.optimizer_bytes is not None
        assert 2 * parameters <= figures.optimizer_bytes <= 2 * parameters + 4096  # and a step count each


def test_what_ranks_send_is_counted_beside_the_formula(measured: tuple[Run, Path, str]):
    run, _, said = measured
    found = shared(run)
    assert run.workload.sizes is not None
    parameters = 4 * parameter_count(run.workload.sizes)
    assert (found.whole_parameter_bytes, found.whole_gradient_bytes) == (parameters, parameters)
    for figures in found.ranks:
        told = figures.communication
        assert told is not None and told.calls is not None
        # Two ranks: an all-reduce sends as much as the gradients are. What the C++ of DDP calls in backward is seen.
        assert sum(call.sent_bytes for call in told.calls if call.kind == "all-reduce") == parameters
        assert {call.phase for call in told.calls if call.kind == "all-reduce"} == {"backward"}
        assert told.communication_s and told.exposed_s is not None and told.exposed_s <= told.communication_s
    # It also sends the buffers of the first rank in forward.
    assert run.summary["sent_bytes_by_formula"] == parameters
    assert run.summary["sent_bytes"] == pytest.approx(parameters, rel=0.01)
    assert "communication of a step" in said and "collectives of rank 0" in said


def test_traces_of_all_ranks_are_read_together(measured: tuple[Run, Path, str]):
    run, directory, _ = measured
    assert run.artifacts["kineto-rank-1"] == "rank-1/trace.kineto.json.gz"
    done = stepscope("trace", directory, "--json")
    assert done.returncode == 0, done.stderr
    assert [rank["rank"] for rank in json.loads(done.stdout)["ranks"]] == [0, 1]


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes of the ranks that this command started, in the order of their marks, which are numbered."""
    found: dict[str, int] = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            variables = (place / "environ").read_bytes().split(b"\0")
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        mark = next((v.decode() for v in variables if v.startswith(f"{MARK}=".encode())), "")
        if parent == process.pid and mark.endswith("."):
            found[mark] = int(place.name)
    return [found[mark] for mark in sorted(found)]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the ranks in /proc")
def test_a_rank_that_is_killed_ends_all_and_is_named(tmp_path: Path):
    command = [sys.executable, "-m", "stepscope", *RUN, "--ranks", "2", "--seconds", "600", "--runs", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("*/run.json")) and time.monotonic() < deadline:
            time.sleep(0.1)
        _, second = ranks_of(process)
        os.kill(second, signal.SIGKILL)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 3 and "rank 1 was killed by SIGKILL during" in said
    assert not ranks_of(process)
    (run,) = (load_run(file) for file in tmp_path.glob("*/run.json"))
    assert run.status == "killed" and run.failure is not None and run.failure.message.startswith("rank 1 was killed")


DIES = """import os, signal, torch
def make(dies=0):
    if dies and torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.Linear(8, 4), torch.ones(2, 8), lambda y: y.square().mean()
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="forks only where the system has pidfd_open")
def test_ranks_of_a_sweep_are_forked_and_one_that_is_killed_ends_its_own_cell(tmp_path: Path):
    (tmp_path / "own.py").write_text(DIES)
    done = stepscope(
        "sweep", "--module", f"{tmp_path / 'own.py'}:make", "--arg", "dies=1,0", "--device", "cpu", *QUICK,
        "--parallel", "ddp-flat,fsdp2", "--ranks", 2, "--runs", tmp_path / "runs",
    )  # fmt: skip
    assert done.returncode == 3 and "Traceback" not in done.stderr, done.stderr
    runs = [load_run(file) for file in (tmp_path / "runs").glob("*/run.json")]
    assert sorted(run.status for run in runs) == ["done", "done", "killed", "killed"]
    for run in runs:
        if run.status == "killed":
            assert run.failure is not None and run.failure.message.startswith("rank 1 was killed by SIGKILL")
        else:
            assert run.evidence.process_start == "fork" and run.shared is not None
            assert run.shared.correct is not None and run.shared.correct.passed and len(run.shared.ranks) == 2


RIGHT = Correctness(
    gradient_error=0, gradient_spread=0, gradient_allowed=1, update_error=0, update_spread=0, update_allowed=1,
    worst="norm.weight", steps=5,
)  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "checked"),
    [
        ({"checkpointing": "selective-8"}, "selective-1"), ({"checkpointing": "offload-8"}, "offload-1"),
        ({"checkpointing": "offload-12"}, "offload-2"), ({"checkpointing": "every-4"}, "every-2"),
        ({"checkpointing": "attention", "accumulation": 2}, "attention"), ({"checkpointing": "none"}, "none"),
        ({"checkpointing": "selective", "parallel": "pipeline", "accumulation": 4}, "selective"),
    ],
)  # fmt: skip
def test_a_small_step_of_the_same_choices_is_checked(
    asked: dict[str, Any], checked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[TextbookWorkload] = []

    def check(name: str, make: object, choices: TextbookWorkload, *_: object) -> Correctness:
        seen.append(choices)
        return RIGHT

    monkeypatch.setattr(correctness, "check_ranks", check)
    choices = {"parallel": "ddp", "ranks": 2, "attention": "sdpa", **asked}
    workload = TextbookWorkload(model=configure("small"), batch_size=8, seq_len=16, **choices)
    check_the_ranks(Draft(StepRequest(workload=workload), torch.device("cpu"), tmp_path, lambda _: None, None))
    (small,) = seen
    assert small.model.layers == 2 < workload.model.layers
    assert (small.checkpointing, small.accumulation) == (checked, workload.accumulation)


@pytest.mark.parametrize(
    ("asked", "sequences"),
    [
        ({}, 8), ({"accumulation": 3}, 24), ({"parallel": "pipeline"}, 32), ({"batch_size": 8}, None),
        ({"parallel": "fsdp2-tensor"}, 8), ({"parallel": "pipeline:schedule=interleaved"}, None),
    ],
)  # fmt: skip
def test_two_sequences_of_each_rank_and_micro_batch_are_checked(
    asked: dict[str, Any], sequences: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: list[TextbookWorkload] = []

    def check(name: str, make: object, choices: TextbookWorkload, *_: object) -> Correctness:
        seen.append(choices)
        return RIGHT

    monkeypatch.setattr(correctness, "check_ranks", check)
    choices: dict[str, Any] = {"parallel": "ddp", "batch_size": 48, **asked}
    workload = TextbookWorkload(model=configure("small"), seq_len=16, ranks=4, **choices)
    draft = Draft(StepRequest(workload=workload), torch.device("cpu"), tmp_path, lambda _: None, None)
    check_the_ranks(draft)
    assert seen[0].batch_size == (sequences or workload.batch_size)
    assert draft.correct is not None and draft.correct.batch_size == sequences


def refusals(rank: int, ranks: int) -> list[str]:
    """What a rank is told where some rank cannot write, or is asked for something else."""
    found: list[str] = []
    root = Path(os.environ["REFUSALS"])
    for place in ("file/runs", "taken", "other"):
        request = StepRequest(
            workload=TextbookWorkload(model=configure("tiny"), parallel="ddp", ranks=2), out=str(root / place)
        )
        if place == "other" and rank:
            request = msgspec.structs.replace(request, settings=Settings(steps_floor=1))
        try:
            where = directory_of(request, Taken(rank, ranks) if place == "taken" else Here(rank, ranks))
            found.append(where.name)
        except InputError as error:
            found.append(str(error).replace(str(root), ""))
    return found


class Taken(Here):
    """Ranks of which the second finds a file in the place of its folder."""

    def broadcast(self, value: Any) -> Any:
        told = super().broadcast(value)
        if self.rank:
            (told[0] / "rank-1").write_text("")
        return told


def test_all_ranks_refuse_what_one_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REFUSALS", str(tmp_path))
    (tmp_path / "file").write_text("")
    first, second = on_ranks(2, refusals)
    assert first == second
    for said, wanted in zip(
        first,
        ("cannot write runs to /file/runs", "rank 1 cannot write to /taken/", "rank 1 is asked for another step"),
        strict=True,
    ):
        assert said.startswith(wanted) and "\n" not in said
    assert not list(tmp_path.glob("*/*/"))  # no run is left


@pytest.mark.long
def test_a_job_that_torchrun_started_is_joined(tmp_path: Path):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "stepscope", *RUN, *QUICK,
        "--json", "--runs", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)  # the first rank alone shows it
    assert len(document["shared"]["ranks"]) == 2 and not document["shared"]["started_here"]
    assert len(list(tmp_path.glob("*/run.json"))) == 1


OWN = """import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self, unused):
        super().__init__()
        self.inner, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.inner.weight
        self.register_buffer("scale", torch.ones(16))
        self.branch = nn.Linear(16, 16) if unused else nn.Identity()

    def forward(self, tokens):
        found = self.head(self.inner(tokens) * self.scale)
        return nn.functional.cross_entropy(found.flatten(0, 1), tokens.flatten())

def make(unused=0): return Tied(unused), torch.randint(50, (8, 16))
"""


@pytest.mark.long
def test_a_module_of_your_own_is_counted_whole(tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    of = ("run", "--module", f"{tmp_path / 'own.py'}:make", "--device", "cpu", *QUICK, "--runs", tmp_path, "--json")
    runs: list[dict[str, Any]] = []
    for options in ((), ("--parallel", "fsdp2:reshard=no", "--ranks", 2)):
        done = stepscope(*of, *options)
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout))
    assert runs[0]["workload"]["model"]["inputs"] == runs[1]["workload"]["model"]["inputs"]
    flops = [sum(work["flops"] for work in run["work"].values()) for run in runs]
    assert flops[0] == flops[1] == 6 * 8 * 16 * 16 * 50


@pytest.mark.long
@pytest.mark.parametrize(
    ("parallel", "said"),
    [("ddp", "say --parallel ddp:unused=yes"), ("pipeline", "knows the textbook's model alone: choose ddp or fsdp2")],
)
def test_what_every_rank_refuses_is_said_once(parallel: str, said: str, tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    done = stepscope(
        "run", "--module", f"{tmp_path / 'own.py'}:make", "--arg", "unused=1", "--device", "cpu", *QUICK, "--ranks", 2,
        "--parallel", parallel, "--runs", tmp_path,
    )  # fmt: skip
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ranks", "2", "--parallel", "none"), "say --parallel"),
        (("--ranks", "2", "--phase", "forward"), "leave out --phase forward"),
        (("--parallel", "dpp"), "unknown parallel 'dpp'"),
        (("--ranks", "0"), "ranks"),
        (("--ranks", "2", "--parallel", "context", "--attention", "sdpa"), "--parallel context runs on nccl, and this"),
    ],
)
def test_what_cannot_be_shared_is_one_line(options: tuple[str, ...], said: str, tmp_path: Path):
    done = stepscope(*RUN, *options, "--runs", tmp_path)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
    assert not [place for place in tmp_path.iterdir() if place.is_dir()]


def test_a_job_that_does_not_say_where_its_ranks_meet_is_one_line(tmp_path: Path):
    done = stepscope(*RUN, "--runs", tmp_path, SLURM_PROCID="1", SLURM_NTASKS="2")
    assert done.returncode == 2 and "no MASTER_ADDR and no MASTER_PORT" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (RUN[:9], "each would measure a step of its own: say --parallel"),
        (
            ("sweep", *RUN[1:9], "--parallel", "none,ddp"),
            "each would measure all cells: a sweep starts its ranks itself",
        ),
    ],
)
def test_several_processes_that_share_nothing_are_refused(words: tuple[str, ...], said: str, tmp_path: Path):
    done = stepscope(*words, "--runs", tmp_path, RANK="1", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["ddp-bucketed", "zero1", "fsdp-textbook", "ddp", "fsdp2", "tensor"])
def test_a_rank_on_a_gpu_talks_over_nccl(strategy: str, tmp_path: Path):
    options = ("--parallel", strategy, "--ranks", 1, "--device", "cuda", "--dtype", "bf16")
    done = stepscope(*RUN[:7], *options, *QUICK, "--runs", tmp_path)
    assert done.returncode in (0, 1), done.stderr  # so short a step may be doubted
    (run,) = (load_run(file) for file in tmp_path.glob("*/run.json"))
    assert run.status == "done" and shared(run).backend == "nccl"
    verdict = shared(run).correct
    assert verdict is not None and verdict.passed


@pytest.mark.multigpu
@pytest.mark.parametrize(
    "strategy",
    ["ddp-naive", "ddp-bucketed", "zero1", "fsdp-textbook", "ddp", "fsdp2", "tensor", "context-textbook", "context"],
)
def test_two_ranks_on_two_gpus(strategy: str, tmp_path: Path):
    options = ("--parallel", strategy, "--ranks", 2, "--device", "cuda", "--dtype", "bf16", "--attention", "sdpa")
    done = stepscope("run", "--model", "small", "--layers", 4, "--seq-len", 256, *options, "--record", "kineto",
                     "--seconds", 1, "--runs", tmp_path)  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    (run,) = (load_run(file) for file in tmp_path.glob("*/run.json"))
    assert run.status == "done" and len({figures.device_name for figures in shared(run).ranks}) == 1
    verdict = shared(run).correct
    assert verdict is not None and verdict.passed
