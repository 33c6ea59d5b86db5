"""The `stepscope` command, or a script, run as its user runs it: with a process, an exit code, stdout and stderr of its
own.

To import torch takes longer than most of what the tests ask of the command. So there is one process that has imported
everything, and forks: the child is `python -m stepscope`, or `python` with a script, from its first line on. A call in
another environment than that process started in gets a process of its own from the beginning. So does, by
`subprocess.run`, what a test asks of a new interpreter: what it imports, its threads, its end by a signal.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import IO, Any

from tests.frames import with_room
from tests.interpreter import quicken

Done = subprocess.CompletedProcess[str]
_Environment = tuple[int, frozenset[tuple[str, str]]]
"""A process of tests, and its variables."""
_COMMAND = ("-m", "stepscope")
_IMPORTED = (
    "torch", "polars", "rich.console", "rich.table", "rich._unicode_data.unicode17-0-0",
    "click.shell_completion",
    "stepscope.app.cli.app", "stepscope.app.cli.questions", "stepscope.app.cli.study",
    *(
        f"stepscope.app.verbs.{verb}"
        for verb in (
            "compare", "fit", "lookups", "memory", "plan", "report", "results", "run", "stored_runs", "trace", "watch",
        )
    ),
    "stepscope.engine.step", "stepscope.engine.sweep", "stepscope.engine.watched_run",
    "stepscope.engine.workload_options",
    "stepscope.allocations.prediction.answer", "stepscope.allocations.planning.answer",
    "stepscope.rendering.terminal", "stepscope.rendering.renderers.bars",
    "stepscope.rendering.pages.named", "stepscope.rendering.pages.html",
    "stepscope.runs.index", "stepscope.runs.history", "stepscope.questions.answers",
)  # fmt: skip
"""What takes long and what most verbs end up with, of both wings."""
_NO_MATTER = (
    "PYTEST_CURRENT_TEST", "COLUMNS", "LINES", "STEPSCOPE_CACHE", "STEPSCOPE_NSYS", "CUDA_VISIBLE_DEVICES",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "PYTORCH_NVML_BASED_CUDA_CHECK", "RAY_USAGE_STATS_ENABLED",
    "RAY_ADDRESS", "RAY_CLIENT_MODE",
)  # fmt: skip
"""Variables that change from test to test, that are read when something is shown or looked for, or that libraries leave
behind: no import depends on them."""


def stepscope(*arguments: object, cwd: Path | None = None, timeout: float = 240, **environment: str) -> Done:
    """Run `stepscope` with these arguments to its end. Keywords are further variables of its environment."""
    return python(*_COMMAND, *arguments, cwd=cwd, timeout=timeout, **environment)


def python(*arguments: object, cwd: Path | None = None, timeout: float = 240, **environment: str) -> Done:
    """Run Python to its end, with `-m MODULE`, `-c CODE` or a script, and arguments of that."""
    words = [str(argument) for argument in arguments]
    variables = {**os.environ, **environment}
    if _of_imports(variables) == _of_imports(dict(os.environ)) and (fork := _Fork.here()) is not None:
        return fork.run(words, cwd or Path.cwd(), variables, timeout)
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=variables, capture_output=True, text=True, check=False, timeout=timeout
    )


def _of_imports(variables: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in _NO_MATTER}


class _Fork:
    """The process that forks, as the tests see it."""

    _known: "dict[_Environment, _Fork]" = {}  # noqa: RUF012  (shared by all calls, as it must be)
    _asked: "Counter[_Environment]" = Counter()  # noqa: RUF012

    @classmethod
    def here(cls) -> "_Fork | None":
        """That of the present environment, which libraries change for good. An environment that one test alone has is
        not worth a process that imports everything: there is none at the first call, once there is one of another."""
        if not hasattr(os, "fork"):
            return None
        environment = (os.getpid(), frozenset(_of_imports(dict(os.environ)).items()))
        cls._asked[environment] += 1
        if environment not in cls._known and (cls._asked[environment] > 1 or not cls._known):
            cls._known[environment] = cls()
        return cls._known.get(environment)

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.command"], cwd=Path(__file__).parent.parent,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, words: list[str], cwd: Path, variables: dict[str, str], timeout: float) -> Done:
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            out, error = Path(folder, "out"), Path(folder, "err")
            asked = {
                "words": words, "cwd": str(cwd), "variables": variables, "timeout": timeout,
                "out": str(out), "error": str(error),
            }  # fmt: skip
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            code = json.loads(self._process.stdout.readline())
            if code is None:
                raise subprocess.TimeoutExpired([sys.executable, *words], timeout)
            return Done([sys.executable, *words], code, out.read_text(), error.read_text())


def _serve(requests: IO[str], answers: IO[str]) -> list[str]:
    """Fork for each request, and answer with the child's exit code. Returns in the child, with the words of its
    request: all else of it is as asked."""
    gc.disable()  # what an import makes is kept
    for module in _IMPORTED:
        with contextlib.suppress(ImportError):  # where steps are only measured there need be no polars
            importlib.import_module(module)
    if os.environ.get("TRITON_INTERPRET") == "1":
        with contextlib.suppress(ImportError):
            importlib.import_module("triton.runtime.interpreter")
            quicken()
    # A watched loop is traced in its own precision alone; tests/engine/test_traced_loop.py has the others.
    traced: Any = sys.modules.get("stepscope.engine.traced_loop")
    if traced is not None:
        traced.ENOUGH_S = 0.0
    for finalizer in list(weakref.finalize._registry):  # pyright: ignore[reportAttributeAccessIssue]
        finalizer.atexit = False  # what imports have made needs no tidying up in every child
    # Else the first collection of each child would copy every page that an import has made, and its end would, too.
    gc.collect()
    gc.freeze()
    gc.enable()
    for line in requests:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(asked)
            return asked["words"]
        print(json.dumps(_wait(pid, asked["timeout"])), file=answers, flush=True)
    os._exit(0)


def _become(asked: dict[str, Any]) -> None:
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["variables"])
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, asked["out"], os.O_WRONLY | os.O_CREAT),
        (2, asked["error"], os.O_WRONLY | os.O_CREAT),
    ):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)


def _run(words: list[str]) -> None:
    """Do with these words what Python does, and end. Python's own end would take every module apart, one copied page
    after another: five times what most commands take."""
    try:
        with_room(lambda: _begin(words))
        code = 0
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _begin(words: list[str]) -> None:
    """What Python does with these words."""
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]  # as `python -m` has them: what click makes the command's name of
        sys.path[0] = str(Path.cwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[0] = ""
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def _wait(pid: int, timeout: float) -> int | None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def libraries() -> list[str]:
    """Places on PYTHONPATH that hold libraries, and no stepscope."""
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [place for place in places if place and not (Path(place) / "stepscope").exists()]


WITHOUT_POLARS = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"polars", "scipy", "pynvml", "nvtx", "vl_convert"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from stepscope.app.cli.app import app
app(sys.argv[1:], standalone_mode=False)
"""
"""The command on a machine that only measures, as code for `python -c`."""


if __name__ == "__main__":
    _requests = os.fdopen(os.dup(0), "r")
    _answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    _run(_serve(_requests, _answers))
