"""The model that an experiment looks at, with a batch and a loss: the toy network, a transformer, or a user's own.

`models/own/` says how a user's own is named, and what its factory returns.

Shape legend: B batch, S positions, V vocabulary, I features in, O features out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepscope.core.errors import choose
from stepscope.core.model_config import PRESETS, configure
from stepscope.core.workload import Workload
from stepscope.questions.setting import check_room
from stepscope.training.own.loading import load_module
from stepscope.training.own.own_module import OwnModule, check_gradient
from stepscope.training.own.user_code import said_of
from stepscope.training.training_step import build_model

TOY = "toy"
TOY_BATCH, TOY_IN, TOY_HIDDEN, TOY_OUT = 8, 20, 10, 5
SEQUENCES, TOKENS = 2, 8
"""The size of a transformer's batch. Dtypes do not depend on it."""

_STEP_BYTES = 4 + 4 + 2
"""Bytes per parameter that forward and backward hold at least: the parameter, its gradient and a 16-bit copy."""


@dataclass(frozen=True, kw_only=True)
class ModelWithLoss:
    """A module on its device, with inputs and a loss."""

    name: str
    own: OwnModule
    """The module with its loss. Of its batches the first is looked at."""

    @property
    def module(self) -> nn.Module:
        return self.own.module

    @property
    def loss_name(self) -> str:
        """The name of the loss function, or that forward returns the loss."""
        return self.own.loss_name

    def forward(self) -> tuple[Any, Tensor]:
        """The module's output, and the loss. Raises InputError where either fails, or the loss is none."""
        batch = self.own.batches[0]
        args, kwargs = self.own.call.arguments(batch)
        with said_of(f"{self.name} fails in forward"):
            output = self.module(*args, **kwargs)
        with said_of(f"the loss of {self.name} fails"):
            loss = self.own.loss_of(output, batch)
        check_gradient(loss, self.name)
        return output, loss

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients anew. Raises InputError where backward fails."""
        self.module.zero_grad(set_to_none=True)
        with said_of(f"{self.name} fails in backward"):
            loss.backward()


class ToyModel(nn.Module):
    """fc2(ln(relu(fc1(x)))): the smallest network with a product, a ReLU, a normalisation and a product.

    It takes (B, I) and gives logits (B, O).
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(TOY_IN, TOY_HIDDEN, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(TOY_HIDDEN)
        self.fc2 = nn.Linear(TOY_HIDDEN, TOY_OUT, bias=False)

    def forward(self, x_BI: Tensor) -> Tensor:
        return self.fc2(self.ln(self.relu(self.fc1(x_BI))))


def model_with_loss(
    model: str, own: str | None, device: torch.device, seed: int = 0, arguments: Mapping[str, Any] | None = None
) -> ModelWithLoss:
    """The toy network or a preset by name; or, where `own` names one, the user's."""
    torch.manual_seed(seed)
    if own is not None:
        return ModelWithLoss(name=own, own=load_module(own, arguments, seed=seed).on(device))
    if choose(model, (TOY, *PRESETS), "model") == TOY:
        targets_B = torch.randint(TOY_OUT, (TOY_BATCH,)).to(device)

        def cross_entropy(logits_BO: Tensor) -> Tensor:
            return F.cross_entropy(logits_BO, targets_B)

        toy, batch = ToyModel().to(device), torch.randn(TOY_BATCH, TOY_IN).to(device)
        return _ours(TOY, toy, batch, cross_entropy)
    return _transformer(model, device, seed)


def _transformer(preset: str, device: torch.device, seed: int) -> ModelWithLoss:
    workload = Workload(model=configure(preset), batch_size=SEQUENCES, seq_len=TOKENS, seed=seed)
    check_room(workload, device, bytes_per_parameter=_STEP_BYTES)
    tokens_BS, targets_BS = torch.randint(workload.model.vocabulary, (2, SEQUENCES, TOKENS)).to(device)

    def cross_entropy(logits_BSV: Tensor) -> Tensor:
        # Without the cast that the training step's loss has: here autocast chooses the dtype.
        return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())

    return _ours(preset, build_model(workload, device), tokens_BS, cross_entropy)


def _ours(name: str, module: nn.Module, batch: Tensor, loss: Callable[[Tensor], Tensor]) -> ModelWithLoss:
    return ModelWithLoss(name=name, own=OwnModule(name=name, module=module, batches=[batch], loss=loss))
