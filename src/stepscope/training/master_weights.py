"""Weights in bf16 beside master weights in fp32: cast once a step, by the optimizer, and never in forward.

Autocast casts each fp32 weight in each forward, and each gradient back in backward. Here the weight itself is bf16, so
its gradient is too; the optimizer updates an fp32 master and writes its rounding into the weight (Micikevicius et al.
2018, arXiv:1710.03740, section 3.1). That saves 12 bytes of traffic a parameter and step: 4 + 2 for the weight's cast,
2 + 4 for the gradient's.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.training.clipping import clip_gradients
from stepscope.training.optimizer import Updating


def halve(model: nn.Module) -> dict[Tensor, Tensor]:
    """Make the model's weights bf16, in place; returns their first values in fp32, by weight.

    Weights are the floating-point parameters of two dimensions or more: those of matrix products, convolutions and
    embeddings. Vectors, as norms and biases have, stay fp32: they are small, and a norm's scale is near one, where bf16
    is coarse.
    """
    masters: dict[Tensor, Tensor] = {}
    for parameter in model.parameters():
        if parameter.dim() >= 2 and parameter.dtype == torch.float32:
            masters[parameter] = parameter.detach()
            parameter.data = parameter.detach().to(torch.bfloat16)
    return {weight: masters[weight] for weight in masters if weight.requires_grad}


class OnMasters(Updating):
    """An optimizer of PyTorch's that updates fp32 masters, whose roundings become the weights.

    It casts every gradient to fp32 before its step, and every master to bf16 after it. With max_norm it clips what was
    cast, so that no clipped gradient is rounded to bf16.
    """

    counts_updates = True

    def __init__(
        self, parameters: Iterable[Tensor], make: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
        masters: Mapping[Tensor, Tensor], max_norm: float | None = None,
    ) -> None:  # fmt: skip
        """make: an optimizer of the tensors that it is given: masters, and parameters that need none. max_norm: the
        bound on the gradients' global norm; None for none."""
        self._parameters = list(parameters)
        self._held = [masters.get(parameter, parameter) for parameter in self._parameters]
        self.inner = make(self._held)
        self.max_norm = max_norm
        self._gradient_norm: Tensor | None = None
        super().__init__(self._parameters, {"lr": self.inner.defaults["lr"]})
        self._show()

    @property
    def gradient_norm(self) -> Tensor | None:
        return self._gradient_norm

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
            self._gradient_norm = clip_gradients(self._held, self.max_norm)
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
