"""`stepscope report`: which page a name gives, where it is written, and what is refused."""

import html
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.command import stepscope

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "results"
RUN = RESULTS / "cpu" / "first"
SNAPSHOT = next((RESULTS / "h200" / "memory-recorded").glob("*tiny*")) / "memory.pickle.gz"


def test_a_page_names_a_command_that_shows_the_same(tmp_path: Path):
    done = stepscope("report", "last", "last", "--runs", RUN, "-o", tmp_path / "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = html.unescape((tmp_path / "page.html").read_text())
    assert "Show it in a terminal" in page and "Measure it again" not in page
    (command,) = re.findall(r"<code>(stepscope table .*)</code>", page)
    shown = stepscope(*shlex.split(command)[1:], cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr


def test_a_page_lies_beside_its_run(tmp_path: Path):
    folder = tmp_path / "runs" / "20260101T000000.000-x"
    folder.mkdir(parents=True)
    shutil.copy(next(RUN.glob("**/run.json")), folder)
    done = stepscope("report", "last", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "runs/20260101T000000.000-x/report.html\n"
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert stepscope("ls", cwd=tmp_path).returncode == 0, "a page is no run"


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ([RESULTS / "h200" / "plain"], "sweep"),
        ([RUN, "--runs", RUN], "index"),
        ([SNAPSHOT], "snapshot"),
        ([RESULTS / "h200" / "plain", RESULTS / "h200" / "tf32", "--compare", "--across", "dtype"], "comparison"),
        ([RESULTS / "h200-x2" / "ranks" / "late-0"], "ranks"),
        ([RESULTS / "cpu" / "compile" / "prices.json"], "answer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whatever_is_read_has_a_page(what: list[object], kind: str, tmp_path: Path):
    done = stepscope("report", *what, "-o", tmp_path / "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"</span> {kind}</p>" in (tmp_path / "page.html").read_text()


def test_plots_are_files_and_a_redacted_page_names_no_path(tmp_path: Path):
    plots = ("--plots", tmp_path / "plots", "--plots-as", "png")
    done = stepscope("report", SNAPSHOT, "-o", tmp_path / "page.html", *plots, "--redact", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (plot,) = (tmp_path / "plots").iterdir()
    assert plot.read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "page.html").read_text()
    assert str(ROOT) not in page and "stepscope memory" not in page


def damaged(tmp_path: Path, text: str) -> str:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(text)
    return str(folder)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing"], "no run named 'nothing'"),
        (["empty"], "is empty: name a run"),
        (["run"], "version 99"),
        (["text.json"], "text.json"),
        (["last", "--across", "dtype"], "--across belongs to --compare"),
        (["run", "--compare"], "--compare takes two sides"),
        (["run", "-o", "no/such/page.html"], "there is no folder no/such"),
        (["run", "-o", "empty"], "it is a folder"),
        (["run", "--plots-as", "gif"], "gif"),
        (["run", "--plots-as", "png"], "--plots-as belongs to --plots"),
        (["run", "--plots", "no/such/plots"], "there is no folder no/such"),
        (["run", "-o", "-"], "not written to stdout"),
        (["run", "-o", "text.json"], "not written by this command"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_one_line(arguments: list[str], says: str, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.json").write_text("[1, 2")
    damaged(tmp_path, '{"schema_version": 99}')
    done = stepscope("report", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("stepscope: ") and says in line
    assert done.stdout == "" and not list(tmp_path.glob("**/*.html"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_one_line(tmp_path: Path):
    tmp_path.chmod(0o500)
    done = stepscope("report", RUN, "-o", tmp_path / "page.html")
    assert done.returncode == 2 and "cannot write the page" in done.stderr


def test_a_run_without_samples_has_a_page(tmp_path: Path):
    import json

    document = json.loads(next(RUN.glob("**/run.json")).read_bytes())
    document.update(samples={}, status="unfinished")
    folder = damaged(tmp_path, json.dumps(document))
    done = stepscope("report", folder, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the run was started and never ended" in (tmp_path / "run" / "report.html").read_text()


def test_a_page_of_ours_is_written_again(tmp_path: Path):
    for _ in range(2):
        done = stepscope("report", RUN, "-o", tmp_path / "page.html", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
