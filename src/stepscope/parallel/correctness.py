"""Whether ranks that share a step compute what one process does: right before fast.

One process splits the global batch into micro-batches in several ways. Arithmetic in another order gives slightly other
gradients, and how far these lie apart is the spread that rounding alone makes. The ranks' gradients of the first step,
and what five steps of plain SGD make of the parameters, must lie within twice that spread of one process's. SGD, since
AdamW divides by the gradient's own size and makes as much of noise near zero as of the rest. Of five steps of AdamW the
losses alone are compared.

Distances are taken parameter by parameter, ||a - b|| / ||b||, and the largest counts: a forgotten bias must not hide
behind a matrix.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stepscope.core.ranks import Correctness
from stepscope.core.strategies import strategy_named
from stepscope.models.training_step import AUTOCAST_DTYPE, Choices, StepParts, autocast_of
from stepscope.parallel.ranks import Ranks
from stepscope.parallel.spread import Batch, MakeOptimizer, Spread, Strategy
from stepscope.parallel.step import part_of, spread_parts

STEPS = 5
_LEARNING_RATE = 0.05
_ALLOWED = 2.0
"""How many times the spread of one process the ranks may be off."""
_ROUNDINGS = 8
"""Roundings in fp32 that are allowed where one process happens to round alike in all its ways to split the batch."""
_FEWEST = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""The least distance that is allowed where ranks cut sums, by the products' dtype: they add up parts of a product, or
of the gradient of keys, that one process adds up whole, and round each part, which no split of the batch shows."""

MakeParts = Callable[[], StepParts]
"""Makes the whole step's parts, the same at every call and on every rank."""


def check_ranks(
    name: str, make_parts: MakeParts, choices: Choices, device: torch.device, ranks: Ranks, *,
    layers: int | None = None, strategy: Strategy | None = None,
) -> Correctness:  # fmt: skip
    """Hold the ranks against one process. All ranks must call it, and all return the same.

    layers: how many the checked model has, where it is not the whole. strategy: in place of that of this name.
    """
    record = strategy_named(name)
    halved = record.settings.get("compute") == "bf16"
    least = _FEWEST[torch.bfloat16] if halved else _least(choices, cuts_sums=record.cuts_sums)
    verdicts: list[_Distance] = []
    for make_optimizer, parts_of_found in ((_sgd, (0, 1)), (_adamw, (2,))):
        expected = _expected(make_parts, choices, device, ranks, make_optimizer) if ranks.is_first else None
        found = _by_ranks(name, make_parts(), choices, device, ranks, make_optimizer=make_optimizer, strategy=strategy)
        if expected is not None:
            # What the parameters became has the roundings of every step in it.
            verdicts += [_distance(found[i], expected[0][i], [other[i] for other in expected[1]],
                                   least * (STEPS if i == 1 else 1))
                         for i in parts_of_found]  # fmt: skip
    verdict: Correctness | None = None
    if verdicts:
        gradient, update, loss = verdicts
        worst = next((one.worst for one in verdicts if one.error > one.allowed), update.worst)
        verdict = Correctness(
            gradient_error=gradient.error, gradient_spread=gradient.spread, gradient_allowed=gradient.allowed,
            update_error=update.error, update_spread=update.spread, update_allowed=update.allowed,
            loss_error=loss.error, loss_spread=loss.spread, loss_allowed=loss.allowed,
            worst=worst, steps=STEPS, layers=layers,
        )  # fmt: skip
    return ranks.told(verdict)


_Found = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]
"""The gradients of the first step, by how much the steps changed the parameters, and the loss of each step, on the CPU
in fp64."""


class _Distance(NamedTuple):
    """How far the ranks are from one process, and how far that is from itself."""

    error: float
    worst: str
    spread: float
    allowed: float


def _distance(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], others: Sequence[Mapping[str, Tensor]], least: float
) -> _Distance:
    error, worst = furthest(found, wanted)
    spread = max((furthest(other, wanted)[0] for other in others), default=0.0)
    return _Distance(error, worst, spread, max(_ALLOWED * spread, least))


def _least(choices: Choices, *, cuts_sums: bool) -> float:
    """The least distance that is allowed."""
    return _FEWEST[_product_dtype(choices)] if cuts_sums else _ROUNDINGS * torch.finfo(torch.float32).eps


def _expected(
    make_parts: MakeParts, choices: Choices, device: torch.device, ranks: Ranks, make_optimizer: MakeOptimizer
) -> tuple[_Found, list[_Found]]:
    """What one process finds, and what it finds in its other ways to split the batch."""
    whole = _alone(make_parts(), choices, device, 1, make_optimizer)
    others: list[_Found] = []
    for pieces in dict.fromkeys((ranks.ranks, 2, 2 * ranks.ranks, 4)):
        with contextlib.suppress(_NoSplit):
            others.append(_alone(make_parts(), choices, device, pieces, make_optimizer))
    return whole, others


class _NoSplit(Exception):
    """The batch has no such parts."""


def _alone(
    parts: StepParts, choices: Choices, device: torch.device, pieces: int, make_optimizer: MakeOptimizer
) -> _Found:
    model = parts.model.eval()  # dropout would draw other numbers for other parts
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    began = _copies(dict(model.named_parameters()))
    gradients: dict[str, Tensor] = {}
    losses: dict[str, Tensor] = {}
    for step in range(STEPS):
        batch = parts.batches[step % len(parts.batches)]
        try:
            micro_batches = parts.split(batch, pieces) if pieces > 1 else [batch]
        except Exception as error:  # a user's batch may have no such parts
            raise _NoSplit from error
        if len(micro_batches) != pieces:
            raise _NoSplit
        for micro_batch in micro_batches:
            with autocast_of(choices, device.type):
                loss = parts.forward(*micro_batch[: parts.forward_inputs])
            (loss / pieces).backward()
            _add_loss(losses, step, float(loss.detach()), pieces)
        if not step:
            gradients = _copies({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return gradients, _changes(_copies(dict(model.named_parameters())), began), losses


def _by_ranks(
    name: str, parts: StepParts, choices: Choices, device: torch.device, ranks: Ranks, *, make_optimizer: MakeOptimizer,
    strategy: Strategy | None,
) -> _Found:  # fmt: skip
    record = strategy_named(name)
    parts.model.eval()
    spread: Spread = spread_parts(record, parts, choices, ranks, make_optimizer=make_optimizer, strategy=strategy)
    assert spread.optimizer is not None
    began = _copies(spread.full_parameters())
    gradients: dict[str, Tensor] = {}
    losses: dict[str, Tensor] = {}
    for step in range(STEPS):
        batch = part_of(parts.batches[step % len(parts.batches)], parts, record, ranks)
        loss = spread.run(batch) if spread.run is not None else _one_by_one(spread, parts, batch, choices, device)
        known = [one for one in ranks.gathered(float(loss.detach()) if loss is not None else None) if one is not None]
        for of_rank in known:
            _add_loss(losses, step, of_rank, len(known))
        spread.finish()
        if not step:
            gradients = _copies(spread.full_gradients())
        spread.optimizer.step()
        spread.optimizer.zero_grad(set_to_none=True)
    return gradients, _changes(_copies(spread.full_parameters()), began), losses


def _one_by_one(
    spread: Spread, parts: StepParts, batch: Batch, choices: Choices, device: torch.device
) -> Tensor:  # fmt: skip
    """Forward, then backward; returns the loss."""
    with autocast_of(choices, device.type):
        loss: Tensor = spread.forward(*batch[: parts.forward_inputs])
    loss.backward()
    return loss


def _sgd(parameters: Sequence[object]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=_LEARNING_RATE)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def _adamw(parameters: Sequence[object]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def _add_loss(losses: dict[str, Tensor], step: int, loss: float, parts: int) -> None:
    """Add the loss of one of so many equal parts of a batch to the step's mean."""
    name = f"the loss of step {step + 1}"
    losses[name] = losses.get(name, torch.zeros((), dtype=torch.float64)) + loss / parts


def furthest(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest distance of any tensor, as a share of the one wanted, and its name; infinite for one that is missing,
    or not finite."""
    worst, named = 0.0, ""
    for name, expected in wanted.items():
        if name not in found:
            return float("inf"), name
        size = float(expected.norm())
        away = float((found[name] - expected).norm())
        distance = away / size if size else away
        if not distance <= worst:  # not a number is the worst of all
            worst, named = float("inf") if math.isnan(distance) else distance, name
    return worst, named


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", torch.float64, copy=True) for name, tensor in tensors.items()}


def _changes(now: Mapping[str, Tensor], began: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor - began[name] for name, tensor in now.items()}


def _product_dtype(choices: Choices) -> torch.dtype:
    return AUTOCAST_DTYPE.get(choices.dtype, torch.bfloat16 if choices.dtype == "bf16-pure" else torch.float32)
