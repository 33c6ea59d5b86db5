"""How much faster is a step in TF32 or bf16, and why? Forward and backward of some models in each dtype."""

from collections.abc import Sequence
from typing import Any

from stepscope.core.errors import InputError, choose
from stepscope.core.workload import DTYPES
from stepscope.engine.plan import Cell
from stepscope.questions.compared_cells import Sizes, compared_cells
from stepscope.questions.speed.cells import TimedCell

BASELINE = TimedCell.BASELINE


COMPARED = (BASELINE, "tf32", "bf16")
ON_GPU = Sizes(models=("small", "medium", "large", "xl", "2.7B"), seq_len=512, batch_size=4, dtypes=COMPARED)
ON_CPU = Sizes(models=("tiny", "small"), seq_len=32, batch_size=1, dtypes=COMPARED)
"""A minute on two cores. TF32 is named to be told that a CPU has none."""


def dtypes_here(dtypes: Sequence[str], device_type: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The dtypes that the device has, and those that it lacks: TF32 is a mode of NVIDIA's Tensor Cores.

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


def speed_cells(**sizes: Any) -> tuple[Cell, ...]:
    """A cell for each of the sizes, as `compared_cells` takes them. No optimizer: it is the same in each dtype."""
    return compared_cells(phase=["forward-backward"], optimizer=[None], **sizes)
