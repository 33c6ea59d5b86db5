"""`stepscope study collectives`, with two real ranks over gloo."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
import torch

from stepscope.core.errors import StepscopeError
from stepscope.core.study_results import CollectiveFits
from stepscope.questions import collectives
from stepscope.recording.environment import read_environment
from stepscope.training.parallel import launching
from stepscope.training.parallel.collective_times import OneTime, RankTimes
from tests.command import stepscope


def test_two_ranks_time_every_collective(tmp_path: Path):
    asked = ("study", "collectives", "--ranks", 2, "--backend", "gloo", "--sizes", "1KiB,10kB", "--seconds", 0)
    done = stepscope(*asked, "--json", STEPSCOPE_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    times = next(table for table in answer["tables"] if table["title"] == "Times")
    assert len(times["rows"]) == 12
    for _, backend, ranks, size, seconds, algorithm, bus, share, samples in times["rows"]:
        assert (backend, ranks, share, samples) == ("gloo", 2, None, 5)
        assert size in (1024, 10000) and seconds > 0
        assert abs(algorithm - size / seconds) < 1e-6 * algorithm and bus in (algorithm, algorithm / 2)
    (kept,) = tmp_path.glob("collectives-*.json")
    assert len(msgspec.json.decode(kept.read_bytes(), type=CollectiveFits).fits) == 6

    stored = tmp_path / "answer.json"
    stored.write_text(done.stdout)
    again = stepscope("study", "collectives", "--from", stored, "--only", "latency")
    assert again.returncode == 0 and "reduce-scatter" in again.stdout


def test_what_was_timed_until_ctrl_c_is_shown(tmp_path: Path):
    asked = ("study", "collectives", "--ranks", "2", "--backend", "gloo", "--sizes", "1KiB,2KiB", "--seconds", "1")
    environment = {**os.environ, "STEPSCOPE_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "stepscope", *asked, "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:  # fmt: skip
        assert process.stderr is not None
        while "all-gather of 2.00" not in (line := process.stderr.readline()):
            assert line, "the study ended before it was interrupted"
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=60)
    answer = json.loads(shown)
    assert process.returncode == 130 and answer["findings"][0]["kind"] == "interrupted"
    times = next(table for table in answer["tables"] if table["title"] == "Times")
    # The second rank may not have told of its third time yet.
    assert [row[0] for row in times["rows"]] in (["all-reduce"] * 2, ["all-reduce"] * 2 + ["all-gather"])
    assert not list(tmp_path.iterdir())  # fits of a part are not kept for other commands


def test_what_was_timed_before_a_rank_died_is_shown(monkeypatch: pytest.MonkeyPatch):
    one = OneTime(kind="all-reduce", message_bytes=1024, calls=1, spans_ns=((0, 5), (9, 15)), clock="perf")
    part = msgspec.json.encode(RankTimes(host="here", environment=read_environment(torch.device("cpu")), times=(one,)))

    def launch(*_: object, ranks: int, keep: Callable[[int, bytes], object], **__: object) -> NoReturn:
        for number in (0, 1, 1) if ranks == 2 else (0,):
            keep(number, part)
        raise StepscopeError("rank 0 died")

    monkeypatch.setattr(launching, "launch", launch)
    found = collectives.study_collectives(
        lambda _name, _share: None, ranks=(2, 2, 3), sizes=(1024,), backends=("gloo",)
    )
    assert found.findings[0].kind == "ended-early" and "since rank 0 died" in found.findings[0].sentence
    assert len(found.tables[0].rows) == 1  # of the second rank's second time, the first has none
    with pytest.raises(StepscopeError, match="rank 0 died"):
        collectives.study_collectives(lambda _name, _share: None, ranks=(3,), sizes=(1024,), backends=("gloo",))


UNLIKE = """
import os, runpy, sys
sys.argv = ["stepscope", "study", "collectives", "--seconds", "0", "--sizes", os.environ["RANK"] + "1KiB"]
runpy.run_module("stepscope", run_name="__main__")
"""


@pytest.mark.long
def test_ranks_of_a_job_that_are_asked_unlike_things_say_so(tmp_path: Path):
    (tmp_path / "unlike.py").write_text(UNLIKE)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "unlike.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode and not done.stdout and "[rank1]: Traceback" not in done.stderr
    assert "stepscope: rank 1 is asked for something else than rank 0: give all the same options" in done.stderr


def test_what_cannot_be_is_one_line():
    for options, said in (
        (("--ranks", "1"), "--ranks"),
        (("--backend", "mpi"), "mpi"),
        (("--sizes", "1KiB", "--largest", "1MiB"), "leave one out"),
        (("--largest", "10"), "sizes begin at 1 KiB"),
        (("--backend", "nccl", "--ranks", "999"), "cuda"),
        (("--backend", "gloo,nccl", "--ranks", "99"), "GPU"),  # before the ranks over gloo are timed
        (("--backend", "gloo", "--ranks", "2,1000000"), "has memory for"),
    ):
        done = stepscope("study", "collectives", *options)
        assert (done.returncode, done.stdout) == (2, ""), options
        assert said in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
