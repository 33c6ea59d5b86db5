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

import itertools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

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
from stepscope.core.errors import InputError, named_line
from stepscope.core.parts import ATTENTIONS, Attention, AttentionCall, TensorDtype
from stepscope.kernels.documents import document_bounds
from stepscope.training.attention import AttentionFunction, fault_of_device, implementation
from stepscope.training.attention.inputs import TORCH_DTYPES
from stepscope.training.attention.pytorch import sdpa
from stepscope.training.attention.written_out import chunked, for_all_heads, reference

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


FACTOR = 2.0
"""The error that is allowed to a whole tensor, as a multiple of sdpa's."""
ROW_FACTOR = 4.0
"""The error that is allowed to the worst row, as a multiple of that of sdpa's worst row."""
ROW_UNITS = 16.0
"""The error that is allowed to the worst row in any case, in unit roundoffs."""
KNOWN_FACTOR = 2.0
"""The largest known fault, as a multiple of what is allowed: rounding reaches 1.12 on an H200, 1.15 emulated."""
BLUR = 2.0
"""The error that is allowed to scores that are not of the size 1, in unit roundoffs of the largest score."""
NOTHING = 1e-6
"""A gradient that is smaller than this share of its terms is zero but for rounding, since they cancel: dq and dk of a
query that sees one key. Its error is measured against the terms, and may be ROW_UNITS unit roundoffs of them."""
_MOST_SCORES = 1 << 26
"""With more scores, float64 attention is made in chunks: each S x T that autograd keeps would take over half a GiB."""

_Result = Literal["out", "dq", "dk", "dv"]
_RESULTS: tuple[_Result, ...] = ("out", "dq", "dk", "dv")
_GRADIENTS: dict[str, tuple[_Result, ...]] = {"qkv": ("dq", "dk", "dv"), "q": ("dq",), "kv": ("dk", "dv")}
_ROUNDED = "twice as far as others, four times sdpa's error, for rounding scores and weights to 16 bits"
_CUT_OFF = "twice as far as on a GPU, where bf16 is rounded: Triton's interpreter cuts numbers off"
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
) -> tuple[GateReport, ...]:
    """Run the gate on several implementations with the same numbers; one report each, in the order of `names`.

    repeat: run each call twice, and report whether the bits are equal. torch.OutOfMemoryError is not caught: a device
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
                verdicts[name].append(case.judge(name, function, repeat=repeat))
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
    largest_score: float | None
    """The largest absolute score; None where there are too many scores to compute."""
    exact: dict[_Result, Tensor]
    """The exact output and the exact gradients that are asked for, in float64."""
    terms: dict[_Result, float]
    """For each result, the norm that it would have if its terms did not cancel (`_terms`)."""
    sdpa: dict[_Result, tuple[float, float]]
    """For each result, sdpa's error of the whole tensor and of its worst row, relative to the exact one."""

    @classmethod
    def make(cls, shape: AttentionShape, dtype: TensorDtype, device: torch.device, seed: int) -> "_Case":
        given = draw_tensors(shape, dtype, device, seed)
        q, k, v, gradient = (each.tensor for each in given)
        large = shape.batch * shape.heads * shape.queries * shape.keys > _MOST_SCORES
        wide = [tensor.double() for tensor in (q, k, v)]
        judge = chunked if large and not shape.documents else reference
        exact = _run(judge, shape, wide, gradient.double(), backward=True)
        terms = _terms(q, k, v, gradient)
        yardsticks: list[AttentionFunction] = [sdpa]
        if _is_grouped(shape, dtype):
            yardsticks.append(lambda q, k, v, **how: sdpa(q, *for_all_heads(q, k, v), **how))
        try:
            made = [_run(yardstick, shape, (q, k, v), gradient, backward=True) for yardstick in yardsticks]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the mistake is its own
            why = f"sdpa, by whose error the gate judges, raises {named_line(error)}"
            raise RuntimeError(why) from error
        errors = [{name: _errors(found[name], exact[name], terms[name]) for name in exact} for found in made]
        worst: dict[_Result, tuple[float, float]] = {
            name: (max(each[name][0] for each in errors), max(each[name][1] for each in errors)) for name in exact
        }
        largest_score = None
        if not large:
            scores = wide[0] @ wide[1].repeat_interleave(shape.heads // shape.key_heads, dim=1).mT
            largest_score = float(scores.abs().amax()) * abs(scale_of(shape))
        return cls(
            shape=shape, dtype=dtype, given=given, largest_score=largest_score, exact=exact, terms=terms, sdpa=worst
        )

    def judge(self, name: Attention, function: AttentionFunction | None, *, repeat: bool) -> AttentionVerdict:
        """The verdict on this call. function: judged in place of the implementation of this name, where that runs."""
        of_call = partial(AttentionVerdict, dtype=self.dtype, shape=self.shape)
        yardsticks = (
            *([_GROUPED] if _is_grouped(self.shape, self.dtype) else []),
            *([_BLURRED] if self._is_blurred else []),
        )
        verdict = partial(of_call, allowance=self._allowance(name), yardsticks=yardsticks)
        backward = True
        if function is not None:
            reason = ATTENTIONS[name].fault_of_scores(self._call(backward=True))
        elif reason := find_fault(name, self._call(backward=True), here=fault_of_device):
            backward = False
            reason = find_fault(name, self._call(backward=False), here=fault_of_device)
        if reason:
            return of_call(outcome="not supported", reason=reason)
        try:
            called = implementation(name) if function is None else function
            self._poison()
            q, k, v, gradient = (each.tensor for each in self.given)
            run = partial(_run, called, self.shape, (q, k, v), gradient, backward=backward)
            found, again = run(), run() if repeat else None
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever it raises on what it says it supports is its failure
            return verdict(outcome="failed", reason=named_line(error))
        wrong = self._overwritten() or self._wrong_kind(found)
        if wrong:
            return verdict(outcome="failed", reason=wrong)
        errors = tuple(self._error(name, result, tensor) for result, tensor in found.items())
        return verdict(
            outcome="passed" if all(error.passed for error in errors) else "failed",
            errors=errors,
            known=ATTENTIONS[name].rounds_weights if self._is_known(name, errors) else "",
            repeats=None if again is None else all(torch.equal(found[each], again[each]) for each in found),
        )

    def _call(self, *, backward: bool) -> AttentionCall:
        device_type = self.given[0].tensor.device.type
        return self.shape.call(device_type, self.dtype, backward=backward, largest_score=self.largest_score)

    def _allowance(self, name: Attention) -> str:
        """Why this implementation may be off twice as far as others; empty where it may not."""
        if self._rounds_scores(name):
            return _ROUNDED
        cuts_off = ATTENTIONS[name].triton and not self.given[0].tensor.is_cuda and self.dtype == "bf16"
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

    def _rounds_scores(self, name: Attention) -> bool:
        return ATTENTIONS[name].rounds_scores and self.dtype != "fp32"

    def _overwritten(self) -> str:
        """A sentence that names the inputs that the call has written to, or "". They are restored for the next call."""
        names = ("q", "k", "v", "the output's gradient")
        changed = [what for what, each in zip(names, self.given, strict=True) if each.mend()]
        return f"it writes to {', '.join(changed)}, which are the caller's" if changed else ""

    def _wrong_kind(self, found: dict[_Result, Tensor]) -> str:
        """A sentence on a result of the wrong shape or dtype, or "" where there is none."""
        for name, tensor in found.items():
            exact = self.exact[name]
            if tensor.shape != exact.shape or tensor.dtype != self.given[0].tensor.dtype:
                got = f"{tuple(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')}"
                return f"{name} is {got}, not {tuple(exact.shape)} in {self.dtype}"
        return ""

    def _error(self, name: Attention, result: _Result, tensor: Tensor) -> TensorError:
        exact, terms = self.exact[result], self.terms[result]
        error, row_error = _errors(tensor, exact, terms)
        sdpa_error, sdpa_row_error = self.sdpa[result]
        unit = torch.finfo(tensor.dtype).eps / 2
        if _is_nothing(exact, terms):
            unit *= ROW_UNITS
        slack = 2.0 if self._allowance(name) else 1.0
        blur = 0.0
        if self.largest_score is not None and self._is_blurred:  # by the rounding of scores
            made_in = tensor.dtype if self._rounds_scores(name) else torch.float32
            blur = BLUR * torch.finfo(made_in).eps / 2 * self.largest_score
        return TensorError(
            tensor=result,
            error=error if math.isfinite(error) else None,
            allowed=slack * max(FACTOR * sdpa_error, unit, blur),
            sdpa=sdpa_error,
            row_error=row_error if math.isfinite(row_error) else None,
            row_allowed=slack * max(ROW_FACTOR * sdpa_row_error, ROW_UNITS * unit, ROW_FACTOR * blur),
        )

    def _poison(self) -> None:
        """Fill memory of the results' sizes with NaN and free it. The next allocations get it: always from PyTorch's
        caching allocator, mostly from a host's.
        """
        q, k, *_ = (each.tensor for each in self.given)
        for dtype in (q.dtype, torch.float32):
            # Not full_like, which keeps the strides of an expanded tensor and so allocates less.
            blocks = [torch.full(t.shape, math.nan, dtype=dtype, device=q.device) for t in (q, q, k, k)]
            blocks += [torch.full(q.shape[:-1], math.nan, dtype=dtype, device=q.device) for _ in range(2)]
        del blocks


def _run(
    function: AttentionFunction, shape: AttentionShape, inputs: Sequence[Tensor], gradient: Tensor, *, backward: bool
) -> dict[_Result, Tensor]:
    """The output, and with `backward` the gradients that the shape asks for."""
    options = call_options(shape, gradient.device)
    if not backward:
        with torch.no_grad():
            return {"out": function(*inputs, **options)}
    wanted = _GRADIENTS[shape.differentiated]
    leaves = {
        name: tensor.detach().requires_grad_(name in wanted) for name, tensor in zip(_RESULTS[1:], inputs, strict=True)
    }
    out = function(*leaves.values(), **options)
    if out.shape != gradient.shape or out.dtype != gradient.dtype:
        return {"out": out.detach()}  # its wrong kind is then reported, where autograd would raise
    gradients = torch.autograd.grad(out, [leaves[name] for name in wanted], gradient)
    return {"out": out.detach(), **dict(zip(wanted, gradients, strict=True))}


def _is_grouped(shape: AttentionShape, dtype: TensorDtype) -> bool:
    """Whether the call is fp32 with fewer heads of keys than of queries, for which PyTorch has no fused attention."""
    return dtype == "fp32" and shape.heads != shape.key_heads


def _errors(found: Tensor, exact: Tensor, terms: float) -> tuple[float, float]:
    """Relative errors of the whole tensor and of its worst row; not finite if any number is not finite."""
    size = terms if _is_nothing(exact, terms) else float(exact.norm())
    off = (found.double() - exact).norm(dim=-1)
    rows = math.sqrt(off.numel())
    # max() of a tensor with NaN in it is NaN, and so is its norm.
    return float(off.norm()) / size, float(off.max()) / (size / rows)


def _is_nothing(exact: Tensor, terms: float) -> bool:
    return float(exact.norm()) <= NOTHING * terms


def _terms(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> dict[_Result, float]:
    """Norms that out, dq, dk and dv would have if each query saw one key, and nothing cancelled.

    dq = dS k scale with dS = P (dP - D), where dP and D are each of the size |dO| |v|, as a dot product of random rows.
    """
    size_q, size_k, size_v, size_gradient = (float(t.double().square().mean().sqrt()) for t in (q, k, v, gradient))
    for_scores = size_gradient * size_v
    return {
        "out": size_v * math.sqrt(q.numel()),
        "dq": for_scores * size_k * math.sqrt(q.numel()),
        "dk": for_scores * size_q * math.sqrt(k.numel()),
        "dv": size_gradient * math.sqrt(k.numel()),
    }
