"""`stepscope models`: the presets with their sizes."""

import msgspec

from stepscope.cli.output import emit, present
from stepscope.cli.verb import verb
from stepscope.core.answer import Answer, table_of
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
    columns = [(name, "," if i else "") for i, name in enumerate(rows[0])]
    present(
        Answer(study="models", question="", tables=(table_of(*columns, rows=[tuple(row.values()) for row in rows]),))
    )
