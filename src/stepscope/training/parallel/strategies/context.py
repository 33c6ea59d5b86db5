"""Context parallel, lesson 7: a sequence that is too long for one device is split over several.

All that a block does to one token alone (norms, products, feed-forward) a rank does for its own part of the sequence.
Attention alone looks across: a query sees the keys of every position before it, whoever has them. So a rank gathers
keys and values, attends with its own queries, and in backward sends the gradients of keys and values home:

    forward     all-gather      k, v       2 (n - 1) / n of B x S x key_width a block
    backward    reduce-scatter  dk, dv     as much again

With fewer heads of keys than of queries that is little beside the work, which grows with S squared (Llama Team 2024,
section 3.3.2). Activations take 1/n of their memory, but for the keys and values of one block; parameters are whole on
every rank, and their gradients averaged as in lesson 4: the loss is the mean over tokens, and all ranks have as many.

A rank has two chunks (training/parallel/step.py), each of which sees the keys up to its own end. Rotary positions
are those of the chunks. Ring attention passes keys and values round instead of gathering them, and hides the sends
behind the work (Liu et al. 2023).

`context` runs PyTorch's, in which keys and values go round. Within `context_parallel`, F.scaled_dot_product_attention
is one of all ranks, forward and backward, for the kernels of GPUs alone. It is entered before a step's first forward
and left when its gradients are averaged, so that nothing else of the process meets it. It splits the rotary positions
itself; the tokens are split alike (training/parallel/step.py).
"""

import contextlib
import functools
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from stepscope.training.attention import AttentionFunction
from stepscope.training.attention.pytorch import sdpa
from stepscope.training.attention.written_out import for_all_heads, reference
from stepscope.training.parallel.step import Spread, Whole, by_rank, in_order, part_of_sequence, replicated
from stepscope.training.parallel.strategies.ddp_textbook import BucketedDataParallel
from stepscope.training.training_step import Ranks
from stepscope.training.transformer import CausalSelfAttention, Transformer

_SEQUENCE = 2
"""The dimension of the positions in queries, keys and values (B, H, S, D)."""


@functools.cache
def _causal_at_the_end(queries: int, keys: int) -> Any:
    """PyTorch's mark for a causal mask aligned at the end, for which it has fused kernels. Its making cannot bear that
    selective checkpointing, or an instrument, watches every operator."""
    with _disable_current_modes():
        return causal_lower_right(queries, keys)


class _GatherSequence(torch.autograd.Function):
    """The whole sequence of all ranks' parts; backward adds up what each rank found of this rank's part."""

    @staticmethod
    def forward(ctx: Any, part_BHSD: Tensor) -> Tensor:
        ranks = dist.get_world_size()
        parts = part_BHSD.new_empty((ranks * part_BHSD.shape[0], *part_BHSD.shape[1:]))
        dist.all_gather_into_tensor(parts, part_BHSD.contiguous())
        return in_order(parts.unflatten(0, (ranks, -1)), _SEQUENCE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (whole_BHSD,) = gradients
        parts = by_rank(whole_BHSD, _SEQUENCE, dist.get_world_size())
        part = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(part, parts.flatten(0, 1))
        return part


def attention_across(inner: AttentionFunction, ranks: Ranks) -> AttentionFunction:
    """Causal attention of this rank's queries to the keys of all ranks, computed as `inner` computes it."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None
    ) -> Tensor:
        assert causal and window is None
        k, v = cast("Tensor", _GatherSequence.apply(k)), cast("Tensor", _GatherSequence.apply(v))
        outs: list[Tensor] = []
        for chunk, chunk_q in zip((ranks.rank, 2 * ranks.ranks - 1 - ranks.rank), q.chunk(2, _SEQUENCE), strict=True):
            end = (chunk + 1) * chunk_q.shape[_SEQUENCE]
            outs.append(_to_the_end(inner, chunk_q, k[:, :, :end], v[:, :, :end], scale))
        return torch.cat(outs, _SEQUENCE)

    return attention


def _to_the_end(inner: AttentionFunction, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal attention of the last queries of a sequence to all of its keys so far."""
    if inner is sdpa:
        k, v = for_all_heads(q, k, v)
        mask = _causal_at_the_end(q.shape[_SEQUENCE], k.shape[_SEQUENCE])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return reference(q, k, v, causal=True, scale=scale, first_query=k.shape[_SEQUENCE] - q.shape[_SEQUENCE])


def context_textbook(whole: Whole, ranks: Ranks) -> Spread:
    """Split the sequence; gather keys and values for attention, and average gradients."""
    model = cast("Transformer", whole.model)
    module = BucketedDataParallel(whole.forward)  # broadcasts the rotary positions while they are whole
    for name in ("cos_SD", "sin_SD"):
        positions: Tensor = getattr(model.rotary, name)
        setattr(model.rotary, name, part_of_sequence(positions, 0, ranks.rank, ranks.ranks))
    for block in model.blocks:
        attention = cast("CausalSelfAttention", block.attention)
        attention.attention = attention_across(attention.attention, ranks)
    return replicated(whole, module, finish=module.finish_gradient_synchronization, local=module.no_sync)


def context(whole: Whole, ranks: Ranks) -> Spread:
    """Run steps within PyTorch's context, and average gradients in buckets."""
    from torch.distributed.tensor.experimental import context_parallel  # noqa: PLC0415  (it changes between releases)

    rotary = cast("Transformer", whole.model).rotary
    module = BucketedDataParallel(whole.forward)  # broadcasts the rotary positions while they are whole
    mesh = init_device_mesh(next(whole.model.parameters()).device.type, (ranks.ranks,))
    entered = contextlib.ExitStack()
    within = False

    def enter(*_: Any) -> None:
        nonlocal within
        if not within:
            within = True
            entered.enter_context(
                context_parallel(mesh, buffers=[rotary.cos_SD, rotary.sin_SD], buffer_seq_dims=[0, 0])
            )

    def finish() -> None:
        nonlocal within
        module.finish_gradient_synchronization()
        entered.close()
        within = False

    module.register_forward_pre_hook(enter)
    return replicated(whole, module, finish=finish, local=module.no_sync)
