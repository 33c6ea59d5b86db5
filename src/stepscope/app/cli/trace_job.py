"""`stepscope trace` of several ranks' captures."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.app.cli.output import draw, json_line, warn
from stepscope.app.cli.presentation import Presentation
from stepscope.core.errors import InputError
from stepscope.core.finding import worst
from stepscope.core.polars_memory import give_pages_back
from stepscope.core.run_directory import find_place

if TYPE_CHECKING:
    from stepscope.traces.ranks.job import Job


def captures_of(names: Sequence[str], runs: Path) -> list[Path]:
    """The captures that these names give: files and runs are one each, and a folder is all that it holds."""
    give_pages_back()  # before polars is imported
    from stepscope.traces.ranks.load import captures_in

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
    from stepscope.traces.ranks.answer import answer_job
    from stepscope.traces.ranks.as_json import job_as_json
    from stepscope.traces.ranks.checks import check_job
    from stepscope.traces.ranks.load import load_job

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
    from stepscope.traces.ranks.comparison import answer_jobs, jobs_as_json
    from stepscope.traces.ranks.load import captures_in, load_job

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
    from stepscope.traces.ranks.load import load_job

    job = load_job(captures, say=warn)
    found = next((one.source for one in job.ranks if one.number == rank), None)
    if found is None:
        numbers = ", ".join(str(one.number) for one in job.ranks)
        raise InputError(f"none of these captures is of rank {rank}: choose one of {numbers}")
    return Path(found)


def _export(job: "Job", captures: list[Path], out: Path) -> None:
    """Write all ranks into one file for Perfetto, on the clock of the first."""
    from stepscope.rendering.perfetto import Rank, write_perfetto
    from stepscope.traces.captures.load import load_capture
    from stepscope.traces.read import find_capture

    offsets = {clock.rank: clock.offset_ns for clock in job.matched.clocks}
    ranks: list[Rank] = []
    for one in job.ranks:
        summary = load_capture(Path(one.source), say=warn)
        gaps = summary.occupation.gaps if summary.occupation else None
        ranks.append(Rank(f"rank {one.number}", summary.attribution, gaps, offset_ns=offsets[one.number]))
    written = write_perfetto(ranks, out, sources=[find_capture(path) for path in captures])
    warn(f"{written} slices in {out}: open it at https://ui.perfetto.dev")
