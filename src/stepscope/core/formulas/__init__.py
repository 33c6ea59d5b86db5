"""Work: the FLOPs and bytes of an operation or a step, with the convention that counted them; those of operations.

FLOPs: a product's multiply-add counts two. Elsewhere each +, -, *, /, maximum and elementary function (exp, log, sqrt,
tanh, erf) of a floating-point number counts one; copies, selections and comparisons count none. The numbers per element
are those of the formula as written in each docstring; a kernel may take more or fewer. Bytes: each operand read once,
each result written once.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]

CausalConvention = Literal["half", "full"]
"""Causal attention counted as the half that is needed, or as the full square that a plain product computes."""


class Convention(msgspec.Struct, frozen=True, kw_only=True):
    """What a FLOP count includes. Published figures differ by 2x when this goes unsaid."""

    causal: CausalConvention = "half"
    recompute: bool = False

    def __str__(self) -> str:
        return f"causal {self.causal}, recompute {'counted' if self.recompute else 'not counted'}"


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs (a multiply-add counts two) and the fewest bytes that must cross device memory.

    bytes are None where no lower bound is stated. Adding unlike conventions raises ValueError.
    """

    flops: Count
    bytes_read: Count | None = None
    bytes_written: Count | None = None
    convention: Convention = Convention()

    def __add__(self, other: "Work") -> "Work":
        if self.convention != other.convention:
            raise ValueError(f"unlike FLOP conventions: {self.convention} and {other.convention}")
        return Work(
            flops=self.flops + other.flops,
            bytes_read=_sum(self.bytes_read, other.bytes_read),
            bytes_written=_sum(self.bytes_written, other.bytes_written),
            convention=self.convention,
        )

    @property
    def bytes_moved(self) -> int | None:
        return _sum(self.bytes_read, self.bytes_written)


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


SOFTMAX_FLOPS = 5
"""y = exp(x - max) / sum: maximum, subtraction, exp, sum, division. log-softmax too: its last is a subtraction."""


def matmul_work(m: int, n: int, k: int, bytes_per_element: int, batch: int = 1) -> Work:
    """(m, k) x (k, n): a multiply and an add for each of m*n*k; each operand read once, the result written once."""
    return Work(
        flops=2 * batch * m * n * k,
        bytes_read=batch * (m * k + k * n) * bytes_per_element,
        bytes_written=batch * m * n * bytes_per_element,
    )


def elementwise_work(elements: int, flops_per_element: int, *, bytes_read: int, bytes_written: int) -> Work:
    """Work of a function that is applied to each element."""
    return Work(flops=elements * flops_per_element, bytes_read=bytes_read, bytes_written=bytes_written)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSizes:
    """Sizes of q (batch, heads, queries, head_dim), k (batch, .., keys, head_dim), v (batch, .., keys, value_dim)."""

    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int


def attention_flops(sizes: AttentionSizes, causal: CausalConvention, *, backward: bool = False) -> int:
    """FLOPs of the two products of softmax(q k^T) v, or of fused attention's backward; the softmax is not counted.

    4 batch heads queries keys head_dim where both dims are one, half of it counted causal (Dao 2023, FlashAttention-2,
    section 4.1). Backward: q k^T once more, dv = p^T do, dp = do v^T, dq = ds k, dk = ds^T q. These are five products
    where forward has two, 2.5 times its FLOPs where both dims are one; model FLOPs, which leave the recomputed one out,
    would be twice forward's.
    """
    depth = sizes.head_dim + sizes.value_dim
    if backward:
        depth = 3 * sizes.head_dim + 2 * sizes.value_dim
    flops = 2 * sizes.batch * sizes.heads * sizes.queries * sizes.keys * depth
    return flops // 2 if causal == "half" else flops


def adamw_work(
    parameters: int, bytes_per_element: int, bytes_per_moment: int | None = None, bytes_per_master: int = 0
) -> Work:
    """Work of one AdamW step (Loshchilov and Hutter 2019, algorithm 2), which reads p, g, m, v and writes p, m, v.

    m and v have the size of p and g unless `bytes_per_moment` says another. With a master weight p is only written, and
    the master is read and written. FLOPs are elementwise and not model FLOPs; they are left at 0, since the bytes are
    what bounds this step.
    """
    moments = 2 * (bytes_per_element if bytes_per_moment is None else bytes_per_moment)
    return Work(
        flops=0,
        bytes_read=parameters * (bytes_per_element + (bytes_per_master or bytes_per_element) + moments),
        bytes_written=parameters * (bytes_per_element + bytes_per_master + moments),
    )
