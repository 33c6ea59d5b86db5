"""Runs a user's script in this process as Python itself would: the same `__main__`, arguments, path and exit.

A traceback is the script's own, without the frames of what watches it.
"""

import builtins
import importlib.machinery
import pkgutil
import re
import runpy
import shutil
import sys
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import msgspec

from stepscope.core.errors import InputError
from stepscope.core.run import Settings
from stepscope.engine.request import MemoryRequest, TraceRequest

# Reads the program behind `stepscope watch --`: a script, a module, or a launcher whose workers are then watched.


_PYTHON = re.compile(r"python[\d.]*")
_LAUNCHERS = ("accelerate", "deepspeed")
"""Programs that start the script in other processes. They can start another program there instead."""


@dataclass(frozen=True)
class Program:
    """A script or a module, and its arguments."""

    target: str
    """The script's path, or the module's name."""
    arguments: tuple[str, ...]
    is_module: bool = False

    @property
    def words(self) -> list[str]:
        """The program as the user wrote it behind `--`."""
        return [*(["-m"] if self.is_module else []), self.target, *self.arguments]

    @property
    def title(self) -> str:
        """The program without its folder, and its arguments; bytes that are no UTF-8 are escaped, as in \\udce9."""
        words = " ".join([self.target if self.is_module else Path(self.target).name, *self.arguments])
        return words.encode(errors="backslashreplace").decode()


@dataclass(frozen=True)
class Launch:
    """A launch by torchrun: its own options, and the program that each worker runs."""

    options: tuple[str, ...]
    program: Program

    def command(self, watch_options: list[str]) -> list[str]:
        """The torchrun command that runs `stepscope watch` with these options in each worker."""
        worker = [sys.executable, "-m", "stepscope", "watch", *watch_options, "--", *self.program.words]
        return [sys.executable, "-m", "torch.distributed.run", *self.options, "--no-python", *worker]


def program_of(words: list[str]) -> Program | Launch:
    """The program that these words run. Raises InputError where it cannot be watched."""
    if not words:
        raise InputError("no script to watch: write stepscope watch -- train.py, or -- -m package")
    first, rest = words[0], words[1:]
    if _PYTHON.fullmatch(Path(first).name) and not Path(first).is_dir():
        if not rest or (rest[0].startswith("-") and rest[0] != "-m"):
            raise InputError(f"cannot watch {' '.join(words[:2])!r}: leave out python and its options, name the script")
        first, rest = rest[0], rest[1:]
    if first == "-m":
        if not rest:
            raise InputError("no module behind -m: write stepscope watch -- -m package")
        if rest[0] in ("torch.distributed.run", "torch.distributed.launch"):
            return _launch(rest[1:])
        return Program(rest[0], tuple(rest[1:]), is_module=True)
    if Path(first).name == "torchrun":
        return _launch(rest)
    if Path(first).name in _LAUNCHERS:
        raise InputError(
            f"{first} starts the script in processes of its own: write {first} ... --no_python stepscope watch -- "
            "train.py, so that each of them is watched"
        )
    return Program(_script(first), tuple(rest))


def _script(name: str) -> str:
    path = Path(name)
    if path.is_dir() and not (path / "__main__.py").exists():
        raise InputError(f"{name} is a folder: name a script in it, or -m package")
    if path.exists():
        return name
    installed = shutil.which(name)
    if installed is None:
        raise InputError(f"no script at {name}")
    with Path(installed).open("rb") as file:
        if not re.match(rb"#!.*python", file.readline(200)):
            raise InputError(f"{name} is no Python program: name the script that it runs")
    return installed


def _launch(words: list[str]) -> Launch:
    from torch.distributed.run import get_args_parser  # noqa: PLC0415  (torch, which nothing else here needs)

    parsed = get_args_parser().parse_args(words)
    script, arguments = str(parsed.training_script), [str(word) for word in parsed.training_script_args]
    options = words[: len(words) - len(arguments) - 1]
    if parsed.no_python:
        raise InputError("with --no-python torchrun comes first: torchrun ... --no-python stepscope watch -- train.py")
    if parsed.module:
        options = [word for word in options if word not in ("-m", "--module")]
        return Launch(tuple(options), Program(script, tuple(arguments), is_module=True))
    return Launch(tuple(options), Program(_script(script), tuple(arguments)))


_OURS = str(Path(__file__).parents[2])


def prepare(program: Program) -> Callable[[], None]:
    """Make this process that of the program; returns what runs it. Raises InputError where it cannot be read."""
    sys.orig_argv = [sys.executable, *program.words]
    main = types.ModuleType("__main__")
    main.__dict__.update(__loader__=importlib.machinery.BuiltinImporter)
    if sys.version_info < (3, 14):
        main.__dict__.update(__annotations__={})
    main.__dict__.update(__builtins__=builtins)
    if program.is_module:
        sys.argv = ["-m", *program.arguments]
        _first_on_path(str(Path.cwd()))
        return lambda: _run_module(program.target, main, names_itself=True)
    sys.argv = [program.target, *program.arguments]
    if pkgutil.get_importer(program.target) is not None:  # a folder or an archive, whose __main__.py is the script
        _first_on_path(program.target)
        return lambda: _run_module("__main__", main, names_itself=False)
    path = str(Path(program.target).absolute())
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {program.target}: {error.strerror or error}") from error
    _first_on_path(str(Path(path).resolve().parent))
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __cached__=None, __loader__=loader)

    def run() -> None:
        sys.modules["__main__"] = main
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)

    return run


def _run_module(name: str, main: types.ModuleType, *, names_itself: bool) -> None:
    """Run a module as `__main__`. names_itself: whether `sys.argv[0]` becomes the module's path, as with `-m`."""
    sys.modules["__main__"] = main
    # Python itself calls this function of runpy, which is not public: a type checker does not know it.
    run_as_main: Callable[[str, bool], object] = runpy._run_module_as_main  # type: ignore[attr-defined]
    run_as_main(name, names_itself)


def _first_on_path(folder: str) -> None:
    if not sys.flags.safe_path and sys.path:
        sys.path[0] = folder


def report(error: BaseException) -> None:
    """Show an exception that nothing caught, as Python does: by `sys.excepthook`, which may be the script's own."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception as failure:  # The script may have put any function of its own into sys.excepthook.
        for title, each in (("Error in sys.excepthook:\n", failure), ("\nOriginal exception was:\n", error)):
            if sys.stderr is not None:
                sys.stderr.write(title)
            sys.__excepthook__(type(each), each, each.__traceback__)


def wait_for_threads() -> None:
    """Wait for the script's threads, as Python does before it ends. One of them may be the loop."""
    main = threading.main_thread()
    if any(not thread.daemon and thread is not main for thread in threading.enumerate()):
        # Executors end their threads when this function calls them; to join the threads would wait for ever.
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def without_our_frames(error: BaseException) -> None:
    """Take the frames of what watches out of the traceback of an exception, and of those that it came from."""
    waiting: list[BaseException | None] = [error]
    visited: set[int] = set()
    while waiting:
        known = waiting.pop()
        if known is None or id(known) in visited:
            continue
        visited.add(id(known))
        traceback, theirs = known.__traceback__, list[types.TracebackType]()
        while traceback is not None:
            if not traceback.tb_frame.f_code.co_filename.startswith(_OURS):
                theirs.append(traceback)
            traceback = traceback.tb_next
        for each in reversed(theirs):
            traceback = types.TracebackType(traceback, each.tb_frame, each.tb_lasti, each.tb_lineno)
        known.__traceback__ = traceback
        waiting += [known.__cause__, known.__context__]
        waiting += getattr(known, "exceptions", ())


def when_imported(name: str, call: Callable[[], None]) -> None:
    """Call as soon as a module is imported: now, if it is already. To look for it, as `find_spec` does, is no
    import."""
    if name in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _Waiting(name, call))


class _Waiting(MetaPathFinder):
    """A finder that calls a function once, when a module has been imported. It leaves the finding to the others."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name, self._call = name, call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        for finder in [each for each in sys.meta_path if each is not self]:
            find: Any = getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is not None:
                self._listen(spec.loader)
                return spec
        return None

    def _listen(self, loader: Any) -> None:
        """Let this loader, which was made for one search, tell when it has executed the module."""

        def exec_module(module: types.ModuleType) -> None:
            del loader.exec_module
            loader.exec_module(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._call()

        if hasattr(loader, "__dict__") and not isinstance(loader, type):
            loader.exec_module = exec_module


# The request to watch a loop. It needs no torch.


FIRST_STEP = 2
"""The first step that can be timed: the two before show what a step is."""


class WatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to watch a loop: which steps are timed, what is recorded, and where the run goes."""

    runs: Path
    settings: Settings = Settings()
    between: tuple[int, int] | None = None
    """The first step that is timed, and the first after it that is not. If it is None, the settings decide."""
    trace: TraceRequest = TraceRequest()
    memory: MemoryRequest | None = None
    step_of: str | None = None
    """The class of the model or the optimizer whose step counts; None where the loop shows it."""
    tag: str | None = None
    log: tuple[str, ...] = ()
    """The trackers of the script that its figures go to (`engine/trackers.py`)."""
    metrics: Path | None = None
    """The file that gets the figures as OpenMetrics."""
    program: str = ""
    """The script and its arguments, without its folder; empty for a loop watched from inside."""


def steps_between(text: str) -> tuple[int, int]:
    """The first step and the end of a range: `20:40` means steps 20 to 39. Raises InputError."""
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
    if match is None:
        raise InputError(f"cannot read --steps {text!r}: write FIRST:END, as in 20:40 for steps 20 to 39")
    return checked_steps(int(match[1]), int(match[2]))


def checked_steps(first: int, end: int) -> tuple[int, int]:
    """The first step and the end, after a check that these steps can be timed. Raises InputError."""
    if first < FIRST_STEP:
        raise InputError(
            f"steps {first}:{end} begin too early: steps 0 and 1 show what a step is, so write "
            f"{FIRST_STEP}:{max(end, FIRST_STEP + 1)}"
        )
    if end <= first:
        raise InputError(f"steps {first}:{end} hold no step: the second number is the first step that is not timed")
    return first, end


def settings_between(between: tuple[int, int] | None, settings: Settings | None = None) -> Settings:
    """The settings that time exactly these steps. Without steps, the given settings or the defaults."""
    if between is None:
        return settings or Settings()
    first, end = between
    return Settings(warmup_floor=first, warmup_cap=first, steps_floor=end - first, steps_cap=end - first, seconds=0)
