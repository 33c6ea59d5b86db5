"""Runs a user's own code in a process of its own, which returns plain data and cannot end ours.

Code that calls `os._exit(0)`, raises KeyboardInterrupt or breaks the interpreter would otherwise end the command in
silence, with a code that says that all went well.
"""

import contextlib
import gc
import itertools
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from stepscope.core import errors, interrupts
from stepscope.core.workloads import TextbookWorkload
from stepscope.engine.cell_process import MARK, kill_marked


class _Answer(msgspec.Struct, kw_only=True):
    """The result that the child writes to the file that its parent named."""

    error: str | None = None
    exit_code: int = errors.EXIT_WRONG_INPUT
    data: str = ""


_asker: int | None = None
"""Where `tell_asker` writes, in the child of one who listens."""


def ask_apart(
    module: str, *arguments: str, what: str, keeps: bool = False, hears: Callable[[bytes], object] | None = None
) -> bytes:
    """The result of `answer_apart` in `python -m module`, started with these arguments.

    keeps: whether the child answers from what it has when it gets SIGINT. Then a signal goes on to it, and it is waited
    for; half a second later, another signal ends it. hears: is called with each line that the child tells while it
    works, on a thread of its own.

    Raises the child's StepscopeError; InputError, which says `what` ended, where the child ends without an answer; and
    KeyboardInterrupt where it gives none because of a signal.
    """
    with tempfile.TemporaryFile() as file, _listening(hears) as told:
        descriptors = (file.fileno(),) if told is None else (file.fileno(), told)
        command = [sys.executable, "-P", "-m", module, ",".join(map(str, descriptors)), *arguments]
        # Our stdout is for our result, so whatever the user's code prints goes to stderr.
        mark = f"{_mark_of_all()}{file.fileno()}."  # which begins no other
        child = _Child()
        try:
            with interrupts.notifying(child.interrupt) if keeps else contextlib.nullcontext():
                code = child.run(command, descriptors, {**os.environ, MARK: mark})
        finally:
            kill_marked(mark)  # Processes that the user's code has started end with it.
        file.seek(0)
        try:
            answer = msgspec.json.decode(file.read(), type=_Answer)
        except (msgspec.DecodeError, UnicodeDecodeError):
            answer = None
    if child.interrupted and (answer is None or answer.error is not None):
        raise KeyboardInterrupt
    if answer is None and -code in interrupts.SIGNALS:
        interrupts.check()
        sender = f"{signal.Signals(-code).name}, which another process sent it"
        raise errors.InputError(f"the process of {what} was ended by {sender}: run the command again")
    if answer is None and code == -signal.SIGKILL:
        raise errors.DeviceError(
            f"the process of {what} was killed, most likely since the memory of this machine, or of its container, ran "
            "out: free some, or take a machine with more"
        )
    if answer is None:
        end = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        raise errors.InputError(f"{what} ended its process {end} before it was done: let it return instead")
    if answer.error is not None:
        error = answer.error or f"{what}: KeyboardInterrupt was raised"
        raise (errors.DeviceError if answer.exit_code == errors.EXIT_DEVICE_FAILED else errors.InputError)(error)
    return answer.data.encode()


def _mark_of_all() -> str:
    """How the marks of all processes begin that this one asks."""
    return f"own-code-{os.getpid()}-"


def end_asked() -> None:
    """End every process that this one has asked and that has not answered yet, on whichever thread."""
    kill_marked(_mark_of_all())


class _Child:
    """The process that runs the user's code."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._interrupted_at_s: float | None = None

    @property
    def interrupted(self) -> bool:
        """Whether a signal has gone on to it."""
        return self._interrupted_at_s is not None

    def run(self, command: list[str], descriptors: tuple[int, ...], environment: dict[str, str]) -> int:
        """Run it to its end; returns its exit code."""
        # The child begins with SIGINT held, until it can answer: importing, it would end with a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process = subprocess.Popen(command, stdout=2, pass_fds=descriptors, env=environment)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        with process as self._process:
            if self.interrupted:
                self._process.send_signal(signal.SIGINT)
            try:
                return interrupts.awaited(self._process.wait)
            except BaseException:
                self._process.kill()
                raise

    def interrupt(self) -> None:
        """Ask it to end with what it has; asked again after half a second, end it at once."""
        if self._interrupted_at_s is None:
            self._interrupted_at_s = time.monotonic()
            if self._process is not None:
                self._process.send_signal(signal.SIGINT)
        elif self._process is not None and time.monotonic() > self._interrupted_at_s + interrupts.SAME_REQUEST_S:
            self._process.kill()


@contextlib.contextmanager
def _listening(hears: Callable[[bytes], object] | None) -> Generator[int | None]:
    """A context with the descriptor whose lines are heard; None where nobody listens."""
    if hears is None:
        yield None
        return
    ours, told = os.pipe()

    def listen() -> None:
        with os.fdopen(ours, "rb") as lines:
            for line in lines:
                hears(line)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield told
    finally:
        os.close(told)
        listener.join(1)  # a process that the user's code started may hold the other end


def tell_asker(line: bytes) -> None:
    """Tell a line to whoever asked this process, if that one listens."""
    if _asker is not None:
        with contextlib.suppress(OSError):
            os.write(_asker, line + b"\n")


def answer_apart(make: Callable[..., str]) -> NoReturn:
    """Call `make` with the arguments in the child, write what it returns or raises, and end the process."""
    global _asker  # noqa: PLW0603  (one process, one asker)
    file, *others = map(int, sys.argv[1].split(","))
    for descriptor in (file, *others):
        os.set_inheritable(descriptor, False)
    _asker = others[0] if others else None

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        gc.freeze()  # what imports have made stays
        answer = _Answer(data=make(*sys.argv[2:]))
    except errors.StepscopeError as error:
        answer = _Answer(error=str(error), exit_code=error.exit_code)
    except KeyboardInterrupt:  # The user's code raised it, or a signal: whoever asked knows of that.
        answer = _Answer(error="")
    _write(file, answer)


def _write(file: int, answer: _Answer) -> NoReturn:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # The user's code may have closed any of them.
        with os.fdopen(file, "wb") as place:
            place.write(msgspec.json.encode(answer))
        sys.stdout.flush()
    os._exit(0)  # Nobody waits for threads that the user's code has left running.


# Recipes: a Python file whose function `sweep()` returns the workloads to measure. It runs in a process of its own.


FUNCTION = "sweep"
MOST = 10_000


def load_recipe(path: Path) -> list[TextbookWorkload]:
    """Run the recipe, with the user's rights, and return its workloads.

    Raises InputError naming the file, the line and the fault.
    """
    if not path.is_file():
        raise errors.InputError(f"no recipe at {path}: give a Python file that defines {FUNCTION}()")
    answer = ask_apart(__name__, str(path), what=f"the recipe {path}")
    return msgspec.json.decode(answer, type=list[TextbookWorkload])


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
        raise errors.InputError(f"{where}{f' line {error.lineno}' if error.lineno else ''}: {error.msg}") from error
    except BaseException as error:  # a recipe is a program: whatever it raises is its own fault, and is reported
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = lines[-1] if lines else None
        if isinstance(error, errors.InputError) and line is None:
            raise
        kind = "" if isinstance(error, errors.InputError) else f"{type(error).__name__}: "
        raise errors.InputError(f"{path}{f' line {line}' if line else ''}: {kind}{errors.one_line(error)}") from error


def _workloads_of(path: Path) -> list[TextbookWorkload]:
    function: Any = runpy.run_path(str(path)).get(FUNCTION)
    if not callable(function):
        raise errors.InputError(f"{path} defines no function {FUNCTION}(): write one that returns Workloads")
    result: Any = function()
    workloads: list[Any] = list(itertools.islice(result, MOST + 1))
    strangers = [w for w in workloads if not isinstance(w, TextbookWorkload)]
    if strangers:
        raise errors.InputError(f"{path}: {FUNCTION}() returned {type(strangers[0]).__name__} among its workloads")
    if not workloads:
        raise errors.InputError(f"{path}: {FUNCTION}() returned no workloads")
    if len(workloads) > MOST:
        raise errors.InputError(f"{path}: {FUNCTION}() returned more than {MOST:,} workloads")
    return workloads


if __name__ == "__main__":
    answer_apart(main)
