"""Pipeline parallel by PyTorch's schedules: a rank has some of the blocks, and micro-batches go through all ranks.

The blocks are cut into stages, about equally many in each; the first has the embedding, the last norm, head and loss. A
stage sends the residual stream to the next one and gets its gradient back: few bytes, and between neighbours alone.
While the first micro-batch is on its way a rank of p has nothing to do, and again at the end: of m micro-batches

    gpipe, 1f1b     (p - 1) / (m + p - 1) of the step is a bubble       (Huang et al. 2019; Narayanan et al. 2021, 2.2)
    interleaved     (p - 1) / (v m + p - 1), with v stages a rank       (Narayanan et al. 2021, 2.2)

gpipe runs all forwards, then all backwards; 1f1b lets them take turns, so that a rank holds p micro-batches and not m.
The micro-batches are those of accumulation; of which nobody said how many there are as many as stages.

Every rank runs the model's own forward. A block that is elsewhere is not here: the stage's first block takes what came
in place of the embedding's output, and the forward is left after the stage's last.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from stepscope.training.parallel.collective import broadcast_from_first, norm_over_ranks
from stepscope.training.parallel.step import Batch, Spread, Whole
from stepscope.training.training_step import Ranks
from stepscope.training.transformer import BlockRunner, Transformer


class _StageEnds(Exception):
    """Leaves the model's forward after a stage's last block."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


class _Model:
    """The model of which this rank has some stages, as one stage at a time runs through it."""

    def __init__(self, whole: Whole, stages: int) -> None:
        self._forward, self._autocast, self._cut = whole.forward, whole.autocast, whole.micro_batches
        self._inner: BlockRunner = cast("Transformer", whole.model).run_blocks
        count = len(whole.blocks)
        self._bounds = [count * stage // stages for stage in range(stages + 1)]
        self._micro_batches: Sequence[Batch] = ()
        self._now: tuple[int, Tensor] | None = None

    def blocks_of(self, stage: int) -> range:
        """The numbers of a stage's blocks."""
        return range(self._bounds[stage], self._bounds[stage + 1])

    def take(self, batch: Batch) -> int:
        """Make this the batch of the next step; returns how many micro-batches it has."""
        self._micro_batches = self._cut(batch)
        return len(self._micro_batches)

    def run(self, stage: int, received: Tensor, micro: int) -> Tensor:
        """What this stage makes of a micro-batch: what the next one receives, or from the last the loss."""
        self._now = stage, received
        try:
            with self._autocast():
                loss: Tensor = self._forward(*self._micro_batches[micro])
                return loss[None]
        except _StageEnds as end:
            return end.output
        finally:
            self._now = None

    def run_blocks(self, blocks: Iterable[nn.Module], x_BSM: Tensor) -> Tensor:
        """Run the blocks of the stage at hand, in place of all."""
        assert self._now is not None
        stage, received = self._now
        its = self.blocks_of(stage)
        x_BSM = self._inner(tuple(blocks)[its.start : its.stop], received if stage else x_BSM)
        if its.stop < self._bounds[-1]:
            raise _StageEnds(x_BSM)
        return x_BSM


class _Stage(nn.Module):
    """A stage as PyTorch's schedules call it. A micro-batch is told by its number, since every rank has the batch."""

    def __init__(self, model: _Model, number: int) -> None:
        super().__init__()
        self._model, self._number = model, number

    def forward(self, received: Tensor, micro: Tensor) -> Tensor:
        return self._model.run(self._number, received, int(micro))


def pipeline(whole: Whole, ranks: Ranks) -> Spread:
    """Keep the blocks of this rank's stages, and let a schedule run them."""
    model = cast("Transformer", whole.model)
    broadcast_from_first(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    device, schedule = next(model.parameters()).device, whole.record.chosen("schedule")
    stages = whole.record.stages(ranks.ranks)
    numbers_here = range(ranks.rank, stages, ranks.ranks)
    cut = _Model(whole, stages)
    model.run_blocks = cut.run_blocks
    _leave_out(model, [block for stage in numbers_here for block in cut.blocks_of(stage)], numbers_here, stages)
    stages_here = [PipelineStage(_Stage(cut, number), number, stages, device) for number in numbers_here]
    schedules: dict[int, Any] = {}

    def run(batch: Batch) -> Tensor | None:
        count = cut.take(batch)
        if count not in schedules:
            schedules[count] = _schedule(schedule, stages_here, count)
        numbers = torch.arange(count)
        losses: list[Tensor] = []
        last: dict[str, Any] = {"target": numbers, "losses": losses} if stages - 1 in numbers_here else {}
        schedules[count].step(*((numbers,) if 0 in numbers_here else ()), micro=numbers, **last)
        return torch.stack(losses).sum() if losses else None

    finish = _sum_of_the_tied(model, numbers_here, stages, ranks)
    here = {names[parameter]: parameter for parameter in model.parameters()}
    # A tied weight that two ranks have is the first one's.
    theirs = {model.head.weight} if finish is not None and stages - 1 in numbers_here else set[Tensor]()
    return Spread(
        model=model, forward=whole.forward, optimizer=whole.optimizer_of(here.values()),
        full_parameters=lambda: _of_all(ranks, here),
        full_gradients=lambda: _of_all(ranks, {n: p.grad for n, p in here.items() if p.grad is not None}),
        finish=finish or (lambda: None), finishes=finish is not None, run=run,
        blocks=[block for block in model.blocks if not isinstance(block, nn.Identity)],
        norm_of=functools.partial(norm_over_ranks, but_for=theirs),
    )  # fmt: skip


def _leave_out(model: Transformer, blocks: Sequence[int], here: range, stages: int) -> None:
    """Release what other ranks have; what is left keeps its name."""
    for number in range(len(model.blocks)):
        if number not in blocks:
            model.blocks[number] = nn.Identity()
    absent = ("embedding",) if 0 not in here else ()
    for name in (*absent, *(("norm", "head") if stages - 1 not in here else ())):
        setattr(model, name, nn.Identity())


def _schedule(name: str, stages: Sequence[PipelineStage], count: int) -> Any:
    """PyTorch's schedule for so many micro-batches, each of whose losses is a part of their mean."""
    options: dict[str, Any] = {"loss_fn": lambda loss, _: loss.sum() / count, "scale_grads": False}
    if name == "interleaved":
        return ScheduleInterleaved1F1B(list(stages), count, **options)
    return (ScheduleGPipe if name == "gpipe" else Schedule1F1B)(stages[0], count, **options)


def _sum_of_the_tied(model: Transformer, here: range, stages: int, ranks: Ranks) -> Callable[[], None] | None:
    """Adds up what the first stage and the last found of the gradient of a weight that both have; None where none is
    on two ranks. All ranks must call it."""
    first, last = 0, (stages - 1) % ranks.ranks
    if not model.config.tied or first == last:
        return None
    group = dist.new_group([first, last])

    def finish() -> None:
        if 0 in here or stages - 1 in here:
            weight = (model.embedding if 0 in here else model.head).weight
            assert weight.grad is not None
            dist.all_reduce(weight.grad, group=group)

    return finish


def _of_all(ranks: Ranks, here: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all ranks by name."""
    gathered: list[dict[str, Tensor]] = ranks.gathered({name: tensor.detach().cpu() for name, tensor in here.items()})
    return {name: tensor for of_rank in gathered for name, tensor in of_rank.items()}
