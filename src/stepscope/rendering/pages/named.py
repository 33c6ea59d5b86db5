"""The page that a name means: of a run, of a set, of many runs, of a capture, of a snapshot, of an answer."""

import gzip
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepscope.core.answer import (
    PROSE,
    SEVERITIES,
    Answer,
    Cell,
    Finding,
    Frame,
    Line,
    Panel,
    Point,
    Table,
    as_lines,
    decode_answer,
    name_of,
    table_of,
    warning,
)
from stepscope.core.environment import Environment
from stepscope.core.errors import InputError, StepscopeError
from stepscope.core.evidence import TRACE_TOOLS
from stepscope.core.figures import doubts_sentence
from stepscope.core.files import read_document
from stepscope.core.formulas.spelled import cell_name, run_command
from stepscope.core.processes import FEWEST_PROCESSES
from stepscope.core.range_names import STEP
from stepscope.core.run import Run
from stepscope.core.run_directory import RUN_FILE, find_place, find_run, find_run_files, load_run, load_runs
from stepscope.core.units import counted, format_bytes, format_rate, format_seconds, format_share
from stepscope.rendering.pages import Figure, Page, Section
from stepscope.rendering.pages.of_answer import (
    PREDICTION_KEYS,
    gravest,
    heading_of,
    page_of_answer,
    page_of_capture,
    page_of_job,
    page_of_prediction,
    section,
    sections_of,
    sections_of_capture,
    sections_of_digest,
)
from stepscope.runs import metrics
from stepscope.runs.answer import (
    answer_cells,
    answer_run,
    identify,
    interval_ms,
    status_in_short,
    status_sentence,
    status_word,
)
from stepscope.runs.fields import FIELDS, VALUES, Scalar
from stepscope.runs.run_sets import RunSet, answer_set, findings_by_kind, sets_of
from stepscope.runs.tables import TableQuery, select_runs, table_panels
from stepscope.traces.captures.answer import answer_trace
from stepscope.traces.captures.checks import check_trace
from stepscope.traces.captures.digest import TraceDigest, digest_beside, load_capture, load_digest
from stepscope.traces.captures.summary import TraceSummary
from stepscope.traces.ranks import captures_in, load_job
from stepscope.traces.ranks_answer import check_job

if TYPE_CHECKING:
    from stepscope.allocations.at_moment import Moment
    from stepscope.allocations.explain import Explained
    from stepscope.questions.compare import SideComparison, SidePair

# The page of several runs: the cells of a sweep, their figures over the axes, and what is missing.


_NUMBERS = ("seq_len", "batch_size", "layers", "d_model", "heads", "accumulation", "head_dim")
"""Axes of numbers, the one that is most often swept first."""
_CHOICES = ("model", "dtype", "attention", "compile", "phase", "optimizer", "checkpointing", "device", "factory")
_SHOWN = {"step": "a step, ms", "tokens_per_s": "tokens per second", "peak_memory": "peak memory, GiB"}
"""Figures over the axes, by their titles."""
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
    ended = Counter(status_word(run) for run in runs if run.status != "done")
    findings = _findings(runs)
    cells = answer_cells(runs)
    if (doubts := doubts_sentence(runs)) is not None:
        table = msgspec.structs.replace(cells.tables[0], notes=(*cells.tables[0].notes, Line(doubts, "aside")))
        cells = msgspec.structs.replace(cells, tables=(table, *cells.tables[1:]))
    sections = [Section(title="Cells", answer=cells)]
    if plots := (*_curves(done), *_heats(runs)):
        sections.insert(0, Section(title="Over the axes", answer=Answer(study="sweep", question="", panels=plots)))
    if missing := [run for run in runs if run not in done]:
        why = [(cell_name(run.workload, run.settings), status_word(run), status_sentence(run)) for run in missing]
        sections.append(
            _sweep_section("What is missing, and why", table_of("cell", "status", ("why", PROSE), rows=why))
        )
    machines = Counter(run.environment.described for run in runs if run.environment)
    table = table_of("device and versions", ("runs", ","), rows=list(machines.items()))
    not_measured = warning(
        "not-measured",
        f"{_in_short(ended)} of {counted(len(runs), 'run')}: what is missing stands below, with why.",
        dict(ended),
    )
    return Page(
        title=f"{counted(len(runs), 'run')} of {name}",
        kind="sweep",
        sentence=_sentence(runs, done, devices),
        figures=_figures(runs, done, gravest(findings, ended=_in_short(ended))),
        findings=(*((not_measured,) if ended else ()), *findings),
        checked=bool(done),
        sections=(*sections, _sweep_section("Environment", table)),
        shown_by=(f"stepscope table {shlex.join(places)}",),
    )


def _sweep_section(title: str, table: Table) -> Section:
    return Section(title=title, answer=Answer(study="sweep", question="", tables=(table,)))


def _sentence(runs: Sequence[Run], done: Sequence[Run], devices: Sequence[str]) -> str:
    """How many runs measured a step, on which devices, and what the fastest and the slowest take."""
    where = f" on {' and '.join(devices[:3])}" if devices else ""
    if not done:
        return f"None of {counted(len(runs), 'run')}{where} measured a step."
    by_time = sorted(done, key=lambda run: metrics.median_s(run, STEP) or 0.0)
    first, last = (
        f"{format_seconds(metrics.median_s(run, STEP) or 0.0)} ({cell_name(run.workload)})"
        for run in (by_time[0], by_time[-1])
    )
    lost = Counter(status_word(run) for run in runs if run not in done)
    others = f"; {_in_short(lost)}" if lost else ""
    span = f"from {first} to {last}" if len(done) > 1 else first
    return f"{counted(len(done), 'run')} measured{where}, {span}{others}."


def _in_short(lost: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {word}" for word, count in lost.items())


def _figures(runs: Sequence[Run], done: Sequence[Run], worst: Figure) -> tuple[Figure, ...]:
    """The runs with the largest of each figure, and the gravest finding."""
    # A forward alone has more tokens per second than a training step of the same: they are no rivals.
    phases = {FIELDS["phase"].read(run) for run in done}
    whole = [run for run in done if FIELDS["phase"].read(run) == "train"] if len(phases) > 1 else done
    of_train = ", training" if len(phases) > 1 and whole else ""

    # A model that takes no tokens is ranked by samples per second.
    rate, things = (
        (metrics.tokens_per_s, "tokens") if any(map(metrics.tokens_per_s, done)) else (metrics.samples_per_s, "samples")
    )

    def most(
        rivals: Sequence[Run], name: str, read: Callable[[Run], float | None], shown: Callable[[float], str]
    ) -> Figure:
        best = max(rivals, key=lambda run: read(run) or 0.0, default=None)
        value = read(best) if best is not None else None
        if best is None or not value:
            return Figure(name=name, value=_UNKNOWN)
        return Figure(name=name, value=shown(value), note=cell_name(best.workload))

    return (
        Figure(name="measured", value=f"{len(done)} of {len(runs)}"),
        most(whole or done, f"most {things} per second{of_train}", rate, rate_text),
        most(done, "best MFU", lambda run: metrics.mfu_datasheet(run) or metrics.mfu_measured(run), share_text),
        most(done, "most memory", metrics.peak_bytes, format_bytes),
        worst,
    )


def _findings(runs: Sequence[Run]) -> tuple[Finding, ...]:
    """Each kind of finding once, with the number of runs that have it, the gravest and most frequent first."""

    def sentence(finding: Finding, count: int) -> str:
        if count == 1:
            return f"{finding.sentence} (In one of {len(runs)} runs.)" if len(runs) > 1 else finding.sentence
        others = f"One of {count} such findings in {len(runs)} runs; the others have figures of their own."
        return f"{finding.sentence} ({others})"

    ordered = sorted(
        findings_by_kind(runs), key=lambda pair: (SEVERITIES.index(pair[0].severity), -pair[1], pair[0].kind)
    )
    return tuple(msgspec.structs.replace(one, sentence=sentence(one, count)) for one, count in ordered)


def _axes(runs: Sequence[Run]) -> list[str]:
    """The fields in which the runs differ, numbers first; sizes that follow from the model's name are none."""
    varying = [name for name in (*_NUMBERS, *_CHOICES) if len({FIELDS[name].read(run) for run in runs}) > 1]
    if "model" not in varying:
        return varying
    models = {FIELDS["model"].read(run) for run in runs}

    def follows(name: str) -> bool:
        return name in _SIZES and len({(FIELDS["model"].read(run), FIELDS[name].read(run)) for run in runs}) == len(
            models
        )

    return [name for name in varying if not follows(name)]


def _curves(done: Sequence[Run]) -> tuple[Panel, ...]:
    """Time, tokens and memory over the first axis of numbers, the others as lines; none where nothing varies so."""
    axes = _axes(done)
    x = next((name for name in axes if name in _NUMBERS), None)
    if x is None:
        return ()
    lines = tuple(name for name in axes if name != x)
    if len(lines) > _MOST_LINE_AXES:
        return ()
    query = TableQuery(rows=(*lines[:1], x), columns=lines[1:], values=tuple(_SHOWN))
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
    for figure, title in _SHOWN.items():
        for values, members in groups.items():
            known = [(name, value) for name, value in zip(rest, values, strict=True) if value is not None]
            where = ", ".join(f"{name} {value}" for name, value in known)
            panels += _heat(members, across, down, f"{title}{f', {where}' if where else ''}", figure)
    return tuple(panels)


def _heat(runs: Sequence[Run], across: str, down: str, title: str, figure: str) -> Iterator[Panel]:
    cells: dict[tuple[Scalar, Scalar], list[Run]] = {}
    for run in runs:
        cells.setdefault((FIELDS[down].read(run), FIELDS[across].read(run)), []).append(run)
    if max(len({key[place] for key in cells}) for place in (0, 1)) > _MOST_CELLS:
        return
    points: list[Point] = []
    for row, column in sorted(cells, key=lambda cell: (FIELDS[down].rank(cell[0]), FIELDS[across].rank(cell[1]))):
        newest = max(cells[row, column], key=lambda run: run.instant)
        value = VALUES[figure].shown(newest) if newest.status == "done" else None
        points.append(
            Point(
                line=str(row),
                name=str(column),
                y=value if value is not None else 0.0,
                missing="" if value is not None else status_word(newest),
            )
        )
    if any(not point.missing for point in points):
        again = sum(len(members) > 1 for members in cells.values())
        note = f"of {counted(again, 'cell')} measured more than once the newest run is shown" if again else ""
        yield Panel(
            x_title=across,
            y_title=title,
            points=tuple(points),
            kind="heat",
            frame=Frame(heading=title, line_title=down, note=note),
        )


# The page of one run, or of one step measured in several processes.


_UNKNOWN = "not measured"


def page_of_run(
    run: Run,
    *,
    captured: TraceSummary | None = None,
    digest: TraceDigest | None = None,
    remembered: Answer | None = None,
    notes: tuple[str, ...] = (),
) -> Page:
    """The page of a run: its times and memory, then what it recorded.

    `captured`: its trace, read. `digest`: what was kept of a trace that is not there. `remembered`: the answer on its
    memory snapshot. `notes`: what could not be read.
    """
    answer = answer_run(run)
    memory = [table for table in answer.tables if name_of(table).startswith("memory")]
    step = [table for table in answer.tables if table not in memory]
    sections = [*heading_of(answer)]
    if step:
        sections.append(section("The step by its phases", answer, tables=step, panels=answer.panels))
    findings_of_trace = check_trace(captured) if captured is not None else ()
    if captured is not None:
        sections += sections_of_capture(captured, answer_trace(captured, findings_of_trace, run.id))
    elif digest is not None:
        sections += sections_of_digest(digest, on_cpu=run.environment is None or run.environment.device_type == "cpu")
        findings_of_trace = digest.findings
    if memory:
        sections.append(section("Memory by phase", answer, tables=memory))
    if remembered is not None:
        sections += [
            msgspec.structs.replace(one, title=f"Memory: {one.title[:1].lower()}{one.title[1:]}")
            for one in sections_of(remembered)
        ]
    sections += _numerics(run)
    sections += _environment(run.environment)
    asides = (*answer.asides, *notes)
    ends = msgspec.structs.replace(answer.body(), tables=(), panels=(), findings=(), checked=False)
    sections.append(
        Section(title="Notes", answer=msgspec.structs.replace(ends, asides=asides, origin=(identify(run),)))
    )
    kinds = {finding.kind for finding in run.findings}
    findings = (*run.findings, *(one for one in findings_of_trace if one.kind not in kinds))
    return Page(
        title=f"{run.workload.name}: a training step",
        kind="run",
        sentence=sentence_of(run),
        figures=_run_figures(run),
        findings=findings,
        checked=answer.checked,
        sections=tuple(sections),
        reproduce=tuple(commands_of(run)),
    )


def page_of_set(run_set: RunSet) -> Page:
    """The page of a step that was measured in several processes."""
    answer, run, times = answer_set(run_set), run_set.representative, run_set.processes(STEP)
    interval = times.interval()
    step_s = times.typical_s
    enough = len(run_set.measured) >= FEWEST_PROCESSES
    between = interval_ms(interval)
    sure = f", with 95 % confidence {between}" if between and enough else ""
    figures = (
        Figure(
            name="a step, between processes",
            value=format_seconds(step_s) if step_s else _UNKNOWN,
            note=between or f"fewer than {FEWEST_PROCESSES} processes: no interval",
        ),
        *_run_figures(run)[1:-1],
        gravest(answer.findings),
    )
    sentence = "None of the processes measured a step."
    if step_s:
        measured = counted(len(run_set.measured), "process")
        sentence = f"In {measured} a step typically takes {format_seconds(step_s)}{sure}."
    return Page(
        title=f"{run.workload.name}: a training step in {counted(len(run_set.runs), 'process')}",
        kind="set",
        sentence=sentence,
        figures=figures,
        findings=answer.findings,
        checked=answer.checked,
        sections=(*heading_of(answer), *sections_of(answer), *_environment(run.environment)),
        reproduce=tuple(f"{command} --repeat {len(run_set.runs)}" for command in commands_of(run)[:1]),
    )


def sentence_of(run: Run) -> str:
    """The run in one sentence."""
    step_s = metrics.median_s(run, STEP)
    device = run.environment.limited_device if run.environment else "this device"
    if run.status != "done" and step_s is None:
        return status_in_short(run)
    if not step_s:
        return "No step was measured."
    parts = {
        name: part_s / step_s for name in metrics.parts_of(run) if (part_s := metrics.median_s(run, name)) is not None
    }
    longest = max(parts, key=lambda name: parts[name], default=None)
    where = f", {format_share(parts[longest])} of it in {longest}" if longest is not None else ""
    idle = metrics.launch_bound_share(run)
    stood = f"; the GPU has nothing to run for {format_share(idle)} of it" if idle is not None and idle > 0.05 else ""
    return f"A step of {cell_name(run.workload)} takes {format_seconds(step_s)} on {device}{where}{stood}."


def _run_figures(run: Run) -> tuple[Figure, ...]:
    samples = run.samples.get(STEP)
    interval = samples.interval() if samples is not None and samples.count else None
    step_s, peak = metrics.median_s(run, STEP), metrics.peak_bytes(run)
    capacity = run.environment.memory_bytes if run.environment else None
    between = (
        f"{interval_ms(interval)}, one process"
        if interval
        else f"{counted(samples.count, 'step')}, no interval"
        if samples is not None and samples.count
        else ""
    )
    return (
        Figure(name="a step", value=format_seconds(step_s) if step_s else _UNKNOWN, note=between),
        _rate(run),
        _utilisation(run),
        Figure(
            name="peak memory",
            value=format_bytes(peak) if peak is not None else _UNKNOWN,
            note=f"of {format_bytes(capacity)}" if capacity and peak is not None else "",
        ),
        gravest(run.findings, ended=status_word(run) if run.status != "done" else ""),
    )


def _rate(run: Run) -> Figure:
    """Tokens per second, or samples per second where a batch holds no tokens."""
    tokens, samples = metrics.tokens_per_s(run), metrics.samples_per_s(run)
    if tokens is None and samples is not None:
        return Figure(name="samples per second", value=rate_text(samples))
    return Figure(name="tokens per second", value=rate_text(tokens) if tokens else _UNKNOWN)


def _utilisation(run: Run) -> Figure:
    """MFU; where no peak of the device is known, the rate of the model's FLOPs."""
    for held, of in ((metrics.mfu_datasheet(run), "datasheet's peak"), (metrics.mfu_measured(run), "measured ceiling")):
        if held:
            return Figure(name="MFU", value=share_text(held), note=f"of the {of}")
    rate = metrics.model_flops_per_s(run)
    if rate:
        return Figure(name="model FLOP/s", value=format_rate(rate, "FLOP/s"), note="the device's peak is not known")
    measured = metrics.median_s(run, STEP) is not None
    return Figure(name="MFU", value=_UNKNOWN, note="the FLOPs of a step are not known" if measured else "")


def rate_text(per_second: float) -> str:
    """A rate of tokens or samples: 14,232, or 3.417 where there are few."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.4g}"


def share_text(share: float) -> str:
    """A share as a percentage, which is never rounded to nothing: 41.3 %, 0.008 %."""
    return format_share(share) if share >= 0.001 else f"{share * 100:.1g} %"


def _numerics(run: Run) -> Iterator[Section]:
    """What was observed of the run's precision and of its updates; nothing where nothing was."""
    precision, updates, observation = run.evidence.precision, run.evidence.updates, run.evidence.observation
    rows: list[tuple[Cell, ...]] = []
    notes: list[str] = []
    if precision is not None:
        rows.append(("fp32 matrix products are set to", precision.float32_matmul))
        rows.append(("error of one against float64", f"{precision.probe_relative_error:.1e}"))
        for name, kernels in (("TF32", precision.tf32_kernels), ("true fp32", precision.fp32_kernels)):
            rows += [(f"kernels of products in {name}", counted(len(kernels), "name"))] if kernels else []
    if observation is not None and observation.product_dtypes:
        rows.append(("operands of the forward's products", ", ".join(observation.product_dtypes)))
    if updates is not None:
        rows.append(("updates of the parameters", f"{updates.applied} in {counted(updates.steps, 'measured step')}"))
        if updates.loss_scale is not None:
            rows.append(("scale of the loss after them", f"{updates.loss_scale:,g}"))
        if updates.gradient_norm is not None:
            rows.append(("norm of the last gradients before clipping", f"{updates.gradient_norm:.4g}"))
        if updates.parameters_finite is not None:
            rows.append(("every parameter finite after them", "yes" if updates.parameters_finite else "no"))
        if updates.skipped:
            notes.append(
                f"{counted(updates.skipped, 'update')} did not come: a gradient scaler swallows those of steps whose "
                "gradients overflow."
            )
    habits = run.evidence.habits
    if habits is not None and habits.without_gradient_count:
        rows.append(("parameters without a gradient", f"{habits.without_gradient_count:,}"))
    if rows:
        table = table_of("what", "in this run", rows=rows, notes=as_lines(*notes))
        yield Section(title="Numerics", answer=Answer(study="run", question="", tables=(table,)))


def _environment(where: Environment | None) -> Iterator[Section]:
    """Everything that a figure depends on beside the workload, a line each."""
    if where is None:
        return
    rows: list[tuple[Cell, ...]] = []
    for field, value in msgspec.structs.asdict(where).items():
        if value is None or field in ("before", "after", "during", "host", "versions"):
            continue
        rows.append((_KEYS.get(field) or _in_words(field), _with_unit(field, value)))
    rows += [(name, version) for name, version in where.versions.items()]
    for when in ("before", "after"):
        reading = getattr(where, when)
        if reading is not None:
            quantities = ", ".join(
                f"{_in_words(name)} {_with_unit(name, value)}"
                for name, value in msgspec.to_builtins(reading).items()
                if value not in (None, (), []) and name != "read_at_s"
            )
            rows.append((f"GPU {when} the measured steps", quantities))
    table: Table = table_of("what", "on this machine", rows=rows)
    yield Section(title="Environment", answer=Answer(study="run", question="", tables=(table,)))


_KEYS = {"l2_bytes": "L2 cache", "multiprocessors": "streaming multiprocessors", "cpu_name": "CPU"}
"""Fields of an environment whose names say too little."""
_WORDS = {"sm": "SM", "gpu": "GPU", "cpu": "CPU", "git": "git"}
_OF_FIELDS: dict[str, Callable[[float], str]] = {
    "_bytes": format_bytes,
    "_mhz": lambda value: f"{value:,.0f} MHz",
    "_w": lambda value: f"{value:,.0f} W",
    "_c": lambda value: f"{value:.0f} °C",
    "_s": format_seconds,
}
"""The ends of fields' names that are units, and how a figure in them reads."""


def _in_words(field: str) -> str:
    """The name of a field as words, without its unit."""
    bare = next((field.removesuffix(unit) for unit in _OF_FIELDS if field.endswith(unit)), field)
    return " ".join(_WORDS.get(word, word) for word in bare.split("_"))


def _with_unit(field: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        shown = next((text for unit, text in _OF_FIELDS.items() if field.endswith(unit)), None)
        return shown(value) if shown is not None else f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def commands_of(run: Run) -> list[str]:
    """Commands that measure the same again, as far as options say it; none where a loop was watched."""
    command = run_command(run.workload, run.settings)
    return [command] if command is not None else []


Say = Callable[[str], None]
WillDraw = Callable[[], None]
_SNAPSHOTS = (".pickle", ".pkl", ".pickle.gz", ".pkl.gz")
_DATABASES = (".sqlite", ".sqlite.gz", ".nsys-rep", ".qdstrm", ".db")
_LARGEST_DOCUMENT = 4 << 20
"""Bytes of a document that is read to say what it is; what is larger is taken for a trace."""
_LOOKED_AT = 65_536
"""Bytes of a JSON file that tell whether it is an answer."""


def page_named(names: Sequence[str], runs: Path, say: Say, will_draw: WillDraw | None = None) -> Page:
    """The page of what these names mean; several are the ranks of a job, or runs side by side.

    will_draw: is called before a memory snapshot is read, whose plot needs what takes a while to start.
    Raises InputError where a name means nothing, or what it means cannot be read.
    """
    if len(names) > 1:
        places = [_place(name, runs) for name in names]
        files = [place for place in places if place is not None]
        if len(files) < len(places):
            raise InputError("several names are runs, or captures of ranks: name each set by itself")
        if all(place.is_file() and place.name != RUN_FILE for place in files):
            return _of_ranks(files, [str(file) for file in files], say)
        members, faults = load_runs(files)
        for fault in faults:
            say(f"left out: {fault}")
        return page_of_runs(members, " ".join(names), list(dict.fromkeys(map(str, files))))
    name = names[0]
    place = _place(name, runs)
    if place is None:
        sets = _sets_named(name, runs)
        if len(sets) > 1:
            raise InputError(f"{len(sets)} sets in {runs} match {name!r}: write more of the name")
        return page_of_set(sets[0])
    if place.is_file() and place.name != RUN_FILE:
        return _of_file(place, say, will_draw)
    return _of_directory(place, say, will_draw)


def page_of_comparison(names: Sequence[str], runs: Path, across: Sequence[str], say: Say) -> Page:
    """The page that compares two sides, named as `stepscope compare` takes them."""
    from stepscope.questions.compare import compare_sides, side_named  # noqa: PLC0415  (few pages compare)
    from stepscope.questions.compare_answer import answer_comparison, conclusion  # noqa: PLC0415

    if len(names) != 2:
        raise InputError(f"--compare takes two sides, and these are {len(names)}: the first is the base")
    base, other = (side_named(name, runs) for name in names)
    for fault in (*base.faults, *other.faults):
        say(f"left out: {fault}")
    comparison = compare_sides(base, other, across, "step")

    def digests(pair: "SidePair") -> tuple[TraceDigest | None, TraceDigest | None]:
        before, after = pair.before.representative, pair.after.representative
        return (
            digest_beside(before, pair.before_side.directory(before), "kineto", say=say),
            digest_beside(after, pair.after_side.directory(after), "kineto", say=say),
        )

    answer = answer_comparison(comparison, digests)
    options = f" --across {shlex.quote(','.join(across))}" if across else ""
    options += f" --runs {shlex.quote(str(runs))}" if runs != Path("runs") else ""
    return page_of_answer(
        answer,
        "comparison",
        sentence=conclusion(comparison),
        figures=_figures_of_comparison(comparison, answer),
        shown_by=(f"stepscope compare {shlex.join(names)}{options}",),
    )


def _figures_of_comparison(comparison: "SideComparison", answer: Answer) -> tuple[Figure, ...]:
    """The change with its interval and its processes; of several pairs the largest change."""
    from stepscope.questions.compare_answer import short_names, verdict  # noqa: PLC0415

    changes = [(change, place) for place, change in enumerate(comparison.changes) if change is not None]
    if not changes:
        return (gravest(answer.findings),)
    change, place = max(changes, key=lambda one: abs(one[0].share))
    several = len(comparison.pairs) > 1
    within = change.interval
    return (
        *((Figure(name="pairs", value=f"{len(comparison.pairs)}"),) if several else ()),
        Figure(
            name="largest change" if several else "change",
            value=f"{change.share * 100:+.1f} %",
            note=short_names(comparison)[place],
        ),
        Figure(
            name="its 95 % interval" if several else "95 % interval",
            value=f"{(within.low - 1) * 100:+.1f} to {(within.high - 1) * 100:+.1f} %" if within else "none",
            note=verdict(change, comparison.stands[place]),
        ),
        Figure(name="processes", value=" / ".join(map(str, change.processes)), note="before / after"),
        gravest(answer.findings, note="" if answer.checked else "nothing to doubt was found"),
    )


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


def _of_file(place: Path, say: Say, will_draw: WillDraw | None) -> Page:
    """The page of a snapshot, a stored answer, a prediction or a capture, by the file's name and what it holds."""
    name = place.name.casefold()
    if name.endswith(_SNAPSHOTS):
        if will_draw is not None:
            will_draw()
        return _of_snapshot(place)
    if name.endswith(_DATABASES):
        return _of_capture(place, say)
    try:
        with (gzip.open if place.name.endswith(".gz") else open)(place, "rb") as file:  # type: ignore[operator]
            head = file.read(_LOOKED_AT)
        may_be_answer = b'"study"' in head and b'"traceEvents"' not in head
        is_small = not place.name.endswith(".gz") and place.stat().st_size <= _LARGEST_DOCUMENT
        data = read_document(place) if may_be_answer else place.read_bytes() if is_small else b""
        document = json.loads(data)
    except (OSError, EOFError, ValueError, RecursionError):
        return _of_capture(place, say)
    if may_be_answer and isinstance(document, dict) and {"study", "tables"} <= document.keys():
        return page_of_answer(decode_answer(data, str(place)), "answer")
    first = document[0] if isinstance(document, list) and document else document
    if is_small and isinstance(first, dict):
        if first.keys() >= PREDICTION_KEYS:
            return page_of_prediction(document, str(place))
        other = next((other for other in _OTHERS if other[0] <= first.keys() and "traceEvents" not in first), None)
        if other is not None:
            _, what, remedy = other
            raise InputError(f"{place} is {what} as --json wrote it, which has no page of its own: {remedy}")
    return _of_capture(place, say)


_OTHERS: tuple[tuple[frozenset[str], str, str], ...] = (
    (frozenset({"schema_version", "workload"}), "a run", "name its folder: stepscope report RUN"),
    (frozenset({"before", "after", "pairs"}), "a comparison", "stepscope report BASE OTHER --compare makes its page"),
    (frozenset({"peak_bytes", "estimate"}), "a prediction without its answer", "stepscope fit --json writes it anew"),
    (frozenset({"kernel_times"}), "a trace's figures", "name the trace itself: stepscope report TRACE"),
)
"""What other verbs write by --json, by keys that it has: its name, and what to do instead."""


def _remembered(place: Path) -> tuple["Explained", "Moment", Answer]:
    """A memory snapshot, explained; its peak; and the answer on both."""
    from stepscope.allocations.answer import answer_memory  # noqa: PLC0415  (NumPy takes a while)
    from stepscope.allocations.at_moment import moment_at  # noqa: PLC0415
    from stepscope.allocations.explain import explain  # noqa: PLC0415
    from stepscope.allocations.snapshot import read_snapshot  # noqa: PLC0415

    explained = explain(read_snapshot(place))
    moment = moment_at(explained, None)
    return explained, moment, answer_memory(explained, moment)


def _of_snapshot(place: Path) -> Page:
    explained, moment, answer = _remembered(place)
    largest = next(iter(sorted(moment.categories.items(), key=lambda one: -one[1])), None)
    figures = (
        Figure(name="peak", value=format_bytes(explained.peak_bytes), note="allocated"),
        Figure(
            name="most of it",
            value=largest[0] if largest else "nothing",
            note=format_bytes(largest[1]) if largest else "",
        ),
        Figure(name="allocations alive then", value=f"{moment.alive.height:,}"),
        Figure(name="events", value=f"{len(explained.snapshot.events):,}"),
        gravest(answer.findings, note="of the checks on memory" if answer.checked else "no step to compare with"),
    )
    sentence = next(line.text for table in answer.tables for line in table.notes)
    return page_of_answer(
        answer,
        "snapshot",
        title=f"What takes the memory of {place.name}?",
        sentence=sentence,
        figures=figures,
        shown_by=(f"stepscope memory {shlex.quote(str(place))}",),
    )


def _of_capture(place: Path, say: Say) -> Page:
    summary = load_capture(place, say=say)
    return page_of_capture(summary, check_trace(summary), str(place))


def _of_directory(place: Path, say: Say, will_draw: WillDraw | None) -> Page:
    inside = list(find_run_files(place))
    if len(inside) == 1:
        return _of_run(load_run(inside[0]), inside[0].parent, say, will_draw)
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


def _of_run(run: Run, directory: Path, say: Say, will_draw: WillDraw | None) -> Page:
    """The page of a run with what it recorded; a recording that cannot be read is told, and the run is shown."""
    samples = run.samples.get(STEP)
    if run.status == "done" and not run.artifacts and not (samples is not None and samples.count):
        raise InputError(
            f"{directory}: this run has no samples of a step, so there is nothing to show: measure it again"
        )
    if run.repeat is not None and run.status == "unfinished":
        say(f"{run.id} was started and never ended")
    if will_draw is not None and "memory" in run.artifacts:
        will_draw()
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
            _, _, remembered = _remembered(directory)
        except StepscopeError as error:
            notes.append(f"Its memory snapshot is not shown: {error}")
    return page_of_run(run, captured=captured, digest=digest, remembered=remembered, notes=tuple(notes))


def _of_ranks(captures: list[Path], places: Sequence[str], say: Say) -> Page:
    job = load_job(captures, say=say)
    return page_of_job(job, check_job(job), places, lambda path: load_capture(Path(path), say=say))
