"""Frames of Python's own stack, laid so that no loop of a test begins and ends a piece of it.

Python maps the frames of a thread in pieces of 16 KiB. Where the calls of a loop pass the end of a piece, each call
maps a page and each return gives it back: 700,000 times in one file of tests, half of its time. A frame that is larger
than a piece begins one of 1 MiB, and the frames above it have the rest of that.
"""

from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


def with_room(run: Callable[[], _Result]) -> _Result:
    """Call `run` from a frame that leaves room for all frames above it."""
    return run()


with_room.__code__ = with_room.__code__.replace(co_stacksize=66_000)
