"""The page of several runs: the cells of a sweep, their figures over the axes, and what is missing."""

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from stepscope.core.answer import Answer, Cell, Frame, Line, Panel, Point, Table, table_of
from stepscope.core.doubts import doubts_sentence
from stepscope.core.errors import InputError
from stepscope.core.finding import Finding, warning
from stepscope.core.page import Figure, Page, Section
from stepscope.core.range_names import STEP
from stepscope.core.run import Run
from stepscope.core.units import GIB, counted, format_bytes, format_seconds, format_share
from stepscope.core.work.described import cell_name
from stepscope.rendering.pages.of_answer import gravest
from stepscope.runs import metrics
from stepscope.runs.answer import answer_cells
from stepscope.runs.fields import FIELDS, Scalar
from stepscope.runs.table_panels import table_panels
from stepscope.runs.tables import TableQuery, select_runs
from stepscope.runs.words import status_sentence, status_word

_NUMBERS = ("seq_len", "batch_size", "layers", "d_model", "heads", "accumulation", "head_dim")
"""Axes of numbers, the one that is most often swept first."""
_CHOICES = ("model", "dtype", "attention", "compile", "phase", "optimizer", "checkpointing", "device", "factory")
_SHOWN = (("step", "a step, ms"), ("tokens_per_s", "tokens per second"), ("peak_memory", "peak memory, GiB"))
_MOST_CELLS = 60
"""The most rows or columns of a heat map."""
_MOST_LINES, _MOST_LINE_AXES = 8, 2
_MOST_MAPS = 4
"""Values of further axes, each of which has a map of its own."""
_SIZES = ("layers", "d_model", "heads", "head_dim")


def page_of_runs(runs: Sequence[Run], name: str, places: Sequence[str]) -> Page:
    """The page of these runs, which lie in these places and go by this name. Raises InputError where there are none."""
    if not runs:
        raise InputError(f"no runs at {name}: `stepscope sweep` leaves some")
    done = [run for run in runs if run.status == "done" and metrics.median_s(run, STEP)]
    devices = list(dict.fromkeys(run.environment.limited_device for run in runs if run.environment))
    findings = _findings(runs)
    cells = _with_legend(answer_cells(runs), runs)
    sections = [Section(title="Cells", answer=cells)]
    plots = (*_curves(done), *_heats(runs))
    if plots:
        drawn = Answer(study="sweep", question="", panels=plots)
        sections.insert(0, Section(title="Over the axes", answer=drawn))
    if missing := [run for run in runs if run not in done]:
        sections.append(Section(title="What is missing, and why", answer=_missing(missing)))
    return Page(
        title=f"{counted(len(runs), 'run')} of {name}",
        kind="sweep",
        sentence=_sentence(runs, done, devices),
        figures=_figures(runs, done, findings),
        findings=(*_not_measured(runs), *findings),
        checked=bool(done),
        sections=(*sections, _where(runs)),
        shown_by=(f"stepscope table {shlex.join(places)}",),
    )


def _with_legend(cells: Answer, runs: Sequence[Run]) -> Answer:
    """The cells, with what the marks beside their figures mean."""
    found = cells.tables[0]
    said = doubts_sentence(runs)
    if said is None:
        return cells
    legend = Line(said, "aside")
    return msgspec.structs.replace(
        cells, tables=(msgspec.structs.replace(found, notes=(*found.notes, legend)), *cells.tables[1:])
    )


def _sentence(runs: Sequence[Run], done: Sequence[Run], devices: Sequence[str]) -> str:
    where = f" on {' and '.join(devices[:3])}" if devices else ""
    if not done:
        return f"None of {counted(len(runs), 'run')}{where} measured a step."
    by_time = sorted(done, key=lambda run: metrics.median_s(run, STEP) or 0.0)
    first, last = by_time[0], by_time[-1]
    lost = Counter(status_word(run) for run in runs if run not in done)
    others = f"; {', '.join(f'{count} {word}' for word, count in lost.items())}" if lost else ""
    span = f"from {_step(first)} ({cell_name(first.workload)}) to {_step(last)} ({cell_name(last.workload)})"
    if len(done) == 1:
        span = f"{_step(first)} ({cell_name(first.workload)})"
    return f"{counted(len(done), 'run')} measured{where}, {span}{others}."


def _step(run: Run) -> str:
    return format_seconds(metrics.median_s(run, STEP) or 0.0)


def _figures(runs: Sequence[Run], done: Sequence[Run], findings: tuple[Finding, ...]) -> tuple[Figure, ...]:
    # A forward alone has more tokens per second than a training step of the same: they are no rivals.
    phases = {FIELDS["phase"].read(run) for run in done}
    whole = [run for run in done if FIELDS["phase"].read(run) == "train"] if len(phases) > 1 else done
    of_train = ", training" if len(phases) > 1 and whole else ""
    whole = whole or done
    return (
        Figure(name="measured", value=f"{len(done)} of {len(runs)}"),
        _most(whole, f"most tokens per second{of_train}", metrics.tokens_per_s, lambda value: f"{value:,.0f}"),
        _most(done, "best MFU", lambda run: metrics.mfu_datasheet(run) or metrics.mfu_measured(run), format_share),
        _most(done, "most memory", metrics.peak_bytes, format_bytes),
        _gravest(runs, findings),
    )


def _gravest(runs: Sequence[Run], findings: tuple[Finding, ...]) -> Figure:
    """The gravest finding; where there is no error, how many runs ended before they were measured comes first."""
    lost = Counter(status_word(run) for run in runs if run.status != "done")
    if not lost or any(finding.severity == "error" for finding in findings):
        return gravest(findings)
    said = ", ".join(f"{count} {word}" for word, count in lost.items())
    return Figure(name="gravest finding", value=said, note="not measured to the end")


def _not_measured(runs: Sequence[Run]) -> Iterator[Finding]:
    """What became of the runs that did not end, which no check sees."""
    lost = Counter(status_word(run) for run in runs if run.status != "done")
    if lost:
        said = ", ".join(f"{count} {word}" for word, count in lost.items())
        yield warning(
            "not-measured",
            f"{said} of {counted(len(runs), 'run')}: what is missing stands below, with why.",
            dict(lost),
        )


def _most(done: Sequence[Run], name: str, read: Callable[[Run], float | None], shown: Callable[[float], str]) -> Figure:
    """The run with the largest of a figure."""
    best = max(done, key=lambda run: read(run) or 0.0, default=None)
    value = read(best) if best is not None else None
    if best is None or not value:
        return Figure(name=name, value="not measured")
    return Figure(name=name, value=shown(value), note=cell_name(best.workload))


def _findings(runs: Sequence[Run]) -> tuple[Finding, ...]:
    """Each kind of finding once, with the number of runs that have it, the gravest and most frequent first."""
    counts = Counter(kind for run in runs for kind in {finding.kind for finding in run.findings})
    first: dict[str, Finding] = {}
    for run in runs:
        for finding in run.findings:
            first.setdefault(finding.kind, finding)
    grave = ("error", "warning", "note")
    ordered = sorted(first.values(), key=lambda one: (grave.index(one.severity), -counts[one.kind], one.kind))
    return tuple(
        msgspec.structs.replace(one, sentence=_in_how_many(one.sentence, counts[one.kind], len(runs)))
        for one in ordered
    )


def _in_how_many(sentence: str, count: int, runs: int) -> str:
    """The sentence of one run's finding, and how many others have a finding of its kind, with figures of their own."""
    if count == 1:
        return f"{sentence} (In one of {runs} runs.)" if runs > 1 else sentence
    return f"{sentence} (One of {count} such findings in {runs} runs; the others have figures of their own.)"


def _axes(runs: Sequence[Run]) -> list[str]:
    """The fields in which the runs differ, numbers first; sizes that follow from the model's name are none."""
    found = [name for name in (*_NUMBERS, *_CHOICES) if len({FIELDS[name].read(run) for run in runs}) > 1]
    if "model" not in found:
        return found
    models = {FIELDS["model"].read(run) for run in runs}

    def follows(name: str) -> bool:
        return name in _SIZES and len({(FIELDS["model"].read(run), FIELDS[name].read(run)) for run in runs}) == len(
            models
        )

    return [name for name in found if not follows(name)]


def _curves(done: Sequence[Run]) -> tuple[Panel, ...]:
    """Time, tokens and memory over the first axis of numbers, the others as lines; none where nothing varies so."""
    axes = _axes(done)
    x = next((name for name in axes if name in _NUMBERS), None)
    if x is None:
        return ()
    lines = tuple(name for name in axes if name != x)
    if len(lines) > _MOST_LINE_AXES:
        return ()
    query = TableQuery(rows=(*lines[:1], x), columns=lines[1:], values=tuple(name for name, _ in _SHOWN))
    try:
        chosen, _ = select_runs(done, query)  # one run stands for a cell, as in a table of the same runs
        panels = table_panels(chosen, query)
    except InputError:
        return ()  # runs that differ in more than can be drawn: the table has them all
    return tuple(
        panel for panel in panels if panel.points and len({point.line for point in panel.points}) <= _MOST_LINES
    )


def _heats(runs: Sequence[Run]) -> tuple[Panel, ...]:
    """A map of two axes for each figure, and for each value of a third, missing cells with their reason; none with
    fewer than two axes."""
    axes = _axes(runs)
    if len(axes) < 2:
        return ()
    across = next((name for name in axes if name in _NUMBERS), axes[0])
    down = "model" if "model" in axes and across != "model" else next(name for name in axes if name != across)
    rest = [name for name in axes if name not in (across, down)]
    groups: dict[tuple[Scalar, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(FIELDS[name].read(run) for name in rest), []).append(run)
    if len(groups) > _MOST_MAPS:
        return ()
    panels: list[Panel] = []
    for title, read in _MAPPED:
        for values, members in groups.items():
            known = [(name, value) for name, value in zip(rest, values, strict=True) if value is not None]
            where = ", ".join(f"{name} {value}" for name, value in known)
            panels += _heat(members, across, down, f"{title}{f', {where}' if where else ''}", read)
    return tuple(panels)


def _heat(
    runs: Sequence[Run], across: str, down: str, title: str, read: Callable[[Run], float | None]
) -> Iterator[Panel]:
    cells: dict[tuple[Scalar, Scalar], list[Run]] = {}
    for run in runs:
        cells.setdefault((FIELDS[down].read(run), FIELDS[across].read(run)), []).append(run)
    if max(len({key[place] for key in cells}) for place in (0, 1)) > _MOST_CELLS:
        return
    points: list[Point] = []
    for row, column in sorted(cells, key=lambda cell: (FIELDS[down].rank(cell[0]), FIELDS[across].rank(cell[1]))):
        newest = max(cells[row, column], key=lambda run: run.instant)
        value = read(newest) if newest.status == "done" else None
        points.append(
            Point(
                line=str(row), name=str(column), y=value if value is not None else 0.0,
                missing="" if value is not None else status_word(newest),
            )
        )  # fmt: skip
    if any(not point.missing for point in points):
        yield Panel(
            x_title=across,
            y_title=title,
            points=tuple(points),
            kind="heat",
            frame=Frame(heading=title, line_title=down, note=_again(cells.values())),
        )


def _again(cells: Iterable[Sequence[Run]]) -> str:
    """What a map says where cells were measured more than once."""
    count = sum(len(runs) > 1 for runs in cells)
    return f"of {counted(count, 'cell')} measured more than once the newest run is shown" if count else ""


def _ms(run: Run) -> float | None:
    step_s = metrics.median_s(run, STEP)
    return step_s * 1e3 if step_s is not None else None


def _gib(run: Run) -> float | None:
    peak = metrics.peak_bytes(run)
    return peak / GIB if peak is not None else None


_MAPPED: tuple[tuple[str, Callable[[Run], float | None]], ...] = (
    ("a step, ms", _ms), ("tokens per second", metrics.tokens_per_s), ("peak memory, GiB", _gib),
)  # fmt: skip


def _missing(runs: Sequence[Run]) -> Answer:
    rows: list[tuple[Cell, ...]] = [
        (cell_name(run.workload, run.settings), status_word(run), status_sentence(run)) for run in runs
    ]
    table = Table(title="", columns=("cell", "status", "why"), rows=tuple(rows), units=("", "", "prose"))
    return Answer(study="sweep", question="", tables=(table,))


def _where(runs: Sequence[Run]) -> Section:
    """The environments, a line for each that differs."""
    counts = Counter(run.environment.described for run in runs if run.environment)
    rows: list[tuple[Cell, ...]] = [(described, count) for described, count in counts.items()]
    table = table_of("device and versions", ("runs", ","), rows=rows)
    return Section(title="Environment", answer=Answer(study="sweep", question="", tables=(table,)))
