"""Work: the FLOPs and bytes of an operation or a step, with the convention that counted them; those of operations.

FLOPs: a product's multiply-add counts two. Elsewhere each +, -, *, /, maximum and elementary function (exp, log, sqrt,
tanh, erf) of a floating-point number counts one; copies, selections and comparisons count none. The numbers per element
are those of the formula as written in each docstring; a kernel may take more or fewer. Bytes: each operand read once,
each result written once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from stepscope.core.units import MIB

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

    m and v have the size of p and g unless `bytes_per_moment` says another. A master weight is read and written, too; p
    is then only written, unless the master beside it is no larger than p, and only what p has not of it. FLOPs are
    elementwise and not model FLOPs; they are left at 0, since the bytes are what bounds this step.
    """
    moments = 2 * (bytes_per_element if bytes_per_moment is None else bytes_per_moment)
    read = bytes_per_master + (bytes_per_element if bytes_per_master <= bytes_per_element else 0)
    return Work(
        flops=0,
        bytes_read=parameters * (bytes_per_element + read + moments),
        bytes_written=parameters * (bytes_per_element + bytes_per_master + moments),
    )


def bytes_of_partial_sums(
    shape: Sequence[int], stride: Sequence[int], over: int | Sequence[int] | None, itemsize: int
) -> int:
    """Bytes in which blocks on CUDA leave their parts of sums over a tensor's slower dimensions, as those of a bias's
    gradient: the sums in fp32, by the blocks of each and what one block sums at once (ReduceConfig of
    ATen/native/cuda/Reduce.cuh). On a Hopper GPU; another one's processors and threads change it for few sizes."""
    dims = len(shape)
    summed = {dim % dims for dim in ([over] if isinstance(over, int) else over or range(dims))}
    reduced = _coalesced([(shape[dim], stride[dim]) for dim in range(dims) if dim in summed])
    kept = _coalesced([(shape[dim], stride[dim]) for dim in range(dims) if dim not in summed])
    if not reduced or not kept or reduced[0][1] < kept[0][1]:
        return 0  # sums of neighbours: their parts are as small as the output
    inputs, outputs = (math.prod(size for size, _ in of) for of in (reduced, kept))
    vector = math.gcd(4, kept[0][0], *(step for _, step in [*reduced, *kept[1:]])) if kept[0][1] == 1 else 1
    threads = 512 // vector
    wide, high = (min(threads, 1 << (max(1, n).bit_length() - 1)) for n in (outputs // vector, inputs))
    height = min(high, threads // min(wide, 32))
    width = min(wide, threads // height)
    if inputs < min(16 * height, 256):
        return 0
    of_a_thread, groups = -(-inputs // height), -(-(outputs // vector) // width)
    room = _MULTIPROCESSORS * (_THREADS // (width * height))
    if of_a_thread < 256 or groups > room:
        return 0
    blocks = max(min(-(-room // groups), -(-of_a_thread // 16)), -(-of_a_thread // 256))
    return max(4, itemsize) * outputs * blocks * width * vector if blocks > 1 else 0


@dataclass(frozen=True, slots=True)
class Summed:
    """A tensor that is summed, and over which dimensions."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    over: int | list[int] | None
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of the parts of its sums."""
        return bytes_of_partial_sums(self.shape, self.stride, self.over, self.itemsize)


def bytes_of_convolution(
    x: Sequence[int], weight: Sequence[int], y: Sequence[int], itemsize: int, *, groups: int, plain: bool, sums: bool
) -> int:
    """Bytes that cuDNN takes for a convolution beyond its result, as large as they were measured on an H200, but for
    rare shapes (results/h200/convolutions/workspaces.json): copies of its operands in another layout, and partial sums.

    x (N, C, *sides), weight, y (N, K, *sides). plain: a kernel of one place without strides and padding, a product of
    matrices: it takes sums of each sample in fp32, where the largest that was seen, in a ResNet-50, are 32 MiB. Those
    of few channels and of small images in 16 bits are copied all the same. sums: the gradient of the weight is asked
    for. A depthwise one has kernels of PyTorch's own, which take nothing.
    """
    if groups > 1 and groups == x[1]:
        return 0
    image, out, kernel = (itemsize * math.prod(sizes) for sizes in (x, y, weight))
    if not plain:
        return image + out + kernel + (8 * MIB if sums else MIB)
    if not sums:
        return MIB
    if min(x[1], y[1]) <= 32:
        return image + out + kernel + 2 * MIB
    if itemsize == 2 and math.prod(x[2:]) <= 256:
        return image + out
    return min(x[0] * 4 * math.prod(weight), 32 * MIB)


_MULTIPROCESSORS, _THREADS = 132, 2048
"""The multiprocessors of a Hopper GPU, and the threads that each runs at once."""


def _coalesced(dims: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sizes and strides, the fastest first, where those that follow each other in memory are one."""
    merged: list[tuple[int, int]] = []
    for size, stride in sorted(dims, key=lambda each: each[1]):
        if size > 1:
            if merged and stride == math.prod(merged[-1]):
                merged[-1] = (merged[-1][0] * size, merged[-1][1])
            else:
                merged.append((size, stride))
    return merged
