"""A whole training step of a model with each attention: which cells."""

from collections.abc import Sequence
from typing import Any

from stepscope.engine.plan import Cell
from stepscope.studies.compared_cells import Sizes, compared_cells

ON_GPU = Sizes(implementations="reference,sdpa-cudnn,flash", dtypes="bf16", seq_len="1024", batch_size=4)
ON_CPU = Sizes(implementations="reference,sdpa", dtypes="fp32", seq_len="64", batch_size=1)


def step_sizes_for(device_type: str) -> Sizes:
    """The defaults of a `cpu`, or of anything else."""
    return ON_CPU if device_type == "cpu" else ON_GPU


def step_cells(*, attentions: Sequence[str], **sizes: Any) -> tuple[Cell, ...]:
    """A cell for each attention of each of the sizes, as `compared_cells` takes them; forward to optimizer."""
    return compared_cells(attention=attentions, **sizes)
