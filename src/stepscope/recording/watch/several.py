"""Stands in for the model of a loop that has none: several that train together, or tensors that belong to no module.

Each is a module to those who ask for parameters and parts, and keeps nothing of the loop alive.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

_kept: list[nn.Module] = []
"""Stand-ins for a model that were made. A watch holds its model weakly, so this list keeps them alive."""


class Several(nn.Module):
    """Models that train together, and that no module of the loop's holds."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._models = {name: weakref.ref(model) for name, model in models.items()}
        _kept.append(self)

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__.get("_models", {}).get(name, lambda: None)()
        return model if model is not None else super().__getattr__(name)

    def named_modules(self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        """This module and those inside its models, with their paths."""
        memo = set() if memo is None else memo
        yield prefix, self
        for name, reference in self._models.items():
            model = reference()
            if model is not None:
                yield from model.named_modules(memo, f"{prefix}.{name}" if prefix else name, remove_duplicate)


class Loose(nn.Module):
    """Tensors that train, and that belong to no module."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        _kept.append(self)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        """The tensors by their number, whether or not they are nn.Parameters."""
        alive = ((str(i), reference()) for i, reference in enumerate(self._tensors))
        yield from ((name, tensor) for name, tensor in alive if tensor is not None)
