"""Rows of a capture that cannot be as they stand: each kind is planted, found, and counted."""

import gzip
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from stepscope.core.answer import Finding
from stepscope.traces.captures.attribution import attribute
from stepscope.traces.captures.checks import check_trace
from stepscope.traces.captures.digest import read_trace
from stepscope.traces.captures.summary import TraceSummary
from tests.captures import (
    CALLS,
    KERNELS,
    RANGES,
    STRINGS,
    Capture,
    Tables,
    nsys_tables,
    training_steps,
    write_kineto,
    write_sqlite,
)

DATA = Path(__file__).parents[2] / "data"


def findings(path: Path) -> dict[str, Finding]:
    attribution = attribute(read_trace(path))
    attribution.self_check()
    return {finding.kind: finding for finding in check_trace(TraceSummary(attribution=attribution, run=None))}


def of_tables(tables: Tables, folder: Path) -> dict[str, Finding]:
    return findings(write_sqlite(tables, folder / "t.sqlite"))


def test_kernels_that_end_before_they_begin(tmp_path: Path):
    tables = nsys_tables(training_steps())
    tables[KERNELS][3]["end"] = tables[KERNELS][3]["start"] - 1
    tables[RANGES][0]["end"] = 0
    found = of_tables(tables, tmp_path)["ends-before-begin"]
    assert found.severity == "error"  # one of 36 rows
    assert found.evidence == {"kernels, copies and fills": 1, "ranges": 1, "share": 1 / 36}
    assert "count as 0 ns (kernels, copies and fills: 1; ranges: 1)" in found.sentence


def test_a_range_that_ends_before_it_begins_costs_its_place_alone(tmp_path: Path):
    capture = training_steps()
    capture.ranges[0]["end"] = capture.ranges[0]["start"] - 1
    found = findings(write_kineto(capture, tmp_path / "t.json"))["ends-before-begin"]
    assert (found.severity, found.evidence) == ("warning", {"ranges": 1, "share": 0.0})


def test_strings_that_are_gone(tmp_path: Path):
    tables = nsys_tables(training_steps())
    tables[STRINGS] = [{"id": 10_000, "value": "left"}]
    found = of_tables(tables, tmp_path)["names-missing"]
    assert found.severity == "error"
    assert found.evidence == {"calls": 36, "kernels, copies and fills": 34, "share": 34 / 36}


def test_correlation_ids_that_repeat(tmp_path: Path):
    """Two kernels of two launches with one id: both go to the later launch."""
    tables = nsys_tables(training_steps())
    for table in (KERNELS, CALLS):
        tables[table][4]["correlationId"] = tables[table][5]["correlationId"]
    found = of_tables(tables, tmp_path)["correlation-repeats"]
    assert found.severity == "error"
    assert {name: found.evidence[name] for name in ("kernels", "ids")} == {"kernels": 2, "ids": 1}


@pytest.mark.parametrize("call", ["cudaGraphLaunch", "cudaLaunchCooperativeKernelMultiDevice"])
def test_launches_of_many_kernels_share_an_id_rightly(tmp_path: Path, call: str):
    capture = Capture()
    capture.range("forward", 0, 9000)
    capture.kernel(100, 10, correlation=5, call=call)
    capture.kernel(120, 10, correlation=5, call=None)
    for spelling in (write_kineto(capture, tmp_path / "t.json"), write_sqlite(nsys_tables(capture), tmp_path / "t.db")):
        assert "correlation-repeats" not in findings(spelling)


def test_copies_may_be_split(tmp_path: Path):
    capture = training_steps()
    copy = next(row for row in capture.launched if row["kind"] == "memcpy")
    capture.launched.append({**copy, "start": copy["end"], "end": copy["end"] + 5})
    assert "correlation-repeats" not in findings(write_kineto(capture, tmp_path / "t.json"))


def test_an_export_without_ranges_says_what_cannot_be_told(tmp_path: Path):
    tables = nsys_tables(training_steps())
    del tables[RANGES]
    found = of_tables(tables, tmp_path)["ranges-missing"]
    assert found.severity == "warning" and "holds no NVTX ranges" in found.sentence
    for (text, said), name in zip(
        (("aten::mm, op_id = 3", "all of PyTorch's operators"), ("nccl", "None of the 1 NVTX ranges")),
        "ab",
        strict=True,
    ):
        capture = training_steps()
        capture.ranges = []
        capture.range(text, 0, 10**7)
        found = findings(write_sqlite(nsys_tables(capture), tmp_path / f"{name}.sqlite"))["ranges-missing"]
        assert said in found.sentence


def test_a_real_export_without_its_strings(tmp_path: Path):
    export = tmp_path / "t.sqlite"
    export.write_bytes(gzip.decompress((DATA / "nsys_train.sqlite.gz").read_bytes()))
    assert not {"names-missing", "ends-before-begin", "correlation-repeats", "ranges-missing"} & set(findings(export))
    with closing(sqlite3.connect(export)) as connection, connection:
        connection.execute("DELETE FROM StringIds")
    assert findings(export)["names-missing"].severity == "error"
