"""The table of the project's measures, on a house small enough to count by hand."""

import os
from pathlib import Path

import pytest

from tests.measures import report

HOUSE = {
    "a": "from house.b import one\n\ndef one(): ...\ndef _two(): ...\n",
    "b": "import house.a\n\nclass one: ...\nasync def _two(): ...\n",
    "room/c": "def _two(): ...\ndef _two(): ...\ndef three():\n    def one(): ...\n" + "x = 1\n" * 597,
}
TABLE = """\
lines of src                  609 in 3 files
files over 600 lines          1
circles of imports            1
public names defined twice    1
private names defined twice   1
places that say the same      {said}

files over 600 lines
  601 room/c.py

circles of imports
  house.a house.b

names defined twice
"""


@pytest.fixture
def house(tmp_path: Path) -> Path:
    for name, text in HOUSE.items():
        file = tmp_path / "house" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "house"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "not counted: no program `duplicates` on PATH"),
        ("echo 2 pairs in $(basename $PWD); echo more", "2 pairs in house"),
        ("true", "not counted: `duplicates` printed nothing"),
        ("exit 3", "not counted: Command '['{program}']' returned non-zero exit status 3."),
    ],
)
def test_the_table_counts_what_is_there(
    house: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, said: str
):
    program = tmp_path / "programs" / "duplicates"
    program.parent.mkdir()
    if script is not None:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    else:
        monkeypatch.setenv("PATH", str(program.parent))
    table = TABLE.format(said=said.format(program=program))
    assert report(house, house, private=False) == f"{table}  one: a.py b.py"
    assert report(house, house, private=True) == f"{table}  _two: a.py b.py room/c.py\n  one: a.py b.py"
