"""What a study of runs measures: its usual sizes, and its cells."""

import contextlib
import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from stepscope.core.model_config import ModelConfig
from stepscope.core.run import Settings
from stepscope.engine.plan import Cell, grid, order_cells


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


# Environment variables for the processes that a study starts.


@contextlib.contextmanager
def child_environment(wanted: Mapping[str, str]) -> Generator[None]:
    """Processes that start in here have these variables; afterwards they are what they were."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
