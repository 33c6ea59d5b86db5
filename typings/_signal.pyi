"""What core/interrupts.py uses of `_signal`, the built-in module behind `signal`. Its constants are plain integers."""

from collections.abc import Callable
from types import FrameType
from typing import Never

_Handler = Callable[[int, FrameType | None], object] | int | None

SIGINT: int
SIGTERM: int
SIGHUP: int
SIGALRM: int
SIG_DFL: int
SIG_IGN: int
ITIMER_REAL: int

def default_int_handler(signalnum: int, frame: FrameType | None, /) -> Never: ...
def getsignal(signalnum: int, /) -> _Handler: ...
def setitimer(which: int, seconds: float, interval: float = 0.0, /) -> tuple[float, float]: ...
def signal(signalnum: int, handler: _Handler, /) -> _Handler: ...
