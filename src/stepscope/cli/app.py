"""The `stepscope` command: its verbs, and what becomes of an error."""

import contextlib
import io
import os
import signal
import sys
from typing import NoReturn

import typer

from stepscope import __version__
from stepscope.cli import device, fit, kernel, ls, memory, models, run, show, study, sweep, table, trace
from stepscope.core.errors import EXIT_INTERRUPTED, EXIT_WRONG_INPUT, StepscopeError, one_line, printable

_OPTIONAL = {
    "torch": "pip install 'stepscope[torch]'",
    "polars": "pip install polars",
    "altair": "pip install altair",
    "vl_convert": "pip install vl-convert-python",
}
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
app.command("trace")(trace.trace)
app.command("memory")(memory.memory)
app.command("fit")(fit.fit)
app.command("show")(show.show)
app.command("ls")(ls.ls)
app.command("models")(models.models)
app.command("device")(device.device)
app.command("kernel")(kernel.kernel)
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
    _mend_streams()
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is not signal.SIG_IGN:  # nohup means what it says
            signal.signal(ending, signal.default_int_handler)  # as Ctrl-C: what was measured is kept
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
        code = EXIT_INTERRUPTED
    except Exception as error:
        # Typer's own errors carry `format_message`; its module for them differs between versions.
        format_message = getattr(error, "format_message", None)
        if type(error).__name__.startswith("NoArgsIsHelp") and format_message is not None:
            print(format_message(), file=sys.stderr)
            sys.exit(EXIT_WRONG_INPUT)
        if type(error).__name__ == "Abort":
            _leave("interrupted", EXIT_INTERRUPTED)
        if format_message is None:
            raise
        _leave(one_line(Exception(format_message())), EXIT_WRONG_INPUT)
    if code == EXIT_INTERRUPTED:
        _leave("interrupted", EXIT_INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _mend_streams() -> None:
    """Streams that were closed go nowhere, and a narrow encoding gets `?` for what it cannot say."""
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _leave(message: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # whoever reads stderr may have gone
        print(f"stepscope: {printable(message)}", file=sys.stderr)
    sys.exit(code)
