"""The transformer's step in symbolic tensors. Its methods follow `training/transformer.py` and `training/attention/`.

Each operation says how many bytes it makes, what autograd keeps for backward, and what its backward makes. The peaks
follow from nothing else. A block keeps, in elements, with r = B S M, f = B S F and ss = B H S S:

    norm (twice)        x, x / rms                                  2 r each, fp32, and in fp32 its output, once: 1 r
    linear              its input in the product's dtype            r or f; under autocast a separate copy each time
    queries, keys       rotated, laid out for the product           2 r  (written out: copies; fused: as they are)
    values              laid out for the product                    1 r
    scores, written out exp(scores - max), and the softmax          2 ss (the first in fp32 under autocast on a GPU)
    attention, fused    its output, and the logsumexp               1 r, B H S fp32
    SwiGLU              gate, up, silu(gate), silu(gate) * up       4 f

In fp32 this is 10 r + 4 f + 2 ss elements a block, or 10 r + 4 f + B H S with fused attention. docs/memory.md also has
the sum under autocast.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from stepscope.allocations.prediction.symbolic_tensors import (
    KEPT_OPERATORS,
    Backward,
    Node,
    Offloaded,
    Parameter,
    Segment,
    Storage,
    Tape,
    Tensor,
    passes,
    passes_twice,
)
from stepscope.core.attention_support import predicted_attention
from stepscope.core.checkpointing import BLOCKS_ON_THE_WAY, Span, grouped, nested_parts
from stepscope.core.evidence import CATEGORIES
from stepscope.core.formulas.transformer import Shapes, block_shapes, shapes_outside_blocks
from stepscope.core.parts import ATTENTIONS, REFERENCE, has_few_programs, loss_chunk_rows, loss_columns, norm_programs
from stepscope.core.precisions import PRECISIONS, takes_scaled
from stepscope.core.workloads import TextbookWorkload

# A linear layer whose products take operands of 8 bits (training/scaled_products.py), in symbolic tensors.
#
# It keeps its input as it came, in 16 bits. Each product's operands are there for the product alone: of n numbers each
# has n bytes, and its scales. By tensor, kernels on a GPU make nothing else; they write both layouts of what comes back
# at once, and forward keeps its two scales. PyTorch's operators, by row and on a CPU, have n numbers in fp32 besides
# while they cast, and n bytes more where an operand is laid out anew.


_SCALE = 4
"""Bytes of a scale."""


class ScaledProducts(NamedTuple):
    """The products of a workload's linear layers."""

    by_row: bool
    on_gpu: bool
    itemsize: int
    """Bytes of an element that is cast, and of one of a product."""

    def linear(self, tape: Tape, x: Tensor, weight: Parameter, in_features: int) -> Tensor:
        """x w^T."""
        rows, out_features = x.elements // in_features, weight.elements // in_features

        def backward(tape: Tape, _: Storage) -> Sequence[Storage]:
            """dy w, of which w is laid out anew, and dy^T x, of which both are."""
            for_x = self._product(tape, rows, out_features, in_features, copied=(False, True))
            for_weight = self._product(tape, out_features, rows, in_features, copied=(True, True))
            return for_x, for_weight

        def backward_by_kernels(tape: Tape, _: Storage) -> Sequence[Storage]:
            """dy in both layouts; w^T for dx, and x^T for dw."""
            _scale = tape.storage(_SCALE)
            along, across = tape.storage(rows * out_features), tape.storage(rows * out_features)
            turned = tape.storage(in_features * out_features)
            for_x = self.result_of_product(tape, rows, in_features)
            del along, turned
            _turned = tape.storage(rows * in_features)
            for_weight = self.result_of_product(tape, out_features, in_features)
            del across
            return for_x, for_weight

        # The weight's gradient is passed on before that of x, which is given the shape of x first.
        x = tape.alias("View", x, passes)
        if isinstance(x.node, Node):
            x.node.gives_views = True
        if self.on_gpu and not self.by_row:
            scales = tape.storage(_SCALE), tape.storage(_SCALE)
            _small = tape.storage(rows * in_features), tape.storage(in_features * out_features)
            return tape.op(
                "ScaledMm", rows * out_features, x.itemsize, [x, weight], saves=[x], also_saves=scales,
                backward=backward_by_kernels, saves_late=True,
            )  # fmt: skip
        _operands = self._operands(tape, rows, in_features, out_features)
        return tape.op(
            "ScaledMm", rows * out_features, x.itemsize, [x, weight], saves=[x], backward=backward, saves_late=True
        )

    def _product(self, tape: Tape, rows: int, inner: int, columns: int, copied: tuple[bool, bool]) -> Storage:
        _operands = self._operands(tape, rows, inner, columns, copied)
        return self.result_of_product(tape, rows, columns)

    def result_of_product(self, tape: Tape, rows: int, columns: int) -> Storage:
        """What a product returns, while its operands are there."""
        product = tape.storage(rows * columns * self.itemsize)
        tape.take_workspace("ScaledMm")
        return product

    def _operands(
        self, tape: Tape, rows: int, inner: int, columns: int, copied: tuple[bool, bool] = (False, False)
    ) -> list[Storage]:
        """What a product (rows, inner) by (inner, columns) has in memory when its output is made.

        copied: which operands do not lie in memory as the product takes them.
        """
        sizes = (rows * inner, inner * columns)
        alive: list[Storage] = []
        for size, slices in zip(sizes, (rows, columns), strict=True):
            alive += self._cast(tape, size, slices if self.by_row else 1)
        alive += [tape.storage(size) for size, is_copied in zip(sizes, copied, strict=True) if is_copied]
        if not self.on_gpu:
            # There the product is made in fp32, and then multiplied by one scale and the other
            # (recording/precision.py).
            wide = [tape.storage(4 * size) for size in sizes]
            product = tape.storage(4 * rows * columns)
            del wide
            scaled_once = tape.storage(4 * rows * columns)
            del product
            alive.append(tape.storage(4 * rows * columns))
            del scaled_once
        return alive

    def _cast(self, tape: Tape, elements: int, scales: int) -> list[Storage]:
        """An operand of 8 bits and its scales, made of one of 16 bits."""
        magnitudes = tape.storage(elements * self.itemsize)
        _largest = tape.storage(scales * self.itemsize)
        del magnitudes
        wide = tape.storage(4 * scales)
        quotient = tape.storage(4 * scales)
        del wide
        scale = tape.storage(4 * scales)
        del quotient
        _wide = tape.storage(4 * elements)
        return [tape.storage(elements), scale]


_CAST = CATEGORIES.index("cast copies")

BlockParameters = dict[str, Parameter]
"""A block's parameters by their name inside the block, without `.weight`."""

JOINT = ("attention.query", "attention.key", "attention.value"), ("feed_forward.gate", "feed_forward.up")
"""The weights that joint projections have as one product each."""


class SymbolicModel:
    """Symbolic parameters and the operations of forward. A method has the name of the module whose forward it is."""

    abridged = False
    """Whether blocks that are alike are one piece. This is ten times as fast, but has no peaks inside each block."""

    between: "Callable[[Tape, Tensor, int], Tensor] | None" = None
    """What is called before each group of blocks and after the last, with how many came before."""

    def __init__(self, workload: TextbookWorkload, device_type: str = "cuda") -> None:
        self.workload = workload
        self.attention = ATTENTIONS[predicted_attention(workload, device_type)]
        on_gpu = device_type == "cuda"
        self.sizes = PRECISIONS[workload.dtype]
        self.exponential_size = 4 if self.sizes.autocast and on_gpu else self.sizes.products
        """Bytes of an exponential where softmax is written out, which autocast leaves in fp32 on a GPU."""
        self.scaled: ScaledProducts | None = (
            ScaledProducts(by_row=self.sizes.scaled == "row", on_gpu=on_gpu, itemsize=self.sizes.products)
            if self.sizes.scaled
            else None
        )
        config, self.joint = workload.model, workload.projections == "joint"
        self.d_model, self.d_ff = config.d_model, config.d_ff
        self.tokens = workload.micro_batch_size * workload.seq_len
        self.rows = self.tokens * config.heads
        """The number of rows of attention's scores: one for each query of each head."""
        self.scores = self.rows * workload.seq_len
        self.queries_per_key = config.heads // config.key_heads
        self.sums_shared_keys = self.queries_per_key > 1 and on_gpu
        """Whether fused attention makes gradients of keys for each query head, and then sums them."""
        self.parameters: list[Parameter] = []
        shapes = shapes_outside_blocks(config)
        self.embedding_weight = self._parameter("embedding.weight", shapes)
        self.blocks = [self._block(i) for i in range(config.layers)]
        self.norm_weight = self._parameter("norm.weight", shapes)
        if config.tied:
            self.embedding_weight.uses = 2
        self.head_weight = self.embedding_weight if config.tied else self._parameter("head.weight", shapes)
        self._casts: dict[str, Tensor] = {}
        """Autocast's copies of weights by the weight's name, kept until autocast ends."""
        self._cast_alike: list[Storage] = []

    def _parameter(self, name: str, shapes: Shapes, prefix: str = "") -> Parameter:
        size = self.sizes.weights if len(shapes[name]) > 1 else self.sizes.vectors
        parameter = Parameter(prefix + name, math.prod(shapes[name]), size)
        self.parameters.append(parameter)
        return parameter

    def _block(self, index: int) -> BlockParameters:
        """The parameters of a block: a rank of a layout has its own part of them."""
        shapes = block_shapes(self.workload.model)
        return {name.removesuffix(".weight"): self._parameter(name, shapes, f"blocks.{index}.") for name in shapes}

    # ---- what a step calls

    def embedding(self, tape: Tape) -> Tensor:
        weight = self.embedding_weight

        def backward(tape: Tape, gradient: Storage) -> Sequence[Storage]:
            dense = tape.storage(weight.bytes)
            # PyTorch's kernel first sums the rows of each token that occurs often enough to be split.
            _segments = tape.storage(gradient.bytes if self.tokens > _EMBEDDING_SORTS_FROM else 0)
            return (dense,)

        return tape.op("Embedding", self.tokens * self.d_model, self.sizes.residual, [weight], backward=backward)

    def block(self, tape: Tape, x: Tensor, block: BlockParameters) -> Tensor:
        x = self._branch(tape, x, block["attention_norm"], partial(self._attention, block=block))
        return self._branch(tape, x, block["feed_forward_norm"], partial(self._feed_forward, block=block))

    def _branch(self, tape: Tape, x: Tensor, weight: Parameter, module: "Callable[[Tape, Tensor], Tensor]") -> Tensor:
        """x + module(norm(x)). A module's input lives until the module has returned, longer than all that it makes."""
        normal = self._norm(tape, x, weight)
        out = module(tape, normal)
        del normal
        return self._add(tape, x, out)

    def run_blocks(self, tape: Tape, x: Tensor) -> Tensor:
        """All blocks, which keep what the workload says, as in training/checkpointing.py."""
        blocks = list(grouped(self.blocks, self.workload.spans))
        if tape.recording and any(span.on_host for span, _ in blocks):
            return self._run_offloading(tape, x, blocks)
        for span, groups in blocks:
            alike, grown = range(2, len(groups) - 2) if self.abridged else range(0), list[int]()
            for number, group in enumerate(groups):
                x = self.between(tape, x, number) if self.between else x
                before = tape.ledger.live.copy()
                x = self._stand_in(tape, x, group, grown) if number in alike else self._run(tape, x, group, span)
                if number == 1:
                    grown = [after - earlier for after, earlier in zip(tape.ledger.live, before, strict=True)]
            x = self.between(tape, x, len(groups)) if self.between else x
        return x

    def _run_offloading(
        self, tape: Tape, x: Tensor, blocks: Iterable[tuple[Span, Sequence[Sequence[BlockParameters]]]]
    ) -> Tensor:
        """All blocks, one after another, which keep what `selective` does. What is offloaded of a block comes back when
        backward reaches the next block that offloads, and that of the last, when it reaches the blocks."""
        leaving: deque[Offloaded | None] = deque()
        last: Offloaded | None = None

        def fetching(block: Offloaded, tape: Tape, gradient: Storage) -> Sequence[Storage]:
            """The backward of what a block returns, before the block's own."""
            while leaving:
                if (other := leaving.popleft()) is not None:
                    other.leave()
            block.fetch(tape)
            return (gradient,)

        for span, group in ((span, group) for span, groups in blocks for group in groups):
            segment = Segment(partial(self._run_group, blocks=group), x, KEPT_OPERATORS["selective"])
            x = tape.run(segment)
            offloaded = Offloaded(segment) if span.on_host else None
            leaving.append(offloaded)
            if len(leaving) > BLOCKS_ON_THE_WAY and (other := leaving.popleft()) is not None:
                other.leave()
            if offloaded is not None:
                tape.offloaded += sum(storage.bytes for storage in segment.kept)
                if last is not None:
                    x = tape.alias("Fetch", x, partial(fetching, last))
                last = offloaded
        return x if last is None else tape.alias("Fetch", x, partial(fetching, last))

    def _run(self, tape: Tape, x: Tensor, group: Sequence[BlockParameters], span: Span) -> Tensor:
        if span.checkpointing == "none":
            return self._run_group(tape, x, group)
        if span.calls is not None:
            return self._run_nested(tape, x, group, span.calls)
        keeps = KEPT_OPERATORS.get(span.checkpointing, frozenset[str]())
        return tape.run(Segment(partial(self._run_group, blocks=group), x, keeps))

    def _run_nested(self, tape: Tape, x: Tensor, blocks: Sequence[BlockParameters], calls: int) -> Tensor:
        """The blocks as calls that hold calls, down to single blocks."""
        for part in nested_parts(blocks, calls):
            alone = len(part) == 1
            inner = (
                partial(self._run_group, blocks=part) if alone else partial(self._run_nested, blocks=part, calls=calls)
            )
            x = tape.run(Segment(inner, x, frozenset()))
        return x

    def _stand_in(self, tape: Tape, x: Tensor, group: Sequence[BlockParameters], grown: Sequence[int]) -> Tensor:
        """A group of blocks as one piece: it leaves `grown` bytes by category, and later its gradients.

        Live memory grows evenly from group to group, and each group needs the same temporaries. So the highest peak
        lies in one of the first two or the last two groups.
        """
        left = [(i, tape.ledger.storage(size, i)) for i, size in enumerate(grown) if size > 0]
        self._cast_alike += [storage for i, storage in left if i == _CAST]
        if not tape.recording:
            return x
        parameters = [parameter for block in group for parameter in block.values()]
        sizes = [parameter.bytes for parameter in parameters]
        saved = [storage for i, storage in left if i != _CAST or self.workload.checkpointing == "none"]

        def backward(tape: Tape, gradient: Storage) -> Sequence[Storage | None]:
            made = [] if parameters[0].gradient else tape.ledger.together(sizes)
            return gradient, *made, *[None] * (len(parameters) - len(made))

        return tape.alias("Block", x, backward, parameters, saved)

    def _run_group(self, tape: Tape, x: Tensor, blocks: Sequence[BlockParameters]) -> Tensor:
        for block in blocks:
            x = self.block(tape, x, block)
        return x

    def head(self, tape: Tape, x: Tensor) -> Tensor:
        return self._linear(tape, self._norm(tape, x, self.norm_weight), self.head_weight, self.d_model)

    def loss(self, tape: Tape, logits: Tensor) -> Tensor:
        """F.cross_entropy(logits.float(), targets)."""
        wide = tape.cast(logits, 4)  # lives until cross_entropy has returned
        log_probabilities = tape.op("LogSoftmax", logits.elements, 4, [wide], saves_output=True)
        total_weight = tape.storage(4)
        return tape.op("NllLoss", 1, 4, [log_probabilities], saves=[log_probabilities], also_saves=[total_weight])

    def end_autocast(self) -> None:
        """Free autocast's copies of weights, as autocast does when its context ends."""
        self._casts.clear()
        self._cast_alike.clear()

    # ---- modules

    def _norm(self, tape: Tape, x: Tensor, weight: Parameter) -> Tensor:
        size = x.elements * 4
        x = tape.cast(x, 4)
        root = self._reciprocal_root(tape, x)
        roots_size = root.elements * 4  # checkpointing keeps the backward, which must not keep `root` alive

        def of_root(tape: Tape, _: Storage) -> Sequence[Storage]:
            for_root, for_x = tape.storage(size), tape.storage(size)
            tape.end_formula()
            summed = tape.storage(roots_size)
            del for_root
            return for_x, summed

        def of_weight(tape: Tape, _: Storage) -> Sequence[Storage]:
            for_weight, for_x = tape.storage(size), tape.storage(size)
            tape.end_formula()
            summed = tape.storage(weight.bytes)
            del for_weight
            return for_x, summed

        x = tape.op("Mul", x.elements, 4, [x, root], saves=[x, root], backward=of_root)
        del root
        scaled = tape.op("Mul", x.elements, 4, [x, weight], saves=[x], backward=of_weight)
        return tape.cast(scaled, self.sizes.residual)

    def _reciprocal_root(self, tape: Tape, x: Tensor) -> Tensor:
        """rsqrt(mean(x^2) + epsilon)."""
        tokens, size = x.elements // self.d_model, x.elements * 4

        def of_power(tape: Tape, _: Storage) -> Sequence[Storage]:
            power, twice = tape.storage(size), tape.storage(size)
            gradient = tape.storage(size)
            del power, twice
            return (gradient,)

        def of_root(tape: Tape, gradient: Storage) -> Sequence[Storage]:
            """-0.5 * gradient * result^3."""
            cube, half = tape.storage(tokens * 4), tape.storage(tokens * 4)
            for_mean = tape.storage(tokens * 4)
            del half, cube
            return (for_mean,)

        square = tape.op("Pow", x.elements, 4, [x], saves=[x], backward=of_power)
        mean = tape.op("Mean", tokens, 4, [square])
        del square
        mean = tape.op("Add", tokens, 4, [mean], backward=passes)
        return tape.op("Rsqrt", tokens, 4, [mean], saves_output=True, backward=of_root)

    def _linear(self, tape: Tape, x: Tensor, weight: Parameter, in_features: int) -> Tensor:
        size = self.sizes.products
        out_features = weight.elements // in_features
        scaled = weight is not self.head_weight and takes_scaled(in_features, out_features)
        if self.scaled is not None and scaled:
            return self.scaled.linear(tape, tape.cast(x, size), weight, in_features)
        kernel = self._cast_weight(tape, weight) if weight.itemsize != size else weight
        cast = tape.cast(x, size)  # the caller's x stays alive
        saves = [kernel, cast] if isinstance(kernel, Tensor) else [cast]
        elements = x.elements // in_features * out_features
        # If x is cast, its gradient is made from the copy's. Otherwise it is a view, in the shape of x.
        return tape.op("Mm", elements, size, [kernel, cast], saves=saves, gives_views=cast is x)

    def _cast_weight(self, tape: Tape, weight: Parameter) -> Tensor:
        if weight.name not in self._casts:
            copy = tape.op("ToCopy", weight.elements, self.sizes.products, [weight])
            copy.storage.become(_CAST)
            self._casts[weight.name] = copy
        return self._casts[weight.name]

    def _rotary(self, tape: Tape, x: Tensor) -> Tensor:
        n, size = x.elements, x.itemsize
        turned = self._turned(tape, x)
        # Tables of cos and of sin in the dtype of the products.
        table = self.workload.seq_len * self.workload.model.head_dim * self.sizes.products
        angles = [] if size == self.sizes.buffers else [tape.storage(table) for _ in range(2)]
        by_cos = tape.op("Mul", n, size, [x], also_saves=angles[:1])
        by_sin = tape.op("Mul", n, size, [turned], also_saves=angles[1:])
        rotated = tape.op("Add", n, size, [by_cos, by_sin], backward=passes_twice)
        del by_cos, by_sin
        return rotated

    def _turned(self, tape: Tape, x: Tensor) -> Tensor:
        """cat(-second half, first half)."""
        n, size = x.elements, x.itemsize

        def backward(tape: Tape, gradient: Storage) -> Sequence[Storage]:
            negative = tape.storage(n // 2 * size)
            halves = tape.storage(n * size)
            del gradient, negative
            return (halves,)

        _negative = tape.storage(n // 2 * size)
        return tape.op("Cat", n, size, [x], backward=backward)

    def _attention(self, tape: Tape, x: Tensor, block: BlockParameters) -> Tensor:
        if self.joint:
            weights = [block[name] for name in JOINT[0]]
            # The scores of one head give gradients of keys in the order in which their product took them.
            turned = self.workload.model.heads == 1 < self.workload.micro_batch_size and not self.fused
            made = self._projected_jointly(tape, x, weights, turned=x.elements if turned else 0)
            q, k, v = (self._as_heads(tape, each, weight) for each, weight in zip(made, weights, strict=True))
            q, k = self._rotated(tape, q, k)
        else:
            q, k = self._rotated_heads(tape, x, block)
            v = self._project(tape, x, block["attention.value"])
        if self.attention.memory == "scores":
            out = self._written_out(tape, q, k, v)
        elif self.attention.memory == "math" or self.no_kernel_fits:
            out = self._sdpa_math(tape, q, k, v)
        else:
            out = self._fused(tape, q, k, v, block.get("attention.sinks"))
        # Attention made of products stores heads before positions. The output projection needs a copy.
        together = out
        if not self.fused and self.workload.model.heads > 1:
            # The copy's gradient is copied if the batch has several sequences.
            backward = passes if self.workload.micro_batch_size == 1 else None
            together = tape.op("Clone", out.elements, out.itemsize, [out], backward=backward)
        return self._linear(tape, together, block["attention.output"], self.d_model)

    def _rotated_heads(self, tape: Tape, x: Tensor, block: BlockParameters) -> tuple[Tensor, Tensor]:
        queries = self._rotary(tape, self._project(tape, x, block["attention.query"]))
        return queries, self._rotary(tape, self._project(tape, x, block["attention.key"]))

    def _rotated(self, tape: Tape, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self._rotary(tape, q), self._rotary(tape, k)

    def _project(self, tape: Tape, x: Tensor, weight: Parameter) -> Tensor:
        """A linear map whose output is viewed as heads."""
        return self._as_heads(tape, self._linear(tape, x, weight, self.d_model), weight)

    def _projected_jointly(
        self, tape: Tape, x: Tensor, weights: Sequence[Parameter], *, turned: int = 0, halves: bool = False
    ) -> list[Tensor]:
        """Linear maps of x as one product (kernels/parts/projections.py): parts of one storage, as are the gradients of
        the weights. Gradients that come back are copied side by side, of which `turned` elements are copied before;
        halves: they are parts of one storage already."""
        size, itemsize, rows = self.sizes.products, weights[0].itemsize, x.elements // self.d_model
        elements = sum(weight.elements for weight in weights)
        made, cast_bytes = rows * elements // self.d_model, elements * size if itemsize != size else 0
        waiting: list[Storage] = []

        def backward(tape: Tape, _: Storage) -> Sequence[Storage]:
            _others, waiting[:] = waiting.copy(), ()
            _turned = tape.storage(turned * size)
            together = tape.storage(0 if halves else made * size)
            joined = tape.storage(cast_bytes, _CAST)
            of_x = tape.storage(rows * self.d_model * size)
            tape.take_workspace("JointMm")
            del joined
            of_weights = tape.storage(elements * size)
            del together
            of_weights = tape.storage(elements * itemsize) if cast_bytes else of_weights
            return of_x, *[of_weights] * len(weights)

        x = tape.cast(x, size)
        _joined = tape.storage(0 if tape.has_kept("JointMm") else cast_bytes, _CAST)
        y = tape.op("JointMm", made, size, [x, *weights], saves=[x], backward=backward, saves_late=True)
        parts = [Tensor(y.storage, rows * w.elements // self.d_model, size, y.node) for w in weights]
        return [parts[0], *(tape.second_result(part, waiting) for part in parts[1:])]

    def _as_heads(self, tape: Tape, projected: Tensor, weight: Parameter) -> Tensor:
        heads = weight.elements // (self.d_model * self.workload.model.head_dim)
        if self.fused or heads == 1 or not tape.recording:
            return projected
        # Backward receives gradients that store heads before positions, and copies them.
        elements, size = projected.elements, projected.itemsize
        return tape.alias("View", projected, lambda tape, _: (tape.storage(elements * size),))

    @property
    def fused(self) -> bool:
        return self.attention.scores != "whole" and not self.no_kernel_fits

    @property
    def no_kernel_fits(self) -> bool:
        """Whether PyTorch falls back to products. On a GPU its only fused kernel for fp32 takes no shared keys."""
        return self.attention.memory == "chosen" and self.sums_shared_keys and self.sizes.products == 4

    def _for_all_heads(self, tape: Tape, x: Tensor) -> Tensor:
        """Keys or values, repeated for the query heads that share them. Backward sums their gradients."""
        if self.queries_per_key == 1:
            return x
        return tape.op("RepeatInterleave", x.elements * self.queries_per_key, x.itemsize, [x])

    def _written_out(self, tape: Tape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention by `reference` or `unsafe` of training/attention/written_out.py."""
        a, p, ss = self.sizes.products, self.exponential_size, self.scores
        k, v = self._for_all_heads(tape, k), self._for_all_heads(tape, v)
        scores = self._product(tape, ss, self._contiguous(tape, q), self._laid_out(tape, k))
        scores = tape.op("Mul", ss, a, [scores])
        _positions = [tape.storage(self.workload.seq_len * 8) for _ in range(2)]
        mask = tape.hidden_keys(self.workload.seq_len**2, windowed=self.workload.model.window is not None)
        scores = tape.op("MaskedFill", ss, a, [scores], also_saves=[mask])
        del mask
        _maximum = tape.storage(self.rows * a) if self.attention.subtracts_maximum else None
        shifted = tape.op("Sub", ss, a, [scores], backward=passes) if self.attention.subtracts_maximum else scores
        exponentials = tape.op("Exp", ss, p, [tape.cast(shifted, p)], saves_output=True)
        del shifted
        sums = tape.op("Sum", self.rows, p, [exponentials], backward=passes)

        def of_quotient(tape: Tape, _: Storage) -> Sequence[Storage]:
            """First the gradient of the divisor, -gradient * (self / other / other); then that of the dividend."""
            quotient, twice, negative = (tape.storage(ss * p) for _ in range(3))
            for_sums = tape.storage(ss * p)
            del quotient, twice, negative
            for_exponentials = tape.storage(ss * p)
            tape.end_formula()
            summed = tape.storage(self.rows * p)
            del for_sums
            return for_exponentials, summed

        weights = tape.op("Div", ss, p, [exponentials, sums], saves=[exponentials, sums], backward=of_quotient)
        del sums
        cast = tape.cast(weights, a)
        return self._product(tape, v.elements, cast, self._laid_out(tape, v))

    def _product(self, tape: Tape, elements: int, a: Tensor, b: Tensor) -> Tensor:
        return tape.op("Bmm", elements, a.itemsize, [b, a], saves=[b, a])

    def _contiguous(self, tape: Tape, x: Tensor) -> Tensor:
        """x with batch and heads as one dimension: a copy, or a view if there is one sequence or one head."""
        if min(self.workload.micro_batch_size, self.workload.model.heads) == 1:
            return x
        return tape.op("Clone", x.elements, x.itemsize, [x], backward=passes)

    def _laid_out(self, tape: Tape, x: Tensor) -> Tensor:
        """Keys or values with batch and heads as one dimension. Repeated ones have that layout already."""
        return x if self.queries_per_key > 1 else self._contiguous(tape, x)

    def _sdpa_math(self, tape: Tape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention by PyTorch's `_scaled_dot_product_attention_math`, always in fp32.

        Its source is aten/src/ATen/native/transformers/attention.cpp.
        """
        size, ss = self.sizes.products, self.scores
        q, k, v = tape.cast(q, 4), tape.cast(k, 4), tape.cast(v, 4)
        queries = tape.op("Mul", q.elements, 4, [q])
        _mask = tape.storage(self.workload.seq_len**2 * 4)
        k, v = self._for_all_heads(tape, k), self._for_all_heads(tape, v)
        keys = tape.op("Mul", k.elements, 4, [k])
        scores = self._product(tape, ss, self._contiguous(tape, queries), self._laid_out(tape, keys))
        del keys
        # `_safe_softmax` makes a bool for each score to find rows that are all masked. It sets those to 0 in place.
        weights = tape.op("Softmax", ss, 4, [scores], saves_output=True)
        masked, rows = tape.storage(ss), tape.storage(self.rows)
        del masked, rows, scores
        _second_output = tape.storage(ss * size if size != 4 else 0)
        out = self._product(tape, v.elements, weights, self._laid_out(tape, v))
        return tape.cast(out, size)

    def _fused(self, tape: Tape, q: Tensor, k: Tensor, v: Tensor, sinks: Parameter | None = None) -> Tensor:
        """One operator that keeps its inputs, its output and the logsumexp of each row."""
        if self.attention.repeats_keys:
            k, v = self._for_all_heads(tape, k), self._for_all_heads(tape, v)
        n, size = q.elements, q.itemsize
        of_keys, of_sinks = k.elements, [] if sinks is None else [sinks.elements * 4]
        for_all_heads = 2 * n * size if self.sums_shared_keys and of_keys < n else 0
        head_dim = n // self.rows
        # In fp32 the kernels for Hopper split operands of these head dimensions into three parts of bf16, in rows
        # padded to a power of two (kernels/flash/tiles.py). Kernels for other GPUs do not, and need less.
        split = self.attention.memory == "hopper" and size == 4 and 64 < head_dim <= 128
        parts = n // head_dim * 128 * 3 * 2 if split else 0

        def backward(tape: Tape, _: Storage) -> Sequence[Storage]:
            gradients = [tape.storage(each) for each in (n * size, of_keys * size, of_keys * size, *of_sinks)]
            if self.attention.memory == "hopper":
                # The logsumexp and D of each row, with sinks their weights and those times D. The kernels pad a head's
                # rows to a multiple of the tile, 128 at most, which is not counted: zero for multiples of 128.
                _statistics = [tape.storage(self.rows * 2 * 4) for _ in (1, *of_sinks)]
                # In 16 bits the kernels for Hopper (kernels/hopper/launch.py) sum dQ of long sequences in fp32 in
                # memory. Kernels for other GPUs sum in registers and need less, unless tuning chose `fused`.
                fp32_sums = size == 2 and head_dim in range(64, 129, 8) and self.workload.seq_len > _HOPPER_SHORT
                # Gradients of keys by head of queries, and for those kernels keys and values, too (flash/launch.py).
                few = has_few_programs(of_keys // (head_dim * self.workload.seq_len), self.workload.seq_len)
                shares = (4 if fp32_sums else 2) * n * size if few and of_keys < n else 0
                _beside = [tape.storage(each) for each in (n * 4 if fp32_sums else 0, 4 * parts, shares)]
                return gradients
            # The delta of each row, sums of the gradients of queries over blocks of keys in fp32, and of all heads.
            _beside = [tape.storage(each) for each in (self.rows * 4, n * 4 if size != 4 else 0, for_all_heads)]
            return gradients

        _of_operands = tape.storage(3 * parts)
        return tape.op(
            "Attention", n, size, [q, k, v, *([sinks] if sinks else ())], saves=[q, k, v], saves_output=True,
            beside=self.rows * 4, backward=backward,
        )  # fmt: skip

    def _feed_forward(self, tape: Tape, x: Tensor, block: BlockParameters) -> Tensor:
        if self.joint:
            weights, halves = [block[name] for name in JOINT[1]], self.workload.mlp != REFERENCE
            gate, up = self._projected_jointly(tape, x, weights, halves=halves)  # both live until `down` has returned
            inner = self._silu_product(tape, gate, up)
        else:
            inner = self._gated(tape, x, block)
        return self._linear(tape, inner, block["feed_forward.down"], self.d_ff)

    def _silu_product(self, tape: Tape, gate: Tensor, up: Tensor) -> Tensor:
        active = tape.op("Silu", gate.elements, gate.itemsize, [gate], saves=[gate])
        return tape.op("Mul", up.elements, up.itemsize, [active, up], saves=[active, up])

    def _gated(self, tape: Tape, x: Tensor, block: BlockParameters) -> Tensor:
        """silu(gate(x)) * up(x)."""
        gate = self._linear(tape, x, block["feed_forward.gate"], self.d_model)
        active = tape.op("Silu", gate.elements, gate.itemsize, [gate], saves=[gate])
        del gate
        up = self._linear(tape, x, block["feed_forward.up"], self.d_model)
        return tape.op("Mul", up.elements, up.itemsize, [active, up], saves=[active, up])

    def _add(self, tape: Tape, x: Tensor, branch: Tensor) -> Tensor:
        """The residual sum, in fp32 under autocast."""
        size = self.sizes.residual
        cast_from = branch.elements * branch.itemsize

        def casts(tape: Tape, gradient: Storage) -> Sequence[Storage]:
            return gradient, tape.storage(cast_from)

        backward = passes_twice if branch.itemsize == size else casts
        return tape.op("Add", x.elements, size, [x, branch], backward=backward)


_HOPPER_SHORT = 1024
"""The most queries for which backward does not use the kernels for Hopper (kernels/flash/configuration.py)."""
_EMBEDDING_SORTS_FROM = 3072
"""The most tokens that the embedding's backward on a GPU does not sort (aten/src/ATen/native/cuda/Embedding.cu)."""


# The transformer's step with the fused parts of kernels/parts/: what they keep and make, in symbolic tensors.
#
# A block keeps, in elements, with r = B S M and f = B S F (`symbolic_model.py` has what the reference keeps):
#
#     norm (twice)        x or the sum x + branch, which the residual stream is  1 r; B S in fp32 for 1 / rms
#     rope                nothing
#     SwiGLU              gate, up                                               2 f, and `down` keeps the product
#
# The loss keeps the gradients that it made: of its input, r, and of the head, V M. It has a chunk's logits at a time.
# Where all rows are one chunk and weights have 16 bits, it keeps its input and R V: backward makes the head's gradient.
#
# An operation with two results has one node. What comes back for the second result waits at a node of its own, since
# autograd runs backward of the operation when it has the gradients of both.


class FusedSymbolicModel(SymbolicModel):
    """A symbolic model of which some parts are fused, and the others as the textbook has them."""

    def __init__(self, workload: TextbookWorkload, device_type: str = "cuda") -> None:
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

        inputs, saved = [x, branch, weight], [total, roots]
        normal = tape.op("AddRmsNorm", elements, self.sizes.products, inputs, also_saves=saved, backward=backward)
        return tape.second_result(Tensor(total, elements, itemsize, normal.node), of_total), normal

    def _of_norm(self, elements: int, weight: Parameter) -> Callable[[Tape], Storage]:
        """Makes the gradient of a norm's weight: each program's share, and their sum."""
        shares = norm_programs(elements // self.d_model, self._device_type) * self.d_model * 4
        size = weight.bytes

        def gradient(tape: Tape) -> Storage:
            _shares = tape.storage(shares)
            return tape.storage(size)

        return gradient

    # ---- rope and SwiGLU

    def _rotated_heads(self, tape: Tape, x: Tensor, block: BlockParameters) -> tuple[Tensor, Tensor]:
        if "rope" not in self._fused_parts:
            return super()._rotated_heads(tape, x, block)
        q = self._project(tape, x, block["attention.query"])
        return self._rotated(tape, q, self._project(tape, x, block["attention.key"]))

    def _rotated(self, tape: Tape, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if "rope" not in self._fused_parts:
            return super()._rotated(tape, q, k)
        sizes = (q.elements * q.itemsize, k.elements * k.itemsize)
        of_keys: list[Storage] = []

        def backward(tape: Tape, _: Storage) -> Sequence[Storage]:
            of_q, of_k = tape.storage(sizes[0]), tape.storage(sizes[1])
            of_keys.clear()
            return of_q, of_k

        queries = tape.op("Rotate", q.elements, q.itemsize, [q, k], backward=backward)
        keys = Tensor(tape.storage(sizes[1]), k.elements, k.itemsize, queries.node)
        return queries, tape.second_result(keys, of_keys)

    def _gated(self, tape: Tape, x: Tensor, block: BlockParameters) -> Tensor:
        if "mlp" not in self._fused_parts:
            return super()._gated(tape, x, block)
        gate = self._linear(tape, x, block["feed_forward.gate"], self.d_model)
        return self._silu_product(tape, gate, self._linear(tape, x, block["feed_forward.up"], self.d_model))

    def _silu_product(self, tape: Tape, gate: Tensor, up: Tensor) -> Tensor:
        if "mlp" not in self._fused_parts:
            return super()._silu_product(tape, gate, up)
        both = 2 * up.elements * up.itemsize
        in_one: Backward | None = (lambda tape, _: (tape.storage(both),) * 2) if self.joint else None  # halves of rows
        return tape.op("SiluProduct", up.elements, up.itemsize, [gate, up], saves=[gate, up], backward=in_one)

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
        chunk, columns = loss_chunk_rows(rows, vocabulary, size, self.d_model), loss_columns(vocabulary)
        _losses = tape.storage(4 * rows)
        of_hidden = tape.storage(hidden.elements * size)
        tape.storage(rows)  # which rows count
        copied = weight.itemsize != size or columns != vocabulary
        _kernel = tape.storage(size * columns * self.d_model if copied else 0)
        in_16_bits = rows <= chunk and weight.itemsize == size == 2
        of_weight = None if in_16_bits else tape.storage(4 * columns * self.d_model)
        logits_made = tape.storage(chunk * columns * size)
        if self._device_type != "cuda" and size != 4 and not in_16_bits:
            # There the product of the head's gradient takes its factors in fp32.
            factors = [tape.storage(4 * chunk * each) for each in (columns, self.d_model)]
            del factors
        count, made = tape.storage(8), [of_hidden.bytes, weight.bytes]
        if in_16_bits:  # between both gradients the input times the gradient of the loss
            made = [of_hidden.bytes, of_hidden.bytes, 2 * columns * self.d_model]
        loss = tape.op(
            "LinearCrossEntropy", 1, 4, [hidden, weight], saves=[hidden] if in_16_bits else (),
            also_saves=[of_hidden, of_weight or logits_made, count],
            backward=lambda tape, _: [tape.storage(size) for size in made][:: len(made) - 1],
        )  # fmt: skip
        self._stream = None
        return loss


class CompiledSymbolicModel(SymbolicModel):
    """The symbolic model of a step under torch.compile: elementwise work is fused, and its intermediate results never
    reach memory.

    AOTAutograd's min-cut partitioner (torch/_functorch/partitioners.py) chooses what the compiled forward keeps. It
    keeps the inputs of matrix products and the results of reductions. The fused kernels of backward compute the
    elementwise rest again. The tensors named here are the outputs of the forward graph that it cuts, for PyTorch 2.11
    on an H200. In elements a block, with r = B S M, f = B S F and ss = B H S S:

        x before attention and before the feed-forward   2 r, in the dtype of the residual stream
        both norms' outputs                              2 r, in the dtype of the products, as all of the following
        queries, keys, values; attention's output        4 r
        scores and softmax, where attention is written out  2 ss
        gate, up, silu(gate) * up                        3 f
        under autocast, the copies of the weights
    """

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
            # Softmax overwrites the scores, and the next block reuses their buffer.
            if self._scores_buffer is None:
                self._scores_buffer = self._product(tape, self.scores, v, v)
            return self._product(tape, v.elements, self._scores_buffer, v)
        scores = self._product(tape, self.scores, q, k)
        maxima, sums = tape.storage(self.rows * scores.itemsize), tape.storage(self.rows * 4)
        saved = [maxima, sums]
        weights = tape.op(
            "Softmax", self.scores, scores.itemsize, [scores], saves=[scores], also_saves=saved, backward=passes
        )
        del saved
        return self._product(tape, v.elements, weights, v)

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
