"""The `stepscope` command: its verbs, and what becomes of an error."""

import contextlib
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import click
from click.shell_completion import get_completion_class

from stepscope import __version__
from stepscope.app.cli import study
from stepscope.app.cli.output import emit, mend
from stepscope.app.cli.verb import Verbs
from stepscope.core import interrupts
from stepscope.core.errors import (
    EXIT_DEVICE_FAILED,
    EXIT_INTERRUPTED,
    EXIT_WRONG_INPUT,
    InputError,
    StepscopeError,
    one_line,
    warn,
)
from stepscope.core.units import format_bytes

_OPTIONAL = {
    "torch": "pip install 'stepscope[torch]'",
    "polars": "pip install polars",
    "vl_convert": "pip install vl-convert-python",
}
"""A machine that only reads needs no torch, a bare GPU machine that only measures no polars."""


_FIRST = (
    ("stepscope run", "measure a training step here, and save what was found"),
    ("stepscope watch -- train.py", "measure the steps of a training script of your own"),
    ("stepscope show last", "show it again"),
    ("stepscope fit --model xl", "predict the memory of a larger one, without running it"),
    ("stepscope study formats", "one question each: `stepscope study` lists them"),
    ("stepscope VERB --help", "the options of a verb, and two examples"),
)


class _Command(Verbs):
    """The command itself. In its verbs, and only there, a signal is a KeyboardInterrupt, which goes no further."""

    home = "stepscope.app.verbs."
    verbs: ClassVar = {
        "run": ("run", "Measure one step: time by phase, rates, memory, and what to doubt. Saves a run directory."),
        "watch": (
            "watch",
            "Run a training script unchanged, and measure some of its steps: data, forward, backward, optimizer, the "
            "rest.",
        ),
        "bench": (
            "bench",
            "Judge a function of your own by float64, and time it beside its rivals: a kernel, a layer, an attention.",
        ),
        "sweep": ("sweep", "Measure a grid of workloads. The same command resumes a sweep that was interrupted."),
        "compare": (
            "compare",
            "Compare runs, sets, sweeps, tags or commits: what changed, by how much, and how sure that is.",
        ),
        "table": ("stored_runs:table", "Tables of runs: terminal, Markdown, CSV or JSON lines; and as a plot."),
        "trace": (
            "trace",
            "Where the time of a captured step went: by phase, family, kernel and module, every nanosecond accounted "
            "for.",
        ),
        "memory": (
            "memory",
            "Where the memory went: the peak by category, tensor, line of code and block, every byte accounted for.",
        ),
        "report": ("report", "Write one HTML page that needs nothing else: look at it, print it, send it."),
        "fit": (
            "fit",
            "Predict the peak memory of a step, say whether it fits, and what would make it fit. Needs no GPU.",
        ),
        "plan": (
            "plan",
            "Plan a step on paper, over one GPU to 100,000: every layout, which fit, which is fastest, and what "
            "bounds it.",
        ),
        "tune": (
            "tune",
            "Find the fastest step that fits and trains as this one does, at the same batch. The same command goes on.",
        ),
        "show": ("stored_runs:show_command", "Show a run read back from disk, or the runs of one set together."),
        "advise": (
            "stored_runs:advise_command",
            "Say what to change in a watched script: the line, what to write there, and what that should save.",
        ),
        "ls": ("stored_runs:ls", "List runs, oldest first."),
        "history": ("stored_runs:history", "Trends of stored runs by workload, with changes of level dated by commit."),
        "writeup": (
            "writeup",
            "Answer the questions of an assignment from stored runs; a question without data names its command.",
        ),
        "models": (
            "lookups:models",
            "List the presets: name, parameters, sizes, and what each edition of CS336's assignment calls them.",
        ),
        "device": (
            "lookups:device",
            "Name the device, its datasheet peaks, and the ceilings measured on it (stored for later runs).",
        ),
        "kernel": (
            "lookups:kernel",
            "Explain a kernel by its name: library, types, layout, tile, and which product of a step it is.",
        ),
    }

    groups: ClassVar = {
        "Measure": ("run", "watch", "bench", "sweep", "compare", "tune", "device"),
        "Explain": ("advise", "trace", "memory", "kernel", "study"),
        "Predict": ("fit", "plan", "models"),
        "Keep": ("show", "ls", "table", "history", "report", "writeup"),
    }

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("To begin with"):
            formatter.write_dl(_FIRST)

    def invoke(self, ctx: Any) -> Any:
        if ctx.params["version"]:
            emit(f"stepscope {__version__}\n")
            raise click.exceptions.Exit
        if (shown := ctx.params["show_completion"]) or ctx.params["install_completion"]:
            _complete(shown)
            raise click.exceptions.Exit
        try:
            with interrupts.raising():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(EXIT_INTERRUPTED) from None


app = _Command(
    name="stepscope",
    help="A laboratory for one thing: a transformer training step. Measures it, explains it, makes it faster.",
    no_args_is_help=True,
    params=[
        click.Option(["--version"], is_flag=True, help="Print the version."),
        click.Option(["--install-completion"], is_flag=True, help="Let the shell offer names of models and runs."),
        click.Option(["--show-completion"], is_flag=True, help="Print what the shell reads for that."),
    ],
    context_settings={"max_content_width": shutil.get_terminal_size().columns},
)
app.add_command(study.app)

_COMPLETION = {
    "bash": (".bashrc", 'eval "$(_STEPSCOPE_COMPLETE=bash_source stepscope)"'),
    "zsh": (".zshrc", 'eval "$(_STEPSCOPE_COMPLETE=zsh_source stepscope)"'),
    "fish": (".config/fish/completions/stepscope.fish", "_STEPSCOPE_COMPLETE=fish_source stepscope | source"),
}
"""A shell's own file under the home directory, and the line in it that loads what click writes for this shell."""


def _complete(shown: bool) -> None:
    """Print what the user's shell reads to complete; or put the line that loads it into the shell's file, once."""
    shell = Path(os.environ.get("SHELL", "")).name
    if shell not in _COMPLETION:
        raise InputError(f"SHELL is {shell or 'not set'}: names are completed in {', '.join(_COMPLETION)}")
    name, line = _COMPLETION[shell]
    kind = get_completion_class(shell)
    if shown and kind is not None:
        emit(f"{kind(app, {}, 'stepscope', '_STEPSCOPE_COMPLETE').source()}\n")
        return
    file = Path.home() / name
    written = file.read_text() if file.exists() else ""
    if line not in written.splitlines():
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as lines:
            lines.write(f"\n{line}\n" if written and not written.endswith("\n") else f"{line}\n")
    emit(f"{file} loads it in new shells: {line}\n")


_LARGEST_SCRIPT, _MOST_SCRIPTS = 1 << 20, 200
_TRAINS = re.compile(r"\.backward\(|\bTrainer\(|\.train\(\)|\.fit\(")
_USES_TORCH = re.compile(r"^\s*(import|from) (torch|transformers|lightning|pytorch_lightning|accelerate)\b", re.M)


def _next_commands() -> list[tuple[str, str]]:
    """What there is to do in this folder: with the run measured last, and with scripts that seem to train with PyTorch,
    those that are called like it first."""
    from stepscope.core.run_directory import last_run

    commands: list[tuple[str, str]] = []
    if Path("runs").is_dir() and (latest := last_run(Path("runs"))) is not None:
        commands.append(("stepscope show last", f"the run measured last, {latest.parent.name}"))
        commands.append(("stepscope report last", "the same as a page"))
    scripts: list[str] = []
    for file in sorted(Path().glob("*.py"), key=lambda file: ("train" not in file.stem, file.name))[:_MOST_SCRIPTS]:
        with contextlib.suppress(OSError):
            text = file.read_text(errors="replace") if file.stat().st_size < _LARGEST_SCRIPT else ""
            if _USES_TORCH.search(text) and _TRAINS.search(text):
                scripts.append(file.name)
    for name in scripts[:2]:
        commands.append((f"stepscope watch -- {shlex.quote(name)}", f"measure the steps of {name} while it trains"))
    return commands


def _find_spec(name: str, path: object = None, target: object = None) -> None:
    """Find nothing: refuse PyTorch, whoever imports it first, where it would raise, abort or retry for ever."""
    if name == "torch":
        interrupts.require_room_for_torch()


def main() -> NoReturn:
    """Run the command. Every failure that stepscope names is one line on stderr and its exit code."""
    finder: Any = SimpleNamespace(find_spec=_find_spec)
    sys.meta_path.insert(0, finder)
    # Read by PyTorch's profiler when torch is imported: its start and stop are not worth a line to the user.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    interrupts.install()
    mend()
    try:
        Path.cwd()  # libraries that are loaded where there is no directory end the process themselves
    except OSError:
        _leave("the current directory is gone: change to one that is there", EXIT_WRONG_INPUT)
    completes = "_STEPSCOPE_COMPLETE" in os.environ
    if len(sys.argv) == 1 and not completes and (commands := _next_commands()):
        width = max(len(command) for command, _ in commands)
        lines = [f"  {command:{width}}  {words}" for command, words in commands]
        emit("\n".join(["Here:", *lines, "", "stepscope --help shows all verbs.", ""]))
        sys.exit(0)
    try:
        code = app(prog_name="stepscope", standalone_mode=False)
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
        if interrupts.received():  # a library made something else of it
            _leave("interrupted", EXIT_INTERRUPTED)
        _leave_if_named(error)
        if completes:
            _leave("the shell's completion asked for nothing: stepscope --install-completion", EXIT_WRONG_INPUT)
        raise
    if code == EXIT_INTERRUPTED or interrupts.received():
        _leave("interrupted", EXIT_INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _leave_if_named(error: Exception) -> None:
    """Leave in one line for what click, the system or a library that does not load raised. A fault of ours returns."""
    if isinstance(error, MemoryError):
        library = _library_that_failed(error)
        what = f"this machine's memory does not suffice{f' to load {library}' if library else ''}"
        _leave(f"{what}{_memory_limit()}", EXIT_DEVICE_FAILED)
    library = _library_that_failed(error)
    if library is not None:
        _leave(f"{library} cannot be loaded here: {one_line(error)}{_memory_limit()}", EXIT_WRONG_INPUT)
    if isinstance(error, BrokenPipeError):  # the reader of a help text has gone
        sys.exit(0)
    if isinstance(error, OSError):  # the help text, which only `emit` does not write; or a file that nobody foresaw
        what = f"{error.filename}: " if error.filename else "cannot write the output: "
        _leave(f"{what}{error.strerror or one_line(error)}", EXIT_WRONG_INPUT)
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        with contextlib.suppress(OSError):
            print(error.format_message(), file=sys.stderr)
        sys.exit(EXIT_WRONG_INPUT)
    if isinstance(error, click.Abort):
        _leave("interrupted", EXIT_INTERRUPTED)
    if isinstance(error, click.ClickException):
        _leave(one_line(Exception(error.format_message())), EXIT_WRONG_INPUT)


def _library_that_failed(error: BaseException) -> str | None:
    """The package that raised while it was imported, or None: a library that does not load is no fault of ours."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if frame.f_code.co_name == "<module>" and package not in ("stepscope", "__main__"):
            return package
        trace = trace.tb_next
    return None


def _memory_limit() -> str:
    """What limits the memory of this process, in words; empty where nothing does."""
    limit = interrupts.address_space_limit()
    return f": this process may have {format_bytes(limit)} (ulimit -v), raise the limit" if limit else ""


def _leave(message: str, code: int) -> NoReturn:
    interrupts.leaving()
    warn(message)
    sys.exit(interrupts.exit_code(code))
