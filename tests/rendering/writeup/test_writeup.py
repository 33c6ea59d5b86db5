"""A write-up: which question is answered by which runs, what stands in the document, and what is wrong input."""

import fcntl
import json
import re
from pathlib import Path

import msgspec
import pytest

from stepscope.app.cli.app import app
from stepscope.core.answer import Answer, Panel, Point, decode_answer, encode_answer, note, table_of
from stepscope.core.errors import InputError
from stepscope.core.run_directory import create_run_directory, save_run
from stepscope.rendering.renderers import render
from stepscope.rendering.writeup import (
    ASSIGNMENTS,
    MOST_ALIKE,
    MOST_ROWS,
    Found,
    Material,
    Target,
    assignment_named,
    gather,
    write_up,
)
from tests.command import stepscope
from tests.conftest import make_run, workload
from tests.questions.test_parallel import cell as shared_cell

ROOT = Path(__file__).parents[3]
CS336, OF_2026 = assignment_named("cs336"), assignment_named("cs336-2026")
HOSTILE = "<script>alert(1)</script> | `x`"


def test_every_question_has_its_own_id_and_asks():
    for name in ASSIGNMENTS:
        questions = assignment_named(name).questions
        assert len({question.id for question in questions}) == len(questions)
        assert all(question.asks.endswith("?") for question in questions)


MEASURES = {question.measure.name: question.measure for question in (*CS336.questions, *OF_2026.questions)}


@pytest.mark.parametrize("scale", ("full", "small"))
@pytest.mark.parametrize("name", MEASURES)
def test_commands_are_commands(name: str, scale: str):
    """Each names verbs and options that there are."""
    words = [*MEASURES[name].words(scale), "--json"]  # type: ignore[arg-type]
    assert app([*words, "--help"], standalone_mode=False) == 0


def stored_answer(
    place: Path, study: str = "accumulation", rows: int = 1, text: str = "fp16", lines: int = 1
) -> Path:  # fmt: skip
    table = table_of("format", ("sum", "text"), title="Sums", rows=[(text, f"{9.953125 + row}") for row in range(rows)])
    panel = Panel(x_title="terms", y_title="sum", points=tuple(
        Point(line=f"{text}{line or ''}", x=x, y=x) for line in range(lines) for x in (1, 2)
    ))  # fmt: skip
    answer = Answer(study=study, question="How?", tables=(table,), panels=(panel,))
    place.mkdir(exist_ok=True)
    file = place / f"{study}.json"
    file.write_text(encode_answer(answer))
    return file


def test_an_answer_is_shown_as_its_renderer_shows_it(tmp_path: Path):
    stored_answer(tmp_path / "in")
    material = gather([str(tmp_path / "in")], tmp_path)
    target = Target(file=tmp_path / "out.md")
    found = write_up(CS336, material)
    target.write(found, "full")
    assert found.count == 1
    text = target.file.read_text()
    assert render(material.answers[0][0].body(), "markdown").strip() in text
    assert "1 of 33 questions answered" in text
    assert "](out_files/accumulation.svg)" in text and (tmp_path / "out_files/accumulation.svg").is_file()


def test_a_question_without_data_names_its_command_whole(tmp_path: Path):
    stored_answer(tmp_path / "in")
    target = Target(file=tmp_path / "my notes.md")
    target.write(write_up(CS336, gather([str(tmp_path / "in")], tmp_path)), "small")
    text = target.file.read_text()
    store = f"'{tmp_path}/my notes_data/"
    assert f"stepscope study warmup --model tiny --seq-len 64 --runs {store}warmup'" in text
    assert f"stepscope study normalisation --json > {store}normalisation.json'" in text


@pytest.mark.parametrize("suffix", [".md", ".html"])
def test_long_tables_are_whole_and_stand_beside_the_document_as_csv(tmp_path: Path, suffix: str):
    stored_answer(tmp_path / "in", rows=MOST_ROWS + 3)
    target = Target(file=tmp_path / f"out{suffix}")
    for _ in range(2):  # the second time over its own files
        target.write(write_up(CS336, gather([str(tmp_path / "in")], tmp_path)), "full")
    text = target.file.read_text()
    assert all(f"{9.953125 + row}" in text for row in range(MOST_ROWS + 3))
    assert "out_files/accumulation-1.csv" in text
    rows = (tmp_path / "out_files/accumulation-1.csv").read_text().splitlines()
    assert len(rows) == 1 + MOST_ROWS + 3


def test_a_plot_of_too_many_lines_is_left_out_in_words(tmp_path: Path):
    stored_answer(tmp_path / "in", lines=9)
    target = Target(file=tmp_path / "out.md")
    target.write(write_up(CS336, gather([str(tmp_path / "in")], tmp_path)), "full")
    assert "No plot: 9 colours by" in target.file.read_text() and not (tmp_path / "out_files").exists()


def test_text_of_files_is_no_markup(tmp_path: Path):
    stored_answer(tmp_path / "in", text=HOSTILE)
    target = Target(file=tmp_path / "out.html")
    target.write(write_up(CS336, gather([str(tmp_path / "in")], tmp_path)), "full")
    page = target.file.read_text()
    assert page.count("<script") == 1 and "alert(1)</script>" not in page and "&lt;script&gt;" in page
    assert not re.search(r"""(?:src|href)=["']https?:""", page), "nothing is loaded from elsewhere"


def test_cells_come_from_every_folder_of_equal_conditions(tmp_path: Path):
    """The larger folder answers; a smaller one adds the cell that it lacks, not the one that it has; a folder of a part
    of the memory adds none, nor does one that measured another batch size."""
    folders = {"most": ((64, 128, 256), 0.1), "fewer": ((32, 64), 0.3), "limited": ((512,), 0.1), "batch": ((48,), 0.1)}
    for folder, (seq_lens, forward_s) in folders.items():
        for seq_len in seq_lens:
            of = workload(seq_len=seq_len, batch_size=2 if folder == "batch" else 4)
            run = make_run(of, forward=[forward_s] * 6, backward=[0.2] * 6, optimizer=[0.05] * 6)
            assert run.environment is not None
            limit = 2**33 if folder == "limited" else None
            where = msgspec.structs.replace(run.environment, memory_limit_bytes=limit)
            save_run(msgspec.structs.replace(run, environment=where), create_run_directory(tmp_path / folder, of))
    found = {one.question.id: one for one in write_up(CS336, gather([str(tmp_path)], tmp_path)).answered}
    answer = found["benchmarking-b"].answer
    assert answer is not None
    assert [row[1:3] for row in answer.tables[0].rows] == [
        ("32", "300.00 ± 0.00"), ("64", "100.00 ± 0.00"), ("128", "100.00 ± 0.00"), ("256", "100.00 ± 0.00")
    ]  # fmt: skip
    (line,) = answer.asides
    assert line.startswith("From most (3 runs), fewer (1 run)")
    assert line.endswith("Left: batch (another kind of step); limited (8.00 GiB of the memory).")


def test_what_was_interrupted_is_measured_again(tmp_path: Path):
    stored_answer(tmp_path)
    found = write_up(CS336, gather([str(tmp_path)], tmp_path))
    measure = MEASURES["accumulation"]
    assert measure not in found.missing(tmp_path)
    measure.mark(tmp_path).touch()
    assert found.missing(tmp_path)[0] == measure, "the cheapest is first"
    costs = [one.cost for one in found.missing(tmp_path)]
    assert costs == sorted(costs) and len(set(costs)) == len(costs)


def test_wrong_input_is_one_line(tmp_path: Path):
    old = tmp_path / "old/a/run.json"
    old.parent.mkdir(parents=True)
    old.write_text(json.dumps({"schema_version": 999}))
    stored_answer(tmp_path / "in")
    cases = {
        "schema version 999": (tmp_path / "old",),
        "--assignment": (tmp_path / "in", "--assignment", "cs999"),
        "there is no folder": (tmp_path / "in", "-o", tmp_path / "nowhere/out.md"),
        "end its name in": (tmp_path / "in", "-o", tmp_path / "out.pdf"),
        "neither a run nor an answer": (ROOT / "README.md",),
    }
    for said, arguments in cases.items():
        done = stepscope("writeup", *arguments, cwd=tmp_path)
        assert done.returncode == 2, (said, done.stderr)
        assert said.removeprefix("--") in done.stderr and done.stderr.count("\n") == 1, done.stderr
        assert not list(tmp_path.glob("writeup*"))


def test_what_a_kill_left_is_said_and_stops_nothing(tmp_path: Path):
    """Marks without a run, a cut answer, a cut run; and another process that measures into the same store."""
    store = tmp_path / "writeup_data"
    (store / "first/a").mkdir(parents=True)
    (store / "first.unfinished").touch()
    done = stepscope("writeup", cwd=tmp_path)
    assert done.returncode == 0 and "left out" not in done.stderr
    (store / "first/a/run.json").write_text('{"schema_version"')
    done = stepscope("writeup", cwd=tmp_path)
    assert done.returncode == 0 and "a/run.json is no run, or was cut short" in done.stderr
    (store / "softmax.json").write_text('{"study": "softmax", "ques')
    stored_answer(store)
    with (store / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = stepscope("writeup", "--run", "--scale", "small", cwd=tmp_path)
    assert done.returncode == 2 and "another writeup measures into writeup_data" in done.stderr
    assert "softmax.json is neither a run nor an answer" in done.stderr
    document = (tmp_path / "writeup.md").read_text()
    assert "1 of 33 questions" in document and "2 files could not be read" in document
    (tmp_path / "x_data").touch()
    with pytest.raises(InputError, match="x_data beside it is a file"):
        Target(file=tmp_path / "x.md")


def test_a_named_file_that_is_no_answer_is_refused(tmp_path: Path):
    file = tmp_path / "a.json"
    file.write_text("[1, 2]")
    with pytest.raises(InputError, match=r"a\.json"):
        gather([str(file)], tmp_path)


@pytest.mark.slow
def test_the_stored_write_up_is_what_the_tool_writes(tmp_path: Path):
    """docs/results/writeup-h200.md, from results/h200, in all but the folder of its plots."""
    done = stepscope("writeup", "results/h200", "-o", tmp_path / "writeup-h200.md", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "writeup-h200.md").read_text().replace(f"{tmp_path}/", "docs/results/")
    assert written == (ROOT / "docs/results/writeup-h200.md").read_text()


@pytest.mark.slow
def test_what_run_measured_is_read_without_being_named(tmp_path: Path):
    stored_answer(tmp_path / "writeup_data")
    done = stepscope("writeup", "--runs", tmp_path / "none", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 of 33 questions answered" in done.stdout


def test_the_sweep_that_answers_a_question_best_is_asked(tmp_path: Path):
    """results/h200 holds sweeps of one question on a shared GPU, and within 80 GiB, beside clean ones; sweeps of many
    choices, in which a few cells are compiled; sweeps with captures and without."""
    material = gather([str(ROOT / "results/h200")], tmp_path)
    document = write_up(CS336, material)
    found = {one.question.id: one.answer for one in document.answered}
    lengths = found["benchmarking-lengths"]
    assert lengths is not None
    assert lengths.tables[0].notes[0].text == "Out of memory: xl-b4-s1024-fp32-train, 2.7B-b4-s1024-fp32-train."
    assert lengths.device == "NVIDIA H200, limited to 80.00 GiB"
    assert document.sentence.count("H200 (") == document.sentence.count("H200 limited to 80.00 GiB (") == 1
    steps, bf16, peaks, kept = (found[name] for name in ("benchmarking-b", "precision-c", "memory-c", "memory-d"))
    assert steps is not None and "standard deviation of a phase is" in steps.tables[0].notes[0].text
    assert [row[:3] for row in steps.tables[0].rows[-1:]] == [("2.7B", "1024", "OOM")]
    assert bf16 is not None and any("product" in column for table in bf16.tables for column in table.columns)
    assert peaks is not None and "allowed" not in peaks.device
    by_cell = {row[:3]: row[3:] for row in peaks.tables[0].rows}
    assert by_cell["2.7B", "512", "train"] == ("63.79", "63.70") and by_cell["small", "1024", "train"][1] == "8.23"
    assert "From kernels (36 runs), plain (8 runs), memory-2.7B (13 runs), memory (11 runs)" in peaks.asides[-1]
    assert {str(row[0]).partition("-")[0] for row in bf16.tables[0].rows} == {
        "small",
        "medium",
        "large",
        "xl",
        "2.7B",
    }
    assert kept is not None and "nothing here was measured" in kept.tables[0].notes[0].text
    assert "tf32" not in kept.tables[0].notes[0].text
    compiled, out = found["compile-b"], found["memory-f"]
    assert compiled is not None and all(row[0] for row in compiled.tables[0].rows)
    assert out is not None and "xl-b4-s1024-fp32-train" in out.tables[0].notes[0].text


def test_a_table_without_a_figure_is_no_answer(tmp_path: Path):
    for phase in ("forward", "train"):
        folder = tmp_path / "in" / phase
        folder.mkdir(parents=True)
        save_run(make_run(workload(phase=phase), forward=[0.1] * 5), folder)  # of a CPU: no peak was counted
    found = {one.question.id: one for one in write_up(CS336, gather([str(tmp_path / "in")], tmp_path)).answered}
    assert found["memory-b"].answer is None


def test_questions_on_ranks_take_their_part_of_one_study(tmp_path: Path):
    """Runs of ranks lie beside one process's; a folder without one of either answers nothing."""
    found = {answered.question.id: answered for answered in write_up(CS336, Material(runs=ranks(tmp_path))).answered}
    data, sharding = found["data-parallel"].answer, found["sharding"].answer
    assert data is not None and sharding is not None
    assert {finding.kind for finding in data.findings} >= {"one-message", "fastest"}
    assert {finding.kind for finding in sharding.findings} == {"sharded-optimizer"}
    assert "Memory of a rank" in {table.title for table in sharding.tables}
    alone = Material(runs=ranks(tmp_path)[1:])
    assert all(one.answer is None for one in write_up(CS336, alone).answered if one.question.id == "data-parallel")


def ranks(place: Path) -> tuple[Found, ...]:
    of = [shared_cell(), *(shared_cell(name, 2) for name in ("ddp-naive", "ddp-flat", "ddp-bucketed", "zero1"))]
    return tuple((cell.run, place / cell.run.id) for cell in of)


def test_a_folder_without_runs_yet_names_a_command_for_each_question(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for arguments in ((), (tmp_path / "empty",)):
        done = stepscope("writeup", *arguments, cwd=tmp_path)
        assert done.returncode == 0 and "0 of 33 questions answered" in done.stdout, done.stderr
        assert "stepscope study warmup" in (tmp_path / "writeup.md").read_text()
        assert "--run measures them all" in done.stderr


def test_a_file_of_somebody_s_own_is_not_overwritten(tmp_path: Path):
    mine = tmp_path / "mine.md"
    mine.write_text("# My notes")
    with pytest.raises(InputError, match="not written by this command"):
        Target(file=mine)
    assert mine.read_text() == "# My notes"
    stored_answer(tmp_path / "in")
    ours = Target(file=tmp_path / "my notes.md")
    for _ in range(2):
        Target(file=ours.file).write(write_up(CS336, gather([str(tmp_path / "in")], tmp_path)), "full")
    assert "](<my notes_files/accumulation.svg>)" in ours.file.read_text()


def test_findings_that_say_the_same_of_many_cells_are_taken_together(tmp_path: Path):
    file = stored_answer(tmp_path / "in")
    answer = decode_answer(file.read_bytes(), str(file))
    alike = tuple(note("alike", f"Cell {place} is not distinguishable.") for place in range(60))
    file.write_text(encode_answer(msgspec.structs.replace(answer, findings=alike)))
    target = Target(file=tmp_path / "out.md")
    target.write(write_up(CS336, gather([str(tmp_path / "in")], tmp_path)), "full")
    text = target.file.read_text()
    assert text.count("is not distinguishable") == MOST_ALIKE
    assert "54 further findings of the kind 'alike'" in text


def test_this_years_edition_asks_of_its_own_models_and_says_which_xl_it_means():
    """Stored results of 2.7B, its xl, answer; those of the older xl do not. What nothing measured names its command."""
    material = gather([str(ROOT / "results" / "h200" / name) for name in ("limit-80GiB", "plain", "memory-2.7B")], ROOT)
    document = write_up(OF_2026, material)
    answers = {one.question.id: one for one in document.answered}
    assert "whose xl is 2.7B" in OF_2026.title and CS336 is assignment_named("cs336-2025")
    for name in ("benchmarking-b", "memory-b", "memory-c"):
        answer = answers[name].answer
        assert answer is not None, name
        models = {str(row[0]) for table in answer.tables for row in table.rows if "model" in table.columns}
        assert "2.7B" in models and "xl" not in models, (name, models)
    lacking = {one.name: one.words("full") for one in document.missing(ROOT)}
    assert answers["checkpointing-level"].answer is None and "none,every-1,every-2,every-4" in lacking["checkpointing"]
    assert answers["closed-forms"].answer is None and "--explain" in lacking["closed-forms"]
    assert "2,4,6" in lacking["all-reduce-2026"] and "cs336-2026" in lacking["attention-flash-2026"]


def test_closed_forms_answer_their_question_and_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    app(["plan", "--explain", "--ranks", "4", "--json"], standalone_mode=False)
    (tmp_path / "forms.json").write_text(capsys.readouterr().out)
    answered = {one.question.id: one.answer for one in write_up(OF_2026, gather([str(tmp_path)], tmp_path)).answered}
    forms = answered["closed-forms"]
    assert forms is not None and len(forms.tables) == 3
    assert [name for name, answer in answered.items() if answer is not None] == [
        "checkpointing-nested",  # predicted, whatever was measured
        "closed-forms",
    ]
    assert "Predicted" in str(answered["checkpointing-nested"])


def test_this_years_xl_is_answered_at_the_lengths_that_its_questions_name():
    """From results/h200: peaks at 128 and 2048 alone, with what ran out of memory, and the levels of checkpointing."""
    names = ("memory-2.7B", "checkpointing", "memory")
    places = [*(str(ROOT / "results/h200" / name) for name in names), str(ROOT / "results/h200-x2/long-step")]
    material = gather([*places, str(ROOT / "results/h200-x2/parallel")], ROOT)
    found = {one.question.id: one.answer for one in write_up(OF_2026, material).answered}
    peaks, levels, traced = found["memory-b"], found["checkpointing-level"], found["fsdp-in-time"]
    assert peaks is not None and levels is not None and traced is not None
    shown = render(peaks, "markdown")
    assert "| 2.7B | 128 | 12.92 | 64.15 |\n| 2.7B | 2048 | 19.40 | OOM |\n\n" in shown
    assert "| 2.7B | 2048 | OOM | 63.87 |" in render(levels, "markdown")
    assert "fsdp2-compute-bf16-x2: all-gathers and reduce-scatters" in render(traced, "markdown")
    assert found["fsdp"] is None and found["sharded-optimizer"] is None, "data parallelism alone was measured"
    for name in ("memory-d", "memory-e", "memory-f"):
        answer = found[name]
        assert answer is None or "xl-b" not in render(answer, "markdown"), name
