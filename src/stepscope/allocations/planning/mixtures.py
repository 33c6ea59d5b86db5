"""Checkpointing between `selective` and `attention`: how many blocks can keep what their products return.

A block that keeps the outputs of its products needs more memory than one that keeps those of attention alone, and runs
no product again. So of the mixtures of a layout one is worth planning: the one with most such blocks that still fits,
which may be none of them.

A rank's peak is nearly a line over their number, from the peak of `attention` to that of `selective`. The line says
where to look, and two peaks there mostly settle it; where it is bent, halving does.
"""

from collections.abc import Callable

import msgspec

from stepscope.allocations.planning.space import Question
from stepscope.allocations.prediction.layouts import RankMemory
from stepscope.core.checkpointing import KEEPING, keeping, most_that_fit
from stepscope.core.layout import Layout

MIXTURES = (
    "selective-K: the last K blocks keep what their products and attention return, and the others what attention does "
    "alone. Backward computes the rest again. Where --checkpointing settles no K, it is the largest that fits."
)
"""What readers of a plan are told of `selective-K`."""


def open_to_mixtures(question: Question, alike: list[Layout], fit: list[bool]) -> list[Layout]:
    """The layouts of `selective` that do not fit, but do with `every-1`, which needs less than any mixture.

    alike: layouts that differ only in micro-batch and checkpointing. fit: whether each of them fits.
    """
    if not question.mixes:
        return []
    fitting = {(one.micro_batch, one.checkpointing) for one, fits in zip(alike, fit, strict=True) if fits}
    return [
        one
        for one in alike
        if one.checkpointing == "selective" and (one.micro_batch, "selective") not in fitting
        and (one.micro_batch, "every-1") in fitting
    ]  # fmt: skip


def mixed(layout: Layout, memory: RankMemory, room: int, *, exactly: bool = False) -> Layout | None:
    """The layout with as many blocks that keep what `selective` does as fit; None where not even `attention` does.

    Blocks of a pipeline's stages keep alike: there it is all of them or none.
    """
    layers = memory.model.config.layers

    def peak(one: Layout) -> int:
        return memory.needs(one, exactly=exactly).peak

    most, least = (msgspec.structs.replace(layout, checkpointing=one) for one in KEEPING)
    if peak(most) <= room:
        return most
    if peak(least) > room:
        return None
    if layout.pipeline > 1:
        return least
    return with_most(least, layers, on_line(layers, peak(least), peak(most), room), lambda one: peak(one) <= room)


def with_most(layout: Layout, layers: int, guess: int, fits: Callable[[Layout], bool]) -> Layout:
    """The layout with the most blocks that keep what `selective` does and fit. It must fit with none of them, and not
    with all."""

    def of(blocks: int) -> Layout:
        return msgspec.structs.replace(layout, checkpointing=keeping(blocks, layers))

    low, high = 0, layers
    for blocks in (guess, guess + 1):
        if low < blocks < high:
            low, high = (blocks, high) if fits(of(blocks)) else (low, blocks)
    return of(most_that_fit(low, high, lambda blocks: fits(of(blocks))))


def on_line(layers: int, least: int, most: int, room: int) -> int:
    """How many of the blocks fit into `room`, were the peak a line from `least` with none of them to `most`."""
    return layers * (room - least) // (most - least) if most > least else 0
