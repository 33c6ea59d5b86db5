"""The gate of the parts: an implementation is held against float64 before any of its times is shown.

Results and gradients of a call are set beside the same formula in float64. Their error may be twice what PyTorch's
operators make of that formula in the tensors' dtype, and at least one unit roundoff of that dtype and four of fp32, in
which sums are made. That of the worst row may be four times PyTorch's, and 16 unit roundoffs, since it is the extreme
of many. cuBLAS adds the products of a loss in another order where the weight has other rows, so PyTorch computes a loss
twice: as the formula is written, and with rows of zeros below the weight (`loss_columns`). The larger error counts.

In Triton's interpreter bf16 may be off twice as far: it cuts numbers off where a GPU rounds them. Shapes and dtypes are
checked too, that the inputs are left alone, and that the same call gives the same bits. The call is made again with
every subset of its inputs frozen, as in a model that is trained in part: the others keep their gradients.

Inputs lie in memory that is NaN around them, and memory of the results' sizes is filled with NaN before the call: who
reads beside its input is seen, and who leaves a number unwritten.
"""

import contextlib
import functools
import itertools
import math
import types
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from stepscope.core.attention_call import AttentionShape
from stepscope.core.errors import DeviceError, GateFailure, named_line, one_line
from stepscope.core.parts import CONVENTIONS, PARTS, Kernels, Part, TensorDtype, is_users, loss_columns
from stepscope.core.precisions import PRECISIONS
from stepscope.core.workloads import TextbookWorkload
from stepscope.recording.device import is_out_of_memory
from stepscope.recording.precision import matmul_precision
from stepscope.training.attention.gate import require_users_attention
from stepscope.training.attention.inputs import TORCH_DTYPES
from stepscope.training.judging import WrongKind, attempt, check_gradients, compare, interpreter_slack
from stepscope.training.parts import formulas, part_function
from stepscope.training.parts.formulas import CALL_ERRORS

EPSILON = 1e-5
IGNORED = -100

Function = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class PartCase:
    """A call of a part: sizes in the order of `sizes_of`, and how its tensors lie."""

    part: Part
    sizes: tuple[int, ...]
    strided: bool = False
    """Whether tensors are views of larger ones; of rope, as heads of a projection lie."""
    ignored: bool = True
    """Whether one target of a loss is IGNORED."""
    seed: int = 0
    """Other numbers of the same shapes have another."""

    @property
    def width(self) -> int:
        """The length of a row: d_model of a norm, head_dim of rope, d_ff of mlp, vocabulary of a loss."""
        return self.sizes[SIZES[self.part].index(_WIDTHS[self.part])]

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in zip(SIZES[self.part], self.sizes, strict=True))
        return f"{self.part} {sizes}{', strided' if self.strided else ''}"


SIZES: dict[Part, tuple[str, ...]] = {
    "norm": ("rows", "d_model", "branch"),
    "rope": ("batch", "heads", "kv_heads", "positions", "head_dim"),
    "mlp": ("rows", "d_ff"),
    "loss": ("rows", "d_model", "vocabulary"),
}
"""What the sizes of a case are. The branch of a norm is 1 or 0."""
_WIDTHS: dict[Part, str] = {"norm": "d_model", "rope": "head_dim", "mlp": "d_ff", "loss": "vocabulary"}

SMALL_CASES = (
    PartCase("norm", (5, 33, 0)),
    PartCase("norm", (6, 20, 1), strided=True),
    PartCase("norm", (1, 1, 1)),
    PartCase("rope", (2, 3, 1, 3, 6), strided=True),
    PartCase("rope", (1, 2, 2, 2, 10)),
    PartCase("mlp", (3, 37)),
    PartCase("mlp", (3, 21), strided=True),
    PartCase("loss", (5, 12, 37)),
    PartCase("loss", (4, 7, 3), strided=True),
)
"""Odd sizes and layouts that Triton's interpreter runs in a moment."""

LARGE_CASES = (
    PartCase("norm", (2048, 1280, 1)),
    PartCase("norm", (2051, 2560, 0), strided=True),
    PartCase("norm", (17, 20000, 1)),
    PartCase("rope", (4, 20, 20, 512, 64), strided=True),
    PartCase("rope", (2, 32, 4, 129, 80)),
    PartCase("rope", (1, 5, 1, 77, 6), strided=True),
    PartCase("mlp", (2048, 5120)),
    PartCase("mlp", (333, 10001), strided=True),
    PartCase("loss", (2048, 1280, 10000)),
    PartCase("loss", (1025, 640, 50257)),
    PartCase("loss", (130, 96, 151), strided=True),
)
"""Sizes of real models, and odd ones, for a GPU."""


@dataclass(frozen=True, kw_only=True)
class PartVerdict:
    """What the gate found of an implementation in one call."""

    name: Kernels
    case: PartCase
    dtype: TensorDtype
    passed: bool
    reason: str = ""
    """What is wrong; or why it was not run."""
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By result: its relative error, and the one that is allowed."""
    repeats: bool | None = None
    """Whether a second call gave the same bits; None where it was not run."""
    refused: bool = False
    """Whether a user's function raised an error instead."""


def check_part(
    name: Kernels,
    cases: Sequence[PartCase],
    dtypes: Sequence[TensorDtype],
    device: torch.device,
    function: Function | None = None,
    *,
    backward: bool = True,
    frozen_too: bool = True,
) -> list[PartVerdict]:
    """Run the gate. function: judged in place of the implementation of this name. backward: whether gradients are.
    frozen_too: whether the calls with frozen inputs are made."""
    how = {"backward": backward, "frozen_too": frozen_too}
    return [_judge(name, case, dtype, device, function, **how) for dtype in dtypes for case in cases]


def _judge(
    name: Kernels,
    case: PartCase,
    dtype: TensorDtype,
    device: torch.device,
    function: Function | None,
    *,
    backward: bool,
    frozen_too: bool,
) -> PartVerdict:
    fault = PARTS[case.part][name].fault(device.type, dtype, case.width)
    if function is None and fault is not None:
        return PartVerdict(name=name, case=case, dtype=dtype, passed=False, reason=f"not run: {fault}")
    called = function or part_function(case.part, name) or _WRITTEN_OUT[case.part]
    inputs = _Inputs(case, TORCH_DTYPES[dtype], device)
    none = () if backward else tuple(range(len(inputs.tensors)))
    exact = inputs.run(_WRITTEN_OUT[case.part], torch.float64, frozen=none)
    plain = inputs.run(_WRITTEN_OUT[case.part], frozen=none)
    padded = [inputs.run(_padded_loss, frozen=none)] if case.part == "loss" else []
    # Memory of the results' sizes is filled with NaN and freed, so that the next allocations may get it.
    blocks = [torch.full_like(tensor, math.nan) for tensor in plain.values() for _ in range(2)]
    del blocks
    overwrites = PARTS[case.part][name].overwrites
    done = attempt(lambda: inputs.run(called, copied=overwrites, frozen=none), {}, twice=True)
    runs = (done.results,) if done.again is None else (done.results, done.again)
    verdict = functools.partial(PartVerdict, name=name, case=case, dtype=dtype, passed=False)
    if done.raised is not None:
        if not is_users(name):
            raise done.raised
        of_kind = isinstance(done.raised, WrongKind)
        return verdict(refused=not of_kind, reason=str(done.raised) if of_kind else named_line(done.raised))
    left = all(torch.equal(now, before) for now, before in zip(inputs.given, inputs.before, strict=True))
    reason = _other_kind(runs, plain) if left else "it writes to its inputs"
    if reason:
        return verdict(reason=reason)
    unit = torch.finfo(TORCH_DTYPES[dtype]).eps / 2
    # Nobody says of a user's function which intermediate results it rounds.
    slack = interpreter_slack(TORCH_DTYPES[dtype], device.type) * (2.0 if is_users(name) else 1.0)
    errors: dict[str, tuple[float, float]] = {}
    for when, measured in zip(("", "when it is called again, "), runs, strict=False):
        if not reason:
            errors, why = compare(exact, plain, measured, dict.fromkeys(exact, unit), slack, others=padded)
            reason = f"{when}{why}" if why else ""
    # The inputs to freeze together, by number: each proper subset but the empty one.
    numbers = range(len(inputs.tensors))
    subsets = [each for size in numbers[1:] for each in itertools.combinations(numbers, size)]
    for frozen in subsets if backward and frozen_too and not reason else ():
        of_rest = inputs.run(called, copied=overwrites, frozen=frozen)
        due = {result: right for result, right in exact.items() if result not in {f"gradient {i}" for i in frozen}}
        why = next((f"{result} is missing" for result in due if result not in of_rest), "")
        why = why or compare(due, plain, of_rest, dict.fromkeys(due, unit), slack, others=padded)[1]
        reason = reason or (f"with input {' and '.join(map(str, frozen))} frozen, {why}" if why else "")
    if not done.repeats and PARTS[case.part][name].repeats:
        reason = reason or "a second call gave other bits"
    return verdict(passed=not reason, reason=reason, errors=errors, repeats=done.repeats)


def _other_kind(runs: Iterable[Mapping[str, Tensor]], plain: Mapping[str, Tensor]) -> str:
    """What is missing of the results, or of another shape or dtype than PyTorch's; empty where nothing is."""
    for found, (result, right) in itertools.product(runs, plain.items()):
        if result not in found:
            return f"{result} is missing"
        if (found[result].shape, found[result].dtype) != (right.shape, right.dtype):
            of, wanted = (f"{tuple(each.shape)} in {each.dtype}" for each in (found[result], right))
            return f"{result} is {of}, not {wanted}"
    return ""


class _Inputs:
    """The tensors of a call in memory that is NaN around them, and the gradients of its results."""

    def __init__(self, case: PartCase, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator(device=device).manual_seed(sum(case.sizes) + case.seed)

        def normal(*shape: int, strided: bool = case.strided) -> Tensor:
            """Numbers in memory that is NaN before and behind them; strided: between rows, too."""
            if strided and len(shape) > 1:
                base = torch.full((*shape[:-1], shape[-1] + 5), math.nan, dtype=dtype, device=device)
                view = base[..., 2:-3]
            else:
                base = torch.full((math.prod(shape) + 32,), math.nan, dtype=dtype, device=device)
                view = base[16:-16].view(shape)
            return view.copy_(torch.randn(shape, generator=generator, device=device))

        self._part = case.part
        self.rest: tuple[object, ...] = ()
        if case.part == "norm":
            self.rest = (EPSILON,) if case.sizes[2] else ()
            rows, width, branch = case.sizes
            self.tensors = [normal(rows, width), *([normal(rows, width)] if branch else []), normal(width)]
            gradients = [(rows, width)] * (2 if branch else 1)
        elif case.part == "rope":
            batch, heads, kv_heads, positions, head_dim = case.sizes
            shapes = [(batch, each, positions, head_dim) for each in (heads, kv_heads)]
            if case.strided:
                self.tensors = [normal(b, s, h, d).transpose(1, 2) for b, h, s, d in shapes]
            else:
                self.tensors = [normal(*shape) for shape in shapes]
            angles = torch.rand(positions + 2, head_dim // 2, generator=generator, device=device).repeat(1, 2) * 6
            self.rest = angles.cos(), angles.sin()
            gradients = shapes
        elif case.part == "mlp":
            self.tensors = [normal(*case.sizes), normal(*case.sizes)]
            gradients = [case.sizes]
        else:
            rows, width, vocabulary = case.sizes
            self.tensors = [normal(rows, width), normal(vocabulary, width, strided=False)]
            targets = torch.randint(vocabulary, (rows,), generator=generator, device=device)
            if case.ignored:
                targets[rows // 2] = IGNORED
            self.rest = (targets,)
            gradients = [()]
        self.gradients = [torch.randn(shape, generator=generator, device=device) for shape in gradients]
        self.given = [*self.tensors, *(each for each in self.rest if isinstance(each, Tensor))]
        self.before = [tensor.clone() for tensor in self.given]

    def bound(self, function: Function) -> Function:
        """The function of the call's tensors alone, in float64."""
        rest = [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in self.rest]

        def call(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
            if self._part == "norm" and len(tensors) == 2:
                return function(tensors[0], None, tensors[1], EPSILON)[1]
            return function(*tensors, *rest)

        return call

    def run(
        self, function: Function, dtype: torch.dtype | None = None, *, copied: bool = False, frozen: Sequence[int] = ()
    ) -> dict[str, Tensor]:
        """Results and gradients by name; with a dtype, of the same numbers in it; copied: of copies, which the call may
        write to; frozen: of these inputs there are no gradients, nor of one that the call forgets."""
        leaves = [t.to(dtype or t.dtype, copy=copied).detach() for t in self.tensors]
        trained = {f"gradient {i}": leaf.requires_grad_() for i, leaf in enumerate(leaves) if i not in frozen}
        rest = [t.to(dtype) if dtype and isinstance(t, Tensor) and t.is_floating_point() else t for t in self.rest]
        if self._part == "norm" and len(leaves) == 2:
            outputs = (function(leaves[0], None, leaves[1], EPSILON)[1],)
        else:
            out = function(*leaves, *rest)
            outputs = out if isinstance(out, tuple) else (out,)
        for i, (out, g) in enumerate(zip(outputs, self.gradients, strict=True)):
            if out.shape != g.shape:
                raise WrongKind(f"result {i} is {tuple(out.shape)}, not {tuple(g.shape)}")
        upstream = [(out, g.to(out.dtype)) for out, g in zip(outputs, self.gradients, strict=True) if out.requires_grad]
        outs, of_outs = zip(*upstream, strict=True) if upstream else ((), ())
        gradients = torch.autograd.grad(outs, [*trained.values()], of_outs, allow_unused=True) if outs else ()
        gradients_by_name = {name: each for name, each in zip(trained, gradients, strict=False) if each is not None}
        return {f"result {i}": out.detach() for i, out in enumerate(outputs)} | gradients_by_name


_WRITTEN_OUT: dict[Part, Function] = {
    "norm": formulas.rms_norm,
    "rope": formulas.rotated,
    "mlp": formulas.silu_product,
    "loss": formulas.linear_cross_entropy,
}
"""Each part in PyTorch's operators: the judge in float64, and the measure of what a dtype can."""


def _padded_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """`formulas.linear_cross_entropy` with rows of zeros below the weight, up to `loss_columns`, and their logits cut
    off: the same numbers, of which cuBLAS adds products in another order."""
    vocabulary = len(weight)
    logits = F.linear(x, F.pad(weight, (0, 0, 0, loss_columns(vocabulary) - vocabulary)))[..., :vocabulary]
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)


# A user's functions, before a step runs them.


def require_users(workload: TextbookWorkload, device: torch.device) -> list[str]:
    """What was seen of a user's functions that a step runs, a sentence each. Raises GateFailure for one that is wrong,
    and InputError for one that cannot be called."""
    config, precision = workload.model, PRECISIONS[workload.dtype]
    tensors, backward, faults = precision.tensors, workload.phase != "forward", list[str]()
    with matmul_precision("fp32"), _memory_errors():
        if is_users(workload.attention):
            step = AttentionShape(
                batch=workload.batch_size, heads=config.heads, key_heads=config.key_heads, queries=workload.seq_len,
                keys=workload.seq_len, head_dim=config.head_dim, causal=True,
            )  # fmt: skip
            faults.append(require_users_attention(workload.attention, tensors, device, step, backward=backward))
        rows = min(workload.tokens, _MOST_ROWS.get(device.type, 64))
        length = min(workload.seq_len, rows)
        sizes: dict[Part, tuple[int, ...]] = {
            "norm": (rows, config.d_model, 1),
            "rope": (min(workload.batch_size, 2), config.heads, config.key_heads, length, config.head_dim),
            "mlp": (rows, config.d_ff),
            "loss": (rows, config.d_model, config.vocabulary),
        }
        for part, name in workload.parts.items():
            if is_users(name):
                # A norm takes the residual stream, whose dtype autocast does not change.
                dtype = "fp32" if part == "norm" and precision.residual == 4 else tensors
                case = PartCase(part, sizes[part], strided=part == "rope", ignored=False)
                faults.append(require_users_part(name, case, dtype, device, backward=backward))
    return faults


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    """While open, memory that runs out is a DeviceError of one line."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceError(f"memory ran out when a function was held against float64: {one_line(error)}") from error


_MOST_ROWS = {"cuda": 2048, "cpu": 64}


@functools.cache
def require_users_part(
    name: Kernels, step: PartCase, dtype: TensorDtype, device: torch.device, *, backward: bool = True
) -> str:
    """What was seen of a user's function, in a sentence; raises GateFailure where it is wrong, or does not take the
    sizes of its step."""
    part = step.part
    called = part_function(part, name)  # a file that is not there, or a function of something else, is no wrong result
    # That of the step again, by other numbers: who keeps results by the shapes of a call is seen.
    beside = [replace(case, ignored=step.ignored) for case in SMALL_CASES if case.part == part]
    beside.append(replace(step, seed=1))
    verdicts = check_part(name, (step,), (dtype,), device, backward=backward, frozen_too=False)
    with torch.compiler.set_stance("force_eager"):  # what is compiled is so for its step alone, which takes long enough
        verdicts += check_part(name, beside, (dtype,), device, backward=backward)
    wrong = next((each for each in verdicts if not each.passed and not (each.refused and each.case in beside)), None)
    if wrong is not None:
        raise GateFailure(
            f"{part} {name} is wrong, so that no time of it is shown: ({wrong.case}) in {dtype}: {wrong.reason}; it is "
            f"called as {CONVENTIONS[part]}"
        )
    passed = sum(each.passed for each in verdicts)
    words = [f"{part} {name} is right in {passed} of {len(verdicts)} calls beside float64"]
    words += [f"it refuses {each.case} ({each.reason})" for each in verdicts if each.refused]
    if any(each.repeats is False for each in verdicts):
        words.append("the same call gives other bits")
    if not backward:
        return "; ".join(words)
    inputs = _Inputs(replace(beside[0], ignored=step.ignored), torch.float64, device)
    run, exact = (inputs.bound(each) for each in (called, _WRITTEN_OUT[part]))
    with torch.compiler.set_stance("force_eager"):
        passes, why = check_gradients(run, exact, inputs.tensors)
    if passes is False:
        raise GateFailure(f"{part} {name} is wrong: {why}, of {beside[0]}")
    words.append("gradcheck passes in float64" if passes else f"gradcheck is left out, since it {why}")
    return "; ".join(words)


# Holds a module against its replacement, forward and backward, on random numbers, by the bounds of the gate.


SEED = 20


Frozen = Literal["input", "weights"] | None
"""What of a call takes no gradients, as in a model that is trained in part."""


class Unlike(Exception):
    """A replacement that computes something else, with the largest difference, where there is a number."""

    def __init__(self, why: str, error: float = float("inf")) -> None:
        super().__init__(why)
        self.why, self.error = why, error


@dataclass(frozen=True, kw_only=True)
class Trial(ABC):
    """One call of a module."""

    module: nn.Module
    x: Tensor
    """The input."""
    of_input: str = "gradient of input"
    """The name of the input's gradient."""
    autocast: bool
    blur: float = 0.0
    """The relative error that is allowed in any case, to numbers whose own rounding is amplified."""

    @abstractmethod
    def run(self, dtype: torch.dtype | None = None, frozen: Frozen = None) -> dict[str, Tensor]:
        """The result and the gradients by name, those of a frozen tensor and those that the module forgets left out.
        With a dtype, of the same numbers in it, without autocast. Raises Unlike where the module cannot be called
        so."""


class _Halving(nn.Module):
    """What stands for a dropout while its module is held: it shows where it is, and draws nothing. It is not linear,
    since a dropout before a linear layer without a bias is not one behind it."""

    def forward(self, input: Tensor) -> Tensor:
        return input * 0.5 + 0.25


def hold(
    module: nn.Module, replacement: type[nn.Module], trials: Iterable[Trial], dropouts: Sequence[str] = ()
) -> None:
    """Raise Unlike where the replacement computes something else than the module. Random states stay as they were.
    dropouts: names of modules that both call, of which some may be a dropout."""
    original, modes = type(module), {each: each.training for each in module.modules()}
    drawing = {name: each for name in dropouts if type(each := getattr(module, name)) is nn.Dropout}
    device = next(module.parameters()).device
    devices = [device] if device.type == "cuda" else []
    # What is compiled is held by its formula: to compile it for the shapes of a trial would take minutes.
    uncompiled = torch.compiler.set_stance("force_eager")
    with uncompiled, torch.random.fork_rng(devices), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a module says of a trial's dtypes is no fault of the user's step
        module.train()  # where a dropout would show
        try:
            for name in drawing:
                setattr(module, name, _Halving())
            for trial in trials:
                exact, plain, again = trial.run(torch.float64), trial.run(), trial.run()
                # With dropout any difference from float64 would pass for its rounding.
                if not all(torch.allclose(again[result], each, rtol=0.05, atol=0.05) for result, each in plain.items()):
                    raise Unlike("their forward gives other numbers when it is called again")
                module.__class__ = replacement
                measured: dict[Frozen, dict[str, Tensor]] = {
                    frozen: trial.run(frozen=frozen) for frozen in (None, "input", "weights")
                }
                module.__class__ = original
                for frozen, numbers in measured.items():
                    _judge_module(exact, plain, numbers, trial, frozen)
        finally:
            module.__class__ = original
            for name, each in drawing.items():
                setattr(module, name, each)
            for each, trains in modes.items():
                each.training = trains


def _judge_module(
    exact: Mapping[str, Tensor], plain: Mapping[str, Tensor], ours: Mapping[str, Tensor], trial: Trial, frozen: Frozen
) -> None:
    """Raise Unlike where results, or the gradients that are due with this frozen, are missing or too far off."""
    gradients = {result for result in plain if result.startswith("gradient")}
    spared = {None: set[str](), "input": {trial.of_input}, "weights": gradients - {trial.of_input}}[frozen]
    where = f"where their {frozen} {'is' if frozen == 'input' else 'are'} frozen, " if frozen else ""
    due = {result: right for result, right in plain.items() if result not in spared}
    for result, right in due.items():
        if result not in ours:
            raise Unlike(f"{where}{result} is missing")
        if ours[result].dtype != right.dtype:
            raise Unlike(f"{where}{result} is {ours[result].dtype}, not {right.dtype}")
    more = next((result for result in ours if result not in plain), None)
    if more is not None:  # as where their forward detaches its input
        raise Unlike(f"{where}{more} is there, and their own code gives none")
    units = {result: torch.finfo(right.dtype).eps / 2 for result, right in due.items()}
    slack = interpreter_slack(torch.bfloat16 if trial.autocast else trial.x.dtype, trial.x.device.type)
    errors, reason = compare({result: exact[result] for result in due}, due, ours, units, slack, blur=trial.blur)
    if reason:
        largest = max(error for error, _ in errors.values())
        raise Unlike(f"they compute something else: {where}{reason}; the largest difference is {largest:.2g}", largest)


def gradients_of(out: Tensor, leaves: Mapping[str, Tensor], upstream: Tensor | None = None) -> dict[str, Tensor]:
    """The gradients of a result by name, without those of frozen leaves and those that it does not depend on."""
    trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    if not out.requires_grad or not trained:
        return {}
    gradients = torch.autograd.grad(out, [*trained.values()], upstream, allow_unused=True)
    return {name: each for name, each in zip(trained, gradients, strict=True) if each is not None}


def autocast_or_not(wanted: bool, device: torch.device) -> AbstractContextManager[object]:
    """Autocast to bf16 on the device, where it is asked for."""
    return torch.autocast(device.type, torch.bfloat16) if wanted else nullcontext()


def ways_of(dtype: torch.dtype) -> tuple[tuple[torch.dtype, bool], ...]:
    """The dtypes of inputs, and whether autocast is on, with which weights of this dtype are tried."""
    return ((dtype, False), (dtype, True), (torch.bfloat16, True)) if dtype == torch.float32 else ((dtype, False),)


@dataclass(frozen=True, kw_only=True)
class _OneTensor(Trial):
    """A call of a module with one tensor and random weights, and the gradient of its result."""

    weights: Mapping[str, Tensor]
    gradient: Tensor

    def run(self, dtype: torch.dtype | None = None, frozen: Frozen = None) -> dict[str, Tensor]:
        leaves = {
            name: tensor.to(dtype or tensor.dtype).detach().requires_grad_(frozen != kind)
            for kind, tensors in (("input", {"input": self.x}), ("weights", self.weights))
            for name, tensor in tensors.items()
        }
        x = leaves["input"]
        weights = {name: tensor for name, tensor in leaves.items() if name != "input"}
        try:
            with autocast_or_not(self.autocast and dtype is None, x.device):
                out = functional_call(self.module, weights, (x,))
            if not isinstance(out, Tensor) or out.shape != self.gradient.shape:
                raise Unlike("their forward does not give one tensor of the shape that is due")
            gradients = gradients_of(out, leaves, self.gradient.to(out.dtype))
        except CALL_ERRORS as error:
            raise Unlike(f"they cannot be called with one tensor: {named_line(error)}") from error
        return {"result": out.detach()} | {f"gradient of {name}": each for name, each in gradients.items()}


_LARGE = 30.0
"""How large numbers are of which a limit shows."""


def trials_of_one_tensor(
    module: nn.Module, epsilon: float, widths: tuple[int, int], *, limited: bool = False
) -> Iterator[Trial]:
    """Calls of a module with one tensor: odd shapes and layouts in its dtype, and under autocast where its weights are
    fp32. Some rows are so small that another epsilon would show. widths: those of its input and of its result.
    limited: whether some are so large that a limit would show, as on gate and up."""
    first = next(module.parameters())
    generator = torch.Generator(device=first.device).manual_seed(SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=first.device)

    weights: dict[str, Tensor] = {}
    for name, value in module.named_parameters():
        moved = (
            value.detach() + 0.1 * normal(*value.shape)
            if value.dim() < 2
            else (normal(*value.shape) / value.shape[-1] ** 0.5)
        )
        weights[name] = moved.to(value.dtype)
    width, out_width = widths
    for dtype, autocast in ways_of(first.dtype):
        for rows in ((2, 3), (5,)):
            x = normal(*rows, width + 3)[..., 2:-1] if len(rows) == 1 else normal(*rows, width)
            x[-1] *= epsilon**0.5 or 1.0
            x *= _LARGE if limited and len(rows) == 1 else 1.0
            gradient = normal(*rows, out_width)
            yield _OneTensor(module=module, weights=weights, x=x.to(dtype), gradient=gradient, autocast=autocast)


@dataclass(frozen=True, kw_only=True)
class _OfTables(Trial):
    """A call of the function by which an attention turns queries and keys, with tables of random numbers."""

    own: Function
    """The module's own function; a replacement has another (`TURNS`)."""
    k: Tensor
    tables: tuple[Tensor, Tensor]
    options: Mapping[str, int]
    gradients: tuple[Tensor, Tensor]

    def run(self, dtype: torch.dtype | None = None, frozen: Frozen = None) -> dict[str, Tensor]:
        q, k, cos, sin = (each.to(dtype or each.dtype).detach() for each in (self.x, self.k, *self.tables))
        leaves = {self.of_input: q.requires_grad_(frozen != "input"), "gradient of keys": k}
        k.requires_grad_(frozen != "weights")
        function = getattr(type(self.module), TURNS, self.own)
        try:
            results: object = function(q, k, cos, sin, **self.options)
        except CALL_ERRORS as error:
            raise Unlike(f"they cannot be called with q, k, cos and sin: {named_line(error)}") from error
        shapes = [each.shape for each in results] if isinstance(results, tuple) else []
        if not isinstance(results, tuple) or shapes != [q.shape, k.shape]:
            raise Unlike("they do not give queries and keys of the shapes that they get")
        named = dict(zip(("turned queries", "turned keys"), results, strict=True))
        due = [
            (out, each.to(out.dtype)) for out, each in zip(results, self.gradients, strict=True) if out.requires_grad
        ]
        trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        if not due:
            return {name: out.detach() for name, out in named.items()}
        outs, upstream = zip(*due, strict=True)
        gradients = torch.autograd.grad(outs, [*trained.values()], upstream, allow_unused=True)
        found = {name: each for name, each in zip(trained, gradients, strict=True) if each is not None}
        return {name: out.detach() for name, out in named.items()} | found


TURNS = "_stepscope_turns"
"""Where a replacement's class has the function that turns its queries and keys."""


def trials_of_tables(module: nn.Module, function: Function, *, unsqueezes: bool, partial: bool) -> Iterator[Trial]:
    """Calls of a function of q, k, cos and sin: with tables of each sequence and of all, in the dtypes that meet in a
    model of this one. unsqueezes: whether it is told where heads are (unsqueeze_dim). partial: also with tables of a
    part of the width."""
    first = next(each for each in module.parameters() if each.is_floating_point())
    generator = torch.Generator(device=first.device).manual_seed(SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=first.device)

    wide, narrow = torch.promote_types(first.dtype, torch.float32), torch.bfloat16
    dtypes = [(first.dtype, first.dtype), (first.dtype, wide)]
    dtypes += [(narrow, wide), (narrow, narrow)] if first.dtype == torch.float32 else []  # under autocast
    every = ((2, 8), (1, 8), *([(2, 6)] if partial else []))
    for of_heads, of_tables in dict.fromkeys(dtypes):
        for samples, rotary in every if (of_heads, of_tables) == dtypes[0] else every[:1]:
            rows = normal(2, 2, 4, 8).to(of_heads)  # (B, S, heads, D): three heads of queries, one of keys
            heads_first = samples == 2 or not unsqueezes
            rows = rows.transpose(1, 2) if heads_first else rows
            q, k = rows.split([3, 1], dim=1 if heads_first else 2)
            cos, sin = (normal(samples, 2, rotary).to(of_tables) for _ in range(2))
            if not unsqueezes:
                cos, sin = (each[:, None] if samples > 1 else each[0] for each in (cos, sin))
            yield _OfTables(
                module=module, x=q, of_input="gradient of queries", autocast=False, own=function, k=k,
                tables=(cos, sin), options={} if heads_first else {"unsqueeze_dim": 2},
                gradients=(normal(*q.shape), normal(*k.shape)),
            )  # fmt: skip


# What tells that two modules compute the same.


_HOMES = ("_parameters", "_buffers", "_modules")
"""Where a module keeps its tensors and the modules in it."""
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


class _Itself(int):
    """The identity of an object that nothing tells of; another may have it once that is gone."""


def kind_of(value: object) -> Hashable:
    """What tells whether two modules compute the same of the same weights: classes, attributes, and shapes, all the way
    down. Blocks of a model are alike, and their trials would be of equal numbers: one of a kind is held against its
    replacement for all. An object that nothing tells of is like itself alone."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device, *_FUNCTIONS)):
        return type(value), value
    if isinstance(value, tuple):
        return tuple(map(kind_of, value))
    if isinstance(value, nn.Parameter):
        return type(value), tuple(value.shape), value.dtype, value.device, value.requires_grad
    if isinstance(value, nn.Module):
        inside = ((name, each) for home in _HOMES for name, each in vars(value)[home].items())
        itself = ((name, each) for name, each in vars(value).items() if name not in _HOMES)
        bases = (base for base in type(value).__mro__ if base not in (nn.Module, object))
        code = tuple(each for base in bases for each in vars(base).values() if isinstance(each, _FUNCTIONS))
        return type(value), code, tuple((name, kind_of(each)) for name, each in (*inside, *itself))
    if isinstance(value, (dict, list, set)) and not value:  # as the hooks of most modules
        return type(value)
    return _Itself(id(value))


def lasts(kind: Hashable) -> bool:
    """Whether a kind tells the same of modules that are made later."""
    return not isinstance(kind, _Itself) and (not isinstance(kind, tuple) or all(map(lasts, kind)))
