"""The list of mutants is true of the source, and the run tells a fault that is seen from one that is not.

The run itself takes many minutes: `make mutants`.
"""

import ast
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.mutation.mutants import MUTANTS, Mutant
from tests.mutation.run import ROOT, ListError, Outcome, Report, Status, keep, mutated, render, run_mutants

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_is_one_change_of_what_stands_there(mutant: Mutant):
    source = (ROOT / "src" / "stepscope" / mutant.file).read_text()
    changed = mutated(mutant, ROOT)
    says = tomllib.loads if mutant.file.endswith(".toml") else lambda text: ast.dump(ast.parse(text))
    assert says(changed) != says(source), "no other program"
    assert mutant.tests
    for file, _, test in (name.partition("::") for name in mutant.tests):
        assert f"def {test or 'test_'}" in (ROOT / "tests" / file).read_text()


def test_every_mutant_has_a_name_of_its_own():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def small_tree(root: Path, expected: int = 3) -> None:
    """A project of one function and one test, which holds the sum and not the difference."""
    files = {
        "src/stepscope/__init__.py": "",
        "src/stepscope/sums.py": "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n",
        "tests/test_sums.py": "from stepscope.sums import add\n\n\n"
        f"def test_sum():\n    assert add(1, 2) == {expected}\n",
        "tests/conftest.py": "import hypothesis\n\nhypothesis.settings.register_profile('any-counterexample')\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)


def fault(old: str, new: str) -> Mutant:
    return Mutant(
        name=f"{old} as {new}", file="sums.py", old=old, new=new, falsifies="sums", tests=("test_sums.py",)
    )  # fmt: skip


@pytest.mark.long
def test_a_fault_that_no_test_sees_survives_and_one_that_is_seen_names_its_test(tmp_path: Path):
    small_tree(tmp_path)
    report = run_mutants([fault("a + b", "a - b"), fault("a - b", "b - a"), fault("a + b", "a +")], tmp_path)
    assert [outcome.status for outcome in report.outcomes] == ["killed", "survived", "broken"]
    assert [outcome.by for outcome in report.outcomes][:2] == ["test_sums.py::test_sum", None]
    assert "3 mutants: 1 killed, 1 survived, 1 broken, in " in render(report)
    assert "a + b" in (tmp_path / "src/stepscope/sums.py").read_text(), "the tree itself is left alone"


def test_a_list_that_is_not_true_of_the_tree_is_refused(tmp_path: Path):
    small_tree(tmp_path, expected=4)
    with pytest.raises(ListError, match=r"'a \* b as a': its old text is 0 times in src/stepscope/sums.py"):
        run_mutants([fault("a * b", "a")], tmp_path)
    with pytest.raises(ListError, match=r"its old text is 2 times"):
        run_mutants([fault("return", "yield")], tmp_path)
    with pytest.raises(ListError, match=r"tests/test_sums.py does not pass without a mutant: test_sums.py::test_sum"):
        run_mutants([fault("a + b", "a - b")], tmp_path)


def test_a_few_tried_again_replace_their_outcomes_alone(tmp_path: Path):
    """Unless they were tried under other versions: then nothing is known of the others."""

    def report(status: Status, *mutants: Mutant, torch: str = "2.13.0") -> Report:
        outcomes = [
            Outcome(mutant=m.name, file=m.file, falsifies=m.falsifies, status=status, seconds=1.0, by=None)
            for m in mutants
        ]
        return Report(versions={"torch": torch}, outcomes=tuple(outcomes))

    keep(report("survived", *MUTANTS), tmp_path)
    keep(report("killed", MUTANTS[1]), tmp_path)
    text = (tmp_path / "mutants.txt").read_text()
    assert f"{len(MUTANTS)} mutants: 1 killed, {len(MUTANTS) - 1} survived" in text
    keep(report("killed", MUTANTS[1], torch="2.14.0"), tmp_path)
    assert "1 mutants: 1 killed, in 1 s" in (tmp_path / "mutants.txt").read_text()
