"""RMSNorm and LayerNorm in few bits, as their input's scale and width grow.

    RMSNorm    y = x / sqrt(mean(x^2) + epsilon)                                      (Zhang and Sennrich 2019)
    LayerNorm  y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon)              (Ba, Kiros and Hinton 2016)

without weights. In a format whose largest number is L a square overflows above sqrt(L), and the mean of squares is then
infinite, its inverse root zero, and the row of outputs zero: no NaN tells of it. A square vanishes below the root of
half the smallest subnormal number. How the mean is taken decides what its width does:

    in turn          every partial sum rounded to the format: the sum stops growing (see accumulation.py)
    sum, then divide PyTorch's sum, which accumulates in fp32 and rounds once; the sum of squares overflows
    mean             PyTorch's mean, which divides in fp32 before it rounds
    upcast           the safe way: everything in fp32, the output rounded (`training/transformer.py`)
    PyTorch's own    F.rms_norm and F.layer_norm

Shape legend: R rows, W width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stepscope.core.float_format import FORMATS
from stepscope.questions.against_float64 import DTYPES, Deviation, deviation, last_number_where, next_number

NORMS = ("RMSNorm", "LayerNorm")

IN_TURN, SUM, MEAN, UPCAST, BUILT_IN = "in turn", "sum, then divide", "mean", "upcast to fp32", "PyTorch's own"
WAYS = (IN_TURN, SUM, MEAN, UPCAST, BUILT_IN)

SPREAD = {"RMSNorm": "mean of squares", "LayerNorm": "variance"}
ROWS = 8


@dataclass(frozen=True, kw_only=True)
class NormCase:
    """The result of one norm in one format, one way, on one input."""

    norm: str
    format: str
    way: str
    """One of WAYS."""
    scale: float
    """The standard deviation of the input."""
    width: int
    epsilon: float
    largest: float
    """The largest magnitude of the input's elements."""
    output: Deviation
    spread: Deviation
    """What became of the mean of squares, or of the variance; `nan` for PyTorch's own norm, which does not show it."""


@dataclass(frozen=True, kw_only=True)
class NormLimits:
    """What a format does to squares and to epsilon, found by trying on the device."""

    format: str
    largest_square_of: float
    """The largest number whose square is finite."""
    overflows_at: float
    vanishes_up_to: float
    """The largest number whose square is zero."""
    epsilon: float
    """Epsilon as the format holds it."""
    swallowed_from: float
    """A power of two: a mean of squares from here on stays the same when epsilon is added."""


def of_norm(cases: list[NormCase], norm: str) -> list[NormCase]:
    """The cases of one norm."""
    return [case for case in cases if case.norm == norm]


def kind_of_number(value: float, name: str) -> str:
    """`zero`, `subnormal` or `normal`, in the format of this name."""
    if value == 0:
        return "zero"
    return "subnormal" if value < FORMATS[name].smallest_normal else "normal"


def normalise(x_RW: Tensor, norm: str, way: str, epsilon: float) -> tuple[Tensor, Tensor]:
    """Rows (..., W) normalised in their own format by one of WAYS: what was divided by, (..., 1), and the output.

    What is divided by is the root of the mean of squares or of the variance, which is returned before epsilon and the
    root. PyTorch's own norms do not show theirs: NaN stands in its place.
    """
    if way == BUILT_IN:
        function = F.rms_norm if norm == "RMSNorm" else F.layer_norm
        return torch.full_like(x_RW[..., :1], math.nan), function(x_RW, x_RW.shape[-1:], eps=epsilon)
    if way == UPCAST:
        spread, y_RW = normalise(x_RW.float(), norm, MEAN, epsilon)
        return spread, y_RW.to(x_RW.dtype)
    if norm == "LayerNorm":
        x_RW = x_RW - _average(x_RW, way)
    spread = _average(x_RW * x_RW, way)
    # As a tensor epsilon is rounded to the format first; as a Python number PyTorch would add it in fp32.
    small = torch.tensor(epsilon, dtype=x_RW.dtype, device=x_RW.device)
    return spread, x_RW * torch.rsqrt(spread + small)


def _average(x_RW: Tensor, way: str) -> Tensor:
    if way == MEAN:
        return x_RW.mean(dim=-1, keepdim=True)
    if way == SUM:
        return x_RW.sum(dim=-1, keepdim=True) / x_RW.shape[-1]
    total_R = torch.zeros_like(x_RW[..., 0])
    for x_R in x_RW.movedim(-1, 0).contiguous().unbind():
        total_R += x_R
    return total_R.unsqueeze(-1) / x_RW.shape[-1]


def norm_cases(
    norm: str, name: str, way: str, *, scales: Sequence[float], width: int, epsilon: float, device: torch.device,
    seed: int,
) -> list[NormCase]:  # fmt: skip
    """The cases of one norm in one format, one way: the same random numbers, multiplied by each scale."""
    # Made on the CPU: the same numbers on every device.
    x64_RW = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    # All scales at once, since in turn a width costs as many calls as it has numbers.
    x_SRW = torch.stack([x64_RW * scale for scale in scales]).to(device, DTYPES[name])
    spreads, outputs = normalise(x_SRW, norm, way, epsilon)
    right_spreads, right_outputs = normalise(x_SRW.double(), norm, MEAN, epsilon)
    return [
        NormCase(
            norm=norm, format=name, way=way, scale=scale, width=width, epsilon=epsilon, largest=x_RW.abs().max().item(),
            output=deviation(outputs[i], right_outputs[i], x_RW), spread=deviation(spreads[i], right_spreads[i], x_RW),
        )
        for i, (scale, x_RW) in enumerate(zip(scales, x_SRW, strict=True))
    ]  # fmt: skip


def norm_limits(name: str, epsilon: float, device: torch.device) -> NormLimits:
    """Where squares and epsilon leave the format of this name."""
    dtype = DTYPES[name]
    held = torch.tensor(epsilon, dtype=dtype, device=device)
    largest = last_number_where(lambda x: torch.isfinite(x * x), dtype, device)
    return NormLimits(
        format=name,
        largest_square_of=largest,
        overflows_at=next_number(largest, dtype),
        vanishes_up_to=last_number_where(lambda x: x * x == 0, dtype, device),
        epsilon=held.item(),
        swallowed_from=_swallowed_from(name, held.item()),
    )


def _swallowed_from(name: str, epsilon: float) -> float:
    """The first power of two at which half a spacing is more than epsilon: from there on no sum takes it."""
    if epsilon == 0:
        return 0.0
    form = FORMATS[name]
    power = math.frexp(epsilon)[1] + form.significand_bits
    while form.spacing(2.0**power) / 2 > epsilon:
        power -= 1
    while form.spacing(2.0**power) / 2 <= epsilon:
        power += 1
    return 2.0**power
