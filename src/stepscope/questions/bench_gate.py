"""Right or wrong: any function beside the same formula in float64, output and every gradient, before it gets a time.

Its error may be four times what the yardstick makes of the formula in the tensors' dtype, and that of the worst row
eight times: twice what kernels of stepscope's own may have (`training/judging.py`), since nobody says of a
stranger's function which intermediate results it rounds to 16 bits, as attention written out rounds its scores.

A function is judged on the numbers that it is timed with, as far as float64 is affordable there, and on small ones that
show what large random ones hide: odd lengths, views whose neighbours are NaN, large and tiny numbers, rows that a mask
hides whole, and the same call twice.

An error raised on a shape that need not be supported refuses that case, and says so; wrong numbers refuse the function.
"""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepscope.core.errors import InputError, named_line
from stepscope.questions.bench_inputs import TensorSpec, shape_words
from stepscope.questions.bench_result import Judged, ResultError, Verdict
from stepscope.training.judging import (
    Call,
    Function,
    Watched,
    WrongKind,
    attempt,
    compare,
    interpreter_slack,
    nan_around,
    poison,
    run_call,
)

DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
    "int64": torch.int64, "int32": torch.int32, "int8": torch.int8, "uint8": torch.uint8, "bool": torch.bool,
}  # fmt: skip
AS_TIMED, SMALL, ODD, VIEWS = "as timed", "small", "odd lengths", "views"
LARGE, TINY, MASKED = "large numbers", "tiny numbers", "fully masked rows"
MAY_REFUSE = (ODD, VIEWS)
"""Cases that a function may refuse to take by raising an error."""
SLACK = 2.0
"""How much further off a function may be than a kernel of stepscope's own."""
LARGER, SMALLER = 32.0, 2.0**-7
ILL_CONDITIONED = (LARGE, TINY)
"""Cases in which rounding an intermediate result once may move what follows by more than a unit roundoff: the exponent
of a large score, say. As much as rounding the inputs once more does is then allowed, four times over."""
BLUR = 4.0
_SEED = 20


def draw_call(
    specs: Sequence[TensorSpec], dtype: torch.dtype, device: torch.device, arguments: Mapping[str, Any]
) -> Call:
    """A call with random numbers: normal ones, integers from 0 on, masks that show three numbers in four."""
    generator = torch.Generator(device).manual_seed(_SEED)

    def one(spec: TensorSpec) -> Tensor:
        shape = [int(size) for size in spec.shape]
        if spec.dtype == "bool":
            return torch.rand(shape, generator=generator, device=device) < 0.75
        if spec.below is not None:
            numbers = torch.randint(int(spec.below), shape, generator=generator, device=device)
            return numbers.to(DTYPES[spec.dtype])
        return torch.randn(shape, generator=generator, device=device).to(DTYPES[spec.dtype] if spec.dtype else dtype)

    tensors = [(spec.name, one(spec)) for spec in specs]
    named = {name: tensor for name, tensor in tensors if name}
    return Call(tuple(tensor for name, tensor in tensors if not name), {**named, **arguments})


def call_of(made: Any, what: str) -> Call:
    """The call of what a factory of inputs returned: a tensor, a tuple of arguments, a dict of keyword arguments, or
    both."""
    if isinstance(made, Tensor):
        return Call((made,))
    if isinstance(made, Mapping):
        return Call((), dict(made))
    if isinstance(made, (tuple, list)):
        if len(made) == 2 and isinstance(made[0], (tuple, list)) and isinstance(made[1], Mapping):
            return Call(tuple(made[0]), dict(made[1]))
        return Call(tuple(made))
    raise InputError(
        f"{what} returns {type(made).__name__}: return a tensor, a tuple of arguments, a dict of keyword "
        "arguments, or a tuple of both"
    )


def tensor_names(call: Call, functions: Iterable[Function]) -> list[str]:
    """A name for each tensor: the parameter that it goes to, of the first function that says, or its place."""
    known = (_parameters(function) for function in functions)
    parameters = next((names for names in known if len(names) >= len(call.args)), [])
    named: list[str] = []
    for place, value in enumerate(call.args):
        name = parameters[place] if parameters else f"input {place + 1}"
        count = len(Call((value,)).tensors)
        named += [name] if count == 1 else [f"{name} {i + 1}" for i in range(count)]
    for name, value in call.kwargs.items():
        named += [name] * len(Call((value,)).tensors)
    return named


def _parameters(function: Function) -> list[str]:
    """The parameters that a function takes by place; none where it does not say, as one written in C."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def words_of(call: Call) -> str:
    """The call's tensors in the spelling of --shape."""
    short = {dtype: name for name, dtype in DTYPES.items()}
    return shape_words(
        [
            TensorSpec(shape=tuple(t.shape), dtype="" if t.is_floating_point() else short.get(t.dtype, str(t.dtype)))
            for t in call.tensors
        ]
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call that functions are judged on: its results in float64, and what the yardstick makes of it."""

    label: str
    dtype: str
    call: Call
    names: Sequence[str]
    backward: bool
    upstream: Mapping[str, Tensor]
    exact: Mapping[str, Tensor]
    plain: Mapping[str, Tensor]
    blur: Mapping[str, float]
    """By result, how far one more rounding of the inputs moves it, in float64; empty where that is not looked at."""

    @classmethod
    def make(
        cls, label: str, dtype: str, call: Call, reference: Function, yardstick: Function, *, names: Sequence[str],
        backward: bool,
    ) -> "Case":  # fmt: skip
        """Run the reference in float64 and the yardstick as it is. names: those of the call's tensors. Raises whatever
        they raise."""
        wide = call.widened()
        outs = run_call(reference, wide, names, None, backward=False)
        generator = torch.Generator(next(iter(outs.values())).device).manual_seed(_SEED + 1) if outs else None
        upstream = {
            name: torch.randn(out.shape, generator=generator, device=out.device)
            for name, out in outs.items()
            if out.is_floating_point()
        }
        exact = run_call(reference, wide, names, upstream, backward=backward)
        plain = run_call(yardstick, call, names, upstream, backward=backward)
        blur: dict[str, float] = {}
        if label in ILL_CONDITIONED:
            changed = wide.changed(lambda t: _rounded_once_more(t, DTYPES[dtype]))
            moved = run_call(reference, changed, names, upstream, backward=backward)
            blur = {
                name: float((moved[name] - right).norm()) / (float(right.norm()) or 1.0)
                for name, right in exact.items()
                if right.is_floating_point() and name in moved
            }
        return cls(
            label=label, dtype=dtype, call=call, names=names, backward=backward, upstream=upstream, exact=exact,
            plain=plain, blur=blur,
        )  # fmt: skip

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.call.tensors[0].device

    @property
    def unfit(self) -> str:
        """Why nobody can be judged by this case; empty where they can."""
        for name, tensor in self.exact.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                return f"in float64 the {name} is not finite"
            if name not in self.plain or not bool(self.plain[name].isfinite().all()):
                return f"the yardstick's {name} is not finite in {self.dtype}"
        return ""

    def judge(self, name: str, function: Function) -> Verdict:
        """The verdict on a function. torch.OutOfMemoryError is not caught: a small device is no fault of it."""

        def verdict(judged: Judged, reason: str = "", **fields: Any) -> Verdict:
            return Verdict(function=name, case=self.label, inputs=words_of(self.call), dtype=self.dtype, judged=judged,
                           reason=reason, **fields)  # fmt: skip

        if self.unfit:
            return verdict("not judged", self.unfit)
        outputs = {name: tensor for name, tensor in self.plain.items() if not name.startswith("gradient")}

        def run() -> dict[str, Tensor]:
            return run_call(function, self.call, self.names, self.upstream, backward=self.backward, like=outputs)

        # A view that the gate made has memory of its own around it.
        watch = Watched.around if self.label == VIEWS else Watched.of
        watched = {name: watch(tensor) for name, tensor in zip(self.names, self.call.tensors, strict=True)}
        poison([(t.shape, t.dtype) for t in self.plain.values() if t.is_floating_point()], self.device)
        done = attempt(run, watched, twice=True)
        if isinstance(done.raised, WrongKind):
            return verdict("wrong", str(done.raised))
        if done.raised is not None:
            judged: Judged = "refused" if self.label in MAY_REFUSE else "wrong"
            return verdict(judged, f"it raises {named_line(done.raised)}")
        if done.written:
            return verdict("wrong", f"it writes to {', '.join(done.written)}, which the caller owns")
        missing = next((result for result in self.exact if result not in done.results), None)
        if missing is not None:
            return verdict("wrong", f"the {missing} is missing")
        errors, reason = self._errors(done.results)
        return verdict("wrong" if reason else "right", reason, errors=errors, repeats=done.repeats)

    def _errors(self, found: Mapping[str, Tensor]) -> tuple[tuple[ResultError, ...], str]:
        numbers = {name: tensor for name, tensor in self.exact.items() if tensor.is_floating_point()}
        units = {
            name: max(torch.finfo(self.plain[name].dtype).eps / 2, BLUR * self.blur.get(name, 0.0)) for name in numbers
        }
        slack = SLACK * interpreter_slack(DTYPES[self.dtype], self.device.type)
        errors, reason = compare(numbers, self.plain, found, units, slack)
        rivals = compare(numbers, self.plain, self.plain, units, slack)[0]
        other = next((n for n, t in self.exact.items() if n not in numbers and not torch.equal(t, found[n])), None)
        strange = next((name for name, (error, _) in errors.items() if not math.isfinite(error)), None)
        if strange is not None:
            reason = f"the {strange} is not finite, where it is in float64"
        rows = tuple(
            ResultError(
                result=name, error=error if math.isfinite(error) else None, allowed=allowed, rival=rivals[name][0]
            )
            for name, (error, allowed) in errors.items()
        )
        return rows, reason or (f"the {other} is not the reference's" if other else "")


def variations(small: Call, odd: Call | None) -> list[tuple[str, Call]]:
    """The small calls that a function is judged on. odd: a call at odd lengths, where there is one."""
    cases = [(SMALL, small)]
    if odd is not None:
        cases.append((ODD, odd))
    cases.append((VIEWS, small.changed(as_view)))
    cases.append((LARGE, small.changed(lambda t: _scaled(t, LARGER))))
    cases.append((TINY, small.changed(lambda t: _scaled(t, SMALLER))))
    if any(tensor.dtype == torch.bool and tensor.dim() > 1 for tensor in small.tensors):
        cases.append((MASKED, small.changed(_with_a_hidden_row)))
    return cases


def as_view(tensor: Tensor) -> Tensor:
    """The same numbers as a view of larger memory, which is NaN around them; of three dimensions or more with the last
    but one outside, as heads of a projection lie."""
    if tensor.dim() < 1 or not tensor.is_floating_point():
        return tensor
    swapped = tensor.transpose(-3, -2) if tensor.dim() > 2 else tensor
    _, view = nan_around(swapped.shape, tensor.dtype, tensor.device, beside=8)
    view.copy_(swapped.detach())
    view = view.transpose(-3, -2) if tensor.dim() > 2 else view
    return view.requires_grad_(tensor.requires_grad)


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return (tensor.detach() * factor).requires_grad_(tensor.requires_grad)


def _rounded_once_more(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A float64 tensor moved by up to one unit roundoff of the dtype, at random."""
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator(tensor.device).manual_seed(_SEED + 2)
    off = torch.rand(tensor.shape, generator=generator, device=tensor.device, dtype=tensor.dtype) * 2 - 1
    changed = tensor.detach() * (1 + off * torch.finfo(dtype).eps / 2)
    return changed.requires_grad_(tensor.requires_grad)


def _with_a_hidden_row(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.bool or tensor.dim() < 2:
        return tensor
    changed = tensor.clone()
    changed[..., changed.shape[-2] // 2, :] = False
    return changed
