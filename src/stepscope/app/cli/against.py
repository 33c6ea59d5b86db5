"""`--against`: the other step, said by a run or by the options in which it differs."""

import inspect
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from stepscope.app.cli.verb import options_of
from stepscope.app.cli.workloads import TEXTBOOK_OPTIONS, OneWorkload
from stepscope.core.errors import InputError, one_line
from stepscope.core.own_workload import DrivenWorkload, WatchedWorkload
from stepscope.core.run_directory import find_run

_OF_ANOTHER_STEP = (
    "it takes a run's name, or options of the workload in which the other step differs, as in "
    '--against "--compile default"'
)
_OF_A_STEP = 'write those of a step, as in --against "--dtype bf16"'


def stored_workload(name: str, runs: Path) -> DrivenWorkload:
    """The workload of the run of this name. Raises InputError for a watched loop, which only its script can run."""
    if not name.strip():
        raise InputError(f"--against {name!r} names no run: {_OF_ANOTHER_STEP}")
    workload = find_run(name, runs).workload
    if isinstance(workload, WatchedWorkload):
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

    parameters, call = options_of(take, "run", {})

    def command(**given: Any) -> None:
        call(given)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
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
