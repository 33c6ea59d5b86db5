"""A capture as an answer: figures in its cells, doubts beside them, panels with the same figures."""

from pathlib import Path

import pytest

from stepscope.core.answer import Answer, Doubted, Finding
from stepscope.core.run import Run
from stepscope.questions.compare_captures import answer_captures, compare_captures
from stepscope.traces.captures.answer import answer_trace
from stepscope.traces.captures.attribution import attribute
from stepscope.traces.captures.digest import read_trace
from stepscope.traces.captures.summary import TraceSummary
from tests.captures import training_steps, write_kineto
from tests.conftest import make_run
from tests.textbook import textbook

DATA = Path(__file__).parents[2] / "data"
NAMES = ("kineto_train", "kineto_inference_bf16", "idle_data", "idle_graph", "idle_item", "idle_streams")


def summary_of(name: str, run: Run | None = None) -> TraceSummary:
    return TraceSummary(attribution=attribute(read_trace(DATA / f"{name}.json.gz")), run=run)


def has_sound_tables(answer: Answer) -> None:
    """No two columns share a head, every row has all columns, and each column that is written out has a head."""
    for table in answer.tables:
        assert len(set(table.columns)) == len(table.columns) and "" not in table.columns, table.columns
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert not table.units or len(table.units) == len(table.columns)


@pytest.mark.parametrize("name", NAMES)
def test_every_table_is_sound(name: str):
    summary = summary_of(name)
    has_sound_tables(answer_trace(summary, (), name))
    has_sound_tables(answer_captures(compare_captures(summary.attribution, summary.attribution), "one", "other"))


def test_panels_have_the_figures_of_the_tables():
    summary = summary_of("kineto_train")
    answer = answer_trace(summary, (), "it")
    kernels, families, roofs = answer.panels
    assert [panel.kind for panel in answer.panels] == ["bars", "stack", "curves"]
    (first,) = [point for point in kernels.points if point.line == "forward"][:1]
    table = answer.tables[2]
    assert table.columns[0] == "top of forward"
    longest = summary.top_kernels("forward")[0]
    assert table.rows[0][0] == longest.name and first.name == "sm80_xmma_gemm_f…ernel__5x_cublas tn 64x64x8"
    assert first.y == pytest.approx(longest.busy_ns / 1e6)
    distinct = {row.name for phase in summary.phase_names for row in summary.top_kernels(phase)}
    assert len({point.name for point in kernels.points}) == len(distinct)
    assert sum(point.y for point in families.points) == pytest.approx(summary.busy_ns / summary.steps / 1e6)
    assert {point.line for point in families.points} == {"forward", "backward", "optimizer"}
    assert {point.line for point in roofs.points if point.line.startswith("roof")} == {"roof, fp32"}


def test_the_unprofiled_time_carries_its_runs_doubt(tmp_path: Path):
    capture = write_kineto(training_steps(), tmp_path / "t.json")
    doubt = Finding(kind="throttled", severity="warning", sentence="It was throttled.")
    run = make_run(forward=[0.001, 0.002, 0.003], findings=(doubt,))
    answer = answer_trace(TraceSummary(attribution=attribute(read_trace(capture)), run=run), (), "t.json")
    phases = answer.tables[0]
    column = phases.columns.index("unprofiled ms")
    cell = phases.rows[0][column]
    assert isinstance(cell, Doubted) and (cell.value, cell.mark) == (pytest.approx(2e6), "*")
    assert phases.rows[0][phases.columns.index("expected")] == textbook(run).model.layers * 9 + 1
