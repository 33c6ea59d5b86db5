"""AdamW for parameters or moments in bf16, and for masters in fp32 beside weights in bf16."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from stepscope.core.errors import InputError, choose
from stepscope.training.optimizer import Updating, clip_gradients, updated_by

ROUNDS = "_stepscope_rounds"
"""The attribute of a norm by a kernel that says whether its result has the dtype of its input, whatever autocast and
its weight say: a residual stream in bf16, as BERT's, then stays so behind a norm."""


class OneByOne(Updating):
    """An AdamW that updates one parameter after another, from its gradient in fp32."""

    def __init__(
        self, parameters: Iterable[Tensor], *, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 1e-2,
    ) -> None:  # fmt: skip
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

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


# AdamW for parameters in bf16, with four ways to keep the part of an update that bf16 cannot hold.


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
        self, parameters: Iterable[Tensor], *, keeping: Keeping = "nearest", watch: Watch | None = None, **options: Any
    ) -> None:
        """options: those of every AdamW, as `lr`."""
        choose(keeping, KEEPINGS, "keeping")
        super().__init__(parameters, **options)
        for parameter in updated_by(self):
            if parameter.dtype != torch.bfloat16:
                raise InputError(f"a parameter of {parameter.dtype} was given to keep in bf16: convert the model first")
        self.keeping, self.watch = keeping, watch

    @torch.no_grad()
    def held(self, parameter: Tensor) -> Tensor:
        """The parameter as exactly as it is kept, in fp32."""
        state = self.state[parameter]
        if "master" in state:
            return state["master"].clone()
        return parameter.float() + state["lost"].float() if "lost" in state else parameter.float()

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
        exact = before + wanted
        if self.keeping == "stochastic":
            round_stochastically(exact, into=parameter)
        else:
            parameter.copy_(exact)
        if self.keeping == "kahan":
            state["lost"].copy_(exact - parameter.float())
        elif self.keeping == "master":
            state["master"].copy_(exact)
        if self.watch is not None:
            self.watch(parameter, before, wanted, self.held(parameter) - before)


# Weights in bf16 beside master weights in fp32: cast once a step, by the optimizer, and never in forward.
#
# Autocast casts each fp32 weight in each forward, and each gradient back in backward. Here the weight itself is bf16,
# so its gradient is too; the optimizer updates an fp32 master and writes its rounding into the weight (Micikevicius et
# al. 2018, arXiv:1710.03740, section 3.1). That saves 12 bytes of traffic a parameter and step: 4 + 2 for the weight's
# cast, 2 + 4 for the gradient's.


def halve(model: nn.Module) -> dict[Tensor, Tensor]:
    """Make the model's weights bf16, in place; returns their first values in fp32, by weight.

    Weights are the floating-point parameters of two dimensions or more, those of matrix products, convolutions and
    embeddings, and the biases beside them: autocast rounds both in each forward. Other vectors, as norms have, stay
    fp32: they are small, and a norm's scale is near one, where bf16 is coarse. A norm that `replace_parts` replaced
    gives the dtype of its input from then on, as does one that is replaced later (`ROUNDS`).
    """
    masters: dict[Tensor, Tensor] = {}
    every = [vars(module)["_parameters"] for module in model.modules()]
    beside = [own.get("bias") for own in every if getattr(own.get("weight"), "ndim", 0) >= 2]
    biases = {id(bias) for bias in beside if bias is not None}
    for parameter in model.parameters():
        if (parameter.dim() >= 2 or id(parameter) in biases) and parameter.dtype == torch.float32:
            masters[parameter] = parameter.detach()
            parameter.data = parameter.detach().to(torch.bfloat16)
    setattr(model, ROUNDS, True)
    round_norms(model)
    return {weight: masters[weight] for weight in masters if weight.requires_grad}


def round_norms(model: nn.Module) -> None:
    """Let the norms by kernels of a model of halved weights give the dtype of their input; no longer, where its weights
    have another dtype since."""
    if vars(model).get(ROUNDS):
        halved = any(weight.dim() >= 2 and weight.dtype == torch.bfloat16 for weight in model.parameters())
        for module in model.modules():
            if hasattr(type(module), ROUNDS):
                setattr(module, ROUNDS, halved)


class OnMasters(Updating):
    """An optimizer of PyTorch's that updates fp32 masters, whose roundings become the weights.

    It casts every gradient to fp32 before its step, and every master to bf16 after it. With max_norm it clips what was
    cast, so that no clipped gradient is rounded to bf16.
    """

    counts_updates = True

    def __init__(
        self,
        parameters: Iterable[Tensor],
        make: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
        masters: Mapping[Tensor, Tensor],
        max_norm: float | None = None,
    ) -> None:
        """make: an optimizer of the tensors that it is given: masters, and parameters that need none. max_norm: the
        bound on the gradients' global norm; None for none."""
        self._parameters = list(parameters)
        self._held = [masters.get(parameter, parameter) for parameter in self._parameters]
        self.inner = make(self._held)
        self.max_norm = max_norm
        super().__init__(self._parameters, {"lr": self.inner.defaults["lr"]})
        self._show()

    def _show(self) -> None:
        """Let the state of this optimizer be that of the inner one, and the masters."""
        for parameter, held in zip(self._parameters, self._held, strict=True):
            state = self.inner.state.get(held)
            if state:
                self.state[parameter] = {**state, **({} if held is parameter else {"master": held})}

    def _update_all(self) -> None:
        halves = [
            (parameter, held)
            for parameter, held in zip(self._parameters, self._held, strict=True)
            if held is not parameter and parameter.grad is not None
        ]
        for parameter, held in halves:
            assert parameter.grad is not None
            held.grad = parameter.grad.float()
        if self.max_norm is not None:
            self.gradient_norm = clip_gradients(self._held, self.max_norm)
        for group in self.inner.param_groups:
            group["lr"] = self.param_groups[0]["lr"]  # a scheduler sets it there
        self.inner.step()
        for _, held in halves:
            held.grad = None
        if halves:
            torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                [parameter for parameter, _ in halves], [held for _, held in halves]
            )
        self._show()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and the masters."""
        masters = {i: held for i, held in enumerate(self._held) if held is not self._parameters[i]}
        return {**self.inner.state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave: the weights become the roundings of its masters."""
        self.inner.load_state_dict({name: part for name, part in state_dict.items() if name != "masters"})
        for i, master in state_dict["masters"].items():
            self._held[i].copy_(master)
            self._parameters[i].copy_(master)
        self._show()
