"""Whether ranks that share a step compute what one process does: right before fast.

One process splits the global batch into micro-batches in several ways. Arithmetic in another order gives slightly other
gradients, and how far these lie apart is the spread that rounding alone makes. The ranks' gradients of the first step,
and what five steps of plain SGD make of the parameters, must lie within twice that spread of one process's. SGD, since
AdamW divides by the gradient's own size and makes as much of noise near zero as of the rest.

Distances are taken parameter by parameter, ||a - b|| / ||b||, and the largest counts: a forgotten bias must not hide
behind a matrix.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from stepscope.core.ranks import Correctness
from stepscope.core.strategies import strategy_named
from stepscope.models.training_step import AUTOCAST_DTYPE, Choices, StepParts
from stepscope.parallel.ranks import Ranks
from stepscope.parallel.spread import Spread, Strategy
from stepscope.parallel.step import part_of, spread_parts

SGD_STEPS = 5
_LEARNING_RATE = 0.05
_ALLOWED = 2.0
"""How many times the spread of one process the ranks may be off."""
_FEWEST = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""The least distance that is allowed, by the dtype of the products: about a hundred roundings, where one process has
only one way to split its batch, or happens to round alike in all."""

MakeParts = Callable[[], StepParts]
"""Makes the whole step's parts, the same at every call and on every rank."""


def check_ranks(
    name: str, make_parts: MakeParts, choices: Choices, device: torch.device, ranks: Ranks, *,
    layers: int | None = None, strategy: Strategy | None = None,
) -> Correctness:  # fmt: skip
    """Hold the ranks against one process. All ranks must call it, and all return the same.

    layers: how many the checked model has, where it is not the whole. strategy: in place of that of this name.
    """
    wanted, spread_found = _expected(make_parts, choices, device, ranks) if ranks.is_first else (None, None)
    found = _by_ranks(name, make_parts(), choices, device, ranks, strategy=strategy)
    verdict: Correctness | None = None
    if wanted is not None and spread_found is not None:
        least = _FEWEST[_product_dtype(choices)]
        gradient, worst = furthest(found[0], wanted[0])
        update, worst_update = furthest(found[1], wanted[1])
        allowed = [max(_ALLOWED * spread, least) for spread in spread_found]
        verdict = Correctness(
            gradient_error=gradient, gradient_spread=spread_found[0], gradient_allowed=allowed[0],
            update_error=update, update_spread=spread_found[1], update_allowed=allowed[1],
            worst=worst if gradient > allowed[0] else worst_update, steps=SGD_STEPS, layers=layers,
        )  # fmt: skip
    return ranks.told(verdict)


_Found = tuple[dict[str, Tensor], dict[str, Tensor]]
"""The gradients of the first step, and by how much the steps changed the parameters, on the CPU in fp64."""


def _expected(
    make_parts: MakeParts, choices: Choices, device: torch.device, ranks: Ranks
) -> tuple[_Found, tuple[float, float]]:
    """What one process finds, and how far its own ways to split the batch lie apart."""
    whole = _alone(make_parts(), choices, device, 1)
    others: list[_Found] = []
    for pieces in dict.fromkeys((ranks.ranks, 2, 2 * ranks.ranks, 4)):
        with contextlib.suppress(_NoSplit):
            others.append(_alone(make_parts(), choices, device, pieces))
    spreads = [max((furthest(other[i], whole[i])[0] for other in others), default=0.0) for i in (0, 1)]
    return whole, (spreads[0], spreads[1])


class _NoSplit(Exception):
    """The batch has no such parts."""


def _alone(parts: StepParts, choices: Choices, device: torch.device, pieces: int) -> _Found:
    model = parts.model.eval()  # dropout would draw other numbers for other parts
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=_LEARNING_RATE)
    began = _copies(dict(model.named_parameters()))
    gradients: dict[str, Tensor] = {}
    for step in range(SGD_STEPS):
        batch = parts.batches[step % len(parts.batches)]
        try:
            micro_batches = parts.split(batch, pieces) if pieces > 1 else [batch]
        except Exception as error:  # a user's batch may have no such parts
            raise _NoSplit from error
        if len(micro_batches) != pieces:
            raise _NoSplit
        for micro_batch in micro_batches:
            with _autocast(choices, device):
                loss = parts.forward(*micro_batch[: parts.forward_inputs])
            (loss / pieces).backward()
        if not step:
            gradients = _copies({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return gradients, _changes(_copies(dict(model.named_parameters())), began)


def _by_ranks(
    name: str, parts: StepParts, choices: Choices, device: torch.device, ranks: Ranks, *, strategy: Strategy | None
) -> _Found:  # fmt: skip
    record = strategy_named(name)
    parts.model.eval()
    spread: Spread = spread_parts(record, parts, choices, ranks, make_optimizer=_sgd, strategy=strategy)
    assert spread.optimizer is not None
    began = _copies(spread.full_parameters())
    gradients: dict[str, Tensor] = {}
    for step in range(SGD_STEPS):
        batch = part_of(parts.batches[step % len(parts.batches)], parts, record, ranks)
        with _autocast(choices, device):
            loss = spread.forward(*batch[: parts.forward_inputs])
        loss.backward()
        spread.finish()
        if not step:
            gradients = _copies(spread.full_gradients())
        spread.optimizer.step()
        spread.optimizer.zero_grad(set_to_none=True)
    return gradients, _changes(_copies(spread.full_parameters()), began)


def _sgd(parameters: Sequence[object]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=_LEARNING_RATE)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


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


def _autocast(choices: Choices, device: torch.device) -> contextlib.AbstractContextManager[object]:
    dtype = AUTOCAST_DTYPE.get(choices.dtype)
    return torch.autocast(device.type, dtype=dtype) if dtype else contextlib.nullcontext()
