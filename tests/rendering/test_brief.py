"""`--brief`: ten lines at most, the gravest finding first, as text and as JSON."""

import json
from pathlib import Path

import msgspec
import pytest

from stepscope.core.answer import Answer, Line, error, note, table_of, warning
from stepscope.rendering.brief import MOST_LINES, render_brief
from tests.captures import Capture, write_kineto
from tests.command import stepscope

ROOT = Path(__file__).parents[2]

ANSWER = Answer(
    study="run",
    question="What does a step take?",
    lead=(Line("tiny, 1.1 M parameters", "strong"), Line("batch 4"), Line("a CPU")),
    tables=(
        table_of(
            "phase", ("median", "ms of s"), ("share", ""), title="Phases",
            rows=[("forward", 0.010, None), ("backward", 0.020, "66 %"), ("step", 0.030, "100 %")],
            notes=(Line("128 tokens a step."),),
        ),
    ),
    findings=(
        note("small", "The step is small."),
        warning("not-steady", "The steps vary by 9 %.", {"share": 0.09}, "close other programs"),
        error("no-sync", "The timer did not wait."),
    ),
    checked=True,
)  # fmt: skip

SAID = """\
tiny, 1.1 M parameters
batch 4
error no-sync: The timer did not wait.
warning not-steady: The steps vary by 9 %. Remedy: close other programs.
note small: The step is small.
step: median 30.00 ms, share 100 %
128 tokens a step.
forward: median 10.00 ms
backward: median 20.00 ms, share 66 %
"""


def test_the_gravest_finding_is_first_then_the_figures():
    assert render_brief(ANSWER) == SAID


def test_a_noisy_run_still_says_its_tokens_mfu_and_memory():
    memory = table_of(
        "memory", ("allocated", "B"), rows=[("peak during forward", 2**20), ("peak during backward", 2**30)]
    )
    times = msgspec.structs.replace(
        ANSWER.tables[0], notes=(Line("9 steps."), Line("128 tokens/s."), Line("MFU 40 % of the peak."))
    )
    noisy = tuple(warning(f"w{place}", "Take care.") for place in range(9))
    lines = render_brief(msgspec.structs.replace(ANSWER, tables=(times, memory), findings=noisy)).splitlines()
    assert lines[5:9] == [
        "step: median 30.00 ms, share 100 %", "128 tokens/s.", "MFU 40 % of the peak.",
        "peak during backward: allocated 1.00 GiB",
    ]  # fmt: skip
    assert len(lines) == MOST_LINES


def test_cautions_and_the_verdict_are_in_the_head():
    lead = (Line("a against b", "strong"), Line("Take care: x.", "care"), Line("b is faster.", "good"))
    lines = render_brief(msgspec.structs.replace(ANSWER, study="compare", lead=lead)).splitlines()
    assert lines[:3] == ["a against b", "Take care: x.", "b is faster."]


def test_rows_of_numbers_have_a_subject_and_the_newest_run_is_first():
    ranks = table_of("rank, ms a step", ("computation", "ms of ns"), rows=[("0", 5_000_000), ("", None)])
    of_ranks = Answer(study="trace", question="Where?", tables=(ranks,))
    assert "rank 0: computation 5.000 ms" in render_brief(of_ranks).splitlines()
    listed = Answer(
        study="ls", question="", tables=(table_of("run", "cell", rows=[(f"r{i}", "x") for i in range(50)]),)
    )
    assert render_brief(listed).splitlines()[0] == "r49: cell x"


def test_json_has_the_same_lines_with_the_figures_of_findings():
    document = json.loads(render_brief(ANSWER, as_json=True))
    assert [line["text"] for line in document["lines"]] == SAID.splitlines()
    found = document["lines"][3]
    assert (found["kind"], found["severity"], found["remedy"]) == ("not-steady", "warning", "close other programs")
    assert found["figures"] == {"share": 0.09}


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 500])
@pytest.mark.parametrize("findings", [0, 1, 30])
def test_there_are_never_more_than_ten_lines_and_none_is_lost_unsaid(rows: int, findings: int):
    answer = Answer(
        study="s", question="Why?", device="a CPU",
        tables=(table_of("name", rows=[(f"r{i}",) for i in range(rows)]),),
        findings=tuple(note("k", f"Sentence {i}.") for i in range(findings)),
    )  # fmt: skip
    lines = render_brief(answer).splitlines()
    assert len(lines) <= MOST_LINES
    whole = rows + findings + 2
    said = f"and {whole - MOST_LINES + 1:,} more lines" in lines[-1]
    assert said if whole > MOST_LINES else len(lines) == whole


def test_a_line_of_a_foreign_file_stays_one_line():
    hostile = Answer(study="s", question="a\nb\x1b[2J" + "x" * 9999)
    assert render_brief(hostile).count("\n") == 1 and "\x1b" not in render_brief(hostile)


def test_verbs_take_it(tmp_path: Path):
    run = next((ROOT / "results/cpu/first").iterdir())
    for words in (("show", run), ("table", run), ("models",), ("fit",), ("study", "formats")):
        done = stepscope(*words, "--brief", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert 0 < len(done.stdout.splitlines()) <= MOST_LINES
    assert json.loads(stepscope("show", run, "--brief", "--json").stdout)["study"] == "run"
    refused = stepscope("show", run, "--brief", "--style", "markdown")
    assert refused.returncode == 2 and "--brief and --style markdown" in refused.stderr


def test_a_capture_says_first_what_takes_most(tmp_path: Path):
    """Convolution before matrix multiplication, and copies before both where they are nearly all of the span."""
    capture = Capture()
    capture.range("forward", 0, 1000)
    for number in range(3):
        capture.kernel(
            10 + 10 * number, 250, name="sm80_xmma_fprop_implicit_gemm_f32f32_nhwc", delay=1000 + 300 * number
        )
    capture.kernel(50, 9, delay=2500)
    found = brief_of(capture, tmp_path)
    families = [line for line in found if "share" in line and line.startswith(("convolution", "matrix"))]
    assert [line.partition(":")[0] for line in families] == ["convolution", "matrix multiplication"]
    assert not any("Matrix multiplication is" in line for line in found[: found.index(families[0])])
    capture.kernel(
        70, 27_000, name="Memcpy HtoD (Pageable -> Device)", kind="memcpy", delay=4000, call="cudaMemcpyAsync"
    )
    found = brief_of(capture, tmp_path)
    copies = next(place for place, line in enumerate(found) if "1 copies and fills: 0.027 ms, 8" in line)
    assert "of the span" in found[copies] and found[copies + 1].startswith("convolution: ")


def brief_of(capture: Capture, folder: Path) -> list[str]:
    done = stepscope("trace", write_kineto(capture, folder / "t.json"), "--brief")
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()
