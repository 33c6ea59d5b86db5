"""Recipes: a Python file whose function `sweep()` returns the workloads to measure."""

import runpy
import traceback
from pathlib import Path
from typing import Any

from stepscope.core.errors import InputError, one_line
from stepscope.core.workload import Workload

FUNCTION = "sweep"


def load_recipe(path: Path) -> list[Workload]:
    """Run the recipe and return its workloads. Raises InputError naming the file, the line and the fault."""
    if not path.is_file():
        raise InputError(f"no recipe at {path}: give a Python file that defines {FUNCTION}()")
    try:
        function: Any = runpy.run_path(str(path)).get(FUNCTION)
        if not callable(function):
            raise InputError(f"{path} defines no function {FUNCTION}(): write one that returns Workloads")
        made: Any = function()
        workloads = list(made)
    except InputError as error:
        if error.__traceback__ and _line_in(path, error) is None:
            raise
        raise InputError(f"{path} line {_line_in(path, error)}: {error}") from error
    except SyntaxError as error:
        raise InputError(f"{path} line {error.lineno}: {error.msg}") from error
    except Exception as error:  # a recipe is a program: whatever it raises is its fault, and named
        line = _line_in(path, error)
        raise InputError(
            f"{path}{f' line {line}' if line else ''}: {type(error).__name__}: {one_line(error)}"
        ) from error
    strangers = [w for w in workloads if not isinstance(w, Workload)]
    if strangers:
        raise InputError(f"{path}: {FUNCTION}() returned {type(strangers[0]).__name__} among its workloads")
    if not workloads:
        raise InputError(f"{path}: {FUNCTION}() returned no workloads")
    return workloads


def _line_in(path: Path, error: BaseException) -> int | None:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return lines[-1] if lines else None
