"""Counts the optimizer's updates: a gradient scaler skips some, and a step without one takes less time."""

import torch
from torch import Tensor

from stepscope.core.evidence import Updates


def applied_updates(optimizer: torch.optim.Optimizer | None) -> int | None:
    """The fewest updates that any parameter has had, as the optimizer counts them; 0 where there were none.

    None without an optimizer, and with one that keeps no count.
    """
    if optimizer is None:
        return None
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [optimizer.state[parameter] for parameter in parameters if parameter in optimizer.state]
    if len(states) < len(parameters):
        return 0
    if any("step" not in state for state in states):
        return None
    counts = [state["step"] for state in states]
    if all(isinstance(count, Tensor) for count in counts):
        return int(torch.stack([count.reshape(()) for count in counts]).min())  # one wait for the device, not one each
    return min(int(count) for count in counts)


def read_updates(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, *, steps: int, before: int
) -> Updates | None:
    """The updates of `steps` steps to parameters that had `before` of them; None where the optimizer has no count."""
    after = applied_updates(optimizer)
    if after is None:
        return None
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    finite = torch.stack([parameter.detach().isfinite().all() for parameter in parameters]).all()
    return Updates(
        steps=steps,
        applied=after - before,
        loss_scale=float(scaler.get_scale()) if scaler.is_enabled() else None,
        parameters_finite=bool(finite),
    )
