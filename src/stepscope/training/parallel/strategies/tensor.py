"""Tensor parallel: each product of a block is split over the ranks, also with the sequence split, or with shards.

`tensor` splits the products alone (Shoeybi et al. 2019, Megatron-LM, section 3):

    y = down(silu(gate(x)) * up(x))     gate and up by columns, down by rows: one all-reduce, of y
    o = output(attention(q, k, v))      q, k, v by heads, output by rows: one all-reduce, of o

Every rank has the whole batch and the whole residual stream. In forward a block all-reduces two tensors of
B x S x M elements, and two more in backward. The heads of queries, and those of keys, must divide by the ranks.

`tensor-sequence` also splits embedding and head by vocabulary, and norms and residual stream by sequence (Korthikanti
et al. 2022). An all-reduce is a reduce-scatter and an all-gather; here the norm stands between the two, so that a rank
keeps 1/n of what every rank keeps whole under `tensor`:

    x of S/n  ->  norm  ->  all-gather  ->  q, k, v | gate, up  ->  output | down  ->  reduce-scatter  ->  + x of S/n

In forward a block gathers two tensors of B x S x M elements and scatters two; backward does the reverse.

`fsdp2-tensor` has two dimensions (Liang et al. 2024, TorchTitan). With 2 n ranks, rank r is at (r // 2, r % 2) of a
mesh. Its neighbour runs `tensor-sequence` with it on the same samples, which sends much and waits for it, so the two
should share the fastest links. The n ranks across hold the same half of each product, and `fsdp2` shards it among them:
a rank keeps 1 / 2n of every parameter.
"""

import contextlib
from collections.abc import Callable
from typing import cast

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from stepscope.core.errors import InputError
from stepscope.core.strategies import STRATEGIES
from stepscope.training.parallel.collective import broadcast_from_first
from stepscope.training.parallel.step import Spread, Whole, named_gradients
from stepscope.training.parallel.strategies.pytorch import full, unreduced
from stepscope.training.training_step import Ranks
from stepscope.training.transformer import CausalSelfAttention, SwiGLU, Transformer

_BY_COLUMNS = ("attention.query", "attention.key", "attention.value", "feed_forward.gate", "feed_forward.up")
_BY_ROWS = ("attention.output", "feed_forward.down")
"""The products of a block, by how they are split."""


def tensor(whole: Whole, ranks: Ranks) -> Spread:
    """Split the products of every block."""
    model = _checked(whole, ranks.ranks, "tensor")
    broadcast_from_first(model)
    mesh = init_device_mesh(next(model.parameters()).device.type, (ranks.ranks,))
    for block in model.blocks:
        # Products that share an input take one DTensor, or each would all-reduce its own part of the input's gradient.
        shared = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
        styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in _BY_COLUMNS}
        styles |= {name: RowwiseParallel() for name in _BY_ROWS}
        parallelize_module(block, mesh, {"attention": shared, "feed_forward": shared, **styles})
    return _of_split(whole)


def tensor_sequence(whole: Whole, ranks: Ranks) -> Spread:
    """Split the products of every block, embedding and head, and what lies between."""
    model = _checked(whole, ranks.ranks, "tensor-sequence")
    broadcast_from_first(model)
    _split_all(model, init_device_mesh(next(model.parameters()).device.type, (ranks.ranks,)))
    return _of_split(whole)


def fsdp2_tensor(whole: Whole, ranks: Ranks) -> Spread:
    """Split products between neighbours, then shard each block across pairs."""
    name = "fsdp2-tensor"
    near = STRATEGIES[name].near
    model = _checked(whole, near, name)
    broadcast_from_first(model)
    shape = (ranks.ranks // near, near)
    mesh = init_device_mesh(next(model.parameters()).device.type, shape, mesh_dim_names=("across", "near"))
    _split_all(model, mesh["near"])
    for block in whole.blocks:
        fully_shard(block, mesh=mesh["across"])
    fully_shard(whole.forward, mesh=mesh["across"])
    return _of_split(whole, local=lambda: unreduced(whole.forward))


def _split_all(model: Transformer, mesh: DeviceMesh) -> None:
    """Split the model over the mesh: every parameter is a DTensor of it."""
    for block in model.blocks:
        gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        of_block: dict[str, ParallelStyle] = {
            **dict.fromkeys(("attention_norm", "feed_forward_norm"), SequenceParallel()),
            **dict.fromkeys(("attention", "feed_forward"), gather),
            **dict.fromkeys(_BY_COLUMNS, ColwiseParallel()),
            **dict.fromkeys(_BY_ROWS, RowwiseParallel(output_layouts=Shard(1))),
        }
        parallelize_module(block, mesh, of_block)
    of_model: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, of_model)
    if model.config.tied:
        # Both are split by vocabulary, so that they are one tensor again.
        model.head.weight = model.embedding.weight


def _of_split(
    whole: Whole, local: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
) -> Spread:
    """The spread of a model some of whose parameters are DTensors by now."""
    model = whole.model
    # Fused updates take tensors of one kind: what is split, and what every rank has whole, are groups of their own.
    split = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    kept = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    make = whole.make_optimizer
    return Spread(
        model=model,
        forward=whole.forward,
        optimizer=make([{"params": alike} for alike in (split, kept) if alike]) if make is not None else None,
        full_parameters=lambda: full(dict(model.named_parameters())),
        full_gradients=lambda: full(named_gradients(model)),
        local=local,
    )


def _checked(whole: Whole, ranks: int, name: str) -> Transformer:
    """The textbook's model. Raises InputError where so many ranks cannot divide its products."""
    model = cast("Transformer", whole.model)
    attention = cast("CausalSelfAttention", model.blocks[0].attention)
    feed_forward = cast("SwiGLU", model.blocks[0].feed_forward)
    sizes = {
        "heads": attention.query.out_features // attention.head_dim,
        "kv_heads": attention.key.out_features // attention.head_dim,
        "d_ff": feed_forward.gate.out_features,
    }
    for size_name, size in sizes.items():
        if size % ranks:
            raise InputError(f"--parallel {name} splits {size_name}, and {size} do not divide by {ranks} ranks")
    return model
