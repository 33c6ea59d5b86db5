"""One table, four styles: terminal, Markdown, CSV, JSON lines."""

from collections.abc import Sequence
from typing import Literal, get_args

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from stepscope.core.run import Run
from stepscope.report.tables import Table, TableQuery, build_records, build_table

Style = Literal["terminal", "markdown", "csv", "jsonl"]
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")
STYLES: tuple[str, ...] = get_args(Style)


def render_terminal(table: Table) -> RenderableType:
    """Labels left, figures right, notes below."""
    rendered = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, caption=None)
    for i, head in enumerate(table.heads):
        rendered.add_column(head, justify="left" if i < table.text_columns else "right")
    for row in table.rows:
        rendered.add_row(*row)
    return Group(rendered, *(Text(note) for note in table.notes))


def render_markdown(table: Table) -> str:
    """A pipe table; a pipe inside a cell is escaped."""
    rule = ["---" if i < table.text_columns else "---:" for i in range(len(table.heads))]
    lines = [table.heads, tuple(rule), *table.rows]
    text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return "\n\n".join([text, *table.notes]) + "\n"


def render_text(runs: Sequence[Run], query: TableQuery, style: Style) -> str:
    """The styles that are plain text."""
    if style == "markdown":
        return render_markdown(build_table(runs, query))
    import polars as pl  # noqa: PLC0415  (a machine that only measures has none, and shows tables all the same)

    frame = pl.DataFrame(build_records(runs, query), infer_schema_length=None)
    if style == "jsonl":
        return frame.write_ndjson()
    texts = [name for name, dtype in frame.schema.items() if dtype == pl.String]
    return frame.with_columns(pl.Series(name, map(inert, frame[name]), dtype=pl.String) for name in texts).write_csv()


def inert(cell: str | None) -> str | None:
    """A CSV cell that no spreadsheet takes for a formula: text that begins like one gets an apostrophe before it."""
    if not cell or not cell.startswith(_FORMULA_STARTS):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell
