"""Pipeline schedules as the work of each rank, in order.

1F1B and its interleaved form as Narayanan et al. 2021 draw them (figures 3 and 4) and Megatron runs them: some forwards
to warm up, then a forward and a backward in turn, then the backwards that are left.
"""

from typing import NamedTuple

from stepscope.core.layout import Layout


class Work(NamedTuple):
    """A forward or a backward of a micro-batch through one chunk of a rank."""

    forward: bool
    micro_batch: int
    chunk: int


def schedule(layout: Layout, rank: int) -> list[Work]:
    """The work of a pipeline rank in its order."""
    p, m, v = layout.pipeline, layout.micro_batches, layout.chunks
    every = m * v
    warm_up = min(every, p - rank - 1 if v == 1 else 2 * (p - rank - 1) + (v - 1) * p)
    forwards = [_work(layout, number, forward=True) for number in range(every)]
    backwards = [_work(layout, number, forward=False) for number in range(every)]
    found = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        found += [forward, backward]
    return found + backwards[every - warm_up :]


def _work(layout: Layout, number: int, *, forward: bool) -> Work:
    """The so-manieth forward or backward of any rank: p micro-batches through a chunk, then through the next."""
    p, v = layout.pipeline, layout.chunks
    if v == 1:
        return Work(forward, number, 0)
    chunk = number % (p * v) // p
    micro_batch = number // (p * v) * p + number % p
    return Work(forward, micro_batch, chunk if forward else v - 1 - chunk)
