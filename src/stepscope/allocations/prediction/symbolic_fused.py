"""The transformer's step with the fused parts of kernels/parts/: what they keep and make, in symbolic tensors.

A block keeps, in elements, with r = B S M and f = B S F (`symbolic_model.py` has what the reference keeps):

    norm (twice)        x or the sum x + branch, which the residual stream is  1 r; B S in fp32 for 1 / rms
    rope                nothing
    SwiGLU              gate, up                                               2 f, and the product, which `down` keeps

The loss keeps the gradients that it made: of its input, r, and of the head in fp32, V M. Its logits are there for a
chunk of rows at a time.

An operation with two results has one node. What comes back for the second result waits at a node of its own, since
autograd runs backward of the operation when it has the gradients of both.
"""

from collections.abc import Sequence

from stepscope.allocations.prediction.symbolic_model import BlockParameters, SymbolicModel
from stepscope.allocations.prediction.symbolic_tensors import Backward, Parameter, Storage, Tape, Tensor
from stepscope.core.parts import REFERENCE, loss_chunk_rows, norm_programs
from stepscope.core.workload import Workload


class FusedSymbolicModel(SymbolicModel):
    """A symbolic model of which some parts are fused, and the others as the textbook has them."""

    def __init__(self, workload: Workload, device_type: str = "cuda") -> None:
        super().__init__(workload, device_type)
        self._device_type = device_type
        self._fused_parts = {part for part, name in workload.parts.items() if name != REFERENCE}
        self._stream: Tensor | None = None
        """What the last block gave: the model's forward holds it until the loss is made."""

    # ---- norm

    def block(self, tape: Tape, x: Tensor, block: BlockParameters) -> Tensor:
        if "norm" not in self._fused_parts:
            return super().block(tape, x, block)
        normal = self._norm(tape, x, block["attention_norm"])
        branch = self._attention(tape, normal, block)
        del normal
        x, normal = self._add_norm(tape, x, branch, block["feed_forward_norm"])
        del branch
        return self._add(tape, x, self._feed_forward(tape, normal, block))

    def _norm(self, tape: Tape, x: Tensor, weight: Parameter) -> Tensor:
        if "norm" not in self._fused_parts:
            return super()._norm(tape, x, weight)
        roots = tape.storage(4 * (x.elements // self.d_model))
        of_norm, size = self._of_norm(x.elements, weight), x.elements * x.itemsize
        return tape.op(
            "RmsNorm", x.elements, self.sizes.products, [x, weight], saves=[x], also_saves=[roots],
            backward=lambda tape, _: (tape.storage(size), of_norm(tape)),
        )  # fmt: skip

    def _add_norm(self, tape: Tape, x: Tensor, branch: Tensor, weight: Parameter) -> tuple[Tensor, Tensor]:
        """The sum, and its norm."""
        elements, itemsize = x.elements, max(x.itemsize, branch.itemsize)
        roots = tape.storage(4 * (elements // self.d_model))
        total = tape.storage(elements * itemsize)
        of_norm, sizes = self._of_norm(elements, weight), (elements * x.itemsize, elements * branch.itemsize)
        of_total: list[Storage] = []

        def backward(tape: Tape, _: Storage) -> Sequence[Storage]:
            of_x = tape.storage(sizes[0])
            of_branch = of_x if sizes[0] == sizes[1] else tape.storage(sizes[1])
            of_weight = of_norm(tape)
            of_total.clear()
            return of_x, of_branch, of_weight

        normal = tape.op(
            "AddRmsNorm", elements, self.sizes.products, [x, branch, weight], also_saves=[total, roots],
            backward=backward,
        )  # fmt: skip
        return _second_result(tape, Tensor(total, elements, itemsize, normal.node), of_total), normal

    def _of_norm(self, elements: int, weight: Parameter) -> "_OfWeight":
        rows = elements // self.d_model
        return _OfWeight(norm_programs(rows, self._device_type) * self.d_model * 4, weight.elements, weight.itemsize)

    # ---- rope and SwiGLU

    def _rotated_heads(self, tape: Tape, x: Tensor, block: BlockParameters) -> tuple[Tensor, Tensor]:
        if "rope" not in self._fused_parts:
            return super()._rotated_heads(tape, x, block)
        q = self._project(tape, x, block["attention.query"])
        k = self._project(tape, x, block["attention.key"])
        sizes = (q.elements * q.itemsize, k.elements * k.itemsize)
        of_keys: list[Storage] = []

        def backward(tape: Tape, _: Storage) -> Sequence[Storage]:
            of_q, of_k = tape.storage(sizes[0]), tape.storage(sizes[1])
            of_keys.clear()
            return of_q, of_k

        queries = tape.op("Rotate", q.elements, q.itemsize, [q, k], backward=backward)
        keys = Tensor(tape.storage(sizes[1]), k.elements, k.itemsize, queries.node)
        return queries, _second_result(tape, keys, of_keys)

    def _gated(self, tape: Tape, x: Tensor, block: BlockParameters) -> Tensor:
        if "mlp" not in self._fused_parts:
            return super()._gated(tape, x, block)
        gate = self._linear(tape, x, block["feed_forward.gate"], self.d_model)
        up = self._linear(tape, x, block["feed_forward.up"], self.d_model)
        return tape.op("SiluProduct", up.elements, up.itemsize, [gate, up], saves=[gate, up])

    # ---- loss

    def head(self, tape: Tape, x: Tensor) -> Tensor:
        """The logits; before a fused loss, what it multiplies by the head."""
        if "loss" not in self._fused_parts:
            return super().head(tape, x)
        self._stream = x
        return tape.cast(self._norm(tape, x, self.norm_weight), self.sizes.products)

    def loss(self, tape: Tape, logits: Tensor) -> Tensor:
        if "loss" not in self._fused_parts:
            return super().loss(tape, logits)
        hidden, weight, size = logits, self.head_weight, self.sizes.products
        rows, vocabulary = hidden.elements // self.d_model, weight.elements // self.d_model
        _losses = tape.storage(4 * rows)
        of_hidden, of_weight = tape.storage(hidden.elements * size), tape.storage(4 * weight.elements)
        counted = tape.storage(rows)
        del counted
        _kernel = tape.storage(size * weight.elements if weight.itemsize != size else 0)
        chunk = loss_chunk_rows(rows, vocabulary, size)
        _logits = tape.storage(chunk * vocabulary * size)
        if self._device_type != "cuda" and size != 4:
            # There the product of the head's gradient takes its factors in fp32.
            factors = [tape.storage(4 * chunk * each) for each in (vocabulary, self.d_model)]
            del factors
        count, sizes = tape.storage(8), (of_hidden.bytes, weight.bytes)
        loss = tape.op(
            "LinearCrossEntropy", 1, 4, [hidden, weight], also_saves=[of_hidden, of_weight, count],
            backward=lambda tape, _: [tape.storage(size) for size in sizes],
        )  # fmt: skip
        self._stream = None
        return loss


class _OfWeight:
    """Makes the gradient of a norm's weight: each program's share, and their sum."""

    def __init__(self, shares: int, elements: int, itemsize: int) -> None:
        self._shares, self._elements, self._itemsize = shares, elements, itemsize

    def __call__(self, tape: Tape) -> Storage:
        _shares = tape.storage(self._shares)
        return tape.storage(self._itemsize * self._elements)


def _second_result(tape: Tape, result: Tensor, gradients: list[Storage]) -> Tensor:
    """The second result of the operation whose node it has. Its gradient waits in the list for the first one's."""

    def keep(_tape: Tape, gradient: Storage) -> Sequence[None]:
        gradients.append(gradient)
        return (None,)

    backward: Backward = keep
    return tape.alias("Result", result, backward)
