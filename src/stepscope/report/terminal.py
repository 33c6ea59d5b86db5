"""A run, and lists of runs, for the terminal."""

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.analysis.runs import metrics
from stepscope.analysis.runs.doubts import doubting_kinds, marked
from stepscope.core.environment import Environment
from stepscope.core.errors import printable
from stepscope.core.evidence import Capture
from stepscope.core.finding import Finding
from stepscope.core.run import Run, Settings
from stepscope.core.samples import CONFIDENCE, OF_ONE_PROCESS
from stepscope.core.shown_text import middle_cut
from stepscope.core.units import (
    counted,
    format_bytes,
    format_count,
    format_milliseconds,
    format_rate,
    format_seconds,
    format_share,
)
from stepscope.core.workload import Workload
from stepscope.report.layout import OneLine
from stepscope.work.transformer import parameter_count, recomputed_flops

_SEVERITY_STYLE = {"error": "bold red", "warning": "yellow", "note": "cyan"}
OUT_OF_MEMORY_REMEDY = "a smaller --batch-size or --seq-len, --attention sdpa, or --dtype bf16 needs less memory"


def render_run(run: Run, directory: str | None = None) -> RenderableType:
    """The whole run as one would explain it: what ran, where, how long, how well, and what to doubt."""
    parts: list[RenderableType] = [*_heading(run), Text()]
    if run.status != "done" or run.failure is not None:
        parts += [Text(status_sentence(run), style="bold red"), Text()]
    if run.samples.get("step") and run.samples["step"].count:
        parts += [_phase_table(run), *_rates(run), Text()]
    memory = _memory_table(run)
    if memory is not None:
        parts += [memory, Text()]
    parts += [render_finding(finding) for finding in run.findings]
    if not run.findings and run.status == "done" and run.failure is None:
        parts.append(Text("No finding: every check passed.", style="green"))
    parts += [Text(f"Not observed: {note}.", style="dim") for note in run.evidence.notes]
    parts += [Text(), Text(identify(run))]
    if directory:
        parts.append(Text(f"Saved in {directory}"))
    return Group(*parts)


def identify(run: Run) -> str:
    """One line: which run this is, and what lies beside it."""
    commit = run.environment.git_commit if run.environment else None
    dirty = ", changed since" if run.environment and run.environment.git_dirty else ""
    parts = [
        f"Run {run.id}",
        f"tag {run.tag}" if run.tag else "",
        f"stepscope at {commit[:10]}{dirty}" if commit else "",
        *run.artifacts.values(),
    ]
    return printable("; ".join(part for part in parts if part))


def describe_workload(workload: Workload) -> str:
    """One line: sizes, tokens and choices."""
    optimizer = f", {workload.optimizer}" if workload.optimizer else ""
    compiled = "eager" if workload.compile == "eager" else f"torch.compile {workload.compile}"
    memory = f", checkpointing {workload.checkpointing}" if workload.checkpointing != "none" else ""
    if workload.accumulation != 1:
        memory += f", {workload.accumulation} micro-batches of {workload.micro_batch_size}"
    return (
        f"batch {workload.batch_size} x sequence {workload.seq_len} = {format_count(workload.tokens)} tokens, "
        f"{workload.dtype}, {workload.phase}, {workload.attention} attention, {compiled}{optimizer}{memory}"
    )


def describe_model(workload: Workload) -> str:
    """One line: name, parameter count and every size."""
    sizes = ", ".join(f"{field} {format_count(size)}" for field, size in workload.model.sizes.items())
    return f"{workload.model.name}: {format_count(parameter_count(workload.model))} parameters ({sizes})"


def describe_environment(environment: Environment) -> str:
    """One line: device and versions."""
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    threads = f", {environment.threads} threads" if environment.device_type == "cpu" else ""
    limit = f", limited to {format_bytes(environment.memory_limit_bytes)}" if environment.memory_limit_bytes else ""
    return f"{environment.device_name}{threads}{limit}; {versions}"


def status_sentence(run: Run) -> str:
    """What became of a run that is not done."""
    if run.failure is None:
        return f"{run.status}: the run was started and never ended."
    remedy = f" Remedy: {OUT_OF_MEMORY_REMEDY}." if run.status == "out-of-memory" else ""
    return printable(f"{run.status} ({run.failure.where}): {run.failure.message}{remedy}")


def status_word(run: Run) -> str:
    """The status as it stands in a cell."""
    return "OOM" if run.status == "out-of-memory" else run.status


_LONGEST_SENTENCE = 4000
"""Characters: a finding from a foreign file may be of any length."""


def render_finding(finding: Finding) -> Text:
    """Severity, sentence, remedy."""
    text = Text()
    text.append(printable(f"{finding.severity} {finding.kind}: "), style=_SEVERITY_STYLE[finding.severity])
    text.append(middle_cut(printable(finding.sentence), _LONGEST_SENTENCE))
    if finding.remedy:
        text.append(middle_cut(printable(f" Remedy: {finding.remedy}."), _LONGEST_SENTENCE), style="dim")
    return text


def render_runs(runs: list[Run]) -> RenderableType:
    """One line a run, oldest first: when it began, which names it too, and which cell it measured."""
    table = OneLine(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("run", "cell", "status", "step", "tag", "tokens/s", "peak", "findings"):
        table.add_column(head)
    for run in runs:
        step_s, tokens, peak = (
            metrics.median_s(run, "step"),
            metrics.tokens_per_s(run),
            metrics.peak_bytes(run),
        )
        began, _, cell = run.id.partition("-")
        table.add_row(
            printable(began),
            printable(cell),
            status_word(run),
            marked(format_seconds(step_s) if step_s else "", run),
            printable(run.tag or ""),
            marked(f"{tokens:,.0f}" if tokens else "", run),
            marked(format_bytes(peak) if peak else "", run),
            doubts(run),
        )
    return table


def render_cells(runs: list[Run]) -> RenderableType:
    """The cells of a sweep, in the order they ran."""
    table = make_table(
        "cell", "forward ms", "backward ms", "optimizer ms", "step ms", "tokens/s", "MFU", "peak", "findings",
        right_from=1, fold_first=True,
    )  # fmt: skip
    for run in runs:
        if run.status != "done":
            table.add_row(cell_name(run.workload, run.settings), Text(status_word(run), style="red"))
            continue
        times = [metrics.median_s(run, name) for name in (*metrics.PHASE_NAMES, "step")]
        tokens, peak = metrics.tokens_per_s(run), metrics.peak_bytes(run)
        utilisation = metrics.mfu_datasheet(run) or metrics.mfu_measured(run)
        table.add_row(
            cell_name(run.workload, run.settings),
            *(marked(format_milliseconds(t) if t else "", run) for t in times),
            marked(f"{tokens:,.0f}" if tokens else "", run),
            marked(format_share(utilisation) if utilisation else "", run),
            marked(format_bytes(peak) if peak else "", run),
            doubts(run),
        )
    return table


def doubts(run: Run) -> str:
    """The kinds of finding that say to take care, for a cell."""
    return printable(", ".join(doubting_kinds(run)))


def cell_name(workload: Workload, settings: Settings | None = None) -> str:
    """The key without its digest, and the number of warm-up steps where the settings fix one."""
    name = "-".join(workload.words())
    if settings is None or settings.warmup_floor != settings.warmup_cap:
        return name
    return f"{name}, warm-up {settings.warmup_floor}"


def _heading(run: Run) -> list[RenderableType]:
    lines = [Text(describe_model(run.workload), style="bold"), Text(describe_workload(run.workload))]
    if run.environment:
        lines.append(Text(describe_environment(run.environment)))
    return list(lines)


def _phase_table(run: Run) -> Table:
    interval_head = f"{CONFIDENCE * 100:.0f} % interval"
    table = make_table("phase", "median", interval_head, "mean ± std", "share", "model FLOP/s", right_from=1)
    step_s = metrics.median_s(run, "step") or 0.0
    for name in (*metrics.PHASE_NAMES, "step"):
        samples = run.samples.get(name)
        if samples is None or samples.median_s is None or samples.mean_s is None:
            continue
        interval = samples.interval()
        flops = metrics.model_flops(run) if name == "step" else run.work[name].flops if name in run.work else None
        deviation = f" ± {format_milliseconds(samples.stdev_s)}" if samples.stdev_s is not None else ""
        table.add_row(
            name,
            format_seconds(samples.median_s),
            f"{format_milliseconds(interval.low)} to {format_milliseconds(interval.high)} ms" if interval else "",
            f"{format_milliseconds(samples.mean_s)}{deviation} ms",
            format_share(samples.median_s / step_s) if step_s else "",
            format_rate(flops / samples.median_s, "FLOP/s") if flops and samples.median_s else "",
            end_section=name == "step",
            style="bold" if name == "step" else "",
        )
    return table


def _rates(run: Run) -> list[Text]:
    samples = run.samples["step"]
    steady = {True: "steady", False: "not steady", None: "too few to tell whether steady"}[run.warmup_steady]
    lines = [
        f"{counted(samples.count, 'step')} {OF_ONE_PROCESS} measured after "
        f"{counted(len(samples.warmup_s), 'warm-up step')} ({steady}); "
        f"step by {samples.clock} round a synchronised region, phases by {_phase_clock(run)}.",
        *_about_intervals(run),
    ]
    tokens, rate, flops = metrics.tokens_per_s(run), metrics.model_flops_per_s(run), metrics.model_flops(run)
    if tokens and rate and flops:
        convention = next(iter(run.work.values())).convention
        lines.append(
            f"{tokens:,.0f} tokens/s; {format_rate(rate, 'FLOP/s')} of model FLOPs "
            f"({format_rate(flops, 'FLOP')} a step, {convention})."
        )
    again = recomputed_flops(run.workload)
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
            f"{format_share(datasheet)} of the peak {format_rate(peak, 'FLOP/s')} ({run.device_spec.source})"
        )
    ceiling = run.ceilings.matmul_for(dtype) if run.ceilings else None
    if measured and ceiling:
        utilisation.append(
            f"{format_share(measured)} of the measured ceiling {format_rate(ceiling.rate, 'FLOP/s')} "
            f"({ceiling.operation})"
        )
    if utilisation:
        lines.append(f"MFU {'; '.join(utilisation)}.")
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
    if run.evidence.profile and run.evidence.profile.attention_operators:
        lines.append(f"Attention ran as {', '.join(run.evidence.profile.attention_operators)}.")
    return [Text(line) for line in lines]


def _about_intervals(run: Run) -> list[str]:
    """What the intervals are of, or why there is none."""
    named = {name: run.samples[name] for name in (*metrics.PHASE_NAMES, "step") if name in run.samples}
    without = {name: samples for name, samples in named.items() if samples.count and samples.why_no_interval}
    lines: list[str] = []
    if len(without) < len(named):
        step = run.samples["step"]
        told = step.effective_count is not None and "step" not in without
        worth = f"; its steps are worth {step.effective_count:.0f} independent ones" if told else ""
        lines.append(f"The intervals are those {OF_ONE_PROCESS}: another may differ by more{worth}.")
    if without:
        name, samples = list(without.items())[-1]
        lines.append(f"No interval for {', '.join(without)}: of {name}, {samples.why_no_interval}. Take more: --steps.")
    return lines


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
    return next((run.samples[n].clock for n in metrics.PHASE_NAMES if n in run.samples), "none")


def _memory_table(run: Run) -> Table | None:
    memory = run.evidence.memory
    if memory is None:
        return None
    rows = (
        ("parameters", memory.parameter_bytes),
        ("before the step: parameters, optimizer state, batches", memory.after_parameters),
        ("peak during forward", memory.forward_peak),
        ("saved for backward when forward ends", memory.saved_for_backward),
        ("peak during backward", memory.backward_peak),
        ("peak during the optimizer step", memory.optimizer_peak),
        ("reserved by the allocator at most", memory.reserved_peak),
    )
    table = make_table("memory", "allocated", right_from=1)
    for name, size in rows:
        if size is not None:
            table.add_row(name, format_bytes(size))
    return table


def make_table(*heads: str, right_from: int = 99, fold_first: bool = False) -> Table:
    """The house's table: a rule below the head, figures to the right from column `right_from` on.

    On a narrow screen figures are folded, never cut to look like other figures; the first column, the label, stays
    whole unless `fold_first`.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, head in enumerate(heads):
        table.add_column(
            head,
            justify="right" if i >= right_from else "left",
            no_wrap=i == 0 and not fold_first,
            overflow="fold",
            min_width=12 if i == 0 and fold_first else None,
        )
    return table
