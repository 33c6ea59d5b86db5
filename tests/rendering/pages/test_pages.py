"""Pages of stored runs, of captures and of other answers: what stands on them, and in which order."""

import shutil
from pathlib import Path

import msgspec
import polars as pl
import pytest

from stepscope.allocations.prediction.answer import answer_fit, fit_document
from stepscope.allocations.prediction.fit import budget_of_memory
from stepscope.allocations.prediction.fit import fit as predict
from stepscope.core.answer import Answer, Line, error, note, table_of, text, warning
from stepscope.core.errors import InputError
from stepscope.core.evidence import Evidence, Precision, Updates
from stepscope.core.run import Failure, Run
from stepscope.core.run_directory import load_run, save_run
from stepscope.core.units import format_bytes
from stepscope.rendering.pages import Page
from stepscope.rendering.pages.html import redacted, render_page
from stepscope.rendering.pages.index import is_index, page_of_index
from stepscope.rendering.pages.named import commands_of, page_named, page_of_comparison, page_of_run, page_of_runs
from stepscope.rendering.pages.of_answer import gravest, page_of_answer, page_of_capture
from stepscope.traces.captures.answer import icicle_panel
from stepscope.traces.captures.checks import check_trace
from stepscope.traces.captures.digest import load_capture, load_digest
from tests.conftest import make_run, mini, workload

ROOT = Path(__file__).parents[3]
LOOP = next((ROOT / "results" / "h200" / "loops").glob("*LlamaForCausalLM*"))


def titles(page: Page) -> list[str]:
    return [section.title for section in page.sections]


def figure(page: Page, name: str) -> str:
    return next(one.value for one in page.figures if one.name == name)


def quiet(_: str) -> None: ...


def row_of(page: Page, title: str) -> list[tuple[str, str]]:
    """The rows of the only table of a section, as text."""
    (found,) = [section.answer.tables[0].rows for section in page.sections if section.title == title]
    return [(str(row[0]), str(row[1])) for row in found]


def test_a_run_is_a_sentence_five_figures_and_its_tables():
    run = make_run(mini(), forward=[0.010] * 12, backward=[0.020] * 12, optimizer=[0.002] * 12)
    page = page_of_run(run)
    assert page.kind == "run"
    assert page.sentence.startswith("A step of ") and "takes 32 ms on a CPU, 62.5 % of it in backward" in page.sentence
    assert [one.name for one in page.figures] == [
        "a step", "tokens per second", "model FLOP/s", "peak memory", "gravest finding",
    ]  # fmt: skip
    assert figure(page, "tokens per second") == "1,000", "2 sequences of 16 tokens in 32 ms"
    assert titles(page) == ["What was measured", "The step by its phases", "Environment", "Notes"]


def test_a_model_without_tokens_shows_samples_and_a_small_mfu_is_not_nothing():
    run = load_run(next((ROOT / "results" / "h200" / "loops").glob("*Classifier*")))
    page = page_of_run(run)
    step_s = run.samples["step"].median_s
    assert step_s is not None and figure(page, "samples per second") == f"{32 / step_s:,.0f}"
    flops = sum(work.flops for work in run.work.values())
    assert figure(page, "MFU") == f"{flops / step_s / 66.9e12 * 100:.1f} %", "of the datasheet's fp32"
    share = page_named([str(LOOP)], Path("runs"), quiet)
    assert figure(share, "MFU") == "0.008 %", "79.28 GFLOP/s of 989.4 TFLOP/s"


def test_the_index_holds_each_run_once_and_each_workloads_history(tmp_path: Path):
    times = [0.010, 0.0101, 0.0099, 0.01, 0.0102, 0.0201, 0.02, 0.0199, 0.0202, 0.0203]
    run = make_run(mini(), forward=[0.01] * 12)
    for number, step_s in enumerate(times):
        run = make_run(mini(), forward=[step_s] * 12)
        created = f"2026-01-{number + 1:02}T00:00:00+00:00"
        run = msgspec.structs.replace(run, id=f"r{number}", created=created, tag="<b>")
        (tmp_path / run.id).mkdir()
        save_run(run, tmp_path / run.id)
    lost = msgspec.structs.replace(
        run, id="lost", created="2026-02-01T00:00:00+00:00", status="out-of-memory", samples={}
    )
    for name in ("lost", "broken"):
        (tmp_path / name).mkdir()
    save_run(lost, tmp_path / "lost")
    (tmp_path / "broken" / "run.json").write_text("{")
    assert is_index([str(tmp_path)], tmp_path) and not is_index([str(tmp_path / "lost")], tmp_path)
    page = page_of_index(tmp_path)
    assert page.index is not None and figure(page, "measured") == "10 of 11"
    figures = page.index.figures
    assert figures["id"] == ["lost", *(f"r{number}" for number in reversed(range(10)))]
    assert figures["step"][:2] == [None, pytest.approx(20.3)] and figures["status"][0] == "OOM"
    assert page.index.histories == [[pytest.approx(one * 1e3) for one in times]] and page.index.changes == [[5]]
    assert page.index.since[0] == pytest.approx(100, abs=2) and figure(page, "largest change of level") == "+101.0 %"
    assert titles(page) == ["Devices and versions", "Runs that cannot be read", "Notes"]
    text_of_page = render_page(page)
    assert "\\u003cb\\u003e" in text_of_page and "<b>" not in text_of_page.partition('id="data"')[2]
    without = redacted(page).index
    assert without is not None and set(without.figures["tag"]) == {""}


def test_what_only_reads_is_said_to_show_and_not_to_measure():
    ranks = [str(file) for file in sorted((ROOT / "results/h200-x2/ranks/late-0").rglob("*.json.gz"))]
    page = page_named(ranks, Path("runs"), quiet)
    assert page.title == f"What do the ranks of {len(ranks)} captures do?"
    assert page.shown_by == (f"stepscope trace {' '.join(ranks)}",) and page.reproduce == ()
    assert page_of_run(make_run(mini())).shown_by == ()
    hostile = page_of_runs(sweep(), "x", ["my runs", "a;b"])
    assert hostile.shown_by == ("stepscope table 'my runs' 'a;b'",)


def test_a_run_with_a_trace_shows_where_when_and_how_near_the_peaks():
    page = page_named([str(LOOP)], Path("runs"), quiet)
    for title in ("Where the time went", "The longest kernels", "Against the device's peaks"):
        assert title in titles(page)
    kinds = {section.title: [panel.kind for panel in section.answer.panels] for section in page.sections}
    assert kinds["Where the time went"] == ["icicle"]
    assert kinds["What ran when, and what stood idle"] == ["timeline"]
    assert figure(page, "a step") == "35.97 ms"


def test_a_trace_of_which_the_digest_is_kept_shows_what_the_digest_holds(tmp_path: Path):
    stored = next(file.parent for file in sorted((ROOT / "results" / "h200" / "kernels").rglob("trace-kineto.json")))
    kept = load_digest(stored)
    assert kept is not None
    page = page_named([str(stored)], Path("runs"), quiet)
    (where,) = [section.answer for section in page.sections if section.title == "Where the time went"]
    assert [panel.kind for panel in where.panels] == ["icicle"] * (1 + bool(kept.places))
    assert where.panels[0].nodes[0].value == pytest.approx(kept.busy_ns / kept.steps / 1e6, rel=1e-3)
    assert where.tables[0].rows[0][0] == kept.phases[0].phase and "not kept here" in where.tables[0].notes[0].text
    assert {finding.kind for finding in kept.findings} <= {finding.kind for finding in page.findings}
    shutil.copytree(stored, tmp_path / "run")
    (tmp_path / "run" / "trace-kineto.json").write_text("{")
    damaged = page_named([str(tmp_path / "run")], Path("runs"), quiet)
    assert "Where the time went" not in titles(damaged)
    assert any("Its trace is not shown" in aside for one in damaged.sections for aside in one.answer.asides)


def test_a_run_that_failed_says_what_became_of_it():
    run = make_run(mini())
    lost = msgspec.structs.replace(
        run, status="out-of-memory", failure=Failure(during="measure", phase="forward", message="no room"), samples={}
    )
    page = page_of_run(lost)
    assert page.sentence == "Out of memory on a CPU, in measure, forward."
    said = msgspec.json.encode(page.sections).decode()
    assert said.count("no room") == 1, "the library's own words stand once"
    assert figure(page, "a step") == "not measured" and not page.checked


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model": "small", "seq_len": 256, "dtype": "bf16"},
            "--model small --batch-size 2 --seq-len 256 --dtype bf16",
        ),
        ({"model": "small", "phase": "forward", "attention": "sdpa"}, "--attention sdpa --phase forward"),
        ({"layers": 2}, "--layers 2"),
    ],
)
def test_the_command_that_measures_a_run_again(changes: dict[str, object], words: str):
    run = make_run(workload(**changes), step=[0.01])
    (command,) = commands_of(run)
    assert command.startswith("stepscope run --model ")
    assert all(word in command for word in words.split())


@pytest.mark.parametrize(
    "folder", sorted((ROOT / "results" / "h200" / "best").iterdir()), ids=lambda path: path.name[:9]
)
def test_the_command_is_the_run_s_own_workload(folder: Path):
    if not folder.is_dir():
        pytest.skip("no run")
    from stepscope.app.verbs.run import with_options  # the parser of such words
    from stepscope.engine.workload_options import OneWorkload

    run = load_run(folder)
    words = commands_of(run)[0].removeprefix("stepscope run ").split()
    kept = " ".join(words[: words.index("--steps")] if "--steps" in words else words)
    kept = kept.split(" --warmup")[0].split(" --seconds")[0]
    assert with_options(OneWorkload({}), kept).workload() == run.workload


def test_the_gravest_finding_comes_first():
    assert gravest((note("a", "A."), error("b", "B."), warning("c", "C."))).value == "b"
    assert gravest(()).value == "none"


def sweep() -> list[Run]:
    runs: list[Run] = []
    for dtype, factor in (("fp32", 2.0), ("bf16", 1.0)):
        for seq_len in (16, 32, 64):
            of = mini(seq_len=seq_len, dtype=dtype)
            runs.append(make_run(of, step=[seq_len * factor * 1e-3] * 12))
    lost = Failure(during="measure", phase="backward", message="cannot hold it")
    runs[2] = msgspec.structs.replace(runs[2], status="out-of-memory", failure=lost, samples={})
    return runs


def test_a_sweep_has_maps_of_its_axes_with_why_a_cell_is_missing():
    page = page_of_runs(sweep(), "a folder", ["a folder"])
    assert figure(page, "measured") == "5 of 6"
    assert "from 16 ms" in page.sentence and "to 64 ms" in page.sentence and "1 OOM" in page.sentence
    heat = next(panel for section in page.sections for panel in section.answer.panels if panel.kind == "heat")
    cells = {(point.line, point.name): (point.y, point.missing) for point in heat.points}
    assert cells["fp32", "16"] == (32.0, "") and cells["bf16", "64"] == (64.0, "")
    assert cells["fp32", "64"][1] == "OOM"
    assert "What is missing, and why" in titles(page)
    assert any(panel.kind == "curves" for panel in page.panels)


def test_models_of_several_sizes_are_one_axis_and_not_five():
    page = page_named([str(ROOT / "results" / "h200" / "plain")], Path("runs"), quiet)
    heats = [panel for panel in page.panels if panel.kind == "heat"]
    assert {point.line for point in heats[0].points} == {"small", "medium", "large", "xl", "2.7B"}
    assert len(heats) == 6, "three figures, each for two dtypes"


def test_an_icicle_adds_up(tmp_path: Path):
    page = page_of_capture_in(LOOP)
    (icicle,) = [panel for panel in page.panels if panel.kind == "icicle"]
    children: dict[int, float] = {}
    for node in icicle.nodes[1:]:
        assert node.parent >= 0
        children[node.parent] = children.get(node.parent, 0.0) + node.value
    for parent, total in children.items():
        assert total <= icicle.nodes[parent].value * (1 + 1e-9)
    assert children[0] == pytest.approx(icicle.nodes[0].value, rel=0.01)
    assert [node.level for node in icicle.nodes[:2]] == ["all", "phase"]
    summary = load_capture(LOOP, say=quiet)
    kernels_ms = int(summary.attribution.kernels["duration_ns"].sum()) / summary.steps / 1e6
    assert icicle.nodes[0].value == pytest.approx(kernels_ms)


def page_of_capture_in(folder: Path) -> Page:
    summary = load_capture(folder, say=quiet)
    return page_of_capture(summary, check_trace(summary), folder.name)


def test_a_timeline_holds_all_the_work_of_its_step():
    summary = load_capture(LOOP, say=quiet)
    page = page_of_capture(summary, (), "x")
    (timeline,) = [panel for panel in page.panels if panel.kind == "timeline"]
    work = summary.attribution.work
    first = work.filter((pl.col("step") == pl.col("step").min()) & (pl.col("duration_ns") > 0))
    drawn = [one for one in timeline.slices if one.lane.startswith("stream")]
    assert sum(one.count for one in drawn) == first.height
    assert sum(one.end - one.begin for one in drawn) == pytest.approx(int(first["duration_ns"].sum()) / 1e6, rel=0.02)
    assert timeline.frame.x_ends is not None
    assert all(-1e-9 <= one.begin <= one.end for one in timeline.slices)
    assert {one.kind for one in timeline.slices if one.lane == "idle"} <= {
        f"idle: {cause}" for cause in summary.occupation.gaps["cause"].cast(pl.String).unique()  # type: ignore[union-attr]
    }  # fmt: skip


def test_the_ranks_of_a_job_share_a_timeline():
    page = page_named([str(ROOT / "results" / "h200-x2" / "ranks" / "late-0")], Path("runs"), quiet)
    assert page.kind == "ranks" and figure(page, "ranks") == "2"
    (timeline,) = [panel for panel in page.panels if panel.kind == "timeline"]
    assert {one.lane.partition(",")[0] for one in timeline.slices} == {"rank 0", "rank 1"}


def test_any_answer_has_a_page():
    answer = Answer(
        study="formats", question="What can a format hold?", lead=(Line("A line."),),
        tables=(text("Said first."), table_of("format", ("bits", ","), rows=[("fp16", 16)])),
        findings=(note("k", "A sentence."),),
    )  # fmt: skip
    page = page_of_answer(answer, "answer")
    assert page.title == "What can a format hold?" and page.sentence == "A sentence."
    assert titles(page) == ["What was measured", "Format"]
    assert page.sections[1].answer.tables[0].notes[0].text == "Said first.", "a sentence stays with the next table"


def test_nothing_that_says_who_or_where_is_left(monkeypatch: pytest.MonkeyPatch):
    import socket

    monkeypatch.setattr(socket, "gethostname", lambda: "lab-node-17.example.com")
    answer = Answer(
        study="trace", question="Where does the time of /home/ada/secret/run.json.gz go?",
        lead=(Line("net: 5 parameters (made by /home/ada/train.py:make with width=12, path=/data/x)"),
              Line("on lab-node-17, watched in examples/train.py --key 5")),
        tables=(table_of("line of code", rows=[("train.py:17 forward",), ("../lib/net/attention.py:5",)]),),
        origin=("Saved in runs/20260101-x; own code at 0123456789",),
    )  # fmt: skip
    page = page_of_answer(answer, "capture", shown_by=("stepscope trace /home/ada/x",))
    said = msgspec.json.encode(redacted(page)).decode()
    for secret in ("ada", "secret", "lab-node", "train.py", "width=12", "/data", "attention.py", "0123456789"):
        assert secret not in said, secret
    assert "stepscope trace" not in said and "5 parameters" in said


def test_steps_that_took_no_time_are_no_division_by_zero():
    run = make_run(forward=[0.0] * 5, backward=[0.0] * 5, optimizer=[0.0] * 5)
    assert page_of_run(run).sentence == "No step was measured."


def test_what_the_user_named_and_commits_are_left_out_wherever_they_stand():
    answer = Answer(
        study="compare", question="Is acme-proj/red1 faster than acme-secret/bob_smith-trace.json.gz?",
        lead=(Line("They were measured at the commits fdb506a6ec and 85ec82b31d; tag for-bob; host acme-node17:8080"),
              Line('bob/models/llama, file:///home/bob/x/y.txt, "/home/bob smith/My Documents/z"')),
        tables=(table_of("what", "on this machine", rows=[("git commit", "2aafee13b3d7f0a1"), ("step", "57.6 ms")]),),
    )  # fmt: skip
    given = ("acme-proj/red1", "acme-secret/bob_smith-trace.json.gz", "last")
    said = msgspec.json.encode(redacted(page_of_answer(answer, "comparison"), given)).decode()
    for secret in ("acme", "bob", "fdb506a6ec", "85ec82b31d", "2aafee13b3d7", "Documents", "for-bob", "red1"):
        assert secret not in said, secret
    assert "57.6 ms" in said and "Is [path] faster than [path]?" in said


def test_a_name_that_is_a_part_of_a_word_leaves_the_word():
    answer = Answer(
        study="s", question="The latest of test, acme_2", lead=(Line("at the commits 12345678 and 87654321"),),
        tables=(table_of("what", "on this machine", rows=[("git commit", "87654321")]),),
    )  # fmt: skip
    page = page_of_answer(answer, "answer", figures=(gravest(()),))
    found = redacted(page, ("test", "acme", "gravest"))
    assert found.title == "The latest of [path], [path]_2"
    said = msgspec.json.encode(found).decode()
    assert "12345678" not in said and "87654321" not in said
    assert found.figures[0].name == "gravest finding", "words of stepscope's own stay"


def test_a_run_that_was_not_measured_has_not_passed_every_check():
    page = page_of_run(msgspec.structs.replace(make_run(), status="out-of-memory", samples={}, findings=()))
    assert figure(page, "gravest finding") == "OOM"


def test_a_comparison_opens_with_its_verdict_and_names_both_models():
    sides = [str(ROOT / "results/h200" / name) for name in ("first", "best")]
    across = ("model", "dtype", "compile", "attention", "optimizer")
    page = page_of_comparison(sides, Path("runs"), across, quiet)
    assert page.sentence.startswith("Of 4 pairs: 4 without a verdict")
    assert figure(page, "pairs") == "4" and figure(page, "largest change") == "+91.9 %"
    bars = [point.name for panel in page.panels if panel.kind == "bars" for point in panel.points]
    assert len(set(bars)) == 4 and "b4-s512-train, eager to default, small to large" in bars
    (first,), (small, *_) = ((ROOT / "results/h200" / name).glob("*-small-*") for name in ("first", "best"))
    alone = page_of_comparison([str(first), str(small)], Path("runs"), across, quiet)
    assert figure(alone, "processes") == "1 / 1" and "no verdict" in alone.sentence


def test_a_page_names_the_limit_of_memory_and_runs_that_ran_out_of_it():
    page = page_named([str(ROOT / "results/h200/limit-80GiB")], Path("runs"), quiet)
    assert "limited to 80.00 GiB" in page.sentence and figure(page, "gravest finding") == "2 OOM"
    assert page.findings[0].sentence.startswith("2 OOM of 20 runs")
    (lost,) = (ROOT / "results/h200/limit-80GiB").glob("*-xl-b4-s1024-*")
    one = page_named([str(lost)], Path("runs"), quiet)
    assert one.sentence.startswith("Out of memory on NVIDIA H200, limited to 80.00 GiB, in warm-up, forward, blocks.39")
    assert one.sentence.endswith("400.00 MiB more were asked for.")


def test_a_page_gives_no_advice_of_the_command_line():
    page = page_named([str(LOOP)], Path("runs"), quiet)
    assert "--only" not in msgspec.json.encode(page.sections).decode()


def test_an_environment_reads_in_words_with_units():
    page = page_named([str(next((ROOT / "results/h200/first").glob("*")))], Path("runs"), quiet)
    rows = dict(row_of(page, "Environment"))
    before = rows["GPU before the measured steps"]
    assert "SM clock" in before and " MHz" in before and "mhz" not in before and "memory used" in before
    assert "GiB" in before.partition("memory used")[2]


def test_cells_that_were_measured_twice_say_so_and_marks_have_a_legend():
    runs = [msgspec.structs.replace(run, findings=(warning("short-samples", "Few steps."),)) for run in sweep()]
    page = page_of_runs([*runs, runs[0]], "a folder", ["a folder"])
    heats = [panel for panel in page.panels if panel.kind == "heat"]
    assert heats and all("of 1 cell measured more than once the newest run is shown" in h.frame.note for h in heats)
    (cells,) = [one.answer.tables[0] for one in page.sections if one.title == "Cells"]
    assert any("* " in line.text and "short-samples" in line.text for line in cells.notes)
    assert "One of 7 such findings in 7 runs" in page.findings[1].sentence


def test_tokens_of_a_forward_alone_are_no_rival_to_those_of_training():
    fast = msgspec.structs.replace(make_run(mini(phase="forward"), step=[0.001] * 12), id="20260101T000000.000-forward")
    page = page_of_runs([*sweep(), fast], "a folder", ["a folder"])
    alone = page_of_runs([fast], "x", ["x"])
    assert figure(page, "most tokens per second, training") != figure(alone, "most tokens per second")
    assert alone.sentence.startswith("1 run measured on a CPU, 1 ms (") and " to " not in alone.sentence


def test_an_icicle_without_modules_has_no_level_of_them(tmp_path: Path):
    found = load_capture(ROOT / "tests/data/kineto_inference_bf16.json.gz", say=quiet)
    work = found.attribution.work.with_columns(pl.lit(None, pl.Categorical()).alias("module"))
    bare = msgspec.structs.replace(found, attribution=msgspec.structs.replace(found.attribution, work=work))
    panel = icicle_panel(bare)
    assert panel is not None and {node.level for node in panel.nodes} == {"all", "phase", "family"}


def test_a_run_without_samples_is_one_line(tmp_path: Path):
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(make_run(), samples={})))
    with pytest.raises(InputError, match="no samples of a step"):
        page_named([str(tmp_path)], Path("runs"), quiet)


def test_a_prediction_has_a_page_of_what_was_said(tmp_path: Path):
    """The figures are those of the document, and the tables those that the terminal showed."""
    found, step = budget_of_memory(2**30), workload(batch_size=4, seq_len=64)
    told = predict(step, found)
    file = tmp_path / "fit.json"
    document = fit_document(told, answer_fit(told))
    file.write_bytes(msgspec.json.encode(document))
    page = page_named([str(file)], Path("runs"), quiet)
    shown = {figure.name: figure.value for figure in page.figures}
    assert page.kind == "prediction" and shown["peak"] == format_bytes(told.estimate.peak_bytes)
    assert shown["fits"] == "yes" and shown["left"] == format_bytes(told.margin_bytes or 0) and "fits" in page.sentence
    file.write_bytes(msgspec.json.encode([document, document]))
    with pytest.raises(InputError, match="holds 2 predictions: predict for one --memory"):
        page_named([str(file)], Path("runs"), quiet)
    file.write_bytes(msgspec.json.encode({**document, "categories": 3}))
    with pytest.raises(InputError, match="is no whole prediction"):
        page_named([str(file)], Path("runs"), quiet)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"schema_version": 1, "workload": {}}, "is a run as --json wrote it.*stepscope report RUN"),
        ({"before": "a", "after": "b", "pairs": []}, "is a comparison.*--compare"),
        ({"peak_bytes": 1, "estimate": {}}, "is a prediction.*stepscope fit"),
    ],
)
def test_what_another_verb_wrote_is_named(tmp_path: Path, document: dict[str, object], said: str):
    file = tmp_path / "x.json"
    file.write_bytes(msgspec.json.encode(document))
    with pytest.raises(InputError, match=said):
        page_named([str(file)], Path("runs"), quiet)


def test_the_numerics_of_a_run_say_its_scale_and_swallowed_updates():
    run = make_run(mini(), step=[0.01] * 12)
    assert "Numerics" not in titles(page_of_run(run)) or run.evidence.precision
    updates = Updates(steps=12, applied=10, loss_scale=65536.0, parameters_finite=True, gradient_norm=2.5)
    precision = Precision(float32_matmul="highest", probe_relative_error=1.2e-7)
    seen = msgspec.structs.replace(run, evidence=Evidence(updates=updates, precision=precision))
    rows = dict(row_of(page_of_run(seen), "Numerics"))
    assert rows["scale of the loss after them"] == "65,536" and rows["error of one against float64"] == "1.2e-07"
    assert rows["updates of the parameters"] == "10 in 12 measured steps"
    assert rows["norm of the last gradients before clipping"] == "2.5"
    said = msgspec.json.encode(page_of_run(seen).sections).decode()
    assert "2 updates did not come" in said


def test_a_folder_of_runs_that_is_not_there_is_no_name_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert is_index(["runs"], Path("runs")) and not is_index(["last"], Path("runs"))
