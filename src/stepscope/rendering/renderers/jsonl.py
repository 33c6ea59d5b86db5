"""An answer's tables as JSON lines: an object a row. Sentences are left out."""

import math

import msgspec

from stepscope.core.answer import Answer, name_of
from stepscope.rendering.cells import bare_heads, bare_row


def render(answer: Answer) -> str:
    """An object for each row, by the heads of its columns; of several tables each row names its own, as `table`."""
    tables = [table for table in answer.tables if table.columns]
    lines: list[bytes] = []
    for table in tables:
        named = {"table": name_of(table)} if len(tables) > 1 else {}
        heads = bare_heads(table)
        for row in table.rows:
            # JSON has no NaN and no infinity: a word says which it is.
            cells = (
                str(cell) if isinstance(cell, float) and not math.isfinite(cell) else cell
                for cell in bare_row(table, row)
            )
            figures = dict(zip(heads, cells, strict=True))
            lines.append(msgspec.json.encode({**named, **figures}))
    return "".join(line.decode() + "\n" for line in lines)
