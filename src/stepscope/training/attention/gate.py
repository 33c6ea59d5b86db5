"""The gate: an implementation of attention must be proved correct before any of its times is shown.

The output and the three gradients of an implementation are set beside attention in float64 (`reference`, on the same
numbers). Its error may be twice what PyTorch's scaled_dot_product_attention makes of the same call in the same dtype:
the fair measure of what the dtype can, whatever the shape. Where sdpa happens to be exact (one key: its output is v),
one unit roundoff is allowed all the same.

That error is of the tensor as a whole, and in 16 bits a single wrong row among a hundred thousand hides in it. So the
worst row is held against sdpa's worst row too, more loosely, since it is the extreme of many. What stays below 16 bits'
own rounding, a single key too many in a row that sees hundreds, is for fp32 to find: judge a kernel in fp32 too.

Attention written out in 16 bits rounds its scores and its weights to 16 bits, which no fused kernel does, nor
PyTorch's own written-out one: that is a rounding more in every product, and it may be off twice as far (its record says
`rounds_scores`). In fp32 nothing distinguishes them. So may a Triton kernel in bf16 in Triton's interpreter, which cuts
numbers off where a GPU rounds to the nearest. float64 itself is not judged: the judge would be no better.

PyTorch's fused attention of fp32 has no grouped heads: for a call with them sdpa falls back to attention written out,
whose matrix products come closer than any fused kernel's (pytorch/pytorch#181528). There its error is the larger of
the two that it makes, of the call and of keys and values repeated for each head, so that fused is held against fused
whether heads are grouped or not. And where scores are not of the size 1, their own rounding is what they may be off:
BLUR unit roundoffs of the largest score, in fp32, or in the tensors' dtype for those that round scores.

Every case draws numbers of its own, so that what an earlier one left in memory is wrong; and before each run, memory of
the sizes of the results is filled with NaN and given back, so that what a kernel does not write is seen. Around the
inputs there is NaN too: who reads beside them is seen, and who writes there.
"""

import functools
import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from stepscope.core.attention_call import (
    AttentionShape,
    AttentionVerdict,
    Differentiated,
    GateReport,
    Layout,
    Numbers,
    TensorError,
)
from stepscope.core.attention_support import find_fault
from stepscope.core.errors import GateFailure, InputError, named_line
from stepscope.core.parts import (
    ATTENTIONS,
    CONVENTIONS,
    Attention,
    AttentionCall,
    TensorDtype,
    is_users,
)
from stepscope.kernels.documents import document_bounds
from stepscope.training.attention import AttentionFunction, fault_of_device, implementation
from stepscope.training.attention.inputs import TORCH_DTYPES
from stepscope.training.attention.pytorch import sdpa
from stepscope.training.attention.written_out import chunked, for_all_heads, reference
from stepscope.training.judging import (
    ROW_UNITS,
    SUM_UNITS,
    Call,
    Watched,
    WrongKind,
    allowed_errors,
    attempt,
    check_gradients,
    nan_around,
    poison,
    relative_errors,
    run_call,
)

# The calls that the gate judges by, and their tensors.
#
# A mistake is seen only where something depends on it. At a boundary of tiles that is the weight of the keys beside it:
# with scores of the size 1 a query of 200 keys gives the last one half a percent, which is below what 16 bits can.
# Scores that rise from key to key give the last key that a query sees two fifths of all, those that fall give them to
# the first: so a key too many or too few is gross, at the end, at the diagonal, and at either side of a window. Each
# query's scores may also lie hundreds above or below zero: exp of them is infinite or nothing, and softmax of them is
# as it was.


_LENGTHS = (1, 17, 63, 64, 65, 127, 200)
_HEAD_DIMS = (16, 24, 40, 64, 80, 128, 256)

OFFSETS = (100.0, 300.0)
"""How far from zero the scores of a query lie, above or below."""
SLOPE = 0.5
"""How much a rising or falling score changes from one key to the next."""
_STEEPNESS = 16.0
"""Rising scores are the product of a number of the query, this one over the scale, and of one of the key: small enough
that in 16 bits it is no coarser than the slope."""

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
        (True, 4, LONG + 85, "offset"),
        (False, 4, 900, "normal"),
        (True, 2, LONG + 85, "normal"),
    )
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


def scored_shapes() -> tuple[AttentionShape, ...]:
    """Calls with a softcap, sinks, slopes, a bias or dropout, for the attentions that take them: alone, together, with
    a window and documents, and with rows that see nothing, through a window or a bias."""
    kinds: tuple[tuple[int, int, bool, dict[str, Any]], ...] = (
        (70, 64, True, {"softcap": 2.0}),
        (130, 16, False, {"softcap": 30.0, "numbers": "rising", "layout": "transposed"}),
        (70, 64, True, {"sinks": True}),
        (65, 16, False, {"sinks": True, "numbers": "offset"}),
        (97, 64, True, {"slopes": True}),
        (97, 16, False, {"slopes": True, "scale": -0.2}),
        (70, 64, True, {"sinks": True, "window": 20, "softcap": 5.0}),
        (50, 16, False, {"sinks": True, "slopes": True, "window": 20}),
        (50, 16, True, {"sinks": True, "softcap": 5.0, "documents": (1, 30, 19, 32, 12, 6)}),
        (97, 64, True, {"bias": "by distance"}),
        (70, 16, False, {"bias": "by distance", "keys": 101, "scale": -0.2, "slopes": True}),
        (150, 64, True, {"bias": "by distance", "keys": 65, "window": 20}),
        (65, 64, False, {"bias": "of heads", "softcap": 5.0, "layout": "transposed"}),
        (67, 16, True, {"bias": "of heads", "keys": 40, "sinks": True}),
        (77, 64, False, {"bias": "of batches", "window": 20, "slopes": True}),
        (50, 16, True, {"bias": "of batches", "documents": (1, 30, 19, 32, 12, 6)}),
        (50, 16, False, {"bias": "by distance", "documents": (1, 30, 19, 32, 12, 6), "numbers": "offset"}),
        (77, 64, True, {"dropout": 0.25}),
        (150, 16, False, {"dropout": 0.5, "keys": 65, "window": 20, "sinks": True, "bias": "by distance"}),
        (50, 16, True, {"dropout": 0.1, "bias": "of heads", "softcap": 5.0, "documents": (1, 30, 19, 32, 12, 6)}),
    )
    same: dict[str, Any] = {"batch": 2, "heads": 4, "key_heads": 2}
    return tuple(
        AttentionShape(**same | {"queries": length, "keys": length, "head_dim": head_dim, "causal": causal} | of)
        for length, head_dim, causal, of in kinds
    )


def long_limited_shapes() -> tuple[AttentionShape, ...]:
    """Calls for GPUs as long as `long_shapes`, with windows, documents, softcap and sinks, in head dimensions that have
    kernels of their own there."""
    length = LONG + 85
    documents = (1, 300, 64, 500, 200, length - 60, 7, length - 1012)
    kinds: tuple[tuple[bool, int, dict[str, Any]], ...] = (
        (True, 4, {"window": 300}),
        (False, 2, {"window": 130, "numbers": "rising"}),
        (True, 2, {"window": 5}),
        (True, 2, {"documents": documents, "numbers": "falling"}),
        (False, 4, {"documents": documents}),
        (True, 4, {"documents": documents, "window": 200, "sinks": True}),
        (True, 2, {"softcap": 5.0, "sinks": True}),
        (False, 4, {"softcap": 50.0, "numbers": "rising"}),
        (False, 2, {"sinks": True, "numbers": "offset"}),
        (True, 2, {"sinks": True, "slopes": True}),
        (True, 4, {"bias": "by distance"}),
        (False, 2, {"bias": "of heads"}),
        (True, 4, {"dropout": 0.1}),
    )
    return tuple(
        AttentionShape(
            batch=2,
            heads=4,
            key_heads=key_heads,
            queries=length,
            keys=length,
            head_dim=head_dim,
            causal=causal,
            layout="transposed" if causal else "contiguous",
            **of,
        )
        for head_dim in (64, 80, 128)
        for causal, key_heads, of in kinds
    )


def call_options(shape: AttentionShape, device: torch.device) -> dict[str, Any]:
    """The keyword arguments of the call: its mask, its scale, the bounds of its documents, what is done to scores."""
    options: dict[str, Any] = {"causal": shape.causal, "scale": shape.scale, "window": shape.window}
    if shape.documents:
        borders = torch.tensor((0, *itertools.accumulate(shape.documents)), dtype=torch.int32, device=device)
        options["bounds"] = document_bounds(borders, shape.batch, shape.queries)
    heads = torch.arange(1, shape.heads + 1, dtype=torch.float32, device=device)
    if shape.softcap is not None:
        options["softcap"] = shape.softcap
    if shape.sinks:
        options["sinks"] = (heads / 2 - 1).requires_grad_(shape.differentiated == "qkv")
    if shape.slopes:
        slopes = torch.exp2(-8 * heads / shape.heads)  # as ALiBi has them for so many heads
        options["slopes"] = slopes.requires_grad_(shape.differentiated == "qkv")
    if shape.bias != "none":
        options["bias"] = draw_bias(shape, device).requires_grad_(shape.differentiated == "qkv")
    if shape.dropout:
        options |= {"dropout": shape.dropout, "seeds": torch.tensor([2**40 + 7, 2**33 + 5], device=device)}
    return options


def draw_bias(shape: AttentionShape, device: torch.device) -> Tensor:
    """Random numbers of the size 1, the same again. Every fifth query of a bias of each score is left two keys at
    most, the last one that it sees and the first, and that of a batch's first head none. With many keys it is left
    half: of many queries with two keys some have gradients that cancel below what 16 bits hold."""
    generator = torch.Generator().manual_seed(zlib.crc32(str(shape).encode()))
    if shape.bias == "by distance":
        return torch.randn(shape.heads, shape.queries + shape.keys - 1, generator=generator).to(device)
    size = (shape.heads, shape.queries, shape.keys)
    bias = torch.randn(size if shape.bias == "of heads" else (shape.batch, *size), generator=generator)
    bias[..., ::5, slice(1, -1, 2) if shape.keys > LONG else slice(1, -1)] = -math.inf
    if shape.bias == "of batches":
        bias[:, 0, 3::7] = -math.inf
    return bias.to(device)


def _pairings(*, plain: bool) -> list[AttentionShape]:
    shapes: list[AttentionShape] = []
    layouts: tuple[Layout, ...] = ("contiguous", "transposed", "strided")
    scales = (None, None, None, 0.3, None, None, None, -0.2)
    numbers: tuple[Numbers, ...] = ("normal",) * 8 + ("rising", "falling", "offset")
    differentiated: tuple[Differentiated, ...] = ("qkv",) * 11 + ("q", "kv")
    for i, (queries, head_dim) in enumerate(itertools.product(_LENGTHS, _HEAD_DIMS)):
        keys = (queries, queries + 39, queries, max(1, queries // 2), queries)[i % 5]
        heads, key_heads = ((2, 2), (4, 2), (3, 1), (2, 2))[i % 4]
        shape = AttentionShape(
            batch=1 + (i % 3 == 0), heads=heads, key_heads=key_heads, queries=queries, keys=keys, head_dim=head_dim,
            causal=i % 2 == 0 if i % 7 else True, window=(None, None, None, 33, None, 1, None, None, 70)[i % 9],
            layout=layouts[i % 3], scale=None if plain else scales[i % 8],
            numbers="normal" if plain else numbers[i % 11],
            differentiated="qkv" if plain else differentiated[i % 13],
        )  # fmt: skip
        shapes.append(shape)
    return shapes


@dataclass(frozen=True)
class GivenTensor(Watched):
    """One tensor of a call, in memory whose every other number is NaN."""

    tensor: Tensor

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
        memory, view = nan_around(size, TORCH_DTYPES[dtype], device)
        if layout in ("transposed", "strided"):
            view = (view[..., ::2] if layout == "strided" else view).transpose(1, 2)
        view.copy_(stored)
        return cls(memory=memory, kept=memory.clone(), tensor=view.expand(numbers.shape))


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


KNOWN_FACTOR = 2.0
"""The largest known fault, as a multiple of what is allowed: rounding reaches 1.12 on an H200, 1.15 emulated."""
BLUR = 2.0
"""The error that is allowed to scores that are not of the size 1, in unit roundoffs of the largest score."""
NOTHING = 1e-6
"""A gradient that is smaller than this share of its terms is zero but for rounding, since they cancel: dq and dk of a
query that sees one key. Its error is measured against the terms, and may be ROW_UNITS unit roundoffs of them."""
_MOST_SCORES = 1 << 26
"""With more scores, float64 attention is made in chunks: each S x T that autograd keeps would take over half a GiB."""

_OF_SCORES = ("gradient of sinks", "gradient of slopes", "gradient of bias")
_TENSORS: dict[str, Literal["out", "dq", "dk", "dv", "dsinks", "dslopes", "dbias"]] = {
    "output": "out",
    "gradient of q": "dq",
    "gradient of k": "dk",
    "gradient of v": "dv",
    **dict(zip(_OF_SCORES, ("dsinks", "dslopes", "dbias"), strict=True)),
}
"""Results of a call, and what a verdict calls them."""
_UNKNOWN = "twice as far as others, for rounding that nobody says of it"
_ROUNDED = "twice as far as others, four times sdpa's error, for rounding scores and weights to 16 bits"
_CUT_OFF = "twice as far as on a GPU, where bf16 is rounded: Triton's interpreter cuts numbers off"
_UNSCORED = "with a softcap, sinks, slopes, a bias or dropout is by sdpa's errors of the same call without any of them"
_GROUPED = (
    "in fp32 with grouped heads is twice the larger of two errors of sdpa, of the call and of keys and values repeated "
    "for each head: PyTorch has no fused attention of the first, and what it writes out comes closer"
)
_BLURRED = (
    f"where scores are not of the size 1 is at least {BLUR:g} unit roundoffs of the largest, for their own rounding: "
    "of fp32, and of 16 bits for who rounds scores to these"
)


def check_attention_implementation(
    name: Attention,
    *,
    device: torch.device,
    dtypes: Sequence[TensorDtype],
    shapes: Sequence[AttentionShape],
    seed: int = 0,
    repeat: bool = False,
    function: AttentionFunction | None = None,
) -> GateReport:
    """Run the gate on every shape in every dtype. function: checked in place of the implementation of this name."""
    functions = {} if function is None else {name: function}
    (report,) = check_attention_matrix(
        (name,), device=device, dtypes=dtypes, shapes=shapes, seed=seed, repeat=repeat, functions=functions
    )
    return report


def check_attention_matrix(
    names: Sequence[Attention],
    *,
    device: torch.device,
    dtypes: Sequence[TensorDtype],
    shapes: Sequence[AttentionShape],
    seed: int = 0,
    repeat: bool = False,
    functions: dict[Attention, AttentionFunction] | None = None,
    backward: bool = True,
) -> tuple[GateReport, ...]:
    """Run the gate on several implementations with the same numbers; one report each, in the order of `names`.

    repeat: run each call twice, and report whether the bits are equal. backward: whether gradients are judged, where an
    implementation has them. torch.OutOfMemoryError is not caught: a device
    that is too small is no fault of an implementation.
    """
    if "fp64" in dtypes:
        raise InputError("the gate judges by float64, and cannot judge fp64: choose among fp32, bf16, fp16")
    verdicts: dict[Attention, list[AttentionVerdict]] = {name: [] for name in names}
    for dtype in dtypes:
        for shape in shapes:
            case = _Case.make(shape, dtype, device, seed)
            for name in names:
                function = (functions or {}).get(name)
                verdicts[name].append(case.judge(name, function, repeat=repeat, backward=backward))
    return tuple(
        GateReport(implementation=name, device=str(device), seed=seed, verdicts=tuple(verdicts[name])) for name in names
    )


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A call that implementations are judged on: its tensors, its exact results in float64, and sdpa's errors."""

    shape: AttentionShape
    dtype: TensorDtype
    given: tuple[GivenTensor, GivenTensor, GivenTensor, GivenTensor]
    """Queries, keys, values and the output's gradient."""
    call: Call
    largest_score: float | None
    """The largest absolute score; None where there are too many scores to compute."""
    exact: dict[str, Tensor]
    """The exact output and the exact gradients that are asked for, in float64."""
    terms: dict[str, float]
    """For each result, the norm that it would have if its terms did not cancel (`_terms`)."""
    sdpa: dict[str, tuple[float, float]]
    """For each result, sdpa's error of the whole tensor and of its worst row, relative to the exact one."""

    @classmethod
    def make(cls, shape: AttentionShape, dtype: TensorDtype, device: torch.device, seed: int) -> "_Case":
        inputs = draw_tensors(shape, dtype, device, seed)
        gradient = inputs[3].tensor
        q, k, v = (
            each.tensor.detach().requires_grad_(name in shape.differentiated)
            for name, each in zip("qkv", inputs[:3], strict=True)
        )
        call = Call((q, k, v), call_options(shape, device))
        large = shape.batch * shape.heads * shape.queries * shape.keys > _MOST_SCORES
        wide, plain = call.widened(), call
        if shape.call(device.type, dtype).scoring:
            # sdpa does none of it: its errors are of the same call without.
            alike = msgspec.structs.replace(shape, softcap=None, sinks=False, slopes=False, bias="none", dropout=0.0)
            plain = Call((q, k, v), call_options(alike, device))
        exact = _run(chunked if large and not shape.documents else reference, wide, gradient.double(), backward=True)
        of_sdpa = exact if plain is call else _run(reference, plain.widened(), gradient.double(), backward=True)
        terms = _terms(q, k, v, gradient)
        yardsticks: list[AttentionFunction] = [sdpa]
        if _is_grouped(shape, dtype):
            yardsticks.append(lambda q, k, v, **how: sdpa(q, *for_all_heads(q, k, v), **how))
        try:
            outputs = [_run(yardstick, plain, gradient, backward=True) for yardstick in yardsticks]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the mistake is its own
            why = f"sdpa, by whose error the gate judges, raises {named_line(error)}"
            raise RuntimeError(why) from error
        errors = [{name: _errors(results[name], of_sdpa[name], terms[name]) for name in of_sdpa} for results in outputs]
        worst = {
            name: (max(each[name][0] for each in errors), max(each[name][1] for each in errors)) for name in of_sdpa
        }
        whole, row = worst.get("gradient of q", (0.0, 0.0))
        # Sums of the same numbers, of which there are too few for their errors to be of an even size.
        worst |= {name: (2 * whole, row) for name in exact if name in _OF_SCORES}
        largest_score = None
        if not large:
            of_q, of_k = (each.detach() for each in wide.args[:2])
            scores = of_q @ of_k.repeat_interleave(shape.heads // shape.key_heads, dim=1).mT
            largest_score = float(scores.abs().amax()) * abs(scale_of(shape))
        return cls(
            shape=shape, dtype=dtype, given=inputs, call=call, largest_score=largest_score, exact=exact, terms=terms,
            sdpa=worst,
        )  # fmt: skip

    def judge(
        self, name: Attention, function: AttentionFunction | None, *, repeat: bool, backward: bool = True
    ) -> AttentionVerdict:
        """The verdict on this call. function: judged in place of the implementation of this name, where that runs."""
        of_call = partial(AttentionVerdict, dtype=self.dtype, shape=self.shape)
        yardsticks = (
            *([_GROUPED] if _is_grouped(self.shape, self.dtype) else []),
            *([_BLURRED] if self._is_blurred else []),
            *([_UNSCORED] if self.shape.call("cpu", self.dtype).scoring else []),
        )
        verdict = partial(of_call, allowance=self._allowance(name), yardsticks=yardsticks)
        if is_users(name) and self.shape.causal and self.shape.queries != self.shape.keys:
            return of_call(
                outcome="not supported", reason="is not judged where causal lengths differ: no step has such"
            )
        if function is not None:
            reason = ATTENTIONS[name].fault_of_scores(self._supported(backward=True))
        elif reason := find_fault(name, self._supported(backward=backward), here=fault_of_device):
            backward = False
            reason = find_fault(name, self._supported(backward=False), here=fault_of_device)
        if reason:
            return of_call(outcome="not supported", reason=reason)

        def run() -> dict[str, Tensor]:
            called = implementation(name) if function is None else function
            return _run(called, self.call, self.given[3].tensor, backward=backward, checked=True)

        self._poison()
        watched: dict[str, Watched] = dict(zip(("q", "k", "v", "the output's gradient"), self.given, strict=True))
        done = attempt(run, watched, twice=repeat)
        if done.raised is not None and not isinstance(done.raised, WrongKind):
            # What a user's function refuses it need not take, but on the shape of its step (`require_users_attention`).
            return verdict(outcome="not supported" if is_users(name) else "failed", reason=named_line(done.raised))
        due = list(self.exact)[: None if backward else 1]
        wrong = f"it writes to {', '.join(done.written)}, which are the caller's" if done.written else ""
        wrong = wrong or (self._wrong_kind(done.raised) if done.raised is not None else "")
        runs = (done.results,) if done.again is None else (done.results, done.again)
        wrong = wrong or next((f"{_TENSORS[each]} is missing" for run in runs for each in due if each not in run), "")
        if wrong:
            return verdict(outcome="failed", reason=wrong)
        # A second call that gives other numbers must be right, too.
        errors_of_runs = [tuple(self._error(name, result, tensor) for result, tensor in run.items()) for run in runs]
        errors = max(errors_of_runs, key=lambda errors: max(error.share for error in errors))
        return verdict(
            outcome="passed" if all(error.passed for error in errors) else "failed",
            errors=errors,
            known=ATTENTIONS[name].rounds_weights
            if self._is_known(name, errors)
            else self._no_mask(name, errors, runs),
            repeats=done.repeats,
        )

    def _supported(self, *, backward: bool) -> AttentionCall:
        device_type = self.given[0].tensor.device.type
        return self.shape.call(device_type, self.dtype, backward=backward, largest_score=self.largest_score)

    def _allowance(self, name: Attention) -> str:
        """Why this implementation may be off twice as far as others; empty where it may not."""
        if is_users(name):
            return _UNKNOWN
        if self._rounds_scores(name):
            return _ROUNDED
        cuts_off = ATTENTIONS[name].compiler == "triton" and not self.given[0].tensor.is_cuda and self.dtype == "bf16"
        return _CUT_OFF if cuts_off else ""

    @property
    def _is_blurred(self) -> bool:
        return self.largest_score is not None and (self.shape.numbers != "normal" or self.shape.scale is not None)

    def _is_known(self, name: Attention, errors: Sequence[TensorError]) -> bool:
        """Whether rounded weights explain the errors: only dq and dk are wrong, in 16 bits, and not by much."""
        wrong = [error for error in errors if not error.passed]
        return (
            bool(wrong)
            and bool(ATTENTIONS[name].rounds_weights)
            and self.dtype != "fp32"
            and all(error.tensor in ("dq", "dk") and error.share <= KNOWN_FACTOR for error in wrong)
        )

    def _no_mask(self, name: Attention, errors: Sequence[TensorError], runs: Sequence[Mapping[str, Tensor]]) -> str:
        """What a user's function leaves out, where its wrong output is right for the same call without a mask."""
        output = errors[0]
        if not is_users(name) or not self.shape.causal or self.shape.window or self.shape.documents or output.passed:
            return ""
        q, k, v = (tensor.detach().double() for tensor in self.call.tensors[:3])
        unmasked = chunked(q, k, v, causal=False, scale=self.shape.scale)
        right = all(relative_errors(run["output"], unmasked)[0] <= output.allowed for run in runs)
        return "that is attention without the causal mask, which a step needs" if right else ""

    def _rounds_scores(self, name: Attention) -> bool:
        return ATTENTIONS[name].rounds_scores and self.dtype != "fp32"

    def _wrong_kind(self, wrong: Exception) -> str:
        """A sentence on a result of the wrong number, shape, dtype or device."""
        out = wrong.tensor if isinstance(wrong, WrongKind) else None
        right = self.given[3].tensor
        if out is None or (out.shape, out.dtype) == (right.shape, right.dtype):
            return str(wrong)
        got = f"{tuple(out.shape)} in {str(out.dtype).removeprefix('torch.')}"
        return f"out is {got}, not {tuple(right.shape)} in {self.dtype}"

    def _error(self, name: Attention, result: str, tensor: Tensor) -> TensorError:
        exact, terms, sdpa_errors = self.exact[result], self.terms[result], self.sdpa[result]
        error, row_error = _errors(tensor, exact, terms)
        unit = torch.finfo(tensor.dtype).eps / 2
        if _is_nothing(exact, terms):
            unit *= ROW_UNITS
        blur = 0.0
        if self.largest_score is not None and self._is_blurred:  # by the rounding of scores
            made_in = tensor.dtype if self._rounds_scores(name) else torch.float32
            blur = BLUR * torch.finfo(made_in).eps / 2 * self.largest_score
        slack = 2.0 if self._allowance(name) else 1.0
        sums = SUM_UNITS * torch.finfo(torch.float32).eps / 2 if is_users(name) else 0.0
        allowed, row_allowed = allowed_errors(sdpa_errors, unit, slack=slack, blur=blur, sums=sums)
        return TensorError(
            tensor=_TENSORS[result],
            error=error if math.isfinite(error) else None,
            allowed=allowed,
            sdpa=sdpa_errors[0],
            row_error=row_error if math.isfinite(row_error) else None,
            row_allowed=row_allowed,
        )

    def _poison(self) -> None:
        q, k, *_ = (each.tensor for each in self.given)
        sizes = (q.shape, q.shape, k.shape, k.shape, q.shape[:-1], q.shape[:-1])
        poison([(size, dtype) for dtype in (q.dtype, torch.float32) for size in sizes], q.device)


def _run(
    function: AttentionFunction, call: Call, gradient: Tensor, *, backward: bool, checked: bool = False
) -> dict[str, Tensor]:
    """The output, and with `backward` the gradients that the call's tensors ask for."""
    names = ("q", "k", "v", *(name for name, each in call.kwargs.items() if isinstance(each, Tensor)))
    of_output = {"output": gradient}
    return run_call(
        function, call, names, of_output if backward else None, backward=backward, like=of_output if checked else None
    )


def _is_grouped(shape: AttentionShape, dtype: TensorDtype) -> bool:
    """Whether the call is fp32 with fewer heads of keys than of queries, for which PyTorch has no fused attention."""
    return dtype == "fp32" and shape.heads != shape.key_heads


def _errors(measured: Tensor, exact: Tensor, terms: float) -> tuple[float, float]:
    """Errors relative to the exact result, or to its terms where these cancel."""
    return relative_errors(measured, exact, terms if _is_nothing(exact, terms) else None)


def _is_nothing(exact: Tensor, terms: float) -> bool:
    return float(exact.norm()) <= NOTHING * terms


def _terms(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> dict[str, float]:
    """Norms that out, dq, dk and dv would have if each query saw one key, and nothing cancelled.

    dq = dS k scale with dS = P (dP - D), where dP and D are each of the size |dO| |v|, as a dot product of random rows.
    """
    size_q, size_k, size_v, size_gradient = (
        float(t.detach().double().square().mean().sqrt()) for t in (q, k, v, gradient)
    )
    for_scores = size_gradient * size_v
    return {
        "output": size_v * math.sqrt(q.numel()),
        "gradient of q": for_scores * size_k * math.sqrt(q.numel()),
        "gradient of k": for_scores * size_q * math.sqrt(k.numel()),
        "gradient of v": size_gradient * math.sqrt(k.numel()),
    } | dict.fromkeys(_OF_SCORES, for_scores * math.sqrt(q.numel() / q.shape[-1]))


# A user's function, before a step runs it.


_OF_USERS: tuple[tuple[int, Numbers, Layout], ...] = (
    (1, "normal", "contiguous"), (17, "rising", "transposed"), (64, "normal", "contiguous"),
    (65, "falling", "transposed"), (127, "offset", "strided"), (203, "normal", "transposed"),
)  # fmt: skip
"""Lengths, scores and layouts on which a user's function is judged beside the shape of its step."""
_LONGEST_JUDGED = {"cuda": 4096, "cpu": 512}


@functools.cache
def require_users_attention(
    name: Attention, dtype: TensorDtype, device: torch.device, step: AttentionShape, *, backward: bool
) -> str:
    """What was seen of a user's attention, in a sentence; raises GateFailure where it is wrong, or does not take the
    shape of its step, of which few heads and batches are judged."""
    implementation(name)  # a file that is not there, or a function of something else, is no wrong result
    group = step.heads // step.key_heads
    key_heads = min(step.key_heads, 2)
    length = min(step.queries, _LONGEST_JUDGED.get(device.type, 512))
    few = msgspec.structs.replace(
        step, batch=min(step.batch, 2), heads=group * key_heads, key_heads=key_heads, queries=length, keys=length,
        layout="transposed",
    )  # fmt: skip
    # That of the step again, by other numbers: who keeps results by the shapes of a call is seen.
    lengths = [each for each in _OF_USERS if each[0] != length]
    beside = [
        msgspec.structs.replace(few, queries=size, keys=size, numbers=numbers, layout=layout)
        for size, numbers, layout in ((length, "rising", "transposed"), *lengths)
    ]
    judge = functools.partial(
        check_attention_matrix, (name,), device=device, dtypes=(dtype,), repeat=True, backward=backward
    )
    report = judge(shapes=(few,))[0]
    first = report.verdicts[0]
    with torch.compiler.set_stance("force_eager"):  # what is compiled is so for its step alone, which takes long enough
        verdicts = (first, *judge(shapes=beside)[0].verdicts)
    report = msgspec.structs.replace(report, verdicts=verdicts)
    if not report.failures and first.outcome != "passed":
        raise GateFailure(f"attention {name} fails {first.sentence}; it is called as {CONVENTIONS['attention']}")
    try:
        report.require()
    except GateFailure as error:
        raise GateFailure(f"{error}; it is called as {CONVENTIONS['attention']}") from None
    passed = sum(each.outcome == "passed" for each in report.verdicts)
    words = [f"attention {name} is right in {passed} of {len(report.verdicts)} calls beside float64"]
    refused = [str(each.shape.queries) for each in report.verdicts if each.outcome != "passed"]
    if refused:
        words.append(f"it refuses lengths {', '.join(refused)}")
    if any(each.repeats is False for each in report.verdicts):
        words.append("the same call gives other bits")
    if backward:
        checked = check_users_gradients(name, step.head_dim, device)
        if checked.outcome == "failed":
            raise GateFailure(f"attention {name} is wrong: {checked.sentence}")
        words.append(checked.reason)
    return "; ".join(words)


def check_users_gradients(name: Attention, head_dim: int, device: torch.device) -> AttentionVerdict:
    """PyTorch's own `gradcheck` of a user's attention on a small call in float64; its reason says what it found."""
    shape = AttentionShape(batch=1, heads=1, key_heads=1, queries=16, keys=16, head_dim=head_dim, causal=True)
    size = (1, 1, 16, head_dim)
    run, exact = (functools.partial(each, causal=True) for each in (implementation(name), reference))
    with torch.compiler.set_stance("force_eager"):
        passes, why = check_gradients(run, exact, draw_small(size, size, size, device=device))
    outcome = "not supported" if passes is None else "passed" if passes else "failed"
    reason = (
        "gradcheck passes in float64"
        if passes
        else why
        if passes is False
        else f"gradcheck is left out, since it {why}"
    )
    return AttentionVerdict(dtype="fp64", shape=shape, outcome=outcome, reason=reason)


def draw_small(*sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Normal numbers of these sizes, the same again."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(b"gradcheck"))
    return [torch.randn(tuple(size), generator=generator, device=device, dtype=torch.float64) for size in sizes]
