"""What a new study costs: its file in `questions/`, its verb, and the line that lists the verb."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.command import Done, libraries, stepscope

SOURCE = Path(__file__).parents[2] / "src"

QUESTION = '''"""How fast a harmonic sum grows."""

from stepscope.core.answer import Answer, Table
from stepscope.core.finding import note
from stepscope.recording.device import resolve_device
from stepscope.questions.answers import computed_answer, curves


def study_toy(steps: int = 4, device: str = "cpu") -> Answer:
    """The first sums of 1/n, their curve, and the last of them."""
    sums = [sum(1 / n for n in range(1, last + 1)) for last in range(1, steps + 1)]
    return computed_answer(
        resolve_device(device),
        study="toy",
        question="How fast does a harmonic sum grow?",
        settings={"steps": steps},
        tables=[Table(title="Sums", columns=("terms", "sum"), rows=tuple(enumerate(sums, 1)))],
        panels=[curves((("sum", n, each) for n, each in enumerate(sums, 1)), x_title="terms", y_title="sum")],
        findings=[note("toy-sum", f"{steps} terms make {sums[-1]:.4g}.", {"sum": sums[-1]})],
    )
'''

VERB = '''"""`stepscope study toy`: how fast a harmonic sum grows."""

from stepscope.app.cli.studies.answering import study_verb
from stepscope.core.answer import Answer


@study_verb("toy", "stepscope study toy --steps 8", "stepscope study toy --save toy.svg")
def toy(*, steps: int = 4, device: str) -> Answer:
    """How fast a harmonic sum grows."""
    from stepscope.questions.toy import study_toy

    return study_toy(steps, device)
'''

LINES = {
    '        "warmup": (\n': '        "toy": ("stepscope.app.cli.studies.toy:toy", "How a harmonic sum grows."),\n',
}
"""Lines of `app/cli/study.py`, each with the line to insert before it."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source to which the toy study is added, as CONTRIBUTING.md says."""
    copy = tmp_path_factory.mktemp("toy")
    shutil.copytree(SOURCE / "stepscope", copy / "stepscope", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "stepscope/questions/toy.py").write_text(QUESTION)
    (copy / "stepscope/app/cli/studies/toy.py").write_text(VERB)
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
    made = ask(source, tmp_path, "--steps", "2", "--json", "--save", drawn).stdout
    assert "<svg" in drawn.read_text()[:200]
    assert json.loads(made)["tables"][0]["rows"] == [[1, 1.0], [2, 1.5]]
    stored.write_text(made)
    again = ask(source, tmp_path, "--from", stored, "--style", "csv", "--only", "sums").stdout
    assert again.splitlines() == ["terms,sum", "1,1.0", "2,1.5"]
