"""Attention as kernels: FlashAttention-2 in Triton, and the same tile by tile in PyTorch.

    from stepscope.kernels import FlashAttention, FlashAttentionTiled

    FlashAttention.apply(q, k, v, is_causal=False)          Triton: a GPU, or Triton's interpreter
    FlashAttentionTiled.apply(q, k, v, is_causal=False)     PyTorch alone: any device

Both take (..., seq, head_dim) and save q, k, v, the output and the logsumexp (..., seq). `flash_attention`
runs the first one's kernels on (batch, heads, seq, head_dim), also with a window and with packed documents
(`document_bounds`, `check_cu_seqlens`).
"""

import importlib
from typing import Any

from stepscope.core.interrupts import require_room_for_torch

require_room_for_torch()

_PUBLIC = {
    "FlashAttention": "flash.attention",
    "FlashAttentionTiled": "flash.tiled",
    "flash_attention": "flash.attention",
    "document_bounds": "documents",
    "check_cu_seqlens": "documents",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used. The files beside this one import this package before each other, so
    an import of one of them at the top would be a circle.
    """
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
