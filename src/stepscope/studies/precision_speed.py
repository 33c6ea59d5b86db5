"""How much faster is a step in TF32 or bf16, and why? Forward and backward of some models in each dtype."""

from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.core.errors import InputError, choose
from stepscope.core.model_config import ModelConfig
from stepscope.core.run import Settings
from stepscope.core.workload import DTYPES
from stepscope.studies.grid import grid
from stepscope.studies.sweep_plan import Cell, order_cells

BASELINE = "fp32"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured where the user says nothing."""

    models: str
    seq_len: str
    batch_size: int
    dtypes: str


ON_GPU = Sizes(models="small,medium,large,xl,2.7B", seq_len="512", batch_size=4, dtypes="fp32,tf32,bf16")
ON_CPU = Sizes(models="tiny,small", seq_len="32", batch_size=1, dtypes="fp32,tf32,bf16")
"""A minute on two cores. TF32 is named to be told that a CPU has none."""


def sizes_for(device_type: str) -> Sizes:
    """The defaults of a `cpu`, or of anything else."""
    return ON_CPU if device_type == "cpu" else ON_GPU


def dtypes_here(dtypes: Sequence[str], device_type: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those of the dtypes that the device has, and those that it lacks: TF32 is a mode of NVIDIA's Tensor Cores.

    Raises InputError where nothing is left to compare. (A GPU before Ampere refuses TF32 itself, cell by cell.)
    """
    for dtype in dtypes:
        choose(dtype, DTYPES, "dtype")
    if BASELINE not in dtypes:
        raise InputError(f"--dtype {','.join(dtypes)} lacks {BASELINE}, which the others are compared with: add it")
    lacking = tuple(dtype for dtype in dtypes if device_type == "cpu" and dtype == "tf32")
    here = tuple(dtype for dtype in dtypes if dtype not in lacking)
    if len(here) < 2:
        told = f" ({', '.join(lacking)}: not on a CPU)" if lacking else ""
        raise InputError(f"nothing to compare {BASELINE} with{told}: name another dtype, as in --dtype fp32,bf16")
    return here, lacking


def speed_cells(
    *,
    models: Sequence[ModelConfig],
    seq_lens: Sequence[int],
    batch_size: int,
    dtypes: Sequence[str],
    settings: Settings,
) -> tuple[Cell, ...]:
    """A cell for each model, sequence length and dtype, small models first. No optimizer: it is the same in each."""
    workloads = grid(
        model=models,
        seq_len=list(seq_lens),
        batch_size=[batch_size],
        dtype=list(dtypes),
        phase=["forward-backward"],
        optimizer=[None],
    )
    return order_cells([Cell(workload=workload, settings=settings) for workload in workloads])
