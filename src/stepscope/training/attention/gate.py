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

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from stepscope.core.attention_support import find_fault
from stepscope.core.attention_timing import AttentionShape, AttentionVerdict, GateReport, TensorError
from stepscope.core.attentions import ATTENTIONS, Attention, AttentionCall, TensorDtype
from stepscope.core.errors import InputError, named_line
from stepscope.training.attention import AttentionFunction, fault_of_device, implementation
from stepscope.training.attention.cases import GivenTensor, call_options, draw_tensors, scale_of
from stepscope.training.attention.inputs import for_all_heads
from stepscope.training.attention.pytorch import sdpa
from stepscope.training.attention.written_out import chunked, reference

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
        exact = _run(
            chunked if large and not shape.documents else reference, shape, wide, gradient.double(), backward=True
        )
        terms = _terms(q, k, v, gradient)
        yardsticks: list[AttentionFunction] = [sdpa, _sdpa_of_repeated] if _is_grouped(shape, dtype) else [sdpa]
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
        return cls(
            shape=shape,
            dtype=dtype,
            given=given,
            largest_score=None if large else _largest_score(shape, wide[0], wide[1]),
            exact=exact,
            terms=terms,
            sdpa=worst,
        )

    def judge(self, name: Attention, function: AttentionFunction | None, *, repeat: bool) -> AttentionVerdict:
        """The verdict on this call. function: judged in place of the implementation of this name, where that runs."""
        verdict = partial(
            AttentionVerdict, dtype=self.dtype, shape=self.shape, allowance=self._allowance(name),
            yardsticks=self._yardsticks(),
        )  # fmt: skip
        backward = True
        if function is None:
            reason = self._fault(name, backward=True)
            if reason is not None:
                backward, reason = False, self._fault(name, backward=False)
            if reason is not None:
                return AttentionVerdict(dtype=self.dtype, shape=self.shape, outcome="not supported", reason=reason)
        elif reason := ATTENTIONS[name].fault_of_scores(self._call(backward=True)):
            return AttentionVerdict(dtype=self.dtype, shape=self.shape, outcome="not supported", reason=reason)
        try:
            called = implementation(name) if function is None else function
            self._poison()
            found = self._run(called, backward=backward)
            again = self._run(called, backward=backward) if repeat else None
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

    def _run(self, function: AttentionFunction, *, backward: bool) -> dict[_Result, Tensor]:
        q, k, v, gradient = (each.tensor for each in self.given)
        return _run(function, self.shape, (q, k, v), gradient, backward=backward)

    def _fault(self, name: Attention, *, backward: bool) -> str | None:
        return find_fault(name, self._call(backward=backward), here=fault_of_device)

    def _call(self, *, backward: bool) -> AttentionCall:
        return self.shape.call(self._device_type, self.dtype, backward=backward, largest_score=self.largest_score)

    @property
    def _device_type(self) -> str:
        return self.given[0].tensor.device.type

    def _allowance(self, name: Attention) -> str:
        """Why this implementation may be off twice as far as others; empty where it may not."""
        if self._rounds_scores(name):
            return _ROUNDED
        cuts_off = ATTENTIONS[name].triton and self._device_type != "cuda" and self.dtype == "bf16"
        return _CUT_OFF if cuts_off else ""

    def _yardsticks(self) -> tuple[str, ...]:
        grouped = _is_grouped(self.shape, self.dtype)
        return (*([_GROUPED] if grouped else []), *([_BLURRED] if self._is_blurred else []))

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
        blur = self._blur(name)
        return TensorError(
            tensor=result,
            error=error if math.isfinite(error) else None,
            allowed=slack * max(FACTOR * sdpa_error, unit, blur),
            sdpa=sdpa_error,
            row_error=row_error if math.isfinite(row_error) else None,
            row_allowed=slack * max(ROW_FACTOR * sdpa_row_error, ROW_UNITS * unit, ROW_FACTOR * blur),
        )

    def _blur(self, name: Attention) -> float:
        """The relative error that the rounding of scores makes in the weights, where scores are not of the size 1."""
        if self.largest_score is None or not self._is_blurred:
            return 0.0
        made_in = self.given[0].tensor.dtype if self._rounds_scores(name) else torch.float32
        return BLUR * torch.finfo(made_in).eps / 2 * self.largest_score

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


def _sdpa_of_repeated(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None,
    bounds: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return sdpa(q, *for_all_heads(q, k, v), causal=causal, scale=scale, window=window, bounds=bounds)


def _is_grouped(shape: AttentionShape, dtype: TensorDtype) -> bool:
    """Whether the call is fp32 with fewer heads of keys than of queries, for which PyTorch has no fused attention."""
    return dtype == "fp32" and shape.heads != shape.key_heads


def _largest_score(shape: AttentionShape, q: Tensor, k: Tensor) -> float:
    k = k.repeat_interleave(shape.heads // shape.key_heads, dim=1)
    return float((q @ k.mT).abs().amax()) * abs(scale_of(shape))


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
    head_dim = q.shape[-1]
    for_scores = size_gradient * size_v * math.sqrt(head_dim) / math.sqrt(head_dim)
    return {
        "out": size_v * math.sqrt(q.numel()),
        "dq": for_scores * size_k * math.sqrt(q.numel()),
        "dk": for_scores * size_q * math.sqrt(k.numel()),
        "dv": size_gradient * math.sqrt(k.numel()),
    }
