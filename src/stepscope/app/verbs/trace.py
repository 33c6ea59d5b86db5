"""`trace`: where the time of a captured step went, whichever profiler captured it. Needs no PyTorch."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec.structs import replace

from stepscope.app.cli.output import Presentation, exit_code_of, progress, told_where_long
from stepscope.app.verbs.results import Shown, ShownAnswer, shown_answer
from stepscope.core.answer import Answer, Finding, name_of
from stepscope.core.environment import give_pages_back, without_collector
from stepscope.core.errors import EXIT_DONE, EXIT_WRONG_INPUT, InputError, StepscopeError, warn
from stepscope.core.options import OUTPUT, Option, Rule, completed, file_or_run, verb
from stepscope.core.range_names import PHASES
from stepscope.core.run_directory import find_place
from stepscope.core.units import Window, parse_window

if TYPE_CHECKING:
    from stepscope.traces.captures.summary import TraceSummary
    from stepscope.traces.ranks import Job
    from stepscope.traces.ranks import Rank as RankRead


@dataclass(frozen=True, repr=False)
class Traced(Shown):
    """A captured step, explained: where its time went, what bounded it, and when the device stood idle."""

    path: Path
    """The capture, or the run directory that holds it."""
    summary: "TraceSummary"
    """Its tables, as polars frames: `summary.phases`, `summary.families`, `summary.modules` and others."""
    findings: tuple[Finding, ...]
    """What to doubt, and what costs time, the gravest first."""
    answer: ShownAnswer
    """Time by phase, family, kernel and module, bounds, idle time, and the findings."""


def trace(
    path: str | Path = "last",
    *,
    range: str | None = None,
    phase: str | None = None,
    step: int | None = None,
    ranges: bool = True,
    runs: str | Path = "runs",
) -> Traced:
    """Where the time of a captured step went: by phase, family, kernel and module, every nanosecond accounted for.

        found = stepscope.trace("trace.json.gz")
        found                              # in a notebook: tables and findings
        found.answer.table("module")       # one of them
        found.summary.families             # a polars frame

    path: a trace of torch.profiler (.json, .json.gz), an nsys report or export, a run directory, a part of a run's
    name, or `last`.
    range: only what was launched inside ranges of this name.
    phase: only what was launched in this phase (`forward`, `backward`, `optimizer`).
    step: only what was launched in this step; the first is 0.
    ranges: has no effect. A capture without ranges is read in any case.
    runs: the folder in which names are looked up.

    Times are in nanoseconds in frames, and with their unit where shown.

    Raises InputError, with what is there, where there is no such file, range, phase or step, or the file is damaged.
    Needs no PyTorch.
    """
    place = find_place(str(path), Path(runs))
    whole = load_summary(place)
    from stepscope.traces.captures.answer import answer_trace
    from stepscope.traces.captures.checks import check_trace
    from stepscope.traces.captures.part import part_of

    findings = check_trace(whole)
    is_part = (range, phase, step) != (None, None, None)
    summary = part_of(whole, str(place), step=step, phase=phase, name=range) if is_part else whole
    return Traced(place, summary, findings, shown_answer(answer_trace(summary, findings, str(place))))


def load_summary(path: Path, *, launch_sizes: bool = True) -> "TraceSummary":
    """Read and attribute a capture, with the run it belongs to where one lies beside it.

    launch_sizes: whether the grid, block and registers of kernels are needed.
    """
    give_pages_back()  # before polars is imported
    from stepscope.traces.captures.digest import load_capture

    return load_capture(path, say=warn, launch_sizes=launch_sizes)


Between = Annotated[
    Window | None,
    Option(
        "Only work that starts in this window from the first event, as in 12ms:20ms.",
        takes=parse_window,
        metavar="T0:T1",
    ),
]
Module = Annotated[
    str | None,
    Option("Only this module and those inside it, as in layers.0, or layers.*.mlp for all.", metavar="NAME"),
]
Device = Annotated[int | None, Option("Only this device, by its number.", least=0)]
Stream = Annotated[int | None, Option("Only this stream, by its number.", least=0)]
Range = Annotated[str | None, Option("Only what was launched inside ranges of this name.", metavar="NAME")]
Phase = Annotated[str | None, Option("Only this phase.", choices=PHASES)]
Step = Annotated[int | None, Option("Only this step; the first is 0.", least=0)]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Options that choose a part of a capture."""

    range_: Range
    phase: Phase
    step: Step
    module: Module
    device: Device
    stream: Stream
    between: Between

    @property
    def is_part(self) -> bool:
        """Whether any of them is given."""
        return any(getattr(self, field.name) is not None for field in fields(self))

    def part(self, whole: "TraceSummary", file: Path) -> "TraceSummary":
        """The part of a capture that they choose; the capture itself where none is given."""
        if not self.is_part:
            return whole
        from stepscope.traces.captures.part import part_of

        chosen = {field.name.rstrip("_"): getattr(self, field.name) for field in fields(self)}
        return part_of(whole, str(file), name=chosen.pop("range"), **chosen)


Against = Annotated[Path | None, Option("Another capture: what changed from it to this one.")]
GraphCapture = Annotated[
    Path | None,
    Option(
        'A trace of the steps in which CUDA graphs were captured: `--only "graph nodes"` then tells each kernel\'s '
        "operator and module.",
        metavar="FILE",
    ),
]
Top = Annotated[
    int | None,
    Option(
        "How many rows the tables of details have: 5, or all of those that --only names. With --json: adds trees of "
        "so many nodes.",
        least=1,
    ),
]
Sort = Annotated[
    str | None, Option("The column by which the tables of details are ordered, as in calls.", metavar="COLUMN")
]
Rank = Annotated[int | None, Option("Of several captures, only that of this rank.", least=0)]
On = Annotated[
    str | None,
    Option(
        "Read the ranks of a folder where they lie, on the nodes of a Ray cluster: ray://HOST, or auto for the one "
        "that this machine is in, or else one that is started here.",
        metavar="ray://HOST|auto",
        complete=completed("auto", "ray://"),
    ),
]
NoRanges = Annotated[bool, Option("Needed no more: a capture without ranges is read in any case.")]
Cut = Annotated[
    Path | None,
    Option(
        "Write what is asked for as a smaller trace of torch.profiler's format (.json, .json.gz).",
        OUTPUT,
        metavar="FILE",
    ),
]
Perfetto = Annotated[
    Path | None,
    Option("Write a trace for Perfetto, with phases, families and counters as tracks.", OUTPUT, metavar="FILE"),
]


_COMPARED = "--against compares two"
_OF_A_PART = ("--range", "--phase", "--step", "--module", "--device", "--stream", "--between")


@verb(
    "trace",
    "stepscope trace runs/small-b4-s512-fp32-train-4f2c --range softmax --phase forward",
    "stepscope trace rank0.json.gz rank1.json.gz",
    conflicts=(
        Rule("conflict", ("--cut", "--against"), f"--cut writes one capture, {_COMPARED}: ask for one after the other"),
        Rule("conflict", ("--save", "--against"), f"--save draws one capture, {_COMPARED}: leave one of them out"),
        Rule(
            "conflict",
            ("--perfetto", "--against"),
            f"--perfetto shows one whole capture, {_COMPARED}: ask for one after the other",
        ),
        Rule(
            "alone",
            ("--perfetto",),
            "--perfetto shows one whole capture, other options show a part: ask for one after the other",
            _OF_A_PART,
        ),
        Rule(
            "alone",
            ("--on",),
            "--on reads whole ranks where they lie, and not {}: look at one capture on the machine that has it",
            (*_OF_A_PART, "--rank", "--top", "--sort", "--graph-capture", "--against", "--cut", "--perfetto"),
        ),
    ),
)
@without_collector()
def command(
    file: Annotated[
        list[str],
        file_or_run(
            "A trace of torch.profiler (.json, .json.gz), an nsys report or export; several, or a folder of them, are "
            "the ranks of one job"
        ),
    ],
    *,
    on: On,
    against: Against,
    selection: Selection,
    rank: Rank,
    top: Top,
    sort: Sort,
    graph_capture: GraphCapture,
    cut: Cut,
    no_ranges: NoRanges = False,
    perfetto: Perfetto,
    runs: Path,
    save: Path | None,
    shown: Presentation,
) -> int:
    """Where the time of a captured step went: by phase, family, kernel and module, every nanosecond accounted for."""
    del no_ranges  # captures without ranges are read in any case
    if on is not None:
        if len(file) > 1:
            raise InputError(f"--on reads one folder, and these are {len(file)}: name one that holds the captures")
        return _show_job(_job_of([], on, file[0]), file[0], [], None, save, shown)
    captures = _captures_named(file, runs)
    if len(captures) > 1 and rank is None:
        of_one = {"--cut": cut, "--top": top, "--sort": sort, "--graph-capture": graph_capture}
        named = [option for option, value in of_one.items() if value is not None]
        if named or selection.is_part:
            words = named[0] if named else "what chooses a part"
            raise InputError(
                f"{words} is for one capture, and these are {len(captures)}: choose one with --rank, or name one file"
            )
        if against is not None:
            return _compare_jobs(against, captures, shown)
        return _show_job(_job_of(captures), _folder_of(captures), captures, perfetto, save, shown)
    place = captures[0] if rank is None else _capture_of_rank(captures, rank)
    unseen = not shown.json and cut is None and perfetto is None and not _names_kernel_times(shown.only)
    with told_where_long(f"reading {place}"):
        summary = load_summary(place, launch_sizes=not unseen)
    part = selection.part(summary, place)
    if against is not None:
        with told_where_long(f"reading {against}"):
            before = load_summary(against)
        _compare(selection.part(before, against), part, against, place, shown)
        return EXIT_DONE
    from stepscope.traces.captures.answer import answer_trace, trace_as_json
    from stepscope.traces.captures.checks import check_trace
    from stepscope.traces.captures.details import View, captured_graphs
    from stepscope.traces.captures.digest import read_trace

    findings = check_trace(summary)
    if perfetto is not None:
        _write_perfetto([("", summary, 0)], perfetto, [place])
    captures = captured_graphs(read_trace(graph_capture)) if graph_capture is not None else ()
    if graph_capture is not None and not captures:
        raise InputError(f"--graph-capture {graph_capture}: no CUDA graph is captured in this trace")
    alone = bool(shown.only) and save is None
    view = View(only=shown.only, top=top, sort=sort, captures=captures, alone=alone)
    if cut is not None:
        from stepscope.rendering.chrome_trace import write_cut

        warn(f"{write_cut(part.attribution, cut, source=place)} rows of work in {cut}")

    def document() -> dict[str, Any]:
        return trace_as_json(part, findings, view)

    # The tables of an answer take as long as the figures; for --json alone only --sort needs them, to be checked.
    if shown.json and not shown.brief and save is None and sort is None:
        shown.show(document=document)
    else:
        answer = answer_trace(part, findings, str(place), view)
        if alone and not answer.has(shown.only or ""):
            answer = answer_trace(part, findings, str(place), replace(view, alone=False))
        _check_only(answer, shown.only)
        shown.show(answer, document=document, save=save)
    return exit_code_of(findings)


def _names_kernel_times(only: str | None) -> bool:
    """Whether --only names the table of kernels' durations, which alone says how they were launched."""
    from stepscope.traces.captures.details import KERNEL_TIMES

    return bool(only) and only.casefold() in KERNEL_TIMES


def _write_perfetto(captures: Sequence[tuple[str, "TraceSummary", int]], out: Path, sources: Sequence[Path]) -> None:
    """Write captures, each with its label and its clock's offset in nanoseconds, into one file for Perfetto."""
    from stepscope.rendering.chrome_trace import Rank, write_perfetto

    ranks = [
        Rank(label, summary.attribution, summary.occupation.gaps if summary.occupation else None, offset_ns)
        for label, summary, offset_ns in captures
    ]
    written = write_perfetto(ranks, out, sources=sources)
    warn(f"{written} slices in {out}: open it at https://ui.perfetto.dev")


def _check_only(answer: Answer, only: str | None) -> None:
    """Raise InputError where --only names no table, with the names of those that are made when they are asked for."""
    if only is None or answer.has(only):
        return
    from stepscope.traces.captures.details import detail_heads

    if any(only.casefold() in head for head in detail_heads()):
        raise InputError(f"--only {only!r}: this capture, or this part of it, has nothing for such a table")
    titles = ", ".join(dict.fromkeys(repr(name) for name in (*map(name_of, answer.tables), *detail_heads()) if name))
    raise InputError(f"--only {only!r} names no table: there are {titles}, and findings")


def _compare(before: "TraceSummary", after: "TraceSummary", old: Path, new: Path, shown: Presentation) -> None:
    from stepscope.questions.compare_captures import answer_captures, compare_captures, comparison_as_json
    from stepscope.traces.captures.answer import part_as_json

    comparison, part = compare_captures(before.attribution, after.attribution), after.part
    shown.show(
        answer_captures(comparison, str(old), str(new), part.words if part else ""),
        document=lambda: {**comparison_as_json(comparison), **(part_as_json(part) if part else {})},
    )


# Captures of several ranks.


def _captures_named(names: Sequence[str], runs: Path) -> list[Path]:
    """The captures that these names give: files and runs are one each, and a folder is all that it holds."""
    give_pages_back()  # before polars is imported
    captures: list[Path] = []
    for name in names:
        place = find_place(name, runs)
        captures += _captures_in(place) or [place]
    files = [path.resolve() for path in captures]
    twice = next((path for place, path in enumerate(captures) if files[place] in files[:place]), None)
    if twice is not None:
        raise InputError(f"{twice} is named twice: name each capture once")
    return captures


def _captures_in(place: Path) -> list[Path]:
    """The captures that a folder holds; empty for a file. A file alone needs nothing of what compares ranks."""
    if not place.is_dir():
        return []
    from stepscope.traces.ranks import captures_in

    return captures_in(place)


def _folder_of(captures: list[Path]) -> str:
    """The one folder that holds all of them, or how many they are."""
    folders = {path.parent for path in captures}
    return str(folders.pop()) if len(folders) == 1 else f"{len(captures)} captures"


def _job_of(captures: list[Path], on: str | None = None, folder: str = "") -> tuple["Job", int]:
    """The job whose ranks have these captures, or those in a folder on the nodes of a cluster, read with progress, and
    the exit code: that of wrong input where one cannot be read, and is left out. After an interrupt it is the job of
    those that were read."""
    from stepscope.engine.request import Stage
    from stepscope.traces.ranks import job_of, read_ranks

    total = len(captures)
    lines: list[str] = []
    ranks: list[RankRead] = []
    faults: list[StepscopeError] = []
    try:
        with contextlib.ExitStack() as stack:
            tell = stack.enter_context(progress())
            if on is None:
                replies = stack.enter_context(contextlib.closing(read_ranks(captures)))
            else:
                from stepscope.engine.cluster import ranks_on

                tell(Stage(name="connecting", detail=f"to Ray ({on})"))
                total, replies = stack.enter_context(ranks_on(on, folder))
            tell(Stage(name="reading ranks", detail=f"0 of {total}", fraction=0))
            for done, (said, rank) in enumerate(replies, 1):
                lines += said
                if isinstance(rank, StepscopeError):
                    faults.append(rank)
                else:
                    ranks.append(rank)
                tell(Stage(name="reading ranks", detail=f"{done} of {total}", fraction=done / total))
    except KeyboardInterrupt:
        if len(ranks) < 2:
            raise
        lines.append(f"interrupted: {len(ranks)} of {total} ranks were read, the others are left out")
    if faults and len(ranks) < 2:
        raise faults[0]
    for line in (*lines, *(f"left out: {fault}" for fault in faults)):
        warn(line)
    return job_of(ranks), EXIT_WRONG_INPUT if faults else EXIT_DONE


def _show_job(
    read: tuple["Job", int],
    folder: str,
    captures: list[Path],
    perfetto: Path | None,
    save: Path | None,
    shown: Presentation,
) -> int:
    """Show the ranks of a job that was read. Returns the exit code."""
    from stepscope.traces.ranks_answer import answer_job, check_job, job_as_json

    job, code = read
    findings = check_job(job)
    if perfetto is not None:  # on the clock of the first rank
        offsets = {clock.rank: clock.offset_ns for clock in job.matched.clocks}
        ranks = [(f"rank {one.number}", load_summary(Path(one.source)), offsets[one.number]) for one in job.ranks]
        _write_perfetto(ranks, perfetto, captures)
    answer = answer_job(job, findings, folder)
    shown.show(answer, document=lambda: job_as_json(job, findings), save=save)
    return code or exit_code_of(findings)


def _compare_jobs(before: Path, captures: list[Path], shown: Presentation) -> int:
    """Show what changed in a job, rank by rank. Raises InputError where the other capture is of one rank alone."""
    from stepscope.traces.ranks import captures_in
    from stepscope.traces.ranks_answer import answer_jobs, jobs_as_json

    earlier = captures_in(before)
    if len(earlier) < 2:
        raise InputError(
            f"--against {before} is one capture, and the others are {len(captures)}: name a folder of the same ranks, "
            "or choose one with --rank"
        )
    (old, code), (new, code_too) = _job_of(earlier), _job_of(captures)
    shown.show(answer_jobs(old, new, str(before), _folder_of(captures)), document=lambda: jobs_as_json(old, new))
    return code or code_too


def _capture_of_rank(captures: list[Path], rank: int) -> Path:
    """The capture of one rank of a job. Raises InputError where none is of it.

    The one that is by its name or place is read first; where it says that it is another's, all are.
    """
    from stepscope.traces.ranks import is_of_rank, likely_rank

    likely = [path for place, path in enumerate(captures) if likely_rank(path, place) == rank]
    if len(likely) == 1 and is_of_rank(likely[0], rank):
        return likely[0]
    job, _ = _job_of(captures)
    source = next((one.source for one in job.ranks if one.number == rank), None)
    if source is None:
        numbers = ", ".join(str(one.number) for one in job.ranks)
        raise InputError(f"none of these captures is of rank {rank}: choose one of {numbers}")
    return Path(source)
