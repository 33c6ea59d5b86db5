"""The gate: what calls itself attention must be attention before any time of it is shown.

The output and the three gradients of an implementation are set beside attention in float64 (`reference`, on the same
numbers). Its error may be twice what PyTorch's scaled_dot_product_attention makes of the same call in the same dtype:
the fair measure of what the dtype can, whatever the shape. Where sdpa happens to be exact (one key: its output is v),
one unit roundoff is allowed all the same.

That error is of the tensor as a whole, and in 16 bits a single wrong row among a hundred thousand hides in it. So the
worst row is held against sdpa's worst row too, more loosely, since it is the extreme of many. What stays below 16 bits'
own rounding, a single key too many in a row that sees hundreds, is for fp32 to find: judge a kernel in fp32 too.

Attention written out in 16 bits rounds its scores and its weights to 16 bits, which no fused kernel does, nor
PyTorch's own written-out one: that is a rounding more in every product, and it may be off twice as far
(ROUNDS_SCORES). In fp32 nothing distinguishes them. So may a Triton kernel in bf16 in Triton's interpreter, which cuts
numbers off where a GPU rounds to the nearest. float64 itself is not judged: the judge would be no better.

Every case draws numbers of its own, so that what an earlier one left in memory is wrong; and before each run, memory of
the sizes of the results is filled with NaN and given back, so that what a kernel does not write is seen.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stepscope.core.attention_support import SUPPORT, AttentionCall, TensorDtype, find_fault
from stepscope.core.attention_verdict import AttentionShape, AttentionVerdict, GateReport, Layout, TensorError
from stepscope.core.errors import InputError, one_line
from stepscope.core.workload import Attention
from stepscope.models.attention import (
    AttentionFunction,
    chunked,
    fault_of_device,
    implementation,
    reference,
    sdpa,
)
from stepscope.models.attention_inputs import TORCH_DTYPES

FACTOR = 2.0
"""Times sdpa's error."""
ROW_FACTOR = 4.0
"""Times the error of sdpa's worst row."""
ROW_UNITS = 16.0
"""Unit roundoffs that the worst row may be off in any case."""
ROUNDS_SCORES: tuple[Attention, ...] = ("reference", "unsafe", "chunked")
"""May be off twice as far as the others in 16 bits."""
NOTHING = 1e-6
"""A gradient this small beside the terms that it is the sum of is their cancellation, and is zero: dq and dk of a query
that sees one key. Its error is measured against those terms, of which it may be ROW_UNITS unit roundoffs."""
_MOST_SCORES = 1 << 26
"""Beyond, float64 attention is made in chunks: half a GiB for each S x T that autograd keeps."""

_TENSORS = ("out", "dq", "dk", "dv")
_LENGTHS = (1, 17, 63, 64, 65, 127, 200)
_HEAD_DIMS = (16, 24, 40, 64, 80, 128, 256)


def gate_shapes(lengths: Sequence[int] = _LENGTHS, head_dims: Sequence[int] = _HEAD_DIMS) -> tuple[AttentionShape, ...]:
    """Every length with every head_dim; mask, heads, lengths of keys and layouts change from one to the next, each with
    a period of its own.
    """
    shapes: list[AttentionShape] = []
    layouts: tuple[Layout, ...] = ("contiguous", "transposed", "strided")
    for queries in lengths:
        for head_dim in head_dims:
            i = len(shapes)
            keys = (queries, queries + 39, queries, max(1, queries // 2), queries)[i % 5]
            heads, key_heads = ((2, 2), (4, 2), (3, 1), (2, 2))[i % 4]
            shapes.append(
                AttentionShape(
                    batch=1 + (i % 3 == 0), heads=heads, key_heads=key_heads, queries=queries, keys=keys,
                    head_dim=head_dim, causal=i % 2 == 0 if i % 7 else True,
                    window=(None, None, None, 33, None, 1, None, None, 70)[i % 9], layout=layouts[i % 3],
                )
            )  # fmt: skip
    return tuple(shapes)


def few_shapes() -> tuple[AttentionShape, ...]:
    """Every length and every head_dim once: enough to see a mistake, and little enough for Triton's interpreter.

    Of the pairings one in which windows hide something, with causal and without, with grouped heads too, and in which
    unequal lengths come both ways.
    """
    every = {(shape.queries, shape.head_dim): shape for shape in gate_shapes()}
    return tuple(every[pair] for pair in zip(_LENGTHS, (16, 64, 80, 128, 40, 256, 24), strict=True))


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
    """The gate on every shape in every dtype. function: to be checked in place of the one of this name."""
    functions: dict[Attention, AttentionFunction] = {} if function is None else {name: function}
    return check_attention_matrix(
        (name,), device=device, dtypes=dtypes, shapes=shapes, seed=seed, repeat=repeat, functions=functions
    )[0]


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
    """The same of several, on the same numbers. repeat: run each twice, and say whether the bits are the same.

    Memory that the device lacks is nobody's mistake: torch.OutOfMemoryError is raised as it comes.
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
    """One call: its numbers, what is exact, and how far off sdpa is."""

    shape: AttentionShape
    dtype: TensorDtype
    inputs: tuple[Tensor, Tensor, Tensor]
    gradient: Tensor
    """Of the output."""
    kept: tuple[Tensor, ...]
    """Copies of these four."""
    exact: tuple[Tensor, ...]
    """The output and the three gradients, in float64."""
    terms: tuple[float, ...]
    """How large the terms are that each of them is a sum of, as a norm of the whole."""
    sdpa: tuple[tuple[float, float], ...]
    """Of each, the error and the worst row's."""

    @classmethod
    def make(cls, shape: AttentionShape, dtype: TensorDtype, device: torch.device, seed: int) -> "_Case":
        # A hash of its own: Python's of strings changes from process to process.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {dtype} {shape}".encode()))

        def draw(heads: int, length: int) -> Tensor:
            drawn = _laid_out(shape.layout, (shape.batch, heads, length, shape.head_dim), generator)
            placed = torch.empty_strided(drawn.shape, drawn.stride(), dtype=TORCH_DTYPES[dtype], device=device)
            return placed.copy_(drawn)

        q = draw(shape.heads, shape.queries)
        k, v = (draw(shape.key_heads, shape.keys) for _ in range(2))
        gradient = draw(shape.heads, shape.queries)
        large = shape.batch * shape.heads * shape.queries * shape.keys > _MOST_SCORES
        wide = [tensor.double() for tensor in (q, k, v)]
        exact = _run(chunked if large else reference, shape, wide, gradient.double(), backward=True)
        found = _run(sdpa, shape, (q, k, v), gradient, backward=True)
        terms = _terms(q, k, v, gradient)
        return cls(
            shape=shape,
            dtype=dtype,
            inputs=(q, k, v),
            gradient=gradient,
            kept=tuple(tensor.clone() for tensor in (q, k, v, gradient)),
            exact=exact,
            terms=terms,
            sdpa=tuple(_errors(*each) for each in zip(found, exact, terms, strict=True)),
        )

    def judge(self, name: Attention, function: AttentionFunction | None, *, repeat: bool) -> AttentionVerdict:
        """function: to be judged in place of the one of this name, and whatever that one supports."""
        backward = True
        if function is None:
            reason = self._fault(name, backward=True)
            if reason is not None:
                backward, reason = False, self._fault(name, backward=False)
            if reason is not None:
                return AttentionVerdict(dtype=self.dtype, shape=self.shape, outcome="not supported", reason=reason)
        try:
            called = implementation(name) if function is None else function
            self._poison()
            found = _run(called, self.shape, self.inputs, self.gradient, backward=backward)
            again = _run(called, self.shape, self.inputs, self.gradient, backward=backward) if repeat else None
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever it raises on what it says it supports is its failure
            raised = f"{type(error).__name__}: {one_line(error)}"
            return AttentionVerdict(dtype=self.dtype, shape=self.shape, outcome="failed", reason=raised)
        wrong = self._overwritten() or self._wrong_kind(found)
        if wrong:
            return AttentionVerdict(dtype=self.dtype, shape=self.shape, outcome="failed", reason=wrong)
        slack = self._slack(name)
        errors = tuple(self._error(i, tensor, slack) for i, tensor in enumerate(found))
        return AttentionVerdict(
            dtype=self.dtype,
            shape=self.shape,
            outcome="passed" if all(error.passed for error in errors) else "failed",
            errors=errors,
            repeats=None if again is None else all(torch.equal(a, b) for a, b in zip(found, again, strict=True)),
        )

    def _fault(self, name: Attention, *, backward: bool) -> str | None:
        shape = self.shape
        call = AttentionCall(
            device_type=self.inputs[0].device.type, dtype=self.dtype, head_dim=shape.head_dim, queries=shape.queries,
            keys=shape.keys, heads=shape.heads, key_heads=shape.key_heads, window=shape.window, backward=backward,
        )  # fmt: skip
        return find_fault(name, call, here=fault_of_device)

    def _slack(self, name: Attention) -> float:
        rounds_scores = name in ROUNDS_SCORES and self.dtype != "fp32"
        cuts_off = SUPPORT[name].triton and self.inputs[0].device.type != "cuda" and self.dtype == "bf16"
        return 2.0 if rounds_scores or cuts_off else 1.0

    def _overwritten(self) -> str:
        """Which of its tensors the call has written to. They are made good: others are judged on them."""
        changed: list[str] = []
        for what, tensor, kept in zip(("q", "k", "v", "the output's gradient"), self._given, self.kept, strict=True):
            if not torch.equal(tensor, kept):
                changed.append(what)
                tensor.copy_(kept)
        return f"it writes to {', '.join(changed)}, which are the caller's" if changed else ""

    @property
    def _given(self) -> tuple[Tensor, ...]:
        return *self.inputs, self.gradient

    def _wrong_kind(self, found: Sequence[Tensor]) -> str:
        """What is wrong before any number is looked at."""
        for name, tensor, exact in zip(_TENSORS, found, self.exact, strict=False):
            if tensor.shape != exact.shape or tensor.dtype != self.inputs[0].dtype:
                got = f"{tuple(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')}"
                return f"{name} is {got}, not {tuple(exact.shape)} in {self.dtype}"
        return ""

    def _error(self, i: int, tensor: Tensor, slack: float) -> TensorError:
        error, row_error = _errors(tensor, self.exact[i], self.terms[i])
        sdpa_error, sdpa_row_error = self.sdpa[i]
        unit = torch.finfo(tensor.dtype).eps / 2
        if _is_nothing(self.exact[i], self.terms[i]):
            unit *= ROW_UNITS
        return TensorError(
            tensor=_TENSORS[i],
            error=error if math.isfinite(error) else None,
            allowed=slack * max(FACTOR * sdpa_error, unit),
            sdpa=sdpa_error,
            row_error=row_error if math.isfinite(row_error) else None,
            row_allowed=slack * max(ROW_FACTOR * sdpa_row_error, ROW_UNITS * unit),
        )

    def _poison(self) -> None:
        """Fill memory of the sizes that the results will have with NaN, and give it back: what is allocated next is
        that, from PyTorch's caching allocator always, from a host's mostly.
        """
        q, k, _ = self.inputs
        blocks = [torch.full_like(tensor, math.nan) for tensor in (q, q, k, k)]
        blocks += [torch.full(tensor.shape, math.nan, dtype=torch.float32, device=q.device) for tensor in (q, k, k)]
        blocks += [torch.full(q.shape[:-1], math.nan, dtype=torch.float32, device=q.device) for _ in range(2)]
        del blocks


def _run(
    function: AttentionFunction, shape: AttentionShape, inputs: Sequence[Tensor], gradient: Tensor, *, backward: bool
) -> tuple[Tensor, ...]:
    """The output, and with `backward` the gradients of q, k and v."""
    if not backward:
        with torch.no_grad():
            return (function(*inputs, causal=shape.causal, window=shape.window),)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = function(*leaves, causal=shape.causal, window=shape.window)
    if out.shape != gradient.shape or out.dtype != gradient.dtype:
        return (out.detach(),)  # which is said of it; autograd would raise
    return (out.detach(), *torch.autograd.grad(out, leaves, gradient))


def _errors(found: Tensor, exact: Tensor, terms: float) -> tuple[float, float]:
    """Of the whole, and of the worst row; not finite where something is not."""
    size = terms if _is_nothing(exact, terms) else float(exact.norm())
    off = (found.double() - exact).norm(dim=-1)
    rows = math.sqrt(off.numel())
    # max() of a tensor with NaN in it is NaN, and so is its norm.
    return float(off.norm()) / size, float(off.max()) / (size / rows)


def _is_nothing(exact: Tensor, terms: float) -> bool:
    return float(exact.norm()) <= NOTHING * terms


def _terms(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> tuple[float, ...]:
    """Norms that out, dq, dk and dv would have if each query saw one key, and nothing cancelled.

    dq = dS k scale with dS = P (dP - D), where dP and D are each of the size |dO| |v|, as a dot product of random rows.
    """
    size_q, size_k, size_v, size_gradient = (float(t.double().square().mean().sqrt()) for t in (q, k, v, gradient))
    head_dim = q.shape[-1]
    for_scores = size_gradient * size_v * math.sqrt(head_dim) / math.sqrt(head_dim)
    return (
        size_v * math.sqrt(q.numel()),
        for_scores * size_k * math.sqrt(q.numel()),
        for_scores * size_q * math.sqrt(k.numel()),
        size_gradient * math.sqrt(k.numel()),
    )


def _laid_out(layout: Layout, size: tuple[int, int, int, int], generator: torch.Generator) -> Tensor:
    """Normal random numbers of this size, in float32 on the host."""
    batch, heads, length, head_dim = size
    if layout == "contiguous":
        return torch.randn(size, generator=generator)
    if layout == "transposed":
        return torch.randn(batch, length, heads, head_dim, generator=generator).transpose(1, 2)
    return torch.randn(batch, length, heads, 2 * head_dim, generator=generator)[..., ::2].transpose(1, 2)
