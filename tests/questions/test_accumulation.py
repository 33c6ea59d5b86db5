"""Sums of many small numbers: the known results to the last digit, by arithmetic alone, and where they stop."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from stepscope.core.answer import Answer, Point, Table, decode_answer, encode_answer
from stepscope.core.errors import InputError
from stepscope.core.float_formats import FORMATS
from stepscope.questions.accumulation import SUMS, study_accumulation
from tests.command import Done, stepscope

pytestmark = pytest.mark.slow

KNOWN = {
    ("1,000 x 0.01", "fp32", "fp32"): 10.000133514404297,
    ("1,000 x 0.01", "fp16", "fp16"): 9.953125,
    ("1,000 x 0.01", "fp32", "fp16"): 10.00213623046875,
    ("1,000 x 0.01", "bf16", "bf16"): 4.0,
    ("1,000 x 0.01", "fp32", "bf16"): 10.009765625,
    ("10,000 x 0.001", "fp32", "fp32"): 10.000411033630371,
    ("10,000 x 0.001", "fp16", "fp16"): 4.0,
    ("10,000 x 0.001", "bf16", "bf16"): 0.5,
}


def run(*arguments: object) -> Done:
    return stepscope("study", "accumulation", *arguments)


@pytest.fixture(scope="module")
def found() -> Answer:
    return study_accumulation()


def rows(table: Table) -> list[dict[str, Any]]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_the_command_gives_the_known_results_and_reads_them_again(tmp_path: Path):
    written = run("--json")
    assert (written.returncode, written.stderr) == (0, "")
    tables = {table["title"]: table for table in json.loads(written.stdout)["tables"]}
    got = {
        (title, row[0], row[1]): row[3]
        for title, table in tables.items()
        for row in table["rows"]
        if row[2] == "in turn"
    }
    assert {key: got[key] for key in KNOWN} == KNOWN
    kept = tmp_path / "sums.json"
    kept.write_text(written.stdout)
    again = run("--from", str(kept), "--json", "--save", str(tmp_path / "sums.svg"))
    assert again.stdout == written.stdout and (tmp_path / "sums.svg").stat().st_size > 1000


@pytest.mark.long
def test_only_shows_the_tables_named_or_the_sentences(tmp_path: Path):
    kept = tmp_path / "sums.json"
    kept.write_text(run("--json").stdout)
    shorter = run("--from", str(kept), "--only", "1,000 X 0.01")
    assert shorter.stdout.startswith("1,000 x 0.01\n") and "10,000 x" not in shorter.stdout
    sentences = run("--from", str(kept), "--only", "findings")
    assert sentences.stdout.startswith("In bf16 the sum of") and "accumulator" not in sentences.stdout.splitlines()[0]
    wrong = run("--from", str(kept), "--only", "products")
    assert wrong.returncode == 2 and "'1,000 x 0.01', '10,000 x 0.001'" in wrong.stderr
    for arguments, says in (((), "names no table"), (("--json",), "--json writes the whole answer")):
        refused = run("--from", str(kept), "--only", "", *arguments)
        assert (refused.returncode, refused.stdout) == (2, "") and says in refused.stderr


def test_an_addend_beyond_a_format_overflows_there_and_the_answer_is_shown_before_it_is_drawn(tmp_path: Path):
    beyond = run("--addend", "1e39", "--count", "2", "--only", "findings", "--save", str(tmp_path / "sums.svg"))
    assert beyond.stdout.startswith("In fp32 the sum of 2 x 1e+39 overflows after 1 addend.\n")
    assert (beyond.returncode, beyond.stderr) == (2, "stepscope: there is nothing to plot: no figure in any cell\n")


def test_an_answer_of_a_version_that_never_was_is_refused():
    with pytest.raises(InputError, match="of version 0, which does not exist"):
        decode_answer(encode_answer(study_accumulation()).replace('"version": 1', '"version": 0').encode(), "x")


@pytest.mark.parametrize(("count", "each"), SUMS)
@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_arithmetic_alone_gives_the_same_sums(found: Answer, count: int, each: float, name: str):
    """Rounding every partial sum by the format's bits, and no PyTorch: Python's floats hold each sum of two exactly."""
    form = FORMATS[name]
    small, total, last = form.round(each), 0.0, 0
    for i in range(1, count + 1):
        longer = form.round(total + small)
        last = i if longer != total else last
        total = longer
    table = rows(found.table(f"{count:,} x {each}"))
    row = next(r for r in table if (r["accumulator"], r["addend"], r["method"]) == (name, name, "in turn"))
    assert row["result"] == total
    assert row["stopped after"] == (last if last < count else None)


def test_where_a_sum_stops_the_addend_is_half_a_unit_or_less(found: Answer):
    stopped = [finding for finding in found.findings if finding.kind == "sum-stops"]
    assert {finding.evidence["result"] for finding in stopped} == {4.0, 0.5}
    for finding in stopped:
        addend, half_unit = finding.evidence["addend"], finding.evidence["half_unit"]
        assert isinstance(addend, float) and isinstance(half_unit, float) and addend <= half_unit
        assert f"{finding.evidence['stopped_after']:,} addends" in finding.sentence


@pytest.mark.parametrize(("count", "each"), SUMS)
@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_kahan_is_right_to_the_unit_in_the_last_place(found: Answer, count: int, each: float, name: str):
    """Of what was added, which is the addend as the format holds it; pairwise is nearer to it than in turn."""
    form = FORMATS[name]
    true = count * form.round(each)
    table = rows(found.table(f"{count:,} x {each}"))
    result = {r["method"]: r["result"] for r in table if (r["accumulator"], r["addend"]) == (name, name)}
    assert abs(result["Kahan"] - true) <= form.spacing(true)
    assert abs(result["pairwise"] - true) <= abs(result["in turn"] - true)
    # Higham 1993: pairwise, an error of at most log2(n) half spacings of the sum, relative.
    assert abs(result["pairwise"] - true) <= math.ceil(math.log2(count)) * form.epsilon / 2 * true


def test_running_sums_are_the_partial_sums_by_arithmetic_alone(found: Answer):
    table = rows(found.table("Running sum, addend 0.01"))
    assert [row["addends"] for row in table] == [*range(1, 11), 20, 50, 100, 200, 500, 1000]
    formats = {name: (FORMATS[name], FORMATS[name]) for name in ("fp32", "fp16", "bf16")}
    for name, (form, of) in {**formats, "fp32 of fp16": (FORMATS["fp32"], FORMATS["fp16"])}.items():
        total, sums = 0.0, [0.0]
        for _ in range(1000):
            total = form.round(total + of.round(0.01))
            sums.append(total)
        assert [row[f"in {name}"] for row in table] == [sums[row["addends"]] for row in table]
        off = [100 * (row[f"in {name}"] / row["exact sum"] - 1) for row in table]
        assert [row[f"{name} off by, %"] for row in table] == pytest.approx(off, rel=5e-3)
    assert table[-1]["bf16 off by, %"] == -60.0


def test_an_addend_and_a_count_of_ones_own():
    found = study_accumulation(addend=0.5, count=3000)
    assert [table.title for table in found.tables] == ["3,000 x 0.5", "Running sum, addend 0.5"]
    assert found.settings == {"addend": 0.5, "count": 3000} and study_accumulation().settings == {}
    result = {(r["accumulator"], r["addend"]): r["result"] for r in rows(found.tables[0]) if r["method"] == "in turn"}
    # 0.5 is exact everywhere: a sum stops where half a unit in the last place is 0.5, at 2^(bits of the significand).
    assert (result["fp32", "fp32"], result["fp16", "fp16"], result["bf16", "bf16"]) == (1500.0, 1024.0, 128.0)
    assert not any("own rounding" in finding.sentence for finding in found.findings)
    assert [row["addends"] for row in rows(found.tables[1])][-2:] == [2000, 3000]
    assert study_accumulation(count=10).tables[0].title == "10 x 0.01"
    assert study_accumulation(addend=0.25).tables[0].title == "1,000 x 0.25"


def test_sums_that_overflow_or_never_begin_say_so_and_survive_json():
    found = study_accumulation(addend=7000.0, count=30)
    assert any(f.sentence == "In fp16 the sum of 30 x 7000.0 overflows after 10 addends." for f in found.findings)
    lost = [point for point in found.panels[0].points if point.missing]
    assert lost == [Point(line="fp16 + fp16", x=10.0, y=0.0, missing="inf")]
    assert all(math.isfinite(point.y) for point in found.panels[0].points)
    again = decode_answer(encode_answer(found).encode(), "here")
    assert again.panels == found.panels
    small = study_accumulation(addend=1e-9, count=5)
    assert small.findings[0].sentence == "In fp16 the sum of 5 x 1e-09 stays 0: the addend is zero in fp16."
    written = json.loads(encode_answer(small))
    first = {"version", "study", "question", "device", "versions", "settings", "tables", "panels", "findings"}
    assert set(written) == {*first, "date"}, "fields that came later are left out where they say nothing"
    assert set(written["panels"][0]) == {"x_title", "y_title", "points", "x_log", "y_log"}


def test_addends_of_eight_bits_are_widened_first(found: Answer):
    """0.01 in e4m3 is 5 x 2^-9; 1,000 of it make 9.765625, which fp32 adds up without an error."""
    for row in rows(found.table("1,000 x 0.01")):
        if (row["accumulator"], row["addend"]) == ("fp32", "fp8-e4m3"):
            assert row["result"] == 1000 * 5 * 2.0**-9
