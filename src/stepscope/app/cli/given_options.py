"""Which options stand on the command line: those that only have a default, nobody asked for."""

from collections.abc import Iterable
from contextvars import ContextVar

from stepscope.core.errors import InputError

_ALWAYS = ("--only", "--style", "--brief", "--json", "--save", "--device")
"""What shows an answer, and the device, which a script may name for all that it runs."""
_given: ContextVar[tuple[str, ...]] = ContextVar("given", default=())


def remember(flags: Iterable[str]) -> None:
    """Keep the options that this command line has; the grammar says them before a verb runs."""
    _given.set(tuple(flags))


def is_given(flag: str) -> bool:
    """Whether the command line has this option."""
    return flag in _given.get()


def refuse_beside(mode: str, *read: str) -> None:
    """Raise InputError for given options that are not read beside `mode`."""
    useless = [flag for flag in _given.get() if flag not in (mode, *read, *_ALWAYS)]
    if useless:
        raise InputError(f"{', '.join(useless)} says nothing with {mode}: leave it out")
