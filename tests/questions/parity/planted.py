"""A small model of language whose factory plants a mistake where it is asked to."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, VOCABULARY, LENGTH = 16, 50, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp, self.norm = Attention(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + F.gelu(self.mlp(x))


class OverTheBatch(nn.Module):
    """Normalises over the samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class BatchNorm(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.transpose(1, 2)).transpose(1, 2)


class Middle(nn.Linear):
    """A linear layer, with the mistake that is planted."""

    def __init__(self, fault: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.fault = fault

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        if self.fault == "compiled" and torch.compiler.is_compiling():
            return y * 1.01
        if self.fault == "functional dropout":
            return F.dropout(F.dropout(y, 0.1), 0.1)  # a single one draws for one sample after the other
        if self.fault == "fp32 alone" and y.dtype == torch.float64:
            raise TypeError("only fp32")
        if self.fault == "backward":  # a gradient that depends on the number of samples
            return y * len(y) - (y * (len(y) - 1)).detach()
        return y


class Model(nn.Module):
    def __init__(self, norm: str, drop: float, fault: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = {"layer": nn.LayerNorm(WIDTH), "over the batch": OverTheBatch(), "batch": BatchNorm(WIDTH)}[norm]
        self.drop = nn.Dropout(drop)
        self.middle = Middle(fault)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        if self.fault == "between modules":
            x = x / x.abs().amax()
        return self.head(self.middle(self.drop(x)))


def targets(ignored: tuple[int, ...]) -> Tensor:
    """Targets of a sample each, of which the last so many are left out."""
    found = torch.randint(VOCABULARY, (len(ignored), LENGTH), generator=torch.Generator().manual_seed(0))
    for i, count in enumerate(ignored):
        found[i, LENGTH - count :] = -100
    return found


def make(
    *, norm: str = "layer", drop: float = 0.0, fault: str = "", ignored: tuple[int, ...] = (0, 0, 0, 0), tokens: int = 0
) -> Any:
    """tokens: where not 0, the loss is a sum divided by it."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        how = "sum" if tokens else "mean"
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction=how) / (tokens or 1)

    batch = torch.randint(VOCABULARY, (len(ignored), LENGTH)), targets(tuple(ignored))
    return Model(norm, drop, fault), batch, loss


def make_linear(fault: str = "") -> Any:
    """A single linear layer, which compiles quickly."""
    return Middle(fault), torch.randn(4, WIDTH), lambda output: output.square().mean()
