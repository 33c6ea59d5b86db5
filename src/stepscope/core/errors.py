"""The failures that stepscope names. Each is one line for the user and one exit code.

The exit codes are a contract: 0 done, 1 measured but a check failed, 2 wrong input, 3 the device failed, 130 stopped by
SIGINT (Ctrl-C), 143 by SIGTERM, 129 by SIGHUP.
"""

from stepscope.core.shown_text import middle_cut, printable

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


class Stopped(StepscopeError):
    """Raised where the user stopped the work; the message says how it can go on."""

    exit_code = EXIT_INTERRUPTED


class DeviceError(StepscopeError):
    """Raised where the device could not do the work: out of memory, lost, or broken."""

    exit_code = EXIT_DEVICE_FAILED


def one_line(error: BaseException, limit: int = 300) -> str:
    """The first sentence-like line of an exception's message, safe to print on one line."""
    return middle_cut(printable(_first_line(error) or type(error).__name__), limit)


def named_line(error: BaseException, limit: int = 300) -> str:
    """The exception's class and its first line: `ValueError: no more`. An error of our own is its message alone."""
    line = _first_line(error)
    if not line or isinstance(error, StepscopeError):
        return one_line(error, limit)
    return middle_cut(printable(f"{type(error).__name__}: {line}"), limit)


def message_of(error: BaseException) -> str:
    """The exception's message; empty where its own `__str__` raises."""
    try:
        return str(error)
    except Exception:  # A user's own class may raise anything.
        return ""


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in message_of(error).splitlines() if line.strip()), "")


def choose(value: str, choices: tuple[str, ...] | list[str], what: str) -> str:
    """Return `value` if it is one of `choices`; otherwise raise an InputError that lists them."""
    if value in choices:
        return value
    raise InputError(f"unknown {what} {value!r}: choose one of {', '.join(choices)}")
