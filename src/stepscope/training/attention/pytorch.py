"""PyTorch's scaled_dot_product_attention, and each of its backends."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepscope.training.attention import AttentionFunction
from stepscope.training.attention.written_out import for_all_heads, fully_masked_queries, hidden_scores, with_zeros


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None,
    bounds: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """PyTorch's scaled_dot_product_attention; PyTorch chooses the backend. A sliding window becomes a mask (S, T), and
    documents become one (B, 1, S, T)."""
    masked = fully_masked_queries(q, k, window)
    if masked:
        return with_zeros(sdpa, masked, q, k, v, causal=causal, scale=scale, window=window)
    # The fused backends read only rows whose D numbers lie side by side.
    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
    if scale is not None and scale <= 0:
        # Its CPU kernel scales masked scores, which are -inf: a scale of 0 makes NaN, a negative one +infinity.
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
    grouped = q.shape[1] != k.shape[1]
    if window is None and bounds is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    hidden = hidden_scores(q, k, causal=causal, window=window, bounds=bounds)
    assert hidden is not None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden, scale=scale, enable_gqa=grouped)


BACKENDS: dict[str, SDPBackend] = {
    "sdpa-math": SDPBackend.MATH,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
}
"""PyTorch's backends by the names of the attentions that run them."""


def _by(backend: str) -> AttentionFunction:
    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None,
        bounds: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        with sdpa_kernel(BACKENDS[backend]):
            return sdpa(q, k, v, causal=causal, scale=scale, window=window, bounds=bounds)

    return attention


sdpa_math, sdpa_cudnn = _by("sdpa-math"), _by("sdpa-cudnn")


def sdpa_efficient(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None,
    bounds: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """PyTorch's memory-efficient backend. Some releases lack grouped heads there, so keys and values are repeated."""
    k, v = for_all_heads(q, k, v)
    with sdpa_kernel(BACKENDS["sdpa-efficient"]):
        return sdpa(q, k, v, causal=causal, scale=scale, window=window, bounds=bounds)


def sdpa_flash(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None
) -> Tensor:
    """PyTorch's FlashAttention. It has only square causal masks, so unequal lengths are cut: no query sees keys from S
    on, and queries from T on see all keys.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    with sdpa_kernel(BACKENDS["sdpa-flash"]):
        if not causal or queries == keys:
            return sdpa(q, k, v, causal=causal, scale=scale, window=window)
        if queries < keys:
            return sdpa(q, k[:, :, :queries], v[:, :, :queries], causal=True, scale=scale, window=window)
        square = sdpa(q[:, :, :keys], k, v, causal=True, scale=scale, window=window)
        return torch.cat([square, sdpa(q[:, :, keys:], k, v, causal=False, scale=scale, window=window)], dim=-2)
