"""What do ranks gain that share a step? Cells of each strategy and number of ranks, for strong and for weak scaling."""

import itertools
from collections.abc import Sequence
from typing import Any

from stepscope.core.errors import InputError, choose
from stepscope.core.model_config import ModelConfig
from stepscope.core.run import Settings
from stepscope.core.strategies import NOT_PARALLEL, SCALINGS, strategy_named
from stepscope.core.workload import Workload
from stepscope.engine.grid import grid
from stepscope.engine.plan import Cell, order_cells
from stepscope.questions.compared_cells import Sizes

ON_GPU = Sizes(models=("large",), dtypes=("bf16",), seq_len=512, batch_size=8)
ON_CPU = Sizes(models=("tiny",), dtypes=("fp32",), seq_len=64, batch_size=4)
USUAL = (
    "ddp-naive", "ddp-flat", "ddp-overlap", "ddp-bucketed", "zero1", "fsdp-textbook", "ddp", "fsdp2",
)  # fmt: skip


def usual_ranks(device_type: str) -> tuple[int, ...]:
    """Every GPU, or two ranks on a CPU."""
    if device_type == "cpu":
        return (2,)
    import torch  # noqa: PLC0415  (for GPUs alone)

    return (max(2, torch.cuda.device_count()),)


def parallel_cells(
    *, strategies: Sequence[str], ranks: Sequence[int], models: Sequence[ModelConfig], seq_lens: Sequence[int],
    batch_size: int, dtypes: Sequence[str], settings: Settings, scaling: str = "both", **choices: Any,
) -> tuple[tuple[Cell, ...], list[tuple[str, str]]]:  # fmt: skip
    """The step of one process, and that of each strategy and number of ranks with this batch and with one as large for
    each rank; and the combinations that cannot be, with why. One rank is one process.

    scaling: one of SCALINGS. choices: of other fields of each workload.
    """
    choose(scaling, SCALINGS, "scaling")
    for name in strategies:
        strategy_named(name)
    if any(number < 1 for number in ranks) or max(ranks, default=0) < 2:
        raise InputError(f"--ranks {','.join(map(str, ranks))} compares nothing with one process: name 2, or more")
    refused: list[tuple[str, str]] = []
    sizes = {"seq_len": list(seq_lens), "dtype": list(dtypes), **choices}
    alone = grid(model=models, **sizes, batch_size=batch_size)
    workloads: list[Workload] = []
    for number, name in itertools.product((number for number in ranks if number > 1), strategies):
        for batch in batches_of(scaling, batch_size, number):
            try:
                workloads += grid(model=models, **sizes, batch_size=batch, parallel=name, ranks=number)
            except InputError as error:
                refused.append((f"{name} x {number}, batch {batch}", str(error)))
    if not workloads:
        raise InputError(f"nothing to measure beside one process: {refused[0][1] if refused else 'name a strategy'}")
    return order_cells([Cell(workload=workload, settings=settings) for workload in [*alone, *workloads]]), refused


def batches_of(scaling: str, batch_size: int, ranks: int) -> tuple[int, ...]:
    """The batches of so many ranks beside one process with `batch_size` sequences.

    >>> batches_of("both", 4, 2), batches_of("strong", 4, 2), batches_of("weak", 4, 2)
    ((4, 8), (4,), (8,))
    """
    return {"strong": (batch_size,), "weak": (ranks * batch_size,)}.get(scaling, (batch_size, ranks * batch_size))


def without_none(strategies: Sequence[str]) -> tuple[str, ...]:
    """The strategies without `none`, which is measured in any case."""
    return tuple(name for name in strategies if name != NOT_PARALLEL)
