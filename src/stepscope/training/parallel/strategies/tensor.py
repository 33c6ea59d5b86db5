"""Tensor parallel: each product of a block is split over the ranks (Shoeybi et al. 2019, Megatron-LM, section 3).

    y = down(silu(gate(x)) * up(x))     gate and up by columns, down by rows: one all-reduce, of y
    o = output(attention(q, k, v))      q, k, v by heads, output by rows: one all-reduce, of o

Every rank has the whole batch and the whole residual stream. In forward a block all-reduces two tensors of
B x S x M elements, and two more in backward. The heads of queries, and those of keys, must divide by the ranks.
"""

import contextlib
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

from stepscope.core.errors import InputError
from stepscope.training.parallel.collective import broadcast_from_first
from stepscope.training.parallel.step import Spread, Whole
from stepscope.training.training_step import Ranks
from stepscope.training.transformer import CausalSelfAttention, SwiGLU, Transformer

_PLAN = {
    "attention.query": ColwiseParallel,
    "attention.key": ColwiseParallel,
    "attention.value": ColwiseParallel,
    "attention.output": RowwiseParallel,
    "feed_forward.gate": ColwiseParallel,
    "feed_forward.up": ColwiseParallel,
    "feed_forward.down": RowwiseParallel,
}
"""How each product of a block is split."""


def spread(whole: Whole, ranks: Ranks) -> Spread:
    """Split the products of every block."""
    model = checked(whole, ranks.ranks, "tensor")
    broadcast_from_first(model)
    mesh = init_device_mesh(next(model.parameters()).device.type, (ranks.ranks,))
    for block in model.blocks:
        # Products that share an input take one DTensor, or each would all-reduce its own part of the input's gradient.
        shared = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
        styles = {name: style() for name, style in _PLAN.items()}
        parallelize_module(block, mesh, {"attention": shared, "feed_forward": shared, **styles})
    return of_split(whole)


def of_split(
    whole: Whole, local: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
) -> Spread:
    """The spread of a model some of whose parameters are DTensors by now."""
    model = whole.model

    def full(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}

    # Fused updates take tensors of one kind: what is split, and what every rank has whole, are groups of their own.
    split = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    kept = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    make = whole.make_optimizer
    return Spread(
        model=model,
        forward=whole.forward,
        optimizer=make([{"params": alike} for alike in (split, kept) if alike]) if make is not None else None,
        full_parameters=lambda: full(dict(model.named_parameters())),
        full_gradients=lambda: full({n: p.grad for n, p in model.named_parameters() if p.grad is not None}),
        local=local,
    )


def checked(whole: Whole, ranks: int, name: str) -> Transformer:
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
