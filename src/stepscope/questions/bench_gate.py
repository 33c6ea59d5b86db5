"""Right or wrong: any function beside the same formula in float64, output and every gradient, before it gets a time.

Its error may be four times what the yardstick makes of the formula in the tensors' dtype, and that of the worst row
eight times: twice what kernels of stepscope's own may have (`training/parts/gate.py`), since nobody says of a
stranger's function which intermediate results it rounds to 16 bits, as attention written out rounds its scores.

A function is judged on the numbers that it is timed with, as far as float64 is affordable there, and on small ones that
show what large random ones hide: odd lengths, views whose neighbours are NaN, large and tiny numbers, rows that a mask
hides whole, and the same call twice.

An error raised on a shape that need not be supported refuses that case, and says so; wrong numbers refuse the function.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stepscope.core.errors import InputError, named_line
from stepscope.questions.bench_inputs import FLOATS, TensorSpec, shape_words
from stepscope.questions.bench_result import Judged, ResultError, Verdict
from stepscope.recording.device import is_out_of_memory
from stepscope.training.parts.gate import compare, interpreter_slack

Function = Callable[..., Any]
DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
    "int64": torch.int64, "int32": torch.int32, "int8": torch.int8, "uint8": torch.uint8, "bool": torch.bool,
}  # fmt: skip
AS_TIMED, SMALL, ODD, VIEWS, LARGE, TINY, MASKED = (
    "as timed",
    "small",
    "odd lengths",
    "views",
    "large numbers",
    "tiny numbers",
    "fully masked rows",
)
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


@dataclass(frozen=True)
class Call:
    """What a function is called with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def draw(
        cls, specs: Sequence[TensorSpec], dtype: torch.dtype, device: torch.device, arguments: Mapping[str, Any]
    ) -> "Call":
        """Random numbers: normal ones, integers from 0 on, masks that show three numbers in four."""
        generator = torch.Generator(device).manual_seed(_SEED)

        def one(spec: TensorSpec) -> Tensor:
            shape = [int(size) for size in spec.shape]
            if spec.dtype == "bool":
                return torch.rand(shape, generator=generator, device=device) < 0.75
            if spec.below is not None:
                numbers = torch.randint(int(spec.below), shape, generator=generator, device=device)
                return numbers.to(DTYPES[spec.dtype])
            return torch.randn(shape, generator=generator, device=device).to(
                DTYPES[spec.dtype or ""] if spec.dtype else dtype
            )

        tensors = [(spec.name, one(spec)) for spec in specs]
        named = {name: tensor for name, tensor in tensors if name}
        return cls(tuple(tensor for name, tensor in tensors if not name), {**named, **arguments})

    @classmethod
    def of(cls, made: Any, what: str) -> "Call":
        """What a factory of inputs returned: a tensor, a tuple of arguments, a dict of keyword arguments, or both."""
        if isinstance(made, Tensor):
            return cls((made,))
        if isinstance(made, Mapping):
            return cls((), dict(made))
        if isinstance(made, (tuple, list)):
            if len(made) == 2 and isinstance(made[0], (tuple, list)) and isinstance(made[1], Mapping):
                return cls(tuple(made[0]), dict(made[1]))
            return cls(tuple(made))
        raise InputError(
            f"{what} returns {type(made).__name__}: return a tensor, a tuple of arguments, a dict of keyword "
            "arguments, or a tuple of both"
        )

    @property
    def tensors(self) -> list[Tensor]:
        """Its tensors, in order."""
        return [leaf for leaf in pytree.tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Tensor)]

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Call":
        """The same call with every tensor changed."""
        args, kwargs = pytree.tree_map_only(Tensor, change, (self.args, dict(self.kwargs)))
        return Call(args, kwargs)

    def names(self, *functions: Function) -> list[str]:
        """A name for each tensor: the parameter that it goes to, of the first function that says, or its place."""
        known = (_parameters(function) for function in functions)
        parameters = next((names for names in known if len(names) >= len(self.args)), [])
        named: list[str] = []
        for place, value in enumerate(self.args):
            name = parameters[place] if parameters else f"input {place + 1}"
            inside = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
            named += [name] if len(inside) == 1 else [f"{name} {i + 1}" for i in range(len(inside))]
        for name, value in self.kwargs.items():
            named += [name for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        return named

    @property
    def words(self) -> str:
        """Its tensors in the spelling of --shape."""
        short = {dtype: name for name, dtype in DTYPES.items()}
        specs = [
            TensorSpec(shape=tuple(t.shape), dtype="" if t.is_floating_point() else short.get(t.dtype, str(t.dtype)))
            for t in self.tensors
        ]
        return shape_words(specs)


def _parameters(function: Function) -> list[str]:
    """The parameters that a function takes by place; none where it does not say, as one written in C."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def results_of(made: Any) -> dict[str, Tensor]:
    """The tensors that a call returned, by name."""
    tensors = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]
    return {"output": tensors[0]} if len(tensors) == 1 else {f"output {i + 1}": t for i, t in enumerate(tensors)}


def leaves_of(call: Call, *, backward: bool) -> tuple[Call, list[Tensor]]:
    """The call with inputs that ask for a gradient: all of its floating-point tensors, or, where some ask already,
    these alone."""
    asking = any(tensor.requires_grad for tensor in call.tensors)

    def leaf(tensor: Tensor) -> Tensor:
        wanted = backward and tensor.is_floating_point() and (tensor.requires_grad or not asking)
        return tensor.detach().requires_grad_(wanted)

    ready = call.changed(leaf)
    return ready, [tensor for tensor in ready.tensors if tensor.requires_grad]


class WrongKind(Exception):
    """A result of another number, shape, dtype or device than it should be."""


def run(
    function: Function,
    call: Call,
    names: Sequence[str],
    upstream: Mapping[str, Tensor] | None,
    *,
    backward: bool,
    like: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Outputs and gradients by name. upstream: the gradients of the outputs; None: ones drawn here are not needed.

    like: outputs whose number, shapes, dtypes and device these must have. Raises WrongKind where they do not, and
    whatever the function raises.
    """
    ready, leaves = leaves_of(call, backward=backward)
    with torch.enable_grad() if leaves else torch.no_grad():
        outs = results_of(function(*ready.args, **ready.kwargs))
    if like is not None:
        _check_kind(outs, like)
    found = {name: out.detach() for name, out in outs.items()}
    if not leaves or upstream is None:
        return found
    asked = {name: out for name, out in outs.items() if out.requires_grad and name in upstream}
    if not asked:
        return found
    gradients = torch.autograd.grad(
        [*asked.values()], leaves, [upstream[name].to(out.dtype) for name, out in asked.items()], allow_unused=True
    )
    of = [name for name, tensor in zip(names, ready.tensors, strict=True) if tensor.requires_grad]
    return found | {f"gradient of {name}": g for name, g in zip(of, gradients, strict=True) if g is not None}


def _check_kind(outs: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    if outs.keys() != like.keys():
        raise WrongKind(f"it returns {len(outs)} tensors, not {len(like)}")
    for name, right in like.items():
        out = outs[name]
        if out.shape != right.shape:
            raise WrongKind(f"the {name} is {tuple(out.shape)}, not {tuple(right.shape)}")
        if out.dtype != right.dtype:
            raise WrongKind(f"the {name} is in {_short(out.dtype)}, not {_short(right.dtype)}")
        if out.device != right.device:
            raise WrongKind(f"the {name} is on {out.device}, not {right.device}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
        wide = call.changed(lambda t: t.double().requires_grad_(t.requires_grad) if t.is_floating_point() else t)
        outs = run(reference, wide, names, None, backward=False)
        upstream = _upstream(outs)
        exact = run(reference, wide, names, upstream, backward=backward)
        plain = run(yardstick, call, names, upstream, backward=backward)
        blur: dict[str, float] = {}
        if label in ILL_CONDITIONED:
            moved = run(reference, wide.changed(_rounded_once_more(DTYPES[dtype])), names, upstream, backward=backward)
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
    def outputs(self) -> dict[str, Tensor]:
        """The yardstick's outputs alone."""
        return {name: tensor for name, tensor in self.plain.items() if not name.startswith("gradient")}

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
            return Verdict(function=name, case=self.label, inputs=self.call.words, dtype=self.dtype, judged=judged,
                           reason=reason, **fields)  # fmt: skip

        if self.unfit:
            return verdict("not judged", self.unfit)
        before = [tensor.clone() for tensor in self.call.tensors]
        try:
            self._poison()
            found = run(function, self.call, self.names, self.upstream, backward=self.backward, like=self.outputs)
            again = run(function, self.call, self.names, self.upstream, backward=self.backward)
        except WrongKind as wrong:
            return verdict("wrong", str(wrong))
        except Exception as error:  # whatever a user's function raises is its own verdict
            if is_out_of_memory(error):
                raise
            return verdict("refused" if self.label in MAY_REFUSE else "wrong", f"it raises {named_line(error)}")
        finally:
            changed = self._mend(before)
        if changed:
            return verdict("wrong", f"it writes to {', '.join(changed)}, which the caller owns")
        missing = next((result for result in self.exact if result not in found), None)
        if missing is not None:
            return verdict("wrong", f"the {missing} is missing")
        errors, reason = self._errors(found)
        repeats = all(torch.equal(found[result], again[result]) for result in found if result in again)
        return verdict("wrong" if reason else "right", reason, errors=errors, repeats=repeats)

    def _errors(self, found: Mapping[str, Tensor]) -> tuple[tuple[ResultError, ...], str]:
        numbers = {name: tensor for name, tensor in self.exact.items() if tensor.is_floating_point()}
        units = {
            name: max(torch.finfo(self.plain[name].dtype).eps / 2, BLUR * self.blur.get(name, 0.0)) for name in numbers
        }
        slack = SLACK * interpreter_slack(DTYPES[self.dtype], self.call.tensors[0].device.type)
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

    def _mend(self, before: Sequence[Tensor]) -> list[str]:
        """The names of the inputs that were written to; they get their numbers back."""
        changed: list[str] = []
        for name, now, was in zip(self.names, self.call.tensors, before, strict=True):
            if not torch.equal(now, was):
                changed.append(name)
                with torch.no_grad():
                    now.copy_(was)
        return changed

    def _poison(self) -> None:
        """Fill memory of the results' sizes with NaN and free it: who leaves a number unwritten is seen."""
        blocks = [torch.full_like(t, math.nan) for t in self.plain.values() if t.is_floating_point()]
        del blocks


def _upstream(outs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator(next(iter(outs.values())).device).manual_seed(_SEED + 1) if outs else None
    return {
        name: torch.randn(out.shape, generator=generator, device=out.device)
        for name, out in outs.items()
        if out.is_floating_point()
    }


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
    around = torch.full(
        (*swapped.shape[:-1], swapped.shape[-1] + 16), math.nan, dtype=tensor.dtype, device=tensor.device
    )
    view = around[..., 8:-8]
    view.copy_(swapped.detach())
    view = view.transpose(-3, -2) if tensor.dim() > 2 else view
    return view.requires_grad_(tensor.requires_grad)


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return (tensor.detach() * factor).requires_grad_(tensor.requires_grad)


def _rounded_once_more(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A change of float64 tensors by up to one unit roundoff of the dtype, at random."""

    def moved(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        generator = torch.Generator(tensor.device).manual_seed(_SEED + 2)
        off = torch.rand(tensor.shape, generator=generator, device=tensor.device, dtype=tensor.dtype) * 2 - 1
        changed = tensor.detach() * (1 + off * torch.finfo(dtype).eps / 2)
        return changed.requires_grad_(tensor.requires_grad)

    return moved


def _with_a_hidden_row(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.bool or tensor.dim() < 2:
        return tensor
    changed = tensor.clone()
    changed[..., changed.shape[-2] // 2, :] = False
    return changed


def judgeable_dtype(dtype: str) -> str:
    """The dtype, which float64 can judge. Raises InputError for another."""
    if dtype not in FLOATS[1:]:
        raise InputError(f"--dtype {dtype}: the gate judges by float64, so choose among {', '.join(FLOATS[1:])}")
    return dtype
