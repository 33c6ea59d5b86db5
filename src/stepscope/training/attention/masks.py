"""What the attentions share: which keys a query sees, and keys and values repeated for each head of queries."""

import torch
import torch.nn.functional as F
from torch import Tensor

from stepscope.training.attention import AttentionFunction


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
