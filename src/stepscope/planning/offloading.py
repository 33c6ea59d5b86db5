"""Checkpointing `offload-K`: how long its copies take, and how many blocks may offload before the step waits for them.

A block's copies to the host have the time of its forward and of the blocks beside it; those back have backward's, which
is twice as long. As long as forward hides the former, each block that offloads spares memory and costs nothing.
"""

from collections.abc import Callable

import msgspec

from stepscope.core.checkpointing import OFFLOAD, most_that_fit, offload_of
from stepscope.core.layout import Layout
from stepscope.memory.prediction.layouts import RankMemory

HOST_BYTES_PER_S = 54e9
"""What a GPU copies to its host's memory or from it in a second, over PCIe 5.0 with 16 lanes, in pieces of 32 MiB of
locked memory: two H200 at once, each way. It is taken for any device."""
_HIDDEN = 0.9
"""The share of forward that copies may take. With 23 of 34 blocks of 8B they take nine tenths and the step waits for
nothing; with 28, more than forward (results/h200-x2/long-step)."""

OFFLOADING = (
    "offload-K: all blocks keep what their products and attention return, K of them in the host's memory, to which a "
    f"GPU is taken to copy {HOST_BYTES_PER_S / 1e9:.0f} GB a second and from it (measured on two H200). Where "
    "--checkpointing settles no K, it is the largest whose copies forward hides."
)
"""What readers of a plan are told of `offload-K`."""


def copies_s(layout: Layout, memory: RankMemory) -> float:
    """Seconds in which a micro-batch's copies pass one way, in the mean of all blocks."""
    blocks = offload_of(layout.checkpointing)
    return blocks / memory.model.config.layers * memory.offloaded(layout) / HOST_BYTES_PER_S if blocks else 0.0


def offloading(
    layout: Layout, memory: RankMemory, forward_s: float, fits: Callable[[Layout], bool]
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
    hidden = max(1, min(layers, int(layers * _HIDDEN * forward_s / copies_s(of(layers), memory))))
    return of(most_that_fit(hidden, layers, too_large) + 1 if too_large(hidden) else hidden)
