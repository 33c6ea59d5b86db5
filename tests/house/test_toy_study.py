"""What a new study costs: its file in `questions/`, and the line that lists it."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.command import Done, libraries, stepscope

SOURCE = Path(__file__).parents[2] / "src"

QUESTION = '''"""How fast a harmonic sum grows."""

from typing import Annotated

from stepscope.core.answer import Answer, Table
from stepscope.core.answer import note
from stepscope.core.options import NUMBERS, Option
from stepscope.questions.question import Question

Terms = Annotated[int, Option("How many terms are added.", NUMBERS, least=1)]


def study_toy(*, terms: Terms = 4, device: str = "cpu") -> Answer:
    """How a harmonic sum grows."""
    from stepscope.questions.answers import computed_answer, curves
    from stepscope.recording.environment import resolve_device

    sums = [sum(1 / n for n in range(1, last + 1)) for last in range(1, terms + 1)]
    return computed_answer(
        resolve_device(device),
        study="toy",
        question="How fast does a harmonic sum grow?",
        settings={"terms": terms},
        tables=[Table(title="Sums", columns=("terms", "sum"), rows=tuple(enumerate(sums, 1)))],
        panels=[curves((("sum", n, each) for n, each in enumerate(sums, 1)), x_title="terms", y_title="sum")],
        findings=[note("toy-sum", f"{terms} terms make {sums[-1]:.4g}.", {"sum": sums[-1]})],
    )


QUESTION = Question("toy", study_toy, examples=("--terms 8", "--save toy.svg"))
'''

LINES = {
    '        "warmup": (\n': '        "toy": ("stepscope.questions.toy:QUESTION", "How a harmonic sum grows."),\n',
}
"""Lines of `app/cli/study.py`, each with the line to insert before it."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source to which the toy study is added, as CONTRIBUTING.md says."""
    copy = tmp_path_factory.mktemp("toy")
    shutil.copytree(SOURCE / "stepscope", copy / "stepscope", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "stepscope/questions/toy.py").write_text(QUESTION)
    listed = copy / "stepscope/app/cli/study.py"
    text = listed.read_text()
    for line, inserted in LINES.items():
        assert text.count(line) == 1
        text = text.replace(line, inserted + line)
    listed.write_text(text)
    return copy


def ask(source: Path, cwd: Path, *options: object) -> Done:
    done = stepscope(
        "study", "toy", "--device", "cpu", *options, cwd=cwd, PYTHONPATH=os.pathsep.join([str(source), *libraries()])
    )
    assert done.returncode == 0, done.stderr
    return done


def test_it_shows_its_table_and_finding(source: Path, tmp_path: Path):
    said = ask(source, tmp_path).stdout
    assert "How fast does a harmonic sum grow?" in said
    assert "Sums" in said and "2.083" in said
    assert "4 terms make 2.083." in said


def test_it_has_the_options_of_every_study(source: Path, tmp_path: Path):
    drawn, stored = tmp_path / "toy.svg", tmp_path / "toy.json"
    made = ask(source, tmp_path, "--terms", "2", "--json", "--save", drawn).stdout
    assert "<svg" in drawn.read_text()[:200]
    assert json.loads(made)["tables"][0]["rows"] == [[1, 1.0], [2, 1.5]]
    stored.write_text(made)
    again = ask(source, tmp_path, "--from", stored, "--style", "csv", "--only", "sums").stdout
    assert again.splitlines() == ["terms,sum", "1,1.0", "2,1.5"]


def test_its_own_option_is_in_its_help_and_checked(source: Path, tmp_path: Path):
    shown = ask(source, tmp_path, "--help").stdout
    assert "--terms N" in shown and "How many terms are added. (default: 4)" in shown
    assert "stepscope study toy --save toy.svg" in shown
    path = os.pathsep.join([str(source), *libraries()])
    refused = stepscope("study", "toy", "--terms", "0", cwd=tmp_path, PYTHONPATH=path)
    assert refused.returncode == 2 and "--terms" in refused.stderr
