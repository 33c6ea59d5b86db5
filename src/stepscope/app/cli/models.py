"""`stepscope models`: the presets with their sizes."""

from stepscope.app.cli.presentation import Presentation
from stepscope.app.cli.verb import verb
from stepscope.core.answer import Answer, table_of
from stepscope.core.document import json_document
from stepscope.core.model_config import PRESETS
from stepscope.core.work.transformer import parameter_count


@verb("models", "stepscope models", "stepscope models --json")
def models(*, shown: Presentation) -> None:
    """List the presets: name, parameters and every size."""
    rows = [
        {"name": c.name, "parameters": parameter_count(c), **c.sizes, "head_dim": c.head_dim} for c in PRESETS.values()
    ]
    columns = [(name, "," if i else "") for i, name in enumerate(rows[0])]
    sizes = table_of(*columns, rows=[tuple(row.values()) for row in rows])
    shown.show(Answer(study="models", question="", tables=(sizes,)), document=lambda: json_document(rows))
