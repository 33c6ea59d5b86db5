"""What a write-up measures on a machine: the cells that fit, the plan, what is predicted, and going on after a stop."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch

from stepscope.allocations.prediction.fit import budget_of_memory
from stepscope.app.verbs.writeup import _commands, _this_machine, choose_cells, cut_short, plan_text, time_spent, within
from stepscope.core.answer import Answer
from stepscope.core.errors import InputError
from stepscope.core.model_config import configure
from stepscope.core.run_directory import find_run_files, load_run, load_runs
from stepscope.core.samples import least_squares
from stepscope.core.units import GIB
from stepscope.core.workloads import FactoryWorkload, TextbookWorkload, UserModel
from stepscope.rendering.writeup import Machine, Material, Target, assignment_named, write_up
from stepscope.runs.metrics import Scaling, scaling_of
from tests.conftest import make_run

ROOT = Path(__file__).parents[3]
CS336 = assignment_named("cs336")
MEASURES = {question.measure.name: question.measure for question in CS336.questions}


def machine(gib: float, **more: object) -> Machine:
    """A card whose processes may allocate so much."""
    memory = budget_of_memory(int(gib * GIB))
    card = Machine(name="card", on_gpu=True, memory=memory, flops_per_s=2e13, gpus=1, capability=(8, 6))
    return msgspec.structs.replace(card, **more)


LAPTOP = machine(16, name="laptop", on_gpu=False, flops_per_s=6e10, gpus=0, capability=None)


def fitting(name: str, gib: float) -> int:
    """Cells of a measure that are asked for and fit on a card, of whose memory 1 GiB is left to the driver."""
    measure, card = MEASURES[name], machine(gib - 1)
    asked = {cell for group in measure.groups(measure.words("full")) for cell in group.cells}
    return len(asked.intersection(cell for group in choose_cells(measure, card).groups for cell in group.cells))


@pytest.mark.parametrize(
    ("name", "by_card"),
    [
        ("step-time", (18, 13, 9, 7, 6, 3)),
        ("kernels", (18, 17, 15, 14, 13, 11)),
        ("precision-speed", (10, 10, 6, 4, 4, 2)),
        ("memory", (12, 6, 6, 3, 0, 0)),
        ("memory-recorded", (2, 1, 1, 1, 0, 0)),
    ],
)
def test_cells_are_chosen_by_memory(name: str, by_card: tuple[int, ...]):
    """On cards of 80, 48, 24, 16, 12 and 8 GiB, as `stepscope fit` says it of each cell alone."""
    assert tuple(fitting(name, gib) for gib in (80, 48, 24, 16, 12, 8)) == by_card


def test_commands_measure_the_cells_that_fit_and_no_others():
    chosen = choose_cells(MEASURES["step-time"], machine(23))
    assert [" ".join(words) for words in chosen.commands(machine(23))] == [
        "sweep --model small --seq-len 128,256,512,1024",
        "sweep --model medium --seq-len 128,256,512",
        "sweep --model large --seq-len 128,256",
    ]
    limited = machine(11, memory_limit_bytes=11 * GIB)
    recorded = choose_cells(MEASURES["memory-recorded"], limited)
    assert [" ".join(words) for words in recorded.commands(limited)] == [
        "sweep --model small --seq-len 512 --phase forward,train --record memory --memory 11GiB"
    ], "the largest smaller model of which most cells fit"
    edition = {question.measure.name: question.measure for question in assignment_named("cs336-2026").questions}
    renamed = choose_cells(edition["memory-2026"], machine(23)).groups
    assert {group.chosen["model"] for group in renamed} == {"cs336-2026-xl", "large"}, "whatever models are called"
    compared = choose_cells(MEASURES["precision-speed"], machine(11))
    assert len(compared.commands(machine(11))) == 2, "a study is one command for each group of cells that it compares"


def test_a_gpu_without_bf16_gets_fp16():
    old = machine(15, capability=(7, 5))
    words = choose_cells(MEASURES["attention-flash"], old).commands(old)[0]
    assert "fp16" in words and "reference,sdpa" in words
    assert "bf16: fp16 is measured instead" in plan_text(old, ())


def test_cells_that_were_measured_are_not_measured_again():
    """Whatever the cells were chosen for: a run of the measure's folder is enough."""
    measure, card = MEASURES["step-time"], machine(11)
    cells = [cell for group in choose_cells(measure, card).groups for cell in group.cells]
    runs = [make_run(cells[0]), make_run(cells[1], status="interrupted"), make_run(cells[2], status="out-of-memory")]
    again = choose_cells(measure, card, runs)
    assert [cell for group in again.groups for cell in group.cells] == [cells[1], *cells[3:]]
    assert again.done == 2


def test_time_leaves_out_the_costliest_cells_first():
    chosen = [choose_cells(MEASURES[name], machine(79)) for name in ("memory-recorded", "step-time")]
    kept = within(3, machine(79), chosen)
    assert sum(one.seconds for one in kept) <= 180 < sum(one.seconds for one in chosen)
    assert all(one.groups for one in kept), "on a GPU each measure keeps a cell"
    most = max(max(one.group_s) for one in kept)
    assert all(len(one.group_s) == len(one.groups) for one in kept) and most <= max(chosen[1].group_s)
    assert kept[1].too_long[0].chosen["model"] == "2.7B"


def test_small_commands_stand_in_where_time_is_too_short_for_the_fewest_cells():
    names = ("accumulation", "attention", "attention-flash", "step-time")
    chosen = [choose_cells(MEASURES[name], machine(79)) for name in names]
    five, one = (within(minutes, machine(79), chosen) for minutes in (4, 1))
    assert [each.first == (each.measure.words("small"),) for each in five] == [True, True, False, False]
    assert len(five[-1].groups) > 1 and "longer" not in plan_text(machine(79), five, 4)
    rows = plan_text(machine(79), one, 1).splitlines()
    assert rows[-1] == (
        "  This takes 1:28, not 1:00, and nothing here can be made shorter. The longest: attention 0:40, "
        "attention-flash 0:30, step-time 0:13, accumulation 0:05."
    )
    assert "the small command, for time" in rows[3]


def test_more_time_replaces_small_commands_by_whole_ones_and_measures_nothing_twice(tmp_path: Path):
    """A card that had one minute, and then forty; a laptop, of which the small command is all that it measures."""
    card, names = machine(79), ("accumulation", "attention", "step-time")
    first = within(1, card, [choose_cells(MEASURES[name], card) for name in names])
    assert [one.measure.name for one in first if one.is_small] == ["attention"]
    later = msgspec.structs.replace(card, small=("attention", "step-time"), too_long=("kernels large-b4-s128",))
    assert cut_short(later) == {"attention", "step-time", "kernels"}
    document = write_up(CS336, Material(answers=()), later)
    every = tuple(
        dataclasses.replace(one, answer=Answer(study="", question=""), measured=True) for one in document.answered
    )
    whole = dataclasses.replace(document, answered=every)
    assert not whole.missing(tmp_path)
    assert {one.name for one in whole.missing(tmp_path, cut_short(later))} == cut_short(later)
    second = [choose_cells(MEASURES[name], later) for name in ("attention", "step-time")]
    assert [one.first for one in second] == [(MEASURES["attention"].words("full"),), ()] and second[1].groups
    assert not within(1, later, second)[0].commands(later), "the small command has run"
    laptop = msgspec.structs.replace(LAPTOP, small=("attention", "step-time"))
    attention, steps = (choose_cells(MEASURES[name], laptop) for name in ("attention", "step-time"))
    assert not attention.commands(laptop) and all("tiny" not in words for words in steps.commands(laptop))


def test_progress_is_said_by_the_command_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    chosen = [choose_cells(MEASURES["accumulation"], machine(11))]
    assert [words for _, words in _commands(chosen, None, Target(file=tmp_path / "w.md"))] == [*chosen[0].first]
    assert capsys.readouterr().err == "stepscope: measuring 1 of 1: stepscope study accumulation\n"


PLAN = """\
stepscope: card: 11.00 GiB for PyTorch's allocator; 20 TFLOP/s in a short forward pass.
  measure          cells                  about  left out
  accumulation                             0:05
  memory-recorded  0 of 2, small instead   0:50  too large: 2.7B 512-forward 512-train
  collectives                              0:20  needs 2 GPUs: on the CPU with tiny models
  precision-speed  4 of 10                 0:55  too large: large 512, xl 512, 2.7B 512
  all                                      2:11
  What is left out is predicted, and marked so. Ctrl-C keeps what is there; the same command goes on."""


def test_the_plan_says_what_is_left_out_and_why():
    names = ("accumulation", "memory-recorded", "collectives", "precision-speed")
    assert plan_text(machine(11), [choose_cells(MEASURES[name], machine(11)) for name in names]) == PLAN


def test_the_time_that_steps_took_is_said_of_runs_measured_since():
    stages_s = {"build": 5.0, "warm-up": 10.0, "measure": 30.0, "observe": 8.0, "trace kineto": 12.0, "end": 1.0}
    new = make_run(TextbookWorkload(model=configure("tiny")))
    new = msgspec.structs.replace(new, evidence=msgspec.structs.replace(new.evidence, stages_s=stages_s))
    old = msgspec.structs.replace(new, created="2025-12-31T00:00:00+00:00")
    assert time_spent([old, new], new.instant, 100).startswith(
        "this took 1:40: 50.0 % in steps that were timed (30.0 %) or recorded (20.0 %), 10.0 % in warm-up"
    )


def test_a_cpu_measures_small_models_and_what_it_ends_in_time():
    step_time, memory = (choose_cells(MEASURES[name], LAPTOP) for name in ("step-time", "memory"))
    commands = [" ".join(words) for words in step_time.commands(LAPTOP)]
    assert commands == [
        "sweep --model tiny --seq-len 64,128,256 --steps 5",
        "sweep --model small --seq-len 128,256 --warmup 1 --steps 3",
    ]
    assert not memory.commands(LAPTOP), "a CPU counts no peak"
    every = within(None, LAPTOP, [choose_cells(measure, LAPTOP) for measure in MEASURES.values()])
    assert sum(one.seconds for one in every) <= 15 * 60


def test_least_squares_of_a_line_and_of_what_would_be_below_zero():
    assert least_squares([((1.0, 2.0), 8.0), ((2.0, 1.0), 7.0), ((1.0, 1.0), 5.0)]) == pytest.approx((2.0, 3.0))
    assert least_squares([((1.0, 1.0), 1.0), ((2.0, 1.0), 0.5)]) == pytest.approx((0.0, 0.75))


@pytest.mark.parametrize(("phase", "most"), [("forward", 0.25), ("backward", 0.2), ("optimizer", 0.1)])
def test_times_of_large_models_are_scaled_from_small_ones(phase: str, most: float):
    """From the cells of an H200 that would fit into 12 GiB the time of every larger cell is predicted within `most`."""
    runs, _ = load_runs([ROOT / "results/h200/limit-80GiB"])
    like = TextbookWorkload(model=configure("small"))
    whole = scaling_of(runs, "NVIDIA H200", like, phase)
    known = {(model, length) for model, length in (*(("small", n) for n in (128, 256, 512, 1024)), ("medium", 128),
                                                   ("medium", 256))}  # fmt: skip
    part = tuple(cell for cell in whole.cells if (cell[0].name, cell[0].seq_len) in known)
    scaling = Scaling(part, phase, whole.ceiling)
    assert len(part) == 6 and len(whole.cells) == 18
    errors = [
        abs((scaling.seconds(cell) or 0) / seconds - 1) for cell, seconds in whole.cells if cell not in dict(part)
    ]
    assert max(errors) < most


def test_what_was_not_measured_is_predicted_and_marked(tmp_path: Path):
    """A machine that measured two cells: the others are in the table with memory, times and the reason."""
    measured = [TextbookWorkload(model=configure("small"), seq_len=n) for n in (128, 256)]
    runs = [
        make_run(cell, forward=[0.01 * (i + 1)] * 6, backward=[0.02 * (i + 1)] * 6, optimizer=[0.005] * 6)
        for i, cell in enumerate(measured)
    ]
    where = runs[0].environment
    assert where is not None
    card = machine(11, name=where.device_name, too_long=("step-time medium-b4-s256-fp32-train",))
    found = write_up(CS336, Material(runs=tuple((run, tmp_path / "runs" / run.id) for run in runs)), card)
    by_id = {one.question.id: one for one in found.answered}
    times, peaks = by_id["benchmarking-b"].answer, by_id["memory-b"]
    assert times is not None and peaks.answer is not None
    table = times.tables[-1]
    assert table.title == "Asked for and not measured here: predicted" and len(table.rows) == 18
    assert table.notes[0].text.startswith("Predicted; nothing in this table was measured")
    assert "2 measured cells" in table.notes[2].text
    by_cell = {row[0]: row for row in table.rows}
    assert by_cell["2.7B-b4-s1024-fp32-train"][-1] == "needs 104.36 GiB, there are 11.00 GiB"
    assert by_cell["medium-b4-s128-fp32-train"][-1] == "not measured yet"
    assert by_cell["medium-b4-s256-fp32-train"][-1] == "left out for time"
    precision = by_id["precision-c"].answer
    assert precision is not None and precision.tables[-1].columns == ("cell", "peak GiB", "forward", "backward", "why")
    lines = [line.text for line in precision.tables[-1].notes if "none was measured here" in line.text]
    assert lines == ["Times of forward in bf16, backward in bf16: none was measured here, so none is scaled."]
    seconds = [cell for row in table.rows for cell in row[2:-1] if isinstance(cell, float)]
    assert seconds and all(float(f"{each:.2g}") == each for each in seconds), "a prediction has two digits"
    sentences = [line.text for one in found.answered if one.answer is not None for table in one.answer.tables
                 for line in table.notes if "asked for (" in line.text]  # fmt: skip
    assert len(sentences) == len(set(sentences)), "questions on the same cells say once which were not measured"
    assert not peaks.measured and MEASURES["memory"] in found.missing(tmp_path)
    assert "by prediction alone" in found.sentence
    out = by_id["memory-f"].answer
    assert out is not None and "the smallest that does not fit" in out.tables[0].notes[0].text


def test_the_machine_is_remembered(tmp_path: Path):
    target = Target(file=tmp_path / "w.md")
    assert target.machine is None
    target.remember(LAPTOP)
    assert target.machine == LAPTOP
    (target.store / "machine.json").write_text("{")
    assert target.machine is None


_DRIVER = """
import sys
from stepscope.app.cli import app
from stepscope.app.verbs import writeup as verb
from stepscope.rendering import writeup
cs336 = writeup.assignment_named("cs336")
measure = writeup.Measure("steps", 1, "", "sweep --model tiny --seq-len 16,32,48 --batch-size 1 --warmup 0 --steps 2 "
                          "--no-profile")
times = next(one for one in cs336.questions if one.id == "benchmarking-b")
one = writeup.Question("times", "How long?", measure, times.source)
writeup.assignment_named = lambda name: writeup.Assignment(title="T", parts={"P": (one,)})
app.main()
"""


@pytest.mark.slow
def test_a_stop_leaves_a_document_and_the_same_command_goes_on(tmp_path: Path):
    """SIGTERM, once the first of three cells is there."""
    words = [sys.executable, "-c", _DRIVER, "writeup", "--run", "--scale", "small", "--runs", "none"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    folder = tmp_path / "writeup_data/steps"

    def done() -> dict[str, str]:
        runs = [load_run(file) for file in find_run_files(folder)] if folder.is_dir() else []
        return {run.workload.key: run.id for run in runs if run.status == "done"}

    end = time.monotonic() + 120
    while not done() and time.monotonic() < end and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "How long?" in (tmp_path / "writeup.md").read_text()
    first = done()
    assert 1 <= len(first) < 3 and (tmp_path / "writeup_data/steps.unfinished").exists()
    again = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert again.returncode == 0, again.stderr
    assert first.items() <= done().items() and len(done()) == 3, "nothing is measured twice"
    assert not (tmp_path / "writeup_data/steps.unfinished").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks of a machine without a GPU")
def test_a_cpu_refuses_memory_before_it_measures(tmp_path: Path):
    with pytest.raises(InputError, match="does not apply to a CPU: leave it out"):
        _this_machine(Target(file=tmp_path / "w.md"), GIB)
    assert not list(tmp_path.iterdir())


def test_runs_of_another_s_model_are_no_cells(tmp_path: Path):
    """They lie in a folder that somebody gave, and have arguments, sizes that no formula knows, and no hash."""
    theirs = FactoryWorkload(factory="mine.py:make", model=UserModel(name="net"), arguments={"width": 64})
    material = Material(
        runs=(
            (msgspec.structs.replace(make_run(TextbookWorkload(model=configure("tiny"))), workload=theirs), tmp_path),
        )
    )
    found = write_up(CS336, material, machine(11))
    times = next(one for one in found.answered if one.question.id == "benchmarking-b")
    assert not times.measured and times.answer is not None and len(times.answer.tables[0].rows) == 20
    assert found.others == ("net",) and "The runs here are of net; no question asks" in found.sentence
    assert write_up(CS336, material).answered[0].why == "no run here is of small, medium, large, xl, 2.7B"
    assert not choose_cells(MEASURES["step-time"], machine(11), [run for run, _ in material.runs]).done


def test_a_scaling_that_misses_the_measured_cells_shows_no_times():
    """Steps that the host bounds take as long whatever their size: from them nothing is told of a larger one."""
    tiny, small = (TextbookWorkload(model=configure(name), dtype="fp32", seq_len=128) for name in ("tiny", "small"))
    assert Scaling(((tiny, 0.010),), "forward").is_useful
    assert not Scaling(((tiny, 0.010), (small, 0.010)), "forward").is_useful
