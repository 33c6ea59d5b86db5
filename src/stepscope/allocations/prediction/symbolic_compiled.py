"""The step as torch.compile runs it: elementwise work is fused, so its intermediate results never reach memory.

AOTAutograd's min-cut partitioner (torch/_functorch/partitioners.py) chooses what the compiled forward keeps. It keeps
the inputs of matrix products and the results of reductions. The fused kernels of backward compute the elementwise rest
again. The tensors named here are the outputs of the forward graph that it cuts, for PyTorch 2.11 on an H200. In
elements a block, with r = B S M, f = B S F and ss = B H S S:

    x before attention and before the feed-forward   2 r, in the dtype of the residual stream
    both norms' outputs                              2 r, in the dtype of the products, as all of the following
    queries, keys, values; attention's output        4 r
    scores and softmax, where attention is written out  2 ss
    gate, up, silu(gate) * up                        3 f
    under autocast, the copies of the weights
"""

from collections.abc import Sequence

from stepscope.allocations.prediction.symbolic_model import BlockParameters, SymbolicModel
from stepscope.allocations.prediction.symbolic_tensors import Parameter, Storage, Tape, Tensor, passes_twice


class CompiledSymbolicModel(SymbolicModel):
    """The symbolic model of a step under torch.compile, whose modules are fused."""

    _scores_buffer: Tensor | None = None
    _kept_buffers: Sequence[Storage] = ()
    """Three buffers of the size of queries, keys and values, which every block reuses in inference."""

    def _norm(self, tape: Tape, x: Tensor, weight: Parameter) -> Tensor:
        root = tape.storage(x.elements // self.d_model * 4)
        return tape.op("Norm", x.elements, self.sizes.products, [x, weight], saves=[x], also_saves=[root])

    def _cast_weight(self, tape: Tape, weight: Parameter) -> Tensor:
        self._casts.clear()  # no cache: a copy lives as long as the product and backward need it
        return super()._cast_weight(tape, weight)

    def _rotary(self, tape: Tape, x: Tensor) -> Tensor:
        return tape.op("Rotary", x.elements, x.itemsize, [x])

    def _written_out(self, tape: Tape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        v = self._contiguous(tape, v)
        if not tape.recording:
            return self._in_one_buffer(tape, v)
        scores = self._product(tape, self.scores, q, k)
        maxima, sums = tape.storage(self.rows * scores.itemsize), tape.storage(self.rows * 4)

        def in_place(_tape: Tape, gradient: Storage) -> Sequence[Storage]:
            return (gradient,)

        weights = tape.op(
            "Softmax", self.scores, scores.itemsize, [scores],
            saves=[scores], also_saves=[maxima, sums], backward=in_place,
        )  # fmt: skip
        return self._product(tape, v.elements, weights, v)

    def _in_one_buffer(self, tape: Tape, v: Tensor) -> Tensor:
        """Attention in inference: softmax overwrites the scores, and the next block reuses their buffer."""
        if self._scores_buffer is None:
            self._scores_buffer = self._product(tape, self.scores, v, v)
        return self._product(tape, v.elements, self._scores_buffer, v)

    def _feed_forward(self, tape: Tape, x: Tensor, block: BlockParameters) -> Tensor:
        if not tape.recording and not self._kept_buffers:
            self._kept_buffers = [tape.storage(x.elements * self.sizes.products) for _ in range(3)]
        return super()._feed_forward(tape, x, block)

    def head(self, tape: Tape, x: Tensor) -> Tensor:
        """The logits. The buffers are freed after the last block, and x is freed once it is normalised."""
        if tape.recording:
            return super().head(tape, x)
        self._scores_buffer, self._kept_buffers = None, ()
        normal = self._norm(tape, x, self.norm_weight)
        x.storage = normal.storage
        return self._linear(tape, normal, self.head_weight, self.d_model)

    def _gated(self, tape: Tape, x: Tensor, block: BlockParameters) -> Tensor:
        gate = self._linear(tape, x, block["feed_forward.gate"], self.d_model)
        up = self._linear(tape, x, block["feed_forward.up"], self.d_model)
        if not tape.recording:
            return gate  # overwritten
        return tape.op("SwiGLU", up.elements, up.itemsize, [gate, up], saves=[gate, up])

    def _add(self, tape: Tape, x: Tensor, branch: Tensor) -> Tensor:
        return tape.op("Add", x.elements, self.sizes.residual, [x, branch], backward=passes_twice)

    def _project(self, tape: Tape, x: Tensor, weight: Parameter) -> Tensor:
        return self._linear(tape, x, weight, self.d_model)

    def loss(self, tape: Tape, logits: Tensor) -> Tensor:
        """The cross-entropy of the logits without a cast. Backward overwrites the logits with their gradient."""
        reductions = tape.storage(self.tokens * 8)
        return tape.op(
            "CrossEntropy", 1, 4, [logits], saves=[logits], also_saves=[reductions],
            backward=lambda _tape, _gradient, over=logits.storage: (over,),
        )  # fmt: skip
