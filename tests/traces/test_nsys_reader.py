"""Exports of Nsight Systems, built by hand after its schema."""

import contextlib
import gzip
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope.core.errors import InputError
from stepscope.traces.captures.attribution import attribute
from stepscope.traces.captures.checks import check_trace
from stepscope.traces.captures.digest import read_trace
from stepscope.traces.captures.summary import TraceSummary
from stepscope.traces.readers import nsys_tables
from stepscope.traces.table import DETAIL_SCHEMA, Damage, TraceTable
from tests.captures import (
    AUTOGRAD,
    CALLS,
    COPIES,
    GEMM,
    GPUS,
    GRAPHS,
    KERNELS,
    MAIN,
    PROCESS,
    RANGES,
    STRINGS,
    Capture,
    Tables,
    global_pid,
    global_tid,
    nvtx,
    training_steps,
    write_parquetdir,
    write_sqlite,
)
from tests.captures import (
    nsys_tables as tables_of,
)
from tests.public import public_capture

MODES = ["sqlite", "parquetdir"]


def read(tables: Tables, folder: Path, mode: str = "sqlite", **options: Any) -> TraceTable:
    """The table of these tables, written in that way."""
    if mode == "sqlite":
        return read_trace(write_sqlite(tables, folder / "report.sqlite"), **options)
    return read_trace(write_parquetdir(tables, folder / "report_pqtdir"), **options)


def refused(path: Path, **options: Any) -> str:
    """The one line that says why."""
    with pytest.raises(InputError) as error:
        read_trace(path, **options)
    message = str(error.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert len(message) < 600
    return message


def one_step() -> Capture:
    """Two kernels in forward, one of them in a module."""
    capture = Capture()
    capture.range("forward", 100, 900)
    capture.range("layers.0", 200, 500)
    capture.kernel(300, 40)
    capture.kernel(600, 50, name="second_kernel")
    return capture


@pytest.mark.parametrize("mode", MODES)
def test_a_step(tmp_path: Path, mode: str):
    table = read(tables_of(one_step()), tmp_path, mode)
    assert table.work.drop(list(DETAIL_SCHEMA)).rows(named=True)[0] == {
        "start_ns": 1300, "duration_ns": 40, "device": 0, "stream": 7, "kind": "kernel", "name": GEMM,
        "process": global_pid(PROCESS), "correlation": 1, "external": None, "graph_node": None,
        "launch_row": 0, "launch_ns": 300, "launch_thread": global_tid(PROCESS, MAIN),
    }  # fmt: skip
    assert table.ranges.select("name", "start_ns", "duration_ns", "process", "thread", "nested").rows() == [
        ("forward", 100, 800, global_pid(PROCESS), global_tid(PROCESS, MAIN), True),
        ("layers.0", 200, 300, global_pid(PROCESS), global_tid(PROCESS, MAIN), True),
    ]
    assert table.devices == {0: "NVIDIA H200"}
    attribution = attribute(table)
    attribution.self_check()
    assert attribution.work.select("phase", "module").rows() == [("forward", "layers.0"), ("forward", "")]


def test_both_exports_give_equal_tables(tmp_path: Path):
    tables = tables_of(training_steps())
    tables[RANGES].append(nvtx("left open", 500_000, None))
    one, other = read(tables, tmp_path, "sqlite"), read(tables, tmp_path, "parquetdir")
    for frame in ("work", "calls", "ranges", "operators", "links"):
        assert getattr(one, frame).equals(getattr(other, frame), null_equal=True), frame
    assert (one.devices, one.other, one.recorder) == (other.devices, other.other, other.recorder)


@pytest.mark.parametrize("mode", MODES)
def test_two_processes_with_the_same_correlation_ids(tmp_path: Path, mode: str):
    """[12] Joined by the id alone, each kernel would be counted twice, and half would go to strangers' phases."""
    capture = Capture()
    for process, phase, duration in ((10, "forward", 100), (11, "backward", 1000)):
        capture.range(phase, 0, 10_000, process=process, thread=process)
        for number in range(5):
            at = 100 * number + process
            capture.kernel(at, duration, process=process, thread=process, correlation=number + 1, device=process - 10)
    attribution = attribute(read(tables_of(capture), tmp_path, mode))
    attribution.self_check()
    by_phase = attribution.work.group_by("phase").agg(pl.len(), pl.col("duration_ns").sum()).sort("phase")
    assert by_phase.rows() == [("forward", 5, 500), ("backward", 5, 5000)]
    assert attribution.busy_ns == capture.busy_ns() == 5500


def test_the_process_is_the_thread_without_its_lowest_bits(tmp_path: Path):
    """Threads count up to 2**24 - 1; the machine's number stands above the process."""
    capture = Capture()
    last = 2**24 - 1
    capture.range("forward", 0, 900, process=2**24 - 2, thread=last)
    capture.kernel(100, 10, process=2**24 - 2, thread=last)
    capture.kernel(200, 20, process=2**24 - 2, thread=0)
    table = read(tables_of(capture), tmp_path)
    assert table.work["process"].unique().to_list() == [global_pid(2**24 - 2)]
    assert table.work["launch_thread"].to_list() == [global_tid(2**24 - 2, last), global_tid(2**24 - 2, 0)]
    assert attribute(table).work["phase"].to_list() == ["forward", "forward"]


def test_texts_and_registered_texts(tmp_path: Path):
    tables = tables_of(one_step())
    tables[STRINGS] += [{"id": 900, "value": "backward"}, {"id": 901, "value": "unused"}]
    tables[RANGES] += [
        nvtx(None, 1000, 1100, text_id=900),
        nvtx("text first", 1200, 1300, text_id=901),
        nvtx(None, 1400, 1500, text_id=77_777),
        nvtx(None, 1600, 1700),
        nvtx("", 1800, 1900, text_id=900),
    ]
    names = read(tables, tmp_path).ranges["name"].to_list()
    assert names == ["forward", "layers.0", "backward", "text first", "string 77777", "", "backward"]


def test_ranges_that_start_and_end_on_different_threads(tmp_path: Path):
    """Type 60: they hold for the process, and are no one's stack."""
    capture = Capture()
    capture.kernel(300, 10, thread=AUTOGRAD)
    capture.kernel(600, 20, thread=AUTOGRAD)
    tables = tables_of(capture)
    tables[RANGES] = [
        nvtx("backward", 100, 400, kind=60) | {"endGlobalTid": global_tid(PROCESS, AUTOGRAD)},
        nvtx("layers.0", 200, 350, kind=60, thread=AUTOGRAD) | {"endGlobalTid": None},
        nvtx("a mark", 5, None, kind=34) | {"endGlobalTid": None},
    ]
    table = read(tables, tmp_path)
    assert table.ranges["nested"].to_list() == [False, False]
    assert table.other == {"NVTX marks and others": 1}
    attribution = attribute(table)
    attribution.self_check()
    assert attribution.work.select("phase", "ranged").rows() == [("backward", True), (None, False)]


def test_a_range_left_open_lasts_to_the_end(tmp_path: Path):
    """Even if nothing but launches was recorded after it began."""
    capture = Capture()
    capture.kernel(300, 10)
    capture.kernel(60_000, 20)
    tables = tables_of(capture)
    tables[RANGES] = [nvtx("forward", 100, None), nvtx("layers.0", 200, 250), nvtx("backward", 50_000, None)]
    attribution = attribute(read(tables, tmp_path))
    assert attribution.work["phase"].to_list() == ["forward", "backward"]
    assert attribution.table.ranges["duration_ns"].min() == 50


@pytest.mark.parametrize("level", ["graph", "node"])
def test_graphs(tmp_path: Path, level: str):
    """[14] Recorded as a whole or by their nodes, their time is the launch's."""
    capture = one_step()
    capture.calls.append(
        {"name": "cudaGraphLaunch", "start": 700, "end": 710, "thread": MAIN, "process": PROCESS, "correlation": 50}
    )
    tables = tables_of(capture)
    shared = {"deviceId": 0, "streamId": 7, "correlationId": 50, "globalPid": global_pid(PROCESS)}
    if level == "graph":
        tables[GRAPHS] = [{"start": 2000, "end": 2300, "graphId": 4, **shared}]
    else:
        names = {"demangledName": 1, "shortName": 1}
        tables[KERNELS] += [
            {"start": 2000 + at, "end": 2100 + at, **shared, **names, "graphNodeId": 9 + at} for at in (0, 100, 200)
        ]
    table = read(tables, tmp_path)
    graph = table.work.filter(pl.col("correlation") == 50)
    assert graph["launch_ns"].unique().to_list() == [700]
    assert graph["duration_ns"].sum() == 300
    assert graph["kind"].unique().to_list() == ["graph" if level == "graph" else "kernel"]
    assert graph["graph_node"].to_list() == ([None] if level == "graph" else [9, 109, 209])
    attribution = attribute(table)
    attribution.self_check()
    assert attribution.work["phase"].unique().to_list() == ["forward"]


def test_copies_and_fills(tmp_path: Path):
    capture = one_step()
    capture.kernel(700, 5, kind="memcpy", call="cudaMemcpyAsync")
    capture.kernel(720, 6, kind="memset", call="cudaMemsetAsync")
    tables = tables_of(capture)
    tables[COPIES] += [{**tables[COPIES][0], "copyKind": kind} for kind in (2, 8, 10, 99, None)]
    names = read(tables, tmp_path).work["name"].to_list()
    assert names[2:] == ["Memcpy HtoD", "Memcpy DtoH", "Memcpy DtoD", "Memcpy PtoP"] + ["Memcpy other"] * 2 + ["Memset"]


def test_the_bandwidth_of_copies(tmp_path: Path):
    capture = one_step()
    capture.kernel(700, 5, kind="memcpy", call="cudaMemcpyAsync")
    tables = tables_of(capture)
    tables[COPIES][0]["bytes"] = 4000
    counters = read(tables, tmp_path).counters
    assert counters.select("start_ns", "device", "value").rows() == [(1700, 0, 800_000_000_000), (1705, 0, 0)]
    assert counters["name"].unique().to_list() == ["copy bandwidth, bytes/s"]


def test_what_is_told_of_kernels_and_copies(tmp_path: Path):
    capture = one_step()
    capture.kernel(700, 5, kind="memcpy", call="cudaMemcpyAsync")
    capture.kernel(720, 6, kind="memset", call="cudaMemsetAsync")
    tables = tables_of(capture)
    sizes = {"gridX": 2, "gridY": 3, "gridZ": 1, "blockX": 128, "blockY": 1, "blockZ": 1, "registersPerThread": 40}
    tables[KERNELS] = [{**row, **sizes} for row in tables[KERNELS]]
    tables[KERNELS][1] |= {"gridY": None, "registersPerThread": -1}
    tables[COPIES] = [{**row, "bytes": 4096, "srcKind": 0, "dstKind": 2} for row in tables[COPIES]]
    tables[COPIES] += [{**tables[COPIES][0], "bytes": -5, "srcKind": 99}]
    assert read(tables, tmp_path).work.select(list(DETAIL_SCHEMA)).rows() == [
        (None, None, "[2, 3, 1]", "[128, 1, 1]", 40, None),
        (None, None, None, "[128, 1, 1]", None, None),
        (4096, "Pageable -> Device", None, None, None, None),
        (None, None, None, None, None, None),
        (None, None, None, None, None, None),
    ]


OPTIONAL = [
    (KERNELS, "deviceId"), (KERNELS, "streamId"), (KERNELS, "correlationId"), (KERNELS, "globalPid"),
    (KERNELS, "graphNodeId"), (KERNELS, "demangledName"), (RANGES, "text"), (RANGES, "textId"), (CALLS, "nameId"),
    (CALLS, "correlationId"), (GPUS, "cuDevice"), (GPUS, "name"),
]  # fmt: skip


@pytest.mark.parametrize(("table", "column"), OPTIONAL)
@pytest.mark.parametrize("absent", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_optional_columns_absent_or_null(tmp_path: Path, table: str, column: str, absent: bool, mode: str):
    tables = tables_of(one_step())
    for row in tables[table]:
        if absent:
            row.pop(column)
        else:
            row[column] = None
    attribution = attribute(read(tables, tmp_path, mode))
    attribution.self_check()
    assert attribution.busy_ns == 90
    if column in ("deviceId", "streamId"):
        assert attribution.work[column.removesuffix("Id")].to_list() == [-1, -1]
    if column in ("graphNodeId", "globalPid", "deviceId"):
        assert attribution.unattributed_ns == 0


@pytest.mark.parametrize("absent", [STRINGS, CALLS, GPUS])
def test_tables_absent(tmp_path: Path, absent: str):
    """Without launches nothing is attributed, and nothing is lost."""
    tables = tables_of(one_step())
    del tables[absent]
    attribution = attribute(read(tables, tmp_path))
    attribution.self_check()
    assert attribution.busy_ns == 90
    assert attribution.unattributed_ns == (90 if absent == CALLS else 0)


def test_rows_without_a_time_are_counted(tmp_path: Path):
    tables = tables_of(one_step())
    tables[KERNELS].append({**tables[KERNELS][0], "start": None})
    tables[KERNELS].append({**tables[KERNELS][0], "end": None})
    tables[CALLS].append({**tables[CALLS][0], "end": None})
    tables[RANGES].append({**tables[RANGES][0], "start": None})
    table = read(tables, tmp_path)
    assert (table.work.height, table.calls.height, table.ranges.height) == (2, 2, 2)
    assert table.other == {"rows without a time": 4}


def test_times_before_zero_are_times(tmp_path: Path):
    """The clock starts with the capture, and libraries announce themselves before."""
    tables = tables_of(one_step())
    tables[RANGES].append(nvtx("early", -769_341_066, -1))
    tables[RANGES].append(nvtx("earlier", -1, 5))
    table = read(tables, tmp_path)
    assert table.ranges.select("start_ns", "duration_ns").rows()[2:] == [(-769_341_066, 769_341_065), (-1, 6)]


def test_what_ends_before_it_begins_lasts_nothing(tmp_path: Path):
    tables = tables_of(one_step())
    tables[KERNELS][0]["end"] = tables[KERNELS][0]["start"] - 50
    tables[RANGES].append(nvtx("backwards", 500, 400))
    table = read(tables, tmp_path)
    assert table.work["duration_ns"].to_list() == [0, 50]
    assert table.ranges["duration_ns"].to_list() == [800, 300, 0]
    attribute(table).self_check()


def test_hostile_names(tmp_path: Path):
    capture = one_step()
    names = ["\x1b[2J\nname", "'; DROP TABLE StringIds; --", "x" * 70_000, "\u202e", "forward\x00tail"]
    for at, name in enumerate(names):
        capture.kernel(700 + at, 1, name=name)
        capture.range(name, 700 + at, 701 + at)
    attribution = attribute(read(tables_of(capture), tmp_path))
    attribution.self_check()
    assert attribution.work["name"].to_list()[2:] == names
    assert attribution.table.ranges["name"].to_list()[2:] == names


def test_names_that_are_no_utf8(tmp_path: Path):
    path = write_sqlite(tables_of(one_step()), tmp_path / "report.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE {STRINGS} SET value = CAST(x'63ff6665' AS TEXT) WHERE value = 'second_kernel'")
        connection.execute(f"UPDATE {RANGES} SET text = CAST(x'ff' AS TEXT) WHERE text = 'layers.0'")
        connection.execute('CREATE TABLE "t\udcff" (a)'.encode("utf-8", "surrogateescape").decode("latin-1"))
    connection.close()
    table = read_trace(path)
    assert table.work["name"].to_list()[1] == "c�fe"
    assert table.ranges["name"].to_list() == ["forward", "�"]


def test_sparse_and_batched_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ids of strings are row numbers, far apart; long tables come in pieces."""
    tables = tables_of(training_steps())
    expected = read(tables, tmp_path)
    for number, row in enumerate(tables[STRINGS]):
        for kernel in tables[KERNELS]:
            for column in ("demangledName", "shortName"):
                if kernel[column] == row["id"]:
                    kernel[column] = -(10**15) * (number + 1)
        for call in tables[CALLS]:
            if call["nameId"] == row["id"]:
                call["nameId"] = -(10**15) * (number + 1)
        row["id"] = -(10**15) * (number + 1)
    monkeypatch.setattr(nsys_tables, "BATCH_ROWS", 7)
    path = write_sqlite(tables, tmp_path / "sparse.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE {KERNELS} SET rowid = rowid * 1000000007")
    connection.close()
    table = read_trace(path)
    assert table.work.equals(expected.work, null_equal=True)
    assert table.calls.equals(expected.calls, null_equal=True)
    assert table.ranges.equals(expected.ranges, null_equal=True)


@pytest.mark.parametrize("wal", [False, True])
def test_the_input_is_not_touched(tmp_path: Path, wal: bool):
    folder = tmp_path / "read only"
    folder.mkdir()
    path = write_sqlite(tables_of(one_step()), folder / "50% report?#.sqlite")
    if wal:
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
        connection.close()
    before, stamp = path.read_bytes(), path.stat().st_mtime_ns
    path.chmod(0o444)
    folder.chmod(0o555)
    try:
        assert read_trace(path).work.height == 2
    finally:
        folder.chmod(0o755)
    assert path.read_bytes() == before
    assert path.stat().st_mtime_ns == stamp
    assert list(folder.iterdir()) == [path]


def test_an_export_still_being_written_is_refused(tmp_path: Path):
    """What stands in the log beside it would be missing, without an error."""
    path = write_sqlite(tables_of(one_step()), tmp_path / "report.sqlite")
    writer = sqlite3.connect(path)
    writer.execute("PRAGMA journal_mode=WAL")
    writer.execute(f"DELETE FROM {KERNELS} WHERE correlationId = 1")
    writer.commit()
    assert "report.sqlite-wal lies beside it" in refused(path)
    writer.close()
    assert read_trace(path).work.height == 1
    (tmp_path / "report.sqlite-journal").write_bytes(b"\xd9\xd5\x05\xf9 half written")
    assert "journal" in refused(path)


def test_other_databases_are_refused(tmp_path: Path):
    path = write_sqlite({"albums": [{"title": 1}]}, tmp_path / "music.sqlite")
    assert "not an export of Nsight Systems" in refused(path)
    empty = tmp_path / "empty.sqlite"
    with sqlite3.connect(empty) as connection:
        connection.execute("CREATE TABLE t (a)")
        connection.execute("DROP TABLE t")
    connection.close()
    assert "not an export of Nsight Systems" in refused(empty)


def test_an_export_without_cuda_is_refused(tmp_path: Path):
    tables = tables_of(one_step())
    for table in (KERNELS, CALLS):
        del tables[table]
    path = write_sqlite(tables, tmp_path / "report.sqlite")
    assert "holds no CUDA activity" in refused(path)
    assert "--trace=cuda" in refused(path)


DIAGNOSTICS = "DIAGNOSTIC_EVENT"


def remark(text: str, severity: int = 2) -> dict[str, Any]:
    return {"timestamp": 1, "timestampType": 2, "source": 3, "severity": severity, "text": text, "globalPid": 1}


def test_what_nsys_says_of_an_export_without_cuda_stands_in_place_of_advice(tmp_path: Path):
    tables = tables_of(one_step())
    for table in (KERNELS, CALLS):
        del tables[table]
    tables["META_DATA_CAPTURE"] = [{"name": "PROCESS_0:COLLECT_CUDA_TRACE", "value": "true"}]
    assert "--trace=cuda" not in refused(write_sqlite(tables, tmp_path / "asked.sqlite"))
    tables[DIAGNOSTICS] = [remark("Started.", 1), remark("No NVTX events."), remark("No CUDA events collected")]
    said = refused(write_sqlite(tables, tmp_path / "told.sqlite"))
    assert said.endswith("holds no CUDA activity: nsys says: No CUDA events collected.")
    tables[DIAGNOSTICS] = [remark("The target\nended.", 3)]
    assert refused(write_sqlite(tables, tmp_path / "other.sqlite")).endswith("nsys says: The target ended.")


@pytest.mark.parametrize("mode", MODES)
def test_what_nsys_warns_of_is_said_and_advice_that_was_followed_is_not(tmp_path: Path, mode: str):
    tables = tables_of(one_step())
    del tables[RANGES]
    tables["META_DATA_CAPTURE"] = [{"name": "PROCESS_0:COLLECT_NVTX_TRACE", "value": "true"}]
    tables[DIAGNOSTICS] = [remark("Fine.", 1), *[remark("Not all CUDA events might have been collected.")] * 2]
    summary = TraceSummary(attribution=attribute(read(tables, tmp_path, mode)), run=None)
    found = {finding.kind: finding for finding in check_trace(summary)}
    assert '"Not all CUDA events might have been collected."' in found["profiler-warns"].sentence
    assert (found["profiler-warns"].severity, found["profiler-warns"].evidence) == ("warning", {"remarks": 1})
    assert found["ranges-missing"].remedy == "name the phases with torch.cuda.nvtx.range"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", [str.upper, str.lower])
def test_tables_and_columns_in_another_case(tmp_path: Path, case: Callable[[str], str], mode: str):
    plain = read(tables_of(one_step()), tmp_path, mode)
    tables = {case(table): [{case(name): value for name, value in row.items()} for row in rows]
              for table, rows in tables_of(one_step()).items()}  # fmt: skip
    path = tmp_path / "cased"
    if mode == "sqlite":
        with contextlib.closing(sqlite3.connect(path)) as database, database:
            for table, rows in tables.items():
                database.execute(f"CREATE TABLE {table} ({', '.join(rows[0])})")
                holes = ", ".join("?" for _ in rows[0])
                database.executemany(f"INSERT INTO {table} VALUES ({holes})", [tuple(row.values()) for row in rows])
    else:
        path.mkdir()
        for table, rows in tables.items():
            pl.DataFrame(rows).write_parquet(path / f"{table}.parquet")
    cased = read_trace(path)
    assert cased.work.drop("name").equals(plain.work.drop("name")) and cased.devices == plain.devices
    assert cased.work["name"].to_list() == [GEMM, "second_kernel"]
    assert cased.ranges["name"].to_list() == plain.ranges["name"].to_list()


@pytest.mark.parametrize(
    ("demangled", "short", "mangled", "names"),
    [
        ([1, 1], None, None, ["long", "long"]),
        (None, [2, 2], None, ["short", "short"]),
        (None, None, [3, 3], ["_Z4mangled", "_Z4mangled"]),
        ([None, 1], [2, 2], None, ["short", "long"]),
        ([77, 1], [2, 2], [3, 3], ["short", "long"]),
        ([77, None], [None, None], [None, 3], ["string 77", "_Z4mangled"]),
        (["void gemm<1>()", ""], [2, 2], None, ["void gemm<1>()", "short"]),
    ],
)
def test_kernels_are_named_by_the_best_column_there_is(
    tmp_path: Path, demangled: list[Any] | None, short: list[Any] | None, mangled: list[Any] | None, names: list[str]
):
    tables = tables_of(one_step())
    said = {"demangledName": demangled, "shortName": short, "mangledName": mangled}
    for n, row in enumerate(tables[KERNELS]):
        for name in ("demangledName", "shortName"):
            del row[name]
        row.update({name: values[n] for name, values in said.items() if values is not None})
    texts = [{"id": n, "value": text} for n, text in ((1, "long"), (2, "short"), (3, "_Z4mangled"))]
    tables[STRINGS] = texts + [row for row in tables[STRINGS] if row["id"] > 3]
    for row in tables[CALLS]:
        row["nameId"] = "cudaLaunchKernel_v7000"  # a column of texts, where others hold ids
    table = read(tables, tmp_path)
    assert table.work["name"].to_list() == names
    assert table.calls["name"].to_list() == ["cudaLaunchKernel_v7000"] * 2
    assert table.damage.nameless == ({"kernels, copies and fills": 1} if "string 77" in names else {})


@pytest.mark.parametrize("mode", MODES)
def test_an_export_without_ranges_is_read(tmp_path: Path, mode: str):
    tables = tables_of(one_step())
    del tables[RANGES]
    attribution = attribute(read(tables, tmp_path, mode))
    attribution.self_check()
    assert attribution.unattributed_ns == attribution.busy_ns == 90


def test_a_packed_export_is_read_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    whole = write_sqlite(tables_of(training_steps()), tmp_path / "whole.sqlite")
    packed = tmp_path / "report.sqlite.gz"
    packed.write_bytes(gzip.compress(whole.read_bytes()))
    assert read_trace(packed).work.equals(read_trace(whole).work)
    packed.write_bytes(packed.read_bytes()[:-100])
    assert "truncated" in refused(packed)
    packed.write_bytes(gzip.compress(whole.read_bytes()[:-4096]))
    assert "truncated" in refused(packed)
    packed.write_bytes(gzip.compress(whole.read_bytes() + bytes(1 << 27)))
    assert "bomb" in refused(packed)
    assert not list((tmp_path / "temporary").iterdir())


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    for name in ("report.sqlite", "report.nsys-rep", "trace.json.gz"):
        (tmp_path / name).write_text(pointer)
        assert refused(tmp_path / name).endswith("this is a Git LFS pointer, not the file: git lfs pull")
    folder = write_parquetdir(tables_of(one_step()), tmp_path / "pq")
    (folder / f"{KERNELS}.parquet").write_text(pointer)
    with pytest.raises(InputError, match=f"{KERNELS}.parquet: this is a Git LFS pointer"):
        read_trace(folder)


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_end_before_they_begin_are_counted(tmp_path: Path, mode: str):
    tables = tables_of(one_step())
    for table, row in ((KERNELS, 1), (CALLS, 0), (RANGES, 1)):
        tables[table][row]["end"] = tables[table][row]["start"] - 3
    tables[RANGES].append(nvtx("a mark", 500, 0, kind=34))
    table = read(tables, tmp_path, mode)
    assert table.damage == Damage(backwards={"calls": 1, "kernels, copies and fills": 1, "ranges": 1})
    assert table.work["duration_ns"].to_list() == [40, 0]
    assert read(tables_of(one_step()), tmp_path / "..", mode).damage == Damage()


@pytest.mark.parametrize("mode", MODES)
def test_names_that_are_gone_are_counted(tmp_path: Path, mode: str):
    """A range whose text stands in its row needs no string."""
    tables = tables_of(one_step())
    tables[RANGES] += [nvtx(None, 1000, 1100, text_id=900), nvtx("layers.1", 1200, 1300, text_id=900)]
    tables[STRINGS] = [row for row in tables[STRINGS] if row["value"] != "second_kernel"]
    table = read(tables, tmp_path, mode)
    assert table.damage == Damage(nameless={"kernels, copies and fills": 1, "ranges": 1})
    assert table.work["name"][1].startswith("string ")


WRITTEN = [
    ("aten::mm, seq = 4, op_id = 7, sizes = [[2, 3], [3, 5]], input_op_ids = [(5,0), (6,0)]",
     ("aten::mm", 4, None, "[[2, 3], [3, 5]]")),
    ("aten::mm, seq = 4, sizes = [[2, 3], []], input_op_ids = []", ("aten::mm", 4, None, "[[2, 3], []]")),
    ("aten::mm, op_id = 123", ("aten::mm", None, None, None)),
    ("aten::add.Tensor, seq = 9", ("aten::add.Tensor", 9, None, None)),
    ("autograd::engine::evaluate_function: XBackward0, op_id = 5",
     ("autograd::engine::evaluate_function: XBackward0", None, None, None)),
    ("autograd::engine::evaluate_function: XBackward0, seq = 6, op_id = 5",
     ("autograd::engine::evaluate_function: XBackward0", 6, 1, None)),
    ("AddmmBackward0, seq = 6, op_id = 5", ("AddmmBackward0", 6, 1, None)),
    ("torch::autograd::AccumulateGrad, op_id = 8", ("torch::autograd::AccumulateGrad", None, None, None)),
    ("FlashAttnFunc, op_id = 9, sizes = [[1]]", ("FlashAttnFunc", None, None, "[[1]]")),
    ("c10d::allreduce_, op_id = 10", ("c10d::allreduce_", None, None, None)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), WRITTEN)
def test_operators_as_emit_nvtx_writes_them(tmp_path: Path, text: str, expected: tuple[Any, ...]):
    capture = one_step()
    capture.range(text, 250, 400)
    table = read(tables_of(capture), tmp_path)
    assert table.operators.select("name", "sequence", "forward_thread", "shapes").rows() == [expected]
    assert table.ranges["name"].to_list() == ["forward", "layers.0"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("backward, op_id = 3", "backward"),
        ("ProfilerStep#3, op_id = 3", "ProfilerStep#3"),
        ("FSDP::pre_forward (layers.0, first), op_id = 3", "FSDP::pre_forward (layers.0, first)"),
        ("epoch 3, seq = many", "epoch 3, seq = many"),
        ("a\nb, op_id = 4", "a\nb"),
    ],
)
def test_ranges_of_the_users_as_emit_nvtx_writes_them(tmp_path: Path, text: str, name: str):
    capture = one_step()
    capture.range("aten::mm, op_id = 1", 250, 400)
    capture.range(text, 5000, 6000)
    table = read(tables_of(capture), tmp_path)
    assert table.ranges["name"].to_list() == ["forward", "layers.0", name]


def test_that_the_cpu_may_not_be_sampled_is_a_note(tmp_path: Path):
    """As nsys warns in most containers; no figure here is of that. A word on CUDA beside it comes first, and warns."""
    sampling = "CPU IP/backtrace sampling not supported, disabling.\nTry the 'nsys status --environment' command."
    switches = "CPU context switch tracing not supported, disabling."
    for others, severity in (([], "note"), (["CUDA events were lost on CPU 3."], "warning")):
        tables = tables_of(one_step())
        tables[DIAGNOSTICS] = [remark(text) for text in (sampling, switches, *others)]
        (tmp_path / severity).mkdir()
        summary = TraceSummary(attribution=attribute(read(tables, tmp_path / severity)), run=None)
        found = {finding.kind: finding for finding in check_trace(summary)}["profiler-warns"]
        assert (found.severity, found.evidence) == (severity, {"remarks": 2 + len(others)})
        assert found.sentence.startswith(f'Nsight Systems itself warns: "{(others or [sampling])[0][:20]}')


def test_ranges_that_hold_no_known_launch_are_not_called_nameless(tmp_path: Path):
    tables = tables_of(one_step())
    for row in tables["CUPTI_ACTIVITY_KIND_RUNTIME"]:
        row["correlationId"] += 100_000
    summary = TraceSummary(attribution=attribute(read(tables, tmp_path)), run=None)
    found = {finding.kind: finding for finding in check_trace(summary)}["ranges-missing"]
    assert found.sentence.startswith("No launch that is known lies in the ")
    assert found.remedy is not None and "--trace=cuda,nvtx" in found.remedy


def test_two_gpus_of_which_emit_nvtx_told_the_operators():
    """A capture of one second out of the middle: of half of its kernels the launch was before it."""
    table = read_trace(public_capture("nsys_ai_h100_2gpu_1s.sqlite.gz"))
    attribution = attribute(table)
    attribution.self_check()
    assert (table.work.height, table.operators.height, table.ranges.height) == (4368, 16546, 236)
    assert {name.split("::")[0] for name in table.ranges["name"].unique()} == {"FSDP"}
    assert attribution.work["operator"].count() > 2000 and table.damage == Damage()
    kinds = {finding.kind for finding in check_trace(TraceSummary(attribution=attribution, run=None))}
    assert {"ranges-missing", "launches-unknown"} <= kinds and "correlation-repeats" not in kinds


def test_rows_that_are_damaged_far_in_are_refused(tmp_path: Path):
    """SQLite comes upon them in the middle of a page of NVTX_EVENTS, while the first rows are already taken."""
    whole = gzip.decompress(public_capture("nsys_ai_h100_2gpu_1s.sqlite.gz").read_bytes())
    path = tmp_path / "report.sqlite"
    path.write_bytes(whole[:1_950_869] + b"\xff" * 200 + whole[1_951_069:])
    assert "malformed" in refused(path)


def test_truncated_databases_are_refused(tmp_path: Path):
    whole = write_sqlite(tables_of(training_steps()), tmp_path / "whole.sqlite").read_bytes()
    path = tmp_path / "report.sqlite"
    for length in (16, 17, 99, 100, 512, 4096, 8192, len(whole) // 2, len(whole) - 1, len(whole) - 4096):
        path.write_bytes(whole[:length])
        refused(path)
    path.write_bytes(whole[:4096] + bytes(len(whole) - 4096))
    refused(path)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1", b"\x00" * 5000])
@pytest.mark.parametrize("table", [STRINGS, KERNELS, RANGES, GPUS])
def test_broken_parquet_is_refused(tmp_path: Path, content: bytes, table: str):
    folder = write_parquetdir(tables_of(one_step()), tmp_path / "pq")
    (folder / f"{table}.parquet").write_bytes(content)
    with pytest.raises(InputError, match="parquet"):
        read_trace(folder)


def test_a_panic_of_polars_is_not_heard(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """The footer is whole, and says where pages lie that are gone."""
    folder = write_parquetdir(tables_of(training_steps(steps=40)), tmp_path / "pq")
    file = folder / f"{KERNELS}.parquet"
    whole = file.read_bytes()
    footer = 8 + int.from_bytes(whole[-8:-4], "little")
    file.write_bytes(whole[:64] + whole[-footer:])
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(folder)
    assert capfd.readouterr() == ("", "")


def test_damage_that_makes_polars_panic_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def panic(_: pl.LazyFrame) -> None:
        raise pl.exceptions.PanicException("assertion failed\nleft == right")

    folder = write_parquetdir(tables_of(one_step()), tmp_path / "pq")
    monkeypatch.setattr(pl.LazyFrame, "collect", panic)
    with pytest.raises(InputError, match=r"cannot be read: assertion failed$"):
        read_trace(folder)


def test_parquet_columns_of_other_types(tmp_path: Path):
    folder = write_parquetdir(tables_of(one_step()), tmp_path / "pq")
    kernels, ranges = folder / f"{KERNELS}.parquet", folder / f"{RANGES}.parquet"
    frame = pl.read_parquet(kernels)
    frame.with_columns(pl.col("start", "end", "globalPid").cast(pl.UInt64)).write_parquet(kernels)
    texts = pl.read_parquet(ranges)
    texts.with_columns(pl.col("text").cast(pl.Categorical())).write_parquet(ranges)
    assert read_trace(folder).ranges["name"].to_list() == ["forward", "layers.0"]
    texts.with_columns(pl.col("globalTid").cast(pl.UInt64) + 2**63).write_parquet(ranges)
    assert read_trace(folder).ranges["thread"].unique().to_list() == [global_tid(PROCESS, MAIN) - 2**63]
    frame.with_columns(pl.lit("noon").alias("start")).write_parquet(kernels)
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(folder)
