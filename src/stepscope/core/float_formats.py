"""Number formats from their bits: range, spacing, what each makes of a number; and blocks of numbers under one scale.

A finite number is (-1)^sign x significand x 2^exponent. With e bits of exponent, bias b (2^(e-1) - 1 where nothing else
is said) and m stored bits of significand,

    normal       1.fraction x 2^(field - b)     for field 1 ... the largest that is finite
    subnormal    0.fraction x 2^(1 - b)         for field 0: the spacing stays, the precision falls to nothing

(IEEE 754-2019, section 3.3). Formats differ in what their topmost codes mean (`Top`): infinities and NaN; NaN alone,
as in fp8 e4m3 (Micikevicius et al. 2022, arXiv:2209.05433); numbers alone, as in fp6 and fp4; or numbers, with NaN in
the place of a negative zero (fnuz). e8m0 is an exponent alone: no sign, no zero. Integers of a fixed point are formats,
too, whose one bit of exponent never changes the spacing. TF32 is fp32 with the significand of fp16, as Tensor Cores
read it (NVIDIA A100 whitepaper).

Beyond the largest number of a format of 8 bits there are two conventions, and a cast chooses one (Open Compute
Project, OFP8 1.0, 2023, "Conversion to OFP8"): one that does not saturate gives infinity, or NaN where the format has
none; one that saturates gives the largest number, for infinity too. NaN stays NaN in both. A format with neither has
the largest number alone to give.

A block is so many numbers of few bits that share a scale: MX by 32, with a power of two (OCP Microscaling Formats 1.0,
2023); NVFP4 by 16, with a number of e4m3, and one of fp32 for the tensor (arXiv:2509.25149); fp8 by 128, and weights by
128 x 128, with a number of fp32 (arXiv:2412.19437). `training/scaled_products.py` rounds tensors to them.
"""

import math
import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

import msgspec

from stepscope.core.errors import choose

Top = Literal["infinities", "one NaN", "numbers", "fnuz", "scale", "two's complement"]
"""What the topmost codes mean: the whole topmost exponent is infinity and NaN; the code of ones alone is NaN; all codes
are numbers; so, and the negative zero is NaN; as `one NaN`, in a format without sign and zero; all are numbers, as
integers have their sign, and the lowest is left unused."""


class FloatFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A binary floating-point format."""

    name: str
    exponent_bits: int
    significand_bits: int
    """Stored bits of the significand, without the leading one."""
    stored_bits: int
    """Bits that one number takes in memory."""
    top: Top
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
    """The smallest number above zero; of a format without subnormals its smallest normal one."""
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

    @property
    def code_bits(self) -> int:
        """Bits that tell numbers apart: those of TF32 are fewer than it takes in memory."""
        return self.exponent_bits + self.significand_bits + (self.top != "scale")

    def round(self, value: float, *, saturates: bool = False) -> float:
        """The nearest number of the format, ties to even; `saturates` chooses the convention beyond the largest.

        NaN where the format has nothing to give: for NaN itself, and for a sign or a zero in e8m0.
        """
        if math.isnan(value) or (self.top == "scale" and value <= 0):
            return math.nan
        if math.isfinite(value):
            exact, unit = Fraction(value), Fraction(self.spacing(value))
            rounded = round(exact / unit) * unit  # Fraction rounds ties to even
            if self.top == "scale":
                rounded = max(rounded, Fraction(self.smallest_normal))
            if abs(rounded) <= Fraction(self.largest):
                return abs(float(rounded)) if self.top in _ONE_ZERO and not rounded else math.copysign(rounded, value)
        if saturates or self.top in ("numbers", "two's complement"):
            return math.copysign(self.largest, value)
        return math.copysign(math.inf, value) if self.has_infinity else math.nan

    def decode(self, code: int) -> float:
        """The number of a code."""
        m, ones, half = self.significand_bits, 2**self.code_bits - 1, 2 ** (self.code_bits - 1)
        if self.top == "two's complement":
            return (code - 2 * half * (code >= half)) * self.smallest_subnormal
        if self.top == "scale":
            return math.nan if code == ones else math.ldexp(1, code - self.bias)
        sign, magnitude = -1 if code >= half else 1, code % half
        field, fraction = magnitude >> m, magnitude & 2**m - 1
        if self.has_infinity and field == 2**self.exponent_bits - 1:
            return math.nan if fraction else sign * math.inf
        if (self.top == "one NaN" and magnitude == half - 1) or (self.top == "fnuz" and code == half):
            return math.nan
        significand = fraction + 2**m * (field > 0)
        return sign * math.ldexp(significand, max(field, 1) - self.bias - m)

    def encode(self, value: float, *, saturates: bool = False) -> int | None:
        """The code of the nearest number, by the rules of `round`; None where the format has none for it.

        Of the codes that are NaN it is the one of ones without a sign, and of fnuz its only one.
        """
        rounded, m = self.round(value, saturates=saturates), self.significand_bits
        sign = 2 ** (self.code_bits - 1)
        if math.isnan(rounded):
            return {"fnuz": sign, "scale": 2 * sign - 1, "infinities": sign - 1, "one NaN": sign - 1}.get(self.top)
        if self.top == "two's complement":
            return int(rounded / self.smallest_subnormal) % (2 * sign)
        if self.top == "scale":
            return math.frexp(rounded)[1] - 1 + self.bias
        signed = sign * (math.copysign(1, rounded) < 0)
        if math.isinf(rounded):
            return signed + (2**self.exponent_bits - 1 << m)
        exponent = max(math.frexp(rounded)[1] - 1, self.smallest_exponent) if rounded else self.smallest_exponent
        # A subnormal has no leading one to take away from the field of 1.
        return signed + (exponent - self.smallest_exponent << m) + int(math.ldexp(abs(rounded), m - exponent))


_ONE_ZERO = ("fnuz", "two's complement")
"""Tops of formats without a negative zero."""


def _format(
    name: str,
    exponent_bits: int,
    significand_bits: int,
    stored_bits: int,
    *,
    top: Top = "infinities",
    bias: int | None = None,
) -> FloatFormat:
    """The format of so many bits. bias: the usual one of so many bits of exponent, where it is None."""
    bias = int(2 ** (exponent_bits - 1)) - 1 if bias is None else bias
    has_infinity = top == "infinities"
    largest_exponent = 2**exponent_bits - 1 - bias - (top in ("infinities", "scale"))
    smallest_exponent = -bias if top == "scale" else 1 - bias
    # NaN at all ones takes the topmost significand from numbers, where it does not take the exponent.
    ones = 2 - Fraction(2 if top == "one NaN" else 1, 2**significand_bits)
    largest = float(ones * Fraction(2) ** largest_exponent)
    smallest = 2.0 ** (smallest_exponent - significand_bits)
    return FloatFormat(
        name=name,
        exponent_bits=exponent_bits,
        significand_bits=significand_bits,
        stored_bits=stored_bits,
        top=top,
        has_infinity=has_infinity,
        bias=bias,
        largest_exponent=largest_exponent,
        smallest_exponent=smallest_exponent,
        largest=largest,
        # All numbers of a fixed point are as far apart: none is subnormal.
        smallest_normal=smallest if top == "two's complement" else 2.0**smallest_exponent,
        smallest_subnormal=smallest,
        epsilon=2.0 ** (max(0, smallest_exponent) - significand_bits),
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
        _format("fp8-e4m3", 4, 3, 8, top="one NaN"),
        _format("fp8-e5m2fnuz", 5, 2, 8, top="fnuz", bias=16),
        _format("fp8-e4m3fnuz", 4, 3, 8, top="fnuz", bias=8),
        _format("fp6-e3m2", 3, 2, 6, top="numbers"),
        _format("fp6-e2m3", 2, 3, 6, top="numbers"),
        _format("fp4-e2m1", 2, 1, 4, top="numbers"),
        _format("e8m0", 8, 0, 8, top="scale"),
        _format("int8-mx", 1, 6, 8, top="two's complement", bias=1),
        _format("int4", 1, 2, 4, top="two's complement", bias=-1),
    )
}
"""The formats by name; the numbers are the bits of exponent and significand, and of all in memory."""


def float_format(name: str) -> FloatFormat:
    """The format of this name, or an InputError that lists them."""
    return FORMATS[choose(name, tuple(FORMATS), "format")]


class BlockFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of few bits in blocks, each with a scale."""

    name: str
    element: str
    """A format by name, and so is the scale's."""
    scale: str
    size: int
    """Numbers that share a scale, along the dimension that a product sums over; 0 for all of a row."""
    rows: int = 1
    """Rows of a weight that share it, too; 0 for all of them."""
    square: bool = False
    """Whether the other operands, activations and gradients, have blocks of these rows, too."""
    tensor_scale: bool = False
    """Whether one number of fp32 scales the whole tensor beside."""

    @property
    def bits(self) -> float:
        """Bits of a number with its part of the scale, of operands in blocks of one row; the tensor's not counted."""
        shared = FORMATS[self.scale].stored_bits / self.size if self.size else 0
        return FORMATS[self.element].stored_bits + shared

    def bytes_of(self, rows: int, columns: int, *, weight: bool = False) -> int:
        """Bytes of a tensor in blocks along its columns: its elements side by side, a scale for each block, and the
        tensor's own."""
        high = (self.rows or rows) if weight or self.square else 1
        blocks = -(-rows // high) * -(-columns // (self.size or columns))
        bits = rows * columns * FORMATS[self.element].stored_bits + blocks * FORMATS[self.scale].stored_bits
        return -(-bits // 8) + 4 * self.tensor_scale

    def unfit(self, *sizes: int) -> str | None:
        """Why no product of these sizes takes such operands, in words; None where one does. Where scales are of whole
        rows, sizes are to be multiples of 16, as of every product of 8 bits."""
        uneven = next((size for size in sizes if size % (self.size or 16)), None)
        if uneven is None:
            return None
        return f"blocks of {self.size} do not divide {uneven}" if self.size else f"{uneven} is no multiple of 16"

    @property
    def powers_of_two(self) -> bool:
        """Whether scales are powers of two."""
        return self.scale == "e8m0"


BLOCK_FORMATS: dict[str, BlockFormat] = {
    each.name: each
    for each in (
        BlockFormat(name="mxfp8", element="fp8-e4m3", scale="e8m0", size=32),
        BlockFormat(name="mxfp8-e5m2", element="fp8-e5m2", scale="e8m0", size=32),
        BlockFormat(name="mxfp6", element="fp6-e2m3", scale="e8m0", size=32),
        BlockFormat(name="mxfp6-e3m2", element="fp6-e3m2", scale="e8m0", size=32),
        BlockFormat(name="mxfp4", element="fp4-e2m1", scale="e8m0", size=32),
        BlockFormat(name="mxint8", element="int8-mx", scale="e8m0", size=32),
        BlockFormat(name="nvfp4", element="fp4-e2m1", scale="fp8-e4m3", size=16, tensor_scale=True),
        BlockFormat(name="nvfp4-square", element="fp4-e2m1", scale="fp8-e4m3", size=16, rows=16, tensor_scale=True),
        BlockFormat(name="fp8-block", element="fp8-e4m3", scale="fp32", size=128, rows=128),
        BlockFormat(name="fp8-row", element="fp8-e4m3", scale="fp32", size=0),
        BlockFormat(name="fp8-tensor", element="fp8-e4m3", scale="fp32", size=0, rows=0, square=True),
        BlockFormat(name="int4-block", element="int4", scale="fp32", size=128),
    )
}
"""Formats of blocks by name. `nvfp4-square` has weights in squares of 16, so that both passes see the same numbers."""

MULTIPLIED_BLOCKS = tuple(name for name, form in BLOCK_FORMATS.items() if form.element.startswith("fp"))
"""Formats of blocks whose products hardware has: their elements are floating-point numbers."""


def block_format(name: str) -> BlockFormat:
    """The block format of this name, or an InputError that lists them."""
    return BLOCK_FORMATS[choose(name, tuple(BLOCK_FORMATS), "block format")]


# One block by arithmetic, as `training/scaled_products.py` rounds tensors of them: every step in fp32.


ScaleRule = Literal["floor", "even", "up", "square"]
"""How a power of two is chosen for a block. floor: the exponent of the largest magnitude less that of the largest
number, which cuts off what is then beyond it (MX 1.0, section 6.3); even: so, of the largest magnitude rounded to the
bits of an element; up: the least that cuts off nothing; square: of floor's and its two neighbours, that of the least
squared error."""

SCALE_RULES: tuple[ScaleRule, ...] = ("floor", "even", "up", "square")

_TINY = 2.0**-126
"""The smallest normal number of fp32: a scale is at least this."""


def _fp32(value: float) -> float:
    """The nearest number of fp32, of what is not beyond it."""
    return struct.unpack("f", struct.pack("f", value))[0]


def round_block(values: Sequence[float], form: BlockFormat, rule: ScaleRule = "floor") -> list[float]:
    """Numbers of fp32, all of them one block and one tensor, as the numbers of fp32 that they become."""
    element, largest = FORMATS[form.element], max(map(abs, values), default=0.0)
    if not all(map(math.isfinite, values)):
        return [math.nan] * len(values)
    if form.powers_of_two:
        powers = _powers(largest, element, rule)
        tried = [_scaled(values, element, 2.0**-power, 2.0**power) for power in powers]
        return min(tried, key=lambda found: sum((a - b) ** 2 for a, b in zip(found, values, strict=True)))
    if not form.tensor_scale:
        scale = max(_TINY, _fp32(largest * _fp32(1 / element.largest)))
        return [_fp32(_nearest(_fp32(value / scale), element) * scale) for value in values]
    of_tensor = max(_TINY, _fp32(largest / (FORMATS[form.scale].largest * element.largest)))
    of_block = _nearest(_fp32(_fp32(largest / element.largest) / of_tensor), FORMATS[form.scale])
    scale = _fp32(of_block * of_tensor)
    return [_fp32(_nearest(_fp32(value / (scale or math.inf)), element) * scale) for value in values]


def _powers(largest: float, element: FloatFormat, rule: ScaleRule) -> tuple[int, ...]:
    """Exponents of the scale by a rule; several where the errors choose."""
    (bits,) = struct.unpack("i", struct.pack("f", largest))
    if rule == "even":
        bits += 1 << (22 - element.significand_bits)
    power = (bits >> 23) - 127 - element.largest_exponent
    if rule == "up":
        power += largest > element.largest * 2.0 ** max(-127, power)
    moves = (-1, 0, 1) if rule == "square" else (0,)
    return tuple(max(-127, min(127, power + move)) for move in moves)


def _scaled(values: Sequence[float], element: FloatFormat, divided: float, scale: float) -> list[float]:
    return [_fp32(_nearest(_fp32(value * divided), element) * scale) for value in values]


def _nearest(value: float, number: FloatFormat) -> float:
    """The nearest number of a format, ties to even, and the largest beyond it: quickly, of a finite value."""
    exponent = max(math.frexp(value)[1] - 1, number.smallest_exponent) if value else number.smallest_exponent
    unit = 2.0 ** (exponent - number.significand_bits)
    return math.copysign(min(number.largest, abs(round(value / unit) * unit)), value)
