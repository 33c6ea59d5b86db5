"""The tensors that a model and an optimizer hold between steps."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from stepscope.core.evidence import MemoryCategory

# This rank's part of a tensor that is spread over several, and the size of the whole.


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part; any other tensor itself. Nothing is communicated, and nothing waited for."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)  # importing DTensor takes half a second
    part = to_local() if to_local is not None else tensor
    return getattr(part, "elem", part)  # what a collective still fills (AsyncCollectiveTensor) wraps a plain tensor


_WHOLE = "_whole_numel"


def mark_part(tensor: Tensor, whole_numel: int) -> None:
    """Let a tensor that is no DTensor say how many numbers the whole has of which it is a part."""
    setattr(tensor, _WHOLE, whole_numel)


def whole_numel(tensor: Tensor) -> int:
    """The numbers in the whole of which this tensor is a part, or in the tensor."""
    return getattr(tensor, _WHOLE, tensor.numel())


# The tensors that a model and an optimizer hold between steps, wherever they keep them.
#
# Not all lie where PyTorch's own lie. A hand-written optimizer may keep its state in attributes, a library nests it in
# lists. A quantised weight is a plain parameter of bytes, whose scales are attributes of it or of its module
# (bitsandbytes, HQQ), a module's buffers (GPTQ, AWQ), or a tensor made of others (torchao).

_FIRST_BUCKET = 2**20
"""Bytes of DistributedDataParallel's first bucket."""
_DEEPEST = 4
"""Objects between an owner and its tensor; containers are followed to their end."""
_ELSEWHERE = {"state", "param_groups", "defaults"}
_OF_MODULES = {"_parameters", "_buffers", "_modules"}
_PACKED = {"qweight", "weight_packed", "W_q"}
"""What libraries call weights of which several lie in one integer."""
_WEIGHT = re.compile(r"(?:\w+_)?weight(?:_q\w*|_int\w*)?")
"""A buffer of this name is a weight where its numbers have 8 bits; others are masks or codes."""


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors with memory of which one consists: this rank's part, or the inner ones of one made of others, whose
    own storage has a size and no memory."""
    part = local_part(tensor)
    if not is_traceable_wrapper_subclass(part):
        return [part]
    inner, _ = part.__tensor_flatten__()
    return [each for name in inner for each in plain_parts(getattr(part, name))]


def model_tensors(model: nn.Module) -> Iterator[tuple[MemoryCategory, str, Tensor]]:
    """Parameters and buffers by name; those of modules with quantised weights apart, with all that goes with them."""
    for path, module in model.named_modules(remove_duplicate=True):
        named = [*module.named_parameters(path, recurse=False), *module.named_buffers(path, recurse=False)]
        quantised = {name for name, tensor in named if _is_quantised(name, tensor)}
        for name, tensor in named:
            frozen = name in quantised or (quantised and not isinstance(tensor, nn.Parameter))
            yield "frozen quantised weights" if frozen else "parameters", name, tensor
        if quantised:
            attributes = {key: value for key, value in vars(module).items() if key not in _OF_MODULES}
            # One made of others has them as attributes, and as its parts already.
            plain = [
                (name, vars(tensor)) for name, tensor in named if name in quantised and len(plain_parts(tensor)) == 1
            ]
            for owner, within in [*plain, (path, attributes)]:
                for name, tensor in tensors_within(within):
                    yield "frozen quantised weights", f"{owner}.{name}".strip("."), tensor


def _is_quantised(name: str, tensor: Tensor) -> bool:
    """Whether a tensor of a module holds weights in 8 bits or fewer, none of which is trained."""
    if tensor.requires_grad:
        return False
    last = name.rpartition(".")[2]
    if last in _PACKED:
        return True
    small = any(part.dtype.itemsize == 1 and part.dtype != torch.bool for part in plain_parts(tensor))
    return small and (isinstance(tensor, nn.Parameter) or bool(_WEIGHT.fullmatch(last)))


def gradient_buckets(model: nn.Module) -> tuple[list[Tensor], bool]:
    """New tensors like the buckets that DistributedDataParallel has of the gradients, from its last parameter on: the
    first is full at 1 MiB (torch/nn/parallel/distributed.py). And whether the gradients are views of them."""
    wrapped = [module for module in model.modules() if isinstance(module, nn.parallel.DistributedDataParallel)]
    buckets: list[Tensor] = []
    for each in wrapped:
        limit, by_dtype = _FIRST_BUCKET, dict[torch.dtype, int]()
        for parameter in reversed([p for p in each.module.parameters() if p.requires_grad]):
            dtype = parameter.dtype
            by_dtype[dtype] = by_dtype.get(dtype, 0) + parameter.numel()
            if by_dtype[dtype] * dtype.itemsize >= limit:
                buckets.append(torch.empty(by_dtype.pop(dtype), dtype=dtype))
                limit = each.bucket_bytes_cap
        buckets += [torch.empty(count, dtype=dtype) for dtype, count in by_dtype.items()]
    return buckets, any(each.gradient_as_bucket_view for each in wrapped)


def optimizer_tensors(
    optimizer: torch.optim.Optimizer | None, model: nn.Module, names: Mapping[int, str]
) -> Iterator[tuple[str, Tensor]]:
    """What an optimizer keeps, named after its parameters: its state, wherever it is, and that of optimizers and copies
    of the model that it holds; weights of its own that stand for the model's 16-bit ones. names: those of the model's
    parameters, by id."""
    halves = {parameter.shape for parameter in model.parameters() if parameter.dtype.itemsize == 2}
    visited: set[int] = set()
    waiting = [] if optimizer is None else [optimizer]
    while waiting:
        held = waiting.pop()
        if id(held) in visited:
            continue
        visited.add(id(held))
        state, groups = getattr(held, "state", {}), getattr(held, "param_groups", ())
        for parameter, its in state.items() if isinstance(state, Mapping) else [(None, state)]:
            for path, tensor in tensors_within(its):
                yield f"{names.get(id(parameter), '?')}.{path}", tensor
        attributes = {key: value for key, value in vars(held).items() if key not in _ELSEWHERE}
        more = {key: value for group in groups for key, value in group.items() if key != "params"}
        for path, tensor in tensors_within([attributes, more], objects=1, others=waiting):
            if id(tensor) not in names:
                yield path.partition(".")[2], tensor
        for tensor in (each for group in groups for each in group["params"]):
            if id(tensor) in names:
                # An optimizer may keep tensors in attributes of a parameter. One made of others has its parts there,
                # and a library its own under names with an underscore.
                for key, kept in () if is_traceable_wrapper_subclass(tensor) else vars(tensor).items():
                    if isinstance(kept, Tensor) and "grad" not in key and not key.startswith("_"):
                        yield f"{names[id(tensor)]}.{key}", kept
            elif tensor.dtype == torch.float32 and tensor.shape in halves:
                yield "master weights", tensor


def tensors_within(
    root: Any, *, objects: int = _DEEPEST, others: list[torch.optim.Optimizer] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors in an object's containers, each with its path, and in what these hold, so many objects deep: not in
    functions and classes, nor in what holds a module, as a trainer does.

    others: where given, the optimizers found are put here, and modules are entered, too.
    """
    visited: set[int] = set()
    waiting: list[tuple[str, Any, int]] = [("", root, objects)]
    while waiting:
        path, held, left = waiting.pop()
        if isinstance(held, Tensor):
            yield path, held
        elif others is not None and isinstance(held, torch.optim.Optimizer):
            others.append(held)
        elif others is not None and isinstance(held, nn.Module):
            named = [*held.named_parameters(), *held.named_buffers()]
            yield from ((f"{path}.{name}", tensor) for name, tensor in named)
        elif id(held) not in visited:
            visited.add(id(held))
            inside: Iterable[tuple[Any, Any]] = ()
            if isinstance(held, Mapping):
                items = enumerate(list(held.items()))
                inside = [(key if isinstance(key, (str, int)) else place, value) for place, (key, value) in items]
            elif isinstance(held, (list, tuple, set, frozenset)):
                inside = enumerate(held)
            elif left and not isinstance(held, (nn.Module, ModuleType, type, TorchDispatchMode)) and not callable(held):
                slots = [name for kind in type(held).__mro__ for name in vars(kind).get("__slots__", ())]
                attributes = {name: getattr(held, name, None) for name in slots} | getattr(held, "__dict__", {})
                left -= 1
                if not any(isinstance(value, nn.Module) for value in attributes.values()):
                    inside = list(attributes.items())
            waiting += [(f"{path}.{key}".strip("."), value, left) for key, value in [*inside][::-1]]
