"""docs/questions.md, question by question: each command runs, and its output holds the answer beside it.

A table's columns are a question, with what falls short of a whole answer, its command (none: that of the row above),
and what its output says: pieces of it between semicolons, in which "…" stands for what is left out.
"""

import contextlib
import functools
import io
import re
import shlex
from pathlib import Path

import pytest

from stepscope.app.cli.app import app

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
HEAD = ("question", "command", "answer")
MOST_LEFT_OUT = 300
"""Characters for which "…" stands at most."""


def cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))


def asked() -> list[tuple[str, str, str]]:
    """Each question with its command and its answer."""
    found: list[tuple[str, str, str]] = []
    inside, command = False, ""
    for line in (ROOT / "docs" / "questions.md").read_text().splitlines():
        row = cells(line)
        inside = row == HEAD or (inside and len(row) == len(HEAD))
        if inside and row != HEAD and not row[0].startswith("---"):
            question, own, answer = row
            command = own.strip("`") or command
            found.append((question, command, answer))
    return found


@functools.cache
def output(command: str) -> str:
    """What the command prints, each run of spaces and ends of lines as one space."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert not app(shlex.split(command)[1:], standalone_mode=False), command
    return " ".join(printed.getvalue().split())


def test_each_question_is_answered_by_its_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    questions = asked()
    assert len(questions) >= 84
    missing: list[str] = []
    for question, command, answer in questions:
        for piece in answer.split("; "):
            words = f".{{0,{MOST_LEFT_OUT}}}?".join(re.escape(part.strip()) for part in piece.split("…"))
            if not re.search(words, output(command)):
                missing.append(f"{question} {command}: {piece}")
    assert not missing, "\n".join(missing)
