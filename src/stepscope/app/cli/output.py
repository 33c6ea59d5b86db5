"""What becomes of an answer: stdout for results, stderr for progress, and the options that choose its form."""

import contextlib
import io
import os
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from stepscope.core.answer import Answer, Finding, encode_answer, worst
from stepscope.core.errors import EXIT_CHECK_FAILED, EXIT_DONE, InputError, StepscopeError, choose, visible, warn
from stepscope.rendering.cells import plain_text
from stepscope.rendering.renderers import BARE, STYLES

if TYPE_CHECKING:
    from rich.console import RenderableType

    from stepscope.engine.request import Stage
    from stepscope.engine.sweep_plan import SweepState


def exit_code_of(findings: Iterable[Finding]) -> int:
    """The exit code of a verb that ended: whether a check failed."""
    return EXIT_CHECK_FAILED if worst(findings) == "error" else EXIT_DONE


def show(answer: Answer, stream: TextIO | None = None) -> None:
    """Print an answer on stdout, or another stream, at the width of the terminal; a pipe or a file gets tables as wide
    as they are, and text folded at 120."""
    out = stream or sys.stdout
    if not out.isatty():
        _write(plain_text(answer), out)
        return
    from stepscope.rendering.terminal import render_answer

    show_on_screen(render_answer(answer, drawn=shutil.get_terminal_size().columns >= _DRAWN_FROM), out)


def show_on_screen(renderable: "RenderableType", out: TextIO) -> None:
    """Print on a terminal, at its width."""
    from rich.table import Table

    from stepscope.rendering.terminal import CleanConsole, fitted, parts_of

    console = CleanConsole(file=out)
    for part in parts_of(renderable):
        for i, piece in enumerate(fitted(part, console) if isinstance(part, Table) else [part]):
            with console.capture() as printed:
                console.print(piece)
            lines = printed.get().splitlines()
            if isinstance(piece, Table):  # its first line and its last are an edge that nobody sees
                lines = [*([""] if i else []), *lines[1:-1]]
            _write("\n".join([*lines, ""]), out)  # the console's own colours stay, the text in them is clean


def present(*answers: Answer, style: str = "terminal", only: str | None = None) -> None:
    """Print answers one below the other, or the parts that `only` names, in a style of `--style`."""
    parts = list(answers) if only is None else [answer.part(only) for answer in answers if answer.has(only)]
    if not parts:
        parts = [answers[-1].part(only or "")]
    for i, wanted in enumerate(parts):
        if i:
            emit("\n")
        if style == "terminal":
            show(wanted)
        elif style == "bars" and sys.stdout.isatty():
            from stepscope.rendering.renderers.bars import coloured

            show_on_screen(coloured(wanted), sys.stdout)
        else:
            from stepscope.rendering.renderers import render

            emit(render(wanted, style))


_DRAWN_FROM = 80
"""Columns of a terminal that sparklines need."""


def draw(answer: Answer, target: Path) -> None:
    """Draw the panels of an answer into a file."""
    from stepscope.rendering.picture import draw_answer
    from stepscope.rendering.plots import save_plot

    save_plot(draw_answer(answer, interactive=target.suffix.lower() == ".html"), target)
    notes = "; ".join(dict.fromkeys(panel.frame.note for panel in answer.panels if panel.frame.note))
    warn(f"plotted in {target}{f': {notes}' if notes else ''}")


def emit(text: str) -> None:
    """Write a result to stdout, JSON too, control characters in it as escapes."""
    _write(visible(text))


def _write(text: str, stream: TextIO | None = None) -> None:
    """Write to stdout, or another stream. A reader that has gone (`| head`) is no failure; a full disk is one line."""
    out = stream or sys.stdout
    try:
        out.write(text)
        out.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        raise StepscopeError(f"cannot write the result to stdout: {error.strerror or error}") from error


def json_line(value: object) -> str:
    """A value as one line of JSON. Halves of surrogate pairs, which a pickle can hold, become `?`."""
    try:
        return msgspec.json.encode(value).decode() + "\n"
    except UnicodeEncodeError:
        return msgspec.json.encode(_encodable(msgspec.to_builtins(value))).decode() + "\n"


def _encodable(value: dict[Any, Any] | list[Any] | tuple[Any, ...] | str | float | None) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, (list, tuple)) else value


@contextlib.contextmanager
def stdout_kept_clean() -> Generator[None]:
    """Inside, whatever libraries print to stdout, from C++ too, goes to stderr: stdout is for the result."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def progress() -> Generator[Callable[["Stage"], None]]:
    """A live line on a terminal, below the lines of what lasts; elsewhere one line for each stage that begins."""
    if not sys.stderr.isatty():
        printed: set[str] = set()

        def tell_plainly(stage: "Stage") -> None:
            if stage.name not in printed:
                printed.add(stage.name)
                warn(f"{stage.name} {stage.detail}".rstrip())

        yield tell_plainly
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from stepscope.rendering.terminal import CleanConsole

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[detail]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=CleanConsole(stderr=True), transient=True) as display:
        task = display.add_task("start", total=None, detail="")

        def tell(stage: "Stage") -> None:
            if stage.lasts:
                warn(stage.name)  # the display moves it above its own line
                return
            total = None if stage.fraction is None else 1.0
            display.update(
                task,
                description=stage.name,
                total=total,
                completed=stage.fraction or 0.0,
                detail=stage.detail,
            )

        yield tell


@contextlib.contextmanager
def patient_progress(clock: Callable[[], float] = time.monotonic) -> Generator[Callable[["Stage"], None]]:
    """Progress of what is mostly over at once: nothing in the first 0.4 s on a terminal. Elsewhere nothing in the first
    two seconds, and then one stage in two seconds, that which runs by then, and all that lasts.

    clock: what counts as a second; of work in this process alone its own time, so that no other process makes it tell.
    """
    import threading

    lasting: list[Stage] = []
    running: list[Stage] = []
    over = threading.Event()
    drawn = sys.stderr.isatty()

    def is_over_in(seconds: float) -> bool:
        until_s = clock() + seconds
        while (left_s := until_s - clock()) > 0:
            if over.wait(left_s):
                return True
        return False

    def pass_on() -> None:
        if is_over_in(0.4 if drawn else 2.0):
            return
        with progress() as tell:
            while True:
                found = [lasting.pop(0) for _ in lasting[:]]
                for stage in (*found, *running[:]) if drawn or not found else found:
                    tell(stage)
                if is_over_in(0.1 if drawn else 2.0):
                    return

    def tell(stage: "Stage") -> None:
        if stage.lasts:
            lasting.append(stage)
        else:
            running[:] = [stage]

    teller = threading.Thread(target=pass_on, daemon=True)
    teller.start()
    try:
        yield tell
    finally:
        over.set()
        teller.join()


@contextlib.contextmanager
def told_where_long(what: str, clock: Callable[[], float] = time.process_time) -> Generator[None]:
    """Inside, say what is done, once that has taken longer than what is mostly over at once."""
    from stepscope.engine.request import Stage

    with patient_progress(clock) as tell:
        tell(Stage(name=what))
        yield


@contextlib.contextmanager
def sweep_progress() -> Generator[Callable[["SweepState"], None]]:
    """A live table of the cells on a terminal; elsewhere one line for each cell that ends."""
    from stepscope.core.formulas.spelled import cell_name
    from stepscope.runs.answer import ProgressRow, ended_cell_sentence
    from stepscope.runs.answer import sweep_progress as progress_of

    def rows_of(state: "SweepState") -> list[ProgressRow]:
        return [
            ProgressRow(
                name=" in turns with ".join(
                    cell_name(each, cell.cell.settings) for each in (cell.cell.workload, cell.cell.against) if each
                ),
                state=cell.state,
                stage=f"{cell.stage} {cell.detail}".strip(),
                run=cell.run,
                resumed=cell.resumed,
            )
            for cell in state.cells
        ]

    faults: list[str] = []
    if sys.stderr.isatty():
        from rich.console import Group
        from rich.live import Live
        from rich.text import Text

        from stepscope.rendering.terminal import CleanConsole, make_table

        with Live(console=CleanConsole(stderr=True), transient=True, refresh_per_second=4) as live:
            height = live.console.size.height

            def show_live(state: "SweepState") -> None:
                faults.extend(fault for fault in state.faults if fault not in faults)
                done, table = progress_of(rows_of(state), state.seconds_left, height)
                live.update(Group(Text(done), make_table(table)))

            yield show_live
        for fault in faults:
            warn(f"measured again: {fault}")
        return
    printed: set[int] = set()
    last: SweepState | None = None

    def tell(state: "SweepState") -> None:
        nonlocal last
        if state is not last:  # sweeps may follow one another, as those of a search do
            printed.clear()
            last = state
        for fault in state.faults:
            if fault not in faults:
                faults.append(fault)
                warn(f"measured again: {fault}")
        rows = rows_of(state)
        for i, row in enumerate(rows):
            if row.run is not None and i not in printed:
                printed.add(i)
                warn(ended_cell_sentence(rows, i, state.seconds_left))

    yield tell


# stdin, stdout and stderr, mended for our own verbs and given back to a script that is not ours.


_STREAMS = ("stdin", "stdout", "stderr")
_FIRST_OWN = 200
"""The least number of a descriptor of ours beside a script, whose own then have the numbers that they would have."""
_errors: dict[io.TextIOWrapper, str | None] = {}
_were_closed: list[int] = []
_were_none: list[str] = []


def mend() -> None:
    """Streams that were closed go nowhere, and a narrow encoding gets `?` for what it cannot say."""
    for number, name in enumerate(_STREAMS):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            _were_closed.append(number)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115
            _were_none.append(name)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            _errors[stream] = stream.errors
            stream.reconfigure(errors="replace")


def give_back() -> TextIO | None:
    """Give the streams back as they were before `mend`. Returns a stream of our own to where stderr leads, whatever
    becomes of that; None if it is closed."""
    stderr = _own_stderr() if 2 not in _were_closed else None
    for stream, errors in _errors.items():
        stream.reconfigure(errors=errors)
    for name in _were_none:
        setattr(sys, name, None)
    for number in _were_closed:
        os.close(number)
    for known in (_errors, _were_none, _were_closed):
        known.clear()
    return stderr


def _own_stderr() -> TextIO | None:
    try:
        import fcntl  # not on every system

        number = fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, _FIRST_OWN)
    except (ImportError, OSError):
        number = os.dup(2)
    encoding = getattr(sys.__stderr__, "encoding", None) or "utf-8"
    stream = open(number, "w", encoding=encoding, errors="replace", closefd=False)  # noqa: SIM115
    if hasattr(os, "register_at_fork"):  # a child that lives on would keep a reader of stderr waiting
        os.register_at_fork(after_in_child=lambda: os.close(number))
    return stream


# What becomes of an answer: which part of it is printed, and in which form.


@dataclass(frozen=True, kw_only=True)
class Presentation:
    """What --only, --style, --brief and --json say."""

    only: str | None = None
    brief: bool = False
    style: str = "terminal"
    json: bool = False

    def __post_init__(self) -> None:
        choose(self.style, STYLES, "style")
        if self.brief and self.style != "terminal":
            raise InputError(f"--brief and --style {self.style} are two forms of one answer: ask for one")
        if self.json and self.only is not None:
            raise InputError("--json writes the whole answer: leave out --only")
        if self.style in BARE and (self.only or "").casefold() == "findings":
            raise InputError(f"--style {self.style} writes tables, findings are sentences: ask for markdown")
        if self.json and self.style != "terminal":
            raise InputError(f"--json and --style {self.style} are two forms of one answer: ask for one")

    def show(self, *answers: Answer, document: Callable[[], object] | None = None, save: Path | None = None) -> None:
        """Print the answers one below the other; for --json the document instead, which is the first answer unless it
        is given, as text or as a value to encode. Then draw the first answer, where save names a file."""
        if self.brief:
            from stepscope.rendering.brief import render_brief

            parts = answers if self.only is None else tuple(one.part(self.only) for one in answers)
            emit(render_brief(parts[0], as_json=True) if self.json else "\n".join(map(render_brief, parts)))
        elif self.json:
            value = document() if document is not None else encode_answer(answers[0])
            emit(value if isinstance(value, str) else json_line(value))
        else:
            present(*answers, style=self.style, only=self.only)
        if save is not None:
            draw(answers[0], save)

    def name_the_page(self, what: object) -> None:
        """Say how the same is seen as a page, where the answer is read by somebody."""
        if not self.json and self.style == "terminal":
            warn(f"as a page: stepscope report {what}")
