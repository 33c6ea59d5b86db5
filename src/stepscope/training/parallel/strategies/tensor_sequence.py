"""Tensor and sequence parallel: between the split products, the sequence is split (Korthikanti et al. 2022).

Beside the products of `tensor`, embedding and head are split by vocabulary, and norms and residual stream by sequence.
An all-reduce is a reduce-scatter and an all-gather; here the norm stands between the two, so that a rank keeps 1/n of
what every rank keeps whole under `tensor`:

    x of S/n  ->  norm  ->  all-gather  ->  q, k, v | gate, up  ->  output | down  ->  reduce-scatter  ->  + x of S/n

In forward a block gathers two tensors of B x S x M elements and scatters two; backward does the reverse.
"""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from stepscope.training.parallel.collective import broadcast_from_first
from stepscope.training.parallel.step import Spread, Whole
from stepscope.training.parallel.strategies.tensor import checked, of_split
from stepscope.training.training_step import Ranks
from stepscope.training.transformer import Transformer


def spread(whole: Whole, ranks: Ranks) -> Spread:
    """Split the products of every block, embedding and head, and what lies between."""
    model = checked(whole, ranks.ranks, "tensor-sequence")
    broadcast_from_first(model)
    split_all(model, init_device_mesh(next(model.parameters()).device.type, (ranks.ranks,)))
    return of_split(whole)


def split_all(model: Transformer, mesh: DeviceMesh) -> None:
    """Split the model over the mesh: every parameter is a DTensor of it."""
    for block in model.blocks:
        parallelize_module(block, mesh, _of_block())
    of_model: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, of_model)
    if model.config.tied:
        # Both are split by vocabulary, so that they are one tensor again.
        model.head.weight = model.embedding.weight


def _of_block() -> dict[str, ParallelStyle]:
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    by_columns = ("attention.query", "attention.key", "attention.value", "feed_forward.gate", "feed_forward.up")
    return {
        **dict.fromkeys(("attention_norm", "feed_forward_norm"), SequenceParallel()),
        **dict.fromkeys(("attention", "feed_forward"), gather),
        **dict.fromkeys(by_columns, ColwiseParallel()),
        **dict.fromkeys(("attention.output", "feed_forward.down"), RowwiseParallel(output_layouts=Shard(1))),
    }
