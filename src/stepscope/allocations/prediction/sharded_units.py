"""What a rank holds beside its shards while a step goes on, as PyTorch's `fully_shard` allocates and frees it.

A block is a unit, and what lies outside blocks is another, the root (torch/distributed/fsdp/_fully_shard,
`_fsdp_param_group.py` and `_fsdp_collectives.py`):
    forward    a unit is gathered into one buffer, then copied out into its parameters. The parameters go when its
               forward ends, the buffer when the next unit is copied out. The root keeps its parameters until backward
               has ended.
    backward   a unit's parameters are copied out of the buffer, which goes; then the next unit is gathered. When its
               gradients are whole the parameters go, and the gradients are copied into a buffer, which is reduced to
               their shard. That buffer stays until the next unit's is needed.
"""

from collections.abc import Sequence

import msgspec

from stepscope.allocations.prediction.symbolic_tensors import Backward, Ledger, Parameter, Storage, Tape, Tensor
from stepscope.core.memory_notes import CATEGORIES

GATHERED, ON_THEIR_WAY = CATEGORIES.index("parameters"), CATEGORIES.index("gradients")
"""The categories of parameters that are whole for a while, and of their gradients."""


class Shards(msgspec.Struct, frozen=True, kw_only=True):
    """How the parameters of a stage are sharded, by elements and by bytes of an element."""

    ranks: int
    block: int
    """Elements of a unit that is a block; more than the model's parameters where a rank has several experts."""
    root: int
    """Elements outside blocks on this stage."""
    gathered_bytes: int
    """Bytes of a gathered element; 0 where parameters are whole anyway."""
    reduced_bytes: int
    """Bytes of a gradient's element while it is reduced."""


class ShardedUnits:
    """The buffers of one micro-batch. `keeps`: whether the shards of gradients appear here; else they are there."""

    def __init__(self, shards: Shards, ledger: Ledger, *, keeps: bool) -> None:
        self._shards, self._ledger, self._keeps = shards, ledger, keeps
        self._whole: dict[int, Storage] = {}
        self._root: tuple[Storage, ...] = ()
        self._buffer: Storage | None = None
        """A unit as it was gathered."""
        self._reduced: Storage | None = None
        """Gradients as they are reduced."""
        self._kept: list[Storage] = []

    def begin(self) -> None:
        """Gather the root."""
        self._buffer = self._gather(self._shards.root)
        self._root = (self._gather(self._shards.root),)

    def forward_ends(self) -> None:
        """Let the last unit's buffer go."""
        self._buffer = None

    def backward_ends(self, parameters: Sequence[Parameter]) -> None:
        """Reduce the root's gradients, and let go what is left."""
        self._root = ()
        self._reduce(self._shards.root, parameters)
        self._reduced = None

    def enter(self, tape: Tape, number: int, x: Tensor, parameters: Sequence[Parameter], *, again: bool) -> Tensor:
        """The input of block `number`, whose parameters are gathered. again: whether backward runs it once more."""
        if not again:
            buffer = self._gather(self._shards.block)
            self._buffer = None
            self._whole[number] = self._gather(self._shards.block)
            self._buffer = buffer

        def backward(_tape: Tape, gradient: Storage) -> Sequence[Storage]:
            self._whole.pop(number, None)
            self._reduce(self._shards.block, parameters)
            return (gradient,)

        return _passing(tape, x, backward)

    def leave(self, tape: Tape, number: int, x: Tensor, *, again: bool) -> Tensor:
        """The output of the block, whose parameters go until its backward."""
        if not again:
            self._whole.pop(number)

        def backward(_tape: Tape, gradient: Storage) -> Sequence[Storage]:
            if self._buffer is None:
                self._buffer = self._gather(self._shards.block)
            self._whole[number] = self._gather(self._shards.block)
            self._buffer = None
            if number:
                self._buffer = self._gather(self._shards.block)
            return (gradient,)

        return _passing(tape, x, backward)

    def stand_for(self, blocks: int) -> None:
        """Keep the shards of the gradients of so many blocks, which are one piece of an abridged model."""
        for _ in range(blocks if self._keeps else 0):
            self._kept.append(self._shard(self._shards.block))

    def _gather(self, elements: int) -> Storage:
        return self._ledger.storage(elements * self._shards.gathered_bytes, GATHERED)

    def _shard(self, elements: int) -> Storage:
        return self._ledger.storage(-(-elements // self._shards.ranks) * self._shards.reduced_bytes, ON_THEIR_WAY)

    def _reduce(self, elements: int, parameters: Sequence[Parameter]) -> None:
        # One expert of several has symbolic gradients; the other experts' gradients are whole here, too.
        others = elements - sum(one.elements for one in parameters)
        size = parameters[0].itemsize if parameters else 0
        _of_others = self._ledger.storage(max(0, others) * size, ON_THEIR_WAY)
        self._reduced = None
        self._reduced = self._ledger.storage(elements * self._shards.reduced_bytes, ON_THEIR_WAY)
        for one in parameters:
            one.gradient = None
        del _of_others
        shard = self._shard(elements)
        if self._keeps:
            self._kept.append(shard)


def _passing(tape: Tape, x: Tensor, backward: Backward) -> Tensor:
    return tape.alias("Unit", x, backward)
