"""Tells which parameters change over some steps, by digests: none is copied, and nothing waits for the device."""

from collections.abc import Iterable, Sequence

import torch

from stepscope.recording.local_part import local_part

_AT_ONCE = 2**22
"""Numbers that are cast to 64 bits at a time: 32 MiB, and as much for their squares."""
_AS_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Changes:
    """Parameters as they were when this was made, by their digests, and the learning rates of their groups."""

    def __init__(self, parameters: Iterable[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._before = {id(parameter): digest(parameter) for parameter in parameters}
        self._rates = [_rates(optimizer) for optimizer in optimizers]

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
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        return {
            id(parameter)
            for group, before in zip(groups, self._before_of(groups), strict=True)
            if before == _rate(group) == 0 and not float(group.get("initial_lr", 0.0))
            for parameter in group["params"]
        }

    def warming_up(self, optimizers: Sequence[torch.optim.Optimizer]) -> set[int]:
        """The ids of parameters whose learning rate rises, or is held at 0 by a scheduler: they may not change yet."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        return {
            id(parameter)
            for group, before in zip(groups, self._before_of(groups), strict=True)
            if (now := _rate(group)) is not None
            and ((before is not None and now > before) or (now == 0 and float(group.get("initial_lr", 0.0))))
            for parameter in group["params"]
        }

    def _before_of(self, groups: Sequence[dict[str, object]]) -> list[float | None]:
        """The learning rate that each group had; that of a group that was added since is not known."""
        before = [rate for rates in self._rates for rate in rates]
        return before if len(before) == len(groups) else [None] * len(groups)


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


def _rates(optimizer: torch.optim.Optimizer) -> list[float | None]:
    return [_rate(group) for group in optimizer.param_groups]


def _rate(group: dict[str, object]) -> float | None:
    """A group's learning rate, which may be a tensor; None where it has none."""
    rate = group.get("lr")
    return float(rate) if isinstance(rate, (int, float, torch.Tensor)) else None
