"""A step's parts spread over the ranks by a strategy."""

import dataclasses
import importlib
from typing import cast

from torch import Tensor

from stepscope.core.errors import InputError
from stepscope.core.strategies import GRADIENTS, SEQUENCE, StrategyRecord, batch_parts, strategy_named
from stepscope.training.parallel.ranks import Ranks
from stepscope.training.parallel.sequence import part_of_sequence
from stepscope.training.parallel.spread import MakeOptimizer, Spread, Strategy, Whole
from stepscope.training.training_step import Choices, Share, Shared, StepParts, autocast_of, optimizer_for
from stepscope.training.transformer import Transformer


def shared_by(name: str, ranks: Ranks) -> Share:
    """What spreads a step's parts over these ranks by the strategy of that name."""
    record = strategy_named(name)

    def share(parts: StepParts, choices: Choices) -> Shared:
        spread = spread_parts(record, parts, choices, ranks)
        made = dataclasses.replace(
            parts, model=spread.model, forward=spread.forward, optimizer=spread.optimizer,
            blocks=parts.blocks if spread.blocks is None else spread.blocks,
            batches=[part_of(batch, parts, record, ranks) for batch in parts.batches],
        )  # fmt: skip
        finish = spread.finish if spread.finishes else None
        return Shared(parts=made, finish=finish, local=spread.local, run=spread.run, norm_of=spread.norm_of)

    return share


def spread_parts(
    record: StrategyRecord, parts: StepParts, choices: Choices, ranks: Ranks, *,
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

    given = parts.optimizer
    if make_optimizer is None and choices.phase == "train":
        make_optimizer = lambda trained: given or optimizer_for(trained, choices)  # noqa: E731
    device_type = next(parts.model.parameters()).device.type
    split, inputs = parts.split, parts.forward_inputs
    count = record.micro_batches(ranks.ranks, choices.accumulation)
    whole = Whole(
        model=parts.model, forward=parts.forward, blocks=parts.blocks, make_optimizer=make_optimizer, record=record,
        micro_batches=lambda batch: [one[:inputs] for one in split(batch, count)],
        autocast=lambda: autocast_of(choices, device_type),
    )  # fmt: skip
    chosen: Strategy = (
        strategy or importlib.import_module(f"stepscope.training.parallel.strategies.{record.module}").spread
    )
    return chosen(whole, ranks)


def part_of(batch: tuple[object, ...], parts: StepParts, record: StrategyRecord, ranks: Ranks) -> tuple[object, ...]:
    """This rank's part of a batch; all of it where the strategy splits something else."""
    if record.splits == SEQUENCE:
        return tuple(part_of_sequence(cast("Tensor", one), 1, ranks.rank, ranks.ranks) for one in batch)
    count = batch_parts(record.name, ranks.ranks)
    if count == 1:
        return batch
    try:
        found = parts.split(batch, count)
    except InputError:
        found = []
    if len(found) != count:
        raise InputError(f"the batch cannot be divided by {count} ranks: give a batch size that can")
    return found[ranks.rank // record.near]
