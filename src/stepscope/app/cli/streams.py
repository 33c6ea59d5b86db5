"""stdin, stdout and stderr, mended for our own verbs and given back to a script that is not ours."""

import io
import os
import sys
from typing import TextIO

_STREAMS = ("stdin", "stdout", "stderr")
_FIRST_OWN = 200
"""The least number of a descriptor of ours beside a script, whose own then have the numbers that they would have."""
_errors: dict[io.TextIOWrapper, str | None] = {}
_were_closed: list[int] = []
_were_none: list[str] = []


def mend() -> None:
    """Streams that were closed go nowhere, and a narrow encoding gets `?` for what it cannot say."""
    for number, name in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            _were_closed.append(number)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115
            _were_none.append(name)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            _errors[stream] = stream.errors
            stream.reconfigure(errors="replace")


def give_back() -> TextIO | None:
    """Give the streams back as they were before `mend`. Returns a stream of our own to where stderr leads, whatever
    becomes of that; None if it is closed."""
    own = _own_stderr() if 2 not in _were_closed else None
    for stream, errors in _errors.items():
        stream.reconfigure(errors=errors)
    for name in _were_none:
        setattr(sys, name, None)
    for number in _were_closed:
        os.close(number)
    for known in (_errors, _were_none, _were_closed):
        known.clear()
    return own


def _own_stderr() -> TextIO | None:
    try:
        import fcntl  # not on every system

        number = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN)
    except (ImportError, OSError):
        number = os.dup(2)
    encoding = getattr(sys.__stderr__, "encoding", None) or "utf-8"
    stream = open(number, "w", encoding=encoding, errors="replace", closefd=False)  # noqa: SIM115
    if hasattr(os, "register_at_fork"):  # a child that lives on would keep a reader of stderr waiting
        os.register_at_fork(after_in_child=lambda: os.close(number))
    return stream
