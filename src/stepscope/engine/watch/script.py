"""Runs a user's script in this process as Python itself would: the same `__main__`, arguments, path and exit.

A traceback is the script's own, without the frames of what watches it.
"""

import builtins
import importlib.machinery
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from typing import Any

from stepscope.core.errors import InputError
from stepscope.engine.watch.command import Program

_OURS = str(Path(__file__).parents[2])


def prepare(program: Program) -> Callable[[], None]:
    """Make this process that of the program; returns what runs it. Raises InputError where it cannot be read."""
    main = types.ModuleType("__main__")
    if program.is_module:
        sys.argv = ["-m", *program.arguments]
        _first_on_path(str(Path.cwd()))
        return lambda: _run_module(program.target, main)
    path = str(Path(program.target).absolute())
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {program.target}: {error.strerror or error}") from error
    sys.argv = [program.target, *program.arguments]
    _first_on_path(str(Path(path).resolve().parent))
    main.__dict__.update(
        __file__=path,
        __builtins__=builtins,
        __cached__=None,
        __annotations__={},
        __loader__=importlib.machinery.SourceFileLoader("__main__", path),
    )
    return lambda: _run_source(source, path, main)


def _run_source(source: bytes, path: str, main: types.ModuleType) -> None:
    sys.modules["__main__"] = main
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _run_module(name: str, main: types.ModuleType) -> None:
    sys.modules["__main__"] = main
    # `python -m` itself calls this function of runpy, which is not public: a type checker does not know it.
    run_as_main: Callable[[str], object] = runpy._run_module_as_main  # type: ignore[attr-defined]
    run_as_main(name)


def _first_on_path(folder: str) -> None:
    if not sys.flags.safe_path and sys.path:
        sys.path[0] = folder


def report(error: BaseException) -> None:
    """Show an exception that nothing caught, as Python does: by `sys.excepthook`, which may be the script's own."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception as failure:  # The script may have put any function of its own into sys.excepthook.
        sys.stderr.write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(failure), failure, failure.__traceback__)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, error.__traceback__)


def without_our_frames(error: BaseException) -> None:
    """Take the frames of what watches out of the traceback of an exception, and of those that it came from."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        known = waiting.pop()
        if known is None or id(known) in seen:
            continue
        seen.add(id(known))
        known.__traceback__ = _theirs(known.__traceback__)
        waiting += [known.__cause__, known.__context__]
        waiting += getattr(known, "exceptions", ())


def _theirs(traceback: types.TracebackType | None) -> types.TracebackType | None:
    frames: list[types.TracebackType] = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(_OURS):
            frames.append(traceback)
        traceback = traceback.tb_next
    rest: types.TracebackType | None = None
    for each in reversed(frames):
        rest = types.TracebackType(rest, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return rest


def when_imported(name: str, call: Callable[[], None]) -> None:
    """Call as soon as a module is imported: now, if it is already."""
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _Waiting(name, call))


class _Waiting(MetaPathFinder):
    """A finder that calls a function when one module has been imported. It leaves the finding to the other finders."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name, self._call = name, call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            find: Any = getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Telling(spec.loader, self._call)
                return spec
        return None


class _Telling(Loader):
    """A loader that lets another loader do its work, and then calls a function."""

    def __init__(self, loader: Any, call: Callable[[], None]) -> None:
        self._loader, self._call = loader, call

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._call()
