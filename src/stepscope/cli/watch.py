"""`stepscope watch`: a training script that is not ours, run as it is."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from stepscope.cli.output import show, warn
from stepscope.cli.recording import Recording
from stepscope.cli.streams import unmend
from stepscope.cli.verb import verb
from stepscope.core import interrupts
from stepscope.core.errors import InputError, one_line
from stepscope.core.leaving import HandedOver, die_of_interrupt
from stepscope.engine.watch.command import Launch, Program, launch_command, program_of
from stepscope.engine.watch.request import WatchRequest, settings_between, steps_between
from stepscope.engine.watch.script import prepare, report, when_imported, without_our_frames

if TYPE_CHECKING:
    from stepscope.engine.watch.watched_run import WatchedRun

_NSYS = (
    "nsys watches a process from its start, and this one has started: write nsys profile -t cuda,nvtx "
    "-c cudaProfilerApi --capture-range-end=stop stepscope watch -- train.py"
)

_ELSEWHERE = "choose another place with --runs"


@verb(
    "watch",
    "stepscope watch -- train.py --batch-size 8",
    "stepscope watch --steps 20:40 --record kineto -- -m package.train",
    steps="until steady, then 10 to 100",
)
def watch(
    script: Annotated[
        list[str] | None,
        typer.Argument(help="The script and its arguments; or -m and a module; or torchrun and all that follows."),
    ] = None,
    *,
    steps: str | None,
    step_of: str | None,
    recording: Recording,
    tag: str | None,
    runs: Path,
) -> None:
    """Run a training script unchanged, and measure some of its steps: data, forward, backward, optimizer, the rest.

    What the script prints, its exit code and its signals are its own. What was measured is shown on stderr at the end.
    """
    between = steps_between(steps) if steps is not None else None
    if "nsys" in recording.trace.tools:
        raise InputError(_NSYS)
    program = program_of(script or [])
    if isinstance(program, Launch):
        options = _options(steps, step_of, recording, tag, runs)
        command = launch_command(program, options)
        raise HandedOver(lambda: _become(command))
    request = WatchRequest(
        runs=runs.absolute(), settings=settings_between(between), between=between, trace=recording.trace,
        memory=recording.memory, step_of=step_of, tag=tag, program=program.title,
    )  # fmt: skip
    _check_writable(request.runs)
    raise HandedOver(lambda: _run(program, request))


def _options(steps: str | None, step_of: str | None, recording: Recording, tag: str | None, runs: Path) -> list[str]:
    """The options of this command, as each worker is given them."""
    trace, memory = recording.trace, recording.memory
    said = {
        "--steps": steps, "--step-of": step_of, "--tag": tag, "--runs": str(runs.absolute()),
        "--record": ",".join([*trace.tools, *(["memory"] if memory else [])]) or None,
        "--trace-steps": str(trace.steps) if trace.tools else None,
        "--memory-stacks": memory.stacks if memory else None,
        "--memory-steps": str(memory.steps) if memory else None,
    }  # fmt: skip
    flags = ["--trace-stacks"] if trace.stacks else []
    return [*flags, *(f"{option}={value}" for option, value in said.items() if value is not None)]


def _check_writable(runs: Path) -> None:
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write runs to {runs}: {error.strerror or error}; {_ELSEWHERE}") from error
    if not os.access(runs, os.W_OK | os.X_OK):
        raise InputError(f"cannot write runs to {runs}: permission denied; {_ELSEWHERE}")


def _become(command: list[str]) -> NoReturn:
    interrupts.uninstall()
    os.environ.pop("KINETO_LOG_LEVEL", None)
    os.execv(command[0], command)


def _run(program: Program, request: WatchRequest) -> NoReturn:
    """Run the script under watch, and end the process as the script ends."""
    interrupts.uninstall()
    unmend()
    watching: list[WatchedRun] = []
    process = os.getpid()
    ended: BaseException | None = None
    try:
        run = prepare(program)
    except InputError as error:
        warn(str(error))
        sys.exit(error.exit_code)
    when_imported("torch", lambda: _start(request, watching))
    try:
        run()
    except BaseException as error:
        ended = error
    if ended is not None:
        without_our_frames(ended)
    if os.getpid() != process:  # This is a forked child that has reached the script's end.
        _end_as(ended)
    if ended is not None and not isinstance(ended, SystemExit):
        report(ended)
    _uninterrupted(lambda: _finish(watching, ended))
    _end_as(ended, reported=True)


def _start(request: WatchRequest, watching: "list[WatchedRun]") -> None:
    try:
        from stepscope.engine.watch.watched_run import WatchedRun

        watched = WatchedRun(request, warn)
        watched.start()
        watching.append(watched)
    except Exception as error:  # The script must run even if the watch fails, in whatever way it does.
        warn(f"nothing is measured: {one_line(error)}")


def _finish(watching: "list[WatchedRun]", ended: BaseException | None) -> None:
    """Show what was measured, on stderr."""
    if not watching:
        warn("nothing was measured: the script never imported torch in this process")
        return
    watched = watching[0]
    try:
        run, directory = watched.end(ended), watched.directory
        if run is None or directory is None:
            if watched.was_told:
                return
            warn(f"nothing was measured: {watched.why_not}")
        elif os.environ.get("RANK", "0") != "0":
            warn(f"rank {os.environ['RANK']} was measured: {directory}")
        else:
            from stepscope.analysis.runs.answer import answer_run
            from stepscope.report.terminal import render_answer

            show(render_answer(answer_run(run, str(directory))), sys.stderr)
    except Exception as error:  # The process must end as the script ended, even if its run cannot be shown.
        warn(f"what was measured cannot be shown: {one_line(error)}")


def _uninterrupted(call: Callable[[], None]) -> None:
    """Make a call during which Ctrl-C does nothing."""
    before: Any = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        call()
    finally:
        signal.signal(signal.SIGINT, before)


def _end_as(ended: BaseException | None, *, reported: bool = False) -> NoReturn:
    """End the process as Python does after this exception."""
    if ended is None:
        sys.exit(0)
    if isinstance(ended, SystemExit):
        raise ended.with_traceback(None)
    if not reported:
        report(ended)
    if isinstance(ended, KeyboardInterrupt):
        die_of_interrupt()
    sys.excepthook = _silent  # The exception has been shown.
    raise ended.with_traceback(None)


def _silent(*_: object) -> None:
    pass
