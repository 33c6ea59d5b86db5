"""Several projections of one input as one product, forward and backward.

    joint_projections(x, (W1, W2, ...), (b1, b2, ...))  ->  x W1^T + b1, x W2^T + b2, ...

With W the rows of all weights, one weight below the other, b all biases, if there are any, and dy the gradients of the
results side by side:

    y = x W^T + b        dx = dy W        dW = dy^T x        db = the sum of dy over rows

Apart, each projection is a product of its own, and backward adds up as many gradients of x, each rounded. Joint, small
products fill a GPU better, the sum over projections is made inside one product, and nothing is added afterwards.

The biases' gradients are one sum of dy, made from the rows that the products take.

W is no copy where the weights lie one behind the other in memory (`lie_together`), nor is b; elsewhere they are put
together first. Neither is dy where the gradients lie side by side, as the fused SwiGLU and flash attention leave them;
else the operator copies them, and of those beside a fused rotation's the value's alone (`leave_room`). A compiler that
fused this copy with what makes the gradients would compute all of them for each number of dy, and choose one. The
results are views of y, so as long as one is kept, all are. Under autocast W is cast in forward and again in backward.

    patch_products(x, W, b)  ->  the convolution of x (..., C, H, W) whose stride is its kernel (p, q), as one product

Patches do not overlap then, and lie as rows of C p q numbers after one copy:

    y = patches W^T + b        dW = dy^T patches        db = the sum of dy over rows

cuDNN turns pictures, weights and results into another layout first, and takes several times as long.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from stepscope.core.errors import InputError
from stepscope.core.parts import PartFound
from stepscope.kernels.operators import autocast_dtype, define, refuse_second_derivative, watched
from stepscope.kernels.products import product

_NAME = "projections joint"
OPERATOR = "stepscope::joint_projections"
"""The operator of forward's product."""


@torch.no_grad()
def lie_together(weights: Sequence[Tensor]) -> None:
    """Move parameters (N_i, M), or (N_i), of one dtype into one block of memory, in their order. They stay the same
    parameters."""
    block = torch.cat([weight.detach() for weight in weights])
    for weight, place in zip(weights, block.split([weight.shape[0] for weight in weights]), strict=True):
        weight.data = place


def _joined(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The rows of all weights, (sum N_i, M), or all biases, (sum N_i): a view where they lie together, else a copy."""
    first = weights[0]
    place, memory = first.data_ptr(), first.untyped_storage().data_ptr()
    for weight in weights:
        if weight.data_ptr() != place or weight.untyped_storage().data_ptr() != memory or not weight.is_contiguous():
            return torch.cat([weight.to(dtype) for weight in weights])
        place += weight.nbytes
    return first.as_strided((_rows_of(weights), *first.shape[1:]), first.stride()).to(dtype)


def leave_room(rows: Tensor, taken: int) -> None:
    """Let the columns of new rows from this one on belong to whoever puts other gradients beside those before it."""
    setattr(rows.untyped_storage(), _TAKEN, taken)  # which dies with its memory, and which all views of it share


_TAKEN = "columns_taken"


def _beside(gradients: Sequence[Tensor]) -> Tensor:
    """Gradients (R, N_i) as (R, sum N_i): a view where they are parts of the same rows, else a copy. Where the first of
    them are parts of rows with room for the others, these alone are copied."""
    first = gradients[0]
    width = sum(gradient.shape[1] for gradient in gradients)
    place, memory = first.data_ptr(), first.untyped_storage()
    apart = [*gradients]
    while apart and apart[0].data_ptr() == place and apart[0].untyped_storage().data_ptr() == memory.data_ptr():
        if apart[0].stride() != (width, 1):
            break
        place += apart.pop(0).shape[1] * first.element_size()
    taken = width - sum(gradient.shape[1] for gradient in apart)
    room = getattr(memory, _TAKEN, None) == taken and all(gradient.dtype == first.dtype for gradient in apart)
    if apart and not room:
        return torch.cat(list(gradients), dim=1)
    rows = first.as_strided((first.shape[0], width), (width, 1))
    for gradient, columns in zip(apart, rows[:, taken:].split([each.shape[1] for each in apart], 1), strict=False):
        columns.copy_(gradient)
    return rows


def _product(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    weight = _joined(weights, x.dtype)
    if biases:
        return F.linear(x, weight, _joined(biases, x.dtype))
    return product(x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], len(weight))


def _gradients(
    dys: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    of_biases: torch.dtype | None = None,
    apart: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, of W and, in their dtype if there are any, of all biases, or their shares, from rows."""
    dy = _beside(dys)
    of_bias = (
        dy.new_empty(0) if of_biases is None else _sums_kernels().chunk_sums(dy) if apart else _sums(dy, of_biases)
    )
    return product(dy, _joined(weights, dy.dtype)), product(dy.t(), x), of_bias


def _fake_gradients(
    dys: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    of_biases: torch.dtype | None = None,
    apart: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = _rows_of(weights)
    of_bias = x.new_empty(0) if of_biases is None else x.new_empty(rows, dtype=of_biases)
    if apart and of_biases is not None:
        of_bias, _ = _sums_kernels().shares_of_chunks(dys[0], rows)
    return x.new_empty(x.shape), x.new_empty(rows, x.shape[1]), of_bias


def _sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum (N) of x (R, N) over rows, rounded to a dtype, and before it to that of x where PyTorch adds it up."""
    kernels = _sums_kernels() if x.is_cuda else None
    if kernels is None:
        return x.sum(0).to(dtype)
    out = torch.empty(x.shape[1], dtype=dtype, device=x.device)
    kernels.fill_sums(x, out)
    return out


@functools.cache
def _sums_kernels() -> Any:
    """The module that adds up rows on a GPU; None where there is no Triton."""
    try:
        from stepscope.kernels.parts import norm  # noqa: PLC0415
    except ImportError:
        return None
    return norm


def _rows_of(weights: Sequence[Tensor]) -> int:
    return sum(weight.shape[0] for weight in weights)


define(
    "joint_projections(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor",
    _product,
    lambda x, weights, _biases: x.new_empty(*x.shape[:-1], _rows_of(weights)),
)
define(
    "joint_projections_backward(Tensor[] dys, Tensor x, Tensor[] weights, ScalarType? of_biases=None,"
    " bool apart=False) -> (Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
)


@register_flop_formula(torch.ops.stepscope.joint_projections)
def _flops(x_shape: Any, weight_shapes: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """FLOPs of the product."""
    rows = 1
    for size in x_shape[:-1]:
        rows *= size
    return 2 * rows * x_shape[-1] * sum(shape[0] for shape in weight_shapes)


@register_flop_formula(torch.ops.stepscope.joint_projections_backward)
def _backward_flops(_dys: Any, x_shape: Any, weight_shapes: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """FLOPs of both products of backward."""
    return 2 * _flops(x_shape, weight_shapes)


class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        run = torch.ops.stepscope.joint_projections if watched(x, *parameters) else _product
        ctx.save_for_backward(x, *weights)
        ctx.bias_dtypes = [bias.dtype for bias in biases]
        ctx.of_biases = functools.reduce(torch.promote_types, ctx.bias_dtypes) if biases else None
        lengths = [weight.shape[0] for weight in weights]
        # A model may scale its queries in place, which autograd forbids of a function's several views.
        return tuple(torch.unsafe_split_with_sizes(run(x, list(weights), list(biases)), lengths, dim=-1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(_NAME)
        x, *weights = ctx.saved_tensors
        dys = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        rows = x.reshape(-1, x.shape[-1])
        run = torch.ops.stepscope.joint_projections_backward if watched(x, *dys, *weights) else _gradients
        dx, dweight, dbias = run(dys, rows, weights, ctx.of_biases)
        lengths = [weight.shape[0] for weight in weights]
        of_weights = dweight.to(weights[0].dtype).split(lengths)
        if ctx.of_biases is None:
            return dx.view(x.shape), None, *of_weights
        of_biases = (part.to(dtype) for part, dtype in zip(dbias.split(lengths), ctx.bias_dtypes, strict=True))
        return dx.view(x.shape), None, *of_weights, *of_biases


def joint_projections(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
    """x W_i^T + b_i for weights W_i (N_i, M) of one dtype and biases (N_i), none or one of each, as views of one tensor
    (..., sum N_i)."""
    weights = list(weights)
    if not weights or any(w.dim() != 2 or w.shape[1] != x.shape[-1] or w.dtype != weights[0].dtype for w in weights):
        shapes = ", ".join(f"{tuple(w.shape)} in {w.dtype}" for w in weights) or "none"
        raise InputError(f"{_NAME} takes x (..., M) and weights (N, M) of one dtype, not {tuple(x.shape)} and {shapes}")
    return _Joint.apply(x.to(autocast_dtype(x)), len(weights), *weights, *biases)


def patch_products(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The convolution of x (..., C, sizes) with a weight (N, C, kernel) whose stride is its kernel, as one product.

    A patch's results lie together in what it returns, (..., N, counts). What is left of a size that its kernel does not
    divide counts for nothing.
    """
    kernel = weight.shape[2:]
    first = x.dim() - len(kernel) - 1
    x = x.to(autocast_dtype(x))
    for axis, length in enumerate(kernel, first + 1):
        x = x.narrow(axis, 0, x.shape[axis] // length * length)
    for axis, length in enumerate(kernel):  # (..., C, count, length, count, length)
        x = x.unflatten(first + 1 + 2 * axis, (-1, length))
    counts, lengths = ([*range(first + 1 + of, x.dim(), 2)] for of in (0, 1))
    patches = x.permute(*range(first), *counts, first, *lengths).flatten(first + len(kernel))
    return F.linear(patches, weight.flatten(1), bias).movedim(-1, first)


# The swap in a model: query, key and value, or gate and up; and the embedding of patches.
#
# Linear layers of one module that are called with the same tensor, one after another: the first call computes all of
# them as one product, and the others take their part of it. Nothing else is assumed of the module. A group that is
# called with other tensors computes each by itself from then on.


JOINT_NAMES = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("to_q", "to_k", "to_v"), ("wq", "wk", "wv"),
    ("gate_proj", "up_proj"), ("w1", "w3"), ("wi_0", "wi_1"),
)  # fmt: skip
"""Names of linear layers of one module that may have one input."""


class Joint:
    """A group of linear layers, and their products of the input that is under way."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = tuple(layers)
        self.apart = False
        """Whether they were called with different tensors."""
        self.x: Tensor | None = None
        self.parts: dict[int, Tensor] = {}

    @property
    def biases(self) -> Sequence[Tensor]:
        """The biases of all layers, if each has one; else none."""
        biases = [layer.bias for layer in self.layers]
        return [] if any(bias is None for bias in biases) else biases

    def part(self, place: int, x: Tensor) -> Tensor | None:
        """The product of one of them; None where it is to compute it by itself."""
        if self.apart or (self.x is None and not all(map(_is_whole, self.layers))):
            return None
        if self.x is None:
            parts = joint_projections(x, [layer.weight for layer in self.layers], self.biases)
            self.x, self.parts = x, dict(enumerate(parts))
        if self.x is not x or place not in self.parts:
            self.apart, self.x, self.parts = True, None, {}
            return None
        part = self.parts.pop(place)
        if not self.parts:
            self.x = None
        return part


def _is_whole(layer: nn.Linear) -> bool:
    """Whether a layer's weight is what its own call would find: FSDP gathers it just before that, and a parametrization
    or a hook may compute it."""
    looks_on = (getattr(hook, "__module__", "").startswith("stepscope.") for hook in layer._forward_pre_hooks.values())
    return type(layer) is _JointLinear and all(looks_on)


class _JointLinear(nn.Linear):
    """A linear layer whose product is a part of its group's."""

    joint: Joint
    place: int

    def forward(self, input: Tensor) -> Tensor:
        part = self.joint.part(self.place, input)
        if part is None:
            return F.linear(input, self.weight, self.bias)
        return part if self.bias is None or self.joint.biases else part + self.bias.to(part.dtype)


class _PatchesAsRows(nn.modules.conv._ConvNd):
    """A convolution of patches as a product. What it does not take is its own, with its own errors."""

    def forward(self, input: Tensor) -> Tensor:
        kernel = self.kernel_size
        sizes = input.shape[-len(kernel) :]
        fits = len(kernel) + 1 <= input.dim() <= len(kernel) + 2 and input.shape[-len(kernel) - 1] == self.in_channels
        if not fits or any(size < length for size, length in zip(sizes, kernel, strict=True)):
            return super().forward(input)
        return patch_products(input, self.weight, self.bias)


class _PatchConv1d(_PatchesAsRows, nn.Conv1d): ...


class _PatchConv2d(_PatchesAsRows, nn.Conv2d): ...


class _PatchConv3d(_PatchesAsRows, nn.Conv3d): ...


_OF_PATCHES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: _PatchConv1d, nn.Conv2d: _PatchConv2d, nn.Conv3d: _PatchConv3d,
}  # fmt: skip
"""Convolutions, by what computes them as a product where they are of patches."""


def join_projections(model: nn.Module) -> Callable[[], None]:
    """Let groups of a model's linear layers, and its convolutions of patches, be one product each, in place; returns
    what undoes it. Raises InputError where there is none. Layers that are shared, hooked, adapted or parametrised are
    left alone."""
    groups = [Joint(layers) for _, layers, why in groups_of(model) if not why]
    convolutions = [layer for _, layer, why in convolutions_of(model) if not why]
    if not groups and not convolutions:
        every = (*groups_of(model), *convolutions_of(model))
        left = "; ".join(dict.fromkeys(f"{type(module).__name__}: {why}" for module, _, why in every))
        absent = "it has no linear layers of one input by the usual names, as q_proj, k_proj and v_proj, "
        absent += "and no convolution of patches"
        raise InputError(
            f"projections joint replaces nothing in {type(model).__name__}: {left or absent}; leave out --projections"
        )
    for group in groups:
        for place, layer in enumerate(group.layers):
            layer.__class__ = _JointLinear
            vars(layer).update(joint=group, place=place)
    for layer in convolutions:
        layer.__class__ = _OF_PATCHES[type(layer)]

    def undo() -> None:
        for layer in convolutions:
            layer.__class__ = next(kind for kind, of_patches in _OF_PATCHES.items() if type(layer) is of_patches)
        for group in groups:
            for layer in group.layers:
                layer.__class__ = class_again(type(layer), _JointLinear, nn.Linear)
                for name in ("joint", "place"):
                    vars(layer).pop(name, None)

    return undo


def class_again(kind: Any, replacement: type[nn.Module], original: type[nn.Module]) -> Any:
    """The class of a module whose replacement is taken back: its original, or what somebody made of the replacement
    since, as FSDP and parametrizations do, made of the original."""
    if kind is replacement or not issubclass(kind, replacement):
        return original if kind is replacement else kind
    body = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    bases = tuple(class_again(each, replacement, original) for each in kind.__bases__)
    made_by: Any = type(kind)
    return made_by(kind.__name__, bases, body)


def groups_of(model: nn.Module) -> Iterator[tuple[nn.Module, list[Any], str]]:
    """Modules with linear layers that may have one input, these layers, and why they cannot be one product; empty where
    they can."""
    times = _times_of_weights(model)
    for module in model.modules():
        children = dict(module.named_children())
        for names in JOINT_NAMES:
            layers = [children.get(name) for name in names]
            if all(getattr(getattr(layer, "weight", None), "ndim", 0) == 2 for layer in layers):
                reasons = (_why_apart(layer, layers[0], times) for layer in layers)
                yield module, layers, next(filter(None, reasons), "")


def convolutions_of(model: nn.Module) -> Iterator[tuple[nn.Module, Any, str]]:
    """Modules with a convolution that skips, as one of patches does, this convolution, and why it is no product of
    patches; empty where it is one."""
    times = _times_of_weights(model)
    for module in model.modules():
        for layer in module.children():
            if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) and max(layer.stride) > 1:
                yield module, layer, _why_no_product(layer, times)


def _why_no_product(layer: Any, times: Mapping[int, int]) -> str:
    """Why a convolution is no product of patches; empty where it is one."""
    if type(layer) not in _OF_PATCHES:
        return "it is a product already" if type(layer) in _OF_PATCHES.values() else f"it is a {type(layer).__name__}"
    reasons = (
        (layer.stride != layer.kernel_size, "its stride is not its kernel"),
        (layer.padding not in ("valid", (0,) * len(layer.kernel_size)), "it has padding"),
        (max(layer.dilation) > 1, "it has a dilation"),
        (layer.groups > 1, "it has groups"),
    )
    return next((why for holds, why in reasons if holds), "") or _why_left(layer, times)


def _times_of_weights(model: nn.Module) -> Counter[int]:
    """How often each parameter is held in a model."""
    return Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))


def _why_left(layer: Any, times: Mapping[int, int]) -> str:
    """Why a layer may not be computed by others, whatever it computes; empty where it may."""
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    reasons = (
        (type(layer.weight) is not nn.Parameter, "a weight is no plain parameter"),
        ("forward" in vars(layer), "one has a patched forward"),
        (any(hooks), "one has hooks"),
        (times[id(layer.weight)] != 1, "a weight is shared"),
    )
    return next((why for holds, why in reasons if holds), "")


def _why_apart(layer: Any, first: Any, times: Mapping[int, int]) -> str:
    """Why a layer is no part of one product with the first of its group; empty where it is."""
    if type(layer) is not nn.Linear:
        return "they are joint already" if isinstance(layer, _JointLinear) else f"one is of {type(layer).__name__}"
    reasons = (
        (type(first) is nn.Linear and layer.in_features != first.in_features, "their inputs have different widths"),
        (layer.weight.dtype != first.weight.dtype, "their weights have different dtypes"),
        (layer.weight.device != first.weight.device, "their weights lie on different devices"),
    )
    return _why_left(layer, times) or next((why for holds, why in reasons if holds), "")


def projections_found(model: nn.Module) -> list[PartFound]:
    """The modules whose projections or patches are one product, and those whose are not, by type and reason."""
    counts: Counter[tuple[str, str]] = Counter()
    for module, layers, why_apart in groups_of(model):
        joint = layers[0].joint if all(isinstance(layer, _JointLinear) for layer in layers) else None
        why = why_apart if joint is None else "they are called with different inputs" if joint.apart else ""
        counts[type(module).__name__, why] += 1
    for module, layer, why in convolutions_of(model):
        counts[type(module).__name__, "" if type(layer) in _OF_PATCHES.values() else why] += 1
    return [
        PartFound(part="projections", kernels="joint", type=kind, modules=count, replaced=not why, why=why)
        for (kind, why), count in counts.items()
    ]


def joined(model: nn.Module) -> list[Joint]:
    """The groups of a model that `join_projections` made."""
    groups = {id(each.joint): each.joint for each in model.modules() if isinstance(each, _JointLinear)}
    return [*groups.values()]
