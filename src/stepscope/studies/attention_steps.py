"""A whole training step of a model with each attention: which cells."""

from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.core.model_config import ModelConfig
from stepscope.core.run import Settings
from stepscope.studies.grid import grid
from stepscope.studies.sweep_plan import Cell, order_cells


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """What is measured where the user says nothing."""

    implementations: str
    dtypes: str
    seq_len: str
    batch_size: int


ON_GPU = StepSizes(implementations="reference,sdpa-cudnn,flash", dtypes="bf16", seq_len="1024", batch_size=4)
ON_CPU = StepSizes(implementations="reference,sdpa", dtypes="fp32", seq_len="64", batch_size=1)


def step_sizes_for(device_type: str) -> StepSizes:
    """The defaults of a `cpu`, or of anything else."""
    return ON_CPU if device_type == "cpu" else ON_GPU


def step_cells(
    *,
    models: Sequence[ModelConfig],
    seq_lens: Sequence[int],
    batch_size: int,
    dtypes: Sequence[str],
    attentions: Sequence[str],
    settings: Settings,
) -> tuple[Cell, ...]:
    """A cell for each model, sequence, dtype and attention, small models first; forward, backward and optimizer."""
    workloads = grid(
        model=models, seq_len=list(seq_lens), batch_size=[batch_size], dtype=list(dtypes), attention=list(attentions)
    )
    return order_cells([Cell(workload=workload, settings=settings) for workload in workloads])
