"""An answer in Markdown: headings, pipe tables, paragraphs."""

from stepscope.core.answer import Answer, Table
from stepscope.core.errors import printable
from stepscope.rendering.cells import is_figures, row_texts, sentences_of, where_of


def render(answer: Answer) -> str:
    """Paragraphs and pipe tables; a pipe inside a cell is escaped."""
    lead = [printable(line.text) for line in answer.lead] or [answer.question, where_of(answer)]
    parts = [line for line in lead if line]
    for table in answer.tables:
        parts += [f"**{printable(table.title)}**"] if table.title else []
        parts += [_table(table)] if table.columns else []
        parts += [printable(line.text) for line in table.notes]
    parts += [line.text for line in sentences_of(answer)]
    return "\n\n".join([*parts, *map(printable, (*answer.asides, *answer.origin))]) + "\n"


def _table(table: Table) -> str:
    heads = list(map(printable, table.columns))
    rule = ["---:" if is_figures(table, i) else "---" for i in range(len(table.columns))]
    rows = row_texts(table)
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in (heads, rule, *rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in escaped)
