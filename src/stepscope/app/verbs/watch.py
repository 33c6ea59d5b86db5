"""`stepscope watch`: a training script of the user's, run as it is. In Python: `engine/watched_run.py`."""

import contextlib
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO

import msgspec

from stepscope.app.cli.output import give_back, show
from stepscope.core import interrupts
from stepscope.core.errors import InputError, one_line, warn
from stepscope.core.interrupts import die_of_interrupt
from stepscope.core.options import MEASURING, Argument, Option, verb
from stepscope.engine.watched_script import (
    Launch,
    Program,
    WatchRequest,
    prepare,
    program_of,
    report,
    settings_between,
    steps_between,
    wait_for_threads,
    when_imported,
    without_our_frames,
)
from stepscope.engine.workload_options import Recording

if TYPE_CHECKING:
    from stepscope.engine.watched_run import WatchedRun
    from stepscope.runs.live import LiveFigures

_NSYS = (
    "nsys watches a process from its start, and this one has started: write nsys profile -t cuda,nvtx "
    "-c cudaProfilerApi --capture-range-end=stop stepscope watch -- train.py"
)

_ELSEWHERE = "choose another place with --runs"


Steps = Annotated[
    str | None,
    Option(
        "Exactly these steps, the first of the loop being 0: 20:40 is steps 20 to 39. "
        "Steps 0 and 1 show what a step is.",
        MEASURING,
        metavar="FIRST:END",
    ),
]
StepOf = Annotated[
    str | None,
    Option(
        "The class of the model or of the optimizer whose step counts, where there are several.",
        MEASURING,
        metavar="CLASS",
    ),
]


@verb(
    "watch",
    "stepscope watch -- train.py --batch-size 8",
    "stepscope watch --steps 20:40 --record kineto -- -m package.train",
    steps="until steady, then 10 to 100",
)
def command(
    script: Annotated[
        list[str] | None,
        Argument("The script and its arguments; or -m and a module; or torchrun and all that follows."),
    ] = None,
    *,
    steps: Steps,
    step_of: StepOf,
    recording: Recording,
    tag: str | None,
    runs: Path,
    log: tuple[str, ...],
    metrics: Path | None,
) -> None:
    """Run a training script unchanged, and measure some of its steps: data, forward, backward, optimizer, the rest.

    What the script prints, its exit code and its signals are its own. What was measured is shown on stderr at the end.
    """
    # Each way ends with a call in place of an exit code: `stepscope/__main__.py` makes it when the command is over.
    between = steps_between(steps) if steps is not None else None
    if "nsys" in recording.trace.tools:
        raise InputError(_NSYS)
    program = program_of(script or [])
    if metrics is not None:
        from stepscope.runs.metrics import check_metrics_file

        check_metrics_file(metrics)
    if isinstance(program, Launch):
        options = _options(steps, step_of, recording, tag, runs, log, metrics)
        command = program.command(options)
        raise SystemExit(lambda: _become(command))
    request = WatchRequest(
        runs=runs.absolute(), settings=settings_between(between), between=between, trace=recording.trace,
        memory=recording.memory, step_of=step_of, tag=tag, log=log,
        metrics=metrics and metrics.absolute(), program=program.title,
    )  # fmt: skip
    try:
        request.runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write runs to {request.runs}: {error.strerror or error}; {_ELSEWHERE}") from error
    if not os.access(request.runs, os.W_OK | os.X_OK):
        raise InputError(f"cannot write runs to {request.runs}: permission denied; {_ELSEWHERE}")
    raise SystemExit(lambda: _run(program, request))


def _options(
    steps: str | None, step_of: str | None, recording: Recording, tag: str | None, runs: Path, log: tuple[str, ...],
    metrics: Path | None,
) -> list[str]:  # fmt: skip
    """The options of this command, as each worker is given them."""
    trace, memory = recording.trace, recording.memory
    words = {
        "--steps": steps,
        "--step-of": step_of,
        "--tag": tag,
        "--runs": str(runs.absolute()),
        "--log": ",".join(log) or None,
        "--metrics": str(metrics.absolute()) if metrics is not None else None,
        "--record": ",".join([*trace.tools, *(["memory"] if memory else [])]) or None,
        "--trace-steps": str(trace.steps) if trace.tools else None,
        "--memory-stacks": memory.stacks if memory else None,
        "--memory-steps": str(memory.steps) if memory else None,
    }
    flags = ["--trace-stacks"] if trace.stacks else []
    return [*flags, *(f"{option}={value}" for option, value in words.items() if value is not None)]


def _become(command: list[str]) -> NoReturn:
    interrupts.uninstall()
    os.environ.pop("KINETO_LOG_LEVEL", None)
    os.execv(command[0], command)


def _run(program: Program, request: WatchRequest) -> NoReturn:
    """Run the script under watch, and end the process as the script ends."""
    interrupts.uninstall()
    if os.environ.get("KINETO_LOG_LEVEL") == "99":  # This command has put it in, for profilers of its own.
        del os.environ["KINETO_LOG_LEVEL"]
    try:
        run = prepare(program)
    except InputError as error:
        warn(str(error))
        sys.exit(error.exit_code)
    watching = _Watching(request, give_back())
    process = os.getpid()
    ended: BaseException | None = None
    when_imported("torch", watching.start)
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
    wait_for_threads()
    before: Any = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        watching.finish(ended)
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # which leaves the rest out
        watching.trace()
    except KeyboardInterrupt:  # when it was over
        pass
    finally:
        signal.signal(signal.SIGINT, before)
    _end_as(ended, reported=True)


class _Watching:
    """The watch of this process, which says what it has to say on a stream of its own."""

    def __init__(self, request: WatchRequest, stream: TextIO | None) -> None:
        self._request, self._stream = request, stream
        self._line = _LiveLine(stream) if stream is not None else None
        self._watched: WatchedRun | None = None
        self._failed = False

    def start(self) -> None:
        try:
            from stepscope.engine.watched_run import WatchedRun

            self._watched = WatchedRun(self._request, self._say, self._line.show if self._line is not None else None)
            self._watched.start()
        except Exception as error:  # The script must run even if the watch fails, in whatever way it does.
            self._failed = True
            self._say(f"nothing is measured: {one_line(error)}")

    def finish(self, ended: BaseException | None) -> None:
        """Show what was measured."""
        watched = self._watched
        if self._failed:
            return
        if watched is None:
            self._say("nothing was measured: the script never imported torch in this process")
            return
        try:
            run, directory = watched.end(ended), watched.directory
            if self._line is not None:
                self._line.close()
            if run is None or directory is None:
                if not watched.was_told:
                    self._say(f"nothing was measured: {watched.why_not}")
            elif os.environ.get("RANK", "0") != "0":
                self._say(f"rank {os.environ['RANK']} was measured: {watched.saved_in}")
            elif self._stream is not None:
                from stepscope.core.answer import Line
                from stepscope.runs.answer import answer_run
                from stepscope.runs.live import first_lines

                answer = answer_run(run, str(watched.saved_in) if watched.saved_in is not None else None)
                lead = tuple(Line(line, "strong") for line in first_lines(run, directory))
                show(msgspec.structs.replace(answer, lead=(*lead, *answer.lead)), self._stream)
        except Exception as error:  # The process must end as the script ended, even if its run cannot be shown.
            self._say(f"what was measured cannot be shown: {one_line(error)}")

    def trace(self) -> None:
        """Trace the loop's step, if it was measured."""
        if self._watched is not None:
            with contextlib.suppress(Exception):  # as where the run is shown: all that counts is kept already
                self._watched.trace()

    def _say(self, line: str) -> None:
        if self._line is not None:
            self._line.say(line)


_PLAIN_EVERY_S = 30.0
_ERASED = "\r\x1b[2K"
"""The begin of a terminal's line, of which nothing is left."""
_DRAWS = re.compile(r"\r(?!\n)|\x1b\[[\d;?]*[^\d;?m]")
"""What a script writes that draws a line anew: a colour alone does not."""


class _LiveLine:
    """The live figures where stderr leads: one line that is renewed, on a terminal on which the script draws nothing;
    elsewhere a line each half minute.

    What the script prints goes above the line, and nothing of it is wiped away or continued: its streams on a terminal
    tell what they write, from the start.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._said_s, self._step = time.monotonic(), 0
        self._is_terminal = stream.isatty()
        self._is_renewed = self._is_terminal and os.environ.get("TERM", "dumb") != "dumb"
        self._is_shown = self._script_draws = False
        self._line_begins, self._line_is_drawn = True, False
        """Whether the script's next character begins a line, and whether its last line is one that it draws anew."""
        self._lock = threading.RLock()  # A signal handler of the script may print while the script does.
        self._undo: list[Callable[[], None]] = []
        for each in (sys.stdout, sys.stderr) if self._is_terminal else ():
            if each is not None:
                self._listen(each)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._leave_alone)

    def show(self, live: "LiveFigures") -> None:
        """Show these figures, if it is time for that."""
        from stepscope.engine.watched_run import progress_bars
        from stepscope.runs.live import live_line

        draws = self._script_draws or bool(progress_bars()) or live.steps_of in ("the Trainer", "Lightning")
        if self._is_renewed and not (draws or "rich.live" in sys.modules):
            if live.step != self._step:  # Otherwise the script may be waiting for somebody to type.
                self._renew(live_line(live))
            self._step = live.step
        elif time.monotonic() - self._said_s >= _PLAIN_EVERY_S:
            self._said_s = time.monotonic()
            self.say(live_line(live))

    def say(self, line: str) -> None:
        """Print a line that stays, above the script's own bars."""
        tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
        drawn = bool(getattr(tqdm, "_instances", ()))
        aside = tqdm.external_write_mode(file=sys.stderr) if tqdm is not None and drawn else contextlib.nullcontext()
        with aside, self._lock:
            self._begin_line()
            warn(line, self._stream)

    def close(self) -> None:
        """Take the line away, end the script's own, and let its streams be."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        with self._lock:
            if self._is_shown or not self._line_begins:
                self._line_is_drawn = False
                self._begin_line()

    def _begin_line(self) -> None:
        """Let what follows begin a line, which ends one that the script has begun."""
        if self._is_terminal and not (self._line_begins or self._line_is_drawn):
            self._write("\n")
            self._line_begins = True
        elif self._is_renewed:
            self._erase()

    def _renew(self, line: str) -> None:
        with self._lock:
            if self._line_begins:
                width = shutil.get_terminal_size().columns
                with contextlib.suppress(OSError):
                    width = os.get_terminal_size(self._stream.fileno()).columns or width
                self._write(f"{_ERASED}{line[: width - 1]}")
                self._is_shown = True

    def _listen(self, stream: TextIO) -> None:
        """Let a stream of the script take the line away before it writes on a terminal."""
        if not stream.isatty():
            return
        original = stream.write

        def write(text: str) -> int:
            with self._lock:
                if self._is_shown:
                    self._erase()
                self._note(text)
                return original(text)

        def undo() -> None:
            if vars(stream).get("write") is write:
                del stream.write

        stream.write = write
        self._undo.append(undo)

    def _note(self, text: str) -> None:
        """Keep in mind how the script's last line stands, of which this is written now."""
        _, ended, last = text.rpartition("\n")
        self._script_draws = self._script_draws or _DRAWS.search(text) is not None
        self._line_is_drawn = (self._line_is_drawn and not ended) or _DRAWS.search(last) is not None
        self._line_begins = text.endswith(("\n", "\r")) if text else self._line_begins

    def _erase(self) -> None:
        self._write(_ERASED)
        self._is_shown = False

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()

    def _leave_alone(self) -> None:
        """In a child that was forked: another thread may have held the lock."""
        self._lock, self._is_shown = threading.RLock(), False
        self._is_terminal = self._is_renewed = False


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

    def say_nothing(*_: object) -> None:
        """The exception has been shown."""

    sys.excepthook = say_nothing
    raise ended.with_traceback(None)
