"""The effect of SIGINT, SIGTERM and SIGHUP on this process. After one, the exit code is 128 + the signal's number.

- By default: a signal ends the process at once, with one line. It raises no exception, since during imports there is
  C++ on the stack that aborts on an exception or forgets it.
- `raising()`, inside a verb: the first signal raises KeyboardInterrupt, a second ends the process at once. Signals
  within half a second of the first are the same request, as from a held key, or from a terminal and a supervisor.
- `keeping()`, while measurements must not be lost: the first signal raises KeyboardInterrupt, others do nothing.
- `held()`, while results are written: a signal does nothing at first; `check()` raises later.
- `notifying()`, in an event loop: a signal calls a callback.
- `leaving()`, after the last line of output: a signal ends the process at once, without another line.

While Python shuts down, nothing is left to save. After an earlier signal, more signals do nothing then, so that the
exit code stays. Without one, a signal has the system's own effect: the process dies of it, and a shell shows the same
code.
"""

import _signal  # pyright: ignore[reportMissingModuleSource]  (a builtin, cheaper than signal)
import atexit
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import NoReturn, TypeVar

# `_signal` is built in. `signal`, `threading` and `ctypes` take ten milliseconds to import, and Ctrl-C would print a
# traceback meanwhile.

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
SIGNALS = tuple(getattr(_signal, name) for name in _NAMES)
_AGAIN_S = 0.05
"""The delay before a KeyboardInterrupt that could not be raised, or got lost, is raised again."""
SAME_REQUEST_S = 0.5
"""Signals within this time of the first are the same request."""
_SHOW_CURSOR = b"\x1b[?25h"

Reaction = Callable[[int, FrameType | None], None]
_T = TypeVar("_T")


class _State:
    received: int | None = None
    """The first signal received."""
    received_at_s = 0.0
    raised = False
    """Whether the signal's exception was raised, as far as is known, or its callback was called."""
    reaction: Reaction


def install(*, even_if_ignored: bool = False) -> None:
    """Handle the three signals from now on. By default a signal that is ignored, as under nohup, stays ignored."""
    for number in SIGNALS:
        if even_if_ignored or _signal.getsignal(number) is not _signal.SIG_IGN:
            _signal.signal(number, _handle)
    if sys.unraisablehook is not _raise_what_was_lost:
        sys.unraisablehook = _raise_what_was_lost
        os.register_at_fork(after_in_child=_forget)
        atexit.register(_ignore_more)  # registered first, so it runs last


def uninstall() -> None:
    """Restore Python's own signal handlers, since the code that runs from now on is not ours."""
    for number in SIGNALS:
        if _signal.getsignal(number) is _handle:
            _signal.signal(number, _signal.default_int_handler if number == _signal.SIGINT else _signal.SIG_DFL)
    if sys.unraisablehook is _raise_what_was_lost:
        sys.unraisablehook = sys.__unraisablehook__
        atexit.unregister(_ignore_more)


def received() -> int | None:
    """The signal that asked this process to end, if one did."""
    return _state.received


def interruption() -> str:
    """What interrupted this process, in words: "interrupted by SIGTERM", as a scheduler or a time limit sends it."""
    name = next((name for name in _NAMES if getattr(_signal, name) == _state.received), None)
    return f"interrupted by {name}" if name else "interrupted"


def exit_code(code: int) -> int:
    """The exit code of a process that would end with `code` if no signal had come."""
    return code if _state.received is None else 128 + _state.received


def check() -> None:
    """Raise KeyboardInterrupt if a signal could not raise it before, or if its exception was lost."""
    if _state.received is not None and _state.reaction in (_raise, _raise_once):
        _state.raised = True
        raise KeyboardInterrupt


@contextmanager
def _scope(reaction: Reaction) -> Generator[None]:
    """A context in which signals have another effect.

    In a process that never called `install`, such as a notebook, this applies to Ctrl-C only, while the context lasts.
    """
    before, _state.reaction = _state.reaction, reaction
    borrowed = lost = False
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        with suppress(ValueError):  # only the main thread may set a signal handler
            _signal.signal(_signal.SIGINT, _handle)
            borrowed = True
    try:
        yield
    finally:
        _state.reaction = before
        if borrowed:
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)
            lost = _state.received is not None and not _state.raised
            _state.received, _state.raised = None, False
    if lost:
        raise KeyboardInterrupt


def notifying(callback: Callable[[], object]) -> AbstractContextManager[None]:
    """A context in which each signal calls `callback`, in the main thread, and raises nothing."""

    def tell(_number: int, _frame: FrameType | None) -> None:
        _state.raised = True
        callback()

    return _scope(tell)


@contextmanager
def expected() -> Generator[None]:
    """A context in which signals are ignored, since a tool that watches this process sends one when it is done."""
    ours = [number for number in SIGNALS if _signal.getsignal(number) is _handle]
    for number in ours:
        _signal.signal(number, _signal.SIG_IGN)
    try:
        yield
    finally:
        for number in ours:
            _signal.signal(number, _handle)


def leaving() -> None:
    """Let a signal end the process at once and silently from now on, since its last line is printed."""
    _state.reaction = _end_silently


def _handle(number: int, frame: FrameType | None) -> None:
    if _state.received is None:
        _state.received, _state.received_at_s = number, time.monotonic()
    _state.reaction(number, frame)


def _end(number: int, _frame: FrameType | None) -> None:
    """End the process at once."""
    try:
        if os.isatty(2):
            os.write(2, _SHOW_CURSOR)  # an interrupted display may have hidden it
        os.write(2, b"stepscope: interrupted\n")
    except OSError:  # the terminal may be gone
        pass
    _end_silently(number, None)


def _end_silently(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + (_state.received or number))


def _raise(number: int, frame: FrameType | None) -> None:
    again = _state.raised and time.monotonic() > _state.received_at_s + SAME_REQUEST_S
    if again or (_importing(frame) and not _state.raised):
        _end(number, frame)
    _raise_once(number, frame)


def _raise_once(_number: int, frame: FrameType | None) -> None:
    if _state.raised:
        return
    if _importing(frame):
        _try_again_soon()
        return
    _state.raised = True
    raise KeyboardInterrupt


def _wait(_number: int, _frame: FrameType | None) -> None:
    pass


raising = partial(_scope, _raise)
"""Makes a context in which the first signal raises KeyboardInterrupt, and a second ends the process at once."""
keeping = partial(_scope, _raise_once)
"""Makes a context in which the first signal raises KeyboardInterrupt and others do nothing, since data is saved."""
held = partial(_scope, _wait)
"""Makes a context in which a signal raises nothing. `check` raises later; the exit code shows the signal anyway."""


def _importing(frame: FrameType | None) -> bool:
    """Whether the main thread is importing. A library's C++ on the stack may abort on an exception, or forget it."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib._bootstrap"):
            return True
        frame = frame.f_back
    return False


def _try_again_soon() -> None:
    def handle_again(_number: int, frame: FrameType | None) -> None:
        if _state.received is not None and not _state.raised:
            _state.reaction(_state.received, frame)

    _signal.signal(_signal.SIGALRM, handle_again)
    _signal.setitimer(_signal.ITIMER_REAL, _AGAIN_S)


def _raise_what_was_lost(unraisable: "sys.UnraisableHookArgs") -> None:
    """Raise a KeyboardInterrupt again after Python dropped it, as Python does with exceptions in a finaliser."""
    if _state.received is not None and issubclass(unraisable.exc_type, KeyboardInterrupt):
        _state.raised = False
        _try_again_soon()
        return
    sys.__unraisablehook__(unraisable)


def _ignore_more() -> None:
    if _state.received is not None:
        for number in SIGNALS:
            if _signal.getsignal(number) is _handle:
                _signal.signal(number, _signal.SIG_IGN)


def _forget() -> None:
    """Restore the default signal handlers in a forked child, such as a library's helper, so that signals end it."""
    for number in SIGNALS:
        if _signal.getsignal(number) is _handle:
            _signal.signal(number, _signal.SIG_DFL)


_state = _State()
_state.reaction = _end


# A wait of the main thread that signals end.


_LOOK_S = 0.5


def awaited(call: Callable[[], _T]) -> _T:
    """What a call that blocks returns: another thread makes it, and the main one looks for signals twice a second.

    The system may hand a signal to any thread, as to one of a pool, and then it ends no system call of the main one.
    """
    import threading  # noqa: PLC0415

    answers: list[_T] = []
    errors: list[BaseException] = []

    def make() -> None:
        try:
            answers.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=make, daemon=True, name="waits")
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_S)
    if errors:
        raise errors[0]
    return answers[0]


# The end of a process, without the seconds that Python takes to free torch's modules one by one.


_WATCHERS = ("NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID", "LD_PRELOAD")
"""Variables of profilers inside this process, which write what they have when it ends in the usual way."""


def leave(code: int) -> NoReturn:
    """End this process with `code`: its threads are waited for, exit functions run, streams are written.

    Python would then free every object of every module, which serves nobody. It is left to do so where something may
    depend on the usual end: a profiler, the context of a GPU, or a stream that cannot be written.
    """
    torch = sys.modules.get("torch")
    if any(name in os.environ for name in _WATCHERS) or (torch is not None and torch.cuda.is_initialized()):
        sys.exit(code)
    if not _ended_as_python_ends():
        sys.exit(code)
    os._exit(code)


def die_of_interrupt() -> NoReturn:
    """End this process by SIGINT, as Python ends where nothing catches KeyboardInterrupt, so that a shell sees why.

    What Python makes of the exception where it is raised again depends on its version, and on what started the program.
    """
    _ended_as_python_ends()
    import signal  # noqa: PLC0415

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(128 + signal.SIGINT)  # where the signal is blocked


def _ended_as_python_ends() -> bool:
    """Wait for threads, run exit functions, write streams; returns whether everything could be written."""
    import ctypes  # noqa: PLC0415
    import threading  # noqa: PLC0415

    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return False
    ctypes.CDLL(None).fflush(None)  # what libraries in C have printed
    return True


# Whether this process may have enough memory to load PyTorch at all.


LEAST_FOR_TORCH = 1 << 30
"""Bytes of address space below which PyTorch's libraries raise, abort or retry for ever while they load."""


def address_space_limit() -> int | None:
    """Bytes of address space that this process may have (`ulimit -v`); None where nothing limits it."""
    try:
        import resource  # noqa: PLC0415 - not on every system
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def require_room_for_torch() -> None:
    """Raise DeviceError where the limit leaves no room for PyTorch. Packages that import PyTorch call this before."""
    limit = address_space_limit()
    if limit is not None and limit < LEAST_FOR_TORCH:
        from stepscope.core.errors import DeviceError  # noqa: PLC0415
        from stepscope.core.units import format_bytes  # noqa: PLC0415

        raise DeviceError(
            f"this process may have {format_bytes(limit)} of memory (ulimit -v), which is too little to load PyTorch: "
            "raise the limit to 2 GiB or more"
        )


# The lifeline of a process: its stdin, which closes when its starter dies, however it dies.


def end_with_stdin(before: Callable[[], object] | None = None) -> None:
    """End this process when stdin closes, and its group, if it leads one; `before` is called first."""

    import signal  # noqa: PLC0415
    import threading  # noqa: PLC0415

    def wait_for_the_end() -> None:
        while os.read(0, 4096):
            pass
        try:
            if before is not None:
                before()
        finally:
            # Its starter made this process the leader of its own group: compilers' helpers end with it.
            if os.getpgrp() == os.getpid():
                os.killpg(0, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_for_the_end, daemon=True, name="lifeline").start()
