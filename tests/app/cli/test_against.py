"""`run --against`: another step, said by a run or by the options in which it differs."""

import json
from pathlib import Path

import pytest

from stepscope.app.verbs.run import options_in, with_options
from stepscope.core.errors import InputError
from stepscope.core.processes import Change
from stepscope.core.run_directory import load_runs
from stepscope.core.samples import Interval
from stepscope.engine.workload_options import OneWorkload
from stepscope.runs.run_sets import verdict
from tests.app.cli.test_repeat import SMALL
from tests.command import stepscope


def test_options_take_the_place_of_those_that_were_said():
    said = OneWorkload({"model": "small", "seq_len": 64, "dtype": "bf16"})
    other = with_options(said, "--dtype fp32 --compile default")
    assert dict(other.options) == {"model": "small", "seq_len": 64, "dtype": "fp32", "compile": "default"}


def test_arguments_of_a_factory_are_replaced_one_by_one():
    said = OneWorkload({"module": "a.py:make", "arg": ("width=4", "depth=2")})
    assert with_options(said, "--arg width=8").options["arg"] == ("width=8", "depth=2")
    assert dict(with_options(said, "--module b.py:make").options) == {"module": "b.py:make"}


@pytest.mark.parametrize(
    "text", ["--nonsense", "--seq-len many", "--dtype", "--dtype 'fp32", "--runs elsewhere", "--help"]
)
def test_what_cannot_be_read_is_one_line(text: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(InputError, match="--against"):
        with_options(OneWorkload({}), text)


def test_a_name_is_no_options():
    assert options_in("--dtype bf16") == options_in("  --dtype bf16") == {"dtype": "bf16"}
    with pytest.raises(InputError, match="'last' is no options"):
        options_in("last")


def _change(low: float, high: float, **more: object) -> Change:
    return Change(ratio=(low * high) ** 0.5, processes=(5, 5), interval=Interval(low, high), **more)  # type: ignore[arg-type]


def test_a_verdict_says_how_sure_it_is():
    assert verdict(_change(1.02, 1.04)) == "The second is 3.0 % slower (interval +2.0 to +4.0 %)."
    assert verdict(_change(0.94, 0.96)) == "The second is 5.0 % faster (interval -6.0 to -4.0 %)."
    assert verdict(_change(0.99, 1.02, detectable=0.012)) == (
        "No difference seen, and one above 1.2 % would have been (in 9 of 10 such comparisons)."
    )
    assert "no verdict" in verdict(Change(ratio=2.0, processes=(1, 1)))
    assert "nothing to compare" in verdict(None)


@pytest.mark.long
@pytest.mark.slow
def test_two_steps_take_turns_in_each_of_two_processes(tmp_path: Path):
    done = stepscope("run", *SMALL, "--against", "--seq-len 32", "--repeat", "2", "--runs", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["changes"]["step"]["processes"] == [2, 2] and told["changes"]["step"]["paired"]
    runs, _ = load_runs([tmp_path])
    assert len(runs) == 4 and {run.beside for run in runs} == {run.id for run in runs}
    assert sorted(run.workload.seq_len or 0 for run in runs) == [16, 16, 32, 32]
    again = stepscope("run", *SMALL, "--against", runs[-1].id, "--runs", tmp_path)
    assert again.returncode == 0 and "no verdict, since processes differ" in again.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("against", "said"),
    [
        ("no-such-run", "no run named"),
        pytest.param("--dtype tf32", "dtype tf32 needs an NVIDIA GPU", marks=pytest.mark.long),
        ("--nonsense", "No such option"),
    ],
)
def test_what_cannot_be_compared_is_said(against: str, said: str, tmp_path: Path):
    done = stepscope("run", *SMALL, "--against", against, "--runs", tmp_path)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_what_is_of_one_step_alone_is_not_recorded(tmp_path: Path):
    done = stepscope("run", *SMALL, "--against", "--seq-len 32", "--record", "memory", "--runs", tmp_path)
    assert done.returncode == 2 and "--against records kineto alone" in done.stderr
