"""Stacks and ranges as an event of a snapshot carries them: in PyTorch's form, and the same on any machine."""

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from stepscope.core.portable_paths import portable_path

Frame = tuple[str, str, int]
"""A frame as (function, file, line); for an operator (its name, "", 0)."""

_OUR_FILES = ("stepscope/recording/", "stepscope/engine/")
_WATCHING = "stepscope/recording/watch/"
"""Where a watched loop's own calls pass through ours."""


def joined_ranges(names: Sequence[str]) -> str:
    """Open ranges as one text, outermost first. A module is left out if one inside it follows, whose path names it."""
    pairs = itertools.zip_longest(names, names[1:], fillvalue="")
    return "|".join(name for name, inner in pairs if not inner.startswith(f"{name}."))


class StackTable:
    """Makes equal stacks and frames the same object, since pickle writes an object only once."""

    def __init__(self) -> None:
        self._frames: dict[Frame, dict[str, Any]] = {}
        self._stacks: dict[tuple[Frame, ...], list[dict[str, Any]]] = {}

    def stack(self, frames: Iterable[Frame]) -> list[dict[str, Any]]:
        """The frames (function, file, line), innermost first, as PyTorch writes them: up to our own, which ran the
        step, and with files named from their package on."""
        named = (frame for frame in map(_portable_frame, frames) if not frame[1].startswith(_WATCHING))
        key = tuple(itertools.takewhile(lambda frame: not frame[1].startswith(_OUR_FILES), named))
        if key not in self._stacks:
            self._stacks[key] = [self._frame(frame) for frame in key]
        return self._stacks[key]

    def _frame(self, frame: Frame) -> dict[str, Any]:
        if frame not in self._frames:
            name, file, line = frame
            self._frames[frame] = {"name": name, "filename": file, "line": line}
        return self._frames[frame]


@functools.cache
def _portable_file(file: str) -> str:
    return portable_path(file)


def _portable_frame(frame: Frame) -> Frame:
    name, file, line = frame
    return name, _portable_file(file), line
