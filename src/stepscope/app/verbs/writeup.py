"""`stepscope writeup`: the questions of an assignment, answered from what was measured on this machine."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from stepscope.app.cli.output import emit
from stepscope.core.errors import EXIT_CHECK_FAILED, EXIT_DONE, EXIT_INTERRUPTED, InputError, choose, warn
from stepscope.core.options import OUTPUT, Argument, Option, verb
from stepscope.core.units import counted

if TYPE_CHECKING:
    from stepscope.rendering.writeup import Measure, Scale, Target, WriteUp


Assignment = Annotated[str, Option("Whose questions are answered.")]
Run = Annotated[bool, Option("Measure what is missing, the cheapest first. Ctrl-C keeps what is there.")]
Sizes = Annotated[str, Option("Sizes of what is measured; small is for a CPU.", choices=("full", "small"))]
Output = Annotated[
    Path,
    Option("The document to write: .md with its plots beside it, or .html.", OUTPUT, metavar="FILE", short="-o"),
]


@verb(
    "writeup",
    "stepscope writeup results/h200 -o writeup.md",
    "stepscope writeup --run --scale small -o writeup.html",
)
def command(
    sweeps: Annotated[
        list[str] | None,
        Argument(
            "Folders of runs, a sweep, a tag, or answers that --json wrote (default: --runs).",
            metavar="[SWEEP]...",
            names_a_run=True,
        ),
    ] = None,
    *,
    assignment: Assignment = "cs336",
    output: Output = Path("writeup.md"),
    run: Run,
    scale: Sizes = "full",
    runs: Path,
) -> int:
    """Answer the questions of an assignment from stored runs; a question without data names its command."""
    from stepscope.rendering.picture import Drawer
    from stepscope.rendering.writeup import SCALES, Material, Target, assignment_named, gather, write_up

    questions = assignment_named(assignment)
    choose(scale, SCALES, "scale")
    size, target = cast("Scale", scale), Target(file=output)

    def written() -> "WriteUp":
        places = list(sweeps or ([str(runs)] if runs.is_dir() else []))
        places += [str(target.store)] if target.store.is_dir() else []
        try:
            material = gather(places, runs)
        except InputError:
            if any(
                not Path(place).is_dir() or any(file.is_file() for file in Path(place).rglob("*")) for place in places
            ):
                raise
            material = Material()  # everything is still to be measured, and the document says how
        drawer = Drawer()  # plots are drawn while the next question is answered
        try:
            document = write_up(questions, material, lambda one: target.ask(one, drawer))
            target.write(document, size, drawer.draw)
        finally:
            drawer.close()
        return document

    document = written()
    for fault in document.faults:
        warn(f"left out: {fault}")
    failed: list[str] = []
    todo = document.missing(target.store) if run else ()
    for place, one in enumerate(todo, 1):
        warn(f"measuring {place} of {len(todo)}: {one.command(size, target.store)}")
        code = _measure(one, size, target)
        if code in (EXIT_INTERRUPTED, -signal.SIGINT):
            document = written()
            _say(document, target, run=run, failed=failed)
            return EXIT_INTERRUPTED
        if code not in (EXIT_DONE, EXIT_CHECK_FAILED):
            failed.append(one.name)
            warn(f"{one.name} could not be measured (exit code {code}): the other questions go on")
        document = written()
    _say(document, target, run=run, failed=failed)
    return EXIT_DONE


def _measure(one: "Measure", scale: "Scale", target: "Target") -> int:
    """Run the command in a process of its own. Returns its exit code; an answer is kept only when it is whole."""
    place = one.place(target.store)
    words = [sys.executable, "-m", "stepscope", *one.words(scale)]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if one.leaves == "runs":
            mark = one.mark(target.store)
            mark.touch()
            code = _waited(subprocess.Popen([*words, "--runs", str(place)], stdout=subprocess.DEVNULL))
            if code not in (EXIT_INTERRUPTED, -signal.SIGINT):
                mark.unlink(missing_ok=True)
            return code
        part = place.with_suffix(".part")
        with part.open("wb") as stream:
            code = _waited(subprocess.Popen([*words, "--json"], stdout=stream))
        if code in (EXIT_DONE, EXIT_CHECK_FAILED):
            part.replace(place)
        else:
            part.unlink()
    except OSError as error:
        raise InputError(f"cannot write {place}: {error.strerror or error}") from error
    return code


def _waited(process: "subprocess.Popen[bytes]") -> int:
    """The exit code; after Ctrl-C that of an interrupt, once the command has put away what it had."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)  # a terminal has told it already, `kill` has not
        process.wait()
        return EXIT_INTERRUPTED


def _say(document: "WriteUp", target: "Target", *, run: bool, failed: list[str]) -> None:
    emit(f"{target.file}: {document.count} of {counted(len(document.answered), 'question')} answered\n")
    if failed:
        warn(f"not measured: {', '.join(failed)}")
    elif document.missing(target.store) and not run:
        warn("the document names a command for each question without data; --run measures them all")
