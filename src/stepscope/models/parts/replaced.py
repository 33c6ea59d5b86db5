"""Lets modules of a user's own model be computed by other kernels, where they compute the same.

A norm is a module with one weight (M) and an epsilon; a SwiGLU has three linear layers: gate, up and down. What it is
called says nothing: before it is replaced, a module is held against its replacement, forward and backward, on random
numbers, by the bounds of the gate (`gate.py`): at several shapes, in its own dtype, and under autocast where its
weights are fp32. Weights are random there, too, since fresh norms are all ones. What differs is left, and named. Of
modules that are alike but for their weights, as those of a model's blocks, one is held for all.

A module that is replaced gets another class, a subclass of its own. Its parameters, buffers and hooks stay the same
objects with the same names. Calls that the kernel does not take, of other arguments or on another device, run the
module's own forward.
"""

import functools
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stepscope.core.attentions import TensorDtype
from stepscope.core.errors import InputError
from stepscope.core.parts import MODULE_PARTS, NO_MODULES, PARTS, REFERENCE, Kernels, Part, PartFound, check_parts
from stepscope.models.attention.inputs import TORCH_DTYPES
from stepscope.models.parts import part_function
from stepscope.models.parts.gate import compare, interpreter_slack

SWIGLU_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("w1", "w2", "w3"), ("gate", "up", "down"))
"""Names of SwiGLU's linear layers in models of others: gate, up and down."""

_NAMES: dict[torch.dtype, TensorDtype] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_NOT_RMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_ABSENT: dict[Part, str] = {"norm": "no RMSNorm", "mlp": "no SwiGLU of gate, up and down"}
"""What a model has not, where it has no module of a part."""
_HOMES = ("_parameters", "_buffers", "_modules")
"""Where a module keeps its tensors and the modules in it."""
_SEED = 20


@dataclass(frozen=True)
class _Way:
    """How a module's own code is said by a kernel."""

    names: tuple[str, ...] = ()
    """The linear layers of a SwiGLU."""
    offset: float = 0.0
    """What a norm adds to its weight; 1 in Gemma."""
    promoted: bool = False
    """Whether a norm's result has the dtype of input times weight; otherwise it has that of the input."""


class _Unlike(Exception):
    """A replacement that computes something else, with the largest difference, where there is a number."""

    def __init__(self, why: str, error: float = float("inf")) -> None:
        super().__init__(why)
        self.why, self.error = why, error


@dataclass(frozen=True)
class Replaced:
    """What `replace_parts` found in a model: `replaced` and `left`, by type. `restore()` undoes it."""

    model: nn.Module
    """The model, which was changed in place."""
    found: tuple[PartFound, ...]
    """All that was found, by part and type of module."""

    @property
    def replaced(self) -> tuple[PartFound, ...]:
        """The modules that other kernels compute now."""
        return tuple(each for each in self.found if each.replaced)

    @property
    def left(self) -> tuple[PartFound, ...]:
        """The modules that stayed as they were, and why."""
        return tuple(each for each in self.found if not each.replaced)

    def restore(self) -> None:
        """Let every module of the model be computed by its own code again. Parameters are not touched."""
        for module in self.model.modules():
            original = getattr(type(module), "_stepscope_original", None)
            if original is not None:
                module.__class__ = original

    def __str__(self) -> str:
        return "; ".join(map(str, self.found))


def replace_in(model: nn.Module, chosen: Mapping[Part, Kernels]) -> Replaced:
    """Replace in place what the chosen kernels compute equally. Raises InputError, one line, for kernels that do not
    run where the model lies, and for a part that the model does not have.

    Where all parts that are modules are chosen, those that the model does not have are named in the result; but it
    must have one of them.
    """
    asked: dict[Part, Kernels] = {part: name for part, name in chosen.items() if name != REFERENCE}
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    if first is None:
        raise InputError(f"{type(model).__name__} has no parameters: there is nothing to replace")
    if first.dtype not in _NAMES:
        raise InputError(f"{type(model).__name__} is {first.dtype}: parts take fp32, bf16 and fp16")
    check_parts(asked, first.device.type, _NAMES[first.dtype], {})
    found = [record for part, name in asked.items() for record in _replaced(model, part, name)]
    missing = [record for record in found if not record.modules]
    of_modules: list[Part] = [part for part in MODULE_PARTS if part in asked]
    if len(of_modules) == len(MODULE_PARTS) and not any(record.modules for record in found):
        names = " and ".join(dict.fromkeys(asked[part] for part in of_modules))
        raise InputError(
            f"kernels {names} replace nothing in {type(model).__name__}: it has "
            f"{' and '.join(_ABSENT[part] for part in of_modules)}; leave out --kernels"
        )
    if missing and len(of_modules) < len(MODULE_PARTS):
        first_missing = missing[0]
        raise InputError(
            f"{first_missing.part} {first_missing.kernels} replaces nothing in {type(model).__name__}: "
            f"{first_missing.why}; leave out --{first_missing.part}"
        )
    return Replaced(model, tuple(found))


def _replaced(model: nn.Module, part: Part, name: Kernels) -> list[PartFound]:
    """Replace the modules that compute a part, and say which were replaced and which were not."""
    if part in NO_MODULES:
        return [PartFound(part=part, kernels=name, type="", modules=0, replaced=False, why=NO_MODULES[part])]
    outcomes: dict[tuple[str, bool, str], list[tuple[str, _Unlike | None]]] = {}
    held: dict[Hashable, type[nn.Module] | _Unlike] = {}
    for path, module in model.named_modules():
        ways = _ways(module, part)
        if not ways:
            continue
        kind_of = _kind(module)
        if kind_of not in held:
            held[kind_of] = _replacement(module, part, name, ways)
        replacement = held[kind_of]
        unlike = replacement if isinstance(replacement, _Unlike) else None
        if not isinstance(replacement, _Unlike):
            module.__class__ = replacement
        # Modules that differ by unequal numbers are one line, with the largest.
        kind = "" if unlike is None else "differs" if unlike.error < float("inf") else unlike.why
        outcomes.setdefault((type(module).__name__, unlike is None, kind), []).append((path, unlike))
    if not outcomes:
        return [PartFound(part=part, kernels=name, type="", modules=0, replaced=False, why=f"it has {_ABSENT[part]}")]
    found: list[PartFound] = []
    for (kind, fits, _), each in outcomes.items():
        differing = [unlike for _, unlike in each if unlike is not None]
        why = max(differing, key=lambda unlike: unlike.error).why if differing else ""
        found.append(
            PartFound(part=part, kernels=name, type=kind, modules=len(each), replaced=fits, why=why, where=each[0][0])
        )
    return found


def _ways(module: nn.Module, part: Part) -> list[_Way]:
    """How a kernel may say what this module computes; none where it is no such part."""
    if part == "norm":
        own = dict(module.named_parameters())
        bare = (
            [*own] == ["weight"] and own["weight"].dim() == 1 and not [*module.children()] and not [*module.buffers()]
        )
        if not bare or isinstance(module, _NOT_RMS) or _epsilon_of(module, own["weight"].dtype) is None:
            return []
        return [_Way(offset=offset, promoted=promoted) for offset in (0.0, 1.0) for promoted in (True, False)]
    layers = dict(module.named_children())
    return [
        _Way(names=names)
        for names in SWIGLU_NAMES
        if all(getattr(getattr(layers.get(name), "weight", None), "ndim", 0) == 2 for name in names)
        and _shape(layers[names[0]]) == _shape(layers[names[1]]) == _shape(layers[names[2]])[::-1]
    ]


def _shape(layer: nn.Module) -> tuple[int, ...]:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return tuple(weight.shape)


def _epsilon_of(module: nn.Module, dtype: torch.dtype) -> float | None:
    if isinstance(module, nn.RMSNorm) and module.eps is None:
        return torch.finfo(dtype).eps
    found = getattr(module, "variance_epsilon", getattr(module, "eps", getattr(module, "epsilon", None)))
    return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else None


def _kind(value: object) -> Hashable:
    """What tells whether two modules compute the same of the same weights: classes, attributes, and shapes, all the way
    down. Blocks of a model are alike, and their trials would be of equal numbers: one of a kind is held against its
    replacement for all. An object that nothing tells of is like itself alone."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return type(value), value
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    if isinstance(value, nn.Parameter):
        return type(value), tuple(value.shape), value.dtype, value.device, value.requires_grad
    if isinstance(value, nn.Module):
        inside = ((name, each) for home in _HOMES for name, each in vars(value)[home].items())
        itself = ((name, each) for name, each in vars(value).items() if name not in _HOMES)
        return type(value), tuple((name, _kind(each)) for name, each in (*inside, *itself))
    if isinstance(value, (dict, list, set)) and not value:  # as the hooks of most modules
        return type(value)
    return id(value)


def _replacement(module: nn.Module, part: Part, name: Kernels, ways: list[_Way]) -> type[nn.Module] | _Unlike:
    """The class that replaces a module's, of the first way that computes the same; or why none does."""
    original = type(module)
    if hasattr(original, "_stepscope_original"):
        return _Unlike("they are replaced already")
    if "forward" in vars(module):
        return _Unlike("their forward was patched by somebody else")
    weight = next(module.parameters())
    if weight.dtype not in _NAMES or any(type(p) is not nn.Parameter or p.is_meta for p in module.parameters()):
        return _Unlike("their weights are no plain floating tensors")
    fault = PARTS[part][name].fault(weight.device.type, _NAMES[weight.dtype], weight.shape[-1])
    if fault is not None:
        return _Unlike(f"{name} {fault}")
    nearest: _Unlike | None = None
    for way in ways:
        replacement = _class_of(original, part, name, way)
        try:
            _check(module, replacement, _epsilon_of(module, weight.dtype) or 0.0)
        except _Unlike as unlike:
            # Without its traceback, which would hold all numbers of the trial.
            nearest = _Unlike(unlike.why, unlike.error) if nearest is None or unlike.error < nearest.error else nearest
            continue
        return replacement
    assert nearest is not None
    return nearest


@functools.cache
def _class_of(original: type[nn.Module], part: Part, name: Kernels, way: _Way) -> type[nn.Module]:
    """A subclass of a module's class whose forward is the kernel's. It has the same name, so that a model is described
    in the same words, and can be copied and pickled."""
    own, kernel = original.forward, part_function(part, name)
    compute = functools.partial(_norm if part == "norm" else _mlp, kernel, way)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not _takes(self, args[0]):
            return own(self, *args, **kwargs)
        return compute(self, args[0])

    def reduce(self: nn.Module, _protocol: object) -> tuple[Any, ...]:
        return _made_again, (original, part, name, way), self.__dict__

    return type(
        original.__name__,
        (original,),
        {
            "forward": forward, "__reduce_ex__": reduce, "__module__": original.__module__,
            "__qualname__": original.__qualname__, "__doc__": original.__doc__, "_stepscope_original": original,
        },
    )  # fmt: skip


def _made_again(original: type[nn.Module], part: Part, name: Kernels, way: _Way) -> nn.Module:
    """A module without its state, as pickle makes it."""
    replacement = _class_of(original, part, name, way)
    return replacement.__new__(replacement)


def _takes(module: nn.Module, x: object) -> bool:
    """Whether a kernel takes this input: a floating tensor where the module's weights lie, neither of them spread."""
    weight = next(module.parameters())
    return (
        isinstance(x, Tensor)
        and x.dim() > 0
        and x.dtype in _NAMES
        and x.device == weight.device
        and not hasattr(x, "placements")
        and not hasattr(weight, "placements")
    )


def _norm(kernel: Callable[..., Any], way: _Way, module: nn.Module, x: Tensor) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    dtype = torch.promote_types(x.dtype, weight.dtype) if way.promoted else x.dtype
    by = weight if not way.offset else way.offset + weight.float()
    return kernel(x, None, by, _epsilon_of(module, x.dtype), dtype=dtype)[1]


def _mlp(kernel: Callable[..., Any], way: _Way, module: nn.Module, x: Tensor) -> Tensor:
    gate, up, down = (getattr(module, name) for name in way.names)
    return down(kernel(gate(x), up(x)))


def _check(module: nn.Module, replacement: type[nn.Module], epsilon: float) -> None:
    """Raise _Unlike where the replacement computes something else than the module. Random states stay as they were."""
    original, trains = type(module), module.training
    device = next(module.parameters()).device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a module says of a trial's dtypes is no fault of the user's step
        module.train()  # where a dropout would show
        try:
            for trial in _trials(module, epsilon):
                exact, plain, again = trial.run(torch.float64), trial.run(), trial.run()
                _check_not_random(plain, again)
                module.__class__ = replacement
                found = trial.run()
                module.__class__ = original
                _judge(exact, plain, found, trial)
        finally:
            module.__class__ = original
            module.train(trains)


def _check_not_random(plain: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> None:
    """Raise _Unlike for a module, as one with dropout, whose numbers change: any difference from float64 would
    pass for its rounding."""
    if not all(torch.allclose(again[result], each, rtol=0.05, atol=0.05) for result, each in plain.items()):
        raise _Unlike("their forward gives other numbers when it is called again")


@dataclass(frozen=True)
class _Trial:
    """One call of a module with random weights: its input, and the gradient of its result."""

    module: nn.Module
    weights: Mapping[str, Tensor]
    x: Tensor
    gradient: Tensor
    autocast: bool

    def run(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """The result and all gradients; with a dtype, of the same numbers in it, without autocast."""
        leaves = {
            name: tensor.to(dtype or tensor.dtype).detach().requires_grad_()
            for name, tensor in {"input": self.x, **self.weights}.items()
        }
        x = leaves["input"]
        context: AbstractContextManager[object] = nullcontext()
        if self.autocast and dtype is None:
            context = torch.autocast(x.device.type, torch.bfloat16)
        weights = {name: tensor for name, tensor in leaves.items() if name != "input"}
        try:
            with context:
                out = functional_call(self.module, weights, (x,))
            if not isinstance(out, Tensor) or out.shape != self.gradient.shape:
                raise _Unlike("their forward does not give one tensor of its input's shape")
            gradients = torch.autograd.grad(out, [*leaves.values()], self.gradient.to(out.dtype))
        except (RuntimeError, TypeError, ValueError, AttributeError, InputError) as error:
            raise _Unlike(f"they cannot be called with one tensor: {type(error).__name__}") from error
        return {"result": out.detach()} | {
            f"gradient of {name}": each for name, each in zip(leaves, gradients, strict=True)
        }


def _trials(module: nn.Module, epsilon: float) -> Iterator[_Trial]:
    """Calls of a module: odd shapes and layouts in its dtype, and under autocast where its weights are fp32."""
    first = next(module.parameters())
    generator = torch.Generator(device=first.device).manual_seed(_SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=first.device)

    weights: dict[str, Tensor] = {}
    for name, value in module.named_parameters():
        moved = value.detach() + 0.1 * normal(*value.shape) if value.dim() < 2 else (
            normal(*value.shape) / value.shape[-1] ** 0.5
        )  # fmt: skip
        weights[name] = moved.to(value.dtype)
    width = first.shape[-1]
    under = ((None, False), (None, True), (torch.bfloat16, True)) if first.dtype == torch.float32 else ((None, False),)
    for dtype, autocast in under:
        for shape in ((2, 3, width), (5, width)):
            x = normal(*shape[:-1], width + 3)[..., 2:-1] if len(shape) == 2 else normal(*shape)
            x[-1] *= epsilon**0.5 or 1.0  # so small that another epsilon would show
            yield _Trial(module, weights, x.to(dtype or first.dtype), normal(*shape), autocast)


def _judge(
    exact: Mapping[str, Tensor], plain: Mapping[str, Tensor], found: Mapping[str, Tensor], trial: _Trial
) -> None:  # fmt: skip
    for result, right in plain.items():
        if found[result].dtype != right.dtype:
            raise _Unlike(f"{result} is {found[result].dtype}, not {right.dtype}")
    units = {result: torch.finfo(right.dtype).eps / 2 for result, right in plain.items()}
    lowest = torch.bfloat16 if trial.autocast else trial.x.dtype
    errors, reason = compare(exact, plain, found, units, interpreter_slack(lowest, trial.x.device.type))
    if reason:
        largest = max(error for error, _ in errors.values())
        raise _Unlike(f"they compute something else: {reason}; the largest difference is {largest:.2g}", largest)
