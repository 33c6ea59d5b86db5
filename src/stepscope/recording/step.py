"""One training step as its instruments see it: what it is made of, who runs it, and who is told.

Here a step is **driven**: its phases are callables, and `drive` alone runs them. An instrument is a **Recorder**: it is
told when the step and its phases begin and end, and runs nothing. So a loop that is not ours could tell it the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from stepscope.recording.ranges import named_range


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One part of a step."""

    name: str
    run: Callable[[], object]


class Driven(Protocol):
    """A subject that `drive` can run and the timer can time: its phases, and untimed work before them."""

    @property
    def phases(self) -> Sequence[Phase]:
        """The parts of the next step, in order. Several may share a name, as those of micro-batches do."""
        ...

    def prepare(self) -> None:
        """Do the untimed work before each step, such as taking the next batch."""
        ...


class Step(Driven, Protocol):
    """A training step. The step decides which phases there are, and an instrument takes those that it is told."""

    forward_module: nn.Module
    """The module that the forward phase calls: the model, or what torch.compile made of it."""
    optimizer: torch.optim.Optimizer | None
    batch: Any
    """The batch of the next step."""
    compiled: bool
    """Whether torch.compile made the forward module. Hooks inside it would make it compile anew."""
    compiles_parts: bool
    """Whether an eager step calls something that torch.compile made, as FlexAttention is."""
    cuda_graphs: bool
    """Whether the step replays CUDA graphs, inside which nothing is called or allocated."""

    @property
    def model(self) -> nn.Module:
        """The model itself, for its parameters and buffers."""
        ...

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The model's blocks, which checkpointing runs again."""
        ...

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """What scales the loss; None where nothing does."""
        ...

    @property
    def batches(self) -> Sequence[Any]:
        """What the steps rotate through. Only the step knows what a batch is: tensors, nested however."""
        ...

    def named_tensors(self, batch: Any) -> Sequence[tuple[str, torch.Tensor]]:
        """The tensors of a batch with their names. The first is what the model reads, as token ids are."""
        ...

    @property
    def loss(self) -> torch.Tensor | None:
        """The loss of the last forward, and after its backward the number alone."""
        ...

    @loss.setter
    def loss(self, loss: torch.Tensor | None) -> None: ...


def optimizers_of(step: Step) -> Sequence[torch.optim.Optimizer]:
    """The optimizers that update a step's parameters: one, unless a watched loop has several."""
    several: Sequence[torch.optim.Optimizer] = getattr(step, "optimizers", ())
    return several or ([step.optimizer] if step.optimizer is not None else [])


class Recorder:
    """An instrument that is told of a step. It overrides the methods for what it needs to know."""

    def step_begins(self) -> None:
        """The first phase is about to begin."""

    def phase_begins(self, name: str) -> None:
        """A phase is about to begin."""

    def phase_ends(self, name: str) -> None:
        """A phase has given all its work to the device."""

    def phase_failed(self, name: str) -> None:
        """A phase has raised; nothing more is told."""

    def step_ends(self) -> None:
        """The last phase has ended."""

    def evaluation_begins(self) -> None:
        """A watched loop is about to call a module with gradients off, which is no phase of a step."""

    def evaluation_ends(self) -> None:
        """That call has returned."""


def drive(step: Driven, *recorders: Recorder) -> None:
    """Run the phases of a prepared step, each in a range of its name, and tell the recorders in their order."""
    # Everything that can be looked up is looked up before the step begins, so that it is not in the step's time.
    parts = [(phase.name, phase.run, named_range(phase.name)) for phase in step.phases]
    events = ("step_begins", "phase_begins", "phase_ends", "step_ends")
    step_begins, phase_begins, phase_ends, step_ends = ([getattr(r, name) for r in recorders] for name in events)
    for begins in step_begins:
        begins()
    for name, run, its_range in parts:
        for begins in phase_begins:
            begins(name)
        try:
            with its_range:
                run()
        except BaseException:
            for recorder in recorders:
                recorder.phase_failed(name)
            raise
        for ends in phase_ends:
            ends(name)
    for ends in step_ends:
        ends()
