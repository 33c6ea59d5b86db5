"""FlashAttention-2 tile by tile in plain PyTorch, forward and backward: a lesson, and the reference for the kernel.

The source is Tri Dao 2023, FlashAttention-2 (arXiv:2307.08691), algorithms 1 and 2. It computes attention of queries Q
(S, D) to keys K and values V (T, D), with scores q k^T * scale, and never holds S x T numbers.

Forward loops over tiles of queries Q_i. For the keys seen so far it holds, for each row, the maximum m of the scores,
the sum l of exp(score - m), and the sum O of exp(score - m) v. A tile of keys K_j, V_j adds its scores S_ij:

    m'  = max(m, rowmax(S_ij))
    P   = exp(S_ij - m')
    l   = exp(m - m') l + rowsum(P)       the old sum is rescaled from the old maximum to the new one
    O   = exp(m - m') O + P V_j
    m   = m'

After the last tile, O_i = O / l, once, and L_i = m + log(l), the logsumexp of the row. From L, backward recomputes any
weight of the softmax as exp(s - L).

Backward has dO, the gradient of O. The softmax's derivative is dS_ij = P_ij (dP_ij - sum_k P_ik dP_ik). The sum over
all keys is sum_k P_ik (dO_i . v_k) = dO_i . O_i: one number for each row, known before any tile is visited.

    D = rowsum(dO * O)
    for each tile of keys j, for each tile of queries i:
        P   = exp(Q_i K_j^T scale - L_i)
        dV_j += P^T dO_i
        dS  = P * (dO_i V_j^T - D_i)
        dQ_i += dS K_j scale
        dK_j += dS^T Q_i scale

Tiles in which no query sees any key are never visited. Tiles in which every query sees every key are not masked. Sums
and products are in fp32 for 16-bit inputs, and in the inputs' dtype otherwise (in float64, `gradcheck` passes).
Backward keeps Q, K, V, O and L: (4 D + 1) numbers for each position of a head, whatever S is.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stepscope.core.errors import InputError
from stepscope.kernels.operators import as_autocast, refuse_transforms

QUERY_TILE = 64
KEY_TILE = 64


@dataclass(frozen=True, kw_only=True)
class Sight:
    """The keys that each query sees. Query i sees key j if j <= i with causal, and if |i - j| < window with a window.

    Unequal lengths are aligned at the top left. Tiles are slices of positions.
    """

    queries: int
    keys: int
    causal: bool
    window: int | None = None

    def query_tiles(self) -> Iterator[slice]:
        return _tiles(0, self.queries, QUERY_TILE)

    def key_tiles(self, rows: slice) -> Iterator[slice]:
        """The tiles of keys in which some of these queries sees a key."""
        first = 0 if self.window is None else max(0, rows.start - self.window + 1)
        after = self.keys
        if self.causal:
            after = min(after, rows.stop)
        elif self.window is not None:
            after = min(after, rows.stop - 1 + self.window)
        if first >= after:
            return iter(())
        return _tiles(first // KEY_TILE * KEY_TILE, after, KEY_TILE)

    def sees_all(self, rows: slice, columns: slice) -> bool:
        """Whether each of these queries sees each of these keys."""
        if self.causal and columns.stop - 1 > rows.start:
            return False
        if self.window is None:
            return True
        return rows.stop - 1 - columns.start < self.window and columns.stop - 1 - rows.start < self.window

    def hidden(self, rows: slice, columns: slice, device: torch.device) -> Tensor:
        """A mask (rows, columns), True where the query does not see the key."""
        ahead = (
            torch.arange(columns.start, columns.stop, device=device)[None, :]
            - torch.arange(rows.start, rows.stop, device=device)[:, None]
        )
        hidden = ahead > 0 if self.causal else torch.zeros_like(ahead, dtype=torch.bool)
        return hidden if self.window is None else hidden | (ahead.abs() >= self.window)


class FlashAttentionTiled(torch.autograd.Function):
    """`apply(q, k, v, is_causal=False, scale=None, window=None)` on (..., seq, head_dim), leading dimensions alike."""

    @classmethod
    def apply(cls, *args: Any, **options: Any) -> Any:
        """Run forward and record backward, as `Function.apply` does; raises inside a transform of torch.func."""
        refuse_transforms("attention flash-tiled", "attention flash, or reference")
        return super().apply(*args, **options)

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        q, k, v = as_autocast(q, k, v)  # autograd casts the gradients back
        _check_inputs(q, k, v, window)
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        sight = Sight(queries=q.shape[-2], keys=k.shape[-2], causal=is_causal, window=window)
        with torch.autocast(q.device.type, enabled=False):  # autocast would make the sums in 16 bits too
            out, logsumexp = _forward(q, k, v, sight, scale)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.sight, ctx.scale = sight, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.autocast(gradient.device.type, enabled=False):
            gradients = _backward(ctx.saved_tensors, gradient, ctx.sight, ctx.scale)
        return *gradients, None, None, None


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> None:
    """Raise an InputError of one line for shapes and dtypes that the loops would broadcast, cut off or fail on."""
    shapes = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
    if q.dim() < 2 or k.shape != v.shape or q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
        raise InputError(
            "attention flash-tiled takes q (..., S, D) and k, v (..., T, D) of the same leading dimensions, "
            f"not {shapes}"
        )
    if 0 in (*q.shape[-2:], k.shape[-2]):
        raise InputError(f"attention flash-tiled has nothing to do on an empty sequence or head ({shapes})")
    if not (q.is_floating_point() and q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        kinds = ", ".join(f"{str(t.dtype).removeprefix('torch.')} on {t.device}" for t in (q, k, v))
        raise InputError(f"attention flash-tiled takes q, k and v of one floating dtype on one device, not {kinds}")
    if window is not None and window < 1:
        raise InputError(f"attention flash-tiled takes a window of 1 or more, not {window}")


def flash_tiled(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None, window: int | None = None
) -> Tensor:
    """FlashAttentionTiled on (B, H, S, D). Keys and values of fewer heads are repeated for the query heads."""
    group = q.shape[1] // k.shape[1]
    if group != 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    out = FlashAttentionTiled.apply(q, k, v, causal, scale, window)
    assert isinstance(out, Tensor)
    return out


def _forward(q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float) -> tuple[Tensor, Tensor]:
    """Algorithm 1: the output (..., S, D), and the logsumexp (..., S) of its scores, -inf for a query without a key."""
    wide = _accumulator(q)
    out = torch.empty_like(q)
    logsumexp = torch.empty(q.shape[:-1], dtype=wide, device=q.device)
    for rows in sight.query_tiles():
        q_tile = q[..., rows, :].to(wide) * scale
        maximum = q_tile.new_full(q_tile.shape[:-1], -math.inf)
        total = torch.zeros_like(maximum)
        summed = torch.zeros_like(q_tile)
        for columns in sight.key_tiles(rows):
            scores = _scores(q_tile, k, rows, columns, sight)
            higher = torch.maximum(maximum, scores.amax(dim=-1))
            # A query that has seen no key yet has the maximum -inf, which must not shift: -inf - -inf is NaN.
            shift = higher.masked_fill(higher == -math.inf, 0)
            exponentials = torch.exp(scores - shift[..., None])
            rescale = torch.exp(maximum - shift)
            total = rescale * total + exponentials.sum(dim=-1)
            summed = rescale[..., None] * summed + exponentials @ v[..., columns, :].to(wide)
            maximum = higher
        divisor = total.masked_fill(total == 0, 1)
        out[..., rows, :] = (summed / divisor[..., None]).to(q.dtype)
        logsumexp[..., rows] = maximum + total.log()
    return out, logsumexp


def _backward(saved: tuple[Tensor, ...], gradient: Tensor, sight: Sight, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2: the gradients of q, k and v. `saved` has q, k, v, the output and the logsumexp."""
    q, k, v, out, logsumexp = saved
    wide = _accumulator(q)
    delta = (gradient.to(wide) * out.to(wide)).sum(dim=-1)
    shift = logsumexp.masked_fill(logsumexp == -math.inf, 0)
    for_q, for_k, for_v = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (q, k, v))
    # The tiles are independent. In the algorithm, tiles of keys are the outer loop, so that a thread block owns its dK
    # and dV, and only dQ gets sums from several. In a single thread either order makes the same sums.
    for rows in sight.query_tiles():
        q_tile, gradient_tile = q[..., rows, :].to(wide) * scale, gradient[..., rows, :].to(wide)
        for columns in sight.key_tiles(rows):
            scores = _scores(q_tile, k, rows, columns, sight)
            weights = torch.exp(scores - shift[..., rows, None])
            for_v[..., columns, :] += weights.transpose(-2, -1) @ gradient_tile
            for_weights = gradient_tile @ v[..., columns, :].to(wide).transpose(-2, -1)
            for_scores = weights * (for_weights - delta[..., rows, None])
            for_q[..., rows, :] += for_scores @ k[..., columns, :].to(wide) * scale
            for_k[..., columns, :] += for_scores.transpose(-2, -1) @ q_tile
    return for_q.to(q.dtype), for_k.to(k.dtype), for_v.to(v.dtype)


def _scores(q_tile: Tensor, k: Tensor, rows: slice, columns: slice, sight: Sight) -> Tensor:
    """The scores (..., rows, columns) of scaled queries; -inf where the query does not see the key."""
    scores = q_tile @ k[..., columns, :].to(q_tile.dtype).transpose(-2, -1)
    if sight.sees_all(rows, columns):
        return scores
    return scores.masked_fill(sight.hidden(rows, columns, scores.device), -math.inf)


def _accumulator(q: Tensor) -> torch.dtype:
    return torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype


def _tiles(first: int, after: int, size: int) -> Iterator[slice]:
    for start in range(first, after, size):
        yield slice(start, min(start + size, after))
