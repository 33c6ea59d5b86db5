"""`stepscope trace`: what a capture says, whichever profiler made it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stepscope.app.cli.output import Presentation, draw, json_line, warn
from stepscope.core.answer import Answer, Finding, name_of, worst
from stepscope.core.environment import give_pages_back
from stepscope.core.errors import EXIT_CHECK_FAILED, EXIT_DONE, InputError
from stepscope.core.options import OUTPUT, Conflict, Option, file_or_run, verb
from stepscope.core.range_names import PHASES as CAPTURED_PHASES
from stepscope.core.run_directory import find_place
from stepscope.core.units import Window, parse_window

if TYPE_CHECKING:
    from stepscope.traces.captures.detail_tables import View
    from stepscope.traces.captures.summary import TraceSummary
    from stepscope.traces.ranks import Job

# `stepscope trace` of several ranks' captures.


def captures_of(names: Sequence[str], runs: Path) -> list[Path]:
    """The captures that these names give: files and runs are one each, and a folder is all that it holds."""
    give_pages_back()  # before polars is imported
    from stepscope.traces.ranks import captures_in

    found: list[Path] = []
    for name in names:
        place = find_place(name, runs)
        found += captures_in(place) or [place]
    files = [path.resolve() for path in found]
    twice = next((path for place, path in enumerate(found) if files[place] in files[:place]), None)
    if twice is not None:
        raise InputError(f"{twice} is named twice: name each capture once")
    return found


def show_job(captures: list[Path], *, perfetto: Path | None, save: Path | None, shown: Presentation) -> str | None:
    """Show the ranks of a job. Returns the severity of the worst finding."""
    from stepscope.traces.ranks import load_job
    from stepscope.traces.ranks_answer import answer_job, check_job, job_as_json

    job = load_job(captures, say=warn)
    findings = check_job(job)
    if perfetto is not None:
        _export(job, captures, perfetto)
    folders = {path.parent for path in captures}
    answer = answer_job(job, findings, str(folders.pop()) if len(folders) == 1 else f"{len(captures)} captures")
    shown.show(answer, document=lambda: json_line(job_as_json(job, findings)))
    draw(answer, save)
    return worst(findings)


def compare_jobs(before: Path, captures: list[Path], shown: Presentation) -> None:
    """Show what changed in a job, rank by rank. Raises InputError where the other capture is of one rank alone."""
    from stepscope.traces.ranks import captures_in, load_job
    from stepscope.traces.ranks_answer import answer_jobs, jobs_as_json

    earlier = captures_in(before)
    if len(earlier) < 2:
        raise InputError(
            f"--against {before} is one capture, and the others are {len(captures)}: name a folder of the same ranks, "
            "or choose one with --rank"
        )
    old, new = load_job(earlier, say=warn), load_job(captures, say=warn)
    folders = {path.parent for path in captures}
    name = str(folders.pop()) if len(folders) == 1 else f"{len(captures)} captures"
    shown.show(answer_jobs(old, new, str(before), name), document=lambda: json_line(jobs_as_json(old, new)))


def capture_of_rank(captures: list[Path], rank: int) -> Path:
    """The capture of one rank of a job. Raises InputError where none is of it."""
    from stepscope.traces.ranks import load_job

    job = load_job(captures, say=warn)
    found = next((one.source for one in job.ranks if one.number == rank), None)
    if found is None:
        numbers = ", ".join(str(one.number) for one in job.ranks)
        raise InputError(f"none of these captures is of rank {rank}: choose one of {numbers}")
    return Path(found)


def _export(job: "Job", captures: list[Path], out: Path) -> None:
    """Write all ranks into one file for Perfetto, on the clock of the first."""
    from stepscope.rendering.chrome_trace import Rank, write_perfetto
    from stepscope.traces.captures.digest import find_capture, load_capture

    offsets = {clock.rank: clock.offset_ns for clock in job.matched.clocks}
    ranks: list[Rank] = []
    for one in job.ranks:
        summary = load_capture(Path(one.source), say=warn)
        gaps = summary.occupation.gaps if summary.occupation else None
        ranks.append(Rank(f"rank {one.number}", summary.attribution, gaps, offset_ns=offsets[one.number]))
    written = write_perfetto(ranks, out, sources=[find_capture(path) for path in captures])
    warn(f"{written} slices in {out}: open it at https://ui.perfetto.dev")


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
Phase = Annotated[str | None, Option("Only this phase.", choices=CAPTURED_PHASES)]
Step = Annotated[int | None, Option("Only this step; the first is 0.", least=0)]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What --range, --phase, --step, --module, --device, --stream and --between say."""

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


_TWO = "--against compares two"


@verb(
    "trace",
    "stepscope trace runs/small-b4-s512-fp32-train-4f2c --range softmax --phase forward",
    "stepscope trace rank0.json.gz rank1.json.gz",
    conflicts=(
        Conflict("--cut", "--against", why=f"--cut writes one capture, {_TWO}: ask for one after the other"),
        Conflict("--save", "--against", why=f"--save draws one capture, {_TWO}: leave one of them out"),
    ),
)
def trace(
    file: Annotated[
        list[str],
        file_or_run(
            "A trace of torch.profiler (.json, .json.gz), an nsys report or export; several, or a folder of them, are "
            "the ranks of one job"
        ),
    ],
    *,
    against: Against,
    asked_for: Selection,
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
    is_part = asked_for.is_part
    if perfetto is not None and (against is not None or is_part):
        other = "--against compares two" if against is not None else "other options show a part"
        raise InputError(f"--perfetto shows one whole capture, {other}: ask for one after the other")
    if save is not None:
        from stepscope.rendering.plots import check_target

        check_target(save)
    del no_ranges  # captures without ranges are read in any case
    captures = captures_of(file, runs)
    if len(captures) > 1 and rank is None:
        of_one = {"--cut": cut, "--top": top, "--sort": sort, "--graph-capture": graph_capture}
        given = [option for option, value in of_one.items() if value is not None]
        if given or is_part:
            words = given[0] if given else "what chooses a part"
            raise InputError(
                f"{words} is for one capture, and these are {len(captures)}: choose one with --rank, or name one file"
            )
        if against is not None:
            compare_jobs(against, captures, shown)
            return EXIT_DONE
        return _exit_code(show_job(captures, perfetto=perfetto, save=save, shown=shown))
    place = captures[0] if rank is None else capture_of_rank(captures, rank)
    summary = load_summary(place)
    asked = _part(summary, place, asked_for) if is_part else summary
    if against is not None:
        before = load_summary(against)
        _compare(_part(before, against, asked_for) if is_part else before, asked, against, place, shown)
        return EXIT_DONE
    from stepscope.traces.captures.checks import check_trace

    findings = check_trace(summary)
    if perfetto is not None:
        from stepscope.rendering.chrome_trace import Rank, write_perfetto

        gaps = summary.occupation.gaps if summary.occupation else None
        written = write_perfetto([Rank("", summary.attribution, gaps)], perfetto, sources=[place])
        warn(f"{written} slices in {perfetto}: open it at https://ui.perfetto.dev")
    view = _view(shown.only, top, sort, graph_capture)
    if cut is not None:
        from stepscope.rendering.chrome_trace import write_cut

        warn(f"{write_cut(asked.attribution, cut, source=place)} rows of work in {cut}")
    _show(asked, findings, place, view, save, shown)
    return _exit_code(worst(findings))


def _exit_code(gravest: str | None) -> int:
    return EXIT_CHECK_FAILED if gravest == "error" else EXIT_DONE


def _show(
    asked: "TraceSummary",
    findings: tuple[Finding, ...],
    place: Path,
    view: "View",
    save: Path | None,
    shown: Presentation,
) -> None:
    from stepscope.traces.captures.answer import answer_trace, trace_as_json

    def document() -> str:
        return json_line(trace_as_json(asked, findings, view))

    # The tables of an answer take as long as the figures; for --json alone only --sort needs them, to be checked.
    if shown.json and not shown.brief and save is None and view.sort is None:
        shown.show(document=document)
        return
    answer = answer_trace(asked, findings, str(place), view)
    _check_only(answer, shown.only)
    shown.show(answer, document=document)
    draw(answer, save)


def _part(summary: "TraceSummary", file: Path, asked: Selection) -> "TraceSummary":
    from stepscope.traces.captures.part import part_of

    return part_of(
        summary, str(file), step=asked.step, phase=asked.phase, name=asked.range_, module=asked.module,
        device=asked.device, stream=asked.stream, between=asked.between,
    )  # fmt: skip


def _view(only: str | None, top: int | None, sort: str | None, graph_capture: Path | None) -> "View":
    from stepscope.traces.captures.detail_tables import View
    from stepscope.traces.captures.details import captured_graphs
    from stepscope.traces.captures.digest import read_trace

    captures = captured_graphs(read_trace(graph_capture)) if graph_capture is not None else ()
    if graph_capture is not None and not captures:
        raise InputError(f"--graph-capture {graph_capture}: no CUDA graph is captured in this trace")
    return View(only=only, top=top, sort=sort, captures=captures)


def _check_only(answer: Answer, only: str | None) -> None:
    """Raise InputError where --only names no table, with the names of those that are made when they are asked for."""
    if only is None or answer.has(only):
        return
    from stepscope.traces.captures.detail_tables import detail_heads

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
        document=lambda: json_line({**comparison_as_json(comparison), **(part_as_json(part) if part else {})}),
    )


def load_summary(path: Path) -> "TraceSummary":
    """Read and attribute a capture, with the run it belongs to where one lies beside it."""
    give_pages_back()
    from stepscope.traces.captures.digest import load_capture

    return load_capture(path, say=warn)
