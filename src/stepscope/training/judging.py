"""The judge of any function: its outputs and gradients beside float64, and whatever else it does with a call.

An error is relative to the norm of the exact result; that of the worst row is looked at too, since one wrong row among
a hundred thousand hides in the whole. It may be a multiple of the error that a yardstick makes of the same call in the
same dtype: the fair measure of what the dtype can, whatever the shape. Inputs lie in memory that is NaN around them,
and memory of the results' sizes is filled with NaN before the call: who reads beside an input is seen, who writes to
one or beside it, and who leaves a number unwritten. The same call again shows whether the bits are the same.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from stepscope.core.errors import named_line
from stepscope.recording.device import is_out_of_memory

FACTOR = 2.0
"""The error that is allowed to a whole tensor, as a multiple of the yardstick's."""
ROW_FACTOR = 4.0
"""The error that is allowed to the worst row, as a multiple of that of the yardstick's worst row."""
ROW_UNITS = 16.0
"""The error that is allowed to the worst row in any case, in unit roundoffs."""
SUM_UNITS = 4.0
"""Unit roundoffs of fp32 that are allowed to a whole tensor, where the yardstick happens to be exact."""
MARGIN = 1024
"""NaNs before and after a tensor, as a count of elements. A multiple of the alignment that any kernel wants."""

Function = Callable[..., Any]


@dataclass(frozen=True)
class Call:
    """What a function is called with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def tensors(self) -> list[Tensor]:
        """Its tensors, in order."""
        return [leaf for leaf in pytree.tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Tensor)]

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Call":
        """A call that differs from this one in its tensors, each changed."""
        args, kwargs = pytree.tree_map_only(Tensor, change, (self.args, dict(self.kwargs)))
        return Call(args, kwargs)

    def widened(self) -> "Call":
        """This call with its floating-point tensors in float64."""
        return self.changed(
            lambda t: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        )

    def ready(self, *, backward: bool) -> "Call":
        """The call with inputs that ask for a gradient: all of its floating-point tensors, or, where some ask already,
        these alone."""
        asking = any(tensor.requires_grad for tensor in self.tensors)

        def leaf(tensor: Tensor) -> Tensor:
            wanted = backward and tensor.is_floating_point() and (tensor.requires_grad or not asking)
            return tensor.detach().requires_grad_(wanted)

        return self.changed(leaf)


def results_of(made: Any) -> dict[str, Tensor]:
    """The tensors that a call returned, by name."""
    tensors = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]
    return {"output": tensors[0]} if len(tensors) == 1 else {f"output {i + 1}": t for i, t in enumerate(tensors)}


class WrongKind(Exception):
    """A result of another number, shape, dtype or device than it should be, or a call that changes more than that."""

    def __init__(self, why: str, result: str = "", tensor: Tensor | None = None) -> None:
        super().__init__(why)
        self.result, self.tensor = result, tensor


def run_call(
    function: Function,
    call: Call,
    names: Sequence[str],
    upstream: Mapping[str, Tensor] | None,
    *,
    backward: bool,
    like: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Outputs and gradients by name.

    names: those of the call's tensors. upstream: the gradients of the outputs; None where none are wanted. like:
    outputs whose number, shapes, dtypes and device these must have. Raises WrongKind where they do not, and whatever
    the function raises.
    """
    ready = call.ready(backward=backward)
    trained = {name: t for name, t in zip(names, ready.tensors, strict=True) if t.requires_grad}
    with torch.enable_grad() if trained else torch.no_grad():
        outs = results_of(function(*ready.args, **ready.kwargs))
        if torch.is_grad_enabled() != bool(trained):
            raise WrongKind("it leaves autograd switched over, for all that comes after it")
    if like is not None:
        _check_kind(outs, like)
    found = {name: out.detach() for name, out in outs.items()}
    asked = {name: out for name, out in outs.items() if out.requires_grad and name in (upstream or {})}
    if not trained or not upstream or not asked:
        return found
    of_outs = [upstream[name].to(out.dtype) for name, out in asked.items()]
    gradients = torch.autograd.grad([*asked.values()], [*trained.values()], of_outs, allow_unused=True)
    return found | {f"gradient of {name}": g for name, g in zip(trained, gradients, strict=True) if g is not None}


def _check_kind(outs: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    if outs.keys() != like.keys():
        raise WrongKind(f"it returns {len(outs)} tensors, not {len(like)}")
    for name, right in like.items():
        out = outs[name]
        if out.shape != right.shape:
            raise WrongKind(f"the {name} is {tuple(out.shape)}, not {tuple(right.shape)}", name, out)
        if out.dtype != right.dtype:
            got, wanted = (str(dtype).removeprefix("torch.") for dtype in (out.dtype, right.dtype))
            raise WrongKind(f"the {name} is in {got}, not {wanted}", name, out)
        if out.device != right.device:
            raise WrongKind(f"the {name} is on {out.device}, not {right.device}", name, out)


# What a function may not touch, and what it must write.


def nan_around(
    size: Sequence[int], dtype: torch.dtype, device: torch.device, *, beside: int = 0
) -> tuple[Tensor, Tensor]:
    """Memory that is NaN, and a view of this size in it. beside: NaNs before and after each row, too."""
    *outer, last = size
    stored = (*outer, last + 2 * beside)
    memory = torch.full((math.prod(stored) + 2 * MARGIN,), math.nan, dtype=dtype, device=device)
    return memory, memory[MARGIN:-MARGIN].view(stored)[..., beside : beside + last]


@dataclass(frozen=True)
class Watched:
    """Memory that belongs to the caller, and a copy of it."""

    memory: Tensor
    kept: Tensor

    @classmethod
    def of(cls, memory: Tensor) -> "Watched":
        """The memory as it is now."""
        return cls(memory.detach(), memory.detach().clone())

    @classmethod
    def around(cls, tensor: Tensor) -> "Watched":
        """All of the memory that this tensor is a view of."""
        storage = tensor.untyped_storage()
        return cls.of(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))

    def mend(self) -> bool:
        """Undo writes; returns whether there were any."""
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(self.memory.element_size())
        now, before = (each if bits is None else each.view(bits) for each in (self.memory, self.kept))
        if torch.equal(now, before):  # as bits, since NaN is no NaN's equal
            return False
        self.memory.copy_(self.kept)
        return True


def poison(blocks: Iterable[tuple[Sequence[int], torch.dtype]], device: torch.device) -> None:
    """Fill memory of these sizes with NaN and free it. The next allocations get it: always from PyTorch's caching
    allocator, mostly from a host's."""
    filled = [torch.full(tuple(size), math.nan, dtype=dtype, device=device) for size, dtype in blocks]
    del filled


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by PyTorch's older and newer names both
        return "mixed"


_SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], object]], ...] = (
    ("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    (
        "default device",
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    ("precision of fp32 products", _matmul_precision, torch.set_float32_matmul_precision),
    ("deterministic algorithms", torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    ("number of threads", torch.get_num_threads, torch.set_num_threads),
    ("autograd", torch.is_grad_enabled, torch.set_grad_enabled),
    (
        "cudnn.benchmark",
        lambda: torch.backends.cudnn.benchmark,
        lambda chosen: setattr(torch.backends.cudnn, "benchmark", chosen),
    ),
)
"""Settings of the whole process that change what is measured after them: their names, what reads and what sets them."""


@contextlib.contextmanager
def settings_kept(changes: list[str]) -> Iterator[None]:
    """While open, code may change PyTorch's settings; then they are as before, and `changes` has what was changed."""
    before = [read() for _, read, _ in _SETTINGS]
    try:
        yield
    finally:
        for (name, read, put), was in zip(_SETTINGS, before, strict=True):
            if (now := read()) != was:
                changes.append(f"{name}, {was} to {now}".replace("torch.", ""))
                put(was)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What a function made of a call: results that can be judged, or why there are none."""

    results: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    again: Mapping[str, Tensor] | None = None
    """The results of a second call, where they are others: both must be right."""
    repeats: bool | None = None
    """Whether a second call gave the same bits; None where there was none."""
    raised: BaseException | None = None
    """What it raised, or a WrongKind."""
    written: tuple[str, ...] = ()
    """What it wrote to of the caller's; the numbers are back."""


def attempt(run: Callable[[], dict[str, Tensor]], watched: Mapping[str, Watched], *, twice: bool) -> Attempt:
    """Run a function, by `run_call`. An error for memory that ran out is raised: a small device is no fault of it."""
    results, again, repeats, raised, changes = dict[str, Tensor](), None, None, None, list[str]()
    try:
        with settings_kept(changes):
            results = run()
            if twice:
                again = run()
                repeats = results.keys() == again.keys() and all(
                    torch.equal(tensor, again[name]) for name, tensor in results.items()
                )
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever it raises is its own fault
        if is_out_of_memory(error):
            raise
        raised = error
    finally:
        written = tuple(name for name, each in watched.items() if each.mend())
    if changes:
        raised = WrongKind(f"it changes PyTorch's {' and '.join(changes)}, for all that comes after it")
    again = again if repeats is False else None
    return Attempt(results=results, again=again, repeats=repeats, raised=raised, written=written)


# How far off a result is, and may be.


def relative_errors(found: Tensor, exact: Tensor, size: float | None = None) -> tuple[float, float]:
    """Errors of the whole tensor and of its worst row, relative to the size, or the exact norm; not finite if any
    number is not finite."""
    size = size or float(exact.norm()) or 1.0
    off = (found.double() - exact).reshape(-1, exact.shape[-1] if exact.dim() else 1).norm(dim=-1)
    # max() of a tensor with NaN in it is NaN, and so is its norm.
    return float(off.norm()) / size, float(off.max()) / (size / math.sqrt(off.numel()))


def allowed_errors(
    rival: tuple[float, float], unit: float, *, slack: float, sums: float = 0.0, blur: float = 0.0
) -> tuple[float, float]:
    """The errors that are allowed to a whole tensor and to its worst row, beside the yardstick's.

    unit: one unit roundoff. sums: what is allowed besides where the yardstick is exact. blur: what is allowed in any
    case, for numbers whose own rounding is amplified.
    """
    whole, row = rival
    return (
        slack * max(FACTOR * whole, unit + sums, blur),
        slack * max(ROW_FACTOR * row, ROW_UNITS * unit, ROW_FACTOR * blur),
    )


def interpreter_slack(dtype: torch.dtype, device_type: str) -> float:
    """How much further a kernel may be off on this device: Triton's interpreter cuts bf16 off."""
    return 2.0 if dtype == torch.bfloat16 and device_type == "cpu" else 1.0


def compare(
    exact: Mapping[str, Tensor],
    plain: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    units: Mapping[str, float],
    slack: float,
    *,
    blur: float = 0.0,
    others: Sequence[Mapping[str, Tensor]] = (),
) -> tuple[dict[str, tuple[float, float]], str]:
    """By result its relative error and the one that is allowed, and what is wrong, "" where nothing is.

    exact: in float64. plain: PyTorch's, in the tensors' dtypes. units: the unit roundoff of each result. blur: as of
    `allowed_errors`. others: PyTorch's with its sums in other orders; of them and `plain` the larger error counts.
    """
    sums = SUM_UNITS * torch.finfo(torch.float32).eps / 2
    errors: dict[str, tuple[float, float]] = {}
    reason = ""
    for result, right in exact.items():
        error, row_error = relative_errors(found[result], right)
        whole, row = zip(*(relative_errors(each[result], right) for each in (plain, *others)), strict=True)
        rival = max(whole), max(row)
        allowed, row_allowed = allowed_errors(rival, units[result], slack=slack, sums=sums, blur=blur)
        errors[result] = error, allowed
        if reason:
            continue
        if not error <= allowed:
            reason = f"{result} is off by {error:.2g}, {allowed:.2g} are allowed"
        elif not row_error <= row_allowed:
            reason = f"the worst row of {result} is off by {row_error:.2g}, {row_allowed:.2g} are allowed"
    return errors, reason


# What a user's function must pass besides: PyTorch's own check of gradients, by differences of outputs.


EXACT_IN_64_BITS = 1e-9
"""The relative error up to which a function computes in float64, and not in fp32 inside."""


def check_gradients(function: Function, exact: Function, inputs: Sequence[Tensor]) -> tuple[bool | None, str]:
    """Whether `torch.autograd.gradcheck` passes in float64, and what is wrong, or why it was not asked: None where the
    function takes no float64, or is off in it.

    exact: the same formula in PyTorch's operators. inputs: small tensors of any dtype.
    """
    wide = [tensor.detach().double().contiguous() for tensor in inputs]
    try:
        found, right = results_of(function(*wide)), results_of(exact(*wide))
        errors = [relative_errors(found[name], right[name])[0] for name in right]
    except Exception as error:  # it need not take float64
        return None, f"takes no float64 ({named_line(error, 120)})"
    if not max(errors) <= EXACT_IN_64_BITS:
        return None, f"is off by {max(errors):.1g} in float64: by fewer bits inside, or by another formula"
    leaves = [tensor.requires_grad_() for tensor in wide]
    try:
        torch.autograd.gradcheck(function, leaves, fast_mode=True, nondet_tol=EXACT_IN_64_BITS)
    except Exception as error:  # a GradcheckError, or whatever its backward raises
        return False, f"gradcheck fails in float64: {named_line(error)}".rstrip(",")
    return True, ""
