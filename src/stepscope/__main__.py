"""The `stepscope` command, and `python -m stepscope`: signals are answered before anything large is imported."""

from stepscope.core import interrupts


def main() -> None:
    """Run the command line."""
    interrupts.install()
    from stepscope.app.cli.app import main as run_command  # noqa: PLC0415  (takes a while)
    from stepscope.core.interrupts import HandedOver, leave  # noqa: PLC0415

    try:
        run_command()
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            raise
        leave(ended.code)
    except HandedOver as handed:
        go = handed.go
    go()  # outside of the command's own contexts, handlers and tracebacks


if __name__ == "__main__":
    main()
