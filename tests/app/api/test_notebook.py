"""The notebooks of docs/, executed: ten lines that measure, trace and explain a module, and the course's."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from stepscope.core.samples import FEWEST_FOR_PERCENTILE

pytestmark = pytest.mark.slow
nbformat: Any = pytest.importorskip("nbformat", reason="needs nbclient: pip install 'stepscope[dev]'")
nbclient: Any = pytest.importorskip("nbclient", reason="needs nbclient: pip install 'stepscope[dev]'")
pytest.importorskip("ipykernel", reason="needs ipykernel: pip install 'stepscope[dev]'")

DOCS = Path(__file__).parents[3] / "docs"


def read(name: str) -> Any:
    return nbformat.read(DOCS / name, as_version=4)


def run(notebook: Any, folder: Path) -> list[Any]:
    """Run the notebook in a folder, and return its cells of code."""
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def results(cells: list[Any]) -> list[Any]:
    """What the last line of each cell shows, where it shows something, and that nothing else is displayed."""
    assert not {output.output_type for cell in cells for output in cell.outputs} - {"stream", "execute_result"}
    return [output.data for cell in cells for output in cell.outputs if output.output_type == "execute_result"]


def heads(page: str) -> list[str]:
    """The heads of its tables without percentiles: the machine's speed decides whether there are steps enough."""
    return [head for head in re.findall(r"<th[^>]*>([^<]*)</th>", page) if head not in FEWEST_FOR_PERCENTILE]


@pytest.mark.long
def test_ten_lines_measure_trace_and_explain_a_module(tmp_path: Path):
    notebook = read("notebook.ipynb")
    stored = results([cell for cell in notebook.cells if cell.cell_type == "code"])
    cells = run(notebook, tmp_path)
    assert sum(bool(line.strip()) for cell in cells for line in cell.source.splitlines()) == 10
    shown = results(cells)
    assert len(shown) == len(stored) == 4
    for now, then in zip(shown, stored, strict=True):
        assert set(now) == set(then) == {"text/plain", "text/html"}
        assert heads(now["text/html"]) == heads(then["text/html"])
        assert "\x1b" not in now["text/plain"]
    answer, by_module, by_category, timed = (data["text/html"] for data in shown)
    assert "TransformerEncoderLayer: 49,984 parameters" in answer and ">backward<" in answer
    assert ">self_attn<" in by_module and ">linear1<" in by_module
    assert ">saved for backward<" in by_category
    assert ">attention alone<" in timed
    (directory,) = (tmp_path / "runs").iterdir()
    assert {file.name for file in directory.iterdir()} >= {"run.json", "trace.kineto.json.gz", "memory.pickle.gz"}


@pytest.mark.long
def test_the_course_runs_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    notebook = read("assignment.ipynb")
    assert not any(cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    cells = run(notebook, tmp_path)
    predicted, answer, by_family, by_category, compared = (data["text/html"] for data in results(cells))
    assert "It fits into" in predicted and "Tesla T4" in predicted
    assert "tiny: 3,609,728 parameters" in answer and ">backward<" in answer
    assert ">matrix multiplication<" in by_family
    assert ">parameters<" in by_category and ">optimizer state<" in by_category
    assert "fp32" in compared and "bf16" in compared
    said = "".join(output.text for cell in cells for output in cell.outputs if output.output_type == "stream")
    assert "In fp16, in turn, it comes to 9.953125" in said
    assert "questions answered" in said and (tmp_path / "writeup.html").is_file()


def test_records_from_anywhere_show_themselves_in_a_notebook(tmp_path: Path):
    """A Run that was read by `load_run`, an Answer and a Table as core has them, once stepscope shows something."""
    place = DOCS.parent / "results" / "cpu" / "first"
    sources = (
        f"import stepscope\nfound = stepscope.show({str(place)!r})\nfound.run",
        "from stepscope.runs.answer import answer_run\nanswer_run(found.run)",
        "answer_run(found.run).tables[0]",
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    run_shown, answer_shown, table_shown = results(run(notebook, tmp_path))
    assert run_shown["text/html"] == answer_shown["text/html"]
    assert run_shown["text/plain"].startswith("tiny: 3,609,728 parameters")
    assert heads(table_shown["text/html"])[0] == "phase"
    assert table_shown["text/plain"].strip() in run_shown["text/plain"]
