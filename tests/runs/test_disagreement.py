"""Runs of one experiment that disagree are said, with both figures, both names and what differs between them."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.core.environment import GpuReading
from stepscope.core.run import Run, Settings
from stepscope.core.run_directory import find_run_files, load_run
from stepscope.questions.compare import folders_apart
from stepscope.questions.comparison import ComparedRun, Pair, compare_runs, replaced_runs, same_part
from stepscope.questions.speed import TimedCell, pair_up
from stepscope.rendering.writeup import Material
from stepscope.runs.fields import conditions_in
from stepscope.runs.run_sets import conditions_apart, disagreeing, disagreement
from stepscope.runs.tables import TableQuery, build_table, select_runs
from tests.conftest import make_run, mini

RESULTS = Path(__file__).parents[2] / "results"
STEPS = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0, 1.0]


def run(name: str, factor: float, day: int = 1, of: Any = None, **environment: Any) -> Run:
    """A run whose step takes so many seconds, on this day."""
    made = make_run(of or mini(), forward=[factor * step / 4 for step in STEPS], step=[factor * s for s in STEPS])
    assert made.environment is not None
    return msgspec.structs.replace(
        made, id=name, created=f"2026-01-{day:02}T00:00:00+00:00",
        environment=msgspec.structs.replace(made.environment, **environment),
    )  # fmt: skip


def test_the_sentence_has_both_figures_both_names_and_the_conditions():
    slow = run("first", 2.0, git_commit="a" * 40, driver="550.1", before=GpuReading(power_limit_w=700.0))
    fast = msgspec.structs.replace(
        run("second", 1.0, 2, git_commit="b" * 40, driver="560.2", before=GpuReading(power_limit_w=350.0)),
        settings=Settings(seconds=1.0),
    )
    found = disagreement(fast, [slow, run("third", 1.01)])
    assert found is not None and found.ratio.value == pytest.approx(2.0)
    for part in (
        "step takes 1 s in second, and 2 s in first, 2.00 times as long", "driver (560.2 and 550.1)",
        "stepscope's commit (bbbbbbbbbb and aaaaaaaaaa)", "the power limit (350 W and 700 W)",
        "settings (seconds 1.0 and 5.0)", "the day (2026-01-02, and 2026-01-01)",
    ):  # fmt: skip
        assert part in found.sentence, found.sentence
    (finding,) = disagreeing([None, found])
    assert (finding.kind, finding.severity) == ("runs-disagree", "warning") and finding.evidence["cells"] == 1


@pytest.mark.parametrize(("factor", "apart"), [(1.0, False), (1.04, False), (1.2, True), (0.8, True)])
def test_runs_disagree_only_by_more_than_processes_differ(factor: float, apart: bool):
    assert (disagreement(run("a", 1.0), [run("b", factor)]) is not None) == apart


def test_a_run_that_did_not_end_shows_no_figure_that_another_could_disagree_with():
    one, other = run("first", 1.0), run("second", 2.0)
    failed = msgspec.structs.replace(other, status="failed")
    assert disagreement(one, [other]) and not disagreement(failed, [one]) and not disagreement(one, [failed])


def test_runs_whose_intervals_allow_it_do_not_disagree():
    wide = make_run(step=[1.0, 3.0, 0.9, 2.9, 1.1, 3.1, 1.0, 3.0, 1.0, 3.0])
    assert disagreement(wide, [make_run(step=[1.3, 2.6, 1.2, 2.7, 1.3, 2.8, 1.2, 2.6, 1.3, 2.7])]) is None
    assert list(disagreeing([None])) == [] and list(conditions_apart(wide, wide)) == []


def test_a_table_that_shows_one_of_several_says_so():
    runs = [run("old", 2.0), run("new", 1.0, 2, git_commit="c" * 40)]
    _, notes = select_runs(runs, TableQuery(rows=("model",)))
    assert notes[0] == "1 older run of the same cells left out." and "1 s in new, and 2 s in old" in notes[1]
    assert any("disagree beyond" in line.text for line in build_table(runs, TableQuery(rows=("model",))).notes)
    same = [run("old", 1.0), run("new", 1.0, 2)]
    assert len(select_runs(same, TableQuery(rows=("model",)))[1]) == 1
    assert not any("disagree" in note for note in select_runs(runs, TableQuery(rows=("model",), values=("steps",)))[1])


class Cell(ComparedRun):
    FIELD, BASELINE = "dtype", "fp32"


def test_a_study_says_what_the_runs_that_it_leaves_out_say():
    bf16 = mini(dtype="bf16")
    cells = [Cell(run=one) for one in (run("base", 1.0), run("old", 0.2, 1, bf16), run("new", 0.9, 2, bf16))]
    found = compare_runs(cells, Pair, order=lambda cell: cell.run.created)
    kinds = [finding.kind for finding in replaced_runs(found)]
    assert kinds == ["several-runs", "runs-disagree"]
    assert found.disagreements[0].shown.id != "old" and found.disagreements[0].other.id == "old"
    assert not compare_runs(cells[::2], Pair, order=lambda cell: cell.run.created).disagreements


def test_two_stored_folders_of_which_one_says_twice_what_the_other_does():
    """2.36 and 1.19 times as fast in bf16: the host of the slower one took twice as long to issue the step."""
    runs = [load_run(file) for name in ("plain", "precision-speed") for file in find_run_files(RESULTS / "h200" / name)]
    small = [one for one in runs if one.workload.name == "small" and one.workload.seq_len == 512]
    for phase, ratio in (("train", 2.36), ("forward-backward", 1.19)):
        cells = [TimedCell(run=one) for one in small if one.workload.phase == phase]
        speeds = {pair.other.value: pair.speed_up.value for pair in pair_up(cells, ("fp32", "bf16")).pairs}
        assert speeds["bf16"] == pytest.approx(ratio, abs=5e-3)
    study = pair_up([TimedCell(run=one) for one in small], ("fp32", "bf16"))
    (found,) = (one for one in replaced_runs(study) if one.kind == "runs-disagree")
    assert "forward-backward takes 46.65 ms" in found.sentence and "23.3 ms" in found.sentence
    assert "the time in which the host issues the step (46.68 ms and 24.77 ms)" in found.sentence
    material = Material(runs=tuple((one, RESULTS / one.workload.phase / one.id) for one in small))
    assert any("46.65 ms" in doubt for doubt in folders_apart(material.runs))


def test_backward_is_the_same_whatever_follows_it_but_for_an_optimizer_within_it():
    train, alone = mini(), mini(phase="forward-backward", optimizer=None)
    under = mini(optimizer="adamw-under-backward")
    one, other, within = (make_run(of, forward=[1.0] * 6) for of in (train, alone, under))
    assert same_part(one, "forward-backward") == same_part(other, "forward-backward")
    assert same_part(one, "step") != same_part(other, "step")
    assert same_part(one, "backward") != same_part(within, "backward")


def test_conditions_choose_one_of_runs_that_disagree():
    runs = [run("old", 2.0), msgspec.structs.replace(run("new", 1.0, 2), tag="mine")]
    query = TableQuery(rows=("model",), where=tuple(conditions_in("tag=mine")))
    assert select_runs(runs, query) == ([runs[1]], [])
