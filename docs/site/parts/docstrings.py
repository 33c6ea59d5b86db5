"""Docstrings as the source writes them, for Sphinx, and the check that every public name has one.

In the source an indented block is code, a name in backticks is one, and a line that begins with `name:` says what an
argument is.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from sphinx.application import Sphinx
from sphinx.util import logging

import stepscope

_LOG = logging.getLogger(__name__)
ARGUMENT = re.compile(r"^(?P<names>\w+(?:, \w+)*)(?P<with>=\w+)?: (?P<said>.+)$")
PAGES = Path(__file__).parents[1] / "api"


def restructured(lines: list[str], arguments: frozenset[str] = frozenset()) -> Iterator[str]:
    """The lines in Sphinx's markup."""
    before, code, said = "", False, False
    for line in lines:
        argument = ARGUMENT.match(line)
        if argument and set(argument["names"].split(", ")) <= arguments:
            yield from ([""] if before else [])
            yield f"- **{argument['names']}**{argument['with'] or ''}: {_marked(argument['said'])}"
            code, said = False, True
        elif not line.strip():
            yield ""
            said = False
        else:
            if line.startswith("    ") and not code and not before:
                yield from ("::", "")
                code = True
            code = code and line.startswith("    ")
            yield line if code else f"  {_marked(line)}" if said else _marked(line)
        before = line.strip()


def _marked(line: str) -> str:
    return re.sub(r"`([^`]+)`", r"``\1``", line)


def undocumented() -> Iterator[str]:
    """The public names that say nothing of themselves: those of `import stepscope`, and those on the API's pages."""
    for name in (each for each in stepscope.__all__ if not each.startswith("__")):
        found = getattr(stepscope, name)
        if isinstance(found, type):
            yield from _silent_in(found)
        elif not found.__doc__:
            yield f"stepscope.{name}"
    for page in sorted(PAGES.glob("*.md")):
        for named in re.findall(r"autoclass:: (stepscope\.core\.\S+)", page.read_text()):
            module, _, name = named.rpartition(".")
            yield from _silent_in(getattr(importlib.import_module(module), name))


def unlisted() -> Iterator[str]:
    """The names of `import stepscope` that no page of the API has."""
    pages = "\n".join(page.read_text() for page in PAGES.glob("*.md"))
    listed = set(re.findall(r":: stepscope\.(\w+)$", pages, re.MULTILINE))
    yield from (f"stepscope.{name}" for name in stepscope.__all__ if not name.startswith("__") and name not in listed)


def _silent_in(found: type) -> Iterator[str]:
    """The class, and the methods, properties and fields that it defines itself, where they have no docstring.

    A record is named by its fields, so those of msgspec need none; the results' own do.
    """
    tree = ast.parse(inspect.getsource(found))
    named = tree.body[0]
    assert isinstance(named, ast.ClassDef)
    if ast.get_docstring(named) is None:
        yield found.__name__
    for part, after in zip(named.body, [*named.body[1:], None], strict=True):
        if isinstance(part, ast.FunctionDef) and not part.name.startswith("_") and ast.get_docstring(part) is None:
            yield f"{found.__name__}.{part.name}"
        elif isinstance(part, ast.AnnAssign) and not issubclass(found, msgspec.Struct):
            said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            yield from () if said else (f"{found.__name__}.{ast.unparse(part.target)}",)


def _check(_: Sphinx) -> None:
    for name in undocumented():
        _LOG.warning("%s is public, and has no docstring", name)
    for name in unlisted():
        _LOG.warning("%s is public, and on no page of the API", name)


def _process(_app: Sphinx, what: str, _name: str, found: Any, _options: Any, lines: list[str]) -> None:
    callable_ = what in {"function", "method"}
    lines[:] = restructured(list(lines), frozenset(inspect.signature(found).parameters if callable_ else ()))


def _sign(_app: Sphinx, what: str, name: str, *_: Any) -> tuple[str, None] | None:
    """No signature for what stepscope makes and a caller only reads. Its fields stand below."""
    return None if what != "class" or ".callbacks." in name else ("", None)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", _check)
    app.connect("autodoc-process-docstring", _process)
    app.connect("autodoc-process-signature", _sign)
    return {"parallel_read_safe": True}
