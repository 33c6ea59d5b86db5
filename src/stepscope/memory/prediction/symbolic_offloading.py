"""Blocks that keep what they keep for backward in the host's memory, in symbolic tensors: `models/offloading.py`, whose
copies hold the device's memory until they are made."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from stepscope.core.checkpointing import BLOCKS_ON_THE_WAY, Span
from stepscope.memory.prediction.symbolic_tensors import KEPT_OPERATORS, Segment, Storage, Tape, Tensor

T = TypeVar("T")


def run_offloading(
    tape: Tape, x: Tensor, blocks: Iterable[tuple[Span, Sequence[T]]], run: Callable[[Tape, Tensor, T], Tensor]
) -> Tensor:
    """All blocks, one after another, which keep what `selective` does. What is offloaded of a block comes back when
    backward reaches the block after it."""
    leaving: deque[_Offloaded] = deque()
    before: _Offloaded | None = None
    for span, block in ((span, block) for span, groups in blocks for block in groups):
        segment = Segment(lambda tape, x, block=block: run(tape, x, block), x, KEPT_OPERATORS["selective"])
        x, offloaded = tape.run(segment), None
        if span.on_host:
            offloaded = _Offloaded(segment)
            tape.offloaded += offloaded.bytes
            leaving.append(offloaded)
            if len(leaving) > BLOCKS_ON_THE_WAY:
                leaving.popleft().leave()
        if before is not None:
            x = tape.alias("Fetch", x, partial(_fetching, leaving, before))
        before = offloaded
    return tape.alias("Fetch", x, partial(_fetching, leaving, before))


class _Offloaded:
    """What one segment keeps, but for the last of it, which backward does not ask for."""

    def __init__(self, segment: Segment) -> None:
        segment.kept.pop().release()
        self._kept = segment.kept
        self._away: list[int] = []

    @property
    def bytes(self) -> int:
        return sum(storage.bytes for storage in self._kept) + sum(self._away)

    def leave(self) -> None:
        """The copies are made: the device has the memory again."""
        self._away += [storage.bytes for storage in self._kept]
        for storage in self._kept:
            storage.release()
        self._kept.clear()

    def fetch(self, tape: Tape) -> None:
        self._kept.extend(tape.storage(size) for size in self._away)
        for storage in self._kept:
            storage.save()
        self._away.clear()


def _fetching(
    leaving: "deque[_Offloaded]", before: "_Offloaded | None", tape: Tape, gradient: Storage
) -> Sequence[Storage]:
    """The backward of what a block returns, before the block's own."""
    while leaving:
        leaving.popleft().leave()
    if before is not None:
        before.fetch(tape)
    return (gradient,)
