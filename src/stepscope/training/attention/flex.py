"""PyTorch's FlexAttention: the mask is a function of positions, and its kernel is compiled for it."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from stepscope.kernels.operators import as_autocast, compile_for_each_shape
from stepscope.training.attention.written_out import fully_masked_queries, with_zeros


def flex(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None,
    bounds: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """flex_attention, compiled on CUDA; on a CPU as PyTorch runs it there, forward alone, with all scores at once.

    The block mask, which says what tiles have anything to compute, is made once for each pair of lengths, and with
    documents once for each tensor of bounds, which the layers of a step share.
    """
    q, k, v = as_autocast(q, k, v)
    masked = fully_masked_queries(q, k, window)
    if masked:
        return with_zeros(flex, masked, q, k, v, causal=causal, scale=scale, window=window)
    # Its kernels should read any strides, but some still read rows of D numbers side by side: on an H200, PyTorch 2.11
    # gave wrong results where a row was every second number (head_dim 256, 63 queries, 16 bits).
    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
    mask = None
    if bounds is not None:
        mask = _document_mask(bounds, causal, window)
    elif causal or window is not None:
        mask = _block_mask(q.shape[-2], k.shape[-2], causal, window, q.device)
    group = q.shape[1] // k.shape[1]
    options: dict[str, Any] = {"block_mask": mask, "scale": scale, "enable_gqa": group != 1}
    if mask is not None and q.shape[-2] < mask.BLOCK_SIZE[0] < q.shape[-2] * group:
        # Its kernel for few queries takes those of a group as one tile, and a block of the mask is too small for that:
        # inductor finds no configuration (NoValidChoicesError, PyTorch 2.11 and 2.13). The kernel for many works.
        options["kernel_options"] = {"FORCE_USE_FLEX_ATTENTION": True}
    if q.device.type != "cuda" or torch.compiler.is_compiling():
        return flex_attention(q, k, v, **options)
    return _compiled(flex_attention)(q, k, v, **options)


_compiled = cache(compile_for_each_shape)


@cache
def _block_mask(queries: int, keys: int, causal: bool, window: int | None, device: torch.device) -> BlockMask:
    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return _is_near(query, key, causal, window)

    return create_block_mask(visible, None, None, queries, keys, device=device)


def _is_near(query: Tensor, key: Tensor, causal: bool, window: int | None) -> Tensor:
    if window is None:
        return key <= query
    near = query - key < window
    return near & (key <= query) if causal else near & (key - query < window)


_last_mask: list[tuple[Tensor, bool, int | None, BlockMask]] = []
"""The last mask of documents, with the bounds that it is of. There is one, since a mask holds its bounds in memory."""


def _document_mask(bounds: Tensor, causal: bool, window: int | None) -> BlockMask:
    if torch.compiler.is_compiling():
        return _mask_of_documents(bounds, causal, window)
    for of, of_causal, of_window, mask in _last_mask:
        if of is bounds and (of_causal, of_window) == (causal, window):
            return mask
    block_mask = _mask_of_documents(bounds, causal, window)
    _last_mask[:] = [(bounds, causal, window, block_mask)]
    return block_mask


def _mask_of_documents(bounds: Tensor, causal: bool, window: int | None) -> BlockMask:
    first, after = bounds.unbind()

    def visible(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        within = (key >= first[batch, query]) & (key < after[batch, query])
        return within & _is_near(query, key, causal, window) if causal or window is not None else within

    _, batches, length = bounds.shape
    return create_block_mask(visible, batches, None, length, length, device=bounds.device)
