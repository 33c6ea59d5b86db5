"""The grammar of the command line: one table of options, old spellings, help, and what a shell is offered."""

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.app.cli.app import _Command, app
from stepscope.app.cli.options import OPTIONS
from stepscope.app.cli.study import _Studies
from stepscope.app.cli.verb import OLD_SPELLINGS
from stepscope.core.errors import InputError
from stepscope.core.model_config import ModelConfig
from stepscope.core.options import GROUPS
from stepscope.core.workloads import TextbookWorkload
from stepscope.engine.workload_options import OneWorkload
from tests import command
from tests.conftest import at_length

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
COMMAND: Any = app
STUDY = COMMAND.commands["study"]
VERBS: dict[str, Any] = {
    **{name: COMMAND.get_command(None, name) for name in COMMAND.commands if name != "study"},
    **{f"study {name}": STUDY.get_command(None, name) for name in STUDY.commands},
}

STATED = {option: None for verb in VERBS for option in VERBS[verb].options if option not in OPTIONS}
"""Options that a verb or a question states in its own signature."""
EVERY_OPTION = (*OPTIONS, *STATED)


PAGE_HEAD = """# Options

Every option of every verb; one name means the same in all of them. `N,...` takes several values, by commas, in verbs
that measure or read several. `stepscope VERB --help` has the defaults and two examples. This page is written from the
signatures of all verbs by `tests/app/cli/test_options.py`.
"""


def options_of(verb: str) -> dict[str, Any]:
    return {name: p for p in VERBS[verb].params if p.param_type_name == "option" for name in p.opts}


def stepscope(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stepscope", *arguments], env={**os.environ, **environment}, cwd=ROOT,
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_every_field_of_a_workload_is_an_option_of_run_sweep_and_fit():
    sizes = (field.name for field in msgspec.structs.fields(ModelConfig) if field.name != "name")
    fields = {*sizes, *(field.name for field in msgspec.structs.fields(TextbookWorkload))}
    flags = {f"--{field.replace('_', '-')}" for field in fields}
    assert flags <= set(options_of("run"))
    assert flags <= set(options_of("sweep"))
    elsewhere = {"--seed", "--parallel", "--ranks"}  # no size depends on the seed, and plan is what fits many devices
    assert flags - elsewhere <= set(options_of("fit"))


def test_one_name_means_one_thing_and_has_one_place():
    for verb, reads in VERBS.items():
        groups = {option.parameter: option.group for option in reads.options}
        for flag, param in options_of(verb).items():
            assert groups.get(param.name) in GROUPS or flag == "--help", (verb, flag)
            assert flag not in OLD_SPELLINGS, f"{verb} still spells {flag}"
    known = {flag for option in EVERY_OPTION for flag in (*option.flag.split("/"), option.short)}
    assert {flag for verb in VERBS for flag in options_of(verb)} <= known | {"--help"}
    used = {(flag, verb) for verb in VERBS for flag in options_of(verb)}
    for option in OPTIONS:
        for verb in option.verbs:
            assert (option.flag.partition("/")[0], verb) in used, f"{verb} has no {option.flag}"


@pytest.mark.parametrize(
    ("listed", "before"), [(_Command.verbs, ""), (_Studies.verbs, "study ")], ids=["verbs", "studies"]
)
def test_the_list_of_verbs_says_what_each_verb_says(listed: dict[str, tuple[str, str]], before: str):
    """The list is read without the verbs, which take their time to import."""
    for name, (_, words) in listed.items():
        said = VERBS[f"{before}{name}"].help
        assert " ".join(said.partition("\n\n")[0].split()) == words


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_two_examples_that_it_understands(verb: str):
    examples = VERBS[verb].verb.examples
    assert len(examples) == 2
    for example in examples:
        words = shlex.split(example)
        name = verb.split()
        assert words[: 1 + len(name)] == ["stepscope", *name]
        VERBS[verb].make_context(verb, words[1 + len(name) :], resilient_parsing=False)


def test_options_that_exclude_or_need_others_are_options_of_the_verb():
    rules = [(verb, rule) for verb in VERBS for rule in VERBS[verb].verb.conflicts]
    assert len(rules) >= 6
    for verb, rule in rules:
        assert {*rule.flags, *rule.others} <= set(options_of(verb)), verb
        assert rule.fault(()) is None
        together = (*rule.flags, *(rule.others or ("--anything",)))
        alone, beside = (together, rule.flags[:1]) if rule.kind == "needs" else (rule.flags[:1], together)
        assert rule.fault(beside), verb
        assert rule.kind == "unread" or rule.fault(alone) is None, verb


@pytest.mark.parametrize("width", [60, 80, 160])
def test_help_is_as_wide_as_the_terminal_and_cuts_nothing(width: int):
    shown = stepscope("--help", COLUMNS=str(width)).stdout
    assert max(map(len, shown.splitlines())) <= width and "..." not in shown.replace("[ARGS]...", "")
    summary = inspect.getdoc(VERBS["trace"].callback) or ""
    assert summary in " ".join(shown.split())
    lines = stepscope("run", "--help-all", COLUMNS=str(width)).stdout.splitlines()
    assert max(len(line) for line in lines if not line.startswith("  stepscope")) <= width
    groups = [line.rstrip(":") for line in lines if re.fullmatch(r"[A-Z][\w ]+:", line)]
    assert groups == ["Model", "Workload", "Many GPUs", "Measuring", "Recording", "Memory", "Stored runs and results",
                      "Output", "Help", "Examples"]  # fmt: skip


def test_help_shows_what_people_use_and_help_all_the_rest():
    """`--help` of `run` shows sixteen options, and how many others there are; a verb with few shows all of them."""
    every = {flag for flag in options_of("run") if flag.startswith("--")} - {"--help"}
    shown, whole = (stepscope("run", flag, COLUMNS="120").stdout for flag in ("--help", "--help-all"))
    few = set(re.findall(r"^  (--[a-z-]+)", shown, re.M)) - {"--help", "--help-all"}
    assert few == {*VERBS["run"].verb.common} < every and len(few) == 16
    assert f"Show the other {len(every) - 16} options" in shown
    assert set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", whole, re.M)) == every | {"--help"}
    assert stepscope("ls", "--help").stdout == stepscope("ls", "--help-all").stdout


def test_the_verbs_stand_in_four_groups_each_once():
    grouped = [name for names in _Command.groups.values() for name in names]
    assert sorted(grouped) == sorted((*_Command.verbs, "study")) and len(_Command.groups) == 4


def test_alone_it_says_what_there_is_to_do_in_this_folder(tmp_path: Path):
    assert command.stepscope(cwd=tmp_path).stdout == ""  # nothing is there: the help, on stderr
    for name, text in (
        ("helpers.py", "import torch\n"),
        ("a fit.py", "from lightning import Trainer\nTrainer().fit(model)\n"),
        ("train.py", "import torch\nloss.backward()\n"),
        ("notes.py", "# loss.backward()\n"),
    ):
        (tmp_path / name).write_text(text)
    shown = command.stepscope(cwd=tmp_path)
    commands = re.findall(r"^  (stepscope .*?)  ", shown.stdout, re.M)
    assert commands == ["stepscope watch -- train.py", "stepscope watch -- 'a fit.py'"] and shown.returncode == 0
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "run.json").write_text("{}")
    assert "  stepscope show last " in command.stepscope(cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ls --out results/h200/limit-80GiB", "ls --runs results/h200/limit-80GiB"),
        ("show xl-b4-s1024 --out=results/h200/limit-80GiB", "show xl-b4-s1024 --runs=results/h200/limit-80GiB"),
        *at_length(("device --read results/h200/device.json", "device --from results/h200/device.json")),
        (
            "study kernels --from results/h200/kernels --question h",
            "study kernels --from results/h200/kernels --only h",
        ),
        (
            "study compile --read results/h200/compile --models small --dtypes bf16 --phases train --only medians",
            "study compile --from results/h200/compile --model small --dtype bf16 --phase train --only medians",
        ),
    ],
)
def test_an_old_spelling_works_and_names_the_new_one(old: str, new: str):
    before, now = stepscope(*old.split()), stepscope(*new.split())
    assert (before.returncode, before.stdout) == (now.returncode, now.stdout)
    spelled = [word.partition("=")[0] for word in old.split() if word.partition("=")[0] in OLD_SPELLINGS]
    said = [line for line in before.stderr.splitlines() if "is spelled" in line]
    assert len(said) == len(spelled) >= 1 and all(flag in line for flag, line in zip(spelled, said, strict=True))
    assert "is spelled" not in now.stderr


def parsed(verb: str, *args: str) -> dict[str, Any]:
    context = VERBS[verb].make_context(verb, list(args))
    return context.params


def test_memory_asks_for_a_record_only_where_no_size_follows(capsys: pytest.CaptureFixture[str]):
    assert parsed("run", "--memory", "80GiB")["memory"] == "80GiB"
    assert parsed("run", "--memory=80GiB")["memory"] == "80GiB"
    assert parsed("sweep", "--memory", "80GiB", "recipe.py")["memory"] == "80GiB"
    assert not capsys.readouterr().err
    for args in (["--memory"], ["--memory", "--json"]):
        found = parsed("run", *args)
        assert (list(found["record"]), found["memory"]) == (["memory"], None)
        assert "--memory where no size follows is spelled --record memory now" in capsys.readouterr().err
    found = parsed("sweep", "--memory", "recipe.py")
    assert list(found["record"]) == ["memory"] and str(found["recipe"]) == "recipe.py"
    assert parsed("fit", "--memory", "8GiB")["memory"] == "8GiB"
    assert parsed("run", "--tag", "--plot", "--trace", "nsys")["record"][0] == "nsys", "a value is no option"


def test_the_old_modes_of_study_attention_are_verbs(capsys: pytest.CaptureFixture[str]):
    app(["study", "attention", "--gate", "--read", "results/h200/attention/gate.json"], standalone_mode=False)
    old = capsys.readouterr()
    app(["study", "attention-gate", "--from", "results/h200/attention/gate.json"], standalone_mode=False)
    assert capsys.readouterr().out == old.out
    assert "study attention --gate is spelled study attention-gate now" in old.err


def value_of(flag: str, verb: str) -> str:
    param = options_of(verb)[flag]
    return "" if param.is_flag else str(param.metavar)


def named(verbs: list[str]) -> str:
    """Verbs in a cell of the page: `study` stands once before the names of studies."""
    studies = [verb.removeprefix("study ") for verb in verbs if verb.startswith("study ")]
    others = [verb for verb in verbs if not verb.startswith("study ")]
    return "; ".join(filter(None, (", ".join(others), f"study {', '.join(studies)}" if studies else "")))


def page() -> str:
    """docs/options.md."""
    parts = [PAGE_HEAD]
    for group in GROUPS:
        parts.append(f"## {group}\n\n| option | what it is | in |\n|---|---|---|")
        for option in (option for option in EVERY_OPTION if option.group == group):
            flag = option.flag.partition("/")[0]
            verbs = [verb for verb in VERBS if option in VERBS[verb].options]
            values = sorted({value_of(flag, verb) for verb in verbs}, key=len)
            others = [verb for verb in VERBS if verb not in verbs]
            places = f"every verb but {named(others)}" if 3 * len(others) < len(verbs) else named(verbs)
            places = places if others else "every verb"
            spelled = f"{option.flag} {values[-1]}".strip().replace("|", "\\|")
            words = f"{option.help} One of {', '.join(option.choices)}.".strip() if option.choices else option.help
            words = words.replace("|", "\\|")
            parts.append(f"| `{spelled}` | {words} | {places} |")
        parts[-1] += "\n"
    parts.append("## Old spellings\n\n| before | now |\n|---|---|")
    parts += [f"| `{old}` | {' or '.join(f'`{name}`' for name in new)} |" for old, new in OLD_SPELLINGS.items()]
    parts += [
        "| `--memory` without a size | `--record memory` |",
        "| `study attention --gate` | `study attention-gate` |",
        "| `study attention --model` | `study attention-step` |",
    ]
    return "\n".join(parts) + "\n"


def test_the_page_of_options_is_the_table():
    path = ROOT / "docs" / "options.md"
    if os.environ.get("STEPSCOPE_UPDATE_DOCS"):
        path.write_text(page())
    assert path.read_text() == page()


def offered(line: str, cwd: Path = ROOT) -> list[str]:
    words = line.split(" ")
    done = subprocess.run(
        [sys.executable, "-c", "from stepscope.app.cli.app import main; main()"], cwd=cwd, capture_output=True,
        text=True,
        env={**os.environ, "_STEPSCOPE_COMPLETE": "bash_complete", "COMP_WORDS": line,
             "COMP_CWORD": str(len(words) - 1)}, check=True, timeout=60,
    )  # fmt: skip
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_a_shell_is_offered_names(tmp_path: Path):
    (tmp_path / "train.py").write_text("import torch\nloss.backward()\n")  # `stepscope` alone says what is next
    assert offered("stepscope s", tmp_path) == ["sweep", "show", "study"]
    assert "attention-gate" in offered("stepscope study atten")
    assert offered("stepscope run --model s") == ["small"]
    assert offered("stepscope sweep --model small,x") == ["small,xl"]
    assert offered("stepscope sweep --dtype bf16,fp1") == ["bf16,fp16"]
    assert offered("stepscope fit --device H2") == ["H200", "H20"]
    assert offered("stepscope memory last --at b") == ["backward"]
    (name,) = offered("stepscope show --runs results/h200/limit-80GiB xl-b4-s1024")
    assert name.startswith("xl-b4-s1024") and list(ROOT.glob(f"results/h200/limit-80GiB/*{name}/run.json"))


def test_the_shell_s_file_loads_the_completion_once(tmp_path: Path):
    (tmp_path / ".bashrc").write_text("alias l=ls")  # no newline at the end
    for _ in range(2):
        done = command.stepscope("--install-completion", HOME=str(tmp_path), SHELL="/bin/bash")
        assert done.returncode == 0 and str(tmp_path / ".bashrc") in done.stdout
    lines = (tmp_path / ".bashrc").read_text().splitlines()
    assert lines == ["alias l=ls", 'eval "$(_STEPSCOPE_COMPLETE=bash_source stepscope)"']
    assert "_STEPSCOPE_COMPLETE=zsh_complete" in command.stepscope("--show-completion", SHELL="/bin/zsh").stdout
    other = command.stepscope("--install-completion", SHELL="/bin/csh")
    assert other.returncode == 2 and "bash, zsh, fish" in other.stderr


@pytest.mark.parametrize("parallel", ["tensor-sequence", "fsdp2-tensor", "context", "context-textbook"])
@pytest.mark.parametrize("model", [{}, {"model": "tiny"}])
def test_ranks_may_share_a_sequence_of_the_usual_length(parallel: str, model: dict[str, str]):
    """What is checked before the device is known has a sequence that can be split."""
    OneWorkload({"parallel": parallel, "ranks": 4, "batch_size": 4, "attention": "sdpa", **model}).check()
    with pytest.raises(InputError, match="seq_len 5 cannot be divided"):
        OneWorkload({"parallel": parallel, "ranks": 4, "seq_len": 5, "attention": "sdpa", "batch_size": 4}).check()
