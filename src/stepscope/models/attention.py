"""Implementations of attention, one signature: (q, k, v, *, causal, scale=None, window=None) -> out.

Shape legend: B batch, H heads, S query positions, T key positions, D head_dim. Queries are (B, H, S, D), keys and
values (B, H or fewer heads, T, D): where they have fewer, each serves as many consecutive query heads (grouped-query
attention). What a query sees:

    causal           query i sees the keys j <= i, also where S and T differ (aligned at the top left)
    window w         query i sees the keys with |i - j| < w; with causal, those in (i - w, i]
    nothing at all   (S >= T + w: the window is past the last key) makes a row of zeros

`attention_for` is for the model; `attention_inputs.attend` is for one call, and checks its tensors.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from stepscope.core.attention_support import attention_of, fault_here
from stepscope.core.workload import Attention, Workload
from stepscope.kernels.flash_tiled import flash_tiled
from stepscope.measure.ranges import detail_range

CHUNK = 256
"""Queries of a chunk."""


FLASH_CAPABILITY = (8, 0)
"""Of a GPU: Ampere. bf16, and the copies from memory that run beside the arithmetic, begin there."""


class AttentionFunction(Protocol):
    """softmax(q k^T * scale) v over the keys that each query sees, with scale 1/sqrt(D) unless given."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None
    ) -> Tensor: ...


# ---- written out


def reference(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Attention written out: scores, mask, softmax with the maximum subtracted, weighted sum."""
    blind = blind_queries(q, k, window)
    if blind:
        return with_zeros(reference, blind, q, k, v, causal=causal, scale=scale, window=window)
    k, v = for_all_heads(q, k, v)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    with detail_range("attention scores"):
        scores_BHST = q @ k.transpose(-2, -1) * scale
        if causal or window is not None:
            query_S1 = torch.arange(q.shape[-2], device=q.device)[:, None]
            key_1T = torch.arange(k.shape[-2], device=q.device)[None, :]
            scores_BHST = scores_BHST.masked_fill(hidden_keys(query_S1, key_1T, causal, window), float("-inf"))
    with detail_range("softmax"):
        # exp overflows in fp16 above ln(65504) = 11.09: with the row's maximum subtracted, no exponent is above 0.
        # Softmax does not change when a row is shifted, so the maximum's gradient is zero: detached, the scores
        # need not be saved for backward (one S x T tensor in three).
        maximum_BHS1 = scores_BHST.detach().amax(dim=-1, keepdim=True)
        exponentials_BHST = torch.exp(scores_BHST - maximum_BHS1)
        weights_BHST = exponentials_BHST / exponentials_BHST.sum(dim=-1, keepdim=True)
    with detail_range("attention output"):
        return weights_BHST @ v


def unsafe(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None
) -> Tensor:
    """The same with exp of the scores as they are: in fp16 a score above 11.09 makes infinity, in fp32 one above 88.7;
    and where all of a row lie far below zero, 0 / 0.
    """
    blind = blind_queries(q, k, window)
    if blind:
        return with_zeros(unsafe, blind, q, k, v, causal=causal, scale=scale, window=window)
    k, v = for_all_heads(q, k, v)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    with detail_range("attention scores"):
        scores_BHST = q @ k.transpose(-2, -1) * scale
        if causal or window is not None:
            query_S1 = torch.arange(q.shape[-2], device=q.device)[:, None]
            key_1T = torch.arange(k.shape[-2], device=q.device)[None, :]
            scores_BHST = scores_BHST.masked_fill(hidden_keys(query_S1, key_1T, causal, window), float("-inf"))
    with detail_range("softmax"):
        exponentials_BHST = torch.exp(scores_BHST)
        weights_BHST = exponentials_BHST / exponentials_BHST.sum(dim=-1, keepdim=True)
    with detail_range("attention output"):
        return weights_BHST @ v


def chunked(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Written out for CHUNK queries at a time, over the keys that any of them sees (Rabe & Staats 2021,
    arXiv:2112.05682, without their chunks of keys).

    At most CHUNK x T scores are alive. Backward computes each chunk's scores once more (`torch.utils.checkpoint`), and
    keeps queries, keys and values alone: kept by autograd, the chunks would make up the whole S x T again.
    """
    blind = blind_queries(q, k, window)
    if blind:
        return with_zeros(chunked, blind, q, k, v, causal=causal, scale=scale, window=window)
    queries, keys = q.shape[-2], k.shape[-2]
    recomputes = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
    outs: list[Tensor] = []
    for first in range(0, queries, CHUNK):
        after = min(first + CHUNK, queries)
        first_key = max(0, first - window + 1) if window is not None else 0
        after_key = min(after if causal else after + window - 1 if window is not None else keys, keys)
        rows = _rows(first, first_key, causal=causal, scale=scale, window=window)
        inputs = q[:, :, first:after], k[:, :, first_key:after_key], v[:, :, first_key:after_key]
        if recomputes:
            # Nothing here is random.
            out = checkpoint(rows, *inputs, use_reentrant=False, preserve_rng_state=False)
            assert isinstance(out, Tensor)
            outs.append(out)
        else:
            outs.append(rows(*inputs))
    return torch.cat(outs, dim=-2)


def _rows(
    first: int, first_key: int, *, causal: bool, scale: float | None, window: int | None
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention written out, for the queries from position `first` on over the keys from `first_key` on."""

    def rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = for_all_heads(q, k, v)
        scores_BHST = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if causal or window is not None:
            query_S1 = torch.arange(first, first + q.shape[-2], device=q.device)[:, None]
            key_1T = torch.arange(first_key, first_key + k.shape[-2], device=q.device)[None, :]
            scores_BHST = scores_BHST.masked_fill(hidden_keys(query_S1, key_1T, causal, window), float("-inf"))
        return scores_BHST.softmax(dim=-1) @ v

    return rows


def hidden_keys(query_S1: Tensor, key_1T: Tensor, causal: bool, window: int | None) -> Tensor:
    """(S, T): whether the query does not see the key."""
    if window is None:
        return key_1T > query_S1
    outside = query_S1 - key_1T >= window
    return outside | (key_1T > query_S1 if causal else key_1T - query_S1 >= window)


def for_all_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values once for each query head."""
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return k, v
    return k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def blind_queries(q: Tensor, k: Tensor, window: int | None) -> int:
    """How many queries, the last ones, see no key: those from T + w - 1 on, causal or not."""
    return 0 if window is None else max(0, q.shape[-2] - (k.shape[-2] + window - 1))


def with_zeros(
    function: AttentionFunction, blind: int, q: Tensor, k: Tensor, v: Tensor,
    *, causal: bool, scale: float | None, window: int | None,
) -> Tensor:  # fmt: skip
    """Attention of all queries but the last `blind`, and zeros for these."""
    out = function(q[:, :, :-blind], k, v, causal=causal, scale=scale, window=window)
    return F.pad(out, (0, 0, 0, blind))


# ---- PyTorch's


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None
) -> Tensor:
    """PyTorch's scaled_dot_product_attention; PyTorch chooses the backend. A sliding window becomes a mask (S, T)."""
    blind = blind_queries(q, k, window)
    if blind:
        return with_zeros(sdpa, blind, q, k, v, causal=causal, scale=scale, window=window)
    # The fused backends read rows of D numbers that lie side by side.
    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
    if scale is not None and scale <= 0:
        # Its CPU kernel scales what the mask has made -inf: NaN of 0 * -inf, and infinity of a negative scale.
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
    grouped = q.shape[1] != k.shape[1]
    if window is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    query_S1 = torch.arange(q.shape[-2], device=q.device)[:, None]
    key_1T = torch.arange(k.shape[-2], device=q.device)[None, :]
    seen_ST = ~hidden_keys(query_S1, key_1T, causal, window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen_ST, scale=scale, enable_gqa=grouped)


def _sdpa_with(backend: SDPBackend) -> AttentionFunction:
    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None
    ) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v, causal=causal, scale=scale, window=window)

    return attention


def _sdpa_efficient(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Not every release's kernel has grouped heads: keys and values are repeated for it."""
    k, v = for_all_heads(q, k, v)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return sdpa(q, k, v, causal=causal, scale=scale, window=window)


def _sdpa_flash(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None
) -> Tensor:
    """PyTorch's FlashAttention has causal squares alone, so that an oblong is cut: keys from S on nobody sees, and
    queries from T on see all keys.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        if not causal or queries == keys:
            return sdpa(q, k, v, causal=causal, scale=scale, window=window)
        if queries < keys:
            return sdpa(q, k[:, :, :queries], v[:, :, :queries], causal=True, scale=scale, window=window)
        square = sdpa(q[:, :, :keys], k, v, causal=True, scale=scale, window=window)
        return torch.cat([square, sdpa(q[:, :, keys:], k, v, causal=False, scale=scale, window=window)], dim=-2)


# ---- by name

IMPLEMENTATIONS: dict[Attention, AttentionFunction] = {
    "reference": reference,
    "sdpa": sdpa,
    "sdpa-math": _sdpa_with(SDPBackend.MATH),
    "sdpa-efficient": _sdpa_efficient,
    "sdpa-flash": _sdpa_flash,
    "sdpa-cudnn": _sdpa_with(SDPBackend.CUDNN_ATTENTION),
    "unsafe": unsafe,
    "chunked": chunked,
    "flash-tiled": flash_tiled,
}
"""Those that need no more than PyTorch's core. None of them checks its tensors."""


def implementation(name: Attention) -> AttentionFunction:
    """By name, whatever it supports (`core/attention_support.py` knows, and what `auto` stands for)."""
    if name == "flex":
        from stepscope.models.flex_attention import flex  # noqa: PLC0415  (takes half a second to import)

        return flex
    if name == "flash":
        from stepscope.kernels.flash_attention import flash_attention  # noqa: PLC0415  (needs Triton)

        return flash_attention
    return IMPLEMENTATIONS[name]


def fault_of_device(name: Attention, device_type: str) -> str | None:
    """What this machine lacks for the implementation: what is installed, and what its GPU can."""
    fault = fault_here(name, device_type)
    if fault is None and name == "flash" and device_type == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability < FLASH_CAPABILITY:
            needed, found = (".".join(map(str, version)) for version in (FLASH_CAPABILITY, capability))
            return f"needs a GPU of compute capability {needed} or higher, not {found}"
    return fault


def chosen_attention(workload: Workload, device_type: str) -> Attention:
    """What the workload's model runs here: what it names, or what `auto` picks. Raises an InputError that says what the
    named one lacks and which ones would work.
    """
    return attention_of(workload, device_type, here=fault_of_device)


def attention_for(workload: Workload, device_type: str) -> AttentionFunction:
    """The same as a function."""
    return implementation(chosen_attention(workload, device_type))
