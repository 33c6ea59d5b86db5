"""The calls that the gate judges by, and their tensors.

A mistake is seen only where something depends on it. At a boundary of tiles that is the weight of the keys beside it:
with scores of the size 1 a query of 200 keys gives the last one half a percent, which is below what 16 bits can. Scores
that rise from key to key give the last key that a query sees two fifths of all, those that fall give them to the first:
so a key too many or too few is gross, at the end, at the diagonal, and at either side of a window. Each query's scores
may also lie hundreds above or below zero: exp of them is infinite or nothing, and softmax of them is as it was.
"""

import itertools
import math
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepscope.core.attention_timing import AttentionShape, Differentiated, Layout, Numbers
from stepscope.core.attentions import TensorDtype
from stepscope.kernels.documents import document_bounds
from stepscope.training.attention.inputs import TORCH_DTYPES

_LENGTHS = (1, 17, 63, 64, 65, 127, 200)
_HEAD_DIMS = (16, 24, 40, 64, 80, 128, 256)

OFFSETS = (100.0, 300.0)
"""How far from zero the scores of a query lie, above or below."""
SLOPE = 0.5
"""How much a rising or falling score changes from one key to the next."""
_STEEPNESS = 16.0
"""Rising scores are the product of a number of the query, this one over the scale, and of one of the key: small enough
that in 16 bits it is no coarser than the slope."""
_MARGIN = 1024
"""NaNs before and after a tensor, as a count of elements. A multiple of the alignment that any kernel wants."""

LONG = 1024
"""With more queries, implementations may switch kernels (`kernels/flash/configuration.py`)."""

_PROBES = (
    # One position after a multiple of every tile. The weight is at the diagonal, where the maximum of earlier tiles
    # is far too low.
    AttentionShape(
        batch=1, heads=2, key_heads=2, queries=257, keys=257, head_dim=64, causal=True, numbers="rising",
    ),
    # Multiples of every tile, nothing masked, and scores that overflow unless the maximum is subtracted.
    AttentionShape(
        batch=1, heads=2, key_heads=2, queries=128, keys=256, head_dim=64, causal=False, layout="transposed",
        numbers="offset",
    ),
    # Some queries see no key through the window; the weight is at the window's first key.
    AttentionShape(
        batch=2, heads=4, key_heads=2, queries=150, keys=65, head_dim=64, causal=True, window=20, numbers="falling",
    ),
    # The window has two sides and the weight at its last key; keys fill several tiles, queries little more than one.
    AttentionShape(
        batch=1, heads=2, key_heads=2, queries=65, keys=130, head_dim=64, causal=False, window=40, numbers="rising",
    ),
    # The largest score is in the first of many tiles, so a later maximum is far too low; and the scale is below zero.
    AttentionShape(
        batch=1, heads=2, key_heads=1, queries=33, keys=257, head_dim=64, causal=False, scale=-0.2, numbers="falling",
    ),
    # One head of one batch has more than two tiles of 128, and more than a chunk of 256.
    AttentionShape(batch=1, heads=1, key_heads=1, queries=300, keys=300, head_dim=16, causal=True),
    # Every tensor has a layout of its own, the scale is twice the usual, and there are several batches.
    AttentionShape(
        batch=3, heads=4, key_heads=2, queries=37, keys=37, head_dim=64, causal=True, scale=0.25,
        layout=("transposed", "contiguous", "one head", "one number"),
    ),
    AttentionShape(
        batch=2, heads=2, key_heads=2, queries=96, keys=160, head_dim=64, causal=False, scale=0.3,
        layout=("contiguous", "one batch", "transposed", "strided"), differentiated="q",
    ),
    AttentionShape(
        batch=2, heads=3, key_heads=3, queries=77, keys=77, head_dim=64, causal=True,
        layout=("strided", "transposed", "contiguous", "transposed"), differentiated="kv",
    ),
)  # fmt: skip


def gate_shapes() -> tuple[AttentionShape, ...]:
    """Calls with every length and every head_dim, and the probes of `few_shapes`. Mask, heads, key lengths, layouts,
    scale, scores and what is differentiated change from one call to the next, each with a period of its own.
    """
    return (*_pairings(plain=False), *_PROBES)


def few_shapes() -> tuple[AttentionShape, ...]:
    """Calls with every length and every head_dim once, and the probes: enough to see a mistake, and few enough for
    Triton's interpreter.

    They are paired so that windows hide something, with causal and without, also with grouped heads, and so that each
    of two unequal lengths is the larger once. Scores are of the size 1, the scale is the usual, gradients all three.
    """
    every = {(shape.queries, shape.head_dim): shape for shape in _pairings(plain=True)}
    return (*(every[pair] for pair in zip(_LENGTHS, (16, 64, 80, 128, 40, 256, 24), strict=True)), *_PROBES)


def long_shapes() -> tuple[AttentionShape, ...]:
    """Calls for GPUs with more queries than `LONG`, in the head dimensions that have kernels of their own there."""
    kinds: tuple[tuple[bool, int, int, Numbers], ...] = (
        (True, 4, LONG + 85, "offset"), (False, 4, 900, "normal"), (True, 2, LONG + 85, "normal"),
    )  # fmt: skip
    return tuple(
        AttentionShape(
            batch=1, heads=4, key_heads=key_heads, queries=LONG + 85, keys=keys, head_dim=head_dim, causal=causal,
            layout="transposed" if causal else "contiguous", numbers=numbers,
        )
        for head_dim in (64, 128)
        for causal, key_heads, keys, numbers in kinds
    )  # fmt: skip


def packed_shapes() -> tuple[AttentionShape, ...]:
    """Calls with documents, for the attentions that take them: borders on the edges of tiles and inside, documents of
    one position and of several tiles, without a position, over the end of a row, causal and not."""
    kinds: tuple[tuple[int, int, tuple[int, ...], bool, int, Numbers], ...] = (
        (1, 77, (77,), True, 2, "normal"),
        (1, 96, (32, 1, 31, 32), True, 1, "rising"),
        (1, 70, (1,) * 70, False, 2, "normal"),
        (2, 67, (5, 100, 0, 28, 1), True, 2, "falling"),
        (2, 67, (5, 100, 0, 28, 1), False, 1, "rising"),
        (1, 200, (64, 130, 6), True, 1, "offset"),
        (1, 200, (130, 64, 6), False, 2, "falling"),
    )
    return tuple(
        AttentionShape(
            batch=batch, heads=2, key_heads=key_heads, queries=length, keys=length, head_dim=16 if length < 100 else 64,
            causal=causal, numbers=numbers, documents=documents,
            layout="transposed" if causal else "contiguous",
        )
        for batch, length, documents, causal, key_heads, numbers in kinds
    )  # fmt: skip


def call_options(shape: AttentionShape, device: torch.device) -> dict[str, Any]:
    """The keyword arguments of the call: its mask, its scale and the bounds of its documents."""
    options: dict[str, Any] = {"causal": shape.causal, "scale": shape.scale, "window": shape.window}
    if shape.documents:
        borders = torch.tensor((0, *itertools.accumulate(shape.documents)), dtype=torch.int32, device=device)
        options["bounds"] = document_bounds(borders, shape.batch, shape.queries)
    return options


def _pairings(*, plain: bool) -> list[AttentionShape]:
    shapes: list[AttentionShape] = []
    layouts: tuple[Layout, ...] = ("contiguous", "transposed", "strided")
    scales = (None, None, None, 0.3, None, None, None, -0.2)
    numbers: tuple[Numbers, ...] = ("normal",) * 8 + ("rising", "falling", "offset")
    differentiated: tuple[Differentiated, ...] = ("qkv",) * 11 + ("q", "kv")
    for queries in _LENGTHS:
        for head_dim in _HEAD_DIMS:
            i = len(shapes)
            keys = (queries, queries + 39, queries, max(1, queries // 2), queries)[i % 5]
            heads, key_heads = ((2, 2), (4, 2), (3, 1), (2, 2))[i % 4]
            shapes.append(
                AttentionShape(
                    batch=1 + (i % 3 == 0), heads=heads, key_heads=key_heads, queries=queries, keys=keys,
                    head_dim=head_dim, causal=i % 2 == 0 if i % 7 else True,
                    window=(None, None, None, 33, None, 1, None, None, 70)[i % 9], layout=layouts[i % 3],
                    scale=None if plain else scales[i % 8],
                    numbers="normal" if plain else numbers[i % 11],
                    differentiated="qkv" if plain else differentiated[i % 13],
                )
            )  # fmt: skip
    return shapes


@dataclass(frozen=True, kw_only=True)
class GivenTensor:
    """One tensor of a call, in memory whose every other number is NaN."""

    tensor: Tensor
    memory: Tensor
    kept: Tensor
    """A copy of the memory."""

    @classmethod
    def place(cls, numbers: Tensor, layout: Layout, dtype: TensorDtype, device: torch.device) -> "GivenTensor":
        """The numbers (batch, heads, seq, head_dim) in this layout; where it expands a dimension, the first is kept."""
        if layout == "one head":
            stored = numbers[:, :1]
        elif layout == "one batch":
            stored = numbers[:1]
        else:
            stored = torch.ones(1, 1, 1, 1) if layout == "one number" else numbers
        batch, heads, length, head_dim = stored.shape
        size = list(stored.shape)
        if layout in ("transposed", "strided"):
            size = [batch, length, heads, head_dim * (2 if layout == "strided" else 1)]
        memory = torch.full((math.prod(size) + 2 * _MARGIN,), math.nan, dtype=TORCH_DTYPES[dtype], device=device)
        view = memory[_MARGIN:-_MARGIN].view(size)
        if layout in ("transposed", "strided"):
            view = (view[..., ::2] if layout == "strided" else view).transpose(1, 2)
        view.copy_(stored)
        return cls(tensor=view.expand(numbers.shape), memory=memory, kept=memory.clone())

    def mend(self) -> bool:
        """Undo writes to the tensor or beside it; returns whether there were any."""
        same = torch.equal(self.memory.view(torch.uint8), self.kept.view(torch.uint8))  # NaN is no NaN's equal
        if not same:
            self.memory.copy_(self.kept)
        return not same


def draw_tensors(
    shape: AttentionShape, dtype: TensorDtype, device: torch.device, seed: int
) -> tuple[GivenTensor, GivenTensor, GivenTensor, GivenTensor]:
    """Queries, keys, values and the output's gradient: random numbers that are the same again for the same arguments,
    and others for others.
    """
    # Not Python's hash, which changes from process to process for strings.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {dtype} {shape}".encode()))

    def normal(heads: int, length: int) -> Tensor:
        return torch.randn(shape.batch, heads, length, shape.head_dim, generator=generator)

    q = normal(shape.heads, shape.queries)
    k, v = (normal(shape.key_heads, shape.keys) for _ in range(2))
    gradient = normal(shape.heads, shape.queries)
    _set_scores(shape, q, k, generator)
    of_q, of_k, of_v, of_gradient = (
        GivenTensor.place(numbers, layout, dtype, device)
        for numbers, layout in zip((q, k, v, gradient), shape.layouts, strict=True)
    )
    return of_q, of_k, of_v, of_gradient


def scale_of(shape: AttentionShape) -> float:
    """The factor by which the call multiplies its scores."""
    return 1 / math.sqrt(shape.head_dim) if shape.scale is None else shape.scale


def _set_scores(shape: AttentionShape, q: Tensor, k: Tensor, generator: torch.Generator) -> None:
    """Set the last number of queries and keys, in place, so that the scores are what `shape.numbers` says."""
    if shape.numbers == "normal":
        return
    if shape.numbers == "offset":
        low, high = OFFSETS
        size = q.shape[:-1]
        signs = torch.randint(0, 2, size, generator=generator) * 2 - 1
        q[..., -1] = signs * (low + (high - low) * torch.rand(size, generator=generator)) / scale_of(shape)
        k[..., -1] = 1
        return
    levels = SLOPE * (torch.arange(shape.keys) - shape.keys / 2)
    q[..., -1] = _STEEPNESS / scale_of(shape)
    k[..., -1] = (levels if shape.numbers == "rising" else -levels) / _STEEPNESS
