"""`stepscope trace`: what a capture says, whichever profiler made it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli.output import draw, json_line, warn
from stepscope.cli.presentation import Presentation
from stepscope.cli.trace_job import capture_of_rank, captures_of, show_job
from stepscope.cli.verb import file_or_run, verb
from stepscope.core.errors import EXIT_CHECK_FAILED, InputError
from stepscope.core.finding import worst
from stepscope.core.polars_memory import give_pages_back

if TYPE_CHECKING:
    from stepscope.analysis.captures.summary import TraceSummary


@verb(
    "trace",
    "stepscope trace runs/small-b4-s512-fp32-train-4f2c --range softmax --phase forward",
    "stepscope trace rank0.json.gz rank1.json.gz",
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
    against: Path | None,
    range_: str | None,
    phase: str | None,
    step: int | None,
    rank: int | None,
    no_ranges: bool,
    perfetto: Path | None,
    runs: Path,
    save: Path | None,
    shown: Presentation,
) -> None:
    """Where the time of a captured step went: by phase, family, kernel and module, every nanosecond accounted for."""
    is_part = (range_, phase, step) != (None, None, None)
    if perfetto is not None and (against is not None or is_part):
        other = "--against compares two" if against is not None else "--range, --phase and --step show a part"
        raise InputError(f"--perfetto shows one whole capture, {other}: ask for one after the other")
    if save is not None:
        from stepscope.report.plots.save import check_target

        if against is not None:
            raise InputError("--save draws one capture, --against compares two: leave one of them out")
        check_target(save)
    del no_ranges  # captures without ranges are read in any case
    captures = captures_of(file, runs)
    if len(captures) > 1 and rank is None:
        if is_part or against is not None:
            asked_for = "--against reads" if against is not None else "--range, --phase and --step read"
            raise InputError(
                f"{asked_for} one capture, and these are {len(captures)}: choose a rank with --rank, or name one file"
            )
        if show_job(captures, perfetto=perfetto, save=save, shown=shown) == "error":
            raise typer.Exit(EXIT_CHECK_FAILED)
        return
    place = captures[0] if rank is None else capture_of_rank(captures, rank)
    summary = load_summary(place)
    asked = _part(summary, place, range_, phase, step) if is_part else summary
    if against is not None:
        before = load_summary(against)
        _compare(_part(before, against, range_, phase, step) if is_part else before, asked, against, place, shown)
        return
    from stepscope.analysis.captures.checks import check_trace

    findings = check_trace(summary)
    if perfetto is not None:
        from stepscope.report.perfetto import Rank, write_perfetto

        gaps = summary.occupation.gaps if summary.occupation else None
        written = write_perfetto([Rank("", summary.attribution, gaps)], perfetto, sources=[place])
        warn(f"{written} slices in {perfetto}: open it at https://ui.perfetto.dev")
    from stepscope.analysis.captures.answer import answer_trace
    from stepscope.analysis.captures.as_json import trace_as_json

    answer = answer_trace(asked, findings, str(place))
    shown.show(answer, document=lambda: json_line(trace_as_json(asked, findings)))
    draw(answer, save)
    if worst(findings) == "error":
        raise typer.Exit(EXIT_CHECK_FAILED)


def _part(summary: "TraceSummary", file: Path, name: str | None, phase: str | None, step: int | None) -> "TraceSummary":
    from stepscope.analysis.captures.part import part_of

    return part_of(summary, str(file), step=step, phase=phase, name=name)


def _compare(before: "TraceSummary", after: "TraceSummary", old: Path, new: Path, shown: Presentation) -> None:
    from stepscope.analysis.captures.as_json import part_as_json
    from stepscope.analysis.comparisons.captures import answer_captures, compare_captures, comparison_as_json

    comparison, part = compare_captures(before.attribution, after.attribution), after.part
    shown.show(
        answer_captures(comparison, str(old), str(new), part.words if part else ""),
        document=lambda: json_line({**comparison_as_json(comparison), **(part_as_json(part) if part else {})}),
    )


def load_summary(path: Path) -> "TraceSummary":
    """Read and attribute a capture, with the run it belongs to where one lies beside it."""
    give_pages_back()
    from stepscope.analysis.captures.load import load_capture

    return load_capture(path, say=warn)
