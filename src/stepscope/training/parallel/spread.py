"""A step's module before and after a strategy has spread it over the ranks."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stepscope.core.strategies import StrategyRecord
from stepscope.training.clipping import NormOf, global_norm
from stepscope.training.parallel.ranks import Ranks

Batch = tuple[Any, ...]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
"""Makes an optimizer of parameters, or of groups of them as torch.optim takes them."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A step's module as one process would train it, the same on every rank."""

    model: nn.Module
    forward: nn.Module
    """What the forward phase calls: the model and its loss."""
    blocks: Sequence[nn.Module]
    """The parts of the model that repeat, in their order; empty where none are known."""
    make_optimizer: MakeOptimizer | None
    """Makes the optimizer of these parameters; None where no optimizer steps."""
    record: StrategyRecord
    """The strategy, with what was chosen of its options."""
    micro_batches: Callable[[Batch], Sequence[Batch]]
    """A batch as the arguments of one forward for each micro-batch."""
    autocast: Callable[[], contextlib.AbstractContextManager[object]]
    """The context of a forward."""

    def optimizer_of(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
        """The optimizer of those of the parameters that are trained."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        return self.make_optimizer(trained) if self.make_optimizer is not None else None


def _nothing() -> None: ...


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The module spread over the ranks, as this rank runs it."""

    model: nn.Module
    forward: nn.Module
    optimizer: torch.optim.Optimizer | None
    full_parameters: Callable[[], Mapping[str, Tensor]]
    """Every parameter whole, by the name that it has in one process. All ranks must call it."""
    full_gradients: Callable[[], Mapping[str, Tensor]]
    """Every gradient whole, between backward and the optimizer's step. All ranks must call it."""
    finish: Callable[[], None] = _nothing
    """What a rank does between backward and the optimizer's step, such as waiting for its gradients."""
    finishes: bool = False
    """Whether it does anything there: then it is a phase of the step."""
    local: Callable[[], contextlib.AbstractContextManager[object]] = field(default=contextlib.nullcontext)
    """A context for the backward of all but the last micro-batch, whose gradients stay on their rank."""
    run: Callable[[Batch], Tensor | None] | None = None
    """Runs forward and backward of a whole batch, where a schedule lets them take turns; returns the mean loss where
    this rank has it. None where forward and backward are phases of their own."""
    blocks: Sequence[nn.Module] | None = None
    """The blocks that this rank has; None where it has all."""
    norm_of: NormOf = global_norm
    """The global norm of the gradients of these parameters, as one process would find it. All ranks must call it."""


class Strategy(Protocol):
    """What a file of parallel/strategies/ has as `spread`."""

    def __call__(self, whole: Whole, ranks: Ranks) -> Spread: ...


def named_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of a model whose ranks hold them whole."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def replicated(
    whole: Whole, module: nn.Module | None = None, *, optimizer: torch.optim.Optimizer | None = None,
    finish: Callable[[], None] | None = None,
    local: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Spread:  # fmt: skip
    """A spread whose every rank keeps all parameters and gradients. `module`: what forward calls, if not the whole."""
    model = whole.model
    return Spread(
        model=model, forward=module or whole.forward, optimizer=optimizer or whole.optimizer_of(model.parameters()),
        full_parameters=lambda: dict(model.named_parameters()), full_gradients=lambda: named_gradients(model),
        finish=finish or _nothing, finishes=finish is not None, local=local,
    )  # fmt: skip
