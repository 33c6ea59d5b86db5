"""A figure that its run's findings doubt carries the mark wherever it is shown."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from stepscope.app.cli.app import app
from stepscope.core.answer import Answer, Finding, Severity
from stepscope.core.figures import doubt_mark, doubting_kinds, doubts_sentence, marked
from stepscope.core.run import Run
from stepscope.core.run_directory import save_run
from stepscope.questions.attention_step import StepCell, answer_steps
from stepscope.questions.warmup import answer_warmup
from stepscope.runs.answer import ProgressRow, answer_cells, answer_list, ended_cell_sentence, sweep_progress
from stepscope.runs.tables import TableQuery, build_table
from tests.conftest import make_run, workload
from tests.shown import shown


def doubted(severity: Severity, **changes: Any) -> Run:
    """A run of 12.1 s whose one finding is this grave."""
    finding = Finding(kind="compiled-while-measured", severity=severity, sentence="it compiled")
    return make_run(workload(**changes), step=[12.1] * 5, findings=(finding,))


def test_the_mark_is_that_of_the_gravest_finding_of_all_runs():
    error, warning, note, sound = doubted("error"), doubted("warning"), doubted("note"), make_run(step=[1.0])
    assert [doubt_mark(run) for run in (error, warning, note, sound, None)] == ["!", "*", "", "", ""]
    assert doubt_mark(sound, warning) == "*" and doubt_mark(warning, error) == "!"
    assert marked("12 ms", error) == "12 ms !" and marked("12 ms", sound) == "12 ms" and marked("", error) == ""
    assert doubting_kinds(error, warning) == ("compiled-while-measured",) and doubting_kinds(note) == ()
    assert doubts_sentence([sound, note]) is None
    assert doubts_sentence([error, warning]) == (
        "Doubted by their own findings: ! compiled-while-measured (1), * compiled-while-measured (1)."
    )
    assert doubt_mark(msgspec.structs.replace(sound, status="interrupted")) == "*"
    busy = make_run(step=[1.0], findings=(Finding(kind="host-busy", severity="warning", sentence="others worked"),))
    assert doubt_mark(busy) == "*" and doubt_mark(busy, of_memory=True) == "", "others change times, not memory"
    assert doubt_mark(warning, of_memory=True) == "*"


def of_a_table(run: Run) -> str:
    return " ".join(map(str, build_table([run], TableQuery(rows=("model",))).rows[0]))


def of_a_speed_up(run: Run) -> str:
    """The doubted run is the baseline: the other's speed-up over it is as doubtful."""
    other = make_run(workload(dtype="bf16"), step=[1.1] * 5)
    query = TableQuery(rows=("model",), columns=("dtype",), speedup="fp32")
    row = build_table([run, other], query).rows[0]
    return str(row[-1])


def of_a_sweep(run: Run) -> str:
    row = ProgressRow(name="cell", state="done", stage="", run=run, resumed=False)
    assert ended_cell_sentence([row], 0, None).endswith(marked("step 12.1 s", run))
    _, table = sweep_progress([row], None)
    return shown(Answer(study="sweep", question="", tables=(table,)))


PLACES: dict[str, tuple[str, Callable[[Run], str]]] = {
    "ls": ("12.1 s", lambda run: shown(answer_list([run]))),
    "sweep": ("step 12.1 s", of_a_sweep),
    "cells": ("12100.0", lambda run: shown(answer_cells([run]))),
    "table": ("12100.00", of_a_table),
    "speed-up": ("11.00x ± <0.01", of_a_speed_up),
    "warm-up": ("12100.0", lambda run: shown(answer_warmup([run]))),
}


@pytest.mark.parametrize("place", PLACES)
def test_every_place_marks_the_figure_of_a_doubted_run_and_no_other(place: str):
    figure, text_of = PLACES[place]
    assert f"{figure} !" in text_of(doubted("error")) and f"{figure} *" in text_of(doubted("warning"))
    sound = text_of(make_run(step=[12.1] * 5))
    assert figure in sound and "!" not in sound and "*" not in sound


def test_a_study_of_steps_names_the_findings_in_its_table():
    cells = [StepCell(run=doubted("error", attention=a), digest=None) for a in ("reference", "sdpa")]
    times = answer_steps(cells).tables[0]
    assert times.columns[-1] == "findings" and {row[-1] for row in times.rows} == {"compiled-while-measured"}


def test_ls_says_it_as_data_too(tmp_path: Path):
    run = doubted("error")
    (tmp_path / run.id).mkdir()
    save_run(run, tmp_path / run.id)
    answer = CliRunner().invoke(app, ["ls", str(tmp_path), "--json"])
    assert json.loads(answer.stdout)[0]["findings"] == [{"kind": "compiled-while-measured", "severity": "error"}]
