"""An answer's tables as CSV: bare figures, in the units that the heads name. Sentences are left out."""

import csv
import io
from typing import Any

from stepscope.core.answer import Answer
from stepscope.rendering.cells import bare_heads, bare_row

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")


def render(answer: Answer) -> str:
    """The tables one below the other; of several each begins with a line of its name, and ends with an empty one."""
    tables = [table for table in answer.tables if table.columns]
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    for table in tables:
        if len(tables) > 1:
            writer.writerow([inert(table.title or table.columns[0])])
        writer.writerow(map(inert, bare_heads(table)))
        writer.writerows(map(inert, bare_row(table, row)) for row in table.rows)
        if len(tables) > 1:
            target.write("\n")
    return target.getvalue()


def inert(cell: Any) -> Any:
    """A cell that no spreadsheet takes for a formula: text that begins like one gets an apostrophe before it."""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if not isinstance(cell, str) or not cell.startswith(_FORMULA_STARTS):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell
