"""Implementations of attention, one signature: (q, k, v, *, causal, scale=None) -> out.

Shape legend: B batch, H heads, S query positions, T key positions, D head_dim. Every tensor is (B, H, S or T, D).
"""

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepscope.core.attention_support import check_attention
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


IMPLEMENTATIONS: dict[Attention, AttentionFunction] = {
    "reference": reference,
    "sdpa": sdpa,
    "sdpa-math": _sdpa_with(SDPBackend.MATH),
    "sdpa-efficient": _sdpa_with(SDPBackend.EFFICIENT_ATTENTION),
    "sdpa-flash": _sdpa_with(SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": _sdpa_with(SDPBackend.CUDNN_ATTENTION),
}
"""What each runs on is in `core/attention_support.py`."""


def attention_for(name: Attention, *, device_type: str, dtype: Dtype, head_dim: int) -> AttentionFunction:
    """The named implementation, or an InputError that says what it lacks and which ones would work."""
    check_attention(name, device_type=device_type, dtype=dtype, head_dim=head_dim)
    return IMPLEMENTATIONS[name]
