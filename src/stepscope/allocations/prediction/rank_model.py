"""The symbolic model as one rank of a layout runs it: a stage of the blocks, at the sizes that a rank keeps.

Tensor parallelism with sequence parallelism (Korthikanti et al. 2022): the residual stream and the norms hold T/tp
tokens whole, everything between the linear maps T tokens of a share. What is gathered for a product lives only as long
as the product, forward and backward; what is kept is the share. Context parallelism gathers keys and values for the
time of attention. Experts take A copies of each token.
"""

from collections.abc import Sequence

import msgspec

from stepscope.allocations.prediction.sharded_units import ShardedUnits
from stepscope.allocations.prediction.symbolic_compiled import CompiledSymbolicModel
from stepscope.allocations.prediction.symbolic_fused import FusedSymbolicModel
from stepscope.allocations.prediction.symbolic_model import BlockParameters, SymbolicModel
from stepscope.allocations.prediction.symbolic_tensors import Node, Parameter, Storage, Tape, Tensor
from stepscope.core.parts import REFERENCE
from stepscope.core.work.planned_model import PlannedModel
from stepscope.core.work.transformer import Shapes
from stepscope.core.workload import Workload

_ROWS = ("attention.output.weight", "feed_forward.down.weight")


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has of a model: its share of matrices and sequence."""

    model: PlannedModel
    tensor: int = 1
    context: int = 1


class RankModel(SymbolicModel):
    """The symbolic model with a rank's sizes. `workload` holds the rank's blocks, and its share of the sequence."""

    units: ShardedUnits | None = None
    """What gathers the parameters of each block, and reduces their gradients; None where the rank has them whole."""

    def __init__(self, workload: Workload, share: Share) -> None:
        self.share = share
        self.ranks = share.tensor
        super().__init__(workload)
        config = share.model.config
        self.d_ff = config.d_ff // self.ranks
        self.rows = self.tokens * config.heads // self.ranks
        self.scores = self.rows * workload.seq_len * share.context
        keys = share.model.local_keys(self.ranks) // config.head_dim
        self.queries_per_key = config.heads // self.ranks // keys
        self.sums_shared_keys = self.queries_per_key > 1

    def _parameter(self, name: str, shapes: Shapes, prefix: str = "") -> Parameter:
        if not prefix and name != "norm.weight":
            shapes = {name: (self.share.model.local_vocabulary(self.ranks), self.share.model.config.d_model)}
        return super()._parameter(name, shapes, prefix)

    def _block(self, index: int) -> BlockParameters:
        shapes = self.share.model.local_shapes(self.ranks)
        return {name.removesuffix(".weight"): self._parameter(name, shapes, f"blocks.{index}.") for name in shapes}

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
        kernel = self._cast_weight(tape, weight) if weight.itemsize != size else weight
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

        def backward(tape: Tape, _: Storage) -> Sequence[Storage]:
            """Gather the output's gradient (rows), or the input, and later reduce its gradient (columns)."""
            _gathered = tape.storage(whole)
            of_kernel = tape.storage(kernel_bytes)
            _of_whole = tape.storage(0 if by_rows else whole)
            return of_kernel, tape.storage(input_bytes)

        _whole = tape.storage(whole)
        return tape.op("Mm", elements, size, [kernel, cast], saves=saves, backward=backward)

    def _fused(self, tape: Tape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.share.context == 1:
            return super()._fused(tape, q, k, v)
        whole = (k.elements + v.elements) * k.itemsize * self.share.context
        _gathered = tape.storage(whole)
        out = super()._fused(tape, q, k, v)
        node = out.node
        if isinstance(node, Node):
            inner = node.backward

            def backward(tape: Tape, gradient: Storage) -> Sequence[Storage | None]:
                _keys, _gradients = tape.storage(whole), tape.storage(whole)
                return inner(tape, gradient)

            node.backward = backward
        return out

    def _feed_forward(self, tape: Tape, x: Tensor, block: BlockParameters) -> Tensor:
        if self.share.model.experts == 1:
            return super()._feed_forward(tape, x, block)
        sent = tape.op("Dispatch", x.elements * self.share.model.active, x.itemsize, [x])
        out = super()._feed_forward(tape, sent, block)
        return tape.op("Combine", out.elements // self.share.model.active, out.itemsize, [out])


class CompiledRankModel(RankModel, CompiledSymbolicModel):
    """The same under torch.compile."""


class FusedRankModel(RankModel, FusedSymbolicModel):
    """A rank's part of a model with fused parts."""


def rank_model(workload: Workload, share: Share) -> RankModel:
    """The model of a rank, as the workload runs it: op by op, with fused parts, or compiled.

    Compiling leaves fused parts as they are, and fuses what lies between them, which is little; it is left out.
    """
    if any(name != REFERENCE for name in workload.parts.values()):
        return FusedRankModel(workload, share)
    return (RankModel if workload.compile == "eager" else CompiledRankModel)(workload, share)
