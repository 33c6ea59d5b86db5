"""Floating-point formats from their bits: range, spacing, and what each makes of a number.

A finite number is (-1)^sign x significand x 2^exponent. With e bits of exponent, bias b = 2^(e-1) - 1 and m stored
bits of significand,

    normal       1.fraction x 2^(field - b)     for field 1 ... the largest that is finite
    subnormal    0.fraction x 2^(1 - b)         for field 0: the spacing stays, the precision falls to nothing

(IEEE 754-2019, section 3.3). Two formats leave that scheme: fp8 e4m3 gives the topmost exponent to numbers too, but
for one pattern that is NaN, and has no infinity (Micikevicius et al. 2022, arXiv:2209.05433); TF32 is fp32 with the
significand of fp16, as Tensor Cores read it (NVIDIA A100 whitepaper).

Beyond the largest number of a format of 8 bits there are two conventions, and a cast chooses one (Open Compute
Project, OFP8 1.0, 2023, "Conversion to OFP8"): one that does not saturate gives infinity, or NaN where the format has
none; one that saturates gives the largest number, for infinity too. NaN stays NaN in both.
"""

import math
from fractions import Fraction

import msgspec

from stepscope.core.errors import choose


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
