"""The end of a process, without the seconds that Python takes to free torch's modules one by one."""

import atexit
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

_WATCHERS = ("NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID", "LD_PRELOAD")
"""Variables of profilers inside this process, which write what they have when it ends in the usual way."""


class HandedOver(BaseException):
    """Ends the command with a call that takes its place, once nothing of the command is under way any more.

    It is no Exception, so that nothing on its way takes it for a failure.
    """

    def __init__(self, go: Callable[[], NoReturn]) -> None:
        super().__init__()
        self.go = go


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
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    os._exit(128 + signal.SIGINT)  # where the signal is blocked


def _ended_as_python_ends() -> bool:
    """Wait for threads, run exit functions, write streams; returns whether everything could be written."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return False
    ctypes.CDLL(None).fflush(None)  # what libraries in C have printed
    return True
