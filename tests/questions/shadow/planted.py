"""Small models with a module whose precision matters, or does not, by construction."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Weigh(nn.Module):
    """Each number times a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Weigh(), Weigh()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Again(nn.Module):
    """Adds what a module gives to its input; a checkpoint may run that module again in backward."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.inside, self.again = Weigh(), again

    def forward(self, x: Tensor) -> Tensor:
        return x / 3 + (checkpoint(self.inside, x, use_reentrant=False) if self.again else self.inside(x))


class Sharp(nn.Module):
    """A softmax of large logits, of which only the differences matter."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x + 300, -1)


class Cancel(nn.Module):
    """A sum with a large number, which is taken away again."""

    def __init__(self, large: float = 100.0) -> None:
        super().__init__()
        self.large = large

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.large) - self.large


class Double(nn.Module):
    """Twice the input. Before every parameter, of whole numbers, it is exact in any precision."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Large(nn.Module):
    """Beyond fp16's largest number, and back."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.abs() * 1e6 + 1e5) * 1e-5


class Wide(nn.Module):
    """Refuses 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("only fp32")
        return 1.5 * x


class Forgetful(nn.Module):
    """Gives something else at every other call, by an attribute that nothing restores."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 1e-2 * (self.calls % 2))


class Draws(nn.Module):
    """Drops out by a function."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3)


class Seen(nn.Linear):
    """Keeps the dtypes in which it computed."""

    dtypes: ClassVar[list[torch.dtype]] = []

    def forward(self, input: Tensor) -> Tensor:
        Seen.dtypes.append(input.dtype)
        return super().forward(input)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Seen(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


PLANTED: dict[str, Any] = {
    "sharp": Sharp, "cancel": Cancel, "double": Double, "large": Large, "wide": Wide, "forgetful": Forgetful,
    "draws": Draws, "residual": Residual, "norm": lambda: nn.BatchNorm1d(WIDTH), "dropout": lambda: nn.Dropout(0.3),
}  # fmt: skip


def make(*, first: str = "", middle: str = "", last: str = "") -> Any:
    """Linear layers with what is planted before, between and behind them; the input is whole numbers."""
    torch.manual_seed(0)
    parts = {"first": first, "in": "linear", "middle": middle, "out": "linear", "last": last}
    model = nn.Sequential()
    for name, kind in parts.items():
        if kind:
            model.add_module(name, nn.Linear(WIDTH, WIDTH) if kind == "linear" else PLANTED[kind]())
    return model, torch.randint(-8, 8, (4, WIDTH)).float(), square


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def make_two() -> Any:
    torch.manual_seed(0)
    return Two(), torch.randn(1, WIDTH), torch.sum


def make_layers() -> Any:
    """Layers of one class, of which the second cancels more."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), Cancel(large)) for large in (1.0, 1000.0, 1.0))
    return nn.Sequential(*layers), torch.randn(4, WIDTH), square


def make_half() -> Any:
    return nn.Linear(WIDTH, WIDTH).bfloat16(), torch.randn(4, WIDTH).bfloat16(), square


def make_encoder() -> Any:
    """PyTorch's attention, which takes a weight of a module in it that never runs."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True, dropout=0.0)
    return nn.Sequential(layer, nn.Linear(WIDTH, WIDTH)), torch.randn(2, 4, WIDTH), square


class Empty(nn.Module):
    """A layer with outputs beside one with none, given no rows, too; its blocks divide neither size."""

    def __init__(self) -> None:
        super().__init__()
        self.some, self.none = nn.Linear(33, 5), nn.Linear(33, 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.some(x) + self.none(x).sum() + self.some(x[:0]).sum()


def make_empty(scale: float = 1.0) -> tuple[nn.Module, tuple[Tensor, Tensor], Any]:
    torch.manual_seed(0)
    model = Empty()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model, (scale * torch.randn(6, 33), torch.zeros(6, 5)), F.mse_loss


def make_again(again: bool = False) -> tuple[nn.Module, Tensor, Any]:
    torch.manual_seed(0)
    return Again(again), torch.randn(4, WIDTH, requires_grad=True), torch.sum


class Experts(nn.Module):
    """Four matrices in one tensor, which no linear layer multiplies, and whose products are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 2 * WIDTH, 2 * WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.experts).sum(0)


class Mixed(nn.Module):
    """Two linear layers around experts and dropout."""

    def __init__(self) -> None:
        super().__init__()
        linears = (nn.Linear(2 * WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.layers = nn.Sequential(next(linears), Experts(), nn.Dropout(0.1), next(linears))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def make_mixed() -> tuple[nn.Module, Tensor, Any]:
    torch.manual_seed(0)
    return Mixed(), torch.randn(8, 2 * WIDTH), square


def make_complex() -> tuple[nn.Module, Tensor, Any]:
    return (
        nn.Linear(WIDTH, WIDTH, dtype=torch.complex64),
        torch.randn(4, WIDTH, dtype=torch.complex64),
        lambda y: square(y.abs()),
    )


def make_compiled() -> tuple[Any, Tensor, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    return torch.compile(model, backend="eager"), torch.randn(4, WIDTH), square
