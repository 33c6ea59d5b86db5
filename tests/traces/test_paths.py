"""`stepscope trace` by the places it is pointed at: what is no file, odd names, runs that are broken or must stay."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from stepscope.app.cli.output import show
from stepscope.core.answer import TEXT, Answer, Table, table_of
from stepscope.core.run_directory import save_run
from tests.captures import nsys_tables, training_steps, write_kineto, write_sqlite
from tests.command import stepscope
from tests.conftest import make_run

pytestmark = pytest.mark.slow


def refused(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stdout) == (2, ""), done.stderr[-2000:]
    assert done.stderr.count("\n") == 1
    assert done.stderr.rstrip("\n").isprintable()
    return done.stderr


def test_a_pipe_is_refused_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    assert "write the capture to a file first" in refused(stepscope("trace", tmp_path / "pipe"))


@pytest.mark.parametrize("name", ["x" * 5000, "a\nb\x1b[31m.json"], ids=["too long", "escapes"])
def test_a_name_that_is_no_name_is_one_line(name: str):
    refused(stepscope("trace", name))


def test_a_name_of_any_bytes(tmp_path: Path):
    """The URI by which SQLite opens a file is made of the name's bytes, whatever they are."""
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/100% \xff#?mode=rw.sqlite"))
    write_sqlite(nsys_tables(training_steps()), tmp_path / "t.sqlite").rename(odd)
    done = stepscope("trace", odd, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kernels"]


@pytest.mark.parametrize("name", ["trace.kineto.json.gz", "trace.nsys.sqlite"])
def test_a_broken_run_does_not_hide_its_capture(tmp_path: Path, name: str):
    if name.endswith(".gz"):
        write_kineto(training_steps(), tmp_path / name)
    else:
        write_sqlite(nsys_tables(training_steps()), tmp_path / name)
    (tmp_path / "run.json").write_text('{"schema_version": 1, "id')
    done = stepscope("trace", tmp_path, "--json")
    assert done.returncode == 0
    assert "the run beside the capture is left out" in done.stderr
    assert json.loads(done.stdout)["kernels"]


def test_a_raw_capture_is_read_as_what_was_made_of_it(tmp_path: Path):
    stream = tmp_path / "trace.qdstrm"
    stream.write_bytes(b"QDSTRM")
    assert "QdstrmImporter" in refused(stepscope("trace", stream))
    write_sqlite(nsys_tables(training_steps()), tmp_path / "trace.nsys.sqlite")
    assert stepscope("trace", stream).returncode == 0


def test_perfetto_writes_over_nothing_of_a_run(tmp_path: Path):
    """The files of a run beside the capture are measured too."""
    capture = write_kineto(training_steps(), tmp_path / "trace.kineto.json.gz")
    save_run(make_run(), tmp_path)
    for name in ("run.json", "trace.nsys.sqlite", "trace-kineto.json"):
        if name != "run.json":
            (tmp_path / name).write_text("measured")
        before = (tmp_path / name).read_bytes()
        assert "part of a run" in refused(stepscope("trace", capture, "--perfetto", tmp_path / name))
        assert (tmp_path / name).read_bytes() == before
    assert stepscope("trace", capture, "--perfetto", tmp_path / "mine.json").returncode == 0


def test_perfetto_wants_a_name_and_one_capture(tmp_path: Path):
    capture = write_kineto(training_steps(), tmp_path / "t.json.gz")
    refused(stepscope("trace", capture, "--perfetto", ""))
    assert "--against" in refused(stepscope("trace", capture, "--against", capture, "--perfetto", tmp_path / "p.json"))


def test_a_table_in_a_pipe_is_as_wide_as_it_is(capsys: pytest.CaptureFixture[str]):
    show(answer_of(table_of("name", "verdict", rows=[("k" * 130, "compute-bound")])))
    assert "k" * 130 + "  compute-bound" in capsys.readouterr().out.replace("   ", "  ")


def test_a_name_without_end_is_cut_in_the_tables(tmp_path: Path):
    """A kernel's, an operator's, a module's: each a cell of one line, and whole in the JSON."""
    name = "blocks.0." + "x<(" * 50_000
    capture = training_steps(1, 1)
    for rows in (capture.operators, capture.ranges, capture.launched):
        for row in rows:
            row["name"] = name if row["name"] not in ("forward", "backward", "optimizer") else row["name"]
    path = write_kineto(capture, tmp_path / "t.json")
    text = stepscope("trace", path)
    assert text.returncode == 0, text.stderr
    assert len(text.stdout) < 50_000
    assert name in json.loads(stepscope("trace", path, "--json").stdout)["ranges"]


def test_a_digest_that_cannot_be_kept_leaves_the_old_one(tmp_path: Path):
    write_kineto(training_steps(), tmp_path / "trace.kineto.json.gz")
    save_run(msgspec.structs.replace(make_run(), artifacts={"kineto": "trace.kineto.json.gz"}), tmp_path)
    (tmp_path / "trace-kineto.json").mkdir()  # root may write to whatever is locked, but not to a directory
    said = refused(stepscope("study", "kernels", "--from", tmp_path, "--keep-digests"))
    assert "cannot write" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "trace-kineto.json", "trace.kineto.json.gz"]


def answer_of(table: Table) -> Answer:
    return Answer(study="trace", question="", tables=(table,))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [60, 80])
def test_a_long_label_leaves_the_figures_whole(monkeypatch: pytest.MonkeyPatch, width: int):
    """Beside a kernel's name of 64 characters the other columns were nothing wide, and so not there."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    columns = ("top of forward", "family", ("calls", TEXT), ("ms a step", ".3f"), ("share", "%"))
    show(answer_of(table_of(*columns, rows=[("K" * 64, "matrix multiplication", "123", 4.567, 0.533)])))
    for figure in ("123", "4.567", "53.3 %"):
        assert figure in terminal.getvalue()
    label = next(word for word in terminal.getvalue().split() if word.startswith("KKK"))
    assert label.count("…") == 1 and len(label) >= 24, "shortened in its middle, on one line"
