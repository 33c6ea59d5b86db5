"""The `stepscope` command, and `python -m stepscope`: signals are answered before anything large is imported."""

import gc
import sys

from stepscope.core import interrupts


def main() -> None:
    """Run the command line."""
    interrupts.install()
    gc.disable()  # until the verb runs: what imports make stays, and need not be searched for circles
    from stepscope.app.cli.app import main as run_command  # noqa: PLC0415  (takes a while)

    try:
        run_command()
    except SystemExit as ended:
        code: object = ended.code
    if isinstance(code, int):
        interrupts.leave(code)
    if callable(code):  # `watch`: outside of the command's own contexts, handlers and tracebacks
        code()
    sys.exit(None if code is None else str(code))


if __name__ == "__main__":
    main()
