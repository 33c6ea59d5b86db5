"""`stepscope compare`: is it faster, by how much, how sure, and which part of the step made it so."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepscope.app.cli.options import run_names
from stepscope.app.cli.output import Presentation, check_picture, draw, warn
from stepscope.app.cli.sweep import captured
from stepscope.app.cli.verb import options_of, verb
from stepscope.core.errors import EXIT_CHECK_FAILED, InputError, choose, one_line
from stepscope.core.files import json_document
from stepscope.core.options import Needs, Option
from stepscope.core.run_directory import find_run
from stepscope.core.units import counted, format_share
from stepscope.core.workloads import Workload
from stepscope.engine.workload_options import TEXTBOOK_OPTIONS, OneWorkload

if TYPE_CHECKING:
    from stepscope.questions.compare import Side, SideComparison, SidePair
    from stepscope.traces.captures.digest import TraceDigest


Value = Annotated[str, Option("The part of the step that is compared, as in forward.")]
FailIfSlower = Annotated[
    str | None,
    Option("Leave with code 1 where something surely became slower by more than this, as in 3%.", metavar="SHARE"),
]
Strict = Annotated[bool, Option("With --fail-if-slower: what cannot be decided fails, too.")]


@verb(
    "compare",
    "stepscope compare runs/before runs/after",
    "stepscope compare results/h200/plain results/h200/tf32 --across dtype",
    conflicts=(Needs("--strict", "--fail-if-slower", "say which change is too much, or leave it out"),),
)
def compare(
    sides: Annotated[
        list[str],
        typer.Argument(
            help="A path, a part of a run's name, `last`, a set, a sweep, a tag or a commit. The first is the base.",
            metavar="BASE OTHER...",
            autocompletion=run_names,
        ),
    ],
    *,
    across: tuple[str, ...] = (),
    value: Value = "step",
    fail_if_slower: FailIfSlower,
    strict: Strict = False,
    runs: Path,
    save: Path | None,
    shown: Presentation,
) -> None:
    """Compare runs, sets, sweeps, tags or commits: what changed, by how much, and how sure that is."""
    check_picture(save)
    from stepscope.questions.compare import comparable_fields, compare_all, side_named
    from stepscope.questions.compare_answer import answer_comparison, comparison_as_json, parse_share, pictured

    limit = parse_share(fail_if_slower, "--fail-if-slower") if fail_if_slower is not None else None
    if len(sides) < 2:
        raise InputError(f"{sides[0]!r} is one side: name what it is compared with, too")
    base, *others = [side_named(name, runs) for name in sides]
    for side in (base, *others):
        _say_faults(side)
    for field in across:
        choose(field, sorted(comparable_fields((base, *others))), "across")
    found = compare_all(base, others, across, value)

    def digests(pair: "SidePair") -> "tuple[TraceDigest | None, TraceDigest | None]":
        before, after = pair.before.representative, pair.after.representative
        return (
            captured(before, pair.before_side.directory(before), keep=False),
            captured(after, pair.after_side.directory(after), keep=False),
        )

    answers = [answer_comparison(one, digests) for one in found]

    def document() -> str:
        documents = [comparison_as_json(one, digests) for one in found]
        return json_document(documents[0] if len(documents) == 1 else documents)

    shown.show(*answers, document=document)
    draw(pictured(answers), save)
    if limit is not None:
        _gate(found, limit, strict=strict)


def _say_faults(side: "Side") -> None:
    for fault in side.faults:
        warn(f"left out: {fault}")


def _gate(found: "list[SideComparison]", limit: float, *, strict: bool) -> None:
    from stepscope.questions.compare_answer import judge

    gate = judge(found, limit)
    for line in gate.slower:
        warn(f"slower than {format_share(limit)} allows: {line}")
    if gate.open:
        named = "; ".join(gate.open[:3]) + (f"; and {len(gate.open) - 3} more" if len(gate.open) > 3 else "")
        warn(f"{counted(len(gate.open), 'pair')} cannot be decided at {format_share(limit)} with what was run: {named}")
    if gate.fails(strict=strict):
        raise typer.Exit(EXIT_CHECK_FAILED)


# `--against`: the other step, said by a run or by the options in which it differs.


_OF_ANOTHER_STEP = (
    "it takes a run's name, or options of the workload in which the other step differs, as in "
    '--against "--compile default"'
)
_OF_A_STEP = 'write those of a step, as in --against "--dtype bf16"'


def stored_workload(name: str, runs: Path) -> Workload:
    """The workload of the run of this name. Raises InputError for a watched loop, which only its script can run."""
    if not name.strip():
        raise InputError(f"--against {name!r} names no run: {_OF_ANOTHER_STEP}")
    workload = find_run(name, runs).workload
    if not workload.may_run:
        raise InputError(f"--against {name}: a loop that was watched runs only by its script; name a run of `run`")
    return workload


def is_options(text: str) -> bool:
    """Whether --against names options, and no run."""
    return text.lstrip().startswith("-")


def with_options(said: OneWorkload, text: str) -> OneWorkload:
    """What was said of the workload, with the options in this text in place of those that it had."""
    other = _read(text, _OF_ANOTHER_STEP).said
    kept = dict(said.said)
    if {"model", "module"} & other.keys():  # another model: what was said of the first one's does not hold for it
        dropped = {"model", "module", "arg", *(TEXTBOOK_OPTIONS if "module" in other else ())}
        kept = {name: value for name, value in kept.items() if name not in dropped}
    arguments = {**_arguments(kept), **_arguments(other)}
    both = {**kept, **other, "arg": tuple(f"{name}={value}" for name, value in arguments.items())}
    return OneWorkload({name: value for name, value in both.items() if name != "arg" or value})


def options_in(text: str) -> dict[str, Any]:
    """The fields of a workload that options say. Raises InputError for a text that is none."""
    if not is_options(text):
        raise InputError(f"--against {text!r} is no options: {_OF_A_STEP}")
    return _read(text, _OF_A_STEP).fields


def _arguments(said: Mapping[str, Any]) -> dict[str, str]:
    parts = (text.partition("=") for text in said.get("arg", ()))
    return {name: value for name, _, value in parts}


def _read(text: str, takes: str) -> OneWorkload:
    """Read options of a workload, as `run` has them. takes: what may be written, in words."""
    found: list[OneWorkload] = []

    def take(*, said: OneWorkload) -> None:
        found.append(said)

    options = options_of(take, "run", {})

    def command(**given: Any) -> None:
        options.call(given)

    options.give_signature(command)
    reader = typer.Typer(add_completion=False, rich_markup_mode=None)
    reader.command(add_help_option=False)(command)
    try:
        words = shlex.split(text)
        typer.main.get_command(reader).main(args=words, prog_name="--against", standalone_mode=False)
    except ValueError as error:
        raise InputError(f"cannot read --against {text!r}: {error}") from None
    except Exception as error:
        message = getattr(error, "format_message", None)  # typer's own errors; their module differs between versions
        if message is None:
            raise
        said = one_line(Exception(message())).removesuffix(".")
        raise InputError(f"--against {text!r}: {said}; {takes}") from None
    if not found or not found[0].said:
        raise InputError(f"--against {text!r} says nothing of a workload: {takes}")
    return found[0]
