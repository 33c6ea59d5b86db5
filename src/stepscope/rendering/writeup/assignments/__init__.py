"""Assignments, a file each with `ASSIGNMENT`. To add one, add its file: `--assignment` offers what lies here."""

import importlib
import pkgutil

from stepscope.core.errors import choose
from stepscope.rendering.writeup.document import Assignment

NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def assignment_named(name: str) -> Assignment:
    """The assignment of this name. Raises InputError, with the names, for another."""
    choose(name, NAMES, "assignment")
    return importlib.import_module(f"{__name__}.{name}").ASSIGNMENT
