"""A run as an answer: what ran, where, how long, how well, and what to doubt. Lists of runs too."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from stepscope.core.answer import (
    MEASURED_STEP,
    TEXT,
    Answer,
    Cell,
    Finding,
    Frame,
    Line,
    Panel,
    Point,
    Table,
    Tone,
    as_lines,
    table_of,
    text,
    warning,
)
from stepscope.core.environment import Environment
from stepscope.core.errors import printable
from stepscope.core.evidence import Capture, Correctness, Evaluated, RankFigures, RanksEvidence, WatchedLoop
from stepscope.core.figures import MARKS, doubt_mark, doubting_kinds, figure, marked
from stepscope.core.formulas.spelled import cell_name, describe_model, describe_workload
from stepscope.core.formulas.transformer import recomputed_flops
from stepscope.core.parts import PartFound
from stepscope.core.range_names import FORWARD_BACKWARD, PHASES, STEP
from stepscope.core.run import Run
from stepscope.core.samples import CONFIDENCE, FEWEST_FOR_PERCENTILE, OF_ONE_PROCESS, Samples
from stepscope.core.units import counted, format_joules, format_milliseconds, format_rate, format_seconds, format_share
from stepscope.core.workloads import by_sizes
from stepscope.runs import metrics
from stepscope.runs.metrics import communication_tables, computation_of, waits_in_forward

# The nodes of a cluster that measured a sweep's cells, and which of them are unlike the others.


_NODES_NAMED = 3
"""Differences that a sentence names; the others are counted."""


class UnlikeNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node whose environment differs from that of the nodes which measured most cells."""

    name: str
    cells: int
    differences: dict[str, tuple[object, object]]
    """By field, what most have and what this one has."""


def node_of(run: Run) -> str | None:
    """The name of the node that measured the run; None where no cluster did."""
    return run.environment.node if run.environment is not None else None


def unlike_nodes(runs: Sequence[Run]) -> list[UnlikeNode]:
    """The nodes of these runs that are unlike those which measured most of them."""
    environments: dict[str, Environment] = {}
    cells: dict[str, int] = {}
    for run in runs:
        if run.environment is not None and run.environment.node is not None:
            name = run.environment.node
            environments.setdefault(name, run.environment)
            cells[name] = cells.get(name, 0) + 1
    if not environments:
        return []
    alike = {
        name: sum(cells[other] for other, found in environments.items() if not environment.differences(found))
        for name, environment in environments.items()
    }
    most = environments[max(environments, key=lambda name: alike[name])]
    return [
        UnlikeNode(name=name, cells=cells[name], differences=differences)
        for name, environment in environments.items()
        if (differences := most.differences(environment))
    ]


def nodes_findings(runs: Sequence[Run]) -> Iterable[Finding]:
    """A finding for each node that is unlike the others."""
    for node in unlike_nodes(runs):
        told = [f"{field} {_said(here)}, not {_said(most)}" for field, (most, here) in node.differences.items()]
        more = f" and {len(told) - _NODES_NAMED} more" if len(told) > _NODES_NAMED else ""
        yield warning(
            "unlike-node",
            f"Node {node.name}, which measured {counted(node.cells, 'cell')}, is unlike the others: "
            f"{'; '.join(told[:_NODES_NAMED])}{more}.",
            {"node": node.name, "cells": node.cells},
            "Compare its cells with one another, or measure all cells on nodes of one kind.",
        )


def _said(value: object) -> str:
    return "none" if value is None else str(value)


# A sweep while it runs.


@dataclass(frozen=True, kw_only=True)
class ProgressRow:
    """A cell of a sweep as it stands."""

    name: str
    state: str
    stage: str
    run: Run | None
    resumed: bool

    @property
    def step(self) -> str:
        """What a step of it takes; empty where that is not known."""
        step_s = metrics.median_s(self.run, STEP) if self.run else None
        return marked(f"step {format_seconds(step_s)}", self.run) if self.run and step_s else ""


def sweep_progress(
    rows: Sequence[ProgressRow], seconds_left: float | None, height: int | None = None
) -> tuple[str, Table]:
    """How much of a sweep is done, and its cells with their states; a low screen has those round the one measured."""
    ended = sum(1 for row in rows if row.run is not None)
    fit = len(rows) if height is None else max(3, height - 5)  # summary, head, rule, two blank lines
    current = next((i for i, row in enumerate(rows) if row.state == "measuring"), ended)
    first = max(0, min(current - fit // 2, len(rows) - fit))
    cells: list[tuple[Cell, ...]] = []
    tones: dict[int, Tone] = {}
    for i, row in enumerate(rows[first : first + fit]):
        if row.run is None:
            state = row.stage or row.state
            tones[i] = "strong" if row.state == "measuring" else "aside"
        else:
            state = f"{status_word(row.run)}{', found on disk' if row.resumed else ''}"
            tones[i] = "" if row.run.status == "done" else "bad"
        cells.append((row.name, state, row.step))
    table = table_of("cell", "state", "step", rows=cells, tones=tones)
    return f"{ended} of {len(rows)} cells{_time_left(seconds_left)}", table


def ended_cell_sentence(rows: Sequence[ProgressRow], index: int, seconds_left: float | None) -> str:
    """One line for a cell that has ended."""
    row = rows[index]
    assert row.run is not None
    result = row.step if row.run.status == "done" else status_sentence(row.run)
    more = " (already measured)" if row.resumed else _time_left(seconds_left)
    return f"[{index + 1}/{len(rows)}] {row.name}: {result}{more}"


def _time_left(seconds: float | None) -> str:
    if not seconds:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f", about {f'{minutes} min ' if minutes else ''}{rest} s left"


# What a run says of the ranks that shared its step: a table with a row each, and how they were taken together.


_BEHIND = 1.05
"""A rank whose own phases take so many times the median of all is named."""


def ranks_table(run: Run) -> Table:
    """A row a rank: its own times, and what it keeps of the model; empty for a step of one process."""
    shared = run.shared
    if shared is None:
        return Table(title="", columns=("rank",), rows=())
    parts = [name for name in run.samples if name not in (STEP, "host")]
    has_peaks = any(_peak(figures) is not None for figures in shared.ranks)
    rows: list[tuple[Cell, ...]] = []
    for figures in shared.ranks:
        medians = [figures.samples[name].median_s if name in figures.samples else None for name in parts]
        peak = (_peak(figures),) if has_peaks else ()
        rows.append((
            figures.rank, figures.host, _median_s(figures, STEP), *medians, figures.parameter_bytes,
            figures.optimizer_bytes, *peak,
        ))  # fmt: skip
    return table_of(
        "rank", ("host", TEXT), ("step", "s"), *((name, "s") for name in parts), ("parameters", "B"),
        ("optimizer state", "B"), *((("peak", "B"),) if has_peaks else ()), rows=rows, title="ranks",
        notes=as_lines(*_about(run, shared)),
    )  # fmt: skip


def _cut_for_the_check(right: Correctness) -> list[str]:
    """What of the step was made smaller before it was held against one process, in words."""
    return [
        *([counted(right.layers, "layer")] if right.layers is not None else []),
        *([counted(right.batch_size, "sequence")] if right.batch_size is not None else []),
        *([f"{right.seq_len:,} tokens a sequence"] if right.seq_len is not None else []),
        *([f"a vocabulary of {right.vocabulary:,}"] if right.vocabulary is not None else []),
    ]


def _about(run: Run, shared: RanksEvidence) -> Iterator[str]:
    hosts = len({figures.host for figures in shared.ranks})
    threads = f", each on {counted(shared.threads, 'CPU thread')}" if shared.threads else ""
    lasts = "from the earliest start to the latest end" if shared.one_host else "as long as its longest rank"
    yield (
        f"{counted(len(shared.ranks), 'rank')} on {counted(hosts, 'host')} share each step by {run.workload.parallel} "
        f"over {shared.backend}{threads}. A step lasts {lasts}; the phases above are those of rank 0."
    )
    if (right := shared.correct) is not None:
        of = f", of {', '.join(cut)}" if (cut := _cut_for_the_check(right)) else ""
        losses = ""
        if right.loss_error is not None and right.loss_spread is not None:
            losses = f", losses under AdamW by {right.loss_error:.2g} ({right.loss_spread:.2g})"
        yield (
            f"Held against one process on the same batch{of}: gradients differ by {right.gradient_error:.2g} (rounding "
            f"makes {right.gradient_spread:.2g}), parameters after {right.steps} steps of SGD by "
            f"{right.update_error:.2g} ({right.update_spread:.2g}){losses}."
        )
    if shared.start_s is not None:
        yield f"They had met {format_seconds(shared.start_s)} after the first was started."
    if waits_in_forward(run):
        alone, what = computation_of(shared), "what it computes in the profiled step, without any wait,"
    else:
        alone = [(figures.rank, time) for figures in shared.ranks if (time := _median_s(figures, "forward"))]
        what = "its forward, in which it waits for nobody,"
    if len(alone) > 1:
        times = sorted(time for _, time in alone)
        middle = times[(len(times) - 1) // 2]
        slowest, time = max(alone, key=lambda one: one[1])
        if time > middle * _BEHIND:
            yield f"Rank {slowest} computes slowest: {what} takes {format_share(time / middle - 1)} longer."


def _median_s(figures: RankFigures, part: str) -> float | None:
    samples = figures.samples.get(part)
    return samples.median_s if samples is not None else None


def _peak(figures: RankFigures) -> int | None:
    return figures.memory.allocated_peak if figures.memory is not None else None


# A run in words: its status, its doubts, and which run it is.


OUT_OF_MEMORY_REMEDY = "a smaller --batch-size or --seq-len, --attention sdpa, or --dtype bf16 needs less memory"
_OF_USER_MODEL = "a smaller batch or model, --checkpointing every-1, or --dtype bf16 needs less memory"


def identify(run: Run) -> str:
    """One line: which run this is, and what lies beside it."""
    commit = run.environment.git_commit if run.environment else None
    dirty = ", changed since" if run.environment and run.environment.git_dirty else ""
    own = run.environment.own_commit if run.environment else None
    own_dirty = ", changed since" if run.environment and run.environment.own_dirty else ""
    parts = [
        f"Run {run.id}",
        f"tag {run.tag}" if run.tag else "",
        f"stepscope at {commit[:10]}{dirty}" if commit else "",
        f"own code at {own[:10]}{own_dirty}" if own else "",
        *run.artifacts.values(),
    ]
    return printable("; ".join(part for part in parts if part))


def status_sentence(run: Run) -> str:
    """What became of a run that is not done."""
    if run.failure is None:
        return f"{run.status}: the run was started and never ended."
    remedy = (
        f" Remedy: {OUT_OF_MEMORY_REMEDY if run.workload.layers else _OF_USER_MODEL}."
        if run.status == "out-of-memory"
        else ""
    )
    return printable(f"{run.status} ({run.failure.where}): {run.failure.message}{remedy}")


def status_in_short(run: Run) -> str:
    """What became of a run that is not done, without the message of a library, which may be long."""
    if run.failure is None or run.status != "out-of-memory":
        return status_sentence(run)
    where = run.environment.limited_device if run.environment else "the device"
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ [KMGT]i?B)", run.failure.message)
    wanted = f": {asked[1]} more were asked for" if asked else ""
    return printable(f"Out of memory on {where}, in {run.failure.where}{wanted}.")


def status_word(run: Run) -> str:
    """The status as it stands in a cell."""
    return "OOM" if run.status == "out-of-memory" else run.status


def doubts(run: Run) -> str:
    """The kinds of finding that say to take care, for a cell."""
    return printable(", ".join(doubting_kinds(run)))


# Times of phases as rows of a table, and what their intervals mean. Of a run, or of any work that was timed alone.


def time_table(
    timed: Mapping[str, Samples], notes: Iterable[str], rates: Mapping[str, float | None] | None = None
) -> Table:
    """A row for each of the parts that was timed: median, interval, mean, and share of the step.

    Percentiles have a column where there is one. rates: the FLOP/s of each part, for a column of its own.
    """
    named = {name: samples for name, samples in timed.items() if any(samples.values_s)}
    step_s = named[STEP].median_s if STEP in named else None
    shown = [head for head in FEWEST_FOR_PERCENTILE if any(samples.percentile_s(head) for samples in named.values())]
    rows: list[tuple[Cell, ...]] = []
    for name, samples in named.items():
        percentiles = [samples.percentile_s(head) for head in shown]
        rate = [] if rates is None else [rates.get(name)]
        share = samples.median_s / step_s if step_s and samples.median_s is not None else None
        rows.append((name, samples.median_s, _interval(samples), _mean(samples), *percentiles, share, *rate))
    return table_of(
        "phase", ("median", "s"), (f"{CONFIDENCE * 100:.0f} % interval", TEXT), ("mean ± std", TEXT),
        *((head, "s") for head in shown), ("share", "%"), *([] if rates is None else [("model FLOP/s", "FLOP/s")]),
        rows=rows, tones={i: "strong" for i, row in enumerate(rows) if row[0] == STEP}, notes=as_lines(*notes),
    )  # fmt: skip


def _interval(samples: Samples) -> str:
    interval = samples.interval()
    return f"{format_milliseconds(interval.low)} to {format_milliseconds(interval.high)} ms" if interval else ""


def _mean(samples: Samples) -> str:
    deviation = f" ± {format_milliseconds(samples.stdev_s)}" if samples.stdev_s is not None else ""
    return f"{format_milliseconds(samples.mean_s or 0)}{deviation} ms"


def about_steps(samples: Samples, steady: bool | None) -> str:
    """How many steps were measured after how many warm-up steps."""
    words = {True: "steady", False: "not steady", None: "too few to tell whether steady"}[steady]
    return (
        f"{counted(samples.count, 'step')} {OF_ONE_PROCESS} measured after "
        f"{counted(len(samples.warmup_s), 'warm-up step')} ({words})"
    )


def about_intervals(named: Mapping[str, Samples], more: str) -> list[str]:
    """What the intervals are of, or why there is none, and what to do for `more` steps."""
    without = {name: samples for name, samples in named.items() if samples.count and samples.why_no_interval}
    lines: list[str] = []
    if len(without) < len(named):
        step = named.get(STEP)
        told = step is not None and step.effective_count is not None and STEP not in without
        worth = f"; its steps are worth {step.effective_count:.0f} independent ones" if step and told else ""
        lines.append(f"The intervals are those {OF_ONE_PROCESS}: another may differ by more{worth}.")
    if without:
        name, samples = list(without.items())[-1]
        lines.append(f"No interval for {', '.join(without)}: of {name}, {samples.why_no_interval}. Take more: {more}.")
    return lines


def answer_times(samples: Mapping[str, Samples], steady: bool | None, where: Environment) -> Answer:
    """The Answer on work that was timed alone: its phases by name, and the step that they make up."""
    step = samples[STEP]
    named = {name: found for name, found in samples.items() if name not in (STEP, "host")}
    clocks = ", ".join(dict.fromkeys(found.clock for found in named.values()))
    notes = (
        f"{about_steps(step, steady)}; step by {step.clock} round a synchronised region, phases by {clocks}.",
        *about_intervals({**named, STEP: step}, "steps=N"),
    )
    table = time_table({**named, STEP: step}, notes)
    return Answer(
        study="measure",
        question=f"How long {'do' if len(named) > 1 else 'does'} {' and '.join(named)} take?",
        device=where.device_name,
        versions=where.versions,
        lead=as_lines(where.described),
        tables=(table,),
    )


_DRAWN_STEPS = 400
"""Points of a curve of steps: about what a screen tells apart."""
_NAMED = 4
"""Operators that are named where their FLOPs are not known; the others are counted."""


def answer_run(run: Run, directory: str | None = None) -> Answer:
    """The whole run as one would explain it."""
    tables: list[Table] = []
    if run.status != "done" or run.failure is not None:
        tables.append(text(Line(status_sentence(run), "bad")))
    if run.samples.get(STEP) and run.samples[STEP].count:
        tables.append(_phase_table(run))
    if run.shared is not None:
        tables += [ranks_table(run), *communication_tables(run)]
    tables += _memory_table(run)
    return Answer(
        study="run",
        question=f"What does a step of {cell_name(run.workload)} take?",
        device=run.environment.device_name if run.environment else "",
        versions=run.environment.versions if run.environment else {},
        lead=heading(run),
        date=run.day,
        tables=tuple(tables),
        panels=(*_phase_panel(run), *_samples_panel(run)),
        findings=run.findings,
        checked=bool(run.findings) or (run.status == "done" and run.failure is None),
        asides=(*(f"Not observed: {note}." for note in run.evidence.notes), *_later(run)),
        origin=(identify(run), *([f"Saved in {directory}"] if directory else [])),
    )


def heading(run: Run) -> tuple[Line, ...]:
    """The model, the workload, and where it ran."""
    where = [run.environment.described] if run.environment else []
    loop = run.evidence.loop
    step = [_watched_step(loop)] if loop else []
    trainable = loop.trainable if loop else None
    return as_lines(
        Line(describe_model(run.workload, trainable), "strong"), describe_workload(run.workload), *step, *where
    )


def _later(run: Run) -> list[str]:
    """What ended a watched loop after its steps were measured."""
    ended_by = run.evidence.loop.ended_by if run.evidence.loop is not None else None
    if ended_by is None:
        return []
    return [printable(f"The loop ended with an exception after the measured steps, which are whole: {ended_by}")]


def _watched_step(loop: WatchedLoop) -> str:
    """What was taken for a step of a watched loop, and why."""
    optimizers = _optimizers(loop)
    ends = f"ends with a step of {optimizers[0]}" if optimizers else "ends where the loop says so"
    if loop.in_backward:
        ends = f"ends with a backward, in which {counted(loop.in_backward, 'optimizer')} step"
    also = "also step" if len(optimizers) > 2 else "also steps"
    others = f", in which {' and '.join(optimizers[1:])} {also}" if optimizers[1:] else ""
    forwards = _forwards(loop)
    autocast = f", autocast to {loop.autocast}" if loop.autocast else ""
    times = counted(loop.evaluations, "time")
    closure = f"; {loop.optimizers[0]} evaluates its closure {times}" if loop.evaluations else ""
    backwards = counted(loop.backwards, "backward")
    return f"A step {ends}{others} ({loop.why}): {forwards}{autocast}, {backwards}{closure}.{_unlike(loop)}"


def _optimizers(loop: WatchedLoop) -> list[str]:
    """The optimizers by their classes; where there are several, with their models and how often each steps."""
    if len(loop.optimizers) < 2 or not loop.optimizer_models:
        return list(loop.optimizers)
    named: Counter[str] = Counter()
    for name, models, steps in zip(loop.optimizers, loop.optimizer_models, loop.optimizer_steps, strict=True):
        named[f"{name}{f' of {models}' if models else ''}"] += steps
    return [f"{name}{f' ({steps} times)' if steps > 1 else ''}" for name, steps in named.items()]


def _forwards(loop: WatchedLoop) -> str:
    """The calls of each module that are forward."""
    if not loop.modules:
        return "no module is called that trains"
    if not loop.module_forwards:
        return f"{counted(loop.forwards, 'forward')} of {' and '.join(loop.modules)}"
    calls: Counter[str] = Counter()
    for name, times in zip(loop.modules, loop.module_forwards, strict=True):
        calls[name] += times
    return ", ".join(f"{counted(times, 'forward')} of {name}" for name, times in calls.items())


def _unlike(loop: WatchedLoop) -> str:
    """What the timed steps ran, where they differ from each other."""
    between = {"backwards": loop.backwards_between}
    if loop.forwards_between != loop.backwards_between:
        between = {"forwards": loop.forwards_between, **between}
    ran = [f"{found[0]} to {found[1]} {name}" for name, found in between.items() if found and found[0] != found[1]]
    return f" Those timed ran {' and '.join(ran)} each." if ran else ""


def answer_list(runs: Sequence[Run]) -> Answer:
    """One line a run, oldest first: when it began, which names it too, and which cell it measured."""
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        began, _, cell = run.id.partition("-")
        rows.append((
            began, cell, status_word(run), figure(metrics.median_s(run, STEP), run), run.tag,
            figure(metrics.tokens_per_s(run), run), figure(metrics.peak_bytes(run), run), doubts(run),
        ))  # fmt: skip
    columns = ("run", "cell", "status", ("step", "s"), "tag", ("tokens/s", ",.0f"), ("peak", "B"), "findings")
    return Answer(study="ls", question="", tables=(table_of(*columns, rows=rows, one_line=True),))


def answer_cells(runs: Sequence[Run], folder: str | None = None) -> Answer:
    """The cells of a sweep, in the order they ran; with their nodes, where they are those of a cluster."""
    unlike = {node.name for node in unlike_nodes(runs)}
    nodes = [node_of(run) for run in runs]
    on_nodes = any(nodes)
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        name = cell_name(run.workload, run.settings)
        if run.status != "done":
            rows.append((name, status_word(run), *[None] * 7))
            continue
        times = [metrics.median_s(run, phase) for phase in (*PHASES, STEP)]
        tokens, peak = metrics.tokens_per_s(run), metrics.peak_bytes(run)
        utilisation = metrics.mfu_datasheet(run) or metrics.mfu_measured(run)
        rows.append((name, *(figure(cell, run) for cell in (*times, tokens, utilisation, peak)), doubts(run)))
    table = table_of(
        "cell", *((f"{name} ms", "ms of s") for name in (*PHASES, STEP)), ("tokens/s", ",.0f"),
        ("MFU", "%"), ("peak", "B"), "findings", *(["node"] if on_nodes else []),
        rows=[
            (*row, *([f"{node} {MARKS['warning']}" if node in unlike else node] if on_nodes else []))
            for row, node in zip(rows, nodes, strict=True)
        ],
        tones={i: "bad" for i, run in enumerate(runs) if run.status != "done"},
        notes=as_lines(_how_many(runs, folder)) if runs and folder else (),
    )  # fmt: skip
    return Answer(study="sweep", question="", tables=(table,), findings=tuple(nodes_findings(runs)))


def _how_many(runs: Sequence[Run], folder: str) -> str:
    """How many cells were measured, what became of the others, and where the runs are."""
    ends = Counter(status_word(run) for run in runs)
    measured = ends.pop("done", 0)
    if not ends:
        return f"{counted(measured, 'run')} in {folder}"
    others = ", ".join(f"{count} {word}" for word, count in ends.items())
    return f"{measured} of {counted(len(runs), 'cell')} measured, {others}; runs in {folder}"


def _phase_table(run: Run) -> Table:
    timed = _timed(run)
    flops = {name: work.flops for name, work in run.work.items()} | {STEP: metrics.model_flops(run)}
    rates = {name: found / at.median_s for name, at in timed.items() if (found := flops.get(name)) and at.median_s}
    return time_table(timed, _rates(run), rates)


def _phase_panel(run: Run) -> tuple[Panel, ...]:
    """A bar for each phase and the step, with the interval of its median."""
    timed = _timed(run).items()
    points = tuple(bar("median", name, samples, doubted=bool(doubt_mark(run))) for name, samples in timed)
    return (Panel(x_title="", y_title="median, ms", points=points, kind="bars"),) if points else ()


def _samples_panel(run: Run) -> tuple[Panel, ...]:
    """The time of every measured step and of its parts, in the order in which they ran."""
    timed = {name: samples.values_s for name, samples in _timed(run).items() if samples.count > 1}
    together = max((math.ceil(len(values) / _DRAWN_STEPS) for values in timed.values()), default=1)
    points = tuple(
        Point(line=name, x=float(place + 1), y=statistics.fmean(values[place : place + together]) * 1e3)
        for name, values in timed.items()
        for place in range(0, len(values), together)
    )
    note = f"a point is the mean of {together} steps in a row" if together > 1 else ""
    frame = Frame(heading="Every measured step", note=note, line_title="part of the step")
    panel = Panel(x_title=MEASURED_STEP, y_title="ms", points=points, x_log=False, y_log=False, frame=frame)
    return (panel,) if points else ()


def _timed(run: Run) -> dict[str, Samples]:
    """The samples of the step and its parts, without those of a part that there never was."""
    names = (*metrics.parts_of(run), STEP)
    return {name: found for name in names if (found := run.samples.get(name)) and any(found.values_s)}


def bar(line: str, name: str, samples: Samples | None, *, missing: str = "", doubted: bool = False) -> Point:
    """The median of samples in milliseconds, with its interval; marked with `missing` where there is none."""
    if samples is None or samples.median_s is None:
        return Point(line=line, name=name, y=0.0, missing=missing or "not measured")
    interval = samples.interval()
    low, high = (interval.low * 1e3, interval.high * 1e3) if interval else (None, None)
    return Point(line=line, name=name, y=samples.median_s * 1e3, low=low, high=high, doubted=doubted)


def _rates(run: Run) -> list[str]:
    samples = run.samples[STEP]
    lines = [
        f"{about_steps(samples, run.warmup_steady)}; {_clocks(run)}.",
        *about_intervals(_timed(run), "--steps"),
    ]
    flops = metrics.model_flops(run)
    lines += _throughput(run)
    loop = run.evidence.loop
    if loop is not None and loop.evaluated is not None:
        lines.append(_evaluated(loop.evaluated))
    if loop is not None and loop.saved is not None:
        lines.append(printable(f"{loop.saved}."))
    again = by_sizes(run.workload, recomputed_flops) or 0
    if again and flops and samples.median_s:
        lines.append(
            f"Checkpointing runs another {format_rate(again, 'FLOP')} of products again in backward: "
            f"{format_rate((flops + again) / samples.median_s, 'FLOP/s')} of hardware FLOPs."
        )
    utilisation = []
    datasheet, measured = metrics.mfu_datasheet(run), metrics.mfu_measured(run)
    dtype = run.workload.dtype
    if datasheet and run.device_spec:
        peak = run.device_spec.peak_for(dtype) or 0
        utilisation.append(
            f"{_utilisation(datasheet)} of the peak {format_rate(peak, 'FLOP/s')} ({run.device_spec.source})"
        )
    ceiling = run.ceilings.matmul_for(dtype) if run.ceilings else None
    if measured and ceiling:
        utilisation.append(
            f"{_utilisation(measured)} of the measured ceiling {format_rate(ceiling.rate, 'FLOP/s')} "
            f"({ceiling.operation})"
        )
    if utilisation:
        lines.append(f"MFU {'; '.join(utilisation)}.")
    lines += _energy_and_clocks(run)
    if run.evidence.uncounted:
        lines.append(_uncounted(run.evidence.uncounted))
    launch_bound, host = metrics.launch_bound_share(run), metrics.host_share(run)
    if launch_bound is not None and host is not None and run.evidence.profile:
        lines.append(
            f"{run.evidence.profile.kernel_launches} kernels a step; the GPU has none to run for "
            f"{format_share(launch_bound)} of it. The host is done issuing them after {format_share(host)} "
            "(and waits itself where its queue to a busy GPU is full)."
        )
    slowdown = metrics.profiler_slowdown(run)
    if slowdown and run.evidence.profile:
        lines.append(
            f"Step {format_seconds(samples.median_s or 0)}, under the profiler "
            f"{format_seconds(run.evidence.profile.step_s)} ({slowdown:.2f}x)."
        )
    lines += [line for capture in run.evidence.captures if (line := _capture_line(capture, samples.median_s))]
    if run.evidence.attention:
        lines.append(f"Attention auto picked {run.evidence.attention}.")
    if run.evidence.parts:
        lines.append(_by_other_kernels(run.evidence.parts))
    if run.evidence.profile and run.evidence.profile.attention_operators:
        lines.append(f"Attention ran as {', '.join(run.evidence.profile.attention_operators)}.")
    return lines


def _throughput(run: Run) -> list[str]:
    """Tokens a second, or samples where the batch holds no tokens, and model FLOPs a second; each where it is known."""
    tokens, each = metrics.tokens_per_s(run), metrics.samples_per_s(run)
    rate, flops = metrics.model_flops_per_s(run), metrics.model_flops(run)
    said: list[str] = []
    if tokens:
        said.append(f"{tokens:,.0f} tokens/s")
    elif each:
        said.append(f"{each:,.{0 if each >= 100 else 2}f} samples/s")
    if rate and flops:
        convention = next(iter(run.work.values())).convention
        said.append(f"{format_rate(rate, 'FLOP/s')} of model FLOPs ({format_rate(flops, 'FLOP')} a step, {convention})")
    return [f"{'; '.join(said)}."] if said else []


def _evaluated(evaluated: Evaluated) -> str:
    """The calls with gradients off, where they are, and whether the times of the table hold them."""
    what = f"evaluation of {' and '.join(evaluated.modules)} (calls with gradients off)"
    where = f" at {evaluated.where}" if evaluated.where else ""
    took, steps = format_seconds(evaluated.median_s), counted(evaluated.steps, "step")
    if evaluated.is_part_of_a_step:
        return printable(f"{steps} of {evaluated.of} hold {took} of {what}{where}.")
    return printable(f"{steps} of {evaluated.of} took {took} more: {what}{where}. The times above are without it.")


def _by_other_kernels(found: Sequence[PartFound]) -> str:
    """Which modules of a user's model other kernels compute, and which parts it has not. Modules that were left are a
    finding."""
    taken = [f"{one.modules} {one.type} by {one.kernels} {one.part}" for one in found if one.replaced]
    absent = [f"{one.part}, since {one.why.replace('it has', 'the model has')}" for one in found if not one.modules]
    stays = f" Left as the model has it: {'; '.join(absent)}." if absent else ""
    return printable(f"Computed by other kernels, each held against its own code first: {', '.join(taken)}.{stays}")


def _energy_and_clocks(run: Run) -> list[str]:
    """Joules a step with whose they are, and the GPU's state while the steps ran."""
    lines: list[str] = []
    energy, joules, each = run.evidence.energy, metrics.joules_per_step(run), metrics.joules_per_token(run)
    if energy is not None and joules is not None:
        whose = "the whole GPU" if energy.of == "gpu" else "the processor's packages, without memory"
        more = "" if energy.are_samples else " that ran after those"
        lines.append(
            f"{format_joules(joules)} a step{f', {format_joules(each)} a token' if each else ''}, by the counter of "
            f"{whose} over {counted(energy.steps, 'step')}{more} in {format_seconds(energy.duration_s)}: "
            f"{format_rate(energy.energy_j / energy.duration_s, 'W')}."
        )
    during = run.environment.during if run.environment else None
    if during is not None:
        named = (
            ("SM clock", during.sm_clock_mhz, "MHz"),
            ("power", during.power_w, "W"),
            ("temperature", during.temperature_c, "°C"),
        )
        states = [
            f"{name} {extent.median:,.0f} {unit} ({extent.lowest:,.0f} to {extent.highest:,.0f})"
            for name, extent, unit in named
            if extent is not None
        ]
        if states:
            often = f"{counted(during.count, 'reading')}, one every {format_seconds(during.period_s)}"
            lines.append(f"While the steps ran: {', '.join(states)}; medians of {often}.")
    return lines


def _clocks(run: Run) -> str:
    """What timed the step and its phases."""
    clock, loop = run.samples["step"].clock, run.evidence.loop
    if loop is None:
        return f"step by {clock} round a synchronised region, phases by {_phase_clock(run)}"
    spans, which = loop.timed_steps, ""
    if not spans and loop.first_step is not None:
        spans = ((loop.first_step, loop.first_step + run.samples["step"].count - 1),)
    if spans:
        named = [f"{first} to {last}" if last > first else f"{first}" for first, last in spans]
        which = f", number{'s' if spans[0][1] > spans[0][0] or len(spans) > 1 else ''} {' and '.join(named)}"
    return f"all by {clock}, from the end of a step to the end of the next, with nothing synchronised{which}"


def _utilisation(share: float) -> str:
    """A share of a device's rate, with its doubt where no device does so much."""
    return (
        f"{format_share(share)}{' (more than there is: the count of FLOPs or the peak is wrong)' if share > 1 else ''}"
    )


def _uncounted(calls: dict[str, int]) -> str:
    """What the count of FLOPs leaves out, the most called first."""
    most = sorted(calls, key=lambda name: -calls[name])
    named = [f"{printable(name)} ({counted(calls[name], 'call')})" for name in most[:_NAMED]]
    others = f" and {len(most) - _NAMED} others" if len(most) > _NAMED else ""
    return f"The FLOPs of {', '.join(named)}{others} are not known: there are more than were counted."


def _capture_line(capture: Capture, unprofiled_s: float | None) -> str:
    """What watching cost beside what the step takes unwatched; or why there is no trace."""
    if capture.failure:
        return printable(f"No {capture.tool} trace: {capture.failure}.")
    if not capture.step_s or not unprofiled_s:
        return ""
    return printable(
        f"Step {format_seconds(unprofiled_s)}, in the {capture.tool} trace of {counted(capture.steps, 'step')} "
        f"{format_seconds(capture.step_s)} ({capture.step_s / unprofiled_s:.2f}x)."
    )


def _phase_clock(run: Run) -> str:
    return next((run.samples[name].clock for name in metrics.parts_of(run)), "none")


def _memory_table(run: Run) -> list[Table]:
    memory = run.evidence.memory
    if memory is None:
        return []
    kept = "at most" if FORWARD_BACKWARD in run.samples else "when forward ends"
    rows = (
        ("parameters", memory.parameter_bytes),
        ("before the step: parameters, optimizer state, batches", memory.after_parameters),
        ("peak during forward", memory.forward_peak),
        ("peak while forward and backward take turns", memory.turns_peak),
        (f"saved for backward {kept}", memory.saved_for_backward),
        ("peak during backward", memory.backward_peak),
        ("peak during the optimizer step", memory.optimizer_peak),
        ("reserved by the allocator at most", memory.reserved_peak),
    )
    return [table_of("memory", ("allocated", "B"), rows=[row for row in rows if row[1] is not None])]
