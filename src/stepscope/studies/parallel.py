"""What do ranks gain that share a step? Cells of each strategy and number of ranks, for strong and for weak scaling."""

import itertools
from collections.abc import Sequence

from stepscope.core.errors import InputError
from stepscope.core.model_config import ModelConfig
from stepscope.core.run import Settings
from stepscope.core.strategies import NOT_PARALLEL, strategy_named
from stepscope.core.workload import Workload
from stepscope.engine.grid import grid
from stepscope.engine.plan import Cell, order_cells
from stepscope.studies.compared_cells import Sizes

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
    batch_size: int, dtypes: Sequence[str], settings: Settings,
) -> tuple[tuple[Cell, ...], list[tuple[str, str]]]:  # fmt: skip
    """The step of one process, and that of each strategy and number of ranks with this batch and with one as large for
    each rank; and the combinations that cannot be, with why. One rank is one process."""
    for name in strategies:
        strategy_named(name)
    if any(number < 1 for number in ranks) or max(ranks, default=0) < 2:
        raise InputError(f"--ranks {','.join(map(str, ranks))} compares nothing with one process: name 2, or more")
    refused: list[tuple[str, str]] = []
    sizes = {"seq_len": list(seq_lens), "dtype": list(dtypes)}
    alone = grid(model=models, **sizes, batch_size=batch_size)
    workloads: list[Workload] = []
    for number, name in itertools.product((number for number in ranks if number > 1), strategies):
        for batch in (batch_size, number * batch_size):
            try:
                workloads += grid(model=models, **sizes, batch_size=batch, parallel=name, ranks=number)
            except InputError as error:
                refused.append((f"{name} x {number}, batch {batch}", str(error)))
    if not workloads:
        raise InputError(f"nothing to measure beside one process: {refused[0][1] if refused else 'name a strategy'}")
    return order_cells([Cell(workload=workload, settings=settings) for workload in [*alone, *workloads]]), refused


def without_none(strategies: Sequence[str]) -> tuple[str, ...]:
    """The strategies without `none`, which is measured in any case."""
    return tuple(name for name in strategies if name != NOT_PARALLEL)
