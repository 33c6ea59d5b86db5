"""What a stage of a model needs on one rank of a layout, by running one micro-batch symbolically.

`Stage` says which blocks a rank runs and at which sizes; the answer is what is alive beside parameters, gradients and
optimizer state, and what is moved on the way. The states follow from counts (`layouts.py`).
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from stepscope.allocations.prediction.rank_model import RankModel, Share, rank_model
from stepscope.allocations.prediction.sharded_units import GATHERED, ON_THEIR_WAY, ShardedUnits, Shards
from stepscope.allocations.prediction.symbolic_tensors import (
    ATTENTION,
    PRODUCTS,
    Ledger,
    Node,
    Parameter,
    Storage,
    Tape,
    Tensor,
)
from stepscope.core.memory_notes import CATEGORIES
from stepscope.core.workload import Workload

_TEMPORARY = CATEGORIES.index("temporaries")
_OPERATORS_LEFT_OUT = PRODUCTS | ATTENTION
_LOSS = "LinearCrossEntropy"
_FUSED = frozenset({"RmsNorm", "AddRmsNorm", "Rotate", "SiluProduct", _LOSS})
"""The operators of fused parts (`symbolic_fused.py`)."""

Gradients = Literal["made", "elsewhere"]
"""made: gradients appear during backward, and are counted. elsewhere: they are sent away or added to what is there, and
only the newest is counted."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that a rank runs one after the other, for one micro-batch."""

    workload: Workload
    """The rank's: its blocks, its share of the sequence, one micro-batch."""
    share: Share
    first: bool = True
    """Whether the embedding belongs to it."""
    last: bool = True
    """Whether head and loss do."""
    gradients: Gradients = "elsewhere"
    shards: Shards | None = None
    """How its parameters are sharded; None where they are whole. `gradients` then says it of their shards."""


class StageNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a stage needs for one micro-batch beside parameters and optimizer state."""

    forward: int
    """The most that is alive in forward."""
    backward: int
    """The most that is alive in backward; gradients among it only where they are made there."""
    saved: int
    """What forward leaves for backward, gathered parameters left out."""
    gathered_forward: int = 0
    """Bytes of parameters that are whole for a while, at the peak of forward."""
    gathered_backward: int = 0
    """Bytes of such parameters, and of gradients on their way to shards or in them, at the peak of backward."""
    offloaded: int = 0
    """What forward sends to the host's memory, and backward gets back."""


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that operations of a micro-batch read and write, matrix products and fused attention left out."""

    forward: int
    backward: int
    kernels_forward: int
    """Results that are made, products and attention left out: each is a kernel's."""
    kernels_backward: int
    fused_forward: int = 0
    """Bytes that fused parts' kernels move in forward; `forward` has them, too."""
    fused_backward: int = 0


class _CountingLedger(Ledger):
    """A ledger that also sums what was ever made, and what was read of it."""

    moved = 0
    fused = 0
    kernels = 0

    def storage(self, size: int, category: int = _TEMPORARY) -> Storage:
        self.moved += size
        self.kernels += size > 0
        return super().storage(size, category)


class _CountingTape(Tape):
    """A tape that counts what operations move: an operation reads its inputs and writes its output. Its backward reads
    the gradient, what was saved, and what it made on the way. Products leave the sum as it is."""

    ledger: _CountingLedger
    width = 1
    """Numbers in a token's residual stream."""

    def op(
        self, operator: str, elements: int, itemsize: int, inputs: Sequence[Tensor | Parameter], **more: Any
    ) -> Tensor:
        before = self.ledger.moved
        if operator not in _OPERATORS_LEFT_OUT:
            self.ledger.moved += sum(one.elements * one.itemsize for one in inputs if isinstance(one, Tensor))
            if operator == "ToCopy":
                self.ledger.moved += sum(one.bytes for one in inputs if isinstance(one, Parameter))
        if operator == _LOSS:
            # Its kernel turns the logits of each chunk into their gradients where they are.
            hidden, head = inputs
            self.ledger.moved += 2 * hidden.elements * head.elements // self.width**2 * hidden.itemsize
        made = super().op(operator, elements, itemsize, inputs, **more)
        if operator in _FUSED:
            # What it keeps besides was made a moment before.
            self.ledger.fused += self.ledger.moved - before + sum(one.bytes for one in more.get("also_saves", ()))
        return made

    def output(self, operator: str, size: int) -> Storage:
        before = self.ledger.moved, self.ledger.kernels
        made = super().output(operator, size)
        if operator in _OPERATORS_LEFT_OUT:
            self.ledger.moved, self.ledger.kernels = before
        return made

    def _apply(self, node: Node, pending: dict[Node, Storage]) -> Sequence[Storage | None]:
        ledger, before, kernels = self.ledger, self.ledger.moved, self.ledger.kernels
        reads = pending[node].bytes + sum(storage.bytes for storage in node.saved)
        gradients = super()._apply(node, pending)
        if node.operator in _OPERATORS_LEFT_OUT:
            ledger.moved, ledger.kernels = before, kernels
            return gradients
        made = ledger.moved - before
        if made:  # otherwise the gradient is passed on
            results = sum({id(one): one.bytes for one in gradients if one is not None}.values())
            ledger.moved += reads + max(0, made - results)
        if node.operator in _FUSED:
            ledger.fused += ledger.moved - before
        return gradients


@functools.lru_cache(maxsize=8192)
def stage_needs(stage: Stage) -> StageNeeds:
    """Run the stage's forward and backward, alike blocks as one piece."""
    ledger = Ledger()
    model = rank_model(stage.workload, stage.share)
    model.abridged = True
    if stage.shards is not None:
        model.units = ShardedUnits(stage.shards, ledger, keeps=stage.gradients == "made")
    elif stage.gradients == "elsewhere":
        for parameter in model.parameters:
            parameter.gradient = ledger.storage(0)
    tape = Tape(ledger, recording=True)
    return _run(stage, model, tape)


@functools.lru_cache(maxsize=8192)
def moved_by_stage(stage: Stage) -> Moved:
    """Bytes that the stage's elementwise operations read and write, each block run as it is."""
    ledger = _CountingLedger()
    model = rank_model(stage.workload, stage.share)
    for parameter in model.parameters:
        parameter.gradient = ledger.storage(0)
    tape = _CountingTape(ledger, recording=True)
    tape.width = stage.workload.model.d_model
    made: list[tuple[int, int, int]] = []
    _run(stage, model, tape, made)
    (forward, kernels, fused), (both, all_kernels, all_fused) = made
    return Moved(
        forward=forward, backward=both - forward, kernels_forward=kernels, kernels_backward=all_kernels - kernels,
        fused_forward=fused, fused_backward=all_fused - fused,
    )  # fmt: skip


def _run(stage: Stage, model: RankModel, tape: Tape, made: list[tuple[int, int, int]] | None = None) -> StageNeeds:
    """What forward and backward need; `made` gets the sums after each."""
    ledger, units = tape.ledger, model.units
    tape.after_rerun = model.end_autocast
    ledger.begin()
    if units is not None:
        units.begin()
    out = model.run_blocks(tape, model.embedding(tape) if stage.first else model.received(tape))
    if stage.last:
        logits = model.head(tape, out)
        out = model.loss(tape, logits)
        del logits
    model.end_autocast()
    if units is not None:
        units.forward_ends()
    forward, saved = ledger.peak, ledger.total - ledger.live[GATHERED]
    gathered_forward = ledger.at_peak[GATHERED]
    _note(ledger, made)
    ledger.begin()
    tape.backward(out)
    if units is not None:
        outside = [model.embedding_weight] if stage.first else []
        outside += [model.norm_weight, model.head_weight] if stage.last else []
        units.backward_ends(list(dict.fromkeys(outside)))
    _note(ledger, made)
    at_peak = ledger.at_peak
    return StageNeeds(
        forward=forward, backward=ledger.peak, saved=saved, gathered_forward=gathered_forward,
        gathered_backward=at_peak[GATHERED] + (at_peak[ON_THEIR_WAY] if units is not None else 0),
        offloaded=tape.offloaded,
    )  # fmt: skip


def _note(ledger: Ledger, made: list[tuple[int, int, int]] | None) -> None:
    if made is not None and isinstance(ledger, _CountingLedger):
        made.append((ledger.moved, ledger.kernels, ledger.fused))
