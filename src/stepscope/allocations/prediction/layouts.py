"""The peak memory of one rank of a layout: states by count, activations by running its stage symbolically.

A rank holds, with P parameters on it, n ranks in its shard group, and p, g, c, o bytes of a stored parameter, a
gradient, a copy in the compute dtype and both moments (Rajbhandari et al. 2020, section 3.1):

                parameters              gradients       moments
    ddp         P p                     P g + P g       P o          (buckets hold each gradient once more)
    ddp-views   P p                     P g             P o              (ddp-after and ddp-each-after, too)
    zero1       P p                     P g             P o / n
    zero1-master  P p / n + P c         P g             P o / n
    zero2       P p / n + P c           P g / n         P o / n
    zero3       P p / n                 P g / n         P o / n

Where gradients are sharded, those of a block are on their way, and with zero3 the parameters of one or two blocks, and
of embedding and head, are whole for a while: `ShardedUnits` plays that. Beside that, a rank holds what its schedule
has in flight: each chunk's saved activations, and what the chunk at work needs more.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from stepscope.allocations.prediction.estimate import (
    DISTINCT_BATCHES,
    WORKSPACE_BYTES,
    products_in,
)
from stepscope.allocations.prediction.symbolic_model import (
    BlockParameters,
    CompiledSymbolicModel,
    FusedSymbolicModel,
    SymbolicModel,
)
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
from stepscope.core.attention_support import as_eager
from stepscope.core.checkpointing import OFFLOAD, of_fewer_layers, spans_of
from stepscope.core.evidence import CATEGORIES
from stepscope.core.formulas import planned_model
from stepscope.core.formulas.communication import Bytes
from stepscope.core.formulas.transformer import Shapes, state_bytes
from stepscope.core.layout import SHARDINGS, Layout
from stepscope.core.parts import REFERENCE, scores_of
from stepscope.core.precisions import PRECISIONS
from stepscope.core.strategies import NOT_PARALLEL
from stepscope.core.workloads import TextbookWorkload

# What a rank holds beside its shards while a step goes on, as PyTorch's `fully_shard` allocates and frees it.
#
# A block is a unit, and what lies outside blocks is another, the root (torch/distributed/fsdp/_fully_shard,
# `_fsdp_param_group.py` and `_fsdp_collectives.py`):
#     forward    a unit is gathered into one buffer, then copied out into its parameters. The parameters go when its
#                forward ends, the buffer when the next unit is copied out. The root keeps its parameters until backward
#                has ended.
#     backward   a unit's parameters are copied out of the buffer, which goes; then the next unit is gathered. When its
#                gradients are whole the parameters go, and the gradients are copied into a buffer, which is reduced to
#                their shard. That buffer stays until the next unit's is needed.


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

        return tape.alias("Unit", x, backward)

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

        return tape.alias("Unit", x, backward)

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


# The symbolic model as one rank of a layout runs it: a stage of the blocks, at the sizes that a rank keeps.
#
# Tensor parallelism with sequence parallelism (Korthikanti et al. 2022): the residual stream and the norms hold T/tp
# tokens whole, everything between the linear maps T tokens of a share. What is gathered for a product lives only as
# long as the product, forward and backward; what is kept is the share. Context parallelism gathers keys and values for
# the time of attention. Experts take A copies of each token.


_ROWS = ("attention.output.weight", "feed_forward.down.weight")


Gradients = Literal["made", "elsewhere"]
"""made: gradients appear during backward, and are counted. elsewhere: they are sent away or added to what is there, and
only the newest is counted."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that a rank runs one after the other for one micro-batch, and its share of matrices and sequence."""

    workload: TextbookWorkload
    """The rank's: its blocks, its share of the sequence, one micro-batch."""
    model: planned_model.PlannedModel
    tensor: int = 1
    context: int = 1
    first: bool = True
    """Whether the embedding belongs to it."""
    last: bool = True
    """Whether head and loss do."""
    gradients: Gradients = "elsewhere"
    shards: Shards | None = None
    """How its parameters are sharded; None where they are whole. `gradients` then says it of their shards."""


class RankModel(SymbolicModel):
    """The symbolic model with a rank's sizes."""

    units: ShardedUnits | None = None
    """What gathers the parameters of each block, and reduces their gradients; None where the rank has them whole."""

    def __init__(self, stage: Stage) -> None:
        self.planned, self.ranks, self.context = stage.model, stage.tensor, stage.context
        super().__init__(stage.workload)
        config, form = self.planned.config, self.planned.form
        self._blocks = None if form is None else products_in(form, self.sizes.products)
        self.scaled = self._blocks or self.scaled
        self.d_ff = config.d_ff // self.ranks
        self.rows = self.tokens * config.heads // self.ranks
        self.scores = self.rows * stage.workload.seq_len * self.context
        keys = planned_model.local_keys(config, self.ranks) // config.head_dim
        self.queries_per_key = config.heads // self.ranks // keys
        self.sums_shared_keys = self.queries_per_key > 1

    def _parameter(self, name: str, shapes: Shapes, prefix: str = "") -> Parameter:
        if not prefix and name != "norm.weight":
            shapes = {name: (-(-self.planned.config.vocabulary // self.ranks), self.planned.config.d_model)}
        return super()._parameter(name, shapes, prefix)

    def _block(self, index: int) -> BlockParameters:
        shapes = planned_model.local_shapes(self.planned.config, self.ranks)
        return {name.removesuffix(".weight"): self._parameter(name, shapes, f"blocks.{index}.") for name in shapes}

    @property
    def rounded_bytes(self) -> int:
        """Bytes that rounding operands to blocks has moved so far, but for those that the tape counts."""
        return 0 if self._blocks is None else self._blocks.moved

    def received(self, tape: Tape) -> Tensor:
        """The residual stream as it comes from the stage before."""
        elements, size = self.tokens * self.d_model // self.ranks, self.sizes.residual
        return Tensor(tape.storage(elements * size), elements, size, Parameter("received", elements, size))

    def block(self, tape: Tape, x: Tensor, block: BlockParameters) -> Tensor:
        if self.units is None:
            return super().block(tape, x, block)
        number = next(i for i, one in enumerate(self.blocks) if one is block)
        x = self.units.enter(tape, number, x, list(block.values()), again=tape.runs_again)
        x = super().block(tape, x, block)
        return self.units.leave(tape, number, x, again=tape.runs_again)

    def _stand_in(self, tape: Tape, x: Tensor, group: Sequence[BlockParameters], grown: Sequence[int]) -> Tensor:
        out = super()._stand_in(tape, x, group, grown)
        units, node = self.units, out.node
        if units is not None and isinstance(node, Node):
            count, above = len(group), len(node.inputs) - 1

            def backward(tape: Tape, gradient: Storage) -> Sequence[Storage | None]:
                units.stand_for(count)
                return gradient, *[None] * above

            node.backward = backward
        return out

    def embedding(self, tape: Tape) -> Tensor:
        if self.ranks == 1:
            return super().embedding(tape)
        whole, weight = self.tokens * self.d_model * self.sizes.residual, self.embedding_weight

        def backward(tape: Tape, _: Storage) -> Sequence[Storage]:
            _gathered = tape.storage(whole)
            return (tape.storage(weight.bytes),)

        _of_all_words = tape.storage(whole)
        return tape.op(
            "Embedding", self.tokens * self.d_model // self.ranks, self.sizes.residual, [weight], backward=backward
        )

    def _linear(self, tape: Tape, x: Tensor, weight: Parameter, in_features: int) -> Tensor:
        if self.ranks == 1:
            return super()._linear(tape, x, weight, in_features)
        size = self.sizes.products
        blocks = None if weight is self.head_weight else self._blocks
        casts = blocks is None and weight.itemsize != size
        kernel = self._cast_weight(tape, weight) if casts else weight
        cast = tape.cast(x, size)
        saves = [kernel, cast] if isinstance(kernel, Tensor) else [cast]
        width = weight.elements // self.d_model
        if weight.name.endswith(_ROWS):
            elements = cast.elements // width * self.d_model // self.ranks
            whole = elements * self.ranks * size
        else:
            whole = cast.elements * self.ranks * size
            elements = cast.elements * self.ranks // self.d_model * width
        kernel_bytes, input_bytes = weight.elements * size, cast.elements * size
        by_rows = weight.name.endswith(_ROWS)
        inner, outer = (width, self.d_model) if by_rows else (self.d_model, width)
        rows = cast.elements // inner * (1 if by_rows else self.ranks)

        def backward(tape: Tape, _: Storage) -> Sequence[Storage]:
            """Gather the output's gradient (rows), or the input, and later reduce its gradient (columns)."""
            _gathered = tape.storage(whole)
            _few = blocks and blocks.backward_operands(tape, rows, inner, outer)
            of_kernel = tape.storage(kernel_bytes)
            _of_whole = tape.storage(0 if by_rows else whole)
            return of_kernel, tape.storage(input_bytes)

        _whole = tape.storage(whole)
        if blocks is not None:
            kept, _few = blocks.kept_input(tape, cast, inner), blocks.operands(tape, rows, inner, outer)
            return tape.op("ScaledMm", elements, size, [kernel, cast], also_saves=kept, backward=backward)
        return tape.op("Mm", elements, size, [kernel, cast], saves=saves, backward=backward)

    def _fused(self, tape: Tape, q: Tensor, k: Tensor, v: Tensor, sinks: Parameter | None = None) -> Tensor:
        if self.context == 1:
            return super()._fused(tape, q, k, v, sinks)
        whole = (k.elements + v.elements) * k.itemsize * self.context
        _gathered = tape.storage(whole)
        out = super()._fused(tape, q, k, v, sinks)
        node = out.node
        if isinstance(node, Node):
            inner = node.backward

            def backward(tape: Tape, gradient: Storage) -> Sequence[Storage | None]:
                _keys, _gradients = tape.storage(whole), tape.storage(whole)
                return inner(tape, gradient)

            node.backward = backward
        return out

    def _feed_forward(self, tape: Tape, x: Tensor, block: BlockParameters) -> Tensor:
        if self.planned.experts == 1:
            return super()._feed_forward(tape, x, block)
        sent = tape.op("Dispatch", x.elements * self.planned.active, x.itemsize, [x])
        out = super()._feed_forward(tape, sent, block)
        return tape.op("Combine", out.elements // self.planned.active, out.itemsize, [out])


class CompiledRankModel(RankModel, CompiledSymbolicModel):
    """The symbolic model as one rank of a layout runs it under torch.compile."""


class FusedRankModel(RankModel, FusedSymbolicModel):
    """A rank's part of a model with fused parts."""


def rank_model(stage: Stage, *, eager: bool) -> RankModel:
    """The model of a rank, as the workload runs it: op by op, with fused parts, or compiled.

    Compiling leaves fused parts as they are, and fuses what lies between them, which is little; it is left out.
    """
    if any(name != REFERENCE for name in stage.workload.parts.values()):
        return FusedRankModel(stage)
    return (RankModel if eager else CompiledRankModel)(stage)


# What a stage of a model needs on one rank of a layout, by running one micro-batch symbolically.
#
# `Stage` says which blocks a rank runs and at which sizes; the answer is what is alive beside parameters, gradients and
# optimizer state, and what is moved on the way. The states follow from counts (`layouts.py`).


_TEMPORARY = CATEGORIES.index("temporaries")
_OPERATORS_LEFT_OUT = PRODUCTS | ATTENTION
_LOSS = "LinearCrossEntropy"
_FUSED = frozenset({"RmsNorm", "AddRmsNorm", "Rotate", "SiluProduct", _LOSS})
"""The operators of fused parts (`symbolic_model.py`)."""


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


class Moved(NamedTuple):
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
        output = super().op(operator, elements, itemsize, inputs, **more)
        if operator in _FUSED:
            # What it keeps besides was made a moment before.
            self.ledger.fused += self.ledger.moved - before + sum(one.bytes for one in more.get("also_saves", ()))
        return output

    def output(self, operator: str, size: int) -> Storage:
        before = self.ledger.moved, self.ledger.kernels
        output = super().output(operator, size)
        if operator in _OPERATORS_LEFT_OUT:
            self.ledger.moved, self.ledger.kernels = before
        return output

    def _apply(self, node: Node, pending: dict[Node, Storage]) -> Sequence[Storage | None]:
        ledger, before, kernels = self.ledger, self.ledger.moved, self.ledger.kernels
        reads = pending[node].bytes + sum(storage.bytes for storage in node.saved)
        gradients = super()._apply(node, pending)
        if node.operator in _OPERATORS_LEFT_OUT:
            ledger.moved, ledger.kernels = before, kernels
            return gradients
        moved = ledger.moved - before
        if moved:  # otherwise the gradient is passed on
            results = sum({id(one): one.bytes for one in gradients if one is not None}.values())
            ledger.moved += reads + max(0, moved - results)
        if node.operator in _FUSED:
            ledger.fused += ledger.moved - before
        return gradients


@functools.lru_cache(maxsize=65536)
def stage_needs(stage: Stage) -> StageNeeds:
    """Run the stage's forward and backward, alike blocks as one piece."""
    ledger, model, units = Ledger(), rank_model(stage, eager=as_eager(stage.workload)), None
    model.abridged = True
    if stage.shards is not None:
        units = model.units = ShardedUnits(stage.shards, ledger, keeps=stage.gradients == "made")
    elif stage.gradients == "elsewhere":
        for parameter in model.parameters:
            parameter.gradient = ledger.storage(0)
    tape = Tape(ledger, recording=True)
    ledger.begin()
    if units is not None:
        units.begin()
    out = _forward(stage, model, tape)
    if units is not None:
        units.forward_ends()
    forward, gathered_forward = ledger.peak, ledger.at_peak[GATHERED]
    saved = ledger.total - ledger.live[GATHERED]
    ledger.begin()
    tape.backward(out)
    if units is not None:
        outside = [model.embedding_weight] if stage.first else []
        outside += [model.norm_weight, model.head_weight] if stage.last else []
        units.backward_ends(list(dict.fromkeys(outside)))
    at_peak = ledger.at_peak
    return StageNeeds(
        forward=forward,
        backward=ledger.peak,
        saved=saved,
        gathered_forward=gathered_forward,
        gathered_backward=at_peak[GATHERED] + (at_peak[ON_THEIR_WAY] if units is not None else 0),
        offloaded=tape.offloaded,
    )


def _forward(stage: Stage, model: RankModel, tape: Tape) -> Tensor:
    tape.after_rerun = model.end_autocast
    out = model.run_blocks(tape, model.embedding(tape) if stage.first else model.received(tape))
    if stage.last:
        logits = model.head(tape, out)
        out = model.loss(tape, logits)
        del logits
    model.end_autocast()
    return out


@functools.lru_cache(maxsize=8192)
def moved_by_stage(stage: Stage) -> Moved:
    """Bytes that the stage's elementwise operations read and write, each block run as it is, and what rounds operands
    to blocks."""
    ledger, model = _CountingLedger(), rank_model(stage, eager=stage.workload.compile == "eager")
    for parameter in model.parameters:
        parameter.gradient = ledger.storage(0)
    tape = _CountingTape(ledger, recording=True)
    tape.width = stage.workload.model.d_model
    out = _forward(stage, model, tape)
    forward, kernels, fused = ledger.moved + model.rounded_bytes, ledger.kernels, ledger.fused
    tape.backward(out)
    backward = ledger.moved + model.rounded_bytes - forward
    return Moved(forward, backward, kernels, ledger.kernels - kernels, fused, ledger.fused - fused)


_MIXED = ("bf16", "fp16")
_FEW_BLOCKS = 2
"""Stages of at most so many blocks are run as they are; larger ones follow from 1 and 2, where blocks are alike."""


class RankNeeds(NamedTuple):
    """Bytes of the rank that needs most, by what they are, at its peak."""

    parameters: int
    gradients: int
    moments: int
    buckets: int
    """Gradients once more, as they are sent."""
    gathered: int
    """Copies of parameters in the compute dtype, parameters that are whole for a while, and gradients on their way."""
    saved: int
    """Activations of everything in flight but what is at work."""
    working: int
    """The chunk at work: its activations, temporaries and newest gradients; or the optimizer's temporaries."""
    fixed: int
    """Data and the workspaces of libraries."""
    rank: int
    """The pipeline rank."""

    @property
    def peak(self) -> int:
        return sum((
            self.parameters, self.gradients, self.moments, self.buckets, self.gathered, self.saved, self.working,
            self.fixed,
        ))  # fmt: skip


def bytes_of(workload: TextbookWorkload, sharding: str) -> Bytes:
    """Bytes of an element. Where parameters are gathered in autocast's dtype, the residual stream is in it; else
    autocast copies fp32 weights, and the residual stream stays fp32."""
    precision = PRECISIONS[workload.dtype]
    in_products = SHARDINGS[sharding].in_compute_dtype
    return Bytes(
        parameters=precision.weights,
        gradients=precision.weights,
        compute=precision.products,
        residual=precision.products if in_products else precision.residual,
    )


def _interpolated(low: StageNeeds, high: StageNeeds, steps: float, *, beyond: StageNeeds | None = None) -> StageNeeds:
    """The needs so many steps beyond `low`, where `high` is one step beyond it, or beyond the needs that are given."""
    under = low if beyond is None else beyond
    return StageNeeds(
        **{
            name: getattr(low, name) + math.ceil((getattr(high, name) - getattr(under, name)) * steps)
            for name in StageNeeds.__struct_fields__
        }
    )


def _buckets(layout: Layout, sizes: Bytes, held: tuple[int, int, int]) -> int:
    """Bytes of the buckets that stay beside gradients (`core/strategies.py` has the source)."""
    shared = layout.data * layout.context > 1
    return sum(held) * sizes.gradients if shared and SHARDINGS[layout.sharding].buckets else 0


class _RankStage(msgspec.Struct, frozen=True, kw_only=True):
    """A stage of a rank, whatever the layout's sizes."""

    blocks: int
    first: bool
    last: bool
    gradients: Gradients = "elsewhere"
    shards: Shards | None = None


class RankMemory:
    """Answers what a rank of any layout of one step needs; remembers what layouts have in common."""

    def __init__(self, workload: TextbookWorkload, model: planned_model.PlannedModel) -> None:
        self.workload, self.model = workload, model
        self._linear = scores_of(workload.attention) != "whole"
        """Whether activations grow with the number of tokens: those of fused attention do."""
        self._known: dict[tuple[object, ...], StageNeeds] = {}
        self._corners: dict[tuple[object, ...], StageNeeds] = {}
        self._counts: dict[tuple[int, ...], tuple[int, int, int]] = {}
        self._moved: dict[tuple[object, ...], tuple[Moved, ...]] = {}
        self._sizes = {name: bytes_of(workload, name) for name in SHARDINGS}

    def least(self, layout: Layout) -> int:
        """Bytes that the states of the largest rank need, whatever its activations: quickly."""
        return sum(self.states(layout))

    def states(self, layout: Layout) -> tuple[int, int, int]:
        """Bytes of stored parameters, of gradients with the buckets that stay beside them, and of the optimizer's
        states, on the first rank."""
        sizes, held = self._sizes[layout.sharding], self._held(layout, 0)
        parameters, gradients, states = self._states(layout, sizes, held)
        return parameters, gradients + _buckets(layout, sizes, held), states

    def needs(self, layout: Layout, *, exactly: bool = False) -> RankNeeds:
        """What the rank that needs most holds at its peak; `exactly` runs its very stage, however long that takes."""
        ranks = (0, layout.pipeline - 1) if layout.pipeline > 1 else (0,)
        return max((self._of_rank(layout, rank, exactly) for rank in ranks), key=lambda needs: needs.peak)

    def moved(self, layout: Layout, *, first: bool, last: bool, blocks: int) -> Moved:
        """Bytes that a micro-batch's elementwise operations move: from those of one sequence and of two, since what
        concerns weights does not grow with the micro-batch."""
        key = (
            layout.tensor, layout.context, layout.checkpointing, SHARDINGS[layout.sharding].in_compute_dtype, first,
            last, blocks,
        )  # fmt: skip
        if key not in self._moved:
            of_sizes = (msgspec.structs.replace(layout, micro_batch=size) for size in (1, 2))
            stage = _RankStage(blocks=blocks, first=first, last=last)
            self._moved[key] = tuple(moved_by_stage(self._stage(one, stage)) for one in of_sizes)
        of_one, of_two = self._moved[key]
        more = layout.micro_batch - 1
        moved = Moved(*(one + more * (two - one) for one, two in zip(of_one, of_two, strict=True)))
        return moved._replace(kernels_forward=of_one.kernels_forward, kernels_backward=of_one.kernels_backward)

    def offloaded(self, layout: Layout) -> int:
        """Bytes that a block sends to the host's memory for a micro-batch, if it offloads."""
        alone = msgspec.structs.replace(layout, checkpointing=f"{OFFLOAD}-1")
        return self._by_tokens(alone, _RankStage(blocks=1, first=False, last=False)).offloaded

    def _held(self, layout: Layout, rank: int) -> tuple[int, int, int]:
        """Parameters on a rank: of its blocks, of its experts, and outside blocks."""
        key = (layout.tensor, layout.pipeline, layout.chunks, layout.expert, rank)
        if key in self._counts:
            return self._counts[key]
        last = layout.pipeline - 1
        chunk = planned_model.largest_stage(self.model.config.layers, layout.stages)
        fewer = chunk * layout.stages - self.model.config.layers
        # Where blocks do not divide evenly, the ranks with head and embedding have fewer of them.
        blocks = chunk * layout.chunks - (rank == last and fewer > 0) - (rank == 0 and last > 0 and fewer > 1)
        vocabulary = -(-self.model.config.vocabulary // layout.tensor) * self.model.config.d_model
        ends = (rank == 0) + (rank == last and (last > 0 or not self.model.config.tied))
        outside = ends * vocabulary + (self.model.config.d_model if rank == last else 0)
        dense = blocks * self.model.local_block(layout.tensor)
        experts = blocks * self.model.local_experts(layout.tensor, layout.expert)
        held = self._counts[key] = dense, experts, outside
        return held

    def _states(self, layout: Layout, sizes: Bytes, held: tuple[int, int, int]) -> tuple[int, int, int]:
        """Bytes of stored parameters, gradients that stay, and moments."""
        sharding = SHARDINGS[layout.sharding]
        dense, experts, outside = held
        everything = dense + experts + outside
        of_experts = min(layout.shard, layout.data * layout.context // layout.expert) if experts else 1
        shared = -(-(dense + outside) // layout.shard) + -(-experts // of_experts)
        state = state_bytes(self.workload)
        return (
            (shared if sharding.parameters else everything) * sizes.parameters,
            (shared if sharding.gradients else everything) * sizes.gradients,
            state * (shared if sharding.moments else everything),
        )

    def _of_rank(self, layout: Layout, rank: int, exactly: bool) -> RankNeeds:
        sharding, sizes = SHARDINGS[layout.sharding], self._sizes[layout.sharding]
        held = self._held(layout, rank)
        parameters, gradients, moments = self._states(layout, sizes, held)
        made_here = layout.micro_batches * layout.chunks == 1 and self.model.experts == 1
        stage = _RankStage(
            blocks=planned_model.largest_stage(self.model.config.layers, layout.stages),
            first=rank == 0,
            last=rank == layout.pipeline - 1,
            gradients="made" if made_here else "elsewhere",
            shards=self._shards(layout, sizes, held[2]),
        )
        if layout.chunks > 1 and layout.pipeline > 1 and stage.last:
            stage = msgspec.structs.replace(stage, first=False)  # the embedding is in another chunk
        needs = self._stage_needs(layout, stage, exactly)
        once = sum(held) * self._gathered_bytes(layout, sizes) if sharding.gathers == "once" else 0
        saved = (planned_model.chunks_in_flight(layout, rank) - 1) * needs.saved
        kept = 0 if made_here else gradients
        fixed = 2 * WORKSPACE_BYTES + 2 * DISTINCT_BATCHES * 8 * self.workload.tokens // layout.data // layout.context
        roots = moments // 2 if self.workload.optimizer == "adamw-foreach" else 0
        in_forward, in_backward = needs.gathered_forward, needs.gathered_backward
        phases = (
            (kept, once + in_forward, saved, needs.forward - in_forward),
            (kept, once + in_backward, saved, needs.backward - in_backward),
            (gradients, once, 0, roots),
        )
        gradients, gathered, saved, working = max(phases, key=sum)
        return RankNeeds(
            parameters=parameters, gradients=gradients, moments=moments, buckets=_buckets(layout, sizes, held),
            gathered=gathered, saved=saved, working=working, fixed=fixed, rank=rank,
        )  # fmt: skip

    def _gathered_bytes(self, layout: Layout, sizes: Bytes) -> int:
        """Bytes of an element of a gathered parameter; 0 where none are."""
        sharding = SHARDINGS[layout.sharding]
        if not sharding.parameters:
            return 0
        return sizes.compute if sharding.in_compute_dtype else sizes.parameters

    def _shards(self, layout: Layout, sizes: Bytes, outside: int) -> Shards | None:
        sharding = SHARDINGS[layout.sharding]
        if not sharding.gradients:
            return None
        return Shards(
            ranks=layout.shard,
            root=outside,
            block=self.model.local_block(layout.tensor) + self.model.local_experts(layout.tensor, layout.expert),
            gathered_bytes=self._gathered_bytes(layout, sizes) if sharding.gathers == "each pass" else 0,
            reduced_bytes=sizes.gradients,
        )

    def _stage(self, layout: Layout, stage: _RankStage) -> Stage:
        """The stage as one rank of the layout runs it for a micro-batch."""
        pure = self.workload.dtype in _MIXED and SHARDINGS[layout.sharding].in_compute_dtype
        workload = msgspec.structs.replace(
            self.workload,
            model=msgspec.structs.replace(self.workload.model, layers=stage.blocks),
            batch_size=layout.micro_batch,
            seq_len=self.workload.seq_len // layout.context,
            dtype="bf16-pure" if pure else self.workload.dtype,
            checkpointing=of_fewer_layers(layout.checkpointing, stage.blocks),
            accumulation=1,
        )
        return Stage(
            workload=workload, model=self.model, tensor=layout.tensor, context=layout.context, first=stage.first,
            last=stage.last, gradients=stage.gradients, shards=stage.shards,
        )  # fmt: skip

    def _stage_needs(self, layout: Layout, stage: _RankStage, exactly: bool) -> StageNeeds:
        if exactly:
            return stage_needs(self._stage(layout, stage))
        if stage.shards is not None:
            # Where parameters come and go, the needs follow from those where they are there: the stage is the same for
            # every number of ranks. Forward has two blocks and what is outside whole; backward has a block's gradients
            # and those of what is outside on their way besides.
            shards, whole = stage.shards, msgspec.structs.replace(stage, shards=None, gradients="elsewhere")
            plain = self._stage_needs(layout, whole, False)
            gathered = (2 * shards.block + shards.root) * shards.gathered_bytes
            both = gathered + (shards.block + shards.root) * shards.reduced_bytes
            return msgspec.structs.replace(
                plain,
                forward=plain.forward + gathered,
                backward=plain.backward + both,
                gathered_forward=gathered,
                gathered_backward=both,
            )
        key = self._key(layout, stage)
        if key not in self._known:
            self._known[key] = self._by_corners(layout, stage)
        return self._known[key]

    def _key(self, layout: Layout, stage: _RankStage) -> tuple[object, ...]:
        dtype = SHARDINGS[layout.sharding].in_compute_dtype
        return layout.tensor, layout.context, layout.micro_batch, layout.checkpointing, stage, dtype

    def _by_corners(self, layout: Layout, stage: _RankStage) -> StageNeeds:
        """The needs by interpolation between few and more blocks, one sequence and two."""
        spans = spans_of(layout.checkpointing, stage.blocks)
        if stage.blocks <= _FEW_BLOCKS or any(span.on_host for span in spans):
            return self._by_tokens(layout, stage)
        if len(spans) > 1:
            # The needs of two spans of blocks follow from those of a block of each, and of one more of either.
            first, last = (span.blocks for span in spans)
            low, longer_first, longer_last = (
                self._by_tokens(
                    msgspec.structs.replace(layout, checkpointing=f"selective-{count}"),
                    msgspec.structs.replace(stage, blocks=blocks),
                )
                for blocks, count in ((2, 1), (3, 1), (3, 2))
            )
            return _interpolated(_interpolated(low, longer_first, first - 1), longer_last, last - 1, beyond=low)
        low, high = (
            self._by_tokens(layout, msgspec.structs.replace(stage, blocks=count))
            for count in (_FEW_BLOCKS - 1, _FEW_BLOCKS)
        )
        return _interpolated(low, high, stage.blocks - _FEW_BLOCKS + 1)

    def _by_tokens(self, layout: Layout, stage: _RankStage) -> StageNeeds:
        """The needs of so many tokens, for fused attention from those of a whole sequence and of two."""
        if not self._linear:
            return stage_needs(self._stage(layout, stage))
        corners: list[StageNeeds] = []  # of one sequence and of two
        for micro_batch in (1, 2):
            of_corner = msgspec.structs.replace(layout, micro_batch=micro_batch)
            corner = self._key(of_corner, stage)
            if corner not in self._corners:
                self._corners[corner] = stage_needs(self._stage(of_corner, stage))
            corners.append(self._corners[corner])
        return _interpolated(corners[0], corners[1], layout.micro_batch - 1)


def memory_of_ranks(workload: TextbookWorkload) -> RankMemory:
    """What a rank needs in any layout of a step that ranks share."""
    alone = msgspec.structs.replace(workload, parallel=NOT_PARALLEL, ranks=1)
    return RankMemory(alone, planned_model.PlannedModel(config=workload.model))


def sharded_peak(workload: TextbookWorkload, gpus: int) -> int:
    """Peak bytes on each of so many GPUs that share the step's state by `fully_shard`, block by block, and have each a
    batch as large as the workload's."""
    layout = Layout(
        data=gpus,
        shard=gpus,
        sharding="zero3-autocast",
        micro_batch=workload.micro_batch_size,
        micro_batches=workload.accumulation,
        checkpointing=workload.checkpointing,
    )
    # A layout's ranks share the workload's tokens, and these have as many each.
    of_others = 2 * DISTINCT_BATCHES * 8 * (workload.tokens - workload.tokens // gpus)
    return RankMemory(workload, planned_model.PlannedModel(config=workload.model)).needs(layout).peak + of_others
