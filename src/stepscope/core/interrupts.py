"""What SIGINT, SIGTERM and SIGHUP do to this process. However it ends then, its exit code is 128 + the signal's number.

- At first, and while nothing is kept: the process ends at once, with one line. No exception is raised, since during
  imports there is C++ on the stack that aborts on it or forgets it.
- `raising()`, inside a verb: the first raises KeyboardInterrupt, a second ends the process at once. What comes within
  half a second of the first is the same request: a key that is held down, a terminal and a supervisor that both send.
- `keeping()`, while something is measured that must not be lost: the first raises KeyboardInterrupt, more do nothing.
- `held()`, while it is written: nothing happens now; `check()` raises later.
- `told()`, in a loop of events: a callback is called.
- `leaving()`, once the last line is said: a second ends the process at once, without another line.

While Python takes itself down at the end, nothing is left to save. After a signal more do nothing there, so that the
exit code stands; the first one then gets the system's own answer: the process dies of it, which a shell shows as the
same code.
"""

# Built in: `signal` itself takes ten milliseconds to import, in which Ctrl-C would print a traceback.
import _signal  # pyright: ignore[reportMissingModuleSource]
import atexit
import os
import sys
import time
from collections.abc import Callable
from types import FrameType, TracebackType

SIGNALS = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP)
_AGAIN_S = 0.05
"""How long until a KeyboardInterrupt that could not be raised, or got lost, is tried again."""
_SAME_REQUEST_S = 0.5
_SHOW_CURSOR = b"\x1b[?25h"

Reaction = Callable[[int, FrameType | None], None]


class _State:
    def __init__(self) -> None:
        self.received: int | None = None
        """The first signal that came."""
        self.received_at_s = 0.0
        self.raised = False
        """Whether the signal was raised, as far as is known, or told."""
        self.reaction: Reaction = _end


def install(*, even_if_ignored: bool = False) -> None:
    """Answer the three signals here from now on. One that is ignored, as under nohup, stays so by default."""
    for number in SIGNALS:
        if even_if_ignored or _signal.getsignal(number) is not _signal.SIG_IGN:
            _signal.signal(number, _handle)
    if sys.unraisablehook is not _raise_what_was_lost:
        sys.unraisablehook = _raise_what_was_lost
        os.register_at_fork(after_in_child=_forget)
        atexit.register(_ignore_more)  # the first to be registered, so the last to run


def received() -> int | None:
    """The signal that asked this process to end, if one did."""
    return _state.received


def exit_code(code: int) -> int:
    """The exit code of a process that would end with `code` if no signal had come."""
    return code if _state.received is None else 128 + _state.received


def check() -> None:
    """Raise KeyboardInterrupt if a signal came while it could not be raised, or its exception was lost on the way."""
    if _state.received is not None and _state.reaction in (_raise, _raise_once):
        _state.raised = True
        raise KeyboardInterrupt


class _Scope:
    """A context in which signals have another effect.

    A process that never called `install`, a notebook say, gets it for Ctrl-C alone, and for as long.
    """

    def __init__(self, reaction: Reaction) -> None:
        self._reaction = reaction
        self._before: Reaction = _end
        self._borrowed = False

    def __enter__(self) -> None:
        self._before, _state.reaction = _state.reaction, self._reaction
        if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
            try:
                _signal.signal(_signal.SIGINT, _handle)
                self._borrowed = True
            except ValueError:  # signals are the main thread's alone
                pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _state.reaction = self._before
        if self._borrowed:
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)
            lost = _state.received is not None and not _state.raised
            _state.received, _state.raised = None, False
            if lost and kind is None:
                raise KeyboardInterrupt


def raising() -> _Scope:
    """A context in which the first signal raises KeyboardInterrupt, and a second ends the process at once."""
    return _Scope(_raise)


def keeping() -> _Scope:
    """A context in which the first signal raises KeyboardInterrupt and more do nothing, since data is being saved."""
    return _Scope(_raise_once)


def held() -> _Scope:
    """A context in which a signal raises nothing. `check` raises it later, and the exit code tells it anyway."""
    return _Scope(_wait)


def told(callback: Callable[[], object]) -> _Scope:
    """A context in which each signal calls `callback`, in the main thread, and raises nothing."""

    def tell(_number: int, _frame: FrameType | None) -> None:
        _state.raised = True
        callback()

    return _Scope(tell)


class _Expected:
    """A context in which signals are no request to end."""

    def __enter__(self) -> None:
        self._before = {number: _signal.getsignal(number) for number in SIGNALS}
        for number, handler in self._before.items():
            if handler is _handle:
                _signal.signal(number, _signal.SIG_IGN)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if handler is _handle:
                _signal.signal(number, handler)


def expected() -> _Expected:
    """A context in which signals do not ask to end: a tool that watches this process sends one when it is done."""
    return _Expected()


def leaving() -> None:
    """From now on a signal ends the process at once and in silence: its last line has been said."""
    _state.reaction = _end_silently


def _handle(number: int, frame: FrameType | None) -> None:
    if _state.received is None:
        _state.received, _state.received_at_s = number, time.monotonic()
    _state.reaction(number, frame)


def _end(number: int, _frame: FrameType | None) -> None:
    """End the process at once."""
    try:
        if os.isatty(2):
            os.write(2, _SHOW_CURSOR)  # a display that was cut short had hidden it
        os.write(2, b"stepscope: interrupted\n")
    except OSError:  # the terminal may have gone
        pass
    _end_silently(number, None)


def _end_silently(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + (_state.received or number))


def _raise(number: int, frame: FrameType | None) -> None:
    again = _state.raised and time.monotonic() > _state.received_at_s + _SAME_REQUEST_S
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


def _importing(frame: FrameType | None) -> bool:
    """Whether the main thread is importing: a library's C++ on the stack may abort on an exception, or forget it."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib._bootstrap"):
            return True
        frame = frame.f_back
    return False


def _try_again_soon() -> None:
    _signal.signal(_signal.SIGALRM, _handle_again)
    _signal.setitimer(_signal.ITIMER_REAL, _AGAIN_S)


def _handle_again(_number: int, frame: FrameType | None) -> None:
    if _state.received is not None and not _state.raised:
        _state.reaction(_state.received, frame)


def _raise_what_was_lost(unraisable: "sys.UnraisableHookArgs") -> None:
    """Raise a KeyboardInterrupt again that Python dropped, as it does with exceptions in a finaliser."""
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
