"""What a stage of a model needs on one rank of a layout, by running one micro-batch symbolically.

`Stage` says which blocks a rank runs and at which sizes; the answer is what is alive beside parameters, gradients and
optimizer state, and what is moved on the way. The states follow from counts (`layouts.py`).
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from stepscope.core.memory_notes import CATEGORIES
from stepscope.core.workload import Workload
from stepscope.memory.prediction.rank_model import RankModel, Share, rank_model
from stepscope.memory.prediction.symbolic_tensors import (
    ATTENTION,
    PRODUCTS,
    Ledger,
    Node,
    Parameter,
    Storage,
    Tape,
    Tensor,
)

_TEMPORARY = CATEGORIES.index("temporaries")
_OPERATORS_LEFT_OUT = PRODUCTS | ATTENTION

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


class StageNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a stage needs for one micro-batch beside parameters and optimizer state."""

    forward: int
    """The most that is alive in forward."""
    backward: int
    """The most that is alive in backward; gradients among it only where they are made there."""
    saved: int
    """What forward leaves for backward."""


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that operations of a micro-batch read and write, matrix products and fused attention left out."""

    forward: int
    backward: int
    kernels_forward: int
    """Results that are made, products and attention left out: each is a kernel's."""
    kernels_backward: int


class _CountingLedger(Ledger):
    """A ledger that also sums what was ever made, and what was read of it."""

    moved = 0
    kernels = 0

    def storage(self, size: int, category: int = _TEMPORARY) -> Storage:
        self.moved += size
        self.kernels += size > 0
        return super().storage(size, category)


class _CountingTape(Tape):
    """A tape that counts what operations move: an operation reads its inputs and writes its output. Its backward reads
    the gradient, what was saved, and what it made on the way. Products leave the sum as it is."""

    ledger: _CountingLedger

    def op(
        self, operator: str, elements: int, itemsize: int, inputs: Sequence[Tensor | Parameter], **more: Any
    ) -> Tensor:
        if operator not in _OPERATORS_LEFT_OUT:
            self.ledger.moved += sum(one.elements * one.itemsize for one in inputs if isinstance(one, Tensor))
            if operator == "ToCopy":
                self.ledger.moved += sum(one.bytes for one in inputs if isinstance(one, Parameter))
        return super().op(operator, elements, itemsize, inputs, **more)

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
        return gradients


@functools.lru_cache(maxsize=8192)
def stage_needs(stage: Stage) -> StageNeeds:
    """Run the stage's forward and backward, alike blocks as one piece."""
    ledger = Ledger()
    model = rank_model(stage.workload, stage.share)
    model.abridged = True
    if stage.gradients == "elsewhere":
        for parameter in model.parameters:
            parameter.gradient = ledger.storage(0)
    tape = Tape(ledger, recording=True)
    forward, saved, backward = _run(stage, model, tape)
    return StageNeeds(forward=forward, backward=backward, saved=saved)


@functools.lru_cache(maxsize=8192)
def moved_by_stage(stage: Stage) -> Moved:
    """Bytes that the stage's elementwise operations read and write, each block run as it is."""
    ledger = _CountingLedger()
    model = rank_model(stage.workload, stage.share)
    for parameter in model.parameters:
        parameter.gradient = ledger.storage(0)
    tape = _CountingTape(ledger, recording=True)
    made: list[tuple[int, int]] = []
    _run(stage, model, tape, made)
    (forward, kernels), (both, all_kernels) = made
    return Moved(
        forward=forward, backward=both - forward, kernels_forward=kernels, kernels_backward=all_kernels - kernels
    )


def _run(stage: Stage, model: RankModel, tape: Tape, made: list[tuple[int, int]] | None = None) -> tuple[int, int, int]:
    """Forward's peak, what is saved, and backward's peak; `made` gets the sums after each."""
    ledger = tape.ledger
    tape.after_rerun = model.end_autocast
    ledger.begin()
    out = model.run_blocks(tape, model.embedding(tape) if stage.first else model.received(tape))
    if stage.last:
        logits = model.head(tape, out)
        out = model.loss(tape, logits)
        del logits
    model.end_autocast()
    forward, saved = ledger.peak, ledger.total
    _note(ledger, made)
    ledger.begin()
    tape.backward(out)
    _note(ledger, made)
    return forward, saved, ledger.peak


def _note(ledger: Ledger, made: list[tuple[int, int]] | None) -> None:
    if made is not None and isinstance(ledger, _CountingLedger):
        made.append((ledger.moved, ledger.kernels))
