"""The `stepscope` command, and `python -m stepscope`: signals are answered before anything large is imported."""

from stepscope.core import interrupts


def main() -> None:
    """Run the command line."""
    interrupts.install()
    from stepscope.cli.app import main as run_command  # noqa: PLC0415  (takes a while)

    try:
        run_command()
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            raise
        from stepscope.core.leaving import leave  # noqa: PLC0415

        leave(ended.code)


if __name__ == "__main__":
    main()
