"""The optimizer's updates in some steps, and the parameters that change by them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stepscope.core.evidence import Updates
from stepscope.recording.held_tensors import local_part

_COUNTING = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)
"""Optimizers that count each parameter's updates from its first one on, whatever their settings."""


def applied_updates(optimizer: torch.optim.Optimizer | None) -> int | None:
    """The fewest updates of any parameter that has had one, as the optimizer counts them; 0 where none has had one.

    None where it cannot be known: without an optimizer, and with one that keeps no count, as SGD. A parameter without a
    state has got no gradient so far, and says nothing of the others.
    """
    if optimizer is None:
        return None
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = _states(optimizer)
    states = [kept[parameter] for parameter in parameters if parameter in kept]
    if any(not isinstance(state, Mapping) for state in states):  # of an optimizer of one's own
        return None
    states = [state for state in states if state]
    if not states:
        return 0 if isinstance(optimizer, _COUNTING) or getattr(optimizer, "counts_updates", False) else None
    if any("step" not in state for state in states):
        return None
    return min(_read(state["step"] for state in states))


def _states(optimizer: torch.optim.Optimizer) -> Mapping[Any, Any]:
    """What an optimizer keeps by parameter; nothing where one's own keeps its state in another way."""
    state = getattr(optimizer, "state", None)
    return state if isinstance(state, Mapping) else {}


def most_updates(optimizer: torch.optim.Optimizer | None) -> int | None:
    """The most updates that any parameter has had; None where the optimizer keeps no count, or has not stepped."""
    states = _states(optimizer).values() if optimizer is not None else ()
    counts = [state["step"] for state in states if isinstance(state, Mapping) and "step" in state]
    return max(_read(counts), default=None)


def _read(counts: Iterable[Any]) -> list[int]:
    """The counts as the host's numbers: tensors with one wait for the device, not one each."""
    counts = list(counts)
    if counts and all(isinstance(count, Tensor) for count in counts):
        counts = torch.stack([local_part(count).reshape(()) for count in counts]).tolist()
    return [int(count) for count in counts]


def read_updates(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    *,
    steps: int,
    before: int,
    gradient_norm: Tensor | None = None,
) -> Updates | None:
    """The updates of `steps` steps to parameters that had `before` of them; None where the optimizer has no count.
    gradient_norm: that of the last step, on its device, where gradients are clipped."""
    after = applied_updates(optimizer)
    if after is None:
        return None
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    finite = torch.stack([local_part(parameter.detach()).isfinite().all() for parameter in parameters]).all()
    return Updates(
        steps=steps,
        applied=after - before,
        loss_scale=float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None,
        parameters_finite=bool(finite),
        gradient_norm=float(gradient_norm) if gradient_norm is not None else None,
    )


def held_by(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """The ids of all tensors that these optimizers update."""
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


# Tells which parameters change over some steps, by digests: none is copied, and nothing waits for the device.


_AT_ONCE = 2**22
"""Numbers that are cast to 64 bits at a time: 32 MiB, and as much for their squares."""
_AS_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_Group = tuple[Sequence[Tensor], float | None, float | None, bool]
"""A group's parameters, its learning rate then and now, and whether a scheduler noted one above 0."""


class Changes:
    """Parameters as they were when this was made, by their digests, and the learning rates of their groups."""

    def __init__(self, parameters: Iterable[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._before = {id(parameter): digest(parameter) for parameter in parameters}
        self._rates = [_rate(group) for optimizer in optimizers for group in optimizer.param_groups]

    def unchanged(self, parameters: Iterable[torch.Tensor]) -> set[int]:
        """The ids of those of these parameters that were there before and have the same numbers now."""
        known = [parameter for parameter in parameters if id(parameter) in self._before]
        pairs = [(self._before[id(parameter)], digest(parameter)) for parameter in known]
        return {
            id(parameter)
            for parameter, (before, now) in zip(known, pairs, strict=True)
            if before.tolist() == now.tolist()
        }

    def at_rate_zero(self, optimizers: Sequence[torch.optim.Optimizer]) -> set[int]:
        """The ids of parameters whose group has had the learning rate 0 all the time, and that no scheduler holds
        there: it notes the rate that it began with."""
        return {
            id(parameter)
            for parameters, before, now, scheduled in self._groups(optimizers)
            if before == now == 0 and not scheduled
            for parameter in parameters
        }

    def warming_up(self, optimizers: Sequence[torch.optim.Optimizer]) -> set[int]:
        """The ids of parameters whose learning rate rises, or is held at 0 by a scheduler: they may not change yet."""
        return {
            id(parameter)
            for parameters, before, now, scheduled in self._groups(optimizers)
            if now is not None and ((before is not None and now > before) or (now == 0 and scheduled))
            for parameter in parameters
        }

    def _groups(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[_Group]:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        known = len(self._rates) == len(groups)  # else one was added since, and nobody knows which
        for group, before in zip(groups, self._rates if known else [None] * len(groups), strict=True):
            yield group["params"], before, _rate(group), bool(float(group.get("initial_lr", 0.0)))


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Two sums over a tensor's bits taken as integers, of themselves and of their squares, on its device: integers of
    64 bits that overflow, so that they are exact in any order. Equal numbers have equal digests."""
    numbers = local_part(tensor.detach())
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers)
    bits = numbers.view(_AS_INTEGERS[numbers.element_size()]).reshape(-1)
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for part in bits.split(_AT_ONCE):
        wide = part.to(torch.int64)
        sums[0] += wide.sum()
        sums[1] += (wide * wide).sum()  # not in place: integers of 64 bits are the parameter itself
    return sums


def _rate(group: dict[str, object]) -> float | None:
    """A group's learning rate, which may be a tensor; None where it has none."""
    rate = group.get("lr")
    return float(rate) if isinstance(rate, (int, float, torch.Tensor)) else None
