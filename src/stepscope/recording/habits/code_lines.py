"""The line of the user's code that is running, found from the stack."""

import functools
import sys
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

from stepscope.core.portable_paths import install_places, portable_path

_TORCH = str(Path(torch.__file__).parent) + "/"
_WRAPPERS = ("wrapper", "wrapped", "decorate", "__torch_", "handle_torch", "_fn", "inner", "profile_hook")
"""Parts of the names of functions that only call another one."""


class Line(NamedTuple):
    """A line of code, and the function of PyTorch that it called, if that is one written in Python."""

    where: str
    function: str


def users_line() -> Line | None:
    """The innermost line of the user's code, outside of PyTorch, of packages and of this tool; None without one.

    Where packages lie in between, as a trainer does, their innermost line stands first.
    """
    frame: FrameType | None = sys._getframe(1)
    function = package = ""
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        owner = _owner(file)
        here = f"{_named(file)}:{frame.f_lineno}"
        if owner == "user":
            return Line(f"{package} (from {here})" if package else here, function)
        if owner == "torch" and not package and not any(part in name for part in _WRAPPERS):
            function = name
        elif owner == "package" and not package:
            package = here
        frame = frame.f_back
    return Line(package, function) if package else None


@functools.cache
def _owner(file: str) -> str:
    if file.startswith(_TORCH):
        return "torch"
    if file.startswith("<frozen"):
        return "python"
    path = portable_path(file)
    if not any(file.startswith(place) for place in install_places()):
        return "user"
    if path.startswith("stepscope/"):
        return "stepscope"
    return "package" if "-packages/" in file else "python"


@functools.cache
def _named(file: str) -> str:
    return portable_path(file)
