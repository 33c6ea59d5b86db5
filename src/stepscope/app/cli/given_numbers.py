"""Numbers that a user writes in a row, as in `0.5,1,2`: what options of numbers are read by."""

import math
from collections.abc import Sequence

from stepscope.core.errors import InputError
from stepscope.core.workload import NO_CLIP

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


def norm_bound(text: str) -> float | str:
    """What `--clip` says: a number above zero, or none. Raises InputError for anything else."""
    return text if text == NO_CLIP else positive_number(text, "--clip")


def positive_integers(text: str, option: str, *, limit: int) -> tuple[int, ...]:
    """The whole numbers from 1 to `limit` of a list, ascending, each once. Raises InputError for anything else."""
    numbers = positive_numbers(text, option)
    for number in numbers:
        if number != int(number) or number > limit:
            raise InputError(f"{option} holds {number:g}: write whole numbers from 1 to {limit:,}")
    return tuple(int(number) for number in numbers)
