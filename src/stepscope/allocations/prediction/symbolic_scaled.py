"""A linear layer whose products take operands of 8 bits (training/scaled_products.py), in symbolic tensors.

It keeps its input as it came, in 16 bits. Each product's operands are there for the product alone: of n numbers each
has n bytes, and its scales. By tensor, kernels on a GPU make nothing else; they write both layouts of what comes back
at once, and forward keeps its two scales. PyTorch's operators, by row and on a CPU, have n numbers in fp32 besides
while they cast, and n bytes more where an operand is laid out anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from stepscope.allocations.prediction.symbolic_tensors import Node, Parameter, Storage, Tape, Tensor, passes
from stepscope.core.precisions import PRECISIONS, takes_scaled
from stepscope.core.workload import Workload

_SCALE = 4
"""Bytes of a scale."""


@dataclass(frozen=True, kw_only=True)
class ScaledProducts:
    """The products of a workload's linear layers."""

    by_row: bool
    on_gpu: bool
    itemsize: int
    """Bytes of an element that is cast, and of one of a product."""

    @classmethod
    def of(cls, workload: Workload, device_type: str) -> Self | None:
        """The scaled products of a workload; None where its products take no operands of 8 bits."""
        precision = PRECISIONS[workload.dtype]
        if not precision.scaled:
            return None
        return cls(by_row=precision.scaled == "row", on_gpu=device_type == "cuda", itemsize=precision.products)

    @property
    def _by_kernels(self) -> bool:
        return self.on_gpu and not self.by_row

    def take(self, weight: Parameter, in_features: int) -> bool:
        """Whether the products of a linear layer with this weight are among them."""
        return takes_scaled(in_features, weight.elements // in_features)

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
            for_x = self._made(tape, rows, in_features)
            del along, turned
            _turned = tape.storage(rows * in_features)
            for_weight = self._made(tape, out_features, in_features)
            del across
            return for_x, for_weight

        # The weight's gradient is passed on before that of x, which is given the shape of x first.
        x = tape.alias("View", x, passes)
        if isinstance(x.node, Node):
            x.node.gives_views = True
        if self._by_kernels:
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
        return self._made(tape, rows, columns)

    def _made(self, tape: Tape, rows: int, columns: int) -> Storage:
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
            # (recording/scaled_mm.py).
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
