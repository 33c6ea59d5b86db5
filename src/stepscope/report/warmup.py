"""The warm-up study's answer: a table, and a sentence made from its figures."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from stepscope.core.run import Run
from stepscope.core.units import format_seconds
from stepscope.report.styles import render_terminal
from stepscope.report.tables import TableQuery, build_table
from stepscope.report.terminal import describe_environment, describe_model, describe_workload

QUERY = TableQuery(rows=("warmup",), values=("step", "first_step", "largest_step", "steps"), statistic="mean-std")


def render_warmup(runs: Sequence[Run]) -> RenderableType:
    """Mean and deviation of the step by number of warm-up steps, and what leaving them out costs."""
    first = runs[0]
    lines = [Text(describe_model(first.workload), style="bold"), Text(describe_workload(first.workload))]
    if first.environment:
        lines.append(Text(describe_environment(first.environment)))
    return Group(*lines, render_terminal(build_table(runs, QUERY)), Text(warmup_sentence(runs)))


def warmup_sentence(runs: Sequence[Run]) -> str:
    """The mean without warm-up against the mean with the most of it, in figures."""
    measured = [run for run in runs if run.status == "done"]
    if len(measured) < 2:
        return "Too few of the cells were measured to compare."
    cold = min(measured, key=lambda run: run.settings.warmup_floor)
    warm = max(measured, key=lambda run: run.settings.warmup_floor)
    cold_step, warm_step = cold.samples["step"], warm.samples["step"]
    if not cold_step.mean_s or not warm_step.mean_s or not warm_step.median_s:
        return "Too few of the cells were measured to compare."
    return (
        f"After {cold.settings.warmup_floor} warm-up steps the mean step is {format_seconds(cold_step.mean_s)}, "
        f"{cold_step.mean_s / warm_step.mean_s:.2f} times that after {warm.settings.warmup_floor} "
        f"({format_seconds(warm_step.mean_s)}): the first step took {format_seconds(cold_step.values_s[0])}, "
        f"{cold_step.values_s[0] / warm_step.median_s:.1f} times the warm median."
    )
