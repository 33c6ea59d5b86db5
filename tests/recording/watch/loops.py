"""Small training loops, and a watch that keeps what it is told."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from stepscope.core.run import Settings
from stepscope.core.samples import Samples
from stepscope.recording.step import Recorder
from stepscope.recording.watch.loop import LoopStep
from stepscope.recording.watch.stopwatch import Marks, Stopwatch, TimedSteps
from stepscope.recording.watch.watch import Stage, Watch


class Diary(Recorder):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def step_begins(self) -> None:
        self.told.append("step")

    def phase_begins(self, name: str) -> None:
        self.told.append(name)

    def phase_ends(self, name: str) -> None:
        self.told.append(f"/{name}")

    def phase_failed(self, name: str) -> None:
        self.told.append(f"failed {name}")

    def step_ends(self) -> None:
        self.told.append("/step")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, *, micro_batches: int = 1) -> None:
    for _ in range(micro_batches):
        model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class DiaryStage:
    """A stage of so many steps that writes down what it is told."""

    name = "diary"

    def __init__(self, steps: int = 1) -> None:
        diary = Diary()
        self.told = diary.told
        self.ended = False
        self._left = steps
        self.recorders: tuple[Recorder, ...] = (diary,)

    def begins(self, step: int) -> None:
        self.first = step

    def is_over(self, step: int) -> bool:
        self._left -= 1
        return self._left == 0

    def ends(self) -> None:
        self.ended = True

    @property
    def steps(self) -> list[list[str]]:
        """What was told of each step."""
        found: list[list[str]] = []
        for word in self.told:
            if word == "step":
                found.append([])
            elif word != "/step":
                found[-1].append(word)
        return found


class Told:
    """Keeps what a Watch says, and gives it stages."""

    def __init__(self, *stages: Stage) -> None:
        self._given = stages
        self.answer: LoopStep | None = None
        self.reason: str | None = None
        self.faults: list[str] = []
        self.over = self.gone = False

    def stages_for(self, loop: LoopStep, first_step: int) -> Sequence[Stage]:
        self.answer, self.first_step = loop, first_step
        return self._given

    def unclear_step(self, reason: str) -> None:
        self.reason = reason

    def stage_failed(self, stage: str, error: Exception) -> None:
        self.faults.append(f"{stage}: {error}")

    def finish(self) -> None:
        self.over = True

    def loop_gone(self) -> None:
        self.gone = True


def timed(first: int, end: int) -> tuple[TimedSteps, Stopwatch]:
    """A stage that times these steps, and its stopwatch."""
    stopwatch = Stopwatch(Marks())
    return TimedSteps(stopwatch, Settings(warmup_floor=first, warmup_cap=first), between=(first, end)), stopwatch


def parts_of(samples: dict[str, Samples]) -> list[str]:
    """The parts that took time in any step."""
    return [name for name, found in samples.items() if name != "step" and any(found.values_s)]


def nothing_is_left(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> bool:
    """Whether nothing that a watch puts in place is there."""
    import torch.optim.optimizer as of_optimizers
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    originals = (
        nn.Module.__call__ is nn.Module._wrapped_call_impl,
        vars(torch.autograd)["_engine_run_backward"] is torch.autograd.graph._engine_run_backward,
        not hasattr(_BaseDataLoaderIter.__next__, "__wrapped__"),
        not hasattr(GradScaler.step, "__wrapped__") and GradScaler.step.__module__ == "torch.amp.grad_scaler",
        not any(
            "__call__" in vars(type(part)) and hasattr(type(part).__call__, "__wrapped__") for part in model.modules()
        ),
        not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules()),
        not of_optimizers._global_optimizer_pre_hooks and not of_optimizers._global_optimizer_post_hooks,
        optimizer is None or not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks),
        optimizer is None or "step" not in vars(optimizer),
    )
    return all(originals)


def watch(told: Told, **given: object) -> Watch:
    """A watch that has started."""
    started = Watch(told, **given)  # type: ignore[arg-type]
    started.start()
    return started
