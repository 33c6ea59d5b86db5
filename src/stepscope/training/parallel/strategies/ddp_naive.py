"""Data parallel, lesson 1: every rank has the whole model and its part of the batch.

The loss is the mean over the batch, so its gradient is the mean of the ranks' gradients:

    g = 1/n (g_1 + ... + g_n)        all parts of the batch being equally large

Each gradient is all-reduced by itself, one after the other, when backward is over. A rank sends 2 (n - 1) / n of the
gradients' bytes, in as many messages as there are parameters, and computes nothing meanwhile: small messages pay the
latency of a collective each.
"""

import torch

from stepscope.training.parallel.collective import average, broadcast_from_first, trained, with_gradient
from stepscope.training.parallel.step import Spread, Whole, replicated
from stepscope.training.training_step import Ranks


def spread(whole: Whole, ranks: Ranks) -> Spread:
    """All-reduce each gradient after backward."""
    broadcast_from_first(whole.model)
    parameters = trained(whole.model)

    @torch.no_grad()
    def finish() -> None:
        for gradient in with_gradient(parameters):
            average(gradient)

    return replicated(whole, finish=finish)
