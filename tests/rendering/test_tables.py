"""Tables of runs, to the letter."""

import csv
import io
import json
from typing import Any

import msgspec
import pytest

from stepscope.core.answer import Finding
from stepscope.core.errors import InputError
from stepscope.core.run import Failure, Run
from stepscope.rendering.renderers import BARE, render
from stepscope.runs.fields import FIELDS, VALUES
from stepscope.runs.tables import TableQuery, answer_table, build_table
from tests.conftest import make_run, workload


def at(forward_ms: float, **changes: Any) -> Run:
    """A run whose forward takes this, backward twice, optimizer half."""
    of = workload(**changes)
    values = [forward_ms * 1e-3] * 6
    return make_run(of, forward=values, backward=[2 * v for v in values], optimizer=[v / 2 for v in values])


def ended(status: str, **changes: Any) -> Run:
    return make_run(workload(**changes), status=status, failure=Failure(message="no room", during="warm-up"))


def query(**changes: Any) -> TableQuery:
    return TableQuery(**{"rows": ("model", "seq_len"), **changes})


def render_text(runs: list[Run], wanted: TableQuery, style: str) -> str:
    return render(answer_table(runs, wanted, bare=style in BARE), style)


RUNS = [
    at(8.0, seq_len=1024, dtype="fp32"),
    at(2.0, seq_len=128, dtype="bf16"),
    at(4.0, seq_len=128, dtype="fp32"),
    ended("out-of-memory", seq_len=1024, dtype="bf16"),
    at(40.0, seq_len=128, dtype="fp32", model="small"),
]


def test_precision_comparison_with_speed_up():
    markdown = render_text(RUNS, query(columns=("dtype",), values=("forward-backward",), speedup="fp32"), "markdown")
    assert markdown == (
        "| model | seq_len | fp32 (ms) | bf16 (ms) | bf16 speed-up over fp32 |\n"
        "| --- | --- | ---: | ---: | ---: |\n"
        "| tiny | 128 | 12.00 | 6.00 | 2.00x ± <0.01 |\n"
        "| tiny | 1024 | 24.00 | OOM | - |\n"
        "| small | 128 | 120.00 | - | - |\n\n"
        "The ± of a speed-up: 95 %, of one process each; other processes may differ by more.\n"
    )


def test_model_parameters_forward_backward_with_deviation():
    values = [0.010, 0.012, 0.011, 0.013, 0.009, 0.011]
    run = make_run(workload(model="small"), forward=values, backward=[2 * v for v in values])
    table = build_table(
        [run], query(rows=("model", "parameters"), values=("forward", "backward"), statistic="mean-std")
    )
    assert table.columns == ("model", "parameters", "forward (ms)", "backward (ms)")
    assert table.rows == (("small", "128,625,408", "11.00 ± 1.41", "22.00 ± 2.83"),)


def test_rows_and_columns_come_in_their_natural_order():
    runs = [at(1, seq_len=s, dtype=d) for s in (1024, 128, 512) for d in ("bf16", "fp32")]
    table = build_table(runs, query(rows=("seq_len",), columns=("dtype",)))
    assert [row[0] for row in table.rows] == ["128", "512", "1024"]
    assert table.columns == ("seq_len", "fp32 (ms)", "bf16 (ms)")


def test_a_cell_never_mixes_experiments():
    runs = [at(1.0), at(2.0, compile="default")]
    with pytest.raises(InputError, match=r"2 different runs share the cell 'tiny 16'.*compile.*--where compile=eager"):
        build_table(runs, query())
    assert len(build_table(runs, query(where=(("compile", ("eager",)),))).rows) == 1
    assert build_table(runs, query(columns=("compile",))).columns[2:] == ("eager (ms)", "default (ms)")


def test_of_two_runs_of_one_experiment_the_newest_stands_and_a_note_says_so():
    old = at(1.0)
    new = msgspec.structs.replace(at(3.0), created="2026-02-01T00:00:00.000+00:00", id="newer")
    unfinished = msgspec.structs.replace(at(9.0), created="2026-03-01T00:00:00.000+00:00", status="unfinished")
    table = build_table([new, unfinished, old], query(values=("forward",)))
    assert table.rows == (("tiny", "16", "3.00"),)
    first, second = (line.text for line in table.notes)
    assert first == "1 older run of the same cells left out."
    assert "disagree beyond their intervals: forward takes 3 ms in newer, and 1 ms in" in second


@pytest.mark.parametrize(
    ("status", "text"), [("out-of-memory", "OOM"), ("skipped", "skipped"), ("killed", "killed"), ("failed", "failed")]
)
def test_a_cell_without_a_time_says_why(status: str, text: str):
    assert build_table([ended(status)], query()).rows[0][-1] == text


def test_csv_and_json_lines_hold_figures_as_stored():
    q = query(columns=("dtype",), values=("forward", "mfu_measured"))
    rows = list(csv.DictReader(io.StringIO(render_text(RUNS, q, "csv"))))
    assert len(rows) == 5
    assert rows[0]["forward_median_s"] == "0.004" and rows[0]["dtype"] == "fp32" and rows[0]["forward_samples"] == "6"
    oom = next(row for row in rows if row["status"] == "out-of-memory")
    assert oom["forward_median_s"] == ""
    lines = [json.loads(line) for line in render_text(RUNS, q, "jsonl").splitlines()]
    assert [line["forward_median_s"] for line in lines] == [
        float(row["forward_median_s"]) if row["forward_median_s"] else None for row in rows
    ]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"rows": ("modle",)}, "unknown field 'modle'"),
        ({"values": ("forwards",)}, "unknown value 'forwards'"),
        ({"statistic": "mode"}, "unknown statistic"),
        ({"rows": ()}, "needs rows"),
        ({"rows": ("model", "model")}, "names something twice"),
        ({"values": ()}, "needs a value"),
        ({"speedup": "fp32"}, "name them with --columns"),
        ({"rows": ("dtype",), "columns": ("dtype",)}, "both in --rows and in --columns"),
    ],
)
def test_a_query_that_makes_no_table_is_refused(wrong: dict[str, Any], says: str):
    with pytest.raises(InputError, match=says):
        query(**wrong)


def test_nothing_to_show_and_no_such_column():
    with pytest.raises(InputError, match="no runs to show"):
        build_table([], query())
    with pytest.raises(InputError, match="no runs to show with model=xl"):
        build_table(RUNS, query(where=(("model", ("xl",)),)))
    with pytest.raises(InputError, match=r"--speedup fp64 is no column: choose one of fp32; bf16"):
        build_table(RUNS, query(columns=("dtype",), speedup="fp64"))


def test_a_figure_that_its_own_findings_doubt_is_marked():
    drifting = at(1.0, seq_len=8)
    warning = Finding(kind="not-steady", severity="warning", sentence="It drifts.")
    error = Finding(kind="precision-mismatch", severity="error", sentence="It was TF32.")
    note = Finding(kind="launch-bound", severity="note", sentence="It waits.")
    runs = [
        msgspec.structs.replace(drifting, findings=(warning, note)),
        msgspec.structs.replace(at(2.0), findings=(error, warning)),
        msgspec.structs.replace(at(3.0, seq_len=32), findings=(note,)),
    ]
    table = build_table(runs, query(values=("forward", "tokens_per_s")))
    assert [row[2] for row in table.rows] == ["1.00 *", "2.00 !", "3.00"]
    assert str(table.rows[1][3]).endswith(" !")
    assert [line.text for line in table.notes] == [
        "Doubted by their own findings: ! precision-mismatch (1), * not-steady (2)."
    ]
    assert json.loads(render_text(runs[:1], query(), "jsonl"))["findings"] == "not-steady"


def test_a_row_without_an_environment_contradicts_none():
    skipped = make_run(status="skipped", environment=None, failure=Failure(message="x", during="plan"))
    measured = msgspec.structs.replace(at(3.0), created="2026-02-01T00:00:00.000+00:00")
    assert build_table([skipped, measured], query(values=("forward",))).rows == (("tiny", "16", "3.00"),)


@pytest.mark.parametrize("tag", ["model", "position", "[/bold]", "a|b", "-", "run"])
def test_any_tag_makes_a_column(tag: str):
    runs = [msgspec.structs.replace(at(1.0), tag=tag), msgspec.structs.replace(at(2.0), tag="other")]
    q = query(columns=("tag",), values=("forward",))
    assert set(build_table(runs, q).rows[0][2:]) == {"1.00", "2.00"}
    for style in ("markdown", "csv", "jsonl"):
        render_text(runs, q, style)
    untagged = [msgspec.structs.replace(run, tag=None) for run in runs]
    assert len(build_table(untagged, query(where=(("tag", ("-",)),))).rows) == 1


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_reads_every_run(name: str):
    table = build_table([RUNS[0]], query(rows=(name,)))
    assert len(table.rows) == 1


@pytest.mark.parametrize("name", VALUES)
def test_every_value_reads_every_run(name: str):
    for run in (RUNS[0], ended("failed"), make_run(environment=None)):
        build_table([run], query(values=(name,)))


@pytest.mark.parametrize(("statistic", "cell", "without"), [("p95", "9.55", 1), ("p99", "-", 2)])
def test_percentiles_stand_in_the_cells_or_a_note_says_why_not(statistic: str, cell: str, without: int):
    # 1.0 ms to 10.0 ms by 0.1 ms: 1 + 90 x 0.95 = 86.5 of 91 samples lies between 9.5 and 9.6 ms.
    many = make_run(workload(dtype="fp32"), forward=[0.001 + 0.0001 * i for i in range(91)])
    table = build_table([many, at(2.0, dtype="bf16")], query(rows=("dtype",), values=("forward",), statistic=statistic))
    assert table.columns[1] == f"forward {statistic} (ms)"
    assert [row[1] for row in table.rows] == [cell, "-"]
    fewest = {"p95": 60, "p99": 300}[statistic]
    assert [line.text for line in table.notes] == [f"{without} of 2 have no {statistic}: it needs {fewest} samples."]
    compared = query(rows=("seq_len",), columns=("dtype",), values=("forward",), statistic=statistic, speedup="fp32")
    said = [line.text for line in build_table([many, at(2.0, dtype="bf16")], compared).notes]
    assert "Speed-ups are of medians." in said
    record = json.loads(render_text([many], query(values=("forward",)), "jsonl"))
    assert record["forward_p95_s"] == pytest.approx(0.00955) and record["forward_p99_s"] is None
