"""Runs of one experiment in several processes, taken together."""

import math
from pathlib import Path

import msgspec
import pytest

from stepscope.core.answer import warning
from stepscope.core.run import Failure, Repeat, Run
from stepscope.questions.speed import TimedCell, pair_up
from stepscope.runs.run_sets import answer_set, sets_of
from tests.conftest import make_run, workload
from tests.shown import check_golden, shown

GOLDEN = Path(__file__).parents[1] / "golden"


def process(number: int, step_s: float, of: int = 5, name: str = "a-set", **changes: object) -> Run:
    """A run of a set, whose three steps all take that long, forward a quarter of it."""
    run = make_run(forward=[step_s / 4] * 3, backward=[step_s / 2] * 3, optimizer=[step_s / 4] * 3)
    return msgspec.structs.replace(
        run, id=f"2026010{number}T000000.000-{run.workload.key}", repeat=Repeat(set=name, number=number, of=of),
        created=f"2026-01-0{number}T00:00:00.000+00:00", **changes,
    )  # fmt: skip


def test_a_process_is_one_figure():
    (found,) = sets_of([process(i + 1, step) for i, step in enumerate((0.4, 0.1, 0.2, 0.2, 0.1))])
    assert found.processes("step").medians_s == (0.4, 0.1, 0.2, 0.2, 0.1)
    assert found.processes("step").typical_s == pytest.approx(0.4 ** (1 / 5) * 0.1 ** (2 / 5) * 0.2 ** (2 / 5))
    assert found.processes("forward").medians_s == (0.1, 0.025, 0.05, 0.05, 0.025)
    assert found.representative.samples["step"].median_s == 0.2


def test_runs_go_by_their_sets_and_others_stay_alone():
    alone = make_run(step=[1.0])
    runs = [process(2, 0.1), process(1, 0.2), alone, process(1, 0.3, name="another")]
    found = {one.name: [run.id[:8] for run in one.runs] for one in sets_of(runs)}
    assert found == {alone.id: ["20260101"], "a-set": ["20260101", "20260102"], "another": ["20260101"]}


def test_a_process_that_was_measured_again_counts_once():
    again = msgspec.structs.replace(process(1, 0.5), created="2026-02-01T00:00:00.000+00:00", id="later")
    (found,) = sets_of([again, process(1, 0.1), process(2, 0.2)])
    assert found.processes("step").medians_s == (0.5, 0.2)


def test_what_was_not_measured_is_left_out_and_said():
    lost = process(3, 0.3, status="killed", failure=Failure(message="the process was killed", during="measure"))
    (found,) = sets_of([process(1, 0.1), process(2, 0.2), lost])
    assert len(found.measured) == 2 and found.requested == 5
    text = shown(answer_set(found))
    assert "killed (measure): the process was killed" in text and "2 processes of 5 asked for" in text
    assert "do not tell how much processes differ" in text
    assert found.document.parts["step"].low_s is None


def test_the_answer_as_it_is_shown():
    doubt = warning("wide-spread", "The steps spread.")
    runs = [process(i + 1, 0.1 * factor) for i, factor in enumerate((1.0, 1.02, 0.98, 1.01, 0.99))]
    runs[1] = msgspec.structs.replace(runs[1], findings=(doubt,))
    (found,) = sets_of(runs)
    check_golden(shown(answer_set(found, "runs"), width=120), GOLDEN / "run-set.txt")
    step = found.document.parts["step"]
    assert step.low_s and step.typical_s and step.high_s and step.low_s < step.typical_s < step.high_s
    assert step.deviation == pytest.approx(math.sqrt(2.5) / 100, rel=0.01)


def test_a_study_compares_what_all_processes_say():
    """By hand: the typical times are 0.2 s and 0.1 s; the runs in the middle would say 0.2 / 0.08."""
    fast, slow = workload(dtype="bf16", phase="forward-backward"), workload(phase="forward-backward")

    def runs(of: object, name: str, *steps: float) -> list[Run]:
        made = [process(i + 1, step, name=name) for i, step in enumerate(steps)]
        return [msgspec.structs.replace(run, workload=of) for run in made]

    found = [*runs(slow, "slow", 0.2, 0.1, 0.4, 0.2, 0.2), *runs(fast, "fast", 0.1, 0.05, 0.2, 0.08, 0.125)]
    study = pair_up([TimedCell(run=run) for run in found], ("fp32", "bf16"))
    (pair,) = study.pairs
    ratio = pair.ratio("step")
    assert ratio is not None and ratio.value == pytest.approx(2.0) and ratio.interval is not None and ratio.undecided
    assert study.replaced == 0 and len(study.cells) == 2 and "over all processes" in study.intervals
    assert len(pair.base.processes) == 5 and pair.other.run.samples["step"].median_s == 0.1
