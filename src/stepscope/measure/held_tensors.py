"""The tensors that a model and an optimizer hold between steps, wherever they keep them.

Not all lie where PyTorch's own lie. A hand-written optimizer may keep its state in attributes, a library nests it in
lists. A quantised weight is a plain parameter of bytes, whose scales are attributes of it or of its module
(bitsandbytes, HQQ), a module's buffers (GPTQ, AWQ), or a tensor made of others (torchao).
"""

from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stepscope.core.memory_notes import MemoryCategory
from stepscope.measure.local_part import local_part

_DEEPEST = 4
"""Containers and objects between an owner and its tensor."""
_ELSEWHERE = {"state", "param_groups", "defaults"}
_OF_MODULES = {"_parameters", "_buffers", "_modules"}
_PACKED = {"qweight", "weight_packed", "W_q"}
"""What libraries call weights of which several lie in one integer."""


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
        own = [*module.named_parameters(path, recurse=False), *module.named_buffers(path, recurse=False)]
        quantised = {name for name, tensor in own if _is_quantised(name, tensor)}
        for name, tensor in own:
            frozen = name in quantised or (quantised and not isinstance(tensor, nn.Parameter))
            yield "frozen quantised weights" if frozen else "parameters", name, tensor
        if quantised:
            attributes = {key: value for key, value in vars(module).items() if key not in _OF_MODULES}
            # One made of others has them as attributes, and as its parts already.
            plain = [
                (name, vars(tensor)) for name, tensor in own if name in quantised and len(plain_parts(tensor)) == 1
            ]
            for owner, within in [*plain, (path, attributes)]:
                for name, tensor in tensors_within(within):
                    yield "frozen quantised weights", f"{owner}.{name}".strip("."), tensor


def _is_quantised(name: str, tensor: Tensor) -> bool:
    """Whether a tensor of a module holds weights in 8 bits or fewer, none of which is trained."""
    if tensor.requires_grad:
        return False
    if name.rpartition(".")[2] in _PACKED:
        return True
    small = any(part.dtype.itemsize == 1 and part.dtype != torch.bool for part in plain_parts(tensor))
    return isinstance(tensor, nn.Parameter) and small


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: nn.Module, names: Mapping[int, str]
) -> Iterator[tuple[str, Tensor]]:
    """The state of an optimizer, named after its parameters, what it holds in attributes of its own, and weights of its
    own that stand for the model's 16-bit ones. names: those of the parameters, by id."""
    for parameter, state in optimizer.state.items():
        for path, tensor in tensors_within(state):
            yield f"{names.get(id(parameter), '?')}.{path}", tensor
    attributes = {key: value for key, value in vars(optimizer).items() if key not in _ELSEWHERE}
    # Its other objects may lead anywhere: to a trainer, and through it to the data.
    for path, tensor in tensors_within(attributes, objects=False):
        if id(tensor) not in names:
            yield path, tensor
    halves = {parameter.shape for parameter in model.parameters() if parameter.dtype.itemsize == 2}
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if id(tensor) not in names and tensor.dtype == torch.float32 and tensor.shape in halves:
                yield "master weights", tensor


def tensors_within(root: Any, *, objects: bool = True) -> Iterator[tuple[str, Tensor]]:
    """The tensors in an object's containers, each with its path. objects: in the attributes of what these hold, too,
    but for modules, functions and classes."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any, int]] = [("", root, 0)]
    while waiting:
        path, held, depth = waiting.pop()
        if isinstance(held, Tensor):
            yield path, held
        elif depth < _DEEPEST and id(held) not in seen:
            seen.add(id(held))
            waiting += [(f"{path}.{key}".strip("."), value, depth + 1) for key, value in _inside(held, objects)]


def _inside(held: Any, objects: bool) -> Iterable[tuple[Any, Any]]:
    if isinstance(held, Mapping):
        found = list(held.items())
        return [(key if isinstance(key, (str, int)) else place, value) for place, (key, value) in enumerate(found)]
    if isinstance(held, (list, tuple, set, frozenset)):
        return enumerate(held)
    if not objects or isinstance(held, (nn.Module, ModuleType, type)) or callable(held):
        return ()
    return list(getattr(held, "__dict__", {}).items())
