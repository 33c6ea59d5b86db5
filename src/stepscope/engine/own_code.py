"""Runs a user's own code in a process of its own, which returns plain data and cannot end ours.

Code that calls `os._exit(0)`, raises KeyboardInterrupt or breaks the interpreter would otherwise end the command in
silence, with a code that says that all went well.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from typing import NoReturn

import msgspec

from stepscope.core import interrupts
from stepscope.core.errors import EXIT_DEVICE_FAILED, EXIT_WRONG_INPUT, DeviceError, InputError, StepscopeError
from stepscope.engine.cell_process import MARK, kill_marked


class _Answer(msgspec.Struct, kw_only=True):
    """The result that the child writes to the file that its parent named."""

    error: str | None = None
    exit_code: int = EXIT_WRONG_INPUT
    data: str = ""


def ask_apart(module: str, *arguments: str, what: str, keeps: bool = False) -> bytes:
    """The result of `answer_apart` in `python -m module`, started with these arguments.

    keeps: whether the child answers from what it has when it gets SIGINT. Then a signal goes on to it, and it is waited
    for; half a second later, another signal ends it.

    Raises the child's StepscopeError; InputError, which says `what` ended, where the child ends without an answer; and
    KeyboardInterrupt where it gives none because of a signal.
    """
    with tempfile.TemporaryFile() as file:
        number = str(file.fileno())
        command = [sys.executable, "-P", "-m", module, number, *arguments]
        # Our stdout is for our result, so whatever the user's code prints goes to stderr.
        mark = f"own-code-{os.getpid()}-{file.fileno()}"
        child = _Child()
        try:
            with interrupts.told(child.interrupt) if keeps else contextlib.nullcontext():
                code = child.run(command, file.fileno(), {**os.environ, MARK: mark})
        finally:
            kill_marked(mark)  # Processes that the user's code has started end with it.
        file.seek(0)
        try:
            answer = msgspec.json.decode(file.read(), type=_Answer)
        except (msgspec.DecodeError, UnicodeDecodeError):
            answer = None
    if child.interrupted and (answer is None or answer.error is not None):
        raise KeyboardInterrupt
    if answer is None:
        end = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        raise InputError(f"{what} ended its process {end} before it was done: let it return instead")
    if answer.error is not None:
        raise (DeviceError if answer.exit_code == EXIT_DEVICE_FAILED else InputError)(answer.error)
    return answer.data.encode()


@contextlib.contextmanager
def _signal_held() -> Generator[None]:
    """Inside, SIGINT waits; a process that is started here begins so."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Child:
    """The process that runs the user's code."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._interrupted_at_s: float | None = None

    @property
    def interrupted(self) -> bool:
        """Whether a signal has gone on to it."""
        return self._interrupted_at_s is not None

    def run(self, command: list[str], answer: int, environment: dict[str, str]) -> int:
        """Run it to its end; returns its exit code."""
        with _signal_held():  # the child holds it until it can answer: importing, it would end with a traceback
            process = subprocess.Popen(command, stdout=2, pass_fds=(answer,), env=environment)
        with process as self._process:
            if self.interrupted:
                self._process.send_signal(signal.SIGINT)
            try:
                return self._process.wait()
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


def answer_apart(make: Callable[..., str]) -> NoReturn:
    """Call `make` with the arguments in the child, write what it returns or raises, and end the process."""
    file = int(sys.argv[1])
    os.set_inheritable(file, False)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        answer = _Answer(data=make(*sys.argv[2:]))
    except StepscopeError as error:
        answer = _Answer(error=str(error), exit_code=error.exit_code)
    except KeyboardInterrupt:  # The user's code raised it, or a signal: whoever asked knows of that.
        answer = _Answer(error=f"{' '.join(sys.argv[2:3])}: KeyboardInterrupt was raised")
    with contextlib.suppress(OSError, ValueError, AttributeError):  # The user's code may have closed any of them.
        with os.fdopen(file, "wb") as place:
            place.write(msgspec.json.encode(answer))
        sys.stdout.flush()
    os._exit(0)  # Nobody waits for threads that the user's code has left running.
