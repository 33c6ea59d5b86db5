"""Verbs and their options as records. A verb is a function, and the command line is made from its signature.

    Again = Annotated[bool, Option("Measure anew even if ceilings are stored.", MEASURING)]

    @verb("device", "stepscope device", "stepscope device --again")
    def device(*, device: str, again: Again = False, shown: Presentation) -> None:
        ...  # the docstring is the help

A parameter that states no Option takes the one of its name in the table of options that verbs share
(`app/cli/options.py`). The type says what the option takes: `tuple[int, ...]` is several numbers with commas between.
Nothing here is built before a command is asked for: to import a verb takes no time.
"""

import inspect
import keyword
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal, TypeVar, get_args, get_type_hints

import msgspec

from stepscope.core.errors import InputError

MODEL, WORKLOAD, CALLS, TRAINING, NUMBERS = "Model", "Workload", "Attention calls", "Training", "Numbers"
MEASURING, RECORDING, SWEEPING = "Measuring", "Recording", "Sweep"
PARALLEL = "Many GPUs"
BUDGET, QUESTION, STORED, OUTPUT = "Memory", "Question", "Stored runs and results", "Output"

F = TypeVar("F", bound=Callable[..., Any])

GROUPS = (
    MODEL, WORKLOAD, PARALLEL, CALLS, TRAINING, NUMBERS, MEASURING, RECORDING, SWEEPING, BUDGET, QUESTION, STORED,
    OUTPUT,
)  # fmt: skip
"""The groups of options, in the order in which a help text shows them."""


class Option(msgspec.Struct, frozen=True):
    """One option of the command line. In a signature, its parameter says name and type."""

    help: str
    group: str = QUESTION
    name: str = ""
    """The parameter's; the option is spelled like it."""
    takes: Callable[[str], Any] | None = None
    """int, float, bool, str or Path, or a function that makes a value of the text. None: the parameter's type."""
    default: Any = None
    choices: tuple[str, ...] = ()
    """Values that may be given: the help lists them, and the shell completes them."""
    metavar: str | None = None
    least: float | None = None
    repeated: bool = False
    """Whether several values are given by several options, and not by commas."""
    verbs: tuple[str, ...] = ()
    """The verbs that this line is for; it takes precedence over one for all verbs. Empty: all verbs."""
    spelled: str = ""
    """How the option is written, where that is not --name."""
    complete: Callable[..., list[str]] | None = None
    short: str = ""
    """A second way to write it, of one letter: `-o`."""

    @property
    def flag(self) -> str:
        """The option as a user writes it, and as messages name it: `--seq-len`."""
        return self.spelled or f"--{self.name.replace('_', '-')}"

    @property
    def parameter(self) -> str:
        """The name of the verb's parameter: the option's, with an underscore behind a keyword of Python."""
        return f"{self.name}_" if keyword.iskeyword(self.name) else self.name


def completed(*names: str) -> Callable[[str], list[str]]:
    """A function that offers these names to a shell, also after a comma."""

    def offer(incomplete: str) -> list[str]:
        before, comma, begun = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names if name.startswith(begun)]

    return offer


DEVICES = completed("auto", "cpu", "cuda", "cuda:0", "cuda:1")


# Options that exclude or need one another.


_ALWAYS = ("--only", "--style", "--brief", "--json", "--save", "--device")
"""What shows an answer, and the device, which a script may name for all that it runs."""
GIVEN: ContextVar[tuple[str, ...]] = ContextVar("given", default=())
"""The options that this command line has, set before its verb runs. Those that only have a default are not."""


def refuse_beside(mode: str, *read: str) -> None:
    """Raise InputError for given options that are not read beside `mode`."""
    if fault := Rule("alone", (mode, *read)).fault((mode, *GIVEN.get())):
        raise InputError(fault)


class Rule(msgspec.Struct, frozen=True):
    """Options that exclude or need one another."""

    kind: Literal["conflict", "needs", "unread", "alone"]
    """conflict: one of the flags may be given. needs: the first says something beside the second only. unread: the
    verb does not read the first, though other verbs do. alone: beside the first no others are read, but for the rest
    of the flags; or, where there are `others`, not these."""
    flags: tuple[str, ...]
    why: str = ""
    """What is wrong, in words. {} stands for the options that are too many."""
    others: Collection[str] = ()

    def fault(self, chosen: Collection[str]) -> str | None:
        """What is wrong with these options, in words."""
        first = self.flags[0]
        if self.kind == "conflict":
            both = [flag for flag in self.flags if flag in chosen]
            return self.why.format(" and ".join(both)) if len(both) > 1 else None
        if first not in chosen or (self.kind == "needs" and self.flags[1] in chosen):
            return None
        if self.kind != "alone":
            return self.why
        useless = [flag for flag in chosen if flag not in (*self.flags, *_ALWAYS)]
        if self.others:
            useless = [flag for flag in self.others if flag in chosen]
        why = self.why or f"{{}} says nothing with {first}: leave it out"
        return why.format(", ".join(useless)) if useless else None


# Verbs.


class Argument(msgspec.Struct, frozen=True):
    """What a verb takes that no option names. In a signature, its parameter says name and type."""

    help: str
    metavar: str | None = None
    names_a_run: bool = False
    """Whether a shell offers the runs under --runs."""


def file_or_run(files: str) -> Argument:
    """The argument that names a file of these kinds, or a run that holds one."""
    return Argument(f"{files}, a run directory, a part of a run's name, or `last`.", names_a_run=True)


class Verb(msgspec.Struct, frozen=True):
    """One command of the command line."""

    name: str
    function: Callable[..., int | None]
    """Its parameters are the options, its docstring is the help, and it may return an exit code."""
    examples: tuple[str, ...] = ()
    """Two command lines, which the help shows."""
    conflicts: tuple[Rule, ...] = ()
    defaults: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    """What an option is when it is left out, in words, where that is no constant of the signature."""
    common: tuple[str, ...] = ()
    """The options that `--help` shows, where `--help-all` shows more; empty: all of them."""


def verb(
    name: str, *examples: str, conflicts: tuple[Rule, ...] = (), common: str = "", **defaults: str
) -> Callable[[Callable[..., int | None]], Verb]:
    """A decorator that makes a Verb of a function."""
    return lambda function: Verb(name, function, examples, conflicts, defaults, tuple(common.split()))


def spelled_out(*, before: str = "") -> Callable[[F], F]:
    """A decorator of a function whose last keywords are a record, `**options: Unpack[Record]`: its signature names each
    of the record's, before the parameter of this name or at the end, and its help where it says {options}. They are
    None where they are left out."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        *named, keywords = signature.parameters.values()
        kinds = get_type_hints(get_args(keywords.annotation)[0])
        spelled = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in kinds.items()
        ]
        place = list(signature.parameters).index(before or keywords.name)
        parameters = [*named[:place], *spelled, *named[place:]]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        *first, last = kinds
        function.__doc__ = (function.__doc__ or "").replace("{options}", f"{', '.join(first)} and {last}")
        return function

    return decorate


# Lists of words and numbers, as in `0.5,1,2`: what options of several values are read by.


def words(text: str, option: str) -> list[str]:
    """A comma-separated list of words, each once."""
    parts = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not parts:
        raise InputError(f"{option} is empty: name at least one")
    return parts


def several(text: str, option: Option) -> tuple[Any, ...]:
    """What a comma-separated list says, each word once."""
    parts = words(text, option.flag)
    try:
        return tuple(option.takes(word) if option.takes is not None else word for word in parts)
    except ValueError:
        expected = "whole numbers, as in 128,256" if option.takes is int else "numbers, as in 1e-4,1e-3"
        raise InputError(f"cannot read {option.flag} {text!r}: write {expected}") from None


Numbers = Sequence[float]
"""The annotation of an option that takes a row of numbers as a whole."""


def finite_numbers(text: str, option: str) -> tuple[float, ...]:
    """The finite numbers of a comma-separated list. Raises InputError for anything else in it, or an empty entry."""
    words = [word.strip() for word in text.split(",")]
    numbers: list[float] = []
    for word in words:
        try:
            number = float(word)
        except ValueError:
            raise InputError(f"{option} holds {word!r}, which is no number: write numbers, as in 0.5,1,2") from None
        if not math.isfinite(number):
            raise InputError(f"{option} holds {word!r}, which is not finite: leave it out")
        numbers.append(number)
    return tuple(numbers)


def positive_numbers(text: str, option: str) -> tuple[float, ...]:
    """The numbers of a comma-separated list, ascending, each once. Raises InputError for one that is not above zero."""
    numbers = finite_numbers(text, option)
    if min(numbers) <= 0:
        raise InputError(f"{option} holds {min(numbers):g}: write numbers above zero")
    return tuple(sorted(set(numbers)))


def positive_number(text: str, option: str) -> float:
    """The one number above zero that the text holds. Raises InputError for anything else."""
    number, *more = positive_numbers(text, option)
    if more:
        raise InputError(f"{option} holds {1 + len(more)} numbers: write one")
    return number


def positive_integers(text: str, option: str, *, limit: int) -> tuple[int, ...]:
    """The whole numbers from 1 to `limit` of a list, ascending, each once. Raises InputError for anything else."""
    numbers = positive_numbers(text, option)
    for number in numbers:
        if number != int(number) or number > limit:
            raise InputError(f"{option} holds {number:g}: write whole numbers from 1 to {limit:,}")
    return tuple(int(number) for number in numbers)
