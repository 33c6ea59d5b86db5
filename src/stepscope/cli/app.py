"""The `stepscope` command: its verbs, and what becomes of an error."""

import os
import sys
from typing import NoReturn

import typer

from stepscope import __version__
from stepscope.cli import device, ls, models, run, show, study, sweep, table
from stepscope.core.errors import EXIT_INTERRUPTED, EXIT_WRONG_INPUT, StepscopeError, one_line

_OPTIONAL = {"torch": "pip install 'stepscope[torch]'", "polars": "pip install polars"}
"""A machine that only reads needs no torch, a bare GPU machine that only measures no polars."""

app = typer.Typer(
    help="A laboratory for one thing: a transformer training step. Measures it, explains it, makes it faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("run")(run.run)
app.command("sweep")(sweep.sweep)
app.command("table")(table.table)
app.command("show")(show.show)
app.command("ls")(ls.ls)
app.command("models")(models.models)
app.command("device")(device.device)
app.add_typer(study.app, name="study")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stepscope {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Say the version."),
) -> None:
    pass


def main() -> NoReturn:
    """Run the command. Every failure that stepscope names is one line on stderr and its exit code."""
    # Read by PyTorch's profiler when torch is imported: its start and stop are not worth a line to the user.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        code = app(standalone_mode=False)
    except StepscopeError as error:
        _leave(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        remedy = _OPTIONAL.get((error.name or "").partition(".")[0])
        if remedy is None:
            raise
        _leave(f"this verb needs {error.name}, which is not installed here: {remedy}", EXIT_WRONG_INPUT)
    except KeyboardInterrupt:
        _leave("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): nothing is wrong, and nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        # Typer's own usage errors carry `format_message`; its module for them differs between versions.
        if type(error).__name__ == "Abort":
            _leave("interrupted", EXIT_INTERRUPTED)
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        _leave(one_line(Exception(format_message())), EXIT_WRONG_INPUT)
    sys.exit(code if isinstance(code, int) else 0)


def _leave(message: str, code: int) -> NoReturn:
    print(f"stepscope: {message}", file=sys.stderr)
    sys.exit(code)
