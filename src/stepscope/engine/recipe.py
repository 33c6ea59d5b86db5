"""Recipes: a Python file whose function `sweep()` returns the workloads to measure. It runs in a process of its own."""

import itertools
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec

from stepscope.core.errors import InputError, one_line
from stepscope.core.workloads import TextbookWorkload
from stepscope.engine.own_code import answer_apart, ask_apart

FUNCTION = "sweep"
MOST = 10_000


def load_recipe(path: Path) -> list[TextbookWorkload]:
    """Run the recipe, with the user's rights, and return its workloads.

    Raises InputError naming the file, the line and the fault.
    """
    if not path.is_file():
        raise InputError(f"no recipe at {path}: give a Python file that defines {FUNCTION}()")
    found = ask_apart(__name__, str(path), what=f"the recipe {path}")
    return msgspec.json.decode(found, type=list[TextbookWorkload])


def main(path: str) -> str:
    """Write the workloads of the recipe as JSON, for `load_recipe`."""
    return msgspec.json.encode(evaluate(Path(path))).decode()


def evaluate(path: Path) -> list[TextbookWorkload]:
    """The workloads that the recipe returns, run in this process."""
    sys.path.insert(0, str(path.resolve().parent))  # a recipe may import the files beside it
    try:
        return _workloads_of(path)
    except SyntaxError as error:
        where = error.filename if error.filename and Path(error.filename).name != path.name else path
        raise InputError(f"{where}{f' line {error.lineno}' if error.lineno else ''}: {error.msg}") from error
    except BaseException as error:  # a recipe is a program: whatever it raises is its own fault, and is reported
        line = _line_in(path, error)
        if isinstance(error, InputError) and line is None:
            raise
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        raise InputError(f"{path}{f' line {line}' if line else ''}: {kind}{one_line(error)}") from error


def _workloads_of(path: Path) -> list[TextbookWorkload]:
    function: Any = runpy.run_path(str(path)).get(FUNCTION)
    if not callable(function):
        raise InputError(f"{path} defines no function {FUNCTION}(): write one that returns Workloads")
    made: Any = function()
    workloads: list[Any] = list(itertools.islice(made, MOST + 1))
    strangers = [w for w in workloads if not isinstance(w, TextbookWorkload)]
    if strangers:
        raise InputError(f"{path}: {FUNCTION}() returned {type(strangers[0]).__name__} among its workloads")
    if not workloads:
        raise InputError(f"{path}: {FUNCTION}() returned no workloads")
    if len(workloads) > MOST:
        raise InputError(f"{path}: {FUNCTION}() returned more than {MOST:,} workloads")
    return workloads


def _line_in(path: Path, error: BaseException) -> int | None:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return lines[-1] if lines else None


if __name__ == "__main__":
    answer_apart(main)
