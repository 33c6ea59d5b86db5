"""Every verb with every output option and every pair of them, as the command line itself declares them.

Each ends in a result, or in one line that refuses; a new verb or option is taken up by itself, or asks here for its
arguments or its value. The keys of JSON are those of tests/frozen/golden/json.
"""

import contextlib
import functools
import io
import itertools
import json
import shutil
import types
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from stepscope.app.cli.app import app
from stepscope.core.answer import Answer, Line, Panel, Point, encode_answer, note, table_of, warning
from stepscope.core.errors import StepscopeError
from stepscope.core.files import json_document
from stepscope.core.model_config import configure
from stepscope.core.run_directory import load_run
from stepscope.core.study_results import Tuned
from stepscope.core.workloads import TextbookWorkload
from stepscope.rendering import picture as aside
from stepscope.rendering.renderers import STYLES
from stepscope.traces import ranks
from stepscope.traces.captures import digest as captures
from stepscope.traces.captures.digest import load_capture
from tests.captures import training_steps, write_kineto
from tests.frozen.json_keys import check_keys, check_keys_in_brief, check_keys_of_new_runs, documents, key_paths

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
RUNS = ROOT / "results" / "cpu" / "first"
TINY = ("--model", "tiny", "--batch-size", "1", "--seq-len", "16", "--device", "cpu", "--steps", "2", "--warmup", "1")

ANSWER = Answer(
    study="any",
    question="Which?",
    lead=(Line("a CPU", "strong"),),
    tables=(table_of("name", ("time", "ms of s"), title="Times", rows=[("one", 0.5), ("two", None)]),),
    panels=(Panel(x_title="x", y_title="y", kind="bars", points=(Point(name="one", line="", y=1.0),)),),
    findings=(note("small", "It is small."), warning("noisy", "It varies.", {"share": 0.2}, "close other programs")),
)

VALUES: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "--only": lambda folder: ("--only", "findings"),
    "--style": lambda folder: ("--style", "markdown"),
    "--save": lambda folder: ("--save", str(folder / "plot.json")),
    "--cut": lambda folder: ("--cut", str(folder / "cut.json")),
    "--perfetto": lambda folder: ("--perfetto", str(folder / "perfetto.json")),
    "--figures": lambda folder: ("--figures", str(folder / "figures.json")),
    "--output": lambda folder: ("--output", str(folder / "page.html")),
    "--plots": lambda folder: ("--plots", str(folder / "plots")),
    "--log": lambda folder: (),  # tests/engine/test_trackers.py gives it, where its libraries are
    "--metrics": lambda folder: ("--metrics", str(folder / "run.prom")),
    "--patch": lambda folder: ("--patch",),
    "--to": lambda folder: ("--patch", "--to", str(folder / "some.diff")),
    "--plots-as": lambda folder: ("--plots-as", "svg"),
    **{flag: (lambda folder, flag=flag: (flag,)) for flag in ("--brief", "--json", "--open", "--compare", "--redact")},
}
"""How each output option is given. `--save` writes JSON, since drawing takes a second."""


def _capture(folder: Path) -> tuple[str, ...]:
    return (str(write_kineto(training_steps(1, 1), folder / "trace.json")),)


def _two_ranks(folder: Path) -> tuple[str, ...]:
    traces: list[str] = []
    for rank in range(2):
        path = write_kineto(training_steps(1, 1), folder / f"rank{rank}.json")
        trace = {"distributedInfo": {"rank": rank, "world_size": 2}, **json.loads(path.read_text())}
        path.write_text(json.dumps(trace))
        traces.append(str(path))
    return tuple(traces)


def _one_run(folder: Path) -> tuple[str, ...]:
    run = folder / next(RUNS.iterdir()).name
    shutil.copytree(next(RUNS.iterdir()), run)
    return (str(run),)


def _answer(study: str) -> Callable[[Path], tuple[str, ...]]:
    def arguments(folder: Path) -> tuple[str, ...]:
        (folder / "answer.json").write_text(encode_answer(ANSWER.__class__(**{
            **{name: getattr(ANSWER, name) for name in ANSWER.__struct_fields__}, "study": study
        })))  # fmt: skip
        return ("--from", str(folder / "answer.json"))

    return arguments


def _sides(folder: Path) -> tuple[str, ...]:
    runs = sorted(place.parent for place in (ROOT / "results" / "cpu" / "compare").glob("*/run.json"))
    return (str(runs[0]), str(runs[2]))


def _page_of_an_answer(folder: Path) -> tuple[str, ...]:
    return _answer("attention")(folder)[1:]


def _tuned(folder: Path) -> tuple[str, ...]:
    step = TextbookWorkload(model=configure("tiny"))
    (folder / "tuned.json").write_text(json_document(Tuned(asked=step, baseline=step, best=step)))
    return ("--from", str(folder / "tuned.json"))


def _runs(*words: str) -> Callable[[Path], tuple[str, ...]]:
    return lambda folder: (*words, str(RUNS))


def _alone(*words: str) -> Callable[[Path], tuple[str, ...]]:
    return lambda folder: words


INPUTS: dict[str, list[Callable[[Path], tuple[str, ...]]]] = {
    "trace": [_capture, _two_ranks],
    "memory": [_alone(str(ROOT / "tests" / "data" / "snapshot_train.pickle.gz"))],
    "show": [_one_run],
    "advise": [_alone(str(next((ROOT / "results" / "h200" / "loops").glob("*Classifier*"))))],
    "report": [_page_of_an_answer],
    "table": [_runs()],
    "ls": [_runs()],
    "history": [_runs()],
    "compare": [_sides],
    "fit": [_alone("--model", "small", "--memory", "80GB")],
    "plan": [_alone("--model", "small", "--ranks", "2", "--device", "H100")],
    "models": [_alone()],
    "kernel": [_alone("ampere_bf16_s16816gemm_bf16_128x128")],
    "device": [_alone("--from", str(ROOT / "results" / "h200" / "device.json"))],
    "run": [_alone(*TINY)],
    "sweep": [_alone(*TINY)],
    "tune": [_tuned],
    "bench": [_alone("--from", str(ROOT / "results" / "h100" / "bench" / "preset.json"))],
    "writeup": [_runs()],
    "study attention-gate": [_alone("--from", str(ROOT / "results" / "cpu" / "attention" / "gate.json"))],
    "study attention-step": [_answer("attention")],
    "study kernels": [_alone("--from", str(next((ROOT / "results" / "h200" / "loops").glob("*Classifier*"))))],
}
"""What verbs are given that cost little. Studies show a finished answer; a sweep measures once, and `run` does not."""

MEASURED = {"study warmup", "study allocator", "watch"}
"""Verbs that measure in any case: their answers go through what the others use, and their own tests run them."""


def verbs() -> Iterator[tuple[str, list[str]]]:
    """Each verb with its output options, by their longest spelling."""

    def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        for name in getattr(command, "commands", {}):
            yield from walk(command.get_command(None, name), (*path, name))
        if not hasattr(command, "commands"):
            yield " ".join(path), command

    for verb, command in walk(app, ()):
        flags = [
            max(parameter.opts, key=len)
            for parameter in command.params
            if getattr(parameter, "rich_help_panel", None) == "Output"
        ]
        if flags:
            yield verb, flags


DECLARED = dict(verbs())
CHEAP = [verb for verb in DECLARED if verb not in MEASURED]


def ran(words: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and the line that refuses, in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = app(args=words, prog_name="stepscope", standalone_mode=False)
        except StepscopeError as error:
            return error.exit_code, out.getvalue(), str(error)
        except click.BadParameter as error:
            return 2, out.getvalue(), error.format_message()
    return code if isinstance(code, int) else 0, out.getvalue(), ""


def test_every_option_has_a_value():
    assert {flag for flags in DECLARED.values() for flag in flags} <= set(VALUES), "give the new option a value here"
    assert set(DECLARED) - MEASURED <= set(INPUTS) | {verb for verb in DECLARED if verb.startswith("study ")}


@pytest.fixture
def done_once(monkeypatch: pytest.MonkeyPatch):
    """Commands that read each capture once, show a stored run in place of a measured one, and draw plots in this
    process: work that every pair shares is done once."""
    read = functools.cache(lambda path: load_capture(path, say=print))
    for room in (captures, ranks):
        monkeypatch.setattr(room, "load_capture", lambda path, say: read(path))
    stored = next(RUNS.iterdir())
    monkeypatch.setattr("stepscope.engine.step.measure_step", lambda *_: (load_run(stored), stored))

    def refused(*_: Any, **__: Any):
        raise OSError

    monkeypatch.setattr(aside, "subprocess", types.SimpleNamespace(Popen=refused, PIPE=None, DEVNULL=None))


@pytest.mark.usefixtures("done_once")
@pytest.mark.parametrize("verb", CHEAP)
def test_every_pair_of_output_options(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(webbrowser, "open", lambda *_, **__: True)
    monkeypatch.chdir(tmp_path)
    wrong: list[tuple[Any, ...]] = []
    shown = 0
    for number, given in enumerate(INPUTS.get(verb, [_answer(verb.removeprefix("study "))])):
        folder = tmp_path / str(number)
        folder.mkdir()
        words = given(folder)
        flags = DECLARED[verb]
        written: dict[tuple[str, ...], str] = {}
        for pair in [(), *((flag,) for flag in flags), *itertools.combinations(flags, 2)]:
            options = [word for flag in pair for word in VALUES[flag](folder)]
            try:
                code, out, refusal = ran([*verb.split(), *words, *options])
            except Exception as error:
                wrong.append((pair, f"{type(error).__name__}: {error}"))
                continue
            shown += code in (0, 1)
            if code in (0, 1) and set(pair) in ({"--json"}, {"--json", "--brief"}):
                written[pair] = out
            shown_first = "--save" in pair and "leave out --save" in refusal  # what was measured is not lost then
            if code == 2 and (not refusal or "\n" in refusal or (out and not shown_first)):
                wrong.append((pair, "refused in other than one line", refusal, out[:200]))
            if code in (0, 1) and "--json" in pair:
                try:
                    documents(out)
                except ValueError as error:
                    wrong.append((pair, f"no JSON: {error}", out[:200]))
            if code in (0, 1) and "--brief" in pair and "--json" not in pair and len(out.splitlines()) > 21:
                wrong.append((pair, "not brief", len(out.splitlines())))
            if code not in (0, 1, 2):
                wrong.append((pair, code, refusal))
        _check_keys_of(verb if number == 0 else f"{verb} {number + 1}", written)
    assert not wrong, "\n".join(map(str, wrong))
    assert shown >= len(DECLARED[verb]), "most are shown"


def _check_keys_of(name: str, written: dict[tuple[str, ...], str]) -> None:
    """The keys of what a verb wrote with --json, and with --brief, too. Studies that show an answer made by hand here
    write their own in tests/frozen/test_json.py."""
    for pair, text in written.items():
        if "--brief" in pair:
            check_keys_in_brief(text)
        elif name == "sweep":
            check_keys_of_new_runs(name, text)
        else:
            by_hand = documents(text)[0].get("question") == ANSWER.question if name.startswith("study ") else False
            check_keys("an answer made by hand" if by_hand else name, key_paths(*documents(text)))


@pytest.mark.parametrize("style", STYLES)
def test_every_style_of_a_capture(style: str, tmp_path: Path):
    code, out, _ = ran(["trace", *_capture(tmp_path), "--style", style])
    assert code == 0 and out
