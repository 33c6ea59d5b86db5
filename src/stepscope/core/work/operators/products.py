"""Matrix products, grouped ones among them, and convolutions: what multiplies, beside attention.

A bias is read and its sum not counted, as in model FLOPs; beta is taken not to be 0. Rows that a grouped product leaves
out, since its last offset ends before them, count as if they were multiplied: offsets are values of a tensor, which are
not recorded.
"""

import math
from dataclasses import dataclass

from stepscope.core.work import CausalConvention, Work, operations
from stepscope.core.work.operations import AttentionSizes
from stepscope.core.work.operators.calls import COMPLEX_BYTES, Operand, OperatorCall, Unknown


def product(
    call: OperatorCall, _: CausalConvention, *, first: int = 0, bias: int | None = None,
    result_bytes: int | None = None, sums_batch: bool = False,
) -> Work:  # fmt: skip
    """(.., m, k) x (.., k, n); a vector is a matrix of one column, or row. `result_bytes`: of an element of the result,
    where it is not the operands'. `sums_batch`: whether the products of a batch are added up, as addbmm does."""
    a, b = call.tensor(first), call.tensor(first + 1)
    added = call.optional(bias) if bias is not None else None
    if not a.shape or not b.shape or len(a.shape) > 3 or len(b.shape) > 3:
        raise Unknown
    a_shape = a.shape if len(a.shape) > 1 else (1, *a.shape)
    b_shape = b.shape if len(b.shape) > 1 else (*b.shape, 1)
    (*batch, m, k), (*batch_b, k_of_b, n) = a_shape, b_shape
    if k != k_of_b or batch != batch_b or a.size != b.size:
        raise Unknown
    results = m * n * (1 if sums_batch or not batch else batch[0])
    return Work(
        flops=2 * math.prod(batch) * m * n * k * _products_an_element(a),
        bytes_read=a.bytes + b.bytes + (added.bytes if added else 0),
        bytes_written=results * (result_bytes or a.size),
    )


def outer_product(call: OperatorCall, _: CausalConvention) -> Work:
    """A matrix (m, n) and the product of two vectors, a multiply and an add for each element."""
    added, a, b = (call.tensor(place) for place in range(3))
    if len(a.shape) != 1 or len(b.shape) != 1:
        raise Unknown
    results = a.elements * b.elements
    flops = 2 * results * _products_an_element(a)
    return Work(flops=flops, bytes_read=added.bytes + a.bytes + b.bytes, bytes_written=results * a.size)


def scaled_product(call: OperatorCall, causal: CausalConvention) -> Work:
    """The result's dtype is not recorded: one byte an element, as the operands have, is the fewest."""
    work = product(call, causal)
    return work + Work(flops=0, bytes_read=_scales(call), bytes_written=0)


def _scales(call: OperatorCall) -> int:
    """Bytes of the tensors after the two operands; scales in lists, whose dtype is not recorded, are left out."""
    return sum(found.bytes for found in call.arguments[2:] if isinstance(found, Operand) and found.element_bytes)


def _products_an_element(operand: Operand) -> int:
    """Two numbers of four bits share an element; a product of complex numbers is four, with as many sums."""
    return 2 if operand.dtype == "c10::Float4_e2m1fn_x2" else 4 if operand.dtype in COMPLEX_BYTES else 1


def grouped_product(call: OperatorCall, _: CausalConvention) -> Work:
    """Products of groups, a mixture's experts: whichever of rows, columns and depth the offsets divide among them, a
    multiply and an add for each row, column and depth that the two shapes have. Only where both have a dimension for
    the groups is each group's product whole.

    (m, k) x (g, k, n): rows are divided. (g, m, k) x (k, n): columns. (m, k) x (k, n): depth, and each group has a
    result. (g, m, k) x (g, k, n): nothing.
    """
    a, b, offsets = call.tensor(0), call.tensor(1), call.optional(_first_integers(call))
    (*groups, m, k), (*groups_b, k_of_b, n) = _matrices(a), _matrices(b)
    if k != k_of_b or (groups and groups_b and groups != groups_b):
        raise Unknown
    batch = groups[0] if groups and groups_b else 1
    results = batch
    if not groups and not groups_b:
        if offsets is None:
            raise Unknown
        results = offsets.elements
    return Work(
        flops=2 * batch * m * n * k * _products_an_element(a),
        bytes_read=a.bytes + b.bytes + _scales(call),
        bytes_written=results * m * n * a.size,
    )


def _matrices(operand: Operand) -> tuple[int, ...]:
    if len(operand.shape) not in (2, 3):
        raise Unknown
    return operand.shape


def _first_integers(call: OperatorCall) -> int:
    """The place of the offsets, which stand behind the scales where there are any: the first tensor of int32."""
    places = range(2, len(call.arguments))
    return next((at for at in places if isinstance(found := call.arguments[at], Operand) and found.dtype == "int"), 2)


def products_of_lists(call: OperatorCall, _: CausalConvention) -> Work:
    """One product for each pair of two lists."""
    first, second = call.tensors(0), call.tensors(1)
    if len(first) != len(second):
        raise Unknown
    flops = written = 0
    for a, b in zip(first, second, strict=True):
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
            raise Unknown
        flops += 2 * a.elements * b.shape[1]
        written += a.shape[0] * b.shape[1] * a.size
    return Work(flops=flops, bytes_read=sum(found.bytes for found in (*first, *second)), bytes_written=written)


def linear(
    call: OperatorCall, _: CausalConvention, *, x: int = 0, weight: int = 1, bias: int | None = 2,
    weights_a_byte: int = 0,
) -> Work:  # fmt: skip
    """(.., k) x (n, k) transposed. `weights_a_byte`: of a packed weight, whose shape says its bytes alone."""
    rows, weights = call.tensor(x), call.tensor(weight)
    added = call.optional(bias) if bias is not None else None
    if not rows.shape or not rows.elements or (not weights_a_byte and len(weights.shape) != 2):
        raise Unknown
    k = rows.shape[-1]
    n, left = divmod(weights.bytes * weights_a_byte if weights_a_byte else weights.elements, k)
    if left or (not weights_a_byte and weights.shape[1] != k):
        raise Unknown
    places = rows.elements // k
    read = rows.bytes + weights.bytes + (added.bytes if added else 0)
    return Work(flops=2 * places * k * n, bytes_read=read, bytes_written=places * n * rows.size)


def encoder(call: OperatorCall, _: CausalConvention, *, weights: tuple[int, ...], key: int = 0) -> Work:
    """Attention of (batch, rows, width), with its projections, in one operator, which calls the products of each.
    `weights`: the places of those of queries, keys and values together, and of each linear layer after them."""
    x, seen = call.tensor(0), call.tensor(key)
    joint, *others = (call.tensor(place) for place in weights)
    if len(x.shape) != 3 or len(seen.shape) != 3 or joint.elements != 3 * x.shape[2] ** 2:
        raise Unknown
    batch, rows, width = x.shape
    keys = seen.shape[1]
    sizes = AttentionSizes(batch=batch, heads=1, queries=rows, keys=keys, head_dim=width, value_dim=width)
    projections = width**2 * (rows + 2 * keys) + rows * sum(each.elements for each in others)
    return Work(
        flops=2 * batch * projections + operations.attention_flops(sizes, "full"),
        bytes_read=x.bytes + (seen.bytes if key else 0) + joint.bytes + sum(each.bytes for each in others),
        bytes_written=x.bytes,
    )


def linear_backward(call: OperatorCall, _: CausalConvention, *, grad: int, weight: int, other: int | None) -> Work:
    """One gradient of a linear layer: of its input, or with `other`, that input, of its weight."""
    of_output, weights = call.tensor(grad), call.tensor(weight)
    if len(weights.shape) != 2 or not of_output.shape or of_output.shape[-1] != weights.shape[0]:
        raise Unknown
    flops = 2 * of_output.elements * weights.shape[1]
    of_input = of_output.elements // max(weights.shape[0], 1) * weights.shape[1] * of_output.size
    if other is None:
        return Work(flops=flops, bytes_read=of_output.bytes + weights.bytes, bytes_written=of_input)
    read = of_output.bytes + call.tensor(other).bytes
    return Work(flops=flops, bytes_read=read, bytes_written=weights.bytes)


def sparse_product(call: OperatorCall, _: CausalConvention, *, sparse: int, dense: int, transposed: bool) -> Work:
    """A matrix of which two of four numbers are kept, (m, k / 2), by a dense one (k, n), or transposed (.., k): a
    multiply and an add for each number that is kept."""
    kept, whole = call.tensor(sparse), call.tensor(dense)
    if len(kept.shape) != 2 or len(whole.shape) < 2 or not whole.elements:
        raise Unknown
    depth = whole.shape[-1] if transposed else whole.shape[0]
    if depth != 2 * kept.shape[1] or (not transposed and len(whole.shape) != 2):
        raise Unknown
    columns = whole.elements // depth
    read = sum(found.bytes for found in call.arguments if isinstance(found, Operand) and found.element_bytes)
    written = kept.shape[0] * columns * whole.size
    return Work(flops=2 * kept.elements * columns, bytes_read=read, bytes_written=written)


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """The places of a convolution's arguments: an index each, None where the operator has no such argument.

    `transposed`: of the flag, or whether the operator always is. Without the lists `stride`, `padding` and, where there
    is one, `dilation`, the output's sides are not known.
    """

    stride: int
    padding: int
    dilation: int | None = None
    transposed: int | bool = False
    output_padding: int | None = None
    groups: int | None = None

    def work(self, call: OperatorCall, _: CausalConvention) -> Work:
        """A multiply and an add for each element of the weight at each of the output's places, or, transposed, the
        input's. Groups have smaller weights, and so fewer FLOPs."""
        x, weight = call.tensor(0), call.tensor(1)
        transposed = self._is_transposed(call)
        channels, sides = self._output(call, x.shape, weight.shape, transposed=transposed)
        places = x.shape[0] * math.prod(x.shape[2:] if transposed else sides)
        return Work(
            flops=operations.convolution_flops(places, weight.elements),
            bytes_read=x.bytes + weight.bytes,
            bytes_written=x.shape[0] * channels * math.prod(sides) * x.size,
        )

    def _is_transposed(self, call: OperatorCall) -> bool:
        if isinstance(self.transposed, bool):
            return self.transposed
        found = call.flag(self.transposed)
        if found is None:
            raise Unknown
        return found

    def _output(
        self, call: OperatorCall, x: tuple[int, ...], weight: tuple[int, ...], *, transposed: bool
    ) -> tuple[int, tuple[int, ...]]:
        """The output's channels and sides. A transposed weight is (input channels, output channels of a group, ..)."""
        rank = len(x) - 2
        if rank < 1 or len(weight) != len(x):
            raise Unknown
        strides, pads = (_each_side(call.numbers(place), rank) for place in (self.stride, self.padding))
        gaps = _each_side(call.numbers(self.dilation), rank) if self.dilation is not None else (1,) * rank
        if min(*strides, *gaps) < 1 or min(pads) < 0:
            raise Unknown
        reaches = [gap * (side - 1) + 1 for gap, side in zip(gaps, weight[2:], strict=True)]
        if not transposed:
            sides = [
                (side + 2 * pad - reach) // step + 1
                for side, reach, pad, step in zip(x[2:], reaches, pads, strides, strict=True)
            ]
            channels = weight[0]
        else:
            more = call.numbers(self.output_padding) if self.output_padding is not None else None
            groups = 1 if self.groups is None else call.number(self.groups)
            if groups is None or weight[0] != x[1]:
                raise Unknown
            sides = [
                (side - 1) * step - 2 * pad + reach + extra
                for side, reach, pad, step, extra in zip(
                    x[2:], reaches, pads, strides, _each_side(more or (0,), rank), strict=True
                )
            ]
            channels = weight[1] * groups
        if min(sides) < 1:
            raise Unknown
        return channels, tuple(sides)


def _each_side(numbers: tuple[int, ...] | None, sides: int) -> tuple[int, ...]:
    if numbers is None or len(numbers) not in (1, sides):
        raise Unknown
    return numbers * sides if len(numbers) == 1 else numbers


def convolution_backward(
    call: OperatorCall, _: CausalConvention, *, transposed: int | bool = 7, wanted: int = 10
) -> Work:
    """A convolution's FLOPs for each gradient, of input and weight, that is wanted; both where that was not recorded.

    The bias's gradient, a sum, is not counted. Where it was not recorded whether the convolution is transposed, its
    channels say it, unless all are alike.
    """
    grad, x, weight = (call.tensor(index) for index in (0, 1, 2))
    if len(x.shape) < 3 or len(weight.shape) != len(x.shape) or len(grad.shape) != len(x.shape):
        raise Unknown
    of_input, of_weight = (*(call.numbers(wanted) or ()), 1, 1)[:2]
    turned = transposed if isinstance(transposed, bool) else call.flag(transposed)
    if turned is None and x.shape[1] == grad.shape[1] and x.shape[2:] != grad.shape[2:]:
        raise Unknown
    if turned is None:
        turned = weight.shape[0] != grad.shape[1]
    over = x if turned else grad
    if over.shape[0] != x.shape[0] or weight.shape[0] != (x if turned else grad).shape[1]:
        raise Unknown
    flops = operations.convolution_flops(over.shape[0] * math.prod(over.shape[2:]), weight.elements)
    return Work(
        flops=flops * (bool(of_input) + bool(of_weight)),
        bytes_read=grad.bytes + (weight.bytes if of_input else 0) + (x.bytes if of_weight else 0),
        bytes_written=(x.bytes if of_input else 0) + (weight.bytes if of_weight else 0),
    )
