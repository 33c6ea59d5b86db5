"""Every command that the documents show with its output, run again: the output must be the same to the letter.

Commands that read (table, show, trace, memory...) run on what is kept in results/, and studies whose figures are those
of arithmetic on any machine run whole. Commands that measure are not run again; `make run` is held against the run it
left. STEPSCOPE_UPDATE_DOCS=1 writes the outputs anew.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import stepscope

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?<=```console\n)\$ (?P<command>.+?)\n(?P<output>.*?)(?=```)", re.DOTALL)
READS_AGAIN = {"make run": "stepscope show results/cpu/first"}
BENCHMARKS = (
    "benchmarks/overhead.py", "benchmarks/trace.py", "benchmarks/snapshot.py", "benchmarks/attention.py",
    "benchmarks/coverage.py", "tests/recorded.py",
)  # fmt: skip
STUDIES_OF_ARITHMETIC = ("formats", "accumulation")
VERBS = ("table", "show", "ls", "models", "kernel", "trace", "memory", "fit")


def command_for(shown: str) -> list[str] | None:
    """What to run for a command as shown, or None for one that measures."""
    words = shlex.split(READS_AGAIN.get(shown, shown), comments=True)
    if words[0] == "stepscope" and (words[1] in VERBS or "--from" in words):
        return [sys.executable, "-m", *words]
    if words[:2] == ["stepscope", "study"] and words[2] in STUDIES_OF_ARITHMETIC:
        return [sys.executable, "-m", *words]
    if words[0] == "python" and words[1] in BENCHMARKS and words[2] == "--show":
        files = [str(file) for pattern in words[3:] for file in sorted(ROOT.glob(pattern))]
        return [sys.executable, *words[1:3], *files]
    return None


def output_of(command: list[str]) -> str:
    if command[1:3] == ["-m", "stepscope"]:
        result = stepscope(*command[3:], cwd=ROOT, timeout=120)
    else:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_outputs_shown_are_outputs_printed(document: Path):
    text = document.read_text()

    def printed(match: re.Match[str]) -> str:
        command = command_for(match["command"])
        return match[0] if command is None else f"$ {match['command']}\n{output_of(command)}"

    renewed = BLOCK.sub(printed, text)
    if os.environ.get("STEPSCOPE_UPDATE_DOCS"):
        document.write_text(renewed)
    assert renewed == text or os.environ.get("STEPSCOPE_UPDATE_DOCS")


def test_the_documents_show_outputs_at_all():
    shown = [m["command"] for document in DOCUMENTS for m in BLOCK.finditer(document.read_text())]
    assert sum(command_for(command) is not None for command in shown) >= 8
    assert "make run" in shown


def test_the_documents_name_no_file_that_is_not_there():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
