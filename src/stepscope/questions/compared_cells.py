"""What a study of runs measures: its usual sizes, and its cells."""

from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.core.model_config import ModelConfig
from stepscope.core.run import Settings
from stepscope.engine.grid import grid
from stepscope.engine.plan import Cell, order_cells


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured where the user says nothing."""

    models: tuple[str, ...]
    seq_len: int
    batch_size: int
    dtypes: tuple[str, ...]


def compared_cells(
    *,
    models: Sequence[ModelConfig],
    seq_lens: Sequence[int],
    batch_size: int,
    dtypes: Sequence[str],
    settings: Settings,
    **choices: Sequence[str | None],
) -> tuple[Cell, ...]:
    """A cell for each combination, small models first. `choices`: of other fields of the workload."""
    lists = {field: list(values) for field, values in choices.items()}
    sizes = {"seq_len": list(seq_lens), "batch_size": [batch_size], "dtype": list(dtypes)}
    workloads = grid(model=models, **sizes, **lists)
    return order_cells([Cell(workload=workload, settings=settings) for workload in workloads])
