"""How an operator's FLOPs and bytes follow from the arguments of a call.

Bytes are the fewest: an argument is read once, however often the kernel reads it; a reduction's result, whose shape is
not recorded, is left out. Views are taken for dense, since strides are not recorded: a broadcast operand (expand) reads
less than counted. Whatever the record leaves open raises Unknown.
"""

from stepscope.core.work import CausalConvention, Work, operations
from stepscope.core.work.operations import elementwise_work
from stepscope.core.work.operators.calls import (
    ELEMENT_BYTES,
    Operand,
    OperatorCall,
    TensorList,
    Unknown,
    broadcast,
    promoted,
)


# Pointwise. `operands` leading arguments are read, the result is written; names with a last underscore write the first.
def pointwise(call: OperatorCall, _: CausalConvention, *, flops: int, operands: int = 1, result: str = "") -> Work:
    """`result`: "bool", or "float" where integers give floating-point numbers; else by promotion."""
    given = call.arguments[:operands]
    tensors = [found for found in given if isinstance(found, Operand)]
    if not tensors or any(isinstance(found, TensorList) for found in given):
        raise Unknown
    in_place = call.operator.endswith("_")
    dtype = tensors[0].dtype if in_place else _result_dtype(call, given, tensors, result)
    if dtype not in ELEMENT_BYTES:
        raise Unknown
    shape = broadcast([found.shape for found in tensors])
    if in_place and shape != tensors[0].shape:
        raise Unknown
    written = Operand(shape, dtype, ELEMENT_BYTES[dtype])
    # Beside tensors with dimensions, one without is a number that travels with the launch.
    read = sum(found.bytes for found in tensors if found.shape or not shape)
    counted = flops if written.is_floating or any(found.is_floating for found in tensors) else 0
    return elementwise_work(
        written.elements, counted, bytes_read=read, bytes_written=written.bytes,
    )  # fmt: skip


def _result_dtype(call: OperatorCall, given: tuple[object, ...], tensors: list[Operand], result: str) -> str:
    if result == "bool":
        return "bool"
    floating = any(found.is_floating for found in tensors)
    if not floating and result == "float":
        return "float"
    if not floating and None in given:  # a number of unknown type beside integers may make the result floating
        raise Unknown
    values = tensors
    if call.operator.startswith("aten::where"):
        values = tensors[1:]  # the condition is no value
    elif call.operator.startswith("aten::masked_fill"):
        values = tensors[:1]
    return promoted(values)


def fill(call: OperatorCall, _: CausalConvention) -> Work:
    return Work(flops=0, bytes_read=0, bytes_written=call.tensor(0).bytes)


def copy(call: OperatorCall, _: CausalConvention) -> Work:
    target, source = call.tensor(0), call.tensor(1)
    return Work(flops=0, bytes_read=source.bytes, bytes_written=target.bytes)


def dropout(call: OperatorCall, _: CausalConvention) -> Work:
    """A product with the mask and one with the scale; the mask is written, a byte an element."""
    x = call.tensor(0)
    return elementwise_work(x.elements, 2, bytes_read=x.bytes, bytes_written=x.bytes + x.elements)


def dropout_backward(call: OperatorCall, _: CausalConvention) -> Work:
    grad, mask = call.tensor(0), call.tensor(1)
    return elementwise_work(grad.elements, 2, bytes_read=grad.bytes + mask.bytes, bytes_written=grad.bytes)


# Along rows.
def softmax_work(call: OperatorCall, _: CausalConvention) -> Work:
    x = call.tensor(0)
    return operations.softmax_work(x.elements, x.size)


def softmax_backward(call: OperatorCall, _: CausalConvention) -> Work:
    grad, y = call.tensor(0), call.tensor(1)
    if grad.shape != y.shape or grad.size != y.size:
        raise Unknown
    return operations.softmax_backward_work(y.elements, y.size)


def reduction(call: OperatorCall, _: CausalConvention, *, flops: int) -> Work:
    """FLOPs for each element read. The result's shape is not recorded; its bytes, the fewer ones, are left out."""
    x, other = call.tensor(0), call.optional(1)
    if other is not None and other.shape:  # max and min of two tensors are pointwise
        raise Unknown
    counted = flops if x.is_floating else 0
    return elementwise_work(x.elements, counted, bytes_read=x.bytes, bytes_written=0)


def layer_norm(call: OperatorCall, _: CausalConvention) -> Work:
    """Mean and rstd of each row are written too: eight bytes a row, left out."""
    x, weight, bias = call.tensor(0), call.optional(2), call.optional(3)
    flops = operations.layer_norm_flops(x.elements, weight=weight is not None, bias=bias is not None)
    return Work(flops=flops, bytes_read=x.bytes + _bytes(weight, bias), bytes_written=x.bytes)


def layer_norm_backward(call: OperatorCall, _: CausalConvention) -> Work:
    """All gradients are taken to be wanted: grad_out, x, mean, rstd, w are read; dx, dw, db written."""
    grad, x, mean, rstd = (call.tensor(index) for index in (0, 1, 3, 4))
    weight, bias = call.optional(5), call.optional(6)
    flops = operations.layer_norm_backward_flops(x.elements, weight=weight is not None, bias=bias is not None)
    read = grad.bytes + x.bytes + mean.bytes + rstd.bytes + _bytes(weight)
    return Work(flops=flops, bytes_read=read, bytes_written=x.bytes + _bytes(weight, bias))


def rms_norm(call: OperatorCall, _: CausalConvention) -> Work:
    x, weight = call.tensor(0), call.optional(2)
    flops = operations.rms_norm_flops(x.elements, weight=weight is not None)
    return Work(flops=flops, bytes_read=x.bytes + _bytes(weight), bytes_written=x.bytes)


def rms_norm_backward(call: OperatorCall, _: CausalConvention) -> Work:
    grad, x, rms, weight = call.tensor(0), call.tensor(1), call.tensor(3), call.optional(4)
    flops = operations.rms_norm_backward_flops(x.elements, weight=weight is not None)
    read = grad.bytes + x.bytes + rms.bytes + _bytes(weight)
    return Work(flops=flops, bytes_read=read, bytes_written=x.bytes + _bytes(weight))


def _bytes(*tensors: Operand | None) -> int:
    return sum(found.bytes for found in tensors if found is not None)


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


def rows_backward(call: OperatorCall, _: CausalConvention) -> Work:
    """A sum for each element of the gradient; a row written for each index, as if all were different.

    The zeros of the other rows are written, and counted, by an operator of their own.
    """
    grad, numbers = call.tensor(0), call.tensor(1)
    return elementwise_work(
        grad.elements, 1, bytes_read=grad.bytes + numbers.bytes, bytes_written=grad.bytes,
    )  # fmt: skip


def gather_work(call: OperatorCall, _: CausalConvention) -> Work:
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


def loss(call: OperatorCall, _: CausalConvention) -> Work:
    """Negative log-likelihood: for each row the target's logarithm is read and added up."""
    logs, targets = call.tensor(0), call.tensor(1)
    read = targets.bytes + targets.elements * logs.size
    return elementwise_work(targets.elements, 1, bytes_read=read, bytes_written=logs.size)


def loss_backward(call: OperatorCall, _: CausalConvention) -> Work:
    """Gradient of the loss: one element per row is written; another operator writes the zeros around it."""
    logs, targets = call.tensor(1), call.tensor(2)
    return Work(flops=0, bytes_read=targets.bytes, bytes_written=targets.elements * logs.size)


# Lists of tensors.
def concatenation(call: OperatorCall, _: CausalConvention) -> Work:
    return operations.copy_work(sum(found.bytes for found in call.tensors(0)))


def foreach(call: OperatorCall, _: CausalConvention, *, flops: int, writes: bool = True) -> Work:
    """Every list is read; as much is written as the first has. Beyond 30 tensors lists are not recorded: Unknown."""
    lists = [call.tensors(i) for i, given in enumerate(call.arguments) if isinstance(given, TensorList)]
    if not lists:
        raise Unknown
    elements = sum(found.elements for found in lists[0])
    read = sum(found.bytes for each in lists for found in each)
    written = sum(found.bytes for found in lists[0]) if writes else 0
    return elementwise_work(elements, flops, bytes_read=read, bytes_written=written)


def foreach_zero(call: OperatorCall, _: CausalConvention) -> Work:
    return Work(flops=0, bytes_read=0, bytes_written=sum(found.bytes for found in call.tensors(0)))


def adamw(call: OperatorCall, _: CausalConvention) -> Work:
    parameters = call.tensors(0)
    return operations.adamw_work(sum(found.elements for found in parameters), parameters[0].size)
