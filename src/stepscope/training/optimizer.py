"""The step that our optimizers have in common, and AdamW whose state takes half the memory: both moments in bf16."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor


class Updating(torch.optim.Optimizer, ABC):
    """An optimizer that says how parameters are updated. No `step` calls another: PyTorch wraps that of each class, and
    hooks would run twice."""

    max_norm: float | None = None
    """The bound to which it clips the gradients' global norm, in its own pass over them; None where it does not."""

    @property
    def gradient_norm(self) -> Tensor | None:
        """The norm of the last gradients before it clipped them, on the device; None where it measured none."""
        return None

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; returns what `closure`, run first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_all()
        return loss

    @abstractmethod
    def _update_all(self) -> None:
        """Update every parameter that has a gradient."""


class OneByOne(Updating):
    """An optimizer that updates one parameter after another, from its gradient in fp32."""

    def _update_all(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad.float(), group)

    @abstractmethod
    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None: ...


class AdamWBf16State(OneByOne):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) with exp_avg and exp_avg_sq stored in bf16.

    Arithmetic is fp32, one parameter at a time, in at most two fp32 temporaries of that parameter's size (and a third,
    its gradient's copy, where gradients are not fp32).

    The second moment is rounded stochastically. With beta2 = 0.999 it moves by a thousandth of itself in a step, and
    half a unit in the last of bf16's 8 bits is two to four: rounded to nearest, it would never decay again. The first
    moves by a tenth, and is rounded to nearest.
    """

    counts_updates = True
    """Each parameter's state has its count of updates from the first one on."""

    def __init__(
        self, parameters: Iterable[Tensor], *, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 1e-2,
    ) -> None:  # fmt: skip
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), lr = group["betas"], group["lr"]
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        square = state["exp_avg_sq"].float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        round_stochastically(square, into=state["exp_avg_sq"])
        denominator = square.div_(1 - beta2 ** state["step"]).sqrt_().add_(group["eps"])
        average = state["exp_avg"].float().lerp_(gradient, 1 - beta1)
        state["exp_avg"].copy_(average)
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.addcdiv_(average, denominator, value=-lr / (1 - beta1 ** state["step"]))


def round_stochastically(values: Tensor, *, into: Tensor) -> None:
    """Write fp32 values to a bf16 tensor, up or down at random so that the expected value is exact.

    bf16 is the upper half of fp32's bits: a random lower half is added, and the lower half of the sum dropped.
    """
    bits = torch.randint(1 << 16, values.shape, dtype=torch.int32, device=values.device)
    bits.add_(values.view(torch.int32)).bitwise_and_(-(1 << 16))
    into.copy_(bits.view(torch.float32))
