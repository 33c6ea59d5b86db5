"""Options as records: a verb and a question state theirs in their signatures, and the command line is made from these.

    Value = Annotated[str | None, Option("What does each format make of this number?", NUMBERS)]

    def study_formats(*, value: Value = None, device: str = "cpu") -> Answer: ...

A parameter that states no Option takes the one of its name in the table of options that verbs share
(`app/cli/options.py`). The type says what the option takes: `tuple[int, ...]` is several numbers with commas between.
"""

import keyword
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from stepscope.core.errors import InputError

MODEL, WORKLOAD, CALLS, TRAINING, NUMBERS = "Model", "Workload", "Attention calls", "Training", "Numbers"
MEASURING, RECORDING, SWEEPING = "Measuring", "Recording", "Sweep"
PARALLEL = "Many GPUs"
BUDGET, QUESTION, STORED, OUTPUT = "Memory", "Question", "Stored runs and results", "Output"

GROUPS = (
    MODEL, WORKLOAD, PARALLEL, CALLS, TRAINING, NUMBERS, MEASURING, RECORDING, SWEEPING, BUDGET, QUESTION, STORED,
    OUTPUT,
)  # fmt: skip
"""The groups of options, in the order in which a help text shows them."""


@dataclass(frozen=True, slots=True)
class Option:
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

    @property
    def words(self) -> str:
        """The option's help, with its choices."""
        return f"{self.help} One of {', '.join(self.choices)}.".strip() if self.choices else self.help


def completed(*names: str) -> Callable[[str], list[str]]:
    """A function that offers these names to a shell, also after a comma."""

    def offer(incomplete: str) -> list[str]:
        before, comma, begun = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names if name.startswith(begun)]

    return offer


DEVICES = completed("auto", "cpu", "cuda", "cuda:0", "cuda:1")


# Options on the command line: those that only have a default, nobody asked for.


_ALWAYS = ("--only", "--style", "--brief", "--json", "--save", "--device")
"""What shows an answer, and the device, which a script may name for all that it runs."""
_given: ContextVar[tuple[str, ...]] = ContextVar("given", default=())


def remember(flags: Iterable[str]) -> None:
    """Keep the options that this command line has, before its verb runs."""
    _given.set(tuple(flags))


def is_given(flag: str) -> bool:
    """Whether the command line has this option."""
    return flag in _given.get()


def refuse_beside(mode: str, *read: str) -> None:
    """Raise InputError for given options that are not read beside `mode`."""
    useless = [flag for flag in _given.get() if flag not in (mode, *read, *_ALWAYS)]
    if useless:
        raise InputError(f"{', '.join(useless)} says nothing with {mode}: leave it out")


@dataclass(frozen=True)
class Conflict:
    """Two options of which one alone may be given."""

    first: str
    second: str
    why: str

    def fault(self, given: Collection[str]) -> str | None:
        """What is wrong with these options, in words."""
        return self.why if {self.first, self.second} <= {*given} else None


@dataclass(frozen=True)
class Needs:
    """An option that says something beside another one only."""

    option: str
    other: str
    why: str

    def fault(self, given: Collection[str]) -> str | None:
        """What is wrong with these options, in words."""
        lacking = self.option in given and self.other not in given
        return f"{self.option} belongs to {self.other}: {self.why}" if lacking else None


# Lists of words and numbers, as in `0.5,1,2`: what options of several values are read by.


def words(text: str, option: str) -> list[str]:
    """A comma-separated list of words, each once."""
    found = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not found:
        raise InputError(f"{option} is empty: name at least one")
    return found


def several(text: str, option: Option) -> tuple[Any, ...]:
    """What a comma-separated list says, each word once."""
    found = words(text, option.flag)
    try:
        return tuple(option.takes(word) if option.takes is not None else word for word in found)
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
