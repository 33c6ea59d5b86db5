"""The `stepscope` command, and `python -m stepscope`: signals are answered before anything large is imported."""

from stepscope.core import interrupts


def main() -> None:
    """Run the command line."""
    interrupts.install()
    from stepscope.cli.app import main as run_command  # noqa: PLC0415  (takes a while)

    run_command()


if __name__ == "__main__":
    main()
