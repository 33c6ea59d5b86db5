"""Every command that the documents show with its output, run again: the output must be the same to the letter.

Commands that read (table, show, trace, memory...) run on what is kept in results/, and studies whose figures are those
of arithmetic on any machine run whole. Commands that measure are not run again; `make run` is held against the run it
left. A command is run once, however many pages show it, whole or cut by `| head -N`, `| tail -N` or `| grep -E TEXT`.
Those that take longest run with --long. Sessions of Python (`pycon`) are run again, too.
STEPSCOPE_UPDATE_DOCS=1 writes the outputs anew.
"""

import contextlib
import doctest
import functools
import io
import json
import os
import re
import shlex
from pathlib import Path
from traceback import format_exception_only
from typing import Any

import pytest

from stepscope.app.cli.app import app
from stepscope.core.errors import StepscopeError
from tests.command import python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SITE = ROOT / "docs" / "site"
"""Pages that only the site has. Its build checks them (tests/house/test_site.py)."""
DOCUMENTS = [
    ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if not page.is_relative_to(SITE)),
]  # fmt: skip
LINKING = [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
BLOCK = re.compile(r"(?<=```console\n)\$ (?P<command>.+?)\n(?P<output>.*?)(?=```)", re.DOTALL)
PYTHON = re.compile(r"(?<=```pycon\n)>>> .*?(?=```)", re.DOTALL)
READS_AGAIN = {"make run": "stepscope show results/cpu/first"}
BENCHMARKS = (
    "benchmarks/overhead.py", "benchmarks/page.py", "benchmarks/trace.py", "benchmarks/snapshot.py",
    "benchmarks/attention.py", "benchmarks/long_step.py", "benchmarks/step.py", "benchmarks/shared_step.py",
    "benchmarks/coverage.py", "benchmarks/architectures.py", "benchmarks/convolutions.py", "benchmarks/watch.py",
    "benchmarks/published.py", "benchmarks/ranks.py", "benchmarks/processes.py", "benchmarks/sweep.py",
    "benchmarks/command.py", "benchmarks/killed_node.py", "benchmarks/many_runs.py", "tests/recorded.py",
    "benchmarks/compare_equal_pairs.py", "benchmarks/fit_truth.py", "benchmarks/reading.py",
    "benchmarks/attention_kinds.py", "benchmarks/fit.py", "benchmarks/own_step.py",
)  # fmt: skip
STUDIES_OF_ARITHMETIC = ("formats", "accumulation")
AT_LENGTH = (
    "--model llama3-405B", "--model llama3-70B", "--device B200 --seq-len 32768", "--checkpointing selective-11",
    "--checkpointing selective-21", "--checkpointing every-1,nested-2,nested-1", "--device T4,4090,H100",
    "--apart results/h200/memory-constants", "--against results/h200/limit-80GiB",
    "--where model=xl --where seq_len=1024", "--model cs336-2026-xl --seq-len 2048", "--layout sharding=zero3",
    "--only 10,000 x 0.001",
)  # fmt: skip
"""Parts of commands that take several times what others take that show the same of smaller models or of fewer runs."""
VERBS = ("table", "show", "ls", "history", "models", "kernel", "trace", "memory", "fit", "plan", "compare")


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def command_for(shown: str) -> tuple[str, ...] | None:
    """What Python is to run for a command as shown, without its pipes, or None for one that measures."""
    words = shlex.split(READS_AGAIN.get(shown, shown), comments=True)
    if words[0] == "stepscope" and (words[1] in VERBS or "--from" in words):
        return ("-m", *words)
    if words[:2] == ["stepscope", "study"] and words[2] in STUDIES_OF_ARITHMETIC:
        return ("-m", *words)
    if words[0] == "python" and words[1] in BENCHMARKS and words[2] == "--show":
        files = [str(file) for pattern in words[3:] for file in sorted(ROOT.glob(pattern))]
        return (*words[1:3], *files)
    return None


@functools.cache
def output_of(command: tuple[str, ...]) -> str:
    result = python(*command, cwd=ROOT, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def cut(output: str, pipe: str) -> str:
    """What a shell's head, tail or grep lets through."""
    lines = output.splitlines(keepends=True)
    match shlex.split(pipe):
        case ["head", count]:
            kept = lines[: int(count.removeprefix("-"))]
        case ["tail", count]:
            kept = lines[-int(count.removeprefix("-")) :]
        case ["grep", "-E", text]:
            kept = [line for line in lines if re.search(text, line)]
        case _:
            raise AssertionError(f"{pipe!r} is not among what these tests know to do")
    assert kept, f"{pipe} lets nothing through"
    return "".join(kept)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_outputs_shown_are_outputs_printed(document: Path, request: pytest.FixtureRequest):
    text = document.read_text()
    every = os.environ.get("STEPSCOPE_UPDATE_DOCS") or request.config.getoption("--long")
    of_command = functools.cache(output_of)  # of one answer a document may show the head, and later the tail

    def printed(match: re.Match[str]) -> str:
        shown, *pipes = match["command"].split(" | ")
        command = command_for(shown)
        if command is None or (not every and any(part in " ".join(command) for part in AT_LENGTH)):
            return match[0]
        return f"$ {match['command']}\n{functools.reduce(cut, pipes, of_command(command))}"

    renewed = BLOCK.sub(printed, text)
    if os.environ.get("STEPSCOPE_UPDATE_DOCS"):
        document.write_text(renewed)
    assert renewed == text or os.environ.get("STEPSCOPE_UPDATE_DOCS")


def said_by_python(block: str, names: dict[str, Any]) -> str:
    """The statements of a block, each with what Python prints for it here."""
    written = ""
    for example in doctest.DocTestParser().get_examples(block):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                exec(compile(example.source, "<docs>", "single"), names)
            except StepscopeError as error:
                print("Traceback (most recent call last):", "  ...", *format_exception_only(error), sep="\n", end="")
        first, *more = example.source.splitlines(keepends=True)
        written += "".join([f">>> {first}", *(f"... {line}" for line in more), printed.getvalue()])
    return written


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if PYTHON.search(each.read_text())], ids=name_of)
def test_what_python_is_shown_to_say_is_what_it_says(document: Path, monkeypatch: pytest.MonkeyPatch):
    """The blocks of a page are one session, run in the repository."""
    monkeypatch.chdir(ROOT)
    text, names = document.read_text(), dict[str, Any]()
    renewed = PYTHON.sub(lambda block: said_by_python(block[0], names), text)
    if os.environ.get("STEPSCOPE_UPDATE_DOCS"):
        document.write_text(renewed)
    assert renewed == text or os.environ.get("STEPSCOPE_UPDATE_DOCS")


def test_the_documents_show_outputs_at_all():
    shown = [m["command"] for document in DOCUMENTS for m in BLOCK.finditer(document.read_text())]
    whole = [command.split(" | ")[0] for command in shown]
    assert sum(command_for(command) is not None for command in whole) >= 80
    assert "make run" in whole


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150 and len(text.split()) <= 900


def anchors_of(document: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", LINKING, ids=name_of)
def test_links_lead_to_files_and_headings_that_are_there(document: Path):
    for target, _, anchor in re.findall(r"\]\((?!https?://)([^)#]*)(#([^)]*))?\)", document.read_text()):
        linked = (document.parent / target).resolve() if target else document
        assert linked.exists(), f"{name_of(document)} links to {target}"
        assert linked.is_relative_to(ROOT), f"{name_of(document)} links out of the repository: {target}"
        if anchor:
            assert anchor in anchors_of(linked), f"{name_of(document)} links to {target}#{anchor}"


def test_every_page_can_be_reached_from_the_readme():
    reached, ahead = set[Path](), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in reached:
            reached.add(page)
            links = re.findall(r"\]\((?!https?://)([^)#]+\.md)", page.read_text())
            ahead += [(page.parent / link).resolve() for link in links]
    assert set(DOCUMENTS) <= reached


def test_an_experiment_quotes_figures_that_outputs_show():
    """Every figure with a decimal point in the answer of an experiment stands in an output of the documents."""
    outputs = "\n".join(m["output"] for document in DOCUMENTS for m in BLOCK.finditer(document.read_text()))
    shown = set(re.findall(r"\d[\d,]*\.\d+(?:e[+-]\d+)?", outputs))
    for document in DOCUMENTS:
        if document.parent.name == "experiments" and document.name != "README.md":
            answer = re.search(r"\*\*The answer\.\*\*(.+?)\n\n", document.read_text(), re.DOTALL)
            assert answer is not None, f"{name_of(document)} has no answer"
            quoted = re.findall(r"\d[\d,]*\.\d+(?:e[+-]\d+)?", re.sub(r"`[^`]*`|2\.7B", "", answer[1]))
            assert set(quoted) <= shown, f"{name_of(document)}: {sorted(set(quoted) - shown)}"


def commands_named(text: str) -> list[list[str]]:
    """Every `stepscope ...` in a block of code, or alone in a span of it, as words."""
    blocks = re.findall(r"```[^\n`]*\n(.*?)```", text.replace("\\\n", " "), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    spans = re.findall(r"`(stepscope [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    found = [line.removeprefix("$ ").split(" | ")[0].split("  ")[0] for line in lines] + spans
    return [shlex.split(each, comments=True) for each in found if re.match(r"stepscope [a-z]", each)]


def text_of(document: Path) -> str:
    """The text of a document; of a notebook its cells of code as blocks, without what stands before a shell's line."""
    if document.suffix != ".ipynb":
        return document.read_text()
    cells = [cell for cell in json.loads(document.read_text())["cells"] if cell["cell_type"] == "code"]
    return "".join(f"```\n{''.join(cell['source']).removeprefix('!')}\n```\n" for cell in cells)


COMMAND: Any = app


@pytest.mark.parametrize("document", [*DOCUMENTS, *sorted((ROOT / "docs").glob("*.ipynb"))], ids=name_of)
def test_commands_named_are_commands_that_there_are(document: Path):
    for words in commands_named(text_of(document)):
        verb = COMMAND
        for word in words[1:3]:
            verb = (verb.get_command(None, word) if hasattr(verb, "get_command") else None) or verb
        assert verb is not COMMAND, f"{name_of(document)}: no verb in {' '.join(words)!r}"
        options = {name for parameter in verb.params for name in (*parameter.opts, *parameter.secondary_opts)}
        ours = words[: words.index("--")] if "--" in words else words  # behind it stands another program's line
        unknown = {word for word in ours if word.startswith("--")} - options - {"--help", "--help-all"}
        assert not unknown, f"{name_of(document)}: {' '.join(words)!r} has no {', '.join(sorted(unknown))}"
