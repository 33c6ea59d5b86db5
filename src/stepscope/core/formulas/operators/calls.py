"""One call of a framework operator: the shapes and dtypes of its arguments, and the values of those that are numbers.

Kineto writes JSON ("Input Dims", "Input type"): `[[2048, 768], [768, 3072]]`, `["float", "c10::BFloat16"]`. Numbers
are "Scalar" or, where PyTorch wraps them in a tensor, [] with a dtype; an argument left out is "". Lists of tensors
have nested shapes and no dtype, and beyond 30 tensors no shapes either. The values ("Concrete Inputs", since PyTorch
2.1) are texts as Python writes them: `["", "[2, 2]", "False", "0.125"]`.
"""

import json
import math
import re
from dataclasses import dataclass
from typing import cast

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


@dataclass(frozen=True, slots=True)
class Operand:
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


@dataclass(frozen=True, slots=True)
class TensorList:
    """A list of tensors; `tensors` is None where their shapes were not recorded."""

    tensors: tuple[Operand, ...] | None


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """Arguments in order, None for numbers and for what was left out; `values` of numbers, where they were recorded."""

    operator: str
    arguments: tuple[Operand | TensorList | None, ...]
    values: tuple[Value, ...] = ()

    def optional(self, index: int) -> Operand | None:
        """The tensor at this place, or None where none was given."""
        found = self.arguments[index] if index < len(self.arguments) else None
        if isinstance(found, TensorList):
            raise Unknown
        return found

    def tensor(self, index: int) -> Operand:
        """The tensor at this place. Raises Unknown where there is none."""
        found = self.optional(index)
        if found is None:
            raise Unknown
        return found

    def tensors(self, index: int) -> tuple[Operand, ...]:
        """The list at this place. Raises Unknown where it was not recorded."""
        found = self.arguments[index] if index < len(self.arguments) else None
        if not isinstance(found, TensorList) or not found.tensors:
            raise Unknown
        return found.tensors

    def numbers(self, index: int) -> tuple[int, ...] | None:
        """The numbers of the list at this place, or None where they were not recorded."""
        found = self._value(index)
        return found if isinstance(found, tuple) else None

    def number(self, index: int) -> int | None:
        """The whole number at this place, or None where it was not recorded."""
        found = self._value(index)
        return found if type(found) is int else None

    def flag(self, index: int) -> bool | None:
        """The truth value at this place, or None where it was not recorded."""
        found = self._value(index)
        return found if isinstance(found, bool) else None

    def _value(self, index: int) -> Value:
        return self.values[index] if index < len(self.values) else None


def read_call(
    operator: str,
    shapes: str,
    dtypes: str | None,
    values: str | None = None,
    list_element_bytes: int | None = None,
) -> OperatorCall | None:
    """The call, or None where the record cannot be read. `list_element_bytes`: of tensors in lists, if known.

    Without `dtypes` every argument with sides is a tensor of such elements, and one without sides a number. Values that
    cannot be read count as not recorded.
    """
    try:
        read_shapes = _list(shapes)
        if dtypes is None:
            sides = [_shape(shape) for shape in read_shapes]
            tensors = [Operand(shape, None, list_element_bytes) if shape else None for shape in sides]
            return OperatorCall(operator, tuple(tensors))
        read_dtypes = _list(dtypes)
        if len(read_shapes) != len(read_dtypes):
            return None
        arguments = [_argument(*pair, list_element_bytes) for pair in zip(read_shapes, read_dtypes, strict=True)]
    except Unknown:
        return None
    return OperatorCall(operator, tuple(arguments), _values(values, len(arguments)))


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


def _values(text: str | None, arguments: int) -> tuple[Value, ...]:
    """The values of so many arguments; none where there are more or fewer, since nobody knows which is whose."""
    try:
        read = _list(text or "[]")
    except Unknown:
        return ()
    return tuple(map(_value, read)) if len(read) == arguments else ()


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
    sides = [side for side in _items(value) if type(side) is int and 0 <= side < _LARGEST]
    if len(sides) != len(_items(value)) or len(sides) > _MOST_SIDES or math.prod(sides) >= _LARGEST:
        raise Unknown
    return tuple(sides)


def broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that these broadcast to, by NumPy's rule. Raises Unknown where they do not."""
    rank = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    result: list[int] = []
    for sides in zip(*padded, strict=True):
        wide = {side for side in sides if side != 1}
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
