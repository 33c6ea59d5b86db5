"""Data parallel, lesson 2: one message in place of many.

As in lesson 1, but the gradients are copied into one tensor, which is all-reduced once, and copied back. The same bytes
take one latency in place of one for each parameter; the copies read and write the gradients twice more, and the flat
tensor takes as much memory as they do. Nothing is hidden yet: the collective begins when backward has ended.
"""

import torch

from stepscope.training.optimizer import same_kind
from stepscope.training.parallel.collective import (
    average,
    broadcast_from_first,
    flat,
    trained,
    unflatten_into,
    with_gradient,
)
from stepscope.training.parallel.step import Spread, Whole, replicated
from stepscope.training.training_step import Ranks


def spread(whole: Whole, ranks: Ranks) -> Spread:
    """All-reduce all gradients as one tensor after backward."""
    broadcast_from_first(whole.model)
    parameters = trained(whole.model)

    @torch.no_grad()
    def finish() -> None:
        average_flat(parameters)

    return replicated(whole, finish=finish)


def average_flat(parameters: list[torch.nn.Parameter]) -> None:
    """Replace the gradients of these parameters by their means over the ranks, in one message for each dtype."""
    for gradients in same_kind(with_gradient(parameters)):
        together = flat(gradients)
        average(together)
        unflatten_into(together, gradients)
