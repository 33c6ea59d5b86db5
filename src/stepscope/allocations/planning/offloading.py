"""Checkpointing `offload-K`: how long its copies take, and how many blocks may offload before the step waits for them.

Blocks that offload lie evenly between the others, and their copies have the time of all blocks: to the host that of
forward, back that of backward, which is twice as long. As long as forward hides the former, each block that offloads
spares memory and costs next to nothing.
"""

from collections.abc import Callable

import msgspec

from stepscope.allocations.planning.rates import Rates
from stepscope.allocations.prediction.layouts import RankMemory
from stepscope.core.checkpointing import OFFLOAD, most_that_fit, offload_of
from stepscope.core.layout import Layout

_HIDDEN = 0.95
"""The share of forward that copies may take. With 22 and 23 of 34 blocks of 8B they take 0.95 and 0.99 of the blocks'
planned forward, and the step waits for nothing; with 28 it waits (results/h200-x2/long-step-offload)."""


def said_of(rates: Rates) -> str:
    """What readers of a plan are told of `offload-K`."""
    return (
        "offload-K: all blocks keep what their products and attention return, K of them in the host's memory, to which "
        f"a GPU is taken to copy {rates.host_bytes_per_s / 1e9:.3g} GB a second and from it (by what H200 do over PCIe "
        "5.0). Where --checkpointing settles no K, it is the largest whose copies forward hides, or as many as are "
        "needed to fit."
    )


def copies_s(layout: Layout, memory: RankMemory, rates: Rates) -> float:
    """Seconds in which a micro-batch's copies pass one way, in the mean of all blocks."""
    blocks = offload_of(layout.checkpointing)
    return blocks / memory.model.config.layers * memory.offloaded(layout) / rates.host_bytes_per_s if blocks else 0.0


def offloading(
    layout: Layout, memory: RankMemory, rates: Rates, forward_s: float, fits: Callable[[Layout], bool]
) -> Layout | None:  # fmt: skip
    """The layout with as many blocks that offload as forward hides, or as are needed to fit. None where it does not fit
    with all of them.

    forward_s: seconds of a block's forward.
    """
    layers = memory.model.config.layers

    def of(blocks: int) -> Layout:
        return msgspec.structs.replace(layout, checkpointing=f"{OFFLOAD}-{blocks}")

    def too_large(blocks: int) -> bool:
        return not fits(of(blocks))

    if too_large(layers):
        return None
    hidden = max(1, min(layers, int(layers * _HIDDEN * forward_s / copies_s(of(layers), memory, rates))))
    return of(most_that_fit(hidden, layers, too_large) + 1 if too_large(hidden) else hidden)
