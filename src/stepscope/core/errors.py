"""The failures that stepscope names. Each is one line for the user and one exit code.

The exit codes are a contract: 0 done, 1 measured but a check failed, 2 wrong input, 3 the device failed.
"""

EXIT_DONE = 0
EXIT_CHECK_FAILED = 1
EXIT_WRONG_INPUT = 2
EXIT_DEVICE_FAILED = 3
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""


class StepscopeError(Exception):
    """A failure the user can act on: the message says what, where and the remedy."""

    exit_code = EXIT_WRONG_INPUT


class InputError(StepscopeError):
    """What the user gave cannot be measured or read as given."""


class DeviceError(StepscopeError):
    """The device could not do the work: out of memory, lost, or broken."""

    exit_code = EXIT_DEVICE_FAILED


def printable(text: str) -> str:
    """The text with everything that could move a cursor or break a line made visible or a space."""
    return "".join(character if character.isprintable() else " " for character in text)


def one_line(error: BaseException, limit: int = 300) -> str:
    """The first sentence-like line of an exception's message, safe to print on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    text = printable(text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def choose(value: str, choices: tuple[str, ...] | list[str], what: str) -> str:
    """Return `value` if it is one of `choices`; otherwise raise an InputError that lists them."""
    if value in choices:
        return value
    raise InputError(f"unknown {what} {value!r}: choose one of {', '.join(choices)}")
