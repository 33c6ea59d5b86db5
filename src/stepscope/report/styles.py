"""One table, four styles: terminal, Markdown, CSV, JSON lines."""

from collections.abc import Sequence
from typing import Literal, get_args

from rich import box
from rich.table import Table as RichTable

from stepscope.core.run import Run
from stepscope.report.tables import Table, TableQuery, build_frame, build_table

Style = Literal["terminal", "markdown", "csv", "jsonl"]
STYLES: tuple[str, ...] = get_args(Style)


def render_terminal(table: Table) -> RichTable:
    """Labels left, figures right, notes below."""
    rendered = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, caption=" ".join(table.notes) or None)
    rendered.caption_justify = "left"
    for i, head in enumerate(table.heads):
        rendered.add_column(head, justify="left" if i < table.text_columns else "right")
    for row in table.rows:
        rendered.add_row(*row)
    return rendered


def render_markdown(table: Table) -> str:
    """A pipe table; a pipe inside a cell is escaped."""
    rule = ["---" if i < table.text_columns else "---:" for i in range(len(table.heads))]
    lines = [table.heads, tuple(rule), *table.rows]
    text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return "\n\n".join([text, *table.notes]) + "\n"


def render_text(runs: Sequence[Run], query: TableQuery, style: Style) -> str:
    """The styles that are plain text."""
    if style == "csv":
        return build_frame(runs, query).write_csv()
    if style == "jsonl":
        return build_frame(runs, query).write_ndjson()
    return render_markdown(build_table(runs, query))
