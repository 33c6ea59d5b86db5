"""`stepscope models`: the presets with their sizes."""

import msgspec

from stepscope.cli.output import emit, show
from stepscope.cli.verb import verb
from stepscope.core.model_config import PRESETS
from stepscope.work.transformer import parameter_count


@verb("models", "stepscope models", "stepscope models --json")
def models(*, json: bool) -> None:
    """List the presets: name, parameters and every size."""
    rows = [
        {"name": c.name, "parameters": parameter_count(c), **c.sizes, "head_dim": c.head_dim} for c in PRESETS.values()
    ]
    if json:
        emit(msgspec.json.format(msgspec.json.encode(rows), indent=1).decode() + "\n")
        return
    from stepscope.report.terminal import make_table

    table = make_table(*rows[0], right_from=1)
    for row in rows:
        table.add_row(*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row.values()))
    show(table)
