"""A watched loop's step in the form that a driven step's instruments expect: its model, its optimizer, its loss."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stepscope.recording.step import Phase
from stepscope.recording.watch.found import Found
from stepscope.recording.weakly import weakly, weakly_each


class WatchedStep:
    """A Step (`recording/step.py`) that nobody drives: it has no phases that could be run. It keeps nothing of the
    loop alive."""

    phases: Sequence[Phase] = ()
    blocks: Sequence[nn.Module] = ()
    batches: Sequence[Any] = ()
    batch: Any = None
    scaler: torch.amp.GradScaler | None = None
    compiles_parts = False
    cuda_graphs = False
    loss: torch.Tensor | None = None

    forward_module: nn.Module = weakly()
    model: nn.Module = weakly()
    optimizer: torch.optim.Optimizer | None = weakly()
    optimizers: Sequence[torch.optim.Optimizer] = weakly_each()
    """All optimizers that step in a step, the one that ends it first."""

    def __init__(self, found: Found) -> None:
        self.forward_module = found.forward_module
        self.model = found.model
        self.optimizer = found.optimizer
        self.optimizers = found.optimizers
        self.compiled = found.compiled

    def named_tensors(self, batch: Any) -> Sequence[tuple[str, torch.Tensor]]:
        return ()  # The batch of a watched step is not known before the step runs.

    def prepare(self) -> None:
        pass
