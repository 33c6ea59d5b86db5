"""Whether ranks that share a step compute what one process does: right before fast.

One process splits the global batch into micro-batches in several ways. Arithmetic in another order gives slightly other
gradients, and how far these lie apart is the spread that rounding alone makes. The ranks' gradients of the first step,
and what five steps of plain SGD make of the parameters, must lie within twice that spread of one process's. SGD, since
AdamW divides by the gradient's own size and makes as much of noise near zero as of the rest. Of five steps of AdamW the
losses alone are compared: a loss is one number, and how far it may be is said by all losses of one process
(training/parallel/correctness.py). Where the step clips gradients, all of them do; where the ranks compute with copies
of their parameters in bf16, so does the one process.

Products of eight bits take one scale for all rows that a process holds, so that ways to split the batch differ by a
fifth of a small gradient. Of these the one process splits its batch as the ranks do, and does so twice: where kernels
add up in any order, as attention's backward does on Hopper, a last bit of 16 may be a whole unit of eight, and two runs
say how far that goes. What is allowed at least is as much as to ranks that cut sums.

Distances are taken parameter by parameter, ||a - b|| / ||b||, and the largest counts: a forgotten bias must not hide
behind a matrix.
"""

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from stepscope.core.evidence import Correctness
from stepscope.core.precisions import PRECISIONS
from stepscope.core.processes import student_quantile
from stepscope.core.strategies import strategy_named
from stepscope.core.workloads import Workload
from stepscope.training.optimizer import NormOf, clip_gradients, global_norm, gradients_of, updated_by
from stepscope.training.parallel.step import Batch, MakeOptimizer, Spread, Strategy, part_of, spread_parts
from stepscope.training.training_step import AUTOCAST_DTYPE, Ranks, StepParts, autocast_of

# How far rounding may take a number that nobody can know beforehand, from a few draws of it.
#
# The distance of many numbers, such as a gradient's, is nearly the same for every way to round them, so that twice the
# largest seen is a bound. A loss is one number: its error has a sign, is sometimes near nothing, and then twice the
# largest of three says little of the next. Here the losses of one process, over its ways to split the batch, are taken
# for draws of one normal distribution, and that of the ranks for one more: Student's t says how far it may lie.
#
# Of 40 models with other seeds, in bf16 on a CPU, the errors of the second step to the fifth are uncorrelated (within
# 0.15): each step sees other samples. So they are pooled, which makes of four ways twelve degrees of freedom.


REFUSED = 1e-6
"""How often a loss of one right step may lie beyond the bound."""


def difference_bound(draws: Sequence[Sequence[float]], independent: int) -> float:
    """How far one more draw may lie from one of these, as a share; 0 of fewer than two ways.

    draws: of each way (W), the loss of each step (T), steps of about the same relative error.
    independent: how many of the T steps have errors of their own.
    """
    if len(draws) < 2 or not draws[0] or independent < 1:
        return 0.0
    variances = [statistics.variance(step) / (statistics.fmean(step) or 1.0) ** 2 for step in zip(*draws, strict=True)]
    freedom = (len(draws) - 1) * min(independent, len(variances))
    # The variance of the difference of two draws is twice that of one draw.
    return student_quantile(1 - REFUSED / 2, freedom) * math.sqrt(2 * statistics.fmean(variances))


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
    name: str, make_parts: MakeParts, choices: Workload, device: torch.device, ranks: Ranks, *,
    strategy: Strategy | None = None,
) -> Correctness:  # fmt: skip
    """Hold the ranks against one process. All ranks must call it, and all return the same.

    strategy: in place of that of this name.
    """
    record = strategy_named(name)
    compute = torch.bfloat16 if record.settings.get("compute") == "bf16" else None
    product_dtype = AUTOCAST_DTYPE.get(choices.dtype, torch.bfloat16 if choices.dtype == "bf16-pure" else torch.float32)
    cuts_sums = record.cuts_sums or PRECISIONS[choices.dtype].scaled
    least = _FEWEST[product_dtype] if cuts_sums else _ROUNDINGS * torch.finfo(torch.float32).eps
    verdicts: list[_Distance] = []
    sgd, adamw = partial(torch.optim.SGD, lr=_LEARNING_RATE), partial(torch.optim.AdamW, lr=1e-4)
    # AdamW is judged by its losses alone, so nothing else is copied for it.
    for make_optimizer, parts_of_found in ((sgd, (0, 1)), (adamw, (2,))):
        copies = _Copies(device, wanted=0 in parts_of_found)
        expected = (
            _expected(make_parts, choices, device, ranks, make_optimizer, copies=copies, compute=compute)
            if ranks.rank == 0
            else None
        )
        by_ranks = _by_ranks(
            name, make_parts(), choices, device, ranks, make_optimizer=make_optimizer, strategy=strategy, copies=copies
        )
        if expected is not None:
            # What the parameters became has the roundings of every step in it.
            # A bound from few losses can be so wide that it checks nothing: it is held to what ranks that cut sums get.
            allowed = (least, STEPS * least, max(least, min(expected.losses_apart, _FEWEST[product_dtype])))
            for i in parts_of_found:
                error, worst = furthest(by_ranks[i], expected.whole[i], expected.slack if i == 1 else None)
                spread = max((away[i] for away in expected.apart), default=0.0)
                verdicts.append(_Distance(error, worst, spread, max(_ALLOWED * spread, allowed[i])))
    verdict: Correctness | None = None
    if verdicts:
        gradient, update, loss = verdicts
        worst = next((one.worst for one in verdicts if one.error > one.allowed), update.worst)
        verdict = Correctness(
            gradient_error=gradient.error, gradient_spread=gradient.spread, gradient_allowed=gradient.allowed,
            update_error=update.error, update_spread=update.spread, update_allowed=update.allowed,
            loss_error=loss.error, loss_spread=loss.spread, loss_allowed=loss.allowed,
            worst=worst, steps=STEPS,
        )  # fmt: skip
    return ranks.broadcast(verdict)


_Found = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]
"""The gradients of the first step, by how much the steps changed the parameters, and the loss of each step."""
_Slack = dict[str, float]
"""What a few roundings of a parameter itself may add up to, by name. A gradient that differs in its last bit can round
a number of the parameter the other way, and a norm's weight, near one, changes by little more than such a rounding."""
_Apart = tuple[float, float, float]
"""How far another way is from the first, of each of these three."""


class _Expected(NamedTuple):
    """What one process finds."""

    whole: _Found
    apart: list[_Apart]
    """How far its other ways to split the batch are from that."""
    losses_apart: float
    """How far, as a share, a loss may be from another's, by the losses of all ways."""
    slack: _Slack


class _Distance(NamedTuple):
    """How far the ranks are from one process, and how far that is from itself."""

    error: float
    worst: str
    spread: float
    allowed: float


def _expected(
    make_parts: MakeParts, choices: Workload, device: torch.device, ranks: Ranks, make_optimizer: MakeOptimizer, *,
    copies: "_Copies", compute: torch.dtype | None,
) -> _Expected:  # fmt: skip
    parts = make_parts()
    independent, slack = len(parts.batches), {}
    if copies.wanted:
        slack = {
            name: _ROUNDINGS * torch.finfo(p.dtype).eps * float(p.detach().abs().max())
            for name, p in parts.model.named_parameters()
            if p.is_floating_point() and p.numel()
        }
    as_ranks = choices.accumulation * ranks.ranks
    ways = dict.fromkeys((1, ranks.ranks, 2, 2 * ranks.ranks, 4, as_ranks))
    # With one scale for the rows that a process holds, ways to split the batch differ by more than rounding, and one
    # process must split it as the ranks do.
    first, *other_ways = (as_ranks, as_ranks) if PRECISIONS[choices.dtype].scaled else ways
    whole = _alone(parts, choices, device, first, make_optimizer, copies=copies, compute=compute)
    others: list[_Apart] = []
    del parts  # there is room for one model at a time
    losses = [whole[2]]
    for pieces in other_ways:
        with contextlib.suppress(_NoSplit):
            other = _alone(make_parts(), choices, device, pieces, make_optimizer, copies=copies, compute=compute)
            # Only the distance is kept: a model of billions of parameters has no room for every way.
            gradients, changes, its_losses = (
                furthest(*each)[0] for each in zip(other, whole, (None, slack, None), strict=True)
            )
            others.append((gradients, changes, its_losses))
            losses.append(other[2])
    # An update had a part in all losses but the first, whose error is of another size.
    draws = [[float(loss) for loss in each.values()][1:] for each in losses]
    return _Expected(whole, others, difference_bound(draws, independent), slack)


class _NoSplit(Exception):
    """The batch has no such parts."""


def _alone(
    parts: StepParts, choices: Workload, device: torch.device, pieces: int, make_optimizer: MakeOptimizer, *,
    copies: "_Copies", compute: torch.dtype | None,
) -> _Found:  # fmt: skip
    model = parts.model.eval()  # dropout would draw other numbers for other parts
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    began = copies.of(dict(model.named_parameters()))
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
            with _computing_in(compute, parts.forward):
                inputs = tuple(micro_batch[: parts.forward_inputs])
                if compute is not None:
                    inputs = tree_map_only(
                        Tensor, lambda one: one.to(compute) if one.is_floating_point() else one, inputs
                    )
                with autocast_of(choices, device.type):
                    loss = parts.forward(*inputs)
                (loss * _scale(choices)).backward()
            _add_loss(losses, step, float(loss.detach()), pieces)
        # As ranks do it: in 16 bits a third of the loss would round otherwise than the loss itself.
        _divide(optimizer, _scale(choices) * pieces)
        if not step:
            gradients = copies.of({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        _clip(optimizer, choices)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return gradients, _changes(copies.of(dict(model.named_parameters())), began), losses


@contextlib.contextmanager
def _computing_in(dtype: torch.dtype | None, module: torch.nn.Module) -> Iterator[None]:
    """A context in which copies in this dtype stand in the parameters' places, as a strategy's option `compute` has it;
    None copies nothing. Backward is within, too: it may run a forward again."""
    copies = {p: p.to(dtype) for p in module.parameters() if p.is_floating_point()} if dtype is not None else {}
    places: list[tuple[dict[str, Any], str, torch.nn.Parameter]] = [
        (owner._parameters, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and parameter in copies
    ]
    for parameters, name, parameter in places:
        parameters[name] = copies[parameter]
    try:
        yield
    finally:
        for parameters, name, parameter in places:
            parameters[name] = parameter


def _by_ranks(
    name: str, parts: StepParts, choices: Workload, device: torch.device, ranks: Ranks, *,
    make_optimizer: MakeOptimizer, strategy: Strategy | None, copies: "_Copies",
) -> _Found:  # fmt: skip
    record = strategy_named(name)
    parts.model.eval()
    spread: Spread = spread_parts(record, parts, choices, ranks, make_optimizer=make_optimizer, strategy=strategy)
    assert spread.optimizer is not None
    began = copies.of(spread.full_parameters() if copies.wanted else {})
    gradients: dict[str, Tensor] = {}
    losses: dict[str, Tensor] = {}
    for step in range(STEPS):
        batch = part_of(parts.batches[step % len(parts.batches)], parts, record, ranks)
        loss = spread.run(batch) if spread.run is not None else _one_by_one(spread, parts, batch, choices, device)
        known = [one for one in ranks.gathered(float(loss.detach()) if loss is not None else None) if one is not None]
        for of_rank in known:
            _add_loss(losses, step, of_rank, len(known))
        spread.finish()
        _divide(spread.optimizer, _scale(choices))
        if not step:
            gradients = copies.of(spread.full_gradients() if copies.wanted else {})
        _clip(spread.optimizer, choices, spread.norm_of)
        spread.optimizer.step()
        spread.optimizer.zero_grad(set_to_none=True)
    return gradients, _changes(copies.of(spread.full_parameters() if copies.wanted else {}), began), losses


def _one_by_one(spread: Spread, parts: StepParts, batch: Batch, choices: Workload, device: torch.device) -> Tensor:
    """Forward and backward of each micro-batch; returns the loss."""
    count = choices.accumulation
    losses: list[Tensor] = []
    for micro_batch in parts.split(batch, count):
        with autocast_of(choices, device.type):
            loss: Tensor = spread.forward(*micro_batch[: parts.forward_inputs]) / count
        losses.append(loss.detach())
        with spread.local() if len(losses) < count else contextlib.nullcontext():
            (loss * _scale(choices)).backward()
    return torch.stack(losses).sum()


def _scale(choices: Workload) -> float:
    """What losses are multiplied by: in fp16 gradients would lose digits near its least numbers, more so of a part."""
    return 2.0**10 if choices.dtype == "fp16" else 1.0


@torch.no_grad()
def _divide(optimizer: torch.optim.Optimizer, divisor: float) -> None:
    """Divide every gradient."""
    if divisor != 1:
        for gradient in gradients_of(updated_by(optimizer)):
            gradient.div_(divisor)


def _clip(optimizer: torch.optim.Optimizer, choices: Workload, norm_of: NormOf = global_norm) -> None:
    if choices.clip is not None:
        # On a CPU, PyTorch's norm in fp32 of a million numbers is off by some 1e-4, and of two halves by another.
        clip_gradients(updated_by(optimizer), choices.clip, norm_of, torch.float64)


def _add_loss(losses: dict[str, Tensor], step: int, loss: float, parts: int) -> None:
    """Add the loss of one of so many equal parts of a batch to the step's mean."""
    name = f"the loss of step {step + 1}"
    losses[name] = losses.get(name, torch.zeros((), dtype=torch.float64)) + loss / parts


def furthest(
    measured: Mapping[str, Tensor], wanted: Mapping[str, Tensor], slack: Mapping[str, float] | None = None
) -> tuple[float, str]:
    """The largest distance of any tensor, as a share of the one wanted, and its name; infinite for one that is missing,
    or not finite. slack: what of a tensor's distance does not count, by its name."""
    worst, named = 0.0, ""
    for name, expected in wanted.items():
        if name not in measured:
            return float("inf"), name
        size = float(expected.double().norm())
        away = float((measured[name].to(expected.device, torch.float64) - expected.double()).norm())
        away -= min(away, (slack or {}).get(name, 0.0))
        distance = away / size if size else away
        if not distance <= worst:  # not a number is the worst of all
            worst, named = float("inf") if math.isnan(distance) else distance, name
    return worst, named


@dataclass(eq=False)
class _Copies:
    """Copies of tensors, on the step's device where a model of this size has room for them, else on the CPU."""

    device: torch.device
    wanted: bool = field(kw_only=True, default=True)
    """Whether anything is to be copied at all."""

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not self.wanted:
            return {}
        place = torch.device("cpu")
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
            free -= torch.cuda.memory_allocated(self.device)
            if _ROOM * sum(tensor.nbytes for tensor in tensors.values()) <= free:
                place = self.device
        return {name: tensor.detach().to(place, copy=True) for name, tensor in tensors.items()}


_ROOM = 12
"""How many times the size of the parameters must be free for a copy to stay on a GPU: gradients, the optimizer's state,
copies of the first way and of another, and activations."""


@torch.no_grad()
def _changes(now: Mapping[str, Tensor], began: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What became of each, in fp64 before it is rounded to fp32: a change is small beside what it changes."""
    return {name: (tensor.double() - began[name].to(tensor.device).double()).float() for name, tensor in now.items()}
