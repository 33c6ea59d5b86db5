"""Counts the optimizer's updates: a gradient scaler skips some, and a step without one takes less time."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from stepscope.core.evidence import Updates
from stepscope.recording.local_part import local_part

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
    counts = [state["step"] for state in states]
    if all(isinstance(count, Tensor) for count in counts):
        return int(
            torch.stack([local_part(count).reshape(()) for count in counts]).min()
        )  # one wait for the device, not one each
    return min(int(count) for count in counts)


def _states(optimizer: torch.optim.Optimizer) -> Mapping[Any, Any]:
    """What an optimizer keeps by parameter; nothing where one's own keeps its state in another way."""
    state = getattr(optimizer, "state", None)
    return state if isinstance(state, Mapping) else {}


def most_updates(optimizer: torch.optim.Optimizer | None) -> int | None:
    """The most updates that any parameter has had; None where the optimizer keeps no count, or has not stepped."""
    states = _states(optimizer).values() if optimizer is not None else ()
    counts = [state["step"] for state in states if isinstance(state, Mapping) and "step" in state]
    if not counts:
        return None
    if all(isinstance(count, Tensor) for count in counts):
        return int(torch.stack([local_part(count).reshape(()) for count in counts]).max())
    return max(int(count) for count in counts)


def read_updates(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None, *, steps: int, before: int,
    gradient_norm: Tensor | None = None,
) -> Updates | None:  # fmt: skip
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
