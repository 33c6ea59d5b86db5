"""Attention as kernels: FlashAttention-2 in Triton, and the same tile by tile in PyTorch.

    from stepscope.kernels import FlashAttention, FlashAttentionTiled

    FlashAttention.apply(q, k, v, is_causal=False)          Triton: a GPU, or Triton's interpreter
    FlashAttentionTiled.apply(q, k, v, is_causal=False)     PyTorch alone: any device

Both take (..., seq, head_dim) and save q, k, v, the output and the logsumexp (..., seq).
"""

from stepscope.core.address_space import require_room_for_torch

require_room_for_torch()

from stepscope.kernels.flash_attention import FlashAttention, FlashAttentionTiled  # noqa: E402  (torch)

__all__ = ["FlashAttention", "FlashAttentionTiled"]
