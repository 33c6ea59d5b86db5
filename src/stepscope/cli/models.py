"""`stepscope models`: the presets with their sizes."""

import sys

import msgspec

from stepscope.cli import options
from stepscope.cli.output import show
from stepscope.core.model_config import PRESETS
from stepscope.work.transformer import parameter_count


def models(json: options.Json = False) -> None:
    """List the presets: name, parameters and every size."""
    rows = [
        {"name": c.name, "parameters": parameter_count(c), **c.sizes, "head_dim": c.head_dim} for c in PRESETS.values()
    ]
    if json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(rows), indent=1).decode() + "\n")
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "name" else "right")
    for row in rows:
        table.add_row(*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row.values()))
    show(table)
