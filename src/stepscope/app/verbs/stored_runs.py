"""Verbs that read stored runs: `show`, `advise`, `ls`, `table` and `history`. None needs PyTorch."""

import contextlib
import functools
import gc
import sys
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

import msgspec

from stepscope.app.cli.output import Presentation, draw, emit, json_line, present
from stepscope.app.verbs.results import Shown, ShownAnswer, shown_answer
from stepscope.core.answer import TEXT, Table, table_of
from stepscope.core.errors import InputError, StepscopeError, choose, warn
from stepscope.core.files import json_document
from stepscope.core.options import OUTPUT, STORED, Argument, Option, Rule, completed, verb
from stepscope.core.run import Run
from stepscope.core.run_directory import (
    LAST,
    RUN_FILE,
    encode_run,
    find_place,
    find_run,
    find_run_files,
    load_run,
    load_runs,
)
from stepscope.core.samples import Samples

if TYPE_CHECKING:
    from stepscope.app.verbs.memory import Remembered
    from stepscope.app.verbs.trace import Traced
    from stepscope.runs.advice import Advice
    from stepscope.runs.fields import Condition


# One run, as it was reported when it was measured.


T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Measured(Shown):
    """A run and what it says, with its trace and its memory where it recorded them."""

    run: Run
    """What was measured, as run.json holds it: `run.status`, `run.samples`, `run.summary`, `run.findings`."""
    directory: Path
    """The run's directory."""
    answer: ShownAnswer
    """Times by phase, rates, memory, and what to doubt."""

    @property
    def samples(self) -> dict[str, Samples]:
        """Times in seconds by phase, and of the whole `step`: each with `median_s`, `interval()`, `values_s`."""
        return self.run.samples

    @functools.cached_property
    def trace(self) -> "Traced | None":
        """What its trace says; None where it kept none (`record="kineto"`)."""
        kept = any(capture.artifact in ("kineto", "nsys") for capture in self.run.evidence.captures)
        if not kept:
            return None
        from stepscope.app.verbs.trace import trace

        return trace(self.directory)

    @functools.cached_property
    def memory(self) -> "Remembered | None":
        """What its memory snapshot says; None where it kept none (`record="memory"`)."""
        if "memory" not in self.run.artifacts:
            return None
        from stepscope.app.verbs.memory import memory

        return memory(self.directory)

    @property
    def answers(self) -> tuple[ShownAnswer, ...]:
        """The answer on the run, then those on its trace and its memory, where this machine can read them."""
        return (self.answer, *(record.answer for record in records_of(self) if record is not None))


def records_of(run: Measured) -> "tuple[Traced | None, Remembered | None]":
    """What is kept of the run's trace and its memory, as far as this machine can read it; what it cannot is told."""
    return (
        _readable(run, "trace", "trace", lambda: run.trace),
        _readable(run, "memory", "memory snapshot", lambda: run.memory),
    )


def _readable(run: Measured, verb: str, what: str, read: Callable[[], T | None]) -> T | None:
    try:
        return read()
    except ModuleNotFoundError as error:
        warn(f"the {what} is kept, and read where {error.name} is installed: stepscope {verb} {run.directory}")
    except StepscopeError as error:
        warn(f"the {what} is kept, and cannot be read: {error}")
    return None


def measured(run: Run, directory: Path) -> Measured:
    """The run with its answer."""
    from stepscope.runs.answer import answer_run

    return Measured(run, directory, shown_answer(answer_run(run, str(directory))))


def show(name: str | Path = "last", *, runs: str | Path = "runs") -> Measured:
    """A run that is stored, read back from disk, as `stepscope show` shows it.

        stepscope.show()                  # the newest under runs/
        stepscope.show("results/cpu/first").samples["step"].median_s

    name: a run directory, a part of its name, or `last`.
    runs: the folder in which names are looked up.

    Raises InputError where there is no such run, or it cannot be read. Needs no PyTorch.
    """
    run, folder = find_run(str(name), Path(runs)), find_place(str(name), Path(runs))
    inside = folder if (folder / RUN_FILE).is_file() else next(iter(find_run_files(folder)), folder / RUN_FILE).parent
    return measured(run, inside)


Live = Annotated[
    bool,
    Option("Renew the figures of a script that is watched, until it is over; then show the run.", STORED),
]


@verb("show", "stepscope show last", "stepscope show last --live")
def show_command(
    run: Annotated[
        str, Argument("A run directory, a part of its name, `last`, or the name of a set.", names_a_run=True)
    ],
    *,
    live: Live = False,
    runs: Path,
    metrics: Path | None,
    save: Path | None,
    shown: Presentation,
) -> None:
    """Show a run read back from disk, or the runs of one set together.

    With --live: what a script does now that `stepscope watch` runs, in another terminal.
    """
    if live:
        from stepscope.runs.live import LIVE_FILE

        # The last script that is watched: of its ranks, which have a run each, the first writes its figures.
        watched = [file.parent for file in find_run_files(runs) if (file.parent / LIVE_FILE).exists()]
        folder = max(watched, key=lambda each: each.name) if run == LAST and watched else find_place(run, runs)
        run = str(folder)
        _follow(folder if folder.is_dir() else folder.parent, shown)
        if shown.json:
            return
    try:
        stored = find_run(run, runs)
    except InputError:
        from stepscope.runs.run_sets import answer_set, sets_of

        sets = sets_of(load_runs([runs])[0]) if runs.is_dir() else []
        named = [one for one in sets if one.runs[0].repeat is not None and run in one.name]
        if len(named) != 1:
            raise
        if metrics is not None:
            from stepscope.runs.metrics import write_metrics

            write_metrics(named[0].runs, metrics)
        answer = answer_set(named[0], str(runs))
        shown.show(answer, document=lambda: json_document(named[0].document), save=save)
    else:
        from stepscope.runs.answer import answer_run

        if metrics is not None:
            from stepscope.runs.metrics import write_metrics

            write_metrics([stored], metrics)
        shown.show(answer_run(stored), document=lambda: encode_run(stored).decode(), save=save)


_LOOK_EVERY_S, _LINE_EVERY_S = 0.5, 30.0


def _follow(folder: Path, shown: Presentation) -> None:
    """Show a watched script's figures as they come, until no more will: a table that is renewed on a terminal, a line
    each half minute elsewhere, and a document each time for --json."""
    from stepscope.runs.live import is_late, is_over, live_line, named_figures, read_live

    figures = read_live(folder)
    if figures is None:
        load_run(folder)
        warn("no live figures are kept of this run, as `stepscope watch` writes them: this is what is stored")
        return
    with contextlib.ExitStack() as screen:
        renew: Callable[[Table, str | None], None] | None = None
        written, line_s = "", -_LINE_EVERY_S
        while is_over(figures) is None:
            if shown.json:
                if figures.written != written:
                    emit(json_line(figures))
            elif sys.stdout.isatty():
                renew = renew or screen.enter_context(_renewed())
                renew(
                    table_of("figure", ("now", TEXT), rows=named_figures(figures), title=figures.run), is_late(figures)
                )
            elif time.monotonic() - line_s >= _LINE_EVERY_S:
                line_s, late = time.monotonic(), is_late(figures)
                emit(f"{live_line(figures)}{f'; {late}' if late else ''}\n")
            written = figures.written
            time.sleep(_LOOK_EVERY_S)
            figures = read_live(folder) or figures
    if shown.json:
        emit(json_line(figures))
    warn(f"{is_over(figures)}: this is what is stored")


@contextlib.contextmanager
def _renewed() -> Generator[Callable[[Table, str | None], None]]:
    """A function that shows a table in place of the one before, and a sentence below it."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from stepscope.rendering.terminal import CleanConsole, make_table

    with Live(console=CleanConsole(), transient=True, auto_refresh=False) as screen:

        def renew(table: Table, below: str | None) -> None:
            screen.update(Group(Text(table.title), make_table(table), Text(below or "")), refresh=True)

        yield renew


# `stepscope advise`: what to change in the script that a run watched.


@dataclass(frozen=True, repr=False)
class Advised(Shown):
    """What to write in a watched script, and what that should save."""

    advice: "tuple[Advice, ...]"
    """By expected gain: each with `kind`, `where`, `put`, `low` and `high` as shares of a step, and `how`."""
    answer: ShownAnswer
    """What the terminal shows, as tables and sentences."""

    @property
    def patch(self) -> str:
        """All of it that can be written as one unified diff; empty where nothing can."""
        from stepscope.runs.advice import patch

        return patch(self.advice)[0]


def advise(name: str | Path = "last", *, runs: str | Path = "runs") -> Advised:
    """What to change in the script that a run watched: lines, what to write there, and what that should save.

        for one in stepscope.advise("last").advice:
            print(one.where, one.put, one.low, one.high)

    name: a run directory, a part of its name, or `last`.
    runs: the folder in which names are looked up.

    Raises InputError where there is no such run, or it watched no script. Needs no PyTorch.
    """
    from stepscope.runs.advice import advice_on, answer_advice

    stored = show(name, runs=runs)
    advice, script = advice_on(stored.run, stored.directory)
    return Advised(tuple(advice), shown_answer(answer_advice(stored.run, advice, script)))


@verb(
    "advise",
    "stepscope advise last",
    "stepscope advise last --patch --kind waiting-for-data",
    conflicts=(
        Rule("needs", ("--to", "--patch"), "--to says where the diff is written: say --patch, too"),
        Rule("conflict", ("--patch", "--json"), "--patch writes a diff, and --json the advice: ask for one"),
    ),
)
def advise_command(
    run: Annotated[str, Argument("A run directory, a part of its name, or `last`.", names_a_run=True)],
    *,
    patch: Annotated[bool, Option("Write a diff for `git apply` or `patch -p1`.", OUTPUT)] = False,
    to: Annotated[Path | None, Option("Write the diff into this file.", OUTPUT, metavar="FILE")],
    kind: Annotated[tuple[str, ...], Option("Only advice of these kinds.")] = (),
    runs: Path,
    shown: Presentation,
) -> None:
    """Say what to change in a watched script: the line, what to write there, and what that should save."""
    from stepscope.runs import advice as made

    stored = show(run, runs=runs)
    advice, script = made.advice_on(stored.run, stored.directory)
    if unknown := sorted({*kind} - {one.kind for one in advice}):
        there = ", ".join(one.kind for one in advice) or "none"
        raise InputError(f"no advice of kind {unknown[0]} on this run: there is {there}")
    advice = [one for one in advice if not kind or one.kind in kind]
    if not patch:
        document = {"run": stored.run.id, "changed": script.changed, "advice": [one.document for one in advice]}
        shown.show(made.answer_advice(stored.run, advice, script), document=lambda: json_document(document))
        return
    if script.changed:
        raise InputError(f"no diff: {'; '.join(script.changed)}; watch it again")
    diff, left = made.patch(advice)
    for sentence in left:
        warn(sentence)
    if not diff:
        warn("no diff: nothing that can be written as one")
    elif to is None:
        emit(diff)
    else:
        try:
            to.write_text(diff)
        except OSError as error:
            raise InputError(f"cannot write {to}: {error.strerror or error}") from error
        warn(f"written to {to}: git apply {to}")


# The runs of some places for the verbs that list many, with what must be said of them on stderr.


_QUIET_S = 2.0
"""Reading runs that takes longer says how far it is."""


def listed_runs(places: list[Path] | None, runs: Path, *, summaries: bool = False) -> list[Run]:
    """The readable runs of these places, oldest first; those left out, and why, are told on stderr.

    runs: the folder that is read where no place is named, and in which `last` is the run that began latest.
    """
    places = [find_place(LAST, runs) if str(place) == LAST else place for place in places or [runs]]
    last_s = time.monotonic()

    def tell(done: int, of: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > _QUIET_S:
            last_s = time.monotonic()
            warn(f"reading runs: {done:,} of {of:,}")

    # Runs stay until the command ends: Python's collector would walk through thousands of them again and again.
    gc.disable()
    from stepscope.runs.index import list_runs

    try:
        listing = list_runs(places, tell, summaries=summaries)
    finally:
        gc.freeze()
        gc.enable()
    for fault in listing.faults:
        warn(f"left out: {fault}")
    for note in listing.notes:
        warn(note)
    return listing.runs


Tagged = Annotated[str | None, Option("Only runs with this tag.", STORED)]


Places = Annotated[
    list[Path] | None, Argument("Run directories, folders of them, or `last` (default: --runs).", "[RUNS]...")
]


@verb("ls", "stepscope ls", "stepscope ls results/h200/plain --tag plain")
def ls(
    places: Places = None,
    *,
    tag: Tagged,
    runs: Path,
    shown: Presentation,
) -> None:
    """List runs, oldest first."""
    everything = listed_runs(places, runs, summaries=shown.json)
    kept = [run for run in everything if tag is None or run.tag == tag]
    if not kept and shown == Presentation():
        emit("no runs\n")
        return

    def listed() -> list[dict[str, object]]:
        return [
            {
                "id": r.id,
                "created": r.created,
                "tag": r.tag,
                "status": r.status,
                "summary": r.summary,
                "findings": [{"kind": f.kind, "severity": f.severity} for f in r.findings],
            }
            for r in kept
        ]

    from stepscope.runs.answer import answer_list

    shown.show(answer_list(kept), document=listed)


# `stepscope table`: any set of runs, arranged.


Rows = Annotated[str, Option("Fields of the rows.")]
Columns = Annotated[str, Option("Fields of the columns.")]
Value = Annotated[str, Option("Figures, as in forward,backward.")]
Stat = Annotated[
    str,
    Option(
        "median, median-interval, mean-std, p95 or p99, for times.",
        complete=completed("median", "median-interval", "mean-std", "p95", "p99"),
    ),
]
Speedup = Annotated[str | None, Option("A column's label: show speed-ups over it.")]


@verb(
    "table",
    "stepscope table --tag first --columns dtype --value forward --speedup fp32",
    "stepscope table runs --where model=small --rows seq_len --value step,peak_memory --style markdown",
)
def table(
    places: Places = None,
    *,
    rows: Rows = "model,seq_len",
    columns: Columns = "",
    value: Value = "step",
    stat: Stat = "median",
    speedup: Speedup,
    where: tuple[str, ...] = (),
    tag: Tagged,
    runs: Path,
    style: str,
    brief: bool = False,
    save: Path | None,
) -> None:
    """Tables of runs: terminal, Markdown, CSV or JSON lines; and as a plot."""
    from stepscope.rendering.renderers import BARE, STYLES
    from stepscope.runs.tables import Statistic, TableQuery, answer_table

    choose(style, STYLES, "style")
    conditions = conditions_of(where, tag)
    query = TableQuery(
        rows=_names(rows),
        columns=_names(columns),
        values=_names(value),
        statistic=cast("Statistic", stat),
        speedup=speedup,
        where=tuple(conditions),
    )
    listed = listed_runs(places, runs)
    answer = answer_table(listed, query, bare=style in BARE)
    if save is not None:
        from stepscope.runs.tables import table_panels

        answer = msgspec.structs.replace(answer, panels=table_panels(listed, query))
    if brief:
        Presentation(style=style, brief=True).show(answer)
    else:
        present(answer, style=style)
    if save is not None:
        draw(answer, save)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def conditions_of(where: Iterable[str], tag: str | None = None) -> "list[Condition]":
    """The conditions of every --where, and of --tag."""
    from stepscope.runs.fields import conditions_in

    conditions = [condition for text in where for condition in conditions_in(text)]
    return [*conditions, *([("tag", (tag,))] if tag is not None else [])]


# `stepscope history`: how the time of a step changed over stored runs, and whether forecasts came true.


Workload = Annotated[str | None, Option("Only trends whose key has this in it, with every run.", STORED, metavar="KEY")]
Predictions = Annotated[bool, Option("Show forecasts beside what was measured afterwards.", STORED)]


@verb(
    "history",
    "stepscope history results/h200 --where dtype=bf16",
    "stepscope history --workload tiny-b4 --json",
    conflicts=(
        Rule(
            "alone",
            ("--predictions",),
            "--predictions shows all forecasts of these places: leave out the other choices",
            ("--workload", "--where", "--tag", "--save"),
        ),
        Rule("needs", ("--save", "--workload"), "--save draws one trend: name it with --workload"),
    ),
)
def history(
    places: Places = None,
    *,
    workload: Workload,
    predictions: Predictions,
    where: tuple[str, ...] = (),
    tag: Tagged,
    runs: Path,
    shown: Presentation,
    save: Path | None,
) -> None:
    """Trends of stored runs by workload, with changes of level dated by commit."""
    folders = places or [runs]
    if predictions:
        _show_predictions(folders, shown)
        return
    from stepscope.runs.fields import in_words, meeting
    from stepscope.runs.history import History, answer_history, answer_trend, trends_of

    conditions = conditions_of(where, tag)
    listed = listed_runs(places, runs)
    kept, nowhere = meeting(listed, conditions)
    if not kept:
        where_words = f" with {in_words(conditions)}" if listed and conditions else ""
        raise InputError(f"no runs in {', '.join(map(str, folders))}{where_words}")
    for sentence in nowhere:
        warn(sentence)
    trends = trends_of(kept)
    if workload is None:
        shown.show(answer_history(trends), document=lambda: History(trends=[trend.document for trend in trends]))
        return
    chosen = [trend for trend in trends if workload in trend.key]
    if not chosen:
        raise InputError(f"no workload here has {workload!r} in its key: `stepscope history` lists them")
    if save is not None and len(chosen) > 1:
        raise InputError(f"{len(chosen)} trends match --workload {workload}: write more of the key, or add --where")
    answers = [answer_trend(trend) for trend in chosen]
    shown.show(*answers, document=lambda: History(trends=[trend.document for trend in chosen]), save=save)


def _show_predictions(folders: list[Path], shown: Presentation) -> None:
    """Every forecast that these places keep, beside what was measured."""
    from stepscope.runs.history import Forecasts, JudgedForecast, answer_predictions, judged_in

    judged: list[JudgedForecast] = []
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"no runs at {folder}: it is no folder")
        predictions, faults = judged_in(folder)
        judged += predictions
        for fault in faults:
            warn(fault)
    if not judged:
        raise InputError(f"no forecasts in {', '.join(map(str, folders))}: `stepscope fit` and `sweep` leave them")
    shown.show(answer_predictions(judged), document=lambda: Forecasts.of(judged))
