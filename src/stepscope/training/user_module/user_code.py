"""Runs a user's code: whatever it raises becomes one line, and what it prints does not go to our stdout."""

import contextlib
import sys
from collections.abc import Iterator

from stepscope.core.errors import DeviceError, InputError, StepscopeError, named_line, one_line
from stepscope.recording.device import is_out_of_memory


@contextlib.contextmanager
def said_of(what: str) -> Iterator[None]:
    """While open, whatever a user's own code raises becomes an error of one line that begins with `what`."""
    try:
        yield
    except (KeyboardInterrupt, StepscopeError):
        raise
    except BaseException as error:  # The user's own code may raise anything.
        if is_out_of_memory(error):
            raise DeviceError(f"{what}: {one_line(error)}") from error
        raise InputError(f"{what}: {named_line(error)}") from error


def printed_to_stderr() -> contextlib.AbstractContextManager[object]:
    """While open, what Python code prints goes to stderr: stdout is for our result."""
    return contextlib.redirect_stdout(sys.stderr)
