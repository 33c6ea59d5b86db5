"""The large traces that benchmarks/trace.py makes: consistent tiles of a small one."""

import gzip
import json
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks.kineto_tiles import lean, tile_kineto
from benchmarks.nsys_tiles import nested_ranges, tile_nsys

KINETO = """\
{
  "schemaVersion": 1,
  "traceEvents": [
  {
    "ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "pid": 9, "tid": 9,
    "ts": 1000.250, "dur": 99.500,
    "args": {
      "External id": 1,"Record function id": 0, "Ev Idx": 0
    }
  },
  {
    "ph": "X", "cat": "cpu_op", "name": "aten::mm, \\"ts\\": 7", "pid": 9, "tid": 9,
    "ts": 1001.000, "dur": 20.000,
    "args": {
      "External id": 2,"Sequence number": 5, "Fwd thread id": 0, "Input Dims": [[4, 8], []], "Ev Idx": 1
    }
  },
  {
    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9,
    "ts": 1002.000, "dur": 3.000,
    "args": {
      "External id": 2,      "cbid": 211, "correlation": 40
    }
  },
  {
    "ph": "s", "id": 40, "pid": 9, "tid": 9, "ts": 1002.000,
    "cat": "ac2g", "name": "ac2g"
  },
  {
    "ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7,
    "ts": 1010.125, "dur": 8.000,
    "args": {
      "External id": 2,      "queued": 0, "device": 0, "stream": 7, "correlation": 40,      "warps per SM": 9.5
    }
  },
  {
    "ph": "f", "id": 40, "pid": 0, "tid": 7, "ts": 1010.125,
    "cat": "ac2g", "name": "ac2g", "bp": "e"
  },
  {
    "ph": "X", "cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "pid": 9, "tid": 9,
    "ts": 1030.000, "dur": 3.000,
    "args": {
      "External id": 0,      "cbid": 165, "correlation": 0
    }
  },
  {
    "name": "process_name", "ph": "M", "ts": 990.000, "pid": 9, "tid": 0,
    "args": {
      "name": "python3"
    }
  },
  {
    "ph": "X", "cat": "Trace", "ts": 990.000, "dur": 120.000,
    "pid": "Spans", "tid": "PyTorch Profiler",
    "name": "PyTorch Profiler (0)",
    "args": {
      "Op count": 0
    }
  },
  {
    "name": "Record Window End", "ph": "i", "s": "g",
    "pid": "", "tid": "", "ts": 1110.000
  }
  ],
  "traceName": "trace.json"
}"""


@pytest.fixture
def kineto(tmp_path: Path) -> Path:
    path = tmp_path / "capture.json.gz"
    path.write_bytes(gzip.compress(KINETO.encode()))
    return path


def test_one_kineto_tile_is_the_capture_itself(kineto: Path, tmp_path: Path):
    made = tile_kineto(kineto, tmp_path / "one.json", 1)
    assert (tmp_path / "one.json").read_text() == KINETO
    assert (made.tiles, made.events, made.kernels) == (1, 10, 1)


def test_kineto_tiles_multiply_and_stay_apart(kineto: Path, tmp_path: Path):
    made = tile_kineto(kineto, tmp_path / "many.json", 20_000)
    events = json.loads((tmp_path / "many.json").read_text())["traceEvents"]
    n = made.tiles
    assert n > 5 and abs(made.bytes - 20_000) < 2000
    assert len(events) == made.events == 7 * n + 3
    kinds = Counter(event.get("cat") for event in events)
    assert kinds["kernel"] == made.kernels == n and kinds["Trace"] == 1

    steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
    assert [step["name"] for step in steps] == [f"ProfilerStep#{3 + 4 * k}" for k in range(n)]
    for before, after in pairwise(steps):
        assert before["ts"] + before["dur"] < after["ts"]
        assert before["dur"] == after["dur"]

    def of(name: str) -> list[dict]:
        return [event for event in events if event["name"] == name]

    kernels, launches, ops = of("gemm"), of("cudaLaunchKernel"), of('aten::mm, "ts": 7')
    correlations = [kernel["args"]["correlation"] for kernel in kernels]
    assert len(set(correlations)) == n
    assert correlations == [launch["args"]["correlation"] for launch in launches]
    assert correlations == [event["id"] for event in events if event["ph"] == "s"]
    assert correlations == [event["id"] for event in events if event["ph"] == "f"]
    externals = [op["args"]["External id"] for op in ops]
    assert len(set(externals)) == n and externals == [kernel["args"]["External id"] for kernel in kernels]
    assert len({op["args"]["Sequence number"] for op in ops}) == n
    assert {sync["args"]["correlation"] for sync in of("cudaDeviceSynchronize")} == {0}

    last = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X" and event["cat"] != "Trace")
    (span,) = of("PyTorch Profiler (0)")
    assert span["ts"] + span["dur"] == of("Record Window End")[0]["ts"] == pytest.approx(last + 10.25)


def test_a_lean_event_keeps_what_joins(kineto: Path, tmp_path: Path):
    tile_kineto(kineto, tmp_path / "lean.json", 1, drop_arguments=True)
    events = {event["name"]: event for event in json.loads((tmp_path / "lean.json").read_text())["traceEvents"]}
    assert events["gemm"]["args"] == {"External id": 2, "device": 0, "stream": 7, "correlation": 40}
    op = events['aten::mm, "ts": 7']["args"]
    assert op == {"External id": 2, "Sequence number": 5, "Fwd thread id": 0, "Ev Idx": 1}
    assert lean('{"cat": "ac2g"}') == '{"cat": "ac2g"}'


def test_text_that_is_not_kinetos_is_refused(tmp_path: Path):
    (tmp_path / "compact.json").write_text('{"traceEvents":[]}')
    with pytest.raises(ValueError, match="Kineto"):
        tile_kineto(tmp_path / "compact.json", tmp_path / "out.json", 1)


THREAD, PROCESS = (5 << 24) + 77, 5 << 24


@pytest.fixture
def nsys(tmp_path: Path) -> Path:
    path = tmp_path / "capture.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.executescript(
            """
            CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL
                (start INTEGER, end INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER,
                 demangledName INTEGER, shortName INTEGER, gridId INTEGER);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME
                (start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER);
            CREATE TABLE NVTX_EVENTS
                (start INTEGER, end INTEGER, eventType INTEGER, rangeId INTEGER, text TEXT, globalTid INTEGER,
                 textId INTEGER, domainId INTEGER);
            INSERT INTO StringIds VALUES (1, 'gemm'), (2, 'cudaLaunchKernel');
            """
        )
        for i in range(6):
            start = 1000 + 500 * i
            db.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, 2)", (start, start + 50, THREAD, i + 1)
            )
            row = (start + 100, start + 400, i + 1, PROCESS)
            db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 7, ?, ?, 1, 1, 0)", row)
        db.execute("INSERT INTO NVTX_EVENTS VALUES (-9, NULL, 75, NULL, 'domain', NULL, NULL, 1)")
        db.execute("INSERT INTO NVTX_EVENTS VALUES (900, 2200, 59, NULL, 'step_0', ?, NULL, 0)", (THREAD,))
        db.execute("INSERT INTO NVTX_EVENTS VALUES (2300, 4500, 59, NULL, 'step_1', ?, NULL, 0)", (THREAD,))
        db.commit()
    return path


def test_nsys_tiles_multiply_and_stay_apart(nsys: Path, tmp_path: Path):
    target = tmp_path / "many.sqlite"
    one = tile_nsys(nsys, target, 1)
    made = tile_nsys(nsys, target, 5 * one.bytes)
    n = made.tiles
    assert n == 5 and made.kernels == 6 * n and made.runtime_calls == 6 * n and made.ranges == one.ranges * n
    with closing(sqlite3.connect(target)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        joined = db.execute(
            "SELECT k.start - r.start FROM CUPTI_ACTIVITY_KIND_KERNEL k"
            " JOIN CUPTI_ACTIVITY_KIND_RUNTIME r USING (correlationId)"
        ).fetchall()
        assert joined == [(100,)] * (6 * n)
        assert db.execute("SELECT count(*) FROM NVTX_EVENTS WHERE eventType = 75").fetchone() == (1,)
        steps = db.execute("SELECT text, start, end FROM NVTX_EVENTS WHERE text LIKE 'step%' ORDER BY start").fetchall()
        assert [text for text, _, _ in steps] == [f"step_{i}" for i in range(2 * n)]
        assert all(before[2] < after[1] for before, after in pairwise(steps))
        assert {grid for (grid,) in db.execute("SELECT gridId FROM CUPTI_ACTIVITY_KIND_KERNEL")} == {0}


def test_nested_ranges_nest_and_cross_nothing():
    launches = [(1000 + 500 * i, 1050 + 500 * i) for i in range(9)]
    boundaries = [900, 2220, 2300, 4100]
    ranges = list(nested_ranges(launches, boundaries))
    for start, end, _ in ranges:
        assert not [b for b in boundaries if start <= b <= end]
    for start, end, _ in ranges:
        for other_start, other_end, _ in ranges:
            assert end < other_start or other_end < start or (start - other_start) * (end - other_end) <= 0
    assert {name.count(".") for _, _, name in ranges if name.startswith("blocks")} == {1, 2}
    inside = [sum(start < launch < end for start, end, _ in ranges) for launch, _ in launches]
    assert inside == [6] * 9
    assert list(nested_ranges([(100, 200), (210, 300)], [])) == list(nested_ranges([(100, 200)], []))


def test_a_timed_process_tells_its_own_time_and_memory(tmp_path: Path):
    code = "import time; held = bytearray(64_000_000); time.sleep(0.05); print(len(held))"
    files = [str(tmp_path / "output"), str(tmp_path / "errors")]
    wrapper = [sys.executable, "-I", "-S", str(Path(__file__).parents[2] / "benchmarks" / "timed_process.py"), ""]
    done = subprocess.run([*wrapper, *files, sys.executable, "-S", "-c", code], capture_output=True, check=True)
    told = json.loads(done.stdout)
    assert told["exit_code"] == 0 and (tmp_path / "output").read_text() == "64000000\n"
    assert told["sample"]["wall_s"] > 0.05
    assert 64e6 < told["sample"]["peak_bytes"] < 128e6

    failed = subprocess.run([*wrapper, *files, sys.executable, "-S", "-c", "1 / 0"], capture_output=True, check=True)
    assert json.loads(failed.stdout)["exit_code"] == 1
    assert "ZeroDivisionError" in (tmp_path / "errors").read_text()
