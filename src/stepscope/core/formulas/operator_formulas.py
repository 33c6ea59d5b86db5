"""How an operator's FLOPs and bytes follow from the arguments of a call.

Bytes are the fewest: an argument is read once, however often the kernel reads it; a reduction's result, whose shape is
not recorded, is left out. Views are taken for dense, since strides are not recorded: a broadcast operand (expand) reads
less than counted. Whatever the record leaves open raises Unknown.
"""

import json
import math
import re
from typing import Literal, cast

import msgspec

from stepscope.core.formulas import (
    AttentionSizes,
    CausalConvention,
    Work,
    adamw_work,
    attention_flops,
    elementwise_work,
)

# One call of a framework operator: the shapes and dtypes of its arguments, and the values of those that are numbers.
#
# Kineto writes JSON ("Input Dims", "Input type"): `[[2048, 768], [768, 3072]]`, `["float", "c10::BFloat16"]`. Numbers
# are "Scalar" or, where PyTorch wraps them in a tensor, [] with a dtype; an argument left out is "". Lists of tensors
# have nested shapes and no dtype, and beyond 30 tensors no shapes either. The values ("Concrete Inputs", since PyTorch
# 2.1) are texts as Python writes them: `["", "[2, 2]", "False", "0.125"]`.


_LARGEST = 2**48
"""Elements of one tensor: more is no tensor but a broken file."""
_MOST_SIDES = 64
_WHOLE = re.compile(r"-?[0-9]{1,15}")

ELEMENT_BYTES: dict[str, int] = {
    "double": 8, "float": 4, "c10::BFloat16": 2, "c10::Half": 2, "at::BFloat16": 2, "at::Half": 2,
    "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1, "c10::Float8_e4m3fnuz": 1, "c10::Float8_e5m2fnuz": 1,
    "c10::Float8_e8m0fnu": 1, "c10::Float4_e2m1fn_x2": 1,
    "long int": 8, "long": 8, "long long": 8, "__int64": 8, "int": 4, "short": 2, "short int": 2,
    "long unsigned int": 8, "unsigned long": 8, "unsigned int": 4, "unsigned short": 2, "short unsigned int": 2,
    "signed char": 1, "unsigned char": 1, "bool": 1,
}  # fmt: skip
"""Bytes of an element by the name of its C++ type."""
COMPLEX_BYTES = {"c10::complex<float>": 8, "c10::complex<double>": 16, "c10::complex<c10::Half>": 4}
"""Complex elements, of which no rule but those of products knows the FLOPs."""

_INTEGERS = frozenset(
    name for name in ELEMENT_BYTES if name != "bool" and "::" not in name and name not in ("double", "float")
)
_NO_TENSOR = frozenset({"Scalar", "ScalarList", "GenericList", ""})

Value = bool | int | tuple[int, ...] | None
"""The value of an argument: a truth value, a whole number or several; None where it was not recorded."""


class Unknown(Exception):
    """The record does not say enough to count this call's work."""


class Operand(msgspec.Struct, frozen=True):
    """A tensor argument. `dtype` is None for those in lists, of which `element_bytes` may still be known."""

    shape: tuple[int, ...]
    dtype: str | None
    element_bytes: int | None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Raises Unknown where the element's size is not known."""
        return self.elements * self.size

    @property
    def size(self) -> int:
        """Bytes of an element. Raises Unknown."""
        if self.element_bytes is None:
            raise Unknown
        return self.element_bytes

    @property
    def is_floating(self) -> bool:
        return self.dtype not in _INTEGERS and self.dtype != "bool"


class TensorList(msgspec.Struct, frozen=True):
    """A list of tensors; `tensors` is None where their shapes were not recorded."""

    tensors: tuple[Operand, ...] | None


class OperatorCall(msgspec.Struct, frozen=True):
    """Arguments in order, None for numbers and for what was left out; `values` of numbers, where they were recorded."""

    operator: str
    arguments: tuple[Operand | TensorList | None, ...]
    values: tuple[Value, ...] = ()

    def optional(self, index: int | None) -> Operand | None:
        """The tensor at this place; None where there is none, or no place."""
        argument = self.arguments[index] if index is not None and index < len(self.arguments) else None
        if isinstance(argument, TensorList):
            raise Unknown
        return argument

    def tensor(self, index: int) -> Operand:
        """The tensor at this place. Raises Unknown where there is none."""
        argument = self.optional(index)
        if argument is None:
            raise Unknown
        return argument

    def tensors(self, index: int) -> tuple[Operand, ...]:
        """The list at this place. Raises Unknown where it was not recorded."""
        argument = self.arguments[index] if index < len(self.arguments) else None
        if not isinstance(argument, TensorList) or not argument.tensors:
            raise Unknown
        return argument.tensors

    def numbers(self, index: int) -> tuple[int, ...] | None:
        """The numbers of the list at this place, or None where they were not recorded."""
        value = self._value(index)
        return value if isinstance(value, tuple) else None

    def number(self, index: int) -> int | None:
        """The whole number at this place, or None where it was not recorded."""
        value = self._value(index)
        return value if type(value) is int else None

    def flag(self, index: int) -> bool | None:
        """The truth value at this place, or None where it was not recorded."""
        value = self._value(index)
        return value if isinstance(value, bool) else None

    def _value(self, index: int) -> Value:
        return self.values[index] if index < len(self.values) else None


def read_call(
    operator: str, shapes: str, dtypes: str | None, values: str | None = None, list_element_bytes: int | None = None
) -> OperatorCall | None:
    """The call, or None where the record cannot be read. `list_element_bytes`: of tensors in lists, if known.

    Without `dtypes` every argument with sides is a tensor of such elements, and one without sides a number. Values that
    cannot be read count as not recorded.
    """
    try:
        read_shapes = _list(shapes)
        if dtypes is None:
            read = [_shape(shape) for shape in read_shapes]
            tensors = [Operand(shape, None, list_element_bytes) if shape else None for shape in read]
            return OperatorCall(operator, tuple(tensors))
        read_dtypes = _list(dtypes)
        if len(read_shapes) != len(read_dtypes):
            return None
        arguments = [_argument(*pair, list_element_bytes) for pair in zip(read_shapes, read_dtypes, strict=True)]
    except Unknown:
        return None
    try:
        texts = _list(values or "[]")
    except Unknown:
        texts = []
    # Where there are more values or fewer, nobody knows which is whose.
    whole = len(texts) == len(arguments)
    return OperatorCall(operator, tuple(arguments), tuple(map(_value, texts)) if whole else ())


def _list(text: str) -> list[object]:
    """The items of a JSON list. Raises Unknown for all else."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        raise Unknown from None
    return _items(read)


def _items(value: object) -> list[object]:
    if not isinstance(value, list):
        raise Unknown
    return cast("list[object]", value)


def _argument(shape: object, dtype: object, list_element_bytes: int | None) -> Operand | TensorList | None:
    if not isinstance(dtype, str):
        raise Unknown
    if dtype in _NO_TENSOR:
        return None
    if dtype == "TensorList":
        shapes = [_shape(each) for each in _items(shape)]
        return TensorList(tuple(Operand(each, None, list_element_bytes) for each in shapes) if shapes else None)
    return Operand(_shape(shape), dtype, ELEMENT_BYTES.get(dtype) or COMPLEX_BYTES.get(dtype))


def _value(text: object) -> Value:
    """`False`, `12` or `[1, 1]`, as Python or JSON writes it; None for all else."""
    if isinstance(text, (bool, int, list)):
        text = json.dumps(text)
    if not isinstance(text, str):
        return None
    if text[:1] + text[-1:] != "[]":
        return _number(text)
    numbers = [_number(word.strip()) for word in text[1:-1].split(",") if word]
    whole = [int(number) for number in numbers if number is not None]
    return tuple(whole) if len(whole) == len(numbers) else None


def _number(word: str) -> bool | int | None:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    return int(word) if _WHOLE.fullmatch(word) else None


def _shape(value: object) -> tuple[int, ...]:
    sizes = [side for side in _items(value) if type(side) is int and 0 <= side < _LARGEST]
    if len(sizes) != len(_items(value)) or len(sizes) > _MOST_SIDES or math.prod(sizes) >= _LARGEST:
        raise Unknown
    return tuple(sizes)


def broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that these broadcast to, by NumPy's rule. Raises Unknown where they do not."""
    rank = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    result: list[int] = []
    for sizes in zip(*padded, strict=True):
        wide = {side for side in sizes if side != 1}
        if len(wide) > 1:
            raise Unknown
        result.append(wide.pop() if wide else 1)
    return tuple(result)


def promoted(tensors: list[Operand]) -> str:
    """The dtype of a pointwise result, by PyTorch's type promotion. Raises Unknown for dtypes not in the table.

    A tensor without dimensions changes the result only where it is of a higher kind (boolean, integer, floating). One
    of dtype double is taken for a number of Python's, which becomes fp32, the default.
    """
    if not tensors or any(tensor.dtype not in ELEMENT_BYTES for tensor in tensors):
        raise Unknown
    sized = [tensor for tensor in tensors if tensor.shape] or tensors
    kind = max(_kind(tensor) for tensor in tensors)
    if kind > max(_kind(tensor) for tensor in sized):
        number = promoted([tensor for tensor in tensors if not tensor.shape])
        return "float" if number == "double" else number
    dtypes = {str(tensor.dtype) for tensor in sized if _kind(tensor) == kind}
    if len(dtypes) > 1 and {ELEMENT_BYTES[dtype] for dtype in dtypes} == {2}:
        return "float"  # bf16 with fp16
    return max(dtypes, key=lambda dtype: ELEMENT_BYTES[dtype])


def _kind(tensor: Operand) -> int:
    return 2 if tensor.is_floating else 0 if tensor.dtype == "bool" else 1


# Pointwise. `operands` leading arguments are read, the result is written; names with a last underscore write the first.
def pointwise(call: OperatorCall, _: CausalConvention, *, flops: int, operands: int = 1, result: str = "") -> Work:
    """`result`: "bool", or "float" where integers give floating-point numbers; else by promotion."""
    arguments = call.arguments[:operands]
    tensors = [each for each in arguments if isinstance(each, Operand)]
    if not tensors or any(isinstance(each, TensorList) for each in arguments):
        raise Unknown
    in_place, floating = call.operator.endswith("_"), any(tensor.is_floating for tensor in tensors)
    if in_place:
        dtype = tensors[0].dtype
    elif result == "bool" or (result == "float" and not floating):
        dtype = result
    elif not floating and None in arguments:  # a number of unknown type beside integers may make the result floating
        raise Unknown
    elif call.operator.startswith("aten::where"):
        dtype = promoted(tensors[1:])  # the condition is no value
    else:
        dtype = promoted(tensors[:1] if call.operator.startswith("aten::masked_fill") else tensors)
    if dtype not in ELEMENT_BYTES:
        raise Unknown
    shape = broadcast([tensor.shape for tensor in tensors])
    if in_place and shape != tensors[0].shape:
        raise Unknown
    written = Operand(shape, dtype, ELEMENT_BYTES[dtype])
    # Beside tensors with dimensions, one without is a number that travels with the launch.
    read = sum(tensor.bytes for tensor in tensors if tensor.shape or not shape)
    counted = flops if written.is_floating or floating else 0
    return elementwise_work(written.elements, counted, bytes_read=read, bytes_written=written.bytes)


def fill(call: OperatorCall, _: CausalConvention) -> Work:
    return Work(flops=0, bytes_read=0, bytes_written=call.tensor(0).bytes)


def copy(call: OperatorCall, _: CausalConvention) -> Work:
    target, source = call.tensor(0), call.tensor(1)
    return Work(flops=0, bytes_read=source.bytes, bytes_written=target.bytes)


def dropout(call: OperatorCall, _: CausalConvention) -> Work:
    """A product with the mask and one with the scale; the mask is written, a byte an element."""
    x = call.tensor(0)
    return elementwise_work(x.elements, 2, bytes_read=x.bytes, bytes_written=x.bytes + x.elements)


# Along rows.
def elementwise(call: OperatorCall, _: CausalConvention, *, flops: int, operands: int = 1) -> Work:
    """`flops` for each element of the first tensor, which the result is like; so many leading tensors are read.

    Of embedding's backward that is a sum for each element of the gradient, and a row written for each index, as if all
    were different: the zeros of the other rows are written, and counted, by an operator of their own.
    """
    first, *others = (call.tensor(place) for place in range(operands))
    read = first.bytes + _bytes(*others)
    return elementwise_work(first.elements, flops, bytes_read=read, bytes_written=first.bytes)


def softmax_backward(call: OperatorCall, causal: CausalConvention) -> Work:
    """dx = y * (dy - sum(dy * y)): product, sum, subtraction, product. log-softmax: dx = dy - exp(y) * sum(dy)."""
    grad, y = call.tensor(0), call.tensor(1)
    if grad.shape != y.shape or grad.size != y.size:
        raise Unknown
    return elementwise(call, causal, flops=4, operands=2)


def reduction(call: OperatorCall, _: CausalConvention, *, flops: int) -> Work:
    """FLOPs for each element read. The result's shape is not recorded; its bytes, the fewer ones, are left out."""
    x, other = call.tensor(0), call.optional(1)
    if other is not None and other.shape:  # max and min of two tensors are pointwise
        raise Unknown
    counted = flops if x.is_floating else 0
    return elementwise_work(x.elements, counted, bytes_read=x.bytes, bytes_written=0)


def layer_norm(call: OperatorCall, _: CausalConvention) -> Work:
    """(x - mean) * rstd * w + b: sum; subtraction, square, sum; product; a product for w, a sum for b.

    Mean and rstd of each row are written too: eight bytes a row, left out.
    """
    x, weight, bias = call.tensor(0), call.optional(2), call.optional(3)
    flops = x.elements * (5 + (weight is not None) + (bias is not None))
    return Work(flops=flops, bytes_read=x.bytes + _bytes(weight, bias), bytes_written=x.bytes)


def layer_norm_backward(call: OperatorCall, _: CausalConvention) -> Work:
    """dx = rstd * (g - mean(g) - n * mean(g * n)), dw = sum(dy * n) and db = sum(dy), all taken to be wanted.

    n = (x - mean) * rstd takes two, the means three, dx four; with a weight, g = dy * w one and dw two; db one.
    grad_out, x, mean, rstd, w are read; dx, dw, db written.
    """
    grad, x, mean, rstd = (call.tensor(index) for index in (0, 1, 3, 4))
    weight, bias = call.optional(5), call.optional(6)
    flops = x.elements * (9 + 3 * (weight is not None) + (bias is not None))
    read = _bytes(grad, x, mean, rstd, weight)
    return Work(flops=flops, bytes_read=read, bytes_written=_bytes(x, weight, bias))


def rms_norm(call: OperatorCall, _: CausalConvention) -> Work:
    """x * rsqrt(mean(x^2)) * w (Zhang and Sennrich 2019): square, sum, product; a product for w."""
    x, weight = call.tensor(0), call.optional(2)
    flops = x.elements * (3 + (weight is not None))
    return Work(flops=flops, bytes_read=_bytes(x, weight), bytes_written=x.bytes)


def rms_norm_backward(call: OperatorCall, _: CausalConvention) -> Work:
    """dx = rms^-1 * (g - n * mean(g * n)); dw = sum(dy * n).

    n = x * rms^-1 takes one, the mean two, dx three; g = dy * w one and dw two where there is a weight.
    """
    grad, x, rms, weight = call.tensor(0), call.tensor(1), call.tensor(3), call.optional(4)
    flops = x.elements * (6 + 3 * (weight is not None))
    return Work(flops=flops, bytes_read=_bytes(grad, x, rms, weight), bytes_written=_bytes(x, weight))


def _bytes(*tensors: Operand | None) -> int:
    return sum(tensor.bytes for tensor in tensors if tensor is not None)


# Rows by number.
def rows(call: OperatorCall, _: CausalConvention, *, table: int = 0, index: int) -> Work:
    """Rows of a (rows, width) table; the dimension is not recorded and taken to be the first, as embeddings have it.

    A row named twice is read once: no more rows are read than the table has.
    """
    rows, numbers = call.tensor(table), call.tensor(index)
    if len(rows.shape) != 2:
        raise Unknown
    width = rows.shape[1] * rows.size
    read = min(numbers.elements, rows.shape[0]) * width
    return Work(flops=0, bytes_read=numbers.bytes + read, bytes_written=numbers.elements * width)


def gather(call: OperatorCall, _: CausalConvention) -> Work:
    numbers = call.tensor(2)
    size = numbers.elements * call.tensor(0).size
    return Work(flops=0, bytes_read=numbers.bytes + size, bytes_written=size)


def scatter(call: OperatorCall, _: CausalConvention, *, adds: bool) -> Work:
    """One element for each index, from a tensor or of one value; where it adds, the target's is read as well."""
    target, numbers, source = call.tensor(0), call.tensor(2), call.optional(3)
    if not call.operator.endswith("_"):
        raise Unknown  # the whole target is copied first, by the kernel or by an operator of its own
    size = numbers.elements * target.size
    read = numbers.bytes + (size if source is not None and source.shape else 0) + (size if adds else 0)
    return elementwise_work(numbers.elements, int(adds and target.is_floating), bytes_read=read, bytes_written=size)


def loss(call: OperatorCall, _: CausalConvention, *, backward: bool = False) -> Work:
    """Negative log-likelihood: for each row the target's logarithm is read and added up. Of its gradient one element a
    row is written; another operator writes the zeros around it."""
    logs, targets = call.tensor(int(backward)), call.tensor(1 + backward)
    rows = targets.elements * logs.size
    if backward:
        return Work(flops=0, bytes_read=targets.bytes, bytes_written=rows)
    return elementwise_work(targets.elements, 1, bytes_read=targets.bytes + rows, bytes_written=logs.size)


# Lists of tensors.
def foreach(
    call: OperatorCall, _: CausalConvention, *, flops: int = 0, reads: bool = True, writes: bool = True
) -> Work:
    """Every list is read; as much is written as the first has. Beyond 30 tensors lists are not recorded: Unknown."""
    lists = [call.tensors(place) for place, each in enumerate(call.arguments) if isinstance(each, TensorList)]
    if not lists:
        raise Unknown
    elements = sum(tensor.elements for tensor in lists[0])
    read = sum(_bytes(*tensors) for tensors in lists) if reads else 0
    return elementwise_work(elements, flops, bytes_read=read, bytes_written=_bytes(*lists[0]) if writes else 0)


def adamw(call: OperatorCall, _: CausalConvention) -> Work:
    parameters = call.tensors(0)
    return adamw_work(sum(tensor.elements for tensor in parameters), parameters[0].size)


# Matrix products, grouped ones among them, and convolutions: what multiplies, beside attention.
#
# A bias is read and its sum not counted, as in model FLOPs; beta is taken not to be 0. Rows that a grouped product
# leaves out, since its last offset ends before them, count as if they were multiplied: offsets are values of a tensor,
# which are not recorded.


def product(
    call: OperatorCall,
    _: CausalConvention,
    *,
    first: int = 0,
    bias: int | None = None,
    result_bytes: int | None = None,
    sums_batch: bool = False,
) -> Work:
    """(.., m, k) x (.., k, n); a vector is a matrix of one column, or row. `result_bytes`: of an element of the result,
    where it is not the operands'. `sums_batch`: whether the products of a batch are added up, as addbmm does."""
    a, b = call.tensor(first), call.tensor(first + 1)
    added = call.optional(bias)
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
        bytes_read=_bytes(a, b, added),
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
    return sum(each.bytes for each in call.arguments[2:] if isinstance(each, Operand) and each.element_bytes)


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
    a, b = call.tensor(0), call.tensor(1)
    if len(a.shape) not in (2, 3) or len(b.shape) not in (2, 3):
        raise Unknown
    (*groups, m, k), (*groups_b, k_of_b, n) = a.shape, b.shape
    if k != k_of_b or (groups and groups_b and groups != groups_b):
        raise Unknown
    batch = groups[0] if groups and groups_b else 1
    results = batch
    if not groups and not groups_b:
        # Offsets stand behind the scales, where there are any: the first tensor of int32.
        integers = (each for each in call.arguments[2:] if isinstance(each, Operand) and each.dtype == "int")
        offsets = next(integers, None) or call.tensor(2)
        results = offsets.elements
    return Work(
        flops=2 * batch * m * n * k * _products_an_element(a),
        bytes_read=a.bytes + b.bytes + _scales(call),
        bytes_written=results * m * n * a.size,
    )


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
    return Work(flops=flops, bytes_read=_bytes(*first, *second), bytes_written=written)


def linear(
    call: OperatorCall,
    _: CausalConvention,
    *,
    x: int = 0,
    weight: int = 1,
    bias: int | None = 2,
    weights_a_byte: int = 0,
) -> Work:
    """(.., k) x (n, k) transposed. `weights_a_byte`: of a packed weight, whose shape says its bytes alone."""
    rows, weights = call.tensor(x), call.tensor(weight)
    added = call.optional(bias)
    if not rows.shape or not rows.elements or (not weights_a_byte and len(weights.shape) != 2):
        raise Unknown
    k = rows.shape[-1]
    n, left = divmod(weights.bytes * weights_a_byte if weights_a_byte else weights.elements, k)
    if left or (not weights_a_byte and weights.shape[1] != k):
        raise Unknown
    places = rows.elements // k
    read = _bytes(rows, weights, added)
    return Work(flops=2 * places * k * n, bytes_read=read, bytes_written=places * n * rows.size)


def encoder(call: OperatorCall, _: CausalConvention, *, weights: tuple[int, ...], key: int = 0) -> Work:
    """Attention of (batch, rows, width), with its projections, in one operator, which calls the products of each.
    `weights`: the places of those of queries, keys and values together, and of each linear layer after them."""
    x, attended = call.tensor(0), call.tensor(key)
    joint, *others = (call.tensor(place) for place in weights)
    if len(x.shape) != 3 or len(attended.shape) != 3 or joint.elements != 3 * x.shape[2] ** 2:
        raise Unknown
    batch, rows, width = x.shape
    keys = attended.shape[1]
    sizes = AttentionSizes(batch=batch, heads=1, queries=rows, keys=keys, head_dim=width, value_dim=width)
    projections = width**2 * (rows + 2 * keys) + rows * sum(each.elements for each in others)
    return Work(
        flops=2 * batch * projections + attention_flops(sizes, "full"),
        bytes_read=x.bytes + (attended.bytes if key else 0) + joint.bytes + sum(each.bytes for each in others),
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
    read = sum(each.bytes for each in call.arguments if isinstance(each, Operand) and each.element_bytes)
    written = kept.shape[0] * columns * whole.size
    return Work(flops=2 * kept.elements * columns, bytes_read=read, bytes_written=written)


class Convolution(msgspec.Struct, frozen=True, kw_only=True):
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
        transposed = self.transposed if isinstance(self.transposed, bool) else call.flag(self.transposed)
        if transposed is None:
            raise Unknown
        channels, spatial = self._output(call, x.shape, weight.shape, transposed=transposed)
        places = x.shape[0] * math.prod(x.shape[2:] if transposed else spatial)
        return Work(
            flops=2 * places * weight.elements,
            bytes_read=x.bytes + weight.bytes,
            bytes_written=x.shape[0] * channels * math.prod(spatial) * x.size,
        )

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
            spatial = [
                (side + 2 * pad - reach) // step + 1
                for side, reach, pad, step in zip(x[2:], reaches, pads, strides, strict=True)
            ]
            channels = weight[0]
        else:
            more = call.numbers(self.output_padding) if self.output_padding is not None else None
            groups = 1 if self.groups is None else call.number(self.groups)
            if groups is None or weight[0] != x[1]:
                raise Unknown
            extras = _each_side(more or (0,), rank)
            spatial = [
                (side - 1) * step - 2 * pad + reach + extra
                for side, reach, pad, step, extra in zip(x[2:], reaches, pads, strides, extras, strict=True)
            ]
            channels = weight[1] * groups
        if min(spatial) < 1:
            raise Unknown
        return channels, tuple(spatial)


def _each_side(numbers: tuple[int, ...] | None, dimensions: int) -> tuple[int, ...]:
    if numbers is None or len(numbers) not in (1, dimensions):
        raise Unknown
    return numbers * dimensions if len(numbers) == 1 else numbers


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
    flops = 2 * over.shape[0] * math.prod(over.shape[2:]) * weight.elements
    return Work(
        flops=flops * (bool(of_input) + bool(of_weight)),
        bytes_read=grad.bytes + (weight.bytes if of_input else 0) + (x.bytes if of_weight else 0),
        bytes_written=(x.bytes if of_input else 0) + (weight.bytes if of_weight else 0),
    )


# Fused attention: which keys its queries see, and the FLOPs and bytes of forward and backward.


Sight = Literal["causal", "not causal", "masked", "assumed causal", "assumed not causal"]
"""Which keys a query sees. `masked`: those of a mask or bias, whose zeros are not recorded. `assumed`: the record does
not say. Attention of as many queries as keys is then taken for a decoder's, which is causal, and other attention for
not causal."""

_FROM_FIRST, _FROM_LAST = 1, 2
"""Types of causal mask of the memory-efficient kernel; 0 is none."""


class FusedAttention(msgspec.Struct, frozen=True, kw_only=True):
    """The places of an operator's arguments: an index each, None where the operator has no such argument.

    `query`: key and value come after it. `heads_at`: the dimension of the heads in (batch, .., .., head_dim). `causal`:
    of the flag; in another overload or release it may stand elsewhere, and the first place that holds a flag counts.
    `mask_type`: of a number in its stead, likewise. `bias`: of a mask or a bias. `window`: of the keys before a query
    that it sees, those after it come next; `one_window`: of both, with the query's own key. `lengths`: of the bounds of
    sequences that lie behind one another; `longest`: of the longest, of queries and then of keys. `elsewhere`: of
    tensors by which keys lie elsewhere, or are fewer, than the shape says. `from_last`: whether the last query sees the
    last key, and not the first the first, where there are more keys than queries. `out`, `sums`: of the output and its
    log-sum-exp; an operator with them is backward's.
    """

    query: int = 0
    heads_at: int = 1
    causal: tuple[int, ...] = ()
    mask_type: tuple[int, ...] = ()
    bias: int | None = None
    window: int | None = None
    one_window: int | None = None
    lengths: int | None = None
    longest: int | None = None
    elsewhere: tuple[int, ...] = ()
    from_last: bool = False
    out: int | None = None
    sums: int | None = None

    def work(self, call: OperatorCall, causal: CausalConvention) -> Work:
        """FLOPs of forward's two products or backward's five, and the fewest bytes.

        Counted `half`, FLOPs are those of the keys that are seen, of a causal square its half; where a mask hides some,
        the whole square, which the kernel computes. Counted `full`, the whole square in any case.
        """
        q, k, v = (call.tensor(self.query + i) for i in range(3))
        sizes = self._sizes(call, q, k, v)
        flops = attention_flops(sizes, "full", backward=self.out is not None)
        if causal == "half":
            flops = flops * self._seen_twice(call, sizes) // (2 * sizes.queries * sizes.keys)
        mask = call.optional(self.bias)
        operands = q.bytes + k.bytes + v.bytes
        read = operands + (mask.bytes if mask is not None and mask.shape else 0)
        if self.out is None or self.sums is None:
            # The log-sum-exp of each row, which not every backend writes, is left out: one number beside head_dim.
            return Work(flops=flops, bytes_read=read, bytes_written=q.elements // q.shape[-1] * v.shape[-1] * q.size)
        read += call.tensor(0).bytes + call.tensor(self.out).bytes + call.tensor(self.sums).bytes
        return Work(flops=flops, bytes_read=read, bytes_written=operands)

    def sight(self, call: OperatorCall) -> Sight:
        """Which keys a query sees, as far as the record says. Raises Unknown where the sizes are not known."""
        mask = call.optional(self.bias)
        masked = mask is not None and bool(mask.shape)
        if self.mask_type:
            kind = self._mask_type(call)
            causal = None if kind is None else kind in (_FROM_FIRST, _FROM_LAST)
        else:
            causal = next((flag for place in self.causal if (flag := call.flag(place)) is not None), None)
        if causal is not None:
            return "causal" if causal else "masked" if masked else "not causal"
        if masked:
            return "masked"
        sizes = self._sizes(call, *(call.tensor(self.query + i) for i in range(3)))
        return "assumed causal" if sizes.queries == sizes.keys else "assumed not causal"

    def _mask_type(self, call: OperatorCall) -> int | None:
        return next((value for place in self.mask_type if (value := call.number(place)) is not None), None)

    def _seen_twice(self, call: OperatorCall, sizes: AttentionSizes) -> int:
        """Twice the pairs of a query and a key that it sees: whole, though half of a causal square may be odd."""
        queries, keys = sizes.queries, sizes.keys
        causal = self.sight(call) in ("causal", "assumed causal")
        from_last = self.from_last or self._mask_type(call) == _FROM_LAST
        before, after = self._windows(call)
        if causal:
            after = 0
        if before is not None and before < max(queries, keys) - 1:
            return 2 * _in_band(queries, keys, before, after, keys - queries if from_last else 0)
        if not causal and after is not None and after < max(queries, keys) - 1:
            return 2 * _in_band(queries, keys, max(queries, keys), after, keys - queries if from_last else 0)
        if not causal or (from_last and queries == 1):
            return 2 * queries * keys
        if from_last:
            return 2 * queries * keys - queries**2 if queries <= keys else keys**2
        return queries**2 if queries <= keys else 2 * queries * keys - keys**2

    def _windows(self, call: OperatorCall) -> tuple[int | None, int | None]:
        """The keys before and after a query that it sees; None for all of them, which is recorded as -1 or nothing."""
        if self.one_window is not None:
            keys = call.number(self.one_window)
            return (keys - 1, keys - 1) if keys is not None and keys > 0 else (None, None)
        if self.window is None:
            return None, None
        before, after = call.number(self.window), call.number(self.window + 1)
        return None if before is None or before < 0 else before, None if after is None or after < 0 else after

    def _sizes(self, call: OperatorCall, q: Operand, k: Operand, v: Operand) -> AttentionSizes:
        """Keys and values may have fewer heads than queries, and values another width."""
        if any(call.optional(place) is not None for place in self.elsewhere):
            raise Unknown
        lengths = call.optional(self.lengths)
        if lengths is not None and lengths.elements:
            return self._packed(call, lengths, q, k, v)
        rows_at = 3 - self.heads_at
        if any(len(each.shape) != 4 or not each.elements for each in (q, k, v)):
            raise Unknown
        if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
            raise Unknown
        return AttentionSizes(
            batch=q.shape[0],
            heads=q.shape[self.heads_at],
            queries=q.shape[rows_at],
            keys=k.shape[rows_at],
            head_dim=q.shape[3],
            value_dim=v.shape[3],
        )

    def _packed(self, call: OperatorCall, lengths: Operand, q: Operand, k: Operand, v: Operand) -> AttentionSizes:
        """Sizes of sequences in one row, (total, heads, head_dim). Their bounds are values, which are not recorded: one
        sequence alone is known, and several that are as long as the longest."""
        (queries, heads, head_dim), (keys, _, k_dim), (values, _, value_dim) = map(_in_one_row, (q, k, v))
        count = lengths.elements - 1
        if len(lengths.shape) != 1 or count < 1:
            raise Unknown
        longest = (None, None)
        if self.longest is not None:
            longest = call.number(self.longest), call.number(self.longest + 1)
        alone = count == 1 and longest[0] in (None, queries) and longest[1] in (None, keys)
        even = None not in longest and (queries, keys) == (count * (longest[0] or 0), count * (longest[1] or 0))
        if keys != values or head_dim != k_dim or not (alone or even):
            raise Unknown
        return AttentionSizes(
            batch=count,
            heads=heads,
            queries=queries // count,
            keys=keys // count,
            head_dim=head_dim,
            value_dim=value_dim,
        )


def _in_one_row(tensor: Operand) -> tuple[int, int, int]:
    """(total, heads, head_dim), before which a batch of one may stand."""
    *batch, total, heads, head_dim = tensor.shape if len(tensor.shape) in (3, 4) else (0, 0, 0)
    if batch not in ([], [1]) or not tensor.elements or not total:
        raise Unknown
    return total, heads, head_dim


def _in_band(queries: int, keys: int, before: int, after: int | None, offset: int) -> int:
    """The pairs in which the key stands from `before` keys before query + offset to `after` after it."""
    reach = max(queries, keys) + abs(offset) if after is None else after

    def up_to(start: int) -> int:
        """The sum of max(0, min(i + start, keys)) over the queries i: how many keys lie before each one's limit."""
        return _rising(start + queries, keys) - _rising(start, keys)

    return up_to(offset + reach + 1) - up_to(offset - before)


def _rising(end: int, most: int) -> int:
    """The sum of min(i, most) over i from 0 to below end."""
    if end <= 0:
        return 0
    rising = min(end, most + 1)
    return rising * (rising - 1) // 2 + (end - rising) * most
