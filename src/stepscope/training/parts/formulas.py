"""The parts in PyTorch's operators, whatever the dtype: what the gate judges by; and compiled, each by itself. And by
which layers somebody else's module may be an MLP.

Each is compiled for each shape. Inside a step that is compiled anyway a formula is part of it. Where a mode follows
every operator, as in selective recomputation, the compiler steps aside, and the formula runs as it is written.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepscope.core.errors import InputError
from stepscope.kernels.operators import autocast_dtype, compile_for_each_shape


def rms_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """x + branch, or x without a branch, and x / sqrt(mean(x^2) + epsilon) * weight of it, in this dtype or in x's."""
    x = x if branch is None else x + branch
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normal = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    return x, (normal * weight).to(dtype or x.dtype)


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys (B, H, S, D) with each pair of halves turned by its position's angle."""
    cos, sin = cos[: q.shape[2]].to(q.dtype), sin[: q.shape[2]].to(q.dtype)

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    return turned(q), turned(k)


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of softmax(x weight^T) with the targets, of which -100 counts for nothing."""
    logits = F.linear(x, weight).flatten(0, -2)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten())


_compiled = functools.cache(compile_for_each_shape)


def _run(formula: Callable[..., Any], *arguments: Any) -> Any:
    as_written = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    return formula(*arguments) if as_written else _compiled(formula)(*arguments)


def compiled_rms_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """x + branch, or x where there is no branch, and its RMSNorm, in this dtype or in autocast's."""
    total, normal = _run(rms_norm, x, branch, weight, epsilon, dtype or autocast_dtype(x))
    return x if branch is None else total, normal


compiled_rotated = functools.partial(_run, rotated)
compiled_silu_product = functools.partial(_run, silu_product)
compiled_linear_cross_entropy = functools.partial(_run, linear_cross_entropy)


# Norms and MLPs in models of others.


def epsilon_of(module: nn.Module, dtype: torch.dtype) -> float | None:
    """What a norm adds to a mean of squares; None where it does not say."""
    if isinstance(module, nn.RMSNorm) and module.eps is None:
        return torch.finfo(dtype).eps
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", getattr(module, "epsilon", None)))
    return float(epsilon) if isinstance(epsilon, (int, float)) and not isinstance(epsilon, bool) else None


SWIGLU_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("w1", "w2", "w3"), ("gate", "up", "down"))
"""Names of SwiGLU's linear layers: gate, up and down."""
GELU_NAMES = (
    ("fc1", "activation_fn", "fc2"), ("fc1", "act", "fc2"), ("c_fc", "act", "c_proj", "dropout"),
    ("fc_in", "act", "fc_out", "dropout"), ("lin1", "activation", "lin2", "dropout"),
    ("dense_h_to_4h", "act", "dense_4h_to_h"), ("dense", "intermediate_act_fn"),
)  # fmt: skip
"""Names of a linear layer, of its activation, and of what comes after it, if that is there."""


@dataclass(frozen=True)
class MlpLayers:
    """The layers by which a module computes an MLP, by their names."""

    first: tuple[str, ...]
    """Gate and up of a SwiGLU, or the linear layer whose GELU is taken."""
    after: tuple[str, ...]
    """What takes the result, one after the other."""
    gelu: str = ""
    """What computes GELU between them; empty for a SwiGLU."""
    tanh: bool = False
    """Whether GELU is the approximation with tanh."""
    beside: tuple[tuple[str, Any], ...] = ()
    """What the module has beside these layers, which the kernel does not call, GELU included; and what tells by now
    whether that is another one."""

    def changed_in(self, module: nn.Module) -> bool:
        """Whether an adapter, a hook, another activation or another rate of dropout came after a module was held, of
        what the kernel does not call."""
        linear = getattr(module, self.first[0])
        if self.gelu and not (is_linear(linear) and only_watched(linear)):
            return True
        beside = ((getattr(module, name, None), known) for name, known in self.beside)
        return any(_known(each) != known or not only_watched(each) for each, known in beside)


def mlp_layers(module: nn.Module, *, gelu: bool) -> list[MlpLayers]:
    """How a module may compute an MLP, by the names and the shapes of its layers; gelu: also by GELU."""
    layers = dict(module.named_children())
    found = [
        MlpLayers(names[:2], names[2:], beside=_beside(module, names))
        for names in SWIGLU_NAMES
        if all(_weighs(layers.get(name)) for name in names)
        and _shape(layers[names[0]]) == _shape(layers[names[1]]) == _shape(layers[names[2]])[::-1]
    ]
    for first, activation, *names in GELU_NAMES if gelu else ():
        approximation = _gelu_of(getattr(module, activation, None)) if is_linear(layers.get(first)) else None
        if approximation is not None and (not names or names[0] in layers):
            after = tuple(name for name in names if name in layers)
            tanh, beside = approximation == "tanh", _beside(module, (first, *after), activation)
            found.append(MlpLayers((first,), after, gelu=activation, tanh=tanh, beside=beside))
    return found


def _beside(module: nn.Module, names: tuple[str, ...], *more: str) -> tuple[tuple[str, Any], ...]:
    """What a module has beside the layers of these names; more: what need be no module."""
    others = dict.fromkeys((*more, *(name for name, _ in module.named_children() if name not in names)))
    return tuple((name, _known(getattr(module, name))) for name in others)


_DROPOUTS = nn.modules.dropout._DropoutNd


def _known(value: Any) -> Any:
    """What tells by now whether a module, or a function in its place, was changed for another one."""
    if not isinstance(value, nn.Module):
        return getattr(value, "__func__", value)  # a method is another object each time
    kind = getattr(type(value), "_stepscope_original", type(value))
    of_kind = value.approximate if kind is nn.GELU else value.p if isinstance(value, _DROPOUTS) else None
    return kind, of_kind


def only_watched(module: Any) -> bool:
    """Whether a module, or a function in its place, has no patched forward, and no hooks but those that measure a step,
    which only look on."""
    if not isinstance(module, nn.Module):
        return True
    every = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    looks_on = all(
        getattr(hook, "__module__", "").startswith("stepscope.") for hooks in every for hook in hooks.values()
    )
    return looks_on and "forward" not in vars(module)


def widths_of(module: nn.Module, layers: MlpLayers) -> tuple[int, int]:
    """The widths of what an MLP takes and gives."""
    linear = [getattr(module, name) for name in (layers.first[0], *layers.after)]
    shapes = [_shape(layer)[:: 1 if type(layer).__name__ != "Conv1D" else -1] for layer in linear if _weighs(layer)]
    return shapes[0][1], shapes[-1][0]


def _weighs(layer: Any) -> bool:
    return getattr(getattr(layer, "weight", None), "ndim", 0) == 2


def _shape(layer: Any) -> tuple[int, ...]:
    return tuple(layer.weight.shape)


def is_linear(layer: object) -> bool:
    """Whether a layer is a plain linear one, of PyTorch or of transformers, whose `Conv1D` has its weight turned."""
    kind = type(layer)
    return kind is nn.Linear or (kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils")


def product_of(layer: Any, x: Tensor) -> Tensor:
    """The product of x and a linear layer's weight, without its bias."""
    return F.linear(x, layer.weight) if type(layer) is nn.Linear else torch.matmul(x, layer.weight)


_FAR = (12.0, 40.0, 150.0, 1e3, 1e5)
"""Where a GELU is cut off, if it is."""
_PROBES = torch.cat(
    [torch.linspace(-9, 9, 181, dtype=torch.float64), torch.tensor([s * x for x in _FAR for s in (-1, 1)])]
)
CALL_ERRORS = (
    RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, ArithmeticError, InputError,
)  # fmt: skip
"""What somebody's code raises that cannot be called as a trial calls it."""


def _gelu_of(activation: Any) -> str | None:
    """Which GELU a function of one tensor is, as `approximate` of PyTorch's has it; None where it is none."""
    if not callable(activation) or (isinstance(activation, nn.Module) and any(map(id, activation.parameters()))):
        return None
    call = activation.forward if isinstance(activation, nn.Module) else activation  # hooks are no part of it
    try:
        # What it draws is not the user's; to compile it for these numbers alone would take seconds.
        with torch.no_grad(), torch.random.fork_rng([]), torch.compiler.set_stance("force_eager"):
            values: Any = call(_PROBES.clone())
    except CALL_ERRORS:
        return None
    if not isinstance(values, Tensor) or values.shape != _PROBES.shape:
        return None
    ways = ("none", "tanh")
    alike = (way for way in ways if torch.allclose(values, F.gelu(_PROBES, approximate=way), rtol=1e-6, atol=1e-9))
    return next(alike, None)
