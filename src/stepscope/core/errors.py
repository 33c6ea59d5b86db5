"""The failures that stepscope names, each one line and one exit code, and text as it may be shown."""

import contextlib
import functools
import re
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TextIO, TypeVar

import stepscope

_Name = TypeVar("_Name", bound=str)

# Text as it may be shown: nothing in it moves a cursor, turns the direction of writing, or fills a screen.


LONGEST_MESSAGE = 2000
"""The most characters of a message on stderr, since an echoed value may be as long as a command line."""

_UNSEEN = re.compile(r"[^\n\t -~\xa0\u1680\u2000-\u200a\u202f\u205f\u3000]")
"""What may be unseen: all but ASCII and white space. A line may be broken at either of Unicode's two separators."""


def visible(text: str) -> str:
    """The text with every control and format character as JSON escapes it: `\\u001b`. Lines and tabs stay.

    Format characters are those that Unicode gives no width: marks of direction, joiners, tags. Inside JSON text, where
    they occur in strings alone, the escape means the character itself.
    """
    return _UNSEEN.sub(lambda match: _escaped(match[0]), text)


def printable(text: str, most: int | None = None) -> str:
    """The text on one line: white space of any kind is a space, and other characters that are not seen are escaped.
    most: how many characters it may have; more are left out in the middle."""
    if not text.isprintable():
        text = "".join(" " if character.isspace() else _escaped(character) for character in text)
    return text if most is None else middle_cut(text, most)


LONGEST_NAME = 200
"""Characters of a name from a file, which may have any length; real ones are shorter, and whole where there is room."""


def name_shown(text: str) -> str:
    """A name from a file, cleaned and cut for a cell of a table."""
    return printable(text, LONGEST_NAME)


def warn(line: str, stream: TextIO | None = None) -> None:
    """Print one line on stderr, or another stream; one that is gone, closed or full stops nothing. What is too long is
    left out in the middle: the remedy stands at the end."""
    out = stream or sys.stderr
    if out is not None:  # print() would take stdout for it
        with contextlib.suppress(OSError, ValueError):
            print(f"stepscope: {printable(line, LONGEST_MESSAGE)}", file=out, flush=True)


def middle_cut(text: str, width: int) -> str:
    """At most `width` characters, with an ellipsis for what is left out of the middle."""
    if len(text) <= width:
        return text
    if width < 2:
        return "…"[:width]
    head = width // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


# The failures that stepscope names. Each is one line for the user and one exit code.
#
# The exit codes are a contract: 0 done, 1 measured but a check failed, 2 wrong input, 3 the device failed, 130 stopped
# by SIGINT (Ctrl-C), 143 by SIGTERM, 129 by SIGHUP.

EXIT_DONE = 0
EXIT_CHECK_FAILED = 1
EXIT_WRONG_INPUT = 2
EXIT_DEVICE_FAILED = 3
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it. Another signal has a code of its own: `interrupts.exit_code`."""


class StepscopeError(Exception):
    """A failure the user can act on: the message says what, where and the remedy."""

    exit_code = EXIT_WRONG_INPUT


class InputError(StepscopeError):
    """Raised where the user's input cannot be measured or read as given."""


class DeviceError(StepscopeError):
    """Raised where the device could not do the work: out of memory, lost, or broken."""

    exit_code = EXIT_DEVICE_FAILED


class GateFailure(StepscopeError):
    """Raised for an implementation that computes something else than it should, so that its times mean nothing."""

    exit_code = EXIT_CHECK_FAILED


class LimitExceeded(StepscopeError):
    """Raised where a result is beyond a limit that the user gave."""

    exit_code = EXIT_CHECK_FAILED


def one_line(error: BaseException, limit: int = 300) -> str:
    """The first sentence-like line of an exception's message, safe to print on one line."""
    return middle_cut(printable(_first_line(error) or type(error).__name__), limit)


def named_line(error: BaseException, limit: int = 300) -> str:
    """The exception's class, its message on one line, and the line of the user's own code that raised it: `ValueError:
    no more (train.py:12)`. An error of our own is its message alone."""
    if isinstance(error, StepscopeError):
        return one_line(error, limit)
    lines = [line for line in map(str.strip, message_of(error).splitlines()) if line]
    words = f"{type(error).__name__}: {' '.join(lines)}".removesuffix(": ")
    if len(lines) > 1 and len(words) > limit:  # the first lines say most; of one line the end may
        words = f"{words[: limit - 1]}…"
    place = raised_at(error)
    return printable(words, limit) + (f" ({place})" if place else "")


def raised_at(error: BaseException) -> str:
    """The innermost line of a user's own file that the exception came through, as file:line; empty where there is none,
    or where the message has it."""
    passed = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in passed if _is_users(file)]
    if not own or isinstance(error, SyntaxError):
        return ""
    file, line = own[-1]
    with contextlib.suppress(ValueError, OSError):
        file = str(Path(file).relative_to(Path.cwd()))
    return f"{printable(portable_path(file))}:{line}"


@functools.cache
def _is_users(file: str) -> bool:
    """Whether a file is neither ours nor a library's. Libraries may lie in places that this Python does not name."""
    is_library = file.startswith(install_places()) or {"site-packages", "dist-packages"} & {*PurePath(file).parts}
    return not is_library and Path(file).is_file()


def message_of(error: BaseException) -> str:
    """The exception's message, of several lines also without the quotes of a KeyError; empty where its own `__str__`
    raises."""
    try:
        if isinstance(error, KeyError) and "\n" in str(error.args[0]):
            return str(error.args[0])
        return str(error)
    except Exception:  # A user's own class may raise anything.
        return ""


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in message_of(error).splitlines() if line.strip()), "")


def choose(value: str, choices: Sequence[_Name], what: str) -> _Name:
    """The one of `choices` that `value` is. Raises an InputError that lists them where it is none."""
    for choice in choices:
        if choice == value:
            return choice
    raise InputError(f"unknown {what} {value!r}: choose one of {', '.join(choices)}")


# Names of source files without the place where this machine keeps them: what is written can be shown to others.


@functools.cache
def install_places() -> tuple[str, ...]:
    """Directories that packages and the standard library lie in, each with a slash at its end, longest first."""
    places = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
    places.add(str(Path(stepscope.__file__).parents[1]))
    return tuple(sorted((f"{place}/" for place in places if place), key=len, reverse=True))


def without_install_places(text: str) -> str:
    """The text, with files named from their package on: `torch/nn/modules/module.py`."""
    for place in install_places():
        text = text.replace(place, "")
    return text


def portable_path(file: str) -> str:
    """A file's name from its package on; of a file in no package (a script, generated code) its last two parts. Bytes
    that are no UTF-8 are escaped: a name is written into a run."""
    file = file.encode(errors="backslashreplace").decode()
    for place in install_places():
        if file.startswith(place):
            return file.removeprefix(place)
    path = PurePath(file)
    return "/".join(path.parts[1:][-2:]) if path.is_absolute() else file
