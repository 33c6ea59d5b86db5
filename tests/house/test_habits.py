"""What runs without being asked: the hosted tests of .github/, and the hooks before a commit.

Both are YAML, for which the project needs no reader. They are short, and read line by line here.
"""

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORKFLOW = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
HOOKS = (ROOT / ".pre-commit-config.yaml").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def recipe(target: str) -> list[str]:
    """The commands of a target of the Makefile."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None, target
    return [line.strip() for line in found[1].splitlines()]


def values(text: str, key: str) -> list[str]:
    return re.findall(rf"^[ -]*{key}: *(.+)$", text, re.MULTILINE)


def test_hosted_tests_run_every_python_from_the_oldest_that_is_taken():
    matrix = json.loads(values(WORKFLOW, "python-version")[0])
    minors = [int(version.removeprefix("3.")) for version in matrix]
    assert minors == list(range(minors[0], minors[0] + len(minors)))
    assert PROJECT["project"]["requires-python"] == f">={matrix[0]}"
    assert PROJECT["tool"]["pyright"]["pythonVersion"] == matrix[0]
    assert values(WORKFLOW, "python-version")[1:] == ["${{ matrix.python-version }}"]


def test_hosted_tests_are_those_of_make():
    assert values(WORKFLOW, "run") == ["make test PYTHON=python", "make docs PYTHON=python"]
    assert all(recipe(target) for target in ("test", "docs"))
    cached = re.search(r"cache-dependency-path: \|\n((?: {12}\S+\n)+)", WORKFLOW)
    assert cached is not None
    installed_from = re.search(r"^\$\(INSTALLED\): (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert installed_from is not None
    assert sorted(cached[1].split()) == sorted(installed_from[1].split())


def test_hooks_run_the_tools_of_lint():
    commands = [*recipe("style"), *recipe("types")]
    tools = [re.sub(r" --.*", "", command.partition("$(BIN)/")[2]) for command in commands]
    assert [re.sub(r" --.*", "", entry) for entry in values(HOOKS, "entry")] == tools
    assert values(HOOKS, "language") == ["system"] * len(tools)
    assert values(HOOKS, "files") == [f"^({'|'.join(PROJECT['tool']['pyright']['include'])})/"]
