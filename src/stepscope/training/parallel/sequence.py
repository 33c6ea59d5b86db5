"""The sequence in chunks, and which of them a rank takes.

With causal attention the last query sees all keys and the first sees one, so that equal parts are unequal work. A
sequence is therefore cut into 2 n chunks, and rank r of n takes chunk r and chunk 2 n - 1 - r: one near the head and
one near the tail, together as much work as every other rank's (Llama Team 2024, section 3.3.2). PyTorch's
context_parallel shares a sequence out in the same way.
"""

import torch
from torch import Tensor


def part_of_sequence(tensor: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    """The two chunks of a rank, side by side."""
    chunks = tensor.chunk(2 * ranks, dim)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]), dim)


def in_order(parts: Tensor, dim: int) -> Tensor:
    """The whole sequence of the parts of all ranks, which lie along a first dimension of their own."""
    heads, tails = parts.chunk(2, dim + 1)
    return torch.cat((*heads, *tails.flip(0)), dim)


def by_rank(whole: Tensor, dim: int, ranks: int) -> Tensor:
    """The opposite of `in_order`."""
    return torch.stack([part_of_sequence(whole, dim, rank, ranks) for rank in range(ranks)])
