"""The warm-up study's answer: a table, and a sentence made from its figures."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from stepscope.analysis.runs.doubts import marked
from stepscope.core.run import Run
from stepscope.core.units import format_milliseconds, format_seconds
from stepscope.report.terminal import (
    describe_environment,
    describe_model,
    describe_workload,
    doubts,
    make_table,
    status_word,
)


def render_warmup(runs: Sequence[Run]) -> RenderableType:
    """Mean and deviation of the step by number of warm-up steps, and what leaving them out costs."""
    first = runs[0]
    lines = [Text(describe_model(first.workload), style="bold"), Text(describe_workload(first.workload))]
    if first.environment:
        lines.append(Text(describe_environment(first.environment)))
    table = make_table("warm-up steps", "mean ± std (ms)", "median (ms)", "first step (ms)", "steps", right_from=0)
    for run in runs:
        samples = run.samples.get("step")
        if run.status != "done" or samples is None or samples.mean_s is None or samples.median_s is None:
            table.add_row(str(run.settings.warmup_floor), status_word(run))
            continue
        deviation = f" ± {format_milliseconds(samples.stdev_s)}" if samples.stdev_s is not None else ""
        table.add_row(
            str(run.settings.warmup_floor),
            marked(f"{format_milliseconds(samples.mean_s)}{deviation}", run),
            marked(format_milliseconds(samples.median_s), run),
            marked(format_milliseconds(samples.values_s[0]), run),
            str(samples.count),
        )
    said = [f"{doubts(run)} after {run.settings.warmup_floor} warm-up steps" for run in runs if doubts(run)]
    notes = [Text(f"Doubtful: {'; '.join(said)}.")] if said else []
    return Group(*lines, table, Text(warmup_sentence(runs)), *notes)


def warmup_sentence(runs: Sequence[Run]) -> str:
    """The mean without warm-up against the mean with the most of it, in figures."""
    measured = sorted((run for run in runs if run.status == "done"), key=lambda run: run.settings.warmup_floor)
    if len(measured) < 2:
        return "Too few of the cells were measured to compare."
    cold, warm = measured[0], measured[-1]
    cold_step, warm_step = cold.samples["step"], warm.samples["step"]
    assert cold_step.mean_s and warm_step.mean_s and warm_step.median_s  # done runs have samples
    return (
        f"After {cold.settings.warmup_floor} warm-up steps the mean step is {format_seconds(cold_step.mean_s)}, "
        f"{cold_step.mean_s / warm_step.mean_s:.2f} times that after {warm.settings.warmup_floor} "
        f"({format_seconds(warm_step.mean_s)}): the first step took {format_seconds(cold_step.values_s[0])}, "
        f"{cold_step.values_s[0] / warm_step.median_s:.1f} times the warm median."
    )
