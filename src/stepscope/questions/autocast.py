"""What dtype everything has under autocast: parameters, each module's input and output, the loss, the gradients.

What stands in the tables was seen, in a step of the model and in runs of single operators. Without a GPU CUDA's rules
are seen operator by operator, on tensors without data; a whole step by them is imitated (`recording/fake_memory.py`),
and the imitation held against what was seen.
"""

import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.core.answer import Answer, Cell, Finding, Table, as_lines, note, warning
from stepscope.core.errors import InputError, choose, one_line
from stepscope.core.float_formats import FORMATS
from stepscope.core.model_config import PRESETS, choose_model, configure
from stepscope.core.workloads import TextbookWorkload
from stepscope.questions.answers import check_room, computed_answer, table_by
from stepscope.questions.replays import hooked
from stepscope.recording.as_on_cuda import AsOnCuda
from stepscope.recording.environment import resolve_device
from stepscope.recording.fake_memory import without_tracebacks
from stepscope.training.training_step import build_model
from stepscope.training.user_module.loading import load_module
from stepscope.training.user_module.module_step import UserModule, check_gradient
from stepscope.training.user_module.user_code import user_errors

# What autocast does with each operator: observed, by running it and reading the dtype that comes out.
#
# Each operator runs on fp32 inputs, on 16-bit ones, and, where it takes several, on both kinds at once. Of the three
# dtypes follows what autocast does with it; no list of PyTorch's is read.
#
# The rules of CUDA can be observed without a GPU: autocast decides by the device that a tensor says it is on, before
# any kernel runs, and tensors without data (`FakeTensorMode`) say that they are on one.


Treatment = Literal["sent down", "kept up", "promotes", "as its inputs", "refuses"]
"""sent down: 16 bits come out of fp32. kept up: fp32 comes out of 16 bits. promotes: of inputs of two dtypes autocast
casts those of 16 bits to fp32. as its inputs: autocast leaves it alone (mixed inputs are promoted by PyTorch itself, or
refused). refuses: runs without autocast, and raises under it."""

TREATMENTS: tuple[Treatment, ...] = ("sent down", "kept up", "promotes", "as its inputs", "refuses")

LOW: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}

REFUSED = "refused"

_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

Shape = tuple[int, ...]


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype: `bf16`, `int64`."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Operator:
    """An operator, and the shapes of inputs on which it costs nothing."""

    name: str
    run: Callable[..., Tensor]
    shapes: tuple[Shape, ...] = ((8, 8),)


_ONE: tuple[Shape, ...] = ((8, 8),)
_TWO, _THREE = 2 * _ONE, 3 * _ONE
_IMAGE: Shape = (1, 4, 8, 8)
_FILTER: Shape = (4, 4, 3, 3)
_HEADS: Shape = (1, 2, 8, 8)
_VECTOR: Shape = (8,)


def _of(shapes: tuple[Shape, ...], *functions: Callable[..., Tensor]) -> list[Operator]:
    """Operators that take inputs of the same shapes, under their own names."""
    return [Operator(function.__name__, function, shapes) for function in functions]


OPERATORS: tuple[Operator, ...] = (
    *_of(_TWO, F.linear, torch.matmul, torch.mm),
    *_of(((2, 8, 8), (2, 8, 8)), torch.bmm),
    *_of(_THREE, torch.addmm),
    *_of(((2, 8, 8), (2, 8, 8), (2, 8, 8)), torch.baddbmm),
    *_of(((8, 8), _VECTOR), torch.mv),
    Operator("einsum", lambda x, y: torch.einsum("ij,jk->ik", x, y), _TWO),
    *_of(((1, 4, 8), (4, 4, 3)), F.conv1d),
    *_of((_IMAGE, _FILTER), F.conv2d, F.conv_transpose2d),
    *_of((_HEADS, _HEADS, _HEADS), F.scaled_dot_product_attention),
    *_of(((8, 8), (1,)), F.prelu),
    Operator("layer_norm", lambda x: F.layer_norm(x, (8,))),
    Operator("rms_norm", lambda x: F.rms_norm(x, (8,))),
    Operator("group_norm", lambda x: F.group_norm(x, 2), (_IMAGE,)),
    Operator("batch_norm", lambda x: F.batch_norm(x, None, None, training=True), (_IMAGE,)),
    Operator("softmax", lambda x: torch.softmax(x, -1)),
    Operator("log_softmax", lambda x: torch.log_softmax(x, -1)),
    Operator("logsumexp", lambda x: torch.logsumexp(x, -1)),
    Operator("cross_entropy", lambda x: F.cross_entropy(x, x.argmax(-1))),
    Operator("nll_loss", lambda x: F.nll_loss(x, x.argmax(-1))),
    *_of(_TWO, F.mse_loss, F.l1_loss),
    Operator("kl_div", lambda x, y: F.kl_div(x, y, reduction="batchmean"), _TWO),
    *_of(_TWO, F.binary_cross_entropy_with_logits, F.binary_cross_entropy),
    *_of(_ONE, torch.exp, torch.log),
    Operator("pow", lambda x: torch.pow(x, 2)),
    *_of(_ONE, torch.rsqrt, torch.reciprocal, torch.sqrt, F.softplus, torch.relu, F.gelu, F.silu, torch.sigmoid),
    *_of(_ONE, torch.tanh, torch.sum, torch.mean, torch.var, torch.amax, torch.prod),
    Operator("cumsum", lambda x: torch.cumsum(x, -1)),
    Operator("vector_norm", torch.linalg.vector_norm),
    *_of(_TWO, torch.add, torch.mul),
    Operator("cat", lambda x, y: torch.cat([x, y]), _TWO),
    Operator("stack", lambda x, y: torch.stack([x, y]), _TWO),
    *_of(_THREE, torch.addcmul),
    *_of(_TWO, torch.atan2),
    Operator("cross", lambda x, y: torch.cross(x, y, dim=-1), ((8, 3), (8, 3))),
    *_of((_VECTOR, _VECTOR), torch.dot),
    Operator("tensordot", lambda x, y: torch.tensordot(x, y, dims=1), _TWO),
    Operator("scatter_add", lambda x, y: torch.scatter_add(x, 0, y.long(), y), _TWO),
    Operator("index_put", lambda x, y: torch.index_put(x, (x.argmax(-1),), y), _TWO),
    *_of(((8, 8), (8, 8), (4, 8, 8)), F.bilinear),
    Operator("grid_sample", lambda x, y: F.grid_sample(x, y, align_corners=False), (_IMAGE, (1, 4, 4, 2))),
)


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The dtypes that an operator gives: of fp32 inputs, of 16-bit ones, of both at once, and of both without autocast.

    None where there is nothing to run (one input), or nothing that runs on this device; `refused` where it raised.
    """

    of_fp32: str | None = None
    of_low: str | None = None
    of_both: str | None = None
    of_both_without: str | None = None
    casts_of_both: int = 0
    """Casts that autocast adds where both kinds come in."""

    @property
    def treatment(self) -> Treatment | None:
        """What autocast does with the operator; None where it could not be observed."""
        if self.of_fp32 is None or self.of_low is None:
            return None
        if self.of_fp32 == self.of_low == REFUSED:
            return "refuses"
        if self.of_fp32 in LOW:
            return "sent down"
        if self.of_low == "fp32":
            return "kept up"
        if self.of_both == "fp32" and self.casts_of_both > 0:
            return "promotes"
        return "as its inputs"


class Casts(TorchDispatchMode):
    """A counter of the casts between floating dtypes that run inside: those of the named tensors, and all others.

    The mode stands below autocast, so that it sees autocast's casts as operators.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]] = ()) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in named}
        self.of_named: Counter[str] = Counter()
        self.others = 0
        self.bytes_of_named = 0
        """Bytes of all copies that casts made of the named tensors."""

    @property
    def count(self) -> int:
        return self.of_named.total() + self.others

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten._to_copy.default:
            return result
        before, after = args[0].dtype, result.dtype
        if before != after and before.is_floating_point and after.is_floating_point:
            name = self._names.get(id(args[0]))
            if name is None:
                self.others += 1
            else:
                self.of_named[name] += 1
                self.bytes_of_named += result.nbytes
        return result


@contextlib.contextmanager
def autocast_region(device_type: str, dtype: torch.dtype, *, cache: bool = True) -> Iterator[None]:
    """While open, autocast is on. Raises InputError where this build or device has none of this dtype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            region = torch.autocast(device_type, dtype=dtype, cache_enabled=cache)
        except RuntimeError as error:
            raise InputError(f"no {dtype_name(dtype)} autocast on {device_type}: {one_line(error)}") from error
    with region:
        if not torch.is_autocast_enabled(device_type):
            raise InputError(
                f"autocast of PyTorch {torch.__version__} takes no {dtype_name(dtype)} on {device_type}: "
                f"choose --dtype {'bf16' if dtype == torch.float16 else 'fp16'}"
            )
        yield


def observe_operators(device: torch.device, low: torch.dtype) -> dict[str, Observed]:
    """What autocast does with each of OPERATORS on this device."""
    generator = torch.Generator().manual_seed(0)

    def random_tensor(shape: Shape, dtype: torch.dtype) -> Tensor:
        # Between 1/4 and 3/4: every operator is defined there, a probability's logarithm too.
        return (torch.rand(shape, generator=generator) / 2 + 0.25).to(device, dtype)

    return {op.name: _observe(op, random_tensor, lambda: autocast_region(device.type, low), low) for op in OPERATORS}


def observe_cuda_rules(low: torch.dtype) -> dict[str, Observed]:
    """What autocast does with each of OPERATORS on CUDA, seen without a GPU on tensors that hold no data."""
    mode = FakeTensorMode()
    gpu = torch.device("cuda", 0)

    def fake_tensor(shape: Shape, dtype: torch.dtype) -> Tensor:
        return FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), gpu)

    with without_tracebacks(), mode:  # some operators cannot be told
        return {op.name: _observe(op, fake_tensor, lambda: _cuda_region(low), low) for op in OPERATORS}


@contextlib.contextmanager
def _cuda_region(dtype: torch.dtype) -> Iterator[None]:
    """While open, autocast is on for CUDA, as in `torch.autocast("cuda")` on a machine that has a GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def _observe(
    op: Operator,
    make: Callable[[Shape, torch.dtype], Tensor],
    region: Callable[[], contextlib.AbstractContextManager[Any]],
    low: torch.dtype,
) -> Observed:
    fp32 = [make(shape, torch.float32) for shape in op.shapes]
    if _result(op, fp32) == REFUSED:
        return Observed()
    lows = [make(shape, low) for shape in op.shapes]
    both = [fp32[0], *lows[1:]]
    several = len(both) > 1
    with Casts() as casts_without:
        without = _result(op, both) if several else None
    with region(), Casts() as casts:
        of_both = _result(op, both) if several else None
    with region():
        return Observed(
            of_fp32=_result(op, fp32),
            of_low=_result(op, lows),
            of_both=of_both,
            of_both_without=without,
            casts_of_both=casts.count - casts_without.count,
        )


@torch.no_grad()
def _result(op: Operator, inputs: list[Tensor]) -> str:
    try:
        return dtype_name(op.run(*inputs).dtype)
    except (RuntimeError, NotImplementedError, ValueError, TypeError):  # how operators say no, on fake tensors too
        return REFUSED


# The model that an experiment looks at, with a batch and a loss: the toy network, a transformer, or a user's own.
#
# `training/user_module/` says how a user's own is named, and what its factory returns.
#
# Shape legend: B batch, S positions, V vocabulary, I features in, O features out.


TOY = "toy"
TOY_BATCH, TOY_IN, TOY_HIDDEN, TOY_OUT = 8, 20, 10, 5
SEQUENCES, TOKENS = 2, 8
"""The size of a transformer's batch. Dtypes do not depend on it."""

_STEP_BYTES = 4 + 4 + 2
"""Bytes per parameter that forward and backward hold at least: the parameter, its gradient and a 16-bit copy."""


@dataclass(frozen=True, kw_only=True)
class ModelWithLoss:
    """A module on its device, with inputs and a loss."""

    name: str
    user_module: UserModule
    """The module with its loss. Of its batches the first is looked at."""

    @property
    def module(self) -> nn.Module:
        return self.user_module.module

    def forward(self) -> tuple[Any, Tensor]:
        """The module's output, and the loss. Raises InputError where either fails, or the loss is none."""
        batch = self.user_module.batches[0]
        args, kwargs = self.user_module.call.arguments(batch)
        with user_errors(f"{self.name} fails in forward"):
            output = self.module(*args, **kwargs)
        with user_errors(f"the loss of {self.name} fails"):
            loss = self.user_module.loss_of(output, batch)
        check_gradient(loss, self.name)
        return output, loss

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients anew. Raises InputError where backward fails."""
        self.module.zero_grad(set_to_none=True)
        with user_errors(f"{self.name} fails in backward"):
            loss.backward()


class ToyModel(nn.Module):
    """fc2(ln(relu(fc1(x)))): the smallest network with a product, a ReLU, a normalisation and a product.

    It takes (B, I) and gives logits (B, O).
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(TOY_IN, TOY_HIDDEN, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(TOY_HIDDEN)
        self.fc2 = nn.Linear(TOY_HIDDEN, TOY_OUT, bias=False)

    def forward(self, x_BI: Tensor) -> Tensor:
        return self.fc2(self.ln(self.relu(self.fc1(x_BI))))


def model_with_loss(
    model: str, factory: str | None, device: torch.device, arguments: Mapping[str, Any] | None = None
) -> ModelWithLoss:
    """The toy network or a preset by name; or, where `factory` names one, the user's."""
    torch.manual_seed(0)
    if factory is not None:
        return ModelWithLoss(name=factory, user_module=load_module(factory, arguments, seed=0).on(device))
    if choose_model(model, (TOY, *PRESETS)) == TOY:
        targets_B = torch.randint(TOY_OUT, (TOY_BATCH,)).to(device)

        def cross_entropy(logits_BO: Tensor) -> Tensor:
            return F.cross_entropy(logits_BO, targets_B)

        toy, batch = ToyModel().to(device), torch.randn(TOY_BATCH, TOY_IN).to(device)
        toy_module = UserModule(name=TOY, module=toy, batches=[batch], loss=cross_entropy)
        return ModelWithLoss(name=TOY, user_module=toy_module)
    workload = TextbookWorkload(model=configure(model), batch_size=SEQUENCES, seq_len=TOKENS)
    check_room(workload, device, bytes_per_parameter=_STEP_BYTES)
    tokens_BS, targets_BS = torch.randint(workload.model.vocabulary, (2, SEQUENCES, TOKENS)).to(device)

    def cross_entropy_of_tokens(logits_BSV: Tensor) -> Tensor:
        # Without the cast that the training step's loss has: here autocast chooses the dtype.
        return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())

    module = build_model(workload, device)
    user_module = UserModule(name=model, module=module, batches=[tokens_BS], loss=cross_entropy_of_tokens)
    return ModelWithLoss(name=model, user_module=user_module)


# One forward, loss and backward under autocast, as hooks saw it, and how often parameters were cast.
#
# Hooks on modules note what goes in and comes out, hooks on their outputs what gradient comes back. Below autocast its
# casts are operators like any other, and are counted there.


@dataclass
class Seen:
    """What hooks saw of one module: its calls, and dtypes in the order in which they first came."""

    calls: int = 0
    inputs: dict[str, None] = field(default_factory=dict)
    outputs: dict[str, None] = field(default_factory=dict)
    gradients: dict[str, None] = field(default_factory=dict)
    """Dtypes of the gradients of the module's outputs."""


@dataclass(frozen=True, kw_only=True)
class AutocastRecord:
    """The dtypes and casts of one forward, loss and backward under autocast."""

    modules: Mapping[int, Seen]
    """What hooks saw, by id of the module."""
    inside: Mapping[str, str]
    """The dtype of each parameter while autocast was on."""
    gradients: Mapping[str, str | None]
    output: tuple[str, ...]
    loss: str
    loss_value: float
    casts: Casts
    state: tuple[str, ...]
    """Dtypes of AdamW's moments, after a step by these gradients; its updates have the parameters' own dtype."""


def record(model: ModelWithLoss, device: torch.device, low: torch.dtype) -> AutocastRecord:
    """Run forward, loss and backward once with hooks on every module."""
    module = model.module
    by_module = {id(part): Seen() for part in module.modules()}

    def enter(_path: str, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        by_module[id(part)].inputs |= {dtype_name(tensor.dtype): None for tensor in _tensors((args, kwargs))}

    def leave(_path: str, part: nn.Module, _: object, output: Any) -> None:
        of = by_module[id(part)]
        # Not of what a checkpoint runs again in backward, which stops before the last module has ended.
        of.calls += torch._C._current_graph_task_id() == -1
        for tensor in _tensors(output):
            of.outputs[dtype_name(tensor.dtype)] = None
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: of.gradients.update({dtype_name(gradient.dtype): None}))

    with hooked(module, enter, leave):
        with autocast_region(device.type, low), Casts(module.named_parameters()) as casts:
            output, loss = model.forward()
            inside = {name: dtype_name(parameter.dtype) for name, parameter in module.named_parameters()}
        model.backward(loss)
    gradients = {n: None if p.grad is None else dtype_name(p.grad.dtype) for n, p in module.named_parameters()}
    return AutocastRecord(
        modules=by_module,
        inside=inside,
        gradients=gradients,
        output=tuple(dict.fromkeys(dtype_name(tensor.dtype) for tensor in _tensors(output))),
        loss=dtype_name(loss.dtype),
        loss_value=loss.item(),
        casts=casts,
        state=_state_of_adamw(module),
    )


def _state_of_adamw(module: nn.Module) -> tuple[str, ...]:
    """The dtypes of the moments that a step of AdamW makes. Its learning rate is zero: no parameter changes."""
    trained = [p for p in module.parameters() if p.grad is not None and not p.grad.is_sparse and p.is_floating_point()]
    if not trained:
        return ()
    optimizer = torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0)
    optimizer.step()
    moments = (state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    return tuple(dict.fromkeys(dtype_name(moment.dtype) for moment in moments))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def record_repeats(model: ModelWithLoss, device: torch.device, low: torch.dtype) -> dict[str, Casts]:
    """Casts of two forwards: in one region, in one that keeps no copies, and in a region each."""
    named = list(model.module.named_parameters())
    counted = {}
    for what, cache in (("two forwards in one region", True), ("the same, cache off", False)):
        with autocast_region(device.type, low, cache=cache), Casts(named) as counted[what]:
            model.forward()
            model.forward()
    with Casts(named) as counted["two forwards, a region each"]:
        for _ in range(2):
            with autocast_region(device.type, low):
                model.forward()
    return counted


# Findings on what was seen under autocast.


_WORDS: dict[Treatment, str] = {
    "sent down": "sent down to 16 bits",
    "kept up": "kept up in fp32",
    "promotes": "promoted where inputs differ",
    "as its inputs": "left in the dtype of the inputs",
    "refuses": "refused",
}

_LARGE = 1000.0
"""Deviation of the numbers that layer norm is tried on: its square, a million, is far above fp16's largest number."""


def dtypes_found(model: ModelWithLoss, recording: AutocastRecord, dtype: str) -> Iterator[Finding]:
    """Findings on the dtypes of parameters, of their gradients and of the loss, on a loss that is not finite, and on
    the dtype of gradients on their way back, where some are in 16 bits."""
    inside = Counter(recording.inside.values())
    gradients = Counter(recording.gradients.values())
    without = gradients.pop(None, 0)
    same = all(recording.gradients[name] in (None, dtype) for name, dtype in recording.inside.items())
    tail = f"; {without} got none" if without else ""
    yield note(
        "parameters",
        f"Inside the region the {inside.total()} parameters are {_counted(inside)}, and the gradients "
        f"{_counted(gradients)}{tail}: "
        + ("each gradient has its parameter's dtype" if same else "not every gradient has its parameter's dtype")
        + f". The loss is {recording.loss}, of an output in {' and '.join(recording.output) or 'no tensor'}."
        + (
            f" AdamW's moments are {' and '.join(recording.state)}, and it updates the parameters in their own dtype: "
            "autocast does not reach the optimizer."
            if recording.state
            else ""
        ),
        {
            **{f"parameters_{name}": number for name, number in inside.items()},
            **{f"gradients_{name}": number for name, number in gradients.items()},
            "gradients_none": without,
            "loss": str(recording.loss_value),
        },
    )
    if not math.isfinite(recording.loss_value):
        value = str(recording.loss_value)
        sentence = f"The loss of {model.name} is {value}: its dtypes stand, its gradients mean nothing."
        yield warning("loss", sentence, {"loss": value})
    ran = [module for module in recording.modules.values() if module.calls]
    low = sum(dtype in of.outputs for of in ran)
    back = sum(dtype in of.gradients for of in ran)
    if not back:
        return
    f = FORMATS[dtype]
    smallest = f.smallest_subnormal
    fp32 = FORMATS["fp32"].smallest_normal
    means = (
        f"it shares the range of fp32, whose smallest normal number is {fp32:.2g} too: no loss scale is needed"
        if f.smallest_normal == fp32
        else f"fp32 reaches {fp32:.2g} with all its digits: this is what a loss scale is for"
    )
    yield note(
        "activations",
        f"{low} of the {len(ran)} modules that ran gave {dtype}, and to {back} of them the gradient came back "
        f"in {dtype}, whatever the parameters' gradients are. In {dtype} the smallest normal number is "
        f"{f.smallest_normal:.2g}, and up to half of {smallest:.2g} a number becomes zero; {means}.",
        {
            "modules": len(ran),
            "low_outputs": low,
            "low_gradients": back,
            "smallest_normal": f.smallest_normal,
            "smallest_subnormal": smallest,
        },
    )


_NORMS: dict[type[nn.Module], str] = {
    nn.LayerNorm: "layer_norm",
    nn.GroupNorm: "group_norm",
    nn.RMSNorm: "rms_norm",
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), "batch_norm"),
}
"""PyTorch's modules that are one operator of the table, with that operator."""


def imitation_found(registered: Mapping[str, Observed], imitated: Mapping[str, Observed]) -> Finding:
    """A finding that says where the rules come from, and which operators their imitation treats otherwise."""
    recorded = {name: observed.treatment for name, observed in registered.items() if observed.treatment is not None}
    other = [name for name, treatment in recorded.items() if imitated[name].treatment != treatment]
    but = f" {', '.join(other)} do not: in a model that uses them, look at the operators." if other else ""
    return note(
        "rules",
        f"The rules are CUDA's, as PyTorch {torch.__version__} registers them, read here without a GPU: each operator "
        "ran on tensors without data that say they are on one, and the model ran on the CPU with the casts that follow "
        f"from them. {len(recorded) - len(other)} of {len(recorded)} operators come out alike in both.{but}",
        {"operators": len(recorded), "different": len(other)},
    )


def normalisations_found(
    model: ModelWithLoss, recording: AutocastRecord, operators: Mapping[str, Mapping[str, Observed]], rules: str
) -> Iterator[Finding]:
    """A finding for each kind of normalisation in the model: its dtypes, and the rule that made them."""
    by_type: dict[type[nn.Module], list[tuple[str, Seen]]] = {}
    for path, part in model.module.named_modules():
        dtypes = recording.modules.get(id(part), Seen())
        if "Norm" in type(part).__name__ and dtypes.calls:
            by_type.setdefault(type(part), []).append((path or type(part).__name__, dtypes))
    other = "cpu" if rules == "cuda" else "cuda"
    for kind, modules in by_type.items():
        first, dtypes = modules[0]
        which = first if len(modules) == 1 else f"{first} (of {len(modules)} {kind.__name__})"
        operator = _NORMS.get(kind)
        if operator is None:
            why = f"{kind.__name__} is no operator of the table, so what its code runs decides"
        else:
            here, there = operators[rules][operator].treatment, operators[other][operator].treatment
            words = [_WORDS[each] if each is not None else "not observed" for each in (here, there)]
            why = f"on {rules} autocast has {operator} {words[0]}, on {other} {words[1]}"
        yield note(
            "normalisation",
            f"{which} takes {' and '.join(dtypes.inputs)} and gives {' and '.join(dtypes.outputs)}: {why}.",
            {"modules": len(modules), "input": ", ".join(dtypes.inputs), "output": ", ".join(dtypes.outputs)},
        )


def squares_found(device: torch.device, low: torch.dtype) -> Finding:
    """A finding that sets layer norm written out in 16 bits beside PyTorch's operator, on numbers of +-_LARGE."""
    fp16, bf16, dtype = FORMATS["fp16"], FORMATS["bf16"], dtype_name(low)
    x = torch.tensor([-_LARGE, _LARGE] * 4, dtype=low, device=device)
    square = (x - x.mean()).pow(2).mean().item()
    written = (x / (x - x.mean()).pow(2).mean().sqrt()).abs().max().item()
    operator = F.layer_norm(x, (8,)).abs().max().item()
    return note(
        "squares",
        f"A norm averages squares: they overflow above {fp16.square_overflows_above:.1f} in fp16, above "
        f"{bf16.square_overflows_above:.2g} in bf16. For its range bf16 would not need fp32 here; for its precision it "
        f"may, with steps of {bf16.epsilon:.2g} against fp16's {fp16.epsilon:.2g}. Of +-{_LARGE:g} in {dtype}, "
        f"written out in {dtype}, the variance is {square:g} and the largest result {written:g} (exactly: 1); "
        f"PyTorch's layer_norm in {dtype} without autocast gives {operator:g}"
        + ("." if written == operator else ": its kernel computes inside in more than it is given."),
        {
            "fp16_square_overflows_above": fp16.square_overflows_above,
            "bf16_square_overflows_above": bf16.square_overflows_above,
            "variance": str(square),
            "written_out": str(written),
            "operator": str(operator),
        },
    )


def caching_found(recording: AutocastRecord, repeats: Mapping[str, Casts], dtype: str) -> Finding:
    """A finding on how often parameters are cast, and how long autocast keeps the copies."""
    one = recording.casts
    first = one.of_named.total()
    cached, uncached, apart = (casts.of_named.total() for casts in repeats.values())
    if not uncached:
        sentence = f"No parameter is cast to {dtype}: there are no copies to keep"
    else:
        again = cached - first
        sentence = (
            f"One forward casts {len(one.of_named)} parameters ({first} casts, {one.bytes_of_named:,} bytes of "
            f"copies). A second one in the same region casts {again}: "
            + ("the copies are kept until the region ends" if again == 0 else "not every copy is kept")
            + f". With the cache off two forwards take {uncached} casts, in a region each {apart}"
        )
    return note(
        "cast-cache",
        f"{sentence}. Other tensors are cast {one.others} times in one forward.",
        {
            "casts": first,
            "casts_of_two": cached,
            "casts_of_two_uncached": uncached,
            "casts_of_two_regions": apart,
            "bytes_of_copies": one.bytes_of_named,
            "casts_of_others": one.others,
        },
    )


def operators_found(operators: Mapping[str, Mapping[str, Observed]], rules: str) -> Iterator[Finding]:
    """Findings on how many operators these rules treat in each way, and on those that CPU and CUDA treat differently,
    grouped by how."""
    here = operators[rules]
    counts = Counter(observed.treatment for observed in here.values())
    listed = len(here) - counts[None]
    parts = [f"{counts[treatment]} {_WORDS[treatment]}" for treatment in TREATMENTS if counts[treatment]]
    yield note(
        "operators",
        f"Of {listed} operators autocast on {rules} has {', '.join(parts[:-1])} and {parts[-1]}.",
        {**{treatment: counts[treatment] for treatment in TREATMENTS}, "operators": listed},
    )
    pairs: dict[tuple[str, str], list[str]] = {}
    common = 0
    for op in OPERATORS:
        cpu, cuda = operators["cpu"][op.name].treatment, operators["cuda"][op.name].treatment
        common += cpu is not None and cuda is not None
        if cpu is not None and cuda is not None and cpu != cuda:
            pairs.setdefault((cpu, cuda), []).append(op.name)
    different = sum(map(len, pairs.values()))
    unseen = [op.name for op in OPERATORS if operators["cuda"][op.name].treatment is None]
    if not different:
        return
    sentence = "; ".join(
        f"{', '.join(names)} ({cpu} on the CPU, {cuda} on CUDA)"
        for (cpu, cuda), names in sorted(pairs.items(), key=lambda item: -len(item[1]))
    )
    tail = f" Not observed for CUDA here: {', '.join(unseen)}." if unseen else ""
    yield note(
        "cpu-against-cuda",
        f"CPU and CUDA treat {different} of {common} operators differently: {sentence}.{tail}",
        {"different": different, "operators": common},
    )


def _counted(counts: Counter[Any]) -> str:
    """Counts in words: `all fp32`, or `3 fp32 and 1 bf16`."""
    if not counts:
        return "none"
    if len(counts) == 1:
        return f"all {next(iter(counts))}" if counts.total() > 1 else str(next(iter(counts)))
    return " and ".join(f"{number} {name}" for name, number in counts.most_common())


# The dtypes of a model as a tree: modules and parameters, indented by depth, and the loss below them.


Row = tuple[Cell, ...]
COLUMNS = ("what", "kind", "calls", "dtype", "input", "output", "gradient")
"""The columns of the table. `gradient` is that of the parameter, or of the module's output."""


def tree_table(model: ModelWithLoss, recording: AutocastRecord, title: str) -> Table:
    """A table of dtypes, a row per module or parameter; neighbours named by a number share rows that are alike."""
    whole = model.module
    names = {id(parameter): name for name, parameter in whole.named_parameters()}
    shown: dict[int, str] = {}
    """The path of each module that has rows already, by its id. A module that is met again is only named."""

    def rows_of(label: str, module: nn.Module, path: str, depth: int) -> Iterator[Row]:
        """Rows of a module, its parameters, and the modules in it."""
        indent = "  " * depth
        if id(module) in shown:
            yield (indent + label, f"the same as {shown[id(module)]}", None, None, None, None, None)
            return
        shown[id(module)] = path or "the whole"
        # A module that forward itself makes has no hooks.
        of_module = recording.modules.get(id(module), Seen())
        dtypes = (", ".join(of_kind) for of_kind in (of_module.inputs, of_module.outputs, of_module.gradients))
        yield (indent + label, type(module).__name__, of_module.calls or None, None, *dtypes)
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full = names[id(parameter)]
            kind = "parameter" if full == _join(path, name) else f"the same as {full}"
            gradient = recording.gradients[full] or "none"
            dtype = recording.inside[full]
            yield (f"{indent}  {name}", f"{kind} {_shape(parameter)}", None, dtype, "", "", gradient)
        for name, buffer in module.named_buffers(recurse=False):
            yield (f"{indent}  {name}", f"buffer {_shape(buffer)}", None, dtype_name(buffer.dtype), "", "", "")
        groups: list[tuple[list[str], list[Row]]] = []
        for name, child in module.named_children():
            rows = list(rows_of(name, child, _join(path, name), depth + 1))
            members, before = groups[-1] if groups else ([""], rows)
            # Alike but for the label of the first row.
            if name.isdigit() and members[-1].isdigit() and [before[0][1:], *before[1:]] == [rows[0][1:], *rows[1:]]:
                members.append(name)
            else:
                groups.append(([name], rows))
        for members, rows in groups:
            if len(members) > 1:
                rows[0] = (f"{indent}  {members[0]} to {members[-1]}, each", *rows[0][1:])
            yield from rows

    last: list[Row] = [
        ("loss", model.user_module.loss_name, None, None, ", ".join(recording.output), recording.loss, None)
    ]
    if recording.state:
        updated = ", ".join(dict.fromkeys(d for n, d in recording.inside.items() if recording.gradients[n] is not None))
        last.append(("optimizer state", "AdamW's moments", None, ", ".join(recording.state), None, None, None))
        last.append(("update", "AdamW, outside of the region", None, updated, None, None, None))
    return Table(title=title, columns=COLUMNS, rows=(*rows_of(type(whole).__name__, whole, "", 0), *last))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "scalar"


TREE, CASTS, OPERATOR_TABLE = "Modules", "Casts", "Operators"
"""Titles of the tables."""
RULES = ("cpu", "cuda")
"""Devices whose rules autocast may go by."""
_WHOSE = {"cpu": "the CPU's", "cuda": "CUDA's"}


def study_autocast(
    model: str = TOY,
    factory: str | None = None,
    dtype: str = "bf16",
    device: str = "auto",
    rules: str | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
) -> Answer:
    """Say what dtype everything has under autocast in the toy network, a preset, or with `factory` the user's module.

    factory: names the module (`training/user_module/`); `arguments` are what it is called with. rules: whose rules
    autocast goes by, `cpu` or `cuda`; None for the device's own. CUDA's are imitated on a CPU. Raises InputError for a
    device, dtype, module or rules that cannot be used.
    """
    low = LOW[choose(dtype, tuple(LOW), "dtype")]
    where = resolve_device(device)
    rules = choose(rules or where.type, RULES, "rules")
    if where.type == "cuda" and rules == "cpu":
        raise InputError("--rules cpu on a GPU: add --device cpu, where autocast goes by them")
    imitated = rules != where.type
    with autocast_region(where.type, low):
        pass  # refused before the model is made
    looked_at = model_with_loss(model, factory, where, arguments=arguments)
    with AsOnCuda() if imitated else contextlib.nullcontext():
        recording = record(looked_at, where, low)
        repeats = record_repeats(looked_at, where, low)
    cpu = torch.device("cpu")
    operators = {
        "cpu": observe_operators(cpu, low),
        "cuda": observe_operators(where, low) if where.type == "cuda" else observe_cuda_rules(low),
    }
    here = operators[rules]
    normalisations = tuple(normalisations_found(looked_at, recording, operators, rules))
    settings: dict[str, Cell] = {
        "model": looked_at.name,
        "dtype": dtype,
        "device": where.type,
        "rules": rules,
        "CUDA's rules": "observed on this GPU" if where.type == "cuda" else "observed on tensors without data",
    }
    by = f"By {_WHOSE[rules]} rules{', imitated here' if imitated else ''}."
    first: list[Finding] = []
    if imitated:
        with AsOnCuda():
            first.append(imitation_found(operators["cuda"], observe_operators(cpu, low)))
    return computed_answer(
        where,
        study="autocast",
        question=f"What dtype does everything in {looked_at.name} have under {dtype} autocast, "
        f"by {_WHOSE[rules]} rules?",
        settings=settings,
        tables=(
            msgspec.structs.replace(tree_table(looked_at, recording, TREE), notes=as_lines(by)),
            table_by(
                CASTS,
                {"one forward": recording.casts, **repeats}.items(),
                {
                    "how": lambda row: row[0],
                    "casts of parameters": lambda row: row[1].of_named.total(),
                    "parameters cast": lambda row: len(row[1].of_named),
                    "bytes of their copies": lambda row: row[1].bytes_of_named,
                    "casts of other tensors": lambda row: row[1].others,
                },
            ),
            table_by(
                OPERATOR_TABLE,
                (op.name for op in OPERATORS),
                {
                    "operator": str,
                    "of fp32": lambda name: here[name].of_fp32,
                    f"of {dtype}": lambda name: here[name].of_low,
                    "of both": lambda name: here[name].of_both,
                    "of both without autocast": lambda name: here[name].of_both_without,
                    **{f"autocast on {on}": lambda name, on=on: operators[on][name].treatment for on in RULES},
                },
            ),
        ),
        findings=(
            *first,
            *dtypes_found(looked_at, recording, dtype),
            *normalisations,
            *([squares_found(where, low)] if normalisations else []),
            caching_found(recording, repeats, dtype),
            *operators_found(operators, rules),
        ),
    )
