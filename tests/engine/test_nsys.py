"""Nsight Systems: its command line and its failures with a stand-in, its reports with a real one."""

import gzip
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from stepscope.core.errors import InputError
from stepscope.core.profilers import find_nsys
from stepscope.core.run_directory import load_run, load_runs
from stepscope.engine import nsys_trace as tool
from stepscope.engine.nsys_trace import Nsys, require_nsys, trace_under_nsys
from stepscope.engine.request import StepRequest, TraceRequest
from stepscope.traces.captures.digest import read_trace
from stepscope.traces.readers.nsys import exported
from tests.app.cli.test_cli import QUICK, run_until, stepscope
from tests.conftest import cache_of_tests, mini
from tests.recording.test_capture import LAYERS, ranges_of_forward

pytestmark = pytest.mark.slow

FEW = ["--no-profile", "--steps", "3"]
VERSION_LINE = "NVIDIA Nsight Systems version 2099.1.1.1-0"

StandIn = Callable[[str], Path]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Makes a program that says it is nsys and then does as told, and has it be the one that is found."""

    def make(script: str) -> Path:
        program = tmp_path / "bin" / "nsys"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{VERSION_LINE}"; exit 0; fi\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv("STEPSCOPE_NSYS", str(program))
        return program

    return make


def test_the_flags_are_those_that_were_seen_to_keep_every_kernel():
    nsys = Nsys(path=Path("/x/nsys"), version="2023.4", importer=None)
    command = tool.profile_command(nsys, Path("/runs/50%/trace"), ["python", "-m", "cell"], cuda=True)
    assert command == [
        "/x/nsys", "profile", "-t", "cuda,nvtx", "--sample=none", "--cpuctxsw=none", "-c", "cudaProfilerApi",
        "--capture-range-end=stop-shutdown", "--cuda-flush-interval=100", "--cuda-graph-trace=node", "-f", "true",
        "-o", "/runs/50%%/trace", "python", "-m", "cell",
    ]  # fmt: skip
    on_a_cpu = tool.profile_command(nsys, Path("trace"), ["python"], cuda=False)
    assert "cudaProfilerApi" not in on_a_cpu and on_a_cpu[2:4] == ["-t", "nvtx"]


@pytest.mark.parametrize(
    ("output", "code", "line"),
    [
        ("Collecting data...\nProcessing [9%]\rProcessing [100%]\nFailed to create '/x.nsys-rep': No space left\n", 1,
         "Failed to create '/x.nsys-rep': No space left"),
        ("Generating '/tmp/a.qdstrm'\nGenerated:\n    /tmp/a.qdstrm\n", 1, "nsys ended with code 1 and no report"),
        ("", 139, "nsys ended with code 139 and no report"),
        ("The agent did not answer.\nhttps://docs.nvidia.com/nsight-systems/UserGuide/index.html#troubleshooting\n", 1,
         "The agent did not answer."),
        ("CUDA error: out of memory\nThe target application returned non-zero exit code 1\n", 1,
         "CUDA error: out of memory"),
    ],
)  # fmt: skip
def test_the_line_that_says_what_failed(output: str, code: int, line: str):
    assert tool.failure_of(output, code) == line


def test_no_nsys_is_one_line_before_anything_is_measured(tmp_path: Path):
    result = stepscope("run", *QUICK, *FEW, "--record", "nsys", "--runs", str(tmp_path / "runs"), STEPSCOPE_NSYS="",
                       PATH=str(Path(sys.executable).parent), HOME=str(tmp_path))  # fmt: skip
    (line,) = result.stderr.strip().splitlines()
    assert result.returncode == 2 and line.startswith("stepscope: no nsys on this machine")
    assert "https://developer.nvidia.com/nsight-systems" in line and "scripts/install-nsys" in line
    assert not (tmp_path / "runs").exists()
    wrong = stepscope(
        "run", *QUICK, *FEW, "--record", "nsys", "--runs", str(tmp_path / "runs"), STEPSCOPE_NSYS="/no/nsys"
    )
    assert wrong.returncode == 2 and "STEPSCOPE_NSYS names /no/nsys, which cannot be run" in wrong.stderr


def test_a_program_that_is_no_nsys_is_refused(stand_in: StandIn):
    program = stand_in("exit 0")
    assert require_nsys().version == "2099.1.1.1-0"
    program.write_text("#!/bin/sh\necho 'cannot open shared object file' >&2; exit 127\n")
    with pytest.raises(InputError, match="no Nsight Systems that works: cannot open shared object file"):
        require_nsys()
    program.write_text("no program at all")
    with pytest.raises(InputError, match="cannot be run"):
        require_nsys()


def test_under_a_watching_tool_a_second_one_is_refused(tmp_path: Path):
    result = stepscope("run", *QUICK, *FEW, "--record", "nsys", "--runs", str(tmp_path), NSYS_PROFILING_SESSION_ID="7")
    assert result.returncode == 2 and "watches this process already: leave out --record nsys" in result.stderr


def test_an_nsys_that_fails_after_the_steps_costs_the_trace_alone(stand_in: StandIn, tmp_path: Path):
    stand_in("echo 'Unable to configure the collection' >&2; exit 1")
    result = stepscope("run", *QUICK, *FEW, "--record", "nsys", "--runs", str(tmp_path / "runs"))
    assert result.returncode == 0, result.stderr
    assert "stepscope: no nsys trace: Unable to configure the collection" in result.stderr.splitlines()
    assert "No nsys trace: Unable to configure the collection." in result.stdout
    (run,), _ = load_runs([tmp_path / "runs"])
    (taken,) = run.evidence.captures
    assert (run.status, taken.tool, taken.artifact) == ("done", "nsys", None) and run.samples["step"].count == 3
    assert taken.failure == "Unable to configure the collection" and taken.tool_version == "2099.1.1.1-0"
    assert [path.name for path in (tmp_path / "runs" / run.id).iterdir()] == ["run.json"]


@pytest.mark.long
def test_an_nsys_that_ends_before_it_began_is_asked_once_more(stand_in: StandIn, tmp_path: Path):
    """As a real one does now and then on a busy machine."""
    stand_in(f"echo once >> {tmp_path}/asked; echo 'The agent did not answer' >&2; exit 1")
    result = stepscope("run", *QUICK, *FEW, "--record", "nsys", "--runs", str(tmp_path / "runs"))
    assert result.returncode == 0 and "no nsys trace: The agent did not answer" in result.stderr
    assert (tmp_path / "asked").read_text() == "once\nonce\n"


@pytest.mark.long
def test_ctrl_c_while_nsys_works_keeps_the_times_and_leaves_no_process(stand_in: StandIn, tmp_path: Path):
    stand_in(f"echo $$ > {tmp_path}/pid; exec cat > /dev/null")  # ends when its stdin does, as the watched process
    process = run_until(("trace nsys",), *QUICK, *FEW, "--record", "nsys", "--runs", str(tmp_path / "runs"))
    deadline = time.monotonic() + 30
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in stderr
    (run,), _ = load_runs([tmp_path / "runs"])
    assert run.status == "done" and run.failure and run.failure.during == "trace nsys"
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()
    assert [path.name for path in (tmp_path / "runs" / run.id).iterdir()] == ["run.json"]


@dataclass(frozen=True)
class Range:
    """A row of NVTX_EVENTS."""

    name: str
    start: int
    end: int
    thread: int

    def within(self, outer: "Range") -> bool:
        return self.thread == outer.thread and outer.start <= self.start and self.end <= outer.end


def ranges_in(sqlite: Path) -> list[Range]:
    query = (
        "SELECT coalesce(text, (SELECT value FROM StringIds WHERE id = textId)), start, end, globalTid"
        " FROM NVTX_EVENTS WHERE eventType = 59 ORDER BY start"
    )
    with closing(sqlite3.connect(sqlite)) as connection:
        return [Range(*row) for row in connection.execute(query)]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of one run with both traces, by a real nsys."""
    out = tmp_path_factory.mktemp("nsys") / "50% of runs"
    result = stepscope("run", *QUICK, *FEW, "--record", "kineto", "--record", "nsys", "--runs", str(out),
                       STEPSCOPE_CACHE=str(cache_of_tests(tmp_path_factory)), SOME_TOKEN="hunter2")  # fmt: skip
    assert result.returncode == 0 and "no nsys trace" not in result.stderr, result.stderr
    (directory,) = out.iterdir()
    return directory


@pytest.mark.nsys
def test_a_run_traced_by_a_real_nsys_keeps_the_report_and_its_export(traced: Path):
    run = load_run(traced)
    assert run.artifacts == {
        "kineto": "trace.kineto.json.gz", "nsys": "trace.nsys.sqlite", "nsys-rep": "trace.nsys-rep",
    }  # fmt: skip
    assert sorted(path.name for path in traced.iterdir()) == sorted(["run.json", *run.artifacts.values()])
    captures = {capture.tool: capture for capture in run.evidence.captures}
    assert captures["nsys"].artifact == "nsys" and captures["nsys"].failure is None
    assert captures["nsys"].steps == 2 and (captures["nsys"].step_s or 0) > 0
    assert captures["nsys"].tool_version == require_nsys().version


@pytest.mark.nsys
def test_ranges_arrive_with_their_names_and_nesting(traced: Path):
    found = ranges_in(traced / "trace.nsys.sqlite")
    steps = [r for r in found if r.name == "step"]
    assert len(steps) == 2  # the traced steps alone: the warm-up before them is silent
    for step in steps:
        inside = [r for r in found if r.within(step)]
        phases = {name: [r for r in inside if r.name == name] for name in ("forward", "backward", "optimizer")}
        assert all(len(one) == 1 for one in phases.values())
        forward, backward = phases["forward"][0], phases["backward"][0]
        names = Counter(r.name for r in inside if r.within(forward) and r != forward)
        assert names == ranges_of_forward()
        for layer in range(LAYERS):
            (module,) = (r for r in inside if r.within(forward) and r.name == f"blocks.{layer}.attention")
            for part in ("attention scores", "softmax", "attention output"):
                assert sum(r.within(module) for r in inside if r.name == part) == 1
        behind = [r for r in inside if r.within(backward)]
        counted = Counter(r.name for r in behind)
        assert counted["gradient accumulation"] == 9 * LAYERS + 3  # the model's parameters
        assert all(counted[name] for name in ranges_of_forward() if name not in ("blocks.0", "blocks.1"))
        assert all(
            any(part.within(r) for r in behind if r.name.endswith(".attention"))
            for part in behind
            if part.name == "softmax"
        )
    assert all(any(r.within(step) for step in steps) for r in found)


@pytest.mark.nsys
def test_both_profilers_agree_on_the_ranges_of_forward(traced: Path):
    with gzip.open(traced / "trace.kineto.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    forwards = [e for e in events if e.get("cat") == "user_annotation" and e["name"] == "forward"]
    kineto = Counter(
        e["name"] for e in events
        if e.get("cat") == "user_annotation" and any(f["ts"] <= e["ts"] < f["ts"] + f["dur"] for f in forwards)
    )  # fmt: skip
    found = ranges_in(traced / "trace.nsys.sqlite")
    nsys = Counter(r.name for r in found if any(r.within(f) for f in found if f.name == "forward"))
    assert nsys == kineto


@pytest.mark.nsys
def test_the_export_tells_nothing_of_the_machine(traced: Path):
    content = (traced / "trace.nsys.sqlite").read_bytes()
    for word in (b"hunter2", b"PATH=", b"HOME=", str(traced).encode()):
        assert word not in content
    # A host's name may be two letters, which stand in any file of numbers: as a value it must not be there.
    with closing(sqlite3.connect(traced / "trace.nsys.sqlite")) as export:
        assert not any(f"'{os.uname().nodename}'" in line for line in export.iterdump())
    # The report does tell it, whatever one does: nsys reads what it can of every process. So it is its owner's alone.
    assert (traced / "trace.nsys-rep").stat().st_mode & 0o077 == 0


@pytest.mark.long
@pytest.mark.nsys
def test_a_stream_recorded_elsewhere_is_imported_where_nsys_is_whole(
    traced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As on a GPU machine with the target part alone: nsys records, finds no importer, and leaves a stream."""
    whole = require_nsys()
    assert whole.importer
    target = tmp_path / "target-linux-x64"
    shutil.copytree(whole.path.resolve().parent, target, symlinks=True, ignore=shutil.ignore_patterns("python", "nvtx"))
    out = tmp_path / "runs"
    result = stepscope("run", *QUICK, *FEW, "--record", "nsys", "--runs", str(out), STEPSCOPE_NSYS=str(target / "nsys"))
    assert result.returncode == 0 and "trace.qdstrm awaits its import" in result.stderr, result.stderr
    (directory,) = out.iterdir()
    before = load_run(directory)
    (capture,) = before.evidence.captures
    assert before.artifacts == {"qdstrm": "trace.qdstrm"} and capture.artifact == "qdstrm" and capture.steps == 2
    written = {path: path.read_bytes() for path in directory.iterdir()}
    monkeypatch.setenv("STEPSCOPE_NSYS", str(target / "nsys"))
    with pytest.raises(InputError, match="read it where Nsight Systems is installed whole"):
        read_trace(directory)

    monkeypatch.setenv("STEPSCOPE_NSYS", str(whole.path))
    with exported(directory / "trace.qdstrm") as export:
        found = Counter(r.name for r in ranges_in(export))
    assert found["step"] == 2 and found["softmax"] > 2 * LAYERS
    with pytest.raises(InputError, match="holds no CUDA activity"):  # made on a CPU, it has ranges alone
        read_trace(directory)
    assert {path: path.read_bytes() for path in directory.iterdir()} == written  # to read is not to write


@pytest.mark.nsys
def test_started_by_hand_every_step_has_its_phases_and_one_pass_has_all(tmp_path: Path):
    nsys = find_nsys()
    assert nsys
    subprocess.run(
        [nsys, "profile", "--trace=cuda,nvtx", "-o", tmp_path / "hand", "--export", "sqlite", sys.executable, "-m",
         "stepscope", "run", *QUICK, *FEW, "--runs", tmp_path / "runs"],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    (run,), _ = load_runs([tmp_path / "runs"])
    (capture,) = run.evidence.captures
    assert (capture.tool, capture.steps, capture.artifact, capture.failure) == ("nvtx", 2, None, None)
    found = ranges_in(tmp_path / "hand.sqlite")
    steps = [r for r in found if r.name == "step"]
    assert len(steps) == 1 + 3 + 2  # warm-up, measured, traced
    with_modules = [any(r.within(step) for r in found if r.name == "blocks.0") for step in steps]
    assert with_modules == [False] * 4 + [True] * 2
    assert Counter(r.name for r in found)["backward"] == 6


@pytest.mark.nsys
def test_what_fails_in_the_watched_process_is_said(tmp_path: Path):
    """It ends without a step, and a report of that is of no use."""
    request = StepRequest(workload=mini(attention="sdpa-cudnn"), device="cpu", trace=TraceRequest(tools=("nsys",)))
    capture, kept = trace_under_nsys(request, require_nsys(), tmp_path, cuda=False)
    assert capture.failure and "sdpa-cudnn does not run on cpu" in capture.failure and capture.artifact is None
    assert kept == {} and not list(tmp_path.iterdir())
