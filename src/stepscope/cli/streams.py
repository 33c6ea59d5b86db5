"""stdin, stdout and stderr, mended for our own verbs and given back to a script that is not ours."""

import io
import os
import sys

_errors: dict[io.TextIOWrapper, str | None] = {}


def mend() -> None:
    """Streams that were closed go nowhere, and a narrow encoding gets `?` for what it cannot say."""
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            _errors[stream] = stream.errors
            stream.reconfigure(errors="replace")


def unmend() -> None:
    """Let both streams treat what they cannot say as they did before."""
    for stream, errors in _errors.items():
        stream.reconfigure(errors=errors)
    _errors.clear()
