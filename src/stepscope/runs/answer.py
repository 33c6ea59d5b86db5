"""A run as an answer: what ran, where, how long, how well, and what to doubt. Lists of runs too."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from stepscope.core import answer
from stepscope.core.environment import Environment
from stepscope.core.errors import printable
from stepscope.core.evidence import RankFigures, RanksEvidence, WatchedLoop
from stepscope.core.figures import MARKS, doubt_mark, doubting_kinds, figure, marked
from stepscope.core.formulas.spelled import cell_name, describe_model, describe_workload
from stepscope.core.formulas.transformer import recomputed_flops
from stepscope.core.range_names import FORWARD_BACKWARD, PHASES, STEP
from stepscope.core.run import Run
from stepscope.core.samples import CONFIDENCE, FEWEST_FOR_PERCENTILE, OF_ONE_PROCESS, Interval, Samples
from stepscope.core.units import counted, format_joules, format_milliseconds, format_rate, format_seconds, format_share
from stepscope.core.workloads import by_sizes
from stepscope.runs import metrics
from stepscope.runs.metrics import communication_tables, waits_in_forward

# The nodes of a cluster that measured a sweep's cells, and which of them are unlike the others.


_NODES_NAMED = 3
"""Differences that a sentence names; the others are counted."""


class UnlikeNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node whose environment differs from that of the nodes which measured most cells."""

    name: str
    cells: int
    differences: dict[str, tuple[object, object]]
    """By field, what most have and what this one has."""

    @property
    def finding(self) -> answer.Finding:
        """What it differs in, and from how many cells."""
        words = [
            f"{field} {'none' if here is None else here}, not {'none' if most is None else most}"
            for field, (most, here) in self.differences.items()
        ]
        more = f" and {len(words) - _NODES_NAMED} more" if len(words) > _NODES_NAMED else ""
        return answer.warning(
            "unlike-node",
            f"Node {self.name}, which measured {counted(self.cells, 'cell')}, is unlike the others: "
            f"{'; '.join(words[:_NODES_NAMED])}{more}.",
            {"node": self.name, "cells": self.cells},
            "Compare its cells with one another, or measure all cells on nodes of one kind.",
        )


def unlike_nodes(runs: Sequence[Run]) -> list[UnlikeNode]:
    """The nodes of these runs that are unlike those which measured most of them."""
    environments: dict[str, Environment] = {}
    cells: Counter[str] = Counter()
    for run in runs:
        if run.environment is not None and run.environment.node is not None:
            environments.setdefault(run.environment.node, run.environment)
            cells[run.environment.node] += 1
    if not environments:
        return []

    def cells_alike(environment: Environment) -> int:
        return sum(cells[name] for name, other in environments.items() if not environment.differences(other))

    most = max(environments.values(), key=cells_alike)
    return [
        UnlikeNode(name=name, cells=cells[name], differences=differences)
        for name, environment in environments.items()
        if (differences := most.differences(environment))
    ]


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
) -> tuple[str, answer.Table]:
    """How much of a sweep is done, and its cells with their states; a low screen has those round the one measured."""
    ended = sum(1 for row in rows if row.run is not None)
    fit = len(rows) if height is None else max(3, height - 5)  # summary, head, rule, two blank lines
    current = next((i for i, row in enumerate(rows) if row.state == "measuring"), ended)
    first = max(0, min(current - fit // 2, len(rows) - fit))
    cells: list[tuple[answer.Cell, ...]] = []
    tones: dict[int, answer.Tone] = {}
    for i, row in enumerate(rows[first : first + fit]):
        if row.run is None:
            state = row.stage or row.state
            tones[i] = "strong" if row.state == "measuring" else "aside"
        else:
            state = f"{status_word(row.run)}{', found on disk' if row.resumed else ''}"
            tones[i] = "" if row.run.status == "done" else "bad"
        cells.append((row.name, state, row.step))
    table = answer.table_of("cell", "state", "step", rows=cells, tones=tones)
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


def ranks_table(run: Run) -> answer.Table:
    """A row a rank: its own times, and what it keeps of the model; empty for a step of one process."""
    shared = run.shared
    if shared is None:
        return answer.Table(title="", columns=("rank",), rows=())
    times = [STEP, *(name for name in run.samples if name not in (STEP, "host"))]
    peaks = [figures.memory.allocated_peak if figures.memory else None for figures in shared.ranks]
    has_peaks = any(peak is not None for peak in peaks)
    rows: list[tuple[answer.Cell, ...]] = [
        (
            figures.rank,
            figures.host,
            *(_rank_median_s(figures, name) for name in times),
            figures.parameter_bytes,
            figures.optimizer_bytes,
            *((peak,) if has_peaks else ()),
        )
        for figures, peak in zip(shared.ranks, peaks, strict=True)
    ]
    return answer.table_of(
        "rank", ("host", answer.TEXT), *((name, "s") for name in times), ("parameters", "B"), ("optimizer state", "B"),
        *((("peak", "B"),) if has_peaks else ()), rows=rows, title="ranks",
        notes=answer.as_lines(*_about_ranks(run, shared)),
    )  # fmt: skip


def _about_ranks(run: Run, shared: RanksEvidence) -> Iterator[str]:
    """How the ranks were taken together, whether they compute what one process does, and which computes slowest."""
    hosts = len({figures.host for figures in shared.ranks})
    threads = f", each on {counted(shared.threads, 'CPU thread')}" if shared.threads else ""
    lasts = "from the earliest start to the latest end" if shared.one_host else "as long as its longest rank"
    yield (
        f"{counted(len(shared.ranks), 'rank')} on {counted(hosts, 'host')} share each step by {run.workload.parallel} "
        f"over {shared.backend}{threads}. A step lasts {lasts}; the phases above are those of rank 0."
    )
    if (right := shared.correct) is not None:
        cut = [
            *([counted(right.layers, "layer")] if right.layers is not None else []),
            *([counted(right.batch_size, "sequence")] if right.batch_size is not None else []),
            *([f"{right.seq_len:,} tokens a sequence"] if right.seq_len is not None else []),
            *([f"a vocabulary of {right.vocabulary:,}"] if right.vocabulary is not None else []),
        ]
        smaller = f", of {', '.join(cut)}" if cut else ""
        losses = ""
        if right.loss_error is not None and right.loss_spread is not None:
            losses = f", losses under AdamW by {right.loss_error:.2g} ({right.loss_spread:.2g})"
        yield (
            f"Held against one process on the same batch{smaller}: gradients differ by "
            f"{right.gradient_error:.2g} (rounding makes {right.gradient_spread:.2g}), parameters after {right.steps} "
            f"steps of SGD by {right.update_error:.2g} ({right.update_spread:.2g}){losses}."
        )
    if shared.start_s is not None:
        yield f"They had met {format_seconds(shared.start_s)} after the first was started."
    if waits_in_forward(run):
        counts = ((figures.rank, figures.communication) for figures in shared.ranks)
        alone = [(rank, time) for rank, of in counts if of is not None and (time := of.computation_s)]
        what = "what it computes in the profiled step, without any wait,"
    else:
        alone = [(figures.rank, time) for figures in shared.ranks if (time := _rank_median_s(figures, "forward"))]
        what = "its forward, in which it waits for nobody,"
    if len(alone) > 1:
        middle = sorted(time for _, time in alone)[(len(alone) - 1) // 2]
        slowest, time = max(alone, key=lambda one: one[1])
        if time > middle * _BEHIND:
            yield f"Rank {slowest} computes slowest: {what} takes {format_share(time / middle - 1)} longer."


def _rank_median_s(figures: RankFigures, part: str) -> float | None:
    return figures.samples[part].median_s if part in figures.samples else None


# A run in words: its status, its doubts, and which run it is.


OUT_OF_MEMORY_REMEDY = "a smaller --batch-size or --seq-len, --attention sdpa, or --dtype bf16 needs less memory"
_OF_USER_MODEL = "a smaller batch or model, --checkpointing every-1, or --dtype bf16 needs less memory"


def identify(run: Run) -> str:
    """One line: which run this is, and what lies beside it."""
    parts = [f"Run {run.id}", f"tag {run.tag}" if run.tag else ""]
    if (where := run.environment) is not None:
        codes = (("stepscope", where.git_commit, where.git_dirty), ("own code", where.own_commit, where.own_dirty))
        parts += [f"{of} at {commit[:10]}{', changed since' if dirty else ''}" for of, commit, dirty in codes if commit]
    return printable("; ".join(part for part in (*parts, *run.artifacts.values()) if part))


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
    request = re.search(r"[Tt]ried to allocate ([\d.]+ [KMGT]i?B)", run.failure.message)
    wanted = f": {request[1]} more were asked for" if request else ""
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
) -> answer.Table:
    """A row for each of the parts that was timed: median, interval, mean, and share of the step.

    Percentiles have a column where there is one. rates: the FLOP/s of each part, for a column of its own.
    """
    named = {name: samples for name, samples in timed.items() if any(samples.values_s)}
    step_s = named[STEP].median_s if STEP in named else None
    shown = [head for head in FEWEST_FOR_PERCENTILE if any(samples.percentile_s(head) for samples in named.values())]
    rows: list[tuple[answer.Cell, ...]] = []
    for name, samples in named.items():
        percentiles = [samples.percentile_s(head) for head in shown]
        rate = [] if rates is None else [rates.get(name)]
        share = samples.median_s / step_s if step_s and samples.median_s is not None else None
        deviation = f" ± {format_milliseconds(samples.stdev_s)}" if samples.stdev_s is not None else ""
        mean = f"{format_milliseconds(samples.mean_s or 0)}{deviation} ms"
        rows.append((name, samples.median_s, interval_ms(samples.interval()), mean, *percentiles, share, *rate))
    return answer.table_of(
        "phase", ("median", "s"), (f"{CONFIDENCE * 100:.0f} % interval", answer.TEXT), ("mean ± std", answer.TEXT),
        *((head, "s") for head in shown), ("share", "%"), *([] if rates is None else [("model FLOP/s", "FLOP/s")]),
        rows=rows, tones={i: "strong" for i, row in enumerate(rows) if row[0] == STEP}, notes=answer.as_lines(*notes),
    )  # fmt: skip


def interval_ms(interval: Interval | None) -> str:
    """An interval of seconds in milliseconds; empty for none."""
    return f"{format_milliseconds(interval.low)} to {format_milliseconds(interval.high)} ms" if interval else ""


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
        correlated = step is not None and step.effective_count is not None and STEP not in without
        worth = f"; its steps are worth {step.effective_count:.0f} independent ones" if step and correlated else ""
        lines.append(f"The intervals are those {OF_ONE_PROCESS}: another may differ by more{worth}.")
    if without:
        name, samples = list(without.items())[-1]
        lines.append(f"No interval for {', '.join(without)}: of {name}, {samples.why_no_interval}. Take more: {more}.")
    return lines


def answer_times(samples: Mapping[str, Samples], steady: bool | None, where: Environment) -> answer.Answer:
    """The Answer on work that was timed alone: its phases by name, and the step that they make up."""
    step = samples[STEP]
    named = {name: sample for name, sample in samples.items() if name not in (STEP, "host")}
    clocks = ", ".join(dict.fromkeys(sample.clock for sample in named.values()))
    notes = (
        f"{about_steps(step, steady)}; step by {step.clock} round a synchronised region, phases by {clocks}.",
        *about_intervals({**named, STEP: step}, "steps=N"),
    )
    table = time_table({**named, STEP: step}, notes)
    return answer.Answer(
        study="measure",
        question=f"How long {'do' if len(named) > 1 else 'does'} {' and '.join(named)} take?",
        device=where.device_name,
        versions=where.versions,
        lead=answer.as_lines(where.described),
        tables=(table,),
    )


_DRAWN_STEPS = 400
"""Points of a curve of steps: about what a screen tells apart."""
_NAMED = 4
"""Operators that are named where their FLOPs are not known; the others are counted."""


def answer_run(run: Run, directory: str | None = None) -> answer.Answer:
    """The whole run as one would explain it."""
    tables: list[answer.Table] = []
    if run.status != "done" or run.failure is not None:
        tables.append(answer.text(answer.Line(status_sentence(run), "bad")))
    parts = (*metrics.parts_of(run), STEP)
    # Without the samples of a part that there never was.
    timed = {name: samples for name in parts if (samples := run.samples.get(name)) and any(samples.values_s)}
    if run.samples.get(STEP) and run.samples[STEP].count:
        flops = {name: work.flops for name, work in run.work.items()} | {STEP: metrics.model_flops(run)}
        rates = {name: of / at.median_s for name, at in timed.items() if (of := flops.get(name)) and at.median_s}
        tables.append(time_table(timed, _about_step(run, timed), rates))
    if run.shared is not None:
        tables += [ranks_table(run), *communication_tables(run)]
    if (memory := run.evidence.memory) is not None:
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
        tables.append(answer.table_of("memory", ("allocated", "B"), rows=[row for row in rows if row[1] is not None]))
    asides = [f"Not observed: {note}." for note in run.evidence.notes]
    if run.evidence.loop is not None and (ended_by := run.evidence.loop.ended_by) is not None:
        ended = f"The loop ended with an exception after the measured steps, which are whole: {ended_by}"
        asides.append(printable(ended))
    return answer.Answer(
        study="run",
        question=f"What does a step of {cell_name(run.workload)} take?",
        **measured_on(run),
        lead=heading(run),
        tables=tuple(tables),
        panels=tuple(_run_panels(run, timed)),
        findings=run.findings,
        checked=bool(run.findings) or (run.status == "done" and run.failure is None),
        asides=tuple(asides),
        origin=(identify(run), *([f"Saved in {directory}"] if directory else [])),
    )


def measured_on(run: Run) -> dict[str, Any]:
    """What an Answer says of where and when its run was measured."""
    where = run.environment
    return {
        "device": where.device_name if where else "",
        "versions": where.versions if where else {},
        "date": run.day,
    }


def heading(run: Run) -> tuple[answer.Line, ...]:
    """The model, the workload, and where it ran."""
    where = [run.environment.described] if run.environment else []
    loop = run.evidence.loop
    step = [_watched_step(loop)] if loop else []
    trainable = loop.trainable if loop else None
    return answer.as_lines(
        answer.Line(describe_model(run.workload, trainable), "strong"), describe_workload(run.workload), *step, *where
    )


def _watched_step(loop: WatchedLoop) -> str:
    """What was taken for a step of a watched loop, and why."""
    optimizers = list(loop.optimizers)
    if len(optimizers) > 1 and loop.optimizer_models:
        steps_of: Counter[str] = Counter()
        for name, models, steps in zip(loop.optimizers, loop.optimizer_models, loop.optimizer_steps, strict=True):
            steps_of[f"{name}{f' of {models}' if models else ''}"] += steps
        optimizers = [f"{name}{f' ({steps} times)' if steps > 1 else ''}" for name, steps in steps_of.items()]
    ends = f"ends with a step of {optimizers[0]}" if optimizers else "ends where the loop says so"
    if loop.in_backward:
        ends = f"ends with a backward, in which {counted(loop.in_backward, 'optimizer')} step"
    also = "also step" if len(optimizers) > 2 else "also steps"
    others = f", in which {' and '.join(optimizers[1:])} {also}" if optimizers[1:] else ""
    if not loop.modules:
        forwards = "no module is called that trains"
    elif not loop.module_forwards:
        forwards = f"{counted(loop.forwards, 'forward')} of {' and '.join(loop.modules)}"
    else:
        calls: Counter[str] = Counter()
        for name, times in zip(loop.modules, loop.module_forwards, strict=True):
            calls[name] += times
        forwards = ", ".join(f"{counted(times, 'forward')} of {name}" for name, times in calls.items())
    autocast = f", autocast to {loop.autocast}" if loop.autocast else ""
    backwards = counted(loop.backwards, "backward")
    times = counted(loop.evaluations, "time")
    closure = f"; {loop.optimizers[0]} evaluates its closure {times}" if loop.evaluations else ""
    between = {"backwards": loop.backwards_between}
    if loop.forwards_between != loop.backwards_between:
        between = {"forwards": loop.forwards_between, **between}
    ran = [f"{ends[0]} to {ends[1]} {name}" for name, ends in between.items() if ends and ends[0] != ends[1]]
    unlike = f" Those timed ran {' and '.join(ran)} each." if ran else ""
    return f"A step {ends}{others} ({loop.why}): {forwards}{autocast}, {backwards}{closure}.{unlike}"


def answer_list(runs: Sequence[Run]) -> answer.Answer:
    """One line a run, oldest first: when it began, which names it too, and which cell it measured."""
    rows: list[tuple[answer.Cell, ...]] = []
    for run in runs:
        began, _, cell = run.id.partition("-")
        rows.append((
            began, cell, status_word(run), figure(metrics.median_s(run, STEP), run), run.tag,
            figure(metrics.tokens_per_s(run), run), figure(metrics.peak_bytes(run), run, of_memory=True), doubts(run),
        ))  # fmt: skip
    columns = ("run", "cell", "status", ("step", "s"), "tag", ("tokens/s", ",.0f"), ("peak", "B"), "findings")
    return answer.Answer(study="ls", question="", tables=(answer.table_of(*columns, rows=rows, one_line=True),))


def answer_cells(runs: Sequence[Run], folder: str | None = None) -> answer.Answer:
    """The cells of a sweep, in the order they ran; with their nodes, where they are those of a cluster."""
    unlike = {node.name: node for node in unlike_nodes(runs)}
    nodes = [run.environment.node if run.environment is not None else None for run in runs]
    on_nodes = any(nodes)
    rows: list[tuple[answer.Cell, ...]] = []
    for run, node in zip(runs, nodes, strict=True):
        name = cell_name(run.workload, run.settings)
        on_node = [f"{node} {MARKS['warning']}" if node in unlike else node] if on_nodes else []
        if run.status != "done":
            rows.append((name, status_word(run), *[None] * 7, *on_node))
            continue
        times = [metrics.median_s(run, phase) for phase in (*PHASES, STEP)]
        tokens, peak = metrics.tokens_per_s(run), metrics.peak_bytes(run)
        utilisation = metrics.mfu_datasheet(run) or metrics.mfu_measured(run)
        figures = (figure(cell, run) for cell in (*times, tokens, utilisation))
        rows.append((name, *figures, figure(peak, run, of_memory=True), doubts(run), *on_node))
    notes = ""
    if runs and folder:
        ends = Counter(status_word(run) for run in runs)
        measured = ends.pop("done", 0)
        others = ", ".join(f"{count} {word}" for word, count in ends.items())
        notes = f"{measured} of {counted(len(runs), 'cell')} measured, {others}; runs in {folder}"
        if not ends:
            notes = f"{counted(measured, 'run')} in {folder}"
    table = answer.table_of(
        "cell", *((f"{name} ms", "ms of s") for name in (*PHASES, STEP)), ("tokens/s", ",.0f"),
        ("MFU", "%"), ("peak", "B"), "findings", *(["node"] if on_nodes else []), rows=rows,
        tones={i: "bad" for i, run in enumerate(runs) if run.status != "done"},
        notes=answer.as_lines(notes) if notes else (),
    )  # fmt: skip
    return answer.Answer(
        study="sweep", question="", tables=(table,), findings=tuple(node.finding for node in unlike.values())
    )


def _run_panels(run: Run, timed: Mapping[str, Samples]) -> Iterator[answer.Panel]:
    """A bar for each phase and the step, with the interval of its median; and every measured step in its order."""
    bars = tuple(bar("median", name, samples, doubted=bool(doubt_mark(run))) for name, samples in timed.items())
    if bars:
        yield answer.Panel(x_title="", y_title="median, ms", points=bars, kind="bars")
    curves = {name: samples.values_s for name, samples in timed.items() if samples.count > 1}
    together = max((math.ceil(len(values) / _DRAWN_STEPS) for values in curves.values()), default=1)
    points = tuple(
        answer.Point(line=name, x=float(place + 1), y=statistics.fmean(values[place : place + together]) * 1e3)
        for name, values in curves.items()
        for place in range(0, len(values), together)
    )
    if points:
        note = f"a point is the mean of {together} steps in a row" if together > 1 else ""
        frame = answer.Frame(heading="Every measured step", note=note, line_title="part of the step")
        yield answer.Panel(
            x_title=answer.MEASURED_STEP, y_title="ms", points=points, x_log=False, y_log=False, frame=frame
        )


def bar(line: str, name: str, samples: Samples | None, *, missing: str = "", doubted: bool = False) -> answer.Point:
    """The median of samples in milliseconds, with its interval; marked with `missing` where there is none."""
    if samples is None or samples.median_s is None:
        return answer.Point(line=line, name=name, y=0.0, missing=missing or "not measured")
    interval = samples.interval()
    low, high = (interval.low * 1e3, interval.high * 1e3) if interval else (None, None)
    return answer.Point(line=line, name=name, y=samples.median_s * 1e3, low=low, high=high, doubted=doubted)


def _about_step(run: Run, timed: Mapping[str, Samples]) -> Iterator[str]:
    """How the step was timed, what it achieves of the device's rates, and which code ran."""
    samples, profile = run.samples[STEP], run.evidence.profile
    yield f"{about_steps(samples, run.warmup_steady)}; {_clocks(run)}."
    yield from about_intervals(timed, "--steps")
    yield from _about_rates(run, samples)
    yield from _about_energy(run)
    if calls := run.evidence.uncounted:
        most = sorted(calls, key=lambda name: -calls[name])
        names = [f"{printable(name)} ({counted(calls[name], 'call')})" for name in most[:_NAMED]]
        others = f" and {len(most) - _NAMED} others" if len(most) > _NAMED else ""
        yield f"The FLOPs of {', '.join(names)}{others} are not known: there are more than were counted."
    launch_bound, host = metrics.launch_bound_share(run), metrics.host_share(run)
    if launch_bound is not None and host is not None and profile:
        yield (
            f"{profile.kernel_launches} kernels a step; the GPU has none to run for {format_share(launch_bound)} of "
            f"it. The host is done issuing them after {format_share(host)} (and waits itself where its queue to a busy "
            "GPU is full)."
        )
    step = f"Step {format_seconds(samples.median_s or 0)}"
    slowdown = metrics.profiler_slowdown(run)
    if slowdown and profile:
        yield f"{step}, under the profiler {format_seconds(profile.step_s)} ({slowdown:.2f}x)."
    for capture in run.evidence.captures:
        if capture.failure:
            yield printable(f"No {capture.tool} trace: {capture.failure}.")
        elif capture.step_s and samples.median_s:
            yield printable(
                f"{step}, in the {capture.tool} trace of {counted(capture.steps, 'step')} "
                f"{format_seconds(capture.step_s)} ({capture.step_s / samples.median_s:.2f}x)."
            )
    if run.evidence.attention:
        yield f"Attention auto picked {run.evidence.attention}."
    if parts := run.evidence.parts:  # modules that were left are a finding
        replaced = [f"{one.modules} {one.type} by {one.kernels} {one.part}" for one in parts if one.replaced]
        absent = [f"{one.part}, since {one.why.replace('it has', 'the model has')}" for one in parts if not one.modules]
        stays = f" Left as the model has it: {'; '.join(absent)}." if absent else ""
        replacements = f"each held against its own code first: {', '.join(replaced)}"
        yield printable(f"Computed by other kernels, {replacements}.{stays}")
    if profile and profile.attention_operators:
        yield f"Attention ran as {', '.join(profile.attention_operators)}."


def _clocks(run: Run) -> str:
    """What timed the step and its phases."""
    clock, loop = run.samples[STEP].clock, run.evidence.loop
    if loop is None:
        phases = next((run.samples[name].clock for name in metrics.parts_of(run)), "none")
        return f"step by {clock} round a synchronised region, phases by {phases}"
    spans, which = loop.timed_steps, ""
    if not spans and loop.first_step is not None:
        spans = ((loop.first_step, loop.first_step + run.samples[STEP].count - 1),)
    if spans:
        numbers = [f"{first} to {last}" if last > first else f"{first}" for first, last in spans]
        which = f", number{'s' if spans[0][1] > spans[0][0] or len(spans) > 1 else ''} {' and '.join(numbers)}"
    return f"all by {clock}, from the end of a step to the end of the next, with nothing synchronised{which}"


def _about_rates(run: Run, samples: Samples) -> Iterator[str]:
    """Tokens a second, or samples where the batch holds no tokens; FLOPs, and how near the device's peaks they come."""
    tokens, each = metrics.tokens_per_s(run), metrics.samples_per_s(run)
    rate, flops = metrics.model_flops_per_s(run), metrics.model_flops(run)
    rates: list[str] = []
    if tokens:
        rates.append(f"{tokens:,.0f} tokens/s")
    elif each:
        rates.append(f"{each:,.{0 if each >= 100 else 2}f} samples/s")
    if rate and flops:
        how = next(iter(run.work.values())).convention
        rates.append(f"{format_rate(rate, 'FLOP/s')} of model FLOPs ({format_rate(flops, 'FLOP')} a step, {how})")
    if rates:
        yield f"{'; '.join(rates)}."
    loop = run.evidence.loop
    if loop is not None and (evaluated := loop.evaluated) is not None:
        what = f"evaluation of {' and '.join(evaluated.modules)} (calls with gradients off)"
        where = f" at {evaluated.where}" if evaluated.where else ""
        took, steps = format_seconds(evaluated.median_s), counted(evaluated.steps, "step")
        outside = f"{steps} of {evaluated.of} took {took} more: {what}{where}. The times above are without it."
        inside = f"{steps} of {evaluated.of} hold {took} of {what}{where}."
        in_most = 2 * evaluated.steps >= evaluated.of  # the times of steps without it are then stored without it
        yield printable(inside if in_most else outside)
    if loop is not None and loop.saved is not None:
        yield printable(f"{loop.saved}.")
    again = by_sizes(run.workload, recomputed_flops) or 0
    if again and flops and samples.median_s:
        yield (
            f"Checkpointing runs another {format_rate(again, 'FLOP')} of products again in backward: "
            f"{format_rate((flops + again) / samples.median_s, 'FLOP/s')} of hardware FLOPs."
        )
    dtype, spec = run.workload.dtype, run.device_spec
    ceiling = run.ceilings.matmul_for(dtype) if run.ceilings else None
    of_peak = f"of the peak {format_rate(spec.peak_for(dtype) or 0, 'FLOP/s')} ({spec.source})" if spec else ""
    of_ceiling = (
        f"of the measured ceiling {format_rate(ceiling.rate, 'FLOP/s')} ({ceiling.operation})" if ceiling else ""
    )
    too_much = " (more than there is: the count of FLOPs or the peak is wrong)"
    shares = ((metrics.mfu_datasheet(run), of_peak), (metrics.mfu_measured(run), of_ceiling))
    utilisation = [f"{format_share(share)}{too_much if share > 1 else ''} {of}" for share, of in shares if share and of]
    if utilisation:
        yield f"MFU {'; '.join(utilisation)}."


def _about_energy(run: Run) -> Iterator[str]:
    """Joules a step with whose they are, and the GPU's state while the steps ran."""
    energy, joules, each = run.evidence.energy, metrics.joules_per_step(run), metrics.joules_per_token(run)
    if energy is not None and joules is not None:
        whose = "the whole GPU" if energy.of == "gpu" else "the processor's packages, without memory"
        more = "" if energy.are_samples else " that ran after those"
        yield (
            f"{format_joules(joules)} a step{f', {format_joules(each)} a token' if each else ''}, by the counter of "
            f"{whose} over {counted(energy.steps, 'step')}{more} in {format_seconds(energy.duration_s)}: "
            f"{format_rate(energy.energy_j / energy.duration_s, 'W')}."
        )
    if run.environment is None or (during := run.environment.during) is None:
        return
    quantities = (
        ("SM clock", during.sm_clock_mhz, "MHz"),
        ("power", during.power_w, "W"),
        ("temperature", during.temperature_c, "°C"),
    )
    states = [
        f"{name} {extent.median:,.0f} {unit} ({extent.lowest:,.0f} to {extent.highest:,.0f})"
        for name, extent, unit in quantities
        if extent is not None
    ]
    if states:
        often = f"{counted(during.count, 'reading')}, one every {format_seconds(during.period_s)}"
        yield f"While the steps ran: {', '.join(states)}; medians of {often}."
