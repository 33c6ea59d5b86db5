"""The lifeline of a process: its stdin, which closes when its starter dies, however it dies."""

import os
import signal
import threading
from collections.abc import Callable


def end_with_stdin(before: Callable[[], object] | None = None) -> None:
    """End this process when stdin closes, and its group, if it leads one; `before` is called first."""

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
