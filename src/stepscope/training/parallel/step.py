"""A step's parts spread over the ranks by a strategy."""

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from stepscope.core.errors import InputError
from stepscope.core.strategies import GRADIENTS, SEQUENCE, StrategyRecord, batch_parts, strategy_named
from stepscope.core.workloads import Workload
from stepscope.training.optimizer import NormOf, global_norm
from stepscope.training.training_step import Batch, Ranks, Share, Shared, StepParts, autocast_of, optimizer_for
from stepscope.training.transformer import Transformer

# The sequence in chunks, and which of them a rank takes.
#
# With causal attention the last query sees all keys and the first sees one, so that equal parts are unequal work. A
# sequence is therefore cut into 2 n chunks, and rank r of n takes chunk r and chunk 2 n - 1 - r: one near the head and
# one near the tail, together as much work as every other rank's (Llama Team 2024, section 3.3.2). PyTorch's
# context_parallel shares a sequence out in the same way.


def part_of_sequence(tensor: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    """The two chunks of a rank, side by side."""
    chunks = tensor.chunk(2 * ranks, dim)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]), dim)


def in_order(parts: Tensor, dim: int) -> Tensor:
    """The whole sequence of the parts of all ranks, which lie along a first dimension of their own."""
    heads, tails = parts.chunk(2, dim + 1)
    return torch.cat((*heads, *tails.flip(0)), dim)


def by_rank(whole: Tensor, dim: int, ranks: int) -> Tensor:
    """The opposite of `in_order`."""
    return torch.stack([part_of_sequence(whole, dim, rank, ranks) for rank in range(ranks)])


# A step's module before and after a strategy has spread it over the ranks.


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


Strategy = Callable[[Whole, Ranks], Spread]
"""What a file of training/parallel/strategies/ has under the name of a strategy."""


def named_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of a model's parameters by name, of those that have one."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def replicated(
    whole: Whole,
    module: nn.Module | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    finish: Callable[[], None] | None = None,
    local: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Spread:
    """A spread whose every rank keeps all parameters and gradients. `module`: what forward calls, if not the whole."""
    model = whole.model

    return Spread(
        model=model, forward=module or whole.forward, optimizer=optimizer or whole.optimizer_of(model.parameters()),
        full_parameters=lambda: dict(model.named_parameters()), full_gradients=lambda: named_gradients(model),
        finish=finish or _nothing, finishes=finish is not None, local=local,
    )  # fmt: skip


def shared_by(name: str, ranks: Ranks) -> Share:
    """What spreads a step's parts over these ranks by the strategy of that name."""
    record = strategy_named(name)

    def share(parts: StepParts, choices: Workload) -> Shared:
        spread = spread_parts(record, parts, choices, ranks)
        shared_parts = dataclasses.replace(
            parts,
            model=spread.model,
            forward=spread.forward,
            optimizer=spread.optimizer,
            blocks=parts.blocks if spread.blocks is None else spread.blocks,
            batches=[part_of(batch, parts, record, ranks) for batch in parts.batches],
        )
        finish = spread.finish if spread.finishes else None
        return Shared(parts=shared_parts, finish=finish, local=spread.local, run=spread.run, norm_of=spread.norm_of)

    return share


def spread_parts(
    record: StrategyRecord, parts: StepParts, choices: Workload, ranks: Ranks, *,
    make_optimizer: MakeOptimizer | None = None, strategy: Strategy | None = None,
) -> Spread:  # fmt: skip
    """The parts spread over the ranks. Raises InputError for what this strategy cannot spread.

    make_optimizer: in place of the optimizer that was chosen. strategy: in place of the record's own.
    """
    if ranks.backend and ranks.backend not in record.backends:
        raise InputError(
            f"--parallel {record.name} runs on {' and '.join(record.backends)}, and this is {ranks.backend}"
        )
    if record.textbook_only and not isinstance(parts.model, Transformer):
        raise InputError(
            f"--parallel {record.name} knows the textbook's model alone: choose ddp or fsdp2 for one of your own"
        )
    if GRADIENTS in record.shards and choices.dtype == "fp16":
        raise InputError(
            f"--parallel {record.name} keeps gradients in shards, and fp16 scales the loss by all of them: choose bf16"
        )
    if record.shards and parts.optimizer is not None:
        raise InputError(
            f"--parallel {record.name} keeps parts of the optimizer's state, and this model came with an optimizer of "
            "whole parameters: let the factory give the module without it"
        )

    if make_optimizer is None and choices.phase == "train":
        make_optimizer = lambda trained: parts.optimizer or optimizer_for(trained, choices)  # noqa: E731
    device_type = next(parts.model.parameters()).device.type
    count = record.micro_batches(ranks.ranks, choices.accumulation)
    whole = Whole(
        model=parts.model,
        forward=parts.forward,
        blocks=parts.blocks,
        make_optimizer=make_optimizer,
        record=record,
        micro_batches=lambda batch: [one[: parts.forward_inputs] for one in parts.split(batch, count)],
        autocast=lambda: autocast_of(choices, device_type),
    )
    if strategy is None:
        module = importlib.import_module(f"stepscope.training.parallel.strategies.{record.module}")
        strategy = cast("Strategy", getattr(module, record.name.replace("-", "_")))
    return strategy(whole, ranks)


def part_of(batch: tuple[object, ...], parts: StepParts, record: StrategyRecord, ranks: Ranks) -> tuple[object, ...]:
    """This rank's part of a batch; all of it where the strategy splits something else."""
    if record.splits == SEQUENCE:
        return tuple(part_of_sequence(cast("Tensor", one), 1, ranks.rank, ranks.ranks) for one in batch)
    count = batch_parts(record.name, ranks.ranks)
    if count == 1:
        return batch
    try:
        batches = parts.split(batch, count)
    except InputError:
        batches = []
    if len(batches) != count:
        raise InputError(f"the batch cannot be divided by {count} ranks: give a batch size that can")
    return batches[ranks.rank // record.near]
