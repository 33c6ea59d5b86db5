"""Implementations of attention, one signature: (q, k, v, *, causal, scale=None) -> out.

Shape legend: B batch, H heads, S query positions, T key positions, D head_dim. Every tensor is (B, H, S or T, D).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepscope.core.errors import InputError, choose
from stepscope.core.workload import Attention, Dtype
from stepscope.measure.ranges import detail_range


class AttentionFunction(Protocol):
    """softmax(q k^T * scale) v, with scale 1/sqrt(D) unless given; causal hides keys after the query's position."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None) -> Tensor: ...


def reference(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    """Attention written out: scores, mask, softmax with the maximum subtracted, weighted sum."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    with detail_range("attention scores"):
        scores_BHST = q @ k.transpose(-2, -1) * scale
        if causal:
            query_S1 = torch.arange(q.shape[-2], device=q.device)[:, None]
            key_1T = torch.arange(k.shape[-2], device=q.device)[None, :]
            scores_BHST = scores_BHST.masked_fill(key_1T > query_S1, float("-inf"))
    with detail_range("softmax"):
        # exp overflows in fp16 above ln(65504) = 11.09: with the row's maximum subtracted, no exponent is above 0.
        # Softmax does not change when a row is shifted, so the maximum's gradient is zero: detached, the scores
        # need not be saved for backward (one S x T tensor in three).
        maximum_BHS1 = scores_BHST.detach().amax(dim=-1, keepdim=True)
        exponentials_BHST = torch.exp(scores_BHST - maximum_BHS1)
        weights_BHST = exponentials_BHST / exponentials_BHST.sum(dim=-1, keepdim=True)
    with detail_range("attention output"):
        return weights_BHST @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    """PyTorch's scaled_dot_product_attention; PyTorch chooses the backend."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def _sdpa_with(backend: SDPBackend) -> AttentionFunction:
    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

    return attention


@dataclass(frozen=True, kw_only=True)
class AttentionImplementation:
    """An attention function and what it runs on."""

    function: AttentionFunction
    device_types: tuple[str, ...] = ("cpu", "cuda")
    cuda_dtypes: tuple[Dtype, ...] = ("fp32", "tf32", "bf16", "fp16", "bf16-pure")
    max_head_dim: int | None = None


_HALF: tuple[Dtype, ...] = ("bf16", "fp16", "bf16-pure")

IMPLEMENTATIONS: dict[Attention, AttentionImplementation] = {
    "reference": AttentionImplementation(function=reference),
    "sdpa": AttentionImplementation(function=sdpa),
    "sdpa-math": AttentionImplementation(function=_sdpa_with(SDPBackend.MATH)),
    "sdpa-efficient": AttentionImplementation(
        function=_sdpa_with(SDPBackend.EFFICIENT_ATTENTION), device_types=("cuda",)
    ),
    "sdpa-flash": AttentionImplementation(
        function=_sdpa_with(SDPBackend.FLASH_ATTENTION), cuda_dtypes=_HALF, max_head_dim=256
    ),
    "sdpa-cudnn": AttentionImplementation(
        function=_sdpa_with(SDPBackend.CUDNN_ATTENTION),
        device_types=("cuda",),
        cuda_dtypes=_HALF,
        max_head_dim=256,
    ),
}


def attention_for(name: Attention, *, device_type: str, dtype: Dtype, head_dim: int) -> AttentionFunction:
    """The named implementation, or an InputError that says what it lacks and which ones would work."""
    choose(name, list(IMPLEMENTATIONS), "attention")
    chosen = IMPLEMENTATIONS[name]
    fault = _fault(chosen, device_type, dtype, head_dim)
    if fault is None:
        return chosen.function
    others = [n for n, other in IMPLEMENTATIONS.items() if _fault(other, device_type, dtype, head_dim) is None]
    raise InputError(f"attention {name} {fault}: choose one of {', '.join(others)}")


def _fault(implementation: AttentionImplementation, device_type: str, dtype: Dtype, head_dim: int) -> str | None:
    checks: tuple[tuple[Callable[[], bool], str], ...] = (
        (lambda: device_type in implementation.device_types, f"does not run on {device_type}"),
        (
            lambda: device_type != "cuda" or dtype in implementation.cuda_dtypes,
            f"does not run in {dtype} (it takes {', '.join(implementation.cuda_dtypes)})",
        ),
        (
            lambda: implementation.max_head_dim is None or head_dim <= implementation.max_head_dim,
            f"takes head_dim up to {implementation.max_head_dim}, not {head_dim}",
        ),
    )
    return next((sentence for holds, sentence in checks if not holds()), None)
