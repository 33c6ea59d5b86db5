"""`--repeat`: one step measured in several processes, each started afresh."""

import json
from pathlib import Path

import pytest

from stepscope.core.run import Settings
from stepscope.core.run_directory import load_runs
from stepscope.engine.sweep_plan import Cell, SweepPlan, order_cells, repeated
from tests.command import stepscope
from tests.conftest import mini

SMALL = (
    "--model", "tiny", "--layers", "1", "--d-model", "32", "--heads", "2", "--seq-len", "16", "--steps", "3",
    "--warmup", "1", "--no-profile", "--device", "cpu",
)  # fmt: skip


def test_one_time_is_the_cell_itself_and_its_sweep_keeps_its_key():
    cells = [Cell(workload=mini(), settings=Settings())]
    assert repeated(cells, 1) == cells
    several = SweepPlan(cells=tuple(repeated(cells, 3)))
    assert SweepPlan(cells=tuple(cells)).key != several.key == SweepPlan(cells=tuple(repeated(cells, 3))).key
    assert several.key != SweepPlan(cells=tuple(repeated(cells, 3, begun="another time"))).key


def test_processes_go_in_rounds_and_each_set_is_one_cells():
    cells = [Cell(workload=mini(seq_len=length)) for length in (32, 16)]
    ordered = order_cells(repeated(cells, 2))
    assert [(cell.repeat.number if cell.repeat else 0, cell.workload.seq_len) for cell in ordered] == [
        (1, 16), (1, 32), (2, 16), (2, 32),
    ]  # fmt: skip
    sets = {cell.workload.seq_len: cell.repeat.set for cell in ordered if cell.repeat}
    assert len(set(sets.values())) == 2


@pytest.mark.long
@pytest.mark.slow
def test_a_run_in_two_processes(tmp_path: Path):
    done = stepscope("run", *SMALL, "--repeat", "2", "--runs", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    runs, faults = load_runs([tmp_path])
    assert not faults and len(runs) == 2 == told["measured"] == told["asked"]
    assert {run.repeat.number for run in runs if run.repeat} == {1, 2}
    assert {run.repeat.set for run in runs if run.repeat} == {told["set"]}
    assert len(told["parts"]["step"]["medians_s"]) == 2 and told["parts"]["step"]["low_s"] is None
    shown = stepscope("show", told["set"], "--runs", tmp_path, "--json")
    assert json.loads(shown.stdout)["parts"] == told["parts"]
    again = stepscope("run", *SMALL, "--repeat", "2", "--runs", tmp_path)
    assert again.returncode == 0 and "2 processes, each started afresh" in again.stdout
    assert "do not tell how much processes differ" in again.stdout
    assert len(load_runs([tmp_path])[0]) == 4, "the same command measures anew"


@pytest.mark.slow
@pytest.mark.long
def test_a_sweep_of_two_cells_twice_is_taken_up_where_it_stopped(tmp_path: Path):
    asked = ("sweep", *SMALL[:8], "--seq-len", "8,16", *SMALL[10:], "--repeat", "2", "--runs", tmp_path)
    done = stepscope(*asked)
    assert done.returncode == 0, done.stderr
    first, _ = load_runs([tmp_path])
    assert [run.workload.seq_len for run in first] == [8, 16, 8, 16]
    directory = tmp_path / first[2].id
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()
    again = stepscope(*asked)
    assert again.returncode == 0 and again.stderr.count("(already measured)") == 3
    runs, _ = load_runs([tmp_path])
    assert {run.id for run in first} - {run.id for run in runs} == {first[2].id} and len(runs) == 4


@pytest.mark.parametrize(("times", "said"), [("0", "--repeat"), ("two", "--repeat")])
def test_what_is_no_number_of_processes_is_one_line(times: str, said: str, tmp_path: Path):
    done = stepscope("run", "--repeat", times, "--runs", tmp_path)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
