"""`stepscope table`: any set of runs, arranged."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import msgspec
import typer

from stepscope.app.cli.listed import listed_runs
from stepscope.app.cli.output import check_picture, draw, present
from stepscope.app.cli.presentation import Presentation
from stepscope.app.cli.verb import verb
from stepscope.core.errors import choose

if TYPE_CHECKING:
    from stepscope.runs.conditions import Condition


@verb(
    "table",
    "stepscope table --tag first --columns dtype --value forward --speedup fp32",
    "stepscope table runs --where model=small --rows seq_len --value step,peak_memory --style markdown",
)
def table(
    places: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUNS]...", help="Run directories, folders of them, or `last` (default: --runs)."),
    ] = None,
    *,
    rows: str = "model,seq_len",
    columns: str = "",
    value: str = "step",
    stat: str,
    speedup: str | None,
    where: tuple[str, ...] = (),
    tag: str | None,
    runs: Path,
    style: str,
    brief: bool = False,
    save: Path | None,
) -> None:
    """Tables of runs: terminal, Markdown, CSV or JSON lines; and as a plot."""
    from stepscope.rendering.renderers import BARE, STYLES
    from stepscope.runs.tables import Statistic, TableQuery, answer_table

    choose(style, STYLES, "style")
    check_picture(save)
    conditions = conditions_of(where, tag)
    query = TableQuery(
        rows=_names(rows),
        columns=_names(columns),
        values=_names(value),
        statistic=cast("Statistic", stat),
        speedup=speedup,
        where=tuple(conditions),
    )
    found = listed_runs(places, runs)
    answer = answer_table(found, query, bare=style in BARE)
    if save is not None:
        from stepscope.runs.table_panels import table_panels

        answer = msgspec.structs.replace(answer, panels=table_panels(found, query))
    if brief:
        Presentation(style=style, brief=True).show(answer)
    else:
        present(answer, style=style)
    draw(answer, save)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def conditions_of(where: Iterable[str], tag: str | None = None) -> "list[Condition]":
    """The conditions of every --where, and of --tag."""
    from stepscope.runs.conditions import conditions_in

    found = [condition for text in where for condition in conditions_in(text)]
    return [*found, *([("tag", (tag,))] if tag is not None else [])]
