"""Functions of autograd and torch.func, which transforms only those that set their context apart from their forward."""

import torch

from stepscope.core.errors import InputError


def transformed_by_func() -> bool:
    """Whether a transformation of torch.func (`grad`, `vmap`, `jvp`) is active; a compiler handles that by itself."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def refuse_transforms(name: str, instead: str) -> None:
    """Raise an InputError, one line, inside a transformation of torch.func."""
    if transformed_by_func():
        raise InputError(f"{name} cannot be transformed by torch.func (grad, vjp, vmap, jvp): take {instead}")
