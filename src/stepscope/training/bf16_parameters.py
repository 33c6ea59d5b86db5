"""AdamW for parameters in bf16, with four ways to keep the part of an update that bf16 cannot hold."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from stepscope.core.errors import InputError, choose
from stepscope.training.optimizer import OneByOne, round_stochastically

Keeping = Literal["nearest", "stochastic", "kahan", "master"]
"""nearest: the new parameter is rounded to bf16, and the rest is lost. stochastic: it is rounded up or down at random,
so that the expected value is exact. kahan: the rest is kept in a second bf16 tensor and added to the next update
(Zamirai et al. 2020, arXiv:2010.06192, algorithm 3). master: an fp32 copy is updated, the parameter is its rounding
(Micikevicius et al. 2018, arXiv:1710.03740, section 3.1)."""

KEEPINGS: tuple[Keeping, ...] = get_args(Keeping)

Watch = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""A function that is called after each parameter's update, with the parameter and three fp32 tensors: its held value
before (`held`), the update that was wanted, and the one that was made, by which the held value changed."""


class AdamWBf16Parameters(OneByOne):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) on bf16 parameters, its moments and its arithmetic in fp32.

    The four ways differ only in how the new parameter is stored.
    """

    def __init__(
        self, parameters: Iterable[Tensor], *, keeping: Keeping = "nearest", lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2,
        watch: Watch | None = None,
    ) -> None:  # fmt: skip
        choose(keeping, KEEPINGS, "keeping")
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.dtype != torch.bfloat16:
                raise InputError(f"a parameter of {parameter.dtype} was given to keep in bf16: convert the model first")
        self.keeping, self.watch = keeping, watch

    @torch.no_grad()
    def held(self, parameter: Tensor) -> Tensor:
        """The parameter as exactly as it is kept, in fp32."""
        state = self.state[parameter]
        if "master" in state:
            return state["master"].clone()
        if "lost" in state:
            return parameter.float() + state["lost"].float()
        return parameter.float()

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), lr = group["betas"], group["lr"]
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(gradient)
            state["exp_avg_sq"] = torch.zeros_like(gradient)
            if self.keeping == "master":
                state["master"] = parameter.float()
            elif self.keeping == "kahan":
                state["lost"] = torch.zeros_like(parameter)
        state["step"] += 1
        average = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (square / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        before = self.held(parameter)
        wanted = (before * (-lr * group["weight_decay"])).addcdiv_(
            average, denominator, value=-lr / (1 - beta1 ** state["step"])
        )
        self._store(parameter, before + wanted, state)
        if self.watch is not None:
            self.watch(parameter, before, wanted, self.held(parameter) - before)

    def _store(self, parameter: Tensor, exact: Tensor, state: dict[str, Any]) -> None:
        if self.keeping == "stochastic":
            round_stochastically(exact, into=parameter)
            return
        parameter.copy_(exact)
        if self.keeping == "kahan":
            state["lost"].copy_(exact - parameter.float())
        elif self.keeping == "master":
            state["master"].copy_(exact)
