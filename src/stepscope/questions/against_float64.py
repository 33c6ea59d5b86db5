"""How far a result in few bits is from float64, and at which numbers a format ends."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stepscope.core.answer import Cell

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The formats that PyTorch computes in."""

_BITS = {2: torch.int16, 4: torch.int32}
"""The integer dtype as wide as a number of so many bytes."""


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """How far a result is from the one of float64."""

    error: float
    """|found - reference| / |reference| of the worst row, by the Euclidean norm; NaN where a row is not finite."""
    word: str
    """What the result became: `nan`, `inf`; `zero` where a whole row is zero and should not be; `input overflows` where
    the format cannot hold what goes in. Empty for any other result."""

    @property
    def broken(self) -> bool:
        return bool(self.word)

    @property
    def cell(self) -> Cell:
        """The word, or the error to three digits."""
        return self.word or float(f"{self.error:.3g}")

    @property
    def plotted(self) -> float | str:
        """The error, or the word where that is not finite."""
        return self.error if math.isfinite(self.error) else self.word or str(self.error)


INPUT_OVERFLOWS = Deviation(error=math.nan, word="input overflows")


def deviation(found: Tensor, reference: Tensor, *given: Tensor) -> Deviation:
    """The largest relative error of a row of `found` (..., W) against a float64 reference of that shape, or a word.

    given: what went in, in its format.
    """
    if not all(tensor.isfinite().all() for tensor in given):
        return INPUT_OVERFLOWS
    wide = found.double()
    if wide.isnan().any():
        return Deviation(error=math.nan, word="nan")
    if wide.isinf().any():
        return Deviation(error=math.nan, word="inf")
    off, size = (wide - reference).norm(dim=-1), reference.norm(dim=-1)
    # Where the reference is zero itself, nothing found is no error, and anything else an infinite one.
    error = torch.where(off == 0, off, off / size).max().item()
    lost = (wide == 0).all(dim=-1) & (size > 0)
    return Deviation(error=error, word="zero" if lost.any() else "")


def last_number_where(holds: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device) -> float:
    """The largest number of the format, zero or above, for which `holds` is true.

    `holds` takes a tensor of one number, and is true from zero up to somewhere, and false from there on. Positive
    numbers are ordered as their bits are (IEEE 754), so that this is a binary search over the bits.
    """
    bits = _BITS[dtype.itemsize]
    low, high = 0, int(torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(bits).item())
    while low < high:
        middle = (low + high + 1) // 2
        number = torch.tensor(middle, dtype=bits, device=device).view(dtype)
        low, high = (middle, high) if bool(holds(number)) else (low, middle - 1)
    return torch.tensor(low, dtype=bits).view(dtype).item()


def next_number(value: float, dtype: torch.dtype) -> float:
    """The next larger number of the format, for a number of it that is zero or above."""
    bits = torch.tensor(value, dtype=dtype).view(_BITS[dtype.itemsize])
    return (bits + 1).view(dtype).item()
