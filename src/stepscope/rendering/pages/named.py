"""What a name means to whoever wants its page: a run, a set, a folder of runs, a capture, ranks, a snapshot, or an
answer that was stored."""

import gzip
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from stepscope.allocations.answer import answer_memory
from stepscope.allocations.at_moment import moment_at
from stepscope.allocations.explain import explain
from stepscope.allocations.snapshot import read_snapshot
from stepscope.core.answer import Answer, Figure, Page, decode_answer
from stepscope.core.errors import InputError, StepscopeError
from stepscope.core.evidence import TRACE_TOOLS
from stepscope.core.files import read_document
from stepscope.core.range_names import STEP
from stepscope.core.run import Run
from stepscope.core.run_directory import RUN_FILE, find_place, find_run, find_run_files, load_run, load_runs
from stepscope.core.units import format_bytes
from stepscope.questions.compare.sides import SideComparison, SidePair, compare_sides, side_named
from stepscope.questions.compare.sides_answer import answer_comparison, conclusion, short_names, verdict
from stepscope.rendering.pages.of_answer import gravest, is_prediction, page_of_answer, page_of_prediction
from stepscope.rendering.pages.of_capture import page_of_capture, page_of_job
from stepscope.rendering.pages.of_runs import page_of_run, page_of_runs, page_of_set
from stepscope.runs.run_sets import RunSet, sets_of
from stepscope.traces.captures.checks import check_trace
from stepscope.traces.captures.digest import TraceDigest, digest_beside, load_capture, load_digest
from stepscope.traces.ranks.answer import check_job
from stepscope.traces.ranks.job import captures_in, load_job

Say = Callable[[str], None]
Begun = Callable[[Page], None]
_SNAPSHOTS = (".pickle", ".pkl", ".pickle.gz", ".pkl.gz")
_DATABASES = (".sqlite", ".sqlite.gz", ".nsys-rep", ".qdstrm", ".db")
_LARGEST_DOCUMENT = 4 << 20
"""Bytes of a document that is read to say what it is; what is larger is taken for a trace."""
_LOOKED_AT = 65_536
"""Bytes of a JSON file that tell whether it is an answer."""


def page_named(names: Sequence[str], runs: Path, say: Say, begun: Begun | None = None) -> Page:
    """The page of what these names mean; several are the ranks of a job, or runs side by side.

    begun: is called with what of a run's page is known before its trace is read, so that it can be drawn meanwhile.
    Raises InputError where a name means nothing, or what it means cannot be read.
    """
    if len(names) > 1:
        return _of_several(names, runs, say)
    name = names[0]
    place = _place(name, runs)
    if place is None:
        return _of_set(name, runs)
    if place.is_file() and place.name != RUN_FILE:
        return _of_file(place, say)
    return _of_directory(place, say, begun)


def page_of_comparison(names: Sequence[str], runs: Path, across: Sequence[str], say: Say) -> Page:
    """The page that compares two sides, named as `stepscope compare` takes them."""
    if len(names) != 2:
        raise InputError(f"--compare takes two sides, and these are {len(names)}: the first is the base")
    base, other = (side_named(name, runs) for name in names)
    for fault in (*base.faults, *other.faults):
        say(f"left out: {fault}")
    found = compare_sides(base, other, across, "step")

    def digests(pair: SidePair) -> tuple[TraceDigest | None, TraceDigest | None]:
        before, after = pair.before.representative, pair.after.representative
        return (
            digest_beside(before, pair.before_side.directory(before), "kineto", say=say),
            digest_beside(after, pair.after_side.directory(after), "kineto", say=say),
        )

    answer = answer_comparison(found, digests)
    options = f" --across {shlex.quote(','.join(across))}" if across else ""
    options += f" --runs {shlex.quote(str(runs))}" if runs != Path("runs") else ""
    return page_of_answer(
        answer,
        "comparison",
        sentence=conclusion(found),
        figures=_figures_of_comparison(found, answer),
        shown_by=(f"stepscope compare {shlex.join(names)}{options}",),
    )


def _figures_of_comparison(found: SideComparison, answer: Answer) -> tuple[Figure, ...]:
    """The change with its interval and its processes; of several pairs the largest change."""
    changes = [(change, place) for place, change in enumerate(found.changes) if change is not None]
    if not changes:
        return (gravest(answer.findings),)
    change, place = max(changes, key=lambda one: abs(one[0].share))
    several = len(found.pairs) > 1
    within = change.interval
    return (
        *((Figure(name="pairs", value=f"{len(found.pairs)}"),) if several else ()),
        Figure(
            name="largest change" if several else "change", value=f"{change.share * 100:+.1f} %",
            note=short_names(found)[place],
        ),
        Figure(
            name="its 95 % interval" if several else "95 % interval",
            value=f"{(within.low - 1) * 100:+.1f} to {(within.high - 1) * 100:+.1f} %" if within else "none",
            note=verdict(change, found.stands[place]),
        ),
        Figure(name="processes", value=" / ".join(map(str, change.processes)), note="before / after"),
        gravest(answer.findings, note="" if answer.checked else "nothing to doubt was found"),
    )  # fmt: skip


def _place(name: str, runs: Path) -> Path | None:
    """Where a name leads: a file or folder, else a run under `runs`; None for the name of a set of runs."""
    path = Path(name)
    try:
        if path.exists():
            return path
    except OSError as error:
        raise InputError(f"{name[:100]}: cannot be read: {error.strerror or error}") from None
    try:
        return find_place(name, runs)
    except InputError:
        if runs.is_dir() and _sets_named(name, runs):
            return None
        find_run(name, runs)  # says what there is
        raise


def _sets_named(name: str, runs: Path) -> list[RunSet]:
    return [one for one in sets_of(load_runs([runs])[0]) if one.runs[0].repeat is not None and name in one.name]


def _of_set(name: str, runs: Path) -> Page:
    found = _sets_named(name, runs)
    if len(found) > 1:
        raise InputError(f"{len(found)} sets in {runs} match {name!r}: write more of the name")
    return page_of_set(found[0])


def _of_file(place: Path, say: Say) -> Page:
    name = place.name.casefold()
    if name.endswith(_SNAPSHOTS):
        return _of_snapshot(place)
    if not name.endswith(_DATABASES):
        if (answer := _stored_answer(place)) is not None:
            return page_of_answer(answer, "answer")
        document = _small_document(place)
        if is_prediction(document):
            return page_of_prediction(document, str(place))
        _refuse_other_documents(place, document)
    return _of_capture(place, say)


def _stored_answer(place: Path) -> Answer | None:
    """The answer that a file holds; None where it holds something else."""
    try:
        with (gzip.open if place.name.endswith(".gz") else open)(place, "rb") as file:  # type: ignore[operator]
            head = file.read(_LOOKED_AT)
    except (OSError, EOFError):
        return None
    if b'"study"' not in head or b'"traceEvents"' in head:
        return None
    data = read_document(place)
    try:
        document = json.loads(data)
    except ValueError:
        return None
    if not isinstance(document, dict) or not {"study", "tables"} <= document.keys():
        return None
    return decode_answer(data, str(place))


_OTHERS: tuple[tuple[frozenset[str], str, str], ...] = (
    (frozenset({"schema_version", "workload"}), "a run", "name its folder: stepscope report RUN"),
    (frozenset({"before", "after", "pairs"}), "a comparison", "stepscope report BASE OTHER --compare makes its page"),
    (frozenset({"peak_bytes", "estimate"}), "a prediction without its answer", "stepscope fit --json writes it anew"),
    (frozenset({"kernel_times"}), "a trace's figures", "name the trace itself: stepscope report TRACE"),
)
"""What other verbs write by --json, by keys that it has: its name, and what to do instead."""


def _small_document(place: Path) -> object:
    """The JSON of a file, if it is no trace by its size; None where it is something else."""
    try:
        if place.name.endswith(".gz") or place.stat().st_size > _LARGEST_DOCUMENT:
            return None
        return json.loads(place.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _refuse_other_documents(place: Path, document: object) -> None:
    """Raise InputError where a file holds what another verb wrote by --json, which has no page."""
    first = document[0] if isinstance(document, list) and document else document
    if not isinstance(first, dict) or "traceEvents" in first:
        return
    for keys, what, remedy in _OTHERS:
        if keys <= first.keys():
            raise InputError(f"{place} is {what} as --json wrote it, which has no page of its own: {remedy}")


def _of_snapshot(place: Path) -> Page:
    explained = explain(read_snapshot(place))
    moment = moment_at(explained, None)
    answer = answer_memory(explained, moment)
    largest = next(iter(sorted(moment.categories.items(), key=lambda one: -one[1])), None)
    figures = (
        Figure(name="peak", value=format_bytes(explained.peak_bytes), note="allocated"),
        Figure(
            name="most of it", value=largest[0] if largest else "nothing",
            note=format_bytes(largest[1]) if largest else "",
        ),
        Figure(name="allocations alive then", value=f"{moment.alive.height:,}"),
        Figure(name="events", value=f"{len(explained.snapshot.events):,}"),
        gravest(answer.findings, note="of the checks on memory" if answer.checked else "no step to compare with"),
    )  # fmt: skip
    sentence = next(line.text for table in answer.tables for line in table.notes)
    return page_of_answer(
        answer, "snapshot", title=f"What takes the memory of {place.name}?", sentence=sentence, figures=figures,
        shown_by=(f"stepscope memory {shlex.quote(str(place))}",),
    )  # fmt: skip


def _of_capture(place: Path, say: Say) -> Page:
    summary = load_capture(place, say=say)
    return page_of_capture(summary, check_trace(summary), str(place))


def _of_directory(place: Path, say: Say, begun: Begun | None) -> Page:
    inside = list(find_run_files(place))
    if len(inside) == 1:
        return _of_run(load_run(inside[0]), inside[0].parent, say, begun)
    captures = captures_in(place)
    if inside:
        runs, faults = load_runs([place])
        for fault in faults:
            say(f"left out: {fault}")
        ranks = len(captures) == len(runs) and all(getattr(run.workload, "rank", None) is not None for run in runs)
        return _of_ranks(captures, [str(place)], say) if ranks else page_of_runs(runs, str(place), [str(place)])
    if not any(place.iterdir()):
        raise InputError(f"{place} is empty: name a run, a folder of runs, a capture, or a snapshot")
    return _of_ranks(captures, [str(place)], say) if len(captures) > 1 else _of_capture(place, say)


def _of_run(run: Run, directory: Path, say: Say, begun: Begun | None) -> Page:
    """The page of a run with what it recorded; a recording that cannot be read is told, and the run is shown."""
    samples = run.samples.get(STEP)
    if run.status == "done" and not run.artifacts and not (samples is not None and samples.count):
        raise InputError(
            f"{directory}: this run has no samples of a step, so there is nothing to show: measure it again"
        )
    if run.repeat is not None and run.status == "unfinished":
        say(f"{run.id} was started and never ended")
    if begun is not None and run.artifacts:
        begun(page_of_run(run))
    notes: list[str] = []
    captured = remembered = None
    digest: TraceDigest | None = None
    there = any((directory / run.artifacts.get(tool, "-")).is_file() for tool in TRACE_TOOLS)
    try:
        if not there:
            digest = next(filter(None, (load_digest(directory, tool) for tool in TRACE_TOOLS)), None)
        if digest is None and any(capture.artifact in TRACE_TOOLS for capture in run.evidence.captures):
            captured = load_capture(directory, say=say)
    except StepscopeError as error:
        notes.append(f"Its trace is not shown: {error}")
    if "memory" in run.artifacts:
        try:
            explained = explain(read_snapshot(directory))
            remembered = answer_memory(explained, moment_at(explained, None))
        except StepscopeError as error:
            notes.append(f"Its memory snapshot is not shown: {error}")
    return page_of_run(run, captured=captured, digest=digest, remembered=remembered, notes=tuple(notes))


def _of_several(names: Sequence[str], runs: Path, say: Say) -> Page:
    places = [_place(name, runs) for name in names]
    files = [place for place in places if place is not None]
    if len(files) < len(places):
        raise InputError("several names are runs, or captures of ranks: name each set by itself")
    if all(place.is_file() and place.name != RUN_FILE for place in files):
        return _of_ranks(files, [str(file) for file in files], say)
    found, faults = load_runs(files)
    for fault in faults:
        say(f"left out: {fault}")
    return page_of_runs(found, " ".join(names), list(dict.fromkeys(map(str, files))))


def _of_ranks(captures: list[Path], places: Sequence[str], say: Say) -> Page:
    job = load_job(captures, say=say)
    return page_of_job(job, check_job(job), places, lambda path: load_capture(Path(path), say=say))
