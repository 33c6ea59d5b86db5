"""One record for each precision of a step (`--dtype`): what is kept in how many bytes, and what is multiplied.

To add a precision, write its record, and how a model is brought to it (`training/training_step.py`).
"""

import math
from fractions import Fraction
from typing import Literal

import msgspec
from msgspec.structs import replace

from stepscope.core.errors import InputError, choose

Dtype = Literal["fp32", "tf32", "bf16", "fp16", "bf16-pure", "bf16-master", "fp8", "fp8-row"]
"""fp32: true fp32 everywhere. tf32: fp32 storage, products on TF32 Tensor Cores. bf16, fp16: autocast over fp32
parameters (fp16 with gradient scaling). bf16-pure: parameters, gradients and optimizer state in bf16. bf16-master:
weights and their gradients in bf16, written by the optimizer from master weights in fp32; norms, optimizer state and
loss in fp32. fp8, fp8-row: as bf16-master, and the products of the blocks' linear layers take operands of 8 bits,
scaled by tensor or by row."""


class Precision(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of an element, by the kind of tensor, and what products take."""

    weights: int
    """Of a parameter of two dimensions or more, and of its gradient."""
    vectors: int
    """Of any other parameter, as a norm's, and of its gradient."""
    buffers: int
    """Of a buffer of the model, as the angles of RoPE."""
    moments: int
    """Of each of AdamW's two moments, where the optimizer does not say another."""
    masters: int = 0
    """Of the master copy of a weight; 0 where there is none."""
    residual: int
    """Of the residual stream."""
    products: int
    """Of the inputs and outputs of matrix products."""
    tensors: Literal["fp32", "bf16", "fp16"]
    """The dtype of the tensors that matrix products and attention take."""
    multiplies: Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
    """The rate of matrix products: a column of a device's datasheet."""
    scaled: Literal["", "tensor", "row"] = ""
    """By what operands of 8 bits are scaled; empty where products take none."""
    autocast: bool = False
    """Whether torch.autocast casts the inputs of products."""


_FULL = Precision(weights=4, vectors=4, buffers=4, moments=4, residual=4, products=4, tensors="fp32", multiplies="fp32")
_MASTERS = Precision(
    weights=2, vectors=4, buffers=4, moments=4, masters=4, residual=2, products=2, tensors="bf16", multiplies="bf16",
    autocast=True,
)  # fmt: skip

PRECISIONS: dict[Dtype, Precision] = {
    "fp32": _FULL,
    "tf32": replace(_FULL, multiplies="tf32"),
    "bf16": replace(_FULL, products=2, tensors="bf16", multiplies="bf16", autocast=True),
    "fp16": replace(_FULL, products=2, tensors="fp16", multiplies="fp16", autocast=True),
    "bf16-pure": Precision(
        weights=2, vectors=2, buffers=2, moments=2, residual=2, products=2, tensors="bf16", multiplies="bf16"
    ),
    "bf16-master": _MASTERS,
    "fp8": replace(_MASTERS, multiplies="fp8", scaled="tensor"),
    "fp8-row": replace(_MASTERS, multiplies="fp8", scaled="row"),
}

SCALED_MULTIPLE = 16
"""Sizes that products of 8 bits take, and their number of rows, are multiples of this."""


def takes_scaled(in_features: int, out_features: int) -> bool:
    """Whether the products of a linear layer of these sizes take operands of 8 bits."""
    return in_features % SCALED_MULTIPLE == 0 and out_features % SCALED_MULTIPLE == 0


def check_scaled_layers(layers: int, dtype: str) -> None:
    """Raise InputError where no linear layer of a model `takes_scaled`."""
    if not layers:
        raise InputError(
            f"dtype {dtype} needs linear layers whose sizes are multiples of {SCALED_MULTIPLE}, and this model has "
            "none: choose bf16"
        )


def check_scaled_rows(rows: int) -> None:
    """Raise InputError for a number of rows, as of tokens, that products of 8 bits do not take."""
    if rows % SCALED_MULTIPLE:
        raise InputError(
            f"products of 8 bits take rows in multiples of {SCALED_MULTIPLE}, and a layer was given {rows}: "
            "change the batch or the sequence, or choose --dtype bf16"
        )


# Floating-point formats from their bits: range, spacing, and what each makes of a number.
#
# A finite number is (-1)^sign x significand x 2^exponent. With e bits of exponent, bias b = 2^(e-1) - 1 and m stored
# bits of significand,
#
#     normal       1.fraction x 2^(field - b)     for field 1 ... the largest that is finite
#     subnormal    0.fraction x 2^(1 - b)         for field 0: the spacing stays, the precision falls to nothing
#
# (IEEE 754-2019, section 3.3). Two formats leave that scheme: fp8 e4m3 gives the topmost exponent to numbers too, but
# for one pattern that is NaN, and has no infinity (Micikevicius et al. 2022, arXiv:2209.05433); TF32 is fp32 with the
# significand of fp16, as Tensor Cores read it (NVIDIA A100 whitepaper).
#
# Beyond the largest number of a format of 8 bits there are two conventions, and a cast chooses one (Open Compute
# Project, OFP8 1.0, 2023, "Conversion to OFP8"): one that does not saturate gives infinity, or NaN where the format has
# none; one that saturates gives the largest number, for infinity too. NaN stays NaN in both.


class FloatFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A binary floating-point format."""

    name: str
    exponent_bits: int
    significand_bits: int
    """Stored bits of the significand, without the leading one."""
    stored_bits: int
    """Bits that one number takes in memory."""
    has_infinity: bool
    bias: int
    largest_exponent: int
    """The largest exponent of a finite number."""
    smallest_exponent: int
    """The smallest exponent of a normal number."""
    largest: float
    """The largest finite number."""
    smallest_normal: float
    smallest_subnormal: float
    epsilon: float
    """The distance from 1 to the next number: the unit in the last place of 1."""
    decimal_digits: float
    """Digits of precision: log10 of the number of significands."""
    largest_integer: int
    """The largest integer up to which every integer is a number of the format."""
    exp_overflows_above: float
    """ln of the largest number: exp of more is infinite."""
    square_overflows_above: float
    """Square root of the largest number."""

    def spacing(self, value: float) -> float:
        """The unit in the last place at a finite value: the distance to the next number of its magnitude."""
        exponent = math.frexp(value)[1] - 1 if value else self.smallest_exponent
        return 2.0 ** (max(exponent, self.smallest_exponent) - self.significand_bits)

    def round(self, value: float, *, saturates: bool = False) -> float:
        """The nearest number of the format, ties to even; `saturates` chooses the convention beyond the largest."""
        if math.isnan(value):
            return value
        if math.isfinite(value):
            exact, unit = Fraction(value), Fraction(self.spacing(value))
            rounded = round(exact / unit) * unit  # Fraction rounds ties to even
            if abs(rounded) <= Fraction(self.largest):
                return math.copysign(float(rounded), value)
        if saturates:
            return math.copysign(self.largest, value)
        return math.copysign(math.inf, value) if self.has_infinity else math.nan


def _format(
    name: str, exponent_bits: int, significand_bits: int, stored_bits: int, *, has_infinity: bool = True
) -> FloatFormat:
    """The format of so many bits. In one with infinities they own the topmost exponent; in one without, the pattern of
    all ones is NaN, and the largest number one step below it."""
    bias = 2 ** (exponent_bits - 1) - 1
    largest_exponent, smallest_exponent = 2**exponent_bits - 1 - bias - has_infinity, 1 - bias
    ones = 2 - Fraction(1 if has_infinity else 2, 2**significand_bits)
    largest = float(ones * Fraction(2) ** largest_exponent)
    return FloatFormat(
        name=name,
        exponent_bits=exponent_bits,
        significand_bits=significand_bits,
        stored_bits=stored_bits,
        has_infinity=has_infinity,
        bias=bias,
        largest_exponent=largest_exponent,
        smallest_exponent=smallest_exponent,
        largest=largest,
        smallest_normal=2.0**smallest_exponent,
        smallest_subnormal=2.0 ** (smallest_exponent - significand_bits),
        epsilon=2.0**-significand_bits,
        decimal_digits=(significand_bits + 1) * math.log10(2),
        largest_integer=min(2 ** (significand_bits + 1), int(largest)),
        exp_overflows_above=math.log(largest),
        square_overflows_above=math.sqrt(largest),
    )


FORMATS: dict[str, FloatFormat] = {
    each.name: each
    for each in (
        _format("fp64", 11, 52, 64),
        _format("fp32", 8, 23, 32),
        _format("tf32", 8, 10, 32),
        _format("bf16", 8, 7, 16),
        _format("fp16", 5, 10, 16),
        _format("fp8-e5m2", 5, 2, 8),
        _format("fp8-e4m3", 4, 3, 8, has_infinity=False),
    )
}
"""The formats by name; the numbers are the bits of exponent and significand, and of all in memory."""


def float_format(name: str) -> FloatFormat:
    """The format of this name, or an InputError that lists them."""
    return FORMATS[choose(name, tuple(FORMATS), "format")]
