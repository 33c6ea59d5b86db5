"""The page of one run, or of one step measured in several processes."""

from collections.abc import Callable, Iterator

import msgspec

from stepscope.core.answer import Answer, Cell, Table, as_lines, name_of, table_of
from stepscope.core.environment import Environment
from stepscope.core.page import Figure, Page, Section
from stepscope.core.processes import FEWEST_PROCESSES
from stepscope.core.range_names import STEP
from stepscope.core.run import Run
from stepscope.core.units import counted, format_bytes, format_milliseconds, format_seconds, format_share
from stepscope.core.work.described import cell_name
from stepscope.core.work.spelled import run_command
from stepscope.rendering.pages.of_answer import gravest, heading_of, section, sections_of
from stepscope.rendering.pages.of_capture import sections_of_capture
from stepscope.rendering.pages.of_digest import sections_of_digest
from stepscope.runs import metrics
from stepscope.runs.answer import answer_run
from stepscope.runs.run_sets import RunSet
from stepscope.runs.set_answer import answer_set
from stepscope.runs.words import identify, status_in_short, status_word
from stepscope.traces.captures.answer import answer_trace
from stepscope.traces.captures.checks import check_trace
from stepscope.traces.captures.digest import TraceDigest
from stepscope.traces.captures.summary import TraceSummary

_UNKNOWN = "not measured"


def page_of_run(
    run: Run, *, captured: TraceSummary | None = None, digest: TraceDigest | None = None,
    remembered: Answer | None = None, notes: tuple[str, ...] = (),
) -> Page:  # fmt: skip
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
    found = check_trace(captured) if captured is not None else ()
    if captured is not None:
        sections += sections_of_capture(captured, answer_trace(captured, found, run.id))
    elif digest is not None:
        sections += sections_of_digest(digest, on_cpu=run.environment is None or run.environment.device_type == "cpu")
        found = digest.findings
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
    findings = (*run.findings, *(one for one in found if one.kind not in kinds))
    return Page(
        title=f"{run.workload.name}: a training step",
        kind="run",
        sentence=sentence_of(run),
        figures=_figures(run),
        findings=findings,
        checked=answer.checked,
        sections=tuple(sections),
        reproduce=tuple(commands_of(run)),
    )


def page_of_set(found: RunSet) -> Page:
    """The page of a step that was measured in several processes."""
    answer, run, times = answer_set(found), found.representative, found.processes(STEP)
    interval = times.interval()
    step_s = times.typical_s
    enough = len(found.measured) >= FEWEST_PROCESSES
    between = f"{format_milliseconds(interval.low)} to {format_milliseconds(interval.high)} ms" if interval else ""
    sure = f", with 95 % confidence {between}" if between and enough else ""
    figures = (
        Figure(
            name="a step, between processes", value=format_seconds(step_s) if step_s else _UNKNOWN,
            note=between or f"fewer than {FEWEST_PROCESSES} processes: no interval",
        ),
        *_figures(run)[1:-1],
        gravest(answer.findings),
    )  # fmt: skip
    return Page(
        title=f"{run.workload.name}: a training step in {counted(len(found.runs), 'process')}",
        kind="set",
        sentence=f"In {counted(len(found.measured), 'process')} a step typically takes {format_seconds(step_s)}{sure}."
        if step_s
        else "None of the processes measured a step.",
        figures=figures,
        findings=answer.findings,
        checked=answer.checked,
        sections=(*heading_of(answer), *sections_of(answer), *_environment(run.environment)),
        reproduce=tuple(f"{command} --repeat {len(found.runs)}" for command in commands_of(run)[:1]),
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
        name: found / step_s for name in metrics.parts_of(run) if (found := metrics.median_s(run, name)) is not None
    }
    longest = max(parts, key=lambda name: parts[name], default=None)
    where = f", {format_share(parts[longest])} of it in {longest}" if longest is not None else ""
    idle = metrics.launch_bound_share(run)
    stood = f"; the GPU has nothing to run for {format_share(idle)} of it" if idle is not None and idle > 0.05 else ""
    return f"A step of {cell_name(run.workload)} takes {format_seconds(step_s)} on {device}{where}{stood}."


def _figures(run: Run) -> tuple[Figure, ...]:
    samples = run.samples.get(STEP)
    interval = samples.interval() if samples is not None and samples.count else None
    step_s, tokens, peak = metrics.median_s(run, STEP), metrics.tokens_per_s(run), metrics.peak_bytes(run)
    held, of_peak = metrics.mfu_datasheet(run), "of the datasheet's peak"
    if held is None:
        held, of_peak = metrics.mfu_measured(run), "of the measured ceiling"
    capacity = run.environment.memory_bytes if run.environment else None
    between = (
        f"{format_milliseconds(interval.low)} to {format_milliseconds(interval.high)} ms, one process"
        if interval
        else f"{counted(samples.count, 'step')}, no interval"
        if samples is not None and samples.count
        else ""
    )
    return (
        Figure(name="a step", value=format_seconds(step_s) if step_s else _UNKNOWN, note=between),
        Figure(name="tokens per second", value=f"{tokens:,.0f}" if tokens else _UNKNOWN),
        Figure(name="MFU", value=format_share(held) if held else _UNKNOWN, note=of_peak if held else ""),
        Figure(
            name="peak memory", value=format_bytes(peak) if peak is not None else _UNKNOWN,
            note=f"of {format_bytes(capacity)}" if capacity and peak is not None else "",
        ),
        _gravest(run),
    )  # fmt: skip


def _gravest(run: Run) -> Figure:
    """The gravest finding; of a run that ended before it was measured, how it ended."""
    if run.status != "done" and not any(finding.severity == "error" for finding in run.findings):
        return Figure(name="gravest finding", value=status_word(run), note="not measured to the end")
    return gravest(run.findings)


def _numerics(run: Run) -> Iterator[Section]:
    """What was observed of the run's precision and of its updates; nothing where nothing was."""
    precision, updates, seen = run.evidence.precision, run.evidence.updates, run.evidence.observation
    rows: list[tuple[Cell, ...]] = []
    notes: list[str] = []
    if precision is not None:
        rows.append(("fp32 matrix products are set to", precision.float32_matmul))
        rows.append(("error of one against float64", f"{precision.probe_relative_error:.1e}"))
        for name, kernels in (("TF32", precision.tf32_kernels), ("true fp32", precision.fp32_kernels)):
            rows += [(f"kernels of products in {name}", counted(len(kernels), "name"))] if kernels else []
    if seen is not None and seen.product_dtypes:
        rows.append(("operands of the forward's products", ", ".join(seen.product_dtypes)))
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
            said = ", ".join(
                f"{_in_words(name)} {_with_unit(name, value)}"
                for name, value in msgspec.to_builtins(reading).items()
                if value not in (None, (), []) and name != "read_at_s"
            )
            rows.append((f"GPU {when} the measured steps", said))
    table: Table = table_of("what", "on this machine", rows=rows)
    yield Section(title="Environment", answer=Answer(study="run", question="", tables=(table,)))


_KEYS = {"l2_bytes": "L2 cache", "multiprocessors": "streaming multiprocessors", "cpu_name": "CPU"}
"""Fields of an environment whose names say too little."""
_WORDS = {"sm": "SM", "gpu": "GPU", "cpu": "CPU", "git": "git"}
_OF_FIELDS: dict[str, Callable[[float], str]] = {
    "_bytes": format_bytes, "_mhz": lambda value: f"{value:,.0f} MHz", "_w": lambda value: f"{value:,.0f} W",
    "_c": lambda value: f"{value:.0f} °C", "_s": format_seconds,
}  # fmt: skip
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
