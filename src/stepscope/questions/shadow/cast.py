"""Runs some parts of a step in another precision, and all others as they were given."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from stepscope.questions.shadow.parts import LOSS, Part, Parts, nearest_inside
from stepscope.training.own.own_module import OwnModule


class CastLoss:
    """A loss function whose output can be computed in another precision."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        self._loss = loss
        self.low: torch.dtype | None = None
        """The dtype in which it computes; None as given."""
        # A step reads from the signature what the loss takes beside the output.
        with contextlib.suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
        self.__name__ = getattr(loss, "__name__", type(loss).__name__)

    def __call__(self, output: Any, *others: Any) -> Any:
        if self.low is None:
            return self._loss(output, *others)
        wide = _widest(output)
        return _raised(self._loss(_lowered(output, self.low), *_lowered(others, self.low)), self.low, wide)


def with_cast_loss(own: OwnModule) -> OwnModule:
    """The module with a loss that can be cast, where it has one outside of forward."""
    return own if own.loss is None else dataclasses.replace(own, loss=CastLoss(own.loss))


@contextlib.contextmanager
def computing_in(low: torch.dtype, own: OwnModule, parts: Sequence[Part], found: Parts) -> Iterator[None]:
    """While open, the own operators of these parts take inputs, parameters and buffers in `low`, and what they give is
    given on in its own dtype. Modules inside of them that are no such part compute as given."""
    with contextlib.ExitStack() as stack:
        guarded: list[tuple[nn.Module, _Cast]] = []
        for part in parts:
            if part.name == LOSS and isinstance(own.loss, CastLoss):
                own.loss.low = low
                stack.callback(setattr, own.loss, "low", None)
            for path in part.paths:
                module, inside = own.module.get_submodule(path), nearest_inside(path, found.called)
                cast = _Cast(low, _owners(own.module, path, found.called))
                stack.enter_context(_replaced_forward(module, cast.lowering))
                guarded += [(own.module.get_submodule(each), cast) for each in inside]
        # Outside of what lowers a module that is a part itself: it is raised first, which changes no number.
        for module, cast in guarded:
            stack.enter_context(_replaced_forward(module, cast.guarding))
        yield


class _Cast:
    """The cast of one module, while it runs."""

    def __init__(self, low: torch.dtype, owners: Sequence[nn.Module]) -> None:
        self._low, self._owners = low, owners
        self._given: list[torch.dtype] = []
        """The dtype that is given on, of each call that is open."""

    def lowering(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of the module: it computes in the lower dtype."""

        def run(*args: Any, **kwargs: Any) -> Any:
            tensors = [tensor for owner in self._owners for tensor in owner.parameters(recurse=False)]
            wide = _widest((args, kwargs, tensors))
            self._given.append(wide)
            try:
                with self._lowered_state():
                    output = forward(*_lowered(args, self._low), **_lowered(kwargs, self._low))
            finally:
                self._given.pop()
            return _raised(output, self._low, wide)

        return run

    def guarding(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a module inside: called by this one it computes as given."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._given:
                return forward(*args, **kwargs)
            wide = self._given[-1]
            output = forward(*_raised(args, self._low, wide), **_raised(kwargs, self._low, wide))
            return _lowered(output, self._low)

        return run

    @contextlib.contextmanager
    def _lowered_state(self) -> Iterator[None]:
        """While open, the module's parameters and buffers are copies, through which gradients come back."""
        kept: list[tuple[dict[str, Any], str, Any]] = []
        for owner in self._owners:
            for held in (owner._parameters, owner._buffers):
                for name, tensor in held.items():
                    if tensor is not None and _is_wider(tensor, self._low):
                        kept.append((held, name, tensor))
        try:
            for held, name, tensor in kept:
                held[name] = tensor.to(self._low)
            yield
        finally:
            for held, name, tensor in kept:
                held[name] = tensor


def _owners(model: nn.Module, path: str, called: frozenset[str]) -> list[nn.Module]:
    """The module, and those inside of it that never run: it takes their parameters itself."""
    module = model.get_submodule(path)
    inside = nearest_inside(path, called)
    found = [module]
    for below, other in module.named_modules(prefix=path):
        if other is not module and not any(below == each or below.startswith(f"{each}.") for each in inside):
            found.append(other)
    return found


@contextlib.contextmanager
def _replaced_forward(module: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    own = module.__dict__.get("forward")
    module.forward = make(module.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own  # type: ignore[method-assign]


def _is_wider(tensor: Tensor, low: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > low.itemsize


def _widest(value: Any) -> torch.dtype:
    found = [leaf.dtype for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return max(found, key=lambda dtype: dtype.itemsize, default=torch.get_default_dtype())


def _lowered(value: Any, low: torch.dtype) -> Any:
    return tree_map(lambda leaf: leaf.to(low) if isinstance(leaf, Tensor) and _is_wider(leaf, low) else leaf, value)


def _raised(value: Any, low: torch.dtype, wide: torch.dtype) -> Any:
    return tree_map(lambda leaf: leaf.to(wide) if isinstance(leaf, Tensor) and leaf.dtype == low else leaf, value)
