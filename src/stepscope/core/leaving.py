"""The end of a process, without the seconds that Python takes to free torch's modules one by one."""

import atexit
import ctypes
import os
import sys
import threading
from typing import NoReturn

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
    # What Python itself calls first.
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)
    ctypes.CDLL(None).fflush(None)  # what libraries in C have printed
    os._exit(code)
