"""What a loop called while it was looked at: modules, updates, and which calls a backward came to.

Nothing here keeps a module, an optimizer or a tensor of the loop alive.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from stepscope.recording.held_tensors import local_part
from stepscope.recording.weakly import weakly


@dataclass(frozen=True)
class TensorSeen:
    """A tensor that the module's forward took."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(kw_only=True, eq=False)
class CallSeen:
    """A call of a module by the loop itself, with gradients on; no other module made it."""

    module: nn.Module | None = weakly(or_none=True)  # noqa: RUF009  (a descriptor, not a value)
    """None where it is no more, as a loss that is made anew for each batch."""
    training: bool = True
    in_closure: bool = False
    """Whether it ran inside an optimizer's step."""
    autocast: str | None = None
    """The dtype of autocast round the call or inside it; None without."""
    inputs: dict[str, TensorSeen] = field(default_factory=dict[str, TensorSeen])
    """Tensors that the module took, by their place or their name."""
    sizes: set[int] = field(default_factory=set[int])
    """The first sizes of what it returned."""
    reached: bool = False
    """Whether a backward has come to what it returned. None comes to a call that a log makes."""
    dropped: bool = False
    """Whether the gradients that its backward made were gone before the next one, so that they are summed up in no
    update: the first of the two passes of sharpness-aware minimisation, whose samples come again in the second."""

    @property
    def takes_one_sample(self) -> bool:
        """Whether its one tensor is a sample without a dimension for the batch: a layer takes all of it as features, or
        nothing that it returned has its size."""
        tensors = list(self.inputs.values())
        if len(tensors) != 1 or len(tensors[0].shape) != 1 or not tensors[0].dtype.startswith(("float", "bfloat")):
            return False
        (size,) = tensors[0].shape
        parts = self.module.modules() if self.module is not None else ()
        layers = [each for each in parts if isinstance(each, nn.Linear)]
        return any(layer.in_features == size > 1 for layer in layers) or bool(self.sizes and size not in self.sizes)


@dataclass(kw_only=True)
class ModuleSeen:
    """A module that the loop itself called in a step, and its calls."""

    module: nn.Module
    made: list[CallSeen] = field(default_factory=list[CallSeen])
    """Its calls that a backward came to; all, where none was."""

    @property
    def calls(self) -> int:
        return len(self.made)

    @property
    def training(self) -> bool:
        return self.made[0].training

    @property
    def autocast(self) -> str | None:
        return next((call.autocast for call in self.made if call.autocast), None)

    @property
    def inputs(self) -> dict[str, set[TensorSeen]]:
        """Tensors that the module took, by their place or their name."""
        inputs: dict[str, set[TensorSeen]] = {}
        for call in self.made:
            for name, tensor in call.inputs.items():
                inputs.setdefault(name, set()).add(tensor)
        return inputs

    @property
    def takes_one_sample(self) -> bool:
        return bool(self.made) and all(call.takes_one_sample for call in self.made)


@dataclass(frozen=True)
class BackwardSeen:
    """A backward, as autograd's engine ran it."""

    in_closure: bool
    adds: bool
    """Whether it adds to the gradients that parameters hold, as `torch.autograd.grad` does not."""


@dataclass(kw_only=True)
class UpdateSeen:
    """What ran between the update before this one and its end. A closure runs inside the optimizer's step."""

    optimizer: torch.optim.Optimizer | None = weakly(or_none=True)  # noqa: RUF009  (a descriptor)
    """The optimizer that stepped; None until one has, and where the loop says itself that a step has ended."""
    calls: list[CallSeen] = field(default_factory=list[CallSeen])
    backwards: list[BackwardSeen] = field(default_factory=list[BackwardSeen])

    def evaluations_of(self, module: nn.Module) -> int:
        """How often the closure ran forward of this module, and backward."""
        return min(self._sums(in_closure=True), len(self._of(module, in_closure=True)))

    def batches_of(self, module: nn.Module) -> list[CallSeen]:
        """The calls of this module, each with other samples: of those in a closure, the calls of one evaluation."""
        inside = self._of(module, in_closure=True)
        once = -(-len(inside) // max(1, self.evaluations_of(module)))
        return self._of(module, in_closure=False) + inside[:once]

    def micro_batches_of(self, module: nn.Module) -> int:
        """The number of batches whose gradients add up. A closure is evaluated again and again on one batch."""
        inside = min(1, self.evaluations_of(module))
        return max(1, min(self._sums(in_closure=False), len(self._of(module, in_closure=False))) + inside)

    def begins_backward(self, backward: BackwardSeen) -> None:
        """Note a backward that begins."""
        if any(each.adds for each in self.backwards if not each.in_closure) and self._gradients_are_gone():
            for call in self.calls:
                call.dropped = call.dropped or (call.reached and not call.in_closure)
        self.backwards.append(backward)

    def _gradients_are_gone(self) -> bool:
        """Whether none of the parameters that backward came to in this update has a gradient now, or all hold zeros. A
        graph that is being captured cannot be asked for numbers."""
        reached = [call.module for call in self.calls if call.reached]
        modules = {id(module): module for module in reached if module is not None}
        gradients = [p.grad for module in modules.values() for p in module.parameters() if p.grad is not None]
        on_gpu = any(gradient.is_cuda for gradient in gradients)
        if not modules or (on_gpu and torch.cuda.is_current_stream_capturing()):
            return False
        return not any(gradient.is_sparse or bool(local_part(gradient).any()) for gradient in gradients)

    def _sums(self, *, in_closure: bool) -> int:
        """Backwards that add to gradients. What `torch.autograd.grad` returns is usually a part of the loss, as a
        penalty on gradients is; it counts where nothing else runs."""
        there = [each for each in self.backwards if each.in_closure is in_closure]
        return sum(each.adds for each in there) or len(there)

    def _of(self, module: nn.Module, *, in_closure: bool) -> list[CallSeen]:
        calls = _that_count([call for call in self.calls if call.module is module])
        return [call for call in calls if call.in_closure is in_closure and not call.dropped]


@dataclass(kw_only=True)
class LoopSeen:
    """What a loop called, update by update."""

    updates: list[UpdateSeen] = field(default_factory=lambda: [UpdateSeen()])
    """Each update in turn, and last what ran after them."""
    called_quietly: WeakValueDictionary[int, nn.Module] = field(default_factory=WeakValueDictionary[int, nn.Module])
    """Modules that the loop itself called with gradients off, by their ids."""
    leaves: WeakValueDictionary[int, torch.Tensor] = field(default_factory=WeakValueDictionary[int, torch.Tensor])
    """Tensors that got a gradient from a loss that no module had a part in, by their ids."""

    @property
    def quiet(self) -> list[nn.Module]:
        """The modules that the loop itself called with gradients off."""
        return list(self.called_quietly.values())

    @property
    def backwards(self) -> int:
        return sum(len(update.backwards) for update in self.updates)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that stepped, in the order of their last steps."""
        last = {id(update.optimizer): update.optimizer for update in reversed(self.updates) if update.optimizer}
        return list(reversed(last.values()))

    @property
    def turns(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizer of each update."""
        return tuple(update.optimizer for update in self.updates if update.optimizer is not None)

    @property
    def modules(self) -> list[ModuleSeen]:
        """The modules that were called with gradients on, in the order of their first calls."""
        calls: dict[int, tuple[nn.Module, list[CallSeen]]] = {}
        for call in (call for update in self.updates for call in update.calls):
            if (module := call.module) is not None:
                calls.setdefault(id(module), (module, []))[1].append(call)
        return [ModuleSeen(module=module, made=_that_count(made)) for module, made in calls.values()]

    def last(self, updates: int) -> "LoopSeen":
        """The last updates alone."""
        done = self.updates[:-1][-updates:]
        return LoopSeen(updates=[*done, self.updates[-1]], called_quietly=self.called_quietly, leaves=self.leaves)

    def update_by(self, optimizer: torch.optim.Optimizer) -> UpdateSeen:
        """The update of this optimizer, with the backward that made its gradients. Another optimizer may step between
        that backward and this update, or the step that was looked at may have begun there."""
        turns = self.updates
        last = max((i for i, each in enumerate(turns) if each.optimizer is optimizer), default=len(turns) - 1)
        before = [*turns[last + 1 :], *turns[: last + 1]]
        return next((each for each in reversed(before) if each.backwards), before[-1])


def _that_count(calls: Sequence[CallSeen]) -> list[CallSeen]:
    """The calls that a backward came to; all, where none was."""
    return [call for call in calls if call.reached] or list(calls)


# Stands in for the model of a loop that has none: several that train together, or tensors that belong to no module.
#
# Each is a module to those who ask for parameters and parts, and keeps nothing of the loop alive.


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
