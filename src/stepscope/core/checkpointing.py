"""Choices of activation checkpointing, and what each makes of the blocks of a model: one record that the model, the
prediction of its memory, its FLOPs and its plan read."""

import math
import re
from typing import NamedTuple

KEEPING = ("selective", "attention")
"""Checkpointing that keeps, beside each block's input, the outputs of some operators; the most first."""

CHECKPOINTING_CHOICES = "none, selective, attention, every-1 or every-K for any K up to the number of layers"
"""What `checkpointing` may say. none: autograd keeps what it needs. every-K: blocks in groups of K (the last may be
shorter); a group keeps its input alone, and backward runs the whole group again. selective: every block keeps the
outputs of its matrix products and of fused attention, and backward recomputes the cheap rest. attention: every block
keeps the outputs of fused attention alone, which for long sequences are dear to compute and small to keep."""


class Span(NamedTuple):
    """Consecutive blocks that keep alike for backward."""

    checkpointing: str
    """none, one of KEEPING, or every-K."""
    blocks: int

    @property
    def group(self) -> int:
        """How many consecutive blocks run again as one."""
        return group_of(self.checkpointing) or 1

    @property
    def groups(self) -> int:
        """How many groups there are; the last may be shorter."""
        return math.ceil(self.blocks / self.group)

    @property
    def multiplies_again(self) -> bool:
        """Whether backward runs the products with weights again, but for the last of each group."""
        return self.checkpointing == "attention" or self.attends_again

    @property
    def attends_again(self) -> bool:
        """Whether backward runs attention again."""
        return group_of(self.checkpointing) is not None


def spans_of(checkpointing: str, layers: int) -> tuple[Span, ...]:
    """The blocks of a model of so many layers, from the first to the last, by what they keep."""
    return (Span(checkpointing, layers),)


def group_of(checkpointing: object) -> int | None:
    """K of `every-K`, or None."""
    written = re.fullmatch(r"every-([1-9][0-9]{0,8})", checkpointing) if isinstance(checkpointing, str) else None
    return int(written[1]) if written else None


def of_fewer_layers(checkpointing: str, layers: int) -> str:
    """The same checkpointing for a part of a model, which has so many layers."""
    group = group_of(checkpointing)
    return checkpointing if group is None else f"every-{min(group, layers)}"
