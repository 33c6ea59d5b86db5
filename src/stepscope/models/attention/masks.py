"""What the attentions share: which keys a query sees, and keys and values repeated for each head of queries."""

import torch.nn.functional as F
from torch import Tensor

from stepscope.models.attention import AttentionFunction


def hidden_keys(query_S1: Tensor, key_1T: Tensor, causal: bool, window: int | None) -> Tensor:
    """A mask (S, T), bool: True where the query does not see the key."""
    if window is None:
        return key_1T > query_S1
    outside = query_S1 - key_1T >= window
    return outside | (key_1T > query_S1 if causal else key_1T - query_S1 >= window)


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
