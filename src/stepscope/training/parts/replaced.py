"""Lets modules of a user's own model be computed by other kernels, where they compute the same.

A norm is a module with one weight (M) and an epsilon; a SwiGLU has three linear layers: gate, up and down; a loss is a
causal language model of Hugging Face's (`language_loss.py`). What it is called says nothing: before it is replaced, a
module is held against its replacement, forward and backward, on random numbers, by the bounds of the gate
(`gate.py`): at several shapes, in its own dtype, and under autocast where its weights are fp32. Weights of norms and
SwiGLUs are random there, too, since fresh norms are all ones. What differs is left, and named. Of modules that are
alike but for their weights, as those of a model's blocks, one is held for all.

A module that is replaced gets another class, a subclass of its own. Its parameters, buffers and hooks stay the same
objects with the same names. Calls that the kernel does not take, of other arguments or on another device, run the
module's own forward.
"""

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.core.attentions import TensorDtype
from stepscope.core.errors import InputError
from stepscope.core.parts import MODULE_PARTS, NO_MODULES, PARTS, REFERENCE, Kernels, Part, PartFound, check_parts
from stepscope.training.attention.inputs import TORCH_DTYPES
from stepscope.training.parts import part_function
from stepscope.training.parts.gate import Trial, Unlike, hold, trials_of_one_tensor
from stepscope.training.parts.language_loss import LanguageModel, language_model, loss_forward, trials_of_states

SWIGLU_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("w1", "w2", "w3"), ("gate", "up", "down"))
"""Names of SwiGLU's linear layers in models of others: gate, up and down."""

_NAMES: dict[torch.dtype, TensorDtype] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_NOT_RMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_ABSENT: dict[Part, str] = {
    "norm": "no RMSNorm",
    "mlp": "no SwiGLU of gate, up and down",
    "loss": "no causal language model of transformers with a head of one product",
}
"""What a model has not, where it has no module of a part."""
_HOMES = ("_parameters", "_buffers", "_modules")
"""Where a module keeps its tensors and the modules in it."""


@dataclass(frozen=True)
class _Way:
    """How a module's own code is said by a kernel."""

    names: tuple[str, ...] = ()
    """The linear layers of a SwiGLU."""
    offset: float = 0.0
    """What a norm adds to its weight; 1 in Gemma."""
    promoted: bool = False
    """Whether a norm's result has the dtype of input times weight; otherwise it has that of the input."""
    language_model: LanguageModel | None = None
    """The base and the head of a model that returns its loss."""


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
            f"{', '.join(_ABSENT[part] for part in of_modules)}; leave out --kernels"
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
    outcomes: dict[tuple[str, bool, str], list[tuple[str, Unlike | None]]] = {}
    held: dict[Hashable, type[nn.Module] | Unlike] = {}
    for path, module in model.named_modules():
        ways = _ways(module, part)
        if not ways:
            continue
        kind_of = _kind(module)
        if kind_of not in held:
            held[kind_of] = _replacement(module, part, name, ways)
        replacement = held[kind_of]
        unlike = replacement if isinstance(replacement, Unlike) else None
        if not isinstance(replacement, Unlike):
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
    if part == "loss":
        found = language_model(module)
        return [] if found is None else [_Way(language_model=found)]
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


def _replacement(module: nn.Module, part: Part, name: Kernels, ways: list[_Way]) -> type[nn.Module] | Unlike:
    """The class that replaces a module's, of the first way that computes the same; or why none does."""
    original = type(module)
    if hasattr(original, "_stepscope_original"):
        return Unlike("they are replaced already")
    if "forward" in vars(module):
        return Unlike("their forward was patched by somebody else")
    weights = [*module.parameters()] if part != "loss" else [_weight_of(module, way) for way in ways]
    weight = weights[0]
    if weight.dtype not in _NAMES or any(type(p) is not nn.Parameter or p.is_meta for p in weights):
        return Unlike("their weights are no plain floating tensors")
    fault = PARTS[part][name].fault(weight.device.type, _NAMES[weight.dtype], weight.shape[-1])
    if fault is not None:
        return Unlike(f"{name} {fault}")
    nearest: Unlike | None = None
    for way in ways:
        replacement = _class_of(original, part, name, way)
        try:
            hold(module, replacement, _trials(module, way, weight))
        except Unlike as unlike:
            # Without its traceback, which would hold all numbers of the trial.
            nearest = Unlike(unlike.why, unlike.error) if nearest is None or unlike.error < nearest.error else nearest
            continue
        return replacement
    assert nearest is not None
    return nearest


def _weight_of(module: nn.Module, way: _Way) -> nn.Parameter:
    """The weight of a language model's head."""
    assert way.language_model is not None
    return module.get_parameter(f"{way.language_model.head}.weight")


def _trials(module: nn.Module, way: _Way, weight: Tensor) -> Iterator[Trial]:
    if way.language_model is not None:
        return trials_of_states(module, way.language_model)
    return trials_of_one_tensor(module, _epsilon_of(module, weight.dtype) or 0.0)


@functools.cache
def _class_of(original: type[nn.Module], part: Part, name: Kernels, way: _Way) -> type[nn.Module]:
    """A subclass of a module's class whose forward is the kernel's. It has the same name, so that a model is described
    in the same words, and can be copied and pickled."""
    kernel = part_function(part, name)
    if way.language_model is not None:
        forward = loss_forward(original.forward, kernel, way.language_model)
    else:
        forward = _forward_of_one_tensor(
            original.forward, functools.partial(_norm if part == "norm" else _mlp, kernel, way)
        )

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


def _forward_of_one_tensor(
    own: Callable[..., Any], compute: Callable[[nn.Module, Tensor], Tensor]
) -> Callable[..., Any]:
    """A forward by a kernel, for calls with one tensor that the kernel takes."""

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not _takes(self, args[0]):
            return own(self, *args, **kwargs)
        return compute(self, args[0])

    return forward


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
