"""Choices of activation checkpointing, and what each makes of the blocks of a model: one record that the model, the
prediction of its memory, its FLOPs and its plan read."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

KEEPING = ("selective", "attention")
"""Checkpointing that keeps, beside each block's input, the outputs of some operators; the most first."""

OFFLOAD = "offload"
"""What blocks do that keep for backward what `selective` does, but in the host's memory."""

BLOCKS_ON_THE_WAY = 2
"""How many more blocks run until the device has the memory again of what one sends to the host. Forward waits for its
copies then, so that no more of it is there, however slow the link is."""

CHECKPOINTING_CHOICES = (
    "none, selective, selective-K for any K below the number of layers, attention, every-1, and offload-K, every-K or "
    "nested-K for any K up to the number of layers"
)
"""What `checkpointing` may say. none: autograd keeps what it needs. every-K: blocks in groups of K (the last may be
shorter); a group keeps its input alone, and backward runs the whole group again. selective: every block keeps the
outputs of its matrix products and of fused attention, and backward recomputes the cheap rest. attention: every block
keeps the outputs of fused attention alone, which for long sequences are dear to compute and small to keep. selective-K:
the last K blocks keep what `selective` keeps, and those before them what `attention` does. The last are the first that
backward frees, so that what they keep is gone before most gradients are there. offload-K: every block keeps what
`selective` keeps, and K of them in the host's memory. These lie evenly between the others, so that the copies have the
time of all blocks. nested-K: the blocks run as K calls of equal parts, each of which runs its own blocks as K calls,
down to one block; nested-1: as a call of all but the last block, and one of the last. A call has its input from when
what it is part of runs again until it does so itself: of halves one input for each level is there, of nested-1 two."""


T = TypeVar("T")


class Span(NamedTuple):
    """Consecutive blocks that keep alike for backward."""

    checkpointing: str
    """none, one of KEEPING, OFFLOAD, or every-K."""
    blocks: int

    @property
    def group(self) -> int:
        """How many consecutive blocks run again as one."""
        return self.blocks if self.calls else group_of(self.checkpointing) or 1

    @property
    def calls(self) -> int | None:
        """K of `nested-K`; None where no call holds others."""
        return nested_of(self.checkpointing)

    @property
    def runs_again(self) -> tuple[int, int]:
        """How many runs of a block backward makes of blocks that run again whole, and how many of these end before the
        block's last product, whose output nothing needs."""
        if self.calls is None:
            return self.blocks, self.groups
        parts = nested_parts(range(self.blocks), self.calls)
        return sum(_runs_of_call(len(part), self.calls) for part in parts), self.blocks

    @property
    def groups(self) -> int:
        """How many groups there are; the last may be shorter."""
        return math.ceil(self.blocks / self.group)

    @property
    def on_host(self) -> bool:
        """Whether what the blocks keep lies in the host's memory."""
        return self.checkpointing == OFFLOAD

    @property
    def alone(self) -> str:
        """The checkpointing of a model of such blocks alone, which computes the same again."""
        return "selective" if self.on_host else self.checkpointing

    @property
    def multiplies_again(self) -> bool:
        """Whether backward runs the products with weights again, but for the last of each group."""
        return self.checkpointing == "attention" or self.attends_again

    @property
    def attends_again(self) -> bool:
        """Whether backward runs attention again."""
        return group_of(self.checkpointing) is not None or self.calls is not None


def nested_parts(blocks: Sequence[T], calls: int) -> list[Sequence[T]]:
    """The blocks of each call by which `nested-K` runs blocks: K parts as equal as they can be, the first the longer
    ones; with a K of 1 all but the last block, and the last."""
    count, parts = len(blocks), min(calls, len(blocks))
    if calls == 1:
        return [blocks[: count - 1], blocks[count - 1 :]] if count > 1 else [blocks]
    ends = [-(-count * number // parts) for number in range(parts + 1)]
    return [blocks[first:end] for first, end in itertools.pairwise(ends)]


def _runs_of_call(blocks: int, calls: int) -> int:
    """Runs of a block that the backward of one call makes. It runs again up to the input of its last part."""
    if blocks == 1:
        return 1
    sizes = [len(part) for part in nested_parts(range(blocks), calls)]
    return sum(sizes[:-1]) + sum(_runs_of_call(size, calls) for size in sizes)


def spans_of(checkpointing: str, layers: int) -> tuple[Span, ...]:
    """The blocks of a model of so many layers, from the first to the last, by what they keep."""
    last, offloaded = selective_of(checkpointing), offload_of(checkpointing)
    if last is not None:
        return Span("attention", layers - last), Span("selective", last)
    if offloaded is not None:
        # How many of the first blocks offload: rounded up, so that the first block does, and the last only if all do.
        shares = itertools.pairwise(-(-blocks * offloaded // layers) for blocks in range(layers + 1))
        alike = itertools.groupby(OFFLOAD if after > before else "selective" for before, after in shares)
        return tuple(Span(kept, len(list(blocks))) for kept, blocks in alike)
    return (Span(checkpointing, layers),)


def grouped(blocks: Sequence[T], spans: Iterable[Span]) -> Iterator[tuple[Span, list[Sequence[T]]]]:
    """Each span with its blocks, in the groups that run again as one."""
    end = 0
    for span in spans:
        start, end = end, end + span.blocks
        yield span, [blocks[first : min(first + span.group, end)] for first in range(start, end, span.group)]


def _number(word: str, checkpointing: object) -> int | None:
    """K of a choice that is written as a word and K, or None."""
    written = re.fullmatch(f"{word}-([1-9][0-9]{{0,8}})", checkpointing) if isinstance(checkpointing, str) else None
    return int(written[1]) if written else None


group_of, selective_of, offload_of, nested_of = (
    partial(_number, word) for word in ("every", "selective", OFFLOAD, "nested")
)
"""Functions that return K of `every-K`, of `selective-K`, of `offload-K` and of `nested-K`, or None."""


def mixtures(layers: int) -> tuple[str, ...]:
    """The choices `selective-K` that `tune` and `fit` try first: K is three quarters, half and a quarter of the
    blocks."""
    last = (layers * quarters // 4 for quarters in (3, 2, 1))
    return tuple(f"selective-{blocks}" for blocks in dict.fromkeys(last) if blocks)


def keeping(last: int, layers: int) -> str:
    """The choice by which the last blocks, so many of `layers`, keep what `selective` does, and the others what
    `attention` does."""
    return {0: "attention", layers: "selective"}.get(last, f"selective-{last}")


def every_choice(layers: int, *, kept: bool, nests: bool = True) -> tuple[str, ...]:
    """The choices that a table of all of them has: of the sizes that make as many groups the smallest alone, and few
    kinds of nesting. kept: whether the attention returns what `attention` keeps. nests: whether calls may be nested."""
    groups = {-(-layers // size): size for size in range(layers, 0, -1)}
    return (
        "none",
        "selective",
        *(("attention",) if kept else ()),
        *(f"every-{size}" for size in sorted(groups.values())),
        *(f"nested-{calls}" for calls in range(1, min(layers, 3) + 1) if nests),
    )


def most_that_fit(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number of blocks that fits, by halving. `low` fits, and `high` does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def of_fewer_layers(checkpointing: str, layers: int) -> str:
    """What a model's checkpointing makes of its last `layers` blocks, as a choice for a model of these alone."""
    group, last, offloaded = group_of(checkpointing), selective_of(checkpointing), offload_of(checkpointing)
    if group is not None:
        return f"every-{min(group, layers)}"
    if offloaded is not None:
        return f"{OFFLOAD}-{min(offloaded, layers)}"
    return "selective" if last is not None and last >= layers else checkpointing
