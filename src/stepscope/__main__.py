"""`python -m stepscope` is the `stepscope` command."""

from stepscope.cli.app import main

main()
