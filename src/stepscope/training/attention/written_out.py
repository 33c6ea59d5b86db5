"""Attention written out in PyTorch's operators: with all scores at once, or for a chunk of queries at a time."""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stepscope.core.range_names import OUTPUT, SCORES, SOFTMAX
from stepscope.recording.ranges import detail_range
from stepscope.training.attention import AttentionFunction

# What the attentions share: which keys a query sees, and keys and values repeated for each head of queries.


def hidden_keys(query_S1: Tensor, key_1T: Tensor, causal: bool, window: int | None) -> Tensor:
    """A mask (S, T), bool: True where the query does not see the key."""
    if window is None:
        return key_1T > query_S1
    outside = query_S1 - key_1T >= window
    return outside | (key_1T > query_S1 if causal else key_1T - query_S1 >= window)


def hidden_scores(
    q: Tensor, k: Tensor, *, causal: bool, window: int | None, bounds: Tensor | None = None, first_query: int = 0
) -> Tensor | None:
    """A mask of the scores, bool: True where the query does not see the key. None where each query sees all keys.

    It is (S, T), or (B, 1, S, T) with the bounds of documents (kernels/documents.py). first_query: the position of the
    first query, where queries are the later part of a sequence.
    """
    hidden = None
    if causal or window is not None:
        query_S1 = torch.arange(first_query, first_query + q.shape[-2], device=q.device)[:, None]
        key_1T = torch.arange(k.shape[-2], device=q.device)[None, :]
        hidden = hidden_keys(query_S1, key_1T, causal, window)
    if bounds is None:
        return hidden
    outside = outside_documents(k, bounds)
    return outside if hidden is None else outside | hidden


def outside_documents(k: Tensor, bounds: Tensor) -> Tensor:
    """A mask (B, 1, S, T), bool: True where the key lies outside the query's document (kernels/documents.py)."""
    key_T = torch.arange(k.shape[-2], device=k.device)
    first_B1S1, after_B1S1 = bounds[:, :, None, :, None]
    return (key_T < first_B1S1) | (key_T >= after_B1S1)


def for_all_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (B, H, T, D), repeated so that each head of queries has its own."""
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return k, v
    return k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def fully_masked_queries(q: Tensor, k: Tensor, window: int | None) -> int:
    """Number of queries that see no key. They are the last ones, from position T + window - 1 on, causal or not."""
    return 0 if window is None else max(0, q.shape[-2] - (k.shape[-2] + window - 1))


def with_zeros(
    function: AttentionFunction, masked: int, q: Tensor, k: Tensor, v: Tensor,
    *, causal: bool, scale: float | None, window: int | None,
) -> Tensor:  # fmt: skip
    """The output for all queries: attention, then zeros for the last `masked`, which see no key."""
    out = function(q[:, :, :-masked], k, v, causal=causal, scale=scale, window=window)
    return F.pad(out, (0, 0, 0, masked))


# Attention written out.


CHUNK = 256
"""Queries per chunk."""


def reference(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None,
    bounds: Tensor | None = None, subtract_maximum: bool = True, first_query: int = 0, softcap: float | None = None,
    sinks: Tensor | None = None, slopes: Tensor | None = None, bias: Tensor | None = None,
    dropout: float = 0.0, seeds: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention written out: scores, mask, softmax with the maximum subtracted, weighted sum. `flash_attention` says
    what a softcap, sinks, slopes, a bias and dropout are; which weights that takes is its own, too.

    bounds: those of documents. first_query: the position of the first query, where queries are the later part of a
    sequence; without a window.
    """
    if bias is not None and bias.dim() == 2:
        bias = of_distances(bias, k.shape[-2])
    masked = fully_masked_queries(q, k, window)
    if masked:
        seen = None if bias is None else bias[..., :-masked, :]
        function = partial(
            reference, subtract_maximum=subtract_maximum, softcap=softcap, sinks=sinks, slopes=slopes, bias=seen,
            dropout=dropout, seeds=seeds,
        )  # fmt: skip
        return with_zeros(function, masked, q, k, v, causal=causal, scale=scale, window=window)
    k, v = for_all_heads(q, k, v)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    with detail_range(SCORES):
        scores_BHST = q @ k.transpose(-2, -1) * scale
        scores_BHST = _changed(scores_BHST, first_query, softcap, slopes, bias)
        if causal or window is not None:
            # The mask has no name: a name would keep it alive beside the softmax where no graph needs it.
            query_S1 = torch.arange(first_query, first_query + q.shape[-2], device=q.device)[:, None]
            key_1T = torch.arange(k.shape[-2], device=q.device)[None, :]
            scores_BHST = scores_BHST.masked_fill(hidden_keys(query_S1, key_1T, causal, window), float("-inf"))
        if bounds is not None:
            scores_BHST = scores_BHST.masked_fill(outside_documents(k, bounds), float("-inf"))
        if sinks is not None:
            # One more column, without a value.
            sinks_BHS1 = sinks.to(q.dtype)[:, None, None].expand(*scores_BHST.shape[:3], 1)
            scores_BHST = torch.cat([scores_BHST, sinks_BHS1], dim=-1)
    with detail_range(SOFTMAX):
        if subtract_maximum:
            # exp overflows in fp16 above ln(65504) = 11.09: with the row's maximum subtracted, no exponent is above 0.
            # Softmax does not change when a row is shifted, so the maximum's gradient is zero: detached, the scores
            # need not be saved for backward (one S x T tensor in three).
            maximum_BHS1 = scores_BHST.detach().amax(dim=-1, keepdim=True)
            if bias is not None:  # it may hide all keys of a query
                maximum_BHS1 = maximum_BHS1.masked_fill(maximum_BHS1 == -math.inf, 0)
            exponentials_BHST = torch.exp(scores_BHST - maximum_BHS1)
        else:
            exponentials_BHST = torch.exp(scores_BHST)
        # The sums have no name either: without a graph they go before the output is made.
        weights_BHST = exponentials_BHST / _sums(exponentials_BHST, bias)
    if sinks is not None:
        weights_BHST = weights_BHST[..., :-1]
    if dropout:
        weights_BHST = weights_BHST * dropout_factors(weights_BHST, dropout, seeds)
    with detail_range(OUTPUT):
        return weights_BHST @ v


def _changed(
    scores_BHST: Tensor, first_query: int, softcap: float | None, slopes: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Scores with a softcap, ALiBi's slopes and a bias, where these are given."""
    if softcap is not None:
        scores_BHST = torch.tanh(scores_BHST / softcap) * softcap
    if slopes is not None:
        queries, keys = scores_BHST.shape[-2:]
        query_S1 = torch.arange(first_query, first_query + queries, device=slopes.device)[:, None]
        distance_ST = (query_S1 - torch.arange(keys, device=slopes.device)).abs()
        scores_BHST = scores_BHST - slopes.to(scores_BHST.dtype)[:, None, None] * distance_ST
    return scores_BHST if bias is None else scores_BHST + bias.to(scores_BHST.dtype)


def _sums(exponentials_BHST: Tensor, bias: Tensor | None) -> Tensor:
    """The sums of rows (B, H, S, 1); 1 where a bias hides all keys."""
    sums_BHS1 = exponentials_BHST.sum(dim=-1, keepdim=True)
    return sums_BHS1 if bias is None else sums_BHS1.masked_fill(sums_BHS1 == 0, 1)


def of_distances(bias: Tensor, keys: int) -> Tensor:
    """(H, S, T) of a bias by distance, (H, S + T - 1): of query i and key j, the number j - i + S - 1."""
    queries = bias.shape[1] - keys + 1
    query_S1 = torch.arange(queries, device=bias.device)[:, None]
    return bias[:, torch.arange(keys, device=bias.device) - query_S1 + queries - 1]


_PHILOX = (0xD2511F53, 0xCD9E8D57)
"""The multipliers of Philox 4x32 (Salmon 2011, doi:10.1145/2063384.2063405), then what its key grows by in a round."""
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def dropout_factors(weights: Tensor, dropout: float, seeds: Tensor | None) -> Tensor:
    """What dropout multiplies weights (B, H, S, T) by: 0, or 1 over the probability of being kept, to the nearest 256th
    but for 0 and 1. The numbers are those of the kernels (kernels/flash/tiles.py); without seeds, of PyTorch's
    generator."""
    kept = 256 - min(max(1, round(dropout * 256)), 255)
    if seeds is None:
        drawn = torch.randint(256, weights.shape, device=weights.device)
    else:
        drawn = dropout_numbers(weights.shape, seeds)
    return (drawn < kept).to(weights.dtype) * (256 / kept)


def dropout_numbers(shape: torch.Size, seeds: Tensor) -> Tensor:
    """Numbers of 8 bits, (B, H, S, T) int64, of seven rounds of Philox with the counters (query, 2 (key // 32) + 0 and
    1, head counted through the batches, offset): of their eight words the first has the lowest bits of 32 keys."""
    batches, heads, queries, keys = shape
    place = [torch.arange(size, device=seeds.device) for size in (batches * heads, queries, -(-keys // 32) * 2)]
    head, query, half = torch.meshgrid(*place, indexing="ij")
    seed, offset = seeds[0], (seeds[1] & _LOW).expand_as(head)
    low, high, counter = seed & _LOW, (seed >> 32) & _LOW, [query, half, head, offset]
    for _ in range(7):
        first, second = (_wide_product(each, factor) for each, factor in zip(counter[::2], _PHILOX, strict=True))
        counter = [second[0] ^ counter[1] ^ low, second[1], first[0] ^ counter[3] ^ high, first[1]]
        low, high = (low + _WEYL[0]) & _LOW, (high + _WEYL[1]) & _LOW
    words = torch.stack(counter, dim=-1).view(batches, heads, queries, -1, 8)
    key = torch.arange(32, device=seeds.device)
    numbers = torch.zeros((), dtype=torch.int64, device=seeds.device)
    for bit in range(8):
        numbers = numbers + ((words[..., bit, None] >> key & 1) << bit)
    return numbers.flatten(-2)[..., :keys]


def _wide_product(number: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits of a product of numbers of 32 bits, in int64: by halves, since 64 bits have a
    sign."""
    below, above = (number & 0xFFFF) * factor, (number >> 16) * factor
    middle = above + (below >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (below & 0xFFFF)


def unsafe(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Attention written out without subtracting the row's maximum: exp overflows to infinity for a score above 11.09 in
    fp16, 88.7 in fp32; a row whose scores all lie far below zero gives 0 / 0.
    """
    return reference(q, k, v, causal=causal, scale=scale, window=window, subtract_maximum=False)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Attention written out for CHUNK queries at a time, over the keys that any of them sees (Rabe & Staats 2021,
    arXiv:2112.05682, without their chunks of keys).

    At most CHUNK x T scores are alive. Backward computes each chunk's scores once more (`torch.utils.checkpoint`), and
    keeps queries, keys and values alone: kept by autograd, the chunks would make up the whole S x T again.
    """
    masked = fully_masked_queries(q, k, window)
    if masked:
        return with_zeros(chunked, masked, q, k, v, causal=causal, scale=scale, window=window)
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
            # Nothing here is random, so no state of a generator is kept.
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
