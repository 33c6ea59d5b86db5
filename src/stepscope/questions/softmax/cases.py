"""Softmax and attention in few bits, as their inputs grow.

    naive    exp(x) / sum(exp(x)): exp overflows above ln of the format's largest number, and inf / inf is NaN
    safe     exp(x - m) / sum(exp(x - m)) with m = max(x): no exponent is above zero
    online   the same in one pass over blocks, with a running maximum and a running sum that is rescaled whenever the
             maximum grows: d <- d exp(m_old - m_new) + sum(exp(block - m_new)) (Milakov and Gimelshein 2018,
             arXiv:1805.02867, algorithm 3)

Attention's scores q.k of a head of D numbers, each of standard deviation s, have the deviation s^2 sqrt(D): hence the
division by sqrt(D) (Vaswani et al. 2017, section 3.2.1). It can be done to the scores, or to q before the product.

Shape legend: R rows, W width, H heads, S positions, D head_dim.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stepscope.core.float_format import FORMATS
from stepscope.questions.against_float64 import DTYPES, Deviation, deviation, last_number_where, next_number

NAIVE, SAFE, ONLINE = "naive", "safe", "online"
DIVISIONS = NOT_DIVIDED, AFTER, BEFORE = "not divided", "divided after", "divided before"
WIDTH = 1024
BLOCK = 64
"""Elements per block of the online softmax."""
POSITIONS = 128
_ROWS, _HEADS = 8, 2


@dataclass(frozen=True, kw_only=True)
class ExpLimits:
    """Where exp leaves a format, found by trying on the device."""

    format: str
    logarithm: float
    """ln of the largest number."""
    finite_up_to: float
    infinite_at: float
    """The next number of the format, whose exp is infinite."""
    vanishes_below: float
    """The smallest number whose exp is above zero."""


@dataclass(frozen=True, kw_only=True)
class SoftmaxCase:
    """The result of one softmax in one format on one input."""

    format: str
    way: str
    scale: float
    largest: float
    """The largest element of the input."""
    result: Deviation


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """The result of attention in one format, with one softmax and one way of dividing, on one input."""

    head_dim: int
    format: str
    division: str
    softmax: str
    scale: float
    """Standard deviation of q and k."""
    largest_score: float
    """The largest score, in float64, after the division by sqrt(head_dim) if there is one."""
    largest_weight: float
    """The largest weight that softmax gives one key, in float64, as a mean over the queries; 1 if it picks one key."""
    finite_scores: bool
    result: Deviation
    """The error of attention's output, or the word for what became of it."""


def naive_softmax(x_RW: Tensor) -> Tensor:
    """exp(x) / sum(exp(x)), in the input's format."""
    exponentials = x_RW.exp()
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


def safe_softmax(x_RW: Tensor) -> Tensor:
    """Softmax with the maximum of each row subtracted first, in the input's format."""
    return naive_softmax(x_RW - x_RW.amax(dim=-1, keepdim=True))


def online_softmax(x_RW: Tensor, block: int = BLOCK) -> Tensor:
    """Softmax with maximum and sum from one pass over blocks, both in the input's format; a second pass divides."""
    maximum = torch.full_like(x_RW[..., :1], -math.inf)
    total = torch.zeros_like(maximum)
    for part in x_RW.split(block, dim=-1):
        larger = torch.maximum(maximum, part.amax(dim=-1, keepdim=True))
        total = total * (maximum - larger).exp() + (part - larger).exp().sum(dim=-1, keepdim=True)
        maximum = larger
    return (x_RW - maximum).exp() / total


SOFTMAXES: dict[str, Callable[[Tensor], Tensor]] = {
    NAIVE: naive_softmax,
    SAFE: safe_softmax,
    ONLINE: online_softmax,
    "PyTorch's own": lambda x_RW: F.softmax(x_RW, dim=-1),
}


def attention_scores(q_HSD: Tensor, k_HSD: Tensor, division: str) -> Tensor:
    """q k^T in the inputs' format, divided by sqrt(D) after the product, before it, or not at all."""
    root = math.sqrt(q_HSD.shape[-1])
    if division == BEFORE:
        q_HSD = q_HSD / root
    scores_HST = q_HSD @ k_HSD.transpose(-2, -1)
    return scores_HST / root if division == AFTER else scores_HST


def exp_limits(name: str, device: torch.device) -> ExpLimits:
    """Where exp leaves the format of this name."""
    dtype = DTYPES[name]
    last = last_number_where(lambda x: x.exp().isfinite(), dtype, device)
    return ExpLimits(
        format=name,
        logarithm=FORMATS[name].exp_overflows_above,
        finite_up_to=last,
        infinite_at=next_number(last, dtype),
        vanishes_below=-last_number_where(lambda x: (-x).exp() > 0, dtype, device),
    )


def softmax_cases(name: str, scales: Sequence[float], device: torch.device, seed: int) -> list[SoftmaxCase]:
    """The cases of each softmax in one format: the same random numbers, multiplied by each scale."""
    # Made on the CPU: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    x64_RW = torch.randn(_ROWS, WIDTH, generator=generator, dtype=torch.float64)
    found = []
    for way, softmax in SOFTMAXES.items():
        for scale in scales:
            x_RW = (x64_RW * scale).to(device, DTYPES[name])
            result = deviation(softmax(x_RW), safe_softmax(x_RW.double()), x_RW)
            found.append(SoftmaxCase(format=name, way=way, scale=scale, largest=x_RW.max().item(), result=result))
    return found


def attention_cases(head_dim: int, scale: float, device: torch.device, seed: int) -> list[AttentionCase]:
    """The cases of attention at one scale: in each format, with each softmax and each way of dividing."""
    generator = torch.Generator().manual_seed(seed)
    shape = (_HEADS, POSITIONS, head_dim)
    q64, k64, v64 = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    found = []
    for name, dtype in DTYPES.items():
        q_HSD, k_HSD, v_HSD = (x.to(device, dtype) for x in (q64 * scale, k64 * scale, v64))
        for division in DIVISIONS:
            exact_HST = attention_scores(q_HSD.double(), k_HSD.double(), division)
            exact_weights_HST = safe_softmax(exact_HST)
            scores_HST = attention_scores(q_HSD, k_HSD, division)
            for softmax in (NAIVE, SAFE):
                out_HSD = SOFTMAXES[softmax](scores_HST) @ v_HSD
                found.append(
                    AttentionCase(
                        head_dim=head_dim, format=name, division=division, softmax=softmax, scale=scale,
                        largest_score=exact_HST.max().item(),
                        largest_weight=exact_weights_HST.amax(dim=-1).mean().item(),
                        finite_scores=bool(scores_HST.isfinite().all().item()),
                        result=deviation(out_HSD, exact_weights_HST @ v_HSD.double(), q_HSD, k_HSD),
                    )
                )  # fmt: skip
    return found
