"""`stepscope tune` as its user sees it."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from stepscope.app.cli.output import sweep_progress
from stepscope.core.formulas.spelled import cell_name
from stepscope.core.study_results import TUNED_FIELDS
from stepscope.engine.sweep_plan import Cell, CellState, SweepState
from tests.command import stepscope
from tests.conftest import make_run, workload

SMALL = ("--model", "tiny", "--layers", "1", "--d-model", "32", "--heads", "2", "--seq-len", "16", "--device", "cpu")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--phase", "forward"), "tune makes a training step faster, and --phase forward asks for another"),
        (("--budget", "soon"), "--budget is 'soon': write seconds"),
        (("--budget", "0min"), "--budget is '0min': write seconds, above 0"),
        (("--keep", "colour"), "colour"),
        (("--keep", ",".join(TUNED_FIELDS)), "keep names all that tune changes: leave one out of attention, dtype"),
        (("--module", "nowhere.py:make"), "nowhere.py"),
        (("--dtype", "tf32"), "tf32 needs an NVIDIA GPU"),
    ],
)
def test_wrong_input_is_one_line(options: tuple[str, ...], said: str, tmp_path: Path):
    sizes = SMALL[-2:] if options[0] == "--module" else SMALL
    done = stepscope("tune", *sizes, *options, "--runs", tmp_path)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_without_time_it_says_what_it_would_have_tried(tmp_path: Path):
    done = stepscope("tune", *SMALL, "--budget", "0.001s", "--runs", tmp_path)
    (folder,) = tmp_path.iterdir()  # the runs of a search are not among a user's own
    assert folder.name.startswith("tune-tiny") and "no runs" in stepscope("ls", "--runs", tmp_path).stdout
    listed = stepscope("ls", "--runs", folder)
    assert "done" in listed.stdout and folder.name in done.stdout.replace("\n", "")
    assert done.returncode == 0, done.stderr
    assert "No change was raced" in done.stdout and "dtype bf16" in done.stdout
    assert done.stdout.count("not reached") >= 3 and "had to be left out" in done.stdout


def test_each_sweep_of_a_search_tells_each_of_its_cells_once(capsys: pytest.CaptureFixture[str]):
    ended = CellState(cell=Cell(workload=workload()), state="done", run=make_run(step=[1.0]))
    with sweep_progress() as tell:
        for state in (SweepState(cells=[ended], timeout_s=9.0), SweepState(cells=[ended, ended], timeout_s=9.0)):
            tell(state)
            tell(state)
    places = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert places == ["[1/1]", "[1/2]", "[2/2]"]


def test_a_race_is_labelled_with_both_of_its_steps(capsys: pytest.CaptureFixture[str]):
    first, second = workload(), workload(attention="sdpa")
    cell = Cell(workload=first, against=second)
    with sweep_progress() as tell:
        tell(SweepState(cells=[CellState(cell=cell, state="done", run=make_run(step=[1.0]))], timeout_s=9.0))
    said = capsys.readouterr().err
    assert f"{cell_name(first)} in turns with {cell_name(second)}: step" in said


@pytest.mark.long
def test_it_goes_on_where_it_stopped_and_confirms(tmp_path: Path):
    """Two real searches: the second measures nothing of what the first did."""
    words = ("tune", *SMALL, "--budget", "10min", "--keep", "compile,dtype", "--runs", tmp_path, "--json")
    first = json.loads(stepscope(*words).stdout)
    runs = set(tmp_path.rglob("*"))
    again = json.loads(stepscope(*words).stdout)
    assert set(tmp_path.rglob("*")) == runs and [t["ratio"] for t in again["tried"]] == [
        t["ratio"] for t in first["tried"]
    ]
    if first["best"] != first["baseline"]:
        assert first["confirmed"]["processes"] == [5, 5] and len(first["curves"]) == 4


def without_windows(value: Any) -> Any:
    """As runs were stored before a model had a window, a softcap or sinks."""
    if isinstance(value, dict):
        named = cast("dict[str, Any]", value)
        newer = (("window", None), ("softcap", None), ("sinks", False))
        return {key: without_windows(one) for key, one in named.items() if (key, one) not in newer}
    return [*map(without_windows, cast("list[Any]", value))] if isinstance(value, list) else value


def test_a_stored_search_is_shown_again_with_its_exit_code(tmp_path: Path):
    stored = Path("results/h200/tune/large.json")
    done = stepscope("tune", "--from", stored)
    assert done.returncode == 0 and "4.89 times as fast" in done.stdout and "23.29 GiB" in done.stdout, done.stderr
    again = without_windows(json.loads(stepscope("tune", "--from", stored, "--json").stdout))
    # Its races have no times, and none was settled by intervals that lie apart.
    older = [tried.pop(later) for tried in again["tried"] for later in ("apart", "began_s", "ended_s")]
    in_turns = {"widened": 1.0, "seemed": False}  # processes that confirm take turns, and did then, too
    assert in_turns.items() <= again["confirmed"].items()
    again["confirmed"] = {key: value for key, value in again["confirmed"].items() if key not in in_turns}
    assert again == json.loads(stored.read_text()) and not any(older)
    newer = Path("results/h200-x2/tune/small-bucketed.json")
    known = json.loads(newer.read_text())
    known["confirmed"] |= in_turns
    known["tried"] = [{**tried, "began_s": None, "ended_s": None} for tried in known["tried"]]
    assert without_windows(json.loads(stepscope("tune", "--from", newer, "--json").stdout)) == known
    refused = stepscope("tune", "--from", stored, "--budget", "9s")
    assert (refused.returncode, refused.stderr.strip()) == (
        2,
        "stepscope: --budget says nothing with --from: leave it out",
    )
    (tmp_path / "other.json").write_text('{"tables": []}')
    other = stepscope("tune", "--from", tmp_path / "other.json")
    assert other.returncode == 2 and "other.json holds no search of `stepscope tune --json`" in other.stderr
    cut = json.loads(stored.read_text()) | {"interrupted": True}
    (tmp_path / "cut.json").write_text(json.dumps(cut))
    assert stepscope("tune", "--from", tmp_path / "cut.json").returncode == 130
