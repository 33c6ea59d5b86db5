"""`stepscope table`: any set of runs, arranged."""

from pathlib import Path
from typing import Annotated, cast

import typer

from stepscope.cli.output import emit, show, warn
from stepscope.core.errors import InputError, choose
from stepscope.core.run_directory import load_runs


def table(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run directories, or folders of them (default: runs).")
    ] = None,
    rows: Annotated[str, typer.Option("--rows", help="Fields, comma-separated.")] = "model,seq_len",
    columns: Annotated[str, typer.Option("--columns", help="Fields, comma-separated.")] = "",
    value: Annotated[str, typer.Option("--value", help="Figures, comma-separated, as in forward,backward.")] = "step",
    statistic: Annotated[
        str, typer.Option("--stat", help="median, median-interval or mean-std, for times.")
    ] = "median",
    speedup: Annotated[str | None, typer.Option("--speedup", help="A column's label: show speed-ups over it.")] = None,
    where: Annotated[
        list[str] | None, typer.Option("--where", help="Keep runs with field=value[,value]; may be repeated.")
    ] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Keep runs with this tag.")] = None,
    style: Annotated[str, typer.Option("--style", help="terminal, markdown, csv or jsonl.")] = "terminal",
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Plot the table too: a file that ends in .svg, .png, .html or .json.")
    ] = None,
) -> None:
    """Tables of runs: terminal, Markdown, CSV or JSON lines; and as a plot."""
    from stepscope.report.styles import STYLES, Style, render_terminal, render_text
    from stepscope.report.tables import Statistic, TableQuery, build_table

    choose(style, STYLES, "style")
    if plot is not None:
        from stepscope.report.plots.save import check_target

        check_target(plot)
    conditions = [condition(text) for text in where or []]
    conditions += [("tag", (tag,))] if tag is not None else []
    query = TableQuery(
        rows=_names(rows),
        columns=_names(columns),
        values=_names(value),
        statistic=cast("Statistic", statistic),
        speedup=speedup,
        where=tuple(conditions),
    )
    found, faults = load_runs(runs or [Path("runs")])
    for fault in faults:
        warn(f"left out: {fault}")
    if plot is not None:
        from stepscope.report.plots.save import save_plot
        from stepscope.report.plots.table_plot import draw_table

        drawn = draw_table(found, query)
        save_plot(drawn.chart, plot)
        left_out = f"; cells left out, without a result or such a figure: {drawn.left_out}" if drawn.left_out else ""
        warn(f"{drawn.points} points in {plot}{left_out}")
    if style == "terminal":
        show(render_terminal(build_table(found, query)))
    else:
        emit(render_text(found, query, cast("Style", style)))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def condition(text: str) -> tuple[str, tuple[str, ...]]:
    """A condition of the command line, field=value[,value]."""
    field, sign, values = text.partition("=")
    if not sign or not values:
        raise InputError(f"cannot read --where {text!r}: write field=value, as in dtype=bf16")
    return field.strip(), _names(values)
