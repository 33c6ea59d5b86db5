"""Reports of Nsight Systems, which its own nsys must export first."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from stepscope.core.profilers import find_nsys
from stepscope.traces.captures.digest import read_trace
from tests.captures import nsys_tables, write_sqlite
from tests.engine.test_sweep import wait_for
from tests.traces.test_nsys_reader import one_step, refused


def test_a_report_without_nsys_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "report.nsys-rep"
    path.write_bytes(b"NSYS garbage")
    monkeypatch.setenv("STEPSCOPE_NSYS", str(tmp_path / "nowhere"))
    assert "needs nsys" in refused(path)


def test_an_nsys_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    report, nsys = tmp_path / "report.nsys-rep", tmp_path / "nsys"
    report.write_bytes(b"NSYS garbage")
    monkeypatch.setenv("STEPSCOPE_NSYS", str(nsys))
    for script, said in (
        ("echo 'cannot import\nmore' >&2; exit 3", "cannot import"),
        ("exit 3", "exit code 3"),
        ("exit 0", "exit code 0"),
    ):
        nsys.write_text(f"#!/bin/sh\n{script}\n")
        nsys.chmod(0o755)
        assert said in refused(report)


def test_messages_about_a_report_name_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not the export, which is gone when they are read."""
    export = write_sqlite({"albums": [{"title": 1}]}, tmp_path / "prepared.sqlite")
    nsys, report = tmp_path / "nsys", tmp_path / "report.nsys-rep"
    nsys.write_text(f'#!/bin/sh\ncp "{export}" "$7"\n')
    nsys.chmod(0o755)
    report.write_bytes(b"NSYS")
    monkeypatch.setenv("STEPSCOPE_NSYS", str(nsys))
    assert "not an export of Nsight Systems" in refused(report)
    write_sqlite(nsys_tables(one_step()), tmp_path / "whole.sqlite").replace(export)
    assert read_trace(report).work.height == 2


def test_what_a_killed_reader_leaves_is_deleted_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And not what one that lives still reads."""
    temporary, nsys, report = tmp_path / "temporary", tmp_path / "nsys", tmp_path / "report.nsys-rep"
    export, ready = write_sqlite(nsys_tables(one_step()), tmp_path / "whole.sqlite"), tmp_path / "ready"
    nsys.write_text(f'#!/bin/sh\ncp "{export}" "$7"\n')
    nsys.chmod(0o755)
    report.write_bytes(b"NSYS")
    temporary.mkdir()
    reading = (
        "import pathlib, sys, time; from stepscope.traces.readers.nsys import exported\n"
        "with exported(pathlib.Path(sys.argv[1])): pathlib.Path(sys.argv[2]).touch(); time.sleep(60)"
    )
    monkeypatch.setenv("STEPSCOPE_NSYS", str(nsys))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    environment = {**os.environ, "TMPDIR": str(temporary)}
    reader = subprocess.Popen([sys.executable, "-c", reading, report, ready], env=environment)
    try:
        while not ready.exists():
            assert reader.poll() is None
            time.sleep(0.01)
        (left,) = temporary.iterdir()
        assert read_trace(report).work.height == 2
        assert [*temporary.iterdir()] == [left]
    finally:
        reader.kill()
        reader.wait()
    assert (left / "capture.sqlite").is_file()
    assert read_trace(report).work.height == 2
    assert not [*temporary.iterdir()]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems end no process with its parent")
def test_the_exporter_of_a_killed_reader_ends(tmp_path: Path):
    nsys, started = tmp_path / "nsys", tmp_path / "started"
    nsys.write_text(f'#!/bin/sh\necho $$ >"{started}.part"; mv "{started}.part" "{started}"; exec sleep 600\n')
    nsys.chmod(0o755)
    exporting = "import sys; from pathlib import Path; from stepscope.core.profilers import export_report\n"
    exporting += "export_report(*map(Path, sys.argv[1:]))"
    reader = subprocess.Popen([sys.executable, "-c", exporting, nsys, "report", "sqlite"])
    wait_for(started.exists)
    reader.kill()
    reader.wait()
    wait_for(lambda: not Path("/proc", started.read_text().strip(), "exe").exists())


@pytest.mark.nsys
def test_a_real_report(tmp_path: Path):
    """A process without a GPU: nsys exports its ranges, and the reader says what is missing."""
    nsys = find_nsys()
    assert nsys is not None
    pytest.importorskip("nvtx")
    script = tmp_path / "ranges.py"
    script.write_text("import nvtx\nwith nvtx.annotate('forward'):\n    sum(range(1000))\n")
    report = tmp_path / "report.nsys-rep"
    command = [nsys, "profile", "-t", "nvtx", "--sample=none", "--cpuctxsw=none", "-f", "true", "-o", report]
    done = subprocess.run([*command, sys.executable, script], capture_output=True, text=True, check=False)
    if not report.exists():
        pytest.skip(f"nsys records nothing here: {done.stderr[-300:] or done.stdout[-300:]}")
    assert "holds no CUDA activity" in refused(report)
    sqlite, folder = tmp_path / "report.sqlite", tmp_path / "report_pqtdir"
    for kind, target in (("sqlite", sqlite), ("parquetdir", folder)):
        export = [nsys, "export", "--type", kind, "--force-overwrite", "true", "-o", target, report]
        subprocess.run(export, capture_output=True, check=True)
        assert "holds no CUDA activity" in refused(target)


@pytest.mark.nsys
def test_a_real_nsys_refuses_garbage(tmp_path: Path):
    path = tmp_path / "report.nsys-rep"
    for content in (b"", b"NSYS garbage" * 100):
        path.write_bytes(content)
        assert "nsys cannot export" in refused(path)
