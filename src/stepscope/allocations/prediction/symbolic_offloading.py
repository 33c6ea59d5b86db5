"""Blocks that keep what they keep for backward in the host's memory, in symbolic tensors: `training/offloading.py`,
whose copies hold the device's memory until they are made."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from stepscope.allocations.prediction.symbolic_tensors import KEPT_OPERATORS, Segment, Storage, Tape, Tensor
from stepscope.core.checkpointing import BLOCKS_ON_THE_WAY, Span

T = TypeVar("T")


def run_offloading(
    tape: Tape, x: Tensor, blocks: Iterable[tuple[Span, Sequence[T]]], run: Callable[[Tape, Tensor, T], Tensor]
) -> Tensor:
    """All blocks, one after another, which keep what `selective` does. What is offloaded of a block comes back when
    backward reaches the next block that offloads, and that of the last, when it reaches the blocks."""
    leaving: deque[_Offloaded | None] = deque()
    last: _Offloaded | None = None
    for span, block in ((span, block) for span, groups in blocks for block in groups):
        segment = Segment(lambda tape, x, block=block: run(tape, x, block), x, KEPT_OPERATORS["selective"])
        x = tape.run(segment)
        offloaded = _Offloaded(segment) if span.on_host else None
        leaving.append(offloaded)
        if len(leaving) > BLOCKS_ON_THE_WAY:
            _let_go(leaving)
        if offloaded is not None:
            tape.offloaded += offloaded.bytes
            if last is not None:
                x = tape.alias("Fetch", x, partial(_fetching, leaving, last))
            last = offloaded
    return x if last is None else tape.alias("Fetch", x, partial(_fetching, leaving, last))


class _Offloaded:
    """What one segment keeps, but for the last of it, which backward does not ask for."""

    def __init__(self, segment: Segment) -> None:
        segment.kept.pop().release()
        self._kept = segment.kept
        self._away: list[int] = []

    @property
    def bytes(self) -> int:
        """What leaves the device, before it does."""
        return sum(storage.bytes for storage in self._kept)

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


def _let_go(leaving: "deque[_Offloaded | None]") -> None:
    block = leaving.popleft()
    if block is not None:
        block.leave()


def _fetching(
    leaving: "deque[_Offloaded | None]", block: _Offloaded, tape: Tape, gradient: Storage
) -> Sequence[Storage]:  # fmt: skip
    """The backward of what a block returns, before the block's own."""
    while leaving:
        _let_go(leaving)
    block.fetch(tape)
    return (gradient,)
