"""A run as an answer: what ran, where, how long, how well, and what to doubt. Lists of runs too."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from stepscope.core.answer import (
    MEASURED_STEP,
    Answer,
    Cell,
    Frame,
    Line,
    Panel,
    Point,
    Table,
    as_lines,
    table_of,
    text,
)
from stepscope.core.doubts import MARKS, doubt_mark, figure
from stepscope.core.errors import printable
from stepscope.core.evidence import Capture
from stepscope.core.parts import PartFound
from stepscope.core.range_names import FORWARD_BACKWARD, PHASES, STEP
from stepscope.core.run import Run
from stepscope.core.samples import Samples
from stepscope.core.units import counted, format_joules, format_rate, format_seconds, format_share
from stepscope.core.watched_loop import Evaluated, WatchedLoop
from stepscope.core.work.described import cell_name, describe_model, describe_workload
from stepscope.core.work.transformer import recomputed_flops
from stepscope.runs import metrics
from stepscope.runs.communication import communication_tables
from stepscope.runs.nodes import node_of, nodes_findings, unlike_nodes
from stepscope.runs.shared import ranks_table
from stepscope.runs.times import about_intervals, about_steps, time_table
from stepscope.runs.words import doubts, identify, status_sentence, status_word

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
    again = recomputed_flops(run.textbook) if run.textbook else 0
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
    absent = [
        f"{one.part}, since {one.why.replace('it has', 'the model has')}" for one in found if not one.modules
    ]  # fmt: skip
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
            ("SM clock", during.sm_clock_mhz, "MHz"), ("power", during.power_w, "W"),
            ("temperature", during.temperature_c, "°C"),
        )  # fmt: skip
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
