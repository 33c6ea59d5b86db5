"""Environment variables for the processes that a study starts."""

import contextlib
import os
from collections.abc import Generator, Mapping


@contextlib.contextmanager
def child_environment(wanted: Mapping[str, str]) -> Generator[None]:
    """Processes that start in here have these variables; afterwards they are what they were."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
