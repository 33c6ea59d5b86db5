"""Looks at what trains: which parameters get a gradient, and which of those do not change."""

import contextlib
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from stepscope.core.evidence import Unchanged
from stepscope.recording.changes import Changes
from stepscope.recording.local_part import local_part
from stepscope.recording.updates import held_by, most_updates
from stepscope.recording.weakly import weakly, weakly_each

_NEGLIGIBLE = 1e-6
"""A gradient is no more than rounding whose root mean square is such a share of the largest: that of a bias before a
norm, for instance, is zero by design."""


class Training:
    """The parameters that some steps train: of the model, those that an optimizer holds; all, where it holds none.

    An average of the weights, a teacher or a frozen part is held by no optimizer, and is judged by nothing here.
    Nothing of the loop is kept alive.
    """

    _model: nn.Module = weakly()
    _optimizers: Sequence[torch.optim.Optimizer] = weakly_each()

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], changes: Changes | None = None
    ) -> None:
        self._held = held_by(optimizers)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        held = [(name, p) for name, p in named if id(p) in self._held]
        self._parameters: WeakValueDictionary[str, nn.Parameter] = WeakValueDictionary(held or named)
        self._model, self._optimizers, self._changes = model, optimizers, changes
        self._before: dict[int, torch.Tensor | None] = {}
        """The norms of the gradients before the update that runs, by the ids of their parameters; None where one is
        sparse."""
        self._norms: dict[int, torch.Tensor] = {}
        """The norm of the gradient that each parameter's last update took."""
        self._with_gradient: set[int] = set()
        self._steps = self._updates = 0
        self._counted: int | None = None
        self._hooks = contextlib.ExitStack()

    def begin(self) -> None:
        """Begin to look, before the first of the steps; later calls count the steps."""
        self._steps += 1
        if self._steps > 1:
            return
        if self._changes is None:
            self._changes = Changes(self._parameters.values(), self._optimizers)
        self._counted = self._count()
        for optimizer in self._optimizers:
            # A scaler that leaves an update out does not call the optimizer's step.
            self._hooks.callback(optimizer.register_step_post_hook(self._count_update).remove)

    def end(self) -> None:
        """Take the hooks off."""
        self._hooks.close()

    def look_at_gradients(self) -> None:
        """Look at the gradients that an update is about to take. What other models' losses left beside them counts
        nothing: a critic gets gradients from its generator's loss too, which its own update never takes."""
        self._before = {id(p): _norm(p.grad) for p in self._parameters.values() if p.grad is not None}

    def without_gradient(self) -> list[str]:
        """The parameters that had no gradient before any update; all of them, where every gradient holds zeros. Empty
        where no update was seen, or where gradients are gone once they have been used."""
        if not self._updates or (not self._with_gradient and not self._nothing_changed()):
            return []
        if self._with_gradient and not any(self._sizes().values()) and self._nothing_changed():
            return list(self._parameters)
        return [name for name, p in self._parameters.items() if id(p) not in self._with_gradient]

    @property
    def has_gradients(self) -> bool:
        """Whether every parameter had a gradient, be it of zeros."""
        return all(id(p) in self._with_gradient for p in self._parameters.values())

    def is_called(self, module: str) -> bool:
        """Whether the step calls this module, as gradients in it, or round it, show."""
        near = self._model.get_submodule(module)
        if next(near.parameters(), None) is None:
            near = self._model.get_submodule(nearest_with_parameters(self._model, module))
        return not self._with_gradient or any(id(p) in self._with_gradient for p in near.parameters())

    def unchanged(self, named: int) -> Unchanged | None:
        """The parameters that get gradients and did not change, the first few by name; None where every one changed, no
        update was made, or it cannot be told."""
        made = self._count()
        if self._changes is None or not self._updates or (made is not None and made == self._counted):
            return None
        same = self._changes.unchanged(p for p in self._parameters.values() if not self._has_a_master(p))
        same -= self._changes.warming_up(self._optimizers)
        sizes = self._sizes()
        enough = _NEGLIGIBLE * max((size for size in sizes.values() if size < float("inf")), default=0.0)
        judged = {
            name: p
            for name, p in self._parameters.items()
            if id(p) in same and id(p) in self._with_gradient and sizes.get(id(p), 1.0) > enough
        }
        if not judged:
            return None
        at_zero = self._changes.at_rate_zero(self._optimizers)
        dtypes = {str(p.dtype).removeprefix("torch.") for p in judged.values()}
        return Unchanged(
            parameters=len(self._parameters), count=len(judged), names=tuple(judged)[:named],
            at_rate_zero=sum(id(p) in at_zero for p in judged.values()), dtypes=tuple(sorted(dtypes)),
            held=not self._optimizers or any(id(p) in self._held for p in judged.values()),
        )  # fmt: skip

    def _has_a_master(self, parameter: torch.Tensor) -> bool:
        """Whether an optimizer updates a copy of this parameter, and writes the copy's rounding into it."""
        states: list[Any] = [optimizer.state.get(parameter) for optimizer in self._optimizers]
        return any("master" in str(name) for state in states if isinstance(state, dict) for name in state)

    def _nothing_changed(self) -> bool:
        same = self._changes.unchanged(self._parameters.values()) if self._changes is not None else set()
        return len(same) == len(self._parameters) > 0

    def _sizes(self) -> dict[int, float]:
        """The root mean square of each gradient."""
        numbers = {id(p): p.numel() for p in self._parameters.values()}
        return {key: float(norm) / max(1, numbers[key]) ** 0.5 for key, norm in self._norms.items()}

    def _count(self) -> int | None:
        """Updates that the optimizers themselves count; None where one of them keeps no count."""
        counts = [most_updates(optimizer) for optimizer in self._optimizers]
        return sum(count or 0 for count in counts) if counts and None not in counts else None

    def _count_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._updates += 1
        taken = held_by([optimizer])
        for key, norm in self._before.items():
            if key in taken or key not in self._held:
                self._with_gradient.add(key)
                if norm is not None:
                    self._norms[key] = norm


def _norm(gradient: torch.Tensor) -> torch.Tensor | None:
    """The norm of a gradient, or of this rank's part of it; None where it is sparse."""
    if gradient.is_sparse:
        return None
    numbers = local_part(gradient.detach())
    return torch.linalg.vector_norm(numbers, dtype=torch.promote_types(numbers.dtype, torch.float32))


def nearest_with_parameters(model: nn.Module, name: str) -> str:
    """The path of the nearest module round this one that has parameters."""
    while name:
        name = name.rpartition(".")[0]
        if next(model.get_submodule(name).parameters(), None) is not None:
            return name
    return name
