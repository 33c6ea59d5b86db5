"""A dynamic loss scale, by the rule and the constants of torch.amp.GradScaler.

The loss is multiplied by a scale so that small gradients survive fp16 (`underflow.py`). Nobody knows the best scale
beforehand, and it changes; so it is tried out. A step whose gradients are not all finite is skipped, and the scale
multiplied by the backoff factor; after so many steps without an overflow (the growth interval) it is multiplied by the
growth factor (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from stepscope.core.errors import InputError
from stepscope.core.float_format import FORMATS
from stepscope.core.model_config import whole_number

INITIAL_SCALE = 2.0**16
GROWTH_FACTOR, BACKOFF_FACTOR = 2.0, 0.5


class DynamicLossScaler:
    """A loss scale that adapts itself, and leaves out steps whose gradients are not all finite.

    scaled(loss).backward(); step(optimizer); update() -- as with torch.amp.GradScaler, and to the same bits: the scale
    is a number of fp32, and gradients are multiplied by its reciprocal, rounded to fp32.
    """

    def __init__(
        self,
        *,
        initial_scale: float = INITIAL_SCALE,
        growth_factor: float = GROWTH_FACTOR,
        backoff_factor: float = BACKOFF_FACTOR,
        growth_interval: int = 2000,
    ) -> None:
        whole_number(growth_interval, "growth_interval", 1, 2**31 - 1)
        if not (math.isfinite(initial_scale) and initial_scale > 0):
            raise InputError(f"the initial loss scale is {initial_scale!r}: it must be positive and finite")
        if not (math.isfinite(growth_factor) and growth_factor > 1 and 0 < backoff_factor < 1):
            raise InputError(
                f"growth factor {growth_factor!r}, backoff factor {backoff_factor!r}: the first must be above 1, the "
                "second between 0 and 1"
            )
        self.scale = FORMATS["fp32"].round(initial_scale)
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval = growth_interval
        self.steps_since_change = 0
        """Steps in a row without an overflow, since the scale last changed."""
        self._overflowed = False

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the scale: what backward begins with."""
        return loss * self.scale

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Unscale the gradients in place and step, if all of them are finite. Returns whether the step was taken."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._overflowed = not all_finite(gradients)
        # 1 / scale overflows only for a scale that is a subnormal number of fp32; GradScaler then has infinity too.
        inverse = FORMATS["fp32"].round(1 / self.scale) if self.scale else math.inf
        for gradient in gradients:
            gradient.mul_(inverse)
        if not self._overflowed:
            optimizer.step()
        return not self._overflowed

    def update(self) -> None:
        """Let the scale back off, grow, or stay as it is. To be called after every step."""
        if self._overflowed:
            self.scale = FORMATS["fp32"].round(self.scale * self.backoff_factor)
            self.steps_since_change = 0
            return
        self.steps_since_change += 1
        if self.steps_since_change == self.growth_interval:
            grown = FORMATS["fp32"].round(self.scale * self.growth_factor)
            # A scale that would be infinite stays.
            self.scale = grown if math.isfinite(grown) else self.scale
            self.steps_since_change = 0


def all_finite(gradients: Iterable[Tensor]) -> bool:
    """Whether no gradient holds an infinity or NaN."""
    return all(bool(gradient.isfinite().all()) for gradient in gradients)
